"""Exports of a run: traces for Perfetto, metrics for Prometheus, a dashboard for Grafana."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from bench.page.synthetic import Faults, write_run
from netlayer.errors import ConfigError
from netlayer.layout import ParallelLayout
from netlayer.observe.command import observe
from netlayer.observe.page.prometheus import dashboard, metrics_text
from netlayer.observe.page.source import PageSource


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp('na"me\n')
    write_run(folder, ParallelLayout(tp=1, pp=2, dp=4), 12, Faults(straggler=5, silent=2, silent_step=12))
    return folder


def export(*arguments: object) -> None:
    done = CliRunner().invoke(observe, ["export", *map(str, arguments)], catch_exceptions=False)
    assert done.exit_code == 0, done.output


def test_a_trace_has_a_process_a_rank_and_arrows_of_messages(run: Path, tmp_path: Path) -> None:
    export(run, "--perfetto", tmp_path / "trace.json", "--steps", "3-4", "--ranks", "0,4")
    events: list[dict[str, Any]] = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"rank 0 (host-0000)", "rank 4 (host-0000)"}
    slices = [event for event in events if event["ph"] == "X"]
    assert {event["args"]["step"] for event in slices} == {3, 4}
    assert all(event["dur"] >= 0 and event["ts"] >= 0 for event in slices)
    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    assert begins.keys() == ends.keys()
    assert len(begins) == 4  # a message forward and one back, in two steps
    assert all(begins[number]["pid"] != ends[number]["pid"] for number in begins)
    assert all(begins[number]["ts"] <= ends[number]["ts"] for number in begins)


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (("--steps", "99"), "its steps are 1-12"),
        (("--steps", "x"), "names no step"),
        (("--ranks", "77"), "names no rank"),
        (("--ranks", "0:4:0"), "names no rank"),
    ],
)
def test_a_wrong_choice_is_one_line(run: Path, tmp_path: Path, arguments: tuple[str, str], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        export(run, "--perfetto", tmp_path / "trace.json", *arguments)
    assert not list(tmp_path.iterdir())


def test_nothing_asked_for_is_one_line() -> None:
    with pytest.raises(ConfigError, match="--perfetto"):
        export()


def test_metrics_are_read_by_prometheus_own_parser(run: Path) -> None:
    parser = pytest.importorskip("prometheus_client.parser")
    view = PageSource([run]).view
    families = {family.name: family for family in parser.text_string_to_metric_families(metrics_text(view))}
    [sample] = families["netlayer_run_silent_rank"].samples
    assert sample.labels == {"run": view.title, "rank": "2"}
    [slow] = families["netlayer_run_straggler_slowdown_ratio"].samples
    assert slow.labels["rank"] == "5"
    assert slow.value == pytest.approx(0.4, abs=0.1)
    states = {sample.labels["state"]: sample.value for sample in families["netlayer_run_state"].samples}
    assert [name for name, value in states.items() if value] == ["silent"]
    assert families["netlayer_run_ranks"].samples[0].value == 8
    # Step 12 has no end on any rank: the run hangs in it for 90 s.
    assert view.is_open[-1].all()
    assert families["netlayer_run_last_step"].samples[0].value == 11
    assert families["netlayer_run_step_seconds"].samples[0].value == pytest.approx(np.median(view.run.step_s[-2]))
    for family in families.values():
        assert family.documentation
        assert all(sample.name.startswith("netlayer_run_") for sample in family.samples)


def test_a_dashboard_asks_for_metrics_that_are_served(run: Path, tmp_path: Path) -> None:
    export("--grafana", tmp_path / "board.json")
    board = json.loads((tmp_path / "board.json").read_text())
    assert board == dashboard()
    text = metrics_text(PageSource([run]).view)
    served = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    for panel in board["panels"]:
        for target in panel["targets"]:
            names = {word for word in target["expr"].replace("(", "{").split("{") if word.startswith("netlayer_run")}
            assert names <= served, target["expr"]


def test_a_dashboard_fits_grafanas_own_models() -> None:
    models = pytest.importorskip("grafana_foundation_sdk.models.dashboard", reason="needs grafana-foundation-sdk")
    read = models.Dashboard.from_json(dashboard())
    assert read.title == "netlayer: a run"
    assert len(read.panels) == len(dashboard()["panels"])
    places = [(panel.grid_pos.x, panel.grid_pos.y, panel.grid_pos.w, panel.grid_pos.h) for panel in read.panels]
    assert all(x + width <= 24 for x, _, width, _ in places)
    assert len({(x, y) for x, y, _, _ in places}) == len(places)
    assert [variable.name for variable in read.templating.list_val] == ["source", "run", "job"]
