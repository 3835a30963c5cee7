"""Rates of flows that share links."""

from __future__ import annotations

from typing import TYPE_CHECKING

from netlayer import lazy_names

if TYPE_CHECKING:
    from topology.rates.contention import uncongested as uncongested
    from topology.rates.max_min import completion_s as completion_s

__all__ = [
    "completion_s",
    "uncongested",
]

__getattr__ = lazy_names(
    __name__,
    {
        "completion_s": ".max_min",
        "uncongested": ".contention",
    },
)
