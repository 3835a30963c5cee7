"""The arena's page from made-up rows: what it says, what it draws, and that a browser draws it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from congestion.arena.page import Findings, build_page
from congestion.arena.protocol import SUITE
from netlayer.report import Report
from tests.browser import browse, drawn_plots, needs_chromium
from tests.congestion.arena_rows import WINNING, made_up

FEW = replace(SUITE.test, conditions=SUITE.test.conditions[:2])
CASES = ("all-to-all 64/200G-ecmp", "incast 32:1/200G-ecmp")


def _findings() -> Findings:
    rng = np.random.default_rng(0)
    flows = [
        {"law": law, "case": case, "fct_us": fct}
        for law, (slower, *_) in WINNING.items()
        for case in CASES
        for fct in slower * rng.lognormal(5, 0.4, 200)
    ]
    tiers = [
        {"law": law, "tier": tier, "pause_share": share * part}
        for law, (*_, share) in WINNING.items()
        for tier, part in (("host", 1.5), ("ToR", 0.8), ("spine", 0.2))
    ]
    samples = [
        {"law": law, "case": CASES[0], "time_us": time, "rate_bps": 1e13 / slower, "queue_bytes": 4e5 * slower + time}
        for law, (slower, *_) in WINNING.items()
        for time in range(0, 400, 10)
    ]
    buffers = [{"workload": "incast 32:1", "condition": "200G-ecmp", "buffer_bytes": 12 * 2**20, "pause_share": 0.0123}]
    return Findings(
        made_up(cases=FEW),
        "hybrid",
        flows=pd.DataFrame(flows),
        tiers=pd.DataFrame(tiers),
        samples=pd.DataFrame(samples),
        buffers=pd.DataFrame(buffers),
        command="netlayer arena --out runs/arena",
    )


@pytest.fixture(scope="module")
def page() -> Report:
    return build_page(_findings())


def test_it_says_verdict_suite_and_every_case(page: Report) -> None:
    text = page.html()
    assert "3 of 3 claims hold, on a part of the suite only" in text
    assert SUITE.digest in text
    assert "On the front: hybrid." in text
    assert "12" in text.partition("buffer (MiB)")[2]
    assert "netlayer arena --out runs/arena" in text
    every_case = next(section for section in page.sections if section.title == "Every case")
    assert len(list(every_case.blocks[0].rows)) == len(FEW.cases)  # type: ignore[union-attr]


def test_it_draws_what_there_is(page: Report) -> None:
    names = {"completion_ratio", "over_bound", "front", "fct_0", "fct_1", "pause_tiers", "rate_0", "queue_0"}
    assert {plot.name for plot in page.plots} == names
    bare = build_page(Findings(made_up(cases=FEW), "hybrid"))
    assert {plot.name for plot in bare.plots} == {"completion_ratio", "over_bound", "front"}
    assert "Where it pauses" not in [section.title for section in bare.sections]


def test_the_ratios_are_drawn_with_their_intervals(page: Report) -> None:
    plot = next(plot for plot in page.plots if plot.name == "completion_ratio")
    data = max(plot.spec["datasets"].values(), key=len)
    assert len(data) == len(FEW.workloads) * 4
    assert all(row["low"] < row["ratio"] < row["high"] for row in data)


def test_a_law_keeps_its_colour_from_chart_to_chart(page: Report) -> None:
    laws = ["hybrid", "none", "dcqcn", "swift", "nscc"]
    for plot in page.plots:
        domains = [value for key, value in _walk(plot.spec) if key == "domain" and "hybrid" in value]
        assert all(domain == laws for domain in domains)
        assert domains or plot.name == "pause_tiers"


def test_rows_that_make_no_comparison_make_no_page() -> None:
    findings = _findings()
    with pytest.raises(ValueError, match="lacks 1 runs"):
        build_page(replace(findings, rows=findings.rows.iloc[1:]))


@pytest.mark.browser
@needs_chromium
def test_a_browser_draws_every_chart_and_has_nothing_to_complain_about(page: Report, tmp_path: Path) -> None:
    document, console = browse(page.write(tmp_path), tmp_path / "profile")
    assert console == []
    assert drawn_plots(document) == {plot.name: True for plot in page.plots}


def _walk(tree: object) -> list[tuple[str, list[str]]]:
    if isinstance(tree, list):
        return [found for part in tree for found in _walk(part)]
    if not isinstance(tree, dict):
        return []
    own = [(key, value) for key, value in tree.items() if isinstance(value, list)]
    return own + [found for part in tree.values() for found in _walk(part)]
