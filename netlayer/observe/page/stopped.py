"""Culprit where a run's record stops: each rank's place in the last step, and who waits for whom.

[Note: where a rank is] An operation that never ends is not in the record. What a rank does at the end follows from
its last whole step: in the order in which work begins and communication ends (a receive may be posted long before
anybody waits for it), the first operation that the last step lacks is the one that it is in. If that is its own work (a
pass, the optimizer, data), it waits for nobody; if it is a collective or a message, it waits for those of the group
that are not in the same one. Our monitor hands over a step when it has ended, or is late, and then says what the rank
waits for: of a rank with neither, the place is not known. What a mark says of a wait holds only where it is newer than
all that the rank recorded. A rank whose newest mark is older has no known place: its record alone would call a wait
inside of a pass the rank's own work.

[Note: silence] A record that stops is no proof of a fault, for a run may just have been ended. A rank is named as
silent only where the others wait for it, directly or through others, and evidence goes on for a while after the last
thing that it did: counters, marks, or the present time where the files are being written. Of several ranks in one
operation the one is named whose own readings went on until it stopped and then ended, while those of the others go on.
A process that is stopped or dead takes the record of its last second with it, and where it was does not show: where the
signs of one rank end and those of all others go on (marks of late steps, readings), and these wait for it in the step
that it was in, it is the silent one. Signs of several hosts are compared on the run's reference clock, and nobody is
told apart by less than what these clocks may differ by; where they were not compared, one is suspected at most.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from netlayer.layout import describe_ranks
from netlayer.observe.events import Segment, parse_ranks

MIN_SILENCE_S = 5.0
MIN_SILENCE_STEPS = 3.0
_OWN_WORK = ("forward", "backward", "weights", "optimizer", "data")
_WAITS = ("collective", "wait")
_HOST_WORK = ("data",)
"""In the record at once, whatever becomes of the step."""


class Sign(NamedTuple):
    """The last sign of life of a rank: a reading or a mark."""

    at_ns: int
    """On the reference clock."""
    error_ns: int | None
    """Bound on how wrong that is; None: the rank's clock was not compared with the reference."""


class LateStep(NamedTuple):
    """The newest mark of a rank that says that its step is late."""

    step: int
    at_ns: int
    """Of the mark, on the reference clock."""
    waits: Mapping[str, Any]
    """What the rank waits for, as attributes of the mark; empty: for nothing that it knows."""


LateSteps = Mapping[int, LateStep]


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

    @property
    def still_ns(self) -> tuple[int, int] | None:
        """Return the beginning and the end of the standstill, on the reference clock; None: it has no known reason."""
        if not self.silence_s:
            return None
        last_ns = max(place.last_ns for place in self.places.values())
        return last_ns, last_ns + round(self.silence_s * 1e9)


def judge_stop(
    segments: Iterable[Segment],
    until_ns: int,
    step_s: float,
    *,
    ended: bool,
    last_sign_ns: Mapping[int, int],
    late_steps: LateSteps | None = None,
    clock_error_ns: int | None = 0,
) -> Stop:
    """Say who holds up a run whose record stops.

    Args:
        segments: of the last start: each rank's two last steps, in any order.
        until_ns: how far evidence of any kind goes.
        step_s: a typical step.
        ended: the run says that it ended as intended.
        last_sign_ns: the last reading or mark of each rank that has any.
        late_steps: of each rank the last step that was marked as late in that start; None: operations are in the
            record as they end.
        clock_error_ns: how far apart the clocks of two ranks may be; None: they were not compared.
    """
    if ended:
        return Stop("ended", "the run ended as intended")
    rows: dict[int, dict[int, list[Segment]]] = defaultdict(lambda: defaultdict(list))
    for event in segments:
        if event.origin.rank is not None and event.step is not None:
            rows[event.origin.rank][event.step].append(event)
    places = {rank: _place(rank, steps, late_steps) for rank, steps in rows.items()}
    if not places:
        return Stop("cannot tell", "no rank has a step")
    last_ns = max(place.last_ns for place in places.values())
    silence_s = (until_ns - last_ns) / 1e9
    if silence_s < max(MIN_SILENCE_S, MIN_SILENCE_STEPS * step_s):
        return Stop("running", "the record goes on to its end", places=places)
    working = [rank for rank, place in places.items() if place.operation is not None and not place.members]
    waiting, silent = _waiting(places, working)
    lead_ns = round(max(MIN_SILENCE_S, MIN_SILENCE_STEPS * step_s) * 1e9)
    signs = _Signs.of(places, last_ns, last_sign_ns, lead_ns, clock_error_ns)
    gone = _gone(places, signs, is_told=bool(silent))
    if gone is not None and not silent:
        return _stop_of_gone(places, gone, signs, until_ns)
    if gone is not None and places[gone].operation is None:
        # Its tensor-parallel peers wait for it inside a pass that does not end: it may be in the same one.
        places[gone] = replace(places[gone], operation=places[silent[0]].operation)
        waiting, silent = _waiting(places, [*working, gone])
    suspects, candidates = len(silent), silent
    silent = _quiet(silent, places, signs)
    operations = {(places[rank].step, places[rank].operation) for rank in silent}
    others = len(places) - len(waiting) - suspects
    if not silent or len(operations) > 1 or len(silent) > max(1, len(places) // 4) or others > len(places) / 4:
        line = f"nothing is recorded in the last {silence_s:.0f} s, and who waits for whom does not show"
        return Stop("cannot tell", line, (), places)
    if len(silent) < suspects:
        root = silent[0]
        waiting = {rank: (other if other in silent else root, between) for rank, (other, between) in waiting.items()}
    alike = [rank for rank in candidates if rank not in silent]
    num = _count_waiting(waiting)
    rest = f"; of {others} others it is not known" if others else ""
    since = f"nothing is recorded in the last {silence_s:.0f} s"
    why = _why(silent[0], alike, until_ns, signs) if len(silent) == 1 else ""
    # Where signs of several hosts told which one it is, their clocks have to be known.
    is_sure = signs.clock_error_ns is not None or not (alike or gone is not None)
    state, line = _named(silent, operations.pop(), (num, rest, since), why, is_sure=is_sure)
    return Stop(state, line, tuple(silent), places, waiting, tuple(alike), silence_s)


@dataclass(frozen=True)
class _Signs:
    """Signs of life of the ranks of a run that stands still.

    Args:
        last_ns: the last sign of each rank that has any.
        alive: ranks whose signs go on.
        lead_ns: least time by which the signs of a silent rank end before those of all others, where these alone tell.
        clock_error_ns: how far apart two clocks may be; None: that is not known.
    """

    last_ns: Mapping[int, int]
    alive: set[int]
    lead_ns: int
    clock_error_ns: int | None

    @classmethod
    def of(
        cls,
        places: Mapping[int, Place],
        stopped_ns: int,
        last_sign_ns: Mapping[int, int],
        lead_ns: int,
        clock_error_ns: int | None,
    ) -> _Signs:
        """Tell who is alive in a run that stopped at a moment."""
        # A third of the time since then: marks become rarer, and those of two ranks are not of one moment.
        late_ns = stopped_ns + (max(last_sign_ns.values(), default=stopped_ns) - stopped_ns) // 3
        alive = {rank for rank in places if last_sign_ns.get(rank, stopped_ns) > late_ns}
        return cls(last_sign_ns, alive, lead_ns, clock_error_ns)

    @property
    def clocks(self) -> str:
        """Return how far signs of several hosts can be compared."""
        if self.clock_error_ns is None:
            return "the clocks of their hosts were not compared"
        error_ms = self.clock_error_ns / 1e6
        error = f"{error_ms:.3g} ms" if error_ms < 1000 else f"{error_ms / 1000:.3g} s"
        return f"the clocks of their hosts differ by up to {error}"

    @property
    def note(self) -> str:
        """The same in brackets; empty on one host."""
        return "" if self.clock_error_ns == 0 else f" ({self.clocks})"

    def apart_ns(self, quiet: Sequence[int]) -> int:
        """Return how long before the first of the others the last sign of some ranks is."""
        first_ns = min((self.last_ns[rank] for rank in self.alive if rank in self.last_ns), default=0)
        return first_ns - max((self.last_ns.get(rank, 0) for rank in quiet), default=0)

    def hide(self, quiet: Sequence[int], least_ns: int = 0) -> bool:
        """Whether the signs of some ranks may not have ended `least_ns` before the others': the clocks do not tell.

        Of clocks that were not compared that is not asked here: a rank that they tell is suspected at most.
        """
        return bool(self.clock_error_ns) and self.apart_ns(quiet) - (self.clock_error_ns or 0) < least_ns


def _count_waiting(waiting: Mapping[int, Any]) -> str:
    return f"{len(waiting)} ranks wait" if len(waiting) != 1 else "1 rank waits"


def _named(
    silent: Sequence[int],
    where: tuple[int, Operation | None],
    facts: tuple[str, str, str],
    why: str,
    *,
    is_sure: bool,
) -> tuple[str, str]:
    """Return state and line where one of some ranks is silent: the one, or it is not known which."""
    step, operation = where
    num, rest, since = facts
    if len(silent) == 1:
        # With this rank and those alike the numbers add up to all ranks.
        state, verb = ("silent", "is") if is_sure else ("suspected", "may be")
        line = f"rank {silent[0]} {verb} silent, in {operation} of step {step}; {num} for it{rest}; {since}"
        return state, f"{line}; why this one: {why}"
    line = f"one of {describe_ranks(silent)} is silent, in {operation} of step {step}, and nothing shows which"
    return "suspected", f"{line}; {num} for them{rest}; {since}"


def _quiet(silent: list[int], places: Mapping[int, Place], signs: _Signs) -> list[int]:
    """Return those of several ranks in one operation whose signs have ended; all, where that tells nothing.

    A rank that gave no sign, or none for long before it stopped (its counters were never read, or are slow), is not
    told by that, and neither is one where the clocks may differ by as much.
    """
    quiet = [rank for rank in silent if rank not in signs.alive]
    is_certain = all(signs.last_ns.get(rank, 0) >= places[rank].last_ns - signs.lead_ns for rank in quiet)
    is_certain = is_certain and not signs.hide(quiet)
    if 0 < len(quiet) < len(silent) and is_certain and len(signs.alive) >= len(places) / 2:
        return quiet
    return silent


def _gone(places: Mapping[int, Place], signs: _Signs, *, is_told: bool) -> int | None:
    """Return the one rank whose signs ended when it stopped while those of all others go on; None: it is not so.

    Args:
        is_told: places name a rank: signs that the clocks may hide then add nothing.
    """
    gone = [rank for rank in places if rank not in signs.alive]
    if len(gone) != 1:
        return None
    place = places[gone[0]]
    ahead_ns = max(other.last_ns for other in places.values()) - place.last_ns
    # Else its record ended before it stopped. The last second of it is lost anyway, with any number of short steps.
    is_lost = ahead_ns > signs.lead_ns or signs.last_ns.get(gone[0], 0) < place.last_ns - signs.lead_ns
    is_hidden = is_told and signs.hide(gone, signs.lead_ns)
    return None if is_lost or is_hidden or signs.apart_ns(gone) < signs.lead_ns else gone[0]


def _stop_of_gone(places: Mapping[int, Place], rank: int, signs: _Signs, until_ns: int) -> Stop:
    """Name the rank that is gone, where nobody else is in work of its own and three quarters of the others wait."""
    place = places[rank]
    silence_s = (until_ns - max(each.last_ns for each in places.values())) / 1e9
    since = f"nothing is recorded in the last {silence_s:.0f} s"
    if signs.hide([rank], signs.lead_ns):
        apart = f"the signs of life of rank {rank} end {signs.apart_ns([rank]) / 1e9:.1f} s before those of the others"
        return Stop("cannot tell", f"{since}; {apart}, but {signs.clocks}", (), places)
    waiting, _ = _waiting({**places, rank: replace(place, operation=None, members=())}, [rank])
    if len(waiting) < 0.75 * (len(places) - 1):
        return Stop("cannot tell", f"{since}, and who waits for whom does not show", (), places)
    num = _count_waiting(waiting)
    age_s = (until_ns - signs.last_ns[rank]) / 1e9
    why = f"why this one: its last sign of life is {age_s:.0f} s old, and those of all others go on{signs.note}"
    step = max(places[other].step for other in (*waiting, rank))
    state, verb = ("silent", "is") if signs.clock_error_ns is not None else ("suspected", "may be")
    line = f"rank {rank} {verb} silent, in step {step}; {num} for it; {since}; {why}"
    return Stop(state, line, (rank,), places, waiting, (), silence_s)


def _why(rank: int, alike: Sequence[int], until_ns: int, signs: _Signs) -> str:
    """Say what tells a silent rank from the others."""
    if not alike:
        return "no other rank in work of its own is waited for"
    their = "their" if len(alike) > 1 else "its"
    return (
        f"{describe_ranks(alike)} stopped in the same operation, but {their} readings (counters, marks) go on; "
        f"of rank {rank} the last is {(until_ns - signs.last_ns[rank]) / 1e9:.0f} s old{signs.note}"
    )


def _place(rank: int, steps: Mapping[int, Sequence[Segment]], late_steps: LateSteps | None) -> Place:
    """Place of one rank: [Note: where a rank is]."""
    last = max(steps)
    last_ns = max(event.end_ns - (event.clock_offset_ns or 0) for event in steps[last])
    if any(event.segment == "step" for event in steps[last]):
        # It ended its step, and is before the first operation of the next one, as far as the record shows.
        template, done, step = _operations(steps[last]), set[Operation](), last + 1
    else:
        template = _operations(steps.get(last - 1, ()))
        done, step = set(_operations(steps[last])), last
    late = (late_steps or {}).get(rank)
    # Whatever ended after the mark may be what the rank waited for.
    if late is not None and late.step >= step and late.waits and late.at_ns > last_ns:
        return _waiting_place(rank, late.step, late.waits, last_ns)
    if late is not None and late.step == step and late.at_ns <= last_ns:
        return Place(rank, step, None, (), last_ns)
    is_known = late_steps is None or (late is not None and late.step == step)
    is_known = is_known or any(operation.segment not in _HOST_WORK for operation in done)
    if not is_known:
        return Place(rank, step, None, (), last_ns)
    for operation, event in template.items():
        if operation not in done:
            return Place(rank, step, operation, _members(operation, event), last_ns)
    return Place(rank, step, None, (), last_ns)


def _waiting_place(rank: int, step: int, waits: Mapping[str, Any], last_ns: int) -> Place:
    """Place of a rank that says itself in which collective or message it waits."""
    name, group, micro_batch, peer = (waits.get(key) for key in ("waits_for", "group", "micro_batch", "peer"))
    index = micro_batch if isinstance(micro_batch, int) else -1
    operation = Operation("collective", str(name), str(group or ""), index, -1, 1)
    if isinstance(peer, int):
        return Place(rank, step, operation, (peer,), last_ns)
    try:
        members = parse_ranks(str(waits.get("group_ranks") or ""))
    except ValueError:
        members = ()
    return Place(rank, step, operation if members else None, members, last_ns)


def _operations(events: Sequence[Segment]) -> dict[Operation, Segment]:
    """Operations of a step, work in the order of its begin, communication in that of its end: what needs it is next."""
    counts: dict[tuple[object, ...], int] = defaultdict(int)
    result = {}
    in_order = sorted(events, key=lambda one: (one.end_ns, 0) if one.segment == "collective" else (one.start_ns, 1))
    for event in in_order:
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
