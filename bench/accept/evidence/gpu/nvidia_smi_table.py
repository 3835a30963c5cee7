"""Parser of the table of `nvidia-smi` without options, and of the error messages of all its commands.

The table tells only that a GPU answers, uncorrected memory errors since the driver was loaded, and `ERR!` for a sensor
or GPU that does not answer. Row remapping, throttling and the fabric are in `nvidia-smi -q` only.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

from bench.accept.evidence.gpu import nvlink, topo
from bench.accept.evidence.gpu.nvidia_smi_rules import lost_gpus, says_lost
from bench.accept.evidence.log import Log, Text
from netlayer.verdict import Finding

KIND = "nvidia-smi"
_HEAD = re.compile(
    r"\|\s*NVIDIA-SMI (\S{1,24})\s+(?:KMD |Driver )Version:\s*(\S{1,24})\s+CUDA (?:UMD )?Version:\s*(\S{1,12})"
)
# `|   0  NVIDIA H100 80GB HBM3   On  |   00000000:19:00.0 Off |   0 |`; the MIG table's rows have no bus id.
_GPU = re.compile(
    r"^\|\s{1,4}(?P<number>\d{1,4})\s+(?P<name>\S.{0,60}?)\s{1,40}(?:On|Off|N/A|ERR!)?\s*\|\s*"
    r"(?P<bus>[0-9A-Fa-f]{4,8}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2}\.\d|ERR!|N/A|Unknown\S*)\s+(?:On|Off|N/A|ERR!)?\s*\|\s*"
    r"(?P<ecc>\S.{0,30}?)\s*\|\s*$"
)
_CELLS = re.compile(r"^\|(?P<sensors>[^|]{10,60})\|(?P<memory>[^|]{10,40})\|(?P<use>[^|]{10,40})\|\s*$")
_END = re.compile(r"^\+-{10,}")
_LOOK = "read nvidia-smi -q and the kernel log of this node"


class _Row(NamedTuple):
    """Table lines of one GPU."""

    line: int
    number: str
    name: str
    bus: str
    ecc: str
    second: str
    third: str


def is_text(content: str) -> bool:
    return bool(_HEAD.search(content))


def is_error(content: str) -> bool:
    """Return True for error output of any nvidia-smi command; call it after the other tests."""
    # In the journal's JSON it is a kernel message.
    return not content.lstrip().startswith("{") and says_lost(content)


def parse_text(text: Text) -> Log:
    """Return one finding for each GPU and fault, and versions; also for `topo -m` and `nvlink` in the same file.

    Raises:
        ConfigError: the table is truncated, or has no GPU.
    """
    head = _HEAD.search(text.content)
    findings = list(lost_gpus(text))
    rows = list(_rows(text)) if head else []
    text.check_rows(len(rows))
    if head and not rows and not findings:
        raise text.damaged(text.line_of("NVIDIA-SMI"), "has the head of nvidia-smi's table, and no GPU below it")
    for row in rows:
        who = f"GPU {row.number} ({row.bus})"
        faults = list(_judge(text, who, row))
        findings += faults or [
            Finding("PASS", who, "table", "answers, no uncorrected ECC error", "an answer", "", text.file, row.line)
        ]
    traits = {}
    if head:
        traits = {("Driver Version", text.stem): head[2], ("CUDA Version", text.stem): head[3]}
        traits |= {("Product Name", f"GPU {row.number} ({row.bus})"): row.name for row in rows if "..." not in row.name}
        traits |= {
            ("MIG Mode", f"GPU {row.number} ({row.bus})"): row.third
            for row in rows
            if row.third in ("Enabled", "Disabled", "Enabled*", "Disabled*")
        }
    others = [part.parse_text(text) for part in (nvlink, topo) if part.is_text(text.content)] if head else []
    findings += [finding for log in others for finding in log.findings]
    figures = tuple(figure for log in others for figure in log.figures)
    return Log(KIND, tuple(findings), figures, traits)


def _rows(text: Text) -> Iterator[_Row]:
    """Yield the GPUs of every table in the file, without the tables of MIG devices and processes below it."""
    lines, inside = text.lines, False
    for at, content in enumerate(lines):
        if _HEAD.search(content):
            inside = True
        elif "MIG devices:" in content or "Processes:" in content:
            inside = False
        gpu = _GPU.match(content.strip()) if inside else None
        if gpu is None:
            continue
        below = [lines[next_at].strip() if next_at < len(lines) else "" for next_at in (at + 1, at + 2)]
        if not below[0]:
            raise text.damaged(at + 1, f"the table breaks off below GPU {gpu['number']}: it hung, or the log was cut")
        mig = _CELLS.match(below[1])
        third = mig["use"].strip() if mig else ""
        yield _Row(at + 1, gpu["number"], gpu["name"], gpu["bus"], gpu["ecc"], below[0], third)


def _judge(text: Text, who: str, row: _Row) -> Iterator[Finding]:
    def finding(verdict: str, check: str, figure: str, expected: str, step: str) -> Finding:
        return Finding("FAIL" if verdict == "FAIL" else "WARN", who, check, figure, expected, step, text.file, row.line)

    count = row.ecc.replace(",", "")
    if count.isdecimal() and int(count[:18]) > 0:
        step = f"drain the node, reset {who} (nvidia-smi -r) or reboot; {_LOOK}; return it where they come again"
        yield finding("FAIL", "ECC errors since the reset", f"{row.ecc} uncorrected", "0", step)
    cells = _CELLS.match(row.second)
    if "requires reset" in f"{row.ecc} {row.second}".lower():
        step = f"drain the node and reset {who} (nvidia-smi -r); {_LOOK} for the XID before it"
        yield finding("FAIL", "reset", "GPU requires reset", "no reset required", step)
        return
    is_dead = "ERR!" in row.bus or "ERR!" in row.ecc or "ERR!" in row.name or (cells and "ERR!" in cells["memory"])
    if is_dead or (cells and cells["sensors"].count("ERR!") > 2):
        step = f"reboot the node; where {who} does not come back, reseat or return it; {_LOOK} first"
        yield finding("FAIL", "query", "ERR! in place of an answer", "an answer", step)
    elif cells and "ERR!" in cells["sensors"]:
        yield finding("WARN", "sensor", f"ERR! in '{' '.join(cells['sensors'].split())}'", "a value", _LOOK)
