"""Verdict on the claim that the ToR split halves hash collisions: by definition, load and hash, in numbers and words.

Three definitions: *in collision*, the share of flows on an uplink whose demand exceeds its capacity (ours); *excess*,
the demand above capacity over total demand; *sharing*, the share of flows that share an uplink at all, which others
call a collision. Each at rising load (part of a ToR's NICs send at full rate to other ToRs), in closed form for an
ideal hash and simulated for the hashes of switches. "Halves" is a ratio of at most a half. Not covered: downlinks.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from netlayer.config.tree import ClusterConfig
from netlayer.units import format_rate
from topology.ecmp.compare import CLOSED_FORM, split_by_load
from topology.ecmp.hashing import Ecmp, HashName
from topology.ecmp.load import load
from topology.fabric.clos import Clos, Tier
from topology.fabric.design import Design, plan
from topology.traffic.job import Flows, headers, permutation

Progress = Callable[[int, int, str], None]

DEFINITIONS = {"collision_share": "in collision", "excess": "excess", "sharing_share": "sharing"}
LOADS = tuple(eighth / 8 for eighth in range(1, 9))
FINE_LOADS = tuple(part / 64 for part in range(1, 65))
HALF = 0.5


Stretch = tuple[float, float]
_Shares = tuple[float, float, float, float]


@dataclass(frozen=True)
class UplinkShares:
    """Shares of the flows on ToR uplinks that collide, by each definition, at one load; all 0..1 but the counts.

    Args:
        split: with the ToR split.
        hash_name: a hash, or the closed form.
        load: share of a ToR's NICs that send at full rate to other ToRs.
        flows: on uplinks of one ToR (closed form), or of all, mean over the seeds.
        collision_share: flows on an uplink with more demand than capacity.
        excess: demand above capacity over all demand.
        sharing_share: flows that are not alone on their uplink.
        seeds: that were simulated; 0: predicted by the closed form.
    """

    split: bool
    hash_name: str
    load: float
    flows: float
    collision_share: float
    excess: float
    sharing_share: float
    seeds: int = 0

    @property
    def source(self) -> str:
        return "simulated" if self.seeds else "predicted"

    def to_row(self) -> dict[str, Any]:
        """Return the columns of a record."""
        figures = {"collision_share": self.collision_share, "excess": self.excess}
        if not self.seeds:
            columns = {"split": self.split, "source": self.source, "flows": self.flows, "load": self.load, **figures}
            return {**columns, "hash": self.hash_name, "sharing_share": self.sharing_share}
        columns = {"split": self.split, "hash": self.hash_name, "load": self.load, "source": self.source}
        return {**columns, "seeds": self.seeds, "flows": self.flows, **figures, "sharing_share": self.sharing_share}


@dataclass(frozen=True)
class SplitRatio:
    """Effect of the split on one definition of collisions, under one hash at one load.

    Args:
        definition: in words, of `DEFINITIONS`.
        load: share of a ToR's NICs that send.
        without, with_split: the definition's value, 0..1.
        ratio: with the split over without; None where nothing collides without it.
    """

    definition: str
    hash_name: str
    load: float
    source: str
    without: float
    with_split: float
    ratio: float | None

    def to_row(self) -> dict[str, Any]:
        """Return the columns of a record."""
        names = {"hash_name": "hash", "with_split": "with"}
        return {names.get(name, name): value for name, value in asdict(self).items()}


class Claim(NamedTuple):
    """Effect of the split on one definition under one hash: the stretches of load where it halves, lowers, raises it.

    Between the loads that were tried the ratio is taken to be a straight line, so that a stretch ends where the line
    crosses a half, or one. `last` is the ratio at the highest load; None where nothing collides there without split.
    """

    definition: str
    hash_name: str
    source: str
    halves: tuple[Stretch, ...]
    lowers: tuple[Stretch, ...]
    raises: tuple[Stretch, ...]
    first_load: float
    last_load: float
    last: float | None

    @property
    def words(self) -> str:
        """`halved up to 36% load, lowered from 36% load; x0.94 at full load`."""
        named = (("halved", self.halves), ("lowered", self.lowers), ("raised", self.raises))
        effects = sorted((low, high, verb) for verb, stretches in named for low, high in stretches)
        parts = [f"{verb} {self._where((low, high))}" for low, high, verb in effects]
        if len(effects) == 2 and math.isclose(effects[0][1], effects[1][0]):
            parts[1] = f"{effects[1][2]} above"
        text = ", ".join(parts) or "unchanged at every load"
        return text if self.last is None else f"{text}; x{self.last:.2f} at {_load(self.last_load)}"

    @property
    def has_effect(self) -> bool:
        """Whether the split changes it at any load."""
        return bool(self.halves or self.lowers or self.raises)

    @property
    def halved_to(self) -> float | None:
        """The load up to which it is halved without a gap; None where it is not at the lowest load."""
        return self.halves[0][1] if self.halves and self.halves[0][0] <= self.first_load else None

    def to_row(self) -> dict[str, Any]:
        """Return a line of texts and numbers for a table."""
        stretches = {"halved_at": self.halves, "lowered_at": self.lowers, "raised_at": self.raises}
        return {
            "definition": self.definition,
            "hash": self.hash_name,
            "source": self.source,
            **{key: " and ".join(self._where(one) for one in ranges) for key, ranges in stretches.items()},
            "ratio_at_last_load": self.last,
            "last_load": self.last_load,
        }

    def _where(self, stretch: Stretch) -> str:
        low, high = stretch
        first, last = low <= self.first_load, high >= self.last_load
        if first and last:
            return "at every load"
        if first:
            return f"up to {_load(high)}"
        return f"from {_load(low)}" if last else f"from {low:.0%} to {_load(high)}"


def closed_form(cluster: ClusterConfig, loads: Sequence[float] = FINE_LOADS) -> list[UplinkShares]:
    """Return the shares by all definitions for an ideal hash, of each load and split."""
    rows = split_by_load(cluster, loads)
    designs = {split: plan(cluster.model_copy(update={"aoc_split": split})) for split in (True, False)}
    return [
        UplinkShares(
            row.split,
            CLOSED_FORM,
            row.load,
            row.flows,
            row.collision_share,
            row.excess,
            _sharing(row.flows, designs[row.split]),
        )
        for row in rows
    ]


def simulated(
    fabrics: dict[bool, Clos],
    hashes: Sequence[HashName],
    seeds: Sequence[int],
    loads: Sequence[float] = LOADS,
    progress: Progress | None = None,
) -> list[UplinkShares]:
    """Return the same of real hashes on the ToR uplinks, means over the seeds; each ToR has its load of senders."""
    shares_of_case: dict[tuple[bool, HashName, float], list[_Shares]] = {}
    points = [(seed, share) for seed in seeds for share in loads]
    for done, (seed, share) in enumerate(points, start=1):
        flows = partial_load(fabrics[True], share, seed)
        tuples = headers(fabrics[True], flows, seed)
        for name in hashes:
            ecmp = Ecmp(name, tuples, seed)
            for split, fabric in fabrics.items():
                shares_of_case.setdefault((split, name, share), []).append(_uplinks(fabric, flows, ecmp))
        if progress:
            progress(done, len(points), f"seed {seed}, load {share:.0%}")
    return [
        UplinkShares(split, name, share, *_means(shares), seeds=len(shares))
        for (split, name, share), shares in shares_of_case.items()
    ]


def partial_load(fabric: Clos, share: float, seed: int) -> Flows:
    """Return a permutation of which `share` of each ToR's NICs send, drawn by seed; receivers stay as they fall."""
    flows = permutation(fabric, seed)
    senders = round(share * fabric.design.nics_per_tor)
    tor = fabric.tor_of(flows.src_nic)
    shuffled = np.random.default_rng([seed, 2]).permutation(len(flows))
    by_tor = shuffled[np.argsort(tor[shuffled], kind="stable")]
    start = np.searchsorted(tor[by_tor], np.arange(fabric.design.num_tors))
    place = np.arange(len(flows)) - start[tor[by_tor]]
    return flows.where(np.sort(by_tor[place < senders]))


def ratios(rows: Sequence[UplinkShares]) -> list[SplitRatio]:
    """Return how far the split of uplinks lowers collisions: values with it over those without it.

    One row for each definition, hash and load; the ratio is None where nothing collides without the split.
    """
    cells = {(row.hash_name, row.load, row.split): row for row in rows}
    compared = []
    for key, definition in DEFINITIONS.items():
        for (name, share, split), row in cells.items():
            if split:
                with_split, without = (getattr(each, key) for each in (row, cells[name, share, False]))
                ratio = with_split / without if without else None
                compared.append(SplitRatio(definition, name, share, row.source, without, with_split, ratio))
    return compared


def claims(compared: Sequence[SplitRatio]) -> list[Claim]:
    """Return the verdict of each definition and hash, from `ratios`."""
    return list(_claims(compared))


def verdict(judged: Sequence[Claim], compared: Sequence[SplitRatio], design: Design) -> tuple[str, str]:
    """PASS where the split halves all at every load, FAIL where nothing at any, else WARN; and why, in sentences.

    NO VERDICT where the split changes nothing on this fabric: what it does to collisions cannot be seen there. First
    come the shares at the highest load, then the words of the closed form and up to which load each simulated hash
    halves.

    Args:
        judged: claims that `claims` made of the rows.
        compared: the rows, from `ratios`.
        design: of the fabric, with or without the split.
    """
    opening = _at_last_load(compared)
    if not any(claim.has_effect for claim in judged):
        return "NO VERDICT", f"{opening} {_no_effect(design)}"
    always = all(claim.halved_to == claim.last_load for claim in judged)
    never = not any(claim.halves for claim in judged)
    word = "PASS" if judged and always else "FAIL" if never else "WARN"
    truth = {"PASS": "true in every case", "FAIL": "true in no case", "WARN": "true in part"}[word]
    sentences = [f"{opening} 'The split halves hash collisions' is {truth}"]
    for claim in judged:
        if claim.source == "predicted":
            alike = [other for other in judged if other.definition == claim.definition and other.source == "simulated"]
            sentences.append(f"{_SUBJECTS[claim.definition]} {_verb(claim)}{_by_simulation(claim, alike)}")
    return word, ". ".join(sentences) + "."


_SUBJECTS = {
    "in collision": "With an ideal hash, the share of flows in collision (on an uplink with more demand than capacity)",
    "excess": "The excess (demand above capacity over all demand)",
    "sharing": "The share of flows that share an uplink at all, which others call a collision,",
}


def _at_last_load(compared: Sequence[SplitRatio]) -> str:
    """Flows in collision and excess at the highest load, hash by hash: of both designs where they differ."""
    last = max((row.load for row in compared), default=0.0)
    rows = [row for row in compared if row.load == last]
    rows = [row for row in rows if row.source == "simulated"] or rows
    if not rows:
        return "No flow crosses a ToR uplink."
    hashes = ", ".join(dict.fromkeys(row.hash_name for row in rows))
    shares = [
        f"{', '.join(_both(row) for row in rows if row.definition == DEFINITIONS[key])} {quantity}"
        for key, quantity in (
            ("collision_share", "of flows in collision on ToR uplinks"),
            ("excess", "of demand in excess"),
        )
        if any(row.definition == DEFINITIONS[key] for row in rows)
    ]
    return f"At {_load(last)}, by hash ({hashes}; {rows[0].source}): {'; '.join(shares)}."


def _both(row: SplitRatio) -> str:
    with_split, without = f"{row.with_split:.1%}", f"{row.without:.1%}"
    return with_split if with_split == without else f"{with_split} (without the ToR split {without})"


def _no_effect(design: Design) -> str:
    if design.lanes_per_port == 1:
        why = f"a NIC is as fast as a switch port ({format_rate(design.nic_bps)}), so uplinks are the same with it"
    else:
        why = "no share differs at any load that was tried"
    return f"The ToR split has no effect on this fabric: {why}."


def _verb(claim: Claim) -> str:
    return f"is {claim.words}"


def _by_simulation(claim: Claim, simulated: Sequence[Claim]) -> str:
    """Up to which load the hashes of switches halve it, where the ideal one does somewhere."""
    if claim.halved_to is None or not simulated:
        return ""
    loads = ", ".join(f"{other.hash_name} {_load(other.halved_to or 0.0, full='100%')}" for other in simulated)
    return f" (simulated, halved up to: {loads})"


def _load(share: float, full: str = "full load") -> str:
    return full if share >= 1 else f"{share:.0%}" if full != "full load" else f"{share:.0%} load"


def _claims(compared: Sequence[SplitRatio]) -> Iterator[Claim]:
    """Yield for each definition and hash the loads at which the split halves collisions, lowers or raises them."""
    keys = dict.fromkeys((row.definition, row.hash_name, row.source) for row in compared)
    for definition, name, source in keys:
        rows = [row for row in compared if (row.definition, row.hash_name) == (definition, name)]
        rows = sorted((row for row in rows if row.with_split or row.without), key=lambda row: row.load)
        if rows:
            loads = [row.load for row in rows]
            curve = [row.with_split / row.without if row.without else math.inf for row in rows]
            yield Claim(
                definition,
                name,
                source,
                _stretches(loads, curve, 0.0, HALF),
                _stretches(loads, curve, HALF, 1.0),
                _stretches(loads, curve, 1.0, math.inf),
                loads[0],
                loads[-1],
                rows[-1].ratio,
            )


def _stretches(loads: Sequence[float], curve: Sequence[float], low: float, high: float) -> tuple[Stretch, ...]:
    """Return the loads where the curve, straight between points, is inside: above `low` (not for 0), at most `high`.

    Exactly 1 is neither lowered nor raised.
    """
    inside = [_inside(value, low, high) for value in curve]
    stretches: list[Stretch] = []
    for first in range(len(loads)):
        if not inside[first] or (first and inside[first - 1]):
            continue
        last = next((place for place in range(first, len(loads)) if not inside[place]), len(loads)) - 1
        begin = _crossing(loads, curve, first, first - 1, low, high) if first else loads[0]
        end = _crossing(loads, curve, last, last + 1, low, high) if last + 1 < len(loads) else loads[-1]
        stretches.append((begin, end))
    return tuple(stretches)


def _inside(value: float, low: float, high: float) -> bool:
    if low == 0.0:
        return value <= high
    return low < value < high if high == 1.0 else value > low


def _crossing(loads: Sequence[float], curve: Sequence[float], inner: int, outer: int, low: float, high: float) -> float:
    """The load between two neighbours, one inside and one not, at which the line meets the bound that it leaves by."""
    bound = low if curve[outer] <= low else high
    if not math.isfinite(curve[outer]) or not math.isfinite(curve[inner]) or curve[outer] == curve[inner]:
        return loads[inner]
    part = (bound - curve[inner]) / (curve[outer] - curve[inner])
    return loads[inner] + min(1.0, max(0.0, part)) * (loads[outer] - loads[inner])


def _sharing(num_flows: int, design: Design) -> float:
    """Return the chance that a flow shares its uplink with another."""
    return float(1 - (1 - 1 / design.tor_uplinks) ** max(num_flows - 1, 0))


def _means(shares: Sequence[_Shares]) -> _Shares:
    flows, collision, excess, sharing = (statistics.fmean(values) for values in zip(*shares, strict=True))
    return flows, collision, excess, sharing


def _uplinks(fabric: Clos, flows: Flows, ecmp: Ecmp) -> _Shares:
    """Return (flows, collision share, excess, sharing share) on ToR uplinks for one seed, as in `UplinkShares`."""
    loaded = load(fabric, flows, ecmp)
    collisions = loaded.collisions([Tier.TOR_SPINE])
    links: NDArray[np.int64] = loaded.paths[:, Tier.TOR_SPINE]
    on_link = np.bincount(links[links >= 0], minlength=fabric.num_links)
    shared = on_link[links[links >= 0]] > 1
    return len(links), collisions.share, collisions.excess, float(shared.mean()) if len(shared) else 0.0
