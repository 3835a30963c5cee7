"""Whether a job fits a memory, and the smallest change with which it does."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import ValidationError

from netlayer.config.tree import ClusterConfig, JobConfig
from netlayer.errors import ConfigError
from netlayer.workload.memory import estimate, gib
from netlayer.workload.model_size import num_parameters

# What to lower, by the key without which nothing of its kind is left. The width is in all of them.
_LEADING = {
    "job.model.layers or job.model.hidden": "layers",
    "job.model.vocab_size": "vocab_size",
    "job.model.seq_len": "seq_len",
}


def has_room_for_windows(job: JobConfig, num_bytes: int) -> bool:
    """Whether a GPU of this many bytes holds a rank that has windows: `auto` takes none where it does not."""
    return estimate(with_overlap(job, windows=True, peer_reduce=False)).total <= num_bytes


def has_room_for_copies(job: JobConfig, num_bytes: int) -> bool:
    """Whether it also holds what peers copy there: where it does not, NCCL reduces."""
    return estimate(with_overlap(job, windows=True)).total <= num_bytes


def with_overlap(job: JobConfig, **overlap: bool) -> JobConfig:
    return job.model_copy(update={"overlap": job.overlap.model_copy(update=overlap)})


def on_cluster(job: JobConfig, cluster: ClusterConfig) -> JobConfig:
    """The job without what its groups cannot have there: windows and copies are of one host."""
    spans_hosts = job.parallel.tp * job.parallel.dp > cluster.gpus_per_server
    return with_overlap(job, windows=False) if spans_hosts and job.overlap.windows == "auto" else job


def in_room(job: JobConfig, num_bytes: int) -> JobConfig:
    """Return the job as it runs on a GPU of this many bytes, 0 if unknown: windows and copies take what is left."""
    if not num_bytes:
        return job
    if job.overlap.windows == "auto" and not has_room_for_windows(job, num_bytes):
        return with_overlap(job, windows=False)
    return job if has_room_for_copies(job, num_bytes) else with_overlap(job, peer_reduce=False)


def check_room(job: JobConfig, line: str, num_bytes: int, sharing: int = 1) -> None:
    """Refuse a job whose ranks do not fit, and say the smallest change with which they do.

    Args:
        line: what is said of its memory.
        sharing: ranks that share the bytes.

    Raises:
        ConfigError: they need more.
    """
    if estimate(job).total * sharing > num_bytes:
        size = f"{num_parameters(job.model):,} parameters: {line}"
        raise ConfigError("job", job.name, size, remedy(job, num_bytes, sharing))


def remedy(job: JobConfig, there: int, sharing: int) -> str:
    """Return the smallest change that fits, as text."""
    for settings, other in _smaller(job):
        total = estimate(other).total
        if total * sharing <= there:
            return f"set {settings}: then a rank holds about {gib(total)}"
    ranks = job.parallel.layout.world_size
    for settings, other in _fewer_ranks(job) if sharing > 1 else ():
        total, num_ranks = estimate(other).total, other.parallel.layout.world_size
        if total * num_ranks <= there:
            return f"start {num_ranks} of the {ranks} ranks, with {settings}: then each holds about {gib(total)}"
    tried = "no recompute, micro_batch_size, tp or pp" + ", with windows or without," * bool(job.overlap.windows)
    return f"{tried} fits it on {ranks} rank{'s' * (ranks > 1)}: lower {_leading(job)}" + (
        ", or take more GPUs" if sharing == 1 else ""
    )


def _leading(job: JobConfig) -> str:
    """Return the keys of the model that decide most of its memory, once all that `_smaller` tries is done."""
    smallest = min((other for _, other in _smaller(job)), key=lambda other: estimate(other).total, default=job)

    def without(key: str) -> int:
        model = smallest.model.model_copy(update={key: 0})  # no job, but its parts can be counted
        return estimate(smallest.model_copy(update={"model": model})).total

    return min(_LEADING, key=lambda keys: without(_LEADING[keys]))


def _smaller(job: JobConfig) -> Iterator[tuple[str, JobConfig]]:
    """Jobs that take less: without windows, zero bubble, balance, with recomputation, a smaller micro-batch, tp, pp."""
    model, batch, parallel = job.model, job.batch, job.parallel
    levels = ("none", "selective", "full")
    recomputes = levels[levels.index(model.recompute) :]
    micro_sizes = [size for size in range(batch.micro_batch_size, 0, -1) if batch.micro_batch_size % size == 0]
    degrees = [factor for factor in range(1, parallel.dp + 1) if parallel.dp % factor == 0]
    spreads = sorted(itertools.product(degrees, degrees), key=lambda pair: (pair[0] * pair[1], pair[1]))
    bubbles = (True, False) if job.overlap.zero_bubble else (False,)
    windows = (job.overlap.windows, False) if job.overlap.windows and parallel.dp > 1 else (job.overlap.windows,)
    balances = (True, False) if job.parallel.balance else (False,)
    for (tp, pp), micro_batch_size, recompute, balance, zero_bubble, has_windows in itertools.product(
        spreads, micro_sizes, recomputes, balances, bubbles, windows
    ):
        if parallel.dp % (tp * pp):
            continue
        changes: dict[str, dict[str, Any]] = {
            "overlap": {"windows": has_windows, "zero_bubble": zero_bubble},
            "model": {"recompute": recompute},
            "batch": {"micro_batch_size": micro_batch_size},
            "parallel": {
                "tp": parallel.tp * tp,
                "pp": parallel.pp * pp,
                "dp": parallel.dp // (tp * pp),
                "balance": balance,
            },
        }
        changed = _changed(job, changes)
        if changed:
            yield changed


def _fewer_ranks(job: JobConfig) -> Iterator[tuple[str, JobConfig]]:
    """The same layout with fewer data-parallel ranks, the most first: what ranks share a machine's memory for."""
    dp = job.parallel.dp
    changed = (_changed(job, {"parallel": {"dp": dp // part}}) for part in range(2, dp + 1) if dp % part == 0)
    return (each for each in changed if each)


def _changed(job: JobConfig, changes: Mapping[str, Mapping[str, Any]]) -> tuple[str, JobConfig] | None:
    tree = job.model_dump()
    settings = [
        f"job.{section}.{name} = {str(value).lower()}"
        for section, keys in changes.items()
        for name, value in keys.items()
        if tree[section][name] != value
    ]
    for section, keys in changes.items():
        tree[section] |= keys
    try:
        return (" and ".join(settings), JobConfig.model_validate(tree)) if settings else None
    except (ValidationError, ConfigError):  # degrees that this model cannot have
        return None
