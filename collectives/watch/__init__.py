"""Watchdog of collectives, its diagnosis, and the recorder of what they cost.

Names load on first use, so that importing one module of the room does not import the others.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collectives.watch.recorder import Recorder as Recorder
    from collectives.watch.watchdog import Watch as Watch

_HOME = {
    "Recorder": "recorder",
    "Watch": "watchdog",
}
__all__ = ["Recorder", "Watch"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
