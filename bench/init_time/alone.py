"""Processor time that one rank of a large world spends on its groups: torch's way and ours, store and backend faked.

Thousands of real ranks do not fit one machine, and what a rank does by itself needs none of the others: torch's own
fake backend makes no communicator, and the store here answers at once. So neither counts, nor do waits; what is left
is processor time, which torch spends on every group of the world and ours on the rank's own. Each run is a process of
its own, as in a job, where nothing is warm. Not covered: the store's client, and imports.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from bench.init_time.rows import AloneRow
from netlayer.launch.launcher import launch
from netlayer.launch.rank import RankContext
from netlayer.layout import ParallelLayout
from netlayer.rendezvous import create_groups

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store
else:
    from torch.distributed import Store  # which torch's own types do not show

_METHODS = ("torch", "ours")


def rows(layouts: Sequence[ParallelLayout], repeats: int, logs: Path) -> Iterator[AloneRow]:
    """Yield a row for each layout and method: the median over `repeats` processes; the methods take turns."""
    for layout in layouts:
        cpu_seconds: dict[str, list[float]] = {method: [] for method in _METHODS}
        for turn in range(repeats):
            for method in _METHODS if turn % 2 else reversed(_METHODS):
                name = f"alone-{method}-{layout.world_size}-{turn}"
                cpu_seconds[method] += launch(_start, 1, args=(layout, method), log_dir=logs / name)
        for method, seconds in cpu_seconds.items():
            yield AloneRow(layout.world_size, method, "none", statistics.median(seconds), seconds)


def _start(_: RankContext, layout: ParallelLayout, method: str) -> float:
    """Create the groups of rank 0 of the layout, and return the CPU seconds that it took."""
    from torch.testing._internal.distributed import fake_pg  # noqa: F401 # makes "fake" a backend

    store, began = _Answers(), time.process_time()
    dist.init_process_group("fake", store=store, rank=0, world_size=layout.world_size)
    if method == "ours":
        create_groups(layout)
    else:
        init_device_mesh("cpu", (layout.pp, layout.dp, layout.tp), mesh_dim_names=("pp", "dp", "tp"))
    return time.process_time() - began


class _Answers(Store):
    """A store in which every key is there already, and all ranks but the last have been counted."""

    timeout = timedelta(seconds=60)

    def set_timeout(self, _: timedelta) -> None: ...

    def add(self, _: str, __: int) -> int:
        return 1

    def wait(self, *_: object) -> None: ...
