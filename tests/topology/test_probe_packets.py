import numpy as np
import pytest
from scapy.contrib.roce import BTH
from scapy.layers.inet import IP, UDP
from scapy.layers.l2 import Ether

from tests.topology.probe_network import DST, SRC, sweep
from topology.probe.packets import Sweep, build, icrc, with_ethernet

# A congestion notification as a ConnectX-4 Lx sent it, IP header to ICRC (published in scapy's tests).
_CAPTURED = bytes.fromhex(
    "45c2003c718c4000401191610a0011010a001201000012b7002800008100ffff40000118" + 20 * "00" + "82fd002a"
)


def test_icrc_is_that_of_a_real_nic() -> None:
    packet = np.frombuffer(_CAPTURED, dtype=np.uint8)[None, :]
    assert icrc(packet[:, :-4]).astype("<u4").tobytes() == _CAPTURED[-4:]


def test_icrc_survives_what_routers_change_and_nothing_else() -> None:
    packet = build(sweep())[:1]
    sealed = icrc(packet[:, :-4])[0]
    for at in range(packet.shape[1] - 4):
        changed = packet.copy()
        changed[0, at] ^= 0x55
        assert (icrc(changed[:, :-4])[0] == sealed) == (at in {1, 8, 10, 11, 26, 27, 32})


@pytest.mark.parametrize("payload_bytes", [0, 64])
def test_scapy_builds_the_same_bytes(payload_bytes: int) -> None:
    asked = Sweep(0x0A000007, 0x0A010009, np.array([49152, 65535]), np.array([1, 64, 255]), 2, 77, 0, payload_bytes)
    packets = build(asked)
    assert packets.shape == (len(asked), asked.packet_bytes)
    for row in packets:
        parsed = IP(row.tobytes())
        del parsed[BTH].icrc, parsed[IP].chksum, parsed[IP].len, parsed[UDP].len
        assert bytes(parsed) == row.tobytes()


def test_every_ttl_of_every_port_in_every_round_once() -> None:
    parsed = [IP(row.tobytes()) for row in build(sweep(range(50000, 50003), range(1, 5), rounds=2))]
    assert {(p.src, p.dst, p[UDP].dport, p[UDP].chksum, p[BTH].dqpn) for p in parsed} == {(SRC, DST, 4791, 0, 0xFFFFF0)}
    assert [(p.id & 0xFF, p.sport, p.ttl) for p in parsed] == [
        (round_, port, ttl) for round_ in range(2) for port in range(50000, 50003) for ttl in range(1, 5)
    ]
    assert all(p.id >> 8 == p.ttl for p in parsed)


def test_ethernet_frames_carry_the_same_packets() -> None:
    packets = build(sweep())
    frame = Ether(with_ethernet(packets, "02:00:00:00:00:01", "02:00:00:00:00:02")[3].tobytes())
    assert (frame.src, frame.dst, frame.type) == ("02:00:00:00:00:01", "02:00:00:00:00:02", 0x0800)
    assert bytes(frame[IP]) == packets[3].tobytes()


@pytest.mark.parametrize("change", [{"rounds": 257}, {"qpn": 1}, {"tos": 256}, {"payload_bytes": 6}, {"rounds": 0}])
def test_values_out_of_range_are_refused(change: dict[str, int]) -> None:
    (name,) = change
    with pytest.raises(ValueError, match=f"^{name} = "):
        Sweep(1, 2, np.array([50000]), np.array([1]), **change)


def test_ports_ttls_and_macs_are_checked() -> None:
    with pytest.raises(ValueError, match=r"ports = 65536: 1\.\.65535"):
        Sweep(1, 2, np.array([1, 65536]), np.array([1]))
    with pytest.raises(ValueError, match="ttls = none"):
        Sweep(1, 2, np.array([1]), np.array([], dtype=np.int64))
    with pytest.raises(ValueError, match="MAC address '02:00'"):
        with_ethernet(build(sweep()), "02:00", "02:00:00:00:00:02")
