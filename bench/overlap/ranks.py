"""Rank of `bench.overlap`: meet the others, take a device, and measure one technique."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bench.backends import meet
from bench.overlap.dp import Comparison
from bench.overlap.settings import MODULES, Backend, DpSettings, Technique
from netlayer.errors import HardwareMissing
from netlayer.launch.rank import RankContext
from trainer.loop import RankInfo

TIMEOUT = timedelta(minutes=5)


def run_rank(
    context: RankContext, technique: Technique, settings: DpSettings, url: str, backend: Backend, channels: int
) -> list[dict[str, Any]]:
    """Every row of one technique and one limit of channels; the same on every rank.

    Raises:
        CheckFailed: what is compared did not do the same work.
        HardwareMissing: there are fewer GPUs than ranks.
    """
    device = _choose_device(context.env.local_rank, backend)
    with meet(context.env, url, TIMEOUT) as control:
        group = dist.new_group(backend=backend, timeout=TIMEOUT)
        assert isinstance(group, dist.ProcessGroup)
        if technique == "dp":
            place = RankInfo(context.env.rank, context.env.world_size, device)
            rows = Comparison(settings, place, group, control, context.report).run(channels)
        else:
            measure: Callable[..., Sequence[Any]] = importlib.import_module(MODULES[technique]).measure
            rows = [dict(row) for row in measure(group, device, seed=settings.seed)]
    return rows


def _choose_device(local_rank: int, backend: Backend) -> torch.device:
    if backend == "gloo":
        return torch.device("cpu")
    if local_rank >= torch.cuda.device_count():
        raise HardwareMissing(f"rank {local_rank} has no GPU, {torch.cuda.device_count()} found; lower --ranks")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
