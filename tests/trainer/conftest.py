"""A small text, a tiny job, and a cache folder of the tests' own."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from netlayer.config.tree import JobConfig, build_config
from trainer.data.prepare import Corpus, prepare_corpus

TINY = {
    "model": {"layers": 2, "hidden": 32, "heads": 2, "ffn_hidden": 64, "vocab_size": 300, "seq_len": 16},
    "batch": {"global_batch_size": 8, "micro_batch_size": 2},
    "optimizer": {"steps": 20, "lr": 1e-2, "warmup_steps": 4},
    "overlap": {"bucket_mib": 0.01},
}


@pytest.fixture(scope="session", autouse=True)
def _cache_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session")
def _no_sync() -> Iterator[None]:
    """Datasets of a hundred shards sync three hundred files, and what a test writes need not outlive a power cut."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda _descriptor: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    """Tiny products on several threads take many times as long where other work shares the cores."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def text_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Forty files of sentences from a small grammar: text that a tiny model can learn."""
    folder = tmp_path_factory.mktemp("text")
    words = random.Random(0)
    for number in range(40):
        lines = [
            f"the {words.choice(('rank', 'link', 'switch'))} {words.choice(('sends', 'drops', 'holds'))} "
            f"{words.randrange(100)} bytes\n"
            for _ in range(50)
        ]
        (folder / f"file{number:02}.txt").write_text("".join(lines), encoding="utf-8")
    return folder


def tiny_job(folder: Path, ranks: int = 1, **sections: dict[str, object]) -> JobConfig:
    """A job that a CPU runs in a second, with whole sections' keys replaced by `sections`."""
    tree: dict[str, dict[str, object]] = {name: dict(keys) for name, keys in TINY.items()}
    tree["data"] = {"folder": str(folder), "pattern": "*.txt"}
    tree["parallel"] = {"dp": ranks}
    for name, keys in sections.items():
        tree[name] = {**tree.get(name, {}), **keys}
    return build_config({"cluster": {"gpus_per_server": ranks}, "job": tree}).job


@pytest.fixture(scope="session")
def corpus(text_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Corpus:
    job = tiny_job(text_folder)
    return prepare_corpus(job.data, job.model.vocab_size, 0, tmp_path_factory.mktemp("corpus"))
