"""Samples of a run over time: rates, queues and fairness at equal intervals of simulated time.

Not covered: single links (link_samples), and how it is drawn (simulation.page).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np

from congestion.engine.looks import Looks, look_at
from congestion.engine.tables import NEVER, Ints, State
from congestion.simulation.simulate import Outcome, Progress, Simulation

if TYPE_CHECKING:
    import pandas as pd

    from congestion.simulation.link_samples import LinkSamples

_BITS_PS = 8e12  # bits a byte, times ps a second
_PS_PER_US = 1e6
_INTERVALS, _PACKETS = 250, 8  # in the least time that a run can take; of full packets, in the shortest interval
_LOOKS = 500  # until an interval that was chosen here doubles
_ROUND = (1, 2, 5, 10)


class Samples:
    """Looks at a run at equal intervals; give it to `Simulation.run` as its `look`, or to `run_sampled`.

    A row is the interval that has just ended: `time_us` its end, `rate_bps` what all receivers acknowledged in it,
    `jain` the fairness of the flows under way, `flows` how many those are, `queue_bytes` the longest queue at its end,
    `paused_ports` those that are stopped then, one or all of their classes.

    Args:
        links: also looks, at the same times.
    """

    def __init__(self, links: LinkSamples | None = None) -> None:
        self.rows: list[dict[str, Any]] = []
        self.links = links
        self._acked: Ints | None = None
        self._time_ps = 0

    @property
    def last(self) -> tuple[int, Ints | None]:
        """End of the last interval, and packets of each flow that were acknowledged then; None: all 0."""
        return self._time_ps, self._acked

    def begin(self, simulation: Simulation) -> None:
        """Begin the first interval now, with what is acknowledged by now: a run may have been resumed."""
        self._time_ps = simulation.time_ps
        self._acked = simulation.state.flow["unacked"].astype(np.int64)
        if self.links:
            self.links.begin(look_at(simulation.state, simulation.time_ps, simulation.time_ps, self._acked))

    def add(self, looks: Looks, mtu_bytes: int) -> None:
        """Rows of looks that follow the last one; the last packet of a flow counts as a full one."""
        time_ps = looks.time
        if not len(time_ps):
            return
        total, many, moved, squares = looks.flows.T
        with np.errstate(invalid="ignore", divide="ignore"):
            columns = {
                "time_us": time_ps / _PS_PER_US,
                "rate_bps": total * mtu_bytes * _BITS_PS / np.diff(time_ps, prepend=self._time_ps),
                "flows": many.astype(int),
                "jain": moved**2 / (many * squares),
                "queue_bytes": looks.queue_bytes.max(axis=1),
                "paused_ports": looks.stopped.sum(axis=1, dtype=int),
            }
        columns["jain"] = np.where(moved > 0, columns["jain"], None)  # nobody got anything: there is nothing to share
        named = [values.tolist() for values in columns.values()]
        self.rows += [dict(zip(columns, row, strict=True)) for row in zip(*named, strict=True)]
        self._acked, self._time_ps = looks.acked, int(time_ps[-1])
        if self.links:
            self.links.add(looks)

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
        outcome = simulation.run(stop_ps, say, samples, every_ps, first_ps)
        if outcome.completed or outcome.interrupted or stop_ps == until_ps or simulation.time_ps < stop_ps:
            return outcome
        every_ps *= 2


def interval_ps(least_us: float, state: State) -> int:
    """An interval that suits a run of `least_us` or some times that: a round number of 1, 2 or 5.

    It is no shorter than some full packets of the fastest link, and than the engine's own step.
    """
    shortest = max(_PACKETS * int(state.kind["tx_data"].min()), int(state.run["window"][0]))
    least_ps = max(least_us * _PS_PER_US / _INTERVALS, shortest)
    power = 10 ** int(np.floor(np.log10(least_ps)))
    return int(next(digit for digit in _ROUND if digit * power >= least_ps) * power)
