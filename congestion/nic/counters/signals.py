"""Conversion of counters into signals: rates of each port, whichever counters its NIC has, sample by sample.

A counter that goes back was reset: that one interval is omitted. A slow counter's rate holds until it is read again;
`fresh` tells which were. Not covered: what a rate means; see `counters.detect`.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from congestion.kernels.jit import entry
from congestion.nic.counters.catalogue import MISSING

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]
Ints = NDArray[np.int64]
# Of which counters a port's signal is made; several add up, `pause` is the largest.
_PATTERNS = {
    "traffic": r"xmit_bytes|rcv_bytes|ip[46](In|Out)Octets",
    "packets": r"port_rcv_packets",
    "marked": r"np_ecn_marked_roce_packets",
    "cnps": r"rp_cnp_handled",
    "pause": r"[rt]x_prio\d_pause_duration|pfc_pri\d_[rt]x_duration_us",
    "pause_frames": r"[rt]x_prio\d_pause|[rt]x_pfc_ena_frames_pri\d|[rt]x_priority_\d_xoff\.nic",
    "link_downs": r"link_downed|link_down_events(_phy)?",
    "timeouts": r"local_ack_timeout_err|roce_adp_retrans|roce_adp_retrans_to|req_transport_retries_exceeded",
    "resent": r"packet_seq_err|implied_nak_seq_err|out_of_sequence",
    "drops": r"rx_prio\d_discards|rx_discards_phy|out_of_buffer",
}
KINDS = tuple(_PATTERNS)
_LARGEST = {"pause", "pause_frames", "link_downs"}  # of the last, two counters count the same thing
# What cannot be told of a port that lacks all signals of a row; the second row needs both.
_NEEDS = (
    (("traffic",), any, "traffic (no silent, slow or stalled)"),
    (("packets", "marked"), all, "ECN marks"),
    (("pause", "pause_frames"), any, "PFC pauses"),
    (("link_downs",), any, "link flaps"),
    (("timeouts",), any, "timeouts"),
    (("resent",), any, "sequence errors"),
)


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
    """Keeps what the last reading was; `update` takes the next.

    Args:
        rate, count, fresh: as in `Signal`, of all kinds; shape (kinds, ports), in the order of KINDS.
    """

    def __init__(self, columns: Sequence[str]) -> None:
        names = [column.rpartition("/") for column in columns]
        self.ports = sorted({port for port, _, _ in names})
        places = [_places(self.ports, [(port, name) for port, _, name in names], one) for one in _PATTERNS.values()]
        width = max(part.shape[1] for part in places)
        nowhere = len(columns)  # where a port has no such counter; never read
        padded = [np.pad(part, ((0, 0), (0, width - part.shape[1])), constant_values=nowhere) for part in places]
        self._places: NDArray[np.intp] = np.array(padded)  # (kinds, ports, most counters)
        self._has: Bools = np.any(self._places < nowhere, axis=2)
        self._row = {kind: row for row, kind in enumerate(KINDS)}
        self._largest = np.array([kind in _LARGEST for kind in _PATTERNS])
        shape = self._has.shape
        self._last: Ints = np.full(nowhere, MISSING, dtype=np.int64)
        self._last_s = np.full(nowhere, np.nan)
        self._counter_rate, self._counter_count = np.zeros(nowhere), np.zeros(nowhere)
        self._counter_fresh, self._counter_read = np.zeros(nowhere, dtype=bool), np.zeros(nowhere, dtype=bool)
        self.rate, self.count, self.fresh = np.zeros(shape), np.zeros(shape), np.zeros(shape, dtype=bool)
        self._read = np.zeros(shape, dtype=bool)
        self._num_samples = -1
        self.update(0.0, self._last)  # compiles, which no sample should wait for; nothing was read

    def has(self, kind: str) -> Bools:
        """Return which ports have counters of that signal; shape (ports,)."""
        mask: Bools = self._has[self._row[kind]]
        return mask

    def missing(self, port: str) -> list[str]:
        """Name what cannot be told of a port, for want of counters."""
        if port not in self.ports:
            return ["anything"]
        has = dict(zip(KINDS, self._has[:, self.ports.index(port)].tolist(), strict=True))
        return [what for kinds, enough, what in _NEEDS if not enough(has[kind] for kind in kinds)]

    def update(self, time_s: float, values: Sequence[int] | Ints) -> None:
        """The next sample; `get` tells what it holds.

        Raises:
            ValueError: not one value a column.
        """
        if len(values) != len(self._last):
            raise ValueError(f"{len(values)} values of {len(self._last)} columns")
        signals = self._counter_rate, self._counter_count, self._counter_fresh, self._counter_read
        _update_counters(time_s, np.asarray(values, dtype=np.int64), self._last, self._last_s, *signals)
        _combine_counters(self._places, self._largest, *signals, self.rate, self.count, self.fresh, self._read)
        self._num_samples += 1

    def get(self, kind: str) -> Signal:
        """A signal as of the last sample; the next one changes its arrays.

        Raises:
            ValueError: there was none yet.
        """
        if self._num_samples < 1:
            raise ValueError("no sample yet: call update first")
        row = self._row[kind]
        return Signal(self.rate[row], self.count[row], self.fresh[row])

    def unreadable(self, kind: str) -> Bools:
        """Ports that have the counters and gave none of them at this sample."""
        row = self._row[kind]
        mask: Bools = self._has[row] & ~self._read[row]
        return mask


@entry
def _update_counters(time_s, values, last, last_s, rate, count, fresh, read):  # type: ignore[no-untyped-def]
    """Compute each counter's rate and count since it was read before."""
    for place in range(values.size):
        value, before = values[place], last[place]
        read[place] = value != MISSING
        fresh[place] = read[place] and before != MISSING and value >= before
        count[place] = float(value - before) if fresh[place] else 0.0
        if fresh[place]:
            rate[place] = count[place] / (time_s - last_s[place])
        if read[place]:
            last[place], last_s[place] = value, time_s


@entry
def _combine_counters(  # type: ignore[no-untyped-def]
    places, largest, counter_rate, counter_count, counter_fresh, counter_read, rate, count, fresh, read
):
    """Combine each port's counters into a signal a kind (of `KINDS`): their sum, or the largest; into the last four.

    Each number is stored once, whole, for who reads it meanwhile. `fresh`: rate and count are of this sample; `read`:
    a counter was read at it, perhaps for the first time or after a reset.

    Args:
        places: indices of the counters of each kind and port, padded with the number of counters.
    """
    kinds, ports, width = places.shape
    for kind in range(kinds):
        for port in range(ports):
            all_rate, all_count, any_fresh, any_read = 0.0, 0.0, False, False
            for one in range(width):
                place = places[kind, port, one]
                if place == counter_rate.size:  # it has no more
                    break
                if largest[kind]:
                    all_rate = max(all_rate, counter_rate[place])
                    all_count = max(all_count, counter_count[place])
                else:
                    all_rate += counter_rate[place]
                    all_count += counter_count[place]
                any_fresh |= counter_fresh[place]
                any_read |= counter_read[place]
            rate[kind, port], count[kind, port] = all_rate, all_count
            fresh[kind, port], read[kind, port] = any_fresh, any_read


def _places(ports: Sequence[str], names: Sequence[tuple[str, str]], pattern: str) -> NDArray[np.intp]:
    """Return where each port's counters stand, padded with a place that is never read; shape (ports, most counters)."""
    places = [
        [place for place, (owner, name) in enumerate(names) if owner == port and re.fullmatch(pattern, name)]
        for port in ports
    ]
    width = max(1, *map(len, places)) if places else 1
    return np.array([row + [len(names)] * (width - len(row)) for row in places], dtype=np.intp).reshape(-1, width)
