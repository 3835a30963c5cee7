"""Self-check of a node in a process of its own, so that a GPU that hangs takes no executor with it.

Run as `python -m trainer.resilience.self_check FOLDER LEVEL RANKS BACKEND`; prints a line for each check as it is made,
so that one that ends the program, or never returns, takes no other's result with it. The checks themselves are those of
`netlayer accept` (`collectives.health`), with small budgets: seconds on a healthy node. Levels: host; device: and GEMM
and copies of each device, and each active RDMA device to itself; full: and collectives among the node's ranks. Not
covered: collectives with neighbours under the same switch, which are named as skipped.

[Note: what fails] Only what was seen to be wrong fails a node: numbers that are not the right ones, an error that CUDA
itself reports of the hardware, a GPU that is not there. A program that ends with any other error, or that is not done
in time, may as well be a busy machine, a port that is taken, or memory that somebody else has: that is *unclear*. It is
tried again (job.resilience.checks_retries), and what is then done is job.resilience.checks_unclear.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from collectives.health.host import HostCheck, host_checks

if TYPE_CHECKING:
    from collectives.health.checks import HealthRow
    from netlayer.launch.rank import RankContext

MARK = b"netlayer-check "
"""Head of the lines that are ours: libraries print between them (NCCL with NCCL_DEBUG, a sitecustomize)."""
_GEMM_SIZE = {"cuda": 4096, "cpu": 256}
_COPY_BYTES = {"cuda": 1 << 26, "cpu": 1 << 22}
_BUDGET_S = 2.0
_GROUP_BYTES = 1 << 20
_NIC, _NIC_S = "nic_loopback", 10.0
# Errors of the CUDA runtime that speak of the device, and not of a program or of memory that others have.
_HARDWARE = re.compile(r"uncorrectable|ECC error|GPU is lost|hardware (?:stack )?error|NVLink error|fallen off the bus")


def main(folder: str, level: str, num_ranks: int, backend: str) -> None:
    """Print the checks of a level."""
    stages: list[tuple[str, Callable[[], Iterable[HostCheck]]]] = [("host", lambda: host_checks(Path(folder)))]
    if level in ("device", "full"):
        stages.append(("devices", lambda: device_checks(num_ranks, backend)))
        stages.append(("nics", nic_checks))
    if level == "full":
        stages.append(("collectives", lambda: group_checks(Path(folder), num_ranks, backend)))
    stages.append(("neighbours", not_made))
    for stage, checks in stages:
        _print({"begins": stage})
        for check in checks():
            _print(asdict(check))
    _print({"done": True})


def _print(row: dict[str, Any]) -> None:
    sys.stdout.write(f"{MARK.decode()}{json.dumps(row)}\n")
    sys.stdout.flush()


def read_output(output: bytes) -> tuple[list[HostCheck], str, bool]:
    """Return the checks that a program has printed, the stage that it was in, and whether it came to its end."""
    checks, stage, is_done = list[HostCheck](), "start", False
    for line in output.splitlines():
        if not line.startswith(MARK):
            continue
        try:
            row = json.loads(line.removeprefix(MARK))
            if "name" in row:
                checks.append(HostCheck(**row))
            stage, is_done = row.get("begins", stage), is_done or "done" in row
        except (ValueError, TypeError, AttributeError):
            continue  # the last line of a program that was killed
    return checks, stage, is_done


def not_made() -> list[HostCheck]:
    """Name what a self-check does not look at."""
    return [HostCheck("neighbours", None, "not built: netlayer accept measures every pair of nodes")]


def nic_checks() -> Iterator[HostCheck]:
    """Writes and sends of each active RDMA device to itself, of which every byte is compared."""
    from congestion.verbs import measure
    from netlayer.errors import CheckFailed, ConfigError, HardwareMissing

    devices = measure.devices()
    if not devices:
        yield HostCheck(_NIC, None, "no RDMA device")
    plan = measure.Plan(sizes=(1 << 16,), messages=32, window=8, repeats=1, pings=10, patience_s=_NIC_S)
    for device in devices:
        if device.state != "ACTIVE":  # a port that no cable was meant for, maybe
            yield HostCheck(_NIC, None, f"{device.name}: its port is {device.state}")
            continue
        begin_s = time.perf_counter()
        try:
            measure.measure_pair(device.name, plan=plan)
            check = HostCheck(_NIC, True, f"{device.name}: every byte arrived")
        except measure.QpError as exc:  # of a setting, as often as of the device
            check = HostCheck(_NIC, None, f"{device.name}: {exc}", is_unclear=True)
        except CheckFailed as exc:
            check = HostCheck(_NIC, False, f"{device.name}: {exc}")
        except (ConfigError, HardwareMissing) as exc:
            check = HostCheck(_NIC, None, f"{device.name}: {exc}")
        yield replace(check, seconds=time.perf_counter() - begin_s)


def device_checks(num_ranks: int, backend: str) -> Iterator[HostCheck]:
    """GEMM against a product in float64, and copies that are compared, on every device of the node's ranks.

    CUDA shows this process the GPUs of this node's ranks and no others: the executor's CUDA_VISIBLE_DEVICES is theirs.
    """
    import torch

    from collectives import health

    torch.set_num_threads(1)
    kind = "cuda" if backend == "nccl" else "cpu"
    devices = [torch.device(kind, index) for index in range(num_ranks if kind == "cuda" else 1)]
    for device in devices:
        if kind == "cuda" and device.index >= torch.cuda.device_count():
            yield HostCheck("device", False, f"{device}: {torch.cuda.device_count()} GPUs answer")
            continue
        dtype = torch.bfloat16 if kind == "cuda" else torch.float32
        size, num_bytes = _GEMM_SIZE[kind], _COPY_BYTES[kind]
        begin_s = time.perf_counter()
        try:
            rows = health.gemm(device, size, dtype, repeats=5, budget_s=_BUDGET_S)
            rows += health.copy(device, num_bytes, repeats=3, budget_s=_BUDGET_S)
        except RuntimeError as exc:  # CUDA's errors are such, and that of memory that somebody else has
            text = str(exc).splitlines()[0][:200]
            is_hardware = _HARDWARE.search(text) is not None
            yield HostCheck("device", False if is_hardware else None, f"{device}: {text}", is_unclear=not is_hardware)
            continue
        yield from _results(rows, time.perf_counter() - begin_s)


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
    except NetlayerError as exc:  # a rank that did not come in time, too: [Note: what fails]
        return [HostCheck("all_reduce", None, str(exc)[:300], time.perf_counter() - begin_s, is_unclear=True)]
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


def _results(rows: Sequence[HealthRow] | Sequence[dict[str, Any]], seconds: float) -> Iterator[HostCheck]:
    for row in rows:
        where = f"{row['device']}, {row['check']}"
        detail = "right" if row["ok"] else "wrong numbers came out"
        yield HostCheck(str(row["check"]), bool(row["ok"]), f"{where}: {detail}", seconds / len(rows))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), sys.argv[4])
