"""Parts of a fabric that can fail, and the directed links that die with them.

A *link* is a cable, both directions; an *optic* is one port of a ToR, with every lane of it (a split downlink port
takes two NICs along, an uplink port that is broken out two uplinks); a *rail* is all its ToRs. Ports without a cable do
not count. Not covered: what a failure costs (sweep), and links that drop packets but stay up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from netlayer.errors import ConfigError
from topology.fabric.clos import Clos, Ints, Tier

FailureKind = Literal["nic-link", "tor-link", "core-link", "optic-down", "optic-up", "tor", "spine", "core", "rail"]
KINDS: tuple[FailureKind, ...] = get_args(FailureKind)

_LINKS: dict[FailureKind, tuple[Tier, Tier]] = {
    "nic-link": (Tier.NIC_TOR, Tier.TOR_NIC),
    "tor-link": (Tier.TOR_SPINE, Tier.SPINE_TOR),
    "core-link": (Tier.SPINE_CORE, Tier.CORE_SPINE),
}


_MOST_DIGITS = 18


class Failure(NamedTuple):
    """One thing that fails: the `number`-th of its kind."""

    kind: FailureKind
    number: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.number}"


def parse_failure(text: str, fabric: Clos) -> Failure:
    """`spine:3`.

    Raises:
        ConfigError: the kind is unknown, or there is no such part.
    """
    kind, _, number = text.partition(":")
    known = next((one for one in KINDS if one == kind), None)
    if known is None or not (number.isascii() and number.isdecimal() and len(number) <= _MOST_DIGITS):
        rule = f"is no failure: a kind ({', '.join(KINDS)}), a colon, a number"
        raise ConfigError("failure", text, rule, "write spine:3")
    if int(number) >= (most := count(fabric, known)):
        rule = f"the fabric has {most} of kind {kind}"
        raise ConfigError("failure", text, rule, f"give a number below {most}" if most else "take another kind")
    return Failure(known, int(number))


def count(fabric: Clos, kind: FailureKind) -> int:
    """Return the number of parts of a kind."""
    design = fabric.design
    if kind in _LINKS:
        span = fabric.tier_links(_LINKS[kind][0])
        return int(span.stop - span.start)
    counts: dict[FailureKind, int] = {
        "optic-down": int(_filled_ports(fabric).sum()),
        "optic-up": design.num_tors * design.tor_ports_up,
        "tor": design.num_tors,
        "spine": design.num_spines,
        "core": design.num_cores,
        "rail": design.rails,
    }
    return counts[kind]


def single_failures(fabric: Clos, kind: FailureKind, most: int | None, seed: int) -> list[Failure]:
    """Return each part of a kind alone; where there are more, `most` of them drawn by seed, in order."""
    number = count(fabric, kind)
    if most is None or number <= most:
        return [Failure(kind, index) for index in range(number)]
    drawn = np.random.default_rng([seed, KINDS.index(kind)]).choice(number, most, replace=False)
    return [Failure(kind, int(index)) for index in np.sort(drawn)]


def random_failures(fabric: Clos, kinds: Sequence[FailureKind], together: int, seed: int) -> tuple[Failure, ...]:
    """`together` different parts that fail at one time, each part of these kinds as likely.

    Raises:
        ConfigError: the fabric has fewer such parts.
    """
    sizes = np.array([count(fabric, kind) for kind in kinds], dtype=np.int64)
    if together > sizes.sum():
        rule = f"the fabric has {sizes.sum()} of kind {', '.join(kinds)}"
        raise ConfigError("--together", together, rule, "lower it")
    drawn = np.sort(np.random.default_rng([seed, together]).choice(int(sizes.sum()), together, replace=False))
    ends = np.cumsum(sizes)
    owner = np.searchsorted(ends, drawn, side="right")
    return tuple(
        Failure(kinds[kind], int(index)) for kind, index in zip(owner, drawn - (ends - sizes)[owner], strict=True)
    )


def alive_links(fabric: Clos, failures: Sequence[Failure]) -> NDArray[np.bool_]:
    """A mask over links: those that these failures leave."""
    alive = np.ones(fabric.num_links, dtype=np.bool_)
    dead_nodes: list[Ints] = []
    for failure in failures:
        if failure.kind in _LINKS:
            _cut(fabric, alive, failure.kind, np.array([failure.number]))
        elif failure.kind == "optic-down":
            _cut(fabric, alive, "nic-link", _port_nics(fabric, failure.number))
        elif failure.kind == "optic-up":
            _cut(fabric, alive, "tor-link", _port_uplinks(fabric, failure.number))
        else:
            dead_nodes.append(_nodes(fabric, failure))
    if dead_nodes:
        dead = np.zeros(fabric.num_nodes, dtype=np.bool_)
        dead[np.concatenate(dead_nodes)] = True
        alive &= ~(dead[fabric.link_src] | dead[fabric.link_dst])
    return alive


def lost_capacity(fabric: Clos, alive: NDArray[np.bool_]) -> tuple[float, float]:
    """Capacity of dead links, one direction, bits per second; and the share lost in the tier hit hardest."""
    lost, worst = 0.0, 0.0
    for tier in (Tier.NIC_TOR, Tier.TOR_SPINE, Tier.SPINE_CORE):
        span = fabric.tier_links(tier)
        gone = float(fabric.link_bps[span][~alive[span]].sum())
        lost, worst = lost + gone, max(worst, gone / fabric.tier_bps(tier) if gone else 0.0)
    return lost, worst


def _cut(fabric: Clos, alive: NDArray[np.bool_], kind: FailureKind, index: Ints) -> None:
    for tier in _LINKS[kind]:
        alive[index + int(fabric.tier_start[tier])] = False


def _nodes(fabric: Clos, failure: Failure) -> Ints:
    index = np.array([failure.number])
    if failure.kind == "rail":
        return fabric.tor_nodes(fabric.tors_of_rail(failure.number))
    by_kind = {"tor": fabric.tor_nodes, "spine": fabric.spine_nodes, "core": fabric.core_nodes}
    return by_kind[failure.kind](index)


def _filled_ports(fabric: Clos) -> Ints:
    """Downlink ports of each ToR that have a NIC: fewer where its ToR set is partly filled."""
    nics = np.bincount(fabric.tor_of(np.arange(fabric.design.num_nics)), minlength=fabric.design.num_tors)
    return -(-nics // fabric.design.lanes_per_port)


def _port_nics(fabric: Clos, port: int) -> Ints:
    """NICs on one of all filled downlink ports, ToR after ToR: filled in order of server, then of the NIC in it."""
    design, ends = fabric.design, np.cumsum(_filled_ports(fabric))
    tor = int(np.searchsorted(ends, port, side="right"))
    inside = port - (int(ends[tor - 1]) if tor else 0)
    nics = np.flatnonzero(fabric.tor_of(np.arange(design.num_nics)) == tor)
    return nics[inside * design.lanes_per_port : (inside + 1) * design.lanes_per_port]


def _port_uplinks(fabric: Clos, port: int) -> Ints:
    """Uplinks on an uplink port: one with the split, as many as there are lanes without."""
    design = fabric.design
    links = design.tor_uplinks // design.tor_ports_up
    return port * links + np.arange(links)
