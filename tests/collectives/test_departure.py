"""Buckets that leave, and what is left where that fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from collectives.sharded.departure import Departures, Travel
from collectives.sharded.reduce import GradientReduce
from collectives.transport.lane import Flight, Lane
from tests.collectives.test_bucket import made_buckets


def lane_of_two(landing: Callable[[], None] | None = None, failing: int = -1) -> Any:
    """Rank 0's, whose sums are its own gradients; the launch of number `failing` raises."""
    lane = mock.Mock(spec=Lane, world_size=2, device=torch.device("cpu"), stream=None, divides_on_the_way=False)
    lane.behind, launched = None, list[int]()

    def reduce_scatter(output_S: Tensor, input_N: Tensor, fill: Callable[[], None], *_: object) -> Flight:
        launched.append(len(launched))
        if launched[-1] == failing:
            raise RuntimeError("no memory")
        fill()
        output_S.copy_(input_N[: len(output_S)])
        return Flight(lane, None, None, None, None, (), late=landing)

    lane.reduce_scatter = reduce_scatter
    lane.waiting.return_value = mock.MagicMock()
    return lane


def test_what_failed_to_leave_is_not_added_to_the_step_before() -> None:
    [bucket, *_] = made_buckets([torch.Size([4])], 2, torch.float32)
    reduce = GradientReduce([bucket], lane_of_two(failing=0), torch.float32, in_flight=1, overlap=True)
    bucket.grad_S.fill_(100.0)
    bucket.parameters[0].grad = torch.ones(4)
    with pytest.raises(RuntimeError, match="no memory"):
        reduce.finish()
    reduce.finish()
    assert bucket.grad_S.tolist() == [0.0, 0.0], "its gradient is lost, and that of the step before is not taken for it"


def test_the_last_lands_behind_all_others() -> None:
    landed = list[int]()
    [bucket, *_] = made_buckets([torch.Size([4])], 2, torch.float32)
    departures = Departures(lane_of_two(lambda: landed.append(1)), torch.float32, 2, overlap=True, travel=Travel())
    for expected in (0, 1):
        departures.launch(bucket, adds=False)
        departures.land_before()
        assert len(landed) == expected
    departures.land()
    departures.land()
    assert len(landed) == 2
