"""Collectives of a few KiB between the GPUs of one host, by a tuned table of paths.

Names load on first use, so that importing one module of the room does not import the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from netlayer import lazy_names

if TYPE_CHECKING:
    from collectives.small.messages import SmallCollectives as SmallCollectives
    from collectives.small.table import TuningTable as TuningTable
    from collectives.small.tuner import tune as tune

__all__ = ["SmallCollectives", "TuningTable", "tune"]

__getattr__ = lazy_names(
    __name__,
    {
        "SmallCollectives": ".messages",
        "TuningTable": ".table",
        "tune": ".tuner",
    },
)
