"""What the ranks of these tests run: importable by a fresh interpreter."""

from __future__ import annotations

import errno
import json
import os
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from unittest import mock

import torch

from netlayer.config.tree import EvaluationConfig
from netlayer.launch.rank import RankContext
from trainer.checkpoint import restore, writer_process
from trainer.checkpoint.meta import find
from trainer.checkpoint.resume import AUTO, start_of
from trainer.checkpoint.save import NoRoom
from trainer.checkpoint.writer import KILL
from trainer.loop import Row, Trainer, run
from trainer.peer_copy.hosts import FOLDER, NODE
from trainer.plan import Plan
from trainer.worker import meet


def poisoned_on_rank_1(context: RankContext, plan: Plan) -> None:
    """Two good steps, then rank 1 alone computes a loss that is no number."""
    trainer = Trainer(plan.job, plan.corpus, plan.seed, *meet(context, plan))
    for step in range(1, 3):
        trainer.step(step)
    if context.env.rank == 1:
        trainer.model.chunks[0].module.register_forward_hook(lambda _module, _args, loss: loss * torch.nan)
    trainer.step(3)


def full_on_rank_1(context: RankContext, plan: Plan) -> list[str]:
    """What a save says on this rank where rank 1 alone finds the disk full; the next one finds room."""
    trainer = Trainer(plan.job, plan.corpus, plan.seed, *meet(context, plan))
    said = []
    sync = os.fsync
    for step in (1, 2):
        trainer.step(step)
        full = mock.patch("os.fsync", side_effect=OSError(errno.ENOSPC, "full"))
        with full if (step, context.env.rank) == (1, 1) else mock.patch("os.fsync", side_effect=sync):
            try:
                said.append(f"step {step}: {trainer.save(plan.out / 'checkpoints').name}")
            except NoRoom as exc:
                said.append(f"step {step}: {exc}")
        trainer.model.wait_for_all()
        left = sorted(str(path.relative_to(plan.out)) for path in Path(plan.out).rglob("*step-*"))
        trainer.model.wait_for_all()
        said.append(f"there: {', '.join(left)}")
    trainer.close()
    return said


SMALL_BUFFERS = writer_process._PROGRAM.replace(
    "; main(", "; import trainer.checkpoint.storage as storage; storage._DIRECT_BYTES = 8192; main("
)
"""Program of a writer with buffers of two blocks: a file takes many writes, as one of many GiB does, and not one."""


def killed(context: RankContext, plan: Plan, url: str, moment: str, has_small_buffers: bool) -> None:
    """Train alone, and be killed at a moment of a save."""
    torch.set_num_threads(1)
    if has_small_buffers:
        writer_process._PROGRAM = SMALL_BUFFERS
    os.environ[KILL] = moment
    trainer = Trainer(plan.job, plan.corpus, plan.seed, *meet(context, replace(plan, init_method=url)))
    run(trainer, EvaluationConfig(), lambda _row: None, lambda _row: None, plan.out)


@dataclass(frozen=True)
class SavedAndRestored:
    """Losses of a run that saves beside the training, those of one that resumes from step 6, and what it has read."""

    losses: list[float]
    again: list[float]
    restored: restore.Restored


def saved_and_restored(context: RankContext, plan: Plan, url: str) -> SavedAndRestored:
    torch.set_num_threads(1)
    place, groups = meet(context, replace(plan, init_method=url))
    losses, again = list[float](), list[float]()
    trainer = Trainer(plan.job, plan.corpus, plan.seed, place, groups)
    folder = plan.out / "checkpoints"
    run(trainer, EvaluationConfig(), lambda row: losses.append(row["loss"]), lambda _row: None, folder)
    trainer.close()
    other = Trainer(plan.job, plan.corpus, plan.seed, place, groups)
    restored = restore.load(find(folder / "step-000006"), other.model, other.optimizer)
    other.resume(find(folder / "step-000006"))
    run(other, EvaluationConfig(), lambda row: again.append(row["loss"]), lambda _row: None)
    other.close()
    return SavedAndRestored(losses, again, restored)


@dataclass(frozen=True)
class Copied:
    """Losses of a run whose state is copied to the other machine; where it has started, and what was said.

    `unbroken` are those of the same run without copies, from its first step; none of one that is lost.
    """

    losses: list[float]
    step: int
    notes: list[str]
    warnings: list[str]
    unbroken: list[float]


def copied(context: RankContext, plan: Plan, url: str, lost_after: int = 0, has_unbroken: bool = True) -> Copied:
    """Train as a machine of its own, from the newest checkpoint or copy.

    Args:
        lost_after: a step; then rank 1 and the store of its machine are killed.
        has_unbroken: also train from the first step without a break, for its losses.
    """
    torch.set_num_threads(1)
    os.environ[NODE] = f"node-{context.env.rank}"
    start = start_of(AUTO, plan.out, {})
    place, groups = meet(context, replace(plan, init_method=url))
    losses, warnings, unbroken = list[float](), list[str](), list[float]()
    if has_unbroken and not lost_after:
        whole = Trainer(plan.job, plan.corpus, plan.seed, place, groups)
        run(whole, EvaluationConfig(), lambda row: unbroken.append(row["loss"]), lambda _row: None)
        whole.close()
    trainer = Trainer(plan.job, plan.corpus, plan.seed, place, groups)
    if start.meta is not None:
        trainer.resume(start.meta)

    def add(row: Row) -> None:
        losses.append(row["loss"])
        saver, end_s = trainer._saver, time.monotonic() + 900  # on a busy host
        # Steps of a tiny model take no time: each waits for the writer, so that ten are enough for a copy.
        while saver is not None and saver.stage != "idle" and not any(saver.own_state()[:2]):
            assert time.monotonic() < end_s
            time.sleep(0.001)
        if row["step"] == lost_after and place.rank == 1:
            os.kill(store_pid(plan.out, os.environ[NODE]), signal.SIGKILL)
            os.kill(os.getpid(), signal.SIGKILL)

    done = trainer.steps_done
    folder = plan.out / "checkpoints"
    run(trainer, EvaluationConfig(), add, lambda _row: None, folder, on_warning=warnings.append, out=plan.out)
    trainer.close()
    return Copied(losses, done, list(start.notes), warnings, unbroken)


def store_pid(out: Path, machine: str) -> int:
    """Return the id of the process that serves as a machine's store."""
    return int(json.loads((out / FOLDER / f"{machine}.json").read_text(encoding="utf-8"))["pid"])
