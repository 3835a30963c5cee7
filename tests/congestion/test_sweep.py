import json
from pathlib import Path

import pandas as pd
import pytest
from click.testing import CliRunner

from congestion.arena.tune_profile import read_profile
from congestion.commands.sweep import sweep
from congestion.simulation.sweep import Point, optimise, points_of, ranges_in, run_point, run_sweep, seeds_of
from netlayer.errors import CheckFailed, ConfigError
from netlayer.results import load_record

SMALL = ("scenario.senders=4", "scenario.num_bytes=1MiB")
POINT = Point("incast", "hybrid", overrides=SMALL)
TARGETS = "congestion.swift.base_target_us=10,40"


def _points() -> list[Point]:
    return points_of(Point("incast", "none"), ["none", "swift"], [*SMALL, TARGETS, "scenario.jitter_us=5"], [1, 2])


def test_a_sweep_is_all_combinations_seeds_innermost():
    points = _points()
    assert [(one.law, one.overrides[2], one.seed) for one in points[:3]] == [
        ("none", "congestion.swift.base_target_us=10", 1),
        ("none", "congestion.swift.base_target_us=10", 2),
        ("none", "congestion.swift.base_target_us=40", 1),
    ]
    assert len(points) == 2 * 2 * 2
    phases = "scenario.phases=pipeline,all-gather"
    assert points_of(POINT, ["none"], [phases], [1])[0].overrides == (phases,)


def test_seeds_are_ranges():
    assert seeds_of("1..3,7") == [1, 2, 3, 7]
    with pytest.raises(ConfigError, match="--seed-list"):
        seeds_of("1..")


def test_rows_are_those_of_the_points_in_their_order():
    rows = run_sweep(_points(), processes=2)
    assert rows == [run_point(point) for point in _points()]
    frame = pd.DataFrame(rows)
    assert (frame["ended"] == 4).all()
    by_target = frame[frame["cc"] == "swift"].groupby("congestion.swift.base_target_us")["max_queue_bytes"].max()
    assert by_target["10"] < by_target["40"]
    none = frame[frame["cc"] == "none"]
    assert none.groupby("seed")["fct_median_us"].nunique().eq(1).all()  # the target is Swift's alone
    assert none["fct_median_us"].nunique() == 2  # seeds differ


@pytest.mark.filterwarnings("default")  # distributed's own, of closing loops
def test_dask_gives_the_same_rows():
    distributed = pytest.importorskip("distributed", reason="needs dask[distributed]")
    points = _points()[:2]
    with distributed.LocalCluster(
        n_workers=1, threads_per_worker=1, processes=False, dashboard_address=None, host="127.0.0.1", protocol="tcp://"
    ) as local:
        assert run_sweep(points, dask=local.scheduler_address) == run_sweep(points, processes=1)


def test_a_search_finds_what_a_sweep_finds():
    ranges, fixed = ranges_in([*SMALL, "congestion.kmin_bytes=20000..400000"], "dcqcn", "ns3")
    assert fixed == SMALL
    best = optimise(Point("incast", "dcqcn", overrides=fixed), ranges, "ecn_marked", [1], 8, processes=1)
    assert len(best.trials) == 8
    assert best.score == min(row["ecn_marked"] for row in best.trials) < max(row["ecn_marked"] for row in best.trials)
    assert best.score <= best.first_score
    [chosen] = best.contender.overrides
    assert run_point(Point("incast", "dcqcn", 1, (*fixed, chosen)))["ecn_marked"] == best.score


def test_more_goodput_is_better():
    ranges, _ = ranges_in(["congestion.hybrid.queue_us=2..32"], "hybrid", "ns3")
    best = optimise(POINT, ranges, "goodput_bps", [1, 2], 3, processes=1)
    assert best.score == max(row["goodput_bps"] for row in best.trials)


def test_a_search_in_which_no_flow_ends_fails():
    lossy = (*SMALL, "congestion.loss_rate=0.9", "congestion.timeout_us=1", "congestion.retries=0")
    ranges, _ = ranges_in(["congestion.hybrid.queue_us=2..32"], "hybrid", "ns3")
    with pytest.raises(CheckFailed, match="in none of 2 trials"):
        optimise(Point("incast", "hybrid", overrides=lossy), ranges, "completion_us", [1], 2, processes=1)


def test_without_a_range_all_numbers_of_the_law_are_searched():
    ranges, fixed = ranges_in(["congestion.hybrid.gain=0.5"], "hybrid", "ns3")
    assert len(ranges) == 10
    assert "congestion.hybrid.gain" not in [one.name for one in ranges]
    assert fixed == ("congestion.hybrid.gain=0.5",)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("congestion.hybrid.queue_us=9..2", "has no ends in order"),
        ("congestion.hybrid.queue_us=a..b", "is no range"),
        ("scenario.senders=2..4", "is nothing that can be searched"),
        ("congestion.hybrid.queue_us=2,4", "is several values"),
        ("congestion.kmin_bytes=100000..4000000", "is above congestion.kmax_bytes"),
    ],
)
def test_bad_ranges_are_one_line(given, message):
    with pytest.raises(ConfigError, match=message):
        ranges_in([given], "hybrid", "ns3")


def test_an_unknown_objective_names_the_columns():
    ranges, _ = ranges_in(["congestion.hybrid.queue_us=2..32"], "hybrid", "ns3")
    with pytest.raises(ConfigError, match=r"--optimise = speed: is no column; give one of .*completion_us"):
        optimise(POINT, ranges, "speed", [1], 1, processes=1)


def test_the_command_writes_rows_and_a_record(tmp_path):
    sets = [word for one in (*SMALL, TARGETS) for word in ("--set", one)]
    asked = [
        "incast",
        "--cc",
        "swift",
        *sets,
        "--seed-list",
        "1..2",
        "--processes",
        "1",
        "--out",
        str(tmp_path / "out"),
    ]
    ran = CliRunner().invoke(sweep, [*asked, "--json", "-"])
    assert ran.exit_code == 0, ran.output
    rows = json.loads(ran.stdout)["rows"]
    assert len(rows) == 4
    assert len(pd.read_csv(tmp_path / "out" / "sweep.csv")) == 4
    assert pd.read_parquet(tmp_path / "out" / "sweep.parquet")["record_source"].unique() == ["simulated"]
    [record] = (tmp_path / "out" / "records").glob("*.json")
    assert load_record(record).rows == rows


def test_the_command_writes_a_profile(tmp_path):
    out = tmp_path / "best.toml"
    sets = [word for one in (*SMALL, "congestion.hybrid.queue_us=2..32") for word in ("--set", one)]
    asked = ["incast", "--cc", "hybrid", *sets, "--optimise", "fct_p99_us", "--trials", "3", "--processes", "1"]
    ran = CliRunner().invoke(sweep, [*asked, "--out", str(out)])
    assert ran.exit_code == 0, ran.output
    assert 2 <= read_profile(out).settings().hybrid.queue_us <= 32


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (["incast", "--cc", "bbr"], "--cc = bbr: is unknown"),
        (["incast", "--cc", "none,swift", "--optimise", "jain"], "--cc = none,swift: is several laws"),
        (["incast", "--trials", "3"], "--trials = 3: has no effect without --optimise"),
        (["incast", "--dask", "nowhere"], "--dask = nowhere: is no address"),
        (["insast"], "SCENARIO = insast: is unknown"),
    ],
)
def test_bad_input_of_the_command(asked: list[str], message: str, tmp_path: Path):
    ran = CliRunner().invoke(sweep, [*asked, "--processes", "1"] if "--dask" not in asked else asked)
    assert isinstance(ran.exception, ConfigError)
    assert message in str(ran.exception)
