"""Remedies for polarisation and collisions: switch seeds, offsets, queue pairs a connection, UDP source ports.

Seeds, offsets and queue pairs are tried on a grid; ports are planned flow by flow, each the one of its candidates that
adds least to the squared utilisation of its path, in a few rounds. A plan holds for the hash, the seeds and the fabric
it was made for: on real switches those must be read off first. Not covered: ports that stay good under failures.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from topology.ecmp.hashing import Ecmp, HashName, Headers, Stage, hash_bits, usual_offsets
from topology.ecmp.load import Collisions, Load, demand_bps, place
from topology.ecmp.source_port import FIRST_PORT
from topology.fabric.interface import Fabric, Ints
from topology.placement.strategies import Placement
from topology.traffic.job import Flows, headers
from topology.traffic.step import run_step

Floats = NDArray[np.float64]
Progress = Callable[[int, int, str], None]

_NUM_PORTS = 0x1_0000 - FIRST_PORT


@dataclass(frozen=True, eq=False)
class PortPlan:
    """A UDP source port for each flow (a queue pair), and the collisions without and with it."""

    flows: Flows
    headers: Headers
    before: Load
    after: Load
    ports_before: NDArray[np.uint16]

    @property
    def num_changed(self) -> int:
        return int((self.headers.udp_sport != self.ports_before).sum())

    def rows(self) -> dict[str, NDArray[Any]]:
        """Columns, a row a queue pair: who, to whom, which of the pair's queue pairs, its port now and planned.

        `mlx5dv_modify_qp_udp_sport` sets a queue pair's port on NVIDIA NICs once it is ready to receive.
        """
        flows, tuples = self.flows, self.headers
        return {
            "src_nic": flows.src_nic,
            "dst_nic": flows.dst_nic,
            "kind": flows.kind,
            "qp": _ordinal(flows),
            "src_ip": tuples.src_ip,
            "dst_ip": tuples.dst_ip,
            "udp_sport_before": self.ports_before,
            "udp_sport": tuples.udp_sport,
        }


def plan_ports(
    fabric: Fabric,
    flows: Flows,
    name: HashName,
    seed: int,
    *,
    candidates: int = 32,
    rounds: int = 4,
    progress: Progress | None = None,
) -> PortPlan:
    """Choose each flow's UDP source port among its own and `candidates` - 1 drawn by seed.

    Args:
        fabric: the fabric.
        flows: of one phase: flows that run at one time.
        name, seed: the switches' hash.
        candidates: ports tried a flow, at least 1.
        rounds: passes over all flows; a later one moves flows in the light of the others' choice.
        progress: called with (done, total, words).

    Raises:
        ValueError: `candidates` or `rounds` is below 1.
    """
    if candidates < 1 or rounds < 1:
        raise ValueError(f"candidates = {candidates}, rounds = {rounds}: at least 1 each")
    own = headers(fabric, flows, seed)
    drawn = np.random.default_rng(seed).integers(FIRST_PORT, FIRST_PORT + _NUM_PORTS, (len(flows), candidates))
    ports = drawn.astype(np.uint16)
    ports[:, 0] = own.udp_sport
    of_column = []
    for column in range(candidates):
        tried = dataclasses.replace(own, udp_sport=ports[:, column])
        of_column.append(fabric.route(flows.src_nic, flows.dst_nic, Ecmp(name, tried, seed))[0])
        if progress:
            progress(column + 1, candidates, "ports routed")
    order = np.random.default_rng([seed, 1]).permutation(len(flows))
    demand = demand_bps(fabric, flows)
    paths = np.stack(of_column, axis=1)  # all paths between two NICs are as long, so columns are as wide
    hashed = fabric.links_on(paths, fabric.hashed_tiers)
    chosen = _spread(hashed, demand, fabric.link_bps, order, rounds)
    picked = np.arange(len(flows)), chosen
    planned = dataclasses.replace(own, udp_sport=ports[picked])
    before, after = place(fabric, flows, paths[:, 0]), place(fabric, flows, paths[picked])
    return PortPlan(flows, planned, before, after, own.udp_sport)


def search_knobs(
    fabric: Fabric,
    flows_of: Callable[[int], Flows],
    placement: Placement | None,
    name: HashName,
    *,
    seeds: Sequence[int],
    offsets: Sequence[tuple[int, ...]] | None = None,
    qps: Sequence[int] = (1, 2, 4),
    progress: Progress | None = None,
) -> list[dict[str, Any]]:
    """Try every combination of switch seed, offsets and queue pairs a connection; least excess first.

    `offsets` of a row says whether any stage has one, `offset_bits` which.

    Args:
        fabric: the fabric.
        flows_of: flows between slots for a number of queue pairs.
        placement: of the slots; None where `flows_of` gives flows between NICs.
        name: the switches' hash.
        offsets: bits to rotate by, one for each `hashing.Stage`; `offset_vectors` where None.
        progress: called with (done, total, words).

    Raises:
        ValueError: see `hashing.Ecmp`.
    """
    vectors = offset_vectors(name, min(seeds, default=0)) if offsets is None else list(offsets)
    points = list(itertools.product(qps, vectors, seeds))
    placed = {pairs: flows_of(pairs) for pairs in qps}
    if placement is not None:
        placed = {pairs: placement.apply(flows, fabric.nics_per_server) for pairs, flows in placed.items()}
    rows: list[dict[str, Any]] = []
    for done, (pairs, vector, seed) in enumerate(points, start=1):
        step = run_step(fabric, placed[pairs], name, seed, offsets=vector or None)
        row: dict[str, Any] = {"hash": name, "seed": seed, "offsets": any(vector), "qps": pairs}
        row |= {"offset_bits": " ".join(map(str, vector)), "time_bound_s": step.time_bound_s}
        for phase in step.phases:
            collisions = phase.collisions
            row[f"{phase.name}_collision_share"], row[f"{phase.name}_excess"] = collisions.share, collisions.excess
            row[f"{phase.name}_core_links_used"] = members_used(fabric, phase.load, fabric.core_tier)
        row["excess"] = max((phase.collisions.excess for phase in step.phases), default=0.0)
        rows.append(row)
        if progress:
            progress(done, len(points), f"seed {seed}, {pairs} queue pairs")
    return sorted(rows, key=lambda row: (row["excess"], row["time_bound_s"]))


def offset_vectors(name: HashName, seed: int, drawn: int = 2) -> list[tuple[int, ...]]:
    """Offsets worth trying: ours, none, and some drawn that differ from stage to stage; one empty where none counts."""
    bits = hash_bits(name)
    if not bits:
        return [()]
    rng = np.random.default_rng([seed, bits])
    others = [tuple(rng.choice(bits, len(Stage), replace=False).tolist()) for _ in range(drawn)]
    return [usual_offsets(name), (0,) * len(Stage), *others]


def members_used(fabric: Fabric, load: Load, tier: int | None) -> float:
    """Links that carry flows, of all uplinks of switches that send any over this tier; 0 without such links.

    Far below 1 at load, the hash polarises.
    """
    if tier is None:
        return 0.0
    links = fabric.tier_links(tier)
    used, switch = load.link_bps[links] > 0, fabric.link_src[links]
    groups = used[np.isin(switch, switch[used])]
    return float(groups.mean()) if groups.size else 0.0


def plan_summary(plan: PortPlan) -> dict[str, Any]:
    """Return figures before and after in one row."""
    before, after = plan.before.collisions(), plan.after.collisions()
    return {
        "queue_pairs": len(plan.flows),
        "changed": plan.num_changed,
        **{f"{key}_before": value for key, value in _figures(before).items()},
        **{f"{key}_after": value for key, value in _figures(after).items()},
    }


def _figures(collisions: Collisions) -> dict[str, float]:
    return {
        "collision_share": collisions.share,
        "excess": collisions.excess,
        "max_utilisation": collisions.max_utilisation,
    }


def _ordinal(flows: Flows) -> Ints:
    """Number the queue pairs between the same two NICs for the same purpose, from 0."""
    keys = np.stack([flows.src_nic, flows.dst_nic, flows.kind.astype(np.int64)])
    order = np.lexsort(keys[::-1])
    ordered = keys[:, order]
    begins = np.append(True, (np.diff(ordered, axis=1) != 0).any(axis=0)) if len(flows) else np.empty(0, np.bool_)
    positions = np.arange(len(flows))
    counted = np.empty(len(flows), dtype=np.int64)
    counted[order] = positions - np.maximum.accumulate(np.where(begins, positions, 0))
    return counted


@numba.njit(cache=True)
def _spread(paths: Ints, demand_bps: Floats, link_bps: Floats, order: Ints, rounds: int) -> Ints:
    """The candidate of each flow, shape of paths (num_flows, candidates, tiers): the first begins, the best stays."""
    chosen = np.zeros(len(paths), dtype=np.int64)
    use = np.zeros(len(link_bps))
    for flow in range(len(paths)):
        _add(use, paths[flow, 0], demand_bps[flow], link_bps)
    for _ in range(rounds):
        moved = False
        for flow in order:
            _add(use, paths[flow, chosen[flow]], -demand_bps[flow], link_bps)
            best, least = chosen[flow], _cost(use, paths[flow, chosen[flow]], demand_bps[flow], link_bps)
            for candidate in range(paths.shape[1]):
                cost = _cost(use, paths[flow, candidate], demand_bps[flow], link_bps)
                if cost < least * (1 - 1e-9):
                    best, least = candidate, cost
            moved = moved or best != chosen[flow]
            chosen[flow] = best
            _add(use, paths[flow, best], demand_bps[flow], link_bps)
        if not moved:
            break
    return chosen


@numba.njit(cache=True)
def _add(use: Floats, path: Ints, amount: float, link_bps: Floats) -> None:
    for link in path:
        if link >= 0:
            use[link] += amount / link_bps[link]


@numba.njit(cache=True)
def _cost(use: Floats, path: Ints, amount: float, link_bps: Floats) -> float:
    """Return the flow's addition to the sum of squared utilisations."""
    cost = 0.0
    for link in path:
        if link >= 0:
            share = amount / link_bps[link]
            cost += share * (2 * use[link] + share)
    return cost
