"""Policies of a `ShardedDataParallel`: precision, overlap and what is resharded; and the arguments that they replace.

[Note: chosen here] `"auto"` is what a rank's hardware has and has room for, the same on all ranks. Windows: NCCL's copy
engines can gather (`collectives.transport.windows.are_worth_it`: one host, NVSwitch, NCCL 2.28), the wrapper makes its
groups itself, and parameters stay (no stage 3). Copies to the peers: where windows are taken, and the peers' memory can
be written to. Either may hold no more than `MOST_OF_FREE` of what is free when the wrapper is made, beyond what the
same job holds without it. Reduce-scatters in flight: 4, or as many as take 2 GiB.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack

import torch

from netlayer.workload.buckets import reductions_in_flight

if TYPE_CHECKING:
    from collectives.sharded.float8 import Float8Weights

Choice = bool | Literal["auto"]
MOST_OF_FREE = 0.1
"""Of the memory that is free, for what is held for speed alone."""


@dataclass(frozen=True)
class MixedPrecision:
    """Dtypes of computation and reduction.

    Args:
        param_dtype: of the computation, or its name; None: as the module is. Inputs and buffers are the caller's
            business.
        reduce_dtype: of gradients on the wire, or its name (`"bfloat16"`); None: float32, or float64 where a parameter
            is. Gradients accumulate locally in float32 or wider; one rank alone rounds none.
        float8: which weights products read in 8 bits, and whether they travel so (`collectives.sharded.float8`); None:
            none.
    """

    param_dtype: torch.dtype | str | None = None
    reduce_dtype: torch.dtype | str | None = None
    float8: Float8Weights | None = None


@dataclass(frozen=True)
class Overlap:
    """Overlap of communication with computation. No number depends on it but by the order of sums.

    Args:
        enabled: False: every collective is waited for at once, for comparison.
        prefetch: all-gathers launched ahead of the computation that waits for one. None: all of them where a step ends,
            so that a read or a forward pass on one rank alone needs no other rank; in stage 3 one.
        in_flight: reduce-scatters that may be under way: bounds the memory of gradients on their way. None: [Note:
            chosen here].
        windows: parameters and gradients lie in NCCL's symmetric windows (`collectives.transport.windows`): more
            bandwidth where NCCL is held to a few blocks or has to share the memory, and gathers by copy engines where
            the groups are made here, for `in_flight` + 1 buffers of the largest bucket. "auto": [Note: chosen here].
        peer_reduce: copy engines carry gradients to the peers, and a kernel adds them
            (`collectives.transport.peer_reduce`): for 2 to 8 ranks on one host, who hold twice the largest bucket more
            for it. "auto": likewise.

    Raises:
        ValueError: a number is below 1.
    """

    enabled: bool = True
    prefetch: int | None = None
    in_flight: int | None = None
    windows: Choice = "auto"
    peer_reduce: Choice = "auto"

    def __post_init__(self) -> None:
        if any(number is not None and number < 1 for number in (self.prefetch, self.in_flight)):
            raise ValueError(f"prefetch and in_flight must be at least 1, got {self.prefetch} and {self.in_flight}")
        for name in ("windows", "peer_reduce"):
            value = getattr(self, name)
            if value == "auto":
                continue
            if value in (True, False):  # 1 equals True, and is not it
                object.__setattr__(self, name, bool(value))
            else:
                raise ValueError(f'{name} = {getattr(self, name)!r}: must be True, False or "auto"')

    def most_in_flight(self, bucket_bytes: int) -> int:
        """Return the reduce-scatters that may be under way, of buckets of so many bytes."""
        return self.in_flight or reductions_in_flight(bucket_bytes)


@dataclass(frozen=True)
class Reshard:
    """State that ranks hold in shards alone, besides masters and the optimiser's state (ZeRO stage 1).

    Args:
        gradients: every backward pass is reduced into the shards: no rank keeps whole gradients, for a reduce-scatter
            each pass (stage 2). False: those of passes under `no_sync` add up whole on every rank, and are reduced once
            a step.
        after_forward: parameters of `units` are freed between uses too, for a gather more each pass (stage 3, FSDP2's
            `reshard_after_forward`).
    """

    gradients: bool = False
    after_forward: bool = False

    @property
    def stage(self) -> Literal[1, 2, 3]:
        """ZeRO stage."""
        return 3 if self.after_forward else 2 if self.gradients else 1

    @classmethod
    def of_stage(cls, stage: int) -> Reshard:
        """Return what ZeRO of this stage reshards.

        Raises:
            ValueError: there is no such stage.
        """
        if stage not in (1, 2, 3):
            raise ValueError(f"stage = {stage}: ZeRO has stages 1, 2 and 3")
        return cls(gradients=stage > 1, after_forward=stage > 2)


class Aliases(TypedDict, total=False):
    """Arguments of `ShardedDataParallel` that a policy has taken over; read until 0.4."""

    param_dtype: torch.dtype | str | None
    reduce_dtype: torch.dtype | str | None
    prefetch: int | None
    in_flight: int
    windows: bool
    peer_reduce: bool
    stage: Literal[1, 2, 3]


_OF_PRECISION = ("param_dtype", "reduce_dtype")
_OF_OVERLAP = ("prefetch", "in_flight", "windows", "peer_reduce")
_POLICY_OF = dict.fromkeys(_OF_PRECISION, "precision") | dict.fromkeys((*_OF_OVERLAP, "overlap"), "overlap")
_POLICY_OF["stage"] = "reshard"


def resolve(
    precision: MixedPrecision | None,
    overlap: Overlap | bool | None,
    reshard: Reshard | None,
    **aliases: Unpack[Aliases],
) -> tuple[MixedPrecision, Overlap, Reshard]:
    """Return the policies, with what the arguments say that they have taken over, of which it warns.

    Raises:
        TypeError: there is no such argument.
        ValueError: a policy is given and an argument that belongs to it.
    """
    arguments: dict[str, Any] = dict(aliases)
    if isinstance(overlap, bool):
        arguments["overlap"], overlap = overlap, None
    unknown = arguments.keys() - _POLICY_OF.keys()
    if unknown:
        raise TypeError(f"ShardedDataParallel() got an unexpected keyword argument {min(unknown)!r}")
    policies = {"precision": precision, "overlap": overlap, "reshard": reshard}
    for policy, remedy in _remedies(arguments).items():
        if policies[policy] is not None:
            name = next(name for name in arguments if _POLICY_OF[name] == policy)
            raise ValueError(f"{name}: belongs to {policy}, which is given too; say it there, as {remedy}")
    if arguments:
        names, remedy = ", ".join(arguments), ", ".join(_remedies(arguments).values())
        line = f"ShardedDataParallel: {names} go{'es' * (len(arguments) == 1)} in 0.4; give {remedy}"
        # Past this function and the wrapper's constructor, to who has called that.
        warnings.warn(line, DeprecationWarning, stacklevel=3)
    chosen = overlap or Overlap()
    settings = {name: arguments[name] for name in _OF_OVERLAP if name in arguments}
    if "overlap" in arguments:
        settings["enabled"] = arguments["overlap"]
    return (
        precision or MixedPrecision(**{name: arguments[name] for name in _OF_PRECISION if name in arguments}),
        replace(chosen, **settings),
        reshard or Reshard.of_stage(arguments.get("stage", 1)),
    )


def _remedies(arguments: Mapping[str, Any]) -> dict[str, str]:
    """Return the policies that arguments belong to, and how to give these there."""
    settings: dict[str, list[str]] = {}
    for name, value in arguments.items():
        if name == "stage":
            texts = [f"{key}=True" for key, least in (("gradients", 2), ("after_forward", 3)) if value >= least]
        else:
            texts = [f"{'enabled' if name == 'overlap' else name}={value!r}"]
        settings.setdefault(_POLICY_OF[name], []).extend(texts)
    kinds = {"precision": "MixedPrecision", "overlap": "Overlap", "reshard": "Reshard"}
    return {policy: f"{policy}={kinds[policy]}({', '.join(texts)})" for policy, texts in settings.items()}
