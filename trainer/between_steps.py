"""Evaluations and checkpoints of a run, between its steps or beside them: what is due, and what became of it.

Not covered: the loop that asks (`trainer.loop`), and how a checkpoint is written (`trainer.checkpoint.save`).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from netlayer.config.tree import EvaluationConfig
from netlayer.errors import ConfigError
from netlayer.units import format_size
from trainer.checkpoint import save as checkpoint
from trainer.replicas import ReplicaCheck

if TYPE_CHECKING:
    from trainer.loop import Row, Trainer

logger = logging.getLogger(__name__)


class BetweenSteps:
    """Evaluations and checkpoints, with no step under way; the arguments are those of `trainer.loop.run`."""

    def __init__(
        self,
        trainer: Trainer,
        evaluation: EvaluationConfig,
        on_evaluation: Callable[[Row], None],
        checkpoints: Path | str | None,
        on_warning: Callable[[str], None],
        out: Path | None = None,
    ) -> None:
        self._trainer, self._evaluation, self._on_evaluation = trainer, evaluation, on_evaluation
        self._checkpoints, self._on_warning, self._out = checkpoints, on_warning, out
        self.last = trainer.job.optimizer.steps
        self._save_every = trainer.job.checkpoint.every_steps if checkpoints else 0
        self._retry_due = False
        """Whether the last checkpoint that was due found no room."""
        self._compare_every = trainer.job.watch.compare_replicas_every
        self._replicas: ReplicaCheck | None = None
        self._skipped_copies = self._skipped_saves = 0  # that were due, since a row was handed over
        self._has_said_skipped_copy = self._has_said_skipped_save = False

    def open(self) -> None:
        """Make ready for checkpoints, and for comparisons of the replicas."""
        trainer = self._trainer
        if self._compare_every:
            device = trainer.place.device_name
            self._replicas = ReplicaCheck(trainer.model, trainer.seed, device, trainer.steps_done)
        if self._checkpoints is not None:
            for line in self._trainer.open_saver(self._checkpoints, self._out):
                self._on_warning(line)

    def evaluates(self, step: int) -> bool:
        return step % self._evaluation.every_steps == 0 or step == self.last

    def compares(self, step: int) -> bool:
        return self._replicas is not None and step % self._compare_every == 0

    def saves(self, step: int) -> bool:
        if not self._save_every:
            return False
        # One that found no room is tried again after an evaluation, when nothing is under way anyway.
        return step % self._save_every == 0 or step == self.last or (self._retry_due and self.evaluates(step))

    def saves_beside(self, step: int) -> bool:
        """Whether a save is due that runs beside the training: not the last one, which has nothing to run beside."""
        return self.saves(step) and self._trainer.saves_beside and step < self.last

    def saves_now(self, step: int) -> bool:
        """Whether a save is due for which the training waits."""
        return self.saves(step) and not self.saves_beside(step)

    def start_save(self, step: int) -> bool:
        """Start a save of what `step` will have made of the parameters, where one is due that runs beside the training.

        Returns:
            Whether it has to wait for the save before it.
        """
        is_saving = self._trainer.is_saving
        saves, copies = self.saves_beside(step), self._copies(step)
        if not is_saving:
            if saves or copies:
                self._trainer.start_save(step, to_storage=saves, to_peers=copies)
            return False
        if saves and not self._may_skip(step):
            return True
        if saves:
            self._skip_save(step)
        if copies:
            self._skip_copy(step)
        return False

    def _may_skip(self, step: int) -> bool:
        """Whether the save of `step` is skipped where another is under way.

        Not one that is to stay for ever, and none for a copy that goes to other machines' memory alone: copies may come
        so often that storage would never have its turn.
        """
        config = self._trainer.job.checkpoint
        stays = config.keep_every_steps > 0 and step % config.keep_every_steps == 0
        return config.when_busy == "skip" and not stays and not self._trainer.is_copying

    def _skip_save(self, step: int) -> None:
        self._skipped_saves += 1
        if not self._has_said_skipped_save:
            self._has_said_skipped_save = True
            rule = "storage has not finished the checkpoint before it; later ones are counted in checkpoint_skipped"
            self._on_warning(
                f"step {step}: no checkpoint, {rule}; raise job.checkpoint.every_steps, or write elsewhere"
            )

    def _copies(self, step: int) -> bool:
        """Whether a copy in the memory of other machines is due."""
        interval = self._trainer.job.checkpoint.copy_interval
        return self._trainer.copies_beside and step % interval == 0 and step < self.last

    def _skip_copy(self, step: int) -> None:
        """Note that a save is under way: there is no memory for another snapshot, and training does not wait."""
        self._skipped_copies += 1
        if not self._has_said_skipped_copy:
            self._has_said_skipped_copy = True
            what = "peer copy" if self._trainer.is_copying else "checkpoint"
            rule = f"the {what} before it is still being written; later ones are counted in peer_skipped"
            self._on_warning(f"step {step}: no peer copy, {rule}; raise job.checkpoint.peer_interval")

    def evaluate(self, step: int) -> None:
        with _timed() as seconds:
            loss = self._trainer.evaluate(self._evaluation.global_batches)
        row: Row = {"step": step, "validation_loss": loss, "eval_s": sum(seconds)}
        row |= {f"validation_loss_{name}": each for name, each in self._trainer.held_out_losses.items()}
        with self._trainer.phase("writes a row"):
            self._on_evaluation(row)

    def note_saves(self, row: Row) -> None:
        """Put what became of saves beside the training into a row, and say it."""
        row["checkpoint_skipped"] += self._skipped_saves
        if self._trainer.copies_beside:
            row["peer_skipped"] += self._skipped_copies
        self._skipped_saves = self._skipped_copies = 0
        for outcome in self._trainer.outcomes():
            if outcome.is_peers:
                self._note_copy(outcome, row)
            elif isinstance(outcome, checkpoint.Published):
                self._retry_due = False
                row["checkpoint_save_s"] += outcome.seconds
                row["checkpoint_cpu_s"] += outcome.cpu_s
                if self._trainer.place.rank == 0:
                    size = format_size(outcome.num_bytes)
                    logger.info("checkpoint: %s, %s in %.1f s", outcome.path, size, outcome.seconds)
                    self._trainer.mark_checkpoint(outcome.step)
            else:
                self._note_failure(outcome.step, row, outcome.error)

    def _note_copy(self, outcome: checkpoint.Published | checkpoint.Failed, row: Row) -> None:
        if isinstance(outcome, checkpoint.Failed):
            row["peer_failures"] += 1
            self._on_warning(f"no peer copy of step {outcome.step}, training goes on: {outcome.error}")
            self._trainer.revive_copies()
            return
        row["peer_save_s"] += outcome.seconds
        if self._trainer.place.rank == 0:
            logger.info("peer copy: %s, %s in %.1f s", outcome.path, format_size(outcome.num_bytes), outcome.seconds)

    def save_after_another(self, step: int, row: Row) -> None:
        """Save beside the training after `step`, once storage is through with the save before it."""
        is_copying = self._trainer.is_copying
        with _timed(row, "checkpoint_stall_s") as seconds:
            self._trainer.finish_save()
        self.note_saves(row)
        rule = "storage had not finished the checkpoint before it; raise job.checkpoint.every_steps, or write elsewhere"
        if is_copying:
            rule = "the peer copy before it was not finished; raise job.checkpoint.peer_interval"
        self._on_warning(f"step {step}: training waited {sum(seconds):.3f} s to save a checkpoint, for {rule}")
        with _timed(row, "checkpoint_stall_s"):
            self._trainer.start_save(step, to_peers=self._copies(step))

    def run(self, step: int, row: Row, *, stops: bool) -> Path | None:
        """Evaluate and save where that is due after a step; return the last checkpoint where the run ends here.

        Replicas are compared first: what differs is not saved.

        Args:
            row: of the step, which gets the times.
            stops: somebody has asked for the end, and waits: an evaluation is the first thing of a resumed run.
        """
        if self._replicas is not None and self.compares(step):
            self._trainer.exclude_time()
            with self._trainer.phase("compares replicas"):
                line = self._replicas.compare(step)
            if line:
                self._on_warning(line)
        if self.evaluates(step) and not stops:
            with _timed(row, "eval_s"):
                self.evaluate(step)
        if self._checkpoints is None or not (self.saves_now(step) or stops):
            return None
        ends = stops or step == self.last
        try:
            with _timed(row, "checkpoint_s", "checkpoint_stall_s"):
                self._trainer.save(self._checkpoints)  # once the one before is there
            self._retry_due = False
        except checkpoint.NoRoom as exc:
            if ends:
                row["checkpoint_failures"] += 1
                raise
            self._note_failure(step, row, exc)
        finally:
            self.note_saves(row)
        if not ends:
            return None
        if stops:
            with _timed(row, "eval_s"):
                # A short one, for somebody waits: it shows that the parameters which were saved are sound.
                self._trainer.evaluate(1)
        with _timed(row, "checkpoint_s", "checkpoint_stall_s"):
            return self._trainer.commit()

    def _note_failure(self, step: int, row: Row, error: ConfigError) -> None:
        """Say that there is no checkpoint: training is worth more than one that may fit later."""
        row["checkpoint_failures"] += 1
        self._retry_due = True
        self._on_warning(f"no checkpoint of step {step}, training goes on: {error}")


@contextlib.contextmanager
def _timed(row: Row | None = None, *columns: str) -> Iterator[list[float]]:
    """Measure the seconds of the block, into the list that it gets, and add them to columns of the row."""
    seconds: list[float] = []
    start = time.perf_counter()
    try:
        yield seconds
    finally:
        seconds.append(time.perf_counter() - start)
        for column in columns:
            assert row is not None
            row[column] += seconds[0]
