"""The estimate of a step: the schedule's own actions with operator times, data-parallel exchange, and the slowest rank.

[Note: jitter] Ranks differ in two ways. Some are slower than others for good (`Numbers.spread`): a step waits for the
slowest once, however often ranks meet. And the passes of one rank differ from each other (`PASS_JITTER`): that averages
out over a step, unless ranks meet at every pass. They do where FP8's maxima are reduced over all ranks of a stage after
each pass (`Plan.delayed_scaling`), and stages do where messages leave no slack (`pipeline_wait`).

The pipeline is `netlayer.workload.schedule_simulation.simulate` on the schedule that the trainer runs. Schedules repeat
themselves every p micro-batches once warm, so a step of many is a step of few and as many periods (`pipeline_s`). Data
parallelism hides under the backward passes that are left when the first chunk is done, and the forward passes before
the last chunk is needed (MegaScale 3.2: less by the number of chunks), the last bucket under nothing.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from statistics import NormalDist

from bench.estimate.devices import Numbers
from bench.estimate.network import Network
from bench.estimate.operators import Operators
from bench.estimate.plan import CHANNELS, Plan
from netlayer.config.tree import JobConfig
from netlayer.workload.dtypes import DTYPE_BYTES
from netlayer.workload.flops import step_flops, utilisation
from netlayer.workload.memory import Estimate, estimate_stage
from netlayer.workload.model_size import block_elements, table_elements
from netlayer.workload.schedule import bubble_fraction, interleaved, one_forward_one_backward
from netlayer.workload.schedule_simulation import Costs, simulate
from netlayer.workload.zero_bubble import defer_weight_grads, has_zero_bubble

JITTER = 0.005
"""Standard deviation of a step's time over steps, over its median: MLPerf's HPE row has p99 / median = 1.009, ours on
two H100 1.019 (reports/trainer_2xh100_202611.md); 1.012 is that of a normal distribution with this one."""
PASS_JITTER = 0.002
"""Standard deviation of a pass of a second on one rank, in seconds. That of t seconds is assumed to be sqrt(t) times as
much, as if moments were independent, which is not shown: a forward pass correlates with the rank's next one by 0.14 and
0.18, a backward pass by 0.41 and 0.48. From two production traces that ByteDance published (StragglerAnalysis, trace-ST
and trace-AR: passes of 0.07 to 0.39 s on 8 and 15 ranks), what the data make of a pass taken out by its replica's other
stages: 0.0011 to 0.0023 by the median deviation (`python -m bench.estimate.jitter`). Steps of ours on two H200 give
0.0016, on H100 and one H200 0.003 to 0.005 with what all ranks share (reports/estimate_202611.md)."""
_PERIODS = 3
"""Rounds of p micro-batches that are run; the last two tell the period."""
_NORMAL = NormalDist()
MFU_FORMULA = (
    "MFU = model FLOPs of a step / (step time x GPUs x dense peak of the GEMMs' precision); model FLOPs are GEMMs and "
    "attention, a multiply-add is 2, backward is twice forward, nothing of recomputation; attention in full, or half "
    "of it as a causal mask leaves it"
)


@dataclass(frozen=True)
class StepEstimate:
    """A predicted step of the slowest rank. Times in seconds, memory in bytes.

    Args:
        step_s: expected time of a step, the slowest of all ranks waited for.
        p99_s: the 99th percentile over steps.
        mfu_full, mfu_causal: over the peak of the precision of the blocks' GEMMs.
        peak_flops: that peak.
        tokens_per_s: of all GPUs.
        gemm_s, attention_s, pointwise_s, optimizer_s: what the busiest stage computes in a step.
        tp_exposed_s, cp_exposed_s, dp_exposed_s: communication that it waits for, by kind.
        bubble_s: what the pipeline's busiest stage waits: for micro-batches, and for messages.
        pp_exposed_s: the part of it that messages cost: the step less the same with messages free.
        host_s: by how much launching takes longer than computing.
        straggler_s: what the slowest rank adds to a rank of mean speed, and jitter where ranks meet within a step.
        memory_bytes: of the rank that holds most; `memory` are its parts.
    """

    step_s: float
    p99_s: float
    mfu_full: float
    mfu_causal: float
    peak_flops: float
    tokens_per_s: float
    gemm_s: float
    attention_s: float
    pointwise_s: float
    optimizer_s: float
    tp_exposed_s: float
    cp_exposed_s: float
    dp_exposed_s: float
    pp_exposed_s: float
    bubble_s: float
    host_s: float
    straggler_s: float
    memory_bytes: int
    memory: Estimate

    def parts(self) -> dict[str, float]:
        """Return the seconds of a step's parts on the busiest stage; they add up to the step."""
        return {
            "GEMMs": self.gemm_s,
            "attention": self.attention_s,
            "other": self.pointwise_s + self.optimizer_s,
            "TP": self.tp_exposed_s,
            "CP": self.cp_exposed_s,
            "DP": self.dp_exposed_s,
            "PP": self.pp_exposed_s,
            "bubble": self.bubble_s - self.pp_exposed_s,
            "host": self.host_s,
            "slowest": self.straggler_s,
        }

    def days(self, tokens: float) -> float:
        """Days of training on so many tokens, without restarts."""
        return tokens / self.tokens_per_s / 86_400


def estimate_step(
    plan: Plan,
    numbers: Numbers | None = None,
    *,
    slowdown: float = 1.0,
    pp_slowdown: float = 1.0,
    exact: bool = True,
) -> StepEstimate:
    """Predict a step.

    Args:
        numbers: fitted ones; by default those of the device.
        slowdown: of rings that leave a server; see `network.fabric_slowdowns`.
        pp_slowdown: of messages between stages that do.
        exact: run the schedule; False: its closed form, for the first look at many layouts.
    """
    numbers = numbers or plan.device.numbers
    timing = _Timing(plan, numbers, slowdown, pp_slowdown)
    pp, count = plan.job.parallel.pp, plan.num_micro_batches
    pipeline = timing.pipeline_s(exact)
    free = dataclasses.replace(timing.costs, transfer_s=[0.0] * pp)
    without = pipeline_s(plan.share_job, free, count) if exact and pp > 1 else pipeline
    work = functools.reduce(
        lambda one, two: one + two, (chunk.forward + chunk.backward for chunk in timing.stages[timing.busiest])
    )
    mean = timing.mean_s(pipeline)
    step_s = timing.step_s(pipeline)
    flops = step_flops(plan.job.model, plan.job.batch.global_batch_size)
    peak = plan.device.peak(plan.precision) or math.nan
    memory = max((memory_of(plan, stage) for stage in range(pp)), key=lambda each: each.allocated)
    return StepEstimate(
        step_s=step_s,
        p99_s=step_s * (1 + JITTER * _NORMAL.inv_cdf(0.99)),
        mfu_full=utilisation(flops.full, step_s, peak, plan.num_gpus) or math.nan,
        mfu_causal=utilisation(flops.causal, step_s, peak, plan.num_gpus) or math.nan,
        peak_flops=peak,
        tokens_per_s=plan.job.batch.global_batch_size * plan.job.model.seq_len / step_s,
        gemm_s=count * work.gemm,
        attention_s=count * work.attention,
        pointwise_s=count * (work.pointwise + work.slowed + timing.copies(timing.busiest)) + timing.slowed_s,
        optimizer_s=timing.optimizer_s,
        tp_exposed_s=count * work.tp_exposed,
        cp_exposed_s=count * work.cp_exposed,
        dp_exposed_s=timing.exposed_s + count * timing.late_s,
        pp_exposed_s=max(0.0, pipeline - without),
        bubble_s=max(0.0, pipeline - count * _work_s(timing.costs, timing.busiest)),
        host_s=timing.host_s,
        straggler_s=step_s - mean + count * timing.jitter_s[timing.busiest],
        memory_bytes=memory.allocated,
        memory=memory,
    )


def quick_step_s(plan: Plan, numbers: Numbers, ratio: float = 1.0) -> float:
    """Seconds of a step with the closed form of the pipeline times `ratio`: what a fit or a search calls often."""
    timing = _Timing(plan, numbers, 1.0)
    return timing.step_s(timing.pipeline_s(False) * ratio)


def pipeline_ratio(plan: Plan, numbers: Numbers) -> float:
    """Return the pipeline's time by its schedule over that by the closed form; 1 without stages."""
    if plan.job.parallel.pp == 1:
        return 1.0
    timing = _Timing(plan, numbers, 1.0)
    return timing.pipeline_s(True) / timing.pipeline_s(False)


class _Timing:
    """The times of a plan under some numbers, of which a step is made."""

    def __init__(self, plan: Plan, numbers: Numbers, slowdown: float, pp_slowdown: float = 1.0) -> None:
        self.plan, self.numbers = plan, numbers
        self.network = Network.of(plan, numbers, slowdown, pp_slowdown)
        self.operators = Operators(plan, numbers, self.network)
        pp = plan.job.parallel.pp
        self.stages = [self.operators.stage(stage) for stage in range(pp)]
        self.late_s = 0.0
        """What a micro-batch of a stage waits for FSDP's exchanges, and for those of FP8's maxima."""
        self.jitter_s: list[float] = []
        """Of each stage, what a micro-batch waits for others' jitter."""
        self.waits_s: list[float] = []
        """Of each stage, by how much launching a micro-batch takes longer than computing it."""
        self.costs = self._costs()
        self.busiest = max(range(pp), key=lambda stage: _work_s(self.costs, stage))
        self.exposed_s, self.slowed_s = max((self._data_parallel(stage) for stage in range(pp)), key=sum)
        self.optimizer_s = max(self.operators.optimizer(facts.elements) for facts in plan.stages)
        self.host_s = plan.num_micro_batches * self.waits_s[self.busiest] + self._late_optimizer_s()

    def pipeline_s(self, exact: bool) -> float:
        """Return the seconds from a step's first forward pass to its last weight gradient.

        Args:
            exact: by a simulation of the schedule; False: by the closed form.
        """
        run = pipeline_s if exact else closed_form_s
        whole = run(self.plan.share_job, self.costs, self.plan.num_micro_batches)
        # The last stage has done its passes when p - 1 chunks' backward passes are still to come.
        idle = (self.plan.job.parallel.pp - 1) * self.costs.backward_s[-1][0]
        return whole + max(0.0, self.operators.deferred_s() - idle)

    def mean_s(self, pipeline: float) -> float:
        """Seconds of a step of a rank of mean speed."""
        return pipeline + self.exposed_s + self.slowed_s + self.optimizer_s + self._late_optimizer_s()

    def step_s(self, pipeline: float) -> float:
        mean = self.mean_s(pipeline)
        return mean + math.hypot(self.numbers.spread * mean, jitter_of(mean)) * slowest_of(self.plan.num_gpus)

    def copies(self, stage: int) -> float:
        return self.operators.copies(self.plan.stages[stage].elements)

    def _costs(self) -> Costs:
        """Return what the schedule's simulation takes; FSDP's exchanges that do not hide are in the passes."""
        plan, job = self.plan, self.plan.share_job
        message = plan.tokens * job.model.hidden * DTYPE_BYTES[job.model.dtype] / job.parallel.tp
        # Where messages are coupled, a stage's forward and its backward message leave by one port at one time.
        transfer = self.network.pp(message * (1 if job.overlap.pp else 2)) if job.parallel.pp > 1 else 0.0
        forward, backward = [], []
        for stage, chunks in enumerate(self.stages):
            late = self._sharded_exchange(stage) if plan.zero == 3 else (0.0, 0.0)
            copies = self.copies(stage) / 2
            firsts = [chunk.forward.total + (late[0] + copies) / len(chunks) for chunk in chunks]
            seconds = [chunk.backward.total + (late[1] + copies) / len(chunks) for chunk in chunks]
            late_s, jitter_s = sum(late), 0.0
            for times in (firsts, seconds):
                for chunk, time in enumerate(times):
                    latency, wait = self._meeting(time)
                    times[chunk] += latency + wait
                    late_s, jitter_s = late_s + latency, jitter_s + wait
            self.late_s = max(self.late_s, late_s)
            self.jitter_s.append(jitter_s)
            device_s = sum(firsts) + sum(seconds)
            # The queue between host and device is deep: a pass takes what the slower of them takes.
            for chunk, (first, second) in enumerate(self._launching(stage)):
                firsts[chunk], seconds[chunk] = max(firsts[chunk], first), max(seconds[chunk], second)
            self.waits_s.append(sum(firsts) + sum(seconds) - device_s)
            forward.append(firsts)
            backward.append(seconds)
        return Costs(forward, backward, [transfer] * job.parallel.pp)

    def _meeting(self, time: float) -> tuple[float, float]:
        """Return what a pass of so many seconds waits where ranks meet at its end: for the network, and for jitter."""
        plan = self.plan
        if plan.delayed_scaling and not plan.tp_only_amax and plan.precision == "fp8":
            ranks = plan.job.parallel.tp * plan.group_size * plan.job.parallel.dp_replicate
            return self.network.small_all_reduce(ranks), jitter_of(time) * slowest_of(ranks)
        return 0.0, pipeline_wait(plan.job) * jitter_of(time)

    def _launching(self, stage: int) -> list[tuple[float, float]]:
        """Return the host's seconds of one micro-batch's forward and backward, a chunk; none without a host."""
        host, job = self.plan.host, self.plan.job
        if host is None or job.loop.cuda_graph:
            return []
        each = []
        for halves in self.plan.stages[stage].chunks:
            times = [(number, host.half_s(job, is_mlp, self.plan.cp)) for (_, is_mlp), number in halves.items()]
            each.append((sum(n * one for n, (one, _) in times), sum(n * two for n, (_, two) in times)))
        if stage == job.parallel.pp - 1:
            head = host.head_s()
            each[-1] = each[-1][0] + head[0], each[-1][1] + head[1]
        return each

    def _late_optimizer_s(self) -> float:
        """Return by how much launching the optimiser's step takes longer than the step."""
        host, job = self.plan.host, self.plan.job
        if host is None or job.loop.cuda_graph:
            return 0.0
        buckets = max(facts.num_buckets for facts in self.plan.stages) if self._has_exchange else 0
        return max(0.0, host.optimizer_s(job.model.layers / job.parallel.pp, buckets) - self.optimizer_s)

    def _sharded_exchange(self, stage: int) -> tuple[float, float]:
        """Return by what FSDP's exchanges lengthen a micro-batch's forward and its backward."""
        if not self._has_exchange:
            return 0.0, 0.0
        gather, reduce, num_buckets = self._exchanges(stage)
        forward = sum(chunk.forward.total for chunk in self.stages[stage])
        backward = sum(chunk.backward.total for chunk in self.stages[stage])
        if not self.plan.job.overlap.dp:
            return gather, gather + reduce
        first = max(gather / num_buckets, gather - forward)
        second = max(reduce / num_buckets, gather + reduce - backward)
        slower = self.plan.borrowed
        return first + slower * (gather - first), second + slower * (gather + reduce - second)

    def _data_parallel(self, stage: int) -> tuple[float, float]:
        """Return seconds a step that a rank waits for its data-parallel exchange, and by which that slows computation.

        Reduce-scatters of a chunk start when the last micro-batch has left it. In interleaved 1F1B p micro-batches go
        through the chunks in turn, so that (v - 1) / v of p micro-batches' backward is left then, and of the last chunk
        all but its last bucket; all-gathers mirror that at the start.
        """
        plan = self.plan
        if not self._has_exchange or plan.zero == 3:
            return 0.0, 0.0
        gather, reduce, num_buckets = self._exchanges(stage)
        others = plan.reductions - 1  # each with the backward pass of the next micro-batch to hide under
        if not plan.job.overlap.dp:
            return gather + reduce * plan.reductions, 0.0
        pp, vpp = plan.job.parallel.pp, plan.job.parallel.vpp
        rounds = (vpp - 1) / vpp * min(pp, plan.num_micro_batches) + (1 - 1 / num_buckets) / vpp
        exposed = 0.0
        for exchange, passes in (
            (gather, (chunk.forward.compute for chunk in self.stages[stage])),
            (reduce, (chunk.backward.compute for chunk in self.stages[stage])),
        ):
            last = exchange / num_buckets
            exposed += last + max(0.0, exchange - last - rounds * sum(passes))
        exposed += others * max(0.0, reduce - sum(chunk.backward.compute for chunk in self.stages[stage]))
        hidden = gather + reduce * plan.reductions - exposed
        return exposed, plan.borrowed * plan.dp_channels / CHANNELS * hidden

    @property
    def _has_exchange(self) -> bool:
        return self.plan.group_size * self.plan.job.parallel.dp_replicate > 1

    def _exchanges(self, stage: int) -> tuple[float, float, int]:
        """Return seconds of all all-gathers and reduce-scatters of a rank's parameters, and the number of buckets.

        FP8 parameters are gathered in one byte an element. ZeRO 0 all-reduces: as long as both, and after the backward.
        """
        facts = self.plan.stages[stage]
        narrow = 0.5 if self.plan.narrow_exchanges else 1.0
        reduce = self.network.dp(facts.reduced_bytes, facts.num_buckets)
        reduce += self.network.replicas(facts.replicated_bytes, facts.num_buckets)
        if self.plan.zero == 0:
            return 0.0, 2 * reduce, facts.num_buckets
        return self.network.dp(facts.gathered_bytes * narrow, facts.num_buckets), reduce, facts.num_buckets


@functools.cache
def slowest_of(num: int) -> float:
    """Expected largest of `num` standard normal numbers (Blom 1958); 0 for one."""
    return _NORMAL.inv_cdf((num - 0.375) / (num + 0.25)) if num > 1 else 0.0


def jitter_of(time: float) -> float:
    """Standard deviation of a pass of so many seconds, in seconds."""
    return PASS_JITTER * math.sqrt(time)


def pipeline_wait(job: JobConfig) -> float:
    """Return what a pass waits for the jitter of its neighbours, in standard deviations of a pass.

    A fit to simulations with random times (2 to 35 stages, 16 to 280 micro-batches; a test repeats some). Interleaved
    stages with decoupled messages, and those with a zero bubble, have a chunk's time of slack, so they wait for none.
    """
    pp, vpp = job.parallel.pp, job.parallel.vpp
    if pp == 1 or (job.overlap.pp and vpp > 1) or has_zero_bubble(job):
        return 0.0
    return 0.87 * (1 - math.pow(pp, -0.8))


def pipeline_s(job: JobConfig, costs: Costs, count: int) -> float:
    """Seconds of a step of `count` micro-batches on the trainer's schedule: by the simulation of one of few.

    Steps differ by whole rounds of p micro-batches, each as long as that between the last two that were run. Equal to
    the whole simulation where nothing but the number of rounds differs (a test compares them).
    """
    pp = job.parallel.pp
    if pp == 1:
        return count * _work_s(costs, 0)
    few = count if count <= _PERIODS * pp else _PERIODS * pp + count % pp
    scale = max(max(times) for times in costs.backward_s)
    key = (
        pp,
        job.parallel.vpp,
        not job.overlap.pp,
        has_zero_bubble(job),
        tuple(tuple(round(time / scale, 5) for time in times) for times in costs.forward_s),
        tuple(tuple(round(time / scale, 5) for time in times) for times in costs.backward_s),
        tuple(round(time / scale, 5) for time in costs.transfer_s),
    )
    last = _simulated(*key, few)
    if few == count:
        return scale * last
    return scale * (last + (count - few) / pp * (last - _simulated(*key, few - pp)))


@functools.lru_cache(maxsize=4096)
def _simulated(
    pp: int,
    vpp: int,
    coupled: bool,
    postpones: bool,
    forward: tuple[tuple[float, ...], ...],
    backward: tuple[tuple[float, ...], ...],
    transfer: tuple[float, ...],
    count: int,
) -> float:
    schedule = interleaved(pp, count, vpp) if vpp > 1 else one_forward_one_backward(pp, count)
    if postpones:
        schedule = defer_weight_grads(schedule)
    return simulate(schedule, Costs(forward, backward, transfer), coupled=coupled).step_s


def closed_form_s(job: JobConfig, costs: Costs, count: int) -> float:
    """Seconds by the closed form: the busiest stage's work, and the bubble (p - 1) / (m v) of it."""
    pp, vpp = job.parallel.pp, job.parallel.vpp
    busiest = max(_work_s(costs, stage) for stage in range(pp))
    mean = sum(_work_s(costs, stage) for stage in range(pp)) / pp
    share = 1 / 3 if has_zero_bubble(job) else 1.0  # ZB-H1 leaves a third of it
    bubble = bubble_fraction(pp, count, vpp) * count * mean * share
    travels = 2 * (pp - 1) * max(costs.transfer_s) if pp > 1 else 0.0
    if pp > 1 and not job.overlap.pp:
        travels += 2 * count * vpp * max(costs.transfer_s)
    return count * busiest + bubble + travels


def memory_of(plan: Plan, stage: int) -> Estimate:
    """Bytes of a rank of a stage: `netlayer.workload.memory`'s, changed by what the trainer does not build.

    FP8 keeps a copy of the weights and its transpose, a byte an element each. ZeRO 0 keeps masters, moments and
    gradients whole; FSDP parameters in shards, and two units of them whole. What a job's own `parallel.zero` and
    `model.fp8` take is the workload's to say.
    """
    job = plan.share_job
    estimate = estimate_stage(job, stage)
    elements, wide = plan.stages[stage].elements, 4
    share = -(-elements // plan.group_size)
    changes = {"exchanges": 0} if plan.tp_under == "parts" else {}  # Megatron's exchanges are NCCL's
    if plan.zero == 0 and plan.group_size > 1:
        changes |= {"masters": elements * wide, "optimizer": 2 * elements * wide, "gradients": elements * wide}
    elif plan.zero == 3 and plan.group_size > 1 and job.parallel.stage < 3:
        width = DTYPE_BYTES[job.model.dtype]
        units = 2 * max(block_elements(job.model, job.parallel.tp), table_elements(job))
        changes |= {"parameters": min(elements, share + units) * width, "gradients": share * wide}
        changes["construction"] = 0  # made in shards
    if plan.narrow_exchanges:
        resident = min(elements, share) if plan.zero == 3 else elements
        changes["parameters"] = changes.get("parameters", estimate.parameters) + 2 * resident
    return dataclasses.replace(estimate, **changes)


def _work_s(costs: Costs, stage: int) -> float:
    """Seconds of one micro-batch through all chunks of a stage, forward and backward."""
    return sum(costs.forward_s[stage]) + sum(costs.backward_s[stage])
