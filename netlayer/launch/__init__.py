"""Start of ranks on this machine, their common end, and signals.

Names load on first use, so that importing one module of the room does not import the others.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from netlayer.launch.launcher import launch as launch
    from netlayer.launch.rank import RankContext as RankContext
    from netlayer.launch.rank import RankEnv as RankEnv
    from netlayer.launch.rank import detect as detect

_HOME = {
    "RankContext": "rank",
    "RankEnv": "rank",
    "detect": "rank",
    "launch": "launcher",
}
__all__ = ["RankContext", "RankEnv", "detect", "launch"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
