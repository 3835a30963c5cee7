"""Collectives of a few KiB between the GPUs of one host, by a tuned table of paths.

Names load on first use, so that importing one module of the room does not import the others.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collectives.small.messages import SmallCollectives as SmallCollectives
    from collectives.small.table import TuningTable as TuningTable
    from collectives.small.tuner import tune as tune

_HOME = {
    "SmallCollectives": "messages",
    "TuningTable": "table",
    "tune": "tuner",
}
__all__ = ["SmallCollectives", "TuningTable", "tune"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
