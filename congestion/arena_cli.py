"""`netlayer arena` and `netlayer sweep`."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netlayer.errors import ConfigError
from netlayer.results import check_target, write_text

if TYPE_CHECKING:
    from congestion.arena import Found
    from congestion.arena_run import Contender
    from congestion.sweep import Point
    from netlayer.results import RunRecord

_PATH = click.Path(path_type=Path)
_STDOUT = Path("-")
_OURS = "none,dcqcn,swift,nscc,hybrid"
_PROCESSES = click.option("--processes", type=click.IntRange(1, 1024), help="Workers here [default: a core each].")
_JSON = click.option("--json", "json_file", type=_PATH, help="Also write the record here; - is stdout.")


@click.command()
@click.argument("law_file", metavar="[LAW.py]", type=_PATH, required=False)
@click.option("--laws", default=_OURS, show_default=True, metavar="LAW[,LAW...]", help="Who runs beside LAW.py.")
@click.option("--entrant", help="Whom the claims are about [default: LAW.py's law, else hybrid].")
@click.option("--quick", is_flag=True, help="One condition and three seeds: a part, in about a minute.")
@click.option("--seeds", "num_seeds", type=click.IntRange(1), help="The first so many of the suite's seeds.")
@click.option("--only", multiple=True, metavar="TEXT", help="Cases with this in `workload/condition`; repeatable.")
@click.option("--tuned", type=_PATH, help="Folder of LAW.toml, as --tune leaves them [default: published values].")
@click.option("--tune", "tunes", is_flag=True, help="Search each law's parameters on the tuning set, and end.")
@click.option("--robustness", is_flag=True, help="Each law with one thing changed at a time, beside itself.")
@click.option("--parts", is_flag=True, help="The hybrid without each of its parts, beside itself.")
@click.option("--template", is_flag=True, help="Print a law's file to begin with, and end.")
@_PROCESSES
@click.option("--out", type=_PATH, help="Folder of rows, page and record [default: ./runs/arena-<UTC>/].")
@_JSON
def arena(
    law_file: Path | None,
    laws: str,
    entrant: str | None,
    quick: bool,
    num_seeds: int | None,
    only: tuple[str, ...],
    tuned: Path | None,
    tunes: bool,
    robustness: bool,
    parts: bool,
    template: bool,
    processes: int | None,
    out: Path | None,
    json_file: Path | None,
) -> None:
    """Compare control laws on a frozen suite of scenarios: one table of all laws, and a page with the verdict.

    Each run is kept as a line of OUT/rows.jsonl: a second start with the same --out goes on where the first one ended.
    What the engine cannot run yet is said, and not counted. The protocol is congestion/ARENA.md.

    LAW.py enters a law, called by the file's name. It is a module with PARAMETERS and STATE (numpy record types: a row
    a run, a row a flow), a class Section of its numbers if it has any, and

    \b
      parameters(section, host_bps, settings)     a row of PARAMETERS
      start(p, own, flow)                         before a flow's first packet
      advance(p, own, flow, now)                  let timers that are due fire
      on_ack(p, own, flow, now, marked, rtt_ps, acked_bytes)
      on_loss(p, own, flow, now)                  a NACK or a timeout

    which set flow.rate_bps and flow.window_bytes, and which numba compiles: about a minute, once a version of the file.

    \b
    Examples:
      netlayer arena --quick
      netlayer arena --template > my_law.py && netlayer arena my_law.py --quick
      netlayer arena --tune --out runs/tuned && netlayer arena --tuned runs/tuned --out runs/arena
      netlayer arena --only all-to-all --only 400G-deep --seeds 8 --laws dcqcn,swift,nscc,hybrid
    """
    if template:
        click.echo(Path(__file__).with_name("arena_template.py").read_text(encoding="utf-8"), nl=False)
        return
    check_target("--json", json_file)
    contenders = _contenders(laws, law_file, tuned)
    _refuse_beside(tunes, robustness, parts, quick or bool(num_seeds or only or entrant))
    if tunes:
        _tune(contenders, out, processes)
        return
    if robustness or parts:
        _changes(contenders, parts, out, processes, json_file)
        return
    chosen = entrant or (contenders[-1].name if law_file else "hybrid")
    if entrant and entrant not in [one.name for one in contenders]:
        raise ConfigError("--entrant", entrant, "does not run", "give one of --laws, or LAW.py's")
    from congestion.arena import plan_of, run_arena
    from congestion.arena_output import not_run_words, page_of, print_table, record_of
    from netlayer.command import open_out
    from netlayer.progress import Stages
    from netlayer.results import utc_now

    started = utc_now()
    plan = plan_of(contenders, num_seeds=num_seeds, only=only, quick=quick)
    folder = open_out(out, "arena")
    with Stages() as stages, _kept(folder):
        if plan.not_run:
            stages.say(not_run_words(plan))
        found = run_arena(plan, folder, stages, processes)
    arguments = {"laws": laws, "entrant": chosen, "quick": quick, "only": list(only), "tuned": str(tuned or "")}
    record = record_of(found, started, {**arguments, "law_file": str(law_file or "")})
    click.echo(f"record: {record.save(folder / 'records')}", err=True)
    if json_file:
        write_text(json_file, record.to_json())
    with contextlib.redirect_stdout(sys.stderr if json_file == _STDOUT else sys.stdout):
        print_table(found)
    _publish_page(found, chosen, folder, page_of)


@click.command()
@click.argument("scenario")
@click.option("--fabric", default="", help="star | dumbbell | clos | fat-tree [default: the scenario's].")
@click.option("--config", type=_PATH, help="TOML file of the cluster and job of job-phases.")
@click.option("--cc", default="dcqcn", show_default=True, metavar="LAW[,LAW...]", help="Control laws.")
@click.option("--preset", default="ns3", show_default=True, help="Switch, NIC and law, as `simulate` has them.")
@click.option("--set", "sets", multiple=True, metavar="A.B=V[,V...]", help="Values of a parameter; repeatable.")
@click.option("--seeds", default="1", show_default=True, metavar="1..8", help="Seeds: 1..8, or 1,5,7.")
@_PROCESSES
@click.option("--dask", metavar="tcp://HOST:PORT", help="Run on the workers of this Dask scheduler.")
@click.option("--optimise", metavar="OBJECTIVE", help="Search for the best mean of this column, such as completion_us.")
@click.option("--trials", type=click.IntRange(1), help="Of the search [default: 20 a parameter].")
@click.option("--out", type=_PATH, help="Folder of rows as CSV and parquet, and the record; or PROFILE.toml.")
@_JSON
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
      netlayer sweep incast --cc swift --set congestion.swift.base_target_us=10,20,40 --seeds 1..8 --out runs/target
      netlayer sweep all-to-all --cc dcqcn,hybrid --set scenario.ranks=16,32 --set congestion.kmin_bytes=200000,800000
      netlayer sweep incast --cc hybrid --set congestion.hybrid.queue_us=2..32 --optimise completion_us --out best.toml
    """
    from congestion.sweep import Point, seeds_of
    from topology.workers import check_scheduler

    check_target("--json", json_file)
    laws = _known(cc, "--cc")
    point = Point(scenario, laws[0], preset=preset, fabric=fabric, config=config)
    numbers = seeds_of(seeds)
    if processes and dask:
        raise ConfigError("--processes", processes, "has no effect beside --dask", "leave one out")
    if dask:
        check_scheduler(dask)
    if optimise:
        if dask or len(laws) > 1:
            field, value = ("--dask", dask) if dask else ("--cc", cc)
            raise ConfigError(field, value, "has no effect under --optimise", "leave it out, and give one law")
        _optimise(point, sets, optimise, numbers, trials, processes, out, json_file)
        return
    if trials:
        raise ConfigError("--trials", trials, "has no effect without --optimise", "leave it out")
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
    from congestion.sweep import points_of, run_sweep
    from netlayer.output import open_output
    from netlayer.progress import Stages
    from netlayer.results import utc_now

    started, points = utc_now(), points_of(point, laws, sets, seeds)
    with contextlib.ExitStack() as stack:
        output = stack.enter_context(open_output(out, "sweep")) if out else None
        with Stages() as stages, stages.open("sweep") as bar:
            rows = run_sweep(points, processes=processes, dask=dask, progress=bar)
        arguments = {"scenario": point.scenario, "cc": list(laws), "preset": point.preset, "set": list(sets)}
        record = _record("congestion.sweep", rows, started, {**arguments, "seeds": list(seeds)})
        if output:
            record.save_csv(output.part / "sweep.csv")
            record.save_parquet(output.part / "sweep.parquet")
            record.save(output.part / "records")
            output.publish()
            click.echo(f"rows: {output.folder / 'sweep.csv'}", err=True)
    _show(rows, record, json_file)


def _optimise(
    point: Point,
    sets: Sequence[str],
    objective: str,
    seeds: Sequence[int],
    num_trials: int | None,
    processes: int | None,
    out: Path | None,
    json_file: Path | None,
) -> None:
    from congestion.arena_protocol import SUITE
    from congestion.sweep import optimise, ranges_in
    from congestion.tune import write_profile
    from netlayer.progress import Stages
    from netlayer.results import utc_now

    check_target("--out", out)
    started = utc_now()
    ranges, fixed = ranges_in(sets, point.law, point.preset)
    num_trials = num_trials or SUITE.tuning.trials_per_parameter * len(ranges)
    with Stages() as stages, stages.open("trials") as bar:
        told = replace(point, overrides=fixed)
        best = optimise(told, ranges, objective, seeds, num_trials, processes=processes, progress=bar)
    arguments = {"scenario": point.scenario, "cc": point.law, "preset": point.preset, "set": list(sets)}
    record = _record("congestion.optimise", best.trials, started, {**arguments, "seeds": list(seeds)})
    words = [f"{point.law} on {point.scenario}: {objective} {best.score:.6g}, {best.first_score or 0:.6g} before"]
    if out:
        write_profile(out, best.contender, [*words, f"{len(best.trials)} trials, seeds {', '.join(map(str, seeds))}"])
        click.echo(f"profile: {out}", err=True)
    chosen = [{"parameter": one.partition("=")[0], "value": one.partition("=")[2]} for one in best.contender.overrides]
    click.echo(words[0], err=True)
    _show(chosen, record, json_file)


def _tune(contenders: Sequence[Contender], out: Path | None, processes: int | None) -> None:
    from congestion.tune import tune
    from netlayer.command import open_out
    from netlayer.progress import Stages
    from topology.commands.printing import print_rows

    folder = open_out(out, "tune")
    with Stages() as stages, _kept(folder):
        found = tune(contenders, folder, stages, processes)
    rows = [
        {
            "law": one.contender.name,
            "parameters": one.num_parameters,
            "trials": one.num_trials,
            "score": one.score,
            "published": one.published_score,
            "settled": one.settled,
        }
        for one in found
    ]
    print_rows("simulated: the tuning set, score to be lowered", rows, {key: key for key in rows[0]})
    click.echo(f"profiles: {folder}; use them by --tuned {shlex.quote(str(folder))}", err=True)


def _changes(
    contenders: Sequence[Contender], parts: bool, out: Path | None, processes: int | None, json_file: Path | None
) -> None:
    """The table of changes: each law's completion time over its own without the change."""
    from congestion import arena_changes
    from congestion.arena import run_arena
    from congestion.arena_output import not_run_words
    from netlayer.command import open_out
    from netlayer.progress import Stages
    from netlayer.results import utc_now

    started, refused = utc_now(), list[str]()
    if parts:
        [hybrid] = [one for one in contenders if one.law == "hybrid"] or contenders[:1]
        plan = arena_changes.parts(hybrid)
    else:
        plan, refused = arena_changes.robustness(contenders)
    name = "parts" if parts else "robustness"
    folder = open_out(out, name)
    with Stages() as stages, _kept(folder):
        for line in [*([not_run_words(plan)] if plan.not_run else []), *(f"not run: {one}" for one in refused)]:
            stages.say(line)
        found = run_arena(plan, folder, stages, processes)
    rows = arena_changes.compare_changes(found)
    arguments = {"laws": [one.name for one in contenders], "suite": plan.suite.digest, "refused": refused}
    record = _record(f"congestion.arena.{name}", rows, started, arguments)
    click.echo(f"record: {record.save(folder / 'records')}", err=True)
    _show(rows, record, json_file)


def _refuse_beside(tunes: bool, robustness: bool, parts: bool, narrowed: bool) -> None:
    """The protocol fixes what these run: no option narrows it, and each is a run of its own."""
    given = [name for name, one in (("--tune", tunes), ("--robustness", robustness), ("--parts", parts)) if one]
    if len(given) > 1:
        raise ConfigError(given[0], None, f"has no effect beside {given[1]}", "give one of them")
    if given and narrowed:
        rule = "runs what the protocol fixes: --quick, --seeds, --only and --entrant have no effect"
        raise ConfigError(given[0], None, rule, "leave them out")


def _contenders(laws: str, law_file: Path | None, tuned: Path | None) -> list[Contender]:
    """Who runs: the laws named, and the file's behind them."""
    from congestion.arena_run import Contender, published

    made = [published(law) for law in _known(laws, "--laws")]
    if law_file:
        from congestion.control import entered

        if law_file.stem in _OURS.split(","):
            raise ConfigError("LAW", law_file, "has the name of a law of ours", "rename the file")
        path = law_file.resolve()
        made.append(Contender(law_file.stem, entered.enter(path), file=path))
    return [_with_profile(one, tuned) for one in made] if tuned else made


def _with_profile(contender: Contender, tuned: Path) -> Contender:
    from congestion.tune import read_profile

    path = tuned / f"{contender.name}.toml"
    if not path.is_file():
        raise ConfigError("--tuned", tuned, f"has no {path.name}", "tune that law too, or leave it out of --laws")
    found = read_profile(path)
    return replace(contender, preset=found.preset, overrides=found.overrides)


def _known(laws: str, field: str) -> list[str]:
    names = list(dict.fromkeys(laws.split(",")))
    for name in names:
        if name not in _OURS.split(","):
            raise ConfigError(field, name, "is unknown", f"give one of {_OURS}, or several with commas")
    return names


@contextlib.contextmanager
def _kept(folder: Path) -> Any:
    """Where what was measured lies when a run breaks off."""
    try:
        yield
    except KeyboardInterrupt:
        click.echo(f"note: what was measured is kept; go on with --out {shlex.quote(str(folder))}", err=True)
        raise


def _publish_page(found: Found, entrant: str, folder: Path, page_of: Any) -> None:
    """The page and its verdict, or why there is none."""
    command = shlex.join(["netlayer", *sys.argv[1:]])
    try:
        page = page_of(found, entrant, command).write(folder)
    except ValueError as exc:
        click.echo(f"no page: {exc}", err=True)
        return
    click.echo(f"report: {page}", err=True)


def _record(name: str, rows: Sequence[dict[str, Any]], started: str, arguments: dict[str, Any]) -> RunRecord:
    from netlayer.environ import snapshot
    from netlayer.results import RunRecord, utc_now

    return RunRecord(name, "simulated", rows, started, utc_now(), arguments=arguments, environment=snapshot())


def _show(rows: Sequence[dict[str, Any]], record: RunRecord, json_file: Path | None) -> None:
    from topology.commands.printing import print_rows

    if json_file:
        write_text(json_file, record.to_json())
    with contextlib.redirect_stdout(sys.stderr if json_file == _STDOUT else sys.stdout):
        print_rows("simulated", rows, {key: key for key in rows[0]})
