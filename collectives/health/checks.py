"""Health of devices and of the links between them: GEMM, copies, all-to-all, all-reduce, and every pair of ranks.

Each function measures one thing, checks the data that came out, and returns rows (`HealthRow`): plain data, nothing is
printed or judged. What involves a group is called by all its ranks and gives all of them the rows of all. Works on
CUDA with NCCL and on CPUs with gloo. After "self-checks, light but broad" of MegaScale (4). Not covered: NICs.

    rows = health.gemm(torch.device("cuda", 0)) + health.pairs(group, 64 * 2**20)
    bad = [row for row in rows if not row["ok"]]
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.arguments import as_device
from collectives.health.all_pairs import pair_rounds, pairs
from collectives.health.trial import (
    HealthRow,
    Progress,
    check_arguments,
    count_wrong,
    device_name,
    gather,
    giga_per_second,
    group_device,
    make_row,
    measure,
    measure_blocks,
    pattern,
    poison,
    slowest_of,
    world_rank,
)
from collectives.timing import make_replay, time_in_turn
from netlayer.percentile import percentile

__all__ = ["HealthRow", "all_reduce", "all_to_all", "copy", "gemm", "host_pauses", "pair_rounds", "pairs"]

_SHARE_ALIGNMENT_BYTES = 16  # of a rank's part of an all-to-all, as in the benches
_TF32_EPS = 2.0**-10
_PAUSE_NS = 200_000
_EXACT_IN_FLOAT = 2**24  # whole numbers up to here are exact, and so is every sum that stays below


def gemm(
    device: torch.device | str,
    size: int = 8192,
    dtype: torch.dtype = torch.bfloat16,
    repeats: int = 50,
    *,
    budget_s: float = 10.0,
    num_blocks: int = 0,
    warmup_s: float = 0.0,
    num_checked: int = 32,
    progress: Progress | None = None,
) -> list[HealthRow]:
    """Product of two square matrices of normal random numbers; one row with `tflops`.

    With blocks, the budget is theirs, after the single calls, and `tflops` is of their mean: of all the time that went
    by, whatever held the device up.

    Args:
        device: to measure.
        size: rows and columns of each matrix.
        dtype: of the matrices: floating, in which the device multiplies.
        repeats: most iterations.
        budget_s: seconds for them.
        num_blocks: blocks of calls to time as well (`HealthRow.blocks_us`), at least 2; 0: none.
        warmup_s: seconds of the same work before the blocks.
        num_checked: rows of the product, drawn at random, that are compared with a product in float64.
        progress: hears of the end.
    """
    check_arguments(size, repeats, budget_s)
    device = as_device(device)
    a_MK, b_KN = (torch.randn(size, size, device=device, dtype=torch.float32).to(dtype) for _ in range(2))
    product_MN = torch.full_like(a_MK, float("nan"))

    def multiply() -> object:
        return torch.mm(a_MK, b_KN, out=product_MN)

    times_us = measure(device, repeats, budget_s, multiply)
    blocks_us = _blocks(device, num_blocks, budget_s, times_us, multiply, warmup_s)
    wrong = _count_wrong_products(a_MK, b_KN, product_MN, num_checked)
    row = make_row("gemm", world_rank(), device_name(device), product_MN.nbytes, times_us, wrong)
    row["tflops"] = giga_per_second(2 * size**3, _typical_us(row, blocks_us)) / 1e3
    _tell(progress, 1, 1)
    return [row]


def copy(
    device: torch.device | str,
    num_bytes: int = 2**28,
    repeats: int = 20,
    *,
    budget_s: float = 10.0,
    num_blocks: int = 0,
    progress: Progress | None = None,
) -> list[HealthRow]:
    """Copies inside the device, and on CUDA from pinned host memory to it and back; one row a direction with `bw_gbs`.

    Args:
        device: to measure.
        num_bytes: of one copy.
        repeats: most iterations of each.
        budget_s: seconds for all directions together.
        num_blocks: as in `gemm`.
        progress: hears of every direction.
    """
    check_arguments(num_bytes, repeats, budget_s)
    device = as_device(device)
    on_cuda = device.type == "cuda"
    directions = ("device_to_device", "host_to_device", "device_to_host") if on_cuda else ("device_to_device",)
    rows = []
    for number, direction in enumerate(directions):
        source_N = pattern(num_bytes, device, number)
        target_N = torch.empty_like(source_N)
        if direction == "host_to_device":
            source_N = source_N.cpu().pin_memory()
        elif direction == "device_to_host":
            target_N = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
        poison(target_N, source_N.to(target_N.device))
        copying, budget_each_s = _copying(target_N, source_N), budget_s / len(directions)
        times_us = measure(device, repeats, budget_each_s, copying)
        blocks_us = _blocks(device, num_blocks, budget_each_s, times_us, copying)
        wrong = count_wrong(target_N, source_N.to(target_N.device))
        row = make_row("copy", world_rank(), device_name(device), num_bytes, times_us, wrong)
        row["direction"], row["bw_gbs"] = direction, giga_per_second(num_bytes, _typical_us(row, blocks_us))
        rows.append(row)
        _tell(progress, number + 1, len(directions))
    return rows


def all_to_all(
    group: dist.ProcessGroup,
    num_bytes: int = 2**26,
    repeats: int = 20,
    *,
    budget_s: float = 10.0,
    progress: Progress | None = None,
) -> list[HealthRow]:
    """Part j of rank i becomes part i of rank j; one row a rank with `alg_bw_gbs` and `bus_bw_gbs`.

    Args:
        group: every rank of it calls this.
        num_bytes: of a rank's whole buffer; rounded down to equal parts of a multiple of 16 bytes.
        repeats: most iterations.
        budget_s: seconds for them.
        progress: hears of the end.

    Raises:
        ValueError: `num_bytes` leaves no part.
    """
    check_arguments(num_bytes, repeats, budget_s)
    rank, ranks, device = dist.get_rank(group), dist.get_world_size(group), group_device(group)
    part_bytes = num_bytes // ranks // _SHARE_ALIGNMENT_BYTES * _SHARE_ALIGNMENT_BYTES
    if not part_bytes:
        raise ValueError(f"num_bytes = {num_bytes}: {ranks} ranks need at least {_SHARE_ALIGNMENT_BYTES * ranks}")
    sent_N = torch.cat([pattern(part_bytes, device, rank, peer) for peer in range(ranks)])
    expected_N = torch.cat([pattern(part_bytes, device, peer, rank) for peer in range(ranks)])
    received_N = torch.empty_like(sent_N)
    poison(received_N, expected_N)
    times_us = measure(
        device,
        repeats,
        budget_s,
        lambda: dist.all_to_all_single(received_N, sent_N, group=group),
        agree=slowest_of(group, device),
    )
    row = _collective_row("all_to_all", device, sent_N.nbytes, times_us, count_wrong(received_N, expected_N))
    row["bus_bw_gbs"] = row["alg_bw_gbs"] * (ranks - 1) / ranks
    _tell(progress, 1, 1)
    return gather(row, group)


def all_reduce(
    group: dist.ProcessGroup,
    num_bytes: int = 2**26,
    repeats: int = 20,
    *,
    budget_s: float = 10.0,
    graph_calls: int = 0,
    progress: Progress | None = None,
) -> list[HealthRow]:
    """Sum of all ranks' float32 buffers, in place; one row a rank with `alg_bw_gbs` and `bus_bw_gbs`.

    Args:
        group: every rank of it calls this.
        num_bytes: of a rank's buffer; rounded down to whole numbers of 4 bytes.
        repeats: most iterations.
        budget_s: seconds for them.
        graph_calls: on CUDA, after the calls that are checked: time a graph of so many calls in place of single ones,
            which the host launches one by one; a time is then the mean over a graph. 0: single calls.
        progress: hears of the end.

    Raises:
        ValueError: `num_bytes` is less than one number.
    """
    check_arguments(num_bytes // 4, repeats, budget_s)
    rank, ranks, device = dist.get_rank(group), dist.get_world_size(group), group_device(group)
    source_N = _whole_numbers(num_bytes // 4, device, ranks, rank)
    expected_N = torch.zeros_like(source_N)
    for peer in range(ranks):
        expected_N += _whole_numbers(num_bytes // 4, device, ranks, peer)
    sum_N = torch.full_like(source_N, float("nan"))
    times_us = measure(
        device,
        repeats,
        budget_s,
        lambda: dist.all_reduce(sum_N, group=group),
        before=lambda: sum_N.copy_(source_N),
        agree=slowest_of(group, device),
    )
    wrong = count_wrong(sum_N, expected_N)
    if graph_calls and device.type == "cuda":
        sum_N.zero_()  # adding up zeros for ever overflows nothing
        replay = make_replay(lambda: dist.all_reduce(sum_N, group=group), graph_calls, device)
        times_us = time_in_turn({"": replay}, group, device, graph_calls, len(times_us), 1)[""].each_us
    row = _collective_row("all_reduce", device, sum_N.nbytes, times_us, wrong)
    row["bus_bw_gbs"] = row["alg_bw_gbs"] * 2 * (ranks - 1) / ranks
    _tell(progress, 1, 1)
    return gather(row, group)


def host_pauses(seconds: float = 0.1) -> list[HealthRow]:
    """Measure the share of the time in which this thread was stopped or kept from its core, while it reads the clock.

    Times are of single pauses, each above 0.2 ms: a healthy thread reads the clock every 0.1 us.
    """
    begin_ns = now_ns = time.perf_counter_ns()
    pauses_us = []
    while now_ns - begin_ns < 1e9 * seconds:
        before_ns, now_ns = now_ns, time.perf_counter_ns()
        if now_ns - before_ns > _PAUSE_NS:
            pauses_us.append((now_ns - before_ns) / 1e3)
    row = make_row("host", world_rank(), device_name(torch.device("cpu")), 0, pauses_us or [0.0], 0)
    row["stopped_share"] = 1e3 * sum(pauses_us) / (now_ns - begin_ns)
    return [row]


def _blocks(
    device: torch.device, num: int, budget_s: float, times_us: list[float], call: Callable[[], object],
    warmup_s: float = 0.0,
) -> list[float]:  # fmt: skip
    """Times of a call in blocks; one block more than those, and the warm-up, go before."""
    if not num:
        return []
    return measure_blocks(device, num, budget_s / (num + 1), percentile(times_us, 50), call, warmup_s)


def _typical_us(row: HealthRow, blocks_us: list[float]) -> float:
    """The time that a figure is made of; where there are blocks, they go into the row."""
    if not blocks_us:
        return row["p50_us"]
    row["blocks_us"] = blocks_us
    return sum(blocks_us) / len(blocks_us)


def _collective_row(check: str, device: torch.device, num_bytes: int, times_us: list[float], wrong: int) -> HealthRow:
    row = make_row(check, world_rank(), device_name(device), num_bytes, times_us, wrong)
    row["alg_bw_gbs"] = giga_per_second(num_bytes, row["p50_us"])
    return row


def _whole_numbers(num: int, device: torch.device, ranks: int, rank: int) -> Tensor:
    """Return the addends of a rank: so small that the sum over ranks is exact in float32."""
    low, high = (pattern(num, device, rank, part).float() for part in range(2))
    return (low + 256 * high).remainder_(_EXACT_IN_FLOAT // ranks)


def _count_wrong_products(a_MK: Tensor, b_KN: Tensor, product_MN: Tensor, num_checked: int) -> int:
    """Elements in some rows of a product that are further from the truth than rounding explains."""
    size, eps = a_MK.shape[1], torch.finfo(product_MN.dtype).eps
    if product_MN.dtype == torch.float32 and product_MN.is_cuda:
        eps = _TF32_EPS  # the user may have let the device round the inputs
    rows = torch.randperm(size, device=a_MK.device)[:num_checked]
    a_RK, b_KN = a_MK[rows].double(), b_KN.double()
    truth_RN = a_RK @ b_KN
    # Rounding errors of K terms add up like the terms do: by a random walk whose step is the root of their squares.
    walk_RN = (a_RK.square() @ b_KN.square()).sqrt()
    float_eps = min(eps, torch.finfo(torch.float32).eps)
    allowed_RN = eps * (truth_RN.abs() + walk_RN) + 8 * float_eps * size**0.5 * walk_RN
    near_RN = (product_MN[rows].double() - truth_RN).abs() <= allowed_RN  # NaN is near nothing
    return int((~near_RN).sum())


def _copying(target: Tensor, source: Tensor) -> Callable[[], object]:
    return lambda: target.copy_(source, non_blocking=True)


def _tell(progress: Progress | None, done: int, total: int) -> None:
    if progress is not None:
        progress(done, total)
