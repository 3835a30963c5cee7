"""`netlayer bench`: commands about records of benches; the benches themselves are commands of their own."""

from __future__ import annotations

import click

from netlayer.commands.lazy_group import Lazy, LazyGroup

_COMMANDS = {"compare": Lazy("bench.commands.compare:compare", "Two records row by row: ratio, spread, verdict.")}


@click.group(cls=LazyGroup, lazy=_COMMANDS)
def bench() -> None:
    """Records of benches: compare two of them."""
