"""A switch's shared buffer: what an ingress may hold, when it is to be stopped and let go on, and what ECN marks.

An ingress and a queue are rows of PORT: a port's own, or one of a class of its traffic (`classes`). Each lossless
ingress has a reserve, then a share of the free pool, then headroom for what comes until its sender has stopped.
"""

from __future__ import annotations

from congestion.engine.packets import flow_of, hash_random, number_of
from congestion.engine.tables import HOP_MASK, HOP_SHIFT, MARK_BIT, NEVER, SEQ_MASK, SEQ_SHIFT
from congestion.kernels.jit import inlined
from congestion.kernels.machine import has

_ONE = float(1 << 53)


@inlined
def is_lossless(s, ingress):  # type: ignore[no-untyped-def]
    return s.kind[ingress.kind].lossless if has(s.features, "classes") else s.run[0].pfc


@inlined
def marked(s, port, word):  # type: ignore[no-untyped-def]
    """The packet with its ECN mark, by the queue behind it: all above Kmax, in proportion above Kmin (RED)."""
    queue, kind = port.queue_bytes, s.kind[port.kind]
    if queue <= kind.kmin:  # never so without ECN
        return word
    if queue <= kind.kmax:
        share = kind.pmax * (queue - kind.kmin) / (kind.kmax - kind.kmin)
        flow, sequence = number_of(s, flow_of(word)), (word >> SEQ_SHIFT) & SEQ_MASK
        if hash_random(s.run[0].seed, flow, sequence << 8 | word & (HOP_MASK << HOP_SHIFT) | word & 3) >= share * _ONE:
            return word
    port.marks += 1
    return word if word & 3 else word | MARK_BIT  # on an ACK that bit is the CNP


@inlined
def hold(s, node, ingress, size):  # type: ignore[no-untyped-def]
    """Count an arriving packet: at a lossless ingress as headroom if threshold or pool leave no room for it, else in
    reserve and shared pool; a lossy packet in the shared pool alone.
    """
    if not is_lossless(s, ingress):
        node.shared += size
        return
    over = ingress.in_bytes + size - s.run[0].reserve_bytes
    if over > 0 and (over > threshold(s, node, ingress) or _lacks_pool(s, node, ingress, size)):
        ingress.headroom_used += size
        return
    ingress.in_bytes += size
    if over > 0:
        node.shared += min(size, over)


@inlined
def release(s, node, ingress, size):  # type: ignore[no-untyped-def]
    if not is_lossless(s, ingress):
        node.shared -= size
        return
    from_headroom = min(ingress.headroom_used, size)
    rest = size - from_headroom
    node.shared -= min(rest, max(ingress.in_bytes - s.run[0].reserve_bytes, 0))
    ingress.headroom_used -= from_headroom
    ingress.in_bytes -= rest


@inlined
def threshold(s, node, ingress):  # type: ignore[no-untyped-def]
    """Return what an ingress (or a lossy queue) may hold of the shared pool."""
    kind = s.kind[ingress.kind]
    follows = max(node.pool_bytes - node.shared, 0) << kind.lift >> kind.shift
    return s.run[0].xoff_bytes if kind.lossless and s.run[0].xoff_bytes < NEVER else follows


@inlined
def _lacks_pool(s, node, ingress, size):  # type: ignore[no-untyped-def]
    """Whether a packet does not fit into what is left of the pool: never so where an ingress' alpha is 1 or less."""
    over = min(size, ingress.in_bytes + size - s.run[0].reserve_bytes)
    return over > max(node.pool_bytes - node.shared, 0)


@inlined
def shared_of(s, ingress):  # type: ignore[no-untyped-def]
    return max(ingress.in_bytes - s.run[0].reserve_bytes, 0)


@inlined
def has_no_room(s, node, port, ingress, size):  # type: ignore[no-untyped-def]
    """Whether nothing more fits: with PFC, in both headroom and the ingress' share; without, in the queue's share."""
    if not is_lossless(s, ingress):
        return port.queue_bytes + size > threshold(s, node, port)
    over_headroom = size + ingress.headroom_used > s.kind[ingress.kind].headroom
    above = size + shared_of(s, ingress) > threshold(s, node, ingress)
    return over_headroom and (above or _lacks_pool(s, node, ingress, size))


@inlined
def is_full(s, node, ingress):  # type: ignore[no-untyped-def]
    return ingress.headroom_used > 0 or shared_of(s, ingress) >= threshold(s, node, ingress)


@inlined
def may_go_on(s, node, ingress):  # type: ignore[no-untyped-def]
    """Whether an ingress whose sender was stopped holds so little that it may send again."""
    if not ingress.pause_sent or ingress.headroom_used:
        return False
    shared = shared_of(s, ingress)
    if shared <= s.run[0].xon_bytes:
        return True
    return shared + s.run[0].resume_offset_bytes <= threshold(s, node, ingress)
