"""Links and tiers over time: utilisation, queues, and how far a tree of pauses has spread.

A link is one direction of a cable, its tier the pair of heights that it joins, as in `measures.port_frame`. Left out:
sums over all links (samples).
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from congestion.engine.tables import Ints
from congestion.samples import stopped, stopped_ps
from congestion.simulate import Simulation
from topology.graph import Graph
from topology.wires import Wires

if TYPE_CHECKING:
    import pandas as pd

MAX_ROWS = 200_000  # of the frame of links
_BITS_PS = 8e12  # bits a byte, times ps a second
_PS_PER_US = 1e6
_MAX_CELLS, _MAX_INTERVALS = 4_000_000, 2_000  # that are kept: 20 bytes a cell


class _Look(NamedTuple):
    """Counters of all ports at one time."""

    time_ps: int
    tx_bytes: Ints
    paused_ps: Ints
    queue_bytes: Any


class LinkSamples:
    """Part of `Samples`: call `begin` once, then `take` at the end of each interval.

    Of very long runs only each second, fourth, ... look is kept of the links, which lengthens their intervals and
    loses nothing else: utilisation and pauses are differences of counters.

    Args:
        link: the directed link that leaves at each port, as a `Simulation` has it.
    """

    def __init__(self, fabric: Graph, link: Ints) -> None:
        wires = Wires.of_graph(fabric)
        self.tier, self._bps = wires.tier[link], fabric.link_bps[link]
        self.link = _names(wires.src[link], wires.dst[link])
        self._tiers, self._place = np.unique(self.tier.astype(str), return_inverse=True)
        self._ports = np.bincount(self._place)
        self._rows: list[dict[str, Any]] = []
        self._looks: list[_Look] = []
        self._last: _Look | None = None
        self._stride = self._since = 1

    def begin(self, simulation: Simulation) -> None:
        self._last = _look(simulation)
        self._looks, self._stride, self._since = [self._last], 1, 0

    def take(self, simulation: Simulation) -> None:
        if self._last is None:
            raise ValueError("take: call begin first")
        now, before = _look(simulation), self._last
        self._add_tiers(simulation, now, before)
        self._last = now
        self._since += 1
        if self._since < self._stride:
            return
        self._looks.append(now)
        self._since = 0
        if len(self._looks) > min(_MAX_INTERVALS, max(8, _MAX_CELLS // len(self.link) // 2 * 2)):
            del self._looks[1::2]
            self._stride *= 2

    def tiers(self) -> pd.DataFrame:
        """A row an interval and tier: `ports` of it, `paused_ports` that are stopped at the interval's end,
        `reached_ports` that were at some time in it, `pause_share` of the tier's port-time in it.
        """
        import pandas as pd

        return pd.DataFrame(self._rows)

    def links(self) -> pd.DataFrame:
        """A row an interval and link: `utilisation` and `pause_share` of the interval, `queue_bytes` at its end.

        The busiest links alone where all would make more than `MAX_ROWS` rows; what a packet takes counts as it
        begins, so the utilisation of a short interval can be above 1. With classes of traffic a pause counts for each.
        """
        import pandas as pd

        if len(self._looks) < 2:
            return pd.DataFrame(columns=["time_us", "link", "tier", "utilisation", "queue_bytes", "pause_share"])
        chosen = self._chosen()
        time_ps = np.array([look.time_ps for look in self._looks])
        took = np.diff(time_ps)[:, None]
        tx = np.array([look.tx_bytes[chosen] for look in self._looks])
        paused = np.array([look.paused_ps[chosen] for look in self._looks])
        queue = np.array([look.queue_bytes[chosen] for look in self._looks[1:]])
        many = len(took)
        return pd.DataFrame(
            {
                "time_us": np.repeat(time_ps[1:] / _PS_PER_US, len(chosen)),
                "link": np.tile(self.link[chosen], many),
                "tier": np.tile(self.tier[chosen], many),
                "utilisation": (np.diff(tx, axis=0) * _BITS_PS / self._bps[chosen] / took).ravel(),
                "queue_bytes": queue.ravel(),
                "pause_share": (np.diff(paused, axis=0) / took).ravel(),
            }
        )

    @property
    def left_out(self) -> int:
        """Links that the frame has no rows for."""
        return len(self.link) - len(self._chosen())

    def _chosen(self) -> Ints:
        """The links of the frame, in the fabric's order."""
        most = max(1, MAX_ROWS // max(1, len(self._looks) - 1))
        if len(self.link) <= most or not self._looks:
            return np.arange(len(self.link))
        load = (self._looks[-1].tx_bytes - self._looks[0].tx_bytes) / self._bps
        return np.sort(np.argsort(-load, kind="stable")[:most])

    def _add_tiers(self, simulation: Simulation, now: _Look, before: _Look) -> None:
        paused = now.paused_ps - before.paused_ps
        took = now.time_ps - before.time_ps
        at_end = stopped(simulation.state)
        counts = [np.bincount(self._place, what, len(self._ports)) for what in (at_end, (paused > 0) | at_end, paused)]
        for number, tier in enumerate(self._tiers.tolist()):
            ports = int(self._ports[number])
            self._rows.append(
                {
                    "time_us": now.time_ps / _PS_PER_US,
                    "tier": tier,
                    "ports": ports,
                    "paused_ports": int(counts[0][number]),
                    "reached_ports": int(counts[1][number]),
                    "pause_share": float(counts[2][number]) / took / ports,
                }
            )


def _look(simulation: Simulation) -> _Look:
    state = simulation.state
    paused = stopped_ps(state, simulation.time_ps)
    queue = state.port["queue_bytes"].astype(np.int32)
    return _Look(simulation.time_ps, state.port["tx_bytes"].astype(np.int64), paused, queue)


def _names(src: Any, dst: Any) -> Any:
    """`leaf0 -> spine1`, with a number where several cables join the same two; shape (num_ports,)."""
    names = [f"{a} -> {b}" for a, b in zip(src.tolist(), dst.tolist(), strict=True)]
    many, seen = Counter(names), Counter[str]()
    for at, name in enumerate(names):
        if many[name] > 1:
            seen[name] += 1
            names[at] = f"{name} #{seen[name]}"
    return np.array(names, dtype=object)
