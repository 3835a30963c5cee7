"""DCQCN as ns-3's HPCC simulator runs it (NIC-vendor flavour), a law over one flow's row of integers and its alpha.

No CNP interval: each ACK of a marked packet carries the notice. The first one sets alpha to 1 and starts the timers of
alpha and of the cut; it does not cut by itself. Timers are advanced when the flow is next looked at, in the order of
their times, ties alpha, rise, cut. Left out: the byte counter (Zhu et al., Congestion Control for Large-Scale RDMA
Deployments, SIGCOMM 2015, section 5), which this flavour does not have.
"""

from __future__ import annotations

import numpy as np

from congestion.jit import inlined, kernel

_NS = 1_000
_NEVER = 2**62

# Of a run: times in ps, rates in bit/s.
PARAMETERS = np.dtype(
    [
        ("g", "f8"),
        ("alpha_gap", "i8"),
        ("cut_gap", "i8"),
        ("rise_gap", "i8"),
        ("fast_steps", "i8"),
        ("rai_bps", "i8"),
        ("rhai_bps", "i8"),
        ("min_rate_bps", "i8"),
        ("clamp", "i8"),
    ]
)
# Of a flow.
STATE = np.dtype(
    [
        ("due", "i8"),  # the soonest of the three timers
        ("alpha_at", "i8"),
        ("cut_at", "i8"),
        ("rise_at", "i8"),
        ("target_bps", "i8"),
        ("alpha", "f8"),
        ("stage", "i4"),
        ("seen_cnp", "u1"),
        ("alpha_cnp", "u1"),
        ("cut_cnp", "u1"),
    ],
    align=True,
)


@kernel
def on_cnp(p, own, flow, now):  # type: ignore[no-untyped-def]
    """A congestion notice at `now` ps."""
    advance(p, own, flow, now)
    own.cut_cnp = 1
    if own.seen_cnp:
        own.alpha_cnp = 1
        return
    own.seen_cnp = 1
    own.alpha = 1.0
    own.target_bps = flow.rate_bps
    own.alpha_at = now + p.alpha_gap
    own.cut_at = now + p.cut_gap + _NS  # so that a cut comes behind an alpha of the same moment
    own.due = min(own.alpha_at, own.cut_at)


@inlined
def advance(p, own, flow, now):  # type: ignore[no-untyped-def]
    """Let every timer that is due by `now` fire; the flow's rate is then in `rate_bps`."""
    if own.due <= now:
        _fire(p, own, flow, now)


@kernel
def _fire(p, own, flow, now):  # type: ignore[no-untyped-def]
    while own.due <= now:
        due = own.due
        if own.alpha_at == due:
            own.alpha = (1.0 - p.g) * own.alpha + (p.g if own.alpha_cnp else 0.0)
            own.alpha_cnp = 0
            own.alpha_at = due + p.alpha_gap
        elif own.rise_at == due:
            _rise(p, own, flow)
            own.rise_at = due + p.rise_gap
        else:
            own.cut_at = due + p.cut_gap
            if own.cut_cnp:
                _cut(p, own, flow)
                own.rise_at = due + p.rise_gap
        own.due = min(own.alpha_at, own.rise_at, own.cut_at)


@kernel
def _cut(p, own, flow):  # type: ignore[no-untyped-def]
    rate = flow.rate_bps
    if p.clamp or own.stage != 0:
        own.target_bps = rate
    flow.rate_bps = max(p.min_rate_bps, int(rate * (1.0 - own.alpha / 2.0)))
    own.stage = 0
    own.cut_cnp = 0


@kernel
def _rise(p, own, flow):  # type: ignore[no-untyped-def]
    if own.stage >= p.fast_steps:
        step = p.rai_bps if own.stage == p.fast_steps else p.rhai_bps
        own.target_bps = min(flow.line_rate_bps, own.target_bps + step)
    flow.rate_bps = flow.rate_bps // 2 + own.target_bps // 2
    own.stage += 1
