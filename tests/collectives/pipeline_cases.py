"""What the stages of a pipeline check together. A case is `case(stage, num_stages)`; it raises where it fails."""

from __future__ import annotations

import gc
import os
import random
import time
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from collectives.pipeline.channel import PipelineChannel
from collectives.pipeline.link import Link
from collectives.pipeline.links import LinkGroups, PipelineLinks, open_link_groups
from collectives.transport.nodes import virtual_node_environ
from collectives.transport.symmetric import why_unusable
from collectives.watch.recorder import Recorder
from collectives.watch.trace import align_clocks, chrome_trace, hidden_share, record_trace
from collectives.watch.watchdog import Watch, timeout_of
from netlayer.errors import CollectiveTimeout, HardwareMissing
from netlayer.layout import ParallelLayout
from netlayer.workload.messages import Message, Traffic
from netlayer.workload.schedule import Action, Schedule, interleaved, one_forward_one_backward
from tests.collectives.harness import Case
from trainer.pipeline import StageModel, run_schedule

CASES: list[Case] = []
WIDTH, BATCH = 6, 3


def case(function: Case) -> Case:
    CASES.append(function)
    return function


def device() -> torch.device:
    return torch.get_default_device()


def chunk(virtual_stage: int) -> nn.Module:
    """Uneven: one to three layers."""
    with torch.random.fork_rng(devices=[]), torch.device("cpu"):
        torch.manual_seed(virtual_stage)
        layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(1 + virtual_stage % 3)]
        made = nn.Sequential(*layers)
    return made.to(device())


def tokens(micro_batch: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(100 + micro_batch)
    return torch.randn(BATCH, WIDTH, generator=generator, device="cpu").to(device())


def loss_of(micro_batch: int, output: Tensor) -> Tensor:
    return F.mse_loss(output, tokens(1000 + micro_batch))


def model_of(schedule: Schedule, stage: int) -> StageModel:
    p = schedule.num_stages
    chunks = [chunk(index * p + stage) for index in range(schedule.num_chunks)]
    return StageModel(chunks, schedule, stage, tokens, lambda index, last, x: loss_of(index, last(x)))


def channel_of(schedule: Schedule, **options: Any) -> PipelineChannel:
    stage = dist.get_rank(options.get("group"))
    options = {"device": device(), **options}
    return PipelineChannel((BATCH, WIDTH), torch.float32, schedule.traffic(stage), **options)


def groups_of(num_stages: int) -> LinkGroups:
    """For many channels one after the other: on NCCL a communicator takes a good part of a second to make."""
    return open_link_groups([range(num_stages)], device(), wraps=True)


def run_step(schedule: Schedule, channel: PipelineChannel, model: StageModel) -> None:
    """A step that overlaps as the channel was asked to: on CUDA that is not its first."""
    if device().type == "cuda":
        run_schedule(schedule, channel, model)
        model.zero_grad()
    run_schedule(schedule, channel, model)


def gradients(chunks: list[nn.Module]) -> list[Tensor]:
    return [parameter.grad for part in chunks for parameter in part.parameters()]


def reference(schedule: Schedule) -> tuple[list[nn.Module], list[Tensor]]:
    """The whole model in one process: virtual stages with their gradients, and the losses."""
    parts = [chunk(index) for index in range(schedule.num_stages * schedule.num_chunks)]
    losses = []
    for micro_batch in range(schedule.num_micro_batches):
        loss = loss_of(micro_batch, nn.Sequential(*parts)(tokens(micro_batch)))
        losses.append(loss.detach())
        (loss / schedule.num_micro_batches).backward()
    return parts, losses


def assert_equals_one_process(schedule: Schedule, model: StageModel, stage: int) -> None:
    parts, losses = reference(schedule)
    own = [parts[index * schedule.num_stages + stage] for index in range(schedule.num_chunks)]
    torch.testing.assert_close(gradients(list(model.chunks)), gradients(own), rtol=1e-6, atol=1e-7)
    if stage == schedule.num_stages - 1:
        torch.testing.assert_close([model.losses[index] for index in range(len(losses))], losses)
    else:
        assert not model.losses


def meet() -> None:
    """A barrier of all stages that the host waits in."""
    ones = torch.ones(())
    dist.all_reduce(ones)
    assert ones.item() == dist.get_world_size()


def assert_same(actual: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(actual, expected, rtol=0.0, atol=0.0)


def schedules(p: int) -> list[Schedule]:
    plain = [one_forward_one_backward(p, 1), one_forward_one_backward(p, p + 2)]
    return [*plain, one_forward_one_backward(p, p + 1, eager=True), interleaved(p, 2 * p, 2)]


@contextmanager
def delays(stage: int) -> Iterator[None]:
    """Sends, receives and computations are late, by another time on each stage."""
    chance = random.Random(stage)

    def late(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            time.sleep(chance.choice([0.0, 0.0, 0.001, 0.005]))
            return function(*args, **kwargs)

        return call

    with (
        mock.patch.object(Link, "_issue", late(Link._issue)),
        mock.patch.object(StageModel, "forward", late(StageModel.forward)),
        mock.patch.object(StageModel, "backward", late(StageModel.backward)),
    ):
        yield


@case
def equals_one_process(stage: int, num_stages: int) -> None:
    groups = groups_of(num_stages)
    for schedule in schedules(num_stages):
        links = PipelineLinks(None, device(), schedule.wraps, groups=groups)
        for overlap in (True, False):
            model = model_of(schedule, stage)
            run_step(schedule, channel_of(schedule, overlap=overlap, links=links), model)
            assert_equals_one_process(schedule, model, stage)


@case
def settings_and_delays_do_not_change_a_bit(stage: int, num_stages: int) -> None:
    for schedule in schedules(num_stages)[1:]:
        links = PipelineLinks(None, device(), schedule.wraps)
        results = []
        deeper = [] if device().type == "cuda" else [(True, 2, True), (True, 99, True)]
        for overlap, depth, ahead in ((False, 1, True), (True, 1, True), (True, 1, False), *deeper):
            model = model_of(schedule, stage)
            with delays(stage * 100 + depth), mock.patch.object(Link, "posts_ahead", ahead):
                run_step(schedule, channel_of(schedule, overlap=overlap, depth=depth, links=links), model)
            results.append(gradients(list(model.chunks)) + list(model.losses.values()))
        for result in results[1:]:
            assert_same(result, results[0])


@case
def both_paths_give_the_same(stage: int, num_stages: int) -> None:
    # On the CPU both are the same path.
    groups = groups_of(num_stages)
    for schedule in schedules(num_stages)[0 if device().type == "cuda" else -1 :]:
        results = []
        for path in ("auto", "group"):
            links = PipelineLinks(None, device(), schedule.wraps, path=path, groups=groups)
            assert (links.why_no_peers is None) == (path == "auto" and device().type == "cuda")
            channel, model = channel_of(schedule, links=links), model_of(schedule, stage)
            for _ in range(4):  # messages go around the slots
                model.zero_grad()
                run_schedule(schedule, channel, model)
            results.append(gradients(list(model.chunks)))
        assert_same(*results)


@case
def peers_must_be_there_where_they_are_asked_for(stage: int, num_stages: int) -> None:
    if device().type == "cuda":
        return
    with pytest.raises(HardwareMissing, match="no peer memory in this pipeline: the device is cpu"):
        PipelineLinks(None, device(), False, path="peer")


@case
def peers_are_on_one_host(stage: int, num_stages: int) -> None:
    with mock.patch("collectives.transport.symmetric._why_unusable_here", return_value=None):
        assert why_unusable(dist.group.WORLD, torch.device("cuda")) is None
        with mock.patch.dict(os.environ, virtual_node_environ(stage // 2)):
            why = why_unusable(dist.group.WORLD, torch.device("cuda"))
            assert why == (None if num_stages == 2 else f"the ranks are on {num_stages // 2} hosts")
    with mock.patch("collectives.transport.symmetric._why_unusable_here", return_value="too old" if stage else None):
        assert why_unusable(dist.group.WORLD, torch.device("cuda")) == "rank 1: too old"


@case
def what_is_collected_in_a_step_does_not_hold_it_up(stage: int, num_stages: int) -> None:
    """Peer memory of a channel that is gone, say: to free it is to wait for the device, and so for the peers."""
    schedule = interleaved(num_stages, 2 * num_stages, 2)
    model = model_of(schedule, stage)
    forward = StageModel.forward

    def collecting(*args: Any, **kwargs: Any) -> Any:
        gc.collect()
        return forward(*args, **kwargs)

    gc.freeze()  # each collection looks at what was made since
    old = [channel_of(schedule)]
    run_step(schedule, old[0], model)
    old.append(old)  # only the garbage collector finds it
    channel = channel_of(schedule)
    run_schedule(schedule, channel, model)
    del old
    model.zero_grad()
    with mock.patch.object(StageModel, "forward", collecting):
        run_schedule(schedule, channel, model)
    gc.unfreeze()
    assert_equals_one_process(schedule, model, stage)


@case
def any_schedule_equals_one_process(stage: int, num_stages: int) -> None:
    chance, groups = random.Random(num_stages), groups_of(num_stages)
    for _ in range(6):
        v = chance.randint(1, 3)
        if chance.random() < 0.5:
            schedule = interleaved(num_stages, num_stages * chance.randint(1, 2), v)
        else:
            schedule = one_forward_one_backward(num_stages, chance.randint(1, 6), eager=chance.random() < 0.5)
        depth = 1 if device().type == "cuda" else chance.randint(1, 3)
        model = model_of(schedule, stage)
        links = PipelineLinks(None, device(), schedule.wraps, groups=groups)
        run_step(schedule, channel_of(schedule, overlap=chance.random() < 0.7, depth=depth, links=links), model)
        assert_equals_one_process(schedule, model, stage)


@case
def steps_follow_each_other(stage: int, num_stages: int) -> None:
    """Weights change between steps, and no tensor of one step is seen in the next."""
    schedule = interleaved(num_stages, 2 * num_stages, 2)
    states = []
    for overlap in (True, False):
        model, channel = model_of(schedule, stage), channel_of(schedule, overlap=overlap)
        for _ in range(3):
            run_schedule(schedule, channel, model)
            for part in model.chunks:
                for parameter in part.parameters():
                    parameter.data.sub_(parameter.grad, alpha=0.1)
                    parameter.grad = None
        states.append([parameter.detach() for part in model.chunks for parameter in part.parameters()])
    assert_same(*states)


@case
def messages_of_a_step_are_counted(stage: int, num_stages: int) -> None:
    m = 2 * num_stages
    for schedule, overlap in ((one_forward_one_backward(num_stages, m), True), (interleaved(num_stages, m, 2), False)):
        recorder = Recorder(device())
        channel = channel_of(schedule, overlap=overlap, recorder=recorder)
        assert not recorder.counts()  # what is agreed upon beforehand is no message
        for step in range(2):
            recorder.begin_step(step)
            run_schedule(schedule, channel, model_of(schedule, stage), recorder)
            comm = recorder.end_step()
            v, first, last = schedule.num_chunks, stage == 0, stage == num_stages - 1
            expected = Counter(
                {
                    ("pipeline forward", "recv"): m * (v - first),
                    ("pipeline forward", "send"): m * (v - last),
                    ("pipeline backward", "recv"): m * (v - last),
                    ("pipeline backward", "send"): m * (v - first),
                }
            )
            assert comm.counts() == +expected
            assert comm.num_bytes == expected.total() * BATCH * WIDTH * 4
            assert 0 <= comm.exposed_comm <= 1


@case
def a_trace_shows_every_message_and_phase(stage: int, num_stages: int) -> None:
    schedule = interleaved(num_stages, 2 * num_stages, 2)
    recorder = Recorder(device())
    channel = channel_of(schedule, recorder=recorder)
    alignment = align_clocks()
    assert (alignment.offset_ns, alignment.method) == (0, "same host: one clock")
    for step in range(2):
        recorder.begin_step(step)
        run_schedule(schedule, channel, model_of(schedule, stage), recorder)
        recorder.end_step()
    trace = record_trace(stage, recorder.steps, f"stage {stage}", alignment.offset_ns)
    sends = [span for span in trace.spans if span.name == "send"]
    traffic = schedule.traffic(stage)
    assert len(sends) == 2 * len(traffic.sends)
    actions = [span for span in trace.spans if span.lane == "compute"]
    for step in range(2):
        shown = [
            (s.name, s.labels["micro_batch"], s.labels["chunk"], s.labels["phase"])
            for s in actions
            if s.labels["step"] == step
        ]
        assert shown == [tuple(action) for action in schedule.stages[stage]]
    assert {span.labels["phase"] for span in sends} == {message.phase for message in traffic.sends}
    share = hidden_share(trace.spans, "send")
    assert share is not None
    assert 0 <= share <= 1
    traces: list[Any] = [None] * num_stages
    dist.all_gather_object(traces, trace)
    events = chrome_trace(traces)["traceEvents"]
    num_messages = 2 * sum(len(schedule.traffic(index).sends) for index in range(num_stages))
    arrows = Counter(event["ph"] for event in events)
    assert arrows["s"] == arrows["f"]
    if device().type == "cuda":  # clocks of two devices may put the end of a short message before its beginning
        assert 0 < arrows["s"] <= num_messages
    else:
        assert arrows["s"] == num_messages


@case
def a_send_does_not_wait_for_its_receive(stage: int, num_stages: int) -> None:
    """Every stage sends all it has before any stage posts a receive: it would hang if a send waited."""
    # Several sends of a stream that wait for the peer could hold up the barrier on a GPU.
    num, peer = 1 if device().type == "cuda" else 5, (stage + 1) % num_stages
    downs = tuple(Message("forward", index, 1) for index in range(num))
    ups = tuple(Message("backward", index, 1) for index in range(num))
    channel = PipelineChannel((4,), torch.float32, Traffic(downs + ups, downs + ups, wraps=True), device=device())
    channel.links.agree((4,), torch.float32, channel.traffic)
    torch.full((4,), 0.0)
    meet()  # what is called below is loaded now: see the note on a channel's first step
    with mock.patch.object(type(channel._into["forward"]), "_post_ahead"):  # no receive is posted by itself
        channel.begin_step()
        kept: list[weakref.ref[Tensor]] = []
        for message in downs + ups:
            sent = torch.full((4,), 100.0 * stage + message.micro_batch)
            channel.send(message, sent)
            under_way = channel._out[message.direction].link._flying
            kept += [weakref.ref(under_way[-1]._tensor)] if under_way[-1]._tensor is not None else []
            del sent
        meet()
        before = (stage - 1) % num_stages
        # Gradients first, although they were sent last: directions do not wait for each other.
        for message, sender in [(m, peer) for m in ups] + [(m, before) for m in downs]:
            assert channel.receive(message).tolist() == [100.0 * sender + message.micro_batch] * 4
        channel.finish()
    assert not under_way
    gc.collect()
    assert not any(tensor() is not None for tensor in kept)


@case
def pipelines_lie_side_by_side(stage: int, num_stages: int) -> None:
    """Stages are not neighbours in rank: two pipelines of every second rank, or of one."""
    if num_stages % 2:
        return
    pipelines = [list(range(first, num_stages, 2)) for first in range(2)]
    group = [dist.new_group(ranks) for ranks in pipelines][stage % 2]
    own, p = stage // 2, num_stages // 2
    schedule = interleaved(p, 2 * p, 2) if p > 1 else one_forward_one_backward(1, 3)
    groups = open_link_groups(pipelines, device(), schedule.wraps)
    ready_made = PipelineLinks(group, device(), schedule.wraps, groups=groups)
    for links in (ready_made, None):
        model = model_of(schedule, own)
        if links is None and p > 1 and dist.group.WORLD.bound_device_id is not None:
            with pytest.raises(ValueError, match="open_link_groups"):
                channel_of(schedule, group=group)
            continue
        run_schedule(schedule, channel_of(schedule, group=group, links=links), model)
        assert_equals_one_process(schedule, model, own)


@case
def stages_that_differ_are_told_both_sides(stage: int, num_stages: int) -> None:
    odd = num_stages - 2
    schedule, other = one_forward_one_backward(num_stages, 4), one_forward_one_backward(num_stages, 5)
    alike: dict[str, Any] = {"shape": (BATCH, WIDTH), "dtype": torch.float32, "traffic": schedule.traffic(stage)}
    for name, value, shown in (
        ("shape", (BATCH, WIDTH + 1), rf"shape = .*\[{BATCH}, {WIDTH}"),
        ("dtype", torch.bfloat16, r"dtype = .*torch.bfloat16"),
        ("traffic", other.traffic(stage), r"messages = .* messages, order .* messages, order"),
    ):
        mine = {**alike, name: value} if stage == odd else alike
        if abs(stage - odd) <= 1 or device().type == "cuda":  # there all stages open peer memory together
            with pytest.raises(ValueError, match=rf"{shown}.*stage \d \(rank \d\): both ends"):
                PipelineChannel(**mine, device=device())
        else:
            PipelineChannel(**mine, device=device())
        meet()


@case
def links_that_differ_name_the_argument_and_both_stages(stage: int, num_stages: int) -> None:
    odd = stage == num_stages - 1
    for name, usual, other in (("wraps", False, True), ("path", "auto", "group"), ("max_ctas", 4, 8)):
        says = rf"{name} = {usual} on rank.*, {other} on rank {num_stages - 1}; give every stage the same"
        arguments: dict[str, Any] = {"wraps": False, name: other if odd else usual}
        with pytest.raises(ValueError, match=says):
            PipelineLinks(None, device(), **arguments)
        if name != "path":
            with pytest.raises(ValueError, match=says):
                open_link_groups([range(num_stages)], device(), **arguments)
    schedule = interleaved(num_stages, num_stages, 2)
    traffic = schedule.traffic(stage)
    links = PipelineLinks(None, device(), True)
    mine = Traffic(traffic.receives, traffic.sends, wraps=not odd)
    if device().type == "cuda" or num_stages == 2 or stage in (0, num_stages - 2, num_stages - 1):  # its neighbours
        with pytest.raises(
            ValueError, match=r"wraps = (True|False) on stage \d .*, (True|False) on stage \d .*both ends"
        ):
            PipelineChannel((BATCH, WIDTH), torch.float32, mine, links=links)
    else:
        PipelineChannel((BATCH, WIDTH), torch.float32, mine, links=links)


@case
def links_of_a_step_that_raised_are_refused(stage: int, num_stages: int) -> None:
    schedule = one_forward_one_backward(num_stages, 2)
    links = PipelineLinks(None, device(), False)
    channel = channel_of(schedule, links=links)
    run_schedule(schedule, channel, model_of(schedule, stage))
    channel_of(schedule, links=links)  # behind a finished step they are used again
    if stage == 0:
        with pytest.raises(ZeroDivisionError), mock.patch.object(Link, "launch", side_effect=ZeroDivisionError):
            run_schedule(schedule, channel, model_of(schedule, stage))
    meet()
    with pytest.raises(RuntimeError, match=r"links: rank 0 left a step unfinished, .*; open new PipelineLinks"):
        channel_of(schedule, links=links)
    model = model_of(schedule, stage)
    run_schedule(schedule, channel_of(schedule), model)
    assert_equals_one_process(schedule, model, stage)


@case
def channels_share_the_ends_of_their_links(stage: int, num_stages: int) -> None:
    made = mock.Mock(side_effect=lambda device: None if device.type == "cpu" else torch.cuda.Stream(device))
    recorder = Recorder(device())
    with mock.patch("collectives.pipeline.links.new_stream", made):
        links = PipelineLinks(None, device(), True)
        first, second = (channel_of(interleaved(num_stages, num_stages * n, 2), links=links) for n in (1, 2))
        told = channel_of(interleaved(num_stages, num_stages, 2), links=links, recorder=recorder)
        assert made.call_count == 4
    for ends, others, apart in ((first._into, second._into, told._into), (first._out, second._out, told._out)):
        for direction, end in ends.items():
            assert end.link is others[direction].link
            assert end.link is not apart[direction].link
            assert end.link.stream is apart[direction].link.stream
    for channel, rounds in ((first, 1), (told, 1), (second, 2), (first, 1)):
        schedule = interleaved(num_stages, num_stages * rounds, 2)
        model = model_of(schedule, stage)
        run_schedule(schedule, channel, model)
        assert_equals_one_process(schedule, model, stage)
    assert recorder.counts().total() == 2 * len(told.traffic.sends)
    links.close()


@case
def a_message_has_elements_whatever_slots_there_are(stage: int, num_stages: int) -> None:
    """On slots of fakes: of each size their own, and none for nothing."""
    opened: list[int] = []

    class Fake:
        def __init__(self, _group: object, num_bytes: int, _device: object) -> None:
            self.num_bytes = num_bytes
            opened.append(num_bytes)

    traffic = one_forward_one_backward(num_stages, 2).traffic(stage)
    with (
        mock.patch.object(PipelineLinks, "_why_no_peers", return_value=None),
        mock.patch("collectives.pipeline.links.Slots", Fake),
    ):
        links = PipelineLinks(None, device(), False)
        for shape in ((2, 3), (0, 3), (2, 3), (4,), (2, 0), ()):
            if 0 in shape:
                with pytest.raises(
                    ValueError, match=rf"shape = \[{shape[0]}, {shape[1]}\]: a message has at least one"
                ):
                    links.agree(shape, torch.float32, traffic)
            else:
                links.agree(shape, torch.float32, traffic)
    assert opened == [24, 16, 4]


@case
def what_one_stage_finds_all_hear_where_all_open_memory_together(stage: int, num_stages: int) -> None:
    traffic = one_forward_one_backward(num_stages, 2).traffic(stage)
    width = WIDTH + (stage == num_stages - 1)
    with (
        mock.patch.object(PipelineLinks, "_why_no_peers", return_value=None),
        pytest.raises(ValueError, match=rf"shape = .*stage {num_stages - 1} \(rank {num_stages - 1}\).*: both ends"),
    ):
        PipelineChannel((BATCH, width), torch.float32, traffic, device=device())


@case
def links_have_the_timeout_of_the_world(stage: int, num_stages: int) -> None:
    groups = open_link_groups([range(num_stages)], device(), wraps=False)
    assert {timeout_of(group, device()) for group in groups.values()} == {timeout_of(None, device())}
    assert timeout_of(None, device()) == timedelta(seconds=30)  # the harness'


@case
def what_breaks_the_agreement_is_refused(stage: int, num_stages: int) -> None:
    schedule = one_forward_one_backward(num_stages, 2)
    channel = channel_of(schedule)
    first, second = Message("forward", 0), Message("forward", 1)
    channel.begin_step()
    if stage == 0:
        with pytest.raises(
            ValueError, match=r"dtype = torch\.float64: stage 0 and its neighbours agreed on torch\.float32"
        ):
            channel.send(first, torch.zeros(BATCH, WIDTH, dtype=torch.float64))
        with pytest.raises(ValueError, match=r"shape = \[1\]"):
            channel.send(first, torch.zeros(1))
        with pytest.raises(
            ValueError, match="out of order: the traffic has the activation of micro-batch 0 for chunk 0"
        ):
            channel.send(second, torch.zeros(BATCH, WIDTH))
        with pytest.raises(ValueError, match="no forward messages here"):
            channel.receive(first)
    if channel.overlap:  # not in the first step on CUDA
        with pytest.raises(ValueError, match="overlap=False"):
            channel.exchange([], [])
    with pytest.raises(RuntimeError, match=r"not finished: .* has not been called for"):
        channel.finish()
    with pytest.raises(RuntimeError, match="not finished"):
        channel.begin_step()
    with pytest.raises(ValueError, match=f"for {num_stages + 1} stages"):
        run_schedule(one_forward_one_backward(num_stages + 1, 2), channel, model_of(schedule, stage))
    # The receives that are posted find their messages, so that nothing is left under way.
    for action in schedule.stages[stage]:
        need, give = schedule.incoming(stage, action), schedule.outgoing(stage, action)
        if need is not None:
            channel.receive(need)
        if give is not None:
            channel.send(give, torch.zeros(BATCH, WIDTH))
    channel.finish()


@case
def a_peer_that_never_sends_is_named(stage: int, num_stages: int) -> None:
    if device().type == "cuda":
        return  # NCCL's watchdog ends the process
    schedule = one_forward_one_backward(num_stages, 1)
    links = PipelineLinks(None, device(), False, timeout=timedelta(seconds=0.5))
    recorder = Recorder()
    channel = channel_of(schedule, links=links, recorder=recorder)
    if stage == num_stages - 1:
        recorder.begin_step(7)
        channel.begin_step()
        says = (
            rf"recv of the activation of micro-batch 0 for chunk 0 from stage {stage - 1} .* in step 7 did not complete"
        )
        with pytest.raises(CollectiveTimeout, match=says):
            channel.receive(Message("forward", 0))
    meet()


@case
def a_watch_says_who_is_late(stage: int, num_stages: int) -> None:
    if device().type == "cuda":
        return  # as above
    schedule = one_forward_one_backward(num_stages, 1)
    watch = Watch(timeout=timedelta(seconds=1), layout=ParallelLayout(pp=num_stages), answer_s=0.5)
    links = PipelineLinks(None, device(), False, timeout=timedelta(seconds=1))
    channel = channel_of(schedule, links=links, watch=watch)
    for step in range(2):
        watch.begin_step(step)
        if step == 0:
            run_schedule(schedule, channel, model_of(schedule, stage))
        elif stage == num_stages - 1:
            channel.begin_step()
            with pytest.raises(CollectiveTimeout, match=r"activation of micro-batch 0 .* at step 1: rank") as caught:
                channel.receive(Message("forward", 0))
            assert caught.value.culprits == (stage - 1,)
    meet()
    watch.close()


@case
def a_muted_channel_computes_and_sends_nothing(stage: int, num_stages: int) -> None:
    schedule = interleaved(num_stages, num_stages, 2)
    recorder = Recorder(device())
    channel = channel_of(schedule, recorder=recorder)
    channel.muted = True
    model = model_of(schedule, stage)
    run_schedule(schedule, channel, model)
    assert not recorder.counts()
    assert len(gradients(list(model.chunks))) == sum(len(list(part.parameters())) for part in model.chunks)
    channel.muted = False
    model = model_of(schedule, stage)
    run_schedule(schedule, channel, model)
    assert_equals_one_process(schedule, model, stage)


@case
def a_stage_without_a_tensor_to_send_is_named(stage: int, num_stages: int) -> None:
    class Silent:
        def forward(self, action: Action, received: Tensor | None) -> Tensor | None:
            return None

        backward = forward

    if stage == 0:
        schedule = one_forward_one_backward(num_stages, 1)
        channel = mock.Mock(spec=PipelineChannel, num_stages=num_stages, stage=0, overlap=True)
        with pytest.raises(ValueError, match="stage 0: the forward of micro-batch 0, chunk 0 returned None"):
            run_schedule(schedule, channel, Silent())
