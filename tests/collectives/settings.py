"""Settings of a wrapper by their own names, as tests vary them: each goes to the policy that it belongs to."""

from __future__ import annotations

from typing import Any

from torch import nn

from collectives import MixedPrecision, Overlap, Reshard, ShardedDataParallel


def shard(module: nn.Module, **settings: Any) -> ShardedDataParallel:
    """Wrap a module; `overlap` is whether there is any."""
    precision = {name: settings.pop(name) for name in ("param_dtype", "reduce_dtype", "float8") if name in settings}
    names = {"overlap": "enabled"} | {name: name for name in ("prefetch", "in_flight", "windows", "peer_reduce")}
    # Not what the machine has: tests say what they are about.
    overlap = {"windows": False, "peer_reduce": False}
    overlap |= {ours: settings.pop(name) for name, ours in names.items() if name in settings}
    return ShardedDataParallel(
        module,
        precision=MixedPrecision(**precision),
        overlap=Overlap(**overlap),
        reshard=Reshard.of_stage(settings.pop("stage", 1)),
        **settings,
    )
