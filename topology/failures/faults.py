"""Parts of a fabric that can fail, and the directed links that die with them.

A *link* is a cable, both directions; an *optic* is one port of a ToR, with every lane of it (a split downlink port
takes two NICs along, an uplink port that is broken out two uplinks); a *rail* is all its ToRs; a *peer-link* joins two
switches of one height. Ports without a cable do not count. Which links a part has, the fabric says. Not covered: what a
failure costs (sweep), and links that drop packets but stay up.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from netlayer.errors import ConfigError
from topology.fabric.imported import ImportedFabric
from topology.fabric.interface import PART_KINDS, Fabric, PartKind

FailureKind = PartKind
KINDS = PART_KINDS


_MOST_DIGITS = 18


class Failure(NamedTuple):
    """One thing that fails: the `number`-th of its kind."""

    kind: FailureKind
    number: int

    def __str__(self) -> str:
        return f"{self.kind}:{self.number}"


def parse_failure(text: str, fabric: Fabric) -> Failure:
    """`spine:3`.

    Raises:
        ConfigError: the kind is unknown, or there is no such part.
    """
    kind, _, number = text.partition(":")
    known = next((one for one in KINDS if one == kind), None)
    if known is None or not (number.isascii() and number.isdecimal() and len(number) <= _MOST_DIGITS):
        rule = f"is no failure: a kind ({', '.join(KINDS)}), a colon, a number"
        raise ConfigError("failure", text, rule, "write spine:3")
    if int(number) >= (most := fabric.count(known)):
        rule = f"the fabric has {most} of kind {kind}"
        raise ConfigError("failure", text, rule, f"give a number below {most}" if most else "take another kind")
    return Failure(known, int(number))


def parse_failures(text: str, fabric: Fabric) -> list[Failure]:
    """`spine:3`; on an imported fabric also a switch by its name, or every cable between two devices as `A,B`.

    Raises:
        ConfigError: as `parse_failure`; no part has such a name.
    """
    if isinstance(fabric, ImportedFabric) and text.partition(":")[0] not in KINDS:
        return [Failure(*part) for part in fabric.find_part(text, "--part")]
    return [parse_failure(text, fabric)]


def count(fabric: Fabric, kind: FailureKind) -> int:
    """Return the number of parts of a kind."""
    return fabric.count(kind)


def single_failures(fabric: Fabric, kind: FailureKind, most: int | None, seed: int) -> list[Failure]:
    """Return each part of a kind alone; where there are more, `most` of them drawn by seed, in order."""
    number = count(fabric, kind)
    if most is None or number <= most:
        return [Failure(kind, index) for index in range(number)]
    drawn = np.random.default_rng([seed, KINDS.index(kind)]).choice(number, most, replace=False)
    return [Failure(kind, int(index)) for index in np.sort(drawn)]


def random_failures(fabric: Fabric, kinds: Sequence[FailureKind], together: int, seed: int) -> tuple[Failure, ...]:
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


def alive_links(fabric: Fabric, failures: Sequence[Failure]) -> NDArray[np.bool_]:
    """A mask over links: those that these failures leave."""
    alive = np.ones(fabric.num_links, dtype=np.bool_)
    for failure in failures:
        alive[fabric.part_links(failure.kind, failure.number)] = False
    return alive


def lost_capacity(fabric: Fabric, alive: NDArray[np.bool_]) -> tuple[float, float]:
    """Capacity of dead links, one direction, bits per second; and the share lost in the tier hit hardest."""
    lost, worst = 0.0, 0.0
    for links in fabric.cable_links:
        gone = float(fabric.link_bps[links][~alive[links]].sum())
        lost, worst = lost + gone, max(worst, gone / float(fabric.link_bps[links].sum()) if gone else 0.0)
    return lost, worst
