"""Driver's end of the run's messages: heartbeats in, the beacon and assignments out, over a store that may go away.

Assignments are states of a node and no orders to do something once; so sending them again after a crash of the driver,
or of the store, changes nothing.

[Note: away] Where the driver itself, or the store, was away for a while, no heartbeat could have come: the time is
given back to all nodes, or the first round after it would evict them.
"""

from __future__ import annotations

import contextlib
import logging
import subprocess
from collections.abc import Callable, Iterable

from netlayer.errors import NetlayerError
from trainer.resilience import store_host
from trainer.resilience.bus import TAKE, Bus
from trainer.resilience.detect import View
from trainer.resilience.folder import RunFolder, Spec
from trainer.resilience.messages import Assignment, Beacon, HeartbeatReader, Refused, plain, seal

logger = logging.getLogger(__name__)

_STORE_S = 5.0  # before the store's host is started again
_LEAVE_S = 10.0
_MAX_REFUSED_SHOWN = 5
MAX_READS = 64
"""Reads of the store in a round: whoever fills it must not keep the driver from its nodes."""


class Link:
    """Messages of one driver with all nodes.

    Args:
        folder, spec: of the run.
        epoch: of the driver.
        view: takes the heartbeats.
        open_bus: opens the run's messages.
        owns_store: the store is the run's own, and is started here.
        clock: monotonic seconds.
        on_return: called when the store answers again, with the seconds for which it was away.
    """

    def __init__(
        self,
        folder: RunFolder,
        spec: Spec,
        epoch: int,
        view: View,
        open_bus: Callable[[], Bus],
        *,
        owns_store: bool,
        clock: Callable[[], float],
        on_return: Callable[[float], None],
    ) -> None:
        self.refused = 0
        """Messages that were forged, too large, or not of the schema."""
        self._folder, self._spec, self._epoch, self._view = folder, spec, epoch, view
        self._open_bus, self._owns_store, self._clock, self._on_return = open_bus, owns_store, clock, on_return
        self._token = folder.token()
        self._reader = HeartbeatReader(self._token, spec.run)
        self._bus: Bus | None = None
        self._store: subprocess.Popen[bytes] | None = None
        self._store_started_s = -_STORE_S
        self._down_s: float | None = None
        self._beacon_seq = self._seq = 0
        self._beacon_s = -1e9
        self._sent: dict[str, tuple[Assignment, float]] = {}
        self._basis: object = None
        self._behind: list[str] = []

    @property
    def is_down(self) -> bool:
        """Whether the store does not answer: nothing that is not heard means anything then."""
        return self._down_s is not None

    @property
    def is_open(self) -> bool:
        return self._bus is not None

    # ---- in ----

    def receive(self, now_s: float, is_wanted: Callable[[str], bool]) -> None:
        """Take heartbeats in; where the store does not answer, have it started, and give the time back: [Note: away].

        Args:
            is_wanted: whether heartbeats of the node of this name are taken.
        """
        try:
            for _ in range(MAX_READS):
                messages, num_large = self._reach().take_heartbeats()
                received_ns = int(self._clock() * 1e9)
                self.refused += num_large
                for data in messages:
                    self._take(data, now_s, received_ns, is_wanted)
                if len(messages) + num_large < TAKE:
                    break
        except (NetlayerError, OSError) as exc:
            self._drop_bus()
            if self._down_s is None:
                self._down_s = now_s
                logger.info("the run's store does not answer: %s", exc)
            self._start_store(now_s)
            return
        if self._down_s is not None:
            away_s, self._down_s = now_s - self._down_s, None
            self._view.forgive(away_s + self._spec.heartbeat_s)
            self._sent.clear()
            self._basis = None
            self._beacon_s = -1e9
            self._on_return(away_s)

    def _take(self, data: bytes, now_s: float, received_ns: int, is_wanted: Callable[[str], bool]) -> None:
        try:
            heartbeat, text = self._reader.read(data)
        except Refused as exc:
            self.refused += 1
            if self.refused <= _MAX_REFUSED_SHOWN:
                logger.warning("a heartbeat was refused: %s", plain(str(exc)))
            return
        # Else it is on its way out, or of no node of ours.
        if is_wanted(heartbeat.node) and self._view.take(heartbeat, now_s, text):
            self._view.clocks.note_heartbeat(heartbeat, received_ns)

    # ---- out ----

    def send(self, now_s: float, names: Iterable[str], assignment: Callable[[str], Assignment], basis: object) -> None:
        """Send assignments that have changed, or that a node has not heard of; and the sign that a driver is here.

        Args:
            names: of all nodes that have one.
            assignment: gives a node's; its `seq` is set here.
            basis: all that assignments depend on: where it is as before, only nodes that have not followed are
                looked at.
        """
        basis = (basis, len(self._sent))
        if basis == self._basis:
            names = self._behind
        self._behind = []
        changed: dict[str, Assignment] = {}
        for name in names:
            target, sent, known = assignment(name), self._sent.get(name), self._view.nodes.get(name)
            is_same = sent is not None and sent[0].model_copy(update={"seq": 0}) == target
            if is_same and sent and known and known.heartbeat.assignment >= (sent[0].epoch, sent[0].seq):
                continue
            self._behind.append(name)
            if is_same and sent and now_s - sent[1] < self._spec.heartbeat_s:
                continue
            self._seq += 1
            changed[name] = target.model_copy(update={"seq": self._seq})
        self._basis = basis
        if not changed and now_s - self._beacon_s < self._spec.heartbeat_s / 2:
            return
        self._beacon_seq += 1
        beacon = Beacon(run=self._spec.run, node="*", epoch=self._epoch, seq=self._beacon_seq)
        data = {name: seal(each, self._token) for name, each in changed.items()}
        self._view.clocks.note_beacon(self._epoch, self._beacon_seq, int(self._clock() * 1e9))
        try:
            self._reach().send_orders(seal(beacon, self._token), data)
        except NetlayerError as exc:
            logger.info("assignments were not sent: %s", exc)
            self._basis = None
            return
        self._sent.update({name: (each, now_s) for name, each in changed.items()})
        self._beacon_s = now_s

    def followed(self, name: str) -> Assignment | None:
        """Return the last assignment of a node, where it has told that it follows it; None: it has not, or not yet."""
        known, sent = self._view.nodes.get(name), self._sent.get(name)
        if known is None or sent is None or known.heartbeat.assignment < (sent[0].epoch, sent[0].seq):
            return None
        return sent[0]

    # ---- the store ----

    def forget(self, names: Iterable[str]) -> None:
        """Remove what the run has left on the store; a store that is gone has nothing."""
        with contextlib.suppress(NetlayerError):
            self._reach().forget(names)

    def wait_for_store(self) -> None:
        """Wait until the host of the run's own store has seen that the run is over; bounded."""
        if self._store is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._store.wait(_LEAVE_S)

    def close(self) -> None:
        """Let go of the connection; nodes go on."""
        self._drop_bus()

    def _reach(self) -> Bus:
        if self._bus is None:
            self._bus = self._open_bus()
        return self._bus

    def _drop_bus(self) -> None:
        if self._bus is not None:
            self._bus.close()
            self._bus = None

    def _start_store(self, now_s: float) -> None:
        """Have the run's own store run: its host is a process that outlives this one."""
        if not self._owns_store or now_s - self._store_started_s < _STORE_S:
            return
        if self._store is not None and self._store.poll() is None:
            return
        self._store_started_s = now_s
        self._store = store_host.start(self._folder)
