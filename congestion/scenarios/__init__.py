"""Traffic patterns by name, and the fabrics that they run on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from netlayer import lazy_names

if TYPE_CHECKING:
    from congestion.scenarios.fabric import FatTree as FatTree
    from congestion.scenarios.fabric import build_fabric as build_fabric
    from congestion.scenarios.patterns import Permutation as Permutation
    from congestion.scenarios.patterns import permutation as permutation

__all__ = [
    "FatTree",
    "Permutation",
    "build_fabric",
    "permutation",
]

__getattr__ = lazy_names(
    __name__,
    {
        "FatTree": ".fabric",
        "Permutation": ".patterns",
        "build_fabric": ".fabric",
        "permutation": ".patterns",
    },
)
