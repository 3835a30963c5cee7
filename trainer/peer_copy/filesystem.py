"""`peers://`: the stores of a run's machines as one file system of fsspec, in which its checkpoints lie.

`peers://data/runs/a` is what the run in /data/runs/a has in memory. A rank's file of tensors goes to the store of its
machine and to those of the next ones (`trainer.peer_copy.hosts.Ring`), all other files, which are small, to every
store of the ring. A file that did not reach all of them is not there. It is read from any store that has it, this
machine's first; a listing is the union. A store that is gone is skipped, and said once. So the code that keeps
checkpoints in object stores keeps them here: `trainer.checkpoint.storage.ObjectStorage`.

Loading this module makes the protocol known to fsspec and to universal_pathlib. Needs no torch.
"""

from __future__ import annotations

import errno
import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import fsspec
import upath
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem
from upath.registry import register_implementation

from trainer.checkpoint.distcp import SUFFIX
from trainer.peer_copy.client import StoreClient, StoreGone, Upload
from trainer.peer_copy.hosts import FOLDER, machine_name, read_ring, run_token, store_urls

logger = logging.getLogger(__name__)

PROTOCOL = "peers"
_BLOCK_BYTES = 4 << 20  # small pieces are sent together
_FRESH_S = 2.0  # for which a listing of all stores serves: a start looks at every file of a checkpoint
_GONE_S = 10.0  # for which a store that did not answer is not asked again
_ASKED_AT_ONCE = 16
_T = TypeVar("_T")


class Peers:
    """The stores of one run, as they are now.

    Args:
        out: folder of the run.
    """

    def __init__(self, out: Path) -> None:
        self._out, self._token = out, run_token(out)
        self._clients: dict[str, StoreClient] = {}
        self._gone_until_s: dict[str, float] = {}
        self._gone: set[str] = set()
        self._lock = threading.Lock()
        self._listing_lock = threading.Lock()  # another: threads that ask the stores take the first one
        self._listing: dict[str, tuple[int, list[str]]] = {}
        self._listed_s, self._version = -_FRESH_S, 0

    def clients(self) -> dict[str, StoreClient]:
        """Return the stores that may answer, this machine's first, by machine."""
        own, urls = machine_name(), store_urls(self._out)
        with self._lock:
            for machine, url in urls.items():
                if machine not in self._clients or self._clients[machine].url != url:
                    self._clients[machine] = StoreClient(url, self._token)
                    self._gone_until_s.pop(machine, None)
            for machine in set(self._clients) - set(urls):
                self._clients.pop(machine).close()
            now_s = time.monotonic()
            machines = [each for each in self._clients if self._gone_until_s.get(each, 0) < now_s]
            return {each: self._clients[each] for each in sorted(machines, key=lambda each: (each != own, each))}

    def ask_all(self, question: Callable[[StoreClient], _T]) -> dict[str, _T]:
        """Ask every store at once; those that are gone are not in the answer."""
        clients = self.clients()

        def ask(item: tuple[str, StoreClient]) -> tuple[str, _T] | None:
            try:
                return item[0], question(item[1])
            except StoreGone as exc:
                self._note_gone(item[0], exc)
                return None

        if not clients:
            return {}
        with ThreadPoolExecutor(min(_ASKED_AT_ONCE, len(clients)), "asks stores") as threads:
            return dict(filter(None, threads.map(ask, clients.items())))

    def listing(self, *, is_new: bool = False) -> dict[str, tuple[int, list[str]]]:
        """Return size and machines of every file that some store has, by its name."""
        with self._listing_lock:
            if not is_new and time.monotonic() < self._listed_s + _FRESH_S:
                return self._listing
            begun_s, version, files = time.monotonic(), self._version, dict[str, tuple[int, list[str]]]()
            for machine, state in self.ask_all(lambda store: store.listing()).items():
                for name, size in state["files"].items():
                    if files.setdefault(name, (size, []))[0] == size:
                        files[name][1].append(machine)
            self._listing = files
            if self._version == version:  # else something has changed meanwhile
                self._listed_s = begun_s
            return files

    def forget(self) -> None:
        """Have the next listing be a new one: something has changed."""
        self._version += 1
        self._listed_s = -_FRESH_S

    def find(self, name: str) -> tuple[int, list[str]]:
        """Return size and machines of a file.

        Raises:
            FileNotFoundError: no store that answers has it.
        """
        entry = self.listing().get(name) or self.listing(is_new=True).get(name)
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)
        return entry

    def read(self, name: str, start: int, end: int) -> bytes:
        """Return bytes of a file, from the first store that gives them.

        Raises:
            FileNotFoundError: none does.
        """
        clients = self.clients()
        for machine in self.find(name)[1]:
            if machine not in clients:
                continue
            try:
                return clients[machine].read(name, start, end)
            except StoreGone as exc:
                self._note_gone(machine, exc)
            except FileNotFoundError:
                self.forget()
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), name)

    def begin(self, name: str) -> list[tuple[str, Upload]]:
        """Begin to write a file into every store that is to have it.

        Raises:
            OSError: one of them is not there.
        """
        ring, own = read_ring(self._out), machine_name()
        machines = ring.targets(own) if name.endswith(SUFFIX) else list(ring.machines)
        if not machines:
            raise OSError(errno.EHOSTUNREACH, f"{self._out} has no stores of checkpoints in memory")
        urls, uploads = store_urls(self._out), list[tuple[str, Upload]]()
        try:
            for machine in machines:
                if machine not in urls:
                    raise OSError(errno.EHOSTUNREACH, f"the store of {machine} is gone")
                try:
                    uploads.append((machine, Upload(urls[machine], self._token, name)))
                except StoreGone as exc:
                    raise OSError(errno.EHOSTUNREACH, f"the store of {machine} is gone: {exc}") from exc
        except OSError:
            for _, upload in uploads:
                upload.discard()
            raise
        return uploads

    def _note_gone(self, machine: str, exc: StoreGone) -> None:
        with self._lock:
            self._gone_until_s[machine] = time.monotonic() + _GONE_S
            if machine in self._gone:
                return
            self._gone.add(machine)
        logger.warning("the checkpoints in the memory of %s are gone with their store (%s)", machine, exc)


class PeerWriter:
    """A file that is written into several stores at once, and is in all of them once it is closed.

    Args:
        peers: of the run.
        name: of the file.

    Raises:
        OSError: a store is gone, or full (ENOSPC); so do all methods. What some stores have of it then goes with its
            checkpoint, which has no `meta.json`.
    """

    def __init__(self, peers: Peers, name: str) -> None:
        self._peers, self._name = peers, name
        self._uploads = peers.begin(name)
        # Stores take a part at the same time: the network is not idle while this machine's memory is written.
        self._threads = ThreadPoolExecutor(len(self._uploads), "copies to stores")
        self._buffer = bytearray()
        self.closed = False

    def write(self, content: Any) -> int:
        view = memoryview(content).cast("B")
        if len(self._buffer) + len(view) < _BLOCK_BYTES:
            self._buffer += view
            return len(view)
        self._flush()
        if len(view) < _BLOCK_BYTES:
            self._buffer += view
        else:
            self._send(view)  # a large piece is not copied once more
        return len(view)

    def flush(self) -> None:
        """Do nothing: what is not closed is not there."""

    def close(self) -> None:
        if self.closed:
            return
        try:
            self._flush()
            self._each(lambda upload: upload.finish())
        finally:
            self.discard()
            self._peers.forget()

    def discard(self) -> None:
        """Give the file up."""
        self.closed = True
        self._threads.shutdown()
        for _, upload in self._uploads:
            upload.discard()

    def __enter__(self) -> PeerWriter:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def _flush(self) -> None:
        buffer, self._buffer = self._buffer, bytearray()
        if buffer:
            self._send(memoryview(buffer))

    def _send(self, view: memoryview) -> None:
        self._each(lambda upload: upload.send(view))

    def _each(self, act: Callable[[Upload], None]) -> None:
        works = [(machine, upload, self._threads.submit(act, upload)) for machine, upload in self._uploads]
        errors = [(machine, upload, work.exception()) for machine, upload, work in works]  # when all are done
        for machine, upload, exc in errors:
            if isinstance(exc, StoreGone):
                raise OSError(errno.EHOSTUNREACH, f"the store of {machine} is gone: {exc}") from exc
            if isinstance(exc, OSError) and exc.errno == errno.ENOSPC:
                text = f"the memory of {machine} is full: {upload.free_bytes:,} bytes of its limit are left"
                raise OSError(errno.ENOSPC, text) from exc
            if exc is not None:
                raise exc


class _PeerReader(AbstractBufferedFile):  # type: ignore[misc]
    """A file that is read."""

    def _fetch_range(self, start: int, end: int) -> bytes:
        content: bytes = self.fs.cat_file(self.path, start=start, end=end)
        return content


class PeerFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """The file system; see the module. Folders are what files are in, and need not be made."""

    protocol = PROTOCOL
    root_marker = ""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._runs: dict[Path, Peers] = {}

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        text = str(path)
        return text.removeprefix(f"{PROTOCOL}:").strip("/")

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        peers, name, root = self._split(path)
        entries: dict[str, dict[str, Any]] = {}
        for file, (size, _machines) in peers.listing().items():
            if file == name:
                return [self._entry(f"{root}/{file}", size)] if detail else [f"{root}/{file}"]
            if name and not file.startswith(f"{name}/"):
                continue
            first, _slash, rest = file.removeprefix(f"{name}/" if name else "").partition("/")
            full = "/".join(filter(None, (root, name, first)))
            entries[full] = self._entry(full, None if rest else size)
        if not entries and name:
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        names = sorted(entries)
        return [entries[full] for full in names] if detail else names

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        peers, name, root = self._split(path)
        full = "/".join(filter(None, (root, name)))
        if not name:
            return self._entry(full, None)
        for is_new in (False, True):
            files = peers.listing(is_new=is_new)
            if name in files:
                return self._entry(full, files[name][0])
            if any(file.startswith(f"{name}/") for file in files):
                return self._entry(full, None)
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        peers, name, _root = self._split(path)
        size = peers.find(name)[0]
        first, last, _step = slice(start, end).indices(size)
        return peers.read(name, first, last) if first < last else b""

    def rm(self, path: str, recursive: bool = False, maxdepth: int | None = None) -> None:  # noqa: ARG002  (as fsspec)
        peers, name, _root = self._split(path)
        if not name:
            raise ValueError(f"{path}: names no checkpoint")
        removed = peers.ask_all(lambda store: store.remove(name))
        peers.forget()
        if not sum(removed.values()):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)

    def invalidate_cache(self, path: str | None = None) -> None:  # noqa: ARG002  (as fsspec)
        for peers in self._runs.values():
            peers.forget()

    def rm_file(self, path: str) -> None:
        self.rm(path)

    _rm = rm_file

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        content = self.cat_file(path1)
        with self._writer(path2) as target:
            target.write(content)

    def mkdir(self, path: str, create_parents: bool = True, **_: Any) -> None:
        """Do nothing."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Do nothing."""

    def check(self, path: str) -> list[str]:
        """Have every store compare what it has below a path with what it was sent; damaged files are removed there.

        Returns:
            A line for each of those, with its machine.
        """
        peers, name, _root = self._split(path)
        damaged = peers.ask_all(lambda store: store.check(name))
        if any(damaged.values()):
            peers.forget()
        return [f"{file} in the memory of {machine}" for machine, files in damaged.items() for file in files]

    def machines(self, path: str) -> list[str]:
        """Return the machines that hold files below a path."""
        peers, name, _root = self._split(path)
        files = peers.listing().items()
        return sorted({each for file, (_, machines) in files if file.startswith(f"{name}/") for each in machines})

    def _open(self, path: str, mode: str = "rb", **_: Any) -> Any:
        if mode == "wb":
            return self._writer(path)
        if mode != "rb":
            raise ValueError(f"{path}: a file here is read, or written anew")
        return _PeerReader(self, path, mode, cache_type="none", size=self.info(path)["size"])

    def _writer(self, path: str) -> PeerWriter:
        peers, name, _root = self._split(path)
        return PeerWriter(peers, name)

    def _split(self, path: str) -> tuple[Peers, str, str]:
        """Return the stores of the run that a path is in, the rest of the path, and the path of the run.

        Raises:
            FileNotFoundError: it is in no run that has stores.
        """
        text = self._strip_protocol(path)
        folder = Path("/") / text
        for each in (folder, *folder.parents):
            if each in self._runs or (each / FOLDER).is_dir():
                if each not in self._runs:
                    self._runs[each] = Peers(each)
                name = str(folder.relative_to(each))
                return self._runs[each], "" if name == "." else name, str(each).strip("/")
        raise FileNotFoundError(errno.ENOENT, f"is in no run that has {FOLDER}", path)

    def _entry(self, name: str, size: int | None) -> dict[str, Any]:
        return {"name": name, "size": size or 0, "type": "directory" if size is None else "file"}


class PeerPath(upath.UPath):
    """A path of it."""

    __slots__ = ()


fsspec.register_implementation(PROTOCOL, PeerFileSystem, clobber=True)
register_implementation(PROTOCOL, PeerPath, clobber=True)
