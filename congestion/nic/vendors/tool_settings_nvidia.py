"""NVIDIA's programs: `mlnx_qos`, `mlxreg` and `mlxconfig`, the last two as mstflint has them too (mstreg, mstconfig).

Registers by mstflint's register table: ROCE_ACCL, and PPCC (0x506e) whose command 1 enables a slot, 2 disables it and 3
asks; 5, 6 and 8 ask for what a parameter may be, for its value, and set it. Output as their users print it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

from congestion.nic.vendors.tool_setting import NONE, ToolSetting, eight, ranged
from congestion.nic.vendors.tools import ToolFailed


@dataclass(frozen=True)
class MlnxTrust(ToolSetting):
    """Whether the port trusts DSCP or PCP."""

    kind: ClassVar[str] = "mlnx-trust"

    def query(self) -> list[str]:
        return ["mlnx_qos", "-i", self.device]

    def parse(self, printed: str) -> str:
        return self._search(r"^Priority trust state: (pcp|dscp|both)\b", printed)

    def change(self, _present: str, new: str) -> list[str]:
        if new not in ("pcp", "dscp", "both"):
            raise ValueError(f"trust {new!r}: pcp, dscp or both")
        return ["mlnx_qos", "-i", self.device, f"--trust={new}"]


@dataclass(frozen=True)
class MlnxPfc(ToolSetting):
    """Lossless priorities, as eight digits."""

    kind: ClassVar[str] = "mlnx-pfc"

    def query(self) -> list[str]:
        return ["mlnx_qos", "-i", self.device]

    def parse(self, printed: str) -> str:
        return "".join(self._search(r"^\s*enabled:?\s+((?:[01]\s+){7}[01])\s*$", printed).split())

    def change(self, _present: str, new: str) -> list[str]:
        return ["mlnx_qos", "-i", self.device, f"--pfc={','.join(eight(new))}"]


@dataclass(frozen=True)
class MlnxDscp(ToolSetting):
    """Priority of a DSCP; `none` where the port does not trust DSCP and so prints no map."""

    kind: ClassVar[str] = "mlnx-dscp"
    hidden: ClassVar[bool] = True
    dscp: str

    def query(self) -> list[str]:
        return ["mlnx_qos", "-i", self.device]

    def parse(self, printed: str) -> str:
        for priority, values in re.findall(r"^\s*prio:([0-7]) dscp:([\d,]+)\s*$", printed, re.MULTILINE):
            if int(self.dscp) in {int(value) for value in values.split(",") if value}:
                return str(priority)
        return NONE

    def change(self, present: str, new: str) -> list[str]:
        verb, value = ("del", present) if new == NONE else ("set", new)
        rule = f"--dscp2prio={verb},{ranged(self.dscp, 63)},{ranged(value, 7)}"
        return ["mlnx_qos", "-i", self.device, rule]


@dataclass(frozen=True)
class Register(ToolSetting):
    """A switch of the register ROCE_ACCL; `none` where the firmware does not have it. Lost at a reset.

    Each switch has a bit that says, when read, whether it can be had, and, when written, that it is meant.
    """

    kind: ClassVar[str] = "mlxreg"
    field: str

    def query(self) -> list[str]:
        return [self.tool, "-d", self.device, "--reg_name", "ROCE_ACCL", "--get"]

    def parse(self, printed: str) -> str:
        rows = dict(re.findall(r"^(\w+)\s*\|\s*(0x[0-9a-fA-F]{1,8})\s*$", printed, re.MULTILINE))
        if not rows:
            raise ToolFailed(f"{self.tool}: prints no register")
        stem = self.field.removesuffix("_en")
        selects = [rows.get(f"{name}_field_select") for name in (stem, self.field)]
        supported = all(int(value, 16) for value in selects if value is not None)
        return str(int(rows[self.field], 16)) if supported and self.field in rows else NONE

    def change(self, _present: str, new: str) -> list[str]:
        own = self.field.removesuffix("_en") if self.field.startswith("roce_") else self.field
        value = f"{own}_field_select=1,{self.field}={ranged(new, 1)}"
        return [self.tool, "-d", self.device, "--reg_name", "ROCE_ACCL", "--set", value, "--yes"]


@dataclass(frozen=True)
class Algorithm(ToolSetting):
    """Whether a slot of programmable congestion control runs (register PPCC). Lost at a reset."""

    kind: ClassVar[str] = "ppcc"
    slot: str

    def query(self) -> list[str]:
        return [self.tool, "-d", self.device, *self._register(), "--get", "--op", "cmd_type=3"]

    def parse(self, printed: str) -> str:
        return str(_data(self, "value", printed))

    def change(self, _present: str, new: str) -> list[str]:
        verb = "1" if ranged(new, 1) == "1" else "2"
        return [self.tool, "-d", self.device, *self._register(), "--set", f"cmd_type={verb}", "--yes"]

    def _register(self) -> list[str]:
        return _ppcc(self.slot, "0")


@dataclass(frozen=True)
class PpccParameter(ToolSetting):
    """A parameter of the algorithm in a slot. Lost at a reset. The register drops a value out of range in silence."""

    kind: ClassVar[str] = "ppcc-parameter"
    slot: str
    parameter: str

    def query(self) -> list[str]:
        return [self.tool, "-d", self.device, *_ppcc(self.slot, self.parameter), "--get", "--op", "cmd_type=6"]

    def parse(self, printed: str) -> str:
        return str(_data(self, "value", printed))

    def change(self, _present: str, new: str) -> list[str]:
        value = f"cmd_type=8,value={ranged(new, 2**32 - 1)}"
        return [self.tool, "-d", self.device, *_ppcc(self.slot, self.parameter), "--set", value, "--yes"]


@dataclass(frozen=True)
class PpccRange(ToolSetting):
    """Range of such a parameter from the NIC, as `least most default access`; nothing that can be set."""

    kind: ClassVar[str] = "ppcc-range"
    WRITABLE: ClassVar[int] = 1
    slot: str
    parameter: str

    def query(self) -> list[str]:
        return [self.tool, "-d", self.device, *_ppcc(self.slot, self.parameter), "--get", "--op", "cmd_type=5"]

    def parse(self, printed: str) -> str:
        fields = ("param_value2", "param_value3", "param_value1", "prm")
        return " ".join(str(_data(self, name, printed)) for name in fields)

    def change(self, _present: str, new: str) -> list[str]:
        raise ValueError(f"{self.kind} {new!r}: it is read only")


@dataclass(frozen=True)
class Firmware(ToolSetting):
    """A key of the firmware's configuration, as it will be after the next reset."""

    kind: ClassVar[str] = "mlxconfig"
    key: str

    def query(self) -> list[str]:
        return [self.tool, "-d", self.device, "q", self.key]

    def parse(self, printed: str) -> str:
        text = self._search(rf"^\*?\s*{re.escape(self.key)}\s+(?:\S+\s+)*?(\S+)\s*$", printed)
        match = re.fullmatch(r"(?:\w*\()?(0x[0-9a-fA-F]+|\d+)\)?", text)
        if match is None:
            raise ToolFailed(f"{self.tool}: {self.key} is {text[:40]!r}, no number")
        return str(int(match[1], 0))

    def change(self, _present: str, new: str) -> list[str]:
        return [self.tool, "-d", self.device, "-y", "set", f"{self.key}={ranged(new, 2**32 - 1)}"]


def _ppcc(slot: str, parameter: str) -> list[str]:
    index = ranged(parameter, 2**16 - 1)
    where = f"local_port=1,pnat=0,lp_msb=0,algo_slot={ranged(slot, 15)},algo_param_index={index}"
    return ["--reg_name", "PPCC", "--indexes", where]


def _data(setting: ToolSetting, field: str, printed: str) -> int:
    """A field of a register, as mlxreg prints it.

    Raises:
        ToolFailed: it is not there.
    """
    match = re.search(rf"^{field}\s*\|\s*(0x[0-9a-fA-F]{{1,8}})\s*$", printed, re.MULTILINE)
    if match is None:
        raise ToolFailed(f"{setting.tool}: prints no {setting.kind}")
    return int(match[1], 16)
