"""Events as columns are the events that were added: in a batch, in files of any number of batches, and one by one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pytest

from netlayer.observe.events import Counter, Event, EventWriter, Mark, Origin, Segment, events_of, read_events, to_batch
from netlayer.observe.events.columns import EventColumns, SeriesTable

ORIGIN = Origin(run="r", rank=3, tp=1, pp=0, dp=0, cp=0)
EVENTS: Sequence[Event] = [
    Segment(ORIGIN, "step", "step", 10, 90, 4, timing="device", lane="step"),
    Segment(ORIGIN, "forward", "forward", 11, 20, 4, 0, -1, "device", "compute", attributes={"grad": False}),
    Segment(ORIGIN, "collective", "send", 12, 15, 4, 2, 1, "device", "out", "pp", "0:8:4", 7, "0-1", 64, 4),
    Counter(ORIGIN, "gpu.power", 5, 30, 612.5, "W", 4, attributes={"port": "GPU 0"}),
    Mark(ORIGIN, "dropped", 40, None, "a line", 3.0, attributes={"where": "ring"}),
    Mark(ORIGIN, "restart", 41),
]


def columns(events: Sequence[Event], table: SeriesTable | None = None) -> EventColumns:
    rows = EventColumns(ORIGIN, table or SeriesTable())
    for event in events:
        rows.add(event)
    return rows


def test_a_batch_of_columns_is_that_of_the_events() -> None:
    batch = columns(EVENTS).to_batch()
    assert list(events_of(batch)) == list(EVENTS)
    assert batch.schema.equals(to_batch(EVENTS).schema, check_metadata=True)
    batch.validate(full=True)


def test_columns_are_a_sequence_of_their_events() -> None:
    rows = columns(EVENTS)
    assert list(rows) == list(EVENTS)
    assert (len(rows), rows[1], rows[-1], rows[2:4]) == (6, EVENTS[1], EVENTS[-1], list(EVENTS[2:4]))
    with pytest.raises(IndexError):
        rows[6]


def test_the_clock_is_that_of_all() -> None:
    rows = columns(EVENTS[:2])
    rows.clock_offset_ns, rows.clock_error_ns = -7, 2**40
    for each in (*rows, *events_of(rows.to_batch())):
        assert (each.clock_offset_ns, each.clock_error_ns) == (-7, 2**40)


def test_batches_of_one_table_are_read_as_one(tmp_path: Path) -> None:
    """Texts that come later, and columns that only later batches have, are no other batch's."""
    table, all_events = SeriesTable(), list[Event]()
    with EventWriter(tmp_path, ORIGIN) as writer:
        for number in range(40):
            events = [*EVENTS[: number % 6 + 1], Segment(ORIGIN, "other", f"part {number % 7}", number, number + 1)]
            writer.write(columns(events, table))
            all_events += events
    assert list(events_of(read_events(tmp_path).table())) == all_events


def test_a_dictionary_is_written_once(tmp_path: Path) -> None:
    table, sizes = SeriesTable(), []
    writer = EventWriter(tmp_path, ORIGIN)
    for _ in range(3):
        sizes.append(writer.write(columns(EVENTS, table)))
    writer.close()
    assert sizes[1] == sizes[2] < sizes[0] / 2


def test_a_number_that_does_not_fit_is_named() -> None:
    with pytest.raises(ValueError, match="bytes"):
        columns([Segment(ORIGIN, "collective", "send", 1, 2, bytes=2**70)]).to_batch()
    with pytest.raises(ValueError, match="peer"):
        columns([Segment(ORIGIN, "collective", "send", 1, 2, peer=2**40)]).to_batch()


def test_a_text_that_is_no_unicode_is_escaped() -> None:
    [event] = events_of(columns([Mark(ORIGIN, "a\udcff", 1, text="b\udcff")]).to_batch())
    assert isinstance(event, Mark)
    assert (event.name, event.text) == ("a\\udcff", "b\\udcff")


def test_no_memory_is_read_beyond_a_dictionary() -> None:
    """Arrow follows the index of a null where it joins dictionaries."""
    table = SeriesTable()
    first = columns([Segment(ORIGIN, "other", "a", 1, 2)], table).to_batch()
    second = columns([Mark(ORIGIN, "b", 1), Segment(ORIGIN, "other", "c", 1, 2, lane="x")], table).to_batch()
    joined = pa.Table.from_batches([first, second]).unify_dictionaries()
    assert joined.column("lane").to_pylist() == [None, None, "x"]
    assert joined.column("segment").to_pylist() == ["other", None, "other"]
    for column in second.columns:
        if pa.types.is_dictionary(column.type) and len(column.dictionary):
            assert max(column.indices.fill_null(0).to_pylist()) < len(column.dictionary)
            raw = memoryview(column.indices.buffers()[1]).cast("i")[: len(column)]
            assert all(0 <= index < len(column.dictionary) for index in raw)
