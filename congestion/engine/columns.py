"""Where everything stands: columns of the state arrays, and the bits of a packet.

A packet is one 64-bit word, from the low end: kind (2 bits), mark (1; ECN on data, CNP on an ACK, pause rather than
resume on a PFC frame), last (1; the flow's last packet, which may be short), hop (4; links behind it), sequence (28;
packets, on an ACK the next one expected), flow (27).
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]

NEVER = 2**62
DATA, ACK, NACK, PFC = 0, 1, 2, 3
MARK_BIT, LAST_BIT, HOP_SHIFT, SEQ_SHIFT, FLOW_SHIFT = 4, 8, 4, 8, 36
HOP_MASK, SEQ_MASK, FLOW_MASK = 15, (1 << 28) - 1, (1 << 27) - 1
ACK_PATH = 8  # first column of a path that is the way back
MOST_HOPS, MOST_PACKETS, MOST_FLOWS = 8, SEQ_MASK, FLOW_MASK

# A directed link: its sender's port, the packets on the wire, and what the receiver counts for it (ingress).
(RATE, DELAY, DST, BUSY, QHEAD, QTAIL, QBYTES, PAUSED, RING_HEAD, RING_TAIL, RING_BASE, RING_MASK) = range(12)
(TX_DATA, TX_ACK, TX_PFC, KMIN, KMAX, MAXQ, MARKS, PAUSES, TX_BYTES, TX_PKTS, HI) = range(12, 23)
(IN_BYTES, HEADROOM_USED, PAUSE_SENT, HEADROOM, SHIFT, RX_COUNT, DROPS, WINDOW_BYTES, COUNT, FIRST) = range(23, 33)
LINK_COLUMNS = 33

# A node. OUT is a host's one port; a switch has the shared pool that PFC thresholds are a share of.
(IS_SWITCH, OUT, NEXT_TIME, NOW, NUM_ACTIVE, NUM_STARTED, NUM_FLOWS, FIRST_FLOW, ROBIN) = range(9)
(POOL_BYTES, SHARED, NUM_PAUSED, NUM_HI) = range(9, 13)
NODE_COLUMNS = 13

# A flow: sender, receiver, then the control law's state.
(SRC, DST_HOST, NUM_PACKETS, LAST_WIRE, START, NEXT, UNA, EXPECTED, LAST_NACK, NACK_AFTER) = range(10)
(AVAILABLE, FINISH, FLOW_RATE, LINE_RATE, RESENT, TARGET, STAGE, SEEN_CNP, ALPHA_CNP, CUT_CNP) = range(10, 20)
(ALPHA_AT, CUT_AT, RISE_AT) = range(20, 23)
FLOW_COLUMNS = 23

# Constants of a run, and its few scalars that change.
(DATA_WIRE, ACK_WIRE, PFC_WIRE, TRUNCATE, SEED, WINDOW, PFC_ON, ECN_ON, DCQCN_ON, NACK_GAP) = range(10)
(RESERVE, RESUME_OFFSET, FREE, FRESH, ON_WIRE, STATUS, LOSS_SCALED, TIME) = range(10, 18)
(ALPHA_GAP, CUT_GAP, RISE_GAP, FAST_STEPS, RAI, RHAI, MIN_RATE, CLAMP) = range(18, 26)
CONSTANTS = 26

DONE, GROW, RING_FULL = 0, 1, 2  # STATUS


class State(NamedTuple):
    """All arrays of a run, as the kernels take them.

    c: (CONSTANTS,); marking: (2,) RED's highest probability, DCQCN's g; link: (num_links, LINK_COLUMNS); node:
    (num_nodes, NODE_COLUMNS); flow: (num_flows, FLOW_COLUMNS); alpha: (num_flows,); path: (num_flows, 16) out-links by
    hop, data then ACK; in_start, in_links: links into each node; by_host: flows a sender, by start; active: those under
    way, in the same places; wire: (slots, 2) arrival and word; pool: (slots, 2) word, and in-link << 32 | next slot;
    seen: (slots, 4) what arrives at one switch in a window; order: (slots,).
    """

    c: Ints
    marking: Floats
    link: Ints
    node: Ints
    flow: Ints
    alpha: Floats
    path: NDArray[np.int32]
    in_start: Ints
    in_links: Ints
    by_host: Ints
    active: Ints
    wire: Ints
    pool: Ints
    seen: Ints
    order: Ints
