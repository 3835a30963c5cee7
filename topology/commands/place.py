"""`netlayer topology place`: which server runs which ranks, and what each way of placing them costs.

The table goes to stdout, the rows and a `placement-<name>.csv` of each way to the output folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from netlayer.command import RunOptions, open_out, run_options

if TYPE_CHECKING:
    from topology.hashing import HashName
    from topology.placement import Placement, StrategyName

_STRATEGIES = ("given", "random", "packed", "paper", "pipeline-first")
_HASHES = ("random", "crc16", "crc32c", "crc16_bisync", "crc32c_low", "crc32c_high", "xor16", "murmur3")


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
@click.option("--optimise/--no-optimise", default=True, show_default=True, help="Improve the first strategy's result.")
@click.option(
    "--seconds", type=click.FloatRange(min=0), default=10.0, show_default=True, help="Longest search of the optimiser."
)
@click.option("--hash", "hash_name", type=click.Choice(_HASHES), default="crc16", show_default=True, help="ECMP hash.")
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
) -> None:
    """Place the job's ranks on servers and print what each way costs: hops, bytes between pods, collisions.

    Failed servers need spares: --spares N grows the fabric by whole pods and lets the job use N servers of them. The
    optimiser starts from the first strategy and moves ranks around what cannot be used. Exit 2 where there is no room.

    \b
    Examples:
      netlayer topology place --config examples/megascale-12288.toml
      netlayer topology place --config examples/megascale-12288.toml --spares 32 --failed 5,77,400-407 --out placed
    """
    from netlayer.progress import Stages
    from netlayer.results import utc_now
    from topology.clos import Clos
    from topology.commands.keeping import keep, numbers_of
    from topology.placement import num_slots, place_slots, read_csv, usable_servers
    from topology.step import grown, placement_row, slot_flows
    from topology.swaps import improve

    started, config = utc_now(), options.load_config()
    config.check_world()
    cluster, not_ours = grown(config, spares)
    fabric, slots = Clos.build(cluster), num_slots(cluster, config.job.parallel)
    gone = (numbers_of(failed, "--failed"), numbers_of(busy, "--busy"))
    usable = usable_servers(cluster.servers, not_ours, *gone)
    flows = slot_flows(config.job, cluster)
    out = open_out(options.out, "topology-place")
    placements: list[Placement] = []
    for name in cast("tuple[StrategyName, ...]", strategies or _STRATEGIES):
        if name == "given" and file:
            placements.append(read_csv(file, slots, cluster))
        else:
            placements.append(place_slots(name, fabric, config.job.parallel, slots, usable, options.seed))
    if optimise:
        with Stages() as stages, stages.open("optimise") as bar:
            found = improve(fabric, flows, placements[0], usable, seed=options.seed, max_seconds=seconds, progress=bar)
        placements.append(found.placement)
    name_of_hash = cast("HashName", hash_name)
    rows = [placement_row(fabric, flows, placement, name_of_hash, options.seed) for placement in placements]
    for placement, row in zip(placements, rows, strict=True):
        row["unusable_servers"] = int((~usable[placement.server]).sum())
        placement.write_csv(out / f"placement-{placement.name}.csv", cluster.gpus_per_server)
    asked: dict[str, Any] = {"strategy": list(strategies), "from": str(file or ""), "spares": spares}
    asked |= {"failed": list(failed), "busy": list(busy), "hash": hash_name, "optimise": optimise, "seconds": seconds}
    if keep("place", {"placements": rows}, started, options, config, out, **asked):
        _print(rows, hash_name, options.seed)
        click.echo(f"placements: {out}/placement-*.csv", err=True)


def _print(rows: list[dict[str, Any]], hash_name: str, seed: int) -> None:
    from topology.plain import print_rows

    columns = {
        "placement": "placement",
        "mean_hops": "hops",
        "cross_tor_bytes": "between ToRs",
        "cross_pod_ring_bytes": "rings between pods",
        "cross_pod_pipeline_bytes": "pipeline between pods",
        "ring_collision_share": "ring flows colliding",
        "pipeline_collision_share": "pipeline flows colliding",
        "pipeline_excess": "pipeline excess",
        "time_s": "communication",
        "unusable_servers": "on lost servers",
    }
    print_rows(f"Placements, bytes a step, {hash_name}, seed {seed} (simulated)", rows, columns)
