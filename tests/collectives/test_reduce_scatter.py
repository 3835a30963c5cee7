"""Buckets that leave, and what is left where that fails."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from collectives.sharded.collectives import GlooReduceScatter, Reduction
from collectives.sharded.reduce import GradientReduce, ReduceScatterQueue
from collectives.transport.communicator import Communicator, Work
from tests.collectives.test_bucket import made_buckets


def comm_of_two(landing: Callable[[], None] | None = None, failing: int = -1) -> Any:
    """Rank 0's, whose sums are its own gradients; the launch of number `failing` raises."""
    comm = mock.Mock(spec=Communicator, world_size=2, device=torch.device("cpu"), stream=None, divides_on_the_way=False)
    comm.post_reduce_stream, launched = None, list[int]()

    def reduce_scatter(output_S: Tensor, input_N: Tensor, fill: Callable[[], None], *_: object) -> Work:
        launched.append(len(launched))
        if launched[-1] == failing:
            raise RuntimeError("no memory")
        fill()
        output_S.copy_(input_N[: len(output_S)])
        return Work(comm, None, None, None, None, (), late=landing)

    comm.reduce_scatter = reduce_scatter
    comm.waiting.return_value = mock.MagicMock()
    return comm


def test_what_failed_to_leave_is_not_added_to_the_step_before() -> None:
    [bucket, *_] = made_buckets([torch.Size([4])], 2, torch.float32)
    reduce = GradientReduce(
        [bucket], GlooReduceScatter(Reduction(comm_of_two(failing=0), torch.float32)), 1, overlap=True
    )
    bucket.grad_S.fill_(100.0)
    bucket.parameters[0].grad = torch.ones(4)
    with pytest.raises(RuntimeError, match="no memory"):
        reduce.finish()
    reduce.finish()
    assert bucket.grad_S.tolist() == [0.0, 0.0], "its gradient is lost, and that of the step before is not taken for it"


def test_the_last_lands_behind_all_others() -> None:
    landed = list[int]()
    [bucket, *_] = made_buckets([torch.Size([4])], 2, torch.float32)
    reduce_scatter = GlooReduceScatter(Reduction(comm_of_two(lambda: landed.append(1)), torch.float32))
    reduce_scatters = ReduceScatterQueue(reduce_scatter, 2, overlap=True)
    for expected in (0, 1):
        reduce_scatters.launch(bucket, adds=False)
        reduce_scatters.launch_rest_of_previous()
        assert len(landed) == expected
    reduce_scatters.launch_rest()
    reduce_scatters.launch_rest()
    assert len(landed) == 2
