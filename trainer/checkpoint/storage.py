"""The folder of a run's checkpoints, on a file system or in an object store (`s3://`, `gs://`, `hdfs://`, by fsspec).

A checkpoint is whole or not there. A file system renames a folder at once, so all of it is made durable (fsync: files,
then their folder) under a name that begins with a dot, and then renamed. An object store cannot: there the files have
their names from the start, and `meta.json`, without which a folder is no checkpoint, is written last. A pending one's
name ends in `.new` here, and there it has a `meta.json.new`. Needs no torch: the process that writes starts in moments.
Not covered: stores that show a file before it is whole.
"""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import shutil
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import IO, Any, Protocol

from netlayer.results import sync_folder
from trainer.checkpoint.distcp import Read, file_reader, object_reader
from trainer.checkpoint.names import (
    DAMAGED,
    META,
    PENDING,
    checkpoints_in,
    halves_in,
    has_object,
    know_protocol,
    step_of,
)

PART = ".part"
_SYNC_BYTES = 256 << 20
"""Written before the disk is waited for: a page cache full of it would hold up all other writes of the machine."""
_OBJECT_BLOCK = 16 << 20  # of a multipart upload
_DIRECT_BYTES = 8 << 20
"""Size of each of the two buffers of a file that is written past the page cache."""
_ALIGNMENT = 4096
"""Offsets and lengths of such writes are multiples of it: no disk has larger blocks."""
_NOT_DIRECT = (errno.EINVAL, errno.EOPNOTSUPP)
"""What file systems say that cannot write past the page cache, or not this."""


class Storage(Protocol):
    """Writer of checkpoints into one folder. `part` names a checkpoint in the making: what `part_name` gave."""

    def create(self, part: str, needed_bytes: int) -> None:
        """Make room for a checkpoint and create it, empty; what killed saves have left is removed.

        Raises:
            OSError: there is less room than is needed.
        """

    def write(self, part: str, file: str) -> contextlib.AbstractContextManager[IO[bytes]]:
        """Open a new file of a checkpoint for writing; it is durable when the block ends, and gone where it fails."""

    def reader(self, part: str, file: str) -> tuple[int, Read]:
        """Return the size of a file of a checkpoint in the making, and what reads ranges of it."""

    def publish(self, part: str, name: str, meta: bytes, *, pending: bool) -> None:
        """Write `meta.json` of a checkpoint whose other files are durable, and give it its name."""

    def commit(self, name: str) -> None:
        """Make a pending checkpoint a good one."""

    def discard(self, part: str) -> None:
        """Remove a checkpoint in the making."""

    def prune(self, keep: int, keep_every: int) -> None:
        """Keep the newest `keep` good checkpoints, and those of every `keep_every`-th step (0: none)."""

    def free_bytes(self) -> int:
        """Return how much room there is; -1: it does not say."""


def open_storage(location: str, *, direct: bool = False) -> Storage:
    """Return what writes into a folder.

    Args:
        location: a path, or a URL that fsspec knows.
        direct: see `LocalStorage`; of no effect at a URL.

    Raises:
        ImportError: the package for such URLs is not installed.
    """
    return ObjectStorage(location) if "://" in location else LocalStorage(Path(location), direct=direct)


def part_name(location: str, name: str, token: str) -> str:
    """Return the name that checkpoint `name` has until it is complete; at a URL, where nothing can be renamed, its own.

    Args:
        token: of the run: what another run left incomplete under this name could hold files that this one never writes.
    """
    if "://" in location:
        return name
    return f".{name}.{token}{PART}" if token else f".{name}{PART}"


class LocalStorage:
    """A folder of a file system.

    Args:
        direct: write past the page cache where the file system can: files of checkpoints are not read again soon, and
            what they take of the cache, and of memory bandwidth as it is filled, is the training's.
    """

    def __init__(self, root: Path, *, direct: bool = False) -> None:
        self._root, self._direct = root, direct and hasattr(os, "O_DIRECT")

    def create(self, part: str, needed_bytes: int) -> None:
        self._root.mkdir(parents=True, exist_ok=True)
        self._clear()
        # Refuse what cannot fit before any of it is written: a disk filled to the brim hurts others too.
        if 0 <= self.free_bytes() < needed_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        (self._root / part).mkdir()

    @contextlib.contextmanager
    def write(self, part: str, file: str) -> Iterator[IO[bytes]]:
        path = self._root / part / file
        try:
            direct = _Direct.open(path) if self._direct else None
            if direct is not None:
                with contextlib.closing(direct):
                    yield direct  # type: ignore[misc]  # a part of IO[bytes] is enough
                    direct.finish()
                return
            with path.open("wb") as stream:
                yield _Synced(stream)  # type: ignore[misc]
                stream.flush()
                os.fsync(stream.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            raise

    def reader(self, part: str, file: str) -> tuple[int, Read]:
        return file_reader(self._root / part / file)

    def publish(self, part: str, name: str, meta: bytes, *, pending: bool) -> None:
        with self.write(part, META) as stream:
            stream.write(meta)
        sync_folder(self._root / part)
        self._rename(self._root / part, self._root / (name + PENDING if pending else name))

    def commit(self, name: str) -> None:
        self._rename(self._root / f"{name}{PENDING}", self._root / name)

    def discard(self, part: str) -> None:
        shutil.rmtree(self._root / part, ignore_errors=True)

    def prune(self, keep: int, keep_every: int) -> None:
        for old in kept_apart(checkpoints_in(self._root), keep, keep_every):
            old.replace(_old(old))
        self._clear()

    def free_bytes(self) -> int:
        usage = shutil.disk_usage(self._root)
        return usage.free if usage.total else -1  # some network file systems do not say

    def _rename(self, path: Path, target: Path) -> None:
        if target.exists():
            target.replace(_old(target))  # renamed away before it is removed: one of the two is always there
        path.replace(target)
        sync_folder(target.parent)

    def _clear(self) -> None:
        """Remove what is no checkpoint, and of this run alone: no other has entered its folder."""
        for path in halves_in(self._root):
            shutil.rmtree(path, ignore_errors=True)


def set_aside(path: Path) -> str:
    """Make a damaged checkpoint one that no run resumes from, and return where it is now.

    A folder is renamed to `.damaged`, and stays. In an object store, which cannot, its `meta.json` is; the rest stays
    until the same step is saved again, and takes its place.
    """
    target, number = path.with_name(path.name + DAMAGED), 1
    has_renames = isinstance(path, Path)
    if has_renames:
        while target.exists():  # one of the same step was damaged before
            number += 1
            target = path.with_name(f"{path.name}{DAMAGED}{number}")
        return str(path.rename(target))
    from fsspec.core import url_to_fs

    fs, root = url_to_fs(str(path), use_listings_cache=False, skip_instance_cache=True)
    fs.copy(f"{root}/{META}", f"{root}/{META}{DAMAGED}")
    fs.rm(f"{root}/{META}")
    return f"{path}/{META}{DAMAGED}"


def kept_apart(paths: list[Any], keep: int, keep_every: int) -> list[Any]:
    """Return those of the checkpoints, oldest first, that are not to be kept."""
    return [path for path in paths[:-keep] if not keep_every or step_of(path) % keep_every]


def _old(path: Path) -> Path:
    """Return the path of a replaced checkpoint, which is removed next."""
    return path.with_name(f".{path.name}.old")


class _Synced:
    """A file that is written to the disk as it grows, and then leaves the page cache."""

    def __init__(self, stream: IO[bytes]) -> None:
        self._stream, self._unsynced = stream, 0

    def write(self, content: Any) -> int:
        written = self._stream.write(content)
        self._unsynced += written
        if self._unsynced >= _SYNC_BYTES:
            self._stream.flush()
            opened = self._stream.fileno()
            os.fdatasync(opened)
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)
            self._unsynced = 0
        return written


class _Direct:
    """A file that is written past the page cache, from two buffers in turn: one is filled while the other is written.

    The content is copied once, into memory that stays in a processor's cache, where the page cache takes new pages,
    flushes them later, and at a moment that nobody chooses.
    """

    def __init__(self, opened: int) -> None:
        self._opened = opened
        self._buffers = [mmap.mmap(-1, _DIRECT_BYTES) for _ in range(2)]  # aligned to pages
        self._filled = 0
        self._written: Future[None] | None = None
        self._thread = ThreadPoolExecutor(1, "writes-direct")

    @classmethod
    def open(cls, path: Path) -> _Direct | None:
        """Create a file; return None where its file system cannot write so."""
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0)
        try:
            return cls(os.open(path, flags | os.O_DIRECT, 0o666))
        except OSError as exc:
            if exc.errno not in _NOT_DIRECT:
                raise
            return None

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        start = 0
        while start < len(view):
            count = min(_DIRECT_BYTES - self._filled, len(view) - start)
            self._buffers[0][self._filled : self._filled + count] = view[start : start + count]
            self._filled, start = self._filled + count, start + count
            if self._filled == _DIRECT_BYTES:
                self._flush(_DIRECT_BYTES)
        return len(view)

    def finish(self) -> None:
        """Write the rest, of which what fills no block goes through the page cache, and wait for the disk."""
        whole = self._filled // _ALIGNMENT * _ALIGNMENT
        rest = bytes(self._buffers[0][whole : self._filled])
        self._flush(whole)
        self._wait()
        self._leave_direct()
        _write_all(self._opened, memoryview(rest))
        os.fsync(self._opened)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._wait()
        self._thread.shutdown()
        os.close(self._opened)

    def _flush(self, count: int) -> None:
        self._wait()
        self._written = self._thread.submit(self._write_whole, memoryview(self._buffers[0])[:count])
        self._buffers.reverse()
        self._filled = 0

    def _wait(self) -> None:
        written, self._written = self._written, None
        if written is not None:
            written.result()

    def _write_whole(self, content: memoryview) -> None:
        begin = os.lseek(self._opened, 0, os.SEEK_CUR)
        try:
            count = _write_all(self._opened, content, _ALIGNMENT)
        except OSError as exc:
            # Some file systems let a file be opened so, and then not written.
            if exc.errno not in _NOT_DIRECT:
                raise
            # Writes before the one that was refused may have taken a part of it.
            count = os.lseek(self._opened, 0, os.SEEK_CUR) - begin
        if count < len(content):
            self._leave_direct()
            _write_all(self._opened, content[count:])

    def _leave_direct(self) -> None:
        import fcntl  # there where O_DIRECT is

        flags = fcntl.fcntl(self._opened, fcntl.F_GETFL)
        fcntl.fcntl(self._opened, fcntl.F_SETFL, flags & ~os.O_DIRECT)


def _write_all(opened: int, content: memoryview, alignment: int = 1) -> int:
    """Write until all is written, or until a write ends within a block; return how many bytes are."""
    start = 0
    while start < len(content):
        start += os.write(opened, content[start:])
        if start % alignment:
            break
    return start


class ObjectStorage:
    """A folder of an object store, or of a file system that fsspec alone reaches.

    Raises:
        ImportError: the package for its protocol is not installed.
    """

    def __init__(self, location: str) -> None:
        from fsspec.core import url_to_fs

        know_protocol(location)
        # Without a listing that is kept: other ranks, in other processes, write there too.
        self._fs, self._root = url_to_fs(location, use_listings_cache=False, skip_instance_cache=True)

    def create(self, part: str, needed_bytes: int) -> None:  # noqa: ARG002  (as LocalStorage)
        self._clear()
        self._remove(part)
        with contextlib.suppress(FileExistsError):  # a prefix of a bucket is nothing that is made
            self._fs.makedirs(f"{self._root}/{part}", exist_ok=True)

    @contextlib.contextmanager
    def write(self, part: str, file: str) -> Iterator[IO[bytes]]:
        stream = self._fs.open(f"{self._root}/{part}/{file}", "wb", block_size=_OBJECT_BLOCK)
        try:
            yield stream
        except BaseException:
            # Closed, it would publish what is there so far; an upload that is not ended shows nothing.
            with contextlib.suppress(Exception):
                stream.discard()
            raise
        stream.close()

    def reader(self, part: str, file: str) -> tuple[int, Read]:
        path = f"{self._root}/{part}/{file}"
        return object_reader(self._fs, path)

    def publish(self, part: str, name: str, meta: bytes, *, pending: bool) -> None:  # noqa: ARG002  (as LocalStorage)
        with self.write(part, META + PENDING if pending else META) as stream:
            stream.write(meta)

    def commit(self, name: str) -> None:
        path = f"{self._root}/{name}/{META}"
        self._fs.copy(f"{path}{PENDING}", path)
        self._fs.rm(f"{path}{PENDING}")

    def discard(self, part: str) -> None:
        # A part has the name of its checkpoint: what has become one stays, and what cannot be looked at too.
        with contextlib.suppress(OSError):
            if not has_object(self._fs, f"{self._root}/{part}/{META}"):
                self._remove(part)

    def prune(self, keep: int, keep_every: int) -> None:
        good = [Path(name) for name in self._names() if has_object(self._fs, f"{self._root}/{name}/{META}")]
        for old in kept_apart(sorted(good, key=step_of), keep, keep_every):
            self._remove(old.name)

    def free_bytes(self) -> int:
        return -1

    def _names(self) -> list[str]:
        try:
            listed = self._fs.ls(self._root, detail=False)
        except FileNotFoundError:
            return []
        names = (path.rstrip("/").rpartition("/")[2] for path in listed)
        return [name for name in names if name.startswith("step-") and name.removeprefix("step-").isdigit()]

    def _clear(self) -> None:
        for name in self._names():
            if not any(has_object(self._fs, f"{self._root}/{name}/{META}{end}") for end in ("", PENDING, DAMAGED)):
                self._remove(name)

    def _remove(self, name: str) -> None:
        """Remove a checkpoint, first of all what makes it one."""
        for end in ("", PENDING):
            with contextlib.suppress(FileNotFoundError):
                self._fs.rm(f"{self._root}/{name}/{META}{end}")
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm(f"{self._root}/{name}", recursive=True)
