"""`netlayer train` as its user runs it."""

from __future__ import annotations

import fcntl
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
import pytest
from click.testing import CliRunner

from netlayer.config.file import load_config, to_toml
from netlayer.config.tree import Config
from netlayer.errors import ConfigError
from netlayer.results import load_record
from tests.forked import run_module, start_module
from trainer.checkpoint.meta import Meta, find
from trainer.commands.train import _what_is_not_traced, short_time, train, words_of
from trainer.data.prepare import CorpusFacts
from trainer.train import Outcome, Progress, Stop, TrainResult

from .conftest import tiny_job


@pytest.fixture
def job_file(text_folder: Path, tmp_path: Path) -> Path:
    config = Config.model_validate(
        {
            "cluster": {"gpus_per_server": 2},
            "job": tiny_job(text_folder, 2, optimizer={"steps": 6}, checkpoint={"every_steps": 4}).model_dump(),
        }
    )
    file = tmp_path / "job.toml"
    file.write_text(to_toml(config))
    return file


def netlayer(*words: object, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    modules = [*launcher[1:], "-m", "netlayer"] if launcher else ["netlayer"]  # a launcher is `-m` and its words
    return run_module(modules[0], *modules[1:], "train", *words)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_a_job_trains_and_is_gone_on_with_in_another_layout(job_file: Path, tmp_path: Path) -> None:
    first = netlayer(job_file, "--out", tmp_path / "a", "--json", "-")
    assert first.returncode == 0, first.stderr
    record = json.loads(first.stdout)
    assert [row["step"] for row in record["rows"] if "loss" in row] == [1, 2, 3, 4, 5, 6]
    assert [row["step"] for row in rows(tmp_path / "a")] == [1, 2, 3, 4, 5, 6]
    spread = ("--set", "parallel.tp=2", "--set", "parallel.dp=1", "--out", tmp_path / "b")
    second = netlayer(job_file, "--resume", tmp_path / "a" / "checkpoints" / "step-000004", *spread)
    assert second.returncode == 0, second.stderr
    assert second.stdout.startswith("2 steps, loss ")
    assert f"resumes from {tmp_path / 'a' / 'checkpoints' / 'step-000004'}, after step 4\n" in second.stderr
    again = [row["loss"] for row in rows(tmp_path / "b")]
    over = CliRunner().invoke(train, [str(job_file), "--resume", str(tmp_path / "a"), "--out", str(tmp_path / "c")])
    assert "has taken 6 steps, and job.optimizer.steps is 6" in str(over.exception)
    assert again == pytest.approx([row["loss"] for row in rows(tmp_path / "a")[4:]], abs=1e-4)
    done = CliRunner().invoke(train, [str(job_file), "--resume", "auto", "--out", str(tmp_path / "a")])
    assert (done.exit_code, done.stderr.splitlines()[-1]) == (
        0,
        f"{tmp_path / 'a' / 'checkpoints' / 'step-000006'} has taken all 6 steps of the job: nothing to do",
    )
    # A bit of a tensor, which nobody reads before the ranks do: else every later start would take it, and fail.
    newest = tmp_path / "a" / "checkpoints" / "step-000006"
    content = bytearray((newest / "__0_0.distcp").read_bytes())
    content[len(content) // 2] ^= 1
    (newest / "__0_0.distcp").write_bytes(content)
    more = (job_file, "--set", "optimizer.steps=7", "--out", tmp_path / "a")
    named = netlayer(*more, "--resume", newest)
    assert (named.returncode, newest.exists()) == (2, True)
    assert f"note: --resume {newest.with_name('step-000004')} resumes from the last good checkpoint" in named.stderr
    automatic = netlayer(*more, "--resume", "auto")
    assert f"note: {newest} is damaged, and is now {newest}.damaged; no later start takes it" in automatic.stderr
    assert sorted(path.name for path in newest.parent.iterdir()) == ["step-000004", "step-000006.damaged"]


@pytest.mark.slow
def test_a_run_goes_on_in_its_folder_from_the_step_that_is_asked_for(job_file: Path, tmp_path: Path) -> None:
    out = tmp_path / "a"
    first = netlayer(job_file, "--out", out, "--trace", "2")
    assert first.returncode == 0, first.stderr
    before = rows(out)
    earlier = out / "checkpoints" / "step-000004"
    again = netlayer(job_file, "--out", out, "--resume", earlier, "--trace", "2-5")
    assert again.returncode == 0, again.stderr
    said = f"note: {out / 'checkpoints' / 'step-000006'} is of a later step, and becomes step-000006.replaced\n"
    assert said in again.stderr
    assert "note: --trace 2-5 has no effect up to step 4, from which it resumes\n" in again.stderr
    keys = ("step", "loss", "grad_norm", "lr")
    assert [[row[key] for key in keys] for row in rows(out)] == [[row[key] for key in keys] for row in before]
    [line] = (out / "restarts.jsonl").read_text().splitlines()
    assert json.loads(line)["replaced"]["metrics.jsonl"] == before[4:]
    assert len(list((out / "records").iterdir())) == 2
    names = sorted(path.name for path in (out / "checkpoints").iterdir())
    assert names == ["step-000004", "step-000006", "step-000006.replaced"]
    evaluated = [json.loads(row)["step"] for row in (out / "validation.jsonl").read_text().splitlines()]
    assert evaluated == [0, 4, 6]


@pytest.mark.slow
def test_a_rank_that_is_killed_under_torchrun_costs_no_row_and_no_folder(job_file: Path, tmp_path: Path) -> None:
    """The restart finds the newest good checkpoint by itself; losses are those of a run that nobody was interrupted."""
    more = ("--set", "optimizer.steps=60", "--set", "checkpoint.every_steps=8", "--set", "evaluation.every_steps=100")
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    whole = netlayer(job_file, *more, "--out", tmp_path / "whole", launcher=torchrun)
    assert whole.returncode == 0, whole.stderr
    out, log = tmp_path / "a", tmp_path / "stderr"
    words = [*torchrun, "--max-restarts", "2", "-m", "netlayer", "train", job_file, *more]
    with log.open("w") as file:
        run = subprocess.Popen(
            [sys.executable, *map(str, [*words, "--resume", "auto", "--out", out])], stderr=file, stdout=file
        )
    restarts = out / "restarts.jsonl"

    def wait_until(happened: Callable[[], bool]) -> None:
        until = time.monotonic() + 120
        while not happened() and run.poll() is None and time.monotonic() < until:
            time.sleep(0.02)
        assert happened(), log.read_text()

    try:
        for count, step in enumerate((3, 30), 1):  # before the first checkpoint, and behind some
            wait_until(lambda step=step: (out / "metrics.jsonl").is_file() and len(rows(out)) >= step)  # type: ignore[misc]
            family = psutil.Process(run.pid).children(recursive=True)
            own = [each for each in family if each.environ().get("RANK") == "1"]
            min(own, key=lambda each: each.create_time()).kill()  # the rank, and not the writer of its checkpoints
            # The next start has replaced rows.
            wait_until(lambda count=count: restarts.is_file() and restarts.read_text().count("\n") == count)  # type: ignore[misc]
        assert run.wait(200) == 0, log.read_text()
    finally:
        run.kill()  # its ranks end with it
        run.wait()
    keys = ("step", "loss", "grad_norm", "lr")
    assert [[row[key] for key in keys] for row in rows(out)] == [
        [row[key] for key in keys] for row in rows(tmp_path / "whole")
    ]
    first, second = (json.loads(line)["resumed_step"] for line in restarts.read_text().splitlines())
    assert first == 0 < second


def test_processes_of_a_launcher_train_together(job_file: Path, tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2")
    done = netlayer(job_file, "--set", "checkpoint.every_steps=0", "--out", tmp_path / "a", launcher=launcher)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("6 steps, loss ")
    assert len(rows(tmp_path / "a")) == 6


@pytest.mark.parametrize(
    "launcher", [(), pytest.param(("-m", "torch.distributed.run", "--nproc-per-node", "2"), marks=pytest.mark.slow)]
)
def test_a_cache_that_cannot_be_written_is_one_warning_and_no_wait(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, launcher: tuple[str, ...]
) -> None:
    blocked, out = tmp_path / "no folder", tmp_path / "a"
    blocked.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    done = netlayer(job_file, "--out", out, launcher=launcher)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("cannot be used as a cache") == (2 if launcher else 1)  # one of each process that reads it
    assert len(rows(out)) == 6
    assert len(list(out.glob("corpus-*"))) == 1
    assert not list(out.glob(".*.lock"))


def test_ranks_of_a_launcher_need_one_folder_for_checkpoints(job_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "1")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    with pytest.raises(ConfigError, match="--out: is needed for checkpoints"):
        CliRunner().invoke(train, [str(job_file)], catch_exceptions=False)


def as_rank(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """One of two processes of mpirun on one host, which says nothing of where they meet."""
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", str(number))
    for name in ("SIZE", "LOCAL_SIZE"):
        monkeypatch.setenv(f"OMPI_COMM_WORLD_{name}", "2")


def test_ranks_of_mpirun_meet_on_their_host(job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    as_rank(1, monkeypatch)
    joined = mock.Mock(return_value=Outcome((), (), 0, "CPU"))
    monkeypatch.setattr("trainer.worker.run_rank", joined)
    CliRunner().invoke(train, [str(job_file), "--out", str(tmp_path / "a")], catch_exceptions=False)
    [(context, work)] = [call.args for call in joined.call_args_list]
    assert (context.env.rank, work.init_method) == (1, "tcp://127.0.0.1:29500")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_store_that_has_no_effect_under_a_launcher_is_said_once(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    as_rank(rank, monkeypatch)
    monkeypatch.setattr(
        "trainer.commands.train._join", mock.Mock(side_effect=ConfigError("x", None, "ends here", "do not"))
    )
    words = ["--set", "store.url=redis://:s3cret@host", "--out", str(tmp_path / "a")]
    said = CliRunner().invoke(train, [str(job_file), *words]).stderr.splitlines()
    note = "note: job.store.url has no effect: ranks of openmpi meet at the first one, by MASTER_ADDR"
    assert said.count(note) == (rank == 0)
    assert not any("s3cret" in line for line in said)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("count", [4, 4096])
def test_a_schedule_is_proved_once_a_job_and_said_where_it_takes_long(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, count: int
) -> None:
    as_rank(rank, monkeypatch)
    checked = mock.Mock(side_effect=ConfigError("the schedule", None, "ends here", "do not"))
    monkeypatch.setattr("netlayer.workload.schedule_check.check_job", checked)
    monkeypatch.setattr(
        "trainer.commands.train._join", mock.Mock(side_effect=ConfigError("x", None, "ends here", "do not"))
    )
    words = [
        "--set",
        "parallel.pp=2",
        "--set",
        "parallel.dp=1",
        "--set",
        "batch.micro_batch_size=1",
        "--out",
        str(tmp_path),
    ]
    done = CliRunner().invoke(train, [str(job_file), *words, "--set", f"batch.global_batch_size={count}"])
    assert isinstance(done.exception, ConfigError)
    said = done.stderr.splitlines()
    assert checked.call_count == (rank == 0)
    assert len([line for line in said if "a rank will hold about" in line]) == (rank == 0)  # before the proof
    is_last = said[-1:] == ["checking the schedule of 4,096 micro-batches ..."]
    assert is_last == (rank == 0 and count == 4096), said


def test_a_record_says_what_was_run(job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = load_config(job_file).job.model_dump(mode="json")
    meta = Meta(tmp_path / "step-000004", 4, 0, 1, 1, job, {}, {})
    facts = CorpusFacts(36, 4, 0, 50_000, 20_000, 2_000, 300, cache_hit=True)
    monkeypatch.setattr("trainer.checkpoint.resume.find", lambda _path: meta)
    rows = ({"step": 0, "validation_loss": 2.0},)
    monkeypatch.setattr("trainer.commands.train._start", lambda *_, **__: TrainResult((), rows, facts, 1, ("CPU",)))
    words = [str(job_file), "--out", str(tmp_path / "a"), "--resume", "runs/old", "--trace", "5-6"]
    result = CliRunner().invoke(train, [*words, "--json", str(tmp_path / "record.json")], catch_exceptions=False)
    assert result.exit_code == 0
    record = load_record(tmp_path / "record.json")
    arguments = {"config": str(job_file), "resume": str(meta.path), "resumed_step": 4, "trace": "5-6"}
    assert {name: record.arguments[name] for name in arguments} == arguments
    assert record.environment["corpus"] == asdict(facts)


def test_ctrl_c_keeps_what_was_done_and_leaves_no_process(job_file: Path, tmp_path: Path) -> None:
    out, log = tmp_path / "a", tmp_path / "stderr"
    words = ["train", job_file, "--set", "optimizer.steps=100000", "--out", out]
    with log.open("w") as file:
        run = start_module("netlayer", *words, stdout=file, stderr=file)
    until = time.monotonic() + 120
    while not ((out / "metrics.jsonl").is_file() and rows(out)) and run.poll() is None and time.monotonic() < until:
        time.sleep(0.05)
    family = psutil.Process(run.pid).children(recursive=True)
    os.killpg(run.pid, signal.SIGINT)
    assert run.wait(100) == 130
    assert f"what was done until then is in {out}" in log.read_text()
    assert rows(out)
    assert not psutil.wait_procs(family, timeout=10)[1]


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGUSR1])
@pytest.mark.parametrize("rank", [None, 0, 1])
def test_a_signal_while_the_text_is_made_ready_ends_it_in_a_word_and_leaves_nothing(
    job_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signum: signal.Signals, rank: int | None
) -> None:
    cache, out, log = tmp_path / "cache" / "netlayer", tmp_path / "runs" / "a", tmp_path / "stderr"
    cache.mkdir(parents=True)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache.parent))
    if rank is not None:
        as_rank(rank, monkeypatch)
    busy = os.open(cache / ".corpus.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(busy, fcntl.LOCK_EX)  # so that it waits for the text as long as it takes
    try:
        words = ["train", str(job_file), "--out", str(out), "-v"]
        with log.open("w") as file:
            run = start_module("netlayer", *words, stdout=file, stderr=file)
        until = time.monotonic() + 120
        while "is held by another process" not in log.read_text() and run.poll() is None and time.monotonic() < until:
            time.sleep(0.05)
        for _ in range(2):  # as `timeout` does
            run.send_signal(signum)
        assert run.wait(60) == 128 + signum, log.read_text()
    finally:
        os.close(busy)
    said = log.read_text().splitlines()
    word = f"stopped by {signum.name} before the first step: nothing to save"
    assert (said[-1] == word) == (rank != 1)  # the first rank says it for all
    assert not any("Traceback" in line or line.startswith("note: ") for line in said)
    assert not out.parent.exists()
    assert [file.name for file in cache.iterdir()] == [".corpus.lock"]  # of the other process


def test_a_loss_that_is_no_number_stops_with_the_checkpoint_to_go_on_from(job_file: Path, tmp_path: Path) -> None:
    # Weight decay multiplies the matrices by -100 a step.
    words = ("--set", "checkpoint.every_steps=1", "--set", "optimizer.lr=1e3", "--set", "optimizer.warmup_steps=0")
    run = netlayer(job_file, *words, "--out", tmp_path / "a")
    assert run.returncode == 1
    found = re.search(r"error: step (\d): the (?:loss|gradient norm) is (?:nan|inf)", run.stderr)
    assert found, run.stderr
    kept = tmp_path / "a" / "checkpoints" / f"step-{int(found[1]) - 2:06d}"  # the step after it verified it
    assert f"note: --resume {kept} resumes from the last good checkpoint" in run.stderr
    assert find(tmp_path / "a").path == kept


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--set", "parallel.tp=3"], "must divide job.model.heads"),
        (["--set", "parallel.tp=2"], "must equal cluster.servers x cluster.gpus_per_server"),
        (["--config", "other.toml"], "give one of them"),
        (["--resume", "/nowhere"], "holds no checkpoint"),
        (["--trace", "5-7"], "--trace = 5-7: must lie in the steps of this run, 1-6"),
        (["--set", "metrics.prometheus_port=70000"], "must be at most 65535"),
        (["--set", "cluster.servers=2", "--set", "parallel.dp=4", "--set", "batch.global_batch_size=16"], "torchrun"),
    ],
)
def test_what_cannot_be_is_one_line_before_anything_starts(
    job_file: Path, tmp_path: Path, words: list[str], said: str
) -> None:
    result = CliRunner().invoke(train, [str(job_file), *words, "--out", str(tmp_path / "out")])
    assert isinstance(result.exception, ConfigError)
    assert said in str(result.exception)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (range(0), ""),
        (range(3, 18), ""),
        (range(17, 20), "\nnote: out/trace.json ends with step 17: the steps of --trace are 17-19"),
        (range(40, 42), "\nnote: out/trace.json is not there: the steps of --trace are 40-41"),
    ],
)
def test_a_run_that_stops_ahead_of_its_trace_says_so(asked: range, said: str) -> None:
    assert _what_is_not_traced(Stop(17, None), asked, Path("out")) == said


def test_progress_says_what_a_person_looks_for() -> None:
    row = {"loss": 2.5, "tokens_per_s": 12_345.6, "mfu_full": 0.61, "mfu_causal": 0.58, "exposed_comm": 0.012}
    words = words_of(Progress("training", 3, 10, {**row, "memory_gib": 40.25}))
    assert words == "step 3/10, loss 2.500, 12,346 tokens/s, MFU 0.610 full, 0.580 causal, exposed 1.2%, 40.2 GiB"
    assert words_of(Progress("validating", 3, 10, {"validation_loss": 1.25})) == "step 3/10, held-out loss 1.250"
    assert words_of(Progress("warning", 3, 10, {}, warning="no room")) == "warning: no room"
    held_out = Progress("validating", 3, 10, {"validation_loss": 1.25}, 90)
    assert words_of(held_out) == "step 3/10, held-out loss 1.250, 2 min left"


@pytest.mark.parametrize(
    ("seconds", "said"), [(8.4, "8 s"), (600, "10 min"), (3600 * 3 + 1200, "3 h 20 min"), (3600 * 100, "4 d 4 h")]
)
def test_the_time_that_is_left_is_two_words_at_most(seconds: float, said: str) -> None:
    assert short_time(seconds) == said
