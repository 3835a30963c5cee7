"""A lane's streams, on fakes: what a computation waits for, and what of it counts as communication."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from collectives.lane import Flight, Lane
from collectives.link import Link
from collectives.recorder import Recorder
from collectives.watch import Watch

CPU = torch.device("cpu")


def test_an_update_behind_a_collective_is_waited_for_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []

    class Stream:
        def wait_event(self, event: object) -> None:
            calls.append(event)

        def record_event(self) -> str:
            return "updated"

    @contextmanager
    def waiting(_: object) -> Iterator[None]:
        calls.append("waiting")
        yield
        calls.append("waited")

    lane = mock.Mock(spec=Lane, device=CPU, waiting=waiting)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: Stream())
    monkeypatch.setattr(torch.cuda, "stream", mock.MagicMock())
    flight = Flight(lane, None, None, "arrived", None, ())  # type: ignore[arg-type]
    flight.follow(lambda: None, Stream())  # type: ignore[arg-type]
    calls.clear()
    flight.wait()
    flight.wait()
    assert calls == ["waiting", "arrived", "waited", "updated"]


def test_nothing_is_noted_of_a_capture() -> None:
    recorder, track = Recorder(), mock.Mock()
    lane = Lane("gather", None, CPU, recorder)
    lane.track = track
    with mock.patch.object(Lane, "is_capturing", True), lane.recording("gather", "all_gather", 8) as collective:
        assert collective is None
        assert lane.counted("all_gather", 8) is None
    assert not recorder.counts()
    track.launch.assert_not_called()
    with lane.recording("gather", "all_gather", 8) as collective:
        assert collective is not None


def test_a_link_tells_the_watch_whom_to_ask_for_a_broken_communicator(monkeypatch: pytest.MonkeyPatch) -> None:
    group, watch = mock.Mock(spec=dist.ProcessGroup), mock.Mock(spec=Watch)
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    for config, backend in (("cuda:nccl", group._get_backend.return_value), ("cpu:gloo,cuda:gloo", None)):
        monkeypatch.setattr(dist, "get_backend_config", lambda _, config=config: config)
        Link("send", "forward", group, 1, 2, 5, CPU, watch=watch)
        watch.add_track.assert_called_with("pipeline forward 1-2", [3, 5], backend=backend)
