from ipaddress import IPv4Address
from pathlib import Path

import numpy as np
import pytest
from scapy.layers.inet import ICMP, IP, TCP, UDP, IPOption_Router_Alert
from scapy.layers.l2 import ARP, CookedLinux, Dot1Q, Ether
from scapy.packet import Raw
from scapy.utils import RawPcapNgWriter, RawPcapWriter

from netlayer.errors import ConfigError
from tests.topology.probe_network import DST, SRC, answer, exchange, sweep
from topology.probe.capture import Capture, answers, probes, read_pcap, write_pcap
from topology.probe.packets import build

_ROUTER = "172.16.0.1"


def _capture(packets: list[bytes]) -> Capture:
    return Capture.of(packets, range(1, len(packets) + 1))


def test_probes_and_their_answers_are_told_apart() -> None:
    asked = sweep(rounds=2)
    capture = _capture(exchange(asked, lambda port, ttl, round_: _ROUTER if ttl < 3 else DST))
    sent, back = probes(capture), answers(capture)
    assert len(sent) == len(back) == len(asked)
    for name in ("src_ip", "dst_ip", "sport", "ttl", "round"):
        assert (getattr(sent, name) == getattr(back, name)).all()
    assert (back.time_ns == sent.time_ns + 1).all()
    assert (back.reached == (back.ttl == 3)).all()
    assert set(back.router[back.ttl == 1].tolist()) == {int(IPv4Address(_ROUTER))}
    assert not sent.router.any()


def test_eight_quoted_bytes_of_udp_are_enough_and_fewer_are_not() -> None:
    probe = build(sweep())[0].tobytes()
    packets = [answer(probe, _ROUTER, quoted) for quoted in (28, 27)]
    assert len(answers(_capture(packets))) == 1


def test_ip_options_and_traffic_of_others_do_not_confuse() -> None:
    probe = build(sweep())[0].tobytes()
    optional = IP(src=_ROUTER, dst=SRC, options=[IPOption_Router_Alert()]) / ICMP(type=11) / Raw(probe)
    others = [
        IP(src=SRC, dst=DST) / TCP(dport=4791),
        IP(src=SRC, dst=DST, id=0x0100) / UDP(sport=50000, dport=4791) / Raw(bytes(16)),
        IP(src=SRC, dst=DST, id=0x0100) / UDP(sport=50000, dport=53) / Raw(bytes(16)),
        IP(src=_ROUTER, dst=SRC) / ICMP(type=8) / Raw(probe),
        IP(src=_ROUTER, dst=SRC, frag=5) / Raw(bytes(ICMP(type=11) / Raw(probe))),
        IP(src=SRC, dst=SRC) / ICMP(type=3, code=1) / Raw(probe),
    ]
    capture = _capture([bytes(optional), *(bytes(packet) for packet in others), probe[:30]])
    assert len(answers(capture)) == 1
    assert len(probes(capture)) == 0


@pytest.mark.parametrize("link", ["ethernet", "raw"])
def test_a_written_file_reads_back(tmp_path: Path, link: str) -> None:
    packets = exchange(sweep(), lambda *_: _ROUTER)
    front = bytes(Ether(src="02:00:00:00:00:01", dst="02:00:00:00:00:02", type=0x0800)) if link == "ethernet" else b""
    frames = [front + packet for packet in packets]
    stamps = [1_700_000_000_000_000_001 + n for n in range(len(frames))]
    assert write_pcap(tmp_path / "a.pcap", frames, stamps, link) == len(frames)  # type: ignore[arg-type]
    capture = read_pcap(tmp_path / "a.pcap")
    assert capture.time_ns.tolist() == stamps
    assert (capture.packets == Capture.of(packets, stamps).packets).all()
    assert (capture.lengths == Capture.of(packets, stamps).lengths).all()


def test_tags_and_cooked_captures_and_pcapng_are_read(tmp_path: Path) -> None:
    inner = IP(build(sweep())[0].tobytes())
    frames = [
        Ether() / inner,
        Ether() / Dot1Q(vlan=5) / inner,
        Ether(type=0x88A8) / Dot1Q(vlan=5) / Dot1Q(vlan=6) / inner,
    ]
    files = {"ether.pcapng": [*frames, Ether() / ARP()], "cooked.pcap": [CookedLinux(proto=0x0800) / inner]}
    with RawPcapNgWriter(str(tmp_path / "ether.pcapng")) as writer:
        writer.linktype = 1
        writer.write_header(None)
        for frame in files["ether.pcapng"]:
            writer.write_packet(bytes(frame), sec=1.5)
    with RawPcapWriter(str(tmp_path / "cooked.pcap"), linktype=113) as writer:
        writer.write_header(None)
        writer.write_packet(bytes(files["cooked.pcap"][0]), sec=1, usec=500_000)
    for name, sent in files.items():
        capture = read_pcap(tmp_path / name)
        found = probes(capture)
        assert (len(found), capture.skipped) == (len([f for f in sent if IP in f]), len([f for f in sent if ARP in f]))
        assert set(found.time_ns.tolist()) == {1_500_000_000}


def test_files_that_are_no_captures_end_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "text").write_text("no capture at all, and long enough to be one")
    (tmp_path / "empty").touch()
    with RawPcapWriter(str(tmp_path / "wifi"), linktype=105) as writer:
        writer.write_header(None)
        writer.write_packet(bytes(64), sec=0, usec=0)
    for name, rule in {
        "text": "is no pcap",
        "empty": "is no pcap",
        "gone": "cannot be read",
        "wifi": "link type 105",
    }.items():
        with pytest.raises(ConfigError, match=f"--read = .*{name}: .*{rule}"):
            read_pcap(tmp_path / name)
    with pytest.raises(ConfigError, match=r"--pcap = .*cannot be written"):
        write_pcap(tmp_path / "none" / "a.pcap", [], [], "raw")


def test_an_empty_capture_has_no_probes(tmp_path: Path) -> None:
    write_pcap(tmp_path / "a.pcap", [], [], "raw")
    capture = read_pcap(tmp_path / "a.pcap")
    assert len(probes(capture)) == len(answers(capture)) == len(np.unique(capture.time_ns)) == 0
