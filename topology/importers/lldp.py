"""`lldpcli show neighbors -f json` (or json0) of many devices, one file each, named after the device: srv0001.json.

The output does not say whose it is, hence the file name. A device forwards where its neighbours hear it announce
Bridge or Router, unless its name matches `hosts` (a server with containers announces both). Of a device whose
capabilities nobody hears, one with a link to a host is a switch, and where `hosts` are given one with several links; a
fabric in which others are left is refused. A neighbour that sends no system name is found by the chassis address that
another file names, else it is unknown. The LLDP agent in a NIC's firmware, which names nobody, is passed over next to
the host's own. Out-of-band management is excluded (`management`). Not covered: VLANs, power, MED.
"""

from __future__ import annotations

import fnmatch
import logging
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from netlayer.errors import ConfigError
from topology.fabric.graph import Graph
from topology.importers.cables import Sighting, to_graph
from topology.importers.files import clean, parse_json, read_text, show
from topology.importers.management import without_management

logger = logging.getLogger(__name__)

_FORWARDING = ("bridge", "router")
# 1000BaseTFD, 10GigBaseLR, 100GbaseCR4, 2.5GBaseT, 2p5GbaseT: Mb/s, or Gb/s after a G.
_RATE = re.compile(r"(?<![0-9.p])([0-9]{1,6}(?:[.p][0-9]{1,3})?)(G(?:ig)?)?base", re.IGNORECASE)
_INTERFACE_NAMES = ("ifname", "local")
# Ports of H3C, Huawei and Cisco that are named for the one rate that they have: enough to know a management switch.
_SLOW_PORTS = {"FastEthernet": 1e8, "GigabitEthernet": 1e9}
# What lldpd on a server says of itself: its distribution and kernel. SONiC and Cumulus name themselves first.
_SERVER = re.compile(
    r"(Ubuntu|Debian|Red Hat|CentOS|Rocky|AlmaLinux|Oracle Linux|SUSE|openEuler|Fedora|Amazon|Alibaba Cloud)"
    r".* Linux [0-9]+\.[0-9]"
)


class _Neighbour(NamedTuple):
    """One interface's neighbour as it was heard; `name` is empty where it sent none.

    `is_nic_agent`: it sends addresses alone, as the firmware of a NIC does. `forwards` is None where it announced
    nothing of the kind, `bps` 0 where the negotiated rate `medium` names none.
    """

    path: Path
    device: str
    port: str
    name: str
    chassis: str
    ports: tuple[str, ...]
    is_nic_agent: bool
    forwards: bool | None
    bps: float
    medium: str
    description: str = ""


def read_lldp(
    paths: Sequence[Path],
    *,
    default_bps: float,
    skip_dangling: bool,
    hosts: Sequence[str] = (),
    exclude: Sequence[str] = (),
    keep: Sequence[str] = (),
) -> Graph:
    """Read the fabric that the devices' neighbour tables describe.

    Args:
        paths: one file a device.
        default_bps: rate of a link whose negotiated rate no end reports; 0 for none.
        skip_dangling: see `cables.to_graph`.
        hosts: patterns of names (`srv*`) that are hosts whatever they announce.
        exclude, keep: see `management.without_management`.

    Raises:
        ConfigError: a file is damaged, two are of one device, a neighbour cannot be named, hosts and switches cannot be
            distinguished, or there is no switch; see also `cables.to_graph`.
    """
    own: dict[str, frozenset[str]] = {}
    neighbours: list[_Neighbour] = []
    for path in paths:
        device = clean(path.stem, "host name (the file's)", path)
        if device in own:
            raise ConfigError("FILES", show(path), f"is a second file of {device}", "give one file a device")
        of_device = list(_neighbours(path, device))
        own[device] = frozenset(one.port for one in of_device)
        neighbours += of_device
    by_chassis = {one.chassis: one.name for one in neighbours if one.name and one.chassis}
    neighbours = _without_nic_agents(neighbours, by_chassis, skip_unknown=skip_dangling)
    sightings: list[Sighting] = []
    announced: dict[str, bool] = {}
    for one in neighbours:
        name = _known_as(one, by_chassis, own)
        sightings.append(Sighting(one.path, one.device, one.port, name, one.ports, one.bps))
        if one.forwards is not None:
            announced[name] = announced.get(name, False) or one.forwards
    unread = Counter(one.medium for one in neighbours if one.medium and not one.bps)
    for medium, times in unread.items():
        logger.warning("%d links negotiated %s, which names no rate that is known", times, show(medium))
    sightings = without_management(sightings, announced, exclude=exclude, keep=keep, default_bps=default_bps)
    switches = _switches(sightings, announced, hosts)
    _warn_of_servers(neighbours, switches)
    if not {name for one in sightings for name in (one.device, one.neighbour)} - switches:
        logger.warning(
            "no host: all devices announce that they forward, as a server with a bridge does; where servers are among "
            "them, name them with --host-names"
        )
    return to_graph(
        sightings,
        own,
        switches,
        default_bps=default_bps,
        skip_dangling=skip_dangling,
        source=paths[0],
    )


def _switches(sightings: Sequence[Sighting], announced: Mapping[str, bool], hosts: Sequence[str]) -> frozenset[str]:
    """Return the devices that forward."""
    own_counts, neighbour_counts = Counter(one.device for one in sightings), Counter(one.neighbour for one in sightings)
    several = {name for name in own_counts | neighbour_counts if max(own_counts[name], neighbour_counts[name]) > 1}
    others = {
        name
        for name in own_counts | neighbour_counts
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in hosts)
    }
    switches = {name for name in others if announced.get(name)}
    known_hosts = (announced.keys() | (own_counts | neighbour_counts).keys() - others) - switches
    ends = [(one.device, one.neighbour) for one in sightings]
    above = {one for pair in ends for one, other in (pair, pair[::-1]) if other in known_hosts}
    unknown = others - announced.keys()
    left = unknown & several - above
    if left and not hosts:
        rule = f"announces no capability to any neighbour, nor do {len(left) - 1} others like it: host or switch?"
        raise ConfigError("device", min(left), rule, "say which names are hosts, such as --host-names 'srv*'")
    switches |= unknown & (above | several)
    if not switches:
        rule = "describe no switch: all are hosts by what they announce or by --host-names"
        raise ConfigError(
            "FILES",
            f"{len(own_counts | neighbour_counts)} devices",
            rule,
            "give the switches' files, or narrow --host-names",
        )
    return frozenset(switches)


def _warn_of_servers(neighbours: Sequence[_Neighbour], switches: frozenset[str]) -> None:
    """Warn of switches that describe themselves as servers: a bridge for containers forwards too, as a router does."""
    servers = {one.name: one.description for one in neighbours if _SERVER.match(one.description)}
    taken = sorted({name for name in servers if name in switches or name.partition(".")[0] in switches})
    if taken:
        logger.warning(
            "%d devices are taken as switches, for they announce that they forward, and describe themselves as servers "
            "(first %s: %s); where they are, name them with --host-names",
            len(taken),
            taken[0],
            show(servers[taken[0]][:60]),
        )


def _without_nic_agents(
    neighbours: Sequence[_Neighbour], by_chassis: Mapping[str, str], *, skip_unknown: bool
) -> list[_Neighbour]:
    """Return those that name a device; an agent of a NIC's firmware is heard on its port besides the host's own."""
    named = {(one.device, one.port) for one in neighbours if one.name or one.chassis in by_chassis}
    agents = [one for one in neighbours if one.is_nic_agent and not one.name and one.chassis not in by_chassis]
    redundant = [one for one in agents if (one.device, one.port) in named]
    alone = [one for one in agents if (one.device, one.port) not in named and skip_unknown]
    if redundant:
        logger.info("%d LLDP entries of NICs' own agents passed over, beside those of their hosts", len(redundant))
    if alone:
        first = f"{alone[0].device}:{alone[0].port}"
        logger.warning("%d links omitted: only an agent without a name is heard there, first %s", len(alone), first)
    dropped = {id(one) for one in (*redundant, *alone)}
    return [one for one in neighbours if id(one) not in dropped]


def _known_as(one: _Neighbour, by_chassis: Mapping[str, str], own: Mapping[str, frozenset[str]]) -> str:
    """The neighbour's name; without its domain where a file is named so."""
    name = one.name or by_chassis.get(one.chassis, "")
    if not name:
        rule = f"on {one.device}:{one.port} is an unknown host: it sends no system name"
        remedy = "let lldpd send it, or pass --skip-dangling to leave such links out"
        raise ConfigError("neighbour", show(one.chassis), rule, remedy)
    short = name.partition(".")[0]
    return short if name not in own and short in own else name


def _neighbours(path: Path, device: str) -> Iterator[_Neighbour]:
    tree = parse_json(read_text(path), path)
    if "lldp" not in tree:
        remedy = "write it with lldpcli show neighbors -f json"
        raise ConfigError("FILES", show(path), "has no table lldp", remedy)
    tables = tree["lldp"] if isinstance(tree["lldp"], list) else [tree["lldp"]]
    for table in tables:
        interfaces = table.get("interface", []) if isinstance(table, dict) else None
        for port, row in _interfaces(interfaces, path):
            yield _neighbour(path, device, clean(port, "interface", path), row)


def _interfaces(tree: object, path: Path) -> Iterator[tuple[object, Mapping[str, Any]]]:
    """(name, row) out of json (one object, or a list of objects, keyed by name) or json0 (rows with `name`)."""
    for item in tree if isinstance(tree, list) else [tree]:
        if not isinstance(item, dict):
            raise _damaged(path)
        pairs = [(item["name"], item)] if isinstance(item.get("name"), str) else item.items()
        for name, row in pairs:
            if not isinstance(row, dict):
                raise _damaged(path)
            yield name, row


def _neighbour(path: Path, device: str, port: str, row: Mapping[str, Any]) -> _Neighbour:
    """Parse one neighbour that lldpd reports at a port.

    Raises:
        ConfigError: it has no port.
    """
    chassis, far = _one(row.get("chassis")), _one(row.get("port"))
    name = _value(chassis.get("name"))
    if not name and len(chassis) == 1 and "id" not in chassis:  # json: the name is the key
        name, chassis = next((key, _one(value)) for key, value in chassis.items())
    identity = _one(far.get("id"))
    number, label = str(identity.get("value", "")), _value(far.get("descr"))
    interface = identity.get("type") in _INTERFACE_NAMES
    ports = tuple(dict.fromkeys(one for one in ((number, label) if interface else (label, number)) if one))
    if not ports:
        raise ConfigError("FILES", show(path), f"gives {port} a neighbour without a port", "fetch the file again")
    capabilities = chassis.get("capability")
    rows = capabilities if isinstance(capabilities, list) else [capabilities]
    known = [one for one in rows if isinstance(one, dict)]
    medium = _value(_one(far.get("auto-negotiation")).get("current"))
    by_name = max((bps for kind, bps in _SLOW_PORTS.items() if ports[0].startswith(kind)), default=0.0)
    return _Neighbour(
        path=path,
        device=device,
        port=port,
        name=clean(name, "neighbour", path) if name else "",
        chassis=str(_one(chassis.get("id")).get("value", "")),
        ports=tuple(clean(one, "neighbour port", path) for one in ports),
        is_nic_agent=identity.get("type") == "mac" and _one(chassis.get("id")).get("type") == "mac",
        forwards=any(_forwards(one) for one in known) if known else None,
        bps=_rate(medium) or by_name,
        medium=medium,
        description=_value(chassis.get("descr")),
    )


def _forwards(capability: Mapping[str, Any]) -> bool:
    return capability.get("enabled") is True and str(capability.get("type", "")).lower() in _FORWARDING


def _rate(medium: str) -> float:
    """Return the negotiated rate of `100GbaseCR4 - ...` or `1000BaseTFD`; 0 where it is not reported."""
    match = _RATE.search(medium)
    return float(match[1].lower().replace("p", ".")) * (1e9 if match[2] else 1e6) if match else 0.0


def _one(value: object) -> dict[str, Any]:
    """The object itself, or the first of json0's list."""
    value = value[0] if isinstance(value, list) and value else value
    return value if isinstance(value, dict) else {}


def _value(value: object) -> str:
    """Text as json has it, or json0's list of one object with `value`."""
    value = _one(value).get("value", "") if isinstance(value, list | dict) else value
    return value if isinstance(value, str) else ""


def _damaged(path: Path) -> ConfigError:
    return ConfigError("FILES", show(path), "has an interface that is no object", "fetch the file again, it is damaged")
