"""All-gathers of parameters, launched ahead of the computation that waits for them (MegaScale 3.2).

After an optimiser step only a rank's own shards are current. `unshard` starts the gathers of all buckets, in the order
of the buckets on every rank, so that they run under data loading and the forward pass: all of them at once, so that
whoever reads a parameter later waits on this rank alone, or `prefetch` of them ahead of the computation. Where the
optimiser steps inside the backward pass, some buckets are gathered there already (`gather_early`), and `unshard_rest`
starts the others. Not covered: parameters that are freed after use (`collectives.sharded.reshard`).

[Note: parameters that others write] Where parameters are of another dtype than the masters, the next `unshard` would
overwrite what somebody has written into them (a checkpoint, say). `sync_masters` takes that over into the masters
before an optimiser changes these: it looks at every value of a rank's own shard, for autograd does not count writes by
`.data`.

[Note: parameters that others read] Between an optimiser's step and the end of a bucket's all-gather, its memory holds
old and new values. In that time its parameters are of a subclass whose `__torch_function__` has the bucket made current
(`before_access`, on whatever thread), gives the parameter its own class back, and only then does what was asked for:
operators, `.data`, `torch._foreach_*`, numpy, copies, pickles, printing. Shape, dtype and the like do not wait. A
forward pass meets parameters of their own class: its hooks have waited. Only where nothing has been launched since the
shards changed does a read drive collectives, which every rank must then do at the same place. Not covered: code that is
handed the bare pointer of a tensor, or reads it in C++ without asking for `__torch_function__`.

[Note: aliases] What was made of a parameter before (`.data`, `.detach()`, a value of a `state_dict`) is a plain tensor
over the same memory. Every parameter has a storage of its own, so that one can tell that there is such a tensor: the
gather is then waited for as soon as it is launched (`has_aliases`).
"""

from __future__ import annotations

import contextlib
import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakTensorKeyDictionary

from collectives.sharded.bucket import Bucket, BucketPlan
from collectives.sharded.float8 import Float8Bucket, share_scales
from collectives.transport.communicator import Communicator, Work
from collectives.transport.current_stream import current_stream
from collectives.transport.windows import Windows


class AllGather:
    """All-gathers of buckets' parameters, in place: on gloo or NCCL, or from NCCL's windows.

    From windows NCCL's copy engines gather, where the group was made for that.

    Args:
        comm: which nothing else uses but calls from the same place in every rank's program.
        plans: of the buckets whose parameters shall lie in windows; none: they lie in memory as any other.
    """

    def __init__(self, comm: Communicator, plans: Sequence[BucketPlan] = ()) -> None:
        self.comm, self._windows = comm, None
        # One rank alone exchanges nothing: windows would only cost memory.
        if plans and comm.group is not None:
            room = sum(Windows.room(plan.padded_numel, _dtype_of(plan)) for plan in plans)
            self._windows = Windows(comm.group, comm.device, room)

    def allocate(self, plan: BucketPlan) -> Tensor | None:
        """Return the memory for a bucket's unsharded parameters, [N], as they travel; None: any memory will do."""
        return None if self._windows is None else self._windows.take(plan.padded_numel, _dtype_of(plan))

    def __call__(
        self,
        unsharded_N: Tensor,
        prepare: Callable[[], None] | None = None,
        after: torch.cuda.Event | None = None,
    ) -> Work:
        """Gather every rank's own slice on all ranks; arguments as in `Communicator.all_gather`."""
        return self.comm.all_gather(unsharded_N, prepare, after)

    def close(self) -> None:
        """Give the windows back, once the device has come here. Every rank does so at the same point; twice is once."""
        if self._windows is not None:
            self._windows.close()


def _dtype_of(plan: BucketPlan) -> torch.dtype:
    return torch.uint8 if plan.is_float8 else plan.dtype


class ParameterGather:
    """Publishes the shards of every bucket and waits for each where it is used.

    Args:
        buckets: in order of first use.
        all_gather: by which parameters travel.
        prefetch: all-gathers launched ahead of the one that is waited for; None: all.
        overlap: False: each is waited for at once, all of them in `unshard`.
        start_step: unshards shards that have changed, where somebody reads a parameter before that; None: `unshard`.
        reshards: indices of the buckets that are freed after use, and are freed now: for `ReshardingGather`.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        all_gather: AllGather,
        prefetch: int | None,
        overlap: bool,
        start_step: Callable[[], None] | None = None,
        reshards: Collection[int] = (),
    ) -> None:
        self.buckets, self.comm, self.prefetch, self.overlap = buckets, all_gather.comm, prefetch, overlap
        self._all_gather = all_gather
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
        self.reshards = frozenset(reshards)
        """Buckets that are freed after use."""
        self._freed = set(self.reshards)
        """Buckets to gather before their next use, the same on every rank between passes."""
        self._viewed: set[int] = set()
        """Buckets that were freed and whose memory has stayed: see [Note: views] of `collectives.sharded.reshard`."""
        self._float8 = {index: bucket for index, bucket in enumerate(buckets) if isinstance(bucket, Float8Bucket)}
        for index, bucket in enumerate(buckets):
            watch_access(bucket.parameters, self, index)
            if index in self._freed or not bucket.is_readable:
                mark_pending(bucket.parameters)
        self._prepare()
        self._start_float8()

    def _prepare(self) -> None:
        """Set what a subclass holds besides, before the first gather is launched."""

    def _start_float8(self) -> None:
        """Gather what travels in 8 bits and stays: their parameters have no values yet."""
        for bucket in self._float8.values():
            bucket.wait_by(self.before_product)
        if self._float8:
            share_scales(list(self._float8.values()), self.comm)
        for index in self._float8.keys() - self.reshards:
            self._launch(index)
            self.wait_for((index,))

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
            self._note_read(index)
            self.wait_for((index,))  # what is written now must not be taken for written in its midst
            if index in self._float8:
                self._make_readable(self._float8[index])

    def _note_read(self, index: int) -> None:
        """Note that somebody reads or writes a bucket's parameters; of one that stays, nothing follows."""

    def before_product(self, index: int) -> None:
        """Make bucket `index` current in 8 bits, since a product is about to read it so."""
        if self.is_unsharded:
            return
        with self._lock:
            if self.needs_unshard and self.shards_have_changed:
                self._start_step()
            self.wait_for((index,))

    def make_readable(self) -> None:
        """Gather what travels in 8 bits in the dtype of the computation too, on every rank."""
        with self._lock:
            for bucket in self._float8.values():
                self._make_readable(bucket)

    def _make_readable(self, bucket: Float8Bucket) -> None:
        if bucket.is_readable:
            return
        bucket.open_readable()
        # Waited for at once: whoever reads it stands here.
        self._all_gather(bucket.unsharded_N, bucket.copy_in_readable).wait()
        self._wait_at_home()
        bucket.is_readable = True
        mark_current(bucket.parameters)

    def _forget_readable(self) -> list[Float8Bucket]:
        """Free what was gathered in the dtype of the computation; return the buckets of which any rank holds a view."""
        readable = [bucket for bucket in self._float8.values() if bucket.is_readable]
        if not readable:
            return []
        # Every rank has read the same buckets, but a view of them may be held by one rank alone (a state_dict).
        flags = self.comm.all_gather_ints([bucket.has_aliases() for bucket in readable], "views of weights in 8 bits")
        stays = [bucket for bucket, by_rank in zip(readable, zip(*flags, strict=True), strict=True) if any(by_rank)]
        for bucket in readable:
            if bucket not in stays:
                bucket.forget_readable()
        return stays

    @property
    def is_unsharded(self) -> bool:
        """Whether every parameter is current and waited for."""
        is_under_way = self._works or self._to_launch or self._stepped or self._freed
        return not self.needs_unshard and not is_under_way

    def unshard(self) -> None:
        """Start the gathers of all buckets, if the shards have changed; the first `prefetch` are launched now."""
        if not self.needs_unshard:
            return
        # First of all: the gathers below would overwrite what somebody has written, and nobody would notice.
        self._refuse_writes(range(len(self.buckets)))
        # Gathers of the last unshard still write into the buffers that these take.
        self.settle()
        stays_readable = self._forget_readable()
        if self._float8:
            share_scales(list(self._float8.values()), self.comm)
        # Gathers start from here, whenever they are launched: not behind the computation queued up by then.
        now = self.comm.mark()
        self._home = None if now is None or self.comm.is_capturing else current_stream(self.comm.device)
        self._after = {} if now is None else dict.fromkeys(range(len(self.buckets)), now)
        self.needs_unshard = False
        for bucket in stays_readable:  # not current before it is gathered again below
            bucket.is_readable = False
        self._start(range(len(self.buckets)))
        # Whoever holds a view of these shall see the new values: see [Note: aliases]. What is launched before is the
        # same on every rank, whichever of them holds the view.
        while stays_readable and self._to_launch and self._to_launch[0] not in self.reshards:
            self._launch(self._to_launch.popleft())
        for bucket in stays_readable:
            # On every rank, and not on those that hold the view alone: what is written from here on is kept.
            self.wait_for((bucket.plan.index,))
            self._make_readable(bucket)

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
                self._launch_up_to(index)
                self._wait_launched(index)

    def _wait_launched(self, index: int) -> None:
        """Wait for a bucket's gather, if it is under way: it launches nothing, so one rank alone may do it."""
        work = self._works.get(index)
        if work is not None:
            work.wait()
            self._note_current(index)

    def _note_current(self, index: int) -> None:
        """Note that the current stream has waited for this bucket; the computing stream waits too, if it is another."""
        self._wait_at_home()
        del self._works[index]
        # A bucket whose shard has changed again stays marked: its parameters are outdated.
        if not self.needs_unshard and index not in self._stepped and self.buckets[index].is_readable:
            mark_current(self.buckets[index].parameters)

    def _wait_at_home(self) -> None:
        """Have the computing stream wait for what the current stream has waited for, if it is another."""
        if self._home is not None and not self.comm.is_capturing:
            here = current_stream(self.comm.device)
            if here != self._home:
                self._home.wait_stream(here)

    @property
    def _depth(self) -> int:
        return len(self.buckets) if self.prefetch is None or not self.overlap else self.prefetch

    def launch_all(self) -> None:
        """Launch what is left, so that every rank has launched the same, whatever its forward pass has used."""
        while self._to_launch:
            self._launch(self._to_launch.popleft())

    def wait_all(self) -> None:
        """Make every parameter ready to be read, with the values of the last `unshard`."""
        self.wait_for(range(len(self.buckets)))

    def settle(self) -> None:
        """Let no gather be under way."""
        self.wait_all()

    def begin_forward(self, *, with_gradients: bool) -> None:
        """Begin a forward pass; here all its gathers are launched or queued already."""

    def end_forward(self) -> None:
        """End a forward pass: every rank has launched the same, whatever its own has used."""
        self.launch_all()

    def check_unchanged(self) -> None:
        """Raise RuntimeError if shards were changed that nothing will unshard."""
        if self.needs_unshard:
            return
        waiting = {*self._to_launch, *self._freed}
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
            if index not in self._works and index not in self._to_launch and self._is_there(index):
                self._sync_masters(index)

    def _is_there(self, index: int) -> bool:
        """Whether there are values of a bucket's parameters that somebody may have written."""
        return index in self._float8 or index not in self._freed or index in self._viewed

    def _sync_masters(self, index: int) -> None:
        bucket = self.buckets[index]
        bucket.sync_masters()
        # The adoption has raised the version itself, and leaves nothing to unshard.
        self._versions[index], self._writes[index] = bucket.master_S._version, bucket.num_writes

    def note_changed(self) -> None:
        """Note that shards and full parameters were changed alike on every rank: there is nothing to unshard."""
        self.needs_unshard = False
        for index, bucket in enumerate(self.buckets):
            if index not in self._freed and bucket.is_readable:
                mark_current(bucket.parameters)
        self._versions = [bucket.master_S._version for bucket in self.buckets]
        self._writes = [bucket.num_writes for bucket in self.buckets]

    def note_masters_loaded(self, differ: bool) -> None:
        """Note that masters were loaded, and parameters with the same values, unless they `differ` on any rank."""
        self.note_changed()
        # What travelled in 8 bits holds the values of before.
        if differ or self._float8:
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
        self._to_launch.extend(sorted(indices))
        self._changing(indices)
        self._launch_up_to(-1)
        # Nothing asks before those are read: see [Note: aliases].
        self.wait_for(index for index, bucket in enumerate(self.buckets) if bucket.has_aliases())

    def _changing(self, indices: Sequence[int]) -> None:
        # The gathers overwrite what a graph that is kept for another backward has saved: autograd shall notice.
        parameters = [parameter for index in indices for parameter in self.buckets[index].parameters]
        mark_pending(parameters)
        torch.autograd.graph.increment_version(parameters)
        for index in indices:
            # The versions raised just above are no writes of the user's.
            self._writes[index] += len(self.buckets[index].parameters)

    def _launch_up_to(self, index: int) -> None:
        """Launch the gathers up to that of bucket `index`, and of `prefetch` more; -1: these alone."""
        while self._to_launch and self._to_launch[0] - index <= self._depth:
            self._launch(self._to_launch.popleft())

    def _launch(self, index: int, waits: bool = True) -> None:
        """Launch the all-gather of one bucket; without overlap, wait for it, unless `waits` is False."""
        bucket = self.buckets[index]
        prepare = None if index in self._in_place else bucket.copy_in_shard
        after = self._after.pop(index, None)
        work = self._all_gather(bucket.gathered_N, prepare, after)
        self._in_place.discard(index)
        # The version that travels: a later one was changed too late, see `check_unchanged`.
        self._versions[index] = bucket.master_S._version
        self._works[index] = work
        if waits and not self.overlap:
            self._wait_launched(index)


def inside_backward() -> bool:
    """Whether autograd runs a backward pass on this thread right now."""
    return torch._C._current_graph_task_id() != -1


# [Note: parameters that others read]

# Beside the parameters, and not an attribute of theirs: that would be saved with them.
_waiters: MutableMapping[Tensor, tuple[weakref.ref[ParameterGather], int]] = WeakTensorKeyDictionary()


def _getters(*names: str) -> set[Any]:
    return {getattr(Tensor, name).__get__ for name in names if hasattr(Tensor, name)}  # not every torch has all


@functools.cache
def _needs_no_values() -> frozenset[Any]:
    """Return the functions that read nothing of a tensor's values; its gradient is another tensor."""
    getters = _getters("shape", "dtype", "device", "requires_grad", "is_leaf", "layout", "ndim", "grad_fn", "_version")
    getters |= _getters("itemsize", "nbytes", "names", "output_nr", "grad")
    getters |= _getters("_backward_hooks", "_post_accumulate_grad_hooks")
    getters |= _getters("is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "is_nested", "is_mkldnn", "is_xla")
    getters |= _getters("is_mps", "is_xpu", "retains_grad", "is_sparse_csr")
    grad: Any = Tensor.grad
    requires_grad: Any = Tensor.requires_grad
    setters = {grad.__set__, grad.__delete__, requires_grad.__set__}
    methods = {Tensor.size, Tensor.dim, Tensor.numel, Tensor.nelement, Tensor.stride, Tensor.element_size}
    methods |= {Tensor.is_contiguous, Tensor.is_floating_point, Tensor.is_complex, Tensor.get_device, Tensor.__hash__}
    methods |= {Tensor.storage_offset, Tensor.ndimension, Tensor.__len__, Tensor.register_hook, Tensor.requires_grad_}
    methods |= {Tensor.register_post_accumulate_grad_hook, Tensor.is_shared, Tensor.is_signed, Tensor.is_inference}
    functions = {torch.is_floating_point, torch.is_complex, torch.numel, torch.is_same_size}
    return frozenset(getters | setters | methods | functions)


def watch_access(parameters: Iterable[nn.Parameter], waiter: ParameterGather, index: int) -> None:
    """Have accesses to these parameters of bucket `index` ask `waiter`, which is held weakly."""
    for parameter in parameters:
        # Weakly, for the waiter holds the parameters: a wrapper that nobody uses any more must go with them.
        _waiters[parameter] = weakref.ref(waiter), index


def mark_pending(parameters: Iterable[nn.Parameter]) -> None:
    """Make every read or write of these parameters wait for their gather first."""
    for parameter in parameters:
        own: Any = type(parameter)
        # Marked already where a bucket is stepped and then gathered; Python makes no class (_Pending, subclass of it).
        if not issubclass(own, _Pending):
            parameter.__class__ = _pending_of(own)


def mark_current(parameters: Iterable[nn.Parameter]) -> None:
    """Let these parameters be read without a wait again: their gather was waited for."""
    for parameter in parameters:
        pending: Any = type(parameter)
        if issubclass(pending, _Pending):
            parameter.__class__ = _own_of(pending)


class _Pending:
    """Mixed into the class of a parameter whose bucket is not current."""

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], _types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Wait for all pending parameters among the arguments, unless `func` needs no values, and call it."""
        kwargs = kwargs or {}
        if func not in _needs_no_values():
            for leaf in tree_leaves((args, kwargs)):
                if isinstance(leaf, _Pending):
                    _wait_for(leaf)
            if not any(isinstance(leaf, _Pending) for leaf in tree_leaves((args, kwargs))):
                return func(*args, **kwargs)  # with the own `__torch_function__` of a subclass
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    # A parameter copies and pickles itself without asking for `__torch_function__`, and by its class.

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        with _own_class(self) as parameter:
            return parameter.__deepcopy__(memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        with _own_class(self) as parameter:
            return parameter.__reduce_ex__(protocol)

    def __dlpack__(self, **options: Any) -> Any:
        with _own_class(self) as parameter:
            return parameter.__dlpack__(**options)


@contextlib.contextmanager
def _own_class(parameter: Any) -> Iterator[Any]:
    """Wait for a parameter, and give it its own class, without the mark of a pending one, in the block."""
    _wait_for(parameter)
    pending: Any = type(parameter)
    if not isinstance(parameter, _Pending):
        yield parameter
        return
    parameter.__class__ = _own_of(pending)  # its shards are about to change, but have not
    try:
        yield parameter
    finally:
        parameter.__class__ = pending


def _wait_for(parameter: Any) -> None:
    with torch._C.DisableTorchFunctionSubclass():
        reference, index = _waiters.get(parameter, (None, 0))
        waiter = None if reference is None else reference()
        if waiter is None:  # the wrapper is gone, and so is all that was under way
            own: Any = type(parameter)
            parameter.__class__ = _own_of(own)
        else:
            waiter.before_access(index)


@functools.cache
def _pending_of(own: Any) -> Any:
    return type(own.__name__, (_Pending, own), {"__module__": own.__module__, "__qualname__": own.__qualname__})


@functools.cache
def _own_of(pending: Any) -> Any:
    return pending.__mro__[pending.__mro__.index(_Pending) + 1]
