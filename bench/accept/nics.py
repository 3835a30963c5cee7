"""The RDMA NICs of a run's hosts, and bandwidth and latency between them: jobs of the agents (`congestion.verbs_job`).

Pairs that share no NIC are measured at once, in rounds. Left out: what the figures mean (`verbs`).
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from bench.accept.fleet import Fleet, JobName
from bench.accept.wire import Message

_LOOK_S, _PORT_S, _JOB_S = 30.0, 30.0, 90.0
_LOOK = "look"
_GONE = "gave no answer within {:g} s"
# rxe's 7 retries never end, so 6: a dead path is told in a second. One size for the bandwidth, one for the latency.
_SETTINGS = {"timeout": 14, "retry_cnt": 6}
_COMMON = {"kinds": ["write"], "repeats": 3, "patience_s": 10.0, "settings": _SETTINGS}
_PLAN = {**_COMMON, "sizes": [64, 4 << 20], "messages": 32, "window": 8, "pings": 100}
_SOFT_PLAN = {**_COMMON, "sizes": [64, 1 << 16], "messages": 32, "window": 16, "pings": 40}


@dataclass(frozen=True)
class Nic:
    """An RDMA device of a host that can be measured.

    Args:
        rate: as the kernel writes it; NICs of other rates are no peers.
        soft: it is made of software, and shares its host's cores.
        gpu: PCI address of the GPU near to it whose memory it is tried with; empty where there is none.
        rail: its place among its host's NICs of that rate.
    """

    host: str
    name: str
    rate: str
    soft: bool = False
    gpu: str = ""
    rail: int = 0

    @property
    def label(self) -> str:
        return f"{self.host}: {self.name}"


class Route(NamedTuple):
    """From a NIC to another or to itself, out of the memory of the first one's GPU or host."""

    src: Nic
    dst: Nic
    gpu: bool = False


class Speed(NamedTuple):
    """What a route gave: bits per second, and microseconds of a round trip."""

    bps: float
    latency_us: float
    rows: Sequence[Mapping[str, Any]] = ()


class Trouble(NamedTuple):
    """Why a route gave nothing; `guilty`: a NIC or a link is to blame."""

    words: str
    guilty: bool


Found = dict[Route, Speed | Trouble]


class NicJobs:
    """Asks the agents of a run."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._numbers = itertools.count()  # no name twice: the end of one job is told while the next one runs

    def look(self, hosts: Sequence[str]) -> dict[str, Message]:
        """`devices` of each host, or an `error`."""
        jobs = [(host, _LOOK) for host in hosts]
        for job in jobs:
            self._fleet.start(job, {"do": "look"})
        said = self._fleet.answers(jobs, _LOOK_S)
        return {job[0]: said.get(job) or {"error": _lost(_LOOK_S)} for job in jobs}

    def measure(self, routes: Sequence[Route]) -> Found:
        """Routes that share no NIC, all at once; they send for milliseconds, then check for longer, and hardly meet."""
        jobs, found = dict[Route, JobName](), Found()
        servers = {route: self._name(route.dst) for route in routes if route.src.host != route.dst.host}
        for route, server in servers.items():
            # All of its addresses: by which of them the others know it is not known there.
            there = "127.0.0.1" if self._fleet.address(route.dst.host) == "127.0.0.1" else ""
            self._fleet.start(server, {"do": "lend", "host": there, "device": route.dst.name})
        ports = self._fleet.answers(list(servers.values()), _PORT_S)
        for route in routes:
            order = self._order(route, ports.get(servers[route]) if route in servers else None)
            if "error" in order:
                found[route] = Trouble(f"{route.dst.label}: {order['error']}", bool(order.get("guilty")))
                continue
            jobs[route] = self._name(route.src)
            self._fleet.start(jobs[route], order)
        said = self._fleet.answers(list(jobs.values()), _JOB_S)
        for job in (*jobs.values(), *servers.values()):
            self._fleet.end(job)
        return found | {route: _read(route, said.get(job)) for route, job in jobs.items()}

    def _name(self, nic: Nic) -> JobName:
        return nic.host, f"{next(self._numbers)} {nic.name}"

    def _order(self, route: Route, server: Message | None) -> Message:
        src, dst = route.src, route.dst
        plan = _SOFT_PLAN if src.soft or dst.soft else _PLAN
        if src.host == dst.host:
            order = {"do": "pair", "source": src.name, "target": dst.name, "plan": plan}
            return {**order, "gpu": src.gpu} if route.gpu else order
        if server is None or "port" not in server:
            return server if server and "error" in server else {"error": _lost(_PORT_S, server)}
        host = self._fleet.address(dst.host)
        return {"do": "remote", "host": host, "port": server["port"], "device": src.name, "plan": plan}


def rounds(routes: Iterable[Route]) -> list[list[Route]]:
    """All of them, in as few rounds as come out one by one, no NIC twice in a round."""
    found: list[list[Route]] = []
    busy: dict[Nic, set[int]] = defaultdict(set)
    for route in routes:
        taken = busy[route.src] | busy[route.dst]
        number = next(at for at in range(len(taken) + 1) if at not in taken)
        if number == len(found):
            found.append([])
        found[number].append(route)
        busy[route.src].add(number)
        busy[route.dst].add(number)
    return found


def _read(route: Route, said: Message | None) -> Speed | Trouble:
    if said is None:
        return Trouble(_GONE.format(_JOB_S), True)
    if "rows" not in said:
        return Trouble(str(said.get("error") or _lost(_JOB_S, said)), bool(said.get("guilty")))
    rows = said["rows"]
    bandwidth = max((row for row in rows if "each_bps" in row), key=lambda row: row["bytes"])
    latency = min((row for row in rows if "each_us" in row), key=lambda row: row["bytes"])
    if route.src.soft or route.dst.soft:  # whatever else runs on their cores only adds to it
        return Speed(max(bandwidth["each_bps"]), min(latency["each_us"]), rows)
    return Speed(bandwidth["median_bps"], latency["median_us"], rows)


def _lost(limit_s: float, said: Message | None = None) -> str:
    """Why a job gave no answer; nobody is guilty of that."""
    how = str(said["died"]) if said and "died" in said else _GONE.format(limit_s)
    return f"its measurement {how}; see the ranks' log (--out)"
