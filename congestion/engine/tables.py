"""Where everything stands: the tables of a run, a record a row, and the bits of a packet.

A packet is one 64-bit word, from the low end: kind (2 bits), mark (1; ECN on data, CNP on an ACK, pause rather than
resume on a PFC frame), last (1; the flow's last packet, which may be short), hop (4; switches behind it), sequence (28;
packets, on an ACK the next one expected), flow (27).

A row belongs to one node, which alone writes it: ports and queues to theirs, `Flow` to the sender's host, `Receiver`
to the receiver's. A wire is the one thing that two nodes share; see `lists`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Rows = NDArray[Any]

NEVER = 2**62
DATA, ACK, NACK, PFC = 0, 1, 2, 3
MARK_BIT, LAST_BIT, HOP_SHIFT, SEQ_SHIFT, FLOW_SHIFT = 4, 8, 4, 8, 36
HOP_MASK, SEQ_MASK, FLOW_MASK = 15, (1 << 28) - 1, (1 << 27) - 1
ACK_PATH = 8  # first column of a path that is the way back
MOST_HOPS, MOST_PACKETS, MOST_FLOWS = 8, SEQ_MASK, FLOW_MASK
CHUNK = 16  # entries of a list's chunk

DONE, GROW = 0, 1  # status of a run


def _record(**fields: str) -> np.dtype[Any]:
    return np.dtype(list(fields.items()), align=True)


# One end of a cable: what leaves there and, for the buffer, what came in there. Times in ps, sizes in bytes, bit/s.
PORT = _record(
    busy="i8",  # until when it sends
    queue_bytes="i8",
    max_queue_bytes="i8",
    tx_bytes="i8",
    tx_packets="i8",
    queued="i4",  # packets, PFC frames apart
    paused="u1",
    pause_sent="u1",
    shift="u1",  # an ingress may take the free pool >> shift
    peer="u4",  # the port at the other end; its number is that of the wire there
    to="u4",  # the node at the other end
    tx_data="i8",  # serialisation of a full packet
    tx_ack="i8",
    delay="i8",
    frames="i8",  # PFC frames that wait
    kmin="i8",
    kmax="i8",
    marks="i8",
    rate="i8",
    in_bytes="i8",
    headroom_used="i8",
    headroom="i8",
    window_bytes="i8",
    pauses="i8",
    drops="i8",
    received="i8",
)

# A node. A host has one port; a switch has the shared pool that PFC thresholds are a share of.
NODE = _record(
    next_time="i8",
    first_port="u4",
    num_ports="u4",
    is_switch="u1",
    max_shift="u1",
    pool_bytes="i8",
    shared="i8",
    num_paused="i8",
    num_frames="i8",
    now="i8",
    first_flow="u4",
    num_flows="i4",
    num_started="i4",
    num_active="i4",
    robin="i4",
)

# A flow at its sender.
FLOW = _record(
    next="i4",
    unacked="i4",
    num_packets="i4",
    last_wire_bytes="i4",
    available="i8",  # when its pace allows the next packet
    rate_bps="i8",
    line_rate_bps="i8",
    start="i8",
    finish="i8",  # -1 before
    resent="i8",
    src="u4",
    dst="u4",
)

# A flow at its receiver.
RECEIVER = _record(expected="i4", last_nack="i4", nack_after="i8")

# A list's entry: time of arrival, or the port that it came in by; and the packet.
ENTRY = _record(time="i8", word="i8")

# A list of entries in chunks, and how many were ever put and taken.
LIST = _record(head="u4", head_at="u4", tail="u4", tail_at="u4", put="i8", taken="i8")

# What arrives at a switch in a window.
SEEN = _record(time="i8", word="i8", port="u4", out="u4", size="i8")

# What a thread has to itself.
WORKER = _record(num_free="i8", soonest="i8", pad0="i8", pad1="i8", pad2="i8", pad3="i8", pad4="i8", pad5="i8")

# Constants of a run, and its clock.
RUN = _record(
    data_wire_bytes="i8",
    ack_wire_bytes="i8",
    pfc_wire_bytes="i8",
    truncate="i8",
    seed="i8",
    window="i8",
    pfc="i8",
    ecn="i8",
    law="i8",
    pmax="f8",
    nack_gap="i8",
    reserve_bytes="i8",
    resume_offset_bytes="i8",
    loss_scaled="i8",
    most_new_chunks="i8",  # that packets which hosts add in a window can fill
    time="i8",
)


class State(NamedTuple):
    """All tables of a run, as the kernels take them.

    run: (1,) RUN; port: (num_ports,) PORT, a node's side by side; node, flow, receiver: a row each; path: (num_flows,
    16) ports that a packet leaves by, data then ACK; by_host: flows a sender, by start; active: those under way, in the
    same places; wire, queue: (num_ports,) LIST, what is on the way to a port and what waits at it; visible:
    (num_ports,) entries of the wire that the window may see; entry: (num_chunks * CHUNK,); following: (num_chunks,) the
    next chunk; free: (num_workers, num_chunks) chunks; wake, awake: (num_nodes,) 1 where something was sent to, in this
    window and in the last; seen, order: (num_workers, most) and counts: (num_workers, most ports) room for a window at a
    switch.
    """

    run: Rows
    port: Rows
    node: Rows
    flow: Rows
    receiver: Rows
    dcqcn: Rows
    dcqcn_flow: Rows
    path: NDArray[np.uint32]
    by_host: NDArray[np.uint32]
    active: NDArray[np.uint32]
    wire: Rows
    queue: Rows
    visible: Ints
    entry: Rows
    following: NDArray[np.uint32]
    free: NDArray[np.uint32]
    wake: NDArray[np.uint8]
    awake: NDArray[np.uint8]
    seen: Rows
    order: NDArray[np.uint32]
    counts: NDArray[np.uint32]
    worker: Rows
