"""Readers of what a hung job left, as events: Flight Recorder dumps and RAS output.

Both say what a rank launched, not how long it took: a launch becomes a mark with its size, number and state, a count
of RAS a counter. Who holds up the job is told by `netlayer.observe.diagnose`, whose evidence knows more than these.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime

from netlayer.observe import flight_recorder, ras
from netlayer.observe.events import Counter, Event, Mark, Origin, format_ranks

FLIGHT_RECORDER, RAS = "flight_recorder", "ras"


def launches(dump: flight_recorder.Dump) -> Iterator[Event]:
    """A mark for each collective, send or receive that a dump has."""
    origin = Origin(source=FLIGHT_RECORDER, rank=dump.rank)
    members = {name: format_ranks(ranks) for name, (_, ranks) in dump.members.items() if ranks}
    for entry in dump.entries:
        launch = entry.launch
        attributes = {
            "group": entry.group[0][:200],
            "group_ranks": members.get(entry.group[0]),
            "seq": launch.seq,
            "size": launch.size[:200],
            "state": "complete" if launch.done else "started" if launch.started else "launched",
            "place": launch.place[:200] or None,
        }
        known = {key: value for key, value in attributes.items() if value is not None}
        yield Mark(origin, f"launch {launch.kind}"[:200], launch.created_ns, attributes=known)


def counts(queries: Sequence[ras.Query]) -> Iterator[Event]:
    """A counter for each rank, communicator and kind of operation of RAS's answers; a rank is the communicator's."""
    for query in queries:
        at_ns = _time_ns(query.time)
        for comm in query.communicators:
            for kind, by_rank in comm.counts.items():
                for rank, count in by_rank.items():
                    attributes = {"communicator": comm.name[:200], "process": rank.process[:200]}
                    origin = Origin(source=RAS, rank=rank.rank)
                    yield Counter(origin, f"ras.{kind}"[:200], at_ns, at_ns, float(count), attributes=attributes)
            for rank, state in {**comm.states, **comm.missing, **comm.errors}.items():
                text = f"{comm.name}: {state}"[:500]
                yield Mark(Origin(source=RAS, rank=rank.rank), "warning", at_ns, text=text)
        for line in (*query.processes, *query.events):
            yield Mark(Origin(source=RAS), "warning", at_ns, text=line[:500])


def _time_ns(text: str) -> int:
    """Nanoseconds since 1970 of an answer's time stamp, 0 where it has none."""
    try:
        stamp = datetime.fromisoformat(text.replace(" UTC", "+00:00"))
    except ValueError:
        return 0
    return round((stamp if stamp.tzinfo else stamp.replace(tzinfo=UTC)).timestamp() * 1e9)
