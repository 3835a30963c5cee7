"""DCQCN as ns-3's HPCC simulator runs it (NIC-vendor flavour), a law over one flow's row of integers and its alpha.

No CNP interval: each ACK of a marked packet carries the notice. The first one sets alpha to 1 and starts the timers of
alpha and of the cut; it does not cut by itself. Timers are advanced when the flow is next looked at, in the order of
their times, ties alpha, rise, cut. Left out: the byte counter (Zhu et al., Congestion Control for Large-Scale RDMA
Deployments, SIGCOMM 2015, section 5), which this flavour does not have.
"""

from __future__ import annotations

import numba

from congestion.engine.columns import (
    ALPHA_AT,
    ALPHA_CNP,
    ALPHA_GAP,
    CLAMP,
    CUT_AT,
    CUT_CNP,
    CUT_GAP,
    FAST_STEPS,
    FLOW_RATE,
    LINE_RATE,
    MIN_RATE,
    NEVER,
    RAI,
    RHAI,
    RISE_AT,
    RISE_GAP,
    SEEN_CNP,
    STAGE,
    TARGET,
)

_NS = 1_000


@numba.njit
def on_cnp(c, g, flow, alpha, f, now):  # type: ignore[no-untyped-def]
    """A congestion notice for flow `f` at `now` ps."""
    advance(c, g, flow, alpha, f, now)
    flow[f, CUT_CNP] = 1
    if flow[f, SEEN_CNP]:
        flow[f, ALPHA_CNP] = 1
        return
    flow[f, SEEN_CNP] = 1
    alpha[f] = 1.0
    flow[f, TARGET] = flow[f, FLOW_RATE]
    flow[f, ALPHA_AT] = now + c[ALPHA_GAP]
    flow[f, CUT_AT] = now + c[CUT_GAP] + _NS  # so that a cut comes behind an alpha of the same moment


@numba.njit
def advance(c, g, flow, alpha, f, now):  # type: ignore[no-untyped-def]
    """Let every timer of flow `f` that is due by `now` fire; its rate is then in FLOW_RATE, bit/s."""
    while True:
        due = min(flow[f, ALPHA_AT], flow[f, RISE_AT], flow[f, CUT_AT])
        if due > now or due == NEVER:
            return
        if flow[f, ALPHA_AT] == due:
            alpha[f] = (1.0 - g) * alpha[f] + (g if flow[f, ALPHA_CNP] else 0.0)
            flow[f, ALPHA_CNP] = 0
            flow[f, ALPHA_AT] = due + c[ALPHA_GAP]
        elif flow[f, RISE_AT] == due:
            _rise(c, flow, f)
            flow[f, RISE_AT] = due + c[RISE_GAP]
        else:
            flow[f, CUT_AT] = due + c[CUT_GAP]
            if flow[f, CUT_CNP]:
                _cut(c, flow, alpha, f)
                flow[f, RISE_AT] = due + c[RISE_GAP]


@numba.njit
def _cut(c, flow, alpha, f):  # type: ignore[no-untyped-def]
    rate = flow[f, FLOW_RATE]
    if c[CLAMP] or flow[f, STAGE] != 0:
        flow[f, TARGET] = rate
    flow[f, FLOW_RATE] = max(c[MIN_RATE], int(rate * (1.0 - alpha[f] / 2.0)))
    flow[f, STAGE] = 0
    flow[f, CUT_CNP] = 0


@numba.njit
def _rise(c, flow, f):  # type: ignore[no-untyped-def]
    stage = flow[f, STAGE]
    if stage >= c[FAST_STEPS]:
        step = c[RAI] if stage == c[FAST_STEPS] else c[RHAI]
        flow[f, TARGET] = min(flow[f, LINE_RATE], flow[f, TARGET] + step)
    flow[f, FLOW_RATE] = flow[f, FLOW_RATE] // 2 + flow[f, TARGET] // 2
    flow[f, STAGE] = stage + 1
