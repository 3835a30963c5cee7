"""Pipeline channels and schedules among ranks, on gloo and NCCL (pipeline_cases.py), and what needs one process."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch
from torch import Tensor, nn

from collectives.messages import Message, Traffic
from collectives.pipeline import PipelineChannel
from collectives.pipeline_links import PipelineLinks, _colour, _links_of
from netlayer.errors import ConfigError
from tests.collectives.conftest import RunCase
from tests.collectives.harness import Case, Ranks, assert_passed, on_gpus
from tests.collectives.pipeline_cases import CASES
from trainer.pipeline import StageModel, run_schedule
from trainer.schedule import one_forward_one_backward

RANKS = [
    pytest.param((2, "cpu"), id="2-gloo"),
    pytest.param((4, "cpu"), id="4-gloo"),
    pytest.param((2, "cuda"), id="2-nccl", marks=on_gpus(2)),
    pytest.param((4, "cuda"), id="4-nccl", marks=on_gpus(4)),
]


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_among_stages(case: Case, ranks: Ranks, run_case: RunCase) -> None:
    assert_passed(run_case(case, ranks))


def test_one_stage_needs_no_channel_to_anybody() -> None:
    schedule = one_forward_one_backward(1, 3)
    layer = nn.Linear(2, 2)
    batches = [torch.randn(4, 2) for _ in range(3)]
    model = StageModel([layer], schedule, 0, lambda index: batches[index], lambda _, output: output.square().mean())
    for overlap in (True, False):
        layer.zero_grad()
        run_schedule(schedule, PipelineChannel((4, 2), torch.float32, schedule.traffic(0), overlap=overlap), model)
        found = layer.weight.grad
        layer.zero_grad()
        sum(layer(batch).square().mean() / 3 for batch in batches).backward()
        torch.testing.assert_close(found, layer.weight.grad)


def test_a_message_comes_once() -> None:
    message = Message("forward", 3, 1, "steady")
    with pytest.raises(ValueError, match="sends: the activation of micro-batch 3 for chunk 1 comes twice"):
        Traffic(sends=(message, Message("forward", 3, 1, "warm-up")))


@pytest.mark.parametrize(("depth", "device"), [(0, "cpu"), (2, "cuda")])
def test_depth_is_one_or_on_the_cpu_more(depth: int, device: str) -> None:
    with pytest.raises(ValueError, match=f"depth = {depth}: .*; use 1"):
        PipelineChannel((1,), torch.float32, Traffic(), depth=depth, device=device)
    if depth > 1:  # the links' device is the channel's
        links = mock.Mock(device=torch.device(device))
        with pytest.raises(ValueError, match=f"depth = {depth}: .*; use 1"):
            PipelineChannel((1,), torch.float32, Traffic(), depth=depth, links=links)


def test_chunks_must_be_those_of_the_schedule() -> None:
    def nothing(*_: object) -> Tensor:
        raise AssertionError

    with pytest.raises(ValueError, match="2 given, the schedule has 1"):
        StageModel([nn.Identity(), nn.Identity()], one_forward_one_backward(1, 1), 0, nothing, nothing)


def test_a_wait_that_blocks_the_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    with pytest.raises(ConfigError, match="TORCH_NCCL_BLOCKING_WAIT = 1"):
        PipelineLinks(None, "cuda", False)


@pytest.mark.parametrize("wraps", [False, True])
@pytest.mark.parametrize("num_stages", range(2, 8))
def test_no_stage_has_two_links_of_one_colour(num_stages: int, wraps: bool) -> None:
    links = _links_of(num_stages, wraps)
    for stage in range(num_stages):
        colours = [_colour(link, num_stages) for link in links if stage in (link, (link + 1) % num_stages)]
        assert len(set(colours)) == len(colours)
        assert len(colours) == (2 if wraps or 0 < stage < num_stages - 1 else 1)
    pairs = [(link, (link + 1) % num_stages) for link in links]
    assert pairs == [*itertools.pairwise(range(num_stages)), *([(num_stages - 1, 0)] if wraps else [])]
