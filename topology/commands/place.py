"""`netlayer topology place`: which server runs which ranks, and what each way of placing them costs.

The table goes to stdout, the rows and a `placement-<name>.csv` of each way to the output folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from netlayer.command import RunOptions, run_options
from netlayer.errors import ConfigError
from topology.commands.fabrics import fabric_option

if TYPE_CHECKING:
    from netlayer.config.tree import ClusterConfig
    from topology.ecmp.hashing import HashName
    from topology.fabric.interface import Fabric
    from topology.placement.strategies import Placement, StrategyName

_STRATEGIES = ("given", "random", "packed", "paper", "pipeline-first")
_HASHES = ("random", "crc16", "crc32c", "crc16_bisync", "crc32c_low", "crc32c_high", "xor16", "murmur3")

_LEAST_GAIN = 1e-3  # of the communication's time


@click.command("place")
@click.option(
    "--strategy",
    "strategies",
    type=click.Choice(_STRATEGIES),
    multiple=True,
    help="Way to place; repeatable [default: all].",
)
@click.option(
    "--from", "file", type=click.Path(path_type=Path), help="CSV rank,server: the placement that `given` means."
)
@click.option("--failed", multiple=True, metavar="LIST", help="Servers that failed: 3,7,100-163; repeatable.")
@click.option("--busy", multiple=True, metavar="LIST", help="Servers that others use; repeatable.")
@click.option("--spares", type=click.IntRange(min=0), default=0, show_default=True, help="Servers beyond the job's.")
@click.option("--optimise/--no-optimise", default=True, show_default=True, help="Improve the best of them.")
@click.option(
    "--seconds", type=click.FloatRange(min=0), default=10.0, show_default=True, help="Longest search of the optimiser."
)
@click.option("--hash", "hash_name", type=click.Choice(_HASHES), default="crc16", show_default=True, help="ECMP hash.")
@click.option("--seeds", type=click.IntRange(min=1), default=4, show_default=True, help="Hash seeds, from --seed.")
@fabric_option
@run_options
def command(
    options: RunOptions,
    strategies: tuple[str, ...],
    file: Path | None,
    failed: tuple[str, ...],
    busy: tuple[str, ...],
    spares: int,
    optimise: bool,
    seconds: float,
    hash_name: str,
    seeds: int,
    fabric_file: Path | None,
) -> None:
    """Place the job's ranks on servers and print what each way costs: hops, bytes between pods, collisions.

    Failed servers need spares: --spares N grows the fabric by whole pods and lets the job use N servers of them. The
    optimiser starts from the way with fewest bytes x links and moves few ranks, none where communication would get
    longer. On an imported fabric the job's ranks may use every server with all its NICs. Exit 2 where there is no room.

    \b
    Examples:
      netlayer topology place --config examples/megascale-12288.toml
      netlayer topology place --config examples/megascale-12288.toml --spares 32 --failed 5,77,400-407 --out placed
      netlayer topology place --config my-job.toml --fabric fabric/fabric.graphml --failed srv5,srv77
    """
    from netlayer.output import open_output
    from netlayer.progress import Stages
    from netlayer.results import utc_now
    from topology.commands.fabrics import open_world
    from topology.commands.records import keep, load_cluster, refuse_without_effect, was_given
    from topology.fabric.clos import Clos
    from topology.fabric.imported import ImportedFabric
    from topology.placement.strategies import num_slots, place_slots, read_csv, usable_servers
    from topology.placement.swaps import cheapest, improve
    from topology.traffic.step import grown, placement_row, slot_flows

    strategies = tuple(dict.fromkeys(strategies)) or _STRATEGIES
    refuse_without_effect(
        [
            ("--from", file is not None and "given" not in strategies, "without --strategy given"),
            ("--seconds", was_given("seconds") and not optimise, "with --no-optimise"),
            (
                "--spares",
                bool(spares) and fabric_file is not None,
                "on an imported fabric: all servers are free",
            ),
        ]
    )
    started, names = utc_now(), None
    if fabric_file is None:
        config = load_cluster(options)
        config.check_world()
        cluster, not_ours = grown(config, spares)
        fabric: Fabric = Clos.build(cluster)
    else:
        world = open_world(options, fabric_file)
        fabric, config = world.fabric, world.job_config("placement")
        cluster, not_ours = config.cluster.model_copy(update={"servers": fabric.num_servers}), []
        names = fabric.server_names if isinstance(fabric, ImportedFabric) else None
    slots = num_slots(cluster, config.job.parallel)
    gone = (_servers(failed, "--failed", cluster, names), _servers(busy, "--busy", cluster, names))
    usable = usable_servers(cluster.servers, not_ours, *gone) & fabric.full_servers
    arguments: dict[str, Any] = {"strategy": strategies, "from": file, "spares": spares, "failed": failed, "busy": busy}
    arguments |= {"fabric": fabric_file} if fabric_file is not None else {}
    arguments |= {"hash": hash_name, "seeds": seeds, "optimise": optimise, "seconds": seconds}
    with open_output(options.out, "topology-place") as out:
        flows = slot_flows(config.job, cluster)
        placements: list[Placement] = []
        for name in cast("tuple[StrategyName, ...]", strategies):
            if name == "given" and file:
                placements.append(read_csv(file, slots, cluster))
                _check_full(file, placements[-1], fabric)
            else:
                placements.append(place_slots(name, fabric, config.job.parallel, slots, usable, options.seed))
        hashed = cast("HashName", hash_name)
        rows = [placement_row(fabric, flows, placement, hashed, options.seed, seeds=seeds) for placement in placements]
        optimised: list[dict[str, Any]] = []
        if optimise:
            start = cheapest(fabric, flows, placements)
            with Stages() as stages, stages.open("optimise") as bar:
                limits: dict[str, Any] = {"seed": options.seed, "max_seconds": seconds, "progress": bar}
                improved = improve(fabric, flows, start, usable, **limits)
            now = rows[placements.index(start)]
            then = placement_row(fabric, flows, improved.placement, hashed, options.seed, seeds=seeds)
            # Ranks are not moved for a gain that a change of the hash's seed outweighs, or for none.
            if usable[start.server].all() and then["time_s"] > now["time_s"] * (1 - _LEAST_GAIN):
                improved, then = improved.given_up(start), {**now, "placement": improved.placement.name}
            placements.append(improved.placement)
            rows.append(then)
            optimised.append(improved.to_row(start.name, cluster.gpus_per_server))
        for placement, row in zip(placements, rows, strict=True):
            row["unusable_servers"] = int((~usable[placement.server]).sum())
            row["over_best_share"] = _over(row["time_s"], min(float(each["time_s"]) for each in rows))
            placement.write_csv(out.part / f"placement-{placement.name}.csv", cluster.gpus_per_server, names)
        tables = {"placements": rows, "optimised": optimised}
        prints_tables = keep("place", tables, out, started, options, config, source="simulated", **arguments)
    if prints_tables:
        _print(rows, optimised, hash_name, options.seed)
        click.echo(f"placements: {out.folder}/placement-*.csv", err=True)


def _servers(lists: tuple[str, ...], option: str, cluster: ClusterConfig, names: list[str] | None = None) -> list[int]:
    """Numbers of the servers in lists; of an imported fabric a part may be a server's name."""
    from topology.ranges import numbers_in

    number = {name: server for server, name in enumerate(names or [])}
    parts = [part for text in lists for part in ([text] if names is None else text.split(","))]
    return [
        server
        for part in parts
        for server in (
            [number[part.strip()]] if part.strip() in number else numbers_in(part, 0, cluster.servers - 1, option)
        )
    ]


def _check_full(file: Path, placement: Placement, fabric: Fabric) -> None:
    """Refuse ranks on servers of an imported fabric that lack NICs."""
    partly = placement.server[~fabric.full_servers[placement.server]]
    if len(partly):
        rule = f"puts ranks on server {partly[0]}, which has fewer than {fabric.nics_per_server} NICs"
        raise ConfigError("placement file", file, rule, "name servers with all NICs")


def _print(rows: list[dict[str, Any]], optimised: list[dict[str, Any]], hash_name: str, seed: int) -> None:
    from netlayer.printing import print_rows

    columns = {
        "placement": "placement",
        "mean_hops": "hops",
        "cross_tor_bytes": "between ToRs",
        "cross_pod_ring_bytes": "rings between pods",
        "cross_pod_pipeline_bytes": "pipeline between pods",
        "ring_collision_share": "ring flows colliding",
        "pipeline_collision_share": "pipeline flows colliding",
        "pipeline_excess": "pipeline excess",
        "time_s": "communication, median",
        "time_min_s": "least",
        "time_max_s": "most",
        "over_best_share": "over the best",
        "unusable_servers": "on lost servers",
    }
    title = f"Placements, bytes a step, {hash_name}, {rows[0]['seeds']} seeds from {seed} (simulated)"
    # The start then stands on lost servers, and the cost before is that of the nearest placement on usable ones.
    replaced = " (unusable servers replaced)" if any(row["unusable_servers"] for row in rows) else ""
    print_rows(title, rows, columns, "\n".join(_gain(row, replaced) for row in optimised))


def _gain(row: dict[str, Any], replaced: str) -> str:
    cut = ", cut short" if row["cut_short"] else ""
    gain = f"{row['objective']} {row['cost_before']:.4g}{replaced} -> {row['cost_after']:.4g}{cut}"
    return f"optimised: {row['ranks_moved']:,} ranks moved from `{row['start']}`; {gain}"


def _over(value: float, best: float) -> float:
    return value / best - 1 if best else 0.0
