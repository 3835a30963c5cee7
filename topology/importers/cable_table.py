"""A table of cables, CSV with one line a cable: what `topology build` writes, and what a spreadsheet has.

Columns are known by their headings: the two devices, their ports, and the rate (`gbps` as a number, or `speed` as
`400G`). `hosts` tell which devices are hosts. Without them ports do (`Ethernet1/1` is a switch's, `eth0` a host's), and
`srv1/nic0` is NIC nic0 of the host srv1; a device of which they tell nothing is refused where it has one cable, and a
switch where it has several. Not covered: lengths, prices, colours.
"""

from __future__ import annotations

import csv
import fnmatch
import io
import re
from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from pathlib import Path

from netlayer.errors import ConfigError
from netlayer.units import parse_rate
from topology.fabric.graph import Graph
from topology.importers.cables import SWITCH_PORT, Sighting, to_graph
from topology.importers.files import clean, read_text, show

_HOST_PORT = re.compile(r"(eth|en[ospx]|ib|mlx|rdma|nic|hca|roce|bond|gpu)[0-9_][A-Za-z0-9_.-]*")
# By the field: the headings that it goes by.
_HEADINGS = {
    "a": ("a_device", "device_a", "from", "source", "a"),
    "a_port": ("a_port", "port_a", "from_port", "source_port"),
    "b": ("b_device", "device_b", "to", "destination", "b"),
    "b_port": ("b_port", "port_b", "to_port", "destination_port"),
    "rate": ("gbps", "rate", "speed", "rate_gbps"),
}


def is_cable_table(first_line: str) -> bool:
    """Return whether a file's first line has the headings of both devices."""
    names = {word.strip().lower() for word in first_line.split(",")}
    return bool(names & set(_HEADINGS["a"])) and bool(names & set(_HEADINGS["b"]))


def read_cable_table(path: Path, *, default_bps: float, hosts: Sequence[str] = ()) -> Graph:
    """Return the fabric of one table.

    Args:
        path: of the CSV.
        default_bps: rate of a cable whose line gives none; 0 for none.
        hosts: patterns of device names that are hosts; all others are then switches.

    Raises:
        ConfigError: a column or a cell is missing, a rate is none, two lines name one port, or there is no switch.
    """
    reader = csv.DictReader(io.StringIO(read_text(path)))
    columns = {(name or "").strip().lower(): name for name in reader.fieldnames or ()}
    of = {field: next((columns[one] for one in names if one in columns), None) for field, names in _HEADINGS.items()}
    for field in ("a", "b"):
        if of[field] is None:
            rule = f"has no column {_HEADINGS[field][0]}"
            raise ConfigError("FILES", show(path), rule, "give columns a_device, a_port, b_device, b_port, gbps")
    sightings: list[Sighting] = []
    nics: set[str] = set()
    for number, row in enumerate(reader, start=2):
        cells = {field: (row.get(name) or "").strip() if name else "" for field, name in of.items()}
        place = f"{show(path)}, line {number}"
        ends = [
            (clean(cells[end], "device", path), clean(cells[f"{end}_port"] or f"line{number}", "port", path))
            for end in ("a", "b")
        ]
        (device, port), (other, other_port) = ends
        rate = _rate(cells["rate"], place)
        # The graph calls a host's NIC `host/nic`, and so does the table that it writes.
        if "/" in device:
            device, _, port = device.partition("/")
            nics.add(device)
        if "/" in other:
            other, _, other_port = other.partition("/")
            nics.add(other)
        sightings.append(Sighting(path, device, port, other, (other_port,), rate))
    if not sightings:
        raise ConfigError("FILES", show(path), "has no line of a cable", "give the whole table")
    switches = frozenset(_switches(sightings, hosts, nics, path))
    if not switches:
        raise ConfigError("FILES", show(path), "describes no switch", "say which names are hosts: --host-names 'srv*'")
    return to_graph(sightings, {}, switches, default_bps=default_bps, skip_dangling=False, source=path)


def _switches(sightings: Sequence[Sighting], hosts: Sequence[str], nics: Set[str], path: Path) -> Iterator[str]:
    """Yield the devices that forward; `nics`: those whose NICs have names of their own."""
    ports: dict[str, list[str]] = defaultdict(list)
    for one in sightings:
        ports[one.device].append(one.port)
        ports[one.neighbour].append(one.neighbour_ports[0])
    for name, used in ports.items():
        if hosts:
            is_host = any(fnmatch.fnmatchcase(name, pattern) for pattern in hosts)
        elif name in nics or all(_HOST_PORT.fullmatch(port) for port in used):
            is_host = True
        elif any(SWITCH_PORT.fullmatch(port) for port in used) or len(used) > 1:
            is_host = False
        else:
            rule = f"has one cable in {show(path)}, at a port named {used[0]}: host or switch?"
            raise ConfigError("device", name, rule, "say which names are hosts, such as --host-names 'srv*'")
        if not is_host:
            yield name


def _rate(text: str, place: str) -> float:
    """Bits per second of `400` (Gb/s), `400G` or `400Gbps`; 0 where nothing is given."""
    if not text:
        return 0.0
    try:
        return float(text) * 1e9
    except ValueError:
        pass
    try:
        return float(parse_rate(text))
    except ValueError as exc:
        raise ConfigError("FILES", place, f"{show(text)} is no rate", "write 400G, or 400 for Gb/s") from exc
