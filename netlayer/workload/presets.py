"""Shapes of known GPTs by name, as keys of `job.model`; what a job gives besides the name overrides them.

A name is the size as others give it. The token table and the head are two tables here unless a job ties them, which
counts where the layers are few: 125m has 163.9 million parameters, and 125.3 million tied.

The Llama 3 and Qwen3 shapes are as published with the weights (Llama-3.2-1B, Meta-Llama-3-8B and -70B, Llama-3.1-405B;
Qwen3-0.6B and -8B), so are their numbers of parameters: 1,235,814,400, 8,030,261,248, 70,553,706,496 and
405,853,388,800; 596,049,920 and 8,190,735,360. `seq_len` is what a training sequence has here, not the most that the
published model reads.
"""

from __future__ import annotations

from collections.abc import Mapping


def _gpt(layers: int, hidden: int, heads: int, vocab_size: int = 50_304, seq_len: int = 2048) -> Mapping[str, object]:
    shape = {"layers": layers, "hidden": hidden, "heads": heads, "ffn_hidden": 4 * hidden}
    return {**shape, "vocab_size": vocab_size, "seq_len": seq_len}


def _llama3(
    layers: int, hidden: int, heads: int, ffn_hidden: int, *, tied_embeddings: bool = False, **more: object
) -> Mapping[str, object]:
    shape = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": 8, "ffn_hidden": ffn_hidden}
    kinds = {"positions": "rotary", "rotary_base": 500_000.0, "norm": "rmsnorm", "activation": "swiglu", "bias": False}
    ends = {"vocab_size": 128_256, "seq_len": 8192, "tied_embeddings": tied_embeddings}
    return {**shape, **kinds, **ends, "norm_eps": 1e-5, **more}


def _qwen3(
    layers: int, hidden: int, heads: int, ffn_hidden: int, *, tied_embeddings: bool = False
) -> Mapping[str, object]:
    qwen3 = {"vocab_size": 151_936, "rotary_base": 1e6, "norm_eps": 1e-6, "head_dim": 128, "qk_norm": True}
    return _llama3(layers, hidden, heads, ffn_hidden, tied_embeddings=tied_embeddings, **qwen3)


def _nemotron4(layers: int, hidden: int, heads: int) -> Mapping[str, object]:
    """arXiv 2402.16819 and 2406.11704; GELU stands for their squared ReLU, which takes as many FLOPs and bytes."""
    nemotron4 = {"vocab_size": 256_000, "seq_len": 4096, "norm": "layernorm", "activation": "gelu"}
    return {**_llama3(layers, hidden, heads, 4 * hidden), **nemotron4}


# https://huggingface.co/meta-llama/Llama-3.2-1B/blob/main/config.json
_LLAMA_32_SCALING = {
    "rope_type": "llama3",
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


MODELS: Mapping[str, Mapping[str, object]] = {
    "1m": _gpt(4, 128, 4, vocab_size=2048, seq_len=128),
    "125m": _gpt(12, 768, 12),
    "1.3b": _gpt(24, 2048, 16),
    "7b": _gpt(32, 4096, 32),
    "13b": _gpt(40, 5120, 40),
    "175b": _gpt(96, 12_288, 128, vocab_size=64_000),  # MegaScale, NSDI'24, table 1
    "530b": _gpt(105, 20_480, 160, vocab_size=64_000),  # likewise
    "llama3-1b": _llama3(16, 2048, 32, 8192, tied_embeddings=True, rope_scaling=_LLAMA_32_SCALING),
    "llama3-8b": _llama3(32, 4096, 32, 14_336),
    "llama3-70b": _llama3(80, 8192, 64, 28_672),
    "llama3-405b": _llama3(126, 16_384, 128, 53_248),
    "nemotron4-15b": _nemotron4(32, 6144, 48),
    "nemotron4-340b": _nemotron4(96, 18_432, 96),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, tied_embeddings=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 12_288),
}
