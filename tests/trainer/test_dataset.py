"""Dataset folders: any run of tokens, documents' boundaries, and damage that is named."""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netlayer.errors import CheckFailed, ConfigError
from trainer.data.dataset import TokenFolder, open_dataset
from trainer.data.dataset.folder import _OPEN_FILES
from trainer.data.dataset.manifest import INDEX_FILE, MANIFEST_FILE, VERSION, File, Manifest, Shard
from trainer.data.source import TokenDataset, check_vocabulary

from .token_datasets import some_documents, stream, write_dataset

pytestmark = pytest.mark.usefixtures("_no_sync")

DOCUMENTS = some_documents(300)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> TokenFolder:
    """Three hundred documents in several shards; for reading alone."""
    return write_dataset(tmp_path_factory.mktemp("dataset"), DOCUMENTS, unit_bytes=4096)


@pytest.fixture
def copy(dataset: TokenFolder, tmp_path: Path) -> Path:
    return Path(shutil.copytree(dataset.folder, tmp_path / "copy"))


def rewrite_manifest(folder: Path, **changes: object) -> None:
    file = folder / MANIFEST_FILE
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_it_is_a_token_dataset(dataset: TokenFolder) -> None:
    assert isinstance(dataset, TokenDataset)
    assert len(dataset.manifest.shards) > 3
    assert (dataset.num_documents, dataset.num_tokens, dataset.vocab_size) == (300, len(stream(DOCUMENTS)), 100)
    assert dataset.read(0, 5).dtype == np.int32


@given(
    documents=st.lists(st.lists(st.integers(1, 99), min_size=1, max_size=9), min_size=1, max_size=30), data=st.data()
)
def test_any_run_of_tokens_and_any_boundary(documents: list[list[int]], data: st.DataObject) -> None:
    expected = stream(documents)
    starts = np.cumsum([0, *(len(ids) + 1 for ids in documents)]).tolist()
    with tempfile.TemporaryDirectory() as name:
        tokens = write_dataset(Path(name), documents, unit_bytes=data.draw(st.integers(1, 200)))
        start = data.draw(st.integers(0, len(expected)))
        count = data.draw(st.integers(0, len(expected) - start))
        np.testing.assert_array_equal(tokens.read(start, count), expected[start : start + count])
        assert [tokens.document_start(number) for number in range(len(documents) + 1)] == starts
        owners = [number for number, ids in enumerate(documents) for _ in [*ids, 0]]
        assert [tokens.document_at(token) for token in range(len(expected))] == owners


@pytest.mark.parametrize(("vocab_size", "dtype"), [(2**16, "uint16"), (2**16 + 1, "uint32")])
def test_tokens_are_as_narrow_as_the_vocabulary_lets_them(tmp_path: Path, vocab_size: int, dtype: str) -> None:
    tokens = write_dataset(tmp_path, [[vocab_size - 1, 1]], vocab_size=vocab_size)
    assert tokens.manifest.dtype == dtype
    assert tokens.read(0, 3).tolist() == [vocab_size - 1, 1, 0]
    assert (tokens.folder / "shard-00000.bin").read_bytes()[:2] == (vocab_size - 1).to_bytes(4, "little")[:2]


@pytest.mark.parametrize(("start", "count"), [(-1, 1), (0, -1), (0, 10**6), (10**6, 0)])
def test_a_run_outside_is_a_bad_argument(dataset: TokenFolder, start: int, count: int) -> None:
    with pytest.raises(ValueError, match=f"it has {dataset.num_tokens}"):
        dataset.read(start, count)


def test_a_token_or_document_outside_is_a_bad_argument(dataset: TokenFolder) -> None:
    for call, value in (
        (dataset.document_at, dataset.num_tokens),
        (dataset.document_at, -1),
        (dataset.document_start, 301),
    ):
        with pytest.raises(ValueError, match="it has"):
            call(value)


def test_the_fingerprint_is_that_of_the_content(dataset: TokenFolder, copy: Path, tmp_path: Path) -> None:
    assert TokenFolder(copy).fingerprint == dataset.fingerprint
    again = write_dataset(tmp_path / "again", DOCUMENTS, unit_bytes=4096)
    assert again.manifest.provenance["created_utc"] != dataset.manifest.provenance["created_utc"]
    assert again.fingerprint == dataset.fingerprint
    other = write_dataset(tmp_path / "other", [*DOCUMENTS[:-1], [1]], unit_bytes=4096)
    assert other.fingerprint != dataset.fingerprint


def test_a_loader_process_gets_the_place_and_not_the_tokens(dataset: TokenFolder) -> None:
    data = pickle.dumps(TokenFolder(dataset.folder, name="web"))
    assert len(data) < 1000
    opened = pickle.loads(data)
    assert opened.name == "web"
    np.testing.assert_array_equal(opened.read(7, 500), dataset.read(7, 500))


def test_threads_read_at_once_while_files_are_closed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As with more shards than may be open: each read finds its file closed, by another thread too."""
    from trainer.data.dataset import folder

    monkeypatch.setattr(folder, "_open_file", folder.functools.lru_cache(maxsize=2)(folder._open_file.__wrapped__))
    documents = some_documents(200, seed=3)
    tokens, expected, wrong = write_dataset(tmp_path, documents, unit_bytes=512), stream(documents), []

    def read(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(300):
            start = int(rng.integers(0, len(expected) - 50))
            if not np.array_equal(tokens.read(start, 50), expected[start : start + 50]):
                wrong.append(start)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(tokens.manifest.shards) > 10
    assert not wrong


@pytest.mark.slow  # a thousand files, each synced to the disk
def test_more_shards_than_descriptors_can_be_read(tmp_path: Path) -> None:
    """A map or an open file a shard would end at the limit of 1,024, in the middle of a run."""
    program = (
        "import sys; from pathlib import Path; from trainer.data.dataset import TokenFolder\n"
        "tokens = TokenFolder(Path(sys.argv[1]))\n"
        "print(len(tokens.manifest.shards), int(tokens.read(0, tokens.num_tokens).sum()))"
    )
    documents = some_documents(_OPEN_FILES + 80, seed=1)
    tokens = write_dataset(tmp_path, documents, unit_bytes=1)

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_NOFILE, (_OPEN_FILES + 40, _OPEN_FILES + 40))

    command = [sys.executable, "-c", program, str(tokens.folder)]
    done = subprocess.run(command, capture_output=True, text=True, preexec_fn=limit, check=False)
    assert done.stdout.split() == [str(_OPEN_FILES + 80), str(int(stream(documents).sum()))], done.stderr


def test_opening_a_trillion_tokens_reads_next_to_nothing(tmp_path: Path) -> None:
    """Sparse files: 1,024 shards of 2 GiB, and the offsets of a thousand million documents."""
    shard_tokens, documents = 2**30, 10**9
    shards = tuple(
        Shard(
            file=f"shard-{number:05}.bin",
            tokens=shard_tokens,
            documents=documents // 1024 + (number < 512),
            checksum="",
        )
        for number in range(1024)
    )
    manifest = Manifest(
        version=VERSION,
        dtype="uint16",
        vocab_size=50257,
        end_of_document=0,
        tokenizer=None,
        tokens=1024 * shard_tokens,
        documents=documents,
        index=File(file=INDEX_FILE, checksum=""),
        shards=shards,
        provenance={},
    )
    (tmp_path / MANIFEST_FILE).write_text(manifest.to_json())
    for shard in shards:
        with (tmp_path / shard.file).open("wb") as file:
            file.truncate(2 * shard_tokens)
    with (tmp_path / INDEX_FILE).open("wb") as file:
        file.truncate(8 * documents)
        file.seek(8 * documents)
        file.write(np.array([manifest.tokens], "<i8"))
    before = _bytes_read()
    tokens = TokenFolder(tmp_path)
    assert tokens.read(manifest.tokens - 10, 10).tolist() == [0] * 10
    assert tokens.document_at(manifest.tokens - 1) == documents - 1
    assert _bytes_read() - before < 2 << 20


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


def test_a_vocabulary_above_the_models_is_named(dataset: TokenFolder) -> None:
    check_vocabulary(dataset, 100)
    with pytest.raises(
        ConfigError, match=r"job.model.vocab_size = 99: is below the 100 token ids of dataset tokens; set"
    ):
        check_vocabulary(dataset, 99)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda folder: (folder / MANIFEST_FILE).unlink(), "has no manifest.json"),
        (lambda folder: (folder / MANIFEST_FILE).write_text('{"version"'), "is not JSON"),
        (lambda folder: (folder / MANIFEST_FILE).write_text("[]"), "is no manifest"),
        (lambda folder: rewrite_manifest(folder, version=2), "has version 2, known is 1"),
        (lambda folder: rewrite_manifest(folder, vocab_size=99), "its fingerprint does not match"),
        (lambda folder: rewrite_manifest(folder, tokens="many"), "tokens: Input should be a valid integer"),
        (lambda folder: rewrite_manifest(folder, more=1), "more: Extra inputs are not permitted"),
        (lambda folder: (folder / "shard-00001.bin").unlink(), "shard-00001.bin: cannot be read"),
        (lambda folder: os.truncate(folder / "shard-00001.bin", 10), "has 10 bytes, and its manifest says"),
        (lambda folder: os.truncate(folder / INDEX_FILE, 16), "has 16 bytes, and its manifest says"),
    ],
)
def test_damage_is_one_line_before_anything_is_read(copy: Path, damage: object, message: str) -> None:
    damage(copy)  # type: ignore[operator]
    with pytest.raises(ConfigError, match=message) as caught:
        open_dataset(copy, field="job.data.sets")
    assert str(caught.value).startswith("job.data.sets = ")
    assert "\n" not in str(caught.value)


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such dataset"):
        open_dataset(tmp_path / "missing")


def test_a_file_that_shrinks_or_changes_while_it_is_read_is_an_error_of_ours(copy: Path) -> None:
    tokens = TokenFolder(copy)
    tokens.read(0, 10)
    os.truncate(copy / "shard-00000.bin", 8)
    with pytest.raises(CheckFailed, match=r"shard-00000.bin: ends at byte 8"):
        tokens.read(0, 10)
    os.truncate(copy / "shard-00001.bin", 8)
    with pytest.raises(CheckFailed, match=r"shard-00001.bin: has changed since"):
        tokens.read(tokens.manifest.shards[0].tokens, 10)


def failed_checks(folder: Path) -> dict[str, str]:
    return {check.name: check.detail for check in TokenFolder(folder).checks() if not check.is_good}


def test_checks_find_every_changed_byte(copy: Path) -> None:
    assert failed_checks(copy) == {}
    flip(copy / "shard-00001.bin", 4)
    flip(copy / INDEX_FILE, 8)
    flip(copy / "sources.json", 5)
    assert {"shard-00001.bin", INDEX_FILE, "sources.json"} <= set(failed_checks(copy))


def test_checks_look_at_ids_and_ends(copy: Path) -> None:
    shard = copy / "shard-00000.bin"
    shard.write_bytes(np.full(shard.stat().st_size // 2, 777, "<u2").tobytes())
    failed = failed_checks(copy)
    assert failed["token ids"] == "largest 777, vocabulary 100"
    documents = TokenFolder(copy).manifest.shards[0].documents
    assert failed["ends of documents"] == f"{documents} of 300 do not end with 0"


def test_checks_look_at_offsets(copy: Path) -> None:
    starts = np.fromfile(copy / INDEX_FILE, "<i8")
    starts[[100, 101]] = starts[[101, 100]]
    starts.tofile(copy / INDEX_FILE)
    assert failed_checks(copy)["document offsets"] == "document 101 starts before the one in front of it"


def flip(file: Path, position: int) -> None:
    data = bytearray(file.read_bytes())
    data[position] ^= 1
    file.write_bytes(data)
