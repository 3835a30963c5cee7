"""Preparing a dataset: the same tokens whoever works at it, resumed where it was killed, whole or not there at all."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from netlayer.errors import ConfigError
from netlayer.lock import claimed
from tests.forked import run_module
from trainer.data.dataset import TokenFolder
from trainer.data.dataset import writer as dataset_writer
from trainer.data.dataset.inputs import Piece, Source
from trainer.data.dataset.prepare import Task, notes, tokenize_unit
from trainer.data.dataset.vocabulary import LossCounter
from trainer.data.dataset.writer import part_folder
from trainer.data.tokenizer import END_OF_DOCUMENT

from .token_datasets import END, prepare, some_documents, stream, write_jsonl, write_tokenizer

pytestmark = pytest.mark.usefixtures("_no_sync")

DOCUMENTS = some_documents(200, seed=5)


@pytest.fixture
def tokenizer(tmp_path: Path) -> Path:
    return write_tokenizer(tmp_path / "tokenizer.json")


@pytest.fixture
def jsonl(tmp_path: Path) -> Path:
    return write_jsonl(tmp_path / "in.jsonl", DOCUMENTS)


def content(folder: Path) -> dict[str, bytes]:
    """All files of a dataset but the manifest, which has a date."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}


def test_tokens_are_the_same_whatever_the_number_of_workers(tmp_path: Path, tokenizer: Path, jsonl: Path) -> None:
    one = prepare(tmp_path / "one", jsonl, tokenizer=tokenizer, unit_bytes=2000)
    three = prepare(tmp_path / "three", jsonl, tokenizer=tokenizer, unit_bytes=2000, workers=3)
    assert len(one.manifest.shards) > 5
    assert content(tmp_path / "one") == content(tmp_path / "three")
    assert one.manifest.fingerprint == three.manifest.fingerprint
    np.testing.assert_array_equal(TokenFolder(tmp_path / "one").read(0, one.manifest.tokens), stream(DOCUMENTS))


@pytest.mark.filterwarnings("default")  # distributed's own, of closing loops
def test_dask_gives_the_same_tokens(tmp_path: Path, tokenizer: Path, jsonl: Path) -> None:
    distributed = pytest.importorskip("distributed", reason="needs dask[distributed]")
    from trainer.data.dataset.prepare import PrepareOptions, prepare_dataset

    prepare(tmp_path / "here", jsonl, tokenizer=tokenizer, unit_bytes=2000)
    options = PrepareOptions((jsonl,), str(tokenizer), unit_bytes=2000)
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=2, processes=False, dashboard_address=None, host="127.0.0.1", protocol="tcp://"
    ) as local:
        prepare_dataset(options, tmp_path / "dask", dask=local.scheduler_address, on_stage=lambda *_: None)
    assert content(tmp_path / "dask") == content(tmp_path / "here")


def test_a_tokenizer_is_trained_from_all_inputs(tmp_path: Path) -> None:
    for name, word in (("a.txt", "rank "), ("b.txt", "link ")):
        (tmp_path / name).write_text(word * 500)
    prepared = prepare(
        tmp_path / "out", tmp_path / "a.txt", tmp_path / "b.txt", tokenizer="train", vocab_size=266, unit_bytes=1
    )
    tokens = TokenFolder(tmp_path / "out")
    decoder = Tokenizer.from_file(str(tokens.tokenizer_file))
    texts = [decoder.decode(tokens.read(tokens.document_start(number), 500)[:400].tolist()) for number in range(2)]
    assert [text[:5] for text in texts] == ["rank ", "link "]
    assert prepared.manifest.vocab_size <= 266
    assert {" rank", " link"} & {decoder.decode([number]) for number in range(266)}


def test_a_saved_tokenizer_cuts_pads_and_adds_nothing(tmp_path: Path) -> None:
    """One that was last used with a maximum length, padding and a template that adds a beginning and an end."""
    tokenizer = Tokenizer.from_file(str(write_tokenizer(tmp_path / "plain.json")))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.post_processor = processors.TemplateProcessing(f"t9 $A {END}", special_tokens=[("t9", 9), (END, 0)])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    documents = [[1, 2, 3, 4, 5, 6, 7], [8]]
    prepare(tmp_path / "out", write_jsonl(tmp_path / "in.jsonl", documents), tokenizer=tmp_path / "tokenizer.json")
    tokens = TokenFolder(tmp_path / "out")
    assert tokens.read(0, tokens.num_tokens).tolist() == [1, 2, 3, 4, 5, 6, 7, 0, 8, 0]


def test_the_end_of_a_document_in_a_text_is_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text(f"end = '{END_OF_DOCUMENT}'\n" * 9)
    trained = prepare(tmp_path / "trained", tmp_path / "a.txt", tokenizer="train", vocab_size=270)
    again = prepare(tmp_path / "again", tmp_path / "a.txt", tokenizer=tmp_path / "trained")
    assert trained.manifest.fingerprint == again.manifest.fingerprint
    tokens = TokenFolder(tmp_path / "again")
    ids = tokens.read(0, tokens.num_tokens).tolist()
    assert ids.count(tokens.manifest.end_of_document) == 1
    decoder = Tokenizer.from_file(str(tokens.tokenizer_file))
    assert decoder.decode(ids, skip_special_tokens=False) == f"end = '{END_OF_DOCUMENT}'\n" * 9 + END_OF_DOCUMENT


def test_the_end_is_the_one_named_else_the_one_of_the_configuration_beside(
    tmp_path: Path, jsonl: Path, tokenizer: Path
) -> None:
    def end(name: str, **options: object) -> int | None:
        return prepare(tmp_path / name, jsonl, tokenizer=tokenizer, **options).manifest.end_of_document

    assert end("usual") == 0
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": {"content": "t7"}}))
    assert end("beside") == 7
    assert end("named", end_token="t8") == 8
    with pytest.raises(
        ConfigError, match=r"--eod = </s>: is no token of .*; give one of its own, such as <\|endoftext\|>"
    ):
        end("missing", end_token="</s>")


def test_a_tokenizer_without_an_end_is_refused(tmp_path: Path, jsonl: Path) -> None:
    file = write_tokenizer(tmp_path / "other.json", end="[SEP]")
    with pytest.raises(
        ConfigError, match=r"has none of the usual tokens that end a document; name it with --eod, such as \[SEP\]"
    ):
        prepare(tmp_path / "out", jsonl, tokenizer=file)


def test_ids_with_gaps_count_to_the_largest(tmp_path: Path) -> None:
    """Llama and others have fewer tokens than their largest id: the embedding needs the id."""
    tokenizer = Tokenizer(models.WordLevel({END: 0, "t1": 1, "t70000": 70_000}, unk_token="t1"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(tmp_path / "gaps.json"))
    manifest = prepare(
        tmp_path / "out", write_jsonl(tmp_path / "in.jsonl", [[70_000, 1]]), tokenizer=tmp_path / "gaps.json"
    ).manifest
    assert (manifest.vocab_size, manifest.dtype) == (70_001, "uint32")
    assert TokenFolder(tmp_path / "out").read(0, 3).tolist() == [70_000, 1, 0]


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("{}", {}, "--tokenizer = .*: cannot be read"),
        (None, {}, "--tokenizer = .*: cannot be read"),
        ("", {"vocab_size": 99}, "--vocab-size = 99: is below the 100 token ids of"),
    ],
)
def test_a_wrong_tokenizer_is_one_line_before_anything_starts(
    tmp_path: Path, jsonl: Path, text: str | None, options: dict[str, int], message: str
) -> None:
    file = tmp_path / "wrong.json"
    if text == "":
        write_tokenizer(file)
    elif text:
        file.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        prepare(tmp_path / "out", jsonl, tokenizer=file, **options)
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_text_that_the_tokenizer_has_no_token_for_is_named(tmp_path: Path) -> None:
    tokenizer = Tokenizer(models.WordLevel({END: 0, "t1": 1}))
    tokenizer.save(str(tmp_path / "small.json"))
    with pytest.raises(ConfigError, match=r"--tokenizer: cannot encode .*in.jsonl, line 1"):
        prepare(tmp_path / "out", write_jsonl(tmp_path / "in.jsonl", [[5]]), tokenizer=tmp_path / "small.json")


def test_damage_ends_it_with_nothing_published_or_is_counted(tmp_path: Path, tokenizer: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_bytes(b'{"text": "t1"}\n{"text": ""}\n{"text": "\xff"}\n{"text": "   "}\n{"text": "t2"}\n')
    with pytest.raises(ConfigError, match=r"INPUT = .*in.jsonl: line 2 is an empty document; fix it, or skip"):
        prepare(tmp_path / "out", file, tokenizer=tokenizer)
    assert not (tmp_path / "out").exists()
    prepared = prepare(tmp_path / "out", file, tokenizer=tokenizer, on_error="skip")
    assert prepared.skipped == {"empty document": 2, "broken UTF-8": 1}  # white space gives no token either
    assert prepared.examples["broken UTF-8"].endswith("line 3 is not UTF-8 (byte 0xff at 10)")
    assert prepared.manifest.provenance["skipped"] == prepared.skipped
    tokens = TokenFolder(tmp_path / "out")
    assert tokens.read(0, tokens.num_tokens).tolist() == [1, 0, 2, 0]


def test_what_was_skipped_before_is_an_error_once_nothing_may_be(tmp_path: Path, tokenizer: Path) -> None:
    """Shards that a run with `skip` has finished do not hide their damage from one without."""
    file = tmp_path / "in.jsonl"
    file.write_bytes(b'{"text": "t1"}\n{"text": ""}\n' * 40)
    kill_after(tmp_path, file, tokenizer, shards=2, on_error="skip")
    with pytest.raises(ConfigError, match="is an empty document"):
        prepare(tmp_path / "out", file, tokenizer=tokenizer, unit_bytes=200)


def test_a_shard_whose_documents_are_all_skipped_is_no_shard(tmp_path: Path, tokenizer: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text('{"text": ""}\n' * 20 + '{"text": "t1"}\n' + '{"text": ""}\n' * 20)
    prepared = prepare(tmp_path / "out", file, tokenizer=tokenizer, on_error="skip", unit_bytes=100)
    assert len(prepared.manifest.shards) == 1
    assert len(list((tmp_path / "out").glob("shard-*"))) == 1
    assert TokenFolder(tmp_path / "out").read(0, 2).tolist() == [1, 0]


def test_inputs_without_a_document_are_refused(tmp_path: Path, tokenizer: Path) -> None:
    file = tmp_path / "in.jsonl"
    file.write_text('{"text": ""}\n')
    with pytest.raises(ConfigError, match=r"holds no document that can be used \(1 empty document\)"):
        prepare(tmp_path / "out", file, tokenizer=tokenizer, on_error="skip")
    # Nothing is left that would bind the next run to these inputs.
    assert list(tmp_path.glob(".*")) == []
    file.write_text("\n")
    with pytest.raises(ConfigError, match=r"holds no document that can be used \(no text\)"):
        prepare(tmp_path / "other", file, tokenizer=tokenizer)
    file.write_text("")
    with pytest.raises(ConfigError, match=r"INPUT = .*in.jsonl: is empty; give files with text"):
        prepare(tmp_path / "other", file, tokenizer=tokenizer)


def test_sources_and_their_checksums_are_kept(tmp_path: Path, tokenizer: Path, jsonl: Path) -> None:
    prepare(tmp_path / "out", jsonl, tokenizer=tokenizer, unit_bytes=2000)
    (row,) = json.loads((tmp_path / "out" / "sources.json").read_text())
    done = subprocess.run(["b2sum", "-l", "128", str(jsonl)], capture_output=True, text=True, check=True)
    assert row == {"file": str(jsonl), "bytes": jsonl.stat().st_size, "checksum": done.stdout.split()[0]}


PROGRAM = """
import os, signal, sys
from pathlib import Path
from trainer.data.dataset import prepare as module
from trainer.data.dataset.prepare import PrepareOptions, prepare_dataset

out, file, tokenizer, on_error, kind, number = sys.argv[1:]
left = int(number)

def kill(_descriptor=None):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

def on_stage(stage, done, total, words):
    if kind == "shards" and "shards" in words:
        kill()

os.fsync = kill if kind == "fsync" else lambda _descriptor: None
options = PrepareOptions((Path(file),), tokenizer, on_error=on_error, unit_bytes=200 if kind == "shards" else 6000)
prepare_dataset(options, Path(out), workers=1, on_stage=on_stage)
"""


def kill_after(
    folder: Path, file: Path, tokenizer: Path, *, shards: int = 0, fsyncs: int = 0, on_error: str = "fail"
) -> int:
    """Prepare in a process that kills itself at this point; its exit code."""
    kind, number = ("shards", shards) if shards else ("fsync", fsyncs)
    done = run_module("tests.program", PROGRAM, folder / "out", file, tokenizer, on_error, kind, number)
    return done.returncode


def test_a_killed_run_goes_on_where_it_stopped(tmp_path: Path, tokenizer: Path, jsonl: Path) -> None:
    assert kill_after(tmp_path, jsonl, tokenizer, shards=4) == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    part = part_folder(tmp_path / "out") / "dataset"
    before = {path.name: path.stat().st_mtime_ns for path in part.glob("shard-*")}
    assert len(before) == 4
    damaged = part / "shard-00002.bin"
    damaged.write_bytes(b"x" * damaged.stat().st_size)
    prepared = prepare(tmp_path / "out", jsonl, tokenizer=tokenizer, unit_bytes=200)
    assert prepared.shards_reused == 3
    kept = {name for name, time_ns in before.items() if (tmp_path / "out" / name).stat().st_mtime_ns == time_ns}
    assert kept == set(before) - {damaged.name}
    prepare(tmp_path / "whole", jsonl, tokenizer=tokenizer, unit_bytes=200)
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert sorted(path.name for path in tmp_path.glob(".*")) == []


def test_a_run_killed_at_any_sync_leaves_all_or_nothing(tmp_path: Path, tokenizer: Path, jsonl: Path) -> None:
    prepare(tmp_path / "whole", jsonl, tokenizer=tokenizer, unit_bytes=6000)
    kills = 0
    for number in range(1, 100):
        folder = tmp_path / str(number)
        folder.mkdir()
        code = kill_after(folder, jsonl, tokenizer, fsyncs=number)
        if (folder / "out").exists():
            assert content(folder / "out") == content(tmp_path / "whole")
        if code == 0:
            break
        kills += 1
        assert prepare(folder / "out", jsonl, tokenizer=tokenizer, unit_bytes=6000).manifest.documents == 200
        assert content(folder / "out") == content(tmp_path / "whole")
        assert list(folder.iterdir()) == [folder / "out"]
    assert kills > 10


def test_a_finished_dataset_asked_for_again_is_there(tmp_path: Path, tokenizer: Path, jsonl: Path) -> None:
    first = prepare(tmp_path / "out", jsonl, tokenizer=tokenizer)
    again = prepare(tmp_path / "out", jsonl, tokenizer=tokenizer)
    assert again.was_there
    assert again.manifest == first.manifest


def test_another_dataset_in_its_place_is_refused(tmp_path: Path, tokenizer: Path, jsonl: Path) -> None:
    prepare(tmp_path / "out", jsonl, tokenizer=tokenizer)
    other = write_jsonl(tmp_path / "other.jsonl", DOCUMENTS[:5])
    with pytest.raises(ConfigError, match="holds a dataset already"):
        prepare(tmp_path / "out", other, tokenizer=tokenizer)
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "a").touch()
    with pytest.raises(ConfigError, match="is there already, and not empty"):
        prepare(tmp_path / "files", jsonl, tokenizer=tokenizer)


@pytest.mark.parametrize("change", ["inputs", "--field", "--eod", "--tokenizer"])
def test_a_begun_dataset_is_not_gone_on_with_otherwise(
    tmp_path: Path, tokenizer: Path, jsonl: Path, change: str
) -> None:
    assert kill_after(tmp_path, jsonl, tokenizer, shards=2) == -signal.SIGKILL
    options: dict[str, object] = {"tokenizer": tokenizer, "unit_bytes": 200}
    if change == "inputs":
        jsonl.write_text(jsonl.read_text() + '{"text": "t1"}\n')
    elif change == "--field":
        options["text_field"] = "body"
    elif change == "--eod":
        options["end_token"] = "t5"
    else:
        options["tokenizer"] = write_tokenizer(tmp_path / "more.json", 101)
    with pytest.raises(
        ConfigError, match=rf"was begun otherwise \({change} differ\), and is not finished; .* remove .*\.out\.part"
    ):
        prepare(tmp_path / "out", jsonl, **options)  # type: ignore[arg-type]


def test_after_an_error_before_the_first_shard_nothing_is_left(tmp_path: Path, jsonl: Path) -> None:
    for tokenizer in ("train", str(write_tokenizer(tmp_path / "tokenizer.json"))):
        with pytest.raises(ConfigError, match="line 1 has no field body; it has text"):
            prepare(tmp_path / "out", jsonl, tokenizer=tokenizer, text_field="body")
        assert not list(tmp_path.glob("*out*"))


def test_a_plan_killed_before_its_first_shard_binds_nobody(tmp_path: Path, tokenizer: Path, jsonl: Path) -> None:
    assert kill_after(tmp_path, jsonl, tokenizer, fsyncs=2) == -signal.SIGKILL
    assert part_folder(tmp_path / "out").exists()
    assert prepare(tmp_path / "out", jsonl, tokenizer=tokenizer, end_token="t5").manifest.end_of_document == 5


def test_two_runs_do_not_make_one_dataset_at_once(tmp_path: Path, tokenizer: Path, jsonl: Path) -> None:
    with claimed(tmp_path / ".out.part.lock"), pytest.raises(ConfigError, match="is being made by process"):
        prepare(tmp_path / "out", jsonl, tokenizer=tokenizer)


def test_a_full_disk_is_one_line_and_the_next_run_goes_on(
    tmp_path: Path, tokenizer: Path, jsonl: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = 0

    def fsync(_descriptor: int) -> None:
        nonlocal calls
        calls += 1
        if calls == 9:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(dataset_writer.os, "fsync", fsync)
        with pytest.raises(ConfigError, match=r"--out = .*: cannot be written \(No space left on device\); make room"):
            prepare(tmp_path / "out", jsonl, tokenizer=tokenizer, unit_bytes=200)
    assert not (tmp_path / "out").exists()
    prepared = prepare(tmp_path / "out", jsonl, tokenizer=tokenizer, unit_bytes=200)
    assert prepared.shards_reused == 2
    np.testing.assert_array_equal(TokenFolder(tmp_path / "out").read(0, prepared.manifest.tokens), stream(DOCUMENTS))


def test_an_input_that_changes_is_named_and_its_shard_is_not_kept(tmp_path: Path, tokenizer: Path, jsonl: Path) -> None:
    """Also on a host whose file of this name is another one: skipping would make other tokens of it."""
    stat = jsonl.stat()
    source = Source(str(jsonl), "jsonl", "", stat.st_size, stat.st_mtime_ns)
    for changed in (Source(**{**vars(source), "mtime_ns": 1}), Source(**{**vars(source), "path": str(tmp_path / "x")})):
        (tmp_path / "part" / "dataset").mkdir(parents=True, exist_ok=True)
        task = Task(0, (Piece(changed, 1),), tmp_path / "part", "", 0, "uint16", "text", "skip")
        with pytest.raises(ConfigError, match=r"changed while it was read|all workers must see the inputs"):
            tokenize_unit(task)
        assert not list((tmp_path / "part").rglob("shard*"))


def test_unknown_tokens_are_counted_and_warned_of(tmp_path: Path, tokenizer: Path) -> None:
    """A public vocabulary of whole words turned 97% of scientific papers into its unknown token, without a word."""
    file = tmp_path / "texts.jsonl"
    file.write_text('{"text": "t2 nobody knows t3"}\n{"text": "t4"}\n')
    prepared = prepare(tmp_path / "out", file, tokenizer=tokenizer)
    assert prepared.manifest.provenance["unknown_tokens"] == 2
    assert [line for line in notes(prepared) if line.startswith("warning: 2 of 7 tokens (28.6%)")]
    again = prepare(tmp_path / "out", file, tokenizer=tokenizer)
    assert [line for line in notes(again) if "2 of 7 tokens" in line]


def test_characters_that_are_dropped_without_a_token_are_counted() -> None:
    """By what does not come back: a byte-level BPE without all bytes, as a public one for tests is, and a plain one."""
    text = "a b\u00e9\u00e9 \U0001f389 ba\n\n"
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    (newline,), (accent, _) = "\u010a", "\u00c3\u00a9"
    for lacking in ([], [newline], [accent], [newline, accent]):
        letters = [letter for letter in alphabet if letter not in lacking]
        tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, []))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        losses = LossCounter(tokenizer)
        losses.add(text, tokenizer.encode(text).ids)
        assert losses.dropped == text.count("\n") * (newline in lacking) + text.count("\u00e9") * (accent in lacking)
        assert (tokenizer.decode(tokenizer.encode(text).ids) == text) == (not losses.dropped)
    plain = Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    plain.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    losses = LossCounter(plain)
    losses.add(text, plain.encode(text).ids)
    assert losses.dropped == 3


def test_a_readme_next_to_rows_is_named(tmp_path: Path, tokenizer: Path) -> None:
    """A dataset that was cloned has one, and it is read as a text."""
    folder = tmp_path / "cloned"
    folder.mkdir()
    write_jsonl(folder / "rows.jsonl", [[2, 3]])
    (folder / "README.md").write_text("t2 t3 t4")
    prepared = prepare(tmp_path / "both", folder, tokenizer=tokenizer)
    assert any("README.md; omit them with --pattern" in line for line in notes(prepared))
    alone = prepare(tmp_path / "alone", folder, tokenizer=tokenizer, pattern="*.jsonl")
    assert not list(notes(alone))
