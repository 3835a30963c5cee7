"""States of the wrapper's optimisers by names, and how shards are cut into boxes; cases in checkpoint_cases.py."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from collectives.sharded.optimizer_state import boxes_of, flattened, unflattened
from tests.collectives.checkpoint_cases import CHECKPOINT_CASES
from tests.collectives.conftest import RunCase
from tests.collectives.harness import Case, Ranks, assert_passed, on_gpus, on_ranks

RANKS = [
    pytest.param((2, "cpu"), id="2-gloo"),
    pytest.param((4, "cpu"), id="4-gloo"),
    pytest.param((2, "cuda"), id="2-nccl", marks=on_gpus(2)),
]


@pytest.mark.parametrize(("case", "ranks"), on_ranks(CHECKPOINT_CASES, RANKS, []))
def test_checkpoints_among_ranks(case: Case, ranks: Ranks, run_case: RunCase) -> None:
    assert_passed(run_case(case, ranks))


@given(st.lists(st.integers(1, 5), max_size=4), st.data())
def test_boxes_are_the_elements_in_their_order(shape: list[int], data: st.DataObject) -> None:
    numel = math.prod(shape)
    start = data.draw(st.integers(0, numel))
    end = data.draw(st.integers(start, numel))
    whole = torch.arange(numel, device="cpu").view(shape)
    boxes = boxes_of(shape, start, end)
    found = []
    for box in boxes:
        part = whole[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))]
        assert part.flatten().tolist() == list(range(box.start, box.end))
        found += part.flatten().tolist()
    assert found == list(range(start, end))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_a_flat_state_comes_back() -> None:
    state = {
        "state": {"a.w": {"step": 1, "exp_avg": 2}, "b": {}},
        "param_groups": [{"lr": 0.1, "params": ["a.w"]}, {"lr": 0.2, "params": ["b"]}],
    }
    assert unflattened(flattened(state), ["a.w", "b"]) == {**state, "state": {"a.w": {"step": 1, "exp_avg": 2}}}
