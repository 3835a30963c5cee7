"""All settings of programs, by the names that journals have for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from congestion.nic.vendors.tool_setting import NONE, ToolSetting
from congestion.nic.vendors.tool_settings_dcb import DcbApp, DcbPfc, Pause
from congestion.nic.vendors.tool_settings_nvidia import (
    Algorithm,
    Firmware,
    MlnxDscp,
    MlnxPfc,
    MlnxTrust,
    PpccParameter,
    PpccRange,
    Register,
)

__all__ = [
    "KINDS",
    "NONE",
    "Algorithm",
    "DcbApp",
    "DcbPfc",
    "Firmware",
    "MlnxDscp",
    "MlnxPfc",
    "MlnxTrust",
    "Pause",
    "PpccParameter",
    "PpccRange",
    "Register",
    "ToolSetting",
    "restore",
]

KINDS: dict[str, Callable[..., ToolSetting]] = {
    one.kind: one
    for one in (DcbPfc, DcbApp, MlnxTrust, MlnxPfc, MlnxDscp, Pause, Register, Algorithm, PpccParameter, Firmware)
}
"""How a journal names them."""


def restore(kind: str, values: Sequence[str]) -> ToolSetting:
    """A setting as a journal keeps it: the kind, and its fields in order.

    Raises:
        ValueError: there is no such kind, or the fields do not fit it.
    """
    try:
        return KINDS[kind](*values)
    except (KeyError, TypeError) as exc:
        raise ValueError(f"{kind}: no such setting") from exc
