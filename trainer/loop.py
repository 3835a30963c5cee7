"""One rank's training loop: a step, an evaluation, and what is noted of each.

A step launches its all-gathers before it loads data, and reduces gradients under the last backward pass. The host reads
a step's numbers when it has launched the next one, so that the device never runs dry for them. Not covered: how the
model is spread (`trainer.parallel`), recovery.

Shapes: B sequences, T positions, N samples of this rank, D data-parallel ranks.

[Note: one step late] What a step's numbers say comes when the next step is under way: a loss that is no number, or a
request to stop. Before a checkpoint, an evaluation and the end the loop waits for them. All ranks read the same
numbers, so all of them stop at the same step.

[Note: good checkpoints] The numbers of a step are those of the parameters before its update, which may break them. So a
checkpoint, of which every element is finite, is verified by the step after it, whose loss and gradient are finite;
where none follows, by a held-out loss. Older ones are deleted only then, and a job resumes from a verified one unless
it is given another. One that is written beside the training is not written before.

[Note: time beside steps] Evaluations and checkpoints for which the training waits are no step's time: a step is timed
from the end of the one before only where nothing came between. Their seconds stand in the row of the step that they
follow (`eval_s`, `checkpoint_s`), which is handed over when they are done, or have failed. One beside the training is a
part of its step: what that costs is `checkpoint_stall_s`, and `checkpoint_save_s` is what it took, where that is known.
Of a copy in the memory of other machines alone they are `peer_stall_s` and `peer_save_s`.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import Tensor

from collectives.watch.monitor import Monitor
from collectives.watch.recorder import Recorder, StepComm
from collectives.watch.watchdog import Watch
from netlayer.config.tree import EvaluationConfig, JobConfig
from netlayer.errors import CheckFailed, ConfigError, NetlayerError
from netlayer.layout import describe_ranks
from netlayer.rendezvous import Groups
from netlayer.workload.flops import step_flops, utilisation
from netlayer.workload.model_size import num_parameters, padded_vocabulary
from netlayer.workload.peaks import peak_flops
from trainer.between_steps import BetweenSteps
from trainer.checkpoint import restore
from trainer.checkpoint import save as checkpoint
from trainer.checkpoint.meta import Meta
from trainer.checkpoint.names import PENDING, step_of
from trainer.data.mixture import TEXT, Mixture
from trainer.data.prepare import Corpus
from trainer.feed import open_feed
from trainer.notes import Notes, NotesInFlight, every_ranks, spread_losses
from trainer.optim import build_optimizer
from trainer.parallel import Batches, ParallelModel
from trainer.peer_copy.copies import PeerCopies
from trainer.ramps import batch_size, learning_rate
from trainer.resilience.progress import ProgressFile
from trainer.step import open_steps
from trainer.stop import StopRequest
from trainer.train import Stop

logger = logging.getLogger(__name__)

Row = dict[str, Any]
_MOST_NAMED = 8  # ranks of an error
_PHASES = {
    "saves a checkpoint": "checkpoint",
    "moves a checkpoint": "checkpoint",
    "loads a checkpoint": "checkpoint",
    "evaluates": "evaluation",
}
"""Classes of the slow blocks' segments; of garbage collections the monitor hears from Python."""


@dataclass(frozen=True)
class RankInfo:
    """Rank of this process, number of ranks, and the device that it computes on."""

    rank: int
    world_size: int
    device: torch.device

    @property
    def device_name(self) -> str:
        if self.device.type == "cuda":
            return torch.cuda.get_device_name(self.device)
        threads = torch.get_num_threads()
        return f"CPU, {threads} thread{'s' * (threads > 1)}"


@dataclass(frozen=True)
class Launched:
    """A step that the device may still be working on.

    Args:
        comm: what the recorder has of it.
        before: the step that it follows at once; None where something else came between.
        memory_bytes: peak on a GPU, what is resident on a CPU.
        is_replayed: as a CUDA graph, of whose collectives the recorder knows nothing.
        data_wait_s: for which the host waited for the step's batches; None: the rank has drawn them from a text.
        save_epoch: stage of a save that its numbers speak of (`Saver.epoch`).
    """

    step: int
    lr: float
    notes: NotesInFlight
    comm: StepComm
    before: StepComm | None
    memory_bytes: int
    is_replayed: bool
    data_wait_s: float | None = None
    save_epoch: int = 0


class Trainer:
    """The model, its optimiser and its data on one rank. Every rank calls the same methods in the same order.

    Args:
        job: resolved configuration.
        corpus: tokens, the same on every rank; or the datasets of job.data.
        seed: of the initial parameters and of the samples.
        place: this rank.
        groups: of `open_world`; None: one rank alone.
        stop: says when somebody wants the training to end; None: nobody will.
        watch: says who holds up the others; None: nobody does.
        monitor: takes the events of this rank; None: they are not kept.
        progress: tells an executor of `netlayer run` what this rank does; None: there is none.
    """

    def __init__(
        self,
        job: JobConfig,
        corpus: Corpus | Mixture,
        seed: int,
        place: RankInfo,
        groups: Groups | None = None,
        stop: StopRequest | None = None,
        watch: Watch | None = None,
        monitor: Monitor | None = None,
        progress: ProgressFile | None = None,
    ) -> None:
        self.job, self.seed, self.place, self.stop = job, seed, place, stop or StopRequest()
        self.watch, self.monitor, self.progress = watch, monitor, progress
        # Read now: a cache of corpora may drop this one while its run trains on.
        self.text = checkpoint.Text.of(corpus) if isinstance(corpus, Corpus) else None
        self.num_parameters = num_parameters(job.model)
        # Each `Launched` holds its own step: the recorder needs to keep no more.
        self.recorder = Recorder(place.device, num_kept=1)
        if monitor is not None:
            monitor.follow(self.recorder)
        self.model = ParallelModel(job, seed, place.rank, place.device, groups, self.recorder, watch)
        self.feed = open_feed(job, corpus, self.model)
        self._resumed: Meta | None = None
        self._is_feed_open = False
        self.held_out_losses: dict[str, float] = {}
        """Of the last evaluation, by the names of job.data.evaluation."""
        if place.rank == 0 and job.model.vocab_size % job.parallel.tp:
            rows = padded_vocabulary(job.model.vocab_size, job.parallel.tp)
            logger.info("the vocabulary of %d is padded to %d, a multiple of tp", job.model.vocab_size, rows)
        self.optimizer = self.model.optimizer(
            lambda chunk: build_optimizer(job.optimizer, chunk, step_in_backward=job.overlap.step_in_backward)
        )
        # Infinity where nothing is clipped: the norm is still taken, for the rows and for the check.
        self.steps = open_steps(self.model, self.optimizer, job.optimizer.max_grad_norm or math.inf)
        self.steps_done = 0
        self._before: StepComm | None = None
        self._waited_ahead_s = 0.0  # for the next step's batches
        self._pending: Path | None = None
        self._saver: checkpoint.Saver | None = None
        self._copies: PeerCopies | None = None
        self._stalls: dict[int, float] = {}  # by step: seconds that a save beside the training has cost
        self._stall_column = "checkpoint_stall_s"  # of the last save
        self._untouched: Path | None = None  # the checkpoint whose parameters these still are
        self.peak = peak_flops(place.device_name, job.model.dtype)

    @contextlib.contextmanager
    def phase(self, phrase: str) -> Iterator[None]:
        """Mark the block as slow on this rank: the watch lets the others wait for it, and the monitor times it."""
        watched = contextlib.nullcontext() if self.watch is None else self.watch.phase(phrase)
        progress = contextlib.nullcontext() if self.progress is None else self.progress.phase(phrase)
        with watched, progress, self._timed(_PHASES.get(phrase), phrase):
            yield

    def _timed(self, segment: str | None, name: str) -> contextlib.AbstractContextManager[None]:
        """Have the monitor time the block by the host's clock; None: not this one."""
        if self.monitor is None or segment is None:
            return contextlib.nullcontext()
        return self.monitor.segment(segment, name, on_host=True)

    def resume(self, meta: Meta, *, model_only: bool = False) -> None:
        """Go on from a checkpoint: the next step is the one after it, with the samples that it would have had.

        Args:
            model_only: take its parameters alone: the next step is the first one, with new moments.

        Raises:
            ConfigError: it is of another model, or damaged.
        """
        model_only = model_only or meta.is_fresh
        restore.load(meta, self.model, self.optimizer, model_only=model_only)
        self._untouched = meta.path
        if model_only:
            return
        self.steps_done, self._resumed = meta.step, meta
        # With another text the samples are others in any case, and the user's seed may draw them.
        self.seed = self.seed if self.job.checkpoint.allow_dataset_change else meta.seed

    def open_feed(self) -> None:
        """Begin to read the batches of the next step; every rank calls it, once it knows where it starts.

        Raises:
            ConfigError: a machine has no room for batches; on all ranks alike.
        """
        if not self._is_feed_open:
            self._is_feed_open = True
            with self.phase("opens the data"):
                self.feed.open(self.seed, self.steps_done, self._resumed)

    def open_saver(self, folder: Path | str, out: Path | None = None) -> list[str]:
        """Make ready for saves into `folder`; every rank calls it, before the first step, or none does.

        Args:
            out: of the run, which all machines see, for copies in their memory; None: there are none.

        Returns:
            Lines for the user: that saves will not run beside the training, as the job asks for, or what copies are not
            good for.

        Raises:
            ConfigError: copies take more than they may; on all ranks alike.
        """
        config = self.job.checkpoint
        copies = out is not None and config.copy_interval > 0
        beside = config.asynchronous and (config.every_steps > 0 or copies)
        with self.phase("makes ready for checkpoints"):
            self._saver, line = checkpoint.open_saver(self.model, self.optimizer, folder, self.text, beside=beside)
            if out is None or not copies or not self._saver.is_beside:
                return [line] if line else []
            self._copies = PeerCopies(self.model, out, self._saver.own_bytes, self.steps_done)
            if self._copies.is_ready:
                self._saver.add_peers(self._copies.location)
            return self._copies.lines

    @property
    def copies_beside(self) -> bool:
        """Whether copies go to the memory of other machines."""
        return self._copies is not None and self._copies.is_ready

    @property
    def saves_beside(self) -> bool:
        """Whether saves run beside the training."""
        return self._saver is not None and self._saver.is_beside

    @property
    def is_saving(self) -> bool:
        """Whether a save is under way beside the training."""
        return self._saver is not None and self._saver.stage != "idle"

    @property
    def is_copying(self) -> bool:
        """Whether the save that is under way is for the memory of other machines alone."""
        return self._saver is not None and self._saver.is_copying

    def start_save(self, step: int, *, to_storage: bool = True, to_peers: bool = False) -> None:
        """Start to save the state after `step`, which was launched last; every rank calls it, with no save under way.

        What it costs is added to the row of the step, where that is not read yet.
        """
        assert self._saver is not None
        begin_s = time.perf_counter()
        with self.phase("saves a checkpoint"):
            self.open_feed()  # it knows how many samples that were
            data = self.feed.state(step)
            self._saver.begin(step, self.seed, data, to_storage=to_storage, to_peers=to_peers)
        self._stall_column = "checkpoint_stall_s" if to_storage else "peer_stall_s"
        self._stalls[step] = self._stalls.get(step, 0.0) + time.perf_counter() - begin_s

    def finish_save(self, *, is_verified: bool = False) -> Path | None:
        """Wait for the save that is under way, and return its path; None: there is none, or it has failed.

        Raises:
            CheckFailed: what it would hold is not finite; on all ranks alike.
        """
        if self._saver is None:
            return None
        self.exclude_time()
        with self.phase("waits for storage"), self._told_where_lost():
            return self._saver.finish(is_verified=is_verified)

    def end_saves(self) -> None:
        """Finish a save whose parameters a step has shown to be sound, and give up another; training has failed.

        Every rank calls it, for all have failed alike.
        """
        if self._saver is not None:
            with self.phase("waits for storage"), contextlib.suppress(ConfigError, CheckFailed):
                self._saver.end()

    def revive_copies(self) -> None:
        """Start the store of this machine again where it has ended; every rank calls it, after a copy that failed."""
        if self._copies is not None:
            self._copies.revive()

    def outcomes(self) -> list[checkpoint.Published | checkpoint.Failed]:
        """Return what became of saves beside the training since the last call."""
        if self._saver is None:
            return []
        outcomes, self._saver.outcomes = self._saver.outcomes, []
        return outcomes

    def save(self, folder: Path | str) -> Path:
        """Write a checkpoint of the steps that were read so far; every rank calls it, with no step under way.

        It is pending until the next step is read, or `commit` is called.

        Raises:
            CheckFailed: a parameter or a moment is not finite; on all ranks alike.
            NoRoom: the disk is full; on all ranks alike.
            ConfigError: it cannot be written for another reason.
        """
        self.exclude_time()
        with self.phase("saves a checkpoint"), self._told_where_lost():
            self.open_feed()  # it knows how many samples that were
            data = self.feed.state(self.steps_done)
            if self._saver is not None:
                path = self._saver.save(self.steps_done, self.seed, data)
            else:
                path = checkpoint.save(self.model, self.optimizer, self.steps_done, self.seed, folder, self.text, data)
        # Until a step or a held-out loss has shown that its parameters are sound: [Note: good checkpoints].
        self._pending = path if path.name.endswith(PENDING) else None
        return path

    @contextlib.contextmanager
    def _told_where_lost(self) -> Iterator[None]:
        """Save in the block; where the state is not finite, the error names the ranks."""
        try:
            yield
        except checkpoint.StateLost as exc:
            where = _first_ones([self._describe([rank]) for rank in exc.ranks])
            raise CheckFailed(f"{exc} in the shard of {where}; lower job.optimizer.lr") from exc

    def commit(self) -> Path | None:
        """Make the pending checkpoint, if there is one, a good one: [Note: good checkpoints]. Return its new path."""
        # Taken away first: a rename that fails is not tried again by the next step.
        path, self._pending = self._pending, None
        if path is None:
            return None
        self.exclude_time()
        good = checkpoint.good_name(path)
        # A rename on a file system that all see: once is enough.
        if self.place.rank == 0:
            with self.phase("moves a checkpoint"):
                keep = self.job.checkpoint.keep, self.job.checkpoint.keep_every_steps
                checkpoint.commit(path, *keep)
            logger.info("checkpoint: %s", good)
            self.mark_checkpoint(step_of(good))
        return good

    def mark_checkpoint(self, step: int) -> None:
        """Record that the checkpoint after `step` is good to resume from; one rank of the run calls it."""
        if self.monitor is not None:
            self.monitor.mark("checkpoint", step=step)

    def exclude_time(self) -> None:
        """Exclude the work that is done now from step times: the next step is timed from its own begin."""
        self._before = None

    def close(self) -> None:
        """End the training, which has ended well; every rank calls it, with no step under way. Process groups stay."""
        if self._saver is not None:
            self._saver.close()
        if self._copies is not None:
            self._copies.close()
        self.feed.close()
        self.steps.close()
        self.model.close()

    def abandon(self) -> None:
        """Give back threads, processes and memory of the host after a failure; waits for no other rank.

        For a process that goes on without this training. Stores of copies in memory stay, for the next one reads them.
        """
        if self._saver is not None:
            self._saver.abandon()
        if self._copies is not None:
            self._copies.leave()
        self.feed.close()
        self.steps.close()

    def step(self, step: int) -> Row:
        """Take one optimiser step, counted from 1, wait for it, and return its row.

        Raises:
            CheckFailed: as `read`.
        """
        return self.read(self.launch(step))[0]

    def launch(self, step: int) -> Launched:
        """Launch one optimiser step, counted from 1. On CUDA the host does not wait for it."""
        # First, so that the watch and the recorder count all that is launched from here to this step.
        if self.watch is not None:
            self.watch.begin_step(step)
        self.recorder.begin_step(step)
        # Gathers of parameters before the data is loaded: they run meanwhile.
        self.steps.begin(step)
        lr = learning_rate(self.job.optimizer, step)
        begin_s = time.perf_counter()
        with self._timed("data", "batches of the step"):
            batches = self._training_batches(step)
        waited_s = self._waited_ahead_s + time.perf_counter() - begin_s
        data_wait_s, self._waited_ahead_s = waited_s if self.job.data.counts_samples else None, 0.0
        if self._saver is not None and self.job.loop.cuda_graph:
            self._saver.order_updates()  # a graph has no hook before its update
        stepped = self.steps.run(step, batches, lr)
        assert stepped.grad_norm is not None
        # Copied to the host after the step, so that reading them later does not wait for the step after.
        save_epoch, save = (self._saver.epoch, self._saver.own_state()) if self._saver else (0, (0.0, 0.0, None))
        own = stepped.loss, stepped.grad_norm, self.stop.is_asked, save
        notes = NotesInFlight(self.model, *own, self._next_counts(step))
        self.feed.note_counts(notes.counts_2)
        # `exclude_time` may have cleared it: then something came between, and this step is timed from its own begin.
        comm, before = self.recorder.end_step(), self._before
        self._before = comm
        memory_bytes = _memory_bytes(self.place.device)
        return Launched(step, lr, notes, comm, before, memory_bytes, stepped.is_replayed, data_wait_s, save_epoch)

    def read(self, launched: Launched) -> tuple[Row, bool]:
        """Return the row of a step, and whether a rank was asked to stop; waits for the step, and for it alone.

        Raises:
            CheckFailed: the loss of a rank, or the gradient, is not finite; on all ranks alike.
        """
        notes = launched.notes.read()
        # First: only a step whose numbers are finite makes the checkpoint before it a good one.
        try:
            self._check_finite(launched.step, notes)
        except CheckFailed as exc:
            if self.monitor is not None:
                self.monitor.mark("nan", str(exc), step=launched.step)
            raise
        self.steps_done, self._untouched = launched.step, None
        self.commit()
        row = self._row(launched, notes)
        if self._saver is not None:
            row[self._stall_column] += self._stalls.pop(launched.step, 0.0) + self._saver.waited_s()
            with self._told_where_lost():
                self._saver.advance(launched.save_epoch, notes)
        return row, notes.num_asked > 0

    def evaluate(self, global_batches: int) -> float:
        """Mean loss of `global_batches * global_batch_size` windows spread evenly over the held-out text: always the
        same.

        Of several evaluation sets it is the mean of theirs; `held_out_losses` has them by name.

        Raises:
            CheckFailed: the loss of a rank is not finite; on all ranks alike.
        """
        self.exclude_time()
        with self.phase("evaluates"):
            self.open_feed()
            sets = self.feed.evaluation(global_batches)
            losses = {name: self._evaluate(name, batches) for name, batches in sets}
        self.held_out_losses = {name: loss for name, loss in losses.items() if name != TEXT}
        return sum(losses.values()) / len(losses)

    def _evaluate(self, name: str, batches: Batches) -> float:
        losses_D = spread_losses(self.model, self.model.evaluate(batches))
        self.model.world.all_reduce(losses_D)
        losses: list[float] = losses_D.tolist()
        of = "" if name == TEXT else f" of {name}"
        self._check_losses(self.steps_done, f"held-out loss{of}", losses, "lower job.optimizer.lr")
        return sum(losses) / len(losses)

    def _training_batches(self, step: int) -> Batches:
        self.open_feed()  # where a caller takes steps without `run`
        with self.phase("waits for its batches") if self.job.data.counts_samples else contextlib.nullcontext():
            return self.feed.training(step)

    def _next_counts(self, step: int) -> Tensor | None:
        """Return what the ranks add up for the next batch, for which the host waits here where it is late."""
        if not self.feed.waits:
            return self.feed.next_counts(step)
        begin_s = time.perf_counter()
        with self._timed("data", "batches of the next step"), self.phase("waits for its batches"):
            counts_2 = self.feed.next_counts(step)
        self._waited_ahead_s = time.perf_counter() - begin_s
        return counts_2

    def _check_losses(self, step: int, name: str, losses_D: Sequence[float], remedy: str) -> None:
        layout = self.job.parallel.layout
        # The last stage has the losses, and tensor-parallel ranks have the same ones: one rank stands for each. Of the
        # parts of a sequence the sum does not say which one is lost.
        first = layout.rank(pp=layout.pp - 1)
        stride = layout.tp * layout.cp  # to the next part of the batch
        ends = [layout.group_of("cp", first + stride * part) for part in range(layout.data_ranks)]
        lost = [pair for pair in zip(ends, losses_D, strict=True) if not math.isfinite(pair[1])]
        if lost:
            # No step of this run has changed the parameters, so a lower learning rate is no remedy.
            if self._untouched is not None:
                remedy = f"training has broken the parameters of {self._untouched}; take an earlier checkpoint"
            where = _first_ones([f"{loss} on {self._describe(ranks)}" for ranks, loss in lost])
            raise CheckFailed(f"step {step}: the {name} is {where}; {remedy}")

    def _check_finite(self, step: int, notes: Notes) -> None:
        layout, remedy = self.job.parallel.layout, "lower job.optimizer.lr, or look at this step's data"
        self._check_losses(step, "loss", notes.losses, remedy)
        if not math.isfinite(notes.grad_norm):
            # Only where the norm is lost, and on all ranks alike: the sum does not say on which rank.
            squares = every_ranks(self.model, notes.own_square)
            lost = [pair for pair in enumerate(squares) if not math.isfinite(pair[1])]
            where = _first_ones([self._describe([rank]) for rank, _ in lost])
            where = f"in the shard of {where}" if lost else "as a sum, and finite on each rank"
            if lost and layout.gradient_ranks > 1:
                where += " (a shard is the mean over the data-parallel ranks)"
            raise CheckFailed(f"step {step}: the gradient norm is {notes.grad_norm}, {where}; {remedy}")

    def _describe(self, ranks: Sequence[int]) -> str:
        return f"{describe_ranks(ranks)} ({self.job.parallel.layout.describe(ranks)})"

    def _row(self, launched: Launched, notes: Notes) -> Row:
        """Return the row; `step_ms` starts at the end of the step before, or at its own begin if work came between."""
        comm, before = launched.comm, launched.before
        seconds = comm.step_s if before is None else comm.seconds_after(before)
        ranks, sequences = self.place.world_size, batch_size(self.job.batch, launched.step)
        flops = step_flops(self.job.model, sequences)
        row: Row = {
            "step": launched.step,
            "loss": notes.loss,
            "lr": launched.lr,
            "grad_norm": notes.grad_norm,
            "step_ms": seconds * 1e3,
            "tokens_per_s": sequences * self.job.model.seq_len / seconds,
            "exposed_comm": None if launched.is_replayed else comm.exposed_comm,
            "memory_gib": launched.memory_bytes / 2**30,
            "mfu_full": utilisation(flops.full, seconds, self.peak, ranks),
            "mfu_causal": utilisation(flops.causal, seconds, self.peak, ranks),
            "eval_s": 0.0,
            "checkpoint_s": 0.0,
            "checkpoint_stall_s": 0.0,
            "checkpoint_save_s": 0.0,
            "checkpoint_cpu_s": 0.0,
            "checkpoint_failures": 0,
            "checkpoint_skipped": 0,
        }
        if self.copies_beside:
            row |= {"peer_stall_s": 0.0, "peer_save_s": 0.0, "peer_failures": 0, "peer_skipped": 0}
        if launched.data_wait_s is not None:
            row["data_wait_ms"] = launched.data_wait_s * 1e3
        return row


def run(
    trainer: Trainer,
    evaluation: EvaluationConfig,
    on_step: Callable[[Row], None],
    on_evaluation: Callable[[Row], None],
    checkpoints: Path | str | None = None,
    on_comm: Callable[[StepComm], bool] = lambda _comm: False,
    on_warning: Callable[[str], None] = lambda _line: None,
    out: Path | None = None,
) -> Stop | None:
    """Train to the end of the job, or until it is asked to stop; each row is handed over as soon as it is known.

    A checkpoint for which there is no room is tried again at the next one that is due, or after the next evaluation,
    whichever comes first. Only where nothing follows, at the end or a stop, does it end the run.

    Args:
        checkpoints: folder, or URL, for those that the job asks for, and for one where the training is asked to stop.
        on_comm: gets what the recorder has of each step, with its row; says whether it took time that is no step's.
        on_warning: gets a line that the user is to see; on all ranks alike.
        out: of the run, which all machines see, for copies of its state in their memory; None: there are none.

    Returns:
        None at the end of the job.

    Raises:
        CheckFailed: a loss, the gradient, or what a checkpoint would hold is not finite; on all ranks alike.
        NoRoom: the last checkpoint does not fit; on all ranks alike.
    """
    between = BetweenSteps(trainer, evaluation, on_evaluation, checkpoints, on_warning, out)
    under_way: list[Launched] = []

    def read_one() -> tuple[Row, bool]:
        launched = under_way.pop(0)
        row, is_asked = trainer.read(launched)
        between.note_saves(row)
        # Writing a trace takes time that is no step's.
        if on_comm(launched.comm):
            trainer.exclude_time()
        return row, is_asked

    def hand_over(row: Row) -> None:
        with trainer.phase("writes a row"):  # to a disk or a launcher that may be slow
            on_step(row)

    stopped = None
    between.open()
    trainer.open_feed()  # first: it reads while the starting point is evaluated
    with _saves_ended(trainer), _collected(trainer.job.loop.gc_interval) as collect:
        # Also of a resumed run: it shows what the training starts from.
        between.evaluate(trainer.steps_done)
        for step in range(trainer.steps_done + 1, between.last + 1):
            # Launched before the one before is read: [Note: one step late].
            under_way.append(trainer.launch(step))
            with trainer.phase("collects garbage"):
                collect(step)  # the device has a step to do meanwhile
            is_asked = False
            if len(under_way) > 1:
                row, is_asked = read_one()
                hand_over(row)
            # A save before this one is finished first, and this step's numbers show that it is sound.
            waits = not is_asked and between.start_save(step)
            # Leave this step's numbers for later, and the device busy, unless something below needs them.
            if not (is_asked or waits or between.saves_now(step) or between.evaluates(step) or between.compares(step)):
                continue
            row, is_asked_now = read_one()
            # A request at the last step changes nothing: the run ends, with all that is due then.
            stops = (is_asked or is_asked_now) and step < between.last
            with _handed_over_after(row, hand_over):
                if waits and not stops:
                    between.save_after_another(step, row)
                path = between.run(step, row, stops=stops)
            if stops:
                stopped = Stop(step, path)
                break
    trainer.model.wait_parameters()  # the last step has launched gathers: let none be under way when ranks part
    if trainer.progress is not None:
        trainer.progress.end()
    return stopped


@contextlib.contextmanager
def _saves_ended(trainer: Trainer) -> Iterator[None]:
    """Train in the block; where all ranks fail alike, what was sound and is half written is finished first."""
    try:
        yield
    except CheckFailed:
        trainer.end_saves()
        raise


@contextlib.contextmanager
def _handed_over_after(row: Row, hand_over: Callable[[Row], None]) -> Iterator[None]:
    """Hand over a row after the block, which adds to it; where the block fails, its own error is raised."""
    try:
        yield
    except BaseException:
        with contextlib.suppress(NetlayerError, OSError):
            hand_over(row)
        raise
    hand_over(row)


@contextlib.contextmanager
def _collected(every_steps: int) -> Iterator[Callable[[int], None]]:
    """Collect garbage on every rank at once, and not when a rank's own counters say so (MegaScale 6.3).

    The block calls what it gets with each step. 0 leaves all to Python.
    """
    if not every_steps:
        yield lambda _step: None
        return

    def collect(step: int) -> None:
        if step % every_steps == 0:
            gc.collect()

    was_enabled = gc.isenabled()
    # Before the freeze, or what is garbage now would stay for ever.
    gc.collect()
    # What lives until the end is not looked at again by each collection.
    gc.freeze()
    gc.disable()
    try:
        yield collect
    finally:
        gc.unfreeze()
        if was_enabled:
            gc.enable()


def _first_ones(names: Sequence[str]) -> str:
    """Join the first few names: thousands of ranks may lose their numbers together, and one line is to be read."""
    rest = len(names) - _MOST_NAMED
    return ", ".join(names[:_MOST_NAMED]) + (f", and on {rest} more ranks" if rest > 0 else "")


def _memory_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    resident: int = psutil.Process().memory_info().rss
    return resident
