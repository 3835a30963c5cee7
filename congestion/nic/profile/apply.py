"""Make a plan so, or not at all: journal first, each write read back, all undone at the first that does not hold.

A process that dies at any instant leaves a journal that `roll_back` undoes. Values are checked against their documented
range before the first write. Not covered: firmware resets, which some changes need to take effect; the plan says which.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from congestion.nic.hosts.tree import Tree
from congestion.nic.profile.draft import Answers, read_once, row_now
from congestion.nic.profile.journal import Entry, Journal, State, new_journal
from congestion.nic.profile.plan import Plan
from congestion.nic.profile.restore import bytes_of, restore_all, words_of
from congestion.nic.profile.steps import FileStep, Row, Step, ToolStep, TriggerStep, same_number
from congestion.nic.vendors.tools import ToolFailed, Tools
from netlayer.errors import CheckFailed, ConfigError
from netlayer.launch.interrupt import uninterrupted

# A new random text at each boot of the kernel (random(4)).
_BOOT = "proc/sys/kernel/random/boot_id"
_BY_HAND = "the journal stays open; look at the device, then run `netlayer nic rollback --apply` again"


@dataclass(frozen=True)
class Applied:
    """Rows that were changed, and rows left as they were because they could not be had or read.

    Args:
        plan: which was made so.
    """

    plan: Plan
    rows: tuple[Row, ...]
    left: tuple[Row, ...] = ()


def apply_plan(draw: Callable[[], Plan], tree: Tree, tools: Tools, state: State, *, partial: bool = False) -> Applied:
    """Do what the plan says; a plan whose values are all there does nothing.

    Args:
        draw: draws it up, once nobody else changes this host: the old values in it are those that an undo brings back.
        partial: omit what the devices cannot do and what cannot be read; else the plan is refused.

    Raises:
        ConfigError: something cannot be had or read, or an earlier change is open. Nothing was written.
        CheckFailed: a write was refused or did not hold. Everything is as it was, unless the message says otherwise.
    """
    with state.locked() as lock, tools.holding(lock):
        # Before the plan is drawn: its old values would be those that the unfinished change has left.
        state.refuse_open()
        plan = draw()
        if plan.cannots and not partial:
            first = plan.cannots[0]
            others = f" and {len(plan.cannots) - 1} more" if len(plan.cannots) > 1 else ""
            rule = f"{first.device} cannot do {first.what} ({first.why}){others}"
            raise ConfigError("--profile", plan.profile.name, rule, f"nearest: {first.nearest}; or give --partial")
        rows = plan.changes
        # All of them before the first write: a value out of range is found while nothing needs an undo.
        for row in rows:
            row.step.check()
        groups = _groups_to_make(tree, rows)
        rows, left = _readable(rows, groups, partial)
        if not rows:
            return Applied(plan, (), left)
        return Applied(plan, tuple(_change(plan, rows, groups, tree, tools, state)), left)


def roll_back(
    tree: Tree, tools: Tools, state: State, *, partial: bool = False, force: bool = False
) -> tuple[Journal, list[str]] | None:
    """Undo the change that did not end, else the last that did; None where there is none.

    Args:
        partial: close the journal though something could not be restored, after a reboot for example.
        force: bring back old values over those that somebody else has set since.

    Returns:
        What was undone, and what could not be restored.

    Raises:
        ConfigError: the journal is of another root.
        CheckFailed: something could not be restored; the rest was.
    """
    with state.locked() as lock, tools.holding(lock):
        journal = state.find_open() or state.last_applied()
        if journal is None:
            return None
        # Its paths are relative to a root: below another one they are files of another host, or of a copy.
        if journal.root != str(tree.root):
            rule = f"its last change was of --root {journal.root}"
            raise ConfigError("--root", tree.root, rule, "give that root, or another --state")
        # Open while it is undone: after a death half way, the next call finds it and undoes the rest.
        if state.find_open() is None:
            state.reopen()
        with uninterrupted():
            failed = restore_all(journal, tree, tools, force=force)
            if failed and not partial:
                since = "the host was started again since; " if was_rebooted(journal, tree) else ""
                raise CheckFailed(f"{since}not restored: {'; '.join(failed)}; {_BY_HAND}, with --partial to leave it")
            state.close("undone")
        return journal, failed


def was_rebooted(journal: Journal, tree: Tree) -> bool:
    """Whether the host was started again since the change: what does not last is then gone already."""
    # A copy of a host's files, at the change or now, may have no boot id: nothing is said of it.
    boot = _boot(tree)
    return bool(journal.boot and boot) and boot != journal.boot


def _groups_to_make(tree: Tree, rows: Sequence[Row]) -> list[str]:
    groups = [row.step.group for row in rows if isinstance(row.step, FileStep) and row.step.group]
    return [group for group in dict.fromkeys(groups) if not tree.is_folder(group)]


def _readable(rows: Sequence[Row], groups: Sequence[str], partial: bool) -> tuple[list[Row], tuple[Row, ...]]:
    """Rows whose old value is known, or will be once its folder is made; and the others."""
    good: list[Row] = []
    left: list[Row] = []
    for row in rows:
        # configfs fills a folder with files when it is made: their old values are read then.
        to_come = getattr(row.step, "group", "") in groups
        known = row.old is not None or isinstance(row.step, TriggerStep) or to_come
        (good if known else left).append(row)
    if left and not partial:
        first = left[0]
        rule = f"its old value is not known ({first.unknown}), so that it could not be undone"
        where = f"{first.step.device} {first.step.name}"
        raise ConfigError(where, None, rule, "run as root with its driver and tools in place; or give --partial")
    return good, tuple(left)


def _change(plan: Plan, rows: list[Row], groups: list[str], tree: Tree, tools: Tools, state: State) -> list[Row]:
    """Write the settings of a plan and read them back, journalled first; on any error all old values come back.

    Args:
        groups: folders to make before, such as a priority's.

    Returns:
        The rows that were written, with old values that were known only after folders were made.

    Raises:
        CheckFailed: a setting was refused, or reads otherwise afterwards.
    """
    folders = [Entry("folder", group) for group in groups]
    entries = folders or _entries(rows, tree)  # what is in a folder to come has no old value yet
    journal = new_journal(tree.root, plan.profile.name, entries, _boot(tree))
    state.write(journal)
    doing = ""
    try:
        if folders:
            for entry in folders:
                doing = f"/{entry.target}"
                tree.make_folder(entry.target)
            # The kernel has filled the folders with its defaults: these are the old values, and may be as wanted.
            rows = _look_again(rows, tree, tools)
            # Now with their old values, and on disk before the first of these is overwritten.
            journal = dataclasses.replace(journal, entries=folders + _entries(rows, tree))
            state.write(journal)
        for row in rows:
            doing = f"{row.step.device} {row.step.name}"
            _do(row.step, row, tree, tools)
        answers: Answers = {}
        for row in rows:  # a later write may have changed an earlier one's value
            doing = f"{row.step.device} {row.step.name}"
            _read_back(row.step, tree, tools, answers)
        state.close("applied")
    # A Ctrl-C or SystemExit too: whatever breaks a change off, the old values come back first.
    except BaseException as exc:
        with uninterrupted():
            failed = restore_all(journal, tree, tools)
            if failed:
                raise CheckFailed(f"{doing}: {words_of(exc)}; not restored: {'; '.join(failed)}; {_BY_HAND}") from exc
            state.close("undone")
        # What a device or its program refused is one line for the user; a bug or an interrupt is raised as it is.
        if isinstance(exc, OSError | ToolFailed | CheckFailed | ConfigError):
            raise CheckFailed(f"{doing}: {words_of(exc)}; everything is as it was before") from exc
        raise
    return rows


def _look_again(rows: Sequence[Row], tree: Tree, tools: Tools) -> list[Row]:
    """The rows once their folders are made: those that differ."""
    differing = []
    for row in rows:
        now = row_now(tree, tools, row.step) if row.old is None else row
        if now is None:
            raise CheckFailed("its folder was made, and the file is not there")
        if now.old is None and not isinstance(now.step, TriggerStep):
            raise CheckFailed(f"its old value is not known ({now.unknown})")
        if now.differs:
            differing.append(now)
    return differing


def _entries(rows: Sequence[Row], tree: Tree) -> list[Entry]:
    return [_entry(row, tree) for row in rows]


def _entry(row: Row, tree: Tree) -> Entry:
    step = row.step
    if isinstance(step, FileStep):
        # Older kernels lack some of these files; what is not there has no old value to keep.
        touches = [[path, bytes_of(tree, path)] for path in step.touches if tree.is_file(path)]
        return Entry("file", step.path, bytes_of(tree, step.path), f"{step.new}\n", touches=touches)
    if isinstance(step, TriggerStep):
        return Entry("trigger", step.path)
    assert isinstance(step, ToolStep)
    assert step.setting is not None
    assert row.old is not None
    values = [getattr(step.setting, one.name) for one in dataclasses.fields(step.setting)]
    undo = step.setting.change(step.new, row.old)
    return Entry("tool", step.setting.kind, row.old, step.new, values, undo=undo)


def _do(step: Step, row: Row, tree: Tree, tools: Tools) -> None:
    step.check()
    if isinstance(step, FileStep):
        tree.write(step.path, f"{step.new}\n".encode())
    elif isinstance(step, TriggerStep):
        # Nothing to read back: a trigger says nothing when read.
        tree.write(step.path, b"1\n")
        return
    elif isinstance(step, ToolStep):
        assert step.setting is not None
        assert row.old is not None
        step.setting.write(tools, row.old, step.new)
    # With no earlier answers: they are from before this write.
    _read_back(step, tree, tools, {})


def _read_back(step: Step, tree: Tree, tools: Tools, answers: Answers) -> None:
    """
    Raises:
        CheckFailed: it does not say what was written.
    """
    if isinstance(step, FileStep):
        present = tree.read(step.path).decode(errors="replace").strip()
        if not same_number(present, step.new):
            raise CheckFailed(f"{step.new} was written, {present[:40]!r} is read back")
    elif isinstance(step, ToolStep):
        present = read_once(tools, step, answers)
        if present != step.new:
            raise CheckFailed(f"{step.new} was set, {present} is read back")


def _boot(tree: Tree) -> str:
    return tree.text(_BOOT) or ""
