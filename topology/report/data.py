"""Data of a fabric's report: the runs that each section shows, as rows, and the commands that repeat them.

`page` draws them. Not covered: anything about drawing; and every figure here is simulated or predicted, none
measured.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from netlayer.config.tree import Config
from netlayer.launch.interrupt import held_interrupt
from netlayer.progress import Stages
from topology.ecmp.compare import check_crossed, traffic_flows
from topology.ecmp.distribution import Distribution
from topology.ecmp.hashing import Ecmp, HashName
from topology.ecmp.load import Load, place
from topology.ecmp.search import plan_ports, plan_summary, search_knobs
from topology.ecmp.split_verdict import Claim, SplitRatio, UplinkShares, claims, closed_form, ratios, simulated
from topology.fabric.clos import Clos, Tier
from topology.fabric.imported import ImportedFabric
from topology.fabric.interface import Fabric
from topology.failures.faults import KINDS, Failure, FailureKind, count, random_failures, single_failures
from topology.placement.strategies import STRATEGIES, Placement, num_slots, place_slots
from topology.placement.swaps import improve
from topology.single_run import RunRequest, run_once
from topology.sweep import Subject, cases, run_sweep, worst
from topology.traffic.job import Flows, headers, permutation
from topology.traffic.step import placement_row, slot_flows

Row = dict[str, Any]

HASHES: tuple[HashName, ...] = ("random", "crc16", "crc32c")
HASH: HashName = "crc16"
TRAFFICS = ("ring", "pipeline", "permutation")
SINGLES = 8  # parts tried of each kind
DRAWS = 4  # sets of parts that fail together
KNOB_SEEDS = 2
# The search ends long before, and is then the same on every machine.
OPTIMISE_S = 120.0
TOGETHER: tuple[tuple[FailureKind, tuple[int, ...]], ...] = (
    ("tor-link", (4, 16, 64, 256)),
    ("core-link", (4, 16, 64, 256)),
    ("spine", (2, 4, 8, 16)),
)


@dataclass(frozen=True, eq=False)
class Findings:
    """All rows of one report, and the loads that its pictures show.

    `config_options` are the options that name the configuration: `--config FILE --set A.B=VALUE --fabric FILE`. Of an
    imported fabric `fabrics`, `by_load`, `ratios` and `claims` are empty, and without a job `config` is None and
    `placements` empty.
    """

    name: str
    fabric: Fabric
    config: Config | None
    seed: int
    seeds: int
    config_options: tuple[str, ...]
    fabrics: dict[bool, Clos]
    by_load: list[UplinkShares]
    ratios: list[SplitRatio]
    claims: list[Claim]
    link_use: list[Row]
    tor_collisions: list[Row]
    loads: dict[str, Load]
    placements: list[Row]
    failures: list[Row]
    worst: list[Row]
    improvements: list[Row]
    knobs: list[Row]

    @property
    def clos(self) -> Clos | None:
        """The fabric if it was planned, None if it is imported."""
        return self.fabric if isinstance(self.fabric, Clos) else None

    @property
    def split_has_effect(self) -> bool:
        """Whether any share on ToR uplinks differs with the split, at any load."""
        return any(claim.has_effect for claim in self.claims)

    def repeat(self) -> str:
        """Return the command line of the whole report."""
        return self.command("report", "--seeds", self.seeds)

    def command(self, name: str, *options: object) -> str:
        """Return the command line that repeats a figure: `netlayer topology place --seed 0 --config FILE`."""
        parts = ["netlayer", "topology", *name.split(), *options, "--seed", self.seed, *self.config_options]
        return shlex.join(map(str, parts))


def find(
    config: Config, seed: int, seeds: int, config_options: Sequence[str], stages: Stages, **workers: Any
) -> Findings:
    """Run all of it on a cluster's fabric.

    Args:
        config: cluster and job.
        seed, seeds: the seeds seed, seed + 1, ... of the split's comparison and of failures; the rest takes the first.
        config_options: see `Findings`.
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
        ratio_rows = ratios(by_load)
        counted = _distribution(fabrics, seed_range)
    # The first to call the kernels of rates: an interruption that lands while numba loads them may end in a fault.
    with stages.open("loads"), held_interrupt():
        runs = {name: run_once(RunRequest(config, HASH, name, seed)) for name in TRAFFICS}
    return Findings(
        name=cluster.name,
        fabric=fabric,
        config=config,
        seed=seed,
        seeds=seeds,
        config_options=tuple(config_options),
        fabrics=fabrics,
        by_load=by_load,
        ratios=ratio_rows,
        claims=claims(ratio_rows),
        link_use=counted.link_rows(),
        tor_collisions=counted.tor_rows(),
        loads={name: run.loaded for name, run in runs.items() if len(run.flows)},
        **_costs(Subject.of(config), fabric, config, seed, seed_range, stages, workers),
    )


def find_imported(
    fabric: ImportedFabric,
    config: Config | None,
    subject: Subject,
    seed: int,
    seeds: int,
    config_options: Sequence[str],
    stages: Stages,
    **workers: Any,
) -> Findings:
    """Run what an imported fabric has: all but the ToR split, and without a job without placements.

    Args:
        fabric, config, subject: as `commands.fabrics.World` has them.
        seed, seeds, config_options, stages, workers: as for `find`.

    Raises:
        ConfigError: a flow has no path.
    """
    seed_range = range(seed, seed + seeds)
    with stages.open("loads"), held_interrupt():
        counted = _distribution({True: fabric}, seed_range)
        flows = {name: traffic_flows(config, fabric, name, seed) for name in _traffics(config)}
        loads = {name: _loaded(fabric, one, seed) for name, one in flows.items() if len(one)}
    return Findings(
        name=config.cluster.name if config else "imported",
        fabric=fabric,
        config=config,
        seed=seed,
        seeds=seeds,
        config_options=tuple(config_options),
        fabrics={},
        by_load=[],
        ratios=[],
        claims=[],
        link_use=counted.link_rows(),
        tor_collisions=counted.tor_rows(),
        loads=loads,
        **_costs(subject, fabric, config, seed, seed_range, stages, workers),
    )


def _costs(
    subject: Subject,
    fabric: Fabric,
    config: Config | None,
    seed: int,
    seeds: range,
    stages: Stages,
    workers: dict[str, Any],
) -> dict[str, list[Row]]:
    """Rows of placements, failures and improvements."""
    placements: list[Row] = []
    if config is not None:
        with stages.open("placement") as bar:
            placements = _placements(config, fabric, seed, bar)
    with stages.open("failures") as bar:
        points = cases(seeds, ["given"], _failures(fabric, seed), HASH)
        failures = run_sweep(subject, points, progress=bar, **workers)
    with stages.open("ECMP plans") as bar:
        improvements = _improvements(config, fabric, seed)
        knobs = search_knobs(
            fabric,
            lambda qps: slot_flows(config.job, config.cluster, qps) if config else permutation(fabric, seed, qps),
            place_slots("given", fabric, config.job.parallel, *_room(config, fabric), seed) if config else None,
            HASH,
            seeds=range(seed, seed + KNOB_SEEDS),
            progress=bar,
        )
    return {
        "placements": placements,
        "failures": failures,
        "worst": worst_by_number(failures),
        "improvements": improvements,
        "knobs": knobs,
    }


def use_rows(loads: dict[str, Load]) -> list[Row]:
    """Count links of each tier by utilisation, for each load."""
    counted = Distribution()
    for traffic, loaded in loads.items():
        counted.add_links(True, traffic, HASH, loaded)
    return [{key: value for key, value in row.items() if key not in ("split", "hash")} for row in counted.link_rows()]


def uplink_rows(fabric: Clos, loaded: Load) -> list[Row]:
    """Return the utilisation of the fullest of a ToR set's rails, uplink by uplink."""
    design = fabric.design
    span = fabric.tier_links(Tier.TOR_SPINE)
    use = (loaded.link_bps[span] / fabric.link_bps[span]).reshape(design.num_tors, design.tor_uplinks)
    by_rail = [use[fabric.tors_of_rail(rail)] for rail in range(design.rails)]
    return [
        {"tor_set": row, "uplink": column, "utilisation": max(float(rail[row, column]) for rail in by_rail)}
        for row in range(design.num_tor_sets)
        for column in range(design.tor_uplinks)
    ]


def worst_by_number(failures: Sequence[Row]) -> list[Row]:
    """`sweep.worst` for each number of parts that fail together."""
    groups: dict[int, list[Row]] = {}
    for row in failures:
        groups.setdefault(len(row["failed"].split()), []).append(row)
    return [{"together": number, **row} for number, rows in groups.items() for row in worst(rows)]


def _traffics(config: Config | None) -> tuple[str, ...]:
    return TRAFFICS if config is not None else TRAFFICS[2:]


def _loaded(fabric: Fabric, flows: Flows, seed: int) -> Load:
    paths, _ = fabric.route(flows.src_nic, flows.dst_nic, Ecmp(HASH, headers(fabric, flows, seed), seed))
    return place(fabric, flows, paths)


def _room(config: Config, fabric: Fabric) -> tuple[int, Any]:
    return num_slots(config.cluster, config.job.parallel), fabric.full_servers


def _placements(config: Config, fabric: Fabric, seed: int, progress: Any) -> list[Row]:
    """Cost each strategy, and the random one improved: an optimiser shows on a bad start what it can do."""
    slots, usable = _room(config, fabric)
    flows = slot_flows(config.job, config.cluster)
    placements = [place_slots(name, fabric, config.job.parallel, slots, usable, seed) for name in STRATEGIES]
    scattered = placements[STRATEGIES.index("random")]
    improved = improve(fabric, flows, scattered, usable, seed=seed, max_seconds=OPTIMISE_S, progress=progress)
    placements.append(Placement("random, optimised", improved.placement.server))
    return [placement_row(fabric, flows, placement, HASH, seed) for placement in placements]


def _failures(fabric: Fabric, seed: int) -> list[tuple[Failure, ...]]:
    """Some parts of each kind alone, then several at random."""
    single = [(one,) for kind in KINDS for one in single_failures(fabric, kind, SINGLES, seed)]
    several = [
        random_failures(fabric, [kind], together, seed + draw)
        for kind, sizes in TOGETHER
        for together in sizes
        if together <= count(fabric, kind) // 2
        for draw in range(DRAWS)
    ]
    return single + several


def _distribution(fabrics: Mapping[bool, Fabric], seeds: Sequence[int]) -> Distribution:
    """Count the links and collisions of a permutation at full load."""
    counted = Distribution()
    for seed in seeds:
        flows = permutation(fabrics[True], seed)
        ecmp = Ecmp(HASH, headers(fabrics[True], flows, seed), seed)
        for split, fabric in fabrics.items():
            loaded = place(fabric, flows, fabric.route(flows.src_nic, flows.dst_nic, ecmp)[0])
            counted.add(split, "permutation", HASH, flows, loaded)
    return counted


def _improvements(config: Config | None, fabric: Fabric, seed: int) -> list[Row]:
    """Planned UDP ports for each traffic."""
    chosen = {name: traffic_flows(config, fabric, name, seed) for name in _traffics(config)}
    return [
        {"traffic": name, "hash": HASH, "seed": seed, **plan_summary(plan_ports(fabric, flows, HASH, seed))}
        for name, flows in chosen.items()
        if len(flows)
    ]
