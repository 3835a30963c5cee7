"""What the report of a fabric stands on: the runs behind each section, as rows. `report_page` draws them.

Left out: anything about drawing; and every figure here is simulated or predicted, none measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from netlayer.config import Config
from netlayer.progress import Stages
from topology.clos import Clos, Tier
from topology.compare import check_crossed
from topology.failures import KINDS, Failure, FailureKind, count, random_failures, single_failures
from topology.hashing import Ecmp, HashName
from topology.load import Load, load
from topology.placement import STRATEGIES, Placement, num_slots, place_slots, usable_servers
from topology.search import plan_ports, plan_summary, search_knobs
from topology.split_verdict import Claim, claims, closed_form, ratios, simulated
from topology.step import PHASES, placement_row, run_step, slot_flows
from topology.swaps import improve
from topology.sweep import cases, run_sweep, worst
from topology.traffic import Flows, headers, permutation

Row = dict[str, Any]

HASHES: tuple[HashName, ...] = ("random", "crc16", "crc32c")
HASH: HashName = "crc16"
SPLIT = {True: "with split", False: "without"}
SINGLES = 8  # parts tried of each kind
DRAWS = 4
_TOGETHER: tuple[tuple[FailureKind, tuple[int, ...]], ...] = (
    ("tor-link", (4, 16, 64, 256)),
    ("core-link", (4, 16, 64, 256)),
    ("spine", (2, 4, 8, 16)),
)


# Utilisation of a link, up to and with each edge; rounding lifts none above its own.
_USES = ("idle", "to 25%", "to 50%", "to 75%", "to 100%", "to 150%", "to 200%", "above")
_EDGES = np.array([0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0]) + 1e-9


@dataclass(frozen=True, eq=False)
class Findings:
    """All rows of one report, and the loads that its pictures show."""

    config: Config
    seed: int
    seeds: int
    fabrics: dict[bool, Clos]
    by_load: list[Row]
    ratios: list[Row]
    claims: list[Claim]
    per_tor: list[Row]
    on_links: list[Row]
    loads: dict[str, Load]
    placements: list[Row]
    failures: list[Row]
    worst: list[Row]
    cures: list[Row]
    knobs: list[Row]

    @property
    def fabric(self) -> Clos:
        """As configured."""
        return self.fabrics[self.config.cluster.aoc_split]


def find(config: Config, seed: int, seeds: int, stages: Stages, **workers: Any) -> Findings:
    """Run all of it.

    Args:
        config: cluster and job.
        seed, seeds: the seeds seed, seed + 1, ... of the split's comparison; the rest takes the first.
        stages: progress on stderr.
        workers: `processes` and `dask`, as `sweep.run_sweep` takes them.

    Raises:
        ConfigError: the fabric cannot be built, or no flow can cross it.
    """
    with stages.open("fabric"):
        cluster = config.cluster
        fabrics = {split: Clos.build(cluster.model_copy(update={"aoc_split": split})) for split in (True, False)}
        fabric = fabrics[cluster.aoc_split]
        check_crossed(fabric)
    seed_range = range(seed, seed + seeds)
    with stages.open("split") as bar:
        by_load = closed_form(cluster) + simulated(fabrics, HASHES, seed_range, progress=bar)
        found = ratios(by_load)
        per_tor, on_links = _distributions(fabrics, seed_range)
    with stages.open("placement") as bar:
        flows, placements = _placements(config, fabric, seed, bar)
        rows = [placement_row(fabric, flows, placement, HASH, seed) for placement in placements]
    placed = placements[0].apply(flows, cluster.nics_per_server)
    with stages.open("failures") as bar:
        points = cases([seed], ["given"], _failures(fabric, seed), HASH)
        failures = run_sweep(config, points, progress=bar, **workers)
    with stages.open("cures") as bar:
        cures = _cures(fabric, placed, seed)
        knobs = search_knobs(
            fabric,
            lambda qps: slot_flows(config.job, cluster, qps),
            placements[0],
            HASH,
            seeds=seed_range[:2],
            progress=bar,
        )
    return Findings(
        config=config,
        seed=seed,
        seeds=seeds,
        fabrics=fabrics,
        by_load=by_load,
        ratios=found,
        claims=claims(found),
        per_tor=per_tor,
        on_links=on_links,
        loads=_loads(fabric, placed, seed),
        placements=rows,
        failures=failures,
        worst=worst(failures),
        cures=cures,
        knobs=knobs,
    )


def tier_rows(loads: dict[str, Load]) -> list[Row]:
    """Share of each tier's links by utilisation, for each load: up to each edge."""
    rows: list[Row] = []
    for traffic, found in loads.items():
        for tier in Tier:
            span = found.fabric.tier_links(tier)
            use = found.link_bps[span] / found.fabric.link_bps[span]
            if len(use):
                counts = np.bincount(np.searchsorted(_EDGES, use), minlength=len(_USES))
                rows += [
                    {
                        "traffic": traffic,
                        "tier": tier.label,
                        "use": word,
                        "links": int(number),
                        "share": number / len(use),
                    }
                    for word, number in zip(_USES, counts, strict=True)
                ]
    return rows


def uplink_rows(found: Load) -> list[Row]:
    """The fullest of a ToR set's rails, uplink by uplink."""
    design = found.fabric.design
    span = found.fabric.tier_links(Tier.TOR_SPINE)
    use = (found.link_bps[span] / found.fabric.link_bps[span]).reshape(
        design.num_tor_sets, design.rails, design.tor_uplinks
    )
    fullest = use.max(axis=1)
    return [
        {"tor_set": f"set {row}", "uplink": str(column), "utilisation": float(value)}
        for row, uplinks in enumerate(fullest)
        for column, value in enumerate(uplinks)
    ]


def _placements(config: Config, fabric: Clos, seed: int, progress: Any) -> tuple[Flows, list[Placement]]:
    """Each strategy's placement, and the random one improved: an optimiser shows on a bad start what it can do."""
    slots = num_slots(config.cluster, config.job.parallel)
    usable = usable_servers(config.cluster.servers)
    flows = slot_flows(config.job, config.cluster)
    placements = [place_slots(name, fabric, config.job.parallel, slots, usable, seed) for name in STRATEGIES]
    scattered = placements[STRATEGIES.index("random")]
    found = improve(fabric, flows, scattered, usable, seed=seed, max_seconds=8.0, progress=progress)
    return flows, [*placements, Placement("random, optimised", found.placement.server)]


def _failures(fabric: Clos, seed: int) -> list[tuple[Failure, ...]]:
    """Some parts of each kind alone, then several at random."""
    single = [(one,) for kind in KINDS for one in single_failures(fabric, kind, SINGLES, seed)]
    several = [
        random_failures(fabric, [kind], together, seed + draw)
        for kind, sizes in _TOGETHER
        for together in sizes
        if together <= count(fabric, kind) // 2
        for draw in range(DRAWS)
    ]
    return single + several


def _distributions(fabrics: dict[bool, Clos], seeds: Sequence[int]) -> tuple[list[Row], list[Row]]:
    """Per ToR: the share of its flows in collision; per uplink: its utilisation. A permutation at full load."""
    per_tor: list[Row] = []
    on_links: list[Row] = []
    for seed in seeds:
        flows = permutation(fabrics[True], seed)
        ecmp = Ecmp(HASH, headers(fabrics[True], flows, seed), seed)
        for split, fabric in fabrics.items():
            found = load(fabric, flows, ecmp)
            span = fabric.tier_links(Tier.TOR_SPINE)
            use = found.link_bps[span] / fabric.link_bps[span]
            over = use > 1 + 1e-9
            link = found.paths[:, Tier.TOR_SPINE] - span.start
            tor = fabric.tor_of(flows.src_nic)
            hit = np.bincount(tor, weights=over[link], minlength=fabric.design.num_tors)
            sent = np.bincount(tor, minlength=fabric.design.num_tors)
            per_tor += [{"design": SPLIT[split], "seed": seed, "flows": int(number)} for number in hit[sent > 0]]
            values, times = np.unique(use.round(6), return_counts=True)
            on_links += [
                {"design": SPLIT[split], "seed": seed, "utilisation": float(value), "links": int(number)}
                for value, number in zip(values, times, strict=True)
            ]
    return per_tor, on_links


def _loads(fabric: Clos, placed: Flows, seed: int) -> dict[str, Load]:
    """The job's phases and a permutation at full load, each on every link."""
    found = {phase.name: phase.load for phase in run_step(fabric, placed, HASH, seed).phases}
    flows = permutation(fabric, seed)
    return {**found, "permutation": load(fabric, flows, Ecmp(HASH, headers(fabric, flows, seed), seed))}


def _cures(fabric: Clos, placed: Flows, seed: int) -> list[Row]:
    """Planned UDP ports for each phase, and for a permutation at full load."""
    phases = {name: placed.select(*kinds) for name, kinds, _ in PHASES} | {"permutation": permutation(fabric, seed)}
    return [
        {"traffic": name, "hash": HASH, "seed": seed, **plan_summary(plan_ports(fabric, flows, HASH, seed))}
        for name, flows in phases.items()
        if len(flows)
    ]
