"""The options of `netlayer topology probe` as values, each checked, with one line for what is wrong."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from netlayer.errors import ConfigError

if TYPE_CHECKING:  # the command's `--help` needs no numpy
    from topology.probe.packets import Sweep


def sweep_of(given: dict[str, Any]) -> Sweep:
    """What the options ask to send.

    Raises:
        ConfigError: an option is missing or cannot be used.
    """
    import numpy as np

    from topology.probe.packets import Sweep
    from topology.probe.sending import interface_address

    if not given["dst"]:
        raise ConfigError("--dst", None, "is missing", "give the address to probe, or --read FILE")
    dst = address_of("--dst", given["dst"])
    if not given["src"] and not given["iface"]:
        raise ConfigError("--src", None, "is missing", "give the address that probes come from, or --iface")
    src = address_of("--src", given["src"]) if given["src"] else interface_address(given["iface"])
    ports, ttls = _numbers("--ports", given["ports"], 0xFFFF), _numbers("--ttl", given["ttls"], 0xFF)
    try:
        return Sweep(
            src,
            dst,
            np.array(ports),
            np.array(ttls),
            rounds=given["rounds"],
            qpn=given["qpn"],
            tos=given["tos"],
            payload_bytes=given["payload"],
        )
    except ValueError as exc:
        name, _, rule = str(exc).partition(" = ")
        option = {"payload_bytes": "--payload"}.get(name, f"--{name}")
        value, _, bounds = rule.partition(": ")
        raise ConfigError(option, value, "is out of range", f"choose {bounds}") from exc


def address_of(option: str, text: str) -> int:
    """An IPv4 address as an integer.

    Raises:
        ConfigError: the text is none.
    """
    try:
        return int(ipaddress.IPv4Address(text))
    except ValueError as exc:
        raise ConfigError(option, text, "is no IPv4 address", "give one such as 10.1.0.9") from exc


def members_of(texts: Iterable[str]) -> dict[int, int]:
    """`HOP=N` as {hop: next hops that lead to it}.

    Raises:
        ConfigError: a text is not of that form.
    """
    pairs = [text.partition("=") for text in texts]
    for hop, equals, number in pairs:
        if not (hop.isdecimal() and number.isdecimal() and int(number) > 0):
            raise ConfigError("--members", hop + equals + number, "is not HOP=N", "write 2=32: 32 routers at hop 2")
    return {int(hop): int(number) for hop, _, number in pairs}


def weights_of(texts: Iterable[str]) -> dict[int, float]:
    """`ADDR=W` as {address: weight}.

    Raises:
        ConfigError: a text is not of that form, or a weight is not above 0.
    """
    weights = {}
    for text in texts:
        name, _, value = text.partition("=")
        try:
            weight = float(value)
        except ValueError as exc:
            raise ConfigError("--weight", text, "is not ADDR=W", "write 10.0.1.2=3") from exc
        if not 0 < weight < float("inf"):
            raise ConfigError("--weight", text, "must be above 0", "write 10.0.1.2=3")
        weights[address_of("--weight", name)] = weight
    return weights


def _numbers(option: str, text: str, high: int) -> list[int]:
    """`1-3,7` as [1, 2, 3, 7]: no number twice, all within 1..high."""
    numbers: list[int] = []
    for part in text.split(","):
        first, dash, last = part.partition("-")
        try:
            low, top = int(first), int(last if dash else first)
        except ValueError as exc:
            raise ConfigError(option, text, f"{part!r} is no number or range", "write A-B,C") from exc
        if not 1 <= low <= top <= high:
            raise ConfigError(option, text, f"{part!r} is not within 1..{high}, low to high", "write A-B,C")
        numbers.extend(range(low, top + 1))
    return sorted(set(numbers))
