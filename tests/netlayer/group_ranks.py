"""What a rank of `test_rendezvous` runs."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from netlayer.errors import NetlayerError
from netlayer.launch.rank import RankContext
from netlayer.layout import DIMENSIONS, ParallelLayout
from netlayer.rendezvous import create_groups, open_world

TIMEOUT = timedelta(seconds=60)
LAYOUTS = (
    ParallelLayout(tp=2, pp=2, dp=2),
    ParallelLayout(pp=2, dp=4),
    ParallelLayout(tp=8),
    ParallelLayout(dp=4, tp=2),
)


def every_layout(context: RankContext, init_method: str) -> dict[str, object]:
    """Sums of ranks by layout and group; None for a group of one."""
    rank, first = context.env.rank, LAYOUTS[0]
    more = {"dp reduce": [list(group) for group in first.groups("dp")]}
    found: dict[str, object] = {}
    groups = open_world(first, backend="gloo", init_method=init_method, rank=rank, more=more, timeout=TIMEOUT)
    found["asked for"] = _sum(groups["dp reduce"])
    found["another communicator"] = groups["dp reduce"] is not groups["dp"]
    for number, layout in enumerate(LAYOUTS):
        groups = create_groups(layout, timeout=TIMEOUT) if number else groups
        for name in DIMENSIONS:
            found[f"{number} {name}"] = _sum(groups[name])
    uneven = {"a": [[0, 1], [2]], "b": [[0, 2], [1]]}  # ranks that make other numbers of groups of several
    odd = create_groups(LAYOUTS[0], more=uneven, timeout=TIMEOUT)
    found["uneven"] = [_sum(odd[name]) for name in uneven]
    found["whole world"] = groups["pp"] is None and create_groups(LAYOUTS[2], timeout=TIMEOUT)["tp"] is dist.group.WORLD
    dist.destroy_process_group()
    again = open_world(
        LAYOUTS[0],
        backend="gloo",
        init_method=init_method,
        rank=rank,
        timeout=TIMEOUT,
        collective_timeout=timedelta(seconds=77),
    )
    found["again"] = _sum(dist.group.WORLD)
    found["timeouts of collectives"] = {
        "store": dist.distributed_c10d._get_default_store().timeout.total_seconds(),
        **{name: _timeout_s(again[name]) for name in DIMENSIONS},
    }
    dist.destroy_process_group()
    return found


def on_tcp(context: RankContext, init_method: str) -> dict[str, object]:
    """The same world twice on a TCPStore of rank 0, then one that lacks a rank."""
    rank, layout, found = context.env.rank, ParallelLayout(tp=2), {}
    for turn in range(2):
        groups = open_world(layout, backend="gloo", init_method=init_method, rank=rank, timeout=TIMEOUT)
        found[f"turn {turn}"] = _sum(groups["tp"])
        dist.destroy_process_group()
    try:
        open_world(
            ParallelLayout(dp=3), backend="gloo", init_method=init_method, rank=rank, timeout=timedelta(seconds=2)
        )
    except NetlayerError as exc:
        found["missing"] = str(exc)
    return found


def retried(context: RankContext, init_method: str, failed: Path) -> dict[str, object]:
    """Rank 1 comes alone, gives up, and comes again; rank 0 comes when it has given up."""
    rank, layout, found = context.env.rank, ParallelLayout(tp=2), {}
    if rank:
        try:
            open_world(layout, backend="gloo", init_method=init_method, rank=rank, timeout=timedelta(seconds=0.5))
        except NetlayerError as exc:
            found["failed"] = type(exc).__name__
        failed.touch()
    while not failed.exists():
        time.sleep(0.01)
    for turn in range(2):
        groups = open_world(layout, backend="gloo", init_method=init_method, rank=rank, timeout=TIMEOUT)
        found[f"turn {turn}"] = _sum(groups["tp"])
        dist.destroy_process_group()
    return found


def faults(context: RankContext, init_method: str) -> list[str]:
    """What two ranks hear that ask for different things."""
    rank = context.env.rank
    said = []
    layout = ParallelLayout(dp=2)
    open_world(layout, backend="gloo", init_method=init_method, rank=rank, timeout=TIMEOUT)
    for asked, same in (
        (ParallelLayout(dp=4), None),
        (ParallelLayout(dp=2) if rank else ParallelLayout(tp=2), None),
        (layout, {"code": f"version {rank}"}),
    ):
        try:
            create_groups(asked, same=same, timeout=TIMEOUT)
        except NetlayerError as exc:
            said.append(str(exc))
    dist.destroy_process_group()
    return said


def _sum(group: dist.ProcessGroup | None) -> int | None:
    if group is None:
        return None
    total = torch.tensor([dist.get_rank()])
    dist.all_reduce(total, group=group)
    return int(total)


def _timeout_s(group: dist.ProcessGroup | None) -> float:
    assert group is not None
    return group._get_backend(torch.device("cpu")).options._timeout.total_seconds()
