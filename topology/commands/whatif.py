"""`netlayer topology whatif`: what failures cost.

Tables go to stdout, progress to stderr; the rows (CSV, parquet) and the record to the output folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from netlayer.command import RunOptions, run_options
from netlayer.errors import ConfigError
from topology.commands.fabrics import fabric_option

if TYPE_CHECKING:
    from topology.commands.fabrics import World
    from topology.ecmp.hashing import HashName
    from topology.fabric.interface import Fabric
    from topology.failures.faults import Failure, FailureKind
    from topology.placement.strategies import StrategyName

    Rows = list[dict[str, Any]]

_KINDS = ("nic-link", "tor-link", "core-link", "optic-down", "optic-up", "tor", "spine", "core", "rail", "peer-link")
_STRATEGIES = ("given", "random", "packed", "paper", "pipeline-first")
_HASHES = ("random", "crc16", "crc32c", "crc16_bisync", "crc32c_low", "crc32c_high", "xor16", "murmur3")
_SAMPLE = 24
_COUNT = click.IntRange(min=1)


@click.command("whatif")
@click.option(
    "--fail",
    "kinds",
    type=click.Choice(_KINDS),
    multiple=True,
    help="Kind of part that fails; repeatable [default: all].",
)
@click.option(
    "--part",
    "parts",
    multiple=True,
    metavar="KIND:N",
    help="These parts, together: spine:3, on imported fabrics also a switch's name or a cable's ends A,B; repeatable.",
)
@click.option("--sample", type=click.IntRange(min=0), default=_SAMPLE, show_default=True, help="Draws; 0: every part.")
@click.option("--together", type=_COUNT, default=1, show_default=True, help="Random parts that fail at one time.")
@click.option("--seeds", type=_COUNT, default=3, show_default=True, help="Seeds, from --seed.")
@click.option(
    "--placement", "placements", type=click.Choice(_STRATEGIES), multiple=True, help="Repeatable [default: given]."
)
@click.option("--hash", "hash_name", type=click.Choice(_HASHES), default="crc16", show_default=True, help="ECMP hash.")
@click.option("--qps", type=_COUNT, default=1, show_default=True, help="Queue pairs a connection.")
@click.option("--processes", type=_COUNT, help="Workers here [default: a core each].")
@click.option("--dask", metavar="tcp://HOST:PORT", help="Run on the workers of this Dask scheduler.")
@fabric_option
@click.option(
    "--flows",
    "flows_file",
    type=click.Path(path_type=Path),
    help="On an imported fabric: flows of a file, as `ecmp` reads them [default: the job's, else a permutation].",
)
@run_options
def command(options: RunOptions, **params: Any) -> None:
    """Let parts fail and see the cost: bandwidth lost, pairs cut off, how much slower the job's communication gets.

    ECMP groups shrink to the members that still lead to the destination. `slowdown` compares the step's communication
    (each phase until its slowest flow is done, at max-min fair rates) with the whole fabric's, same seed; a flow that
    has no path left stops the job: such cases are counted, and have no slowdown. --sample parts of each kind are tried,
    one at a time; with --together N this many draws of N parts. See `optimize` for ECMP plans. On an imported
    fabric heights over the hosts are taken for tiers, and optics are omitted, for no format names them.

    \b
    Examples:
      netlayer topology whatif --config examples/megascale-12288.toml --fail spine --sample 0
      netlayer topology whatif --config examples/megascale-12288.toml --fail tor-link --together 64 --seeds 8
      netlayer topology whatif --config examples/megascale-12288.toml --part tor:0 --part core:5
      netlayer topology whatif --fabric fabric/fabric.graphml --flows flows.csv --part spine1 --part leaf1,spine2
    """
    from netlayer.output import open_output
    from netlayer.progress import Stages
    from netlayer.results import utc_now
    from topology.commands.fabrics import open_world, read_file_flows
    from topology.commands.records import keep
    from topology.sweep import cases, run_sweep, worst

    _refuse(params)
    started, world = utc_now(), open_world(options, params["fabric_file"])
    _refuse_job(params, world)
    flows = read_file_flows(params["flows_file"], world.fabric) if params["flows_file"] else None
    places = cast("tuple[StrategyName, ...]", tuple(dict.fromkeys(params["placements"])) or ("given",))
    name = cast("HashName", params["hash_name"])
    failures = _failures(
        world.fabric, params["kinds"], params["parts"], params["sample"], params["together"], options.seed
    )
    points = cases(range(options.seed, options.seed + params["seeds"]), places, failures, name, params["qps"])
    with open_output(options.out, "topology-whatif") as out:
        with Stages() as stages, stages.open("failures") as bar:
            rows = run_sweep(
                world.subject(flows), points, processes=params["processes"], dask=params["dask"], progress=bar
            )
        tables = {"failures": rows, "worst": worst(rows)}
        recorded = {name.removesuffix("_file"): value for name, value in params.items()}
        # A run on a cluster file has no such options, so its record stays as it was.
        recorded = {name: value for name, value in recorded.items() if value or name not in ("fabric", "flows")}
        prints_tables = keep("whatif", tables, out, started, options, world.config, source="simulated", **recorded)
    if prints_tables:
        print_worst(tables["worst"], name)


def print_worst(rows: Rows, hash_name: str) -> None:
    """One line a placement and kind of part."""
    from netlayer.printing import print_rows

    columns = {
        "placement": "placement",
        "kind": "fails",
        "cases": "cases",
        "lost_bps_max": "capacity lost",
        "lost_share_max": "of a tier",
        "unreachable_share_max": "pairs cut off",
        "stopped_flows_max": "flows stopped",
        "stops_share": "cases that stop the job",
        "slowdown_min": "least slowdown",
        "slowdown_median": "median",
        "slowdown_mean": "mean",
        "slowdown_max": "worst",
        "flow_slowdown_mean": "mean of all flows",
        "worst": "worst case",
    }
    note = "slowdown: communication of a step over the same seed's without failures, where the job does not stop"
    print_rows(f"Failures, the worst of each kind, {hash_name} (simulated)", rows, columns, note)


def _refuse_job(params: dict[str, Any], world: World) -> None:
    """Refuse what has no effect with a job, or without one."""
    from topology.commands.records import refuse_without_effect

    file, no_job = params["flows_file"] is not None, world.config is None
    refuse_without_effect(
        [
            ("--flows", file and not no_job, "beside a job, which is the traffic"),
            ("--placement", bool(params["placements"]) and no_job, "without a job: give --config"),
        ]
    )


def _refuse(params: dict[str, Any]) -> None:
    from topology.commands.records import refuse_without_effect, was_given

    named, file = bool(params["parts"]), params["flows_file"] is not None
    refuse_without_effect(
        [
            ("--fail", named and bool(params["kinds"]), "beside --part, which names the parts"),
            ("--sample", named and was_given("sample"), "beside --part, which names the parts"),
            ("--together", named and was_given("together"), "beside --part: they fail together"),
            ("--processes", params["processes"] is not None and params["dask"] is not None, "beside --dask"),
            (
                "--flows",
                file and params["fabric_file"] is None,
                "without --fabric: a cluster file's job is its traffic",
            ),
            ("--qps", was_given("qps") and file, "on the flows of a file"),
        ]
    )
    if params["sample"] == 0 and params["together"] > 1:
        rule = f"has no end: sets of {params['together']} parts cannot all be tried"
        raise ConfigError("--sample", 0, rule, "give the number of draws, or --together 1")


def _failures(
    fabric: Fabric, kinds: tuple[str, ...], parts: tuple[str, ...], sample: int, together: int, seed: int
) -> list[tuple[Failure, ...]]:
    from topology.failures.faults import parse_failures, random_failures, single_failures

    if parts:
        return [tuple(failure for part in parts for failure in parse_failures(part, fabric))]
    chosen = cast("tuple[FailureKind, ...]", kinds or tuple(kind for kind in _KINDS if fabric.count(cast(Any, kind))))
    if together > 1:
        return [random_failures(fabric, chosen, together, seed + draw) for draw in range(sample)]
    failures: list[tuple[Failure, ...]] = [
        (one,) for kind in chosen for one in single_failures(fabric, kind, sample or None, seed)
    ]
    if not failures:
        raise ConfigError("--fail", ", ".join(chosen), "this fabric has none", "take another kind, or three tiers")
    return failures
