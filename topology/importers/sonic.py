"""SONiC's config_db.json, one file a switch: PORT gives rates, DEVICE_NEIGHBOR the cables.

Both forms of DEVICE_NEIGHBOR are read: keyed by local port, and the older one keyed by neighbour with `local_port`.
A neighbour without a file is a switch where DEVICE_NEIGHBOR_METADATA says so (a type with Router or Switch in it).
Where it says nothing, `hosts` tell; without them one whose port is named as a switch's is refused, and the others are
hosts. Not covered: VLANs, BGP sessions, port channels (their members are cables of their own), and QoS.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from netlayer.errors import ConfigError
from topology.fabric.graph import Graph
from topology.importers.cables import SWITCH_PORT, Sighting, to_graph
from topology.importers.files import clean, parse_json, read_text, show
from topology.importers.management import without_management

_SWITCH_TYPES = ("router", "switch")


@dataclass(frozen=True)
class _Device:
    """One file: the switch's name, rate of each port in bit/s, ports by alias, and the three tables."""

    path: Path
    name: str
    rates: Mapping[str, float]
    aliases: Mapping[str, str]
    neighbours: Mapping[str, Any]
    metadata: Mapping[str, Any]


def read_sonic(
    paths: Sequence[Path],
    *,
    default_bps: float,
    skip_dangling: bool,
    hosts: Sequence[str] = (),
    exclude: Sequence[str] = (),
    keep: Sequence[str] = (),
) -> Graph:
    """The fabric of many switches' configurations.

    Args:
        paths: one file a switch.
        default_bps: rate of a link whose rate no file gives; 0 for none.
        skip_dangling: see `cables.to_graph`.
        hosts: patterns of names (`srv*`) that are hosts; a neighbour without a file that matches none is a switch.
        exclude, keep: see `management.without_management`.

    Raises:
        ConfigError: a neighbour without a file may be a host or a switch; a file is damaged, names no host name or a
            port that the switch lacks; two files are of one switch; see also `cables.to_graph`.
    """
    devices: dict[str, _Device] = {}
    for path in paths:
        device = _device(path)
        if device.name in devices:
            rule = f"is the host name in {show(devices[device.name].path)} and in {show(path)}"
            raise ConfigError("FILES", device.name, rule, "give one file a switch")
        devices[device.name] = device
    sightings = [sighting for device in devices.values() for sighting in _sightings(device, devices)]
    types = {name: value for device in devices.values() for name, value in _types(device)}
    typed = {name: any(word in value.lower() for word in _SWITCH_TYPES) for name, value in types.items()}
    forwarding = typed | dict.fromkeys(devices, True)
    unclear: dict[str, Path] = {}
    for one in sightings:
        if one.neighbour not in forwarding:
            forwarding[one.neighbour] = is_switch = (
                not _matches(one.neighbour, hosts) if hosts else _looks_like_switch(one)
            )
            if is_switch and not hosts:
                unclear[one.neighbour] = one.path
    sightings = without_management(sightings, forwarding, exclude=exclude, keep=keep)
    graph = to_graph(
        sightings,
        {name: frozenset(device.rates) for name, device in devices.items()},
        frozenset(name for name, forwards in forwarding.items() if forwards),
        default_bps=default_bps,
        skip_dangling=skip_dangling,
        source=paths[0],
    )
    # After the checks of `to_graph`: where files contradict each other, that is what the user must hear first.
    for name in sorted(unclear.keys() & set(graph.names)):
        rule = f"has no file and no type in DEVICE_NEIGHBOR_METADATA of {show(unclear[name])}: host or switch?"
        raise ConfigError("neighbour", name, rule, "say which names are hosts, such as --host-names 'srv*'")
    return graph


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _looks_like_switch(one: Sighting) -> bool:
    """Whether the port of a neighbour, of which no file says what it is, is named as a switch's."""
    return SWITCH_PORT.fullmatch(one.neighbour_ports[0]) is not None


def _device(path: Path) -> _Device:
    tree = parse_json(read_text(path), path)
    local = _table(tree, "DEVICE_METADATA", path).get("localhost")
    name = local.get("hostname") if isinstance(local, dict) else None
    if name is None:
        rule = "has no DEVICE_METADATA.localhost.hostname"
        raise ConfigError("FILES", show(path), rule, "give config_db.json as the switch holds it")
    rates, aliases = {}, {}
    for port, row in _table(tree, "PORT", path).items():
        clean(port, "port", path)
        rates[port] = _speed(row, port, path)
        if isinstance(row, dict) and isinstance(row.get("alias"), str):
            aliases[row["alias"]] = port
    return _Device(
        path,
        clean(name, "host name", path),
        rates,
        aliases,
        _table(tree, "DEVICE_NEIGHBOR", path),
        _table(tree, "DEVICE_NEIGHBOR_METADATA", path),
    )


def _sightings(device: _Device, devices: Mapping[str, _Device]) -> list[Sighting]:
    sightings = []
    for key, row in device.neighbours.items():
        if not isinstance(row, dict):
            raise _wrong(device, f"DEVICE_NEIGHBOR|{show(key)} is no table")
        old = "local_port" in row
        local = row["local_port"] if old else key
        local = device.aliases.get(local, local) if isinstance(local, str) else ""
        if local not in device.rates:
            raise _wrong(
                device, f"DEVICE_NEIGHBOR names the port {show(row['local_port'] if old else key)}, PORT does not"
            )
        neighbour = clean(key if old else row.get("name"), f"neighbour of {local}", device.path)
        port = clean(row.get("port"), f"neighbour port of {local}", device.path)
        far = devices.get(neighbour)
        if far:
            port = far.aliases.get(port, port)
            if port not in far.rates:
                rule = f"puts {local} on {neighbour}:{port}, a port that {show(far.path)} does not have"
                raise ConfigError("FILES", show(device.path), rule, "fetch both files again at one time")
        sightings.append(Sighting(device.path, device.name, local, neighbour, (port,), device.rates[local]))
    return sightings


def _types(device: _Device) -> list[tuple[str, str]]:
    pairs = [(name, row.get("type")) for name, row in device.metadata.items() if isinstance(row, dict)]
    pairs += [(name, row.get("type")) for name, row in device.neighbours.items() if isinstance(row, dict)]
    return [(name, value) for name, value in pairs if isinstance(value, str)]


def _speed(row: object, port: str, path: Path) -> float:
    """Bits per second of a PORT row, whose speed is in Mb/s; 0 where it has none."""
    speed = row.get("speed", 0) if isinstance(row, dict) else None
    try:
        return float(int(str(speed))) * 1e6
    except (ValueError, OverflowError) as exc:
        rule = f"has the speed {show(speed)} at PORT|{port}, which is no number of Mb/s"
        raise ConfigError("FILES", show(path), rule, "write 400000 for 400G") from exc


def _table(tree: Mapping[str, Any], name: str, path: Path) -> Mapping[str, Any]:
    table = tree.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError("FILES", show(path), f"{name} is no table", "give config_db.json as the switch holds it")
    return table


def _wrong(device: _Device, rule: str) -> ConfigError:
    return ConfigError("FILES", show(device.path), rule, f"fix the file of {device.name}")
