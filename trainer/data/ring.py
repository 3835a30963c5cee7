"""Batches in memory that all processes of a machine share: one writes each, and all that need it copy it.

A ring of slots, each with the rows of one step. The loader writes step s into slot s mod S once every reader has taken
step s - S; a reader takes step s once the slot says that it holds it. Every cell has one writer, so there is no lock
that a killed process could hold, and whoever replaces the loader sees in the cells what is still to be done.

[Note: nothing left behind] The memory is a file that has no name: no kill leaves anything in `/dev/shm`, and the last
process that ends frees it. Other processes of the same machine open it through `/proc/PID/fd`. Only between containers,
which do not see each other there, it needs a name, in a folder that all of them have mounted; the name carries the
run's token, is removed when all have it open, and has a lock on it from the start, by which a later run knows what a
killed one has left.

Shapes: S slots, R rows of a slot, T positions, C readers.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from netlayer.errors import CheckFailed, ConfigError
from netlayer.units import format_size
from trainer.data.sampler import Rows
from trainer.data.wakeup import WakeUp, fence

SHARED_MEMORY = Path("/dev/shm")
PREFIX = "netlayer-ring-"
"""How the names of rings begin that have one."""
RING_FOLDER = "job.data.ring_folder"
_LINE = 8  # cells of 8 bytes in a cache line: each reader's cell has a line of its own
_BYTES, _STARTS, _ERROR_BYTES, _LOADER_SLEEPS, _READERS_SLEEP = 0, 1, 2, 3, 4
_NUM_FIXED = 8
LOADER_SLEEP_S = 0.1
"""Longest sleep of a loader whose ring is full: a reader that takes a step wakes it."""
READER_SLEEP_S = 0.02
"""Longest sleep of a reader, in which it would miss that the loader has died: one that writes a step wakes it."""
_TOKEN_BYTES, _TEXT_BYTES = 16, 4096
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM)


@dataclass(frozen=True)
class RingShape:
    """Size of a ring; the same in all of its processes.

    Args:
        num_slots: S, steps read ahead.
        num_rows: R, of a step, at most.
        seq_len: T.
        num_readers: C.
        first_step: the first that any reader takes.
        has_segments, has_mask: as in `Rows`.
    """

    num_slots: int
    num_rows: int
    seq_len: int
    num_readers: int
    first_step: int = 1
    has_segments: bool = False
    has_mask: bool = False

    @property
    def num_cells(self) -> int:
        return _NUM_FIXED + -(-self.num_slots // _LINE) * _LINE + _LINE * self.num_readers

    @property
    def slot_bytes(self) -> int:
        """Bytes of one step, a multiple of a cache line."""
        width = 4 * (self.seq_len + 1) + self.seq_len * (4 * self.has_segments + self.has_mask)
        return -(-self.num_rows * width // 64) * 64

    @property
    def size_bytes(self) -> int:
        head = _TOKEN_BYTES + _TEXT_BYTES + 8 * self.num_cells
        return head + 64 + self.num_slots * self.slot_bytes


class Ring:
    """A ring that this process has mapped; make it with `create`, `attach` or `mapped`.

    Args:
        fd: of the memory; the ring closes it.
        address: by which other processes find it.
    """

    def __init__(self, fd: int, shape: RingShape, address: str, name: Path | None = None) -> None:
        self.fd, self.shape, self.address, self._name = fd, shape, address, name
        # Its views are many, and one that lives on keeps the mapping: it goes with the last of them.
        memory = memoryview(mmap.mmap(fd, shape.size_bytes))
        self._token, rest = memory[:_TOKEN_BYTES], memory[_TOKEN_BYTES:]
        self._text, rest = rest[:_TEXT_BYTES], rest[_TEXT_BYTES:]
        cells = np.frombuffer(rest, dtype=np.int64, count=shape.num_cells)
        self._fixed = cells[:_NUM_FIXED]
        self._ready = cells[_NUM_FIXED : _NUM_FIXED + shape.num_slots]
        self._taken = cells[len(cells) - _LINE * shape.num_readers :: _LINE]
        self.loader_wakeup = WakeUp(self._fixed[_LOADER_SLEEPS : _LOADER_SLEEPS + 1], LOADER_SLEEP_S)
        self.reader_wakeup = WakeUp(self._fixed[_READERS_SLEEP : _READERS_SLEEP + 1], READER_SLEEP_S)
        begin = -(-(_TOKEN_BYTES + _TEXT_BYTES + 8 * shape.num_cells) // 64) * 64
        self._slots = [_rows_at(memory[begin + slot * shape.slot_bytes :], shape) for slot in range(shape.num_slots)]

    @classmethod
    def create(cls, shape: RingShape, folder: Path | None = None, *, token: bytes = b"") -> Ring:
        """Make a ring.

        Args:
            folder: gives it a name there, for other containers; None: it has none, and lies in shared memory, or where
                that has no room for it in the folder of temporary files.
            token: of the run, in the name and in the memory; random where none is given.

        Raises:
            ConfigError: there is no room.
        """
        token = (token or os.urandom(_TOKEN_BYTES)).ljust(_TOKEN_BYTES, b"\0")[:_TOKEN_BYTES]
        size = shape.size_bytes
        if folder is not None:
            _remove_left(folder)
            place, fd = folder, _allocate(folder, size)
            fcntl.flock(fd, fcntl.LOCK_SH)
            name = folder / f"{PREFIX}{token.hex()}"
            _give_name(fd, name)
            address = str(name)
        else:
            place = choose_folder(size)
            fd, name = _allocate(place, size), None
            address = f"/proc/{os.getpid()}/fd/{fd}"
        ring = cls(fd, shape, address, name)
        ring._token[:] = token
        ring._taken[:] = shape.first_step - 1
        return ring

    @classmethod
    def attach(cls, address: str, shape: RingShape, token: bytes) -> Ring:
        """Map a ring that another process has made.

        Raises:
            ConfigError: it cannot be reached from here.
        """
        remedy = f"set {RING_FOLDER} to a folder that all containers of the machine have mounted"
        try:
            fd = os.open(address, os.O_RDWR)
        except OSError as exc:
            rule = f"the loader's memory {address} cannot be opened by another rank of the machine ({exc.strerror})"
            raise ConfigError(RING_FOLDER, None, rule, remedy) from exc
        # Checked before it is mapped whole: a process id of another container is another process here.
        is_it = os.fstat(fd).st_size == shape.size_bytes
        if not is_it or os.pread(fd, _TOKEN_BYTES, 0) != token.ljust(_TOKEN_BYTES, b"\0")[:_TOKEN_BYTES]:
            os.close(fd)
            raise ConfigError(RING_FOLDER, None, f"{address} is not the loader's memory", remedy)
        return cls(fd, shape, address)

    @classmethod
    def mapped(cls, fd: int, shape: RingShape) -> Ring:
        """Map a ring by a file descriptor that this process has inherited."""
        return cls(fd, shape, "")

    @property
    def token(self) -> bytes:
        return bytes(self._token)

    def share_wakeup(self, first: Ring) -> None:
        """Have readers of this ring wake its loader by the word of another one, on which it sleeps for both."""
        self.loader_wakeup = first.loader_wakeup

    def unlink(self) -> None:
        """Remove its name, if it has one: when all processes have it open."""
        if self._name is not None:
            self._name.unlink(missing_ok=True)
            self._name = None

    def close(self) -> None:
        """Let go of it in this process."""
        self.unlink()
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    # What the loader calls.

    def begin(self) -> int:
        """Count a start of the loader, and return the first step that may be missing."""
        self._fixed[_STARTS] += 1
        return int(self._taken.min()) + 1

    def has_room(self, step: int) -> bool:
        """Return whether all readers have taken what the slot of this step held before."""
        return int(self._taken.min()) >= step - self.shape.num_slots

    def holds(self, step: int) -> bool:
        """Return whether the step is there."""
        return int(self._ready[step % self.shape.num_slots]) == step

    def write(self, step: int, fill: Callable[[Rows], int]) -> None:
        """Have a step's rows filled in; a loader that dies meanwhile leaves the slot empty.

        Args:
            fill: gets the rows of the slot, and returns the bytes that were read for them.
        """
        slot = step % self.shape.num_slots
        self._ready[slot] = 0
        fence()
        num_bytes = fill(self._slots[slot])
        fence()
        self._fixed[_BYTES] += num_bytes
        self._ready[slot] = step
        self.reader_wakeup.wake()

    def fail(self, line: str) -> None:
        """Tell all readers why there will be no more steps."""
        text = line.encode()[:_TEXT_BYTES]
        self._text[: len(text)] = text
        fence()
        self._fixed[_ERROR_BYTES] = len(text)
        self.reader_wakeup.wake()

    # What readers call.

    def take(self, step: int, reader: int, copy: Callable[[Rows], None]) -> None:
        """Copy a step that is there, and let the loader have its slot.

        Args:
            reader: 0 .. C - 1, this process; it takes each step once, in order.
            copy: gets the rows of the slot.
        """
        fence()
        copy(self._slots[step % self.shape.num_slots])
        fence()
        self._taken[reader] = step
        self.loader_wakeup.wake()

    def skip(self, step: int, reader: int) -> None:
        """Let the loader have the slots of all steps up to this one, which the reader does not want."""
        self._taken[reader] = max(step, int(self._taken[reader]))
        self.loader_wakeup.wake()

    def wait(self, step: int, idle: Callable[[], None]) -> None:
        """Wait until a step is there; `idle` is called at least every READER_SLEEP_S, and what it raises ends it."""
        self.reader_wakeup.wait(lambda: self.holds(step), idle)

    @property
    def error(self) -> str:
        """Why the loader has given up; empty: it has not."""
        length = int(self._fixed[_ERROR_BYTES])
        fence()
        return bytes(self._text[:length]).decode(errors="replace")

    @property
    def bytes_read(self) -> int:
        """Bytes of the datasets' files that the loader has read, those of its predecessors too."""
        return int(self._fixed[_BYTES])

    @property
    def num_starts(self) -> int:
        """Number of times that a loader has begun."""
        return int(self._fixed[_STARTS])

    @property
    def num_ready(self) -> int:
        """Slots that hold a step which some reader has still to take."""
        return int((self._ready > self._taken.min()).sum())


def choose_folder(size_bytes: int) -> Path:
    """Return the folder for a ring without a name: shared memory, or else the one of temporary files.

    Raises:
        ConfigError: neither has room.
    """
    places = [SHARED_MEMORY, Path(tempfile.gettempdir())]
    for folder in places:
        if free_bytes(folder) >= size_bytes:
            return folder
    free = ", ".join(f"{folder} has {format_size(max(0, free_bytes(folder)))} free" for folder in places)
    rule = f"the loader reads ahead into {format_size(size_bytes)} of shared memory, and {free}"
    remedy = f"lower job.data.read_ahead, or set {RING_FOLDER} to a folder with room (docker: raise --shm-size)"
    raise ConfigError(RING_FOLDER, None, rule, remedy)


def free_bytes(folder: Path) -> int:
    """Return what this user may still write there; -1 where there is no such folder."""
    try:
        usage = os.statvfs(folder)
    except OSError:
        return -1
    return usage.f_bavail * usage.f_frsize if os.access(folder, os.W_OK) else -1


def raise_failure(line: str) -> None:
    """Raise what the loader has said; one line, on all ranks of its machine."""
    if line:
        raise CheckFailed(f"the loader has given up: {line}")


def _rows_at(memory: memoryview, shape: RingShape) -> Rows:
    """Return the arrays of a slot."""
    num_rows, seq_len = shape.num_rows, shape.seq_len
    at = 0

    def array(dtype: type[np.generic], width: int) -> NDArray[Any]:
        nonlocal at
        whole = np.frombuffer(memory, dtype=dtype, count=num_rows * width, offset=at)
        at += whole.nbytes
        return whole.reshape(num_rows, width)

    tokens = array(np.int32, seq_len + 1)
    segments = array(np.int32, seq_len) if shape.has_segments else None
    return Rows(tokens, segments, array(np.uint8, seq_len) if shape.has_mask else None)


def _allocate(folder: Path, size_bytes: int) -> int:
    """Return a file without a name that has all its memory: one that grows as it is written would end in SIGBUS."""
    try:
        fd = _open_nameless(folder)
    except OSError as exc:
        rule = f"cannot be written ({exc.strerror})"
        raise ConfigError(RING_FOLDER, folder, rule, "give a folder of yours that has room") from exc
    try:
        os.posix_fallocate(fd, 0, size_bytes)
    except OSError as exc:
        os.close(fd)
        if exc.errno not in _NO_ROOM:
            raise
        rule = f"has no room for the {format_size(size_bytes)} that the loader reads ahead into"
        remedy = "lower job.data.read_ahead, or give a folder with room"
        raise ConfigError(RING_FOLDER, folder, rule, remedy) from exc
    return fd


def _open_nameless(folder: Path) -> int:
    with contextlib.suppress(OSError):  # a file system without them, or an old kernel
        return os.open(folder, os.O_RDWR | os.O_TMPFILE | os.O_CLOEXEC, 0o600)
    fd, name = tempfile.mkstemp(prefix=PREFIX, dir=folder)
    Path(name).unlink()
    return fd


def _give_name(fd: int, name: Path) -> None:
    """Link a nameless file: it appears under its name with its lock on it, and no moment without."""
    folder = os.open(name.parent, os.O_RDONLY)
    try:
        # With a folder's descriptor Python follows the link in /proc, which is the file itself.
        os.link(f"/proc/self/fd/{fd}", name.name, dst_dir_fd=folder, follow_symlinks=True)
    except OSError as exc:
        raise ConfigError(
            RING_FOLDER, name.parent, f"takes no such file ({exc.strerror})", "give another folder"
        ) from exc
    finally:
        os.close(folder)


def _remove_left(folder: Path) -> None:
    """Remove what killed runs have left: rings under a name that no process has locked."""
    for path in _rings_in(folder):
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDWR)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                path.unlink()
            finally:
                os.close(fd)


def _rings_in(folder: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError):
        yield from folder.glob(f"{PREFIX}*")
