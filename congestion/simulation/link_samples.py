"""Links and tiers over time: utilisation, queues, and how far a tree of pauses has spread.

A link is one direction of a cable, its tier the pair of heights that it joins, as in `measures.port_frame`. Not
covered: sums over all links (samples).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from congestion.engine.looks import Looks
from congestion.engine.tables import Ints
from topology.fabric.graph import Graph
from topology.fabric.wires import Wires

if TYPE_CHECKING:
    import pandas as pd

MAX_ROWS = 200_000  # of the frame of links
_BITS_PS = 8e12  # bits a byte, times ps a second
_PS_PER_US = 1e6
_MAX_CELLS, _MAX_INTERVALS = 4_000_000, 2_000  # that are kept: 20 bytes a cell


class LinkSamples:
    """Part of `Samples`: call `begin` once with a single look, then `add` with those that follow.

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
        self._of_tier = np.eye(len(self._tiers))[self._place]  # (num_ports, num_tiers)
        self._rows: list[dict[str, Any]] = []
        self._looks: list[_Look] = []
        self._last: _Look | None = None
        self._stride = self._since = 1

    def begin(self, look: Looks) -> None:
        self._last = next(_rows_of(look))
        self._looks, self._stride, self._since = [self._last], 1, 0

    def add(self, looks: Looks) -> None:
        if self._last is None:
            raise ValueError("add: call begin first")
        self._add_tiers(looks, self._last)
        for now in _rows_of(looks):
            self._last = now
            self._since += 1
            if self._since < self._stride:
                continue
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
    def skipped(self) -> int:
        """Links that the frame has no rows for."""
        return len(self.link) - len(self._chosen())

    def _chosen(self) -> Ints:
        """The links of the frame, in the fabric's order."""
        most = max(1, MAX_ROWS // max(1, len(self._looks) - 1))
        if len(self.link) <= most or not self._looks:
            return np.arange(len(self.link))
        load = (self._looks[-1].tx_bytes - self._looks[0].tx_bytes) / self._bps
        return np.sort(np.argsort(-load, kind="stable")[:most])

    def _add_tiers(self, looks: Looks, before: _Look) -> None:
        paused = np.diff(looks.paused_ps, axis=0, prepend=before.paused_ps[None])
        took = np.diff(looks.time, prepend=before.time_ps)
        stopped = looks.stopped > 0
        counts = [part @ self._of_tier for part in (stopped, stopped | (paused > 0), paused)]  # (rows, num_tiers)
        shares = counts[2] / took[:, None] / self._ports
        for row, time_us in enumerate((looks.time / _PS_PER_US).tolist()):
            for number, tier in enumerate(self._tiers.tolist()):
                self._rows.append(
                    {
                        "time_us": time_us,
                        "tier": tier,
                        "ports": int(self._ports[number]),
                        "paused_ports": int(counts[0][row, number]),
                        "reached_ports": int(counts[1][row, number]),
                        "pause_share": float(shares[row, number]),
                    }
                )


class _Look(NamedTuple):
    """Counters of all ports at one time."""

    time_ps: int
    tx_bytes: Ints
    paused_ps: Ints
    queue_bytes: Any


def _rows_of(looks: Looks) -> Iterator[_Look]:
    """One by one, of which a row keeps none of the others alive."""
    for row, time_ps in enumerate(looks.time.tolist()):
        queue = looks.queue_bytes[row].astype(np.int32)
        yield _Look(time_ps, looks.tx_bytes[row].copy(), looks.paused_ps[row].copy(), queue)


def _names(src: Any, dst: Any) -> Any:
    """`leaf0 -> spine1`, with a number where several cables join the same two; shape (num_ports,)."""
    names = [f"{a} -> {b}" for a, b in zip(src.tolist(), dst.tolist(), strict=True)]
    many, seen = Counter(names), Counter[str]()
    for at, name in enumerate(names):
        if many[name] > 1:
            seen[name] += 1
            names[at] = f"{name} #{seen[name]}"
    return np.array(names, dtype=object)
