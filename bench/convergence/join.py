"""Runs of earlier calls of `bench.convergence`: which are done, which go on, and which can be compared at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.convergence.rows import FACTS_FILE, Before, Curve, RunKey, read_curve, run_name
from bench.convergence.run import Plan
from bench.convergence.text import Chosen
from netlayer.config.tree import JobConfig
from netlayer.errors import ConfigError
from trainer.checkpoint.meta import find
from trainer.train import CHECKPOINTS

RUNS = "runs"
"""Folder of the runs in an output folder."""
_COMPARED = {"preset", "parallel_block", "attention_window", "window_pattern"}
"""Of job.model: what the runs are there to compare, and a name."""
_OWN_MATTER = {"data", "launch", "metrics", "store", "loop", "checkpoint"}


def read_runs(out: Path) -> list[Curve]:
    """Every run under an output folder, in the order in which they began."""
    folders = [file.parent for file in (out / RUNS).glob(f"*/{FACTS_FILE}")]
    return sorted(map(read_curve, folders), key=lambda curve: str(curve.facts["started_utc"]))


def read_joined(outs: Sequence[Path]) -> list[Curve]:
    """Return the runs of earlier calls that have rows; of several interrupted ones, the one that resumes latest.

    Raises:
        ConfigError: a folder holds no run at all, or two hold the same one, whole.
    """
    by_key: dict[RunKey, Curve] = {}
    for out in outs:
        curves = read_runs(out)
        if not curves:
            rule = f"holds no run of this bench ({RUNS}/*/{FACTS_FILE})"
            raise ConfigError("--join", out, rule, "give the output folder of an earlier call")
        for curve in (curve for curve in curves if curve.evaluations):
            other = by_key.get(curve.key)
            if other and other.is_whole and curve.is_whole:
                rule = f"has a run {_full_name(*curve.key)} too, beside {other.folder}"
                raise ConfigError("--join", out, rule, "give one folder of the two")
            if other is None or _worth(curve) > _worth(other):
                by_key[curve.key] = curve
    return list(by_key.values())


def before(plan: Plan, facts: Mapping[str, Any], earlier: Sequence[Curve]) -> Before | None:
    """Return the part of this run that an earlier, interrupted call did; None if it cannot be resumed from."""
    curve = next((curve for curve in earlier if curve.key == plan.key and not curve.is_done), None)
    if curve is None or _differing(plan.job, curve.job):
        return None
    is_alike = _likeness(curve.job, curve.facts) == _likeness(plan.job, facts)
    return _going_on(curve) if is_alike else None


def shown_beside(others: Sequence[Plan | Curve], earlier: Sequence[Curve]) -> list[Curve]:
    """Earlier runs that stay as they are: others, still to be trained or of this call, take the place of theirs."""
    keys = {each.key for each in others}
    return [curve for curve in earlier if curve.key not in keys]


def check_alike(jobs: Sequence[tuple[str, JobConfig, Mapping[str, Any]]]) -> None:
    """Refuse a comparison of runs of which each did another work, or of one kind that differ in more than their rate.

    Args:
        jobs: kind, job and facts of each.

    Raises:
        ConfigError: names the runs, and what differs.
    """
    firsts: dict[str, tuple[str, dict[str, Any]]] = {}
    for kind, job, facts in jobs:
        name, likeness = _full_name(kind, job.optimizer.lr), _likeness(job, facts)
        _check_same(name, likeness, firsts.setdefault("", (name, likeness)))
        of_kind = _settings(job)
        _check_same(name, of_kind, firsts.setdefault(kind, (name, of_kind)))


def check_same_text(chosen: Chosen, joined: Sequence[Curve]) -> None:
    """Check, before the text is tokenised, that it has as many files and bytes as the joined runs' text.

    Its digest is known, and compared, only after that. The first of the joined runs stands for all here.

    Raises:
        ConfigError: the number of files or of bytes differs.
    """
    for curve in joined[:1]:
        text = curve.facts["text"]
        if (text["files"], text["text_bytes"]) != (len(chosen.files), chosen.text_bytes):
            ours = f"{len(chosen.files):,} files of {chosen.text_bytes:,} bytes"
            rule = f"{curve.name} had {text['files']:,} files of {text['text_bytes']:,} bytes, and here are {ours}"
            raise ConfigError("--join", None, rule, "give --text, --patterns and --mib of the earlier call")


def left_to_do(plans: Sequence[Plan], earlier: Sequence[Curve]) -> list[Plan]:
    """The plans that no earlier run has done: one that diverged has, unless it had other settings.

    Raises:
        ConfigError: the same run came to its end earlier, with other settings.
    """
    done = {curve.key: curve for curve in earlier if curve.is_done}
    left = []
    for plan in plans:
        curve = done.get(plan.key)
        differing = _differing(plan.job, curve.job) if curve else []
        if curve and curve.is_whole and differing:
            rule = f"{plan.name} had other settings in the earlier call: {', '.join(differing)}"
            raise ConfigError("--join", None, rule, "give its options again, or omit it with --runs")
        if curve is None or differing:
            left.append(plan)
    return left


def joined_lines(plans: Sequence[Plan], left: Sequence[Plan], earlier: Sequence[Curve]) -> Iterator[str]:
    """Yield a line for each earlier run: whether this call trains it again or shows it for comparison."""
    planned, undone = ({plan.key for plan in each} for each in (plans, left))
    for curve in earlier:
        how_far = f"step {len(curve.steps):,} of {curve.job.optimizer.steps:,}"
        state = "whole" if curve.is_whole else f"{'diverged' if curve.diverged else 'interrupted'} at {how_far}"
        if curve.key in undone:
            todo = "is trained again, or goes on where a checkpoint allows it"
        else:
            todo = "is not trained again" if curve.key in planned else "is shown beside"
        yield f"{_full_name(*curve.key)} ({state}, {curve.folder}) {todo}"


def _full_name(kind: str, lr: float) -> str:
    return run_name(kind, lr, of_several=True)


def _check_same(name: str, ours: Mapping[str, Any], first: tuple[str, Mapping[str, Any]]) -> None:
    first_name, theirs = first
    for what, value in ours.items():
        if value != theirs[what]:
            rule = f"{name} has {what} {value}, {first_name} {theirs[what]}"
            raise ConfigError("--join", None, rule, "give the options of the earlier call, or another one's folder")


def _settings(job: JobConfig) -> dict[str, Any]:
    """Return the settings that runs of one kind share: batch and optimiser, except micro-batch and learning rate."""
    settings = job.model_dump(mode="json", include={"batch": True, "optimizer": True})
    skipped = {("batch", "micro_batch_size"), ("optimizer", "lr")}
    return {
        f"{section}.{name}": value
        for section, values in settings.items()
        for name, value in values.items()
        if (section, name) not in skipped
    }


def _going_on(curve: Curve) -> Before | None:
    """Return the resume point at the newest checkpoint of its folder; None if rows are missing before it."""
    assert curve.folder is not None
    try:
        meta = find(curve.folder / CHECKPOINTS)
    except ConfigError:
        return None
    return Before(curve, meta.path, meta.step) if meta.step <= len(curve.steps) else None


def _worth(curve: Curve) -> tuple[bool, bool, int, int]:
    """Return the sort key that prefers whole runs, then done ones, the latest resume step, the most steps."""
    resume_notes = None if curve.is_done else _going_on(curve)
    return curve.is_whole, curve.is_done, resume_notes.step if resume_notes else 0, len(curve.steps)


def _likeness(job: JobConfig, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts that comparable runs must share: the work, and the device that it is timed on."""
    model = job.model.model_dump(mode="json", exclude=_COMPARED)
    return {
        **{f"job.model.{name}": value for name, value in model.items()},
        "tokens": job.optimizer.steps * job.batch.global_batch_size * job.model.seq_len,
        "held-out windows": job.evaluation.global_batches * job.batch.global_batch_size,
        "seed": facts["seed"],
        "device": f"{facts['ranks']} x {facts['device']}",
        "text": facts["corpus"]["identity"]["text"],
        "tokenizer": facts["corpus"]["identity"]["tokenizer"],
    }


def _differing(job: JobConfig, earlier: JobConfig) -> list[str]:
    """List settings that differ, except those each call may choose: `optimizer.steps 76, now 148`."""
    ours, theirs = (each.model_dump(mode="json", exclude=_OWN_MATTER) for each in (job, earlier))
    return [
        f"{section}.{key} {theirs[section][key]}, now {value}"
        for section, keys in ours.items()
        if isinstance(keys, dict)
        for key, value in keys.items()
        if value != theirs[section][key]
    ]
