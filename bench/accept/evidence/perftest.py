"""perftest's tables: ib_write_bw, ib_read_bw, ib_send_bw, ib_atomic_bw and their *_lat, one or many in a file.

Format: github.com/linux-rdma/perftest, src/perftest_parameters.c. `MB/sec` there is 2**20 bytes, `Gb/sec` 1e9 bits.
The tables do not name the node, so that a device is told from others by its file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from bench.accept.evidence.log import Figure, Log, Text, number
from netlayer.units import format_size
from netlayer.verdict import Finding

KIND = "perftest"
_TITLE = re.compile(r"((?:RDMA_Write|RDMA_Read|Send|Atomic_\w{1,20}|Raw_Ethernet)[\w ]{0,40} Test)")
_SETTING = re.compile(r"(Device|Number of qps|Connection type|Mtu|Link type)\s*:\s*(\S+)")
_UNITS = {"MB/sec": 8 * 2**20 / 1e9, "MiB/sec": 8 * 2**20 / 1e9, "Gb/sec": 1.0}
_FAILURE = re.compile(
    r"Completion with error|Failed status|Problems with|Couldn't|Unable to|Failed to |wr_id \d+ syndrom|"
    r"IB device .{0,60} not found",
    re.IGNORECASE,
)
_NEXT = "swap cable and transceiver of {}, then its switch port; ibdiagnet or ethtool -S show its errors"


@dataclass
class _Run:
    """One table as it is being read."""

    title: str
    line: int
    settings: dict[str, str] = field(default_factory=dict)
    head: list[str] = field(default_factory=list)
    unit: str = ""
    rows: list[tuple[int, float, int]] = field(default_factory=list)

    @property
    def is_latency(self) -> bool:
        return "Latency" in self.title

    @property
    def series(self) -> str:
        said = self.settings
        what = f"{said.get('Connection type', 'RC')}, {said.get('Number of qps', '1')} QP, MTU {said.get('Mtu', '?')}"
        return f"{self.title.removesuffix(' Test')} ({what})"


def is_text(content: str) -> bool:
    return "#bytes" in content or bool(re.search(r"(?:RDMA_\w{1,10}|Send) (?:BW|Latency) Test", content))


def parse_text(text: Text) -> Log:
    """Every table of the file.

    Raises:
        ConfigError: a row is broken, or a table has none.
    """
    findings: list[Finding] = []
    runs: list[_Run] = []
    for line, words in enumerate(text.lines, 1):
        if (title := _TITLE.fullmatch(words.strip())) is not None:
            runs.append(_Run(title[1], line))
        elif runs:
            _read_line(text, runs[-1], line, words)
        if _FAILURE.search(words):
            device = runs[-1].settings.get("Device", text.stem) if runs else text.stem
            findings.append(
                Finding(
                    "FAIL",
                    device,
                    "run",
                    words.strip()[:200],
                    "a transfer without errors",
                    _NEXT.format(device),
                    text.file,
                    line,
                )
            )
    if not runs and not findings:
        raise text.damaged(
            1, "has no title such as 'RDMA_Write BW Test' above its table", "give perftest's whole output"
        )
    text.check_rows(sum(len(run.rows) for run in runs))
    figures = [figure for run in runs for figure in _figures(text, run, bool(findings))]
    done = Finding(
        "PASS",
        text.stem,
        "runs",
        f"{len(runs)} without errors",
        "a transfer without errors",
        "",
        text.file,
        runs[0].line if runs else 0,
    )
    return Log(KIND, tuple(findings) or (done,), tuple(figures))


def _read_line(text: Text, run: _Run, line: int, words: str) -> None:
    run.settings.update(_SETTING.findall(words))
    if words.lstrip().startswith("#bytes") and len(words) < 1000:
        # Titles hold blanks (`BW average[MB/sec]`, `99% percentile[usec]`): they are told apart by their brackets.
        run.head = re.findall(r"#\w{1,20}|[\w%.]{1,20}(?: [a-z]{1,20})?\[[^\]]{0,20}\]", words)
        run.unit = next((unit for unit in _UNITS if f"BW average[{unit}]" in words), "")
        return
    cells = words.split()
    if run.head and len(cells) > 1 and cells[0].isdecimal() and cells[1].isdecimal():
        text.check_ended(line)
        run.rows.append((*_row(text, run, cells, line), line))


def _row(text: Text, run: _Run, cells: list[str], line: int) -> tuple[int, float]:
    """Bytes, and microseconds or Gb/s."""
    wanted = ("t_typical[usec]", "t_avg[usec]") if run.is_latency else (f"BW average[{run.unit}]",)
    column = next((run.head.index(title) for title in wanted if title in run.head), None)
    if column is None:
        raise text.damaged(line, "the head above this row must name one of " + ", ".join(wanted))
    value = number(cells[column]) if column < len(cells) and len(cells[0]) < 19 else None
    if value is None:
        raise text.damaged(line, f"a row breaks off: {len(run.head)} columns are expected")
    return int(cells[0]), value if run.is_latency else value * _UNITS[run.unit]


def _figures(text: Text, run: _Run, failed: bool) -> Iterator[Figure]:
    if not run.rows and not failed:
        rule = f"the table '{run.title}' of this line has no row: the run hung, or the log was cut"
        raise text.damaged(run.line, rule, "see whether the other side was reached, then take the log again")
    device = run.settings.get("Device", text.stem)
    for size, value, line in run.rows:
        if value > 0:
            yield Figure(
                run.series,
                format_size(size),
                device,
                value,
                "us" if run.is_latency else "Gb/s",
                line,
                higher_is_better=not run.is_latency,
            )
