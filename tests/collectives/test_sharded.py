"""Sharded data parallel among ranks, on gloo and on NCCL; what each case checks stands in cases.py, step_cases.py."""

from __future__ import annotations

import pytest

import tests.collectives.guard_cases
import tests.collectives.reshard_cases
import tests.collectives.slot_cases  # noqa: F401 - they add their cases to CASES
from tests.collectives.cases import CASES
from tests.collectives.conftest import RunCase
from tests.collectives.harness import Case, Ranks, assert_passed, on_gpus, on_ranks
from tests.collectives.step_cases import GPU_CASES  # adds its other cases to CASES

RANKS = [
    pytest.param((2, "cpu"), id="2-gloo"),
    pytest.param((4, "cpu"), id="4-gloo"),
    pytest.param((2, "cuda"), id="2-nccl", marks=on_gpus(2)),
]


AMONG_FOUR = [
    "equals_one_process_in_float64", "settings_do_not_change_a_bit", "a_parameter_without_gradient_counts_as_zero",
    "a_rank_without_a_backward_pass_takes_part", "any_shapes_and_bucket_sizes", "ranks_that_differ_are_told_so",
    "float16_means_do_not_overflow_in_the_sum", "fewer_elements_than_ranks", "groups_of_the_world_train_apart",
    "one_communicator_runs_the_same_order_on_every_rank", "the_share_asked_for_is_gathered_in_backward",
    "an_exception_in_a_backward_that_steps_leaves_ranks_alike", "a_rank_that_leaves_a_step_out_alone_is_named",
    "settings_that_differ_are_named", "stage_3_equals_one_process", "stage_3_has_the_values_of_fsdp2",
    "an_exception_on_one_rank_costs_one_step_in_stage_3", "replicas_train_as_one_process",
]  # fmt: skip


@pytest.mark.parametrize(
    ("case", "ranks"), on_ranks(CASES, RANKS, AMONG_FOUR, rare=["compiled_units_are_whole_graphs"])
)
def test_among_ranks(case: Case, ranks: Ranks, run_case: RunCase) -> None:
    assert_passed(run_case(case, ranks))


@pytest.mark.parametrize("ranks", RANKS[2:])
@pytest.mark.parametrize("case", GPU_CASES, ids=lambda case: case.__name__)
def test_among_gpus(case: Case, ranks: Ranks, run_case: RunCase) -> None:
    assert_passed(run_case(case, ranks))
