"""The lists that a person wires and configures from: every cable, every NIC's address, every switch, as CSV.

A NIC's address is routed to its port as a /32 (the ToR needs no address there), so the .0 of the first server is an
address like any other, and a server may move to another port. Switches get a loopback in 172.16.0.0/12 and an AS
number as RFC 7938 (5.2) gives them: one a ToR, one for the spines of a pod, one for the core. Left out: management
network, IPv6, and the switches' own configuration files.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from netlayer.units import format_rate
from topology.clos import Clos
from topology.graph import Graph
from topology.plant import Plant

CABLE_COLUMNS = ("cable", "kind", "a_device", "a_port", "b_device", "b_port", "rate_gbps")
ADDRESS_COLUMNS = ("server", "nic", "rail", "address", "subnet", "tor", "tor_port", "pod")
SWITCH_COLUMNS = ("switch", "level", "pod", "loopback", "asn")

_FIRST_ASN = 4_200_000_000
_LOOPBACKS = 0xAC10_0000  # 172.16.0.0


def cables_csv(graph: Graph, plant: Plant | None = None) -> str:
    """One line a link of a cable: both ends with device and port; the ends of one breakout cable share its number.

    Without a plant (an imported fabric) every link is a cable of its own and its kind unknown.
    """
    kinds = _kinds(plant) if plant else ["" for _ in range(graph.num_cables)]
    numbers = _cable_numbers(graph) if plant else list(range(1, graph.num_cables + 1))
    names = graph.names
    rows = zip(
        numbers,
        kinds,
        (names[node] for node in graph.a.tolist()),
        graph.a_port,
        (names[node] for node in graph.b.tolist()),
        graph.b_port,
        (f"{rate:.10g}" for rate in (graph.bps / 1e9).tolist()),
        strict=True,
    )
    return _csv(CABLE_COLUMNS, rows)


def addresses_csv(plant: Plant) -> str:
    """One line a NIC: address, the subnet that holds its rail, and the ToR port it hangs on."""
    graph = plant.graph()
    rows: list[tuple[Any, ...]] = []
    first_node = first_cable = 0
    for index, part in enumerate(plant.parts):
        local = np.arange(part.design.num_nics, dtype=np.int64)
        nic = plant.nic_of(index)
        server, position = np.divmod(nic, plant.cluster.nics_per_server)
        tor = part.tor_of(local)
        pods = part.pod_of(tor).tolist()
        tors = (part.tor_nodes(tor) + first_node).tolist()
        for one, (host, number) in enumerate(zip(server.tolist(), position.tolist(), strict=True)):
            address = f"10.{number}.{host // 256}.{host % 256}/32"
            port = graph.b_port[first_cable + one]
            name = f"srv{host:04d}"
            rail = number % plant.cluster.rails
            rows.append((name, number, rail, address, f"10.{number}.0.0/16", graph.names[tors[one]], port, pods[one]))
        first_node += part.num_nodes
        first_cable += part.num_links // 2
    return _csv(ADDRESS_COLUMNS, sorted(rows, key=lambda row: (row[0], row[1])))


def switches_csv(plant: Plant) -> str:
    """One line a switch: level, pod, loopback, AS number."""
    names = plant.graph().names
    rows: list[tuple[Any, ...]] = []
    first_node = num_tors = 0
    for part in plant.parts:
        design = part.design
        nodes = range(design.num_nics, part.num_nodes)
        for node, (level, pod, asn) in zip(nodes, _autonomous_systems(part, num_tors), strict=True):
            loopback = _LOOPBACKS + len(rows) + 1
            rows.append((names[first_node + node], level, pod, f"{_dotted(loopback)}/32", asn))
        first_node += part.num_nodes
        num_tors += design.num_tors
    return _csv(SWITCH_COLUMNS, rows)


def _autonomous_systems(part: Clos, tors_before: int) -> list[tuple[str, int | str, int]]:
    """(level, pod, AS number) of each switch, in node order; the core has the first number, a pod one of the next."""
    design = part.design
    pod_of_tor = (np.arange(design.num_tors) // design.tors_per_pod).tolist()
    pod_of_spine = (np.arange(design.num_spines) // design.spines_per_pod).tolist()
    first_tor = _FIRST_ASN + 1 + design.num_pods + tors_before
    return [
        *(("tor", pod, first_tor + tor) for tor, pod in enumerate(pod_of_tor)),
        *(("spine", pod, _FIRST_ASN + 1 + pod) for pod in pod_of_spine),
        *[("core", "", _FIRST_ASN)] * design.num_cores,
    ]


def _kinds(plant: Plant) -> list[str]:
    kinds: list[str] = []
    for part in plant.parts:
        design = part.design
        port = format_rate(plant.cluster.switch_port_bps)
        ends = f"{design.lanes_per_port} x {format_rate(design.nic_bps)}"
        kinds += [f"AOC {port} to {ends}" if design.lanes_per_port > 1 else f"AOC {port}"] * design.num_nics
        broken = f" as {design.uplink_lanes} x {format_rate(design.tor_uplink_bps)}" if design.uplink_lanes > 1 else ""
        kinds += [f"fibre {port}{broken}"] * (design.num_tors * design.tor_uplinks)
        kinds += [f"fibre {port}"] * (design.num_spines * design.spine_uplinks)
    return kinds


def _cable_numbers(graph: Graph) -> list[int]:
    """From 1, in order; links whose upper ends are parts of one port are one cable."""
    known: dict[tuple[int, str], int] = {}
    places = zip(graph.b.tolist(), graph.b_port, strict=True)
    return [known.setdefault((node, port.partition("/")[0]), len(known) + 1) for node, port in places]


def _dotted(address: int) -> str:
    return ".".join(str(address >> shift & 255) for shift in (24, 16, 8, 0))


def _csv(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()
