"""`netlayer observe`: what a job that stands still left behind."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netlayer.errors import EXIT_FAILED
from netlayer.layout import describe_ranks

if TYPE_CHECKING:
    from netlayer.observe.blame import Blame

_COLUMNS = ("not_arrived", "different", "no_dump", "waiting", "complete")
_MOST_ROWS = 40


@click.group()
def observe() -> None:
    """What a job that stands still left behind: who is to blame."""


@observe.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--world-size", type=click.IntRange(1, 1 << 20), help="Ranks of the job, where the files do not say.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the record here; - is stdout.")
def blame(files: tuple[Path, ...], world_size: int | None, json_file: Path | None) -> None:
    """Name the ranks that did not arrive at a collective, or launched another one, and those that only wait for them.

    FILES are of one job, recognised by content; a folder stands for all files in it: dumps of PyTorch's Flight
    Recorder (pickle or JSON, one a rank, named <prefix>_<rank>; no pickle runs code here), the output of ncclras
    (-v, or -f json), or reports of collectives.watch. They are taken to be of a job that hangs: in one that runs, ranks
    are rightly apart.

    Exit 0: nothing stands still; 1: something does; 2: a file cannot be used.

    \b
    Examples:
      netlayer observe blame /tmp/nccl_trace_rank_*
      netlayer observe blame dumps/ --json blame.json
      ncclras -v > ras.txt; netlayer observe blame ras.txt
    """
    from netlayer.observe.files import read_files
    from netlayer.results import check_target, utc_now

    check_target("--json", json_file)
    started = utc_now()
    found = read_files(files, world_size)
    if json_file:
        _write_record(json_file, found, started, files, world_size)
    if str(json_file) != "-":
        _print(found)
    for note in found.notes:
        click.echo(f"note: {note}", err=True)
    if found.findings:
        sys.exit(EXIT_FAILED)


def _print(found: Blame) -> None:
    """A line a cause, then the groups that stand still."""
    if not found.findings:
        click.echo("nothing stands still")
        return
    for finding in found.findings:
        click.echo(f"{finding.kind}: {finding.line}")
    rows = [_cells(row) for row in found.groups]
    headings = ["group", "collective", *(name.replace("_", " ") for name in _COLUMNS)]
    shown = [headings, *rows[:_MOST_ROWS]]
    widths = [max(len(row[column]) for row in shown) for column in range(len(headings))]
    click.echo()
    for row in shown:
        click.echo("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    if len(rows) > _MOST_ROWS:
        click.echo(f"and {len(rows) - _MOST_ROWS} more groups: --json has them all")


def _cells(row: Mapping[str, Any]) -> list[str]:
    def ranks(of: Sequence[int]) -> str:
        return describe_ranks(of).removeprefix("ranks ").removeprefix("rank ") if of else "-"

    return [row["group"], row["collective"], *(ranks(row.get(name, ())) for name in _COLUMNS)]


def _write_record(path: Path, found: Blame, started: str, files: Sequence[Path], world_size: int | None) -> None:
    from netlayer.environ import snapshot
    from netlayer.results import RunRecord, utc_now, write_text

    rows = [{"table": "finding", **asdict(finding)} for finding in found.findings]
    rows += [{"table": "group", **row} for row in found.groups]
    record = RunRecord(
        name="observe.blame",
        source="measured",
        rows=rows,
        started_utc=started,
        ended_utc=utc_now(),
        arguments={"files": [str(file) for file in files], "world_size": world_size, "notes": list(found.notes)},
        environment=snapshot(),
    )
    write_text(path, record.to_json())
