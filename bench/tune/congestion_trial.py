"""NIC profiles set against each other on a cut of the job's traffic: packets simulated under each one's DCQCN.

The cut keeps a server, tensor parallelism and pipeline stages, and few data-parallel ranks, on two pods of few ToR sets
so that rings and messages cross hashed links. What a NIC profile says of DCQCN becomes the simulator's parameters by
`parameters`; what the simulator has not (initial alpha, byte counter of a Mellanox NIC, first CNP's rate) is omitted.
Both sides meet the same seeds.
"""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from congestion.nic.profile.file import Profile
from congestion.nic.profile.parameters import PARAMETERS
from congestion.simulation.sweep import Point, run_point
from netlayer.config.file import to_toml
from netlayer.config.tree import Config, build_config
from netlayer.errors import ConfigError

SEEDS = 4
BYTES_PER_RANK = "4MiB"
_PHASES = {"ring": "reduce-scatter", "pipeline": "pipeline"}
_SERVERS = 32
_AT_BPS = 200 * 10**9  # rate at which the simulator's thresholds and increases are meant
_MBPS = 10**6


@dataclass(frozen=True)
class Trial:
    """Completion of the cut's rings and of its pipeline messages under a profile, microseconds a seed."""

    ring_us: tuple[float, ...]
    pipeline_us: tuple[float, ...]

    def over(self, other: Trial) -> tuple[tuple[float, float], ...]:
        """Return this profile's time over another's, of rings and messages, a seed each; at least 1."""
        return tuple(
            (round(max(1.0, ring / ring_other), 5), round(max(1.0, message / message_other), 5))
            for ring, ring_other, message, message_other in zip(
                self.ring_us, other.ring_us, self.pipeline_us, other.pipeline_us, strict=True
            )
        )

    @property
    def score(self) -> float:
        """Return the geometric mean over phases and seeds: to be lowered."""
        return statistics.geometric_mean([*self.ring_us, *self.pipeline_us])


def parameters(profile: Profile, cluster_nic_bps: int, port_bps: int) -> dict[str, object]:
    """Return the simulator's parameters for what a profile says, and the NIC's defaults where it is silent."""
    values = {name: known.default for name, known in PARAMETERS.items()} | profile.dcqcn
    scale = _AT_BPS / cluster_nic_bps
    line_mbps = cluster_nic_bps // _MBPS
    result: dict[str, object] = {
        "congestion.dcqcn.alpha_us": max(0.1, float(values["rp_dce_tcp_rtt"])),
        "congestion.dcqcn.decrease_us": max(0.1, float(values["rp_rate_reduce_monitor_period"])),
        "congestion.dcqcn.increase_us": max(0.1, float(values["rp_time_reset"])),
        "congestion.dcqcn.fast_recovery_steps": int(values["rp_threshold"]),
        "congestion.dcqcn.rai_bps": round(values["rp_ai_rate"] * _MBPS * scale),
        "congestion.dcqcn.rhai_bps": round(values["rp_hai_rate"] * _MBPS * scale),
        "congestion.dcqcn.min_rate_bps": min(values["rp_min_rate"] or 1, line_mbps) * _MBPS,
        "congestion.dcqcn.g": round(1 - min(values["rp_dce_tcp_g"], 1023) / 1024, 6),
        "congestion.dcqcn.clamp_target": bool(values["rp_clamp_tgt_rate"]),
        "congestion.cnp_interval_us": float(values["np_min_time_between_cnps"]),
        "congestion.pfc": bool(profile.pfc.priorities),
    }
    marks = profile.switch
    if marks.kmin_bytes is not None and marks.kmax_bytes is not None and marks.pmax_percent is not None:
        result |= {
            "congestion.kmin_bytes": round(marks.kmin_bytes * _AT_BPS / port_bps),
            "congestion.kmax_bytes": round(marks.kmax_bytes * _AT_BPS / port_bps),
            "congestion.pmax": marks.pmax_percent / 100,
        }
    return result


def cut(config: Config) -> Config:
    """Return a small job and cluster of the same servers, stages and rails.

    Raises:
        ConfigError: the job does not leave a server, or no small fabric of this kind has the ports.
    """
    cluster, job = config.cluster, config.job
    per_replica = max(1, job.parallel.tp * job.parallel.pp // cluster.gpus_per_server)
    if job.parallel.tp * job.parallel.pp % cluster.gpus_per_server and job.parallel.pp > 1:
        per_replica = 1
    replicas = max(2, 2 ** int(math.log2(max(2, _SERVERS / per_replica))))
    servers = min(replicas * per_replica, cluster.servers)
    dp = servers * cluster.gpus_per_server // (job.parallel.tp * job.parallel.pp)
    if servers < 4 or dp < 2:
        raise ConfigError("--simulate", config.cluster.name, "has too few servers for hashed links", "omit it")
    tree = config.model_dump(exclude_unset=True)
    pods = 2 if cluster.tiers == 3 and servers % 8 == 0 else 1
    tree["cluster"] |= {"servers": servers, "servers_per_tor_set": max(1, servers // 4), "pods": pods}
    tree["job"]["parallel"] = {**tree["job"].get("parallel", {}), "dp": dp}
    unit = job.batch.micro_batch_size * dp * max(1, job.parallel.pp)
    tree["job"]["batch"] = {**tree["job"].get("batch", {}), "global_batch_size": unit, "start_size": 0, "increment": 0}
    return build_config(tree)


def run_trials(
    config: Config, profiles: Mapping[str, Profile], seeds: Sequence[int], on_progress: Callable[[int, int, str], None]
) -> dict[str, Trial]:
    """Simulate the cut's phases under each profile's DCQCN.

    Raises:
        ConfigError: see `cut`; the fabric has not the ports.
    """
    small = cut(config)
    phases = {name: phase for name, phase in _PHASES.items() if name == "ring" or small.job.parallel.pp > 1}
    trials: dict[str, Trial] = {}
    done, total = 0, len(profiles) * len(phases) * len(seeds)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "cut.toml"
        file.write_text(to_toml(small), encoding="utf-8")
        for name, profile in profiles.items():
            values = parameters(profile, small.cluster.nic_bps, small.cluster.switch_port_bps)
            own = tuple(f"{key}={_text(value)}" for key, value in values.items())
            times: dict[str, tuple[float, ...]] = {}
            for kind, phase in phases.items():
                overrides = (*own, f"scenario.phases={phase}", f"scenario.bytes_per_rank={BYTES_PER_RANK}")
                each = []
                for seed in seeds:
                    on_progress(done, total, f"{name}, {phase}")
                    row = run_point(Point("job-phases", "dcqcn", seed, overrides, config=file))
                    each.append(float(row["completion_us"]))
                    done += 1
                times[kind] = tuple(each)
            trials[name] = Trial(times["ring"], times.get("pipeline", (1.0,) * len(seeds)))
    return trials


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
