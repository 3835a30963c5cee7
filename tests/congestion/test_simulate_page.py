"""The page of `netlayer simulate` from made-up frames: what it says, what it draws, and odd runs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from click.testing import CliRunner

from congestion.commands.simulate import simulate
from congestion.simulation.page.charts import bands, in_bins
from congestion.simulation.page.page import build_page
from netlayer.errors import ConfigError
from netlayer.report import Axis, Report
from tests.browser import browse, drawn_plots, needs_chromium
from tests.congestion.simulate_frames import made_up

LAWS = {"none": 1.0, "dcqcn": 1.05, "hybrid": 0.98}
PAUSED = {"none": 0.05, "dcqcn": 0.02, "hybrid": 0.03}


@pytest.fixture(scope="module")
def page() -> Report:
    return build_page(made_up(LAWS, paused=PAUSED))


def _names(report: Report) -> set[str]:
    return {plot.name for plot in report.plots}


def test_it_says_who_was_first_who_was_calm_and_that_it_is_one_seed(page: Report) -> None:
    text = page.html()
    assert "<code>hybrid</code> completed first, after 392 us; later by: <code>none</code> 2.0%" in text
    assert "<code>dcqcn</code> paused least" in text
    assert "On the front of both: <code>dcqcn</code>, <code>hybrid</code>" in text
    assert "Simulated, not measured, and of one seed (0)" in text


def test_it_draws_all_that_was_sampled(page: Report) -> None:
    over_time = {"rate", "queue", "fairness", "pause_tiers", "pause_spread", "links_0", "links_1", "links_2"}
    assert _names(page) == over_time | {"front", "fct", "slowdown"}


def test_without_samples_shares_of_the_whole_run_are_drawn() -> None:
    page = build_page(made_up(LAWS, paused=PAUSED, sampled=False))
    assert _names(page) == {"front", "fct", "slowdown", "pause_tiers", "links"}


def test_a_law_keeps_its_colour_from_chart_to_chart(page: Report) -> None:
    for plot in page.plots:
        if not plot.name.startswith(("links", "pause_tiers")):
            assert '"domain": ["none", "dcqcn", "hybrid"]' in str(plot.spec).replace("'", '"')


def test_one_law_and_one_flow_without_pauses() -> None:
    page = build_page(made_up({"dcqcn": 1.0}, num_flows=1))
    assert _names(page) == {"rate", "queue", "links_0"}
    text = page.html()
    assert "No port was paused" in text
    assert "Of one flow there is no distribution" in text


def test_flows_that_did_not_end_are_said_and_their_law_is_not_ranked() -> None:
    page = build_page(made_up(LAWS, paused=PAUSED, unended={"hybrid": 3}))
    text = page.html()
    assert "<code>hybrid</code>: 3 of 40 flows did not end" in text
    assert "<code>none</code> completed first" in text
    assert "<code>dcqcn</code> paused least" in text
    assert "1 of 3 laws omitted" in text
    assert "3 of 120 did not end and are omitted" in text
    assert "<b>FAIL</b>" in text


def test_no_flow_ended() -> None:
    page = build_page(made_up({"none": 1.0, "dcqcn": 1.0}, num_flows=4, unended={"none": 4, "dcqcn": 4}))
    assert {"fct", "slowdown", "front"}.isdisjoint(_names(page))
    assert "No flow ended" in page.html()


def test_laws_that_do_alike_are_named_together() -> None:
    assert "All completed after 400 us" in build_page(made_up({"none": 1.0, "dcqcn": 1.0})).html()


def test_bins_keep_the_area_of_unequal_intervals() -> None:
    frame = pd.DataFrame({"time_us": [1.0, 2.0, 4.0, 8.0, 16.0], "share": [1.0, 0.0, 0.5, 0.25, 0.125]})
    found = in_bins(frame, "share", 0.0, 20.0)
    widths = (found["to_s"] - found["from_s"]) * 1e6
    assert (found["share"] * widths).sum() == pytest.approx((frame["share"] * np.diff([0, *frame["time_us"]])).sum())
    assert found["to_s"].max() * 1e6 == pytest.approx(16.0)  # behind it nothing is known


def test_bands_stand_in_the_order_given() -> None:
    frame = pd.DataFrame({"from_s": [0.0, 0.0], "to_s": [1.0, 1.0], "row": ["b", "a"], "share": [0.2, 0.4]})
    spec = bands(frame, ["b", "a"], Axis("share", unit="share"), top=1.0).to_dict()
    assert spec["encoding"]["y"]["scale"]["domain"] == ["b", "a"]
    assert spec["encoding"]["color"]["scale"]["domain"] == [0.0, 1.0]


def test_the_command_writes_a_page_of_its_laws(tmp_path: Path) -> None:
    page, small = tmp_path / "page.html", ["--set", "scenario.senders=4", "--set", "scenario.num_bytes=400000"]
    result = CliRunner().invoke(simulate, ["incast", *small, "--cc", "none,dcqcn", "--html", str(page)])
    assert result.exit_code == 0, result.output
    assert "Simulation: incast" in page.read_text()
    assert {"rate.png", "queue.png", "fct.png", "links_0.png", "links_1.png"} <= {
        path.name for path in (tmp_path / "plots").iterdir()
    }


def test_a_folder_gets_the_page_and_series_where_they_were_asked_for(tmp_path: Path) -> None:
    small = ["incast", "--set", "scenario.senders=4", "--set", "scenario.num_bytes=400000", "--cc", "none"]
    for name, asked in (("plain", []), ("sampled", ["--sample-us", "10"])):
        result = CliRunner().invoke(simulate, [*small, *asked, "--out", str(tmp_path / name)])
        assert result.exit_code == 0, result.output
        assert "links_0" in (tmp_path / name / "report.html").read_text()
    assert not (tmp_path / "plain" / "links.csv").exists()
    links = pd.read_csv(tmp_path / "sampled" / "links.csv")
    flows = pd.read_csv(tmp_path / "sampled" / "flows.csv")
    last = links[links["link"].str.endswith("-> host4")]
    passed = (last["utilisation"] * 200e9 * 10e-6 / 8).sum()
    assert passed == pytest.approx(flows["bytes"].sum(), rel=0.1)


def test_a_page_that_cannot_be_written_is_refused_before_the_run(tmp_path: Path) -> None:
    result = CliRunner().invoke(simulate, ["incast", "--html", str(tmp_path / "nowhere" / "page.html")])
    assert isinstance(result.exception, ConfigError)
    assert "--html" in str(result.exception)


@pytest.mark.browser
@needs_chromium
def test_a_browser_draws_every_chart(page: Report, tmp_path: Path) -> None:
    document, console = browse(page.write(tmp_path), tmp_path / "profile")
    assert console == []
    assert drawn_plots(document) == {plot.name: True for plot in page.plots}
