"""The tokenizer, the token files and their cache."""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import fcntl
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import numpy as np
import pytest
from tokenizers import Tokenizer

from netlayer.errors import ConfigError
from trainer.data.corpus import Document, read_documents
from trainer.data.prepare import Corpus, check_enough, prepare_corpus
from trainer.data.tokenizer import END_OF_DOCUMENT, encode, load_tokenizer, train_tokenizer

from .conftest import tiny_job

TOKENIZER = "trainer.data.tokenizer"


def prepare(folder: Path, cache: Path, vocab_size: int = 300) -> Corpus:
    return prepare_corpus(tiny_job(folder).data, vocab_size, 0, cache)


def test_tokens_say_what_the_files_say(text_folder: Path, corpus: Corpus) -> None:
    tokenizer = Tokenizer.from_file(str(corpus.tokenizer_file))
    documents = read_documents(tiny_job(text_folder).data, 0)
    for tokens, side in ((corpus.train_tokens(), documents.train), (corpus.validation_tokens(), documents.validation)):
        text = tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
        assert text == "".join(document.text + END_OF_DOCUMENT for document in side)
    assert corpus.train_tokens().dtype == np.uint16
    assert corpus.facts.train_tokens == len(corpus.train_tokens())


def test_a_text_that_names_the_end_of_a_document_does_not_end(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    for name in ("a.txt", "b.txt", "c.txt"):
        (folder / name).write_text(f"end = '{END_OF_DOCUMENT}'\n" * 9, encoding="utf-8")
    trained = prepare(folder, tmp_path / "cache")
    given = prepare_corpus(tiny_job(folder).data, 300, 0, tmp_path / "other", tokenizer_file=trained.tokenizer_file)
    tokenizer = load_tokenizer(trained.tokenizer_file, 300)
    for corpus in (trained, given):
        tokens, end = corpus.train_tokens().tolist(), tokenizer.token_to_id(END_OF_DOCUMENT)
        assert tokens.count(end) == corpus.facts.train_files == 2
        assert tokenizer.decode(tokens[: tokens.index(end)]) == f"end = '{END_OF_DOCUMENT}'\n" * 9


def test_any_text_can_be_tokenised() -> None:
    tokenizer = train_tokenizer([Document("a", "aaaa bbbb")], 257)
    odd = "\x00é漢字🎉\r\n\ttail "
    tokens = encode(tokenizer, [Document("b", odd)], 2**16 + 1, lambda _done: None)
    assert tokens.dtype == np.uint32
    assert tokenizer.decode(tokens.tolist()) == odd


def test_a_signal_does_not_wait_for_the_library_that_makes_the_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, end = threading.Event(), threading.Event()

    def train_from_iterator(texts: Iterator[str], _trainer: object) -> None:
        next(texts)
        begun.set()
        with contextlib.suppress(KeyboardInterrupt):  # it hears of none
            end.wait(60)

    def interrupt() -> None:
        begun.wait()
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(f"{TOKENIZER}._GIVEN_UP_S", 0.01)
    monkeypatch.setattr(f"{TOKENIZER}.Tokenizer", lambda _model: mock.Mock(train_from_iterator=train_from_iterator))
    other = threading.Thread(target=interrupt)
    other.start()
    with pytest.raises(KeyboardInterrupt):
        train_tokenizer([Document("a", "aaaa")], 300)
    assert not end.is_set()
    end.set()
    other.join()


def test_what_the_library_says_against_a_text_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    def train_from_iterator(*_: object) -> None:
        raise MemoryError("no room")

    monkeypatch.setattr(f"{TOKENIZER}.Tokenizer", lambda _model: mock.Mock(train_from_iterator=train_from_iterator))
    with pytest.raises(MemoryError, match="no room"):
        train_tokenizer([Document("a", "aaaa")], 300)


def test_the_tokenizer_knows_the_training_files_alone(text_folder: Path, tmp_path: Path) -> None:
    documents = read_documents(tiny_job(text_folder).data, 0)
    assert train_tokenizer(documents.train, 300).to_str() == train_tokenizer(documents.train, 300).to_str()
    corpus = prepare(text_folder, tmp_path)
    assert corpus.tokenizer_file.read_text() == train_tokenizer(documents.train, 300).to_str(pretty=True)


def test_a_vocabulary_beyond_the_text_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        tokenizer = train_tokenizer([Document("a", "abab")], 1000)
    assert tokenizer.get_vocab_size() < 1000
    assert "fewer than the 1000 that it may have; the rest is never used" in caplog.text


def test_a_vocabulary_below_the_bytes_is_refused(text_folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"job\.model\.vocab_size = 256: is below 257"):
        prepare(text_folder, tmp_path, vocab_size=256)
    with pytest.raises(ConfigError, match=r"job\.model\.vocab_size = 256: is below 257"):  # before any text is read
        prepare(tmp_path / "none", tmp_path, vocab_size=256)


def test_the_second_time_is_a_hit(text_folder: Path, tmp_path: Path) -> None:
    first, second = prepare(text_folder, tmp_path), prepare(text_folder, tmp_path)
    assert (first.facts.cache_hit, second.facts.cache_hit) == (False, True)
    assert dataclasses.replace(second.facts, cache_hit=False) == first.facts
    assert len(list(tmp_path.iterdir())) == 1


def test_the_cache_keeps_the_corpora_used_last(text_folder: Path, tmp_path: Path) -> None:
    def age(folder: Path, hours: float) -> None:
        os.utime(folder, (time.time() - hours * 3600,) * 2)

    corpora = [prepare(text_folder, tmp_path, vocab_size=300 + number).folder for number in range(5)]
    (tmp_path / "building-x").mkdir()
    for hours, folder in enumerate([*corpora, tmp_path / "building-x"], start=2):
        age(folder, hours)
    prepare(text_folder, tmp_path, vocab_size=304)  # a hit: used now, so no longer the oldest
    newest = prepare(text_folder, tmp_path, vocab_size=305).folder
    assert {*tmp_path.iterdir()} == {newest, corpora[4], corpora[0], corpora[1]}


def test_a_corpus_that_another_run_has_just_found_stays(text_folder: Path, tmp_path: Path) -> None:
    corpora = {prepare(text_folder, tmp_path, vocab_size=300 + number).folder for number in range(6)}
    assert {*tmp_path.iterdir()} == corpora


def test_a_corpus_that_a_long_run_trains_on_stays(text_folder: Path, tmp_path: Path) -> None:
    corpora = [prepare(text_folder, tmp_path, vocab_size=300 + number) for number in range(5)]
    for corpus in corpora:
        os.utime(corpus.folder, (0, 0))
    corpora[0].note_in_use()
    newest = prepare(text_folder, tmp_path, vocab_size=305)
    assert {corpora[0].folder, newest.folder} <= {*tmp_path.iterdir()}
    assert len(list(tmp_path.iterdir())) == 4
    dataclasses.replace(newest, folder=tmp_path / "gone").note_in_use()  # no reason to end a run


def test_other_text_or_vocabulary_is_no_hit(tmp_path: Path) -> None:
    folder = tmp_path / "text"
    folder.mkdir()
    for name in ("a.txt", "b.txt", "c.txt"):
        (folder / name).write_text("some text", encoding="utf-8")
    prepare(folder, tmp_path / "cache")
    assert not prepare(folder, tmp_path / "cache", vocab_size=301).facts.cache_hit
    (folder / "c.txt").write_text("SOME TEXT", encoding="utf-8")
    assert not prepare(folder, tmp_path / "cache").facts.cache_hit


@pytest.mark.parametrize("name", ["train.npy", "validation.npy", "tokenizer.json", "facts.json"])
@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_a_damaged_cache_is_built_again(
    text_folder: Path, tmp_path: Path, name: str, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    good = prepare(text_folder, tmp_path)
    file, content = good.folder / name, (good.folder / name).read_bytes()
    file.write_bytes(content[: len(content) // 2] if damage == "cut" else content[:-3] + b"\x00\x01\x02")
    if damage == "gone":
        file.unlink()
    with caplog.at_level(logging.WARNING):
        rebuilt = prepare(text_folder, tmp_path)
    assert rebuilt.facts == good.facts
    assert file.read_bytes() == content
    assert "is damaged" in caplog.text


def test_a_cache_of_another_making_is_built_again(text_folder: Path, tmp_path: Path) -> None:
    facts_file = prepare(text_folder, tmp_path).folder / "facts.json"
    for content in ([], {"digests": {}}, {"digests": {}, "facts": {"tokens": 1}}):
        facts_file.write_text(json.dumps(content), encoding="utf-8")
        assert not prepare(text_folder, tmp_path).facts.cache_hit


def test_too_little_text_is_refused(corpus: Corpus) -> None:
    facts = corpus.facts
    check_enough(facts, "folder", 8, 16)
    with pytest.raises(ConfigError, match=r"job\.data\.folder = folder: gives \d+ tokens to train on, and one global"):
        check_enough(facts, "folder", facts.train_tokens, 16)
    with pytest.raises(ConfigError, match="held-out tokens"):
        check_enough(dataclasses.replace(facts, validation_tokens=16), "", 8, 16)


_PREPARE = """
import sys
from pathlib import Path
from netlayer.config.tree import DataConfig
from trainer.data.prepare import prepare_corpus
sys.stdin.readline()
found = prepare_corpus(DataConfig(folder=sys.argv[1], pattern="*.txt"), 300, 0, Path(sys.argv[2]))
print(found.facts.cache_hit, found.facts.train_tokens)
"""


def test_of_several_processes_one_builds_and_the_others_wait(text_folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", _PREPARE, str(text_folder), str(tmp_path / "cache")]
    pipe = subprocess.PIPE
    ranks = [subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) for _ in range(2)]
    for rank in ranks:  # both have loaded all that they need, or soon will
        assert rank.stdin is not None
        rank.stdin.write("go\n")
        rank.stdin.flush()
    said = [rank.communicate(timeout=100)[0].split() for rank in ranks]
    assert sorted(hit for hit, _ in said) == ["False", "True"]
    assert said[0][1] == said[1][1]
    assert len(list((tmp_path / "cache").iterdir())) == 1


def test_who_waits_for_another_process_says_so(text_folder: Path, tmp_path: Path) -> None:
    """And builds the text itself, where the other one has ended without."""
    opened = os.open(tmp_path / ".corpus.lock", os.O_RDWR | os.O_CREAT)
    fcntl.flock(opened, fcntl.LOCK_EX)
    stages: list[str] = []

    def on_stage(stage: str, _done: int, _total: int) -> None:
        stages.append(stage)
        if stage.startswith("waiting") and stages.count(stage) == 2:
            os.close(opened)

    job = tiny_job(text_folder)
    found = prepare_corpus(job.data, job.model.vocab_size, 0, tmp_path, on_stage)
    assert stages[:3] == ["reading", *["waiting for the text: another process"] * 2]
    assert stages[3] == "training the tokenizer"
    assert not found.facts.cache_hit


def test_a_folder_that_cannot_be_locked_is_used_all_the_same(
    text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EBADF, "no locks on this file system")

    monkeypatch.setattr(fcntl, "flock", refuse)
    assert prepare(text_folder, tmp_path).facts.train_tokens
    assert "cannot be locked" in caplog.text


def test_a_disk_that_is_full_is_an_os_error_and_leaves_no_half(
    text_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np, "save", full)
    with pytest.raises(OSError, match="No space left"):
        prepare(text_folder, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
