"""The journal of a run: one JSON line a transition, on the disk before anything is done about it.

Every line holds all facts, so its last whole line is enough to go on from; earlier ones are the record of what was
decided, and of the evidence. A line that was cut off by a crash is dropped when the journal is opened.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

from netlayer.errors import ConfigError
from netlayer.results import utc_now
from trainer.resilience.machine import Event, Facts, State, next_state

VERSION = 1
_TAIL_BYTES = 8 << 20
_LAST_BYTES = 1 << 18  # of the last line and the end of the one before, mostly


class Journal:
    """Append-only file of transitions; one process has it open at a time (the driver, by its lock).

    Args:
        path: made where it is missing, with mode 0600.

    Raises:
        ConfigError: it is of a later version, or not a journal.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        size = os.fstat(self._descriptor).st_size
        tail = os.pread(self._descriptor, _TAIL_BYTES, max(0, size - _TAIL_BYTES))
        if tail and not tail.endswith(b"\n"):
            os.ftruncate(self._descriptor, size - len(tail) + tail.rfind(b"\n") + 1)
        self._size = os.fstat(self._descriptor).st_size
        last = last_entry(path)
        self.seq = int(last.get("seq", 0))
        self.facts = Facts.from_json(last["facts"]) if last else Facts()
        self._written = self.facts.to_json()

    def move(self, event: Event, **evidence: Any) -> State:
        """Write the transition that `event` leads to, with the facts as they are now, and return the new state.

        Raises:
            ValueError: there is no such transition.
            OSError: the disk is full, or the like: the state is then the one before.
        """
        before, after = self.facts.state, next_state(self.facts.state, event)
        self.facts.state = after
        try:
            self._append({"from": before, "event": event, "to": after, "evidence": evidence})
        except OSError:
            self.facts.state = before
            raise
        return after

    def note(self, what: str, **evidence: Any) -> None:
        """Write facts that have changed without a transition."""
        self._append({"from": self.facts.state, "event": what, "to": self.facts.state, "evidence": evidence})

    def restore(self) -> None:
        """Set the facts to those of the last entry: what has changed since could not be written."""
        vars(self.facts).update(vars(Facts.from_json(copy.deepcopy(self._written))))

    def started_s(self) -> float | None:
        """Return when the run's first driver started, seconds since 1970; None: nothing is written yet."""
        with self.path.open("rb") as file:
            line = file.readline()
        return datetime.fromisoformat(_parse(self.path, line, "line 1")["at"]).timestamp() if line else None

    def close(self) -> None:
        """Close the file; twice is once."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _append(self, entry: dict[str, Any]) -> None:
        facts = self.facts.to_json()
        line = {"version": VERSION, "seq": self.seq + 1, "at": utc_now(), **entry, "facts": facts}
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        if os.fstat(self._descriptor).st_size > self._size:
            os.ftruncate(self._descriptor, self._size)  # what is left of a line that failed, and could not be removed
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self._descriptor, view) :]
            os.fsync(self._descriptor)
        except OSError:
            with contextlib.suppress(OSError):  # else the next call does it, before it writes
                os.ftruncate(self._descriptor, self._size)
            raise
        self._size += len(data)
        self.seq += 1
        self._written = facts


def last_entry(path: Path) -> Mapping[str, Any]:
    """The newest entry of a journal; empty where there is none. Only the end of the file is read.

    Raises:
        ConfigError: it is no entry, or one of a later version.
    """
    with contextlib.suppress(FileNotFoundError), path.open("rb") as file:
        size, num_bytes = file.seek(0, os.SEEK_END), _LAST_BYTES
        while True:
            start = max(0, size - num_bytes)
            file.seek(start)
            *whole, _cut_off = file.read(size - start).split(b"\n")
            if len(whole) > 1 or (whole and not start):  # the first of them may be half a line
                return _parse(path, whole[-1], "the last line" if start else f"line {len(whole)}")
            if not start:
                break
            num_bytes *= 8
    return {}


def entries(path: Path) -> Iterator[dict[str, Any]]:
    """Whole entries of a journal, oldest first; nothing where there is none yet.

    Raises:
        ConfigError: a whole line is no entry, or one of a later version.
    """
    try:
        lines = path.read_bytes().split(b"\n")[:-1]  # what follows the last line end was cut off
    except FileNotFoundError:
        return
    for number, line in enumerate(lines, 1):
        yield _parse(path, line, f"line {number}")


def _parse(path: Path, line: bytes, which: str) -> dict[str, Any]:
    try:
        entry: dict[str, Any] = json.loads(line)
        version, _facts, _seq = entry["version"], entry["facts"]["state"], entry["seq"]
    except (ValueError, LookupError, TypeError) as exc:
        raise ConfigError(str(path), None, f"{which} is no entry of a journal", "restore the file") from exc
    if version > VERSION:
        rule = f"{which} is of version {version}, and this netlayer reads {VERSION}"
        raise ConfigError(str(path), None, rule, "go on with the version that wrote it")
    return entry
