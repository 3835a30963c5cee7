"""Linears of a block, whole or spread over a tensor-parallel group, and which part of a parameter a rank has.

`column` makes several outputs out of one product, `row` sums the products of several inputs: with an exchange they are
`collectives.tensor.linear`'s, without one plain products, under the same names. Not covered: the collectives.

Shapes: K features in, N features out; activations [T, B, .], of which a rank of W has T / W positions outside.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from collectives.tensor.exchange import TensorExchange
from collectives.tensor.linear import Again, ColumnParallelLinear, RowParallelLinear
from netlayer.workload.model_size import padded_vocabulary
from trainer.ops.backend import Operators, autotunes_gemms
from trainer.ops.fp8 import Recipe, ScaledProducts
from trainer.ops.linear import join_gradients, joined_linear, summed_linear


@dataclass(frozen=True)
class Part:
    """Sharding of a parameter over a tensor-parallel group.

    Args:
        dim: that is cut.
        sizes: lengths along it of the pieces that are cut, each by itself: rank r has the r-th part of every piece.
    """

    dim: int
    sizes: tuple[int, ...]

    def local(self, whole: Tensor, rank: int, world_size: int) -> Tensor:
        """Return this rank's part of a whole parameter."""
        pieces = torch.split(whole, list(self.sizes), self.dim)
        return torch.cat([piece.chunk(world_size, self.dim)[rank] for piece in pieces], self.dim)

    def spans(self, rank: int, world_size: int) -> list[tuple[int, int, int]]:
        """Return (start in the whole, start in the rank's part, length) along `dim` of each run that a rank has."""
        spans, whole, own = [], 0, 0
        for size in self.sizes:
            length = size // world_size
            spans.append((whole + rank * length, own, length))
            whole, own = whole + size, own + length
        return spans

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The whole parameter from the parts of all ranks, in order."""
        sizes = [size // len(parts) for size in self.sizes]
        by_rank = [torch.split(part, sizes, self.dim) for part in parts]
        return torch.cat([pieces[index] for index in range(len(sizes)) for pieces in by_rank], self.dim)


class JoinedLinear(nn.Module):
    """y = x W^T + b, cut into one tensor for each of `splits`.

    Args:
        adds_bias: False: what reads the output adds the bias, which is here.
        operators: for the products, and for the joined gradient of the outputs; torch: its own.
        fp8: how the factors of the products are scaled to 8 bits; None: they stay as they are.
    """

    def __init__(
        self,
        in_features: int,
        splits: Sequence[int],
        bias: bool,
        adds_bias: bool = True,
        operators: Operators = "auto",
        fp8: Recipe | None = None,
    ) -> None:
        super().__init__()
        self.adds_bias, self.operators, self.fp8 = adds_bias, operators, fp8
        self.splits = tuple(splits)
        self.weight = nn.Parameter(torch.empty(sum(splits), in_features))
        self.bias = nn.Parameter(torch.empty(sum(splits))) if bias else None

    def forward(
        self, x: Tensor, again: Again | None = None, amax: Tensor | None = None, grad_amax: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """[..., K] -> [..., N] for each N.

        Args:
            again: as in `ColumnParallelLinear`.
            amax: largest magnitude of `x`, where it is known, for a product in 8 bits.
            grad_amax: a scalar of zero; given, it is the last output (`trainer.ops.fp8`, [Note: largest magnitudes]).
        """
        bias = self.bias if self.adds_bias else None
        return joined_linear(x, self.weight, bias, self.splits, self.operators, self.fp8, again, amax, grad_amax)


class SummedLinear(nn.Module):
    """y = x_0 W_0^T + x_1 W_1^T + ... + b.

    Args:
        adds_bias, operators, fp8: as in `JoinedLinear`.
    """

    def __init__(
        self,
        in_features: Sequence[int],
        out_features: int,
        bias: bool,
        adds_bias: bool = True,
        operators: Operators = "auto",
        fp8: Recipe | None = None,
    ) -> None:
        super().__init__()
        self.adds_bias, self.operators, self.fp8 = adds_bias, operators, fp8
        self.splits = tuple(in_features)
        self.weights = nn.ParameterList([nn.Parameter(torch.empty(out_features, size)) for size in in_features])
        self.bias = nn.Parameter(torch.empty(out_features)) if bias else None

    def forward(
        self,
        *inputs: Tensor,
        again: Sequence[Again | None] = (),
        amaxes: Sequence[Tensor | None] = (),
        grad_amax: Tensor | None = None,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """[..., K] for each K -> [..., N].

        Args:
            again: as in `RowParallelLinear`.
            amaxes, grad_amax: as in `JoinedLinear`.
        """
        bias = self.bias if self.adds_bias else None
        y, *rest = summed_linear(inputs, tuple(self.weights), bias, self.operators, self.fp8, again, amaxes, grad_amax)
        return (y, *rest) if rest else y  # type: ignore[return-value]


def column(
    in_features: int,
    splits: Sequence[int],
    bias: bool,
    exchange: TensorExchange | None,
    adds_bias: bool = True,
    operators: Operators = "auto",
    fp8: Recipe | None = None,
    gathers_fp8: bool = False,
) -> JoinedLinear | ColumnParallelLinear:
    """A linear with one output for each of `splits`; its parameters are still to be initialised.

    Args:
        adds_bias: False: the bias is there, and left to what reads the output.
        operators, fp8: as in `JoinedLinear`.
        gathers_fp8: the exchange carries the input in 8 bits.
    """
    if exchange is None:
        return JoinedLinear(in_features, splits, bias, adds_bias, operators, fp8)
    return ColumnParallelLinear(
        in_features,
        tuple(splits),
        exchange=exchange,
        bias=bias,
        adds_bias=adds_bias,
        join=functools.partial(join_gradients, operators=operators),
        tuned=autotunes_gemms(operators),
        products=None if fp8 is None else ScaledProducts(fp8, operators, gathers_fp8),
    )


def row(
    splits: Sequence[int],
    out_features: int,
    bias: bool,
    exchange: TensorExchange | None,
    adds_bias: bool = True,
    operators: Operators = "auto",
    fp8: Recipe | None = None,
) -> SummedLinear | RowParallelLinear:
    """A linear that sums the products of one input for each of `splits`.

    With an exchange, the gradient of its bias is that of this rank's rows.

    Args:
        adds_bias: False: the bias is there, and left to what reads the output.
        operators, fp8: as in `JoinedLinear`.
    """
    if exchange is None:
        return SummedLinear(splits, out_features, bias, adds_bias, operators, fp8)
    return RowParallelLinear(
        tuple(splits),
        out_features,
        exchange=exchange,
        bias=bias,
        adds_bias=adds_bias,
        sums_bias=False,
        tuned=autotunes_gemms(operators),
        products=None if fp8 is None else ScaledProducts(fp8, operators),
    )


class Amaxes(NamedTuple):
    """Scalars of a block for the largest magnitudes that operators find in passing, float32; None: not found so.

    They are zero at first, and set once (`trainer.ops.fp8`, [Note: largest magnitudes]). Which there are, and of what,
    says `netlayer.workload.float8.found_amaxes`.
    """

    norm: Tensor | None = None
    mlp_norm: Tensor | None = None
    activation: Tensor | None = None
    up_grad: Tensor | None = None
    out_grad: Tensor | None = None
    branch_grad: Tensor | None = None


def call_linear(linear: nn.Module, *inputs: Any, grad_amax: Tensor | None, **more: Any) -> tuple[Any, ...]:
    """Call a linear of a block; return its outputs, and beside them `grad_amax` as it gives that, or None."""
    if grad_amax is not None:
        return linear(*inputs, grad_amax=grad_amax, **more)  # type: ignore[no-any-return]
    outputs = linear(*inputs, **more)
    return (*outputs, None) if isinstance(outputs, tuple) else (outputs, None)


def parts(module: nn.Module) -> dict[str, Part]:
    """Return the sharding of each parameter of a model, by name; parameters that every rank holds whole have none."""
    shardings: dict[str, Part] = {}
    for prefix, child in module.named_modules(remove_duplicate=False):  # a tied table has two names
        if isinstance(child, JoinedLinear | ColumnParallelLinear):
            names = ("weight", "bias") if child.bias is not None else ("weight",)
            shardings |= {f"{prefix}.{name}": Part(0, child.splits) for name in names}
        elif isinstance(child, SummedLinear | RowParallelLinear):
            widths = child.splits if isinstance(child, SummedLinear) else _in_features(child)
            shardings |= {f"{prefix}.weights.{index}": Part(1, (width,)) for index, width in enumerate(widths)}
        elif isinstance(child, TokenTable):
            shardings[f"{prefix}.weight" if prefix else "weight"] = Part(0, (child.num_rows,))
    return shardings


def float8_weights(module: nn.Module) -> frozenset[str]:
    """Return the names of the weights that products read in 8 bits."""
    names: set[str] = set()
    for prefix, child in module.named_modules():
        is_scaled = isinstance(child, JoinedLinear | SummedLinear) and child.fp8 is not None
        if is_scaled or isinstance(getattr(child, "products", None), ScaledProducts):
            names |= {f"{prefix}.{name}" for name, _ in child.named_parameters() if not name.endswith("bias")}
    return frozenset(names)


class TokenTable(nn.Module):
    """One row of the hidden width for each token, cut by tokens over the ranks; a call gives this rank's rows.

    Args:
        vocab_size: tokens; rows up to a multiple of the number of ranks pad it, and stay zero.
    """

    def __init__(self, vocab_size: int, hidden: int, exchange: TensorExchange | None) -> None:
        super().__init__()
        self.vocab_size, world_size = vocab_size, 1 if exchange is None else exchange.world_size
        self.num_rows = padded_vocabulary(vocab_size, world_size)
        self.weight = nn.Parameter(torch.empty(self.num_rows // world_size, hidden))

    def forward(self) -> Tensor:
        """[v, D]. Called where it is used, so that what waits for parameters before a forward waits for it."""
        return self.weight


def _in_features(linear: RowParallelLinear) -> tuple[int, ...]:
    return tuple(weight.shape[1] * linear.exchange.world_size for weight in linear.weights)
