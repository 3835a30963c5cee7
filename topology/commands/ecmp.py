"""`netlayer topology ecmp`: a job's flows, or a file's, over the fabric: load, collisions, slowdown, bottlenecks."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import click

from netlayer.command import RunOptions, open_out, run_options

if TYPE_CHECKING:  # `--help` needs neither numpy nor pydantic
    from collections.abc import Sequence

    from topology.balance import BalanceName
    from topology.compare import TrafficName
    from topology.hashing import Field

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
@click.option("--qps", type=_COUNT, default=1, show_default=True, help="Queue pairs a connection.")
@click.option("--channels", type=_COUNT, help="NCCL channels of a group [default: one a NIC, tree two].")
@click.option(
    "--field",
    "fields",
    type=click.Choice(_FIELDS),
    multiple=True,
    help="Header field that a hash takes; repeatable; dst_qpn is E-ECMP [default: the 5-tuple].",
)
@run_options
def command(options: RunOptions, **given: Any) -> None:
    """Hash flows over the fabric, with and without the ToR split: links, load, collisions and slowdown of every tier.

    A collision is a flow on a link whose hashed demand exceeds its capacity; its size is the excess (demand above
    capacity over total demand). Slowdown is the rate over NICs alone over the max-min fair rate. `ring`, `tree`,
    `pipeline` and `all_to_all` are the job's own flows, `permutation` has every NIC send at full rate to a NIC under
    another ToR. --flows reads CSV or parquet (src, dst, bytes, start), HPCC's flow.txt, htsim's .cm. Exit 2 where no
    flow can cross the fabric, or a flow names a host that it has not.

    \b
    Examples:
      netlayer topology ecmp --config examples/megascale-12288.toml
      netlayer topology ecmp --config examples/megascale-12288.toml --hash crc16 --hash spray --traffic permutation
      netlayer topology ecmp --config examples/megascale-12288.toml --flows flows.csv --json ecmp.json
    """
    from netlayer.results import utc_now
    from topology.clos import Clos
    from topology.commands import tables
    from topology.commands.records import keep_record, make_record
    from topology.compare import USUAL_HASHES, USUAL_TRAFFICS, compare_split
    from topology.flow_files import read_flows
    from topology.hashing import FIVE_TUPLE
    from topology.passes import Pass, one_pass

    started, config = utc_now(), options.load_config()
    hashes = cast("Sequence[BalanceName]", given["hashes"] or USUAL_HASHES)
    traffics = cast("Sequence[TrafficName]", given["traffics"] or USUAL_TRAFFICS)
    fields = cast("Sequence[Field]", given["fields"] or FIVE_TUPLE)
    seeds, qps, channels, file = (given[name] for name in ("seeds", "qps", "channels", "flows_file"))
    flows = read_flows(file, Clos.build(config.cluster)) if file else None
    out = open_out(options.out, "topology-ecmp")
    rows = compare_split(
        config,
        seeds=range(options.seed, options.seed + seeds),
        hashes=hashes,
        traffics=traffics,
        qps_per_connection=qps,
        num_channels=channels,
        fields=fields,
        flows=flows,
    )
    passes = [
        one_pass(Pass(config, hashes[0], name, options.seed, qps, channels, tuple(fields), flows))
        for name in (("file",) if file else traffics)
    ]
    tagged = [{"table": "collisions", **row} for row in rows] + [row for one in passes for row in one.tagged_rows()]
    lists = {"hash": list(hashes), "traffic": list(traffics), "field": list(fields)}
    numbers = {"seeds": seeds, "qps": qps, "channels": channels, "flows": str(file or "")}
    record = make_record("ecmp", "simulated", tagged, started, options, config, **lists, **numbers)
    if keep_record(record, out, options.json_file):
        tables.print_collisions(rows, split=config.cluster.aoc_split, seeds=seeds)
        tables.print_slowdowns(rows, split=config.cluster.aoc_split)
        tables.print_split(rows)
        for one in passes:
            tables.print_pass(one)
