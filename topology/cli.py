"""`netlayer topology`: the group of its commands.

Tables go to stdout, log to stderr, the record to the output folder. Every command but `describe` lives in a module of
its own, which is imported when it is called.
"""

from __future__ import annotations

import importlib
from typing import NamedTuple

import click

from netlayer.command import RunOptions, open_out, run_options


class _Lazy(NamedTuple):
    """A module with a click command named `command`, and its line of help."""

    module: str
    help: str


_COMMANDS = {
    "build": _Lazy(
        "topology.commands.build", "Lay the fabric out: cables, addresses, a graph, and what the design needs."
    ),
    "ecmp": _Lazy("topology.commands.ecmp", "Hash flows over the fabric, with and without the ToR split."),
    "import": _Lazy("topology.commands.import_fabric", "Read a fabric that exists: SONiC, LLDP, HPCC or htsim files."),
    "place": _Lazy("topology.commands.place", "Compare placements of a job's ranks on the servers."),
    "probe": _Lazy("topology.probe.command", "Probe the paths of RoCEv2 flows, or read such a capture."),
    "report": _Lazy("topology.commands.report", "Everything about the fabric in one HTML page."),
    "whatif": _Lazy("topology.commands.whatif", "Fail links, switches or rails; search what cures polarisation."),
}


class _LazyGroup(click.Group):
    """A group that imports a sub-command when it is called, never to list it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *_COMMANDS])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        lazy = _COMMANDS.get(cmd_name)
        if lazy is None:
            return super().get_command(ctx, cmd_name)
        command: click.Command = importlib.import_module(lazy.module).command
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, self._line(ctx, name)) for name in self.list_commands(ctx)])

    def _line(self, ctx: click.Context, name: str) -> str:
        lazy = _COMMANDS.get(name)
        command = None if lazy else super().get_command(ctx, name)
        return lazy.help if lazy else command.get_short_help_str(80) if command else ""


@click.group(cls=_LazyGroup)
def topology() -> None:
    """The CLOS fabric: describe it, hash a job's flows over it."""


@topology.command()
@run_options
def describe(options: RunOptions) -> None:
    """Count switches, ports, links and hops of the fabric, level by level.

    Exit 2 where a switch would need more ports than it has.

    \b
    Examples:
      netlayer topology describe --config examples/megascale-12288.toml
      netlayer topology describe --config examples/megascale-12288.toml --set cluster.aoc_split=false --json -
    """
    from netlayer.results import utc_now
    from topology.clos import Clos
    from topology.commands import tables
    from topology.commands.records import keep_record, make_record

    started, config = utc_now(), options.load_config()
    fabric = Clos.build(config.cluster)
    out = open_out(options.out, "topology-describe")
    levels, summary = fabric.describe(), fabric.summary()
    rows = [*({"table": "level", **row} for row in levels), {"table": "fabric", **summary}]
    record = make_record("describe", "predicted", rows, started, options, config)
    if keep_record(record, out, options.json_file):
        tables.print_fabric(config.cluster.name, levels, summary)
