from importlib import import_module
from pathlib import Path
from typing import Any, get_args

import pandas as pd
import pytest
from click.testing import CliRunner, Result

from netlayer.config.file import to_toml
from netlayer.config.tree import Config
from netlayer.errors import ConfigError
from netlayer.progress import Stages
from netlayer.results import load_record
from tests.topology.jobs import small
from topology.ecmp.hashing import HashName
from topology.failures.faults import FailureKind
from topology.placement.strategies import StrategyName
from topology.report.data import find
from topology.report.page import build_page


def _run(name: str, *arguments: str) -> Result:
    command: Any = import_module(f"topology.commands.{name}").command
    result = CliRunner().invoke(command, list(arguments))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result


@pytest.fixture
def config_file(tmp_path: Path) -> str:
    return _written(small(), tmp_path)


def _written(config: Config, folder: Path) -> str:
    path = folder / "small.toml"
    path.write_text(to_toml(config))
    return str(path)


def test_place_prints_costs_and_writes_placements(tmp_path: Path, config_file: str) -> None:
    out = tmp_path / "out"
    result = _run("place", "--config", config_file, "--out", str(out), "--spares", "8", "--failed", "3,40-42")
    assert "pipeline-first" in result.stdout
    (path,) = (out / "records").iterdir()
    rows = {row["placement"]: row for row in load_record(path).rows if row["table"] == "placements"}
    assert rows["optimised"]["unusable_servers"] == 0
    assert not pd.read_csv(out / "placement-paper.csv")["server"].isin([3, 40, 41, 42]).any()
    again = _run(
        "place", "--config", config_file, "--from", str(out / "placement-given.csv"), "--spares", "8",
        "--strategy", "given", "--failed", "3", "--out", str(tmp_path / "again"),
    )  # fmt: skip
    assert "given" in again.stdout


def test_place_without_room_is_one_line(tmp_path: Path, config_file: str) -> None:
    with pytest.raises(ConfigError, match="needs 128 servers, 127 of 128 can be used; add --spares"):
        _run("place", "--config", config_file, "--failed", "7", "--out", str(tmp_path))
    with pytest.raises(ConfigError, match=r"--failed = seven"):
        _run("place", "--config", config_file, "--failed", "seven", "--out", str(tmp_path))


def test_whatif_prints_the_worst_of_each_kind(tmp_path: Path, config_file: str) -> None:
    result = _run("whatif", "--config", config_file, "--sample", "2", "--processes", "1", "--out", str(tmp_path))
    for kind in get_args(FailureKind):
        assert (kind in result.stdout) == (kind != "peer-link"), "a CLOS has no cables between equals"
    assert {"failures.csv", "failures.parquet", "worst.csv"} <= {path.name for path in tmp_path.iterdir()}
    one = _run("whatif", "--config", config_file, "--part", "tor:0", "--part", "spine:1", "--out", str(tmp_path / "b"))
    assert "tor+spine" in one.stdout


def test_whatif_refuses_parts_that_the_fabric_lacks(tmp_path: Path) -> None:
    config_file = _written(small(tiers=2, pods=1, switch_radix=64), tmp_path)
    with pytest.raises(ConfigError, match="--fail = core: this fabric has none"):
        _run("whatif", "--config", config_file, "--fail", "core", "--out", str(tmp_path))
    with pytest.raises(ConfigError, match=r"failure = spine:9999"):
        _run("whatif", "--config", config_file, "--part", "spine:9999", "--out", str(tmp_path))


def test_a_port_plan_names_ranks_servers_and_devices(tmp_path: Path) -> None:
    config_file = _written(small(), tmp_path)
    arguments = ["--config", config_file, "--placement", "random", "--traffic", "pipeline", "--traffic", "permutation"]
    result = _run("optimize", "ports", *arguments, "--out", str(tmp_path))
    assert "permutation" in result.stdout
    plan = pd.read_csv(tmp_path / "ports-pipeline.csv")
    _run("place", "--config", config_file, "--strategy", "random", "--no-optimise", "--out", str(tmp_path))
    placed = pd.read_csv(tmp_path / "placement-random.csv").set_index("rank")["server"]
    assert (placed[plan["src_rank"]].to_numpy() == plan["src_server"]).all()
    assert (plan["dst_device"] == [f"srv{server:04d}/nic0" for server in plan["dst_server"]]).all()
    assert len(pd.read_json(tmp_path / "ports-pipeline.json")) == len(plan)
    assert len(pd.read_csv(tmp_path / "ports-permutation.csv")) == 128


def test_knobs_are_searched(tmp_path: Path, config_file: str) -> None:
    assert "best first" in _run("optimize", "knobs", "--config", config_file, "--out", str(tmp_path)).stdout
    assert (tmp_path / "knobs.csv").exists()


_HALVES = ("'The split halves hash collisions' is", "Does the ToR split halve")
_NO_EFFECT = ("The ToR split has no effect on this fabric: a NIC is as fast", "Collisions on ToR uplinks")


@pytest.mark.parametrize(
    ("changes", "texts"),
    [
        ({}, _HALVES),
        ({"tiers": 2, "pods": 1, "nic_bps": 400, "servers_per_tor_set": 16}, _NO_EFFECT),
        pytest.param(
            {"nics_per_server": 2, "rails": 2, "rail_only": True, "gpus_per_server": 2}, _HALVES, marks=pytest.mark.slow
        ),
    ],
    ids=["three tiers", "two tiers and a split without effect", "rail-only"],
)
def test_report_says_its_verdict_and_leaves_its_rows(
    tmp_path: Path, changes: dict[str, Any], texts: tuple[str, str]
) -> None:
    config_file = _written(small(**changes), tmp_path)
    out = tmp_path / "out"
    result = _run("report", "--config", config_file, "--seeds", "1", "--processes", "1", "--out", str(out))
    sentence, heading = texts
    assert sentence in result.stdout
    page = (out / "report.html").read_text()
    assert ("halve" in page) is (texts is _HALVES)
    for text in (heading, "Where the ranks stand", "netlayer topology report --seeds", "Failures"):
        assert text in page
    for path in (out / "records").iterdir():
        record = load_record(path)
        assert {row["source"] for row in record.rows} == {record.source}
    assert "(" not in pd.read_csv(out / "claims.csv").to_csv()
    assert {"claims", "split", "tiers", "placements", "failures", "ports", "knobs"} <= {
        path.stem for path in out.glob("*.parquet")
    }
    assert (out / "plots" / "fabric.png").exists()


def test_a_report_where_every_failure_stops_the_job_draws_no_slowdown() -> None:
    """Servers with a ToR a NIC: whatever fails, a flow is left without a path."""
    rails = {"gpus_per_server": 8, "nics_per_server": 8, "rails": 8}
    config = small(servers=4, tiers=2, pods=1, nic_bps=400, servers_per_tor_set=1, **rails)
    with Stages() as stages:
        findings = find(config, 0, 1, [], stages, processes=1)
    several = [row for row in findings.worst if row["together"] > 1]
    assert several
    assert all(row["slowdown_median"] is None for row in several)
    names = {plot.name for plot in build_page(findings).plots}
    assert "placement_time" in names
    assert "failures_together" not in names


def test_the_choices_are_those_of_the_library() -> None:
    place, whatif, optimize = (import_module(f"topology.commands.{name}") for name in ("place", "whatif", "optimize"))
    assert place._STRATEGIES == whatif._STRATEGIES == optimize._STRATEGIES == get_args(StrategyName)
    assert place._HASHES == whatif._HASHES == optimize._HASHES == get_args(HashName)
    assert get_args(FailureKind) == whatif._KINDS
