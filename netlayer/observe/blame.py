"""Who did not arrive, or diverged: from what every rank launched to the ranks that the others wait for.

A rank waits for those that have not launched its first incomplete collective, for those that launched another one in
its place, and for those that left nothing. Whoever waits is a victim; a rank that others wait for and that waits for
nobody is a culprit. Where all launch in one order these waits have no circle, so a circle is a difference in order.

Which of two versions of a collective is the wrong one, the majority of its group decides, then that of the groups of
the same role at the same number; where both are even, both are named. Left out: why a host stopped (its log knows),
and which link is at fault where everybody has arrived.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

from netlayer.layout import describe_ranks
from netlayer.observe.evidence import Evidence, Group, Launch, RankLog, family
from netlayer.observe.majority import Mismatch, crossed_launches, find_mismatch, out_of_order

Kind = Literal["mismatch", "dead", "hang", "order", "stalled", "error", "device"]
_NO_TIME = 1 << 63
_MOST_STEPS = 4
_TOGETHER = ("all_reduce", "all_gather", "all_to_all", "reduce_scatter", "barrier")


@dataclass(frozen=True)
class Finding:
    """One cause.

    Args:
        kind: `mismatch`: launched another collective; `dead`: left nothing; `hang`: did not arrive; `order`: launched
            two collectives the other way round; `stalled`: everybody arrived, and it is not complete; `error`: reports
            one itself; `device`: its GPU or link reports errors.
        ranks: that it accuses; none where it is `stalled`.
        certain: False where the ranks differ and nothing tells which of them is wrong.
        group: in words.
        collective: in words.
        line: what happened, for a person.
        waiting: ranks that wait because of it, directly or not.
        since_ns: when the first of them began to; 0 where not known.
    """

    kind: Kind
    ranks: tuple[int, ...]
    group: str
    collective: str
    line: str
    waiting: tuple[int, ...] = ()
    certain: bool = True
    since_ns: int = 0


@dataclass(frozen=True)
class Blame:
    """What came out: causes, the earliest first, and a row for every group that stands still."""

    findings: Sequence[Finding] = ()
    groups: Sequence[Mapping[str, Any]] = ()
    notes: Sequence[str] = field(default=())
    no_verdict: str = ""
    """Why nothing that was found is no proof that nothing stands still; empty where it is one."""

    @property
    def culprits(self) -> tuple[int, ...]:
        """Every rank that is accused, in rank order."""
        return tuple(sorted({rank for finding in self.findings for rank in finding.ranks}))


class _Wait(NamedTuple):
    """A rank waits in a launch of its own for another one."""

    rank: int
    launch: Launch
    group: Group


def diagnose(evidence: Evidence) -> Blame:
    """The causes of what does not go on in a job."""
    return _Case(evidence).blame()


class _Case:
    """One job. Waits are kept by the rank that is waited for."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._aligned = {key: align(group, evidence.ranks) for key, group in evidence.groups.items()}
        self._mismatches: dict[str, Mismatch] = {}
        for key, group in evidence.groups.items():
            siblings = [self._aligned[other] for other in self._siblings[group.role] if other != key]
            found = find_mismatch(self._aligned[key], siblings)
            if found is not None:
                self._mismatches[key] = found
        self._waits: dict[int, list[_Wait]] = defaultdict(list)
        for key in evidence.groups:
            self._collect(key)

    @cached_property
    def _siblings(self) -> Mapping[str, list[str]]:
        """Keys of the groups of each role."""
        keys: dict[str, list[str]] = defaultdict(list)
        for key, group in self._evidence.groups.items():
            keys[group.role].append(key)
        return keys

    def blame(self) -> Blame:
        """All findings."""
        diverged = {rank for found in self._mismatches.values() for rank in found.culprits}
        blocked = {wait.rank for waits in self._waits.values() for wait in waits} - diverged
        findings = [self._differs(key, found) for key, found in self._mismatches.items()]
        roots = [rank for rank in self._waits if rank not in blocked and rank not in diverged]
        findings += [self._absent(rank) for rank in roots]
        explained = self._behind([*roots, *diverged])
        circle = self._circle(blocked - set(explained))
        if circle:
            findings.append(self._order(circle))
        if not findings:
            findings += self._crossed() or self._stalled()
        findings.sort(key=lambda finding: (finding.since_ns or _NO_TIME, finding.ranks))
        notes = [f"no dump of {describe_ranks(silent)}"] if (silent := self._silent_without_file()) else []
        notes += self._behind_on_device()
        unrecorded = self._evidence.unrecorded
        if unrecorded and findings:
            notes.append(unrecorded)
        rows = [row for key in self._evidence.groups if (row := self._row(key))]
        return Blame(findings, rows, notes, unrecorded if not findings else "")

    def _silent_without_file(self) -> list[int]:
        return [rank for rank in self._evidence.silent if rank not in self._evidence.damaged]

    def _behind_on_device(self) -> list[str]:
        """Ranks whose device has not completed what it has on most others that launched it: worth a look, no proof.

        Of collectives whose ranks complete together alone: a root may be done with a broadcast long before the others.
        What a dump no longer holds though the rank is past it is complete: torch can leave out what is.
        """
        suspects: dict[int, str] = {}
        for key, aligned in self._aligned.items():
            group = self._evidence.groups[key]
            opened = [number for launches in aligned.values() if (number := first_open(launches)) is not None]
            if not opened or group.sender is not None:
                continue
            number = min(opened)
            behind = {rank: of_rank[number] for rank, of_rank in aligned.items() if first_open(of_rank) == number}
            num_past = sum(max(of_rank, default=0) >= number for rank, of_rank in aligned.items() if rank not in behind)
            if len(behind) + num_past < len(group.ranks) or len(behind) > num_past:
                continue
            for rank, launch in behind.items():
                if family(launch.kind) in _TOGETHER:
                    suspects.setdefault(rank, f"{launch.kind} #{launch.seq} of {group}")
        return [
            f"on rank {rank} {what} is not complete, on its peers it is: look at its GPU as well (Xid, ECC)"
            for rank, what in sorted(suspects.items())
        ]

    def _collect(self, key: str) -> None:
        """The waits of one group."""
        group, aligned = self._evidence.groups[key], self._aligned[key]
        mismatch = self._mismatches.get(key)
        silent = [rank for rank in group.ranks if rank not in self._evidence.ranks]
        last = {rank: max(launches, default=0) for rank, launches in aligned.items()}
        for rank, launches in aligned.items():
            number = first_open(launches)
            if number is None:
                continue
            wrong = mismatch.culprits if mismatch is not None and number >= mismatch.number else ()
            if rank in wrong:
                continue
            late = [peer for peer in aligned if last[peer] < number]
            wait = _Wait(rank, launches[number], group)
            # Whoever left nothing may have arrived: it is to blame where nobody else can be.
            for peer in {*late, *wrong} or silent:
                self._waits[peer].append(wait)

    def _behind(self, ranks: Iterable[int]) -> list[int]:
        """Everybody who waits for one of these, directly or not."""
        found: dict[int, None] = {}
        todo = list(ranks)
        while todo:
            for wait in self._waits.get(todo.pop(), ()):
                if wait.rank not in found:
                    found[wait.rank] = None
                    todo.append(wait.rank)
        return list(found)

    def _circle(self, ranks: set[int]) -> set[int]:
        """Of ranks whose waits lead to no culprit, those that somebody waits for."""
        while True:
            wanted = {rank for rank in ranks if any(wait.rank in ranks for wait in self._waits.get(rank, ()))}
            if wanted == ranks:
                return ranks
            ranks = wanted

    def _first(self, rank: int) -> _Wait:
        return min(self._waits[rank], key=lambda wait: (wait.launch.created_ns or _NO_TIME, wait.launch.order))

    def _victims(self, ranks: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted(set(self._behind(ranks)) - set(ranks)))

    def _differs(self, key: str, found: Mismatch) -> Finding:
        group = self._evidence.groups[key]
        line = f"{found.line(group)}{self._waiting(victims := self._victims(found.culprits))}"
        since_ns = min(launch.created_ns for launch in found.launches.values())
        collective = str(
            next(launch for rank, launch in found.launches.items() if rank not in found.culprits or not found.certain)
        )
        return Finding("mismatch", found.culprits, str(group), collective, line, victims, found.certain, since_ns)

    def _absent(self, rank: int) -> Finding:
        """A rank that others wait for and that waits for nobody."""
        wait, victims = self._first(rank), self._victims([rank])
        log = self._evidence.ranks.get(rank)
        what = f"{wait.launch} of {wait.group}"
        kind: Kind = "dead" if log is None else "hang"
        certain = rank not in self._evidence.damaged
        if not certain:
            line = f"whether rank {rank} has launched {what}, which others wait in: {self._evidence.damaged[rank]}"
        elif log is None:
            line = f"rank {rank} left no dump: dead, or hung before it could write one; the others have launched {what}"
        else:
            line = f"rank {rank} has not arrived at {what}: {self._progress(log, wait.group)}"
        if log is not None and self._evidence.unrecorded:
            line += ", or waits in a send or receive, which gloo does not write down"
        line += self._waiting(victims)
        return Finding(kind, (rank,), str(wait.group), str(wait.launch), line, victims, certain, wait.launch.created_ns)

    def _progress(self, log: RankLog, group: Group) -> str:
        last = log.last(group.key)
        there = f"last launched there {last}" if last else "launched nothing there" + " of late" * (not log.whole)
        if log.doing or log.newest is None:
            return ", ".join(filter(None, (there, log.doing)))
        key, newest = log.newest
        anywhere = f"last anywhere {newest} of {self._evidence.groups[key]}" if newest is not last else ""
        return ", ".join(filter(None, (there, anywhere, f"from {newest.place}" if newest.place else "")))

    def _order(self, circle: set[int]) -> Finding:
        """Ranks that wait for each other: the one whose order is not that of the others."""
        held = {
            rank: [(wait.group, wait.launch) for wait in self._waits[rank] if wait.rank in circle] for rank in circle
        }
        open_ = {
            wait.rank: (wait.group, wait.launch) for rank in circle for wait in self._waits[rank] if wait.rank in circle
        }
        culprits, evidence = out_of_order(self._evidence, circle, held, open_)
        certain = bool(culprits)
        ranks = tuple(sorted(culprits or circle))
        group, launch = open_[ranks[0]]
        if certain:
            line = f"{describe_ranks(ranks)} launched {launch} of {group} before {evidence}: the others do the reverse"
        else:
            line = (
                f"{describe_ranks(ranks)} wait for each other: {self._circle_of(circle)}; nothing tells which is wrong"
            )
        victims = self._victims(ranks)
        line += self._waiting(victims)
        return Finding("order", ranks, str(group), str(launch), line, victims, certain, launch.created_ns)

    def _circle_of(self, circle: set[int]) -> str:
        """One way round: who waits in what for whom."""
        waits_for = {
            wait.rank: (peer, wait) for peer in sorted(circle) for wait in self._waits[peer] if wait.rank in circle
        }
        path: list[tuple[int, _Wait]] = []
        rank = min(waits_for)
        while rank not in [wait.rank for _, wait in path]:
            peer, wait = waits_for[rank]
            path.append((peer, wait))
            rank = peer
        start = [wait.rank for _, wait in path].index(rank)
        steps = [f"rank {wait.rank} in {wait.launch} of {wait.group} for rank {peer}" for peer, wait in path[start:]]
        return ", ".join(steps[:_MOST_STEPS]) + (f", and so on over {len(steps)} ranks" * (len(steps) > _MOST_STEPS))

    def _crossed(self) -> list[Finding]:
        """Everybody has launched everything, but in orders that hold each other up."""
        heads = {}
        for key, aligned in self._aligned.items():
            numbers = [number for launches in aligned.values() if (number := first_open(launches)) is not None]
            if numbers:
                heads[key] = min(numbers)
        crossed = crossed_launches(self._evidence, self._aligned, heads)
        if crossed is None:
            return []
        victims = tuple(
            sorted(
                {
                    rank
                    for key, number in heads.items()
                    for rank, launches in self._aligned[key].items()
                    if number in launches and not launches[number].done
                }
                - set(crossed.culprits)
            )
        )
        key = crossed.keys[0]
        rank = next(iter(self._aligned[key]))
        launch = self._aligned[key][rank][heads[key]]
        line = crossed.line + self._waiting(victims)
        group = str(self._evidence.groups[key])
        return [
            Finding("order", crossed.culprits, group, str(launch), line, victims, crossed.certain, launch.created_ns)
        ]

    def _stalled(self) -> list[Finding]:
        """Collectives that everybody has launched."""
        found = []
        for key, group in self._evidence.groups.items():
            first = {rank: number for rank, of in self._aligned[key].items() if (number := first_open(of)) is not None}
            if not first:
                continue
            ranks = tuple(first)
            launch = self._aligned[key][ranks[0]][first[ranks[0]]]
            line = (
                f"every rank has launched {launch} of {group}, and it is not complete on {describe_ranks(ranks)}: "
                "under way when this was written, or the network or a device stands still"
            )
            found.append(Finding("stalled", (), str(group), str(launch), line, ranks, True, launch.created_ns))
        return found

    def _waiting(self, victims: Sequence[int]) -> str:
        return f"; {describe_ranks(victims)} wait{'s' * (len(victims) == 1)} because of it" if victims else ""

    def _row(self, key: str) -> dict[str, Any] | None:
        """One group that stands still: where it is, and who is where."""
        group, aligned = self._evidence.groups[key], self._aligned[key]
        numbers = [number for launches in aligned.values() if (number := first_open(launches)) is not None]
        if not numbers:
            return None
        number = min(numbers)
        launches = {rank: of_rank[number] for rank, of_rank in aligned.items() if number in of_rank}
        mismatch = self._mismatches.get(key)
        return {
            "group": group.name,
            "group_ranks": list(group.ranks),
            "collective": str(next(iter(launches.values()))),
            "waiting": [rank for rank, launch in launches.items() if not launch.done],
            "complete": [rank for rank in aligned if rank in launches and launches[rank].done],
            "not_arrived": [rank for rank, of_rank in aligned.items() if max(of_rank, default=0) < number],
            "different": list(mismatch.culprits) if mismatch is not None else [],
            "no_dump": [rank for rank in group.ranks if rank not in self._evidence.ranks],
        }


def align(group: Group, logs: Mapping[int, RankLog]) -> dict[int, dict[int, Launch]]:
    """The launches of every rank that left something, by numbers that mean the same on all of them.

    Sends and receives are counted from the oldest entry. Where that is not the start of the job, they are counted
    from the first incomplete one instead: it has number 1.
    """
    aligned = {rank: logs[rank].launches.get(group.key, {}) for rank in group.ranks if rank in logs}
    if group.sender is None or all(logs[rank].whole for rank in aligned):
        return aligned
    shifts = {rank: sum(launch.done for launch in launches.values()) for rank, launches in aligned.items()}
    return {rank: {seq - shifts[rank]: one for seq, one in launches.items()} for rank, launches in aligned.items()}


def first_open(launches: Mapping[int, Launch]) -> int | None:
    """The number of the first one that is not complete."""
    return next((number for number, launch in launches.items() if not launch.done), None)
