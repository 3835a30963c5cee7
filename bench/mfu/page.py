"""The page of `bench.mfu`: MFU of systems side by side, where a step's time goes, and how steady steps and cards are.

Of the records of several calls it makes one page, each call a section; those that are compared there need not have run
side by side: only what one section shows did.

    python -m bench.mfu.page runs/*/records/bench.mfu-*.json --out page
"""

from __future__ import annotations

import io
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import pandas as pd

from netlayer.errors import ConfigError
from netlayer.report import Axis, Figure, Report, Section, Threshold, charts
from netlayer.results import RunRecord, load_record

Row = Mapping[str, Any]

NAME, OURS = "bench.mfu", "ours"
_SHOWN_KINDS = {
    "matrix products": "matrix products",
    "attention": "attention",
    "optimiser": "optimiser",
    "": "norms, activations, loss",
    "copies, fills": "copies, fills",
    "communication": "communication, idle",
    "idle": "communication, idle",
}
"""Kinds of a profile, as many as there are colours that tell themselves apart; "" is any other."""
_LEAST = "data sheet's least"
_COLUMNS = {
    "system": "system",
    "micro_batch_size": "micro-batch",
    "step_ms": "step / ms",
    "spread": "spread",
    "p99_over_median": "p99 / median",
    "tokens_per_s_gpu": "tokens/s/GPU",
    "mfu_full": "MFU, full",
    "mfu_causal": "MFU, causal",
    "mfu_done": "MFU, keys seen",
    "memory_gib": "GiB",
    "clock_mhz": "MHz",
    "power_w": "W",
    "runs": "runs",
    "over_ours": "time over ours",
}
_FORMATS = {
    "step / ms": ",.1f",
    "spread": ".1%",
    "p99 / median": ".3f",
    "tokens/s/GPU": ",.0f",
    "MFU, full": ".3f",
    "MFU, causal": ".3f",
    "MFU, keys seen": ".3f",
    "GiB": ".1f",
    "MHz": ",.0f",
    "W": ",.0f",
    "time over ours": ".3f",
}
_OPTIONS = (
    *("config", "model", "layout", "micro", "micro_batches", "runs", "steps", "warmup", "attention", "channels"),
    *("backend", "seed"),
)


@click.command()
@click.argument("records", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the page.")
def command(records: tuple[Path, ...], out: Path) -> None:
    """Draw the page of one or more RECORDS of bench.mfu.

    \b
    Examples:
      python -m bench.mfu.page runs/mfu-20261124T185443Z/records/*.json --out page
      python -m bench.mfu.page reports/trainer_2xh100_202611.*.json --out page
    """
    loaded = [load_record(path) for path in records]
    for path, record in zip(records, loaded, strict=True):
        if record.name != NAME:
            raise ConfigError("RECORDS", path, f"is a record of {record.name}", f"give those of {NAME}")
        if not any(row["run"] == "median" for row in record.rows):
            raise ConfigError("RECORDS", path, "has no median of any system", "omit it")
    click.echo(f"report: {build_page(loaded).write(out)}", err=True)


def build_page(records: Sequence[RunRecord]) -> Report:
    """The report; `Report.write` puts it into a folder."""
    first = records[0]
    devices = f"{len(first.devices)} x {first.devices[0]}" if first.devices else "no device"
    subtitle = f"{label(first)}, {devices}" if len(records) == 1 else f"{len(records)} comparisons, {devices}"
    report = Report("Model FLOPs utilisation", subtitle, commit=str(first.environment["commit"]))
    reasons = [reason for record in records for reason in _reasons(record)]
    if reasons:
        report.verdict("WARN", f"Not whole: {'; '.join(reasons)}. What was measured is below")
    return report.fill(records, [_overview, _comparisons, _meaning])


def label(record: RunRecord) -> str:
    """Return a record's label: model, layers, layout, batch."""
    job, arguments = record.config["job"], record.arguments
    model, batch = job["model"], job["batch"]
    model_name = f"{model['preset']} ({model['layers']} layers)"
    count = batch["global_batch_size"] // (batch["micro_batch_size"] * job["parallel"]["dp"])
    channels = f", {arguments['channels']} channels" if arguments.get("channels") else ""
    block = ", parallel block" if model["parallel_block"] else ""
    return (
        f"{model_name}, {arguments['layout']} on {len(record.devices)}, {count} x {batch['micro_batch_size']} sequences"
        f", reduced in {job['overlap']['reduce_dtype']}{block}{channels}"
    )


def _reasons(record: RunRecord) -> list[str]:
    failed = [f"{row['system']} failed: {row['reason']}" for row in record.rows if row["run"] == "failed"]
    ended = record.config.get("ended_early_by")  # older records lack it, and what is asked for likewise below
    return [*failed, *([f"ended early by {ended}"] if ended else [])]


def _medians(record: RunRecord) -> list[Row]:
    return [row for row in record.rows if row["run"] == "median"]


def _figure(row: Row) -> tuple[str, Axis]:
    """Return the column that systems are compared by, and its axis: MFU where a peak is known, else tokens."""
    if row["mfu_causal"] is None:
        return "tokens_per_s_gpu", Axis("value", "Tokens/s of a device")
    return "mfu_causal", Axis("value", "MFU, causal attention", "share")


def _overview(report: Report, records: Sequence[RunRecord]) -> None:
    if len(records) == 1:
        return
    section = report.section("All comparisons", source="measured")
    rows = [
        {"system": f"{index}: {row['system'].removeprefix('ours: ')}", "over": row["over_ours"]}
        for index, record in enumerate(records, start=1)
        for row in _medians(record)
        if row["over_ours"] is not None and row["system"] != OURS
    ]
    if rows:
        axes = Axis("system", "Comparison: system"), Axis("over", "Time for a token, over ours")
        chart = charts.bars(pd.DataFrame(rows), *axes, threshold=Threshold(1.0, "ours"))
        section.chart(chart, name="overview", caption="Medians of runs; above 1: slower than ours in that comparison.")
    section.keyvalues({str(index): label(record) for index, record in enumerate(records, start=1)})


def _comparisons(report: Report, records: Sequence[RunRecord]) -> None:
    """Open a section a call; its charts have its number in their names where there are several."""
    for index, record in enumerate(records):
        _comparison(report, record, f"_{index + 1}" if len(records) > 1 else "")


def _comparison(report: Report, record: RunRecord, suffix: str) -> None:
    medians = _medians(record)
    title = f"{suffix.removeprefix('_')}. {label(record)}" if suffix else "Systems side by side"
    section = report.section(title, source="measured")
    section.figures(*(_tile(row) for row in medians))
    runs = pd.DataFrame([row for row in record.rows if isinstance(row["run"], int)])
    column, axis = _figure(medians[0])
    values = runs.assign(value=runs[column], run=[f"run {run}" for run in runs["run"]])
    section.chart(
        charts.bars(values, Axis("system", "System"), axis, colour="run"),
        name=f"systems{suffix}",
        caption="Each run of each system: they took turns.",
    )
    frame = pd.DataFrame(medians).reindex(columns=list(_COLUMNS)).rename(columns=_COLUMNS)
    frame = frame.dropna(axis="columns", how="all")
    section.table(
        frame,
        caption="Medians of runs; spread: largest less least over the median; p99 / median: of single steps.",
        formats={name: spec for name, spec in _FORMATS.items() if name in frame},
    )
    _time(section, record, suffix)
    _steps(section, runs, suffix)
    _cards(section, record, suffix)
    section.code(_command(record))


def _tile(row: Row) -> Figure:
    over = row["over_ours"]
    beside = "" if over is None or over == 1 else f", {over:.3f} of ours' time"
    if row["mfu_causal"] is None:
        return Figure(row["system"], f"{row['step_ms']:,.1f}", "ms", f"a step{beside}")
    hint = f"causal ({row['mfu_full']:.3f} full), {row['step_ms']:,.1f} ms{beside}"
    return Figure(row["system"], f"{row['mfu_causal']:.3f}", "", hint)


def _time(section: Section, record: RunRecord, suffix: str) -> None:
    """Draw the time of a step as stacked bars by kind of kernel, and the least times as a bar of their own."""
    profiles = [row for row in record.rows if row["run"] == "profile"]
    if not profiles:
        return
    times = {row["system"]: [(kind["kind"], kind["ms"]) for kind in row["kinds"]] for row in profiles}
    times[_LEAST] = list(profiles[0]["least_ms"].items())
    rows = []
    for system, parts in times.items():
        sums = dict.fromkeys(_SHOWN_KINDS.values(), 0.0)
        for kind, ms in parts:
            sums[_SHOWN_KINDS.get(kind, _SHOWN_KINDS[""])] += ms
        rows += [{"system": system, "kind": kind, "ms": ms} for kind, ms in sums.items() if parts]
    axes = Axis("system", "System"), Axis("ms", "Time", "ms")
    section.chart(
        charts.bars(pd.DataFrame(rows), *axes, colour="kind", stacked=True),
        name=f"time{suffix}",
        caption="Where the time of a step goes, under the profiler, on rank 0. Kernels that run at once count for the "
        "first of these kinds: communication is what nothing hides.",
    )
    hosts = ", ".join(f"{row['launch_ms']:,.1f} ms of {row['system']}" for row in profiles if "launch_ms" in row)
    if hosts:
        section.text(f"To launch a step the host of rank 0 takes, waits included: {hosts}.")


def _steps(section: Section, runs: pd.DataFrame, suffix: str) -> None:
    rows: list[dict[str, Any]] = []
    for system, own in runs.groupby("system", sort=False):
        each = [value for values in own["each_ms"] for value in values]
        rows += [{"system": system, "step": index, "ms": value} for index, value in enumerate(each, start=1)]
    chart = charts.line(pd.DataFrame(rows), Axis("step", "Timed step"), Axis("ms", "Step", "ms"), colour="system")
    caption = f"Every timed step; runs of {len(runs['each_ms'].iloc[0])} steps behind each other."
    section.chart(chart, name=f"steps{suffix}", caption=caption)


def _cards(section: Section, record: RunRecord, suffix: str) -> None:
    """Clock and power of each GPU over the call."""
    lines = "\n".join(record.config.get("gpus", ()))
    if not lines:
        return
    names = ["when", "gpu", "mhz", "watts", "celsius"]
    frame = pd.read_csv(io.StringIO(lines), names=names, skipinitialspace=True, on_bad_lines="skip")
    for name in ("mhz", "watts"):
        frame[name] = pd.to_numeric(frame[name].astype(str).str.split().str[0], errors="coerce")
    frame["when"] = pd.to_datetime(frame["when"], errors="coerce")
    frame = frame.dropna().assign(gpu=lambda rows: "GPU " + rows["gpu"].astype(str))
    if frame.empty:
        return
    frame["seconds"] = (frame["when"] - frame["when"].min()).dt.total_seconds()
    over = Axis("seconds", "Since the call began", "s")
    section.chart(
        charts.line(frame, over, Axis("watts", "Power", "W"), colour="gpu"),
        name=f"power{suffix}",
        caption="Power of each GPU, a reading a second, starts and compiling between the turns included.",
    )
    section.chart(
        charts.line(frame, over, Axis("mhz", "Clock (MHz)"), colour="gpu"),
        name=f"clock{suffix}",
        caption="Clock of its multiprocessors: where it falls under load, power is the limit.",
    )


def _command(record: RunRecord) -> str:
    """Return the command line, near enough to repeat the run; older records lack some options."""
    arguments, argv = record.arguments, ["python", "-m", NAME]
    for name in _OPTIONS:
        if arguments.get(name):
            argv += [f"--{name.replace('_', '-')}", str(arguments[name])]
    for name in ("also", "set", "micro_of"):
        argv += [word for value in arguments.get(name, ()) for word in (f"--{name.replace('_', '-')}", str(value))]
    argv += ["--peers", ",".join(arguments["peers"]) or "none"] if "peers" in arguments else []
    argv += [f"--{name}" for name in ("cumulative", "profile") if arguments.get(name)]
    return shlex.join(argv)


def _meaning(report: Report, records: Sequence[RunRecord]) -> None:
    section, record = report.section("What is what"), records[0]
    peak = record.config["peak_flops"]
    known = f"The peak of a device is {peak / 1e12:,.1f} TFLOP/s." if peak else "No peak is known of this device."
    formula = record.config.get("mfu_formula")
    section.text(f"{formula}. {known}" if formula else known)
    section.text(
        "All systems of a comparison have the same model, initial values, tokens, optimiser and dtype of reduction, "
        "and take turns; a run is timed over its steps with one synchronisation at each end. What differs in a row of "
        "ours stands in its name."
    )
    section.note(
        f"`{_LEAST}`: products and attention at the peak of FLOPs, the optimiser at the memory's bandwidth. No card "
        "has the power to hold that peak through a step."
    )


if __name__ == "__main__":
    from netlayer.cli import run

    run(command, "python -m bench.mfu.page")
