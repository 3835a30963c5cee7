"""Exchange of keys and values among the ranks that have the parts of one sequence.

Names load on first use, so that importing one module of the room does not import the others.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from netlayer import lazy_names

if TYPE_CHECKING:
    from collectives.context.exchange import ContextExchange as ContextExchange
    from collectives.context.exchange import Gathered as Gathered
    from collectives.context.exchange import Scattered as Scattered

__all__ = ["ContextExchange", "Gathered", "Scattered"]

__getattr__ = lazy_names(
    __name__,
    {
        "ContextExchange": ".exchange",
        "Gathered": ".exchange",
        "Scattered": ".exchange",
    },
)
