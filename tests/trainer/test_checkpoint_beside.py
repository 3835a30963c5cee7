"""Checkpoints beside the training: the same as those that it waits for; writers and ranks killed in every phase."""

from __future__ import annotations

import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from netlayer.config.tree import EvaluationConfig, JobConfig
from netlayer.errors import CheckFailed, ConfigError, RankFailed
from netlayer.launch.launcher import launch
from netlayer.store.meeting import meeting_place
from tests.trainer import targets
from trainer.between_steps import BetweenSteps
from trainer.checkpoint import writer_process
from trainer.checkpoint.meta import find
from trainer.checkpoint.names import checkpoints_in, pending_in
from trainer.checkpoint.reader import open_checkpoint
from trainer.checkpoint.save import Saver
from trainer.checkpoint.storage import LocalStorage
from trainer.checkpoint.writer import KILL, SLOW, Aborted, Write, run_command
from trainer.checkpoint.writer_process import WriterProcess
from trainer.data.prepare import Corpus
from trainer.loop import RankInfo, Row, Trainer, run
from trainer.plan import Plan

from .conftest import tiny_job

ALONE = RankInfo(0, 1, torch.device("cpu"))
STEPS = 9


def job_of(text_folder: Path, ranks: int = 1, *, waits: bool = False, **checkpoint: object) -> JobConfig:
    """Saves at steps 3 and 6, and after the last."""
    keys = {"every_steps": 3, "keep": 3, "asynchronous": not waits, **checkpoint}
    return tiny_job(text_folder, ranks, optimizer={"steps": STEPS}, checkpoint=keys)


def train(
    job: JobConfig, corpus: Corpus, out: Path | str, resume: Path | None = None, *, warnings: list[str] | None = None
) -> tuple[list[Row], list[str]]:
    """Return the rows, and what was said to the user, which `warnings` gets as it comes."""
    trainer = Trainer(job, corpus, 0, ALONE)
    if resume:
        trainer.resume(find(resume))
    rows, warnings = list[Row](), list[str]() if warnings is None else warnings
    try:
        run(trainer, EvaluationConfig(), rows.append, lambda _row: None, out, on_warning=warnings.append)
    finally:
        trainer.close()
    return rows, warnings


def losses(rows: list[Row]) -> list[float]:
    return [row["loss"] for row in rows]


def same(one: Path, other: Path) -> bool:
    with open_checkpoint(one) as first, open_checkpoint(other) as second:
        assert first.names() == second.names()
        return all(torch.equal(first.read(name), second.read(name)) for name in first.names())


@pytest.fixture(scope="module")
def whole(text_folder: Path, corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Path]:
    """Losses of an unbroken run, and its checkpoints, for which it waited."""
    folder = tmp_path_factory.mktemp("whole")
    return losses(train(job_of(text_folder, waits=True), corpus, folder)[0]), folder


Whole = tuple[list[float], Path]


def test_it_is_what_a_save_that_waits_would_have_written(
    text_folder: Path, corpus: Corpus, tmp_path: Path, whole: Whole
) -> None:
    rows, _ = train(job_of(text_folder), corpus, tmp_path)
    assert losses(rows) == whole[0]
    assert [path.name for path in checkpoints_in(tmp_path)] == ["step-000003", "step-000006", "step-000009"]
    assert all(same(path, whole[1] / path.name) for path in checkpoints_in(tmp_path))
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []
    assert [row["step"] for row in rows if row["checkpoint_stall_s"]] == [3, 6, 9]
    assert [row["step"] for row in rows if row["checkpoint_s"]] == [9]  # which nothing could run beside
    assert sum(row["checkpoint_save_s"] > 0 for row in rows) == 2
    assert losses(train(job_of(text_folder), corpus, tmp_path / "again", tmp_path / "step-000006")[0]) == whole[0][6:]


def test_a_save_waits_for_the_one_before_and_says_so(
    text_folder: Path, corpus: Corpus, tmp_path: Path, whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Storage that is slower than the steps: every checkpoint is of the step that was asked for, and none is lost."""
    monkeypatch.setenv(SLOW, "0.004")
    rows, warnings = train(job_of(text_folder, keep=9, every_steps=2), corpus, tmp_path)
    assert losses(rows) == whole[0]
    assert [int(path.name[-1]) for path in checkpoints_in(tmp_path)] == [2, 4, 6, 8, 9]
    waited = [line for line in warnings if "training waited" in line]
    assert waited
    assert all(
        "storage had not finished the checkpoint before it; raise job.checkpoint.every_steps" in w for w in waited
    )
    stalled = {row["step"]: row["checkpoint_stall_s"] for row in rows}
    assert max(stalled.values()) > stalled[2]


def test_a_save_is_skipped_where_storage_is_busy_but_one_that_stays_for_ever(
    text_folder: Path, corpus: Corpus, tmp_path: Path, whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first save lasts as long as the run waits for none: those of steps 2 and 3 are left out, 4 is waited for."""
    monkeypatch.setenv(SLOW, "0.01")
    job = job_of(text_folder, keep=9, every_steps=1, keep_every_steps=4, when_busy="skip")
    rows, warnings = train(job, corpus, tmp_path)
    assert losses(rows) == whole[0]
    there = [int(path.name[-1]) for path in checkpoints_in(tmp_path)]
    assert there[0] == 1
    assert {4, 8, 9} <= set(there)
    assert len(there) + sum(row["checkpoint_skipped"] for row in rows) == 9
    assert [line for line in warnings if "no checkpoint, storage has not finished" in line] == [
        line for line in warnings if line.startswith("step 2: no checkpoint")
    ]
    assert all(line.startswith(("step 4:", "step 8:")) for line in warnings if "training waited" in line)


@pytest.mark.parametrize(("is_copying", "waits", "skipped"), [(False, False, 1), (True, True, 0)])
def test_a_copy_in_memory_under_way_skips_no_checkpoint(
    is_copying: bool, waits: bool, skipped: int, text_folder: Path, tmp_path: Path
) -> None:
    """Copies for other machines may come so often that storage would never have its turn."""
    job = job_of(text_folder, when_busy="skip")
    state = {"is_saving": True, "is_copying": is_copying, "saves_beside": True, "copies_beside": False}
    trainer: Any = SimpleNamespace(job=job, outcomes=list, **state)
    warnings: list[str] = []
    between = BetweenSteps(trainer, EvaluationConfig(), lambda _row: None, tmp_path, warnings.append)
    assert between.start_save(3) == waits
    row: Row = {"checkpoint_skipped": 0}
    between.note_saves(row)
    assert (row["checkpoint_skipped"], len(warnings)) == (skipped, skipped)


def test_checkpoints_of_every_so_many_steps_stay(text_folder: Path, corpus: Corpus, tmp_path: Path) -> None:
    train(job_of(text_folder, keep=1, every_steps=1, keep_every_steps=4), corpus, tmp_path)
    assert [int(path.name[-1]) for path in checkpoints_in(tmp_path)] == [4, 8, 9]


def test_parameters_that_break_leave_what_was_sound(
    text_folder: Path, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Step 6 breaks them: the snapshot behind it is given up, and the one of step 3 is finished."""
    monkeypatch.setattr("trainer.loop.learning_rate", lambda _config, step: 1e30 if step == 6 else 1e-3)
    monkeypatch.setenv(SLOW, "0.01")
    with pytest.raises(CheckFailed, match="step 7: the loss is nan"):
        train(job_of(text_folder), corpus, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000003"]


def test_a_moment_that_is_no_number_ends_the_run(
    text_folder: Path, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(job_of(text_folder), corpus, 0, ALONE)
    begin = Saver.begin

    def spoil(saver: Saver, step: int, seed: int, data: Any, **where: bool) -> None:
        # A first moment of one element: the step after it is finite, for it is clipped and small.
        trainer.optimizer.each[0].state[trainer.model.slots[0].piece]["exp_avg_sq"][3] = float("inf")
        begin(saver, step, seed, data, **where)

    monkeypatch.setattr(Saver, "begin", spoil)
    with pytest.raises(
        CheckFailed, match=r"step 3: parameters or moments .* not finite in the shard of rank 0 \(tp=0,"
    ):
        run(trainer, EvaluationConfig(), lambda _row: None, lambda _row: None, tmp_path)
    assert not list(tmp_path.iterdir())


def go_on(text_folder: Path, corpus: Corpus, out: Path, whole: Whole) -> None:
    """Everything that is there is whole, and the newest gives the losses of the unbroken run."""
    for path in [*checkpoints_in(out), *pending_in(out)]:
        assert same(path, whole[1] / path.name.removesuffix(".new"))
    resume = out if checkpoints_in(out) else None
    done = find(out).step if resume else 0
    assert losses(train(job_of(text_folder), corpus, out, resume)[0]) == whole[0][done:]
    assert [path.name for path in out.iterdir() if path.name.startswith(".") or path.name.endswith(".new")] == []


# The moments of a save: 2 of prepare, 87 of write (84 items), 4 of publish.
PHASES = ["prepare:1", "prepare:4", "write:1", "write:40", "write:88", "write:130", "publish:1", "publish:6"]


# CI has one moment of each phase.
@pytest.mark.parametrize(
    "moment",
    [
        pytest.param(each, marks=[pytest.mark.slow] * (each not in ("prepare:1", "write:40", "publish:6")))
        for each in PHASES
    ],
)
def test_a_writer_that_is_killed_costs_its_checkpoint_and_no_step(
    text_folder: Path, corpus: Corpus, tmp_path: Path, whole: Whole, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    monkeypatch.setenv(KILL, moment)
    try:
        rows, warnings = train(job_of(text_folder), corpus, tmp_path)
        assert losses(rows) == whole[0]
        assert any("its writer has ended with signal 9" in line for line in warnings)
        assert sum(row["checkpoint_failures"] for row in rows) == len([w for w in warnings if "no checkpoint" in w])
    except ConfigError as exc:  # the last one fails too, and nothing follows it
        assert "its writer has ended with signal 9" in str(exc)  # noqa: PT017
    monkeypatch.delenv(KILL)
    go_on(text_folder, corpus, tmp_path, whole)


@pytest.mark.slow(minutes=5)
def test_writers_that_are_killed_two_hundred_times(
    text_folder: Path, corpus: Corpus, tmp_path: Path, whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each save of which nobody says that it failed is there; what is there is whole, whenever the writer died."""
    draw = random.Random(7)
    usual, failed = writer_process._PROGRAM, 0
    for number in range(200):
        monkeypatch.setattr(writer_process, "_PROGRAM", targets.SMALL_BUFFERS if number % 2 else usual)
        moments = [("prepare", 6), ("write", 261), ("piece", 780), ("publish", 12), ("commit", 3)]
        phase, most = draw.choice(moments)
        monkeypatch.setenv(KILL, f"{phase}:{draw.randint(1, most)}")
        out, warnings = tmp_path / str(number), list[str]()
        try:
            train(job_of(text_folder), corpus, out, warnings=warnings)
        except ConfigError as exc:
            assert "its writer has ended with signal 9" in str(exc)  # noqa: PT017
            warnings.append(f"no checkpoint of step {STEPS}, ")
        lost = {step for step in (3, 6, STEPS) if any(f"no checkpoint of step {step}," in line for line in warnings)}
        failed += len(lost)
        assert {3, 6, STEPS} - lost <= {find(path).step for path in checkpoints_in(out)}
        for path in [*checkpoints_in(out), *pending_in(out)]:
            assert same(path, whole[1] / path.name.removesuffix(".new"))
        if number % 20 == 0:
            monkeypatch.delenv(KILL)
            go_on(text_folder, corpus, out, whole)
    assert failed > 100


def killed_run(text_folder: Path, corpus: Corpus, out: Path, moment: str, has_small_buffers: bool = False) -> None:
    plan = Plan(job_of(text_folder), corpus, "", "gloo", out, 0)
    with meeting_place() as place:
        arguments = (plan, place.init_method(moment), moment, has_small_buffers)
        with pytest.raises(RankFailed):
            launch(targets.killed, 1, args=arguments, log_dir=out.parent / "logs")


def test_a_rank_that_is_killed_in_a_write_leaves_the_newest_whole_one(
    text_folder: Path, corpus: Corpus, tmp_path: Path, whole: Whole
) -> None:
    """Between two writes of the second save, whose file is on the disk in part."""
    killed_run(text_folder, corpus, tmp_path / "out", "piece:400:rank", has_small_buffers=True)
    assert find(tmp_path / "out").step == 3
    [half] = (tmp_path / "out").glob(".step-000006.*/*.distcp")
    assert half.stat().st_size > 8192
    go_on(text_folder, corpus, tmp_path / "out", whole)


@pytest.mark.slow(minutes=6)
def test_runs_that_are_killed_at_any_moment(text_folder: Path, corpus: Corpus, tmp_path: Path, whole: Whole) -> None:
    draw = random.Random(3)
    for number in range(20):
        phase, most = draw.choice([("prepare", 6), ("write", 261), ("piece", 780), ("publish", 12)])
        out = tmp_path / str(number) / "out"
        killed_run(text_folder, corpus, out, f"{phase}:{draw.randint(1, most)}:rank", bool(number % 2))
        out.mkdir(exist_ok=True)
        go_on(text_folder, corpus, out, whole)


def writers(parent: int) -> list[psutil.Process]:
    return [p for p in psutil.Process(parent).children() if "trainer.checkpoint.writer" in " ".join(p.cmdline())]


def test_a_writer_answers_no_signal_and_ends_with_its_rank(
    text_folder: Path, corpus: Corpus, tmp_path: Path, whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids: set[int] = set()
    launch_it = WriterProcess.start

    def signalled(process: WriterProcess, command: object, location: str) -> None:
        for each in writers(os.getpid()):
            pids.add(each.pid)
            for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
                each.send_signal(signum)
        launch_it(process, command, location)  # type: ignore[arg-type]

    monkeypatch.setattr(WriterProcess, "start", signalled)
    rows, _ = train(job_of(text_folder), corpus, tmp_path)
    assert losses(rows) == whole[0]
    assert len(pids) == 1
    assert not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize("waits", [False, True])
def test_a_save_that_training_waits_for_has_no_limit(
    waits: bool, text_folder: Path, corpus: Corpus, tmp_path: Path, whole: Whole
) -> None:
    """At the limit, of a byte a second, the first one alone would take more than a day."""
    rows, _ = train(job_of(text_folder, waits=waits, write_gbps=1e-9), corpus, tmp_path)
    assert losses(rows) == whole[0]
    assert same(tmp_path / "step-000009", whole[1] / "step-000009")


def test_a_save_is_given_up_within_an_item(tmp_path: Path) -> None:
    disk, phases = LocalStorage(tmp_path), list[str]()
    disk.create("part", 0)

    def check(phase: str) -> None:
        phases.append(phase)
        if phases.count("piece") == 2:
            raise Aborted

    with pytest.raises(Aborted):
        run_command(disk, Write("part", "file"), lambda: [[bytes(9)] * 5], check)
    assert phases == ["write", "piece", "piece"]
    assert not list((tmp_path / "part").iterdir())


def test_a_writer_is_gone_where_its_rank_was_killed(tmp_path: Path) -> None:
    program = f"""
import os, signal
from tests.trainer.killed_saves import build
from trainer.checkpoint.save import open_saver
model, optimizers = build()
saver, _ = open_saver(model, optimizers, {str(tmp_path)!r}, None, beside=True)
print(saver._writer._process.pid, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    pid, end_s = int(done.stdout), time.monotonic() + 60
    while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < end_s
        time.sleep(0.05)


def test_a_disk_that_is_full_costs_a_checkpoint_and_no_step(
    text_folder: Path, corpus: Corpus, tmp_path: Path, whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A limit on the size of the writer's files stands for the disk: it is lifted after the first save."""
    limited: list[int] = []
    before = WriterProcess._launch

    def launch_limited(process: WriterProcess) -> None:
        before(process)
        assert process._process is not None
        psutil.Process(process._process.pid).rlimit(psutil.RLIMIT_FSIZE, (40_000, -1))
        limited.append(process._process.pid)

    def lift(line: str) -> None:
        warnings.append(line)
        if "no checkpoint" in line:
            psutil.Process(limited[0]).rlimit(psutil.RLIMIT_FSIZE, (-1, -1))

    monkeypatch.setattr(WriterProcess, "_launch", launch_limited)
    trainer, rows, warnings = Trainer(job_of(text_folder), corpus, 0, ALONE), list[Row](), list[str]()
    run(trainer, EvaluationConfig(), rows.append, lambda _row: None, tmp_path, on_warning=lift)
    trainer.close()
    assert losses(rows) == whole[0]
    assert sum(row["checkpoint_failures"] for row in rows) == 1
    [line] = [line for line in warnings if "no checkpoint" in line]
    assert f"no checkpoint of step 3, training goes on: --out = {tmp_path}/step-000003: cannot be written" in line
    assert os.strerror(errno.EFBIG) in line
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000006", "step-000009"]


def test_a_folder_that_vanishes_costs_its_checkpoint(
    text_folder: Path, corpus: Corpus, tmp_path: Path, whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(SLOW, "0.005")
    out, gone = tmp_path / "out", list[int]()

    def remove(row: Row) -> None:
        rows.append(row)
        if row["step"] == 4 and not gone:
            shutil.rmtree(out)
            gone.append(4)

    trainer, rows, warnings = Trainer(job_of(text_folder), corpus, 0, ALONE), list[Row](), list[str]()
    run(trainer, EvaluationConfig(), remove, lambda _row: None, out, on_warning=warnings.append)
    trainer.close()
    assert losses(rows) == whole[0]
    assert any("no checkpoint of step 3, training goes on" in line for line in warnings)
    assert all(same(path, whole[1] / path.name) for path in checkpoints_in(out))
    assert find(out).step == STEPS


def test_ranks_write_their_own_shards_and_read_what_they_share_once(
    text_folder: Path, corpus: Corpus, tmp_path: Path
) -> None:
    """Two data-parallel ranks save beside the training; they resume from it, and so does one that is alone."""
    plan = Plan(job_of(text_folder, 2), corpus, "", "gloo", tmp_path, 0)
    with meeting_place() as place:
        results = launch(
            targets.saved_and_restored, 2, args=(plan, place.init_method("two")), log_dir=tmp_path / "logs"
        )
    first, second = results
    assert first.losses == second.losses
    assert first.again == first.losses[6:]
    folder = tmp_path / "checkpoints" / "step-000006"
    assert sorted(path.name for path in folder.glob("*.distcp")) == ["__0_0.distcp", "__1_0.distcp"]
    with open_checkpoint(folder) as checkpoint:
        assert not any(damage for _, damage in checkpoint.verify())
        parameters = sum(checkpoint.read(name).nbytes for name in checkpoint.parameters())
        overhead = 2000 * 4 * len(checkpoint.parameters())  # what is around each box, of which a shard's end is a few
    for restored in (first.restored, second.restored):
        assert parameters < restored.parameters < parameters + overhead  # once, and not once a rank
        assert 2 * parameters < restored.moments < 2 * parameters + 2 * overhead
    alone = tiny_job(text_folder, optimizer={"steps": STEPS}, checkpoint={"every_steps": 3})
    rows, _ = train(alone, corpus, tmp_path / "alone", folder)
    assert losses(rows) == pytest.approx(first.losses[6:], abs=1e-5)


def test_a_host_without_room_for_snapshots_saves_while_training_waits(
    text_folder: Path, corpus: Corpus, tmp_path: Path, whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("netlayer.environ.available_memory_bytes", lambda: 1000)
    rows, [line] = train(job_of(text_folder), corpus, tmp_path)
    assert line.startswith("checkpoints are written while training waits: the host has no room for snapshots (4")
    assert "on rank 0: 1000 B are free" in line
    assert losses(rows) == whole[0]
    assert [row["step"] for row in rows if row["checkpoint_s"]] == [3, 6, 9]
    assert [path.name for path in checkpoints_in(tmp_path)] == ["step-000003", "step-000006", "step-000009"]


def test_parameters_alone_begin_with_the_first_step(text_folder: Path, corpus: Corpus, whole: Whole) -> None:
    trainer = Trainer(job_of(text_folder), corpus, 0, ALONE)
    trainer.resume(find(whole[1] / "step-000006"), model_only=True)
    assert trainer.steps_done == 0
    assert not any(optimizer.state for optimizer in trainer.optimizer.each)
    with open_checkpoint(whole[1] / "step-000006") as checkpoint:
        for name, value in trainer.model.chunks[0].full_state_dict().items():
            assert torch.equal(value, checkpoint.read(name))
    assert trainer.step(1)["loss"] < whole[0][0]


def test_a_writer_that_does_not_end_is_killed_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writer_process, "_ENDS_S", 0.1)
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    ours, theirs = Pipe()
    try:
        writer_process._end_process(process, ours)
        assert process.returncode == -signal.SIGKILL
        assert ours.closed
    finally:
        process.kill()
        process.wait()
        theirs.close()
