"""Parser of `/var/log/fabricmanager.log`: errors of NVSwitches and of the NVLink fabric.

Format: docs.nvidia.com/datacenter/tesla/fabric-manager-user-guide: time, level, thread, message. SXids are judged like
those of the kernel log.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from bench.accept.evidence.gpu.identity import normal_bus
from bench.accept.evidence.log import Log, Text
from collectives.health import xid
from netlayer.printing import printable_text
from netlayer.verdict import Finding, Verdict

KIND = "fabric manager"
_LINE = re.compile(r"^\s*\[\w{3} \d{1,2} \d{4} \d\d:\d\d:\d\d\] \[(\w{4,8})\] \[tid \d{1,9}\]\s*(.{0,1000})")
_SWITCH = re.compile(
    r"NVSwitch (non-fatal|fatal) error (\d{1,6}) on .{0,60}pci bus id ([0-9a-fA-F:.]{7,20})(?: physical id (\d{1,4}))?"
    r"(?: port (\d{1,4}))?"
)
_READY = re.compile(
    r"Successfully configured all the available|FM starting NvLink Inband|fabric manager .{0,40}started", re.I
)
# Failures that prevent the fabric from working.
_BROKEN = re.compile(
    r"failed to (?:initialize|discover|configure|train)|training failed|not all .{0,40}(?:links|GPUs)|"
    r"NVLink .{0,60}(?:failed|failure)|access link .{0,40}fail|trunk link .{0,40}fail|exiting|aborting",
    re.I,
)
_STEP_BROKEN = (
    "read its lines around this one, restart nvidia-fabricmanager, and look at nvidia-smi nvlink -s of all GPUs"
)
_STEP_ERROR = "read its lines around this one; restart nvidia-fabricmanager where GPUs lack the fabric (nvidia-smi -q)"


@dataclass(frozen=True)
class _Key:
    """Grouping key: lines with the same key become one finding."""

    verdict: Verdict
    subject: str
    check: str
    step: str


def is_text(content: str) -> bool:
    return any(_LINE.match(line) for line in content[: 1 << 16].split("\n"))


def parse_text(text: Text) -> Log:
    """Return one finding for each switch and error, at its first line."""
    seen: dict[_Key, list[tuple[int, str]]] = {}
    for line, key, message in _errors(text):
        seen.setdefault(key, []).append((line, message))
    findings = [
        Finding(
            key.verdict,
            key.subject,
            key.check,
            hits[0][1] + (f" ({len(hits)} times)" if len(hits) > 1 else ""),
            "none",
            key.step,
            text.file,
            hits[0][0],
        )
        for key, hits in seen.items()
    ]
    if not findings:
        ready = " after the fabric was configured" if _READY.search(text.content) else ""
        figure = f"no error in {len(text.lines)} lines{ready}"
        findings = [Finding("PASS", text.stem, "fabric", figure, "none", "", text.file, 1)]
    return Log(KIND, tuple(findings))


def _errors(text: Text) -> Iterator[tuple[int, _Key, str]]:
    for line, row in enumerate(text.lines, 1):
        head = _LINE.match(row)
        if head is None or head[1] not in ("ERROR", "CRITICAL", "FATAL", "WARNING"):
            continue
        message = printable_text(head[2])[:200]
        if match := _SWITCH.search(head[2]):
            resolution = xid.resolve_switch(int(match[2]), match[1])
            who = f"NVSwitch {match[4]}" if match[4] else f"NVSwitch {normal_bus(match[3])}"
            port = f", port {match[5]}" if match[5] else ""
            step = resolution.step.replace("{}", who)
            yield line, _Key(resolution.verdict, who, f"SXid {match[2]}", step), f"{match[1]}{port}, bus {match[3]}"
        elif head[1] != "WARNING":
            step = _STEP_BROKEN if _BROKEN.search(head[2]) else _STEP_ERROR
            yield line, _Key("WARN", text.stem, "fabric", step), message
