"""Old values of a change: kept on disk before the first write, so that any death can be undone.

One journal is open at most: `open.json` in the state folder. It is written aside, synced and moved there, so that it is
whole or absent; a change that ended well renames it to `applied-N.json`, one that was undone to `undone-N.json`. What
another user could have written is not believed, nor a path that no plan of ours has.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from congestion.nic.vendors.tool_settings import ToolSetting, restore
from netlayer.errors import ConfigError
from netlayer.results import sync_folder, utc_now

VERSION = 1
_OPEN = "open.json"
# All that plans write to: a forged journal cannot make root restore a file of /etc, say.
_BELOW = ("sys/class/", "sys/kernel/debug/", "sys/kernel/config/")
_ROLLBACK = "run `netlayer nic rollback --apply` first (with the same --root and --state)"


@dataclass
class Entry:
    """One thing that is to change.

    Args:
        kind: file, folder (made, to be removed), trigger, or tool.
        target: the path below the root; of a tool its setting's kind.
        fields: of a tool's setting.
        old, new: bytes of a file as latin-1 text, or values of a tool.
        touches: paths that the kernel changes besides, with their old bytes.
        undo: what undoes a tool's change, for a person to read.
    """

    kind: str
    target: str
    old: str = ""
    new: str = ""
    fields: list[str] = field(default_factory=list)
    touches: list[list[str]] = field(default_factory=list)
    undo: list[str] = field(default_factory=list)

    @property
    def setting(self) -> ToolSetting:
        return restore(self.target, self.fields)


@dataclass
class Journal:
    """A change, as it is kept: every old value, or at first only folders that are to be made.

    Args:
        boot: the kernel's name for the time since the host was started; empty where the root has none.
    """

    root: str
    profile: str
    started_utc: str
    entries: list[Entry]
    version: int = VERSION
    boot: str = ""


class State:
    """The state folder of one host.

    Raises:
        ConfigError: it cannot be made or written.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @contextlib.contextmanager
    def locked(self) -> Iterator[int]:
        """One change at a time: the lock's descriptor, which goes with this process and those that inherit it.

        Raises:
            ConfigError: another one runs, or others may write in the folder.
        """
        with self._translated():
            self._make()
        _refuse_others(self.folder, os.stat(self.folder))  # noqa: PTH116
        with self._translated():
            # O_CLOEXEC: the programs of a change inherit it (`Tools.holding`), and nothing else that is started.
            lock = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            try:
                # Of the open file, so the kernel lets it go with the last process that has it, however that one dies.
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as exc:
                raise ConfigError("--state", self.folder, "another change of this host runs", "wait for it") from exc
            yield lock
        finally:
            os.close(lock)

    def find_open(self) -> Journal | None:
        """The change that was begun and not ended."""
        path = self.folder / _OPEN
        # lexists: a dangling link in its place is an error of `_load`, and not the absence of a change.
        return _load(path) if os.path.lexists(path) else None

    def refuse_open(self) -> None:
        """
        Raises:
            ConfigError: a change was begun and not ended.
        """
        journal = self.find_open()
        if journal is not None:
            rule = f"holds a change of {journal.started_utc} ({journal.profile}) that did not end"
            raise ConfigError("--state", self.folder / _OPEN, rule, _ROLLBACK)

    def write(self, journal: Journal) -> None:
        """Make this the open journal, on disk when this returns."""
        part = self.folder / ".part"
        with self._translated():
            with contextlib.suppress(FileNotFoundError):
                # Left by a process that died here, or planted: never opened, for O_EXCL below makes a new file.
                part.unlink()
            fd = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            try:
                data = json.dumps(asdict(journal), indent=1).encode()
                while data:
                    data = data[os.write(fd, data) :]  # a write may take only a part
                os.fsync(fd)
            finally:
                os.close(fd)
            # After fsync: else a power loss could leave the new name with an empty file behind it.
            os.replace(part, self.folder / _OPEN)  # noqa: PTH105
            self._sync()

    def close(self, outcome: str) -> Path | None:
        """End the open journal: it is kept as `applied-N.json` or `undone-N.json`; None where none was open."""
        # One count for both outcomes: higher numbers ended later.
        number = max(self._numbers(), default=0) + 1
        kept = self.folder / f"{outcome}-{number}.json"
        with self._translated():
            try:
                os.replace(self.folder / _OPEN, kept)  # noqa: PTH105
            except FileNotFoundError:
                return None
            self._sync()
        return kept

    def reopen(self) -> Journal | None:
        """The last change that ended well, made the open journal again, so that its undoing survives a death too."""
        numbers = [number for number in self._numbers() if (self.folder / f"applied-{number}.json").exists()]
        if not numbers:
            return None
        path = self.folder / f"applied-{max(numbers)}.json"
        journal = _load(path)
        with self._translated():
            os.replace(path, self.folder / _OPEN)  # noqa: PTH105
            self._sync()
        return journal

    def last_applied(self) -> Journal | None:
        """Return the journal that `reopen` would take."""
        numbers = [number for number in self._numbers() if (self.folder / f"applied-{number}.json").exists()]
        return _load(self.folder / f"applied-{max(numbers)}.json") if numbers else None

    def _numbers(self) -> list[int]:
        try:
            names = os.listdir(self.folder)  # noqa: PTH208
        except FileNotFoundError:
            return []
        return [
            int(match[1])
            for match in (re.fullmatch(r"(?:applied|undone)-(\d+)\.json", name) for name in names)
            if match
        ]

    def _make(self) -> None:
        """The folder with those above it, each on disk before the next: a journal in it is found after a power loss."""
        folder = self.folder.absolute()
        for missing in reversed([one for one in (folder, *folder.parents) if not one.exists()]):
            missing.mkdir(mode=0o700, exist_ok=True)
            sync_folder(missing.parent)

    def _sync(self) -> None:
        sync_folder(self.folder)

    @contextlib.contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            raise ConfigError(
                "--state", self.folder, f"cannot be written ({exc.strerror})", "give a folder of yours, or run as root"
            ) from exc


def new_journal(root: Path, profile: str, entries: list[Entry], boot: str = "") -> Journal:
    """A journal that begins now."""
    return Journal(str(root), profile, utc_now(), entries, boot=boot)


def _refuse_others(path: Path, status: os.stat_result) -> None:
    """
    Raises:
        ConfigError: another user owns it or may write it.
    """
    if status.st_uid != os.geteuid() or status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        rule = f"may be written by others (owner {status.st_uid}, mode {stat.S_IMODE(status.st_mode):o})"
        remedy = "look at who wrote it; then give a folder of your own, or chown it and chmod go-w"
        raise ConfigError("--state", path, rule, remedy)


def _read(path: Path) -> bytes:
    # O_NOFOLLOW: a link could lead to anything; O_NONBLOCK: a FIFO in its place would wait for a writer.
    with os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
        # Of what is open: the path may mean another file by now.
        _refuse_others(path, os.fstat(file.fileno()))
        return file.read()


def _check(entry: Entry) -> None:
    """
    Raises:
        ValueError: no plan of ours has such an entry.
    """
    texts = (entry.kind, entry.target, entry.old, entry.new, *entry.fields, *entry.undo)
    pairs = [one for pair in entry.touches for one in pair]
    if not all(isinstance(one, str) for one in (*texts, *pairs)):
        raise ValueError(f"an entry of {str(entry.target)[:80]!r} holds what is no text")
    if entry.kind == "tool":
        # Building it checks the kind and every field: a text that could be an option of a program raises here.
        _ = entry.setting
        return
    if entry.kind not in ("file", "folder", "trigger"):
        raise ValueError(f"unknown kind {entry.kind}")
    for target in (entry.target, *(path for path, _old in entry.touches)):
        if not target.startswith(_BELOW) or ".." in target.split("/"):
            raise ValueError(f"{target!r} is no file of a NIC")


def _load(path: Path) -> Journal:
    try:
        # Here too, for a look (rollback without --apply) reads it without `locked`.
        _refuse_others(path.parent, os.stat(path.parent))  # noqa: PTH116
        tree: Any = json.loads(_read(path))
        if tree["version"] != VERSION:
            raise ValueError(f"version {tree['version']}, known is {VERSION}")
        entries = [Entry(**entry) for entry in tree.pop("entries")]
        journal = Journal(entries=entries, **tree)
        for entry in journal.entries:
            _check(entry)
    except OSError as exc:
        raise ConfigError("--state", path, f"cannot be read ({exc.strerror})", "run as the user who applied") from exc
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as exc:
        remedy = "it was written by something else: restore by hand what it names, then move it away"
        raise ConfigError("--state", path, f"is no journal ({exc})", remedy) from exc
    return journal
