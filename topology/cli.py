"""`netlayer topology`: the group of its commands.

Tables go to stdout, log to stderr, the record to the output folder. Every command but `describe` lives in a module of
its own, which is imported when it is called.
"""

from __future__ import annotations

import click

from netlayer.command import RunOptions, run_options
from netlayer.commands.lazy_group import Lazy, LazyGroup

_COMMANDS = {
    name: Lazy(f"topology.{module}:command", line)
    for name, module, line in (
        ("build", "commands.build", "Lay the fabric out: cables, addresses, a graph, and what the design needs."),
        (
            "optimize",
            "commands.optimize",
            "Search what lowers collisions: UDP ports, or seeds, offsets and queue pairs.",
        ),
        ("ecmp", "commands.ecmp", "Hash flows over the fabric, with and without the ToR split."),
        ("import", "commands.import_fabric", "Read a fabric that exists: SONiC, LLDP, HPCC or htsim files."),
        ("place", "commands.place", "Compare placements of a job's ranks on the servers."),
        ("probe", "probe.command", "Probe the paths of RoCEv2 flows, or read such a capture."),
        ("report", "commands.report", "Everything about the fabric in one HTML page."),
        ("whatif", "commands.whatif", "Let links, switches or rails fail, and see what it costs."),
    )
}


@click.group(cls=LazyGroup, lazy=_COMMANDS, renamed={"cure": "optimize"})
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
    from netlayer.output import open_output
    from netlayer.results import utc_now
    from topology.commands.records import keep, load_cluster
    from topology.commands.tables import print_fabric
    from topology.fabric.clos import Clos

    started, config = utc_now(), load_cluster(options)
    fabric = Clos.build(config.cluster)
    levels, summary = fabric.describe(), fabric.summary()
    tables = {"level": levels, "fabric": [summary]}
    with open_output(options.out, "topology-describe") as out:
        prints_tables = keep("describe", tables, out, started, options, config, source="predicted", csv=False)
    if prints_tables:
        print_fabric(config.cluster.name, levels, summary)
