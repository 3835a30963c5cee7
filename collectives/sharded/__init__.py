"""Sharded data parallel: buckets, gathers, reductions, optimiser steps and states.

Names load on first use, so that importing one module of the room does not import the others.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collectives.sharded.data_parallel import ShardedDataParallel as ShardedDataParallel

_HOME = {
    "ShardedDataParallel": "data_parallel",
}
__all__ = ["ShardedDataParallel"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
