"""nccl-tests' text and JSON (`-J`), any binary of it: wrong data, failed runs, bus bandwidth by size and place.

Format: github.com/NVIDIA/nccl-tests, src/common.cu and src/util.cu (2.19.6; older tables too). Our own `*_perf` write
the same. Lines of NCCL_DEBUG between the rows are passed over, but they tell the version and whether NVLS was there.

A table without its closing lines is a run without an end where the log stops as a program does that waits: behind a
whole line (nccl-tests writes line by line), or where one of ours has written half a row. Elsewhere the log was cut.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from bench.accept.evidence.log import Figure, Log, Text, mapping, number, sequence, word
from netlayer.units import format_size
from netlayer.verdict import Finding

KIND = "nccl-tests"
_PLACES = ("out of place", "in place")
_RANK = re.compile(r"^#\s+Rank\s+\d+\s+(?:Group\s+\d+\s+)?Pid\s+\d+ on\s+(\S+) device\s+\d+ \[[^\]]*\] (.*)$")
_PROGRAM = re.compile(r"(\w{1,40}?)_perf(?:_mpi)?\b")
_LIBRARY = re.compile(r"nccl-library=(\d{1,9})|NCCL version (\d{1,4})\.(\d{1,4})\.(\d{1,4})")
_GRAPH = re.compile(r"\bgraph: (\d{1,9})")
_STARTED = re.compile(r"^# nThread ")
_BOUNDS = re.compile(r"^# Out of bounds values\s*:\s*(\d{1,18})\s+(OK|FAILED)")
# Ours says which algorithms ran; NCCL_DEBUG says whether NCCL was let and whether it could.
_NVLS_USED = re.compile(r"# NVLS used: (yes|no)\b")
_NVLS_OFF = re.compile(r"NCCL_NVLS_ENABLE set by environment to 0\b")
_MULTICAST = re.compile(
    r"NVLS multicast support is (not )?available|# NVLS used: unknown \(multicast: (not )?available\)"
)
_FAILURE = re.compile(r"Test (?:NCCL|CUDA) failure|Test failure|Segmentation fault|Aborted \(core dumped\)")
_ALONE = "run netlayer accept --hosts with this node alone, then with one neighbour"
_CORRUPT = "drain the node; run each of its GPUs and NICs alone with -c 1 to find the one that corrupts"
_AGAIN = f"take it again; where it hangs, {_ALONE}"
_NO_END = f"where it hung, {_ALONE}; where it still ran, was killed, or the log was cut at a line, take it again"
_ENDED = "# Avg bus bandwidth"
# Widths and cells of our rows without their in-place side: plain, and with figures of iterations.
_HALF_ROWS = {85: 9, 121: 13}
RUN = "run"


class _Side(NamedTuple):
    """One side of a row; `wrong` is None where the data was not checked."""

    size: int
    what: str
    place: str
    bus_bw: float
    wrong: float | None
    line: int


class _Run(NamedTuple):
    """What both forms say."""

    collective: str
    hosts: list[str]
    facts: dict[str, str | int | bool]
    sides: list[_Side]
    # What nccl-tests itself counts as wrong at the end, as (count, line), where it counts any.
    out_of_bounds: tuple[str, int] | None
    # Mean bandwidth under what was asked for by NCCL_TESTS_MIN_BW, as (figure, line).
    too_slow: tuple[str, int] | None
    # Where a table stands that has no end, as (words, line).
    unended: tuple[str, int] | None = None


def is_text(content: str) -> bool:
    return "# nccl-tests version" in content or "# nThread " in content or "Collective test starting" in content


def is_json(tree: Mapping[str, Any]) -> bool:
    return "results" in tree and "nccl_version" in tree


def parse_runs(text: Text) -> tuple[Log, ...]:
    """One log for each run in the file."""
    return (parse_text(text),)


def parse_text(text: Text) -> Log:
    """Every table of the file.

    Raises:
        ConfigError: a row is broken, or the log ends within a line.
    """
    for line, words in enumerate(text.lines, 1):
        if _FAILURE.search(words):
            step = f"read the lines around it; {_ALONE}"
            return Log(
                KIND,
                (
                    Finding(
                        "FAIL",
                        _who(_hosts(text), text),
                        RUN,
                        words.strip()[:200],
                        "a run that ends",
                        step,
                        text.file,
                        line,
                    ),
                ),
            )
    return _log(text, _read_text(text))


def parse_json(text: Text, tree: Mapping[str, Any]) -> Log:
    """The tree of `-J`.

    Raises:
        ConfigError: results or figures are missing.
    """
    log = _log(text, _read_json(text, tree))
    errors = [word(error) or word(mapping(error).get("message")) for error in sequence(tree.get("errors"))]
    if not errors:
        return log
    step = f"read what it printed; {_ALONE}"
    who, line = log.findings[0].subject, text.line_of('"errors"')
    failed = Finding("FAIL", who, RUN, "; ".join(errors)[:200] or "errors", "no errors", step, text.file, line)
    return replace(log, findings=(failed, *log.findings))


def _log(text: Text, run: _Run) -> Log:
    who = _who(run.hosts, text)
    name = run.collective or "collective of unknown name"
    findings = [_data_finding(text, who, name, run)] if run.sides else []
    if run.unended:
        words, line = run.unended
        findings.insert(0, Finding("FAIL", who, RUN, words, "a run that ends", _NO_END, text.file, line))
    if run.too_slow:
        figure, line = run.too_slow
        findings.append(
            Finding(
                "FAIL",
                who,
                f"{name} mean bus bandwidth",
                figure,
                "0.9 of NCCL_TESTS_MIN_BW, as its user set it",
                _ALONE,
                text.file,
                line,
            )
        )
    ranks = run.facts.get("ranks", 0)
    figures = tuple(
        Figure(
            f"{name} {side.what}, {ranks or 'unknown'} ranks",
            f"{format_size(side.size)} {side.place}",
            who,
            side.bus_bw,
            "GB/s bus",
            side.line,
            facts={**run.facts, "bytes": side.size},
        )
        for side in run.sides
        if side.bus_bw > 0
    )
    return Log(KIND, tuple(findings), figures)


def _data_finding(text: Text, who: str, name: str, run: _Run) -> Finding:
    sides = run.sides
    bad = [side for side in sides if side.wrong]
    unchecked = sum(side.wrong is None for side in sides)
    check = f"{name} data"
    if bad:
        first = bad[0]
        figure = f"{sum(side.wrong or 0 for side in bad):g} wrong elements in {len(bad)} of {len(sides)} measurements"
        figure += f", first at {format_size(first.size)} {first.place}"
        return Finding("FAIL", who, check, figure, "#wrong = 0", _CORRUPT, text.file, first.line)
    if run.out_of_bounds:
        count, line = run.out_of_bounds
        figure = f"{count} out-of-bounds values, though no row tells of a wrong element"
        return Finding("FAIL", who, check, figure, "out of bounds values: 0 OK", _CORRUPT, text.file, line)
    if unchecked == len(sides):
        step = "run again with -c 1: a bandwidth counts only where the data was right"
        return Finding("WARN", who, check, "not checked (-c 0)", "#wrong = 0", step, text.file, sides[0].line)
    return Finding(
        "PASS",
        who,
        check,
        f"0 wrong in {len(sides) - unchecked} measurements",
        "#wrong = 0",
        "",
        text.file,
        sides[0].line,
    )


def _hosts(text: Text) -> list[str]:
    return [match[1] for words in text.lines if (match := _RANK.match(words))]


def _who(hosts: list[str], text: Text) -> str:
    names = list(dict.fromkeys(hosts))
    return text.stem if not names else names[0] if len(names) == 1 else f"{names[0]}..{names[-1]} ({len(names)} hosts)"


def _read_text(text: Text) -> _Run:
    ranks = [match for words in text.lines if (match := _RANK.match(words))]
    unended = _unended(text)
    sides, collective, too_slow, out_of_bounds = list(_rows(text, half=unended is not None)), "", None, None
    for line, words in enumerate(text.lines, 1):
        if words.startswith("# Collective test starting") and (named := _PROGRAM.search(words)):
            collective = named[1]
        bounds = _BOUNDS.match(words)
        if bounds and (bounds[2] == "FAILED" or bounds[1].strip("0")):
            out_of_bounds = out_of_bounds or (bounds[1], line)
        if words.startswith(_ENDED) and words.rstrip().endswith("FAILED"):
            too_slow = (words.partition(":")[2].strip(), line)
    if not sides and unended is None:
        raise text.damaged(len(text.lines), "has no row of figures", "give the output of a run that measured")
    hosts, names = [match[1] for match in ranks], [match[2].strip() for match in ranks]
    facts = _facts(collective, names, hosts, _version(text.content))
    graph = _GRAPH.search(text.content)
    if graph:
        facts["graph"] = int(graph[1]) > 0
    nvls = _nvls(text.content)
    if nvls is not None:
        facts["nvls"] = nvls
    return _Run(collective, hosts, facts, sides, out_of_bounds, too_slow, unended)


def _unended(text: Text) -> tuple[str, int] | None:
    """Where the first table stands that has no end, and the line; None where all have one.

    Raises:
        ConfigError: none has begun, or the log ends where no program waits.
    """
    num_started = sum(bool(_STARTED.match(words)) for words in text.lines)
    num_ended = sum(words.startswith(_ENDED) for words in text.lines)
    if num_ended >= max(1, num_started):
        return None
    last = text.lines[-1]
    if not num_started or (last and not _is_half_row(last)):
        if _is_row(last):
            list(_rows(text, half=False))  # which says what the row lacks
        rule = f"ends before '{_ENDED}', within a line: the run hung, or the log was cut"
        raise text.damaged(len(text.lines), rule, _AGAIN)
    stands: tuple[str, int] | None = None
    for line, words in enumerate(text.lines, 1):
        if _STARTED.match(words):
            if stands:
                break
            stands = ("has no end, nor a row of figures", line)
        elif words.startswith(_ENDED):
            stands = None
        elif stands and _is_row(words):
            where = f"{format_size(int(words.split()[0]))}{' out of place' * _is_half_row(words)}"
            stands = (f"has no end; its last figures are of {where}", line)
    return stands


def _is_half_row(words: str) -> bool:
    """Whether it is a row as we write it before the in-place side is measured."""
    cells = words.split()
    width = len(words) + cells.count("N/A")  # which is one narrower than a number
    return _is_row(words) and _HALF_ROWS.get(width) == len(cells)


def _is_row(words: str) -> bool:
    # A row begins with size and count; lines of NCCL_DEBUG begin with host:pid:tid, all others with '#' or words.
    return any(_is_size(cell) for cell in words.split()[:1])


def _nvls(content: str) -> bool | None:
    """Whether NVLS was there; None where the text does not say it, or says both of several runs."""
    said = {match[1] == "yes" for match in _NVLS_USED.finditer(content)}
    if not said and _NVLS_OFF.search(content):
        return False
    said = said or {match[1] is None and match[2] is None for match in _MULTICAST.finditer(content)}
    return said.pop() if len(said) == 1 else None


def _rows(text: Text, *, half: bool) -> Iterator[_Side]:
    """Both sides of every row; a half one at the end is passed over where there may be one."""
    rows = [(line, words.split()) for line, words in enumerate(text.lines, 1) if _is_row(words)]
    text.check_rows(len(rows))
    if half and rows and rows[-1][0] == len(text.lines):
        rows.pop()
    for line, cells in rows:
        per_side = 8 if len(cells) >= 21 else 4
        if len(cells) < 5 + per_side:
            rule = f"a row ends after {len(cells)} of {5 + per_side} columns: the run hung, or the log was cut"
            raise text.damaged(line, rule, _AGAIN)
        what = " ".join(cell for cell in cells[2:4] if cell != "none")
        starts = range(5, len(cells) - per_side + 1, per_side)
        # A replayed trace has the in-place side alone.
        for place, start in zip(_PLACES if len(starts) > 1 else _PLACES[1:], starts, strict=False):
            yield _side(text, int(cells[0]), what, place, cells[start : start + 4], line)


def _is_size(cell: str) -> bool:
    return cell.isascii() and cell.isdecimal() and len(cell) < 19


def _side(text: Text, size: int, what: str, place: str, cells: list[Any], line: int) -> _Side:
    bus_bw, wrong = number(cells[2]), number(cells[3])
    if number(cells[0]) is None or bus_bw is None or (wrong is None and cells[3] not in ("N/A", None)):
        raise text.damaged(
            line,
            f"the {place} figures of {format_size(size)} are {word(' '.join(map(str, cells)))}"
            ": time, algbw, busbw and #wrong are expected",
        )
    return _Side(size, what, place, bus_bw, wrong, line)


def _read_json(text: Text, tree: Mapping[str, Any]) -> _Run:
    config = mapping(tree.get("config"))
    devices = [mapping(device) for device in sequence(config.get("devices"))]
    arguments = [word(argument) for argument in sequence(tree.get("args"))]
    named = _PROGRAM.search(arguments[0]) if arguments else None
    collective = named[1] if named else ""
    version = tree.get("nccl_version")
    names, hosts = ([word(device.get(key)) for device in devices] for key in ("device_info", "hostname"))
    facts = _facts(collective, names, hosts, version if isinstance(version, int) else 0)
    if isinstance(config.get("graph"), int):
        facts["graph"] = config["graph"] > 0
    nvls = _json_nvls(tree)
    if nvls is not None:
        facts["nvls"] = nvls
    if "end_time" not in tree and "average_bus_bandwidth" not in tree:
        raise text.damaged(len(text.lines), "has no 'end_time': the run did not end", _AGAIN)
    text.check_rows(len(sequence(tree.get("results"))))
    sides = [side for result in sequence(tree.get("results")) for side in _json_sides(text, mapping(result))]
    if not sides:
        raise text.damaged(text.line_of('"results"'), "'results' must hold at least one measurement")
    bounds = mapping(tree.get("out_of_bounds"))
    out_of_bounds = bounds.get("okay") in ("false", False) or (number(bounds.get("count")) or 0) > 0
    average = mapping(tree.get("average_bus_bandwidth"))
    slow = (f"{word(average.get('bandwidth'))} GB/s", text.line_of('"average_bus_bandwidth"'))
    return _Run(
        collective,
        [host for host in hosts if host],
        facts,
        sides,
        (word(bounds.get("count")) or "unknown", text.line_of('"out_of_bounds"')) if out_of_bounds else None,
        slow if average.get("okay") in ("false", False) else None,
    )


def _json_nvls(tree: Mapping[str, Any]) -> bool | None:
    """What our own tree tells of the algorithms; else what the variable and NCCL's look at multicast leave."""
    ours = mapping(mapping(tree.get("netlayer")).get("nvls"))
    if isinstance(ours.get("used"), bool):
        return bool(ours["used"])
    if "NCCL_NVLS_ENABLE=0" in sequence(tree.get("env")):
        return False
    return {"available": True, "not available": False}.get(word(ours.get("multicast")))


def _json_sides(text: Text, result: Mapping[str, Any]) -> Iterator[_Side]:
    size = number(result.get("size"))
    if size is None:
        raise text.damaged(text.line_of('"results"'), "every result needs its 'size' in bytes")
    what = " ".join(cell for cell in (word(result.get("type")), word(result.get("redop"))) if cell not in ("", "none"))
    line = text.line_of(f'"size": {int(size)}') or text.line_of(f'"size":{int(size)}')
    for place, key in zip(_PLACES, ("out_of_place", "in_place"), strict=True):
        if result.get(key) is not None:
            side = mapping(result[key])
            time = side.get("time", side.get("cpu_time"))
            figures = [time, side.get("alg_bw"), side.get("bus_bw"), side.get("nwrong")]
            yield _side(text, int(size), what, place, figures, line)


def _facts(collective: str, names: list[str], hosts: list[str], version: int) -> dict[str, str | int | bool]:
    """What expectations are keyed by, as far as the log says it of every rank; a mixture of devices is no device."""
    facts: dict[str, str | int | bool] = {"quantity": "bus_bw_gbs"}
    if collective:
        facts["collective"] = collective
    if names:
        facts["ranks"] = len(names)
    if hosts and all(hosts):
        facts["hosts"] = len(set(hosts))
    if len(set(names)) == 1:
        facts["device"] = names[0]
    if version:
        facts["nccl"] = version
    return facts


def _version(content: str) -> int:
    """NCCL's own number of its version: 22809 for 2.28.9."""
    match = _LIBRARY.search(content)
    if match is None:
        return 0
    return int(match[1]) if match[1] else int(match[2]) * 10000 + int(match[3]) * 100 + int(match[4])
