"""Queries of a window to a node before it runs."""

from __future__ import annotations

from congestion.engine.tables import NEVER
from congestion.kernels.jit import inlined


@inlined
def is_due(s, n, parity, end):  # type: ignore[no-untyped-def]
    """Whether anything happens at node `n` before `end`, by itself or by what was sent there in the window before."""
    return _hear(s, n, parity) < end


@inlined
def first_tx(s, n):  # type: ignore[no-untyped-def]
    """Return the first event of node `n`, by all that was sent there: before the first window, whose parity is 0."""
    return min(_hear(s, n, 0), _hear(s, n, 1))


@inlined
def _hear(s, n, parity):  # type: ignore[no-untyped-def]
    """Return when node `n` acts next, with the first arrival that its neighbours announced in the window before."""
    arrival = s.soon[parity * len(s.node) + n]
    if arrival < NEVER:
        s.soon[parity * len(s.node) + n] = NEVER
        s.next_time[n] = min(s.next_time[n], arrival)
    return s.next_time[n]
