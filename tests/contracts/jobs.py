"""Small jobs that cover every pair of values of the switches that decide what a job is."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from netlayer.config.tree import JobConfig, build_config

RANKS = 4
MODEL = {"layers": 4, "hidden": 32, "heads": 8, "ffn_hidden": 64, "seq_len": 16}
# (section, key): its values. Degrees are of four ranks.
SWITCHES: Mapping[tuple[str, str], Sequence[Any]] = {
    ("parallel", "degrees"): (
        {"dp": 4},
        {"tp": 4},
        {"tp": 2, "dp": 2},
        {"dp": 2, "dp_replicate": 2},
        {"pp": 2, "dp": 2},
        {"pp": 2, "vpp": 2, "dp": 2},
        {"tp": 2, "pp": 2},
        {"tp": 2, "pp": 2, "vpp": 2},
        {"pp": 4},
        {"tp": 2, "cp": 2},
        {"cp": 2, "dp_replicate": 2},
    ),
    ("parallel", "balance"): (True, False),
    ("parallel", "zero"): (1, 2, 3),
    ("model", "vocab_size"): (300, 306),  # padded over two ranks, over four
    ("model", "kv_heads"): (0, 4),
    ("model", "head_dim"): (0, 8),  # twice as wide as the stream
    ("model", "qk_norm"): (False, True),
    ("model", "parallel_block"): (False, True),
    ("model", "attention_window"): (0, 8),
    ("model", "window_pattern"): ("w", "wf"),
    ("model", "positions"): ("learned", "rotary"),
    ("model", "norm"): ("layernorm", "rmsnorm"),
    ("model", "activation"): ("gelu", "swiglu"),
    ("model", "bias"): (True, False),
    ("model", "tied_embeddings"): (False, True),
    ("model", "dtype"): ("float32", "bfloat16", "float64"),
    ("model", "recompute"): ("none", "selective", "full"),
    ("overlap", "dp"): (True, False),
    ("overlap", "tp"): (True, False),
    ("overlap", "save_gathered_input"): (False, True),
    ("overlap", "pp"): (True, False),
    ("overlap", "zero_bubble"): (True, False),
    ("overlap", "prefetch"): (2, 1),
    ("overlap", "bucket_mib"): (0.01, 0.0),
    ("overlap", "reduce_dtype"): ("float32", "bfloat16"),
    ("overlap", "windows"): ("auto", False),
    ("overlap", "peer_memory"): (True, False),
    ("overlap", "peer_reduce"): (True, False),
    ("optimizer", "name"): ("adamw", "lamb"),
    ("batch", "global_batch_size"): (8, 4),
}
Choice = tuple[int, ...]
"""An index into the values of each switch."""


def pairwise() -> list[Choice]:
    """Choices that together have every pair of values of every two switches: greedily, the same ones every time."""
    sizes = [len(values) for values in SWITCHES.values()]
    missing = {
        ((one, a), (two, b))
        for one, two in itertools.combinations(range(len(sizes)), 2)
        for a in range(sizes[one])
        for b in range(sizes[two])
    }
    found: list[Choice] = []
    while missing:
        (one, a), (two, b) = min(missing)
        chosen = {one: a, two: b}
        for switch in (index for index in range(len(sizes)) if index not in chosen):
            gains = [
                sum(_ordered((switch, value), other) in missing for other in chosen.items())
                for value in range(sizes[switch])
            ]
            chosen[switch] = gains.index(max(gains))
        choice = tuple(chosen[index] for index in range(len(sizes)))
        missing -= set(_pairs(choice))
        found.append(choice)
    return found


def every_value() -> list[Choice]:
    """As few choices that together have every value of every switch: each as often as the switch with most allows."""
    sizes = [len(values) for values in SWITCHES.values()]
    # Switches turn at other speeds, or those with two values would all be on together, or off.
    return [tuple((row // (1 + index % 3)) % size for index, size in enumerate(sizes)) for row in range(max(sizes))]


def job_of(choice: Choice) -> JobConfig:
    tree: dict[str, dict[str, Any]] = {"model": dict(MODEL), "batch": {"micro_batch_size": 1}, "parallel": {"dp": 1}}
    for ((section, key), values), index in zip(SWITCHES.items(), choice, strict=True):
        value = values[index]
        tree.setdefault(section, {}).update(value if key == "degrees" else {key: value})
    return build_config({"cluster": {"gpus_per_server": RANKS}, "job": tree}).job


def step_in_backward() -> JobConfig:
    """A switch that goes with few others."""
    tree = {
        "model": {**MODEL, "vocab_size": 300},
        "parallel": {"dp": RANKS},
        "batch": {"global_batch_size": 8, "micro_batch_size": 1},
    }
    more = {"optimizer": {"max_grad_norm": 0.0}, "overlap": {"step_in_backward": True, "bucket_mib": 0.01}}
    return build_config({"cluster": {"gpus_per_server": RANKS}, "job": {**tree, **more}}).job


def float8() -> list[JobConfig]:
    """Weights that travel in 8 bits, of all blocks but the first, in both recipes and all stages; inputs too."""
    shape = {**MODEL, "hidden": 128, "ffn_hidden": 128, "seq_len": 128, "vocab_size": 300, "qk_norm": True}
    narrow = {"fp8_first": 1, "fp8_param_gather": True, "dtype": "bfloat16"}
    jobs = []
    for recipe, zero, degrees, bucket_mib in (
        ("tensorwise", 1, {"dp": 4}, 0.05),
        ("blockwise", 3, {"dp": 2, "pp": 2}, 0.0),
        ("tensorwise", 2, {"tp": 2, "dp": 2}, 0.0),
    ):
        tree = {
            "model": {**shape, **narrow, "fp8": recipe, "fp8_tp_gather": "tp" in degrees},
            "parallel": {"dp": 1, "zero": zero, **degrees},
            "batch": {"global_batch_size": 4, "micro_batch_size": 1},
            "overlap": {"bucket_mib": bucket_mib},
        }
        jobs.append(build_config({"cluster": {"gpus_per_server": RANKS}, "job": tree}).job)
    return jobs


def _pairs(choice: Choice) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    return itertools.combinations(enumerate(choice), 2)


def _ordered(one: tuple[int, int], two: tuple[int, int]) -> tuple[tuple[int, int], tuple[int, int]]:
    return (one, two) if one < two else (two, one)
