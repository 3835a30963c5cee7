"""`netlayer step`: how long the network takes for a whole training step, by skipping what repeats itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from netlayer.command import RunOptions, run_options
from netlayer.errors import CheckFailed, ConfigError

if TYPE_CHECKING:
    from congestion.simulation.settings import Settings
    from congestion.simulation.simulate import Outcome
    from congestion.simulation.step import Repeated, Segment
    from netlayer.config.tree import ClusterConfig, JobConfig
    from netlayer.progress import Stages

_COLUMNS = {
    "phases": "phases",
    "repeats": "in the step",
    "simulated": "simulated",
    "skipped_as": "the others",
    "period": "repeat every",
    "first_s": "first",
    "each_s": "each from then on",
    "least_s": "least",
    "most_s": "most",
    "total_s": "all of them",
}
_MOST_EXACT = 1_000


@click.command()
@click.option("--step", "text", metavar="PHASES*N,...", help="What follows what [as often as the job has it].")
@click.option(
    "--exact",
    type=click.IntRange(2, _MOST_EXACT),
    default=8,
    show_default=True,
    help="Repetitions that are simulated of each phase at first; more where they do not repeat yet, all if never.",
)
@click.option(
    "--within",
    type=click.FloatRange(0, 10),
    default=0.0,
    show_default=True,
    help="Share by which what is skipped may be off, judged by what was seen; 0: skip only what repeats exactly.",
)
@click.option("--check", is_flag=True, help="Simulate all of it too, and say the error.")
@click.option(
    "--tolerance",
    type=click.FloatRange(0, 1e6),
    default=0.01,
    show_default=True,
    help="By how much of itself the whole may leave the bounds.",
)
@click.option("--cc", "law", default="dcqcn", show_default=True, metavar="LAW", help="Control law, or its file.")
@click.option("--preset", default="ns3", show_default=True, help="Switch, NIC and law: ns3, ns3-paper.")
@click.option(
    "--threads", type=click.IntRange(1, 1024), default=1, show_default=True, help="They change the time alone."
)
@click.option("--backend", type=click.Choice(["cpu", "gpu"]), default="cpu", show_default=True, help="Same results.")
@run_options
def step(
    options: RunOptions,
    text: str | None,
    exact: int,
    within: float,
    check: bool,
    tolerance: float,
    law: str,
    preset: str,
    **how: Any,
) -> None:
    """Predict the network's time of a training step, without what is computed between its phases.

    Every phase is simulated packet by packet, and repeated --exact times. Where its repetitions are seen to repeat to
    the picosecond, those that are left are skipped, for they do so too; else more are simulated, and in the end all.
    --within skips others as well: they are taken to be like those seen, within bounds that are a guess. --check
    simulates the whole too: exit 1 where the bounds do not hold.
    PHASES are those of `netlayer simulate job-phases`; --set changes what it changes there.

    \b
    Examples:
      netlayer step --set scenario.bucket_bytes=1MiB
      netlayer step --config examples/megascale-12288.toml --within 0.2 --exact 4 --backend gpu --out runs/step
      netlayer step --step 'all-gather+pipeline*8,pipeline*24,reduce-scatter*8' --cc hybrid --exact 6
      netlayer step --set scenario.bucket_bytes=256KiB --step 'reduce-scatter*20' --check --json -
    """
    from congestion.commands.simulate import check_backend, read_law
    from congestion.simulation.settings import settings_of
    from congestion.simulation.step import next_counts
    from netlayer.output import open_output
    from netlayer.progress import Stages
    from netlayer.results import utc_now

    check_backend(how["backend"])
    started, chosen = utc_now(), read_law(law)
    own_overrides = tuple(one for one in options.overrides if one.startswith("congestion."))
    settings = settings_of(preset, own_overrides)
    plan = _plan(options, text, [one for one in options.overrides if one not in own_overrides])
    run = partial(_simulate, plan, settings, chosen, options.seed, how)
    whole_counts = [one.repeats for one in plan.segments]
    runs: list[Outcome] = []
    with open_output(options.out, "step") as out:
        with Stages() as stages:
            counts: list[int] | None = [min(one.repeats, exact) for one in plan.segments]
            while counts is not None:
                parts, outcome = run(counts, stages, f"{sum(counts)} of {sum(whole_counts)} repetitions")
                runs.append(outcome)
                last, counts = counts, next_counts(parts, counts, within)
            whole = None
            if check:
                whole = parts if last == whole_counts else run(whole_counts, stages, "whole, to check")[0]
        rows = [_total(parts, whole), *({"table": "segment", **one.to_row()} for one in parts)]
        rows[0]["engine"] = [_engine(outcome) for outcome in runs]
        arguments = {"step": ",".join(map(str, plan.segments)), "exact": exact, "within": within, "check": check}
        config = {**plan.config, "congestion": settings.model_dump(mode="json")}
        _keep(options, out, rows, started, {**arguments, "cc": law, "preset": preset, **how}, config)
    if str(options.json_file) != "-":
        _print(rows)
    if check and not _holds(rows[0], tolerance):
        raise CheckFailed(f"the whole step took {rows[0]['whole_s'] * 1e3:.4g} ms, outside of the bounds")


@dataclass(frozen=True)
class _Plan:
    """Segments of the step, and how to build as much of it as is needed."""

    segments: tuple[Segment, ...]
    num_flows: list[int]
    config: dict[str, Any]
    overrides: tuple[str, ...]
    options: RunOptions


def _plan(options: RunOptions, text: str | None, overrides: Sequence[str]) -> _Plan:
    from congestion.scenarios.catalogue import build_scenario
    from congestion.scenarios.job import JobPhases
    from congestion.simulation.step import read_step, step_of
    from netlayer.config.tree import ClusterConfig, JobConfig

    for one in overrides:
        if one.startswith(("scenario.phases=", "scenario.bytes_per_rank=")):
            key, _, value = one.partition("=")
            raise ConfigError(key, value, "has no effect on a step", "give --step, and scenario.bucket_bytes")
    requested = read_step(text) if text else ()
    first = [*overrides, f"scenario.phases={requested[0].phases if requested else 'pipeline+all-gather'}"]
    config = build_scenario("job-phases", first, options.seed, config=options.config_path).config
    job, cluster = JobConfig.model_validate(config["job"]), ClusterConfig.model_validate(config["cluster"])
    p = JobPhases.model_validate({key: value for key, value in config["scenario"].items() if key != "name"})
    segments = requested or step_of(job, p.bucket_bytes, p.micro_batches)
    return _Plan(segments, _flows_of(segments, p, job, cluster), config, tuple(overrides), options)


def _flows_of(segments: Sequence[Segment], p: Any, job: JobConfig, cluster: ClusterConfig) -> list[int]:
    from congestion.scenarios.job import num_flows

    known = {one.phases: num_flows(one.phases, p, job, cluster) for one in segments}
    return [known[one.phases] for one in segments]


def _simulate(
    plan: _Plan,
    settings: Settings,
    law: str,
    seed: int,
    how: Mapping[str, Any],
    counts: Sequence[int],
    stages: Stages,
    name: str,
) -> tuple[list[Repeated], Outcome]:
    """A run of each segment this many times, and what it says of the repetitions that it has not."""
    from congestion.commands.simulate import Pace, say_progress
    from congestion.kernels.compile import waiting
    from congestion.scenarios.catalogue import build_scenario
    from congestion.simulation.simulate import Simulation
    from congestion.simulation.step import numbers_of, phases_of, repeated, watch

    with stages.open(name) as bar:
        phases = f"scenario.phases={phases_of(plan.segments, counts)}"
        case = build_scenario("job-phases", [*plan.overrides, phases], seed, config=plan.options.config_path)
        simulation = Simulation(
            case.fabric,
            case.flows,
            settings,
            law,
            seed=seed,
            threads=how["threads"],
            backend="gpu" if how["backend"] == "gpu" else "numba",
            numbers=numbers_of(plan.segments, counts, plan.num_flows),
            compiling=waiting(stages),
        )
        outcome, seen = watch(simulation, law, partial(say_progress, bar, Pace()))
    left = int((outcome.finish_ps < 0).sum())
    if left:
        cause = "interrupted" if outcome.interrupted else "packets were lost for good, or links wait for each other"
        raise CheckFailed(f"{left} of {len(case.flows)} flows did not end: {cause}")
    return repeated(plan.segments, counts, plan.num_flows, seen), outcome


def _total(parts: Sequence[Repeated], whole: Sequence[Repeated] | None) -> dict[str, Any]:
    rows = [one.to_row() for one in parts]
    total: dict[str, Any] = {"table": "step", **{key: sum(row[key] for row in rows) for key in _SUMS}}
    total["exact"] = all(one.is_exact for one in parts)
    if whole is not None:
        total["whole_s"] = sum(one.total_ps for one in whole) / 1e12
        total["error_share"] = total["total_s"] / total["whole_s"] - 1
    return total


def _holds(total: dict[str, Any], tolerance: float) -> bool:
    spare = tolerance * total["whole_s"]
    return bool(total["low_s"] - spare <= total["whole_s"] <= total["high_s"] + spare)


_SUMS = ("repeats", "simulated", "total_s", "low_s", "high_s")


def _engine(outcome: Outcome) -> dict[str, Any]:
    return {"link_hops": outcome.link_hops, "wall_s": outcome.wall_s, "backend": outcome.backend}


def _keep(
    options: RunOptions, out: Any, rows: list[dict[str, Any]], started: str, arguments: dict[str, Any], config: Any
) -> None:
    from netlayer.environ import snapshot
    from netlayer.results import RunRecord, utc_now, write_text

    record = RunRecord(
        name="congestion.step",
        source="predicted",
        rows=rows,
        started_utc=started,
        ended_utc=utc_now(),
        arguments={**options.arguments(), **arguments},
        config=config,
        environment=snapshot(options.seed),
    )
    record.save(out.part / "records")
    for path in out.publish():
        click.echo(f"record: {path}", err=True)
    if options.json_file:
        write_text(options.json_file, record.to_json())


def _print(rows: Sequence[dict[str, Any]]) -> None:
    from netlayer.printing import cell, print_rows

    total = rows[0]
    print_rows("predicted: what repeats itself is skipped, the rest was simulated", rows[1:], _COLUMNS)
    step_s, low, high = (cell(key, total[key]) for key in ("total_s", "low_s", "high_s"))
    if total["simulated"] == total["repeats"]:
        bounds = "simulated whole, for no phase was seen to repeat before"
    else:
        bounds = f"{total['simulated']} of {total['repeats']} repetitions simulated, " + (
            "the others repeat them exactly" if total["exact"] else f"from {low} to {high} if the others are like them"
        )
    click.echo(f"step: {step_s}, {bounds}")
    if "whole_s" in total:
        click.echo(
            f"simulated whole: {cell('whole_s', total['whole_s'])}, the prediction is {total['error_share']:+.3%} off"
        )
