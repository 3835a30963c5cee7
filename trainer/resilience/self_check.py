"""Self-check of a node in a process of its own, so that a GPU that hangs takes no executor with it.

Run as `python -m trainer.resilience.self_check FOLDER LEVEL RANKS BACKEND`; prints a JSON list of checks. The checks
themselves are those of `netlayer accept` (`collectives.health`), with small budgets: seconds on a healthy node. Levels:
host; device: and GEMM and copies of each device; full: and collectives among the node's ranks. Not covered: NICs (verbs
loopback), and collectives with neighbours under the same switch; both are named as skipped.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from collectives.health.host import HostCheck, host_checks

if TYPE_CHECKING:
    from collectives.health.checks import HealthRow
    from netlayer.launch.rank import RankContext

_GEMM_SIZE = {"cuda": 4096, "cpu": 256}
_COPY_BYTES = {"cuda": 1 << 26, "cpu": 1 << 22}
_BUDGET_S = 2.0
_GROUP_BYTES = 1 << 20


def main(folder: str, level: str, num_ranks: int, backend: str) -> None:
    """Print the checks of a level."""
    checks = host_checks(Path(folder))
    if level in ("device", "full"):
        checks += device_checks(num_ranks, backend)
    if level == "full":
        checks += group_checks(Path(folder), num_ranks, backend)
    checks.append(HostCheck("nic_loopback", None, "not built: netlayer nic and nccl-tests look at NICs"))
    checks.append(HostCheck("neighbours", None, "not built: netlayer accept measures every pair of nodes"))
    sys.stdout.write(json.dumps([asdict(check) for check in checks]) + "\n")


def device_checks(num_ranks: int, backend: str) -> list[HostCheck]:
    """GEMM against a product in float64, and copies that are compared, on every device of the node's ranks."""
    import torch

    from collectives import health

    torch.set_num_threads(1)
    kind = "cuda" if backend == "nccl" else "cpu"
    devices = [torch.device(kind, index) for index in range(num_ranks if kind == "cuda" else 1)]
    checks = []
    for device in devices:
        if kind == "cuda" and device.index >= torch.cuda.device_count():
            checks.append(HostCheck("device", False, f"{device}: {torch.cuda.device_count()} GPUs answer"))
            continue
        dtype = torch.bfloat16 if kind == "cuda" else torch.float32
        size, num_bytes = _GEMM_SIZE[kind], _COPY_BYTES[kind]
        begin_s = time.perf_counter()
        try:
            rows = health.gemm(device, size, dtype, repeats=5, budget_s=_BUDGET_S)
            rows += health.copy(device, num_bytes, repeats=3, budget_s=_BUDGET_S)
        except RuntimeError as exc:  # CUDA's errors are such
            checks.append(HostCheck("device", False, f"{device}: {str(exc).splitlines()[0][:200]}"))
            continue
        checks += list(_results(rows, time.perf_counter() - begin_s))
    return checks


def group_checks(folder: Path, num_ranks: int, backend: str) -> list[HostCheck]:
    """All-reduce and all-to-all among the node's ranks, of which every number is compared."""
    if num_ranks < 2:
        return [HostCheck("all_reduce", None, "one rank on this node")]
    from netlayer.errors import NetlayerError
    from netlayer.launch.launcher import launch
    from netlayer.store.meeting import meeting_place

    begin_s = time.perf_counter()
    try:
        with meeting_place() as place:
            arguments = (place.init_method("self-check"), backend)
            [rows, *_] = launch(_group_rank, num_ranks, args=arguments, log_dir=folder / "self_check")
    except NetlayerError as exc:
        return [HostCheck("all_reduce", False, str(exc)[:300], time.perf_counter() - begin_s)]
    return list(_results(rows, time.perf_counter() - begin_s))


def _group_rank(context: RankContext, init_method: str, backend: str) -> list[dict[str, Any]]:
    from datetime import timedelta

    import torch
    import torch.distributed as dist

    from collectives import health
    from netlayer.store.meeting import register_schemes

    register_schemes(init_method)
    if backend == "nccl":
        torch.cuda.set_device(context.env.local_rank)
    env = context.env
    dist.init_process_group(backend, init_method, timedelta(seconds=60), rank=env.rank, world_size=env.world_size)
    group = dist.group.WORLD
    assert group is not None
    rows = health.all_reduce(group, _GROUP_BYTES, 3, budget_s=_BUDGET_S)
    rows += health.all_to_all(group, _GROUP_BYTES, 3, budget_s=_BUDGET_S)
    dist.destroy_process_group()
    return [dict(row) for row in rows]


def _results(rows: list[HealthRow] | list[dict[str, Any]], seconds: float) -> Iterator[HostCheck]:
    for row in rows:
        where = f"{row['device']}, {row['check']}"
        detail = "right" if row["ok"] else "wrong numbers came out"
        yield HostCheck(str(row["check"]), bool(row["ok"]), f"{where}: {detail}", seconds / len(rows))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
