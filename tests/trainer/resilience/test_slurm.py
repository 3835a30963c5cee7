"""The Slurm backend, with stand-ins for srun and scontrol that do on this machine what Slurm would do on its hosts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from netlayer.config.file import to_toml
from netlayer.config.resilience import ResilienceConfig
from netlayer.config.tree import build_config
from netlayer.errors import ConfigError, HardwareMissing
from netlayer.store.meeting import free_port
from netlayer.store.redis_server import find_redis_binary
from trainer.resilience import slurm
from trainer.resilience.folder import RunFolder, Spec
from trainer.resilience.journal import last_entry
from trainer.resilience.machine import State
from trainer.resilience.slurm import SlurmBackend

from .fleet import Fleet

# Runs what follows the options, notes the options, and goes on until that has ended, as srun does.
_SRUN = """#!/bin/sh
echo "$@" >> {path}/srun-calls
while [ "${{1#--}}" != "$1" ]; do shift; done
exec "$@"
"""
_SCONTROL = """#!/bin/sh
echo "$@" >> {path}/scontrol-calls
case "$1" in
show) case "$3" in
    h*0-2*) printf 'h0\\nh1\\nh2\\n';; h*) printf 'h1\\nh7\\nh8\\n';; *) printf '127.0.0.1\\n127.0.0.2\\n';; esac;;
requeue) [ "$2" = 77 ] || {{ echo "slurm_requeue error: Invalid job id specified" >&2; exit 1; }};;
esac
"""
_EXECUTOR = "import sys, time; open(sys.argv[1] + '/' + sys.argv[2], 'w').write(sys.argv[3]); time.sleep(60)"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RunFolder]:
    """A run in an allocation of three hosts, whose executors only tell that they were started."""
    tools = tmp_path / "bin"
    tools.mkdir()
    for name, text in (("srun", _SRUN), ("scontrol", _SCONTROL)):
        (tools / name).write_text(text.format(path=tmp_path))
        (tools / name).chmod(0o755)
    (tmp_path / "fake_executor.py").write_text(_EXECUTOR)
    monkeypatch.setattr("trainer.resilience.slurm.MODULE", "fake_executor")
    monkeypatch.setattr("trainer.resilience.backends.MODULE", "fake_executor")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "h[0-2]")
    monkeypatch.delenv("SLURM_RESTART_COUNT", raising=False)
    monkeypatch.setenv("SLURM_CPUS_ON_NODE", "64")
    made = RunFolder(tmp_path / "run")
    made.create(Spec("r", "job", ("x",), 2, 1, 1, 1.0, {}, ResilienceConfig(backend="slurm")), "")
    processes: list[subprocess.Popen[bytes]] = []
    begin = SlurmBackend._srun

    def noted(backend: SlurmBackend, *arguments: object) -> subprocess.Popen[bytes]:
        processes.append(begin(backend, *arguments))  # type: ignore[arg-type]
        return processes[-1]

    monkeypatch.setattr(SlurmBackend, "_srun", noted)
    yield made
    for process in processes:
        process.kill()
        process.wait()


def until(is_so: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline_s
        time.sleep(0.02)


def test_an_executor_is_a_step_on_its_host_and_ends_by_its_process_id(folder: RunFolder, tmp_path: Path) -> None:
    backend = SlurmBackend(folder)
    assert [backend.name(number) for number in range(4)] == ["node-0", "node-1", "node-2", ""]
    backend.launch("node-1")
    until(lambda: (folder.out / "node-1").exists() and (folder.out / "node-1").read_text() == "h1")
    [call] = (tmp_path / "srun-calls").read_text().splitlines()
    for option in ("--jobid=77", "--nodes=1", "--nodelist=h1", "--overlap", "--no-kill", "--cpus-per-task=64"):
        assert option in call.split()
    assert not backend.has_died("node-1")
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        backend.remove("node-1", other.pid)  # an id that is another process's by now
        assert backend._others[-1].wait(10) != 0
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
    backend.remove("node-1", backend._steps["node-1"].pid)
    until(lambda: backend.has_died("node-1"))
    assert backend._steps["node-1"].poll() == -signal.SIGKILL


def test_a_step_of_a_driver_that_takes_over_says_nothing_about_the_node(folder: RunFolder) -> None:
    SlurmBackend(folder).launch("node-0")
    later = SlurmBackend(folder)
    later.ensure("node-0")
    later._others[-1].kill()
    later._others[-1].wait()
    assert not later.has_died("node-0")


def test_a_requeued_job_s_hosts_are_further_nodes_without_those_that_were_evicted(
    folder: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = SlurmBackend(folder)
    for node in ("node-0", "node-1"):  # and never node-2
        first.launch(node)
    first.block("node-1", "lost", was_heard=True)  # h1, which is in the next allocation too
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "h[1,7-8]")
    later = SlurmBackend(folder)
    later.block("node-0", "ended with its allocation", was_heard=False)
    assert list(later._blocked) == ["h1"]
    assert [later.name(number) for number in range(5)] == ["node-0", "node-1", "node-2", "node-3", ""]
    assert [later.has_died(f"node-{number}") for number in range(4)] == [True, True, False, False]
    rows = json.loads((folder.run / "slurm.json").read_text())["hosts"]
    assert [host for _, host in rows] == ["h0", "h1", "h7", "h8"]
    assert SlurmBackend(folder)._rows == later._rows  # another driver in the same allocation


def test_requeueing_asks_slurm_for_this_job_and_tells_why_it_is_refused(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slurm.requeue()
    assert (tmp_path / "scontrol-calls").read_text() == "requeue 77\n"
    monkeypatch.setenv("SLURM_JOB_ID", "78")
    with pytest.raises(ConfigError, match="Invalid job id"):
        slurm.requeue()


def test_without_slurm_it_says_so(folder: RunFolder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(HardwareMissing, match="scontrol"):
        SlurmBackend(folder)
    monkeypatch.delenv("SLURM_JOB_ID")
    with pytest.raises(ConfigError, match="SLURM_JOB_ID is not set"):
        SlurmBackend(folder)


@pytest.mark.parametrize("is_asked", [False, True])
def test_a_run_goes_on_in_another_allocation(is_asked: bool, tmp_path: Path) -> None:
    """All nodes of the first have ended, in the midst of a step, or after a stop ahead of its end."""
    fleet = Fleet(tmp_path, nodes=3, spares=3)
    fleet.until_step(12)
    if is_asked:
        fleet.folder.ask("stop")
        fleet.until_state(State.STOPPED)
    fleet.gone = {f"node-{number}" for number in range(6)}
    for node in fleet.nodes.values():
        node.is_dead = True
    fleet.driver.close()
    fleet.driver = fleet.new_driver()
    if is_asked:
        fleet.driver.resume()
    assert fleet.finish() is State.COMPLETED
    assert fleet.driver.facts.members == ["node-6", "node-7", "node-8"]
    assert len(fleet.decisions) == (0 if is_asked else 1)
    standby = fleet.driver.facts.evicted["node-3"]
    assert standby.startswith("gone with an earlier driver")


@pytest.mark.skipif(find_redis_binary() is None, reason="needs a redis-server")
def test_an_allocation_that_ends_is_requeued_and_the_run_goes_on(
    folder: RunFolder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "127.0.0.[1-2]")
    out, port = tmp_path / "whole", free_port("127.0.0.1")
    url = f"redis://127.0.0.1:{port}"
    resilience = {"backend": "slurm", "checks": "off", "heartbeat_s": 0.5, "kernel_log": "off", "missed": 40}
    job = {
        "store": {"url": url}, "checkpoint": {"every_steps": 10}, "optimizer": {"steps": 60}, "parallel": {"dp": 2},
        "launch": {"backend": "gloo"}, "resilience": resilience | {"silence_floor_s": 600.0},
    }  # fmt: skip
    config = build_config({"cluster": {"servers": 2, "gpus_per_server": 1}, "job": job})
    whole = RunFolder(out)
    words = ("tests.trainer.resilience.fake_rank", str(out), "60")
    whole.create(Spec("r", "job", words, 2, 1, 1, 0.5, {}, config.job.resilience), to_toml(config))
    whole.set_store_url(url)
    command = [sys.executable, "-m", "netlayer", "run", "start", str(whole.job), "--out", str(out)]
    binary = str(find_redis_binary())
    quiet = subprocess.DEVNULL
    redis = subprocess.Popen([binary, "--port", str(port), "--bind", "127.0.0.1", "--save", ""], stdout=quiet)
    driver = None
    try:
        driver = subprocess.Popen(command, stderr=subprocess.PIPE, stdout=quiet, text=True)
        saved = out / "saved"
        until(lambda: saved.exists() and saved.read_text() == "40" and last_entry(whole.journal)["to"] == "run")
        driver.send_signal(signal.SIGUSR1)
        _, log = driver.communicate(timeout=60)
        assert driver.returncode == 0, log
        assert last_entry(whole.journal)["facts"]["state"] == "stopped"
        assert "requeue 77" in (tmp_path / "scontrol-calls").read_text()
        assert 40 < int(saved.read_text()) < 60  # where it stood
        (out / "go").touch()
        monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stderr
        facts = last_entry(whole.journal)["facts"]
        assert (facts["state"], facts["members"]) == ("completed", ["node-2", "node-3"])
    finally:
        if driver is not None and driver.poll() is None:
            driver.kill()
            driver.communicate()
        redis.kill()
        redis.wait()
