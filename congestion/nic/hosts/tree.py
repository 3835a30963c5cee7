"""The files of one host below a root: `/`, or a copy or simulation of a host's sysfs, debugfs and configfs.

Every path is walked name by name from the root's own descriptor, so that neither `..`, nor a symbolic link, nor a name
swapped in between leads out of it: a way out is refused, not clipped. What is written must be a regular file with one
name. Not covered: what the files mean.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path

from netlayer.errors import ConfigError

_MOST_LINKS = 40
_MOST_BYTES = 1 << 16
_REMEDY = "look at what stands there; nothing outside of --root is read or written"


class Tree:
    """Paths are relative to the root, with or without a leading slash.

    Args:
        root: an existing folder.
        live: the files are a kernel's: writes have effects, folders of configfs fill themselves. Else they are bytes.
            None: so where the root is this machine's (`is_host`).

    Raises:
        ConfigError: the root is no folder, or, of any method, a path leads out of it or is no regular file.
    """

    def __init__(self, root: Path, live: bool | None = None) -> None:
        self.root = root.absolute()
        if not self.root.is_dir():
            raise ConfigError("--root", root, "is no folder", "give / or a folder that holds sys/")
        self.is_host = self.root.samefile("/")
        self.live = self.is_host if live is None else live

    def names(self, path: str) -> list[str]:
        """List a folder's names, sorted; none where there is no such folder.

        Raises:
            PermissionError: it may not be read.
        """
        try:
            with self._opened(path, os.O_RDONLY | os.O_DIRECTORY) as fd:
                return sorted(os.listdir(fd))  # noqa: PTH208 - of a descriptor
        except (FileNotFoundError, NotADirectoryError):
            return []

    def is_folder(self, path: str) -> bool:
        """
        Raises:
            PermissionError: a folder on the way may not be searched.
        """
        return self._mode(path, stat.S_ISDIR)

    def is_file(self, path: str) -> bool:
        """Whether the path is a file; errors as `is_folder`."""
        return self._mode(path, stat.S_ISREG)

    def text(self, path: str) -> str | None:
        """A file's words without space around; None where there is none or the kernel has nothing to say."""
        try:
            return self.read(path).decode(errors="replace").strip()
        except OSError:
            return None

    def read(self, path: str) -> bytes:
        """The bytes of a file.

        Raises:
            OSError: it is absent, or the kernel refuses.
        """
        with self._opened(path, os.O_RDONLY | os.O_NONBLOCK, regular=True) as fd:
            parts = []
            while part := os.read(fd, _MOST_BYTES):
                parts.append(part)
                if sum(map(len, parts)) > _MOST_BYTES:
                    raise ConfigError("--root", path, f"is longer than {_MOST_BYTES} bytes", _REMEDY)
            return b"".join(parts)

    def write(self, path: str, data: bytes) -> None:
        """Replace what an existing file says, in one write as kernel files want it.

        Raises:
            OSError: it is absent, or the kernel refuses the value.
        """
        with self._opened(path, os.O_WRONLY | os.O_TRUNC | os.O_NONBLOCK, regular=True, alone=True) as fd:
            if os.write(fd, data) != len(data):
                raise OSError(f"{path}: took only a part of {len(data)} bytes")

    def make_folder(self, path: str) -> None:
        """
        Raises:
            OSError: it is there, or the kernel refuses.
        """
        parent, _, name = path.rstrip("/").rpartition("/")
        with self._opened(parent, os.O_RDONLY | os.O_DIRECTORY) as fd:
            os.mkdir(name, dir_fd=fd)

    def remove_folder(self, path: str) -> None:
        """Remove a folder that `make_folder` made; as that."""
        parent, _, name = path.rstrip("/").rpartition("/")
        with self._opened(parent, os.O_RDONLY | os.O_DIRECTORY) as fd:
            os.rmdir(name, dir_fd=fd)

    def real(self, path: str) -> tuple[str, ...]:
        """The names on the way to what a path means, links followed; empty where it does not exist."""
        try:
            stack, names = self._walk(path)
        except OSError:
            return ()
        for fd in stack:
            os.close(fd)
        return tuple(names)

    def _mode(self, path: str, kind: Callable[[int], bool]) -> bool:
        try:
            with self._reached(path) as fd:
                return kind(os.fstat(fd).st_mode)
        except (FileNotFoundError, NotADirectoryError):
            return False

    @contextlib.contextmanager
    def _reached(self, path: str) -> Iterator[int]:
        stack, _ = self._walk(path)
        try:
            yield stack[-1]
        finally:
            for fd in stack:
                os.close(fd)

    @contextlib.contextmanager
    def _opened(self, path: str, flags: int, *, regular: bool = False, alone: bool = False) -> Iterator[int]:
        with self._reached(path) as reached:
            status = os.fstat(reached)
            if regular and not stat.S_ISREG(status.st_mode):
                raise ConfigError("--root", path, "is no regular file", _REMEDY)
            if alone and status.st_nlink != 1:
                raise ConfigError("--root", path, "is a file with a second name (hard link)", _REMEDY)
            fd = os.open(f"/proc/self/fd/{reached}", flags | os.O_CLOEXEC)
        try:
            yield fd
        finally:
            os.close(fd)

    def _walk(self, path: str) -> tuple[list[int], list[str]]:
        """Descriptors and names from the root to what the path means; the caller closes the descriptors."""
        way = _Way(self.root)
        todo, links = deque(path.split("/")), 0
        try:
            while todo:
                name = todo.popleft()
                if name == ".." and not way.up() and not self.is_host:
                    raise ConfigError("--root", path, "leads out of the root", _REMEDY)
                target = way.enter(name) if name not in ("", ".", "..") else None
                if target is None:
                    continue
                links += 1
                if links > _MOST_LINKS:
                    raise ConfigError("--root", path, "is a circle of links", _REMEDY)
                if target.startswith("/"):
                    if not self.is_host:
                        raise ConfigError("--root", path, f"leads out of the root, to {target!r}", _REMEDY)
                    way.leave()
                todo.extendleft(reversed(target.split("/")))
        except BaseException:
            way.close()
            raise
        return way.stack, way.names


class _Way:
    """Progress of a walk: a descriptor for the root and for each name below it."""

    def __init__(self, root: Path) -> None:
        self.stack = [os.open(root, os.O_PATH | os.O_CLOEXEC | os.O_DIRECTORY)]
        self.names: list[str] = []

    def enter(self, name: str) -> str | None:
        """Go one name on; a link is not entered, its target is given."""
        fd = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=self.stack[-1])
        self.stack.append(fd)
        self.names.append(name)
        if not stat.S_ISLNK(os.fstat(fd).st_mode):
            return None
        target = os.readlink("", dir_fd=fd)
        self.up()
        return target

    def up(self) -> bool:
        """Go one name back; False at the root."""
        if self.names:
            os.close(self.stack.pop())
            self.names.pop()
            return True
        return False

    def leave(self) -> None:
        """Go back to the root."""
        while self.up():
            pass

    def close(self) -> None:
        for fd in self.stack:
            os.close(fd)
