"""Counters of the hardware: what NVML says of a GPU and sysfs of ports, and the thread that reads them."""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from collectives.watch import nvml
from collectives.watch.monitor import Monitor
from collectives.watch.nic import NicCounters
from collectives.watch.nvml import Nvml
from collectives.watch.sampler import Sampler
from netlayer.errors import HardwareMissing
from netlayer.observe.events import Counter, Mark, Origin
from tests.collectives.test_monitor import Kept

ORIGIN = Origin(run="t", rank=3)
S = 1_000_000_000


class FakeLibrary:
    """NVML with one GPU; functions write through pointers as the driver's do.

    Args:
        lacks: functions that this driver has not.
        codes: what a function returns instead of success.
    """

    def __init__(self, lacks: tuple[str, ...] = (), codes: dict[str, int] | None = None) -> None:
        self.lacks, self.codes = lacks, codes or {}
        self.power_mw, self.clock_mhz, self.celsius, self.reasons = 512_345, 1755, 61, 0
        self.kib = {138: 1000, 139: 2000}
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if name in self.lacks or not name.startswith("nvml"):
            raise AttributeError(name)

        def call(*arguments: Any) -> int:
            self.calls.append(name)
            if name in self.codes:
                return self.codes[name]
            into = arguments[-1]._obj if arguments and hasattr(arguments[-1], "_obj") else None
            values = {
                "nvmlDeviceGetPowerUsage": self.power_mw,
                "nvmlDeviceGetClockInfo": self.clock_mhz,
                "nvmlDeviceGetTemperature": self.celsius,
                "nvmlDeviceGetCurrentClocksThrottleReasons": self.reasons,
            }
            if name == "nvmlDeviceGetFieldValues":
                assert into is not None
                into.nvmlReturn, into.value = 0, self.kib[into.fieldId]
            elif name in values:
                assert into is not None
                into.value = values[name]
            return 0

        return call


def read(gpu: Nvml, at_s: int) -> dict[str, Counter]:
    return {each.name: each for each in gpu.sample(ORIGIN, at_s * S, 7) if isinstance(each, Counter)}


def test_a_gpu_says_its_power_clock_and_temperature() -> None:
    counters = read(Nvml("GPU-1", "GPU 3", FakeLibrary()), 1)
    assert {name: (each.value, each.unit) for name, each in counters.items()} == {
        "gpu.power": (512.345, "W"),
        "gpu.sm_clock": (1755.0, "MHz"),
        "gpu.temperature": (61.0, "C"),
    }
    assert {(each.step, each.origin.rank) for each in counters.values()} == {(7, 3)}


def test_nvlink_counts_what_was_moved_between_two_readings() -> None:
    library = FakeLibrary()
    gpu = Nvml("GPU-1", "GPU 3", library)
    read(gpu, 1)
    library.kib = {138: 1500, 139: 2000}
    counters = read(gpu, 2)
    moved = counters["nvlink.tx_bytes"]
    assert (moved.value, moved.unit, moved.start_ns, moved.end_ns) == (500 * 1024, "bytes", S, 2 * S)
    assert moved.attributes == {"port": "GPU 3"}
    assert counters["nvlink.rx_bytes"].value == 0
    library.kib = {138: 3, 139: 2000}  # the counter was reset
    assert "nvlink.tx_bytes" not in read(gpu, 3)


def test_throttling_is_a_mark_when_it_begins_and_when_it_ends() -> None:
    library = FakeLibrary()
    gpu = Nvml(library=library)

    def marks(reasons: int) -> list[tuple[str, object]]:
        library.reasons = reasons
        found = [each for each in gpu.sample(ORIGIN, S, 7) if isinstance(each, Mark)]
        return [(each.name, (each.attributes or {})["reason"]) for each in found]

    assert marks(0x1) == []  # idle is no throttling
    assert marks(0x40 | 0x4) in (
        [("throttle", "hardware thermal slowdown"), ("throttle", "power cap")],
        [("throttle", "power cap"), ("throttle", "hardware thermal slowdown")],
    )
    assert marks(0x40) == [("throttle_end", "power cap")]
    assert marks(0x40) == []
    assert marks(0) == [("throttle_end", "hardware thermal slowdown")]


def test_what_a_driver_does_not_know_is_asked_once() -> None:
    library = FakeLibrary(lacks=("nvmlDeviceGetFieldValues",), codes={"nvmlDeviceGetPowerUsage": 3})
    gpu = Nvml(library=library)
    assert read(gpu, 1).keys() == read(gpu, 2).keys() == {"gpu.sm_clock", "gpu.temperature"}
    assert library.calls.count("nvmlDeviceGetPowerUsage") == 1


def test_a_machine_without_the_library_or_the_gpu_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def cannot_load(_name: str) -> None:
        raise OSError("no such file")

    monkeypatch.setattr(ctypes, "CDLL", cannot_load)
    with pytest.raises(HardwareMissing, match="cannot be loaded"):
        Nvml()
    library = FakeLibrary(codes={"nvmlDeviceGetHandleByUUID": 6})
    with pytest.raises(HardwareMissing, match="failed with 6"):
        Nvml("GPU-9", library=library)
    assert library.calls[-1] == "nvmlShutdown"


def test_the_structure_is_as_large_as_the_library_s() -> None:
    assert ctypes.sizeof(nvml._FieldValue) == 40


class Readings:
    """A source that says how often it was read; it fails after `limit` readings."""

    def __init__(self, limit: int = 1 << 30) -> None:
        self.count, self.limit, self.closed = 0, limit, False
        self.third = threading.Event()

    def sample(self, origin: Origin, now_ns: int, step: int | None) -> Iterator[Counter]:
        self.count += 1
        if self.count > self.limit:
            raise OSError("the driver is gone")
        if self.count == 3:
            self.third.set()
        yield Counter(origin, "gpu.power", now_ns, now_ns, float(self.count), "W", step)

    def close(self) -> None:
        self.closed = True


def missing() -> Readings:
    raise HardwareMissing("libnvidia-ml.so.1: cannot be loaded")


def test_a_thread_reads_every_source_until_it_is_closed(caplog: pytest.LogCaptureFixture) -> None:
    kept, good, broken = Kept(), Readings(), Readings(limit=1)
    monitor = Monitor(kept, ORIGIN, interval_s=600)
    monitor.step(5)
    with caplog.at_level(logging.INFO), Sampler(monitor, [missing, lambda: good, lambda: broken], every_s=0.005):
        assert good.third.wait(60)
    monitor.close()
    values = [each for each in kept.events if isinstance(each, Counter) and each.name == "gpu.power"]
    assert len(values) == good.count + 1
    assert {each.step for each in values} == {5}
    assert (good.closed, broken.count) == (True, 2)
    assert caplog.text.count("cannot be loaded") == 1
    assert caplog.text.count("counters of Readings end here") == 1


def test_a_driver_that_hangs_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("collectives.watch.sampler._CLOSE_S", 0.05)
    go, entered = threading.Event(), threading.Event()

    def hang() -> Readings:
        entered.set()
        go.wait(60)
        raise HardwareMissing("too late")

    monitor = Monitor(Kept(), ORIGIN, interval_s=600)
    sampler = Sampler(monitor, [hang])
    assert entered.wait(60)
    sampler.close()
    monitor.close()
    go.set()


def test_ports_count_bytes_between_two_readings(tmp_path: Path) -> None:
    def write(port: str, sent: int, received: int) -> None:
        folder = tmp_path / f"sys/class/infiniband/{port}/counters"
        folder.mkdir(parents=True, exist_ok=True)
        # sysfs truncates nothing: the file stays the same one, which is open.
        for name, value in (("port_xmit_data", sent), ("port_rcv_data", received), ("symbol_error", 7)):
            (folder / name).write_text(f"{value}\n")

    write("mlx5_0/ports/1", 100, 1000)
    write("mlx5_1/ports/1", 5, 5)
    nics = NicCounters(tmp_path)
    assert list(nics.sample(Origin(rank=0), S, 1)) == []
    write("mlx5_0/ports/1", 350, 1000)
    write("mlx5_1/ports/1", 0, 25)
    counters = list(nics.sample(Origin(rank=0), 2 * S, 2))
    nics.close()
    found = {((each.attributes or {})["port"], each.name): each.value for each in counters}
    assert found == {  # four bytes a count; what one port sent was reset
        ("mlx5_0/1", "nic.xmit_bytes"): 1000.0,
        ("mlx5_0/1", "nic.rcv_bytes"): 0.0,
        ("mlx5_1/1", "nic.rcv_bytes"): 80.0,
    }
    assert {(each.start_ns, each.end_ns, each.step, each.unit) for each in counters} == {(S, 2 * S, 2, "bytes")}


def test_a_host_without_ports_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HardwareMissing, match="no RDMA port"):
        NicCounters(tmp_path)
