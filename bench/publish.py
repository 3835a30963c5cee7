"""`python -m bench.publish RUN...`: the records of finished runs, as reports/ keeps them. See `make reports`.

A report's records stand there as `<theme>_<hardware>_<yyyymm>.<record>.json`; one of the same name is replaced. Left
out are the times of single iterations, and the records that no claim and no report refers to.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from pathlib import Path

import click

from netlayer.errors import ConfigError
from netlayer.results import RunRecord, load_record, write_text

REPORTS = Path(__file__).parents[1] / "reports"
# The theme of a run follows from the first of its records that is listed here.
_THEMES = {
    "quickstart.summary": "quickstart",
    "bench.loss_equivalence": "loss_equivalence",
    **dict.fromkeys(("bench.overlap.dp", "bench.overlap.pp", "bench.overlap.tp"), "overlap"),
    "bench.small_messages": "small_messages",
    **dict.fromkeys((f"congestion.arena.{name}" for name in ("cases", "tuned", "robustness", "parts")), "arena"),
}
_SINGLE = ("iterations_us", "iterations_ms", "iterations_exposed_ms", "steps_ms", "replays_us")
"""Times of single iterations."""
_LEFT_OUT = ("quickstart.training", "topology.ecmp", "congestion.arena")


@click.command()
@click.argument("runs", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--hardware", default="cpu", show_default=True, help="What it ran on, as in a file's name: cpu, 2xh200.")
@click.option("--to", "folder", type=click.Path(path_type=Path), default=REPORTS, help="[default: reports]")
def command(runs: tuple[Path, ...], hardware: str, folder: Path) -> None:
    """Copy the records of RUNS (output folders of quickstart, loss_equivalence, overlap, small_messages, arena)."""
    for run in runs:
        for path in publish(run, hardware, folder):
            click.echo(path.name)


def publish(run: Path, hardware: str, folder: Path) -> list[Path]:
    """The files written for one run.

    Raises:
        ConfigError: the folder holds no finished run, or records of changed code, which no commit names.
    """
    records = [load_record(path) for path in sorted((run / "records").glob("*.json"))]
    theme = next((_THEMES[record.name] for record in records if record.name in _THEMES), None)
    if theme is None:
        raise ConfigError("RUNS", run, f"holds no finished run of {', '.join(_THEMES)}", "run it first")
    commit = str(records[0].environment.get("commit") or "")
    if not commit or commit.endswith("+"):
        rule = f"was made by code that no commit names ({commit or 'none'})"
        raise ConfigError("RUNS", run, rule, "commit, run it again, and publish that")
    month = f"{datetime.fromisoformat(records[0].started_utc):%Y%m}"
    return [
        _write(record, folder / f"{theme}_{hardware}_{month}.{record.name}.json")
        for record in records
        if record.name not in _LEFT_OUT
    ]


def _write(record: RunRecord, path: Path) -> Path:
    rows = [{key: value for key, value in row.items() if key not in _SINGLE} for row in record.rows]
    write_text(path, replace(record, rows=rows).to_json())
    return path


if __name__ == "__main__":
    from netlayer.cli import run

    run(command, "python -m bench.publish")
