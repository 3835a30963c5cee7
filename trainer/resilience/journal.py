"""The journal of a run: one JSON line a transition, on the disk before anything is done about it.

Every line holds all facts, so its last whole line is enough to go on from; earlier ones are the record of what was
decided, and of the evidence. A line that was cut off by a crash is dropped when the journal is opened.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from netlayer.errors import ConfigError
from netlayer.results import utc_now
from trainer.resilience.machine import Event, Facts, State, next_state

VERSION = 1


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
        text = path.read_bytes()
        whole = text.rfind(b"\n") + 1
        if whole < len(text):
            os.ftruncate(self._descriptor, whole)
        last = last_entry(path)
        self.seq = int(last.get("seq", 0))
        self.facts = Facts.from_json(last["facts"]) if last else Facts()

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

    def close(self) -> None:
        """Close the file; twice is once."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def _append(self, entry: dict[str, Any]) -> None:
        line = {"version": VERSION, "seq": self.seq + 1, "at": utc_now(), **entry, "facts": self.facts.to_json()}
        data = json.dumps(line, separators=(",", ":")).encode() + b"\n"
        size = os.fstat(self._descriptor).st_size
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(self._descriptor, view) :]
            os.fsync(self._descriptor)
        except OSError:
            os.ftruncate(self._descriptor, size)  # or half a line would stand before the next
            raise
        self.seq += 1


def last_entry(path: Path) -> Mapping[str, Any]:
    """The newest entry of a journal; empty where there is none."""
    last: Mapping[str, Any] = {}
    for entry in entries(path):
        last = entry
    return last


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
        try:
            entry = json.loads(line)
            version, _facts, _seq = entry["version"], entry["facts"]["state"], entry["seq"]
        except (ValueError, LookupError, TypeError) as exc:
            raise ConfigError(str(path), None, f"line {number} is no entry of a journal", "restore the file") from exc
        if version > VERSION:
            rule = f"line {number} is of version {version}, and this netlayer reads {VERSION}"
            raise ConfigError(str(path), None, rule, "go on with the version that wrote it")
        yield entry
