"""Batches on their way into the training: read ahead or not, in any layout, through stops and kills, the same."""

from __future__ import annotations

import json
import math
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from netlayer.config.file import to_toml
from netlayer.config.tree import Config, EvaluationConfig, JobConfig
from netlayer.errors import CheckFailed, ConfigError
from netlayer.store.meeting import meeting_place
from trainer.checkpoint.meta import find
from trainer.data.arrays import ArrayDataset, corpus_dataset, open_dataset
from trainer.data.mixture import Mixture, check_samples, prepare_mixture, sampler_spec
from trainer.data.prepare import Corpus
from trainer.data.ring import PREFIX, SHARED_MEMORY
from trainer.data.sampler import Sampler
from trainer.feed import SampleFeed
from trainer.loop import RankInfo, Row, Trainer, run
from trainer.loss_scale import LossScale
from trainer.model.gpt import build_model
from trainer.plan import prepare_data, resolve
from trainer.train import TrainResult, train

from .conftest import tiny_job
from .loader_ranks import wait_gone, wait_until
from .token_datasets import some_documents, write_dataset

ALONE = RankInfo(0, 1, torch.device("cpu"))
NOBODY = Path("/nowhere")
EVALUATED = EvaluationConfig(every_steps=10, global_batches=2)


def write_set(file: Path, num_tokens: int, seed: int = 0, document_tokens: int = 0) -> str:
    """Write tokens in which each is likely to be followed by the next number; a small model can learn that."""
    rng = np.random.default_rng(seed)
    steps = np.where(rng.random(num_tokens) < 0.8, 1, rng.integers(0, 300, num_tokens))
    np.save(file, (np.cumsum(steps) % 300).astype(np.uint16))
    if document_tokens:
        np.save(file.with_suffix(".documents.npy"), np.arange(0, num_tokens, document_tokens))
    return str(file)


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Keys of job.data: two datasets by weight, and two to evaluate on."""
    folder = tmp_path_factory.mktemp("sets")
    return {
        "datasets": {
            "web": {"path": write_set(folder / "web.npy", 3000, 1, 11), "weight": 3.0},
            "code": {"path": write_set(folder / "code.npy", 1000, 2, 50), "weight": 1.0},
        },
        "evaluation": {
            "held_out": write_set(folder / "held_out.npy", 700, 3, 30),
            "other": write_set(folder / "other.npy", 300, 4),
        },
    }


def set_job(of: dict[str, Any], ranks: int = 1, **sections: dict[str, Any]) -> JobConfig:
    data = {"folder": "", "pattern": "*.py", **of, **sections.pop("data", {})}
    evaluation = {"every_steps": EVALUATED.every_steps, "global_batches": EVALUATED.global_batches}
    return tiny_job(NOBODY, ranks, data=data, evaluation=evaluation, **sections)


def alone(job: JobConfig, data: Corpus | Mixture) -> tuple[list[Row], list[Row]]:
    steps: list[Row] = []
    evaluations: list[Row] = []
    trainer = Trainer(job, data, 0, ALONE)
    try:
        run(trainer, EVALUATED, steps.append, evaluations.append)
    finally:
        trainer.close()
    return steps, evaluations


def losses(rows: Sequence[Row]) -> list[float]:
    return [row["loss"] for row in rows]


def on_ranks(job: JobConfig, data: Corpus | Mixture, out: Path, resume: Path | None = None) -> TrainResult:
    ranks = job.parallel.layout.world_size
    with meeting_place() as place:
        url = place.init_method("feed")
        return train(resolve(job, data, ranks=ranks, init_method=url, backend="gloo", out=out, seed=0, resume=resume))


@pytest.mark.parametrize("packing", [pytest.param("stream", marks=pytest.mark.slow), "documents"])
def test_read_ahead_or_not_losses_are_the_same_to_the_bit(sets: dict[str, Any], packing: str) -> None:
    jobs = [set_job(sets, data={"loader": loader, "packing": packing}) for loader in (True, False)]
    mixture = prepare_mixture(jobs[0])
    (ahead, evaluated), (itself, also) = (alone(job, mixture) for job in jobs)
    assert losses(ahead) == losses(itself)
    assert [row["validation_loss"] for row in evaluated] == [row["validation_loss"] for row in also]
    assert losses(ahead)[-1] < losses(ahead)[0]
    for row in evaluated:
        assert row["validation_loss"] == (row["validation_loss_held_out"] + row["validation_loss_other"]) / 2
    assert all(row["data_wait_ms"] >= 0 for row in ahead)


def test_a_step_whose_batch_was_read_ahead_begins_without_an_operator_or_a_sum(
    sets: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ranks add up its targets beside the notes of the step before; the first step's and evaluations' apart."""
    job = set_job(sets, data={"packing": "documents"})
    trainer = Trainer(job, prepare_mixture(job), 0, ALONE)
    sums, operators = list[None](), list[str]()
    add_up = LossScale.add_up
    monkeypatch.setattr(LossScale, "add_up", lambda *args: (sums.append(None), add_up(*args)))

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            operators.append(str(func))
            return func(*args, **(kwargs or {}))

    training = trainer.feed.training

    def seen(step: int) -> Any:
        with Seen():
            return training(step)

    monkeypatch.setattr(trainer.feed, "training", seen)
    trainer.step(1)
    assert len(sums) == 1
    del operators[:]
    trainer.step(2)
    trainer.step(3)
    assert (len(sums), operators) == (1, [])
    trainer.evaluate(EVALUATED.global_batches)
    assert len(sums) == 3  # of two sets
    trainer.step(4)
    assert (len(sums), operators) == (3, [])
    trainer.close()


def test_no_rank_reads_held_out_sequences_beside_the_loader(sets: dict[str, Any], monkeypatch: Any) -> None:
    job = set_job(sets)
    trainer = Trainer(job, prepare_mixture(job), 0, ALONE)
    trainer.open_feed()
    feed = trainer.feed
    assert isinstance(feed, SampleFeed)
    with monkeypatch.context() as patch:
        patch.setattr(Sampler, "_read", lambda *_: pytest.fail("a rank reads tokens"))
        first = trainer.evaluate(EVALUATED.global_batches)
        trainer.step(1)
    # A short one, as at a stop: the ranks read it, and the loader's next is whole.
    short = trainer.evaluate(1)
    assert short != first
    before = feed._rings[1].bytes_read
    assert before >= 2 * EVALUATED.global_batches * 8 * 17 * 2
    trainer.close()


def test_text_in_epochs_has_every_sequence_once(text_folder: Path, corpus: Corpus) -> None:
    steps = (corpus.facts.train_tokens - 1) // 16 // 8
    sections: dict[str, Any] = {"data": {"sampling": "epochs"}, "optimizer": {"steps": steps}}
    trainer = Trainer(tiny_job(text_folder, **sections), corpus, 0, ALONE)
    assert isinstance(trainer.feed, SampleFeed)
    trainer.open_feed()
    rows = []
    for step in range(1, steps + 1):
        for batch in trainer.feed.training(step):
            rows += batch[0].tolist()
    trainer.close()
    tokens = corpus.train_tokens()
    windows = [tokens[start : start + 16].tolist() for start in range(0, len(tokens) - 16, 16)]
    assert len(rows) == steps * 8
    # All but what fills no batch.
    left = sorted(windows)
    for row in rows:
        left.remove(row)
    assert len(left) < 8


def test_a_loader_killed_in_training_changes_no_loss(sets: dict[str, Any]) -> None:
    job = set_job(sets)
    mixture = prepare_mixture(job)
    expected, _ = alone(job, mixture)
    trainer = Trainer(job, mixture, 0, ALONE)
    trainer.open_feed()
    assert isinstance(trainer.feed, SampleFeed)
    rows, killed = [], []
    for step in range(1, 21):
        loader = trainer.feed._loader
        if step in (4, 9, 10) and loader is not None and loader.pid is not None:
            killed.append(loader.pid)
            os.kill(loader.pid, signal.SIGKILL)
        rows.append(trainer.step(step))
    trainer.close()
    assert killed
    assert losses(rows) == losses(expected)
    wait_gone(killed)


def test_a_training_leaves_no_loader_and_no_memory(sets: dict[str, Any]) -> None:
    trainer = Trainer(set_job(sets), prepare_mixture(set_job(sets)), 0, ALONE)
    trainer.step(1)
    assert isinstance(trainer.feed, SampleFeed)
    loader = trainer.feed._loader
    assert loader is not None
    pid = loader.pid
    assert pid is not None
    trainer.close()
    trainer.close()
    wait_gone([pid])
    assert list(SHARED_MEMORY.glob(f"{PREFIX}*")) == []


def test_steps_come_in_order(sets: dict[str, Any]) -> None:
    trainer = Trainer(set_job(sets, data={"loader": False}), prepare_mixture(set_job(sets)), 0, ALONE)
    trainer.step(1)
    with pytest.raises(ValueError, match="batches come in the order of steps, and the next is 2"):
        trainer.step(4)
    trainer.close()


def test_what_the_loader_cannot_read_ends_the_training_in_one_line(tmp_path: Path, sets: dict[str, Any]) -> None:
    file = tmp_path / "bad.npy"
    np.save(file, np.full(1000, 7, dtype=np.uint16))
    job = set_job(sets, data={"datasets": {"bad": {"path": str(file)}}})
    mixture = prepare_mixture(job)
    np.save(file, np.full(1000, 300, dtype=np.uint16))  # the model has 300 tokens
    trainer = Trainer(job, mixture, 0, ALONE)
    message = r"the loader has given up: job.data.datasets.bad: holds a token outside the"
    with pytest.raises(CheckFailed, match=message):
        run(trainer, EvaluationConfig(), lambda _row: None, lambda _row: None)
    trainer.close()


@pytest.mark.parametrize(("section", "key"), [("datasets", "bad"), ("evaluation", "bad")])
def test_ids_above_the_models_are_refused_before_anything_starts(
    sets: dict[str, Any], tmp_path: Path, section: str, key: str
) -> None:
    tokens = np.full(1000, 7, dtype=np.uint16)
    tokens[700] = 300
    np.save(tmp_path / "bad.npy", tokens)
    path = str(tmp_path / "bad.npy")
    job = set_job(sets, data={section: {key: {"path": path} if section == "datasets" else path}})
    with pytest.raises(ConfigError) as failed:
        prepare_data(job, 1, 0, tmp_path)
    assert str(failed.value) == (
        f"job.data.{section}.bad: holds token 300 at 700, and job.model.vocab_size is 300; give the dataset of this "
        "model's tokenizer, or raise job.model.vocab_size"
    )


def test_datasets_of_two_tokenizers_are_refused_however_their_files_are_laid_out(
    sets: dict[str, Any], tmp_path: Path
) -> None:
    folders = [write_dataset(tmp_path / name, some_documents(80)).folder for name in "ab"]
    datasets = {folder.parent.name: {"path": str(folder)} for folder in folders}
    evaluation = {"held_out": sets["evaluation"]["held_out"]}
    job = set_job({"datasets": datasets, "evaluation": evaluation})
    tokenizer = folders[1] / "tokenizer.json"
    tree = json.loads(tokenizer.read_text())
    tokenizer.write_text(json.dumps(tree | {"truncation": None, "padding": None}, indent=7))
    assert prepare_data(job, 1, 0, tmp_path).facts.train_files == 2
    vocabulary = tree["model"]["vocab"]
    vocabulary["t1"], vocabulary["t2"] = vocabulary["t2"], vocabulary["t1"]
    tokenizer.write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match=r"job.data.datasets.b: was made by another tokenizer than job.data.datas"):
        prepare_data(job, 1, 0, tmp_path)


# Degrees, layers, packing, and whether it is too long for CI. A stage between reads no tokens; where documents are
# packed it needs their borders.
LAYOUTS = [
    ({"dp": 2}, 2, "stream", False),
    ({"dp": 1, "cp": 2}, 2, "documents", False),  # borders of documents lie anywhere in the chunks
    ({"dp": 1, "cp": 4}, 2, "documents", True),
    ({"dp": 2, "cp": 2}, 2, "stream", True),
    ({"dp": 1, "pp": 3, "cp": 2}, 3, "documents", True),
    ({"dp": 1, "tp": 2}, 2, "documents", True),
    ({"dp": 1, "pp": 3}, 3, "documents", False),
    ({"dp": 1, "pp": 2}, 2, "documents", True),
    ({"dp": 2}, 2, "documents", True),
    ({"dp": 1, "tp": 2}, 2, "stream", True),
    ({"dp": 1, "pp": 2}, 2, "stream", True),
    ({"dp": 1, "pp": 3}, 3, "stream", True),
    ({"dp": 2, "tp": 2}, 2, "stream", True),
    ({"dp": 2, "tp": 2}, 2, "documents", True),
]


@pytest.mark.parametrize(
    ("degrees", "layers", "packing"),
    [pytest.param(*case, marks=[pytest.mark.slow] * is_slow) for *case, is_slow in LAYOUTS],
)
def test_every_layout_has_the_losses_of_one_process(
    sets: dict[str, Any], tmp_path: Path, degrees: dict[str, int], layers: int, packing: str
) -> None:
    sections: dict[str, Any] = {
        "data": {"packing": packing},
        "model": {"layers": layers},
        "optimizer": {"steps": 4},
    }
    one = set_job(sets, **sections)
    mixture = prepare_mixture(one)
    expected, evaluated = alone(one, mixture)
    job = set_job(sets, math.prod(degrees.values()), parallel=degrees, **sections)
    result = on_ranks(job, mixture, tmp_path)
    assert losses(result.steps) == pytest.approx(losses(expected), abs=1e-4)
    assert [row["validation_loss_other"] for row in result.evaluations] == pytest.approx(
        [row["validation_loss_other"] for row in evaluated], abs=1e-4
    )


def test_a_run_resumes_on_other_ranks_with_the_next_sample(sets: dict[str, Any], tmp_path: Path) -> None:
    whole = set_job(sets, optimizer={"schedule": "constant"})
    mixture = prepare_mixture(whole)
    expected, _ = alone(whole, mixture)
    first = set_job(sets, optimizer={"steps": 8, "schedule": "constant"}, checkpoint={"every_steps": 8})
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    on_ranks(first, mixture, tmp_path / "a")
    meta = find(tmp_path / "a")
    assert meta.data is not None
    assert meta.data["num_samples"] == 8 * 8
    assert set(meta.data["datasets"]) == {"web", "code"}
    # Other ranks, another micro-batch.
    second = set_job(sets, 2, optimizer={"schedule": "constant"}, batch={"micro_batch_size": 1})
    assert isinstance(prepare_data(second, 2, 0, tmp_path, resume=tmp_path / "a"), Mixture)
    resumed = on_ranks(second, mixture, tmp_path / "b", resume=meta.path)
    assert [row["step"] for row in resumed.steps] == list(range(9, 21))
    assert losses(resumed.steps) == pytest.approx(losses(expected)[8:], abs=1e-4)


@pytest.fixture
def saved(tmp_path: Path) -> tuple[dict[str, Any], Path]:
    """A run of one dataset that may be changed, and its checkpoint."""
    data = {
        "datasets": {"web": {"path": write_set(tmp_path / "web.npy", 2000)}},
        "evaluation": {"held_out": write_set(tmp_path / "held_out.npy", 300, 1)},
    }
    job = set_job(data, optimizer={"steps": 2}, checkpoint={"every_steps": 2})
    trainer = Trainer(job, prepare_mixture(job), 0, ALONE)
    run(trainer, EvaluationConfig(), lambda _row: None, lambda _row: None, tmp_path / "checkpoints")
    trainer.close()
    return data, tmp_path


def test_a_dataset_that_changed_since_the_checkpoint_is_named_with_the_choice(
    saved: tuple[dict[str, Any], Path],
) -> None:
    data, folder = saved
    assert prepare_data(set_job(data), 1, 0, folder, resume=folder).facts.train_tokens == 2000
    write_set(folder / "web.npy", 2500)
    with pytest.raises(ConfigError) as failed:
        prepare_data(set_job(data), 1, 0, folder, resume=folder)
    line = str(failed.value)
    assert line.startswith("job.data.datasets: dataset web grew from 2,000 to 2,500 tokens, since ")
    assert "or set job.checkpoint.allow_dataset_change to true" in line
    job = set_job(data, checkpoint={"allow_dataset_change": True})
    mixture = prepare_data(job, 1, 0, folder, resume=folder)
    trainer = Trainer(job, mixture, 0, ALONE)
    trainer.resume(find(folder))
    trainer.step(3)
    assert isinstance(trainer.feed, SampleFeed)
    assert trainer.feed.state(3)["num_samples"] == 3 * 8  # type: ignore[index]
    trainer.close()


def test_going_on_from_text_with_datasets_or_back_is_no_silent_change(
    saved: tuple[dict[str, Any], Path], text_folder: Path, corpus: Corpus
) -> None:
    data, folder = saved
    before = find(folder)
    with pytest.raises(ConfigError, match="this job draws them with replacement"):
        check_samples(tiny_job(text_folder), corpus, before)
    with pytest.raises(ConfigError, match="dataset text is new; dataset web is gone"):
        check_samples(tiny_job(text_folder, data={"sampling": "epochs"}), corpus, before)
    trainer = Trainer(tiny_job(text_folder), corpus, 0, ALONE)
    trainer.step(1)
    trainer.save(folder / "of_text")
    trainer.commit()
    trainer.close()
    of_text = find(folder / "of_text")
    assert of_text.data is None
    with pytest.raises(ConfigError, match="it drew its samples with replacement"):
        check_samples(set_job(data), prepare_mixture(set_job(data)), of_text)


def test_a_larger_batch_after_a_resume_goes_on_with_the_next_sample(saved: tuple[dict[str, Any], Path]) -> None:
    data, folder = saved
    job = set_job(data, batch={"global_batch_size": 16})
    trainer = Trainer(job, prepare_mixture(job), 0, ALONE)
    trainer.resume(find(folder))
    trainer.open_feed()
    rows = [row for batch in trainer.feed.training(3) for row in batch[0].tolist()]
    whole = trainer.feed._sampler.read(range(16, 32))  # type: ignore[attr-defined]
    trainer.close()
    assert rows == whole.tokens[:, :-1].tolist()


def test_a_run_that_reads_too_often_is_refused_before_anything_starts(sets: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"job.data.max_epochs = 1: is less than the .* that this job reads dataset"):
        prepare_data(set_job(sets, data={"max_epochs": 1.0}, optimizer={"steps": 200}), 1, 0, tmp_path)


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda _file: None, "cannot be read as a NumPy array"),
        (lambda file: file.write_bytes(b"\x93NUMPY broken"), "cannot be read as a NumPy array"),
        (lambda file: np.save(file, np.zeros((4, 4), dtype=np.int32)), "holds an array of shape"),
        (lambda file: np.save(file, np.zeros(400)), "holds an array of shape .* type float64"),
        (lambda file: np.save(file, np.zeros(16, dtype=np.uint16)), "holds 16 tokens, and one sequence takes 17"),
    ],
)
def test_a_dataset_that_cannot_be_used_is_one_line(
    sets: dict[str, Any], tmp_path: Path, write: Any, message: str
) -> None:
    write(tmp_path / "bad.npy")
    job = set_job(sets, data={"datasets": {"bad": {"path": str(tmp_path / "bad.npy")}}})
    with pytest.raises(ConfigError, match=message) as failed:
        prepare_data(job, 1, 0, tmp_path)
    assert str(failed.value).startswith("job.data.datasets.bad")


def test_an_array_is_read_with_its_documents_and_travels_as_its_path(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(20, dtype=np.uint16))
    np.save(tmp_path / "a.documents.npy", [0, 5, 5, 12])
    dataset = open_dataset(tmp_path / "a.npy", "a", 300)
    assert (dataset.num_tokens, dataset.num_documents, dataset.itemsize) == (20, 4, 2)
    assert [dataset.document_start(document) for document in range(5)] == [0, 5, 5, 12, 20]
    assert [dataset.document_at(token) for token in (0, 4, 5, 11, 12, 19)] == [0, 0, 2, 2, 3, 3]
    assert dataset.read(3, 4).tolist() == [3, 4, 5, 6]
    pickled = pickle.dumps(dataset)
    assert len(pickled) < 1000
    assert pickle.loads(pickled).fingerprint == dataset.fingerprint
    with pytest.raises(ValueError, match="of a: it has 20"):
        dataset.read(18, 3)
    np.save(tmp_path / "a.documents.npy", [0, 6])
    assert open_dataset(tmp_path / "a.npy", "a", 300).fingerprint != dataset.fingerprint
    np.save(tmp_path / "a.documents.npy", [1, 0])
    with pytest.raises(ConfigError, match="holds no starts of documents within 20 tokens"):
        open_dataset(tmp_path / "a.npy", "a", 300)


def test_a_text_is_a_dataset_of_its_files(corpus: Corpus) -> None:
    dataset = corpus_dataset(corpus, "train", 300)
    assert isinstance(dataset, ArrayDataset)
    assert dataset.num_documents == corpus.facts.train_files
    tokens = corpus.train_tokens()
    for document in range(1, dataset.num_documents):
        assert tokens[dataset.document_start(document) - 1] == 0  # what ends each
    assert dataset.num_tokens == len(tokens)


@pytest.mark.parametrize("signum", [pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL])
def test_a_run_that_is_broken_off_leaves_no_process_and_no_memory(
    sets: dict[str, Any], tmp_path: Path, signum: signal.Signals
) -> None:
    job = set_job(sets, 2, optimizer={"steps": 100_000})
    tree = Config.model_validate({"cluster": {"gpus_per_server": 2}, "job": job.model_dump()})
    (tmp_path / "job.toml").write_text(to_toml(tree))
    out = tmp_path / "out"
    command = [sys.executable, "-m", "netlayer", "train", str(tmp_path / "job.toml"), "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True)
    metrics = out / "metrics.jsonl"
    wait_until(lambda: process.poll() is not None or (metrics.exists() and metrics.stat().st_size))
    children = psutil.Process(process.pid).children(recursive=True)
    assert any("trainer.data.loader" in " ".join(child.cmdline()) for child in children)
    process.send_signal(signum)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == (130 if signum == signal.SIGINT else -signum)
    assert b"Traceback" not in errors
    wait_gone([child.pid for child in children])
    assert list(SHARED_MEMORY.glob(f"{PREFIX}*")) == []


def test_a_masked_loss_is_the_mean_over_the_targets_that_count(tmp_path: Path) -> None:
    """Over all of the batch: micro-batches with few such targets count less, in any layout."""
    rng = np.random.default_rng(5)
    np.save(tmp_path / "mask.npy", (rng.random(800) < np.linspace(0.05, 0.95, 800)).astype(np.uint8))
    data = {
        "datasets": {"chat": {"path": write_set(tmp_path / "chat.npy", 800), "loss_mask": str(tmp_path / "mask.npy")}},
        "evaluation": {"held_out": write_set(tmp_path / "held_out.npy", 300, 1)},
    }
    expected = []
    for micro_batch_size in (1, 8):
        job = set_job(data, batch={"micro_batch_size": micro_batch_size})
        trainer = Trainer(job, prepare_mixture(job), 0, ALONE)
        row = trainer.step(1)
        expected.append((row["loss"], row["grad_norm"]))
        trainer.close()
    assert expected[0] == pytest.approx(expected[1], rel=1e-5)
    (tmp_path / "two").mkdir()
    two = set_job(data, 2, batch={"micro_batch_size": 2}, optimizer={"steps": 1, "warmup_steps": 0})
    [row] = on_ranks(two, prepare_mixture(two), tmp_path / "two").steps
    assert (row["loss"], row["grad_norm"]) == pytest.approx(expected[0], rel=1e-5)
    # The parts of a sequence have other numbers of targets too.
    parts = {"dp": 1, "cp": 2}
    two = set_job(data, 2, parallel=parts, batch={"micro_batch_size": 2}, optimizer={"steps": 1, "warmup_steps": 0})
    [row] = on_ranks(two, prepare_mixture(two), tmp_path / "two").steps
    assert (row["loss"], row["grad_norm"]) == pytest.approx(expected[0], rel=1e-5)

    model = build_model(job.model, 0, ALONE.device)
    rows = sampler_spec(job, prepare_mixture(job), 0).open().read(range(8))
    tokens, targets = torch.from_numpy(rows.tokens[:, :-1]).long(), torch.from_numpy(rows.tokens[:, 1:]).long()
    assert rows.mask is not None
    targets[torch.from_numpy(rows.mask) == 0] = -100
    assert model.embedding is not None
    assert model.head is not None
    x_TBD = model.embedding(tokens)
    for block in model.blocks.values():
        x_TBD = block(x_TBD)
    plain = torch.nn.functional.cross_entropy(model.head.logits(x_TBD).flatten(0, 1), targets.t().flatten())
    assert expected[0][0] == pytest.approx(plain.item(), rel=1e-5)
