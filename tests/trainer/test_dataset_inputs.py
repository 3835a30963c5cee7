"""What input files say, in every format, and how each kind of damage is named.

Reports of other tools whose mistakes stand here: Modalities#283 (the end of a document twice), a saved tokenizer's
maximum length that cuts documents (transformers#5444), lines split at U+2028 (modaic#188), Megatron-LM#62 (an empty
first document), frames of .zst behind the first one, .json files of C4 that are JSON lines.
"""

from __future__ import annotations

import gzip
import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyarrow import ipc, parquet

from netlayer.errors import ConfigError
from trainer.data.dataset.inputs import Damage, Skipped, Text, find_sources, plan_units, read_texts

TEXTS = ["one", "two\u2028lines", "déjà 漢字 🎉", "a\x00b", "  white  "]


def texts(*inputs: Path, field: str = "text", unit_bytes: int = 1 << 30, **options: object) -> list[str | Damage]:
    skipped = Skipped("fail")
    units = plan_units(find_sources(inputs, skipped, **options), unit_bytes, skipped)  # type: ignore[arg-type]
    read = [each for unit in units for piece in unit for each in read_texts(piece, field)]
    return [each.text if isinstance(each, Text) else each for each in read]


def lines(values: list[str], field: str = "text") -> bytes:
    return b"".join(json.dumps({"id": 1, field: value}, ensure_ascii=False).encode() + b"\n" for value in values)


def zstd(data: bytes) -> bytes:
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(data)
    return bytes(sink.getvalue())


def arrow(path: Path, values: list[str | None], kind: pa.DataType | None = None, is_file: bool = False) -> Path:
    table = pa.table({"n": list(range(len(values))), "text": pa.array(values, kind or pa.string())})
    with (ipc.new_file if is_file else ipc.new_stream)(str(path), table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return path


def write_parquet(path: Path, values: list[str | None], kind: pa.DataType | None = None, group: int = 2) -> Path:
    table = pa.table({"n": list(range(len(values))), "text": pa.array(values, kind or pa.string())})
    parquet.write_table(table, path, row_group_size=group)
    return path


def write_text(path: Path, values: list[str]) -> Path:
    path.mkdir()
    for number, value in enumerate(values):
        (path / f"{number}.md").write_bytes(value.encode())
    return path


FORMATS: dict[str, Callable[[Path], Path]] = {
    "text": lambda folder: write_text(folder / "text", TEXTS),
    "jsonl": lambda folder: _write(folder / "a.jsonl", lines(TEXTS)),
    "no last line end": lambda folder: _write(folder / "a.jsonl", lines(TEXTS)[:-1]),
    "crlf and blank lines": lambda folder: _write(folder / "a.ndjson", lines(TEXTS).replace(b"\n", b"\r\n\r\n")),
    "byte-order mark": lambda folder: _write(folder / "a.jsonl", b"\xef\xbb\xbf" + lines(TEXTS)),
    "json of C4": lambda folder: _write(folder / "c4-train.00000-of-01024.json.gz", gzip.compress(lines(TEXTS))),
    "gz of several members": lambda folder: _write(
        folder / "a.jsonl.gz", gzip.compress(lines(TEXTS)[:30]) + gzip.compress(lines(TEXTS)[30:])
    ),
    "zst of several frames": lambda folder: _write(
        folder / "a.jsonl.zst", zstd(lines(TEXTS)[:30]) + zstd(lines(TEXTS)[30:])
    ),
    "parquet": lambda folder: write_parquet(folder / "a.parquet", TEXTS),
    "parquet large": lambda folder: write_parquet(folder / "a.parquet", TEXTS, pa.large_string()),
    "arrow stream": lambda folder: arrow(folder / "a.arrow", TEXTS),
    "arrow file": lambda folder: arrow(folder / "a.arrow", TEXTS, is_file=True),
    "arrow dictionary": lambda folder: arrow(folder / "a.arrow", TEXTS, pa.dictionary(pa.int32(), pa.string())),
}


def _write(path: Path, data: bytes) -> Path:
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("unit_bytes", [1, 60, 1 << 30])
def test_every_format_says_the_same(tmp_path: Path, name: str, unit_bytes: int) -> None:
    assert texts(FORMATS[name](tmp_path), unit_bytes=unit_bytes) == TEXTS


@given(
    values=st.lists(st.text(st.characters(codec="utf-8"), min_size=1, max_size=20), min_size=1),
    unit_bytes=st.integers(1, 300),
)
def test_lines_belong_to_one_piece_wherever_a_file_is_cut(
    tmp_path_factory: pytest.TempPathFactory, values: list[str], unit_bytes: int
) -> None:
    file = _write(tmp_path_factory.mktemp("lines") / "a.jsonl", lines(values))
    assert texts(file, unit_bytes=unit_bytes) == values


def test_a_plan_holds_units_of_about_their_size(tmp_path: Path) -> None:
    for number in range(20):
        (tmp_path / f"{number:02}.txt").write_text("x" * 100)
    sources = find_sources([tmp_path], Skipped("fail"))
    units = plan_units(sources, 250, Skipped("fail"))
    assert [len(unit) for unit in units] == [2] * 10
    assert [piece.source.path for unit in units for piece in unit] == [source.path for source in sources]


def test_inputs_keep_their_order_and_folders_go_by_path(tmp_path: Path) -> None:
    for name in ("b/2.txt", "b/1.txt", "a/x/3.txt", "a/y.md", "a/.hidden/4.txt", "a/_SUCCESS"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(name)
    assert texts(tmp_path / "b", tmp_path / "a") == ["b/1.txt", "b/2.txt", "a/x/3.txt", "a/y.md"]
    assert texts(tmp_path, pattern="*.txt") == ["a/x/3.txt", "b/1.txt", "b/2.txt"]


def test_the_format_can_be_named(tmp_path: Path) -> None:
    assert texts(_write(tmp_path / "part-00000", lines(["one"])), kind="jsonl") == ["one"]


def saved(folder: Path, names: list[str], **state: object) -> Path:
    folder.mkdir(parents=True)
    for number, name in enumerate(names):
        arrow(folder / name, [f"{folder.name} {number}"])
    (folder / "dataset_info.json").write_text("{}")
    files = [{"filename": name} for name in names]
    (folder / "state.json").write_text(json.dumps({"_data_files": files, "_fingerprint": "x", **state}))
    return folder


def test_a_saved_dataset_gives_its_files_in_its_own_order(tmp_path: Path) -> None:
    folder = saved(tmp_path / "train", ["data-00001-of-00002.arrow", "data-00000-of-00002.arrow"])
    (folder / "cache-1.arrow").write_bytes(b"no part of it")
    assert texts(folder) == ["train 0", "train 1"]


def test_of_a_saved_dataset_with_splits_one_is_chosen(tmp_path: Path) -> None:
    for name in ("train", "test"):
        saved(tmp_path / "dict" / name, ["data-00000-of-00001.arrow"])
    (tmp_path / "dict" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    assert texts(tmp_path / "dict", split="test") == ["test 0"]
    for split, message in (
        (None, "has the splits train, test; choose"),
        ("dev", "has the splits train, test, not dev"),
    ):
        with pytest.raises(ConfigError, match=message):
            texts(tmp_path / "dict", split=split)


def test_a_selection_that_was_not_written_out_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "old", ["data.arrow"], _indices_data_files=[{"filename": "indices.arrow"}])
    with pytest.raises(ConfigError, match="holds a selection of rows"):
        texts(folder)


def test_a_file_given_twice_is_refused(tmp_path: Path) -> None:
    file = _write(tmp_path / "a.txt", b"x")
    (tmp_path / "link.txt").symlink_to(file)
    with pytest.raises(ConfigError, match=r"link.txt: is given twice \(also as .*a.txt\)"):
        texts(tmp_path)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda folder: folder / "missing", "there is no such file or folder"),
        (lambda folder: folder, r"holds no file that matches \*"),
        (lambda folder: _write(folder / "a.parquet.gz", b"x"), "is compressed parquet"),
        (lambda folder: _socket(folder / "s").parent, "is no regular file"),
        (lambda folder: _socket(folder / "s"), "is neither a file nor a folder"),
    ],
)
def test_what_is_no_input_is_named(tmp_path: Path, make: Callable[[Path], Path], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        texts(make(tmp_path))


def _socket(path: Path) -> Path:
    before = Path.cwd()
    os.chdir(path.parent)  # an address has room for a hundred characters
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(before)
    return path


DAMAGED: dict[str, tuple[Callable[[Path], Path], str, str, int]] = {
    "empty line": (
        lambda folder: _write(folder / "a.jsonl", lines(["a", "", "b"])),
        "empty document",
        "line 2 is an empty",
        2,
    ),
    "null": (
        lambda folder: _write(folder / "a.jsonl", b'{"text": null}\n' + lines(["a"])),
        "empty document",
        "line 1 is",
        1,
    ),
    "empty file": (lambda folder: write_text(folder / "t", ["", "a"]), "empty document", "is an empty document", 1),
    "empty row": (
        lambda folder: write_parquet(folder / "a.parquet", ["a", None, "b", ""]),
        "empty document",
        "row group 0, row 1",
        2,
    ),
    "bytes": (
        lambda folder: _write(folder / "a.jsonl", lines(["a"]) + b'{"text": "\xff"}\n'),
        "broken UTF-8",
        "byte 0xff at 10",
        1,
    ),
    "latin-1": (lambda folder: _write(folder / "a.txt", "déjà".encode("latin-1")), "broken UTF-8", "byte 0xe9 at 1", 0),
    "half a pair": (
        lambda folder: _write(folder / "a.jsonl", b'{"text": "\\ud800"}\n'),
        "broken UTF-8",
        "surrogates",
        0,
    ),
    "no object": (
        lambda folder: _write(folder / "a.jsonl", b"[1]\n" + lines(["a"])),
        "not JSON",
        "line 1 is a list",
        1,
    ),
    "an array": (lambda folder: _write(folder / "a.json", b"[\n1,\n2\n]\n"), "not JSON", "line 1 is not JSON", 0),
    "cut line": (
        lambda folder: _write(folder / "a.jsonl", lines(["a", "b"])[:-4]),
        "not JSON",
        "line 2 is not JSON",
        1,
    ),
    "deep": (lambda folder: _write(folder / "a.jsonl", b"[" * 100_000 + b"\n"), "not JSON", "line 1 is not JSON", 0),
    "other field": (
        lambda folder: _write(folder / "a.jsonl", lines(["a"], "content")),
        "no text",
        "no field text; it has id, content",
        0,
    ),
    "a number": (
        lambda folder: _write(folder / "a.jsonl", b'{"text": 3}\n'),
        "no text",
        "its field text is a number",
        0,
    ),
    "other column": (
        lambda folder: parquet.write_table(pa.table({"body": ["a"]}), folder / "a.parquet") or folder / "a.parquet",
        "no text",
        "has no column text; it has body",
        0,
    ),
    "column of ids": (
        lambda folder: parquet.write_table(pa.table({"text": [[1, 2]]}), folder / "a.parquet") or folder / "a.parquet",
        "no text",
        "column text is list<element: int64>, no text",
        0,
    ),
    "cut gz": (
        lambda folder: _cut(folder / "a.jsonl.gz", gzip.compress(lines(["a" * 99, "b"])), 9),
        "damaged file",
        "cut off",
        2,
    ),
    "no gz": (lambda folder: _write(folder / "a.jsonl.gz", lines(["a"])), "damaged file", "Not a gzipped file", 0),
    "changed gz": (
        lambda folder: _flipped(folder / "a.txt.gz", gzip.compress(b"abc" * 50)),
        "damaged file",
        "damaged",
        0,
    ),
    "cut zst": (
        lambda folder: _cut(folder / "a.jsonl.zst", zstd(lines(["a", "b"])), 9),
        "damaged file",
        "Truncated",
        0,
    ),
    "no zst": (lambda folder: _write(folder / "a.txt.zst", b"no such thing"), "damaged file", "ZSTD", 0),
    "cut parquet": (
        lambda folder: _cut(folder / "a.parquet", write_parquet(folder / "a.parquet", ["a"]).read_bytes(), 30),
        "damaged file",
        "is no whole parquet file",
        0,
    ),
    "cut arrow": (
        lambda folder: _cut(folder / "a.arrow", arrow(folder / "a.arrow", ["a" * 99] * 9).read_bytes(), 50),
        "damaged file",
        "cut off",
        8,
    ),
    "arrow cut between batches": (
        lambda folder: _cut(folder / "a.arrow", arrow(folder / "a.arrow", ["a"] * 9).read_bytes(), 8),
        "damaged file",
        "was cut off behind row 9: it has no end of stream",
        9,
    ),
    "no arrow": (lambda folder: _write(folder / "a.arrow", b"x" * 99), "damaged file", "damaged", 0),
}


def _cut(path: Path, data: bytes, count: int) -> Path:
    return _write(path, data[:-count])


def _flipped(path: Path, data: bytes) -> Path:
    return _write(path, data[:-6] + bytes([data[-6] ^ 255]) + data[-5:])


@pytest.mark.parametrize("name", DAMAGED)
def test_each_damage_is_named_in_its_place_and_the_rest_is_read(tmp_path: Path, name: str) -> None:
    make, reason, detail, whole = DAMAGED[name]
    path, skipped = make(tmp_path), Skipped("skip")
    units = plan_units(find_sources([path], skipped), 1 << 30, skipped)
    read = [each for unit in units for piece in unit for each in read_texts(piece, "text")]
    for each in read:
        if isinstance(each, Damage):
            skipped.add(each)
    assert set(skipped.counts) == {reason}
    assert detail in skipped.examples[reason]
    assert str(tmp_path) in skipped.examples[reason]
    assert sum(isinstance(each, Text) for each in read) == whole


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_a_file_that_may_not_be_read_is_named(tmp_path: Path) -> None:
    file = _write(tmp_path / "a.txt", b"x")
    file.chmod(0)
    with pytest.raises(ConfigError, match="Permission denied"):
        texts(file)


def test_pyarrow_is_asked_for_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = _write(tmp_path / "a.jsonl.zst", zstd(lines(["a"])))
    monkeypatch.setitem(__import__("sys").modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"needs pyarrow, which is not installed; pip install 'netlayer\[train\]'"):
        texts(file)


@pytest.mark.parametrize(
    ("beginning", "line"),
    [
        (b"BZh91AY&SY", "is compressed by bzip2"),
        (b"\xfd7zXZ\x00", "is compressed by xz"),
        (b"\x04\x22\x4d\x18", "is compressed by lz4"),
        (b"PK\x03\x04", "is a zip archive"),
        (gzip.compress(b"{}", mtime=0), "is compressed by gzip; rename it"),
        (zstd(b"{}"), "is compressed by zstd; rename it"),
        (b"PAR1", "is parquet"),
    ],
    ids=["bzip2", "xz", "lz4", "zip", "gzip", "zstd", "parquet"],
)
def test_a_file_that_is_no_text_is_named_by_its_kind(beginning: bytes, line: str, tmp_path: Path) -> None:
    """Not as broken UTF-8, which a user would try to convert; `file.json.xz` of datasets' own tests was."""
    for name in ("a.json.x", "b.jsonl"):
        file = tmp_path / name
        file.write_bytes(beginning + bytes(100) + b"PAR1")
        with pytest.raises(ConfigError, match=line):
            find_sources([file], Skipped("fail"))
        skipped = Skipped("skip")
        assert (find_sources([file], skipped), skipped.counts) == ([], {"unreadable file": 1})


def test_text_that_begins_as_parquet_does_is_text(tmp_path: Path) -> None:
    file = tmp_path / "abstract.txt"
    file.write_text("PAR1 is a protease-activated receptor.")
    assert len(find_sources([file], Skipped("fail"))) == 1


def test_the_end_of_a_name_may_be_in_capitals(tmp_path: Path) -> None:
    file = tmp_path / "A.JSONL.GZ"
    file.write_bytes(gzip.compress(lines(TEXTS)))
    assert texts(file) == TEXTS


def test_a_frame_with_a_larger_window_than_can_be_read_is_not_called_damaged(tmp_path: Path) -> None:
    """Dumps of web pages come so, compressed by `zstd --long=31`."""
    window = (31 - 10) << 3  # of a frame whose header says 2 GiB, with one empty last block
    (tmp_path / "long.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd\x00" + bytes([window]) + b"\x01\x00\x00")
    [damage] = texts(tmp_path / "long.jsonl.zst")
    assert isinstance(damage, Damage)
    assert "window above 128 MiB" in damage.detail


@pytest.mark.parametrize("is_file", [True, False])
def test_columns_of_views_are_text(is_file: bool, tmp_path: Path) -> None:
    """Polars writes these."""
    assert texts(arrow(tmp_path / "a.arrow", [*TEXTS], pa.string_view(), is_file)) == TEXTS
