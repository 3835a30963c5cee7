"""Comparison of replicas: a flipped bit is found and placed, and what agrees changes nothing of the training."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from netlayer.config.tree import build_config
from netlayer.errors import ConfigError
from netlayer.launch.launcher import launch
from netlayer.layout import ParallelLayout
from netlayer.store.meeting import meeting_place
from tests.trainer import replica_ranks
from trainer.replicas import differences, digest

from .conftest import tiny_job


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_any_flipped_bit_changes_a_digest(dtype: torch.dtype) -> None:
    numbers = torch.randn(33, generator=torch.Generator().manual_seed(0)).to(dtype)
    words = numbers.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[numbers.element_size()])
    before = digest(numbers)
    for bit in range(8 * numbers.element_size()):
        flipped = words.clone()
        flipped[7] ^= -(2**bit) if bit == 8 * numbers.element_size() - 1 else 2**bit
        assert digest(flipped.view(dtype)) != before


class _Sums(TorchDispatchMode):
    """Notes how many elements are summed at once."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(
        self, func: Any, _types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.ops.aten.sum.default:
            self.sizes.append(args[0].numel())
        return func(*args, **(kwargs or {}))


def test_a_comparison_takes_little_memory_beside_the_largest_bucket() -> None:
    """torch widens what it sums to int64: all at once, weights in 8 bits would take eight times their memory."""
    weights = torch.arange(24 << 20, dtype=torch.int32).to(torch.int8)
    with _Sums() as sums:
        total = digest(weights)
    assert total == sum(each * 98_304 for each in range(-128, 128))
    assert sum(sums.sizes[:-1]) == len(weights)
    assert max(sums.sizes) * 8 <= 32 << 20


def test_the_rank_that_differs_from_most_replicas_is_named() -> None:
    layout = ParallelLayout(tp=2, dp=4, pp=1)
    values = [10, 20] * 4  # tensor-parallel ranks hold other parameters
    assert differences([values], layout).ranks == ()
    odd = layout.rank(tp=1, dp=2)
    values[odd] = 21
    assert (differences([values], layout).ranks, differences([values], layout).is_known) == ((odd,), True)
    values[layout.rank(tp=1, dp=0)] = 22
    values[layout.rank(tp=1, dp=1)] = 23
    both = differences([values], layout)
    assert (both.ranks, both.is_known) == ((1, 3, 5, 7), False)


def test_replicas_of_groups_and_parts_of_sequences_are_compared_apart() -> None:
    layout = ParallelLayout(tp=2, cp=2, dp=2, dp_replicate=2, pp=2)
    places = [layout.coordinates(rank) for rank in range(layout.world_size)]
    values = [place.tp + 2 * place.cp + 4 * place.pp for place in places]
    assert differences([values], layout).ranks == ()
    odd = layout.rank(tp=1, cp=1, dp=0, dp_replicate=1, pp=1)
    values[odd] = 99
    assert differences([values], layout).ranks == (odd,)


def test_of_two_replicas_nobody_can_tell_which_is_right() -> None:
    both = differences([[1, 2]], ParallelLayout(tp=1, dp=2, pp=1))
    assert (both.ranks, both.is_known) == ((0, 1), False)


def test_replicas_of_sharded_groups_are_compared_with_each_other() -> None:
    """Two ranks a group, which nobody could tell apart alone; over both groups there is a majority."""
    layout = ParallelLayout(tp=2, dp=2, pp=2, dp_replicate=2)
    values = [layout.coordinates(rank).tp + 10 * layout.coordinates(rank).pp for rank in range(layout.world_size)]
    odd = layout.rank(tp=1, pp=1, dp=0, dp_replicate=1)
    values[odd] = 99
    assert (differences([values], layout).ranks, differences([values], layout).is_known) == ((odd,), True)


@pytest.mark.parametrize(
    ("first", "second", "ranks", "is_known"),
    [
        ([5, 1, 1, 1], [1, 1, 1, 1], (), True),
        ([5, 1, 1, 1], [1, 5, 1, 1], (), True),
        ([5, 6, 1, 1, 1], [1, 7, 1, 1, 1], (1,), True),
        ([1, 1, 2, 2], [1, 1, 1, 1], (), True),
        ([5, 1, 1, 1], [1, 1, 2, 2], (0, 1, 2, 3), False),
    ],
)
def test_a_rank_is_accused_only_if_it_is_odd_both_times(
    first: list[int], second: list[int], ranks: tuple[int, ...], is_known: bool
) -> None:
    both = differences([first, second], ParallelLayout(dp=len(first)))
    assert (both.ranks, both.is_known) == (ranks, is_known)


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"parallel": {"dp": 1}}, "needs replicas"),
        ({"parallel": {"dp": 2}, "checkpoint": {"every_steps": 5, "keep": 2}}, "one from before a corruption"),
        (
            {"parallel": {"dp": 2}, "checkpoint": {"every_steps": 50, "keep": 3, "peer_copies": 1}},
            "does not go with job.checkpoint.peer_copies",
        ),
    ],
)
def test_comparisons_that_are_of_no_use_are_refused(settings: dict[str, Any], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        build_config({"job": {"watch": {"compare_replicas_every": 10}, **settings}})


@pytest.mark.parametrize(
    ("degrees", "places"),
    [
        ({"dp": 3}, ("dp=1", "dp=2")),
        pytest.param(
            {"cp": 2, "dp": 1, "dp_replicate": 3},
            ("dp=0, cp=1, dp_replicate=0", "dp=0, cp=0, dp_replicate=1"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_three_replicas_are_compared_and_train_as_without_that(
    text_folder: Path, tmp_path: Path, degrees: dict[str, int], places: tuple[str, str]
) -> None:
    """A flipped bit of one rank's copy, a wrong product on another rank, and one that is wrong a single time."""
    count = math.prod(degrees.values())
    job = tiny_job(text_folder, count, batch={"global_batch_size": 6, "micro_batch_size": 1}, parallel=degrees)
    with meeting_place() as place:
        ranks = launch(replica_ranks.run_rank, count, args=(job, place.init_method("replicas")), log_dir=tmp_path)
    for plain, compared, lines in ranks:
        assert compared == plain
        assert lines == [
            f"step 5: replicas that agreed after step 4 differ: rank 1 (tp=0, pp=0, {places[0]}) has other parameters",
            f"step 6: replicas that agreed after step 4 differ: rank 2 (tp=0, pp=0, {places[1]}) has other losses of "
            "the same batch",
            "step 7: replicas differed once, and not when compared again (rank 2 in losses of the same batch): nobody "
            "is accused",
        ]
