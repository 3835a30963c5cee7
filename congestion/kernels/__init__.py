"""Compilation of kernels: how they are compiled, kept, and what they ask of the machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

from netlayer import lazy_names

if TYPE_CHECKING:
    from congestion.kernels.jit import entry as entry
    from congestion.kernels.jit import inlined as inlined
    from congestion.kernels.jit import kernel as kernel

__all__ = [
    "entry",
    "inlined",
    "kernel",
]

__getattr__ = lazy_names(
    __name__,
    {
        "entry": ".jit",
        "inlined": ".jit",
        "kernel": ".jit",
    },
)
