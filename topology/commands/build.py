"""`netlayer topology build`: a cluster file as everything that a fabric is bought, wired and opened with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netlayer.command import RunOptions, run_options

if TYPE_CHECKING:  # `--help` needs neither numpy nor pydantic
    from topology.fabric.cable_plan import CablePlan
    from topology.fabric.graph import Graph

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command(name="build")
@click.option("--rail-only", is_flag=True, help="No switch joins two rails, as cluster.rail_only = true says it.")
@click.option(
    "--prices", "prices_file", type=_FILE, help="TOML file with a table [prices], in place of [cluster.prices]."
)
@run_options
def command(options: RunOptions, rail_only: bool, prices_file: Path | None) -> None:
    """Build the fabric of a cluster file: check it, and write what it is wired, addressed and simulated with.

    Into the output folder: fabric.graphml, cables.csv (both ends of every cable, with ports), addresses.csv,
    switches.csv, topo.txt (HPCC; parallel links as one), fabric.topo (htsim, where it can say this fabric). With prices
    ([cluster.prices]: switch, nic, nic_cable, fibre, optic, currency) also the cost. Exit 2 where a switch would need
    more ports than it has.

    \b
    Examples:
      netlayer topology build --config examples/megascale-12288.toml --out fabric
      netlayer topology build --config examples/megascale-12288.toml --rail-only --out fabric
    """
    from netlayer.output import open_output
    from netlayer.results import utc_now
    from topology.commands.build_tables import print_audit
    from topology.commands.records import keep, load_cluster
    from topology.fabric.audit import audit, load_prices
    from topology.fabric.cable_plan import CablePlan
    from topology.fabric.graph import checked

    started, config = utc_now(), load_cluster(options)
    prices = load_prices(prices_file) if prices_file else None
    with open_output(options.out, "topology-build") as out:
        cable_plan = CablePlan.build(config.cluster, rail_only=rail_only)
        files = _write(cable_plan, checked(cable_plan.graph(), config.cluster.name), out.part)
        tables = by_table(audit(cable_plan, prices))
        arguments: dict[str, Any] = {"rail_only": rail_only, "prices": prices_file, "files": files}
        prints_tables = keep("build", tables, out, started, options, config, source="predicted", csv=False, **arguments)
    for file in files:
        click.echo(f"wrote: {out.folder / file}", err=True)
    if prints_tables:
        print_audit(config.cluster.name, tables)


def by_table(rows: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Rows that name their table, a list a table."""
    names = dict.fromkeys(row["table"] for row in rows)
    return {name: [row for row in rows if row["table"] == name] for name in names}


def _write(cable_plan: CablePlan, graph: Graph, out: Path) -> list[str]:
    """Write every form; the names of those written."""
    from netlayer.errors import ConfigError
    from netlayer.results import write_text
    from topology.fabric import addressing, export

    texts: dict[str, Any] = {
        "cables.csv": addressing.cables_csv(graph, cable_plan),
        "addresses.csv": addressing.addresses_csv(cable_plan),
        "switches.csv": addressing.switches_csv(cable_plan),
        "topo.txt": export.hpcc_text(graph),
    }
    try:
        texts["fabric.topo"] = export.htsim_text(cable_plan.fabric)
    except ConfigError as exc:
        click.echo(f"no fabric.topo: {exc}", err=True)
    for name, text in texts.items():
        write_text(out / name, text)
    export.write_graphml(graph, out / "fabric.graphml")
    return ["fabric.graphml", *texts]
