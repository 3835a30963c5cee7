"""`python -m bench.checkpoint_stall`: what a checkpoint costs the training, and the steps after it.

Data-parallel ranks train a model of a preset's shape on made-up tokens. In turns, each way of saving takes a snapshot
of the same bytes in a folder of its own: ours (`trainer.checkpoint.save`), torch's `dcp.async_save` and, where they are
installed and asked for, ByteDance's ByteCheckpoint (`bytecheckpoint`, its API for DDP with `fast_saving`) and NVIDIA's
resiliency extension (`nvrx`: its persistent worker and `FileSystemWriterAsync`), each with the 20 steps before it,
which nothing disturbs, and the 20 after it; the next turn begins when its files are there. The others get each rank's
pieces as tensors of their own, for they cannot stage shards of our optimiser. ByteCheckpoint plans and writes its first
save while the call waits, so its rows of turn 0 stand apart. Not covered: restores.

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
import functools
import importlib.util
import itertools
import math
import shutil
import statistics
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import click
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from bench.host_counters import HostCounters, memory_bytes
from netlayer import environ
from netlayer.command import RunOptions, run_options_without_config
from netlayer.config.tree import JobConfig, build_config
from netlayer.errors import CheckFailed, ConfigError, HardwareMissing
from netlayer.launch.launcher import launch
from netlayer.launch.rank import RankContext
from netlayer.progress import Stages
from netlayer.results import RunRecord, utc_now, write_text
from netlayer.store.meeting import meeting_place
from trainer.checkpoint.distcp import file_of
from trainer.checkpoint.save import Failed, Published, Saver
from trainer.checkpoint.snapshot import ShardPlan, Staging
from trainer.checkpoint.writer import Write
from trainer.checkpoint.writer_process import WriterProcess
from trainer.notes import NotesInFlight
from trainer.optim import build_optimizer
from trainer.parallel import Batches, ParallelModel
from trainer.step import open_steps
from trainer.worker import init_process_groups

WINDOW = 20
"""Steps before and after a save."""
STALL_S, LONGEST_STALL_S, SLOWER = 0.1, 0.3, 0.01
"""Bars of ours: stall in the median and at most, and by how much the steps after a save may be longer."""
_PART = ".measured.part"  # of a checkpoint that is never published
PARTS: dict[str, Literal["digests", "writes"] | None] = {
    "none": None,
    "copy": None,
    "digests": "writes",
    "writes": "digests",
}
"""Ways that leave something out, by what the writer does without; None: it does not run."""
SETTINGS: dict[str, dict[str, Any]] = {
    "ours": {},
    "buffered": {"direct_io": False},
    "paced": {},
    "limited": {},
    "nice": {"writer_nice": 19},
}
"""Ways of saving as we do, by what is set in job.checkpoint."""
PACKAGES = {"bytecheckpoint": "bytecheckpoint", "nvrx": "nvidia_resiliency_ext"}
"""Ways that need a package, by its name."""
WAYS = (*PARTS, *SETTINGS, "async_save", *PACKAGES)
USUAL_WAYS = ("ours", "async_save")
PARTS_WAYS = (*PARTS, *SETTINGS)


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
            bar(len(rows), turns * len(names), "")

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
    return "\n".join(lines)


def verdicts(rows: Sequence[SaveRow]) -> list[str]:
    """Return a line for each bar of ours: held, missed, or that the device differs as far by itself."""
    own = [row.stall_s for row in rows if row.way == "ours"]
    if not own:
        return []
    net = {way: _median([each for row, each in zip(rows, _nets(rows), strict=True) if row.way == way]) for way in WAYS}
    stalls = f"{statistics.median(own):.3f} s in the median, {max(own):.3f} s at most"
    is_short = statistics.median(own) < STALL_S and max(own) <= LONGEST_STALL_S
    lines = [f"stall: {stalls}: {'held' if is_short else 'missed'} ({STALL_S} s and {LONGEST_STALL_S} s)"]
    slower, noise = net["ours"] - 1, abs(net["none"] - 1)
    if math.isnan(slower):
        return [*lines, "steps after: cannot tell: there is no save after it (--turns 2)"]
    text = f"steps after: {slower:+.2%} beside undisturbed ones"
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
    training = _Training(job, place.rank, place.device, groups, folder, ways)
    training.steps(5)
    say(f"{training.gib:.1f} GiB to save on {job.parallel.dp} ranks")
    for turn in range(turns):
        for way in ways:
            row = _measure_save(training, way, turn, rates.get(way, {}), say)
            if context.env.rank == 0:
                context.report(row)
            training.forget(way)
    training.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def _measure_save(
    training: _Training, way: str, turn: int, rates: Mapping[str, float], say: Callable[[str], None]
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


@dataclass(frozen=True)
class _Stateful:
    """Tensors by name, as a module gives them to whoever saves it."""

    tensors: dict[str, Tensor]

    def state_dict(self) -> dict[str, Tensor]:
        return self.tensors


class _Training:
    """One rank's model, its steps on made-up tokens, and the ways to save it."""

    def __init__(
        self, job: JobConfig, rank: int, device: torch.device, groups: Any, folder: Path, ways: Sequence[str]
    ) -> None:
        self._model = ParallelModel(job, 0, rank, device, groups)
        self._optimizers = self._model.optimizer(lambda chunk: build_optimizer(job.optimizer, chunk))
        self._steps = open_steps(self._model, self._optimizers, job.optimizer.max_grad_norm or math.inf)
        self._device, self._rank, self._folder, self._step = device, rank, folder, 0
        generator = torch.Generator().manual_seed(rank)
        size = job.batch.global_batch_size // job.parallel.dp, 1, job.model.seq_len + 1
        tokens = torch.randint(job.model.vocab_size, size, generator=generator).to(device)
        self._batches: Batches = [(each[:, :-1], each[:, 1:]) for each in tokens]
        self._saver: Saver | None = None
        self._staging: Staging | None = None
        self._writer: WriterProcess | None = None
        self._calls: Any = None
        self.writer_cpu_s = 0.0
        """Of the last save: processor time of this rank's writer, where it says."""
        self._plan = ShardPlan(self._model, self._optimizers, file_of(rank))
        # Before the first step, as training does: memory for snapshots takes its time.
        if any(way in SETTINGS or way in PARTS for way in ways):
            self._open_staging(ways)
        self.gib = sum(each[0] for each in self.everyones([float(self._plan.num_bytes)])) / 2**30
        # torch's own wants a group that the CPU can talk over.
        self._group = dist.new_group(backend="gloo") if dist.is_initialized() else None

    def steps(self, count: int) -> list[float]:
        """Take steps; return the seconds of each."""
        seconds = []
        for _ in range(count):
            self._step += 1
            begun_s = time.perf_counter()
            self._steps.begin(self._step)
            stepped = self._steps.run(self._step, self._batches, 1e-5)
            assert stepped.grad_norm is not None
            epoch, own = (self._saver.epoch, self._saver.own_state()) if self._saver else (0, (0.0, 0.0, None))
            notes = NotesInFlight(self._model, stepped.loss, stepped.grad_norm, False, own).read()
            if self._saver is not None:
                self._saver.advance(epoch, notes)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            seconds.append(time.perf_counter() - begun_s)
        return seconds

    def _open_staging(self, ways: Sequence[str]) -> None:
        try:
            self._staging = Staging(self._plan, self._model, self._optimizers)
        except (OSError, MemoryError) as exc:
            raise CheckFailed(f"rank {self._rank}: the host has no room for a snapshot ({exc})") from exc
        if any(way in SETTINGS for way in ways):
            self._saver = Saver(
                self._model,
                self._optimizers,
                self._folder / "ours",
                plan=self._plan,
                staging=self._staging,
                token="bench",
            )
        if any(PARTS.get(way) for way in ways):
            config = self._model.job.checkpoint
            self._writer = WriterProcess(self._plan, self._staging, nice=config.writer_nice, direct=config.direct_io)
            if self._rank == 0:
                (self._folder / "parts" / _PART).mkdir(parents=True)
            self._model.wait_for_all()

    def set_limits(self, settings: Mapping[str, Any]) -> None:
        """Have our own saves go on with other settings of job.checkpoint."""
        assert self._saver is not None
        self._saver.set_limits(self._model.job.checkpoint.model_copy(update=dict(settings)))

    def begin(self, way: str) -> Callable[[], float | None]:
        """Save by a way; return what says how long it took, once it is done on all ranks: every rank calls it."""
        self.writer_cpu_s = 0.0
        if way == "none":
            return lambda: 0.0
        if way in PARTS:
            return self._part(PARTS[way])
        others = {"async_save": self.async_save, "bytecheckpoint": self.bytecheckpoint, "nvrx": self.nvrx}
        return others.get(way, self.ours)()

    def is_copied(self, way: str) -> bool:
        """Whether the snapshot of a way of ours is whole."""
        return way != "none" and way in PARTS_WAYS and self._staging is not None and self._staging.is_copied

    def _part(self, without: Literal["digests", "writes"] | None) -> Callable[[], float | None]:
        """Take a snapshot, and have the writer do a part of its work; None: nothing. Nothing is published."""
        staging, writer = self._staging, self._writer
        assert staging is not None
        begun_s = time.perf_counter()
        staging.take()
        state = {"is_started": False, "is_done": False}

        def seconds() -> float | None:
            if not state["is_done"] and staging.is_copied:
                if without is None:
                    state["is_done"] = True
                elif writer is not None and not state["is_started"]:
                    command = Write(_PART, self._plan.file, rate_bps=0.0, without=without)
                    writer.start(command, str(self._folder / "parts"))
                    state["is_started"] = True
                elif writer is not None:
                    reply = writer.reply(waits=False)
                    if reply is not None and reply.errno:
                        raise CheckFailed(f"rank {self._rank}: the writer has failed ({reply.text})")
                    if reply is not None:
                        self.writer_cpu_s, state["is_done"] = reply.cpu_s, True
            # Together: a rank that ended its turn alone would leave the others in a step.
            done = min(each[0] for each in self.everyones([float(state["is_done"])]))
            return time.perf_counter() - begun_s if done else None

        return seconds

    def ours(self) -> Callable[[], float | None]:
        """Save beside the training; return what says how long it took, once it is done."""
        saver = self._saver
        assert saver is not None
        saver.begin(self._step, 0, None)

        def seconds() -> float | None:
            failed = next((each for each in saver.outcomes if isinstance(each, Failed)), None)
            if failed is not None:
                raise failed.error
            done = [each for each in saver.outcomes if isinstance(each, Published)]
            if not done or saver.stage != "idle":
                return None
            self.writer_cpu_s = done[-1].cpu_s
            return done[-1].seconds

        return seconds

    def async_save(self) -> Callable[[], float | None]:
        """Save by torch's `async_save`; as `ours`."""
        begun_s = time.perf_counter()
        future: Any = dcp.async_save(  # type: ignore[attr-defined]
            self._state(), checkpoint_id=self._folder / "async_save" / str(self._step), process_group=self._group
        )

        def seconds() -> float | None:
            """Return the seconds from the call to the end of the save, once it has ended on every rank; None before."""
            # Together: a rank that ended its turn alone would leave the others in a step.
            done = min(each[0] for each in self.everyones([float(future.done())]))
            if not done:
                return None
            future.result()
            return time.perf_counter() - begun_s

        return seconds

    def bytecheckpoint(self) -> Callable[[], float | None]:
        """Save by ByteCheckpoint, beside the training; as `ours`."""
        import bytecheckpoint

        begun_s, written = time.perf_counter(), threading.Event()
        bytecheckpoint.save(
            str(self._folder / "bytecheckpoint"),
            {"model": _Stateful(self._state())},
            framework="ddp",
            fast_saving=True,
            global_steps=self._step,
            callback=written.set,  # on the first rank, once all have written
        )

        def seconds() -> float | None:
            is_written = self.everyones([float(written.is_set())])[0][0]
            return time.perf_counter() - begun_s if is_written else None

        return seconds

    def nvrx(self) -> Callable[[], float | None]:
        """Save by NVIDIA's resiliency extension, as its guide does; as `ours`."""
        from nvidia_resiliency_ext.checkpointing.async_ckpt import core, filesystem_async, state_dict_saver

        if self._calls is None:
            self._calls = core.AsyncCallsQueue(persistent=True)
        calls = self._calls
        begun_s = time.perf_counter()
        folder = self._folder / "nvrx" / str(self._step)
        folder.mkdir(parents=True, exist_ok=True)
        writer = filesystem_async.FileSystemWriterAsync(folder, thread_count=2)
        planned = state_dict_saver.save_state_dict_async_plan(self._state(), writer, self._group)
        save, _, arguments = writer.get_save_function_and_args()
        # Its own synchronises a GPU that a CPU does not have.
        preload = functools.partial(writer.preload_tensors, writer.write_buckets, self._device.type == "cuda")
        finish = functools.partial(state_dict_saver.save_state_dict_async_finalize, *planned)
        calls.schedule_async_request(core.AsyncRequest(save, arguments, [finish], preload_fn=preload))

        def seconds() -> float | None:
            finished = calls.maybe_finalize_async_calls(blocking=False, no_dist=False)
            return time.perf_counter() - begun_s if finished else None

        return seconds

    def _state(self) -> dict[str, Tensor]:
        return {f"rank{self._rank}.{source.name}": source.value() for source in self._plan.sources}

    def device_wait_s(self) -> float:
        return self._saver.waited_s() if self._saver else 0.0

    def everyones(self, own: Sequence[float]) -> list[list[float]]:
        """Return the numbers of all ranks."""
        scale = 10**6
        scaled = self._model.world.all_gather_ints([round(each * scale) for each in own], "measurement")
        return [[each / scale for each in row] for row in scaled]

    def forget(self, way: str) -> None:
        """Remove what was written, so that the storage does not fill up."""
        if self._saver is not None:
            self._saver.outcomes.clear()
        self._model.wait_for_all()
        if self._rank == 0 and way in PARTS:
            for path in (self._folder / "parts").glob(f"{_PART}/*"):
                path.unlink()
        elif self._rank == 0 and way not in SETTINGS:
            shutil.rmtree(self._folder / way, ignore_errors=True)
        self._model.wait_for_all()

    def close(self) -> None:
        if self._calls is not None:
            self._calls.close()
        if self._writer is not None:
            self._writer.close()
        if self._saver is not None:
            self._saver.close()
        if self._staging is not None:
            self._staging.close()
        self._steps.close()
        self._model.close()


if __name__ == "__main__":
    from netlayer.cli import run

    run(command, "python -m bench.checkpoint_stall")
