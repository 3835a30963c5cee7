"""What a run looked like over time: rates, queues and fairness at equal intervals of simulated time.

Left out: single links (link_samples), and how it is drawn (simulate_page).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from congestion.engine.tables import NEVER, Ints, State
from congestion.simulate import Outcome, Progress, Simulation
from congestion.statistics import jain

if TYPE_CHECKING:
    import pandas as pd

    from congestion.link_samples import LinkSamples

_BITS_PS = 8e12  # bits a byte, times ps a second
_PS_PER_US = 1e6
_INTERVALS, _PACKETS = 250, 8  # in the least time that a run can take; of full packets, in the shortest interval
_LOOKS = 500  # until an interval that was chosen here doubles
_ROUND = (1, 2, 5, 10)


class Samples:
    """Looks at a run when asked; give `take` to `Simulation.run` as its `look`, or all of it to `run_sampled`.

    A row is the interval that has just ended: `time_us` its end, `rate_bps` what all receivers acknowledged in it,
    `jain` the fairness of the flows under way, `flows` how many those are, `queue_bytes` the longest queue at its end,
    `paused_ports` those that are stopped then, one or all of their classes.

    Args:
        links: also looks, at the same times.
    """

    def __init__(self, links: LinkSamples | None = None) -> None:
        self.rows: list[dict[str, Any]] = []
        self.links = links
        self._acked: Any = 0.0
        self._time_ps = 0

    def begin(self, simulation: Simulation) -> None:
        """The first interval begins here, not at time 0 with nothing sent."""
        self._acked, self._time_ps = _acked(simulation), simulation.time_ps
        if self.links:
            self.links.begin(simulation)

    def take(self, simulation: Simulation) -> None:
        flow, port = simulation.state.flow, simulation.state.port
        acked = _acked(simulation)
        moved = acked - self._acked
        open_ = (flow["start"] < simulation.time_ps) & (flow["num_waits"] == 0)
        under_way = open_ & ((flow["finish"] < 0) | (flow["finish"] > self._time_ps))
        took = simulation.time_ps - self._time_ps
        self.rows.append(
            {
                "time_us": simulation.time_ps / _PS_PER_US,
                "rate_bps": float(moved.sum()) * _BITS_PS / took,
                "flows": int(under_way.sum()),
                "jain": jain(moved[under_way]) if moved[under_way].any() else None,
                "queue_bytes": int(port["queue_bytes"].max()),
                "paused_ports": int(stopped(simulation.state).sum()),
            }
        )
        self._acked, self._time_ps = acked, simulation.time_ps
        if self.links:
            self.links.take(simulation)

    def frame(self) -> pd.DataFrame:
        import pandas as pd

        return pd.DataFrame(self.rows)

    def frames(self) -> dict[str, pd.DataFrame]:
        """`samples`, and where links were looked at `links` and `tiers`; see `LinkSamples`."""
        more = {"links": self.links.links(), "tiers": self.links.tiers()} if self.links else {}
        return {"samples": self.frame(), **more}


def run_sampled(
    simulation: Simulation,
    samples: Samples,
    every_ps: int,
    *,
    first_ps: int = 0,
    until_ps: int = NEVER,
    say: Callable[[Progress], None] | None = None,
    grows: bool = False,
) -> Outcome:
    """`Simulation.run` with samples each `every_ps` of simulated time.

    Args:
        first_ps: when the first flow starts: intervals are counted from there.
        grows: the interval doubles each time that it was used 500 times: a run's length need not be known.
    """
    if simulation.time_ps < min(first_ps, until_ps):
        simulation.run(min(first_ps, until_ps), say)
    samples.begin(simulation)
    while True:
        stop_ps = min(simulation.time_ps + _LOOKS * every_ps, until_ps) if grows else until_ps
        outcome = simulation.run(stop_ps, say, samples.take, every_ps, first_ps)
        if outcome.completed or outcome.interrupted or stop_ps == until_ps or simulation.time_ps < stop_ps:
            return outcome
        every_ps *= 2


def interval_ps(least_us: float, state: State) -> int:
    """An interval that suits a run of `least_us` or some times that: a round number of 1, 2 or 5.

    It is no shorter than some full packets of the fastest link, and than the engine's own step.
    """
    shortest = max(_PACKETS * int(state.kind["tx_data"].min()), int(state.run["window"][0]))
    wanted = max(least_us * _PS_PER_US / _INTERVALS, shortest)
    power = 10 ** int(np.floor(np.log10(wanted)))
    return int(next(digit for digit in _ROUND if digit * power >= wanted) * power)


def stopped(state: State) -> Any:
    """Whether each port is paused now, one or all of its classes; shape (num_ports,)."""
    if not len(state.lane):
        return state.port["paused"] > 0
    return (state.lane["paused"] > 0).reshape(len(state.port), -1).any(axis=1)


def stopped_ps(state: State, time_ps: int) -> Ints:
    """How long each port was paused until now, the sum over its classes; shape (num_ports,)."""
    lane = state.lane if len(state.lane) else state.port
    since = np.where(lane["paused"] > 0, np.maximum(time_ps - lane["paused_at"], 0), 0)
    return np.asarray((lane["paused_ps"] + since).reshape(len(state.port), -1).sum(axis=1))


def _acked(simulation: Simulation) -> Any:
    """Bytes of each flow that its receiver has acknowledged, the last packet counted as a full one."""
    return simulation.state.flow["unacked"].astype(np.float64) * int(simulation.state.run["mtu_bytes"][0])
