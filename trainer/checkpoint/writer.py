"""The second stage of a save: a process a rank that writes what lies in shared memory, beside the training.

A process, for it shares no interpreter lock and no CUDA context with the rank; one a rank, for then digests and writes
of a machine's ranks run on as many cores, and a rank's file depends on that rank alone. It gets the rank's buffer as an
open file without a name (memfd), so that nothing is left of it whoever is killed, and needs no torch: it starts in a
tenth of a second.

It never outlives its rank: the end of the pipe ends it at once, in the midst of a write too, and the kernel kills it
where the rank is killed. Signals that ask for the end (SIGTERM, SIGUSR1, Ctrl-C) are the rank's to answer, which then
writes a last checkpoint: here they are held back.

[Note: injected ends] NETLAYER_CHECKPOINT_KILL = `PHASE` or `PHASE:N` kills this process (SIGKILL) at the N-th moment of
a phase (prepare, write, publish, commit), counted from 1; `PHASE:N:rank` the rank with it. NETLAYER_CHECKPOINT_SLOW_S
delays each item by so many seconds. For tests of what is left then.

[Note: in the background] What the training loses to this process is a share of processors, memory bandwidth and disk.
It is nice, also in what it reads and writes (Linux derives that from the niceness); each byte is read once for its
digest and its copy, 4 MiB at a time; on a local disk it goes past the page cache (`trainer.checkpoint.storage`); and
job.checkpoint.write_gbps limits all of that together, until training waits for it. What it took of a processor is in
its reply.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import json
import logging
import mmap
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import IO, Any, Literal, cast

from trainer.checkpoint.digest import digest
from trainer.checkpoint.distcp import ItemWriter, read_trailer
from trainer.checkpoint.names import METADATA, TOKENIZER, sealed
from trainer.checkpoint.pace import Pace
from trainer.checkpoint.storage import Storage, open_storage

logger = logging.getLogger(__name__)

KILL, SLOW = "NETLAYER_CHECKPOINT_KILL", "NETLAYER_CHECKPOINT_SLOW_S"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h

Pieces = Sequence[bytes | memoryview]


@dataclass(frozen=True)
class Framed:
    """An item as it is sent once: what stands before and after its elements, and where those lie in the buffer."""

    before: bytes
    start: int
    length: int
    after: bytes


@dataclass(frozen=True)
class Prepare:
    """Create the checkpoint; the first rank's alone."""

    part: str
    needed_bytes: int


@dataclass(frozen=True)
class Write:
    """Write this rank's file: the items of the buffer, then some more.

    Args:
        further: whole items, which change from save to save.
        rate_bps: limit, bytes a second; 0: none.
        without: leave out the digests, or the writes: for measurements of what each costs. Such a file is never
            published, for no reader would take it as whole.
    """

    part: str
    file: str
    further: Sequence[bytes] = ()
    rate_bps: float = 0.0
    without: Literal["", "digests", "writes"] = ""


@dataclass(frozen=True)
class Publish:
    """Describe a checkpoint of which all files are written, and give it its name; the first rank's alone.

    Args:
        files: of tensors, of all ranks.
        metadata: content of `.metadata`.
        tokenizer: content of its file; None: there is none.
        facts: of `meta.json`, without digests.
        pending: it is not verified yet.
        keep, keep_every: see `Storage.prune`.
    """

    part: str
    name: str
    files: Sequence[str]
    metadata: bytes
    tokenizer: bytes | None
    facts: Mapping[str, Any]
    pending: bool
    keep: int
    keep_every: int


@dataclass(frozen=True)
class Commit:
    """Make a pending checkpoint a good one."""

    name: str
    keep: int
    keep_every: int


@dataclass(frozen=True)
class Discard:
    """Remove a checkpoint in the making."""

    part: str


Command = Prepare | Write | Publish | Commit | Discard


@dataclass(frozen=True)
class Reply:
    """Outcome of a command.

    Args:
        number: of the command.
        num_bytes: written.
        errno: of the system's error; 0: it is done; -1: something else is wrong, which `text` says.
        free_bytes: where there was no room; -1: nobody says.
        cpu_s: time of a processor that it took, of all threads and of the kernel for them.
    """

    number: int
    num_bytes: int = 0
    errno: int = 0
    text: str = ""
    free_bytes: int = -1
    cpu_s: float = 0.0


class Aborted(Exception):
    """The rank has given up the save."""


def run_command(
    storage: Storage,
    command: Command,
    items: Callable[[], Iterable[Pieces]],
    check: Callable[[str], None],
    hurry: threading.Event | None = None,
) -> int:
    """Do what a command says; return the number of bytes written.

    Args:
        items: of this rank's file, in their order.
        check: called at each moment at which the process may be killed or the save given up, with the phase.
        hurry: as in `Pace`.

    Raises:
        OSError: the system refuses it.
        ValueError: a file of another rank is not there, or not whole.
    """
    if isinstance(command, Prepare):
        check("prepare")
        storage.create(command.part, command.needed_bytes)
        check("prepare")
        return 0
    if isinstance(command, Write):
        return _write(storage, command, items, check, hurry)
    if isinstance(command, Publish):
        return _publish(storage, command, check)
    if isinstance(command, Commit):
        check("commit")
        storage.commit(command.name)
        check("commit")
        _prune(storage, command)
        check("commit")
    else:
        storage.discard(command.part)
    return 0


def _write(
    storage: Storage,
    command: Write,
    items: Callable[[], Iterable[Pieces]],
    check: Callable[[str], None],
    hurry: threading.Event | None,
) -> int:
    check("write")
    pace = Pace(command.rate_bps, hurry)

    def after(num_bytes: int) -> None:
        pace.after(num_bytes)
        check("piece")  # an item may take minutes at a low rate

    with storage.write(command.part, command.file) as stream:
        into = cast(IO[bytes], _Nowhere()) if command.without == "writes" else stream
        writer = ItemWriter(into, after, has_digests=command.without != "digests")
        try:
            for pieces in items():
                writer.add(pieces)
                check("write")
            for content in command.further:
                writer.add([content])
            writer.finish()
            check("write")
        finally:
            writer.close()
    check("write")
    return writer.num_bytes


class _Nowhere:
    """A stream that writes nothing: see `Write.without`."""

    def write(self, content: Any) -> int:
        return len(content)


def _publish(storage: Storage, command: Publish, check: Callable[[str], None]) -> int:
    """Check the files of all ranks, write what describes them, and give the checkpoint its name."""
    check("publish")
    digests, num_bytes = {}, 0
    for file in command.files:
        try:
            size, read = storage.reader(command.part, file)
            digests[file], _ = read_trailer(size, read)
        except FileNotFoundError as exc:
            raise ValueError(f"{file} is not there: ranks write to one folder that all see") from exc
        except ValueError as exc:
            raise ValueError(f"{file} is not whole: {exc}") from exc
        num_bytes += size
    texts = {METADATA: command.metadata}
    if command.tokenizer is not None:
        texts[TOKENIZER] = command.tokenizer
    for file, content in texts.items():
        with storage.write(command.part, file) as stream:
            stream.write(content)
        digests[file] = digest(content)
        check("publish")
    meta = sealed({**command.facts, "digests": digests}).encode()
    storage.publish(command.part, command.name, meta, pending=command.pending)
    check("publish")
    if not command.pending:
        _prune(storage, command)
        check("publish")
    return num_bytes


def _prune(storage: Storage, command: Publish | Commit) -> None:
    """Remove the older checkpoints that are not to be kept; what fails is tried again after the next one.

    The new one is published by now: an error here must not be taken for one of its own, for that would remove it.
    """
    try:
        storage.prune(command.keep, command.keep_every)
    except Exception as exc:  # noqa: BLE001  (a store's client has errors of its own)
        text = str(exc).partition("\n")[0] or type(exc).__name__
        logger.warning("%s is saved; older checkpoints stay until the next save: %s", command.name, text)


def reply_of(number: int, storage: Storage, run: Callable[[], int]) -> Reply:
    """Return the reply to a command."""
    try:
        return Reply(number, run())
    except OSError as exc:
        free = -1
        if exc.errno == errno.ENOSPC:
            with contextlib.suppress(OSError):
                free = storage.free_bytes()
        return Reply(number, errno=exc.errno or errno.EIO, text=exc.strerror or str(exc), free_bytes=free)
    except Aborted:
        return Reply(number, errno=-1, text="given up")
    except Exception as exc:  # noqa: BLE001  whatever a store's client raises: the rank says it
        return Reply(number, errno=-1, text=f"{exc}" or type(exc).__name__)


class _Process:
    """The commands of one rank, one after the other."""

    def __init__(self, connection: Connection, buffer: memoryview, *, direct: bool) -> None:
        self._connection, self._buffer, self._direct = connection, buffer, direct
        self._storages: dict[str, Storage] = {}
        self._items: list[Framed] = []
        self._commands: queue.Queue[tuple[int, Command, str, threading.Event]] = queue.Queue()
        self._hurry = threading.Event()
        """Of the command that came last: without a limit of its rate from now on."""
        self._number = self._aborted = 0  # of commands
        self._kill, self._slow_s = _kill_of(os.environ.get(KILL, "")), float(os.environ.get(SLOW, 0))

    def listen(self) -> None:
        """Take commands as they come, until the rank is gone: then this process is, at once."""
        while True:
            try:
                message = self._connection.recv()
            except (EOFError, OSError):
                os._exit(0)
            if isinstance(message, int):
                self._aborted = message
                self._hurry.set()
            elif message is None:
                self._hurry.set()
            elif isinstance(message, list):
                self._items = message
            else:
                self._hurry = threading.Event()
                self._commands.put((*message, self._hurry))

    def work(self) -> None:
        while True:
            number, command, location, hurry = self._commands.get()
            self._number = number
            try:
                if location not in self._storages:
                    self._storages[location] = open_storage(location, direct=self._direct)
            except Exception as exc:  # noqa: BLE001  a missing package, or what a client says of its settings
                self._connection.send(Reply(number, errno=-1, text=f"{exc}"))
                continue
            storage = self._storages[location]
            run = lambda: run_command(storage, command, self._pieces, self._check, hurry)  # noqa: B023, E731
            begun_s = time.process_time()
            reply = reply_of(number, storage, run)
            self._connection.send(dataclasses.replace(reply, cpu_s=time.process_time() - begun_s))

    def _pieces(self) -> Iterable[Pieces]:
        for item in self._items:
            if self._slow_s:
                time.sleep(self._slow_s)
            yield item.before, self._buffer[item.start : item.start + item.length], item.after

    def _check(self, phase: str) -> None:
        if self._kill is not None and self._kill[0] == phase:
            self._kill = phase, self._kill[1] - 1, self._kill[2]
            if not self._kill[1]:
                if self._kill[2]:
                    os.kill(os.getppid(), signal.SIGKILL)
                os.kill(os.getpid(), signal.SIGKILL)
        if self._number == self._aborted:
            raise Aborted


def _kill_of(text: str) -> tuple[str, int, bool] | None:
    phase, _, rest = text.partition(":")
    count, _, whom = rest.partition(":")
    return (phase, int(count or 1), whom == "rank") if phase else None


def main(arguments: Sequence[str]) -> None:
    """Serve a rank: the pipe and the buffer are open files that it inherits."""
    settings = json.loads(arguments[0])
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != settings["parent"]:  # it had gone before
        return
    # The training's own threads go first.
    with contextlib.suppress(OSError):
        os.nice(settings["nice"])
    size = settings["num_bytes"]
    # All pages are there, and are mapped now: faults, one for 64 KiB, took half of the first save's kernel time.
    flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
    memory = mmap.mmap(settings["buffer"], size, flags=flags, prot=mmap.PROT_READ) if size else b""
    buffer = memoryview(memory)
    process = _Process(Connection(settings["pipe"]), buffer, direct=settings["direct"])
    threading.Thread(target=process.work, name="writes", daemon=True).start()
    process.listen()
