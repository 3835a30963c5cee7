"""The GPT that `bench.overlap` trains, and the data-parallel systems that train it: ours, and torch's FSDP2.

Every system gets the same modules with the same initial values, the same compiled units, the same communicator, fused
AdamW on float32 masters, and reduces in the dtype of the computation. FSDP2 has its best settings: parameters stay
gathered between forward and backward, and embedding, blocks and head are units of their own, as in torchtitan.

Shapes: B sequences, T positions, D hidden, V vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from bench.overlap.settings import DpSettings
from collectives.sharded.data_parallel import ShardedDataParallel
from collectives.sharded.policies import MixedPrecision, Overlap
from collectives.watch.recorder import Recorder
from trainer.model.gpt import GPT, Head, build_model

BETAS, EPS, WEIGHT_DECAY = (0.9, 0.95), 1e-8, 0.1


class Loss(nn.Module):
    """The head and the mean cross entropy, as one unit, so that the compiler fuses what lies between."""

    def __init__(self, head: Head) -> None:
        super().__init__()
        self.head = head

    def forward(self, x_TBD: Tensor, targets_BT: Tensor) -> Tensor:
        logits_TBV = self.head.logits(x_TBD)
        wide = torch.promote_types(logits_TBV.dtype, torch.float32)
        return F.cross_entropy(logits_TBV.to(wide).flatten(0, 1), targets_BT.t().flatten())


class Stack(nn.Module):
    """The parts of a GPT as units: embedding, blocks, head with loss."""

    def __init__(self, gpt: GPT) -> None:
        super().__init__()
        assert gpt.embedding is not None
        assert gpt.head is not None
        self.embedding, self.blocks, self.loss = gpt.embedding, nn.ModuleList(gpt.blocks.values()), Loss(gpt.head)

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        x_TBD = self.embedding(tokens_BT)
        for block in self.blocks:
            x_TBD = block(x_TBD)
        loss: Tensor = self.loss(x_TBD, targets_BT)
        return loss

    @property
    def units(self) -> list[nn.Module]:
        return [self.embedding, *self.blocks, self.loss]


def build_stack(settings: DpSettings, device: torch.device) -> Stack:
    """The whole model in float32 on `device`: the same values in every system and on every rank."""
    stack = Stack(build_model(settings.model, settings.seed, device))
    if settings.compile:
        for unit in (*stack.blocks, stack.loss):  # the embedding is one lookup
            unit.forward = torch.compile(unit.forward, dynamic=False)
    return stack


class DataParallel(Protocol):
    """A system: trains the stack on all ranks."""

    def step(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        """One whole training step; the loss of this rank, on the device."""


class Ours:
    """`ShardedDataParallel` with the optimiser's step in the backward pass; it can be switched between steps."""

    def __init__(
        self, settings: DpSettings, device: torch.device, group: dist.ProcessGroup, windows: bool = False
    ) -> None:
        stack = build_stack(settings, device)
        dtype = getattr(torch, settings.model.dtype)
        self.recorder = Recorder(device)
        self.model = ShardedDataParallel(
            stack,
            units=stack.units,
            groups=(group, group),
            bucket_bytes=None if settings.bucket_mib is None else round(settings.bucket_mib * 2**20),
            precision=MixedPrecision(dtype, dtype),
            overlap=Overlap(prefetch=settings.prefetch or 1, windows=windows, peer_reduce=False),  # until it is tuned
            recorder=self.recorder,
        )
        self.optimizer = self.model.optimizer(
            torch.optim.AdamW,
            step_in_backward=True,
            gather_in_backward=settings.gather_in_backward,
            lr=settings.lr,
            betas=BETAS,
            eps=EPS,
            weight_decay=WEIGHT_DECAY,
            fused=True,
        )

    def set_mode(self, *, step_in_backward: bool, overlap: bool, muted: bool) -> None:
        """Choose our variant for the next steps; nothing may be under way when communicators are muted."""
        self.model.wait_parameters()
        self.model.step_in_backward, self.model.overlap = step_in_backward, overlap
        self.model.gather_comm.muted = self.model.reduce_comm.muted = muted

    def step(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        self.model.start_step()
        loss: Tensor = self.model(tokens_BT, targets_BT)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()


class Fsdp2:
    """torch's `fully_shard` around every unit and the whole; `registered`: its buffers are known to NCCL."""

    def __init__(
        self, settings: DpSettings, device: torch.device, group: dist.ProcessGroup, registered: bool = False
    ) -> None:
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

        stack = build_stack(settings, device)
        mesh = DeviceMesh.from_group(group, device.type)
        dtype = getattr(torch, settings.model.dtype)
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=dtype)
        for part in (*stack.units, stack):
            fully_shard(part, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
            if registered:
                assert isinstance(part, FSDPModule)
                part.set_allocate_memory_from_process_group_for_comm(True)
        self.model = stack
        self.optimizer = torch.optim.AdamW(
            stack.parameters(), lr=settings.lr, betas=BETAS, eps=EPS, weight_decay=WEIGHT_DECAY, fused=True
        )

    def step(self, tokens_BT: Tensor, targets_BT: Tensor) -> Tensor:
        loss: Tensor = self.model(tokens_BT, targets_BT)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.detach()
