"""The stream that is current, at a price that can be paid thousands of times a step.

A tensor-parallel step asks for it some 5,000 times; torch makes an object of it each time, behind several checks of the
device: an eighth of what the host then did (rank 0 of two H200, 125M, under cProfile). Not covered: new streams
(`collectives.transport.communicator`).
"""

from __future__ import annotations

import torch

_STREAMS: dict[tuple[int, int, int], torch.cuda.Stream] = {}
"""By what torch knows them by: its pools hand out the same ones again and again."""


def current_stream(device: torch.device | None = None) -> torch.cuda.Stream:
    """Return what `torch.cuda.current_stream` does, but the same object each time.

    Args:
        device: None, or without an index: the current one.
    """
    index = None if device is None else device.index
    key = torch._C._cuda_getCurrentStream(torch.cuda.current_device() if index is None else index)
    stream = _STREAMS.get(key)
    if stream is None:
        stream = _STREAMS[key] = torch.cuda.current_stream(device)
    return stream
