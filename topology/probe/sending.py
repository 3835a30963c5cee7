"""Send a probe sweep from an interface of this machine and collect what routers answer.

Raw IPv4 sockets (root, or CAP_NET_RAW): the kernel finds the next hop and its MAC address, but leaves the packets as
they are. Probes without an answer are sent again, since routers limit how many errors they return and a first packet
may be lost while an address is resolved. Nothing is sent to anyone but the sweep's target. Not covered: IPv6, and
several uplinks of the sending host itself: the interface is fixed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from netlayer.errors import ConfigError
from topology.probe.capture import ICMP_TIME_EXCEEDED, ICMP_UNREACHABLE, Capture, answers, probes
from topology.probe.choice import address
from topology.probe.packets import Packets, Sweep, build

_SIOCGIFADDR = 0x8915
# Linux's numbers that the socket module does not name.
_SOL_RAW, _ICMP_FILTER = 255, 1
_SO_TIMESTAMPNS = 35
_SO_RCVBUFFORCE = 33
_RECEIVE_BUFFER_BYTES = 64 << 20
_ANSWER_BYTES = 2048
_PACE_S = 0.002
_SEND_ERRORS = {
    errno.ENETUNREACH: ("no route leads there from this interface", "add a route, or choose another --iface"),
    errno.EHOSTUNREACH: ("the next hop does not answer", "check the link and the gateway"),
    errno.ENETDOWN: ("the interface is down", "bring it up"),
    errno.EMSGSIZE: ("a probe exceeds the MTU", "choose a smaller --payload"),
    errno.EPERM: ("the firewall refuses it", "allow UDP 4791 out"),
}


@dataclass
class Exchange:
    """Everything sent and received, as IP packets with their times."""

    packets: list[bytes] = field(default_factory=list)
    time_ns: list[int] = field(default_factory=list)

    def add(self, packet: bytes, time_ns: int) -> None:
        """Keep one more packet."""
        self.packets.append(packet)
        self.time_ns.append(time_ns)

    def capture(self) -> Capture:
        """Return both directions as a capture, for the parser."""
        return Capture.of(self.packets, self.time_ns)


def send(sweep: Sweep, iface: str, *, rate_pps: float = 2000, timeout_s: float = 1, tries: int = 3) -> Exchange:
    """Send every probe of a sweep; those unanswered again, until all have an answer or have had `tries`.

    Args:
        iface: the interface that they leave by.
        rate_pps: packets a second, on the mean.
        timeout_s: how long to wait after the last probe of a try.

    Raises:
        ConfigError: no such interface, no right to open raw sockets, or no way to the target.
    """
    check_interface(iface)
    pending = build(sweep)
    exchange = Exchange()
    with _raw_sockets(iface) as (out, back):
        for _ in range(tries):
            before = len(exchange.packets)
            _send_all(pending, sweep.dst_ip, iface, out, back, exchange, rate_pps)
            _wait(back, exchange, num_packets=before + 2 * len(pending), timeout_s=timeout_s)
            pending = _unanswered(pending, exchange.capture())
            if not len(pending):
                break
    return exchange


def check_interface(iface: str) -> None:
    """Say so where this machine has no such interface.

    Raises:
        ConfigError: it has none of that name.
    """
    names = sorted(name for _, name in socket.if_nameindex())
    if iface not in names:
        raise ConfigError("--iface", iface, "no such interface here", f"one of {', '.join(names)}")


def interface_address(iface: str) -> int:
    """The first IPv4 address of an interface.

    Raises:
        ConfigError: no such interface, or it has no address.
    """
    check_interface(iface)
    request = struct.pack("256s", iface.encode()[:15])
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, request)
        except OSError as exc:
            raise ConfigError("--iface", iface, f"has no IPv4 address ({exc.strerror})", "give --src") from exc
    return int.from_bytes(answer[20:24], "big")


@contextmanager
def _raw_sockets(iface: str) -> Iterator[tuple[socket.socket, socket.socket]]:
    try:
        out = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_RAW)
    except PermissionError as exc:
        remedy = "run as root, or write --pcap and replay it where you may"
        raise ConfigError("--iface", iface, "raw sockets need root (CAP_NET_RAW)", remedy) from exc
    with out, socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP) as back:
        out.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, iface.encode())
        icmp_types = 1 << ICMP_UNREACHABLE | 1 << ICMP_TIME_EXCEEDED
        back.setsockopt(_SOL_RAW, _ICMP_FILTER, struct.pack("I", ~icmp_types & 0xFFFF_FFFF))
        back.setsockopt(socket.SOL_SOCKET, _SO_TIMESTAMPNS, 1)
        with suppress(PermissionError):  # CAP_NET_ADMIN is not ours for certain; the system's limit then holds
            back.setsockopt(socket.SOL_SOCKET, _SO_RCVBUFFORCE, _RECEIVE_BUFFER_BYTES)
        back.setblocking(False)
        yield out, back


def _send_all(
    packets: Packets,
    dst_ip: int,
    iface: str,
    out: socket.socket,
    back: socket.socket,
    exchange: Exchange,
    rate_pps: float,
) -> None:
    target = (address(dst_ip), 0)
    start, sent = time.monotonic(), 0
    while sent < len(packets):
        due = min(len(packets), max(sent + 1, int((time.monotonic() - start) * rate_pps)))
        for packet in packets[sent:due]:
            content = packet.tobytes()
            exchange.add(content, time.time_ns())
            _send_one(out, content, target, iface)
        sent = due
        _drain(back, exchange)
        time.sleep(_PACE_S)


def _send_one(out: socket.socket, content: bytes, target: tuple[str, int], iface: str) -> None:
    while True:
        try:
            out.sendto(content, target)
        except OSError as exc:
            if exc.errno == errno.ENOBUFS:  # the interface's queue is full: its pace, not ours
                time.sleep(_PACE_S)
                continue
            rule, remedy = _SEND_ERRORS.get(exc.errno or 0, (os.strerror(exc.errno or 0), "see the system's log"))
            raise ConfigError("--dst", f"{target[0]} by {iface}", rule, remedy) from exc
        return


def _wait(back: socket.socket, exchange: Exchange, *, num_packets: int, timeout_s: float) -> None:
    """Wait until `num_packets` are kept or the time is over."""
    end = time.monotonic() + timeout_s
    while len(exchange.packets) < num_packets and time.monotonic() < end:
        _drain(back, exchange)
        time.sleep(_PACE_S)


def _drain(back: socket.socket, exchange: Exchange) -> None:
    """Keep every answer that waits, with the kernel's time of its arrival."""
    with suppress(BlockingIOError):
        while True:
            content, ancillary, _, _ = back.recvmsg(_ANSWER_BYTES, socket.CMSG_SPACE(16))
            exchange.add(content, _arrival_ns(ancillary))


def _arrival_ns(ancillary: list[tuple[int, int, bytes]]) -> int:
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, _SO_TIMESTAMPNS):
            seconds, nanoseconds = struct.unpack("@qq", content)
            return int(seconds) * 10**9 + int(nanoseconds)
    return time.time_ns()


def _unanswered(packets: Packets, capture: Capture) -> Packets:
    """Return those of the packets that no answer in the capture quotes."""
    sent = probes(Capture.of([packet.tobytes() for packet in packets], np.zeros(len(packets), dtype=np.int64)))
    back = answers(capture)
    left: NDArray[np.bool_] = ~np.isin(
        sent.sport << 16 | sent.ttl << 8 | sent.round, back.sport << 16 | back.ttl << 8 | back.round
    )
    return packets[left]
