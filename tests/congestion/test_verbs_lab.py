"""Real verbs over Soft-RoCE, in the virtual machine of `make rdma-lab`: data, timers, flaps, captures."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from congestion.nic.capture.pcap import Packets, read_pcap
from congestion.nic.capture.streams import analyse
from congestion.retransmit.timers import nominal_s, schedule
from congestion.verbs.measure import Plan, QpError, QpSettings, connected, devices, measure_pair, pattern
from congestion.verbs.queue_pair import HostMemory
from congestion.verbs.remote import measure_remote, serve
from lab.cable import Cable, capture
from lab.flaps import run_flap
from netlayer.errors import CheckFailed, ConfigError
from topology.ecmp.source_port import flow_label_source_port, udp_source_port

pytestmark = pytest.mark.rdma

_IN_LAB = "NETLAYER_RDMA_LAB" in os.environ
_BYTES = 100_000
_RETRIES_USED_UP = 12  # IBV_WC_RETRY_EXC_ERR


@pytest.fixture(scope="module", autouse=True)
def lab() -> None:
    """Everywhere else these are skipped; in the lab, where all is there, they are not."""
    found = {device.name: device.netdev for device in devices()}
    if found != {"rxe0": "veth0", "rxe1": "veth1"}:
        assert not _IN_LAB, f"the lab has other devices: {found}"
        pytest.skip("no cable between two Soft-RoCE devices; run: make rdma-lab")


@pytest.fixture
def cable() -> Iterator[Cable]:
    with Cable() as made:
        yield made


def _write(settings: QpSettings, num_bytes: int = _BYTES) -> tuple[int, int]:
    """One WRITE from rxe0 to rxe1, checked; the queue pair numbers of both."""
    with connected("rxe0", "rxe1", num_bytes, settings) as (sender, receiver):
        sender.memory.fill(pattern(1, num_bytes), 0)
        receiver.memory.fill(bytes(num_bytes), 0)
        sender.write(receiver.address, num_bytes, 0, 0)
        sender.wait(1, 30)
        assert receiver.memory.read(num_bytes, 0) == pattern(1, num_bytes)
        return sender.address.qpn, receiver.address.qpn


def _captured(path: Path) -> Packets:
    packets = read_pcap(path)
    assert len(packets)
    assert not packets.cut
    assert (packets.icrc == 1).all()
    return packets


def _sent(packets: Packets) -> dict[str, object]:
    """The stream of the one requester."""
    streams = [row for row in analyse(packets) if row["table"] == "stream" and row["requests"]]
    assert len(streams) == 1, streams
    return streams[0]


@pytest.mark.parametrize(("timeout", "retry_cnt"), [(0, 7), (8, 0), (14, 7), (18, 3), (31, 6)])
def test_a_queue_pair_has_the_timers_that_were_asked_for(timeout, retry_cnt):
    settings = QpSettings(timeout=timeout, retry_cnt=retry_cnt, rnr_retry=5, min_rnr_timer=20)
    with connected("rxe0", "rxe1", 4096, settings) as (sender, receiver):
        wanted = {"timeout": timeout, "retry_cnt": retry_cnt, "rnr_retry": 5, "min_rnr_timer": 20}
        assert sender.timers() == wanted
        assert receiver.timers() == wanted


@pytest.mark.parametrize(("source", "target", "path"), [("rxe0", "rxe0", "loopback"), ("rxe0", "rxe1", "pair")])
def test_writes_and_sends_arrive_byte_for_byte(source, target, path):
    plan = Plan(sizes=[1, 4097, 65_536], messages=20, window=8, repeats=2, pings=5)
    rows = measure_pair(source, target, plan)
    assert [(row["test"], row["bytes"]) for row in rows] == [
        (f"{kind}_{what}", size)
        for kind in ("write", "send")
        for size in (1, 4097, 65_536)
        for what in ("bandwidth", "latency")
    ]
    assert {row["path"] for row in rows} == {path}
    assert all(row["wrong_bytes"] == 0 < row["checked_bytes"] for row in rows)
    assert all(0 < row["median_us"] <= row["p99_us"] for row in rows if row["test"].endswith("latency"))


def test_a_byte_that_arrives_wrong_fails_the_measurement(monkeypatch):
    read = HostMemory.read
    monkeypatch.setattr(HostMemory, "read", lambda memory, size, at: read(memory, size, at)[:-1] + b"\0")
    monkeypatch.setattr("congestion.verbs.measure.pattern", lambda _seed, size: b"\1" * size)
    with pytest.raises(CheckFailed, match="1 of 4096 bytes of a write arrived wrong"):
        measure_pair("rxe0", "rxe1", Plan(sizes=[4096], window=1))


def test_a_client_measures_to_a_server_over_a_socket():
    ports: list[int] = []
    listening = threading.Event()

    def ready(port: int) -> None:
        ports.append(port)
        listening.set()

    served: list[int] = []
    serving = threading.Thread(target=lambda: served.append(serve("127.0.0.1", 0, "rxe1", clients=1, ready=ready)))
    serving.start()
    assert listening.wait(10)
    plan = Plan(sizes=[1024], messages=8, window=4, repeats=1, pings=3)
    rows = measure_remote("127.0.0.1", ports[0], "rxe0", plan)
    serving.join(30)
    assert served == [1]
    assert {(row["path"], row["remote_device"], row["wrong_bytes"]) for row in rows} == {("remote", "rxe1", 0)}


def test_a_source_port_cannot_be_set_here_and_that_is_said():
    with pytest.raises(ConfigError, match="mlx5 alone"), connected("rxe0", "rxe1", 4096, QpSettings(udp_sport=50_000)):
        pass


@pytest.mark.parametrize("mtu", [256, 1024, 4096])
def test_a_captured_write_is_what_was_sent(tmp_path, mtu):
    # Timers of 4 s: on a loaded machine, QEMU above all, an answer within the default ones may come too late.
    with capture(tmp_path / "x.pcap"):
        _write(QpSettings(mtu=mtu, timeout=20))
    packets = _captured(tmp_path / "x.pcap")
    row = _sent(packets)
    assert (row["messages"], row["payload_bytes"], row["retransmitted"]) == (1, _BYTES, 0)
    assert row["requests"] == -(-_BYTES // mtu)
    assert row["ect_packets"] == row["packets"]
    assert row["acks"] > 0
    assert row["rtt_median_us"] > 0


def test_source_ports_follow_from_both_queue_pair_numbers(tmp_path):
    with capture(tmp_path / "x.pcap"):
        numbers = dict(_write(QpSettings(), 64) for _ in range(24))
    rows = [row for row in analyse(_captured(tmp_path / "x.pcap")) if row["table"] == "stream" and row["requests"]]
    assert {row["sqpn"]: row["dqpn"] for row in rows} == numbers
    ports = udp_source_port(np.array([row["sqpn"] for row in rows]), np.array([row["dqpn"] for row in rows]))
    assert [row["sports"] for row in rows] == [[port] for port in ports.tolist()]
    assert len(set(ports.tolist())) == 24


@pytest.mark.parametrize("label", [1, 0x3FFF, 0xABCDE, 0xFFFFF])
def test_a_flow_label_chooses_the_source_port(tmp_path, label):
    with capture(tmp_path / "x.pcap"):
        _write(QpSettings(flow_label=label), 64)
    assert _sent(_captured(tmp_path / "x.pcap"))["sports"] == [int(flow_label_source_port(np.array([label]))[0])]


def test_congestion_marks_are_seen_and_leave_the_crc_right(tmp_path, cable):
    with capture(tmp_path / "x.pcap"), cable.losing(30, marks=True):
        _write(QpSettings(traffic_class=106))
    row = _sent(_captured(tmp_path / "x.pcap"))
    assert 0 < row["ce_packets"] < row["packets"]
    assert row["ce_packets"] + row["ect_packets"] == row["packets"]
    assert (row["cnps_received"], row["retransmitted"]) == (0, 0)  # rxe answers no mark


def test_lost_packets_are_sent_again_and_the_data_is_right(tmp_path, cable):
    plan = Plan(sizes=[5120], kinds=["write"], messages=80, window=16, repeats=1, pings=5)
    with capture(tmp_path / "x.pcap", "veth1"), cable.losing(2):
        rows = measure_pair("rxe0", "rxe1", replace(plan, settings=QpSettings(timeout=12, retry_cnt=6, mtu=256)))
    assert {row["wrong_bytes"] for row in rows} == {0}
    row = _sent(_captured(tmp_path / "x.pcap"))
    assert row["naks_sequence"] > 0
    assert row["retransmitted"] > 0
    assert row["messages"] == 2 * 80 + 5 + 3


@pytest.mark.parametrize(("timeout", "retry_cnt"), [(12, 3), (14, 2), (16, 1)])
def test_a_dead_path_takes_as_many_sends_as_the_closed_form_has(tmp_path, cable, timeout, retry_cnt):
    settings = QpSettings(timeout=timeout, retry_cnt=retry_cnt)
    timers = schedule("rxe", timeout, retry_cnt)
    with capture(tmp_path / "x.pcap"), connected("rxe0", "rxe1", 64, settings) as (sender, receiver):
        cable.cut()
        sender.write(receiver.address, 64, 0, 0)
        with pytest.raises(QpError, match="retry exceeded") as caught:
            sender.wait(1, 30)
        assert caught.value.status == _RETRIES_USED_UP
        cable.mend()
    runs = [row for row in analyse(_captured(tmp_path / "x.pcap")) if row["table"] == "retransmission"]
    assert len(runs) == len(timers.sends_s) == retry_cnt
    assert {run["cause"] for run in runs} == {"timeout"}
    # Not sooner, but for ticks that the machine misses; how much later is its own affair.
    assert all(run["waited_s"] >= 0.75 * nominal_s(timeout) for run in runs)


def test_a_flap_within_the_timers_is_outlived(cable):
    row = run_flap(cable, 14, 6, 0.1)
    assert (row["survived"], row["data_right"], row["predicted_survives"]) == (True, True, True)
    assert row["ended_s"] > row["cut_for_s"]


def test_a_flap_beyond_the_timers_kills_the_queue_pair(cable):
    row = run_flap(cable, 14, 1, 1.0)
    assert (row["survived"], row["predicted_survives"]) == (False, False)
    assert row["ended_s"] < row["cut_for_s"]


def test_seven_retries_are_without_end(cable):
    row = run_flap(cable, 8, 7, 0.3)  # 7 x 1 ms would be over long before
    assert (row["survived"], row["data_right"], row["predicted_survives"]) == (True, True, True)


def test_a_queue_pair_outlives_flap_after_flap(cable):
    with connected("rxe0", "rxe1", 4096, QpSettings(timeout=14, retry_cnt=6)) as (sender, receiver):
        for turn in range(5):
            sender.memory.fill(pattern(turn, 4096), 0)
            cable.cut()
            sender.write(receiver.address, 4096, 0, 0)
            threading.Event().wait(0.05)
            cable.mend()
            sender.wait(1, 10)
            assert receiver.memory.read(4096, 0) == pattern(turn, 4096)
