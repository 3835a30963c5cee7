"""Sharded data parallel among ranks, on gloo and on NCCL; what each case checks stands in cases.py, step_cases.py."""

from __future__ import annotations

import pytest

from tests.collectives.cases import CASES
from tests.collectives.conftest import RunCase
from tests.collectives.harness import Case, Ranks, assert_passed, on_gpus
from tests.collectives.step_cases import GPU_CASES  # adds its other cases to CASES

RANKS = [
    pytest.param((2, "cpu"), id="2-gloo"),
    pytest.param((4, "cpu"), id="4-gloo"),
    pytest.param((2, "cuda"), id="2-nccl", marks=on_gpus(2)),
]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_among_ranks(case: Case, ranks: Ranks, run_case: RunCase) -> None:
    assert_passed(run_case(case, ranks))


@pytest.mark.parametrize("ranks", RANKS[2:])
@pytest.mark.parametrize("case", GPU_CASES, ids=lambda case: case.__name__)
def test_among_gpus(case: Case, ranks: Ranks, run_case: RunCase) -> None:
    assert_passed(run_case(case, ranks))
