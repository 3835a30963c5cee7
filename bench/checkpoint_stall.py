"""`python -m bench.checkpoint_stall`: what a checkpoint costs the training, and the steps after it.

Data-parallel ranks train a model of a preset's shape on made-up tokens. In turns, each way of saving takes a snapshot
of the same bytes in a folder of its own: ours (`trainer.checkpoint.save`), torch's `dcp.async_save` and, where it is
installed and asked for, NVIDIA's resiliency extension (`nvrx`: its persistent worker and `FileSystemWriterAsync`), each
with the 20 steps before it, which nothing disturbs, and the 20 after it; the next turn begins when its files are there.
The others get each rank's pieces as tensors of their own, for they cannot stage shards of our optimiser. Not covered:
restores, and ByteCheckpoint, which takes modules of FSDP or DDP alone and no shards.

A row is a save: `stall_s` (the host's time in the call, and for ours an update's wait on the device), `ratio` (median
of the 20 steps after it over that of the 20 before), `worst` (the longest of them over the same), `after` (each of them
over the same, in order: the copy disturbs the first, the writer all until it is done), `save_s`, `gib`.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import math
import shutil
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

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
from trainer.checkpoint.save import Failed, Published, Saver, open_saver
from trainer.checkpoint.snapshot import ShardPlan
from trainer.notes import NotesInFlight
from trainer.optim import build_optimizer
from trainer.parallel import Batches, ParallelModel
from trainer.step import open_steps
from trainer.worker import init_process_groups

WINDOW = 20
"""Steps before and after a save."""
WAYS = ("ours", "async_save", "nvrx")
USUAL_WAYS = WAYS[:2]


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


@click.command()
@run_options_without_config
@click.option("--model", default="7b", show_default=True, help="Preset of the shape (netlayer.workload.presets).")
@click.option("--layers", type=click.IntRange(1), help="Fewer layers than the preset has.")
@click.option("--ranks", type=click.IntRange(1), default=4, show_default=True, help="Data-parallel ranks.")
@click.option("--backend", type=click.Choice(["gloo", "nccl"]), default="nccl", show_default=True, help="Of the ranks.")
@click.option("--micro-batches", type=click.IntRange(1), default=4, show_default=True, help="Of one sequence, a step.")
@click.option("--turns", type=click.IntRange(1), default=5, show_default=True, help="Saves of each way.")
@click.option("--folder", type=click.Path(path_type=Path), required=True, help="New folder on the storage to measure.")
@click.option("--ways", default=",".join(USUAL_WAYS), show_default=True, help=f"Of {', '.join(WAYS)}; comma-separated.")
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
) -> None:
    """Measure the stall of checkpoints, and the steps after each against undisturbed ones.

    \b
    Examples:
      python -m bench.checkpoint_stall --folder /mnt/nvme/stall --ranks 4 --json stall.json
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

        arguments = (job, place.init_method("stall"), backend, folder, turns, names)
        launch(measure, ranks, args=arguments, log_dir=folder / "logs", on_message=on_message)
    if options.json_file:
        settings = {"model": model, "layers": layers, "ranks": ranks, "micro_batches": micro_batches, "turns": turns}
        record = RunRecord(
            name="bench.checkpoint_stall",
            source="measured",
            rows=[dataclasses.asdict(row) for row in rows],
            started_utc=started,
            ended_utc=utc_now(),
            arguments={**options.arguments(), **settings, "ways": ways, "backend": backend},
            environment=environ.snapshot(options.seed),
        )
        write_text(options.json_file, record.to_json())
    if str(options.json_file) != "-":
        click.echo(table(rows))


def read_ways(text: str, backend: str) -> list[str]:
    """Return the ways of saving that an option names.

    Raises:
        ConfigError: one is none.
        HardwareMissing: its package is not installed, or it needs GPUs.
    """
    names = [name.strip() for name in text.split(",")]
    unknown = next((name for name in names if name not in WAYS), None)
    if unknown is not None:
        raise ConfigError("--ways", unknown, f"is none of {', '.join(WAYS)}", "name some of them")
    if "nvrx" in names and backend != "nccl":
        raise HardwareMissing(f"--ways nvrx: it needs GPUs, and --backend is {backend}")
    if "nvrx" in names and importlib.util.find_spec("nvidia_resiliency_ext") is None:
        raise HardwareMissing("--ways nvrx: there is no such package; pip install nvidia-resiliency-ext")
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


def table(rows: Sequence[SaveRow]) -> str:
    """Return a line a way: median and largest stall, and the steps after it."""
    columns = f"{'stall median s':>16}{'max s':>8}{'steps after':>13}{'worst':>8}{'save s':>8}{'GiB':>8}"
    lines = [f"{'way':<12}{'saves':>6}{columns}"]
    for way in dict.fromkeys(row.way for row in rows):
        own = [row for row in rows if row.way == way]
        stalls = [row.stall_s for row in own]
        lines.append(
            f"{way:<12}{len(own):>6}{statistics.median(stalls):>16.3f}{max(stalls):>8.3f}"
            f"{statistics.median(row.ratio for row in own):>13.4f}{max(row.worst for row in own):>8.2f}"
            f"{statistics.median(row.save_s for row in own):>8.1f}{own[0].gib:>8.2f}"
        )
    return "\n".join(lines)


# In the ranks.


def measure(
    context: RankContext, job: JobConfig, url: str, backend: str, folder: Path, turns: int, ways: Sequence[str]
) -> None:
    """Train, and save by each way in turns; rank 0 reports a row a save."""

    def say(text: str) -> None:
        if context.env.rank == 0:
            context.report(text)

    if backend == "gloo":
        torch.set_num_threads(1)
    place, groups = init_process_groups(context, job, url, backend)
    training = _Training(job, place.rank, place.device, groups, folder, ways)
    saves: dict[str, Callable[[], Callable[[], float | None]]] = {
        "ours": training.ours,
        "async_save": training.async_save,
        "nvrx": training.nvrx,
    }
    training.steps(5)
    say(f"{training.gib:.1f} GiB to save on {job.parallel.dp} ranks")
    for turn in range(turns):
        for way in ways:
            before = training.steps(WINDOW)
            begun_s = time.perf_counter()
            is_done = saves[way]()
            stall_s, save_s = time.perf_counter() - begun_s, None
            say(f"{way}, turn {turn + 1}: the call took {stall_s:.3f} s; steps of {statistics.median(before):.3f} s")
            after = []
            for _ in range(WINDOW):
                after += training.steps(1)
                save_s = save_s if save_s is not None else is_done()
            while save_s is None:  # the next turn is not to be disturbed by it
                training.steps(1)
                save_s = is_done()
            stall_s += training.device_wait_s()
            usual = statistics.median(before)
            own = [stall_s, save_s, usual, *(seconds / usual for seconds in after)]
            stall_s, save_s, usual, *ratios = (max(each) for each in zip(*training.everyones(own), strict=True))
            ratio, worst = statistics.median(ratios), max(ratios)
            if context.env.rank == 0:
                row = SaveRow(way, turn, usual * 1e3, stall_s, ratio, worst, save_s, training.gib, ratios)
                context.report(row)
            training.forget(way)
    training.close()
    if dist.is_initialized():
        dist.destroy_process_group()


class _Training:
    """One rank's model, its steps on made-up tokens, and the two ways to save it."""

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
        self._calls: Any = None
        if "ours" in ways:  # before the first step, as training does: memory for snapshots takes its time
            self._saver, line = open_saver(self._model, self._optimizers, folder / "ours", None, beside=True)
            if line:
                raise CheckFailed(line)
        self._plan = ShardPlan(self._model, self._optimizers, file_of(rank))
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
            return done[-1].seconds if done and saver.stage == "idle" else None

        return seconds

    def async_save(self) -> Callable[[], float | None]:
        """Save by torch's `async_save`; as `ours`."""
        begun_s = time.perf_counter()
        future: Any = dcp.async_save(  # type: ignore[attr-defined]
            self._state(), checkpoint_id=self._folder / "async_save" / str(self._step), process_group=self._group
        )

        def seconds() -> float | None:
            # Together: a rank that ended its turn alone would leave the others in a step.
            done = min(each[0] for each in self.everyones([float(future.done())]))
            if not done:
                return None
            future.result()
            return time.perf_counter() - begun_s

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
        if way != "ours" and self._rank == 0:
            shutil.rmtree(self._folder / way, ignore_errors=True)
        self._model.wait_for_all()

    def close(self) -> None:
        if self._calls is not None:
            self._calls.close()
        if self._saver is not None:
            self._saver.close()
        self._steps.close()
        self._model.close()


if __name__ == "__main__":
    from netlayer.cli import run

    run(command, "python -m bench.checkpoint_stall")
