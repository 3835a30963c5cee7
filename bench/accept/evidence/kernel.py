"""The kernel's log (dmesg, journalctl -k): NVIDIA's XID messages, those of its NVSwitches, and GPUs that do not start.

Format and meaning: docs.nvidia.com/deploy/xid-errors. An application can cause 13, 31, 43 and 45 itself, and 63, 92 and
154 tell of repairs and counts: those warn. Every other number fails the GPU. An NVSwitch says itself whether its SXid
is fatal (docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide). Left out: what others than NVIDIA's driver say.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from bench.accept.evidence.log import Log, Text
from netlayer.verdict import Finding, Verdict

KIND = "kernel log"
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]{1,20})[^)]{0,80}\): (\d{1,5}),?\s*(.{0,120})")
_SWITCH = re.compile(
    r"nvidia-nvswitch(\d{1,4}): SXid \((?:PCI:)?[0-9a-fA-F:.]{1,20}\): (\d{1,6}), (Fatal|Non-fatal),?\s*(.{0,120})"
)
_SWITCH_RESET = "drain the node and reset all its GPUs and NVSwitches, or reboot; return it where it comes again"
_SWITCH_WATCH = (
    "watch it: the switch works on; where it comes often, run nvidia-smi nvlink -s and reseat that link's GPU"
)
_DRIVER = re.compile(r"NVRM|nvidia", re.IGNORECASE)
_NOT_STARTED = re.compile(r"NVRM: GPU ([0-9a-fA-F:.]{1,20}): (RmInitAdapter failed!.{0,60})")
# What stands before the words: dmesg, dmesg -x and -T, syslog's date and journalctl's ISO one.
_STAMP = re.compile(
    r"(?:<\d{1,3}>|[a-z]{1,8}\s{0,8}:[a-z]{1,8}\s{0,8}: )?\[[ \d]{1,9}\.\d{6}\]\s"
    r"|\[[A-Z][a-z]{2} [A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d \d{4}\]\s"
    r"|(?:[A-Z][a-z]{2} [ \d]\d \d\d:\d\d:\d\d|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\S{0,16}) \S{1,64} kernel: "
)
_STEPS = {
    13: "an application can cause it: run another one there, and dcgmi diag -r 3 where it comes again",
    31: "an application can cause it: run another one there, and dcgmi diag -r 3 where it comes again",
    43: "look at the application that ran there: the GPU itself is good",
    45: "look for the XID before it: this one follows from another",
    63: "reset the GPU, so that the row is remapped",
    92: "watch the GPU: many single-bit errors",
    154: "do what the message says",
}
_RESET = "drain the node, reset the GPU or reboot, then run dcgmi diag -r 3; return it where it comes again"


class _Message(NamedTuple):
    """What lines must share to be one finding."""

    verdict: Verdict
    subject: str
    check: str
    step: str


def is_text(content: str) -> bool:
    if "NVRM: Xid" in content:
        return True
    lines = [line[:200] for line in content.splitlines() if line.strip()]
    # A message of several lines has its stamp on the first alone, and journalctl adds lines of its own.
    return 2 * sum(bool(_STAMP.match(line)) for line in lines) > len(lines)


def parse_text(text: Text) -> Log:
    """One finding for each part and number, at its first line; one that says so where there is none.

    Raises:
        ConfigError: its only message of an XID breaks off.
    """
    seen: dict[_Message, list[tuple[int, str]]] = {}
    for line, words in enumerate(text.lines, 1):
        if found := _read(words):
            seen.setdefault(found[0], []).append((line, found[1]))
    if not seen and "NVRM: Xid" in text.content:
        line = text.line_of("NVRM: Xid")
        raise text.damaged(line, "must read 'NVRM: Xid (PCI:0000:1b:00): 79, ...'")
    return Log(KIND, tuple(_finding(text, message, lines) for message, lines in seen.items()) or (_none(text),))


def _read(words: str) -> tuple[_Message, str] | None:
    if found := _XID.search(words):
        number = int(found[2])
        verdict: Verdict = "WARN" if number in _STEPS else "FAIL"
        return _Message(verdict, f"GPU {found[1]}", f"XID {number}", _STEPS.get(number, _RESET)), found[3].strip()
    if found := _SWITCH.search(words):
        verdict, step = ("FAIL", _SWITCH_RESET) if found[3] == "Fatal" else ("WARN", _SWITCH_WATCH)
        return _Message(verdict, f"NVSwitch {found[1]}", f"SXid {found[2]}", step), f"{found[3]}, {found[4].strip()}"
    if found := _NOT_STARTED.search(words):
        return _Message("FAIL", f"GPU {found[1]}", "driver", _RESET), found[2].strip()
    return None


def _finding(text: Text, message: _Message, lines: Sequence[tuple[int, str]]) -> Finding:
    line, words = lines[0]
    words += f" ({len(lines)} times)" if len(lines) > 1 else ""
    return Finding(message.verdict, message.subject, message.check, words, "none", message.step, text.file, line)


def _none(text: Text) -> Finding:
    """Nothing bad was said, and whether NVIDIA's driver said anything at all."""
    words = f"no XID in {len(text.content.splitlines())} lines"
    words += "" if _DRIVER.search(text.content) else ", none of them from NVIDIA's driver"
    return Finding("PASS", text.stem, "XID", words, "none", "", text.file, 1)
