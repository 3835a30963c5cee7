"""Cables from the neighbours that each device reports: both ends must agree.

A device whose own file was given must list each cable that a neighbour claims to have to it; a device known by its
neighbours alone is believed. Not covered: how a format says any of that.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from netlayer.errors import ConfigError
from topology.fabric.graph import Graph, checked
from topology.importers.files import show

logger = logging.getLogger(__name__)

_LATENCY_NS = 1000.0
# Ports of SONiC, EOS, NX-OS, Cumulus, Junos and SR Linux; those of a host are eth0, ens1f0np0, mlx5_0, rdma0.
SWITCH_PORT = re.compile(r"(Ethernet|Eth|swp|[egx]e-|ethernet-|hundredGigE|fortyGigE)[0-9][0-9/:.-]*")

End = tuple[str, str]


@dataclass(frozen=True)
class Sighting:
    """One end's view of a cable: its device and port, the neighbour, and the names that the neighbour's port may have.

    `path` is the file that says so; `bps` is 0 where the rate is unknown.
    """

    path: Path
    device: str
    port: str
    neighbour: str
    neighbour_ports: tuple[str, ...]
    bps: float


@dataclass(frozen=True)
class _Known:
    """Ports of the devices whose own file was read, and all sightings: by their end, by what they claim."""

    own: Mapping[str, frozenset[str]]
    seen: Mapping[End, Sighting]
    claims: Mapping[tuple[str, str, str], Sighting]


def to_graph(
    sightings: Sequence[Sighting],
    own: Mapping[str, frozenset[str]],
    switches: frozenset[str],
    *,
    default_bps: float,
    skip_dangling: bool,
    source: Path,
) -> Graph:
    """Return the fabric of all sightings; a host becomes one node a port, so that its NICs are endpoints as in `Clos`.

    Args:
        sightings: every end that was reported.
        own: devices whose own file was read, with all ports that it names.
        switches: the devices that forward.
        default_bps: rate of a cable whose rate no end reports, 0 for none.
        skip_dangling: omit, with a warning, a cable that its other end does not confirm.
        source: for messages.

    Raises:
        ConfigError: the ends contradict each other, a cable dangles, or a rate is unknown; see also `graph.checked`.
    """
    known = _Known(
        own,
        seen={(one.device, one.port): one for one in sightings},
        claims={(one.device, one.neighbour, port): one for one in sightings for port in one.neighbour_ports},
    )
    if len(known.seen) != len(sightings):
        _fail_twice(sightings)
    cables: dict[tuple[End, End], float] = {}
    dropped = 0
    for one in sightings:
        other = _other_end(one, known)
        if other is None:
            if not skip_dangling:
                there = f"{one.neighbour}:{one.neighbour_ports[0]}"
                rule = f"sees {there}, whose own file does not list it: a dangling link of {show(one.path)}"
                remedy = "fetch both files again, or pass --skip-dangling"
                raise ConfigError("link", f"{one.device}:{one.port}", rule, remedy)
            dropped += 1
            continue
        ends = _ordered((one.device, one.port), other, switches)
        cables[ends] = _rate(one, known.seen.get(other), default_bps)
    if dropped:
        logger.warning("%d links omitted: their other end does not list them", dropped)
    _check_far_ports(cables)
    return checked(_graph(cables, switches), source)


def _other_end(one: Sighting, known: _Known) -> End | None:
    """The neighbour's end; None where its own file does not confirm it."""
    if one.neighbour not in known.own:
        return one.neighbour, one.neighbour_ports[0]
    named = [known.seen.get((one.neighbour, port)) for port in one.neighbour_ports]
    back = next((end for end in named if end), None) or known.claims.get((one.neighbour, one.device, one.port))
    if back is None:
        return None
    # A port that its owner does not know by that name is an alias, and proves nothing.
    ours = known.own[one.neighbour].intersection(one.neighbour_ports)
    theirs = known.own[one.device].intersection(back.neighbour_ports)
    agree = (not ours or back.port in ours) and (not theirs or one.port in theirs)
    if back.neighbour != one.device or not agree:
        rule = (
            f"sees {one.neighbour}:{one.neighbour_ports[0]} in {show(one.path)}, but {back.device}:{back.port} sees "
            f"{back.neighbour}:{back.neighbour_ports[0]} in {show(back.path)}"
        )
        raise ConfigError("link", f"{one.device}:{one.port}", rule, "fetch both files again at one time")
    return one.neighbour, back.port


def _rate(one: Sighting, back: Sighting | None, default_bps: float) -> float:
    rates = {end.bps for end in (one, back) if end is not None and end.bps}
    if len(rates) > 1:
        files = f" ({show(one.path)}, {show(back.path)})" if back else ""
        rule = f"has {min(rates):.0f} bit/s at one end and {max(rates):.0f} at the other{files}"
        raise ConfigError("link", f"{one.device}:{one.port}", rule, "give both ends one speed")
    if not rates and not default_bps:
        raise ConfigError("link", f"{one.device}:{one.port}", "has no known rate", "pass --rate, such as --rate 400G")
    return rates.pop() if rates else default_bps


def _ordered(one: End, other: End, switches: frozenset[str]) -> tuple[End, End]:
    """The two ends of a cable, the host first, else by name: one order for both sightings."""
    low, high = sorted((one, other), key=lambda end: (end[0] in switches, end))
    return low, high


def _check_far_ports(cables: Mapping[tuple[End, End], float]) -> None:
    owners: dict[End, tuple[End, End]] = {}
    for ends in cables:
        for end, far in (ends, ends[::-1]):
            owner = owners.setdefault(end, ends)
            if owner != ends:
                others = sorted(
                    {":".join(near) for pair in (owner, ends) for near in pair if near != end} | {":".join(far)}
                )
                rule = f"is the far end of two links: {' and '.join(others)}"
                raise ConfigError("link", ":".join(end), rule, "fetch the files again at one time")


def _fail_twice(sightings: Sequence[Sighting]) -> None:
    known: dict[End, Sighting] = {}
    for one in sightings:
        other = known.setdefault((one.device, one.port), one)
        if other is not one:
            rule = f"is listed twice in {show(one.path)}: towards {other.neighbour} and {one.neighbour}"
            raise ConfigError("link", f"{one.device}:{one.port}", rule, "keep the one that is plugged in")


def _graph(cables: Mapping[tuple[End, End], float], switches: frozenset[str]) -> Graph:
    def node(end: End) -> str:
        return end[0] if end[0] in switches else f"{end[0]}/{end[1]}"

    ordered = sorted(cables, key=lambda ends: (ends[0][0] in switches, _natural(ends)))
    names = sorted(
        {node(end) for ends in ordered for end in ends}, key=lambda name: (name in switches, natural_key(name))
    )
    ids = {name: number for number, name in enumerate(names)}
    return Graph(
        names=tuple(names),
        is_switch=np.array([name in switches for name in names], dtype=np.bool_),
        a=np.array([ids[node(low)] for low, _ in ordered], dtype=np.int64),
        b=np.array([ids[node(high)] for _, high in ordered], dtype=np.int64),
        bps=np.array([cables[ends] for ends in ordered], dtype=np.float64),
        latency_ns=np.full(len(ordered), _LATENCY_NS),
        a_port=tuple(low[1] for low, _ in ordered),
        b_port=tuple(high[1] for _, high in ordered),
    )


def _natural(ends: tuple[End, End]) -> tuple[list[tuple[int, str]], ...]:
    return tuple(natural_key(text) for end in ends for text in end)


def natural_key(text: str) -> list[tuple[int, str]]:
    """Sort key that puts Ethernet8 before Ethernet16."""
    return [(int(part) if part.isdigit() else -1, part) for part in re.findall(r"[0-9]+|[^0-9]+", text)]
