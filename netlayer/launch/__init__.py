"""Start of ranks on this machine, their common end, and signals.

Names load on first use, so that importing one module of the room does not import the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from netlayer import lazy_names

if TYPE_CHECKING:
    from netlayer.launch.launcher import launch as launch
    from netlayer.launch.rank import RankContext as RankContext
    from netlayer.launch.rank import RankEnv as RankEnv
    from netlayer.launch.rank import detect as detect

__all__ = ["RankContext", "RankEnv", "detect", "launch"]

__getattr__ = lazy_names(
    __name__,
    {
        "RankContext": ".rank",
        "RankEnv": ".rank",
        "detect": ".rank",
        "launch": ".launcher",
    },
)
