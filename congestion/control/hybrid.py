"""Our hybrid for RoCE NICs: the RTT sets a flow's pace, a mark makes it fall at once to what the RTT says is its share.

The law keeps a window of `W` bytes and paces at `W / rtt`, by the last RTT: a queue that grows slows its senders before
any law acts, as a true window does and a plain rate does not; that makes the loop stable
(`congestion.simulation.fluid`).

From Swift: the precise RTT, a target delay that grows as the flow slows, a decrease by the share above the target. What
differs: (1) It rises as it falls, by a share of the way, `W += gain (target - rtt) / rtt` for a window acknowledged, in
place of a packet a round trip: a link that becomes free is full again in a few round trips. (2) The target grows by
`queue` for each halving of the rate, in place of 1 / sqrt(window): the slower of two flows aims at a longer queue and
gains, so flows meet in some round trips at any number of them, and the queue grows by the logarithm of that number.
(3) It acts on each ACK by its share of the window, up and down, not once a round trip by one sample.

From DCQCN: a mark is the word of the congested switch itself, while an RTT also counts the way back, the sender's own
pauses and noise. So a mark cuts at once, to `W target / rtt` of the round's first window: the queue that it met drains
to the target, however many flows there are, in one round trip. DCQCN cuts by how often marks came, which is slow to
learn, and rises by a timer. Without a mark a long RTT is done only in part (`unconfirmed`): a flow whose ACKs wait in
a queue gives little way. The mark stands for its round, so notices may be as rare as a NIC paces them.

Two rules for a fabric of several paths. (4) A window fills an idle path and no more (`line_window`), and what round
trips of one round differ by on top: that is many paths or bursts, not a queue that stands. A flow that had its path
alone would else keep, by a larger window, more than those that come later, until it ends and the last is left alone.
(5) Switches that route by flowlets move a flow only behind a gap, which a paced flow does not have: it would stay on
the path on which it collided. A flow that waits in a queue worth a gap makes one, at most every other round trip, a
little longer than the switches' (`open_gaps`); it sends nothing meanwhile, the queue that it leaves does. What it may
gain is that the rest of its bytes goes sooner: with less than two windows left it stays, for the gap's cost is sure.

All parts can be omitted. No ECN: a Swift in rates. No RTT: DCQCN, by its own parameters. Starts at line rate.
Limits: flows that get no marks while others do keep more than their share, up to the limit on their flight, and that
needs a NIC that can bound it (`limit_flight`); with `flow_scaling` off and `fast_increase` on, only marks make flows
equal. A loss changes nothing: under PFC it is an error of a link, not congestion.
"""

from __future__ import annotations

import numpy as np

from congestion.control import dcqcn
from congestion.control.logarithm import log2
from congestion.control.rows import BYTE_PS, PS_PER_US, Rows, row_of
from congestion.kernels.jit import inlined, kernel
from congestion.simulation.settings import HybridSettings, Settings

_AI_PACKETS = 1.0  # Swift's
_NEVER = 2**61
_GAP = 1.2  # of the switches' own: bursts of others must not close it
_WORTH = 0.6  # of a gap: a queue that is worth one
_BETWEEN = 2.0  # round trips: the first one after a gap tells of the new path
_LEFT = 2.0  # windows yet to be sent: the new path tells of itself with one, and is of use for the rest

# Of a run: ours, and DCQCN's last, or numba would take these for a kind of those; times in ps, rates in bit/s.
PARAMETERS = np.dtype(
    [
        ("use_rtt", "i8"),
        ("use_ecn", "i8"),
        ("flow_scaling", "i8"),
        ("fast_increase", "i8"),
        ("limit_flight", "i8"),
        ("line_window", "i8"),
        ("mtu_bytes", "i8"),
        ("wire_bytes", "i8"),
        ("gap", "f8"),  # 0: none is made
        ("queue", "f8"),
        ("gain", "f8"),
        ("unconfirmed", "f8"),
        ("sure_targets", "f8"),
        ("flight_windows", "f8"),
        ("least_bps", "i8"),
        *((name, dcqcn.PARAMETERS[name]) for name in dcqcn.PARAMETERS.names or ()),
    ]
)
# Of a flow.
STATE = np.dtype(
    [
        ("window", "f8"),  # bytes
        ("first_window", "f8"),  # the round's
        ("most_bytes", "i8"),  # that whoever started the flow allows in flight
        ("round_end", "i8"),  # the packet whose ACK ends the round
        ("marked", "u1"),  # in this round
        ("cut", "u1"),  # in this round
        ("settling", "u1"),  # what this round tells was sent while the cut was made
        ("gap", "u1"),  # 1: the next packet is followed by one, 2: the next ends it
        ("gap_at", "i8"),  # when the last one began
        ("pace_bps", "i8"),  # but for gaps
        ("mean_rtt", "f8"),  # over about a round
        ("least_rtt", "i8"),  # of this round so far
        ("floor_rtt", "i8"),  # the least of the last round
        *((name, dcqcn.STATE[name]) for name in dcqcn.STATE.names or ()),
    ],
    align=True,
)


def parameters(section: HybridSettings, host_bps: int, settings: Settings) -> Rows:
    """The law's numbers, with DCQCN's for NICs of `host_bps`; shape (1,)."""
    base = dcqcn.parameters(settings.dcqcn, host_bps, settings)
    gaps = section.open_gaps and settings.routing == "flowlet"
    return row_of(
        PARAMETERS,
        **{name: base[name][0] for name in dcqcn.PARAMETERS.names or ()},
        use_rtt=section.use_rtt,
        use_ecn=section.use_ecn,
        flow_scaling=section.flow_scaling,
        fast_increase=section.fast_increase,
        limit_flight=section.limit_flight,
        line_window=section.line_window,
        mtu_bytes=settings.mtu_bytes,
        wire_bytes=settings.mtu_bytes + settings.header_bytes,
        gap=_GAP * settings.flowlet_gap_us * PS_PER_US if gaps else 0.0,
        queue=section.queue_us * PS_PER_US,
        gain=section.gain,
        unconfirmed=section.unconfirmed,
        sure_targets=section.sure_targets,
        flight_windows=section.flight_windows,
        least_bps=section.min_rate_bps,
    )


@kernel
def start(p, own, flow):  # type: ignore[no-untyped-def]
    dcqcn.start(p, own, flow)
    own.most_bytes = flow.window_bytes
    own.window = own.first_window = flow.line_rate_bps * flow.base_rtt_ps / BYTE_PS
    own.mean_rtt = flow.base_rtt_ps
    own.least_rtt = own.floor_rtt = _NEVER  # the first round has no round before it to differ from
    own.gap_at = -_NEVER
    if p.use_rtt:
        _apply(p, own, flow, flow.base_rtt_ps)


@inlined
def advance(p, own, flow, now):  # type: ignore[no-untyped-def]
    dcqcn.advance(p, own, flow, now)  # its timers rest where there is RTT
    if own.gap:
        _pass_gap(p, own, flow, now)


@kernel
def target_ps(p, rate_bps, flow):  # type: ignore[no-untyped-def]
    """RTT that a flow at `rate_bps` aims at, ps."""
    halvings = log2(flow.line_rate_bps / rate_bps) if p.flow_scaling else 0.0
    return flow.base_rtt_ps + p.queue * (1.0 + max(halvings, 0.0))


@kernel
def on_ack(p, own, flow, now, marked, rtt_ps, acked_bytes):  # type: ignore[no-untyped-def]
    """Move the window towards the target of the round-trip time: up below it if unmarked, down above it."""
    if not p.use_rtt:
        dcqcn.on_ack(p, own, flow, now, marked, rtt_ps, acked_bytes)
        return
    if acked_bytes == 0:
        return  # a duplicate's round trip is not that of the packet
    if flow.unacked > own.round_end:
        _begin_round(own, flow, rtt_ps)
    marked = marked and p.use_ecn
    own.marked |= marked
    target = target_ps(p, own.window * BYTE_PS / rtt_ps, flow)
    share = min(acked_bytes / own.window, 1.0)
    own.least_rtt = min(own.least_rtt, rtt_ps)
    own.mean_rtt += share * (rtt_ps - own.mean_rtt)
    if rtt_ps > target:
        _fall(p, own, share, target / rtt_ps)
    elif not marked:
        own.window += _rise(p, own, share, (target - rtt_ps) / rtt_ps)
    if p.gap and not own.gap and _wants_gap(p, own, flow, now, rtt_ps):
        own.gap = 1
    # A far longer queue slows the flow by its limit on the flight; its pace would lag when that queue has gone.
    _apply(p, own, flow, min(rtt_ps, p.flight_windows * target) if p.limit_flight else rtt_ps)


@inlined
def on_loss(p, own, flow, now):  # type: ignore[no-untyped-def]
    """Nothing, with RTT or without."""


@inlined
def _begin_round(own, flow, rtt_ps):  # type: ignore[no-untyped-def]
    own.round_end = flow.next
    own.first_window = own.window
    own.floor_rtt = own.least_rtt
    own.least_rtt = rtt_ps
    own.settling = own.cut
    own.marked = 0
    own.cut = 0


@inlined
def _fall(p, own, share, ratio):  # type: ignore[no-untyped-def]
    if own.settling:
        return
    if own.marked or ratio * p.sure_targets < 1.0:
        own.window = min(own.window, own.first_window * ratio)
        own.cut = 1
    else:
        trust = p.unconfirmed if p.use_ecn else 1.0
        own.window *= 1.0 - trust * p.gain * share * (1.0 - ratio)


@inlined
def _rise(p, own, share, room):  # type: ignore[no-untyped-def]
    if not p.fast_increase:
        return _AI_PACKETS * p.mtu_bytes * share
    return p.gain * share * min(room, 1.0) * own.window


@inlined
def _wants_gap(p, own, flow, now, rtt_ps):  # type: ignore[no-untyped-def]
    """Whether the flow waits in a queue worth a gap, is not just behind one, and has enough left to gain by it."""
    waits = rtt_ps - flow.base_rtt_ps > _WORTH * p.gap
    left_bytes = (flow.num_packets - flow.next) * p.mtu_bytes
    return waits and now - own.gap_at > _BETWEEN * rtt_ps and left_bytes > _LEFT * own.window


@inlined
def _pass_gap(p, own, flow, now):  # type: ignore[no-untyped-def]
    """A packet has gone: the gap follows it, or has passed."""
    if own.gap == 1:
        own.gap = 2
        own.gap_at = now
        flow.rate_bps = np.int64(p.wire_bytes * BYTE_PS / p.gap)
    else:
        own.gap = 0
        flow.rate_bps = own.pace_bps


@inlined
def _apply(p, own, flow, over_ps):  # type: ignore[no-untyped-def]
    """Bound the window, and set the flow's rate to window / `over_ps` and its limit on bytes in flight."""
    room = p.queue  # the window that fills the line at the target of line rate
    if p.line_window:
        room = min(max(own.mean_rtt - own.floor_rtt, 0.0), p.queue)
    most = flow.line_rate_bps * (flow.base_rtt_ps + room) / BYTE_PS
    least = p.least_bps * flow.base_rtt_ps / BYTE_PS  # the least rate on an idle path
    own.window = min(max(own.window, least), most)
    own.pace_bps = min(max(np.int64(own.window * BYTE_PS / over_ps), p.least_bps), flow.line_rate_bps)
    flow.rate_bps = own.pace_bps
    if p.limit_flight:
        flow.window_bytes = min(np.int64(own.window * p.flight_windows), own.most_bytes)
