"""What a run looked like over time: rates, queues and fairness at equal intervals of simulated time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from congestion.simulate import Simulation
from congestion.statistics import jain

if TYPE_CHECKING:
    import pandas as pd

_BITS_PS = 8e12  # bits a byte, times ps a second


class Samples:
    """Looks at a run when asked; give `take` to `Simulation.run` as its `look`.

    A row is the interval that has just ended: `time_us` its end, `rate_bps` what all receivers acknowledged in it,
    `jain` the fairness of the flows under way, `flows` how many those are, `queue_bytes` the longest queue at its end,
    `paused_ports` those that are stopped then.
    """

    def __init__(self) -> None:
        self.rows: list[dict[str, Any]] = []
        self._acked = np.zeros(0)
        self._time_ps = 0

    def take(self, simulation: Simulation) -> None:
        flow, port = simulation.state.flow, simulation.state.port
        acked = flow["unacked"].astype(np.float64) * int(simulation.state.run["mtu_bytes"][0])
        moved = acked - (self._acked if len(self._acked) else 0.0)
        open_ = (flow["start"] < simulation.time_ps) & (flow["num_waits"] == 0)
        under_way = open_ & ((flow["finish"] < 0) | (flow["finish"] > self._time_ps))
        took = simulation.time_ps - self._time_ps
        self.rows.append(
            {
                "time_us": simulation.time_ps / 1e6,
                "rate_bps": float(moved.sum()) * _BITS_PS / took,
                "flows": int(under_way.sum()),
                "jain": jain(moved[under_way]) if moved[under_way].any() else None,
                "queue_bytes": int(port["queue_bytes"].max()),
                "paused_ports": int(port["paused"].sum()),
            }
        )
        self._acked, self._time_ps = acked, simulation.time_ps

    def frame(self) -> pd.DataFrame:
        import pandas as pd

        return pd.DataFrame(self.rows)
