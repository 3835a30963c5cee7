"""Tensors that a pipeline stage exchanges with its neighbours in one step, and their order.

NCCL matches the messages of a pair by their order alone, so a stage must send in the order in which its neighbour
receives. Both orders follow from the schedule; a `Traffic` is one stage's part of it. Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

Direction = Literal["forward", "backward"]
"""Activations go forward, to the next stage; their gradients go backward, to the stage before."""
DIRECTIONS: tuple[Direction, ...] = ("forward", "backward")
NUM_SLOTS = 2
"""Messages of a direction that the memory of the peers holds for a stage before it has taken one."""


@dataclass(frozen=True)
class Message:
    """One activation or one gradient on its way between neighbouring stages.

    Args:
        direction: forward or backward.
        micro_batch: which micro-batch of the step.
        chunk: which chunk of the *receiving* stage it is for: 0 unless the schedule is interleaved.
        phase: of the schedule, on this side (warm-up, steady, cool-down): for records; not part of the identity.
    """

    direction: Direction
    micro_batch: int
    chunk: int = 0
    phase: str = field(default="", compare=False)

    def __str__(self) -> str:
        what = "activation" if self.direction == "forward" else "gradient"
        return f"{what} of micro-batch {self.micro_batch} for chunk {self.chunk}"


@dataclass(frozen=True)
class Traffic:
    """The messages of one stage in one step.

    Args:
        receives: in the order in which the stage uses them.
        sends: in the order in which the stage has them ready.
        wraps: whether the last stage of the pipeline sends forward to the first one; the same on all stages.

    Raises:
        ValueError: a message comes twice.
    """

    receives: tuple[Message, ...] = ()
    sends: tuple[Message, ...] = ()
    wraps: bool = False

    def __post_init__(self) -> None:
        for name, messages in (("receives", self.receives), ("sends", self.sends)):
            if len(set(messages)) != len(messages):
                twice = next(message for index, message in enumerate(messages) if message in messages[:index])
                raise ValueError(f"{name}: the {twice} comes twice; every message of a step is exchanged once")

    def incoming(self, direction: Direction) -> list[Message]:
        """Return the messages received on one direction's channel, in order."""
        return [message for message in self.receives if message.direction == direction]

    def outgoing(self, direction: Direction) -> list[Message]:
        """Return the messages sent on one direction's channel, in order."""
        return [message for message in self.sends if message.direction == direction]


def digest(messages: Sequence[Message]) -> str:
    """A short text that is the same where two sides agree on messages and order."""
    described = repr([(message.direction, message.micro_batch, message.chunk) for message in messages])
    return f"{len(messages)} messages, order {hashlib.sha256(described.encode()).hexdigest()[:12]}"
