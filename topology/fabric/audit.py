"""Audit of a design: ports used and left, cables, optics, hops, bisection, growth, and cost.

Everything follows from the counts of `design`; nothing here needs the links. Cables as in MegaScale (NSDI'24, 3.6):
active optical cables from a ToR to NICs (their optics are part of them), fibre with one optic an end between switches.
Not covered: power, space, spares and management network.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np

from netlayer.config.file import parse_toml
from netlayer.config.tree import ClusterConfig, PricesConfig, build_config
from netlayer.errors import ConfigError
from topology.fabric.cable_plan import CablePlan
from topology.fabric.clos import Clos

Rows = list[dict[str, Any]]


def load_prices(path: Path) -> PricesConfig:
    """Prices from a TOML file with one table `[prices]`: the keys of `[cluster.prices]`.

    Raises:
        ConfigError: the file cannot be read, or a key or value in it is not a price of ours.
    """
    try:
        tree = parse_toml(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError("--prices", path, f"cannot be read ({exc.strerror})", "give a TOML file") from exc
    except ValueError as exc:
        raise ConfigError("--prices", path, f"is not TOML ({exc})", "fix that line") from exc
    table = tree.get("prices")
    if not isinstance(table, dict) or len(tree) != 1:
        known = ", ".join(PricesConfig.model_fields)
        raise ConfigError("--prices", path, "must hold one table [prices]", f"with keys of {known}")
    return build_config({"cluster": {"prices": table}}).cluster.prices


def audit(cable_plan: CablePlan, prices: PricesConfig | None = None) -> Rows:
    """Rows for a record, `table` in front: `ports` a level, `parts` to buy, `hops` between NICs, one `limits`."""
    return [
        *({"table": "ports", **row} for row in port_rows(cable_plan)),
        *({"table": "parts", **row} for row in part_rows(cable_plan, prices)),
        *({"table": "hops", **row} for row in hop_rows(cable_plan)),
        {"table": "limits", **limits(cable_plan)},
    ]


def port_rows(cable_plan: CablePlan) -> Rows:
    """Per level: switches, ports they have, ports with a cable facing down and up, ports left."""
    rows = []
    for level, switches, down, up in zip(("tor", "spine", "core"), *_ports(cable_plan), strict=True):
        if switches:
            total = switches * cable_plan.cluster.switch_radix
            rows.append(
                {
                    "level": level,
                    "switches": switches,
                    "ports": total,
                    "used_down": down,
                    "used_up": up,
                    "left": total - down - up,
                    "used_share": (down + up) / total,
                }
            )
    return rows


def part_rows(cable_plan: CablePlan, prices: PricesConfig | None = None) -> Rows:
    """Return what to buy: item, count, and with prices also unit price and cost, None for an item without a price.

    A last row adds up what has a price, and names what has none; its unit price is a GPU's share.

    Args:
        cable_plan: the fabric.
        prices: in place of the cluster's own.
    """
    prices = prices or cable_plan.cluster.prices
    switches, down, up = _ports(cable_plan)
    fibres = up[0] + up[1]
    counts = {
        "switch": sum(switches),
        "nic": cable_plan.fabric.design.num_nics,
        "nic_cable": down[0],
        "fibre": fibres,
        "optic": 2 * fibres,
    }
    known: dict[str, float | None] = {item: getattr(prices, item) for item in counts}
    if all(price is None for price in known.values()):
        return [{"item": item, "count": count} for item, count in counts.items()]
    rows: Rows = [
        {"item": item, "count": count, "unit_price": price, "cost": None if price is None else count * price}
        for (item, count), price in zip(counts.items(), known.values(), strict=True)
    ]
    lacking = [item for item in counts if known[item] is None]
    total, gpus = sum(row["cost"] or 0.0 for row in rows), cable_plan.cluster.num_gpus
    item = f"all without {', '.join(lacking)}" if lacking else "all"
    whole = {"item": item, "count": gpus, "unit_price": total / gpus, "cost": total}
    return [*rows, whole | {"currency": prices.currency, "without": lacking}]


def hop_rows(cable_plan: CablePlan) -> Rows:
    """Count ordered pairs of NICs of different servers by the links between them; hops 0: no path but NVLink."""
    pairs = _pairs_by_hops(cable_plan.fabric)
    servers, nics = cable_plan.cluster.servers, cable_plan.cluster.nics_per_server
    total = servers * (servers - 1) * nics**2
    inside = {hops: count for hops, count in pairs.items() if count}
    rest = total - sum(inside.values())
    if rest:
        inside = {0: rest, **inside}
    return [{"hops": hops, "pairs": count, "share": count / total} for hops, count in inside.items()]


def limits(cable_plan: CablePlan) -> dict[str, Any]:
    """The whole in one row: size, bisection, oversubscription, and how far the design can grow."""
    design, cluster = cable_plan.fabric.design, cable_plan.cluster
    bisection = cable_plan.fabric.bisection_bps
    pods = cluster.switch_radix // design.links_per_spine_core if design.links_per_spine_core else 1
    pod_sets = _most_sets_in_a_pod(cable_plan)
    return {
        "variant": cable_plan.variant,
        "servers": cluster.servers,
        "nics": design.num_nics,
        "bisection_bps": bisection,
        "bisection_share": bisection / cable_plan.fabric.half_of_nics_bps,
        "uplink_over_nic": design.tor_uplink_bps / design.nic_bps,
        "max_servers_per_tor_set": max_servers_per_tor_set(cluster),
        "max_pods": pods,
        "max_servers": pods * pod_sets * cluster.servers_per_tor_set,
    }


def max_servers_per_tor_set(cluster: ClusterConfig) -> int:
    """Most servers under one set of ToRs at this oversubscription: 64 with the split of MegaScale (3.6).

    Ports down are filled with NICs, ports up carry the same rate divided by the oversubscription; both must be whole.
    """
    lanes = cluster.switch_port_bps // cluster.nic_bps
    nics = cluster.nics_per_server // cluster.rails
    best = 0
    for servers in range(1, cluster.switch_radix * lanes // nics + 1):
        down, up = math.ceil(servers * nics / lanes), servers * nics / lanes / cluster.oversubscription
        if round(up) >= 1 and math.isclose(up, round(up), rel_tol=1e-9) and down + round(up) <= cluster.switch_radix:
            best = servers
    return best


def _ports(cable_plan: CablePlan) -> tuple[list[int], list[int], list[int]]:
    """(switches, ports facing down, ports facing up) with a cable, of ToRs, spines and cores."""
    design = cable_plan.fabric.design
    switches = [design.num_tors, design.num_spines, design.num_cores]
    nics = design.nics_per_server // design.rails
    under = np.bincount(np.arange(design.num_servers) // design.servers_per_tor_set) * nics
    tor_down = int(np.ceil(under / design.lanes_per_port).sum()) * design.rails
    down = [tor_down, design.num_spines * design.spine_ports_down, design.num_cores * design.core_ports]
    up = [design.num_tors * design.tor_ports_up, design.num_spines * design.spine_ports_up, 0]
    return switches, down, up


def _pairs_by_hops(fabric: Clos) -> dict[int, int]:
    """Ordered pairs of NICs of different servers that stand 2, 4 or 6 links apart."""
    design = fabric.design
    nics = np.arange(design.num_nics)
    tor = fabric.tor_of(nics)
    places = (tor, fabric.pod_of(tor), fabric.network_of(nics))
    tors, pods, networks = (int((np.bincount(place) ** 2).sum()) for place in places)
    # NICs of one server stand under one ToR where they share a rail, else in one pod if any; those pairs use NVLink.
    same_rail = design.nics_per_server // design.rails
    same_network = design.nics_per_server // design.num_networks
    return {
        2: tors - design.num_nics * same_rail,
        4: pods - tors - design.num_nics * (same_network - same_rail),
        6: networks - pods,
    }


def _most_sets_in_a_pod(cable_plan: CablePlan) -> int:
    """ToR sets that a pod has room for with its spines as wired."""
    design, cluster = cable_plan.fabric.design, cable_plan.cluster
    budget = cluster.switch_radix if cluster.tiers == 2 else max(design.spine_ports_down, cluster.switch_radix // 2)
    ports = max(design.links_per_tor_spine // design.uplink_lanes, 1)
    rails = design.rails // design.num_networks  # whose ToRs share a spine
    return max(budget // (ports * rails), 1)
