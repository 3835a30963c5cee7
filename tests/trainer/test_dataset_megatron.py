"""Megatron's .bin and .idx: read in place, imported and exported, and equal to what its own reader and writer say.

Reports that stand here: Megatron-LM#1672 (pointers that overflow at 2 GiB), #81 and NeMo#9821 (a merge that forgets the
documents), Megatron-LM#718 (documents that do not end with the sequences).
"""

from __future__ import annotations

import itertools
import json
import os
import pickle
import signal
import struct
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netlayer.errors import ConfigError
from tests.forked import run_module
from trainer.data.dataset import MegatronTokens, TokenFolder, open_dataset
from trainer.data.dataset.convert import ImportOptions, export_megatron, import_megatron
from trainer.data.dataset.megatron import write_megatron_index
from trainer.data.source import TokenDataset

from .token_datasets import some_documents, stream, write_dataset, write_tokenizer

pytestmark = pytest.mark.usefixtures("_no_sync")

CODES = {"uint8": 1, "int16": 3, "int32": 4, "int64": 5, "float32": 7, "uint16": 8}


def write_megatron(
    prefix: Path,
    documents: Sequence[Sequence[Sequence[int]]],
    dtype: str = "uint16",
    *,
    pointers: list[int] | None = None,
    document_indices: list[int] | None = None,
    modes: bool = False,
    version: int = 1,
    code: int | None = None,
) -> Path:
    """Write documents of sequences as the format's description says, or with one table replaced."""
    sequences = [np.array(ids, dtype) for document in documents for ids in document]
    lengths = np.array([len(ids) for ids in sequences], "<i4")
    starts = np.cumsum([0, *(ids.nbytes for ids in sequences)])[:-1] if pointers is None else np.array(pointers)
    indices = np.cumsum([0, *map(len, documents)]) if document_indices is None else np.array(document_indices)
    with prefix.with_name(prefix.name + ".idx").open("wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QB", version, code or CODES[dtype]))
        file.write(struct.pack("<QQ", len(lengths), len(indices)))
        for table, kind in ((lengths, "<i4"), (starts, "<i8"), (indices, "<i8")):
            file.write(table.astype(kind).tobytes())
        if modes:
            file.write(bytes(len(lengths)))
    prefix.with_name(prefix.name + ".bin").write_bytes(b"".join(ids.tobytes() for ids in sequences))
    return prefix


def import_(prefix: Path, out: Path, **options: object) -> TokenFolder:
    import_megatron(prefix, out, ImportOptions(**options), lambda *_: None)  # type: ignore[arg-type]
    return TokenFolder(out)


def export(dataset: TokenFolder, prefix: Path) -> MegatronTokens:
    export_megatron(dataset, prefix, lambda *_: None)
    return MegatronTokens(prefix)


SOME = [[[5, 6], [7, 0]], [[1, 2, 3, 0]], [[9], [], [8, 0]]]
FLAT = [5, 6, 7, 0, 1, 2, 3, 0, 9, 8, 0]


@pytest.mark.parametrize("dtype", ["uint8", "int16", "int32", "int64", "uint16"])
@pytest.mark.parametrize("suffix", ["", ".bin", ".idx"])
def test_it_is_a_token_dataset_in_every_dtype(tmp_path: Path, dtype: str, suffix: str) -> None:
    prefix = write_megatron(tmp_path / "web_text.v1", SOME, dtype)
    tokens = open_dataset(prefix.with_name(prefix.name + suffix))
    assert isinstance(tokens, TokenDataset)
    assert isinstance(tokens, MegatronTokens)
    assert (tokens.name, tokens.num_tokens, tokens.num_documents, tokens.vocab_size) == ("web_text.v1", 11, 3, 10)
    assert tokens.read(0, 11).tolist() == FLAT
    assert tokens.read(3, 4).dtype == np.int32
    assert [tokens.document_start(number) for number in range(4)] == [0, 4, 8, 11]
    assert [tokens.document_at(token) for token in range(11)] == [0] * 4 + [1] * 4 + [2] * 3
    assert all(check.is_good for check in tokens.checks())
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(tokens)).read(2, 5), FLAT[2:7])


@given(
    documents=st.lists(
        st.lists(st.lists(st.integers(0, 99), max_size=4), min_size=1, max_size=4), min_size=1, max_size=8
    ).filter(lambda documents: any(ids for document in documents for ids in document)),
    shard_tokens=st.integers(1, 20),
)
def test_an_import_says_the_same(
    tmp_path_factory: pytest.TempPathFactory, documents: list[list[list[int]]], shard_tokens: int
) -> None:
    """Empty sequences and documents too."""
    folder = tmp_path_factory.mktemp("import")
    original = MegatronTokens(write_megatron(folder / "in", documents))
    imported = import_(folder / "in", folder / "out", shard_tokens=shard_tokens)
    flat = [token for document in documents for ids in document for token in ids]
    for tokens in (original, imported):
        assert tokens.read(0, tokens.num_tokens).tolist() == flat
        starts = np.cumsum([0, *(sum(map(len, document)) for document in documents)]).tolist()
        assert [tokens.document_start(number) for number in range(len(documents) + 1)] == starts
        owners = [number for number, document in enumerate(documents) for ids in document for _ in ids]
        assert [tokens.document_at(token) for token in range(len(flat))] == owners
    assert all(check.is_good for check in imported.checks())


@pytest.mark.parametrize("vocab_size", [100, 70_000])
def test_an_export_comes_back_the_same(tmp_path: Path, vocab_size: int) -> None:
    documents = [*some_documents(50, vocab_size=vocab_size), [vocab_size - 1]]
    dataset = write_dataset(tmp_path, documents, unit_bytes=500, vocab_size=vocab_size)
    exported = export(dataset, tmp_path / "out")
    assert exported.dtype == ("uint16" if vocab_size == 100 else "int32")
    np.testing.assert_array_equal(exported.read(0, exported.num_tokens), stream(documents))
    assert exported.num_sequences == exported.num_documents == 51
    back = import_(tmp_path / "out", tmp_path / "back", tokenizer=tmp_path / "tokenizer.json")
    assert [shard.tokens for shard in dataset.manifest.shards] != [shard.tokens for shard in back.manifest.shards]
    assert (back.manifest.documents, back.manifest.end_of_document, back.vocab_size) == (51, 0, vocab_size)
    np.testing.assert_array_equal(back.read(0, back.num_tokens), stream(documents))


def big_lengths() -> Iterator[np.ndarray]:
    yield np.array([2**30, 2**30], np.int64)
    yield np.array([2**30], np.int64)


def test_pointers_go_past_two_gibibytes(tmp_path: Path) -> None:
    """Three documents of 2 GiB, in a sparse file."""
    with (tmp_path / "big.idx").open("wb") as file:
        write_megatron_index(file.write, "uint16", 3, big_lengths)
    with (tmp_path / "big.bin").open("wb") as file:
        file.truncate(3 * 2**31)
        file.seek(3 * 2**31 - 4)
        file.write(struct.pack("<HH", 7, 9))
    tokens = MegatronTokens(tmp_path / "big", vocab_size=10)
    assert tokens.num_tokens == 3 * 2**30
    assert [tokens.document_start(number) for number in range(4)] == [0, 2**30, 2**31, 3 * 2**30]
    assert tokens.document_at(2**31) == 2
    assert tokens.read(tokens.num_tokens - 2, 2).tolist() == [7, 9]


def test_the_fingerprint_follows_the_files_and_not_their_place(tmp_path: Path) -> None:
    fingerprints = []
    for number, documents in enumerate((SOME, SOME, [*SOME, [[4, 0]]], [*SOME[:2], [[9], [], [7, 0]]])):
        (tmp_path / str(number)).mkdir()
        fingerprints.append(MegatronTokens(write_megatron(tmp_path / str(number) / "in", documents)).fingerprint)
    assert fingerprints[0] == fingerprints[1]
    assert len(set(fingerprints)) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"modes": True}, "has modes of a multimodal dataset"),
        ({"version": 2}, "has version 2, known is 1"),
        ({"dtype": "float32"}, "has tokens of dtype float32"),
        ({"code": 99}, "has tokens of dtype code 99"),
        ({"document_indices": [0, 2]}, "has documents of sequences 0 to 2, and there are 6"),
        ({"document_indices": [0]}, "has no document"),
        ({"pointers": [0, 4, 8, 16, 18, -(2**31)]}, "write it again: it was merged or written by a faulty version"),
        ({"pointers": [0, 4, 8, 16, 18, 20]}, "has sequences up to byte 24 of in.bin, which has 22"),
    ],
)
def test_an_index_that_cannot_be_right_is_refused_at_once(
    tmp_path: Path, options: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        open_dataset(write_megatron(tmp_path / "in", SOME, **options), field="DIR")  # type: ignore[arg-type]
    assert str(caught.value).startswith(f"DIR = {tmp_path / 'in.idx'}: ")


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda prefix: os.truncate(f"{prefix}.bin", 20), "has sequences up to byte 22 of in.bin, which has 20"),
        (lambda prefix: os.truncate(f"{prefix}.idx", 99), "has 99 bytes, and its header says"),
        (lambda prefix: os.truncate(f"{prefix}.idx", 5), "is no index of Megatron"),
        (lambda prefix: Path(f"{prefix}.bin").unlink(), r"in.bin: cannot be read \(No such file"),
    ],
)
def test_files_that_were_cut_off_are_refused_at_once(tmp_path: Path, damage: object, message: str) -> None:
    prefix = write_megatron(tmp_path / "in", SOME)
    damage(prefix)  # type: ignore[operator]
    with pytest.raises(ConfigError, match=message):
        open_dataset(prefix)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pointers": [0, 4, 6, 16, 18, 18]}, "sequences: sequence 2 does not start where the one in front of it ends"),
        ({"document_indices": [0, 4, 3, 6]}, "documents: document 1 ends before it starts"),
    ],
)
def test_an_import_looks_at_every_entry(tmp_path: Path, options: dict[str, list[int]], message: str) -> None:
    prefix = write_megatron(tmp_path / "in", SOME, **options)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=message):
        import_(prefix, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_id_that_is_none_is_refused(tmp_path: Path) -> None:
    for number, value in enumerate((-1, 2**33)):
        prefix = write_megatron(tmp_path / str(number), [[[1, value]]], "int64")
        with pytest.raises(ConfigError, match="token ids: from"):
            import_(prefix, tmp_path / "out")


def test_the_vocabulary_of_an_import(tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path / "in", SOME)
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json", 50)
    assert import_(prefix, tmp_path / "0").vocab_size == 10
    with_size = import_(prefix, tmp_path / "1", vocab_size=64, end_token="0").manifest
    assert (with_size.vocab_size, with_size.end_of_document, with_size.tokenizer) == (64, 0, None)
    with_tokenizer = import_(prefix, tmp_path / "2", tokenizer=tokenizer)
    assert (with_tokenizer.vocab_size, with_tokenizer.manifest.end_of_document) == (50, 0)
    assert with_tokenizer.tokenizer_file == tmp_path / "2" / "tokenizer.json"
    small = write_tokenizer(tmp_path / "small.json", 9)
    for options, message in (
        ({"tokenizer": small}, "--tokenizer = .*small.json: has 9 tokens, and the largest id of .* is 9"),
        ({"vocab_size": 9}, "--vocab-size = 9: has 9 tokens"),
        ({"end_token": "</s>"}, "--eod = </s>: is the name of a token, and no tokenizer is named"),
    ):
        with pytest.raises(ConfigError, match=message):
            import_(prefix, tmp_path / "3", **options)


def test_an_export_overwrites_nothing(tmp_path: Path) -> None:
    dataset = write_dataset(tmp_path, [[1]])
    (tmp_path / "out.bin").write_text("somebody's")
    with pytest.raises(ConfigError, match=r"out.bin: is there already"):
        export(dataset, tmp_path / "out")
    with pytest.raises(ConfigError, match="cannot be written"):
        export(dataset, tmp_path / "missing" / "out")


KILLED = """
import os, signal, sys
from pathlib import Path
from trainer.data.dataset import TokenFolder, convert

kind, source, target, number = sys.argv[1:]
left = int(number)

def kill(_descriptor):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), signal.SIGKILL)

os.fsync = kill
convert._BLOCK, convert._NOTE_EVERY = 64, 128
if kind == "import":
    convert.import_megatron(Path(source), Path(target), convert.ImportOptions(shard_tokens=300), lambda *_: None)
else:
    convert.export_megatron(TokenFolder(Path(source)), Path(target), lambda *_: None)
"""


def killed(kind: str, source: Path, target: Path, fsyncs: int) -> int:
    """Import or export in a process that kills itself at this sync to the disk; its exit code."""
    return run_module("tests.program", KILLED, kind, source, target, fsyncs).returncode


def content(folder: Path) -> dict[str, bytes]:
    """Return the files of a folder; of a manifest what does not name the run."""
    files = {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.name != "manifest.json"}
    manifest = folder / "manifest.json"
    return files | ({"fingerprint": json.loads(manifest.read_text())["fingerprint"]} if manifest.exists() else {})


@pytest.mark.parametrize("fsyncs", [1, 4, 7, 9, 12])
def test_a_killed_import_goes_on_where_it_stopped(tmp_path: Path, fsyncs: int) -> None:
    prefix = write_megatron(tmp_path / "in", [[[*ids, 0]] for ids in some_documents(80)])
    whole = import_(prefix, tmp_path / "whole", shard_tokens=300)
    assert len(whole.manifest.shards) >= 4
    assert killed("import", prefix, tmp_path / "out", fsyncs) == -signal.SIGKILL
    assert not (tmp_path / "out").exists()
    finished = len(list((tmp_path / ".out.part" / "progress").glob("shard-*.json")))
    again = import_megatron(prefix, tmp_path / "out", ImportOptions(shard_tokens=300), lambda *_: None)
    assert again.shards_reused == finished
    assert (finished > 0) == (fsyncs >= 4)
    assert content(tmp_path / "out") == content(tmp_path / "whole")
    assert import_megatron(prefix, tmp_path / "out", ImportOptions(shard_tokens=300), lambda *_: None).was_there
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.bin", "in.idx", "out", "whole"]


def test_an_import_that_was_begun_is_not_gone_on_with_otherwise(tmp_path: Path) -> None:
    prefix = write_megatron(tmp_path / "in", [[[*ids, 0]] for ids in some_documents(80)])
    assert killed("import", prefix, tmp_path / "out", 6) == -signal.SIGKILL
    with pytest.raises(ConfigError, match=r"was begun otherwise \(--vocab-size differ\), and is not finished"):
        import_(prefix, tmp_path / "out", shard_tokens=300, vocab_size=128)
    write_megatron(prefix, [[[*ids, 0]] for ids in some_documents(80, seed=1)])
    with pytest.raises(ConfigError, match=r"was begun otherwise \(PREFIX differ\), and is not finished"):
        import_(prefix, tmp_path / "out", shard_tokens=300)


@pytest.mark.parametrize("fsyncs", [1, 3, 5, 8, 40, 41, 42, 43, 44])
def test_a_killed_export_goes_on_where_it_stopped(tmp_path: Path, fsyncs: int) -> None:
    dataset = write_dataset(tmp_path / "in", some_documents(160))
    (tmp_path / "whole").mkdir()
    (tmp_path / "out").mkdir()
    export(dataset, tmp_path / "whole" / "web")
    code = killed("export", dataset.folder, tmp_path / "out" / "web", fsyncs)
    if code:  # else it has fewer syncs
        assert code == -signal.SIGKILL
        assert not (tmp_path / "out" / "web.idx").exists() or fsyncs > 30
        written = export_megatron(dataset, tmp_path / "out" / "web", lambda *_: None)
        assert (written > 0) == (fsyncs >= 5)
    assert content(tmp_path / "out") == content(tmp_path / "whole")


def test_an_export_of_another_dataset_begins_anew(tmp_path: Path) -> None:
    first, second = (write_dataset(tmp_path / name, some_documents(160, seed)) for seed, name in enumerate("ab"))
    assert killed("export", first.folder, tmp_path / "web", 9) == -signal.SIGKILL
    assert export_megatron(second, tmp_path / "web", lambda *_: None) == 0
    np.testing.assert_array_equal(
        MegatronTokens(tmp_path / "web").read(0, second.num_tokens), second.read(0, second.num_tokens)
    )


MEGATRON = """
import json, sys
import numpy as np
from megatron.core.datasets.indexed_dataset import DType, IndexedDataset, IndexedDatasetBuilder

folder, vocab_size = sys.argv[1], int(sys.argv[2])
documents = json.load(open(folder + "/documents.json"))
builder = IndexedDatasetBuilder(folder + "/theirs.bin", dtype=DType.optimal_dtype(vocab_size))
for document in documents:
    builder.add_document([token for ids in document for token in ids], [len(ids) for ids in document])
builder.finalize(folder + "/theirs.idx")
read = {}
for name in ("ours", "theirs"):
    dataset = IndexedDataset(folder + "/" + name, mmap=True)
    read[name] = {
        "sequences": [dataset[number].tolist() for number in range(len(dataset))],
        "documents": dataset.document_indices.tolist(),
        "dtype": dataset.index.dtype.__name__,
    }
json.dump(read, open(folder + "/read.json", "w"))
"""


@pytest.fixture(scope="module")
def megatron_core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """megatron-core from the registry, in a folder of its own; what it needs is that of this environment."""
    folder = tmp_path_factory.mktemp("megatron")
    command = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(folder), "megatron-core"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if done.returncode:
        pytest.skip(f"megatron-core cannot be installed here: {done.stderr.strip().splitlines()[-1]}")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("vocab_size", [100, 70_000])
def test_megatrons_own_reader_and_writer_agree(tmp_path: Path, megatron_core: Path, vocab_size: int) -> None:
    documents = [[ids, ids[:3]] for ids in some_documents(40, vocab_size=vocab_size)]
    (tmp_path / "documents.json").write_text(json.dumps(documents))
    dataset = write_dataset(tmp_path, [ids + more for ids, more in documents], unit_bytes=900, vocab_size=vocab_size)
    export(dataset, tmp_path / "ours")
    environment = {**os.environ, "PYTHONPATH": str(megatron_core), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-W", "ignore", "-c", MEGATRON, str(tmp_path), str(vocab_size)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250, check=False)
    if "ModuleNotFoundError" in done.stderr:
        pytest.skip(f"megatron-core needs more than this environment has: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    read = json.loads((tmp_path / "read.json").read_text())
    assert read["ours"]["sequences"] == [[*ids, *more, 0] for ids, more in documents]
    assert read["ours"]["documents"] == list(range(len(documents) + 1))
    theirs = MegatronTokens(tmp_path / "theirs")
    assert theirs.dtype.name == read["theirs"]["dtype"] == read["ours"]["dtype"]
    expected = read["theirs"]["sequences"]
    assert theirs.read(0, theirs.num_tokens).tolist() == [token for ids in expected for token in ids]
    bounds = read["theirs"]["documents"]
    for number, (first, last) in enumerate(itertools.pairwise(bounds)):
        start, end = theirs.document_start(number), theirs.document_start(number + 1)
        assert theirs.read(start, end - start).tolist() == [token for ids in expected[first:last] for token in ids]
