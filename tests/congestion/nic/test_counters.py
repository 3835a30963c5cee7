"""Reading counters, the schedule, the log on disk, what Prometheus gets, and the command as its user runs it."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from congestion.nic.commands.watch import watch
from congestion.nic.counters import ethtool as counters_ethtool
from congestion.nic.counters import reader as counters_reader
from congestion.nic.counters.catalogue import MISSING, Counter, find_counters, find_ethtool, find_netdevs
from congestion.nic.counters.detect import Detector
from congestion.nic.counters.export import Exporter, parse_address
from congestion.nic.counters.log import Log, LogWriter, load_log
from congestion.nic.counters.page import _rates
from congestion.nic.counters.reader import NUM_LATE, Reader, Samples, Schedule
from congestion.nic.counters.sampler import Sampled, sample, slow_every
from congestion.nic.counters.signals import Signals
from congestion.nic.counters.simulate import Fault, simulate_log
from congestion.nic.hosts.tree import Tree
from netlayer.errors import CheckFailed, ConfigError, HardwareMissing
from tests.browser import browse, drawn_plots, needs_chromium
from tests.congestion.nic.counter_trees import VENDORS, counter, write_tree, write_vendor


@pytest.fixture
def root(tmp_path: Path) -> Path:
    write_tree(tmp_path / "root")
    return tmp_path / "root"


def keep(log, folder: Path) -> Path:
    writer = LogWriter(folder, log.columns, log.about)
    for begin in range(0, len(log.time_ns), 700):
        writer.add(log.time_ns[begin : begin + 700], log.values[begin : begin + 700])
    writer.close()
    return folder


def _sampled(root: Path, num: int, **only: Any) -> tuple[list[str], np.ndarray, list[int]]:
    """Columns, values and the places of whole samples, of so many each millisecond."""
    values: list[np.ndarray] = []
    ends: list[int] = []

    def take(_time_ns: np.ndarray, new: np.ndarray, is_whole: bool) -> None:
        values.extend(new.copy())
        ends.extend([len(values) - 1] * is_whole)

    with Reader(find_counters(root, **only)) as reader:
        sample(reader, take, 1_000_000, num_samples=num)
        return reader.columns, np.array(values), ends


def _read(reader: Reader) -> dict[str, int]:
    """Every counter, once."""
    found: list[int] = []
    sample(reader, lambda _, values, __: found.extend(values[-1].tolist()), 1_000_000, num_samples=1)
    return dict(zip(reader.columns, found, strict=True))


def test_data_counters_are_in_bytes(root):
    counter(root, 1, "port_xmit_data").write_text("250000000000\n")
    with Reader(find_counters(root)) as reader:
        values = _read(reader)
    assert values["mlx5_1/1/xmit_bytes"] == 10**12
    assert values["mlx5_0/1/np_cnp_sent"] == 1000
    assert not any("lifespan" in column for column in values)


def test_a_reader_sees_each_new_value_without_opening_again(root):
    with Reader(find_counters(root, ["mlx5_0"])) as reader:
        seen = []
        for value in (1000, 7, 2**63 - 1):
            with counter(root, 0, "packet_seq_err").open("r+") as file:
                file.write(f"{value}\n")
                file.truncate()
            seen.append(_read(reader)["mlx5_0/1/packet_seq_err"])
    assert seen == [1000, 7, 2**63 - 1]


def test_slow_counters_are_read_when_asked_for_alone(root):
    columns, values, _ = _sampled(root, 3)
    fast = dict(zip(columns, values[1].tolist(), strict=True))
    assert fast["mlx5_0/1/rcv_bytes"] == 4000
    assert fast["mlx5_0/1/packet_seq_err"] == MISSING


@pytest.mark.parametrize("text", ["N/A\n", "", "\n", "-5\n", "5 kB\n", "0x5\n"])
def test_an_unreadable_counter_is_missing_and_no_more(root, text):
    counter(root, 0, "packet_seq_err").write_text(text)
    with Reader(find_counters(root)) as reader:
        values = _read(reader)
    assert values["mlx5_0/1/packet_seq_err"] == MISSING
    assert values["mlx5_1/1/packet_seq_err"] == 1000


@pytest.mark.parametrize(
    ("text", "value"),
    [("0\n", 0), ("18446744073709551615\n", 2**63 - 1), ("9223372036854775808\n", 2**63 - 1), ("00012", 12)],
)
def test_a_number_of_any_size_is_read(root, text, value):
    counter(root, 0, "packet_seq_err").write_text(text)
    counter(root, 0, "port_rcv_data").write_text(text)
    with Reader(find_counters(root)) as reader:
        values = _read(reader)
    assert values["mlx5_0/1/packet_seq_err"] == value
    assert values["mlx5_0/1/rcv_bytes"] == min(4 * value, 2**63 - 1)


@pytest.mark.skipif(not Path("/sys/class/net/lo/statistics").is_dir(), reason="needs a kernel's own sysfs")
def test_a_file_of_sysfs_is_asked_again_at_each_sample():
    files = [Path("/sys/class/net/lo/statistics", name) for name in ("tx_packets", "rx_packets")]
    with Reader([Counter(f"lo/1/{file.name}", file) for file in files]) as reader:
        before = _read(reader)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
            udp.sendto(b"x", ("127.0.0.1", 9))
        after = _read(reader)
    assert all(after[name] > before[name] >= 0 for name in reader.columns)


def test_all_counters_are_found_where_asked_for(root):
    assert not any(one.column.endswith("port_xmit_packets") for one in find_counters(root))
    assert any(one.column.endswith("port_xmit_packets") for one in find_counters(root, everything=True))


@pytest.mark.parametrize(
    ("folder", "devices", "said"), [("empty", [], "no RDMA device"), ("root", ["mlx5_9"], "there is none")]
)
def test_missing_hardware_is_said(tmp_path, root, folder, devices, said):
    (tmp_path / "empty").mkdir()
    with pytest.raises(HardwareMissing, match=said):
        find_counters(tmp_path / folder, devices)


def test_a_root_that_is_no_folder_is_said(tmp_path):
    with pytest.raises(ConfigError, match="is no folder"):
        find_counters(tmp_path / "nowhere")


def test_links_are_followed_below_the_root_alone(root, tmp_path):
    real, outside = root / "sys/devices/pci0/infiniband/mlx5_0", tmp_path / "outside"
    real.parent.mkdir(parents=True)
    place = root / "sys/class/infiniband/mlx5_0"
    place.rename(real)
    place.symlink_to("../../devices/pci0/infiniband/mlx5_0")
    assert any(one.column == "mlx5_0/1/rcv_bytes" for one in find_counters(root))
    file = real / "ports/1/hw_counters/np_cnp_sent"
    outside.write_text("7\n")
    file.unlink()
    file.symlink_to(outside)
    with pytest.raises(ConfigError, match="leads out of the root"):
        find_counters(root)


def test_names_that_are_none_are_left_out(root, caplog):
    infiniband = root / "sys/class/infiniband"
    (infiniband / "mlx5_0/ports/1/hw_counters/a\nb").write_text("1\n")
    (infiniband / "mlx5_0/ports/one").symlink_to("1")
    (infiniband / "bad\x1bname").symlink_to("mlx5_0")
    found = find_counters(root, everything=True)
    assert {one.column.rpartition("/")[0] for one in found} == {"mlx5_0/1", "mlx5_1/1"}
    assert all(one.column.isprintable() for one in found)
    assert "is no name of a device" in caplog.text


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (
            "bnxt_re0",
            {
                "port_rcv_packets": 2, "rcv_bytes": 3, "xmit_bytes": 5, "local_ack_timeout_err": 6, "packet_seq_err": 7,
                "req_transport_retries_exceeded": 8, "rnr_nak_retry_err": 9, "implied_nak_seq_err": 10,
                "out_of_sequence": 11, "out_of_buffer": 12, "np_cnp_sent": 13, "rp_cnp_handled": 14,
                "np_ecn_marked_roce_packets": 15,
            },
        ),
        (
            "irdma0",
            {
                "ip4InOctets": 1, "ip4OutOctets": 2, "ip6InOctets": 3, "ip6OutOctets": 4, "rp_cnp_handled": 5,
                "np_cnp_sent": 7, "port_rcv_packets": 8, "np_ecn_marked_roce_packets": 9, "rnr_nak_retry_err": 10,
                "packet_seq_err": 11, "implied_nak_seq_err": 12, "local_ack_timeout_err": 13, "out_of_sequence": 14,
            },
        ),
        (
            "ionic_0",
            {
                "xmit_bytes": 1, "rcv_bytes": 2, "port_rcv_packets": 3, "np_cnp_sent": 4, "rp_cnp_handled": 5,
                "np_ecn_marked_roce_packets": 6, "packet_seq_err": 7, "implied_nak_seq_err": 8,
                "req_transport_retries_exceeded": 9, "local_ack_timeout_err": 10, "out_of_sequence": 11,
                "out_of_buffer": 12, "rnr_nak_retry_err": 13,
            },
        ),
    ],
)  # fmt: skip
def test_counters_of_other_drivers_are_those_of_the_same_meaning(tmp_path, device, expected):
    write_vendor(tmp_path, device)
    with Reader(find_counters(tmp_path)) as reader:
        assert _read(reader) == {f"{device}/1/{name}": value for name, value in expected.items()}
        signals = Signals(reader.columns)
    assert signals.missing(f"{device}/1") == ["PFC pauses", "link flaps"]
    with Reader(find_counters(tmp_path, everything=True)) as reader:
        assert len(reader.columns) == len(VENDORS[device])


@pytest.mark.parametrize("name", sorted(VENDORS))
def test_a_timeout_of_any_nic_is_an_alarm(tmp_path, name):
    write_vendor(tmp_path, name)
    alias = {"bnxt_re0": "to_retransmits", "irdma0": "RTO", "ionic_0": "tx_rdma_ack_timeout"}[name]
    with Reader(find_counters(tmp_path)) as reader:
        detector = Detector(reader.columns)
        detector.update(10**9, list(_read(reader).values()))
        (tmp_path / f"sys/class/infiniband/{name}/ports/1/hw_counters/{alias}").write_text("40\n")
        events = detector.update(2 * 10**9, list(_read(reader).values()))
    assert [(event.kind, event.port) for event in events] == [("timeout", f"{name}/1")]


def test_every_device_is_named_with_what_it_cannot_tell(root, tmp_path):
    write_vendor(root, "ionic_0")
    (root / "sys/class/infiniband/ionic_0/ports/1/hw_counters/tx_rdma_ack_timeout").write_text(f"{2**64 - 1}\n")
    (root / "sys/class/infiniband/siw0/ports/1").mkdir(parents=True)
    ib = root / "sys/class/infiniband/mlx5_1/ports/1/link_layer"
    ib.write_text("InfiniBand\n")
    asked = ["--root", str(root), "--seconds", "0.1", "--out", str(tmp_path / "out"), "--json", "-"]
    result = CliRunner().invoke(watch, asked)
    assert result.exit_code == 0, result.output
    notes = [line for line in result.stderr.splitlines() if line.startswith("note: ")]
    assert notes == [
        "note: ionic_0/1: cannot be told: PFC pauses, link flaps, "
        "local_ack_timeout_err (the driver has no value for it)",
        "note: mlx5_0/1: cannot be told: PFC pauses",
        "note: siw0/1: its driver has no counters in sysfs: it is not watched",
        "note: PFC counters of ethtool come from the kernel: none below another --root",
    ]
    arguments = json.loads(result.stdout)["arguments"]
    assert arguments["devices"] == ["ionic_0/1", "mlx5_0/1", "mlx5_1/1", "siw0/1"]
    assert arguments["not_read"]["siw0/1"] == ["anything"]


@pytest.mark.parametrize(
    ("names", "kind"),
    [
        (["pfc_pri3_rx_duration_us", "rx_pfc_ena_frames_pri3"], "pause"),  # bnxt_en
        (["rx_priority_3_xoff.nic", "rx_priority_3_xon.nic"], "pause_frames"),  # ice
        (["link_down_events"], "link_downs"),
    ],
)
def test_pauses_of_other_ethernet_drivers_are_watched(names, kind):
    assert all(map(counters_ethtool.is_watched, names))
    assert Signals([f"a/1/{name}" for name in names]).has(kind).all()


def test_a_counter_of_both_folders_comes_once(root):
    counter(root, 0, "np_cnp_sent").with_name("link_downed").write_text("5\n")
    columns = [one.column for one in find_counters(root)]
    assert len(columns) == len(set(columns))


def _interfaces(root: Path, own: list[str], named: dict[str, list[str]]) -> dict[str, str]:
    """`find_netdevs` of mlx5_0 with these behind its PCI device, and these in the GID tables of its ports."""
    device = root / "sys/class/infiniband/mlx5_0"
    for name in own:
        (device / "device/net" / name).mkdir(parents=True)
    for port, names in named.items():
        ndevs = device / "ports" / port / "gid_attrs/ndevs"
        ndevs.mkdir(parents=True)
        for index, name in enumerate(names):
            (ndevs / str(index)).write_text(f"{name}\n")
    return find_netdevs(Tree(root), ["mlx5_0"])


@pytest.mark.parametrize(
    ("own", "named", "found"),
    [
        (["eth5"], {}, {"mlx5_0/1": "eth5"}),
        (["eth5"], {"1": ["bond0"]}, {"mlx5_0/1": "eth5"}),
        (["eth5", "eth5_0", "eth5_1"], {"1": ["eth5"]}, {"mlx5_0/1": "eth5"}),
        (["eth5_0", "eth6"], {"1": ["eth6.100", "eth6"]}, {"mlx5_0/1": "eth6"}),
        (["eth5", "eth6"], {"1": ["eth5"], "2": ["eth6"]}, {"mlx5_0/1": "eth5", "mlx5_0/2": "eth6"}),
        (["eth5", "eth6"], {"1": [], "2": ["eth5"]}, {"mlx5_0/1": "eth6", "mlx5_0/2": "eth5"}),
        (["eth5", "eth6"], {}, {}),
        ([], {"1": ["veth0"]}, {}),
    ],
)
def test_a_port_has_the_interface_that_its_addresses_name(root, own, named, found):
    assert _interfaces(root, own, named) == found


def test_an_interface_that_cannot_be_told_is_said(root, caplog):
    _interfaces(root, ["eth5", "eth6"], {})
    assert "which of eth5, eth6 is its interface cannot be told" in caplog.text


def test_another_roots_interfaces_are_not_this_kernels(root):
    assert find_ethtool(root) == []


def test_ethtools_layout_is_read(monkeypatch):
    names = ["rx_packets", "rx_prio3_pause", "rx_prio3_pause_duration", "link_down_events_phy"]

    def kernel(_sock, _netdev, request):
        import struct

        command = struct.unpack_from("=I", request)[0]
        if command == 0x37:
            return struct.pack("=IIQI", command, 0, 2, len(names))
        if command == 0x1B:
            return struct.pack("=III", command, 1, len(names)) + b"".join(
                one.encode().ljust(32, b"\0") for one in names
            )
        return struct.pack(f"=II{len(names)}Q", command, len(names), 5, 6, 2**64 - 1, 8)

    monkeypatch.setattr(counters_ethtool, "_ask", kernel)
    found = counters_ethtool.Ethtool.open("eth7", "mlx5_0/1")
    assert found is not None
    assert found.columns == [f"mlx5_0/1/{name}" for name in names[1:]]
    assert found.read() == [6, 2**63 - 1, 8]
    found.close()


def test_an_interface_without_statistics_is_none():
    assert counters_ethtool.Ethtool.open("lo", "x/1") is None
    assert counters_ethtool.Ethtool.open("there-is-none-of-so-long-a-name", "x/1") is None


class _Clock:
    """Time that passes by sleeping, and while a counter is read; in place of the kernel's behind a reader's loop."""

    def __init__(self, reading_ns: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.reading_ns = 10**9, list(reading_ns)
        for name, fake in (("_gettime", self._gettime), ("_sleep", self._sleep), ("_pread", self._pread)):
            monkeypatch.setattr(counters_reader, name, fake)
        monkeypatch.setattr(counters_reader, "_take", counters_reader._take.py_func)

    def _gettime(self, _clock: int, address: int) -> int:
        (ctypes.c_int64 * 2).from_address(address)[:] = divmod(self.now, 10**9)
        return 0

    def _sleep(self, _clock: int, _flags: int, address: int, _left: int) -> int:
        seconds, ns = (ctypes.c_int64 * 2).from_address(address)
        self.now = max(self.now, seconds * 10**9 + ns)
        return 0

    def _pread(self, _handle: int, address: int, _size: int, _at: int) -> int:
        self.now += self.reading_ns.pop(0) if self.reading_ns else 0
        ctypes.memmove(address, b"7\n", 2)
        return 2

    def run(self, root: Path, num: int, period_ns: int) -> tuple[Sampled, list[int]]:
        times: list[int] = []
        with Reader([Counter("a/1/rcv_bytes", counter(root, 0, "port_rcv_data"))]) as reader:
            done = sample(
                reader,
                lambda time_ns, values, _: times.extend(time_ns.tolist()) or np.testing.assert_array_equal(values, 7),
                period_ns,
                num_samples=num,
                clock=lambda: self.now,
            )
        return done, times


@given(reading_us=st.lists(st.integers(0, 25_000), max_size=30))
def test_the_schedule_does_not_drift(reading_us, tmp_path_factory):
    root = tmp_path_factory.mktemp("root")
    write_tree(root)
    period_ns = 10_000_000
    with pytest.MonkeyPatch.context() as monkeypatch:
        done, times = _Clock([us * 1000 for us in reading_us], monkeypatch).run(root, 40, period_ns)
    since = np.array(times) - times[0]
    assert np.all(since % period_ns == 0)  # each on the grid that the first one laid
    assert np.all(np.diff(since) >= period_ns)
    assert since[-1] == (len(times) - 1 + done.skipped - max(0, _passed(reading_us, times))) * period_ns
    assert done.late_us[0] == len(times)


def _passed(reading_us: list[int], times: list[int]) -> int:
    """Samples omitted after the last one that was taken."""
    return reading_us[len(times) - 1] // 10_000 if len(reading_us) >= len(times) else 0


def test_a_sample_that_came_too_late_is_left_out_and_counted(root, monkeypatch):
    done, times = _Clock([0, 25_000_000], monkeypatch).run(root, 4, 10_000_000)
    assert [(one - times[0]) // 10**6 for one in times] == [0, 10, 40, 50]
    assert done.skipped == 2


def test_real_samples_are_as_late_as_the_grid_says(root):
    """The compiled loop, by the machine's clock: when it was due, and how late it was, make the time of a sample."""
    period_ns, times = 2_000_000, []
    schedule = Schedule(time.monotonic_ns(), period_ns)
    with Reader(find_counters(root)) as reader:
        samples = Samples(1, len(reader.columns), np.zeros(NUM_LATE, dtype=np.int64))
        tick = 0
        for _ in range(20):
            samples.late_us[:] = 0
            taken, after = reader.read(schedule, tick, 1, samples)
            assert (taken, samples.late_us.sum()) == (1, 1)
            late_us = int(samples.late_us.argmax())
            since_ns = int(samples.time_ns[0]) - schedule.start_ns
            assert late_us == min((since_ns - tick * period_ns) // 1000, NUM_LATE - 1)
            assert after > tick
            assert after * period_ns > since_ns
            times.append(since_ns)
            tick = after
    assert sorted(times) == times


def test_lateness_is_told_by_its_share():
    done = Sampled()
    done.late_us[[5, 80, NUM_LATE - 1]] = 98, 1, 1
    assert [done.late_at(share) for share in (0.5, 0.98, 0.99, 1.0)] == [6e-6, 6e-6, 81e-6, NUM_LATE / 1e6]


def test_slow_counters_come_every_twentieth_sample_or_fifth_of_a_second(root):
    assert [slow_every(ms * 10**6) for ms in (1, 10, 20, 100, 1000)] == [20, 20, 10, 2, 1]
    columns, values, ends = _sampled(root, 46)
    slow = values[:, columns.index("mlx5_0/1/packet_seq_err")] != MISSING
    assert np.flatnonzero(slow).tolist() == [0, 20, 40, 45]  # the last one is whole, too
    assert ends == [0, 20, 40, 45]  # nothing that alarms look at waits for the next sample
    assert np.all(values[:, columns.index("mlx5_0/1/rcv_bytes")] == 4000)


def test_a_stretch_that_a_signal_ended_goes_on_where_it_was(root):
    """Whatever is interrupted: readings of all counters stay twenty samples apart."""
    with Reader(find_counters(root)) as reader:
        whole, broken = reader.read, iter([1, 7, 0, 5])
        stretches: list[tuple[int, bool]] = []

        def read(schedule: Schedule, tick: int, num: int, into: Samples) -> tuple[int, int]:
            return whole(schedule, tick, min(num, next(broken, num)), into)

        done = sample(
            SimpleNamespace(columns=reader.columns, read=read),
            lambda time_ns, _, is_whole: stretches.append((len(time_ns), is_whole)),
            1_000_000,
            num_samples=41,
        )
    assert stretches == [(1, True), (7, False), (5, False), (8, True), (20, True)]
    assert done.num_samples == 41


def test_a_log_comes_back_as_it_was_written(tmp_path, monkeypatch):
    monkeypatch.setattr("congestion.nic.counters.log._FLUSH_ROWS", 1024)
    log = simulate_log(30, 10)
    log.values[::3, 5] = MISSING
    read = load_log(keep(log, tmp_path / "log"))
    assert len(list((tmp_path / "log").glob("*.parquet"))) == 3
    assert read.columns == log.columns
    np.testing.assert_array_equal(read.time_ns, log.time_ns)
    np.testing.assert_array_equal(read.values, log.values)
    assert read.about["source"] == "simulated"


@pytest.mark.parametrize(("most", "step"), [(100, 1), (100, 20), (2999, 1), (3001, 20), (7, 1)])
def test_a_long_log_is_thinned_to_readings_of_the_slow_counters_and_its_end(tmp_path, most, step):
    log = simulate_log(30, 10)
    folder = keep(log, tmp_path / "log")
    read = load_log(folder, most_rows=most, step=step)
    kept = np.flatnonzero(np.isin(log.time_ns, read.time_ns))
    every = int(kept[1] - kept[0])
    assert len(read.time_ns) <= most + 1
    assert every % step == 0 or every == 1
    assert kept.tolist() == sorted({*range(0, len(log.time_ns), every), len(log.time_ns) - 1})
    np.testing.assert_array_equal(read.values, log.values[kept])
    assert read.num_samples == len(log.time_ns)


def test_a_log_of_any_length_makes_a_page_from_few_samples_and_an_alarm_from_all(tmp_path, monkeypatch):
    folder = keep(simulate_log(120, 100, faults=[Fault("flap", 80.0)]), tmp_path / "log")
    lengths: list[int] = []

    def build(log, *_):
        lengths.append(len(log.time_ns))
        return SimpleNamespace(write=lambda folder: folder / "report.html")

    monkeypatch.setattr("congestion.nic.counters.page.build_page", build)
    monkeypatch.setattr("congestion.nic.commands.watch._MOST_ROWS", 200)
    file = tmp_path / "r.json"
    asked = ["--replay", str(folder), "--out", str(tmp_path / "out"), "--json", str(file)]
    result = CliRunner().invoke(watch, asked)
    assert "flap on mlx5_2/1" in str(result.exception)
    record = json.loads(file.read_text())
    assert record["arguments"]["num_samples"] == len(load_log(folder).time_ns) > 1000
    assert lengths[0] <= 201


def test_a_page_of_few_samples_shows_the_same_rates():
    log = simulate_log(120, 100)
    edges = np.linspace(log.time_ns[0], log.time_ns[-1], 7)
    place = log.columns.index("mlx5_0/1/rcv_bytes")
    kept = np.union1d(np.arange(0, len(log.time_ns), 6), [len(log.time_ns) - 1])
    thin = Log(log.columns, log.time_ns[kept], log.values[kept], log.about)
    np.testing.assert_allclose(_rates(thin, place, edges), _rates(log, place, edges), rtol=0.05)


def test_a_log_that_was_cut_off_has_all_whole_files(tmp_path, monkeypatch):
    monkeypatch.setattr("congestion.nic.counters.log._FLUSH_ROWS", 1024)
    folder = keep(simulate_log(30, 10), tmp_path / "log")
    (folder / "part-00002.4711").write_bytes(b"half")
    sorted(folder.glob("*.parquet"))[-1].unlink()
    assert len(load_log(folder).time_ns) >= 2000


def _damage(folder: Path, kind: str) -> None:
    file = folder / "part-00000.parquet"
    if kind == "bytes":
        file.write_bytes(file.read_bytes()[:100])
    elif kind == "other":
        pq.write_table(pa.table({"a": [1]}), file)
    elif kind == "words":
        table = pq.read_table(file)
        words = pa.array(["x"] * len(table))
        pq.write_table(table.set_column(1, table.schema.names[1], words), file)
    elif kind == "nested":
        deep = {b"netlayer.nic.counters": b"[" * 100_000}
        pq.write_table(pq.read_table(file).replace_schema_metadata(deep), file)
    elif kind == "columns":
        pq.write_table(pq.read_table(file).drop_columns(["mlx5_0/1/rcv_bytes"]), folder / "part-00001.parquet")
    elif kind == "twice":
        (folder / "part-00009.parquet").write_bytes(file.read_bytes())
    else:
        file.unlink()


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("bytes", "is no whole parquet file"),
        ("other", "is no log of NIC counters"),
        ("words", "has no whole numbers"),
        ("columns", "has other counters"),
        ("nested", "has notes that are no JSON object"),
        ("twice", "goes back in time"),
        ("none", "holds no *.parquet"),
    ],
)
def test_a_damaged_log_is_one_clear_line(tmp_path, kind, said):
    folder = keep(simulate_log(5, 10), tmp_path / "log")
    _damage(folder, kind)
    result = CliRunner().invoke(watch, ["--replay", str(folder)])
    assert isinstance(result.exception, ConfigError)
    assert said in str(result.exception)


def test_two_logs_do_not_mix(tmp_path):
    folder = keep(simulate_log(5, 10), tmp_path / "log")
    with pytest.raises(ConfigError, match="holds an earlier log"):
        LogWriter(folder, ["a/1/b"], {})


def test_prometheus_gets_counters_rates_and_alarms():
    log = simulate_log(60, 100, faults=[Fault("flap", 30.0)])
    detector = Detector(log.columns)
    exporter = Exporter(detector, log.columns)
    port, stop = exporter.serve("127.0.0.1", 0)
    try:
        for time_ns, values in zip(log.time_ns.tolist(), log.values.tolist(), strict=True):
            detector.update(time_ns, values)
            exporter.update(values)
        text = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10).read().decode()
    finally:
        stop()
    last = log.values[-1, log.columns.index("mlx5_3/1/rcv_bytes")]
    line = next(line for line in text.splitlines() if 'counter="rcv_bytes",device="mlx5_3"' in line)
    assert line.startswith("netlayer_nic_counter_total{")
    assert float(line.split()[-1]) == pytest.approx(float(last))
    assert 'netlayer_nic_alarms_total{kind="flap",port="mlx5_2/1"} 1.0' in text
    assert 'netlayer_nic_pause_share{device="mlx5_0",port="1"}' in text
    assert f"netlayer_nic_samples_total {len(log.time_ns)}.0" in text


@pytest.mark.parametrize(
    ("text", "address"), [("9400", ("127.0.0.1", 9400)), ("0.0.0.0:1", ("0.0.0.0", 1)), ("[::1]:9", ("::1", 9))]
)
def test_the_address_is_loopback_unless_given(text, address):
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", "x", ":1", "1:x", "70000", "-1", "٣"])
def test_what_is_no_address_is_refused(text):
    with pytest.raises(ConfigError, match="ADDRESS"):
        parse_address(text)


def test_a_port_in_use_is_said(root, tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        asked = ["--root", str(root), "--seconds", "1", "--prometheus", port, "--out", str(tmp_path / "out")]
        result = CliRunner().invoke(watch, asked)
    assert isinstance(result.exception, ConfigError)
    assert "cannot be listened on" in str(result.exception)


def test_watching_writes_log_record_and_report(root, tmp_path):
    out = tmp_path / "out"
    result = CliRunner().invoke(
        watch, ["--root", str(root), "--period-ms", "10", "--seconds", "0.3", "--out", str(out), "--json", "-"]
    )
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout)
    assert record["source"] == "simulated"  # another root is no host
    assert record["arguments"]["ports"] == ["mlx5_0/1", "mlx5_1/1"]
    assert record["arguments"]["samples"] + record["arguments"]["skipped"] >= 31
    assert len(load_log(out).time_ns) == record["arguments"]["samples"]
    assert "mlx5_0/1: cannot be told: PFC pauses" in result.stderr
    assert (out / "report.html").is_file()
    again = CliRunner().invoke(watch, ["--root", str(root), "--seconds", "1", "--out", str(out)])
    assert "holds an earlier run" in str(again.exception)


@pytest.mark.parametrize("number", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_keeps_what_was_sampled(root, tmp_path, number):
    out = tmp_path / "out"
    code = "from netlayer.cli import run; from congestion.nic.commands.watch import watch; run(watch, 'watch')"
    command = [sys.executable, "-c", code, "--root", str(root), "--period-ms", "20", "--out", str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            if "Ctrl-C ends it" in line:
                break
        time.sleep(0.5)
        with counter(root, 0, "link_downed").open("r+") as file:
            file.write("1001\n")
        time.sleep(0.5)
        os.kill(process.pid, number)
        stdout, stderr = process.communicate(timeout=200)
    assert process.returncode == 1, stderr
    assert "flap" in stdout
    assert "alarm: flap on mlx5_0/1" in stderr
    assert len(load_log(out).time_ns) >= 2


def test_a_replay_says_what_was_planted_and_fails(tmp_path):
    folder = keep(simulate_log(120, 100, faults=[Fault("silent", 80.0, 10.0, nic=4)]), tmp_path / "log")
    result = CliRunner().invoke(watch, ["--replay", str(folder), "--json", str(tmp_path / "r.json")])
    assert isinstance(result.exception, CheckFailed)
    assert "silent on mlx5_4/1" in str(result.exception)
    record = json.loads((tmp_path / "r.json").read_text())
    assert record["source"] == "simulated"
    silent = next(row for row in record["rows"] if row["kind"] == "silent")
    assert silent["after_s"] == pytest.approx(80, abs=1.5)


def test_a_kept_log_tells_what_was_told_live(root, tmp_path, monkeypatch):
    page = SimpleNamespace(write=lambda folder: folder / "report.html")
    monkeypatch.setattr("congestion.nic.counters.page.build_page", lambda *_: page)
    ended = threading.Event()

    def trouble() -> None:
        number = 1000
        while not ended.wait(0.02):
            number += 100_000
            for name in ("link_downed", "port_rcv_packets", "np_ecn_marked_roce_packets"):
                with counter(root, 0, name).open("r+") as file:
                    file.write(f"{number}\n")

    thread = threading.Thread(target=trouble)
    thread.start()
    asked = ["--root", str(root), "--period-ms", "20", "--seconds", "1.5", "--out", str(tmp_path / "w"), "--json", "-"]
    try:
        live = CliRunner().invoke(watch, asked)
    finally:
        ended.set()
        thread.join()
    again = CliRunner().invoke(watch, ["--replay", str(tmp_path / "w"), "--json", "-"])
    told = json.loads(live.stdout)["rows"]
    assert "flap" in {row["kind"] for row in told}
    assert json.loads(again.stdout)["rows"] == told


def test_a_healthy_replay_ends_well(tmp_path):
    folder = keep(simulate_log(60, 100), tmp_path / "log")
    result = CliRunner().invoke(watch, ["--replay", str(folder)])
    assert result.exit_code == 0, result.output
    assert "none" in result.stdout


def test_a_limit_can_be_moved(tmp_path):
    folder = keep(simulate_log(60, 100, faults=[Fault("pfc-storm", 30.0)]), tmp_path / "log")
    result = CliRunner().invoke(watch, ["--replay", str(folder), "--set", "pause_share=0.7"])
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (["--set", "pause_shore=1"], "did you mean pause_share?"),
        (["--set", "pause_share=2"], "--set pause_share = 2"),
        (["--set", "pause_share"], "must read a.b=value"),
        (["--replay", "x", "--period-ms", "5"], "--period-ms: has no effect on a kept log"),
        (["--replay", "/nowhere"], "holds no *.parquet"),
    ],
)
def test_bad_options_are_one_clear_line(asked, said):
    result = CliRunner().invoke(watch, asked)
    assert isinstance(result.exception, ConfigError)
    assert said in str(result.exception)


@pytest.mark.slow
@needs_chromium
def test_a_browser_draws_the_page(tmp_path):
    faults = [Fault("pfc-storm", 80.0), Fault("retransmission", 90.0)]
    folder = keep(simulate_log(120, 100, faults=faults), tmp_path / "log")
    CliRunner().invoke(watch, ["--replay", str(folder), "--out", str(tmp_path / "out")])
    document, console = browse(tmp_path / "out" / "report.html", tmp_path)
    assert not console
    drawn = drawn_plots(document)
    assert set(drawn) == {"traffic", "marks", "pauses", "errors"}
    assert all(drawn.values())
