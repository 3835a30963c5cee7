"""Control group of a bench's ranks: they meet and agree on figures on CPUs, apart from what is measured."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from netlayer.launch.rank import RankEnv
from netlayer.store.meeting import register_schemes

_LEAST_MEETING_S = 60  # a peer may still be importing torch
_START_AHEAD_S = 500e-6  # ranks leave an all-reduce of sockets at most so far apart
_CLOCKS_APART_S = 5.0


class Control:
    """A process group on gloo, as the driver uses it; its calls fail where a peer is silent for `timeout`."""

    def __init__(self, env: RankEnv, timeout: timedelta | None) -> None:
        self.rank, self.ranks = env.rank, env.world_size
        self._one_host = env.local_world_size == env.world_size
        self._group = dist.new_group(backend="gloo", timeout=timeout)

    def barrier(self) -> None:
        """Wait for all ranks."""
        dist.barrier(self._group)

    def start_together(self) -> None:
        """Return on all ranks of one host at the same moment, within about a microsecond; on several hosts at once.

        Ranks leave a barrier of sockets, or a wait for their GPUs, up to 100 µs apart: a third of the time of 20 small
        calls.
        """
        if not self._one_host:
            return
        # The monotonic clock is the host's, so the ranks agree on a point of it that lies ahead of all of them.
        now_s = time.monotonic()
        latest = torch.tensor([now_s, -now_s], dtype=torch.float64)
        dist.all_reduce(latest, dist.ReduceOp.MAX, group=self._group)
        newest_s, oldest_s = float(latest[0]), -float(latest[1])
        if newest_s - oldest_s > _CLOCKS_APART_S:  # containers with time namespaces of their own
            return
        while time.monotonic() < newest_s + _START_AHEAD_S:
            pass

    def sum(self, value: int) -> int:
        """The sum over ranks."""
        tensor = torch.tensor(value)
        dist.all_reduce(tensor, group=self._group)
        return int(tensor)

    def least(self, value: int) -> int:
        """The least of all ranks."""
        tensor = torch.tensor(value)
        dist.all_reduce(tensor, dist.ReduceOp.MIN, group=self._group)
        return int(tensor)

    def average(self, values: Sequence[float], average: int) -> list[float]:
        """Combine each value over ranks by nccl-tests' `-a`: 0 rank 0's, 1 the mean, 2 the least, 3 the greatest."""
        tensor = torch.tensor(values, dtype=torch.float64)
        if average == 0:
            dist.broadcast(tensor, 0, group=self._group)
        elif average == 1:
            dist.all_reduce(tensor, group=self._group)
            tensor /= self.ranks
        else:
            dist.all_reduce(tensor, dist.ReduceOp.MIN if average == 2 else dist.ReduceOp.MAX, group=self._group)
        return [float(value) for value in tensor]

    def gather(self, value: object) -> list[Any]:
        """One small object of each rank, in rank order, on all ranks."""
        values: list[Any] = [None] * self.ranks
        dist.all_gather_object(values, value, group=self._group)
        return values


@contextmanager
def meet(env: RankEnv, url: str, timeout: timedelta | None) -> Iterator[Control]:
    """The default process group of all ranks, and what they agree by.

    Args:
        url: an init_method of torch.distributed; `redis://` and `unix://` are netlayer's.
        timeout: how long a rank waits for its peers; None leaves it to torch.
    """
    register_schemes(url)
    patience = None if timeout is None else max(timeout, timedelta(seconds=_LEAST_MEETING_S))
    dist.init_process_group("gloo", init_method=url, rank=env.rank, world_size=env.world_size, timeout=patience)
    yield Control(env, timeout)
    # After an error the process ends: to leave the group in order would mean to wait for peers that may hang.
    dist.destroy_process_group()
