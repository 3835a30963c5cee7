"""Shapes of known GPTs by name, as keys of `job.model`; what a job gives beside the name goes before them.

A name is the size as others give it. The token table and the head are two tables here unless a job ties them, which
counts where the layers are few: 125m has 163.9 million parameters, and 125.3 million tied.
"""

from __future__ import annotations

from collections.abc import Mapping


def _gpt(layers: int, hidden: int, heads: int, vocab_size: int = 50_304, seq_len: int = 2048) -> Mapping[str, object]:
    shape = {"layers": layers, "hidden": hidden, "heads": heads, "ffn_hidden": 4 * hidden}
    return {**shape, "vocab_size": vocab_size, "seq_len": seq_len}


MODELS: Mapping[str, Mapping[str, object]] = {
    "1m": _gpt(4, 128, 4, vocab_size=2048, seq_len=128),
    "125m": _gpt(12, 768, 12),
    "1.3b": _gpt(24, 2048, 16),
    "7b": _gpt(32, 4096, 32),
    "13b": _gpt(40, 5120, 40),
    "175b": _gpt(96, 12_288, 128, vocab_size=64_000),  # MegaScale, NSDI'24, table 1
    "530b": _gpt(105, 20_480, 160, vocab_size=64_000),  # likewise
}
