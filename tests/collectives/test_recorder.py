"""Counts are exact and shares lie in 0..1; how long anything took is not judged here."""

from __future__ import annotations

import random
import sys
import threading
import time
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch

from collectives import Recorder, StepComm
from collectives.clock import PooledEvent, TimeBase, seconds_between, take_mark
from collectives.watch.processor import ProcessorLaps, ProcessorWait
from collectives.watch.recorder import _Busy


def recorded(recorder: Recorder, step: int, num_gathers: int) -> StepComm:
    recorder.begin_step(step)
    for _ in range(num_gathers):
        with recorder.launching("gather", "all_gather", 100) as collective:
            pass
        with recorder.waiting(collective):
            pass
    return recorder.end_step()


class _LateEvent:
    """Stands for a CUDA event that happens when somebody waits for it."""

    def __init__(self, at_ms: float, *, has_happened: bool) -> None:
        self.at_ms, self.has_happened = at_ms, has_happened

    def query(self) -> bool:
        return self.has_happened

    def synchronize(self) -> None:
        self.has_happened = True

    def elapsed_time(self, end: _LateEvent) -> float:
        if not (self.has_happened and end.has_happened):
            raise RuntimeError("Both events must be completed before calculating elapsed time.")
        return end.at_ms - self.at_ms


def test_a_wait_whose_collective_had_ended_before_it_waits_for_both_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collectives.clock.runtime_clock", lambda: None)
    events: list[Any] = [_LateEvent(5.0, has_happened=False), _LateEvent(1.0, has_happened=True)]
    start, end = (PooledEvent(event, deque()) for event in events)
    assert seconds_between(start, end) == pytest.approx(-4e-3)


def test_a_step_has_its_collectives_and_bytes() -> None:
    comm = recorded(Recorder(), 7, 3)
    assert (comm.step, comm.num_collectives, comm.num_bytes) == (7, 3, 300)
    assert comm.counts() == {("gather", "all_gather"): 3}


def test_times_follow_each_other() -> None:
    comm = recorded(Recorder(), 0, 2)
    for one in comm.collectives:
        assert 0 < one.launch_start_ns <= one.launch_end_ns <= one.wait_start_ns <= one.wait_end_ns
    assert comm.ready()
    assert 0 < comm.exposed_s <= comm.step_s
    assert 0 < comm.exposed_comm <= 1


def test_a_step_without_communication_exposes_none() -> None:
    comm = recorded(Recorder(), 0, 0)
    assert comm.exposed_comm == 0


def test_a_prefetched_collective_counts_where_launched_and_is_exposed_where_waited_for() -> None:
    recorder = Recorder()
    recorder.begin_step(1)
    with recorder.launching("gather", "all_gather", 8) as collective:
        pass
    first = recorder.end_step()
    recorder.begin_step(2)
    with recorder.waiting(collective):
        pass
    second = recorder.end_step()
    assert (first.num_collectives, first.exposed_s) == (1, 0)
    assert second.num_collectives == 0
    assert second.exposed_s > 0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The host's clock, in ns: its last number is now."""
    times = [1000]
    monkeypatch.setattr(time, "perf_counter_ns", lambda: times[-1])
    return times


def test_a_wait_for_what_is_computed_first_is_not_exposed(clock: list[int]) -> None:
    """A gather cannot start before the optimiser's update behind a reduction: only the reduction and it count."""
    recorder = Recorder()
    with recorder.launching("reduce", "reduce_scatter", 8) as before:
        pass  # in the step before, and still under way
    recorder.begin_step(1)
    with recorder.launching("reduce", "reduce_scatter", 8) as reduction:
        pass
    with recorder.launching("gather", "all_gather", 8) as gather:
        pass
    before.end, reduction.start, reduction.end, gather.start = 1020, 1030, 1040, 1070
    clock.append(1010)
    with recorder.waiting(gather):
        clock.append(1100)
    comm = recorder.end_step()
    assert comm.exposed_s == pytest.approx((10 + 10 + 30) * 1e-9)
    assert comm.exposed_comm == pytest.approx(50 / 100)


def test_a_wait_for_what_is_under_way_is_exposed_whole(clock: list[int]) -> None:
    recorder = Recorder()
    recorder.begin_step(1)
    with recorder.launching("gather", "all_gather", 8) as gather:
        pass
    clock.append(1010)
    gather.start, gather.end = 1005, 1030  # of a peer's rows, the end is when this rank has sent its own
    with recorder.waiting(gather):
        clock.append(1100)
    assert recorder.end_step().exposed_s == pytest.approx(90e-9)


def test_time_within_intervals_is_that_of_a_count_by_hand() -> None:
    draw = random.Random(0)
    for _ in range(200):
        intervals = [(start, start + draw.randrange(6)) for start in draw.choices(range(30), k=draw.randrange(8))]
        busy, start, length = _Busy([*intervals, (35, sys.maxsize)]), draw.randrange(40), draw.randrange(10)
        covered = {ns for begin, end in intervals for ns in range(begin, end)} | set(range(35, 60))
        assert busy.within(start, start + length) == len(covered & set(range(start, start + length)))
    assert _Busy([]).within(3, 9) == 0


def test_a_step_counts_from_the_end_of_the_one_before(clock: list[int]) -> None:
    recorder = Recorder()
    first = recorded(recorder, 1, 0)
    clock.append(1500)
    recorder.begin_step(2)
    clock.append(3000)
    second = recorder.end_step()
    assert second.seconds_after(first) == pytest.approx(2000e-9)
    assert second.step_s == pytest.approx(1500e-9)


def test_a_collective_that_was_waited_for_is_not_under_way_in_later_steps() -> None:
    recorder = Recorder()
    for step in range(3):
        recorder.begin_step(step)
        with recorder.launching("gather", "all_gather", 8) as waited:
            pass
        with recorder.launching("gather", "all_gather", 8) as prefetched:
            pass
        with recorder.waiting(waited):
            pass
        recorder.end_step()
    recorder.begin_step(3)
    assert list(recorder.end_step()._earlier) == [prefetched]


def test_a_step_says_what_it_waited_for_a_processor_outside_of_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    readings = iter([100, 150, 155, 175, 200, 230])
    monkeypatch.setattr("collectives.watch.processor.ProcessorWait.ns", lambda _self: next(readings))
    recorder = Recorder()
    recorder.begin_step(1)
    with recorder.launching("g", "all_reduce", 1) as collective:
        pass
    with recorder.waiting(collective):
        pass
    first = recorder.end_step()
    recorder.begin_step(2)
    second = recorder.end_step()
    # 75 in all, 5 of them while it waited for its peers; then 25 between the steps.
    assert (first.processor_wait_ns, first.processor_wait_before_ns) == (70, 0)
    assert (second.processor_wait_ns, second.processor_wait_before_ns) == (30, 25)


def test_laps_of_two_threads_are_not_taken_for_one() -> None:
    laps, of_other = ProcessorLaps(), list[int | None]()
    laps.lap()
    assert (laps.lap() is None) == (ProcessorWait().ns() is None)
    thread = threading.Thread(target=lambda: of_other.append(laps.lap()))
    thread.start()
    thread.join()
    assert of_other == [None]
    assert laps.lap() is None  # back on the first thread: it began anew


@pytest.mark.parametrize("text", [None, "", "nothing\n", "5\n"])
def test_a_kernel_without_the_count_says_nothing(tmp_path: Path, text: str | None) -> None:
    if text is not None:
        (tmp_path / "schedstat").write_text(text)
    assert ProcessorWait(str(tmp_path / "schedstat")).ns() is None


def test_the_wait_for_a_processor_is_the_second_number(tmp_path: Path) -> None:
    (tmp_path / "schedstat").write_text("22865358 32752482 19\n")
    assert ProcessorWait(str(tmp_path / "schedstat")).ns() == 32752482


def test_counts_go_on_outside_steps_until_reset() -> None:
    recorder = Recorder()
    recorded(recorder, 0, 2)
    with recorder.launching("reduce", "all_reduce", 4) as collective:
        assert collective.step is None
    assert recorder.counts() == {("gather", "all_gather"): 2, ("reduce", "all_reduce"): 1}
    recorder.reset()
    assert not recorder.counts()
    assert not recorder.steps


def test_only_the_last_steps_are_kept() -> None:
    recorder = Recorder(num_kept=2)
    for step in range(4):
        recorded(recorder, step, 1)
    assert [comm.step for comm in recorder.steps] == [2, 3]


def test_a_step_that_raised_is_dropped() -> None:
    recorder = Recorder()
    recorder.begin_step(0)
    assert recorded(recorder, 1, 1).num_collectives == 1
    with pytest.raises(RuntimeError, match="without begin_step"):
        recorder.end_step()


def test_spans_are_on_the_clock_of_the_host() -> None:
    recorder = Recorder()
    before_ns = time.perf_counter_ns()
    recorder.begin_step(3)
    with recorder.computing("forward", micro_batch=2):
        pass
    with recorder.launching("pp", "send", 8, lane="send forward", labels={"peer": 1}, flow="0-1") as collective:
        pass
    with recorder.waiting(collective):
        pass
    spans = {span.lane: span for span in recorder.end_step().spans()}
    after_ns = time.perf_counter_ns()
    assert {lane: span.name for lane, span in spans.items()} == {
        "step": "step 3",
        "compute": "forward",
        "wait": "wait for send",
        "send forward": "send",
    }
    step, sent = spans["step"], spans["send forward"]
    assert before_ns <= step.start_ns <= step.end_ns <= after_ns
    for span in spans.values():
        assert step.start_ns <= span.start_ns <= span.end_ns <= step.end_ns
    assert spans["compute"].labels == {"step": 3, "micro_batch": 2}
    assert sent.labels == {"step": 3, "group": "pp", "bytes": 8, "peer": 1}
    assert sent.flow == "0-1 step 3"
    assert spans["compute"].end_ns <= sent.start_ns <= spans["wait"].start_ns <= sent.end_ns


def test_a_collective_that_nobody_waited_for_has_no_span_yet() -> None:
    recorder = Recorder()
    recorder.begin_step(0)
    with recorder.launching("gather", "all_gather", 8) as collective:
        pass
    comm = recorder.end_step()
    assert [span.lane for span in comm.spans()] == ["step"]
    with recorder.waiting(collective):
        pass
    assert [span.lane for span in comm.spans()] == ["step", "gather"]
    collective.end = time.perf_counter_ns()  # as a lane does that watches its collectives
    assert comm.spans()[-1].end_ns == collective.end


def test_computations_outside_a_step_are_not_kept() -> None:
    recorder = Recorder()
    with recorder.computing("forward"):
        pass
    assert not recorder.steps
    assert [span.lane for span in recorded(recorder, 0, 0).spans()] == ["step"]


def test_a_time_base_is_renewed_when_it_has_grown_old(monkeypatch: pytest.MonkeyPatch) -> None:
    recorder = Recorder()
    first, second = recorded(recorder, 0, 0), recorded(recorder, 1, 0)
    assert first._time_base is second._time_base
    monkeypatch.setattr(TimeBase, "age_s", 61.0)
    assert recorded(recorder, 2, 0)._time_base is not first._time_base


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, found none")
def test_events_of_all_streams_lie_on_the_clock_of_the_host() -> None:
    recorder, side = Recorder("cuda"), torch.cuda.Stream()
    a_MM = torch.randn(4096, 4096, device="cuda")
    torch.cuda.synchronize()
    before_ns = time.perf_counter_ns()
    recorder.begin_step(0)
    with recorder.computing("matmul"):
        a_MM @ a_MM
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), recorder.launching("copy", "send", a_MM.nbytes) as collective:
        b_MM = a_MM.clone()
    with recorder.waiting(collective):
        torch.cuda.current_stream().wait_stream(side)
    comm = recorder.end_step()
    spans = {span.lane: span for span in comm.spans()}
    after_ns = time.perf_counter_ns()
    assert comm._time_base is not None
    slack_ns = comm._time_base.uncertainty_ns + 10_000
    assert slack_ns < 10_000_000  # a fraction of it on a host that has nothing else to do
    assert before_ns - slack_ns <= spans["step"].start_ns < spans["step"].end_ns <= after_ns + slack_ns
    assert spans["compute"].end_ns <= spans["copy"].start_ns + 10_000
    assert spans["copy"].end_ns > spans["copy"].start_ns
    assert spans["copy"].end_ns <= spans["wait"].end_ns + 10_000
    assert torch.equal(a_MM, b_MM)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device, found none")
def test_a_capture_is_not_timed() -> None:
    graph, x = torch.cuda.CUDAGraph(), torch.ones(8, device="cuda")
    recorder = Recorder("cuda")
    recorder.begin_step(0)
    with torch.cuda.graph(graph):
        assert take_mark(by_events=True) is None
        with recorder.computing("add"), recorder.launching("pp", "send", 32) as collective:
            x += 1
        with recorder.waiting(collective):
            pass
    graph.replay()
    comm = recorder.end_step()
    assert [span.lane for span in comm.spans()] == ["step"]
    assert comm.exposed_s == 0
    assert x.tolist() == [2.0] * 8
