"""Where the time of a step goes on a GPU, by kind of kernel, beside the least that its FLOPs and bytes would take.

Kernels come from torch's profiler (CUPTI); their names say what they do. Time in which several run at once counts for
the first of `KINDS` among them, so the parts and the idle time add up to the step. Left out: what the host does, but
for how long a step's call takes: where that is near the step's time, the host bounds it, or waits inside.
"""

from __future__ import annotations

import re
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from netlayer.config import JobConfig
from netlayer.workload.flops import step_flops
from netlayer.workload.model_size import num_parameters
from netlayer.workload.peaks import memory_bandwidth, peak_flops

Row = dict[str, Any]
KINDS: tuple[tuple[str, str], ...] = (
    ("attention", r"flash|fmha|sdpa|attention|flex|dot_do_o|convert_dq"),
    ("matrix products", r"gemm|nvjet|cutlass|xmma|splitk|cublas"),
    ("optimiser", r"adam|lamb(?!da)|multi_tensor|foreach"),
    ("loss", r"cross_entropy|softmax|logsumexp|^_gradient|^_statistics"),
    ("copies, fills", r"memcpy|memset|copy|fill|catarray|chunk_cat|(?<!no)cast"),
    ("communication", r"nccl|one_shot|symm|^await_|^signal$|^release$|(?<!vectorized_)gather_kernel|scatter_kernel"),
)
"""Kinds of kernel, the first whose pattern is in a name; what is none of these is `OTHER`."""
OTHER = "norms, activations, sums"
_ORDER = (*(name for name, _ in KINDS[:-1]), OTHER, KINDS[-1][0])  # communication counts where nothing else runs


@dataclass(frozen=True)
class Kernel:
    """One that ran: its name, and when, in ns."""

    name: str
    begin: int
    end: int


def profile(step: Callable[[], object], steps: int, trace: Path | None) -> list[Kernel]:
    """Kernels of `steps` steps on this rank; the last of them lies behind a synchronisation.

    Args:
        trace: where the whole is written for ui.perfetto.dev; None: nowhere.
    """
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recorded

    torch.cuda.synchronize()
    with recorded(activities=[ProfilerActivity.CUDA]) as found:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    if trace is not None:
        found.export_chrome_trace(str(trace))
    events = found.profiler.kineto_results.events()
    on_gpu = (event for event in events if event.device_type().name == "CUDA")
    return [Kernel(event.name(), event.start_ns(), event.start_ns() + event.duration_ns()) for event in on_gpu]


def launch_ms(step: Callable[[], object], steps: int) -> float:
    """What this rank's host takes to launch a step on a device that has nothing to do: the median, in ms.

    At most that: where a step waits for the device or for another rank, or has more kernels than the device's queue
    takes, some thousand, the wait is in it.
    """
    each = []
    for _ in range(steps):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        step()
        each.append(time.perf_counter() - begin)
    torch.cuda.synchronize()
    return statistics.median(each) * 1e3


def kind_of(name: str) -> str:
    """What a kernel does."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), OTHER)


def shares(kernels: Sequence[Kernel], steps: int) -> list[Row]:
    """A row a kind: `ms` a step in which it counts, `ms_all` of its kernels whether hidden or not, `kernels` a step.

    The last row is the time in which nothing ran, from the first kernel's begin to the last one's end.
    """
    by_kind: dict[str, list[Kernel]] = {name: [] for name in _ORDER}
    for kernel in kernels:
        by_kind[kind_of(kernel.name)].append(kernel)
    covered: list[tuple[int, int]] = []
    rows: list[Row] = []
    for kind, found in by_kind.items():
        before = _length(covered)
        covered = _union([*covered, *((one.begin, one.end) for one in found)])
        own_ns = sum(one.end - one.begin for one in found)
        own = {"ms": (_length(covered) - before) / 1e6 / steps, "ms_all": own_ns / 1e6 / steps}
        rows.append({"kind": kind, **own, "kernels": len(found) / steps})
    whole = max((one.end for one in kernels), default=0) - min((one.begin for one in kernels), default=0)
    idle_ms = (whole - _length(covered)) / 1e6 / steps
    return [*rows, {"kind": "idle", "ms": idle_ms, "ms_all": idle_ms, "kernels": 0.0}]


def most_time(kernels: Sequence[Kernel], steps: int, count: int) -> list[Row]:
    """The kernels, by name, that took the most time: `name`, `kind`, `ms` a step, `kernels` a step."""
    total: dict[str, list[int]] = {}
    for kernel in kernels:
        total.setdefault(kernel.name, []).append(kernel.end - kernel.begin)
    largest = sorted(total.items(), key=lambda item: -sum(item[1]))[:count]
    return [
        {"name": name[:120], "kind": kind_of(name), "ms": sum(each) / 1e6 / steps, "kernels": len(each) / steps}
        for name, each in largest
    ]


def floors(job: JobConfig, device: str) -> dict[str, float]:
    """Least ms a step and rank of some kinds, by the data sheet of `device`; those of an unknown one are left out.

    Products and attention (the keys that queries see) at the peak of FLOPs, which no card holds for as long as a step:
    it has not the power. AdamW at the memory's bandwidth: it reads gradient, master and both moments, and writes the
    last three and the parameter of the computation.
    """
    layout, dtype = job.parallel.layout, job.model.dtype
    flops = step_flops(job.model, job.batch.global_size)
    linears = 2 * flops.causal - flops.full
    parameters = num_parameters(job.model) / layout.world_size
    found: dict[str, float] = {}
    if peak := peak_flops(device, dtype):
        found["matrix products"] = linears / layout.world_size / peak * 1e3
        found["attention"] = (flops.done - linears) / layout.world_size / peak * 1e3
    if bandwidth := memory_bandwidth(device):
        found["optimiser"] = parameters * (4 * 4 + 3 * 4 + 2 * (dtype == "bfloat16")) / bandwidth * 1e3
    return found


def table(rows: Iterable[Row], least: dict[str, float]) -> Iterable[str]:
    """For a person."""
    rows = list(rows)
    whole = sum(row["ms"] for row in rows)
    yield f"{'of a step':>26} {'ms':>8} {'share':>7} {'with hidden':>12} {'kernels':>8} {'at least ms':>12}"
    for row in rows:
        floor = f"{least[row['kind']]:12.1f}" if row["kind"] in least else f"{'-':>12}"
        share = row["ms"] / whole if whole else 0.0
        yield f"{row['kind']:>26} {row['ms']:8.1f} {share:7.1%} {row['ms_all']:12.1f} {row['kernels']:8.0f} {floor}"


def _union(spans: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    merged: list[tuple[int, int]] = []
    for begin, end in sorted(spans):
        if merged and begin <= merged[-1][1]:
            merged[-1] = merged[-1][0], max(merged[-1][1], end)
        else:
            merged.append((begin, end))
    return merged


def _length(spans: Iterable[tuple[int, int]]) -> int:
    return sum(end - begin for begin, end in spans)
