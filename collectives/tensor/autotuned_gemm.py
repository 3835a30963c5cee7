"""Products of 16-bit and 8-bit matrices on a GPU by the algorithm that measures fastest where they run, once a shape.

A chip under full load is bound by its power: what counts is how much of it an algorithm needs, which no heuristic
knows, and no measurement that is over before the clock has come down. On an H200 an algorithm that took 7% less time
than the one that torch is given, in turns of milliseconds, took 5% more after a tenth of a second; others, of products
of a 7B model, take up to 5% less then too. Candidates are torch's own product and cublasLt's algorithms for the shape,
on the data of its first call: some 1.3 s a shape, 20 s of a 7B model, kept for the next start. Not covered: small
products, whose launch counts most, and shapes first met while a CUDA graph is captured.

nvmath-python's `Matmul.autotune` chooses among cublasLt's algorithms too, by single calls at full clock. Over Llama
8B's products on an H200, with pauses between calls, its choices took 4.6% longer than these (13,585 us beside 12,991,
torch's 12,973), and 1.2% in 8 bits; single ones were up to 6% faster (reports/llama8b_202611.md).

Runs may choose otherwise, and so round sums otherwise: not where torch is asked for deterministic algorithms, or for
sums that are not reduced in 16 bits; there all products are torch's.

Shapes: M rows, K summed over, N columns.
"""

from __future__ import annotations

import functools
import logging
import math
import statistics
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from collectives.tensor import cublaslt
from collectives.tensor.gemm_choices import GemmChoices, choices_of

logger = logging.getLogger(__name__)

_DTYPES = (torch.bfloat16, torch.float16)
_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_LEAST_FLOPS = 2e10
"""Some 27 us of an H200."""
_LEAST_SPARED_FLOPS = 4e9
"""Of a product that leaves multiprocessors to others: smaller ones than those worth measuring hold these up too."""
_ROUNDS, _REPEATS, _FINALISTS = 3, 3, 4
_SETTLING_S = 0.2
"""In which a chip comes to the clock that its power allows for a product."""
_LEAST_GAIN = 0.005

Run = Callable[[], object]
Scales = tuple[Tensor, Tensor]
"""Of 8-bit factors, float32, []."""
Operands = tuple[Tensor, Tensor, Tensor, Tensor | None]
"""The factors, where the product goes, and a bias."""
Choice = tuple[cublaslt.Gemm, Any] | None
"""A product and the best of its algorithms; None: torch's."""


class AutotunedGemms:
    """Tuned products of this process. The first `run` with a shape measures and chooses its algorithm.

    Args:
        measure: seconds of each candidate, in their order.
        choices: of earlier processes on a device's kind of card.
    """

    def __init__(
        self,
        measure: Callable[[list[Run]], list[float]],
        choices: Callable[[torch.device], GemmChoices] = lambda _device: GemmChoices(),
    ) -> None:
        self._measure, self._choices = measure, choices
        self._measures = False
        self._chosen: dict[cublaslt.Shape, Choice] = {}
        self._met: dict[tuple[object, ...], Choice] = {}

    def run(
        self,
        a_MK: Tensor,
        b_KN: Tensor,
        out_MN: Tensor,
        bias_N: Tensor | None = None,
        adds: bool = False,
        spared: int = 0,
        scales: Scales | None = None,
        fast: bool = False,
    ) -> bool:
        """out = a b (+ bias), or out += a b; False: torch is to do it, which is no slower, or nothing is chosen yet.

        Args:
            spared: multiprocessors that are left to concurrent kernels, which no product of torch's does.
            scales, fast: of 8-bit factors, as in `cublaslt.Shape`.
        """
        seen = _seen(a_MK, b_KN, out_MN, bias_N, spared, fast)
        if seen not in self._met:
            shape = cublaslt.Shape.of(a_MK, b_KN, out_MN, bias_N, spared, fast)
            if shape is not None and shape not in self._chosen:
                if torch.cuda.is_current_stream_capturing():
                    return False
                place_MN = out_MN
                if adds:  # measured, it would be added many times
                    place_MN = torch.empty_strided(
                        out_MN.shape, out_MN.stride(), dtype=out_MN.dtype, device=out_MN.device
                    )
                self._chosen[shape] = self._choose(shape, (a_MK, b_KN, place_MN, bias_N), scales)
            self._met[seen] = None if shape is None else self._chosen[shape]
        chosen = self._met[seen]
        if chosen is None:
            return False
        product, algorithm = chosen
        product.run(algorithm, a_MK, b_KN, out_MN, bias_N, adds, scales)
        return True

    def _choose(self, shape: cublaslt.Shape, operands: Operands, scales: Scales | None) -> Choice:
        choices = self._choices(shape.device)
        kept = choices.find(shape)
        if kept is not None:
            try:
                return _earlier_choice(shape, kept, operands, scales)
            except (RuntimeError, ValueError) as exc:
                logger.info(
                    "%s: what was chosen earlier does not run, and is chosen anew: %s", _describe(operands), exc
                )
        if not self._measures:
            logger.info("matmuls: measuring which algorithms are the fastest, a second or two for each shape")
            self._measures = True
        try:
            chosen = self._fastest(shape, operands, scales)
        except RuntimeError as exc:
            logger.warning("torch's own product is taken for %s: %s", _describe(operands), exc)
            return None
        choices.add(shape, "" if chosen is None else chosen[0].to_text(chosen[1]))
        return chosen

    def _fastest(self, shape: cublaslt.Shape, operands: Operands, scales: Scales | None) -> Choice:
        """Measure torch's product and every algorithm; return the fastest one, or None: torch's is as good.

        A shape that leaves multiprocessors to other kernels (`spared`) never gets torch's, which would take them all.
        """
        product = cublaslt.Gemm(shape)
        candidates = list(product.algorithms)
        runs = [functools.partial(product.run, each, *operands, False, scales) for each in candidates]
        torch_s, *others = self._measure([functools.partial(by_torch, *operands, scales, shape.fast), *runs])
        best_s = min(others, default=torch_s)
        is_worth_it = bool(others) and (shape.spared > 0 or best_s < torch_s * (1 - _LEAST_GAIN))
        template = "product %s: torch %.1f us, the best of %d algorithms %.1f us"
        logger.debug(template, _describe(operands), torch_s * 1e6, len(others), best_s * 1e6)
        return (product, candidates[others.index(best_s)]) if is_worth_it else None


def _earlier_choice(shape: cublaslt.Shape, kept: str, operands: Operands, scales: Scales | None) -> Choice:
    """Return an earlier choice, after one run: that raises if it cannot run here."""
    if not kept:
        return None
    product = cublaslt.Gemm(shape)
    algorithm = product.from_text(kept)
    product.run(algorithm, *operands, False, scales)
    return product, algorithm


def _seen(
    a_MK: Tensor, b_KN: Tensor, out_MN: Tensor, bias_N: Tensor | None, spared: int = 0, fast: bool = False
) -> tuple[object, ...]:
    """Return the raw inputs of `cublaslt.Shape.of`: in a fifth of its time, and a step needs hundreds of them."""
    bias = None if bias_N is None else (bias_N.dtype, bias_N.stride(), bias_N.data_ptr() % cublaslt.LARGEST_ALIGNMENT)
    return (
        a_MK.get_device(),
        a_MK.dtype,
        a_MK.shape,
        a_MK.stride(),
        a_MK.data_ptr() % cublaslt.LARGEST_ALIGNMENT,
        b_KN.dtype,
        b_KN.shape,
        b_KN.stride(),
        b_KN.data_ptr() % cublaslt.LARGEST_ALIGNMENT,
        out_MN.dtype,
        out_MN.stride(),
        out_MN.data_ptr() % cublaslt.LARGEST_ALIGNMENT,
        bias,
        spared,
        fast,
    )


def by_torch(
    a_MK: Tensor,
    b_KN: Tensor,
    out_MN: Tensor,
    bias_N: Tensor | None,
    scales: Scales | None = None,
    fast: bool = False,
) -> Tensor:
    """out = a b (+ bias), by the algorithm that torch is given."""
    if scales is not None:
        torch._scaled_mm(a_MK, b_KN, *scales, bias_N, out_dtype=out_MN.dtype, use_fast_accum=fast, out=out_MN)
        return out_MN
    if out_MN.dtype != a_MK.dtype:
        return torch.mm(a_MK, b_KN, out_dtype=out_MN.dtype, out=out_MN)
    if bias_N is None:
        return torch.mm(a_MK, b_KN, out=out_MN)
    return torch.addmm(bias_N, a_MK, b_KN, out=out_MN)


def measure_on_gpu(candidates: list[Run]) -> list[float]:
    """Seconds of a call of each, after others of its own for as long as the chip takes to settle; the host waits.

    Which of them are worth that is seen first, in turns that are too short for it; of the others nobody asks any more:
    infinity. The first one is always measured.
    """
    short = _in_turns(candidates)
    rest = sorted(range(1, len(candidates)), key=lambda index: short[index])
    worth_it = {0, *rest[:_FINALISTS]}
    return [_settled(run, short[index]) if index in worth_it else math.inf for index, run in enumerate(candidates)]


def _in_turns(candidates: list[Run]) -> list[float]:
    times: list[list[float]] = [[] for _ in candidates]
    for _ in range(_ROUNDS):
        for run, each in zip(candidates, times, strict=True):
            run()
            each.append(_seconds(run, _REPEATS))
    return [statistics.median(each) for each in times]


def _settled(run: Run, about_s: float) -> float:
    count = max(2, round(_SETTLING_S / about_s / 2))
    for _ in range(count):
        run()
    return _seconds(run, count)


def _seconds(run: Run, count: int) -> float:
    """Return the seconds of a call, as the mean of `count` in a row."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    for _ in range(count):
        run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / count


GEMMS = AutotunedGemms(measure_on_gpu, choices_of)
"""Of this process: what was chosen for a shape serves every layer that has it."""


def is_large(a: Tensor, b_KN: Tensor) -> bool:
    """Whether the product of `a` [..., K] and `b` takes a GPU longer than its launch the host."""
    return _flops(a, b_KN) >= _LEAST_FLOPS


def _flops(a: Tensor, b_KN: Tensor) -> float:
    return 2.0 * a.numel() * b_KN.shape[1]


def can_tune(a: Tensor, b_KN: Tensor, spared: int = 0) -> bool:
    """Whether it is worth asking `GEMMS` for the product of `a` [..., K] and `b`.

    Args:
        spared: multiprocessors that it is to leave to others: then smaller ones are too.
    """
    return (
        a.is_cuda
        and a.device.index == torch.cuda.current_device()
        and ((a.dtype in _DTYPES and b_KN.dtype == a.dtype) or (a.dtype in _FLOAT8 and b_KN.dtype in _FLOAT8))
        and _flops(a, b_KN) >= (_LEAST_SPARED_FLOPS if spared else _LEAST_FLOPS)
        and not torch.compiler.is_compiling()
        and not torch.are_deterministic_algorithms_enabled()
        and torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction
        and torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction
        and cublaslt.is_there()
    )


def _describe(operands: Operands) -> str:
    a_MK, b_KN, *_ = operands
    return f"{a_MK.shape[0]} x {a_MK.shape[1]} x {b_KN.shape[1]}"
