"""The monitor: what it records, that it never synchronises, and that it stays within its memory."""

from __future__ import annotations

import ctypes
import gc
import itertools
import threading
import time
from collections import Counter as Count
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar
from unittest.mock import MagicMock

import pytest
import torch

from collectives import Recorder
from collectives import clock as clock_module
from collectives.transport import current_stream as current_stream_module
from collectives.watch import late_steps
from collectives.watch.monitor import Monitor
from collectives.watch.processor import ProcessorWait
from collectives.watch.ring import Ring
from netlayer.observe.events import Counter, Event, Mark, Origin, Segment, events_of, to_batch
from tests.collectives.conftest import RunCase
from tests.collectives.harness import Case, Ranks, on_ranks
from tests.collectives.monitor_cases import CASES

ORIGIN = Origin(run="t", rank=0)


class Kept:
    """A transport that keeps what it gets."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.closed = 0

    def send(self, events: Sequence[Event]) -> int:
        self.events += events
        return 0

    def close(self) -> None:
        self.closed += 1

    def segments(self, kind: str | None = None) -> list[Segment]:
        return [each for each in self.events if isinstance(each, Segment) and kind in (None, each.segment)]

    def dropped(self) -> float:
        return sum(each.value or 0 for each in self.events if isinstance(each, Mark) and each.name == "dropped")


@pytest.fixture
def kept() -> Kept:
    return Kept()


@pytest.fixture
def monitor(kept: Kept) -> Iterator[Monitor]:
    """A monitor that hands over when it is flushed or closed, and not before."""
    monitor = Monitor(kept, ORIGIN, interval_s=600)
    yield monitor
    monitor.close()


def test_segments_carry_step_micro_batch_and_order(monitor: Monitor, kept: Kept) -> None:
    for step in (1, 2):
        monitor.step(step)
        for micro_batch in range(2):
            with (
                monitor.segment("forward", micro_batch=micro_batch),
                monitor.segment("my <b>part</b>", note="x"),
            ):
                pass
            with monitor.segment("backward", micro_batch=micro_batch):
                pass
    monitor.end_step()
    with monitor.segment("checkpoint", "saves", on_host=True):
        pass
    monitor.mark("restart", "once more", count=1)
    monitor.counter("nic.tx_bytes", 5.0, "bytes")
    assert monitor.flush()
    names = Count((each.segment, each.step) for each in kept.segments())
    for step in (1, 2):
        assert names["step", step] == 1
        assert names["forward", step] == names["backward", step] == names["other", step] == 2
    assert names["checkpoint", None] == 1
    steps = kept.segments("step")
    assert steps[0].end_ns == steps[1].start_ns
    for each in kept.segments("forward"):
        of = steps[(each.step or 0) - 1]
        assert of.start_ns <= each.start_ns <= each.end_ns <= of.end_ns
    other = kept.segments("other")[0]
    assert (other.name, other.attributes) == ("my <b>part</b>", {"note": "x"})
    assert [type(each) for each in kept.events[-2:]] == [Mark, Counter]
    assert abs(kept.events[-1].end_ns - time.time_ns()) < 600e9


def test_what_a_recorder_marks_is_taken_once(monitor: Monitor, kept: Kept) -> None:
    recorder = Recorder()
    recorder.groups["gather"] = [0, 8, 16]
    monitor.follow(recorder)
    for step in (1, 2, 3):
        recorder.begin_step(step)
        with recorder.computing("forward", micro_batch=1, chunk=0):
            pass
        for _ in range(step):
            with recorder.launching("gather", "all_gather", 64) as collective:
                pass
            with recorder.waiting(collective):
                time.sleep(1e-4)
        recorder.end_step()
    with recorder.launching("gather", "all_gather", 64):  # an evaluation's, which nobody waits for
        pass
    assert monitor.flush()
    counts = Count((each.segment, each.step) for each in kept.segments())
    for step in (1, 2, 3):
        assert counts["collective", step] == counts["wait", step] == step
        assert counts["step", step] == counts["forward", step] == 1
    collectives = kept.segments("collective")
    assert [each.seq for each in collectives] == list(range(1, 8))
    assert {each.group_ranks for each in collectives} == {"0:17:8"}
    assert collectives[-1].attributes == {"end": "not seen"}
    assert [each.micro_batch for each in kept.segments("forward")] == [1, 1, 1]
    monitor.close()
    assert recorder.observer is None


def test_what_has_ended_of_a_late_step_is_handed_over_once(
    monitor: Monitor, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late_steps, "LATE_S", 0.0)
    monkeypatch.setattr(late_steps, "_MOST_PAUSE_S", 0.0)
    recorder = Recorder()
    monitor.follow(recorder)
    recorder.groups["pipeline"] = [0, 1]
    recorder.begin_step(7)
    with recorder.computing("forward", micro_batch=0):
        pass
    with recorder.launching("pipeline", "recv", 64) as message:
        pass
    monitor.flush()  # sees that a step is open
    time.sleep(0.002)
    monitor.flush()
    # The receive has not ended, and nobody knows when it will.
    assert [(each.segment, each.step) for each in kept.segments()] == [("forward", 7)]
    late = [each for each in kept.events if isinstance(each, Mark)]
    assert {(each.name, each.step, each.attributes is None) for each in late} == {("late", 7, True)}
    with recorder.waiting(message):
        time.sleep(1e-4)
        monitor.flush()
    late = [each for each in kept.events if isinstance(each, Mark)]
    assert late[-1].attributes == {"waits_for": "recv", "group": "pipeline", "group_ranks": "0:2:1"}
    recorder.end_step()
    assert monitor.flush()
    counts = Count(each.segment for each in kept.segments())
    assert counts == {"forward": 1, "collective": 1, "wait": 1, "step": 1}


def test_a_late_step_is_marked_again_as_soon_as_the_wait_changes(
    monitor: Monitor, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late_steps, "LATE_S", 0.0)
    monkeypatch.setattr(late_steps, "_LATE_STEPS", 0.0)
    recorder = Recorder()
    monitor.follow(recorder)
    recorder.groups["reduce"] = [0, 1]
    recorder.begin_step(3)
    monitor.flush()  # sees that a step is open
    monkeypatch.setattr(late_steps, "LATE_S", 3600.0)  # of the pauses between marks that say the same

    def marks() -> list[Mark]:
        monitor.flush()
        return [each for each in kept.events if isinstance(each, Mark)]

    [late] = [each for each in monitor._late_steps._open.values() if each.opened is not None]
    late.since_s -= 7200.0
    assert [each.attributes for each in marks()] == [None]
    assert len(marks()) == 1  # nothing has changed
    for number in (1, 2):  # alike, but two: the one that is waited for now is another one
        with recorder.launching("reduce", "all_reduce", 64) as collective:
            pass
        with recorder.waiting(collective):
            assert len(marks()) == 2 * number
            assert marks()[-1].attributes == {"waits_for": "all_reduce", "group": "reduce", "group_ranks": "0:2:1"}
        assert marks()[-1].attributes is None  # it has ended, and nothing is waited for
        ends = [each.end_ns for each in kept.segments()]
        assert max(ends) <= marks()[-1].end_ns  # no mark is older than the record
        assert len(marks()) == 2 * number + 1
    recorder.end_step()


def test_a_long_garbage_collection_is_a_segment(monitor: Monitor, kept: Kept, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collectives.watch.monitor._LEAST_GC_NS", 0)
    monitor.step(4)
    gc.collect()
    monitor.flush()
    assert any(each.attributes and each.attributes["generation"] == 2 for each in kept.segments("gc"))


def test_a_failing_block_is_recorded_and_raises(monitor: Monitor, kept: Kept) -> None:
    with pytest.raises(KeyError), monitor.segment("forward"):
        raise KeyError
    monitor.flush()
    assert len(kept.segments("forward")) == 1


class Stuck(Kept):
    """A transport that does not return until it is let go."""

    def __init__(self) -> None:
        super().__init__()
        self.go, self.entered = threading.Event(), threading.Event()

    def send(self, events: Sequence[Event]) -> int:
        self.entered.set()
        self.go.wait(60)
        return super().send(events)


def test_a_transport_that_hangs_costs_the_oldest_events_and_they_are_counted() -> None:
    stuck = Stuck()
    monitor = Monitor(stuck, ORIGIN, capacity=100, interval_s=0.05)
    monitor.mark("first")
    assert stuck.entered.wait(60)
    for number in range(1000):  # the training thread goes on
        monitor.mark("later", value=float(number))
    assert len(monitor._ring) == 100
    stuck.go.set()
    monitor.close()
    later = [each.value for each in stuck.events if isinstance(each, Mark) and each.name == "later"]
    assert later == [float(number) for number in range(900, 1000)]
    assert stuck.dropped() == monitor.num_dropped == 900
    assert stuck.closed == 1


class Lossy(Kept):
    """A transport that loses the first event of its first batch."""

    def send(self, events: Sequence[Event]) -> int:
        lost = 0 if self.events else 1
        super().send(events[lost:])
        return lost


def test_what_a_transport_loses_is_an_event() -> None:
    lossy = Lossy()
    monitor = Monitor(lossy, ORIGIN, interval_s=600)
    for _ in range(3):
        monitor.mark("a")
    monitor.flush()
    monitor.close()
    assert [each.name for each in lossy.events] == ["a", "a", "dropped"]
    assert lossy.dropped() == monitor.num_dropped == 1


def test_a_broken_transport_does_not_end_the_monitor() -> None:
    class Broken(Kept):
        def send(self, events: Sequence[Event]) -> int:
            if not self.closed:
                self.closed = 1
                raise RuntimeError("broken once")
            return super().send(events)

    broken = Broken()
    monitor = Monitor(broken, ORIGIN, interval_s=0.02)
    monitor.mark("a")
    until(lambda: broken.closed == 1)
    monitor.mark("b")
    until(lambda: any(each.name == "b" for each in broken.events))
    monitor.close()


class Encoding(Kept):
    """A transport that hands on what Arrow takes, as files and servers do."""

    def send(self, events: Sequence[Event]) -> int:
        return super().send(list(events_of(to_batch(events))))


@pytest.mark.parametrize("number", [True, 2**31, "3"])
def test_a_number_that_no_column_holds_costs_itself_alone(number: Any) -> None:
    kept = Encoding()
    monitor = Monitor(kept, ORIGIN, interval_s=600)
    with monitor.segment("forward", micro_batch=number, chunk=1):
        pass
    monitor.close()
    assert [(each.micro_batch, each.chunk) for each in kept.segments()] == [(None, 1)]
    assert monitor.num_dropped == 0


def test_a_batch_that_cannot_be_encoded_costs_no_other_and_ends_no_run(caplog: pytest.LogCaptureFixture) -> None:
    kept = Encoding()
    monitor = Monitor(kept, ORIGIN, interval_s=600)
    name: Any = object()
    with monitor.segment("forward", name):
        pass
    monitor.flush()
    for lane in ("a", "b"):
        with monitor.segment("forward", lane=lane):
            pass
    monitor.flush()
    with monitor.segment("backward", name):
        pass
    monitor.close()
    assert [(each.name, each.lane) for each in kept.segments()] == [("forward", "a"), ("forward", "b")]
    assert (monitor.num_dropped, kept.closed) == (2, 1)
    assert caplog.text.count("the monitor lost a batch") == 2


def test_what_a_sampler_raises_at_the_end_ends_no_run(caplog: pytest.LogCaptureFixture) -> None:
    def fails() -> Sequence[Counter]:
        raise OSError("no such counter")

    Monitor(Kept(), ORIGIN, interval_s=600, samplers=[fails]).close()
    assert "no such counter" in caplog.text


def until(condition: Any) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class FakeEvent:
    """A CUDA event on a device whose clock is the host's, that lags behind by `lag_ns`."""

    made = synchronized = 0
    lag_ns = 0
    live: ClassVar[set[int]] = set()

    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        FakeEvent.made += 1
        self.at_ns = 0

    def record(self, stream: FakeStream) -> None:
        self.at_ns = time.perf_counter_ns() + (0 if stream.is_side else FakeEvent.lag_ns)

    def query(self) -> bool:
        return time.perf_counter_ns() >= self.at_ns

    def elapsed_time(self, other: FakeEvent) -> float:
        assert self.query()
        assert other.query()
        return (other.at_ns - self.at_ns) * 1e-6

    def synchronize(self) -> None:
        FakeEvent.synchronized += 1
        while not self.query():
            pass


class FakeStream:
    def __init__(self, device: object = None, *, is_side: bool = True) -> None:
        self.device, self.is_side = torch.device("cuda", 0), is_side

    def synchronize(self) -> None:
        FakeEvent.synchronized += 1


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """As much of CUDA as marks need, which counts whoever synchronises."""

    def synchronize(*_: object) -> None:
        FakeEvent.synchronized += 1

    FakeEvent.made = FakeEvent.synchronized = FakeEvent.lag_ns = 0
    compute = FakeStream(is_side=False)
    for name, value in {
        "Event": FakeEvent,
        "Stream": FakeStream,
        "is_current_stream_capturing": lambda: False,
        "synchronize": synchronize,
        "set_device": lambda _: None,
        "current_device": lambda: 0,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(current_stream_module, "current_stream", lambda _=None: compute)
    monkeypatch.setattr(clock_module, "_devices", {})
    yield
    gc.collect()


def test_nothing_is_synchronised_and_events_are_reused(fake_cuda: None, kept: Kept) -> None:
    FakeEvent.lag_ns = 2_000_000
    monitor = Monitor(kept, ORIGIN, device="cuda:0", interval_s=0.01)
    recorder = Recorder("cuda")
    monitor.follow(recorder)
    for step in range(1, 201):
        recorder.begin_step(step)
        with recorder.computing("forward", micro_batch=0, chunk=0):
            with recorder.launching("gather", "all_gather", 8) as collective:
                pass
            with recorder.waiting(collective):
                pass
        with monitor.segment("data", step=step, on_host=True):
            pass
        with monitor.segment("mine"):
            pass
        recorder.end_step()
        time.sleep(1e-3)
    monitor.close()
    assert FakeEvent.synchronized == 0
    counts = Count(each.segment for each in kept.segments())
    assert counts["step"] == counts["forward"] == counts["collective"] == counts["data"] == counts["other"] == 200
    assert {each.timing for each in kept.segments("collective")} == {"device"}
    assert {each.timing for each in kept.segments("data")} == {"host"}
    assert FakeEvent.made < 200 * 10 * 0.9, "many marks had a pooled event; how many, the threads' pace says"


def test_times_of_the_device_lie_on_the_clock_of_the_rank(fake_cuda: None, kept: Kept) -> None:
    monitor = Monitor(kept, ORIGIN, device="cuda:0", interval_s=600)
    before_ns = monitor.clock.now_ns()
    with monitor.segment("forward"):
        time.sleep(0.01)
    after_ns = monitor.clock.now_ns()
    monitor.close()
    [forward] = kept.segments("forward")
    slack_ns = 5_000_000  # of a loaded machine, in comparing the two clocks; half of what was slept
    assert before_ns - slack_ns <= forward.start_ns < forward.end_ns <= after_ns + slack_ns
    assert forward.duration_ns >= 9_000_000


def test_a_device_that_hangs_costs_no_memory(fake_cuda: None, kept: Kept) -> None:
    FakeEvent.lag_ns = 10**15
    monitor = Monitor(kept, ORIGIN, device="cuda:0", capacity=64, interval_s=0.01)
    for step in range(1000):
        with monitor.segment("forward", step=step):
            pass
    assert len(monitor._ring) <= 64
    monitor.close(timeout_s=0.2)
    assert not kept.segments("forward")
    assert kept.dropped() >= 1000 - 64 - 1
    assert FakeEvent.synchronized == 0


def test_a_capture_is_not_timed_and_a_replay_says_that_it_is_one(
    fake_cuda: None, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor, recorder = Monitor(kept, ORIGIN, device="cuda:0", interval_s=600), Recorder("cuda")
    monitor.follow(recorder)
    recorder.begin_step(1)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with recorder.computing("forward"), monitor.segment("mine"):
        pass
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with recorder.computing("replay"):
        pass
    recorder.end_step()
    monitor.close()
    assert [(each.segment, each.timing) for each in kept.segments()] == [("step", "graph"), ("other", "graph")]


def test_a_capture_that_begins_within_a_block_holds_nothing_up(
    fake_cuda: None, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    monitor, recorder = Monitor(kept, ORIGIN, device="cuda:0", interval_s=600), Recorder("cuda")
    monitor.follow(recorder)
    with monitor.segment("forward"):  # whose end is not taken
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    with recorder.launching("gather", "all_gather", 8) as captured:
        pass

    def fails() -> bool:
        raise RuntimeError("operation not permitted on an event last recorded in a capturing stream")

    end: Any = captured.end
    monkeypatch.setattr(end.event, "query", fails)
    with monitor.segment("backward"):
        pass
    monitor.close()
    assert [each.segment for each in kept.segments()] == ["backward"]
    assert kept.dropped() == monitor.num_dropped == 1


def test_what_is_lost_while_losses_are_counted_is_counted_next() -> None:
    class Losing(Ring[int]):
        """Loses an event after each reading of how many are lost."""

        lost = 0

        @property
        def _num_lost(self) -> int:
            self.lost += 1
            return self.lost - 1

        @_num_lost.setter
        def _num_lost(self, number: int) -> None:
            self.lost = number

    ring = Losing(1)
    assert sum(ring.take_lost() for _ in range(5)) == ring.lost - 1


def test_the_ring_counts_whole_steps() -> None:
    kept = Kept()
    per_step = 10 + (ProcessorWait().ns() is not None)  # and what it waited for a processor, where that is counted
    monitor, recorder = Monitor(kept, ORIGIN, capacity=5 * per_step, interval_s=600), Recorder()
    monitor.follow(recorder)
    for step in itertools.count(1):
        recorder.begin_step(step)
        for _ in range(9):
            with recorder.launching("g", "all_reduce", 1):
                pass
        recorder.end_step()
        if step == 20:
            break
    monitor.close()
    assert sorted({each.step for each in kept.segments() if each.step}) == [16, 17, 18, 19, 20]
    assert kept.dropped() == 15 * per_step


@pytest.mark.parametrize(("case", "ranks"), on_ranks(CASES, [pytest.param((2, "cpu"), id="2")], ()))
def test_among_ranks(case: Case, ranks: Ranks, run_case: RunCase) -> None:
    failed = [f"rank {rank}: {outcome}" for rank, outcome in enumerate(run_case(case, ranks)) if outcome]
    assert not failed, "\n".join(failed)


def test_a_wait_ends_with_the_mark_that_the_stream_waits_for(
    fake_cuda: None, kept: Kept, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is launched for its end; one whose collective had ended before it is none."""
    records: list[FakeEvent] = []
    record = FakeEvent.record

    def noted(event: FakeEvent, stream: FakeStream) -> None:
        records.append(event)
        record(event, stream)

    monkeypatch.setattr(FakeEvent, "record", noted)
    monitor, recorder = Monitor(kept, ORIGIN, device="cuda:0", interval_s=600), Recorder("cuda")
    recorder.groups["gather"] = [0, 1]
    monitor.follow(recorder)
    recorder.begin_step(1)
    del records[:]
    for _ in range(2):
        with recorder.launching("gather", "all_gather", 8) as collective:
            pass
        landed = recorder.arrival(collective, is_end=True)
        assert landed is collective.end
        with recorder.waiting(collective, until=landed):
            pass
    assert len(records) == 6  # two of each collective, one of its wait
    _, landed_late, waits, _, landed_before, waits_too = records
    landed_late.at_ns, landed_before.at_ns = waits.at_ns + 5_000_000, waits_too.at_ns - 1000
    time.sleep(0.006)
    comm = recorder.end_step()
    assert monitor.flush()
    [wait], done = kept.segments("wait"), kept.segments("collective")
    assert wait.end_ns == done[0].end_ns
    assert wait.end_ns - wait.start_ns == pytest.approx(5_000_000, abs=2)
    assert comm.exposed_s == pytest.approx(5e-3)
    lengths = [span.end_ns - span.start_ns for span in comm.spans() if span.name.startswith("wait")]
    assert lengths == [pytest.approx(5_000_000, abs=2), 0]
    monitor.close()


def test_a_mark_that_somebody_keeps_is_not_recorded_again(fake_cuda: None) -> None:
    events = clock_module.device_events("cuda:0")
    kept_mark, other = events.take_unchecked(), events.take_unchecked()
    event, pooled = kept_mark.keep(), other.event
    del kept_mark, other
    again = [events.take_unchecked() for _ in range(3)]
    assert pooled in [mark.event for mark in again]
    assert event not in [mark.event for mark in again]


class FakeRuntime:
    """CUDA's runtime, whose events are numbers: milliseconds, or None for one that has not happened."""

    def __init__(self, device: int = 0) -> None:
        self.device, self.calls, self.forgotten = device, 0, 0
        self.cudaEventElapsedTime = MagicMock(side_effect=self._elapsed)
        self.cudaGetDevice = MagicMock(side_effect=self._get_device)
        self.cudaGetLastError = MagicMock(side_effect=self._forget)

    def _elapsed(self, place: int, start: int, end: int) -> int:
        self.calls += 1
        if end == NEVER:
            return 600
        ctypes.c_float.from_address(place).value = end - start
        return 0

    def _get_device(self, place: Any) -> int:
        place._obj.value = self.device
        return 0

    def _forget(self) -> int:
        self.forgotten += 1
        return 0


NEVER = 999


def test_times_by_the_runtime_are_torchs_at_one_call_each(fake_cuda: None, monkeypatch: pytest.MonkeyPatch) -> None:
    runtime = FakeRuntime()
    monkeypatch.setattr(ctypes, "PyDLL", lambda _path: runtime)
    monkeypatch.setattr(clock_module, "_runtime_path", lambda: "libcudart.so.13")
    clock_module.runtime_clock.cache_clear()
    base = clock_module.TimeBase(by_events=True, device="cuda:0")
    assert base._reference is not None
    base._reference.event.cuda_event = 10
    events = clock_module.device_events("cuda:0")
    marks = [events.take_unchecked() for _ in range(3)]
    for number, mark in enumerate(marks, 1):
        mark.event.cuda_event = 10 + number
    try:
        assert base.ns_of_ended(marks, 5) == [base.taken_ns + 5 + number * 1_000_000 for number in (1, 2, 3)]
        assert runtime.calls == 3
        # One that has not happened, one before the reference, another device, the host's clock: by torch, as ever.
        by_torch = base.ns_by_torch(marks)
        for number, device in ((NEVER, 0), (9, 0), (11, 1)):
            marks[1].event.cuda_event, runtime.device = number, device
            assert base.ns_of_ended(marks) == by_torch
        assert runtime.forgotten == 1
    finally:
        clock_module.runtime_clock.cache_clear()
