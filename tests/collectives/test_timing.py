"""Times of calls that ranks make together: turns; neither ranks nor hosts are measured, on a made-up device."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from collectives import timing
from collectives.timing import Times, make_replay, time_in_turn


@pytest.fixture
def group(tmp_path: Path) -> Iterator[dist.ProcessGroup]:
    """Of one rank, on gloo."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    assert dist.group.WORLD is not None
    yield dist.group.WORLD
    dist.destroy_process_group()


def test_systems_take_turns_and_times_are_those_of_a_launch(group: dist.ProcessGroup) -> None:
    heard: list[str] = []
    replays = {name: lambda name=name: heard.append(name) for name in ("a", "b")}
    times = time_in_turn(replays, group, torch.device("cpu"), launches=10, count=2, rounds=3)
    assert heard == (["a"] * 3 + ["b"] * 3) * 3  # each warmed up once a round
    assert {name: [len(found) for found in one.rounds_us] for name, one in times.items()} == {
        "a": [2] * 3,
        "b": [2] * 3,
    }
    assert all(0 < us < 1e5 for one in times.values() for us in one.each_us)
    assert not any(one.host_bound for one in times.values())


def test_the_tensors_of_a_graph_live_as_long_as_its_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("current_stream", "Stream", "stream", "graph", "CUDAGraph"):
        monkeypatch.setattr(torch.cuda, name, mock.MagicMock())
    tensor = torch.zeros(1)
    kept = weakref.ref(tensor)
    replay = make_replay(tensor.zero_, 2, torch.device("cuda"))
    del tensor
    gc.collect()
    assert kept() is not None
    replay()
    torch.cuda.CUDAGraph().replay.assert_called_once_with()
    del replay
    assert kept() is None


class Device:
    """A device whose host takes `host_ms` to launch a call, and which sleeps a millisecond a million cycles."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, host_ms: float) -> None:
        self.heard: list[str] = []
        self.slept_ms = 0.0
        device = self

        class Event:
            def __init__(self, enable_timing: bool = False) -> None:
                self.name = "mark" if enable_timing else "slept"

            def record(self) -> None:
                device.heard.append(self.name)

            def query(self) -> bool:
                return device.slept_ms < host_ms

            def synchronize(self) -> None:
                device.heard.append("read")

            def elapsed_time(self, _end: Any) -> float:
                return 0.25

        def sleep(cycles: int) -> None:
            device.slept_ms = cycles / 1e6
            device.heard.append("sleep")

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "_sleep", sleep)
        monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: device.heard.append("meet"))


def measure(device: Device, group: dist.ProcessGroup, count: int) -> tuple[list[bool], list[float]]:
    return timing._time_on_cuda(lambda: device.heard.append("call"), group, torch.device("cpu"), count)


def test_ranks_meet_on_the_device_between_the_sleep_and_the_first_mark(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(monkeypatch, host_ms=0.1)
    late, each_us = measure(device, group, count=2)
    assert (late, each_us) == ([False] * 2, [250.0] * 2)
    assert device.heard == ["sleep", "slept", "meet", "mark", "call", "mark", "read"] * (timing._WARM_UPS + 2)


@pytest.mark.parametrize(("host_ms", "num_late"), [(8.0, 0), (16.0, 1), (1000.0, 4)])
def test_the_sleep_grows_until_the_host_is_ahead_and_what_is_late_is_counted(
    group: dist.ProcessGroup, monkeypatch: pytest.MonkeyPatch, host_ms: float, num_late: int
) -> None:
    late, _ = measure(Device(monkeypatch, host_ms), group, count=4)
    assert sum(late) == num_late


def test_a_median_is_the_hosts_where_half_of_the_calls_were_late() -> None:
    assert not Times([[1.0, 1.0], [1.0]], num_late=1).host_bound
    assert Times([[1.0, 1.0], [1.0, 1.0]], num_late=2).host_bound
