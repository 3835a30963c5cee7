"""DCQCN as ns-3's HPCC simulator runs it (NIC-vendor flavour), a law over one flow's row of integers and its alpha.

The first notice sets alpha to 1 and starts the timers of alpha and of the cut; it does not cut by itself. Timers are
advanced when the flow is next looked at, in the order of their times, ties alpha, rise, cut. The byte counter is the
paper's (Zhu et al., Congestion Control for Large-Scale RDMA Deployments, SIGCOMM 2015, section 5), which this flavour
does not have; it is off unless asked for. Not covered: any reaction to a loss, as there.
"""

from __future__ import annotations

import numpy as np

from congestion.control.rows import PS_PER_US, Rows, row_of
from congestion.kernels.jit import inlined, kernel
from congestion.simulation.settings import DcqcnSettings, Settings

_NS = 1_000
_NEVER = 2**62
_REFERENCE_BPS = 200_000_000_000  # increases are given for a NIC of this rate

# Of a run: times in ps, rates in bit/s.
PARAMETERS = np.dtype(
    [
        ("g", "f8"),
        ("alpha_update_period", "i8"),
        ("rate_reduce_period", "i8"),
        ("rate_increase_period", "i8"),
        ("byte_gap", "i8"),
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
        ("bytes", "i8"),  # since the byte counter's last rise
        ("stage", "i4"),
        ("byte_stage", "i4"),
        ("seen_cnp", "u1"),
        ("alpha_cnp", "u1"),
        ("cut_cnp", "u1"),
    ],
    align=True,
)


def parameters(section: DcqcnSettings, host_bps: int, settings: Settings) -> Rows:  # noqa: ARG001  (every law's)
    """The law's numbers for NICs of `host_bps`; shape (1,)."""
    return row_of(
        PARAMETERS,
        g=section.g,
        alpha_update_period=round(section.alpha_us * PS_PER_US),
        rate_reduce_period=round(section.decrease_us * PS_PER_US),
        rate_increase_period=round(section.increase_us * PS_PER_US),
        byte_gap=section.byte_counter_bytes,
        fast_steps=section.fast_recovery_steps,
        rai_bps=section.rai_bps * host_bps // _REFERENCE_BPS,
        rhai_bps=section.rhai_bps * host_bps // _REFERENCE_BPS,
        min_rate_bps=section.min_rate_bps,
        clamp=section.clamp_target,
    )


@inlined
def start(p, own, flow):  # type: ignore[no-untyped-def]  # noqa: ARG001  (laws are called alike)
    """Start at line rate, no timer running."""
    own.due = own.alpha_at = own.cut_at = own.rise_at = _NEVER
    own.target_bps = flow.rate_bps = flow.line_rate_bps
    own.alpha = 1.0


@kernel
def on_ack(p, own, flow, now, marked, rtt_ps, acked_bytes):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """An ACK at `now` ps; `marked` is a congestion notice."""
    if marked:
        on_cnp(p, own, flow, now)
    if p.byte_gap and own.rise_at < _NEVER:
        advance(p, own, flow, now)
        own.bytes += acked_bytes  # the paper counts bytes sent: these come a round trip later
        while own.bytes >= p.byte_gap:
            own.bytes -= p.byte_gap
            _rise(p, own, flow)
            own.byte_stage += 1


@inlined
def on_loss(p, own, flow, now):  # type: ignore[no-untyped-def]
    """Nothing: under PFC a loss is no sign of congestion."""


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
    own.alpha_at = now + p.alpha_update_period
    own.cut_at = now + p.rate_reduce_period + _NS  # so that a cut comes behind an alpha of the same moment
    own.due = min(own.alpha_at, own.cut_at)


@inlined
def advance(p, own, flow, now):  # type: ignore[no-untyped-def]
    """Let every timer that is due by `now` fire; the flow's rate is then in `rate_bps`."""
    if own.due <= now:
        _fire(p, own, flow, now)


@kernel
def _fire(p, own, flow, now):  # type: ignore[no-untyped-def]
    """Run the timers that are due by `now`, in their order: the update of alpha, an increase, a cut after a CNP."""
    while own.due <= now:
        due = own.due
        if own.alpha_at == due:
            own.alpha = (1.0 - p.g) * own.alpha + (p.g if own.alpha_cnp else 0.0)
            own.alpha_cnp = 0
            own.alpha_at = due + p.alpha_update_period
        elif own.rise_at == due:
            _rise(p, own, flow)
            own.stage += 1
            own.rise_at = due + p.rate_increase_period
        else:
            own.cut_at = due + p.rate_reduce_period
            if own.cut_cnp:
                _cut(p, own, flow)
                own.rise_at = due + p.rate_increase_period
        own.due = min(own.alpha_at, own.rise_at, own.cut_at)


@kernel
def _cut(p, own, flow):  # type: ignore[no-untyped-def]
    rate = flow.rate_bps
    if p.clamp or own.stage != 0 or own.byte_stage != 0:
        own.target_bps = rate
    flow.rate_bps = max(p.min_rate_bps, int(rate * (1.0 - own.alpha / 2.0)))
    own.stage = 0
    own.byte_stage = 0
    own.bytes = 0
    own.cut_cnp = 0


@kernel
def _rise(p, own, flow):  # type: ignore[no-untyped-def]
    slower = min(own.stage, own.byte_stage) if p.byte_gap else own.stage
    if max(own.stage, own.byte_stage) >= p.fast_steps:
        step = p.rhai_bps if slower > p.fast_steps else p.rai_bps
        own.target_bps = min(flow.line_rate_bps, own.target_bps + step)
    flow.rate_bps = flow.rate_bps // 2 + own.target_bps // 2
