"""`netlayer topology whatif`: what failures cost, and what would cure collisions.

Tables go to stdout, progress to stderr; rows and plans (CSV, JSON, parquet) to the output folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from netlayer.command import RunOptions, open_out, run_options
from netlayer.errors import ConfigError

if TYPE_CHECKING:
    from netlayer.config import Config
    from topology.clos import Clos
    from topology.failures import Failure, FailureKind
    from topology.hashing import HashName
    from topology.placement import StrategyName

    Rows = list[dict[str, Any]]

_KINDS = ("nic-link", "tor-link", "core-link", "optic-down", "optic-up", "tor", "spine", "core", "rail")
_STRATEGIES = ("given", "random", "packed", "paper", "pipeline-first")
_HASHES = ("random", "crc16", "crc32c", "crc16_bisync", "crc32c_low", "crc32c_high", "xor16", "murmur3")
_SAMPLE = 24


@click.command("whatif")
@click.option(
    "--fail",
    "kinds",
    type=click.Choice(_KINDS),
    multiple=True,
    help="Kind of part that fails; repeatable [default: all].",
)
@click.option("--part", "parts", multiple=True, metavar="KIND:N", help="These parts, together: spine:3; repeatable.")
@click.option(
    "--sample", type=click.IntRange(min=0), default=_SAMPLE, show_default=True, help="Parts tried a kind; 0: every one."
)
@click.option(
    "--together", type=click.IntRange(min=1), default=1, show_default=True, help="Random parts that fail at one time."
)
@click.option("--seeds", type=click.IntRange(min=1), default=1, show_default=True, help="Seeds, from --seed.")
@click.option(
    "--placement", "placements", type=click.Choice(_STRATEGIES), multiple=True, help="Repeatable [default: given]."
)
@click.option("--hash", "hash_name", type=click.Choice(_HASHES), default="crc16", show_default=True, help="ECMP hash.")
@click.option("--qps", type=click.IntRange(min=1), default=1, show_default=True, help="Queue pairs a connection.")
@click.option(
    "--cure", type=click.Choice(("ports", "knobs")), help="Instead: plan UDP ports, or search seeds, offsets and QPs."
)
@click.option("--processes", type=click.IntRange(min=1), help="Workers here [default: a core each].")
@click.option("--dask", metavar="tcp://HOST:PORT", help="Run on the workers of this Dask scheduler.")
@run_options
def command(
    options: RunOptions,
    kinds: tuple[str, ...],
    parts: tuple[str, ...],
    sample: int,
    together: int,
    seeds: int,
    placements: tuple[str, ...],
    hash_name: str,
    qps: int,
    cure: str | None,
    processes: int | None,
    dask: str | None,
) -> None:
    """Let parts fail and see the cost: bandwidth lost, pairs cut off, how much slower the job's communication gets.

    ECMP groups shrink to the members that still lead to the destination. `slowdown` compares the step's communication
    (each phase until its slowest flow is done, at max-min fair rates) with the whole fabric's, same seed; flows that
    have no path left stop the job, and are counted. --cure looks for what lowers collisions instead: `ports` writes a
    plan of UDP source ports, one a queue pair.

    \b
    Examples:
      netlayer topology whatif --config examples/megascale-12288.toml --fail spine --sample 0
      netlayer topology whatif --config examples/megascale-12288.toml --fail tor-link --together 64 --seeds 8
      netlayer topology whatif --config examples/megascale-12288.toml --part tor:0 --part core:5
      netlayer topology whatif --config examples/megascale-12288.toml --cure ports --out plan
    """
    from netlayer.results import utc_now
    from topology.clos import Clos
    from topology.commands.keeping import keep
    from topology.compare import check_crossed

    started, config = utc_now(), options.load_config()
    config.check_world()
    fabric = Clos.build(config.cluster)
    check_crossed(fabric)
    out = open_out(options.out, "topology-whatif")
    places = cast("tuple[StrategyName, ...]", placements or ("given",))
    name = cast("HashName", hash_name)
    if cure:
        tables = _cure(cure, config, fabric, places[0], name, options.seed, qps, seeds, out)
    else:
        failures = _failures(fabric, kinds, parts, sample, together, options.seed)
        points = (range(options.seed, options.seed + seeds), places, failures, name, qps)
        tables = _sweep(config, points, processes, dask)
    asked: dict[str, Any] = {"fail": list(kinds), "part": list(parts), "sample": sample, "together": together}
    asked |= {
        "seeds": seeds,
        "placement": list(places),
        "hash": hash_name,
        "qps": qps,
        "cure": cure,
        "dask": dask or "",
    }
    if keep("whatif", tables, started, options, config, out, **asked):
        _print(tables, hash_name)


def _failures(
    fabric: Clos, kinds: tuple[str, ...], parts: tuple[str, ...], sample: int, together: int, seed: int
) -> list[tuple[Failure, ...]]:
    from topology.failures import count, parse_failure, random_failures, single_failures

    if parts:
        return [tuple(parse_failure(part, fabric) for part in parts)]
    chosen = cast("tuple[FailureKind, ...]", kinds or tuple(kind for kind in _KINDS if count(fabric, cast(Any, kind))))
    if together > 1:
        return [random_failures(fabric, chosen, together, seed + draw) for draw in range(sample or _SAMPLE)]
    found: list[tuple[Failure, ...]] = [
        (one,) for kind in chosen for one in single_failures(fabric, kind, sample or None, seed)
    ]
    if not found:
        raise ConfigError("--fail", ", ".join(chosen), "this fabric has none", "take another kind, or three tiers")
    return found


def _sweep(config: Config, points: Any, processes: int | None, dask: str | None) -> dict[str, Rows]:
    from netlayer.progress import Stages
    from topology.sweep import cases, run_sweep, worst

    with Stages() as stages, stages.open("failures") as bar:
        rows = run_sweep(config, cases(*points), processes=processes, dask=dask, progress=bar)
    return {"failures": rows, "worst": worst(rows)}


def _cure(
    cure: str,
    config: Config,
    fabric: Clos,
    strategy: StrategyName,
    name: HashName,
    seed: int,
    qps: int,
    seeds: int,
    out: Path,
) -> dict[str, Rows]:
    from netlayer.progress import Stages
    from topology.placement import num_slots, place_slots, usable_servers
    from topology.search import plan_ports, plan_summary, search_knobs, write_plan
    from topology.step import PHASES, slot_flows

    slots, usable = num_slots(config.cluster, config.job.parallel), usable_servers(config.cluster.servers)
    placement = place_slots(strategy, fabric, config.job.parallel, slots, usable, seed)
    with Stages() as stages:
        if cure == "knobs":
            with stages.open("search") as bar:
                found = search_knobs(
                    fabric,
                    lambda pairs: slot_flows(config.job, config.cluster, pairs),
                    placement,
                    name,
                    seeds=range(seed, seed + seeds),
                    progress=bar,
                )
            return {"knobs": found}
        flows = placement.apply(slot_flows(config.job, config.cluster, qps), config.cluster.nics_per_server)
        rows: Rows = []
        for phase, kinds, _ in PHASES:
            chosen = flows.select(*kinds)
            if len(chosen):
                with stages.open(phase) as bar:
                    plan = plan_ports(fabric, chosen, name, seed, progress=bar)
                rows.append({"phase": phase, **plan_summary(plan), "plan": f"ports-{phase}.csv"})
                write_plan(plan, out / f"ports-{phase}.csv")
    return {"ports": rows}


def _print(tables: dict[str, Rows], hash_name: str) -> None:
    from topology.plain import print_rows

    for table, rows in tables.items():
        if table in _SHOWN:
            title, columns, note = _SHOWN[table]
            print_rows(f"{title}, {hash_name} (simulated)", rows[:_SAMPLE], columns, note)


_SHOWN: dict[str, tuple[str, dict[str, str], str]] = {
    "worst": (
        "Failures, the worst of each kind",
        {
            "placement": "placement",
            "kind": "fails",
            "cases": "cases",
            "lost_bps_max": "capacity lost",
            "lost_share_max": "of a tier",
            "unreachable_share_max": "pairs cut off",
            "stopped_flows_max": "flows stopped",
            "stops_share": "cases that stop the job",
            "slowdown_max": "worst slowdown",
            "slowdown_mean": "mean",
            "worst": "worst case",
        },
        "slowdown: communication of a step, of flows that still have a path, over the same seed's without failures",
    ),
    "knobs": (
        "Seeds, offsets and queue pairs, best first",
        {
            "seed": "seed",
            "offsets": "offsets",
            "qps": "queue pairs",
            "ring_excess": "ring excess",
            "pipeline_collision_share": "pipeline colliding",
            "pipeline_excess": "pipeline excess",
            "pipeline_core_links_used": "core links used",
            "time_s": "communication",
        },
        "",
    ),
    "ports": (
        "UDP source ports, planned",
        {
            "phase": "phase",
            "queue_pairs": "queue pairs",
            "changed": "to change",
            "collision_share_before": "colliding before",
            "collision_share_after": "after",
            "excess_before": "excess before",
            "excess_after": "after",
            "max_utilisation_before": "fullest before",
            "max_utilisation_after": "after",
            "plan": "plan",
        },
        "holds for this hash, these seeds and this fabric; read them off the switches before applying the plan",
    ),
}
