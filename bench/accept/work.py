"""How much an acceptance run does on a kind of device, and what of the measured times counts there.

On GPUs every rank has its own device, and all work at once: series of blocks count (`series`), else the median. Ranks
that share cores (gloo) take turns where they can, and their fastest time counts: whatever else runs there only adds to
it; but ranks that stand still in between are found by their means (`speeds`).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.accept.series import LEAST_PEERS
from netlayer.verdict import MIN_PEERS

Args = Mapping[str, Any]


@dataclass(frozen=True)
class Work:
    """Arguments of the probes, and how they are repeated.

    Args:
        shared: ranks share cores, or GPUs.
        least_batches, most_batches: how often a probe of single devices is repeated: until nobody stands out and the
            scatter is small, but so often at most.
        least_speed_ratio: times as long as its peers a device must take to be accused.
        least_ratio: times as long as its peers a link or group must take to be accused: where messages go through
            cores that ranks share, less than that is chance.
        least_peers: so many must have done the same work before one of them is held against the others.
        turn_s: of what stands out on shared cores, which is tried again in turns: from one turn to the next.
        limit_s: a task that takes longer hangs.
        form_s: so long a group may take to form before that: NCCL and the devices are initialised in the first one.
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
        """The time of a row that counts."""
        return float(row["min_us"] if self.shared else row["p50_us"])

    def combined(self, times_us: Sequence[float]) -> float:
        """One time out of those of several batches."""
        return min(times_us) if self.shared else statistics.median(times_us)


def work_for(backend: str, limit_s: float | None, virtual_nodes: bool = False, shares_gpus: bool = False) -> Work:
    """The work for `gloo` or `nccl`; virtual nodes exchange messages through sockets of one host.

    Ranks that share a GPU disturb each other as ranks that share cores do, and are judged as these; what runs on it is
    quiet, for they take turns, and needs no batches to show it.
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
    if shares_gpus:  # one after the other, and virtual nodes' bytes go through loopback: less of each
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
        limit_s=limit_s or (10.0 if virtual_nodes else 30.0),  # a fabric is slower to begin with than loopback
        form_s=40.0,
    )
