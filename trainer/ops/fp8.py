"""Products of linears in 8-bit floating point: what is quantised, how it is scaled, and a linear's three products.

Factors are quantised to float8, products are summed in float32, and come out in the dtype of the computation (a
weight's gradient in float32, where it has a place); masters, norms, attention, embedding and head stay as they are.

- tensorwise (current scaling): one scale a tensor, by its own largest magnitude. Inputs and weights are e4m3, gradients
  e5m2, whose range is larger (Micikevicius et al., arXiv 2209.05433).
- blockwise: inputs and gradients in tiles of 1 x 128 along what is summed over, weights in blocks of 128 x 128, all
  e4m3, scales powers of two, so that an input scaled anew along its other dimension is hardly rounded again
  (DeepSeek-V3, arXiv 2412.19437, 3.3).

[Note: what is kept] A linear keeps its input in 8 bits, and its weight as it is: that is quantised again in the
backward pass, transposed, by the largest magnitude that the forward pass has found. A weight that has travelled in 8
bits (`collectives.sharded.float8`) is read so in both passes. A product's factors lie with what is summed over as their
last dimension, as the tensor cores want it, so the backward pass transposes that one in 8 bits.

[Note: largest magnitudes] A tensorwise scale needs a pass over the tensor before the one that casts it, unless the
kernel that wrote the tensor has found its largest magnitude (amax) in passing. A block has a scalar for each tensor of
which that is so, zero at first, all by one fill. An operator takes the magnitude of its output into one, and the linear
that reads the output is given that scalar too. Backward it is the other way round: a linear gives a scalar beside its
output (`grad_amax`), and the operator that alone reads the output returns the largest magnitude of the output's
gradient as the gradient of that scalar. Where none comes, the linear finds it by a pass of its own: the same bits.

[Note: not finite] A factor with an infinity or a NaN has a scale that is none, and so has what it is multiplied to: the
step's loss or gradient is not finite, which the training says.

On a CPU the same numbers are computed by plain products of the quantised values. Not covered: delayed scaling.

Shapes: M rows, K features in, N features out; [R, C] any matrix, C summed over.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from collectives.sharded.float8 import HeldWeight, hold
from collectives.sharded.slot import GradientSlot, Promise, SlotSource, slot_source
from collectives.tensor.autotuned_gemm import GEMMS, can_tune
from collectives.tensor.exchange import TensorExchange
from collectives.tensor.linear import as_one
from collectives.triton_support import HAS_TRITON
from netlayer.config.parallel import FP8_BLOCK
from netlayer.errors import HardwareMissing
from trainer.ops.backend import Operators, as_rows, autotunes_gemms, uses_triton

if HAS_TRITON:
    from trainer.ops.amax_kernels import largest_magnitude
    from trainer.ops.fp8_kernels import cast, quantise_rows_and_columns, transpose

Recipe = Literal["tensorwise", "blockwise"]
Kind = Literal["input", "weight", "gradient"]
BLOCK = FP8_BLOCK
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
_TINY = 2.0**-100  # of a tensor of zeros the scale is that of its dtype's largest, and not 0 / 0


@dataclass(frozen=True)
class Scaled:
    """A matrix in 8 bits.

    Args:
        data: float8, [R, C], contiguous.
        scale: float32, by which `data` is multiplied; [] or, by blocks, [R, C / 128] or [R / 128, C / 128].
    """

    data: Tensor
    scale: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of a second factor as `multiply` of torch has it: [C, R]."""
        return self.data.shape[1], self.data.shape[0]

    def wide(self) -> Tensor:
        """The values, [R, C], float32."""
        data, scale = self.data.float(), self.scale
        if scale.ndim == 0:
            return data * scale
        rows = data.shape[0] // scale.shape[0]
        return data * scale.repeat_interleave(rows, 0).repeat_interleave(BLOCK, 1)

    def transposed(self) -> Scaled:
        """The transposed matrix, with the same scales; not of tiles of one row."""
        by_kernel = HAS_TRITON and self.data.is_cuda
        data_CR = transpose(self.data) if by_kernel else self.data.t().contiguous()
        return Scaled(data_CR, self.scale if self.scale.ndim == 0 else self.scale.t().contiguous())


def quantise(
    x_RC: Tensor, kind: Kind, recipe: Recipe, operators: Operators = "auto", amax: Tensor | None = None
) -> Scaled:
    """Return the matrix in 8 bits, each part scaled so that its largest magnitude is the dtype's.

    Args:
        kind: what of a linear it is.
        amax: its largest magnitude, float32, []; None: it is found here. Of no use to a recipe of blocks.
    """
    if recipe == "tensorwise":
        scaled, _ = _tensorwise([x_RC], kind, operators, amax)
        assert scaled is not None
        return scaled
    dtype = E4M3
    rows, columns = x_RC.shape
    height = BLOCK if kind == "weight" else 1
    tiles = x_RC.float().view(rows // height, height, columns // BLOCK, BLOCK)
    scale = scale_of(tiles.abs().amax((1, 3)), dtype, recipe)
    return Scaled(cast_plain((tiles / scale[:, None, :, None]).view(rows, columns), dtype), scale)


def quantise_both_ways(
    x_RC: Tensor, kind: Kind, recipe: Recipe, operators: Operators = "auto", amax: Tensor | None = None
) -> tuple[Scaled, Scaled]:
    """Return the matrix in 8 bits, [R, C], and for a sum over its rows, [C, R].

    By tensorwise scales the second is the first transposed, written in the same pass over the matrix; by tiles it is
    scaled along the rows.

    Args:
        kind: input or gradient.
        amax: as in `quantise`.
    """
    if recipe != "tensorwise":
        return quantise(x_RC, kind, recipe, operators), quantise(x_RC.t().contiguous(), kind, recipe, operators)
    return quantise_joined([x_RC], kind, operators, amax)


def quantise_joined(
    parts_Rc: Sequence[Tensor], kind: Kind, operators: Operators = "auto", amax: Tensor | None = None
) -> tuple[Scaled, Scaled]:
    """Return what `quantise_both_ways` does of matrices side by side, tensorwise, without a pass that joins them."""
    scaled, transposed = _tensorwise(parts_Rc, kind, operators, amax, columns=True)
    assert scaled is not None
    assert transposed is not None
    return scaled, transposed


def quantise_over_rows(
    x_RC: Tensor, kind: Kind, recipe: Recipe, operators: Operators = "auto", amax: Tensor | None = None
) -> Scaled:
    """Return the second of what `quantise_both_ways` returns, alone."""
    if recipe != "tensorwise":
        return quantise(x_RC.t().contiguous(), kind, recipe, operators)
    _, transposed = _tensorwise([x_RC], kind, operators, amax, rows=False, columns=True)
    assert transposed is not None
    return transposed


def _tensorwise(
    parts_Rc: Sequence[Tensor],
    kind: Kind,
    operators: Operators,
    amax: Tensor | None,
    *,
    rows: bool = True,
    columns: bool = False,
) -> tuple[Scaled | None, Scaled | None]:
    """Return the matrices side by side by one scale, and the transpose of that, each where it is wanted."""
    dtype = E5M2 if kind == "gradient" else E4M3
    if amax is None:
        amax = _largest(*parts_Rc, operators=operators)
    if uses_triton(operators, parts_Rc[0]):
        data_RC, data_CR, scale = quantise_rows_and_columns(parts_Rc, amax, dtype, _TINY, rows=rows, columns=columns)
    else:
        scale = scale_of(amax, dtype, "tensorwise")
        data_RC = cast_plain(torch.cat(list(parts_Rc), 1).float() / scale, dtype)
        data_CR = data_RC.t().contiguous() if columns else None
    scaled = None if data_RC is None else Scaled(data_RC, scale)
    return scaled, None if data_CR is None else Scaled(data_CR, scale)


def _largest(*parts_Rc: Tensor, operators: Operators) -> Tensor:
    """Return the largest magnitude of a matrix, or of several, float32, []."""
    if uses_triton(operators, parts_Rc[0]):
        return largest_magnitude(*parts_Rc)
    return torch.stack([part.abs().amax() for part in parts_Rc]).amax().float()


def _cast_by(x_RC: Tensor, scale: Tensor, dtype: torch.dtype, operators: Operators) -> Tensor:
    """Return x / scale, rounded to `dtype`."""
    return cast(x_RC, scale, dtype) if uses_triton(operators, x_RC) else cast_plain(x_RC.float() / scale, dtype)


def scale_of(largest: Tensor, dtype: torch.dtype, recipe: Recipe) -> Tensor:
    """Return the scales for the largest magnitudes of what they are of, float32."""
    largest, limit = largest.clamp(min=_TINY), torch.finfo(dtype).max
    if recipe == "tensorwise":
        return largest * (1.0 / limit)  # as the kernel has it, to the bit
    # Up to the next power of two: the largest magnitude may use half of the range, and never exceeds it.
    return (largest / limit).log2().ceil().exp2()


def weight_in_8_bits(
    weight_NK: Tensor | HeldWeight, recipe: Recipe, operators: Operators = "auto", amax: Tensor | None = None
) -> Scaled:
    """Return a weight, [N, K], quantised here, by its `amax` where that is known, or as it has come in 8 bits."""
    values = weight_NK.read() if isinstance(weight_NK, HeldWeight) else weight_NK
    return Scaled(*values) if isinstance(values, tuple) else quantise(values, "weight", recipe, operators, amax)


def weight_over_rows(
    weight_NK: Tensor | HeldWeight, recipe: Recipe, operators: Operators = "auto", amax: Tensor | None = None
) -> Scaled:
    """Return the same for a sum over its rows, [K, N]; `amax` as in `quantise`, of a weight that has not travelled."""
    if isinstance(weight_NK, HeldWeight) or recipe != "tensorwise":
        return weight_in_8_bits(weight_NK, recipe, operators).transposed()
    return quantise_over_rows(weight_NK, "weight", recipe, operators, amax)


def cast_plain(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to `dtype`; what rounding has put above its largest becomes that."""
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


def product(
    a: Scaled, b: Scaled, dtype: torch.dtype, *, fast: bool = False, tuned: bool = False, spared: int = 0
) -> Tensor:
    """a b^T, [rows of a, rows of b], summed in float32.

    Args:
        fast: Hopper's tensor cores may add up in fewer bits between two sums in float32: good for forward passes.
        tuned, spared: as in `collectives.tensor.gemm.multiply`; of tensorwise factors alone.
    """
    if a.data.is_cuda and a.scale.ndim == 0:
        out = torch.empty(a.data.shape[0], b.data.shape[0], dtype=dtype, device=a.data.device)
        return product_into(a, b, out, adds=False, fast=fast, tuned=tuned, spared=spared)
    if not a.data.is_cuda:
        return (a.wide() @ b.wide().t()).to(dtype)
    (scale_a, recipe_a), (scale_b, recipe_b) = _block_scales(a), _block_scales(b)
    return F.scaled_mm(a.data, b.data.t(), scale_a, recipe_a, scale_b, recipe_b, output_dtype=dtype)


def product_into(
    a: Scaled, b: Scaled, out: Tensor, *, adds: bool, fast: bool = False, tuned: bool = False, spared: int = 0
) -> Tensor:
    """Set `out` = a b^T, or add that to it; arguments as of `product`."""
    # cuBLASLt writes to addresses of 16 bytes; elsewhere a copy does.
    if a.data.is_cuda and a.scale.ndim == 0 and out.is_contiguous() and out.data_ptr() % 16 == 0:
        factors, scales = (a.data, b.data.t()), (a.scale, b.scale)
        if tuned and can_tune(*factors, spared) and GEMMS.run(*factors, out, None, adds, spared, scales, fast):
            return out
        if not adds:
            torch._scaled_mm(*factors, *scales, out_dtype=out.dtype, use_fast_accum=fast, out=out)
            return out
    y = product(a, b, out.dtype, fast=fast)
    return out.add_(y) if adds else out.copy_(y)


def _block_scales(x: Scaled) -> tuple[Tensor, F.ScalingType]:
    """Return the scales of tiles or blocks in the layout that cuBLASLt reads, and its name for them.

    The layout is that of "1D and 128x128 2D Block Scaling for FP8 Data Types" in the documentation of cuBLAS.
    """
    rows, columns = x.scale.shape
    if rows == x.data.shape[0]:
        return x.scale.t().contiguous().t(), F.ScalingType.BlockWise1x128
    # A row of blocks takes a multiple of four places; without these the next rows' scales are read wrongly.
    return F.pad(x.scale, (0, -columns % 4)).t(), F.ScalingType.BlockWise128x128


@functools.cache
def check_fp8(recipe: Recipe, device: torch.device) -> None:
    """Refuse a GPU, or a torch, that does not multiply so: a small product of each kind is compared with a plain one.

    Raises:
        HardwareMissing: it cannot, or gives something else.
    """
    if device.type != "cuda":
        return
    x_RC = torch.linspace(-1, 1, 256 * 256, device=device).view(256, 256).bfloat16()
    try:
        for first, second in (("input", "weight"), ("gradient", "weight"), ("gradient", "input")):
            a, b = (quantise(x_RC, kind, recipe) for kind in (first, second))  # type: ignore[arg-type]
            # In float64: a product in float32 may be one in TF32, by a setting of the process, and be off itself.
            right = a.wide().double() @ b.wide().double().t()
            apart = float((product(a, b, torch.float32) - right).abs().amax() / right.abs().amax())
            if not apart < 1e-2:  # 0.15% on an H100, which adds up in 14 bits; a wrong layout is off by 20% and more
                raise RuntimeError(f"products of {first} and {second} are off by {apart:.2%} of the largest")
    except (RuntimeError, ValueError) as exc:
        reason = str(exc).splitlines()[0]
        line = f"job.model.fp8 = {recipe}: this GPU with torch {torch.__version__} cannot: {reason}; set it to off"
        raise HardwareMissing(f"{line}, or take another recipe") from exc


def scaled_linear(
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    bias_N: Tensor | None,
    splits: Sequence[int] | None,
    recipe: Recipe,
    join: Callable[[Sequence[Tensor], bool], tuple[Tensor, Tensor | None]],
    operators: Operators = "auto",
    amaxes: Sequence[Tensor | None] = (),
    grad_amax: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """x_0 W_0^T + x_1 W_1^T + ... + b in 8 bits, cut by columns: as `trainer.ops.linear` has it in the inputs' dtype.

    Args:
        splits: widths of the outputs; None: one.
        join: joins their gradients, and sums them for the bias.
        amaxes: largest magnitude of each input; None: it is found here. Empty: all are.
        grad_amax: a scalar of zero, float32; given, it is the last output too, for the operator that alone reads the
            others ([Note: largest magnitudes]).
    """
    is_on = torch.is_grad_enabled()
    trains = is_on and all(weight.requires_grad for weight in weights)
    sources = [slot_source(weight) if trains else None for weight in weights]
    in_8_bits = [hold(weight) for weight in weights]
    kept = [
        # A frozen weight needs no input over rows; without gradients nothing is kept at all.
        _Keep.apply(x, weight, each is None, recipe, operators, is_on and weight.requires_grad, amax)  # type: ignore[no-untyped-call]
        for x, weight, each, amax in zip(inputs, weights, in_8_bits, amaxes or [None] * len(inputs), strict=True)
    ]
    keepers = [x.grad_fn for x, *_ in kept]
    scaled = [Scaled(data_MK, scale) for _, data_MK, scale in kept]
    y: tuple[Tensor, ...] = _ScaledLinear.apply(  # type: ignore[no-untyped-call]
        keepers,
        scaled,
        in_8_bits,
        sources,
        splits,
        recipe,
        join,
        operators,
        grad_amax,
        bias_N,
        *(x for x, *_ in kept),
        *weights,
    )
    return y


class _Keep(torch.autograd.Function):
    """Quantises an input and saves that ahead of the product: recomputation has it before the product's turn."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight_NK: Tensor,
        saves_weight: bool,
        recipe: Recipe,
        operators: Operators,
        needs_rows: bool,
        amax: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        # Also where it is not saved, the weight is an input: without one that trains there would be no node to save in.
        ctx.set_materialize_grads(False)  # else zeros are made for what is in 8 bits
        x_MK = x.reshape(-1, x.shape[-1])
        if recipe == "tensorwise" and needs_rows:
            scaled, kept = quantise_both_ways(x_MK, "input", recipe, operators, amax)
        else:
            scaled = kept = quantise(x_MK, "input", recipe, operators, amax)
        ctx.save_for_backward(kept.data, kept.scale, weight_NK if saves_weight else None)
        ctx.mark_non_differentiable(scaled.data, scaled.scale)
        return x.view_as(x), scaled.data, scaled.scale

    @staticmethod
    def backward(_ctx: Any, dx: Tensor | None, *_: Tensor) -> tuple[Tensor | None, ...]:
        return dx, *[None] * 6


class _ScaledLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        keepers: Sequence[Any],
        scaled: Sequence[Scaled],
        in_8_bits: Sequence[HeldWeight | None],
        sources: Sequence[SlotSource | None],
        splits: Sequence[int] | None,
        recipe: Recipe,
        join: Callable[[Sequence[Tensor], bool], tuple[Tensor, Tensor | None]],
        operators: Operators,
        grad_amax: Tensor | None,
        bias_N: Tensor | None,
        *tensors: Tensor,
    ) -> tuple[Tensor, ...]:
        """Return the sum of the products plus the bias, cut into `splits` by columns, and `grad_amax` if there is one.

        Args:
            keepers: nodes that keep each input, in 8 bits, and weight for the backward pass (`_Keep`).
            scaled: the inputs in 8 bits.
            in_8_bits: of each weight what gives it in 8 bits, where it travels so.
            sources: of the places for the weights' gradients; None: autograd's own.
        """
        inputs, weights = tensors[: len(scaled)], tensors[len(scaled) :]
        ctx.keepers, ctx.sources, ctx.recipe, ctx.join, ctx.operators = keepers, sources, recipe, join, operators
        ctx.in_8_bits, ctx.has_grad_amax = in_8_bits, grad_amax is not None
        ctx.set_materialize_grads(False)  # else of a scalar that nobody returns a gradient for there would be a zero
        ctx.shapes = [x.shape for x in inputs]
        # Of weights that have not travelled in 8 bits; the backward pass scales by them too. By blocks there are none.
        ctx.weight_amaxes = [
            _largest(weight_NK, operators=operators) if each is None and recipe == "tensorwise" else None
            for weight_NK, each in zip(weights, in_8_bits, strict=True)
        ]
        total: Tensor | None = None
        for x_MK, weight_NK, each, amax in zip(scaled, weights, in_8_bits, ctx.weight_amaxes, strict=True):
            factor = weight_in_8_bits(each or weight_NK, recipe, operators, amax)
            tuned = autotunes_gemms(operators)
            if total is None:
                total = product(x_MK, factor, inputs[0].dtype, fast=True, tuned=tuned)
            else:
                product_into(x_MK, factor, total, adds=True, fast=True, tuned=tuned)
        assert total is not None
        if bias_N is not None:
            total += bias_N
        y = total.view(*inputs[0].shape[:-1], -1)
        ys = (y,) if splits is None else torch.split(y, list(splits), dim=-1)
        ctx.output_shapes = [each.shape for each in ys]
        return ys if grad_amax is None else (*ys, grad_amax.detach())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return gradients of bias, inputs and weights; of a weight with a place it is written there, and None here."""
        count = len(ctx.keepers)
        needs_bias, *needs = ctx.needs_input_grad[9:]
        *output_grads, dy_amax = gradients if ctx.has_grad_amax else (*gradients, None)
        dys = _made(output_grads, ctx.output_shapes)
        recipe, operators, dtype = ctx.recipe, ctx.operators, dys[0].dtype
        tuned, trains = autotunes_gemms(operators), any(needs[count:])
        if recipe == "tensorwise" and trains and not needs_bias and uses_triton(operators, dys[0]):
            # What the outputs' gradients are joined for is the cast alone, which reads each where it lies.
            parts_Mn, dbias_N = [as_rows(dy) for dy in dys], None
            whole_MN = as_one(parts_Mn)
            dy, dy_NM = quantise_joined(parts_Mn if whole_MN is None else [whole_MN], "gradient", operators, dy_amax)
        else:
            dy_MN, dbias_N = ctx.join(dys, needs_bias)
            if trains:
                dy, dy_NM = quantise_both_ways(dy_MN, "gradient", recipe, operators, dy_amax)
            else:
                dy = dy_NM = quantise(dy_MN, "gradient", recipe, operators, dy_amax)  # over rows nobody reads it
        accumulators = [node for node, _ in ctx.next_functions[-count:]]
        dinputs: list[Tensor | None] = []
        dweights: list[Tensor | None] = []
        factors = zip(ctx.keepers, ctx.in_8_bits, ctx.weight_amaxes, ctx.sources, strict=True)
        for index, (keeper, in_8_bits, amax, source) in enumerate(factors):
            kept_data, scale, weight_NK = keeper.saved_tensors
            dx = None
            if needs[index]:
                weight_KN = weight_over_rows(in_8_bits or weight_NK, recipe, operators, amax)
                dx = product(dy, weight_KN, dtype, tuned=tuned).view(ctx.shapes[index])
            dinputs.append(dx)
            dweight = None
            if needs[count + index]:
                x_KM = functools.partial(kept_over_rows, Scaled(kept_data, scale), recipe, operators)
                # Not the gradient itself, which would stay as long as a product that is postponed.
                gradient = ScaledWeightGradient(lambda: dy_NM, x_KM, lambda: dtype, tuned)
                dweight = gradient.into(source, accumulators[index])
            dweights.append(dweight)
        return *[None] * 9, dbias_N, *dinputs, *dweights


def _made(dys: Sequence[Tensor | None], shapes: Sequence[torch.Size]) -> list[Tensor]:
    """Return gradients, with zeros for outputs that nothing depends on; one at least has a gradient."""
    known = next(dy for dy in dys if dy is not None)
    return [known.new_zeros(shape) if dy is None else dy for dy, shape in zip(dys, shapes, strict=True)]


def kept_over_rows(kept: Scaled, recipe: Recipe, operators: Operators = "auto") -> Scaled:
    """Return an input that a linear has kept, [K, M], quantised for a sum over M: by tiles it was kept as [M, K]."""
    if recipe == "tensorwise":
        return kept
    return quantise(kept.wide().t().contiguous(), "input", recipe, operators)


@dataclass(frozen=True)
class ScaledWeightGradient:
    """dy^T x of factors in 8 bits.

    Args:
        dy, x: give the output's gradient, [N, M], and the input, [K, M], quantised for a sum over M, when they are to
            be read.
        dtype: gives that of the gradient, where autograd gets it.
        tuned, spared: as in `collectives.tensor.gemm.multiply`.
    """

    dy: Callable[[], Scaled]
    x: Callable[[], Scaled]
    dtype: Callable[[], torch.dtype]
    tuned: bool = False
    spared: int = 0

    def into(self, source: SlotSource | None, accumulator: object) -> Tensor | None:
        """Compute into the slot of a linear's weight and return None; else return the gradient, for autograd."""
        if source is not None and source.write(accumulator, self._write):
            return None
        return product(*self.factors(), self.dtype(), tuned=self.tuned, spared=self.spared)

    def promised(self, source: SlotSource, accumulator: object) -> Promise | None:
        """There, later in this backward pass; None: it cannot be."""
        return source.promise(accumulator, self._write)

    def factors(self) -> tuple[Scaled, Scaled]:
        """[N, M] and [K, M]."""
        return self.dy(), self.x()

    def _write(self, slot: GradientSlot) -> None:
        if slot.view.dtype == torch.float32:
            product_into(*self.factors(), slot.view, adds=slot.adds, tuned=self.tuned, spared=self.spared)
            return
        gradient_NK = product(*self.factors(), torch.float32)
        slot.view.add_(gradient_NK) if slot.adds else slot.view.copy_(gradient_NK)


class ScaledProducts:
    """Products of tensor-parallel linears in 8 bits (`collectives.tensor.linear.Products`).

    Rows that arrive together are scaled together; a column-parallel linear's input, where it travels in 8 bits, by one
    scale for the rows of all ranks. Gradients, and sums over ranks, travel in the dtype of the computation.

    Args:
        recipe: of the scales.
        operators: for quantising.
        gathers: inputs travel in 8 bits, with tensorwise scales.
    """

    def __init__(self, recipe: Recipe, operators: Operators = "auto", gathers: bool = False) -> None:
        self.recipe, self.operators, self.gathers = recipe, operators, gathers

    def shared_scale(self, x_mK: Tensor, exchange: TensorExchange, amax: Tensor | None = None) -> Tensor | None:
        if not self.gathers:
            return None
        largest = _largest(x_mK, operators=self.operators) if amax is None else amax
        # A maximum may drop a NaN; by an infinite scale the rows are as little finite.
        largest = largest.nan_to_num(nan=math.inf, posinf=math.inf)
        exchange.comm.all_reduce(largest, dist.ReduceOp.MAX)
        return scale_of(largest, E4M3, self.recipe)

    def narrow(self, x_mK: Tensor, scale: Tensor) -> Tensor:
        """[m, K / 2]: two values of 8 bits are seen as one of a dtype that every exchange carries."""
        return _cast_by(x_mK, scale, E4M3, self.operators).contiguous().view(torch.bfloat16)

    def hold(self, weight_NK: Tensor) -> HeldWeight | None:
        return hold(weight_NK)

    def factor(self, weight_NK: Tensor | HeldWeight, *, is_transposed: bool) -> Scaled:
        """Return [N, K], which as the second factor of `product` is [K, N]; or the other way round."""
        factor = weight_in_8_bits if is_transposed else weight_over_rows
        return factor(weight_NK, self.recipe, self.operators)

    def multiply(
        self,
        a_MK: Tensor,
        factor: Scaled,
        bias_N: Tensor | None = None,
        *,
        out_MN: Tensor | None = None,
        adds: bool = False,
        tuned: bool = False,
        spared: int = 0,
        of_gradient: bool = False,
        scale: Tensor | None = None,
    ) -> Tensor:
        """Return a times the factor in 8 bits; arguments as of `collectives.tensor.linear.Products.multiply`."""
        if scale is None:
            a = quantise(a_MK, "gradient" if of_gradient else "input", self.recipe, self.operators)
        else:
            a = Scaled(a_MK.contiguous().view(E4M3), scale)
        fast = not of_gradient
        if out_MN is None:
            y_MN = product(a, factor, a_MK.dtype, fast=fast, tuned=tuned, spared=spared)
        else:
            y_MN = product_into(a, factor, out_MN, adds=adds, fast=fast, tuned=tuned, spared=spared)
        if bias_N is not None:
            y_MN += bias_N
        return y_MN

    def weight_gradient(
        self,
        dy: Callable[[], Tensor],
        x: Callable[[], Tensor],
        tuned: bool,
        spared: int,
        scale: Tensor | None = None,
        amax: Tensor | None = None,
    ) -> ScaledWeightGradient:
        """Return the gradient of factors that are quantised when they are read.

        Args:
            scale: of an `x` in 8 bits.
            amax: of one that is not; None: it is found then.
        """

        def output_gradient() -> Scaled:
            return quantise_over_rows(dy(), "gradient", self.recipe, self.operators)

        def linear_input() -> Scaled:
            if scale is None:
                return quantise_over_rows(x(), "input", self.recipe, self.operators, amax)
            arrived = Scaled(x().contiguous().view(E4M3), scale)
            return arrived.transposed()

        return ScaledWeightGradient(output_gradient, linear_input, lambda: dy().dtype, tuned, spared)
