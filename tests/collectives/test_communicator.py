"""A communicator's streams, on fakes: what a computation waits for, and what of it counts as communication."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from collectives.health import checks as health
from collectives.pipeline.link import Link
from collectives.sharded.bucket import num_holders
from collectives.transport.communicator import Communicator, Work
from collectives.watch.recorder import Recorder
from collectives.watch.watchdog import Watch
from netlayer.errors import CollectiveTimeout, PeerLost

CPU = torch.device("cpu")


def test_an_update_behind_a_collective_is_waited_for_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Stream:
        def wait_event(self, event: object) -> None:
            calls.append(event)

        def record_event(self) -> str:
            return "updated"

    @contextmanager
    def waiting(_: object, _until: object) -> Iterator[None]:
        calls.append("waiting")
        yield
        calls.append("waited")

    comm = mock.Mock(spec=Communicator, device=CPU, waiting=waiting)
    monkeypatch.setattr("collectives.transport.communicator.current_stream", lambda _: Stream())
    monkeypatch.setattr(torch.cuda, "stream", mock.MagicMock())
    handle = Work(comm, None, None, "arrived", None, ())  # type: ignore[arg-type]
    handle.then(lambda: None, Stream())  # type: ignore[arg-type]
    calls.clear()
    handle.wait()
    handle.wait()
    assert calls == ["waiting", "arrived", "waited", "updated"]


def test_a_collective_behind_another_is_recorded_where_the_computation_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_event(self, event: str) -> None:
            calls.append(f"{self.name} waits for {event}")

        def record_event(self) -> str:
            return "mean"

    @contextmanager
    def waiting(collective: str, _until: object) -> Iterator[None]:
        calls.append(f"record of {collective}")
        yield

    comm = mock.Mock(spec=Communicator, device=CPU, waiting=waiting)
    side: Any = Stream("side")
    monkeypatch.setattr("collectives.transport.communicator.current_stream", lambda _: Stream("compute"))
    monkeypatch.setattr(torch.cuda, "stream", mock.MagicMock())
    shards, replicas = (Work(comm, name, None, f"{name} sum", None, ()) for name in ("shard", "replica"))  # type: ignore[arg-type]
    shards.then_launch(lambda: replicas, side)
    shards.then(lambda: calls.append("store"), side)
    assert calls == ["side waits for shard sum", "side waits for replica sum", "side waits for mean", "store"]
    calls.clear()
    shards.wait()
    assert calls == [
        "record of shard",
        "compute waits for shard sum",
        "record of replica",
        "compute waits for replica sum",
        "compute waits for replica sum",  # and what follows it: nothing here
        "compute waits for mean",
    ]


def test_a_callback_of_a_work_waits_until_its_rest_is_launched() -> None:
    calls: list[str] = []
    handle = Work(
        Communicator("reduce", None, CPU), None, None, None, None, (), "reduce_scatter", lambda: calls.append("sum")
    )
    handle.then(lambda: calls.append("update"), None)
    assert not calls
    handle.launch_rest()
    handle.launch_rest()
    assert calls == ["sum"]
    handle.wait()
    assert calls == ["sum", "update"]


@pytest.mark.parametrize(
    "ask", [lambda handle: handle.wait(), lambda handle: handle.done_event], ids=["wait", "landed"]
)
def test_who_asks_for_a_work_launches_its_rest(ask: Callable[[Work], object]) -> None:
    calls: list[str] = []
    ask(Work(Communicator("reduce", None, CPU), None, None, None, None, (), late=lambda: calls.append("sum")))
    assert calls == ["sum"]


def test_nothing_is_noted_of_a_capture() -> None:
    recorder, track = Recorder(), mock.Mock()
    comm = Communicator("gather", None, CPU, recorder)
    comm.track = track
    with mock.patch.object(Communicator, "is_capturing", True), comm.recording("gather", "all_gather", 8) as collective:
        assert collective is None
        assert comm.counted("all_gather", 8) is None
    assert not recorder.counts()
    track.launch.assert_not_called()
    with comm.recording("gather", "all_gather", 8) as collective:
        assert collective is not None


def test_a_link_tells_the_watch_whom_to_ask_for_a_broken_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    group, watch = mock.Mock(spec=dist.ProcessGroup), mock.Mock(spec=Watch)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    for config, backend in (("cuda:nccl", group._get_backend.return_value), ("cpu:gloo,cuda:gloo", None)):
        monkeypatch.setattr(dist, "get_backend_config", lambda _, config=config: config)
        Link("send", "forward", group, 1, 2, 5, CPU, watch=watch)
        watch.add_track.assert_called_with("pipeline forward 1-2", [3, 5], backend=backend)


@pytest.mark.parametrize(
    ("world_size", "config", "expected"),
    [(8, "cuda:nccl", True), (8, "cpu:gloo,cuda:nccl", True), (6, "cuda:nccl", False), (8, "cuda:gloo", False)],
)
def test_nccl_divides_by_a_power_of_two_on_the_way(
    monkeypatch: pytest.MonkeyPatch, world_size: int, config: str, expected: bool
) -> None:
    monkeypatch.setattr(dist, "get_backend_config", lambda _: config)
    comm = Communicator("reduce", None, CPU)
    assert not comm.divides_on_the_way  # it has nothing to add up
    comm = Communicator("reduce", None, CPU)
    comm.stream, comm.world_size = LateStream(), world_size  # type: ignore[assignment]
    assert comm.divides_on_the_way == expected


def test_one_rank_alone_has_no_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collectives.transport.communicator.new_stream", mock.Mock(side_effect=AssertionError))
    comm = Communicator("reduce", None, CPU)
    total_S = torch.empty(3)
    comm.reduce_scatter(total_S, given_N := torch.zeros(3), lambda: given_N.fill_(2.0)).wait()
    assert total_S.tolist() == [2.0, 2.0, 2.0]
    assert (comm.stream, comm.post_reduce_stream, comm.mark()) == (None, None, None)


def test_a_communicator_opens_a_side_stream_when_it_is_first_used(monkeypatch: pytest.MonkeyPatch) -> None:
    made = mock.Mock(return_value=None)
    monkeypatch.setattr("collectives.transport.communicator.new_stream", made)
    monkeypatch.setattr(Communicator, "_probe_gather", lambda _: True)
    for name, given in (("get_rank", 0), ("get_world_size", 2), ("get_process_group_ranks", [0, 1])):
        monkeypatch.setattr(dist, name, lambda *_, given=given: given)
    comm = Communicator("reduce", mock.Mock(spec=dist.ProcessGroup), CPU)
    assert made.call_args_list == [mock.call(CPU)]
    for _ in range(2):
        comm._fill(None, ())
        assert made.call_count == 1
    for _ in range(2):
        comm._fill(lambda: None, ())
        assert made.call_args_list[1:] == [mock.call(CPU)]
    assert comm.post_reduce_stream is comm.post_reduce_stream
    assert made.call_args_list[2:] == [mock.call(CPU, priority=0)]


class LateStream:
    """What was launched on it never lands."""

    def record_event(self) -> mock.Mock:
        return mock.Mock(query=lambda: False)


def test_a_host_that_waits_for_a_device_gives_up_within_the_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    comm = Communicator("gather", None, CPU)
    comm.stream, comm.world_size = LateStream(), 2  # type: ignore[assignment]
    monkeypatch.setattr("collectives.transport.communicator.timeout_of", lambda *_: timedelta(seconds=0.01))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    says = r"group gather, on rank 3, did not complete in .* s; a rank is late, .* logs of all ranks, .* watch=Watch"
    with pytest.raises(CollectiveTimeout, match=says):
        comm.wait_on_host()


@pytest.mark.parametrize(
    ("said", "error"),
    [
        ("[/a/b/pair.cc:537] Timed out waiting 500ms for recv operation to complete. Check", CollectiveTimeout),
        ("Connection closed by peer [127.0.0.1]:1234", PeerLost),
        ("out of memory", RuntimeError),
    ],
)
def test_a_backends_words_become_ours(said: str, error: type[Exception], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    work = mock.Mock()
    work.wait.side_effect = RuntimeError(said)
    heart = said.removeprefix("[/a/b/pair.cc:537] ").partition(" [")[0].partition(". ")[0]
    begin = "all_gather of group gather, on rank 3, did not complete: " if error is not RuntimeError else ""
    with pytest.raises(error, match=f"^{begin}{heart}"):
        Work(Communicator("gather", None, CPU), None, work, None, None, (), "all_gather").wait()


def test_a_device_may_be_a_name() -> None:
    assert Communicator("gather", None, "cpu").device == CPU
    assert [row["wrong"] for row in health.gemm("cpu", 16, repeats=1)] == [0]


def test_the_last_handles_are_held_by_the_communicator_and_not_by_the_backend_alone() -> None:
    comm, works = Communicator("dp", None, "cpu"), [mock.Mock() for _ in range(20)]
    for work in works:
        Work(comm, None, work, None, None, ()).wait()
    held = list(comm.ended)
    assert held == works[-len(held) :]
    assert 2 < len(held) < 20


def test_a_handle_that_is_held_keeps_no_memory_of_the_caller() -> None:
    comm, given = Communicator("dp", None, "cpu"), torch.ones(4)
    lent = given.data
    usual = num_holders(given)
    Work(comm, None, mock.Mock(), None, None, (), lent=[lent]).wait()
    assert lent.numel() == 0
    assert num_holders(given) == usual - 1
    assert given.tolist() == [1] * 4
