"""The event model: many runs at once, from failure to failure, each second of each run in one account.

A run trains, saves, fails, is noticed, diagnosed, gets its servers and restarts; what was done since the last save that
a restart can load is done again. Failures are Poisson in time where rates are of servers, and then a recovery can fail
as well. Where interruptions were counted over a whole run, their number is known and only their times are chance: as
many points, uniform in the time of training, and an interruption lasts until training goes on. Numbers that are ranges
are drawn: of the run once a run, of the event at each failure. With several replicas only the one that failed is away,
and the others go on at their share of the speed.

All runs advance together by one failure an iteration, so the work is numpy's. Not covered: failures that come in bursts
other than by switch, servers that fail again after their repair, storage that is down, failures while all replicas wait
for each other; saves that are closer to each other than `durable_s` overlap.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from bench.life.inputs import DAY_S, FailureKind, Life, Range
from netlayer.errors import ConfigError

Array = NDArray[np.float64]

TRAINING = "training"
PARTS = (TRAINING, "save", "redone", "slow", "detect", "diagnose", "servers", "restart", "stall", "away")
"""Where the time goes. `training` is what counts; `redone` was lost at a failure, `slow` to stragglers, `away` to
replicas that are not there (in time of the whole job), `stall` to the others' waiting for them."""
_WAYS = ("detect", "diagnose", "servers", "restart")
_MOST_EVENTS = 2_000_000
_RAREST = 1e-30  # failures a second: a smaller rate is none, and its inverse no number


@dataclass(frozen=True)
class Outcome:
    """Result of all runs.

    Args:
        seconds: by part, of each run; together the run's whole time.
        interruptions: of each run.
        drawn: value of each range of the run, by path.
    """

    life: Life
    seconds: Mapping[str, Array]
    interruptions: Array
    drawn: Mapping[str, Array]

    @property
    def ettr(self) -> Array:
        """Return the effective training time ratio of each run."""
        return self.seconds[TRAINING] / (self.life.days * DAY_S)

    def interval(self, share: float = 0.9) -> tuple[float, float]:
        """Return the middle `share` of the runs: its lowest and its highest ratio."""
        low, high = np.quantile(self.ettr, [(1 - share) / 2, (1 + share) / 2])
        return float(low), float(high)

    def shares(self) -> dict[str, float]:
        """Return the mean share of the time of each part."""
        return {part: float(values.mean()) / (self.life.days * DAY_S) for part, values in self.seconds.items()}


def simulate(life: Life, runs: int, seed: int, fixed: Mapping[str, float] | None = None) -> Outcome:
    """Run a life many times.

    Args:
        runs: how often.
        seed: two lives with one seed meet the same chance, as far as they have the same inputs.
        fixed: values of ranges of the run by path, in place of what is drawn.

    Raises:
        ConfigError: interruptions last longer than the time from one to the next, or there are too many to follow.
    """
    inputs = _Inputs(life, runs, seed, fixed or {})
    return (_Job if life.replicas.number == 1 else _Replicas)(life, inputs).run()


class _Inputs:
    """Values of the ranges: one array of all runs each, and new draws for what differs from event to event."""

    def __init__(self, life: Life, runs: int, seed: int, fixed: Mapping[str, float]) -> None:
        self.runs, self.seed = runs, seed
        self.ranges = dict(life.ranges())
        # One generator a path: a policy that changes one input leaves the draws of all others as they are.
        self._rng = {path: self.generator(path) for path in self.ranges}
        self.drawn = {
            path: np.full(runs, fixed[path]) if path in fixed else self._draw(path)
            for path, one in self.ranges.items()
            if one.per == "run"
        }

    def generator(self, what: str) -> np.random.Generator:
        return np.random.default_rng([self.seed, zlib.crc32(what.encode())])

    def __call__(self, path: str) -> Array:
        """Return the values of a range for all runs, at this event."""
        return self.drawn[path] if path in self.drawn else self._draw(path)

    def mean(self, path: str) -> Array:
        """Return each run's mean of a range over its events."""
        return self.drawn[path] if path in self.drawn else np.full(self.runs, self.ranges[path].middle)

    def _draw(self, path: str) -> Array:
        one: Range = self.ranges[path]
        if one.low == one.high:
            return np.full(self.runs, one.low)
        return one.low + (one.high - one.low) * self._rng[path].random(self.runs)


class _Engine:
    """Common parts of both ways of failing: rates, kinds, the pool of standbys, the account."""

    def __init__(self, life: Life, inputs: _Inputs) -> None:
        self.life, self.inputs = life, inputs
        self.end_s = life.days * DAY_S
        runs = inputs.runs
        self.seconds = {part: np.zeros(runs) for part in PARTS}
        self.interruptions = np.zeros(runs)
        self.clock_s = np.zeros(runs)
        self.ready_s = np.zeros((runs, life.recovery.standbys))
        self.chance = inputs.generator("failures")
        self.kinds = inputs.generator("kinds")
        rates = [self._rate(kind) for kind in life.failures]
        self.by_kind = np.array(rates).reshape(len(rates), runs)  # a second, before what counted ones need
        self.rate, training_s = self._while_training(self.by_kind.sum(axis=0))
        most = float((self.rate * training_s).max(initial=0.0))
        if most * runs > _MOST_EVENTS:
            raise ConfigError("failures", f"{most:,.0f} a run", "are too many to follow", "take fewer days or runs")
        if life.is_counted:
            self._spread_counted(np.rint(self.rate * training_s).astype(np.int64), training_s)

    def _rate(self, kind: FailureKind) -> Array:
        path = f"failures.{kind.name}"
        if kind.per_1000_server_days is not None:
            return self.inputs.mean(f"{path}.per_1000_server_days") * self.life.servers / 1000 / DAY_S
        if kind.per_day is not None:
            return self.inputs.mean(f"{path}.per_day") / DAY_S
        return self.inputs.mean(f"{path}.count") / self.end_s

    def _while_training(self, rate: Array) -> tuple[Array, Array]:
        """Return the rate while it trains, and the time for that: counted ones share the time with what they cost."""
        whole_s = np.full(self.inputs.runs, self.end_s)
        if not self.life.is_counted:
            return rate, whole_s
        share = rate * self._mean_interruption(rate)
        if (share >= 1).any():
            worst = int(share.argmax())
            raise ConfigError(
                "failures",
                f"one every {1 / rate[worst]:,.0f} s",
                f"comes before the one before it is over ({share[worst] / rate[worst]:,.0f} s)",
                "give shorter times, or fewer failures",
            )
        return rate / (1 - share), whole_s * (1 - share)

    def _spread_counted(self, count: NDArray[np.int64], training_s: Array) -> None:
        """Lay out so many failures of each run: spans of training between them, and kinds in their shares."""
        runs, most = self.inputs.runs, int(count.max(initial=0))
        place = np.arange(most + 1)
        spans = np.where(place <= count[:, None], self.chance.exponential(size=(runs, most + 1)), 0.0)
        spans *= (training_s / spans.sum(axis=1))[:, None]
        self._spans = np.where(place < count[:, None], spans, np.inf)
        order = (
            np.where(place < count[:, None], self.kinds.random((runs, most + 1)), 2.0).argsort(axis=1).argsort(axis=1)
        )
        self._marks = (order + self.kinds.random((runs, most + 1))) / np.maximum(count, 1)[:, None]
        self._next = 0

    def _mean_interruption(self, rate: Array) -> Array:
        """Return the mean time in which nothing trains, over the kinds, if standbys are always ready."""
        mean, total = self.inputs.mean, np.zeros(self.inputs.runs)
        server = mean("recovery.standby_s" if self.life.recovery.standbys else "recovery.reschedule_s")
        for kind, one in zip(self.life.failures, self.by_kind, strict=True):
            path = f"failures.{kind.name}"
            idle = np.zeros(self.inputs.runs) if kind.slowdown else mean(f"{path}.detect_s")
            lost = self.life.servers_lost(kind)
            total += one * (idle + mean(f"{path}.diagnose_s") + mean("recovery.restart_s") + (server if lost else 0.0))
        return np.divide(total, rate, out=np.zeros_like(total), where=rate > 0)

    def until_failure(self) -> Array:
        """Return the seconds of training until the next failure; no end where nothing fails."""
        if self.life.is_counted:
            self._next += 1
            return self._spans[:, min(self._next - 1, self._spans.shape[1] - 1)]
        wait = self.chance.exponential(size=self.inputs.runs)
        return np.divide(wait, self.rate, out=np.full_like(wait, np.inf), where=self.rate > _RAREST)

    def pick_kinds(self) -> NDArray[np.int64]:
        """Return the kind of the failure that `until_failure` gave, for each run."""
        if not len(self.by_kind):
            return np.zeros(self.inputs.runs, dtype=np.int64)
        total = self.by_kind.sum(axis=0)
        bounds = np.cumsum(self.by_kind, axis=0) / np.where(total > 0, total, 1.0)
        if self.life.is_counted:
            mark = self._marks[:, min(self._next - 1, self._marks.shape[1] - 1)]
        else:
            mark = self.kinds.random(self.inputs.runs)
        picked: NDArray[np.int64] = (mark >= bounds[:-1]).sum(axis=0)
        return picked

    def ways(self, kinds: NDArray[np.int64], hit: NDArray[np.bool_]) -> tuple[dict[str, Array], Array]:
        """Return the seconds of each phase of a recovery, and what a fail-slow server cost before; takes standbys.

        Args:
            kinds: of the failure of each run.
            hit: runs that fail now; the others' standbys stay.
        """
        runs = self.inputs.runs
        phases = {phase: np.zeros(runs) for phase in _WAYS}
        lost, slow = np.zeros(runs, dtype=np.int64), np.zeros(runs)
        for index, kind in enumerate(self.life.failures):
            of_kind, path = kinds == index, f"failures.{kind.name}"
            detect = self.inputs(f"{path}.detect_s")
            if kind.slowdown:
                slow = np.where(of_kind, kind.slowdown * detect, slow)
            else:
                phases["detect"] = np.where(of_kind, detect, phases["detect"])
            phases["diagnose"] = np.where(of_kind, self.inputs(f"{path}.diagnose_s"), phases["diagnose"])
            lost = np.where(of_kind, self.life.servers_lost(kind), lost)
        needed_s = self.clock_s + phases["detect"] + phases["diagnose"]
        phases["servers"] = self._servers(lost, needed_s, hit)
        phases["restart"] = self.inputs("recovery.restart_s").copy()
        return phases, slow

    def _servers(self, lost: NDArray[np.int64], needed_s: Array, hit: NDArray[np.bool_]) -> Array:
        """Take standbys that are ready, those that wait longest first; the scheduler gives what is missing."""
        from_pool, from_scheduler = self.inputs("recovery.standby_s"), self.inputs("recovery.reschedule_s")
        if not self.life.recovery.standbys:
            return np.where(lost > 0, from_scheduler, 0.0)
        self.ready_s.sort(axis=1)
        is_ready = self.ready_s <= needed_s[:, None]
        used = is_ready & (np.arange(self.ready_s.shape[1]) < lost[:, None]) & hit[:, None]
        again = needed_s + self.inputs("recovery.replenish_s")
        self.ready_s = np.where(used, again[:, None], self.ready_s)
        # Both go on at the same time: the job starts when the last server is in place.
        missing = lost > used.sum(axis=1)
        return np.where(missing, np.maximum(from_scheduler, from_pool * (lost > 0)), np.where(lost > 0, from_pool, 0.0))

    def spend(self, phases: Mapping[str, Array], limit_s: Array) -> None:
        """Enter the phases in their order, up to a limit, and advance the clock by them."""
        left = np.minimum(limit_s, self.end_s - self.clock_s)
        for phase in phases:
            part = np.clip(phases[phase], 0.0, left)
            self.seconds[phase] += part
            self.clock_s += part
            left = left - part

    def move(self, part: str, amount: Array) -> None:
        """Take from the training what turned out not to count, at most all of it."""
        amount = np.clip(amount, 0.0, self.seconds[TRAINING])
        self.seconds[TRAINING] -= amount
        self.seconds[part] += amount

    def outcome(self) -> Outcome:
        self.move("slow", self.seconds[TRAINING] * self.inputs("slow_share"))
        return Outcome(self.life, self.seconds, self.interruptions, self.inputs.drawn)


class _Job(_Engine):
    """A failure stops the whole job."""

    def run(self) -> Outcome:
        """Train until the next failure, recover, and again, until all runs are at their end."""
        every_s, stall_s = self.inputs("checkpoints.every_s"), self.inputs("checkpoints.stall_s")
        durable_s = self.inputs("checkpoints.durable_s")
        cycle_s = every_s + stall_s
        planned = np.array([kind.planned for kind in self.life.failures] or [False])
        slows = np.array([kind.slowdown > 0 for kind in self.life.failures] or [False])
        is_on = np.ones(self.inputs.runs, dtype=bool)
        while is_on.any():
            # A recovery ends at the start of a cycle: `every_s` of training, then a save.
            left_s = self.end_s - self.clock_s
            span_s = np.where(is_on, np.minimum(self.until_failure(), left_s), 0.0)
            hit = is_on & (span_s < left_s)
            kinds = self.pick_kinds()
            saves = np.floor(span_s / cycle_s)
            rest_s = span_s - saves * cycle_s
            work_s = saves * every_s + np.minimum(rest_s, every_s)
            # A save that is still on its way to the storage does not help.
            usable = np.clip(np.floor((span_s - durable_s) / cycle_s), 0, saves)
            is_lost = hit & ~planned[kinds] & ~slows[kinds]
            redone_s = np.where(is_lost, work_s - usable * every_s, 0.0)
            self.seconds[TRAINING] += work_s - redone_s
            self.seconds["redone"] += redone_s
            self.seconds["save"] += span_s - work_s
            self.clock_s += span_s
            is_on = hit
            self.interruptions += hit
            self._recover(kinds, hit)
        return self.outcome()

    def _recover(self, kinds: NDArray[np.int64], hit: NDArray[np.bool_]) -> None:
        """Go through the recovery; where servers fail meanwhile it begins anew, for the new failure."""
        while hit.any():
            phases, slow_s = self.ways(kinds, hit)
            self.move("slow", np.where(hit, slow_s, 0.0))
            whole_s = sum((phases[phase] for phase in _WAYS), np.zeros(self.inputs.runs))
            next_s = np.full(self.inputs.runs, np.inf) if self.life.is_counted else self.until_failure()
            again = hit & (next_s < whole_s) & (self.clock_s + next_s < self.end_s)
            self.spend(phases, np.where(hit, np.where(again, next_s, whole_s), 0.0))
            self.interruptions += again
            hit, kinds = again, self.pick_kinds()


class _Replicas(_Engine):
    """A failure takes one replica away, and the others wait a little and go on."""

    def _mean_interruption(self, rate: Array) -> Array:
        mean = self.inputs.mean
        return mean("replicas.stall_s") + mean("replicas.rejoin_stall_s") + 0.0 * rate

    def _while_training(self, rate: Array) -> tuple[Array, Array]:
        training, training_s = super()._while_training(rate)
        if not self.life.is_counted:
            return training, training_s
        # What falls on a replica that is away is no failure, and still so many were counted.
        away = np.clip(rate * super()._mean_interruption(rate) / self.life.replicas.number, 0.0, 0.9)
        return training / (1 - away), training_s

    def run(self) -> Outcome:
        """Train with the replicas that are there until the next failure, and again, until all runs are at their end."""
        number, runs = self.life.replicas.number, self.inputs.runs
        every_s, stall_s = self.inputs("checkpoints.every_s"), self.inputs("checkpoints.stall_s")
        save_share = stall_s / (every_s + stall_s)
        per_replica = self.life.servers / number
        hits = np.array([max(1, int(np.ceil(self.life.servers_lost(k) / per_replica))) for k in self.life.failures])
        picks, back_s = self.inputs.generator("replicas"), np.zeros((runs, number))
        is_on = np.ones(runs, dtype=bool)
        while is_on.any():
            start_s = self.clock_s.copy()
            left_s = self.end_s - start_s
            span_s = np.where(is_on, np.minimum(self.until_failure(), left_s), 0.0)
            hit = is_on & (span_s < left_s)
            until_s = start_s + span_s
            there_s = np.clip(until_s[:, None] - np.maximum(back_s, start_s[:, None]), 0.0, None).sum(axis=1) / number
            self.seconds["save"] += there_s * save_share
            self.seconds[TRAINING] += there_s * (1 - save_share)
            self.seconds["away"] += span_s - there_s
            self.clock_s = until_s
            returned = ((back_s > start_s[:, None]) & (back_s <= until_s[:, None])).sum(axis=1)
            self._stall(np.where(is_on, returned * self.inputs("replicas.rejoin_stall_s"), 0.0))
            is_on = hit & (self.clock_s < self.end_s)
            self._fail(is_on, picks.integers(number, size=runs), hits, back_s, every_s)
        return self.outcome()

    def _stall(self, seconds: Array) -> None:
        self.spend({"stall": seconds}, seconds)

    def _fail(
        self, hit: NDArray[np.bool_], first: NDArray[np.int64], hits: NDArray[np.int64], back_s: Array, every_s: Array
    ) -> None:
        """Take a replica away (several under one switch); where it is away already, nothing fails."""
        kinds = self.pick_kinds()
        hit = hit & (back_s[np.arange(len(first)), first] <= self.clock_s)
        self.interruptions += hit
        phases, slow_s = self.ways(kinds, hit)
        self.move("slow", np.where(hit, slow_s, 0.0))
        absent_s = sum((phases[phase] for phase in _WAYS), np.zeros(len(first)))
        number = back_s.shape[1]
        count = hits[kinds] if len(hits) else np.ones_like(first)
        is_taken = ((np.arange(number) - first[:, None]) % number < count[:, None]) & hit[:, None]
        back_s[:] = np.where(is_taken, np.maximum(back_s, (self.clock_s + absent_s)[:, None]), back_s)
        # With no replica left its state is gone too: back to the last save, half an interval on average.
        gone = hit & (back_s > self.clock_s[:, None]).all(axis=1)
        self.move("redone", np.where(gone, every_s / 2, 0.0))
        self._stall(np.where(hit, self.inputs("replicas.stall_s"), 0.0))
