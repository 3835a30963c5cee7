"""Lock between processes: the holder is named, and no wait is for ever."""

from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from netlayer import lock
from netlayer.lock import LockBusy, claimed, exclusive, is_held

_HOLD = """
import sys, time
from pathlib import Path
from netlayer.lock import exclusive
with exclusive(Path(sys.argv[1])) as held:
    held.progress("3 of 7 documents")
    print("held", flush=True)
    sys.stdin.readline()
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "lock"


@pytest.fixture
def holder(file: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lock until its stdin gets a line."""
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", _HOLD, str(file)], stdin=pipe, stdout=pipe, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
        process.kill()


def test_a_wait_names_process_time_and_progress_and_ends_with_the_holder(
    file: Path, holder: subprocess.Popen[str]
) -> None:
    owners: list[str] = []

    def on_wait(owner: str) -> None:
        owners.append(owner)
        if len(owners) == 2:
            holder.kill()  # the lock is released however its holder exits

    with exclusive(file, on_wait) as lock_handle:
        assert lock_handle.is_locked
    assert owners[0].startswith(f"process {holder.pid}, since ")
    assert owners[0].endswith(" UTC, 3 of 7 documents")
    assert not file.exists()


def test_a_claim_does_not_wait(file: Path, holder: subprocess.Popen[str]) -> None:
    with pytest.raises(LockBusy, match=rf"process {holder.pid}, since .* UTC, 3 of 7"), claimed(file):
        raise AssertionError("unreachable: the block does not begin")


def test_a_look_says_who_holds_it_and_takes_nothing(file: Path, holder: subprocess.Popen[str]) -> None:
    assert is_held(file)
    holder.communicate("\n")
    assert not is_held(file)
    file.touch()
    with file.open() as other:
        fcntl.flock(other, fcntl.LOCK_SH)  # somebody else who looks
        assert not is_held(file)
    assert file.exists()


def test_a_holder_that_was_stopped_is_not_waited_for_without_end(
    file: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lock, "_DEAD_AFTER_S", 0.5)
    os.kill(holder.pid, signal.SIGSTOP)
    with exclusive(file) as lock_handle:
        assert not lock_handle.is_locked
    assert f"is held by process {holder.pid}" in caplog.text
    assert "which has shown no sign of life for" in caplog.text
    assert file.exists(), "it is the holder's"


def test_a_holder_that_works_is_waited_for_as_long_as_it_takes(
    file: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lock, "_DEAD_AFTER_S", 3 * lock._BEAT_EVERY_S)
    start_s, is_told = time.monotonic(), False

    def on_wait(_owner: str) -> None:
        nonlocal is_told
        if time.monotonic() - start_s > 4 * lock._BEAT_EVERY_S and not is_told:
            is_told = True
            assert holder.stdin is not None
            holder.stdin.write("\n")
            holder.stdin.flush()

    with exclusive(file, on_wait) as lock_handle:
        assert lock_handle.is_locked


def test_a_holder_without_progress_is_not_waited_for_without_end(
    file: Path, holder: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lock, "_STUCK_AFTER_S", 0.5)
    with exclusive(file) as lock_handle:
        assert not lock_handle.is_locked
    assert f"process {holder.pid}" in caplog.text
    assert "which has shown no progress for" in caplog.text


def test_the_thread_that_has_it_enters_again(file: Path) -> None:
    with exclusive(file) as outer:
        with exclusive(file.parent / "." / file.name) as inner:
            assert not inner.is_locked
        with pytest.raises(LockBusy, match=rf"process {os.getpid()} \(this one\)"), claimed(file):
            raise AssertionError("unreachable: the block does not begin")
        assert outer.is_locked
        assert file.exists()
    with claimed(file):
        pass


def test_another_thread_waits_for_its_turn(file: Path) -> None:
    order: list[str] = []

    def second() -> None:
        with exclusive(file, waits.append) as lock_handle:
            order.append(f"second {lock_handle.is_locked}")

    waits: list[str] = []
    thread = threading.Thread(target=second)
    with exclusive(file):
        thread.start()
        while not waits:
            time.sleep(0.01)
        order.append("first")
    thread.join()
    assert order == ["first", "second True"]
    assert f"process {os.getpid()} (this one)" in waits[0]


def test_a_holder_on_another_host_is_named_and_one_that_wrote_nothing_is_not(file: Path) -> None:
    with file.open("w") as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        with pytest.raises(LockBusy, match=r"^another process$"), claimed(file):
            raise AssertionError("unreachable: the block does not begin")
        json.dump({"pid": 7, "host": "not-" + socket.gethostname(), "since_s": 0.0, "progress": ""}, lock_file)
        lock_file.flush()
        with pytest.raises(LockBusy, match=r"^process 7 on not-.*, since 00:00:00 UTC$"), claimed(file):
            raise AssertionError("unreachable: the block does not begin")


def test_the_file_of_a_killed_holder_is_taken_over(file: Path) -> None:
    file.write_text('{"pid": 1')
    with claimed(file):
        assert json.loads(file.read_text())["pid"] == os.getpid()


def test_on_a_full_disk_the_lock_works_without_a_name(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with claimed(file) as lock_handle, pytest.raises(LockBusy), claimed(file):
        assert lock_handle.is_locked


def test_a_file_system_without_locks_is_logged(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with caplog.at_level(logging.WARNING), exclusive(file) as lock_handle:
        assert not lock_handle.is_locked
    assert "cannot be locked" in caplog.text
    assert not file.exists()
