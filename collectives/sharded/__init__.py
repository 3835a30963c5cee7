"""Sharded data parallel: buckets, gathers, reductions, optimiser steps and states.

Names load on first use, so that importing one module of the room does not import the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from netlayer import lazy_names

if TYPE_CHECKING:
    from collectives.sharded.data_parallel import ShardedDataParallel as ShardedDataParallel

__all__ = ["ShardedDataParallel"]

__getattr__ = lazy_names(
    __name__,
    {
        "ShardedDataParallel": ".data_parallel",
    },
)
