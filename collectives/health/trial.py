"""Parts of a health check: data that is known byte by byte, times by the device's own clock, and the result row.

Times are by events on CUDA, by the host's clock elsewhere; percentiles are by nearest rank, as in the benches. Not
covered: what a good figure is.
"""

from __future__ import annotations

import hashlib
import itertools
import platform
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor

from netlayer.percentile import percentile

Progress = Callable[[int, int], None]
"""Called with the parts of a check that are done, and all of them."""

_PERIOD = 65521  # bytes of a pattern; prime: no part of a power-of-two size begins where another did
_LEAST_REPEATS = 3


class HealthRow(TypedDict):
    """One row of a check.

    Args:
        check: which one: `gemm`, `copy`, `all_to_all`, `all_reduce`, `pairs`.
        rank: in the world; of a pair, the lower one. 0 where there is no process group.
        peer: the other rank of a pair.
        round: of a pair, from 0.
        direction: which way data went.
        device: name of the rank's device.
        size_bytes: of one matrix, one copy, a rank's whole buffer, or one message.
        p50_us, p99_us, min_us: times of single iterations.
        iterations_us: all of them, in order.
        wrong: elements that came out wrong.
        ok: whether none did.
        tflops: 1e12 operations a second; a multiplication and its addition are two.
        bw_gbs: 1e9 bytes a second that arrived; a copy's bytes count once.
        alg_bw_gbs, bus_bw_gbs: as in nccl-tests.
        messages: of a pair, of one launch; times are means over these.
        host_us: what the host took for a launch, in the middle; no part of the other times.
        blocks_us: times of a call, as means over blocks of calls without a gap between them: what holds the device up
            between two calls is in them, and in no time of a single call.
        stopped_share: of the time, in which the host's thread was stopped or kept from its core.
    """

    check: str
    rank: int
    peer: NotRequired[int]
    round: NotRequired[int]
    direction: NotRequired[str]
    device: str
    size_bytes: int
    p50_us: float
    p99_us: float
    min_us: float
    iterations_us: list[float]
    wrong: int
    ok: bool
    tflops: NotRequired[float]
    bw_gbs: NotRequired[float]
    alg_bw_gbs: NotRequired[float]
    bus_bw_gbs: NotRequired[float]
    messages: NotRequired[int]
    host_us: NotRequired[float]
    blocks_us: NotRequired[list[float]]
    stopped_share: NotRequired[float]


def make_row(check: str, rank: int, device: str, size_bytes: int, times_us: Sequence[float], wrong: int) -> HealthRow:
    """A row without the figures that only one kind of check has."""
    return HealthRow(
        check=check,
        rank=rank,
        device=device,
        size_bytes=size_bytes,
        p50_us=percentile(times_us, 50),
        p99_us=percentile(times_us, 99),
        min_us=min(times_us),
        iterations_us=list(times_us),
        wrong=wrong,
        ok=wrong == 0,
    )


def giga_per_second(amount: float, time_us: float) -> float:
    """Billions of something a second; 0 where the clock saw no time pass."""
    return amount / 1e3 / time_us if time_us > 0 else 0.0


def time_calls(
    device: torch.device, num: int, call: Callable[[], object], before: Callable[[], object] | None = None
) -> list[float]:
    """Microseconds of each of `num` calls; `before` runs ahead of each and is not timed. Waits for the device."""
    if device.type != "cuda":
        return [_time_on_host(call, before) for _ in range(num)]
    marks = []
    for _ in range(num):
        if before is not None:
            before()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        call()
        end.record()
        marks.append((start, end))
    torch.cuda.synchronize(device)
    return [1e3 * float(start.elapsed_time(end)) for start, end in marks]


def measure(
    device: torch.device,
    repeats: int,
    budget_s: float,
    call: Callable[[], object],
    before: Callable[[], object] | None = None,
    agree: Callable[[float], float] = float,
) -> list[float]:
    """`time_calls` after a warm-up, as often as the budget allows: at least 3 times, at most `repeats` times.

    Args:
        device: that the calls run on.
        repeats: most calls.
        budget_s: seconds that they may take together.
        call, before: as in `time_calls`.
        agree: turns this rank's time of one call, us, into the one that all ranks with the same calls go by.
    """
    time_calls(device, 1, call, before)
    one_us = agree(time_calls(device, 1, call, before)[0])
    affordable = int(1e6 * budget_s / one_us) if one_us > 0 else repeats
    return time_calls(device, min(repeats, max(affordable, _LEAST_REPEATS)), call, before)


def time_launches(device: torch.device, num: int, launch: Callable[[], object]) -> tuple[list[float], list[float]]:
    """Microseconds of `num` launches in a row on the device, and of the host for each; one before them is not timed.

    Marks lie between launches, and nothing but the launches lies between marks: what holds the device up counts,
    wherever it does. The host is not waited for unless it falls behind by a whole launch. Waits for the device.
    """
    if device.type != "cuda":
        launch()
        times_us = [_time_on_host(launch, None) for _ in range(num)]
        return times_us, times_us
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(num + 1)]  # type: ignore[no-untyped-call]
    host_us = []
    launch()
    marks[0].record()
    for mark in marks[1:]:
        host_us.append(_time_on_host(launch, None))
        mark.record()
    torch.cuda.synchronize(device)
    return [1e3 * float(begin.elapsed_time(end)) for begin, end in itertools.pairwise(marks)], host_us


def measure_blocks(
    device: torch.device, num: int, block_s: float, one_us: float, call: Callable[[], object], warmup_s: float = 0.0
) -> list[float]:
    """Microseconds of a call in each of `num` blocks, each of as many calls as take `block_s` at `one_us` a call.

    `warmup_s` goes by before, under the same load: until clocks and power have settled.
    """
    calls = max(1, round(1e6 * block_s / max(one_us, 1e-3)))

    def block() -> None:
        for _ in range(calls):
            call()

    num_warmup = round(warmup_s / block_s)
    return [time_us / calls for time_us in time_launches(device, num_warmup + num, block)[0][num_warmup:]]


def slowest_of(group: dist.ProcessGroup, device: torch.device) -> Callable[[float], float]:
    """Return, for `measure`, a function that gives every rank of the group the longest time of all ranks."""

    def agree(one_us: float) -> float:
        slowest = torch.tensor(one_us, dtype=torch.float64, device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
        return float(slowest)

    return agree


def pattern(num_bytes: int, device: torch.device, *seed: int) -> Tensor:
    """Random bytes that depend on every number of the seed, shape [num_bytes]; they repeat after a prime number."""
    digest = hashlib.sha256(repr(seed).encode()).digest()
    generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest[:7], "big"))
    period = torch.randint(256, (_PERIOD,), dtype=torch.uint8, generator=generator, device="cpu").to(device)
    return period.repeat(-(-num_bytes // _PERIOD))[:num_bytes]


def poison(buffer: Tensor, expected: Tensor) -> None:
    """Fill a buffer so that every byte of it is wrong."""
    torch.bitwise_not(expected, out=buffer)


def count_wrong(result: Tensor, expected: Tensor) -> int:
    """Elements that differ."""
    return int(torch.count_nonzero(result != expected))  # on a CPU a sum of booleans takes six times as long


def group_device(group: dist.ProcessGroup) -> torch.device:
    """Return the device of this group's tensors: the current CUDA device with NCCL, else the CPU."""
    backends = dist.get_backend_config(group)
    return torch.device("cuda", torch.cuda.current_device()) if "cuda:nccl" in backends else torch.device("cpu")


def gather(own: Any, group: dist.ProcessGroup) -> list[Any]:
    """One object of each rank, in rank order, on all ranks."""
    gathered: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(gathered, own, group=group)
    return gathered


def world_rank() -> int:
    """Return this rank in the world; 0 without a process group."""
    return dist.get_rank() if dist.is_initialized() else 0


def device_name(device: torch.device) -> str:
    """Return the vendor's name of the device."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    models = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(models, "") or platform.processor() or platform.machine()


def check_arguments(num_bytes: int, repeats: int, budget_s: float) -> None:
    """Raise ValueError for what no check can do."""
    if num_bytes < 1 or repeats < 1 or not budget_s > 0:
        raise ValueError(
            f"size, repeats and budget_s must be above zero, got {num_bytes} bytes, {repeats} and {budget_s} s"
        )


def _time_on_host(call: Callable[[], object], before: Callable[[], object] | None) -> float:
    if before is not None:
        before()
    start_s = time.perf_counter()
    call()
    return 1e6 * (time.perf_counter() - start_s)
