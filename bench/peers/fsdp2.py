"""The peer that a good engineer would write today: torch's FSDP2 with compiled units, on the model of `trainer`.

Parameters stay gathered between forward and backward; embedding, blocks and head are units of their own, as in
torchtitan. Left out: tensor and pipeline parallelism.

Shapes: B sequences, T positions.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from bench.overlap_model import Stack
from netlayer.config import JobConfig
from trainer.model import build_model
from trainer.parallel import MicroBatch


class Fsdp2:
    """Data parallel over all ranks; one optimiser step at a time."""

    def __init__(self, job: JobConfig, seed: int, device: torch.device) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        gpt = build_model(job.model, seed, device)
        dtypes = getattr(torch, job.model.dtype), getattr(torch, job.overlap.reduce_dtype)
        policy = MixedPrecisionPolicy(param_dtype=dtypes[0], reduce_dtype=dtypes[1])
        self.job, self.model = job, Stack(gpt)
        for unit in self.model.units:
            if job.model.compile and unit is not self.model.embedding:
                nn.Module.compile(unit, dynamic=False)
            fully_shard(unit, mp_policy=policy, reshard_after_forward=False)
        self._sharded = fully_shard(self.model, mp_policy=policy, reshard_after_forward=False)
        self.optimizer = torch.optim.AdamW(
            _groups(self.model, job.optimizer.weight_decay),
            lr=job.optimizer.lr,
            betas=(job.optimizer.beta1, job.optimizer.beta2),
            eps=job.optimizer.eps,
            fused=True,
        )

    def step(self, batches: Sequence[MicroBatch]) -> Tensor:
        """The mean loss of this rank, on the device."""
        total = torch.zeros((), device=batches[0][0].device)
        for index, (tokens_BT, targets_BT) in enumerate(batches):
            self._sharded.set_requires_gradient_sync(index == len(batches) - 1)
            loss: Tensor = self.model(tokens_BT, targets_BT) / len(batches)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        if self.job.optimizer.clip_norm:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.job.optimizer.clip_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def close(self) -> None:
        """Nothing: all of it is memory."""


def _groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Vectors (norms, biases) are not decayed."""
    by_kind: dict[bool, list[nn.Parameter]] = {True: [], False: []}
    for parameter in model.parameters():
        by_kind[parameter.ndim > 1].append(parameter)
    return [{"params": by_kind[kind], "weight_decay": weight_decay * kind} for kind in (True, False)]
