"""The plan of UDP source ports as a person or a launcher applies it: the port of each queue pair of each rank."""

from __future__ import annotations

import ipaddress
from typing import TYPE_CHECKING, Any

import numpy as np

from netlayer.config.tree import ClusterConfig
from topology.ecmp.search import PortPlan
from topology.fabric.interface import Fabric, Ints
from topology.placement.strategies import Placement
from topology.traffic.job import Kind

if TYPE_CHECKING:
    import pandas as pd


def port_table(
    plan: PortPlan, fabric: Fabric, cluster: ClusterConfig | None, placement: Placement | None
) -> pd.DataFrame:
    """One row a queue pair: rank, server, device and address of both ends, bytes, its port now and planned.

    `ecmp --flows` reads it back, to check the plan.

    `src_rank` is the first rank that uses the NIC; where ranks share one, they follow it. Without a job it is -1.
    """
    import pandas as pd

    each = fabric.nics_per_server
    columns = plan.rows()
    table: dict[str, Any] = {}
    for end in ("src", "dst"):
        nic = columns[f"{end}_nic"]
        used, place = np.unique(nic, return_inverse=True)
        names = [fabric.nic_name(one) for one in used.tolist()]
        table |= {
            f"{end}_rank": _rank_of(nic, fabric, cluster, placement),
            f"{end}_server": nic // each,
            f"{end}_device": np.array(names, dtype=object)[place],
            f"{end}_ip": [str(ipaddress.IPv4Address(int(address))) for address in columns[f"{end}_ip"]],
        }
    return pd.DataFrame(
        {
            **table,
            "kind": [Kind(kind).name.lower() for kind in columns["kind"].tolist()],
            "qp": columns["qp"],
            "bytes": plan.flows.num_bytes,
            "udp_sport_before": columns["udp_sport_before"],
            "udp_sport": columns["udp_sport"],
        }
    )


def _rank_of(nic: Ints, fabric: Fabric, cluster: ClusterConfig | None, placement: Placement | None) -> Ints:
    """The first rank on each NIC; -1 where its server holds none."""
    if cluster is None or placement is None:
        return np.full(len(nic), -1, dtype=np.int64)
    server, local = np.divmod(nic, fabric.nics_per_server)
    slot_of = np.full(fabric.num_servers, -1, dtype=np.int64)
    slot_of[placement.server] = np.arange(len(placement.server))
    gpu = -(-local * cluster.gpus_per_server // fabric.nics_per_server)
    return np.where(slot_of[server] < 0, -1, slot_of[server] * cluster.gpus_per_server + gpu)
