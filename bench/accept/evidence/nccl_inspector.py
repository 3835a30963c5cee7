"""Parser of NCCL Inspector records (JSON, one a line): every collective of every rank, from NCCL's profiler plug-in.

Format: github.com/NVIDIA/nccl, plugins/profiler/inspector. The kernel of a collective waits until the last rank has
arrived, so that all its ranks share one time: a rank with slow records is not a slow rank. The rank that the others
wait for shows in two ways only: its kernel starts last (event traces, DUMP_VERBOSE=1), or its own time is far below
that of all others. Both need the records of all ranks of a communicator.
"""

from __future__ import annotations

import json
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from bench.accept.evidence.log import Figure, Log, Text, mapping, number, sequence, word
from netlayer.units import format_size
from netlayer.verdict import MIN_PEERS, NO_EXPECTATION, Finding

KIND = "NCCL Inspector"
_MOST_RECORDS = 2_000_000
# With fewer common collectives, a rank may be last by chance.
_MIN_COLLECTIVES = 10
# The others wait for a rank if its own time is below this share of their median,
_SHORT_SHARE = 0.5
# ... or if it starts later than their median by this share of the collective's time.
_LATE_SHARE = 0.2
_STEP_LATE = "look at {}: what it did before the collective (data loading, a slow GPU, a clock that is throttled)"
_STEP_SHARED = (
    "one time is shared by all ranks of a collective, so it cannot show a slow rank: give the files of all ranks in "
    "one (cat), recorded with NCCL_INSPECTOR_DUMP_VERBOSE=1"
)


class _Record(NamedTuple):
    """One collective or point-to-point transfer of one rank."""

    line: int
    comm: str
    rank: int
    num_ranks: int
    num_nodes: int
    host: str
    operation: str
    serial: int
    num_bytes: int
    time_us: float
    bus_bw_gbs: float
    is_gpu_timed: bool
    start_us: float


def is_json(tree: Mapping[str, Any]) -> bool:
    return "coll_perf" in tree or "p2p_perf" in tree


def parse_json(text: Text, _first: Mapping[str, Any]) -> Log:
    """Return the medians of each rank's records, and a finding on the rank that the others wait for, if any.

    Raises:
        ConfigError: no record is complete.
    """
    records, num_broken = [], 0
    for line, tree in _trees(text.content):
        record = _record(line, tree)
        num_broken += record is None
        if record:
            records.append(record)
        if len(records) > _MOST_RECORDS:
            raise text.damaged(line, f"has more than {_MOST_RECORDS:,} records", "give a part of it")
    if not records:
        raise text.damaged(1, "must hold records with 'coll_perf' of rank, size, time and bandwidth, one a line")
    hosts = {record.host for record in records if record.host}
    findings = [*_find_last(text, records), *_summary(text, records, num_broken)]
    host = next(iter(hosts)) if len(hosts) == 1 else ""
    return Log(KIND, tuple(findings), tuple(_figures(records)), host=host)


def _trees(content: str) -> Iterator[tuple[int, Mapping[str, Any]]]:
    """Yield every JSON object of the file, on one line or several; an empty one for a truncated object."""
    decoder, at, line = json.JSONDecoder(), 0, 1
    while (begin := content.find("{", at)) >= 0:
        line += content.count("\n", at, begin)
        try:
            tree, end = decoder.raw_decode(content, begin)
        except (ValueError, RecursionError):
            # The truncated record of a killed process, or a line of another program.
            tree, end = {}, content.find("\n", begin)
        yield line, mapping(tree)
        if end < 0:
            return
        line += content.count("\n", begin, end)
        at = end


def _record(line: int, tree: Mapping[str, Any]) -> _Record | None:
    """Parse one line of NCCL's inspector; None if a number is missing or out of range."""
    # Some collectors put the fields of header and metadata at the top level.
    header, metadata = mapping(tree.get("header")) or tree, mapping(tree.get("metadata")) or tree
    name = "coll" if "coll_perf" in tree else "p2p"
    perf = mapping(tree.get(f"{name}_perf"))
    fields = [header.get("rank"), header.get("n_ranks"), perf.get(f"{name}_sn"), perf.get(f"{name}_msg_size_bytes"),
              perf.get(f"{name}_exec_time_us"), perf.get(f"{name}_busbw_gbs")]  # fmt: skip
    values = [number(field) for field in fields]
    if any(value is None or value >= 1 << 60 for value in values):
        return None
    rank, num_ranks, serial, num_bytes, time_us, bus_bw_gbs = (value or 0.0 for value in values)
    starts = [number(mapping(event).get("kernel_start_ts")) for event in _kernel_events(perf)]
    known = [start for start in starts if start]
    return _Record(
        line,
        word(header.get("id"), 40),
        int(rank),
        int(num_ranks),
        int(number(header.get("nnodes")) or 0),
        word(metadata.get("hostname"), 80),
        word(perf.get(name), 40) or "operation",
        int(serial),
        int(num_bytes),
        time_us,
        bus_bw_gbs,
        word(perf.get(f"{name}_timing_source")) in ("kernel_gpu", ""),
        min(known, default=0.0),
    )


def _kernel_events(perf: Mapping[str, Any]) -> list[Any]:
    return sequence(mapping(perf.get("event_trace_ts")).get("kernel_events"))


def _rank_name(record: _Record) -> str:
    return f"{record.host} rank {record.rank}" if record.host else f"rank {record.rank}"


def _figures(records: Sequence[_Record]) -> Iterator[Figure]:
    """Yield one figure for each rank, operation and size, each as its own series: ranks of a communicator are no peers.

    All of them share the time of the collective.
    """
    groups: dict[tuple[str, str, int, int], list[_Record]] = defaultdict(list)
    for record in records:
        if record.bus_bw_gbs > 0:
            groups[record.comm, record.operation, record.num_bytes, record.rank].append(record)
    for (comm, operation, num_bytes, rank), group in groups.items():
        first = group[0]
        yield Figure(
            f"{operation} in the application (communicator {comm or '?'}, rank {rank} of {first.num_ranks})",
            format_size(num_bytes),
            _rank_name(first),
            statistics.median(record.bus_bw_gbs for record in group),
            "GB/s bus",
            first.line,
            facts={
                "quantity": "application_bus_bw_gbs",
                "collective": operation,
                "bytes": num_bytes,
                "ranks": first.num_ranks,
                "hosts": first.num_nodes,
            },
        )


def _find_last(text: Text, records: Sequence[_Record]) -> Iterator[Finding]:
    """Find the rank that all others of its communicator wait for, if it is a single one."""
    shared: dict[tuple[str, str, int, int], dict[int, _Record]] = defaultdict(dict)
    for record in records:
        shared[record.comm, record.operation, record.serial, record.num_bytes].setdefault(record.rank, record)
    own_time_shares: dict[tuple[str, int], list[float]] = defaultdict(list)
    start_delays: dict[tuple[str, int], list[float]] = defaultdict(list)
    example: dict[tuple[str, int], _Record] = {}
    for (comm, _, _, _), by_rank in shared.items():
        records_of_collective = list(by_rank.values())
        if len(records_of_collective) < max(MIN_PEERS, records_of_collective[0].num_ranks):
            continue  # the culprit may be a rank that is missing here
        times = statistics.median(record.time_us for record in records_of_collective)
        starts = statistics.median(record.start_us for record in records_of_collective)
        # Clocks of different nodes differ by more than the duration of a kernel.
        same_clock = len({record.host for record in records_of_collective}) == 1 and all(
            record.start_us for record in records_of_collective
        )
        for record in records_of_collective:
            example.setdefault((comm, record.rank), record)
            if times > 0 and all(one.is_gpu_timed for one in records_of_collective):
                own_time_shares[comm, record.rank].append(record.time_us / times)
            if same_clock and times > 0:
                start_delays[comm, record.rank].append((record.start_us - starts) / times)
    yield from _last_rank_findings(text, example, "own time", own_time_shares, lambda share: share < _SHORT_SHARE)
    yield from _last_rank_findings(text, example, "start", start_delays, lambda share: share > _LATE_SHARE)


def _last_rank_findings(
    text: Text,
    example: Mapping[tuple[str, int], _Record],
    sign: str,
    shares: Mapping[tuple[str, int], Sequence[float]],
    is_bad: Callable[[float], bool],
) -> Iterator[Finding]:
    """Yield a finding for each communicator with exactly one bad rank; with several, the job itself is uneven."""
    medians = {who: statistics.median(values) for who, values in shares.items() if len(values) >= _MIN_COLLECTIVES}
    for comm in sorted({who[0] for who in medians}):
        bad = [who for who in medians if who[0] == comm and is_bad(medians[who])]
        if len(bad) != 1:
            continue
        record, share = example[bad[0]], medians[bad[0]]
        figure = (
            f"{share:.2f} of the median rank's time" if sign == "own time" else f"{share:.2f} of it after the others"
        )
        figure += f", median of {len(shares[bad[0]])} collectives: the others wait for it"
        step = _STEP_LATE.format(_rank_name(record))
        check = f"last to come ({sign})"
        yield Finding("WARN", _rank_name(record), check, figure, "like the others", step, text.file, record.line)


def _summary(text: Text, records: Sequence[_Record], num_broken: int) -> Iterator[Finding]:
    ranks = {(record.comm, record.rank) for record in records}
    operations = Counter(record.operation for record in records)
    commonest = ", ".join(f"{count} {name}" for name, count in operations.most_common(3))
    figure = f"{len(records)} records of {len(ranks)} ranks: {commonest}"
    if num_broken:
        figure += f"; {num_broken} lines without a whole record"
    yield Finding(None, text.stem, "collectives in the application", figure, NO_EXPECTATION, _STEP_SHARED, text.file, 1)
