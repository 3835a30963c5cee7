"""What ranks do in the tests of layouts: the same steps in every layout, and what came out as one process has it."""

from __future__ import annotations

import contextlib
import functools
import math
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._dynamo.utils import counters

from collectives.sharded.slot import DeferredWeightGrads
from collectives.sharded.state import gather_whole
from collectives.tensor import gemm
from collectives.transport.nodes import virtual_node_environ
from netlayer.config.tree import JobConfig
from netlayer.launch.rank import RankContext
from netlayer.layout import ParallelLayout
from netlayer.rendezvous import create_groups, open_world
from tests.collectives.stand_ins import Summed, windows_nowhere
from trainer.checkpoint import restore
from trainer.checkpoint import save as checkpoint
from trainer.checkpoint.meta import find
from trainer.model.gpt import Block
from trainer.model.linears import parts
from trainer.optim import build_optimizer
from trainer.parallel import Optimizers, ParallelModel, further_groups
from trainer.step import GraphedSteps, Steps

State = dict[str, Tensor]
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Trained:
    """Losses and norms by step; gradients of the first and the last step and the parameters at the end, whole."""

    losses: list[float]
    norms: list[float]
    gradients: list[State]
    parameters: State
    evaluation: float


@dataclass(frozen=True)
class Opened:
    """Streams asked for; threads of links while they were used, and the names of those left after `close`."""

    num_streams: int
    num_threads: int
    left: list[str]


def run_rank(
    context: RankContext, jobs: Sequence[JobConfig], steps: int, url: str, backend: str = "gloo"
) -> list[Trained]:
    """Every job one after the other, on all ranks of the world."""
    with _world(context, url, backend) as device:
        return [train(job, context.env.rank, steps, device=device) for job in jobs]


def in_turn(context: RankContext, calls: Sequence[tuple[Callable[..., Any], Sequence[Any], str]]) -> list[Any]:
    """What several of the functions below give, each with its arguments and a place to meet: torch is imported once."""
    return [function(context, *args, url) for function, args, url in calls]


@contextlib.contextmanager
def _world(context: RankContext, url: str, backend: str = "gloo") -> Iterator[torch.device]:
    torch.set_num_threads(1)
    env, device = context.env, torch.device("cpu")
    if backend == "nccl":
        gpus = torch.cuda.device_count()
        if gpus < env.local_world_size:  # NCCL lets ranks share a GPU where it takes them for ranks of several hosts
            os.environ.update(virtual_node_environ(env.rank))
        device = torch.device("cuda", env.local_rank % gpus)
        torch.cuda.set_device(device)
    bound = device if backend == "nccl" else None
    open_world(ParallelLayout(dp=env.world_size), backend=backend, init_method=url, rank=env.rank, device=bound)
    try:
        yield device
    finally:
        dist.destroy_process_group()


def opened(context: RankContext, jobs: Sequence[JobConfig], url: str) -> list[Opened]:
    """What each job opens: trained with two numbers of micro-batches, and evaluated, so with three channels."""
    with _world(context, url):
        return [_opened(job, context.env.rank) for job in jobs]


def _opened(job: JobConfig, rank: int) -> Opened:
    counted = mock.Mock(return_value=None)  # as on the CPU
    before = _threads()
    with (
        mock.patch("collectives.transport.communicator.new_stream", counted),
        mock.patch("collectives.pipeline.links.new_stream", counted),
    ):
        model = ParallelModel(job, 3, rank, torch.device("cpu"), create_groups(job.parallel.layout))
        optimizer = model.optimizer(lambda chunk: build_optimizer(job.optimizer, chunk))
        own = batches(job, 1, model.data_rank)
        for step, part in enumerate((own, own[: len(own) // 2])):
            model.start_step(step)
            model.accumulate(part)
            model.finish_gradients()
            optimizer.step()
            optimizer.zero_grad()
        model.evaluate(own)
    under_way = _threads() - before
    for _ in range(2):
        model.close()
    return Opened(counted.call_count, len(under_way), sorted(thread.name for thread in _threads() - before))


def alive_in_evaluation(context: RankContext, job: JobConfig, count: int, url: str) -> int:
    """Most outputs of this stage that were there at once in an evaluation whose last stage is late."""
    alive, most = 0, 0

    def forget() -> None:
        nonlocal alive
        alive -= 1

    def note(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        nonlocal alive, most
        weakref.finalize(output.untyped_storage(), forget)
        alive += 1
        most = max(most, alive)

    with _world(context, url):
        model = ParallelModel(job, 3, context.env.rank, CPU, create_groups(job.parallel.layout))
        (chunk,) = model.chunks
        chunk.register_forward_hook(note)
        if model.place.pp:
            chunk.register_forward_pre_hook(lambda *_: time.sleep(0.02))
        model.evaluate(batches(job, 1, 0) * count)
        model.close()
    return most


def _threads() -> set[threading.Thread]:
    """Not their names, which threads of a model that was never closed have too."""
    return set(threading.enumerate())


def compiled(context: RankContext, jobs: Sequence[JobConfig], steps: int, url: str) -> list[Trained]:
    """As `run_rank`, its graphs run by torch: a C++ compiler would take most of the time."""
    with mock.patch.object(Block, "compile", functools.partialmethod(nn.Module.compile, backend="eager")):
        found = run_rank(context, jobs, steps, url)
    assert counters["stats"]["unique_graphs"] > 0
    assert counters["frames"]["total"] == counters["frames"]["ok"]
    return found


def copied(context: RankContext, jobs: Sequence[JobConfig], steps: int, url: str) -> list[Trained]:
    """As `run_rank`, as where windows are taken and copy engines carry gradients to the peers."""
    with (
        mock.patch.object(ParallelModel, "_takes_windows", return_value=True),
        mock.patch.object(ParallelModel, "_takes_peer_reduce", lambda model: model.job.overlap.peer_reduce),
        mock.patch("collectives.sharded.collectives.why_unusable", return_value=None),
        windows_nowhere(),
        mock.patch("collectives.sharded.collectives.PeerReduce", side_effect=Summed) as opened,
    ):
        found = run_rank(context, jobs, steps, url)
    assert opened.call_count == sum(job.parallel.vpp * job.overlap.peer_reduce for job in jobs)
    return found


@dataclass(frozen=True)
class DeferredSteps:
    """What training gave, and how many products of weights waited on this rank."""

    trained: Trained
    num_deferred: int


def deferred(context: RankContext, jobs: Sequence[JobConfig], steps: int, url: str) -> list[DeferredSteps]:
    found = []
    with _world(context, url):
        for job in jobs:
            with mock.patch.object(
                DeferredWeightGrads, "add", autospec=True, side_effect=DeferredWeightGrads.add
            ) as added:
                found.append(DeferredSteps(train(job, context.env.rank, steps), added.call_count))
    return found


@dataclass(frozen=True)
class Slotted:
    """The same training with weights' gradients written into their slots, how many were, and with none of them."""

    written: Trained
    num_written: int
    handed: Trained


def slotted(context: RankContext, jobs: Sequence[JobConfig], steps: int, url: str) -> list[Slotted]:
    """Of tensor-parallel linears: as it is, and with every gradient handed to autograd."""
    with _world(context, url):
        return [_slotted(job, context.env.rank, steps) for job in jobs]


def _slotted(job: JobConfig, rank: int, steps: int) -> Slotted:
    with mock.patch.object(gemm, "add_matmul", wraps=gemm.add_matmul) as added:
        written, num_written = train(job, rank, steps), added.call_count
        with mock.patch("collectives.tensor.linear.slot_source", return_value=None):
            handed = train(job, rank, steps)
        assert added.call_count == num_written
    return Slotted(written, num_written, handed)


def go_on(
    context: RankContext, jobs: Sequence[JobConfig], steps: int, url: str, folders: Sequence[tuple[Path, Path]]
) -> list[Trained]:
    """Each job from a checkpoint of the first folder to one in the second; one step each."""
    with _world(context, url):
        return [
            train(job, context.env.rank, steps + index, resume=before, save=after)
            for index, (job, (before, after)) in enumerate(zip(jobs, folders, strict=True))
        ]


def train(
    job: JobConfig,
    rank: int,
    steps: int,
    *,
    resume: Path | None = None,
    save: Path | None = None,
    device: torch.device = CPU,
) -> Trained:
    """Some steps on made-up tokens, the same in every layout."""
    layout = job.parallel.layout
    groups = create_groups(layout, more=further_groups(job)) if layout.world_size > 1 else None
    model = ParallelModel(job, 3, rank, device, groups)
    optimizer = model.optimizer(lambda chunk: build_optimizer(job.optimizer, chunk))
    losses, norms, gradients, done = [], [], [], 0
    if resume:
        meta = find(resume)
        restore.load(meta, model, optimizer)
        done = meta.step
    for step in range(done + 1, steps + 1):
        model.start_step(step)
        loss = model.accumulate(batches(job, step, model.data_rank, device, model.place.cp))
        model.finish_gradients()
        if step in (1, steps):
            gradients.append(whole(model, gradients=True))
        norm = model.grad_norm()
        optimizer.clip(norm, job.optimizer.max_grad_norm)
        norms.append(float(norm))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean_loss(model, loss))
    evaluation = mean_loss(model, model.evaluate(batches(job, 0, model.data_rank, device, model.place.cp)))
    if save:
        path = checkpoint.save(model, optimizer, steps, 0, save)
        if rank == 0:
            checkpoint.commit(path, keep=1)
        model.wait_for_all()
    return Trained(losses, norms, gradients, whole(model), evaluation)


def run_graphs(context: RankContext, jobs: Sequence[JobConfig], url: str, backend: str) -> list[tuple[Trained, ...]]:
    """Each job by operation and as graphs."""
    with _world(context, url, backend) as device:
        return [
            tuple(take_steps(job, context.env.rank, device, kind) for kind in (Steps, GraphedSteps)) for job in jobs
        ]


def run_deterministic_graphs(
    context: RankContext, jobs: Sequence[JobConfig], url: str, backend: str
) -> list[tuple[Trained, ...]]:
    torch.use_deterministic_algorithms(True)
    return run_graphs(context, jobs, url, backend)


def run_steps(context: RankContext, jobs: Sequence[JobConfig], url: str, backend: str = "gloo") -> list[Trained]:
    with _world(context, url, backend) as device:
        return [take_steps(job, context.env.rank, device, Steps) for job in jobs]


def take_steps(
    job: JobConfig, rank: int, device: torch.device, kind: Callable[[ParallelModel, Optimizers, float], Steps]
) -> Trained:
    """Six steps of all micro-batches, an evaluation between them, and six of half as many.

    Rates are those that float32 has: in it a graph reads them.
    """
    layout = job.parallel.layout
    groups = create_groups(layout, more=further_groups(job)) if layout.world_size > 1 else None
    model = ParallelModel(job, 3, rank, device, groups)
    optimizer = model.optimizer(
        lambda chunk: build_optimizer(job.optimizer, chunk, step_in_backward=job.overlap.step_in_backward)
    )
    steps = kind(model, optimizer, job.optimizer.max_grad_norm or math.inf)
    losses, norms = [], []
    for step in range(1, 13):
        steps.begin(step)
        own = batches(job, step, model.data_rank, device)
        stepped = steps.run(step, own if step < 7 else own[: len(own) // 2], 2.0**-10 * (1 + step % 4))
        losses.append(mean_loss(model, stepped.loss))
        assert stepped.grad_norm is not None
        norms.append(float(stepped.grad_norm))
        if step in (5, 12):
            losses.append(mean_loss(model, model.evaluate(batches(job, 0, model.data_rank, device))))
    return Trained(losses, norms, [], whole(model), losses[-1])


def batches(job: JobConfig, step: int, dp: int, device: torch.device = CPU, cp: int = 0) -> list[tuple[Tensor, Tensor]]:
    """The micro-batches of a data-parallel rank; of a context-parallel one its chunks of them."""
    batch, generator = job.batch, torch.Generator().manual_seed(step)
    tokens = torch.randint(job.model.vocab_size, (batch.global_batch_size, job.model.seq_len + 1), generator=generator)
    own = tokens.chunk(job.parallel.data_ranks)[dp].to(device).split(batch.micro_batch_size)
    if job.parallel.cp == 1:
        return [(part[:, :-1], part[:, 1:]) for part in own]
    chunk = job.model.seq_len // (2 * job.parallel.cp)
    late = 2 * job.parallel.cp - 1 - cp
    positions = [*range(cp * chunk, (cp + 1) * chunk), *range(late * chunk, (late + 1) * chunk)]
    return [(part[:, positions], part[:, [position + 1 for position in positions]]) for part in own]


def mean_loss(model: ParallelModel, loss: Tensor) -> float:
    total = loss.double() if model.is_last and model.place.tp == 0 else loss.new_zeros((), dtype=torch.float64)
    model.world.all_reduce(total)
    return float(total) / model.layout.gradient_ranks


def whole(model: ParallelModel, *, gradients: bool = False) -> State:
    """Return on rank 0 every parameter as one process has it, or its gradient, from all ranks; nothing on others."""
    own: dict[str, tuple[Any, Any]] = {}
    for chunk in model.chunks:
        cut = parts(chunk.module)
        state: Mapping[str, Tensor]
        if gradients:
            chunk.wait_for_gathers()
            gathered = gather_whole(chunk.buckets, chunk.gather_comm, lambda piece: piece.grad)
            reduced = {name: tensor.clone() for name, tensor in gathered}
            # A tied parameter has two names, as in the state of the module.
            first = {id(parameter): name for name, parameter in chunk.module.named_parameters()}
            every = chunk.module.named_parameters(remove_duplicate=False)
            state = {name: reduced[first[id(parameter)]] for name, parameter in every}
        else:
            state = chunk.full_state_dict()
        own |= {name: (cut.get(name), _to_send(tensor)) for name, tensor in state.items()}
    each: list[dict[str, tuple[Any, Any]]] = [own]
    if model.layout.world_size > 1:
        # To one rank alone: reading the tensors of all others took each rank as long as two steps.
        is_first = dist.get_rank() == 0
        each = [{} for _ in range(model.layout.world_size)]
        dist.gather_object(own, each if is_first else None)
        if not is_first:
            return {}
    found: State = {}
    for stage in range(model.layout.pp):
        ranks = [model.layout.rank(tp=tp, pp=stage) for tp in range(model.layout.tp)]
        for name, (part, _) in each[ranks[0]].items():
            pieces = [torch.as_tensor(each[rank][name][1]) for rank in ranks]
            joined = pieces[0] if part is None else part.join(pieces)
            found[name] = joined[: model.job.model.vocab_size] if name.endswith("tokens.weight") else joined
    return found


def _to_send(tensor: Tensor) -> Any:
    """Return what is pickled in place of it: an array takes a tenth of a tensor's time; NumPy has no bfloat16."""
    host = tensor.detach().cpu()
    return host if host.dtype == torch.bfloat16 else host.numpy()
