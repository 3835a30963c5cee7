"""Dispatch to the law that a flow is under: each call goes to the one that `flow.law` names.

A law sets a flow's `rate_bps` and `window_bytes`; `on_ack` has an ACK's mark, round trip and newly acknowledged bytes.

[Note: a law from a file] It is handed a copy of its flow, `VIEW`, from which those two alone are taken back: what it
writes elsewhere moves no packet. A window above what whoever started the flow allows in flight (NCCL's) is cut to that.
A rate below 1 bit/s, a window below 0 or another field that was changed is kept in `run` as `law_fault`, the flow goes
on as it was, and `congestion.simulation.simulate` ends the run with it.

Only the engine imports this module: its kernels are made around the law that `plugin` holds at that moment, and
`plugin.enter` refuses to enter one later.
"""

from __future__ import annotations

import numpy as np

from congestion.control import dcqcn, hybrid, nscc, plugin, swift
from congestion.control.registry import DCQCN, FIELD_FAULT, HYBRID, NSCC, PLUGIN, RATE_FAULT, SWIFT, WINDOW_FAULT
from congestion.kernels.jit import inlined, kernel


@inlined
def _show(s, f):  # type: ignore[no-untyped-def]
    """A law's view of flow `f`, brought up to date."""
    flow, view = s.flow[f], s.law_view[f]
    # Field by field and not as a whole: the view has fewer fields, and numba copies records of one type alone.
    # Each call fills it anew, for the engine has moved the flow since.
    view.rate_bps, view.window_bytes, view.line_rate_bps = flow.rate_bps, flow.window_bytes, flow.line_rate_bps
    view.base_rtt_ps, view.start, view.resent, view.retries = flow.base_rtt_ps, flow.start, flow.resent, flow.retries
    view.next, view.unacked, view.sent_to, view.num_packets = flow.next, flow.unacked, flow.sent_to, flow.num_packets
    view.num_links, view.src, view.dst = flow.num_links, flow.src, flow.dst
    return view


@kernel
def _take_back(s, f):  # type: ignore[no-untyped-def]
    """Take back what a law set, if a law may set it."""
    flow, view, run = s.flow[f], s.law_view[f], s.run[0]
    # Numbers, for a kernel cannot raise: `simulate` turns them into one line after the window.
    fault, value = 0, np.int64(0)
    if view.rate_bps < 1:
        fault, value = RATE_FAULT, view.rate_bps
    elif view.window_bytes < 0:
        fault, value = WINDOW_FAULT, view.window_bytes
    # Laws read these. One that was written is a law that would end or speed up its flow by itself.
    elif (
        view.line_rate_bps != flow.line_rate_bps
        or view.base_rtt_ps != flow.base_rtt_ps
        or view.start != flow.start
        or view.resent != flow.resent
        or view.retries != flow.retries
        or view.next != flow.next
        or view.unacked != flow.unacked
        or view.sent_to != flow.sent_to
        or view.num_packets != flow.num_packets
        or view.num_links != flow.num_links
        or view.src != flow.src
        or view.dst != flow.dst
    ):
        fault = FIELD_FAULT
    if fault:
        run.law_fault, run.law_fault_flow, run.law_fault_value = fault, np.int64(f), value
        return
    # The rate may be above the line's: the port is what sends then.
    flow.rate_bps = view.rate_bps
    flow.window_bytes = min(view.window_bytes, run.most_window_bytes)


# Without a law from a file its calls are compiled to nothing.
if plugin.law is None:

    @kernel
    def _its_start(s, f):  # type: ignore[no-untyped-def]
        pass

    @kernel
    def _its_advance(s, f, now):  # type: ignore[no-untyped-def]
        pass

    @kernel
    def _its_on_ack(s, f, now, marked, rtt_ps, acked_bytes):  # type: ignore[no-untyped-def]
        pass

    _its_on_loss = _its_advance
else:
    # As globals, which numba compiles in as constants; an attribute of a module would be looked up.
    _start, _advance = plugin.law.start, plugin.law.advance
    _on_ack, _on_loss = plugin.law.on_ack, plugin.law.on_loss

    @kernel
    def _its_start(s, f):  # type: ignore[no-untyped-def]
        _start(s.plugin[s.flow[f].tuned], s.plugin_flow[f], _show(s, f))
        _take_back(s, f)

    @kernel
    def _its_advance(s, f, now):  # type: ignore[no-untyped-def]
        _advance(s.plugin[s.flow[f].tuned], s.plugin_flow[f], _show(s, f), now)
        _take_back(s, f)

    @kernel
    def _its_on_ack(s, f, now, marked, rtt_ps, acked_bytes):  # type: ignore[no-untyped-def]
        _on_ack(s.plugin[s.flow[f].tuned], s.plugin_flow[f], _show(s, f), now, marked, rtt_ps, acked_bytes)
        _take_back(s, f)

    @kernel
    def _its_on_loss(s, f, now):  # type: ignore[no-untyped-def]
        _on_loss(s.plugin[s.flow[f].tuned], s.plugin_flow[f], _show(s, f), now)
        _take_back(s, f)


@inlined
def start(s, f):  # type: ignore[no-untyped-def]
    """Flow `f` is about to send its first packet."""
    flow = s.flow[f]
    law = flow.law
    # What NCCL, or none, allows in flight; a law without windows leaves it so.
    flow.window_bytes = s.run[0].most_window_bytes
    if law == DCQCN:
        dcqcn.start(s.dcqcn[flow.tuned], s.dcqcn_flow[f], flow)
    elif law == SWIFT:
        swift.start(s.swift[flow.tuned], s.swift_flow[f], flow)
    elif law == NSCC:
        nscc.start(s.nscc[flow.tuned], s.nscc_flow[f], flow)
    elif law == HYBRID:
        hybrid.start(s.hybrid[flow.tuned], s.hybrid_flow[f], flow)
    elif law == PLUGIN:
        _its_start(s, f)


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
    elif law == PLUGIN:
        _its_advance(s, f, now)


@inlined
def on_ack(s, f, now, marked, rtt_ps, acked_bytes):  # type: ignore[no-untyped-def]
    """Call the flow's law for an ACK of `acked_bytes` (0: a duplicate) after `rtt_ps`."""
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
    elif law == PLUGIN:
        _its_on_ack(s, f, now, marked, rtt_ps, acked_bytes)


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
    elif law == PLUGIN:
        _its_on_loss(s, f, now)
