"""A plan while it is drawn up for one device: steps and what is there, what cannot be had, and what to know."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from congestion.nic.hosts.inventory import Device
from congestion.nic.hosts.tree import Tree
from congestion.nic.profile.file import Profile
from congestion.nic.profile.steps import FileStep, Row, Step, ToolStep, TriggerStep, number_in
from congestion.nic.vendors.tool_settings import NONE, ToolSetting
from congestion.nic.vendors.tools import ToolFailed, Tools

Answers = dict[tuple[str, ...], str | ToolFailed]
"""What programs answered, by their arguments."""


@dataclass(frozen=True)
class Cannot:
    """Something of the profile that this device does not do, and what comes nearest."""

    device: str
    what: str
    why: str
    nearest: str


@dataclass
class Draft:
    """Plan of one device while surfaces write into it; each method adds one thing."""

    profile: Profile
    device: Device
    tree: Tree
    tools: Tools
    answers: Answers = field(default_factory=dict)
    rows: list[Row] = field(default_factory=list)
    cannots: list[Cannot] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def file(
        self,
        surface: str,
        path: str,
        value: int,
        reason: str,
        *,
        allowed: tuple[int, int] = (0, 1),
        unit: str = "",
        touches: Sequence[str] = (),
        group: str = "",
        warning: str = "",
    ) -> None:
        """A file that shall hold `value`; one that this kernel lacks cannot be had."""
        folder, _, name = path.rpartition("/")
        low, high = allowed
        beside = tuple(f"{folder}/{other}" for other in touches)
        step = FileStep(
            self.device.name, surface, name, str(value), unit, reason, warning, path, low, high, beside, group
        )
        step.check()
        row = file_row(self.tree, step)
        if row is None:
            self.cannot(name, f"this driver has no file /{path}", "a newer driver, or omit it from the profile")
        else:
            self.rows.append(row)

    def trigger(self, surface: str, path: str, reason: str, group: str) -> None:
        """Make the driver take what the steps of `group` before wrote."""
        name = path.rpartition("/")[2]
        step = TriggerStep(self.device.name, surface, name, "1", "", reason, "", path, group)
        self.rows.append(Row(step, None, runs=self.tree.live))

    def tool(
        self,
        setting: ToolSetting,
        value: str,
        reason: str,
        *,
        name: str,
        unit: str = "",
        warning: str = "",
        allowed: tuple[int, int] | None = None,
    ) -> None:
        """Add the step by which a program sets `value`, or note that the firmware has no such setting."""
        step = ToolStep(self.device.name, setting.tool, name, value, unit, reason, warning, setting, allowed)
        step.check()
        row = tool_row(self.tools, step, self.answers)
        if row.old == NONE and setting.kind == "mlxreg":
            self.cannot(name, "this firmware does not have it", "a newer firmware, or omit it from the profile")
        else:
            self.rows.append(row)

    def present(self, setting: ToolSetting) -> str | None:
        """Return a program's setting as it is now; None where it cannot be read here."""
        step = ToolStep(self.device.name, setting.tool, setting.kind, "", "", "", "", setting)
        return tool_row(self.tools, step, self.answers).old

    def cannot(self, what: str, why: str, nearest: str) -> None:
        self.cannots.append(Cannot(self.device.name, what, why, nearest))

    def note(self, text: str) -> None:
        self.notes.append(text)

    def find_tool(self, *names: str) -> str:
        """The program to use: the first that is there, or the first of all where none is run here."""
        return self.tools.find(*names) if self.tools.runs else names[0]


def file_row(tree: Tree, step: FileStep) -> Row | None:
    """A file's step and what the file holds; None where the kernel lacks the file."""
    try:
        if step.group and not tree.is_folder(step.group):
            return Row(step, None, f"known once /{step.group} is made", to_come=True)
        if not tree.is_file(step.path):
            return None
        number = number_in(tree.read(step.path).decode(errors="replace"))
    except PermissionError:
        return Row(step, None, "only root may read it")
    except OSError as exc:
        return Row(step, None, f"cannot be read ({exc.strerror})")
    return Row(step, None, "holds no number") if number is None else Row(step, str(number))


def tool_row(tools: Tools, step: ToolStep, answers: Answers) -> Row:
    """Return a program's step and what the program prints."""
    if not tools.runs:
        return Row(step, None, "not run under --root", runs=False)
    try:
        return Row(step, read_once(tools, step, answers))
    except ToolFailed as exc:
        return Row(step, None, str(exc))


def read_once(tools: Tools, step: ToolStep, answers: Answers) -> str:
    """A program's setting; one that has answered this question before is not asked again.

    Raises:
        ToolFailed: as `ToolSetting.read`.
    """
    assert step.setting is not None
    query = tuple(step.setting.query())
    if query not in answers:
        try:
            answers[query] = tools.run(query)
        except ToolFailed as exc:
            answers[query] = exc
    answer = answers[query]
    if isinstance(answer, ToolFailed):
        raise answer
    return step.setting.parse(answer)


def row_now(tree: Tree, tools: Tools, step: Step) -> Row | None:
    """A step and what is there now."""
    if isinstance(step, FileStep):
        return file_row(tree, step)
    if isinstance(step, ToolStep):
        return tool_row(tools, step, {})
    return Row(step, None, runs=tree.live)
