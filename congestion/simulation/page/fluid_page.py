"""Phase plots of the fluid model: where queue and rates go from many starts, and that they end at the fixed point.

What is drawn is `fluid.trajectory`, the model with its delays; the windows' upper end (`line_window`) is omitted.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import altair as alt
import click
import numpy as np
import pandas as pd

from congestion.simulation.fluid import FluidModel, trajectory
from congestion.simulation.page.report import put_page
from netlayer.errors import ConfigError
from netlayer.report import Axis, Chart, Figure, Report, charts
from netlayer.report.theme import MUTED, PALETTE
from netlayer.results import check_target

_PATH = click.Path(path_type=Path)
_SIDE = 215  # pixels of a phase plane: three stand side by side
_POINTS = 500  # a trajectory
_ROUND_TRIPS = 90  # at the fixed point
_STEP_US = 0.1
# Starts: windows over those of the fixed point, and queueing delay over the fixed point's.
_STARTS = ((0.15, 0.0), (0.6, 0.0), (1.3, 0.0), (1.0, 1.8), (1.6, 1.2), (0.4, 1.5))
# Rates of two flows over the capacity.
_UNEQUAL = ((0.9, 0.1), (0.05, 0.5), (0.3, 0.02), (0.6, 1.0))
_MOST_FLOWS = 4096
_PLANES = "fluid_phase"


@click.command()
@click.option(
    "--out", type=_PATH, required=True, help="The page, a file, its pictures into plots/ beside it; - is stdout."
)
@click.option("--png", type=_PATH, help="Also the phase plots as a picture.")
@click.option(
    "--flows", default="2,8", show_default=True, metavar="N[,N...]", help="Numbers of equal flows; one or two."
)
@click.option("--base-us", type=click.FloatRange(0.1, 1000), default=8.0, show_default=True, help="Idle round trip.")
@click.option("--gain", type=click.FloatRange(0, 5, min_open=True), help="Of the hybrid  [default: the law's own].")
@click.option(
    "--queue-us",
    type=click.FloatRange(0.1, 1000),
    help="Target's queueing delay of one flow  [default: the law's own].",
)
def command(
    out: Path, png: Path | None, flows: str, base_us: float, gain: float | None, queue_us: float | None
) -> None:
    """Draw the fluid model of the hybrid: queueing delay against rate, from many starts to the fixed point.

    \b
    Examples:
      python -m congestion.simulation.page.fluid_page --out fluid.html
      python -m congestion.simulation.page.fluid_page --flows 4,64 --base-us 30 --gain 0.8 --out swings.html --png
      swings.png
    """
    from congestion.simulation.settings import HybridSettings

    check_target("--out", out)
    check_target("--png", png)
    law = HybridSettings()
    shared = {"gain": gain or law.gain, "queue_us": queue_us or law.queue_us}
    report = build_page([FluidModel(many, base_us, **shared) for many in _numbers(flows)])
    with tempfile.TemporaryDirectory() as folder:
        page = report.write(folder)
        put_page(page, out)
        if png:
            png.write_bytes((page.parent / "plots" / f"{_PLANES}.png").read_bytes())


def build_page(models: Sequence[FluidModel]) -> Report:
    """The page of one model or two, all but for `num_flows` alike, and of two unequal flows under the same settings."""
    first = models[0]
    many = " and ".join(str(model.num_flows) for model in models)
    report = Report(
        "Fluid model of the hybrid",
        f"{many} equal flows over one bottleneck, idle round trip {first.base_us:g} us, gain {first.gain:g}",
    )
    stable = [model.growth < 0 for model in models]
    growths = "; ".join(
        f"with {model.num_flows} flows the slowest mode {'falls' if model.growth < 0 else 'grows'} by "
        f"exp({model.growth:.3f}) a round trip of {model.delay_us:.0f} us"
        for model in models
    )
    report.verdict("PASS" if all(stable) else "FAIL", f"{'Stable' if all(stable) else 'Not stable'}: {growths}.")
    section = report.section("Phase plots", source="predicted")
    section.figures(
        *(
            Figure(f"Queue with {model.num_flows} flows", f"{model.delay_us - model.base_us:.1f}", "us", "fixed point")
            for model in models
        )
    )
    paths = [from_starts(model) for model in models]
    pair = FluidModel(2, first.base_us, first.capacity, first.gain, first.queue_us)
    unequal = from_unequal(pair)
    planes: Any = alt.hconcat(*map(_queue_plane, models, paths), _rate_plane(unequal), spacing=14)
    section.chart(
        planes,
        name=_PLANES,
        caption="Each line begins at its dot; the ring is the fixed point. Left: queueing delay against the rate of "
        "all flows. On the upright line the queue stands still, on the curved one the windows do. Right: two "
        "unequal flows; on the dashed line they are equal, on the dotted one they fill the link.",
    )
    section = report.section("Over time", source="predicted")
    for model, path in zip(models, paths, strict=True):
        section.chart(
            _over_time(path, Axis("queue_us", "Queueing delay", "us", zero=True), f"{model.num_flows} flows"),
            name=f"fluid_queue_{model.num_flows}",
            caption=f"The queue from each start, by the windows W and the queue q of the fixed point, where it is "
            f"{model.delay_us - model.base_us:.1f} us.",
        )
    apart = unequal.assign(apart=(unequal["rate_0"] - unequal["rate_1"]).abs())
    section.chart(
        _over_time(apart, Axis("apart", "Difference of rates, over the capacity", zero=True), "Two unequal flows"),
        name="fluid_unequal",
        caption=_unequal_words(apart),
    )
    report.section("What is drawn").text(
        "The equations, the fixed point and its stability are in the docstring of `congestion/simulation/fluid.py`. "
        "Packets, marks and the windows' upper end are omitted; of few flows the law's own queue is shorter for that."
    )
    return report


def from_starts(model: FluidModel) -> pd.DataFrame:
    """A row a point: `start`, `time_us`, `rate` of all flows over the capacity, `queue_us`."""
    fixed_us = model.delay_us - model.base_us
    window = model.capacity * model.delay_us / model.num_flows
    parts = []
    for times, queue in _STARTS:
        windows = np.full(model.num_flows, times * window)
        parts.append(_path(model, windows, queue * fixed_us, f"{times:g} W, {queue:g} q"))
    return pd.concat(parts, ignore_index=True)


def from_unequal(model: FluidModel) -> pd.DataFrame:
    """Return paths of two flows that begin at unequal rates: columns as `from_starts`, and `rate_0` and `rate_1`."""
    parts = []
    for rates in _UNEQUAL:
        windows = np.array(rates) * model.capacity * model.base_us
        parts.append(_path(model, windows, 0.0, f"{rates[0]:.0%} and {rates[1]:.0%}"))
    return pd.concat(parts, ignore_index=True)


def _path(model: FluidModel, windows: Any, queue_us: float, name: str) -> pd.DataFrame:
    lasts_us = _ROUND_TRIPS * model.delay_us
    rates, queue = trajectory(model, windows, lasts_us, queue_us, _STEP_US)
    # Close together where it moves fast, at first.
    many = len(queue)
    chosen = np.unique(np.r_[0, np.geomspace(1, many - 1, _POINTS).round().astype(int)])
    frame = pd.DataFrame({"time_us": chosen * _STEP_US, "rate": rates[chosen].sum(axis=1), "queue_us": queue[chosen]})
    for flow in range(min(model.num_flows, 2)):
        frame[f"rate_{flow}"] = rates[chosen, flow]
    return frame.assign(start=name)


def _unequal_words(apart: pd.DataFrame) -> str:
    left = float(apart.groupby("start")["apart"].last().max())
    return f"At the end they are at most {left:.1%} of the capacity apart, whatever they began with."


def _queue_plane(model: FluidModel, paths: pd.DataFrame) -> Any:
    fixed_us = model.delay_us - model.base_us
    top = float(paths["queue_us"].max()) * 1.05
    right = max(2.0, min(float(paths["rate"].max()) * 1.05, float(model.num_flows)))
    rate = np.linspace(right / 400, right, 400)
    # The target is the delay: the windows stand still.
    still = pd.DataFrame({"rate": rate, "queue_us": model.queue_us * (1 + np.log2(model.num_flows / rate))})
    still = still[still["queue_us"] <= top]
    x = alt.X(
        "rate:Q",
        scale=alt.Scale(domain=[0, right], nice=False),
        axis=alt.Axis(title="Rate of all, over the capacity", tickCount=5),
    )
    y = alt.Y(
        "queue_us:Q",
        scale=alt.Scale(domain=[0, top], nice=False),
        axis=alt.Axis(title="Queueing delay (us)", tickCount=6),
    )
    full = pd.DataFrame({"rate": [1.0, 1.0], "queue_us": [0.0, top]})
    lines = [_guide(frame, x, y, "rate") for frame in (full, still)]
    ring = _ring(pd.DataFrame({"rate": [1.0], "queue_us": [fixed_us]}), x, y)
    return _plane([*lines, *_drawn(paths, x, y), ring], f"{model.num_flows} equal flows")


def _rate_plane(paths: pd.DataFrame) -> Any:
    scale = alt.Scale(domain=[0, 1.05], nice=False)
    x = alt.X("rate_0:Q", scale=scale, axis=alt.Axis(title="Rate of one flow, over the capacity", tickCount=5))
    y = alt.Y("rate_1:Q", scale=scale, axis=alt.Axis(title="Rate of the other", tickCount=5))
    equal = pd.DataFrame({"rate_0": [0.0, 1.0], "rate_1": [0.0, 1.0]})
    filled = pd.DataFrame({"rate_0": [0.0, 1.0], "rate_1": [1.0, 0.0]})
    guides = [_guide(equal, x, y, "rate_0", [5, 4]), _guide(filled, x, y, "rate_0", [1, 3])]
    ring = _ring(pd.DataFrame({"rate_0": [0.5], "rate_1": [0.5]}), x, y)
    return _plane([*guides, *_drawn(paths, x, y), ring], "Two unequal flows")


def _plane(layers: Sequence[Any], title: str) -> Any:
    return alt.layer(*layers).properties(width=_SIDE, height=_SIDE, title=alt.TitleParams(title, frame="group"))


def _guide(frame: pd.DataFrame, x: Any, y: Any, order: str, dash: Sequence[int] = (5, 4)) -> Any:
    mark = alt.Chart(frame).mark_line(color=MUTED, strokeWidth=1.2, strokeDash=list(dash), clip=True)
    return mark.encode(x=x, y=y, order=alt.Order(f"{order}:Q"))


def _drawn(paths: pd.DataFrame, x: Any, y: Any) -> list[Any]:
    names = list(dict.fromkeys(paths["start"]))
    colour = alt.Color("start:N", scale=alt.Scale(domain=names, range=list(PALETTE[: len(names)])), legend=None)
    lines = alt.Chart(paths).mark_line(strokeWidth=1.6, clip=True)
    firsts = alt.Chart(paths.groupby("start", sort=False).head(1)).mark_point(
        filled=True, size=55, opacity=1, clip=True
    )
    tooltip = [alt.Tooltip("start:N", title="begins with")]
    return [
        lines.encode(x=x, y=y, color=colour, order=alt.Order("time_us:Q"), tooltip=tooltip),
        firsts.encode(x=x, y=y, color=colour, tooltip=tooltip),
    ]


def _ring(frame: pd.DataFrame, x: Any, y: Any) -> Any:
    return alt.Chart(frame).mark_point(size=130, color="#1c2733", strokeWidth=2.2, opacity=1).encode(x=x, y=y)


def _over_time(frame: pd.DataFrame, value: Axis, title: str) -> Chart:
    return charts.line(frame, Axis("time_us", "Time", "us"), value, colour="start", title=title)


def _numbers(text: str) -> list[int]:
    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if not 1 <= len(set(numbers)) == len(numbers) <= 2 or not all(1 <= one <= _MOST_FLOWS for one in numbers):
        rule = f"is not one or two different whole numbers of 1 to {_MOST_FLOWS}"
        raise ConfigError("--flows", text, rule, "give for example 2,8")
    return numbers


if __name__ == "__main__":
    from netlayer.cli import run as run_command

    run_command(command, "python -m congestion.simulation.page.fluid_page")
