"""State of one acceptance run, shared by its phases: participating ranks, measured rows, findings and suspects.

If a group hangs, fails or computes wrong data, it is bisected until the culprit rank or link is found; the rest
continues without it. Not covered: the phases (`phases`), and judgement of speeds (`speeds`, `pairing`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from bench.accept.agents.fleet import Fleet, Outcome, Rows, slowest_ranks
from bench.accept.judge.expectations import load
from bench.accept.phases.bisect import Culprits, find_culprits
from bench.accept.phases.series import KNOWN_SPREAD, Reference
from bench.accept.phases.work import Work
from netlayer.verdict import Finding, Verdict

Say = Callable[[int, int, str], None]
_LOST_PEER = re.compile(r"connection|closed by|reset|refused|broken pipe|timed? ?out|socket|ncclRemoteError", re.I)
_ROUND_S = 2.0  # allowed for a round of pairs of GPUs
_AGAIN = "run it again; if it recurs, take {} out of service"
_DRAIN = "drain {}; read its kernel log and the NIC's and GPU's error counters, then run this again with it alone"
_SLOW = "it makes progress: see what else runs there (top), or give a longer --limit"
CORRUPT = "drain {} at once: it corrupts every job; test its GPU memory (dcgmi diag -r 3) and its NIC, then replace it"
_LINK = "swap cable and transceiver between {}, then the switch port: the fault moves with the part"
_NVLINK = "read nvidia-smi nvlink -s and -e at both ends of {}, then swap the GPU whose links are down or count errors"


NAME = "name"
"""Kind of a finding on a name in the hosts file that cannot be reached: there is nothing to drain or replace."""


@dataclass(frozen=True)
class Member:
    """A rank with its location. `label` is its name in findings."""

    rank: int
    host: str
    node: int
    local: int
    label: str


@dataclass(frozen=True)
class Suspect:
    """Subject of a finding: ranks, the two ends of a link, a NIC or link of their hosts, or an unreachable name."""

    verdict: Verdict
    kind: str
    ranks: tuple[int, ...]
    phase: str
    label: str


@dataclass
class Trial:
    """State of a run.

    Args:
        fleet: connections to the hosts.
        members: all ranks of the run.
        work: amounts of work and their limits.
        alive: ranks that still take part.
        rows: all measured rows.
        findings: all findings so far.
        suspects: subjects of the findings that are WARN or FAIL.
        dry_run: True for dry runs (virtual nodes or injected faults), in which no host is to be drained.
        scores: scores of single series with their distance to the threshold, for the record.
        evidence: GPU counters and states of the hosts before and after, for the record.
        stopped_hosts: ranks whose process is denied its core, so that their GPU is not blamed.
        num_turns: number of rounds in which ranks took turns so far.
    """

    fleet: Fleet
    members: Sequence[Member]
    work: Work
    alive: list[int] = field(default_factory=list)
    rows: list[dict[str, Any]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    suspects: list[Suspect] = field(default_factory=list)
    dry_run: bool = False
    scores: list[dict[str, Any]] = field(default_factory=list)
    evidence: list[dict[str, Any]] = field(default_factory=list)
    stopped_hosts: set[int] = field(default_factory=set)
    num_turns: int = 0

    def label(self, ranks: Iterable[int]) -> str:
        """Return the name of ranks in findings: `node3`, or `node2 - node3` for a link."""
        return " - ".join(self.members[rank].label for rank in ranks)

    def link_step(self, ranks: Sequence[int]) -> str:
        """Return the next step for a bad link between ranks: NVLink inside a node, a cable between nodes."""
        inside = len({self.members[rank].node for rank in ranks}) == 1
        return (_NVLINK if inside else _LINK).format(" and ".join(self.members[rank].label for rank in ranks))

    def ranks_of(self, hosts: Collection[str]) -> list[int]:
        """Return all ranks on these hosts."""
        return [member.rank for member in self.members if member.host in hosts]

    def alone(self, phase: str, name: str, args: Mapping[str, Any], ranks: Sequence[int], *, turns: bool) -> Rows:
        """Run a probe on single ranks, one after the other (`turns`) or all at once; return its rows.

        In a round of turns all ranks compute on the same core, and in the next round on the next one: a core may be
        slower than others for as long as another tenant uses its sibling, and a rank that the scheduler leaves there
        would look slow.
        """
        if turns:
            args, self.num_turns = {**args, "core": self.num_turns}, self.num_turns + 1
        batches = [[(rank,)] for rank in ranks] if turns else [[(rank,) for rank in ranks]]
        return self._run(phase, name, args, batches)

    def together(
        self, phase: str, name: str, args: Mapping[str, Any], groups: Sequence[Sequence[int]], *, turns: bool
    ) -> Rows:
        """Run a probe on groups of ranks, skipping groups with fewer than two ranks alive; return its rows."""
        groups_left = [group for one in groups if len(group := self.of_alive(one)) > 1]
        return self._run(phase, name, args, [[group] for group in groups_left] if turns else [groups_left])

    def of_alive(self, ranks: Iterable[int]) -> tuple[int, ...]:
        return tuple(rank for rank in ranks if rank in self.alive)

    def flag(
        self,
        phase: str,
        kind: str,
        ranks: Sequence[int],
        finding: Finding,
        *,
        exclude: Sequence[int] = (),
        label: str = "",
    ) -> None:
        """Add a finding on ranks, a link, or a part of them.

        Args:
            phase: name of the phase.
            kind: what is suspect: "node", "link", "group", "host", "part" or `NAME`.
            ranks: ranks that are involved.
            finding: the finding.
            exclude: ranks that take no part in the rest of the run.
            label: name of the subject; empty: that of the ranks.
        """
        self.findings.append(finding)
        if finding.verdict in ("WARN", "FAIL"):
            label = label or self.label(ranks)
            self.suspects.append(Suspect(finding.verdict, kind, tuple(ranks), phase, label))
        self.alive = [rank for rank in self.alive if rank not in exclude]

    def _run(self, phase: str, name: str, args: Mapping[str, Any], batches: Sequence[Sequence[Sequence[int]]]) -> Rows:
        rows: Rows = []
        for batch in batches:
            limit_s = self.work.limit_s
            if name == "pairs" and not self.work.shared:  # as many rounds as ranks, each creates a communicator
                limit_s += _ROUND_S * max(map(len, batch), default=0)
            for outcome in self.fleet.run(name, args, batch, limit_s) if batch else ():
                rows += self._handle_outcome(phase, name, args, outcome)
        return rows

    def _handle_outcome(self, phase: str, name: str, args: Mapping[str, Any], outcome: Outcome) -> Rows:
        """Return the rows of a group; if it failed, find the culprit and run the rest of the group once more."""
        rows = [self._with_origin(phase, outcome, row) for row in outcome.rows or ()]
        self.rows += rows
        if not outcome.failed and (name == "pairs" or not any(row["wrong"] for row in rows)):
            return rows
        before = len(self.alive)
        if outcome.failed:
            self._find_failed(phase, name, args, outcome)
        else:
            self._find_corrupt(phase, name, args, outcome.group, rows)
        rest = self.of_alive(outcome.group)
        if len(self.alive) == before or not rest or len(rest) < min(2, len(outcome.group)):
            return []
        return self._run(phase, name, args, [[rest]])

    def _with_origin(self, phase: str, outcome: Outcome, row: Mapping[str, Any]) -> dict[str, Any]:
        placed = {**row, "phase": phase, "group": list(outcome.group), "rank": outcome.group[row["rank"]]}
        return {**placed, "peer": outcome.group[row["peer"]]} if "peer" in row else placed

    def _find_failed(self, phase: str, name: str, args: Mapping[str, Any], outcome: Outcome) -> None:
        """Find the rank that hung, died or raised: from clear evidence, else by bisection."""
        if outcome.slow_s:
            figure, label = f"too slow: not done within {outcome.slow_s:.0f} s", self.label(outcome.group)
            finding = Finding("WARN", label, f"{phase}: answers", figure, "an answer from every rank", _SLOW, phase)
            self.flag(phase, "group", outcome.group, finding)
            return
        culprits = next(iter(evidence(outcome)), None)
        if culprits is not None:
            self._flag_ranks(
                phase, "node", culprits[0], f"{phase}: answers", culprits[1], "an answer from every rank", _DRAIN
            )
            return

        def fails(group: tuple[int, ...]) -> bool:
            [retried] = self.fleet.run(name, args, [group], self.work.limit_s)
            return retried.failed and not retried.slow_s

        what = next(iter(outcome.errors.values()), f"no answer within {self.work.limit_s:g} s")
        suspects = self._suspects(outcome)
        self._flag_culprits(
            phase, find_culprits(suspects, fails, self._controls(suspects)), outcome.group, what, _DRAIN
        )

    def _find_corrupt(self, phase: str, name: str, args: Mapping[str, Any], group: tuple[int, ...], rows: Rows) -> None:
        """Flag the ranks whose part in a collective gives wrong data, by repeating it in smaller groups."""
        wrong = sum(row["wrong"] for row in rows)
        what = f"{wrong} wrong elements"
        if len(group) == 1:
            self._flag_ranks(phase, "node", group, f"{name} data", what, "0 wrong", CORRUPT)
            return

        def is_wrong(members: tuple[int, ...]) -> bool:
            [retried] = self.fleet.run(name, args, [members], self.work.limit_s)
            return any(row["wrong"] for row in retried.rows or ()) or (retried.failed and not retried.slow_s)

        self._flag_culprits(phase, find_culprits(group, is_wrong, self._controls(group)), group, what, CORRUPT)

    def _flag_culprits(self, phase: str, culprits: Culprits, group: Sequence[int], what: str, step: str) -> None:
        if culprits.members:
            self._flag_ranks(
                phase, "node", culprits.members, f"{phase}: bisection", what, "no fault in any group", step
            )
        elif len(culprits.link) == 2:
            check, figure = f"{phase}: bisection", f"{what}, only where both are in a group"
            label = self.label(culprits.link)
            finding = Finding(
                "FAIL", label, check, figure, "no fault in any group", self.link_step(culprits.link), phase
            )
            # One end is excluded, so that the rest can continue.
            self.flag(phase, "link", culprits.link, finding, exclude=culprits.link[1:])
        else:
            label = self.label(culprits.link or group)
            step = "it did not recur in smaller groups: " + _AGAIN.format(label)
            finding = Finding("WARN", label, f"{phase}: bisection", what, "no fault in any group", step, phase)
            self.flag(phase, "group", culprits.link or group, finding, exclude=culprits.link or group)

    def _flag_ranks(
        self, phase: str, kind: str, ranks: Sequence[int], check: str, what: str, expected: str, step: str
    ) -> None:
        for rank in ranks:
            label = self.label([rank])
            finding = Finding("FAIL", label, check, what, expected, step.format(label), phase)
            self.flag(phase, kind, [rank], finding, exclude=[rank])

    def _controls(self, group: Sequence[int]) -> list[int]:
        return [rank for rank in self.alive if rank not in group]

    def _suspects(self, outcome: Outcome) -> tuple[int, ...]:
        """Return the ranks with the least progress if they are several but not all; else the whole group."""
        slowest = slowest_ranks(outcome.where)
        return slowest if 2 <= len(slowest) < len(outcome.group) else outcome.group


def reference_for(facts: Mapping[str, Any]) -> Reference | None:
    """Return the known reference value for these facts (device, quantity, ...); None if there is none."""
    entry = next((one for one in load() if one.fits(facts)), None)
    return None if entry is None else Reference(entry.value, KNOWN_SPREAD, f"{entry.value:g}: {entry.source}")


def inconclusive_step(who: str) -> str:
    """Return the next step for an outlier in a single series."""
    return f"run it again: {who} stood out in one series, and a fault shows in several"


def evidence(outcome: Outcome) -> Iterable[tuple[tuple[int, ...], str]]:
    """Yield (ranks, reason) for culprits of a failure that are clear without bisection, the surest first."""
    if outcome.dead:
        yield tuple(sorted(outcome.dead)), next(iter(outcome.dead.values()))
    own_errors = {rank: error for rank, error in outcome.errors.items() if not _LOST_PEER.search(error)}
    if own_errors and len(own_errors) < max(2, len(outcome.group)):
        yield tuple(own_errors), next(iter(own_errors.values()))
    states = {rank: where.state for rank, where in outcome.where.items() if where.state in ("T", "t", "X", "Z", "lost")}
    if states:
        state_texts = {"T": "is stopped", "t": "is stopped", "lost": "its host does not answer"}
        yield tuple(states), " and ".join(sorted({state_texts.get(state, "has ended") for state in states.values()}))
    slowest = slowest_ranks(outcome.where)
    if len(slowest) == 1 and len(outcome.group) > 1:
        launched = outcome.where[slowest[0]].launched
        peers_launched = max(where.launched for where in outcome.where.values())
        yield slowest, f"hangs before its collective {launched + 1}; its peers wait in number {peers_launched}"
    if len(outcome.group) == 1 and outcome.where:
        yield outcome.group, "hangs by itself"


def suspect_rows(trial: Trial) -> list[dict[str, Any]]:
    """Return the suspects as rows of the record."""
    return [{"table": "accused", **asdict(one)} for one in trial.suspects]
