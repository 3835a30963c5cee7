"""Pipeline channels and schedules among ranks, on gloo and NCCL (pipeline_cases.py), and what needs one process."""

from __future__ import annotations

import itertools
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from collectives.pipeline.channel import PipelineChannel
from collectives.pipeline.link import Link
from collectives.pipeline.links import PipelineLinks, _colour, _links_of
from netlayer.errors import ConfigError
from netlayer.workload.messages import Message, Traffic
from netlayer.workload.schedule import one_forward_one_backward
from tests.collectives.conftest import RunCase
from tests.collectives.harness import Case, Ranks, assert_passed, on_gpus, on_ranks
from tests.collectives.pipeline_cases import CASES
from trainer.pipeline import StageModel, run_schedule

RANKS = [
    pytest.param((2, "cpu"), id="2-gloo"),
    pytest.param((4, "cpu"), id="4-gloo"),
    pytest.param((2, "cuda"), id="2-nccl", marks=on_gpus(2)),
    pytest.param((4, "cuda"), id="4-nccl", marks=on_gpus(4)),
]


AMONG_FOUR = [
    "equals_one_process", "settings_and_delays_do_not_change_a_bit", "peers_are_on_one_host",
    "any_schedule_equals_one_process", "a_send_does_not_wait_for_its_receive", "pipelines_lie_side_by_side",
    "stages_that_differ_are_told_both_sides", "links_that_differ_name_the_argument_and_both_stages",
    "what_one_stage_finds_all_hear_where_all_open_memory_together", "a_watch_says_who_is_late",
]  # fmt: skip


@pytest.mark.parametrize(("case", "ranks"), on_ranks(CASES, RANKS, AMONG_FOUR))
def test_among_stages(case: Case, ranks: Ranks, run_case: RunCase) -> None:
    assert_passed(run_case(case, ranks))


def test_one_stage_needs_no_channel_to_anybody() -> None:
    schedule = one_forward_one_backward(1, 3)
    layer = nn.Linear(2, 2)
    batches = [torch.randn(4, 2) for _ in range(3)]
    model = StageModel([layer], schedule, 0, lambda index: batches[index], lambda _, last, x: last(x).square().mean())
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


def test_an_unknown_path_is_refused() -> None:
    with pytest.raises(ValueError, match="path = 'pear': must be one of auto, peer, group"):
        PipelineLinks(None, "cpu", False, path="pear")  # type: ignore[arg-type]


def test_a_closed_link_has_no_thread_and_opens_another_for_the_next_message() -> None:
    link = Link("send", "forward", mock.Mock(spec=dist.ProcessGroup), 0, 1, 1, torch.device("cpu"))
    link.close()
    with mock.patch.object(dist, "isend"):
        for _ in range(2):
            link.launch(torch.zeros(2), Message("forward", 0)).wait()
            link.wait_all()
            thread = link._thread
            assert thread is not None
            assert thread.is_alive()
            link.close()
            link.close()
            assert not thread.is_alive()


def test_closed_links_give_their_slots_back() -> None:
    links = PipelineLinks(None, "cpu", False)
    links._slots = slots = mock.Mock()
    links.close()
    links.close()
    slots.window.close.assert_called_once_with()


def test_a_channel_takes_names_and_refuses_what_is_empty() -> None:
    assert PipelineChannel((2,), "bfloat16", Traffic(), device="cpu").dtype == torch.bfloat16
    with pytest.raises(ValueError, match=r"shape = \[2, 0\]: a message has at least one element"):
        PipelineChannel((2, 0), torch.float32, Traffic())


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
