"""Stand-ins on the CPU for memory that only GPUs have."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.transport.windows import Windows


class Nowhere(Windows):
    """Windows where there are none: what lies in them is treated alike."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, num_bytes: int) -> None:
        del group
        self.memory, self._used_bytes = torch.zeros(num_bytes, dtype=torch.uint8, device=device), 0

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        taken = super().take(numel, dtype)
        assert taken.numel() == numel, "all that is taken was counted beforehand"
        return taken


@contextmanager
def windows_nowhere() -> Iterator[None]:
    """Have windows of parameters and of gradients be `Nowhere`."""
    with (
        mock.patch("collectives.sharded.gather.Windows", Nowhere),
        mock.patch("collectives.sharded.collectives.Windows", Nowhere),
    ):
        yield


class Summed:
    """Copies to peers where there are none: sums in float32, by the backend, when they are asked for."""

    stream = streams = None

    def __init__(self, group: dist.ProcessGroup, _device: torch.device, part_bytes: int, _streams: None) -> None:
        self._group, self._part_bytes, self._open = group, part_bytes, 0

    def close(self) -> None:
        assert not self._open, "all that was sent was added"

    def wait_for_current_stream(self) -> None:
        pass

    def send(self, input_N: Tensor) -> Callable[[Tensor, bool, bool], None]:
        size, rank = dist.get_world_size(self._group), dist.get_rank(self._group)
        assert input_N.nbytes <= size * self._part_bytes
        self._open += 1
        assert self._open <= 2, "there is memory for two"

        def add(output_S: Tensor, mean: bool, adds: bool) -> None:
            wide_N = input_N.float()
            dist.all_reduce(wide_N, group=self._group)
            sum_S = wide_N.view(size, -1)[rank] / (size if mean else 1)
            output_S.add_(sum_S) if adds else output_S.copy_(sum_S)
            self._open -= 1

        return add
