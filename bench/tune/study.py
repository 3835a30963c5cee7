"""`python -m bench.tune.study`: a tuned step against one with defaults, and what each setting is worth switched off.

Predicted and simulated throughout. Two comparisons: with the defaults (what runs where nobody sets anything), and with
all settings off (no overlap, one bucket a block, ranks anywhere); of each setting its share, the others as planned.
Shares need not add up to the whole: settings act on the same waiting time. It writes the table of
reports/tune_202611.md as Markdown, and a record.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import numpy as np

from bench.tune.gains import State, StepModel, gain_of
from bench.tune.planner import Planned, estimated_start, make_plan
from bench.tune.profile import Gain
from netlayer.command import RunOptions, run_options
from netlayer.errors import ConfigError

_EVERY_STEPS = "job.checkpoint.every_steps"
_SIMULATED = ("placement.strategy", "NCCL_IB_QPS_PER_CONNECTION", "nic.profile")


@click.command()
@click.option("--device", default="H100", show_default=True, metavar="NAME", help="A100, H100, H200.")
@click.option(
    "--measured", "records", type=click.Path(path_type=Path), multiple=True, help="As for `netlayer tune plan`."
)
@click.option("--simulate", is_flag=True, help="As for `netlayer tune plan`.")
@run_options
def main(options: RunOptions, device: str, records: tuple[Path, ...], simulate: bool) -> None:
    """Print what a plan gains over defaults and over everything off, and each setting's share, as Markdown.

    \b
    Example:
      python -m bench.tune.study --config examples/megascale-12288.toml --device A100 --simulate
    """
    from bench.estimate.command import make_record
    from bench.tune.command import keep_record, read_inputs
    from netlayer.progress import Stages
    from netlayer.results import utc_now

    started = utc_now()
    config = options.load_config()
    config.check_world()
    with Stages() as stages:
        inputs = read_inputs(options, config, device, None, records, (), simulate, stages)
        if inputs.device is None:
            raise ConfigError("--device", device, "has no step to compare", "give one of A100, H100, H200")
        with stages.open("plan") as bar:
            planned = make_plan(inputs, bar)
        with stages.open("settings off") as bar:
            rows = study_rows(planned, bar)
    arguments = {"device": device, "measured": [str(path) for path in records], "simulate": simulate}
    columns = [row.to_row() for row in rows]
    keep_record(
        options, make_record(options, "tune.study", columns, started, arguments, config.model_dump(mode="json"))
    )
    if str(options.json_file) != "-":
        for line in markdown(rows):
            click.echo(line)


@dataclass(frozen=True)
class WholeRow:
    """The tuned step against a step with other settings: median seconds of both, and the share of the step saved."""

    against: str
    then_s: float
    tuned_s: float
    saved: Gain

    def to_row(self) -> dict[str, Any]:
        """Return the columns of a record."""
        times = {"then_s": self.then_s, "tuned_s": self.tuned_s}
        return {"table": "whole", "against": self.against, **times, **_columns("saved", self.saved)}


@dataclass(frozen=True)
class SettingRow:
    """One setting: its tuned and its default value, and the share of the step that it saves over default and off."""

    setting: str
    value: Any
    default: Any
    over_default: Gain
    over_off: Gain

    def to_row(self) -> dict[str, Any]:
        """Return the columns of a record."""
        return {
            "table": "setting",
            "setting": self.setting,
            "value": self.value,
            "default": self.default,
            **_columns("over_default", self.over_default),
            **_columns("over_off", self.over_off),
            "evidence": self.over_default.evidence,
        }


@dataclass(frozen=True)
class LifeRow:
    """The time between checkpoints over a run's life.

    Args:
        value: steps between two checkpoints.
        every_s, usual_s: seconds between two checkpoints, as planned and by default.
        ettr: effective training time ratio as planned.
        over_default: points of it won over the default.
    """

    value: Any
    every_s: float
    usual_s: float
    ettr: float
    over_default: Gain

    def to_row(self) -> dict[str, Any]:
        """Return the columns of a record."""
        return {
            "table": "life",
            "setting": _EVERY_STEPS,
            "value": self.value,
            "every_s": self.every_s,
            "usual_s": self.usual_s,
            "ettr": self.ettr,
            **_columns("over_default", self.over_default),
            "evidence": "simulated",
        }


StudyRow = WholeRow | SettingRow | LifeRow


def study_rows(planned: Planned, on_progress: Any = lambda _done, _total, _name: None) -> list[StudyRow]:
    """Return a row for the whole step against each comparison, one a setting, and one for checkpoints if planned."""
    model, state = planned.model, planned.state
    assert model is not None
    assert state is not None
    plain = state
    for off in planned.offs.values():
        plain = off(plain)
    rows: list[StudyRow] = [
        _whole("defaults", model, state, estimated_start(planned)),
        _whole("all off", model, state, plain),
    ]
    for index, (key, off) in enumerate(planned.offs.items()):
        on_progress(index, len(planned.offs), key)
        setting, simulated = planned.settings[key], key in _SIMULATED
        over_off = model.gain(state, off(state), simulated=simulated)
        over_default = model.gain(state, planned.defaults[key](state), simulated=simulated)
        rows.append(SettingRow(key, setting.value, setting.default, over_default, over_off))
    if planned.checkpoints is not None:
        plan = planned.checkpoints
        rows.append(LifeRow(planned.settings[_EVERY_STEPS].value, plan.every_s, plan.usual_s, plan.ettr, plan.gain))
    return rows


def markdown(rows: Sequence[StudyRow]) -> list[str]:
    """Return the rows as Markdown tables."""
    lines = ["| against | step then | step tuned | saved, of the step |", "|---|---|---|---|"]
    for whole in (row for row in rows if isinstance(row, WholeRow)):
        lines.append(f"| {whole.against} | {whole.then_s:.3f} s | {whole.tuned_s:.3f} s | {_cell(whole.saved)} |")
    lines += [
        "",
        "| setting | tuned | default | saved over the default | saved over off | evidence |",
        "|---|---|---|---|---|---|",
    ]
    for one in (row for row in rows if isinstance(row, SettingRow)):
        own = "is the default" if one.value == one.default else _cell(one.over_default)
        lines.append(
            f"| `{one.setting}` | {_text(one.value)} | {_text(one.default)} | {own} | {_cell(one.over_off)} "
            f"| {one.over_default.evidence} |"
        )
    for life in (row for row in rows if isinstance(row, LifeRow)):
        lines += [
            "",
            f"A save each {life.every_s:,.0f} s ({life.value} steps) against each {life.usual_s:,.0f} s: "
            f"effective training time {life.ettr:.1%}, {_cell(life.over_default, ' points')} more (simulated)",
        ]
    return lines


def _whole(against: str, model: StepModel, tuned: State, then: State) -> WholeRow:
    times, others = model.steps(tuned), model.steps(then)
    saved = gain_of(1 - times / others, "formula")
    return WholeRow(against, float(np.median(others)), float(np.median(times)), saved)


def _columns(name: str, gain: Gain) -> dict[str, float]:
    return {f"{name}_share": gain.share, f"{name}_low_share": gain.low, f"{name}_high_share": gain.high}


def _cell(gain: Gain, unit: str = "%") -> str:
    share, low, high = (100 * value for value in (gain.share, gain.low, gain.high))
    return f"{share:.2f}{unit} ({low:.2f} to {high:.2f})"


def _text(value: Any) -> str:
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    from netlayer.cli import run

    run(main, "python -m bench.tune.study")
