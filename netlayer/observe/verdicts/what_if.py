"""Replay of traced training steps: how long a step takes if no operation of a kind is slower than the others.

A step is a graph of operations: computation in order on each pipeline stage, sends and receives paired between stages,
collectives that wait for their data-parallel peers. The replay gives each operation another duration and runs the graph
again; the ratio of two replays is what the difference costs (S), and repairing one part of the job tells which share
of it that part causes (M_S for the last stage, M_W for the slowest 3% of ranks).

The measures are those of Lin et al., "Understanding Stragglers in Large Model Training Using What-if Analysis" (OSDI
2025, arXiv 2505.05713): its equations 1 to 5, and where the paper leaves a rule open, what its published results
imply. Such rules are marked [implied] below. Not covered: tensor-parallel communication, which is part of an
operation's own duration here.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

Times = np.ndarray[Any, np.dtype[np.float64]]
Cells = np.ndarray[Any, np.dtype[np.bool_]]

COMPUTE = ("forward", "backward")
POINT_TO_POINT = ("forward_send", "forward_recv", "backward_send", "backward_recv")
DATA_PARALLEL = ("all_gather", "reduce_scatter", "all_reduce")
EMBEDDING, LAYER_NORM, CLIP, OPTIMIZER, GC = "embedding_grads", "layer_norm_grads", "clip", "optimizer", "gc"
KINDS = (*COMPUTE, *POINT_TO_POINT, *DATA_PARALLEL, EMBEDDING, LAYER_NORM, CLIP, OPTIMIZER, GC)
# An ideal duration is the mean of a computation's kind and the median of a communication's: a late start of a clock
# or one retransmission would move a mean. The layer norms' all-reduce counts as communication here, although the
# replay runs it as an operation of its rank alone [implied].
_MEDIAN = {*POINT_TO_POINT, *DATA_PARALLEL, EMBEDDING, LAYER_NORM, CLIP}
# Clocks of hosts differ: an end this far before the last peer's start is an error of clocks, and counts as no time.
_CLOCK_ERROR_S = 1e-2
_SLOWEST_PERCENT = 3


@dataclass(frozen=True)
class Operation:
    """One operation of a step on one pipeline stage: the `number`-th of its kind there, in order of its start."""

    kind: str
    number: int
    stage: int
    chunk: int = 0
    """Model chunk of the stage (interleaved schedules), from 0."""


@dataclass(frozen=True)
class Timeline:
    """Traced operations of a job; each step and data-parallel rank runs the same ones.

    Args:
        operations: those of one data-parallel rank in one step, on all its stages.
        start_s, end_s: [operation, step, data-parallel rank], by one clock.
        steps: numbers of the steps.
        ranks: global rank of [stage, data-parallel rank].
    """

    operations: Sequence[Operation]
    start_s: Times
    end_s: Times
    steps: Sequence[int]
    ranks: np.ndarray[Any, np.dtype[np.int64]]

    @property
    def stages(self) -> Any:
        """Stage of each operation."""
        return np.array([operation.stage for operation in self.operations])


@dataclass(frozen=True)
class Graph:
    """Order of the operations of one step.

    Args:
        after: for each operation those that must end before it starts.
        groups: operations that meet: each ends its own transfer time after the last of them has started.
        group_of: the group of an operation; -1 for one that waits for nobody.
        over_ranks: True for an operation that meets its counterparts of all data-parallel ranks as well.
        order: the operations, each behind all that it waits for.
    """

    after: Sequence[Sequence[int]]
    groups: Sequence[Sequence[int]]
    group_of: Sequence[int]
    over_ranks: Sequence[bool]
    order: Sequence[int]


@dataclass(frozen=True)
class WhatIf:
    """Measures of one job; times are means over the steps.

    Args:
        step_s: replayed with the traced durations, no gaps between operations.
        ideal_s: replayed with every operation at its kind's ideal duration.
        slowdown: S, step_s over ideal_s.
        by_stage, by_dp_rank: slowdown if the operations of one stage or data-parallel rank alone keep their durations.
        last_stage_share: M_S, share of step_s - ideal_s that goes if the last stage is ideal; NaN where S is 1.
        slowest_share: M_W, the same for the slowest 3% of ranks.
        slowest: these ranks, the slowest first.
        rank_slowdown: [stage, dp rank], the lesser of both slowdowns of a rank's stage and data-parallel rank.
    """

    step_s: float
    ideal_s: float
    slowdown: float
    by_stage: Times
    by_dp_rank: Times
    last_stage_share: float
    slowest_share: float
    slowest: tuple[int, ...]
    rank_slowdown: Times


def analyse(timeline: Timeline) -> WhatIf:
    """Return S, M_S and M_W of a job.

    Raises:
        ValueError: the operations do not form a training step that this model knows; which, and why.
    """
    graph = build_graph(timeline)
    traced = durations_of(timeline, graph)
    ideal = ideal_durations(timeline.operations, traced)
    step_s, ideal_s = (float(replay(graph, durations).mean()) for durations in (traced, ideal))

    def mean_step(cells: Cells, elsewhere: Times, inside: Times) -> float:
        return float(replay(graph, np.where(cells, inside, elsewhere)).mean())

    # A rank's own slowdown would take a replay for each rank; stage and data-parallel rank bound it from above.
    num_stages, num_dp = timeline.ranks.shape
    of_stage = timeline.stages[:, None, None] == np.arange(num_stages)[:, None, None, None]  # [stage, op, 1, 1]
    dp_ranks = np.arange(num_dp)
    by_stage = np.array([mean_step(cells, ideal, traced) for cells in of_stage]) / ideal_s
    by_dp = np.array([mean_step(np.asarray(dp_ranks == rank)[None, None], ideal, traced) for rank in dp_ranks])
    by_dp /= ideal_s
    rank_slowdown = np.minimum(by_stage[:, None], by_dp[None, :])
    # Ties go to the lower rank [implied].
    places = sorted(np.ndindex(num_stages, num_dp), key=lambda at: (-rank_slowdown[at], timeline.ranks[at]))
    slowest = places[: math.ceil(len(places) * _SLOWEST_PERCENT / 100)]
    chosen = np.zeros(timeline.ranks.shape, bool)
    chosen[tuple(zip(*slowest, strict=True))] = True
    lost = step_s - ideal_s
    repaired = [mean_step(cells, traced, ideal) for cells in (of_stage[-1], chosen[timeline.stages][:, None, :])]
    shares = [(step_s - without) / lost if lost > 1e-9 * step_s else math.nan for without in repaired]
    return WhatIf(
        step_s,
        ideal_s,
        step_s / ideal_s,
        by_stage,
        by_dp,
        shares[0],
        shares[1],
        tuple(int(timeline.ranks[at]) for at in slowest),
        rank_slowdown,
    )


def replay(graph: Graph, durations_s: Times) -> Times:
    """Return how long each step takes, [step], if the operations take `durations_s`, [operation, step, dp rank]."""
    start, end = np.empty_like(durations_s), np.empty_like(durations_s)
    waiting = [len(group) for group in graph.groups]
    for at in graph.order:
        earlier = graph.after[at]
        start[at] = np.max(end[list(earlier)], axis=0) if earlier else 0.0
        group = graph.group_of[at]
        if group < 0:
            end[at] = start[at] + durations_s[at]
            continue
        waiting[group] -= 1
        if waiting[group]:
            continue  # the last of the group to start ends all of it
        members = list(graph.groups[group])
        begun = np.max(start[members], axis=0)
        if graph.over_ranks[at]:
            begun = np.broadcast_to(begun.max(axis=1, keepdims=True), begun.shape)
        end[members] = begun + durations_s[members]
    return np.max(end, axis=(0, 2))  # type: ignore[no-any-return]


def durations_of(timeline: Timeline, graph: Graph) -> Times:
    """Return the traced durations; of operations that meet, the time from the last one's start to the own end."""
    durations = timeline.end_s - timeline.start_s
    for members in graph.groups:
        begun = timeline.start_s[list(members)].max(axis=0)
        if graph.over_ranks[members[0]]:
            begun = np.broadcast_to(begun.max(axis=1, keepdims=True), begun.shape)
        transfer = timeline.end_s[list(members)] - begun
        durations[list(members)] = np.where(transfer <= -_CLOCK_ERROR_S, 0.0, transfer)
    return durations


def ideal_durations(operations: Sequence[Operation], durations_s: Times) -> Times:
    """Return for each operation the mean (computation) or median (communication) of its kind over the whole job."""
    ideal = np.empty_like(durations_s)
    kinds = np.array([operation.kind for operation in operations])
    for kind in dict.fromkeys(kinds.tolist()):
        same = kinds == kind
        ideal[same] = (np.median if kind in _MEDIAN else np.mean)(durations_s[same])
    return ideal


def build_graph(timeline: Timeline) -> Graph:
    """Return the order of the operations, from the first step of data-parallel rank 0: all others repeat it.

    Raises:
        ValueError: sends and receives do not fit the computation, or an operation is of no known kind.
    """
    return _Builder(timeline).graph()


class _Builder:
    """Rules by which operations wait for each other; operations are numbers into `timeline.operations`."""

    def __init__(self, timeline: Timeline) -> None:
        self.operations = timeline.operations
        self.start, self.end = timeline.start_s[:, 0, 0], timeline.end_s[:, 0, 0]
        self.num_stages, self.num_dp = timeline.ranks.shape
        self.num_chunks = 1 + max(operation.chunk for operation in timeline.operations)
        self.after: list[set[int]] = [set() for _ in self.operations]
        # By stage and kind, in order of the start.
        self.places: dict[tuple[int, str], list[int]] = defaultdict(list)
        for at in sorted(range(len(self.operations)), key=lambda at: (self.start[at], self.operations[at].number)):
            operation = self.operations[at]
            if operation.kind not in KINDS:
                raise ValueError(f"operation {operation.kind!r} is none of {', '.join(KINDS)}")
            self.places[operation.stage, operation.kind].append(at)

    def graph(self) -> Graph:
        pairs: dict[tuple[str, int, int], list[int]] = defaultdict(list)
        for stage in range(self.num_stages):
            compute = self._compute(stage)
            if not compute:
                raise ValueError(f"stage {stage} has no forward and no backward")
            self._chain(compute)
            for kind in POINT_TO_POINT:
                self._chain(self.places[stage, kind])
                self._point_to_point(stage, kind, pairs)
            self._first_backward(stage, compute)
            self._data_parallel(stage)
            self._end_of_step(stage)
        odd = next((key for key, pair in pairs.items() if len(pair) != 2), None)
        if odd:
            raise ValueError(f"{odd[0]} #{odd[2]} from stage {odd[1]} is not there on both sides")
        return self._finished([*pairs.values(), *self._collectives()])

    def _compute(self, stage: int) -> list[int]:
        both = [at for kind in COMPUTE for at in self.places[stage, kind]]
        return sorted(both, key=lambda at: (self.start[at], self.operations[at].number))

    def _chain(self, sequence: Sequence[int]) -> None:
        """Each runs after the one before it: they share a stream."""
        for earlier, later in pairwise(sequence):
            self.after[later].add(earlier)

    def _point_to_point(self, stage: int, kind: str, pairs: dict[tuple[str, int, int], list[int]]) -> None:
        """A computation's output is sent after it, its input received before it, but after the computation before."""
        direction, side = kind.split("_")
        forward, sends = direction == "forward", side == "send"
        # The model's first chunk receives no activation, its last sends none; gradients go the other way.
        end_chunk = (self.num_stages * self.num_chunks - 1) if forward == sends else 0
        compute = self.places[stage, direction]
        needing = [
            (number, at)
            for number, at in enumerate(compute)
            if self.operations[at].chunk * self.num_stages + stage != end_chunk
        ]
        transfers = self.places[stage, kind]
        if len(transfers) != len(needing):
            raise ValueError(f"stage {stage} has {len(transfers)} {kind} for {len(needing)} {direction} that need one")
        sender = stage if sends else (stage + (-1 if forward else 1)) % self.num_stages
        for count, (transfer, (number, at)) in enumerate(zip(transfers, needing, strict=True)):
            pairs[direction, sender, count].append(transfer)
            if sends:
                self.after[transfer].add(at)
                continue
            self.after[at].add(transfer)
            if number:
                self.after[transfer].add(compute[number - 1])

    def _first_backward(self, stage: int, compute: Sequence[int]) -> None:
        """The first gradient's send and receive are posted after the last forward but one before it [implied]."""
        first = next((n for n, at in enumerate(compute) if self.operations[at].kind == "backward"), 0)
        if first >= 2:
            for kind in ("backward_send", "backward_recv"):
                for transfer in self.places[stage, kind][:1]:
                    self.after[transfer].add(compute[first - 2])

    def _data_parallel(self, stage: int) -> None:
        """Parameters are gathered before a chunk's first forward; both data-parallel collectives share a stream."""
        if self.num_dp == 1:
            return
        gathers, scatters = self.places[stage, "all_gather"], self.places[stage, "reduce_scatter"]
        self._chain(sorted([*gathers, *scatters], key=lambda at: (self.start[at], self.operations[at].number)))
        for chunk in range(self.num_chunks):
            firsts = [at for at in self.places[stage, "forward"] if self.operations[at].chunk == chunk]
            lasts = [at for at in self.places[stage, "backward"] if self.operations[at].chunk == chunk]
            of_chunk = [at for at in gathers if self.operations[at].chunk == chunk]
            if firsts and of_chunk:
                self.after[firsts[0]].add(of_chunk[-1])
            ready = [at for at in scatters if self.operations[at].chunk == chunk]
            if self._overlapped() and ready and lasts:
                self.after[ready[0]].add(max(lasts, key=lambda at: self.end[at]))

    def _overlapped(self) -> bool:
        """Whether gradients are reduced during the backward pass: a separate all-reduce then ends the step."""
        return any(self.places[stage, "all_reduce"] for stage in range(self.num_stages))

    def _end_of_step(self, stage: int) -> None:
        """Order what follows the last computation: garbage collection, gradients, clip, optimizer."""
        last = max(self._compute(stage), key=lambda at: self.end[at])
        collection = self.places[stage, GC]
        for at in collection:
            self.after[at].add(last)
        small = [*self.places[stage, LAYER_NORM], *self.places[stage, EMBEDDING]]
        scatters = self.places[stage, "reduce_scatter"] if self.num_dp > 1 else []
        between = self.places[stage, "all_reduce"] if self._overlapped() else scatters
        sequence = [*small, *between, *self.places[stage, CLIP], *self.places[stage, OPTIMIZER]]
        self._chain(sequence)
        for at in sequence[:1]:
            self.after[at] |= {*(collection or [last]), *(scatters[-1:] if self._overlapped() else [])}

    def _collectives(self) -> list[list[int]]:
        """Operations that meet across stages or, one a stage, across data-parallel ranks."""
        stages = range(self.num_stages)
        across = [self._one_a_stage(EMBEDDING), self._one_a_stage(CLIP)]
        alone = [[at] for kind in DATA_PARALLEL for stage in stages for at in self.places[stage, kind]]
        return [group for group in (*across, *(alone if self.num_dp > 1 else [])) if group]

    def _one_a_stage(self, kind: str) -> list[int]:
        return [at for stage in range(self.num_stages) for at in self.places[stage, kind]]

    def _finished(self, groups: Sequence[Sequence[int]]) -> Graph:
        group_of = [-1] * len(self.operations)
        for number, group in enumerate(groups):
            for at in group:
                group_of[at] = number
        # The clip's norm is summed over all ranks; embeddings meet inside one data-parallel rank.
        over_ranks = [operation.kind in (*DATA_PARALLEL, CLIP) for operation in self.operations]
        after = [sorted(earlier) for earlier in self.after]
        return Graph(after, groups, group_of, over_ranks, _topological(after, groups, group_of))


def _topological(after: Sequence[Sequence[int]], groups: Sequence[Sequence[int]], group_of: Sequence[int]) -> list[int]:
    """Return the operations in an order in which each follows all that it waits for, group members included.

    Raises:
        ValueError: they wait for each other in a circle.
    """
    followers: list[list[int]] = [[] for _ in after]
    for later, earlier in enumerate(after):
        for at in earlier:
            followers[at].append(later)
    missing = [len(earlier) for earlier in after]
    open_members = [len(group) for group in groups]
    ready = deque(at for at, count in enumerate(missing) if not count)
    order: list[int] = []
    while ready:
        at = ready.popleft()
        order.append(at)
        group = group_of[at]
        if group >= 0:
            open_members[group] -= 1
            ended = groups[group] if not open_members[group] else ()
        else:
            ended = (at,)
        for member in ended:
            for later in followers[member]:
                missing[later] -= 1
                if not missing[later]:
                    ready.append(later)
    if len(order) < len(after):
        raise ValueError(f"{len(after) - len(order)} operations wait for each other in a circle")
    return order
