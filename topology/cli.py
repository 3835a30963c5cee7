"""`netlayer topology`: the fabric of a cluster file, and the collisions of a job's flows on it.

Tables go to stdout, log to stderr, the record to the output folder. Left out: reports with pictures.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from netlayer.command import RunOptions, open_out, run_options

if TYPE_CHECKING:  # `--help` needs neither numpy nor pydantic
    from collections.abc import Sequence

    from netlayer.config import Config
    from netlayer.results import RunRecord, Source
    from topology.compare import TrafficName
    from topology.hashing import HashName

    Rows = list[dict[str, Any]]

_HASHES = ("random", "crc16", "crc32c")
_TRAFFICS = ("ring", "pipeline", "permutation")


@click.group()
def topology() -> None:
    """The CLOS fabric: describe it, hash a job's flows over it."""


@topology.command()
@run_options
def describe(options: RunOptions) -> None:
    """Count switches, ports, links and hops of the fabric, level by level.

    Exit 2 where a switch would need more ports than it has.

    \b
    Examples:
      netlayer topology describe --config examples/megascale-12288.toml
      netlayer topology describe --config examples/megascale-12288.toml --set cluster.aoc_split=false --json -
    """
    from netlayer.results import utc_now
    from topology import tables
    from topology.clos import Clos

    started, config = utc_now(), options.load_config()
    fabric = Clos.build(config.cluster)
    out = open_out(options.out, "topology-describe")
    levels, summary = fabric.describe(), fabric.summary()
    rows = [*({"table": "level", **row} for row in levels), {"table": "fabric", **summary}]
    record = _record("describe", "predicted", rows, started, options, config)
    if _keep(record, out, options.json_file):
        tables.print_fabric(config.cluster.name, levels, summary)


@topology.command()
@click.option(
    "--seeds", type=click.IntRange(min=1), default=10, show_default=True, help="Seeds to average, from --seed."
)
@click.option(
    "--hash", "hashes", type=click.Choice(_HASHES), multiple=True, help="Hash to run; repeatable [default: all]."
)
@click.option(
    "--traffic",
    "traffics",
    type=click.Choice(_TRAFFICS),
    multiple=True,
    help="Flows to hash; repeatable [default: all].",
)
@click.option("--qps", type=click.IntRange(min=1), default=1, show_default=True, help="Queue pairs a connection.")
@run_options
def ecmp(options: RunOptions, seeds: int, hashes: tuple[str, ...], traffics: tuple[str, ...], qps: int) -> None:
    """Hash flows over the fabric, with and without the ToR split: links, load and collisions of every tier.

    A collision is a flow on a link whose hashed demand exceeds its capacity; its size is the excess (demand above
    capacity over total demand). `ring` and `pipeline` are the job's own flows, `permutation` has every NIC send at full
    rate to a NIC under another ToR. Exit 2 where no flow can cross the fabric.

    \b
    Examples:
      netlayer topology ecmp --config examples/megascale-12288.toml
      netlayer topology ecmp --config examples/megascale-12288.toml --hash crc16 --traffic permutation --json ecmp.json
    """
    from netlayer.results import utc_now
    from topology import tables
    from topology.compare import compare_split

    started, config = utc_now(), options.load_config()
    hash_names = cast("Sequence[HashName]", hashes or _HASHES)
    traffic_names = cast("Sequence[TrafficName]", traffics or _TRAFFICS)
    out = open_out(options.out, "topology-ecmp")
    seed_range = range(options.seed, options.seed + seeds)
    rows = compare_split(config, seeds=seed_range, hashes=hash_names, traffics=traffic_names, qps_per_connection=qps)
    timings = _time_stages(config, hash_names[0], options.seed, qps)
    tagged = [*({"table": "collisions", **row} for row in rows), *({"table": "timing", **row} for row in timings)]
    asked = {"seeds": seeds, "hash": list(hash_names), "traffic": list(traffic_names), "qps": qps}
    record = _record("ecmp", "simulated", tagged, started, options, config, **asked)
    if _keep(record, out, options.json_file):
        tables.print_collisions(rows, split=config.cluster.aoc_split, seeds=seeds)
        tables.print_split(rows)
        tables.print_timings(timings)


def _time_stages(config: Config, hash_name: HashName, seed: int, qps: int) -> Rows:
    """Seconds to build the fabric, derive the job's flows, hash them all, and load every link."""
    from topology.clos import Clos
    from topology.hashing import Ecmp
    from topology.load import place
    from topology.routing import route
    from topology.traffic import headers, job_flows

    rows: Rows = []
    with _timed(rows, "build") as row:
        fabric = Clos.build(config.cluster)
        row["items"] = fabric.num_links
    with _timed(rows, "flows") as row:
        flows = job_flows(config.job, config.cluster, qps_per_connection=qps)
        row["items"] = len(flows)
    with _timed(rows, "hash") as row:
        paths = route(fabric, flows.src_nic, flows.dst_nic, Ecmp(hash_name, headers(fabric, flows, seed), seed))
        row["items"] = len(flows)
    with _timed(rows, "load") as row:
        row["items"] = place(fabric, flows, paths).collisions().num_links
    return rows


@contextmanager
def _timed(rows: Rows, stage: str) -> Iterator[dict[str, Any]]:
    row: dict[str, Any] = {"stage": stage}
    start = time.perf_counter()
    yield row
    row["time_s"] = time.perf_counter() - start
    rows.append(row)


def _record(
    name: str, source: Source, rows: Rows, started: str, options: RunOptions, config: Config, **arguments: Any
) -> RunRecord:
    from netlayer.environ import snapshot
    from netlayer.results import RunRecord, utc_now

    return RunRecord(
        name=f"topology.{name}",
        source=source,
        rows=rows,
        started_utc=started,
        ended_utc=utc_now(),
        arguments={**options.arguments(), **arguments},
        config=config.model_dump(mode="json"),
        environment=snapshot(options.seed),
    )


def _keep(record: RunRecord, out: Path, json_file: Path | None) -> bool:
    """Write the record where it was asked for; False where stdout already holds it, and no table may follow."""
    from netlayer.results import write_text

    path = record.save(out / "records")
    click.echo(f"record: {path}", err=True)
    if json_file:
        write_text(json_file, record.to_json())
    return str(json_file) != "-"
