"""Llama 3 and Qwen3 as their published configurations define them, of torch's own modules, one projection each.

Written apart from `trainer.model.gpt`: separate projections, [B, T, D], keys and values repeated for their queries,
rotary frequencies scaled one by one by their wavelength. Names of settings are those of a config.json on Hugging Face.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from netlayer.config.tree import ModelConfig
from trainer.model.gpt import GPT


@dataclass(frozen=True)
class Published:
    """Keys of a config.json that decide what is computed."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    tie_word_embeddings: bool
    qk_norm: bool
    rope_scaling: Mapping[str, Any] = field(default_factory=dict)


def of_job(config: ModelConfig) -> Published:
    """The same model in the words of a config.json."""
    return Published(
        config.hidden,
        config.ffn_hidden,
        config.layers,
        config.heads,
        config.num_kv_heads,
        config.head_width,
        config.vocab_size,
        config.norm_eps,
        config.rotary_base,
        config.tied_embeddings,
        config.qk_norm,
        config.rope_scaling.model_dump(),
    )


class RootMeanSquareNorm(nn.Module):
    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(width)), eps

    def forward(self, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.eps).sqrt() * self.weight


class Attention(nn.Module):
    def __init__(self, config: Published) -> None:
        super().__init__()
        self.config = config
        queries = config.num_attention_heads * config.head_dim
        shared = config.num_key_value_heads * config.head_dim
        self.q_proj = nn.Linear(config.hidden_size, queries, bias=False)
        self.k_proj = nn.Linear(config.hidden_size, shared, bias=False)
        self.v_proj = nn.Linear(config.hidden_size, shared, bias=False)
        self.o_proj = nn.Linear(queries, config.hidden_size, bias=False)
        if config.qk_norm:
            self.q_norm = RootMeanSquareNorm(config.head_dim, config.rms_norm_eps)
            self.k_norm = RootMeanSquareNorm(config.head_dim, config.rms_norm_eps)

    def forward(self, x_BTD: Tensor) -> Tensor:
        heads = (*x_BTD.shape[:2], -1, self.config.head_dim)
        q, k, v = (proj(x_BTD).view(heads) for proj in (self.q_proj, self.k_proj, self.v_proj))
        if self.config.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = (each.transpose(1, 2) for each in (q, k, v))
        angles_TK = rotary_angles(self.config, x_BTD.shape[1])
        q, k = (each * angles_TK.cos() + half_turned(each) * angles_TK.sin() for each in (q, k))
        repeats = self.config.num_attention_heads // self.config.num_key_value_heads
        k, v = k.repeat_interleave(repeats, 1), v.repeat_interleave(repeats, 1)
        y_BHTK = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.o_proj(y_BHTK.transpose(1, 2).flatten(2))
        return out


def half_turned(x: Tensor) -> Tensor:
    left, right = x.chunk(2, -1)
    return torch.cat((-right, left), -1)


def rotary_angles(config: Published, positions: int) -> Tensor:
    """[T, K], float64."""
    rows = []
    each = [scaled(config.rope_theta ** (-2 * i / config.head_dim), config) for i in range(config.head_dim // 2)]
    for position in range(positions):
        rows.append([position * frequency for frequency in each] * 2)
    return torch.tensor(rows, dtype=torch.float64)


def scaled(frequency: float, config: Published) -> float:
    """Llama 3.1's rule: long waves by the factor, short ones not, in between a mixture by the turns that they take."""
    told = config.rope_scaling
    kind = told.get("rope_type", "default")
    if kind == "default":
        return frequency
    if kind == "linear":
        return float(frequency / told["factor"])
    original, wavelength = told["original_max_position_embeddings"], 2 * math.pi / frequency
    if wavelength < original / told["high_freq_factor"]:
        return frequency
    if wavelength > original / told["low_freq_factor"]:
        return float(frequency / told["factor"])
    smooth = (original / wavelength - told["low_freq_factor"]) / (told["high_freq_factor"] - told["low_freq_factor"])
    return float((1 - smooth) * frequency / told["factor"] + smooth * frequency)


class Layer(nn.Module):
    def __init__(self, config: Published) -> None:
        super().__init__()
        self.input_layernorm = RootMeanSquareNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RootMeanSquareNorm(config.hidden_size, config.rms_norm_eps)
        self.gate_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = nn.Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = nn.Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x))
        y = self.post_attention_layernorm(x)
        return x + self.down_proj(F.silu(self.gate_proj(y)) * self.up_proj(y))  # type: ignore[no-any-return]


class CausalLM(nn.Module):
    def __init__(self, config: Published) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList([Layer(config) for _ in range(config.num_hidden_layers)])
        self.norm = RootMeanSquareNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        x = self.embed_tokens(tokens_BT)
        for layer in self.layers:
            x = layer(x)
        return F.cross_entropy(self.lm_head(self.norm(x)).flatten(0, 1), targets_BT.flatten())

    @torch.no_grad()
    def take_values(self, ours: GPT) -> dict[str, str]:
        """Give this model the values of `ours`; which of its parameters is a part of which of these, by name."""
        values = dict(ours.named_parameters())
        own = dict(self.named_parameters())
        named: dict[str, str] = {}

        def take(theirs: str, name: str, rows: slice = slice(None)) -> None:
            own.pop(theirs).copy_(values[name][rows])
            named[theirs] = name

        take("embed_tokens.weight", "embedding.tokens.weight")
        take("norm.weight", "head.norm.weight")
        if "head.tokens.weight" in values:
            take("lm_head.weight", "head.tokens.weight")
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, Layer)
            here, there = f"blocks.{index}", f"layers.{index}"
            row = 0
            for name in ("q", "k", "v"):
                width = getattr(layer.self_attn, f"{name}_proj").out_features
                take(f"{there}.self_attn.{name}_proj.weight", f"{here}.qkv.weight", slice(row, row + width))
                row += width
            take(f"{there}.self_attn.o_proj.weight", f"{here}.out.weights.0")
            if layer.self_attn.config.qk_norm:
                take(f"{there}.self_attn.q_norm.weight", f"{here}.q_norm.weight")
                take(f"{there}.self_attn.k_norm.weight", f"{here}.k_norm.weight")
            take(f"{there}.input_layernorm.weight", f"{here}.norm.weight")
            take(f"{there}.post_attention_layernorm.weight", f"{here}.mlp_norm.weight")
            gate = layer.gate_proj.out_features
            take(f"{there}.gate_proj.weight", f"{here}.up.weight", slice(0, gate))
            take(f"{there}.up_proj.weight", f"{here}.up.weight", slice(gate, 2 * gate))
            take(f"{there}.down_proj.weight", f"{here}.down.weights.0")
        assert not own, f"no values for {', '.join(own)}"
        return named
