"""Records of a run of a topology command: one for each source, its tables as CSV and parquet, a JSON file.

Measured, simulated and predicted figures never share a record: each row's `source` says into which it goes. The file
that `--json` names holds all rows in one document, each with its source.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netlayer.command import RunOptions
from netlayer.errors import ConfigError

if TYPE_CHECKING:  # `--help` needs no pydantic
    from netlayer.config.tree import Config
    from netlayer.output import Output
    from netlayer.results import RunRecord, Source

Rows = Sequence[Mapping[str, Any]]


def load_cluster(options: RunOptions) -> Config:
    """The configuration, and on stderr which fabric it is: without `--config` it is that of a laptop."""
    config = options.load_config()
    cluster, file = config.cluster, options.config_path or "no --config: built-in defaults"
    size = f"{cluster.servers:,} servers x {cluster.gpus_per_server} GPUs" if cluster.servers > 1 else "1 server"
    click.echo(f"fabric: {cluster.name}, {size} ({file})", err=True)
    return config


def refuse_without_effect(options: Iterable[tuple[str, bool, str]]) -> None:
    """Refuse options that would change nothing: triples of (option, whether it was given, why it has no effect).

    Raises:
        ConfigError: one was given.
    """
    for option, was_given, reason in options:
        if was_given:
            raise ConfigError(option, None, f"has no effect {reason}", "omit it")


def was_given(name: str) -> bool:
    """Whether the running command was called with this parameter, rather than with its default."""
    source = click.get_current_context().get_parameter_source(name)
    return source not in (None, click.core.ParameterSource.DEFAULT, click.core.ParameterSource.DEFAULT_MAP)


def make_record(
    name: str,
    source: Source,
    rows: Rows,
    started: str,
    options: RunOptions,
    config: Config | None = None,
    arguments: Mapping[str, Any] | None = None,
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
        arguments={**options.arguments(), **(arguments or {})},
        config=config.model_dump(mode="json") if config else {},
        environment=snapshot(options.seed),
    )


def keep(
    name: str,
    tables: Mapping[str, Rows],
    out: Output,
    started: str,
    options: RunOptions,
    config: Config | None = None,
    *,
    source: Source,
    csv: bool = True,
    **arguments: Any,
) -> bool:
    """Write and publish all that a run leaves; False where stdout holds the rows already, and no table may follow.

    Args:
        name: of the command.
        tables: rows by table; a row of the records says which table it is of, and its source.
        out: where the command has put its other files; they are published with the rest.
        source: of rows that do not say their own.
        csv: also write each table as `<table>.csv` and `<table>.parquet`.
        arguments: for the record, besides those that all commands have.
    """
    from netlayer.results import write_text

    rows = [{"table": table, "source": source, **row} for table, part in tables.items() for row in part]
    whole = make_record(name, source, rows, started, options, config, _as_json(arguments))
    for one in dict.fromkeys(row["source"] for row in rows):
        rows_of_source = [row for row in rows if row["source"] == one]
        dataclasses.replace(whole, source=one, rows=rows_of_source).save(out.part / "records")
    if csv:
        for table, part in tables.items():
            write_table(out.part, table, part)
    for path in out.publish():
        click.echo(f"record: {path}", err=True)
    if options.json_file:
        write_text(options.json_file, whole.to_json())
    return str(options.json_file) != "-"


def write_table(folder: Path, table: str, rows: Rows) -> None:
    """`<table>.csv` and `<table>.parquet`, where there are rows; a list in a cell is written as words."""
    import pandas as pd

    if rows:
        frame = pd.DataFrame([{key: _cell(value) for key, value in row.items()} for row in rows])
        frame.to_csv(folder / f"{table}.csv", index=False)
        frame.to_parquet(folder / f"{table}.parquet", index=False)


def _cell(value: Any) -> Any:
    return " ".join(map(str, value)) if isinstance(value, (list, tuple)) else value


def _as_json(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Options as JSON has them: paths as text, tuples as lists, nothing as an empty text."""
    return {name: _value(value) for name, value in arguments.items()}


def _value(value: Any) -> Any:
    if isinstance(value, tuple):
        return list(value)
    return str(value or "") if value is None or isinstance(value, Path) else value
