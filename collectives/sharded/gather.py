"""All-gathers of parameters, launched ahead of the computation that waits for them (MegaScale 3.2).

After an optimiser step only a rank's own shards are current. `unshard` starts the gathers of all buckets, in the order
of the buckets on every rank, so that they run under data loading and the forward pass: all of them at once, so that
whoever reads a parameter later waits on this rank alone, or `prefetch` of them ahead of the computation. Where the
optimiser steps inside the backward pass, some buckets are gathered there already (`gather_early`), and `unshard_rest`
starts the others. Not covered: letting go of the parameters after their use (ZeRO stage 3).

[Note: parameters that others write] Where parameters are of another dtype than the masters, the next `unshard` would
overwrite what somebody has written into them (a checkpoint, say). `sync_masters` takes that over into the masters
before an optimiser changes these: it looks at every value of a rank's own shard, for autograd does not count writes by
`.data`.

[Note: parameters that others read] Those of a bucket that is not current are marked (`collectives.sharded.guard`):
whoever reads or writes one, on whatever thread, comes by `before_access`. Only where nothing has been launched since
the shards changed does that drive collectives, which every rank must then do at the same place.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch

from collectives.sharded.bucket import Bucket
from collectives.sharded.guard import mark_current, mark_pending, watch_access
from collectives.transport.communicator import Communicator, Work
from collectives.transport.current_stream import current_stream


class ParameterGather:
    """Publishes the shards of every bucket and waits for each where it is used.

    Args:
        buckets: in order of first use.
        comm: which nothing else uses but calls from the same place in every rank's program.
        prefetch: all-gathers launched ahead of the one that is waited for; None: all.
        overlap: False: each is waited for at once, all of them in `unshard`.
        start_step: unshards shards that have changed, where somebody reads a parameter before that; None: `unshard`.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        comm: Communicator,
        prefetch: int | None,
        overlap: bool,
        start_step: Callable[[], None] | None = None,
    ) -> None:
        self.buckets, self.comm, self.prefetch, self.overlap = buckets, comm, prefetch, overlap
        self._start_step = start_step or self.unshard
        self._needs_unshard = self._changed_unseen = False
        self.compares_each_step = True
        """Whether each step looks for what was written through `.data` (a pass over every shard)."""
        # Any thread may read a parameter; re-entrant, for such a read may begin a step, which waits for buckets itself.
        self._lock = threading.RLock()
        self._home: torch.cuda.Stream | None = None
        """The stream that the last `unshard` stood in, which the optimiser and the forward pass run in."""
        self._to_launch: deque[int] = deque()
        self._early: set[int] = set()
        """Buckets that this backward pass has gathered already."""
        self._stepped: set[int] = set()
        """Buckets that this backward pass has stepped already: of the next step is at least their own slice."""
        self._works: dict[int, Work] = {}
        self._after: dict[int, torch.cuda.Event] = {}
        """From where on a bucket's gather may start."""
        self._in_place: set[int] = set()
        """Buckets whose own slice holds the stepped shard already."""
        self._versions = [bucket.master_S._version for bucket in buckets]
        self._writes = [bucket.num_writes for bucket in buckets]
        """By bucket, of its parameters: those that are known here."""
        for index, bucket in enumerate(buckets):
            watch_access(bucket.parameters, self, index)

    @property
    def needs_unshard(self) -> bool:
        """Whether an optimiser may have changed the shards since their gathers were launched."""
        return self._needs_unshard

    @needs_unshard.setter
    def needs_unshard(self, value: bool) -> None:
        self._needs_unshard = value
        if value:
            # From here on a read drives the gathers: see [Note: parameters that others read].
            for bucket in self.buckets:
                mark_pending(bucket.parameters)
        else:
            self._changed_unseen = False

    def note_changed_unseen(self) -> None:
        """Note that the shards have changed where their versions do not show it."""
        self.needs_unshard = self._changed_unseen = True

    @property
    def shards_have_changed(self) -> bool:
        """Whether some shard is another than its bucket's parameters hold, or than they will when they are gathered."""
        return self._changed_unseen or any(
            bucket.master_S._version != version for bucket, version in zip(self.buckets, self._versions, strict=True)
        )

    def before_access(self, index: int) -> None:
        """Make bucket `index` current, since somebody reads or writes its parameters: see the note above.

        Raises:
            RuntimeError: in a backward pass that has stepped it already.
        """
        with self._lock:
            if (
                self.needs_unshard and self.shards_have_changed
            ):  # else gradients are finished, and nobody has stepped yet
                self._start_step()
            self.wait_for((index,))

    @property
    def is_unsharded(self) -> bool:
        """Whether every parameter is current and waited for."""
        return not self.needs_unshard and not self._works and not self._to_launch and not self._stepped

    def unshard(self) -> None:
        """Start the gathers of all buckets, if the shards have changed; the first `prefetch` are launched now."""
        if not self.needs_unshard:
            return
        # First of all: the gathers below would overwrite what somebody has written, and nobody would notice.
        self._refuse_writes(range(len(self.buckets)))
        # Gathers of the last unshard still write into the buffers that these take.
        self.wait_all()
        # Gathers start from here, whenever they are launched: not behind the computation queued up by then.
        now = self.comm.mark()
        self._home = None if now is None or self.comm.is_capturing else current_stream(self.comm.device)
        self._after = {} if now is None else dict.fromkeys(range(len(self.buckets)), now)
        self.needs_unshard = False
        self._start(range(len(self.buckets)))

    def stepping(self, index: int) -> None:
        """Mark a bucket that is stepped inside the backward pass: nothing else of the pass may read its parameters."""
        self._stepped.add(index)
        self._changing((index,))

    def gather_early(self, index: int, after: torch.cuda.Event | None) -> None:
        """Launch one bucket's gather inside the backward pass: its slice is stepped, its parameters are done with.

        Args:
            index: of the bucket; all ranks call this at the same place between their collectives.
            after: the point from which its own slice is current; None on the CPU, where it is.
        """
        if after is not None:
            self._after[index] = after
        self._early.add(index)
        # `BackwardStep` has unsharded the shard itself, after its update.
        self._in_place.add(index)
        self._launch(index)

    def unshard_rest(self, after: dict[int, torch.cuda.Event]) -> None:
        """Start, after the backward pass, the gathers of the buckets that `gather_early` did not.

        Args:
            after: the points from which own slices are current, as in `gather_early`.
        """
        rest = [index for index in range(len(self.buckets)) if index not in self._early]
        self._stepped.clear()
        # Waited for during the pass already, but left marked then, for its parameters may not be read in it.
        for index in self._early - self._works.keys():
            mark_current(self.buckets[index].parameters)
        self._early.clear()
        self._after.update(after)
        self._in_place.update(rest)
        self._start(rest)

    def wait_for(self, indices: Iterable[int]) -> None:
        """Make these buckets' parameters ready to be read, and launch the gathers of `prefetch` more."""
        for index in indices:
            if index in self._stepped:
                raise RuntimeError(
                    f"parameters of bucket {index} ({self.buckets[index].plan.slots[0].name}, ...) are read in a "
                    "backward pass that has stepped them already: build the optimiser without step_in_backward"
                )
            with self._lock:
                # Before the wait, so that the next gathers are on their way while this one is waited for.
                self._launch_until(index + 1 + self._depth)
                work = self._works.get(index)
                if work is not None:
                    work.wait()
                    self._note_current(index)

    def _note_current(self, index: int) -> None:
        """Note that the current stream has waited for this bucket; the computing stream waits too, if it is another."""
        if self._home is not None and not self.comm.is_capturing:
            here = current_stream(self.comm.device)
            if here != self._home:
                self._home.wait_stream(here)
        del self._works[index]
        # A bucket whose shard has changed again stays marked: its parameters are outdated.
        if not self.needs_unshard and index not in self._stepped:
            mark_current(self.buckets[index].parameters)

    @property
    def _depth(self) -> int:
        return len(self.buckets) if self.prefetch is None else self.prefetch

    def launch_all(self) -> None:
        """Launch what is left, so that every rank has launched the same, whatever its forward pass has used."""
        self._launch_until(len(self.buckets))

    def wait_all(self) -> None:
        """Make every parameter ready to be read, with the values of the last `unshard`."""
        self.wait_for(range(len(self.buckets)))

    def check_unchanged(self) -> None:
        """Raise RuntimeError if shards were changed that nothing will unshard."""
        if self.needs_unshard:
            return
        waiting = set(self._to_launch)
        for index, (bucket, version) in enumerate(zip(self.buckets, self._versions, strict=True)):
            # What is still to be launched takes such a change along.
            if index not in waiting and bucket.master_S._version != version:
                raise RuntimeError(
                    f"shards of bucket {index} ({bucket.plan.slots[0].name}, ...) were changed after they "
                    "were gathered; the order is backward, finish_gradients(), optimiser step, start_step() or forward"
                )

    def sync_masters(self, unseen: bool = False) -> None:
        """Copy what others have written into parameters to the masters; see the note above.

        Args:
            unseen: look at every value, for what was written through `.data` too.

        Raises:
            RuntimeError: something was written while the gather that overwrites it was under way.
        """
        # The masters are ahead of the parameters: to take these over would undo the step.
        if self.needs_unshard and self.shards_have_changed:
            return
        written = [index for index in range(len(self.buckets)) if self._is_written(index)]
        self._refuse_writes(index for index in written if index in self._works or index in self._to_launch)
        for index in range(len(self.buckets)) if unseen else written:
            bucket = self.buckets[index]
            if index not in self._works and index not in self._to_launch:
                bucket.sync_masters()
                # The adoption has raised the version itself, and leaves nothing to unshard.
                self._versions[index], self._writes[index] = bucket.master_S._version, bucket.num_writes

    def note_changed(self) -> None:
        """Note that shards and full parameters were changed alike on every rank: there is nothing to unshard."""
        self.needs_unshard = False
        for bucket in self.buckets:
            mark_current(bucket.parameters)
        self._versions = [bucket.master_S._version for bucket in self.buckets]
        self._writes = [bucket.num_writes for bucket in self.buckets]

    def note_masters_loaded(self, differ: bool) -> None:
        """Note that masters were loaded, and parameters with the same values, unless they `differ` on any rank."""
        self.note_changed()
        if differ:
            self.note_changed_unseen()

    def _is_written(self, index: int) -> bool:
        return self._writes[index] != self.buckets[index].num_writes

    def _refuse_writes(self, indices: Iterable[int]) -> None:
        for index in indices:
            if self._is_written(index):
                raise RuntimeError(
                    f"parameters of bucket {index} ({self.buckets[index].plan.slots[0].name}, ...) were written in "
                    "place between a step and the gather that unshards it, which overwrites them: call "
                    "wait_parameters() before writing, on every rank"
                )

    def _start(self, indices: Sequence[int]) -> None:
        self._to_launch.extend(indices)
        self._changing(indices)
        self._launch_until(self._depth if self.overlap else len(self.buckets))
        # Nothing asks before those are read: see `collectives.sharded.guard`, [Note: aliases].
        self.wait_for(index for index, bucket in enumerate(self.buckets) if bucket.has_aliases())

    def _changing(self, indices: Sequence[int]) -> None:
        # The gathers overwrite what a graph that is kept for another backward has saved: autograd shall notice.
        parameters = [parameter for index in indices for parameter in self.buckets[index].parameters]
        mark_pending(parameters)
        torch.autograd.graph.increment_version(parameters)
        for index in indices:
            # The versions raised just above are no writes of the user's.
            self._writes[index] += len(self.buckets[index].parameters)

    def _launch_until(self, end: int) -> None:
        while self._to_launch and self._to_launch[0] < end:
            self._launch(self._to_launch.popleft())

    def _launch(self, index: int) -> None:
        """Launch the all-gather of one bucket; without overlap, wait for it."""
        bucket = self.buckets[index]
        prepare = None if index in self._in_place else bucket.copy_in_shard
        work = self.comm.all_gather(bucket.unsharded_N, prepare, self._after.pop(index, None))
        self._in_place.discard(index)
        # The version that travels: a later one was changed too late, see `check_unchanged`.
        self._versions[index] = bucket.master_S._version
        self._works[index] = work
        if not self.overlap:
            work.wait()
            self._note_current(index)
