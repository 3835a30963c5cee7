"""What-if replay: closed forms of small jobs, refusals of the graph, and a trace through parquet and events."""

import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from netlayer.observe.readers import bytedance, open_evidence
from netlayer.observe.verdicts.timeline import timeline_of
from netlayer.observe.verdicts.what_if import Operation, Timeline, analyse, build_graph, durations_of, replay


def chain(kinds: list[tuple[str, int]], durations: np.ndarray, steps: int, dp: int, stages: int = 1) -> Timeline:
    """Operations one after the other by their place in the list; times are sums of the durations before."""
    numbers: dict[tuple[str, int], int] = {}
    operations = []
    for kind, stage in kinds:
        numbers[kind, stage] = numbers.get((kind, stage), -1) + 1
        operations.append(Operation(kind, numbers[kind, stage], stage))
    end = np.cumsum(durations, axis=0)
    ranks = np.arange(stages * dp).reshape(stages, dp)
    return Timeline(operations, end - durations, end, list(range(steps)), ranks)


def two_ranks(forward: tuple[float, float]) -> Timeline:
    """One stage, two ranks: forward, backward 2 s, reduce-scatter 0.5 s after the slower, optimizer 1 s."""
    starts, ends = np.zeros((4, 1, 2)), np.zeros((4, 1, 2))
    slower = max(forward) + 2
    for rank, seconds in enumerate(forward):
        starts[:, 0, rank] = 0, seconds, seconds + 2, slower + 0.5
        ends[:, 0, rank] = seconds, seconds + 2, slower + 0.5, slower + 1.5
    names = ("forward", "backward", "reduce_scatter", "optimizer")
    return Timeline([Operation(name, 0, 0) for name in names], starts, ends, [7], np.array([[0, 1]]))


def test_two_data_parallel_ranks_cost_what_the_slower_one_takes_beyond_their_mean() -> None:
    measures = analyse(two_ranks((1.0, 4.0)))
    # 4 + 2 + 0.5 + 1 as traced; ideal: the mean of the forwards, 2.5, in place of 4.
    assert measures.step_s == pytest.approx(7.5)
    assert measures.ideal_s == pytest.approx(6.0)
    assert measures.slowdown == pytest.approx(1.25)
    assert measures.slowest == (1,)
    # With rank 1 at 2.5 s nobody is slower than that: all of the loss is gone.
    assert measures.slowest_share == pytest.approx(1.0)
    assert measures.by_dp_rank == pytest.approx([1.0, 1.25])


def test_the_transfer_of_a_collective_is_counted_from_the_last_ranks_start() -> None:
    timeline = two_ranks((1.0, 4.0))
    durations = durations_of(timeline, build_graph(timeline))
    assert durations[2].ravel() == pytest.approx([0.5, 0.5])  # rank 0 was inside it for 3.5 s


def test_ranks_that_are_equal_lose_nothing_and_nobody_is_to_blame() -> None:
    measures = analyse(two_ranks((3.0, 3.0)))
    assert measures.slowdown == pytest.approx(1.0)
    assert math.isnan(measures.slowest_share)
    assert math.isnan(measures.last_stage_share)


def pipeline(last_forward: float) -> Timeline:
    """Two stages, one micro-batch: everything waits for everything, so a step is the sum of all but one of a pair."""
    kinds = [
        ("forward", 0), ("forward_send", 0), ("forward", 1), ("backward", 1), ("backward_send", 1), ("backward", 0),
        ("optimizer", 0),
    ]  # fmt: skip
    durations = np.array([1.0, 0.1, last_forward, 2.0, 0.1, 2.0, 0.5])[:, None, None]
    line = chain(kinds, durations, 1, 1, stages=2)
    # The receives run beside the sends; stage 1 has its optimizer after its last send.
    pairs = {"forward_recv": (1, 1), "backward_recv": (4, 0)}
    operations, starts, ends = list(line.operations), list(line.start_s), list(line.end_s)
    for kind, (send, stage) in pairs.items():
        operations.append(Operation(kind, 0, stage))
        starts.append(line.start_s[send])
        ends.append(line.end_s[send])
    operations.append(Operation("optimizer", 0, 1))
    starts.append(line.end_s[3])
    ends.append(line.end_s[3] + 0.5)
    return Timeline(operations, np.array(starts), np.array(ends), [1], line.ranks)


def test_a_slow_last_stage_causes_the_whole_loss_of_a_pipeline() -> None:
    measures = analyse(pipeline(last_forward=3.0))
    assert measures.step_s == pytest.approx(1 + 0.1 + 3 + 2 + 0.1 + 2 + 0.5)
    # Forwards at their mean of 2 s: the sum along the pipeline is the same, and no stage has to wait longer.
    assert measures.ideal_s == pytest.approx(8.7)
    assert measures.by_stage[1] == pytest.approx((8.7 + 1) / 8.7)  # stage 1 at 3 s, stage 0 at the mean
    assert measures.by_stage[0] == pytest.approx((8.7 - 1) / 8.7)


def test_a_replay_with_the_traced_durations_takes_as_long_as_the_trace() -> None:
    timeline = pipeline(last_forward=1.0)
    graph = build_graph(timeline)
    assert replay(graph, durations_of(timeline, graph)) == pytest.approx([timeline.end_s.max()])


def test_an_unpaired_send_is_refused_by_name() -> None:
    timeline = pipeline(1.0)
    keep = [at for at, one in enumerate(timeline.operations) if one.kind != "forward_recv"]
    broken = Timeline(
        [timeline.operations[at] for at in keep], timeline.start_s[keep], timeline.end_s[keep], [1], timeline.ranks
    )
    with pytest.raises(ValueError, match="forward_recv for 1 forward that need one"):
        analyse(broken)


def test_an_unknown_kind_of_operation_is_refused() -> None:
    with pytest.raises(ValueError, match="'sleep' is none of"):
        analyse(chain([("sleep", 0)], np.ones((1, 1, 1)), 1, 1))


def write_trace(path: Path, timeline: Timeline, names: dict[str, str]) -> None:
    """A trace as the published ones are."""
    rows = [
        {
            "dp_rank": dp, "stage": operation.stage, "rank": int(timeline.ranks[operation.stage, dp]), "step": step,
            "optype": names[operation.kind], "start_ts": float(timeline.start_s[at, column, dp]),
            "duration": float((timeline.end_s - timeline.start_s)[at, column, dp]), "seq_id": operation.number,
            "mc": 0, "mb_id": 0, "gmc": operation.stage,
        }
        for at, operation in enumerate(timeline.operations)
        for column, step in enumerate(timeline.steps)
        for dp in range(timeline.ranks.shape[1])
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), path)


NAMES = {
    "forward": "forward-compute",
    "backward": "backward-compute",
    "reduce_scatter": "grads-reduce-scatter",
    "optimizer": "optimizer",
}


def test_a_trace_in_parquet_gives_the_same_measures(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.parquet", two_ranks((1.0, 4.0)), NAMES)
    evidence = open_evidence(tmp_path / "trace.parquet")
    measures = analyse(timeline_of(evidence))
    assert dict(evidence.kinds) == {"ByteDance straggler trace": 1}
    assert (measures.slowdown, measures.slowest) == (pytest.approx(1.25), (1,))


def test_unknown_operations_of_a_trace_are_counted(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.parquet", two_ranks((1.0, 4.0)), {**NAMES, "optimizer": "coffee"})
    notes: list[str] = []
    assert len(list(bytedance.read(tmp_path / "trace.parquet", notes))) == 6
    assert notes == [f"{tmp_path / 'trace.parquet'}: 2 operations of an unknown type 'coffee': skipped"]


def test_ranks_with_other_operations_are_refused(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace.parquet", two_ranks((1.0, 4.0)), NAMES)
    events = list(bytedance.read(tmp_path / "trace.parquet", []))
    with pytest.raises(ValueError, match="step 7 of rank 1 has other operations"):
        timeline_of(event for event in events if not (event.name == "optimizer" and event.origin.rank == 1))
    with pytest.raises(ValueError, match="no forward"):
        timeline_of([])
