"""The ToR split against its baseline: the same flows, seeds and hashes on both fabrics, the closed form beside.

The baseline has the same NICs and the same total uplink capacity with uplinks at NIC rate (64 x 200G), against 32 x
400G with the split (MegaScale 3.6, which gives no probability: ours are computed). Left out: other designs.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple, get_args

from netlayer.config import ClusterConfig, Config
from netlayer.errors import ConfigError
from topology.clos import Clos, Tier
from topology.design import Design, plan
from topology.expected import Expected, expected_collisions, expected_load
from topology.hashing import HASHES, Ecmp, HashName
from topology.load import ECMP_TIERS, Collisions, load
from topology.traffic import Flows, Kind, headers, job_flows, permutation

logger = logging.getLogger(__name__)

TrafficName = Literal["ring", "pipeline", "permutation"]
TRAFFICS: tuple[TrafficName, ...] = get_args(TrafficName)
CLOSED_FORM = "closed form"
LOADS = tuple(eighth / 8 for eighth in range(1, 9))
ALL_TIERS = "fabric"

# Flows that run at one time. The all-gather's ring is that of the reduce-scatter: the same pairs on the same queue
# pairs, at another time. Forward and backward of the pipeline overlap in the steady phase of 1F1B.
_PHASES: dict[TrafficName, tuple[Kind, ...]] = {
    "ring": (Kind.DP_REDUCE_SCATTER,),
    "pipeline": (Kind.PP_FORWARD, Kind.PP_BACKWARD),
}


class _Case(NamedTuple):
    """One line of the comparison: `hash_name` is a hash or CLOSED_FORM, `tier` a tier's label or ALL_TIERS."""

    split: bool
    traffic: TrafficName
    hash_name: str
    tier: str


def compare_split(
    config: Config,
    *,
    seeds: Sequence[int] = range(10),
    hashes: Sequence[HashName] = HASHES,
    traffics: Sequence[TrafficName] = TRAFFICS,
    qps_per_connection: int = 1,
) -> list[dict[str, Any]]:
    """Collisions with and without the ToR split: one row for each split, traffic, hash (or closed form) and tier.

    Rows hold JSON values. `source` is "simulated" for a hash, "predicted" for the closed form, which exists for single
    tiers alone; `tier` "fabric" is any tier of a path. Figures are means over the seeds, `*_std` the sample deviation
    (0 for one seed). A seed moves the switches' seeds, the queue pair numbers and the permutation.

    Raises:
        ConfigError: the fabric cannot be built, or no flow can cross it: one server, or one ToR.
        ValueError: no seed, or an unknown hash or traffic.
    """
    if not seeds:
        raise ValueError("seeds: at least one")
    fabrics = {split: Clos.build(_with_split(config.cluster, split)) for split in (True, False)}
    check_crossed(fabrics[True])
    found: dict[_Case, list[Collisions]] = {}
    expected: dict[_Case, list[Expected]] = {}
    for traffic in traffics:
        for seed in seeds:
            logger.info("hashing %s, seed %d", traffic, seed)
            flows = traffic_flows(config, fabrics[True], traffic, seed, qps_per_connection)
            for case, collisions in _hash(fabrics, flows, traffic, seed, hashes):
                found.setdefault(case, []).append(collisions)
            for split, fabric in fabrics.items():
                for tier, value in expected_load(fabric, flows).items():
                    expected.setdefault(_Case(split, traffic, CLOSED_FORM, tier.label), []).append(value)
    rows = [_simulated_row(case, values) for case, values in found.items()]
    return rows + [_predicted_row(case, values, _links(fabrics[case.split], case)) for case, values in expected.items()]


def split_by_load(cluster: ClusterConfig, loads: Sequence[float] = LOADS) -> list[dict[str, Any]]:
    """Closed form for the uplinks of one ToR, with and without the split, as more of its NICs send at full rate.

    Args:
        cluster: the fabric.
        loads: shares of the ToR's NICs that send a flow each to another ToR; rounded to whole NICs.

    Raises:
        ConfigError: the fabric cannot be built.
    """
    designs = {split: plan(_with_split(cluster, split)) for split in (True, False)}
    return [
        _load_row(split, round(share * design.nics_per_tor), design)
        for split, design in designs.items()
        for share in loads
    ]


def traffic_flows(config: Config, fabric: Clos, traffic: TrafficName, seed: int, qps_per_connection: int = 1) -> Flows:
    """The flows of one phase; the permutation takes `seed`, and one queue pair a NIC.

    Raises:
        ValueError: the traffic is unknown.
    """
    if traffic == "permutation":
        return permutation(fabric, seed)
    if traffic not in _PHASES:
        raise ValueError(f"traffic {traffic!r}: one of {', '.join(TRAFFICS)}")
    return job_flows(config.job, config.cluster, qps_per_connection=qps_per_connection).select(*_PHASES[traffic])


def check_crossed(fabric: Clos) -> None:
    """Refuse a fabric that no flow can cross.

    Raises:
        ConfigError: there is one server, whose traffic stays on NVLink, or one ToR, below every hash.
    """
    design = fabric.design
    if design.num_servers == 1 or design.num_tors == 1:
        rule = "all traffic stays in one server" if design.num_servers == 1 else "all NICs hang on one ToR"
        remedy = "no flow is hashed: take a larger cluster, such as examples/megascale-12288.toml"
        raise ConfigError("cluster.servers", design.num_servers, rule, remedy)


def _hash(
    fabrics: dict[bool, Clos], flows: Flows, traffic: TrafficName, seed: int, hashes: Sequence[HashName]
) -> Iterator[tuple[_Case, Collisions]]:
    """Both fabrics number NICs and ToRs alike, so the flows' headers serve both."""
    tuples = headers(fabrics[True], flows, seed)
    for name in hashes:
        ecmp = Ecmp(name, tuples, seed)
        for split, fabric in fabrics.items():
            loaded = load(fabric, flows, ecmp)
            for tier in ECMP_TIERS:
                yield _Case(split, traffic, name, tier.label), loaded.collisions([tier])
            yield _Case(split, traffic, name, ALL_TIERS), loaded.collisions()


def _load_row(split: bool, num_flows: int, design: Design) -> dict[str, Any]:
    expected = expected_collisions([num_flows], [design.nic_bps], design.tor_uplinks, design.tor_uplink_bps)
    return {
        "split": split,
        "source": "predicted",
        "flows": num_flows,
        "load": num_flows / design.nics_per_tor,
        "collision_share": expected.share,
        "excess": expected.excess,
    }


def _simulated_row(case: _Case, seeds: list[Collisions]) -> dict[str, Any]:
    return {
        **_case_columns(case, "simulated"),
        "seeds": len(seeds),
        "links": seeds[0].num_links,
        "flows": statistics.fmean(one.num_flows for one in seeds),
        "collisions": statistics.fmean(one.num_colliding for one in seeds),
        "overloaded_links": statistics.fmean(one.num_overloaded for one in seeds),
        "utilisation": statistics.fmean(one.utilisation for one in seeds),
        "max_utilisation": max(one.max_utilisation for one in seeds),
        **_mean_and_std("collision_share", [one.share for one in seeds]),
        **_mean_and_std("excess", [one.excess for one in seeds]),
    }


def _predicted_row(case: _Case, seeds: list[Expected], links: tuple[int, float]) -> dict[str, Any]:
    num_links, capacity_bps = links
    demand_bps = statistics.fmean(one.total_bps for one in seeds)
    return {
        **_case_columns(case, "predicted"),
        "seeds": len(seeds),
        "links": num_links,
        "flows": statistics.fmean(one.num_flows for one in seeds),
        "collisions": statistics.fmean(one.num_colliding for one in seeds),
        "overloaded_links": None,
        "utilisation": demand_bps / capacity_bps if capacity_bps else 0.0,
        "max_utilisation": None,
        **_mean_and_std("collision_share", [one.share for one in seeds]),
        **_mean_and_std("excess", [one.excess for one in seeds]),
    }


def _case_columns(case: _Case, source: str) -> dict[str, Any]:
    return {
        "split": case.split,
        "traffic": case.traffic,
        "hash": case.hash_name,
        "tier": case.tier,
        "source": source,
    }


def _mean_and_std(name: str, values: list[float]) -> dict[str, float]:
    return {name: statistics.fmean(values), f"{name}_std": statistics.stdev(values) if len(values) > 1 else 0.0}


def _links(fabric: Clos, case: _Case) -> tuple[int, float]:
    """Number and total capacity of a tier's links."""
    tier = next(tier for tier in Tier if tier.label == case.tier)
    span = fabric.tier_links(tier)
    return span.stop - span.start, fabric.tier_bps(tier)


def _with_split(cluster: ClusterConfig, split: bool) -> ClusterConfig:
    return cluster.model_copy(update={"aoc_split": split})
