"""What devices of a built fabric would report: SONiC configurations and lldpcli tables, for the import tests."""

import json
from pathlib import Path
from typing import Any

from topology.fabric.graph import Graph


def ends(graph: Graph) -> list[tuple[str, str, str, str, float]]:
    """(device, port, neighbour, its port, rate) of both ends of every cable; a host's NIC is its port."""
    a, b = (
        [_place(graph, node, port) for node, port in zip(nodes.tolist(), ports, strict=True)]
        for nodes, ports in ((graph.a, graph.a_port), (graph.b, graph.b_port))
    )
    rates = graph.bps.tolist()
    pairs = list(zip(a, b, rates, strict=True))
    return [(*one, *other, rate) for one, other, rate in (*pairs, *((b, a, rate) for a, b, rate in pairs))]


def write_sonic(graph: Graph, folder: Path) -> None:
    """One config_db.json a switch; every second one in the older form of DEVICE_NEIGHBOR."""
    for number, switch in enumerate(sorted(_switches(graph))):
        mine = [end for end in ends(graph) if end[0] == switch]
        ports = {port: {"speed": str(int(rate / 1e6)), "alias": f"Eth{port}"} for _, port, _, _, rate in mine}
        keyed = {port: {"name": near, "port": far} for _, port, near, far, _ in mine}
        # The older form has one row a neighbour, so it cannot hold parallel links.
        neighbours = {near: {"local_port": port, "port": far} for _, port, near, far, _ in mine}
        old = number % 2 == 1 and len(neighbours) == len(mine)
        tree = {
            "DEVICE_METADATA": {"localhost": {"hostname": switch, "type": "LeafRouter"}},
            "PORT": {**ports, "Ethernet9999": {"speed": "100000"}},
            "DEVICE_NEIGHBOR": neighbours if old else keyed,
        }
        (folder / f"{number}.json").write_text(json.dumps(tree), encoding="utf-8")


def write_lldp(graph: Graph, folder: Path, *, json0: bool = False) -> None:
    """One file a device, as `lldpcli show neighbors -f json` or json0 prints it."""
    switches = _switches(graph)
    reports: dict[str, list[dict[str, Any]]] = {}
    for device, port, near, far, rate in ends(graph):
        row = neighbour(near, far, rate, forwards=near in switches)
        reports.setdefault(device, []).append({port: row})
    for device, rows in reports.items():
        interface: Any = rows if len(rows) > 1 else rows[0]
        tree: dict[str, Any] = {"lldp": {"interface": interface}}
        if json0:
            tree = {"lldp": [{"interface": [_json0(port, row) for one in rows for port, row in one.items()]}]}
        (folder / f"{device}.json").write_text(json.dumps(tree), encoding="utf-8")


def neighbour(name: str, port: str, rate: float, *, forwards: bool) -> dict[str, Any]:
    """A neighbour in lldpcli's json; a host sends its port as an address with the interface in words."""
    capability = [{"type": "Bridge", "enabled": forwards}, {"type": "Station", "enabled": not forwards}]
    identity = {"type": "ifname", "value": port} if forwards else {"type": "mac", "value": "aa:bb:cc:dd:ee:ff"}
    return {
        "via": "LLDP",
        "chassis": {name: {"id": {"type": "mac", "value": f"mac of {name}"}, "capability": capability}},
        "port": {
            "id": identity,
            "descr": port,
            "auto-negotiation": {"current": f"{rate / 1e9:.0f}GbaseCR4 - 4-pair"},
        },
    }


def _json0(port: str, row: dict[str, Any]) -> dict[str, Any]:
    ((name, chassis),) = row["chassis"].items()
    far = row["port"]
    return {
        "name": port,
        "via": "LLDP",
        "chassis": [{"id": [chassis["id"]], "name": [{"value": name}], "capability": chassis["capability"]}],
        "port": [
            {
                "id": [far["id"]],
                "descr": [{"value": far["descr"]}],
                "auto-negotiation": [{"current": [{"value": far["auto-negotiation"]["current"]}]}],
            }
        ],
    }


def _switches(graph: Graph) -> set[str]:
    return {name for name, switch in zip(graph.names, graph.is_switch.tolist(), strict=True) if switch}


def _place(graph: Graph, node: int, port: str) -> tuple[str, str]:
    device, _, nic = graph.names[node].partition("/")
    return device, nic or port
