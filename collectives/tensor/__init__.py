"""Tensor-parallel linears, their exchanges, and products by measured algorithms.

Names load on first use, so that importing one module of the room does not import the others.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collectives.tensor.exchange import TensorExchange as TensorExchange
    from collectives.tensor.exchange import open_exchange as open_exchange
    from collectives.tensor.linear import ColumnParallelLinear as ColumnParallelLinear
    from collectives.tensor.linear import RowParallelLinear as RowParallelLinear

_HOME = {
    "ColumnParallelLinear": "linear",
    "RowParallelLinear": "linear",
    "TensorExchange": "exchange",
    "open_exchange": "exchange",
}
__all__ = ["ColumnParallelLinear", "RowParallelLinear", "TensorExchange", "open_exchange"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
