"""Root cause of a hung job: from the launches of every rank to the ranks that did not arrive, or diverged.

A rank waits for the ranks that have not launched its first incomplete collective, for those that launched a different
one in its place, and for those without a file. A rank that waits is a victim; a rank that others wait for and that
waits for nobody is a culprit. If all ranks launch in one order these waits form no cycle, so a cycle means that two
ranks launched in different orders.

Which of two versions of a collective is wrong is decided by the majority of its group, then by the groups of the same
role at the same number; in a tie, both are named. Not answered: why a rank stopped (see its log), and which link is at
fault if all ranks have arrived.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal, NamedTuple

from netlayer.layout import describe_ranks
from netlayer.observe.evidence import TOGETHER, Evidence, Group, Launch, RankLog, family
from netlayer.observe.majority import Mismatch, crossed_launches, find_mismatch, out_of_order

Kind = Literal["mismatch", "dead", "hang", "order", "stalled", "error", "device", "behind"]
_NO_TIME = 1 << 63
_MOST_STEPS = 4


@dataclass(frozen=True)
class Finding:
    """One cause of a hang.

    Args:
        kind: `mismatch`: launched a different collective; `dead`: left no file; `hang`: did not arrive; `order`:
            launched two collectives in reverse order; `stalled`: all ranks arrived, but it is not complete; `error`:
            reports an error itself; `device`: its GPU or link reports errors; `behind`: launched less than others at
            one moment, as ranks of a running job do too.
        ranks: the culprits; empty for `stalled`.
        certain: False if the ranks differ and nothing tells which of them is wrong.
        group: description of the group.
        collective: description of the collective.
        line: one sentence on what happened.
        waiting: ranks that wait because of it, directly or indirectly.
        since_ns: time at which the first of them began to wait; 0 if not known.
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
    """Verdict on a job: its causes, the earliest first, and a table row for every group that stands still."""

    findings: Sequence[Finding] = ()
    groups: Sequence[Mapping[str, Any]] = ()
    notes: Sequence[str] = field(default=())
    no_verdict: str = ""
    """Reason why an empty list of findings does not prove that the job runs; empty if it does."""

    @property
    def culprits(self) -> tuple[int, ...]:
        """Culprits of all findings, in rank order; ranks that are merely `behind` are none."""
        return tuple(sorted({rank for finding in self.findings if finding.kind != "behind" for rank in finding.ranks}))

    @property
    def stands_still(self) -> bool:
        """Whether anything is seen to stand still, or to be damaged."""
        return any(finding.kind != "behind" for finding in self.findings)


class _Wait(NamedTuple):
    """A wait of `rank` in its own `launch`."""

    rank: int
    launch: Launch
    group: Group


def diagnose(evidence: Evidence) -> Blame:
    """Find the causes of a hung job."""
    return _Case(evidence).blame()


class _Case:
    """Analysis of one job; `_waits` maps each rank to the waits for it."""

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self._aligned = {key: align(group, evidence.ranks) for key, group in evidence.groups.items()}
        self._mismatches: dict[str, Mismatch] = {}
        for key, group in evidence.groups.items():
            siblings = [self._aligned[other] for other in self._siblings[group.role] if other != key]
            mismatch = find_mismatch(self._aligned[key], siblings)
            if mismatch is not None:
                self._mismatches[key] = mismatch
        self._waits: dict[int, list[_Wait]] = defaultdict(list)
        for key in evidence.groups:
            self._collect_waits(key)

    @cached_property
    def _siblings(self) -> Mapping[str, list[str]]:
        """Keys of the groups, by role."""
        keys: dict[str, list[str]] = defaultdict(list)
        for key, group in self._evidence.groups.items():
            keys[group.role].append(key)
        return keys

    def blame(self) -> Blame:
        """Return all findings, the group table and the notes."""
        diverged = {rank for mismatch in self._mismatches.values() for rank in mismatch.culprits}
        blocked = {wait.rank for waits in self._waits.values() for wait in waits} - diverged
        findings = [self._mismatch_finding(key, mismatch) for key, mismatch in self._mismatches.items()]
        roots = [rank for rank in self._waits if rank not in blocked and rank not in diverged]
        findings += [self._late_finding(rank) for rank in roots]
        explained = self._waiting_for([*roots, *diverged])
        cycle = self._cycle(blocked - set(explained))
        if cycle:
            findings.append(self._cycle_finding(cycle))
        if not findings:
            findings += self._order_deadlock_findings() or self._stalled_findings()
        findings.sort(key=lambda finding: (finding.since_ns or _NO_TIME, finding.ranks))
        notes = [f"no dump of {describe_ranks(silent)}"] if (silent := self._silent_without_file()) else []
        notes += self._device_lag_notes()
        blind_spot = self._evidence.blind_spot
        if blind_spot and findings:
            notes.append(blind_spot)
        rows = [row for key in self._evidence.groups if (row := self._group_row(key))]
        return Blame(findings, rows, notes, blind_spot if not findings else "")

    def _silent_without_file(self) -> list[int]:
        return [rank for rank in self._evidence.silent if rank not in self._evidence.damaged]

    def _device_lag_notes(self) -> list[str]:
        """Return notes on ranks whose device has not completed what most others have: a hint, no proof.

        Only for collectives whose ranks complete together; the root of a broadcast may complete long before the others.
        An entry that is missing although the rank has later ones counts as complete: torch may omit completed ones.
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
                if family(launch.kind) in TOGETHER:
                    suspects.setdefault(rank, f"{launch.kind} #{launch.seq} of {group}")
        return [
            f"on rank {rank} {what} is not complete, on its peers it is: look at its GPU as well (Xid, ECC)"
            for rank, what in sorted(suspects.items())
        ]

    def _collect_waits(self, key: str) -> None:
        """Add the waits in one group."""
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
            # A rank without a file may have arrived: it is blamed only if no other rank can be.
            for peer in {*late, *wrong} or silent:
                self._waits[peer].append(wait)

    def _waiting_for(self, ranks: Iterable[int]) -> list[int]:
        """Return the ranks that wait for one of these, directly or indirectly."""
        waiting_ranks: dict[int, None] = {}
        todo = list(ranks)
        while todo:
            for wait in self._waits.get(todo.pop(), ()):
                if wait.rank not in waiting_ranks:
                    waiting_ranks[wait.rank] = None
                    todo.append(wait.rank)
        return list(waiting_ranks)

    def _cycle(self, ranks: set[int]) -> set[int]:
        """Reduce ranks whose waits lead to no culprit to those in a wait cycle."""
        while True:
            awaited = {rank for rank in ranks if any(wait.rank in ranks for wait in self._waits.get(rank, ()))}
            if awaited == ranks:
                return ranks
            ranks = awaited

    def _first_wait(self, rank: int) -> _Wait:
        return min(self._waits[rank], key=lambda wait: (wait.launch.created_ns or _NO_TIME, wait.launch.order))

    def _victims(self, ranks: Sequence[int]) -> tuple[int, ...]:
        return tuple(sorted(set(self._waiting_for(ranks)) - set(ranks)))

    def _mismatch_finding(self, key: str, mismatch: Mismatch) -> Finding:
        group = self._evidence.groups[key]
        line = f"{mismatch.line(group)}{self._victims_phrase(victims := self._victims(mismatch.culprits))}"
        since_ns = min(launch.created_ns for launch in mismatch.launches.values())
        collective = str(
            next(
                launch
                for rank, launch in mismatch.launches.items()
                if rank not in mismatch.culprits or not mismatch.certain
            )
        )
        return Finding("mismatch", mismatch.culprits, str(group), collective, line, victims, mismatch.certain, since_ns)

    def _late_finding(self, rank: int) -> Finding:
        """Return the finding for a rank that others wait for and that waits for nobody."""
        wait, victims = self._first_wait(rank), self._victims([rank])
        log = self._evidence.ranks.get(rank)
        what = f"{wait.launch} of {wait.group}"
        kind: Kind = "dead" if log is None else "hang"
        certain = rank not in self._evidence.damaged
        if not certain:
            line = f"whether rank {rank} has launched {what}, which others wait in: {self._evidence.damaged[rank]}"
        elif log is None:
            # Where half of the files are missing, they may not have been collected: that says nothing of their ranks.
            missing = len(set(self._evidence.silent) - set(self._evidence.damaged))
            certain = missing < 2 or 2 * missing < len(self._evidence.world)
            line = f"rank {rank} left no dump: dead, or hung before it could write one; the others have launched {what}"
            if not certain:
                line = f"no dump of rank {rank}, nor of {missing - 1} more of {len(self._evidence.world)} ranks: "
                line += f"not collected, or their hosts are gone; the others have launched {what}"
        else:
            line = f"rank {rank} has not arrived at {what}: {self._progress(log, wait.group)}"
        if log is not None and self._evidence.blind_spot:
            line += ", or waits in a send or receive, which gloo does not write down"
        line += self._victims_phrase(victims)
        return Finding(kind, (rank,), str(wait.group), str(wait.launch), line, victims, certain, wait.launch.created_ns)

    def _progress(self, log: RankLog, group: Group) -> str:
        last = log.last(group.key)
        there = f"last launched there {last}" if last else "launched nothing there" + " of late" * (not log.whole)
        if log.doing or log.newest is None:
            return ", ".join(filter(None, (there, log.doing)))
        key, newest = log.newest
        anywhere = f"last anywhere {newest} of {self._evidence.groups[key]}" if newest is not last else ""
        return ", ".join(filter(None, (there, anywhere, f"from {newest.place}" if newest.place else "")))

    def _cycle_finding(self, cycle: set[int]) -> Finding:
        """Return the finding for ranks that wait for each other: those with another launch order than the others."""
        waiting_launches = {
            rank: [(wait.group, wait.launch) for wait in self._waits[rank] if wait.rank in cycle] for rank in cycle
        }
        own_launches = {
            wait.rank: (wait.group, wait.launch) for rank in cycle for wait in self._waits[rank] if wait.rank in cycle
        }
        culprits, evidence = out_of_order(self._evidence, cycle, waiting_launches, own_launches)
        certain = bool(culprits)
        ranks = tuple(sorted(culprits or cycle))
        group, launch = own_launches[ranks[0]]
        if certain:
            line = f"{describe_ranks(ranks)} launched {launch} of {group} before {evidence}: the others do the reverse"
        else:
            steps = self._describe_cycle(cycle)
            line = f"{describe_ranks(ranks)} wait for each other: {steps}; nothing tells which is wrong"
        victims = self._victims(ranks)
        line += self._victims_phrase(victims)
        return Finding("order", ranks, str(group), str(launch), line, victims, certain, launch.created_ns)

    def _describe_cycle(self, cycle: set[int]) -> str:
        """Describe one round of the cycle: which rank waits in which collective for which rank."""
        waits_for = {
            wait.rank: (peer, wait) for peer in sorted(cycle) for wait in self._waits[peer] if wait.rank in cycle
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

    def _order_deadlock_findings(self) -> list[Finding]:
        """Return the finding if all ranks launched everything, but in orders that deadlock."""
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
        line = crossed.line + self._victims_phrase(victims)
        group = str(self._evidence.groups[key])
        return [
            Finding("order", crossed.culprits, group, str(launch), line, victims, crossed.certain, launch.created_ns)
        ]

    def _stalled_findings(self) -> list[Finding]:
        """Return findings for collectives that all ranks launched and that are not complete."""
        findings = []
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
            findings.append(Finding("stalled", (), str(group), str(launch), line, ranks, True, launch.created_ns))
        return findings

    def _victims_phrase(self, victims: Sequence[int]) -> str:
        return f"; {describe_ranks(victims)} wait{'s' * (len(victims) == 1)} because of it" if victims else ""

    def _group_row(self, key: str) -> dict[str, Any] | None:
        """Return the table row of a group that stands still: its collective, and its ranks by state."""
        group, aligned = self._evidence.groups[key], self._aligned[key]
        numbers = [number for launches in aligned.values() if (number := first_open(launches)) is not None]
        if not numbers:
            return None
        number = min(numbers)
        launches = {rank: of_rank[number] for rank, of_rank in aligned.items() if number in of_rank}
        mismatch = self._mismatches.get(key)
        absent = [rank for rank in group.ranks if rank not in self._evidence.ranks]
        return {
            "group": group.name,
            "group_ranks": list(group.ranks),
            "collective": str(next(iter(launches.values()))),
            "waiting": [rank for rank, launch in launches.items() if not launch.done],
            "complete": [rank for rank in aligned if rank in launches and launches[rank].done],
            "not_arrived": [rank for rank, of_rank in aligned.items() if max(of_rank, default=0) < number],
            "different": list(mismatch.culprits) if mismatch is not None else [],
            "no_dump": [rank for rank in absent if rank not in self._evidence.damaged],
            "unusable_dump": [rank for rank in absent if rank in self._evidence.damaged],
        }


def align(group: Group, logs: Mapping[int, RankLog]) -> dict[int, dict[int, Launch]]:
    """Return the launches of every rank with a file, by numbers that mean the same on all of them.

    Sends and receives are numbered from the oldest entry. If that is not the start of the job, they are numbered from
    the first incomplete one instead, which gets number 1.
    """
    aligned = {rank: logs[rank].launches.get(group.key, {}) for rank in group.ranks if rank in logs}
    if group.sender is None or all(logs[rank].whole for rank in aligned):
        return aligned
    shifts = {rank: sum(launch.done for launch in launches.values()) for rank, launches in aligned.items()}
    return {rank: {seq - shifts[rank]: one for seq, one in launches.items()} for rank, launches in aligned.items()}


def first_open(launches: Mapping[int, Launch]) -> int | None:
    """Return the number of the first incomplete launch; None if all are complete."""
    return next((number for number, launch in launches.items() if not launch.done), None)
