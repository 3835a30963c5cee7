"""Readers of NCCL's profiler plug-ins: Inspector's records (v4) and metrics (v5), and the example plug-in's traces.

Inspector writes an object a line for each collective or point-to-point transfer of a rank of a communicator; the time
is the kernel's, which waits until the last rank has come, so that all ranks of a collective share one time. Only with
`NCCL_INSPECTOR_DUMP_VERBOSE=1` it says when one began (microseconds since 1970); else the segment is laid before the
moment of writing, and its attributes say so. Ranks are those of the communicator: a process is known as the rank that
it has in the largest communicator of the file.

From v4.3 of its output on, a line `dump_stats` carries the header of the records that follow it, and their number; it
also says what was overwritten in Inspector's memory before it was written, of which a mark `dropped` is made. A record
without that line before it, for somebody has cut or sorted the file, belongs to nobody known and is skipped. Proxy
traces are not read.

With `NCCL_INSPECTOR_PROM_DUMP=1` (v5) Inspector keeps a file a GPU in Prometheus' text format and writes it anew at
each interval: means of bandwidth and time by communicator, operation and range of sizes. These are counters at the time
of the file, of a host and a GPU, for ranks that they do not name.

The example plug-in (profiler API v4 to v6) writes a list of Chrome's asynchronous events, a file a communicator and
rank; times count from the plug-in's start, so that times of two ranks do not compare, and 0 is one that never came. Of
NCCL 2.28 it puts no quotes around pointers and data types.

Source: github.com/NVIDIA/nccl, plugins/profiler/inspector and plugins/profiler/example (2.30, README of v4.3).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from netlayer.observe.events import Counter, Event, Mark, Origin, Segment
from netlayer.observe.evidence import family
from netlayer.observe.readers.json_stream import EventStream, open_text

INSPECTOR, PROFILER = "nccl_inspector", "nccl_profiler"
_LONGEST_LINE = 4 << 20
_MOST_OPEN = 100_000
_WORD = re.compile(r"(?<=[a-z0-9])(?=[A-Z])")
_OPERATIONS = ("COLL", "P2P")
_STATS, _PROXY = "dump_stats", "proxy_trace"
_FOLLOWING = ("coll_records", "p2p_records", "proxy_records")
_BARE = re.compile(r'(": ?)(0x[0-9a-fA-F]+|\(nil\)|nccl\w+)(?=[,}])')
_METRIC = re.compile(r"^(nccl_\w+)\{(.*)\} (\S+)$")
_LABEL = re.compile(r'(\w+)="(.*?)"(?=,\w+="|$)')  # NCCL escapes no quote
_UNITS = {"_gbs": "GB/s", "_microseconds": "us"}
_OVERWRITTEN = ("coll_dropped_since_last_dump", "p2p_dropped_since_last_dump")
_DTYPE_BYTES = {
    "ncclInt8": 1, "ncclUint8": 1, "ncclInt32": 4, "ncclUint32": 4, "ncclInt64": 8, "ncclUint64": 8, "ncclFloat16": 2,
    "ncclFloat32": 4, "ncclFloat64": 8, "ncclBfloat16": 2, "ncclFloat8e4m3": 1, "ncclFloat8e5m2": 1,
}  # fmt: skip


def is_inspector(head: str) -> bool:
    """Whether the beginning of a file is that of Inspector's records."""
    return any(f'"{key}"' in head for key in ("coll_perf", "p2p_perf", _STATS))


def is_metrics(head: str) -> bool:
    """Whether the beginning of a file is that of Inspector's metrics."""
    return re.search(r'^nccl_\w+\{version="v\d', head, re.MULTILINE) is not None


def read_metrics(path: Path, notes: list[str]) -> Iterator[Event]:
    """One counter a line; lines that are none are counted in `notes`.

    Raises:
        ValueError: no line is a metric.
    """
    num_good = num_bad = 0
    written_ns = path.stat().st_mtime_ns
    with open_text(path) as file:
        while line := file.readline(_LONGEST_LINE):
            text = line.decode("utf-8", "replace").strip()
            if not text or text.startswith("#"):
                continue
            metric = _METRIC.match(text)
            labels = dict(_LABEL.findall(metric[2])) if metric else {}
            value = _number(metric[3]) if metric else None
            if metric is None or value is None or "node" not in labels:
                num_bad += 1
                continue
            num_good += 1
            unit = next((unit for end, unit in _UNITS.items() if metric[1].endswith(end)), None)
            origin = Origin(source=INSPECTOR, host=labels.pop("node")[:200])
            facts = {key[:40]: each[:200] for key, each in labels.items()}
            yield Counter(origin, metric[1][:80], written_ns, written_ns, value, unit, attributes=facts)
    if not num_good:
        raise ValueError("holds no metric of NCCL's Inspector")
    if num_bad:
        notes.append(f"{path}: {num_bad} lines are no metric of NCCL's Inspector: skipped")


def is_profiler(head: str) -> bool:
    """Whether the beginning of a file is that of the example plug-in's trace."""
    begins = head.lstrip().startswith("[")
    return begins and any(
        f'"cat": "{kind}"' in head for kind in ("GROUP", "COLL", "P2P", "PROXY", "COLL_API", "GROUP_API")
    )


def read_inspector(path: Path, notes: list[str]) -> Iterator[Event]:
    """One segment a record; lines that are none are counted in `notes`.

    Raises:
        ValueError: no line is a record.
    """
    world = _world_ranks(path)
    num_good = num_bad = 0
    for tree in _records(path):
        if tree is not None and _PROXY in tree:
            continue
        if tree is not None and _STATS in tree:
            num_good += 1
            if (mark := _overwritten(tree, world)) is not None:
                yield mark
            continue
        event = _inspector_event(tree, world) if tree is not None else None
        if event is None:
            num_bad += 1
            continue
        num_good += 1
        yield event
    if not num_good:
        raise ValueError("holds no whole record of NCCL's Inspector")
    if num_bad:
        notes.append(f"{path}: {num_bad} lines are no whole record: skipped")


def _lines(path: Path) -> Iterator[dict[str, Any] | None]:
    """The object of each line, None for one that holds none; blank lines are omitted."""
    with open_text(path) as file:
        while line := file.readline(_LONGEST_LINE):
            if not line.strip():
                continue
            try:
                tree = json.loads(line)
            except (ValueError, RecursionError):
                tree = None
            yield tree if isinstance(tree, dict) else None


def _records(path: Path) -> Iterator[dict[str, Any] | None]:
    """The object of each line, with the header of the line before it that has it for several: `dump_stats`."""
    shared, num_left = dict[str, Any](), 0
    for tree in _lines(path):
        if tree is not None and _STATS in tree:
            shared = {key: tree[key] for key in ("header", "metadata") if key in tree}
            stats = _mapping(tree[_STATS])
            num_left = sum(_whole(stats.get(key)) or 0 for key in _FOLLOWING)
        elif tree is None or "header" not in tree:
            if num_left and tree is not None:
                tree |= shared
            num_left = max(num_left - 1, 0)  # a line that is damaged was one of them, too
        yield tree


def _overwritten(tree: Mapping[str, Any], world: Mapping[tuple[str, int], tuple[int, int]]) -> Mark | None:
    """Mark of what a communicator's records have lost since the dump before; None: nothing, or nobody says where."""
    header, metadata, stats = (_mapping(tree.get(key)) for key in ("header", "metadata", _STATS))
    number = sum(_whole(stats.get(key)) or 0 for key in _OVERWRITTEN)
    rank, written_us = _whole(header.get("rank")), _whole(metadata.get("dump_timestamp_us"))
    if not number or rank is None or written_us is None:
        return None
    host = _host(metadata)
    _, rank = world.get((host, _whole(metadata.get("pid")) or 0), (0, rank))
    facts = {"where": "Inspector's memory", "communicator": str(header.get("id"))[:80]}
    origin = Origin(source=INSPECTOR, host=host or None, rank=rank)
    return Mark(origin, "dropped", written_us * 1000, value=float(number), attributes=facts)


def _parts(tree: Mapping[str, Any]) -> tuple[Mapping[str, Any], Mapping[str, Any], str, Mapping[str, Any]]:
    """Header, metadata, "coll" or "p2p", and the record; some collectors put all fields at the top."""
    kind = "coll" if "coll_perf" in tree else "p2p"
    header, metadata, perf = (tree.get(key) for key in ("header", "metadata", f"{kind}_perf"))
    return (
        header if isinstance(header, dict) else tree,
        metadata if isinstance(metadata, dict) else tree,
        kind,
        perf if isinstance(perf, dict) else {},
    )


def _world_ranks(path: Path) -> dict[tuple[str, int], tuple[int, int]]:
    """Size of the largest communicator of each process, and its rank in it, by host and process number."""
    world: dict[tuple[str, int], tuple[int, int]] = {}
    for tree in _lines(path):
        if tree is None:
            continue
        header, metadata, _, _ = _parts(tree)
        size, rank = _whole(header.get("n_ranks")), _whole(header.get("rank"))
        key = (_host(metadata), _whole(metadata.get("pid")) or 0)
        if size is not None and rank is not None and size > world.get(key, (0, 0))[0]:
            world[key] = (size, rank)
    return world


def _host(metadata: Mapping[str, Any]) -> str:
    """Name of the host; empty where the record does not say."""
    name = metadata.get("hostname")
    return name[:200] if isinstance(name, str) else ""


def _inspector_event(tree: Mapping[str, Any], world: Mapping[tuple[str, int], tuple[int, int]]) -> Segment | None:
    """Segment of one record; None if it lacks a rank, number or time."""
    header, metadata, kind, perf = _parts(tree)
    rank, num_ranks, seq, num_bytes, time_us = (
        _whole(value)
        for value in (
            header.get("rank"),
            header.get("n_ranks"),
            perf.get(f"{kind}_sn"),
            perf.get(f"{kind}_msg_size_bytes"),
            perf.get(f"{kind}_exec_time_us"),
        )
    )
    written_us = _whole(metadata.get("dump_timestamp_us"))
    if rank is None or seq is None or time_us is None or written_us is None or not isinstance(perf.get(kind), str):
        return None
    host = _host(metadata)
    size, world_rank = world.get((host, _whole(metadata.get("pid")) or 0), (num_ranks or 0, rank))
    begin_us = _whole(_mapping(perf.get("event_trace_ts")).get(f"{kind}_start_ts"))
    start_us = begin_us if begin_us is not None else written_us - time_us
    peer = _whole(perf.get("p2p_peer"))
    attributes = {
        "communicator": str(header.get("id"))[:80],
        "communicator_rank": rank,
        "ranks": num_ranks,
        "nodes": _whole(header.get("nnodes")),
        "timing_source": str(perf.get(f"{kind}_timing_source", "kernel_gpu"))[:40],
        "bus_bw_gbs": _real(perf.get(f"{kind}_busbw_gbs")),
        "begin": "recorded" if begin_us is not None else "before the moment of writing",
    }
    return Segment(
        Origin(source=INSPECTOR, host=host or None, rank=world_rank if size else rank),
        "collective",
        family(_WORD.sub("_", perf[kind]))[:80],
        start_us * 1000,
        (start_us + time_us) * 1000,
        timing="reported",
        group=str(header.get("comm_name") or header.get("id"))[:200],
        seq=seq,
        bytes=num_bytes,
        peer=peer if kind == "p2p" and peer is not None and num_ranks == size else None,
        attributes={key: value for key, value in attributes.items() if value is not None},
    )


def read_profiler(path: Path, notes: list[str]) -> Iterator[Event]:
    """One segment for each collective, send or receive that began and ended in the trace.

    Raises:
        ValueError: the file is damaged before its first event.
    """
    stream = EventStream(path, lambda lines: _BARE.sub(r'\1"\2"', lines))
    begun: dict[tuple[str, Any, Any], Mapping[str, Any]] = {}
    num_events = num_open = 0
    for raw in stream:
        category = raw.get("cat")
        if category not in _OPERATIONS:
            continue
        key = (str(category), raw.get("id"), raw.get("pid"))
        if raw.get("ph") == "b":
            if len(begun) >= _MOST_OPEN:
                raise ValueError(f"has more than {_MOST_OPEN:,} operations that never end")
            begun[key] = raw
        elif raw.get("ph") == "e" and key in begun:
            begun_raw = begun.pop(key)
            event = _profiler_event(begun_raw, raw)
            num_events += event is not None
            num_open += not (_real(begun_raw.get("ts")) and _real(raw.get("ts")))
            if event is not None:
                yield event
    if stream.damage and not num_events:
        raise ValueError(stream.damage)
    if begun or num_open:
        notes.append(f"{path}: {len(begun) + num_open} operations never ended")
    elif stream.damage:
        notes.append(f"{path}: {stream.damage}: {num_events:,} operations before are read")


def _profiler_event(begin: Mapping[str, Any], end: Mapping[str, Any]) -> Segment | None:
    args = _mapping(begin.get("args"))
    rank, start_us, end_us = _whole(args.get("Rank")), _real(begin.get("ts")), _real(end.get("ts"))
    if rank is None or not start_us or not end_us or not isinstance(begin.get("name"), str):
        return None
    count, size = _whole(args.get("Count")), _DTYPE_BYTES.get(str(args.get("Datatype")))
    return Segment(
        Origin(source=PROFILER, rank=rank),
        "collective",
        family(_WORD.sub("_", str(begin["name"])))[:80],
        round(start_us * 1000),
        max(round(start_us * 1000), round(end_us * 1000)),
        timing="reported",
        group=f"{_whole(args.get('CommHash')) or 0:#x}",
        seq=_whole(args.get("SeqNum")),
        bytes=count * size if count is not None and size else None,
        peer=_whole(args.get("Peer")),
        attributes={key: str(args[key])[:40] for key in ("Algorithm", "Protocol", "nChannels") if key in args} or None,
    )


def _number(text: str) -> float | None:
    """Return a finite number; None for anything else, as a metric without a reading has."""
    try:
        return _real(float(text))
    except ValueError:
        return None


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}


def _whole(value: Any) -> int | None:
    """A whole number that fits the schema; None for anything else. A hash of 64 bits keeps its value."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and -1 < value < 1 << 64 and value == value
    return int(value) if good else None


def _real(value: Any) -> float | None:
    good = isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e15
    return float(value) if good else None
