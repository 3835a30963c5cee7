"""Gathers of parameters that are freed after their use: ZeRO stage 3, FSDP2's `reshard_after_forward`.

When a unit is done with its parameters is for `collectives.sharded.wrapped` to say ([Note: what reshards]); here, what
is gathered and freed then.

[Note: buckets that reshard] Some buckets are freed after their use, and gathered again before the next one: once a
forward pass, once a backward pass. Each pass gathers what is freed in one order on every rank, forwards from the first
bucket and backwards from the last, `prefetch` ahead of the computation, into memory that is allocated at the launch; so
such a gather follows all that is queued by then, which may still read what lay there. What a pass did not use on this
rank is gathered at its end, for the other ranks' sake, and freed at once. A bucket that is used again in one pass after
it was freed is gathered once more, where the program does so on every rank. Buckets that stay are gathered first.

[Note: views] A program may hold a tensor over a bucket's memory (`.data`, `.detach()`, a value of a state_dict), and so
may one rank alone. Whether one lives is known on its own rank only, so it decides nothing that ranks do together: the
bucket counts as freed and is gathered as on the other ranks, but its memory stays under the view, and the next gather
lands there. It goes with the pass or the step that finds the view gone. What was read while gradients are recorded, or
in a forward pass that records them, stays likewise until the shards change: the backward pass may read it without a
hook before. Not covered: a view that is made inside the forward pass of the unit itself, whose parameters need no
gather then: autograd saves such views too, and nothing tells them apart.

[Note: units that a pass does not use] Ranks may use different units of the module, in any order: each gathers the
others at the end of its pass, and reduces zeros for them. Not covered, for each rank then waits for the other until
their timeout: a unit that one rank does not use, where another uses that and, further on in its backward pass, more
units than reductions may be in flight (without overlap: any such unit), for a rank reduces buckets in their order and
waits for room meanwhile: `Overlap(in_flight=number of units)` makes room for all, at the memory of their gradients; and
a backward pass through no unit at all, but through parts outside the units, beside one through some.

[Note: what a pass that raised has not read] Nor does what was read past the hooks decide about collectives, for a rank
whose pass has raised may lack reads of the others. So after each step all ranks launch an all-reduce of one byte a
bucket that reshards: whether this rank holds a view of it. What any rank holds they gather together, for the view to
show the new values. On CUDA the host waits for the answer only where it may tell of a view: on ranks that have read
something themselves since nobody held a view, or that have taken part in a pass of the others without its computation.
Any other rank has read what all have read: nothing. Gradients of what is read before the units run come last of all; so
a rank that takes part without its computation then waits for no reduction while gathers are to be launched. Not
covered: a read that gathers a bucket anew in the pass that raised (after its unit, say), which the rank that raised
does not take part in; and such late gradients of more buckets than are in flight, where it has never read so itself.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from collectives.sharded.gather import ParameterGather, mark_pending
from collectives.transport.communicator import Work


class ReshardingGather(ParameterGather):
    """Publishes shards as a `ParameterGather` does, and frees what it has gathered; `prefetch` None: one."""

    def _prepare(self) -> None:
        """Set what it knows of passes, reads and views."""
        # All that stays first: a pass waits for it before it calls a unit.
        order = sorted(range(len(self.buckets)), key=lambda index: (index in self.reshards, index))
        self._position = {index: position for position, index in enumerate(order)}
        """Of a bucket in the order of a forward pass's gathers."""
        self._kept: set[int] = set()
        """Buckets that stay until the shards change: others than their units use them, and their backward passes begin
        without a hook here."""
        self._known_kept: set[int] = set()
        """All that were kept in some pass: of one that raised here, the others keep them."""
        self.unit_of: Mapping[int, int] = {}
        """Number of the unit that a bucket which reshards is of."""
        self.last_unit: frozenset[int] = frozenset()
        """Buckets that stay between a forward pass and its backward pass."""
        # Of this rank alone, for the others may lack the reads of a pass that has raised there: these decide about its
        # own memory and when it waits, and about nothing that ranks do together.
        self._read: set[int] = set()
        """Buckets that somebody has read or written past the hooks since they were freed."""
        self._handed_out: set[int] = set()
        """Buckets that were so, and of which some rank may still hold a view."""
        self._lacks_reads = False
        """Whether the other ranks may have read what this one has not: a pass has raised since the shards changed."""
        self._needed: set[int] = set()
        """Buckets that a backward pass may read without a hook before: their memory stays until the shards change."""
        self.gradients_come_late = False
        """Whether gradients may be complete only after later gathers: a bucket was needed, or not used by a pass."""
        self._exchange: tuple[Work, Tensor, Tensor] | None = None
        """The last exchange of views, and what is read until it has landed."""
        self._direction = 1
        """In which the pass goes through the buckets: 1 forwards, -1 backwards."""
        self._in_forward = self._with_gradients = False
        self._num_forwards = 0
        """Passes that no backward pass has followed yet."""
        self._staying: frozenset[int] = frozenset()
        """`last_unit` in a forward pass with gradients."""

    @property
    def _depth(self) -> int:
        # Each of these holds a bucket's memory: one ahead is under way while its predecessor is computed with.
        return (self.prefetch or 1) if self.overlap else 0

    def _note_read(self, index: int) -> None:
        if index in self.reshards and index not in self._float8:
            self._read.add(index)
            self._handed_out.add(index)
            # Read without gradients in a pass that records them, it is current, and read again unnoticed.
            if torch.is_grad_enabled() or (self._in_forward and self._with_gradients):
                self._needed.add(index)
                self.gradients_come_late = True

    def wait_all(self) -> None:
        """Make every parameter ready to be read, with the values of the last `unshard`."""
        # Whoever asks may make tensors of these parameters, and no hook sees that.
        self._read |= self.reshards
        self._handed_out |= self.reshards - self._float8.keys()
        super().wait_all()

    def _start(self, indices: Sequence[int]) -> None:
        self._changing(indices)
        viewed = self._share_views()
        for index in viewed:
            # One at a time, and freed at once where nobody holds it: all of them together may not fit.
            self._launch(index)
            self.wait_for((index,))
            self.free((index,))
        # The next pass gathers these again, as all that is freed.
        self._to_launch = deque(sorted(set(indices).difference(viewed), key=self._position.__getitem__))
        # All that stays is launched by every rank now: so whoever holds a view of it only waits.
        while self._to_launch and self._to_launch[0] not in self.reshards:
            self._launch(self._to_launch.popleft())
        self._launch_up_to(-1)
        for index in set(indices).difference(self.reshards):
            if self.buckets[index].has_aliases():
                self._wait_launched(index)

    @property
    def _may_be_viewed(self) -> bool:
        """Whether some rank may hold a view, as far as this one can tell: the second note above."""
        return bool(self._handed_out) or self._lacks_reads or self._in_forward

    def _share_views(self) -> list[int]:
        """Return the freed buckets that a program on any rank holds a view of, in one order: [Note: views].

        Empty where no rank can hold one.
        """
        # A capture cannot wait for an answer: what is held then shows the new values after the next pass.
        if self.comm.is_capturing:
            return []
        order, viewed = sorted(self.reshards), self._viewed
        if self.comm.world_size > 1 and not self.comm.muted:
            if self._exchange is not None:
                self._exchange[0].wait()  # it has landed long ago
            on_cuda = self.comm.device.type == "cuda"
            # Pinned: a copy from other memory would make the host wait for what the device has to do by now.
            own = torch.tensor(
                [index in viewed for index in order], dtype=torch.uint8, device="cpu", pin_memory=on_cuda
            )
            shared = own.to(self.comm.device, non_blocking=True) if on_cuda else own
            # In each step, also of a program that never reads so. To leave it out all ranks would have to know that
            # none has read: a rank whose pass has raised does not, and may be alone in that. What else travels each
            # step would tell it too late (a rank may read until here), or the host would have to wait for that.
            # Launched by every rank, and waited for by those that cannot tell; on the CPU nothing comes by itself.
            work = self.comm.start_all_reduce(shared, torch.distributed.ReduceOp.MAX, is_recorded=False)
            self._exchange = work, shared, own
            viewed = set()
            if self._may_be_viewed or not on_cuda:
                work.wait()
                viewed = {index for index, is_viewed in zip(order, shared.tolist(), strict=True) if is_viewed}
                self._exchange = None
        self._handed_out, self._lacks_reads = set(viewed), False
        return sorted(viewed)

    def _launch_up_to(self, index: int) -> None:
        # Buckets that stay are never queued in a backward pass: launching up to one would gather every unit at once.
        if self._direction > 0 or index in self.reshards:
            position = -1 if index < 0 else self._position[index]
            while self._to_launch and self._direction * (self._position[self._to_launch[0]] - position) <= self._depth:
                self._launch(self._to_launch.popleft())
        if index in self._freed:  # used again, or past the passes
            self._launch(index)

    def _launch(self, index: int, waits: bool = True) -> None:
        if index in self.reshards:
            # The computation so far may still read what lay in this memory.
            self._after.pop(index, None)
        if index in self._freed:
            if index in self._viewed:
                self._take_over(index)
            self.buckets[index].allocate()
            self._freed.discard(index)
        # What is gathered on the way to another bucket stays marked, as with overlap: a read of it has to be noted.
        super()._launch(index, waits and index not in self.reshards)
        if waits and not self.overlap and index in self._works:
            self._works[index].wait()
            self._wait_at_home()

    def launch_all(self) -> None:
        if self._direction > 0:
            self._launch_rest()
            self._lacks_reads |= self._in_forward  # it has not come to its end
            self._in_forward = False

    def end_forward(self) -> None:
        # Inside a backward pass it is a recomputation, whose parameters are of use still.
        if self._direction > 0 and self._in_forward:
            self._in_forward = False
            self._complete_forward()

    def _launch_rest(self, before_wait: Callable[[int], None] = lambda _index: None) -> None:
        """Launch what is left of a pass; see `end_backward`."""
        # A pass that raised frees and keeps what it does on the other ranks.
        self._kept |= self._known_kept
        while self._to_launch:
            # Of one unit together: the other ranks wait for all of it before they go on to its reductions.
            unit = self.unit_of.get(self._to_launch[0])
            indices = {index for index in self._to_launch if unit is not None and self.unit_of.get(index) == unit}
            indices = indices or {self._to_launch[0]}
            # Without overlap too, none is waited for yet: the other ranks come to it by way of the reductions.
            for index in [each for each in self._to_launch if each in indices]:
                self._launch(index, waits=False)
            self._to_launch = deque(index for index in self._to_launch if index not in indices)
            before_wait(max(indices))
            for index in indices if not self.overlap else ():
                self._wait_launched(index)
            # Nobody here has asked for it: it is freed at once, for all of them together may not fit.
            self.free(indices - self._staying)
        # Prefetched, and not used in this pass.
        self.free(self.reshards & self._works.keys() - self._staying)

    def begin_forward(self, *, with_gradients: bool) -> None:
        """Begin a forward pass: what is freed is gathered in the order of the buckets."""
        # Of a pass that raised, the other ranks wait for the rest.
        if self._direction < 0:
            self.abandon_backward()
        elif self._in_forward:
            self._complete_forward()
        self.free(self._read)
        self._free_unviewed()
        self._to_launch = deque(sorted(self._freed.union(self._to_launch), key=self._position.__getitem__))
        self._in_forward, self._with_gradients = True, with_gradients
        self._staying = self.last_unit if with_gradients else frozenset()
        self._num_forwards += with_gradients

    def begin_backward(self) -> None:
        """Begin a backward pass through units: what is freed is gathered in the reverse order."""
        if self._direction < 0:
            self.abandon_backward()
        # What the graph has saved is of the shards before: autograd shall notice, as where parameters stay.
        if self.needs_unshard and self.shards_have_changed:
            self._start_step()
        self.launch_all()
        self._direction, self._staying, self._num_forwards = -1, frozenset(), 0
        self._to_launch = deque(sorted(self._freed, reverse=True))

    def note_unused(self) -> None:
        """Note that a backward pass through units has come to its end here: what is left of it goes unused."""
        self.gradients_come_late |= self._direction < 0 and bool(self._to_launch)

    def end_backward(self, before_wait: Callable[[int], None] = lambda _index: None) -> None:
        """End the pass: launch what is left of it, and free all that reshards.

        Args:
            before_wait: called with the last bucket of each unit that is launched here, before it is waited for: the
                other ranks may go on to it only when this rank has launched the reductions that precede it.
        """
        if self._direction < 0:
            self._launch_rest(before_wait)
            self._direction = 1
            self.free(self.reshards)

    def abandon_backward(self, before_wait: Callable[[int], None] = lambda _index: None) -> None:
        """End a backward pass that has raised here, as `end_backward` does."""
        self._lacks_reads = True
        self.end_backward(before_wait)

    def pass_nothing(self, before_wait: Callable[[int], None]) -> None:
        """Take part in a forward and a backward pass of the other ranks, or in the backward pass alone."""
        self._lacks_reads = True
        if not self._num_forwards:
            self.begin_forward(with_gradients=True)
        self._complete_forward()
        self.begin_backward()
        self.end_backward(before_wait)

    def _complete_forward(self) -> None:
        """End a forward pass, whatever of it has run here: it leaves all ranks with the same buckets."""
        self.launch_all()
        self.free(self.reshards - self._staying)

    @property
    def in_backward(self) -> bool:
        """Whether a backward pass has begun here that has not ended, or has raised."""
        return self._direction < 0

    def keep(self, indices: Iterable[int]) -> None:
        """Keep buckets until the shards change: others than their units read them."""
        kept = self.reshards.intersection(indices)
        self._kept |= kept
        self._known_kept |= kept

    def free(self, indices: Iterable[int]) -> None:
        """Have those of the buckets that reshard gathered again before their next use, unless somebody keeps them.

        Their memory is freed, but for that under a view or of use to a backward pass: [Note: views].
        """
        for index in sorted(self.reshards.intersection(indices) - self._freed - self._kept):
            bucket = self.buckets[index]
            self._wait_launched(index)
            # Only of one that was read past the hooks: what autograd has saved for the backward pass is of this memory
            # too.
            may_be_viewed = index in self._read or index in self._viewed
            if index in self._float8:  # nobody writes there, or reads it past products
                bucket.free()
            else:
                if may_be_viewed or self._is_written(index):
                    self._take_over(index)
                if may_be_viewed and (index in self._needed or bucket.has_aliases()):
                    self._viewed.add(index)
                else:
                    self._viewed.discard(index)
                    bucket.free()
                mark_pending(bucket.parameters)
            self._read.discard(index)
            self._freed.add(index)

    def _free_unviewed(self) -> None:
        """Free the memory that has stayed under views which are gone."""
        for index in (self._viewed & self._freed) - self._needed:
            if not self.buckets[index].has_aliases():
                self._take_over(index)
                self._viewed.discard(index)
                self.buckets[index].free()

    def _take_over(self, index: int) -> None:
        """Take over what was written into a bucket's parameters, by a view or else, and is in no master yet."""
        # Where a master has changed since, it is the newer one.
        is_newer = not self._changed_unseen and self.buckets[index].master_S._version == self._versions[index]
        if is_newer and (self._is_written(index) or self.compares_each_step):
            self._sync_masters(index)

    def settle(self) -> None:
        """Wait for what is under way, and free all that reshards: the shards may have changed.

        What the masters hold then is what the next pass computes with.
        """
        if self._direction < 0:
            self.abandon_backward()
        self._launch_rest()
        self.wait_for(tuple(self._works))
        self._kept.clear()
        self._needed.clear()
        self.free(self.reshards)
        self._free_unviewed()

    def note_masters_loaded(self, differ: bool) -> None:
        # What stays under a view, on any rank, holds the values of before. Asked of all: see `_lacks_reads`.
        is_stale = differ or bool(self._handed_out or self.reshards - self._freed)
        flags = self.comm.all_gather_ints([is_stale], "views of parameters")
        super().note_masters_loaded(any(flag for [flag] in flags))
