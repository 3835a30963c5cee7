"""`python -m bench.stragglers.event_cost --device cuda`: what the monitor costs one GPU's host, part by part.

A pair is a collective and the wait for it, without a transfer: a side stream follows the compute stream, and the
compute stream the side stream. `plain` launches the events that order the streams and nothing else, as a communicator
does without a recorder; the difference is what a recorder adds. Pairs come in bursts with a synchronisation behind
each, which is not timed: else the device's queue fills, and the host waits for the device.

What the monitor's thread holds up is measured beside a thread that launches small operators: in windows with events to
convert and windows without, in turn. Where an operator takes longer than `GAP_US`, the thread has waited, for Python's
lock, for the driver's, or for a processor; windows without show how much of that is not the monitor's.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from collectives.clock import PooledEvent, TimeBase, device_events, has_happened, runtime_clock
from collectives.transport.current_stream import current_stream
from collectives.watch.monitor import Monitor
from collectives.watch.recorder import Recorder
from netlayer.observe.events.schema import Event, Origin
from netlayer.observe.events.transport import FileTransport

GAP_US = 50.0
_BURST = 32  # pairs between two synchronisations, a few of the device's queue of a thousand
_BURSTS = 40
_STEPS = 12  # a second of 125m
_WINDOW_S = 1.5  # in which the monitor's thread hands over at least once


@dataclass(frozen=True)
class DeviceRow:
    """Costs on one GPU's host, in microseconds; the least of the rounds, but for the stall.

    Args:
        device: its name.
        pairs: of a step.
        plain_us, recorded_us: a pair for the thread that launches, by the clock, without a recorder and with it.
        record_us: half of the difference: what a record adds, a collective's or a wait's.
        record_cpu_us: the same in processor time.
        event_us: an event for the monitor's thread, its file included, in processor time, while nothing else runs.
        runtime_us, torch_us: a mark's time by the CUDA runtime's function and by torch's; None: there is no runtime.
        query_us: whether a mark has happened.
        operator_us: a small operator, while the monitor has nothing to do.
        stall_us: by which the launching thread is later for each event converted at the same time: median.
        stall_least_us, stall_most_us: of the rounds.
        gaps_ms, gaps_off_ms: in operators of more than `GAP_US` in a window, with events to convert and without.
        events: converted in a window.
    """

    device: str
    pairs: int
    plain_us: float
    recorded_us: float
    record_us: float
    record_cpu_us: float
    event_us: float
    runtime_us: float | None
    torch_us: float
    query_us: float
    operator_us: float
    stall_us: float
    stall_least_us: float
    stall_most_us: float
    gaps_ms: float
    gaps_off_ms: float
    events: float


class Pairs:
    """Launches pairs on a device: see the head of this module."""

    def __init__(self, device: torch.device, recorder: Recorder | None) -> None:
        self.recorder = recorder
        self._side: torch.cuda.Stream | None = None
        if device.type == "cuda":
            self._compute, self._side = current_stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def launch(self) -> None:
        """Launch one; as a communicator does, which gets no collective of a recorder that is off."""
        recorder, collective = self.recorder, None
        if self._side is not None:
            self._side.wait_event(self._compute.record_event())
        if recorder is not None:
            with recorder.launching("cost", "all_gather", 8, stream=self._side, can_capture=False) as collective:
                pass
        landed = None if recorder is None or collective is None else recorder.arrival(collective, is_end=True)
        if recorder is None or collective is None:
            self._follow(None)
            return
        with recorder.waiting(collective, can_capture=False, until=landed):
            self._follow(landed)

    def _follow(self, landed: PooledEvent | None) -> None:
        """Make the compute stream follow the side stream, by a mark of it or by an event of its own."""
        if self._side is not None:
            self._compute.wait_event(self._side.record_event() if landed is None else landed.event)


def measure_device(device: torch.device, pairs: int, rounds: int) -> DeviceRow:
    """Measure on a device; about 5 s and 3 s a round."""
    torch.cuda.set_device(device)
    plain = min(_burst_us(Pairs(device, None), rounds))
    recorder = Recorder(device, num_kept=1)
    recorded = min(_burst_us(Pairs(device, recorder), rounds))
    marks_us = _mark_us(device, rounds)
    origin = Origin(run="cost", rank=0, tp=0, pp=0, dp=0, cp=0)
    with tempfile.TemporaryDirectory() as folder:
        idle = Monitor(FileTransport(Path(folder) / "idle", origin), origin, device=device, interval_s=3600)
        event_us = min(_event_us(idle, device, pairs) for _ in range(rounds + 1))
        idle.close()
        transport = _Counted(FileTransport(Path(folder) / "beside", origin))
        monitor = Monitor(transport, origin, device=device)
        windows = [_stall(monitor, transport, device, pairs) for _ in range(rounds)]
        monitor.close()
    return DeviceRow(
        torch.cuda.get_device_name(device),
        pairs,
        plain_us=plain[0],
        recorded_us=recorded[0],
        record_us=(recorded[0] - plain[0]) / 2,
        record_cpu_us=(recorded[1] - plain[1]) / 2,
        event_us=event_us,
        runtime_us=marks_us[0],
        torch_us=marks_us[1],
        query_us=marks_us[2],
        operator_us=min(window.operator_us for window in windows),
        stall_us=statistics.median(window.stall_us for window in windows),
        stall_least_us=min(window.stall_us for window in windows),
        stall_most_us=max(window.stall_us for window in windows),
        gaps_ms=statistics.median(window.gaps_ms for window in windows),
        gaps_off_ms=statistics.median(window.gaps_off_ms for window in windows),
        events=statistics.median(window.events for window in windows),
    )


def describe(row: DeviceRow) -> str:
    """The row in words."""
    runtime = "no runtime to be found" if row.runtime_us is None else f"{row.runtime_us:.2f} us by the runtime"
    return "\n".join(
        [
            f"{row.device}, {row.pairs} collectives and as many waits a step",
            f"thread that launches: {row.plain_us:.2f} us a collective and its wait, {row.recorded_us:.2f} us recorded:"
            f" {row.record_us:.2f} us a record ({row.record_cpu_us:.2f} us of processor)",
            f"monitor's thread: {row.event_us:.2f} us of processor an event, its file included; a mark's time"
            f" {runtime}, {row.torch_us:.2f} us by torch; a query {row.query_us:.2f} us",
            f"beside each other: an operator takes {row.operator_us:.2f} us; {row.stall_us:.2f} us later an event"
            f" ({row.stall_least_us:.2f} to {row.stall_most_us:.2f}; {row.events:.0f} events in {_WINDOW_S:g} s)",
            f"in operators of more than {GAP_US:g} us: {row.gaps_ms:.1f} ms of {_WINDOW_S * 1e3:.0f} ms with events,"
            f" {row.gaps_off_ms:.1f} ms without",
        ]
    )


def _burst_us(pairs: Pairs, rounds: int) -> list[tuple[float, float]]:
    """Microseconds of a pair, by the clock and of the processor, in each round; one more warms up."""
    results = []
    for _ in range(rounds + 1):
        wall_s = cpu_s = 0.0
        for burst in range(_BURSTS):
            if pairs.recorder is not None:
                pairs.recorder.begin_step(burst)
            begin_s, begin_cpu_s = time.perf_counter(), time.thread_time()
            for _ in range(_BURST):
                pairs.launch()
            wall_s += time.perf_counter() - begin_s
            cpu_s += time.thread_time() - begin_cpu_s
            if pairs.recorder is not None:
                pairs.recorder.end_step()
            torch.cuda.synchronize()
        results.append((wall_s / _BURSTS / _BURST * 1e6, cpu_s / _BURSTS / _BURST * 1e6))
    return results[1:]


def _mark_us(device: torch.device, rounds: int) -> tuple[float | None, float, float]:
    """Microseconds of a mark's time by the runtime and by torch, and of a query."""
    events, base = device_events(device), TimeBase(by_events=True, device=device)
    marks: list[PooledEvent] = [events.take_unchecked() for _ in range(500)]
    torch.cuda.synchronize()

    def least_us(call: Callable[[], object]) -> float:
        times = []
        for _ in range(rounds + 1):
            begin_s = time.thread_time()
            call()
            times.append((time.thread_time() - begin_s) / len(marks) * 1e6)
        return min(times)

    return (
        None if runtime_clock() is None else least_us(lambda: base.ns_of_ended(marks)),
        least_us(lambda: base.ns_by_torch(marks)),
        least_us(lambda: list(map(has_happened, marks))),
    )


def _record_steps(monitor: Monitor, device: torch.device, pairs: int, steps: int) -> int:
    """Have a monitor get recorded steps, which the device has come to; return how many events that are at most."""
    recorder = Recorder(device, num_kept=1)
    monitor.follow(recorder)
    launching = Pairs(device, recorder)
    for step in range(steps):
        recorder.begin_step(step)
        for _ in range(pairs):
            launching.launch()
        recorder.end_step()
        torch.cuda.synchronize()
    recorder.observer = None
    return steps * (1 + 2 * pairs)


def _event_us(monitor: Monitor, device: torch.device, pairs: int) -> float:
    num_events = _record_steps(monitor, device, pairs, _STEPS)
    begin_s = time.thread_time()
    monitor.flush()
    return (time.thread_time() - begin_s) / num_events * 1e6


@dataclass(frozen=True)
class _Windows:
    operator_us: float
    stall_us: float
    gaps_ms: float
    gaps_off_ms: float
    events: float


class _Counted:
    """A transport that counts what another one takes."""

    def __init__(self, transport: FileTransport) -> None:
        self._transport, self.num_sent = transport, 0

    def send(self, events: Sequence[Event]) -> int:
        self.num_sent += len(events)
        return self._transport.send(events)

    def close(self) -> None:
        self._transport.close()


def _stall(monitor: Monitor, transport: _Counted, device: torch.device, pairs: int) -> _Windows:
    """A window with nothing to convert, and one with thousands of events."""
    monitor.flush()
    off_us, off_gaps_us = _operators(device)
    begun = transport.num_sent
    num_events = _record_steps(monitor, device, pairs, 16 * _STEPS)
    before = transport.num_sent
    on_us, on_gaps_us = _operators(device)
    after = transport.num_sent
    monitor.flush()
    # Waits that took no time are read and not written, so the share of rows says how many events were converted.
    done = num_events * (after - before) / max(1, transport.num_sent - begun)
    # What one operator took longer, times the operators of a window, is the time that they were late in all.
    late_us = (on_us - off_us) / on_us * _WINDOW_S * 1e6
    return _Windows(off_us, late_us / max(done, 1.0), on_gaps_us / 1e3, off_gaps_us / 1e3, done)


def _operators(device: torch.device) -> tuple[float, float]:
    """Launch small operators for a window: microseconds of one, and in all those that took long."""
    numbers = torch.zeros(64, device=device)
    number, gaps_ns, clock = 0, 0, time.perf_counter_ns
    torch.cuda.synchronize()
    begin_ns = at_ns = clock()
    end_ns = begin_ns + round(_WINDOW_S * 1e9)
    limit_ns = round(GAP_US * 1e3)
    while at_ns < end_ns:
        numbers.add_(1)
        now_ns = clock()
        if now_ns - at_ns > limit_ns:
            gaps_ns += now_ns - at_ns
        at_ns, number = now_ns, number + 1
    torch.cuda.synchronize()
    return (at_ns - begin_ns) / number / 1e3, gaps_ns / 1e3
