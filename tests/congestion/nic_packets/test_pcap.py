"""The bulk parser: against scapy packet by packet, on every file form and link layer, on damaged files."""

from __future__ import annotations

import contextlib
import gzip
import itertools
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from scapy.contrib.roce import BTH
from scapy.layers.inet import ICMP, IP, TCP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import ARP, GRE, CookedLinux, Dot1Q, Ether
from scapy.layers.vxlan import VXLAN
from scapy.packet import Raw
from scapy.utils import EDecimal, RawPcapNgWriter

from congestion.nic.capture.frames import read_frames
from congestion.nic.capture.packets import DETH, RETH, AtomicETH, ImmDt, acknowledge, cnp, request
from congestion.nic.capture.pcap import Packets, read_pcap
from netlayer.errors import ConfigError
from tests.congestion.nic_packets.talk import EPOCH_NS, Talk, save

ENDS = {"src": "10.0.0.1", "dst": "10.0.0.2", "dqpn": 0x222, "sport": 50_001}
_HEADERS = {0x06: RETH(length=9), 0x0A: RETH(length=7), 0x13: AtomicETH(), 0x05: ImmDt(), 0x64: DETH(), 0x04: None}


def _block(endian: str, kind: int, body: bytes) -> bytes:
    size = 12 + len(body)
    return struct.pack(endian + "II", kind, size) + body + struct.pack(endian + "I", size)


_PCAP = struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 65535, 1)
_SECTION = _block("<", 0x0A0D0D0A, struct.pack("<IHHq", 0x1A2B3C4D, 1, 0, -1))


def _read(tmp_path: Path, frames: list[bytes], link: int = 1) -> Packets:
    return read_pcap(save(tmp_path / "some.pcap", frames, range(EPOCH_NS, EPOCH_NS + len(frames)), link))


def _simple() -> list[bytes]:
    return [bytes(Ether() / request(0x04, psn, payload=b"x" * psn, **ENDS)) for psn in range(1, 6)]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(sorted(_HEADERS)),
            st.integers(0, 2**24 - 1),
            st.integers(2, 2**24 - 1),
            st.integers(0, 255),
            st.integers(1, 65535),
            st.binary(max_size=60),
        ),
        min_size=1,
        max_size=20,
    )
)
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30)
def test_every_field_is_the_one_that_scapy_reads(tmp_path, drawn):
    frames = [
        bytes(
            Ether()
            / request(
                code,
                psn,
                payload=data,
                header=_HEADERS[code],
                src="10.0.0.1",
                dst="10.0.0.2",
                dqpn=qpn,
                sport=port,
                tos=tos,
            )
        )
        for code, psn, qpn, tos, port, data in drawn
    ]
    found = _read(tmp_path, frames)
    assert len(found) == len(frames)
    assert (found.icrc == 1).all()
    for row, (frame, (_, _, _, _, _, data)) in enumerate(zip(frames, drawn, strict=True)):
        packet = Ether(frame)
        bth = packet[BTH]
        wanted = (bth.opcode, bth.psn, bth.dqpn, packet[IP].tos & 3, packet[UDP].sport, bth.ackreq, len(data))
        names = ("opcode", "psn", "dqpn", "ecn", "sport", "ack_request", "payload_bytes")
        assert tuple(int(getattr(found, name)[row]) for name in names) == wanted
        assert found.message_bytes[row] == (packet[RETH].length if RETH in packet else -1)


def test_answers_have_a_syndrome_and_requests_have_none(tmp_path):
    frames = [acknowledge(5, syndrome=0x60, **ENDS), request(0x04, 1, **ENDS), cnp(**ENDS)]
    found = _read(tmp_path, [bytes(Ether() / frame) for frame in frames])
    assert found.syndrome.tolist() == [0x60, -1, -1]
    assert found.is_cnp.tolist() == [False, False, True]
    assert found.is_request.tolist() == [False, True, False]
    assert found.payload_bytes.tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("link", "below"),
    [(1, Ether()), (1, Ether() / Dot1Q(vlan=5)), (1, Ether() / Dot1Q(vlan=5) / Dot1Q(vlan=6)), (101, b""), (228, b""),
     (108, b"\0\0\0\x02"), (113, CookedLinux())],
    ids=["ethernet", "vlan", "two vlans", "raw", "ipv4", "loopback", "cooked"],
)  # fmt: skip
def test_link_layers(tmp_path, link, below):
    packet = request(0x0A, 9, payload=b"12345", header=RETH(length=5), **ENDS)
    frame = below + bytes(packet) if isinstance(below, bytes) else bytes(below / packet)
    found = _read(tmp_path, [frame], link)
    assert (found.psn.tolist(), found.payload_bytes.tolist(), found.icrc.tolist()) == ([9], [5], [1])
    assert found.addresses == ("10.0.0.1", "10.0.0.2")


def test_ipv6(tmp_path):
    ip = IPv6(src="2001:db8::1", dst="2001:db8::2", tc=2)
    packet = ip / UDP(sport=7, dport=4791, chksum=0) / BTH(opcode=4, dqpn=9, psn=1) / Raw(b"1234")
    found = _read(tmp_path, [bytes(Ether() / packet)])
    assert found.addresses == ("2001:db8::1", "2001:db8::2")
    assert (found.ecn.tolist(), found.icrc.tolist(), found.payload_bytes.tolist()) == ([2], [1], [4])


def test_frames_of_others_are_counted_and_left_out(tmp_path):
    others = [
        Ether() / ARP(),
        Ether() / IP() / TCP(dport=4791),
        Ether() / IP() / UDP(dport=53),
        Ether() / IP() / ICMP(),
        Ether() / IP(frag=5) / UDP(dport=4791) / Raw(bytes(30)),
        Ether() / IP(flags="MF") / UDP(dport=4791) / Raw(bytes(30)),
        Ether(type=0x88CC) / Raw(b"E" + bytes(60)),
        Raw(b""),
        Raw(b"\1"),
    ]
    found = _read(tmp_path, [*(bytes(other) for other in others), *_simple()])
    assert (len(found), found.num_skipped, found.num_damaged) == (5, len(others), 0)
    assert found.unread == {"IP fragments": 2}


_INNER = Ether() / request(0x04, 1, payload=b"data", **ENDS)
_HIDDEN = [
    ("VXLAN", Ether() / IP() / UDP(dport=4789) / VXLAN(vni=7) / _INNER),
    ("VXLAN", Ether() / Dot1Q(vlan=9) / IPv6() / UDP(dport=8472) / Raw(bytes(8)) / _INNER),
    ("GENEVE", Ether() / IP() / UDP(dport=6081) / Raw(bytes(8)) / _INNER),
    ("GRE", Ether() / IP(proto=47) / GRE(proto=0x0800) / _INNER[IP]),
    ("GRE", Ether() / IP(proto=47) / GRE(proto=0x6558, key_present=1, key=3) / _INNER),
    ("ERSPAN", Ether() / IP(proto=47) / GRE(proto=0x88BE, seqnum_present=1) / Raw(bytes(8)) / _INNER),
    ("ERSPAN", Ether() / IPv6(nh=47) / GRE(proto=0x22EB, seqnum_present=1) / Raw(bytes(12)) / _INNER),
    ("MPLS", Ether(type=0x8847) / Raw(bytes([0, 1, 1, 64])) / _INNER[IP]),
    ("MPLS", Ether() / Dot1Q(type=0x8848) / Raw(bytes([0, 1, 1, 64])) / _INNER[IP]),
    ("RoCE v1", Ether(type=0x8915) / Raw(b"\x60" + bytes(60))),
    ("IP in IP", Ether() / IP(proto=4) / _INNER[IP]),
    ("IPv6 extension headers", Ether() / IPv6(nh=60) / Raw(b"\x11" + bytes(7)) / _INNER[UDP]),
    ("VLAN tags beyond two", Ether() / Dot1Q() / Dot1Q() / Dot1Q() / _INNER[IP]),
]


@pytest.mark.parametrize(("name", "frame"), _HIDDEN, ids=range(len(_HIDDEN)))
def test_what_may_carry_roce_and_is_not_read_is_named(tmp_path, name, frame):
    found = _read(tmp_path, [*_simple(), bytes(frame), bytes(frame)])
    assert (len(found), found.num_skipped, found.unread) == (5, 2, {name: 2})
    for cut in range(0, len(bytes(frame)), 7):  # cut off anywhere, it is that kind or none
        assert set(_read(tmp_path, [bytes(frame)[:cut]]).unread) <= {name}


def test_a_multicast_report_is_nothing_that_was_not_read(tmp_path):
    report = Ether() / IPv6(nh=0) / Raw(b"\x3a" + bytes(7)) / Raw(bytes(28))
    assert _read(tmp_path, [bytes(report)]).unread == {}


def test_a_link_layer_that_is_not_known_is_named(tmp_path):
    assert _read(tmp_path, _simple(), link=247).unread == {"link type 247": 5}


def test_packets_whose_lengths_cannot_be_right_are_counted_as_damaged(tmp_path):
    whole = bytes(Ether() / request(0x0A, 1, payload=b"12345678", header=RETH(), **ENDS))
    long = bytearray(whole)
    long[38:40] = (5000).to_bytes(2, "big")  # UDP says more than the frame holds
    short = bytearray(whole)
    short[38:40] = (20).to_bytes(2, "big")  # UDP says less than the headers need
    cut = whole[:60]
    found = _read(tmp_path, [bytes(long), bytes(short), cut, whole])
    assert (len(found), found.num_damaged) == (1, 3)


def test_a_snap_length_leaves_the_crc_unknown_and_not_wrong(tmp_path):
    whole = _simple()[-1]
    path = tmp_path / "cut.pcap"
    head = struct.pack("<IHHiIII", 0xA1B2C3D4, 2, 4, 0, 0, 64, 1)
    path.write_bytes(head + struct.pack("<IIII", 1, 2, len(whole) - 6, len(whole)) + whole[:-6])
    found = read_pcap(path)
    assert (found.icrc.tolist(), found.payload_bytes.tolist()) == ([-1], [5])
    assert found.time_ns.tolist() == [1_000_002_000]


def test_a_wrong_bit_in_the_payload_is_a_wrong_crc_and_a_congestion_mark_is_none(tmp_path):
    damaged, marked = bytearray(_simple()[-1]), bytearray(_simple()[-1])
    damaged[-6] ^= 1
    marked[15] |= 3
    assert _read(tmp_path, [bytes(damaged), bytes(marked)]).icrc.tolist() == [0, 1]
    assert _read(tmp_path, [bytes(marked)]).ecn.tolist() == [3]


def test_ethernet_padding_is_no_payload(tmp_path):
    found = _read(tmp_path, [bytes(Ether() / acknowledge(5, **ENDS)).ljust(90, b"\0")])
    assert (found.payload_bytes.tolist(), found.icrc.tolist()) == ([0], [1])


@pytest.mark.parametrize("endian", ["<", ">"])
@pytest.mark.parametrize(("magic", "tick"), [(0xA1B2C3D4, 1000), (0xA1B23C4D, 1)])
def test_pcap_of_either_byte_order_and_clock(tmp_path, endian, magic, tick):
    path, frame = tmp_path / "x.pcap", _simple()[0]
    head = struct.pack(endian + "IHHiIII", magic, 2, 4, 0, 0, 65535, 1)
    path.write_bytes(head + struct.pack(endian + "IIII", 100, 7, len(frame), len(frame)) + frame)
    found = read_pcap(path)
    assert (found.time_ns.tolist(), found.psn.tolist()) == ([100 * 10**9 + 7 * tick], [1])


def test_pcapng_as_scapy_writes_it_and_gzipped(tmp_path):
    frames = _simple()
    with RawPcapNgWriter(str(tmp_path / "x.pcapng")) as writer:
        writer.write_header(Ether())
        for place, frame in enumerate(frames):
            writer.write_packet(frame, sec=EDecimal(1_700_000_000) + EDecimal(place) / 10**6)
    zipped = tmp_path / "x.pcapng.gz"
    zipped.write_bytes(gzip.compress((tmp_path / "x.pcapng").read_bytes()))
    for path in (tmp_path / "x.pcapng", zipped):
        found = read_pcap(path)
        assert found.psn.tolist() == [1, 2, 3, 4, 5]
        assert (found.time_ns - EPOCH_NS).tolist() == [0, 1000, 2000, 3000, 4000]


@pytest.mark.parametrize("endian", ["<", ">"])
def test_pcapng_with_two_clocks_simple_packets_and_two_sections(tmp_path, endian):
    frame = _simple()[0]
    data = frame + bytes(-len(frame) % 4)
    section = _block(endian, 0x0A0D0D0A, struct.pack(endian + "IHHq", 0x1A2B3C4D, 1, 0, -1))
    nano = struct.pack(endian + "HHIHHB3xHHqHH", 1, 0, 0, 9, 1, 9, 14, 8, 5, 0, 0)  # 10^-9 s, 5 s late
    binary = struct.pack(endian + "HHIHHB3x", 1, 0, 0, 9, 1, 0x80 | 10)  # 2^-10 s
    packet = _block(endian, 6, struct.pack(endian + "IIIII", 0, 1, 7, len(frame), len(frame)) + data)
    coarse = _block(endian, 6, struct.pack(endian + "IIIII", 1, 0, 512, len(frame), len(frame)) + data)
    simple = _block(endian, 3, struct.pack(endian + "I", len(frame)) + data)
    unknown = _block(endian, 0x55, b"abcd")
    first = section + _block(endian, 1, nano) + _block(endian, 1, binary) + packet + unknown + coarse + simple
    path = tmp_path / "x.pcapng"
    path.write_bytes(first + section + _block(endian, 1, nano) + packet)
    late = 2**32 + 7 + 5 * 10**9
    assert read_pcap(path).time_ns.tolist() == [late, 500_000_000, 0, late]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is no capture: 0 bytes"),
        (b"hello, this is text", "is no pcap or pcapng"),
        (struct.pack("<IHH", 0xA1B2C3D4, 2, 4), "ends inside the file's header"),
        (b"\x1f\x8b and no gzip", "cannot be read"),
        (_PCAP + struct.pack("<IIII", 0, 0, 2**31, 60), "frame 1, at"),
        (_block("<", 0x0A0D0D0A, bytes(16)), "has no byte order"),
        (struct.pack("<III", 0x0A0D0D0A, 13, 0x1A2B3C4D), "13 bytes long"),
        (_SECTION + _block("<", 6, bytes(20)), "interface 0 of 0"),
    ],
)  # fmt: skip
def test_a_file_that_is_no_good_capture_is_one_line(tmp_path, content, said):
    path = tmp_path / "bad"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=said) as caught:
        read_pcap(path)
    assert "\n" not in str(caught.value)


def test_a_folder_and_a_missing_file_are_one_line(tmp_path):
    for path, said in ((tmp_path, "Is a directory"), (tmp_path / "none", "No such file")):
        with pytest.raises(ConfigError, match=said):
            read_pcap(path)


@pytest.mark.parametrize("form", ["pcap", "pcapng"])
def test_a_file_cut_anywhere_gives_the_frames_before_the_cut(tmp_path, form):
    frames, path = _simple(), tmp_path / "x"
    if form == "pcap":
        head = _PCAP
        parts = [struct.pack("<IIII", 0, 0, len(one), len(one)) + one for one in frames]
    else:
        head = _SECTION
        head += _block("<", 1, struct.pack("<HHI", 1, 0, 0))
        about = [struct.pack("<IIIII", 0, 0, 0, len(one), len(one)) for one in frames]
        parts = [_block("<", 6, a + one + bytes(-len(one) % 4)) for a, one in zip(about, frames, strict=True)]
    ends = list(itertools.accumulate(map(len, parts), initial=len(head)))
    whole = head + b"".join(parts)
    for size in range(len(head), len(whole) + 1):
        path.write_bytes(whole[:size])
        found = read_frames(path)
        assert (len(found), found.cut) == (sum(end <= size for end in ends) - 1, size not in ends)


@given(st.binary(max_size=400), st.integers(0, 3))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=200)
def test_any_content_is_read_or_refused(tmp_path, content, form):
    starts = (
        b"",
        _PCAP,
        _SECTION,
        struct.pack("<IHHiIII", 0xA1B23C4D, 2, 4, 0, 0, 65535, 101)
        + struct.pack("<IIII", 0, 0, len(content), len(content)),
    )
    path = tmp_path / "any"
    path.write_bytes(starts[form] + content)
    with contextlib.suppress(ConfigError):
        found = read_pcap(path)
        assert found.num_frames == len(found) + found.num_skipped + found.num_damaged


@given(st.integers(0, 120), st.integers(0, 255), st.integers(0, 119))
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_wrong_byte_of_a_frame_is_survived(tmp_path, place, value, cut):
    frame = bytearray(bytes(Ether() / request(0x0A, 1, payload=bytes(50), header=RETH(), **ENDS)))
    frame[place % len(frame)] = value
    found = _read(tmp_path, [bytes(frame[: max(cut, 1)]), bytes(frame)])
    assert found.num_frames == 2 == len(found) + found.num_skipped + found.num_damaged


def test_times_of_a_talk_are_kept_to_the_nanosecond(tmp_path):
    talk = Talk()
    talk.write(1, 0.001)
    talk.answer(1, 2.5)
    found = read_pcap(talk.save(tmp_path / "x.pcap"))
    assert (found.time_ns - EPOCH_NS).tolist() == [1, 2500]
    assert np.array_equal(found.src, found.dst[::-1])
