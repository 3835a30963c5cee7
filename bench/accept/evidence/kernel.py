"""Parser of kernel logs (dmesg, journalctl -k, kern.log, /var/log/messages): XIDs, SXids and other fault messages.

`xid` has the recommended action for each XID, `kernel_events` the meaning of other messages. Lines of other programs in
a system log are skipped, since they repeat kernel messages; those of network daemons are read for lost carriers.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bench.accept.evidence.gpu.identity import normal_bus
from bench.accept.evidence.log import Log, Text, mapping, sequence, word
from collectives.health import xid
from collectives.health.kernel_events import EVENTS, KNOWN, MARKS, ROOT_PORT
from collectives.health.kernel_line import SXID, XID
from netlayer.printing import printable_text
from netlayer.verdict import Finding, Verdict

KIND = "kernel log"
_MOST_CHARS = 1000  # longer lines are cut
# From this number on, a flapping link is not explained by maintenance (threshold of Azure's node health checks).
_MANY_FLAPS = 3

_DRIVER = re.compile(r"NVRM|nvidia", re.IGNORECASE)
# `NVRM: The NVIDIA GPU 0000:18:00.0` begins a message of several lines.
_GPU_OPENS = re.compile(r"NVRM: The NVIDIA GPU ([0-9a-fA-F:.]{1,20})")
_LINK = re.compile(
    r"(?:(?P<driver>[\w-]{1,20}) (?P<bus>[0-9a-fA-F:.]{5,16}) )?(?P<net>[\w.-]{1,20}): "
    r"(?:NIC )?(?:[Ll]ink (?:is )?(?P<link>[Dd]own|[Uu]p|DOWN|UP)\b|(?P<carrier>[Ll]ost|[Gg]ained) carrier)"
)
_UPTIME = re.compile(r"\[ {0,8}(\d{1,9})\.\d{6}\]")
_START_S = 120  # seconds after boot in which drivers bring their links up for the first time
_STEP_FLAP = "swap cable and transceiver of {}, then its switch port, unless its switch was under maintenance"
_STEP_DOWN = "see whether {} is wanted: it lost its carrier and did not get it back in this log"

_MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sep|Oct|Nov|Dec)"
_DAY = r"(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)"
_CLOCK = r"\d\d:\d\d:\d\d(?:[.,]\d{1,9})?"
# Time stamps of the kernel itself: dmesg, dmesg -x, -T, -H, --time-format iso, /dev/kmsg, pstore.
_KERNEL_STAMP = re.compile(
    r"^(?:<\d{1,3}>)?(?:[a-z]{1,8}\s{0,8}:[a-z]{1,8}\s{0,8}: )?"
    rf"(?:\[[ \d]{{1,9}}\.\d{{6}}\]|\[{_DAY} {_MONTH} [ \d]{{1,2}} {_CLOCK} \d{{4}}\]|\[{_MONTH} ?\d\d \d\d:\d\d\]|"
    rf"\[ *[+<][ \d.]{{3,14}}>?\]|\d{{4}}-\d\d-\d\dT{_CLOCK}[+-]\d\d:?\d\d|\d{{1,2}},\d{{1,9}},\d{{1,18}},[-c+];|"
    r"kernel:)\s?"
)
# Prefix of syslog and the journal: time in many formats, host and program.
_SYSLOG = re.compile(
    rf"^(?:<\d{{1,3}}>\d? ?)?(?:(?:{_DAY} )?(?:\d{{4}} )?{_MONTH} [ \d]?\d (?:\d{{4}} )?{_CLOCK}(?: \d{{4}})?|"
    rf"\d{{4}}-\d\d-\d\d[T ]{_CLOCK}(?:Z|[+-]\d\d:?\d\d)?|{_DAY} \d{{4}}-\d\d-\d\d {_CLOCK} \w{{1,5}}|"
    r"\d{9,10}\.\d{6}|\[ *\d{1,9}\.\d{6}\]) "
    r"(?P<host>[A-Za-z0-9][\w.-]{0,80}) (?P<program>[\w./@-]{1,60})(?:\[\d{1,9}\])?: ?"
)
_RECORD = re.compile(r'\s*\{\s*"')
# Programs whose lines are read: the kernel, and network daemons that log lost carriers.
_PROGRAMS = frozenset(("kernel", "klogd", "systemd-networkd", "NetworkManager", "vmunix"))
# Programs that distinguish a system log from an application's log.
_SYSTEM = frozenset(("kernel", "systemd", "systemd-networkd", "NetworkManager", "systemd-logind"))


class _Line(NamedTuple):
    number: int
    host: str
    message: str


@dataclass(frozen=True)
class _Key:
    """Grouping key: lines with the same key become one finding."""

    verdict: Verdict
    host: str
    subject: str
    check: str
    step: str


@dataclass
class _Carrier:
    """State of a network link since the node started."""

    is_rdma: bool = False
    # After a boot, a driver logs "link down" once before the first "link up", which is not a loss.
    was_up: bool = True
    is_down: bool = False
    was_regained: bool = False
    # Number of losses for each wording: a driver and a network daemon report the same loss differently.
    losses: Counter[str] = field(default_factory=Counter)
    line: int = 0

    @property
    def flaps(self) -> int:
        return max(self.losses.values(), default=0) if self.was_regained else 0


@dataclass
class _Reading:
    """Parser state."""

    seen: dict[_Key, list[tuple[int, str]]] = field(default_factory=dict)
    carriers: dict[tuple[str, str], _Carrier] = field(default_factory=dict)
    hosts: Counter[str] = field(default_factory=Counter)
    # Line and verdict of the last recovery action (XID 154) for each (host, GPU).
    recovery: dict[tuple[str, str], tuple[int, str]] = field(default_factory=dict)
    open_gpu: str = ""
    saw_boot: bool = False
    broken_xid: int = 0

    def add(self, key: _Key, line: int, figure: str) -> None:
        self.seen.setdefault(key, []).append((line, figure))


def is_text(content: str) -> bool:
    """Return True if a file is a kernel log: it has an event that we know, or most lines look like the kernel's."""
    if _RECORD.match(content):
        return False  # the journal as JSON
    if KNOWN.search(content):
        return True
    lines = [line[:200] for line in content.splitlines() if line.strip()]
    own = sum(bool(_KERNEL_STAMP.match(line)) for line in lines)
    # Not all lines: a message of several lines has its time stamp on the first only, and journalctl adds its own lines.
    return 2 * (own + _num_system(lines)) > len(lines)


def is_system_log(content: str) -> bool:
    """Return True if most lines are of a system log (/var/log/syslog, journalctl), by their program names.

    Call it on the original file, since the prefixes are needed.
    """
    lines = [line[:200] for line in content.splitlines() if line.strip()]
    return 2 * _num_system(lines) > len(lines)


def _num_system(lines: Sequence[str]) -> int:
    programs = [match["program"] for line in lines if (match := _syslog_head(line))]
    return len(programs) if _SYSTEM.intersection(programs) else 0


def is_json(tree: Mapping[str, Any]) -> bool:
    """Return True for a record of `journalctl -o json`, or for `dmesg --json`."""
    return ("MESSAGE" in tree and any(name.startswith("_") for name in tree)) or "dmesg" in tree


def parse_text(text: Text) -> Log:
    """Return one finding for each subject and kind, at its first line; a single PASS if there is none.

    Raises:
        ConfigError: its only XID message is truncated.
    """
    return _log(text, _lines(text.content))


def parse_json(text: Text, tree: Mapping[str, Any]) -> Log:
    """Return the same findings for journal records, one a line, and for `dmesg --json`."""
    if "dmesg" in tree:
        rows = [mapping(row) for row in sequence(tree["dmesg"])]
        text.check_rows(len(rows), 1_000_000)
        return _log(text, (_Line(at, "", word(row.get("msg"), _MOST_CHARS)) for at, row in enumerate(rows, 1)))
    return _log(text, _journal(text.content))


def _lines(content: str) -> Iterator[_Line]:
    """Yield the kernel's lines without their syslog prefix."""
    for number, line in enumerate(content.split("\n"), 1):
        cut = line[:_MOST_CHARS]
        head = _syslog_head(cut)
        if head is None:
            yield _Line(number, "", cut)
        elif head["program"].rpartition("/")[2] in _PROGRAMS:
            yield _Line(number, printable_text(head["host"]), cut[head.end() :])


def _syslog_head(line: str) -> re.Match[str] | None:
    """Match the prefix of syslog or the journal; None for lines such as `[ 9.120000] pcieport 0000:00:1c.4: ...`."""
    head = _SYSLOG.match(line)
    return None if head and line.startswith("[") and head["program"] != "kernel" else head


def _journal(content: str) -> Iterator[_Line]:
    for number, line in enumerate(content.split("\n"), 1):
        try:
            record = mapping(json.loads(line)) if line.strip().startswith("{") else {}
        except (ValueError, RecursionError):
            continue  # a truncated record
        message = record.get("MESSAGE")
        if isinstance(message, list):  # the journal writes a message that is not UTF-8 as a list of bytes
            message = bytes(byte for byte in message if isinstance(byte, int) and 0 <= byte < 256).decode(
                "utf-8", "replace"
            )
        program = word(record.get("SYSLOG_IDENTIFIER")) or "kernel"
        if program in _PROGRAMS or record.get("_TRANSPORT") == "kernel":
            yield _Line(number, word(record.get("_HOSTNAME")), word(message, _MOST_CHARS))


def _log(text: Text, lines: Iterator[_Line]) -> Log:
    reading = _Reading()
    for line in lines:
        if line.host:
            reading.hosts[line.host] += 1
        message = line.message
        if any(mark in message for mark in MARKS) or "ink" in message:
            _read(reading, line)
        elif message.find("Linux version ") >= 0:
            reading.saw_boot = True
            for carrier in reading.carriers.values():
                carrier.is_down, carrier.was_up = False, False
    if not reading.seen and reading.broken_xid:
        raise text.damaged(reading.broken_xid, "must read 'NVRM: Xid (PCI:0000:1b:00): 79, ...'")
    if any(key.check.startswith("PCIe (") and key.check != ROOT_PORT for key in reading.seen):
        reading.seen = {key: hits for key, hits in reading.seen.items() if key.check != ROOT_PORT}
    host = next(iter(reading.hosts)) if len(reading.hosts) == 1 else ""
    findings = [_finding(text, reading, key, hits) for key, hits in reading.seen.items()]
    findings += _carriers(text, reading)
    return Log(KIND, tuple(findings) or (_no_finding(text, host),), host=host)


def _read(reading: _Reading, line: _Line) -> None:
    """Add the content of one line to the parser state."""
    message = line.message
    if "Xid (" in message or "Xid " in message:
        if match := XID.search(message):
            _read_xid(reading, line, match)
            return
        if "NVRM: Xid" in message:
            reading.broken_xid = reading.broken_xid or line.number
    if match := SXID.search(message):
        _read_switch(reading, line, match)
        return
    if "fallen off the bus" in message and reading.open_gpu:
        message = f"NVRM: GPU {reading.open_gpu}: GPU has fallen off the bus"
    reading.open_gpu = (
        opens[1] if (opens := _GPU_OPENS.search(message)) else reading.open_gpu if "NVRM:" in message else ""
    )
    if (
        ("ink" in message or "carrier" in message)
        and (link := _LINK.search(message))
        and not message.startswith("IPv6")
    ):
        _read_link(reading, line, link)
        return
    for event in EVENTS:
        if match := event.search(message):
            if event.verdict:
                subject = _event_subject(event.subject, match)
                reading.add(
                    _Key(event.verdict, line.host, subject, event.check, event.step),
                    line.number,
                    _excerpt(message, match),
                )
            return


def _read_xid(reading: _Reading, line: _Line, match: re.Match[str]) -> None:
    code, detail = int(match[2]), printable_text(match[3].strip())
    gpu = f"GPU {normal_bus(match[1]) or match[1]}"
    resolution = xid.resolve(code, detail)
    if code == 154:
        # Only the last recovery action of the driver counts.
        for key in [
            key for key in reading.seen if key.check == "XID 154" and (key.host, key.subject) == (line.host, gpu)
        ]:
            del reading.seen[key]
        reading.recovery[line.host, gpu] = (line.number, resolution.verdict)
    bucket = f" ({resolution.bucket})" if resolution.bucket else " (not in the catalogue)"
    reading.add(_Key(resolution.verdict, line.host, gpu, f"XID {code}", resolution.step), line.number, detail + bucket)


def _read_switch(reading: _Reading, line: _Line, match: re.Match[str]) -> None:
    code, severity = int(match[2]), match[3] or ""
    switch, check = f"NVSwitch {match[1]}", f"SXid {code}"
    if not severity and any((key.host, key.subject, key.check) == (line.host, switch, check) for key in reading.seen):
        return  # register dump of a message that was read already
    resolution = xid.resolve_switch(code, severity)
    detail = ", ".join(filter(None, (severity, printable_text(match[4].strip()))))
    reading.add(_Key(resolution.verdict, line.host, switch, check, resolution.step), line.number, detail)


def _read_link(reading: _Reading, line: _Line, link: re.Match[str]) -> None:
    """Note in `reading` that a network interface went up or down: what it lost, and whether it was up before."""
    is_down = (link["link"] or link["carrier"]).lower() in ("down", "lost")
    name = link["net"]
    if (line.host, name) not in reading.carriers:
        uptime = _UPTIME.search(line.message)
        starts = reading.saw_boot or (uptime is not None and int(uptime[1]) < _START_S)
        reading.carriers[line.host, name] = _Carrier(was_up=not starts)
    carrier = reading.carriers[line.host, name]
    carrier.is_rdma = carrier.is_rdma or (link["driver"] or "").startswith("mlx") or name.startswith("ib")
    if not is_down:
        carrier.was_regained = carrier.was_regained or carrier.is_down
        carrier.is_down, carrier.was_up = False, True
    elif carrier.was_up:
        carrier.line = carrier.line or line.number
        carrier.losses[link[0].rpartition(": ")[2].lower()] += 1
        carrier.is_down = True


def _event_subject(template: str, match: re.Match[str]) -> str:
    """Return the subject of an event; for a device of NVIDIA's driver, named as in XIDs: `GPU 0000:1b:00`."""
    groups = {name: printable_text(value or "") for name, value in match.groupdict().items()}
    if groups.get("bus") and (template.startswith("GPU") or groups.get("driver") == "nvidia"):
        return f"GPU {normal_bus(groups['bus'])}"
    if groups.get("driver", "").startswith("mlx"):
        template = "NIC {bus}"
    elif template.startswith("{driver}") and not groups["driver"]:
        template = "PCIe {bus}"
    return template.format(**groups)


def _excerpt(message: str, match: re.Match[str]) -> str:
    """Return the message from the event on, cut to a length for tables."""
    start = match.start() if match.start() < 120 else 0
    return " ".join(printable_text(_KERNEL_STAMP.sub("", message[start:])).split())[:200]


def _finding(text: Text, reading: _Reading, key: _Key, hits: list[tuple[int, str]]) -> Finding:
    line, figure = hits[0]
    figure += f" ({len(hits)} times)" if len(hits) > 1 else ""
    subject = _subject(text, reading, key.host, key.subject)
    verdict, step = key.verdict, key.step.replace("{}", key.subject or "it")
    if key.check in ("kernel panic", "kernel oops") and _is_manual_crash(reading, key.host, line):
        verdict, step = "WARN", "ask who wrote to /proc/sysrq-trigger: this crash was intended"
    recovery_after = reading.recovery.get((key.host, key.subject))
    if (
        recovery_after
        and recovery_after[1] == "WARN"
        and hits[-1][0] < recovery_after[0]
        and key.check.startswith("XID")
    ):
        verdict, step = "WARN", "nothing now: the driver asks for no recovery of it any more (XID 154 after it)"
    return Finding(verdict, subject, key.check, figure, "none", step, text.file, line)


def _is_manual_crash(reading: _Reading, host: str, line: int) -> bool:
    """Return True if the kernel was told to crash (sysrq) before this line."""
    keys = [key for key in reading.seen if key.check == "crash by hand" and key.host == host]
    return any(hit[0] <= line for key in keys for hit in reading.seen[key])


def _subject(text: Text, reading: _Reading, host: str, part: str) -> str:
    """Return the subject of a finding: the part, after its host if the log has several; else the host or file."""
    if len(reading.hosts) > 1 and host:
        return f"{host}: {part}" if part else host
    return part or host or text.stem


def _carriers(text: Text, reading: _Reading) -> Iterator[Finding]:
    for (host, name), carrier in reading.carriers.items():
        if not carrier.flaps and not carrier.is_down:
            continue
        is_flapping = carrier.is_rdma and carrier.flaps >= _MANY_FLAPS
        figure = f"carrier lost and regained {carrier.flaps} times" if carrier.flaps else "carrier lost"
        figure += ", lost at the end" if carrier.is_down and carrier.flaps else ""
        step = _STEP_FLAP if carrier.flaps else _STEP_DOWN
        subject = _subject(text, reading, host, name)
        yield Finding(
            "FAIL" if is_flapping else "WARN",
            subject,
            "carrier",
            figure,
            "none lost",
            step.replace("{}", name),
            text.file,
            carrier.line,
        )


def _no_finding(text: Text, host: str) -> Finding:
    """Return the PASS for a log without findings; it notes if NVIDIA's driver logged nothing at all."""
    figure = f"no XID in {len(text.content.splitlines())} lines"
    figure += "" if _DRIVER.search(text.content) else ", none of them from NVIDIA's driver"
    return Finding("PASS", host or text.stem, "XID", figure, "none", "", text.file, 1)
