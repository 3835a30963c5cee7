"""Optuna's study as bytes, so that any worker can ask it.

To ask for a trial takes a core a tenth of a second and more once a law has some hundred trials, hence in the workers.
The bytes are a pickle, which runs code when it is read: they pass between our own processes, and never lie in a file.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from congestion.arena.tune_ranges import Range, overrides_of


@dataclass(frozen=True)
class Asked:
    """A study that waits for the score of its last trial, and that trial's settings; none of one that has begun."""

    study: bytes
    number: int = -1
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Question:
    """The next trial, given the score of the last one, None before the first."""

    last: Asked
    score: float | None
    ranges: Sequence[Range]


def new_study(seed: int, *, maximise: bool = False) -> Any:
    """An optimiser as the protocol has it."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=seed)
    return optuna.create_study(sampler=sampler, direction="maximize" if maximise else "minimize")


def begin(ranges: Sequence[Range], seed: int) -> Asked:
    """A study whose first trial are the published values."""
    study = new_study(seed)
    study.enqueue_trial({one.name: one.published for one in ranges})
    return Asked(pickle.dumps(study))


def ask(question: Question) -> Asked:
    study = pickle.loads(question.last.study)
    if question.score is not None:
        study.tell(question.last.number, question.score)
    trial = study.ask({one.name: one.distribution for one in question.ranges})
    return Asked(pickle.dumps(study), trial.number, overrides_of(trial.params))
