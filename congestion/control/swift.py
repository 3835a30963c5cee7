"""Swift (Kumar et al., Swift: Delay is Simple and Effective for Congestion Control, SIGCOMM 2020, section 3).

A window that grows by a packet a round trip while the delay is below its target, and shrinks at most once a round trip
by the share of the delay above it. The target grows with the switches on the path and as the window shrinks. A window
below one packet is a pace. Not covered: the window of the end host's delay, and the change of path (PLB).
csg-htsim's Swift, for comparison: no hop scaling, and flow scaling by the whole packets of the window.
"""

from __future__ import annotations

import math

import numpy as np

from congestion.control.rows import BYTE_PS, PS_PER_US, Rows, row_of
from congestion.kernels.jit import inlined, kernel
from congestion.simulation.settings import Settings, SwiftSettings

# Of a run: times in ps, windows in packets.
PARAMETERS = np.dtype(
    [
        ("mtu_bytes", "i8"),
        ("wire_bytes", "i8"),
        ("base_target", "f8"),
        ("hop_target", "f8"),
        ("fs_range", "f8"),
        ("fs_alpha", "f8"),
        ("fs_beta", "f8"),
        ("ai", "f8"),
        ("beta", "f8"),
        ("max_mdf", "f8"),
        ("min_packets", "f8"),
        ("max_packets", "f8"),
        ("initial_packets", "f8"),
        ("reset_after", "i8"),
        ("htsim_quirks", "i8"),
    ]
)
# Of a flow.
STATE = np.dtype(
    [
        ("packets", "f8"),  # the window
        ("rtt_ps", "i8"),  # the last one
        ("cut_at", "i8"),  # when the window last shrank
        ("most_bytes", "i8"),  # that whoever started the flow allows in flight
        ("losses", "i8"),  # since the last progress
    ],
    align=True,
)


def parameters(section: SwiftSettings, host_bps: int, settings: Settings) -> Rows:  # noqa: ARG001  (every law's)
    """The law's numbers; shape (1,)."""
    least, most = section.fs_min_packets, section.fs_max_packets
    span = 1 / math.sqrt(least) - 1 / math.sqrt(most)
    alpha = section.fs_range_us * PS_PER_US / span if span else 0.0
    return row_of(
        PARAMETERS,
        mtu_bytes=settings.mtu_bytes,
        wire_bytes=settings.mtu_bytes + settings.header_bytes,
        base_target=section.base_target_us * PS_PER_US,
        hop_target=section.hop_us * PS_PER_US,
        fs_range=section.fs_range_us * PS_PER_US,
        fs_alpha=alpha,
        fs_beta=-alpha / math.sqrt(most),
        ai=section.ai_packets,
        beta=section.beta,
        max_mdf=section.max_mdf,
        min_packets=section.min_packets,
        max_packets=section.max_packets,
        initial_packets=section.initial_packets,
        reset_after=section.reset_after,
        htsim_quirks=section.htsim_quirks,
    )


@kernel
def start(p, own, flow):  # type: ignore[no-untyped-def]
    own.packets = p.initial_packets or flow.line_rate_bps * flow.base_rtt_ps / BYTE_PS / p.wire_bytes
    own.rtt_ps = flow.base_rtt_ps
    own.cut_at = -(2**62)
    own.most_bytes = flow.window_bytes
    own.losses = 0
    _apply(p, own, flow, own.packets, np.int64(0))


@inlined
def advance(p, own, flow, now):  # type: ignore[no-untyped-def]
    """Nothing: Swift has no timers."""


@kernel
def target_ps(p, packets, num_links):  # type: ignore[no-untyped-def]
    """Target delay of a window of `packets` over a path of `num_links`, ps."""
    if p.htsim_quirks:
        hops, packets = 0, math.floor(packets)
    else:
        hops = num_links - 1
    scaled = p.fs_alpha / math.sqrt(packets) + p.fs_beta  # a window of 0 packets: infinity
    return p.base_target + hops * p.hop_target + max(0.0, min(scaled, p.fs_range))


@kernel
def on_ack(p, own, flow, now, marked, rtt_ps, acked_bytes):  # type: ignore[no-untyped-def]  # noqa: ARG001
    """Grow the window by `ai` packets a round trip below the target delay; above it, cut it once a round trip."""
    if acked_bytes == 0:
        return  # a duplicate's round trip is not that of the packet
    own.losses = 0
    own.rtt_ps = rtt_ps
    before = own.packets
    target = target_ps(p, before, flow.num_links)
    if rtt_ps < target:
        own.packets += p.ai * acked_bytes / p.mtu_bytes / max(before, 1.0)
    elif _may_cut(own, now):
        own.packets *= max(1.0 - p.beta * (rtt_ps - target) / rtt_ps, 1.0 - p.max_mdf)
    _apply(p, own, flow, before, now)


@kernel
def on_loss(p, own, flow, now):  # type: ignore[no-untyped-def]
    before = own.packets
    own.losses += 1
    if own.losses >= p.reset_after:
        own.packets = p.min_packets
    elif _may_cut(own, now):
        own.packets *= 1.0 - p.max_mdf
    _apply(p, own, flow, before, now)


@inlined
def _may_cut(own, now):  # type: ignore[no-untyped-def]
    return now - own.cut_at >= own.rtt_ps


@inlined
def _apply(p, own, flow, before, now):  # type: ignore[no-untyped-def]
    own.packets = min(max(own.packets, p.min_packets), p.max_packets)
    if own.packets < before:
        own.cut_at = now
    flow.window_bytes = min(np.int64(own.packets * p.mtu_bytes), own.most_bytes)
    if own.packets < 1.0:
        flow.rate_bps = max(np.int64(own.packets * p.wire_bytes * BYTE_PS / own.rtt_ps), 1)
    else:
        flow.rate_bps = flow.line_rate_bps
