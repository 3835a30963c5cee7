"""Where a `netlayer topology` command's record goes: its output folder, and a file or stdout where asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netlayer.command import RunOptions

if TYPE_CHECKING:  # `--help` needs no pydantic
    from netlayer.config import Config
    from netlayer.results import RunRecord, Source


def make_record(
    name: str,
    source: Source,
    rows: list[dict[str, Any]],
    started: str,
    options: RunOptions,
    config: Config,
    **arguments: Any,
) -> RunRecord:
    """The record `topology.<name>` of a run that began at `started` and ends now."""
    from netlayer.environ import snapshot
    from netlayer.results import RunRecord, utc_now

    return RunRecord(
        name=f"topology.{name}",
        source=source,
        rows=rows,
        started_utc=started,
        ended_utc=utc_now(),
        arguments={**options.arguments(), **arguments},
        config=config.model_dump(mode="json"),
        environment=snapshot(options.seed),
    )


def keep_record(record: RunRecord, out: Path, json_file: Path | None) -> bool:
    """Write the record where it was asked for; False where stdout already holds it, and no table may follow."""
    from netlayer.results import write_text

    path = record.save(out / "records")
    click.echo(f"record: {path}", err=True)
    if json_file:
        write_text(json_file, record.to_json())
    return str(json_file) != "-"
