"""NSCC: Ultra Ethernet 1.0's congestion control by the sender, after SMaRTT-REPS (Bonato et al., arXiv 2404.01630).

What an ACK does hangs on its queueing delay and its mark:

    no mark, below the target   proportional increase; fast increase once a whole window met no queue
    no mark, above it           fair increase
    mark, above it              multiplicative decrease by the average delay, at most once a round trip
    mark, below it              nothing (it only moves the packet to another path)

Increases are gathered and applied every few packets. Quick adapt sets the window to what arrived in the last round trip
where that was little and the delay or a loss is extreme. Not covered: spraying and trimming, which RoCE NICs do not do;
so a NACK says go-back-N, and costs a packet.
"""

from __future__ import annotations

import numpy as np

from congestion.control.rows import BYTE_PS, PS_PER_US, Rows, row_of
from congestion.kernels.jit import inlined, kernel
from congestion.simulation.settings import NsccSettings, Settings

# The network that increases are given for: 100 Gbit/s and this round trip.
_REFERENCE_US = 12.0
_REFERENCE_BDP = 100e9 * _REFERENCE_US * PS_PER_US / BYTE_PS

# Of a run: times in ps, sizes in bytes.
PARAMETERS = np.dtype(
    [
        ("mtu_bytes", "i8"),
        ("target", "f8"),
        ("proportional", "f8"),
        ("fair", "f8"),
        ("eta", "f8"),
        ("fast_share", "f8"),
        ("fast_delay", "i8"),
        ("gamma", "f8"),
        ("max_cut", "f8"),
        ("delay_gain", "f8"),
        ("adjust_bytes", "i8"),
        ("adjust_gap", "i8"),
        ("window_bdps", "f8"),
        ("quick_adapt", "i8"),
        ("quick_delay", "f8"),
        ("quick_gate", "f8"),
    ]
)
# Of a flow.
STATE = np.dtype(
    [
        ("window", "f8"),
        ("most", "f8"),  # largest window
        ("most_bytes", "i8"),  # that whoever started the flow allows in flight
        ("average", "f8"),  # queueing delay, ps
        ("gathered", "f8"),  # increase to come, in windows x bytes
        ("received", "i8"),  # bytes since the last adjustment
        ("adjusted_at", "i8"),
        ("cut_at", "i8"),
        ("idle_bytes", "i8"),  # in a row that met no queue
        ("achieved", "i8"),  # bytes in this round trip of quick adapt
        ("adapt_at", "i8"),  # its end; 0: none yet
        ("to_ignore", "i8"),  # bytes in flight when it last struck, whose marks say nothing new
        ("ignored", "i8"),
        ("fast", "u1"),
        ("lost", "u1"),
    ],
    align=True,
)


def parameters(section: NsccSettings, host_bps: int, settings: Settings) -> Rows:
    """The law's numbers for NICs of `host_bps`; shape (1,)."""
    rtt = round(section.network_rtt_us * PS_PER_US)
    scale = host_bps * rtt / BYTE_PS / _REFERENCE_BDP
    target = section.target_us * PS_PER_US
    packet = settings.mtu_bytes * scale
    return row_of(
        PARAMETERS,
        mtu_bytes=settings.mtu_bytes,
        target=target,
        proportional=section.proportional_packets * packet * section.target_us / _REFERENCE_US,
        fair=section.fair_packets * packet,
        eta=section.eta_packets * packet,
        fast_share=section.fast_share * scale,
        fast_delay=round(section.fast_us * PS_PER_US),
        gamma=section.gamma,
        max_cut=section.max_cut,
        delay_gain=section.delay_gain,
        adjust_bytes=round(section.adjust_packets * settings.mtu_bytes),
        adjust_gap=rtt,
        window_bdps=section.window_bdps,
        quick_adapt=section.quick_adapt,
        quick_delay=section.quick_targets * target,
        quick_gate=section.quick_gate,
    )


@kernel
def start(p, own, flow):  # type: ignore[no-untyped-def]
    own.most = max(p.window_bdps * flow.line_rate_bps * flow.base_rtt_ps / BYTE_PS, 1.0 * p.mtu_bytes)
    own.window = own.most
    own.most_bytes = flow.window_bytes
    own.cut_at = -flow.base_rtt_ps
    flow.rate_bps = flow.line_rate_bps
    _apply(p, own, flow)


@inlined
def advance(p, own, flow, now):  # type: ignore[no-untyped-def]
    """Nothing: NSCC has no timers."""


@kernel
def on_ack(p, own, flow, now, marked, rtt_ps, acked_bytes):  # type: ignore[no-untyped-def]
    """Choose among increase, fair increase, decrease and none by the ACK's mark and its queueing delay."""
    if acked_bytes == 0:
        return  # a duplicate's round trip is not that of the packet
    delay = max(rtt_ps - flow.base_rtt_ps, 0)
    own.achieved += acked_bytes
    own.received += acked_bytes
    own.ignored += acked_bytes
    _average(p, own, flow, delay, marked)
    if not _adapt(p, own, flow, now, delay, marked):
        if marked:
            if delay >= p.target:
                _decrease(p, own, flow, now)
        elif delay >= p.target:
            own.gathered += p.fair * acked_bytes
        else:
            _increase(p, own, delay, acked_bytes)
        _adjust(p, own, now)
    _apply(p, own, flow)


@kernel
def on_loss(p, own, flow, now):  # type: ignore[no-untyped-def]
    own.lost = 1
    if not _adapt(p, own, flow, now, np.int64(0), True):
        own.window -= p.mtu_bytes
    _apply(p, own, flow)


@inlined
def _average(p, own, flow, delay, marked):  # type: ignore[no-untyped-def]
    # A long delay without a mark is taken for that of one path of many, and counts little.
    seen = 0.25 * flow.base_rtt_ps if delay > p.target and not marked else 1.0 * delay
    own.average += p.delay_gain * (seen - own.average)


@inlined
def _increase(p, own, delay, acked_bytes):  # type: ignore[no-untyped-def]
    own.idle_bytes = own.idle_bytes + acked_bytes if delay < p.fast_delay else 0
    own.fast = delay < p.fast_delay and (own.fast or own.idle_bytes > own.window)
    if own.fast:
        own.window += p.fast_share * acked_bytes
    else:
        own.gathered += p.proportional * acked_bytes * (1.0 - delay / p.target)


@inlined
def _decrease(p, own, flow, now):  # type: ignore[no-untyped-def]
    own.fast = 0
    own.idle_bytes = 0
    if own.average > p.target and now - own.cut_at > flow.base_rtt_ps:
        own.window *= max(1.0 - p.gamma * (own.average - p.target) / own.average, 1.0 - p.max_cut)
        own.cut_at = now


@inlined
def _adjust(p, own, now):  # type: ignore[no-untyped-def]
    """Bound the window, and add what was gathered to it once enough bytes or time have passed."""
    own.window = min(max(own.window, 1.0 * p.mtu_bytes), own.most)
    if own.received <= p.adjust_bytes and now - own.adjusted_at <= p.adjust_gap:
        return
    own.window += own.gathered / own.window
    own.gathered = 0.0
    own.received = 0
    if now - own.adjusted_at >= p.adjust_gap:
        own.window += p.eta
        own.adjusted_at = now


@kernel
def _adapt(p, own, flow, now, delay, marked):  # type: ignore[no-untyped-def]
    """Cut the window to what was acknowledged in the last round trip, where packets were lost or far too late.

    NSCC's quick adapt. True where it has cut now, and for marked ACKs of what was sent before: the rest of the law
    leaves both alone.
    """
    if not p.quick_adapt:
        return False
    struck = marked and own.ignored < own.to_ignore
    if not struck and now > own.adapt_at:
        extreme = own.lost or delay > p.quick_delay
        if own.adapt_at and extreme and own.achieved < own.most * p.quick_gate:
            own.window = max(1.0 * own.achieved, 1.0 * p.mtu_bytes)
            own.to_ignore = np.int64(flow.next - flow.unacked) * p.mtu_bytes
            own.ignored = 0
            own.lost = 0
            struck = True
        own.achieved = 0
        own.adapt_at = now + flow.base_rtt_ps + np.int64(p.target)
    if struck:
        own.gathered = 0.0
        own.received = 0
    return struck


@inlined
def _apply(p, own, flow):  # type: ignore[no-untyped-def]
    own.window = min(max(own.window, 1.0 * p.mtu_bytes), own.most)
    flow.window_bytes = min(np.int64(own.window), own.most_bytes)
