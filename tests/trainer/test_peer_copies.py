"""Copies of a run's state in the memory of its machines: what they cost, what is left of them, who resumes there."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from netlayer.config.tree import EvaluationConfig, JobConfig
from netlayer.errors import ConfigError, RankFailed
from netlayer.launch.launcher import launch
from netlayer.store.meeting import meeting_place
from tests.trainer import targets
from tests.trainer.test_checkpoint_beside import losses, same
from trainer.checkpoint.meta import find
from trainer.checkpoint.names import as_location, checkpoints_in
from trainer.checkpoint.resume import AUTO, Start, start_of
from trainer.checkpoint.writer import KILL
from trainer.data.prepare import Corpus
from trainer.loop import RankInfo, Row, Trainer, run
from trainer.peer_copy.client import StoreClient
from trainer.peer_copy.hosts import NODE, location_of, run_token, stop_store, store_urls
from trainer.peer_copy.store import MEMORY_NAME
from trainer.plan import Plan

from .conftest import tiny_job

ALONE = RankInfo(0, 1, torch.device("cpu"))
# Of processes that are there to be waited for; a busy host takes long, and what never comes ends with the test's limit.
WAIT_S = 900
STEPS = 90


def job_of(text_folder: Path, ranks: int = 1, **checkpoint: object) -> JobConfig:
    """Saves at steps 40 and 80 and after the last, and copies at every tenth step."""
    keys = {"every_steps": 40, "peer_copies": 1, "peer_interval": 10, "peer_keep": 2, **checkpoint}
    return tiny_job(text_folder, ranks, optimizer={"steps": STEPS}, checkpoint=keys)


def train(
    job: JobConfig,
    corpus: Corpus,
    out: Path,
    start: Start | None = None,
    *,
    fails_after: int = 0,
    act: Callable[[int], None] = lambda _step: None,
) -> tuple[list[Row], list[str]]:
    """Return the rows, and what was said to the user; copies stay where it fails after a step.

    Steps wait for the writer, so that ten of them are enough for a copy, and not for one and a checkpoint.
    """
    trainer = Trainer(job, corpus, 0, ALONE)
    if start and start.meta:
        trainer.resume(start.meta)
    rows, warnings = list[Row](), list[str]()

    def add(row: Row) -> None:
        rows.append(row)
        end_s = time.monotonic() + WAIT_S
        while trainer.is_saving and not any(trainer._saver.own_state()[:2]):  # type: ignore[union-attr]
            assert time.monotonic() < end_s
            time.sleep(0.001)
        act(row["step"])
        if row["step"] == fails_after:
            raise KeyboardInterrupt

    with contextlib.suppress(KeyboardInterrupt):
        run(
            trainer,
            EvaluationConfig(),
            add,
            lambda _row: None,
            out / "checkpoints",
            on_warning=warnings.append,
            out=out,
        )
        trainer.close()
        return rows, warnings
    assert trainer._saver is not None
    trainer._saver.close()
    return rows, warnings


def wait_until_gone(pid: int) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        psutil.Process(pid).wait(WAIT_S)


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run's folder, on the machine `a`; its stores are ended, whatever the test did."""
    monkeypatch.setenv(NODE, "a")
    folder = tmp_path / "out"
    folder.mkdir()
    yield folder
    for machine in store_urls(folder):
        pid = targets.store_pid(folder, machine)
        if stop_store(folder, machine):
            wait_until_gone(pid)


@pytest.fixture(scope="module")
def whole(text_folder: Path, corpus: Corpus, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Path]:
    """Losses of an unbroken run, and its folder, with its checkpoints."""
    folder = tmp_path_factory.mktemp("whole")
    keys = {"every_steps": 10, "keep": STEPS, "peer_copies": 0, "asynchronous": False}
    return losses(train(job_of(text_folder, **keys), corpus, folder)[0]), folder


Whole = tuple[list[float], Path]


def copies_of(out: Path) -> list[Path]:
    root: Any = as_location(location_of(out))
    root.fs.invalidate_cache()  # listings are two seconds old at most, and saves of these tests quicker
    return checkpoints_in(root)


def names(out: Path) -> list[str]:
    return [path.name for path in copies_of(out)]


def test_a_run_resumes_from_the_copy_that_is_newer_than_storage(
    text_folder: Path, corpus: Corpus, out: Path, whole: Whole
) -> None:
    rows, warnings = train(job_of(text_folder), corpus, out, fails_after=79)
    assert [path.name for path in checkpoints_in(out / "checkpoints")] == ["step-000040"]
    assert names(out) == ["step-000060", "step-000070"]
    assert all(same(path, whole[1] / "checkpoints" / path.name) for path in copies_of(out))
    assert warnings[0].startswith("job.checkpoint.peer_copies: all ranks are on one machine; a copy in its memory out")
    assert {row["step"] for row in rows if row["peer_stall_s"]} - {50} == {10, 20, 30, 60, 70}
    assert [row["step"] for row in rows if row["checkpoint_stall_s"]] == [40]
    assert sum(row["peer_save_s"] > 0 for row in rows) + sum(row["peer_skipped"] for row in rows) == 7
    assert sum(row["checkpoint_save_s"] > 0 for row in rows) == 1
    start = start_of(AUTO, out, {})
    assert start.meta is not None
    assert start.meta.step == 70
    assert "note: step-000070 is in the memory of a; the newest in storage: step 40" in start.notes
    pid = targets.store_pid(out, "a")
    # From the older one, so that step 70 is taken again: its copy is none of this run any more.
    there: dict[int, list[str]] = {}
    older = Start(find(copies_of(out)[0]), continues=True)
    again, _ = train(job_of(text_folder), corpus, out, older, act=lambda step: there.update({step: names(out)}))
    assert losses(again) == whole[0][60:]
    assert there[61] == ["step-000060"]
    assert find(out).step == STEPS
    wait_until_gone(pid)  # for the run has ended well
    assert copies_of(out) == []


def test_a_damaged_copy_is_named_and_the_older_one_taken(
    text_folder: Path, corpus: Corpus, out: Path, whole: Whole
) -> None:
    train(job_of(text_folder), corpus, out, fails_after=39)
    assert names(out) == ["step-000020", "step-000030"]
    newest = copies_of(out)[-1]
    damage(targets.store_pid(out, "a"), newest / "__0_0.distcp")
    start = start_of(AUTO, out, {})
    assert start.meta is not None
    assert start.meta.path.name == "step-000020"
    assert "note: step-000030/__0_0.distcp in the memory of a was damaged, and is no longer used" in start.notes
    assert any("step-000030 is newer, and was passed over: it lacks __0_0.distcp" in note for note in start.notes)
    again, _ = train(job_of(text_folder), corpus, out, start)
    assert losses(again) == whole[0][20:]


def damage(pid: int, path: Path) -> None:
    """Flip a bit of a file in the memory of a store, as no program but this one would."""
    content, count = path.read_bytes(), 0
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if MEMORY_NAME in str(link.readlink()) and link.read_bytes() == content:
                with link.open("r+b") as file:
                    file.seek(len(content) // 2)
                    file.write(bytes([content[len(content) // 2] ^ 16]))
                count += 1
    assert count == 1


@pytest.mark.slow(minutes=2)
def test_a_store_that_is_full_or_killed_costs_its_copy_and_no_step(
    text_folder: Path, corpus: Corpus, out: Path, whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The limit is lowered before the second copy, and the store killed before the fourth: the others are there."""
    events: dict[int, str] = {19: "full", 29: "room", 39: "kill"}

    def act(step: int) -> None:
        event, store = events.pop(step, ""), StoreClient(store_urls(out)["a"], run_token(out))
        if event == "kill":
            pid = targets.store_pid(out, "a")
            os.kill(pid, signal.SIGKILL)
            wait_until_gone(pid)
        elif event:
            store.set_limit(1000 if event == "full" else 1 << 30)

    rows, warnings = train(job_of(text_folder, every_steps=0), corpus, out, fails_after=69, act=act)
    assert losses(rows) == whole[0][:69]
    failures = [line for line in warnings if line.startswith("no peer copy of step")]
    full, gone = failures
    assert full.startswith("no peer copy of step 20, training goes on: job.checkpoint.peer_copies = 1: cannot be kept:")
    assert "the memory of a is full: 0 bytes of its limit are left (rank 0)" in full
    assert gone.startswith("no peer copy of step 40, training goes on:")
    assert "the store of a is gone" in gone
    assert [row["peer_failures"] for row in rows].count(1) == 2
    assert names(out) == ["step-000050", "step-000060"]  # in a store that was started anew
    assert not any(row["checkpoint_failures"] for row in rows)


def test_a_limit_that_cannot_hold_the_copies_is_refused(text_folder: Path, corpus: Corpus, out: Path) -> None:
    with pytest.raises(ConfigError, match=r"is less than the .* of the copies on a \(peer_keep = 2\)"):
        train(job_of(text_folder, peer_memory_gib=0.001), corpus, out)
    with pytest.raises(ConfigError, match="has no effect, for peer_interval and every_steps are 0"):
        job_of(text_folder, every_steps=0, peer_interval=0)


def launched(plan: Plan, name: str, lost_after: int = 0, *, has_unbroken: bool = True) -> list[targets.Copied]:
    with meeting_place() as place:
        arguments = plan, place.init_method(name), lost_after, has_unbroken
        return launch(targets.copied, 2, args=arguments, log_dir=plan.out.parent / "logs")


def test_a_machine_that_is_lost_with_its_memory_costs_what_came_after_the_last_copy(
    text_folder: Path, corpus: Corpus, out: Path
) -> None:
    """Nothing was in storage: the run resumes from what the other machine holds of both."""
    plan = Plan(job_of(text_folder, 2, every_steps=0), corpus, "", "gloo", out, 0)
    with pytest.raises(RankFailed):
        launched(plan, "lost", lost_after=39)
    assert not (out / "checkpoints").exists()
    wait_until_gone(targets.store_pid(out, "node-1"))
    left = targets.store_pid(out, "node-0")
    first, second = launched(plan, "again")
    assert (first.step, second.step) == (30, 30)
    assert "note: step-000030 is in the memory of node-0; the newest in storage: none" in first.notes
    assert first.losses == second.losses == first.unbroken[30:]
    [line] = first.warnings
    assert (
        line == "job.checkpoint.peer_copies: node-0 and node-1 are one machine; copies of one another do not outlive it"
    )
    wait_until_gone(left)
    assert store_urls(out) == {}


@pytest.mark.slow(minutes=4)
def test_writers_that_are_killed_in_mid_upload(
    text_folder: Path, corpus: Corpus, tmp_path: Path, whole: Whole, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Thirty times at any moment: copies are whole or not there, and a store holds no byte of a half."""
    monkeypatch.setenv(NODE, "a")
    draw = random.Random(5)
    for number in range(30):
        phase, most = draw.choice([("prepare", 6), ("write", 261), ("publish", 12)])
        monkeypatch.setenv(KILL, f"{phase}:{draw.randint(1, most)}")
        out = tmp_path / str(number)
        out.mkdir()
        rows, warnings = train(job_of(text_folder, every_steps=0), corpus, out, fails_after=59)
        monkeypatch.delenv(KILL)
        assert losses(rows) == whole[0][:59]
        assert any("its writer has ended with signal 9" in line for line in warnings)
        store = StoreClient(store_urls(out)["a"], run_token(out))
        end_s = time.monotonic() + WAIT_S
        while (state := store.listing())["limit_bytes"] - state["free_bytes"] != sum(state["files"].values()):
            assert time.monotonic() < end_s
        for path in copies_of(out):
            assert same(path, whole[1] / "checkpoints" / path.name)
        start = start_of(AUTO, out, {})
        done = start.meta.step if start.meta else 0
        pid = targets.store_pid(out, "a")
        if number % 5 == 0:
            assert losses(train(job_of(text_folder, every_steps=0), corpus, out, start)[0]) == whole[0][done:]
        else:
            assert stop_store(out, "a")
        wait_until_gone(pid)


@pytest.mark.slow(minutes=4)
def test_machines_that_are_lost_at_any_step(text_folder: Path, corpus: Corpus, tmp_path: Path) -> None:
    draw = random.Random(11)
    unbroken: list[float] = []  # the same for all: of the first launch that goes on
    for number in range(4):
        out = tmp_path / str(number) / "out"
        out.mkdir(parents=True)
        plan = Plan(job_of(text_folder, 2, every_steps=0), corpus, "", "gloo", out, 0)
        lost_after = draw.randint(20, 80)
        with pytest.raises(RankFailed):
            launched(plan, f"lost{number}", lost_after)
        store = targets.store_pid(out, "node-0")  # the other was killed
        first, _ = launched(plan, f"again{number}", has_unbroken=not unbroken)
        unbroken = unbroken or first.unbroken
        assert len(unbroken) == STEPS
        assert lost_after - 20 <= first.step < lost_after
        assert first.losses == unbroken[first.step :]
        wait_until_gone(store)
        assert store_urls(out) == {}
