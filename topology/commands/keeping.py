"""What the commands of topology keep of a run: one record, with its tables as CSV and parquet beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from netlayer.errors import ConfigError
from topology.commands.records import keep_record, make_record

if TYPE_CHECKING:
    from netlayer.command import RunOptions
    from netlayer.config import Config
    from netlayer.results import Source

Rows = Sequence[Mapping[str, Any]]


def numbers_of(lists: Sequence[str], field: str) -> list[int]:
    """`3,7,100-163` as numbers; every text may hold several.

    Raises:
        ConfigError: a part is neither a number nor a range.
    """
    found: list[int] = []
    for part in (part.strip() for text in lists for part in text.split(",")):
        first, _, last = part.partition("-")
        if not first.isdigit() or not (last or first).isdigit():
            raise ConfigError(field, part, "is neither a number nor a range", "write 3,7,100-163")
        found += range(int(first), int(last or first) + 1)
    return found


def keep(
    name: str,
    tables: Mapping[str, Rows],
    started: str,
    options: RunOptions,
    config: Config,
    out: Path,
    *,
    source: Source = "simulated",
    **arguments: Any,
) -> bool:
    """Write the record, and `<table>.csv` and `<table>.parquet` of each; False where stdout holds the record already.

    Each row of the record says which table it is of.
    """
    rows = [{"table": table, **row} for table, rows in tables.items() for row in rows]
    record = make_record(name, source, rows, started, options, config, **arguments)
    for table, part in tables.items():
        write_table(out, table, part)
    return keep_record(record, out, options.json_file)


def write_table(out: Path, table: str, rows: Rows) -> None:
    """`<table>.csv` and `<table>.parquet`, where there are rows."""
    import pandas as pd

    if rows:
        frame = pd.DataFrame([dict(row) for row in rows])
        frame.to_csv(out / f"{table}.csv", index=False)
        frame.to_parquet(out / f"{table}.parquet", index=False)
