"""The kernel's log (dmesg, journalctl -k): NVIDIA's XID messages.

Format and meaning: docs.nvidia.com/deploy/xid-errors. An application can cause 13, 31, 43 and 45 itself, and 63, 92 and
154 tell of repairs and counts: those warn. Every other number fails the GPU.
"""

from __future__ import annotations

import re

from bench.accept.log import Log, Text
from netlayer.verdict import Finding

KIND = "kernel log"
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]{1,20})[^)]{0,80}\): (\d{1,5}),?\s*(.{0,120})")
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


def is_text(content: str) -> bool:
    return "NVRM: Xid" in content


def parse_text(text: Text) -> Log:
    """One finding for each GPU and XID number, at its first line."""
    seen: dict[tuple[str, int], list[tuple[int, str]]] = {}
    for line, words in enumerate(text.lines, 1):
        if found := _XID.search(words):
            seen.setdefault((found[1], int(found[2])), []).append((line, found[3].strip()))
    if not seen:
        line = text.line_of("NVRM: Xid")
        raise text.damaged(line, "must read 'NVRM: Xid (PCI:0000:1b:00): 79, ...'")
    return Log(
        KIND,
        tuple(
            Finding(
                "WARN" if number in _STEPS else "FAIL",
                f"GPU {bus}",
                f"XID {number}",
                lines[0][1] + (f" ({len(lines)} times)" if len(lines) > 1 else ""),
                "none",
                _STEPS.get(number, _RESET),
                text.file,
                lines[0][0],
            )
            for (bus, number), lines in seen.items()
        ),
    )
