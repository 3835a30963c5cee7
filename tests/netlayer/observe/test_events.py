"""The schema of events: round trips, files that outlive their writer, older and newer versions, hostile texts."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netlayer.errors import ConfigError
from netlayer.observe.events import (
    MARKS,
    SEGMENTS,
    Counter,
    Event,
    EventWriter,
    Mark,
    Origin,
    Segment,
    arrow_schema,
    events_of,
    format_ranks,
    parse_ranks,
    read_events,
    split_collectives,
    to_batch,
)
from netlayer.observe.events.schema import COLUMNS, TIMINGS

ORIGIN = Origin(run="a", host="h0", rank=3, tp=1, pp=0, dp=1, cp=0)
HOSTILE = "<script>alert(1)</script>\x1b[31m\x00\ud800 'DROP TABLE' \u202e"


def segment(step: int, **more: object) -> Segment:
    return Segment(ORIGIN, "forward", "forward", step * 1000, step * 1000 + 500, step=step, **more)  # type: ignore[arg-type]


def some_events() -> list[Event]:
    return [
        segment(1, micro_batch=0, chunk=1, lane="compute", timing="device", clock_offset_ns=-5, clock_error_ns=40),
        Segment(ORIGIN, "collective", "all_gather", 5, 9, group="dp", group_ranks="0:8:2", seq=7, bytes=2**40),
        Mark(ORIGIN, "restart", 11, step=2, text="resumed", value=1.0, attributes={"from_step": 2, "why": ["x", None]}),
        Counter(ORIGIN, "nic.tx_bytes", 10, 20, 1.5e12, "bytes"),
        Segment(Origin("kineto", rank=0), "other", "aten::mm", 1, 2, timing="reported"),
    ]


@pytest.mark.parametrize("form", ["arrow", "jsonl"])
def test_what_is_written_is_read(tmp_path: Path, form: str) -> None:
    with EventWriter(tmp_path / "events", ORIGIN, form) as writer:  # type: ignore[arg-type]
        writer.write(some_events())
        writer.write([segment(2)])
    reader = read_events(tmp_path)
    assert list(reader) == [*some_events(), segment(2)]
    assert not reader.notes
    assert list(reader) == [*some_events(), segment(2)], "a second pass reads the same"


def test_filters_and_columns(tmp_path: Path) -> None:
    with EventWriter(tmp_path, ORIGIN) as writer:
        writer.write([*some_events(), segment(2), segment(3)])
    assert [event.step for event in read_events(tmp_path, steps=(2, 3), kinds=["segment"])] == [2, 3]
    assert {event.origin.rank for event in read_events(tmp_path, ranks=[0])} == {0}
    table = read_events(tmp_path).table(["name", "start_ns"])
    assert table.column_names == ["name", "start_ns"]
    assert table.filter(pc.equal(table["name"], "forward")).num_rows == 3


def test_parquet_holds_the_same(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_batches([to_batch(some_events())]), tmp_path / "part.parquet")
    assert list(read_events(tmp_path)) == some_events()


@pytest.mark.parametrize("form", ["arrow", "jsonl"])
def test_a_cut_file_is_read_up_to_its_last_whole_batch(tmp_path: Path, form: str) -> None:
    with EventWriter(tmp_path, ORIGIN, form) as writer:  # type: ignore[arg-type]
        for step in range(20):
            writer.write([segment(step)])
    [file] = tmp_path.iterdir()
    whole, seen = file.read_bytes(), set()
    for length in range(0, len(whole), len(whole) // 60):
        file.write_bytes(whole[:length])
        reader = read_events(tmp_path)
        steps = [event.step for event in reader]
        assert steps == list(range(len(steps))), "no batch in the middle is lost"
        assert len(reader.notes) <= 1
        seen.add(len(steps))
    assert len(seen) > 15


def test_bytes_turned_over_never_end_the_reader(tmp_path: Path) -> None:
    with EventWriter(tmp_path, ORIGIN) as writer:
        writer.write(some_events())
        writer.write([segment(step) for step in range(50)])
    [file] = tmp_path.iterdir()
    whole = file.read_bytes()
    for place in range(0, len(whole), 31):
        file.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        reader = read_events(tmp_path)
        try:
            list(reader.batches())
        except ConfigError:  # pragma: no cover
            pytest.fail("a damaged file is a note")


_WRITES_FOR_EVER = """
import sys
from pathlib import Path
from typing import Any
from netlayer.observe.events import EventWriter, Origin, Segment
origin = Origin(rank=0)
writer = EventWriter(Path(sys.argv[1]), origin, sys.argv[2], max_file_bytes=200_000)
step = 0
while True:
    writer.write([Segment(origin, "forward", "forward", i, i + 1, step=step) for i in range(50)])
    step += 1
    if step == 20:
        print("under way", flush=True)
"""


@pytest.mark.parametrize("form", ["arrow", "jsonl"])
def test_a_killed_writer_leaves_readable_files(tmp_path: Path, form: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", _WRITES_FOR_EVER, str(tmp_path), form], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    process.stdout.readline()
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    steps = [event.step for event in read_events(tmp_path)]
    assert len(steps) >= 20 * 50
    assert len(steps) % 50 == 0 or form == "jsonl"
    assert steps == sorted(steps)  # type: ignore[type-var]


def test_files_are_bounded_and_what_goes_is_counted(tmp_path: Path) -> None:
    with EventWriter(tmp_path, ORIGIN, max_file_bytes=8_000, max_files=3) as writer:
        for step in range(200):
            writer.write([segment(step)])
    files = sorted(tmp_path.iterdir())
    assert len(files) == 3
    assert max(file.stat().st_size for file in files) < 16_000
    events = list(read_events(tmp_path))
    dropped = [event for event in events if event.name == "dropped"]
    kept = [event for event in events if event.name == "forward"]
    assert dropped
    assert all(isinstance(event, Mark) and event.value for event in dropped)
    assert kept[-1].step == 199
    assert len(kept) < 200


def test_a_restarted_process_begins_a_new_file(tmp_path: Path) -> None:
    for step in (1, 2):
        with EventWriter(tmp_path, ORIGIN) as writer:
            writer.write([segment(step)])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rank-000003.0000.arrows", "rank-000003.0001.arrows"]
    assert [event.step for event in read_events(tmp_path)] == [1, 2]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_costs_a_batch_and_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = EventWriter(tmp_path, ORIGIN)
    writer.write([segment(1)])
    opened = writer._file
    assert opened is not None
    good = opened
    size = os.fstat(good.fileno()).st_size

    class Full:
        """Takes half of a write, then none."""

        def __init__(self) -> None:
            self.calls = 0

        def write(self, data: memoryview) -> int:
            self.calls += 1
            if self.calls > 1:
                raise OSError(28, "No space left on device")
            return good.write(data[: len(data) // 2])

        def __getattr__(self, name: str) -> object:
            return getattr(good, name)

    writer._file = Full()  # type: ignore[assignment]
    with pytest.raises(OSError, match="No space"):
        writer.write([segment(2)])
    assert next(tmp_path.iterdir()).stat().st_size == size
    writer.write([segment(3)])
    writer.close()
    reader = read_events(tmp_path)
    assert [event.step for event in reader] == [1, 3]
    assert not reader.notes


def test_an_older_file_lacks_columns_and_a_newer_one_has_more(tmp_path: Path) -> None:
    batch = to_batch([segment(1)])
    older = batch.select([name for name in batch.schema.names if name not in ("cp", "chunk")])
    more = pa.RecordBatch.from_arrays(
        [*batch.columns, pa.array([1])],
        schema=pa.schema([*batch.schema, pa.field("new", pa.int64())], {"schema": "netlayer.events", "version": "99"}),
    )
    for name, each in (("older", older), ("newer", more)):
        with pa.OSFile(str(tmp_path / f"{name}.arrows"), "wb") as sink, pa.ipc.new_stream(sink, each.schema) as stream:
            stream.write_batch(each)
    reader = read_events(tmp_path)
    newer, old = list(reader)
    assert newer == segment(1)
    assert old.origin.cp is None
    assert old.origin.rank == 3
    [note] = reader.notes
    assert "schema 99 is newer" in note


def test_a_column_of_another_type_is_a_note(tmp_path: Path) -> None:
    schema = arrow_schema().set(0, pa.field("kind", pa.list_(pa.int8())))
    batch = pa.RecordBatch.from_arrays([pa.nulls(0, each.type) for each in schema], schema=schema)
    with pa.OSFile(str(tmp_path / "x.arrows"), "wb") as sink, pa.ipc.new_stream(sink, schema) as stream:
        stream.write_batch(batch)
    reader = read_events(tmp_path)
    assert not list(reader)
    assert "kind" in reader.notes[0]


@pytest.mark.parametrize("form", ["arrow", "jsonl"])
def test_hostile_texts_stay_texts(tmp_path: Path, form: str) -> None:
    origin = Origin(host=f"../../{HOSTILE}", run=HOSTILE)
    events: list[Event] = [
        Segment(origin, "other", HOSTILE, 1, 2),
        Mark(origin, "warning", 3, text=HOSTILE, attributes={HOSTILE: 1}),
    ]
    with EventWriter(tmp_path, origin, form) as writer:  # type: ignore[arg-type]
        writer.write(events)
    [file] = tmp_path.iterdir()
    assert file.parent == tmp_path
    name, mark = (event for event in read_events(tmp_path))
    text = HOSTILE.replace("\ud800", "\\ud800")
    assert name.name == text
    assert isinstance(mark, Mark)
    assert mark.text == text


def test_json_lines_that_are_no_events_are_named(tmp_path: Path) -> None:
    good = json.dumps({"kind": "mark", "name": "nan", "start_ns": 5})
    lines = [
        json.dumps({"schema": "netlayer.events", "version": 1}),
        good,
        "[1]",
        '{"kind": "mark"}',
        '{"kind": "mark", "name": "nan", "start_ns": "x"}',
        '{"kind": "mark", "name": "nan", "start_ns": 99999999999999999999999}',
        '{"kind": "of a later version", "name": "nan", "start_ns": 1}',
        "[" * 100_000,
        good,
    ]
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    reader = read_events(tmp_path)
    assert len(list(reader)) == 2
    assert len(reader.notes) == 6


def test_errors_have_one_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        read_events(tmp_path / "no")
    with pytest.raises(ConfigError, match="holds no events"):
        read_events(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot hold events"):
        EventWriter(tmp_path / "file" / "x", ORIGIN)
    with pytest.raises(ValueError, match="column bytes"):
        to_batch([segment(1, bytes=2**70)])


@given(st.lists(st.integers(0, 10**6), max_size=9))
def test_ranks_as_text(ranks: list[int]) -> None:
    assert list(parse_ranks(format_ranks(ranks))) == ranks


def test_ranks_of_a_group_are_short() -> None:
    assert format_ranks(range(0, 12288, 8)) == "0:12281:8"
    with pytest.raises(ValueError, match="invalid literal"):
        parse_ranks("a,b")


def test_every_name_has_a_meaning() -> None:
    assert all(column.meaning for column in COLUMNS.values())
    assert all({**SEGMENTS, **MARKS, **TIMINGS}.values())
    assert arrow_schema().names == list(COLUMNS)
    assert list(events_of(to_batch(some_events()))) == some_events()


def on_rank(rank: int, start: int, end: int, **more: object) -> Segment:
    """A collective on a rank whose clock is 1,000 x rank ahead."""
    clock: dict[str, Any] = {"clock_offset_ns": 1000 * rank, "clock_error_ns": 10 + rank}
    begins = start + 1000 * rank
    return Segment(
        Origin(rank=rank, attempt=0),
        "collective",
        str(more.pop("name", "all_reduce")),
        begins,
        end + 1000 * rank,
        step=1,
        **clock,
        **more,  # type: ignore[arg-type]
    )


def test_a_collective_is_split_into_wait_and_transfer() -> None:
    events: list[Event] = [
        on_rank(rank, start, end, group="dp", group_ranks="0:3:1", seq=seq)
        for seq, first in ((1, 0), (2, 500))
        for rank, start, end in ((0, first, first + 100), (1, first + 70, first + 101), (2, first + 10, first + 99))
    ]
    rows = split_collectives(pa.Table.from_batches([to_batch([segment(1), *events])]))
    assert rows["wait_for_peers_ns"].to_pylist() == [70, 0, 60] * 2
    assert rows["transfer_ns"].to_pylist() == [30, 31, 29] * 2
    assert set(rows["last_rank"].to_pylist()) == {1}
    assert set(rows["num_seen"].to_pylist()) == {3}
    assert set(rows["error_ns"].to_pylist()) == {24}
    assert rows["start_ns"].to_pylist()[:3] == [0, 70, 10]


def test_a_receiver_waits_for_the_sender_and_not_the_other_way() -> None:
    pair = [
        on_rank(0, 100, 120, name="send", flow="f 0", peer=1),
        on_rank(1, 20, 130, name="recv", flow="f 0", peer=0),
        on_rank(2, 0, 5, name="send", flow="f 1", peer=3),
        on_rank(3, 50, 60, name="recv", flow="f 1", peer=2),
    ]
    rows = split_collectives(pa.Table.from_batches([to_batch(pair)]))
    assert rows["wait_for_peers_ns"].to_pylist() == [0, 80, 5, 0]
    assert rows["transfer_ns"].to_pylist() == [20, 30, 0, 10]


def test_the_same_message_again_outside_of_steps_is_another_one() -> None:
    rounds = [
        each
        for begin in (1000, 0)  # rows need not be in order
        for each in (
            on_rank(0, begin + 100, begin + 120, name="send", flow="f 0"),
            on_rank(1, begin + 20, begin + 130, name="recv", flow="f 0"),
        )
    ]
    rows = split_collectives(pa.Table.from_batches([to_batch(rounds)]))
    assert rows["wait_for_peers_ns"].to_pylist() == [0, 80] * 2
    assert set(rows["num_seen"].to_pylist()) == {2}
    assert set(rows["error_ns"].to_pylist()) == {22}


def test_rows_without_a_partner_are_left_out() -> None:
    lone = Segment(ORIGIN, "collective", "all_reduce", 1, 2, step=1, group="dp")
    assert split_collectives(pa.Table.from_batches([to_batch([lone])])).num_rows == 0
    assert split_collectives(arrow_schema().empty_table()).num_rows == 0
