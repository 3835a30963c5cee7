"""A rank of `netlayer train` with faults from inside: an exception, an abort, a lost number, a slow node, bad memory.

Run in place of `netlayer` as a run's training process. The faults stand in the file that `NETLAYER_FAULTS` names, which
is read again when it changes, and each is keyed by the node's name: a restart on another node is rid of it. One that
strikes once leaves a file, so that it does not strike again after the restart.
"""

from __future__ import annotations

import functools
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from netlayer.cli import main
from trainer.loop import Launched, Trainer

VARIABLE = "NETLAYER_FAULTS"
_JITTER_SHARE = 0.05  # of the steps


class InjectedFault(RuntimeError):
    """Exception of a fault that was injected."""


class _Faults:
    """Faults of this node."""

    def __init__(self) -> None:
        self._file, self._node = Path(os.environ[VARIABLE]), os.environ["NETLAYER_NODE"]
        self._stamp = -1
        self._faults: list[dict[str, Any]] = []

    def due(self, step: int) -> list[dict[str, Any]]:
        try:
            stamp = self._file.stat().st_mtime_ns
        except FileNotFoundError:
            return []
        if stamp != self._stamp:
            self._stamp, self._faults = stamp, json.loads(self._file.read_text(encoding="utf-8"))
        due = [each for each in self._faults if each["node"] == self._node and step >= each["step"]]
        return [each for each in due if each["kind"] in ("slow", "jitter") or self._is_first(each)]

    def _is_first(self, fault: dict[str, Any]) -> bool:
        done = self._file.with_name(f"fault-{fault['id']}.done")
        try:
            done.touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def _flip_for_ever(trainer: Trainer) -> None:
    """Have this rank's copy of the parameters lose a bit whenever it is gathered, as bad memory would."""
    [chunk] = trainer.model.chunks
    bucket = chunk.buckets[0]
    shard = bucket.plan.shard_numel
    element = (bucket.rank + 1) % bucket.plan.world_size * shard + 3  # of another rank's shard: it is not the master
    # A view that autograd does not see: memory that loses a bit tells nobody either.
    is_wide = bucket.unsharded_N.element_size() == 4
    bits = bucket.unsharded_N.data.view(torch.int32 if is_wide else torch.int16)[element : element + 16]
    stuck = 0x00400000 if is_wide else 0x0040  # the highest bit of the fraction, of float32 and of bfloat16

    def flip() -> None:
        bits.bitwise_or_(stuck)

    def flipping(before: Callable[..., None]) -> Callable[..., None]:
        def gather(*arguments: Any) -> None:
            before(*arguments)
            chunk.wait_parameters()
            flip()

        return gather

    trainer.steps.begin = flipping(trainer.steps.begin)  # type: ignore[method-assign]
    trainer.model.wait_parameters = flipping(trainer.model.wait_parameters)  # type: ignore[method-assign]


def _inject() -> None:
    """Have the trainer look for faults of this node before each step, and commit those that are due."""
    faults, launch = _Faults(), Trainer.launch

    @functools.wraps(launch)
    def launch_with_faults(trainer: Trainer, step: int) -> Launched:
        """Launch a step, with what goes wrong in it."""
        launched: Launched | None = None
        for fault in faults.due(step):
            if fault["kind"] == "exception":
                raise InjectedFault(f"injected at step {step}")
            if fault["kind"] == "abort":
                os.abort()
            if fault["kind"] == "slow":
                time.sleep(fault["sleep_s"])
            elif fault["kind"] == "jitter":
                time.sleep(random.uniform(0.0, fault["sleep_s"]) * (random.random() < _JITTER_SHARE))
            elif fault["kind"] == "flip":
                _flip_for_ever(trainer)
            elif fault["kind"] == "nan":
                run = trainer.steps.run

                def lose(*arguments: Any, run: Any = run) -> Any:
                    stepped = run(*arguments)
                    stepped.loss.fill_(float("nan"))
                    return stepped

                trainer.steps.run = lose  # type: ignore[method-assign, assignment]
                launched = launch(trainer, step)
                trainer.steps.run = run  # type: ignore[method-assign]
        return launched or launch(trainer, step)

    Trainer.launch = launch_with_faults  # type: ignore[method-assign, assignment]


if __name__ == "__main__":
    if not hasattr(Trainer.launch, "__wrapped__"):  # else it was done at an earlier start in this process
        _inject()
    main()
