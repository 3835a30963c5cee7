"""Clocks of executors beside the driver's, by the messages that go between them anyway; each comparison with its error.

A beacon leaves at a time of the driver, an executor reads its own clock when it hears it and again when it sends the
next heartbeat, which comes at a later time of the driver: two readings between two of ours ([Note: one exchange] in
`netlayer.observe.events.clocks`, which has the arithmetic). Executors tell steady clocks, which nobody sets; all of one
machine have the same one, so what happened on one machine is ordered without an error.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from netlayer.observe.events.clocks import MAX_DRIFT_PPM, Exchange, estimate
from trainer.resilience.messages import Heartbeat

_NUM_EXCHANGES = 64  # of a machine
_NUM_BEACONS = 256  # whose time is remembered


@dataclass(frozen=True)
class Moment:
    """Time of an event on a node, between two readings of its machine's steady clock.

    Args:
        machine: whose clock (`netlayer.environ.boot_id`).
        since_ns: the event had not happened yet.
        until_ns: it had.
        offset_ns: the driver's steady clock minus the machine's; None: they were never compared.
        error_ns: bound on the error of that.
    """

    machine: str
    since_ns: int
    until_ns: int
    offset_ns: int | None = None
    error_ns: int = 0

    def is_before(self, other: Moment) -> bool:
        """Whether this was certainly first: by more than the clocks' errors, and than the time between two readings."""
        if self.machine and self.machine == other.machine:
            return self.until_ns < other.since_ns
        if self.offset_ns is None or other.offset_ns is None:
            return False
        latest_ns = self.until_ns + self.offset_ns + self.error_ns
        return latest_ns < other.since_ns + other.offset_ns - other.error_ns

    @staticmethod
    def from_json(tree: Mapping[str, Any] | None) -> Moment | None:
        return Moment(**tree) if tree else None


class NodeClocks:
    """Comparisons of the machines' steady clocks with the driver's."""

    def __init__(self) -> None:
        self._sent: OrderedDict[tuple[int, int], int] = OrderedDict()
        # As fields of an `Exchange`, which is made of them where a time is asked for: they come with each heartbeat.
        self._exchanges: dict[str, deque[tuple[int, int, int]]] = {}

    def note_beacon(self, epoch: int, seq: int, sent_ns: int) -> None:
        """Remember when a beacon left; `sent_ns`: the driver's steady clock, read before it was sent."""
        self._sent[epoch, seq] = sent_ns
        while len(self._sent) > _NUM_BEACONS:
            self._sent.popitem(last=False)

    def note_heartbeat(self, heartbeat: Heartbeat, received_ns: int) -> None:
        """Take a heartbeat's readings in; `received_ns`: the driver's steady clock, read after it had come."""
        sent_ns = self._sent.get(heartbeat.beacon)
        if sent_ns is None or not heartbeat.machine or received_ns < sent_ns:
            return
        exchanges = self._exchanges.get(heartbeat.machine)
        if exchanges is None:
            exchanges = self._exchanges[heartbeat.machine] = deque(maxlen=_NUM_EXCHANGES)
        # The first bounds the offset by the beacon's delay, the second by the heartbeat's.
        for told_ns in (heartbeat.beacon_ns, heartbeat.at_ns):
            exchanges.append((sent_ns, told_ns - heartbeat.anchor_ns, received_ns))

    def moment(self, heartbeat: Heartbeat, since_ns: int, until_ns: int) -> Moment:
        """Return when an event was that a heartbeat tells of, by the clock of its executor."""
        since_ns, until_ns = since_ns - heartbeat.anchor_ns, until_ns - heartbeat.anchor_ns
        exchanges = [Exchange(*each) for each in self._exchanges.get(heartbeat.machine, ())]
        if not exchanges:
            return Moment(heartbeat.machine, since_ns, until_ns)
        sample = estimate(exchanges)
        # The comparisons are minutes old, and crystals part meanwhile.
        span_ns = max(each.received_ns for each in exchanges) - min(each.sent_ns for each in exchanges)
        error_ns = sample.error_ns + int(span_ns * MAX_DRIFT_PPM * 1e-6) + 1
        return Moment(heartbeat.machine, since_ns, until_ns, sample.offset_ns, error_ns)
