"""One acceptance run as its phases see it: who takes part, what was measured, who was found guilty and set aside.

A group that hangs, breaks or computes wrong data is searched until the member or link is named; then the rest goes on
without it. Left out: what the phases are (`phases`), and the speed of things (`speeds`, `pairing`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.accept.bisect import Culprits, find_culprits
from bench.accept.expectations import load
from bench.accept.fleet import Fleet, Outcome, Rows, hindmost
from bench.accept.series import KNOWN_SPREAD, Reference
from bench.accept.work import Work
from netlayer.verdict import Finding, Verdict

Say = Callable[[int, int, str], None]
_LOST_PEER = re.compile(r"connection|closed by|reset|refused|broken pipe|timed? ?out|socket|ncclRemoteError", re.I)
_ROUND_S = 2.0  # that a round of pairs of GPUs may take
_AGAIN = "run it again; where it comes back, take {} out of service"
_DRAIN = "drain {}; read its kernel log and the NIC's and GPU's error counters, then run this again with it alone"
_SLOW = "it gets on: see what else runs there (top), or give a longer --limit"
CORRUPT = "drain {} at once: it spoils every job; test its GPU memory (dcgmi diag -r 3) and its NIC, then replace it"
_LINK = "swap cable and transceiver between {}, then the switch port: the fault moves with the part"
_NVLINK = "read nvidia-smi nvlink -s and -e at both ends of {}, then swap the GPU whose links are down or count errors"


NAME = "name"
"""The kind of a finding about a name of the hosts file that leads to no host: nothing is to be drained or replaced."""


@dataclass(frozen=True)
class Member:
    """A rank and where it is. `label` is how findings name it."""

    rank: int
    host: str
    node: int
    local: int
    label: str


@dataclass(frozen=True)
class Accused:
    """Whom a finding names: one or more ranks, the two ends of a link, a NIC or a link of NICs of their hosts, or a
    name that leads to no host.
    """

    verdict: Verdict
    kind: str
    ranks: tuple[int, ...]
    phase: str
    label: str


@dataclass
class Trial:
    """The state of a run.

    Args:
        alive: ranks that take part still.
        drill: nodes are virtual or faults are planted: no host is to be drained for what ranks do.
        scores: of single series, with their distance to the threshold; for the record.
        evidence: what hosts told of their GPUs before and after; for the record.
        stopped_hosts: ranks whose process is kept from its core: nothing of that is charged to their GPUs.
    """

    fleet: Fleet
    members: Sequence[Member]
    work: Work
    alive: list[int] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    accused: list[Accused] = field(default_factory=list)
    drill: bool = False
    scores: list[dict[str, Any]] = field(default_factory=list)
    evidence: list[dict[str, Any]] = field(default_factory=list)
    stopped_hosts: set[int] = field(default_factory=set)

    def label(self, ranks: Iterable[int]) -> str:
        """`node3`, or `node2 - node3` for a link."""
        return " - ".join(self.members[rank].label for rank in ranks)

    def link_step(self, ranks: Sequence[int]) -> str:
        """What to do about a link between ranks: inside a node it is no cable."""
        inside = len({self.members[rank].node for rank in ranks}) == 1
        return (_NVLINK if inside else _LINK).format(" and ".join(self.members[rank].label for rank in ranks))

    def ranks_of(self, hosts: Collection[str]) -> list[int]:
        """All ranks of some hosts."""
        return [member.rank for member in self.members if member.host in hosts]

    def alone(self, phase: str, name: str, args: Mapping[str, Any], ranks: Sequence[int], *, turns: bool) -> Rows:
        """A probe of single ranks, in turn or all at once; its rows, with the ranks of this run."""
        batches = [[(rank,)] for rank in ranks] if turns else [[(rank,) for rank in ranks]]
        return self._run(phase, name, args, batches)

    def together(
        self, phase: str, name: str, args: Mapping[str, Any], groups: Sequence[Sequence[int]], *, turns: bool
    ) -> Rows:
        """A probe of groups; those with fewer than two members that are left are passed over."""
        left = [group for one in groups if len(group := self.of_alive(one)) > 1]
        return self._run(phase, name, args, [[group] for group in left] if turns else [left])

    def of_alive(self, ranks: Iterable[int]) -> tuple[int, ...]:
        return tuple(rank for rank in ranks if rank in self.alive)

    def accuse(
        self,
        phase: str,
        kind: str,
        ranks: Sequence[int],
        finding: Finding,
        *,
        set_aside: Sequence[int] = (),
        label: str = "",
    ) -> None:
        """Note a finding about ranks, a link, or a part of theirs that has a `label` of its own; go on without some."""
        self.findings.append(finding)
        if finding.verdict in ("WARN", "FAIL"):
            label = label or self.label(ranks)
            self.accused.append(Accused(finding.verdict, kind, tuple(ranks), phase, label))
        self.alive = [rank for rank in self.alive if rank not in set_aside]

    def _run(self, phase: str, name: str, args: Mapping[str, Any], batches: Sequence[Sequence[Sequence[int]]]) -> Rows:
        found: Rows = []
        for batch in batches:
            limit_s = self.work.limit_s
            if name == "pairs" and not self.work.shared:  # as many rounds as ranks, each with a communicator to be made
                limit_s += _ROUND_S * max(map(len, batch), default=0)
            for outcome in self.fleet.run(name, args, batch, limit_s) if batch else ():
                found += self._judged(phase, name, args, outcome)
        return found

    def _judged(self, phase: str, name: str, args: Mapping[str, Any], outcome: Outcome) -> Rows:
        """The rows of a group; where it failed, whoever spoilt it is named, and the rest tries once more."""
        rows = [self._placed(phase, outcome, row) for row in outcome.rows or ()]
        self.rows += rows
        if not outcome.failed and (name == "pairs" or not any(row["wrong"] for row in rows)):
            return rows
        before = len(self.alive)
        if outcome.failed:
            self._name_failed(phase, name, args, outcome)
        else:
            self._name_wrong(phase, name, args, outcome.group, rows)
        rest = self.of_alive(outcome.group)
        if len(self.alive) == before or not rest or len(rest) < min(2, len(outcome.group)):
            return []
        return self._run(phase, name, args, [[rest]])

    def _placed(self, phase: str, outcome: Outcome, row: Mapping[str, Any]) -> dict[str, Any]:
        placed = {**row, "phase": phase, "group": list(outcome.group), "rank": outcome.group[row["rank"]]}
        return {**placed, "peer": outcome.group[row["peer"]]} if "peer" in row else placed

    def _name_failed(self, phase: str, name: str, args: Mapping[str, Any], outcome: Outcome) -> None:
        """Name who hung, died or raised: by the evidence where it is clear, else by trying smaller groups."""
        if outcome.slow_s:
            words, who = f"too slow: not done within {outcome.slow_s:.0f} s", self.label(outcome.group)
            finding = Finding("WARN", who, f"{phase}: answers", words, "an answer from every rank", _SLOW, phase)
            self.accuse(phase, "group", outcome.group, finding)
            return
        plain = next(iter(evidence(outcome)), None)
        if plain is not None:
            self._fail(phase, "node", plain[0], f"{phase}: answers", plain[1], "an answer from every rank", _DRAIN)
            return

        def fails(group: tuple[int, ...]) -> bool:
            [tried] = self.fleet.run(name, args, [group], self.work.limit_s)
            return tried.failed and not tried.slow_s

        what = next(iter(outcome.errors.values()), f"no answer within {self.work.limit_s:g} s")
        suspects = self._suspects(outcome)
        self._name_found(phase, find_culprits(suspects, fails, self._witnesses(suspects)), outcome.group, what, _DRAIN)

    def _name_wrong(self, phase: str, name: str, args: Mapping[str, Any], group: tuple[int, ...], rows: Rows) -> None:
        wrong = sum(row["wrong"] for row in rows)
        what = f"{wrong} wrong elements"
        if len(group) == 1:
            self._fail(phase, "node", group, f"{name} data", what, "0 wrong", CORRUPT)
            return

        def is_wrong(members: tuple[int, ...]) -> bool:
            [tried] = self.fleet.run(name, args, [members], self.work.limit_s)
            return any(row["wrong"] for row in tried.rows or ()) or (tried.failed and not tried.slow_s)

        self._name_found(phase, find_culprits(group, is_wrong, self._witnesses(group)), group, what, CORRUPT)

    def _name_found(self, phase: str, found: Culprits, group: Sequence[int], what: str, step: str) -> None:
        if found.members:
            self._fail(phase, "node", found.members, f"{phase}: bisection", what, "no fault in any group", step)
        elif len(found.link) == 2:
            check, words = f"{phase}: bisection", f"{what}, only where both are in a group"
            who = self.label(found.link)
            finding = Finding("FAIL", who, check, words, "no fault in any group", self.link_step(found.link), phase)
            # One end goes, so that the rest can go on.
            self.accuse(phase, "link", found.link, finding, set_aside=found.link[1:])
        else:
            who = self.label(found.link or group)
            step = "it did not come again in smaller groups: " + _AGAIN.format(who)
            finding = Finding("WARN", who, f"{phase}: bisection", what, "no fault in any group", step, phase)
            self.accuse(phase, "group", found.link or group, finding, set_aside=found.link or group)

    def _fail(
        self, phase: str, kind: str, ranks: Sequence[int], check: str, what: str, expected: str, step: str
    ) -> None:
        for rank in ranks:
            who = self.label([rank])
            finding = Finding("FAIL", who, check, what, expected, step.format(who), phase)
            self.accuse(phase, kind, [rank], finding, set_aside=[rank])

    def _witnesses(self, group: Sequence[int]) -> list[int]:
        return [rank for rank in self.alive if rank not in group]

    def _suspects(self, outcome: Outcome) -> tuple[int, ...]:
        """Those that had come least far, where they are several but not all; else all."""
        least = hindmost(outcome.where)
        return least if 2 <= len(least) < len(outcome.group) else outcome.group


def reference_for(facts: Mapping[str, Any]) -> Reference | None:
    """What is known of such a device with these facts; None where nothing is."""
    entry = next((one for one in load() if one.fits(facts)), None)
    return None if entry is None else Reference(entry.value, KNOWN_SPREAD, f"{entry.value:g}: {entry.source}")


def inconclusive_step(who: str) -> str:
    """What to do where something stood out once, and not again."""
    return f"run it again: {who} stood out in one series, and a fault shows in several"


def evidence(outcome: Outcome) -> Iterable[tuple[tuple[int, ...], str]]:
    """Who is to blame for a failure, where it is plain: the first that applies."""
    if outcome.dead:
        yield tuple(sorted(outcome.dead)), next(iter(outcome.dead.values()))
    own = {rank: error for rank, error in outcome.errors.items() if not _LOST_PEER.search(error)}
    if own and len(own) < max(2, len(outcome.group)):
        yield tuple(own), next(iter(own.values()))
    states = {rank: where.state for rank, where in outcome.where.items() if where.state in ("T", "t", "X", "Z", "lost")}
    if states:
        words = {"T": "is stopped", "t": "is stopped", "lost": "its host does not answer"}
        yield tuple(states), " and ".join(sorted({words.get(state, "has ended") for state in states.values()}))
    least = hindmost(outcome.where)
    if len(least) == 1 and len(outcome.group) > 1:
        mine = outcome.where[least[0]].launched
        most = max(where.launched for where in outcome.where.values())
        yield least, f"hangs before its collective {mine + 1}; its peers wait in number {most}"
    if len(outcome.group) == 1 and outcome.where:
        yield outcome.group, "hangs by itself"


def accused_rows(trial: Trial) -> list[dict[str, Any]]:
    """For the record."""
    return [{"table": "accused", **asdict(one)} for one in trial.accused]
