"""`netlayer sweep`: parameters x laws x seeds over one scenario, or a search for the best of them."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from congestion.arena.options import PATH, json_option, known_laws, processes_option, show, simulated
from netlayer.command import renamed_option
from netlayer.errors import ConfigError
from netlayer.results import check_target

if TYPE_CHECKING:
    from congestion.simulation.sweep import Point


@click.command()
@click.argument("scenario")
@click.option("--fabric", default="", help="star | dumbbell | clos | fat-tree [default: the scenario's].")
@click.option("--config", type=PATH, help="TOML file of the cluster and job of job-phases.")
@click.option("--cc", default="dcqcn", show_default=True, metavar="LAW[,LAW...]", help="Control laws.")
@click.option("--preset", default="ns3", show_default=True, help="Switch, NIC and law, as `simulate` has them.")
@click.option("--set", "sets", multiple=True, metavar="A.B=V[,V...]", help="Values of a parameter; repeatable.")
@click.option("--seed-list", "seeds", default="1", show_default=True, metavar="1..8", help="Seeds: 1..8, or 1,5,7.")
@renamed_option("--seeds", "--seed-list", "seeds")
@processes_option
@click.option("--dask", metavar="tcp://HOST:PORT", help="Run on the workers of this Dask scheduler.")
@click.option("--optimise", metavar="OBJECTIVE", help="Search for the best mean of this column, such as completion_us.")
@click.option("--trials", type=click.IntRange(1), help="Of the search [default: 20 a parameter].")
@click.option("--out", type=PATH, help="Folder of rows as CSV and parquet, and the record; or PROFILE.toml.")
@json_option
def sweep(
    scenario: str,
    fabric: str,
    config: Path | None,
    cc: str,
    preset: str,
    sets: tuple[str, ...],
    seeds: str,
    processes: int | None,
    dask: str | None,
    optimise: str | None,
    trials: int | None,
    out: Path | None,
    json_file: Path | None,
) -> None:
    """Run a scenario over all combinations of parameters, laws and seeds; or search for the best parameters.

    Parameters are those of `simulate --list`, and congestion.x. Under --optimise a parameter is searched from low to
    high, `congestion.x=low..high`; without any, all numbers of the law and the switch are, around their values. --out
    is then the profile, a TOML of congestion.x.

    \b
    Examples:
      netlayer sweep incast --cc swift --set congestion.swift.base_target_us=10,20,40 --seed-list 1..8 --out runs/target
      netlayer sweep all-to-all --cc dcqcn,hybrid --set scenario.ranks=16,32 --set congestion.kmin_bytes=200000,800000
      netlayer sweep incast --cc hybrid --set congestion.hybrid.queue_us=2..32 --optimise completion_us --out best.toml
    """
    from congestion.simulation.sweep import Point, seeds_of
    from topology.workers import check_scheduler

    check_target("--json", json_file)
    laws = known_laws(cc, "--cc")
    point = Point(scenario, laws[0], preset=preset, fabric=fabric, config=config)
    numbers = seeds_of(seeds)
    if processes and dask:
        raise ConfigError("--processes", processes, "has no effect beside --dask", "omit one")
    if dask:
        check_scheduler(dask)
    if optimise:
        if len(laws) > 1:
            raise ConfigError("--cc", cc, "is several laws, and --optimise searches one", "give one law")
        _optimise(point, sets, optimise, numbers, trials, processes, dask, out, json_file)
        return
    if trials:
        raise ConfigError("--trials", trials, "has no effect without --optimise", "omit it")
    _sweep(point, laws, sets, numbers, processes, dask, out, json_file)


def _sweep(
    point: Point,
    laws: Sequence[str],
    sets: Sequence[str],
    seeds: Sequence[int],
    processes: int | None,
    dask: str | None,
    out: Path | None,
    json_file: Path | None,
) -> None:
    """Run all combinations of laws, settings and seeds, and write their rows and the record."""
    from congestion.simulation.sweep import compile_for, points_of, run_sweep
    from netlayer.output import open_output
    from netlayer.progress import Stages
    from netlayer.results import utc_now

    started, points = utc_now(), points_of(point, laws, sets, seeds)
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(open_output(out, "sweep")) if out else None
        with Stages() as stages:
            if not dask:
                compile_for(points, stages)
            with stages.open("sweep") as bar:
                rows = run_sweep(points, processes=processes, dask=dask, progress=bar)
        arguments = {"scenario": point.scenario, "cc": list(laws), "preset": point.preset, "set": list(sets)}
        record = simulated("congestion.sweep", rows, started, {**arguments, "seeds": list(seeds)})
        if output:
            record.save_csv(output.part / "sweep.csv")
            record.save_parquet(output.part / "sweep.parquet")
            record.save(output.part / "records")
            output.publish()
            click.echo(f"rows: {output.folder / 'sweep.csv'}", err=True)
    show(rows, record, json_file)


def _optimise(
    point: Point,
    sets: Sequence[str],
    objective: str,
    seeds: Sequence[int],
    num_trials: int | None,
    processes: int | None,
    dask: str | None,
    out: Path | None,
    json_file: Path | None,
) -> None:
    """Search the ranges of `--set` for the best objective, and write the profile, the record and the chosen values."""
    from congestion.arena.protocol import SUITE
    from congestion.arena.tune_profile import write_profile
    from congestion.simulation.sweep import optimise, ranges_in
    from netlayer.progress import Stages
    from netlayer.results import utc_now

    check_target("--out", out)
    started = utc_now()
    ranges, fixed = ranges_in(sets, point.law, point.preset)
    num_trials = num_trials or SUITE.tuning.trials_per_parameter * len(ranges)
    with Stages() as stages, stages.open("trials") as bar:
        start = replace(point, overrides=fixed)
        best = optimise(start, ranges, objective, seeds, num_trials, processes=processes, dask=dask, progress=bar)
    arguments = {"scenario": point.scenario, "cc": point.law, "preset": point.preset, "set": list(sets)}
    record = simulated("congestion.optimise", best.trials, started, {**arguments, "seeds": list(seeds)})
    lines = [f"{point.law} on {point.scenario}: {objective} {best.score:.6g}, {best.first_score or 0:.6g} before"]
    if out:
        write_profile(out, best.contender, [*lines, f"{len(best.trials)} trials, seeds {', '.join(map(str, seeds))}"])
        click.echo(f"profile: {out}", err=True)
    chosen = [{"parameter": one.partition("=")[0], "value": one.partition("=")[2]} for one in best.contender.overrides]
    click.echo(lines[0], err=True)
    show(chosen, record, json_file)
