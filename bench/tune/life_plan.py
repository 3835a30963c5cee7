"""Checkpoint interval and retransmit timer: what they are worth in effective training time.

The interval is chosen by the event model of a run's life (`bench.life`) among usual ones and Young's; gains are of the
same runs, met by the same chance, with the one interval and with the other.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from bench.life.inputs import DAY_S, DEFAULTS_FILE, Life, exactly, read_life
from bench.life.model import simulate
from bench.life.policies import young_s
from bench.tune.gains import gain_of
from bench.tune.profile import Gain
from netlayer.config.tree import Config

RUNS = 200
_CANDIDATES_S = (150.0, 300.0, 600.0, 900.0, 1800.0, 3600.0)
_LEAST_GAIN = 1e-4
"""Effective training time for which an interval is not changed."""
LINK = "link or NIC"
"""Kind of failure of bench/life/defaults.toml that a retransmit timer concerns."""


@dataclass(frozen=True)
class CheckpointPlan:
    """Seconds of training between two saves, against the usual ones."""

    every_s: float
    usual_s: float
    gain: Gain
    ettr: float


def life_of(config: Config, stall_s: float | None = None, durable_s: float | None = None) -> Life:
    """Return the life of a job's cluster with published rates, and what was measured of its saves."""
    cluster = config.cluster
    life = read_life(
        DEFAULTS_FILE,
        "--life",
        name=cluster.name,
        servers=cluster.servers,
        gpus_per_server=cluster.gpus_per_server,
        servers_per_switch=min(cluster.servers_per_tor_set, cluster.servers),
    )
    measured = {"stall_s": stall_s, "durable_s": durable_s}
    changed = {name: exactly(value, "measured") for name, value in measured.items() if value is not None}
    return life.model_copy(update={"checkpoints": life.checkpoints.model_copy(update=changed)})


def plan_checkpoints(life: Life, usual_s: float | None, seed: int, runs: int = RUNS) -> CheckpointPlan:
    """Choose the interval with the most effective training time, none shorter than a save takes to be durable.

    Args:
        usual_s: what the job has now; None: the life's usual interval.
    """
    usual = life.checkpoints.every_s.middle if usual_s is None else usual_s
    least = life.checkpoints.durable_s.high
    candidates = sorted({usual, *(each for each in (young_s(life), *_CANDIDATES_S) if each >= least)})
    ratios = {each: simulate(_every(life, each), runs, seed).ettr for each in candidates}
    best = max(candidates, key=lambda each: float(ratios[each].mean()))
    if ratios[best].mean() - ratios[usual].mean() < _LEAST_GAIN:
        best = usual
    saved = ratios[best] - ratios[usual]
    gain = gain_of(np.asarray(saved), "simulated", "effective training time")
    return CheckpointPlan(best, usual, gain, float(ratios[best].mean()))


def sooner_gain(life: Life, seconds_sooner: float) -> Gain:
    """Return what finding each dead path so much sooner gains: at least nothing, for other watches may be sooner."""
    kind = next(kind for kind in life.failures if kind.name == LINK)
    rate = kind.per_1000_server_days
    assert rate is not None
    high = rate.high * life.servers / 1000 / DAY_S * seconds_sooner
    middle = rate.middle * life.servers / 1000 / DAY_S * seconds_sooner / 2
    return Gain(of="effective training time", share=round(middle, 6), low=0.0, high=round(high, 6), evidence="formula")


def _every(life: Life, seconds: float) -> Life:
    return life.model_copy(update={"checkpoints": life.checkpoints.model_copy(update={"every_s": exactly(seconds)})})
