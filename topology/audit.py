"""What a design holds and needs: ports used and left, cables, optics, hops, bisection, growth, and cost.

Everything follows from the counts of `design`; nothing here needs the links. Cables as in MegaScale (NSDI'24, 3.6):
active optical cables from a ToR to NICs (their optics are part of them), fibre with one optic an end between switches.
Left out: power, space, spares and management network.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np

from netlayer.config import ClusterConfig
from netlayer.errors import ConfigError
from topology.clos import Clos
from topology.plant import Plant

Rows = list[dict[str, Any]]


@dataclass(frozen=True)
class Prices:
    """Price of one piece; `nic_cable` is the cable at a ToR port (all its NIC ends), `fibre` one without optics."""

    switch: float = 0.0
    nic: float = 0.0
    nic_cable: float = 0.0
    fibre: float = 0.0
    optic: float = 0.0
    currency: str = "USD"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "currency":
                if not isinstance(value, str) or not value.isalpha():
                    raise ConfigError("prices.currency", value, "is no currency", "write letters, such as USD")
            elif isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
                raise ConfigError(f"prices.{field.name}", value, "is no price", "write a number of 0 or more")


def load_prices(path: Path) -> Prices:
    """Prices from a TOML file with one table `[prices]`.

    Raises:
        ConfigError: the file cannot be read, or a key or value in it is not a price of ours.
    """
    known = [field.name for field in fields(Prices)]
    try:
        tree = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as exc:
        raise ConfigError("--prices", path, f"cannot be read ({exc.strerror})", "give a TOML file") from exc
    except ValueError as exc:
        raise ConfigError("--prices", path, f"is not TOML ({exc})", "mend that line") from exc
    table = tree.get("prices")
    if not isinstance(table, dict) or len(tree) != 1:
        raise ConfigError("--prices", path, "must hold one table [prices]", f"with keys of {', '.join(known)}")
    for key in table:
        if key not in known:
            raise ConfigError(f"prices.{key}", None, "unknown key", f"known keys here: {', '.join(known)}")
    return Prices(**table)


def audit(plant: Plant, prices: Prices | None = None) -> Rows:
    """Rows for a record, `table` in front: `ports` a level, `parts` to buy, `hops` between NICs, one `limits`."""
    return [
        *({"table": "ports", **row} for row in port_rows(plant)),
        *({"table": "parts", **row} for row in part_rows(plant, prices)),
        *({"table": "hops", **row} for row in hop_rows(plant)),
        {"table": "limits", **limits(plant)},
    ]


def port_rows(plant: Plant) -> Rows:
    """Per level: switches, ports they have, ports with a cable facing down and up, ports left."""
    rows = []
    for level, switches, down, up in zip(("tor", "spine", "core"), *_ports(plant), strict=True):
        if switches:
            total = switches * plant.cluster.switch_radix
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


def part_rows(plant: Plant, prices: Prices | None = None) -> Rows:
    """What to buy: item, count, and where prices are given unit price and cost, with a last row for all."""
    switches, down, up = _ports(plant)
    fibres = up[0] + up[1]
    counts = {
        "switch": sum(switches),
        "nic": plant.num_nics,
        "nic_cable": down[0],
        "fibre": fibres,
        "optic": 2 * fibres,
    }
    rows: Rows = [{"item": item, "count": count} for item, count in counts.items()]
    if prices is None:
        return rows
    for row in rows:
        row["unit_price"] = float(getattr(prices, row["item"]))
        row["cost"] = row["count"] * row["unit_price"]
    total = sum(row["cost"] for row in rows)
    gpus = plant.cluster.num_gpus
    return [*rows, {"item": f"all, {prices.currency}", "count": gpus, "unit_price": total / gpus, "cost": total}]


def hop_rows(plant: Plant) -> Rows:
    """How many ordered pairs of NICs of different servers stand how many links apart; hops 0: no path but NVLink."""
    pairs = dict.fromkeys((2, 4, 6), 0)
    for part in plant.parts:
        for hops, count in _pairs_by_hops(part).items():
            pairs[hops] += count
    servers, nics = plant.cluster.servers, plant.cluster.nics_per_server
    total = servers * (servers - 1) * nics**2
    inside = {hops: count for hops, count in pairs.items() if count}
    rest = total - sum(inside.values())
    if rest:
        inside = {0: rest, **inside}
    return [{"hops": hops, "pairs": count, "share": count / total} for hops, count in inside.items()]


def limits(plant: Plant) -> dict[str, Any]:
    """The whole in one row: size, bisection, oversubscription, and how far the design can grow."""
    design, cluster = plant.parts[0].design, plant.cluster
    bisection = sum(part.bisection_bps for part in plant.parts)
    pods = cluster.switch_radix // design.links_per_spine_core if design.links_per_spine_core else 1
    pod_sets = _most_sets_in_a_pod(plant)
    return {
        "variant": plant.variant,
        "servers": cluster.servers,
        "nics": plant.num_nics,
        "bisection_bps": bisection,
        "bisection_share": bisection / (plant.num_nics * cluster.nic_bps / 2),
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


def _ports(plant: Plant) -> tuple[list[int], list[int], list[int]]:
    """(switches, ports facing down, ports facing up) with a cable, of ToRs, spines and cores."""
    design, parts = plant.parts[0].design, len(plant.parts)
    switches = [design.num_tors, design.num_spines, design.num_cores]
    nics = design.nics_per_server // design.rails
    under = np.bincount(np.arange(design.num_servers) // design.servers_per_tor_set) * nics
    tor_down = int(np.ceil(under / design.lanes_per_port).sum()) * design.rails
    down = [tor_down, design.num_spines * design.spine_ports_down, design.num_cores * design.core_ports]
    up = [design.num_tors * design.tor_ports_up, design.num_spines * design.spine_ports_up, 0]
    return tuple([count * parts for count in counts] for counts in (switches, down, up))  # type: ignore[return-value]


def _pairs_by_hops(part: Clos) -> dict[int, int]:
    """Ordered pairs of NICs of different servers that stand 2, 4 or 6 links apart."""
    design = part.design
    tor = part.tor_of(np.arange(design.num_nics))
    under_tor = np.bincount(tor, minlength=design.num_tors)
    in_pod = np.bincount(part.pod_of(tor), minlength=design.num_pods)
    same_rail = design.nics_per_server // design.rails
    # NICs of one server stand under one ToR where they share a rail, else in one pod; those pairs use NVLink.
    tor_pairs = int((under_tor**2).sum()) - design.num_nics * same_rail
    pod_pairs = int((in_pod**2).sum()) - int((under_tor**2).sum())
    pod_pairs -= design.num_nics * (design.nics_per_server - same_rail)
    return {2: tor_pairs, 4: pod_pairs, 6: design.num_nics**2 - int((in_pod**2).sum())}


def _most_sets_in_a_pod(plant: Plant) -> int:
    """ToR sets that a pod has room for with its spines as wired."""
    design, cluster = plant.parts[0].design, plant.cluster
    budget = cluster.switch_radix if cluster.tiers == 2 else max(design.spine_ports_down, cluster.switch_radix // 2)
    ports = max(design.links_per_tor_spine // design.uplink_lanes, 1)
    return max(budget // (ports * design.rails), 1)
