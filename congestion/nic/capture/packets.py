"""RoCEv2 packets one by one, with scapy: the headers that its `roce` module lacks, and whole packets of each kind.

Importing this binds RETH, DETH, ImmDt, AtomicETH and AtomicAckETH to their opcodes, so that scapy dissects and builds
them everywhere. For tests and for single packets: a capture of any size is read by `congestion.nic.capture.pcap`. Not
covered: RD and XRC.

Source: InfiniBand Architecture Specification 1.5, chapter 9.
"""

from __future__ import annotations

from typing import Any

from congestion.nic.capture.pcap import CNP, NAK_SEQUENCE
from netlayer.errors import ConfigError
from topology.ecmp.hashing import ROCE_V2_PORT

try:
    from scapy.contrib.roce import AETH, BTH, CNPPadding
    from scapy.fields import BitField, IntField, LongField, XIntField, XLongField
    from scapy.layers.inet import IP, UDP
    from scapy.packet import Packet, Raw, bind_layers
except ImportError as exc:
    raise ConfigError(
        "scapy", None, f"cannot be imported ({exc})", "install what builds packets: pip install 'netlayer[rdma]'"
    ) from exc

__all__ = [
    "AETH",
    "BTH",
    "DETH",
    "NAK_SEQUENCE",
    "RETH",
    "AtomicAckETH",
    "AtomicETH",
    "CNPPadding",
    "ImmDt",
    "acknowledge",
    "cnp",
    "request",
]

# DSCP 26, ECT(0): the common mark of RoCE traffic.
ROCE_TOS = 106
ACK = 0x1F  # with no credits counted
_RC, _UC, _UD = 0x00, 0x20, 0x60


class RETH(Packet):
    """RDMA header: where a WRITE goes or a READ comes from."""

    name = "RETH"
    fields_desc = [XLongField("va", 0), XIntField("rkey", 0), IntField("length", 0)]  # noqa: RUF012  scapy's form


class DETH(Packet):
    """Datagram header: the queue key, and who sends."""

    name = "DETH"
    fields_desc = [XIntField("qkey", 0), BitField("reserved", 0, 8), BitField("sqpn", 0, 24)]  # noqa: RUF012  scapy's form


class ImmDt(Packet):
    """Four bytes that the receiver finds in its completion."""

    name = "ImmDt"
    fields_desc = [XIntField("data", 0)]  # noqa: RUF012  scapy's form


class AtomicETH(Packet):
    """Operands of compare-and-swap and of fetch-and-add."""

    name = "AtomicETH"
    fields_desc = [XLongField("va", 0), XIntField("rkey", 0), LongField("swap", 0), LongField("compare", 0)]  # noqa: RUF012  scapy's form


class AtomicAckETH(Packet):
    """Value at the target address before the atomic operation."""

    name = "AtomicAckETH"
    fields_desc = [LongField("before", 0)]  # noqa: RUF012  scapy's form


def request(
    opcode: int,
    psn: int,
    *,
    src: str,
    dst: str,
    dqpn: int,
    sport: int,
    payload: bytes = b"",
    header: Any = None,
    tos: int = ROCE_TOS,
    ack_request: bool = False,
) -> Any:
    """A request from the IP header on, its CRC computed when it is built.

    Args:
        opcode: transport and operation, as in `scapy.contrib.roce.opcode`.
        header: RETH, ImmDt and so on, as the opcode asks for.
        payload: padded to a multiple of 4, as the BTH says.
    """
    padding = -len(payload) % 4
    bth = BTH(opcode=opcode, dqpn=dqpn, psn=psn, padcount=padding, ackreq=int(ack_request))
    packet = _udp(src, dst, sport, tos) / bth
    if header is not None:
        packet = packet / header
    data = payload + bytes(padding)
    return packet / Raw(data) if data else packet


def acknowledge(
    psn: int, *, src: str, dst: str, dqpn: int, sport: int, syndrome: int = ACK, msn: int = 0, tos: int = ROCE_TOS
) -> Any:
    """An ACK, or with another syndrome a NAK."""
    return _udp(src, dst, sport, tos) / BTH(opcode=0x11, dqpn=dqpn, psn=psn) / AETH(syndrome=syndrome, msn=msn)


def cnp(*, src: str, dst: str, dqpn: int, sport: int, tos: int = 48 << 2) -> Any:
    """A congestion notification, from whoever got a marked packet to the queue pair that sent it."""
    return _udp(src, dst, sport, tos) / BTH(opcode=CNP, becn=1, dqpn=dqpn) / CNPPadding()


def _udp(src: str, dst: str, sport: int, tos: int) -> Any:
    # RoCEv2 sends no UDP checksum: its own CRC covers more.
    return IP(src=src, dst=dst, tos=tos, flags="DF") / UDP(sport=sport, dport=ROCE_V2_PORT, chksum=0)


# By transport and operation, which of our headers follow one another; UD's immediate data stands after its DETH.
_CHAINS: dict[int, tuple[type[Packet], ...]] = {
    **{transport + operation: (RETH,) for transport in (_RC, _UC) for operation in (0x06, 0x0A)},
    **{transport + operation: (ImmDt,) for transport in (_RC, _UC) for operation in (0x03, 0x05, 0x09)},
    **{transport + 0x0B: (RETH, ImmDt) for transport in (_RC, _UC)},
    _RC + 0x0C: (RETH,),
    **{_RC + operation: (AETH,) for operation in (0x0D, 0x0F, 0x10)},
    _RC + 0x12: (AETH, AtomicAckETH),
    **{_RC + operation: (AtomicETH,) for operation in (0x13, 0x14)},
    _UD + 0x04: (DETH,),
    _UD + 0x05: (DETH, ImmDt),
}


def _bind() -> None:
    for opcode, (first, *_) in _CHAINS.items():
        bind_layers(BTH, first, opcode=opcode)
    for header in (RETH, DETH, AETH):
        header.guess_payload_class = _guess  # type: ignore[method-assign, assignment]  # AETH is scapy's own


def _guess(header: Any, payload: bytes) -> type[Packet]:
    """Return the layer after a header by the opcode of the BTH below it, which scapy's bindings do not look at."""
    below = header.underlayer
    chain = _CHAINS.get(below.opcode, ()) if isinstance(below, BTH) else ()
    place = chain.index(type(header)) + 1 if type(header) in chain else len(chain)
    return chain[place] if place < len(chain) and len(payload) >= len(chain[place]()) else Raw


_bind()
