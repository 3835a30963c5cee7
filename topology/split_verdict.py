"""Is it true that the ToR split halves hash collisions? Under which definition, load and hash, in numbers and words.

Three definitions: *in collision*, the share of flows on an uplink whose demand exceeds its capacity (ours); *excess*,
the demand above capacity over total demand; *sharing*, the share of flows that share an uplink at all, which others
call a collision. Each at rising load (part of a ToR's NICs send at full rate to other ToRs), in closed form for an
ideal hash and simulated for the hashes of switches. "Halves" is a ratio of at most a half. Left out: downlinks.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from netlayer.config import ClusterConfig
from topology.clos import Clos, Tier
from topology.compare import CLOSED_FORM, split_by_load
from topology.design import Design, plan
from topology.hashing import Ecmp, HashName
from topology.load import load
from topology.traffic import Flows, headers, permutation

Row = dict[str, Any]
Progress = Callable[[int, int, str], None]

DEFINITIONS = {"collision_share": "in collision", "excess": "excess", "sharing_share": "sharing"}
LOADS = tuple(eighth / 8 for eighth in range(1, 9))
FINE_LOADS = tuple(part / 32 for part in range(1, 33))
HALF = 0.5


class Claim(NamedTuple):
    """What the split does to one definition under one hash: the loads at which it halves, lowers, or raises it."""

    definition: str
    hash_name: str
    source: str
    loads: tuple[float, ...]
    halves: tuple[float, ...]
    lowers: tuple[float, ...]
    raises: tuple[float, ...]
    last: float | None

    @property
    def sentence(self) -> str:
        """`in collision, crc16: halved at loads up to 25%, lowered at loads from 38%, x0.93 at 100% load`."""
        return f"{self.definition}, {self.hash_name}: {self.words}"

    @property
    def words(self) -> str:
        """The same without definition and hash."""
        last = "" if self.last is None else f", x{self.last:.2f} at {self.loads[-1]:.0%} load"
        return f"{_in_words(self)}{last}"


def closed_form(cluster: ClusterConfig, loads: Sequence[float] = FINE_LOADS) -> list[Row]:
    """Rows of all definitions for an ideal hash, a row a load and split."""
    rows = split_by_load(cluster, loads)
    designs = {split: plan(cluster.model_copy(update={"aoc_split": split})) for split in (True, False)}
    return [
        {**row, "hash": CLOSED_FORM, "sharing_share": _sharing(row["flows"], designs[row["split"]])} for row in rows
    ]


def simulated(
    fabrics: dict[bool, Clos],
    hashes: Sequence[HashName],
    seeds: Sequence[int],
    loads: Sequence[float] = LOADS,
    progress: Progress | None = None,
) -> list[Row]:
    """The same of real hashes on the ToR uplinks, means over the seeds; every ToR has exactly its load of senders."""
    found: dict[tuple[bool, HashName, float], list[Row]] = {}
    points = [(seed, share) for seed in seeds for share in loads]
    for done, (seed, share) in enumerate(points, start=1):
        flows = partial_load(fabrics[True], share, seed)
        tuples = headers(fabrics[True], flows, seed)
        for name in hashes:
            ecmp = Ecmp(name, tuples, seed)
            for split, fabric in fabrics.items():
                found.setdefault((split, name, share), []).append(_uplinks(fabric, flows, ecmp))
        if progress:
            progress(done, len(points), f"seed {seed}, load {share:.0%}")
    return [
        {
            "split": split,
            "hash": name,
            "load": share,
            "source": "simulated",
            "seeds": len(rows),
            **{key: statistics.fmean(row[key] for row in rows) for key in rows[0]},
        }
        for (split, name, share), rows in found.items()
    ]


def partial_load(fabric: Clos, share: float, seed: int) -> Flows:
    """A permutation of which `share` of each ToR's NICs send, drawn by seed; receivers stay as they fall."""
    flows = permutation(fabric, seed)
    wanted = round(share * fabric.design.nics_per_tor)
    tor = fabric.tor_of(flows.src_nic)
    shuffled = np.random.default_rng([seed, 2]).permutation(len(flows))
    by_tor = shuffled[np.argsort(tor[shuffled], kind="stable")]
    start = np.searchsorted(tor[by_tor], np.arange(fabric.design.num_tors))
    place = np.arange(len(flows)) - start[tor[by_tor]]
    return flows.where(np.sort(by_tor[place < wanted]))


def ratios(rows: Sequence[Row]) -> list[Row]:
    """With the split over without it: a row for each definition, hash and load; None where there is none without."""
    cells = {(row["hash"], row["load"], row["split"]): row for row in rows}
    return [
        {
            "definition": words,
            "hash": name,
            "load": share,
            "source": row["source"],
            "without": without[key],
            "with": row[key],
            "ratio": row[key] / without[key] if without[key] else None,
        }
        for key, words in DEFINITIONS.items()
        for (name, share, split), row in cells.items()
        if split and (without := cells[name, share, False])
    ]


def claims(found: Sequence[Row]) -> list[Claim]:
    """The verdict of each definition and hash, from `ratios`."""
    return list(_claims(found))


def verdict(found: Sequence[Claim]) -> tuple[str, str]:
    """PASS where the split halves all at every load, FAIL where nothing at any, else WARN; and why, in words.

    The words are those of the closed form, then which hashes stay with it at the loads that both have.
    """
    always = all(len(claim.halves) == len(claim.loads) for claim in found)
    never = not any(claim.halves for claim in found)
    word = "PASS" if found and always else "FAIL" if never else "WARN"
    said = {"PASS": "true in every case", "FAIL": "true in no case", "WARN": "true in part"}[word]
    ideal = {claim.definition: claim for claim in found if claim.source == "predicted"}
    parts = [f"{claim.definition}: {claim.words}" for claim in ideal.values()]
    hashes = dict.fromkeys(claim.hash_name for claim in found if claim.source == "simulated")
    apart = [
        name
        for name in hashes
        if not all(_agree(claim, ideal[claim.definition]) for claim in found if claim.hash_name == name)
    ]
    alike = [name for name in hashes if name not in apart]
    if alike:
        parts.append(f"{', '.join(alike)}: the same")
    if apart:
        parts.append(f"{', '.join(apart)}: otherwise at some load")
    return word, f"'The split halves hash collisions' is {said}. " + ". ".join(parts)


def _agree(claim: Claim, ideal: Claim) -> bool:
    """Whether both halve at the same of the loads that both have."""
    common = set(claim.loads) & set(ideal.loads)
    return common & set(claim.halves) == common & set(ideal.halves)


def _claims(found: Sequence[Row]) -> Iterator[Claim]:
    keys = dict.fromkeys((row["definition"], row["hash"], row["source"]) for row in found)
    for definition, name, source in keys:
        rows = [row for row in found if (row["definition"], row["hash"]) == (definition, name)]
        rows = sorted((row for row in rows if row["with"] or row["without"]), key=lambda row: row["load"])
        if rows:
            yield Claim(
                definition,
                name,
                source,
                tuple(row["load"] for row in rows),
                tuple(row["load"] for row in rows if row["with"] <= HALF * row["without"]),
                tuple(row["load"] for row in rows if HALF * row["without"] < row["with"] < row["without"]),
                tuple(row["load"] for row in rows if row["with"] > row["without"]),
                rows[-1]["ratio"],
            )


def _in_words(claim: Claim) -> str:
    parts = []
    for loads, verb in ((claim.halves, "halved"), (claim.lowers, "lowered"), (claim.raises, "raised")):
        if loads:
            parts.append(f"{verb} at {_loads_in_words(loads, claim.loads)}")
    return ", ".join(parts) or "unchanged at every load"


def _loads_in_words(loads: Sequence[float], known: Sequence[float]) -> str:
    if len(loads) == len(known):
        return "every load"
    texts = [f"{share:.0%}" for share in loads]
    if list(loads) == list(known[: len(loads)]) and len(loads) > 1:
        return f"loads up to {texts[-1]}"
    if list(loads) == list(known[-len(loads) :]) and len(loads) > 1:
        return f"loads from {texts[0]}"
    return ", ".join(texts)


def _sharing(num_flows: int, design: Design) -> float:
    """Chance that a flow has company on its uplink."""
    return float(1 - (1 - 1 / design.tor_uplinks) ** max(num_flows - 1, 0))


def _uplinks(fabric: Clos, flows: Flows, ecmp: Ecmp) -> Row:
    found = load(fabric, flows, ecmp)
    collisions = found.collisions([Tier.TOR_SPINE])
    links: NDArray[np.int64] = found.paths[:, Tier.TOR_SPINE]
    on_link = np.bincount(links[links >= 0], minlength=fabric.num_links)
    shared = on_link[links[links >= 0]] > 1
    return {
        "flows": len(links),
        "collision_share": collisions.share,
        "excess": collisions.excess,
        "sharing_share": float(shared.mean()) if len(shared) else 0.0,
    }
