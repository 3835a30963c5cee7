"""Exchange of keys and values among context-parallel ranks, and of their gradients, under the computation.

Each rank has some positions of every sequence (`netlayer.layout.context_chunks`). Keys and values travel together in
one all-gather, their gradients in one reduce-scatter, on a communicator and a stream of their own: the attention among
a rank's own positions runs meanwhile. All ranks of the group call the same methods in the same order. Not covered: a
ring, which holds one rank's keys at a time and not those of all.

Shapes: W ranks of the group, t positions of a rank, B sequences, G heads, K values a head.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.transport.communicator import Communicator, Work
from collectives.watch.recorder import Recorder
from collectives.watch.watchdog import Watch

GROUP = "cp"


@dataclass(frozen=True)
class Gathered:
    """Keys and values on their way from all ranks.

    Args:
        work: of the all-gather; wait for it before other ranks' parts are read.
        whole: those of rank r are `whole[r, 0]` and `whole[r, 1]`, [W, 2, t, B, G, K].
    """

    work: Work
    whole: Tensor

    def wait(self) -> Tensor:
        """Have the computation wait for all ranks' parts, and return them."""
        self.work.wait()
        return self.whole


@dataclass(frozen=True)
class Scattered:
    """Gradients of this rank's keys and values on their way, as sums over all ranks, [2, t, B, G, K]."""

    work: Work
    own: Tensor

    def wait(self) -> Tensor:
        """Have the computation wait for the sums, and return them."""
        self.work.wait()
        return self.own


class ContextExchange:
    """The exchange of one context-parallel group.

    Args:
        group: of the ranks that have the parts of the same sequences, in the order of their chunks.
        device: of every tensor.
        recorder: notes every collective.
        watch: says who is late.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        recorder: Recorder | None = None,
        watch: Watch | None = None,
    ) -> None:
        self._comm = Communicator(GROUP, group, device, recorder, watch)
        self.rank, self.world_size = self._comm.rank, self._comm.world_size

    def gather(self, k_tBGK: Tensor, v_tBGK: Tensor) -> Gathered:
        """Start to gather every rank's keys and values; leave the result alone until its `wait`."""
        whole = k_tBGK.new_empty(self.world_size, 2, *k_tBGK.shape)
        whole[self.rank, 0].copy_(k_tBGK)
        whole[self.rank, 1].copy_(v_tBGK)
        return Gathered(self._comm.all_gather(whole.view(-1)), whole)

    def scatter(self, partial_W2tBGK: Tensor) -> Scattered:
        """Start to add up the ranks' gradients of all keys and values (contiguous); this rank gets those of its own."""
        own = torch.empty_like(partial_W2tBGK[0])
        return Scattered(self._comm.reduce_scatter(own.view(-1), partial_W2tBGK.view(-1)), own)
