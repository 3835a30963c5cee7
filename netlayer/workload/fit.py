"""Whether a job fits a memory, and the smallest change with which it does.

Defaults step down by themselves (`settle`), in the order of what they cost a step: where copy engines carry gradients,
windows, recomputation of activations, of norms too, the ZeRO stage, recomputation of attention, then of whole blocks.
What was asked for stays, and is refused where it does not fit (`check_room`), with the change that would.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from netlayer.config.model import RECOMPUTE_MODULES
from netlayer.config.tree import ClusterConfig, JobConfig, ModelConfig
from netlayer.errors import ConfigError
from netlayer.workload.memory import estimate, frees_parameters, gib, may_copy_gradients
from netlayer.workload.model_size import num_parameters

# What to lower, by the key without which nothing of its kind is left. The width is in all of them.
_LEADING = {
    "job.model.layers or job.model.hidden": "layers",
    "job.model.vocab_size": "vocab_size",
    "job.model.seq_len": "seq_len",
}


def has_room_for_windows(job: JobConfig, num_bytes: int) -> bool:
    """Whether a GPU of this many bytes holds a rank that has windows: `auto` takes none where it does not."""
    return estimate(with_overlap(job, windows=True, peer_reduce=False)).reserved <= num_bytes


def has_room_for_copies(job: JobConfig, num_bytes: int) -> bool:
    """Whether it also holds what peers copy there: where it does not, NCCL reduces."""
    return estimate(with_overlap(job, windows=True)).reserved <= num_bytes


def with_overlap(job: JobConfig, **overlap: object) -> JobConfig:
    return job.model_copy(update={"overlap": job.overlap.model_copy(update=overlap)})


def on_cluster(job: JobConfig, cluster: ClusterConfig) -> JobConfig:
    """The job without what its groups cannot have there: windows and copies are of one host."""
    if job.parallel.tp * job.parallel.dp_cp <= cluster.gpus_per_server:
        return job
    if frees_parameters(job):  # copies need no windows there
        job = with_overlap(job, peer_reduce=False)
    return with_overlap(job, windows=False) if job.overlap.windows == "auto" else job


def in_room(job: JobConfig, num_bytes: int) -> JobConfig:
    """Return the job as it runs on a GPU of this many bytes, 0 if unknown: windows and copies take what is left."""
    if not num_bytes:
        return job
    if job.overlap.windows == "auto" and not has_room_for_windows(job, num_bytes):
        return with_overlap(job, windows=False)
    return job if has_room_for_copies(job, num_bytes) else with_overlap(job, peer_reduce=False)


def settle(job: JobConfig, num_bytes: int, *, is_card: bool = True) -> tuple[JobConfig, str]:
    """Return the job as it runs in so many bytes a rank, 0 if unknown, and what was set for that; empty: nothing.

    Args:
        is_card: the bytes are a GPU's, of which CUDA and NCCL need some.
    """

    def fits(other: JobConfig) -> bool:
        return estimate(other).on(is_card=is_card) <= num_bytes

    if not num_bytes or fits(job):
        return job, ""
    steps = list(_steps_down(job))
    for count in range(1, len(steps) + 1):
        if fits(_with(job, steps[:count])):
            # The last one may have made earlier ones needless.
            chosen = steps[:count]
            for step in steps[: count - 1]:
                rest = [each for each in chosen if each is not step]
                chosen = rest if fits(_with(job, rest)) else chosen
            settled = _with(job, chosen)
            return settled, " and ".join(_settings(job, settled))
    # Not by all of them together: as it was asked for, for a line that says what is missing.
    return in_room(job, num_bytes) if is_card else job, ""


_Step = tuple[str, str, Any]
"""Section, key, value."""


def _steps_down(job: JobConfig) -> Iterator[_Step]:
    """Yield what may be set for a job that does not fit: of defaults alone, the cheapest first."""
    model, parallel, overlap = job.model, job.parallel, job.overlap
    is_set = {"recompute", "recompute_modules"} & model.model_fields_set
    may_recompute = not is_set and model.recompute != "full"
    if may_copy_gradients(job) and "peer_reduce" not in overlap.model_fields_set:
        yield "overlap", "peer_reduce", False
    if overlap.windows == "auto":
        yield "overlap", "windows", False
    if may_recompute:
        if model.recompute == "none":
            yield "model", "recompute", "selective"
        yield "model", "recompute_modules", "mlp_act layernorm"
    if parallel.zero == "auto" and parallel.dp_cp > 1:
        yield "parallel", "zero", 2
        if not (job.loop.cuda_graph or overlap.step_in_backward or overlap.windows is True):
            yield "parallel", "zero", 3
    if may_recompute:
        yield "model", "recompute_modules", " ".join(RECOMPUTE_MODULES)
        yield "model", "recompute", "full"


def _with(job: JobConfig, steps: Sequence[_Step]) -> JobConfig:
    for section, key, value in steps:
        job = job.model_copy(update={section: getattr(job, section).model_copy(update={key: value})})
    return job


def _settings(job: JobConfig, other: JobConfig) -> list[str]:
    """Return what differs in another job, as it is set."""
    before, after = job.model_dump(), other.model_dump()
    return [
        f"job.{section}.{key} = {str(value).lower()}"
        for section, keys in after.items()
        if isinstance(keys, dict)
        for key, value in keys.items()
        if before[section][key] != value
    ]


def check_room(job: JobConfig, line: str, num_bytes: int, sharing: int = 1, *, is_card: bool = True) -> None:
    """Refuse a job whose ranks do not fit, and say the smallest change with which they do.

    Args:
        line: what is said of its memory.
        sharing: ranks that share the bytes.
        is_card: the bytes are a GPU's, of which CUDA and NCCL need some.

    Raises:
        ConfigError: they need more.
    """
    if estimate(job).on(is_card=is_card) * sharing > num_bytes:
        size = f"{num_parameters(job.model):,} parameters: {line}"
        raise ConfigError("job", job.name, size, remedy(job, num_bytes, sharing, is_card=is_card))


def remedy(job: JobConfig, there: int, sharing: int, *, is_card: bool = True) -> str:
    """Return the smallest change that fits, as text."""
    for settings, other in _smaller(job):
        needed = estimate(other)
        if needed.on(is_card=is_card) * sharing <= there:
            return f"set {settings}: then a rank holds about {gib(needed.total)}"
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
    """Jobs that take less: without windows, another ZeRO stage, fewer replicas of more shards, no zero bubble, no
    balance, with recomputation, a smaller micro-batch, tp, pp."""
    model, batch, parallel = job.model, job.batch, job.parallel
    recomputes = recompute_levels(model)
    micro_sizes = [size for size in range(batch.micro_batch_size, 0, -1) if batch.micro_batch_size % size == 0]
    degrees = [factor for factor in range(1, parallel.dp + 1) if parallel.dp % factor == 0]
    spreads = sorted(itertools.product(degrees, degrees), key=lambda pair: (pair[0] * pair[1], pair[1]))
    bubbles = (True, False) if job.overlap.zero_bubble else (False,)
    windows = (job.overlap.windows, False) if job.overlap.windows and parallel.dp_cp > 1 else (job.overlap.windows,)
    balances = (True, False) if job.parallel.balance else (False,)
    zeros: tuple[Any, ...] = (parallel.zero, 3) if parallel.zero in (1, 2) and parallel.dp_cp > 1 else (parallel.zero,)
    replicas = parallel.dp_replicate
    fewer = [factor for factor in range(1, replicas + 1) if replicas % factor == 0]
    every = itertools.product(spreads, micro_sizes, recomputes, balances, bubbles, fewer, zeros, windows)
    for (tp, pp), micro_batch_size, (level, modules), balance, zero_bubble, joined, zero, has_windows in every:
        if parallel.dp % (tp * pp):
            continue
        changes: dict[str, dict[str, Any]] = {
            "overlap": {"windows": has_windows, "zero_bubble": zero_bubble},
            "model": {"recompute": level, "recompute_modules": modules},
            "batch": {"micro_batch_size": micro_batch_size},
            "parallel": {
                "tp": parallel.tp * tp,
                "pp": parallel.pp * pp,
                "dp": joined * parallel.dp // (tp * pp),
                "dp_replicate": replicas // joined,
                "balance": balance,
                "zero": zero,
            },
        }
        changed = _changed(job, changes)
        if changed:
            yield changed


def recompute_levels(model: ModelConfig) -> list[tuple[str, str]]:
    """Return `recompute` and `recompute_modules` as the model has them, and what recomputes more, the least first."""
    names = [name for name in RECOMPUTE_MODULES if model.recomputes(name)]
    first = len(RECOMPUTE_MODULES) if model.recompute == "full" else len(names)
    more = [" ".join(RECOMPUTE_MODULES[: count + 1]) for count in range(first, len(RECOMPUTE_MODULES))]
    levels: list[tuple[str, str]] = [(model.recompute, model.recompute_modules)]
    levels += [("selective", each) for each in more]
    return levels if model.recompute == "full" else [*levels, ("full", model.recompute_modules)]


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
