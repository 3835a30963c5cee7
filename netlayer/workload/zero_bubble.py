"""Computation of weights' gradients where a pipeline stage would wait (Qi et al., "Zero Bubble Pipeline Parallelism").

A backward pass makes two gradients: its input's, which the stage before waits for, and its weights', which none does
before the step. Computed later, in the gaps, the second kind shortens the way back through the pipeline: of the bubble
of 1F1B, (p - 1) forwards and backwards, the forwards are left (ICLR'24, schedule ZB-H1, a third of it). Here that is
done to any schedule, interleaved 1F1B too. Nothing moves but the weights' gradients, and stage s holds at most s
activations more than before, in 1F1B as many as stage 0 does. Where nothing is gained a pass stays whole: among
data-parallel ranks the last one of a chunk hides its reduction, of which weights' gradients alone hide half.

Activations that backward computes again (`recompute_modules = mlp_act`) go with it: what waits is the output, which was
just computed, in place of the input, which is gone by then. Other recomputation turns it off.

Not covered: schedules that fill the start as well, for twice the activations (ZB-H2), and such as place chunks
otherwise (ZB-V); computing it all (`trainer.pipeline`).
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from netlayer.config.tree import JobConfig, ModelConfig
from netlayer.workload.messages import Message
from netlayer.workload.schedule import Action, Schedule, of_layout

_TIME = 1.0
"""Of a forward, of an input's gradient and of the weights': about the same, for a product each. They choose places."""


def of_job(job: JobConfig, num_micro_batches: int) -> Schedule:
    """Return the schedule of a training step of a job's stages."""
    schedule = of_layout(job.parallel.layout, num_micro_batches)
    return defer_weight_grads(schedule) if has_zero_bubble(job) else schedule


def has_zero_bubble(job: JobConfig) -> bool:
    """Whether stages compute weights' gradients where they would wait."""
    return job.overlap.zero_bubble and why_no_zero_bubble(job) is None


def why_no_zero_bubble(job: JobConfig) -> str | None:
    """Return the reason why `overlap.zero_bubble` has no effect, if there is one."""
    reasons = {
        "job.parallel.pp is 1": job.parallel.pp == 1,
        f"job.parallel.zero is {job.parallel.zero}: every micro-batch's gradients are reduced": job.parallel.stage > 1,
        "job.overlap.pp is false: a stage waits for what it sends before it goes on": not job.overlap.pp,
        "job.model.compile is true: compiled linears hand their gradients to autograd": job.model.compile,
        f"{_recomputed(job.model)}, to save the memory that gradients would take while they wait": (
            job.model.recompute == "full" or job.model.recomputes("layernorm") or job.model.recomputes("core_attn")
        ),
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def _recomputed(model: ModelConfig) -> str:
    if model.recompute == "selective":
        return f"job.model.recompute_modules is {model.recompute_modules}"
    return f"job.model.recompute is {model.recompute}"


def defer_weight_grads(schedule: Schedule) -> Schedule:
    """The same schedule, with weights' gradients at the places where that makes it shortest.

    Of the last backward passes about as few as it takes leave theirs for later, at most twice as many as must. Where
    that gains nothing, it stays as it is.

    Raises:
        ValueError: the schedule deadlocks.
    """
    most = schedule.num_micro_batches * schedule.num_chunks
    shortest, now = _Walk(schedule, most).ends, _Walk(schedule, 0).ends
    if shortest >= now:
        return schedule
    num = min(most, schedule.num_stages * schedule.num_chunks)
    while (walk := _Walk(schedule, num)).ends > shortest:
        num = min(most, 2 * num)
    stages = tuple(tuple(_joined(schedule, number, stage.done)) for number, stage in enumerate(walk.stages))
    return replace(schedule, name=f"zero_bubble_{schedule.name}", stages=stages)


def _joined(schedule: Schedule, stage: int, actions: Sequence[Action]) -> Iterator[Action]:
    """Make passes that none waits for whole again where their weights' gradients follow; a last one goes last."""
    last = max(index for index, action in enumerate(actions) if action.kind == "backward")
    sends = schedule.outgoing(stage, actions[last]) is not None
    if not sends and actions[-1][1:3] == actions[last][1:3]:
        actions = [*actions[:last], *actions[last + 1 : -1], actions[last], actions[-1]]
    whole = {
        index + 1
        for index, (one, two) in enumerate(itertools.pairwise(actions))
        if one[1:3] == two[1:3] and two.kind == "weights" and schedule.outgoing(stage, one) is None
    }
    return (action for index, action in enumerate(actions) if index not in whole)


@dataclass
class _Stage:
    """A stage on its way through its actions.

    Args:
        actions: of the schedule.
        num_whole: backward passes to come that are not split: each computes its weights' gradients at once, and those
            after them queue theirs.
        limit: (micro-batch, chunk) pairs that it may hold.
        num_in_flight: pairs held: forward passes whose weights' gradients are still to be computed.
    """

    actions: tuple[Action, ...]
    num_whole: int
    limit: int
    done: list[Action] = field(default_factory=list)
    at: int = 0
    now: float = 0.0
    waiting: deque[Action] = field(default_factory=deque)
    num_in_flight: int = 0

    def run(self, action: Action, arrival: float) -> None:
        """Run an action when its input is there; before it, queued weights' gradients that fit or must make room."""
        while self.waiting and (
            self.now + _TIME <= arrival or (action.kind == "forward" and self.num_in_flight >= self.limit)
        ):
            self._compute_weights()
        self.now = max(self.now, arrival) + _TIME
        self.done.append(action)
        self.at += 1
        if action.kind == "forward":
            self.num_in_flight += 1
        elif self.num_whole > 0:
            self.num_whole, self.now, self.num_in_flight = self.num_whole - 1, self.now + _TIME, self.num_in_flight - 1
        else:
            self.waiting.append(action)

    def end(self) -> None:
        while self.waiting:
            self._compute_weights()

    def _compute_weights(self) -> None:
        done = self.waiting.popleft()
        self.done.append(done._replace(kind="weights", phase=self.done[-1].phase))
        self.now += _TIME
        self.num_in_flight -= 1


class _Walk:
    """One step of all stages, messages free, the last `num_deferred` backward passes of each without the weights'."""

    def __init__(self, schedule: Schedule, num_deferred: int) -> None:
        self.schedule = schedule
        num_whole = schedule.num_micro_batches * schedule.num_chunks - num_deferred
        self.stages = [
            _Stage(actions, num_whole, schedule.peak_in_flight(stage) + stage)
            for stage, actions in enumerate(schedule.stages)
        ]
        self._arrivals: dict[tuple[int, Message], float] = {}
        while any(stage.at < len(stage.actions) for stage in self.stages):
            if not sum(self._advance(number) for number in range(len(self.stages))):
                raise ValueError(f"schedule {schedule.name}: deadlock; reorder the actions")
        for stage in self.stages:
            stage.end()
        self.ends = max(stage.now for stage in self.stages)

    def _advance(self, number: int) -> int:
        """Have a stage go on as far as arrivals are known; by how many actions."""
        stage = self.stages[number]
        before = stage.at
        while stage.at < len(stage.actions):
            action = stage.actions[stage.at]
            need, give = self.schedule.incoming(number, action), self.schedule.outgoing(number, action)
            arrival = 0.0 if need is None else self._arrivals.get((number, need))
            if arrival is None:
                break
            stage.run(action, arrival)
            if give is not None:
                self._arrivals[self.schedule.receiver(number, give.direction), give] = stage.now
        return stage.at - before
