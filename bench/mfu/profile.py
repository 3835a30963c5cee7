"""Breakdown of a step's GPU time by kind of kernel, compared with the minimum for its FLOPs and bytes.

Kernels come from torch's profiler (CUPTI) and are classified by name. Time in which several run at once counts for the
first of `KINDS` among them, so the parts and the idle time add up to the step. Of the host's work, only the time to
launch a step is measured: if that is close to the step's time, the host is the bottleneck, or waits in the call.
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

from netlayer.config.tree import JobConfig
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
"""Kinds of kernel with a pattern of their names; the first that matches counts, and none is `OTHER`."""
OTHER = "norms, activations, sums"
_ORDER = (*(name for name, _ in KINDS[:-1]), OTHER, KINDS[-1][0])  # communication counts where nothing else runs


@dataclass(frozen=True)
class Kernel:
    """One kernel execution: its name, and its begin and end in ns."""

    name: str
    begin: int
    end: int


def profile(step: Callable[[], object], steps: int, trace: Path | None) -> list[Kernel]:
    """Record the kernels of `steps` steps on this rank, synchronised at both ends.

    Args:
        trace: file for the whole trace, for ui.perfetto.dev; None writes none.
    """
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as recorded

    torch.cuda.synchronize()
    with recorded(activities=[ProfilerActivity.CUDA]) as recording:
        for _ in range(steps):
            step()
        torch.cuda.synchronize()
    if trace is not None:
        recording.export_chrome_trace(str(trace))
    events = recording.profiler.kineto_results.events()
    on_gpu = (event for event in events if event.device_type().name == "CUDA")
    return [Kernel(event.name(), event.start_ns(), event.start_ns() + event.duration_ns()) for event in on_gpu]


def launch_ms(step: Callable[[], object], steps: int) -> float:
    """Measure how long this rank's host takes to launch a step on an idle device: the median, in ms.

    An upper bound: it includes waits for the device or another rank, and for room in the device's queue if a step has
    more kernels than it holds (about a thousand).
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
    """Classify a kernel by its name: one of `KINDS`, else `OTHER`."""
    return next((kind for kind, pattern in KINDS if re.search(pattern, name, re.IGNORECASE)), OTHER)


def shares(kernels: Sequence[Kernel], steps: int) -> list[Row]:
    """Make a row per kind: `ms` per step attributed to it, `ms_all` with time hidden by others, `kernels` per step.

    The last row is the idle time between the first kernel's begin and the last one's end.
    """
    by_kind: dict[str, list[Kernel]] = {name: [] for name in _ORDER}
    for kernel in kernels:
        by_kind[kind_of(kernel.name)].append(kernel)
    covered: list[tuple[int, int]] = []
    rows: list[Row] = []
    for kind, members in by_kind.items():
        before = _length(covered)
        covered = _union([*covered, *((one.begin, one.end) for one in members)])
        own_ns = sum(one.end - one.begin for one in members)
        own = {"ms": (_length(covered) - before) / 1e6 / steps, "ms_all": own_ns / 1e6 / steps}
        rows.append({"kind": kind, **own, "kernels": len(members) / steps})
    whole = max((one.end for one in kernels), default=0) - min((one.begin for one in kernels), default=0)
    idle_ms = (whole - _length(covered)) / 1e6 / steps
    return [*rows, {"kind": "idle", "ms": idle_ms, "ms_all": idle_ms, "kernels": 0.0}]


def most_time(kernels: Sequence[Kernel], steps: int, count: int) -> list[Row]:
    """List the kernels, by name, that took the most time: `name`, `kind`, `ms` per step, `kernels` per step."""
    total: dict[str, list[int]] = {}
    for kernel in kernels:
        total.setdefault(kernel.name, []).append(kernel.end - kernel.begin)
    largest = sorted(total.items(), key=lambda item: -sum(item[1]))[:count]
    return [
        {"name": name[:120], "kind": kind_of(name), "ms": sum(each) / 1e6 / steps, "kernels": len(each) / steps}
        for name, each in largest
    ]


def floors(job: JobConfig, device: str) -> dict[str, float]:
    """Compute the minimum ms per step and rank of some kinds from the data sheet of `device`; {} for an unknown one.

    Matmuls and attention (of the keys that queries see) run at peak FLOP/s, which power limits keep a card from
    sustaining for a step. AdamW runs at memory bandwidth: it reads the gradient, the master weight and both moments,
    and writes the last three and the parameter in the model's dtype.
    """
    layout, dtype = job.parallel.layout, job.model.dtype
    flops = step_flops(job.model, job.batch.global_batch_size)
    linears = 2 * flops.causal - flops.full
    parameters = num_parameters(job.model) / layout.world_size
    floors_ms: dict[str, float] = {}
    if peak := peak_flops(device, dtype):
        floors_ms["matrix products"] = linears / layout.world_size / peak * 1e3
        floors_ms["attention"] = (flops.done - linears) / layout.world_size / peak * 1e3
    if bandwidth := memory_bandwidth(device):
        floors_ms["optimiser"] = parameters * (4 * 4 + 3 * 4 + 2 * (dtype == "bfloat16")) / bandwidth * 1e3
    return floors_ms


def table(rows: Iterable[Row], min_ms: dict[str, float]) -> Iterable[str]:
    """Format the rows of `shares` as lines, with the minimum of `floors` where there is one."""
    rows = list(rows)
    whole = sum(row["ms"] for row in rows)
    yield f"{'of a step':>26} {'ms':>8} {'share':>7} {'with hidden':>12} {'kernels':>8} {'at least ms':>12}"
    for row in rows:
        floor = f"{min_ms[row['kind']]:12.1f}" if row["kind"] in min_ms else f"{'-':>12}"
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
