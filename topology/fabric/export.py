"""A fabric in other tools' forms: networkx, GraphML, HPCC's topo.txt and htsim's .topo.

networkx and GraphML keep everything, so that a file read back is the same graph. HPCC knows numbers, no names or
ports; htsim knows regular fat trees alone. Not covered: traffic and the simulators' other inputs.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from ipaddress import IPv4Address
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from netlayer.errors import ConfigError
from topology.fabric.clos import Clos, Ints
from topology.fabric.graph import Graph, checked, parallel_pairs

if TYPE_CHECKING:
    import networkx as nx

logger = logging.getLogger(__name__)


def to_networkx(graph: Graph) -> nx.MultiGraph:
    """Nodes by name with `index`, `kind` (host, switch), `level` and `address`; one edge a cable, its number as key."""
    import networkx as nx

    net = nx.MultiGraph()
    kinds = ("host", "switch")
    levels = zip(graph.names, graph.is_switch.tolist(), graph.level.tolist(), strict=True)
    net.add_nodes_from(
        (name, {"index": index, "kind": kinds[switch], "level": level})
        for index, (name, switch, level) in enumerate(levels)
    )
    if graph.host_ip is not None:
        for host in graph.hosts.tolist():
            net.nodes[graph.names[host]]["address"] = str(IPv4Address(int(graph.host_ip[host])))
    names = graph.names
    net.add_edges_from((names[a], names[b], cable, data) for cable, (a, b, data) in enumerate(_edges(graph)))
    return net


def from_networkx(net: nx.MultiGraph, source: object = "networkx") -> Graph:
    """Return the graph that `to_networkx` exported; `kind` of nodes and `bps` of edges are required, the rest is not.

    Addresses count where every host has one.

    Raises:
        ConfigError: an attribute is missing or wrong; see also `graph.checked`.
    """
    try:
        nodes = sorted(net.nodes(data=True), key=lambda node: int(node[1].get("index", 0)))
        edges = sorted(net.edges(keys=True, data=True), key=lambda edge: int(edge[3].get("cable", 0)))
        ids = {name: index for index, (name, _) in enumerate(nodes)}
        ends = [(data.get("a", one), data.get("b", other), data) for one, other, _, data in edges]
        graph = Graph(
            names=tuple(str(name) for name, _ in nodes),
            is_switch=np.array([data["kind"] == "switch" for _, data in nodes], dtype=np.bool_),
            a=np.array([ids[a] for a, _, _ in ends], dtype=np.int64),
            b=np.array([ids[b] for _, b, _ in ends], dtype=np.int64),
            bps=np.array([float(data["bps"]) for *_, data in ends]),
            latency_ns=np.array([float(data.get("latency_ns", 0.0)) for *_, data in ends]),
            a_port=tuple(str(data.get("a_port", "")) for *_, data in ends),
            b_port=tuple(str(data.get("b_port", "")) for *_, data in ends),
            host_ip=_addresses([data for _, data in nodes]),
        )
    except (KeyError, ValueError, TypeError, AttributeError, OverflowError) as exc:
        rule = f"lacks an attribute, or has a wrong one ({exc})"
        raise ConfigError("fabric", source, rule, "nodes need kind (host, switch), edges need bps") from exc
    return checked(graph, source)


def write_graphml(graph: Graph, path: Path) -> None:
    """GraphML that networkx, Gephi, yEd and igraph open; the file appears whole or not at all."""
    import networkx as nx

    part = path.with_name(f".{path.name}.part")
    try:
        nx.write_graphml_xml(to_networkx(graph), part)
        part.replace(path)
    except OSError as exc:
        raise ConfigError("--out", path, f"cannot be written ({exc.strerror})", "give a folder of yours") from exc
    finally:
        part.unlink(missing_ok=True)


def read_graphml(path: Path) -> Graph:
    """The graph of a file that `write_graphml` wrote.

    Raises:
        ConfigError: the file cannot be read or is no GraphML; see also `from_networkx`.
    """
    from xml.etree.ElementTree import ParseError

    import networkx as nx

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # a file that networkx has to guess at is damaged
            net = nx.read_graphml(path, force_multigraph=True)
    except OSError as exc:
        raise ConfigError("fabric", path, f"cannot be read ({exc.strerror})", "give a GraphML file") from exc
    except (ParseError, nx.NetworkXError, ValueError, LookupError, TypeError, AttributeError, Warning) as exc:
        raise ConfigError("fabric", path, f"is no GraphML ({exc})", "write it again") from exc
    return from_networkx(net, path)


def hpcc_text(graph: Graph) -> str:
    """HPCC's topo.txt: counts, the switches, and a line `src dst rate delay error-rate` a pair of devices.

    Names and ports are lost. HPCC keeps one link a pair, so parallel cables stand as one of their summed rate (and the
    longest of their delays): the capacity is whole, but ECMP has fewer members to choose among, which is said.
    """
    pairs, widest = parallel_pairs(graph)
    if pairs:
        logger.warning(
            "topo.txt: %d pairs of devices have up to %d parallel links, written as one link of their summed rate: "
            "HPCC knows one link a pair, so its ECMP has fewer members to choose among",
            pairs,
            widest,
        )
    cables: dict[tuple[int, int], tuple[float, float]] = {}
    columns = (array.tolist() for array in (graph.a, graph.b, graph.bps, graph.latency_ns))
    for a, b, bps, latency in zip(*columns, strict=True):
        ends = (a, b) if (b, a) not in cables else (b, a)
        rate, delay = cables.get(ends, (0.0, 0.0))
        cables[ends] = rate + bps, max(delay, latency)
    lines = [
        f"{graph.num_nodes} {int(graph.is_switch.sum())} {len(cables)}",
        " ".join(str(node) for node in np.flatnonzero(graph.is_switch).tolist()),
    ]
    lines += [f"{a} {b} {_rate(bps)} {_plain(latency)}ns 0" for (a, b), (bps, latency) in cables.items()]
    return "\n".join(lines) + "\n"


def htsim_text(fabric: Clos, latency_ns: int = 1000) -> str:
    """htsim's .topo for a CLOS; its hosts count by ToR, its core by place, then plane: see `htsim_nodes`.

    Raises:
        ConfigError: htsim cannot say it: a partly filled ToR set, a fraction as oversubscription, a rate below 1G, or
            networks that no switch joins.
    """
    design = fabric.design
    if design.num_networks > 1:
        raise ConfigError(
            "cluster.rail_only", "true", "makes a network of every rail, htsim knows one", "simulate one rail"
        )
    over = design.nics_per_tor * design.nic_bps / (design.tor_uplinks * design.tor_uplink_bps)
    if design.num_nics != design.num_tors * design.nics_per_tor:
        rule = f"leaves a ToR set of {design.servers_per_tor_set} partly filled, which htsim cannot say"
        raise ConfigError("cluster.servers", design.num_servers, rule, "fill it")
    if over != int(over):
        raise ConfigError("cluster.oversubscription", over, "must be whole for htsim", "choose 1, 2, 4")
    speeds = [design.nic_bps, design.tor_uplink_bps, design.spine_uplink_bps]
    if any(speed % 10**9 for speed in speeds):
        raise ConfigError("cluster.nic_bps", design.nic_bps, "must be whole Gb/s for htsim", "round it")
    tiers = [
        (design.nics_per_tor, design.tor_uplinks, 1),
        (design.tors_per_pod * design.links_per_tor_spine, design.spine_uplinks, design.links_per_tor_spine),
        (design.num_pods * design.links_per_spine_core, 0, design.links_per_spine_core),
    ]
    num_tiers = 3 if design.num_cores else 2
    lines = [f"Nodes {design.num_nics}", f"Tiers {num_tiers}", f"Podsize {design.num_nics // design.num_pods}"]
    for tier, (down, up, bundle) in enumerate(tiers[:num_tiers]):
        lines += ["", f"Tier {tier}", f"Downlink_speed_Gbps {speeds[tier] // 10**9}", f"Radix_Down {down}"]
        lines += [f"Radix_Up {up}"] if tier + 1 < num_tiers else []
        lines += [f"Oversubscribed {int(over)}"] if tier == 0 else [f"Bundle {bundle}"]
        lines += [f"Downlink_Latency_ns {latency_ns}", "Switch_Latency_ns 0"]
    return "\n".join(lines) + "\n"


def htsim_nodes(fabric: Clos) -> Ints:
    """Return our node id of each node in htsim's numbering: hosts, ToRs, aggregation and core switches."""
    design = fabric.design
    hosts = np.argsort(fabric.tor_of(np.arange(design.num_nics)), kind="stable")
    switches = np.arange(design.num_nics, design.num_nics + design.num_tors + design.num_spines)
    index, plane = np.divmod(np.arange(design.num_cores), design.spines_per_pod)
    return np.concatenate([hosts, switches, fabric.core_nodes(plane * design.cores_per_plane + index)])


def _addresses(nodes: Sequence[Mapping[str, Any]]) -> NDArray[np.uint32] | None:
    """Return each node's address, 0 for switches; None where a host has none."""
    if any("address" not in data for data in nodes if data["kind"] != "switch"):
        return None
    addresses = [int(IPv4Address(data["address"])) if data["kind"] != "switch" else 0 for data in nodes]
    return np.array(addresses, dtype=np.uint32)


def _edges(graph: Graph) -> list[tuple[int, int, dict[str, Any]]]:
    columns = (graph.a.tolist(), graph.b.tolist(), graph.bps.tolist(), graph.latency_ns.tolist())
    names = graph.names
    return [
        (
            a,
            b,
            {
                "cable": cable,
                "a": names[a],
                "b": names[b],
                "a_port": a_port,
                "b_port": b_port,
                "bps": bps,
                "latency_ns": latency,
            },
        )
        for cable, (a, b, bps, latency, a_port, b_port) in enumerate(
            zip(*columns, graph.a_port, graph.b_port, strict=True)
        )
    ]


def _plain(number: float) -> str:
    """Format without an exponent, which HPCC's reader of delays does not know."""
    return f"{number:.9f}".rstrip("0").rstrip(".")


def _rate(bps: float) -> str:
    return f"{bps / 1e9:.0f}Gbps" if bps % 1e9 == 0 else f"{bps:.0f}bps"
