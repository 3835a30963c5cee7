"""A GPT, or a run of its half blocks: pre-norm blocks, standard or parallel (MegaScale 3.1), whole or tensor-parallel.

Activations are [T, B, D]; in a tensor-parallel group a rank holds T / W positions between the linears (sequence
parallel), all of them inside. A parallel block makes queries, keys, values and the MLP's first half in one product, and
adds both outputs in one more: one gather and one reduce-scatter. Not covered: dropout.

Shapes: B sequences, T positions, D hidden, H heads, G heads of keys and values, K values a head (D / H unless the job
says otherwise), F inside the MLP, V vocabulary, W ranks of the tensor-parallel group.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from collectives.tensor.exchange import TensorExchange
from collectives.tensor.linear import Again
from netlayer.config.tree import ModelConfig
from netlayer.workload.float8 import found_amaxes
from netlayer.workload.stages import BlockPart, half_blocks, halves_in, parts_of
from trainer.model.context import Context
from trainer.model.linears import Amaxes, Part, TokenTable, call_linear, column, parts, row
from trainer.model.packed import Packed
from trainer.ops.activation import again_of, bias_gelu, swiglu
from trainer.ops.attention import attention
from trainer.ops.backend import check_operators, sums_narrowly
from trainer.ops.context_attention import context_attention
from trainer.ops.fp8 import Recipe, check_fp8
from trainer.ops.loss import gather_rows, linear_cross_entropy, scatter_sum
from trainer.ops.norm import Norm, add_branch
from trainer.ops.rotary import rotate, rotate_in_place, scaling_of

INIT_STD = 0.02
_FEW_ROWS = 3072
"""Up to which torch's backward of a lookup on a GPU adds up in the dtype of the table; above it sorts them first."""


class GPT(nn.Module):
    """Blocks in order, with the embedding before the first and the head with the loss after the last.

    Every parameter is read inside its own module's forward, or after it has begun.

    Args:
        config: of the whole model.
        halves: half blocks that are here (`netlayer.workload.stages`); None: all.
        exchange: of the tensor-parallel group; None: this rank computes alone.
        context: of the context-parallel group; None: this rank has whole sequences.
    """

    def __init__(
        self,
        config: ModelConfig,
        halves: range | None = None,
        exchange: TensorExchange | None = None,
        context: Context | None = None,
    ) -> None:
        super().__init__()
        everything = half_blocks(range(config.layers))
        halves = everything if halves is None else halves
        self.config, self.exchange = config, exchange
        self.embedding = Embedding(config, exchange, context) if halves.start == 0 else None
        here = parts_of(halves).items()
        self.adds_in_blocks = False
        """Whether each block adds its branch itself, so that nobody reads its bias past it."""
        self.blocks = nn.ModuleDict({str(layer): Block(config, layer, exchange, part, context) for layer, part in here})
        self.head = Head(config, exchange) if halves.stop == everything.stop else None
        if config.tied_embeddings and self.embedding is not None and self.head is not None:
            self.head.tokens = self.embedding.tokens

    def forward(self, x: Tensor, targets_BT: Tensor | None = None, packed: Packed | None = None) -> Tensor:
        """Token ids [B, T] where the embedding is here, else activations [T / W, B, D]; the loss where the head is.

        Args:
            x: T at most `seq_len`, and a multiple of W; of a context-parallel rank its own positions.
            targets_BT: the token that follows each of them; needed where the head is.
            packed: documents of the sequences, and whether some targets do not count; None: one document each, and all.

        Returns:
            Mean loss, nats a token, a scalar in float32 (or wider, where the model is); else activations. With
            `packed`, the sum over targets that count, divided by all positions.
        """
        if self.embedding is not None:
            x = self.embedding(x, packed)
        branch: Tensor | None = None
        bias_D: Tensor | None = None
        grad_amax: Tensor | None = None  # of the branch, which the next norm alone reads
        for block in self.blocks.values():
            assert isinstance(block, Block)
            if not block.leaves_branch:  # and keeps its input alone
                x = self._again(block, x, packed)
            elif self.adds_in_blocks:
                x = block(x, packed=packed)
            else:
                x, branch, grad_amax = block(x, branch, bias_D, packed, grad_amax, adds=False)
                bias_D = block.branch_bias
        if self.head is None:
            return add_branch(x, branch, bias_D)
        return self.head(  # type: ignore[no-any-return]
            x, targets_BT, branch, bias_D, grad_amax, counts_all=packed is None
        )

    def _again(self, block: nn.Module, x: Tensor, packed: Packed | None) -> Tensor:
        """A block of full recomputation."""
        if not torch.is_grad_enabled():
            return block(x, packed=packed)  # type: ignore[no-any-return]
        return checkpoint(  # type: ignore[no-any-return]
            block, x, packed=packed, use_reentrant=False, preserve_rng_state=False
        )

    @property
    def units(self) -> list[nn.Module]:
        """The parts that are gathered and reduced as one each, in order of their use; norms and positions go alone.

        A token table is one by itself, so that a tied one is cut alike on the first and the last pipeline stage.
        """
        tables = [end.tokens if end is not None else None for end in (self.embedding, self.head)]
        ordered = [tables[0], *self.blocks.values(), tables[1]]
        return list(dict.fromkeys(unit for unit in ordered if unit is not None))


class Embedding(nn.Module):
    """Token embedding, and learned positions unless they are rotary."""

    def __init__(self, config: ModelConfig, exchange: TensorExchange | None, context: Context | None = None) -> None:
        super().__init__()
        self.exchange, self.context = exchange, context
        self.tokens = TokenTable(config.vocab_size, config.hidden, exchange)
        learned = config.positions == "learned"
        self.position = nn.Parameter(torch.empty(config.seq_len, config.hidden)) if learned else None

    def forward(self, tokens_BT: Tensor, packed: Packed | None = None) -> Tensor:
        tokens_TB = tokens_BT.t()
        weight_vD = self.tokens()
        if self.exchange is None:
            x_TBD = _look_up(weight_vD, tokens_TB)
        else:
            x_TBD = _SpreadLookup.apply(weight_vD, tokens_TB, self.exchange)  # type: ignore[no-untyped-call]
        if self.position is None:
            return x_TBD
        rank = 0 if self.exchange is None else self.exchange.rank
        first = rank * len(x_TBD)
        if packed is not None and packed.positions is not None:
            # Those of each document begin with the first, as where it stands alone.
            positions_TB = packed.positions.t()[first : first + len(x_TBD)]
            return x_TBD + _look_up(self.position, positions_TB)
        if self.context is not None:
            positions_T = self.context.positions(tokens_TB.shape[0], x_TBD.device)[first : first + len(x_TBD)]
            return x_TBD + _look_up(self.position, positions_T[:, None])
        return x_TBD + self.position[first : first + len(x_TBD), None]


class Block(nn.Module):
    """x + Attention(LN(x)), then + MLP(LN(.)); as a parallel block x + Attention(y) + MLP(y) with one y = LN(x).

    What is added to the stream last may be left to the next norm, which does it in the pass that it makes anyway, and
    sums the gradient of the bias in that of its backward.

    A pipeline stage may hold a part of it: its attention or its MLP, each with its norm, of a standard block.
    """

    def __init__(
        self,
        config: ModelConfig,
        layer: int,
        exchange: TensorExchange | None,
        part: BlockPart = "whole",
        context: Context | None = None,
    ) -> None:
        super().__init__()
        if config.parallel_block and part != "whole":
            raise ValueError(f"layer {layer}: of a parallel block there is no {part} alone; cut between blocks")
        self.part, self.context = part, context
        width, bias = config.hidden, config.bias
        self.head_width, self.window = config.head_width, config.window(layer)
        self.rotary_base = config.rotary_base if config.positions == "rotary" else None
        self.rope_scaling = scaling_of(config.rope_scaling)
        qkv = config.attention_width, config.kv_width, config.kv_width
        up = (config.ffn_hidden,) * (2 if config.activation == "swiglu" else 1)
        self.is_parallel, self.operators = config.parallel_block, config.operators
        fp8 = fp8_recipe(config, layer)
        # A linear that is not tensor-parallel keeps its input in 8 bits where it multiplies so: half of what it would
        # be computed from, and computing it again would quantise it again.
        keeps_rows = fp8 is not None and exchange is None
        self.recomputes_norms = config.recomputes("layernorm") and not keeps_rows
        self.recomputes_activation = config.recomputes("mlp_act") and not keeps_rows
        self.recomputes_attention = config.recomputes("core_attn")
        # Inside attention's own recomputation an activation costs nothing to make again, however linears multiply.
        self.recomputes_both = self.recomputes_attention and config.recomputes("mlp_act")
        tp = 1 if exchange is None else exchange.world_size
        self.amaxes = () if fp8 is None else found_amaxes(config, tp)
        linear: Any = {"operators": self.operators, "fp8": fp8}
        of_stream = {**linear, "gathers_fp8": config.fp8_tp_gather}
        # GeLU adds the bias of the product before it, and sums its gradient in the same pass; so do norms. With full
        # recomputation no branch is left to the next block's.
        self.leaves_branch = config.recompute != "full"
        self.adds_bias = bias and not self.is_parallel and config.activation == "gelu"
        if self.is_parallel:
            self.norm = build_norm(config)
            self.inner = column(width, (*qkv, *up), bias, exchange, **of_stream)
            self._build_qk_norms(config)
            inputs: tuple[int, ...] = config.attention_width, config.ffn_hidden
            self.outer = row(inputs, width, bias, exchange, not self.leaves_branch, **linear)
            return
        has_attention, has_mlp = halves_in(part)
        if has_attention:
            self.norm = build_norm(config)
            self.qkv = column(width, qkv, bias, exchange, **of_stream)
            self._build_qk_norms(config)
            inputs = (config.attention_width,)
            self.out = row(inputs, width, bias, exchange, adds_bias=False, **linear)
        if has_mlp:
            self.mlp_norm = build_norm(config)
            self.up = column(width, up, bias, exchange, adds_bias=not self.adds_bias, **of_stream)
            inputs = (config.ffn_hidden,)
            self.down = row(inputs, width, bias, exchange, not self.leaves_branch, **linear)

    def _build_qk_norms(self, config: ModelConfig) -> None:
        """One weight a value of a head, for all heads: a tensor-parallel rank's gradient is that of its own heads."""
        self.q_norm: Norm | None = None
        self.k_norm: Norm | None = None
        if config.qk_norm:
            self.q_norm, self.k_norm = (
                Norm(config.head_width, bias=False, operators=config.operators, eps=config.norm_eps) for _ in "qk"
            )

    @property
    def branch_bias(self) -> Tensor | None:
        """Return the bias that is still to be added to every row of `forward`'s branch; None: it is in there."""
        last = self.outer if self.is_parallel else self.out if self.part == "attention" else self.down
        return None if last.adds_bias else last.bias

    def forward(
        self,
        x: Tensor,
        branch: Tensor | None = None,
        bias_D: Tensor | None = None,
        packed: Packed | None = None,
        grad_amax: Tensor | None = None,
        *,
        adds: bool = True,
    ) -> Tensor | tuple[Tensor, Tensor, Tensor | None]:
        """[T / W, B, D] -> the same.

        Args:
            x: the stream.
            branch, bias_D: still to be added to it.
            packed: documents of the sequences.
            grad_amax: came with the branch (`trainer.ops.fp8`, [Note: largest magnitudes]).
            adds: False: gives the stream and the branch that is still to be added to it, with `branch_bias`, and what
                its linear gave beside it, or None.
        """
        amax = self._new_amaxes(x)
        if self.is_parallel:
            y, again, x = self._normalise(self.norm, x, branch, bias_D, amax.norm, grad_amax)
            branch, grad_amax = self._outer_of(packed, amax, *self.inner(y, again, amax.norm))
        if not self.is_parallel and self.part != "mlp":
            y, again, x = self._normalise(self.norm, x, branch, bias_D, amax.norm, grad_amax)
            out = functools.partial(call_linear, self.out, grad_amax=amax.out_grad)
            branch, grad_amax = self._with_attention(out, packed, *self.qkv(y, again, amax.norm))
            bias_D = self.out.bias
        if not self.is_parallel and self.part != "attention":
            y, again, x = self._normalise(self.mlp_norm, x, branch, bias_D, amax.mlp_norm, grad_amax)
            *up, up_grad_amax = call_linear(self.up, y, again, amax.mlp_norm, grad_amax=amax.up_grad)
            bias_F = self.up.bias if self.adds_bias else None
            activated, again = self._activate(bias_F, *up, amax=amax.activation, grad_amax=up_grad_amax)
            branch, grad_amax = call_linear(
                self.down, activated, again=[again], amaxes=[amax.activation], grad_amax=amax.branch_grad
            )
        assert branch is not None
        return add_branch(x, branch, self.branch_bias) if adds else (x, branch, grad_amax)

    def _new_amaxes(self, x: Tensor) -> Amaxes:
        """Return zeros for the largest magnitudes that operators find for this pass, by one fill."""
        zeros = x.new_zeros(len(self.amaxes), dtype=torch.float32).unbind() if self.amaxes else ()
        return Amaxes(**dict(zip(self.amaxes, zeros, strict=True)))

    def _normalise(
        self,
        norm: nn.Module,
        x: Tensor,
        branch: Tensor | None,
        bias_D: Tensor | None,
        amax: Tensor | None,
        grad_amax: Tensor | None,
    ) -> tuple[Tensor, Again | None, Tensor]:
        """Return what the linears read, what gives it once more in the backward pass (or None), and the stream."""
        recomputes = self.recomputes_norms and _may_recompute()
        y, x = norm(x, branch, bias_D, recomputes=recomputes, amax=amax, grad_amax=grad_amax)
        return y, again_of(y) if recomputes else None, x

    def _activate(
        self,
        bias_F: Tensor | None,
        up: Tensor,
        value: Tensor | None = None,
        *,
        amax: Tensor | None = None,
        grad_amax: Tensor | None = None,
    ) -> tuple[Tensor, Again | None]:
        """GeLU (its tanh form) of one tensor and its bias, of two SwiGLU; and what gives it once more, or None."""
        recomputes = self.recomputes_activation and _may_recompute()
        if value is None:
            activated = bias_gelu(up, bias_F, self.operators, recomputes=recomputes)
        else:
            activated = swiglu(up, value, self.operators, recomputes=recomputes, amax=amax, grad_amax=grad_amax)
        return activated, again_of(activated) if recomputes else None

    def _outer_of(
        self, packed: Packed | None, amax: Amaxes, q: Tensor, k: Tensor, v: Tensor, *up: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Attention, activation, and the linear that sums their products, of a parallel block."""

        def outer(attended: Tensor, activated: Tensor, again: Again | None) -> tuple[Tensor, Tensor | None]:
            inputs, amaxes = (attended, activated), [None, amax.activation]
            return call_linear(self.outer, *inputs, again=[None, again], amaxes=amaxes, grad_amax=amax.branch_grad)

        if self.recomputes_both and _may_recompute():
            # Attention's inputs and the activation's are all that is kept; an activation given in would be too.
            def both(attended: Tensor, *up: Tensor) -> tuple[Tensor, Tensor | None]:
                return outer(attended, self._activate(None, *up, amax=amax.activation)[0], None)

            return self._with_attention(both, packed, q, k, v, *up)
        activated, again = self._activate(None, *up, amax=amax.activation)
        return self._with_attention(functools.partial(outer, again=again), packed, q, k, v, activated)

    def _with_attention(
        self, linear: Callable[..., Any], packed: Packed | None, q: Tensor, k: Tensor, v: Tensor, *more: Tensor
    ) -> tuple[Tensor, Tensor | None]:
        """Call `linear` with what attention gives, and `more`; where that is recomputed keep their inputs alone.

        Backward computes it again, and stops before the linear's own product, which nobody needs. In a
        tensor-parallel group the linear is one operation with its reduce-scatter: it runs again there.
        """
        if not self.recomputes_attention or not torch.is_grad_enabled():
            return linear(self.attend(q, k, v, packed, in_place=True), *more)  # type: ignore[no-any-return]

        def again(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Any:
            return linear(self.attend(q, k, v, packed), *more)

        return checkpoint(again, q, k, v, *more, use_reentrant=False, preserve_rng_state=False)  # type: ignore[no-any-return]

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, packed: Packed | None = None, *, in_place: bool = False
    ) -> Tensor:
        """Return the attention of this rank's heads, in the shape of `q`, with queries and keys normalised and rotated.

        Args:
            in_place: nothing else reads `q` and `k`, which may be overwritten.
        """
        q, k, v = (each.view(*each.shape[:-1], -1, self.head_width) for each in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q)[0], self.k_norm(k)[0]
        if self.rotary_base is not None:
            part = (0, 1) if self.context is None else self.context.part
            turn = rotate_in_place if in_place and not torch.compiler.is_compiling() else rotate
            q, k = (turn(each, self.rotary_base, self.rope_scaling, part, self.operators) for each in (q, k))
        mask = None if packed is None else packed.attention_mask(self.window)
        if self.context is not None:
            exchange, overlap = self.context.exchange, self.context.overlap
            y = context_attention(q, k, v, exchange, mask, window=self.window, overlap=overlap)
            return y.flatten(2)  # type: ignore[no-any-return]
        y_BHTK = attention(q.permute(1, 2, 0, 3), k.permute(1, 2, 0, 3), v.permute(1, 2, 0, 3), self.window, mask)
        return y_BHTK.permute(2, 0, 1, 3).flatten(2)


class Head(nn.Module):
    """The last norm, the projection to the vocabulary, and the loss."""

    def __init__(self, config: ModelConfig, exchange: TensorExchange | None) -> None:
        super().__init__()
        self.exchange, self.operators = exchange, config.operators
        self.norm = build_norm(config)
        self.tokens = TokenTable(config.vocab_size, config.hidden, exchange)

    def forward(
        self,
        x: Tensor,
        targets_BT: Tensor,
        branch: Tensor | None = None,
        bias_D: Tensor | None = None,
        grad_amax: Tensor | None = None,
        *,
        counts_all: bool = True,
    ) -> Tensor:
        """Mean loss, nats a token: a scalar. The branch and its bias are still to be added to x.

        Args:
            counts_all: False: a target may be `NO_TARGET`, and adds nothing to the sum that is divided.
        """
        return linear_cross_entropy(
            self.norm(x, branch, bias_D, grad_amax=grad_amax)[0].flatten(0, 1),
            self.tokens(),
            targets_BT.t().flatten(),
            vocab_size=self.tokens.vocab_size,
            exchange=self.exchange,
            operators=self.operators,
            counts_all=counts_all,
        )

    def logits(self, x: Tensor) -> Tensor:
        """[T, B, D] -> [T, B, V]; not of a spread model."""
        if self.exchange is not None:
            raise ValueError("logits of a tensor-parallel model: load it whole")
        return F.linear(self.norm(x)[0], self.tokens()[: self.tokens.vocab_size])


def _may_recompute() -> bool:
    """Whether there is a backward pass, and no compiler, which chooses itself what it computes again."""
    return torch.is_grad_enabled() and not torch.compiler.is_compiling()


def fp8_recipe(config: ModelConfig, layer: int) -> Recipe | None:
    """Return how the linears of a layer are scaled to 8 bits; None: they stay as they are."""
    return config.fp8 if config.fp8 != "off" and config.is_float8(layer) else None


def build_norm(config: ModelConfig) -> Norm:
    return Norm(config.hidden, config.norm == "layernorm", config.operators, config.norm_eps)


def _look_up(weight_VD: Tensor, tokens_TB: Tensor) -> Tensor:
    is_narrow = sums_narrowly(weight_VD) or (weight_VD.dtype.itemsize < 4 and tokens_TB.numel() <= _FEW_ROWS)
    if not is_narrow:
        return F.embedding(tokens_TB, weight_VD)
    return _Lookup.apply(weight_VD, tokens_TB)  # type: ignore[no-untyped-call, no-any-return]


class _Lookup(torch.autograd.Function):
    """Rows of a whole table, whose gradient is added up in float32."""

    @staticmethod
    def forward(ctx: Any, weight_VD: Tensor, tokens_TB: Tensor) -> Tensor:
        ctx.num_rows = len(weight_VD)
        ctx.save_for_backward(tokens_TB)
        return F.embedding(tokens_TB, weight_VD)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        return _sum_of_rows(dx.flatten(0, 1), ctx.saved_tensors[0].flatten(), ctx.num_rows), None


class _SpreadLookup(torch.autograd.Function):
    """Rows of a table that is cut by tokens: each rank looks up what it has; the sum is spread over positions."""

    @staticmethod
    def forward(ctx: Any, weight_vD: Tensor, tokens_TB: Tensor, exchange: TensorExchange) -> Tensor:
        local_M = tokens_TB.flatten() - exchange.rank * len(weight_vD)
        is_own_M = (local_M >= 0) & (local_M < len(weight_vD))
        row_M = local_M.remainder(len(weight_vD))  # of others' tokens any, times zero: one for all would be a long sum
        ctx.exchange, ctx.num_rows = exchange, len(weight_vD)
        ctx.save_for_backward(row_M, is_own_M)
        partial_MD = weight_vD[row_M] * is_own_M[:, None]
        x_mD = scatter_sum(partial_MD, exchange)
        return x_mD.view(-1, tokens_TB.shape[1], weight_vD.shape[1])

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        row_M, is_own_M = ctx.saved_tensors
        dx_MD = gather_rows(dx.flatten(0, 1), ctx.exchange)
        return _sum_of_rows(dx_MD * is_own_M[:, None], row_M, ctx.num_rows), None, None


def _sum_of_rows(dx_MD: Tensor, row_M: Tensor, num_rows: int) -> Tensor:
    """Gradient of a table from those of the rows that were read, added up in float32 or wider, always in one order."""
    wide_MD = dx_MD.to(torch.promote_types(dx_MD.dtype, torch.float32))
    dweight_vD: Tensor = torch.ops.aten.embedding_dense_backward(wide_MD, row_M, num_rows, -1, False)
    return dweight_vD.to(dx_MD.dtype)


def build_model(
    config: ModelConfig,
    seed: int,
    device: torch.device,
    halves: range | None = None,
    exchange: TensorExchange | None = None,
    context: Context | None = None,
) -> GPT:
    """The model, or these half blocks of it, on `device`, initialised by `seed`: the same values however it is spread.

    Matrices are normal with std 0.02; those that end a residual branch are divided by sqrt(2 x layers), so that the
    stream's variance does not grow with depth (GPT-2's rule; the first loss is close to ln V). Values differ between
    kinds of device, whose generators differ.

    Raises:
        ConfigError: the model wants kernels, and there is no Triton or no GPU.
    """
    check_operators(config.operators, device)
    if config.fp8 != "off":
        check_fp8(config.fp8, device)
    with torch.device(device):
        model = GPT(config, halves, exchange, context)
    if device.type == "meta":
        return model
    fill = initialiser(model, seed)
    for name, parameter in model.named_parameters():
        fill(name, parameter)
    return model


def initialiser(model: GPT, seed: int) -> Callable[[str, Tensor], None]:
    """Return what fills a parameter of `model`, by its name, with the values that `build_model` gives it."""
    cuts = parts(model)
    branch_std = INIT_STD / math.sqrt(2 * model.config.layers)

    def fill(name: str, parameter: Tensor) -> None:
        ends_branch = ".out." in name or ".down." in name or ".outer." in name
        _initialise(name, parameter, branch_std if ends_branch else INIT_STD, seed, cuts.get(name), model)

    return fill


@torch.no_grad()
def _initialise(name: str, parameter: Tensor, std: float, seed: int, part: Part | None, model: GPT) -> None:
    """Each parameter has a generator of its own name: its values do not depend on which others are built."""
    if parameter.ndim == 1:
        parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
        return
    table = name.endswith("tokens.weight")
    if table and model.config.tied_embeddings:
        name = "embedding.tokens.weight"
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator(parameter.device).manual_seed(int.from_bytes(digest) >> 1)
    exchange = model.exchange
    shape = list(parameter.shape)
    if part is not None:
        shape[part.dim] = model.config.vocab_size if table else sum(part.sizes)
    # Drawn in one dtype, and rounded to the parameter's: a tensor of float64 gets the values that one of float32 has.
    whole = torch.empty(shape, dtype=torch.float32, device=parameter.device).normal_(std=std, generator=generator)
    if table and part is not None:
        whole = F.pad(whole, (0, 0, 0, part.sizes[0] - len(whole)))
    if part is not None and exchange is not None:
        whole = part.local(whole, exchange.rank, exchange.world_size)
    parameter.copy_(whole)
