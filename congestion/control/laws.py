"""Which law a flow is under: each call goes to the one that `flow.law` names.

A law is a module of this package: PARAMETERS (a row a class of traffic), STATE (a row a flow), `parameters`, and the
four calls that stand here, `on_ack` with an ACK's mark, round trip and newly acknowledged bytes. It sets a flow's
`rate_bps` and `window_bytes`.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType

import numpy as np

from congestion.control import dcqcn, entered, hybrid, nscc, swift
from congestion.control.rows import Rows
from congestion.jit import inlined, kernel
from congestion.settings import Settings

NONE, DCQCN, SWIFT, NSCC, HYBRID, ENTERED = range(6)
MODULES: dict[str, ModuleType | None] = {
    "none": None,
    "dcqcn": dcqcn,
    "swift": swift,
    "nscc": nscc,
    "hybrid": hybrid,
}
"""By name, in the order of the numbers; behind them stands the law that was entered."""

_OF_NONE = np.dtype([("nothing", "i8")])


def number_of(law: str) -> int:
    """
    Raises:
        KeyError: no law has this name.
    """
    if law in MODULES:
        return list(MODULES).index(law)
    if entered.law is None or law != entered.name:
        raise KeyError(law)
    return ENTERED


def tables(in_use: Sequence[str], num_flows: int, host_bps: int, settings: Settings) -> dict[str, Rows]:
    """Of each law its parameters, and its rows of flows: none but for the laws in use."""
    made = {}
    by_class = [settings.of_class(number) for number in range(settings.num_classes)]
    for name, module in MODULES.items():
        if module is not None:
            made[name] = np.concatenate([module.parameters(getattr(its, name), host_bps, its) for its in by_class])
            made[f"{name}_flow"] = np.zeros(num_flows if name in in_use else 0, dtype=module.STATE)
    its, its_state = np.zeros(settings.num_classes, dtype=_OF_NONE), _OF_NONE
    if entered.law is not None:
        its, its_state = np.concatenate([_entered(one, host_bps) for one in by_class]), entered.law.STATE
    made["entered"] = its
    made["entered_flow"] = np.zeros(
        num_flows if entered.name in in_use and entered.law is not None else 0, dtype=its_state
    )
    return made


def _entered(settings: Settings, host_bps: int) -> Rows:
    law = entered.law
    assert law is not None
    section = law.Section(**settings.entered) if hasattr(law, "Section") else None
    made: Rows = law.parameters(section, host_bps, settings)
    return made


def wants_rtt(law: str, settings: Settings) -> bool:
    """Whether a law is told round trips: one from a file always is."""
    return (law == "hybrid" and settings.hybrid.use_rtt) or law not in ("none", "dcqcn", "hybrid")


if entered.law is None:

    @kernel
    def _no_start(p, own, flow):  # type: ignore[no-untyped-def]
        pass

    @kernel
    def _no_call(p, own, flow, now):  # type: ignore[no-untyped-def]
        pass

    @kernel
    def _no_ack(p, own, flow, now, marked, rtt_ps, acked_bytes):  # type: ignore[no-untyped-def]
        pass

    _its_start, _its_advance, _its_on_ack, _its_on_loss = _no_start, _no_call, _no_ack, _no_call
else:
    _its_start, _its_advance = entered.law.start, entered.law.advance
    _its_on_ack, _its_on_loss = entered.law.on_ack, entered.law.on_loss


@inlined
def start(s, f):  # type: ignore[no-untyped-def]
    """Flow `f` is about to send its first packet."""
    flow = s.flow[f]
    law = flow.law
    flow.window_bytes = s.run[0].most_window_bytes
    if law == DCQCN:
        dcqcn.start(s.dcqcn[flow.tuned], s.dcqcn_flow[f], flow)
    elif law == SWIFT:
        swift.start(s.swift[flow.tuned], s.swift_flow[f], flow)
    elif law == NSCC:
        nscc.start(s.nscc[flow.tuned], s.nscc_flow[f], flow)
    elif law == HYBRID:
        hybrid.start(s.hybrid[flow.tuned], s.hybrid_flow[f], flow)
    elif law == ENTERED:
        _its_start(s.entered[flow.tuned], s.entered_flow[f], flow)


@inlined
def advance(s, f, now):  # type: ignore[no-untyped-def]
    """Let the timers of flow `f` that are due by `now` fire."""
    flow = s.flow[f]
    law = flow.law
    if law == DCQCN:
        dcqcn.advance(s.dcqcn[flow.tuned], s.dcqcn_flow[f], flow, now)
    elif law == SWIFT:
        swift.advance(s.swift[flow.tuned], s.swift_flow[f], flow, now)
    elif law == NSCC:
        nscc.advance(s.nscc[flow.tuned], s.nscc_flow[f], flow, now)
    elif law == HYBRID:
        hybrid.advance(s.hybrid[flow.tuned], s.hybrid_flow[f], flow, now)
    elif law == ENTERED:
        _its_advance(s.entered[flow.tuned], s.entered_flow[f], flow, now)


@inlined
def on_ack(s, f, now, marked, rtt_ps, acked_bytes):  # type: ignore[no-untyped-def]
    flow = s.flow[f]
    law = flow.law
    if law == DCQCN:
        dcqcn.on_ack(s.dcqcn[flow.tuned], s.dcqcn_flow[f], flow, now, marked, rtt_ps, acked_bytes)
    elif law == SWIFT:
        swift.on_ack(s.swift[flow.tuned], s.swift_flow[f], flow, now, marked, rtt_ps, acked_bytes)
    elif law == NSCC:
        nscc.on_ack(s.nscc[flow.tuned], s.nscc_flow[f], flow, now, marked, rtt_ps, acked_bytes)
    elif law == HYBRID:
        hybrid.on_ack(s.hybrid[flow.tuned], s.hybrid_flow[f], flow, now, marked, rtt_ps, acked_bytes)
    elif law == ENTERED:
        _its_on_ack(s.entered[flow.tuned], s.entered_flow[f], flow, now, marked, rtt_ps, acked_bytes)


@inlined
def on_loss(s, f, now):  # type: ignore[no-untyped-def]
    """A NACK, or the retransmit timer of flow `f` ran out."""
    flow = s.flow[f]
    law = flow.law
    if law == DCQCN:
        dcqcn.on_loss(s.dcqcn[flow.tuned], s.dcqcn_flow[f], flow, now)
    elif law == SWIFT:
        swift.on_loss(s.swift[flow.tuned], s.swift_flow[f], flow, now)
    elif law == NSCC:
        nscc.on_loss(s.nscc[flow.tuned], s.nscc_flow[f], flow, now)
    elif law == HYBRID:
        hybrid.on_loss(s.hybrid[flow.tuned], s.hybrid_flow[f], flow, now)
    elif law == ENTERED:
        _its_on_loss(s.entered[flow.tuned], s.entered_flow[f], flow, now)
