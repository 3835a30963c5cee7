"""ECMP: hash functions, routes of flows, the load on links, and collisions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from netlayer import lazy_names

if TYPE_CHECKING:
    from topology.ecmp.compare import compare_split as compare_split
    from topology.ecmp.compare import split_by_load as split_by_load
    from topology.ecmp.graph_routing import Routes as Routes
    from topology.ecmp.graph_routing import by_ecmp as by_ecmp
    from topology.ecmp.hashing import ROCE_V2_PORT as ROCE_V2_PORT
    from topology.ecmp.hashing import Ecmp as Ecmp
    from topology.ecmp.hashing import HashName as HashName
    from topology.ecmp.hashing import Headers as Headers
    from topology.ecmp.load import place as place
    from topology.ecmp.routing import NO_LINK as NO_LINK
    from topology.ecmp.routing import route as route

__all__ = [
    "NO_LINK",
    "ROCE_V2_PORT",
    "Ecmp",
    "HashName",
    "Headers",
    "Routes",
    "by_ecmp",
    "compare_split",
    "place",
    "route",
    "split_by_load",
]

__getattr__ = lazy_names(
    __name__,
    {
        "NO_LINK": ".routing",
        "ROCE_V2_PORT": ".hashing",
        "Ecmp": ".hashing",
        "HashName": ".hashing",
        "Headers": ".hashing",
        "Routes": ".graph_routing",
        "by_ecmp": ".graph_routing",
        "compare_split": ".compare",
        "place": ".load",
        "route": ".routing",
        "split_by_load": ".compare",
    },
)
