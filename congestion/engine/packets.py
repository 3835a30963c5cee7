"""Functions that switches and hosts share: sizes, serialisation, sending to a cable's other end, and drawn numbers."""

from __future__ import annotations

import numpy as np

from congestion.engine.lists import put
from congestion.engine.tables import FLOW_MASK, FLOW_SHIFT, HASHED_PORTS, LAST_BIT, MARK_BIT, PATH_MASK, PATH_SHIFT, PFC
from congestion.kernels.jit import inlined, kernel
from congestion.kernels.machine import has, store_shared

_SIZE_PS = 8_000_000_000_000  # a byte at 1 bit/s
_DELAY = 4  # column of `pace`


@inlined
def serialise(run, size, rate):  # type: ignore[no-untyped-def]
    """Time of `size` bytes at `rate` bit/s, ps; whole ns where the run truncates as ns-3 does."""
    tx_time = np.int64(np.uint64(size * _SIZE_PS) // np.uint64(rate))
    return tx_time // 1000 * 1000 if run.truncate else tx_time


@inlined
def flow_of(word):  # type: ignore[no-untyped-def]
    return np.uint32((word >> FLOW_SHIFT) & FLOW_MASK)


@inlined
def number_of(s, f):  # type: ignore[no-untyped-def]
    """Return the number by which random numbers are drawn for a flow."""
    return np.int64(s.receiver[f].number)


@inlined
def size_of(s, word):  # type: ignore[no-untyped-def]
    return np.int64(s.flow[flow_of(word)].last_wire_bytes) if word & LAST_BIT else s.size[word & 3]


@inlined
def tx_time(s, kind, word, size):  # type: ignore[no-untyped-def]
    """Time that a packet takes onto a link whose ports are of this kind."""
    return serialise(s.run[0], size, s.kind[kind].rate) if word & LAST_BIT else s.pace[kind, word & 3]


@inlined
def send(s, k, port, now, word, size):  # type: ignore[no-untyped-def]
    """Put a packet on the wire from `now`; the port is busy until its last bit has left."""
    busy = port.busy = now + tx_time(s, port.kind, word, size)
    arrival = busy + s.pace[port.kind, _DELAY]
    worker, wire = s.worker[k], port.peer
    store_shared(s.wire_tail, wire, put(s, k, s.wire_tail[wire], arrival, word))
    s.wake[np.uint32(1 - worker.turn), port.to] = 1
    worker.soonest = min(worker.soonest, arrival)
    if word & 3 != PFC:
        port.tx_packets += 1
        port.tx_bytes += size


@inlined
def is_lost(s, p, word, now):  # type: ignore[no-untyped-def]
    """Whether the link to port `p` lost a packet: by its error rate, or because it is down.

    PFC frames are spared: a lost resume would stop the link for good.
    """
    if not has(s.features, "extras"):
        return False
    if s.run[0].flaps and word & 3 != PFC and _is_down(s, p, now):
        s.port[p].drops += 1
        return True
    if s.run[0].losses and word & 3 != PFC:
        port = s.port[p]
        port.received += 1
        if hash_random(s.run[0].seed, np.int64(p), port.received) < s.kind[port.kind].loss_scaled:
            port.drops += 1
            return True
    return False


@kernel
def _is_down(s, p, now):  # type: ignore[no-untyped-def]
    for i in range(s.flap_from[p], s.flap_from[p + 1]):  # noqa: SIM110  (numba has no `any`)
        if s.flap[i, 0] <= now < s.flap[i, 1]:
            return True
    return False


@inlined
def path_of(s, word):  # type: ignore[no-untyped-def]
    """Row of a packet's path."""
    if not has(s.features, "extras"):
        return np.int64(flow_of(word))
    return np.int64(flow_of(word)) * s.run[0].num_paths + ((word >> PATH_SHIFT) & PATH_MASK)


@inlined
def path_bits(s, f, sequence, kind):  # type: ignore[no-untyped-def]
    """Path bits of a packet as it leaves its host: one of the flow's source ports, drawn for each packet."""
    run = s.run[0]
    if not has(s.features, "extras") or run.routing != HASHED_PORTS:
        return np.int64(0)
    return hash_random(run.seed, -1 - number_of(s, f), sequence << 2 | kind) % run.num_paths << PATH_SHIFT


@inlined
def next_in_turn(s, n, word):  # type: ignore[no-untyped-def]
    """The port that a packet is sprayed to at switch `n`: of those on shortest paths each in its turn.

    A round is once over all of them, from a drawn place: even to the packet, and two switches, or two flows that take
    turns, do not stay in step. Data and ACKs have turns of their own. Host and switch are numbered by `next_hops`.
    """
    flow = s.flow[flow_of(word)]
    target = np.int64(flow.src if word & 3 else flow.dst)
    here, there = np.int64(s.node[n].switch), np.int64(s.node[target].switch)
    if here == there:
        return np.int64(s.port[s.node[target].first_port].peer)
    of_acks = np.int64((word & 3) != 0)
    first = np.int64(s.spray[here * s.run[0].num_switches + there])
    many, turn = np.int64(s.spray[first]), np.int64(s.spray[first + 1 + of_acks])
    s.spray[first + 1 + of_acks] = turn + 1
    begin = hash_random(s.run[0].seed, first, turn // many << 1 | of_acks)
    return np.int64(s.spray[first + 3 + (begin + turn) % many])


@inlined
def pause(port, frame, now):  # type: ignore[no-untyped-def]
    """Stop or go on, as a PFC frame says."""
    paused = np.uint8((frame & MARK_BIT) != 0)
    if paused and not port.paused:
        port.paused_at = now
    elif port.paused and not paused:
        port.paused_ps += now - port.paused_at
    port.paused = paused


@inlined
def hash_random(seed, first_number, second):  # type: ignore[no-untyped-def]
    """A number of 0..2^53 from three, by SplitMix64: random in effect, the same in whatever order it is drawn."""
    mixed = np.uint64(seed) ^ (np.uint64(first_number) * np.uint64(0x9E37_79B9_7F4A_7C15))
    for word in (np.uint64(second), np.uint64(0)):
        mixed = (mixed ^ word) + np.uint64(0x9E37_79B9_7F4A_7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
        mixed = mixed ^ (mixed >> np.uint64(31))
    return np.int64(mixed >> np.uint64(11))
