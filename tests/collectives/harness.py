"""Runs cases among ranks: functions `case(rank, world_size)` of a module, which raise where they fail."""

from __future__ import annotations

import importlib
import traceback
import warnings
from collections.abc import Callable, Collection, Sequence
from datetime import timedelta
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist
from _pytest.mark import ParameterSet

from netlayer.meeting import register_schemes

Case = Callable[[int, int], None]
Outcome = str
"""Empty, or a traceback."""
Ranks = tuple[int, str]
"""How many, and on which device."""
NUM_GPUS = torch.cuda.device_count()


def on_ranks(
    cases: Sequence[Case], worlds: Sequence[ParameterSet], many: Collection[str], rare: Collection[str] = ()
) -> list[ParameterSet]:
    """(case, ranks) for `parametrize`: each case in each of `worlds`.

    A CI run has each case among two ranks, but those that are `rare`, which it has in one process. Among more ranks it
    has those named in `many`, which more ranks put to another test (names that lists of ranks have, orders that only
    three can mix up). The others are `slow` there.
    """
    unknown = {*many, *rare} - {case.__name__ for case in cases}
    assert not unknown, f"no cases: {sorted(unknown)}"
    found = []
    for world in worlds:
        ((size, device),) = world.values
        for case in cases:
            is_slow = device == "cpu" and (case.__name__ in rare or (size > 2 and case.__name__ not in many))
            marks = (*world.marks, *([pytest.mark.slow] if is_slow else []))
            found.append(pytest.param(case, (size, device), marks=marks, id=f"{case.__name__}-{world.id}"))
    return found


class Call(NamedTuple):
    """A case by the names of its module and its function, and where its ranks meet."""

    module: str
    name: str
    init_method: str


def on_gpus(count: int) -> tuple[pytest.MarkDecorator, ...]:
    """Marks of what needs so many GPUs."""
    missing = pytest.mark.skipif(count > NUM_GPUS, reason=f"needs {count} CUDA devices, found {NUM_GPUS}")
    return (pytest.mark.gpu, pytest.mark.multi_gpu, missing)


def run_cases(rank: int, world_size: int, calls: Sequence[Call], device: str) -> list[Outcome]:
    """On one rank: each case in a world of its own, so that one that fails leaves the next alone."""
    functions = [getattr(importlib.import_module(call.module), call.name) for call in calls]
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch\.")  # what torch does to itself
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    torch.set_default_device(device)
    outcomes = []
    for call, function in zip(calls, functions, strict=True):
        register_schemes(call.init_method)
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            init_method=call.init_method,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=30),
            # Both ways of NCCL: communicators made for pairs when they are first used, and for all at once.
            device_id=torch.device("cuda", rank) if device == "cuda" and world_size > 2 else None,
        )
        torch.manual_seed(1000 + rank)  # another one on each rank: what must agree has to be made to agree
        outcomes.append(outcome_of(function, rank, world_size))
        dist.destroy_process_group()
    return outcomes


def outcome_of(function: Callable[..., None], *args: object) -> Outcome:
    try:
        function(*args)
    except Exception:  # noqa: BLE001 - the parent shows it, and the log if other ranks hang for it
        traceback.print_exc()
        return traceback.format_exc()
    return ""


def assert_passed(outcomes: Sequence[Outcome]) -> None:
    """Of all ranks, in rank order."""
    failed = [f"rank {rank}: {outcome}" for rank, outcome in enumerate(outcomes) if outcome]
    assert not failed, "\n".join(failed)
