"""Training processes and logs of one node: what they tell, how they end, and what is read of a log."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from trainer.resilience import processes as processes_module
from trainer.resilience import progress
from trainer.resilience.processes import KernelLog, LogReader, TrainingProcesses, Warm

_STARTS_A_CHILD = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"], start_new_session=True)
print(child.pid, flush=True)
time.sleep(100)
"""


@pytest.fixture
def module(tmp_path: Path) -> str:
    (tmp_path / "endless_rank.py").write_text(_STARTS_A_CHILD)
    return "endless_rank"


def test_all_that_a_rank_started_ends_with_it(module: str, tmp_path: Path) -> None:
    processes = TrainingProcesses(tmp_path / "node", 1)
    processes.start([module], [4, 5], {**os.environ, "PYTHONPATH": str(tmp_path)})
    try:
        deadline_s = time.monotonic() + 30
        children: list[int] = []
        while len(children) < 2:
            assert time.monotonic() < deadline_s
            children += [int(line) for reader in processes.readers for line in reader.lines()]
            time.sleep(0.02)
        assert [each.state for each in processes.statuses()] == ["running", "running"]
        os.kill(processes.statuses()[0].pid, signal.SIGSTOP)
        while processes.statuses()[0].state != "stopped":
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
    finally:
        processes.kill()
    assert processes.are_ended
    assert [(each.rank, each.exit_code, each.was_ended) for each in processes.statuses()] == [
        (4, -9, True),
        (5, -9, True),
    ]
    gone = [pid for pid in children if not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie"]
    assert gone == children


@pytest.fixture
def warm(tmp_path: Path) -> Iterator[Warm]:
    warm = Warm(("json",), "a node", {**os.environ, "PYTHONPATH": os.pathsep.join([*sys.path, str(tmp_path)])})
    yield warm
    warm.end()


def start_warm(warm: Warm, module: str, tmp_path: Path) -> tuple[TrainingProcesses, list[int]]:
    """Start two ranks, once the process that they are forked from is ready; return the ids of what they started."""
    until_s = time.monotonic() + 60
    while warm.is_loading:
        assert time.monotonic() < until_s
        time.sleep(0.02)
    processes = TrainingProcesses(tmp_path / "node", 1, warm=warm)
    processes.start([module], [4, 5], {**os.environ, "PYTHONPATH": str(tmp_path)})
    children: list[int] = []
    while len(children) < 2:
        assert time.monotonic() < until_s
        children += [int(line) for reader in processes.readers for line in reader.lines()]
        time.sleep(0.02)
    return processes, children


@pytest.mark.skipif(sys.platform != "linux", reason="fresh interpreters there")
def test_ranks_that_are_forked_end_with_all_that_they_started_and_the_next_ones_come(
    warm: Warm, module: str, tmp_path: Path
) -> None:
    for _ in range(2):
        processes, children = start_warm(warm, module, tmp_path)
        try:
            names = [psutil.Process(each.pid).name() for each in processes.statuses()]
            parents = [psutil.Process(each.pid).ppid() for each in processes.statuses()]
        finally:
            processes.kill()
        assert (names, parents) == (["rank 4", "rank 5"], [os.getpid()] * 2)
        assert [(each.exit_code, each.was_ended) for each in processes.statuses()] == [(-9, True)] * 2
        assert all(not psutil.pid_exists(pid) or psutil.Process(pid).status() == "zombie" for pid in children)


@pytest.mark.skipif(sys.platform != "linux", reason="fresh interpreters there")
def test_ranks_are_fresh_where_what_they_are_forked_from_is_gone(warm: Warm, module: str, tmp_path: Path) -> None:
    [pid] = warm.pids
    processes, _ = start_warm(warm, module, tmp_path)
    processes.kill()
    os.kill(pid, signal.SIGKILL)
    psutil.Process(pid).wait(30) if psutil.pid_exists(pid) else None
    processes, _ = start_warm(warm, module, tmp_path)
    try:
        assert all("rank" not in psutil.Process(each.pid).name() for each in processes.statuses())
        assert warm.pids != [pid]  # for the next start
    finally:
        processes.kill()


@pytest.mark.skipif(sys.platform != "linux", reason="fresh interpreters there")
def test_files_that_have_changed_are_loaded_anew_before_a_start(
    warm: Warm, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    [pid] = warm.pids
    assert not warm.reload_if_changed()
    assert warm.pids == [pid]
    monkeypatch.setattr(processes_module, "code_digest", lambda: "fedcba9876543210")
    assert warm.reload_if_changed()
    assert warm.code == "fedcba9876543210"
    assert warm.pids != [pid]
    assert not psutil.pid_exists(pid)
    processes, _ = start_warm(warm, module, tmp_path)
    processes.kill()
    assert not warm.reload_if_changed()


def test_who_waits_for_killed_processes_goes_on_meanwhile(
    module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    processes = TrainingProcesses(tmp_path / "node", 1)
    processes.start([module], [0], {**os.environ, "PYTHONPATH": str(tmp_path)})
    [status], told = processes.statuses(), list[bool]()

    def tell() -> None:
        told.append(processes.are_ended)
        if len(told) == 3:
            os.kill(status.pid, signal.SIGKILL)

    with monkeypatch.context() as patch:
        patch.setattr(os, "killpg", lambda _group, _signal: None)  # it hangs in the kernel
        processes.kill(tell)
    assert told[:3] == [False] * 3
    assert processes.are_ended


def test_a_log_is_read_by_whole_lines_and_escaped(tmp_path: Path) -> None:
    file = tmp_path / "log"
    file.write_bytes(b"from before\n")
    reader = LogReader(file, 0)
    with file.open("ab") as log:
        log.write(b"half ")
        log.flush()
        assert list(reader.lines()) == []
        log.write(b"line\n\xff\xfe no text\n")
        log.flush()
        assert list(reader.lines()) == ["half line", "\\xff\\xfe no text"]
    file.write_bytes(b"rotated\n")
    assert list(reader.lines()) == ["rotated"]
    file.unlink()
    assert list(reader.lines()) == []


def test_the_kernels_log_says_why_it_is_not_read(tmp_path: Path) -> None:
    assert "off" in KernelLog("off").skipped
    file = tmp_path / "kernel"
    log = KernelLog(str(file))
    assert log.skipped == ""
    file.write_text("a line\n")
    assert list(log.lines()) == ["a line"]


def test_progress_is_told_and_half_written_lines_are_passed_over(tmp_path: Path) -> None:
    file = tmp_path / "progress"
    assert progress.ProgressFile.of({}) is None
    writer = progress.ProgressFile.of({progress.VARIABLE: str(file)})
    assert writer is not None
    first = progress.read(file)
    assert first is not None
    assert first.phase == "starts"
    writer.begin()
    with writer.phase("saves a checkpoint"):
        told = progress.read(file)
        assert told is not None
        assert told.phase == "saves a checkpoint"
    writer.add_step({"step": 3, "loss": float("nan"), "step_ms": 1.5, "exposed_comm": None})
    told = progress.read(file)
    assert told is not None
    assert (told.step, told.loss, told.is_finite, told.phase) == (3, None, False, "")
    data = bytearray(file.read_bytes())
    data[60] ^= 1
    file.write_bytes(bytes(data))
    assert progress.read(file) is None
    assert progress.read(tmp_path / "none") is None
