"""Sharded data parallel among ranks, on gloo and on NCCL; what each case checks stands in cases.py."""

from __future__ import annotations

import pytest
import torch

import tests.collectives.step_cases  # noqa: F401 - adds its cases
from tests.collectives.cases import CASES, GPU_CASES, Case, Outcome
from tests.collectives.conftest import Run

NUM_GPUS = torch.cuda.device_count()
ON_GPUS = (
    pytest.mark.gpu,
    pytest.mark.multi_gpu,
    pytest.mark.skipif(NUM_GPUS < 2, reason=f"needs 2 CUDA devices, found {NUM_GPUS}"),
)
RANKS = [
    pytest.param((2, "cpu"), id="2-gloo"),
    pytest.param((4, "cpu"), id="4-gloo"),
    pytest.param((2, "cuda"), id="2-nccl", marks=ON_GPUS),
]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_among_ranks(case: Case, ranks: tuple[int, str], run_case: Run) -> None:
    _assert_passed(run_case(case, *ranks))


@pytest.mark.parametrize("ranks", RANKS[2:])
@pytest.mark.parametrize("case", GPU_CASES, ids=lambda case: case.__name__)
def test_among_gpus(case: Case, ranks: tuple[int, str], run_case: Run) -> None:
    _assert_passed(run_case(case, *ranks))


def _assert_passed(outcomes: list[Outcome]) -> None:
    failed = [f"rank {rank}: {outcome}" for rank, outcome in enumerate(outcomes) if outcome]
    assert not failed, "\n".join(failed)
