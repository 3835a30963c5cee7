"""Numbers of switches and cables that a cluster needs: the CLOS of MegaScale (NSDI'24, 3.6), ports checked.

A ToR serves one rail of one ToR set; the ToRs of a pod share its spines; spine i of every pod is in plane i, and
each plane has its own core switches. A rail-only network (Wang et al., Rail-only, 2023) has pods, spines and core
switches of its own for every rail. Not covered: the links themselves (clos), cable lengths, and spare ports.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NoReturn

from netlayer.config.tree import ClusterConfig
from netlayer.errors import ConfigError

# Addresses are 10.<NIC of the server>.<two bytes>, and every server takes two: its own and its switch port's.
_MAX_SERVERS = 32_768
_MAX_LANES = 64


@dataclass(frozen=True)
class Design:
    """Counts of one fabric. *Ports* are physical, at the switch's own rate; *links* may be parts of a port.

    Args:
        num_servers: servers; the last ToR set may be partly filled.
        nics_per_tor: NICs that a ToR is wired for.
        lanes_per_port: NICs that fit into the rate of one port (a breakout cable has as many ends).
        num_tor_sets: groups of servers that share one ToR a rail.
        num_pods: of all networks together.
        num_networks: that no switch joins: one, or one a rail.
        spines_per_pod: also the number of planes of the core.
        links_per_tor_spine: parallel links of each ToR-spine pair.
        cores_per_plane: core switches of a plane; 0 in two tiers.
        links_per_spine_core: parallel links of each spine-core pair of a plane; 0 in two tiers.
        tor_uplink_bps: port rate with the AOC split, NIC rate without.
    """

    num_servers: int
    nics_per_server: int
    rails: int
    servers_per_tor_set: int
    num_tor_sets: int
    num_pods: int
    num_networks: int
    nics_per_tor: int
    lanes_per_port: int
    spines_per_pod: int
    links_per_tor_spine: int
    cores_per_plane: int
    links_per_spine_core: int
    nic_bps: int
    tor_uplink_bps: int
    spine_uplink_bps: int
    radix: int
    tor_ports_down: int
    tor_ports_up: int
    spine_ports_down: int
    spine_ports_up: int
    core_ports: int

    @property
    def num_nics(self) -> int:
        return self.num_servers * self.nics_per_server

    @property
    def num_tors(self) -> int:
        return self.num_tor_sets * self.rails

    @property
    def tors_per_pod(self) -> int:
        return self.num_tors // self.num_pods

    @property
    def pods_per_network(self) -> int:
        return self.num_pods // self.num_networks

    @property
    def tor_sets_per_pod(self) -> int:
        return self.num_tor_sets // self.pods_per_network

    @property
    def num_spines(self) -> int:
        return self.num_pods * self.spines_per_pod

    @property
    def num_cores(self) -> int:
        return self.num_networks * self.spines_per_pod * self.cores_per_plane

    @property
    def tor_uplinks(self) -> int:
        """Members of a ToR's ECMP group."""
        return self.spines_per_pod * self.links_per_tor_spine

    @property
    def spine_uplinks(self) -> int:
        """Members of a spine's ECMP group towards the core."""
        return self.cores_per_plane * self.links_per_spine_core

    @property
    def uplink_lanes(self) -> int:
        """Links that one ToR uplink port is broken out into: 1 with the AOC split."""
        return self.tor_uplinks // self.tor_ports_up


def plan(cluster: ClusterConfig) -> Design:
    """Count the switches, ports and links of `cluster`.

    The paper leaves pods and the core's wiring open (3.6). Ours: as few spines as can carry a pod, wired alike to all
    its ToRs; a spine has as many ports up as down (1:1); core switches of a plane share a spine's uplinks evenly.

    Raises:
        ConfigError: a switch would need more ports than it has, or links cannot be shared out evenly.
    """
    _check_units(cluster)
    lanes = cluster.switch_port_bps // cluster.nic_bps
    tor_down, tor_up = _tor_ports(cluster, lanes)
    num_tor_sets = math.ceil(cluster.servers / cluster.servers_per_tor_set)
    if num_tor_sets % cluster.pods:
        rule = f"must divide the {num_tor_sets} ToR sets of {cluster.servers} servers"
        raise ConfigError("cluster.pods", cluster.pods, rule, f"set one of {_divisors(num_tor_sets)}")
    ports_per_pair = _tor_spine_ports(cluster, num_tor_sets, tor_up)
    spine_down = _tors_per_pod(cluster, num_tor_sets) * ports_per_pair
    networks = cluster.rails if cluster.rail_only else 1
    cores, spine_core = _core(cluster, spine_down)
    return Design(
        num_servers=cluster.servers,
        nics_per_server=cluster.nics_per_server,
        rails=cluster.rails,
        servers_per_tor_set=cluster.servers_per_tor_set,
        num_tor_sets=num_tor_sets,
        num_pods=networks * cluster.pods,
        num_networks=networks,
        nics_per_tor=_nics_per_tor(cluster),
        lanes_per_port=lanes,
        spines_per_pod=tor_up // ports_per_pair,
        # Without the split the same uplink ports are broken out to NIC rate at both ends: same switches, cables and
        # capacity, twice the links at half the rate. The core keeps port rate in both, so that a comparison
        # changes the ToR uplink alone.
        links_per_tor_spine=ports_per_pair * (1 if cluster.aoc_split else lanes),
        cores_per_plane=cores,
        links_per_spine_core=spine_core,
        nic_bps=cluster.nic_bps,
        tor_uplink_bps=cluster.switch_port_bps if cluster.aoc_split else cluster.nic_bps,
        spine_uplink_bps=cluster.switch_port_bps,
        radix=cluster.switch_radix,
        tor_ports_down=tor_down,
        tor_ports_up=tor_up,
        spine_ports_down=spine_down,
        spine_ports_up=cores * spine_core,
        core_ports=cluster.pods * spine_core,
    )


def _check_units(cluster: ClusterConfig) -> None:
    if cluster.switch_radix % 2:
        rule = "must be even: half of a switch's ports face down and half face up"
        raise ConfigError("cluster.switch_radix", cluster.switch_radix, rule, f"set {cluster.switch_radix + 1}")
    if cluster.switch_port_bps % cluster.nic_bps:
        rule = f"must divide cluster.switch_port_bps = {cluster.switch_port_bps}"
        remedy = "a breakout cable cuts a port into equal parts, one a NIC"
        raise ConfigError("cluster.nic_bps", cluster.nic_bps, rule, remedy)
    if cluster.switch_port_bps // cluster.nic_bps > _MAX_LANES:
        rule = f"is below 1/{_MAX_LANES} of cluster.switch_port_bps = {cluster.switch_port_bps}"
        raise ConfigError("cluster.nic_bps", cluster.nic_bps, rule, "no breakout cable has so many ends")
    if cluster.servers > _MAX_SERVERS:
        rule = f"is above {_MAX_SERVERS}: 10.0.0.0/8 with the NIC in the second byte has no more pairs of addresses"
        raise ConfigError("cluster.servers", cluster.servers, rule, "model a part of the cluster")


def _tors_per_pod(cluster: ClusterConfig, num_tor_sets: int) -> int:
    return num_tor_sets // cluster.pods * (1 if cluster.rail_only else cluster.rails)


def _nics_per_tor(cluster: ClusterConfig) -> int:
    return cluster.servers_per_tor_set * cluster.nics_per_server // cluster.rails


def _tor_ports(cluster: ClusterConfig, lanes: int) -> tuple[int, int]:
    """Return the ports (down, up) of a ToR."""
    nics = _nics_per_tor(cluster)
    down = math.ceil(nics / lanes)
    uplinks = nics / lanes / cluster.oversubscription
    up = round(uplinks)
    if not math.isclose(uplinks, up, rel_tol=1e-9) or up == 0:
        _fail_fraction(cluster, nics, lanes, uplinks)
    if down + up > cluster.switch_radix:
        rule = f"a ToR needs {down} ports down and {up} up, a switch has {cluster.switch_radix}"
        most = int(cluster.servers_per_tor_set * cluster.switch_radix / (down + up)) // lanes * lanes
        remedy = f"set {most} or fewer" if most else "raise cluster.rails or cluster.switch_radix"
        raise ConfigError("cluster.servers_per_tor_set", cluster.servers_per_tor_set, rule, remedy)
    return down, up


def _fail_fraction(cluster: ClusterConfig, nics: int, lanes: int, uplinks: float) -> NoReturn:
    rule = f"{nics} NICs under a ToR need {uplinks:.4g} uplink ports, which is no whole number"
    if cluster.oversubscription > 1 and nics % lanes == 0:
        fits = nics / lanes / max(1, math.floor(uplinks))
        raise ConfigError("cluster.oversubscription", cluster.oversubscription, rule, f"set {fits:.10g}")
    remedy = f"set a multiple of {lanes}, so that downlink ports are filled"
    raise ConfigError("cluster.servers_per_tor_set", cluster.servers_per_tor_set, rule, remedy)


def _tor_spine_ports(cluster: ClusterConfig, num_tor_sets: int, tor_up: int) -> int:
    """Ports that join each ToR-spine pair: as many as the spine's ports allow, for the fewest spines."""
    if cluster.tiers == 2 and cluster.pods > 1:
        rule = "two tiers have no core to join pods"
        raise ConfigError("cluster.pods", cluster.pods, rule, "set cluster.pods = 1 or cluster.tiers = 3")
    budget = cluster.switch_radix if cluster.tiers == 2 else cluster.switch_radix // 2
    tors = _tors_per_pod(cluster, num_tor_sets)
    if tors > budget:
        rule = f"puts {tors} ToRs in a pod, a spine has {budget} ports down"
        remedy = "set more cluster.pods (3 tiers), a larger cluster.servers_per_tor_set or fewer servers"
        raise ConfigError("cluster.pods", cluster.pods, rule, remedy)
    return max(ports for ports in _divisors(tor_up) if ports * tors <= budget)


def _core(cluster: ClusterConfig, spine_ports: int) -> tuple[int, int]:
    """Core switches of a plane, and the links from each spine to each of them; (0, 0) in two tiers."""
    if cluster.tiers == 2:
        return 0, 0
    name, cores = "cluster.core_switches_per_plane", cluster.core_switches_per_plane
    if spine_ports % cores:
        rule = f"must divide the {spine_ports} uplinks of a spine"
        raise ConfigError(name, cores, rule, f"set one of {_divisors(spine_ports)}")
    links = spine_ports // cores
    if cluster.pods * links > cluster.switch_radix:
        rule = f"a core switch needs {links} ports for each of {cluster.pods} pods, it has {cluster.switch_radix}"
        enough = [fit for fit in _divisors(spine_ports) if cluster.pods * spine_ports // fit <= cluster.switch_radix]
        remedy = f"set {enough[0]}" if enough else "fewer pods, or a larger cluster.switch_radix"
        raise ConfigError(name, cores, rule, remedy)
    return cores, links


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]
