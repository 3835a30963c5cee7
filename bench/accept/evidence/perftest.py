"""Parser of perftest tables: ib_write_bw, ib_read_bw, ib_send_bw, ib_atomic_bw and their *_lat, one or more in a file.

Format: github.com/linux-rdma/perftest, src/perftest_parameters.c, where `MB/sec` is 2**20 bytes and `Gb/sec` 1e9 bits.
The tables do not name the node, so devices of different nodes are distinguished by their files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from bench.accept.evidence.log import Figure, Log, Text, number
from netlayer.units import format_size
from netlayer.verdict import Finding, Verdict

KIND = "perftest"
_TITLE = re.compile(r"((?:RDMA[_ ]Write|RDMA[_ ]Read|Send|Atomic_\w{1,20}|Raw_Ethernet)[\w ]{0,40} Test)")
_SETTING = re.compile(r"(Device|Number of qps|Connection type|Mtu|Link type)\s*:\s*(\S+)")
_UNITS = {"MB/sec": 8 * 2**20 / 1e9, "MiB/sec": 8 * 2**20 / 1e9, "Gb/sec": 1.0}
_NO_ERRORS = "a transfer without errors"
_CABLE = (
    "check that the other end ran to the end, and on RoCE that the GIDs of both ends match (-x); then swap cable and "
    "transceiver of {}, then its switch port; ibdiagnet or ethtool -S show its errors"
)
# Error messages with verdict and next step; the first match counts. The status is ibv_wc_status: 12 and 13 mean that
# the other end did not answer in time, 9 to 11 that it refused the operation.
_FAILURES: tuple[tuple[re.Pattern[str], Verdict, str], ...] = (
    (re.compile(r"Failed status (?:9|10|11)\b"), "WARN",
     "run the same program with the same options (-a, -s, -m, --use_cuda) on both ends: the other end refused it"),
    (re.compile(r"Failed status \d+|Completion with error|wr_id \d+ syndrom"), "FAIL", _CABLE),
    (re.compile(r"Couldn't connect to|Unable to connect|Failed to connect|Unexpected CM event|connection refused|"
                r"Couldn't read remote address|Failed to exchange data|rdma_(?:client|server) function", re.IGNORECASE),
     "WARN", "check that the other end runs, and that no firewall is between: {} itself was not measured"),
    (re.compile(r"Port number \d+ state is (?!Active)"), "WARN",
     "look at ibstat: the port of {} is not active; name another device with -d if it is not meant to be used"),
    (re.compile(r"IB device .{0,60} not found|Unable to find the .{0,40}device|Couldn't get (?:context|device)|"
                r"Couldn't set the link layer", re.IGNORECASE), "WARN",
     "name a device that this node has with -d (ibstat -l)"),
    (re.compile(r"Couldn't allocate|failed to (?:register|allocate|create) (?:MR|memory|QP|CQ)|Couldn't create|"
                r"Couldn't register|cuMem\w+ .{0,40}fail|unsupported memory", re.IGNORECASE), "WARN",
     "raise the limit of locked memory (ulimit -l), and with --use_cuda load nvidia_peermem or use --use_cuda_dmabuf"),
    (re.compile(r"^\s*(?:Problems with|Couldn't|Unable to |Failed to )", re.IGNORECASE), "WARN",
     "read the lines around it: the run ended before it measured {}"),
)  # fmt: skip


# Messages that only perftest prints, for runs that ended before the table heading.
_ERROR_ALONE = re.compile(
    r"Failed status \d+: wr_id|Port number \d+ state is |Couldn't connect to \S{1,80}:\d|"
    r"Couldn't get context for the device"
)


@dataclass
class _Run:
    """Parser state of one table."""

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
        settings = self.settings
        pairs = f"{settings.get('Connection type', 'RC')}, {settings.get('Number of qps', '1')} QP"
        return f"{self.title.removesuffix(' Test')} ({pairs}, MTU {settings.get('Mtu', '?')})"


def is_text(content: str) -> bool:
    if "#bytes" in content and re.search(r"BW average\[|t_(?:avg|typical)\[usec\]", content):
        return True
    return bool(_ERROR_ALONE.search(content)) or bool(
        re.search(r"(?:RDMA[_ ]\w{1,10}|Send) (?:[\w ]{1,20} )?(?:BW|Latency) Test", content)
    )


def parse_text(text: Text) -> Log:
    """Parse every table of the file.

    Raises:
        ConfigError: a row is incomplete, or a table has no rows.
    """
    findings: list[Finding] = []
    runs: list[_Run] = []
    for line, row in enumerate(text.lines, 1):
        if (title := _TITLE.fullmatch(row.strip())) is not None:
            runs.append(_Run(title[1].replace("RDMA ", "RDMA_"), line))
        elif runs or row.lstrip().startswith("#bytes"):
            if not runs:  # the beginning of the output is missing
                runs.append(_Run("Latency Test" if "t_avg" in row or "t_typical" in row else "BW Test", line))
            _read_line(text, runs[-1], line, row)
        failure = next((one for one in _FAILURES if one[0].search(row)), None)
        if failure:
            device = runs[-1].settings.get("Device", text.stem) if runs else text.stem
            step = failure[2].replace("{}", device)
            figure = row.strip()[:200]
            # Without the beginning of the output, the device is not known.
            verdict = failure[1] if runs else "WARN"
            findings.append(Finding(verdict, device, "run", figure, _NO_ERRORS, step, text.file, line))
    _share_status(findings)
    if not runs and not findings:
        raise text.damaged(
            1, "has no title such as 'RDMA_Write BW Test' above its table", "give perftest's whole output"
        )
    text.check_rows(sum(len(run.rows) for run in runs))
    figures = [figure for run in runs for figure in _figures(text, run, bool(findings) or _is_other_end(run, runs))]
    done = Finding(
        "PASS",
        text.stem,
        "runs",
        f"{len(runs)} without errors",
        _NO_ERRORS,
        "",
        text.file,
        runs[0].line if runs else 0,
    )
    return Log(KIND, tuple(findings) or (done,), tuple(figures))


def _is_other_end(run: _Run, runs: list[_Run]) -> bool:
    """Return True if a table without rows is the other end of one with rows.

    If both ends wrote to one file, each has a heading, and their lines may be mixed so that one of them gets all rows.
    """
    return any(other.rows and other.title == run.title for other in runs)


def _share_status(findings: list[Finding]) -> None:
    """Give `Completion with error` the verdict of the status in the line below it."""
    for at, finding in enumerate(findings[:-1]):
        below = findings[at + 1]
        if "Completion with error" in finding.figure and "Failed status" in below.figure:
            findings[at] = replace(finding, verdict=below.verdict, next_step=below.next_step)


def _read_line(text: Text, run: _Run, line: int, row: str) -> None:
    run.settings.update(_SETTING.findall(row))
    if row.lstrip().startswith("#bytes") and len(row) < 1000:
        # Titles contain blanks (`BW average[MB/sec]`, `99% percentile[usec]`), so they are split at their brackets.
        run.head = re.findall(r"#\w{1,20}|[\w%.]{1,20}(?: [a-z]{1,20})?\[[^\]]{0,20}\]", row)
        run.unit = next((unit for unit in _UNITS if f"BW average[{unit}]" in row), "")
        return
    cells = row.split()
    if run.head and len(cells) > 1 and cells[0].isdecimal() and cells[1].isdecimal():
        text.check_ended(line)
        run.rows.append((*_row(text, run, cells, line), line))


def _row(text: Text, run: _Run, cells: list[str], line: int) -> tuple[int, float]:
    """Return size in bytes, and latency in microseconds or bandwidth in Gb/s."""
    columns: tuple[str, ...]
    columns = ("t_typical[usec]", "t_avg[usec]") if run.is_latency else (f"BW average[{run.unit}]",)
    column = next((run.head.index(title) for title in columns if title in run.head), None)
    if column is None:
        raise text.damaged(line, "the head above this row must name one of " + ", ".join(columns))
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
