"""A setting of a program: how it is read, how it is changed, and so how it is undone.

A value is one text, the same whether it is read or wanted. `change` takes the value that is there too, for some
programs must be told what to take away. Tried against programs of ours that speak so, never against a NIC.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, fields
from typing import ClassVar

from congestion.nic.hosts.inventory import is_name, is_pci
from congestion.nic.vendors.tools import ToolFailed, Tools

PRIORITIES = range(8)
NONE = "none"


@dataclass(frozen=True)
class ToolSetting:
    """One setting of one device. All fields are texts, so that a journal can hold them.

    Raises:
        ValueError: a field is no name of its kind: it would be an option, or worse.
    """

    kind: ClassVar[str]
    hidden: ClassVar[bool] = False  # it reads as none where another setting hides it
    tool: str
    device: str

    def __post_init__(self) -> None:
        values = [getattr(self, field.name) for field in fields(self)]
        if not (is_name(self.device) or is_pci(self.device)) or not all(
            is_name(one) for one in (self.tool, *values[2:])
        ):
            raise ValueError(f"{self.kind}: {values} are no names")

    def query(self) -> list[str]:
        """Arguments that print the value."""
        raise NotImplementedError

    def parse(self, printed: str) -> str:
        """The value in what was printed.

        Raises:
            ToolFailed: it is not there.
        """
        raise NotImplementedError

    def change(self, present: str, new: str) -> list[str]:
        """Arguments that make it so.

        Raises:
            ValueError: no such value can be set.
        """
        raise NotImplementedError

    def read(self, tools: Tools) -> str:
        """
        Raises:
            ToolFailed: the program failed, or says nothing of it.
        """
        return self.parse(tools.run(self.query()))

    def write(self, tools: Tools, present: str, new: str) -> None:
        """Set the new value unless it is there already; errors as `read`."""
        if present != new:
            tools.run(self.change(present, new))

    def _search(self, pattern: str, printed: str) -> str:
        match = re.search(pattern, printed, re.MULTILINE)
        if match is None:
            raise ToolFailed(f"{self.tool}: prints no {self.kind}")
        return match[1]


def eight(digits: str) -> str:
    """Eight digits, one a priority.

    Raises:
        ValueError: it is something else.
    """
    if not re.fullmatch(r"[01]{8}", digits):
        raise ValueError(f"{digits!r}: eight digits 0 or 1")
    return digits


def ranged(text: str, most: int) -> str:
    """A whole number from 0 to `most`, as text.

    Raises:
        ValueError: it is something else.
    """
    if not re.fullmatch(r"\d{1,10}", text) or int(text) > most:
        raise ValueError(f"{text!r}: a whole number up to {most}")
    return text
