"""`python -m bench.monitor_overhead`: what the monitor costs a training step, on and off in turn on the same ranks.

Each pair is a block of steps without and one with; which comes first alternates, so that a machine that warms up or
slows down favours neither. Without, nothing is recorded at all: no mark is taken. With, it is what `netlayer train`
does: every collective, wait, forward and backward pass is marked, turned into events by the monitor's thread, and
written to a file a rank, once an interval. The ratio is that of the blocks' times on the slowest rank; its spread is
that of the pairs, and blocks without beside each other show what the machine itself varies by.

Where `--ways` names more than `on`, each way has pairs of its own, in turn, and says which part costs: `marks` takes
marks and forgets them, `recorder` keeps a step's records too, and `on` has the monitor's thread and its file besides.
One monitor lasts over all blocks: it has nothing to do in those without it. What a record costs the thread that
launches, and an event the monitor's thread, is measured apart, on the same devices.

`--records` adds collectives without bytes, and waits for them, to a step: one GPU has then as many records as a layout
of several. Without the monitor their streams are ordered all the same.

A step that is bound by its host (the row says so) shows every microsecond of both threads; one that keeps its devices
busy, as a job should, shows what is left of them.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import math
import signal
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist

from bench.backends import Control
from bench.mfu.jobs import Jobs, read_layout
from bench.mfu.ranks import make_batches
from bench.mfu.systems import Ours
from bench.overlap.steps import StepTimer
from bench.stragglers.device_cost import Pairs
from collectives.watch.monitor import INTERVAL_S, Monitor
from collectives.watch.recorder import Collective, Recorder, StepComm
from netlayer import environ
from netlayer.command import RunOptions, open_out, run_options
from netlayer.config.tree import JobConfig
from netlayer.launch.early_end import ending_at, reason_of
from netlayer.launch.launcher import launch
from netlayer.launch.rank import RankContext
from netlayer.observe.events.schema import Origin
from netlayer.observe.events.transport import FileTransport
from netlayer.percentile import percentile
from netlayer.progress import Stages
from netlayer.results import RunRecord, utc_now, write_text
from netlayer.store.meeting import meeting_place
from trainer.worker import init_process_groups

_TIMEOUT = timedelta(minutes=10)
_WAYS = ("on", "recorder", "marks")
_OFF = "off"
_BATCHES = 8.5  # of a block, where its steps are chosen
_FEWEST_BATCHES = 8.0
"""What is recorded after the last whole interval is handed over behind the block: of fewer, that share is too large."""
_RECORDS, _BURST = 2000, 64  # whose cost is measured apart, and so many between two synchronisations


@dataclass(frozen=True)
class Block:
    """Steps of one rank.

    Args:
        way: of `--ways`, or `off`.
        seconds: of all its steps.
    """

    way: str
    seconds: float


@dataclass(frozen=True)
class RankResult:
    """Result of one rank: see `Row`.

    Args:
        steps: of a block.
        monitored_steps: with the monitor, those that warm up too.
        host_bound: share of the blocks without at whose end the device had nothing left to do.
        monitor_s: processor time of the monitor's thread for the events.
    """

    blocks: Sequence[Block]
    steps: int
    num_events: int
    num_bytes: int
    num_dropped: int
    device: str
    monitored_steps: int = 1
    host_bound: float = 0.0
    monitor_s: float = 0.0
    record_us: float = 0.0

    def of(self, way: str) -> list[Block]:
        """Return the blocks of one way."""
        return [block for block in self.blocks if block.way == way]


@dataclass(frozen=True)
class Row:
    """The comparison of one way with nothing.

    Args:
        way: see `--ways`.
        model, layout, device, ranks: of the job.
        pairs, steps: pairs of blocks, and steps of a block.
        step_ms: without the monitor, median of the blocks, slowest rank.
        ratio: median over the pairs of the time with to the time without.
        ratio_p10, ratio_p90: spread of the pairs.
        ratio_low, ratio_high: 95% interval of the median, by the order of the pairs.
        noise: median distance of successive blocks without from a ratio of 1; None: there are no two.
        host_bound: share of the blocks without at whose end rank 0's device had nothing left to do.
        batches: intervals of the monitor in a block without.
        events_per_step, bytes_per_event: of rank 0, in its file.
        record_us: host time of one record, its two marks too, for rank 0's thread that launches; nothing else ran.
        monitor_us: processor time of the monitor's thread for an event, on rank 0.
        dropped: events of all ranks.
    """

    way: str
    model: str
    layout: str
    device: str
    ranks: int
    pairs: int
    steps: int
    step_ms: float
    ratio: float
    ratio_p10: float
    ratio_p90: float
    ratio_low: float
    ratio_high: float
    noise: float | None
    host_bound: float
    batches: float
    events_per_step: float
    bytes_per_event: float
    record_us: float
    monitor_us: float
    dropped: int


@click.command()
@run_options
@click.option("--model", default="1m", show_default=True, help="Preset of the model: 1m, 125m, 7b.")
@click.option("--layout", default="dp2", show_default=True, help="Degrees, such as dp8 or tp2dp4.")
@click.option("--micro", type=click.IntRange(1), default=1, show_default=True, help="Sequences of a micro-batch.")
@click.option("--micro-batches", type=click.IntRange(1), default=1, show_default=True, help="Of a step and rank.")
@click.option("--pairs", type=click.IntRange(2), default=20, show_default=True, help="Pairs of blocks, on and off.")
@click.option("--steps", type=click.IntRange(1), help="Steps of a block; else as many as take 8.5 intervals.")
@click.option("--records", type=click.IntRange(0), default=0, help="A step, beside the job's: collectives, no bytes.")
@click.option("--ways", default="on", show_default=True, help="What is compared with nothing: on,recorder,marks.")
@click.option(
    "--time-limit", type=click.FloatRange(1), help="Seconds of a rank, its start too; blocks are made to fit."
)
@click.option("--backend", type=click.Choice(["auto", "gloo", "nccl"]), default="auto", show_default=True)
def command(
    options: RunOptions,
    model: str,
    layout: str,
    micro: int,
    micro_batches: int,
    pairs: int,
    steps: int | None,
    records: int,
    ways: str,
    time_limit: float | None,
    backend: str,
) -> None:
    """Compare step times with the monitor and without it, in turn, and print the ratio with its spread.

    \b
    Examples:
      python -m bench.monitor_overhead --pairs 6 --steps 4
      python -m bench.monitor_overhead --model 125m --layout dp4 --micro 32 --pairs 20 --out runs/monitor
      python -m bench.monitor_overhead --model 7b --layout dp4 --micro 2 --pairs 20 --ways on,recorder,marks
      python -m bench.monitor_overhead --model 125m --layout dp1 --micro 16 --records 68   # dp4's records, one GPU
      python -m bench.monitor_overhead --model 7b --layout tp2dp2 --micro 4 --micro-batches 2 --pairs 20
    """
    chosen_ways = tuple(dict.fromkeys(filter(None, ways.split(","))))
    if not chosen_ways or not set(chosen_ways) <= set(_WAYS):
        raise click.BadParameter(f"{ways}: give some of {', '.join(_WAYS)}", param_hint="--ways")
    degrees = read_layout(layout)
    ranks = degrees["tp"] * degrees["pp"] * degrees["dp"]
    chosen = environ.choose_backend(backend, ranks, None)  # type: ignore[arg-type]
    dtype = "bfloat16" if chosen == "nccl" else "float32"
    job = Jobs(options, model, degrees, micro, micro_batches, dtype)()
    started = utc_now()

    def keep(results: Sequence[RankResult], broken_off: str = "") -> None:
        """Write the record of the pairs that are there, where one was asked for, and print the table."""
        rows = [compare(results, way, model, layout) for way in chosen_ways if any(results[0].of(way))]
        record = RunRecord(
            name="bench.monitor_overhead",
            source="measured",
            rows=[*map(asdict, rows), *({"rank": rank, **asdict(result)} for rank, result in enumerate(results))],
            started_utc=started,
            ended_utc=utc_now(),
            arguments={
                **options.arguments(),
                "model": model,
                "layout": layout,
                "micro": micro,
                "micro_batches": micro_batches,
                "pairs": pairs,
                "steps": steps,
                "records": records,
                "ways": ways,
                "broken_off": broken_off,
            },
            config={"job": job.model_dump(mode="json")},
            environment=environ.snapshot(options.seed),
            devices=[result.device for result in results],
        )
        if options.out:
            record.save(open_out(options.out, "monitor-overhead") / "records")
        if options.json_file:
            write_text(options.json_file, record.to_json())
        if str(options.json_file) != "-":
            click.echo(describe(rows))

    temporary = tempfile.TemporaryDirectory()
    with Stages() as stages, stages.open("blocks") as bar, temporary as folder, meeting_place() as place:
        arguments = (
            job,
            place.init_method("overhead"),
            chosen,
            options.seed,
            pairs,
            steps,
            records,
            chosen_ways,
            time_limit,
            folder,
        )
        so_far: dict[int, RankResult] = {}

        def on_message(rank: int, result: RankResult) -> None:
            so_far[rank] = result
            if rank == 0:
                bar(1 + len(result.blocks), 2 * pairs * len(chosen_ways) + 1)

        with ending_at(signal.SIGTERM):
            try:
                results: list[RankResult] = launch(
                    run_rank, ranks, args=arguments, log_dir=Path(folder) / "logs", on_message=on_message
                )
            except (KeyboardInterrupt, SystemExit) as exc:
                if partial := whole_pairs(so_far, ranks):
                    click.echo(f"{reason_of(exc)}: the pairs until then are kept", err=True)
                    keep(partial, reason_of(exc))
                raise
    keep(results)


def whole_pairs(so_far: Mapping[int, RankResult], ranks: int) -> list[RankResult]:
    """Return what all ranks have measured when they were interrupted, whole pairs alone; nothing: there is none."""
    number = min((len(result.blocks) for result in so_far.values()), default=0) // 2 * 2
    if len(so_far) < ranks or not number:
        return []
    return [replace(so_far[rank], blocks=so_far[rank].blocks[:number]) for rank in range(ranks)]


def compare(results: Sequence[RankResult], way: str, model: str, layout: str) -> Row:
    """The row of what the ranks have measured; a block takes as long as on its slowest rank."""
    blocks = [
        Block(of_ranks[0].way, max(block.seconds for block in of_ranks))
        for of_ranks in zip(*(result.blocks for result in results), strict=True)
    ]
    without = [block.seconds for block in blocks if block.way == _OFF]
    ratios = sorted(
        on.seconds / off.seconds
        for first, second in zip(blocks[::2], blocks[1::2], strict=True)
        for on, off in [(first, second) if second.way == _OFF else (second, first)]
        if on.way == way
    )
    noise = [abs(later / earlier - 1) for earlier, later in itertools.pairwise(without)]
    low, high = _median_interval(len(ratios))
    first = results[0]
    return Row(
        way=way,
        model=model,
        layout=layout,
        device=first.device,
        ranks=len(results),
        pairs=len(ratios),
        steps=first.steps,
        step_ms=statistics.median(without) / first.steps * 1e3,
        ratio=statistics.median(ratios),
        ratio_p10=percentile(ratios, 10),
        ratio_p90=percentile(ratios, 90),
        ratio_low=ratios[low],
        ratio_high=ratios[high],
        noise=statistics.median(noise) if noise else None,
        host_bound=first.host_bound,
        batches=statistics.median(without) / INTERVAL_S,
        events_per_step=first.num_events / max(first.monitored_steps, 1),
        bytes_per_event=first.num_bytes / max(first.num_events, 1),
        record_us=first.record_us,
        monitor_us=first.monitor_s / max(first.num_events, 1) * 1e6,
        dropped=sum(result.num_dropped for result in results),
    )


def block_seconds(left_s: float, blocks: int) -> float:
    """Return how long a block is to be where so many have to fit into the time that is left: two intervals at least."""
    return min(_BATCHES * INTERVAL_S, max(left_s / blocks, 2 * INTERVAL_S))


def _median_interval(number: int) -> tuple[int, int]:
    """Places, in order of size, between which the median of what `number` values are drawn from lies in 95%."""
    half = 0.98 * number**0.5  # of a binomial distribution, by the normal one
    return max(round((number - 1) / 2 - half), 0), min(round((number - 1) / 2 + half), number - 1)


_LEAST_PAIRS = 6
"""Fewer pairs do not hold their median in 95%: between the extremes of five it lies in 94%."""
_MEANINGS = {"on": "with the monitor", "recorder": "with a recorder alone", "marks": "with marks alone"}


def describe(rows: Sequence[Row]) -> str:
    """The rows in words."""
    row = rows[0]
    lines = [
        f"{row.model} {row.layout} on {row.ranks} x {row.device}: without a monitor a step takes {row.step_ms:.2f} ms"
    ]
    lines += [
        f"{_MEANINGS[each.way]} {each.ratio:.4f} of that (median of {each.pairs} pairs of {each.steps} steps;"
        f" {'95%' if each.pairs >= _LEAST_PAIRS else 'too few for an interval, all of them'}:"
        f" {each.ratio_low:.4f} to {each.ratio_high:.4f}; 10% to 90% of the pairs: {each.ratio_p10:.4f} to"
        f" {each.ratio_p90:.4f})"
        for each in rows
    ]
    noise = "cannot be told from one pair" if row.noise is None else f"{row.noise:.2%} (median)"
    lines.append(f"two blocks without differ by: {noise}")
    if row.host_bound:
        lines.append(
            f"in {row.host_bound:.0%} of the blocks without, the device ended with the host: such steps are bound by"
            " the host, and show all that Python does; larger micro-batches are what a job would run"
        )
    if row.batches < _FEWEST_BATCHES:
        lines.append(
            f"a block has {row.batches:.1f} intervals of the monitor: up to {min(1.0, 1 / row.batches):.0%} of its"
            " thread's part is not in it, for that is handed over behind the block; give more --steps"
        )
    if row.record_us:  # else it was interrupted before
        lines.append(f"a record costs the thread that launches {row.record_us:.1f} us, its two marks included")
    if row.events_per_step:
        lines.append(
            f"{row.events_per_step:.1f} events a step and rank, {row.bytes_per_event:.1f} bytes and"
            f" {row.monitor_us:.1f} us of the monitor's thread each; {row.dropped} dropped"
        )
    return "\n".join(lines)


# In the ranks.


class SwitchedRecorder(Recorder):
    """A recorder that can be turned off: then it takes no marks. With `marks` it takes them and keeps nothing."""

    way = "on"

    def begin_step(self, step: int) -> None:
        if self.way == "marks":
            self._take_mark()
        elif self.way != _OFF:
            super().begin_step(step)

    def end_step(self) -> StepComm:
        if self.way == "marks":
            self._take_mark()
        return super().end_step() if self.way in ("on", "recorder") else StepComm(0)

    def launching(self, *args: Any, **kwargs: Any) -> AbstractContextManager[Any]:
        if self.way == "marks":
            return _Marks(self, kwargs.get("stream"))
        return super().launching(*args, **kwargs) if self.way != _OFF else contextlib.nullcontext()

    def waiting(self, collective: Collective, **kwargs: Any) -> AbstractContextManager[Any]:
        if self.way == "marks":
            return _Marks(self)
        return super().waiting(collective, **kwargs) if self.way != _OFF else contextlib.nullcontext()

    def computing(self, name: str, **labels: Any) -> AbstractContextManager[Any]:
        if self.way == "marks":
            return _Marks(self)
        return super().computing(name, **labels) if self.way != _OFF else contextlib.nullcontext()

    def _take_mark(self, stream: torch.cuda.Stream | None = None) -> None:
        if self._events is None:
            time.perf_counter_ns()
        else:
            self._events.take(stream)


class _Marks:
    """Marks before and after its block, which nobody reads."""

    __slots__ = ("_recorder", "_stream")

    anybody = Collective("", "", 0, None)
    """What is waited for: without one there is no wait."""

    def __init__(self, recorder: SwitchedRecorder, stream: torch.cuda.Stream | None = None) -> None:
        self._recorder, self._stream = recorder, stream

    def __enter__(self) -> Collective:
        self._recorder._take_mark(self._stream)
        return self.anybody

    def __exit__(self, *_: object) -> None:
        self._recorder._take_mark(self._stream)


def run_rank(
    context: RankContext,
    job: JobConfig,
    init_method: str,
    backend: str,
    seed: int,
    pairs: int,
    steps: int | None,
    records: int,
    ways: Sequence[str],
    time_limit: float | None,
    folder: str,
) -> RankResult:
    """Measure the blocks on one rank."""
    begun_s = time.perf_counter()
    place, groups = init_process_groups(context, job, init_method, backend)
    control = Control(context.env, _TIMEOUT)
    recorder = SwitchedRecorder(place.device, num_kept=1)
    system = Ours(job, seed, place.rank, place.device, groups, recorder)
    if records:
        _launch_between_blocks(system, Pairs(place.device, recorder), records // 2)
    batches = make_batches(job, seed, place.device)
    timer, blocks, number, monitored_steps, host_bound = StepTimer(place.device, control), list[Block](), 0, 0, 0

    def step(_: int) -> None:
        nonlocal number, monitored_steps
        number += 1
        monitored_steps += recorder.way == "on"
        recorder.begin_step(number)
        system.step(batches)
        recorder.end_step()

    at = job.parallel.layout.coordinates(place.rank)
    origin = Origin(run=job.name, attempt=0, rank=place.rank, tp=at.tp, pp=at.pp, dp=at.dp, cp=at.cp)
    out = Path(folder) / "events"
    monitor = Monitor(FileTransport(out, origin, max_files=1000), origin, device=place.device)
    recorder.way = _OFF
    # Kernels are compiled, windows grow, and pages are touched.
    timer.measure(step, steps or 3, warmup=2)
    if steps is None:
        step_s = statistics.median(timer.measure(step, 5).seconds)
        left_s = math.inf if time_limit is None else time_limit - (time.perf_counter() - begun_s)
        block_s = block_seconds(left_s, 2 * pairs * len(ways))
        # The same number on all ranks: by the sums over them, in whole microseconds.
        steps = max(1, round(control.sum(round(block_s * 1e6)) / control.sum(round(step_s * 1e6))))
    for way in ways:  # events are made, and the first batch is encoded
        with _going(recorder, monitor, way):
            timer.measure(step, 3)
    turns = [way for number in range(pairs) for way in _turns(number, ways)]
    for turn, way in enumerate(turns):
        is_late = time_limit is not None and time.perf_counter() - begun_s > time_limit
        # At least two pairs of each way, whole ones, and the same number on all ranks.
        if turn >= 4 * len(ways) and turn % (2 * len(ways)) == 0 and control.sum(int(is_late)):
            break
        with _going(recorder, monitor, way):
            measured = timer.measure(step, steps, warmup=1)
        host_bound += measured.host_bound and way == _OFF
        blocks.append(Block(way, sum(measured.seconds)))
        context.report(RankResult(tuple(blocks), steps, 0, 0, monitor.num_dropped, place.device_name))
    monitor_s = monitor.thread_s
    record_us = _cost_of_record(recorder, timer)
    system.close()
    monitor.close()
    num_events, num_bytes = _written(out, place.rank)
    dist.destroy_process_group()
    return RankResult(
        blocks,
        steps,
        num_events,
        num_bytes,
        monitor.num_dropped,
        place.device_name,
        monitored_steps,
        host_bound / (len(blocks) / 2),
        monitor_s,
        record_us,
    )


def _launch_between_blocks(system: Ours, pairs: Pairs, number: int) -> None:
    """Have pairs launched over the forward pass of a step, before its blocks: as many as another layout would have."""
    blocks = [block for chunk in system.model.chunks for block in chunk.module.blocks.values()]

    def launch(own: int, *_args: object) -> None:
        for _ in range(own):
            pairs.launch()

    for at, block in enumerate(blocks):
        own = (at + 1) * number // len(blocks) - at * number // len(blocks)
        block.register_forward_pre_hook(functools.partial(launch, own))


def _turns(number: int, ways: Sequence[str]) -> Iterator[str]:
    """Yield the blocks of a round: off and each way in turn, which of them first alternates."""
    for way in ways:
        yield from (way, _OFF) if number % 2 else (_OFF, way)


@contextlib.contextmanager
def _going(recorder: SwitchedRecorder, monitor: Monitor, way: str) -> Iterator[None]:
    """Record in a way in the block; then what the monitor has is handed over, in nobody's time.

    Python collects garbage before it and not in it: `netlayer train` has it done every so many steps, on all ranks.
    """
    gc.collect()
    gc.freeze()
    gc.disable()
    if way == "on":
        monitor.follow(recorder)
    recorder.way = way
    try:
        yield
    finally:
        recorder.way, recorder.observer = _OFF, None
        if way == "on":
            monitor.flush()
        gc.enable()
        gc.unfreeze()


def _cost_of_record(recorder: SwitchedRecorder, timer: StepTimer) -> float:
    """Microseconds of the host for a record: half of them collectives, half waits, and nothing else runs."""
    timer.synchronize()
    recorder.way, times = "recorder", list[float]()
    for _ in range(5):
        times.append(0.0)
        for _ in range(_RECORDS // _BURST):
            recorder.begin_step(0)
            begin_s = time.perf_counter()
            for _ in range(_BURST // 2):
                with recorder.launching("cost", "all_gather", 8, can_capture=False) as collective:
                    pass
                landed = recorder.arrival(collective, is_end=True)
                with recorder.waiting(collective, can_capture=False, until=landed):
                    pass
            times[-1] += time.perf_counter() - begin_s
            recorder.end_step()
            # Of more at once the device's queue would be full, and the host wait for the device.
            timer.synchronize()
    recorder.way = _OFF
    return min(times) / (_RECORDS // _BURST * _BURST) * 1e6


def _written(folder: Path, rank: int) -> tuple[int, int]:
    """Events and bytes in a rank's files."""
    from netlayer.observe.events.reader import read_events

    files = sorted(folder.glob(f"rank-{rank:06d}.*"))
    num_events = sum(batch.num_rows for batch in read_events(*files).batches())
    return num_events, sum(file.stat().st_size for file in files)


if __name__ == "__main__":
    from netlayer.cli import run

    run(command, "python -m bench.monitor_overhead")
