"""`netlayer topology build`: a cluster file as everything that a fabric is bought, wired and opened with."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netlayer.command import RunOptions, open_out, run_options

if TYPE_CHECKING:  # `--help` needs neither numpy nor pydantic
    from topology.graph import Graph
    from topology.plant import Plant

_FILE = click.Path(path_type=Path, dir_okay=False)


@click.command(name="build")
@click.option("--rail-only", is_flag=True, help="No switch joins two rails: one CLOS a rail.")
@click.option("--prices", "prices_file", type=_FILE, help="TOML file with a table [prices]; adds the cost.")
@run_options
def command(options: RunOptions, rail_only: bool, prices_file: Path | None) -> None:
    """Build the fabric of a cluster file: check it, and write what it is wired, addressed and simulated with.

    Into the output folder: fabric.graphml, cables.csv (both ends of every cable, with ports), addresses.csv,
    switches.csv, topo.txt (HPCC), fabric.topo (htsim, where it can say this fabric). Keys of [prices]: switch, nic,
    nic_cable, fibre, optic, currency. Exit 2 where a switch would need more ports than it has.

    \b
    Examples:
      netlayer topology build --config examples/megascale-12288.toml --out fabric
      netlayer topology build --config examples/megascale-12288.toml --rail-only --set cluster.pods=1 --out fabric
    """
    from netlayer.environ import snapshot
    from netlayer.results import RunRecord, utc_now, write_text
    from topology.audit import audit, load_prices
    from topology.commands import build_tables
    from topology.graph import checked
    from topology.plant import Plant

    started, config = utc_now(), options.load_config()
    prices = load_prices(prices_file) if prices_file else None
    plant = Plant.build(config.cluster, rail_only=rail_only)
    graph = checked(plant.graph(), config.cluster.name)
    out = open_out(options.out, "topology-build")
    files = _write(plant, graph, out)
    rows = audit(plant, prices)
    record = RunRecord(
        name="topology.build",
        source="predicted",
        rows=rows,
        started_utc=started,
        ended_utc=utc_now(),
        arguments={**options.arguments(), "rail_only": rail_only, "prices": str(prices_file or ""), "files": files},
        config=config.model_dump(mode="json"),
        environment=snapshot(options.seed),
    )
    click.echo(f"record: {record.save(out / 'records')}", err=True)
    for file in files:
        click.echo(f"wrote: {out / file}", err=True)
    if options.json_file:
        write_text(options.json_file, record.to_json())
    if str(options.json_file) != "-":
        build_tables.print_audit(config.cluster.name, rows)


def _write(plant: Plant, graph: Graph, out: Path) -> list[str]:
    """Write every form; the names of those written."""
    from netlayer.errors import ConfigError
    from netlayer.results import write_text
    from topology import addressing, export

    texts: dict[str, Any] = {
        "cables.csv": addressing.cables_csv(graph, plant),
        "addresses.csv": addressing.addresses_csv(plant),
        "switches.csv": addressing.switches_csv(plant),
        "topo.txt": export.hpcc_text(graph),
    }
    try:
        if len(plant.parts) == 1:  # htsim knows no fabrics side by side
            texts["fabric.topo"] = export.htsim_text(plant.parts[0])
    except ConfigError as exc:
        click.echo(f"no fabric.topo: {exc}", err=True)
    for name, text in texts.items():
        write_text(out / name, text)
    export.write_graphml(graph, out / "fabric.graphml")
    return ["fabric.graphml", *texts]
