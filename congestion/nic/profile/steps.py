"""One change of a NIC: a file that is written, a folder of configfs that is made, a trigger, a setting of a program."""

from __future__ import annotations

from dataclasses import dataclass

from congestion.nic.vendors.tool_setting import ToolSetting
from netlayer.errors import ConfigError


@dataclass(frozen=True)
class Step:
    """Fields that all steps have.

    Args:
        device: the RDMA device it is for.
        surface: by what way.
        name: what is set, as that way calls it.
        new: the value wanted, as it is shown.
        unit: of the value; empty for a plain one.
        reason: why the profile wants it.
        warning: what undoing it, or its taking effect, needs besides.
    """

    device: str
    surface: str
    name: str
    new: str
    unit: str
    reason: str
    warning: str = ""

    @property
    def value(self) -> str:
        """The value wanted, with its unit where it has one."""
        return f"{self.new} {self.unit}".rstrip()

    def check(self) -> None:
        """
        Raises:
            ConfigError: the value is out of the documented range: it must never be written.
        """

    def _refuse(self, rule: str) -> ConfigError:
        return ConfigError(f"{self.device} {self.name}", self.new, rule, "correct the profile")


@dataclass(frozen=True)
class FileStep(Step):
    """A file of sysfs, debugfs or configfs that holds one number.

    Args:
        low, high: the documented range.
        touches: files that the kernel changes too when this one is written.
        group: folder of configfs that must be there first.
    """

    path: str = ""
    low: int = 0
    high: int = 1
    touches: tuple[str, ...] = ()
    group: str = ""

    def check(self) -> None:
        if not self.new.isdigit() or not self.low <= int(self.new) <= self.high:
            unit = f" {self.unit}" if self.unit else ""
            raise self._refuse(f"is out of this NIC's range {self.low}..{self.high}{unit}")


@dataclass(frozen=True)
class TriggerStep(Step):
    """A file whose writing makes the driver take what stands in its folder; it says nothing when read."""

    path: str = ""
    group: str = ""


@dataclass(frozen=True)
class ToolStep(Step):
    """A setting of a program.

    Args:
        allowed: its documented range, for a number; the value that an undo brings back may be another.
    """

    setting: ToolSetting | None = None
    allowed: tuple[int, int] | None = None

    def check(self) -> None:
        assert self.setting is not None
        try:
            self.setting.change("0", self.new)
        except ValueError as exc:
            raise self._refuse(f"cannot be set ({exc})") from exc
        if self.allowed is not None and not self.allowed[0] <= int(self.new) <= self.allowed[1]:
            raise self._refuse(f"is out of its documented range {self.allowed[0]}..{self.allowed[1]}")


@dataclass(frozen=True)
class Row:
    """A step and what is there now.

    Args:
        old: the value now, as it is shown; None where it is not known.
        unknown: why not.
        runs: it can be done here; programs are not run below another root than `/`.
        to_come: what it is in has first to be made.
    """

    step: Step
    old: str | None
    unknown: str = ""
    runs: bool = True
    to_come: bool = False

    @property
    def differs(self) -> bool:
        return self.old != self.step.new

    @property
    def action(self) -> str:
        if not self.runs:
            return "not run under --root"
        if isinstance(self.step, TriggerStep):
            return "trigger"
        return ("unknown" if self.old is None else "change") if self.differs else "same"


def same_number(text: str, expected: str) -> bool:
    """Whether a file's text means the expected number: `0x1` is 1."""
    return number_in(text) == number_in(expected) is not None


def number_in(text: str) -> int | None:
    """The whole number that a kernel file holds, in any base that C reads; None where it is none."""
    try:
        return int(text.strip(), 0)
    except ValueError:
        return int(text) if text.strip().isdigit() else None
