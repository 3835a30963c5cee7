"""Ranks that are named as the root cause of a chain of waiting ranks, and the cases in which none is named."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from collectives.watch import hang
from collectives.watch.diagnosis import Answer, Entry, GroupProgress, Report, Stuck
from collectives.watch.hang import Evidence, HangLimits, Pace, find_root, own_process, state_of
from netlayer.errors import CollectiveTimeout, PeerLost
from netlayer.layout import ParallelLayout
from tests.collectives import scenes
from tests.collectives.scenes import perform

ENTRY = Entry(40, "all_gather", 1024, "")
STUCK = Stuck("tensor@0,1", "tensor", (0, 1), ENTRY, (ENTRY,), 7, 12.0, 600.0)
LIMITS = HangLimits()


def answer(rank: int, fresh: bool = True, **settings: Any) -> Answer:
    report = Report(rank, 1, f"h{rank}", step=7, place=f"loop.py:{rank} in step", **settings)
    return Answer(report, fresh)


def root(answers: dict[int, Answer], stuck: Stuck = STUCK, step_s: float | None = 1.0, **more: Any) -> Any:
    silent_s = {rank: 12.0 for rank, each in answers.items() if not each.fresh}
    evidence = Evidence(list(answers), answers, more.pop("silent_s", silent_s), more.pop("states", {}))
    return find_root(stuck, evidence, LIMITS, step_s, ParallelLayout(tp=2, pp=2))


def test_victims_of_a_chain_are_not_named() -> None:
    error = root({1: answer(1, waits_for=(1, 3)), 3: answer(3, idle_s=11.0)})
    assert isinstance(error, CollectiveTimeout)
    assert (error.culprits, error.missing) == ((3,), (3,))
    assert str(error) == (
        "rank 3 (tp=1, pp=1, dp=0; host h3) has launched no collective since 11 s, last seen at step 7 in loop.py:3 in "
        "step; because of it all_gather #40 (1 KiB) of group tensor (tp=*, pp=0, dp=0) ranks 0,1 at step 7 waits since "
        "12 s"
    )


def test_a_stopped_process_goes_before_all_that_is_less_certain() -> None:
    answers = {1: answer(1, idle_s=11.0), 2: answer(2, fresh=False), 3: answer(3, fresh=False, phase="evaluates")}
    error = root(answers, states={3: "stopped"})
    assert error.culprits == (3,)
    assert "is stopped (SIGSTOP), last seen at step 7 in loop.py:3 in step while it evaluates; because" in str(error)


@pytest.mark.parametrize("phase", ["saves a checkpoint", "evaluates", "compiles"])
@pytest.mark.parametrize("fresh", [True, False])
def test_whoever_takes_its_time_in_a_phase_is_no_culprit_nor_who_waits_for_it(phase: str, fresh: bool) -> None:
    assert root({1: answer(1, waits_for=(1, 3)), 3: answer(3, fresh, phase=phase, idle_s=500.0)}) is None


def test_nobody_is_named_before_the_limit() -> None:
    assert root({1: answer(1, idle_s=9.0)}) is None, "floor"
    assert root({1: answer(1, idle_s=11.0)}, step_s=6.0) is None, "pace"
    assert root({1: answer(1, fresh=False)}, silent_s={1: 9.0}) is None
    assert root({1: answer(1, fresh=False)}, replace(STUCK, age_s=1.9), states={1: "stopped"}) is None
    assert root({1: answer(1, fresh=False)}, replace(STUCK, age_s=2.3), states={1: "stopped"}).silent == (1,)


def test_before_the_pace_is_known_a_stopped_process_alone_is_named_and_later() -> None:
    late = replace(STUCK, age_s=500.0)
    assert root({1: answer(1, idle_s=500.0)}, late, None) is None
    assert root({1: answer(1, fresh=False)}, late, None, silent_s={1: 500.0}) is None
    assert root({1: answer(1, fresh=False)}, replace(STUCK, age_s=29.0), None, states={1: "gone"}) is None
    assert root({1: answer(1, fresh=False)}, late, None, states={1: "gone"}).culprits == (1,)


def test_where_all_wait_and_answer_nobody_is_named_but_who_launched_another_collective() -> None:
    assert root({1: answer(1, waits_for=(0, 1))}) is None
    other = GroupProgress(40, (Entry(40, "all_gather", 2048, ""),))
    error = root({1: answer(1, waits_for=(0, 1), groups={STUCK.key: other})})
    assert error.differing == (1,)
    assert "launched all_gather #40 (2 KiB), others all_gather #40 (1 KiB)" in str(error)


def test_of_a_broken_connection_who_is_silent_is_named_at_once_and_who_answers_is_not() -> None:
    lost = replace(STUCK, age_s=0.1, lost="Connection closed by peer")
    error = root({1: answer(1), 3: answer(3, fresh=False)}, lost, silent_s={3: 1.0}, states={3: "gone"})
    assert isinstance(error, PeerLost)
    assert error.culprits == (3,)
    assert "has ended" in str(error)
    assert root({1: answer(1), 3: answer(3)}, lost) is None


def test_a_timeout_of_the_user_goes_before_the_pace() -> None:
    limits = HangLimits(timeout_s=5.0)
    assert limits.stopped_s(100.0) == limits.stopped_s(None) == limits.silent_s(100.0) == 5.0
    assert (LIMITS.silent_s(100.0), LIMITS.stopped_s(100.0)) == (225.0, 175.0)
    assert HangLimits(floor_s=0.5).stopped_s(0.01) == HangLimits(floor_s=0.5).silent_s(0.01) == 0.5


def test_the_pace_is_known_after_some_steps_and_leaves_phases_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: now_s)
    pace, step_times = Pace(), []
    for seconds in (30.0, 1.0, 1.0, 1.0, 1.0):  # the first compiles
        pace.begin_step()
        now_s += seconds
        step_times.append(pace.step_s)
    assert step_times == [None] * 4 + [1.0]
    pace.begin_step()
    assert pace.step_s == 1.0
    now_s += 61.0
    pace.skip(60.0)
    pace.begin_step()
    assert pace.step_s == 1.0
    for _ in range(8):  # the batch has grown
        now_s += 3.0
        pace.begin_step()
    assert pace.step_s == 3.0


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "60"]) as process:
        yield process
        process.kill()


def test_the_state_of_a_neighbour_is_seen(sleeper: subprocess.Popen[bytes]) -> None:
    pid, namespace = sleeper.pid, own_process().split(" ")[2]
    process = f"{pid} {hang._stat(pid)[1]} {namespace}"
    assert state_of(process) == ""
    os.kill(pid, signal.SIGSTOP)
    deadline_s = time.monotonic() + 10
    while state_of(process) != "stopped":
        assert time.monotonic() < deadline_s
    assert state_of(f"{pid} 1 {namespace}") == "gone", "another process of the same number"
    assert state_of(f"{pid} {hang._stat(pid)[1]} pid:[1]") == "", "of another container"
    sleeper.kill()
    while state_of(process) != "gone":
        assert time.monotonic() < deadline_s
    assert state_of("") == state_of("x y z") == state_of(f"{pid}") == ""


@pytest.mark.parametrize(
    ("play", "line"),
    [
        (scenes.chain_behind_one_that_was_stopped, r"is stopped \(SIGSTOP\), last seen at step [67]"),
        (
            scenes.chain_behind_one_that_sleeps,
            r"has launched no collective since .* s, last seen at step 7 in scenes\.py:",
        ),
        (scenes.chain_behind_one_that_dies, r"has ended, last seen at step [67]|does not answer"),
        (
            scenes.chain_behind_one_that_fails,
            r"failed at step 7 in scenes\.py:\d+ in fail: ArithmeticError: a broken sa",
        ),
    ],
    ids=["stopped", "sleeps", "dies", "fails"],
)
def test_all_ranks_of_a_chain_name_its_root(play: scenes.Play, line: str) -> None:
    url, limits = f"tcp://127.0.0.1:{_free_port()}", HangLimits(floor_s=1.0, beat_s=0.2)
    results = perform(play, 4, url, culprit=3, timeout_s=8.0, layout=ParallelLayout(tp=2, pp=2), hang=limits)
    for rank in range(3):
        error = results[rank].error
        assert error is not None
        assert error.culprits == (3,), (rank, str(error))
        assert re.match(rf"rank 3 \(tp=1, pp=1, dp=0; host .*\) ({line})", str(error)), error
    assert len({str(result.error) for result in results[:3]}) == 1, "they all say the same"


def test_a_phase_and_a_pause_are_no_hang() -> None:
    url, limits = f"tcp://127.0.0.1:{_free_port()}", HangLimits(floor_s=1.0, beat_s=0.2)
    play = scenes.chain_behind_one_that_saves
    for result in perform(play, 4, url, culprit=3, mute=(), timeout_s=20.0, hang=limits):
        assert (result.error, result.logged) == (None, [])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
