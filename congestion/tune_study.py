"""Optuna's study as bytes, so that any worker can ask it, and a file can keep it.

To ask for a trial takes a core a tenth of a second and more once a law has some hundred trials, hence in the workers.
A file of a study is a pickle: it is read only with the digests of the suite and of the law that it was written with.
"""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from congestion.tune_ranges import Range, overrides_of


@dataclass(frozen=True)
class Asked:
    """A study that waits for the score of its last trial, and that trial's settings; none of one that has begun."""

    study: bytes
    number: int = -1
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Question:
    """The next trial, given the score of the last one, None before the first."""

    asked: Asked
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
    study = pickle.loads(question.asked.study)
    if question.score is not None:
        study.tell(question.asked.number, question.score)
    trial = study.ask({one.name: one.distribution for one in question.ranges})
    return Asked(pickle.dumps(study), trial.number, overrides_of(trial.params))


def save(path: Path, identity: tuple[str, str], asked: Asked, score: float) -> None:
    """Whole or not at all; `score` of the trial that was asked for, `identity` of the suite and of the law."""
    part = path.with_name(path.name + ".part")
    part.write_bytes(pickle.dumps(((*identity, _version()), asked, score)))
    part.replace(path)


def load(
    path: Path, identity: tuple[str, str], known: Mapping[tuple[str, ...], float]
) -> tuple[Asked, list[float]] | None:
    """What `save` kept: the study, and the scores until then, the last one not yet told.

    None where there is no such file, or it is of another search, or tells of trials whose scores are not `known`.
    """
    if not path.exists():
        return None
    of, asked, score = pickle.loads(path.read_bytes())
    if of != (*identity, _version()):
        return None
    told = [(overrides_of(trial.params), trial.value) for trial in pickle.loads(asked.study).trials[: asked.number]]
    scored = [*told, (asked.overrides, score)]
    if any(known.get(overrides) != value for overrides, value in scored):
        return None
    return asked, [value for _, value in scored]


def _version() -> str:
    import optuna

    return str(optuna.__version__)
