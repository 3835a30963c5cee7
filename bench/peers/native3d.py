"""Peer with 3D parallelism from PyTorch's own parts: DTensor, `torch.distributed.pipelining`, FSDP2, torch.compile.

Tensor with sequence parallelism by `parallelize_module` (sequence dimension first, so that gathers are contiguous; the
loss on logits that stay sharded by vocabulary), 1F1B or interleaved 1F1B, and `fully_shard` over the data-parallel
ranks, even if there is only one: FSDP2 holds the float32 master weights of a bfloat16 model. With `job.model.compile`
the blocks are compiled, and the loss unless it is sharded.
`asynchronous`: torch.compile splits the gathers and reduce-scatters of tensor parallelism and overlaps them with
matmuls, through torch's symmetric memory.

[Note: optimiser and gradient norm] All parameters are on one mesh of (dp, tp), so that one fused AdamW and one norm
cover them; the stages' norms are added up over the pipeline.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)

from bench.peers.decay import decay_groups
from bench.peers.native_model import NativeBlock, NativeStage, next_token_loss
from bench.peers.plain import check_plain, layers_of
from netlayer.config.tree import JobConfig
from netlayer.errors import ConfigError
from netlayer.layout import ParallelLayout
from netlayer.workload.schedule import micro_batches
from netlayer.workload.stages import half_blocks
from trainer.model.gpt import build_model
from trainer.parallel import MicroBatch


def check(job: JobConfig, backend: str, *, asynchronous: bool = False) -> None:
    """Refuse jobs that this peer cannot run; it supports every layout.

    Raises:
        ConfigError: a model that `check_plain` rejects, too few micro-batches, or a missing requirement of asynchronous
            tensor parallelism.
    """
    name = "native3d_async" if asynchronous else "native3d"
    check_plain(name, job)
    parallel = job.parallel
    count = micro_batches(job)
    if count < parallel.pp:
        rule = f"are fewer than the {parallel.pp} stages, which --peers {name} cannot run"
        raise ConfigError("micro-batches", count, rule, "raise --micro-batches")
    if asynchronous and (backend != "nccl" or not job.model.compile or parallel.tp == 1):
        rule = "needs GPUs, job.model.compile and tp above 1: the compiler overlaps what tensor parallelism sends"
        raise ConfigError("--peers", name, rule, "give --set model.compile=true and a layout with tp, or omit it")


class Native3d:
    """One rank of the peer; runs one optimiser step at a time."""

    def __init__(self, job: JobConfig, seed: int, device: torch.device, *, asynchronous: bool = False) -> None:
        layout = job.parallel.layout
        self.job, self.device, self.asynchronous = job, device, asynchronous
        self.mesh = _mesh(device.type, layout)
        self._was_asynchronous = _switch_asynchronous(asynchronous)
        if asynchronous:
            _enable_symmetric_memory(self.mesh["tp"])
        stage = self.mesh["pp"].get_local_rank()
        self.modules = [self._build(seed, stage, chunk) for chunk in range(layout.vpp)]
        self.loss = next_token_loss
        # Compiled, the loss of logits that are spread by vocabulary is another: 1.3 nats too much on two ranks.
        if job.model.compile and layout.tp == 1:
            self.loss = torch.compile(next_token_loss, dynamic=False)
        self.is_first, self.is_last = stage == 0, stage == layout.pp - 1
        self._schedule: Any = None
        config = job.optimizer
        self.optimizer = torch.optim.AdamW(
            decay_groups(self._parameters(), config.weight_decay),
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )

    def step(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Run a step and return this rank's part of the mean loss, on the device; zero on all but the last stage."""
        with loss_parallel() if self.job.parallel.tp > 1 else contextlib.nullcontext():
            total = self._accumulate(batches) if self.job.parallel.pp == 1 else self._run_pipeline(batches)
        if self.job.optimizer.max_grad_norm:
            self._clip(self.job.optimizer.max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return total

    def masters(self) -> Iterable[Tensor]:
        return (each.to_local() if isinstance(each, DTensor) else each for each in self._parameters())

    def close(self) -> None:
        """Compile as before: other systems take their turn."""
        _switch_asynchronous(self._was_asynchronous)

    def _build(self, seed: int, stage: int, chunk: int) -> NativeStage:
        """Build the layers of a stage's chunk: split over tensor-parallel ranks, compiled, sharded, in this order."""
        job, layout = self.job, self.job.parallel.layout
        gpt = build_model(job.model, seed, self.device, half_blocks(layers_of(job, stage, chunk)))
        if job.model.dtype == "float64":
            gpt.double()
        module = NativeStage(gpt, layout.tp)
        if layout.tp > 1:
            _spread(module, self.mesh["tp"])
        if job.model.compile:
            for block in module.blocks.values():
                block.compile(dynamic=False)
        _shard(module, self.mesh["dp"], job)
        return module

    def _accumulate(self, batches: Sequence[MicroBatch]) -> Tensor:
        [module], total = self.modules, self._zero()
        for index, (tokens_BT, targets_BT) in enumerate(batches):
            is_last = index == len(batches) - 1
            module.set_requires_gradient_sync(is_last)  # type: ignore[operator]
            module.set_reshard_after_backward(is_last)  # type: ignore[operator]
            loss = self.loss(module(tokens_BT), targets_BT) / len(batches)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.detach()
        return total

    def _run_pipeline(self, batches: Sequence[MicroBatch]) -> Tensor:
        if self._schedule is None:
            self._schedule = self._open_schedule(len(batches))
        losses: list[Tensor] = []
        inputs = [torch.cat([tokens_BT for tokens_BT, _ in batches])] if self.is_first else []
        ends = {}
        if self.is_last:
            ends = {"target": torch.cat([targets_BT for _, targets_BT in batches]), "losses": losses}
        self._schedule.step(*inputs, **ends, return_outputs=False)
        return sum((loss.detach() / len(batches) for loss in losses), self._zero())

    def _open_schedule(self, count: int) -> Any:
        from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B

        layout, mesh = self.job.parallel.layout, self.mesh["pp"]
        stages: list[Any] = [
            PipelineStage(
                module,
                chunk * layout.pp + mesh.get_local_rank(),
                layout.pp * layout.vpp,
                self.device,
                group=mesh.get_group(),
            )
            for chunk, module in enumerate(self.modules)
        ]
        if layout.vpp == 1:
            return Schedule1F1B(stages[0], count, loss_fn=self.loss)
        return ScheduleInterleaved1F1B(stages, count, loss_fn=self.loss)

    def _clip(self, max_norm: float) -> None:
        parameters = list(self._parameters())
        norm = torch.nn.utils.get_total_norm([each.grad for each in parameters if each.grad is not None])
        whole = norm.full_tensor() if isinstance(norm, DTensor) else norm
        if self.job.parallel.pp > 1:
            squared = whole.square()
            dist.all_reduce(squared, group=self.mesh["pp"].get_group())
            whole = squared.sqrt()
        torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, whole)

    def _parameters(self) -> Iterable[nn.Parameter]:
        return (parameter for module in self.modules for parameter in module.parameters())

    def _zero(self) -> Tensor:
        wide = torch.promote_types(getattr(torch, self.job.model.dtype), torch.float32)
        return torch.zeros((), dtype=wide, device=self.device)


@functools.cache
def _mesh(device_type: str, layout: ParallelLayout) -> DeviceMesh:
    """Ranks as `ParallelLayout` orders them; once a process, for its groups stay."""
    return init_device_mesh(device_type, (layout.pp, layout.dp, layout.tp), mesh_dim_names=("pp", "dp", "tp"))


def _spread(module: NativeStage, mesh: DeviceMesh) -> None:
    """Tensor with sequence parallelism: between the linears a rank has some of the positions."""
    positions = Shard(0)
    block_plan: dict[str, ParallelStyle] = {}
    for name in ("norm", "mlp_norm"):
        block_plan[name] = SequenceParallel(sequence_dim=0)
    for name in ("qkv", "up"):
        block_plan[f"{name}.0"] = ColwiseParallel(input_layouts=positions)
    for name in ("out", "down"):
        block_plan[f"{name}.0"] = RowwiseParallel(output_layouts=positions)
    for block in module.blocks.values():
        assert isinstance(block, NativeBlock)
        parallelize_module(block, mesh, block_plan)
        for name, bias in block.biases():
            if name in ("qkv", "up"):
                bias.weight = nn.Parameter(distribute_tensor(bias.weight, mesh, [Shard(0)]))
            else:
                parallelize_module(bias, mesh, SequenceParallel(sequence_dim=0, use_local_output=True))
    ends: dict[str, ParallelStyle] = {}
    if module.embedding is not None and module.positions is not None:
        ends["embedding"] = RowwiseParallel(input_layouts=Replicate(), output_layouts=positions)
        own = distribute_tensor(module.positions.weight, mesh, [positions])
        module.positions.weight = nn.Parameter(own)
    if module.head is not None:
        ends["norm"] = SequenceParallel(sequence_dim=0)
        ends["head"] = ColwiseParallel(input_layouts=positions, output_layouts=Shard(-1), use_local_output=False)
    if ends:
        parallelize_module(module, mesh, ends)


def _shard(module: NativeStage, mesh: DeviceMesh, job: JobConfig) -> None:
    """FSDP2 with parameters gathered from the forward to the backward pass."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    dtype = getattr(torch, job.model.dtype)
    reduce_dtype = dtype if job.model.dtype == "float64" else getattr(torch, job.overlap.reduce_dtype)
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce_dtype)
    ends: list[list[nn.Module]] = [
        [each for each in (module.embedding, module.positions) if each is not None],
        [each for each in (module.norm, module.head) if each is not None],
    ]
    units: list[Any] = [*module.blocks.values(), *(end for end in ends if end), module]
    for unit in units:
        fully_shard(unit, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


def _switch_asynchronous(on: bool) -> bool:
    """Set whether torch.compile pipelines tensor-parallel communication with matmuls; return the previous setting."""
    from torch._inductor import config

    before = bool(config._micro_pipeline_tp)
    config._micro_pipeline_tp = on
    return before


def _enable_symmetric_memory(mesh: DeviceMesh) -> None:
    from torch.distributed import _symmetric_memory

    enable: Any = _symmetric_memory.enable_symm_mem_for_group
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # newer torch does it by itself
        enable(mesh.get_group().group_name)
