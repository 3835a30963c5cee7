"""Culprit where a run's record stops: each rank's place in the last step, and who waits for whom.

[Note: where a rank is] An operation that never ends is not in the record. What a rank does at the end follows from
its last whole step: in the order in which operations begin, the first of them that the last step lacks is the one
that it is in. If that is its own work (a pass, the optimizer, data), it waits for nobody; if it is a collective or a
message, it waits for those of the group that are not in the same one.

[Note: silence] A record that stops is no proof of a fault, for a run may just have been ended. A rank is named as
silent only where the others wait for it, directly or through others, and evidence goes on for a while after the last
thing that it did: counters, marks, or the present time where the files are being written. Of several ranks in one
operation the one is named whose own readings went on until it stopped and then ended, while those of the others go on.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from netlayer.layout import describe_ranks
from netlayer.observe.events import Segment, parse_ranks

MIN_SILENCE_S = 5.0
MIN_SILENCE_STEPS = 3.0
_OWN_WORK = ("forward", "backward", "weights", "optimizer", "data")
_WAITS = ("collective", "wait")


class Operation(NamedTuple):
    """One operation of a step: what tells it from the others of that step on its rank."""

    segment: str
    name: str
    group: str
    micro_batch: int
    chunk: int
    number: int
    """Which of several that are alike."""

    def __str__(self) -> str:
        text = self.name if self.segment in ("collective", "wait") else self.segment
        text += f" ({self.group})" if self.group else ""
        return text + (f" of micro-batch {self.micro_batch}" if self.micro_batch >= 0 else "")


@dataclass(frozen=True)
class Place:
    """A rank at the end of the record.

    Args:
        step: that it is in.
        operation: that it is in; None: not known.
        members: ranks that take part in that operation; empty: it is its own work.
        last_ns: end of the last thing that it recorded, on the reference clock.
    """

    rank: int
    step: int
    operation: Operation | None
    members: Sequence[int]
    last_ns: int


@dataclass(frozen=True)
class Stop:
    """The end of a record.

    Args:
        state: `silent`: one rank, or several, hold the others up; `suspected`: it is one of several ranks, and nothing
            tells which; `running`: the record goes on to its end; `ended`: as intended; `cannot tell`.
        line: the same for a person.
        silent: those ranks.
        places: of the ranks, where they could be told.
        waiting: for each rank that waits for one of them, directly or not, that rank and how many ranks lie between.
        alike: ranks whose record ends in the same operation as that of the silent one, and whose readings go on.
        silence_s: time since the last operation that is recorded; 0: the run stands still for no known reason.
    """

    state: str
    line: str
    silent: tuple[int, ...] = ()
    places: Mapping[int, Place] = field(default_factory=dict)
    waiting: Mapping[int, tuple[int, int]] = field(default_factory=dict)
    alike: tuple[int, ...] = ()
    silence_s: float = 0.0


def judge_stop(
    segments: Iterable[Segment], until_ns: int, step_s: float, *, ended: bool, last_sign_ns: Mapping[int, int]
) -> Stop:
    """Say who holds up a run whose record stops.

    Args:
        segments: of the last start: each rank's two last steps, in any order.
        until_ns: how far evidence of any kind goes.
        step_s: a typical step.
        ended: the run says that it ended as intended.
        last_sign_ns: the last reading or mark of each rank that has any.
    """
    if ended:
        return Stop("ended", "the run ended as intended")
    rows: dict[int, dict[int, list[Segment]]] = defaultdict(lambda: defaultdict(list))
    for event in segments:
        if event.origin.rank is not None and event.step is not None:
            rows[event.origin.rank][event.step].append(event)
    places = {rank: _place(rank, steps) for rank, steps in rows.items()}
    if not places:
        return Stop("cannot tell", "no rank has a step")
    last_ns = max(place.last_ns for place in places.values())
    silence_s = (until_ns - last_ns) / 1e9
    if silence_s < max(MIN_SILENCE_S, MIN_SILENCE_STEPS * step_s):
        return Stop("running", "the record goes on to its end", places=places)
    working = [rank for rank, place in places.items() if place.operation is not None and not place.members]
    waiting, silent = _waiting(places, working)
    suspects, candidates = len(silent), silent
    # Of ranks in one operation only the dead one gives no sign any more: that of all others goes on. A rank that gave
    # none, or none for long before it stopped (its counters were never read, or are slow), is not told by that.
    middle_ns = (last_ns + max(last_sign_ns.values(), default=last_ns)) // 2
    alive = {rank for rank in places if last_sign_ns.get(rank, last_ns) > middle_ns}
    quiet = [rank for rank in silent if rank not in alive]
    lead_ns = round(max(MIN_SILENCE_S, MIN_SILENCE_STEPS * step_s) * 1e9)
    is_certain = all(last_sign_ns.get(rank, 0) >= places[rank].last_ns - lead_ns for rank in quiet)
    if suspects > 1 and 0 < len(quiet) < suspects and is_certain and len(alive) >= len(places) / 2:
        silent = quiet
    operations = {(places[rank].step, places[rank].operation) for rank in silent}
    others = len(places) - len(waiting) - suspects
    if not silent or len(operations) > 1 or len(silent) > max(1, len(places) // 4) or others > len(places) / 4:
        line = f"nothing is recorded in the last {silence_s:.0f} s, and who waits for whom does not show"
        return Stop("cannot tell", line, (), places)
    if len(silent) < suspects:
        root = silent[0]
        waiting = {rank: (other if other in silent else root, between) for rank, (other, between) in waiting.items()}
    [(step, operation)] = operations
    where = f"in {operation} of step {step}"
    num = f"{len(waiting)} ranks wait" if len(waiting) != 1 else "1 rank waits"
    since = f"nothing is recorded in the last {silence_s:.0f} s"
    alike = [rank for rank in candidates if rank not in silent]
    rest = f"; of {others} others it is not known" if others else ""
    if len(silent) == 1:
        # With this rank and those alike the numbers add up to all ranks.
        why = _why(silent[0], alike, until_ns, last_sign_ns)
        line, state = f"rank {silent[0]} is silent, {where}; {num} for it{rest}; {since}; why this one: {why}", "silent"
    else:
        line = f"one of {describe_ranks(silent)} is silent, {where}, and nothing shows which; {num} for them{rest}"
        line += f"; {since}"
        state = "suspected"
    return Stop(state, line, tuple(silent), places, waiting, tuple(alike), silence_s)


def _why(rank: int, alike: Sequence[int], until_ns: int, last_sign_ns: Mapping[int, int]) -> str:
    """Say what tells a silent rank from the others."""
    if not alike:
        return "no other rank in work of its own is waited for"
    their = "their" if len(alike) > 1 else "its"
    return (
        f"{describe_ranks(alike)} stopped in the same operation, but {their} readings (counters, marks) go on; "
        f"of rank {rank} the last is {(until_ns - last_sign_ns[rank]) / 1e9:.0f} s old"
    )


def _place(rank: int, steps: Mapping[int, Sequence[Segment]]) -> Place:
    """Place of one rank: [Note: where a rank is]."""
    last = max(steps)
    last_ns = max(event.end_ns - (event.clock_offset_ns or 0) for event in steps[last])
    if any(event.segment == "step" for event in steps[last]):
        # It ended its step, and is before the first operation of the next one, as far as the record shows.
        template, done, step = _operations(steps[last]), set[Operation](), last + 1
    else:
        template = _operations(steps.get(last - 1, ()))
        done, step = set(_operations(steps[last])), last
    for operation, event in template.items():
        if operation not in done:
            return Place(rank, step, operation, _members(operation, event), last_ns)
    return Place(rank, step, None, (), last_ns)


def _operations(events: Sequence[Segment]) -> dict[Operation, Segment]:
    """Operations of a step in the order of their begin; of equal begins a wait comes last."""
    counts: dict[tuple[object, ...], int] = defaultdict(int)
    result = {}
    for event in sorted(events, key=lambda one: (one.start_ns, one.segment == "wait", one.end_ns)):
        if event.segment not in _OWN_WORK and event.segment not in _WAITS:
            continue
        if event.segment == "wait":  # what it waits for has a row of its own, or is inside a pass
            continue
        key = (event.segment, event.name, event.group or "", _index(event.micro_batch), _index(event.chunk))
        counts[key] += 1
        result[Operation(*key, counts[key])] = event
    return result


def _index(value: int | None) -> int:
    return -1 if value is None else value


def _members(operation: Operation, event: Segment) -> Sequence[int]:
    if operation.segment in _OWN_WORK:
        return ()
    if event.peer is not None:
        return (event.peer,)
    try:
        return parse_ranks(event.group_ranks)
    except ValueError:
        return ()


def _waiting(places: Mapping[int, Place], working: Sequence[int]) -> tuple[dict[int, tuple[int, int]], list[int]]:
    """Ranks that wait for one that works: that rank, and how many are between; and all that are waited for."""
    # Who is in the same collective waits for the same others, so that each group is looked at once.
    missing: dict[tuple[object, ...], list[int]] = {}
    waiters: dict[int, list[tuple[object, ...]]] = defaultdict(list)
    in_group: dict[tuple[object, ...], list[int]] = defaultdict(list)
    for rank, place in places.items():
        if not place.members:
            continue
        key: tuple[object, ...] = (place.operation, place.step, place.members)
        in_group[key].append(rank)
        if key not in missing:
            missing[key] = [peer for peer in place.members if peer in places and _differs(place, places[peer])]
            for peer in missing[key]:
                waiters[peer].append(key)
    # Of several that a group waits for, its ranks are counted to the first alone: the others are no less suspect.
    roots = sorted(rank for rank in working if rank in waiters)
    known = set(working)
    reached: dict[int, tuple[int, int]] = {}
    border = [(rank, rank) for rank in sorted(working)]
    distance = 0
    while border:
        following = []
        for rank, root in border:
            for key in waiters.pop(rank, ()):
                for waiter in in_group.pop(key, ()):
                    if waiter not in known:
                        known.add(waiter)
                        reached[waiter] = (root, distance)
                        following.append((waiter, root))
        border, distance = following, distance + 1
    return reached, roots


def _differs(place: Place, peer: Place) -> bool:
    """Whether a peer is elsewhere than in the collective or message that a rank is in."""
    if place.operation is not None and place.operation.name in ("send", "recv"):
        return True
    return peer.operation != place.operation or peer.step != place.step
