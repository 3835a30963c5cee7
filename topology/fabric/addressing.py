"""The lists that a person wires and configures from: every cable, every NIC's address, every switch, as CSV.

Every ToR port to a NIC is a routed port with a subnet of two addresses (/31, RFC 3021): the even one is the port's and
the NIC's gateway, the odd one the NIC's, `Clos.address_of`. A rail is one prefix, so a server's route to the NICs of
its rail is one line. Links between switches are left unnumbered, for BGP sessions over IPv6 link-local (RFC 5549). A
switch gets a loopback in 172.16.0.0/12 and an AS number as RFC 7938 (5.2) gives them: one a ToR, one for the spines of
a pod, one for the core. Not covered: management network, and the switches' own configuration files.
"""

from __future__ import annotations

import csv
import io
import ipaddress
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from netlayer.units import format_rate
from topology.fabric.cable_plan import CablePlan
from topology.fabric.clos import Clos
from topology.fabric.graph import Graph

CABLE_COLUMNS = ("cable", "kind", "a_device", "a_port", "b_device", "b_port", "rate_gbps")
ADDRESS_COLUMNS = (
    "server",
    "nic",
    "rail",
    "address",
    "gateway",
    "rail_prefix",
    "tor",
    "tor_port",
    "tor_port_address",
    "pod",
)
SWITCH_COLUMNS = ("switch", "level", "pod", "loopback", "asn")

_FIRST_ASN = 4_200_000_000
_LOOPBACKS = ipaddress.IPv4Network("172.16.0.0/12")


def cables_csv(graph: Graph, cable_plan: CablePlan | None = None) -> str:
    """One line a link of a cable: both ends with device and port; the ends of one breakout cable share its number.

    Without a plant (an imported fabric) every link is a cable of its own and its kind unknown.
    """
    kinds = _cable_types(cable_plan) if cable_plan else ["" for _ in range(graph.num_cables)]
    numbers = _cable_numbers(graph) if cable_plan else list(range(1, graph.num_cables + 1))
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


def addresses_csv(cable_plan: CablePlan) -> str:
    """One line a NIC: its address and gateway, its rail's prefix, and the ToR port it hangs on with that port's own."""
    graph, fabric = cable_plan.graph(), cable_plan.fabric
    nics = np.arange(fabric.design.num_nics, dtype=np.int64)
    tors = fabric.tor_of(nics)
    places = zip(
        fabric.address_of(nics).tolist(),
        (nics % fabric.design.nics_per_server).tolist(),
        fabric.tor_nodes(tors).tolist(),
        (fabric.pod_of(tors) % fabric.design.pods_per_network).tolist(),
        strict=True,
    )
    rows = []
    for nic, (number, local, tor, pod) in enumerate(places):
        address, gateway = ipaddress.IPv4Address(number), ipaddress.IPv4Address(number - 1)
        prefix = ipaddress.IPv4Network((number, 16), strict=False)
        server, rail = graph.names[nic].partition("/")[0], local % fabric.design.rails
        there = (f"{address}/31", gateway, prefix, graph.names[tor], graph.b_port[nic], f"{gateway}/31", pod)
        rows.append((server, local, rail, *there))
    return _csv(ADDRESS_COLUMNS, rows)


def switches_csv(cable_plan: CablePlan) -> str:
    """One line a switch: level, pod, loopback, AS number."""
    fabric = cable_plan.fabric
    names = cable_plan.graph().names[fabric.design.num_nics :]
    rows = [
        (name, level, pod, f"{_LOOPBACKS[number]}/32", asn)
        for number, (name, (level, pod, asn)) in enumerate(zip(names, _autonomous_systems(fabric), strict=True), 1)
    ]
    return _csv(SWITCH_COLUMNS, rows)


def _autonomous_systems(fabric: Clos) -> list[tuple[str, int | str, int]]:
    """(level, pod, AS number) of each switch, in node order; the core has the first number, a pod one of the next."""
    design = fabric.design
    pods = design.pods_per_network
    pod_of_tor = (np.arange(design.num_tors) // design.tors_per_pod).tolist()
    pod_of_spine = (np.arange(design.num_spines) // design.spines_per_pod).tolist()
    first_tor = _FIRST_ASN + 1 + design.num_pods
    return [
        *(("tor", pod % pods, first_tor + tor) for tor, pod in enumerate(pod_of_tor)),
        *(("spine", pod % pods, _FIRST_ASN + 1 + pod) for pod in pod_of_spine),
        *[("core", "", _FIRST_ASN)] * design.num_cores,
    ]


def _cable_types(cable_plan: CablePlan) -> list[str]:
    """Return the type of each cable, such as `AOC 400 Gb/s to 2 x 200 Gb/s`, in the order of the fabric's cables."""
    design, port = cable_plan.fabric.design, format_rate(cable_plan.cluster.switch_port_bps)
    ends = f" to {design.lanes_per_port} x {format_rate(design.nic_bps)}" if design.lanes_per_port > 1 else ""
    broken = f" as {design.uplink_lanes} x {format_rate(design.tor_uplink_bps)}" if design.uplink_lanes > 1 else ""
    return [
        *[f"AOC {port}{ends}"] * design.num_nics,
        *[f"fibre {port}{broken}"] * (design.num_tors * design.tor_uplinks),
        *[f"fibre {port}"] * (design.num_spines * design.spine_uplinks),
    ]


def _cable_numbers(graph: Graph) -> list[int]:
    """Number the cables from 1, in order; links whose upper ends are parts of one port are one cable."""
    known: dict[tuple[int, str], int] = {}
    places = zip(graph.b.tolist(), graph.b_port, strict=True)
    return [known.setdefault((node, port.partition("/")[0]), len(known) + 1) for node, port in places]


def _csv(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows(rows)
    return text.getvalue()
