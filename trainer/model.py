"""A GPT: pre-LN blocks, standard or parallel (MegaScale 3.1), learned positions, causal or sliding-window attention.

Input embedding and output head are untied: each parameter belongs to one module, so it is gathered once, where it is
used, and a pipeline stage can own either. Left out: dropout, and a kernel that makes the window cheaper than full
attention (here the window is a mask: right, at the cost of full attention).

Shapes: B sequences, T positions, D hidden, H heads, K = D/H, F inside the MLP, V vocabulary.
"""

from __future__ import annotations

import hashlib
import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from netlayer.config import ModelConfig

INIT_STD = 0.02


class GPT(nn.Module):
    """Tokens and targets in, mean cross entropy out; every parameter is read inside its own module's forward."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.window = config.attention_window
        self.embedding = Embedding(config)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.head = Head(config)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """Mean loss of the batch, nats a token, a scalar in float32 (or wider, where the model is).

        Args:
            tokens_BT: token ids, int64; T at most `seq_len`.
            targets_BT: the token that follows each of them.
        """
        mask_TT = window_mask(tokens_BT.shape[1], self.window, tokens_BT.device)
        x_BTD = self.embedding(tokens_BT)
        for block in self.blocks:
            x_BTD = block(x_BTD, mask_TT)
        logits_BTV = self.head(x_BTD)
        # bfloat16 has 8 bits of mantissa: a sum over the vocabulary needs float32.
        logits_BTV = logits_BTV.to(torch.promote_types(logits_BTV.dtype, torch.float32))
        return F.cross_entropy(logits_BTV.flatten(0, 1), targets_BT.flatten())


class Embedding(nn.Module):
    """Token and learned position embedding."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.token = nn.Embedding(config.vocab_size, config.hidden)
        self.position = nn.Parameter(torch.empty(config.seq_len, config.hidden))

    def forward(self, tokens_BT: Tensor) -> Tensor:
        embedded_BTD: Tensor = self.token(tokens_BT)
        return embedded_BTD + self.position[: tokens_BT.shape[1]]


class Block(nn.Module):
    """x + Attention(LN(x)), then + MLP(LN(.)); as a parallel block x + Attention(y) + MLP(y) with one y = LN(x)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.attention_norm = nn.LayerNorm(config.hidden)
        self.attention = Attention(config)
        self.mlp_norm = None if config.parallel_block else nn.LayerNorm(config.hidden)
        self.mlp = MLP(config)

    def forward(self, x_BTD: Tensor, mask_TT: Tensor | None) -> Tensor:
        y_BTD = self.attention_norm(x_BTD)
        if self.mlp_norm is None:
            parallel_BTD: Tensor = x_BTD + self.attention(y_BTD, mask_TT) + self.mlp(y_BTD)
            return parallel_BTD
        x_BTD = x_BTD + self.attention(y_BTD, mask_TT)
        z_BTD: Tensor = x_BTD + self.mlp(self.mlp_norm(x_BTD))
        return z_BTD


class Attention(nn.Module):
    """Causal multi-head attention; with a mask, exactly what the mask lets through."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden)
        self.out = nn.Linear(config.hidden, config.hidden)

    def forward(self, x_BTD: Tensor, mask_TT: Tensor | None) -> Tensor:
        qkv_BT3HK = self.qkv(x_BTD).unflatten(-1, (3, self.heads, -1))
        q_BHTK, k_BHTK, v_BHTK = qkv_BT3HK.permute(2, 0, 3, 1, 4)
        y_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, attn_mask=mask_TT, is_causal=mask_TT is None)
        y_BTD: Tensor = self.out(y_BHTK.transpose(1, 2).flatten(2))
        return y_BTD


class MLP(nn.Module):
    """Two linears with a GeLU (its tanh form) between."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden, config.ffn_hidden)
        self.down = nn.Linear(config.ffn_hidden, config.hidden)

    def forward(self, x_BTD: Tensor) -> Tensor:
        h_BTF = F.gelu(self.up(x_BTD), approximate="tanh")
        y_BTD: Tensor = self.down(h_BTF)
        return y_BTD


class Head(nn.Module):
    """The last norm and the projection to the vocabulary."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(config.hidden)
        self.projection = nn.Linear(config.hidden, config.vocab_size, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        logits_BTV: Tensor = self.projection(self.norm(x_BTD))
        return logits_BTV


def window_mask(num_positions: int, window: int, device: torch.device) -> Tensor | None:
    """True where a query (row) sees a key (column): itself and the `window - 1` before it; None = all before it."""
    if not 0 < window < num_positions:
        return None
    position_T = torch.arange(num_positions, device=device)
    distance_TT = position_T[:, None] - position_T[None, :]
    return (distance_TT >= 0) & (distance_TT < window)


def build_model(config: ModelConfig, seed: int, device: torch.device) -> GPT:
    """The model on `device`, initialised by `seed`: the same values on every rank, however many there are.

    Matrices are normal with std 0.02; those that end a residual branch are divided by sqrt(2 x layers), so that the
    stream's variance does not grow with depth (GPT-2's rule; the first loss is close to ln V). Values differ between
    kinds of device, whose generators differ.
    """
    with torch.device(device):
        model = GPT(config)
    branch_std = INIT_STD / math.sqrt(2 * config.layers)
    for name, parameter in model.named_parameters():
        ends_branch = name.endswith(("attention.out.weight", "mlp.down.weight"))
        _initialise(name, parameter, branch_std if ends_branch else INIT_STD, seed)
    return model


@torch.no_grad()
def _initialise(name: str, parameter: nn.Parameter, std: float, seed: int) -> None:
    """Each parameter has a generator of its own name: its values do not depend on which others are built."""
    if parameter.ndim == 1:
        parameter.fill_(1.0 if name.endswith("norm.weight") else 0.0)
        return
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    generator = torch.Generator(parameter.device).manual_seed(int.from_bytes(digest) >> 1)
    parameter.normal_(std=std, generator=generator)
