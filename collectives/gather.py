"""All-gathers of parameters, launched ahead of the computation that waits for them (MegaScale 3.2).

After an optimiser step only a rank's own shards are current. `publish` starts the gathers of all buckets, in the order
of the buckets on every rank, `prefetch` of them ahead of the computation; the first ones so run under data loading.
Left out: letting go of the parameters after their use (ZeRO stage 3).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from collectives.bucket import Bucket
from collectives.lane import Flight, Lane


class ParameterGather:
    """Publishes the shards of every bucket and waits for each where it is used.

    Args:
        buckets: in order of first use.
        lane: which nothing else uses but calls from the same place in every rank's program.
        prefetch: all-gathers launched ahead of the one that is waited for.
        overlap: False: each is waited for at once, all of them in `publish`.
    """

    def __init__(self, buckets: Sequence[Bucket], lane: Lane, prefetch: int, overlap: bool) -> None:
        self.buckets, self.lane, self.prefetch, self.overlap = buckets, lane, prefetch, overlap
        self.stale = False
        """Whether an optimiser may have changed the shards since they were published."""
        self._num_launched = len(buckets)
        self._flights: dict[int, Flight] = {}
        self._published: torch.cuda.Event | None = None
        self._versions = [bucket.master_S._version for bucket in buckets]

    @property
    def settled(self) -> bool:
        """Whether every parameter is current and waited for."""
        return not self.stale and not self._flights and self._num_launched == len(self.buckets)

    def publish(self) -> None:
        """Start the gathers of all buckets, if the shards have changed; the first `prefetch` are launched now."""
        if not self.stale:
            return
        self.wait_all()
        # The gathers overwrite what a graph that is kept for another backward has saved: autograd shall notice.
        torch.autograd.graph.increment_version([p for bucket in self.buckets for p in bucket.parameters])
        self.stale, self._num_launched = False, 0
        # Gathers start from here, whenever they are launched: not behind the computation queued up by then.
        self._published = self.lane.mark()
        self._launch_until(self.prefetch if self.overlap else len(self.buckets))

    def wait_for(self, indices: Iterable[int]) -> None:
        """Have these buckets' parameters ready to be read, and `prefetch` more on their way."""
        for index in indices:
            self._launch_until(index + 1 + self.prefetch)
            flight = self._flights.pop(index, None)
            if flight is not None:
                flight.wait()

    def launch_all(self) -> None:
        """Launch what is left, so that every rank has launched the same, whatever its forward pass has used."""
        self._launch_until(len(self.buckets))

    def wait_all(self) -> None:
        """Have every parameter ready to be read, as of the last `publish`."""
        self.wait_for(range(len(self.buckets)))

    def check_unchanged(self) -> None:
        """Raise RuntimeError if shards were changed that nothing will publish."""
        if self.stale:
            return
        for bucket, version in zip(self.buckets[: self._num_launched], self._versions, strict=False):
            if bucket.master_S._version != version:
                raise RuntimeError(
                    f"shards of bucket {bucket.plan.index} ({bucket.plan.slots[0].name}, ...) were changed after they "
                    "were published; the order is backward, finish_gradients(), optimiser step, start_step() or forward"
                )

    def note_changed(self) -> None:
        """Shards and full parameters were both changed alike on every rank: there is nothing to publish."""
        self.stale = False
        self._versions = [bucket.master_S._version for bucket in self.buckets]

    def _launch_until(self, end: int) -> None:
        while self._num_launched < min(end, len(self.buckets)):
            bucket = self.buckets[self._num_launched]
            flight = self.lane.all_gather(bucket.full_N, bucket.publish, self._published)
            self._versions[self._num_launched] = bucket.master_S._version
            self._flights[self._num_launched] = flight
            self._num_launched += 1
            if not self.overlap:
                flight.wait()
