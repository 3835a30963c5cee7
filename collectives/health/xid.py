"""Recommended actions for XIDs and SXids, from NVIDIA's catalogue.

The catalogue with its sources is in `xids.toml`. An unknown number is a WARN and never drains a node.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from netlayer.verdict import Verdict

_UNKNOWN_STEP = "look {} up in NVIDIA's current catalogue: it is not in this project's copy"
# `... changed from 0x0 (None) to 0x4 (Drain and Reset)`
_RECOVERY = re.compile(r"recovery action changed from .{0,60}\(([\w /]{1,40})\)\s*$", re.IGNORECASE)
_REGISTERS = re.compile(r"\(((?:0x[0-9a-fA-F]{1,8}(?:,\s?|\s|(?=\)))){1,8})\)")
_NVLINK5_SEVERITY = re.compile(r"\b(Fatal|Nonfatal|Non-fatal)\b", re.IGNORECASE)
# The driver calls it non-fatal, but the guide asks for a reset of all GPUs and NVSwitches.
_RESET_THOUGH_NON_FATAL = 19084
_LINK_DOWN = re.compile(r"\bNETIR_LINK_(?:EVT|DOWN)\b")


class Resolution(NamedTuple):
    """Recommended action; `{}` in the step is the part; `bucket` is the catalogue's category, empty if unknown."""

    verdict: Verdict
    bucket: str
    step: str


def resolve(code: int, message: str = "") -> Resolution:
    """Return the recommended action for an XID.

    Args:
        code: its number.
        message: text after it in the log, which decides on XID 74, 144 to 150 and 154.
    """
    catalogue = _catalogue()
    bucket = next((name for name, entry in catalogue["bucket"].items() if code in entry["codes"]), "")
    if not bucket:
        return Resolution("WARN", "", _UNKNOWN_STEP.format(f"XID {code}"))
    entry = catalogue["bucket"][bucket]
    if code == 154:
        return _recovery(catalogue, bucket, message)
    if "quiet" in entry and _is_quiet(catalogue, bucket, message):
        return Resolution("WARN", bucket, entry["quiet"])
    note = catalogue["note"].get(str(code), "")
    return Resolution(entry["verdict"], bucket, "; ".join(filter(None, (note, entry["step"]))))


def resolve_switch(code: int, severity: str = "") -> Resolution:
    """Return the recommended action for an SXid; the severity in the driver's message precedes the table's."""
    tables: Mapping[str, Mapping[str, Any]] = _catalogue()["sxid"]
    name = next((name for name, entry in tables.items() if code in entry["codes"]), "")
    by_word = {"fatal": "fatal", "non-fatal": "non_fatal", "nonfatal": "non_fatal"}.get(severity.lower(), "")
    is_milder = by_word == "non_fatal" and code != _RESET_THOUGH_NON_FATAL
    is_graver = by_word == "fatal" and name != "always_fatal"
    if is_milder or is_graver:
        name = by_word
    if not name:
        return Resolution("WARN", "", _UNKNOWN_STEP.format(f"SXid {code}"))
    return Resolution(tables[name]["verdict"], name, tables[name]["step"])


def num_known() -> int:
    """Return the number of XIDs in the catalogue."""
    return sum(len(entry["codes"]) for entry in _catalogue()["bucket"].values())


def _recovery(catalogue: Mapping[str, Any], bucket: str, message: str) -> Resolution:
    action = _RECOVERY.search(message)
    known = {name.lower(): pair for name, pair in catalogue["recovery"].items()}
    if action is None or action[1].lower() not in known:
        return Resolution("WARN", bucket, catalogue["bucket"][bucket]["step"])
    verdict, step = known[action[1].lower()]
    return Resolution(verdict, bucket, step)


def _is_quiet(catalogue: Mapping[str, Any], bucket: str, message: str) -> bool:
    """Return True if the message of an NVLink error tells that the GPU can stay in service."""
    registers = _REGISTERS.search(message)
    values = [int(word, 16) for word in re.split(r"[,\s]+", registers[1].strip())] if registers else []
    if bucket == "WORKFLOW_NVLINK_ERR":
        quiet_bits = {int(at): sum(1 << bit for bit in bits) for at, bits in catalogue["nvlink4"]["quiet_bits"].items()}
        return any(values) and not any(value & ~quiet_bits.get(at, 0) for at, value in enumerate(values))
    severity = _NVLINK5_SEVERITY.search(message)
    if severity is None or severity[1].lower() != "fatal":
        return True
    reason = values[0] >> 20 & 0x3F if values else -1
    return bool(_LINK_DOWN.search(message)) and reason in catalogue["nvlink5"]["quiet_reasons"]


@cache
def _catalogue() -> dict[str, Any]:
    return tomllib.loads(Path(__file__).with_name("xids.toml").read_text(encoding="utf-8"))
