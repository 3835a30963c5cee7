"""`netlayer topology ecmp --fabric FILE`: flows over a fabric that was imported, rather than one of a cluster file.

NVLink is no part of the network: cables to NVSwitches carry none of these flows.
"""

from __future__ import annotations

from typing import Any

import click

from netlayer.command import RunOptions
from netlayer.errors import ConfigError

_NO_HASH = ("spray", "adaptive")


def run(options: RunOptions, params: dict[str, Any]) -> None:
    """Compute load, collisions, slowdown and bottlenecks of a file's flows, or of a random permutation of the hosts."""
    import pandas as pd

    from netlayer.output import open_output
    from netlayer.progress import Stages
    from netlayer.results import utc_now
    from topology.commands.fabrics import read_network_flows
    from topology.commands.records import keep
    from topology.commands.tables import print_bottlenecks, print_collisions, print_slowdowns
    from topology.ecmp.compare import FROM_FILE, USUAL_HASHES
    from topology.ecmp.graph_load import graph_rows, load_fabric, load_graph
    from topology.ecmp.hashing import FIVE_TUPLE
    from topology.fabric.imported import without_nvlink
    from topology.fabric.wires import flow_table, link_table

    _refuse(options, params)
    started, (graph, nvswitch_of) = utc_now(), without_nvlink(load_fabric(params["fabric_file"]))
    hashes: Any = params["hashes"] or USUAL_HASHES
    fields = params["fields"] or FIVE_TUPLE
    traffic = FROM_FILE if params["flows_file"] else "permutation"
    flows = (
        read_network_flows(params["flows_file"], graph, nvswitch_of)
        if params["flows_file"]
        else _permutation(graph, options.seed).over_queue_pairs(params["qps"])
    )
    which = {"traffic": traffic, "hash": hashes[0], "seed": options.seed}
    with open_output(options.out, "topology-ecmp") as out, Stages() as stages:
        with stages.open("hash"):
            seeds = range(options.seed, options.seed + params["seeds"])
            rows = graph_rows(graph, flows, seeds=seeds, hashes=hashes, fields=fields, traffic=traffic)
            loaded = load_graph(graph, flows, hashes[0], options.seed, fields=fields)
        with stages.open("write"):
            rated = {"rate_bps": loaded.rates.flow_bps, "slowdown": loaded.slowdown}
            tables = {
                "links": link_table(loaded.wires, loaded.link_bps, loaded.paths),
                "flows": flow_table(
                    graph.names,
                    (flows.src_nic, flows.dst_nic),
                    flows.num_bytes,
                    loaded.wires.paths(loaded.paths),
                    rated,
                ),
            }
            for name, table in tables.items():
                save_table(pd.DataFrame(table).assign(**which), out.part, name)
            kept = {
                "collisions": [row.to_row() for row in rows],
                "time": [{**which, "flows": len(flows), **loaded.times()}],
                "bottleneck": [{**which, **row} for row in loaded.bottlenecks()],
            }
            recorded = {name.removesuffix("_file"): value for name, value in params.items()}
            prints_tables = keep("ecmp", kept, out, started, options, source="simulated", csv=False, **recorded)
    if prints_tables:
        print_collisions(rows, split=None, seeds=params["seeds"])
        print_slowdowns(rows, split=None)
        print_bottlenecks(loaded.bottlenecks(), f"{traffic}, {hashes[0]}, seed {options.seed}")
    click.echo(f"wrote: links and flows, .csv and .parquet, in {out.folder}", err=True)


def save_table(frame: Any, folder: Any, name: str) -> None:
    """Write the frame as parquet, and as CSV if a person could still open that."""
    frame.to_parquet(folder / f"{name}.parquet", index=False)
    if len(frame) <= _CSV_ROWS:
        frame.to_csv(folder / f"{name}.csv", index=False)
    else:
        click.echo(f"{name}: {len(frame):,} rows, as parquet alone", err=True)


_CSV_ROWS = 500_000


def _refuse(options: RunOptions, params: dict[str, Any]) -> None:
    from topology.commands.records import refuse_without_effect, was_given

    other = [name for name in params["traffics"] if name != "permutation"]
    refuse_without_effect(
        [
            ("--config", options.config_path is not None, "beside --fabric, which is read in its place"),
            ("--set", bool(options.overrides), "beside --fabric, which is read in place of the cluster"),
            ("--traffic", bool(params["flows_file"] and params["traffics"]), "beside --flows"),
            ("--qps", was_given("qps") and bool(params["flows_file"]), "on the flows of a file"),
            ("--channels", params["channels"] is not None, "beside --fabric: it has no job"),
            ("--placement", was_given("placement"), "beside --fabric: it has no job"),
        ]
    )
    if other:
        rule = "is traffic of a job, which an imported fabric has not"
        raise ConfigError("--traffic", other[0], rule, "give --traffic permutation, or --flows FILE")
    unknown = [name for name in params["hashes"] if name in _NO_HASH]
    if unknown:
        raise ConfigError("--hash", unknown[0], "is not known for an imported fabric", "take a hash, such as crc16")


def _permutation(graph: Any, seed: int) -> Any:
    """Every host sends to the next and receives from the last of a random circle; bytes are a second at its rate."""
    import numpy as np

    from topology.traffic.job import Flows, Kind

    bps = np.bincount(graph.link_src, weights=graph.link_bps, minlength=graph.num_nodes)
    hosts = np.random.default_rng(seed).permutation(graph.hosts[bps[graph.hosts] > 0])
    if len(hosts) < 2:
        rule = f"has {len(hosts)} hosts with a cable"
        raise ConfigError("--fabric", None, rule, "no flow crosses it: give a larger one")
    rate = bps[hosts]
    return Flows(hosts, np.roll(hosts, -1), rate / 8, np.full(len(hosts), Kind.PERMUTATION, np.int8))
