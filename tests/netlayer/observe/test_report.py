"""Verdicts on a run, from events with a known fault, and `netlayer observe report` as text, record and page."""

import json
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from netlayer.observe.command import observe
from netlayer.observe.events import Counter, Event, EventWriter, Mark, Origin, Segment
from netlayer.observe.verdicts.judge import judge
from netlayer.observe.verdicts.run import collect
from netlayer.observe.verdicts.verdict import Verdict

MS = 1_000_000
HOSTILE = "<script>alert(1)</script>\x1b[31m"


def events_of_run(
    *,
    ranks: int = 8,
    steps: int = 40,
    slow: dict[int, float] | None = None,
    slow_from: int = 1,
    gc_ms: dict[int, float] | None = None,
    attempt: int = 0,
    first: int = 1,
    begin_ms: float = 0.0,
    hosts: Iterable[str] | None = None,
    timing: str = "device",
) -> Iterator[Event]:
    """Ranks with 60 ms of forward, 30 ms of backward and a reduction of 1 MiB in 10 ms that waits for the slowest.

    Args:
        slow: factor of forward and backward, by rank, from step `slow_from` on.
        gc_ms: pause of rank 1 in some steps.
    """
    rng = np.random.default_rng(1)
    names = list(hosts or [f"h{rank // 4}" for rank in range(ranks)])
    origins = [Origin(run="r", attempt=attempt, host=names[rank], rank=rank, pp=0, dp=rank) for rank in range(ranks)]
    yield from (Mark(origin, "run_start" if not attempt else "restart", round(begin_ms * MS)) for origin in origins)
    at = begin_ms
    for step in range(first, first + steps):
        factors = [(slow or {}).get(rank, 1.0) if step >= slow_from else 1.0 for rank in range(ranks)]
        parts = rng.normal(1, 0.004, (ranks, 2)) * [60.0, 30.0] * np.array(factors)[:, None]
        pauses = [(gc_ms or {}).get(step, 0.0) if rank == 1 else 0.0 for rank in range(ranks)]
        ready = [at + parts[rank].sum() + pauses[rank] for rank in range(ranks)]
        end = max(ready) + 10
        for rank, origin in enumerate(origins):
            middle = at + parts[rank, 0]
            more: dict[str, Any] = {"step": step, "clock_offset_ns": 0, "clock_error_ns": 1000, "timing": timing}
            yield Segment(origin, "step", "step", round(at * MS), round(end * MS), **more)
            yield Segment(origin, "forward", "forward", round(at * MS), round(middle * MS), **more)
            yield Segment(
                origin, "backward", "backward", round(middle * MS), round((middle + parts[rank, 1]) * MS), **more
            )
            if pauses[rank]:
                yield Segment(
                    origin, "gc", "gc", round((ready[rank] - pauses[rank]) * MS), round(ready[rank] * MS), **more
                )
            yield Segment(origin, "wait", "reduce_scatter", round(ready[rank] * MS), round(end * MS), **more)
            group: dict[str, Any] = {"group": "reduce", "group_ranks": f"0:{ranks}:1", "seq": step, "bytes": 1 << 20}
            yield Segment(
                origin, "collective", "reduce_scatter", round(ready[rank] * MS), round(end * MS), **more, **group
            )
        at = end


def verdict(events: Iterable[Event], subject: str, link_gbps: float | None = None) -> Verdict:
    verdicts, _ = judge(collect(events), link_gbps)
    return next(one for one in verdicts if one.subject == subject)


def test_a_slow_rank_is_named_with_host_step_and_cause() -> None:
    found = verdict(events_of_run(slow={5: 1.5}, slow_from=21), "straggler")
    [row] = found.rows
    assert (found.state, row.rank, row.host, row.cause) == ("found", 5, "h1", "slow computation")
    assert abs(row.since_step - 21) <= 1
    assert row.slowdown == pytest.approx(0.5, abs=0.03)


def test_a_single_pause_is_not_the_cause_of_what_lasts() -> None:
    found = verdict(events_of_run(slow={1: 1.3}, slow_from=21, gc_ms={30: 900.0}), "straggler")
    [row] = found.rows
    assert (row.rank, row.cause) == (1, "slow computation")


def test_a_healthy_run_has_no_straggler_and_says_what_would_be_seen() -> None:
    found = verdict(events_of_run(), "straggler")
    assert (found.state, found.rows) == ("none", ())
    assert "8 ranks, 40 steps; one slower by" in found.line


def test_a_rank_that_waits_is_never_a_suspect() -> None:
    # All others are slow: rank 3 waits for them in every step.
    found = verdict(events_of_run(slow={rank: 1.5 for rank in range(8) if rank != 3}), "straggler")
    assert 3 not in [row.rank for row in found.rows]


def queued(events: Iterable[Event], waits_s: dict[int, float]) -> Iterator[Event]:
    """The events, and in every step what each rank waited for a processor."""
    for event in events:
        yield event
        if isinstance(event, Segment) and event.segment == "step" and event.origin.rank is not None:
            wait_s = waits_s.get(event.origin.rank, 0.001)
            times = event.start_ns, event.end_ns
            yield Counter(
                event.origin, "cpu.wait", *times, wait_s, "s", event.step, attributes={"timing": "host", "before_s": 0}
            )


def test_a_rank_whose_processor_was_taken_on_a_shared_host_is_not_accused() -> None:
    events = [*events_of_run(slow={5: 1.5}, hosts=["h"] * 8, timing="host")]
    found = verdict(queued(events, dict.fromkeys(range(8), 0.02) | {5: 0.065}), "straggler")
    assert (found.state, found.rows[0].rank, found.rows[0].confirmed) == ("suspected", 5, False)
    assert found.rows[0].cause == "waiting for a processor"
    assert "for 22% of their own time; the host is oversubscribed" in found.line


def test_a_host_whose_processors_are_taken_is_named_beside_healthy_ones() -> None:
    events = [*events_of_run(slow={5: 1.5}, hosts=[f"h{rank}" for rank in range(8)], timing="host")]
    found = verdict(queued(events, {5: 0.045}), "straggler")
    assert (found.state, found.rows[0].host, found.rows[0].cause) == ("found", "h5", "waiting for a processor")


def test_a_rank_that_is_slow_by_itself_is_accused_on_a_busy_host() -> None:
    events = [*events_of_run(slow={5: 1.5}, hosts=["h"] * 8, timing="host")]
    found = verdict(queued(events, dict.fromkeys(range(8), 0.02)), "straggler")
    assert (found.state, found.rows[0].cause, found.rows[0].confirmed) == ("found", "slow computation", True)


@pytest.mark.parametrize(
    ("steps", "slow_from", "state"),
    [(40, 1, "found"), (29, 1, "suspected"), (110, 21, "suspected"), (140, 21, "found")],
)
def test_another_programs_record_accuses_where_slowness_has_lasted(steps: int, slow_from: int, state: str) -> None:
    """Its first wandering noise looks like a straggler."""
    found = verdict(events_of_run(steps=steps, slow={5: 1.5}, slow_from=slow_from, timing="reported"), "straggler")
    assert (found.state, [row.rank for row in found.rows]) == (state, [5])
    assert ("cannot tell it from noise that moves on" in found.line) == (state == "suspected")


def test_noise_that_wanders_in_another_programs_record_accuses_nobody_at_any_look() -> None:
    looks = 0
    for seed in (0, 1, 5, 7):
        random = np.random.default_rng(seed)
        events: list[Event] = []
        rank, left = 0, 0
        for step in range(1, 36):
            if not left:
                rank, left = int(random.integers(8)), 1 + int(random.exponential(12))
            left -= 1
            noise = {each: float(random.normal(1.0, 0.02)) for each in range(8)}
            events += one_step(step, noise | {rank: 1.6})
            if step >= 8 and step % 3 == 0:
                looks += 1
                assert verdict(events, "straggler").state != "found", (seed, step)
    assert looks == 4 * 9


def one_step(step: int, slowness: dict[int, float]) -> Iterator[Event]:
    """A step of another program's record: forward passes, and a step as long as the slowest."""
    begin = step * 10**9
    for rank, factor in slowness.items():
        origin = Origin(run="other", attempt=0, host=f"h{rank}", rank=rank)
        more: dict[str, Any] = {"step": step, "timing": "reported"}
        yield Segment(origin, "forward", "forward", begin, begin + round(factor * 10**8), **more)
        yield Segment(origin, "step", "step", begin, begin + round(max(slowness.values()) * 10**8), **more)


def test_ranks_that_share_processors_uncounted_are_not_accused() -> None:
    found = verdict(events_of_run(slow={5: 1.5}, hosts=["h"] * 8, timing="host"), "straggler")
    assert found.state == "suspected"
    assert "what they waited for one is not recorded" in found.line


def test_two_ranks_cannot_be_told_apart() -> None:
    assert verdict(events_of_run(ranks=2, slow={1: 2.0}), "straggler").state == "cannot tell"


def test_irregular_garbage_collection_explains_drift_with_its_share() -> None:
    pauses = dict.fromkeys(range(61, 101, 3), 40.0)
    found = verdict(events_of_run(steps=100, gc_ms=pauses), "drift")
    assert found.state == "found"
    assert found.rows[0].cause == "garbage collection"
    assert found.rows[0].share == pytest.approx(1.0, abs=0.1)


def test_a_throttled_rank_explains_drift() -> None:
    events = [*events_of_run(steps=100, slow={2: 1.3}, slow_from=60)]
    events.append(Mark(Origin(rank=2), "throttle", 60 * 100 * MS, attributes={"reason": "thermal"}))
    found = verdict(events, "drift")
    assert (found.state, found.rows[0].cause) == ("found", "throttling")
    assert found.rows[0].share == pytest.approx(1.0, abs=0.1)


def test_steps_that_wait_longer_for_processors_are_suspected_alone() -> None:
    events = [*events_of_run(steps=100, hosts=["h"] * 8, timing="host", gc_ms=dict.fromkeys(range(61, 101), 40.0))]
    events = [event for event in events if not (isinstance(event, Segment) and event.segment == "gc")]
    late = next(event.start_ns for event in events if isinstance(event, Segment) and event.step == 61)
    waits: list[Event] = []
    for event in queued(events, {}):
        if isinstance(event, Counter) and event.origin.rank == 1 and event.start_ns >= late:
            event.value = 0.041
        waits.append(event)
    found = verdict(waits, "drift")
    assert (found.state, found.rows[0].cause) == ("suspected", "waiting for a processor")
    assert found.line.endswith("its hosts are oversubscribed")


def throttle_marks(reason: str) -> list[Event]:
    return [Mark(Origin(rank=rank), "throttle", 60 * 100 * MS, attributes={"reason": reason}) for rank in range(8)]


def test_throttling_of_every_rank_explains_drift() -> None:
    events = [*events_of_run(steps=100, slow=dict.fromkeys(range(8), 1.3), slow_from=60)]
    found = verdict([*events, *throttle_marks("hardware thermal slowdown")], "drift")
    assert (found.state, found.rows[0].cause) == ("found", "throttling of most ranks")
    assert found.rows[0].share == pytest.approx(1.0, abs=0.1)


def test_a_power_cap_that_every_rank_meets_is_no_throttling() -> None:
    events = [*events_of_run(steps=100, slow={2: 1.3}, slow_from=60)]
    found = verdict([*events, *throttle_marks("power cap")], "drift")
    assert (found.state, found.rows[0].cause) == ("found", "slow computation of stragglers")


def test_steady_steps_do_not_drift() -> None:
    assert verdict(events_of_run(steps=60), "drift").state == "none"


def test_a_link_is_at_its_limit_or_not() -> None:
    # 7/8 of 1 MiB in 10 ms are 0.734 Gb/s.
    assert verdict(events_of_run(), "link limit", link_gbps=0.75).state == "found"
    assert verdict(events_of_run(), "link limit", link_gbps=10.0).state == "none"
    unknown = verdict(events_of_run(), "link limit")
    assert unknown.state == "cannot tell"
    assert "0.734 Gb/s" in unknown.line


def sends(slow_rank: int | None) -> Iterator[Event]:
    """Pairs 0-1, 2-3, ... and 1-2, 3-4, ... exchange 4 MiB in 2 ms; those of the slow rank in 3."""
    for step in range(1, 13):
        for source in range(8):
            target = (source + 1) % 8
            length = 3 if slow_rank in (source, target) else 2
            begin = step * 100 * MS + source * 5 * MS
            for rank, peer, name in ((source, target, "send"), (target, source, "recv")):
                yield Segment(
                    Origin(rank=rank), "collective", name, begin, begin + length * MS, step=step, peer=peer,
                    bytes=4 << 20, flow=f"{source}-{target}-{step}", group="pipeline forward", clock_error_ns=0,
                )  # fmt: skip


def test_the_rank_that_all_slow_transfers_share_has_the_slow_link() -> None:
    found = verdict(sends(4), "slow link")
    assert found.state == "found"
    assert found.line.startswith("rank 4 is in all 2 slow groups")
    assert verdict(sends(None), "slow link").state == "none"


def test_a_receiver_that_comes_late_does_not_make_its_link_fast_nor_that_of_others_slow() -> None:
    events = []
    for event in sends(None):
        assert isinstance(event, Segment)
        pair, step = (event.origin.rank or 0, event.peer or 0), event.step or 0
        is_late = set(pair) != {4, 5} and event.name == "recv"
        # The bytes lie ready: the receive takes a tenth of the time that they took to come.
        events.append(replace(event, start_ns=event.end_ns + MS, end_ns=event.end_ns + MS + MS // 5)
                      if is_late and step != 3 else event)  # fmt: skip
    assert verdict(events, "slow link").state == "cannot tell"


def test_waits_inside_a_pass_clear_nobody_of_what_is_in_no_record() -> None:
    # As DDP in Kineto: rank 3 sleeps between its passes, and its peers wait for it inside their backward pass.
    events = []
    for step in range(1, 13):
        for rank in range(8):
            begin, origin = step * 300 * MS, Origin("kineto", rank=rank)
            own = begin + (210 if rank == 3 else 10) * MS
            rows = (
                ("step", begin, begin + 280 * MS),
                ("forward", begin, begin + 8 * MS),
                ("backward", own, begin + 275 * MS),
            )
            events += [
                Segment(origin, name, name, first, last, step=step, timing="reported") for name, first, last in rows
            ]
    answer = verdict(events, "straggler")
    assert answer.state == "cannot tell"
    assert answer.line.startswith("76% of the step of rank 3 is in no record, of its peers' 9%")


def test_one_pause_is_no_drift() -> None:
    events = []
    for event in events_of_run(steps=60):
        if isinstance(event, Segment) and (event.step or 0) > 50:
            event = replace(event, start_ns=event.start_ns + 59_000 * MS, end_ns=event.end_ns + 59_000 * MS)
        elif isinstance(event, Segment) and event.segment == "step" and event.step == 50:
            event = replace(event, end_ns=event.end_ns + 59_000 * MS)
        events.append(event)
    assert verdict(events, "drift").state == "none"


def test_a_record_with_more_holes_than_work_clears_nobody() -> None:
    # As FSDP2 in Kineto on the CPU: only the optimizer and the collectives are named.
    events = []
    for step in range(1, 13):
        for rank in range(8):
            begin, origin = step * 300 * MS, Origin("kineto", rank=rank)
            rows = (("step", 0, 280), ("collective", 100, 200), ("optimizer", 260, 270))
            events += [
                Segment(origin, name, name, begin + first * MS, begin + last * MS, step=step, timing="reported")
                for name, first, last in rows
            ]
    answer = verdict(events, "straggler")
    assert (answer.state, answer.line[:31]) == ("cannot tell", "63% of a step is in no record, "), answer.line


def test_a_port_that_falls_silent_is_off_its_period() -> None:
    events = [*events_of_run(steps=40)]
    ends = sorted({event.end_ns for event in events if isinstance(event, Segment) and event.segment == "step"})
    for port in range(4):
        for number, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
            value = 10.0 if port == 2 and number > 25 else 1000.0
            origin = Origin("nic_watch", host="h0")
            events.append(
                Counter(origin, "nic.xmit_bytes", begin, end, value, "bytes", attributes={"port": f"mlx5_{port}"})
            )
    found = verdict(events, "traffic")
    assert found.state == "found"
    assert [row.port for row in found.rows] == ["h0 mlx5_2 xmit_bytes"]
    assert verdict(events_of_run(), "traffic").state == "cannot tell"


def test_effective_time_counts_what_a_restart_costs() -> None:
    before = list(events_of_run(steps=20))
    # Steps 16 to 20 are taken again, 2 s after the first start's last step.
    last = max(event.end_ns for event in before) / MS
    again = list(events_of_run(steps=20, first=16, attempt=1, begin_ms=last + 2000))
    found = verdict([*before, *again], "effective time")
    assert [row.steps_lost for row in found.rows] == [5, 0]
    assert found.rows[1].down_before_s == pytest.approx(2.0, abs=0.01)
    assert "35 steps" in found.line
    assert "1 restart, at least 5 steps repeated" in found.line  # the first start's end was not recorded
    assert found.rows[0].lost_s == pytest.approx(0.5, rel=0.05)  # five steps of 100 ms


def test_a_trace_of_some_steps_has_no_effective_time() -> None:
    events = [event for event in events_of_run() if isinstance(event, Segment)]
    found = verdict(events, "effective time")
    assert (found.state, found.line) == ("cannot tell", "nothing says when the run began (the mark run_start)")


def write(folder: Path, events: Iterable[Event]) -> Path:
    """A run's output with one stream."""
    with EventWriter(folder / "events", Origin(run="r", rank=0)) as writer:
        writer.write(list(events))
    return folder


def test_the_command_names_the_straggler_and_fails(tmp_path: Path) -> None:
    run = write(tmp_path / "run", events_of_run(slow={5: 1.5}))
    result = CliRunner().invoke(observe, ["report", str(run), "--json", str(tmp_path / "record.json")])
    assert result.exit_code == 1
    assert result.stdout.startswith("straggler: found: rank 5 (h1) is ")
    record = json.loads((tmp_path / "record.json").read_text())
    assert (record["name"], record["source"]) == ("observe.report", "measured")
    assert [row["rank"] for row in record["rows"] if row["table"] == "straggler"] == [5]


def test_a_healthy_run_ends_with_0(tmp_path: Path) -> None:
    result = CliRunner().invoke(observe, ["report", str(write(tmp_path / "run", events_of_run()))])
    assert result.exit_code == 0
    assert "straggler: none" in result.stdout


def test_a_suspect_alone_is_no_reason_to_fail(tmp_path: Path) -> None:
    events = [*events_of_run(slow={5: 1.5}, hosts=["h"] * 8, timing="host")]
    run = write(tmp_path / "run", queued(events, dict.fromkeys(range(8), 0.02) | {5: 0.065}))
    result = CliRunner().invoke(observe, ["report", str(run), "--json", str(tmp_path / "record.json")])
    assert result.exit_code == 0
    assert result.stdout.startswith("straggler: suspected: rank 5 (h) is ")
    rows = json.loads((tmp_path / "record.json").read_text())["rows"]
    assert [row["confirmed"] for row in rows if row["table"] == "straggler"] == [False]


def test_files_of_nobody_are_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("nothing\n")
    result = CliRunner().invoke(observe, ["report", str(tmp_path)])
    assert result.exit_code != 0
    assert "holds nothing that can be read" in str(result.exception)


def test_hostile_names_and_lines_are_text_on_the_page_and_the_terminal(tmp_path: Path) -> None:
    events = [*events_of_run(slow={5: 1.5}, hosts=[HOSTILE] * 8)]
    events.append(Mark(Origin(rank=1, host=HOSTILE), "warning", 5, text=HOSTILE))
    run = write(tmp_path / "run", events)
    result = CliRunner().invoke(observe, ["report", str(run), "--out", str(tmp_path / "page")])
    page = (tmp_path / "page" / "report.html").read_text()
    assert "\x1b" not in result.output
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)" in page
    assert (tmp_path / "page" / "plots" / "heat_map.png").stat().st_size > 1000


def test_the_last_steps_alone_are_judged_when_asked(tmp_path: Path) -> None:
    run = write(tmp_path / "run", events_of_run(slow={5: 1.5}, slow_from=31, steps=60))
    result = CliRunner().invoke(observe, ["report", str(run), "--last-steps", "20", "--json", "-"])
    rows = json.loads(result.stdout)["rows"]
    [row] = [row for row in rows if row["table"] == "straggler"]
    assert (row["rank"], row["since_step"]) == (5, 41)


def test_garbage_collected_between_two_steps_is_that_of_the_next() -> None:
    def events() -> Iterator[Event]:
        for event in events_of_run(steps=20):
            if isinstance(event, Segment) and event.segment == "step":
                event.end_ns -= 5 * MS  # the host has 5 ms before the next one
            yield event
            if isinstance(event, Segment) and event.segment == "step" and event.origin.rank == 2:
                yield Segment(event.origin, "gc", "gc", event.end_ns + MS, event.end_ns + 4 * MS)

    run = collect(events())
    assert run.segments["gc"][5, 2] == pytest.approx(0.003)
    assert run.segments["gc"][:, 1].sum() == 0


def test_what_the_host_does_between_two_steps_is_own_time() -> None:
    def with_gap() -> Iterator[Event]:
        for event in events_of_run():
            late = isinstance(event, Segment) and event.origin.rank == 6
            if late and isinstance(event, Segment) and event.segment in ("step", "forward", "backward"):
                # Its step begins 40 ms late: the computation is shorter by what the host took before it.
                event.start_ns += (40 if event.segment == "step" else 0) * MS
            yield event

    run = collect(with_gap())
    assert run.own_s[5, 6] == pytest.approx(run.own_s[5, 0], rel=0.1)  # and not shorter by 40 ms


def test_a_wait_inside_the_forward_pass_is_no_computation() -> None:
    def events() -> Iterator[Event]:
        for step in range(1, 31):
            for rank in range(8):
                begin, wait = step * 100 * MS, 10 if rank == 2 else 50
                origin = Origin(rank=rank, host="h", pp=0)
                yield Segment(origin, "step", "step", begin, begin + 100 * MS, step=step, timing="device")
                yield Segment(origin, "forward", "forward", begin, begin + 90 * MS, step=step)
                yield Segment(origin, "wait", "all_gather", begin + 20 * MS, begin + (20 + wait) * MS, step=step)

    found = verdict(events(), "straggler")
    [row] = found.rows
    assert (row.rank, row.cause) == (2, "slow computation")
    assert row.slowdown == pytest.approx(0.8, abs=0.01)
