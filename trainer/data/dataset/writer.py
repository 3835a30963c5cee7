"""Writing of a dataset folder: shards, index and manifest under a hidden name beside it, published by one rename.

    .DIR.part/dataset/     becomes DIR
    .DIR.part/progress/    what is finished
    .DIR.part/plan.json    of what it is made, and how

A process that is killed leaves `.DIR.part`; whoever begins the same again finds it there, under a lock.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from shlex import join

import numpy as np
from numpy.typing import NDArray

from netlayer.errors import ConfigError
from netlayer.launch.interrupt import uninterrupted
from netlayer.lock import LockBusy, claimed
from netlayer.results import hide_passwords, sync_folder, utc_now, writing
from trainer.data.dataset.manifest import (
    INDEX_DTYPE,
    INDEX_FILE,
    MANIFEST_FILE,
    File,
    Manifest,
    read_manifest,
)

OUT_FIELD = "--out"
_PLAN_FILE = "plan.json"
_BLOCK = 1 << 20  # documents that the index takes at once


class SyncedFile:
    """A file written under another name, then synced to the disk and renamed; its checksum is that of what was written.

    As a context it is published at the end of a block that does not raise, and removed otherwise.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        # Two workers may write the same shard where a scheduler takes one of them for dead: each a file of its own.
        self._part = path.with_name(f".{path.name}.{os.uname().nodename}.{os.getpid()}")
        self._digest = hashlib.blake2b(digest_size=16)

    def __enter__(self) -> SyncedFile:
        self._stream = self._part.open("wb")
        return self

    def write(self, block: bytes | NDArray[np.integer]) -> None:
        """Append bytes, or the bytes of an array."""
        data = block if isinstance(block, bytes) else np.ascontiguousarray(block).view(np.uint8).data
        self._digest.update(data)
        self._stream.write(data)

    @property
    def checksum(self) -> str:
        """Checksum of all that was written so far."""
        return self._digest.hexdigest()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with contextlib.ExitStack() as stack:
            stack.callback(self._part.unlink, missing_ok=True)  # nothing, once it has its name
            with self._stream:
                if kind is None:
                    self._stream.flush()
                    os.fsync(self._stream.fileno())
            if kind is None:
                self._part.replace(self.path)


def write_synced(path: Path, text: str) -> str:
    """Write a whole text file or nothing; return its checksum."""
    with SyncedFile(path) as file:
        file.write(text.encode())
    return file.checksum


class IndexWriter:
    """Document offsets, written as the documents come: no more of them in memory than one call brings."""

    def __init__(self, file: SyncedFile) -> None:
        self._file = file
        self.tokens = self.documents = 0
        file.write(np.zeros(1, INDEX_DTYPE))

    def add(self, lengths: NDArray[np.integer]) -> None:
        """Append documents of these numbers of tokens, shape (documents,)."""
        for first in range(0, len(lengths), _BLOCK):
            ends = np.cumsum(lengths[first : first + _BLOCK], dtype=INDEX_DTYPE) + self.tokens
            self._file.write(ends.astype(INDEX_DTYPE))
            self.tokens, self.documents = int(ends[-1]), self.documents + len(ends)


def write_index(folder: Path, lengths: Iterable[NDArray[np.integer]]) -> tuple[File, int, int]:
    """Write the index of documents whose lengths come in blocks; return its facts, documents and tokens."""
    with SyncedFile(folder / INDEX_FILE) as file:
        index = IndexWriter(file)
        for block in lengths:
            index.add(block)
    return File(file=INDEX_FILE, checksum=file.checksum), index.documents, index.tokens


def provenance(**facts: object) -> dict[str, object]:
    """Return where a dataset came from: the command, now, this package's version, and `facts`."""
    name = Path(sys.argv[0]).name
    command = join(["netlayer" if name == "__main__.py" else name, *sys.argv[1:]])
    version = importlib.metadata.version("netlayer")
    return {"command": hide_passwords(command), "created_utc": utc_now(), "netlayer": version, **facts}


def shard_file(number: int) -> str:
    """Return the name of a shard."""
    return f"shard-{number:05}.bin"


def check_out(out: Path) -> None:
    """Check that a dataset can be published at `out`.

    Raises:
        ConfigError: there is something already.
    """
    if (out / MANIFEST_FILE).exists():
        raise ConfigError(OUT_FIELD, out, "holds a dataset already", "give a new folder, or remove that one")
    if out.exists() and not (out.is_dir() and not any(out.iterdir())):
        raise ConfigError(OUT_FIELD, out, "is there already, and not empty", "give a new folder")


def part_folder(out: Path) -> Path:
    """Return the folder in which the dataset at `out` is made."""
    return out.absolute().parent / f".{out.absolute().name}.part"


@contextlib.contextmanager
def open_part(out: Path) -> Iterator[Path]:
    """Hold the folder in which `out` is made, with what an earlier process has left in it.

    Raises:
        ConfigError: another process is making this dataset, or the folder cannot be written.
    """
    part = part_folder(out)
    with contextlib.ExitStack() as stack:
        try:
            with writing(out, OUT_FIELD):
                part.parent.mkdir(parents=True, exist_ok=True)
                stack.enter_context(claimed(part.with_name(f"{part.name}.lock")))
                (part / "dataset").mkdir(parents=True, exist_ok=True)
                (part / "progress").mkdir(exist_ok=True)
        except LockBusy as exc:
            rule = f"is being made by {exc}"
            raise ConfigError(OUT_FIELD, out, rule, "wait for it, or give another folder") from exc
        yield part


def published(out: Path, plan: Mapping[str, str]) -> Manifest | None:
    """Return the manifest of the dataset at `out` where it was made by this very plan; None where there is none.

    What a run has left that was killed right after it had published goes.
    """
    with contextlib.suppress(ConfigError):
        manifest = read_manifest(out)
        if manifest.provenance.get("plan") == plan:
            if part_folder(out).exists():
                with open_part(out) as part:
                    shutil.rmtree(part, ignore_errors=True)
            return manifest
    return None


def hold_to_plan(part: Path, plan: Mapping[str, str], out: Path) -> None:
    """Note the plan; raise ConfigError where an earlier run had another, and has finished a shard by it."""
    file = part / _PLAN_FILE
    try:
        earlier = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        earlier = {}
    changed = [key for key, digest in plan.items() if earlier.get(key) != digest]
    if changed and not _has_shards(part):
        with writing(out, OUT_FIELD):
            for left in (part / "dataset").iterdir():  # such as a tokenizer trained by the other plan
                left.unlink()
            write_synced(file, json.dumps(plan, indent=1))
    elif changed:
        rule = f"was begun otherwise ({' and '.join(changed)} differ), and is not finished"
        raise ConfigError(OUT_FIELD, out, rule, f"give the same as then, or remove {part}")


def _has_shards(part: Path) -> bool:
    """Whether a shard was finished in this folder."""
    return any((part / "progress").glob("*.json"))


@contextlib.contextmanager
def kept_if_begun(part: Path) -> Iterator[None]:
    """Remove the folder after an error where no shard is finished: there is nothing to go on with."""
    try:
        yield
    except BaseException:
        if not _has_shards(part):
            shutil.rmtree(part, ignore_errors=True)
        raise


def publish(part: Path, out: Path, manifest: Manifest) -> None:
    """Write the manifest of a finished dataset, and let the folder appear at `out`, whole."""
    folder = part / "dataset"
    expected = {shard.file for shard in manifest.shards} | {INDEX_FILE}
    for stray in (path for path in folder.iterdir() if path.name.startswith(".")):  # of workers that were killed
        stray.unlink()
    missing = [name for name in expected if not (folder / name).is_file()]
    if missing:
        raise ConfigError(OUT_FIELD, folder, f"has lost {missing[0]}", "start again, with nothing else in this folder")
    write_synced(folder / MANIFEST_FILE, manifest.to_json())
    with uninterrupted():
        sync_folder(folder)
        folder.rename(out)
        sync_folder(out.absolute().parent)
        shutil.rmtree(part, ignore_errors=True)
