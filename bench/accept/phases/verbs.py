"""NIC phase: each NIC to its own host's and GPU's memory, to the other NICs of its host, and to those of its rail.

NICs of equal rate are compared with each other, like ranks in the pairs phase; outliers and failures are measured
again, alone, before they are flagged. A host without an RDMA device or pyverbs is reported, and fails with --verbs
require. Not covered: several queue pairs at a time, and paths between different rails.
"""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal, Protocol, get_args

from bench.accept.agents.wire import Message
from bench.accept.phases.matrix import Score, find_ends, judge_logs, judge_matrix
from bench.accept.phases.nics import Nic, Route, RouteFailure, RouteResults, Speed, rounds
from bench.accept.phases.trial import Say, Trial
from netlayer.units import format_rate
from netlayer.verdict import MIN_PEERS, Finding, Verdict

PHASE = "verbs"
Mode = Literal["auto", "require", "off"]
MODES: tuple[Mode, ...] = get_args(Mode)
Quantity = Literal["bandwidth", "latency"]
Key = tuple[int, ...]
"""Index of a NIC, or indices of the two NICs of a link."""

# Minimum slowdown for software NICs, whose packets use shared cores: less is noise.
_SOFT_RATIO = 4.0
_NEEDED = "RDMA NICs and pyverbs; without them --verbs require fails"
_OWN = "read lspci -vv (LnkSta, MaxReadReq, ACS) and the NUMA node of {}; where both are as its peers' have, swap it"
_MEET = "swap cable and transceiver of {}, then the switch port, then the NIC: the fault moves with the part"
_LINK = "run the pairs of {} over another path (--flow-label); where it stays, swap cables, then the switch port"
_AGAIN = "watch the error counters of {} (netlayer nic watch), and run it again"
_STEPS = {
    "loopback": _OWN,
    "loopback to GPU memory": "see nvidia-smi topo -m and ACS of {}: its GPU should be behind the same PCIe switch",
    "across hosts": _MEET,
    "inside the host": _MEET,
}


class Measures(Protocol):
    """Interface of the measurements that this phase needs (`nics.NicJobs`)."""

    def look(self, hosts: Sequence[str]) -> dict[str, Message]: ...

    def measure(self, routes: Sequence[Route]) -> RouteResults: ...


def measure_verbs(trial: Trial, jobs: Measures, mode: Mode, say: Say) -> None:
    """Measure and judge all NICs of the hosts with ranks alive."""
    nics = _find_nics(trial, jobs, mode)
    groups: dict[tuple[str, bool], list[Nic]] = defaultdict(list)
    for nic in nics:
        groups[nic.rate, nic.soft].append(nic)
    for group in groups.values():
        remaining = group
        bad = set[Nic]()
        for name in _STEPS:
            series = _Series(trial, jobs, mode, name, group, bad)
            series.run(_routes(name, remaining), say)
            bad |= series.bad
            # A NIC that cannot even reach its own memory is not measured further.
            remaining = [nic for nic in remaining if nic not in series.unreachable]


def _find_nics(trial: Trial, jobs: Measures, mode: Mode) -> list[Nic]:
    """Return the NICs that can be measured; add a finding for those that cannot."""
    hosts = list(dict.fromkeys(trial.members[rank].host for rank in trial.alive))
    answers = jobs.look(hosts)
    nics = list[Nic]()
    reasons = dict[str, str]()
    for host in hosts:
        if "error" in answers[host]:
            reasons[host] = answers[host]["error"]
        nics += _nics_of(host, answers[host].get("devices", []))
        device_reasons = {f"{host}: {one['name']}": one["lacks"] for one in answers[host].get("devices", [])}
        reasons |= {label: reason for label, reason in device_reasons.items() if reason}
    for subject, reason in reasons.items():
        # A host without NICs is odd if others have some.
        verdict: Verdict | None = "FAIL" if mode == "require" else "WARN" if nics and subject in hosts else None
        _add_not_run(trial, verdict, PHASE, subject, reason, [subject.partition(": ")[0]])
    return nics


def _add_not_run(
    trial: Trial, verdict: Verdict | None, check: str, subject: str, reason: str, hosts: Sequence[str]
) -> None:
    what, _, remedy = reason.partition("; ")
    finding = Finding(verdict, subject, check, f"not run: {what}", _NEEDED, remedy, PHASE)
    trial.flag(PHASE, "host", _ranks_of(trial, hosts), finding, label=subject)


def _ranks_of(trial: Trial, hosts: Collection[str]) -> list[int]:
    return [rank for rank in trial.alive if trial.members[rank].host in hosts]


def _nics_of(host: str, devices: Sequence[Mapping[str, Any]]) -> Iterator[Nic]:
    rails: dict[str, int] = defaultdict(int)
    shared: dict[tuple[str, ...], int] = defaultdict(int)
    for one in devices:
        if one["lacks"]:
            continue
        gpus = tuple(one["gpus"])
        gpu = gpus[shared[gpus] % len(gpus)] if gpus else ""
        yield Nic(host, one["name"], one["rate"], one["soft"], gpu, rails[one["rate"]])
        rails[one["rate"]] += 1
        shared[gpus] += 1


def _routes(name: str, nics: Sequence[Nic]) -> list[Route]:
    if name.startswith("loopback"):
        gpu = name != "loopback"
        return [Route(nic, nic, gpu) for nic in nics if nic.gpu or not gpu]
    every = ((src, dst) for src in nics for dst in nics if src != dst)
    inside = name == "inside the host"
    return [
        Route(src, dst) for src, dst in every if (src.host == dst.host) == inside and (inside or src.rail == dst.rail)
    ]


class _Series:
    """Measurement and judgement of routes of one kind between NICs of equal rate."""

    def __init__(
        self, trial: Trial, jobs: Measures, mode: Mode, name: str, nics: Sequence[Nic], known: Collection[Nic]
    ) -> None:
        self._trial, self._jobs, self._mode, self._name, self._nics = trial, jobs, mode, name, list(nics)
        self._number = {nic: at for at, nic in enumerate(nics)}
        self._ratio = _SOFT_RATIO if nics[0].soft else 1.0
        self._speeds = dict[Route, Speed]()
        self._troubles = dict[Route, RouteFailure]()
        self._known = {(self._number[nic],) for nic in known}
        self.unreachable, self.bad = set[Nic](), set[Nic]()

    def run(self, routes: Sequence[Route], say: Say) -> None:
        if not routes:
            return
        batches = [[route] for route in routes] if self._nics[0].soft else rounds(routes)
        for at, batch in enumerate(batches):
            say(at, len(batches) + 1, f"{self._name}, {len(self._nics)} NICs")
            self._add_results(self._jobs.measure(batch))
        once = {route: trouble for route, trouble in self._troubles.items() if trouble.is_hardware_fault}
        odd = self._outliers()
        for route in [route for route in routes if route in once or self._key(route) in odd]:
            say(len(batches), len(batches) + 1, f"{self._name}, again: what stands out")
            self._add_results(self._jobs.measure([route]))
        self._conclude(once)

    def _add_results(self, results: RouteResults) -> None:
        """Add results; of two measurements of a route the better one counts, and a success replaces a failure."""
        for route, one in results.items():
            if isinstance(one, RouteFailure):
                self._troubles[route] = one
                continue
            self._troubles.pop(route, None)
            before = self._speeds.get(route, one)
            best = Speed(max(one.bps, before.bps), min(one.latency_us, before.latency_us))
            self._speeds[route] = best
            about = {"check": PHASE, "phase": PHASE, "host": route.src.host, "remote_host": route.dst.host}
            self._trial.rows += [{**row, **about, "series": self._name} for row in one.rows]

    def _key(self, route: Route) -> Key:
        src, dst = self._number[route.src], self._number[route.dst]
        return (src,) if src == dst else (src, dst)

    def _outliers(self) -> set[Key]:
        """Return the NICs and links that are outliers now, and all links of outlier NICs."""
        bad = {key for scores in self._scores().values() for key, one in scores.items() if one.verdict != "PASS"}
        links = {self._key(route) for route in self._speeds}
        return bad | {link for link in links for end in link if (end,) in bad}

    def _scores(self) -> dict[Quantity, dict[Key, Score]]:
        """Score NICs and links against each other; empty if there are too few."""
        scores: dict[Quantity, dict[Key, Score]] = {}
        for quantity in get_args(Quantity):
            values = {
                self._key(route): one.bps if quantity == "bandwidth" else 1 / one.latency_us
                for route, one in self._speeds.items()
            }
            if len({tuple(sorted(key)) for key in values}) >= MIN_PEERS:
                scores[quantity] = self._judge_values(values)
        return scores

    def _judge_values(self, values: Mapping[Key, float]) -> dict[Key, Score]:
        directed = {(key[0], key[1]): value for key, value in values.items() if len(key) == 2}
        partners: dict[int, set[int]] = defaultdict(set)
        for src, dst in directed:
            partners[src].add(dst)
        # Of two NICs without other partners, the bad one cannot be told: then links are judged.
        if directed and min(map(len, partners.values())) > 1 and (matrix := judge_matrix(directed, self._ratio)):
            nodes: dict[Key, Score] = {(node,): score for node, score in matrix.nodes.items()}
            links: dict[Key, Score] = {pair: score for pair, score in matrix.links.items()}  # noqa: C416 - its keys' type
            return nodes | links
        middle = statistics.median(values.values())
        return judge_logs({key: math.log(value / middle) for key, value in values.items()}, self._ratio)

    def _conclude(self, once: Mapping[Route, RouteFailure]) -> None:
        """Add findings on failures, slow NICs and links, and the good ones; a known bad NIC is flagged only once."""
        flagged: set[Key] = set(self._known)
        for key, figure, verdict in self._failures(once):
            if not _parts(key) & flagged:
                flagged.add(key)
                self._flag(key, "works", figure, "every byte right", verdict)
        self._report_not_run()
        bad = [
            (len(key), score.share, key, quantity, score)
            for quantity, scores in self._scores().items()
            for key, score in scores.items()
            if score.verdict != "PASS"
        ]
        for _, _, key, quantity, score in sorted(bad, key=lambda one: one[:2]):  # NICs first, the worst first
            if not _parts(key) & flagged:
                ends = tuple(sorted(key))
                flagged.add(ends)
                figure = f"{self._figure(quantity, key)}: {score.share:.3f} of the speed of its peers"
                expected = f"peers: {score.peers.num_peers}, MAD {score.peers.mad:.3f}"
                self._flag(ends, quantity, figure, expected, score.verdict)
        good = [route for route in self._speeds if not _parts(self._key(route)) & flagged]
        if good:
            self._trial.findings.append(self._passed(good))

    def _failures(self, once: Mapping[Route, RouteFailure]) -> Iterator[tuple[Key, str, Verdict]]:
        """Yield the culprits of failed routes; those that passed the second time are a warning."""
        if self._name == "loopback":
            self.unreachable = {route.src for route in self._troubles}
        still = {route: one for route, one in self._troubles.items() if one.is_hardware_fault}
        for key, reason in self._culprits(still):
            yield key, reason, "FAIL"
        for key, reason in self._culprits({route: one for route, one in once.items() if route not in self._troubles}):
            yield key, f"{reason}; the second time it passed", "WARN"

    def _culprits(self, failed: Mapping[Route, RouteFailure]) -> Iterator[tuple[Key, str]]:
        reasons = {self._key(route): one.reason for route, one in failed.items()}
        yield from ((key, reason) for key, reason in reasons.items() if len(key) == 1)
        for ends, pairs in find_ends([(key[0], key[1]) for key in reasons if len(key) == 2]):
            yield ends, f"{reasons[pairs[0]]}; in {len(pairs)} directions"

    def _report_not_run(self) -> None:
        not_run = {route: one for route, one in self._troubles.items() if not one.is_hardware_fault}
        if not not_run:
            return
        route, first = next(iter(not_run.items()))
        what, _, remedy = first.reason.partition("; ")
        more = f", {len(not_run)} like it" if len(not_run) > 1 else ""
        verdict: Verdict | None = "FAIL" if self._mode == "require" else None
        check, subject = f"verbs {self._name}", self._label(self._key(route))
        hosts = [end.host for end in (route.src, route.dst)]
        _add_not_run(self._trial, verdict, check, subject, f"{what}{more}; {remedy}", hosts)

    def _flag(self, key: Key, quantity: str, figure: str, expected: str, verdict: Verdict) -> None:
        subject = self._label(key)
        step = _AGAIN if verdict == "WARN" else _STEPS[self._name] if len(key) == 1 else _LINK
        finding = Finding(
            verdict, subject, f"verbs {self._name} {quantity}", figure, expected, step.format(subject), PHASE
        )
        hosts = {self._nics[end].host for end in key}
        if verdict == "FAIL" and len(key) == 1:
            self.bad.add(self._nics[key[0]])
        kind = "NIC" if len(key) == 1 else "NIC link"
        self._trial.flag(PHASE, kind, _ranks_of(self._trial, hosts), finding, label=subject)

    def _label(self, key: Iterable[int]) -> str:
        return " - ".join(self._nics[end].label for end in key)

    def _figure(self, quantity: Quantity, key: Key) -> str:
        """Format the figure of a link, or the worst one of a NIC."""
        speeds = [one for route, one in self._speeds.items() if set(key) <= set(self._key(route))]
        return self._format(quantity, speeds)

    def _passed(self, good: Iterable[Route]) -> Finding:
        speeds = [self._speeds[route] for route in good]
        figure = f"worst {self._format('bandwidth', speeds)}, {self._format('latency', speeds)}; 0 wrong bytes"
        subject = f"{len(speeds)} {'NICs' if self._name.startswith('loopback') else 'directions'}, {self._nics[0].rate}"
        judged = bool(self._scores())
        expected = "like the others" if judged else f"{MIN_PEERS} NICs, or links, are needed to tell the odd one"
        return Finding("PASS" if judged else None, subject, f"verbs {self._name}", figure, expected, "", PHASE)

    @staticmethod
    def _format(quantity: Quantity, speeds: Iterable[Speed]) -> str:
        if quantity == "bandwidth":
            return format_rate(min(one.bps for one in speeds))
        return f"{max(one.latency_us for one in speeds):.1f} us"


def _parts(key: Key) -> set[Key]:
    """Return what may be flagged for a key: each end, and the link without direction."""
    return {(end,) for end in key} | {tuple(sorted(key))}
