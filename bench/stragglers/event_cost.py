"""`python -m bench.stragglers.event_cost`: processor time of a record and of an event, by thread.

A record is paid for by the thread that launches, an event by the monitor's.

No ranks, no kernels: one thread records steps of collectives and waits, as a tensor-parallel step has them, and then
the monitor converts them and writes its file. The time is that of each thread alone (`thread_time`), so a busy machine
changes little, and the least of several rounds counts. `host` takes marks by the host's clock, as on the CPU. `events`
goes the way of CUDA with events that do nothing: what Python takes there, without the driver. Not covered: the driver's
own time, and threads that wait for each other: `--device cuda` measures these on one GPU
(`bench.stragglers.device_cost`), `bench.monitor_overhead` what is left of it in a step.
"""

from __future__ import annotations

import contextlib
import gc
import operator
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest import mock

import click
import torch

from bench.stragglers.device_cost import DeviceRow, measure_device
from bench.stragglers.device_cost import describe as describe_device
from collectives import clock
from collectives.watch.monitor import Monitor
from collectives.watch.recorder import Recorder
from netlayer import environ
from netlayer.command import RunOptions, open_out, run_options
from netlayer.errors import HardwareMissing
from netlayer.observe.events.schema import Origin
from netlayer.observe.events.transport import FileTransport
from netlayer.results import RunRecord, utc_now, write_text

_STEPS = 10  # of a round: the monitor converts them together


@dataclass(frozen=True)
class Row:
    """Costs by one kind of marks.

    Args:
        marks: `host` or `events`.
        record_us: of a collective or a wait, for the thread that launches.
        segment_us: of a segment of the monitor's own, for its thread.
        event_us: of a collective or a wait, for the monitor's thread, its file included. With `events` a wait takes no
            time, and is looked at but not written.
        batch_us: of a batch with a step's two events alone: what a batch costs.
        num_events: of a round.
        rounds: the least of which counts.
    """

    marks: str
    record_us: float
    segment_us: float
    event_us: float
    batch_us: float
    num_events: int
    rounds: int


@click.command()
@run_options
@click.option("--records", type=click.IntRange(2), help="Collectives and waits a step; else 600, on a GPU 68.")
@click.option("--rounds", type=click.IntRange(1), default=8, show_default=True, help="The least counts.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu", show_default=True, help="Of the marks.")
def command(options: RunOptions, records: int | None, rounds: int, device: str) -> None:
    """Print what a record and an event cost in processor time; on a GPU also what one thread holds up the other.

    \b
    Examples:
      python -m bench.stragglers.event_cost
      python -m bench.stragglers.event_cost --records 2000 --out runs/event_cost
      python -m bench.stragglers.event_cost --device cuda              # about 40 s on one GPU
    """
    started, rows = utc_now(), list[Row | DeviceRow]()
    if device == "cuda":
        if not torch.cuda.is_available():
            raise HardwareMissing("--device cuda: torch finds no GPU")
        rows.append(measure_device(torch.device("cuda", 0), (records or 68) // 2, rounds))
    else:
        rows += [measure(marks, records or 600, rounds) for marks in ("host", "events")]
    record = RunRecord(
        name="bench.stragglers.event_cost",
        source="measured",
        rows=[asdict(row) for row in rows],
        started_utc=started,
        ended_utc=utc_now(),
        arguments={**options.arguments(), "records": records, "rounds": rounds, "device": device},
        config={},
        environment=environ.snapshot(options.seed),
        devices=[row.device for row in rows if isinstance(row, DeviceRow)] or ["CPU"],
    )
    if options.out:
        record.save(open_out(options.out, "event-cost") / "records")
    if options.json_file:
        write_text(options.json_file, record.to_json())
    if str(options.json_file) != "-":
        click.echo("\n".join(describe_device(row) for row in rows if isinstance(row, DeviceRow)) or describe(rows))


def describe(rows: Sequence[Row | DeviceRow]) -> str:
    """The rows as a table."""
    lines = [f"{'marks':8}{'record':>10}{'segment':>10}{'event':>10}{'batch of 2':>12}   processor time, us"]
    lines += [
        f"{row.marks:8}{row.record_us:10.2f}{row.segment_us:10.2f}{row.event_us:10.2f}{row.batch_us:12.0f}"
        for row in rows
        if isinstance(row, Row)
    ]
    return "\n".join(lines)


def measure(marks: str, records: int, rounds: int) -> Row:
    """Measure with one kind of marks."""
    origin = Origin(run="cost", rank=0, tp=0, pp=0, dp=0, cp=0)
    device = "cpu" if marks == "host" else "cuda:0"
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.nullcontext() if marks == "host" else idle_events(),
        _no_collection(),
    ):
        transport = FileTransport(Path(folder), origin)
        # Its thread sleeps: `flush` does what it would, on the thread whose time is taken.
        monitor, recorder = Monitor(transport, origin, device=device, interval_s=3600), Recorder(device, num_kept=1)
        monitor.follow(recorder)
        recorder.groups["tensor"] = [0, 1]
        record_us, event_us, batch_us, segment_us = list[float](), list[float](), list[float](), list[float]()
        for _ in range(rounds + 1):  # one more: events are made in the first
            begin_ns = time.thread_time_ns()
            for step in range(_STEPS):
                _record_step(recorder, step, records // 2)
            record_us.append((time.thread_time_ns() - begin_ns) / (_STEPS * records) / 1e3)
            event_us.append(_flush_us(monitor) / (_STEPS * records))
            _record_step(recorder, 0, 0)
            batch_us.append(_flush_us(monitor))
            begin_ns = time.thread_time_ns()
            for _ in range(records):
                with monitor.segment("forward", micro_batch=0):
                    pass
            segment_us.append((time.thread_time_ns() - begin_ns) / records / 1e3)
            monitor.flush()
        monitor.close()
    return Row(
        marks,
        record_us=min(record_us[1:]),
        segment_us=min(segment_us[1:]),
        event_us=min(event_us[1:]),
        batch_us=min(batch_us[1:]),
        num_events=_STEPS * records,
        rounds=rounds,
    )


def _record_step(recorder: Recorder, step: int, num: int) -> None:
    recorder.begin_step(step)
    for _ in range(num):
        with recorder.launching("tensor", "all_gather", 1 << 20, lane="tensor all_gather") as collective:
            pass
        # As a communicator has it: the stream waits for the collective's own end.
        with recorder.waiting(collective, until=recorder.arrival(collective, is_end=True)):
            pass
    recorder.end_step()


def _flush_us(monitor: Monitor) -> float:
    begin_ns = time.thread_time_ns()
    monitor.flush()
    return (time.thread_time_ns() - begin_ns) / 1e3


@contextlib.contextmanager
def _no_collection() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


class _IdleEvent:
    """Stand-in for a CUDA event, as far as marks need it; functions of C that do nothing replace the driver's."""

    record = operator.is_
    elapsed_time = operator.is_not  # True: a millisecond
    query = staticmethod(lambda: True)

    def __init__(self, enable_timing: bool = True) -> None:
        """Take the arguments of torch's."""


class _Stream:
    def __init__(self, device: object = None) -> None:
        self.device = device

    def record_event(self) -> _IdleEvent:
        return _IdleEvent()

    def wait_event(self, event: _IdleEvent) -> None:
        """Wait for nothing."""


@contextlib.contextmanager
def idle_events() -> Iterator[None]:
    """Have marks by CUDA events on a machine without CUDA."""
    stream = _Stream()
    with (
        mock.patch.multiple(
            torch.cuda,
            Event=_IdleEvent,
            Stream=_Stream,
            is_current_stream_capturing=lambda: False,
            set_device=lambda _: None,
            synchronize=lambda _=None: None,
            get_device_name=lambda _=None: "none",
            current_stream=lambda _=None: stream,
        ),
        mock.patch.multiple(torch._C, create=True, _cuda_getCurrentStream=lambda _: (0, 0, 1)),
        mock.patch("collectives.transport.current_stream._STREAMS", {}),
        mock.patch.object(clock, "_devices", {}),
    ):
        yield


if __name__ == "__main__":
    from netlayer.cli import run

    run(command, "python -m bench.stragglers.event_cost")
