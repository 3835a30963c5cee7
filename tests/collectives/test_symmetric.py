"""Rounds over peer memory on a fake driver: what is launched, in which order, on which stream, and what is refused."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from collectives.transport import symmetric
from collectives.transport.symmetric import HEAD_BYTES, PeerRounds, Window

RANK, RANKS, DEVICE = 1, 4, torch.device("cuda", 0)
BASES = [(1 + rank) << 20 for rank in range(RANKS)]


class Log:
    """All that streams, events and the driver were asked for, in order."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.num_events = 0
        self.error = 0

    def of(self, *kinds: str) -> list[tuple[Any, ...]]:
        return [call for call in self.calls if call[0] in kinds]


class Stream:
    def __init__(self, log: Log, name: str, handle: int) -> None:
        self.log, self.name, self.cuda_stream = log, name, handle

    def wait_event(self, event: Event) -> None:
        self.log.calls.append(("wait", self.name, event.number, event.recorded))


class Event:
    def __init__(self, log: Log) -> None:
        self.log, self.number, self.recorded = log, log.num_events, ""
        log.num_events += 1

    def record(self, stream: Stream) -> None:
        self.recorded = stream.name
        self.log.calls.append(("record", stream.name, self.number))


class Driver:
    """Names streams by their handles."""

    def __init__(self, log: Log, streams: dict[int, str], names: dict[int, str]) -> None:
        self.log, self.streams, self.names = log, streams, names

    def cuLaunchKernel(self, function: Any, *arguments: Any) -> int:  # noqa: N802 - as the driver has it
        self.log.calls.append(("launch", self.streams[arguments[7].value], self.names[function.value]))
        return self.log.error

    def cuMemcpyAsync(self, target: Any, _source: Any, count: Any, stream: Any) -> int:  # noqa: N802
        self.log.calls.append(("copy", self.streams[stream.value], target.value, count.value))
        return self.log.error


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> tuple[PeerRounds, Log]:
    """Rank 1's rounds of four, each over a window at an address of its own."""
    log, names = Log(), list[str]()
    streams = [Stream(log, name, 1 + number) for number, name in enumerate(("current", "copies", "flags"))]
    made = iter(streams[1:])
    monkeypatch.setattr(torch.cuda, "Stream", lambda *_, **__: next(made))
    monkeypatch.setattr(torch.cuda, "Event", lambda: Event(log))
    monkeypatch.setattr(symmetric, "current_stream", lambda _: streams[0])
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: mock.Mock(multi_processor_count=1))
    by_handle: dict[int, str] = {}

    def get_function(name: str) -> Any:
        names.append(name)
        by_handle[len(names)] = name
        return mock.Mock(kernel=mock.Mock(ptr=len(names)))

    def window(_group: Any, _num_bytes: int, device: torch.device) -> Window:
        one = Window.__new__(Window)
        one.rank, one.num_ranks, one.device, one.addresses, one.own = RANK, RANKS, device, list(BASES), BASES[RANK]
        one._functions, one._packed, one._module = {}, {}, mock.Mock(get_function=get_function)
        return one

    monkeypatch.setattr(symmetric, "Window", window)
    monkeypatch.setattr(dist, "get_world_size", lambda _: RANKS)
    driver = Driver(log, {stream.cuda_stream: stream.name for stream in streams}, by_handle)
    monkeypatch.setattr(symmetric, "driver", lambda: driver)
    return PeerRounds(mock.Mock(), 4096, DEVICE), log


def go_round(rounds: PeerRounds, source: torch.Tensor) -> None:
    """A gather: the same rows to all peers, which are awaited one after the other."""
    rounds.begin()
    rounds.wait_for_current_stream()
    for ahead in range(1, RANKS):
        rounds.send(source, ahead)
    for post_reduce_stream in range(1, RANKS):
        rounds.wait(post_reduce_stream)
    rounds.finish()


def test_a_round_is_launched_in_order_on_its_streams(opened: tuple[PeerRounds, Log]) -> None:
    rounds, log = opened
    source = torch.zeros(64)
    go_round(rounds, source)
    start = HEAD_BYTES + RANK * source.nbytes
    sent = [("copy", "copies", BASES[peer] + start, source.nbytes) for peer in (2, 3, 0)]
    flagged = ("launch", "flags", "signal")
    assert log.of("copy", "launch") == [
        ("launch", "copies", "await_ready"),
        *(call for copy in sent for call in (copy, flagged)),
        *[("launch", "current", "await_arrived")] * 3,
        ("launch", "current", "release"),
    ]
    # The copies begin behind the current stream, and each flag behind its copy.
    assert log.calls[:2] == [("record", "current", 3), ("wait", "copies", 3, "current")]
    for copy in sent:
        at = log.calls.index(copy)
        assert log.calls[at + 1 : at + 4] == [("record", "copies", 3), ("wait", "flags", 3, "copies"), flagged]
    # Who awaits the k-th peer behind does so behind its own k-th send: the deadlock's note.
    own = [call for call in log.of("record", "wait") if call[2] < RANKS - 1]
    assert own == [
        *[("record", "flags", number) for number in range(3)],
        *[("wait", "current", number, "flags") for number in range(3)],
    ]


def test_later_rounds_make_no_events(opened: tuple[PeerRounds, Log]) -> None:
    rounds, log = opened
    go_round(rounds, torch.zeros(64))
    first, made = list(log.calls), log.num_events
    log.calls.clear()
    go_round(rounds, torch.zeros(64))
    assert log.num_events == made
    assert log.calls == first


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (torch.zeros(2048), "8192 bytes do not fit into a slot of 4096"),
        (torch.zeros(8, 8).t()[:4], "must be contiguous"),
    ],
    ids=["too large", "strided"],
)
def test_what_cannot_be_sent_is_refused_before_anything_is(
    opened: tuple[PeerRounds, Log], source: torch.Tensor, words: str
) -> None:
    rounds, log = opened
    rounds.begin()
    with pytest.raises(ValueError, match=words):
        rounds.send(source, 1)
    assert not log.calls
    assert rounds.is_open


@pytest.mark.parametrize("ask", [lambda rounds: rounds.send(torch.zeros(4), 1), lambda rounds: rounds.finish()])
def test_an_error_of_the_driver_is_raised(opened: tuple[PeerRounds, Log], ask: Callable[[PeerRounds], None]) -> None:
    rounds, log = opened
    rounds.begin()
    log.error = 719
    with pytest.raises(RuntimeError, match="CUDA driver error 719"):
        ask(rounds)
    assert rounds.is_open


def test_sums_of_any_dtype_go_into_float32(opened: tuple[PeerRounds, Log]) -> None:
    rounds, log = opened
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        rounds.reduce_wide(torch.zeros(64, dtype=dtype), torch.zeros(64), True)
    assert [name for _, _, name in log.of("launch")] == [
        f"reduce_wide_{name}" for name in ("bfloat16", "float16", "float32")
    ]
    with pytest.raises(ValueError, match=r"wide sums are of float32, got torch\.bfloat16"):
        rounds.reduce_wide(torch.zeros(64), torch.zeros(64, dtype=torch.bfloat16), False)
    with pytest.raises(ValueError, match="a multiple of 16 bytes, got 8"):
        rounds.reduce_wide(torch.zeros(2), torch.zeros(2), False)


def test_arguments_reach_the_driver_as_wide_as_it_reads_them(opened: tuple[PeerRounds, Log]) -> None:
    window = opened[0].window
    pointers, values = window._pack("signal", (RANK, 2))
    assert [type(value) for value in values] == [ctypes.c_uint64] * 8 + [ctypes.c_int] * 2
    assert [value.value for value in values] == [*BASES, 0, 0, 0, 0, RANK, 2]
    assert len(pointers) == len(values)


def test_a_window_is_opened_on_the_current_device_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    with pytest.raises(ValueError, match=r"call torch.cuda.set_device\(0\) first"):
        Window(mock.Mock(), 4096, DEVICE)
