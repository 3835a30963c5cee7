from dataclasses import asdict

import pytest

from bench.loss_equivalence import compare


def test_each_step_shows_both_losses_and_how_far_they_are_apart() -> None:
    alone, several = [{"step": 1, "loss": 7.5}], [{"step": 1, "loss": 7.25}]
    assert [asdict(row) for row in compare(alone, several)] == [
        {"step": 1, "loss_one_rank": 7.5, "loss_ranks": 7.25, "difference": 0.25},
    ]


def test_runs_of_different_length_are_no_comparison() -> None:
    with pytest.raises(ValueError, match="shorter"):
        compare([{"step": 1, "loss": 1.0}], [])
