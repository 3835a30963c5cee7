"""Random modules in random orders of calls among ranks; the machine is in machine_cases.py."""

from __future__ import annotations

import pytest

from tests.collectives.conftest import RunCase
from tests.collectives.harness import Case, Ranks, assert_passed, on_gpus, on_ranks
from tests.collectives.machine_cases import MACHINE_CASES

RANKS = [
    pytest.param((2, "cpu"), id="2-gloo"),
    pytest.param((2, "cuda"), id="2-nccl", marks=on_gpus(2)),
]
LONG = ["many_programs_see_what_plain_torch_shows"]


@pytest.mark.parametrize(("case", "ranks"), on_ranks(MACHINE_CASES, RANKS, [], rare=LONG))
def test_programs_among_ranks(case: Case, ranks: Ranks, run_case: RunCase) -> None:
    assert_passed(run_case(case, ranks))
