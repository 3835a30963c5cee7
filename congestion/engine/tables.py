"""Layout of a run: its tables, a record a row, and the bits of a packet.

A packet is one 64-bit word, from the low end: kind (2 bits), mark (1; ECN on data, CNP on an ACK, pause rather than
resume on a PFC frame), last (1; the flow's last packet, which may be short), hop (4; switches behind it), path (4;
which of the flow's), sequence (24; packets, on an ACK the next one expected), flow (27).

A row belongs to one node, which alone writes it: ports and queues to theirs, `Flow` to the sender's host, `Receiver`
to the receiver's. A wire is the one thing that two nodes share; see `lists`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Rows = Any  # NDArray[Any]: half of mypy's time went into telling that a column of it is Any

NEVER = 2**62
DATA, ACK, NACK, PFC = 0, 1, 2, 3
MARK_BIT, LAST_BIT, HOP_SHIFT, PATH_SHIFT, SEQ_SHIFT, FLOW_SHIFT = 4, 8, 4, 8, 12, 36
HOP_MASK, PATH_MASK, SEQ_MASK, FLOW_MASK = 15, 15, (1 << 24) - 1, (1 << 27) - 1
ACK_PATH = 8  # first column of a path that is the way back
MOST_HOPS, MOST_PACKETS, MOST_FLOWS = 8, SEQ_MASK, FLOW_MASK
ECMP, SPRAY, FLOWLET, HASHED_PORTS = range(4)  # routing
DROP, FORWARD, ALERT = range(3)  # what a PFC watchdog does in a storm
CHUNK = 8  # entries of a list's chunk

FULL = -1  # what a run answers that needs more chunks
LOOKED = -2  # what one answers whose looks are to be read
_LINE = 64  # bytes of a cache line


def _record(**fields: str) -> np.dtype[Any]:
    return np.dtype(list(fields.items()), align=True)


# One end of a cable: what leaves there, a cache line; and for the buffer what came in there, another. Times in ps.
PORT = _record(
    busy="i8",  # until when it sends
    queue_bytes="i8",
    max_queue_bytes="i8",
    tx_bytes="i8",
    tx_packets="i8",
    peer="u4",  # the port at the other end; its number is that of the wire there
    to="u4",  # the node at the other end
    kind="u4",
    frames="i2",  # PFC frames that wait
    paused="u1",
    pause_sent="u1",
    turn="i4",  # the class whose turn it is; of a class the place of the flow that its NIC served last
    deficit="i4",  # bytes that a class may still send in its turn
    in_bytes="i8",
    headroom_used="i8",
    marks="i8",
    pauses="i8",
    drops="i8",
    received="i8",
    paused_at="i8",
    paused_ps="i8",  # all pauses that are over
)

# What ports of a rate, a delay and a loss rate have in common; with classes of traffic a row each of them, one after
# another.
KIND = _record(
    rate="i8",
    delay="i8",
    tx_data="i8",  # serialisation of a full packet
    tx_ack="i8",
    kmin="i8",
    kmax="i8",
    headroom="i8",
    shift="i8",  # an ingress may take the free pool << lift >> shift: its alpha
    lift="i8",
    lossless="i8",
    pmax="f8",
    loss_scaled="i8",  # share of packets lost on the link, of 2^53
)

# A node. A host has one port; a switch has the shared pool that PFC thresholds are a share of.
NODE = _record(
    first_port="u4",
    num_ports="u4",
    first_flow="u4",
    num_flows="i4",
    num_known="i4",  # flows whose start is known
    num_started="i4",
    num_active="i4",
    num_ready="i4",  # those of the active that have something to send within their limit
    round_robin_index="i4",
    is_switch="u1",
    max_shift="u1",
    switch="u2",  # number of a switch, or of the one that a host hangs on; see `build_paths.next_hops`
    now="i8",
    timer="i8",  # no retransmit timer runs out before
    pool_bytes="i8",
    shared="i8",
    num_paused="i4",
    num_frames="i4",
)

# A flow at its sender. Packets are counted from 0; `limit` is how far the window, or the flow's end, lets it send.
FLOW = _record(
    next="i4",
    limit="i4",
    unacked="i4",
    num_packets="i4",
    last_wire_bytes="i4",
    num_links="i4",
    available="i8",  # when its pace allows the next packet
    rate_bps="i8",
    line_rate_bps="i8",
    window_bytes="i8",
    base_rtt_ps="i8",
    start="i8",
    finish="i8",  # -1 before
    delay="i8",  # from the last of what it waits for to its start
    timeout_at="i8",
    resent="i8",
    num_waits="i4",
    retries="i4",
    src="u4",
    dst="u4",
    sent_to="i4",  # the first packet that was never sent
    failed="u1",  # its retries ran out
    law="u1",
    tuned="u1",  # row of its law's parameters: its class
)

# A flow at its receiver.
RECEIVER = _record(
    expected="i4",
    last_nack="i4",
    nack_after="i8",
    cnp_after="i8",
    cnps="u4",
    number="u4",  # by which random numbers are drawn for the flow: its row, where it is not told otherwise
)

# What a law from a file sees of its flow: a copy, of which the two that a law sets are read back. (No table may be
# called `view`: numba takes that for the array's method.)
VIEW = _record(
    rate_bps="i8",
    window_bytes="i8",
    line_rate_bps="i8",
    base_rtt_ps="i8",
    start="i8",
    resent="i8",
    next="i4",
    unacked="i4",
    sent_to="i4",
    num_packets="i4",
    num_links="i4",
    retries="i4",
    src="u4",
    dst="u4",
)
LAW_SETS = ("rate_bps", "window_bytes")

# A port's PFC watchdog: until when its storm lasts (0: none was, NEVER: still), storms, and packets that it dropped.
WATCHDOG = _record(until="i8", storms="i8", drops="i8")

# What round trips a flow has seen, where they are measured.
RTT = _record(count="i8", total="i8", most="i8")

PATH = _record(**{f"hop{hop}": "u4" for hop in range(2 * ACK_PATH)})

# A list's entry: time of arrival, or the port that it came in by; and the packet.
ENTRY = _record(time="i8", word="i8")

# Of a wire to a switch: when the last packet came, and what says which of several arrivals at a moment is first.
ARRIVALS = _record(last="i8", began="i8")

# What arrives at a switch in a window.
SEEN = _record(time="i8", began="i8", word="i8", port="u4", out="u4", size="i8")

# What a worker has to itself, a cache line.
WORKER = _record(
    first="i8",  # its nodes, in `owned`
    stop="i8",
    num_free="i8",
    soonest="i8",  # that anything which it sent in this window arrives
    turn="i8",  # row of `wake` that this window reads; the other one is written
    spare0="i8",
    spare1="i8",
    spare2="i8",
)

# Constants of a run, and its clock.
RUN = _record(
    data_wire_bytes="i8",
    ack_wire_bytes="i8",
    pfc_wire_bytes="i8",
    truncate="i8",
    seed="i8",
    window="i8",
    pfc="i8",
    law="i8",  # of the run; each flow has its own, and each kind of port its marking
    ecn="i8",
    pmax="f8",
    num_classes="i8",
    ack_class="i8",  # of ACKs and NACKs; -1: their flow's
    nack_gap="i8",
    cnp_gap="i8",
    mtu_bytes="i8",
    most_window_bytes="i8",
    sent_mask="i8",  # -1 where no law asks for round trip times
    timeout="i8",  # 0: none
    most_retries="i8",
    flaps="i8",  # 1: some link goes down
    rtt_noise="i8",
    measure_rtt="i8",  # 1: rows of `rtt` are kept
    deaf_scaled="i8",  # share of flows whose receiver echoes no mark, of 2^53
    routing="i8",
    num_paths="i8",  # rows of a flow's paths
    flowlet_gap="i8",
    selective="i8",  # 1: selective repeat, 0: go-back-N
    drop_tail="i8",
    reserve_bytes="i8",
    resume_offset_bytes="i8",
    losses="i8",  # 1: some link loses packets
    time="i8",  # the end of the window that was run last
    large="i8",  # the tables are larger than a core's cache: prefetching pays
    most_new_chunks="i8",  # that packets which hosts add in a window can fill
    xoff_bytes="i8",  # static threshold of a lossless ingress; NEVER: it follows what is free
    xon_bytes="i8",  # at or below which it goes on whatever the threshold
    watchdog_after="i8",  # how long a port is paused before that is a storm; 0: no watchdog
    watchdog_restore="i8",  # how long after a storm its port is trusted again
    watchdog_action="i8",
    num_switches="i8",
    law_fault="i8",  # what a law from a file did that no law may; see `control.laws`
    law_fault_flow="i8",
    law_fault_value="i8",
)


class State(NamedTuple):
    """All tables of a run, as the kernels take them.

    features: (1,) of a type that says what the kernels are compiled for (`build`); run: (1,) RUN; size: (4,) wire bytes
    by a packet's kind; pace: (num_kinds, 8) serialisation by a packet's kind, then the delay; port: (num_ports,) PORT,
    a node's side by side; lane: (num_ports * num_classes,) PORT, a row a class of a port, empty for one class; weight:
    (num_classes,) of a class in its turn, 0: strictly before; class_of: (num_flows,); kind: (num_kinds,) KIND; node,
    flow, receiver, and of a law: a row each, of its parameters a row a class; sent: (num_flows, most in flight) when
    packets were sent; rtt: (num_flows,) RTT, one row where none is measured; cause: (num_ports, 3) pauses in whose
    moment a port's queue was the switch's longest, while it could send and while it was stopped itself, and packets
    that were dropped for want of room though they came in by it lossless; watchdog: a row a port, where there is one;
    spray: of `build_paths.next_hops`; law_view: what a law from a file sees, a row a flow; timeouts:
    (most retries + 1,) waits before each retry; acked, received: (num_flows, words) bits of packets, for selective
    repeat; flap_from: (num_ports + 1,), flap: (num_flaps, 2) when what arrives at a port is lost; flowlet:
    (num_flows, 2) path, and when its first switch last saw a packet; waiting: flows that wait for flow f, from
    waiting_from[f] to waiting_from[f + 1]; path: (num_flows * num_paths, 16) ports that a packet leaves by, data
    then ACK; path_line: the same as rows, for prefetch; by_host: flows a sender, by start; active: those under way,
    in the same places; wire_head, wire_tail: (num_ports,), queue_head, queue_tail: (num_ports * num_classes,) where
    the lists begin and end of what is on the way to a port and of what waits at it; came: (num_ports,) CAME; entry:
    (num_chunks * CHUNK,); following: (num_chunks,) the next chunk; free: (num_workers, num_chunks) chunks;
    next_time: (num_nodes,) when something happens there by itself; wake: (2, num_nodes) 1 where something was sent
    to; seen, order: (num_workers, most) and counts, busy, due: (num_workers, most ports) room for a window at a
    switch; owned: (num_nodes,) nodes by worker; said: (num_workers, 2, 8) what workers tell each other; arrived:
    (1,) workers that came to meet.
    """

    features: Rows
    run: Rows
    size: Ints
    pace: Ints
    port: Rows
    lane: Rows
    weight: Ints
    class_of: NDArray[np.uint8]
    kind: Rows
    node: Rows
    flow: Rows
    receiver: Rows
    dcqcn: Rows
    dcqcn_flow: Rows
    swift: Rows
    swift_flow: Rows
    nscc: Rows
    nscc_flow: Rows
    hybrid: Rows
    hybrid_flow: Rows
    plugin: Rows
    plugin_flow: Rows
    law_view: Rows
    sent: NDArray[np.int64]
    rtt: Rows
    cause: Ints
    timeouts: Ints
    acked: NDArray[np.uint64]
    received: NDArray[np.uint64]
    flap_from: Ints
    flap: Ints
    flowlet: Ints
    spray: NDArray[np.uint32]
    watchdog: Rows
    waiting_from: NDArray[np.int64]
    waiting: NDArray[np.uint32]
    path: NDArray[np.uint32]
    path_line: Rows
    by_host: NDArray[np.uint32]
    active: NDArray[np.uint32]
    wire_head: NDArray[np.uint32]
    wire_tail: NDArray[np.uint32]
    queue_head: NDArray[np.uint32]
    queue_tail: NDArray[np.uint32]
    arrivals: Rows
    entry: Rows
    following: NDArray[np.uint32]
    free: NDArray[np.uint32]
    next_time: Ints
    wake: NDArray[np.uint8]
    seen: Rows
    order: NDArray[np.uint32]
    counts: NDArray[np.uint32]
    busy: NDArray[np.uint32]
    next_tx: Ints
    worker: Rows
    owned: NDArray[np.uint32]
    mailbox: Ints
    arrived: Ints


def aligned(many: int, dtype: np.dtype[Any]) -> Rows:
    """`many` zeroed rows that begin at a cache line's beginning."""
    room = np.zeros(many * dtype.itemsize + _LINE, dtype=np.uint8)
    skip = -room.ctypes.data % _LINE
    return room[skip : skip + many * dtype.itemsize].view(dtype)
