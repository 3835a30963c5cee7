"""Shared parts of the arena's commands: options, laws by name, and tables of rows."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netlayer.errors import ConfigError
from netlayer.results import write_text

if TYPE_CHECKING:
    from netlayer.results import RunRecord

OURS = "none,dcqcn,swift,nscc,hybrid"
PATH = click.Path(path_type=Path)
processes_option = click.option(
    "--processes", type=click.IntRange(1, 1024), help="Workers here [default: a core each]."
)
json_option = click.option("--json", "json_file", type=PATH, help="Also write the record here; - is stdout.")

_STDOUT = Path("-")


def known_laws(laws: str, field: str) -> list[str]:
    """Return the laws of a list with commas, each once.

    Args:
        field: option that errors name.

    Raises:
        ConfigError: one of them is none of ours.
    """
    names = list(dict.fromkeys(laws.split(",")))
    for name in names:
        if name not in OURS.split(","):
            raise ConfigError(field, name, "is unknown", f"give one of {OURS}, or several with commas")
    return names


def simulated(name: str, rows: Sequence[Mapping[str, Any]], started: str, arguments: Mapping[str, Any]) -> RunRecord:
    """The record of rows that end now."""
    from netlayer.environ import snapshot
    from netlayer.results import RunRecord, utc_now

    return RunRecord(name, "simulated", rows, started, utc_now(), arguments=arguments, environment=snapshot())


def show(rows: Sequence[Mapping[str, Any]], record: RunRecord, json_file: Path | None) -> None:
    """Print all columns of the rows as a table, and write the record where it was requested."""
    from netlayer.printing import print_rows

    if json_file:
        write_text(json_file, record.to_json())
    with beside(json_file):
        print_rows("simulated", rows, {key: key for key in rows[0]})


def beside(json_file: Path | None) -> contextlib.AbstractContextManager[Any]:
    """Tables go to stderr while JSON has stdout."""
    return contextlib.redirect_stdout(sys.stderr if json_file == _STDOUT else sys.stdout)
