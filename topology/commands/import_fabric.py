"""`netlayer topology import`: the user's own fabric from other tools' files, and its counters next to a prediction."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from netlayer.command import RunOptions, renamed_option, run_options_without_config
from netlayer.errors import ConfigError

if TYPE_CHECKING:  # `--help` needs neither numpy nor pydantic
    from netlayer.results import Source
    from topology.ecmp.hashing import HashName
    from topology.fabric.graph import Floats, Graph
    from topology.importers import Format

    Rows = list[dict[str, Any]]

_FORMATS = ("auto", "sonic", "lldp", "hpcc", "htsim", "graphml", "cables")
_HASHES = ("random", "crc16", "crc32c", "crc16_bisync", "crc32c_low", "crc32c_high", "xor16", "murmur3")
_FILES = ("fabric.graphml", "cables.csv", "topo.txt")
_PATH = click.Path(path_type=Path)


@click.command(name="import")
@click.argument("files", nargs=-1, required=True, type=_PATH)
@click.option("--format", "file_format", type=click.Choice(_FORMATS), default="auto", show_default=True)
@click.option("--rate", help="sonic, lldp, cables: rate of links whose rate no file gives, such as 400G.")
@click.option(
    "--host-names",
    "hosts",
    multiple=True,
    metavar="GLOB",
    help="sonic, lldp, cables: these names are hosts; repeatable.",
)
@renamed_option("--hosts", "--host-names", "hosts", multiple=True)
@click.option("--exclude", multiple=True, metavar="GLOB", help="sonic, lldp: leave these devices out; repeatable.")
@click.option(
    "--keep", multiple=True, metavar="GLOB", help="sonic, lldp: these are no management switches; repeatable."
)
@click.option("--skip-dangling", is_flag=True, help="sonic, lldp: omit links that one end does not list.")
@click.option("--parallel", is_flag=True, help="hpcc: a repeated pair is a parallel link.")
@click.option("--counters", type=_PATH, help="CSV of device, port, bytes sent: calibrate; needs --flows.")
@click.option("--counters-are", type=click.Choice(("measured", "simulated")), default="measured", show_default=True)
@click.option("--flows", type=_PATH, help="What hosts sent meanwhile: src, dst, bytes (and sport), as `ecmp` reads it.")
@click.option("--hash", "hash_name", type=click.Choice(_HASHES), default="random", show_default=True)
@run_options_without_config
def command(options: RunOptions, files: tuple[Path, ...], file_format: str, **params: Any) -> None:
    """Read a fabric: SONiC config_db.json or lldpcli JSON of many devices, HPCC and SimAI topo.txt, htsim .topo, a
    CSV of cables, our GraphML.

    FILES are one file a device (or a folder of *.json), or one file. Files of lldpcli are named after their device.
    Writes fabric.graphml, cables.csv and topo.txt. With --counters and --flows also calibration.csv: bytes of every
    counted link next to the even and the hashed prediction, as predicted and scaled, and the residual. Exit 2 where
    files are damaged or contradict each other. Out-of-band management switches are omitted, by their slow cables or
    the ports that these end at, and named; --exclude names others.

    \b
    Examples:
      netlayer topology import configs/ --out fabric
      netlayer topology import lldp/*.json --rate 400G --host-names 'srv*' --out fabric
      netlayer topology import lldp/ --exclude 'oob*' --out fabric
      netlayer topology import topo.txt --counters ports.csv --flows flows.csv --hash murmur3 --out fabric
    """
    from netlayer.output import open_output
    from netlayer.results import utc_now
    from topology.commands.build_tables import print_calibration, print_graph, print_servers
    from topology.commands.records import keep, write_table
    from topology.fabric.graph import describe
    from topology.importers import read_fabric
    from topology.importers.servers import find_servers

    started = utc_now()
    if bool(params["counters"]) != bool(params["flows"]):
        raise ConfigError("--counters", params["counters"], "needs --flows, and --flows needs it", "give both")
    graph = read_fabric(
        files,
        None if file_format == "auto" else cast("Format", file_format),
        default_bps=_rate(params["rate"]),
        skip_dangling=params["skip_dangling"],
        parallel=params["parallel"],
        hosts=params["hosts"],
        exclude=params["exclude"],
        keep=params["keep"],
    )
    servers = find_servers(graph)
    asymmetries = list(servers.asymmetries())
    for line in asymmetries:
        click.echo(f"warning: asymmetric cabling: {line}", err=True)
    tables: dict[str, Rows] = {"level": describe(graph), "nics": servers.rows()}
    tables["asymmetric"] = [{"words": line} for line in asymmetries]
    compared: Rows = []
    if params["counters"]:
        more, compared = _calibrate(graph, params, options.seed)
        tables |= more
    with open_output(options.out, "topology-import") as out:
        _write(graph, out.part)
        write_table(out.part, "calibration", compared)
        recorded = {"files": [str(file) for file in files], "format": file_format, **params}
        prints_tables = keep("import", tables, out, started, options, source="predicted", csv=False, **recorded)
    for name in (*_FILES, *(("calibration.csv",) if compared else ())):
        click.echo(f"wrote: {out.folder / name}", err=True)
    if prints_tables:
        print_graph(_title(files), tables["level"], _note(graph))
        if servers.num_nics > len(servers.switch_of):  # of servers with one NIC there is nothing to compare
            print_servers(tables["nics"], len(servers.switch_of))
        if compared:
            print_calibration(compared, tables["fit"], params["counters_are"])


def _calibrate(graph: Graph, params: dict[str, Any], seed: int) -> tuple[dict[str, Rows], Rows]:
    """Tables of one source each (the counters, the predictions, how they fit), and the rows that hold all of it."""
    from topology.commands.fabrics import read_network_flows
    from topology.ecmp import calibrate
    from topology.fabric.imported import without_nvlink

    whole = graph
    graph, nvswitch_of = without_nvlink(whole)
    counters = calibrate.read_counters(graph, params["counters"], whole)
    flows = read_network_flows(params["flows"], graph, nvswitch_of)
    even, hashed = calibrate.predict(graph, flows, cast("HashName", params["hash_name"]), seed)
    predictions: dict[str, Floats] = {"even": even, "hashed": hashed}
    rows = calibrate.compare(graph, counters, predictions)
    source = cast("Source", params["counters_are"])
    tables = {
        "counters": [
            {"source": source, "link": row["link"], "counter_bytes": row["counter_bytes"]}
            for row in rows
            if row["prediction"] == "even"
        ],
        "prediction": [{key: row[key] for key in ("link", "level", "prediction", "predicted_bytes")} for row in rows],
        "fit": calibrate.summarise(rows, counters, predictions),
    }
    return tables, rows


def _write(graph: Graph, out: Path) -> None:
    from netlayer.results import write_text
    from topology.fabric import addressing, export

    export.write_graphml(graph, out / "fabric.graphml")
    write_text(out / "cables.csv", addressing.cables_csv(graph))
    write_text(out / "topo.txt", export.hpcc_text(graph))


def _rate(text: str | None) -> float:
    from netlayer.units import parse_rate

    try:
        return float(parse_rate(text)) if text else 0.0
    except ValueError as exc:
        raise ConfigError("--rate", text, "is no rate", "write 400G") from exc


def _title(files: tuple[Path, ...]) -> str:
    from topology.importers.files import show

    return show(files[0]) + (f" and {len(files) - 1} more" if len(files) > 1 else "")


def _note(graph: Graph) -> str:
    from topology.fabric.graph import parallel_pairs
    from topology.fabric.imported import without_nvlink

    pairs, widest = parallel_pairs(graph)
    parallel = f", {pairs:,} pairs with up to {widest} parallel cables" if pairs else ""
    network, nvswitch_of = without_nvlink(graph)
    num_nvlinks = graph.num_cables - network.num_cables
    nvlink = f"; {num_nvlinks:,} of these are NVLink, which no other command counts" if nvswitch_of else ""
    return f"{graph.num_nodes:,} devices, {graph.num_cables:,} cables{parallel}{nvlink}"
