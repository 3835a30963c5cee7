"""A signal that asks for the end: of one process, and of whole runs as their users start them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from netlayer.config import Config, to_toml
from trainer.checkpoint_meta import find

from .conftest import tiny_job

ALONE = """
import os, signal, sys, time
from trainer.stop import listening
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
os.kill(os.getpid(), signal.SIGTERM)  # held back until somebody listens
with listening(counts=sys.argv[1] == "counts") as stop:
    while not stop.is_asked:
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGUSR1)
    time.sleep(1 if sys.argv[1] == "not" else 60)
assert signal.SIGTERM in signal.pthread_sigmask(signal.SIG_BLOCK, [])
print("went on")
"""
FOREVER = 10**9


@pytest.mark.parametrize(("counts", "code", "said"), [("counts", 128 + signal.SIGUSR1, ""), ("not", 0, "went on\n")])
def test_the_first_signal_is_noted_and_the_second_ends_who_counts(counts: str, code: int, said: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", ALONE, counts], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout) == (code, said), done.stderr


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


def started(words: list[str], out: Path) -> subprocess.Popen[str]:
    """A run that has taken a step."""
    run = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    until = time.monotonic() + 200
    while not rows(out) and run.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    return run


@pytest.mark.slow
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
def test_a_stopped_run_is_gone_on_with_to_the_bit(job_file: Path, tmp_path: Path, signum: signal.Signals) -> None:
    run = started(command(job_file, "--out", tmp_path / "a"), tmp_path / "a")
    run.send_signal(signum)
    stdout, stderr = run.communicate(timeout=200)
    assert run.returncode == 0, stderr
    before = rows(tmp_path / "a")
    step = before[-1]["step"]
    assert find(tmp_path / "a").step == step
    assert stdout.startswith(f"{len(before)} steps, loss ")
    assert f"stopped behind step {step}, as asked; go on with the same command and --resume {tmp_path / 'a'}" in stderr
    more = ("--set", f"optimizer.steps={step + 3}", "--set", "evaluation.every_steps=3")
    for words in (("--out", tmp_path / "whole"), ("--out", tmp_path / "b", "--resume", tmp_path / "a")):
        subprocess.run(command(job_file, *more, *words), capture_output=True, timeout=250, check=True)
    keys = ("step", "loss", "grad_norm", "lr")
    whole, halves = rows(tmp_path / "whole"), [*before, *rows(tmp_path / "b")]
    assert [[row[key] for key in keys] for row in halves] == [[row[key] for key in keys] for row in whole]
    held_out = [(tmp_path / out / "validation.jsonl").read_text().splitlines()[-1] for out in ("whole", "b")]
    assert held_out[0] == held_out[1]


@pytest.mark.slow
def test_one_rank_of_a_launcher_that_is_asked_stops_them_all(job_file: Path, tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    run = started(command(job_file, "--out", tmp_path / "a", launcher=launcher), tmp_path / "a")
    ranks = [each for each in psutil.Process(run.pid).children() if each.environ().get("RANK") == "1"]
    os.kill(ranks[0].pid, signal.SIGUSR1)
    _, stderr = run.communicate(timeout=200)
    assert run.returncode == 0, stderr
    assert find(tmp_path / "a").step == rows(tmp_path / "a")[-1]["step"]
    assert "as asked; go on with" in stderr
