"""Events of one rank as columns: what its monitor fills thousands of times a second, and Arrow takes as it is.

A dataclass an event and a look at each of its fields a column cost several times what the marks themselves do, and all
of it under the lock that the thread that launches kernels needs. Here an event is a few appends: what is alike in many
events (name, lane, group, micro-batch, ...) is a *series*, known by a number, as a time series of a metric is by its
labels. The texts of a series are encoded once, so an Arrow batch is built by a look-up a column, and its dictionaries
stay the same from batch to batch: a stream writes them once.

Whoever wants events (JSON lines, a transport of one's own) reads the same object as a sequence of them. Not covered:
events of several ranks (`schema.to_batch`).
"""

from __future__ import annotations

import json
from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple, overload

import numpy as np

from netlayer.observe.events.schema import (
    COLUMNS,
    Counter,
    Event,
    Mark,
    Origin,
    Segment,
    arrow_array,
    arrow_schema,
    to_json,
)

if TYPE_CHECKING:
    import pyarrow as pa

MAX_SERIES = 4096
"""Of a table; names may be made up without end, and a new table begins then."""
_SLICED = 1 << 12  # rows of a constant column that is made once
_NULL = -(2**31)  # among the codes of a series


class Series(NamedTuple):
    """Fields that many events have alike; they are those of COLUMNS, `attributes` as JSON."""

    kind: str
    name: str
    segment: str | None = None
    micro_batch: int | None = None
    chunk: int | None = None
    timing: str | None = None
    lane: str | None = None
    group: str | None = None
    group_ranks: str | None = None
    flow: str | None = None
    peer: int | None = None
    unit: str | None = None
    attributes: str | None = None


_TEXTS = ("kind", "name", "segment", "timing", "lane", "group", "group_ranks", "flow", "unit")
_NUMBERS = ("micro_batch", "chunk", "peer")
_OF_ORIGIN = tuple(Origin.__dataclass_fields__)


class SeriesTable:
    """Series by their numbers, from 0, and the Arrow dictionaries of their texts."""

    def __init__(self) -> None:
        self.series: list[Series] = []
        self.by_key: dict[Hashable, int] = {}
        """Numbers by whatever the caller knows a series by, beside the series itself."""
        self._places: dict[str, dict[str, int]] = {name: {} for name in _TEXTS}
        self._dictionaries: dict[str, pa.Array] = {}
        self._codes: dict[str, np.ndarray[Any, np.dtype[np.int32]]] = {}
        self._used: set[str] = set()
        self._num_encoded = 0

    @property
    def is_full(self) -> bool:
        return len(self.series) >= MAX_SERIES

    def number(self, series: Series) -> int:
        """Return the number of a series, a new one the first time."""
        number = self.by_key.get(series)
        if number is None:
            number = self.by_key[series] = len(self.series)
            self.series.append(series)
        return number

    def column(self, name: str, numbers: np.ndarray[Any, np.dtype[np.int32]]) -> pa.Array:
        """Return a column of `arrow_schema()` for events of these series."""
        import pyarrow as pa

        if self._num_encoded < len(self.series):
            self._encode()
        if name not in self._used:  # of no series, as most columns of most streams
            return _constant(name, None, len(numbers))
        codes = self._codes[name][numbers]
        mask = codes == _NULL
        if name in _NUMBERS:
            return pa.array(codes, pa.int32(), mask=mask)
        # Arrow reads what lies under a null, too: a place that is not there would be outside of its memory.
        indices = pa.array(np.where(mask, 0, codes), mask=mask) if mask.any() else pa.array(codes)
        return pa.DictionaryArray.from_arrays(indices, self._dictionaries[name])

    def _encode(self) -> None:
        """Take in the series that are new since the last time: texts by their place, numbers as they are."""
        import pyarrow as pa

        new = self.series[self._num_encoded :]
        codes: dict[str, list[int]] = {}
        for name in _NUMBERS:
            values = [getattr(each, name) for each in new]
            arrow_array(name, values, _types()[name])  # says which one does not fit
            codes[name] = [_NULL if value is None else value for value in values]
        for name in _TEXTS:
            places = self._places[name]
            texts = [getattr(each, name) for each in new]
            codes[name] = [_NULL if text is None else places.setdefault(text, len(places)) for text in texts]
            if name not in self._dictionaries or len(places) > len(self._dictionaries[name]):
                self._dictionaries[name] = arrow_array(name, list(places), pa.string())
        # All of them at the end: after an error the codes of no column are ahead of those of the others.
        for name, some in codes.items():
            self._append(name, some)
        self._num_encoded = len(self.series)

    def _append(self, name: str, codes: list[int]) -> None:
        earlier = self._codes.get(name, np.empty(0, np.int32))
        self._codes[name] = np.concatenate([earlier, np.array(codes, np.int32)])
        if any(code != _NULL for code in codes):
            self._used.add(name)


class EventColumns(Sequence[Event]):
    """Events of one origin in order of their addition.

    Lists with an entry an event are filled together, by `add` or by whoever has many: `series` (numbers of the table),
    `steps`, `starts`, `ends` (ns on the rank's clock), `seqs`, `bytes`. What few events have is by row: `values`,
    `texts`, `attributes` (JSON, instead of those of the series).
    """

    def __init__(self, origin: Origin, table: SeriesTable) -> None:
        self.origin, self.table = origin, table
        self.series: list[int] = []
        self.steps: list[int | None] = []
        self.starts: list[int] = []
        self.ends: list[int] = []
        self.seqs: list[int | None] = []
        self.bytes: list[int | None] = []
        self.values: dict[int, float] = {}
        self.texts: dict[int, str] = {}
        self.attributes: dict[int, str] = {}
        self.clock_offset_ns: int | None = None
        self.clock_error_ns: int | None = None

    def append_segment(self, series: int, step: int | None, start_ns: int, end_ns: int) -> None:
        """Append a segment of a series, without a number in its group and a size."""
        self.series.append(series)
        self.steps.append(step)
        self.starts.append(start_ns)
        self.ends.append(end_ns)
        self.seqs.append(None)
        self.bytes.append(None)

    def add(self, event: Event) -> None:
        """Append an event of the same origin; its clock is that of all."""
        row = len(self.series)
        if isinstance(event, Segment):
            series = Series(
                "segment",
                event.name,
                event.segment,
                event.micro_batch,
                event.chunk,
                event.timing,
                event.lane,
                event.group,
                event.group_ranks,
                event.flow,
                event.peer,
            )
            self.seqs.append(event.seq)
            self.bytes.append(event.bytes)
        else:
            series = Series(event.kind, event.name, unit=event.unit if isinstance(event, Counter) else None)
            self.seqs.append(None)
            self.bytes.append(None)
            if event.value is not None:
                self.values[row] = event.value
            if isinstance(event, Mark) and event.text is not None:
                self.texts[row] = event.text
        if event.attributes:
            self.attributes[row] = to_json(event.attributes)
        self.series.append(self.table.number(series))
        self.steps.append(event.step)
        self.starts.append(event.start_ns)
        self.ends.append(event.end_ns)

    def to_batch(self) -> pa.RecordBatch:
        """One Arrow record batch of `arrow_schema()`.

        Raises:
            ValueError: a number does not fit its column.
        """
        import pyarrow as pa

        schema, types, num = arrow_schema(), _types(), len(self.series)
        numbers = np.array(self.series, np.int32)
        attributes = dict(self.attributes)
        facts = {number: each.attributes for number, each in enumerate(self.table.series) if each.attributes}
        if facts:
            of_series = {row: facts[number] for row, number in enumerate(self.series) if number in facts}
            attributes = of_series | attributes
        sparse: dict[str, Mapping[int, Any]] = {"value": self.values, "text": self.texts, "attributes": attributes}
        dense: dict[str, Sequence[int | None]] = {
            "step": self.steps,
            "start_ns": self.starts,
            "end_ns": self.ends,
            "seq": self.seqs,
            "bytes": self.bytes,
        }
        clock = {"clock_offset_ns": self.clock_offset_ns, "clock_error_ns": self.clock_error_ns}
        arrays = []
        for name in COLUMNS:
            if name in dense:
                array = arrow_array(name, dense[name], types[name])
            elif name in sparse:
                rows = sparse[name]
                values = [rows.get(row) for row in range(num)] if rows else ()
                array = arrow_array(name, values, types[name]) if rows else _constant(name, None, num)
            elif name in _OF_ORIGIN:
                array = _constant(name, getattr(self.origin, name), num)
            elif name in clock:
                array = pa.repeat(arrow_array(name, [clock[name]], types[name])[0], num)
            else:
                array = self.table.column(name, numbers)
            arrays.append(array)
        return pa.RecordBatch.from_arrays(arrays, schema=schema)

    def __len__(self) -> int:
        return len(self.series)

    @overload
    def __getitem__(self, row: int) -> Event: ...
    @overload
    def __getitem__(self, row: slice) -> list[Event]: ...
    def __getitem__(self, row: int | slice) -> Event | list[Event]:
        if isinstance(row, slice):
            return [self._event(each) for each in range(*row.indices(len(self)))]
        return self._event(range(len(self))[row])

    def __iter__(self) -> Iterator[Event]:
        return map(self._event, range(len(self)))

    def _event(self, row: int) -> Event:
        """Return the event of a row."""
        series = self.table.series[self.series[row]]
        text = self.attributes.get(row, series.attributes)
        attributes = None if text is None else json.loads(text)
        clock: dict[str, Any] = {"clock_offset_ns": self.clock_offset_ns, "clock_error_ns": self.clock_error_ns}
        step, start_ns, end_ns = self.steps[row], self.starts[row], self.ends[row]
        if series.kind == "mark":
            more: dict[str, Any] = {"text": self.texts.get(row), "value": self.values.get(row)}
            return Mark(self.origin, series.name, start_ns, step, attributes=attributes, **more, **clock)
        if series.kind == "counter":
            value = self.values[row]
            times = start_ns, end_ns
            return Counter(self.origin, series.name, *times, value, series.unit, step, attributes=attributes, **clock)
        return Segment(
            self.origin,
            series.segment or "other",
            series.name,
            start_ns,
            end_ns,
            step,
            series.micro_batch,
            series.chunk,
            series.timing or "host",
            series.lane,
            series.group,
            series.group_ranks,
            self.seqs[row],
            series.flow,
            self.bytes[row],
            series.peer,
            attributes=attributes,
            **clock,
        )


@cache
def _types() -> dict[str, pa.DataType]:
    return {field.name: field.type for field in arrow_schema()}


def _constant(name: str, value: object, num: int) -> pa.Array:
    """A column with one value in all rows: a slice of one that was made before."""
    array = _repeated(name, value, max(_SLICED, 1 << (num - 1).bit_length() if num else 0))
    return array.slice(0, num)


@lru_cache(maxsize=128)
def _repeated(name: str, value: object, num: int) -> pa.Array:
    import pyarrow as pa

    type_ = _types()[name]
    if value is None:
        is_text = pa.types.is_dictionary(type_)
        return pa.nulls(num, pa.string()).dictionary_encode() if is_text else pa.nulls(num, type_)
    if pa.types.is_dictionary(type_):
        indices = pa.array(np.zeros(num, np.int32))
        return pa.DictionaryArray.from_arrays(indices, arrow_array(name, [value], pa.string()))
    return pa.repeat(arrow_array(name, [value], type_)[0], num)
