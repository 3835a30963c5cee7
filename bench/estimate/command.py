"""`netlayer estimate`: a step that was not run, the layouts that fit, and how far such estimates are off."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netlayer.command import FiniteRange, RunOptions, run_options, run_options_without_config
from netlayer.errors import CheckFailed, ConfigError

if TYPE_CHECKING:
    from bench.estimate.plan import Plan
    from bench.estimate.step import StepEstimate

_PATH = click.Path(path_type=Path)
_DEVICE = click.option(
    "--device",
    default="H100",
    show_default=True,
    metavar="NAME",
    help="A100, H100, H200, H100-500W, or FILE.toml: a card of yours (docs/benchmarks.md).",
)
_PRECISION = click.option(
    "--precision", type=click.Choice(["bf16", "fp8"]), default="bf16", show_default=True, help="Of the blocks' GEMMs."
)
_ZERO = click.option(
    "--zero",
    type=click.IntRange(0, 3),
    default=2,
    show_default=True,
    help="Distributed optimiser: 0 none, 1 and 2 as the trainer's, 3 FSDP.",
)
_LAUNCH = click.option(
    "--launch-us",
    type=FiniteRange(0, 1e6),
    default=0.0,
    show_default=True,
    metavar="US",
    help="What a launch takes the host (launch_ms over kernels of a profile of bench.mfu there: 76 to 135 in our"
    " records without tensor parallelism and stages, waits included); 0: not modelled.",
)
_FABRIC = click.option(
    "--fabric/--no-fabric",
    default=True,
    show_default=True,
    help="Slow what leaves a server by the hash collisions that topology finds on the cluster.",
)


@click.group()
def estimate() -> None:
    """Predict step time, MFU, memory and exposed communication of jobs on GPUs that are not there."""


@estimate.command()
@_DEVICE
@_PRECISION
@_ZERO
@click.option("--cp", type=click.IntRange(1), default=1, show_default=True, help="Context-parallel degree, besides.")
@click.option(
    "--kernels",
    type=click.Choice(["fused", "compiled", "eager"]),
    default="fused",
    show_default=True,
    help="Of norms and activations.",
)
@click.option("--tokens", default=1e12, show_default=True, type=FiniteRange(1, 1e18), help="Tokens to count days for.")
@_LAUNCH
@_FABRIC
@run_options
def step(
    options: RunOptions,
    device: str,
    precision: str,
    zero: int,
    cp: int,
    kernels: str,
    tokens: float,
    launch_us: float,
    fabric: bool,
) -> None:
    """Predict a step of --config: time, MFU, where it goes, memory a rank, days for --tokens.

    MFU is given both ways, attention in full and by half, with its peak. The pipeline is the trainer's own schedule;
    all that is printed is predicted, nothing measured. --cp adds context parallelism to a job that does not say
    parallel.cp: it then has cp times as many ranks. A job with model.fp8 is of --precision fp8.

    \b
    Examples:
      netlayer estimate step --config examples/megascale-12288.toml --device A100
      netlayer estimate step --config examples/h200x8.toml --device H200 --json -
      netlayer estimate step --precision fp8 --zero 3 --set model.preset=llama3-8b --set model.dtype=bfloat16 \\
          --set cluster.gpus_per_server=8 --set parallel.dp=8 --set batch.micro_batch_size=1
    """
    from bench.estimate.network import fabric_slowdowns
    from bench.estimate.step import MFU_FORMULA, estimate_step
    from netlayer.results import utc_now

    started = utc_now()
    config = options.load_config()
    config.check_world()
    plan = _plan(config, device, precision, zero, cp, kernels, launch_us)
    slowdown, pp_slowdown = fabric_slowdowns(config, options.seed) if fabric else (1.0, 1.0)
    result = estimate_step(plan, slowdown=slowdown, pp_slowdown=pp_slowdown)
    slowdowns = {"fabric_slowdown": slowdown, "fabric_pp_slowdown": pp_slowdown}
    row = {**_row(plan, result), **slowdowns, "days": result.days(tokens), "mfu_formula": MFU_FORMULA}
    arguments = {"device": device, "precision": precision, "zero": zero, "cp": cp, "kernels": kernels, "tokens": tokens}
    arguments["launch_us"] = launch_us
    _keep(options, "estimate.step", [row], started, {**arguments, "fabric": fabric}, config.model_dump(mode="json"))
    if str(options.json_file) != "-":
        _print_step(plan, result, slowdown, pp_slowdown, tokens)


@estimate.command()
@_DEVICE
@_PRECISION
@_ZERO
@click.option("--top", type=click.IntRange(1, 100), default=5, show_default=True, help="Layouts to print.")
@_LAUNCH
@run_options
def search(options: RunOptions, device: str, precision: str, zero: int, top: int, launch_us: float) -> None:
    """Rank the layouts of --config's job on its GPUs that memory and divisibility allow, with reasons.

    tp, pp, vpp, cp (sequences of 8,192 tokens and more), micro-batch and recomputation vary; model, batch, GPUs and
    switches are --config's. Steps are predicted.

    \b
    Examples:
      netlayer estimate search --config examples/megascale-12288.toml --device A100
      netlayer estimate search --config examples/h200x8.toml --device H200 --top 3 --json -
    """
    from bench.estimate.search import search as run_search
    from netlayer.printing import print_rows
    from netlayer.progress import Stages
    from netlayer.results import utc_now

    started = utc_now()
    config = options.load_config()
    config.check_world()
    plan = _plan(config, device, precision, zero, 1, "fused", launch_us)
    with Stages() as stages, stages.open("layouts") as bar:
        result = run_search(plan, top=top, on_progress=bar)
    rows = [
        {"rank": rank, **_row(one.plan, one.estimate), "layout": one.label, "reason": one.reason}
        for rank, one in enumerate(result.best, start=1)
    ]
    arguments = {"device": device, "precision": precision, "zero": zero, "top": top, "launch_us": launch_us}
    _keep(options, "estimate.search", rows, started, arguments, config.model_dump(mode="json"))
    if str(options.json_file) == "-":
        return
    refused = ", ".join(f"{number:,} by {rule}" for rule, number in result.refused.most_common())
    note = f"{result.tried:,} layouts tried; refused: {refused or 'none'}. Loses by: shares of the step"
    columns = {
        "rank": "",
        "layout": "layout",
        "step_s": "step",
        "p99_s": "p99",
        "mfu_full": "MFU full",
        "mfu_causal": "causal",
        "reason": "loses by",
    }
    print_rows(f"predicted: {plan.num_gpus:,} {plan.device.name}, {precision}", rows, columns, note)


@estimate.command()
@click.argument("estimator", required=False, type=_PATH)
@click.option("--rows", "rows_file", type=_PATH, help="Rows in the form of bench/estimate/rows.csv in place of those.")
@click.option("--page/--no-page", "pages", default=True, show_default=True, help="Write the page.")
@click.option(
    "--residuals",
    is_flag=True,
    help="Print and record every row's error, and where its predicted step goes.",
)
@click.option("--check", is_flag=True, help="Exit 1 where a bar is missed.")
@run_options_without_config
def arena(
    options: RunOptions, estimator: Path | None, rows_file: Path | None, pages: bool, residuals: bool, check: bool
) -> None:
    """Set estimators beside null models on all public rows: each family predicted from the others alone.

    A family is a model, its software and its source. Errors are points of MFU, attention in full. ESTIMATOR is a Python
    file that enters one more: fit(rows) gives predict(plan), the seconds of a step. It is imported, so it runs with
    your rights.

    \b
    Examples:
      netlayer estimate arena --out runs/arena
      netlayer estimate arena my_estimator.py --no-page --json -
      netlayer estimate arena --no-page --residuals
    """
    from bench.estimate import arena as room
    from bench.estimate.rows import ASIDE_FILE, load_rows
    from netlayer.output import open_output
    from netlayer.progress import Stages
    from netlayer.results import utc_now

    started = utc_now()
    rows = load_rows(rows_file) if rows_file else load_rows()
    kept_aside = [] if rows_file else load_rows(ASIDE_FILE)
    entries = room.entries(estimator)
    with open_output(options.out, "estimate-arena") as out:
        predictions: dict[str, list[room.Prediction]] = {}
        aside: dict[str, list[room.Prediction]] = {}
        with Stages() as stages:
            for entry in entries:
                with stages.open(entry.name) as bar:
                    predictions[entry.name] = room.run_entry(entry, rows, bar)
                    aside[entry.name] = room.run_aside(entry, rows, kept_aside)
        predictions[room.CARRIED] = room.carried(rows)
        table = {name: room.scores(each, rows) for name, each in predictions.items()}
        bars = room.bars(table)
        repeats = room.repeats(predictions[room.OURS])
        aside_table = {name: room.scores(each, kept_aside) for name, each in aside.items() if kept_aside}
        aside_rows = [
            {**row, "table": f"aside {row['table']}"} for row in (*_prediction_rows(aside), *_score_rows(aside_table))
        ]
        repeated_rows = [{"table": "repeats", **dataclasses.asdict(repeats)}] if repeats else []
        residual_rows = _residual_rows(predictions[room.OURS]) if residuals else []
        record_rows = [
            *_prediction_rows(predictions),
            *_score_rows(table),
            *_bar_rows(bars),
            *repeated_rows,
            *aside_rows,
            *residual_rows,
        ]
        arguments = {"estimator": str(estimator or ""), "rows": str(rows_file or ""), "residuals": residuals}
        record = make_record(options, "estimate.arena", record_rows, started, arguments, {})
        record.save(out.part / "records")
        if pages:
            from bench.estimate.page import arena_page

            arena_page(predictions, table, bars, record, aside_table).write(out.part)
        for path in out.publish():
            click.echo(f"record: {path}", err=True)
        if pages:
            click.echo(f"report: {out.folder / 'report.html'}", err=True)
    _write_json(options, record)
    if str(options.json_file) != "-":
        if residuals:
            _print_residuals(residual_rows)
        _print_arena(table, bars)
        if repeats:
            _print_repeats(repeats)
        _print_others(predictions, aside_table)
    missed = [bar for bar in bars if not bar.is_met]
    if check and missed:
        raise CheckFailed(f"{len(missed)} of {len(bars)} bars missed: {'; '.join(bar.name for bar in missed)}")


@estimate.command()
@run_options_without_config
def paper(options: RunOptions) -> None:
    """Print MegaScale's tables (NSDI'24) beside predictions from its smallest baseline row alone.

    Table 2 in seconds, the 530B model, and what each step of the ablation adds in points of MFU. Bars: seconds within
    4%, points within 2. Then Megatron-LM's authors' own steps on A100, from their 175B alone: one has the layout, the
    batch and the cards of the 530B on 2,240 GPUs.

    \b
    Example:
      netlayer estimate paper
    """
    from bench.estimate.paper import paper_rows, step_lines, summary
    from netlayer.printing import print_table
    from netlayer.progress import Stages
    from netlayer.results import utc_now

    started = utc_now()
    with Stages() as stages, stages.open("MegaScale's tables") as bar:
        rows, numbers = paper_rows(bar)
    record_rows = [{**dataclasses.asdict(row), "error": row.error, "is_met": row.is_met} for row in rows]
    _keep(options, "estimate.paper", record_rows, started, {"numbers": dataclasses.asdict(numbers)}, {})
    if str(options.json_file) == "-":
        return
    for table in dict.fromkeys(row.table for row in rows):
        own = [row for row in rows if row.table == table]
        lines = [
            [
                row.case,
                f"{row.paper:.2f} {row.unit}",
                f"{row.predicted:.2f} {row.unit}",
                "calibrated" if row.is_calibrated else f"{row.error:+.1%}" if row.unit == "s" else f"{row.error:+.1f}",
                "" if row.is_calibrated else "within" if row.is_met else "missed",
            ]
            for row in own
        ]
        print_table(f"{table}: the paper's beside predicted", ["case", "paper", "predicted", "error", "bar"], lines)
    steps = [row for row in rows if row.parts]
    names = [name for name in steps[0].parts if any(row.parts[name] >= 0.005 for row in steps)]
    lines = [
        [row.case, *(f"{row.parts[name]:.2f}" for name in names), f"{row.paper - row.predicted:+.2f}"] for row in steps
    ]
    print_table("where a predicted step goes, seconds", ["case", *names, "not predicted"], lines)
    for line in summary(rows):
        click.echo(line)
    for whose, lines_of in (("the paper's", step_lines()), ("predicted", step_lines(rows))):
        for system, nearest in lines_of.items():
            text = f"{nearest.constant_s:.2f} s a step and {1e3 * nearest.micro_batch_s:.1f} ms a micro-batch"
            click.echo(f"table 2, {whose} {system}: nearest to {text}, which misses a row by {nearest.worst:.1%}")


@estimate.command()
@click.argument("records", nargs=-1, required=True, type=_PATH)
@click.option("--calibrate", type=click.IntRange(0), default=2, show_default=True, help="Records that calibrate.")
@run_options_without_config
def check(options: RunOptions, records: tuple[Path, ...], calibrate: int) -> None:
    """Compare predictions with measured steps of ours: RECORDS of bench.mfu, the first of which calibrate.

    One factor on all times of the device is taken from those; what a launch takes the host, from the profiles of the
    other records of as many cores. Bars for the others: 5% in the median, 10% at most; exit 1 beyond.

    \b
    Example:
      netlayer estimate check reports/trainer_2xh200_202611.dp2.json reports/trainer_2xh200_202611.tp2.json \\
          reports/trainer_2xh200_202611.pp2vp2.json
    """
    import statistics

    from bench.estimate.own import FP8_PASSES, MEDIAN_BAR, WORST_BAR, own_rows
    from bench.estimate.search import describe
    from netlayer.printing import duration, print_table
    from netlayer.results import utc_now

    started = utc_now()
    rows = own_rows(records, calibrate)
    record_rows = [
        {
            "case": row.case,
            "device": row.plan.device.name,
            "layout": describe(row.plan),
            "measured_s": row.measured_s,
            "predicted_s": row.predicted_s,
            "error": row.error,
            "is_calibrating": row.is_calibrating,
        }
        for row in rows
    ]
    _keep(options, "estimate.check", record_rows, started, {"records": [str(path) for path in records]}, {})
    errors = [abs(row.error) for row in rows if not row.is_calibrating]
    median, worst = statistics.median(errors), max(errors)
    if str(options.json_file) != "-":
        lines = [
            [
                row.case,
                row.plan.device.name,
                describe(row.plan),
                duration(row.measured_s),
                duration(row.predicted_s),
                f"{row.error:+.1%}",
                "calibrates" if row.is_calibrating else "",
            ]
            for row in rows
        ]
        headings = ["record", "on", "layout", "measured", "predicted", "error", ""]
        print_table("measured, and predicted", headings, lines)
        older = [row.case for row in rows if row.has_older_fp8]
        if older:
            click.echo(
                f"{', '.join(older)}: measured before {FP8_PASSES}, by 8-bit products of more passes and launches than "
                "those of now, which are predicted"
            )
        click.echo(f"{len(errors)} predicted: {median:.1%} in the median, {worst:.1%} at most")
    if median > MEDIAN_BAR or worst > WORST_BAR:
        raise CheckFailed(f"bars: {MEDIAN_BAR:.0%} in the median, {WORST_BAR:.0%} at most")


def _plan(config: Any, device: str, precision: str, zero: int, cp: int, kernels: str, launch_us: float = 0.0) -> Plan:
    """Return the plan of a configuration and options, and refuse what they say twice or cannot have."""
    from typing import cast

    from bench.estimate.devices import device_of
    from bench.estimate.host import Host
    from bench.estimate.plan import Kernels, Plan, Precision, check_plan

    job = config.job
    if job.parallel.cp > 1:
        if cp > 1:
            rule = f"is given, and job.parallel.cp = {job.parallel.cp} says the same"
            raise ConfigError("--cp", cp, rule, "give one of them")
        cp, job = job.parallel.cp, job.model_copy(update={"parallel": job.parallel.model_copy(update={"cp": 1})})
    if job.model.fp8 != "off":
        precision = "fp8"
    if job.parallel.stage == 3:
        zero = 3
    plan = Plan(
        job=job,
        cluster=config.cluster,
        device=device_of(device),
        cp=cp,
        precision=cast(Precision, precision),
        zero=zero,
        kernels=cast(Kernels, kernels),
        host=Host(launch_us / 1e6) if launch_us else None,
    )
    if config.job.model.dtype != "bfloat16":
        rule = "is not what tensor cores are counted in here"
        raise ConfigError("job.model.dtype", config.job.model.dtype, rule, "set it to bfloat16")
    return check_plan(plan)


def _row(plan: Plan, result: StepEstimate) -> dict[str, Any]:
    """Return an estimate as a row of a record."""
    parallel = plan.job.parallel
    row: dict[str, Any] = {
        "gpus": plan.num_gpus,
        "device": plan.device.name,
        "precision": plan.precision,
        "tp": parallel.tp,
        "pp": parallel.pp,
        "vpp": parallel.vpp,
        "cp": plan.cp,
        "dp": parallel.dp,
        "micro_batch_size": plan.job.batch.micro_batch_size,
        "recompute": plan.job.model.recompute,
        "zero": plan.zero,
    }
    figures = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    memory = figures.pop("memory")
    parts = {**memory.parts(), "exchanges": memory.exchanges}
    return {**row, **figures, **{f"memory_{part}_bytes": num_bytes for part, num_bytes in parts.items()}}


def _print_step(plan: Plan, result: StepEstimate, slowdown: float, pp_slowdown: float, tokens: float) -> None:
    """Print an estimate: the head lines, then the parts of the step, the exposed ones, and the memory."""
    from bench.estimate.search import describe
    from bench.estimate.step import MFU_FORMULA
    from netlayer.printing import duration, print_table
    from netlayer.workload.memory import gib

    click.echo(f"predicted, not measured: {plan.job.name} on {plan.num_gpus:,} {plan.device.name}, {plan.precision}")
    click.echo(f"  {describe(plan)}, ZeRO {plan.zero}")
    click.echo(f"  step {duration(result.step_s)} (p99 {duration(result.p99_s)}), {result.tokens_per_s:,.0f} tokens/s")
    click.echo(
        f"  MFU {result.mfu_full:.1%} with full attention, {result.mfu_causal:.1%} with causal; peak "
        f"{result.peak_flops / 1e12:,.1f} TFLOP/s a GPU"
    )
    click.echo(f"  {result.days(tokens):,.1f} days for {tokens:.3g} tokens, without restarts")
    full = ""
    if result.memory.reserved > plan.device.memory_bytes:
        full = " (does not fit: netlayer estimate search ranks layouts that do)"
    exchanges = result.memory.exchanges
    windows = f" and {gib(exchanges)} of windows in the memory of the peers" if exchanges else ""
    click.echo(f"  memory a rank: {result.memory}{windows}, of {gib(plan.device.memory_bytes)}{full}")
    if max(slowdown, pp_slowdown) > 1:
        click.echo(
            f"  collisions on the fabric slow rings between servers by {slowdown:.2f}, messages between stages by "
            f"{pp_slowdown:.2f}"
        )
    parts = {
        "GEMMs": result.gemm_s,
        "attention": result.attention_s,
        "norms, activations, casts, sums": result.pointwise_s,
        "optimizer": result.optimizer_s,
        "exposed: tensor parallel": result.tp_exposed_s,
        "exposed: context parallel": result.cp_exposed_s,
        "exposed: data parallel": result.dp_exposed_s,
        "exposed: pipeline messages": result.pp_exposed_s,
        "pipeline bubble": result.bubble_s - result.pp_exposed_s,
        "waiting for the host": result.host_s,
        "waiting for the slowest rank": result.straggler_s,
    }
    lines = [[name, duration(seconds), f"{seconds / result.step_s:.1%}"] for name, seconds in parts.items()]
    print_table("busiest pipeline stage, predicted", ["part", "time", "of the step"], lines, MFU_FORMULA)


def _prediction_rows(predictions: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return each row under each estimator as a row of the record."""
    from bench.estimate.search import describe

    rows = []
    for name, each in predictions.items():
        for one in each:
            row = one.row
            rows.append(
                {
                    "table": "row",
                    "estimator": name,
                    "family": row.family,
                    "source_of_row": f"{row.source} {row.release}",
                    "device": row.plan.device.name,
                    "precision": row.plan.precision,
                    "gpus": row.gpus,
                    "layout": describe(row.plan),
                    "measured_s": row.step_s,
                    "measured_mfu": row.mfu,
                    "predicted_mfu": _known(one.predicted),
                    "fitted_mfu": _known(one.fitted),
                    "scaled_mfu": one.scaled,
                    "note": row.note,
                }
            )
    return rows


def _known(value: float) -> float | None:
    return None if value != value else value


def _score_rows(table: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    return [{"table": "score", **dataclasses.asdict(score)} for each in table.values() for score in each]


def _bar_rows(bars: Sequence[Any]) -> list[dict[str, Any]]:
    return [{"table": "bar", **dataclasses.asdict(bar), "is_met": bar.is_met} for bar in bars]


def _print_arena(table: Mapping[str, Sequence[Any]], bars: Sequence[Any]) -> None:
    from netlayer.printing import print_table

    names = list(table)
    rows = []
    for scores in zip(*table.values(), strict=True):
        cells = ["-" if score.predicted is None else f"{score.predicted:.2f}" for score in scores]
        rows.append([scores[0].family, str(scores[0].num_rows), *cells])
    title = "mean absolute error, points of MFU (full attention): each family predicted from the others alone"
    print_table(title, ["family", "rows", *names], [row for row in rows if set(row[2:]) != {"-"}])
    within = [[name, "-" if scores[0].scaled is None else f"{scores[0].scaled:.2f}"] for name, scores in table.items()]
    print_table("from the smallest row of a series, all series", ["estimator", "points"], within)
    lines = [[bar.name, f"{bar.value:.2f}", f"{bar.limit:.2f}", "met" if bar.is_met else "missed"] for bar in bars]
    print_table("bars of ours, points of MFU", ["bar", "reached", "limit", ""], lines)


def _print_repeats(repeats: Any) -> None:
    """Print what several measurements of one recipe leave an estimator to tell."""
    from netlayer.printing import print_table

    lines = [
        ["rows", str(repeats.num_rows), str(repeats.scaled_rows)],
        ["the mean of the other releases", f"{repeats.apart:.2f}", f"{repeats.scaled_apart:.2f}"],
        ["ours", f"{repeats.error:.2f}", f"{repeats.scaled_error:.2f}"],
        ["least of any one answer a recipe", f"{repeats.lower_bound:.2f}", f"{repeats.scaled_lower_bound:.2f}"],
    ]
    title = "rows of recipes that several releases measured, mean absolute error, points of MFU"
    print_table(title, ["answer", "MFU", "from the smallest row"], lines)


def _residual_rows(predictions: Sequence[Any]) -> list[dict[str, Any]]:
    """Return every row with its error, growth over its series' smallest row, and the parts of its predicted step."""
    from bench.estimate.arena import series_of
    from bench.estimate.devices import NUMBERS
    from bench.estimate.search import describe
    from bench.estimate.step import estimate_step

    by_row = {id(each.row): each for each in predictions}
    rows: list[dict[str, Any]] = []
    for series in series_of([each.row for each in predictions]):
        for row in series:
            each, plan = by_row[id(row)], row.plan
            estimate = estimate_step(plan, NUMBERS[plan.device.generation])
            rows.append(
                {
                    "table": "residual",
                    "family": row.family,
                    "release": row.release,
                    "precision": plan.precision,
                    "fp8_scaling": row.fp8_scaling,
                    "gpus": row.gpus,
                    "layout": describe(plan),
                    "micro_batches": plan.num_micro_batches,
                    "measured_s": row.step_s,
                    "measured_mfu": row.mfu,
                    "error": _known(each.error),
                    "scaled_error": each.scaled_error,
                    "growth": row.step_s / series[0].step_s - 1,
                    "shares": {name: seconds / estimate.step_s for name, seconds in estimate.parts().items()},
                }
            )
    return rows


def _print_residuals(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print the rows of `_residual_rows`."""
    from netlayer.printing import print_table

    lines = [
        [
            f"{row['family']} {row['release']}",
            row["precision"],
            str(row["gpus"]),
            row["layout"],
            str(row["micro_batches"]),
            f"{row['measured_s']:.3f}",
            f"{row['measured_mfu']:.1f}",
            "-" if row["error"] is None else f"{row['error']:+.2f}",
            "" if row["scaled_error"] is None else f"{row['scaled_error']:+.2f}",
            f"{row['growth']:+.1%}",
            *(f"{share:.1%}" for share in row["shares"].values()),
        ]
        for row in rows
    ]
    columns = [
        "row",
        "precision",
        "GPUs",
        "layout",
        "micro-batches",
        "step / s",
        "MFU",
        "error",
        "from smallest",
        "grew",
    ]
    title = "residuals: errors in points of MFU, and shares of the predicted step by the numbers fitted to all rows"
    print_table(title, [*columns, *(rows[0]["shares"] if rows else ())], lines)


def _print_others(predictions: Mapping[str, Sequence[Any]], aside: Mapping[str, Sequence[Any]]) -> None:
    """Print the rows that are kept aside, and what an estimator that cannot tell all rows reaches on its own."""
    from bench.estimate.arena import CARRIED, on_rows_of
    from netlayer.printing import print_table

    rows = [
        [
            scores[0].family,
            str(scores[0].num_rows),
            *("-" if s.predicted is None else f"{s.predicted:.2f}" for s in scores),
        ]
        for scores in zip(*aside.values(), strict=True)
    ]
    if rows:
        print_table("rows kept aside, from a fit to all rows above, points of MFU", ["family", "rows", *aside], rows)
    for name, each in predictions.items():
        number, errors = on_rows_of(predictions, name)
        if 0 < number < len(each) and name != CARRIED:
            lines = [[other, f"{error:.2f}"] for other, error in errors.items()]
            print_table(f"on the {number} rows that {name} can tell, points of MFU", ["estimator", "error"], lines)


def make_record(
    options: RunOptions,
    name: str,
    rows: Sequence[Mapping[str, Any]],
    started: str,
    arguments: Mapping[str, Any],
    config: Mapping[str, Any],
) -> Any:
    """Return a record of what is predicted."""
    from netlayer.environ import snapshot
    from netlayer.results import RunRecord, utc_now

    return RunRecord(
        name=name,
        source="predicted",
        rows=rows,
        started_utc=started,
        ended_utc=utc_now(),
        arguments={**options.arguments(), **arguments},
        config=config,
        environment=snapshot(options.seed),
    )


def _keep(
    options: RunOptions,
    name: str,
    rows: Sequence[Mapping[str, Any]],
    started: str,
    arguments: Mapping[str, Any],
    config: Mapping[str, Any],
) -> None:
    """Write a record: to --out where that is given, to --json where that is."""
    from netlayer.output import open_output

    record = make_record(options, name, rows, started, arguments, config)
    if options.out:
        with open_output(options.out, name.replace(".", "-")) as out:
            record.save(out.part / "records")
            for path in out.publish():
                click.echo(f"record: {path}", err=True)
    _write_json(options, record)


def _write_json(options: RunOptions, record: Any) -> None:
    from netlayer.results import write_text

    if options.json_file:
        write_text(options.json_file, record.to_json())
