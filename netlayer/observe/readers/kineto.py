"""Reader of PyTorch profiler (Kineto) traces: one JSON file a rank, several GB, plain or gzip.

Read are steps (`ProfilerStep#N`), collectives (kernels of NCCL and RCCL with their arguments; of gloo the CPU
operator), computation kernels (as stretches of one stream, not each by itself), the optimiser, the data loader, and
stretches that the program named forward, backward or gc; of a program without a GPU also the forward pass of DDP, which
names itself (with a GPU that is the time of its launches). Not read: CPU operators, flows, memory, Python frames.

Times are microseconds, after `baseTimeNanoseconds` where the file has it (torch 2.4 on); older files count from the
host's start, so that times of two hosts do not compare. Source: torch's docs of torch.profiler, Kineto's output_json.
"""

from __future__ import annotations

import bisect
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from netlayer.observe.events import Event, Origin, Segment, format_ranks
from netlayer.observe.evidence import family
from netlayer.observe.readers.json_stream import EventStream, read_parts

SOURCE = "kineto"
_RANK_IN_TEXT = re.compile(rb'"distributedInfo"\s*:\s*\{[^{}\[\]]{0,400}?"rank"\s*:\s*(\d{1,7})')
_BASE_IN_TEXT = re.compile(rb'"baseTimeNanoseconds"\s*:\s*(\d{1,19})')
_RANK_IN_NAME = re.compile(r"rank[-_ ]?(\d{1,7})(?!\d)")
_STEP = re.compile(r"ProfilerStep#(\d{1,15})$")
_NCCL = re.compile(r"(?:nccl|rccl)\w*?(AllReduce|AllGather|ReduceScatter|Broadcast|Reduce|SendRecv|AllToAll|Send|Recv)")
_GLOO = re.compile(r"gloo:(\w{1,40})$")
_NAMES = {
    "AllReduce": "all_reduce",
    "AllGather": "all_gather",
    "ReduceScatter": "reduce_scatter",
    "SendRecv": "send_recv",
    "AllToAll": "all_to_all",
}
_DTYPE_BYTES = {"Float": 4, "Int": 4, "BFloat16": 2, "Half": 2, "Double": 8, "Long": 8, "Byte": 1, "Char": 1, "Bool": 1}
# Kernels of a stream closer than this count as one stretch of computation.
_GAP_NS = 20_000
_ANNOTATIONS = {"forward": "forward", "backward": "backward", "gc": "gc"}
_DDP_FORWARD = "DistributedDataParallel.forward"
_OVERLAP = 1 << 10
_CATEGORIES = frozenset({"kernel", "user_annotation", "cpu_op"})


@dataclass
class _Stretch:
    """Kernels of one stream that follow each other closely."""

    start_ns: int
    end_ns: int
    num_kernels: int = 1


def is_trace(head: str) -> bool:
    """Whether the beginning of a file is that of a Kineto trace."""
    return '"traceEvents"' in head or ('"schemaVersion"' in head and '"deviceProperties"' in head)


def read(path: Path, notes: list[str]) -> Iterator[Event]:
    """The segments of one rank's trace, roughly in the order of the file.

    Raises:
        ValueError: the file is damaged before its first event.
    """
    reader = _Trace(path)
    num_events = 0
    for event in reader:
        num_events += 1
        yield event
    if reader.damage:
        if not num_events:
            raise ValueError(reader.damage)
        notes.append(f"{path}: {reader.damage}: {num_events:,} events before are read")
    if reader.origin.rank is None:
        notes.append(f"{path}: names no rank, neither inside (distributedInfo) nor in its file name")


class _Trace:
    def __init__(self, path: Path) -> None:
        rank, self._base_ns = _metadata(path)
        if rank is None and (match := _RANK_IN_NAME.search(path.name)):
            rank = int(match[1])
        self.origin = Origin(source=SOURCE, rank=rank)
        self._stream = EventStream(path)
        self._step_starts: list[int] = []
        self._steps: list[tuple[int, int]] = []  # end and number, beside _step_starts
        self._compute: dict[str, _Stretch] = {}

    @property
    def damage(self) -> str:
        return self._stream.damage

    def __iter__(self) -> Iterator[Event]:
        for raw in self._stream:
            if raw.get("ph") == "X" and str(raw.get("cat")).lower() in _CATEGORIES:
                yield from self._complete(raw)
        for lane, stretch in self._compute.items():
            yield self._stretch(lane, stretch)

    def _complete(self, raw: Mapping[str, Any]) -> Iterator[Event]:
        """Yield what a complete event (with a duration) says in terms of the schema, nothing for most."""
        name, category, begin, length = raw.get("name"), raw.get("cat"), _number(raw.get("ts")), _number(raw.get("dur"))
        if not isinstance(name, str) or not isinstance(category, str) or begin is None or length is None:
            return
        start_ns = self._base_ns + round(begin * 1000)
        end_ns = start_ns + max(0, round(length * 1000))
        if end_ns >= 1 << 63 or start_ns < 0:
            return
        category = category.lower()
        if category == "kernel":
            yield from self._kernel(raw, name, start_ns, end_ns)
        elif category in ("user_annotation", "cpu_op"):
            yield from self._annotation(name, category, start_ns, end_ns)

    def _kernel(self, raw: Mapping[str, Any], name: str, start_ns: int, end_ns: int) -> Iterator[Event]:
        args = raw.get("args") if isinstance(raw.get("args"), dict) else {}
        lane = f"stream {args.get('stream', raw.get('tid'))}"[:80]  # type: ignore[union-attr]
        match = _NCCL.search(name)
        if match:
            yield self._collective(_NAMES.get(match[1], match[1].lower()), args or {}, lane, start_ns, end_ns)
            return
        if name.lower().startswith(("nccl", "rccl")):
            return  # its own helpers
        stretch = self._compute.get(lane)
        if stretch and 0 <= start_ns - stretch.end_ns <= _GAP_NS:
            stretch.end_ns = max(stretch.end_ns, end_ns)
            stretch.num_kernels += 1
            return
        if stretch:
            yield self._stretch(lane, stretch)
        self._compute[lane] = _Stretch(start_ns, end_ns)

    def _annotation(self, name: str, category: str, start_ns: int, end_ns: int) -> Iterator[Event]:
        if match := _STEP.match(name):
            step = int(match[1])
            at = bisect.bisect(self._step_starts, start_ns)
            self._step_starts.insert(at, start_ns)
            self._steps.insert(at, (end_ns, step))
            yield Segment(self.origin, "step", "step", start_ns, end_ns, step=step, timing="reported", lane="host")
        elif match := _GLOO.match(name):
            yield self._collective(family(match[1]), {}, "gloo", start_ns, end_ns)
        elif category == "user_annotation":
            segment = _ANNOTATIONS.get(name.strip("# ").lower())
            if name.startswith("Optimizer.step#"):
                segment = "optimizer"
            elif name.startswith("enumerate(DataLoader)#"):
                segment = "data"
            elif name == _DDP_FORWARD and self._stream.header.get("deviceProperties") == []:
                segment = "forward"
            if segment:
                yield self._segment(segment, segment, start_ns, end_ns, lane="host")

    def _collective(self, kind: str, args: Mapping[str, Any], lane: str, start_ns: int, end_ns: int) -> Segment:
        if isinstance(args.get("Collective name"), str):
            kind = family(args["Collective name"])[:80]
        elements = max((_number(args.get(key)) or 0 for key in ("In msg nelems", "Out msg nelems")), default=0)
        num_bytes = round(elements * _DTYPE_BYTES.get(str(args.get("dtype")), 0)) or None
        group = args.get("Process Group Description") or args.get("Process Group Name")
        seq = args.get("Seq") if isinstance(args.get("Seq"), int) else None
        peers = (args.get("Dst Rank"), args.get("Src Rank"))
        peer = next((one for one in peers if isinstance(one, int) and 0 <= one < 1 << 20), None)
        segment = self._segment("collective", kind, start_ns, end_ns, lane=lane)
        segment.group = group[:200] if isinstance(group, str) else None
        segment.group_ranks = _group_ranks(args.get("Process Group Ranks"))
        segment.seq = seq
        segment.bytes = num_bytes
        segment.peer = peer if kind in ("send", "recv") else None
        return segment

    def _stretch(self, lane: str, stretch: _Stretch) -> Segment:
        segment = self._segment("other", "compute", stretch.start_ns, stretch.end_ns, lane=lane)
        segment.attributes = {"kernels": stretch.num_kernels}
        return segment

    def _segment(self, segment: str, name: str, start_ns: int, end_ns: int, lane: str) -> Segment:
        return Segment(
            self.origin, segment, name, start_ns, end_ns, step=self._step_of(start_ns), timing="reported", lane=lane
        )

    def _step_of(self, at_ns: int) -> int | None:
        """Number of the step whose time on the host contains a moment; None outside any that was read so far."""
        at = bisect.bisect(self._step_starts, at_ns) - 1
        return self._steps[at][1] if at >= 0 and at_ns < self._steps[at][0] else None


def _metadata(path: Path) -> tuple[int | None, int]:
    """Rank and base of the times, which may stand before or behind the events: looked for in the whole file.

    Raises:
        ValueError: the file cannot be read.
    """
    rank, base_ns, tail = None, None, b""
    try:
        for part in read_parts(path):
            text = tail + part
            rank = rank or _RANK_IN_TEXT.search(text)
            base_ns = base_ns or _BASE_IN_TEXT.search(text)
            if rank and base_ns:
                break
            tail = text[-_OVERLAP:]
    except ValueError:
        pass  # cut off: what is there is read, and the damage is said then
    return int(rank[1]) if rank else None, int(base_ns[1]) if base_ns else 0


def _group_ranks(text: Any) -> str | None:
    """`group_ranks` of a list as Kineto writes it: "[0, 1, 2]"; None if it is none, or cut short ("...")."""
    if not isinstance(text, str) or "..." in text or len(text) > 1 << 20:
        return None
    ranks = re.findall(r"\d{1,7}", text)
    return format_ranks(list(map(int, ranks))) if ranks else None


def _number(value: Any) -> float | None:
    """A number, also as a text (old Kineto); None for anything else."""
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return None
    good = isinstance(value, int | float) and not isinstance(value, bool) and -1e18 < value < 1e18
    return float(value) if good else None
