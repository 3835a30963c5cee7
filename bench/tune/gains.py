"""Gains of settings that act on a step: the step's estimate with and without each, under numbers that are not known.

An interval is the middle 90% over draws of the generation's six numbers (by the widths that the fit's prior has) and of
the switches' hash seeds, the same draw for both sides. It does not hold what the estimate lacks: how far that is off on
measured rows, `netlayer estimate arena` and `check` say. All of it is predicted.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bench.estimate.devices import Numbers
from bench.estimate.fit import WIDTH
from bench.estimate.network import phase_slowdowns
from bench.estimate.plan import Plan
from bench.estimate.step import estimate_step
from bench.tune.profile import Gain
from netlayer.config.tree import JobConfig

if TYPE_CHECKING:
    from netlayer.config.tree import Config
    from topology.placement.strategies import Placement, StrategyName

Floats = NDArray[np.float64]
DRAWS = 12
SEEDS = 4
LEAST_GAIN = 5e-4
"""Share of a step below which the consumer's own value stays: the estimate does not tell them apart."""
HASH: Any = "crc16"
"""Hash that `topology place` takes by default; which one switches have, `topology probe` finds."""


@dataclass(frozen=True)
class Network:
    """Slowdowns by hash collisions, a value a seed."""

    ring: tuple[float, ...] = (1.0,)
    pipeline: tuple[float, ...] = (1.0,)


@dataclass(frozen=True)
class State:
    """All that decides a step.

    Args:
        plan: job, device, channels.
        strategy: way to place ranks on servers.
        qps: queue pairs a connection.
        congestion: factors on rings and on messages between stages, a seed each; 1 with the congestion control planned.
    """

    plan: Plan
    strategy: StrategyName = "given"
    qps: int = 1
    congestion: tuple[tuple[float, float], ...] = ((1.0, 1.0),)

    def with_job(self, section: str, **values: object) -> State:
        """Return the state with keys of a section of the job changed; rules between keys are checked again."""
        job = self.plan.job
        tree = job.model_dump(exclude_unset=True)
        tree[section] = {**tree.get(section, {}), **values}
        return dataclasses.replace(self, plan=dataclasses.replace(self.plan, job=JobConfig.model_validate(tree)))

    @functools.cached_property
    def key(self) -> tuple[object, ...]:
        """Difference between two states of one command."""
        job = self.plan.job.model_dump_json()
        return job, self.plan.dp_channels, self.plan.zero, self.strategy, self.qps, self.congestion


class StepModel:
    """Steps of states under the same draws."""

    def __init__(self, centre: Numbers, fabric: FabricModel | None, draws: int = DRAWS, seed: int = 0) -> None:
        self.numbers = [centre, *draw_numbers(centre, draws - 1, seed)]
        self.fabric = fabric
        self._steps: dict[tuple[object, ...], Floats] = {}

    def steps(self, state: State, draws: int | None = None) -> Floats:
        """Return the predicted seconds of a step, a draw each, or of the first draws."""
        kept = self._steps.get(state.key, np.empty(0))
        count = len(self.numbers) if draws is None else draws
        if len(kept) < count:
            more = [self._step_s(state, index) for index in range(len(kept), count)]
            self._steps[state.key] = kept = np.concatenate([kept, more])
        return kept[:count]

    def middle_s(self, state: State) -> float:
        """Return the median step over the hash seeds, with the fitted numbers and a few draws: to choose by."""
        return float(np.median(self.steps(state, SEEDS)))

    def gain(self, tuned: State, other: State, *, simulated: bool = False) -> Gain:
        """Return the share of the other's step that the tuned one saves."""
        saved = 1 - self.steps(tuned) / self.steps(other)
        return gain_of(saved, "simulated" if simulated else "formula")

    def _step_s(self, state: State, index: int) -> float:
        network = self.fabric.network(state.strategy, state.qps) if self.fabric else Network()
        ring, pipeline = state.congestion[index % len(state.congestion)]
        return estimate_step(
            state.plan,
            self.numbers[index],
            slowdown=network.ring[index % len(network.ring)] * ring,
            pp_slowdown=network.pipeline[index % len(network.pipeline)] * pipeline,
        ).step_s


def gain_of(saved: Floats, evidence: Any, of: Any = "step time") -> Gain:
    """Return a gain of draws: their median and middle 90%."""
    low, middle, high = np.quantile(saved, [0.05, 0.5, 0.95])
    return Gain(of=of, share=_round(middle), low=_round(low), high=_round(high), evidence=evidence)


def draw_numbers(centre: Numbers, count: int, seed: int) -> list[Numbers]:
    """Draw numbers around a card's: normal with the prior's widths, shares at most 1."""
    rng = np.random.default_rng([seed, 45])
    values, widths = np.array(centre.values()), np.array(WIDTH.values())
    names = [each.name for each in dataclasses.fields(Numbers)]
    drawn = np.clip(rng.normal(values, widths, (count, len(values))), 0.25 * values, 1.0)
    return [Numbers(**dict(zip(names, map(float, row), strict=True))) for row in drawn]


class FabricModel:
    """Slowdowns of the job's phases on its fabric by placement and queue pairs: simulated max-min rates."""

    def __init__(self, config: Config, seed: int = 0, seeds: int = SEEDS) -> None:
        from topology.fabric.clos import Clos
        from topology.placement.strategies import num_slots, usable_servers

        self.config, self.seed, self.seeds = config, seed, seeds
        self.fabric = Clos.build(config.cluster)
        self.slots = num_slots(config.cluster, config.job.parallel)
        self.usable = usable_servers(config.cluster.servers)
        self._networks: dict[tuple[str, int], Network] = {}

    def placement(self, strategy: StrategyName, seed: int) -> Placement:
        """Return where a strategy puts the job's ranks; only a random one asks for the seed."""
        from topology.placement.strategies import place_slots

        return place_slots(strategy, self.fabric, self.config.job.parallel, self.slots, self.usable, seed)

    def network(self, strategy: StrategyName, qps: int) -> Network:
        """Return the slowdowns over the hash seeds; a random placement is drawn anew with each."""
        if (strategy, qps) not in self._networks:
            self._networks[strategy, qps] = self._network(strategy, qps)
        return self._networks[strategy, qps]

    def _network(self, strategy: StrategyName, qps: int) -> Network:
        from topology.traffic.step import slot_flows

        flows = slot_flows(self.config.job, self.config.cluster, qps)
        each: list[Mapping[str, float]] = []
        for seed in range(self.seed, self.seed + self.seeds):
            placed = self.placement(strategy, seed)
            moved = placed.apply(flows, self.fabric.nics_per_server)
            each.append(phase_slowdowns(self.fabric, moved, HASH, seed, bound=True))
        return Network(_column(each, "ring"), _column(each, "pipeline"))


def _column(rows: Sequence[Mapping[str, float]], name: str) -> tuple[float, ...]:
    return tuple(round(row.get(name, 1.0), 4) for row in rows)


def _round(value: float) -> float:
    return round(float(value), 6)
