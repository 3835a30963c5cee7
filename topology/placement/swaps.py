"""An optimiser that improves a placement by moving slots: local search over swaps, bounded in moves and time.

The cost is bytes times links above the NIC's own two (0 under one ToR, 2 inside a pod, 4 through the core), summed over
the step's flows: the bytes' mean hops, but for a constant. Where ToR sets are not so equally far apart the search goes
by their mean distances, and what is reported by every flow's own. A move takes one slot to another usable server, whose
slot (if any) takes its place; half of the targets are drawn under the ToR set of a slot that it talks to. A slot away
from the server where it began weighs as much as a hundredth of a slot's mean cost, so that a rank leaves its place for
a gain alone, and the cost never rises. Not covered: collisions, which a hash decides after placement.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from topology.fabric.interface import Fabric, Ints
from topology.placement.strategies import Placement, check_room, move_off_unusable
from topology.traffic.job import Flows

Floats = NDArray[np.float64]
Progress = Callable[[int, int, str], None]

_CHUNK = 100_000
# Chunks without any gain after which the search gives up.
_PATIENCE = 4
OBJECTIVE = "bytes x links above the NICs"
_MOVE_SHARE = 0.01  # of a slot's mean cost, that a slot away from its place weighs
_FREE = -1


@dataclass(frozen=True, eq=False)
class Neighbours:
    """Traffic between slots (CSR), both directions added: bytes on one rail, and bytes between rails."""

    start: Ints
    slot: Ints
    rail_bytes: Floats
    cross_bytes: Floats


@dataclass(frozen=True, eq=False)
class Improved:
    """Result of a search; costs in `OBJECTIVE`, before with the slots of unusable servers on the nearest free ones.

    Args:
        slots_moved: slots on another server than in the placement that was given.
        cut_short: `max_seconds` ended the search; it might have found more.
        moves_tried, moves_taken: swaps drawn, and those that lowered the cost.
    """

    placement: Placement
    cost_before: float
    cost_after: float
    slots_moved: int
    cut_short: bool
    moves_tried: int
    moves_taken: int

    def given_up(self, start: Placement) -> Improved:
        """Return the start instead of the result, for a caller whose measure finds the result worse."""
        placement = Placement(self.placement.name, start.server)
        return dataclasses.replace(self, placement=placement, cost_after=self.cost_before, slots_moved=0)

    def to_row(self, start: str, gpus_per_server: int) -> dict[str, Any]:
        """Return a row for a table; `start`: the name of the placement that was improved."""
        return {
            "start": start,
            "objective": OBJECTIVE,
            "cost_before": self.cost_before,
            "cost_after": self.cost_after,
            "ranks_moved": self.slots_moved * gpus_per_server,
            "cut_short": self.cut_short,
        }


def improve(
    fabric: Fabric,
    flows: Flows,
    placement: Placement,
    usable: NDArray[np.bool_],
    *,
    seed: int = 0,
    max_moves: int = 20_000_000,
    max_seconds: float = 10.0,
    progress: Progress | None = None,
) -> Improved:
    """Move slots off unusable servers, then search for cheaper places.

    The same seed gives the same placement unless `max_seconds` cuts the search short.

    Args:
        fabric: where the servers stand.
        flows: between slots, as `traffic.job_flows` gives them.
        placement: the start.
        usable: a mask of the servers that may be used.
        seed: of the moves.
        max_moves, max_seconds: the search ends at the first of them, or when it no longer finds any gain.
        progress: called with (done, total, text).

    Raises:
        ConfigError: there are fewer usable servers than slots.
        ValueError: a flow is of a slot that the placement does not have.
    """
    check_room(len(placement.server), usable)
    beyond = max(int(nic.max(initial=-1)) for nic in (flows.src_nic, flows.dst_nic))
    if beyond >= len(placement.server) * fabric.nics_per_server:
        raise ValueError(f"flows reach NIC {beyond}: the placement has {len(placement.server)} slots")
    server = move_off_unusable(placement.server, usable)
    near = neighbours(flows, len(server), fabric.rail_of)
    slot_of = np.full(fabric.num_servers, _FREE, dtype=np.int64)
    slot_of[server] = np.arange(len(server))
    # Where servers stand, and the traffic between slots, as the compiled loops take them.
    where = (fabric.tor_set, fabric.pod, fabric.set_distance)
    graph = (*where, near.start, near.slot, near.rail_bytes, near.cross_bytes)
    set_servers = np.argsort(fabric.tor_set, kind="stable")
    set_start = np.searchsorted(fabric.tor_set[set_servers], np.arange(int(fabric.tor_set.max()) + 2))
    # A slot that must move is away from its place wherever it goes.
    home = np.where(usable[placement.server], placement.server, _FREE)
    before = cost = _total(server, *graph)
    move_cost = _MOVE_SHARE * before / len(server)
    tried = num_taken = idle = 0
    until, cut_short = time.monotonic() + max_seconds, False
    while tried < max_moves and idle < _PATIENCE:
        cut_short = tried > 0 and time.monotonic() >= until
        if cut_short:
            break
        moves = min(_CHUNK, max_moves - tried)
        width, seed_now = fabric.tor_set_width, (seed + tried) & 0xFFFF_FFFF
        accepted, gain = _search(
            server, slot_of, home, move_cost, usable, *graph, set_start, set_servers, width, moves, seed_now
        )
        tried, num_taken, cost = tried + moves, num_taken + accepted, cost - gain
        idle = idle + 1 if gain <= 1e-9 * before else 0
        if progress:
            progress(tried, max_moves, f"cost {cost / (before or 1.0):.1%} of the start")
    after = _total(server, *graph)
    if fabric.set_distance.size:
        start = move_off_unusable(placement.server, usable)
        before, after = (placement_cost(fabric, flows, Placement("", one)) for one in (start, server))
        if after > before:  # means say nothing of single flows
            server, after = start, before
    moved = int((server != placement.server).sum())
    return Improved(Placement("optimised", server), before, after, moved, cut_short, tried, num_taken)


def cheapest(fabric: Fabric, flows: Flows, placements: Sequence[Placement]) -> Placement:
    """The placement with the least of `OBJECTIVE`, the first of equals; `flows` are between slots."""
    costs = [placement_cost(fabric, flows, placement) for placement in placements]
    return next(one for one, cost in zip(placements, costs, strict=True) if cost <= min(costs) * (1 + 1e-9))


def placement_cost(fabric: Fabric, flows: Flows, placement: Placement) -> float:
    """`OBJECTIVE` of the placed flows."""
    placed = placement.apply(flows, fabric.nics_per_server)
    above = np.maximum(fabric.hops(placed.src_nic, placed.dst_nic) - 2, 0)
    return float((placed.num_bytes * above).sum())


def neighbours(flows: Flows, slots: int, rail_of: Ints) -> Neighbours:
    """The flows' bytes between slots as a sparse symmetric matrix; `rail_of` is of each NIC of a server."""
    ends = [np.divmod(nic, len(rail_of)) for nic in (flows.src_nic, flows.dst_nic)]
    (src, src_local), (dst, dst_local) = ends
    crosses = rail_of[src_local] != rail_of[dst_local]
    keys = np.concatenate([src * slots + dst, dst * slots + src])
    cells, where = np.unique(keys, return_inverse=True)
    both = np.concatenate([flows.num_bytes, flows.num_bytes])
    twice = np.concatenate([crosses, crosses])
    row, column = np.divmod(cells, slots)
    return Neighbours(
        start=np.searchsorted(row, np.arange(slots + 1)).astype(np.int64),
        slot=column,
        rail_bytes=_sums(where, np.where(twice, 0.0, both), len(cells)),
        cross_bytes=_sums(where, np.where(twice, both, 0.0), len(cells)),
    )


def _sums(where: Ints, amounts: Floats, size: int) -> Floats:
    return np.asarray(np.bincount(where, weights=amounts, minlength=size), dtype=np.float64)


@numba.njit(cache=True)
def _links(a: int, b: int, tor_set: Ints, pod: Ints, distance: Floats, rail_bytes: float, cross_bytes: float) -> float:
    """Bytes x links above the NICs between two servers."""
    if distance.shape[1]:  # no pods: each pair of ToR sets has its own
        rail, cross = distance[0, tor_set[a], tor_set[b]], distance[1, tor_set[a], tor_set[b]]
        return float(rail * rail_bytes + cross * cross_bytes)
    if pod[a] != pod[b]:
        return 4.0 * (rail_bytes + cross_bytes)
    if tor_set[a] != tor_set[b]:
        return 2.0 * (rail_bytes + cross_bytes)
    return 2.0 * cross_bytes  # another rail is another ToR, even under one set


@numba.njit(cache=True)
def _slot_cost(
    at: int,
    moved: int,
    other: int,
    other_at: int,
    server: Ints,
    tor_set: Ints,
    pod: Ints,
    distance: Floats,
    start: Ints,
    slot: Ints,
    rail_bytes: Floats,
    cross_bytes: Floats,
) -> float:
    """Return the cost of slot `moved` on server `at`, were slot `other` on server `other_at`."""
    cost = 0.0
    for edge in range(start[moved], start[moved + 1]):
        to = slot[edge]
        there = other_at if to == other else server[to]
        cost += _links(at, there, tor_set, pod, distance, rail_bytes[edge], cross_bytes[edge])
    return cost


@numba.njit(cache=True)
def _search(
    server: Ints,
    slot_of: Ints,
    home: Ints,
    move_cost: float,
    usable: NDArray[np.bool_],
    tor_set: Ints,
    pod: Ints,
    distance: Floats,
    start: Ints,
    slot: Ints,
    rail_bytes: Floats,
    cross_bytes: Floats,
    set_start: Ints,
    set_servers: Ints,
    set_width: int,
    moves: int,
    seed: int,
) -> tuple[int, float]:
    """Try `moves` moves in place; return (taken, cost saved, that of slots away from home included).

    Moves of no gain are taken too, where they take no slot from its home: they lead off plateaus.
    """
    np.random.seed(seed)
    num_taken, saved = 0, 0.0
    graph = (start, slot, rail_bytes, cross_bytes)
    for _ in range(moves):
        moved = np.random.randint(len(server))
        here = server[moved]
        degree = start[moved + 1] - start[moved]
        if degree and np.random.random() < 0.5:
            friend = server[slot[start[moved] + np.random.randint(degree)]]
            place = set_start[tor_set[friend]] + np.random.randint(set_width)
            if place >= set_start[tor_set[friend] + 1]:
                continue  # a set that is partly filled
            there = set_servers[place]
        else:
            there = np.random.randint(len(slot_of))
        if there == here or not usable[there]:
            continue
        other = slot_of[there]
        now = _slot_cost(here, moved, other, there, server, tor_set, pod, distance, *graph) + move_cost * (
            here != home[moved]
        )
        then = _slot_cost(there, moved, other, here, server, tor_set, pod, distance, *graph) + move_cost * (
            there != home[moved]
        )
        if other >= 0:
            now += _slot_cost(there, other, moved, here, server, tor_set, pod, distance, *graph)
            now += move_cost * (there != home[other])
            then += _slot_cost(here, other, moved, there, server, tor_set, pod, distance, *graph)
            then += move_cost * (here != home[other])
        if then <= now:
            server[moved], slot_of[there], slot_of[here] = there, moved, other
            if other >= 0:
                server[other] = here
            num_taken += then < now
            saved += now - then
    return num_taken, saved


@numba.njit(cache=True)
def _total(
    server: Ints,
    tor_set: Ints,
    pod: Ints,
    distance: Floats,
    start: Ints,
    slot: Ints,
    rail_bytes: Floats,
    cross_bytes: Floats,
) -> float:
    """Return the cost of the whole placement; each pair is in the matrix twice."""
    cost = 0.0
    for index in range(len(server)):
        for edge in range(start[index], start[index + 1]):
            there = server[slot[edge]]
            cost += _links(server[index], there, tor_set, pod, distance, rail_bytes[edge], cross_bytes[edge])
    return cost / 2
