"""`netlayer observe`: the cause of a hung job from its files, verdicts on a run, its events collected and asked."""

from __future__ import annotations

import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netlayer.errors import EXIT_FAILED, ConfigError
from netlayer.layout import describe_ranks
from netlayer.observe.events.command import collect, query
from netlayer.observe.page.command import export, page, serve
from netlayer.printing import printable

if TYPE_CHECKING:
    from netlayer.observe.blame import Blame
    from netlayer.observe.report import RunReport

_TELLING = ("not_arrived", "different", "no_dump", "unusable_dump", "no_answer")
_COLUMNS = (*_TELLING, "waiting", "complete")
_EVIDENCE = "give a run's folder, or files of evidence (`netlayer observe report --help` names their kinds)"
_MOST_ROWS = 20
_MOST_LINES = 20
_GROUP_WIDTH = 38
_COLLECTIVE_WIDTH = 24


@click.group()
def observe() -> None:
    """Find what holds up a job: the culprits of a hang, verdicts on a run, and the events of every rank."""


@observe.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--world-size", type=click.IntRange(1, 1 << 20), help="Ranks of the job, where the files do not say.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the record here; - is stdout.")
def blame(files: tuple[Path, ...], world_size: int | None, json_file: Path | None) -> None:
    """Name the ranks that did not arrive at a collective, or launched another one, and those that only wait for them.

    FILES are of one job and recognised by content; a folder stands for all files in it, - for the standard input: dumps
    of PyTorch's Flight Recorder (pickle or JSON, one a rank, named <prefix>_<rank>; no code of a pickle is run), the
    output of ncclras (-v, -f json, -D), or reports of collectives.watch.watchdog. The job is assumed to hang: in a
    running job ranks differ by a few launches anyway. Unusable files are skipped with a note; their ranks count as
    silent.

    Two answers of ncclras -f json, a minute apart, tell a hang from a running job: a hung rank launches nothing in
    between. One alone accuses nobody for being behind, nor do two texts without a launch in between: they may be one.

    The first line names the culprits, or says that they cannot be told, and why.

    Exit 0: nothing is seen to stand still; 1: something does; 2: no file can be used.

    \b
    Examples:
      netlayer observe blame /tmp/nccl_trace_rank_*
      netlayer observe blame dumps/ --json blame.json
      ncclras -v | netlayer observe blame -
      ncclras -f json > 1.json; sleep 60; ncclras -f json > 2.json; netlayer observe blame 1.json 2.json
    """
    from netlayer.observe.files import read_files
    from netlayer.results import check_target, utc_now

    check_target("--json", json_file)
    started = utc_now()
    verdict = read_files(files, world_size)
    if json_file:
        _write_record(json_file, verdict, started, files, world_size)
    if str(json_file) != "-":
        _print(verdict)
    for note in verdict.notes:
        click.echo(f"note: {printable(note)}", err=True)
    if verdict.stands_still:
        sys.exit(EXIT_FAILED)


@observe.command()
@click.argument("run", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--last-steps", type=click.IntRange(10), help="Look at the last steps alone [default: at all].")
@click.option("--link-gbps", type=click.FloatRange(0, min_open=True), help="Rate of a rank's link, each direction.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder for report.html, a page with a heat map.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the record here; - is stdout.")
def report(
    run: tuple[Path, ...], last_steps: int | None, link_gbps: float | None, out: Path | None, json_file: Path | None
) -> None:
    """Judge a run: stragglers, slow links, drift of MFU, traffic, links at their limit, effective training time.

    RUN is the output folder of a run (its `events`), or files and folders of evidence, recognised by content: event
    streams, dumps of Flight Recorder, output of ncclras, records of NCCL's Inspector and profiler plug-in, Kineto
    traces, logs of `nic watch`, MLPerf logs, ByteDance's straggler traces. Files of other programs that cannot be read
    are skipped with a note.

    Each line says found, suspected, none or cannot tell. A straggler is a rank whose own time is longer than that of
    the ranks with equal work; a rank that waits for others or for a processor is never one. It is suspected where
    noise may explain it: nobody should act on that yet.

    Exit 0: nothing to act on; 1: a straggler, slow link, drift or fallen traffic is found; 2: nothing can be read.

    \b
    Examples:
      netlayer observe report runs/a
      netlayer observe report runs/a --link-gbps 400 --out runs/a/observe --json runs/a/observe.json
      netlayer observe report trace-AR.parquet
      netlayer observe report kineto/ nic-watch/log/
    """
    from netlayer.observe.readers import open_evidence
    from netlayer.observe.report import judge_run, lines_of, write_page
    from netlayer.results import check_target, utc_now

    check_target("--json", json_file)
    started = utc_now()
    evidence = open_evidence(*run)
    judged = judge_run(evidence, last_steps, link_gbps)
    for note in judged.notes:
        click.echo(f"note: {note}", err=True)
    if not judged.kinds:
        raise ConfigError("RUN", printable(", ".join(map(str, run))), "holds nothing that can be read", _EVIDENCE)
    if json_file:
        arguments = {"run": list(map(str, run)), "last_steps": last_steps, "link_gbps": link_gbps}
        _write_report(json_file, judged, started, arguments)
    if str(json_file) != "-":
        for line in lines_of(judged):
            _echo(line)
    if out:
        click.echo(f"report: {write_page(judged, run[0].name or str(run[0]), out)}", err=True)
    if judged.alarms or (judged.blame and judged.blame.stands_still):
        sys.exit(EXIT_FAILED)


def _write_report(path: Path, judged: RunReport, started: str, arguments: Mapping[str, Any]) -> None:
    from netlayer.environ import snapshot
    from netlayer.observe.report import record_rows
    from netlayer.results import RunRecord, utc_now, write_text

    record = RunRecord(
        name="observe.report",
        source="measured",
        rows=record_rows(judged),
        started_utc=started,
        ended_utc=utc_now(),
        arguments={**arguments, "files": judged.kinds, "notes": list(judged.notes)},
        environment=snapshot(),
    )
    write_text(path, record.to_json())


def _print(blame: Blame) -> None:
    """Print one line for each cause, certain ones first, then a table of the groups that stand still."""
    for line in headlines(blame):
        _echo(line)
    rows = sorted(blame.groups, key=lambda row: not any(row.get(name) for name in _TELLING))
    lines = [_cells(row) for row in rows[:_MOST_ROWS]]
    if not lines:
        return
    click.echo()
    widths = [max(len(line[column]) for line in lines) for column in range(2)]
    for group, collective, state in lines:
        click.echo(f"{group:<{widths[0]}}  {collective:<{widths[1]}}  {state}".rstrip())
    if len(rows) > _MOST_ROWS:
        click.echo(f"and {len(rows) - _MOST_ROWS} more groups: --json has them all")


def headlines(blame: Blame) -> list[str]:
    """Return the first lines of output: the culprits, or why they cannot be told, or that nothing stands still."""
    findings = sorted(blame.findings, key=lambda finding: not finding.certain or finding.kind == "stalled")
    lines = [
        f"{finding.kind}: {finding.line}"
        if finding.certain and finding.kind != "stalled"
        else f"cannot tell ({finding.kind}): {finding.line}"
        for finding in findings
    ]
    if not lines:
        lines = [f"cannot tell: {blame.no_verdict}" if blame.no_verdict else "nothing stands still"]
    if len(lines) > _MOST_LINES:
        lines[_MOST_LINES:] = [f"and {len(lines) - _MOST_LINES} more findings: --json has them all"]
    return [printable(line) for line in lines]  # names in a dump come from the job's program


def _echo(line: str) -> None:
    """Print a line, wrapped between words on a terminal only: output to a file stays greppable."""
    if sys.stdout.isatty():
        width = max(40, shutil.get_terminal_size().columns)
        line = textwrap.fill(line, width, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)
    click.echo(line)


def _cells(row: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return group, collective without its sizes, and the ranks by state, as table cells."""
    states = [(name.replace("_", " "), ranks) for name in _COLUMNS if (ranks := row.get(name))]
    state = "; ".join(f"{name} {describe_ranks(ranks).split(' ', 1)[1]}" for name, ranks in states)
    collective = row["collective"].partition(" (")[0]
    return _short(row["group"], _GROUP_WIDTH), _short(collective, _COLLECTIVE_WIDTH), printable(state)


def _short(text: str, width: int) -> str:
    """Shorten to `width` letters by cutting the middle, since names differ at their ends."""
    text = printable(text)
    keep = (width - 2) // 2
    return text if len(text) <= width else f"{text[:keep]}..{text[len(text) - (width - 2 - keep) :]}"


def _write_record(path: Path, blame: Blame, started: str, files: Sequence[Path], world_size: int | None) -> None:
    from netlayer.environ import snapshot
    from netlayer.results import RunRecord, utc_now, write_text

    rows = [{"table": "finding", **asdict(finding)} for finding in blame.findings]
    rows += [{"table": "group", **row} for row in blame.groups]
    record = RunRecord(
        name="observe.blame",
        source="measured",
        rows=rows,
        started_utc=started,
        ended_utc=utc_now(),
        arguments={
            "files": [str(file) for file in files],
            "world_size": world_size,
            "notes": list(blame.notes),
            "no_verdict": blame.no_verdict,
        },
        environment=snapshot(),
    )
    write_text(path, record.to_json())


observe.add_command(collect)
observe.add_command(query)
observe.add_command(serve)
observe.add_command(page)
observe.add_command(export)
