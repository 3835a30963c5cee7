"""What `bench.small_messages` compares, and how a rank measures it.

Every system makes trials of a collective and a size: tensors where it wants them, and the call. Ours and plain NCCL use
ordinary memory; NCCL's windows and torch's operations use memory that was registered for them before.

[Note: windows] Registering memory as symmetric windows may succeed and change nothing, for NCCL chooses its kernels by
size and by what it supports. So a profiler sees one call of each trial: NCCL's kernels for windows have names that
begin with `ncclSym`, all others are `ncclDevKernel_...`. `on_windows` in a row says which it was; None: not seen.
"""

from __future__ import annotations

import logging
import math
import statistics
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from bench.backends import BACKENDS
from bench.control import meet
from bench.driver import load_collective
from bench.small_messages import LARGE_BYTES, NCCL, OURS, Outcome, Row, Settings
from collectives.small import SmallCollectives
from collectives.small_paths import Kind, NcclWindows, PathName, Plain, TorchSymmetric, open_paths
from collectives.small_trial import Trial, is_right, kernel_names, make_replay, time_in_turn
from collectives.tuning import DEFAULT_TABLE, TuningTable, buffer_sizes, trial_of, tune
from netlayer.rank import RankContext

logger = logging.getLogger(__name__)

DTYPE = torch.bfloat16
_NCCL_KERNELS = ("ncclSym", "ncclDev")

Report = Callable[[Row], None]


def run_rank(context: RankContext, settings: Settings, url: str, backend: str) -> Outcome:
    """Measure as one rank; rank 0 reports its rows as they come."""
    with meet(context.env, url, None) as control:
        library = BACKENDS["torch" if backend == "nccl" else "gloo"](context.env, None)
        group, device = library.group, library.device
        dist.barrier(group)  # makes NCCL's communicator
        table = TuningTable.from_json(settings.table) if settings.table else DEFAULT_TABLE
        if settings.tune:
            table = tune(group, device, max_bytes=settings.max_bytes, launches=settings.launches)
        report = context.report if control.rank == 0 else lambda _row: None
        rows = measure(group, device, settings, table=table, report=report)
        found = library.describe()
        return Outcome(rows, table.to_json(), f"{found.name} {found.bus}", _versions(device))


def measure(
    group: dist.ProcessGroup,
    device: torch.device,
    settings: Settings,
    *,
    table: TuningTable = DEFAULT_TABLE,
    report: Report = lambda _row: None,
) -> list[Row]:
    """Rows of every collective, size and system (`table` is `time`), and of what is left out. Every rank gets the same.

    Args:
        table: for ours.
        report: hears each row as it comes.
    """
    rows: list[Row] = []

    def add(row: Row) -> None:
        rows.append(row)
        report(row)

    systems, left_out = _open(group, device, settings, table)
    for name, reason in left_out.items():
        add({"table": "left_out", "system": name, "reason": reason})
    kernels = _seen_windows(systems, settings.sizes, device)
    for kind in get_args(Kind):
        for num_bytes in settings.sizes:
            for row in _measure_one(kind, num_bytes, systems, group, device, settings):
                if row["table"] == "time" and row["system"] == "nccl_windows":
                    kernel = kernels.get((kind, num_bytes))
                    row |= {"kernel": kernel, "on_windows": None if kernel is None else kernel.startswith("ncclSym")}
                add(row)
    return rows


class System(ABC):
    """One of those that are compared."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self.group, self.device = group, device
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)

    @abstractmethod
    def trials(self, kind: Kind, num_bytes: int) -> dict[str, Trial]:
        """By variant; none where it lacks the collective."""

    def tensors(self, kind: Kind, num_bytes: int) -> tuple[Tensor, Tensor]:
        """What a rank gives and gets, in ordinary memory."""
        source, out = (
            torch.empty(size // DTYPE.itemsize, dtype=DTYPE, device=self.device)
            for size in buffer_sizes(kind, num_bytes, self.num_ranks)
        )
        return source, out


class Ours(System):
    def __init__(self, group: dist.ProcessGroup, device: torch.device, max_bytes: int, table: TuningTable) -> None:
        super().__init__(group, device)
        self.small = SmallCollectives(group, device, max_bytes, table)

    def trials(self, kind: Kind, num_bytes: int) -> dict[str, Trial]:
        source, out = self.tensors(kind, num_bytes)
        calls: dict[Kind, Callable[[], None]] = {
            "all_reduce": lambda: self.small.all_reduce(source),
            "all_gather": lambda: self.small.all_gather(out, source),
            "reduce_scatter": lambda: self.small.reduce_scatter(out, source),
        }
        out = source if kind == "all_reduce" else out
        path = self.small.path_of(kind, max(source.nbytes, out.nbytes), DTYPE)
        variant = "torch.distributed" if path == "nccl" else path
        return {variant: Trial(kind, source, out, calls[kind], self.rank, self.num_ranks)}


class PlainNccl(System):
    def trials(self, kind: Kind, num_bytes: int) -> dict[str, Trial]:
        return {"": trial_of(Plain(self.group), kind, *self.tensors(kind, num_bytes), self.group)}


class OnWindows(System):
    """NCCL, with both tensors in windows."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, windows: NcclWindows) -> None:
        super().__init__(group, device)
        self._windows = windows

    def trials(self, kind: Kind, num_bytes: int) -> dict[str, Trial]:
        given, got = buffer_sizes(kind, num_bytes, self.num_ranks)
        source, out = self._windows.source(given, DTYPE), self._windows.out(got, DTYPE)
        return {"": trial_of(self._windows, kind, source, out, self.group)}


class TorchOperations(System):
    """torch's operations over symmetric memory, but for those that need multicast; one variant each."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, memory: TorchSymmetric) -> None:
        super().__init__(group, device)
        self._memory = memory

    def trials(self, kind: Kind, num_bytes: int) -> dict[str, Trial]:
        ops, group_name = torch.ops.symm_mem, self.group.group_name
        source = self._memory.source(buffer_sizes(kind, num_bytes, self.num_ranks)[0], DTYPE)
        _, out = self.tensors(kind, num_bytes)

        def make(out: Tensor, launch: Callable[[], None]) -> Trial:
            return Trial(kind, source, out, launch, self.rank, self.num_ranks)

        if kind == "all_reduce":
            return {
                "one_shot": make(out, lambda: ops.one_shot_all_reduce_out(source, "sum", group_name, out)),
                "two_shot": make(source, lambda: ops.two_shot_all_reduce_(source, "sum", group_name)),
            }
        if kind == "all_gather":
            return {"low_contention": self._new(make, lambda: ops._low_contention_all_gather(source, group_name))}
        trials = {
            "low_contention": self._new(make, lambda: ops._low_contention_reduce_scatter(source, "sum", group_name))
        }
        if self._memory.takes(kind, DTYPE, source.nbytes):
            trials["one_kernel"] = make(out, lambda: ops.reduce_scatter_out(source, group_name, False, out))
        return trials

    def _new(self, make: Callable[[Tensor, Callable[[], None]], Trial], call: Callable[[], Tensor]) -> Trial:
        """Of an operation that makes its output, and runs on a stream of its own."""

        def launch() -> None:
            trial.out = torch.ops._c10d_functional.wait_tensor(call())

        trial = make(torch.empty(0, dtype=DTYPE, device=self.device), launch)
        return trial


def _open(
    group: dist.ProcessGroup, device: torch.device, settings: Settings, table: TuningTable
) -> tuple[dict[str, System], dict[str, str]]:
    """The systems that this group has, in the order in which they take turns, and why others are left out."""
    ours = Ours(group, device, settings.max_bytes, table)
    systems: dict[str, System] = {OURS: ours}
    left_out: dict[str, str] = {}
    if ours.small.why_plain is not None:
        reason = f"all of it is torch.distributed here, as `{NCCL}` would be ({ours.small.why_plain})"
        left_out["kernels of ours"] = reason
    if device.type != "cuda":
        return systems, left_out | dict.fromkeys(
            (NCCL, "nccl_windows", "torch_symmetric"), f"the device is {device.type}"
        )
    systems[NCCL] = PlainNccl(group, device)
    peers: tuple[PathName, ...] = ("nccl_windows", "torch_symmetric")
    paths, reasons = open_paths(peers, group, device, max(settings.sizes))
    windows, memory = (paths.get(name) for name in peers)
    if isinstance(windows, NcclWindows):
        systems["nccl_windows"] = OnWindows(group, device, windows)
    if isinstance(memory, TorchSymmetric):
        systems["torch_symmetric"] = TorchOperations(group, device, memory)
    return systems, left_out | {str(name): reason for name, reason in reasons.items()}


def _measure_one(
    kind: Kind,
    num_bytes: int,
    systems: dict[str, System],
    group: dist.ProcessGroup,
    device: torch.device,
    settings: Settings,
) -> list[Row]:
    """All systems of one collective and size; a time only of what was right."""
    rows: list[Row] = []
    right, replays = {}, {}
    for system, maker in systems.items():
        for variant, trial in maker.trials(kind, num_bytes).items():
            try:
                replay = make_replay(trial.launch, settings.launches, device)
            except RuntimeError as exc:  # torch's operations change from version to version
                reason = f"{kind} of {num_bytes} bytes: {str(exc).partition(chr(10))[0]}"
                rows.append({"table": "left_out", "system": f"{system} {variant}", "reason": reason})
                continue
            right[system, variant] = is_right(trial, replay, settings.launches, group)
            replays[system, variant] = replay
    count = settings.replays if num_bytes < LARGE_BYTES[0] else -(-settings.replays // 3)
    timed = {key: replay for key, replay in replays.items() if right[key]}
    times = time_in_turn(timed, group, device, settings.launches, count, settings.rounds)
    for (system, variant), good in right.items():
        row: Row = {"table": "time", "kind": kind, "num_bytes": num_bytes, "system": system, "variant": variant}
        figures = _figures(kind, num_bytes, times[system, variant], group) if good else {}
        rows.append({**row, "dtype": str(DTYPE).removeprefix("torch."), "wrong": not good, **figures})
    return rows


def _figures(kind: Kind, num_bytes: int, rounds_us: list[list[float]], group: dist.ProcessGroup) -> dict[str, Any]:
    """Statistics of all replays, per launch; percentiles by nearest rank."""
    each = sorted(us for found in rounds_us for us in found)
    median_us = statistics.median(each)
    num_ranks = dist.get_world_size(group)
    whole_bytes = max(buffer_sizes(kind, num_bytes, num_ranks))
    alg_bw, bus_bw = load_collective(kind).bandwidth_gbs(whole_bytes, median_us / 1e6, num_ranks)
    return {
        "median_us": median_us,
        "p99_us": each[math.ceil(0.99 * len(each)) - 1],
        "min_us": each[0],
        "max_us": each[-1],
        "round_medians_us": [statistics.median(found) for found in rounds_us],
        "alg_bw_gbs": alg_bw,
        "bus_bw_gbs": bus_bw,
        "num_replays": len(each),
        "replays_us": rounds_us,
    }


def _seen_windows(
    systems: dict[str, System], sizes: Sequence[int], device: torch.device
) -> dict[tuple[Kind, int], str]:
    """The kernel that NCCL runs on windows, by collective and size; see [Note: windows]."""
    if "nccl_windows" not in systems:
        return {}
    keys: list[tuple[Kind, int]] = [(kind, num_bytes) for kind in get_args(Kind) for num_bytes in sizes]
    calls = []
    for kind, num_bytes in keys:
        [trial] = systems["nccl_windows"].trials(kind, num_bytes).values()
        trial.launch()
        calls.append(trial.launch)
    torch.cuda.synchronize(device)
    names = kernel_names(calls, device, _NCCL_KERNELS)
    if names is None:
        logger.warning("the profiler does not show one NCCL kernel a call: whether windows are used is not known")
        return {}
    return dict(zip(keys, names, strict=True))


def _versions(device: torch.device) -> dict[str, str]:
    found = {"torch": str(torch.__version__)}
    if device.type == "cuda":
        version = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
        found |= {"nccl": ".".join(map(str, version)), "cuda": str(torch.version.cuda)}
    return found
