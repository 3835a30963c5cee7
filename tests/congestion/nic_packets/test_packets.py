"""Headers that scapy lacks, and our CRC against scapy's own."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scapy.contrib.roce import opcode
from scapy.layers.inet import IP, UDP
from scapy.layers.inet6 import IPv6
from scapy.packet import Raw

from congestion.nic.capture.icrc import icrc
from congestion.nic.capture.packets import (
    _CHAINS,
    AETH,
    BTH,
    DETH,
    RETH,
    AtomicAckETH,
    AtomicETH,
    ImmDt,
    acknowledge,
    cnp,
    request,
)
from congestion.nic.capture.pcap import _header_bytes

ENDS = {"src": "10.0.0.1", "dst": "10.0.0.2", "dqpn": 0x222, "sport": 50_001}


@pytest.mark.parametrize(
    ("operation", "header", "num_bytes"),
    [
        (("RC", "RDMA_WRITE_FIRST"), RETH(va=1 << 40, rkey=7, length=99), 16),
        (("RC", "RDMA_READ_REQUEST"), RETH(va=5, rkey=8, length=1), 16),
        (("UC", "RDMA_WRITE_ONLY"), RETH(va=6, rkey=9, length=4), 16),
        (("UD", "SEND_ONLY"), DETH(qkey=0x80010000, sqpn=0x333), 8),
        (("RC", "SEND_ONLY_WITH_IMMEDIATE"), ImmDt(data=0xCAFE), 4),
        (("RC", "COMPARE_SWAP"), AtomicETH(va=64, rkey=1, swap=2, compare=3), 28),
    ],
)
def test_a_header_is_found_again_in_the_bytes_of_its_packet(operation, header, num_bytes):
    built = bytes(request(opcode(*operation)[0], 1, payload=b"12345678", header=header, **ENDS))
    found = IP(built)[BTH].payload
    assert type(found) is type(header)
    assert len(bytes(header)) == num_bytes
    assert {name: found.getfieldval(name) for name in found.fields} == {
        **found.fields,
        **{name: header.getfieldval(name) for name in header.fields},
    }
    assert bytes(found.payload) == b"12345678"


def test_an_atomic_answer_has_a_syndrome_and_what_stood_there_before():
    packet = IP() / UDP(dport=4791, sport=1) / BTH(opcode=0x12) / AETH(syndrome=1) / AtomicAckETH(before=77)
    found = IP(bytes(packet))
    assert found[AETH].syndrome == 1
    assert found[AtomicAckETH].before == 77
    assert not found[AtomicAckETH].payload


@pytest.mark.parametrize(
    ("code", "first"),
    [
        (0x0B, RETH(va=5, rkey=8, length=8)),
        (0x2B, RETH(va=5, rkey=8, length=8)),
        (0x65, DETH(qkey=0x80010000, sqpn=0x333)),
    ],
    ids=["RC WRITE", "UC WRITE", "UD SEND"],
)
def test_immediate_data_behind_another_header_is_found(code, first):
    built = request(code, 1, payload=b"12345678", header=first / ImmDt(data=0xCAFE), **ENDS)
    found = IP(bytes(built))
    assert found[type(first)].fields == {**found[type(first)].fields, **first.fields}
    assert found[ImmDt].data == 0xCAFE
    assert bytes(found[ImmDt].payload) == b"12345678"


@pytest.mark.parametrize("code", [0x0A, 0x0C, 0x64, 0x11, 0x10])
def test_a_payload_behind_a_header_is_no_immediate_data(code):
    header = AETH() if code in (0x11, 0x10) else DETH() if code == 0x64 else RETH()
    found = IP(bytes(request(code, 1, payload=b"12345678", header=header, **ENDS)))
    assert ImmDt not in found
    assert bytes(found[type(header)].payload) == b"12345678"


@pytest.mark.parametrize("code", sorted(_CHAINS))
def test_scapys_headers_are_as_long_as_the_bulk_parser_takes_them_for(code):
    assert sum(len(bytes(header())) for header in _CHAINS[code]) == _header_bytes(np.array([code]))[0]


def test_a_payload_is_padded_to_four_bytes_and_says_so():
    found = IP(bytes(request(0x04, 1, payload=b"hello", **ENDS)))[BTH]
    assert found.padcount == 3
    assert bytes(found.payload) == b"hello\0\0\0"


@given(
    st.integers(0, 2**24 - 1),
    st.integers(2, 2**24 - 1),
    st.integers(0, 255),
    st.binary(max_size=300),
    st.sampled_from([0x04, 0x0A, 0x0C, 0x64, 0x13]),
)
def test_our_crc_is_the_one_that_scapy_puts_there(psn, qpn, tos, payload, code):
    packet = bytes(request(code, psn, payload=payload, src="10.1.2.3", dst="192.168.255.1", dqpn=qpn, sport=1, tos=tos))
    assert icrc(packet[:-4]) == int.from_bytes(packet[-4:], "little")


@pytest.mark.parametrize("packet", [cnp(**ENDS), acknowledge(5, syndrome=0x60, **ENDS)], ids=["CNP", "NAK"])
def test_our_crc_of_packets_without_payload(packet):
    built = bytes(packet)
    assert icrc(built[:-4]) == int.from_bytes(built[-4:], "little")


def test_our_crc_over_ipv6():
    ip = IPv6(src="2001:db8::1", dst="2001:db8::2", tc=106, fl=0x12345, hlim=3)
    built = bytes(ip / UDP(sport=1, dport=4791, chksum=0) / BTH(opcode=4, dqpn=9, psn=1) / Raw(b"12345678"))
    assert icrc(built[:-4]) == int.from_bytes(built[-4:], "little")


@given(st.binary(max_size=200), st.data())
def test_what_a_router_changes_does_not_change_the_crc_and_anything_else_does(payload, data):
    packet = bytearray(bytes(request(0x04, 7, payload=payload, **ENDS))[:-4])
    before = icrc(bytes(packet))
    place = data.draw(st.integers(0, len(packet) - 1))
    packet[place] ^= (
        data.draw(st.integers(1, 255)) if place else 0x01
    )  # not the length in the first byte: a shorter one
    if place == 0:
        return
    mutable = {1, 8, 10, 11, 26, 27, 32}
    assert (icrc(bytes(packet)) == before) == (place in mutable)


@pytest.mark.parametrize("packet", [b"", b"\x45", bytes(39), b"\x45" + bytes(38)])
def test_a_crc_of_less_than_the_headers_is_refused(packet):
    with pytest.raises(ValueError, match="at least IP, UDP and BTH"):
        icrc(packet)
