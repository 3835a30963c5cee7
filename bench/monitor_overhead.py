"""`python -m bench.monitor_overhead`: what the monitor costs a training step, on and off in turn on the same ranks.

Each pair is a block of steps without and one with; which comes first alternates, so that a machine that warms up or
slows down favours neither. Without, nothing is recorded at all: no mark is taken. With, it is what `netlayer train`
does: every collective, wait, forward and backward pass is marked, turned into events by the monitor's thread, and
written to a file a rank. The ratio is that of the blocks' times on the slowest rank; its spread is that of the pairs,
and blocks without beside each other show what the machine itself varies by.
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import click
import torch.distributed as dist

from bench.backends import Control
from bench.mfu.jobs import Jobs, read_layout
from bench.mfu.ranks import make_batches
from bench.mfu.systems import Ours
from bench.overlap.steps import StepTimer
from collectives.watch.monitor import INTERVAL_S, Monitor
from collectives.watch.recorder import Collective, Recorder, StepComm
from netlayer import environ
from netlayer.command import RunOptions, open_out, run_options
from netlayer.config.tree import JobConfig
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
_BATCHES = 8  # of a block


@dataclass(frozen=True)
class Block:
    """Steps of one rank.

    Args:
        is_on: with the monitor.
        seconds: of all its steps.
    """

    is_on: bool
    seconds: float


@dataclass(frozen=True)
class RankResult:
    """Result of one rank: see `Row`."""

    blocks: Sequence[Block]
    num_events: int
    num_bytes: int
    num_dropped: int
    device: str


@dataclass(frozen=True)
class Row:
    """The comparison.

    Args:
        model, layout, device, ranks: of the job.
        pairs, steps: pairs of blocks, and steps of a block.
        step_ms: without the monitor, median of the blocks, slowest rank.
        ratio: median over the pairs of the time with to the time without.
        ratio_p10, ratio_p90: spread of the pairs.
        ratio_low, ratio_high: 95% interval of the median, by the order of the pairs.
        noise: median distance of successive blocks without from a ratio of 1.
        events_per_step, bytes_per_event: of rank 0, in its file.
        dropped: events of all ranks.
    """

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
    noise: float
    events_per_step: float
    bytes_per_event: float
    dropped: int


@click.command()
@run_options
@click.option("--model", default="1m", show_default=True, help="Preset of the model: 1m, 125m, 7b.")
@click.option("--layout", default="dp2", show_default=True, help="Degrees, such as dp8 or tp2dp4.")
@click.option("--micro", type=click.IntRange(1), default=1, show_default=True, help="Sequences of a micro-batch.")
@click.option("--micro-batches", type=click.IntRange(1), default=1, show_default=True, help="Of a step and rank.")
@click.option("--pairs", type=click.IntRange(2), default=20, show_default=True, help="Pairs of blocks, on and off.")
@click.option("--steps", type=click.IntRange(1), default=10, show_default=True, help="Steps of a block.")
@click.option("--time-limit", type=click.FloatRange(1), help="Seconds of measuring after which no pair begins.")
@click.option("--backend", type=click.Choice(["auto", "gloo", "nccl"]), default="auto", show_default=True)
def command(
    options: RunOptions,
    model: str,
    layout: str,
    micro: int,
    micro_batches: int,
    pairs: int,
    steps: int,
    time_limit: float | None,
    backend: str,
) -> None:
    """Compare step times with the monitor and without it, in turn, and print the ratio with its spread.

    \b
    Examples:
      python -m bench.monitor_overhead --pairs 6 --steps 4
      python -m bench.monitor_overhead --model 125m --layout dp8 --micro 16 --pairs 40 --steps 50 --out runs/monitor
      python -m bench.monitor_overhead --model 7b --layout tp2dp4 --micro-batches 2 --pairs 20 --steps 10
    """
    degrees = read_layout(layout)
    ranks = degrees["tp"] * degrees["pp"] * degrees["dp"]
    chosen = environ.choose_backend(backend, ranks, None)  # type: ignore[arg-type]
    dtype = "bfloat16" if chosen == "nccl" else "float32"
    job = Jobs(options, model, degrees, micro, micro_batches, dtype)()
    started = utc_now()
    temporary = tempfile.TemporaryDirectory()
    with Stages() as stages, stages.open("blocks") as bar, temporary as folder, meeting_place() as place:
        arguments = (job, place.init_method("overhead"), chosen, options.seed, pairs, steps, time_limit, folder)
        results: list[RankResult] = launch(
            run_rank,
            ranks,
            args=arguments,
            log_dir=Path(folder) / "logs",
            on_message=lambda _rank, done: bar(done, 2 * pairs + 1),
        )
    pairs = len(results[0].blocks) // 2  # the time limit may have cut them
    row = compare(results, model, layout, pairs, steps)
    record = RunRecord(
        name="bench.monitor_overhead",
        source="measured",
        rows=[asdict(row), *({"rank": rank, **asdict(result)} for rank, result in enumerate(results))],
        started_utc=started,
        ended_utc=utc_now(),
        arguments={**options.arguments(), "model": model, "layout": layout, "pairs": pairs, "steps": steps},
        config={"job": job.model_dump(mode="json")},
        environment=environ.snapshot(options.seed),
        devices=[result.device for result in results],
    )
    if options.out:
        record.save(open_out(options.out, "monitor-overhead") / "records")
    if options.json_file:
        write_text(options.json_file, record.to_json())
    if str(options.json_file) != "-":
        click.echo(describe(row))


def compare(results: Sequence[RankResult], model: str, layout: str, pairs: int, steps: int) -> Row:
    """The row of what the ranks have measured; a block takes as long as on its slowest rank."""
    blocks = [
        Block(of_ranks[0].is_on, max(block.seconds for block in of_ranks))
        for of_ranks in zip(*(result.blocks for result in results), strict=True)
    ]
    without = [block.seconds for block in blocks if not block.is_on]
    ratios = sorted(
        on.seconds / off.seconds
        for first, second in zip(blocks[::2], blocks[1::2], strict=True)
        for on, off in [(first, second) if first.is_on else (second, first)]
    )
    noise = [abs(later / earlier - 1) for earlier, later in itertools.pairwise(without)]
    low, high = _median_interval(len(ratios))
    first = results[0]
    return Row(
        model=model,
        layout=layout,
        device=first.device,
        ranks=len(results),
        pairs=pairs,
        steps=steps,
        step_ms=statistics.median(without) / steps * 1e3,
        ratio=statistics.median(ratios),
        ratio_p10=percentile(ratios, 10),
        ratio_p90=percentile(ratios, 90),
        ratio_low=ratios[low],
        ratio_high=ratios[high],
        noise=statistics.median(noise),
        events_per_step=first.num_events / (pairs * steps),
        bytes_per_event=first.num_bytes / max(first.num_events, 1),
        dropped=sum(result.num_dropped for result in results),
    )


def _median_interval(number: int) -> tuple[int, int]:
    """Places, in order of size, between which the median of what `number` values are drawn from lies in 95%."""
    half = 0.98 * number**0.5  # of a binomial distribution, by the normal one
    return max(round((number - 1) / 2 - half), 0), min(round((number - 1) / 2 + half), number - 1)


def describe(row: Row) -> str:
    """The row in words."""
    return "\n".join(
        [
            f"{row.model} {row.layout} on {row.ranks} x {row.device}: without a monitor a step takes"
            f" {row.step_ms:.2f} ms",
            f"with it {row.ratio:.4f} of that (median of {row.pairs} pairs of {row.steps} steps; 95%:"
            f" {row.ratio_low:.4f} to {row.ratio_high:.4f}; 10% to 90% of the pairs: {row.ratio_p10:.4f} to"
            f" {row.ratio_p90:.4f})",
            f"two blocks without differ by {row.noise:.2%} (median)",
            f"{row.events_per_step:.1f} events a step and rank, {row.bytes_per_event:.1f} bytes each;"
            f" {row.dropped} dropped",
        ]
    )


# In the ranks.


class SwitchedRecorder(Recorder):
    """A recorder that can be turned off: then it takes no marks."""

    is_on = True

    def begin_step(self, step: int) -> None:
        if self.is_on:
            super().begin_step(step)

    def end_step(self) -> StepComm:
        return super().end_step() if self.is_on else StepComm(0)

    def launching(self, *args: Any, **kwargs: Any) -> Any:
        return super().launching(*args, **kwargs) if self.is_on else contextlib.nullcontext()

    def waiting(self, collective: Collective) -> Any:
        return super().waiting(collective) if self.is_on else contextlib.nullcontext()

    def computing(self, name: str, **labels: Any) -> Any:
        return super().computing(name, **labels) if self.is_on else contextlib.nullcontext()


def run_rank(
    context: RankContext,
    job: JobConfig,
    init_method: str,
    backend: str,
    seed: int,
    pairs: int,
    steps: int,
    time_limit: float | None,
    folder: str,
) -> RankResult:
    """Measure the blocks on one rank."""
    place, groups = init_process_groups(context, job, init_method, backend)
    control = Control(context.env, _TIMEOUT)
    recorder = SwitchedRecorder(place.device, num_kept=1)
    system = Ours(job, seed, place.rank, place.device, groups, recorder)
    batches = make_batches(job, seed, place.device)
    timer, blocks, number = StepTimer(place.device, control), list[Block](), 0

    def step(_: int) -> None:
        nonlocal number
        number += 1
        recorder.begin_step(number)
        system.step(batches)
        recorder.end_step()

    at = job.parallel.layout.coordinates(place.rank)
    origin = Origin(run=job.name, attempt=0, rank=place.rank, tp=at.tp, pp=at.pp, dp=at.dp, cp=at.cp)
    out = Path(folder) / "events"
    recorder.is_on = False
    # Kernels are compiled, windows grow, and pages are touched.
    block_s = sum(timer.measure(step, steps, warmup=2).seconds)
    # A short block must have the work of the monitor's thread in it too, as a long run has.
    interval_s = min(INTERVAL_S, max(block_s / _BATCHES, 0.02))
    if place.rank == 0:
        context.report(1)
    num_dropped, begun_s = 0, time.perf_counter()
    for turn, is_on in enumerate(_turns(pairs)):
        is_late = time_limit is not None and time.perf_counter() - begun_s > time_limit
        # At least two pairs, whole ones, and the same number on all ranks.
        if turn >= 4 and turn % 2 == 0 and control.sum(int(is_late)):
            break
        monitored = _monitored(recorder, out, origin, str(place.device), interval_s)
        with monitored if is_on else contextlib.nullcontext() as monitor:
            seconds = timer.measure(step, steps, warmup=1).seconds
        num_dropped += 0 if monitor is None else monitor.num_dropped
        blocks.append(Block(is_on, sum(seconds)))
        if place.rank == 0:
            context.report(1 + len(blocks))
    system.close()
    num_events, num_bytes = _written(out, place.rank)
    dist.destroy_process_group()
    return RankResult(blocks, num_events, num_bytes, num_dropped, place.device_name)


def _turns(pairs: int) -> Iterator[bool]:
    """Yield off and on in turn: off on, on off, off on, ..."""
    for number in range(pairs):
        yield number % 2 == 1
        yield number % 2 == 0


@contextlib.contextmanager
def _monitored(
    recorder: SwitchedRecorder, folder: Path, origin: Origin, device: str, interval_s: float
) -> Iterator[Monitor]:
    monitor = Monitor(FileTransport(folder, origin, max_files=1000), origin, device=device, interval_s=interval_s)
    monitor.follow(recorder)
    recorder.is_on = True
    try:
        yield monitor
    finally:
        recorder.is_on = False
        monitor.close()


def _written(folder: Path, rank: int) -> tuple[int, int]:
    """Events and bytes in a rank's files."""
    from netlayer.observe.events.reader import read_events

    files = sorted(folder.glob(f"rank-{rank:06d}.*"))
    num_events = sum(batch.num_rows for batch in read_events(*files).batches())
    return num_events, sum(file.stat().st_size for file in files)


if __name__ == "__main__":
    from netlayer.cli import run

    run(command, "python -m bench.monitor_overhead")
