"""`netlayer run` as its user runs it: real drivers, executors, Redis and signals; training processes without torch."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import psutil
import pytest
from click.testing import CliRunner

from netlayer.config.file import to_toml
from netlayer.config.tree import build_config
from netlayer.errors import ConfigError
from netlayer.results import load_record
from netlayer.store.redis_server import find_redis_binary
from tests.forked import run_module
from trainer.checkpoint.names import DAMAGED, META, as_location
from trainer.checkpoint.storage import open_storage
from trainer.commands.run import _as_started, _driving
from trainer.commands.run import run as command
from trainer.resilience.bus import Bus
from trainer.resilience.folder import RunFolder, Spec
from trainer.resilience.journal import entries, last_entry
from trainer.resilience.status import log_lines, set_aside_damaged
from trainer.resilience.store_host import directory_of

pytestmark = pytest.mark.skipif(find_redis_binary() is None, reason="needs a redis-server")
LIMIT_S = 60.0
SAVED = 40
"""The last checkpoint before the step at which the ranks wait."""


class Run:
    """A run of two nodes, and its driver's process."""

    def __init__(self, out: Path, steps: int, orphan_s: float = 20.0) -> None:
        self.folder = RunFolder(out)
        resilience = {"checks": "off", "heartbeat_s": 0.5, "orphan_s": orphan_s, "stop_s": 20.0, "kernel_log": "off"}
        # A machine that is busy with other tests is slow, and no node of it is lost.
        resilience |= {"missed": 40, "silence_floor_s": 600.0}
        config = build_config(
            {
                "cluster": {"servers": 2, "gpus_per_server": 1},
                "job": {
                    "parallel": {"dp": 2},
                    "checkpoint": {"every_steps": 10},
                    "optimizer": {"steps": steps},
                    "launch": {"backend": "gloo"},
                    "resilience": resilience,
                },
            }
        )
        out.mkdir()
        command = ("tests.trainer.resilience.fake_rank", str(out), str(steps))
        spec = Spec(secrets.token_hex(8), "job", command, 2, 1, 1, 0.5, {}, config.job.resilience, preload=("json",))
        self.folder.create(spec, to_toml(config))
        self.driver: subprocess.Popen[str] | None = None

    def start(self, *words: str) -> None:
        command = [sys.executable, "-m", "netlayer", "run", *(words or ("start", str(self.folder.job), "--out"))]
        self.driver = subprocess.Popen(
            [*command, str(self.folder.out)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    @property
    def facts(self) -> dict[str, Any]:
        return dict(last_entry(self.folder.journal).get("facts", {}))

    @property
    def saved(self) -> int:
        with contextlib.suppress(OSError, ValueError):
            return int((self.folder.out / "saved").read_text())
        return 0

    def until(self, is_so: Callable[[], bool]) -> None:
        end_s = time.monotonic() + LIMIT_S
        while not is_so():
            assert time.monotonic() < end_s, self.facts
            time.sleep(0.02)

    def processes(self, word: str) -> list[psutil.Process]:
        found = []
        for process in psutil.process_iter(["cmdline"]):
            words = process.info["cmdline"] or []
            if word in words and str(self.folder.out) in words:
                found.append(process)
        return found

    def ranks(self) -> list[psutil.Process]:
        """Return its ranks: forks, which have the command line of what they were forked from and names of their own."""
        return [process for process in self.forks() if process.info["name"].startswith("rank ")]

    def forks(self) -> list[psutil.Process]:
        """Return what ranks are forked from, and its forks."""
        processes = []
        # Both are read here: a process may have ended by the time that it is asked again.
        for process in psutil.process_iter(["cmdline", "name"]):
            if any(each.startswith(f"{self.folder.out} ") for each in process.info["cmdline"] or []):
                processes.append(process)
        return processes

    def end(self) -> tuple[int, str]:
        """Let the ranks go on to their last step, and wait for the driver."""
        (self.folder.out / "go").touch()
        assert self.driver is not None
        output, _ = self.driver.communicate(timeout=LIMIT_S)
        return self.driver.returncode, output

    def none_left(self) -> bool:
        words = ("trainer.resilience.executor", "trainer.resilience.store_host")
        return not self.forks() and not any(self.processes(word) for word in words)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    made = Run(tmp_path / "run", 60)
    yield made
    _clear(made)


def _clear(made: Run) -> None:
    if made.driver is not None and made.driver.poll() is None:
        made.driver.kill()
        made.driver.communicate()
    for word in ("trainer.resilience.executor", "trainer.resilience.store_host"):
        for process in made.processes(word):
            process.kill()
    for process in made.ranks():
        process.kill()
    shutil.rmtree(directory_of(made.folder), ignore_errors=True)


def test_a_killed_rank_a_killed_driver_and_a_lost_store_in_one_run(run: Run) -> None:
    run.start()
    run.until(lambda: run.saved == SAVED and run.facts["state"] == "run")
    run.ranks()[0].send_signal(signal.SIGKILL)
    run.until(lambda: len(run.facts["incidents"]) == 1 and run.facts["state"] == "run")
    assert run.driver is not None
    run.driver.send_signal(signal.SIGKILL)
    run.driver.communicate()
    starts = run.facts["incarnation"]
    for host in run.processes("trainer.resilience.store_host"):
        for process in [*host.children(recursive=True), host]:
            process.kill()
    run.start("resume")
    code, output = run.end()
    assert code == 0, output
    assert "driver 2 took over in state run" in output
    assert run.facts["incarnation"] == starts == 2  # the training went on without its driver, and without its store
    assert [each["decision"]["kind"] for each in run.facts["incidents"]] == ["killed"]
    run.until(run.none_left)
    seqs = [entry["seq"] for entry in entries(run.folder.journal)]
    assert seqs == list(range(1, len(seqs) + 1))
    [record] = [load_record(path) for path in (run.folder.out / "records").glob("*.json")]
    assert record.environment["run"]["restarts"] == 1
    assert run.folder.token().hex() not in json.dumps(record.rows) + (run.folder.journal).read_text()


def test_ctrl_c_stops_with_a_checkpoint_and_resume_goes_on(run: Run) -> None:
    run.start()
    run.until(lambda: run.saved == SAVED and run.facts["state"] == "run")
    assert run.driver is not None
    run.driver.send_signal(signal.SIGINT)
    output, _ = run.driver.communicate(timeout=LIMIT_S)
    assert run.driver.returncode == 0, output
    assert run.facts["state"] == "stopped"
    assert SAVED < run.saved < 60  # where it stood, and not where it had last saved
    run.until(run.none_left)
    again = netlayer("start", run.folder.job, "--out", run.folder.out)
    assert again.returncode == 2
    assert "netlayer run resume" in again.stderr
    run.start("resume")
    code, output = run.end()
    assert code == 0, output
    assert run.facts["state"] == "completed"
    assert run.saved == 60


def test_executors_without_a_driver_end_their_processes(tmp_path: Path) -> None:
    run = Run(tmp_path / "run", 60, orphan_s=3.0)
    try:
        run.start()
        run.until(lambda: run.saved == SAVED and run.facts["state"] == "run")
        assert run.driver is not None
        run.driver.send_signal(signal.SIGSTOP)  # frozen, it neither gives a sign of life nor ends anything
        run.until(lambda: not run.ranks() and not run.processes("trainer.resilience.executor"))
        assert run.saved == SAVED
    finally:
        _clear(run)


def test_a_killed_executor_takes_its_processes_with_it(run: Run) -> None:
    run.start()
    run.until(lambda: run.saved == SAVED and run.facts["state"] == "run")
    [executor, _] = run.processes("trainer.resilience.executor")
    children = [child for child in executor.children() if child in run.ranks()]
    executor.send_signal(signal.SIGKILL)
    run.until(lambda: not any(child.is_running() and child.status() != "zombie" for child in children))
    code, output = run.end()
    assert code == 0, output
    [incident] = run.facts["incidents"]
    assert (incident["decision"]["action"], incident["decision"]["kind"]) == ("evict", "node_lost")


def test_resume_while_the_run_is_being_ended_goes_on_with_it(run: Run) -> None:
    run.start()
    run.until(lambda: run.saved == SAVED and run.facts["state"] == "run")
    first = run.driver
    assert first is not None
    assert netlayer("stop", run.folder.out).returncode == 0
    run.start("resume")
    first.communicate(timeout=LIMIT_S)
    assert first.returncode == 0
    run.until(lambda: run.facts["state"] == "run" and run.facts["incarnation"] == 2)
    code, output = run.end()
    assert code == 0, output
    assert "completed after step" in output


def netlayer(*words: object) -> subprocess.CompletedProcess[str]:
    return run_module("netlayer", "run", *words, timeout=LIMIT_S)


def test_status_logs_and_evict_while_it_runs(run: Run) -> None:
    run.start()
    run.until(lambda: run.saved == SAVED and run.facts["state"] == "run")
    bus = Bus(run.folder.store_url(), run.folder.spec().run)
    for data in (b"forged", b"x" * 200_000, b"\0" * 40_000):
        bus.send_heartbeat(data)
    bus.close()
    run.until(lambda: json.loads(run.folder.status.read_text())["refused_messages"] == 3)
    shown = netlayer("status", run.folder.out, "--json", "-")
    assert json.loads(shown.stdout)["has_driver"] is True
    assert run.folder.token().hex() not in shown.stdout
    logs = netlayer("logs", run.folder.out, "node-0", "--rank", 0, "-n", 3)
    assert "starts after step 0 \\x1b[31m<b>red</b>" in logs.stdout
    assert "\x1b" not in logs.stdout
    refused = netlayer("evict", run.folder.out, "../node-1")
    assert refused.returncode == 2
    assert "is no node's name" in refused.stderr
    assert netlayer("evict", run.folder.out, "node-1").returncode == 0
    code, output = run.end()
    assert code == 0, output
    assert set(run.facts["evicted"]) == {"node-1"}
    assert "node-1: evicted: evicted by hand" in netlayer("status", run.folder.out).stdout
    late = netlayer("stop", run.folder.out)
    assert (late.returncode, late.stderr.endswith("already: nothing is done\n")) == (0, True)
    assert list(run.folder.requests.iterdir()) == []


@pytest.mark.parametrize("name", ["../node-1", "node/1", "..", "a" * 64, "node-1\n", "-x", "<b>"])
def test_names_that_lead_out_of_the_run_are_refused(name: str, tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    folder.requests.mkdir(parents=True)
    with pytest.raises(ConfigError, match="is no node's name"):
        folder.ask("evict", name)
    with pytest.raises(ConfigError, match="is no node's name"):
        list(log_lines(folder, name, None, 1))
    # Put there by hand, it is taken away and not followed.
    (folder.requests / "1.json").write_text(json.dumps({"action": "evict", "node": name}))
    (folder.requests / "2.json").write_text('{"action": "rm"}')
    (folder.requests / "3.json").write_text("[1")
    assert list(folder.asked()) == []
    assert list(folder.requests.iterdir()) == []


def test_what_cannot_run_is_refused_before_anything_starts(tmp_path: Path) -> None:
    job, out = tmp_path / "job.toml", tmp_path / "a"
    job.write_text("[cluster]\nservers = 2\ngpus_per_server = 1\n[job.parallel]\ndp = 2\n")
    rules = tmp_path / "rules.toml"
    rules.write_text('[[rule]]\nname = "x"\nwhere = "rank"\npattern = "("\nmeans = "note"\nsource = "here"\n')
    saves = ("--set", "job.checkpoint.every_steps=5")
    for words, message in (
        (("start", job, "--out", out), "job.checkpoint.every_steps"),
        (("start", job, *saves), "--out: is needed"),
        (("start", job, "--out", out, *saves, "--set", f"job.resilience.rules={rules}"), "is no pattern"),
        (("start", job, "--out", out, *saves, "--hosts", "a,b"), "does not go with --hosts"),
        (
            ("start", job, "--out", out, *saves, "--set", "job.parallel.dp=1"),
            "must equal cluster.servers x cluster.gpus_per_server",
        ),
        (("status", tmp_path), "is no run of netlayer run"),
        (("status", job), "is no run of netlayer run"),
        (("logs", tmp_path), "is no run of netlayer run"),
        (("resume", tmp_path), "is no run of netlayer run"),
    ):
        result = CliRunner().invoke(command, [str(word) for word in words])
        assert isinstance(result.exception, ConfigError), words
        assert message in str(result.exception)
    assert not out.exists()


def test_a_run_keeps_the_job_of_its_start(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Run(tmp_path / "run", 60).folder
    same = build_config(tomllib.loads(folder.job.read_text()))
    assert _as_started(folder, same) == same
    assert capsys.readouterr().err == ""
    tree = same.model_dump()
    tree["job"]["optimizer"]["steps"] = 70
    assert _as_started(folder, build_config(tree)).job.optimizer.steps == 60
    assert "keeps the job and settings of its start" in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["", "elsewhere"])
def test_a_damaged_checkpoint_is_set_aside_where_the_job_saves(folder: str, tmp_path: Path) -> None:
    there = tmp_path / (folder or "run/checkpoints")
    for step in (5, 10):
        (there / f"step-{step:06d}").mkdir(parents=True)
    made = RunFolder(tmp_path / "run")
    job = build_config({"job": {"checkpoint": {"folder": str(there) if folder else ""}}})
    made.create(Spec("1", "job", ("x",), 1, 1, 1, 1.0), to_toml(job))
    assert set_aside_damaged(made.checkpoints, "no path") == [str(there / "step-000010.damaged")]
    (there / "step-000010").mkdir()  # the step was taken again, and its checkpoint is damaged again
    (there / "step-000010.damaged/rank").touch()
    line = f"error: --resume = {there}/step-000010/rank is damaged (altered); give an older checkpoint"
    assert set_aside_damaged(made.checkpoints, line) == [str(there / "step-000010.damaged2")]
    # One in the memory of the run's machines says nothing of those in storage; one that is gone, nothing of another.
    assert set_aside_damaged(made.checkpoints, f"error: --resume = peers:{tmp_path}/step-000012/x is damaged") == []
    assert set_aside_damaged(made.checkpoints, line) == []
    names = ["step-000005", "step-000010.damaged", "step-000010.damaged2"]
    assert sorted(path.name for path in there.iterdir()) == names


def test_what_was_saved_since_replicas_agreed_is_set_aside(tmp_path: Path) -> None:
    for step in (20, 40, 60):
        (tmp_path / f"step-{step:06d}").mkdir()
    line = "node-2: error: step 70: replicas that agreed after step 30 differ: rank 2 (dp=2) has other parameters"
    assert len(set_aside_damaged(tmp_path, line)) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-000020",
        *(f"step-0000{n}.damaged" for n in (40, 60)),
    ]


def test_signals_before_there_is_a_driver_wait_for_it(tmp_path: Path) -> None:
    lines = (
        "import os, pathlib, signal, sys",
        "from trainer.commands.run import _Signals",
        "from trainer.resilience.folder import RunFolder",
        "folder = RunFolder(pathlib.Path(sys.argv[1]))",
        "folder.requests.mkdir(parents=True)",
        "signals = _Signals(folder)",
        "os.kill(os.getpid(), signal.SIGINT)",  # while executors are started, say
        "print([each.action for each in folder.asked()])",
        "os.kill(os.getpid(), signal.SIGTERM)",
        "class Driver:",
        "    def ask_to_stop(self, *, at_once): print(at_once)",
        "signals.driver = Driver()",
    )
    command = [sys.executable, "-c", "\n".join(lines), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "['stop']\nTrue\n"


def test_a_damaged_checkpoint_of_an_object_store_is_set_aside() -> None:
    pytest.importorskip("upath")
    fs = fsspec.filesystem("memory")
    for step in (5, 10):
        fs.pipe_file(f"/aside/step-{step:06d}/{META}", b"{}")
        fs.pipe_file(f"/aside/step-{step:06d}/rank0", b"tensors")
    folder = as_location("memory://aside")
    [where] = set_aside_damaged(folder, "error: --resume = memory://aside/step-000010/rank0 is damaged")
    assert where.endswith(f"step-000010/{META}{DAMAGED}")
    storage = open_storage("memory://aside")
    storage.create("step-000020", 0)  # which clears away halves of saves
    assert fs.cat_file("/aside/step-000010/rank0") == b"tensors"
    assert not fs.exists(f"/aside/step-000010/{META}")
    storage.create("step-000010", 0)  # the step is taken again
    assert not fs.exists("/aside/step-000010/rank0")
    fs.rm("/aside", recursive=True)


def test_what_may_hold_a_password_is_for_its_user_alone(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "run")
    with _driving(folder):
        folder.create(Spec("1", "job", ("x",), 1, 1, 1, 1.0), "")
        folder.set_store_url("redis://user:password@host")
        modes = {path.name: oct(path.stat().st_mode & 0o777) for path in (folder.run, folder.job)}
    assert modes == {"run": "0o700", "job.toml": "0o600"}


def test_the_driver_and_the_executor_load_no_torch() -> None:
    code = (
        "import sys; import trainer.resilience.driver, trainer.resilience.executor, trainer.commands.run;"
        "sys.exit('torch' in sys.modules or 'pyarrow' in sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, env=os.environ, timeout=LIMIT_S)
