from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from bench import sim_speed
from bench.sim_speed import digest, line, measure, measure_peer, missed_limits, scenario, settings
from bench.simulator.heap_engine import simulate_by_heap
from congestion.engine.build import build
from congestion.simulation.simulate import simulate
from netlayer.errors import CheckFailed
from netlayer.results import load_record

SMALL = {"k": 4, "packets": 60, "repeats": 2, "seed": 3, "threads": 2}


def _row(**changes: Any) -> dict[str, Any]:
    row = {"table": "speed", "case": "dcqcn", "hosts": 1_024, "threads": 2, "one_best_hops_per_s": 11e6}
    return {**row, "over_one_thread": 1.7, "peak_bytes": 4e8, **changes}


def test_every_host_sends_500_packets_over_the_fat_tree_and_none_to_itself() -> None:
    fabric, flows = scenario(8, 500, seed=0)
    assert len(fabric.hosts) == 128
    assert sorted(flows.src.tolist()) == sorted(flows.dst.tolist()) == fabric.hosts.tolist()
    assert (flows.src != flows.dst).all()
    assert set(flows.num_bytes.tolist()) == {2_000_000}
    assert len(set(flows.sport.tolist())) > 64  # ECMP draws its paths by them


def test_a_row_counts_link_hops_and_keeps_every_time() -> None:
    row = measure(case="dcqcn", **SMALL)
    fabric, flows = scenario(4, 60, seed=3)
    hops = int(simulate(fabric, flows, settings("dcqcn"), "dcqcn", seed=3).state.port["tx_packets"].sum())
    assert (row["hosts"], row["link_hops"]) == (16, hops)
    assert len(row["one_wall_s"]) == len(row["many_wall_s"]) == 2
    assert row["one_best_hops_per_s"] == pytest.approx(hops / min(row["one_wall_s"]))
    assert row["peak_bytes"] > 1e7


def test_no_time_counts_where_threads_change_a_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    found = iter([b"one", b"other"])
    monkeypatch.setattr(sim_speed, "digest", lambda _: next(found))
    with pytest.raises(CheckFailed, match="2 threads gave other bits"):
        measure(case="line-rate", **SMALL)


def test_the_digest_sees_what_flows_did() -> None:
    runs = [simulate(*scenario(4, 60, seed=3), settings("line-rate"), "none", seed=3) for _ in range(2)]
    assert digest(runs[0]) == digest(runs[1])
    runs[1].state.flow["finish"][5] += 1
    assert digest(runs[0]) != digest(runs[1])


def test_what_differs_is_named() -> None:
    first, second = (simulate(*scenario(4, 60, seed=3), settings("dcqcn"), "dcqcn", seed=3) for _ in range(2))
    assert sim_speed.differences(first, second) == []
    second.state.dcqcn_flow["alpha"][5:7] += 0.5
    [found] = sim_speed.differences(first, second)
    assert found.startswith("dcqcn_flow.alpha in 2 of 16 rows (row 5: ")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("case", sim_speed.CASES)
def test_the_heap_agrees_to_the_picosecond(case: sim_speed.Case, seed: int) -> None:
    fabric, flows = scenario(4, 300, seed)
    chosen = settings(case).model_copy(update={"pfc": False, "kmin_bytes": 20_000, "kmax_bytes": 400_000})
    law = "dcqcn" if case == "dcqcn" else "none"
    outcome = simulate(fabric, flows, chosen, law, seed=seed)
    state = build(fabric, flows, chosen, law, seed=seed)
    counted = simulate_by_heap(state)[0]
    np.testing.assert_array_equal(state.flow["finish"], outcome.finish_ps)
    assert counted["hops"] == outcome.link_hops
    assert counted["marks"] == outcome.state.port["marks"].sum()
    assert (counted["marks"] > 0) == (case == "dcqcn")


def test_what_the_heap_lacks_is_refused() -> None:
    fabric, flows = scenario(4, 1, seed=0)
    with pytest.raises(ValueError, match="no PFC"):
        simulate_by_heap(build(fabric, flows, settings("dcqcn"), "dcqcn", seed=0))


def test_the_peer_is_compared_on_the_same_work(monkeypatch: pytest.MonkeyPatch) -> None:
    row = measure_peer(case="dcqcn", **SMALL)
    assert row["over_heap"] == pytest.approx(row["engine_best_hops_per_s"] / row["heap_best_hops_per_s"])
    assert "times the heap" in line(row)
    monkeypatch.setattr(sim_speed, "simulate_by_heap", lambda _: [{"marks": -1, "hops": 0}])
    with pytest.raises(CheckFailed, match="disagree"):
        measure_peer(case="dcqcn", **SMALL)


def test_a_missed_limit_is_named() -> None:
    peer = {"table": "peer", "case": "dcqcn", "hosts": 1_024, "over_heap": 4.5}
    assert missed_limits([_row(), _row(hosts=128, one_best_hops_per_s=1.0), peer]) == []
    assert missed_limits([{"table": "compile", "compile_s": 90.0}, _row(threads=4, over_one_thread=1.0)]) == []
    slow = [_row(one_best_hops_per_s=9e6), _row(over_one_thread=1.5), _row(peak_bytes=2e9), {**peer, "over_heap": 3.0}]
    missed = missed_limits(slow)
    assert len(missed) == 4
    assert "dcqcn, 1,024 hosts: one_best_hops_per_s = 9e+06 is below 1e+07" in missed[0]


def test_the_command_keeps_a_measured_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sim_speed, "ProcessPoolExecutor", _Inline)
    arguments = ["--ports", "4", "--peer-ports", "4", "--packets", "20", "--repeats", "1", "--out", str(tmp_path)]
    result = CliRunner().invoke(sim_speed.command, arguments)
    assert result.exit_code == 0, result.output
    (path,) = (tmp_path / "records").iterdir()
    record = load_record(path)
    assert (record.name, record.source) == ("bench.sim_speed", "measured")
    assert [(row["table"], row.get("case")) for row in record.rows] == [
        ("compile", None),
        ("speed", "line-rate"),
        ("speed", "dcqcn"),
        ("peer", "line-rate"),
        ("peer", "dcqcn"),
    ]
    assert "16 hosts, line-rate" in result.stdout


class _Inline:
    """A pool that works where it stands."""

    def __init__(self, *_: object, **__: object) -> None: ...

    def __enter__(self) -> "_Inline":
        return self

    def __exit__(self, *_: object) -> None: ...

    def submit(self, work: Any, *arguments: Any) -> "_Inline":
        self._result = work(*arguments)
        return self

    def result(self) -> Any:
        return self._result
