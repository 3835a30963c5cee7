"""Traced operations of a pipeline- and data-parallel job, from events: what the what-if replay runs on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import numpy as np

from netlayer.observe.events import Event, Segment
from netlayer.observe.verdicts.what_if import Operation, Timeline

_COLLECTIVES = {
    ("send", "pipeline forward"): "forward_send",
    ("recv", "pipeline forward"): "forward_recv",
    ("send", "pipeline backward"): "backward_send",
    ("recv", "pipeline backward"): "backward_recv",
    ("all_gather", "gather"): "all_gather",
    ("reduce_scatter", "reduce"): "reduce_scatter",
    ("all_reduce", "reduce"): "all_reduce",
    ("all_reduce", "embedding"): "embedding_grads",
    ("all_reduce", "layer norm"): "layer_norm_grads",
    ("all_reduce", "grad norm"): "clip",
}
_Cell = tuple[int, int, int]  # stage, data-parallel rank, step


def timeline_of(events: Iterable[Event]) -> Timeline:
    """The operations of all ranks as arrays; steps that some rank lacks are omitted.

    Raises:
        ValueError: there is nothing to replay, or ranks of a step ran different operations; which.
    """
    cells: dict[_Cell, dict[tuple[str, int], list[tuple[int, int, int]]]] = defaultdict(lambda: defaultdict(list))
    ranks: dict[tuple[int, int], int] = {}
    for event in events:
        if not isinstance(event, Segment) or event.step is None or event.origin.rank is None:
            continue
        kind = _kind(event)
        if not kind:
            continue
        stage, dp = event.origin.pp or 0, event.origin.dp or 0
        ranks[stage, dp] = min(event.origin.rank, ranks.get((stage, dp), event.origin.rank))
        offset = event.clock_offset_ns or 0
        times = (event.start_ns - offset, event.end_ns - offset, event.chunk or 0)
        cells[stage, dp, event.step][kind, event.origin.rank].append(times)
    if not cells:
        raise ValueError("no forward, backward or collective with a step and a rank")
    return _arrays(_one_rank_a_place(cells, ranks), ranks)


def _kind(event: Segment) -> str:
    if event.segment in ("forward", "backward", "optimizer", "gc"):
        return event.segment
    return _COLLECTIVES.get((event.name, event.group or ""), "") if event.segment == "collective" else ""


def _one_rank_a_place(
    cells: dict[_Cell, dict[tuple[str, int], list[tuple[int, int, int]]]], ranks: dict[tuple[int, int], int]
) -> dict[_Cell, dict[str, list[tuple[int, int, int]]]]:
    """Operations by place and kind, of the lowest rank of a place: tensor-parallel ranks run the same."""
    return {
        cell: {kind: sorted(times) for (kind, rank), times in kinds.items() if rank == ranks[cell[:2]]}
        for cell, kinds in cells.items()
    }


def _arrays(cells: dict[_Cell, dict[str, list[tuple[int, int, int]]]], ranks: dict[tuple[int, int], int]) -> Timeline:
    """Return the operations as arrays, those of the first step in order of stage, kind and start."""
    num_stages, num_dp = (1 + max(place[axis] for place in ranks) for axis in range(2))
    if len(ranks) < num_stages * num_dp:
        raise ValueError(
            f"{num_stages * num_dp - len(ranks)} of {num_stages * num_dp} places of the layout are missing"
        )
    by_step: dict[int, int] = defaultdict(int)
    for _, _, step in cells:
        by_step[step] += 1
    steps = sorted(step for step, count in by_step.items() if count == len(ranks))
    if not steps:
        raise ValueError("no step is there on every rank")
    operations = [
        Operation(kind, number, stage, chunk)
        for stage in range(num_stages)
        for kind, times in sorted(cells[stage, 0, steps[0]].items())
        for number, (_, _, chunk) in enumerate(times)
    ]
    counts = [{kind: len(times) for kind, times in cells[stage, 0, steps[0]].items()} for stage in range(num_stages)]
    start, end = np.empty((2, len(operations), len(steps), num_dp))
    begin_ns: dict[int, int] = {}
    for (_, _, step), kinds in cells.items():
        first_ns = min(times[0][0] for times in kinds.values())
        begin_ns[step] = min(first_ns, begin_ns.get(step, first_ns))
    for column, step in enumerate(steps):
        for dp in range(num_dp):
            for stage in range(num_stages):
                here = {kind: len(times) for kind, times in cells[stage, dp, step].items()}
                if here != counts[stage]:
                    raise ValueError(f"step {step} of rank {ranks[stage, dp]} has other operations than the first")
            for at, operation in enumerate(operations):
                first, last, _ = cells[operation.stage, dp, step][operation.kind][operation.number]
                start[at, column, dp] = (first - begin_ns[step]) / 1e9
                end[at, column, dp] = (last - begin_ns[step]) / 1e9
    places = np.array([[ranks[stage, dp] for dp in range(num_dp)] for stage in range(num_stages)])
    return Timeline(operations, start, end, steps, places)
