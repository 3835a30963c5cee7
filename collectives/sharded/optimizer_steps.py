"""Optimisers over the shards: how they are built, and the work around their steps.

Gradients are finished before a step, and gathers started after it: by hooks on a step after the backward pass; or
inside that pass, bucket by bucket (`collectives.sharded.backward_step`), where the optimiser's `step()` only waits, and
says that the step is over.
"""

from __future__ import annotations

import functools
import types
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from typing import Any, TypeVar

import torch
from torch import nn

from collectives.sharded.backward_step import BackwardStep, balanced_share
from collectives.sharded.bucket import Bucket
from collectives.sharded.elementwise import check_elementwise, check_parameterwise, probed_state
from collectives.sharded.gather import ParameterGather
from collectives.sharded.optimizer_state import NamedState, name_state
from collectives.sharded.reduce import GradientReduce
from collectives.sharded.scaler import make_scalers_finish
from collectives.sharded.state import attach_shard_check
from collectives.transport.communicator import Communicator

OptimizerT = TypeVar("OptimizerT", bound=torch.optim.Optimizer)
Options = Callable[[str, torch.Size], Mapping[str, Any]]
"""Settings of a single parameter, by its name and whole shape."""


class OptimizerSteps:
    """Ties the steps of one optimiser to a wrapper's reductions and gathers.

    Args:
        buckets, gather, reduce: of the wrapper.
        finish: its gradients; told whether to wait for all of them.
        start_step: unshards changed shards.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        gather: ParameterGather,
        reduce: GradientReduce,
        finish: Callable[[bool], None],
        start_step: Callable[[], None],
    ) -> None:
        self._buckets, self._gather, self._reduce = buckets, gather, reduce
        self._finish, self._start_step = finish, start_step
        self._post_reduce_hook: BackwardStep | None = None
        self._tied: weakref.WeakKeyDictionary[torch.optim.Optimizer, frozenset[str]] = weakref.WeakKeyDictionary()
        """Optimisers that step after the backward pass, and the names of what each of them steps."""
        self._have_stepped: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
        """Of these since gathers were started here."""
        self.gathers_after = True
        """Whether a step after the backward pass starts the gathers."""
        self.gather_share = 0.0
        """Of their bytes that moves under the backward pass, where that takes the steps."""

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
        reduce_scatters = self._reduce.reduce_scatters
        self.gather_share = (
            balanced_share(self._buckets[0].plan.dtype, reduce_scatters.dtype) if share is None else share
        )
        take_step = functools.partial(type(optimizer).step, optimizer)
        # The host does not wait for a device: one reduction in between covers an update. The CPU waits for a reduction.
        stream = reduce_scatters.stream
        lag = reduce_scatters.in_flight if stream is None else 1
        self._post_reduce_hook = BackwardStep(self._buckets, self._gather, take_step, self.gather_share, lag, stream)
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

    def _before(
        self, optimizer: object, args: tuple[Any, ...], kwargs: dict[str, Any], waits: bool = True
    ) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
        """Finish the gradients before a step; a closure is called here, and its result given to the step."""
        closure = next((argument for argument in (*args[1:], *kwargs.values()) if argument is not None), None)
        if closure is None:
            self._finish(waits)
            return None
        if not callable(closure):
            raise ValueError(f"step() takes a closure or nothing, got a {type(closure).__name__}")
        # The closure runs a backward pass, and a caller may step under no_grad.
        with torch.enable_grad():
            loss = closure()
        self._finish(waits)
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
