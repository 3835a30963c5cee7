"""What a worker measures, by name: arguments in, rows out. `collectives.health` does it; the training step is here.

Left out: what a figure means.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from collectives import health
from collectives.health_trial import device_name, gather, make_row
from collectives.pair_link import Tap

Rows = list[dict[str, Any]]
_WIDTH, _BATCH, _LEARNING_RATE = 64, 16, 0.05


def run_probe(name: str, device: torch.device, args: Mapping[str, Any], tap: Tap | None = None) -> Rows:
    """The rows of one probe; those of a group come the same on all of its ranks.

    `tap` stands between pairs and NCCL where they call it directly.
    """
    return PROBES[name](device, args, tap)


def _gemm(device: torch.device, args: Mapping[str, Any], _tap: Tap | None) -> Rows:
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    how = {"budget_s": args["budget_s"], "num_blocks": args.get("blocks", 0), "warmup_s": args.get("warmup_s", 0.0)}
    rows = health.gemm(device, args["size"], dtype, args["repeats"], **how)
    return [dict(row) for row in rows]


def _copy(device: torch.device, args: Mapping[str, Any], _tap: Tap | None) -> Rows:
    how = {"budget_s": args["budget_s"], "num_blocks": args.get("blocks", 0)}
    return [dict(row) for row in health.copy(device, args["bytes"], args["repeats"], **how)]


def _host(_device: torch.device, args: Mapping[str, Any], _tap: Tap | None) -> Rows:
    return [dict(row) for row in health.host_pauses(args["budget_s"])]


Probe = Callable[[torch.device, Mapping[str, Any], Tap | None], Rows]


def _grouped(check: Callable[..., list[health.HealthRow]]) -> Probe:
    def probe(device: torch.device, args: Mapping[str, Any], _tap: Tap | None) -> Rows:
        how = {"graph_calls": args["graph_calls"]} if "graph_calls" in args else {}
        rows = check(_world(), args["bytes"], args["repeats"], budget_s=args["budget_s"], **how)
        facts = _of_nccl(os.environ) if device.type == "cuda" else {}
        return [dict(row) | facts for row in rows]

    return probe


def _of_nccl(environ: Mapping[str, str]) -> dict[str, int | bool]:
    """What expectations are keyed by; whether NVLS is on is known only where it is forbidden."""
    version: tuple[int, ...] = torch.cuda.nccl.version()  # type: ignore[no-untyped-call]
    major, minor, patch = version[:3]
    facts: dict[str, int | bool] = {"nccl": major * 10000 + minor * 100 + patch, "graph": False}
    return facts | ({"nvls": False} if environ.get("NCCL_NVLS_ENABLE") == "0" else {})


def _pairs(device: torch.device, args: Mapping[str, Any], tap: Tap | None) -> Rows:
    """`only`, where it is given, names ranks of the run; pairs of which one is not in the group are left out."""
    places = {rank: place for place, rank in enumerate(args["members"])}
    only = [(places[low], places[high]) for low, high in args.get("only", ()) if {low, high} <= places.keys()]
    how: dict[str, Any] = {"only": only, "eager": args.get("eager", False), "tap": tap}
    how["messages"] = args.get("messages")
    rows = health.pairs(_world(), args["bytes"], args["repeats"], budget_s=args["budget_s"], **how)
    facts = _of_nccl(os.environ) if device.type == "cuda" else {}
    return [dict(row) | facts for row in rows]


def _world() -> dist.ProcessGroup:
    world = dist.group.WORLD
    assert world is not None
    return world


def _train(device: torch.device, args: Mapping[str, Any], _tap: Tap | None) -> Rows:
    """Data-parallel steps of a small perceptron; wrong where they differ from one rank's steps over the whole batch."""
    rank, ranks, steps = dist.get_rank(), dist.get_world_size(), args["repeats"]
    dice = torch.Generator("cpu").manual_seed(7)
    x_BD = torch.randn(_BATCH * ranks, _WIDTH, generator=dice).to(device)
    y_B1 = x_BD[:, :1].sin()
    start = [(torch.randn(_WIDTH, width, generator=dice) / 8).to(device) for width in (_WIDTH, 1)]
    ours, alone = ([weight.clone().requires_grad_() for weight in start] for _ in range(2))
    part = slice(rank * _BATCH, (rank + 1) * _BATCH)
    times_us, losses = [], []
    for _ in range(steps):
        began_s = time.perf_counter()
        losses.append(_step(ours, x_BD[part], y_B1[part], ranks))
        times_us.append(1e6 * (time.perf_counter() - began_s))
        _step(alone, x_BD, y_B1, 1)
    near = [torch.isclose(mine, one, rtol=1e-3, atol=1e-5) for mine, one in zip(ours, alone, strict=True)]
    wrong = sum(int((~same).sum()) for same in near)
    size_bytes = sum(weight.nbytes for weight in ours)
    row = make_row("train", rank, device_name(device), size_bytes, times_us[1:], wrong)
    return gather({**row, "first_loss": losses[0], "last_loss": losses[-1]}, _world())


def _step(weights: list[Tensor], x_BD: Tensor, y_B1: Tensor, ranks: int) -> float:
    """Forward, backward, the mean of the gradients over ranks in one bucket, update. Returns the loss."""
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
