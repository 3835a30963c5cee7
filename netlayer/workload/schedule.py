"""Pipeline schedules as data: what each stage computes, in which order, and what it exchanges.

A stage holds v chunks of the model; chunk c of stage s is the virtual stage c * p + s, and a micro-batch passes the
virtual stages 0 to p * v - 1 forward and back (Narayanan et al., SC'21, section 2.2; MegaScale 3.2). 1F1B has one chunk
a stage, interleaved 1F1B several. Not covered: how long anything takes and whether it deadlocks
(`schedule_simulation`), and running it (`trainer.pipeline`).

p stages, v chunks a stage, m micro-batches a step.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

from netlayer.workload.messages import Direction, Message, Traffic

if TYPE_CHECKING:
    from netlayer.config.tree import JobConfig
    from netlayer.layout import ParallelLayout

Phase = Literal["warm-up", "steady", "cool-down"]
Kind = Literal[Direction, "weights"]


class Action(NamedTuple):
    """One computation of a stage: the forward or the backward pass of a micro-batch through one chunk, or what a
    backward pass has left of the latter, the gradients of weights.

    `phase`: forwards before the first backward are warm-up, backwards after the last forward are cool-down, and
    between the two forwards and backwards alternate (steady). Weights' gradients may follow any of them.
    """

    kind: Kind
    micro_batch: int
    chunk: int
    phase: Phase

    def __str__(self) -> str:
        return f"{self.kind} of micro-batch {self.micro_batch}, chunk {self.chunk}"


@dataclass(frozen=True)
class Schedule:
    """The actions of every stage, in order.

    Args:
        name: `1f1b`, `eager_1f1b` or `interleaved_1f1b`; after `zero_bubble_` where backward passes are split.
        num_chunks: v, the same on every stage; how many layers a chunk has is not its business.
        num_micro_batches: m.
        stages: actions of stage 0 to p - 1.
        paired_rounds: whether coupled communication exchanges once a steady forward and backward, which needs a
            warm-up with room for it, and not after each of them; see `rounds`.
    """

    name: str
    num_chunks: int
    num_micro_batches: int
    stages: tuple[tuple[Action, ...], ...]
    paired_rounds: bool = False

    @property
    def num_stages(self) -> int:
        return len(self.stages)

    @property
    def wraps(self) -> bool:
        """Whether the last stage also sends forward to the first one."""
        return self.num_stages > 1 and self.num_chunks > 1

    @functools.cached_property
    def deferred(self) -> tuple[frozenset[tuple[int, int]], ...]:
        """(micro-batch, chunk) pairs of each stage whose weight gradients are an action of their own."""
        return tuple(
            frozenset((action.micro_batch, action.chunk) for action in actions if action.kind == "weights")
            for actions in self.stages
        )

    def incoming(self, stage: int, action: Action) -> Message | None:
        """Return the message an action needs from a neighbour; None at the model's ends and for weight gradients."""
        if action.kind == "weights":
            return None
        position = self._position(stage, action)
        return None if position == 0 else Message(action.kind, action.micro_batch, action.chunk, action.phase)

    def outgoing(self, stage: int, action: Action) -> Message | None:
        """Return the message a neighbour needs from an action; None at the model's ends and for weight gradients."""
        if action.kind == "weights":
            return None
        position = self._position(stage, action)
        if position == self.num_stages * self.num_chunks - 1:
            return None
        # Virtual stages are numbered from the end that the action's direction starts from.
        at_the_edge = stage == (self.num_stages - 1 if action.kind == "forward" else 0)
        step = 1 if action.kind == "forward" else -1
        chunk = action.chunk + (step if at_the_edge else 0)
        return Message(action.kind, action.micro_batch, chunk, action.phase)

    def traffic(self, stage: int) -> Traffic:
        """Everything that a stage receives and sends in one step, in order."""
        actions = self.stages[stage]
        receives = (self.incoming(stage, action) for action in actions)
        sends = (self.outgoing(stage, action) for action in actions)
        return Traffic(tuple(m for m in receives if m), tuple(m for m in sends if m), self.wraps)

    def rounds(self, stage: int) -> list[list[Action]]:
        """Return the rounds of coupled communication: sends of a round go with the next's receives, all waited for.

        As Megatron-LM does without overlap: after every action; with `paired_rounds` (all but plain 1F1B), a steady
        forward and backward make one round. There, an exchange after every action would deadlock. Weights' gradients
        make no round: coupled, a stage cannot send before it computes them.
        """
        rounds: list[list[Action]] = []
        for action in self.stages[stage]:
            is_second = self.paired_rounds and action.phase == "steady" and action.kind == "backward"
            if is_second or action.kind == "weights":
                rounds[-1].append(action)
            else:
                rounds.append([action])
        return rounds

    def receiver(self, stage: int, direction: Direction) -> int:
        """The stage that messages of `stage` go to."""
        return (stage + (1 if direction == "forward" else -1)) % self.num_stages

    def peak_in_flight(self, stage: int) -> int:
        """Return the most (micro-batch, chunk) pairs that wait for their backward at once: those that memory must hold.

        A pair is one micro-batch through 1 / v of the stage's layers. One whose weights' gradients are still to be
        computed counts: linears' inputs and the gradients of their outputs are about as many bytes (`memory`).
        """
        num_pairs = peak = 0
        for action in self.stages[stage]:
            if action.kind == "forward":
                num_pairs += 1
            elif action.kind == "weights" or (action.micro_batch, action.chunk) not in self.deferred[stage]:
                num_pairs -= 1
            peak = max(peak, num_pairs)
        return peak

    def _position(self, stage: int, action: Action) -> int:
        """Virtual stages that lie before the action, counted in its own direction."""
        virtual = action.chunk * self.num_stages + stage
        return virtual if action.kind == "forward" else self.num_stages * self.num_chunks - 1 - virtual


def one_forward_one_backward(num_stages: int, num_micro_batches: int, eager: bool = False) -> Schedule:
    """1F1B: each stage warms up with as many forwards as there are stages after it, then alternates.

    Plain 1F1B leaves a stage nothing to compute while a message and its answer travel: every micro-batch of the steady
    phase waits for them. `eager` doubles the warm-up, so that these travels hide too, for at most twice the activations
    (the warm-up that interleaved 1F1B has anyway; Zhuang et al., MLSys'23, call it eager 1F1B).

    Raises:
        ValueError: a number below 1.
    """
    _check(num_stages=num_stages, num_micro_batches=num_micro_batches)
    per_stage = 2 if eager else 1
    order = [(micro_batch, 0) for micro_batch in range(num_micro_batches)]
    stages = tuple(_alternate(order, order, (num_stages - 1 - stage) * per_stage) for stage in range(num_stages))
    return Schedule("eager_1f1b" if eager else "1f1b", 1, num_micro_batches, stages, paired_rounds=eager)


def interleaved(num_stages: int, num_micro_batches: int, num_chunks: int) -> Schedule:
    """Interleaved 1F1B in Megatron-LM's order: p micro-batches through chunk 0, the same through chunk 1, and so on.

    Raises:
        ValueError: a number below 1, one stage with several chunks, or micro-batches that do not divide by the stages.
    """
    _check(num_stages=num_stages, num_micro_batches=num_micro_batches, num_chunks=num_chunks)
    if num_chunks > 1 and num_stages == 1:
        raise ValueError(f"num_chunks = {num_chunks}: one stage has nothing to interleave; use 1, or more stages")
    if num_micro_batches % num_stages:
        raise ValueError(
            f"num_micro_batches = {num_micro_batches}: must be a multiple of the {num_stages} stages where chunks are "
            "interleaved; change the global or the micro-batch size"
        )
    forwards = _forwards(num_stages, num_micro_batches, num_chunks)
    backwards = [(micro_batch, num_chunks - 1 - chunk) for micro_batch, chunk in forwards]
    stages = tuple(
        _alternate(forwards, backwards, (num_stages - 1 - stage) * 2 + (num_chunks - 1) * num_stages)
        for stage in range(num_stages)
    )
    return Schedule("interleaved_1f1b", num_chunks, num_micro_batches, stages, paired_rounds=True)


def of_layout(layout: ParallelLayout, num_micro_batches: int) -> Schedule:
    """Return the schedule of a layout's step: interleaved 1F1B where a stage holds several chunks, else 1F1B."""
    if layout.vpp > 1:
        return interleaved(layout.pp, num_micro_batches, layout.vpp)
    return one_forward_one_backward(layout.pp, num_micro_batches)


def micro_batches(job: JobConfig) -> int:
    """Return the number of a data-parallel rank's micro-batches in a step of the full batch."""
    return job.batch.global_batch_size // (job.batch.micro_batch_size * job.parallel.data_ranks)


def forward_only(num_stages: int, num_micro_batches: int, num_chunks: int = 1) -> Schedule:
    """Every micro-batch through all chunks once, without a backward: an evaluation.

    Raises:
        ValueError: a number below 1.
    """
    _check(num_stages=num_stages, num_micro_batches=num_micro_batches, num_chunks=num_chunks)
    order = _forwards(num_stages, num_micro_batches, num_chunks)
    actions = tuple(Action("forward", *pair, "warm-up") for pair in order)
    return Schedule("forward_only", num_chunks, num_micro_batches, (actions,) * num_stages)


def bubble_fraction(num_stages: int, num_micro_batches: int, num_chunks: int = 1) -> float:
    """Idle time of a stage over its computing time, all stages alike and messages free: (p - 1) / (m * v).

    Narayanan et al., SC'21, section 2.2; MegaScale 3.1.
    """
    _check(num_stages=num_stages, num_micro_batches=num_micro_batches, num_chunks=num_chunks)
    return (num_stages - 1) / (num_micro_batches * num_chunks)


def _forwards(num_stages: int, num_micro_batches: int, num_chunks: int) -> list[tuple[int, int]]:
    """(micro-batch, chunk) in order: as many micro-batches as there are stages through each chunk in turn."""
    return [
        (micro_batch, chunk)
        for first in range(0, num_micro_batches, num_stages)
        for chunk in range(num_chunks)
        for micro_batch in range(first, min(first + num_stages, num_micro_batches))
    ]


def _alternate(
    forwards: Sequence[tuple[int, int]], backwards: Sequence[tuple[int, int]], num_warm_up: int
) -> tuple[Action, ...]:
    """`num_warm_up` forwards, then forward and backward in turn, then the backwards that are left."""
    num_warm_up = min(num_warm_up, len(forwards))
    num_steady = len(forwards) - num_warm_up
    actions = [Action("forward", *pair, "warm-up") for pair in forwards[:num_warm_up]]
    for ahead, back in zip(forwards[num_warm_up:], backwards[:num_steady], strict=True):
        actions += [Action("forward", *ahead, "steady"), Action("backward", *back, "steady")]
    actions += [Action("backward", *pair, "cool-down") for pair in backwards[num_steady:]]
    return tuple(actions)


def _check(**numbers: int) -> None:
    for name, number in numbers.items():
        if number < 1:
            raise ValueError(f"{name} = {number}: must be at least 1")
