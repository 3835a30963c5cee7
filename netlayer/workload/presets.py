"""Shapes of known GPTs by name, as keys of `job.model`; what a job gives beside the name goes before them.

A name is the size as others give it. The token table and the head are two tables here unless a job ties them, which
counts where the layers are few: 125m has 163.9 million parameters, and 125.3 million tied.

The Llama 3 shapes are as published with the weights (Llama-3.2-1B; Meta-Llama-3-8B and -70B), so are their numbers of
parameters: 1,235,814,400, 8,030,261,248 and 70,553,706,496. What `job.model` cannot say yet: the scaling of rotary
frequencies that takes Llama-3.2-1B from 8,192 to 131,072 tokens (factor 32, low and high frequency factors 1 and 4),
without which its `seq_len` is 8,192 here; and the norms' epsilon, which is 1e-5 in these models and in all of ours.
"""

from __future__ import annotations

from collections.abc import Mapping


def _gpt(layers: int, hidden: int, heads: int, vocab_size: int = 50_304, seq_len: int = 2048) -> Mapping[str, object]:
    shape = {"layers": layers, "hidden": hidden, "heads": heads, "ffn_hidden": 4 * hidden}
    return {**shape, "vocab_size": vocab_size, "seq_len": seq_len}


def _llama3(
    layers: int, hidden: int, heads: int, ffn_hidden: int, *, tied_embeddings: bool = False
) -> Mapping[str, object]:
    shape = {"layers": layers, "hidden": hidden, "heads": heads, "kv_heads": 8, "ffn_hidden": ffn_hidden}
    kinds = {"positions": "rotary", "rotary_base": 500_000.0, "norm": "rmsnorm", "activation": "swiglu", "bias": False}
    return {**shape, **kinds, "vocab_size": 128_256, "seq_len": 8192, "tied_embeddings": tied_embeddings}


MODELS: Mapping[str, Mapping[str, object]] = {
    "1m": _gpt(4, 128, 4, vocab_size=2048, seq_len=128),
    "125m": _gpt(12, 768, 12),
    "1.3b": _gpt(24, 2048, 16),
    "7b": _gpt(32, 4096, 32),
    "13b": _gpt(40, 5120, 40),
    "175b": _gpt(96, 12_288, 128, vocab_size=64_000),  # MegaScale, NSDI'24, table 1
    "530b": _gpt(105, 20_480, 160, vocab_size=64_000),  # likewise
    "llama3-1b": _llama3(16, 2048, 32, 8192, tied_embeddings=True),
    "llama3-8b": _llama3(32, 4096, 32, 14_336),
    "llama3-70b": _llama3(80, 8192, 64, 28_672),
}
