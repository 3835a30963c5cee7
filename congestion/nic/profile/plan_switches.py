"""The switches of a cluster file by what is set on them alike: those of a level whose ports have the same rates.

Ports get the names that each system gives them by number: a fabric's own may differ, which is said. Not covered: seeds
and offsets of ECMP, which `netlayer topology optimize` searches and `netlayer nic switch` writes.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from congestion.nic.profile.file import Profile
from congestion.nic.switches import sonic as switch_sonic
from congestion.nic.switches import text as switch_text
from congestion.nic.switches.buffers import find_headroom
from congestion.nic.switches.chips import CHIPS
from congestion.nic.switches.plan import ETHERNET_BYTES, MTU_BYTES, Format, SwitchPlan, check_ports, plan_switch
from netlayer.config.tree import ClusterConfig
from netlayer.errors import ConfigError
from topology.fabric.cable_plan import CablePlan

_LANES = {True: 8, False: 4}  # of a port of 400 Gb/s and above; of a slower one
_WIDE_BPS = 400 * 10**9


@dataclass(frozen=True)
class SwitchGroup:
    """Switches that are set alike.

    Args:
        level: tor, spine or core.
        ports: number as it is printed on the switch (`7`, or `7/2` for part 2 of 7), and rate in bits per second.
    """

    level: str
    names: tuple[str, ...]
    ports: tuple[tuple[str, int], ...]


def group_switches(cluster: ClusterConfig) -> list[SwitchGroup]:
    """
    Raises:
        ConfigError: see `design.plan`.
    """
    cable_plan = CablePlan.build(cluster)
    graph, design = cable_plan.graph(), cable_plan.fabric.design
    ports: dict[int, list[tuple[str, int]]] = {}
    for nodes, labels in ((graph.a, graph.a_port), (graph.b, graph.b_port)):
        for node, label, bps in zip(nodes.tolist(), labels, graph.bps.tolist(), strict=True):
            if node >= design.num_nics:
                ports.setdefault(node, []).append((label, int(bps)))
    groups: dict[tuple[str, tuple[tuple[str, int], ...]], list[str]] = {}
    counts = (("tor", design.num_tors), ("spine", design.num_spines), ("core", design.num_cores))
    levels = [level for level, count in counts for _ in range(count)]
    for node, own in sorted(ports.items()):
        key = levels[node - design.num_nics], tuple(sorted(own, key=_place))
        groups.setdefault(key, []).append(graph.names[node])
    return [SwitchGroup(level, tuple(names), own) for (level, own), names in groups.items()]


def switch_file(
    group: SwitchGroup, profile: Profile, cluster: ClusterConfig, form: Format, cable_m: int, chip: str = ""
) -> tuple[str, SwitchPlan]:
    """Return the configuration of a group's switches, and the plan of its fastest ports.

    Args:
        chip: of the switches; empty where it is not known, which SONiC's tables of a lossless fabric do not do without.

    Raises:
        ConfigError: see `plan_switch`; ports that the system cannot split so; a chip that is not known.
    """
    by_rate: dict[int, list[str]] = {}
    for label, bps in group.ports:
        by_rate.setdefault(bps, []).append(port_name(form, label, bps, cluster.switch_port_bps))
    names = [name for own in by_rate.values() for name in own]
    check_ports(names, form)
    fastest = max(by_rate)
    if form != "sonic":  # headroom and cable are said once there
        plan = _plan(profile, names, fastest, cable_m, chip)
        return getattr(switch_text, form)(plan), plan
    plans = {bps: _plan(profile, own, bps, cable_m, chip) for bps, own in by_rate.items()}
    tables: dict[str, dict[str, Any]] = {}
    for plan in plans.values():
        for table, rows in switch_sonic.tables_of(plan).items():
            own_rows = tables.setdefault(table, {})
            for key, row in rows.items():
                own_rows[key] = {**own_rows.get(key, {}), **row}
    return json.dumps(tables, indent=4) + "\n", plans[fastest]


def _plan(profile: Profile, ports: list[str], bps: int, cable_m: int, chip: str) -> SwitchPlan:
    needed = bool(chip) and bool(profile.pfc.priorities)
    room = find_headroom(CHIPS[chip], bps, cable_m, MTU_BYTES + ETHERNET_BYTES) if needed else None
    return plan_switch(profile, ports, rate_bps=bps, cable_m=cable_m, mtu_bytes=MTU_BYTES, room=room, chip=chip)


def port_name(form: Format, label: str, bps: int, port_bps: int) -> str:
    """A port by its number as the system calls it: `7/2` of two is Ethernet52, swp7s1, Ethernet7/5 or Ethernet1/7/2.

    Raises:
        ConfigError: the port has fewer lanes than parts.
    """
    port, lane = _place((label, bps))
    lanes, parts = _LANES[port_bps >= _WIDE_BPS], port_bps // bps
    if lanes % parts:
        rule = f"would split a port of {lanes} lanes into {parts} parts"
        raise ConfigError(
            "cluster.nic_bps", bps, rule, "leave --switches out, and give `netlayer nic switch` the ports"
        )
    first = (lane - 1) * (lanes // parts)
    split = "/" in label
    return {
        "sonic": f"Ethernet{(port - 1) * lanes + first}",
        "nvue": f"swp{port}s{lane - 1}" if split else f"swp{port}",
        "arista": f"Ethernet{port}/{first + 1}",
        "cisco": f"Ethernet1/{port}/{lane}" if split else f"Ethernet1/{port}",
    }[form]


def _place(port: tuple[str, int]) -> tuple[int, int]:
    number, _, lane = port[0].partition("/")
    return int(number), int(lane or 1)
