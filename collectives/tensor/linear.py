"""Tensor / sequence parallel linears whose collectives run under their matmuls (MegaScale 3.2).

Activations outside are spread over the ranks by rows (sequence parallel); inside, the features are. A column-parallel
linear gathers the rows and multiplies them as they arrive; a row-parallel linear multiplies and sends the partial sums
away as they are computed. Their backward passes are each other's: the gradient of a gather is a reduce-scatter. The
weight's gradient is computed last, so that it hides the end of both, and straight into its slot
(`collectives.sharded.slot`).

For the parallel block (MegaScale 3.1) one column-parallel linear makes the queries, keys, values and the first half of
the MLP out of one gather, and one row-parallel linear adds the attention's and the MLP's output in one reduce-scatter.

[Note: waves] A product on the GPU is cut into tiles, one a multiprocessor: 2,048 x 2,048 in tiles of 256 x 128 is 128
tiles, one wave of an H200's 132 multiprocessors. A communication kernel that takes 5 of them makes that two waves,
twice the time. That is why the parts are carried by copy engines here, where the peers' memory can be reached, and why
products leave NCCL's kernels some multiprocessors where it cannot (`collectives.tensor.exchange`, [Note: who is
first]).

[Note: defers] Where parts take longer than the products that wait for them, a backward pass does in the meantime what
nobody waits for. A row-parallel linear gathers its output's gradient, and after it the rows that the column-parallel
linear before it has to gather again, whose backward pass comes next; weights' gradients are promised
(`collectives.sharded.slot`), and computed when the next gather or scatter is under way.

Products are `collectives.tensor.gemm`'s, or others that have its interface (`Products`), such as in 8-bit floats. What
is exchanged is in the dtype of the computation, but for a column-parallel linear's input where its products can read
that in 8 bits: with a scale that all ranks share, rows are quantised before they travel. Not covered: autocast (cast
the module).

Shapes: W ranks, m rows of a rank, M = W * m, K features in, N features out. Leading dimensions are rows: the first of
them is spread over the ranks.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from collectives.arguments import as_dtype
from collectives.sharded.slot import Promise, SlotSource, slot_source
from collectives.tensor.autotuned_gemm import is_large
from collectives.tensor.exchange import Gathering, TensorExchange
from collectives.tensor.gemm import WeightGradient, multiply

Join = Callable[[Sequence[Tensor], bool], tuple[Tensor, Tensor | None]]
"""Gradients [M, n] of several outputs side by side, [M, N], and where there is a bias its own, their sum, [N]."""


Again = Callable[[Tensor | None], Tensor]
"""Returns a linear's input again in the backward pass; the argument is that input's gradient, or None.

The linear alone reads that input, and need not keep it: whoever gave it may compute its own backward pass in that call.
"""


def join_by_torch(parts_Mn: Sequence[Tensor], has_bias: bool) -> tuple[Tensor, Tensor | None]:
    """A `Join` of any tensors."""
    dy_MN = as_one(parts_Mn)
    if dy_MN is None:
        dy_MN = torch.cat(list(parts_Mn), 1)
    return dy_MN, dy_MN.sum(0) if has_bias else None


def as_one(parts_Mn: Sequence[Tensor]) -> Tensor | None:
    """Return [M, N] without a copy, where the parts lie side by side as the columns of such a matrix; else None."""
    first, width = parts_Mn[0], sum(part.shape[1] for part in parts_Mn)
    if len(parts_Mn) == 1:
        return first
    start, storage = first.storage_offset(), first.untyped_storage().data_ptr()
    for part in parts_Mn:
        is_next = part.storage_offset() == start and part.untyped_storage().data_ptr() == storage
        if not is_next or part.stride() != (width, 1) or part.dtype != first.dtype:
            return None
        start += part.shape[1]
    return first.as_strided((len(first), width), (width, 1))


class Computes(Protocol):
    """A weight's gradient that is still to be computed, as `collectives.tensor.gemm.WeightGradient`."""

    def into(self, source: SlotSource | None, accumulator: object) -> Tensor | None:
        """Compute it into its slot and return None; else return it."""

    def promised(self, source: SlotSource, accumulator: object) -> Promise | None:
        """Have it computed later in this backward pass; None: it cannot be."""


class Products(Protocol):
    """The products of a linear, all of them without autograd."""

    def hold(self, weight_NK: Tensor) -> Any:
        """Return what `factor` takes in place of the weight, in this pass and its backward one; None: the weight."""

    def factor(self, weight_NK: Any, *, is_transposed: bool) -> Any:
        """Return the weight as `multiply` takes it, [K, N] transposed or [N, K] as it is; it has a `shape`."""

    def multiply(
        self,
        a_MK: Tensor,
        factor: Any,
        bias_N: Tensor | None = None,
        *,
        out_MN: Tensor | None = None,
        adds: bool = False,
        tuned: bool = False,
        spared: int = 0,
        of_gradient: bool = False,
        scale: Tensor | None = None,
    ) -> Tensor:
        """Return the product; arguments as of `collectives.tensor.gemm.multiply`.

        Args:
            of_gradient: `a` is one.
            scale: of `a`, which `narrow` gave; None: it is in the dtype of the computation.
        """

    def weight_gradient(
        self,
        dy: Callable[[], Tensor],
        x: Callable[[], Tensor],
        tuned: bool,
        spared: int,
        scale: Tensor | None = None,
        amax: Tensor | None = None,
    ) -> Computes:
        """Return dy^T x, still to be computed; arguments as of `collectives.tensor.gemm.WeightGradient`.

        Args:
            scale: of `x`, as in `multiply`.
            amax: largest magnitude of `x`, float32, []; None: it is not known.
        """

    def shared_scale(self, x_mK: Tensor, exchange: TensorExchange, amax: Tensor | None = None) -> Tensor | None:
        """Return the scale of all ranks' rows, by which they are to travel; None: they travel as they are.

        Args:
            amax: largest magnitude of this rank's rows, float32, []; None: it is not known.
        """

    def narrow(self, x_mK: Tensor, scale: Tensor) -> Tensor:
        """Return rows as they travel by a scale, [m, .], of a dtype that an exchange carries."""


class PlainProducts:
    """Products in the dtype of the factors."""

    def hold(self, weight_NK: Tensor) -> None:  # noqa: ARG002
        return None

    def factor(self, weight_NK: Tensor, *, is_transposed: bool) -> Tensor:
        return weight_NK.t() if is_transposed else weight_NK

    def multiply(
        self,
        a_MK: Tensor,
        factor: Tensor,
        bias_N: Tensor | None = None,
        *,
        out_MN: Tensor | None = None,
        adds: bool = False,
        tuned: bool = False,
        spared: int = 0,
        of_gradient: bool = False,  # noqa: ARG002  (all factors are alike here)
        scale: Tensor | None = None,  # noqa: ARG002  (nothing travels narrow)
    ) -> Tensor:
        return multiply(a_MK, factor, bias_N, out_MN=out_MN, adds=adds, tuned=tuned, spared=spared)

    def weight_gradient(
        self,
        dy: Callable[[], Tensor],
        x: Callable[[], Tensor],
        tuned: bool,
        spared: int,
        scale: Tensor | None = None,  # noqa: ARG002
        amax: Tensor | None = None,  # noqa: ARG002
    ) -> WeightGradient:
        return WeightGradient(dy, x, tuned, spared)

    def shared_scale(self, x_mK: Tensor, exchange: TensorExchange, amax: Tensor | None = None) -> None:  # noqa: ARG002
        return None

    def narrow(self, x_mK: Tensor, scale: Tensor) -> Tensor:  # noqa: ARG002
        return x_mK


class ColumnParallelLinear(nn.Module):
    """y = x W^T + b with W's rows (the features out) spread over the ranks; gathers the rows of x.

    Args:
        in_features: K.
        out_features: N of the whole layer, or several that share one product: `forward` then gives one tensor each.
        exchange: of the tensor-parallel group (`collectives.open_exchange`).
        bias: whether there is one.
        adds_bias: False: the bias (this rank's part) is there, and left to what reads the output.
        device, dtype: of the parameters, or their names.
        join: for the backward pass.
        tuned: products by the fastest algorithms, where there is a choice (`collectives.tensor.autotuned_gemm`).
        products: in place of those of `collectives.tensor.gemm`.

    Raises:
        ValueError: a number of features does not divide by the number of ranks.
    """

    _was_called = False

    def __init__(
        self,
        in_features: int,
        out_features: int | Sequence[int],
        *,
        exchange: TensorExchange,
        bias: bool = True,
        adds_bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        join: Join = join_by_torch,
        tuned: bool = False,
        products: Products | None = None,
    ) -> None:
        super().__init__()
        dtype = None if dtype is None else as_dtype(dtype, "dtype")
        self.products: Products = products or PlainProducts()
        self.exchange, self.adds_bias, self.join, self.tuned = exchange, adds_bias, join, tuned
        self.splits = (out_features,) if isinstance(out_features, int) else tuple(out_features)
        self.is_joined = not isinstance(out_features, int)
        for features in self.splits:
            _check_divides("out_features", features, exchange.world_size)
        drawn = [nn.Linear(in_features, features, bias, device, dtype) for features in self.splits]
        self.weight = nn.Parameter(torch.cat([_part(linear.weight, 0, exchange) for linear in drawn]))
        biases = [_part(linear.bias, 0, exchange) for linear in drawn] if bias else None
        self.bias = nn.Parameter(torch.cat(biases)) if biases else None

    def forward(self, x: Tensor, again: Again | None = None, amax: Tensor | None = None) -> Tensor | tuple[Tensor, ...]:
        """[s / W, ..., K] -> [s, ..., N / W], or one such tensor for each of several `out_features`.

        Args:
            again: gives `x` once more in the backward pass, where it is called without a gradient; None: it is kept.
            amax: largest magnitude of `x`, where it is known, for products that scale by it (`Products.shared_scale`).

        Raises:
            ValueError: another shape or dtype of the input, or ranks that give different numbers of rows, or
                have made the layer with another width: noticed on the CPU always, on CUDA in the first call
                (`TensorExchange.agree_on_shapes`).
        """
        _check_input(x, self.weight)
        exchange, rows, x_mK = self.exchange, x.shape[:-1], x.reshape(-1, x.shape[-1])
        features_out, features_in = self.weight.shape
        exchange.agree_on_shapes(rows.numel(), features_in, features_out, is_first=not self._was_called)
        self._was_called = True
        bias_N = self.bias if self.adds_bias else None
        keeps = exchange.keeps_gathered and torch.is_grad_enabled() and self.weight.requires_grad
        ys: tuple[Tensor, ...] = _Column.apply(  # type: ignore[no-untyped-call]
            self, keeps, again, amax, x_mK, self.weight, bias_N
        )
        gathers_again = exchange.defers and not keeps and self.weight.requires_grad
        context = ys[0].grad_fn if gathers_again else None
        exchange.last_column = None if context is None else weakref.ref(context)
        ys = tuple(y_Mn.view(rows[0] * exchange.world_size, *rows[1:], y_Mn.shape[-1]) for y_Mn in ys)
        return ys if self.is_joined else ys[0]

    @classmethod
    def from_linear(cls, *linears: nn.Linear, exchange: TensorExchange) -> ColumnParallelLinear:
        """Return this rank's part of whole layers that read the same input; the same layers on every rank.

        Raises:
            ValueError: the layers differ in features in, bias, dtype or device.
        """
        first = linears[0]
        _check_alike(linears, "in_features")
        features = [linear.out_features for linear in linears]
        module = cls(
            first.in_features,
            features if len(linears) > 1 else features[0],
            exchange=exchange,
            bias=first.bias is not None,
            device=first.weight.device,
            dtype=first.weight.dtype,
        )
        with torch.no_grad():
            module.weight.copy_(torch.cat([_part(linear.weight, 0, exchange) for linear in linears]))
            if module.bias is not None:
                module.bias.copy_(torch.cat([_part(linear.bias, 0, exchange) for linear in linears]))
        return module


class RowParallelLinear(nn.Module):
    """y = x W^T + b with W's columns (the features in) spread over the ranks; sums over ranks, spreads the rows of y.

    Args:
        in_features: K of the whole layer, or several: `forward` then takes one input each, and sums their products.
        out_features: N.
        exchange, bias, device, dtype, tuned, products: as for `ColumnParallelLinear`. The bias is whole on every rank.
        adds_bias: False: the bias is there, and left to what reads the output. Its gradient is then that of this
            rank's rows, to be summed over the ranks.
        sums_bias: False: it is that too of a bias that is added here; a sum less on the way of each backward pass.

    Raises:
        ValueError: a number of features does not divide by the number of ranks.
    """

    _was_called = False

    def __init__(
        self,
        in_features: int | Sequence[int],
        out_features: int,
        *,
        exchange: TensorExchange,
        bias: bool = True,
        adds_bias: bool = True,
        sums_bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | str | None = None,
        tuned: bool = False,
        products: Products | None = None,
    ) -> None:
        super().__init__()
        dtype = None if dtype is None else as_dtype(dtype, "dtype")
        self.products: Products = products or PlainProducts()
        self.exchange, self.adds_bias, self.sums_bias, self.tuned = exchange, adds_bias, sums_bias, tuned
        splits = (in_features,) if isinstance(in_features, int) else tuple(in_features)
        for features in splits:
            _check_divides("in_features", features, exchange.world_size)
        drawn = [nn.Linear(features, out_features, bias, device, dtype) for features in splits]
        self.weights = nn.ParameterList([nn.Parameter(_part(linear.weight, 1, exchange).clone()) for linear in drawn])
        self.bias = nn.Parameter(drawn[0].bias.detach().clone()) if bias else None

    def forward(
        self, *inputs: Tensor, again: Sequence[Again | None] = (), amaxes: Sequence[Tensor | None] = ()
    ) -> Tensor:
        """[s, ..., K / W] each -> [s / W, ..., N].

        Args:
            again: for each input what gives it once more in the backward pass; None: it is kept. Empty: all are.
            amaxes: for each its largest magnitude, for products that scale by it; None: not known. Empty: none is.

        Raises:
            ValueError: another number, shape or dtype of inputs, rows that do not divide by the number of ranks, or
                other rows or widths on other ranks, noticed as in `ColumnParallelLinear`.
        """
        if len(inputs) != len(self.weights):
            raise ValueError(f"the layer takes {len(self.weights)} inputs, got {len(inputs)}")
        for x, weight in zip(inputs, self.weights, strict=True):
            _check_input(x, weight)
        rows = inputs[0].shape[:-1]
        if any(x.shape[:-1] != rows for x in inputs):
            raise ValueError(f"inputs have other rows: {[tuple(x.shape[:-1]) for x in inputs]}")
        features_out, features_in = self.weights[0].shape[0], sum(weight.shape[1] for weight in self.weights)
        self.exchange.agree_on_shapes(rows.numel(), features_in, features_out, is_first=not self._was_called)
        self._was_called = True
        _check_divides("the first dimension of the input", rows[0], self.exchange.world_size)
        flat = [x.reshape(-1, x.shape[-1]) for x in inputs]
        bias_N = self.bias if self.adds_bias else None
        none = [None] * len(flat)
        y_mN = _Row.apply(  # type: ignore[no-untyped-call]
            self, list(again) or none, list(amaxes) or none, bias_N, *flat, *self.weights
        )
        return y_mN.view(rows[0] // self.exchange.world_size, *rows[1:], -1)  # type: ignore[no-any-return]

    @classmethod
    def from_linear(cls, *linears: nn.Linear, exchange: TensorExchange) -> RowParallelLinear:
        """Return this rank's part of whole layers whose outputs are added (biases too); the same ones on every rank.

        Raises:
            ValueError: the layers differ in features out, bias, dtype or device.
        """
        first = linears[0]
        _check_alike(linears, "out_features")
        module = cls(
            [linear.in_features for linear in linears],
            first.out_features,
            exchange=exchange,
            bias=first.bias is not None,
            device=first.weight.device,
            dtype=first.weight.dtype,
        )
        with torch.no_grad():
            for weight, linear in zip(module.weights, linears, strict=True):
                weight.copy_(_part(linear.weight, 1, exchange))
            if module.bias is not None:
                module.bias.copy_(torch.stack([linear.bias for linear in linears]).sum(0))
        return module


class _Column(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        linear: ColumnParallelLinear,
        keeps: bool,
        again: Again | None,
        amax: Tensor | None,
        x_mK: Tensor,
        weight_NK: Tensor,
        bias_N: Tensor | None,
    ) -> tuple[Tensor, ...]:
        exchange = linear.exchange
        ctx.linear, ctx.has_bias, ctx.keeps, ctx.again = linear, bias_N is not None, keeps, again
        ctx.early, ctx.is_done = None, False
        ctx.source, ctx.in_8_bits = _source(weight_NK), linear.products.hold(weight_NK)
        ctx.features_in = weight_NK.shape[1]
        y_MN = x_mK.new_empty(exchange.world_size * x_mK.shape[0], weight_NK.shape[0])
        # Kept for the backward pass, which quantises the same rows; it is of all ranks', so they have one order.
        ctx.scale = linear.products.shared_scale(x_mK, exchange, amax)
        gathering = exchange.gather(_as_sent(ctx, x_mK))
        factor_KN = linear.products.factor(ctx.in_8_bits or weight_NK, is_transposed=True)
        for rows, part in gathering.parts():
            _multiply(linear, part, factor_KN, _view(y_MN, exchange)[rows], bias_N, scale=ctx.scale)
        own_mK = x_mK if again is None else None
        ctx.save_for_backward(gathering.kept() if keeps else own_mK, None if ctx.in_8_bits else weight_NK)
        gathering.close()
        if len(linear.splits) == 1:  # no view of itself: the gradient of a cut into one would be a copy
            return (y_MN,)
        return torch.split(y_MN, [features // exchange.world_size for features in linear.splits], dim=-1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:
        """Return gradients of input, weight and bias; the input's is reduce-scattered under the weight's product."""
        linear: ColumnParallelLinear = ctx.linear
        exchange = linear.exchange
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad[4:]
        # Where only the rank's own rows were kept, they are gathered again, under the product for dx, or earlier.
        early, ctx.early, ctx.is_done = ctx.early, None, True
        (x, weight_NK), gathering = early or _unpacked(ctx, gathers=needs_weight and not ctx.keeps)
        num_rows = len(x) // exchange.world_size if ctx.keeps else len(x)
        scattering = exchange.scatter(num_rows, ctx.features_in, dys[0]) if needs_x else None
        dy_MN, dbias_N = linear.join(dys, needs_bias and ctx.has_bias)
        dy_MN = dy_MN.contiguous()
        if scattering is not None:
            factor_NK = linear.products.factor(ctx.in_8_bits or weight_NK, is_transposed=False)
            for rows, part in scattering.parts():
                _multiply(linear, _view(dy_MN, exchange)[rows], factor_NK, part, of_gradient=True)
        exchange.compute_deferred()
        dweight_NK = None
        if needs_weight:
            accumulator, _ = ctx.next_functions[1]  # behind the input's
            whole = functools.partial(_same, x)
            if gathering is not None:
                whole = functools.partial(_whole, gathering, [ctx.source])
            dy = functools.partial(_same, dy_MN)
            dweight_NK = _weight_gradient(linear, dy, whole, ctx.source, accumulator, ctx.scale)
        if gathering is not None and not exchange.defers:
            gathering.close()
        dx_mK = None if scattering is None else scattering.result()
        return None, None, None, None, dx_mK, dweight_NK, dbias_N


class _Row(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        linear: RowParallelLinear,
        again: Sequence[Again | None],
        amaxes: Sequence[Tensor | None],
        bias_N: Tensor | None,
        *tensors: Tensor,
    ) -> Tensor:
        """Return this rank's rows of the sum of all ranks' products, which are scattered as they are computed."""
        inputs, weights, exchange = tensors[: len(tensors) // 2], tensors[len(tensors) // 2 :], linear.exchange
        ctx.linear, ctx.has_bias, ctx.again, ctx.amaxes = linear, bias_N is not None, again, amaxes
        ctx.shapes = [x_MK.shape for x_MK in inputs]
        last_column, exchange.last_column = exchange.last_column, None
        ctx.before = None if last_column is None else last_column()
        ctx.sources = [_source(weight_NK) for weight_NK in weights]
        kept = [x_MK if each is None else None for x_MK, each in zip(inputs, again, strict=True)]
        ctx.in_8_bits = [linear.products.hold(weight_NK) for weight_NK in weights]
        saved = [None if in_8_bits else weight_NK for weight_NK, in_8_bits in zip(weights, ctx.in_8_bits, strict=True)]
        ctx.save_for_backward(*kept, *saved)
        num_rows = inputs[0].shape[0] // exchange.world_size
        scattering = exchange.scatter(num_rows, weights[0].shape[0], inputs[0])
        pairs = zip(ctx.in_8_bits, weights, strict=True)
        factors = [linear.products.factor(each or weight_NK, is_transposed=True) for each, weight_NK in pairs]
        for rows, part in scattering.parts():
            for index, (x_MK, factor_KN) in enumerate(zip(inputs, factors, strict=True)):
                _multiply(linear, _view(x_MK, exchange)[rows], factor_KN, part, adds=index > 0)
        return scattering.result(bias_N)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy_mN: Tensor) -> tuple[Tensor | None, ...]:
        """Return gradients of bias, inputs and weights; the output's is gathered under the inputs' products."""
        linear: RowParallelLinear = ctx.linear
        exchange, tensors = linear.exchange, ctx.saved_tensors
        inputs, weights = list(tensors[: len(tensors) // 2]), tensors[len(tensors) // 2 :]
        needs_bias, *needs = ctx.needs_input_grad[3:]
        dy_mN = dy_mN.contiguous()
        gathering = exchange.gather(dy_mN)
        before, ctx.before = ctx.before, None
        if before is not None and not before.is_done:  # its backward pass comes next, and would wait for that
            before.early = _unpacked(before, gathers=True)
        exchange.compute_deferred()
        dinputs = [dy_mN.new_empty(shape) if need else None for shape, need in zip(ctx.shapes, needs, strict=False)]
        pairs = zip(ctx.in_8_bits, weights, strict=True)
        factors = [linear.products.factor(each or weight_NK, is_transposed=False) for each, weight_NK in pairs]
        for rows, part in gathering.parts():
            for dx_MK, factor_NK in zip(dinputs, factors, strict=True):
                if dx_MK is not None:
                    _multiply(linear, part, factor_NK, _view(dx_MK, exchange)[rows], of_gradient=True)
        # Every rank has summed over its own rows alone. The sum over ranks runs under the weights' products: after the
        # gather, or it would delay that, and hold multiprocessors while it waits for late ranks.
        dbias_N = dy_mN.sum(0) if needs_bias and ctx.has_bias else None
        summing = exchange.start_all_reduce(dbias_N) if dbias_N is not None and linear.sums_bias else None
        for index, (again, dx_MK) in enumerate(zip(ctx.again, dinputs, strict=True)):
            if again is not None:
                inputs[index] = again(dx_MK).view(ctx.shapes[index])
        whole = functools.cache(functools.partial(_whole, gathering, ctx.sources))
        accumulators = [node for node, _ in ctx.next_functions[-len(weights) :]]
        of_weights = zip(inputs, needs[len(inputs) :], ctx.sources, accumulators, ctx.amaxes, strict=True)
        dweights = [
            _weight_gradient(linear, whole, functools.partial(_same, x_MK), source, accumulator, amax=amax)
            if need
            else None
            for x_MK, need, source, accumulator, amax in of_weights
        ]
        if not exchange.defers:
            gathering.close()
        if summing is not None:
            summing.wait()
        return None, None, None, dbias_N, *dinputs, *dweights


def _unpacked(ctx: Any, gathers: bool) -> tuple[tuple[Tensor, Tensor | None], Gathering | None]:
    """Return what a column-parallel linear saved, which may be unpacked once, and the gather of its input's rows."""
    x, weight_NK = ctx.saved_tensors
    if x is None:
        again_mK = ctx.again(None)
        x = again_mK.view(-1, again_mK.shape[-1])
    if not gathers:
        return (x, weight_NK), None
    return (x, weight_NK), ctx.linear.exchange.gather(_as_sent(ctx, x), in_parts=False)


def _as_sent(ctx: Any, x_mK: Tensor) -> Tensor:
    """Return a rank's rows as they travel."""
    products: Products = ctx.linear.products
    return x_mK if ctx.scale is None else products.narrow(x_mK, ctx.scale)


def _weight_gradient(
    linear: ColumnParallelLinear | RowParallelLinear,
    dy: Callable[[], Tensor],
    x: Callable[[], Tensor],
    source: SlotSource | None,
    accumulator: object,
    scale: Tensor | None = None,
    amax: Tensor | None = None,
) -> Tensor | None:
    """dy^T x, as `WeightGradient.into` has it: where the exchange defers, its factors are not read before they must."""
    exchange = linear.exchange
    if not exchange.defers:
        dy, x = (functools.partial(_same, give()) for give in (dy, x))
    gradient = linear.products.weight_gradient(dy, x, linear.tuned, exchange.spared, scale, amax)
    promise = gradient.promised(source, accumulator) if exchange.defers and source is not None else None
    if promise is None:
        return gradient.into(source, accumulator)
    exchange.deferred.append(weakref.ref(promise))
    return None


def _same(tensor: Tensor) -> Tensor:
    return tensor


def _multiply(
    linear: ColumnParallelLinear | RowParallelLinear,
    a: Tensor,
    b_KN: Any,
    out: Tensor,
    bias_N: Tensor | None = None,
    adds: bool = False,
    of_gradient: bool = False,
    scale: Tensor | None = None,
) -> None:
    """`out` [w, i, N] (+)= `a` [w, i, K] @ b (+ bias), in place.

    Ranks' rows that lie apart are a product each, or, where that would be small, are copied together and apart again.

    Args:
        b_KN: a factor of the linear's products.
        of_gradient: `a` is one.
        scale: of `a`, where it has travelled in 8 bits.
    """
    multiply_by = functools.partial(
        linear.products.multiply,
        adds=adds,
        tuned=linear.tuned,
        spared=linear.exchange.spared,
        of_gradient=of_gradient,
        scale=scale,
    )
    if not (_lies_together(a) and _lies_together(out)) and is_large(a[0], b_KN):
        for a_iK, out_iN in zip(a, out, strict=True):
            multiply_by(a_iK, b_KN, bias_N, out_MN=out_iN)
        return
    if _lies_together(out):
        multiply_by(a.flatten(0, 1), b_KN, bias_N, out_MN=out.flatten(0, 1))
        return
    out_MN = out.flatten(0, 1) if adds else out.new_empty(a.shape[0] * a.shape[1], out.shape[-1])  # a copy
    out.copy_(multiply_by(a.flatten(0, 1), b_KN, bias_N, out_MN=out_MN).view_as(out))


def _lies_together(matrices: Tensor) -> bool:
    """Whether [w, i, C] can be seen as [w * i, C]."""
    return matrices.shape[0] == 1 or matrices.stride(0) == matrices.shape[1] * matrices.stride(1)


def _source(weight_NK: Tensor) -> SlotSource | None:
    return slot_source(weight_NK) if weight_NK.requires_grad else None


def _whole(gathering: Gathering, sources: Sequence[SlotSource | None]) -> Tensor:
    """Return the gathered rows, which live as long as the weights' products need them."""
    defers = any(source is not None and source.defers for source in sources)
    return gathering.kept() if defers else gathering.whole()


def _view(matrix_MC: Tensor, exchange: TensorExchange) -> Tensor:
    """[W, m, C], what `Rows` index."""
    return matrix_MC.view(exchange.world_size, -1, matrix_MC.shape[-1])


def _part(tensor: Tensor, dim: int, exchange: TensorExchange) -> Tensor:
    return tensor.detach().chunk(exchange.world_size, dim)[exchange.rank]


def _check_input(x: Tensor, weight_NK: Tensor) -> None:
    """Raise for a wrong input, before anything is sent: a later error would leave the other ranks waiting."""
    if x.dim() < 2 or x.shape[-1] != weight_NK.shape[1] or 0 in x.shape:
        raise ValueError(f"the input must be [rows, ..., {weight_NK.shape[1]}] and not empty, got {tuple(x.shape)}")
    if x.dtype != weight_NK.dtype:
        raise ValueError(f"the input is {x.dtype} and the weight {weight_NK.dtype}: cast one of them")


def _check_alike(linears: Sequence[nn.Linear], features: str) -> None:
    """Raise ValueError if layers that are to share one product differ in `features`, an attribute, or in their kind."""

    def traits(linear: nn.Linear) -> tuple[object, ...]:
        return getattr(linear, features), linear.bias is not None, linear.weight.dtype, linear.weight.device

    if len({traits(linear) for linear in linears}) != 1:
        raise ValueError(f"the layers must agree in {features}, bias, dtype and device: {list(map(traits, linears))}")


def _check_divides(name: str, value: int, world_size: int) -> None:
    if value % world_size:
        below, above = math.floor(value / world_size) * world_size, math.ceil(value / world_size) * world_size
        raise ValueError(f"{name} = {value} must divide by the {world_size} ranks; take {below or above} or {above}")
