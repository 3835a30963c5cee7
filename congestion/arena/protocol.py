"""The arena's frozen suite: workloads x conditions x seeds of the tuning set and of the test set, and the rules.

ARENA.md says why. The suite is data alone: it names scenarios as `scenarios.catalogue` does. `digest` stands in every
record, so that results of two suites are never compared. Not covered: running it, and what a law may be told.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, Literal

Routing = Literal["ecmp", "flowlet", "spray", "hashed_ports"]
Buffer = Literal["tight", "deep"]

KIB, MIB = 2**10, 2**20
MTU_BYTES = 4_096
_MOST_LINKS = 4  # host, ToR, spine, ToR, host


@dataclass(frozen=True)
class Workload:
    """A scenario of `scenarios.catalogue` and its parameters; sizes are payload bytes.

    Args:
        parameters: `scenario.x` without its first word; with it where another section is meant.
        config: of `examples/`, for a job.
    """

    name: str
    scenario: str
    parameters: dict[str, int | str]
    config: str = ""

    @property
    def packets(self) -> int:
        """Data packets that it sends; of a job on average, without those that rounding fills."""
        return _PACKETS[self.scenario](self.parameters)

    @property
    def link_hops(self) -> int:
        """Packets and their ACKs times links, if every flow leaves its ToR: a little above what is counted."""
        return 2 * _MOST_LINKS * self.packets


@dataclass(frozen=True)
class Condition:
    """Environment that a workload runs in.

    Args:
        nic_bps: rate of a host's link.
        oversubscription: a ToR's capacity down over its capacity up.
        routing: but for ecmp receivers take packets out of order.
        window: NCCL's: at most `Fabric.window_bytes` of a flow in flight.
        buffer: deep: the first of `Rules.buffers_bytes`; tight: found by `Rules.pause_share`.
    """

    name: str
    nic_bps: int = 200_000_000_000
    oversubscription: int = 1
    routing: Routing = "ecmp"
    window: bool = False
    buffer: Buffer = "tight"


@dataclass(frozen=True)
class Case:
    """One workload under one condition."""

    workload: Workload
    condition: Condition

    @property
    def name(self) -> str:
        return f"{self.workload.name}/{self.condition.name}"


@dataclass(frozen=True)
class CaseSet:
    """Every workload under every condition with every seed."""

    workloads: tuple[Workload, ...]
    conditions: tuple[Condition, ...]
    seeds: tuple[int, ...]

    @property
    def cases(self) -> list[Case]:
        return [Case(*pair) for pair in product(self.workloads, self.conditions)]

    @property
    def link_hops(self) -> int:
        """Link hops of one law over all cases and seeds."""
        return sum(case.workload.link_hops for case in self.cases) * len(self.seeds)


@dataclass(frozen=True)
class Fabric:
    """Two tiers: ToRs with one 400G link to each spine; as many spines as the oversubscription leaves."""

    hosts: int = 64
    hosts_per_tor: int = 8
    uplink_bps: int = 400_000_000_000
    latency_ns: int = 1_000
    mtu_bytes: int = MTU_BYTES
    window_bytes: int = 512 * KIB

    def parameters(self, condition: Condition) -> dict[str, int]:
        """Return the parameters of `scenarios.fabric.Clos`."""
        up_bps = self.hosts_per_tor * condition.nic_bps // condition.oversubscription
        return {
            "hosts": self.hosts,
            "hosts_per_leaf": self.hosts_per_tor,
            "spines": up_bps // self.uplink_bps,
            "bps": condition.nic_bps,
            "uplink_bps": self.uplink_bps,
            "latency_ns": self.latency_ns,
        }


@dataclass(frozen=True)
class Tuning:
    """Search for each law's one parameter set, the same for all.

    Args:
        switch_parameters: searched with each law's own, which are all numbers of its section that are not 0 (off).
        range_factor: a parameter is drawn log-uniformly from its published value over this to times this, and kept
            within what its field allows.
        trials_per_parameter, trials_step, trials_most: the first number of trials a free parameter, by how much it is
            raised while any law has not settled, and where that ends.
        last_share, least_gain: settled: the last share of trials brought less than this gain.
        pause_weight: a trial's score, to be lowered, is the geometric mean over the tuning cases of the seeds' mean
            completion time x (1 + this x mean pause share).
    """

    optimiser: str = "optuna.samplers.TPESampler"
    optimiser_seed: int = 0
    switch_parameters: tuple[str, ...] = ("kmin_bytes", "kmax_bytes", "pmax", "resume_offset_bytes", "reserve_bytes")
    range_factor: int = 8
    trials_per_parameter: int = 20
    trials_step: int = 10
    trials_most: int = 100
    last_share: float = 0.3
    least_gain: float = 0.01
    pause_weight: float = 1.0

    def has_settled(self, scores: Sequence[float]) -> bool:
        """Whether the last trials lowered the best score, all above 0, by less than the least gain.

        Raises:
            ValueError: too few scores to have a last share and one before it.
        """
        before = len(scores) - round(self.last_share * len(scores))
        if before in (0, len(scores)):
            raise ValueError(f"{len(scores)} scores have no last {self.last_share:.0%}")
        return min(scores) > (1 - self.least_gain) * min(scores[:before])


@dataclass(frozen=True)
class Robustness:
    """Changes, one at a time, to the tuned parameters, on the workloads of `test` under `condition`."""

    condition: str = "200G-ecmp"
    num_seeds: int = 20
    factors: tuple[float, ...] = (0.5, 2.0)
    rtt_noise_us: tuple[float, ...] = (0.1, 0.5, 2.0)
    cnp_interval_us: tuple[float, ...] = (4.0, 50.0)
    share_without_ecn: float = 0.01


@dataclass(frozen=True)
class Rules:
    """Rules of the verdict.

    Args:
        buffers_bytes: of a switch, largest first; a tight case takes the first at which published DCQCN (preset
            `published_dcqcn`) has its ports paused for `pause_share` of the time, on the tuning seeds; else the last.
        limit_ms: of simulated time; a run that has not ended counts as this long.
        rivals: whom the candidate must beat; `none` is shown next to them.
        no_worse, faster, fewer_pauses: upper ends of intervals of a ratio, the candidate over a rival.
        asked_of: the scenario, with all its workloads, for which `faster` and `fewer_pauses` are asked.
    """

    buffers_bytes: tuple[int, ...] = tuple(mib * MIB for mib in (64, 32, 16, 12, 8, 6, 4, 3))
    pause_share: float = 0.01
    published_dcqcn: str = "ns3-paper"
    limit_ms: int = 100
    rivals: tuple[str, ...] = ("dcqcn", "swift", "nscc")
    no_worse: float = 1.02
    faster: float = 0.95
    fewer_pauses: float = 0.80
    asked_of: str = "all-to-all"
    level: float = 0.95
    resamples: int = 50_000
    bootstrap_seed: int = 0


@dataclass(frozen=True)
class Suite:
    """Protocol as a whole.

    Args:
        every: parameters of every workload that does not say otherwise: its seed draws hosts, UDP ports and starts.
        ablation_conditions: of the test set, under which the hybrid runs without each of its parts.
    """

    version: int
    fabric: Fabric
    every: dict[str, int | str]
    tuning_set: CaseSet
    tuning: Tuning
    test: CaseSet
    robustness: Robustness
    ablation_conditions: tuple[str, ...]
    rules: Rules

    def overrides(self, case: Case) -> list[str]:
        """Return the case's overrides for `scenarios.catalogue.build_scenario`, on its fabric `clos`."""
        parameters = {**self.every, **case.workload.parameters}
        fabric = self.fabric.parameters(case.condition)
        return [f"{name if '.' in name else 'scenario.' + name}={value}" for name, value in parameters.items()] + [
            f"fabric.{name}={value}" for name, value in fabric.items()
        ]

    @property
    def digest(self) -> str:
        """SHA-256 of the suite as canonical JSON: another digest, another suite."""
        text = json.dumps(asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()


def _full(num_bytes: int) -> int:
    return -(-num_bytes // MTU_BYTES)


def _ring(p: dict[str, Any]) -> int:
    chunk = p["num_bytes"] // (p["ranks"] * p["channels"])
    return int(p["ranks"] * 2 * (p["ranks"] - 1) * p["channels"] * _full(chunk))


_PACKETS: dict[str, Callable[[dict[str, Any]], int]] = {
    "all-to-all": lambda p: int(p.get("copies", 1) * p["ranks"] * (p["ranks"] - 1) * _full(p["num_bytes"])),
    "ring-all-reduce": _ring,
    "job-phases": lambda p: int(p["cluster.servers"] * p["cluster.nics_per_server"] * _full(p["bytes_per_rank"])),
    "incast": lambda p: int(p["senders"] * _full(p["num_bytes"])),
    "permutation": lambda p: int(p["ranks"] * _full(p["num_bytes"])),
    "victim": lambda p: int((p["senders"] + 1) * _full(p["num_bytes"])),
}


def _job(name: str, servers: int, pp: int, vpp: int, bytes_per_rank: int) -> Workload:
    """The 175B job with two GPUs, each with its NIC, a server, and eight data-parallel replicas."""
    cluster = {"servers": servers, "gpus_per_server": 2, "nics_per_server": 2, "rails": 1}
    parallel = {"tp": 2, "pp": pp, "vpp": vpp, "dp": 8}
    parameters: dict[str, int | str] = {
        **{f"cluster.{key}": value for key, value in cluster.items()},
        **{f"job.parallel.{key}": value for key, value in parallel.items()},
        "ring_steps": 7,
        "bytes_per_rank": bytes_per_rank,
    }
    return Workload(name, "job-phases", parameters, "megascale-12288")


def _workload(name: str, scenario: str, **parameters: int | str) -> Workload:
    return Workload(name, scenario, parameters)


_AT_400G = 400_000_000_000

_TUNING_SET = CaseSet(
    (
        _workload("all-to-all 48", "all-to-all", ranks=48, num_bytes=64 * KIB),
        _workload("all-to-all 4 x 12", "all-to-all", copies=4, ranks=12, num_bytes=256 * KIB),
        _workload("rounds 24", "all-to-all", ranks=24, num_bytes=256 * KIB, rounds=True),
        _workload("all-reduce 24", "ring-all-reduce", ranks=24, channels=1, num_bytes=3 * MIB),
        _job("job 48", servers=24, pp=3, vpp=4, bytes_per_rank=3 * MIB),
        _workload("incast 20:1", "incast", senders=20, num_bytes=512 * KIB),
        _workload("permutation 48", "permutation", ranks=48, num_bytes=2 * MIB),
        _workload("victim 7:1", "victim", senders=7, num_bytes=MIB, placement="in-order"),
    ),
    (
        Condition("200G-ecmp"),
        Condition("200G-spray", routing="spray"),
        Condition("400G-ecmp", _AT_400G),
    ),
    tuple(range(1, 5)),
)

_TEST = CaseSet(
    (
        _workload("all-to-all 64", "all-to-all", ranks=64, num_bytes=128 * KIB),
        _workload("all-to-all 8 x 8", "all-to-all", copies=8, ranks=8, num_bytes=MIB),
        _workload("rounds 32", "all-to-all", ranks=32, num_bytes=512 * KIB, rounds=True),
        _workload("all-reduce 32", "ring-all-reduce", ranks=32, channels=2, num_bytes=8 * MIB),
        _job("job 64", servers=32, pp=4, vpp=6, bytes_per_rank=8 * MIB),
        _workload("incast 8:1", "incast", senders=8, num_bytes=4 * MIB),
        _workload("incast 32:1", "incast", senders=32, num_bytes=MIB),
        _workload("permutation 64", "permutation", ranks=64, num_bytes=4 * MIB),
        _workload("victim 15:1", "victim", senders=15, num_bytes=2 * MIB, placement="in-order"),
    ),
    (
        Condition("200G-ecmp"),
        Condition("200G-flowlet", routing="flowlet"),
        Condition("200G-spray", routing="spray"),
        Condition("200G-window", window=True),
        Condition("200G-deep", buffer="deep"),
        Condition("200G-2:1", oversubscription=2),
        Condition("400G-ecmp", _AT_400G),
        Condition("400G-flowlet", _AT_400G, routing="flowlet"),
        Condition("400G-spray", _AT_400G, routing="spray"),
        Condition("400G-window", _AT_400G, window=True),
        Condition("400G-deep", _AT_400G, buffer="deep"),
    ),
    tuple(range(1_001, 1_033)),
)

SUITE = Suite(
    version=2,
    fabric=Fabric(),
    every={"placement": "random", "sports": "random", "jitter_us": 50},
    tuning_set=_TUNING_SET,
    tuning=Tuning(),
    test=_TEST,
    robustness=Robustness(),
    ablation_conditions=("200G-ecmp", "400G-ecmp"),
    rules=Rules(),
)
