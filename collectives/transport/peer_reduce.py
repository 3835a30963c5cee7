"""Reduce-scatters of gradients that hold no multiprocessor while they travel: copy engines carry them, a kernel adds.

A matmul has one block on each multiprocessor, in clusters of two on neighbours, and as many waves of these as
its tiles need: where a collective holds but one multiprocessor, a wave is added. On two H200 NCCL's reduce-scatter had
9 of 132 for 3.4 ms of each layer's backward pass, and concurrent products took 16% longer, as on 114; a kernel that
waited for the peer on a single one cost 4 to 13%.

So the parts are copied into the peers' memory (`collectives.transport.symmetric`), and added between two products, on
the whole GPU at once. Little waits for a peer there either: the sum of one bucket is launched after the sends of the
next, by when its parts have come if the ranks are in step (`Work.launch_rest`). Sums are of float32, in the order of
the ranks, whatever travels.

Not covered: groups on several hosts (`symmetric.why_unusable` says what is missing).

Shapes: N elements of a padded bucket, W ranks, S = N / W.
"""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.transport.symmetric import PeerRounds, Streams
from netlayer.workload.buckets import COPIES_AT_ONCE

# Those for which peer.cu has a reduce_wide kernel; `prepare` refuses gradients that travel in another.
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class PeerReduce:
    """Sends parts of gradients to the peers, and adds what they have sent.

    Every rank makes it with the same size, and sends the same in the same order.

    Args:
        group: of 2 to 8 ranks on one host.
        device: of this rank, and this process' current one.
        part_bytes: most that one rank sends to another at a time.
        streams: of another one, to be shared (`collectives.transport.communicator`, [Note: streams are few]); None: of
            its own.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, part_bytes: int, streams: Streams | None = None
    ) -> None:
        first = PeerRounds(group, part_bytes, device, streams)
        self.streams = first.streams
        # A window for each bucket under way; one pair of streams for all: torch has few, and sends keep their order.
        others = (PeerRounds(group, part_bytes, device, self.streams) for _ in range(COPIES_AT_ONCE - 1))
        self._turns = deque([first, *others])

    @property
    def stream(self) -> torch.cuda.Stream:
        """Carries what is sent."""
        # Any of them will do, here and in `wait_for_current_stream`: the streams are shared.
        return self._turns[0].copy_stream

    def close(self) -> None:
        """Free the memory, once the device has come here. Every rank does so at the same point; twice does no harm."""
        for rounds in self._turns:
            rounds.close()

    def wait_for_current_stream(self) -> None:
        """Make the next sends wait for the work that the current stream has by now."""
        self._turns[0].wait_for_current_stream()

    def send(self, input_N: Tensor) -> Callable[[Tensor, bool, bool], None]:
        """Send slice r of `input_N` to rank r, after `wait_for_current_stream`; leave `input_N` alone until it is
        added.

        Args:
            input_N: bfloat16, float16 or float32; S elements are a multiple of 16 bytes.

        Returns:
            What adds, on the current stream, to be called before the next but one is sent: with `output_S` (float32)
            for the sum, and whether to store the mean over the ranks.
        """
        rounds = self._turns[0]
        # The next bucket goes through the other window: the sum of this one still reads what the peers write here.
        self._turns.rotate(1)
        parts_WS = input_N.view(rounds.num_ranks, -1)
        rounds.begin()
        # From the next rank on, and not from rank 0: else all would write to one GPU at a time.
        # The own part does not travel: `_add` reads it from `input_N`.
        for ahead in range(1, rounds.num_ranks):
            rounds.send(parts_WS[(rounds.rank + ahead) % rounds.num_ranks], ahead)
        return functools.partial(_add, rounds, parts_WS[rounds.rank])


def _add(rounds: PeerRounds, shard_S: Tensor, output_S: Tensor, mean: bool, adds: bool = False) -> None:
    # All peers in one kernel, after this rank's own last send: see `symmetric`, [Note: deadlock].
    rounds.wait(1, rounds.num_ranks - 1)
    rounds.reduce_wide(shard_S, output_S, mean, adds)
    rounds.finish()
