"""Fabrics as arrays: CLOS networks and graphs, their design, cables, addresses and pictures."""

from __future__ import annotations

from typing import TYPE_CHECKING

from netlayer import lazy_names

if TYPE_CHECKING:
    from topology.fabric.cable_plan import CablePlan as CablePlan
    from topology.fabric.cable_plan import nic_name as nic_name
    from topology.fabric.clos import Clos as Clos
    from topology.fabric.graph import Graph as Graph
    from topology.fabric.wires import Wires as Wires

__all__ = [
    "CablePlan",
    "Clos",
    "Graph",
    "Wires",
    "nic_name",
]

__getattr__ = lazy_names(
    __name__,
    {
        "CablePlan": ".cable_plan",
        "Clos": ".clos",
        "Graph": ".graph",
        "Wires": ".wires",
        "nic_name": ".cable_plan",
    },
)
