"""The UDP source port of a RoCEv2 flow, the one field of its 5-tuple that differs between its queue pairs.

Linux takes it from the flow label of the address handle, or where that is 0 (NCCL) from the two queue pair numbers;
Soft-RoCE does so too once a queue pair is connected (Linux 6.1), and before that takes its own number alone. Not
covered: NICs whose firmware overrides it (`mlx5dv_modify_qp_udp_sport`).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Ports = NDArray[np.uint16]

FIRST_PORT = 0xC000
_FLOW_LABEL_MASK = 0xF_FFFF
_PORT_MASK = 0x3FFF
_HASH_32_MULTIPLIER = 0x61C8_8647  # include/linux/hash.h: GOLDEN_RATIO_32


def udp_source_port(local_qpn: Ints, remote_qpn: Ints) -> Ports:
    """UDP source port of a connection without a flow label, 0xC000..0xFFFF, as Linux derives it from the QPNs.

    NCCL leaves the flow label 0, so the 24-bit queue pair numbers decide (include/rdma/ib_verbs.h:
    rdma_calc_flow_label, rdma_flow_label_to_udp_sport). The product is symmetric: both directions get one port.
    """
    return flow_label_source_port(flow_label(local_qpn, remote_qpn))


def flow_label(local_qpn: Ints, remote_qpn: Ints) -> Ints:
    """Return the 20-bit flow label that Linux computes from two queue pair numbers if an address handle sets none."""
    product = local_qpn.astype(np.uint64) * remote_qpn.astype(np.uint64)
    product ^= product >> np.uint64(20)
    product ^= product >> np.uint64(40)
    return (product & np.uint64(_FLOW_LABEL_MASK)).astype(np.int64)


def flow_label_source_port(label: Ints) -> Ports:
    """The port of a flow label: its low 14 bits, its high 6 folded in."""
    return ((label & _PORT_MASK) ^ (label & _FLOW_LABEL_MASK) >> 14 | FIRST_PORT).astype(np.uint16)


def rxe_source_port(local_qpn: Ints) -> Ports:
    """The port that Soft-RoCE takes before a queue pair is connected, and older kernels' for good.

    14 bits of a multiplicative hash of its own queue pair number.
    """
    hashed = local_qpn.astype(np.uint32) * np.uint32(_HASH_32_MULTIPLIER) >> np.uint32(32 - 14)
    return (FIRST_PORT + (hashed & np.uint32(_PORT_MASK))).astype(np.uint16)
