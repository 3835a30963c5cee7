"""From counters to signals: rates of each port, whichever counters its NIC has, sample by sample.

A counter that goes back was reset: that one interval is left out. A slow counter's rate holds until it is read again;
`fresh` tells which were. Left out: what a rate means; see `counters_detect`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from congestion.nic.counters import MISSING

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
# Of which counters a port's signal is made; several add up, `pause` is the largest.
_PATTERNS = {
    "traffic": r"xmit_bytes|rcv_bytes",
    "packets": r"port_rcv_packets",
    "marked": r"np_ecn_marked_roce_packets",
    "cnps": r"rp_cnp_handled",
    "pause": r"[rt]x_prio\d_pause_duration",
    "pause_frames": r"[rt]x_prio\d_pause",
    "link_downs": r"link_downed|link_down_events_phy",
    "timeouts": r"local_ack_timeout_err|roce_adp_retrans|roce_adp_retrans_to|req_transport_retries_exceeded",
    "resent": r"packet_seq_err|implied_nak_seq_err|out_of_sequence",
    "drops": r"rx_prio\d_discards|rx_discards_phy|out_of_buffer",
}
_LARGEST = {"pause", "pause_frames", "link_downs"}  # of the last, two counters count the same thing


@dataclass(frozen=True, eq=False)
class Signal:
    """One signal of all ports at a sample; every array has shape (ports,).

    Args:
        rate: per second; 0 where the port has no such counter, or it was not read twice yet.
        count: since it was read before.
        fresh: read at this sample.
    """

    rate: Floats
    count: Floats
    fresh: Bools


class Signals:
    """Keeps what the last reading was; `update` takes the next."""

    def __init__(self, columns: Sequence[str]) -> None:
        names = [column.rpartition("/") for column in columns]
        self.ports = sorted({port for port, _, _ in names})
        places = [_places(self.ports, [(port, name) for port, _, name in names], one) for one in _PATTERNS.values()]
        width = max(part.shape[1] for part in places)
        nowhere = len(columns)  # where a port has no such counter; never read
        padded = [np.pad(part, ((0, 0), (0, width - part.shape[1])), constant_values=nowhere) for part in places]
        self._places: NDArray[np.intp] = np.array(padded)  # (kinds, ports, most counters)
        self._has: Bools = np.any(self._places < nowhere, axis=2)
        self._row = {kind: row for row, kind in enumerate(_PATTERNS)}
        self._largest = np.array([kind in _LARGEST for kind in _PATTERNS])[:, None]
        self._last = np.full(nowhere + 1, float(MISSING))
        self._last_s = np.full(nowhere + 1, np.nan)
        self._rate = np.zeros(nowhere + 1)
        self._read = np.zeros(nowhere + 1, dtype=bool)
        self._signals: tuple[Floats, Floats, Bools] | None = None

    def has(self, kind: str) -> Bools:
        """Which ports have counters of that signal; shape (ports,)."""
        found: Bools = self._has[self._row[kind]]
        return found

    def update(self, time_s: float, values: Sequence[int]) -> None:
        """The next sample; `get` tells what it holds."""
        new = np.array([*values, MISSING], dtype=float)
        self._read = new != MISSING
        delta = new - self._last
        fresh = self._read & (self._last != MISSING) & (delta >= 0)
        np.divide(delta, time_s - self._last_s, out=self._rate, where=fresh)
        count = np.where(fresh, delta, 0.0)
        self._last = np.where(self._read, new, self._last)
        self._last_s[self._read] = time_s
        self._signals = self._gather(self._rate), self._gather(count), fresh[self._places].any(axis=2)

    def get(self, kind: str) -> Signal:
        """A signal as of the last sample.

        Raises:
            ValueError: there was none yet.
        """
        if self._signals is None:
            raise ValueError("no sample yet: call update first")
        rate, count, fresh = self._signals
        row = self._row[kind]
        return Signal(rate[row], count[row], fresh[row])

    def unreadable(self, kind: str) -> Bools:
        """Ports that have the counters and gave none of them at this sample."""
        row = self._row[kind]
        found: Bools = self._has[row] & ~self._read[self._places[row]].any(axis=1)
        return found

    def _gather(self, of_columns: Floats) -> Floats:
        """From columns to kinds and ports; shape (kinds, ports)."""
        parts = of_columns[self._places]
        found: Floats = np.where(self._largest, parts.max(axis=2), parts.sum(axis=2))
        return found


def _places(ports: Sequence[str], names: Sequence[tuple[str, str]], pattern: str) -> NDArray[np.intp]:
    """Where each port's counters stand, padded with the place that is never read; shape (ports, most counters)."""
    found = [
        [place for place, (owner, name) in enumerate(names) if owner == port and re.fullmatch(pattern, name)]
        for port in ports
    ]
    width = max(1, *map(len, found)) if found else 1
    return np.array([row + [len(names)] * (width - len(row)) for row in found], dtype=np.intp).reshape(-1, width)
