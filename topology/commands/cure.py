"""`netlayer topology cure`: what lowers collisions: a plan of UDP source ports, or switch seeds, offsets, queue pairs.

Tables go to stdout, progress to stderr; rows and plans (CSV, JSON, parquet) to the output folder.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

import click

from netlayer.command import RunOptions, run_options

if TYPE_CHECKING:
    from netlayer.config.tree import Config
    from topology.ecmp.hashing import HashName
    from topology.fabric.clos import Clos
    from topology.placement.strategies import Placement, StrategyName

_STRATEGIES = ("given", "random", "packed", "paper", "pipeline-first")
_HASHES = ("random", "crc16", "crc32c", "crc16_bisync", "crc32c_low", "crc32c_high", "xor16", "murmur3")
_TRAFFICS = ("ring", "pipeline", "permutation")
_OPTIONS = (
    click.option("--hash", "hash_name", type=click.Choice(_HASHES), default="crc16", show_default=True),
    click.option("--placement", type=click.Choice(_STRATEGIES), default="given", show_default=True),
)


def _shared(command: Callable[..., None]) -> Callable[..., None]:
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


@click.group(name="cure")
def command() -> None:
    """Search what lowers collisions."""


@command.command()
@click.option(
    "--traffic",
    "traffics",
    type=click.Choice(_TRAFFICS),
    multiple=True,
    help="Flows to plan for; repeatable [default: ring, pipeline].",
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
def ports(options: RunOptions, traffics: tuple[str, ...], qps: int, hash_name: str, placement: str) -> None:
    """Plan a UDP source port for every queue pair against the switches' hash.

    Writes ports-<traffic>.csv and .json: rank, server and device of both ends, the port now and planned. The plan holds
    for this hash, these seeds and this fabric: read them off the switches before applying it.

    \b
    Example:
      netlayer topology cure ports --config examples/megascale-12288.toml --hash crc16 --out plan
    """
    from netlayer.output import open_output
    from netlayer.progress import Stages
    from netlayer.results import utc_now
    from topology.commands.records import keep, load_cluster, refuse_without_effect, was_given
    from topology.ecmp.compare import traffic_flows
    from topology.ecmp.port_table import port_table
    from topology.ecmp.search import plan_ports, plan_summary

    traffics = tuple(dict.fromkeys(traffics)) or _TRAFFICS[:2]
    alone = traffics == ("permutation",)
    refuse_without_effect([("--placement", was_given("placement") and alone, "on permutation traffic")])
    started, config = utc_now(), load_cluster(options)
    fabric, placed = _begin(config, placement, options.seed)
    name, place = cast("HashName", hash_name), cast("StrategyName", placement)
    rows: list[dict[str, Any]] = []
    with open_output(options.out, "topology-cure-ports") as out, Stages() as stages:
        for traffic in traffics:
            flows = traffic_flows(config, fabric, traffic, options.seed, qps, placement=place)
            if not len(flows):
                click.echo(f"{traffic}: the job has no such flows", err=True)
                continue
            with stages.open(traffic) as bar:
                plan = plan_ports(fabric, flows, name, options.seed, progress=bar)
            table = port_table(plan, fabric, config.cluster, placed)
            table.to_csv(out.part / f"ports-{traffic}.csv", index=False)
            table.to_json(out.part / f"ports-{traffic}.json", orient="records", indent=1)
            summary = {"hash": name, "seed": options.seed, **plan_summary(plan)}
            rows.append({"traffic": traffic, **summary, "plan": f"ports-{traffic}.csv"})
        arguments: dict[str, Any] = {"traffic": traffics, "qps": qps, "hash": hash_name, "placement": placement}
        prints_tables = keep(
            "cure.ports", {"ports": rows}, out, started, options, config, source="simulated", **arguments
        )
    if prints_tables:
        _print_ports(rows, hash_name)


@command.command()
@click.option("--seeds", type=click.IntRange(min=1), default=1, show_default=True, help="Switch seeds, from --seed.")
@_shared
@run_options
def knobs(options: RunOptions, seeds: int, hash_name: str, placement: str) -> None:
    """Try switch seeds, an offset a stage and queue pairs a connection on a grid; least excess first.

    \b
    Example:
      netlayer topology cure knobs --config examples/megascale-12288.toml --seeds 4 --out knobs
    """
    from netlayer.output import open_output
    from netlayer.progress import Stages
    from netlayer.results import utc_now
    from topology.commands.records import keep, load_cluster
    from topology.ecmp.search import search_knobs
    from topology.traffic.step import slot_flows

    started, config = utc_now(), load_cluster(options)
    fabric, placed = _begin(config, placement, options.seed)
    with open_output(options.out, "topology-cure-knobs") as out:
        with Stages() as stages, stages.open("search") as bar:
            rows = search_knobs(
                fabric,
                lambda qps: slot_flows(config.job, config.cluster, qps),
                placed,
                cast("HashName", hash_name),
                seeds=range(options.seed, options.seed + seeds),
                progress=bar,
            )
        arguments: dict[str, Any] = {"seeds": seeds, "hash": hash_name, "placement": placement}
        prints_tables = keep(
            "cure.knobs", {"knobs": rows}, out, started, options, config, source="simulated", **arguments
        )
    if prints_tables:
        _print_knobs(rows, hash_name)


def _begin(config: Config, placement: str, seed: int) -> tuple[Clos, Placement]:
    from topology.ecmp.compare import check_crossed
    from topology.fabric.clos import Clos
    from topology.placement.strategies import num_slots, place_slots, usable_servers

    config.check_world()
    fabric = Clos.build(config.cluster)
    check_crossed(fabric)
    slots, usable = num_slots(config.cluster, config.job.parallel), usable_servers(config.cluster.servers)
    return fabric, place_slots(cast("StrategyName", placement), fabric, config.job.parallel, slots, usable, seed)


def _print_ports(rows: list[dict[str, Any]], hash_name: str) -> None:
    from netlayer.printing import print_rows

    columns = {
        "traffic": "traffic",
        "queue_pairs": "queue pairs",
        "changed": "to change",
        "collision_share_before": "colliding before",
        "collision_share_after": "after",
        "excess_before": "excess before",
        "excess_after": "after",
        "max_utilisation_before": "fullest before",
        "max_utilisation_after": "after",
        "plan": "plan",
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
        "time_bound_s": "communication, at most",
    }
    print_rows(f"Seeds, offsets and queue pairs, best first, {hash_name} (simulated)", rows, columns)
