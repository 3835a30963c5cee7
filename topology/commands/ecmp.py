"""`netlayer topology ecmp`: a job's flows, or a file's, over the fabric: load, collisions, slowdown, bottlenecks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netlayer.command import RunOptions, run_options

if TYPE_CHECKING:  # `--help` needs neither numpy nor pydantic
    from collections.abc import Sequence

    from netlayer.config.tree import Config
    from netlayer.output import Output
    from topology.ecmp.rows import TierCollisions
    from topology.single_run import SingleRun

_BALANCES = (
    "random",
    "crc16",
    "crc32c",
    "crc16_bisync",
    "crc32c_low",
    "crc32c_high",
    "xor16",
    "murmur3",
    "spray",
    "adaptive",
)
_TRAFFICS = ("ring", "pipeline", "permutation", "tree", "all_to_all")
_FIELDS = ("src_ip", "dst_ip", "protocol", "src_port", "dst_port", "dst_qpn")
_STRATEGIES = ("given", "random", "packed", "paper", "pipeline-first")
_OWN = ("ring", "pipeline", "tree", "all_to_all")  # the job's own flows
_COLLECTIVES = ("ring", "tree", "all_to_all")
_COUNT = click.IntRange(min=1)


@click.command(name="ecmp")
@click.option("--seeds", type=_COUNT, default=10, show_default=True, help="Seeds to average, from --seed.")
@click.option(
    "--hash",
    "hashes",
    type=click.Choice(_BALANCES),
    multiple=True,
    help="How switches spread flows; repeatable [default: random, crc16, crc32c].",
)
@click.option(
    "--traffic",
    "traffics",
    type=click.Choice(_TRAFFICS),
    multiple=True,
    help="Flows to hash; repeatable [default: ring, pipeline, permutation].",
)
@click.option("--flows", "flows_file", type=click.Path(path_type=Path), help="Flows of a file in their place.")
@click.option(
    "--fabric",
    "fabric_file",
    type=click.Path(path_type=Path),
    help="An imported fabric in place of the cluster's: fabric.graphml, or what `import` reads.",
)
@click.option("--qps", type=_COUNT, default=1, show_default=True, help="Queue pairs a connection, or a pair of NICs.")
@click.option("--channels", type=_COUNT, help="NCCL channels of a group [default: one a NIC, tree two].")
@click.option(
    "--field",
    "fields",
    type=click.Choice(_FIELDS),
    multiple=True,
    help="Header field that a hash takes; repeatable; dst_qpn is E-ECMP [default: the 5-tuple].",
)
@click.option(
    "--placement",
    type=click.Choice(_STRATEGIES),
    default="given",
    show_default=True,
    help="Where the job's ranks stand, see `place`.",
)
@run_options
def command(options: RunOptions, **params: Any) -> None:
    """Hash flows over the fabric, with and without the ToR split: links, load, collisions and slowdown of every tier.

    A collision is a flow on a link whose hashed demand exceeds its capacity; its size is the excess (demand above
    capacity over total demand). Slowdown is the rate over NICs alone over the max-min fair rate. `ring`, `tree`,
    `pipeline` and `all_to_all` are the job's own flows, `permutation` has every NIC send at full rate to a NIC under
    another ToR. --flows reads CSV or parquet (src, dst, bytes, start in seconds), HPCC's flow.txt, htsim's .cm.
    --fabric takes the flows of a file, or a permutation of its hosts. Into the output folder: links.csv and flows.csv
    (and .parquet), the load of every link and the path of every flow for the first hash and seed. Exit 2 where no flow
    can cross the fabric, or a flow names a host that it has not.

    \b
    Examples:
      netlayer topology ecmp --config examples/megascale-12288.toml
      netlayer topology ecmp --config examples/megascale-12288.toml --hash crc16 --hash spray --traffic permutation
      netlayer topology ecmp --config examples/megascale-12288.toml --traffic ring --placement random
      netlayer topology ecmp --config examples/megascale-12288.toml --flows flows.csv --json ecmp.json
      netlayer topology ecmp --fabric fabric/fabric.graphml --flows flows.csv --hash crc16
    """
    if params["fabric_file"]:
        from topology.commands import ecmp_graph

        ecmp_graph.run(options, params)
        return
    from netlayer.output import open_output
    from netlayer.progress import Stages
    from netlayer.results import utc_now
    from topology.commands.records import keep, load_cluster
    from topology.ecmp.compare import USUAL_HASHES, USUAL_TRAFFICS
    from topology.fabric.clos import Clos
    from topology.fabric.wires import Wires
    from topology.traffic.flow_files import read_flows
    from topology.traffic.job import job_flows, traffic_rows

    params["hashes"] = tuple(dict.fromkeys(params["hashes"])) or USUAL_HASHES
    _refuse(params)
    params["traffics"] = tuple(dict.fromkeys(params["traffics"])) or USUAL_TRAFFICS
    started, config = utc_now(), load_cluster(options)
    fabric = Clos.build(config.cluster)
    flows = read_flows(params["flows_file"], fabric) if params["flows_file"] else None
    with open_output(options.out, "topology-ecmp") as out, Stages() as stages:
        collisions, tables = _compare(config, options.seed, params, flows, stages)
        runs, wires = _runs(config, options.seed, params, flows, stages), Wires.of_clos(fabric, config.cluster)
        tables |= _rows_of(runs, wires)
        if flows is None and any(name in _OWN for name in params["traffics"]):
            step = traffic_rows(config.job, job_flows(config.job, config.cluster))
            tables["traffic"] = [{**row, "source": "predicted"} for row in step]
        with stages.open("write"):
            _write(runs, wires, out)
            recorded = {name.removesuffix("_file"): value for name, value in params.items()}
            prints_tables = keep(
                "ecmp", tables, out, started, options, config, source="simulated", csv=False, **recorded
            )
    if prints_tables:
        _print(collisions, tables.get("traffic", []), runs, wires, config, params["seeds"])
    click.echo(f"wrote: links and flows, .csv and .parquet, in {out.folder}", err=True)


def _refuse(params: dict[str, Any]) -> None:
    """Refuse what would change nothing; called before the defaults are filled in."""
    from topology.commands.records import refuse_without_effect, was_given

    file, traffics = bool(params["flows_file"]), params["traffics"]
    no_job = "on the flows of a file" if file else f"on {', '.join(traffics)} traffic"
    own = not file and (not traffics or any(name in _OWN for name in traffics))
    collective = not file and (not traffics or any(name in _COLLECTIVES for name in traffics))
    whole = all(name in ("spray", "adaptive") for name in params["hashes"])
    refuse_without_effect(
        [
            ("--traffic", file and bool(traffics), "beside --flows"),
            ("--qps", was_given("qps") and file, no_job),
            ("--channels", params["channels"] is not None and not collective, no_job),
            ("--placement", was_given("placement") and not own, no_job),
            ("--field", bool(params["fields"]) and whole, f"on {', '.join(params['hashes'])}, which hash no header"),
        ]
    )


def _compare(
    config: Config, seed: int, params: dict[str, Any], flows: Any, stages: Any
) -> tuple[Sequence[TierCollisions], dict[str, Any]]:
    """Return the comparison with and without the split, and tables of it and of the distributions behind it."""
    from topology.ecmp.compare import compare_split
    from topology.ecmp.distribution import Distribution
    from topology.ecmp.hashing import FIVE_TUPLE

    distribution = Distribution()
    with stages.open("compare") as bar:
        rows = compare_split(
            config,
            seeds=range(seed, seed + params["seeds"]),
            hashes=params["hashes"],
            traffics=params["traffics"],
            qps_per_connection=params["qps"],
            num_channels=params["channels"],
            fields=params["fields"] or FIVE_TUPLE,
            flows=flows,
            placement=params["placement"],
            observe=distribution.add,
            progress=bar,
        )
    tables = {"collisions": [row.to_row() for row in rows]}
    return rows, tables | {"link_use": distribution.link_rows(), "tor_collisions": distribution.tor_rows()}


def _runs(config: Config, seed: int, params: dict[str, Any], flows: Any, stages: Any) -> list[SingleRun]:
    """Each traffic once, timed, with the first hash and seed."""
    from topology.ecmp.compare import FROM_FILE
    from topology.ecmp.hashing import FIVE_TUPLE
    from topology.single_run import RunRequest, run_once

    fields, qps, channels = tuple(params["fields"] or FIVE_TUPLE), params["qps"], params["channels"]
    name, place = params["hashes"][0], params["placement"]
    with stages.open("one run"):
        return [
            run_once(RunRequest(config, name, traffic, seed, qps, channels, fields, flows, place))
            for traffic in ((FROM_FILE,) if flows is not None else params["traffics"])
        ]


def _rows_of(runs: Sequence[SingleRun], wires: Any) -> dict[str, Any]:
    tables: dict[str, list[dict[str, Any]]] = {"timing": [], "time": [], "bottleneck": [], "members": []}
    for run in runs:
        tables["timing"] += [{**run.which, **row, "source": "measured"} for row in run.timings]
        tables["time"].append({**run.which, **run.time})
        tables["bottleneck"] += [{**run.which, **row} for row in run.bottlenecks(wires)]
        tables["members"] += [{**run.which, **row} for row in run.members]
    return tables


def _write(runs: Sequence[SingleRun], wires: Any, out: Output) -> None:
    import pandas as pd

    from topology.commands.ecmp_graph import save_table

    made = [run.tables(wires) for run in runs]
    for name in ("links", "flows"):
        save_table(pd.concat([tables[name] for tables in made], ignore_index=True), out.part, name)


def _print(
    rows: Sequence[TierCollisions],
    step: Sequence[dict[str, Any]],
    runs: Sequence[SingleRun],
    wires: Any,
    config: Config,
    seeds: int,
) -> None:
    """Print the tables of all traffics, and those of each traffic's single run.

    Args:
        rows: the comparison with and without the split.
        step: the job's bytes, a row a kind; empty: no flows of a job.
    """
    from topology.commands import tables

    tables.print_traffic(step)
    tables.print_collisions(rows, split=config.cluster.aoc_split, seeds=seeds)
    tables.print_slowdowns(rows, split=config.cluster.aoc_split)
    tables.print_split(rows)
    for run in runs:
        tables.print_run(run, wires)
