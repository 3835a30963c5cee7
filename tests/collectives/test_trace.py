"""The structure that ui.perfetto.dev needs, and clocks that agree."""

from __future__ import annotations

import json
import pickle
import resource
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.watch.recorder import Recorder, Span
from collectives.watch.trace import RankTrace, chrome_trace, estimate_offset, hidden_share, record_trace, write_trace
from netlayer.errors import ConfigError

TIMES = st.integers(0, 10**6)
SPANS = st.builds(
    lambda name, lane, start, length, labels, flow: Span(name, lane, start, start + length, labels, flow),
    st.sampled_from(["send", "recv", "forward"]),
    st.sampled_from(["compute", "send forward", "gather", "step"]),
    TIMES,
    st.integers(0, 10**4),
    st.fixed_dictionaries({"step": st.integers(0, 3)}),
    st.sampled_from(["", "", "a", "b"]),
)
RANKS = st.lists(st.lists(SPANS, max_size=12), min_size=1, max_size=3)


def events_of(*ranks: RankTrace) -> list[dict[str, Any]]:
    return json.loads(json.dumps(chrome_trace(ranks)))["traceEvents"]


@given(spans=RANKS)
def test_every_event_is_what_the_format_asks_for(spans: list[list[Span]]) -> None:
    events = events_of(*(RankTrace(rank, own) for rank, own in enumerate(spans)))
    names = {(e["pid"], e["tid"]) for e in events if e["name"] == "thread_name"}
    for event in events:
        assert {"ph", "ts", "pid", "tid", "name"} <= event.keys()
        assert event["ph"] in {"X", "M", "s", "f"}
        assert event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            assert (event["pid"], event["tid"]) in names
    assert sum(event["ph"] == "X" for event in events) == sum(map(len, spans))
    starts, ends = ([e for e in events if e["ph"] == letter] for letter in "sf")
    assert [e["id"] for e in starts] == [e["id"] for e in ends]
    assert all(start["ts"] <= end["ts"] for start, end in zip(starts, ends, strict=True))


@given(spans=st.lists(SPANS, max_size=30))
def test_slices_of_a_thread_lie_inside_or_behind_each_other(spans: list[Span]) -> None:
    slices = [event for event in events_of(RankTrace(0, spans)) if event["ph"] == "X"]
    for tid in {event["tid"] for event in slices}:
        open_ends: list[float] = []
        for event in (event for event in slices if event["tid"] == tid):  # in order of time
            while open_ends and open_ends[-1] <= event["ts"] + 1e-6:
                open_ends.pop()
            end = event["ts"] + event["dur"]
            assert not open_ends or end <= open_ends[-1] + 1e-6
            open_ends.append(end)


def test_ranks_communicators_and_arguments_are_named() -> None:
    labels = {"micro_batch": 3, "chunk": 1, "bytes": 8, "phase": "steady"}
    trace = RankTrace(5, [Span("send", "send forward", 10_000, 12_500, labels), Span("f", "compute", 9_000, 9_500, {})])
    events = events_of(RankTrace(2, [], "idle"), RankTrace(5, trace.spans, "stage 1"))
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert processes == {2: "rank 2 (idle)", 5: "rank 5 (stage 1)"}
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert lanes == {0: "compute", 1: "send forward"}
    (sent,) = [e for e in events if e["name"] == "send 3.1"]
    assert (sent["pid"], sent["tid"], sent["ts"], sent["dur"]) == (5, 1, 1.0, 2.5)
    assert sent["args"] == labels


def test_an_arrow_goes_from_the_send_to_the_end_of_its_receive() -> None:
    send, recv = Span("send", "send", 50, 80, {}, "m"), Span("recv", "recv", 10, 90, {}, "m")
    events = events_of(RankTrace(1, [recv]), RankTrace(0, [send]))
    start, end = (next(e for e in events if e["ph"] == letter) for letter in "sf")
    assert (start["pid"], start["ts"], end["pid"], end["ts"], end["bp"]) == (0, 0.04, 1, 0.08, "e")
    alone = events_of(RankTrace(0, [send]))
    assert not [e for e in alone if e["ph"] in "sf"]


def test_clocks_of_other_hosts_are_moved_to_the_first() -> None:
    here = RankTrace(0, [Span("a", "compute", 1_000, 2_000, {})])
    there = RankTrace(1, [Span("a", "compute", 501_000, 502_000, {})], offset_ns=500_000)
    assert {e["ts"] for e in events_of(here, there) if e["ph"] == "X"} == {0.0}


def test_the_offset_of_a_clock_is_the_median_over_barriers() -> None:
    alignment = estimate_offset([0, 100, 200], [1_000, 1_090, 1_250])
    assert (alignment.offset_ns, alignment.spread_ns) == (1_000, 30)
    assert "barrier" in alignment.method


def test_what_is_hidden_is_counted_once() -> None:
    spans = [
        Span("forward", "compute", 0, 100, {}),
        Span("forward", "compute", 50, 150, {}),
        Span("send", "send forward", 100, 200, {"phase": "steady"}),
        Span("send", "send backward", 120, 140, {"phase": "steady"}),
        Span("send", "send backward", 300, 310, {"phase": "cool-down"}),
        Span("recv", "recv forward", 0, 400, {}),
    ]
    assert hidden_share(spans, "send", phase="steady") == 0.5
    assert hidden_share(spans, "send", phase="cool-down") == 0.0
    assert hidden_share(spans, "send") == pytest.approx(50 / 110)
    assert hidden_share(spans, "gather") is None


def test_a_recorded_step_becomes_a_file(tmp_path: Path) -> None:
    recorder = Recorder()
    recorder.begin_step(4)
    with recorder.computing("forward", micro_batch=0, chunk=0), recorder.launching("gather", "all_gather", 64) as one:
        pass
    with recorder.waiting(one):
        time.sleep(0.001)
    recorder.end_step()
    trace = pickle.loads(pickle.dumps(record_trace(3, recorder.steps, "stage 0")))
    write_trace(tmp_path / "trace.json", [trace], {"clocks": "same host"})
    written = json.loads((tmp_path / "trace.json").read_text())
    assert written["otherData"] == {"clocks": "same host"}
    slices = {e["name"]: e for e in written["traceEvents"] if e["ph"] == "X"}
    assert set(slices) == {"step 4", "forward 0.0", "wait for all_gather", "all_gather"}
    assert slices["all_gather"]["args"] == {"step": 4, "group": "gather", "bytes": 64}
    assert slices["wait for all_gather"]["dur"] >= 1000
    assert slices["step 4"]["dur"] >= slices["wait for all_gather"]["dur"]


def test_a_trace_that_does_not_fit_is_no_file_and_one_line(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20, limits[1]))
    try:
        with pytest.raises(ConfigError, match=r"trace\.json: cannot be written \(File too large\); make room there"):
            write_trace(tmp_path / "trace.json", [])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not list(tmp_path.iterdir())
