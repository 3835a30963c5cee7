"""Parser of nccl-tests and rccl-tests output, text or JSON (`-J`): wrong data, failed runs, bus bandwidth by size.

Format: github.com/NVIDIA/nccl-tests, src/common.cu and src/util.cu, 2.0 to 2.19.6 (`nccl_table.py` has the tables).
Our own `*_perf` write the same. The result is one log for each run: a file may have several, one after the other, or
of several hosts or processes with prefixes. A row that is broken by another line is skipped. NCCL_DEBUG's lines tell
NCCL's version, the NVLS state and warnings (`nccl_debug.py`).

A table without closing lines is a run that hung or was killed if the log stops where a waiting program would: after a
whole line (nccl-tests writes line by line), or after half a row of our own. Otherwise the log itself was cut.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bench.accept.evidence import nccl_debug, nccl_table
from bench.accept.evidence.log import MAX_ROWS, Log, Text, mapping, number, sequence, word
from bench.accept.evidence.nccl_debug import Line
from bench.accept.evidence.nccl_run import ALONE, KIND, RUN, Run, facts_of, subject_of, to_log
from bench.accept.evidence.nccl_table import IN_PLACE, OUT_OF_PLACE, Layout, Row, Side
from bench.accept.evidence.prefixes import NOBODY, Prefix
from netlayer.units import format_size
from netlayer.verdict import Finding, Verdict

_TEXT = re.compile(
    r"^[#\s]*[nr]ccl-tests version \S|^[#\s]*rccl-tests: Version|^[#\s]*nThreads?:? \d{1,6} nGpus"
    r"|^# Collective test starting|^[#\s]*Avg bus bandwidth\s*:|^[#\s|]*(?:size|bytes) +(?:count|N) .*\balgbw\s+busbw\b"
    r"|(?:^|: Test )(?:NCCL|CUDA|Cuda|HIP) failure \S{1,80}:\d"
    r"|^\s*\d{1,18}\s+\d{1,18}\s+(?:float|half|double|bfloat16|u?int\d{1,2})\s+"
    r"(?:sum|prod|min|max|avg|mulsum|none)\s+-?\d{1,6}\s+\d",
    re.MULTILINE,
)
_RANK = re.compile(
    r"[#\s]*Rank\s+(\d{1,7})\s+(?:Group\s+(\d{1,7})\s+)?(?:Pid\s+\d{1,9}\s+)?on\s+(\S{1,255})\s+device\s+\d{1,4} "
    r"\[[^\]]{0,40}\] (.*)$"
)
_PROGRAM = re.compile(r"(\w{1,40}?)_perf(?:_mpi)?\b")
_LIBRARY = re.compile(r"[nr]ccl-library=(\d{1,9})|NCCL version (\d{1,4})\.(\d{1,4})\.(\d{1,4})")
_GRAPH = re.compile(r"\bgraph: (\d{1,9})")
_LARGEST = re.compile(r"minBytes:? (\d{1,18}) maxBytes:? (\d{1,18}) step:? (\d{1,18})\((factor|bytes)\)")
_REDUCED = re.compile(r"# Reducing maxBytes to (\d{1,18}) ")
_BOUNDS = re.compile(r"[#\s]*Out of bounds values\s*:\s*(\d{1,18})\s+(OK|FAILED)")
# Stages of a run's output, in order; a repeated or earlier stage begins the next run. Ranks, headers and rows repeat.
_MARKS = tuple(
    re.compile(pattern)
    for pattern in (
        r"[#\s]*[nr]ccl-tests version ",
        r"[#\s]*Collective test starting",
        r"[#\s]*nThreads?:? \d|[#\s]*nGpus\(perProc\) \d",
        r"[#\s]*Using devices",
    )
)
_RANKS, _HEADER, _ROWS, _OUT_OF_BOUNDS, _END, _CONCLUDED = 4, 5, 6, 7, 8, 9
_STARTED = 2
# Our output tells if NVLS was used; NCCL_DEBUG tells if it is enabled and supported.
_NVLS_USED = re.compile(r"# NVLS used: (yes|no)\b")
# Settings that keep NCCL off NVLink: P2P disabled, or limited to a level that excludes NVLink.
_P2P_OFF = re.compile(
    r"NCCL_P2P_(?:DISABLE(?: set by environment to |=)1|LEVEL(?: set by environment to |=)(?:LOC|0))\b"
)
_NVLS_OFF = re.compile(r"NCCL_NVLS_ENABLE(?: set by environment to |=)0\b")
_MULTICAST = re.compile(
    r"NVLS multicast support is (not )?available|# NVLS used: unknown \(multicast: (not )?available\)"
)
_AGAIN = f"take it again; where it hangs, {ALONE}"
_PID = re.compile(r"\bPid\s+(\d{1,9}) on ")
_NEAR_PIDS = 4
_LAUNCHER = re.compile(r"\b(?:mpirun|mpiexec|orterun|prterun|srun|hydra_pmi_proxy)\b")
_NO_MPI = "if mpirun or srun started them, build nccl-tests with MPI=1; the bandwidth of one rank is meaningless"
_ENDED = "# Avg bus bandwidth"
# Width and number of cells of our rows without their in-place side: plain, and with per-iteration figures.
_HALF_ROWS = {85: 9, 121: 13}
# A process is slow if its time exceeds all others' by this factor in this share of the measurements.
_SLOW, _MOST, _MIN_PROCESSES, _MIN_MEASUREMENTS = 1.25, 0.9, 3, 2


class _Rank(NamedTuple):
    """A line of the list of ranks and devices."""

    rank: int
    group: int
    host: str
    device: str


@dataclass
class _Section:
    """Lines of one run, or of several runs whose lines are mixed.

    Args:
        lines: the lines.
        stage: last stage reached: index of `_MARKS`, or one of the stages after them.
        num_starts: number of starting lines.
        num_ends: number of closing lines.
        prefix: writer of the lines.
        before: lines between the previous run and this one, which may have the command.
    """

    lines: list[Line] = field(default_factory=list)
    stage: int = -1
    num_starts: int = 0
    num_ends: int = 0
    prefix: Prefix = NOBODY
    before: list[Line] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        """True if it has a closing line: an edited log may lack one of the two."""
        return self.num_ends > 0 or self.stage >= _OUT_OF_BOUNDS


def is_text(content: str) -> bool:
    return bool(_TEXT.search(content))


def is_json(tree: Mapping[str, Any]) -> bool:
    return "results" in tree and "nccl_version" in tree


def parse_runs(text: Text) -> tuple[Log, ...]:
    """Return one log for each run in the file, in the order of their first lines.

    Raises:
        ConfigError: the log ends within a line, or a run has neither measured nor failed.
    """
    sections = _sections(text)
    unconnected = _unconnected_ranks(sections)
    # Ranks that did not connect to each other count as one failed run.
    runs = [[section] for section in sections if section not in unconnected] + ([unconnected] if unconnected else [])
    runs.sort(key=lambda run: run[0].lines[0].number)
    return tuple(
        _unconnected_log(text, run, number) if run is unconnected else _section_log(text, run[0], number)
        for number, run in enumerate(runs, 1 if len(runs) > 1 else 0)
    )


def parse_json(text: Text, tree: Mapping[str, Any]) -> Log:
    """Parse the JSON of `-J`.

    Raises:
        ConfigError: results or figures are missing.
    """
    run = _read_json(text, tree)
    subject = subject_of(run.hosts, text)
    errors = [word(error) or word(mapping(error).get("message")) for error in sequence(tree.get("errors"))]
    # NCCL's last error, which may be empty.
    errors = [error for error in errors if error]
    if errors:
        step, line = f"read what it printed; {ALONE}", text.line_of('"errors"')
        run.findings.append(Finding("FAIL", subject, RUN, "; ".join(errors)[:200], "no errors", step, text.file, line))
    slow = _slow_process(text, tree)
    if slow:
        run.findings.append(slow)
    return to_log(text, run)


def _sections(text: Text) -> list[_Section]:
    """Split the file in runs.

    If several processes or hosts with prefixes printed tables, each of them is split separately. Otherwise lines with
    other prefixes (another rank's warnings) belong to the one table.
    """
    lines = [
        (prefix, Line(at, line_text, prefix.host))
        for at, (prefix, line_text) in enumerate(zip(text.prefixes, text.lines, strict=True), 1)
    ]
    text.check_rows(sum(nccl_table.is_row(line.text) for _, line in lines), MAX_ROWS)
    tables = list(dict.fromkeys(prefix for prefix, line in lines if prefix != NOBODY and _is_table(line.text)))
    if len(tables) < 2:
        sections = _split([line for _, line in lines])
        for section in sections:
            section.prefix = tables[0] if tables else NOBODY
        return sections
    # Lines of another rank of the same host or pod belong to the table of that host, if there is exactly one.
    places: dict[tuple[str, str], list[Prefix]] = {}
    for prefix in tables:
        places.setdefault((prefix.host, prefix.task), []).append(prefix)
    streams: dict[Prefix, list[Line]] = {prefix: [] for prefix in tables}
    shared: list[Line] = []
    for prefix, line in lines:
        tables_there = places.get((prefix.host, prefix.task), [])
        owner = (
            prefix if prefix in streams else tables_there[0] if len(tables_there) == 1 and prefix != NOBODY else None
        )
        (shared if owner is None else streams[owner]).append(line)
    sections = []
    for prefix, own_lines in streams.items():
        for section in _split(own_lines):
            section.prefix = prefix
            if not section.ended:
                # The launcher's messages tell how each run without an end was ended.
                section.lines += [line for line in shared if line.number > section.lines[0].number]
            sections.append(section)
    return sections


def _is_table(line: str) -> bool:
    return nccl_table.is_row(line) or any(mark.match(line) for mark in _MARKS)


def _split(lines: Sequence[Line]) -> list[_Section]:
    """Split one stream of lines in sections; runs with mixed lines become one section."""
    sections = [_Section()]
    for line in lines:
        section, stage = sections[-1], _stage(line.text)
        if stage is not None:
            repeats = stage in (_RANKS, _HEADER, _ROWS)
            is_new_run = stage < section.stage or (stage == section.stage and not repeats)
            if is_new_run and not (stage in (_OUT_OF_BOUNDS, _END, _CONCLUDED) and section.stage >= _OUT_OF_BOUNDS):
                sections.append(section := _Section(before=_after_end(section)))
            section.stage = max(section.stage, stage)
            section.num_starts += stage == _STARTED
            section.num_ends += stage == _END
        section.lines.append(line)
    # Lines before the first mark, and fragments of mixed runs, are not runs of their own.
    merged: list[_Section] = []
    for section in sections:
        while section.num_ends > 1 and merged and not merged[-1].ended:
            section = _merge_sections(merged.pop(), section)
        merged.append(section)
    return [section for section in merged if section.stage >= 0 or len(merged) == 1]


def _stage(line: str) -> int | None:
    if nccl_table.is_row(line):
        return _ROWS
    if not line or line[0] not in "#Rnuoars \t":
        return None if "busbw" not in line and "Out of" not in line and "Avg bus" not in line else _late_stage(line)
    for stage, mark in enumerate(_MARKS):
        if mark.match(line):
            return stage
    return _RANKS if _RANK.match(line) else _late_stage(line)


def _late_stage(line: str) -> int | None:
    if "busbw" in line and nccl_table.read_header(line, ""):
        return _HEADER
    if _BOUNDS.match(line):
        return _OUT_OF_BOUNDS
    if re.match(r"[#\s]*Avg bus bandwidth", line):
        return _END
    return _CONCLUDED if re.match(r"[#\s]*Collective test concluded", line) else None


def _after_end(section: _Section) -> list[Line]:
    """Return the lines after the last mark of a run, which may have the command of the next one."""
    last = max((at for at, line in enumerate(section.lines) if _stage(line.text) is not None), default=-1)
    return section.lines[last + 1 :]


def _merge_sections(first: _Section, second: _Section) -> _Section:
    return _Section(
        [*first.lines, *second.lines],
        second.stage,
        first.num_starts + second.num_starts,
        first.num_ends + second.num_ends,
        before=first.before,
    )


def _ranks(section: _Section) -> list[_Rank]:
    matches = (_RANK.match(line.text) for line in section.lines)
    return [_Rank(int(match[1]), int(match[2] or 0), match[3], match[4].strip()) for match in matches if match]


def _unconnected_ranks(sections: Sequence[_Section]) -> list[_Section]:
    """Return the sections of processes that were started together, but each of which ran as rank 0 of 1.

    Single-GPU runs that the user started one after the other, or on each host by pdsh, do not count.
    """
    single = [section for section in sections if (ranks := _ranks(section)) and {rank.rank for rank in ranks} == {0}]
    mixed = [section for section in single if len(_ranks(section)) > 1]
    if mixed:
        return mixed
    by_rank = len({section.prefix.rank for section in single}) > 1
    by_host = len({section.prefix.host or section.prefix.task for section in single}) > 1
    commands = sum(bool(_PROGRAM.search(line.text)) for section in single[1:] for line in section.before)
    others = sum(bool(_ranks(section)) for section in sections) - len(single)
    if len(single) < 2 or (not by_rank and (by_host or others)) or commands >= len(single) - 1:
        return []
    return single


def _unconnected_log(text: Text, sections: Sequence[_Section], number: int) -> Log:
    ranks = [rank for section in sections for rank in _ranks(section)]
    hosts = list(dict.fromkeys(rank.host for rank in ranks))
    figure = f"each of {len(ranks)} processes ran alone, as rank 0 of 1: the binary was built without MPI=1"
    # Sequential tables may come from a loop over single GPUs. Then their process ids are far apart, since the threads
    # of each run take many.
    pids = sorted(int(pid) for section in sections for line in section.lines for pid in _PID.findall(line.text))
    at_once = len(ranks) > len(sections) or len({section.prefix.rank for section in sections}) > 1
    near = len(hosts) == 1 and len(pids) == len(ranks) and pids[-1] - pids[0] < _NEAR_PIDS * len(pids)
    is_certain = at_once or near or _LAUNCHER.search(text.content) is not None
    if not is_certain:
        figure += ", or they were run one after the other"
    line = next(line.number for line in sections[0].lines if _RANK.match(line.text))
    verdict: Verdict = "FAIL" if is_certain else "WARN"
    finding = Finding(verdict, subject_of(hosts, text), RUN, figure, "one run of all ranks", _NO_MPI, text.file, line)
    return Log(KIND, (finding,), host=hosts[0] if len(hosts) == 1 else "", run=number)


def _section_log(text: Text, section: _Section, number: int) -> Log:
    run = _read_section(text, section)
    measures = bool(run.sides or run.findings)
    if not measures and (run.unended is None or not section.num_starts) and run.ending is None:
        if run.lost:
            reason, line = run.lost[0]
            raise text.damaged(line, f"a row cannot be read: {reason}", _AGAIN)
        last = section.lines[-1].number
        raise text.damaged(last, "has no row of figures", "give the output of a run that measured")
    return to_log(text, run, number)


def _read_section(text: Text, section: _Section) -> Run:
    """Parse one run of nccl-tests in a log: its collective, hosts, rows, closing lines and how it ended."""
    ranks = _ranks(section)
    hosts = [rank.host for rank in ranks] or [name for name in (section.prefix.host,) if name]
    mixed = len({(rank.group, rank.rank) for rank in ranks}) < len(ranks) or section.num_ends > 1
    unended: tuple[str, int] | None = None
    cut = False
    if not section.ended:
        description, line, cut = _last_state(text, section)
        unended = (description, line)
    rows, lost = _rows(text, section, half=unended is not None)
    groups = [rank.group for rank in ranks]
    num_ranks = groups.count(groups[0]) if groups and not mixed else 0
    deduced = nccl_table.deduce(rows, num_ranks)
    collective, possible = _collective(section, deduced)
    hosts_known = bool(ranks) and not mixed
    if not num_ranks or (collective in deduced.names and not deduced.fits_list):
        # The list of devices is missing or truncated.
        num_ranks, hosts_known = deduced.num_ranks, False
        hosts = hosts if deduced.fits_list else []
    content = "\n".join(line.text for line in section.lines)
    facts = facts_of(collective, num_ranks, [rank.device for rank in ranks], _version(content))
    if hosts_known:
        facts["hosts"] = len(set(hosts))
    if graph := _GRAPH.search(content):
        facts["graph"] = int(graph[1]) > 0
    nvls = _nvls(content)
    if nvls is not None:
        facts["nvls"] = nvls
    if _P2P_OFF.search(content):
        facts["p2p_off"] = True
    sides = [side for row in rows for side in row.sides]
    run = Run(collective, hosts, facts, sides, possible, lost, unended=unended)
    if unended and sides:
        run.is_part = cut or not section.num_starts or _is_elided(section)
        run.has_all_rows = _is_whole(section)
    _read_closing_lines(section, run)
    who = subject_of(hosts, text)
    run.ending = nccl_debug.ending(section.lines if unended else _after_end(section))
    if run.ending and not run.ending.reason and (why := nccl_debug.cause(section.lines)):
        run.ending = run.ending._replace(line_text=f"{run.ending.line_text}; NCCL: {why}"[:300])
    run.findings += nccl_debug.warnings(section.lines, list(dict.fromkeys(hosts)), text.file, who)
    _mark_unusable(text, section, run, num_ranks, mixed=mixed)
    return run


def _mark_unusable(text: Text, section: _Section, run: Run, num_ranks: int, *, mixed: bool) -> None:
    """Mark the figures of a run as no measurement of links if its lines are mixed or it has only one rank."""
    subject, sides = subject_of(run.hosts, text), run.sides
    # 2 (n-1)/n and the other factors of the bus bandwidth are 0 for one rank.
    is_single_rank = num_ranks == 1 or (not num_ranks and bool(sides) and not any(side.bus_bw for side in sides))
    if mixed:
        first = section.lines[0].number
        figure = (
            f"the lines of {max(section.num_starts, section.num_ends)} runs are mixed: whose a row is cannot be told"
        )
        step = "take each run's output on its own: srun --label, mpirun --tag-output, a file a host"
        run.findings.append(Finding("WARN", subject, RUN, figure, "one run after the other", step, text.file, first))
        run.is_measurement = False
    elif is_single_rank and sides:
        step = "take it over two GPUs or more"
        run.is_measurement = False
        figure = "one rank: no byte crossed a link, its bandwidth says nothing"
        run.findings.append(Finding("WARN", subject, RUN, figure, "two ranks or more", step, text.file, sides[0].line))


def _collective(section: _Section, deduced: nccl_table.Deduction) -> tuple[str, tuple[str, ...]]:
    """Return the collective's name, or an empty name and the candidates."""
    for line in section.lines:
        if "Collective test starting" in line.text and (match := _PROGRAM.search(line.text)):
            return match[1], ()
    # The command line, if there is exactly one and the rows match it.
    commands = {
        match[1].rpartition("/")[2]
        for line in [*section.before, *section.lines]
        for match in _PROGRAM.finditer(line.text)
        if _stage(line.text) is None
    } & nccl_table.COLLECTIVES
    if len(commands) == 1 and (name := commands.pop()) in deduced.names:
        return name, ()
    return (deduced.names[0], ()) if len(deduced.names) == 1 else ("", deduced.names)


def _read_closing_lines(section: _Section, run: Run) -> None:
    for line in section.lines:
        bounds = _BOUNDS.match(line.text)
        if bounds:
            run.bounds_known = True
            if bounds[2] == "FAILED" or bounds[1].strip("0"):
                run.out_of_bounds = run.out_of_bounds or (bounds[1], line.number)
        elif _stage(line.text) == _END and line.text.rstrip().endswith("FAILED"):
            run.too_slow = (line.text.partition(":")[2].strip(), line.number)


def _last_state(text: Text, section: _Section) -> tuple[str, int, bool]:
    """Return the last state of a run without an end, its line, and True if the log was cut (within a line).

    Raises:
        ConfigError: it was cut before the first complete row.
    """
    last, number = text.lines[-1], len(text.lines)
    complete_rows = [line for line in section.lines if nccl_table.is_row(line.text) and line.number < number]
    cut = False
    if section.lines[-1].number == number and last and not _is_half_row(last):
        row = nccl_table.read_row(last, number, _last_layout(section)) if nccl_table.is_row(last) else None
        # An excerpt ends anywhere, so its end tells nothing about the program.
        cut = isinstance(row, str) or (bool(section.num_starts) and nccl_debug.ending(section.lines) is None)
        if cut and not complete_rows:
            rule = f"a row ends after {row}" if isinstance(row, str) else f"ends before '{_ENDED}', within a line"
            raise text.damaged(number, f"{rule}: the log was cut, and no whole row stands before", _AGAIN)
    if cut:
        return (
            f"is cut within a line; its last whole figures are of {format_size(_size(complete_rows[-1].text))}",
            number,
            True,
        )
    state = ("has no end, nor a row of figures", _first_mark(section))
    for line in section.lines:
        if nccl_table.is_row(line.text):
            where = f"{format_size(_size(line.text))}{' out of place' * _is_half_row(line.text)}"
            state = (f"has no end; its last figures are of {where}", line.number)
    return *state, False


def _is_whole(section: _Section) -> bool:
    """Return True if the last row has the largest size that the run was to measure."""
    largest = next((match for line in section.lines if (match := _LARGEST.search(line.text))), None)
    rows = [line for line in section.lines if nccl_table.is_row(line.text)]
    if largest is None or not rows:
        return False
    low, high = int(largest[1]), int(largest[2])
    reduced = [int(match[1]) for line in section.lines if (match := _REDUCED.search(line.text))]
    high = reduced[-1] if reduced else high
    step, factor = int(largest[3]), largest[4] == "factor"
    row = nccl_table.read_row(rows[-1].text, rows[-1].number, _last_layout(section))
    # The next size is above the largest; sizes of sharded collectives are rounded down to whole elements.
    size = _size(rows[-1].text)
    following = size * step if factor and step > 1 else size + max(1, step)
    return isinstance(row, Row) and len(row.sides) == 2 and size >= low - 4096 and following > high


def _is_elided(section: _Section) -> bool:
    """Return True if a quoted log has an ellipsis after the last row."""
    last = max(at for at, line in enumerate(section.lines) if nccl_table.is_row(line.text))
    return any(re.match(r"[#\s]*(?:\.\.\.|\[\.\.\.\]|<snip>)", line.text) for line in section.lines[last + 1 :])


def _last_layout(section: _Section) -> Layout | None:
    headers = (line.text for line in reversed(section.lines) if "busbw" in line.text)
    return next((layout for header in headers if (layout := nccl_table.read_header(header, ""))), None)


def _size(row: str) -> int:
    return next(int(cell) for cell in row.split() if cell.isdecimal())


def _first_mark(section: _Section) -> int:
    started = (line.number for line in section.lines if _stage(line.text) == _STARTED)
    return next(started, section.lines[0].number)


def _is_half_row(row: str) -> bool:
    """Return True for one of our rows whose in-place side is not measured yet."""
    cells = row.split()
    width = len(row) + cells.count("N/A")  # N/A is one character narrower than a number
    return nccl_table.is_row(row) and _HALF_ROWS.get(width) == len(cells)


def _rows(text: Text, section: _Section, *, half: bool) -> tuple[list[Row], list[tuple[str, int]]]:
    """Return the rows and the unreadable ones as (reason, line); with `half`, skip an incomplete last row."""
    layout: Layout | None = None
    title = ""
    rows: list[Row] = []
    lost: list[tuple[str, int]] = []
    for line in section.lines:
        if "busbw" in line.text and (header := nccl_table.read_header(line.text, title)):
            layout = header
        elif nccl_table.is_row(line.text) and not (half and line.number == len(text.lines)):
            row = nccl_table.read_row(line.text, line.number, layout)
            if isinstance(row, Row):
                rows.append(row)
            else:
                lost.append((row, line.number))
        title = line.text
    return rows, lost


def _nvls(content: str) -> bool | None:
    """Return the NVLS state; None if the text does not tell it, or tells different states."""
    states = {match[1] == "yes" for match in _NVLS_USED.finditer(content)}
    if not states and _NVLS_OFF.search(content):
        return False
    states = states or {match[1] is None and match[2] is None for match in _MULTICAST.finditer(content)}
    return states.pop() if len(states) == 1 else None


def _read_json(text: Text, tree: Mapping[str, Any]) -> Run:
    """Parse the JSON file of one run of nccl-tests.

    Raises:
        ConfigError: the run did not end, or holds no measurement.
    """
    config = mapping(tree.get("config"))
    devices = [mapping(device) for device in sequence(config.get("devices"))]
    arguments = [word(argument) for argument in sequence(tree.get("args"))]
    match = _PROGRAM.search(arguments[0]) if arguments else None
    version = tree.get("nccl_version")
    names, hosts = ([word(device.get(key)) for device in devices] for key in ("device_info", "hostname"))
    groups = [device.get("group") for device in devices]
    num_ranks = groups.count(groups[0]) if groups else 0
    # The first version of the JSON format has this misspelling.
    average = mapping(tree.get("average_bus_bandwidth", tree.get("average_bus_bandwidith")))
    if "end_time" not in tree and not average:
        raise text.damaged(len(text.content.splitlines()), "has no 'end_time': the run did not end", _AGAIN)
    results = [mapping(result) for result in sequence(tree.get("results"))]
    text.check_rows(len(results))
    lines = _result_lines(text)
    rows, lost = [], []
    for result in results:
        line = lines.get(int(number(result.get("size")) or 0), 0)
        row = _json_row(text, result, line)
        rows.append(row)
        lost += [
            ("a bandwidth that is no number", line) for key in ("out_of_place", "in_place") if _is_nan(result, key)
        ]
    sides = [side for row in rows for side in row.sides]
    if not sides:
        raise text.damaged(text.line_of('"results"'), "'results' must hold at least one measurement")
    deduced = nccl_table.deduce(rows, num_ranks)
    collective = match[1] if match else deduced.names[0] if len(deduced.names) == 1 else ""
    facts = facts_of(collective, num_ranks, names, version if isinstance(version, int) else 0)
    if hosts and all(hosts):
        facts["hosts"] = len(set(hosts))
    if isinstance(config.get("graph"), int):
        facts["graph"] = config["graph"] > 0
    nvls = _json_nvls(tree)
    if nvls is not None:
        facts["nvls"] = nvls
    if any(_P2P_OFF.match(word(setting)) for setting in sequence(tree.get("env"))):
        facts["p2p_off"] = True
    bounds = mapping(tree.get("out_of_bounds"))
    wrong = _is_false(bounds.get("okay")) or (number(bounds.get("count")) or 0) > 0
    mean = word(average.get("bandwidth", average.get("bandwidith")))
    return Run(
        collective,
        [host for host in hosts if host],
        facts,
        sides,
        deduced.names if not collective else (),
        lost,
        (word(bounds.get("count")) or "unknown", text.line_of('"out_of_bounds"')) if wrong else None,
        bool(bounds),
        (f"{mean} GB/s", text.line_of('"average_bus_bandw')) if _is_false(average.get("okay")) else None,
    )


def _is_false(okay: object) -> bool:
    """Return True if a boolean of nccl-tests is false; some versions write it as a string."""
    return okay is False or (isinstance(okay, str) and okay.lower() == "false")


def _json_nvls(tree: Mapping[str, Any]) -> bool | None:
    """Return the NVLS state: as used, from our own output; else from NCCL_NVLS_ENABLE and multicast support."""
    own_state = mapping(mapping(tree.get("netlayer")).get("nvls"))
    if isinstance(own_state.get("used"), bool):
        return bool(own_state["used"])
    if "NCCL_NVLS_ENABLE=0" in sequence(tree.get("env")):
        return False
    return {"available": True, "not available": False}.get(word(own_state.get("multicast")))


def _result_lines(text: Text) -> dict[int, int]:
    """Return the first line of each size, for JSON on several lines."""
    lines: dict[int, int] = {}
    for line, line_text in enumerate(text.content.split("\n"), 1):
        for match in re.finditer(r'"size": ?(\d{1,18})\b', line_text):
            lines.setdefault(int(match[1]), line)
    return lines


def _json_row(text: Text, result: Mapping[str, Any], line: int) -> Row:
    size = number(result.get("size"))
    if size is None:
        raise text.damaged(text.line_of('"results"'), "every result needs its 'size' in bytes")
    dtype, op, root = (word(result.get(key)) for key in ("type", "redop", "root"))
    what = " ".join(cell for cell in (dtype, op) if cell not in ("", "none"))
    sides = tuple(
        _json_side(text, int(size), what, place, mapping(result[key]), line)
        for place, key in ((OUT_OF_PLACE, "out_of_place"), (IN_PLACE, "in_place"))
        if result.get(key) is not None and not _is_nan(result, key)
    )
    known_root = int(root) if re.match(r"-?\d{1,6}$", root) else None
    return Row(int(size), int(number(result.get("count")) or 0), dtype, op or None, known_root, sides)


def _is_nan(result: Mapping[str, Any], key: str) -> bool:
    """Return True if nccl-tests wrote "nan" for a side that it could not compute."""
    side = mapping(result.get(key))
    return "nan" in (side.get("bus_bw"), side.get("alg_bw"), side.get("time"))


def _json_side(text: Text, size: int, what: str, place: str, side: Mapping[str, Any], line: int) -> Side:
    time, wrong = side.get("time", side.get("cpu_time")), side.get("nwrong")
    alg_bw, bus_bw, errors = number(side.get("alg_bw")), number(side.get("bus_bw")), number(wrong)
    if number(time) is None or bus_bw is None or (errors is None and wrong not in ("N/A", None)):
        figures = " ".join(map(str, (time, side.get("alg_bw"), side.get("bus_bw"), wrong)))
        rule = f"the {place} figures of {format_size(size)} are {word(figures)}"
        raise text.damaged(line, f"{rule}: time, algbw, busbw and #wrong are expected")
    # Printed with six decimals.
    return Side(size, what, place, alg_bw or 0.0, bus_bw, errors, line, rounding=(5e-7, 5e-7))


def _slow_process(text: Text, tree: Mapping[str, Any]) -> Finding | None:
    """Find the process whose times (-I 1) are above all others' in nearly every measurement.

    If all processes wait for a slow one, all times are longer, which shows in the bandwidth. Here only a process counts
    that takes longer than the others from its own start to its own end.
    """
    measurements = [
        [statistics.median(times) for times in processes]
        for result in sequence(tree.get("results"))
        for key in ("out_of_place_per_iter", "in_place_per_iter")
        if (processes := _process_times(mapping(mapping(result).get(key))))
    ]
    num_processes = {len(times) for times in measurements}
    if len(num_processes) != 1 or min(num_processes) < _MIN_PROCESSES or len(measurements) < _MIN_MEASUREMENTS:
        return None
    ratios = []
    votes: dict[int, int] = {}
    for times in measurements:
        slowest = max(range(len(times)), key=times.__getitem__)
        middle = statistics.median(times[:slowest] + times[slowest + 1 :])
        # Compare with the largest of the others: if they scatter, the slowest one is no outlier.
        others = [time for at, time in enumerate(times) if at != slowest]
        if middle > 0 and times[slowest] >= _SLOW * max(others):
            votes[slowest] = votes.get(slowest, 0) + 1
            ratios.append(times[slowest] / middle)
    process, count = max(votes.items(), key=lambda vote: vote[1], default=(0, 0))
    if count < _MOST * len(measurements):
        return None
    return _slow_finding(text, tree, process, f"{statistics.median(ratios):.2f} times", count, len(measurements))


def _slow_finding(
    text: Text, tree: Mapping[str, Any], process: int, ratio: str, count: int, num_measurements: int
) -> Finding:
    config = mapping(tree.get("config"))
    devices = [mapping(device) for device in sequence(config.get("devices"))]
    per_process = max(1, int(number(config.get("ngpus")) or 1) * int(number(config.get("nthreads")) or 1))
    # Our output has one process for each GPU, and counts all of them in ngpus.
    ranks = (
        [process] if len(devices) <= per_process else list(range(process * per_process, (process + 1) * per_process))
    )
    host = word(devices[ranks[0]].get("hostname")) if ranks[0] < len(devices) else ""
    subject = f"{host} rank {ranks[0]}" if host else f"rank {ranks[0]}"
    figure = f"needs {ratio} as long as the other processes, in {count} of {num_measurements} measurements"
    step = f"run netlayer accept --hosts with {host or 'its node'} alone; read clocks and PCIe width of this GPU"
    line = text.line_of("per_process_max_times_us")
    return Finding("WARN", subject, "time of each process", figure, "alike in all processes", step, text.file, line)


def _process_times(per_iter: Mapping[str, Any]) -> list[list[float]]:
    """Return the times of each process in us, without skipped iterations; empty if a process has none."""
    skipped = int(number(per_iter.get("skipped_iterations")) or 0)
    processes = [
        [time for value in sequence(times) if (time := number(value)) is not None][skipped:]
        for times in sequence(per_iter.get("per_process_max_times_us"))
    ]
    return processes if processes and all(processes) else []


def _version(content: str) -> int:
    """Return NCCL's version code (22809 for 2.28.9); 0 if not known."""
    match = _LIBRARY.search(content)
    if match is None:
        return 0
    return int(match[1]) if match[1] else int(match[2]) * 10000 + int(match[3]) * 100 + int(match[4])
