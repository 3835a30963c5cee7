"""Findings: what heartbeats show to be wrong with a run, as facts with their evidence. Not covered: what to do then.

A finding is a `cause`, which says what failed and where; `evidence`, which says so too, but stops no run by itself: a
line in a program's own log, which may as well be text that the program prints; a `symptom`, which says that something
failed, elsewhere; or a `note`, about which nothing is done. Findings of one incident are kept until it is decided, for
a later one may name what an earlier one has only felt.

[Note: silence] A job is hung where no rank has told of a step for many typical steps. In a phase that takes its time
(evaluation, checkpoint, loading, the first step) another limit holds, as long as some rank is in it, and where the
typical step is not known yet; after it, silence counts from its end. Where one node's heartbeats stop, the node is
lost; where those of most stop at once, the store or the driver's own link is the likelier fault, and nobody is accused
for three times as long. So it is with processes that are blocked in the kernel: on most nodes at once, it is rather the
file system that they share, and nobody is accused.

[Note: slow] A rank that is slow computes while all others wait for it: so it waits least for others, by about the share
of a step that is lost, and by more than in normal steps: a pipeline stage that is larger than the others always waits
least. One look proves nothing, for on a busy machine everybody is slow in turn: the same rank must be that one in most
looks, each at a step of every rank that is new, for as long as the steps have been slow (job.resilience.slow_floor_s at
least).
"""

from __future__ import annotations

import heapq
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from typing import Any, Literal

from netlayer.config.resilience import ResilienceConfig
from trainer.resilience.clocks import Moment, NodeClocks
from trainer.resilience.messages import Heartbeat, LogMatch, RankStatus, RankTable

Kind = Literal[
    "hardware",  # a rule of hardware fits a line
    "node_lost",  # no heartbeats
    "killed",  # a process ended by a signal that nobody of ours sent
    "exited",  # a process ended by itself, with an error
    "stopped",  # a process is stopped, or blocked in the kernel
    "named",  # ranks blame it
    "nan",  # numbers are lost
    "corrupt",  # its replica of the model differs from the others
    "memory",  # out of memory
    "checkpoint",  # a checkpoint cannot be loaded
    "disk",  # a disk is full or away, maybe one that all nodes share
    "job",  # the job itself is wrong
    "code",  # nodes have loaded different files
    "hung",  # no steps
    "slow",  # steps take long
    "traffic",  # a node moves few bytes
    "spike",  # the loss has risen
    "symptom",  # a peer is gone
    "asked",  # a person wants the node out
]
Weight = Literal["cause", "evidence", "symptom", "note"]

_ABORT = -6  # SIGABRT: raised by the process itself, as NCCL's watchdog does in every rank that waits for another one
_USAGE = 2  # exit code of a job, an option or an environment that cannot be used
_KEPT_STEPS = 32
_LEAST_STEPS = 3
_NOTED_S = 600.0
_MOST_LOST = 0.5  # share of the nodes above which lost heartbeats are rather the store's fault
_LEAST_BYTES_S = 1e6  # below that nothing is told of a node's traffic: it is not that of a training
_BLOCK_STEPS = 16
_LEAST_LOOKS, _MOST_LOOKS = 8, 0.8
_EXPLAINED = 1 / 5  # of the share of a step that is lost: by so much less it waits at least
_EXPOSED_GAP = 0.15  # of the step: by so much less than all others the rank that holds them up waits


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Args:
        kind: what.
        weight: how much it says.
        node: where; empty: not known.
        rank: which; None: the node as a whole, or not known.
        text: the evidence, in one line.
        at_ns: when it was seen, by the clock of whoever saw it, ns since 1970.
        when: when it happened, for what is ordered by it; None: not known.
    """

    kind: Kind
    weight: Weight
    node: str
    rank: int | None
    text: str
    at_ns: int
    when: Moment | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @staticmethod
    def from_json(tree: Mapping[str, Any]) -> Finding:
        return Finding(**{**tree, "when": Moment.from_json(tree.get("when"))})


@dataclass(slots=True)
class NodeView:
    """A node as the driver knows it: its last heartbeat, and when that came by the driver's monotonic clock.

    A driver of thousands of ranks looks at each of them once a heartbeat, here, and at nodes alone in each round.

    Args:
        text: of the heartbeat, as it came.
        table: statuses of its processes.
        newest_step: the last step that one of its ranks has told of; None: there are no ranks.
        lowest_step: that of the rank that is furthest behind; None: there are no ranks.
        are_well: no process of it can be a finding.
        is_clean: nothing else in the heartbeat can be one either.
        is_in_phase: a rank is in a phase that takes its time, and has not ended.
        has_phase: a rank has told of one, if it has ended since too.
        is_blocked: a rank is blocked in the kernel.
        are_ended: all ranks have ended.
    """

    heartbeat: Heartbeat
    heard_s: float
    text: bytes = b"{}"
    stopped_since_s: dict[int, float] = field(default_factory=dict)
    table: RankTable = field(init=False)
    newest_step: int | None = field(init=False)
    lowest_step: int | None = field(init=False)
    are_well: bool = field(init=False)
    is_clean: bool = field(init=False)
    is_in_phase: bool = field(init=False)
    has_phase: bool = field(init=False)
    is_blocked: bool = field(init=False)
    are_ended: bool = field(init=False)

    def __post_init__(self) -> None:
        """Take what several rules ask of a node's ranks from the columns."""
        heartbeat = self.heartbeat
        self.table = table = RankTable.of(heartbeat.ranks) if heartbeat.ranks else heartbeat.table
        if table.step:
            self.newest_step, self.lowest_step = max(table.step), min(table.step)
        else:
            self.newest_step = self.lowest_step = 0 if table.rank else None
        states = set(table.state)
        self.is_blocked, self.are_ended = "blocked" in states, states <= {"ended"}
        self.has_phase = any(table.phase)
        self.is_in_phase = self.has_phase and any(
            phase and state != "ended" for phase, state in zip(table.phase, table.state, strict=True)
        )
        self.are_well = states <= {"running", "ended"} and all(table.is_finite)
        if self.are_well and "ended" in states:
            codes = table.exit_code or (None,) * len(table.rank)
            self.are_well = all(code == 0 for code, state in zip(codes, table.state, strict=True) if state == "ended")
        self.is_clean = self.are_well and not heartbeat.matches

    @property
    def newest(self) -> RankStatus | None:
        """Rank that has told of the last step; None: there are no ranks."""
        steps = self.table.step
        return self.table.rows()[steps.index(max(steps)) if steps else 0] if self.table.rank else None


@dataclass
class Slowness:
    """Slow steps in a row: since when, and who stood out how often.

    Args:
        gaps: by rank and node that waited least: by how much less than all others, in each look.
    """

    since_s: float | None = None
    gaps: dict[tuple[int, str], list[float]] = field(default_factory=dict)


class View:
    """All nodes of a run as their heartbeats show them."""

    def __init__(self, heartbeat_s: float) -> None:
        self.nodes: dict[str, NodeView] = {}
        self.unclean: set[str] = set()
        """Nodes whose last heartbeat has something that may be a finding."""
        self.incarnations: dict[str, int] = {}
        """Incarnation of each node's last heartbeat: of thousands of nodes, in a table that is read in one go."""
        self.in_phase: set[str] = set()
        """Nodes with a rank that has told of a phase that takes its time."""
        self.num_checks_told = 0
        """Results of self-checks that have come, of any node."""
        self.expected: dict[str, float] = {}
        """Since when each node is waited for, monotonic seconds; heartbeats of no other are taken."""
        self.losses: deque[float] = deque(maxlen=_KEPT_STEPS)
        self.steps_ms: deque[float] = deque(maxlen=1024)
        self.num_steps_told = 0
        self.shortest_ms = 0.0
        """Shortest median of `_BLOCK_STEPS` steps in a row that were told of in this incarnation; 0: not known."""
        self.step = 0
        self.stepped_s = 0.0
        self.in_phase_s = 0.0
        """When a rank was last heard of in a phase that takes its time, monotonic seconds."""
        self.slow = Slowness()
        self.usual_gaps: deque[tuple[int, float]] = deque(maxlen=_KEPT_STEPS)
        """Rank that waited least in looks at normal steps, of earlier incarnations too, and by how much less."""
        self.looked_step = 0
        self.has_news = True
        """Whether a heartbeat has come, since this was last cleared, that is more than a sign of life."""
        self.clocks = NodeClocks()
        self._furthest = (-1, 0, "")  # (incarnation, step, node) of the furthest step told of
        self._looked = (-1, 0, 0)  # (incarnation, step, number of leading members known to be past that step)
        self._traffic: dict[str, deque[tuple[float, int]]] = {}  # when heard, bytes since the boot
        self._rates: dict[str, tuple[float, float]] = {}  # as of `rates`
        self._lately_s = 0.0  # how long it counts as lately; 0: not known yet
        self._typical = (0, 0.0)  # number of steps told of, and their median
        self._silent_since: tuple[list[str], float] = [], -math.inf  # of these members none has been silent for longer
        self._heartbeat_s = heartbeat_s

    def take(self, heartbeat: Heartbeat, now_s: float, text: bytes = b"{}") -> bool:
        """Take a heartbeat in, with its text; False: it is older than what is known, or a replay."""
        known = self.nodes.get(heartbeat.node)
        if known and known.heartbeat.boot == heartbeat.boot and heartbeat.seq <= known.heartbeat.seq:
            return False
        if known and known.heartbeat.boot != heartbeat.boot and heartbeat.boots < known.heartbeat.boots:
            return False  # of an executor that is gone
        view = self.nodes[heartbeat.node] = NodeView(heartbeat, now_s, text)
        if not known or known.heartbeat.incarnation != heartbeat.incarnation:
            self.incarnations[heartbeat.node] = heartbeat.incarnation
        if not known or known.heartbeat.checks_of != heartbeat.checks_of or known.heartbeat.boot != heartbeat.boot:
            self.num_checks_told += 1
        self._sort_in(view, known)
        step = view.newest_step
        if step is not None:
            self._furthest = max(self._furthest, (heartbeat.incarnation, step, heartbeat.node))
        if step is not None and heartbeat.tx_bytes:
            moved = self._traffic.setdefault(heartbeat.node, deque(maxlen=_KEPT_STEPS))
            if not moved or now_s - moved[-1][0] > self._heartbeat_s / 2:  # not what is told at once, between two
                moved.append((now_s, heartbeat.tx_bytes + heartbeat.rx_bytes))
                self._note_rates(heartbeat.node, moved)
        is_same = known and (known.heartbeat.boot, known.heartbeat.phase) == (heartbeat.boot, heartbeat.phase)
        self.has_news = self.has_news or not (is_same and view.is_clean) or (not self.step and step is not None)
        return True

    def _sort_in(self, view: NodeView, known: NodeView | None) -> None:
        """Keep the sets of nodes that are looked at as a node's heartbeat changes; `known`: it as it was before."""
        name = view.heartbeat.node
        if view.has_phase:
            self.in_phase.add(name)
        elif known and known.has_phase:
            self.in_phase.discard(name)
        if view.is_in_phase:
            self.in_phase_s = view.heard_s
        if not view.is_clean:
            self.unclean.add(name)
            stopped, table = known.stopped_since_s if known else {}, view.table
            is_stopped = {
                rank for rank, state in zip(table.rank, table.state, strict=True) if state in ("stopped", "blocked")
            }
            view.stopped_since_s = {rank: stopped.get(rank, view.heard_s) for rank in is_stopped}
        elif known and not known.is_clean:
            self.unclean.discard(name)

    def begin(self, now_s: float) -> None:
        """Forget the steps of the incarnation before."""
        self.losses.clear()
        self.steps_ms.clear()
        self.num_steps_told, self.shortest_ms = 0, 0.0
        self._typical = (0, 0.0)
        self._traffic.clear()
        self._rates.clear()
        self._lately_s = 0.0
        self.step, self.stepped_s = 0, now_s
        self.slow, self.looked_step = Slowness(), 0

    def forgive(self, seconds: float) -> None:
        """Let all nodes have been heard of later: the driver itself, or the store, was away for so long."""
        for node in self.nodes.values():
            node.heard_s += seconds
            node.stopped_since_s = {rank: since + seconds for rank, since in node.stopped_since_s.items()}
        self.expected = {name: since_s + seconds for name, since_s in self.expected.items()}
        self.stepped_s += seconds
        self.in_phase_s += seconds

    def follow_steps(self, members: Sequence[str], incarnation: int, now_s: float) -> None:
        """Note the newest step of the members, and its time and loss."""
        told_of, step, _ = self._furthest
        if told_of == incarnation and step <= self.step:  # most looks end here
            return
        newest = self.newest(members, incarnation)
        if newest is None or newest.step <= self.step:
            return
        self.step, self.stepped_s = newest.step, now_s
        if newest.step_ms is not None:
            self.steps_ms.append(newest.step_ms)
            self.num_steps_told += 1
            if self.num_steps_told % _BLOCK_STEPS == 0 and len(self.steps_ms) > _BLOCK_STEPS:  # not the first ones
                median_ms = statistics.median(list(self.steps_ms)[-_BLOCK_STEPS:])
                self.shortest_ms = min(self.shortest_ms or median_ms, median_ms)
        if newest.loss is not None:
            self.losses.append(newest.loss)

    def ranks(self, members: Sequence[str], incarnation: int) -> Iterable[tuple[str, RankStatus]]:
        """Every rank of these nodes in an incarnation, as last heard of, with its node."""
        for name, table in self.tables(members, incarnation):
            for rank in table.rows():
                yield name, rank

    def tables(self, members: Sequence[str], incarnation: int) -> Iterable[tuple[str, RankTable]]:
        """Ranks of each of these nodes in an incarnation, as last heard of, with the node: rows take longer."""
        for name in members:
            view = self.nodes.get(name)
            if view is not None and view.heartbeat.incarnation == incarnation:
                yield name, view.table

    def look(self, members: Sequence[str], incarnation: int) -> tuple[int, str, float] | None:
        """Return the rank and node that wait least for others, and by which share of a step less than all others.

        None: fewer than three ranks tell that, or one has told of no step since the last look.
        """
        num_past = self._looked[2] if self._looked[:2] == (incarnation, self.looked_step) else 0
        for place in range(num_past, len(members)):  # most looks end here: of thousands of ranks, one is behind
            if self._is_behind(members[place], incarnation):
                self._looked = (incarnation, self.looked_step, place)  # those before it stay past that step
                return None
        tables = list(self.tables(members, incarnation))
        if sum(len(table.rank) for _, table in tables) < 3:
            return None
        self.looked_step = self.step
        waits = [exposed for _, table in tables for exposed in table.exposed if exposed is not None]
        if len(waits) < 3:
            return None
        least, second = heapq.nsmallest(2, waits)
        rank, node = min(
            (rank, name)
            for name, table in tables
            if least in table.exposed
            for exposed, rank in zip(table.exposed, table.rank, strict=True)
            if exposed == least
        )
        return rank, node, second - least

    def _is_behind(self, name: str, incarnation: int) -> bool:
        """Whether a rank of a node has told of no step of the incarnation since the last look."""
        view = self.nodes.get(name)
        if view is None or view.heartbeat.incarnation != incarnation or view.lowest_step is None:
            return False
        return view.lowest_step <= self.looked_step

    def usual_gap(self, rank: int) -> float | None:
        """Share of a normal step by which a rank waits less than all others, median; None: too little is known."""
        gaps = [gap if least == rank else 0.0 for least, gap in self.usual_gaps]
        return statistics.median(gaps) if len(gaps) >= _LEAST_LOOKS else None

    def newest(self, members: Sequence[str], incarnation: int) -> RankStatus | None:
        """The rank of an incarnation that has told of the last step; None: there is none."""
        told_of, step, furthest = self._furthest
        view = self.nodes.get(furthest) if told_of == incarnation and furthest in members else None
        if view is not None and view.heartbeat.incarnation == incarnation and view.newest_step == step:
            return view.newest  # nobody has told of a later one: thousands need not be looked at
        views = [view for name in members if (view := self.nodes.get(name)) and view.newest_step is not None]
        views = [view for view in views if view.heartbeat.incarnation == incarnation]
        return max(views, key=lambda view: view.newest_step or 0).newest if views else None

    def have_ended(self, members: Sequence[str], incarnation: int) -> bool:
        """Whether all members have told of the incarnation, and that all its processes have ended."""
        views = (self.nodes.get(name) for name in members)
        return all(
            view is not None and view.are_ended and view.table.rank and view.heartbeat.incarnation == incarnation
            for view in views
        )

    def rates(self) -> Mapping[str, tuple[float, float]]:
        """Bytes a second of nodes lately, and of this incarnation before; nodes of which too little is known have none.

        Lately is the last two heartbeats, and not less than three typical steps: within one a node may be silent.
        """
        typical_ms = self.typical_ms()
        if not typical_ms:
            return {}
        is_first = not self._lately_s
        self._lately_s = max(2 * self._heartbeat_s, 3 * typical_ms / 1e3)
        if is_first:
            for node, moved in self._traffic.items():
                self._note_rates(node, moved)
        return self._rates

    def _note_rates(self, node: str, moved: deque[tuple[float, int]]) -> None:
        """Compute a node's rates of now, where the typical step is known."""
        if not self._lately_s:
            return
        (first_s, first), (last_s, last) = moved[0], moved[-1]
        num_before = len(moved)  # those that are not of lately
        while num_before and last_s - moved[num_before - 1][0] < self._lately_s:
            num_before -= 1
        cut_s, cut = moved[max(num_before - 1, 0)]
        if num_before < _LEAST_STEPS or cut_s <= first_s or not first <= cut <= last:  # counters were reset
            self._rates.pop(node, None)
        else:
            self._rates[node] = (last - cut) / (last_s - cut_s), (cut - first) / (cut_s - first_s)

    def is_lost(self, name: str, missed: int, now_s: float) -> bool:
        """Whether a node has been silent for longer than so many heartbeats."""
        view = self.nodes.get(name)
        since_s = view.heard_s if view else self.expected.get(name, -math.inf)
        return now_s - since_s > missed * self._heartbeat_s

    def lost(self, members: Sequence[str], missed: int, now_s: float) -> list[str]:
        """Return the members that have been silent for longer than so many heartbeats."""
        limit_s = missed * self._heartbeat_s
        looked_at, since_s = self._silent_since
        if now_s - since_s <= limit_s and looked_at == members:  # each has been heard of since then, or later
            return []
        heard_s = [
            (view.heard_s if (view := self.nodes.get(name)) else self.expected.get(name, -math.inf)) for name in members
        ]
        self._silent_since = list(members), min(heard_s, default=-math.inf)
        return [name for name, at_s in zip(members, heard_s, strict=True) if now_s - at_s > limit_s]

    def typical_ms(self) -> float:
        """Median step of this incarnation without the first; 0: too few are known."""
        if self._typical[0] != self.num_steps_told:
            steps = list(self.steps_ms)[1:]
            typical_ms = statistics.median(steps) if len(steps) >= _LEAST_STEPS else 0.0
            self._typical = self.num_steps_told, typical_ms
        return self._typical[1]


class Notes:
    """Findings that are only noted: what lasts is new once, and again where it comes back after `_NOTED_S`."""

    def __init__(self) -> None:
        self._seen_s: dict[tuple[Kind, str], float] = {}  # when each was last seen

    def new(self, notes: Iterable[Finding], now_s: float) -> Iterable[Finding]:
        """Yield the findings that are to be written down; one counts as noted once the next one is asked for."""
        for finding in notes:
            key = (finding.kind, finding.node)
            if now_s - self._seen_s.get(key, -math.inf) > _NOTED_S:
                yield finding  # where writing it fails, it is new again
            self._seen_s[key] = now_s


def find(
    view: View,
    members: Sequence[str],
    incarnation: int,
    settings: ResilienceConfig,
    now_s: float,
    now_ns: int,
    typical_ms: float = 0.0,
    *,
    trains: bool = True,
) -> list[Finding]:
    """Return what is wrong with the members of an incarnation, as last heard of.

    Args:
        trains: False: its processes are being killed, and that they take no step, or a long one, means nothing.
        typical_ms: the job's typical step, of this and earlier incarnations; 0: not known.
    """
    findings = [*_lost(view, members, settings.missed, now_s, now_ns)]
    unclean = [name for name in members if name in view.unclean] if view.unclean else []

    @cache  # most lines name no rank
    def by_rank() -> dict[int, str]:
        return {rank: node for node, table in view.tables(members, incarnation) for rank in table.rank}

    blocked = [name for name in unclean if view.nodes[name].is_blocked]
    is_shared = len(blocked) > 1 and len(blocked) > _MOST_LOST * len(members)  # [Note: silence]
    # A line that is but noted stays in a node's heartbeats for hours: its ranks need not be looked at for that.
    for node, rank in view.ranks([name for name in unclean if not view.nodes[name].are_well], incarnation):
        findings += _of_rank(node, rank, view, settings, now_s, now_ns, is_shared=is_shared)
    for name in unclean:
        heartbeat = view.nodes[name].heartbeat
        # Lines of an incarnation before are told until the next one begins, and mean nothing here.
        if heartbeat.incarnation == incarnation:
            for match in heartbeat.matches:
                findings += _of_line(name, match, by_rank, view.clocks, heartbeat)
    if trains and not any(finding.weight in ("cause", "symptom") for finding in findings):
        findings += _quiet(view, members, incarnation, settings, now_ns)
        findings += _hung(view, members, incarnation, settings, now_s, now_ns, typical_ms)
        findings += _slow(view, members, incarnation, settings, now_s, now_ns, typical_ms)
        findings += _spike(view, settings, now_ns)
    return findings


def loaded_code(view: View, members: Sequence[str], incarnation: int) -> dict[str, list[str]] | None:
    """Return names of members by the digest of our packages' files that they have loaded; None: not all are known.

    Executors that send no digest are in no list.
    """
    views = [view.nodes.get(name) for name in members]
    beats = [known.heartbeat for known in views if known and known.heartbeat.incarnation == incarnation]
    if len(beats) < len(members):
        return None
    nodes: dict[str, list[str]] = {}
    for beat in beats:
        if beat.code:
            nodes.setdefault(beat.code, []).append(beat.node)
    return nodes


def of_code(nodes: Mapping[str, Sequence[str]], now_ns: int, *, is_known: bool) -> Finding:
    """Finding of members that have loaded different files.

    Args:
        nodes: by digest.
        is_known: they differed so at an earlier start, too.
    """
    sides = "; ".join(f"{code} on {', '.join(names)}" for code, names in sorted(nodes.items()))
    why = "their installations differ" if is_known else "they changed during the start"
    text = f"nodes have loaded different files of netlayer's packages, and {why}: {sides}"
    return Finding("code", "note" if is_known else "cause", "", None, text, now_ns)


def _lost(view: View, members: Sequence[str], missed: int, now_s: float, now_ns: int) -> Iterable[Finding]:
    lost = view.lost(members, missed, now_s)
    if len(lost) > 1 and len(lost) > _MOST_LOST * len(members):
        lost = [name for name in lost if view.is_lost(name, 3 * missed, now_s)]  # [Note: silence]
    for name in lost:
        known = view.nodes.get(name)
        since = f"{now_s - known.heard_s:.1f} s" if known else "ever"
        yield Finding("node_lost", "cause", name, None, f"no heartbeat for {since}", now_ns)


def _of_rank(
    node: str,
    rank: RankStatus,
    view: View,
    settings: ResilienceConfig,
    now_s: float,
    now_ns: int,
    *,
    is_shared: bool,
) -> Iterable[Finding]:
    """Find what is wrong with one process.

    Args:
        is_shared: most nodes have processes that are blocked in the kernel.
    """
    who = f"rank {rank.rank} (process {rank.pid})"
    if rank.state == "ended" and rank.exit_code and not rank.was_ended:
        at_ns = rank.ended_ns or now_ns
        when = view.clocks.moment(view.nodes[node].heartbeat, rank.alive_ns or at_ns, at_ns)
        if rank.exit_code == _ABORT:
            yield Finding("exited", "symptom", node, rank.rank, f"{who} has aborted (SIGABRT)", at_ns, when)
        elif rank.exit_code < 0:
            text = f"{who} was killed by signal {-rank.exit_code}"
            yield Finding("killed", "cause", node, rank.rank, text, at_ns, when)
        elif rank.exit_code == _USAGE:
            yield Finding("job", "symptom", node, rank.rank, f"{who} ended with exit code 2", at_ns, when)
        else:
            text = f"{who} ended with exit code {rank.exit_code}"
            yield Finding("exited", "symptom", node, rank.rank, text, at_ns, when)
    if rank.state in ("stopped", "blocked"):
        since_s = now_s - view.nodes[node].stopped_since_s.get(rank.rank, now_s)
        # In a phase a process reads and writes files, and may wait for a slow file system as it does for the phase.
        is_in_phase = rank.state == "blocked" and rank.phase
        if since_s > (max(settings.stopped_s, settings.phase_s) if is_in_phase else settings.stopped_s):
            word = "is stopped by a signal" if rank.state == "stopped" else "is blocked in the kernel"
            text = f"{who} {word}, for {since_s:.1f} s"
            if rank.state == "blocked" and is_shared:
                yield Finding("stopped", "note", "", None, f"{text}, and so are others on most nodes", now_ns)
            else:
                yield Finding("stopped", "cause", node, rank.rank, text, now_ns)
    if not rank.is_finite:
        yield Finding("nan", "symptom", node, rank.rank, f"{who}: the loss of step {rank.step} is no number", now_ns)


def _of_line(
    node: str, match: LogMatch, by_rank: Callable[[], dict[int, str]], clocks: NodeClocks, heartbeat: Heartbeat
) -> Iterable[Finding]:
    text = f"{match.rule}: {match.line}"
    weight: Weight = "cause" if match.rank is None and match.means == "hardware" else "evidence"
    if match.means in ("named", "corrupt"):
        kind: Kind = "named" if match.means == "named" else "corrupt"
        for named in match.names:
            if named in by_rank():
                yield Finding(kind, weight, by_rank()[named], named, text, match.at_ns)
        if kind == "corrupt" and not match.names:  # of two replicas nobody can tell which is right
            yield Finding(kind, weight, "", None, text, match.at_ns)
    elif match.means == "nan":
        # One rank among many has a fault; where all have lost their numbers, none is to blame.
        rank = match.names[0] if len(match.names) == 1 else None
        yield Finding("nan", weight, "" if rank is None else by_rank().get(rank, ""), rank, text, match.at_ns)
    elif match.means == "process":
        when = clocks.moment(heartbeat, match.since_ns or match.at_ns, match.at_ns)
        yield Finding("exited", weight, node, match.rank, text, match.at_ns, when)
    elif match.means == "note" or match.means == "symptom":
        yield Finding("symptom", match.means, node, match.rank, text, match.at_ns)
    else:
        yield Finding(match.means, weight, node, match.rank, text, match.at_ns)


def _hung(
    view: View, members: Sequence[str], incarnation: int, settings: ResilienceConfig,
    now_s: float, now_ns: int, typical_ms: float,
) -> Iterable[Finding]:  # fmt: skip
    """Find a job that takes no step, and the rank that is behind all others, if there is one: [Note: silence]."""
    silent_s = now_s - view.stepped_s
    typical_ms = view.typical_ms() or typical_ms
    limit_s = max(settings.silence_floor_s, settings.silence_factor * typical_ms / 1e3)
    if silent_s <= limit_s:  # in a phase it may be silent for longer, and never for less: ranks need not be looked at
        return
    ranks = list(view.ranks(members, incarnation))
    if not ranks or all(rank.state == "ended" for _, rank in ranks):
        return
    is_in_phase = not typical_ms or view.step == 0 or any(rank.phase for _, rank in ranks)
    if not is_in_phase:
        silent_s = min(silent_s, now_s - view.in_phase_s)
    limit_s = max(limit_s, settings.phase_s) if is_in_phase else limit_s
    if silent_s <= limit_s:
        return
    phases = sorted({rank.phase for _, rank in ranks if rank.phase})
    where = f", in: {', '.join(phases)}" if phases else ""
    text = f"no step for {silent_s:.1f} s, more than {limit_s:.1f} s, after step {view.step}{where}"
    # The rank that told of a step less than all others is the one they wait for.
    behind = min(rank.step for _, rank in ranks)
    slowest = [(node, rank) for node, rank in ranks if rank.step == behind]
    if len(slowest) == 1 and len(ranks) > 1 and max(rank.step for _, rank in ranks) > behind + 1:
        node, rank = slowest[0]
        yield Finding("hung", "cause", node, rank.rank, f"{text}; rank {rank.rank} is at step {behind}", now_ns)
    else:
        yield Finding("hung", "cause", "", None, text, now_ns)


def _quiet(
    view: View, members: Sequence[str], incarnation: int, settings: ResilienceConfig, now_ns: int
) -> Iterable[Finding]:
    """Find nodes whose traffic has fallen, within steps: all of them do so long before a job counts as hung.

    They are notes: which node the others wait for, no counter of bytes tells; and where several nodes are parts of one
    machine, its counters are all of theirs.
    """
    if settings.backend == "local":
        return
    places = set(members) if view.in_phase else ()
    if any(name in places and view.incarnations[name] == incarnation for name in view.in_phase):
        return
    fallen = {
        name: (now, before)
        for name, (now, before) in view.rates().items()
        if before > _LEAST_BYTES_S and now < settings.traffic_fall * before
    }
    fallen = {name: fallen[name] for name in members if name in fallen} if fallen else {}
    if not fallen:
        return
    now_mb, before_mb = (statistics.median(rate[part] for rate in fallen.values()) / 1e6 for part in (0, 1))
    text = f"traffic has fallen to {now_mb:.1f} MB/s from {before_mb:.1f} MB/s, at step {view.step}"
    if len(fallen) == len(members):
        yield Finding("traffic", "note", "", None, f"{text}, on all nodes", now_ns)
    for name in fallen if len(fallen) < len(members) else ():
        yield Finding("traffic", "note", name, None, text, now_ns)


def _slow(
    view: View, members: Sequence[str], incarnation: int, settings: ResilienceConfig,
    now_s: float, now_ns: int, typical_ms: float,
) -> Iterable[Finding]:  # fmt: skip
    """Find steps that take long, and the rank that holds up all others: [Note: slow]."""
    # A run without a restart has no earlier incarnation to compare with, only its own better times.
    typical_ms = min(filter(None, (typical_ms, view.shortest_ms)), default=0.0)
    recent = list(view.steps_ms)[-settings.slow_steps :]
    normal_ms = typical_ms or view.typical_ms()
    if recent and normal_ms and recent[-1] < settings.slow_factor * normal_ms:
        look = view.look(members, incarnation)
        if look is not None:
            view.usual_gaps.append((look[0], look[2]))
    if not typical_ms or len(recent) < settings.slow_steps or min(recent) < settings.slow_factor * typical_ms:
        view.slow = Slowness()
        return
    slow = view.slow
    slow.since_s = now_s if slow.since_s is None else slow.since_s
    look = view.look(members, incarnation)
    if look is not None:
        slow.gaps.setdefault(look[:2], []).append(look[2])
    if now_s - slow.since_s < settings.slow_floor_s:
        return
    text = f"{len(recent)} steps took {statistics.median(recent):.0f} ms and more, typical are {typical_ms:.0f} ms"
    (rank, node), gaps = max(slow.gaps.items(), key=lambda each: len(each[1]), default=((0, ""), [0.0]))
    num_looks, lost_share = sum(map(len, slow.gaps.values())), 1 - typical_ms / statistics.median(recent)
    is_steady = len(gaps) >= max(_LEAST_LOOKS, _MOST_LOOKS * num_looks)
    usual = view.usual_gap(rank)
    growth = -math.inf if usual is None else statistics.median(gaps) - usual
    if is_steady and growth > max(_EXPOSED_GAP, _EXPLAINED * lost_share):
        text += f"; rank {rank} waits least for others, in {len(gaps)} of {num_looks} looks, by"
        text += f" {statistics.median(gaps):.0%} of a step, and by {usual:.0%} in normal steps"
        yield Finding("slow", "cause" if settings.evict_slow else "note", node, rank, text, now_ns)
    else:
        yield Finding("slow", "note", "", None, f"{text}; which rank is the cause cannot be told", now_ns)


def _spike(view: View, settings: ResilienceConfig, now_ns: int) -> Iterable[Finding]:
    losses = list(view.losses)
    if not settings.loss_spike or len(losses) < 2 * _LEAST_STEPS:
        return
    middle = statistics.median(losses[:-1])
    if losses[-1] > settings.loss_spike * middle:
        text = (
            f"the loss of step {view.step} is {losses[-1]:.4g}, {losses[-1] / middle:.2f} times the median of the last"
        )
        yield Finding("spike", "note", "", None, text, now_ns)
