"""Phase plots of the fluid model: where the trajectories end, and what the command writes."""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from congestion.simulation.fluid import FluidModel
from congestion.simulation.page.fluid_page import build_page, command, from_starts, from_unequal
from netlayer.errors import ConfigError


def test_every_start_ends_at_the_fixed_point() -> None:
    model = FluidModel(2, 8.0)
    last = from_starts(model).groupby("start", sort=False).last()
    assert len(last) > 3
    assert last["rate"].tolist() == pytest.approx([1.0] * len(last), rel=0.01)
    assert last["queue_us"].tolist() == pytest.approx([model.delay_us - model.base_us] * len(last), rel=0.01)


def test_unequal_flows_begin_apart_and_become_equal() -> None:
    paths = from_unequal(FluidModel(2, 8.0))
    apart = (paths["rate_0"] - paths["rate_1"]).abs().groupby(paths["start"], sort=False)
    assert (apart.first() > 0.2).all()
    assert (apart.last() < 0.01).all()


def test_an_unstable_gain_is_said() -> None:
    text = build_page([FluidModel(8, 8.0, gain=2.0)]).html()
    assert "Not stable" in text


def test_the_command_writes_page_and_picture(tmp_path: Path) -> None:
    page, picture = tmp_path / "fluid.html", tmp_path / "fluid.png"
    given = ["--flows", "2", "--base-us", "2", "--out", str(page), "--png", str(picture)]
    result = CliRunner().invoke(command, given)
    assert result.exit_code == 0, result.output
    assert "fluid_phase" in page.read_text()
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("flows", ["two", "2,2", "2,8,16", "0", ""])
def test_numbers_of_flows_that_cannot_be_drawn_are_refused(flows: str, tmp_path: Path) -> None:
    result = CliRunner().invoke(command, ["--flows", flows, "--out", str(tmp_path / "fluid.html")])
    assert isinstance(result.exception, ConfigError)
