"""What the harness of the cases says of those that fail, and of those that end a rank."""

from __future__ import annotations

import os
import sys
import time

import pytest
import torch
import torch.distributed as dist

from tests.collectives.harness import assert_passed, meet, play


def passes(rank: int, world_size: int) -> None:
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert ones.item() == world_size


def fails_on_rank_1(rank: int, world_size: int) -> None:
    meet("here")
    assert rank != 1, "rank 1 has its own view"


def ends_rank_1(rank: int, world_size: int) -> None:
    meet("here")
    if rank == 1:
        print("a last word", file=sys.stderr)
        os._exit(3)
    stands_still()


def stands_still() -> None:
    time.sleep(600)


def passes_too(rank: int, world_size: int) -> None:
    passes(rank, world_size)


def test_each_case_has_its_own_outcome() -> None:
    cases = [passes, fails_on_rank_1, ends_rank_1, passes_too]
    outcomes = play(cases, (2, "cpu"), limit_s=250.0)
    assert list(outcomes) == cases
    for case in (passes, passes_too):
        assert_passed(outcomes[case])
    good, bad = outcomes[fails_on_rank_1]
    assert good == ""
    assert "rank 1 has its own view" in bad
    with pytest.raises(AssertionError) as failed:
        assert_passed(outcomes[ends_rank_1])
    said = str(failed.value)
    assert "rank 1: it ended without a result" in said
    assert "rank 0: it has not returned" in said
    assert "a last word" in said
    assert "in stands_still" in said, "where the one that was left stood"


def test_what_finds_no_time_has_failed() -> None:
    outcomes = play([passes], (2, "cpu"), limit_s=0.0)
    assert all("not run" in outcome for outcome in outcomes[passes])
