"""Runs cases among ranks: functions `case(rank, world_size)` of a module, which raise where they fail.

Ranks are started once for all cases, and once more for those behind a case that hangs or ends a rank: the outcome of
each is on disk as soon as it is known.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from _pytest.mark import ParameterSet

from collectives.sharded.prepare import open_groups
from netlayer.store.meeting import meeting_place, register_schemes
from tests.collectives.ranks import run_ranks

CASE_LIMIT_S = 120.0
"""After which a rank writes where it stands, and ends. Every timeout of a collective is shorter."""
_MOST_STARTS = 5  # where nearly every case ends its ranks, the first ones say why

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


def play(cases: Sequence[Case], ranks: Ranks, limit_s: float) -> dict[Case, list[Outcome]]:
    """What each rank has to say of every case, in rank order.

    Args:
        limit_s: of all cases together; those that have not run by then have failed.
    """
    end_s = time.monotonic() + limit_s
    outcomes: dict[Case, list[Outcome]] = {}
    for _ in range(_MOST_STARTS):
        left = [case for case in cases if case not in outcomes]
        if left and time.monotonic() < end_s:
            outcomes |= zip(left, _play_once(left, ranks, end_s - time.monotonic()), strict=False)
    never = ["not run: cases before it took all the time, or ended their ranks too often"] * ranks[0]
    return {case: outcomes.get(case, never) for case in cases}


def _play_once(cases: Sequence[Case], ranks: Ranks, limit_s: float) -> list[list[Outcome]]:
    """In one start of the ranks: as many cases as that brings, one at least."""
    (world_size, device), trouble = ranks, ""
    with tempfile.TemporaryDirectory() as folder:
        try:
            with meeting_place() as place:
                calls = [Call(case.__module__, case.__name__, place.init_method(case.__name__)) for case in cases]
                run_ranks(run_cases, world_size, (calls, device, folder), limit_s=limit_s)
        except AssertionError as exc:
            trouble = str(exc)
        by_rank = [_read(folder, rank) for rank in range(world_size)]
    found = [list(row) for row in zip(*by_rank, strict=False)]
    says_itself = device == "cuda" and bool(found) and any(found[-1])  # a case that fails there ends the ranks
    if trouble and not says_itself:
        last = min(len(found), len(cases) - 1)
        said = [outcomes[last] if last < len(outcomes) else "" for outcomes in by_rank]
        found[last:] = [[outcome or trouble for outcome in said]]
    return found


def run_cases(rank: int, world_size: int, calls: Sequence[Call], device: str, folder: str) -> None:
    """On one rank: each case in a world of its own, so that one that fails leaves the next alone.

    On CUDA one that fails ends the ranks: a peer may spin in a kernel for this rank, and nothing would free it.
    """
    functions = [getattr(importlib.import_module(call.module), call.name) for call in calls]
    warnings.simplefilter("error")
    warnings.filterwarnings("ignore", category=DeprecationWarning, module=r"torch\.")  # what torch does to itself
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
        # A process that hangs is ended by torch's watchdog, which first waits for four times as long as it may dump.
        os.environ |= {"TORCH_NCCL_DUMP_ON_TIMEOUT": "0", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "500"}
        torch.set_default_device(device)  # a mode that every call of torch passes, a third of the time on a CPU
    for call, function in zip(calls, functions, strict=True):
        begin_s = time.monotonic()
        print("case", call.name, file=sys.stderr)
        faulthandler.dump_traceback_later(CASE_LIMIT_S, exit=True, file=2)
        outcome = _in_a_world(call, function, rank, world_size, device)
        if outcome and device == "cuda":
            _note(folder, rank, outcome)
            raise RuntimeError(f"{call.name} has failed")
        dist.destroy_process_group()  # waits on NCCL for what not every rank has launched: that is the case's fault
        _note(folder, rank, outcome)
        print(f"    {time.monotonic() - begin_s:.1f} s", file=sys.stderr)
    faulthandler.cancel_dump_traceback_later()


def _in_a_world(call: Call, function: Case, rank: int, world_size: int, device: str) -> Outcome:
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
    shares = device == "cuda" and not hasattr(function, "opens_groups")
    with sharing_groups() if shares else nullcontext():
        return outcome_of(function, rank, world_size)


@contextmanager
def sharing_groups() -> Iterator[None]:
    """Wrappers of one case take turns on the same groups: NCCL needs a fraction of a second for a communicator."""
    made: dict[tuple[tuple[str, ...], bool], list[dist.ProcessGroup | None]] = {}

    def open_once(
        group: dist.ProcessGroup | None,
        device: torch.device,
        names: Sequence[str],
        timeout: Any = None,
        windows: bool = False,
    ) -> Any:
        if group is not None or timeout is not None:
            return open_groups(group, device, names, timeout, windows)
        key = tuple(names), windows
        if key not in made:
            made[key] = open_groups(group, device, names, windows=windows)
        return made[key]

    with mock.patch("collectives.sharded.prepare.open_groups", open_once):
        yield


def opens_groups(case: Case) -> Case:
    """A case whose wrappers shall not share groups, also where that costs time."""
    case.opens_groups = True  # type: ignore[attr-defined]
    return case


def meet(place: str) -> None:
    """Wait on the host until every rank has come here: on a device, a barrier would join what runs there."""
    store = dist.distributed_c10d._get_default_store()
    ranks = range(dist.get_world_size())
    store.set(f"{place}/{dist.get_rank()}", "here")
    store.wait([f"{place}/{rank}" for rank in ranks], timedelta(seconds=30))


def _note(folder: str, rank: int, outcome: Outcome) -> None:
    with _file(folder, rank).open("a") as file:
        file.write(json.dumps(outcome) + "\n")


def _read(folder: str, rank: int) -> list[Outcome]:
    """Of one rank, case by case; without a line that it was ended in."""
    file = _file(folder, rank)
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def _file(folder: str, rank: int) -> Path:
    return Path(folder, f"outcomes{rank}")


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
