"""Meaning of one line of the kernel's log: by the catalogue of XIDs and SXids, and the table of other messages.

For whoever reads the log as it comes. Not covered: what only many lines tell, such as a link that flaps, and the heads
of lines that other programs put there (`bench.accept.evidence.kernel`).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from collectives.health import xid
from collectives.health.kernel_events import EVENTS
from netlayer.verdict import Verdict

XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]{1,20})[^)]{0,80}\): (\d{1,5})\b,?\s*(.{0,200})")
SXID = re.compile(
    r"nvidia-nvswitch(\d{1,4}):? SXid \((?:PCI:)?[0-9a-fA-F:.]{1,20}\): (\d{1,6}),? ?(Fatal|Non-fatal)?,?\s*(.{0,120})"
)
_OFF_THE_BUS = re.compile(r"NVRM: +(?:GPU has )?fallen off the bus")


class KernelFault(NamedTuple):
    """Verdict on a line: FAIL: a part of the node cannot be used as it is; WARN: it should be looked at."""

    verdict: Verdict
    check: str
    step: str


def judge(message: str) -> KernelFault | None:
    """Return what a message of the kernel means, without its head; None: nothing that is known."""
    if match := XID.search(message):
        resolution = xid.resolve(int(match[2]), match[3].strip())
        return KernelFault(resolution.verdict, f"XID {match[2]}", resolution.step)
    if match := SXID.search(message):
        resolution = xid.resolve_switch(int(match[2]), match[3] or "")
        return KernelFault(resolution.verdict, f"SXid {match[2]}", resolution.step)
    if _OFF_THE_BUS.search(message):  # the last of three lines, of which the first names the GPU
        return KernelFault("FAIL", "fell off the bus", "drain the node and power-cycle it")
    for event in EVENTS:
        if event.search(message):
            return KernelFault(event.verdict, event.check, event.step) if event.verdict else None
    return None
