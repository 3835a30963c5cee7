"""`netlayer topology optimize`: ECMP plans: UDP source ports, or switch seeds, offsets and queue pairs, against
collisions.

Tables go to stdout, progress to stderr; rows and plans (CSV, JSON, parquet) to the output folder.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from netlayer.command import RunOptions, run_options
from topology.commands.fabrics import fabric_option

if TYPE_CHECKING:
    from topology.commands.fabrics import World
    from topology.ecmp.hashing import HashName
    from topology.placement.strategies import Placement, StrategyName

_STRATEGIES = ("given", "random", "packed", "paper", "pipeline-first")
_HASHES = ("random", "crc16", "crc32c", "crc16_bisync", "crc32c_low", "crc32c_high", "xor16", "murmur3")
_TRAFFICS = ("ring", "pipeline", "permutation")
_OPTIONS = (
    click.option("--hash", "hash_name", type=click.Choice(_HASHES), default="crc16", show_default=True),
    click.option("--placement", type=click.Choice(_STRATEGIES), default="given", show_default=True),
    fabric_option,
)


def _shared(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.group(name="optimize")
def command() -> None:
    """Search what lowers collisions."""


@command.command()
@click.option(
    "--traffic",
    "traffics",
    type=click.Choice(_TRAFFICS),
    multiple=True,
    help="Flows to plan for; repeatable [default: ring, pipeline; without a job permutation].",
)
@click.option(
    "--qps",
    type=click.IntRange(min=1),
    default=1,
    show_default=True,
    help="Queue pairs a connection, or a pair of NICs.",
)
@_shared
@run_options
def ports(
    options: RunOptions,
    traffics: tuple[str, ...],
    qps: int,
    hash_name: str,
    placement: str,
    fabric_file: Path | None,
) -> None:
    """Plan a UDP source port for every queue pair against the switches' hash.

    Writes ports-<traffic>.csv and .json: rank, server and device of both ends, the port now and planned. The plan holds
    for this hash, these seeds and this fabric: read them off the switches before applying it. On an imported fabric
    without a job (--config) ranks are -1.

    \b
    Examples:
      netlayer topology optimize ports --config examples/megascale-12288.toml --hash crc16 --out plan
      netlayer topology optimize ports --fabric fabric/fabric.graphml --hash crc16 --out plan
    """
    from netlayer.output import open_output
    from netlayer.progress import Stages
    from netlayer.results import utc_now
    from topology.commands.fabrics import open_world
    from topology.commands.records import keep, refuse_without_effect, was_given
    from topology.ecmp.compare import traffic_flows
    from topology.ecmp.port_table import port_table
    from topology.ecmp.search import plan_ports, plan_summary

    traffics = tuple(dict.fromkeys(traffics))
    placed_traffic = traffics != ("permutation",)
    refuse_without_effect([("--placement", was_given("placement") and not placed_traffic, "on permutation traffic")])
    started, world = utc_now(), open_world(options, fabric_file)
    if world.config is None:
        refuse_without_effect([("--placement", was_given("placement"), "without a job: give --config")])
    traffics = traffics or (_TRAFFICS[:2] if world.config is not None else _TRAFFICS[2:])
    if traffics != ("permutation",):
        world.job_config(f"{', '.join(traffics)} traffic")
    fabric, placed = world.fabric, _placed(world, placement, options.seed)
    name, place = cast("HashName", hash_name), cast("StrategyName", placement)
    rows: list[dict[str, Any]] = []
    with open_output(options.out, "topology-optimize-ports") as out, Stages() as stages:
        for traffic in traffics:
            flows = traffic_flows(world.config, fabric, traffic, options.seed, qps, placement=place)
            if not len(flows):
                click.echo(f"{traffic}: the job has no such flows", err=True)
                continue
            with stages.open(traffic) as bar:
                plan = plan_ports(fabric, flows, name, options.seed, progress=bar)
            table = port_table(plan, fabric, world.config.cluster if world.config else None, placed)
            table.to_csv(out.part / f"ports-{traffic}.csv", index=False)
            table.to_json(out.part / f"ports-{traffic}.json", orient="records", indent=1)
            summary = {"hash": name, "seed": options.seed, **plan_summary(plan)}
            rows.append({"traffic": traffic, **summary, "plan": f"ports-{traffic}.csv"})
        arguments: dict[str, Any] = {"traffic": traffics, "qps": qps, "hash": hash_name, "placement": placement}
        arguments |= {"fabric": fabric_file} if fabric_file is not None else {}
        prints_tables = keep(
            "optimize.ports", {"ports": rows}, out, started, options, world.config, source="simulated", **arguments
        )
    if prints_tables:
        _print_ports(rows, hash_name)


@command.command()
@click.option("--seeds", type=click.IntRange(min=1), default=1, show_default=True, help="Switch seeds, from --seed.")
@_shared
@run_options
def knobs(options: RunOptions, seeds: int, hash_name: str, placement: str, fabric_file: Path | None) -> None:
    """Try switch seeds, an offset a stage and queue pairs a connection on a grid; least excess first.

    The flows are the job's, or on an imported fabric without one (--config) a random permutation.

    \b
    Examples:
      netlayer topology optimize knobs --config examples/megascale-12288.toml --seeds 4 --out knobs
      netlayer topology optimize knobs --config my-job.toml --fabric fabric/fabric.graphml
    """
    from netlayer.output import open_output
    from netlayer.progress import Stages
    from netlayer.results import utc_now
    from topology.commands.fabrics import open_world
    from topology.commands.records import keep, refuse_without_effect, was_given
    from topology.ecmp.search import search_knobs
    from topology.traffic.job import Flows, permutation
    from topology.traffic.step import slot_flows

    started, world = utc_now(), open_world(options, fabric_file)
    fabric, config, placed = world.fabric, world.config, _placed(world, placement, options.seed)
    refuse_without_effect([("--placement", was_given("placement") and config is None, "without a job: give --config")])

    def flows_of(pairs: int) -> Flows:
        if config is None:
            return permutation(fabric, options.seed, pairs)
        return slot_flows(config.job, config.cluster, pairs)

    with open_output(options.out, "topology-optimize-knobs") as out:
        with Stages() as stages, stages.open("search") as bar:
            rows = search_knobs(
                fabric,
                flows_of,
                placed,
                cast("HashName", hash_name),
                seeds=range(options.seed, options.seed + seeds),
                progress=bar,
            )
        arguments: dict[str, Any] = {"seeds": seeds, "hash": hash_name, "placement": placement}
        arguments |= {"fabric": fabric_file} if fabric_file is not None else {}
        prints_tables = keep(
            "optimize.knobs", {"knobs": rows}, out, started, options, config, source="simulated", **arguments
        )
    if prints_tables:
        _print_knobs(rows, hash_name)


def _placed(world: World, placement: str, seed: int) -> Placement | None:
    """Return the placement of the job's slots; None without a job."""
    from topology.placement.strategies import num_slots, place_slots

    fabric, config = world
    if config is None:
        return None
    slots, parallel = num_slots(config.cluster, config.job.parallel), config.job.parallel
    return place_slots(cast("StrategyName", placement), fabric, parallel, slots, fabric.full_servers, seed)


def _print_ports(rows: list[dict[str, Any]], hash_name: str) -> None:
    """Print a row a traffic pattern: queue pairs, ports to change, collisions without and with the plan, its CSV file.

    Excess is the demand above the links' capacity, as a share of all demand.
    """
    from netlayer.printing import print_rows

    columns = {
        "traffic": "traffic",
        "queue_pairs": "queue pairs",
        "changed": "to change",
        "collision_share_before": "colliding before",
        "collision_share_after": "after",
        "excess_before": "excess demand before",
        "excess_after": "after",
        "max_utilisation_before": "fullest before",
        "max_utilisation_after": "after",
        "plan": "plan file",
    }
    note = "holds for this hash, these seeds and this fabric; read them off the switches before applying the plan"
    print_rows(f"UDP source ports, planned, {hash_name} (simulated)", rows, columns, note)


def _print_knobs(rows: list[dict[str, Any]], hash_name: str) -> None:
    from netlayer.printing import print_rows

    columns = {
        "seed": "seed",
        "offset_bits": "offset a stage",
        "qps": "queue pairs",
        "excess": "excess",
        "ring_excess": "ring excess",
        "pipeline_collision_share": "pipeline colliding",
        "pipeline_excess": "pipeline excess",
        "pipeline_core_links_used": "core links used",
        "permutation_collision_share": "colliding",
        "permutation_core_links_used": "core links used",
        "time_bound_s": "communication, at most",
    }
    print_rows(f"Seeds, offsets and queue pairs, best first, {hash_name} (simulated)", rows, columns)
