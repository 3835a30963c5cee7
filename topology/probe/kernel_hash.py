"""Linux's ECMP hash for forwarded IPv4 packets: the next hop of a multipath route that each flow takes.

SipHash-2-4 over the kernel's `flow_keys`, addresses and ports each in ascending order (both directions of a connection
hash alike), keyed with a 32-bit seed: sysctl `net.ipv4.fib_multipath_hash_seed` (Linux 6.11 and later). With the sysctl
at 0 the seed is random, drawn once a boot and shared by all network namespaces; no program can read it, so then shares
can be predicted and single flows cannot. The values are those of little-endian machines.

Not covered: IPv6; tunnels (policy 2); resilient next-hop groups; packets that carry a hash of their own (of a connected
socket, or of a NIC that computed one), which the kernel takes in place of this one.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntFlag
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from topology.ecmp.hashing import ROCE_V2_PORT, UDP_PROTOCOL, Headers

Policy = Literal[0, 1, 3]  # net.ipv4.fib_multipath_hash_policy
Words = NDArray[np.uint64]

_WORD_MASK = (1 << 64) - 1
_HASH_BITS = 31
_MESSAGE_BYTES = 48


class FibField(IntFlag):
    """Fields to hash, as in net.ipv4.fib_multipath_hash_fields, but for the flow label of IPv6."""

    SRC_IP = 0x01
    DST_IP = 0x02
    PROTOCOL = 0x04
    SRC_PORT = 0x10
    DST_PORT = 0x20


# As the kernel's documentation calls policies 0 and 1.
LAYER3 = FibField.SRC_IP | FibField.DST_IP
LAYER4 = LAYER3 | FibField.PROTOCOL | FibField.SRC_PORT | FibField.DST_PORT
DEFAULT_FIELDS = LAYER3 | FibField.PROTOCOL


def multipath_hash(
    headers: Headers, seed: int, policy: Policy = 1, fields: FibField = DEFAULT_FIELDS
) -> NDArray[np.uint32]:
    """The 31-bit hash of each flow.

    Args:
        headers: the flows' 5-tuples.
        seed: net.ipv4.fib_multipath_hash_seed of the router, 1..2^32-1.
        policy: 0 addresses alone, 1 the 5-tuple, 3 the `fields` (unused for the others).

    Raises:
        ValueError: the seed is out of range, or the policy is unknown.

    Source: Linux include/net/ip_fib.h, net/ipv4/route.c, net/core/flow_dissector.c.
    """
    if not 0 < seed < 1 << 32:
        raise ValueError(f"seed = {seed}: 1..2^32-1 (0 stands for one that nobody can read)")
    if policy not in (0, 1, 3):
        raise ValueError(f"policy = {policy}: 0, 1 or 3")
    hashed = {0: LAYER3, 1: LAYER4, 3: fields}[policy]
    key = seed << 32 | seed
    digest = _siphash24(_message(headers, hashed), (key, key)).astype(np.uint32)
    digest[digest == 0] = 1
    if policy == 3:
        digest = _jhash_with_zero(digest if hashed else np.zeros_like(digest))
    return digest >> np.uint32(1)


def choose(hashes: NDArray[np.uint32], weights: Sequence[int]) -> NDArray[np.int64]:
    """The member that each hash selects, in the order the route lists its next hops.

    Each member owns a part of 0..2^31-1 as wide as its weight (the kernel's hash-threshold).

    Raises:
        ValueError: a weight is below 1, or there is none.
    """
    if not weights or min(weights) < 1:
        raise ValueError(f"weights = {list(weights)}: at least one, each 1 or more")
    total = sum(weights)
    reached = np.cumsum(weights, dtype=np.int64).tolist()
    # DIV_ROUND_CLOSEST: half is added before the division.
    bounds = np.array([((part << _HASH_BITS) + total // 2) // total - 1 for part in reached], dtype=np.int64)
    return np.searchsorted(bounds, hashes.astype(np.int64), side="left")


def _message(headers: Headers, fields: FibField) -> Words:
    """Return the hashed part of `struct flow_keys`, shape (num_flows, 6): what is not selected stays zero."""
    count = len(headers.src_ip)
    zeros = np.zeros(count, dtype=np.uint64)
    src, dst = _swapped(headers.src_ip.astype(">u4"), np.uint32), _swapped(headers.dst_ip.astype(">u4"), np.uint32)
    src, dst = (src if fields & FibField.SRC_IP else zeros), (dst if fields & FibField.DST_IP else zeros)
    sport = _swapped(headers.udp_sport.astype(">u2"), np.uint16) if fields & FibField.SRC_PORT else zeros
    dport = _swapped(np.full(count, ROCE_V2_PORT, dtype=">u2"), np.uint16) if fields & FibField.DST_PORT else zeros
    low, high = np.minimum(sport, dport), np.maximum(sport, dport)
    message = np.zeros((count, _MESSAGE_BYTES // 8), dtype=np.uint64)
    message[:, 0] = UDP_PROTOCOL << 16 if fields & FibField.PROTOCOL else 0
    message[:, 3] = low << np.uint64(32) | high << np.uint64(48)
    message[:, 4] = np.minimum(src, dst) << np.uint64(32)
    message[:, 5] = np.maximum(src, dst)
    return message


def _swapped(wire: NDArray[np.generic], native: type[np.unsignedinteger]) -> Words:
    """Network-order numbers as a little-endian kernel compares and stores them."""
    return wire.view(np.dtype(native).newbyteorder("<")).astype(np.uint64)


def _siphash24(messages: Words, key: tuple[int, int]) -> Words:
    """Compute SipHash-2-4 of each row of 64-bit words (Aumasson, Bernstein: SipHash, a fast short-input PRF, 2012)."""
    starts = (0x736F6D6570736575, 0x646F72616E646F6D, 0x6C7967656E657261, 0x7465646279746573)
    state = [np.full(len(messages), start ^ key[i % 2] & _WORD_MASK, dtype=np.uint64) for i, start in enumerate(starts)]
    length = np.full(len(messages), (messages.shape[1] * 8 & 0xFF) << 56, dtype=np.uint64)
    for word in (*messages.T, length):
        state[3] = state[3] ^ word
        _rounds(state, 2)
        state[0] = state[0] ^ word
    state[2] = state[2] ^ np.uint64(0xFF)
    _rounds(state, 4)
    return state[0] ^ state[1] ^ state[2] ^ state[3]


def _rounds(state: list[Words], count: int) -> None:
    v0, v1, v2, v3 = state
    for _ in range(count):
        v0 = v0 + v1
        v1 = _rotate_left(v1, 13) ^ v0
        v0 = _rotate_left(v0, 32)
        v2 = v2 + v3
        v3 = _rotate_left(v3, 16) ^ v2
        v0 = v0 + v3
        v3 = _rotate_left(v3, 21) ^ v0
        v2 = v2 + v1
        v1 = _rotate_left(v1, 17) ^ v2
        v2 = _rotate_left(v2, 32)
    state[:] = v0, v1, v2, v3


def _rotate_left(values: Words, bits: int) -> Words:
    return values << np.uint64(bits) | values >> np.uint64(64 - bits)


def _jhash_with_zero(hashes: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Jenkins' lookup3 of (hash, 0): policy 3 joins the outer header's hash with the inner one's, 0 where none is."""
    start = np.uint32(0xDEADBEEF + (2 << 2))
    a, b, c = hashes + start, np.full_like(hashes, start), np.full_like(hashes, start)
    # Each step: x ^= y; x -= rotl(y, bits), over (c, b), (a, c), (b, a) in turn.
    for bits in (14, 11, 25, 16, 4, 14, 24):
        c = (c ^ b) - (b << np.uint32(bits) | b >> np.uint32(32 - bits))
        a, b, c = b, c, a
    return b
