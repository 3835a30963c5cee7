"""A program that kills itself at every file operation of a save in turn; after each, what is there must be whole."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from netlayer.config.tree import JobConfig
from trainer.checkpoint import restore
from trainer.checkpoint import save as checkpoint
from trainer.checkpoint.meta import find
from trainer.checkpoint.names import checkpoints_in
from trainer.optim import build_optimizer
from trainer.parallel import Optimizers, ParallelModel

_KEYS = {"layers": 1, "hidden": 8, "heads": 1, "ffn_hidden": 8, "vocab_size": 16, "seq_len": 8}
_OPERATIONS = ("open", "os.")


def main(folder: Path) -> None:
    """Print how often a save was killed."""
    torch.set_num_threads(1)  # so that a fork has all that its parent has
    model, optimizers = build()
    save(model, optimizers, 1, folder)
    for kills in range(10_000):
        step = find(folder).step + 1
        if not is_killed(lambda step=step: save(model, optimizers, step, folder), kills):  # type: ignore[misc]
            assert find(folder).step == step
            break
        for path in checkpoints_in(folder):
            restore.load(find(path), *build())
        assert find(folder).step in (step - 1, step)
    print(kills)


def build() -> tuple[ParallelModel, Optimizers]:
    sections = {"model": _KEYS, "parallel": {"dp": 1}, "batch": {"global_batch_size": 1, "micro_batch_size": 1}}
    job = JobConfig.model_validate({**sections, "checkpoint": {"keep": 1}})
    model = ParallelModel(job, 0, 0, torch.device("cpu"))
    return model, model.optimizer(lambda chunk: build_optimizer(job.optimizer, chunk))


def save(model: ParallelModel, optimizers: Optimizers, step: int, folder: Path) -> None:
    for slot in model.slots:
        state = optimizers.each[0].state[slot.piece]
        state["exp_avg"] = state["exp_avg_sq"] = torch.zeros_like(slot.piece)
    checkpoint.commit(checkpoint.save(model, optimizers, step, 0, folder), model.job.checkpoint.keep)


def is_killed(function: Callable[[], None], operations: int) -> bool:
    """Whether a process that does it comes to more than so many file operations; it is killed there."""
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    left = operations

    def count(event: str, _arguments: object) -> None:
        nonlocal left
        if event.startswith(_OPERATIONS) and event != "os.kill":
            left -= 1
            if left < 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    function()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
