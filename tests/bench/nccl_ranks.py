"""What a rank of `test_nccl_gpu` runs: plan after plan in one process, so that ranks start once."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from bench.backends import Control, NcclBackend, meet
from bench.perf import driver
from bench.perf.driver import Plan
from bench.perf.table import Started
from netlayer.launch.rank import RankContext

LIMIT = timedelta(seconds=20)


def run_plans(context: RankContext, plans: Sequence[Plan], url: str) -> list[tuple[list[Any], str]]:
    """For each plan what the ranks reported, and the traceback where it failed."""
    outcomes: list[tuple[list[Any], str]] = []
    with meet(context.env, url, LIMIT) as control:
        for number, plan in enumerate(plans):
            heard: list[Any] = []
            error = _run(RankContext(context.env, heard.append), plan, control)
            outcomes.append((heard if context.env.rank == 0 else [], error))
            if not _in_step(number, context.env.rank, context.env.world_size, error):
                left = "not run: the ranks failed differently in an earlier plan"
                return outcomes + [([], left)] * (len(plans) - len(outcomes))
    return outcomes


def _run(context: RankContext, plan: Plan, control: Control) -> str:
    try:
        backend = NcclBackend.open(context.env, LIMIT, plan.options)
        driver._run_all(context, plan, backend, control)
        backend.close()
    except Exception:  # noqa: BLE001 - the next plan is another test
        return traceback.format_exc()
    finally:
        if torch.cuda.is_available():
            torch.cuda.set_stream(torch.cuda.default_stream())
    return ""


def _in_step(number: int, rank: int, ranks: int, error: str) -> bool:
    """Whether all ranks ended the plan alike, and so can go on to the next."""
    store = dist.distributed_c10d._get_default_store()
    last = error.strip().splitlines()[-1] if error else ""
    store.set(f"plan{number}/{rank}", f"ended: {last}")
    try:
        said = {store.get(f"plan{number}/{each}") for each in range(ranks)}
    except dist.DistStoreError:
        return False
    return len(said) == 1


def rows_of(heard: Sequence[Any]) -> list[tuple[str, dict[str, Any]]]:
    """Each row with the name of its collective."""
    name, rows = "", []
    for message in heard:
        if isinstance(message, Started):
            name = message.name
        else:
            rows.append((name, message.to_row()))
    return rows
