"""Start of a rank up to the end of its first step, by three ways of making its groups, each part timed.

`baseline` and `torch` are today's torch (`init_process_group`, `init_device_mesh`), the first with a barrier of all
ranks after each group, as the paper's baseline has it; `torch-lazy` is torch with TORCH_GLOO_LAZY_INIT=1, which ours
has too; `ours` is `netlayer.rendezvous`. All groups are then used, and the sums checked. Not covered: data, and
checkpoints other than one plain file a rank.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import device_mesh
from torch.distributed import distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh

from bench.init_time.traffic import LAZY, Method
from collectives.transport.nodes import virtual_node_environ
from netlayer.errors import CheckFailed, HardwareMissing
from netlayer.launch.rank import RankContext
from netlayer.layout import DIMENSIONS, ParallelLayout
from netlayer.rendezvous import open_world
from netlayer.store.meeting import register_schemes

READY, STANDS = "ready", "stands"
_POLL_S = 0.002
_WIDTH = 256  # of the model of the first step


@dataclass(frozen=True)
class Order:
    """Order to all ranks: which groups they make, and how.

    Args:
        layout: of the groups.
        method: how they are made.
        init_method: where ranks meet.
        backend: gloo or nccl.
        eager: make NCCL's communicators at once.
        started_s: when the ranks were launched, of `time.time`.
        gate: a file; ranks that are ready wait until it is there.
        end: a file; with `is_recorded` ranks whose groups stand wait for it: gloo's connections end with a process.
        checkpoint: a file that each rank loads; None: none.
        timeout_s: of store and groups.
        is_recorded: end when the groups stand: what follows is no part of the recording.
    """

    layout: ParallelLayout
    method: Method
    init_method: str
    backend: str
    eager: bool
    started_s: float
    gate: Path
    end: Path
    checkpoint: Path | None
    timeout_s: float
    is_recorded: bool = False


@dataclass
class Parts:
    """Seconds of one rank.

    Args:
        start_s: from the launch until it is ready: the process, imports, what torch and a GPU load on first use.
        gate_s: until the last rank is ready.
        groups_s: store and groups without `backend_s`.
        backend_s: in the constructors of torch's communicators, and in splits.
        groups_cpu_s, backend_cpu_s: processor time of both.
        first_s: every group used once.
        checkpoint_s: one file loaded.
        step_s: one step.
        whole_s: from the gate to the end of the step.
        launched_s: from the launch to the end of the step, the gate among it.
    """

    start_s: float = 0.0
    gate_s: float = 0.0
    groups_s: float = 0.0
    groups_cpu_s: float = 0.0
    backend_s: float = 0.0
    backend_cpu_s: float = 0.0
    first_s: float = 0.0
    checkpoint_s: float = 0.0
    step_s: float = 0.0
    whole_s: float = 0.0
    launched_s: float = 0.0


def start(context: RankContext, order: Order) -> dict[str, float]:
    """One rank; its `Parts` as a dict.

    Raises:
        CheckFailed: an all-reduce in one of its groups gave another sum than its members'.
    """
    rank, parts = context.env.rank, Parts()
    device = torch.device("cpu")
    if order.backend == "nccl":
        gpus = torch.cuda.device_count()
        if not gpus:
            raise HardwareMissing("backend nccl: needs an NVIDIA GPU, and there is none; --backend gloo runs on CPUs")
        if gpus < order.layout.world_size:  # each a host to NCCL, which else refuses two ranks of one GPU
            os.environ.update(virtual_node_environ(rank))
        device = torch.device("cuda", context.env.local_rank % gpus)
        torch.cuda.set_device(device)
    register_schemes(order.init_method)
    _step(None, device)  # what torch loads for its first step, and a GPU's context, are part of the start
    parts.start_s = time.time() - order.started_s
    context.report(READY)
    with _timed(parts, "gate"):
        _await(order.gate)
    began = time.perf_counter()
    groups = _make_groups(order, rank, device, parts)
    if order.is_recorded:
        context.report(STANDS)
        _await(order.end)
        return {}
    with _timed(parts, "first"):
        _use(groups, order.layout, rank, device)
    if order.checkpoint:
        with _timed(parts, "checkpoint"):
            torch.load(order.checkpoint, map_location=device, weights_only=True)
    with _timed(parts, "step"):
        _step(groups["dp"], device)
    parts.whole_s, parts.launched_s = time.perf_counter() - began, time.time() - order.started_s
    dist.destroy_process_group()
    return asdict(parts)


def _await(file: Path) -> None:
    while not file.exists():
        time.sleep(_POLL_S)


def _make_groups(order: Order, rank: int, device: torch.device, parts: Parts) -> dict[str, Any]:
    """Make the process groups, by `rendezvous` or by torch's device mesh, and note the seconds of it in `parts`."""
    timeout = timedelta(seconds=order.timeout_s)
    bound = device if order.eager else None
    with _backend_timed(parts), _timed(parts, "groups"):
        if order.method == "ours":
            groups: dict[str, Any] = dict(
                open_world(
                    order.layout,
                    backend=order.backend,
                    init_method=order.init_method,
                    rank=rank,
                    device=bound,
                    bound=order.eager,
                    timeout=timeout,
                )
            )
        else:
            dist.init_process_group(
                order.backend,
                init_method=order.init_method,
                rank=rank,
                world_size=order.layout.world_size,
                timeout=timeout,
                device_id=bound,
            )
            shape = (order.layout.pp, order.layout.dp, order.layout.tp)
            mesh = init_device_mesh(device.type, shape, mesh_dim_names=("pp", "dp", "tp"))
            groups = {name: mesh.get_group(name) for name in DIMENSIONS}
    parts.groups_s -= parts.backend_s
    parts.groups_cpu_s -= parts.backend_cpu_s
    return groups


def _use(groups: dict[str, Any], layout: ParallelLayout, rank: int, device: torch.device) -> None:
    for name, group in groups.items():
        members = layout.group_of(name, rank)  # type: ignore[arg-type]
        if group is None or len(members) == 1:
            continue
        total = torch.tensor([float(rank)], device=device)
        dist.all_reduce(total, group=group)
        if int(total) != sum(members):
            raise CheckFailed(f"group {name} of rank {rank}: sum {int(total)}, its members' is {sum(members)}")


def _step(group: dist.ProcessGroup | None, device: torch.device) -> None:
    model = torch.nn.Linear(_WIDTH, _WIDTH, device=device)
    model(torch.ones(_WIDTH, _WIDTH, device=device)).sum().backward()
    with torch.no_grad():  # by hand: torch's optimisers load its compiler, seconds of a start
        for parameter in model.parameters():
            if group is not None:
                dist.all_reduce(parameter.grad, group=group)
            parameter.add_(parameter.grad, alpha=-0.1)  # type: ignore[arg-type]
    if device.type == "cuda":
        torch.cuda.synchronize()


@contextmanager
def _timed(parts: Parts, name: str) -> Iterator[None]:
    began, cpu = time.perf_counter(), time.process_time()
    yield
    setattr(parts, f"{name}_s", getattr(parts, f"{name}_s") + time.perf_counter() - began)
    if hasattr(parts, f"{name}_cpu_s"):
        setattr(parts, f"{name}_cpu_s", getattr(parts, f"{name}_cpu_s") + time.process_time() - cpu)


@contextmanager
def _backend_timed(parts: Parts) -> Iterator[None]:
    """Count what torch spends in the constructors of its backends, and in splits, as `backend_s`."""
    made = {name: getattr(c10d, name) for name in ("ProcessGroupGloo", "ProcessGroupNCCL") if hasattr(c10d, name)}
    splitters = [module for module in (dist, c10d, device_mesh) if hasattr(module, "split_group")]
    split = c10d.split_group

    def counting(constructor: Any) -> Any:
        class Counting(constructor):  # type: ignore[misc] # isinstance of torch must hold
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                with _timed(parts, "backend"):
                    super().__init__(*args, **kwargs)

            def eager_connect_single_device(self, device: torch.device) -> None:
                with _timed(parts, "backend"):
                    super().eager_connect_single_device(device)

        return Counting

    def timed_split(*args: Any, **kwargs: Any) -> Any:
        with _timed(parts, "backend"):
            return split(*args, **kwargs)

    for name, constructor in made.items():
        setattr(c10d, name, counting(constructor))
    for module in splitters:
        module.split_group = timed_split  # type: ignore[attr-defined]
    try:
        yield
    finally:
        for name, constructor in made.items():
            setattr(c10d, name, constructor)
        for module in splitters:
            module.split_group = split  # type: ignore[attr-defined]


def environ(method: Method, backend: str) -> dict[str, str]:
    """Variables of the ranks: what the paper's baseline sets, and connections on first use where ours are."""
    threads = {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
    if method == "baseline":
        return {**threads, "TORCH_DIST_INIT_BARRIER": "1", "USE_LIBUV": "0"}
    return {**threads, "TORCH_GLOO_LAZY_INIT": "1"} if method in LAZY and backend == "gloo" else threads
