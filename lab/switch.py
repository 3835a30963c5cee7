"""More NICs for the lab: Soft-RoCE devices on one switch, each of which can be made slow or lossy.

The switch is a bridge of this machine, and a NIC a veth pair that ends there. As with the cable all ends stay in the
first namespace, so each has an address, routes and neighbours of its own for every other.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_BRIDGE = "switch"
_FIRST = 2  # rxe0 and rxe1 are the cable's


@contextmanager
def switched(num_nics: int) -> Iterator[list[str]]:
    """Names of the RDMA devices, all of which reach each other; gone when the block ends."""
    numbers = range(_FIRST, _FIRST + num_nics)
    _ip("link", "add", _BRIDGE, "type", "bridge")
    try:
        _ip("link", "set", _BRIDGE, "up")
        for number in numbers:
            _plug_in(number)
        for number in numbers:
            for other in numbers:
                if other != number:
                    _introduce(number, other)
        for number in numbers:
            _run("rdma", "link", "add", _device(number), "type", "rxe", "netdev", _interface(number))
        yield [_device(number) for number in numbers]
    finally:
        for number in numbers:
            _run("rdma", "link", "delete", _device(number), check=False)
            _run("ip", "link", "delete", _interface(number), check=False)
        _ip("link", "delete", _BRIDGE)


@contextmanager
def impaired(device: str, *words: str) -> Iterator[None]:
    """What a NIC sends goes through a queue of that kind: `tbf rate 50mbit ...`, `netem loss 5%`."""
    name = _interface(int(device.removeprefix("rxe")))
    _run("tc", "qdisc", "add", "dev", name, "root", *words)
    try:
        yield
    finally:
        _run("tc", "qdisc", "del", "dev", name, "root")


def _plug_in(number: int) -> None:
    name, port = _interface(number), f"port{number}"
    _ip("link", "add", name, "type", "veth", "peer", "name", port)
    _ip("link", "set", port, "up", "master", _BRIDGE)
    for option, value in (("rp_filter", "0"), ("accept_local", "1")):
        Path(f"/proc/sys/net/ipv4/conf/{name}/{option}").write_text(value)
    _ip("link", "set", name, "address", _hardware(number), "up")
    _ip("address", "add", f"{_address(number)}/32", "dev", name)


def _introduce(number: int, other: int) -> None:
    name, there = _interface(number), _address(other)
    _ip("neighbour", "replace", there, "lladdr", _hardware(other), "dev", name, "nud", "permanent")
    # Several ways to one address: whoever asks says by which interface, and the metric tells them apart.
    _ip("route", "add", f"{there}/32", "dev", name, "src", _address(number), "metric", str(number))


def _device(number: int) -> str:
    return f"rxe{number}"


def _interface(number: int) -> str:
    return f"veth{number}"


def _address(number: int) -> str:
    return f"10.0.1.{number}"


def _hardware(number: int) -> str:
    return f"02:00:00:00:01:{number:02x}"


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*command: str, check: bool = True) -> None:
    """
    Raises:
        RuntimeError: the program says no, and it matters.
    """
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if check and done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip()}")
