"""What a rank calls, as it calls it: collectives are counted, and planted faults take effect there.

The counts lie in memory that the agent shares, so that they can be read of a rank that hangs or is stopped: the one
that has launched fewer than its peers is the one they wait for. Left out: what happens inside a collective.
"""

from __future__ import annotations

import mmap
import struct
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from bench.accept.plant import Plant

SLOT = struct.Struct("qq")
"""In shared memory, for each rank: collectives and messages that it has launched, and those that have returned."""

_FOREVER_S = 3600.0
# What steers a measurement is smaller (128 bytes say where a communicator meets): a fault there would hang it instead
# of spoiling its data.
_LEAST_SPOILT_BYTES = 256
_CYCLES_A_MS = 1_980_000  # of a H100's clock at most; others are near
_GIB = 1 << 30
_aten, _c10d = torch.ops.aten, torch.ops.c10d


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Put it around what a task calls.

    It is a `collectives.pair_link.Tap` too: what pairs of ranks launch through NCCL itself passes torch by.

    Args:
        slots: shared memory of the counts.
        slot: this rank's place there.
        plants: faults in which this rank takes part.
        members: ranks of the group, by their number in it.
        rank: this one.
    """

    def __init__(self, slots: mmap.mmap, slot: int, plants: Sequence[Plant], members: Sequence[int], rank: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._slots, self._at = slots, slot * SLOT.size
        self._members, self._rank = list(members), rank
        self._plants = {plant.kind: plant for plant in plants if rank in plant.ranks}
        self._kept: list[Tensor] = []  # what an unfinished call still reads

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return self._communicate(func, list(args), kwargs)
        out = func(*args, **kwargs)
        if plant := self._plants.get("slow"):
            _work_again(func, args, plant.amount)
        return out

    def max_ctas(self, peer: int) -> int | None:
        """As a planted fault wants it for the communicator with this member."""
        plant = self._plants.get("ctas")
        return round(plant.amount) if plant and self._members[peer] in plant.ranks else None

    def before(self, peer: int, send: Tensor | None, num: int) -> Tensor | None:
        """Count a launch of messages, and do to it what is planted; what is slow is so on the device."""
        launched, returned = SLOT.unpack_from(self._slots, self._at)
        hang, link = self._plants.get("hang"), self._plants.get("slowlink")
        if hang and launched + 1 >= hang.amount:
            time.sleep(_FOREVER_S)
        if link and self._members[peer] in link.ranks and send is not None:
            gibs = max(1, send.nbytes / _GIB)
            torch.cuda._sleep(round(num * gibs * link.amount * _CYCLES_A_MS))  # type: ignore[no-untyped-call]
        if "corrupt" in self._plants and send is not None:
            send = self._spoilt_copy(send)
        SLOT.pack_into(self._slots, self._at, launched + 1, returned)
        return send

    def after(self) -> None:
        """Count that it has returned."""
        launched, returned = SLOT.unpack_from(self._slots, self._at)
        SLOT.pack_into(self._slots, self._at, launched, returned + 1)

    def _communicate(self, func: Any, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
        launched, returned = SLOT.unpack_from(self._slots, self._at)
        hang, link = self._plants.get("hang"), self._plants.get("slowlink")
        if hang and launched + 1 >= hang.amount:
            time.sleep(_FOREVER_S)
        if link and self._crosses(link, func, args):
            time.sleep(link.amount / 1e3)
        if "corrupt" in self._plants:
            self._spoil(func, args)
        SLOT.pack_into(self._slots, self._at, launched + 1, returned)
        out = func(*args, **kwargs)
        SLOT.pack_into(self._slots, self._at, launched + 1, returned + 1)
        return out

    def _crosses(self, link: Plant, func: Any, args: Sequence[Any]) -> bool:
        """Whether a call goes over the link: a message to the other end, or a collective that both are in."""
        other = next(rank for rank in link.ranks if rank != self._rank)
        if func is _c10d.send.default:
            return bool(self._members[args[2]] == other)
        collective = func in (_c10d.allreduce_.default, _c10d.alltoall_base_.default)
        return collective and other in self._members and self._rank < other

    def _spoil(self, func: Any, args: list[Any]) -> None:
        """One byte of what is sent; of float32, in the upper mantissa, so that no sum rounds it away."""
        if func is _c10d.allreduce_.default:
            for tensor in args[0]:
                if tensor.nbytes >= _LEAST_SPOILT_BYTES:
                    tensor.view(-1).view(torch.uint8)[2] ^= 0x40
        elif func is _c10d.send.default:
            args[0] = [self._spoilt_copy(tensor) for tensor in args[0]]
        elif func is _c10d.alltoall_base_.default:
            args[1] = self._spoilt_copy(args[1])

    def _spoilt_copy(self, tensor: Tensor) -> Tensor:
        if tensor.nbytes < _LEAST_SPOILT_BYTES:
            return tensor
        copied = tensor.clone()
        copied.view(-1).view(torch.uint8)[2] ^= 0x40
        self._kept = [*self._kept[-8:], copied]
        return copied


def warm_up() -> None:
    """Load what torch loads when a mode sees its first call; a fork shares it."""
    with Watch(mmap.mmap(-1, mmap.PAGESIZE), 0, [], [0], 0):
        torch.mm(torch.ones(2, 2), torch.ones(2, 2), out=torch.empty(2, 2))


def launched(slots: mmap.mmap, slot: int) -> tuple[int, int]:
    """How many collectives the rank has launched, and how many of them have returned."""
    found = SLOT.unpack_from(slots, slot * SLOT.size)
    return int(found[0]), int(found[1])


def _work_again(func: Any, args: Sequence[Any], share: float) -> None:
    """The same once more, on so large a share of the rows or bytes; more than once where it is above 1."""
    while share > 0:
        part = min(share, 1.0)
        if func in (_aten.mm.out, _aten.mm.default):
            rows = max(1, round(part * args[0].shape[0]))
            torch.mm(args[0][:rows], args[1])
        elif func is _aten.copy_.default and args[0].dim() == 1 and args[0].shape == args[1].shape:
            num = max(1, round(part * args[0].shape[0]))
            args[0][:num].copy_(args[1][:num], non_blocking=True)
        share -= 1.0
