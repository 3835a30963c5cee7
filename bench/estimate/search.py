"""Search of layouts: all that memory and divisibility allow, ranked by their predicted step, with reasons.

Of a layout the least recomputation with which it fits is taken: more never makes a step shorter. All layouts are ranked
by the closed form of their pipeline, and the best of them again by the schedule itself.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from pydantic import ValidationError

from bench.estimate.devices import Numbers
from bench.estimate.plan import Plan
from bench.estimate.step import StepEstimate, estimate_step, memory_of, quick_step_s
from netlayer.config.tree import JobConfig
from netlayer.errors import ConfigError
from netlayer.workload.fit import recompute_levels
from netlayer.workload.memory import RESERVED_BYTES, gib

_MICRO_SIZES = (1, 2, 4, 8)
_MOST_CP = 8
_LONG = 8192  # tokens of a sequence from which context parallelism is tried


@dataclass(frozen=True)
class Candidate:
    """One layout that fits.

    Args:
        plan: with its layout, micro-batch, recomputation.
        estimate: by the schedule.
        reason: what its step loses most by, in words.
    """

    plan: Plan
    estimate: StepEstimate
    reason: str

    @property
    def label(self) -> str:
        return describe(self.plan)


@dataclass(frozen=True)
class SearchResult:
    """Result of a search.

    Args:
        best: ranked, the best first.
        tried: layouts looked at.
        refused: how many layouts each rule refused.
    """

    best: tuple[Candidate, ...]
    tried: int
    refused: Counter[str]


def search(
    base: Plan,
    *,
    top: int = 5,
    numbers: Numbers | None = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> SearchResult:
    """Rank the layouts of `base`'s job on as many GPUs.

    Args:
        base: job, cluster and device; its own layout, micro-batch and recomputation are one of those tried.
        top: layouts that are given back; three more are run by their schedules, lest the closed form misplaces them.
        on_progress: called with layouts done and all of them.

    Raises:
        ConfigError: none fits.
    """
    numbers = numbers or base.device.numbers
    refused: Counter[str] = Counter()
    layouts = list(_layouts(base))
    least_bytes: int | None = None
    fitting: list[tuple[float, Plan]] = []
    for index, layout in enumerate(layouts):
        if on_progress:
            on_progress(index, len(layouts))
        plan, rule, num_bytes = _fit(base, *layout)
        if plan is None:
            refused[rule] += 1
            if num_bytes:
                least_bytes = min(num_bytes, least_bytes or num_bytes)
        else:
            fitting.append((quick_step_s(plan, numbers), plan))
    if not fitting:
        raise _fits_nowhere(base, least_bytes, refused)
    fitting.sort(key=lambda pair: pair[0])
    estimates = [(plan, estimate_step(plan, numbers)) for _, plan in fitting[: top + 3]]
    estimates.sort(key=lambda pair: pair[1].step_s)
    best = tuple(Candidate(plan, estimate, _reason(plan, estimate)) for plan, estimate in estimates[:top])
    return SearchResult(best, len(layouts), refused)


def describe(plan: Plan) -> str:
    """`tp 8, pp 8, vpp 6, cp 1, dp 192, micro 1, recompute none`."""
    parallel = plan.job.parallel
    return (
        f"tp {parallel.tp}, pp {parallel.pp}, vpp {parallel.vpp}, cp {plan.cp}, dp {parallel.dp}, "
        f"micro {plan.job.batch.micro_batch_size}, recompute {plan.job.model.recompute}"
    )


def _layouts(base: Plan) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield (tp, pp, vpp, cp, micro_batch_size) that divide the GPUs, the heads, the layers and the batch."""
    model, gpus = base.job.model, base.num_gpus
    cps = [cp for cp in (1, 2, 4, 8) if cp <= _MOST_CP and (cp == 1 or model.seq_len // cp >= _LONG // 2)]
    tps = [tp for tp in (1, 2, 4, 8, 16) if tp <= base.cluster.gpus_per_server and model.heads % tp == 0]
    pps = [pp for pp in range(1, model.layers + 1) if model.layers % pp == 0 and gpus % pp == 0]
    for tp, pp, cp, micro in itertools.product(tps, pps, cps, _MICRO_SIZES):
        dp, rest = divmod(gpus, tp * pp * cp)
        if rest or not dp or base.job.batch.global_batch_size % (dp * micro):
            continue
        per_stage = model.layers // pp
        for vpp in (v for v in range(1, per_stage + 1) if per_stage % v == 0 and (pp > 1 or v == 1)):
            yield tp, pp, vpp, cp, micro


def _fit(base: Plan, tp: int, pp: int, vpp: int, cp: int, micro: int) -> tuple[Plan | None, str, int]:
    """Return the plan with the least recomputation that fits, or the rule that refuses it and the least bytes."""
    dp = base.num_gpus // (tp * pp * cp)
    tree = base.job.model_dump(exclude_unset=True)
    tree["parallel"] = {**tree.get("parallel", {}), "tp": tp, "pp": pp, "vpp": vpp, "dp": dp, "cp": 1}
    tree["batch"] = {**tree.get("batch", {}), "micro_batch_size": micro}
    try:
        job = JobConfig.model_validate(tree)
    except ConfigError as exc:
        return None, exc.field, 0
    except ValidationError:
        return None, "job", 0
    num_bytes = 0
    for level, modules in recompute_levels(base.job.model):
        model = job.model.model_copy(update={"recompute": level, "recompute_modules": modules})
        plan = replace(base, job=job.model_copy(update={"model": model}), cp=cp, recompute_share=None)
        if base.zero == 3 and pp > 1:
            return None, "--zero 3 with stages", 0
        # Of stages the first holds most micro-batches, the last the head.
        estimates = (memory_of(plan, stage) for stage in {0, pp - 1})
        fullest = max(estimates, key=lambda each: each.reserved)
        num_bytes = fullest.allocated
        if fullest.reserved <= base.device.memory_bytes:
            return plan, "", num_bytes
    return None, "memory", num_bytes


def _reason(plan: Plan, estimate: StepEstimate) -> str:
    """Say what the step loses by, largest first, and how full the card is."""
    step = estimate.step_s
    losses = {
        "bubble": estimate.bubble_s - estimate.pp_exposed_s,
        "tp exposed": estimate.tp_exposed_s,
        "cp exposed": estimate.cp_exposed_s,
        "dp exposed": estimate.dp_exposed_s,
        "pp exposed": estimate.pp_exposed_s,
        "optimizer": estimate.optimizer_s,
        "host": estimate.host_s,
        "slowest rank": estimate.straggler_s,
    }
    worst = sorted(losses.items(), key=lambda pair: -pair[1])[:3]
    text = ", ".join(f"{name} {seconds / step:.1%}" for name, seconds in worst if seconds > 0)
    return f"{text}; {gib(estimate.memory_bytes)} of {gib(plan.device.memory_bytes)}"


def _fits_nowhere(base: Plan, least_bytes: int | None, refused: Counter[str]) -> ConfigError:
    device, job = base.device, base.job
    if least_bytes is None:
        rules = ", ".join(f"{rule} ({number})" for rule, number in refused.most_common(3)) or "none divides them"
        rule = f"has no layout on {base.num_gpus:,} GPUs: {rules}"
        return ConfigError("job", job.name, rule, "change the number of GPUs or job.batch.global_batch_size")
    rule = (
        f"fits on no layout of {base.num_gpus:,} {device.name}: the least that a rank holds is {gib(least_bytes)}, and "
        f"a card has {gib(device.memory_bytes - RESERVED_BYTES)} to give"
    )
    return ConfigError("job", job.name, rule, "take more GPUs, a card with more memory, or a smaller model")
