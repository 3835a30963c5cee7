"""Bring back what a journal holds: the last change first, everything written, then everything read back.

What another hand has set since is told from what a change wrote by the journal's new values. Not covered: what becomes
of the journal, which `apply` decides.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from congestion.nic.hosts.tree import Tree
from congestion.nic.profile.journal import Entry, Journal
from congestion.nic.profile.steps import same_number
from congestion.nic.vendors.tool_settings import NONE
from congestion.nic.vendors.tools import ToolFailed, Tools
from netlayer.errors import CheckFailed, ConfigError
from netlayer.printing import printable_line


def restore_all(journal: Journal, tree: Tree, tools: Tools, *, force: bool = True) -> list[str]:
    """Bring back every old value, last change first, then read each back. Returns what could not be.

    Args:
        force: also where a value is neither the old one nor ours.
    """
    failed: list[str] = []
    backwards = list(reversed(journal.entries))
    folders = [entry for entry in backwards if entry.kind == "folder"]
    made = tuple(f"{entry.target}/" for entry in folders if not tree.is_folder(entry.target))
    there = [entry for entry in backwards if not entry.target.startswith(made)]
    values = [entry for entry in there if entry.kind in ("file", "tool")]
    triggers = [entry for entry in there if entry.kind == "trigger" and tree.live]
    foreign = [] if force else _changed_since(values, tree, tools, failed)
    written = _each([one for one in values if one not in foreign], lambda one: _restore(one, tree, tools), failed)
    _each(written, lambda one: _check_restored(one, tree, tools), failed)  # one may hide or change another
    _each(triggers, lambda one: tree.write(one.target, b"1\n"), failed)
    theirs = [one.target for one in foreign]
    empty = [one for one in folders if not any(path.startswith(f"{one.target}/") for path in theirs)]
    _each(empty, lambda one: _remove(one.target, tree), failed)
    return failed


def _each(entries: Sequence[Entry], act: Callable[[Entry], None], failed: list[str]) -> list[Entry]:
    """Do it with every entry. Returns those with which it went well; the others are said."""
    good = []
    for entry in entries:
        try:
            act(entry)
        except (OSError, ToolFailed, ConfigError, CheckFailed, ValueError) as exc:
            failed.append(f"{_name(entry)}: {words_of(exc)}")
        else:
            good.append(entry)
    return good


def _name(entry: Entry) -> str:
    return f"{entry.target} {' '.join(entry.fields)}".strip()


def _changed_since(entries: Sequence[Entry], tree: Tree, tools: Tools, failed: list[str]) -> list[Entry]:
    """Entries whose value is neither the old one nor ours."""
    changed = []
    for entry in entries:
        try:
            present = _foreign(entry, tree, tools)
        except (OSError, ToolFailed, ConfigError):
            continue  # restoring it will say why
        if present:
            changed.append(entry)
            message = (
                f"changed since by another hand: {printable_line(present)[:40]} (--force to bring back the old value)"
            )
            failed.append(f"{_name(entry)}: {message}")
    return changed


def _foreign(entry: Entry, tree: Tree, tools: Tools) -> str:
    """The value that another hand has set; empty where it is the old one or ours, or was lost in writing."""
    if entry.kind == "file":
        present = bytes_of(tree, entry.target)
        return "" if present == entry.old or same_number(present, entry.new) else present.strip()
    present = entry.setting.read(tools)
    unseen = entry.setting.hidden and NONE in (present, entry.old)
    return "" if unseen or present in (entry.old, entry.new) else present


def _restore(entry: Entry, tree: Tree, tools: Tools) -> None:
    if entry.kind == "tool":
        setting = entry.setting
        setting.write(tools, setting.read(tools), entry.old)
        return
    for path, old in _old(entry):
        if bytes_of(tree, path) != old:
            tree.write(path, old.encode("latin-1"))


def _check_restored(entry: Entry, tree: Tree, tools: Tools) -> None:
    """
    Raises:
        CheckFailed: it does not say what was written back.
    """
    if entry.kind == "tool":
        present = entry.setting.read(tools)
        if present != entry.old:
            raise CheckFailed(f"{entry.old} was set back, {present} is read")
        return
    for path, old in _old(entry):
        present = bytes_of(tree, path)
        if present.strip() != old.strip():
            raise CheckFailed(f"{old.strip()!r} was written back, {present.strip()!r} is read")


def _old(entry: Entry) -> list[tuple[str, str]]:
    return [(entry.target, entry.old), *((path, old) for path, old in entry.touches)]


def _remove(folder: str, tree: Tree) -> None:
    with contextlib.suppress(FileNotFoundError):
        tree.remove_folder(folder)


def bytes_of(tree: Tree, path: str) -> str:
    """Return a file's contents as journals keep them."""
    return tree.read(path).decode("latin-1")


def words_of(exc: BaseException) -> str:
    """Describe an error for a person."""
    if isinstance(exc, OSError):
        return exc.strerror or str(exc)
    return "interrupted" if isinstance(exc, KeyboardInterrupt) else str(exc)
