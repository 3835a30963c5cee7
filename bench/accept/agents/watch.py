"""Interception of a rank's torch calls: counts its collectives and applies injected faults.

The counts are in memory shared with the agent, which can read them even if the rank hangs or is stopped: a rank that
has launched fewer collectives than its peers is the one they wait for. The inside of a collective is not observed.
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

from bench.accept.agents.faults import InjectedFault

SLOT = struct.Struct("qq")
"""Shared-memory record of a rank: numbers of collectives and messages launched, and of those returned."""

_FOREVER_S = 3600.0
# Control messages are smaller (128 bytes of ncclUniqueId): corrupting them would hang the measurement instead of
# corrupting its data.
_LEAST_CORRUPT_BYTES = 256
_CYCLES_A_MS = 1_980_000  # at the maximum clock of an H100; other GPUs are similar
_GIB = 1 << 30
_aten, _c10d = torch.ops.aten, torch.ops.c10d


class Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Context manager around the calls of a task.

    Also a `collectives.transport.pair_link.Tap`, since pair measurements call NCCL directly and bypass torch.

    Args:
        slots: shared memory with the counts.
        slot: index of this rank in it.
        faults: injected faults.
        members: ranks of the group, in order.
        rank: this rank.
    """

    def __init__(
        self, slots: mmap.mmap, slot: int, faults: Sequence[InjectedFault], members: Sequence[int], rank: int
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._slots, self._at = slots, slot * SLOT.size
        self._members, self._rank = list(members), rank
        self._faults = {fault.kind: fault for fault in faults if rank in fault.ranks}
        self._buffers_in_use: list[Tensor] = []  # corrupted copies that pending calls still read

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        del types
        kwargs = kwargs or {}
        if func.namespace == "c10d":
            return self._communicate(func, list(args), kwargs)
        out = func(*args, **kwargs)
        if fault := self._faults.get("slow"):
            _repeat_work(func, args, fault.amount)
        return out

    def max_ctas(self, peer: int) -> int | None:
        """Return the CTA limit that an injected fault sets for the communicator with this member, else None."""
        fault = self._faults.get("ctas")
        return round(fault.amount) if fault and self._members[peer] in fault.ranks else None

    def before(self, peer: int, send: Tensor | None, num: int) -> Tensor | None:
        """Count a launch of messages and apply injected faults; a slow link sleeps on the device."""
        launched, returned = SLOT.unpack_from(self._slots, self._at)
        hang, link = self._faults.get("hang"), self._faults.get("slowlink")
        if hang and launched + 1 >= hang.amount:
            time.sleep(_FOREVER_S)
        if link and self._members[peer] in link.ranks and send is not None:
            gibs = max(1, send.nbytes / _GIB)
            torch.cuda._sleep(round(num * gibs * link.amount * _CYCLES_A_MS))  # type: ignore[no-untyped-call]
        if "corrupt" in self._faults and send is not None:
            send = self._corrupted_copy(send)
        SLOT.pack_into(self._slots, self._at, launched + 1, returned)
        return send

    def after(self) -> None:
        """Count the return of a launch."""
        launched, returned = SLOT.unpack_from(self._slots, self._at)
        SLOT.pack_into(self._slots, self._at, launched, returned + 1)

    def _communicate(self, func: Any, args: list[Any], kwargs: Mapping[str, Any]) -> Any:
        launched, returned = SLOT.unpack_from(self._slots, self._at)
        hang, link = self._faults.get("hang"), self._faults.get("slowlink")
        if hang and launched + 1 >= hang.amount:
            time.sleep(_FOREVER_S)
        if link and self._crosses(link, func, args):
            time.sleep(link.amount / 1e3)
        if "corrupt" in self._faults:
            self._corrupt_sent(func, args)
        SLOT.pack_into(self._slots, self._at, launched + 1, returned)
        out = func(*args, **kwargs)
        SLOT.pack_into(self._slots, self._at, launched + 1, returned + 1)
        return out

    def _crosses(self, link: InjectedFault, func: Any, args: Sequence[Any]) -> bool:
        """Return True if a call uses the link: a message to the other end, or a collective with both ends."""
        other = next(rank for rank in link.ranks if rank != self._rank)
        if func is _c10d.send.default:
            return bool(self._members[args[2]] == other)
        collective = func in (_c10d.allreduce_.default, _c10d.alltoall_base_.default)
        return collective and other in self._members and self._rank < other

    def _corrupt_sent(self, func: Any, args: list[Any]) -> None:
        """Corrupt one byte of the sent data; for float32 in the upper mantissa, so that a sum does not round it off."""
        if func is _c10d.allreduce_.default:
            for tensor in args[0]:
                if tensor.nbytes >= _LEAST_CORRUPT_BYTES:
                    tensor.view(-1).view(torch.uint8)[2] ^= 0x40
        elif func is _c10d.send.default:
            args[0] = [self._corrupted_copy(tensor) for tensor in args[0]]
        elif func is _c10d.alltoall_base_.default:
            args[1] = self._corrupted_copy(args[1])

    def _corrupted_copy(self, tensor: Tensor) -> Tensor:
        if tensor.nbytes < _LEAST_CORRUPT_BYTES:
            return tensor
        copied = tensor.clone()
        copied.view(-1).view(torch.uint8)[2] ^= 0x40
        self._buffers_in_use = [*self._buffers_in_use[-8:], copied]
        return copied


def warm_up() -> None:
    """Make torch load what it needs at the first call under a dispatch mode, so that forked processes share it."""
    with Watch(mmap.mmap(-1, mmap.PAGESIZE), 0, [], [0], 0):
        torch.mm(torch.ones(2, 2), torch.ones(2, 2), out=torch.empty(2, 2))


def launched(slots: mmap.mmap, slot: int) -> tuple[int, int]:
    """Return the numbers of collectives that the rank has launched, and of those that have returned."""
    counts = SLOT.unpack_from(slots, slot * SLOT.size)
    return int(counts[0]), int(counts[1])


def _repeat_work(func: Any, args: Sequence[Any], share: float) -> None:
    """Repeat the work on this share of the rows or bytes; several times for a share above 1."""
    while share > 0:
        part = min(share, 1.0)
        if func in (_aten.mm.out, _aten.mm.default):
            rows = max(1, round(part * args[0].shape[0]))
            torch.mm(args[0][:rows], args[1])
        elif func is _aten.copy_.default and args[0].dim() == 1 and args[0].shape == args[1].shape:
            num = max(1, round(part * args[0].shape[0]))
            args[0][:num].copy_(args[1][:num], non_blocking=True)
        share -= 1.0
