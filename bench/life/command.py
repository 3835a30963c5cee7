"""`netlayer run whatif`: the effective training time of a run that was not run, and the policy that raises it."""

from __future__ import annotations

import dataclasses
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from netlayer.command import FiniteRange, RunOptions, run_options
from netlayer.errors import CheckFailed, ConfigError

if TYPE_CHECKING:
    from bench.life.cases import CaseResult
    from bench.life.inputs import Life
    from bench.life.policies import CurvePoint, Policy, PolicyResult, Sensitivity
    from bench.life.study import Study

    _ParamType = click.ParamType[tuple[float, ...]]
else:
    _ParamType = click.ParamType  # generic in later releases of click alone

_PATH = click.Path(path_type=Path)
_CHECKPOINTS = (300.0, 900.0, 1800.0, 3600.0)
_STANDBYS = (0, 2, 4)
_NEAR = 0.2  # Young's interval is one more only where none of these is about the same


class _Numbers(_ParamType):
    """Numbers with commas between them, within bounds."""

    name = "N[,N...]"

    def __init__(self, least: float, is_whole: bool = False) -> None:
        self.least, self.is_whole = least, is_whole

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        try:
            numbers = tuple(int(text) if self.is_whole else float(text) for text in str(value).split(","))
        except ValueError:
            self.fail(
                f"{value!r} is not {'whole numbers' if self.is_whole else 'numbers'} with commas between", param, ctx
            )
        for number in numbers:
            if not self.least <= number <= 1e7:
                self.fail(f"{number:g} is not in the range {self.least:g}<=x<=1e+07", param, ctx)
        return numbers


@click.command()
@click.option("--life", "life_file", type=_PATH, help="TOML of rates and times [default: bench/life/defaults.toml].")
@click.option("--days", type=FiniteRange(0.1, 3650), help="Length of the run [default: the life's].")
@click.option(
    "--checkpoint-every",
    "checkpoints",
    type=_Numbers(1),
    metavar="S[,S...]",
    help="Seconds of training between saves [default: 300, 900, 1800, 3600, and Young's].",
)
@click.option(
    "--standbys",
    type=_Numbers(0, is_whole=True),
    metavar="N[,N...]",
    help="Servers that wait, checked [default: 0, 2, 4].",
)
@click.option(
    "--detect",
    "detects",
    type=_Numbers(0),
    metavar="S[,S...]",
    help="Seconds until a failure is noticed, of any kind [default: the life's, by kind].",
)
@click.option(
    "--restart",
    "restarts",
    type=click.Choice(["reschedule", "requeue"]),
    multiple=True,
    help="The lost servers alone, or the whole job queued again; repeatable [default: reschedule].",
)
@click.option(
    "--replicas",
    type=_Numbers(1, is_whole=True),
    metavar="N[,N...]",
    default="1",
    show_default=True,
    help="Data-parallel replicas that fail one by one (FT-HSDP); 1: a failure stops the job.",
)
@click.option("--runs", type=click.IntRange(20, 100_000), default=400, show_default=True, help="Runs a policy.")
@click.option("--top", type=click.IntRange(1, 200), default=10, show_default=True, help="Policies to print.")
@click.option("--published", is_flag=True, help="Published runs beside the model, in place of a cluster.")
@click.option("--check", is_flag=True, help="With --published: exit 1 where a run is not met.")
@click.option(
    "--html", "html_file", type=_PATH, help="Also write a page, its pictures in plots/ next to it; - is stdout."
)
@run_options
def whatif(
    options: RunOptions,
    life_file: Path | None,
    days: float | None,
    checkpoints: tuple[float, ...] | None,
    standbys: tuple[float, ...] | None,
    detects: tuple[float, ...] | None,
    restarts: tuple[str, ...],
    replicas: tuple[float, ...],
    runs: int,
    top: int,
    published: bool,
    check: bool,
    html_file: Path | None,
) -> None:
    """Simulate a run's life on --config's cluster under policies: failures, saves, standbys, restarts.

    Effective training time (ETTR) is the training that counts over all time. Inputs that are not known are ranges; the
    interval is the middle 90% of the runs, and the closed form (Daly) is printed too. Policies are ranked by what all
    servers do, standbys among them; a last table says which input moves the result most. --life takes your rates; the
    default ones are published, each with its source in the file. What a policy sets (checkpoints.every_s,
    recovery.standbys, replicas.number) is not read from it. Nothing here is measured.

    \b
    Examples:
      netlayer run whatif --config examples/megascale-12288.toml
      netlayer run whatif --config examples/megascale-12288.toml --standbys 0,4,8 --checkpoint-every 60,600,1800 \\
          --restart reschedule --restart requeue --html whatif.html
      netlayer run whatif --config examples/megascale-12288.toml --replicas 1,12 --detect 10,600
      netlayer run whatif --set cluster.servers=512 --set cluster.gpus_per_server=8 --days 60 --json -
      netlayer run whatif --published --check
    """
    from netlayer.results import check_target

    check_target("--html", html_file)
    if "-" == str(html_file) == str(options.json_file):
        raise ConfigError("--html", "-", "stdout is --json's already", "give one of them a file")
    if published:
        study, record = _published(options, runs)
    else:
        life = _life(options, life_file, days)
        policies = _policies(options, life, checkpoints, standbys, detects, restarts, replicas)
        study, record = _ranked(options, life, policies, runs)
    _keep(options, record)
    if html_file:
        from bench.life.page import study_page, write_page

        command, commit = shlex.join(["netlayer", *sys.argv[1:]]), str(record.environment.get("commit", ""))
        prefix = re.sub(r"\W+", "_", html_file.stem) + "_"
        write_page(html_file, study_page(study, command, commit, prefix))
    if "-" not in (str(options.json_file), str(html_file)):
        _print_cases(study.cases) if published else _print_policies(study, top)
    missed = [result.case.name for result in study.cases if not result.is_met]
    if check and missed:
        raise CheckFailed(f"{len(missed)} of {len(study.cases)} published runs are not met: {'; '.join(missed)}")


def _life(options: RunOptions, path: Path | None, days: float | None) -> Life:
    """Return the life on --config's cluster."""
    from bench.life.inputs import DEFAULTS_FILE, read_life

    config = options.load_config()
    cluster = config.cluster
    replaced: dict[str, Any] = {
        "name": cluster.name,
        "servers": cluster.servers,
        "gpus_per_server": cluster.gpus_per_server,
        "servers_per_switch": min(cluster.servers_per_tor_set, cluster.servers),
    }
    if days is not None:
        replaced["days"] = days
    return read_life(path or DEFAULTS_FILE, "--life", **replaced)


def _policies(
    options: RunOptions,
    life: Life,
    checkpoints: Sequence[float] | None,
    standbys: Sequence[float] | None,
    detects: Sequence[float] | None,
    restarts: Sequence[str],
    replicas: Sequence[float],
) -> list[Policy]:
    """Return the policies to compare, checked against the cluster and the job.

    Raises:
        ConfigError: more standbys than servers, more replicas than the job has, too many policies.
    """
    from bench.life.policies import MOST_POLICIES, Restart, all_policies, young_s

    standbys = standbys or [number for number in _STANDBYS if number <= life.servers]
    if max(standbys) > life.servers:
        rule = f"is above cluster.servers = {life.servers}"
        raise ConfigError("--standbys", f"{max(standbys):g}", rule, "give fewer standbys")
    config = options.load_config()
    limits = {"cluster.servers": life.servers}  # a replica fails with its server
    if "job" in config.model_fields_set:
        limits["job.parallel.dp"] = dp = config.job.parallel.dp
        if (uneven := next((number for number in replicas if dp % number), None)) is not None and uneven <= dp:
            rule = f"must divide job.parallel.dp = {dp}: a replica is a part of its ranks"
            raise ConfigError("--replicas", f"{uneven:g}", rule, "give another number")
    owner, largest = min(limits.items(), key=lambda limit: limit[1])
    if max(replicas) > largest:
        raise ConfigError("--replicas", f"{max(replicas):g}", f"is above {owner} = {largest}", "give fewer replicas")
    saves = list(checkpoints or _CHECKPOINTS)
    young = young_s(life)
    if not checkpoints and all(abs(young / each - 1) > _NEAR for each in saves):
        saves.append(young)
    policies = all_policies(
        saves,
        [int(number) for number in standbys],
        list(detects) if detects else [None],
        cast("Sequence[Restart]", restarts or ("reschedule",)),
        [int(number) for number in replicas],
    )
    if len(policies) > MOST_POLICIES:
        raise ConfigError("policies", len(policies), f"are more than {MOST_POLICIES}", "give fewer values an option")
    return policies


def _ranked(options: RunOptions, life: Life, policies: Sequence[Policy], runs: int) -> tuple[Study, Any]:
    """Return the study of a cluster, and its record."""
    from bench.life.policies import curve, rank, sensitivity, with_policy
    from bench.life.study import Study
    from netlayer.progress import Stages
    from netlayer.results import utc_now

    started = utc_now()
    with Stages() as stages:
        with stages.open("policies") as bar:
            results = rank(life, policies, runs, options.seed, bar)
        best = with_policy(life, results[0].policy)
        with stages.open("inputs") as bar:
            swings = sensitivity(best, max(20, runs // 2), options.seed, bar)
        points = curve(best, max(20, runs // 2), options.seed)
    rows = [*_policy_rows(results), *_swing_rows(swings), *_curve_rows(points)]
    record = _record(options, rows, started, {"runs": runs, "policies": len(policies)}, life.model_dump(mode="json"))
    return Study(life, results, swings, points), record


def _published(options: RunOptions, runs: int) -> tuple[Study, Any]:
    """Return the study of published runs, and its record."""
    from bench.life.cases import run_cases
    from bench.life.study import Study
    from netlayer.progress import Stages
    from netlayer.results import utc_now

    started = utc_now()
    with Stages() as stages, stages.open("published runs") as bar:
        results = run_cases(options.seed, runs, bar)
    rows = [
        {
            "table": "published",
            "run": result.case.name,
            "published": result.case.published.text,
            "published_by": result.case.published.by,
            "low_share": result.low,
            "median_share": result.middle,
            "high_share": result.high,
            "width_points": 100 * result.width,
            "agreeing_share": result.share,
            "closed_form_share": result.closed,
            "interruptions": float(result.outcome.interruptions.mean()),
            "verdict": result.verdict,
            "is_narrow": result.is_narrow,
            "source_of_row": result.case.source,
            "note": result.case.note,
        }
        for result in results
    ]
    return Study(cases=results), _record(options, rows, started, {"runs": runs, "published": True}, {})


def _policy_rows(results: Sequence[PolicyResult]) -> list[dict[str, Any]]:
    return [
        {
            "table": "policy",
            "rank": rank,
            **dataclasses.asdict(result.policy),
            "of_all_share": result.of_all,
            "ettr_share": result.ettr,
            "low_share": result.low,
            "high_share": result.high,
            "closed_form_share": result.closed,
            "interruptions": result.interruptions,
            **{f"{part}_share": share for part, share in result.shares.items()},
        }
        for rank, result in enumerate(results, start=1)
    ]


def _swing_rows(swings: Sequence[Sensitivity]) -> list[dict[str, Any]]:
    return [{"table": "sensitivity", **dataclasses.asdict(one), "swing": one.swing} for one in swings]


def _curve_rows(points: Sequence[CurvePoint]) -> list[dict[str, Any]]:
    return [{"table": "interval", **dataclasses.asdict(point)} for point in points]


def _record(
    options: RunOptions, rows: Sequence[Any], started: str, arguments: dict[str, Any], config: dict[str, Any]
) -> Any:
    from netlayer.environ import snapshot
    from netlayer.results import RunRecord, utc_now

    return RunRecord(
        name="run.whatif",
        source="simulated",
        rows=rows,
        started_utc=started,
        ended_utc=utc_now(),
        arguments={**options.arguments(), **arguments},
        config=config,
        environment=snapshot(options.seed),
    )


def _keep(options: RunOptions, record: Any) -> None:
    from netlayer.output import open_output
    from netlayer.results import write_text

    if options.out:
        with open_output(options.out, "run-whatif") as out:
            record.save(out.part / "records")
            for path in out.publish():
                click.echo(f"record: {path}", err=True)
    if options.json_file:
        write_text(options.json_file, record.to_json())


def _print_policies(study: Study, top: int) -> None:
    """Print the ranking and what moves it."""
    from netlayer.printing import print_table

    life, results = study.life, study.policies
    assert life is not None
    lines = [
        [
            str(rank),
            result.policy.label,
            f"{result.of_all:.2%}",
            f"{result.ettr:.2%}",
            f"{result.low:.1%} to {result.high:.1%}",
            f"{result.closed:.2%}",
            f"{result.interruptions:,.0f}",
            result.loses_by,
        ]
        for rank, result in enumerate(results[:top], start=1)
    ]
    gpus = life.servers * life.gpus_per_server
    servers = f"{life.servers:,} server{'s' * (life.servers != 1)}"
    title = f"simulated: {gpus:,} GPUs on {servers} for {life.days:g} days"
    headings = ["", "policy", "of all", "ETTR", "90% of runs", "closed form", "stops", "loses by (points)"]
    note = "of all: ETTR of all servers, standbys among them. Closed form: Daly, a null model."
    if len(results) > top:
        note += f" {len(results) - top} more policies: --top."
    print_table(title, headings, lines, note)
    swings = [
        [one.path, f"{one.low:,.4g} to {one.high:,.4g}", f"{one.ettr_low:.2%}", f"{one.ettr_high:.2%}"]
        for one in study.swings[:8]
    ]
    print_table("what moves the best policy's ETTR", ["input", "range", "at its low", "at its high"], swings)


def _print_cases(results: Sequence[CaseResult]) -> None:
    """Print published runs beside the model."""
    from bench.life.cases import WIDEST
    from netlayer.printing import print_table

    lines = [
        [
            result.case.name,
            f"{result.case.published.text}, {result.case.published.by}",
            f"{result.low:.1%} to {result.high:.1%}",
            f"{100 * result.width:.1f}",
            f"{result.middle:.1%}",
            f"{result.closed:.1%}",
            result.verdict + ("" if result.is_narrow else ", too wide"),
            str(len(result.reasoned)),
        ]
        for result in results
    ]
    note = (
        f"Interval: the middle 90% of the runs; bar: at most {100 * WIDEST:g} points. Reasoned inputs: ranges "
        "that no source gives as such, with their reasons in bench/life/cases.toml."
    )
    headings = ["run", "published", "simulated", "points", "median", "closed form", "", "reasoned inputs"]
    print_table("published effective training time beside the model", headings, lines, note)
    met = sum(result.is_met for result in results)
    click.echo(f"{met} of {len(results)} met: an interval of at most {100 * WIDEST:g} points that holds the figure")
