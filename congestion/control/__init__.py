"""Control laws: pure state machines over a flow's row; time and feedback in, rate out."""

from __future__ import annotations

from typing import TYPE_CHECKING

from netlayer import lazy_names

if TYPE_CHECKING:
    from congestion.control.registry import DCQCN as DCQCN
    from congestion.control.registry import NONE as NONE

__all__ = [
    "DCQCN",
    "NONE",
]

__getattr__ = lazy_names(
    __name__,
    {
        "DCQCN": ".registry",
        "NONE": ".registry",
    },
)
