"""Measurement of RDMA NICs between the hosts of a run, as jobs of the agents (`congestion.verbs.job`).

Routes that share no NIC are measured in parallel, in rounds. Judgement is in `verbs`.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from bench.accept.agents.fleet import Fleet, JobName
from bench.accept.agents.wire import Message

_LOOK_S, _PORT_S, _JOB_S = 30.0, 30.0, 90.0
_LOOK = "look"
_GONE = "gave no answer within {:g} s"
# 6 retries, since rxe retries forever at 7; a dead path is reported within a second. One size for bandwidth, one for
# latency.
_SETTINGS = {"timeout": 14, "retry_cnt": 6}
_COMMON = {"kinds": ["write"], "repeats": 3, "patience_s": 10.0, "settings": _SETTINGS}
_PLAN = {**_COMMON, "sizes": [64, 4 << 20], "messages": 32, "window": 8, "pings": 100}
_SOFT_PLAN = {**_COMMON, "sizes": [64, 1 << 16], "messages": 32, "window": 16, "pings": 40}


@dataclass(frozen=True)
class Nic:
    """RDMA device of a host.

    Args:
        host, name: host and device name.
        rate: rate as printed by the kernel; only NICs of equal rate are peers.
        soft: True for a software device (rxe, siw), which uses the host's cores.
        gpu: PCI address of the nearby GPU whose memory is used; empty if there is none.
        rail: its index among its host's NICs of that rate.
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
    """Path from a NIC to another one or to itself; with `gpu`, out of the memory of the source's GPU."""

    src: Nic
    dst: Nic
    gpu: bool = False


class Speed(NamedTuple):
    """Measured speed of a route: bits per second, and round-trip time in microseconds."""

    bps: float
    latency_us: float
    rows: Sequence[Mapping[str, Any]] = ()


class RouteFailure(NamedTuple):
    """Failure of a route; `is_hardware_fault`: a NIC or link is to blame."""

    reason: str
    is_hardware_fault: bool


RouteResults = dict[Route, Speed | RouteFailure]


class NicJobs:
    """NIC measurements through the agents of a run."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._numbers = itertools.count()  # unique names: the end of a job may be reported while the next one runs

    def look(self, hosts: Sequence[str]) -> dict[str, Message]:
        """Return the `devices` of each host, or an `error`."""
        jobs = [(host, _LOOK) for host in hosts]
        for job in jobs:
            self._fleet.start(job, {"do": "look"})
        answers = self._fleet.answers(jobs, _LOOK_S)
        return {job[0]: answers.get(job) or {"error": _lost(_LOOK_S)} for job in jobs}

    def measure(self, routes: Sequence[Route]) -> RouteResults:
        """Measure routes that share no NIC in parallel.

        They send for milliseconds and check the data for longer, so that they hardly disturb each other.
        """
        jobs, results = dict[Route, JobName](), RouteResults()
        servers = {route: self._name(route.dst) for route in routes if route.src.host != route.dst.host}
        for route, server in servers.items():
            # Listen at all addresses, since the host does not know by which one the others reach it.
            listen_address = "127.0.0.1" if self._fleet.address(route.dst.host) == "127.0.0.1" else ""
            self._fleet.start(server, {"do": "lend", "host": listen_address, "device": route.dst.name})
        ports = self._fleet.answers(list(servers.values()), _PORT_S)
        for route in routes:
            order = self._order(route, ports.get(servers[route]) if route in servers else None)
            if "error" in order:
                results[route] = RouteFailure(f"{route.dst.label}: {order['error']}", bool(order.get("guilty")))
                continue
            jobs[route] = self._name(route.src)
            self._fleet.start(jobs[route], order)
        answers = self._fleet.answers(list(jobs.values()), _JOB_S)
        for job in (*jobs.values(), *servers.values()):
            self._fleet.end(job)
        return results | {route: _parse_answer(route, answers.get(job)) for route, job in jobs.items()}

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
    """Assign routes greedily to rounds, so that no NIC is used twice in a round."""
    result: list[list[Route]] = []
    busy: dict[Nic, set[int]] = defaultdict(set)
    for route in routes:
        used_rounds = busy[route.src] | busy[route.dst]
        number = next(at for at in range(len(used_rounds) + 1) if at not in used_rounds)
        if number == len(result):
            result.append([])
        result[number].append(route)
        busy[route.src].add(number)
        busy[route.dst].add(number)
    return result


def _parse_answer(route: Route, answer: Message | None) -> Speed | RouteFailure:
    if answer is None:
        return RouteFailure(_GONE.format(_JOB_S), True)
    if "rows" not in answer:
        return RouteFailure(str(answer.get("error") or _lost(_JOB_S, answer)), bool(answer.get("guilty")))
    rows = answer["rows"]
    bandwidth = max((row for row in rows if "each_bps" in row), key=lambda row: row["bytes"])
    latency = min((row for row in rows if "each_us" in row), key=lambda row: row["bytes"])
    if route.src.soft or route.dst.soft:  # other work on the cores only adds time
        return Speed(max(bandwidth["each_bps"]), min(latency["each_us"]), rows)
    return Speed(bandwidth["median_bps"], latency["median_us"], rows)


def _lost(limit_s: float, answer: Message | None = None) -> str:
    """Return the error for a job without an answer, which is no hardware fault."""
    reason = str(answer["died"]) if answer and "died" in answer else _GONE.format(limit_s)
    return f"its measurement {reason}; see the ranks' log (--out)"
