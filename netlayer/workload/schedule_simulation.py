"""Runs a pipeline schedule on paper: does it end, how long does it take.

The rules are those of `collectives.pipeline.channel`: messages of a channel arrive in order, one after the other; a
stage has `depth` receives posted ahead in each direction; sends do not wait (decoupled), or a stage waits after each
round until its messages have arrived and the next ones are there (coupled). Not covered: computation that communication
slows down, and channels that share a wire.

p stages, v chunks a stage; a channel is one direction of the link from stage s to stage s + 1 (mod p).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from netlayer.config.tree import JobConfig
from netlayer.workload.flops import half_block_flops, head_flops
from netlayer.workload.messages import DIRECTIONS, Direction, Message
from netlayer.workload.schedule import Action, Schedule
from netlayer.workload.stages import run_of


@dataclass(frozen=True)
class Costs:
    """Times in seconds; stages and links may differ.

    Args:
        forward_s, backward_s: of one micro-batch, by stage and chunk, shape [p][v].
        transfer_s: of one message, by link, shape [p]; the last is the link from the last stage to the first.
        weight_gradient_share: share of `backward_s` that weight gradients take where a schedule computes them apart.
    """

    forward_s: Sequence[Sequence[float]]
    backward_s: Sequence[Sequence[float]]
    transfer_s: Sequence[float]
    weight_gradient_share: float = 0.5

    @classmethod
    def even(cls, schedule: Schedule, forward_s: float, backward_s: float, transfer_s: float = 0.0) -> Costs:
        """The same for all stages, chunks and links."""
        p, v = schedule.num_stages, schedule.num_chunks
        return cls([[forward_s] * v] * p, [[backward_s] * v] * p, [transfer_s] * p)

    def of(self, schedule: Schedule, stage: int, action: Action) -> float:
        if action.kind == "forward":
            return self.forward_s[stage][action.chunk]
        backward_s = self.backward_s[stage][action.chunk]
        if (action.micro_batch, action.chunk) not in schedule.deferred[stage]:
            return backward_s
        share = self.weight_gradient_share
        return backward_s * (share if action.kind == "weights" else 1 - share)


def flops_costs(job: JobConfig) -> Costs:
    """Return costs in FLOPs a token, in place of seconds; messages cost nothing.

    A backward costs two forwards, three with full recomputation. The head's three are all in the last chunk's forward.
    """
    parallel, model = job.parallel, job.model
    forward = [[0.0] * parallel.vpp for _ in range(parallel.pp)]
    for stage in range(parallel.pp):
        for chunk in range(parallel.vpp):
            half_blocks = run_of(job, stage, chunk)  # 2 l is the attention of layer l, 2 l + 1 its MLP
            forward[stage][chunk] = sum(half_block_flops(model, each // 2)[each % 2] for each in half_blocks)
    again = 1.0 if model.recompute == "full" else 0.0
    backward = [[(2 + again) * each for each in times] for times in forward]
    forward[-1][-1] += 3 * head_flops(model)  # the loss computes the head's gradients in its forward pass
    return Costs(forward, backward, transfer_s=[0.0] * parallel.pp, weight_gradient_share=1 / (2 + again))


@dataclass(frozen=True)
class Timeline:
    """Times of everything that happened, in seconds from the start of the step.

    Args:
        computed: (action, start, end) of each stage, in order.
        sent: (message, start, arrival) of each stage's sends, in order of the actions.
    """

    computed: Sequence[Sequence[tuple[Action, float, float]]]
    sent: Sequence[Sequence[tuple[Message, float, float]]]

    @property
    def step_s(self) -> float:
        """Seconds until the last action of any stage."""
        return max(actions[-1][2] for actions in self.computed)

    @property
    def ideal_s(self) -> float:
        """The busiest stage's computation alone."""
        return max(sum(end - start for _, start, end in actions) for actions in self.computed)

    @property
    def bubble(self) -> float:
        """Idle time over computing time of the busiest stage; to compare with `bubble_fraction`."""
        return self.step_s / self.ideal_s - 1


def simulate(
    schedule: Schedule,
    costs: Costs,
    *,
    depth: int = 1,
    coupled: bool = False,
    one_queue: bool = False,
    slots: int = 0,
) -> Timeline:
    """Run one step.

    Args:
        depth: receives posted ahead in each direction; 0: each where it is used.
        coupled: a stage waits for its sends and its next receives together after every round (`Schedule.rounds`).
        one_queue: a stage issues everything in the order of its program and waits where a message must wait for the one
            before it; see [Note: hardware queues] in collectives/pipeline/channel.py.
        slots: messages of a channel that come without their receive, which only takes them out (memory of the peers).

    Raises:
        ValueError: the schedule deadlocks; the message says where each stage is. Or costs are of another shape.
    """
    if depth < 0 or slots < 0:
        raise ValueError(f"depth = {depth}, slots = {slots}: neither can be below 0")
    _check_costs(schedule, costs)
    channels = _open_channels(schedule, costs, slots)
    stages = [
        _Stage(
            stage,
            list(coupled_program(schedule, stage) if coupled else decoupled_program(schedule, stage, depth)),
            {direction: channels[direction, stage] for direction in DIRECTIONS},
            {direction: channels[direction, schedule.receiver(stage, direction)] for direction in DIRECTIONS},
            functools.partial(costs.of, schedule, stage),
            one_queue,
        )
        for stage in range(schedule.num_stages)
    ]
    while not all(stage.done for stage in stages):
        # All in turn: were the first ones asked again after each that went on, they could mostly do nothing.
        if not sum(stage.advance() for stage in stages):
            waits = "; ".join(f"stage {s.stage} at the {s.program[s.at]}" for s in stages if not s.done)
            raise ValueError(f"schedule {schedule.name}: deadlock: {waits}; reorder the actions")
    return Timeline([stage.computed for stage in stages], [stage.sent() for stage in stages])


class Instruction(NamedTuple):
    """Next instruction of a stage: post a receive, wait for it, compute, send, or wait until that has left."""

    kind: Literal["post", "receive", "compute", "send", "sent"]
    what: Message | Action

    def __str__(self) -> str:
        return f"{self.kind} of the {self.what}"


def decoupled_program(schedule: Schedule, stage: int, depth: int) -> Iterator[Instruction]:
    """A step of one stage as `trainer.pipeline` runs it on a decoupled channel."""
    traffic = schedule.traffic(stage)
    ahead = {direction: iter(traffic.incoming(direction)) for direction in DIRECTIONS}
    for messages in ahead.values():
        for _, message in zip(range(depth), messages, strict=False):
            yield Instruction("post", message)
    for action in schedule.stages[stage]:
        need, give = schedule.incoming(stage, action), schedule.outgoing(stage, action)
        if need is not None:
            if depth == 0:
                yield Instruction("post", need)
            yield Instruction("receive", need)
            following = next(ahead[need.direction], None) if depth else None
            if following is not None:
                yield Instruction("post", following)
        yield Instruction("compute", action)
        if give is not None:
            yield Instruction("send", give)


def coupled_program(schedule: Schedule, stage: int) -> Iterator[Instruction]:
    """The same on a coupled channel."""
    rounds = schedule.rounds(stage)
    gives: list[Message] = []
    for actions in rounds:
        needs = [need for action in actions if (need := schedule.incoming(stage, action))]
        yield from (Instruction("send", message) for message in gives)
        yield from (Instruction("post", message) for message in needs)
        yield from (Instruction("sent", message) for message in gives)
        yield from (Instruction("receive", message) for message in needs)
        yield from (Instruction("compute", action) for action in actions)
        gives = [give for action in actions if (give := schedule.outgoing(stage, action))]
    yield from (Instruction("send", message) for message in gives)


@dataclass
class _Channel:
    """One direction of one link: when each message was ready and posted, and when it started and landed."""

    order: list[Message]
    transfer_s: float
    slots: int
    ready: dict[Message, float] = field(default_factory=dict)
    posted: dict[Message, float] = field(default_factory=dict)
    landed: dict[Message, tuple[float, float]] = field(default_factory=dict)
    place: dict[Message, int] = field(init=False)

    def __post_init__(self) -> None:
        self.place = {message: index for index, message in enumerate(self.order)}

    def arrival(self, message: Message) -> float | None:
        """Return the time of its arrival, if that is known by now."""
        while len(self.landed) < len(self.order):
            following = self.order[len(self.landed)]
            room = self.room_for(following)
            if following not in self.ready or room is None:
                break
            free = self.landed[self.order[len(self.landed) - 1]][1] if self.landed else 0.0
            start = max(self.ready[following], room, free)
            self.landed[following] = (start, start + self.transfer_s)
        return self.landed[message][1] if message in self.landed else None

    def room_for(self, message: Message) -> float | None:
        """Return the time from which it has a slot, if known: its receive is posted, or the slot's last one taken."""
        index = self.place[message] - self.slots
        if index < 0:
            return 0.0
        posted = self.posted.get(self.order[index])
        if posted is None or self.slots == 0:
            return posted
        return max(posted, self.landed[self.order[index]][1])

    def clear_of(self, message: Message) -> float | None:
        """Return the time when the one before `message` has arrived, if that is known by now."""
        index = self.place[message]
        return self.arrival(self.order[index - 1]) if index else 0.0


class _Stage:
    """One stage on its way through its program."""

    def __init__(
        self,
        stage: int,
        program: Sequence[Instruction],
        into: dict[Direction, _Channel],
        out: dict[Direction, _Channel],
        cost: Callable[[Action], float],
        one_queue: bool,
    ) -> None:
        self.stage, self.program, self.into, self.out = stage, program, into, out
        self.cost, self.one_queue = cost, one_queue
        self.at = 0
        self.now = 0.0
        self.computed: list[tuple[Action, float, float]] = []

    @property
    def done(self) -> bool:
        return self.at == len(self.program)

    def advance(self) -> bool:
        """Follow the program as far as times are known by now; whether that was anywhere."""
        before = self.at
        while not self.done and (time := self._follow(self.program[self.at])) is not None:
            self.now = max(self.now, time)
            self.at += 1
        return self.at > before

    def sent(self) -> list[tuple[Message, float, float]]:
        messages = [one.what for one in self.program if one.kind == "send"]
        return [(m, *self.out[m.direction].landed[m]) for m in messages if isinstance(m, Message)]

    def _follow(self, instruction: Instruction) -> float | None:
        """Carry it out; when the next one can follow, None where that is not known yet."""
        what = instruction.what
        if isinstance(what, Action):
            start, self.now = self.now, self.now + self.cost(what)
            self.computed.append((what, start, self.now))
            return self.now
        channel = (self.into if instruction.kind in ("post", "receive") else self.out)[what.direction]
        if instruction.kind in ("receive", "sent"):
            return channel.arrival(what)
        free = self._free(instruction.kind, channel, what) if self.one_queue else 0.0
        if free is None:
            return None
        times = channel.posted if instruction.kind == "post" else channel.ready
        times[what] = max(self.now, free)
        return free

    def _free(self, kind: str, channel: _Channel, message: Message) -> float | None:
        """Return the time when the head of the only queue lets others pass, if that is known by now."""
        if not channel.slots:  # a kernel that runs holds up nobody but the next one of its stream
            return channel.clear_of(message)
        # A stream's wait holds up all: of a send for its slot, of a receive for its message.
        return channel.room_for(message) if kind == "send" else channel.arrival(message)


def _check_costs(schedule: Schedule, costs: Costs) -> None:
    p, v = schedule.num_stages, schedule.num_chunks
    for name, by_stage in (("forward_s", costs.forward_s), ("backward_s", costs.backward_s)):
        if [len(by_chunk) for by_chunk in by_stage] != [v] * p:
            rule = f"must have shape [{p}][{v}]: a time for each stage and chunk of the schedule"
            raise ValueError(f"costs.{name} = {by_stage}: {rule}")
    if len(costs.transfer_s) != p:
        raise ValueError(f"costs.transfer_s = {costs.transfer_s}: must have length {p}: a time for each link")


def _open_channels(schedule: Schedule, costs: Costs, slots: int) -> dict[tuple[Direction, int], _Channel]:
    """Return the channels by direction and receiving stage."""
    p = schedule.num_stages
    channels: dict[tuple[Direction, int], _Channel] = {}
    for stage in range(p):
        for direction in DIRECTIONS:
            link = stage if direction == "forward" else (stage - 1) % p
            order = schedule.traffic(stage).outgoing(direction)
            channels[direction, schedule.receiver(stage, direction)] = _Channel(order, costs.transfer_s[link], slots)
    return channels
