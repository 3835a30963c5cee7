"""`netlayer arena`: all control laws on the frozen suite; their tuning, robustness and parts."""

from __future__ import annotations

import contextlib
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from congestion.arena.options import OURS, PATH, beside, json_option, known_laws, processes_option, show, simulated
from netlayer.errors import ConfigError
from netlayer.results import check_target, write_text

if TYPE_CHECKING:
    from congestion.arena.run import Contender
    from congestion.arena.runner import Plan, Results
    from netlayer.results import RunRecord


@click.command()
@click.argument("law_file", metavar="[LAW.py]", type=PATH, required=False)
@click.option("--laws", default=OURS, show_default=True, metavar="LAW[,LAW...]", help="Who runs beside LAW.py.")
@click.option("--candidate", "--entrant", help="Whom the claims are about [default: LAW.py's law, else hybrid].")
@click.option("--quick", is_flag=True, help="One condition and three seeds: a part, in about a minute.")
@click.option("--seeds", "num_seeds", type=click.IntRange(1), help="The first so many of the suite's seeds.")
@click.option("--only", multiple=True, metavar="TEXT", help="Cases with this in `workload/condition`; repeatable.")
@click.option("--tuned", type=PATH, help="Folder of LAW.toml, as --tune leaves them [default: published values].")
@click.option("--tune", "tunes", is_flag=True, help="Search each law's parameters on the tuning set, and end.")
@click.option("--robustness", is_flag=True, help="Each law with one thing changed at a time, beside itself.")
@click.option("--parts", is_flag=True, help="The hybrid without each of its parts, beside itself.")
@click.option("--template", is_flag=True, help="Print a law's file to begin with, and end.")
@processes_option
@click.option("--page/--no-page", "pages", default=True, show_default=True, help="Write the page; needs some seconds.")
@click.option("--out", type=PATH, help="Folder of rows, page and record [default: ./runs/arena-<UTC>/].")
@json_option
def arena(
    law_file: Path | None,
    laws: str,
    candidate: str | None,
    quick: bool,
    num_seeds: int | None,
    only: tuple[str, ...],
    tuned: Path | None,
    tunes: bool,
    robustness: bool,
    parts: bool,
    template: bool,
    processes: int | None,
    pages: bool,
    out: Path | None,
    json_file: Path | None,
) -> None:
    """Compare control laws on a frozen suite of scenarios: one table of all laws, and a page with the verdict.

    Each run is kept as a line of OUT/rows.jsonl: a second start with the same --out goes on where the first one ended.
    What the engine cannot run yet is said, and not counted. The protocol is congestion/arena/ARENA.md.

    LAW.py enters a law, called by the file's name. It is a module with PARAMETERS and STATE (numpy record types: a row
    a run, a row a flow), a class Section of its numbers if it has any, and

    \b
      parameters(section, host_bps, settings)     a row of PARAMETERS
      start(p, own, flow)                         before a flow's first packet
      advance(p, own, flow, now)                  let timers that are due fire
      on_ack(p, own, flow, now, marked, rtt_ps, acked_bytes)
      on_loss(p, own, flow, now)                  a NACK or a timeout

    which set flow.rate_bps and flow.window_bytes, and which numba compiles: about a minute, once a version of the file.
    The file is imported, so it runs with your rights, as any program: read one that is not yours first.

    \b
    Examples:
      netlayer arena --quick
      netlayer arena --template > my_law.py && netlayer arena my_law.py --quick
      netlayer arena --tune --out runs/tuned && netlayer arena --tuned runs/tuned --out runs/arena
      netlayer arena --only all-to-all --only 400G-deep --seeds 8 --laws dcqcn,swift,nscc,hybrid
    """
    if template:
        click.echo((Path(__file__).parent.parent / "arena" / "template.py").read_text(encoding="utf-8"), nl=False)
        return
    check_target("--json", json_file)
    contenders = _contenders(laws, law_file, tuned)
    _refuse_beside(tunes, robustness, parts, quick or bool(num_seeds or only or candidate))
    if tunes:
        _tune(contenders, out, processes, json_file)
        return
    if robustness or parts:
        _changes(contenders, parts, out, processes, json_file)
        return
    chosen = candidate or (contenders[-1].name if law_file else "hybrid")
    if candidate and candidate not in [one.name for one in contenders]:
        raise ConfigError("--candidate", candidate, "does not run", "give one of --laws, or LAW.py's")
    from congestion.arena.runner import plan_of

    plan = plan_of(contenders, num_seeds=num_seeds, only=only, quick=quick)
    _compare(plan, chosen, out, processes, pages, json_file, {"laws": laws, "tuned": str(tuned or "")})


def _compare(
    plan: Plan,
    candidate: str,
    out: Path | None,
    processes: int | None,
    pages: bool,
    json_file: Path | None,
    arguments: Mapping[str, Any],
) -> None:
    """Run the plan; its table, its records and its page."""
    from congestion.arena.output import not_run_words, print_table, record_of
    from congestion.arena.runner import run_arena
    from netlayer.command import open_out
    from netlayer.progress import Stages
    from netlayer.results import utc_now

    started, folder = utc_now(), open_out(out, "arena")
    with Stages() as stages, _kept(folder):
        if plan.not_run:
            stages.say(not_run_words(plan))
        results = run_arena(plan, folder, stages, processes)
    cases = [case.name for case in plan.cases]
    record = record_of(
        results, started, {**arguments, "candidate": candidate, "cases": cases, "seeds": list(plan.seeds)}
    )
    click.echo(f"record: {record.save(folder / 'records')}", err=True)
    if json_file:
        write_text(json_file, record.to_json())
    with beside(json_file):
        print_table(results)
    _publish(results, record, candidate, folder, pages)


def _tune(contenders: Sequence[Contender], out: Path | None, processes: int | None, json_file: Path | None) -> None:
    """Tune each contender's parameters, and write profiles and the record."""
    from congestion.arena.protocol import SUITE
    from congestion.arena.tables import TUNED
    from congestion.arena.tune import tune
    from netlayer.command import open_out
    from netlayer.progress import Stages
    from netlayer.results import utc_now

    started, folder = utc_now(), open_out(out, "tune")
    with Stages() as stages, _kept(folder):
        tuned = tune(contenders, folder, stages, processes)
    rows = [
        {
            "law": one.contender.name,
            "parameters": one.num_parameters,
            "trials": one.num_trials,
            "score": one.score,
            "published": one.published_score,
            "settled": one.settled,
        }
        for one in tuned
    ]
    chosen = {one.contender.name: list(one.contender.overrides) for one in tuned}
    record = simulated(TUNED, rows, started, {"suite": SUITE.digest, "chosen": chosen})
    click.echo(f"record: {record.save(folder / 'records')}", err=True)
    show(rows, record, json_file)
    click.echo(f"profiles: {folder}; use them by --tuned {shlex.quote(str(folder))}", err=True)


def _changes(
    contenders: Sequence[Contender], parts: bool, out: Path | None, processes: int | None, json_file: Path | None
) -> None:
    """The table of changes: each law's completion time over its own without the change."""
    from congestion.arena import changes as arena_changes
    from congestion.arena.output import not_run_words
    from congestion.arena.runner import run_arena
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
        results = run_arena(plan, folder, stages, processes)
    rows = arena_changes.compare_changes(results)
    arguments = {"laws": [one.name for one in contenders], "suite": plan.suite.digest, "refused": refused}
    record = simulated(f"congestion.arena.{name}", rows, started, arguments)
    click.echo(f"record: {record.save(folder / 'records')}", err=True)
    show(rows, record, json_file)


def _refuse_beside(tunes: bool, robustness: bool, parts: bool, narrowed: bool) -> None:
    """The protocol fixes what these run: no option narrows it, and each is a run of its own."""
    options = [name for name, one in (("--tune", tunes), ("--robustness", robustness), ("--parts", parts)) if one]
    if len(options) > 1:
        raise ConfigError(options[0], None, f"has no effect beside {options[1]}", "give one of them")
    if options and narrowed:
        rule = "runs what the protocol fixes: --quick, --seeds, --only and --candidate have no effect"
        raise ConfigError(options[0], None, rule, "omit them")


def _contenders(laws: str, law_file: Path | None, tuned: Path | None) -> list[Contender]:
    """Return who runs: the laws named, and the file's after them."""
    from congestion.arena.run import Contender, published

    made = [published(law) for law in known_laws(laws, "--laws")]
    if law_file:
        from congestion.control import plugin

        if law_file.stem in OURS.split(","):
            raise ConfigError("LAW", law_file, "has the name of a law of ours", "rename the file")
        path = law_file.resolve()
        made.append(Contender(law_file.stem, plugin.enter(path), file=path))
    return [_with_profile(one, tuned) for one in made] if tuned else made


def _with_profile(contender: Contender, tuned: Path) -> Contender:
    from congestion.arena.tune_profile import read_profile

    path = tuned / f"{contender.name}.toml"
    if not path.is_file():
        raise ConfigError("--tuned", tuned, f"has no {path.name}", "tune that law too, or omit it from --laws")
    profile = read_profile(path)
    return replace(contender, preset=profile.preset, overrides=profile.overrides)


@contextlib.contextmanager
def _kept(folder: Path) -> Any:
    """Say where the results lie when a run is interrupted."""
    try:
        yield
    except BaseException:  # a Ctrl-C that lands in a compiled kernel, or as it returns, is an error of another kind
        if any(folder.glob("*.jsonl")):
            click.echo(f"note: what was measured is kept; go on with --out {shlex.quote(str(folder))}", err=True)
        raise


def _publish(results: Results, record: RunRecord, candidate: str, folder: Path, pages: bool) -> None:
    """The short records and the page with its verdict, or why there is none."""
    from congestion.arena.output import page_of, short_records

    try:
        for one in short_records(record, results, candidate):
            click.echo(f"record: {one.save(folder / 'records')}", err=True)
        if pages:
            page = page_of(results, candidate, shlex.join(["netlayer", *sys.argv[1:]])).write(folder)
            click.echo(f"report: {page}", err=True)
    except ValueError as exc:
        click.echo(f"no page: {exc}", err=True)
