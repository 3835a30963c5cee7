"""The bench of small stragglers: noise as measured, and counts that follow from what is planted; planted real ones."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from bench.stragglers.detection import GRID, Setting, command, measure, noise_of
from bench.stragglers.drift import Row, gain
from bench.stragglers.drift import command as drift
from bench.stragglers.planted import command as planted
from bench.stragglers.planted import episodes


def measured(steps: int = 200, ranks: int = 8) -> np.ndarray:
    rng = np.random.default_rng(2)
    common = np.exp(rng.normal(0, 0.1, (steps, 1)))
    return common * (1 + rng.normal(0, 0.003, (1, ranks))) * (1 + rng.normal(0, 0.005, (steps, ranks)))


def test_noise_is_what_ranks_do_not_have_in_common() -> None:
    noise = noise_of("made", measured(), [0] * 8)
    assert noise.sigma == pytest.approx(0.005, rel=0.3)
    drawn = noise.draw(np.random.default_rng(0), 60, 500)
    assert drawn.shape == (60, 500)
    assert np.median(drawn) == pytest.approx(1, abs=0.01)
    assert np.isfinite(drawn).all()


def test_a_measured_straggler_is_no_noise() -> None:
    times = measured()
    times[:, 3] *= 2
    assert len(noise_of("made", times, [0] * 8).series) == 7


def test_large_slowdowns_are_found_and_the_smallest_is_of_the_grid() -> None:
    noise = noise_of("made", measured(), [0] * 8)
    row = measure(noise, 20, 0, Setting(hosts=256, slow_hosts=2, trials=2, seed=0))
    assert row.smallest_percent is not None
    assert row.smallest_percent in [100 * level for level in GRID]
    assert 1 <= row.smallest_percent <= 10
    assert (row.precision, row.recall) == (1.0, 1.0)


def test_the_command_writes_a_simulated_record(tmp_path: Path) -> None:
    rows = [{"each_ms": (100 * measured(120, 1)[:, 0]).tolist()}]
    (tmp_path / "record.json").write_text(json.dumps({"rows": rows}))
    arguments = ["--record", str(tmp_path / "record.json"), "--hosts", "64", "--slow-hosts", "1", "--trials", "1"]
    result = CliRunner().invoke(
        command, [*arguments, "--steps", "20", "--quiet-steps", "0", "--out", str(tmp_path / "out")]
    )
    assert result.exit_code == 0, result.output
    record = json.loads((tmp_path / "out" / "records" / "bench.stragglers.detection.json").read_text())
    assert record["source"] == "simulated"
    assert len(record["rows"]) == 1


def test_a_record_without_step_times_is_refused(tmp_path: Path) -> None:
    (tmp_path / "record.json").write_text('{"rows": [{"time_us": 3}]}')
    result = CliRunner().invoke(command, ["--record", str(tmp_path / "record.json")])
    assert "has no row with 100 or more each_ms" in str(result.exception)


def test_episodes_do_not_overlap() -> None:
    faults = episodes(random.Random(1), 8, 6, 2, (0.5,), ("host", "forward"))
    begins = [fault.step for fault in faults]
    assert sorted(begins) == begins
    assert min(np.diff(begins)) == 35
    assert sorted(fault.kind for fault in faults) == ["forward"] * 3 + ["host"] * 3 + ["none"] * 2
    two = episodes(random.Random(1), 4, 3, 1, (0.1, 0.05), ("compute",))
    assert sorted((fault.kind, fault.share) for fault in two) == [
        *[("compute", 0.05)] * 3, *[("compute", 0.1)] * 3, ("none", 0.0)
    ]  # fmt: skip


def test_the_gain_of_a_cure_leaves_out_how_fast_the_machine_was() -> None:
    fault = Row("gc", 0.1, 0.2, "found", "", {}, True, [])
    # The machine is twice as slow in the second run, and the cure takes away half of the growth.
    cured = Row("gc, cured", 0.2, 0.3, "found", "", {}, None, [])
    assert gain(fault, cured) == pytest.approx(0.25)


@pytest.mark.quiet
@pytest.mark.slow(minutes=4)
def test_planted_drift_is_named_with_its_cause(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    result = CliRunner().invoke(drift, ["--steps", "40", "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    assert result.exit_code == 0, rows
    assert [row["right"] for row in rows] == [True, None, True]


@pytest.mark.quiet
@pytest.mark.slow(minutes=3)
def test_a_rank_that_sleeps_is_named_within_20_steps(tmp_path: Path) -> None:
    path = tmp_path / "record.json"
    result = CliRunner().invoke(planted, ["--faults", "2", "--healthy", "1", "--share", "2", "--json", str(path)])
    rows = json.loads(path.read_text())["rows"]
    assert result.exit_code == 0, rows
    assert all(row["steps_to_name"] <= 20 for row in rows if row["fault"] != "none")
