"""Runs of earlier calls of `bench.convergence`, and whether runs can be laid beside each other at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.convergence_rows import FACTS_FILE, Curve, read_curve
from bench.convergence_run import Plan
from netlayer.config import JobConfig
from netlayer.errors import ConfigError

RUNS = "runs"
"""Folder of the runs in an output folder."""
_SHAPE = ("layers", "hidden", "heads", "kv_heads", "ffn_hidden", "vocab_size", "seq_len", "dtype")
_OWN_MATTER = {"data", "launch", "metrics", "store", "loop"}


def read_runs(out: Path) -> list[Curve]:
    """Every run under an output folder, in the order in which they began."""
    folders = [file.parent for file in (out / RUNS).glob(f"*/{FACTS_FILE}")]
    return sorted(map(read_curve, folders), key=lambda curve: str(curve.facts["started_utc"]))


def read_joined(outs: Sequence[Path]) -> list[Curve]:
    """The runs of earlier calls that came to their end.

    Raises:
        ConfigError: a folder holds no run at all, or two hold one of the same name.
    """
    found: dict[str, Curve] = {}
    for out in outs:
        curves = read_runs(out)
        if not curves:
            rule = f"holds no run of this bench ({RUNS}/*/{FACTS_FILE})"
            raise ConfigError("--join", out, rule, "give the output folder of an earlier call")
        for curve in (curve for curve in curves if curve.is_whole):
            if curve.name in found:
                raise ConfigError("--join", out, f"has a run {curve.name} too", "give one folder of the two")
            found[curve.name] = curve
    return list(found.values())


def check_alike(jobs: Sequence[tuple[str, JobConfig, Mapping[str, Any]]]) -> None:
    """Refuse a comparison of runs of which each did another work.

    Args:
        jobs: name, job and facts of each.

    Raises:
        ConfigError: names the runs, and what differs.
    """
    for name, job, facts in jobs[1:]:
        first_name, first_job, first_facts = jobs[0]
        ours, theirs = _likeness(job, facts), _likeness(first_job, first_facts)
        for what, value in ours.items():
            if value != theirs[what]:
                rule = f"{name} has {what} {value}, {first_name} {theirs[what]}"
                raise ConfigError("--join", None, rule, "give the options of the earlier call, or another one's folder")


def left_to_do(plans: Sequence[Plan], earlier: Sequence[Curve]) -> list[Plan]:
    """The plans that no earlier run has done; `earlier` came to their end.

    Raises:
        ConfigError: an earlier run of the same name had other settings.
    """
    done = {curve.name: curve for curve in earlier}
    for plan in plans:
        if plan.name in done and _dump(plan.job) != _dump(done[plan.name].job):
            rule = f"{plan.name} had other settings in the earlier call"
            raise ConfigError("--join", None, rule, "give its options again, or leave it out with --runs")
    return [plan for plan in plans if plan.name not in done]


def _likeness(job: JobConfig, facts: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **{f"job.model.{name}": getattr(job.model, name) for name in _SHAPE},
        "tokens": job.optimizer.steps * job.batch.global_size * job.model.seq_len,
        "held-out windows": job.evaluation.global_batches * job.batch.global_size,
        "seed": facts["seed"],
        "text": facts["corpus"]["identity"]["text"],
        "tokenizer": facts["corpus"]["identity"]["tokenizer"],
    }


def _dump(job: JobConfig) -> dict[str, Any]:
    return job.model_dump(mode="json", exclude=_OWN_MATTER)
