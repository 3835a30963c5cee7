"""Tables of a run from columns, against those of events one by one."""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from bench.page.__main__ import count_rows
from bench.page.synthetic import Faults, write_run
from netlayer.layout import ParallelLayout
from netlayer.observe.events import Counter, Event, EventWriter, Mark, Origin, Segment
from netlayer.observe.page.columns import Columns
from netlayer.observe.page.tables import run_of
from netlayer.observe.readers import open_evidence
from netlayer.observe.verdicts.judge import judge, straggler_rows
from netlayer.observe.verdicts.run import Run, collect
from tests.netlayer.observe.test_report import events_of_run, queued

MS = 1_000_000


def write(folder: Path, events: Iterable[Event], form: str = "arrow") -> Path:
    """One stream a rank, as a run leaves them."""
    writers: dict[int | None, EventWriter] = {}
    by_rank: dict[int | None, list[Event]] = {}
    for event in events:
        by_rank.setdefault(event.origin.rank, []).append(event)
    for rank, of_rank in by_rank.items():
        writers[rank] = EventWriter(folder / "events", of_rank[0].origin, form)  # type: ignore[arg-type]
        with writers[rank] as writer:
            writer.write(of_rank)
    return folder


def both(folder: Path) -> tuple[Run, Run]:
    columns = Columns([folder])
    assert columns.refresh()
    assert not columns.refresh()
    return run_of(columns)[0], collect(open_evidence(folder))


def random_run(seed: int) -> list[Event]:  # noqa: C901  (a run has many parts)
    """Two starts, the second of which takes steps again; pauses, checkpoints, waits within computation, gaps."""
    rng = np.random.default_rng(seed)
    events: list[Event] = []
    at_ms = 0.0
    for attempt, first in enumerate((1, 8)):
        begin_ms = at_ms
        for rank in range(3):
            origin = Origin(run="r", attempt=attempt, host=f"h{rank // 2}", rank=rank, pp=rank % 2, dp=0)
            events.append(Mark(origin, "run_start", round(begin_ms * MS), attributes={"world_size": 3}))
            now = begin_ms + 5
            for step in range(first, first + 12 - (rank == 2)):
                if rng.random() < 0.1 and step > first:
                    continue
                start = now
                for name in rng.permutation(["forward", "backward", "optimizer", "data", "gc", "checkpoint", "other"]):
                    if rng.random() < 0.3:
                        continue
                    length = float(rng.uniform(1, 9))
                    events.append(Segment(origin, name, name, round(now * MS), round((now + length) * MS), step=step))
                    if rng.random() < 0.5:
                        wait = now + length * float(rng.uniform(-0.3, 0.9))
                        until = wait + float(rng.uniform(0, 4))
                        times = (round(wait * MS), round(until * MS))
                        events.append(Segment(origin, "wait", "all_gather", *times, step=step))
                    now += length
                group = {"group": "reduce", "group_ranks": "0:3:1", "seq": step}
                times = (round(now * MS), round((now + 2) * MS))
                events.append(Segment(origin, "collective", "all_reduce", *times, step=step, **group))
                if rng.random() < 0.9:
                    times = (round(start * MS), round((now + 2) * MS))
                    events.append(Segment(origin, "step", "step", *times, step=step))
                    facts = {"timing": "host", "before_s": float(rng.uniform(0, 0.002))}
                    value = float(rng.uniform(0, 0.01))
                    events.append(Counter(origin, "cpu.wait", *times, value, "s", step=step, attributes=facts))
                now += 2
                for name in ("checkpoint", "gc", "evaluation"):
                    if rng.random() < 0.2:
                        times = (round((now + 0.2) * MS), round((now + 1.2) * MS))
                        events.append(Segment(origin, name, name, *times))
                        now += 1.5
                now += float(rng.uniform(0, 1))
            at_ms = max(at_ms, now)
            if attempt:
                events.append(Mark(origin, "run_end", round(now * MS)))
        at_ms += 30
    return events


@pytest.mark.parametrize("seed", range(8))
def test_tables_are_those_of_events_one_by_one(tmp_path: Path, seed: int) -> None:
    fast, slow = both(write(tmp_path, random_run(seed)))
    _compare(fast, slow)
    assert fast.collectives is not None
    assert slow.collectives is not None
    columns = ["rank", "step", "start_ns", "wait_for_peers_ns", "transfer_ns"]
    assert fast.collectives.select(columns).equals(slow.collectives.select(columns))


def test_a_healthy_run_in_json_lines_gives_the_same_tables(tmp_path: Path) -> None:
    events = queued(events_of_run(hosts=["h"] * 8, timing="host"), dict.fromkeys(range(8), 0.02))
    fast, slow = both(write(tmp_path, events, "jsonl"))
    _compare(fast, slow)
    assert fast.queued_s.any()


def _compare(fast: Run, slow: Run) -> None:
    for name in ("steps", "ranks", "hosts", "stages", "step_end_ns", "attempts", "starts", "facts", "notes"):
        assert getattr(fast, name) == getattr(slow, name), name
    assert fast.shares_processors == slow.shares_processors
    assert fast.num_marks == slow.num_marks
    for name in ("step_s", "own_s", "queued_s"):
        np.testing.assert_allclose(getattr(fast, name), getattr(slow, name), atol=1e-9, err_msg=name)
    assert list(fast.segments) == list(slow.segments)
    for name, times in fast.segments.items():
        np.testing.assert_allclose(times, slow.segments[name], atol=1e-9, err_msg=name)


def test_a_file_that_grows_is_read_again_and_others_are_not(tmp_path: Path) -> None:
    events = list(events_of_run(ranks=2, steps=4))
    write(tmp_path, events)
    columns = Columns([tmp_path])
    columns.refresh()
    before = {file.path: file for file in columns.files}
    more = Mark(Origin(run="r", rank=1), "nan", 7, text="<b>loss</b>")
    with EventWriter(tmp_path / "events", more.origin, "arrow") as writer:
        writer.write([more])
    assert columns.refresh()
    assert sum(before.get(file.path) is file for file in columns.files) == len(before)
    assert [mark.text for mark in run_of(columns)[0].marks] == ["<b>loss</b>"]


def test_a_file_of_no_known_kind_is_a_note(tmp_path: Path) -> None:
    write(tmp_path, events_of_run(ranks=2, steps=4))
    (tmp_path / "events" / "other.txt").write_text("not ours")
    columns = Columns([tmp_path])
    columns.refresh()
    assert len(columns.notes) == 1
    assert "skipped" in columns.notes[0]
    assert run_of(columns)[0].ranks == [0, 1]


def test_the_bench_counts_the_rows_of_a_run_that_is_given(tmp_path: Path) -> None:
    num_rows = write_run(tmp_path, ParallelLayout(tp=1, pp=1, dp=2), 3, Faults())
    assert count_rows(tmp_path) == num_rows > 0


def moved(host_before: str, host_after: str, slow_from: int = 99) -> list[Event]:
    """Two starts of four ranks, steps 1 to 20 and 21 to 40, of which rank 1 is on another host in the second."""
    events: list[Event] = []
    for rank in range(4):
        for step in range(1, 41):
            attempt = int(step > 20)
            host = f"h{rank}" if rank != 1 else (host_before, host_after)[attempt]
            origin = Origin(run="r", attempt=attempt, host=host, rank=rank, pp=0, dp=rank, tp=0)
            at, length = step * 200 * MS, (150 if rank == 1 and step >= slow_from else 100) * MS
            events.append(Segment(origin, "forward", "forward", at, at + length, step=step))
            events.append(Segment(origin, "step", "step", at, at + length, step=step))
    return events


@pytest.mark.parametrize(
    ("slow_from", "host"), [(1, ""), (11, ""), (21, "h-new"), (25, "h-new")], ids=["all", "before", "since", "after"]
)
def test_a_rank_that_moved_is_named_with_the_host_on_which_it_is_slow(
    tmp_path: Path, slow_from: int, host: str
) -> None:
    for run in both(write(tmp_path, moved("h-old", "h-new", slow_from))):
        assert run.hosts[1] == "h-new"
        assert list(run.host_since) == [1, 21, 1, 1]
        assert run.host_of(1, slow_from) == host
        _, detection = judge(run)
        [row] = straggler_rows(run, detection)
        assert (row.rank, row.host) == (1, "" if row.since_step < 21 else host)


def test_a_rank_on_two_hosts_in_one_start_has_none(tmp_path: Path) -> None:
    events = [*moved("h-old", "h-new"), Mark(Origin(attempt=1, host="h-other", rank=1), "note", 1)]
    steps = write(tmp_path / "a", [event for event in events if isinstance(event, Segment)])
    columns = Columns([steps, write(tmp_path / "b", [event for event in events if isinstance(event, Mark)])])
    assert columns.refresh()
    assert run_of(columns)[0].hosts == ["h0", "", "h2", "h3"]


def test_facts_of_a_run_are_its_ranks_not_its_drivers(tmp_path: Path) -> None:
    facts = {"layout": {"tp": 1, "pp": 2, "dp": 2}, "peak_flops": 1e12}
    events: list[Event] = [Mark(Origin(source="driver", host="a driver"), "run_start", 1, attributes={"count": 0})]
    events += [Mark(Origin(rank=rank), "run_start", 2 + rank, attributes=facts) for rank in range(2)]
    events += [Segment(Origin(rank=rank), "step", "step", 10, 20, step=1) for rank in range(2)]
    for run in both(write(tmp_path, events)):
        assert run.facts == facts
