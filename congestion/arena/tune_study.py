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
class Study:
    """A study as bytes, its last trial, whose score it waits for, and the settings of that trial.

    Args:
        study: pickled study of Optuna.
        number: of the trial; -1: there was none yet.
        overrides: the trial's settings, `congestion.x=value` each.
    """

    study: bytes
    number: int = -1
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Question:
    """Request for the next trial of a study.

    Args:
        last: the study after its last trial.
        score: of that trial; None before the first.
        ranges: parameters that are searched.
    """

    last: Study
    score: float | None
    ranges: Sequence[Range]


def new_study(seed: int, *, maximise: bool = False) -> Any:
    """Return an empty study with the optimiser of the protocol: TPE."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    sampler = optuna.samplers.TPESampler(seed=seed)
    return optuna.create_study(sampler=sampler, direction="maximize" if maximise else "minimize")


def begin(ranges: Sequence[Range], seed: int) -> Study:
    """Return a new study whose first trial has the published values."""
    study = new_study(seed)
    study.enqueue_trial({one.name: one.published for one in ranges})
    return Study(pickle.dumps(study))


def ask(question: Question) -> Study:
    """Tell the study the score of its last trial, and return it with the next trial."""
    study = pickle.loads(question.last.study)
    if question.score is not None:
        study.tell(question.last.number, question.score)
    trial = study.ask({one.name: one.distribution for one in question.ranges})
    return Study(pickle.dumps(study), trial.number, overrides_of(trial.params))
