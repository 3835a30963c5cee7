"""Base of communicators and links: on CUDA a stream of their own, and the recorder and watch that observe them.

[Note: streams are few] torch hands out streams from a pool of 32 a priority, round robin: the 33rd is the first again,
and NCCL's process groups draw from the same pools. Where a receive that spins and what its peer waits for lie on one
stream, a pipeline stands still. So a stream is opened when it is first needed, shared where the order of launches
allows it, and not opened where nothing travels.

The recorder times collectives, the watch counts them. Neither hears of a CUDA graph's capture: nothing runs then, and
its events cannot be asked. Not covered: launching anything (`collectives.transport.communicator`,
`collectives.pipeline.link`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from collectives.arguments import as_device
from collectives.watch.recorder import Collective, Recorder
from collectives.watch.track import Operation, Track


class CommContext:
    """A stream that carries collectives, and their recorder and track.

    Args:
        device: of every tensor.
        recorder: notes each collective.
        track: of the watch, which says who is late where a collective does not complete.
        stream: which they run on; None: on the CPU, or where nothing travels.

    `muted` (for measurements) omits every collective and does all else: what is computed is then wrong, but takes
    the time that a step with its communication removed takes.
    """

    # Of the class, so that whoever measures mutes one object alone and no constructor has to pass it on.
    muted = False

    def __init__(
        self,
        device: torch.device | str,
        recorder: Recorder | None,
        track: Track | None,
        stream: torch.cuda.Stream | None,
    ) -> None:
        self.device, self.recorder, self.track, self.stream = as_device(device), recorder, track, stream

    @property
    def is_capturing(self) -> bool:
        """Whether a CUDA graph is captured now."""
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def recording(
        self, group: str, kind: str, num_bytes: int, **more: Any
    ) -> AbstractContextManager[Collective | None]:
        """Record the call in the block, which launches a collective; arguments as in `Recorder.launching`."""
        # An event that a graph captures has no time that could be read.
        if self.recorder is None or self.is_capturing:
            return nullcontext()
        return self.recorder.launching(group, kind, num_bytes, **more)

    def waiting(self, collective: Collective | None) -> AbstractContextManager[None]:
        """Record the wait in the block, of the computation for a collective; None: it was not recorded.

        Raises:
            CollectiveFailed: a collective is overdue.
        """
        # Here too, and not by the watch's thread alone: only this thread can raise where the user sees it.
        if self.track is not None:
            self.track.watch.check()
        if self.recorder is None or collective is None or self.is_capturing:
            return nullcontext()
        return self.recorder.waiting(collective)

    def counted(self, kind: str, num_bytes: int, detail: str = "") -> Operation | None:
        """The collective that is launched next, for the watch; arguments and errors as in `Track.launch`."""
        # A replayed graph's collectives are in no order that the other ranks' counts could be compared with.
        if self.track is None or self.muted or self.is_capturing:
            return None
        return self.track.launch(kind, num_bytes, detail)


def new_stream(device: torch.device, priority: int = -1) -> torch.cuda.Stream | None:
    """Return a stream for transfers and what they wait for; None on the CPU. See [Note: streams are few].

    The GPU shall prefer the few blocks of a transfer to the many of a matmul that they compete with.

    Args:
        priority: 0 for what follows a transfer, and competes with the computation as its equal.
    """
    if device.type != "cuda":
        return None
    return torch.cuda.Stream(device, priority=priority)  # type: ignore[no-untyped-call]
