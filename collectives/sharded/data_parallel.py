"""Sharded data parallel: ZeRO stage 1, 2 or 3 whose communication runs under the computation (MegaScale 3.2).

Wrap a module, take the optimiser from the wrapper, and keep the loop:

    model = ShardedDataParallel(model, units=model.blocks)
    optimizer = model.optimizer(torch.optim.AdamW, lr=3e-4)
    ...
    loss.backward(); optimizer.step(); optimizer.zero_grad()

Each rank computes with whole parameters (in stage 3 with those of a few units at a time), and owns a 1/W shard of the
float32 masters, the reduced gradients and the optimiser's state. Parameters are gathered bucket by bucket ahead of
their use; gradients are scattered bucket by bucket as they complete. Where nothing needs all gradients before the first
update (no clipping by the global norm), `step_in_backward=True` steps each bucket as its gradients land, so that
gathers move under the backward pass too (`collectives.sharded.optimizer_steps`). The results do not depend on that, on
`overlap`, `prefetch`, and the speed of a rank, bit by bit.

The loop stays as it is: parameters may be read, written, copied and saved wherever plain torch allows it, and whoever
reads one before its gather has landed waits for that (`collectives.sharded.gather`). torch's own clipping and scalers
work, and parameters that have no gradient on any rank are left alone. What would train something else is refused.

Sparse embeddings, complex or unmaterialised parameters, several devices, and moving or unfreezing parameters after
wrapping raise, and so does replacing or adding some. Not covered: optimisers that look at all parameters together;
sharding of frozen parameters.

[Note: a step omitted] Ranks skip a step together or not at all. Where one does so alone, the steps of all ranks
are compared now and then (`collectives.sharded.collectives`), and CheckFailed names ranks and steps; say the step, by
`start_step(step)` or a watch's or a recorder's `begin_step`, or a rank that omitted its forward pass too goes
unnoticed. A rank that omits `optimizer.step()` alone makes the others wait: a `watch` says for whom.

[Note: writing into parameters] Write the same on every rank. Masters of another dtype follow where a value has changed:
in a forward pass what autograd counts, in the next step also what was written through `.data`.

[Note: stage 3] Parameters of `units` are freed after use and gathered before the next (`collectives.sharded.wrapped`).
Every rank then runs the same forward and backward passes, and reads parameters at the same places: a read outside them
gathers that bucket, `state_dict()` and `wait_parameters()` all; `full_state_dict()` needs the memory of one, and
`close()` leaves them freed.

States, scalers, `torch.compile`, whole matrices, slots and CUDA graphs: see the notes of `collectives.sharded`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, Literal, Self, TypeVar, Unpack

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from collectives.arguments import as_dtype
from collectives.sharded.bucket import Bucket, BucketPlan
from collectives.sharded.collectives import Reduction, open_reduce_scatter
from collectives.sharded.gather import AllGather, ParameterGather, inside_backward
from collectives.sharded.gradient import clip_pieces
from collectives.sharded.optimizer_state import named_state
from collectives.sharded.optimizer_steps import OptimizerSteps, Options, ScalerCheck, build_optimizer, drop_gradients
from collectives.sharded.policies import Aliases, MixedPrecision, Overlap, Reshard, resolve
from collectives.sharded.prepare import (
    Init,
    as_groups,
    build_buckets,
    check_arguments,
    check_communication,
    check_module,
    check_reshards,
    check_same,
    find_owners,
    find_resharding,
    find_units,
    master_dtypes,
    move_replicated,
    open_communicators,
    open_replicas,
    plan_module,
    resolve_windows,
    same_start,
    send_buffers,
    shard_ranks,
    usual_bytes,
    wire_dtype,
)
from collectives.sharded.reduce import GradientReduce, GradientState
from collectives.sharded.reshard import ReshardingGather
from collectives.sharded.slot import DeferredWeightGrads
from collectives.sharded.state import (
    attach_state_hooks,
    calling_all,
    full_state_dict,
    load_full_state_dict,
    load_parameters,
)
from collectives.sharded.wrapped import ReshardHooks, StandIn, WrappedModule
from collectives.transport.communicator import Communicator
from collectives.transport.windows import ALIGNMENT_BYTES
from collectives.watch.recorder import Recorder
from collectives.watch.watchdog import Watch
from netlayer.workload.buckets import buffer_sizes

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)
DEFAULT_BUCKET_BYTES = 32 * 2**20
GroupPair = tuple["dist.ProcessGroup | None", "dist.ProcessGroup | None"]
CommunicatorPair = tuple[Communicator, Communicator]
DataCommunicators = CommunicatorPair | tuple[Communicator, Communicator, Communicator]


class ShardedDataParallel(StandIn):
    """Data parallel over the ranks of a group, ZeRO stage 1, 2 or 3. Starts from rank 0's parameters and buffers.

    Every rank constructs it, with the same arguments, and calls the same methods in the same order.

    Args:
        module: on one device, of the group or the CPU; changed in place (its parameters become views of the buckets).
        device, init: where buckets lie and the module computes; None: where its parameters are. What does not fit there
            whole stays on the CPU, or the meta device, until it is wrapped: it goes there bucket by bucket, and `init`
            fills each parameter of the meta device in place, by its name.
        group: ranks that share the shards, a process group or a DeviceMesh of one dimension; None: all. Of two
            dimensions, replicas and shards: each replica is sharded, and gradients are all-reduced between replicas
            (hybrid sharding). New groups are made of them (see `open_groups`).
        units: parts of the module, such as its blocks, that are waited for, reduced and gathered as one; their own
            parts are called through them alone. None, without `bucket_bytes`: the parts that the module repeats
            (`find_units`). Empty, or where nothing repeats: every module that holds parameters waits for itself.
        bucket_bytes: largest bucket, in bytes of the computation's dtype, unless one parameter is larger; None: a
            bucket a unit, or 32 MiB without units.
        precision: dtypes of the computation and of gradients on the wire.
        overlap: how communication runs under the computation; None: what the hardware has and has room for.
        reshard: what ranks hold in shards alone, ZeRO stages 2 and 3; None: stage 1. [Note: stage 3].
        recorder: notes every collective.
        order: names of parameters in the order of their use (`execution_order`); None: order of registration.
        groups: the process groups for gathers and for reductions, made beforehand and used by nothing else. One group
            twice: one communicator and one order for all, so that neither direction takes bandwidth from the other.
        timeout: of the groups made here; None: that of `group`.
        watch: says who is late where a collective does not complete.
        comms: for gathers, for reductions and, where there are replicas, between these: of `open_communicators` and
            `open_replicas` (`collectives.sharded.prepare`), with their groups, recorder and watch. Several wrappers,
            chunks of one model, may share them where every rank uses these in one order.
        mean: gradients are means over the ranks. False: sums, for a loss that the caller has divided by their number,
            which saves a pass over each shard where NCCL does not divide as it adds (from windows, over three ranks).
        unused: parameters that get a gradient on no rank: `"skip"`, the optimiser leaves them alone, as in plain torch;
            `"zero"`: their gradient counts as zeros (they decay, momentum goes on), and ranks need not ask each other.
        data_writes: into parameters through `.data`, which autograd does not count. `"sync_masters"`: before each step
            every rank compares its shard with its master where their dtypes differ, 6 bytes of memory traffic an
            element on GPUs; `"ignore"`: for a loop that writes none.
        broadcast_buffers: rank 0's buffers (of batch norms, say) go to all ranks after each step.
        whole: says by name and shape which parameters one rank each owns whole, for optimisers that need a matrix:
            see [Note: whole matrices]. None: none.
        aliases: arguments that policies have taken over, read until 0.4.

    Raises:
        ValueError: something here is not supported, or ranks differ in module or arguments; it names the first
            difference, its values and their ranks.
        RuntimeError, TypeError: NCCL or torch has no windows; there is no such argument.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        units: Iterable[nn.Module] | None = None,
        bucket_bytes: int | None = None,
        precision: MixedPrecision | None = None,
        overlap: Overlap | bool | None = None,
        reshard: Reshard | None = None,
        recorder: Recorder | None = None,
        order: Sequence[str] | None = None,
        groups: GroupPair | None = None,
        timeout: timedelta | None = None,
        watch: Watch | None = None,
        comms: DataCommunicators | None = None,
        mean: bool = True,
        unused: Literal["skip", "zero"] = "skip",
        data_writes: Literal["sync_masters", "ignore"] = "sync_masters",
        broadcast_buffers: bool = True,
        whole: Callable[[str, torch.Size], bool] | None = None,
        device: torch.device | str | None = None,
        init: Init | None = None,
        **aliases: Unpack[Aliases],
    ) -> None:
        nn.Module.__init__(self)  # nothing of torch's DistributedDataParallel: see `StandIn`
        precision, overlap, reshard = resolve(precision, overlap, reshard, **aliases)
        check_arguments(unused, data_writes)
        param_dtype = None if precision.param_dtype is None else as_dtype(precision.param_dtype, "param_dtype")
        where = check_module(module, init)
        is_free = units is None and bucket_bytes is None
        parts, stage = find_units(module) if is_free else tuple(units or ()), reshard.stage
        check_reshards(stage, parts, overlap.windows is True)
        device = move_replicated(module, where, device)
        # A mesh of two dimensions is hybrid sharding: shards along one, copies of them along the other.
        group, same_shard = as_groups(group)
        reduce_dtype = wire_dtype(module, precision.reduce_dtype, param_dtype)
        if bucket_bytes is None and not parts:
            bucket_bytes = DEFAULT_BUCKET_BYTES
        self.module = module
        if comms is not None and any(argument is not None for argument in (group, groups, timeout, recorder, watch)):
            raise ValueError(
                "communicators have their groups, timeout, recorder and watch: give these where they are opened"
            )
        world_size = shard_ranks(group, groups, comms)
        cut = functools.partial(plan_module, module, bucket_bytes, world_size, param_dtype, order, parts)
        cut = functools.partial(cut, whole=whole, float8=precision.float8)
        plans = cut()
        in_flight = overlap.most_in_flight(usual_bytes(plans, reduce_dtype))
        buffer_bytes = sum(buffer_sizes([plan.padded_numel for plan in plans], in_flight + 1)) * reduce_dtype.itemsize
        windows = overlap.windows
        choices = {"replicas": same_shard is not None, "windows": windows, "stage": stage}
        check_communication(group, groups, comms, device, choices)
        if groups is None and comms is None:
            windows = resolve_windows(windows, group, device, buffer_bytes, stage)
        elif windows == "auto":
            windows = False  # with groups of the caller's it is the caller who knows
        comms = comms or open_communicators(group, groups, device, timeout, recorder, watch, windows)
        self.gather_comm, self.reduce_comm = comms[:2]
        self.replicas = comms[2] if len(comms) > 2 else open_replicas(same_shard, device, timeout, recorder, watch)
        # One rank alone exchanges nothing: windows and copies would only cost memory.
        in_windows = windows and self.gather_comm.group is not None
        if in_windows or (overlap.peer_reduce is True and self.reduce_comm.group is not None):
            plans = cut(align=ALIGNMENT_BYTES)  # in elements, so for every dtype
        settings: dict[str, object] = {"bucket_bytes": bucket_bytes, "prefetch": overlap.prefetch}
        settings |= {"overlap": overlap.enabled, "reduce_dtype": reduce_dtype, "in_flight": in_flight, "stage": stage}
        settings |= {"windows": windows, "peer_reduce": overlap.peer_reduce, "mean": mean, "unused": unused}
        settings |= {"broadcast_buffers": broadcast_buffers, "data_writes": data_writes}
        # Before the calls below, which are collective: ranks that differ would hang in one of them.
        replicas = [] if self.replicas is None else [self.replicas]
        for comm in (*replicas, self.reduce_comm):
            check_same(comm, module, plans, settings)
        # Tried here, where all ranks are, and not in the midst of the first backward pass.
        self.reduce_comm.can_reduce_scatter(reduce_dtype)
        self._all_gather = AllGather(self.gather_comm, plans if in_windows else ())
        self._reduce_scatter = open_reduce_scatter(
            Reduction(self.reduce_comm, reduce_dtype, mean, self.replicas),
            plans,
            master_dtypes(module, plans),
            in_flight=in_flight,
            adds=stage >= 2,
            windows=in_windows,
            peers=overlap.peer_reduce,
        )
        # In stages 1 and 2 parameters stay whole between steps: there is nothing to free.
        reshards = find_resharding(module, plans, parts, precision.float8) if stage == 3 else frozenset()
        self.buckets: list[Bucket] = build_buckets(
            module,
            plans,
            self.reduce_comm,
            self._all_gather,
            self._reduce_scatter.gradients,
            reshards,
            init,
            self.replicas,
            None if precision.float8 is None else precision.float8.quantiser,
        )
        parameters, self._has_optimizer = tuple(module.parameters()), False
        # Buckets start from rank 0's values already; frozen parameters and buffers are in none, and follow here.
        frozen = same_start(module, [*replicas, self.reduce_comm], param_dtype)
        gathers = self.buckets, self._all_gather, overlap.prefetch, overlap.enabled, self.start_step, reshards
        resharding = ReshardingGather(*gathers) if reshards else None
        self._gather = resharding or ParameterGather(*gathers)
        self._gather.compares_each_step = data_writes != "ignore"
        travels = self._reduce_scatter, in_flight, overlap.enabled, stage, self._gather
        self._reduce = GradientReduce(self.buckets, *travels, unused == "skip", self)
        senders = [comm for comm in (*replicas, self.gather_comm) if comm.world_size > 1]
        self._buffer_comms = senders if broadcast_buffers else []
        self._steps = OptimizerSteps(self.buckets, self._gather, self._reduce, self.start_step)
        owners = find_owners(module, self.buckets, parts)
        self._wrapped = WrappedModule(self.buckets, parameters, frozen, owners, self._gather, self.start_step)
        # A compiler that is given the wrapper compiles the module alone.
        self._before_forward = torch.compiler.disable(self._before_forward)  # type: ignore[method-assign, no-untyped-call]
        self._after_forward = torch.compiler.disable(self._after_forward)  # type: ignore[method-assign, no-untyped-call]
        self._wrapped.attach_hooks()
        if resharding is not None:
            self._reduce.reshard = ReshardHooks(self.buckets, resharding, owners, parts)
            self._reduce.reshard.attach_hooks()
        for bucket in self.buckets:
            for position, parameter in enumerate(bucket.parameters):
                # A hook a parameter: it fires when autograd has added up all that this backward pass gives it.
                self._reduce.watch(parameter, bucket.plan.index, position)
        # On the module and not the wrapper: a program may save either, and both must see current values.
        make_current = functools.partial(self._make_current, "state_dict() or load_state_dict()")
        attach_state_hooks(module, self.buckets, make_current, self._gather.note_changed)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward; unshard the shards first, if `start_step` has not."""
        self._before_forward()
        result = self.module(*args, **kwargs)
        self._after_forward()
        return result

    def _before_forward(self) -> None:
        """Start the step if it has not begun, and wait for the parameters that no module's own hook waits for."""
        # Recomputation, within a step that has begun long ago.
        if inside_backward():
            return
        self._wrapped.check_unchanged(self.module)
        # Before the first forward a program may still load values through `.data`, which autograd does not count.
        self._gather.sync_masters(unseen=not self._wrapped.seen_forward)
        self._wrapped.warn_of_no_optimizer()
        if torch.is_grad_enabled() and self.module.training:
            self._reduce.note_forward()  # only such a one is followed by a backward pass, or its step was omitted
        self.start_step()
        self._gather.begin_forward(with_gradients=torch.is_grad_enabled())
        # Parameters whose module is not called itself (a tied weight, say) have no hook.
        self._gather.wait_for(self._wrapped.upfront)

    def _after_forward(self) -> None:
        # Whatever modules this rank's forward has called: every rank must have launched the same gathers.
        self._gather.end_forward()
        self._wrapped.learn_order()

    def start_step(self, step: int | None = None) -> None:
        """Launch the first all-gathers of changed shards: call it before loading data. A second call does nothing.

        Args:
            step: the training step that begins, by which ranks are compared; None: as a watch or a recorder says.
        """
        if step is not None:
            self._reduce.step = step
        # The other ranks wait for the rest of the round in which this rank's backward pass raised.
        if self._reduce.broken:
            self._reduce.abandon()
        # Set by whatever changes shards: an optimiser's step, a loaded state, a graph that was replayed.
        if self._gather.needs_unshard:
            self._reduce.begin_step()
            # Before the gathers, which use the same communicator: every rank needs one order on it.
            if self._buffer_comms:
                send_buffers(self.module, self._buffer_comms)
            self._gather.unshard()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes inside are not a step's last one: in stage 1 they communicate nothing.

        Run the step's last one outside, or `finish_gradients` reduces without overlap.
        """
        with self._reduce.being_last(False):
            yield

    @contextmanager
    def last_backward(self) -> Iterator[None]:
        """Inside `no_sync`: the backward pass inside this is the step's last one after all (a pipeline's order)."""
        with self._reduce.being_last(True):
            yield

    @contextmanager
    def defer_weight_grads(self) -> Iterator[DeferredWeightGrads]:
        """A backward pass inside leaves the gradients of linears' weights for `DeferredWeightGrads.compute`.

        That is where linears write into slots (`collectives.sharded.slot`); of others nothing is postponed.

        Raises:
            ValueError: in stage 2 or 3, with `step_in_backward`, or inside another one.
        """
        with self._reduce.deferring() as deferred:
            yield deferred

    @contextmanager
    def no_gathers_after_step(self) -> Iterator[None]:
        """Keep an optimiser's `step` inside from starting the gathers: a CUDA graph would have to wait for them."""
        # As it was, and not True: blocks may be nested.
        before, self._steps.gathers_after = self._steps.gathers_after, False
        try:
            yield
        finally:
            self._steps.gathers_after = before

    def note_shards_changed(self) -> None:
        """Shards were changed where nothing here could see it, on every rank alike: by a replayed CUDA graph.

        The next `start_step` or forward gathers them.
        """
        self._gather.note_changed_unseen()

    def finish_gradients(self, *, waits: bool = True) -> None:
        """Set `.grad` of every shard: the mean (or sum) over ranks of the sum over this step's backward passes.

        Where the backward pass has stepped the shards already, wait for that.

        Args:
            waits: until they are there. False: what reads them does (`as_gradients_come`), and works on those that
                are there while the last are under way.

        Raises:
            RuntimeError: the last backward pass raised.
        """
        # Where the optimiser is ours, its step looks at every value.
        self._gather.sync_masters(unseen=not self._has_optimizer and self._gather.compares_each_step)
        self._steps.hand_over(waits)

    def as_gradients_come(self) -> Iterator[Sequence[Bucket]]:
        """Yield all buckets, after `finish_gradients`: those whose gradients are there, then the others one by one."""
        return self._reduce.reduce_scatters.as_they_come(self.buckets)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Scale all gradients so that their norm over all shards and ranks is at most `max_norm`; the norm before.

        Finishes the gradients first. Infinity only measures. The device is not waited for.

        Args:
            max_norm: above 0.
            norm_type: above 0; infinity: the largest absolute value.
            error_if_nonfinite: raise where the norm is not finite, for which the device is waited for.

        Raises:
            ValueError: the optimiser steps in the backward pass, before the norm of all gradients can be known.
            RuntimeError: `error_if_nonfinite` does.
        """
        self._check_not_stepped("no norm of all gradients")
        if not max_norm > 0:
            raise ValueError(f"max_norm must be above 0, got {max_norm}")
        self.finish_gradients()
        pieces = [piece.parameter for bucket in self.buckets for piece in bucket.pieces]
        # float32 at least: squares of bfloat16 gradients would overflow or vanish in a sum over billions.
        dtype = functools.reduce(torch.promote_types, (b.master_S.dtype for b in self.buckets), torch.float32)
        zero = torch.zeros((), dtype=dtype, device=self.reduce_comm.device)
        return clip_pieces(pieces, max_norm, norm_type, error_if_nonfinite, zero, self.reduce_comm.all_reduce)

    def clip_grad_value_(self, clip_value: float) -> None:
        """Clamp every element of the gradients to -`clip_value` .. `clip_value`. Finishes the gradients first.

        Raises:
            ValueError: the optimiser steps in the backward pass.
        """
        self._check_not_stepped("no gradients to clip")
        self.finish_gradients()
        torch.nn.utils.clip_grad_value_(
            [piece.parameter for bucket in self.buckets for piece in bucket.pieces], clip_value
        )

    def reduced_pieces(self, states: Sequence[tuple[int, int]]) -> list[Tensor | None]:
        """Return this rank's pieces of reduced gradients at (bucket, position): see `collectives.sharded.gradient`."""
        self._check_not_stepped("no gradients left")
        self.finish_gradients()
        grads = {
            (bucket.plan.index, piece.position): piece.parameter.grad
            for bucket in self.buckets
            for piece in bucket.pieces
        }
        return [grads.get(place) for place in states]

    def reduce_norms(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """All-reduce in place: see `collectives.sharded.gradient`."""
        self.reduce_comm.all_reduce(values, op)

    def _check_not_stepped(self, lack: str) -> None:
        if self.step_in_backward:
            raise ValueError(f"{lack} before step_in_backward updates: build the optimiser without it")

    def release_gradients(self) -> None:
        """Free the memory of reduced gradients until the next reduction; call it after `zero_grad`.

        A step's largest moment is its loss, when activations are there and no gradient is. Nothing is freed while
        gradients are on their way or not yet handed to the shards, nor with steps inside the backward pass, which may
        still read them. Not to be called where a CUDA graph has the addresses.
        """
        if self.step_in_backward or self._reduce.state not in (GradientState.EMPTY, GradientState.FINISHED):
            return
        self._reduce.reduce_scatters.wait_all()
        for bucket in self.buckets:
            bucket.release_gradient()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop every gradient: of shards, accumulated ones, and those of a backward pass that raised."""
        self._reduce.zero_grad(set_to_none)

    def named_shards(self) -> Iterator[tuple[str, torch.Size, nn.Parameter]]:
        """Yield (name, shape of the whole parameter, this rank's 1-D piece of its master) for an optimiser.

        What is empty on this rank is omitted. Tied parameters come once, by their first name.
        """
        self._wrapped.asked_for_shards = True  # from here on an optimiser may hold them
        for bucket in self.buckets:
            for piece in bucket.pieces:
                yield piece.name, piece.shape, piece.parameter

    def reduce_buffers(self, bucket: Bucket) -> tuple[Tensor, Tensor]:
        """Return buffers as a bucket's reduce-scatter has them, whole and a shard, for measurements between steps."""
        return self._reduce_scatter.allocate(bucket)

    def shapes(self) -> dict[str, torch.Size]:
        """Shape of every trainable parameter, in order of the buckets: the same on all ranks."""
        return {slot.name: slot.shape for plan in self.plans for slot in plan.slots}

    @property
    def plans(self) -> list[BucketPlan]:
        return [bucket.plan for bucket in self.buckets]

    def optimizer(
        self,
        kind: Callable[..., OptimizerT],
        *,
        only: Callable[[str, torch.Size], bool] | None = None,
        options: Options = lambda _name, _shape: {},
        step_in_backward: bool = False,
        gather_in_backward: float | None = None,
        waits: bool = True,
        **settings: Any,
    ) -> OptimizerT:
        """Build an optimiser over the shards; its `step` also finishes gradients before, and starts gathers after.

        Its `state_dict` is that of this rank's shard alone.

        With `step_in_backward` a step's last backward pass (the one outside `no_sync`) steps bucket by bucket, with the
        learning rate that is set then; `step()` stays in the loop, waits for the updates, and drops the gradients, as
        `zero_grad()` does else. A hook on the step then runs once a bucket, and no step can be skipped, clipped or
        scaled after its backward pass.

        Args:
            kind: elementwise, such as torch.optim.AdamW, built as `kind(param_groups, **settings)`.
            only: says by name and whole shape which parameters this optimiser steps, where several share them; None:
                all. Each of them then takes its `step()`, and its `zero_grad()` drops the gradients of its own alone.
            options: settings of single parameters by name and whole shape: `{"weight_decay": 0.0}` for vectors, say.
            step_in_backward: update each bucket as soon as its gradients are reduced.
            gather_in_backward: share (0..1) of the all-gathers launched in that pass; None: what balances both passes.
            waits: for all gradients before a step. False: the optimiser goes by `as_gradients_come`, and hooks before
                its step read no gradients.
            settings: of all others.

        Raises:
            ValueError: `gather_in_backward` has no effect, or is not in 0..1; or `kind` needs what is cut here; or
                `only` picks nothing, or goes with `step_in_backward`.
        """
        if step_in_backward and (self._gather.reshards or any(plan.is_float8 for plan in self.plans)):
            reason = "goes without stage 3, which frees parameters, and without gathers in 8 bits; wrap without them"
            raise ValueError(f"step_in_backward = True: {reason}")
        if gather_in_backward is not None and not step_in_backward:
            raise ValueError(f"gather_in_backward = {gather_in_backward}: has no effect without step_in_backward=True")
        if only is not None and step_in_backward:
            raise ValueError("step_in_backward = True: goes with one optimiser of all parameters, and not with `only`")
        shapes = {name: shape for name, shape in self.shapes().items() if only is None or only(name, shape)}
        if not shapes:
            raise ValueError(
                f"only: picks none of {len(self.shapes())} parameters; the first is {next(iter(self.shapes()))}"
            )
        pieces = {name: piece for name, _, piece in self.named_shards() if name in shapes}
        optimizer = build_optimizer(
            kind, settings, shapes, pieces, options, self.buckets, self.reduce_comm, self.wait_for_gathers, self._gather
        )
        # Now the step itself looks for writes through `.data`, and `finish_gradients` need not.
        self._has_optimizer = True
        # torch's own would clear the pieces, and leave what has added up under `no_sync`.
        drop = functools.partial(drop_gradients, self.buckets, frozenset(shapes))
        zero_grad = self.zero_grad if only is None else drop
        optimizer.zero_grad = zero_grad  # type: ignore[method-assign]
        optimizer._step_supports_amp_scaling = ScalerCheck(self._reduce, self._steps.finish)  # type: ignore[attr-defined]
        if step_in_backward:
            self._steps.tie_inside(optimizer, gather_in_backward)
        else:
            self._steps.tie_behind(optimizer, waits, shapes)
        return optimizer

    @property
    def step_in_backward(self) -> bool:
        """Whether backward passes step the optimiser; may be switched between steps, on every rank alike."""
        return self._steps.inside

    @step_in_backward.setter
    def step_in_backward(self, value: bool) -> None:
        self._steps.inside = value

    @property
    def overlap(self) -> bool:
        """Whether collectives run under the computation; may be switched between steps, on every rank alike."""
        return self._gather.overlap

    @overlap.setter
    def overlap(self, value: bool) -> None:
        self._gather.overlap = self._reduce.reduce_scatters.overlap = value

    @property
    def prefetch(self) -> int | None:
        """All-gathers launched ahead of the computation; may be changed between steps, on every rank alike."""
        return self._gather.prefetch

    @prefetch.setter
    def prefetch(self, value: int | None) -> None:
        if value is not None and value < 1:
            raise ValueError(f"prefetch must be at least 1, got {value}")
        self._gather.prefetch = value

    def wait_parameters(self) -> None:
        """Publish changed shards and have every parameter of the module current, to be read from outside a forward.

        Collective where shards have changed: every rank calls it.
        """
        self.start_step()
        self._gather.wait_all()
        self._gather.make_readable()

    def wait_for_gathers(self) -> None:
        """Wait until no gather is under way; in stage 3 free the gathered parameters, which are not made readable."""
        self.start_step()
        self._gather.settle()

    def sync_masters_from_params(self) -> None:
        """Take over into the masters what was written into parameters through `.data`, the same on every rank.

        Not needed for what was written in place under `torch.no_grad()`, or before the first forward.

        Raises:
            RuntimeError: something was written without `wait_parameters()` before.
        """
        self._gather.sync_masters(unseen=True)

    def close(self) -> None:
        """End the training: parameters are current, and windows and the peers' memory given back. Twice is once.

        Every rank calls it. The module keeps its parameters, but for weights that travel in 8 bits: read these before
        on every rank, or take `full_state_dict()`. Without a call they go some time after the wrapper.
        """
        # Gathers may still write into this memory, and the module keeps its parameters.
        self._make_current("close()", frees=True)
        self._reduce_scatter.close()
        self._all_gather.close()

    def full_state_dict(self, *, cpu_offload: bool = False) -> dict[str, Any]:
        """Parameters (of master precision) and buffers by the module's own names and shapes.

        Collective: call it on every rank, then save it on one.

        Args:
            cpu_offload: onto the CPU, one bucket after the other.

        Raises:
            CollectiveTimeout, PeerLost: other ranks did not call it.
        """
        with calling_all("full_state_dict()"):
            self._make_current("full_state_dict()", frees=True)
            # The masters are what is saved: they must hold what was written through `.data` since the last step.
            self._gather.sync_masters(unseen=True)
            state = full_state_dict(self.module, self.buckets, self.gather_comm, "cpu" if cpu_offload else None)
            # Inside `calling_all`, which can tell a rank that it was alone with the call.
            self.gather_comm.wait_on_host()
        return state

    def load_full_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over what `full_state_dict` gave, the same on every rank, into parameters and masters alike.

        Collective where shards have changed; errors as `full_state_dict`.
        """
        self.wait_for_gathers()
        load_full_state_dict(self.module, self.buckets, state)
        self._gather.note_masters_loaded(False)

    def load_parameters(self, whole: Callable[[str], Tensor]) -> None:
        """Set parameters and masters, one after the other, to what `whole` gives by name: the same on every rank.

        Collective where shards have changed.
        """
        self.wait_for_gathers()
        # Nothing is in flight any more that would overwrite what is loaded.
        load_parameters(self.buckets, whole)
        self._gather.note_masters_loaded(False)

    def full_optimizer_state_dict(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The state of an optimiser over the shards, by names and in whole shapes: see
        `collectives.sharded.optimizer_state`.

        Collective: call it on every rank, then save it on one. It loads on any number of ranks.
        """
        return named_state(optimizer).full()

    def load_full_optimizer_state_dict(self, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
        """Take over what `full_optimizer_state_dict` gave, the same on every rank. Collective.

        Raises:
            ValueError: on all ranks, where it is of another model.
        """
        named_state(optimizer).load(state)

    def _apply(self, fn: Callable[[Tensor], Tensor], _recurse: bool = True) -> Self:
        """Refuse to move or cast; what leaves all as it is, such as `.to()` the same device, is no such thing."""
        self._wrapped.check_same(fn, self.module.buffers())
        return self

    @property
    def require_backward_grad_sync(self) -> bool:
        """Whether the next backward pass is a step's last one, as far as one knows; False: as inside `no_sync`."""
        return self._reduce.is_last

    @require_backward_grad_sync.setter
    def require_backward_grad_sync(self, value: bool) -> None:
        self._reduce.is_last = value

    def _make_current(self, caller: str, *, frees: bool = False) -> None:
        """Gather all parameters and wait on the host, so that a rank that calls this alone gets its error here.

        Args:
            frees: none that stage 3 frees.
        """
        with calling_all(caller):
            if frees:
                self.wait_for_gathers()
            else:
                self.wait_parameters()
            self.gather_comm.wait_on_host()
