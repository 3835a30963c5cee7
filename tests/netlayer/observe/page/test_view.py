"""What the page is told of a run: who holds it up, its measures, one rank, timelines, counters; and its export."""

import base64
import gzip
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from bench.page.synthetic import Faults, write_run
from netlayer.errors import ConfigError
from netlayer.layout import ParallelLayout
from netlayer.observe.blame import Blame, Finding
from netlayer.observe.command import observe
from netlayer.observe.events import Counter, Event, EventWriter, Mark, Origin, Segment
from netlayer.observe.page import columns as page_columns
from netlayer.observe.page import export, server
from netlayer.observe.page import source as page_source
from netlayer.observe.page.advice import next_step
from netlayer.observe.page.payload import MISSING, pack, pack_levels, unpack
from netlayer.observe.page.source import PageSource
from netlayer.observe.page.stopped import LateStep, Stop, judge_stop
from netlayer.observe.page.view import SLOWER, statistics
from netlayer.observe.verdicts.verdict import StragglerRow
from tests.netlayer.observe.page.test_tables import write
from tests.netlayer.observe.test_report import events_of_run

MS = 1_000_000
HOSTILE = '</script><img src=x onerror="alert(1)">\x1b[31m'


@pytest.fixture(scope="module")
def faulty(tmp_path_factory: pytest.TempPathFactory) -> PageSource:
    """32 ranks: rank 5 is slow, rank 21 falls silent in step 12, and a first start is killed after step 6."""
    folder = tmp_path_factory.mktemp("faulty")
    faults = Faults(straggler=5, silent=21, silent_step=12, restart_step=6, text=HOSTILE)
    write_run(folder, ParallelLayout(tp=2, pp=4, dp=4), 12, faults, micro_batches=2)
    return PageSource([folder])


def test_the_silent_rank_and_who_waits_for_it_are_named(faulty: PageSource) -> None:
    stop = faulty.view.stop
    assert (stop.state, stop.silent) == ("silent", (21,))
    assert "in forward of micro-batch 0 of step 12" in stop.line
    # Its data-parallel peers wait for it themselves; the stage before sends, and waits for what comes back.
    assert stop.waiting[23] == (21, 0)
    assert stop.waiting[5][0] == 21
    assert set(stop.waiting) == set(range(32)) - {20, 21}
    # Every rank is in the count, and the line says why it is not the other one of its tensor-parallel group.
    assert stop.alike == (20,)
    assert "why this one: rank 20 stopped in the same operation, but its readings (counters, marks) go on" in stop.line
    facts, arrays = unpack(faulty.get("overview", {}))
    assert facts["stop"]["silent"] == [21]
    assert arrays["waits_for"][5] == 21
    assert arrays["waits_for"][21] == -1


def test_the_next_step_has_the_place_the_time_and_the_command(faulty: PageSource) -> None:
    step = unpack(faulty.get("overview", {}))[0]["next"]
    assert (step["subject"], step["rank"]) == ("silent rank", 21)
    where, evict, test = step["lines"]
    assert where.startswith("rank 21 on host host-0002, GPU 5 if the host's ranks are numbered in order; its last")
    assert re.search(r"at 2023-11-14 22:1\d:\d\d UTC$", where)
    assert "`netlayer run status OUT` says which node runs on host-0002; then `netlayer run evict OUT NODE`" in evict
    assert '`HOSTS=$(mktemp); echo host-0002 > "$HOSTS"; netlayer accept --hosts "$HOSTS"`' in test


def test_the_node_of_a_run_of_ours_is_the_one_of_its_last_start(tmp_path: Path) -> None:
    write_run(tmp_path / "a", ParallelLayout(tp=1, pp=1, dp=4), 12, Faults(silent=2, silent_step=12, restart_step=6))
    files = [tmp_path / "a"]
    for attempt in (1, 0):
        origin = Origin(rank=2, attempt=attempt, host="host-0000")
        mark = Mark(origin, "run_start", 1, attributes={"pid": 7 + attempt, "node": f"node-{attempt}"})
        files.append(write(tmp_path / f"b{attempt}", [mark]))
    where, evict, _ = unpack(PageSource(files).get("overview", {}))[0]["next"]["lines"]
    assert "process 8" in where
    assert "`netlayer run evict OUT node-1`" in evict


def test_a_run_that_accuses_nobody_has_no_next_step(tmp_path: Path) -> None:
    write_run(tmp_path, ParallelLayout(tp=1, pp=1, dp=4), 3, Faults())
    assert unpack(PageSource([tmp_path]).get("overview", {}))[0]["next"] is None


def test_a_next_step_is_for_slow_computation_in_a_run_whose_end_is_known(tmp_path: Path) -> None:
    write_run(tmp_path, ParallelLayout(tp=1, pp=1, dp=4), 30, Faults(straggler=1))
    view = PageSource([tmp_path]).view
    step = next_step(view)
    assert step is not None
    assert (view.stop.state, step["subject"], step["rank"]) == ("ended", "straggler", 1)
    for state in ("cannot tell", "suspected"):
        assert next_step(replace(view, stop=replace(view.stop, state=state))) is None
    finding = Finding("dead", (3,), "", "", "rank 3 holds others up")
    assert next_step(replace(view, blame=Blame((finding,)))) is None
    [verdict] = [each for each in view.verdicts if each.subject == "straggler"]
    slow_data = tuple(replace(row, cause="data") for row in verdict.rows if isinstance(row, StragglerRow))
    assert next_step(replace(view, verdicts=[replace(verdict, rows=slow_data)])) is None


def test_shares_of_the_whole_time_add_up_and_a_hang_counts(faulty: PageSource) -> None:
    line = next(verdict.line for verdict in faulty.view.verdicts if verdict.subject == "effective time")
    assert "11 steps in" in line  # the twelfth has no end
    assert "hung at the end" in line
    assert sum(float(share) for share in re.findall(r"([0-9.]+)%", line)) == pytest.approx(100, abs=0.3)


def test_a_straggler_has_its_passes_and_each_percentage_its_base(faulty: PageSource) -> None:
    line = next(verdict.line for verdict in faulty.view.verdicts if verdict.subject == "straggler")
    assert re.search(r"slow computation \(100% of the difference: forward \+[0-9.]+ ms, backward \+[0-9.]+ ms", line), (
        line
    )
    assert "slower than its peers without waits" in line
    assert "% of each step's time" in line


def run_that_stops(
    behind: Iterable[int],
    *,
    until_s: float = 60.0,
    work: bool = True,
    signs: Iterable[int] = (),
    last_signs_s: Mapping[int, float] = MappingProxyType({}),
    begin_s: float = 0.0,
) -> Stop:
    """Four ranks with a pass and a reduction a step; ranks `behind` end the record before the pass of step 3.

    Args:
        signs: ranks whose readings go on to the end.
        last_signs_s: when the readings of others end.
        begin_s: of step 0.
    """
    segments: list[Segment] = []
    for rank in range(4):
        origin = Origin(rank=rank, host="h")
        for step in (2, 3):
            at = round(begin_s * 1e9) + step * 100 * MS
            more = {"step": step, "group": "reduce", "group_ranks": "0:4:1", "seq": step}
            if step == 2 or rank not in set(behind):
                segments.append(Segment(origin, "forward", "forward", at, at + 60 * MS, step=step))
            if step == 2:
                segments.append(Segment(origin, "collective", "all_reduce", at + 60 * MS, at + 70 * MS, **more))
                segments.append(Segment(origin, "step", "step", at, at + 70 * MS, step=2))
    until_ns = round((begin_s + until_s) * 1e9)
    last = dict.fromkeys(signs, until_ns) | {rank: round(at_s * 1e9) for rank, at_s in last_signs_s.items()}
    return judge_stop(segments, until_ns, 0.1, ended=not work, last_sign_ns=last)


def test_a_rank_that_is_in_its_own_work_is_silent() -> None:
    stop = run_that_stops([2])
    assert (stop.state, stop.silent) == ("silent", (2,))
    assert stop.waiting == dict.fromkeys((0, 1, 3), (2, 0))
    assert stop.line.endswith("why this one: no other rank in work of its own is waited for")


def stop_of_a_pipeline(
    *,
    signs_s: Mapping[int, float],
    late: Iterable[int],
    forward: Iterable[int] = (),
    waits: Mapping[int, Any] = MappingProxyType({}),
    clock_error_s: float | None = 0.0,
) -> Stop:
    """Two stages of two ranks; of step 3 the record has what the ranks `forward` did until rank 2 was stopped.

    Receives are posted at the begin of a step, long before anybody waits for them.
    """
    segments = []
    for rank in range(4):
        origin, peer = Origin(rank=rank, host="h"), (rank + 2) % 4
        for step in (2, 3):
            at = step * 1000 * MS
            segments.append(Segment(origin, "data", "data", at, at + MS, step=step))
            if step == 3 and rank not in set(forward):
                continue
            begin = at + (MS if rank < 2 else 50 * MS)
            segments.append(Segment(origin, "forward", "forward", begin, begin + 49 * MS, step=step, micro_batch=0))
            if step == 3:
                continue
            more = {"step": step, "peer": peer, "micro_batch": 0}
            come, reduced = at + (150 * MS if rank < 2 else 50 * MS), at + 300 * MS
            segments.append(Segment(origin, "collective", "recv", at, come, group="pipeline", **more))
            begin = come if rank < 2 else at + 99 * MS
            segments.append(Segment(origin, "backward", "backward", begin, begin + 50 * MS, step=step, micro_batch=0))
            group = {"step": step, "group": "reduce", "group_ranks": "0:2:1" if rank < 2 else "2:4:1", "seq": step}
            segments.append(Segment(origin, "collective", "reduce_scatter", reduced - 9 * MS, reduced, **group))
            segments.append(Segment(origin, "step", "step", at, reduced, step=step))
    signs = {rank: round(at_s * 1e9) for rank, at_s in signs_s.items()}
    marks = {rank: LateStep(3, signs[rank], waits.get(rank, {})) for rank in late}
    error_ns = None if clock_error_s is None else round(clock_error_s * 1e9)
    return judge_stop(
        segments, 90_000 * MS, 1.0, ended=False, last_sign_ns=signs, late_steps=marks, clock_error_ns=error_ns
    )


def test_a_process_that_is_stopped_is_told_by_its_signs_not_by_its_record() -> None:
    # Rank 2 takes its record of step 3 with it; rank 3 has all that it needs but rank 2's part of the reduction.
    signs = {0: 85.0, 1: 83.0, 2: 2.3, 3: 60.0}
    # Parameters are gathered inside the forward pass, so that rank 3's record alone would call that its own work.
    waits = {3: {"waits_for": "all_gather", "group": "gather", "group_ranks": "2:4:1"}}
    waits[1] = {"waits_for": "recv", "group": "pipeline", "peer": 3, "micro_batch": 0}
    stop = stop_of_a_pipeline(signs_s=signs, late=(0, 1, 3), forward=(0, 1), waits=waits)
    assert (stop.state, stop.silent) == ("silent", (2,)), stop.line
    assert "its last sign of life is 88 s old, and those of all others go on" in stop.line
    assert stop.waiting == {0: (2, 0), 3: (2, 0), 1: (2, 1)}


@pytest.mark.parametrize(
    ("clock_error_s", "state", "text"),
    [
        (0.002, "silent", "(the clocks of their hosts differ by up to 2 ms)"),
        (50.0, "silent", "differ by up to 50 s"),
        (56.0, "cannot tell", "the signs of life of rank 2 end 57.7 s before those of the others, but the clocks"),
        (None, "suspected", "rank 2 may be silent, in step 3; 3 ranks wait for it"),
    ],
)
def test_signs_of_several_hosts_tell_no_more_than_their_clocks(
    clock_error_s: float | None, state: str, text: str
) -> None:
    signs = {0: 85.0, 1: 83.0, 2: 2.3, 3: 60.0}
    waits = {3: {"waits_for": "all_gather", "group": "gather", "group_ranks": "2:4:1"}}
    waits[1] = {"waits_for": "recv", "group": "pipeline", "peer": 3, "micro_batch": 0}
    stop = stop_of_a_pipeline(signs_s=signs, late=(0, 1, 3), forward=(0, 1), waits=waits, clock_error_s=clock_error_s)
    assert stop.state == state, stop.line
    assert text in stop.line


def stop_in_a_pass(silent: tuple[int, ...], last_sign_s: float, error_ns: int) -> Stop:
    """Stop where four ranks of four hosts wait in an all-reduce but for some, which never ended their forward pass."""
    segments = []
    for rank in range(4):
        origin = Origin(rank=rank, host=f"h{rank}")
        for step in (2, 3):
            at = step * 100 * MS
            group = {"group": "reduce", "group_ranks": "0:4:1", "seq": step, "step": step}
            if step == 2 or rank not in silent:
                segments.append(Segment(origin, "forward", "forward", at, at + 60 * MS, step=step))
            if step == 2:
                segments.append(Segment(origin, "collective", "all_reduce", at + 60 * MS, at + 70 * MS, **group))
                segments.append(Segment(origin, "step", "step", at, at + 70 * MS, step=2))
    signs = dict.fromkeys((0, 1, 3), 59 * 10**9) | {2: round(last_sign_s * 1e9)}
    return judge_stop(segments, 60 * 10**9, 0.1, ended=False, last_sign_ns=signs, clock_error_ns=error_ns)


@pytest.mark.parametrize(("error_ns", "state"), [(1_000_000, "silent"), (60_000_000_000, "cannot tell")])
def test_of_ranks_in_one_operation_none_is_told_by_less_than_the_clocks(error_ns: int, state: str) -> None:
    stop = stop_in_a_pass((1, 2), 1.0, error_ns)
    assert (stop.state, stop.silent) == (state, (2,) if state == "silent" else ()), stop.line


@pytest.mark.parametrize("error_ns", [0, 1_000_000, 60_000_000_000])
def test_clocks_that_hide_a_sign_leave_what_places_tell(error_ns: int) -> None:
    stop = stop_in_a_pass((2,), 1.0, error_ns)
    assert (stop.state, stop.silent) == ("silent", (2,)), stop.line


def test_signs_are_on_the_reference_clock_with_their_error(tmp_path: Path) -> None:
    events: list[Event] = []
    for rank, host in ((0, "a"), (1, "b")):
        origin, offset_ns = Origin("monitor", rank=rank, host=host), rank * 10_000 * MS
        more = {"clock_offset_ns": offset_ns, "clock_error_ns": 3_000}
        events.append(Segment(origin, "step", "step", offset_ns, MS + offset_ns, step=1, **more))
        events.append(Counter(origin, "gpu.power", offset_ns + 5 * MS, offset_ns + 5 * MS, 1.0, "W", **more))
        events.append(Mark(origin, "late", offset_ns + (7 + rank) * MS, step=2, **more))
    columns = page_columns.Columns([write(tmp_path, events)])
    columns.refresh()
    signs = {rank: sign for file in columns.files for rank, sign in file.signs.items()}
    assert signs == {0: (7 * MS, 3_000), 1: (8 * MS, 3_000)}
    assert max(file.last_ns for file in columns.files) == 8 * MS


def test_without_signs_of_life_the_posted_receives_accuse_nobody() -> None:
    for signs, late in (({}, ()), (dict.fromkeys(range(4), 2.3), ()), ({0: 2.31, 1: 2.31, 2: 2.3, 3: 2.31}, ())):
        stop = stop_of_a_pipeline(signs_s=signs, late=late)
        assert (stop.state, stop.silent) == ("cannot tell", ()), stop.line


def test_a_rank_whose_record_ended_steps_before_the_others_stopped_is_not_accused() -> None:
    segments = []
    for rank in range(4):
        for step in (2, 3) if rank == 2 else (14, 15):
            at = step * 1000 * MS
            segments.append(Segment(Origin(rank=rank), "forward", "forward", at, at + 9 * MS, step=step))
            more = {"group": "reduce", "group_ranks": "0:4:1", "seq": step, "step": step}
            segments.append(Segment(Origin(rank=rank), "collective", "all_reduce", at + 9 * MS, at + 99 * MS, **more))
    signs = {0: 90 * 10**9, 1: 90 * 10**9, 2: 3 * 10**9, 3: 90 * 10**9}
    marks = {rank: LateStep(15, signs[rank], {}) for rank in (0, 1, 3)}
    stop = judge_stop(segments, 90_000 * MS, 1.0, ended=False, last_sign_ns=signs, late_steps=marks)
    assert stop.silent == (), stop.line


def events_of_start(rank: int, attempt: int, steps: Iterable[int], begin_ms: int) -> list[Event]:
    """Whole steps of 400 ms of one of four ranks in one start, as the monitor writes them."""
    origin, events = Origin("monitor", attempt=attempt, rank=rank, host="h"), list[Event]()
    for number, step in enumerate(steps):
        at = (begin_ms + 400 * number) * MS
        events.append(Segment(origin, "forward", "forward", at, at + 100 * MS, step=step))
        events.append(Segment(origin, "backward", "backward", at + 100 * MS, at + 300 * MS, step=step))
        events.append(reduction(origin, step, at + 250 * MS, at + 310 * MS))
        events.append(Segment(origin, "optimizer", "optimizer", at + 310 * MS, at + 320 * MS, step=step))
        events.append(Segment(origin, "step", "step", at, at + 320 * MS, step=step))
    return events


def reduction(origin: Origin, step: int, start_ns: int, end_ns: int) -> Segment:
    names = "collective", "all_reduce"
    return Segment(origin, *names, start_ns, end_ns, step=step, group="reduce", group_ranks="0:4:1", seq=step)


def late_marks(rank: int, attempt: int, step: int, at_ms: Iterable[int], offset_ms: int = 0) -> list[Mark]:
    """Marks of a rank that waits for the reduction; its clock is `offset_ms` ahead."""
    origin, waits = Origin("monitor", attempt=attempt, rank=rank, host="h"), {"waits_for": "all_reduce"}
    waits |= {"group": "reduce", "group_ranks": "0:4:1"}
    offset_ns = offset_ms * MS
    return [
        Mark(origin, "late", at * MS + offset_ns, step, clock_offset_ns=offset_ns, attributes=waits) for at in at_ms
    ]


def readings_to(until_ms: int, rank: int, attempt: int) -> list[Event]:
    origin = Origin("gpu", attempt=attempt, rank=rank, host="h")
    return [Counter(origin, "gpu.power", at * MS, at * MS, 100.0, "W") for at in range(0, until_ms + 1, 1000)]


@pytest.mark.parametrize(("last", "silent"), [(74, ()), (74, (0,)), (76, (0,))])
def test_late_marks_of_an_earlier_start_do_not_count(tmp_path: Path, last: int, silent: tuple[int, ...]) -> None:
    # Start 0 hung in step 76, where three ranks waited; start 1 has come to step `last`.
    events: list[Event] = []
    for rank in range(4):
        events += events_of_start(rank, 0, range(70, 76), 0)
        if rank != 2:
            events += late_marks(rank, 0, 76, (7_400, 12_400, 22_400))
        events += events_of_start(rank, 1, range(72, last), 60_000)
        origin, begin = Origin("monitor", attempt=1, rank=rank, host="h"), (60_000 + 400 * (last - 72)) * MS
        if rank not in silent:
            events.append(Segment(origin, "forward", "forward", begin, begin + 100 * MS, step=last))
        if silent and rank not in silent:
            events.append(Segment(origin, "backward", "backward", begin + 100 * MS, begin + 300 * MS, step=last))
        events.append(Mark(origin, "late", begin + 10_000 * MS, step=last))
        events += readings_to(80_000, rank, 1)
    stop = PageSource([write(tmp_path, events)]).view.stop
    assert (stop.state, stop.silent) == ("silent" if silent else "cannot tell", silent), stop.line


@pytest.mark.parametrize("marked_ms", [40_000, 50_000])
def test_a_wait_counts_only_where_its_mark_is_newer_than_the_record(tmp_path: Path, marked_ms: int) -> None:
    # Rank 2 was stopped in step 76 for 42 s while the others waited for its part of the reduction, and went on.
    events: list[Event] = []
    for rank in range(4):
        events += events_of_start(rank, 0, range(70, 76), 0)
        origin, begin = Origin("monitor", attempt=0, rank=rank, host="h"), 2_400
        pass_ms = 42_000 if rank == 2 else 100
        middle, end = (begin + pass_ms) * MS, (begin + pass_ms + 200) * MS
        events.append(Segment(origin, "forward", "forward", begin * MS, middle, step=76))
        events.append(Segment(origin, "backward", "backward", middle, end, step=76))
        events.append(reduction(origin, 76, (begin + 250) * MS, (begin + 42_250) * MS))
        if rank != 2:  # by its own clock each mark is newer than the record
            events += late_marks(rank, 0, 76, (begin + 5_000, begin + marked_ms), offset_ms=10_000)
        else:
            events.append(Mark(origin, "late", (begin + 50_000) * MS, step=76))
        events += readings_to(70_000, rank, 0)
    stop = PageSource([write(tmp_path, events)]).view.stop
    assert stop.silent == (() if marked_ms < 42_250 else (2,)), stop.line


def test_a_start_that_resumed_far_back_is_judged_by_its_own_steps(tmp_path: Path) -> None:
    for rank in range(4):
        origin, begin = Origin("monitor", attempt=1, rank=rank, host="h"), 60_800 * MS
        last: list[Event] = [Segment(origin, "forward", "forward", begin, begin + 100 * MS, step=72)]
        if rank != 1:
            last.append(Segment(origin, "backward", "backward", begin + 100 * MS, begin + 300 * MS, step=72))
        last += [Mark(origin, "late", begin + 10_000 * MS, step=72), *readings_to(80_000, rank, 1)]
        # One file holds both starts, in batches.
        with EventWriter(tmp_path / "events", origin, "arrow") as writer:
            writer.write(events_of_start(rank, 0, range(76, 81), 0))
            writer.write(events_of_start(rank, 1, range(70, 72), 60_000))
            writer.write(last)
    view = PageSource([tmp_path]).view
    assert (view.stop.state, view.stop.silent) == ("silent", (1,)), view.stop.line
    assert "of step 72" in view.stop.line


@pytest.mark.parametrize(("processor_s", "wall_s", "pause_s"), [(4.0, 2.0, 20.0), (0.1, 30.0, 30.0), (0.0, 0.0, 1.0)])
def test_the_pause_between_readings_counts_all_threads_and_slow_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, processor_s: float, wall_s: float, pause_s: float
) -> None:
    now = {"processor": 0.0, "wall": 0.0}
    clock = SimpleNamespace(process_time=lambda: now["processor"], monotonic=lambda: now["wall"])
    readings: list[float] = []

    class SlowColumns(page_columns.Columns):
        def refresh(self, progress: Any = None) -> bool:
            readings.append(now["wall"])
            now["processor"] += processor_s
            now["wall"] += wall_s
            return super().refresh(progress)

    monkeypatch.setattr(page_source, "time", clock)
    monkeypatch.setattr(page_source, "Columns", SlowColumns)
    source = PageSource([write(tmp_path, events_of_run(steps=3))])
    for number in (2, 3):
        now["wall"] += pause_s - 0.5
        source.refresh()
        assert len(readings) == number - 1
        now["wall"] += 0.5
        source.refresh()
        assert len(readings) == number


def test_of_two_ranks_that_one_group_waits_for_none_is_accused() -> None:
    stop = run_that_stops([2, 3])
    assert stop.state != "silent"
    assert stop.silent in ((), (2, 3))


def test_of_two_ranks_the_one_whose_readings_end_as_it_stops_is_silent() -> None:
    stop = run_that_stops([2, 3], signs=[0, 1, 3], last_signs_s={2: 100.0}, begin_s=100)
    assert (stop.state, stop.silent, stop.alike) == ("silent", (2,), (3,))


def test_a_rank_that_never_had_a_reading_is_not_accused_beside_one_that_has() -> None:
    stop = run_that_stops([2, 3], signs=[0, 1, 3], begin_s=100)
    assert stop.state != "silent"
    assert stop.silent in ((), (2, 3))


def test_readings_that_ended_long_before_the_stop_accuse_nobody() -> None:
    stop = run_that_stops([2, 3], signs=[0, 1, 3], last_signs_s={2: 90.0}, begin_s=100)
    assert stop.state != "silent"


def test_groups_of_the_page_are_those_of_the_layout(tmp_path: Path) -> None:
    layout = ParallelLayout(tp=2, cp=2, dp=2, dp_replicate=2, pp=2)
    write_run(tmp_path, layout, 3, Faults(silent=13, silent_step=3))
    view = PageSource([tmp_path]).view
    for rank in (0, 13, 30):
        for dimension in layout.dimensions:
            assert view.group(dimension, rank) == list(layout.group_of(dimension, rank)), dimension
    facts, arrays = unpack(view.overview())
    assert arrays["dp_replicate"].tolist() == [layout.coordinates(rank).dp_replicate for rank in range(32)]
    assert arrays["dp"].tolist() == [layout.coordinates(rank).dp for rank in range(32)]
    # Replicas wait for each other, so that the silent rank of one is found behind all ranks of the other.
    assert view.stop.silent == (13,)
    assert len(view.stop.waiting) >= 28
    assert facts["stop"]["line"].startswith("rank 13 (host-0001) is silent")


def test_a_timeline_has_operations_that_never_ended(faulty: PageSource) -> None:
    facts, _ = unpack(faulty.get("events", {"ranks": "13,21", "first": "12", "last": "12"}))
    waiting, silent = sorted(facts["open"], key=lambda one: one["rank"])
    assert silent["what"] == "in forward of micro-batch 0"
    assert waiting["what"].startswith("waits in ")
    before, _ = unpack(faulty.get("events", {"ranks": "13,21", "first": "10", "last": "10"}))
    assert before["open"] == []


def test_a_record_that_goes_on_accuses_nobody() -> None:
    assert run_that_stops([2], until_s=1.0).state == "running"


def test_a_run_that_ended_accuses_nobody() -> None:
    assert run_that_stops([2], work=False).state == "ended"


def test_ranks_that_all_stand_in_one_collective_accuse_nobody() -> None:
    stop = run_that_stops([])
    assert (stop.state, stop.silent) == ("cannot tell", ())


def test_a_run_that_was_killed_in_its_passes_accuses_nobody() -> None:
    assert run_that_stops([0, 1, 2, 3]).state == "cannot tell"
    assert run_that_stops([0, 2, 3]).state == "cannot tell"


def test_measures_leave_out_steps_without_an_end(faulty: PageSource) -> None:
    table, _ = faulty.view.measures["step"]
    assert np.isnan(table[-1]).all()
    assert np.isfinite(table[:-1]).all()


@pytest.mark.parametrize(("straggler", "dp", "state"), [(1, 4, "found"), (None, 4, "none"), (1, 2, "cannot tell")])
def test_the_maps_open_with_what_the_verdict_says(tmp_path: Path, straggler: int | None, dp: int, state: str) -> None:
    write_run(tmp_path, ParallelLayout(tp=1, pp=1, dp=dp), 30, Faults(straggler=straggler))
    facts, arrays = unpack(PageSource([tmp_path]).get("overview", {}))
    [verdict] = [each for each in facts["verdicts"] if each["subject"] == "straggler"]
    assert verdict["state"] == state
    opening, titles = facts["opening"], [each["name"] for each in facts["measures"]]
    assert titles[opening["measure"]] == (SLOWER if state == "found" else "forward")
    assert opening["statistic"] == ("mean" if state == "found" else "median")
    assert (verdict["line"] in opening["why"]) == (state != "found")
    assert (SLOWER in titles) == (state != "cannot tell")
    assert len(arrays[f"median{opening['measure']}"]) == dp


def test_statistics_of_ranks() -> None:
    table = np.array([[1.0, 5.0, np.nan], [2.0, 5.0, np.nan], [3.0, 5.0, np.nan], [4.0, 5.0, 7.0]])
    result = statistics(table)
    np.testing.assert_allclose(result["mean"], [2.5, 5.0, 7.0])
    np.testing.assert_allclose(result["trend"][:2], [3.0, 0.0])
    assert np.isnan(result["trend"][2])
    assert result["p99"][0] == pytest.approx(3.97)
    np.testing.assert_allclose(result["median"], [2.5, 5.0, 7.0])


def test_levels_span_the_values_and_miss_none() -> None:
    levels, low, high = pack_levels(np.array([[0.0, 1.0], [np.nan, 0.5]]))
    assert levels[1, 0] == MISSING
    assert levels[0, 0] == 0
    assert levels[0, 1] == 254
    assert low < 0.01
    assert high > 0.99
    assert (pack_levels(np.full((2, 2), 3.0))[0] != MISSING).all()
    assert (pack_levels(np.full((2, 2), np.nan))[0] == MISSING).all()


def test_a_payload_comes_back_as_it_was() -> None:
    arrays = {"a": np.arange(3, dtype=np.uint8), "b": np.array([[1.5, np.nan]], np.float64)}
    facts, back = unpack(pack({"x": math.nan, "t": (1, np.int32(2)), "ü": "ä"}, arrays))
    assert facts == {"x": None, "t": [1, 2], "ü": "ä"}
    assert back["b"].shape == (1, 2)
    np.testing.assert_array_equal(back["a"], arrays["a"])
    with pytest.raises(ValueError, match="int64"):
        pack({}, {"a": np.arange(3)})


def test_a_timeline_matches_messages_and_collectives(faulty: PageSource) -> None:
    facts, arrays = unpack(faulty.get("events", {"ranks": "5:30:8", "first": "9", "last": "9"}))
    names = [facts["names"]["name"][code] for code in arrays["name"]]
    rows = [row for row in zip(arrays["key"].tolist(), names, arrays["rank"].tolist(), strict=True) if row[0] >= 0]
    sends = {key: rank for key, name, rank in rows if name == "send"}
    pairs = [(sends[key], rank) for key, name, rank in rows if name == "recv"]
    assert (5, 13) in pairs
    assert (13, 5) in pairs
    assert all(abs(one - other) == 8 for one, other in pairs)
    assert (arrays["end_ms"] >= arrays["start_ms"]).all()


def test_a_step_that_was_taken_again_is_shown_as_it_was_last(faulty: PageSource) -> None:
    _, arrays = unpack(faulty.get("events", {"ranks": "0:8:1", "first": "3", "last": "3"}))
    assert set(arrays["attempt"]) == {1}
    assert arrays["end_ms"].max() < 5000


def test_a_rank_has_flows_operations_and_marks(faulty: PageSource) -> None:
    facts, arrays = unpack(faulty.get("rank", {"rank": "21"}))
    assert facts["place"] == "forward of micro-batch 0"
    flows = {(flow["name"], flow["group"]): flow for flow in facts["flows"]}
    assert flows["reduce_scatter", "reduce"]["group_ranks"] == "17:24:2"
    assert flows["recv", "pipeline forward"]["peer"] == 13
    assert flows["reduce_scatter", "reduce"]["a_step"] == 1
    assert facts["operations"][0]["step"] == 12
    assert len(arrays["series0"]) == 12
    facts, _ = unpack(faulty.get("rank", {"rank": "10"}))
    assert [mark["text"] for mark in facts["marks"] if mark["name"] == "failure"] == [HOSTILE]


def test_counters_are_a_range_and_one_line_each(faulty: PageSource) -> None:
    facts, arrays = unpack(faulty.get("counters", {"name": "gpu.power", "rank": "3"}))
    assert [one["rank"] for one in facts["series"]] == [3]
    known = np.isfinite(arrays["middle"])
    assert (arrays["low"][known] <= arrays["middle"][known]).all()
    assert (arrays["middle"][known] <= arrays["high"][known]).all()
    facts, arrays = unpack(faulty.get("counters", {"name": "nic.xmit_bytes", "rank": "3", "from": "31", "to": "32"}))
    assert facts["unit"] == "bytes/s"
    assert facts["series"][0]["label"] == "host-0000 mlx5_0"
    assert np.diff(arrays["at_s"]).max() < 0.02  # hundredths of a second, as they were read


def test_readings_of_one_series_keep_their_sum(tmp_path: Path) -> None:
    origin = Origin(host="h", rank=None)
    readings: list[Event] = [
        Counter(origin, "nic.rcv_bytes", at * MS, (at + 10) * MS, 1000.0, "bytes", attributes={"port": "p"})
        for at in range(100, 1100, 10)
    ]
    source = PageSource([write(tmp_path, [*events_of_run(ranks=2, steps=3), *readings])])
    _, arrays = unpack(source.get("counters", {"name": "nic.rcv_bytes"}))
    assert np.nanmean(arrays["series0"]) == pytest.approx(1000.0 / 0.010)


def test_readings_of_several_starts_are_one_series(tmp_path: Path) -> None:
    for attempt in range(3):
        events = [
            Counter(Origin(rank=rank, attempt=attempt), "gpu.power", at, at, 500.0 + attempt, "W")
            for rank in (0, 1)
            for at in range(attempt * 1000 * MS, attempt * 1000 * MS + 5 * MS, MS)
        ]
        write(tmp_path, events)
    source = PageSource([tmp_path])
    [row] = source.view.counters()
    assert (row["series"], row["readings"]) == (2, 30)
    facts, arrays = unpack(source.get("counters", {"name": "gpu.power", "rank": "1"}))
    assert [one["rank"] for one in facts["series"]] == [1]
    assert np.nanmax(arrays["series0"]) == 502.0
    assert np.nanmin(arrays["series0"]) == 500.0


def test_a_life_has_restart_and_eviction_with_evidence(faulty: PageSource) -> None:
    facts, arrays = unpack(faulty.get("overview", {}))
    marks = {mark["name"]: mark for mark in facts["marks"]}
    assert "Xid 79" in marks["eviction"]["text"]
    assert "node host-0001" in marks["eviction"]["facts"]
    assert [row["start"] for row in facts["starts"]] == [0, 1]
    assert [span["ended"] for span in facts["spans"]] == [False, False]
    mfu = arrays["mfu"]
    assert np.isfinite(mfu[:-1]).all()
    assert 0.05 < float(np.nanmedian(mfu)) < 0.55


def test_marks_that_all_ranks_say_alike_are_one(tmp_path: Path) -> None:
    more = [Mark(Origin(run="r", host="h", rank=rank, attempt=0), "nan", 5, step=2, text=HOSTILE) for rank in range(4)]
    source = PageSource([write(tmp_path, [*events_of_run(ranks=4, steps=12), *more])])
    [mark] = source.view.marks()
    assert mark["ranks"] == "ranks 0-3"
    assert mark["text"] == HOSTILE


def test_the_export_is_one_file_whose_data_is_no_markup(
    faulty: PageSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"index.html": b"", "app.js": b"let a = '</script>';", "app.css": b"a{}"}
    monkeypatch.setattr(export, "front_end", lambda: files)
    exported = export.export_page(faulty, tmp_path)
    text = exported.path.read_text()
    assert exported.num_omitted == 0
    assert text.count("<img") == 0
    assert "</script><img" not in text
    blocks = dict(re.findall(r'data-key="([^"]+)">([^<]+)</script>', text))
    facts, _ = unpack(gzip.decompress(base64.b64decode(blocks["overview"])))
    assert facts["stop"]["silent"] == [21]
    assert "rank?rank=21" in blocks
    assert "events?ranks=5%3A30%3A8&amp;first=12&amp;last=12" in blocks
    assert "connect-src" not in text
    assert "default-src 'none'" in text


def test_an_export_leaves_out_what_does_not_fit(
    faulty: PageSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export, "front_end", lambda: {"index.html": b"", "app.js": b"", "app.css": b""})
    exported = export.export_page(faulty, tmp_path, max_bytes=20_000)
    assert exported.num_omitted > 0
    assert exported.num_bytes < 60_000


def test_nothing_that_can_be_read_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "front_end", dict)
    (tmp_path / "a.txt").write_text("nothing")
    with pytest.raises(ConfigError, match="holds nothing that can be read"):
        PageSource([tmp_path])
    done = CliRunner().invoke(observe, ["page", str(tmp_path / "none"), "--out", str(tmp_path / "out")])
    assert done.exit_code != 0
    assert isinstance(done.exception, ConfigError)
    assert not (tmp_path / "out").exists()


def test_a_page_that_was_not_built_is_said_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def front_end() -> None:
        raise ConfigError("page", None, "its front end is not built", "build it")

    monkeypatch.setattr(server, "front_end", front_end)
    done = CliRunner().invoke(observe, ["page", str(tmp_path / "none"), "--out", str(tmp_path / "out")])
    assert str(done.exception) == "page: its front end is not built; build it"


def test_a_silent_rank_that_moved_is_named_on_its_host_of_the_last_start(tmp_path: Path) -> None:
    write_run(tmp_path / "a", ParallelLayout(tp=1, pp=1, dp=4), 12, Faults(silent=2, silent_step=12, restart_step=6))
    # What the start before left on another host is read last, and is of an earlier start.
    before = Segment(Origin(rank=2, attempt=0, host="host-gone"), "forward", "forward", 1, 2, step=1)
    source = PageSource([tmp_path / "a", write(tmp_path / "b", [before])])
    assert len(source.view.places[2]) == 2
    facts, arrays = unpack(source.get("overview", {}))
    assert facts["stop"]["line"].startswith("rank 2 (host-0000) is silent")
    assert facts["hosts"][arrays["host"][2]] == "host-0000"
    other = write(tmp_path / "c", [Mark(Origin(rank=2, attempt=1, host="host-other"), "note", 1)])
    facts, _ = unpack(PageSource([tmp_path / "a", other]).get("overview", {}))
    assert facts["stop"]["line"].startswith("rank 2 is silent")
