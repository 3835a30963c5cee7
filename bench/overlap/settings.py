"""Settings of `bench.overlap`: plain values that travel to the ranks, without torch."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from netlayer.config.tree import ModelConfig
from netlayer.errors import ConfigError

Backend = Literal["gloo", "nccl"]
Technique = Literal["tp", "small", "pp", "dp"]
TECHNIQUES: tuple[Technique, ...] = get_args(Technique)
"""The shortest first: where time runs out, little is missing."""
# `pp` has a `measure` that starts ranks of its own, `tp` one that every rank of a group calls.
MODULES: dict[Technique, str] = {"pp": "bench.overlap.pipeline", "tp": "bench.overlap.tensor"}
Dtype = Literal["float32", "bfloat16"]
DTYPES: tuple[Dtype, ...] = get_args(Dtype)
System = Literal["ours", "ours_windows", "ours_step_after_backward", "ours_overlap_off", "fsdp2", "fsdp2_registered"]
SYSTEMS: tuple[System, ...] = get_args(System)
PEERS: tuple[System, ...] = ("fsdp2", "fsdp2_registered")
NCCL_ALONE: tuple[System, ...] = ("ours_windows", "fsdp2_registered")
"""Whose buffers are registered with NCCL."""


@dataclass(frozen=True)
class DpSettings:
    """The data-parallel comparison.

    Args:
        model: shape of the GPT; its `seq_len` tokens are one sequence.
        micro: sequences a rank and step.
        systems: what is compared, in the order of the table.
        steps: timed steps of each system, over all rounds.
        warmup: steps of each system before the timed ones of a round.
        rounds: how often the systems take turns.
        compile: torch.compile for each unit of the model, in every system alike.
        bucket_mib: largest bucket of ours, MiB; None: a unit is a bucket.
        prefetch: all-gathers that ours launches ahead; None: tuned in its first steps.
        gather_in_backward: as in `ShardedDataParallel.optimizer`.
        lr: of AdamW; large enough that the losses compared depend on every update.
        tolerance: how far the losses of two systems may lie apart, nats.
        seed: of initial values and data.
    """

    model: ModelConfig
    micro: int
    systems: tuple[System, ...] = SYSTEMS
    steps: int = 8
    warmup: int = 1
    rounds: int = 2
    compile: bool = True
    bucket_mib: float | None = None
    prefetch: int | None = None
    gather_in_backward: float | None = None
    lr: float = 1e-4
    tolerance: float = 0.05
    seed: int = 0

    def record(self) -> dict[str, Any]:
        """JSON values, for the arguments of a record."""
        return {**dataclasses.asdict(self), "model": self.model.model_dump(mode="json")}


@dataclass(frozen=True)
class Preset:
    """Size of a model that has a name."""

    layers: int
    hidden: int
    heads: int
    seq: int
    micro: int
    vocab: int
    dtype: Dtype
    lr: float


PRESETS = {
    "tiny": Preset(layers=4, hidden=128, heads=4, seq=128, micro=2, vocab=2048, dtype="float32", lr=3e-4),
    "1b": Preset(layers=20, hidden=2048, heads=16, seq=2048, micro=4, vocab=50304, dtype="bfloat16", lr=1e-4),
    "7b": Preset(layers=32, hidden=4096, heads=32, seq=2048, micro=4, vocab=50304, dtype="bfloat16", lr=1e-4),
}


def make_settings(
    *,
    model: str,
    layers: int | None,
    hidden: int | None,
    heads: int | None,
    seq: int | None,
    micro: int | None,
    vocab: int | None,
    dtype: Dtype | None,
    lr: float | None,
    systems: Sequence[System],
    compiled: bool,
    **rest: Any,
) -> DpSettings:
    """Settings of a size by name, with what is not None in place of its own.

    Raises:
        ConfigError: heads do not divide the width, or nothing of ours is compared.
    """
    if systems and "ours" not in systems:
        raise ConfigError("--system", ",".join(systems), "is compared with nothing", "add --system ours")
    size = PRESETS[model]
    width, num_heads = hidden or size.hidden, heads or size.heads
    if width % num_heads:
        raise ConfigError("--heads", num_heads, f"must divide the width, {width}", "change --heads or --hidden")
    config = ModelConfig(
        layers=layers or size.layers,
        hidden=width,
        heads=num_heads,
        ffn_hidden=4 * width,
        vocab_size=vocab or size.vocab,
        seq_len=seq or size.seq,
        dtype=dtype or size.dtype,
    )
    rest["lr"] = size.lr if lr is None else lr
    return DpSettings(config, micro or size.micro, tuple(systems) or SYSTEMS, compile=compiled, **rest)


def channel_environment(channels: int) -> dict[str, str]:
    """Variables that hold every NCCL communicator to `channels`; 0 leaves NCCL alone.

    One channel is one multiprocessor that sends to the next rank: about 20 GB/s on an H200, as a 200G NIC. NCCL's
    symmetric kernels, which know no channels, are held to as many blocks (CTAs), and copy engines, which no such limit
    holds, carry nothing.
    """
    if not channels:
        return {}
    most, least = ("NCCL_MAX_NCHANNELS", "NCCL_MAX_CTAS"), ("NCCL_MIN_NCHANNELS", "NCCL_MIN_CTAS")
    return {**dict.fromkeys(most, str(channels)), **dict.fromkeys(least, "1"), "NCCL_CTA_POLICY": "0"}


def on_gloo(settings: DpSettings, requested: Sequence[System]) -> DpSettings:
    """Return the settings without the systems that only NCCL has.

    Raises:
        ConfigError: one of them was asked for by name.
    """
    missing = [system for system in requested if system in NCCL_ALONE]
    if missing:
        raise ConfigError("--system", missing[0], "needs NCCL, and the backend is gloo", "omit it")
    return dataclasses.replace(settings, systems=tuple(s for s in settings.systems if s not in NCCL_ALONE))
