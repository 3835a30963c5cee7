"""A GPT of torch's own modules, whole or a run of its layers, with the initial values of `trainer.model.gpt`.

It is written for `parallelize_module`: every matrix is an `nn.Linear` or `nn.Embedding` of its own, and what is between
them works on this rank's part of the positions or of the heads. A bias is a module after its matrix: torch's
asynchronous tensor parallelism knows no product with a bias. Not covered: what `check_plain` refuses.

Shapes: B sequences, T positions, t of them on a tensor-parallel rank, D hidden, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from trainer.model.gpt import GPT, Block
from trainer.model.linears import JoinedLinear, Part, SummedLinear
from trainer.ops.attention import attention
from trainer.ops.norm import Norm


class NativeBlock(nn.Module):
    """A serial block, of the parameters of ours.

    The rows of `qkv` are in the order of the ranks that will hold them: each gets whole heads of all three.
    """

    def __init__(self, block: Block, tp: int) -> None:
        super().__init__()
        assert isinstance(block.qkv, JoinedLinear)
        assert isinstance(block.up, JoinedLinear)
        self.head_width = block.head_width
        self.widths = [width // tp for width in block.qkv.splits]
        self.norm, self.mlp_norm = _norm(block.norm), _norm(block.mlp_norm)
        bias = block.qkv.bias
        self.qkv = _linear(
            _by_rank(block.qkv.weight, block.qkv.splits, tp),
            None if bias is None else _by_rank(bias, block.qkv.splits, tp),
        )
        self.up = _linear(block.up.weight, block.up.bias)
        self.out, self.down = _summed(block.out), _summed(block.down)

    def biases(self) -> Iterator[tuple[str, Bias]]:
        """Yield the biases that exist, with the name of their linear."""
        for name in ("qkv", "up", "out", "down"):
            for module in getattr(self, name):
                if isinstance(module, Bias):
                    yield name, module

    def forward(self, x_tBD: Tensor) -> Tensor:
        x_tBD = x_tBD + self.out(self._attend(self.qkv(self.norm(x_tBD))))
        up: Tensor = self.up(self.mlp_norm(x_tBD))
        down: Tensor = self.down(F.gelu(up, approximate="tanh"))
        return x_tBD + down

    def _attend(self, qkv: Tensor) -> Tensor:
        parts = torch.split(qkv, self.widths, dim=-1)
        q, k, v = (each.view(*each.shape[:-1], -1, self.head_width).permute(1, 2, 0, 3) for each in parts)
        return attention(q, k, v).permute(2, 0, 1, 3).flatten(2)


class Bias(nn.Module):
    """Adds a vector to the columns, or to those of this rank."""

    def __init__(self, weight_N: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight_N.detach())

    def forward(self, x: Tensor) -> Tensor:
        return x + (self.weight if isinstance(x, DTensor) else _local(self.weight))


class Positions(nn.Module):
    """Adds a learned vector to each position of this rank."""

    def __init__(self, weight_TD: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight_TD

    def forward(self, x_tBD: Tensor) -> Tensor:
        return x_tBD + _local(self.weight)[: len(x_tBD), None]


class NativeStage(nn.Module):
    """The layers of `gpt` on this stage: token ids [B, T] or activations [t, B, D] in, activations or logits out.

    It takes the parameters over: `gpt` cannot be used any more.
    """

    def __init__(self, gpt: GPT, tp: int) -> None:
        super().__init__()
        self.embedding: nn.Embedding | None = None
        self.positions: Positions | None = None
        if gpt.embedding is not None and gpt.embedding.position is not None:
            weight_VD = gpt.embedding.tokens.weight
            self.embedding = nn.Embedding(weight_VD.shape[0], weight_VD.shape[1], device="meta")
            self.embedding.weight = weight_VD
            self.positions = Positions(gpt.embedding.position)
        self.blocks = nn.ModuleDict(
            {name: NativeBlock(block, tp) for name, block in gpt.blocks.items() if isinstance(block, Block)}
        )
        self.norm = None if gpt.head is None else _norm(gpt.head.norm)
        self.head = None if gpt.head is None else _product(gpt.head.tokens.weight)

    def forward(self, x: Tensor) -> Tensor:
        if self.embedding is not None and self.positions is not None:
            x = self.positions(self.embedding(x.t()))
        for block in self.blocks.values():
            x = block(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def next_token_loss(logits_TBV: Tensor, targets_BT: Tensor) -> Tensor:
    """Mean cross entropy, nats a token, in float32 or wider; of logits that are spread by vocabulary too."""
    wide = torch.promote_types(logits_TBV.dtype, torch.float32)
    loss = F.cross_entropy(logits_TBV.to(wide).flatten(0, 1), targets_BT.t().flatten())
    return loss.to_local() if isinstance(loss, DTensor) else loss


@torch.no_grad()
def _by_rank(whole: Tensor, splits: tuple[int, ...], tp: int) -> Tensor:
    part = Part(0, splits)
    return torch.cat([part.local(whole, rank, tp) for rank in range(tp)])


def _linear(weight_NK: Tensor, bias_N: Tensor | None) -> nn.Sequential:
    """Build a linear layer on these tensors as its parameters, not copied."""
    return nn.Sequential(_product(weight_NK), *(() if bias_N is None else (Bias(bias_N),)))


def _product(weight_NK: Tensor) -> nn.Linear:
    out_features, in_features = weight_NK.shape
    linear = nn.Linear(in_features, out_features, bias=False, device="meta")
    linear.weight = nn.Parameter(weight_NK.detach())
    return linear


def _local(weight: Tensor) -> Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _summed(linear: nn.Module) -> nn.Sequential:
    assert isinstance(linear, SummedLinear)
    return _linear(linear.weights[0], linear.bias)


def _norm(norm: Norm) -> nn.LayerNorm:
    made = nn.LayerNorm(norm.weight.shape[0], eps=norm.eps, device="meta")
    made.weight = norm.weight
    assert norm.bias is not None
    made.bias = norm.bias
    return made
