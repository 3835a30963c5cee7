"""Amounts of work of an acceptance run for each kind of device, and the statistic of the times that counts.

On GPUs every rank has its own device and all run in parallel: series of blocks count (`series`), else the median. Ranks
that share cores (gloo) take turns if possible, and their fastest time counts, since other work on the machine only adds
to it. Ranks that pause in between are found by their mean times (`speeds`).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.accept.phases.series import LEAST_PEERS
from netlayer.verdict import MIN_PEERS

Args = Mapping[str, Any]


@dataclass(frozen=True)
class Work:
    """Arguments of the probes, and how they are repeated.

    Args:
        shared: True if ranks share cores or GPUs.
        host, gemm, copy, all_to_all, all_reduce, pairs, latency, train: arguments of the probes of these names.
        least_batches, most_batches: minimum and maximum repeats of a probe of single devices; it is repeated until
            there is no outlier and little scatter.
        least_speed_ratio: minimum slowdown relative to the peers for which a device is flagged.
        least_ratio: minimum slowdown relative to the peers for which a link or group is flagged; less is noise if
            messages go through cores that ranks share.
        least_peers: minimum number of peers for a comparison.
        turn_s: seconds between the turns in which outliers on shared cores are measured again.
        limit_s: seconds after which a task counts as hung.
        form_s: additional seconds to form a group, which initialises NCCL and the devices the first time.
    """

    shared: bool
    host: Args
    gemm: Args
    copy: Args
    all_to_all: Args
    all_reduce: Args
    pairs: Args
    latency: Args
    train: Args
    least_batches: int
    most_batches: int
    least_speed_ratio: float
    least_ratio: float
    least_peers: int
    turn_s: float
    limit_s: float
    form_s: float

    def time_us(self, row: Mapping[str, Any]) -> float:
        """Return the time in microseconds of a row that counts."""
        return float(row["min_us"] if self.shared else row["p50_us"])

    def combined(self, times_us: Sequence[float]) -> float:
        """Combine the times of several batches to one."""
        return min(times_us) if self.shared else statistics.median(times_us)


def work_for(backend: str, limit_s: float | None, virtual_nodes: bool = False, shares_gpus: bool = False) -> Work:
    """Return the work for `gloo` or `nccl`; virtual nodes exchange messages through sockets of one host.

    Ranks that share a GPU disturb each other like ranks that share cores, and are judged likewise. Since they take
    turns, a single batch has little noise.
    """
    if backend == "gloo":
        turn = {"repeats": 8, "budget_s": 0.1}
        return Work(
            shared=True,
            host={"budget_s": 0.1},
            gemm={"size": 384, **turn},
            copy={"bytes": 2 << 20, **turn},
            all_to_all={"bytes": 1 << 20, "repeats": 10, "budget_s": 0.5},
            all_reduce={"bytes": 1 << 20, "repeats": 12, "budget_s": 0.5},
            pairs={"bytes": 1 << 18, "repeats": 8, "budget_s": 4.0},
            latency={"bytes": 8, "repeats": 50, "budget_s": 0.5},
            train={"bytes": 0, "repeats": 8, "budget_s": 1.0},
            least_batches=3,
            most_batches=20,
            least_speed_ratio=1.15,
            least_ratio=4.0,
            least_peers=MIN_PEERS,
            turn_s=1.0,
            limit_s=limit_s or 10.0,
            form_s=8.0,
        )
    if shares_gpus:  # smaller, since ranks run one after the other and virtual nodes use loopback
        return Work(
            shared=True,
            host={"budget_s": 0.1},
            gemm={"size": 4096, "repeats": 30, "budget_s": 0.15},
            copy={"bytes": 1 << 25, "repeats": 20, "budget_s": 0.15},
            all_to_all={"bytes": 1 << 22, "repeats": 20, "budget_s": 0.5},
            all_reduce={"bytes": 1 << 22, "repeats": 20, "budget_s": 0.5},
            pairs={"bytes": 1 << 20, "repeats": 10, "budget_s": 6.0, "eager": True},
            latency={"bytes": 8, "repeats": 200, "budget_s": 0.5},
            train={"bytes": 0, "repeats": 20, "budget_s": 1.0},
            least_batches=1,
            most_batches=6,
            least_speed_ratio=1.15,
            least_ratio=4.0,
            least_peers=MIN_PEERS,
            turn_s=1.0,
            limit_s=limit_s or 10.0,
            form_s=40.0,
        )
    return Work(
        shared=False,
        host={"budget_s": 0.1},
        gemm={"size": 8192, "repeats": 30, "budget_s": 1.6, "blocks": 15, "warmup_s": 0.5},
        copy={"bytes": 1 << 28, "repeats": 20, "budget_s": 0.9, "blocks": 6},
        all_to_all={"bytes": 1 << 26, "repeats": 20, "budget_s": 0.5},
        all_reduce={"bytes": 1 << 26, "repeats": 20, "budget_s": 0.5},
        pairs={"bytes": None, "repeats": 6, "budget_s": 3.0},
        latency={"bytes": 8, "repeats": 50, "budget_s": 0.5, "graph_calls": 50},
        train={"bytes": 0, "repeats": 20, "budget_s": 1.0},
        least_batches=2,
        most_batches=3,
        least_speed_ratio=1.0,
        least_ratio=2.0 if virtual_nodes else 1.0,
        least_peers=LEAST_PEERS,
        turn_s=0.0,
        limit_s=limit_s or (10.0 if virtual_nodes else 30.0),  # a fabric takes longer to start than loopback
        form_s=40.0,
    )
