"""`netlayer topology import`: the user's own fabric out of other tools' files, and its counters beside a prediction."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from netlayer.command import RunOptions, open_out, run_options
from netlayer.errors import ConfigError

if TYPE_CHECKING:  # `--help` needs neither numpy nor pydantic
    from netlayer.results import RunRecord, Source
    from topology.calibrate import Counters
    from topology.graph import Floats, Graph
    from topology.hashing import HashName
    from topology.importers import Format

    Rows = list[dict[str, Any]]

_FORMATS = ("auto", "sonic", "lldp", "hpcc", "htsim", "graphml")
_PATH = click.Path(path_type=Path)


@click.command(name="import")
@click.argument("files", nargs=-1, required=True, type=_PATH)
@click.option("--format", "file_format", type=click.Choice(_FORMATS), default="auto", show_default=True)
@click.option("--rate", help="sonic, lldp: rate of links whose rate no file gives, such as 400G.")
@click.option("--hosts", multiple=True, metavar="GLOB", help="lldp: these names are hosts; repeatable.")
@click.option("--skip-dangling", is_flag=True, help="sonic, lldp: leave out links that one end does not list.")
@click.option("--parallel", is_flag=True, help="hpcc: a repeated pair is a parallel link.")
@click.option("--counters", type=_PATH, help="CSV of device, port, bytes sent: calibrate; needs --flows.")
@click.option("--counters-are", type=click.Choice(("measured", "simulated")), default="measured", show_default=True)
@click.option("--flows", type=_PATH, help="CSV of src, dst, bytes (and sport): what hosts sent meanwhile.")
@click.option("--hash", "hash_name", default="random", show_default=True, help="Hash of the hashed prediction.")
@run_options
def command(options: RunOptions, files: tuple[Path, ...], file_format: str, **given: Any) -> None:
    """Read a fabric: SONiC config_db.json or lldpcli JSON of many devices, HPCC topo.txt, htsim .topo, our GraphML.

    FILES are one file a device (or a folder of *.json), or one file. Files of lldpcli are named after their device.
    Writes fabric.graphml, cables.csv and topo.txt. With --counters and --flows: bytes of every counted link beside the
    even and the hashed prediction, and the residual. Exit 2 where files are damaged or contradict each other.

    \b
    Examples:
      netlayer topology import configs/ --out fabric
      netlayer topology import lldp/*.json --rate 400G --hosts 'srv*' --out fabric
      netlayer topology import topo.txt --counters ports.csv --flows flows.csv --hash murmur3 --out fabric
    """
    from netlayer.results import utc_now, write_text
    from topology.commands import build_tables
    from topology.graph import describe
    from topology.importers import read_fabric

    started = utc_now()
    if bool(given["counters"]) != bool(given["flows"]):
        raise ConfigError("--counters", given["counters"], "needs --flows, and --flows needs it", "give both")
    graph = read_fabric(
        files,
        None if file_format == "auto" else cast("Format", file_format),
        default_bps=_rate(given["rate"]),
        skip_dangling=given["skip_dangling"],
        parallel=given["parallel"],
        hosts=given["hosts"],
    )
    calibration = _calibrate(graph, given, options.seed) if given["counters"] else None
    out = open_out(options.out, "topology-import")
    _write(graph, out)
    asked = {**options.arguments(), "files": [str(file) for file in files], "format": file_format, **_texts(given)}
    levels = describe(graph)
    rows = [{"table": "level", **row} for row in levels]
    summary: dict[str, Any] = {}
    if calibration:
        links, summary, counted = calibration
        rows += [*({"table": "calibration", **row} for row in links), {"table": "fit", **summary}]
        _save("import.counters", given["counters_are"], counted, started, asked, options.seed, out)
    record = _save("import", "predicted", rows, started, asked, options.seed, out)
    if options.json_file:
        write_text(options.json_file, record.to_json())
    if str(options.json_file) != "-":
        build_tables.print_graph(_title(files), levels, _note(graph))
        if calibration:
            build_tables.print_calibration(calibration[0], summary, ("even", "hashed"), given["counters_are"])


def _calibrate(graph: Graph, given: dict[str, Any], seed: int) -> tuple[Rows, dict[str, Any], Rows]:
    """(a row a counted link, the fit of all, the counters alone)."""
    from topology import calibrate
    from topology.hashing import HASHES

    if given["hash_name"] not in HASHES:
        raise ConfigError("--hash", given["hash_name"], "is no hash of ours", f"one of {', '.join(HASHES)}")
    counters = calibrate.read_counters(graph, given["counters"])
    flows = calibrate.read_host_flows(graph, given["flows"])
    even, hashed = calibrate.predict(graph, flows, cast("HashName", given["hash_name"]), seed)
    predictions: dict[str, Floats] = {"even": even, "hashed": hashed}
    rows = calibrate.compare(graph, counters, predictions)
    return rows, calibrate.summarise(rows, counters, predictions), _counted(graph, counters)


def _counted(graph: Graph, counters: Counters) -> Rows:
    pairs = zip(counters.link.tolist(), counters.num_bytes.tolist(), strict=True)
    return [{"link": graph.link_name(link), "counter_bytes": num_bytes} for link, num_bytes in pairs]


def _write(graph: Graph, out: Path) -> None:
    from netlayer.results import write_text
    from topology import addressing, export

    export.write_graphml(graph, out / "fabric.graphml")
    write_text(out / "cables.csv", addressing.cables_csv(graph))
    write_text(out / "topo.txt", export.hpcc_text(graph))
    for name in ("fabric.graphml", "cables.csv", "topo.txt"):
        click.echo(f"wrote: {out / name}", err=True)


def _save(
    name: str, source: Source, rows: Rows, started: str, asked: dict[str, Any], seed: int, out: Path
) -> RunRecord:
    from netlayer.environ import snapshot
    from netlayer.results import RunRecord, utc_now

    record = RunRecord(
        name=f"topology.{name}",
        source=source,
        rows=rows,
        started_utc=started,
        ended_utc=utc_now(),
        arguments=asked,
        environment=snapshot(seed),
    )
    click.echo(f"record: {record.save(out / 'records')}", err=True)
    return record


def _rate(text: str | None) -> float:
    from netlayer.units import parse_rate

    try:
        return float(parse_rate(text)) if text else 0.0
    except ValueError as exc:
        raise ConfigError("--rate", text, "is no rate", "write 400G") from exc


def _texts(given: dict[str, Any]) -> dict[str, Any]:
    """The options as JSON has them."""
    shown = {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}
    return {name: list(value) if isinstance(value, tuple) else value for name, value in shown.items()}


def _title(files: tuple[Path, ...]) -> str:
    from topology.importers.files import show

    return show(files[0]) + (f" and {len(files) - 1} more" if len(files) > 1 else "")


def _note(graph: Graph) -> str:
    from topology.graph import parallel_pairs

    pairs, widest = parallel_pairs(graph)
    parallel = f", {pairs:,} pairs with up to {widest} parallel cables" if pairs else ""
    return f"{graph.num_nodes:,} devices, {graph.num_cables:,} cables{parallel}"
