"""Backends: nodes over ssh are started and ended by commands that a host's shell runs as they are meant."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

from netlayer.config.resilience import ResilienceConfig
from trainer.resilience.backends import GpuShares, LocalBackend, SshBackend
from trainer.resilience.folder import RunFolder, Spec

_EXECUTOR = "import sys, time; open(sys.argv[1] + '/started', 'w').write(' '.join(sys.argv[1:])); time.sleep(60)"


@pytest.fixture
def ssh(tmp_path: Path) -> str:
    """A program that runs the line on this machine, as sshd would, and notes the host."""
    program = tmp_path / "fake-ssh"
    program.write_text(f'#!/bin/sh\necho "$1" >> {tmp_path}/hosts\nexec sh -c "$2"\n')
    program.chmod(0o755)
    return str(program)


def until_exists(path: Path) -> None:
    deadline_s = time.monotonic() + 30
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_a_node_over_ssh_is_started_in_a_session_of_its_own_and_ended(
    ssh: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.resilience.backends.MODULE", "fake_executor")
    (tmp_path / "fake_executor.py").write_text(_EXECUTOR)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    out = tmp_path / "a run; touch hacked"  # a path with a space and more
    out.mkdir()
    backend = SshBackend(RunFolder(out), ["host-a", "me@host-b"], ssh)
    assert [backend.name(number) for number in range(3)] == ["node-0", "node-1", ""]
    backend.launch("node-1")
    until_exists(out / "started")
    assert (out / "started").read_text() == f"{out} node-1 host-b"
    assert (tmp_path / "hosts").read_text() == "me@host-b\n"
    assert backend._processes[-1].wait(10) == 0  # ssh has gone, and the executor stays
    words = [sys.executable, "-m", "fake_executor", str(out), "node-1", "host-b"]
    pids = [pid for pid in _pids() if _words(pid) == words]
    assert len(pids) == 1
    backend.remove("node-0", pids[0])  # another node's process id: it is left alone
    backend._processes[-1].wait(10)
    assert _words(pids[0]) == words
    backend.remove("node-1", pids[0])
    deadline_s = time.monotonic() + 10
    while _words(pids[0]) == words:
        assert time.monotonic() < deadline_s
        time.sleep(0.02)
    for process in backend._processes:
        process.wait(10)
    assert not (tmp_path / "hacked").exists()
    assert not Path("hacked").exists()


def test_a_local_node_that_is_another_process_by_now_is_left_alone(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.create(Spec("1", "job", ("x",), 1, 1, 1, 1.0), "")
    backend = LocalBackend(folder)
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        backend.remove("node-0", other.pid)
        time.sleep(0.1)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def test_nodes_of_one_machine_have_gpus_of_their_own_and_keep_them(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.create(Spec("1", "job", ("x",), 2, 2, 1, 1.0), "")
    gpus = [f"GPU-{each}" for each in "abcdefg"]  # one more than three nodes use
    shares = GpuShares(folder, gpus, 2)
    backend = LocalBackend(folder, gpus)
    assert [backend.name(number) for number in range(4)] == ["node-0", "node-1", "node-2", ""]
    assert [shares.of(f"node-{number}") for number in (1, 0)] == ["GPU-a,GPU-b", "GPU-c,GPU-d"]
    assert GpuShares(folder, gpus, 2).of("node-1") == "GPU-a,GPU-b"  # for the next driver too
    backend.block("node-1", "evicted", was_heard=True)
    assert shares.of("node-2") == "GPU-e,GPU-f"  # one that nobody had goes before that of an evicted node
    assert backend.name(3) == "node-3"
    assert shares.of("node-3") == "GPU-a,GPU-b"
    assert backend.name(4) == ""


def _pids() -> list[int]:
    return [int(path.name) for path in Path("/proc").glob("[0-9]*")]


def _words(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[:-1]
    except OSError:
        return []


@pytest.mark.parametrize(
    ("backend", "heartbeat_s", "interval_s"), [("local", 0.0, 2.0), ("ssh", 0.0, 10.0), ("ssh", 3.0, 3.0)]
)
def test_nodes_of_one_machine_tell_of_themselves_more_often(
    backend: str, heartbeat_s: float, interval_s: float
) -> None:
    assert ResilienceConfig.model_validate({"backend": backend, "heartbeat_s": heartbeat_s}).interval_s == interval_s
