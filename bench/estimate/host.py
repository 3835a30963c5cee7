"""Host time of a step: launches times what one takes, which bounds small models and deep tensor parallelism.

A pass takes the longer of its device time and its host time; a CUDA graph has no host time. Launches are those of this
project's trainer, counted in the profiles of `bench.mfu` (kernels, copies and fills of a step, over blocks and
micro-batches); how long one takes the host is measured on that host, by the same profile of another layout
(`launch_s_of`), or given. Other software launches otherwise: its plans have no host.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from netlayer.config.tree import JobConfig
from netlayer.workload.float8 import found_amaxes, found_of_linears

# Launches of one block and micro-batch, forward and backward. reports/trainer_*.json, profiles, over blocks and
# micro-batches: 44 (dp2_graph), 52 (pp2vp2_native3d), 54 (8_layers_native3d), 56 (125m); 36 for a parallel block
# (dp2_parallel), whose second half has neither norm nor sum.
_ATTENTION, _MLP, _PARALLEL_MLP = 27, 24, 9
_TORCH = 3
"""More of a half block where norms and activations are torch's own: 5 kernels for 3, each (bench.operators)."""
_FORWARD = 1 / 3
# Tensor parallelism through peers' memory, of two ranks: a block has 26 products for 12, in parts, and 80 copies and
# flags that go straight to the driver (tp2: 132 launches in all). Through NCCL it has 20 launches (overlap.tp=false).
_PARTS, _DIRECT, _COLLECTIVES = 14, 80, 20
DIRECT_S = 10e-6
"""A call that Python makes of the driver itself. Assumed: no record holds it."""
# A linear in 8 bits, tensorwise (trainer/ops/fp8.py, fp8_kernels.py): to quantise is three launches (a scalar filled,
# the largest magnitude, the cast, which also transposes), or the cast alone where the largest magnitude has been found
# (netlayer/workload/float8.py), for which a block fills its scalars at once; of input and weight forward, of gradient
# and weight backward, where the weight is cast transposed by the magnitude of the forward pass. Gradients of queries,
# keys and values are read and cast one by one, and not joined, but where there is a bias. A weight that travels in 8
# bits is not quantised here, and transposed backward. With tensor parallelism each part of the rows is quantised as it
# comes, and input and gradient once more for the weight's gradient; a column's input that travels in 8 bits has a scale
# of all ranks (its NaN, all-reduce, scale 2, cast), and is cast and transposed backward.
_QUANTISE, _CAST, _LINEARS, _SHARED_SCALE, _SENT_AGAIN = 3, 1, 2, 5, 2
_PARTS_OF_QKV = 3
# Context parallelism (trainer/ops/context_attention.py), beyond the attention's own: the exchange of keys with its
# copies, two calls for two halves of the heads backward; and of each other rank's part.
_CONTEXT, _CONTEXT_PART = (3, 16), (2, 6)
_HEAD = 20
"""Launches of the head and the loss, for one micro-batch. Assumed."""
_OPTIMIZER = 2.5
"""Launches of a block's share of the optimiser's step, by the records above: 81 for 32 blocks, which is this figure; 33
for 12 are 2.8, and 33 for 8 are 4.1."""
_BUCKET = 4
"""Launches of the exchange of one bucket. Assumed."""


@dataclass(frozen=True)
class Host:
    """Seconds that launches take the host.

    Args:
        launch_s: one through torch, autograd and the model's Python included.
        direct_s: one that goes straight to the driver.
    """

    launch_s: float
    direct_s: float = DIRECT_S

    def half_s(self, job: JobConfig, is_mlp: bool, cp: int = 1) -> tuple[float, float]:
        """Return seconds of one half block's forward and of its backward, for one micro-batch.

        Args:
            cp: context-parallel ranks.
        """
        number: float = _ATTENTION if not is_mlp else _PARALLEL_MLP if job.model.parallel_block else _MLP
        if job.model.operators == "torch":
            number += _TORCH
        direct = 0.0
        if job.parallel.tp > 1:
            # A part and an exchange for each other rank; a parallel block's exchanges are its attention's.
            share = 0.5 if not job.model.parallel_block else 0.0 if is_mlp else 1.0
            peers = job.parallel.tp - 1
            if job.overlap.tp:
                number, direct = number + share * _PARTS * peers, share * _DIRECT * peers * self.direct_s
            else:
                number += share * _COLLECTIVES
        whole = number * self.launch_s + direct
        forward, backward = _FORWARD * whole, (1 - _FORWARD) * whole
        model = job.model
        if model.fp8 != "off":
            share = max(0, model.layers - model.fp8_first - model.fp8_last) / model.layers
            first, second = _narrow_launches(job, is_mlp)
            forward, backward = (
                each + share * more * self.launch_s for each, more in ((forward, first), (backward, second))
            )
        if cp > 1 and not is_mlp:
            forward += (_CONTEXT[0] + _CONTEXT_PART[0] * (cp - 1)) * self.launch_s
            backward += (_CONTEXT[1] + _CONTEXT_PART[1] * (cp - 1)) * self.launch_s
        return forward, backward + (forward if model.recompute == "full" else 0.0)

    def head_s(self) -> tuple[float, float]:
        """The same of the head and the loss."""
        return _FORWARD * _HEAD * self.launch_s, (1 - _FORWARD) * _HEAD * self.launch_s

    def optimizer_s(self, num_blocks: float, num_buckets: int) -> float:
        """Return seconds of what a step launches once: the optimiser, and the exchange of each bucket."""
        return (_OPTIMIZER * num_blocks + _BUCKET * num_buckets) * self.launch_s


def _narrow_launches(job: JobConfig, is_mlp: bool) -> tuple[float, float]:
    """Return launches more of a half block's two linears in 8 bits, forward and backward."""
    model, tp = job.model, job.parallel.tp
    inputs_found, grads_found = found_of_linears(model, tp, is_mlp=is_mlp)
    of_weight = 0 if model.fp8_param_gather else _QUANTISE
    fills = 0 if is_mlp else bool(found_amaxes(model, tp))
    if tp == 1:
        first = sum(_CAST if is_found else _QUANTISE for is_found in inputs_found)
        second = sum(_CAST if is_found else _QUANTISE for is_found in grads_found)
        if not is_mlp and not model.bias and not model.parallel_block:
            second += 2 * (_PARTS_OF_QKV - 1) - 1  # each part's largest and cast, and no join
        return first + _LINEARS * of_weight + fills, second + _LINEARS * _CAST
    parts = tp if job.overlap.tp else 1
    first = _LINEARS * (_QUANTISE * parts + of_weight)
    second = _LINEARS * (_QUANTISE * (parts + 2) + (of_weight or _CAST)) - (_QUANTISE - _CAST) * inputs_found[1]
    if model.fp8_tp_gather:
        first += _SHARED_SCALE - _QUANTISE * parts
        second += _SENT_AGAIN - _QUANTISE
    return first + fills, second


def launch_s_of(rows: Sequence[Mapping[str, Any]], system: str) -> float | None:
    """Return the seconds of a launch that a record's profile measured: an upper bound, for waits are in it.

    None where the record has no profile of that system.
    """
    profile = next((row for row in rows if row.get("run") == "profile" and row["system"] == system), None)
    if profile is None or not profile.get("kinds") or "launch_ms" not in profile:
        return None
    launches = sum(kind["kernels"] for kind in profile["kinds"])
    return profile["launch_ms"] / 1e3 / launches if launches else None
