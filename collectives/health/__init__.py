"""Health checks of devices and of the links between them.

Names load on first use, so that importing one module of the room does not import the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from netlayer import lazy_names

if TYPE_CHECKING:
    from collectives.health.checks import HealthRow as HealthRow
    from collectives.health.checks import all_reduce as all_reduce
    from collectives.health.checks import all_to_all as all_to_all
    from collectives.health.checks import copy as copy
    from collectives.health.checks import gemm as gemm
    from collectives.health.checks import host_pauses as host_pauses
    from collectives.health.checks import pair_rounds as pair_rounds
    from collectives.health.checks import pairs as pairs

__all__ = ["HealthRow", "all_reduce", "all_to_all", "copy", "gemm", "host_pauses", "pair_rounds", "pairs"]

__getattr__ = lazy_names(
    __name__,
    {
        "HealthRow": ".checks",
        "all_reduce": ".checks",
        "all_to_all": ".checks",
        "copy": ".checks",
        "gemm": ".checks",
        "host_pauses": ".checks",
        "pair_rounds": ".checks",
        "pairs": ".checks",
    },
)
