"""Counts are exact and shares lie in 0..1; how long anything took is not judged here."""

from __future__ import annotations

import pytest

from collectives import Recorder, StepComm


def recorded(recorder: Recorder, step: int, num_gathers: int) -> StepComm:
    recorder.begin_step(step)
    for _ in range(num_gathers):
        with recorder.launching("gather", "all_gather", 100) as collective:
            pass
        with recorder.waiting(collective):
            pass
    return recorder.end_step()


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
