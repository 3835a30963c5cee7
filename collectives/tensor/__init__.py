"""Tensor-parallel linears, their exchanges, and products by measured algorithms.

Names load on first use, so that importing one module of the room does not import the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from netlayer import lazy_names

if TYPE_CHECKING:
    from collectives.tensor.exchange import TensorExchange as TensorExchange
    from collectives.tensor.exchange import open_exchange as open_exchange
    from collectives.tensor.linear import ColumnParallelLinear as ColumnParallelLinear
    from collectives.tensor.linear import RowParallelLinear as RowParallelLinear

__all__ = ["ColumnParallelLinear", "RowParallelLinear", "TensorExchange", "open_exchange"]

__getattr__ = lazy_names(
    __name__,
    {
        "ColumnParallelLinear": ".linear",
        "RowParallelLinear": ".linear",
        "TensorExchange": ".exchange",
        "open_exchange": ".exchange",
    },
)
