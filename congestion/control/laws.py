"""Which law a run is under: each call goes to the one that `run.law` names."""

from __future__ import annotations

from congestion.control import dcqcn
from congestion.jit import inlined

NONE, DCQCN = 0, 1


@inlined
def advance(s, f, now):  # type: ignore[no-untyped-def]
    """Let the timers of flow `f` that are due by `now` fire."""
    if s.run[0].law == DCQCN:
        dcqcn.advance(s.dcqcn[0], s.dcqcn_flow[f], s.flow[f], now)


@inlined
def on_cnp(s, f, now):  # type: ignore[no-untyped-def]
    if s.run[0].law == DCQCN:
        dcqcn.on_cnp(s.dcqcn[0], s.dcqcn_flow[f], s.flow[f], now)
