"""`netlayer data`: what its commands print, write and end with."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from netlayer.cli import cli
from netlayer.errors import ConfigError

from .token_datasets import some_documents, words, write_jsonl, write_tokenizer

pytestmark = pytest.mark.usefixtures("_no_sync")

DOCUMENTS = some_documents(60)


def call(*arguments: object) -> Result:
    result = CliRunner().invoke(cli, ["data", *map(str, arguments)])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    write_jsonl(tmp_path / "in.jsonl", DOCUMENTS)
    write_tokenizer(tmp_path / "tokenizer.json")
    options = ("--tokenizer", tmp_path / "tokenizer.json", "--out", tmp_path / "tokens", "--workers", 1)
    result = call("prepare", tmp_path / "in.jsonl", *options, "--shard-size", "1KiB")
    num_tokens = sum(len(ids) + 1 for ids in DOCUMENTS)
    assert re.fullmatch(
        rf"{tmp_path}/tokens: {num_tokens:,} tokens of 60 documents in \d+ shards, .*; vocabulary 100\n", result.stdout
    )
    return tmp_path / "tokens"


def test_inspect_shows_counts_and_documents(tokens: Path) -> None:
    output = call("inspect", tokens, "--samples", 2).output
    assert re.search(r"^documents +60 *$", output, re.MULTILINE)
    assert words(DOCUMENTS[0]) in output
    assert words(DOCUMENTS[-1]) in output


def test_inspect_as_json_is_all_there_is_on_stdout(tokens: Path) -> None:
    facts = json.loads(call("inspect", tokens, "--verify", "--json", "-").stdout)
    assert (facts["documents"], facts["vocab_size"], facts["end_of_document"]) == (60, 100, 0)
    assert facts["samples"][0]["first_ids"] == [*DOCUMENTS[0], 0][:16]
    assert {check["is_good"] for check in facts["checks"]} == {True}
    assert facts["provenance"]["sources"]["files"] == 1


def test_inspect_ends_with_1_where_a_check_fails(tokens: Path) -> None:
    shard = tokens / "shard-00000.bin"
    shard.write_bytes(bytes(shard.stat().st_size))
    result = call("inspect", tokens, "--verify")
    assert result.exit_code == 1
    assert re.search(r"shard-00000.bin +WRONG +checksum", result.output)
    assert call("inspect", tokens).exit_code == 0


def test_samples_are_printable(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("bell \x07, \x1b[31mred\x1b[0m, 漢字, a\nline")
    call("prepare", tmp_path / "a.txt", "--tokenizer", "train", "--out", tmp_path / "out", "--workers", 1)
    (sample,) = json.loads(call("inspect", tmp_path / "out", "--json", "-").stdout)["samples"]
    assert sample["text"] == r"bell \x07, \x1b[31mred\x1b[0m, 漢字, a\nline<|end|>"


def test_there_and_back_by_megatrons_files(tokens: Path, tmp_path: Path) -> None:
    assert "60 documents" in call("export", tokens, tmp_path / "web").output
    result = call("inspect", tmp_path / "web", "--tokenizer", tmp_path / "tokenizer.json", "--verify")
    assert words(DOCUMENTS[0]) in result.output
    assert result.exit_code == 0
    call("import", tmp_path / "web", "--out", tmp_path / "back", "--tokenizer", tmp_path / "tokenizer.json")
    before, after = (
        json.loads(call("inspect", folder, "--json", "-").stdout) for folder in (tokens, tmp_path / "back")
    )
    assert {key: before[key] for key in ("tokens", "documents", "samples")} == {
        key: after[key] for key in ("tokens", "documents", "samples")
    }


def test_what_was_skipped_is_said(tmp_path: Path) -> None:
    (tmp_path / "in.jsonl").write_text('{"text": "a"}\n{"text": ""}\n')
    options = ("--tokenizer", "train", "--out", tmp_path / "out", "--workers", 1)
    with pytest.raises(ConfigError, match="line 2 is an empty document"):
        call("prepare", tmp_path / "in.jsonl", *options)
    result = call("prepare", tmp_path / "in.jsonl", *options, "--on-error", "skip")
    assert f"skipped: 1 x empty document, the first: {tmp_path}/in.jsonl: line 2 is an empty document" in result.stderr
    assert "nothing was done" in call("prepare", tmp_path / "in.jsonl", *options, "--on-error", "skip").stderr


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--workers", "2", "--dask", "tcp://127.0.0.1:1"), "--workers = 2: has no effect beside --dask"),
        (("--dask", "tcp://127.0.0.1:1"), "no scheduler answers"),
        (("--shard-size", "many"), "--shard-size = many: 'many' is not a size"),
        (("--shard-size", "0"), "is no size of a shard"),
    ],
)
def test_options_that_cannot_be_used(tmp_path: Path, options: tuple[str, ...], message: str) -> None:
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(ConfigError, match=message):
        call("prepare", tmp_path / "a.txt", "--tokenizer", "train", "--out", tmp_path / "out", *options)


def test_another_tokenizer_than_the_datasets_is_refused(tokens: Path, tmp_path: Path) -> None:
    small = write_tokenizer(tmp_path / "small.json", 9)
    with pytest.raises(ConfigError, match=r"--tokenizer = .*: has 9 token ids, and tokens 100"):
        call("inspect", tokens, "--tokenizer", small)
