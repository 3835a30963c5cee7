"""Watchdog of collectives, its diagnosis, and the recorder of what they cost.

Names load on first use, so that importing one module of the room does not import the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from netlayer import lazy_names

if TYPE_CHECKING:
    from collectives.watch.recorder import Recorder as Recorder
    from collectives.watch.watchdog import Watch as Watch

__all__ = ["Recorder", "Watch"]

__getattr__ = lazy_names(
    __name__,
    {
        "Recorder": ".recorder",
        "Watch": ".watchdog",
    },
)
