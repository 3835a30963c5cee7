"""Placement of ranks on servers: as given, random, packed, pipeline first, and the paper's.

A *slot* is the ranks that share a server (rank // gpus_per_server): tensor parallelism stays inside it, so a placement
moves whole slots. MegaScale (NSDI'24) says two things: data-parallel groups are placed before pipeline groups, so that
data-parallel traffic crosses fewer pods (3.2), and data-intensive nodes of a job share one set of ToRs (3.6). `paper`
is both: the slots of one data-parallel group side by side in ring order, in as few pods and then ToR sets as there is
room for. Not covered: several jobs at once, and ranks of one server torn apart.
"""

from __future__ import annotations

import csv
import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from netlayer.config.tree import ClusterConfig, ParallelConfig
from netlayer.errors import ConfigError
from topology.fabric.interface import Fabric, Ints
from topology.traffic.job import Flows

StrategyName = Literal["given", "random", "packed", "paper", "pipeline-first"]
STRATEGIES: tuple[StrategyName, ...] = get_args(StrategyName)
_COLUMNS = ["rank", "server"]


@dataclass(frozen=True, eq=False)
class Placement:
    """`server[i]` is the server of slot i; no server holds two."""

    name: str
    server: Ints

    def apply(self, flows: Flows, nics_per_server: int) -> Flows:
        """Flows between slots (as `traffic.job_flows` gives them) as flows between the servers that hold them."""
        src, dst = (self._moved(nic, nics_per_server) for nic in (flows.src_nic, flows.dst_nic))
        return dataclasses.replace(flows, src_nic=src, dst_nic=dst)

    def write_csv(self, path: Path, gpus_per_server: int, names: Sequence[str] | None = None) -> None:
        """`rank,server`, a line a rank: what `read_csv` reads, and what a launcher's host list is made from.

        With the servers' `names` also `host`.
        """
        ranks = np.arange(len(self.server) * gpus_per_server)
        if names is not None:
            servers = self.server.repeat(gpus_per_server).tolist()
            rows = [(rank, server, names[server]) for rank, server in enumerate(servers)]
            with path.open("w", newline="", encoding="utf-8") as file:
                csv.writer(file, lineterminator="\n").writerows([(*_COLUMNS, "host"), *rows])
            return
        table = np.column_stack([ranks, self.server.repeat(gpus_per_server)])
        np.savetxt(path, table, fmt="%d", delimiter=",", header=",".join(_COLUMNS), comments="")

    def _moved(self, nic: Ints, nics_per_server: int) -> Ints:
        slot, local = np.divmod(nic, nics_per_server)
        return np.asarray(self.server[slot] * nics_per_server + local)


def num_slots(cluster: ClusterConfig, parallel: ParallelConfig) -> int:
    """Servers that the job needs.

    Raises:
        ConfigError: its ranks do not fill servers.
    """
    ranks = parallel.layout.world_size
    if ranks % cluster.gpus_per_server:
        rule = f"must be a multiple of cluster.gpus_per_server = {cluster.gpus_per_server}"
        raise ConfigError("job.parallel", f"{ranks} ranks", rule, "raise or lower job.parallel.dp")
    return ranks // cluster.gpus_per_server


def usable_servers(num_servers: int, *lost: Sequence[int]) -> NDArray[np.bool_]:
    """A mask of all servers but those in the lists (failed, busy).

    Raises:
        ConfigError: a list names a server that is not there.
    """
    usable = np.ones(num_servers, dtype=np.bool_)
    for server in (server for servers in lost for server in servers):
        if not 0 <= server < num_servers:
            raise ConfigError("server", server, f"is none of 0..{num_servers - 1}", "give numbers of servers")
        usable[server] = False
    return usable


def place_slots(
    strategy: StrategyName,
    fabric: Fabric,
    parallel: ParallelConfig,
    slots: int,
    usable: NDArray[np.bool_],
    seed: int = 0,
) -> Placement:
    """One placement of `slots` slots on the usable servers.

    `given` keeps slot i on the i-th server and sends the slots of lost servers to the first free ones. `packed` fills
    the ToR sets with most room first, in rank order. `pipeline-first` does so with the stages of one pipeline side by
    side: what the paper's order is set against. `seed` is for `random` alone.

    Raises:
        ConfigError: there are fewer usable servers than slots.
        ValueError: the strategy is unknown.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy {strategy!r}: one of {', '.join(STRATEGIES)}")
    check_room(slots, usable)
    if strategy == "given":
        return Placement(strategy, move_off_unusable(np.arange(slots, dtype=np.int64), usable))
    if strategy == "random":
        free = np.flatnonzero(usable)
        return Placement(strategy, np.random.default_rng(seed).permutation(free)[:slots])
    if strategy == "paper":
        return Placement(strategy, _blocks(fabric, group_slots(parallel, slots), slots, usable))
    by_room = _by_room(fabric, usable)[:slots]
    if strategy == "packed":
        return Placement(strategy, by_room)
    server = np.empty(slots, dtype=np.int64)
    server[_pipeline_order(parallel, slots)] = by_room
    return Placement(strategy, server)


def check_room(slots: int, usable: NDArray[np.bool_]) -> None:
    """Refuse a job that the usable servers cannot hold.

    Raises:
        ConfigError: there are too few.
    """
    room = int(usable.sum())
    if slots > room:
        rule = f"the job needs {slots} servers, {room} of {len(usable)} can be used"
        raise ConfigError("placement", None, rule, "add --spares, or lower job.parallel.dp and cluster.servers")


def move_off_unusable(server: Ints, usable: NDArray[np.bool_]) -> Ints:
    """Return the placement with slots of unusable servers on the nearest free ones (by number, so by ToR set)."""
    moved, free = server.copy(), usable.copy()
    free[server] = False
    for slot in np.flatnonzero(~usable[server]):
        spare = np.flatnonzero(free)
        moved[slot] = spare[np.abs(spare - server[slot]).argmin()]
        free[moved[slot]] = False
    return moved


def read_csv(path: Path, slots: int, cluster: ClusterConfig) -> Placement:
    """A placement from a file with the columns `rank,server`.

    Raises:
        ConfigError: the file cannot be read, a rank is missing, twice or unknown, ranks of one slot stand on two
            servers, or a server holds two slots or is not there.
    """
    rank, server = _read_columns(path)
    gpus = cluster.gpus_per_server
    ranks = slots * gpus
    if not np.array_equal(np.sort(rank), np.arange(ranks)):
        _refuse(path, f"must name each of the ranks 0..{ranks - 1} once")
    table = np.empty(ranks, dtype=np.int64)
    table[rank] = server
    rows = table.reshape(slots, gpus)
    if (torn := np.flatnonzero((rows != rows[:, :1]).any(axis=1))).size:
        first = int(torn[0]) * gpus
        _refuse(path, f"ranks {first}..{first + gpus - 1} share a server's NVLink, but stand on several servers")
    placed = rows[:, 0]
    if placed.min() < 0 or placed.max() >= cluster.servers:
        _refuse(path, f"servers must be among 0..{cluster.servers - 1}")
    if len(np.unique(placed)) != slots:
        _refuse(path, f"a server holds {gpus} ranks, but one is named for more")
    return Placement("given", placed.copy())


def group_slots(parallel: ParallelConfig, slots: int) -> int:
    """Slots side by side in rank order that hold the data-parallel groups of one pipeline stage."""
    return slots // parallel.pp if slots % parallel.pp == 0 else slots


def _by_room(fabric: Fabric, usable: NDArray[np.bool_]) -> Ints:
    """Usable servers, ToR set after ToR set, those with most usable servers first."""
    servers = np.flatnonzero(usable)
    tor_set = fabric.tor_set[servers]
    room = np.bincount(tor_set)
    return servers[np.lexsort((servers, tor_set, -room[tor_set]))]


def _blocks(fabric: Fabric, block: int, slots: int, usable: NDArray[np.bool_]) -> Ints:
    """Put each block of slots into the tightest pod that holds it whole, else into the roomiest; ToR sets alike."""
    free = usable.copy()
    tor_set, pod = fabric.tor_set, fabric.pod
    num_sets, num_pods = int(tor_set.max()) + 1, int(pod.max()) + 1
    placed: list[Ints] = []
    for first in range(0, slots, block):
        remaining = min(block, slots - first)
        while remaining:
            home = _best_fit(np.bincount(pod[free], minlength=num_pods), remaining)
            while remaining and (free & (pod == home)).any():
                room = np.bincount(tor_set[free & (pod == home)], minlength=num_sets)
                servers = np.flatnonzero(free & (tor_set == _best_fit(room, remaining)))[:remaining]
                free[servers] = False
                placed.append(servers)
                remaining -= len(servers)
    return np.concatenate(placed)


def _best_fit(room: Ints, needed: int) -> int:
    """Return the place with least room among those with enough, else the one with most."""
    enough = room >= needed
    return int(np.where(enough, room, room.max() + 1).argmin() if enough.any() else room.argmax())


def _pipeline_order(parallel: ParallelConfig, slots: int) -> Ints:
    """Slots with the stages of one pipeline side by side; rank order where a server holds several stages."""
    block = group_slots(parallel, slots)
    return np.arange(slots, dtype=np.int64).reshape(-1, block).T.ravel()


def _read_columns(path: Path) -> tuple[Ints, Ints]:
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            rows = list(csv.DictReader(file, strict=True))
        columns = [np.array([int(row[name]) for row in rows], dtype=np.int64) for name in _COLUMNS]
    except OSError as exc:
        rule = f"cannot be read ({exc.strerror})"
        raise ConfigError("placement file", path, rule, "give a CSV: rank,server") from exc
    except (KeyError, ValueError, TypeError, OverflowError, csv.Error) as exc:
        rule = f"is no CSV of whole numbers with the columns rank,server ({exc})"
        raise ConfigError("placement file", path, rule, "give a CSV: rank,server") from exc
    return columns[0], columns[1]


def _refuse(path: Path, rule: str) -> None:
    raise ConfigError("placement file", path, rule, "correct the file, or let netlayer topology place write one")
