"""The commands that a report prints, run as they stand there: they give the figures beside which they stand."""

import html
import re
import shlex
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from click.testing import CliRunner

from netlayer.config.file import to_toml
from netlayer.results import load_frame
from tests.topology.jobs import small
from topology import cli


def _run(words: list[str], out: Path) -> pd.DataFrame:
    """The rows of all records that a command left."""
    result = CliRunner().invoke(cli.topology, [*words, "--out", str(out)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return load_frame(out / "records")


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("report")
    (folder / "small.toml").write_text(to_toml(small()))
    words = ["report", "--config", str(folder / "small.toml"), "--set", "job.name=a b", "--seed", "3", "--seeds", "2"]
    _run([*words, "--processes", "1"], folder / "out")
    return folder / "out"


def _commands(report: Path) -> list[list[str]]:
    page = (report / "report.html").read_text()
    blocks = re.findall(r"<pre[^>]*>(.*?)</pre>", page, re.DOTALL)
    lines = [html.unescape(re.sub(r"<[^>]+>", "", line)) for block in blocks for line in block.splitlines()]
    return [shlex.split(line)[2:] for line in lines if line.startswith("netlayer topology")]


def _one(report: Path, *wanted: str) -> list[str]:
    """The first command of the page that holds these words side by side."""
    return next(words for words in _commands(report) if f" {' '.join(wanted)} " in f" {' '.join(words)} ")


def _same(found: pd.DataFrame, ours: pd.DataFrame, keys: list[str], figures: list[str]) -> None:
    both = ours.merge(found, on=keys, suffixes=("", "_again"))
    assert len(both) == len(ours)
    for figure in figures:
        pd.testing.assert_series_equal(both[figure], both[f"{figure}_again"], check_names=False, check_dtype=False)


def test_every_section_has_a_command_with_the_seed(report: Path) -> None:
    commands = _commands(report)
    assert {words[0] for words in commands} == {"describe", "place", "optimize", "ecmp", "whatif", "report"}
    assert all("--seed" in words and "job.name=a b" in words for words in commands)
    sections = re.findall(r"<section.*?</section>", (report / "report.html").read_text(), re.DOTALL)
    assert len(sections) >= 9
    assert all("netlayer topology" in section for section in sections)


def test_placements_are_repeated(report: Path, tmp_path: Path) -> None:
    ours = pd.read_parquet(report / "placements.parquet")
    found = _run(
        next(words for words in _commands(report) if words[0] == "place" and "--strategy" not in words), tmp_path
    )
    _same(found, ours[ours["placement"] != "random, optimised"], ["placement"], ["time_s", "cross_pod_bytes"])
    improved = _run(_one(report, "--strategy", "random"), tmp_path / "improved")
    improved = improved[improved["table"] == "placements"].copy()
    improved["placement"] = improved["placement"].replace("optimised", "random, optimised")
    _same(improved, ours[ours["placement"].str.startswith("random")], ["placement"], ["time_s", "mean_hops"])


def test_cures_are_repeated(report: Path, tmp_path: Path) -> None:
    ours = pd.read_parquet(report / "ports.parquet")
    assert "permutation" in set(ours["traffic"])
    figures = ["excess_before", "excess_after", "changed"]
    ports = next(
        words for words in _commands(report) if words[:2] == ["optimize", "ports"] and words.count("--traffic") > 1
    )
    _same(_run(ports, tmp_path / "ports"), ours, ["traffic"], figures)
    knobs = next(words for words in _commands(report) if words[:2] == ["optimize", "knobs"])
    ours = pd.read_parquet(report / "knobs.parquet")
    _same(_run(knobs, tmp_path / "knobs"), ours, ["seed", "offset_bits", "qps"], ["excess", "time_bound_s"])


def test_failures_are_repeated(report: Path, tmp_path: Path) -> None:
    ours = pd.read_parquet(report / "worst.parquet")
    found = _run([*_one(report, "--sample", "8"), "--processes", "1"], tmp_path)
    figures = ["cases", "slowdown_median", "slowdown_max", "stops_share"]
    _same(found[found["table"] == "worst"], ours[ours["together"] == 1], ["kind"], figures)
    kind, number = "spine", 2
    again = _run([*_one(report, "--fail", kind, "--together", str(number)), "--processes", "1"], tmp_path / "together")
    mine = ours[(ours["kind"] == kind) & (ours["together"] == number)]
    _same(again[again["table"] == "worst"], mine, ["kind"], figures)


def test_loads_and_distributions_are_repeated(report: Path, tmp_path: Path) -> None:
    spread = _run(_one(report, "--traffic", "permutation", "--hash", "crc16", "--seeds", "2"), tmp_path / "spread")
    for table, keys in (("tor_collisions", ["split", "flows_in_collision"]), ("link_use", ["split", "tier", "use"])):
        ours = pd.read_parquet(report / f"{table}.parquet")
        found = spread[spread["table"] == table].astype({key: ours[key].dtype for key in keys})
        _same(found, ours, keys, ["share"])
    words = next(words for words in _commands(report) if words[0] == "ecmp" and words.count("--traffic") > 1)
    _run(words, tmp_path / "loads")
    links: Any = pd.read_csv(tmp_path / "loads" / "links.csv")
    tiers = pd.read_parquet(report / "tiers.parquet").groupby(["traffic", "tier"])["links"].sum()
    assert links.groupby(["traffic", "tier"]).size().to_dict() == tiers.to_dict()
    idle = pd.read_parquet(report / "tiers.parquet").query("use == 'idle'").set_index(["traffic", "tier"])["links"]
    counted = links[links["utilisation"] == 0].groupby(["traffic", "tier"]).size()
    assert (counted.reindex(idle.index, fill_value=0) == idle).all()
