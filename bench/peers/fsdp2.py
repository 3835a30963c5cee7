"""The peer that a good engineer would write today: torch's FSDP2 with compiled units, on the model of `trainer`.

Parameters stay gathered between forward and backward, or, with `reshards`, those of the blocks are gathered twice, for
less memory. With `registers` its buffers are known to NCCL, which is its best where the network bounds it. Embedding,
blocks and head are units of their own, as in torchtitan. Not covered: tensor and pipeline parallelism.

Shapes: B sequences, T positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from bench.overlap.model import Stack
from bench.peers.decay import decay_groups
from netlayer.config.tree import JobConfig
from netlayer.errors import ConfigError, HardwareMissing
from trainer.model.gpt import build_model
from trainer.parallel import MicroBatch


def check(job: JobConfig, backend: str, *, reshards: bool = False, registers: bool = False) -> None:
    """Refuse what it cannot do: it has every model, and no layout but one.

    Raises:
        ConfigError: the layout is not data parallel alone, or the optimiser is not AdamW.
        HardwareMissing: buffers are to be registered, and the backend is not nccl.
    """
    name = "fsdp2_reshard" if reshards else "fsdp2_registered" if registers else "fsdp2"
    if job.parallel.tp * job.parallel.pp > 1:
        rule = "is data parallel alone"
        raise ConfigError("--peers", name, rule, "give a layout such as dp4, another peer, or none")
    if job.optimizer.name != "adamw":
        rule = f"steps with adamw for --peers {name}"
        raise ConfigError("job.optimizer.name", job.optimizer.name, rule, "measure lamb of ours by --also")
    if registers and backend != "nccl":
        raise HardwareMissing(f"--peers {name}: NCCL registers its buffers, and this runs on {backend}; omit it")


class Fsdp2:
    """Data parallel over all ranks; one optimiser step at a time."""

    def __init__(
        self, job: JobConfig, seed: int, device: torch.device, *, reshards: bool = False, registers: bool = False
    ) -> None:
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        # Without a mesh, `fully_shard` takes the parameters to the GPU of a machine that has one, gloo or not.
        mesh = init_device_mesh(device.type, (job.parallel.layout.world_size,))
        gpt = build_model(job.model, seed, device)
        dtypes = getattr(torch, job.model.dtype), getattr(torch, job.overlap.reduce_dtype)
        policy = MixedPrecisionPolicy(param_dtype=dtypes[0], reduce_dtype=dtypes[1])
        self.job, self.model = job, Stack(gpt)
        for unit in self.model.units:
            if job.model.compile and unit is not self.model.embedding:
                nn.Module.compile(unit, dynamic=False)
            is_block = unit is not self.model.embedding and unit is not self.model.loss
            sharded = fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=reshards and is_block)
            if registers:
                sharded.set_allocate_memory_from_process_group_for_comm(True)
        self._sharded = fully_shard(self.model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        self.optimizer = torch.optim.AdamW(
            decay_groups(self.model.parameters(), job.optimizer.weight_decay),
            lr=job.optimizer.lr,
            betas=(job.optimizer.beta1, job.optimizer.beta2),
            eps=job.optimizer.eps,
            fused=True,
        )

    def step(self, batches: Sequence[MicroBatch]) -> Tensor:
        """The mean loss of this rank, on the device."""
        total = torch.zeros((), device=batches[0][0].device)
        for index, (tokens_BT, targets_BT) in enumerate(batches):
            is_last = index == len(batches) - 1
            self._sharded.set_requires_gradient_sync(is_last)
            self._sharded.set_reshard_after_backward(is_last)
            loss: Tensor = self.model(tokens_BT, targets_BT) / len(batches)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        if self.job.optimizer.max_grad_norm:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.job.optimizer.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def masters(self) -> Iterable[Tensor]:
        return (each.to_local() if isinstance(each, DTensor) else each for each in self.model.parameters())

    def close(self) -> None:
        """Nothing: all of it is memory."""
