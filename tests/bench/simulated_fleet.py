"""A simulated fleet without processes: rows and evidence with one planted fault, to test the judging logic.

All of its times are simulated; nothing here measures anything.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from bench.accept.agents.fleet import Outcome, Where

FaultKind = Literal["none", "slow", "hang", "stuck inside", "dead", "corrupt", "corrupt link", "slow node", "slow link"]
_BLOCKS = 6
_BASE_US = {"host": 1.0, "gemm": 500.0, "copy": 800.0, "all_reduce": 900.0, "all_to_all": 700.0, "train": 2000.0}


_ALONE = ("host", "gemm", "copy")


@dataclass(frozen=True)
class World:
    """The planted fault, the ranks that have it, and the noise of times (relative standard deviation)."""

    kind: FaultKind
    ranks: tuple[int, ...]
    factor: float
    noise: float


@dataclass(frozen=True)
class Bursts:
    """Other work on the machine, in bursts.

    A burst, and the pause between two, last `mean_tasks` tasks on average; a burst lengthens times by up to `most_us`.
    """

    mean_tasks: float = 8.0
    most_us: float = 4000.0


class SimulatedFleet:
    """Stands in for `Fleet.run`."""

    def __init__(self, world: World, seed: int, bursts: Bursts | None = None) -> None:
        self.world, self._draw, self.num_tasks = world, random.Random(seed), 0
        self._bursts, self._busy, self._until = bursts, False, 0.0

    def run(self, name: str, args: Mapping[str, Any], groups: Iterable[Sequence[int]], limit_s: float) -> list[Outcome]:
        only = [tuple(pair) for pair in args.get("only", ())]
        if not only:
            self._time_passes()
        return [self._outcome(name, tuple(group), only) for group in groups]

    def _time_passes(self) -> None:
        self.num_tasks += 1
        while self._bursts and self.num_tasks > self._until:
            self._busy = not self._busy
            self._until += self._draw.expovariate(1 / self._bursts.mean_tasks)

    def _outcome(self, name: str, group: tuple[int, ...], only: Sequence[tuple[int, ...]]) -> Outcome:
        world, outcome = self.world, Outcome(group)
        met = set(world.ranks) <= set(group) and (len(group) > 1 or name in _ALONE)
        if met and world.kind == "dead":
            outcome.dead = {world.ranks[0]: "was ended by SIGKILL"}
        elif met and len(group) > 1 and world.kind == "stuck inside":
            outcome.where = {rank: Where(7, 6, "S") for rank in group}
        elif met and len(group) > 1 and world.kind == "hang":
            outcome.where = {rank: Where(6 if rank in world.ranks else 7, 6, "S") for rank in group}
        else:
            outcome.rows = self._pairs(group, only) if name == "pairs" else self._rows(name, group)
        return outcome

    def _rows(self, name: str, group: tuple[int, ...]) -> list[dict[str, Any]]:
        world = self.world
        in_group = set(world.ranks) <= set(group)
        grouped = name not in _ALONE
        factor = 1.0
        if in_group and (grouped and world.kind in ("slow node", "slow link")):
            factor = world.factor
        if in_group and not grouped and world.kind == "slow":
            factor = world.factor
        wrong = int(in_group and grouped and len(group) > 1 and world.kind in ("corrupt", "corrupt link"))
        rows = []
        for at in range(len(group)):
            for direction in ("device_to_device", "host_to_device") if name == "copy" else ("",):
                row = self._row(name, at, _BASE_US[name] * factor, wrong)
                rows.append({**row, "direction": direction} if direction else row)
        return rows

    def _row(self, name: str, rank: int, time_us: float, wrong: int) -> dict[str, Any]:
        time_us *= max(0.5, self._draw.gauss(1, self.world.noise))
        if self._bursts and self._busy:  # in half of all rows some call finds the cores free
            time_us += max(0.0, self._draw.uniform(-self._bursts.most_us, self._bursts.most_us))
        row: dict[str, Any] = {"check": name, "rank": rank, "device": "simulated", "size_bytes": 1 << 26}
        row |= {"iterations_us": [time_us * max(0.5, self._draw.gauss(1, self.world.noise)) for _ in range(_BLOCKS)]}
        row |= {
            "stopped_share": 0.0,
            "p50_us": time_us,
            "p99_us": time_us * 1.2,
            "min_us": time_us * 0.98,
            "wrong": wrong,
            "ok": not wrong,
        }
        return {**row, "bus_bw_gbs": 1e5 / time_us, "first_loss": 1.0, "last_loss": 0.5}

    def _pairs(self, group: tuple[int, ...], only: Sequence[tuple[int, ...]]) -> list[dict[str, Any]]:
        """All pairs at once, or those asked for one after the other."""
        world, rows = self.world, []
        for ends in only or itertools.combinations(group, 2):
            if only:
                self._time_passes()
            low, high = map(group.index, ends)
            factor = world.factor if set(world.ranks) <= set(ends) and world.kind in ("slow node", "slow link") else 1.0
            for direction in ("latency", "low_to_high", "high_to_low", "both"):
                sender = ends[0] if direction == "low_to_high" else ends[1]
                wrong = world.kind == "corrupt" and sender in world.ranks and direction.endswith(("high", "low"))
                wrong = wrong or (world.kind == "corrupt link" and set(ends) == set(world.ranks))
                base = 20.0 if direction == "latency" else 1000.0
                row = self._row("pairs", low, base * factor, int(wrong and direction != "latency"))
                launches = {} if direction == "latency" else {"messages": 1, "host_us": 1.0}
                rows.append({**row, **launches, "peer": high, "round": 0, "direction": direction})
        return rows
