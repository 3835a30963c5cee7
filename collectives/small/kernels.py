"""Our kernels for small collectives, over peer memory: every rank writes what a peer needs into that peer's window.

- `OneShot`: every rank sends all that a peer needs, and sums what it hears itself. One trip over the link.
- `TwoShot`: all-reduce alone; each rank sums its part and sends the result around. Fewer bytes, two trips.

[Note: rounds] Why kinds, sizes and types may follow each other in any order on the one window of our kernels:
1. A line of the window is (half, source, unit). Block b of any kernel touches the units from b * THREADS on, in a
   second leg the same behind capacity / 2, where no first leg gets to. THREADS is the same in every launch, so blocks
   of different index never share a line: each index is a protocol of its own, with a counter of its own.
2. All ranks launch the same kinds and sizes in the same order, so the same grids: counter b means the same launch on
   all of them. A launch whose grid ends before b leaves b's lines and counter alone.
3. A block that takes part has at least one unit, and ends round e only when it has a line of round e from every peer.
   The peer's block sent that line after its own round e - 1 was over for all its threads (the barrier before the
   counter, and the order of kernels on a stream). So a rank that writes in round e + 1 knows that all peers have read
   all that they will of round e - 1, the last one with the same half. A second leg comes later still.
4. A line that a round did not write holds the flag of an older round, which is never the one waited for. (Counters
   have 32 bits: a stale line could pass only if it was last written exactly 2**32 rounds of its block before.)
5. A block waits for the same block of the peers alone, and a GPU starts blocks in the order of their index, so a grid
   that does not fit at once still makes progress.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.small.path import Calls, Kind, Path
from collectives.transport.symmetric import Window

THREADS = 128  # of a block, in every launch: see [Note: rounds]
UNIT_BYTES = 8
LINE_BYTES = 16  # a unit on its way, with its flag twice

_KERNEL_TYPES = {torch.bfloat16: "bfloat16", torch.float16: "float16", torch.float32: "float32"}
_REDUCTIONS = ("all_reduce_small", "reduce_scatter_small", "all_reduce_two_shot")
KERNELS = ("all_gather_small_bytes", *(f"{name}_{kind}" for name in _REDUCTIONS for kind in _KERNEL_TYPES.values()))


class SmallWindow:
    """The window and the counters that all our kernels of one group share; see [Note: rounds].

    Its size is 64 times the messages' over 8 ranks, 32 times over 4: 8 MiB for 256 KiB there.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, max_bytes: int) -> None:
        self.rank, self.num_ranks = dist.get_rank(group), dist.get_world_size(group)
        self.most_units = -(-max_bytes // UNIT_BYTES)
        self.capacity = 2 * self.most_units
        self.rounds = torch.zeros(-(-self.most_units // THREADS), dtype=torch.int32, device=device)
        self._window = Window(group, 2 * self.num_ranks * self.capacity * LINE_BYTES, device)
        # Each kernel once, so that none is loaded inside the capture of a graph, and one that fails does so here.
        scratch = torch.zeros(self.num_ranks * UNIT_BYTES, dtype=torch.uint8, device=device)
        for kernel in KERNELS:
            self.launch(kernel, scratch, scratch, 1)
        torch.cuda.synchronize(device)

    def launch(self, kernel: str, source: Tensor, out: Tensor, units: int) -> None:
        """Run a kernel of `peer.cu` on the current stream; `units` of 8 bytes a rank, as it counts them."""
        assert 0 < units <= self.most_units
        self._window.launch(
            kernel,
            -(-units // THREADS),
            THREADS,
            self._window.own,
            self.rank,
            source.data_ptr(),
            out.data_ptr(),
            units,
            self.capacity,
            self.rounds.data_ptr(),
        )


class OneShot(Path):
    """Our kernels with one trip. Sums are taken in float32 in the order of the ranks: the same bits on all of them."""

    alignment_bytes = UNIT_BYTES

    def __init__(self, window: SmallWindow) -> None:
        self._window, self.num_ranks = window, window.num_ranks
        self.calls: Calls = {
            "all_reduce": self._all_reduce,
            "all_gather": self._all_gather,
            "reduce_scatter": self._reduce_scatter,
        }

    def _fits(self, kind: Kind, dtype: torch.dtype, num_bytes: int) -> bool:
        known = kind == "all_gather" or dtype in _KERNEL_TYPES
        return known and self._has_room(num_bytes, 1 if kind == "all_reduce" else self.num_ranks)

    def _all_reduce(self, out: Tensor, source: Tensor) -> None:
        self._window.launch(f"all_reduce_small_{_KERNEL_TYPES[out.dtype]}", source, out, out.nbytes // UNIT_BYTES)

    def _all_gather(self, out: Tensor, part: Tensor) -> None:
        self._window.launch("all_gather_small_bytes", part, out, part.nbytes // UNIT_BYTES)

    def _reduce_scatter(self, out: Tensor, whole: Tensor) -> None:
        self._window.launch(f"reduce_scatter_small_{_KERNEL_TYPES[out.dtype]}", whole, out, out.nbytes // UNIT_BYTES)

    def _has_room(self, num_bytes: int, num_parts: int) -> bool:
        """Whether a message in so many parts is one of whole units, and not too many."""
        units, rest = divmod(num_bytes, UNIT_BYTES * num_parts)
        return rest == 0 and 0 < units * num_parts <= self._window.most_units


class TwoShot(OneShot):
    """Our all-reduce with two trips; on the window of the others."""

    def __init__(self, window: SmallWindow) -> None:
        super().__init__(window)
        self.calls = {"all_reduce": self._all_reduce}

    def _fits(self, kind: Kind, dtype: torch.dtype, num_bytes: int) -> bool:
        del kind
        return dtype in _KERNEL_TYPES and self._has_room(num_bytes, self.num_ranks)

    def _all_reduce(self, out: Tensor, source: Tensor) -> None:
        units = out.nbytes // UNIT_BYTES // self.num_ranks
        self._window.launch(f"all_reduce_two_shot_{_KERNEL_TYPES[out.dtype]}", source, out, units)
