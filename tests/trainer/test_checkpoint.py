"""Checkpoints: the same losses to the bit after a restart, in another layout but for rounding; none half-written."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from collectives.sharded.state import gather_whole
from netlayer.config.tree import EvaluationConfig, JobConfig, build_config
from netlayer.errors import ConfigError
from netlayer.launch.launcher import launch
from netlayer.store.meeting import meeting_place
from tests.forked import run_module
from tests.trainer import layout_ranks, targets
from tests.trainer.test_layouts import LLAMA, job_of
from trainer.checkpoint.distcp import Extent, ItemWriter
from trainer.checkpoint.meta import Meta, check_model, find, resume_notes, seed_of
from trainer.checkpoint.names import FORMAT, sealed
from trainer.checkpoint.save import NoRoom, Saver
from trainer.checkpoint.storage import LocalStorage
from trainer.checkpoint.writer import Pieces
from trainer.data.prepare import Corpus
from trainer.loop import RankInfo, Trainer, run
from trainer.parallel import ParallelModel
from trainer.plan import Plan, prepare
from trainer.sample import model_of

from .conftest import tiny_job

ALONE = RankInfo(0, 1, torch.device("cpu"))


def train(job: JobConfig, corpus: Corpus, out: Path, resume: Path | None = None, seed: int = 0) -> list[float]:
    trainer = Trainer(job, corpus, seed, ALONE)
    if resume:
        trainer.resume(find(resume))
    losses: list[float] = []
    run(trainer, EvaluationConfig(), lambda row: losses.append(row["loss"]), lambda _row: None, out)
    return losses


def job_for(text_folder: Path, steps: int = 8, **model: object) -> JobConfig:
    """Its checkpoints are written while the training waits, by this process."""
    checkpoint = {"every_steps": 3, "keep": 2, "asynchronous": False}
    return tiny_job(text_folder, optimizer={"steps": steps}, checkpoint=checkpoint, model=model)


def test_losses_after_a_restart_are_the_same_to_the_bit(text_folder: Path, corpus: Corpus, tmp_path: Path) -> None:
    job = job_for(text_folder)
    whole = train(job, corpus, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000006", "step-000008"]
    # Another seed: the checkpoint's own goes before it.
    assert train(job, corpus, tmp_path / "again", tmp_path / "step-000006", seed=5) == whole[6:]


def test_a_run_is_gone_on_from_its_newest_checkpoint(text_folder: Path, corpus: Corpus, tmp_path: Path) -> None:
    train(job_for(text_folder), corpus, tmp_path / "checkpoints")
    (tmp_path / "checkpoints" / ".step-000009.part").mkdir()  # a run that was killed while it wrote
    assert find(tmp_path).step == 8
    assert find(tmp_path / "checkpoints").path.name == "step-000008"


def test_bfloat16_goes_on_with_its_masters(text_folder: Path, corpus: Corpus, tmp_path: Path) -> None:
    job = job_for(text_folder, dtype="bfloat16")
    whole = train(job, corpus, tmp_path)
    assert train(job, corpus, tmp_path / "again", tmp_path / "step-000006") == whole[6:]


def test_what_is_no_checkpoint_or_is_damaged_is_one_line(text_folder: Path, corpus: Corpus, tmp_path: Path) -> None:
    job = job_for(text_folder, steps=3)
    train(job, corpus, tmp_path)
    with pytest.raises(ConfigError, match="holds no checkpoint"):
        find(tmp_path / "nowhere")
    other = job_for(text_folder, steps=3, hidden=64)
    with pytest.raises(ConfigError, match="is of a model with hidden = 32, and the job has 64"):
        train(other, corpus, tmp_path, tmp_path)
    file = tmp_path / "step-000003" / "__0_0.distcp"
    file.write_bytes(file.read_bytes()[:5000])
    with pytest.raises(ConfigError, match=r"__0_0\.distcp: is damaged"):
        train(job, corpus, tmp_path, tmp_path)
    file.unlink()
    with pytest.raises(ConfigError, match=r"lacks __0_0\.distcp"):
        find(tmp_path)
    (tmp_path / "step-000003" / "meta.json").write_bytes(b"\xb8" * 100_000)
    with pytest.raises(ConfigError, match=r"meta\.json: is damaged \(no UTF-8 at byte 0\); give an older"):
        find(tmp_path)
    (tmp_path / "step-000003" / "meta.json").write_text(json.dumps({"format": FORMAT}))
    with pytest.raises(ConfigError, match=r"meta\.json: is damaged"):
        find(tmp_path)


@pytest.mark.parametrize(
    ("file", "place"),
    [("__0_0.distcp", 200), ("__0_0.distcp", -200), ("tokenizer.json", 50), ("meta.json", 50)],
)
def test_a_flipped_bit_is_noticed(text_folder: Path, corpus: Corpus, tmp_path: Path, file: str, place: int) -> None:
    job = job_for(text_folder, steps=1)
    train(job, corpus, tmp_path)
    content = bytearray((path := tmp_path / "step-000001" / file).read_bytes())
    content[place] ^= 1
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=rf"{file}: is damaged .*; give an older checkpoint"):  # noqa: PT012
        train(job_for(text_folder, steps=2), corpus, tmp_path / "again", tmp_path)
        find(tmp_path).tokenizer_file  # noqa: B018


def test_a_file_in_the_place_of_another_is_noticed(text_folder: Path, corpus: Corpus, tmp_path: Path) -> None:
    train(job_for(text_folder, steps=1), corpus, tmp_path)
    meta = json.loads((tmp_path / "step-000001" / "meta.json").read_text())
    (tmp_path / "step-000001" / "meta.json").write_text(json.dumps(meta | {"tp": 2}))
    with pytest.raises(ConfigError, match=r"meta\.json: is damaged \(it is not as it was written\)"):
        find(tmp_path)
    del meta["digest"]
    (tmp_path / "step-000001" / "meta.json").write_text(sealed(meta))
    train(job_for(text_folder, steps=1), corpus, tmp_path / "other", seed=1)
    shutil.copy(tmp_path / "other" / "step-000001" / "__0_0.distcp", tmp_path / "step-000001" / "__0_0.distcp")
    with pytest.raises(ConfigError, match=r"__0_0\.distcp: is damaged"):
        train(job_for(text_folder, steps=2), corpus, tmp_path / "again", tmp_path / "step-000001")


def test_a_folder_without_its_meta_is_passed_over_and_named(text_folder: Path, corpus: Corpus, tmp_path: Path) -> None:
    job = job_for(text_folder)
    train(job, corpus, tmp_path / "checkpoints")
    (newer := tmp_path / "checkpoints" / "step-000008").joinpath("meta.json").unlink()
    meta = find(tmp_path)
    said = [f"resumes from {tmp_path}/checkpoints/step-000006, after step 6"]
    said += [f"note: {newer} is newer, and was passed over: it lacks meta.json"]
    assert (meta.step, resume_notes(meta, job)) == (6, said)


def test_what_a_killed_save_left_is_named_with_its_size(text_folder: Path, tmp_path: Path) -> None:
    job = job_for(text_folder)
    meta = Meta(tmp_path / "step-000006", 6, 0, 1, 1, job.model_dump(mode="json"), {}, {})
    _, *notes = resume_notes(meta, job)
    assert notes == []
    (half := tmp_path / ".step-000008.part").mkdir()
    for name in ("a", "b"):
        (half / name).write_bytes(bytes(1024))
    _, *notes = resume_notes(meta, job)
    assert notes == [f"note: {half} (2 KiB) is what a killed save left; delete it, unless a run still writes there"]
    assert half.exists()


def test_what_is_otherwise_than_before_is_said(text_folder: Path, corpus: Corpus, tmp_path: Path) -> None:
    train(job_for(text_folder, steps=1), corpus, tmp_path)
    sections: dict[str, dict[str, object]] = {
        "optimizer": {"steps": 9, "lr": 0.1, "name": "lamb"},
        "batch": {"global_batch_size": 16},
    }
    _, *notes = resume_notes(find(tmp_path), tiny_job(text_folder, **sections))
    assert notes == [
        "note: job.optimizer.name is now lamb, and was adamw up to the checkpoint",
        "note: job.optimizer.steps is now 9, and was 1 up to the checkpoint, and the cosine schedule of the learning "
        "rate moves with it",
        "note: job.optimizer.lr is now 0.1, and was 0.01 up to the checkpoint",
        "note: job.batch.global_batch_size is now 16, and was 8 up to the checkpoint",
    ]


@pytest.mark.parametrize("call", [1, 2, 3, 4])  # at the tensors, at .metadata, at the tokenizer, at meta.json
def test_a_full_disk_is_one_line_and_leaves_nothing_of_it(
    text_folder: Path, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: int
) -> None:
    train(job_for(text_folder, steps=1), corpus, tmp_path)
    before, calls = os.fsync, itertools.count(1)

    def refuse(opened: int) -> None:
        if next(calls) == call:
            raise OSError(errno.ENOSPC, "No space left on device")
        before(opened)

    monkeypatch.setattr(os, "fsync", refuse)
    said = r"step-000002: cannot be written \(No space .* device\): it needs 432 KiB, .* were free; make room there, or"
    with pytest.raises(ConfigError, match=said):
        train(job_for(text_folder, steps=2), corpus, tmp_path, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]


def test_a_disk_that_is_full_for_a_while_costs_a_checkpoint_and_no_step(
    text_folder: Path, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full at steps 4 and 6: tried again after the evaluation of step 6, then at step 8, which is due."""
    job = tiny_job(text_folder, optimizer={"steps": 10}, checkpoint={"every_steps": 4, "asynchronous": False})
    whole = train(job, corpus, tmp_path / "whole")
    trainer, rows, warnings = Trainer(job, corpus, 0, ALONE), list[dict[str, Any]](), list[str]()
    add, save, saved = ItemWriter.add, trainer.save, list[int]()

    def refuse(writer: ItemWriter, pieces: Pieces) -> Extent:
        if trainer.steps_done in (4, 6) and len(writer.places) == 9:  # after some of it was written
            raise OSError(errno.ENOSPC, "No space left on device")
        return add(writer, pieces)

    monkeypatch.setattr(ItemWriter, "add", refuse)
    monkeypatch.setattr(trainer, "save", lambda folder: saved.append(trainer.steps_done) or save(folder))
    out = tmp_path / "out"
    run(trainer, EvaluationConfig(every_steps=3), rows.append, lambda _row: None, out, on_warning=warnings.append)
    assert [row["loss"] for row in rows] == whole
    assert saved == [4, 6, 8, 10]
    assert [row["step"] for row in rows if row["checkpoint_failures"]] == [4, 6]
    assert all(rows[step - 1]["checkpoint_s"] > 0 for step in saved)
    said = f"training goes on: --out = {out}/step-000006: cannot be written (No space left on device): it needs 432 KiB"
    assert len(warnings) == 2
    assert said in warnings[1]
    assert sorted(path.name for path in out.iterdir()) == ["step-000008", "step-000010"]


def test_a_disk_that_has_too_little_room_is_not_filled(
    text_folder: Path, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = Trainer(job_for(text_folder), corpus, 0, ALONE)
    trainer.step(1)
    free = mock.Mock(total=10**12, free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda _folder: free)
    monkeypatch.setattr(LocalStorage, "write", mock.Mock(side_effect=AssertionError("was written to")))
    with pytest.raises(NoRoom, match=r"No space left on device\): it needs 432 KiB, 1000 B were free; make room"):
        trainer.save(tmp_path)
    free.free = 0
    with pytest.raises(NoRoom, match=r"it needs 432 KiB, 0 B were free; make room"):
        trainer.save(tmp_path)
    assert not list(tmp_path.iterdir())
    free.total = 0  # of a file system that does not say
    with pytest.raises(ConfigError, match="was written to"):
        trainer.save(tmp_path)


def test_what_is_needed_is_what_is_written(text_folder: Path, corpus: Corpus, tmp_path: Path) -> None:
    trainer = Trainer(job_for(text_folder), corpus, 0, ALONE)
    trainer.step(1)
    size = (trainer.save(tmp_path) / "__0_0.distcp").stat().st_size
    needed = Saver(trainer.model, trainer.optimizer, tmp_path).needed_bytes
    assert needed < size < needed + 100 * 2000  # what is around each of fewer than a hundred items


def test_a_disk_that_is_full_on_one_rank_is_so_on_all(text_folder: Path, corpus: Corpus, tmp_path: Path) -> None:
    job = tiny_job(text_folder, 2, parallel={"tp": 2, "dp": 1})
    with meeting_place() as place:
        work = Plan(job, corpus, place.init_method("full"), "gloo", tmp_path, 0)
        first, second = launch(targets.full_on_rank_1, 2, args=(work,), log_dir=tmp_path / "logs")
    assert first == second
    assert "step-000001: cannot be written (No space left on device): it needs " in first[0]
    assert first[1:] == ["there: ", "step 2: step-000002.new", "there: checkpoints/step-000002.new"]


@pytest.mark.slow
@pytest.mark.skipif(os.geteuid() != 0 or sys.platform != "linux", reason="mounts a file system")
def test_a_disk_that_is_really_full(text_folder: Path, corpus: Corpus, tmp_path: Path) -> None:
    """A tmpfs with room for one checkpoint: the second finds none, until somebody removes what else is there."""
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1500k", "tmpfs", disk], check=False).returncode:
        pytest.skip("cannot mount here")
    try:
        (disk / "ballast").write_bytes(bytes(700 << 10))
        job = tiny_job(text_folder, optimizer={"steps": 9}, checkpoint={"every_steps": 2, "keep": 1})
        trainer, rows, warnings = Trainer(job, corpus, 0, ALONE), list[dict[str, Any]](), list[str]()

        def make_room(line: str) -> None:
            warnings.append(line)
            if "no checkpoint" in line:
                (disk / "ballast").unlink()

        run(trainer, EvaluationConfig(), rows.append, lambda _row: None, disk / "a", on_warning=make_room)
        # Of that step, or of a later one: the writer says it beside the training.
        assert sum(row["checkpoint_failures"] for row in rows) == 1
        assert [path.name for path in (disk / "a").iterdir()] == ["step-000009"]
        [line] = [line for line in warnings if "no checkpoint" in line]
        assert "no checkpoint of step 4, training goes on: " in line
    finally:
        subprocess.run(["umount", disk], check=True)


@pytest.mark.parametrize("model", [LLAMA])
def test_any_layout_goes_on_from_any_other(tmp_path: Path, model: dict[str, object]) -> None:
    """Written by one process and gone on with by several, and the other way round."""
    alone = job_of({}, model, {}, sequences=8)
    expected = layout_ranks.train(alone, 0, 5)
    layout_ranks.train(alone, 0, 2, save=tmp_path / "alone")
    layouts = {"tp": 2, "dp": 2, "zero": 3}, {"cp": 2, "dp_replicate": 2}, {"cp": 2, "pp": 2}
    folders = [tmp_path / name for name in ("alone", "first", "replicas", "last")]
    with meeting_place() as place:
        url = place.init_method("checkpoint")
        arguments = (
            [job_of(each, model, {}, sequences=8) for each in layouts],
            3,
            url,
            list(itertools.pairwise(folders)),
        )
        each = launch(layout_ranks.go_on, 4, args=arguments, log_dir=tmp_path / "logs")[0]
    assert [trained.losses[0] for trained in each] == pytest.approx(expected.losses[2:5], abs=1e-10)
    sizes = [sum(file.stat().st_size for file in folder.rglob("*.distcp")) for folder in folders[:3]]
    assert sizes[0] <= sizes[2] < 1.2 * sizes[0], "replicas hold the same, and it is saved once"
    last = layout_ranks.train(alone, 0, 5, resume=tmp_path / "replicas")
    assert last.losses == pytest.approx(expected.losses[4:], abs=1e-10)
    for name, value in expected.parameters.items():
        torch.testing.assert_close(last.parameters[name], value, rtol=1e-8, atol=1e-11)


def test_a_save_that_is_killed_anywhere_leaves_a_whole_checkpoint(tmp_path: Path) -> None:
    """SIGKILL at each file operation in turn: the newest checkpoint can be loaded, and so can all others."""
    done = run_module("tests.trainer.killed_saves", tmp_path)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10
    assert [path.name for path in tmp_path.iterdir()] == [find(tmp_path).path.name]  # no halves are left


def test_all_is_durable_before_it_has_its_name(
    text_folder: Path, corpus: Corpus, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    happened: list[tuple[str, str]] = []
    sync, replace = os.fsync, Path.replace

    def note_sync(opened: int) -> None:
        happened.append(("sync", Path(f"/proc/self/fd/{opened}").readlink().name))
        sync(opened)

    def note_replace(path: Path, target: Path) -> Path:
        happened.append(("rename", path.name))
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", note_sync)
    monkeypatch.setattr(Path, "replace", note_replace)
    train(job_for(text_folder, steps=1), corpus, tmp_path)
    aside = ".step-000001.part"
    named = happened.index(("rename", aside))
    before, after = happened[:named], happened[named + 1 :]
    files = {path.name for path in (tmp_path / "step-000001").iterdir()}
    assert {("sync", name) for name in files} <= set(before)
    assert before[-1] == ("sync", aside)
    assert after[0] == ("sync", tmp_path.name)


def test_a_save_gathers_one_bucket_at_a_time(text_folder: Path) -> None:
    """No more whole state is alive than the largest bucket, whatever the number of buckets."""
    job = tiny_job(text_folder, model={"layers": 6})
    [chunk] = ParallelModel(job, 0, 0, ALONE.device).chunks
    wholes: list[int] = []

    class Communicator:
        def all_gather(self, unsharded_N: torch.Tensor) -> Communicator:
            wholes.append(unsharded_N.untyped_storage().data_ptr())
            largest = max(bucket.plan.padded_numel for bucket in chunk.buckets)
            assert unsharded_N.untyped_storage().nbytes() == largest * unsharded_N.itemsize
            return self

        def wait(self) -> None:
            pass

    comm: Any = Communicator()
    expected = chunk.full_state_dict()
    names = []
    for name, whole in gather_whole(chunk.buckets, comm, lambda piece: piece.parameter.detach()):
        assert torch.equal(whole, expected[name])
        names.append(name)
    assert names == list(chunk.shapes())
    assert len(wholes) == len(chunk.buckets) > 6
    assert len(set(wholes)) == 1  # one memory, in which they take turns


def test_a_checkpoint_from_before_a_key_is_of_a_model_with_its_default(text_folder: Path, tmp_path: Path) -> None:
    job = job_for(text_folder)
    written = job.model_dump(mode="json")
    for key in ("head_dim", "qk_norm", "norm_eps", "rope_scaling"):
        del written["model"][key]
    meta = Meta(tmp_path, 3, 0, 1, 1, written, {}, {})
    check_model(meta, job)
    with pytest.raises(ConfigError, match=r"is of a model with norm_eps = 1e-05, and the job has 1e-06; set job"):
        check_model(meta, job_for(text_folder, norm_eps=1e-6))
    with pytest.raises(ConfigError, match=r"is of a model with rope_scaling = \{'rope_type': 'default'"):
        check_model(meta, job_for(text_folder, rope_scaling={"rope_type": "linear", "factor": 2.0}))


def test_a_checkpoint_from_before_a_preset_had_a_key_is_read_as_it_was_trained(tmp_path: Path) -> None:
    written = build_config({"job": {"model": {"preset": "llama3-1b"}}}).job.model_dump(mode="json")
    assert model_of(Meta(tmp_path, 3, 0, 1, 1, written, {}, {})).rope_scaling.rope_type == "llama3"
    del written["model"]["rope_scaling"]
    assert model_of(Meta(tmp_path, 3, 0, 1, 1, written, {}, {})).rope_scaling.rope_type == "default"


def test_other_text_is_refused_unless_it_is_meant(text_folder: Path, corpus: Corpus, tmp_path: Path) -> None:
    job = job_for(text_folder, steps=3)
    train(job, corpus, tmp_path / "checkpoints")
    other_folder = tmp_path / "other"
    other_folder.mkdir()
    for path in text_folder.iterdir():
        (other_folder / path.name).write_text(path.read_text() + "one line more\n")
    assert prepare(job, 1, 0, tmp_path, resume=tmp_path).facts.train_tokens == corpus.facts.train_tokens
    other = job_for(other_folder, steps=6)
    with pytest.raises(
        ConfigError, match=r"job\.data\.folder = .*gives another text than .*allow_dataset_change to true"
    ):
        prepare(other, 1, 0, tmp_path, resume=tmp_path)
    meant = other.model_copy(update={"checkpoint": other.checkpoint.model_copy(update={"allow_dataset_change": True})})
    continued = prepare(meant, 1, 0, tmp_path, resume=tmp_path)
    # Other text in the same tokens: ids mean what they meant.
    assert continued.tokenizer_file.read_text() == corpus.tokenizer_file.read_text()
    assert continued.identity["text"] != corpus.identity["text"]
    assert len(train(meant, continued, tmp_path / "again", tmp_path)) == 3


def test_another_seed_or_length_is_refused_unless_it_is_meant(
    text_folder: Path, corpus: Corpus, tmp_path: Path
) -> None:
    job = job_for(text_folder, steps=1, positions="rotary")
    train(job, corpus, tmp_path)
    meta = find(tmp_path)
    meant = job.model_copy(update={"checkpoint": job.checkpoint.model_copy(update={"allow_dataset_change": True})})
    assert (seed_of(meta, None, job), seed_of(meta, 0, job), seed_of(meta, 7, meant)) == (0, 0, 7)
    with pytest.raises(ConfigError, match=r"--seed = 7: is another than the 0 that .* omit it, or set"):
        seed_of(meta, 7, job)
    longer = {"model": job.model.model_copy(update={"seq_len": 32})}
    with pytest.raises(ConfigError, match=r"seq_len = 16, and the job has 32; set job\.model\.seq_len to that, or"):
        check_model(meta, job.model_copy(update=longer))
    check_model(meta, meant.model_copy(update=longer))
