"""`python -m bench.tune.study`: a tuned step against one with defaults, and what each setting is worth switched off.

Predicted and simulated throughout. Two comparisons: with the defaults (what runs where nobody sets anything), and with
all settings off (no overlap, one bucket a block, ranks anywhere); of each setting its share, the others as planned.
Shares need not add up to the whole: settings act on the same waiting time. It writes the table of
reports/tune_202611.md as Markdown, and a record.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import numpy as np

from bench.tune.gains import State, StepModel, gain_of
from bench.tune.planner import Planned, estimated_start, make_plan
from bench.tune.profile import Gain
from netlayer.command import RunOptions, run_options
from netlayer.errors import ConfigError

_SIMULATED = ("placement.strategy", "NCCL_IB_QPS_PER_CONNECTION", "nic.profile")


@click.command()
@click.option("--device", default="H100", show_default=True, metavar="NAME", help="A100, H100, H200.")
@click.option("--measured", "records", type=click.Path(path_type=Path), multiple=True, help="As of tune plan.")
@click.option("--simulate", is_flag=True, help="As of tune plan.")
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
    keep_record(options, make_record(options, "tune.study", rows, started, arguments, config.model_dump(mode="json")))
    if str(options.json_file) != "-":
        for line in markdown(rows):
            click.echo(line)


def study_rows(planned: Planned, on_progress: Any = lambda _done, _total, _name: None) -> list[dict[str, Any]]:
    """Return a row for the whole against each comparison, and one a setting."""
    model, state = planned.model, planned.state
    assert model is not None
    assert state is not None
    plain = state
    for off in planned.offs.values():
        plain = off(plain)
    rows = [
        _whole("defaults", model, state, estimated_start(planned)),
        _whole("all off", model, state, plain),
    ]
    for index, (key, off) in enumerate(planned.offs.items()):
        on_progress(index, len(planned.offs), key)
        setting, simulated = planned.settings[key], key in _SIMULATED
        worth = model.gain(state, off(state), simulated=simulated)
        gain = model.gain(state, planned.defaults[key](state), simulated=simulated)
        rows.append(
            {
                "table": "setting",
                "setting": key,
                "value": setting.value,
                "default": setting.default,
                **_columns("over_default", gain),
                **_columns("over_off", worth),
                "evidence": gain.evidence,
            }
        )
    if planned.checkpoints is not None:
        checkpoints = planned.checkpoints
        rows.append(
            {
                "table": "life",
                "setting": "job.checkpoint.every_steps",
                "value": planned.settings["job.checkpoint.every_steps"].value,
                "every_s": checkpoints.every_s,
                "usual_s": checkpoints.usual_s,
                "ettr": checkpoints.ettr,
                **_columns("over_default", checkpoints.gain),
                "evidence": "simulated",
            }
        )
    return rows


def markdown(rows: list[dict[str, Any]]) -> list[str]:
    """Return the rows as Markdown tables."""
    lines = ["| against | step then | step tuned | saved, of the step |", "|---|---|---|---|"]
    for row in (row for row in rows if row["table"] == "whole"):
        lines.append(f"| {row['against']} | {row['then_s']:.3f} s | {row['tuned_s']:.3f} s | {_cell(row, 'saved')} |")
    lines += [
        "",
        "| setting | tuned | default | saved over the default | saved over off | evidence |",
        "|---|---|---|---|---|---|",
    ]
    for row in (row for row in rows if row["table"] == "setting"):
        value, default = (_text(row[name]) for name in ("value", "default"))
        own = "is the default" if row["value"] == row["default"] else _cell(row, "over_default")
        lines.append(
            f"| `{row['setting']}` | {value} | {default} | {own} | {_cell(row, 'over_off')} | {row['evidence']} |"
        )
    for row in (row for row in rows if row["table"] == "life"):
        lines += [
            "",
            f"A save each {row['every_s']:,.0f} s ({row['value']} steps) against each {row['usual_s']:,.0f} s: "
            f"effective training time {row['ettr']:.1%}, {_cell(row, 'over_default', unit=' points')} more (simulated)",
        ]
    return lines


def _whole(against: str, model: StepModel, tuned: State, then: State) -> dict[str, Any]:
    times, others = model.steps(tuned), model.steps(then)
    return {
        "table": "whole",
        "against": against,
        "then_s": float(np.median(others)),
        "tuned_s": float(np.median(times)),
        **_columns("saved", gain_of(1 - times / others, "formula")),
    }


def _columns(name: str, gain: Gain) -> dict[str, float]:
    return {f"{name}_share": gain.share, f"{name}_low_share": gain.low, f"{name}_high_share": gain.high}


def _cell(row: dict[str, Any], name: str, scale: float = 100, unit: str = "%") -> str:
    share, low, high = (scale * row[f"{name}{part}_share"] for part in ("", "_low", "_high"))
    return f"{share:.2f}{unit} ({low:.2f} to {high:.2f})"


def _text(value: Any) -> str:
    return "-" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


if __name__ == "__main__":
    from netlayer.cli import run

    run(main, "python -m bench.tune.study")
