"""Clocks of all ranks compared with rank 0's, at the start and again and again, without the training thread.

Rank 0 answers small UDP messages with its time; every rank on another host sends it a burst of them once in a while and
keeps what the shortest round trips bound (`netlayer.observe.events.clocks`). Ranks on rank 0's host have its clock
(CLOCK_MONOTONIC), so their offset is known without an error. Where no message comes back, an offset grows old and its
error says so; nothing else happens. Not covered: a firewall between the hosts (then clocks stay uncompared, and events
say that by a null).
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import struct
import threading
import time
from dataclasses import dataclass

import psutil

from netlayer.environ import boot_id
from netlayer.observe.events.clocks import ClockSample, Exchange, RankClock, estimate

logger = logging.getLogger(__name__)

_MESSAGE = struct.Struct("<8sqq")  # token, number, the reference's time: the answer is no longer than the question
_BURST = 16
_ANSWER_S = 0.05
_PAUSE_S = 0.002  # between two messages of a burst, so that one queue or one busy interpreter does not meet them all
_MOST_MISSED = 4  # messages of a burst after which the rest is not tried
_MOST_ADDRESSES = 8


@dataclass(frozen=True)
class Reference:
    """Rank 0's clock, as the others are told of it. Picklable.

    Args:
        kernel: identity of its host's running kernel: who has the same has the same clock.
        anchor_ns: its clock minus the steady clock of that host.
        addresses: where it may be reached.
        port: of its server; 0: it has none.
        token: what a message must begin with.
    """

    kernel: str
    anchor_ns: int
    addresses: tuple[str, ...] = ()
    port: int = 0
    token: bytes = b""


class ClockServer:
    """Answers messages with the time of a clock, in a thread; `with ClockServer(clock) as server: server.reference`.

    Args:
        clock: the reference.
        address: to listen on; empty: on all.
    """

    def __init__(self, clock: RankClock, address: str = "") -> None:
        self._clock, self._token = clock, secrets.token_bytes(8)
        self._socket = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
        self._socket.bind((address, 0))
        self._socket.settimeout(0.5)  # to see that it is closed
        self._is_closed = False
        self.reference = Reference(
            boot_id(),
            clock.anchor_ns,
            (address,) if address else own_addresses(),
            self._socket.getsockname()[1],
            self._token,
        )
        self._thread = threading.Thread(target=self._serve, name="netlayer-clock", daemon=True)
        self._thread.start()

    def __enter__(self) -> ClockServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the thread. Twice is once."""
        self._is_closed = True
        self._thread.join(2.0)
        self._socket.close()

    def _serve(self) -> None:
        while not self._is_closed:
            try:
                data, sender = self._socket.recvfrom(_MESSAGE.size)
            except TimeoutError:
                continue
            except OSError:  # such as an answer to somebody who has gone
                continue
            now_ns = self._clock.now_ns()
            if len(data) == _MESSAGE.size and data[:8] == self._token:
                _, number, _ = _MESSAGE.unpack(data)
                with contextlib.suppress(OSError):
                    self._socket.sendto(_MESSAGE.pack(self._token, number, now_ns), sender)


class ClockClient:
    """Compares a rank's clock with the reference's, by bursts of messages.

    Args:
        clock: of this rank; every comparison is added to it.
        reference: of `ClockServer`.
        every_s: seconds between two comparisons; calls in between do nothing.
    """

    def __init__(self, clock: RankClock, reference: Reference, every_s: float = 30.0) -> None:
        self._clock, self._reference, self._every_s = clock, reference, every_s
        self._address: str | None = None
        self._due_s = 0.0
        self._number = 0
        self._has_warned = False

    def compare_if_due(self) -> ClockSample | None:
        """Compare the clocks where that is due; None: it was not, or nobody answered."""
        if time.monotonic() < self._due_s:
            return None
        self._due_s = time.monotonic() + self._every_s
        return self.compare()

    def compare(self) -> ClockSample | None:
        """Compare the clocks now, within a fraction of a second; None: nobody answered."""
        addresses = (self._address,) if self._address else self._reference.addresses[:_MOST_ADDRESSES]
        for address in addresses:
            exchanges = self._burst(address)
            if exchanges:
                self._address = address
                sample = estimate(exchanges)
                self._clock.add(sample)
                return sample
        if not self._has_warned:
            self._has_warned = True
            where = f"UDP port {self._reference.port} of {', '.join(addresses) or 'rank 0'}"
            logger.warning("clocks are not compared: nobody answers at %s", where)
        return None

    def _burst(self, address: str) -> list[Exchange]:
        """Exchange a few datagrams with the reference at an address, and return those that were answered."""
        exchanges: list[Exchange] = []
        missed = 0
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as link:
                link.connect((address, self._reference.port))
                link.settimeout(_ANSWER_S)
                for _ in range(_BURST):
                    exchange = self._exchange(link)
                    if exchange is None:
                        missed += 1
                        if missed >= _MOST_MISSED:
                            break
                    else:
                        exchanges.append(exchange)
                        time.sleep(_PAUSE_S)
        except OSError:  # no route, or no such host
            return exchanges
        return exchanges

    def _exchange(self, link: socket.socket) -> Exchange | None:
        self._number += 1
        sent_ns = self._clock.now_ns()
        try:
            link.send(_MESSAGE.pack(self._reference.token, self._number, 0))
            while True:
                data = link.recv(_MESSAGE.size)
                received_ns = self._clock.now_ns()
                token, number, reference_ns = _MESSAGE.unpack(data)
                # An answer that comes late, to an earlier message, says nothing of this one.
                if token == self._reference.token and number == self._number:
                    return Exchange(sent_ns, reference_ns, received_ns)
        except (OSError, struct.error):
            return None


def same_host(clock: RankClock, reference: Reference) -> bool:
    """Set the offset of a clock whose host is the reference's, exactly; return whether it is."""
    if reference.kernel != boot_id():
        return False
    clock.set_exact(clock.anchor_ns - reference.anchor_ns)
    return True


def own_addresses() -> tuple[str, ...]:
    """Addresses at which other hosts may reach this one, likely ones first."""
    names = [os.environ.get("MASTER_ADDR", ""), socket.gethostname()]
    addresses: dict[str, None] = {}
    for name in filter(None, names):
        with contextlib.suppress(OSError, UnicodeError):
            addresses.setdefault(socket.gethostbyname(name))
    for of_interface in psutil.net_if_addrs().values():
        for each in of_interface:
            if each.family == socket.AF_INET:
                addresses.setdefault(each.address)
    return tuple(address for address in addresses if not address.startswith("127."))
