"""The ToR split against its baseline: the same flows, seeds and hashes on both fabrics, and the closed form.

The baseline has the same NICs and the same total uplink capacity with uplinks at NIC rate (64 x 200G), against 32 x
400G with the split (MegaScale 3.6, which gives no probability: ours are computed). Not covered: other designs.
"""

from __future__ import annotations

import logging
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np

from netlayer.config.tree import ClusterConfig, Config
from netlayer.errors import ConfigError
from topology.ecmp.balance import BalanceName, balance
from topology.ecmp.expected import Expected, expected_collisions, expected_load
from topology.ecmp.hashing import FIVE_TUPLE, Field
from topology.ecmp.load import Collisions, Load
from topology.ecmp.rows import LoadCollisions, TierCollisions, mean_and_std
from topology.fabric.clos import Clos, Tier
from topology.fabric.design import Design, plan
from topology.fabric.interface import Fabric
from topology.placement.strategies import StrategyName, num_slots, place_slots
from topology.rates.contention import busiest, contend, uncongested
from topology.traffic.job import Algorithm, Flows, Kind, headers, job_flows, permutation

logger = logging.getLogger(__name__)

TrafficName = Literal["ring", "pipeline", "permutation", "tree", "all_to_all"]
TRAFFICS: tuple[TrafficName, ...] = get_args(TrafficName)
USUAL_TRAFFICS = TRAFFICS[:3]
USUAL_HASHES: tuple[BalanceName, ...] = ("random", "crc16", "crc32c")
FROM_FILE = "file"
CLOSED_FORM = "closed form"
LOADS = tuple(eighth / 8 for eighth in range(1, 9))
ALL_TIERS = "fabric"

# Flows that run at one time. The all-gather's ring is that of the reduce-scatter: the same pairs on the same queue
# pairs, at another time. Forward and backward of the pipeline overlap in the steady phase of 1F1B.
_PHASES: dict[TrafficName, tuple[Kind, ...]] = {
    "ring": (Kind.DP_REDUCE_SCATTER,),
    "pipeline": (Kind.PP_FORWARD, Kind.PP_BACKWARD),
    "tree": (Kind.DP_ALL_REDUCE,),
    "all_to_all": (Kind.DP_ALL_TO_ALL,),
}
_ALGORITHMS: dict[TrafficName, Algorithm] = {"tree": "tree", "all_to_all": "all_pairs"}


Observer = Callable[[bool, str, str, Flows, Load], None]
Progress = Callable[[int, int, str], None]


class _Outcome(NamedTuple):
    """Outcome of one case with one seed; slowdown as (mean, worst) over the flows that cross the tier."""

    collisions: Collisions
    slowdown: tuple[float, float]


class _Case(NamedTuple):
    """One line of the comparison: `hash_name` is a balance or CLOSED_FORM, `tier` a tier's label or ALL_TIERS."""

    split: bool
    traffic: str
    hash_name: str
    tier: str


def compare_split(
    config: Config,
    *,
    seeds: Sequence[int] = range(10),
    hashes: Sequence[BalanceName] = USUAL_HASHES,
    traffics: Sequence[TrafficName] = USUAL_TRAFFICS,
    qps_per_connection: int = 1,
    num_channels: int | None = None,
    fields: Sequence[Field] = FIVE_TUPLE,
    flows: Flows | None = None,
    placement: StrategyName = "given",
    observe: Observer | None = None,
    progress: Progress | None = None,
) -> list[TierCollisions]:
    """Compare collisions with and without the ToR split: one row a split, traffic, hash (or closed form) and tier.

    The closed form exists for single tiers between switches alone. A seed moves the switches' seeds, the queue pair
    numbers and the permutation.

    Args:
        hashes: hash functions, or substitutes for one (`balance.BALANCES`).
        num_channels: of the job's collectives, see `traffic.job_flows`.
        fields: the header fields that a hash takes.
        flows: these in place of `traffics`; they are traffic "file". With starts, those of the busiest instant.
        placement: of the job's ranks on the servers, for the job's own flows.
        observe: called with (split, traffic, hash, flows, load) for every load.
        progress: called with (done, total, text).

    Raises:
        ConfigError: the fabric cannot be built, or no flow can cross it: one server, or one ToR.
        ValueError: no seed, or an unknown hash, field or traffic.
    """
    if not seeds:
        raise ValueError("seeds: at least one")
    fabrics = {split: Clos.build(_with_split(config.cluster, split)) for split in (True, False)}
    check_crossed(fabrics[True])
    if flows is not None:
        flows = _together(fabrics[True], flows)
    outcomes: dict[_Case, list[_Outcome]] = {}
    expected: dict[_Case, list[Expected]] = {}
    points = [(traffic, seed) for traffic in (traffics if flows is None else (FROM_FILE,)) for seed in seeds]
    for done, (traffic, seed) in enumerate(points):
        if progress:
            progress(done, len(points), f"{traffic}, seed {seed}")
        logger.info("hashing %s, seed %d", traffic, seed)
        chosen = (
            flows
            if flows is not None
            else traffic_flows(config, fabrics[True], traffic, seed, qps_per_connection, num_channels, placement)
        )
        for case, one in _hash(fabrics, chosen, traffic, seed, hashes, fields, observe):
            outcomes.setdefault(case, []).append(one)
        for split, fabric in fabrics.items():
            for tier, value in expected_load(fabric, chosen).items():
                expected.setdefault(_Case(split, traffic, CLOSED_FORM, tier.label), []).append(value)
    rows = [
        TierCollisions.of_seeds(*case, [one.collisions for one in values], [one.slowdown for one in values])
        for case, values in outcomes.items()
    ]
    return rows + [_predicted_row(case, values, _links(fabrics[case.split], case)) for case, values in expected.items()]


def split_by_load(cluster: ClusterConfig, loads: Sequence[float] = LOADS) -> list[LoadCollisions]:
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


def traffic_flows(
    config: Config | None,
    fabric: Fabric,
    traffic: str,
    seed: int,
    qps_per_connection: int = 1,
    num_channels: int | None = None,
    placement: StrategyName = "given",
) -> Flows:
    """The flows of one phase; the permutation takes `seed`, and no job, channels or placement.

    Raises:
        ValueError: the traffic or the placement is unknown, or there is no job.
    """
    if traffic == "permutation":
        return permutation(fabric, seed, qps_per_connection)
    if traffic not in _PHASES:
        raise ValueError(f"traffic {traffic!r}: one of {', '.join(TRAFFICS)}")
    if config is None:
        raise ValueError(f"traffic {traffic!r} is of a job, and there is none")
    flows = job_flows(
        config.job,
        config.cluster,
        qps_per_connection=qps_per_connection,
        num_channels=num_channels,
        algorithm=_ALGORITHMS.get(traffic, "ring"),
    )
    chosen = flows.select(*_PHASES[traffic])
    slots, usable = num_slots(config.cluster, config.job.parallel), fabric.full_servers
    if placement == "given" and usable[:slots].all():
        return chosen
    placed = place_slots(placement, fabric, config.job.parallel, slots, usable, seed)
    return placed.apply(chosen, config.cluster.nics_per_server)


def check_crossed(fabric: Fabric, field: str = "cluster.servers") -> None:
    """Refuse a fabric that no flow can cross; `field` is what errors name.

    Raises:
        ConfigError: there is one server, whose traffic stays on NVLink, or one ToR or pair of ToRs, below every hash.
    """
    num_tors, num_networks = (len(np.unique(kind(fabric.nics))) for kind in (fabric.tor_of, fabric.network_of))
    if fabric.num_servers == 1 or num_tors == num_networks:
        of_a_rail = " of a rail" if num_networks > 1 else ""
        alone = fabric.num_servers == 1
        rule = "all traffic stays in one server" if alone else f"all NICs{of_a_rail} hang on one ToR"
        planned = field == "cluster.servers"
        # `tor_of` numbers sets of ToRs there: a NIC with a port on each of two has its flows spread by the host's bond.
        rule += "" if planned or alone else ", or all on the same ToRs"
        larger = "cluster, such as examples/megascale-12288.toml" if planned else "fabric"
        value = fabric.num_servers if planned else None
        raise ConfigError(field, value, rule, f"no flow is hashed: take a larger {larger}")


def _together(fabric: Clos, flows: Flows) -> Flows:
    among, at_s = busiest(fabric, flows)
    if len(among) < len(flows):
        message = (
            "load, collisions and rates are of the %d flows that are under way at %.4g s, when they crowd most, of %d"
        )
        logger.warning(message, len(among), at_s, len(flows))
    return flows.where(among)


def _hash(
    fabrics: dict[bool, Clos],
    flows: Flows,
    traffic: str,
    seed: int,
    hashes: Sequence[BalanceName],
    fields: Sequence[Field],
    observe: Observer | None,
) -> Iterator[tuple[_Case, _Outcome]]:
    """Yield each case's outcome; both fabrics number NICs and ToRs alike, so headers and free rates serve both."""
    tuples = headers(fabrics[True], flows, seed)
    free = None
    for name in hashes:
        for split, fabric in fabrics.items():
            loaded = balance(name, fabric, flows, tuples, seed, fields=fields)
            free = free or uncongested(fabric, loaded.paths)
            contention = contend(loaded, free)
            if observe:
                observe(split, traffic, name, flows, loaded)
            for tier in Tier:
                case = _Case(split, traffic, name, tier.label)
                yield case, _Outcome(loaded.collisions([tier]), contention.slowdowns([tier]))
            yield _Case(split, traffic, name, ALL_TIERS), _Outcome(loaded.collisions(), contention.slowdowns())


def _load_row(split: bool, num_flows: int, design: Design) -> LoadCollisions:
    """Return the predicted collisions at one ToR where `num_flows` of its NICs send at full rate."""
    expected = expected_collisions([num_flows], [design.nic_bps], design.tor_uplinks, design.tor_uplink_bps)
    return LoadCollisions(split, num_flows, num_flows / design.nics_per_tor, expected.share, expected.excess)


def _predicted_row(case: _Case, seeds: list[Expected], links: tuple[int, float]) -> TierCollisions:
    """Return the row of a case by the closed form, with None where it has no answer.

    Args:
        seeds: expected collisions of each seed's flows.
        links: their number and their capacity together, bit/s.
    """
    num_links, capacity_bps = links
    demand_bps = statistics.fmean(one.total_bps for one in seeds)
    share, share_std = mean_and_std([one.share for one in seeds])
    excess, excess_std = mean_and_std([one.excess for one in seeds])
    return TierCollisions(
        *case,
        "predicted",
        seeds=len(seeds),
        links=num_links,
        flows=statistics.fmean(one.num_flows for one in seeds),
        collisions=statistics.fmean(one.num_colliding for one in seeds),
        overloaded_links=None,
        overloaded_share=None,
        utilisation=demand_bps / capacity_bps if capacity_bps else 0.0,
        max_utilisation=None,
        slowdown=None,
        max_slowdown=None,
        collision_share=share,
        collision_share_std=share_std,
        excess=excess,
        excess_std=excess_std,
    )


def _links(fabric: Clos, case: _Case) -> tuple[int, float]:
    """Number and total capacity of a tier's links."""
    tier = next(tier for tier in Tier if tier.label == case.tier)
    span = fabric.tier_links(tier)
    return span.stop - span.start, fabric.tier_bps(tier)


def _with_split(cluster: ClusterConfig, split: bool) -> ClusterConfig:
    return cluster.model_copy(update={"aoc_split": split})
