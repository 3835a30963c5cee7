"""A law to begin with: additive increase, and one decrease a round trip in which a mark came back.

Save it under another name and run `netlayer arena NAME.py`. The engine calls the four kernels below; numba compiles
them, so they use numbers alone. Times are integer ps, rates bit/s, sizes bytes.

What may be read of `flow`: line_rate_bps, base_rtt_ps (of a full packet there and its ACK back, idle), num_links (one
way), next, unacked, sent_to and num_packets (packets), resent, retries, start, src, dst. What a law sets, and nothing
else: rate_bps, the pace, 1 or more; and window_bytes, the payload that may be in flight, cut to NCCL's window where
there is one. A window below one packet sends one when nothing is in flight.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from pydantic import Field

from congestion.control.rows import BYTE_PS, row_of
from netlayer.config.tree import Section as Settings

# Of a run.
PARAMETERS = np.dtype([("mtu_bytes", "i8"), ("wire_bytes", "i8"), ("increase", "f8"), ("decrease", "f8")])
# Of a flow: its window, and until when it has answered a mark.
STATE = np.dtype([("packets", "f8"), ("quiet_until", "i8")], align=True)


class Section(Settings):
    """The law's numbers, `congestion.plugin.x`; the arena's tuner searches those that are not 0."""

    increase_packets: float = Field(1.0, gt=0, description="Growth of the window in a round trip.")
    decrease: float = Field(0.5, gt=0, lt=1, description="Share of the window that a mark leaves.")


def parameters(section: Section, host_bps: int, settings: Any) -> Any:  # noqa: ARG001  (every law's)
    """A row of PARAMETERS; `settings` are all of `congestion`, `host_bps` a NIC's rate."""
    return row_of(
        PARAMETERS,
        mtu_bytes=settings.mtu_bytes,
        wire_bytes=settings.mtu_bytes + settings.header_bytes,
        increase=section.increase_packets,
        decrease=section.decrease,
    )


def start(p, own, flow):  # type: ignore[no-untyped-def]
    """Set the flow's state before the first packet."""
    own.packets = max(flow.line_rate_bps * flow.base_rtt_ps / BYTE_PS / p.wire_bytes, 1.0)
    own.quiet_until = 0
    flow.rate_bps = flow.line_rate_bps
    flow.window_bytes = np.int64(own.packets * p.mtu_bytes)


def advance(p, own, flow, now):  # type: ignore[no-untyped-def]
    """Let timers due by `now` fire, before the engine reads rate or window. This law has none."""


def on_ack(p, own, flow, now, marked, rtt_ps, acked_bytes):  # type: ignore[no-untyped-def]
    """An ACK: its mark, the round trip of its packet, and payload that it acknowledges, 0 for a duplicate."""
    if marked and now >= own.quiet_until:
        own.packets = max(own.packets * p.decrease, 1.0)
        own.quiet_until = now + rtt_ps
    elif not marked:
        own.packets += p.increase * acked_bytes / p.mtu_bytes / own.packets
    flow.window_bytes = np.int64(own.packets * p.mtu_bytes)


def on_loss(p, own, flow, now):  # type: ignore[no-untyped-def]
    """A NACK, or the retransmit timer ran out. Under PFC that is no congestion."""
