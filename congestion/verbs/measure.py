"""Measurement of a NIC between two of its queue pairs, with verbs: bandwidth and latency of WRITE and SEND.

From a NIC to itself (its path to this host's memory), from one NIC of a host to another, and across hosts
(`congestion.verbs.remote`). Everything that was moved is compared byte for byte before its time counts. Not covered:
more than one queue pair at a time, and a rate for small messages: Python posts them one by one.

Runs with the standard library and pyverbs alone.
"""

from __future__ import annotations

import functools
import random
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

from congestion.verbs.device import devices, find_device
from congestion.verbs.gpu import open_gpu_memory
from congestion.verbs.queue_pair import MOST_POSTED, Address, Endpoint, QpError, QpSettings
from netlayer.errors import CheckFailed
from netlayer.percentile import percentile

__all__ = ["Endpoint", "Kind", "Plan", "QpError", "QpSettings", "connected", "devices", "find_device", "measure_pair"]

Kind = Literal["write", "send"]
KINDS: tuple[Kind, ...] = get_args(Kind)
MOST_BYTES = 256 << 20
_NOISE_BYTES, _STRIDE = 1_048_573, 7_919


@dataclass(frozen=True)
class Plan:
    """Plan of a measurement.

    Args:
        sizes: bytes of a message.
        kinds: write, send.
        messages: of each bandwidth measurement.
        window: messages that are on their way at once.
        repeats: bandwidth measurements of each size.
        pings: messages of each latency measurement, one at a time.
        settings: of the connection.
        patience_s: how long to wait for a completion.

    Raises:
        ValueError: a number is out of its range.
    """

    sizes: Sequence[int] = (65_536, 1 << 20)
    kinds: Sequence[Kind] = KINDS
    messages: int = 64
    window: int = 16
    repeats: int = 5
    pings: int = 200
    settings: QpSettings = field(default_factory=QpSettings)
    patience_s: float = 60.0

    def __post_init__(self) -> None:
        if not self.sizes or not all(1 <= size <= MOST_BYTES for size in self.sizes):
            raise ValueError(f"sizes = {list(self.sizes)}: from 1 to {MOST_BYTES} bytes each")
        if not self.kinds or not set(self.kinds) <= set(KINDS):
            raise ValueError(f"kinds = {list(self.kinds)}: of {', '.join(KINDS)}")
        if not 1 <= self.window <= MOST_POSTED:
            raise ValueError(f"window = {self.window}: 1..{MOST_POSTED}")
        if min(self.messages, self.repeats, self.pings) < 1:
            raise ValueError("messages, repeats, pings: at least 1 each")
        if max(self.sizes) * self.window > MOST_BYTES:
            raise ValueError(f"a window of {self.window} x {max(self.sizes)} bytes: at most {MOST_BYTES} together")

    @property
    def buffer_bytes(self) -> int:
        """A slot for each message that is on its way."""
        return max(self.sizes) * self.window


@contextmanager
def connected(
    source: str | None, target: str | None, num_bytes: int, settings: QpSettings, *, gpu: int | str | None = None
) -> Iterator[tuple[Endpoint, Endpoint]]:
    """Two queue pairs of this host, connected; the first one's buffer is a GPU's memory where `gpu` is given.

    Raises:
        HardwareMissing: a device, pyverbs or GPUDirect is missing.
        ConfigError: a device is unknown or does not connect.
    """
    with (
        open_gpu_memory(gpu, num_bytes) as memory,
        Endpoint(source, num_bytes, memory=memory) as first,
        Endpoint(target or first.device.name, num_bytes) as second,
    ):
        first.connect(second.address, settings)
        second.connect(first.address, settings)
        yield first, second


def measure_pair(
    source: str | None = None, target: str | None = None, plan: Plan | None = None, *, gpu: int | str | None = None
) -> list[dict[str, Any]]:
    """Rows of bandwidth and latency between two devices of this host; without `target` a device to itself.

    Args:
        source: the device that sends; the first active one where it is omitted.
        gpu: its data comes from the memory of this GPU, by index or PCI address (GPUDirect).

    Raises:
        HardwareMissing: no device, no pyverbs, or no GPUDirect.
        CheckFailed: data arrived wrong, or a queue pair went to error.
    """
    plan = plan or Plan()
    with connected(source, target, plan.buffer_bytes, plan.settings, gpu=gpu) as (sender, receiver):
        link = _Local(sender, receiver, plan)
        path = "loopback" if sender.device.name == receiver.device.name else "pair"
        about = {"path": path, "device": sender.device.name, "remote_device": receiver.device.name}
        return measure(link, plan, {**about, "memory": sender.memory.kind})


class Link:
    """One sender and somebody who receives: what a measurement needs of both ends.

    Args:
        sender: its endpoint, connected.
        remote: the receiver's address.
        plan: what is measured.
    """

    def __init__(self, sender: Endpoint, remote: Address, plan: Plan) -> None:
        self.sender, self.plan = sender, plan
        self._remote = remote

    def expect(self, kind: Kind, size: int, count: int) -> None:
        """The receiver gets ready for `count` messages, at most a window, in the first slots."""
        raise NotImplementedError

    def arrived(self, kind: Kind, size: int, count: int, seed: int) -> int:
        """Wait for them; return bytes in the receiver's slots that differ from `pattern(seed, size * count)`."""
        raise NotImplementedError

    def post(self, kind: Kind, size: int, slot: int) -> None:
        """Send a slot into the receiver's."""
        if kind == "write":
            self.sender.write(self._remote, size, slot * size, slot * size)
        else:
            self.sender.send(size, slot * size)


class _Local(Link):
    """Link with both ends in this process."""

    def __init__(self, sender: Endpoint, receiver: Endpoint, plan: Plan) -> None:
        super().__init__(sender, receiver.address, plan)
        self._receiver = receiver

    def expect(self, kind: Kind, size: int, count: int) -> None:
        self._receiver.memory.fill(bytes(size * count), 0)
        if kind == "send":
            for slot in range(count):
                self._receiver.receive(size, slot * size)

    def arrived(self, kind: Kind, size: int, count: int, seed: int) -> int:
        if kind == "send":
            self._receiver.wait(count, self.plan.patience_s)
        return wrong_bytes(self._receiver.memory.read(size * count, 0), pattern(seed, size * count))


def measure(link: Link, plan: Plan, about: dict[str, Any]) -> list[dict[str, Any]]:
    """Rows of all kinds and sizes over a link, `about` in each.

    Raises:
        CheckFailed: data arrived wrong, or a queue pair went to error.
    """
    settings = plan.settings
    timers = {"timeout": settings.timeout, "retry_cnt": settings.retry_cnt, "mtu": settings.mtu}
    rows = []
    for kind in plan.kinds:
        for size in plan.sizes:
            rows.append({"test": f"{kind}_bandwidth", **about, "bytes": size, **_bandwidth(link, kind, size), **timers})
            rows.append({"test": f"{kind}_latency", **about, "bytes": size, **_latency(link, kind, size), **timers})
    return rows


@functools.cache
def _noise() -> bytes:
    return random.Random(_NOISE_BYTES).randbytes(_NOISE_BYTES)


def pattern(seed: int, num_bytes: int) -> bytes:
    """Return bytes that both ends of a connection have alike: noise from a place that the seed gives.

    Its length is a prime, so that neither two slots nor two seeds in turn begin alike.
    """
    begin = seed * _STRIDE % _NOISE_BYTES
    return (_noise() * (2 + num_bytes // _NOISE_BYTES))[begin : begin + num_bytes]


def wrong_bytes(got: bytes, expected: bytes) -> int:
    """Count the bytes that differ; missing ones too."""
    if got == expected:
        return 0
    return sum(a != b for a, b in zip(got, expected, strict=False)) + abs(len(got) - len(expected))


def _bandwidth(link: Link, kind: Kind, size: int) -> dict[str, Any]:
    """Windows of messages one after the other; each window is checked, and only its own time counts."""
    plan, moved = link.plan, 0
    rates = []
    for repeat in range(plan.repeats + 1):
        took, left = 0.0, plan.messages
        while left:
            count = min(left, plan.window)
            took += _window(link, kind, size, count, seed=repeat * 1_000_003 + left)
            left -= count
        moved += plan.messages * size
        if repeat:  # the first warms up
            rates.append(8 * size * plan.messages / took)
    return {
        "window": plan.window,
        "messages": plan.messages,
        "median_bps": statistics.median(rates),
        "least_bps": min(rates),
        "each_bps": rates,
        "checked_bytes": moved,
        "wrong_bytes": 0,
    }


def _latency(link: Link, kind: Kind, size: int) -> dict[str, Any]:
    """Measure from the post to its completion, which a WRITE and a SEND get with the receiver's ACK: a round trip."""
    for warm in range(3):
        _window(link, kind, size, 1, seed=warm)
    times = [_window(link, kind, size, 1, seed=ping + 17) * 1e6 for ping in range(link.plan.pings)]
    return {
        "messages": len(times),
        "median_us": statistics.median(times),
        "p99_us": percentile(times, 99),
        "each_us": times,
        "checked_bytes": size * (len(times) + 3),
        "wrong_bytes": 0,
    }


def _window(link: Link, kind: Kind, size: int, count: int, seed: int) -> float:
    """Send `count` messages at once; seconds from the first post to the last completion.

    Raises:
        CheckFailed: a byte arrived wrong.
    """
    link.sender.memory.fill(pattern(seed, size * count), 0)
    link.expect(kind, size, count)
    begin = time.perf_counter()
    for slot in range(count):
        link.post(kind, size, slot)
    link.sender.wait(count, link.plan.patience_s)
    took = time.perf_counter() - begin
    wrong = link.arrived(kind, size, count, seed)
    if wrong:
        raise CheckFailed(f"{link.sender.device.name}: {wrong} of {size * count} bytes of a {kind} arrived wrong")
    return took
