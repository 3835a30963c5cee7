"""Probes that a worker runs, by name: `collectives.health.checks` measures, only the training step is implemented here.

Judgement is elsewhere.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.health import checks as health
from collectives.health.trial import device_name, gather, make_row
from collectives.transport.pair_link import Tap

Rows = list[dict[str, Any]]
_WIDTH, _BATCH, _LEARNING_RATE = 64, 16, 0.05


def run_probe(name: str, device: torch.device, args: Mapping[str, Any], tap: Tap | None = None) -> Rows:
    """Run a probe and return its rows, which are the same on all ranks of a group.

    Args:
        name: name of the probe.
        device: device of this rank.
        args: arguments of the probe.
        tap: hook around direct NCCL calls of the pairs probe.
    """
    with _on_core(args["core"] if device.type == "cpu" and "core" in args else None):
        return PROBES[name](device, args, tap)


@contextlib.contextmanager
def _on_core(number: int | None) -> Iterator[None]:
    """Keep this thread on one of the cores that it may use, counted round; leave it alone where that cannot be set.

    A container may forbid it, and cores may be taken away meanwhile: no reason for a rank to fail.
    """
    if number is None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    cores = sorted(os.sched_getaffinity(0))
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, {cores[number % len(cores)]})
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, cores)


def _gemm(device: torch.device, args: Mapping[str, Any], _tap: Tap | None) -> Rows:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    options = {"budget_s": args["budget_s"], "num_blocks": args.get("blocks", 0), "warmup_s": args.get("warmup_s", 0.0)}
    rows = health.gemm(device, args["size"], dtype, args["repeats"], **options)
    return [dict(row) for row in rows]


def _copy(device: torch.device, args: Mapping[str, Any], _tap: Tap | None) -> Rows:
    options = {"budget_s": args["budget_s"], "num_blocks": args.get("blocks", 0)}
    return [dict(row) for row in health.copy(device, args["bytes"], args["repeats"], **options)]


def _host(_device: torch.device, args: Mapping[str, Any], _tap: Tap | None) -> Rows:
    return [dict(row) for row in health.host_pauses(args["budget_s"])]


Probe = Callable[[torch.device, Mapping[str, Any], Tap | None], Rows]


def _grouped(check: Callable[..., list[health.HealthRow]]) -> Probe:
    def probe(device: torch.device, args: Mapping[str, Any], _tap: Tap | None) -> Rows:
        options = {"graph_calls": args["graph_calls"]} if "graph_calls" in args else {}
        rows = check(_world(), args["bytes"], args["repeats"], budget_s=args["budget_s"], **options)
        facts = _nccl_facts(os.environ) if device.type == "cuda" else {}
        return [dict(row) | facts for row in rows]

    return probe


def _nccl_facts(environ: Mapping[str, str]) -> dict[str, int | bool]:
    """Return facts for expectations; the NVLS state is known only if NVLS is disabled."""
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    major, minor, patch = version[:3]
    facts: dict[str, int | bool] = {"nccl": major * 10000 + minor * 100 + patch, "graph": False}
    return facts | ({"nvls": False} if environ.get("NCCL_NVLS_ENABLE") == "0" else {})


def _pairs(device: torch.device, args: Mapping[str, Any], tap: Tap | None) -> Rows:
    """Measure pairs; `only` has ranks of the run, and pairs with a rank outside the group are skipped."""
    places = {rank: place for place, rank in enumerate(args["members"])}
    only = [(places[low], places[high]) for low, high in args.get("only", ()) if {low, high} <= places.keys()]
    options: dict[str, Any] = {"only": only, "eager": args.get("eager", False), "tap": tap}
    options["messages"] = args.get("messages")
    rows = health.pairs(_world(), args["bytes"], args["repeats"], budget_s=args["budget_s"], **options)
    facts = _nccl_facts(os.environ) if device.type == "cuda" else {}
    return [dict(row) | facts for row in rows]


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


def _train(device: torch.device, args: Mapping[str, Any], _tap: Tap | None) -> Rows:
    """Train a small MLP data-parallel; weights that differ from one rank's with the whole batch count as wrong."""
    rank, ranks, steps = dist.get_rank(), dist.get_world_size(), args["repeats"]
    rng = torch.Generator("cpu").manual_seed(7)
    x_BD = torch.randn(_BATCH * ranks, _WIDTH, generator=rng).to(device)
    y_B1 = x_BD[:, :1].sin()
    start = [(torch.randn(_WIDTH, width, generator=rng) / 8).to(device) for width in (_WIDTH, 1)]
    local_weights, reference_weights = ([weight.clone().requires_grad_() for weight in start] for _ in range(2))
    part = slice(rank * _BATCH, (rank + 1) * _BATCH)
    times_us, losses = [], []
    for _ in range(steps):
        began_s = time.perf_counter()
        losses.append(_step(local_weights, x_BD[part], y_B1[part], ranks))
        times_us.append(1e6 * (time.perf_counter() - began_s))
        _step(reference_weights, x_BD, y_B1, 1)
    close = [
        torch.isclose(weight, reference, rtol=1e-3, atol=1e-5)
        for weight, reference in zip(local_weights, reference_weights, strict=True)
    ]
    wrong = sum(int((~same).sum()) for same in close)
    size_bytes = sum(weight.nbytes for weight in local_weights)
    row = make_row("train", rank, device_name(device), size_bytes, times_us[1:], wrong)
    return gather({**row, "first_loss": losses[0], "last_loss": losses[-1]}, _world())


def _step(weights: list[Tensor], x_BD: Tensor, y_B1: Tensor, ranks: int) -> float:
    """Run forward, backward, gradient averaging over ranks in one bucket, and update; return the loss."""
    loss = ((x_BD @ weights[0]).tanh() @ weights[1] - y_B1).square().mean()
    gradients = torch.autograd.grad(loss, weights)
    bucket_N = torch.cat([gradient.reshape(-1) for gradient in gradients])
    if ranks > 1:
        dist.all_reduce(bucket_N)
        bucket_N /= ranks
    with torch.no_grad():
        at = 0
        for weight in weights:
            weight -= _LEARNING_RATE * bucket_N[at : at + weight.numel()].view_as(weight)
            at += weight.numel()
    return float(loss.detach())


PROBES: Mapping[str, Probe] = {
    "host": _host,
    "gemm": _gemm,
    "copy": _copy,
    "all_to_all": _grouped(health.all_to_all),
    "all_reduce": _grouped(health.all_reduce),
    "pairs": _pairs,
    "train": _train,
}
