"""A signal that asks for the end: of one process, and of whole runs as their users start them."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from netlayer.config.file import to_toml
from netlayer.config.tree import Config
from trainer.checkpoint.meta import find

from .conftest import tiny_job

ALONE = """
import os, signal, sys, time
from trainer.stop import ECHO_S, listening
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
os.kill(os.getpid(), signal.SIGTERM)  # held back until somebody listens
with listening(counts=sys.argv[1] != "not") as stop:
    while not stop.is_asked:
        time.sleep(0.01)
    time.sleep(0 if sys.argv[1] == "echo" else ECHO_S)
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(60 if sys.argv[1] == "counts" else 1)
assert signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, [])
print("went on")
"""
FOREVER = 10**9


@pytest.mark.parametrize(
    ("counts", "code", "said"),
    [("counts", 128 + signal.SIGUSR1, ""), ("echo", 0, "went on\n"), ("not", 0, "went on\n")],
)
def test_the_first_signal_is_noted_and_the_second_ends_who_counts(counts: str, code: int, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALONE, counts], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (code, said), done.stderr


PARENT = """
import os, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", sys.argv[1]], stdout=subprocess.PIPE)
child.stdout.readline()
os._exit(0)
"""
CHILD = """
import os, signal, time
from trainer.stop import listening
signal.alarm(50)
with listening(counts=True, follows=True) as stop:
    os.write(1, b"listens\\n")
    while not stop.is_asked:
        time.sleep(0.01)
os.write(2, b"asked")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells of a parent's end on Linux alone")
def test_the_end_of_a_launcher_that_it_follows_is_a_request() -> None:
    done = subprocess.run([sys.executable, "-c", PARENT, CHILD], capture_output=True, text=True, timeout=60, check=True)
    assert done.stderr == "asked"


@pytest.fixture
def job_file(text_folder: Path, tmp_path: Path) -> Path:
    """Two pipeline stages; the learning rate does not know where the run ends."""
    job = tiny_job(text_folder, 2, parallel={"dp": 1, "pp": 2}, optimizer={"steps": FOREVER, "schedule": "constant"})
    tree = {"cluster": {"gpus_per_server": 2}, "job": job.model_dump()}
    file = tmp_path / "job.toml"
    file.write_text(to_toml(Config.model_validate(tree)))
    return file


def command(*words: object, launcher: tuple[str, ...] = ()) -> list[str]:
    return [sys.executable, *launcher, "-m", "netlayer", "train", *map(str, words)]


def rows(out: Path) -> list[dict[str, Any]]:
    file = out / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


Start = Callable[[list[str], Path], "subprocess.Popen[str]"]


@pytest.fixture
def started() -> Iterator[Start]:
    """A run that has taken a step; whatever comes of it, nothing of it is left behind the test."""
    family: list[psutil.Process] = []

    def start(words: list[str], out: Path) -> subprocess.Popen[str]:
        run = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        until = time.monotonic() + 120
        try:
            while not rows(out) and run.poll() is None and time.monotonic() < until:
                time.sleep(0.05)
        finally:
            family.extend(family_of(run))
        assert rows(out), run.communicate()[1] if run.poll() is not None else "no step in 120 s"
        return run

    yield start
    for each in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            each.kill()


def family_of(run: subprocess.Popen[str]) -> list[psutil.Process]:
    """The process and what it has started, also in sessions of their own."""
    with contextlib.suppress(psutil.NoSuchProcess):
        top = psutil.Process(run.pid)
        return [top, *top.children(recursive=True)]
    return []


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.timeout(900)
def test_a_stopped_run_is_gone_on_with_to_the_bit(
    started: Start, job_file: Path, tmp_path: Path, signum: signal.Signals
) -> None:
    run = started(command(job_file, "--out", tmp_path / "a"), tmp_path / "a")
    run.send_signal(signum)
    stdout, stderr = run.communicate(timeout=120)
    assert run.returncode == 0, stderr
    before = rows(tmp_path / "a")
    step = before[-1]["step"]
    assert find(tmp_path / "a").step == step
    assert stdout.startswith(f"{len(before)} steps, loss ")
    assert f"stopped after step {step}, as asked; go on with the same command and --resume {tmp_path / 'a'}" in stderr
    more = ("--set", f"optimizer.steps={step + 3}", "--set", "evaluation.every_steps=3")
    for words in (("--out", tmp_path / "whole"), ("--out", tmp_path / "b", "--resume", tmp_path / "a")):
        subprocess.run(command(job_file, *more, *words), capture_output=True, timeout=250, check=True)
    keys = ("step", "loss", "grad_norm", "lr")
    whole, halves = rows(tmp_path / "whole"), [*before, *rows(tmp_path / "b")]
    assert [[row[key] for key in keys] for row in halves] == [[row[key] for key in keys] for row in whole]
    held_out = [(tmp_path / out / "validation.jsonl").read_text().splitlines()[-1] for out in ("whole", "b")]
    assert held_out[0] == held_out[1]


@pytest.mark.slow
@pytest.mark.parametrize("asked", ["a rank", "torchrun", "nobody, torchrun is killed"])
def test_ranks_of_torchrun_stop_together_in_order(started: Start, job_file: Path, tmp_path: Path, asked: str) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    run = started(command(job_file, "--out", tmp_path / "a", launcher=launcher), tmp_path / "a")
    ranks = {each.environ().get("RANK"): each for each in family_of(run)[1:]}
    if asked == "a rank":
        os.kill(ranks["1"].pid, signal.SIGUSR1)
    else:
        run.send_signal(signal.SIGTERM if asked == "torchrun" else signal.SIGKILL)
    _, stderr = run.communicate(timeout=120)  # to the end of the last process that has its stderr
    assert not psutil.wait_procs(list(ranks.values()), timeout=10)[1]
    # torchrun says of every signal that it got that it failed.
    assert run.returncode == {"a rank": 0, "torchrun": 1}.get(asked, -signal.SIGKILL), stderr
    assert find(tmp_path / "a").step == rows(tmp_path / "a")[-1]["step"]
    assert "as asked; go on with" in stderr
    assert "forcefully" not in stderr
    assert len(list((tmp_path / "a" / "records").iterdir())) == 1
