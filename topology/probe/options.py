"""The options of `netlayer topology probe` as values, each checked, with one line for what is wrong."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from netlayer.errors import ConfigError
from topology.ranges import numbers_in

if TYPE_CHECKING:  # the command's `--help` needs no numpy
    from topology.probe.forecast import LinuxRouter
    from topology.probe.packets import Sweep

_MEMBERS = re.compile(r"([0-9]{1,3})=([1-9][0-9]{0,5})")
_SEED = re.compile(r"[0-9]{1,10}")
_WEIGHT = re.compile(r"[1-9][0-9]{0,2}")


def sweep_of(params: dict[str, Any]) -> Sweep:
    """Return the sweep that the options ask for.

    Raises:
        ConfigError: an option is missing or cannot be used.
    """
    import numpy as np

    from topology.probe.packets import Sweep
    from topology.probe.sending import interface_address

    if not params["dst"]:
        raise ConfigError("--dst", None, "is missing", "give the address to probe, or --read FILE")
    dst = address_of("--dst", params["dst"])
    if not params["src"] and not params["iface"]:
        raise ConfigError("--src", None, "is missing", "give the address that probes come from, or --iface")
    src = address_of("--src", params["src"]) if params["src"] else interface_address(params["iface"])
    ports, ttls = numbers_in(params["ports"], 1, 0xFFFF, "--ports"), numbers_in(params["ttls"], 1, 0xFF, "--ttl")
    try:
        return Sweep(
            src,
            dst,
            np.array(ports),
            np.array(ttls),
            rounds=params["rounds"],
            qpn=params["qpn"],
            tos=params["tos"],
            payload_bytes=params["payload"],
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
    members = {}
    for text in texts:
        match = _MEMBERS.fullmatch(text)
        if match is None:
            raise ConfigError("--members", text, "is not HOP=N", "write 2=32: 32 routers at hop 2")
        members[int(match[1])] = int(match[2])
    return members


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


def routers_of(texts: Iterable[str]) -> list[LinuxRouter]:
    """`ADDR=SEED:HOP,HOP*W` as routers whose choice can be predicted.

    Raises:
        ConfigError: a text is not of that form, or a router is given twice.
    """
    from topology.probe.forecast import LinuxRouter

    routers: dict[int, LinuxRouter] = {}
    for text in texts:
        name, equals, rest = text.partition("=")
        seed, _, hops = rest.partition(":")
        pairs = [part.partition("*") for part in hops.split(",")]
        good = _SEED.fullmatch(seed) and 0 < int(seed) < 1 << 32
        if not equals or not good or not all(_WEIGHT.fullmatch(weight or "1") for _, _, weight in pairs):
            remedy = "write 10.0.1.2=7:10.0.2.2,10.0.3.2*3: its seed (1..2^32-1), its next hops, a weight where not 1"
            raise ConfigError("--linux", text, "is not ADDR=SEED:HOP,HOP*W", remedy)
        address = address_of("--linux", name)
        if address in routers:
            raise ConfigError("--linux", text, "gives that router a second time", "give each once")
        next_hops = tuple(address_of("--linux", hop) for hop, _, _ in pairs)
        routers[address] = LinuxRouter(address, int(seed), next_hops, tuple(int(weight or 1) for *_, weight in pairs))
    return list(routers.values())
