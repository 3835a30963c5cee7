"""Messages between pipeline stages over peer memory: copied by the copy engines, awaited by the streams themselves.

A receive of NCCL that is posted early is a kernel that spins: it keeps multiprocessors from the computation that it
shall hide under (on two H200 a step of 175 ms of computation took 201 ms with four blocks a message, 211 ms with NCCL's
own choice, 181 ms so). Here nothing runs on a multiprocessor but the copy out of the slot: a stream waits by a memory
operation of the driver (cuStreamWaitValue32), and tells the peer by another one.

Each stage has, in a window that the others can write to, two slots for each direction that messages come from, and two
counters: how many have come, and how many of its own the next stage has taken. A sender waits until the slot's last
message was taken; so sends run ahead of receives by two messages, and no further.

[Note: nothing is posted ahead] A message comes without its receive: that only copies it out of the slot. A stream that
waits by a memory operation holds up every stream behind it in its hardware queue, and nothing ends the wait but the
peer; a receive ahead of its use would hold up the very sends that the peer needs first (of schedules with one queue for
all streams, every one stood still so, on paper). So it is posted where it is used, and all that waits behind it is
later in the program; the copy, some 0.1 ms for 64 MiB, is what that costs.

Not covered: CUDA graphs (the counts stand in the operations, a replay would repeat them), stages on several hosts, and
a limit of time: a stream whose peer has died waits for ever, and only a watch says so.
"""

from __future__ import annotations

import ctypes
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.pipeline.link import Link
from collectives.transport.current_stream import current_stream
from collectives.transport.symmetric import HEAD_BYTES, Window, driver
from netlayer.workload.messages import DIRECTIONS, NUM_SLOTS, Direction, Message

_GREATER_OR_EQUAL, _WITH_FENCE = 0, 0
_WORDS = {("arrived", "forward"): 0, ("arrived", "backward"): 1, ("taken", "forward"): 2, ("taken", "backward"): 3}
_WORD_STRIDE = 64  # bytes


class Slots:
    """A stage's window, and what it has sent and received through it. All stages of a group open theirs together.

    Args:
        group: of the stages, where `symmetric.why_unusable` has nothing against it.
        num_bytes: of a message.
        device: of this stage.
    """

    def __init__(self, group: dist.ProcessGroup, num_bytes: int, device: torch.device) -> None:
        self.num_bytes = num_bytes
        self._stride = -(-num_bytes // 256) * 256
        self.window = Window(group, HEAD_BYTES + len(DIRECTIONS) * NUM_SLOTS * self._stride, device, kernels=False)
        self._own_rank, self._ranks = dist.get_rank(group), dist.get_process_group_ranks(group)
        self.sent = dict.fromkeys(DIRECTIONS, 0)
        self.received = dict.fromkeys(DIRECTIONS, 0)

    def send(self, tensor: Tensor, direction: Direction, peer: int) -> None:
        """Copy into the peer's next slot, once that is free, on the current stream."""
        index, rank = self.sent[direction], self._ranks.index(peer)
        self.sent[direction] += 1
        self._await("taken", direction, index + 1 - NUM_SLOTS)
        self._slot(rank, direction, index).copy_(tensor.view(-1).view(torch.uint8), non_blocking=True)
        self._tell(rank, "arrived", direction, index + 1)

    def receive(self, tensor: Tensor, direction: Direction, peer: int) -> None:
        """Copy out of this rank's next slot, once its message has arrived, on the current stream."""
        index, rank = self.received[direction], self._ranks.index(peer)
        self.received[direction] += 1
        self._await("arrived", direction, index + 1)
        tensor.view(-1).view(torch.uint8).copy_(self._slot(self._own_rank, direction, index), non_blocking=True)
        self._tell(rank, "taken", direction, index + 1)

    def _slot(self, rank: int, direction: Direction, index: int) -> Tensor:
        place = DIRECTIONS.index(direction) * NUM_SLOTS + index % NUM_SLOTS
        start = HEAD_BYTES + place * self._stride
        return self.window.of(rank)[start : start + self.num_bytes]

    def _await(self, what: str, direction: Direction, count: int) -> None:
        if count > 0:
            self._operate("cuStreamWaitValue32_v2", self._own_rank, what, direction, count, _GREATER_OR_EQUAL)

    def _tell(self, rank: int, what: str, direction: Direction, count: int) -> None:
        self._operate("cuStreamWriteValue32_v2", rank, what, direction, count, _WITH_FENCE)

    def _operate(self, name: str, rank: int, what: str, direction: Direction, count: int, flags: int) -> None:
        address = self.window.addresses[rank] + _WORDS[what, direction] * _WORD_STRIDE
        stream = current_stream(self.window.device).cuda_stream
        # Counts wrap at 2^32; "greater or equal" is by the sign of the difference.
        error = getattr(driver(), name)(
            ctypes.c_void_p(stream), ctypes.c_uint64(address), ctypes.c_uint32(count & 0xFFFF_FFFF), flags
        )
        if error:
            raise RuntimeError(f"{name} failed: CUDA driver error {error}; open the links with path='group'")


class PeerLink(Link):
    """A link whose messages go through slots; all else as there."""

    posts_ahead = False

    def __init__(self, slots: Slots, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._slots = slots

    def _call(self, tensor: Tensor, message: Message) -> None:
        if self.is_capturing:
            raise RuntimeError(f"{self.describe(message)}: cannot be captured; open the links with path='group'")
        move = self._slots.send if self.kind == "send" else self._slots.receive
        move(tensor, self.direction, self.peer)
