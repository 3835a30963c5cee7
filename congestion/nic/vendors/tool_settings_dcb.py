"""Priorities and pause by the programs that every NIC understands: dcb-pfc(8), dcb-app(8), ethtool(8)."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from congestion.nic.vendors.tool_setting import NONE, PRIORITIES, ToolSetting, eight, ranged
from congestion.nic.vendors.tools import ToolFailed


@dataclass(frozen=True)
class DcbPfc(ToolSetting):
    """Lossless priorities, as eight digits: 00010000 is priority 3."""

    kind: ClassVar[str] = "dcb-pfc"

    def query(self) -> list[str]:
        return ["dcb", "pfc", "show", "dev", self.device, "prio-pfc"]

    def parse(self, printed: str) -> str:
        states = dict(re.findall(r"\b([0-7]):(on|off)\b", self._search(r"^\s*prio-pfc (.*)$", printed)))
        if len(states) != len(PRIORITIES):
            raise ToolFailed(f"{self.tool}: prints no {self.kind}")
        return "".join("1" if states[str(priority)] == "on" else "0" for priority in PRIORITIES)

    def change(self, _present: str, new: str) -> list[str]:
        switches = [f"{priority}:{'on' if on == '1' else 'off'}" for priority, on in enumerate(eight(new))]
        return ["dcb", "pfc", "set", "dev", self.device, "prio-pfc", *switches]


@dataclass(frozen=True)
class DcbApp(ToolSetting):
    """Priority of a DSCP: `3`, `2,3` where there are several, `none` where there is no rule."""

    kind: ClassVar[str] = "dcb-app"
    dscp: str

    def query(self) -> list[str]:
        return ["dcb", "-N", "app", "show", "dev", self.device, "dscp-prio"]

    def parse(self, printed: str) -> str:
        priorities = sorted(prio for dscp, prio in re.findall(r"\b(\d{1,2}):([0-7])\b", printed) if dscp == self.dscp)
        return ",".join(priorities) or NONE

    def change(self, present: str, new: str) -> list[str]:
        verb, values = ("del", present) if new == NONE else ("replace", new)
        rules = [f"{ranged(self.dscp, 63)}:{ranged(value, 7)}" for value in values.split(",")]
        return ["dcb", "app", verb, "dev", self.device, "dscp-prio", *rules]


@dataclass(frozen=True)
class Pause(ToolSetting):
    """802.3x pause of the link: `rx off tx off`."""

    kind: ClassVar[str] = "pause"

    def query(self) -> list[str]:
        return ["ethtool", "-a", self.device]

    def parse(self, printed: str) -> str:
        received, sent = (self._search(rf"^{way}:\s+(on|off)\s*$", printed) for way in ("RX", "TX"))
        return f"rx {received} tx {sent}"

    def change(self, _present: str, new: str) -> list[str]:
        match = re.fullmatch(r"rx (on|off) tx (on|off)", new)
        if match is None:
            raise ValueError(f"pause {new!r}: such as rx off tx off")
        return ["ethtool", "-A", self.device, "rx", match[1], "tx", match[2]]
