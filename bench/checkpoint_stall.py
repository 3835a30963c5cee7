"""`python -m bench.checkpoint_stall`: what a checkpoint costs the training, and the steps after it.

Data-parallel ranks train a model of a preset's shape on made-up tokens. In turns, each way of saving takes a snapshot
of the same bytes in a folder of its own: ours (`trainer.checkpoint.save`), torch's `dcp.async_save` and, where they are
installed and asked for, ByteDance's ByteCheckpoint (`bytecheckpoint`, its API for DDP with `fast_saving`) and NVIDIA's
resiliency extension (`nvrx`: its persistent worker and `FileSystemWriterAsync`), each with the 20 steps before it,
which nothing disturbs, and the 20 after it; the next turn begins when its files are there. The others get each rank's
pieces as tensors of their own, for they cannot stage shards of our optimiser. ByteCheckpoint plans and writes its first
save while the call waits, so its rows of turn 0 stand apart. Not covered: restores.

`sustained` and `third` save as ours do, several times without a pause: at the interval that the storage sustains, which
the `ours` before them has shown, and at a third of it. A save that is due while the one before is being written is
skipped, as `job.checkpoint.when_busy = "skip"` has it (by the bench itself, not by the trainer's loop), and counted.

`--ways parts` tells what of ours the steps feel. Four ways switch parts off: `none` saves nothing, which says how far
two windows of 20 steps differ by themselves; `copy` is the snapshot alone; `digests` reads it for its digests and
writes nothing; `writes` writes it without digests. Five are whole saves: `ours` as the job's defaults have it,
`buffered` through the page cache, `paced` and `limited` with the rates of `--copy-gbps` and `--write-gbps`, `nice` at
niceness 19.

The table has two ratios that tell a save from a device that becomes slower by itself: `net` is as `steps after`, over
the mean of the steps before the save and those before the next one, and `written` the median of those of the 20 at
whose end the copy was whole and the writer had not ended, over the 20 before. A way that costs nothing has what `none`
has.

A row is a save: `stall_s` (the host's time in the call, and for ours an update's wait on the device), `ratio` (median
of the 20 steps after it over that of the 20 before), `worst` (the longest of them over the same), `after` (each of them
over the same, in order), `copied_step` and `saved_step` (the step of those at whose end the copy was whole, and all was
done; 0: later, or nobody knows), `save_s`, `gib`, `writer_cpu_s` (of all ranks' writers), `host` (counters of
`bench.host_counters` a step, before and after, of the rank with the most), `dirty_gib` (largest at a step's end: pages
that wait for the disk) and `grown_gib` (the largest fall of free memory).
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist

from bench.checkpoint_training import INTERVALS, PARTS, PARTS_WAYS, SETTINGS, Training
from bench.host_counters import HostCounters, memory_bytes
from netlayer import environ
from netlayer.command import RunOptions, run_options_without_config
from netlayer.config.tree import JobConfig, build_config
from netlayer.errors import ConfigError, HardwareMissing
from netlayer.launch.launcher import launch
from netlayer.launch.rank import RankContext
from netlayer.progress import Stages
from netlayer.results import RunRecord, utc_now, write_text
from netlayer.store.meeting import meeting_place
from trainer.worker import init_process_groups

WINDOW = 20
"""Steps before and after a save."""
STALL_S, LONGEST_STALL_S, SLOWER = 0.1, 0.3, 0.01
"""Bars of ours: stall in the median and at most, and by how much the steps after a save may be longer."""
SAVES_OF_INTERVAL = 3
"""How many of them are written."""
PACKAGES = {"bytecheckpoint": "bytecheckpoint", "nvrx": "nvidia_resiliency_ext"}
"""Ways that need a package, by its name."""
WAYS = (*PARTS, *SETTINGS, *INTERVALS, "async_save", *PACKAGES)
USUAL_WAYS = ("ours", "async_save")


@dataclass(frozen=True)
class SaveRow:
    """One save, as the slowest rank saw it."""

    way: str
    turn: int
    step_ms: float
    stall_s: float
    ratio: float
    worst: float
    save_s: float
    gib: float
    after: Sequence[float] = ()
    copied_step: int = 0
    saved_step: int = 0
    writer_cpu_s: float = 0.0
    host: Mapping[str, Sequence[float]] = field(default_factory=dict)
    dirty_gib: float = 0.0
    grown_gib: float = 0.0
    interval_steps: int = 0
    skipped: int = 0


@click.command()
@run_options_without_config
@click.option("--model", default="7b", show_default=True, help="Preset of the shape (netlayer.workload.presets).")
@click.option("--layers", type=click.IntRange(1), help="Fewer layers than the preset has.")
@click.option("--ranks", type=click.IntRange(1), default=4, show_default=True, help="Data-parallel ranks.")
@click.option("--backend", type=click.Choice(["gloo", "nccl"]), default="nccl", show_default=True, help="Of the ranks.")
@click.option("--micro-batches", type=click.IntRange(1), default=4, show_default=True, help="Of one sequence, a step.")
@click.option("--turns", type=click.IntRange(1), default=5, show_default=True, help="Saves of each way.")
@click.option("--folder", type=click.Path(path_type=Path), required=True, help="New folder on the storage to measure.")
@click.option(
    "--ways",
    default=",".join(USUAL_WAYS),
    show_default=True,
    help=f"Of {', '.join(WAYS)}; comma-separated. parts: those of ours.",
)
@click.option(
    "--copy-gbps", type=click.FloatRange(0, min_open=True), default=10.0, show_default=True, help="Of `paced`, a rank."
)
@click.option(
    "--write-gbps",
    type=click.FloatRange(0, min_open=True),
    default=0.5,
    show_default=True,
    help="Of `limited`, a rank.",
)
def command(
    options: RunOptions,
    model: str,
    layers: int | None,
    ranks: int,
    backend: str,
    micro_batches: int,
    turns: int,
    folder: Path,
    ways: str,
    copy_gbps: float,
    write_gbps: float,
) -> None:
    """Measure the stall of checkpoints, and the steps after each against undisturbed ones.

    \b
    Examples:
      python -m bench.checkpoint_stall --folder /mnt/nvme/stall --ranks 4 --json stall.json
      python -m bench.checkpoint_stall --folder /mnt/nvme/stall --ranks 2 --layers 16 --ways parts --json parts.json
      python -m bench.checkpoint_stall --folder /mnt/nvme/stall --ranks 4 --ways none,ours,sustained,third --turns 2
      python -m bench.checkpoint_stall --folder /tmp/stall --ranks 2 --backend gloo --model 1m --turns 2
    """
    started = utc_now()
    job = job_of(model, layers, ranks, micro_batches)
    names = read_ways(ways, backend)
    rows: list[SaveRow] = []
    with Stages() as stages, stages.open("saves") as bar, meeting_place() as place:

        def on_message(_rank: int, message: SaveRow | str) -> None:
            if isinstance(message, SaveRow):
                rows.append(message)
                message = table([message])
            # A save of a large model takes minutes: each of its stages is said, and a row as soon as it is there.
            stages.say(message)
            saves = sum(SAVES_OF_INTERVAL if name in INTERVALS else 1 for name in names)
            bar(len(rows), turns * saves, "")

        rates = {"paced": {"copy_gbps": copy_gbps}, "limited": {"write_gbps": write_gbps}}
        arguments = (job, place.init_method("stall"), backend, folder, turns, names, rates)
        launch(measure, ranks, args=arguments, log_dir=folder / "logs", on_message=on_message)
    if options.json_file:
        settings = {"model": model, "layers": layers, "ranks": ranks, "micro_batches": micro_batches, "turns": turns}
        record = RunRecord(
            name="bench.checkpoint_stall",
            source="measured",
            rows=[dataclasses.asdict(row) for row in rows],
            started_utc=started,
            ended_utc=utc_now(),
            arguments={
                **options.arguments(),
                **settings,
                "ways": ways,
                "backend": backend,
                "copy_gbps": copy_gbps,
                "write_gbps": write_gbps,
            },
            environment=environ.snapshot(options.seed),
        )
        write_text(options.json_file, record.to_json())
    if str(options.json_file) != "-":
        click.echo("\n".join([table(rows), *verdicts(rows)]))


def read_ways(text: str, backend: str) -> list[str]:
    """Return the ways of saving that an option names.

    Raises:
        ConfigError: one is none.
        HardwareMissing: its package is not installed, or it needs GPUs.
    """
    names = list(PARTS_WAYS) if text == "parts" else [name.strip() for name in text.split(",")]
    unknown = next((name for name in names if name not in WAYS), None)
    if unknown is not None:
        raise ConfigError("--ways", unknown, f"is none of {', '.join(WAYS)}", "name some of them")
    early = next((name for name in INTERVALS if name in names and "ours" not in names[: names.index(name)]), None)
    if early is not None:
        raise ConfigError(
            "--ways", early, "needs a save of ours before it, which shows its interval", "name ours first"
        )
    if "nvrx" in names and backend != "nccl":
        raise HardwareMissing(f"--ways nvrx: it needs GPUs, and --backend is {backend}")
    for name, package in PACKAGES.items():
        if name in names and importlib.util.find_spec(package) is None:
            raise HardwareMissing(f"--ways {name}: there is no such package; pip install {package.replace('_', '-')}")
    return names


def job_of(model: str, layers: int | None, ranks: int, micro_batches: int) -> JobConfig:
    """Return the job whose steps are disturbed."""
    shape: dict[str, Any] = {"preset": model, "dtype": "bfloat16"} | ({"layers": layers} if layers else {})
    tree = {
        "model": shape,
        "parallel": {"dp": ranks},
        "batch": {"global_batch_size": ranks * micro_batches, "micro_batch_size": 1},
        "optimizer": {"steps": 10**6, "warmup_steps": 0, "lr": 1e-5},
    }
    return build_config({"cluster": {"gpus_per_server": ranks}, "job": tree}).job


def net_ratio(row: SaveRow, later: SaveRow) -> float:
    """Return the steps after a save over the undisturbed ones before it and before the next save, which `later` is."""
    return row.ratio * 2 * row.step_ms / (row.step_ms + later.step_ms)


def written_ratio(row: SaveRow) -> float:
    """Return the median of the steps beside which a save was written, over those before it; NaN: there were none."""
    after = row.after[row.copied_step : row.saved_step or None] if row.copied_step else ()
    return statistics.median(after) if after else math.nan


def table(rows: Sequence[SaveRow]) -> str:
    """Return a line a way: median and largest stall, and the steps after it."""
    columns = f"{'stall median s':>16}{'max s':>8}{'steps after':>13}{'net':>8}{'written':>9}{'worst':>8}"
    columns += f"{'save s':>8}{'CPU s':>8}{'GiB':>8}"
    net = _nets(rows)
    lines = [f"{'way':<12}{'saves':>6}{columns}"]
    for way in dict.fromkeys(row.way for row in rows):
        own = [row for row in rows if row.way == way]
        stalls = [row.stall_s for row in own]
        nets = [each for row, each in zip(rows, net, strict=True) if row.way == way]
        lines.append(
            f"{way:<12}{len(own):>6}{statistics.median(stalls):>16.3f}{max(stalls):>8.3f}"
            f"{statistics.median(row.ratio for row in own):>13.4f}{_median(nets):>8.4f}"
            f"{_median([written_ratio(row) for row in own]):>9.4f}{max(row.worst for row in own):>8.2f}"
            f"{statistics.median(row.save_s for row in own):>8.1f}"
            f"{statistics.median(row.writer_cpu_s for row in own):>8.1f}{own[0].gib:>8.2f}"
        )
        if own[0].interval_steps:
            skipped = sum(row.skipped for row in own)
            lines[-1] += f"  one due every {own[0].interval_steps} steps, {skipped} skipped"
    return "\n".join(lines)


def verdicts(rows: Sequence[SaveRow]) -> list[str]:
    """Return a line for each bar of ours: held, missed, or that the device differs as far by itself."""
    return [line for way in ("ours", *INTERVALS) for line in _verdicts_of(way, rows)]


def _verdicts_of(way: str, rows: Sequence[SaveRow]) -> list[str]:
    own = [row.stall_s for row in rows if row.way == way]
    if not own:
        return []
    net = {name: _median([n for row, n in zip(rows, _nets(rows), strict=True) if row.way == name]) for name in WAYS}
    stalls = f"{statistics.median(own):.3f} s in the median, {max(own):.3f} s at most"
    is_short = statistics.median(own) < STALL_S and max(own) <= LONGEST_STALL_S
    lines = [f"{way}, stall: {stalls}: {'held' if is_short else 'missed'} ({STALL_S} s and {LONGEST_STALL_S} s)"]
    slower, noise = net[way] - 1, abs(net["none"] - 1)
    if math.isnan(slower):
        return [*lines, f"{way}, steps after: cannot tell: there is no save after it (--turns 2)"]
    text = f"{way}, steps after: {slower:+.2%} beside undisturbed ones"
    if math.isnan(noise):
        state = "cannot tell, for nothing says how far they differ without a save (--ways none,...)"
    else:
        text += f", where {net['none'] - 1:+.2%} come without a save"
        # What a save costs may hide in that, or be nothing but that.
        state = "held" if slower + noise <= SLOWER else "missed" if slower - noise > SLOWER else "cannot tell"
    return [*lines, f"{text}: {state} ({SLOWER:.0%})"]


def _nets(rows: Sequence[SaveRow]) -> list[float]:
    """Return `net_ratio` of each save; NaN: of the last one, which none follows."""
    return [net_ratio(row, later) for row, later in itertools.pairwise(rows)] + [math.nan] * bool(rows)


def _median(values: Sequence[float]) -> float:
    """Return the median of those that are known; NaN: none is."""
    return statistics.median(known) if (known := [value for value in values if not math.isnan(value)]) else math.nan


# In the ranks.


def measure(
    context: RankContext,
    job: JobConfig,
    url: str,
    backend: str,
    folder: Path,
    turns: int,
    ways: Sequence[str],
    rates: Mapping[str, Mapping[str, float]],
) -> None:
    """Train, and save by each way in turns; rank 0 reports a row a save."""

    def say(text: str) -> None:
        if context.env.rank == 0:
            context.report(text)

    if backend == "gloo":
        torch.set_num_threads(1)
    place, groups = init_process_groups(context, job, url, backend)
    training = Training(job, place.rank, place.device, groups, folder, ways)
    training.steps(5)
    say(f"{training.gib:.1f} GiB to save on {job.parallel.dp} ranks")
    save_s = 0.0
    for turn in range(turns):
        for way in ways:
            if way in INTERVALS:
                rows = _measure_interval(training, way, turn, save_s, say)
            else:
                rows = [_measure_save(training, way, turn, rates.get(way, {}), say)]
            save_s = rows[-1].save_s if way == "ours" else save_s
            for row in rows if context.env.rank == 0 else ():
                context.report(row)
            training.forget(way)
    training.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _measure_save(
    training: Training, way: str, turn: int, rates: Mapping[str, float], say: Callable[[str], None]
) -> SaveRow:
    """Take the steps before, save, and take the steps after, and more until the save is done."""
    if way in SETTINGS:
        training.set_limits({**SETTINGS[way], **rates})
    counters = [HostCounters.read()]
    before = training.steps(WINDOW)
    counters.append(HostCounters.read())
    (free_bytes,) = memory_bytes("MemFree")
    begun_s = time.perf_counter()
    is_done = training.begin(way)
    stall_s, save_s = time.perf_counter() - begun_s, None
    say(f"{way}, turn {turn + 1}: the call took {stall_s:.3f} s; steps of {statistics.median(before):.3f} s")
    counters.append(HostCounters.read())
    after: list[float] = []
    copied_step = saved_step = dirty_bytes = grown_bytes = 0
    for number in range(1, WINDOW + 1):
        after += training.steps(1)
        dirty, writeback, free = memory_bytes("Dirty", "Writeback", "MemFree")
        dirty_bytes, grown_bytes = max(dirty_bytes, dirty + writeback), max(grown_bytes, free_bytes - free)
        if save_s is None:
            save_s = is_done()
            saved_step = number if save_s is not None else 0
        if not copied_step and training.is_copied(way):
            copied_step = number
    counters.append(HostCounters.read())
    while save_s is None:  # the next turn is not to be disturbed by it
        training.steps(1)
        save_s = is_done()
    stall_s += training.device_wait_s()
    usual = statistics.median(before)
    spans = [dataclasses.astuple(each) for each in counters]
    host = [(end - begin) / WINDOW for at in (0, 2) for begin, end in zip(spans[at], spans[at + 1], strict=True)]
    gib = [dirty_bytes / 2**30, grown_bytes / 2**30]
    own = [stall_s, save_s, usual, training.writer_cpu_s, *gib, *host, *(seconds / usual for seconds in after)]
    everyones = training.everyones(own)
    stall_s, save_s, usual, _, dirty_gib, grown_gib, *rest = (max(each) for each in zip(*everyones, strict=True))
    names = [each.name for each in dataclasses.fields(HostCounters)]
    ratios = rest[2 * len(names) :]
    return SaveRow(
        way,
        turn,
        usual * 1e3,
        stall_s,
        statistics.median(ratios),
        max(ratios),
        save_s,
        training.gib,
        ratios,
        copied_step,
        saved_step,
        sum(each[3] for each in everyones),
        {name: (rest[at], rest[at + len(names)]) for at, name in enumerate(names)},
        dirty_gib,
        grown_gib,
    )


def _measure_interval(
    training: Training, way: str, turn: int, save_s: float, say: Callable[[str], None]
) -> list[SaveRow]:
    """Save again and again at an interval; a save that is due while one is being written is skipped.

    Args:
        save_s: that one save took, the same on all ranks.
    """
    training.set_limits({})
    usual = max(each[0] for each in training.everyones([statistics.median(training.steps(WINDOW))]))
    interval = max(1, math.ceil(save_s / usual / INTERVALS[way]))
    say(f"{way}, turn {turn + 1}: a save is due every {interval} steps of {usual:.3f} s")
    seconds: list[float] = []
    starts: list[int] = []  # of saves, by steps before them
    stalls_s, saves_s, cpus_s, skipped = [0.0], [0.0], [0.0], [0]
    is_done: Callable[[], float | None] | None = None
    while len(saves_s) <= SAVES_OF_INTERVAL or len(seconds) < starts[-1] + WINDOW:
        is_due = len(seconds) % interval == 0 and len(starts) < SAVES_OF_INTERVAL
        if is_due and is_done is not None:
            skipped[-1] += 1
        elif is_due:
            begun_s = time.perf_counter()
            is_done = training.ours()
            starts.append(len(seconds))
            stalls_s.append(time.perf_counter() - begun_s)
            skipped.append(0)
        seconds += training.steps(1)
        took_s = is_done() if is_done is not None else None
        if took_s is not None:
            is_done = None
            stalls_s[-1] += training.device_wait_s()
            saves_s.append(took_s)
            cpus_s.append(training.writer_cpu_s)
            training.clear_outcomes()
    rows = []
    for at, start in enumerate(starts, 1):
        ratios = [each / usual for each in seconds[start : start + WINDOW]]
        everyones = training.everyones([stalls_s[at], saves_s[at], cpus_s[at], *ratios])
        stall_s, own_save_s, _, *ratios = (max(each) for each in zip(*everyones, strict=True))
        cpu_s = sum(each[2] for each in everyones)
        gib, median, worst = training.gib, statistics.median(ratios), max(ratios)
        row = SaveRow(way, turn, usual * 1e3, stall_s, median, worst, own_save_s, gib, ratios, writer_cpu_s=cpu_s)
        rows.append(dataclasses.replace(row, interval_steps=interval, skipped=skipped[at]))
    return rows


if __name__ == "__main__":
    from netlayer.cli import run

    run(command, "python -m bench.checkpoint_stall")
