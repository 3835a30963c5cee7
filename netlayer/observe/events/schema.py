"""The schema of events, version 1: segments, marks and counters of every rank, as dataclasses, Arrow columns and JSON.

A segment is a stretch of time in which a rank did one thing; a mark is a moment (restart, eviction, NaN); a counter is
a reading (bytes of a NIC, watts of a GPU). All three are rows of one table with one set of columns, so that any
evidence, ours or of another program, is read and asked alike. `COLUMNS` says what each column means.

[Note: clocks] `start_ns` and `end_ns` are nanoseconds since 1970 on the clock of the rank: a steady clock that was set
by the system's once, when the process began to record, so that they never jump. Another rank's clock differs:
`clock_offset_ns` is this clock minus the reference clock of the run (rank 0's), as far as it was known when the event
was written, and `clock_error_ns` bounds how wrong that may be. So `start_ns - clock_offset_ns` is comparable between
ranks to within the sum of both errors. Null: nobody has compared the clocks.

[Note: wait apart from communication] A rank cannot tell alone whether a collective that is under way moves bytes or
waits for a peer. The segment of a collective begins when this rank could begin and ends when it was done; the rest
follows from all ranks of the group (`matching.split_collectives`): until the last of them began it waited for peers,
after that it communicated. `wait` segments are another thing: the compute stream (or the host) stood still for a
collective, which is the exposed part.

[Note: versions] `SCHEMA_VERSION` stands in every file and message. Within a version, columns are only added, and a
reader fills what a file lacks with nulls and skips columns that it does not know. A change of meaning gets the next
version, and `_UPGRADES` an entry that turns rows of the version before into it: older files stay readable. Files of a
later version are read as far as their columns are known, and the reader says so.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import pyarrow as pa

SCHEMA_VERSION = 1
SCHEMA_NAME = "netlayer.events"

SEGMENTS = {
    "step": "one optimiser step, from the beginning of its first operation to the end of its last",
    "forward": "forward pass of a micro-batch",
    "backward": "backward pass of a micro-batch",
    "weights": "deferred weight gradients of a micro-batch (zero-bubble schedules)",
    "optimizer": "gradient norm, clipping and update",
    "collective": "a collective, send or receive; `name` is its kind (`all_gather`, `send`)",
    "wait": "computation stands still for a collective; `name` is that collective's kind",
    "data": "the host waits for a batch",
    "checkpoint": "a checkpoint is written or loaded",
    "evaluation": "held-out loss",
    "gc": "garbage collection of Python",
    "other": "anything else; `name` says what",
}
"""Classes of segments."""

MARKS = {
    "run_start": "a process of the run began; attributes: host, layout, job, device, versions",
    "run_end": "it ended as intended",
    "failure": "it ended by an error; the text says which",
    "restart": "the run resumed; attributes: count, from_step",
    "eviction": "a rank or host was taken out of the run",
    "checkpoint": "a checkpoint of the state after the mark's step is whole, and good to resume from",
    "late": "the step is open for long, `value` seconds; what has ended of it is in the record; again while it lasts",
    "nan": "a loss or a gradient was not finite",
    "throttle": "a processor lowered its clock; attributes: reason, sm_clock_mhz",
    "throttle_end": "a reason for a lower clock is gone; attributes: reason",
    "dropped": "events were lost before this moment: `value` of them; attributes: where",
    "clock": "clocks of ranks were compared; attributes: offset_ns, error_ns, drift_ppm, method",
    "warning": "a line that the user was shown",
}
"""Known names of marks; other names are allowed."""

COUNTERS = {
    "cpu.wait": "for which the training thread was ready and had no processor in a step, outside of waits for other "
    "ranks where the host computes (attribute timing); attribute before_s: since the end of the step before",
    "nic.xmit_bytes": "bytes that an RDMA port of the host sent between start and end; attribute port",
    "nic.rcv_bytes": "bytes that it received",
    "nvlink.tx_bytes": "bytes that all NVLinks of the rank's GPU sent between start and end; attribute port",
    "nvlink.rx_bytes": "bytes that they received",
    "gpu.power": "power of the rank's GPU, W",
    "gpu.sm_clock": "clock of its multiprocessors, MHz",
    "gpu.temperature": "its temperature, degrees Celsius",
}
"""Known names of counters; other names are allowed."""
PROCESSOR_WAIT = "cpu.wait"

TIMINGS = {
    "device": "events on a CUDA stream",
    "graph": "events around the replay of a CUDA graph, of whose inside nothing is known",
    "host": "the host's clock",
    "reported": "another program's times",
}
"""How the times of a segment were taken."""


class Column(NamedTuple):
    """A column of the table: its Arrow type (`text` is a dictionary of strings), and what it means."""

    type: str
    meaning: str


COLUMNS = {
    "kind": Column("text", "segment, mark or counter"),
    "name": Column("text", "what it is: `forward`, `all_gather`, `restart`, `nic.tx_bytes`"),
    "segment": Column("text", "class of a segment, one of SEGMENTS; null for the others"),
    "step": Column("int64", "optimiser step, counted from 1; null outside any"),
    "micro_batch": Column("int32", "micro-batch of the step on this rank, counted from 0"),
    "chunk": Column("int32", "model chunk of this pipeline rank (virtual stage), counted from 0"),
    "start_ns": Column("int64", "begin on the rank's clock, ns since 1970: [Note: clocks]"),
    "end_ns": Column("int64", "end; a mark's is its start; a counter's is when it was read"),
    "clock_offset_ns": Column("int64", "the rank's clock minus the run's reference clock"),
    "clock_error_ns": Column("int64", "bound on the error of that offset"),
    "timing": Column("text", "how the times were taken, one of TIMINGS"),
    "lane": Column("text", "stream or thread that ran it; segments of a lane follow or enclose each other"),
    "group": Column("text", "role of the process group: `gather`, `reduce`, `tp`, `pipeline forward`"),
    "group_ranks": Column("text", "its ranks, global: `first:stop:stride`, or `3,5,9` (`parse_ranks`)"),
    "seq": Column("int64", "number of the collective in its group and kind, from 1; equal on all its ranks"),
    "flow": Column("text", "the same text on a send and on its receive, within a step; null of a collective"),
    "bytes": Column("int64", "size of the whole buffer, as nccl-tests count it"),
    "peer": Column("int32", "global rank at the other end of a send or receive"),
    "value": Column("float64", "reading of a counter; of the mark `dropped` the number of events"),
    "unit": Column("text", "unit of the value: `bytes`, `W`, `MHz`"),
    "text": Column("string", "a line for a person, as it came: show it escaped"),
    "attributes": Column("string", "further facts, a JSON object; null: none"),
    "source": Column("text", "who recorded it: `monitor`, `flight_recorder`, `kineto`"),
    "run": Column("text", "name of the run"),
    "attempt": Column("int32", "which start of the run: 0 the first one, one more with every restart"),
    "host": Column("text", "host of the rank"),
    "rank": Column("int32", "global rank; null: of a host or a switch as a whole"),
    "tp": Column("int32", "its place in the tensor-parallel group; null: not known"),
    "pp": Column("int32", "its pipeline stage"),
    "dp": Column("int32", "its place in the data-parallel group"),
    "cp": Column("int32", "its place in the context-parallel group"),
}
"""Every column, in order. All but `kind`, `name`, `start_ns` and `end_ns` may be null."""

_ORIGIN = ("source", "run", "attempt", "host", "rank", "tp", "pp", "dp", "cp")
_INT_LIMITS = {"int32": 2**31, "int64": 2**63}
_RANGE = re.compile(r"(\d{1,9}):(\d{1,9}):(\d{1,9})")


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of events: who recorded them, in which run, on which host and rank, at which place of the layout."""

    source: str = "monitor"
    run: str | None = None
    attempt: int | None = None
    host: str | None = None
    rank: int | None = None
    tp: int | None = None
    pp: int | None = None
    dp: int | None = None
    cp: int | None = None


@dataclass(slots=True)
class Segment:
    """A stretch of time in which a rank did one thing; fields are those of COLUMNS."""

    origin: Origin
    segment: str
    name: str
    start_ns: int
    end_ns: int
    step: int | None = None
    micro_batch: int | None = None
    chunk: int | None = None
    timing: str = "host"
    lane: str | None = None
    group: str | None = None
    group_ranks: str | None = None
    seq: int | None = None
    flow: str | None = None
    bytes: int | None = None
    peer: int | None = None
    clock_offset_ns: int | None = None
    clock_error_ns: int | None = None
    attributes: Mapping[str, Any] | None = None

    kind = "segment"

    @property
    def duration_ns(self) -> int:
        return self.end_ns - self.start_ns


@dataclass(slots=True)
class Mark:
    """A moment; fields are those of COLUMNS."""

    origin: Origin
    name: str
    start_ns: int
    step: int | None = None
    text: str | None = None
    value: float | None = None
    clock_offset_ns: int | None = None
    clock_error_ns: int | None = None
    attributes: Mapping[str, Any] | None = None

    kind = "mark"

    @property
    def end_ns(self) -> int:
        return self.start_ns


@dataclass(slots=True)
class Counter:
    """A reading. Where `start_ns` is earlier than `end_ns`, the value is what was counted in between."""

    origin: Origin
    name: str
    start_ns: int
    end_ns: int
    value: float
    unit: str | None = None
    step: int | None = None
    clock_offset_ns: int | None = None
    clock_error_ns: int | None = None
    attributes: Mapping[str, Any] | None = field(default=None)

    kind = "counter"


Event = Segment | Mark | Counter
_CLASSES: dict[str, type[Segment] | type[Mark] | type[Counter]] = {
    "segment": Segment,
    "mark": Mark,
    "counter": Counter,
}
_FIELDS = {kind: tuple(cls.__dataclass_fields__) for kind, cls in _CLASSES.items()}
_NEEDED = ("start_ns", "end_ns")


def format_ranks(ranks: Sequence[int]) -> str:
    """Text for `group_ranks`: `first:stop:stride` of an arithmetic progression, else a list `3,5,9`."""
    if not ranks:
        return ""
    stride = ranks[1] - ranks[0] if len(ranks) > 1 else 1
    if stride > 0 and list(ranks) == list(range(ranks[0], ranks[-1] + 1, stride)):
        return f"{ranks[0]}:{ranks[-1] + 1}:{stride}"
    return ",".join(map(str, ranks))


def parse_ranks(text: str | None) -> Sequence[int]:
    """Ranks of a `group_ranks` text, empty where there is none.

    Raises:
        ValueError: it is no such text.
    """
    if not text:
        return ()
    match = _RANGE.fullmatch(text)
    if match:
        first, stop, stride = map(int, match.groups())
        return range(first, stop, stride)  # a stride of 0 is a ValueError of range's own
    return tuple(map(int, text.split(",")))


@cache
def arrow_schema(version: int = SCHEMA_VERSION) -> pa.Schema:
    """Arrow schema of the table; its metadata name the schema and its version."""
    import pyarrow as pa

    text = pa.dictionary(pa.int32(), pa.string())
    types = {"text": text, "string": pa.string()} | {
        name: getattr(pa, name)() for name in ("int32", "int64", "float64")
    }
    fields = [
        pa.field(name, types[column.type], nullable=name not in ("kind", "name", *_NEEDED))
        for name, column in COLUMNS.items()
    ]
    return pa.schema(fields, {"schema": SCHEMA_NAME, "version": str(version)})


def load_arrow() -> None:
    """Load what the first batch would: pyarrow and what it looks for (pandas) take a third of a second or more."""
    to_batch([Mark(Origin(), "dropped", 0)])


def version_of(schema: pa.Schema) -> int:
    """Version that a file's Arrow schema states.

    Raises:
        ValueError: it is not of events.
    """
    metadata = schema.metadata or {}
    if metadata.get(b"schema") != SCHEMA_NAME.encode() or not metadata.get(b"version", b"").isdigit():
        raise ValueError(f"an Arrow stream, but not of the schema {SCHEMA_NAME}")
    return int(metadata[b"version"])


def to_batch(events: Sequence[Event]) -> pa.RecordBatch:
    """One Arrow record batch of `arrow_schema()`; texts that are no Unicode get backslash escapes.

    Raises:
        ValueError: a number does not fit its column.
    """
    import pyarrow as pa

    own = getattr(events, "to_batch", None)
    if own is not None:  # they are columns already: `netlayer.observe.events.columns`
        return own()
    schema, num = arrow_schema(), len(events)
    origins = {id(event.origin): event.origin for event in events}
    arrays = []
    for name, column in COLUMNS.items():
        values: list[Any]
        if name in _ORIGIN:
            if len(origins) == 1:  # a rank's own stream: one value, repeated without a loop
                [origin] = origins.values()
                values = [getattr(origin, name)] * num
            else:
                values = [getattr(event.origin, name) for event in events]
        elif name == "attributes":
            values = [None if not event.attributes else to_json(event.attributes) for event in events]
        else:
            values = [getattr(event, name, None) for event in events]
        array = arrow_array(name, values, pa.string() if column.type == "text" else schema.field(name).type)
        arrays.append(array.dictionary_encode() if column.type == "text" else array)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def arrow_array(name: str, values: Sequence[Any], type_: pa.DataType) -> pa.Array:
    """Values of a column as Arrow's; texts that are no Unicode get backslash escapes.

    Raises:
        ValueError: one does not fit.
    """
    import pyarrow as pa

    try:
        return pa.array(values, type_)
    except UnicodeEncodeError:
        return pa.array([_clean(value) for value in values], type_)
    except (pa.ArrowInvalid, pa.ArrowTypeError, OverflowError, TypeError) as exc:
        raise ValueError(f"column {name}: {exc}") from exc


_Upgrade = Callable[["pa.RecordBatch"], "pa.RecordBatch"]
_UPGRADES: dict[int, _Upgrade] = {}
"""By version: turns a batch of it into one of the next. See [Note: versions]."""


def normalise(batch: pa.RecordBatch, version: int) -> pa.RecordBatch:
    """The batch with the columns of this version: older rows are upgraded, missing columns null, unknown ones gone.

    Raises:
        ValueError: a column has another type, or one that every row needs is missing.
    """
    import pyarrow as pa

    for earlier in range(version, SCHEMA_VERSION):
        upgrade = _UPGRADES.get(earlier)
        batch = upgrade(batch) if upgrade else batch
    schema = arrow_schema()
    if batch.schema.equals(schema):
        return batch
    arrays = []
    for want in schema:
        index = batch.schema.get_field_index(want.name)
        if index < 0 and not want.nullable:
            raise ValueError(f"the column {want.name} is missing")
        array = pa.nulls(batch.num_rows, want.type) if index < 0 else batch.column(index)
        try:
            arrays.append(array if array.type == want.type else _cast(array, want.type))
        except pa.ArrowException as exc:
            raise ValueError(f"the column {want.name} is {array.type}, not {want.type}") from exc
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _cast(array: pa.Array, want: pa.DataType) -> pa.Array:
    import pyarrow as pa

    if pa.types.is_dictionary(want):
        plain = array.dictionary_decode() if pa.types.is_dictionary(array.type) else array
        return plain.cast(pa.string()).dictionary_encode()
    return array.cast(want)


def events_of(batch: pa.RecordBatch) -> Iterator[Event]:
    """The rows of a batch, or of a table, as events."""
    origins: dict[tuple[Any, ...], Origin] = {}
    for row in batch.to_pylist():
        event = _event(row, origins)
        if event is not None:
            yield event


def _event(row: dict[str, Any], origins: dict[tuple[Any, ...], Origin]) -> Event | None:
    """The event of a row; None: of a kind that this version does not know.

    Raises:
        KeyError, TypeError, ValueError: a field that its kind needs is missing, or of another type.
    """
    cls = _CLASSES.get(row["kind"])
    if cls is None:
        return None
    place: tuple[Any, ...] = tuple(row.get(name) for name in _ORIGIN)
    origin = origins.get(place)
    if origin is None:
        origin = origins[place] = Origin(*place)
    fields: dict[str, Any] = {
        name: row.get(name) for name in _FIELDS[cls.kind] if name != "origin" and row.get(name) is not None
    }
    attributes = fields.get("attributes")
    if isinstance(attributes, str):
        fields["attributes"] = _attributes(attributes)
    return cls(origin, **fields)


def _attributes(text: str) -> dict[str, Any]:
    """The object of a JSON text; of any other text, one with the text in it."""
    try:
        tree = json.loads(text)
    except (ValueError, RecursionError):
        return {"text": text}
    return tree if isinstance(tree, dict) else {"value": tree}


def to_json(value: Mapping[str, Any]) -> str:
    """Compact JSON; what JSON has no form for becomes its text, and a number that is not finite its name."""
    try:
        return json.dumps(value, separators=(",", ":"), default=str, allow_nan=False)
    except ValueError:
        return json.dumps(_finite(value), separators=(",", ":"), default=str, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _finite(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(each) for each in value]
    is_lost = isinstance(value, float) and (value != value or value in (float("inf"), float("-inf")))
    return str(value) if is_lost else value


def _clean(value: Any) -> Any:
    """A text that UTF-8 can hold: lone surrogates as escapes."""
    return value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value


def to_lines(events: Iterable[Event]) -> Iterator[str]:
    """Each event as one line of JSON without its nulls: the form of a stream where there is no pyarrow."""
    for event in events:
        row: dict[str, Any] = {"kind": event.kind}
        for name in _FIELDS[event.kind]:
            if name != "origin":
                row[name] = getattr(event, name)
        row |= {name: getattr(event.origin, name) for name in _ORIGIN}
        yield to_json({name: value for name, value in row.items() if value is not None})


def header_line(version: int = SCHEMA_VERSION) -> str:
    """First line of a JSON-lines stream."""
    return json.dumps({"schema": SCHEMA_NAME, "version": version})


def event_of_line(line: str, origins: dict[tuple[Any, ...], Origin]) -> Event | None:
    """The event of a line of `to_lines`; None: of a kind that this version does not know.

    Raises:
        ValueError: it is no event.
    """
    try:
        row = json.loads(line)
        if not isinstance(row, dict):
            raise TypeError("no object")
        _check_types(row)
        return _event(row, origins)
    except (KeyError, TypeError, RecursionError) as exc:
        raise ValueError(f"no event ({exc})") from exc


def _check_types(row: Mapping[str, Any]) -> None:
    for name, value in row.items():
        column = COLUMNS.get(name)
        if column is None or value is None or name == "attributes":
            continue
        if column.type in _INT_LIMITS:
            if type(value) is not int or abs(value) >= _INT_LIMITS[column.type]:
                raise TypeError(f"{name} is no {column.type}")
        elif column.type == "float64":
            if type(value) not in (int, float):
                raise TypeError(f"{name} is no number")
        elif not isinstance(value, str):
            raise TypeError(f"{name} is no text")
