"""Optimisers over the shards: how they are built, and the work around their steps.

Gradients are finished before a step, and gathers started after it: by hooks on a step after the backward pass; or
inside that pass, bucket by bucket (`BackwardStep`), where the optimiser's `step()` only waits, and says that the step
is over.

[Note: steps in the backward pass] Without them a step is: backward with its reduce-scatters, optimiser, forward with
its all-gathers; where the network is the slower one, the forward pass (a third of the computation) waits for gathers
(half of the communication). With them a share of the gathers moves under the backward pass. Elementwise optimisers
only, and nothing that needs all gradients before the first update (clipping by the global norm); the numbers are those
of the plain step, bit by bit.

[Note: which gathers move] With f and b the seconds of forward and backward, r and g those of all reduce-scatters and
all-gathers, and a share x of the gathers moved, a step takes max(b, r + x g) + max(f, (1 - x) g). With b = 2 f,
x = (2 - r/g) / 3 makes that max(f + b, r + g), whichever is larger. The buckets that move are spread evenly over the
model: a forward pass that found its last layers gathered and its first ones not would wait for the first ones.

[Note: order] Reductions are launched from the last bucket to the first, and feed nothing but their own update; what is
waited for first in the next forward pass, the first buckets, is reduced last. So the gather of a bucket that moves is
launched right after the next reduction (its update runs meanwhile); all others follow the last reduction, in the order
of the forward pass. On one communicator that is the order on the wire. The end of a step is exposed, whatever is done:
the last gradients can only be reduced after the backward pass, and are the first to be gathered before the next one. So
nothing stands between the last reductions: the first buckets do not move.

Overwriting a bucket's parameters is safe once their gradients are complete: autograd has then run all that led there.
What reads them later in the same pass all the same fails: saved tensors by their version, recomputation by
`ParameterGather.wait_for`, from the update on.

[Note: what shards may be stepped by] An optimiser that steps each element, or each parameter, by itself. Others train
something else on shards, without a word: those that factor a matrix or take a norm of it (Adafactor, Shampoo, SOAP,
LAMB, LARS), that make it orthogonal (Muon), or that look at all parameters together (LBFGS, Prodigy). So an optimiser
of the same kind and settings steps a small tensor whole, and another two the halves of it, as two ranks would; the
results agree to rounding, or it is refused. One that cannot be tried out is judged by its name. Where no parameter is
cut, it is enough that each is stepped without a look at the others: two are stepped together, and alone.

[Note: scalers] A GradScaler looks for infinities in the gradients that an optimiser holds, and skips the step where it
finds one. Of an optimiser over shards it would find none before they are finished, and on one rank what the others do
not see. So the one method by which every scaler of torch reads gradients finishes those of our optimisers, and tells
all ranks what one of them has found. Other optimisers are scaled as ever.
"""

from __future__ import annotations

import functools
import re
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from collectives.sharded.bucket import Bucket, BucketPlan
from collectives.sharded.gather import ParameterGather
from collectives.sharded.optimizer_state import NamedState, name_state
from collectives.sharded.reduce import GradientReduce
from collectives.sharded.state import attach_shard_check
from collectives.transport.communicator import Communicator, Work

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)
Options = Callable[[str, torch.Size], Mapping[str, Any]]
"""Settings of a single parameter, by its name and whole shape."""


class OptimizerSteps:
    """Ties the steps of one optimiser to a wrapper's reductions and gathers.

    Args:
        buckets, gather, reduce: of the wrapper.
        start_step: unshards changed shards.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        gather: ParameterGather,
        reduce: GradientReduce,
        start_step: Callable[[], None],
    ) -> None:
        self._buckets, self._gather, self._reduce = buckets, gather, reduce
        self._start_step = start_step
        self._post_reduce_hook: BackwardStep | None = None
        self._tied: weakref.WeakKeyDictionary[torch.optim.Optimizer, frozenset[str]] = weakref.WeakKeyDictionary()
        """Optimisers that step after the backward pass, and the names of what each of them steps."""
        self._have_stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Of these since gathers were started here."""
        self.gathers_after = True
        """Whether a step after the backward pass starts the gathers."""

    def tie_behind(self, optimizer: torch.optim.Optimizer, waits: bool, names: Iterable[str]) -> None:
        """Step after the backward pass.

        Args:
            optimizer: takes the place of an earlier one that steps any of the same parameters.
            waits: for all gradients.
            names: of the parameters that it steps.
        """
        # The optimiser that was built last decides where steps are taken.
        self._reduce.post_reduce_hook = self._post_reduce_hook = None
        stepped = frozenset(names)
        # `_after` would wait for a step of the replaced one that never comes, and start no gathers.
        for earlier in [each for each, others in self._tied.items() if others & stepped]:
            del self._tied[earlier]
        self._tied[optimizer] = stepped
        optimizer.register_step_pre_hook(functools.partial(self._before, waits=waits))
        optimizer.register_step_post_hook(self._after)

    def tie_inside(self, optimizer: torch.optim.Optimizer, share: float | None) -> None:
        """Step inside the backward pass, bucket by bucket.

        Args:
            share: of the gathers that moves there, 0..1; None: what balances both passes.
        """
        self._reduce.post_reduce_hook = self._post_reduce_hook = None
        reduce_scatter = self._reduce.reduce_scatter
        if share is None:
            share = balanced_share(self._buckets[0].plan.dtype, reduce_scatter.dtype)
        take_step = functools.partial(type(optimizer).step, optimizer)
        # The host does not wait for a device: one reduction in between covers an update. The CPU waits for a reduction.
        stream = reduce_scatter.stream
        lag = self._reduce.reduce_scatters.in_flight if stream is None else 1
        self._post_reduce_hook = BackwardStep(self._buckets, self._gather, take_step, share, lag, stream)
        self._reduce.post_reduce_hook = self._post_reduce_hook

        def step(_optimizer: torch.optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
            called = self._before(_optimizer, (_optimizer, closure), {})
            # No backward pass has stepped: all were under `no_sync`, or `inside` is off.
            if not self._reduce.stepped:
                take_step()
            # `_start_step` does it for stale shards only, and a pass that steps has unsharded them.
            self._reduce.begin_step()
            self._start_step()
            return None if called is None else called[0][1]()

        # A bound method: torch's schedulers wrap the function inside.
        optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]

    @property
    def inside(self) -> bool:
        """Whether backward passes take the steps."""
        return self._reduce.post_reduce_hook is not None

    @inside.setter
    def inside(self, value: bool) -> None:
        if value and self._post_reduce_hook is None:
            raise ValueError("step_in_backward = True: take the optimiser with optimizer(..., step_in_backward=True)")
        self._reduce.post_reduce_hook = self._post_reduce_hook if value else None

    def finish(self, waits: bool) -> None:
        """Hand the gradients to the pieces before a step.

        Args:
            waits: until all of them are reduced.
        """
        # Before the step changes the masters: the next gather would overwrite what is not taken over by then.
        self._gather.sync_masters(unseen=self._gather.compares_each_step)
        self.hand_over(waits)

    def hand_over(self, waits: bool) -> None:
        """Hand the gradients to the pieces: whoever reads them may change the shards."""
        self._reduce.finish(waits)
        # Parameters are not current until the next unshard.
        if not self._reduce.stepped:
            self._gather.needs_unshard = True

    def _before(
        self, optimizer: object, args: tuple[Any, ...], kwargs: dict[str, Any], waits: bool = True
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Finish the gradients before a step; a closure is called here, and its result given to the step."""
        closure = next((argument for argument in (*args[1:], *kwargs.values()) if argument is not None), None)
        if closure is None:
            self.finish(waits)
            return None
        if not callable(closure):
            raise ValueError(f"step() takes a closure or nothing, got a {type(closure).__name__}")
        # The closure runs a backward pass, and a caller may step under no_grad.
        with torch.enable_grad():
            loss = closure()
        self.finish(waits)
        # The step would call the closure again, for a second backward pass: it gets the loss alone.
        return (optimizer, lambda: loss), {}

    def _after(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        # With `waits=False` the step has waited for the gradients that it read, and for no others.
        self._reduce.reduce_scatters.wait_all()
        self._have_stepped.add(optimizer)
        # Of several optimisers the last one starts the gathers; where it takes no step, the next forward pass does.
        if all(each in self._have_stepped for each in self._tied):
            self._have_stepped.clear()
            if self.gathers_after:
                self._start_step()


def parameter_groups(
    shapes: Mapping[str, torch.Size], pieces: Mapping[str, nn.Parameter], options: Options
) -> tuple[list[dict[str, Any]], list[list[str]]]:
    """Groups of the pieces that have the same options, and the names of all parameters of each.

    They are the same ones on every rank, where some hold no pieces.

    Args:
        shapes: of all parameters, whole.
        pieces: this rank's, of the parameters of which it has any.
        options: of a parameter, from its name and shape.
    """
    chosen: list[dict[str, Any]] = []
    names: list[list[str]] = []
    for name, shape in shapes.items():
        own = dict(options(name, shape))
        # By equality and in order of first use, so that all ranks number the groups alike.
        if own not in chosen:
            chosen.append(own)
            names.append([])
        names[chosen.index(own)].append(name)
    groups = [
        {"params": [pieces[name] for name in group if name in pieces], **own}
        for own, group in zip(chosen, names, strict=True)
    ]
    return groups, names


def build_optimizer(
    kind: Callable[..., OptimizerT],
    settings: Mapping[str, Any],
    shapes: Mapping[str, torch.Size],
    pieces: Mapping[str, nn.Parameter],
    options: Options,
    buckets: Sequence[Bucket],
    comm: Communicator,
    make_current: Callable[[], None],
    gather: ParameterGather,
) -> OptimizerT:
    """Build an optimiser over this rank's pieces, whose state is known by names and loads in any layout.

    Args:
        kind: built as `kind(param_groups, **settings)`.
        settings: of all parameters.
        shapes, pieces, options: as in `parameter_groups`.
        buckets, comm: where the parameters lie, and the communicator by which their state travels.
        make_current: has every parameter of the module current.
        gather: of the buckets; hears where masters were loaded.

    Raises:
        ValueError: `kind` needs what is cut here.
    """
    groups, names = parameter_groups(shapes, pieces, options)
    of_groups = [{**settings, **{key: value for key, value in g.items() if key != "params"}} for g in groups]
    _check_kind(kind, settings, of_groups, names, buckets)
    optimizer = kind(groups, **settings)
    # The optimiser's own state_dict numbers this rank's pieces: on another rank it might fit by chance.
    header = attach_shard_check(optimizer, buckets, comm)

    def probe(index: int) -> Mapping[str, Any] | None:
        # Of more than one element, so that a state like the parameter is told from one of a single number.
        like = torch.empty(2, 3, dtype=buckets[0].master_S.dtype, device=comm.device)
        return probed_state(kind, of_groups[index], like)

    named = NamedState(optimizer, buckets, comm, names, probe, header, make_current, gather.note_masters_loaded)
    name_state(optimizer, named)
    # A scaler reads gradients before it calls `step`, whose hook would finish them too late.
    make_scalers_finish()
    return optimizer


def _check_kind(
    kind: Callable[..., torch.optim.Optimizer],
    settings: Mapping[str, Any],
    of_groups: Sequence[Mapping[str, Any]],
    names: Sequence[Sequence[str]],
    buckets: Sequence[Bucket],
) -> None:
    """Raise ValueError if an optimiser of this kind cannot step shards.

    It must treat elements alike; matrices that lie whole on one rank may be stepped as matrices.
    """
    plans = [bucket.plan for bucket in buckets]
    wholes = {slot.name for plan in plans if plan.whole_shard is not None for slot in plan.slots}
    if not wholes:
        check_elementwise(kind, settings)
        return
    # Matrices that lie whole on one rank may be stepped as matrices; what shards cut, element by element alone.
    for own, group in zip(of_groups, names, strict=True):
        if not wholes.issuperset(group):
            check_elementwise(kind, own)
        if not wholes.isdisjoint(group):
            check_parameterwise(kind, own)


def drop_gradients(buckets: Sequence[Bucket], names: Set[str], set_to_none: bool = True) -> None:
    """Forget the gradients of these parameters, as `.grad = None` on each does."""
    for bucket in buckets:
        positions = [position for position, slot in enumerate(bucket.plan.slots) if slot.name in names]
        bucket.clear_gradients(positions, set_to_none)


# [Note: steps in the backward pass]

# A layer's backward pass has two products for the forward's one: gradients of its inputs and of its weights.
BACKWARD_SHARE = 2 / 3
"""Of a step's computation that is the backward pass, without recomputation."""
NUM_UNMOVED = 4
"""Buckets at the front whose gathers never move: they would delay the last reductions."""


class BackwardStep:
    """Steps the optimiser after the reductions of a step's last backward pass, at the same places on every rank.

    Args:
        buckets: in order of first use.
        gather: publishes what was stepped.
        step: steps every piece that has a gradient.
        share: of the gathers' bytes that moves under the backward pass, 0..1.
        lag: reductions launched between a bucket's own and its gather.
        stream: the updates run there; None on the CPU.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        gather: ParameterGather,
        step: Callable[[], object],
        share: float,
        lag: int,
        stream: torch.cuda.Stream | None,
    ) -> None:
        self._buckets, self._gather, self._step, self._lag, self._stream = buckets, gather, step, lag, stream
        self.share = share
        self._early_buckets = choose_early([bucket.plan for bucket in buckets], share)
        self._lagging: deque[tuple[int, Work]] = deque()
        self._updated_events: dict[int, torch.cuda.Event] = {}

    def begin(self) -> None:
        """Begin a backward pass, at its first gradient: wait for all gathers, then take over what users wrote.

        A gather may read a shard no longer when that shard is stepped, and a step would overwrite what users have
        written into parameters since the last one.
        """
        self._lagging.clear()
        # First, for `sync_masters` omits a bucket whose gather is under way.
        self._gather.wait_all()
        self._gather.sync_masters(unseen=self._gather.compares_each_step)

    def reduced(self, index: int, work: Work) -> None:
        """Step a bucket after its reduction, which was just launched, and gather the one that is due."""
        work.then(lambda: self._update(self._buckets[index]), self._stream)
        self._lagging.append((index, work))
        # A gather right after its own reduction would hold up the wire until the update is through.
        while len(self._lagging) > self._lag:
            self._gather_or_defer(*self._lagging.popleft())

    def complete(self) -> None:
        """End the pass: gather the last early buckets, and start the gathers of all others."""
        while self._lagging:
            self._gather_or_defer(*self._lagging.popleft())
        # These in the order of the forward pass, and all after the last reduction: see [Note: order].
        self._gather.unshard_rest(self._updated_events)
        self._updated_events = {}

    def _gather_or_defer(self, bucket_index: int, reduction: Work) -> None:
        """Gather a bucket now if it is an early one; else keep the event after its update, for `unshard_rest`.

        On the CPU, which has no events, the update runs here, in the wait for the reduction.
        """
        if reduction.done_event is None:
            reduction.wait()
        if bucket_index in self._early_buckets:
            self._gather.gather_early(bucket_index, reduction.done_event)
        elif reduction.done_event is not None:
            self._updated_events[bucket_index] = reduction.done_event

    def _update(self, bucket: Bucket) -> None:
        """Step the parameters of one bucket alone, and put its new shard where the all-gather takes it from."""
        # Before the update: from here on its parameters are neither of this step nor, until gathered, of the next.
        self._gather.stepping(bucket.plan.index)
        # An optimiser omits what has no gradient: that is how it steps one bucket.
        for piece in bucket.pieces:
            piece.parameter.grad = piece.grad
        self._step()
        for piece in bucket.pieces:
            # Else the step of the next bucket would step this one again.
            piece.parameter.grad = None
        bucket.copy_in_shard()


def choose_early(plans: Sequence[BucketPlan], share: float) -> frozenset[int]:
    """Return the buckets to gather under the backward pass: `share` of the bytes, spread evenly after the first ones.

    Raises:
        ValueError: `share` is not in 0..1.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"gather_in_backward = {share}: must lie in 0..1; give None for the balanced share")
    early, owed = [], 0.0
    for plan in plans:
        num_bytes = plan.padded_numel * plan.dtype.itemsize
        # What is owed is carried on, so that the moved buckets are spread evenly, whatever their sizes.
        owed += share * num_bytes
        # Sums of floats fall short by rounding: without the tolerance a share of 1 would leave buckets out.
        if plan.index >= NUM_UNMOVED and owed >= num_bytes * (1 - 1e-9):
            early.append(plan.index)
            owed -= num_bytes
    return frozenset(early)


def balanced_share(param_dtype: torch.dtype, reduce_dtype: torch.dtype) -> float:
    """Return the share that balances both passes, for a backward pass of twice the forward's time: the note above."""
    ratio = reduce_dtype.itemsize / param_dtype.itemsize
    # x = (2 - r/g) / 3. Below 0 the reductions alone take longer than the backward pass: no gather moves.
    return min(1.0, max(0.0, BACKWARD_SHARE * (1 + ratio) - ratio))


# [Note: scalers]


class ScalerCheck:
    """Stands for `_step_supports_amp_scaling`, which a scaler asks an optimiser for at the beginning of its `step`.

    False: the scaler does all by itself.

    Args:
        reduce: the gradients.
        finish: them; told whether to wait for all.

    Raises:
        RuntimeError: the optimiser steps in the backward pass, or torch's scalers are others than those known here.
    """

    def __init__(self, reduce: GradientReduce, finish: Callable[[bool], None]) -> None:
        self._reduce, self._finish = reduce, finish

    def __bool__(self) -> bool:
        self._refuse_stepped()
        if not self._reduce.finished and not make_scalers_finish():
            raise RuntimeError(
                "GradScaler: this torch scales in another way than is known here; call finish_gradients() of the "
                "wrapper before unscale_() and step(), and take ShardedGradScaler; bfloat16 needs no scaler"
            )
        return False

    def finish(self) -> None:
        """Wait until the gradients can be read."""
        self._refuse_stepped()
        self._finish(True)

    def share(self, found_inf: torch.Tensor) -> None:
        """Whether any rank has found an infinity, in place."""
        comm = self._reduce.comm
        shared = found_inf.to(comm.device, copy=True)
        comm.all_reduce(shared, torch.distributed.ReduceOp.MAX)
        found_inf.copy_(shared)

    def _refuse_stepped(self) -> None:
        if self._reduce.post_reduce_hook is not None:
            raise RuntimeError(
                "GradScaler: step_in_backward has taken the step unscaled; build the optimiser without it"
            )


@functools.cache
def make_scalers_finish() -> bool:
    """Patch torch's scalers to heed `ScalerCheck`; return False if this torch has others."""
    try:
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
    except ImportError:
        scalers: list[Any] = [torch.amp.GradScaler]
    else:
        scalers = [torch.amp.GradScaler, ShardedGradScaler]
    if not all(callable(getattr(scaler, "_unscale_grads_", None)) for scaler in scalers):
        return False
    for scaler in scalers:
        if "_unscale_grads_" in vars(scaler):
            scaler._unscale_grads_ = _finishing(scaler._unscale_grads_)
    return True


def _finishing(unscale: Callable[..., dict[torch.device, torch.Tensor]]) -> Callable[..., Any]:
    """Wrap GradScaler's unscaling: it waits for the reductions, and all ranks share whether there was an infinity."""

    @functools.wraps(unscale)
    def finish_and_unscale(
        self: Any, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, *args: Any
    ) -> dict[torch.device, torch.Tensor]:
        check = getattr(optimizer, "_step_supports_amp_scaling", None)
        if not isinstance(check, ScalerCheck):
            return unscale(self, optimizer, inv_scale, found_inf, *args)
        check.finish()
        by_device = unscale(self, optimizer, inv_scale, found_inf, *args)
        own = next(iter(by_device.values()), found_inf)  # a rank may hold nothing of any parameter
        check.share(own)
        return by_device or {own.device: own}

    return finish_and_unscale


# [Note: what shards may be stepped by]

_STEPS = 3
_SHAPE = (4, 6)
_CUT = 10
"""Elements of the first part: it ends inside a row, as shards do."""
_TOLERANCE = 1e-3
"""Of the largest change: rounding is a thousandth of that, and what is not elementwise changes a good part."""
_NAMES = re.compile(r"adafactor|muon|shampoo|soap|lbfgs|lamb|lars|prodigy|dadapt|kron|galore|came", re.IGNORECASE)

_NAMES_OF_ALL = re.compile(r"lbfgs|prodigy|dadapt", re.IGNORECASE)


def check_elementwise(kind: Callable[..., torch.optim.Optimizer], settings: Mapping[str, Any]) -> None:
    """Raise ValueError if `kind(..., **settings)` is known, or shows, to need whole matrices or all parameters.

    A kind that is made for shards says so by an attribute `steps_shards = True`.
    """
    if getattr(getattr(kind, "func", kind), "steps_shards", False):
        return
    name = getattr(kind, "__name__", type(kind).__name__)
    refusal = (
        f"{name} is not elementwise: {{}}, and each rank would step its own shard only; take an elementwise optimiser, "
        "such as torch.optim.AdamW, wrap with `whole` for one that steps each matrix by itself, such as Muon, or train "
        "this model with torch.nn.parallel.DistributedDataParallel"
    )
    generator = torch.Generator().manual_seed(1)
    whole = torch.randn(_SHAPE, generator=generator, device="cpu")
    grads = [torch.randn(_SHAPE, generator=generator, device="cpu") * 10.0**-step for step in range(_STEPS)]
    try:
        stepped = _step(kind, settings, whole, grads)
    except Exception:  # noqa: BLE001 - whatever it cannot do here, it may be able to where it is meant to run
        if _NAMES.search(name):
            known = "its kind is known to look at whole matrices or at all parameters"
            raise ValueError(refusal.format(known)) from None
        return
    if not stepped.isfinite().all():  # a learning rate that is no number, say: nothing can be told from it
        return
    try:
        parts = [
            _step(kind, settings, whole.flatten()[part], [grad.flatten()[part] for grad in grads])
            for part in (slice(_CUT), slice(_CUT, None))
        ]
    except Exception as exc:  # it takes a matrix, and no piece of one
        raise ValueError(refusal.format(f"it steps a matrix, and not a piece of one ({exc})")) from exc
    change = (stepped - whole).abs().max()
    off = (torch.cat(parts) - stepped.flatten()).abs().max()
    if not off <= _TOLERANCE * change:  # also where a piece is no number
        raise ValueError(refusal.format("it steps the pieces of a matrix otherwise than the whole"))


def check_parameterwise(kind: Callable[..., torch.optim.Optimizer], settings: Mapping[str, Any]) -> None:
    """Raise ValueError if `kind(..., **settings)` is known, or shows, to look at several parameters together."""
    name = getattr(kind, "__name__", type(kind).__name__)
    refusal = (
        f"{name} {{}}, and each rank would step its own parameters only; take an optimiser that steps each parameter "
        "by itself, or train this model with torch.nn.parallel.DistributedDataParallel"
    )
    generator = torch.Generator().manual_seed(1)
    shapes = (_SHAPE, _SHAPE[::-1])
    wholes = [torch.randn(shape, generator=generator, device="cpu") for shape in shapes]
    grads = [[torch.randn(shape, generator=generator, device="cpu") for _ in range(_STEPS)] for shape in shapes]
    try:
        together = _step_all(kind, settings, wholes, grads)
        alone = [_step(kind, settings, whole, own) for whole, own in zip(wholes, grads, strict=True)]
    except Exception:  # noqa: BLE001 - as above
        if _NAMES_OF_ALL.search(name):
            raise ValueError(refusal.format("is known to look at all parameters")) from None
        return
    for whole, one, other in zip(wholes, together, alone, strict=True):
        if one.isfinite().all() and not (one - other).abs().max() <= _TOLERANCE * (one - whole).abs().max():
            raise ValueError(refusal.format("steps a parameter otherwise where it has others beside it"))


def probed_state(
    kind: Callable[..., torch.optim.Optimizer], settings: Mapping[str, Any], like: Tensor
) -> Mapping[str, Any] | None:
    """Return an optimiser's state for a parameter like `like` after one step; None: that cannot be tried out."""
    parameter = nn.Parameter(torch.zeros_like(like))
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            optimizer = kind([{"params": [parameter]}], **settings)
            parameter.grad = torch.zeros_like(like)
            optimizer.step()
            state: Mapping[str, Any] = dict(optimizer.state[parameter])
    except Exception:  # noqa: BLE001 - it may need what only a training run has
        return None
    return state


def _step(
    kind: Callable[..., torch.optim.Optimizer], settings: Mapping[str, Any], values: Tensor, grads: Sequence[Tensor]
) -> Tensor:
    [stepped] = _step_all(kind, settings, [values], [grads])
    return stepped


def _step_all(
    kind: Callable[..., torch.optim.Optimizer],
    settings: Mapping[str, Any],
    values: Sequence[Tensor],
    grads: Sequence[Sequence[Tensor]],
) -> list[Tensor]:
    """Step copies of `values` once for each of `grads` by an optimiser of this kind, and return what they are then."""
    parameters = [nn.Parameter(each.clone()) for each in values]
    # A fused or capturable step needs a GPU; elsewhere it is the same mathematics.
    plain = {key: value for key, value in settings.items() if key not in ("fused", "capturable")}
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.default_generator.manual_seed(1)  # not the GPUs' generators, which nothing here restores
        optimizer = kind([{"params": parameters}], **plain)
        for of_step in zip(*grads, strict=True):
            for parameter, grad in zip(parameters, of_step, strict=True):
                parameter.grad = grad.clone()
            optimizer.step()
    return [parameter.detach() for parameter in parameters]
