"""Lookup of the NIC or node that a name in a user's file means.

A finder raises ValueError, with what the fabric has, for a host that it has not. A NIC of a `Clos` is known by its
number, its name as `build` writes it (srv0007/nic3; srv0007 where it has one NIC) and its address; a host of a `Graph`
by its name, by its device's where that has one NIC (srv7 for srv7/eth0), and by its node id.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable

import numpy as np

from topology.fabric.cable_plan import nic_name
from topology.fabric.clos import Clos
from topology.fabric.graph import Graph

_NAME = re.compile(r"srv([0-9]{1,9})(?:/nic([0-9]{1,9}))?")
_NUMBER = re.compile(r"[0-9]{1,18}")

Find = Callable[[str], int]


def find_nic(fabric: Clos) -> Find:
    """Finds NICs of a `Clos`: by number, by the name that `build` writes, by address."""
    design = fabric.design
    each = design.nics_per_server

    def find(host: str) -> int:
        nic, name = -1, _NAME.fullmatch(host)
        if _NUMBER.fullmatch(host):
            nic = int(host)
        elif name and (name[2] or each == 1) and int(name[2] or 0) < each:
            nic = int(name[1]) * each + int(name[2] or 0)
        elif host.count(".") == 3:
            nic = _nic_of_address(host, each)
        if 0 <= nic < design.num_nics:
            return nic
        last = design.num_nics - 1
        address = ipaddress.IPv4Address(int(fabric.address_of(np.array([last]))[0]))
        raise ValueError(f"the fabric has hosts 0 to {last}: the last is also {nic_name(last, each)} and {address}")

    return find


def _nic_of_address(host: str, nics_per_server: int) -> int:
    """The NIC of an address as `Clos.address_of` gives them, -1 for none."""
    try:
        address = int(ipaddress.IPv4Address(host))
    except ValueError:
        return -1
    network, local, port = address >> 24, address >> 16 & 0xFF, address & 0xFFFF
    is_nic = network == 10 and local < nics_per_server and port % 2
    return port // 2 * nics_per_server + local if is_nic else -1


def find_node(graph: Graph) -> Find:
    """Finds hosts of a `Graph`: by name, by its device's name where that has one NIC, by node id."""
    of_device: dict[str, list[int]] = {}
    for node in graph.hosts.tolist():
        device, slash, _ = graph.names[node].partition("/")
        if slash:
            of_device.setdefault(device, []).append(node)

    def find(host: str) -> int:
        nics = of_device.get(host, [])
        node = graph.node_ids.get(host, nics[0] if len(nics) == 1 else -1)
        if node < 0 and _NUMBER.fullmatch(host):
            node = int(host)
        if 0 <= node < graph.num_nodes and not graph.is_switch[node]:
            return node
        if 0 <= node < graph.num_nodes:
            raise ValueError(f"{graph.names[node]} is a switch: name a host")
        if nics:
            raise ValueError(f"it has {len(nics)} NICs: name one, such as {graph.names[nics[0]]}")
        raise ValueError(f"the fabric's {len(graph.hosts)} hosts have names such as {graph.names[graph.hosts[0]]}")

    return find
