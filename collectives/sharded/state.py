"""Whole parameters in and out of shards, by the module's own names: for checkpoints, and for tests.

Not covered: files.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from collectives.sharded.bucket import Bucket, Piece
from collectives.sharded.wrapped import CompanionHook
from collectives.transport.communicator import Communicator
from netlayer.errors import CollectiveFailed
from netlayer.layout import describe_ranks

_CALLED_ALONE = "called on every rank?"


@contextmanager
def calling_all(caller: str) -> Iterator[None]:
    """Wrap a call that every rank must make: a rank that makes it alone gets an error that says so.

    Raises:
        CollectiveTimeout, PeerLost: other ranks did not call it.
    """
    try:
        yield
    except CollectiveFailed as exc:
        if str(exc).startswith(_CALLED_ALONE):
            raise
        line = f"{_CALLED_ALONE} {caller} is collective, so all ranks call it, whoever keeps the result: {exc}"
        raise type(exc)(line, exc.missing, exc.silent, exc.differing) from exc


@torch.no_grad()
def full_state_dict(
    module: nn.Module, buckets: Sequence[Bucket], comm: Communicator, device: torch.device | str | None = None
) -> dict[str, Any]:
    """Return copies of all parameters, in master precision, and of buffers; parameters must be current, or freed.

    Args:
        module, buckets, comm: of the wrapper.
        device: where the copies go; None: they stay.
    """
    copies: dict[int, Tensor] = {}
    for bucket in buckets:
        unsharded_N = _gather_masters(bucket, comm)
        for parameter, view in zip(bucket.parameters, bucket.plan.views(unsharded_N), strict=True):
            copies[id(parameter)] = view.to(device, copy=True)
    state = dict[str, Any]()
    with reading_no_parameters(module):
        values = module.state_dict(keep_vars=True)
    for name, value in values.items():
        # What has several names in the module stays one tensor with several names.
        if isinstance(value, Tensor) and id(value) not in copies:
            copies[id(value)] = value.detach().to(device, copy=True)
        state[name] = copies[id(value)] if isinstance(value, Tensor) else value
    return state


_unread: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@contextmanager
def reading_no_parameters(module: nn.Module) -> Iterator[None]:
    """Wrap a call of the module's `state_dict` that is for names alone: its parameters need not be current."""
    _unread.add(module)
    try:
        yield
    finally:
        _unread.discard(module)


@torch.no_grad()
def gather_whole(
    buckets: Sequence[Bucket],
    comm: Communicator,
    value: Callable[[Piece], Tensor | None],
    dtype: torch.dtype | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, whole tensor) of what `value` gives of every piece, such as a moment of its optimiser.

    Collective: every rank goes through all of it, whoever keeps what comes. Of `dtype` or that of the masters, in the
    order of the buckets. All of them take turns in the memory of one, so a tensor is good until the next one is asked
    for. Where `value` gives None, zeros come.
    """
    room: dict[torch.dtype, Tensor] = {}
    for bucket in buckets:
        unsharded_N = _room_for(bucket, buckets, room, dtype)
        shard_S = bucket.plan.own(unsharded_N, bucket.rank)
        shard_S.zero_()
        for piece, (_, start, end) in zip(bucket.pieces, bucket.plan.pieces(bucket.rank), strict=True):
            values = value(piece)
            if values is not None:
                shard_S[start:end] = values.flatten()
        comm.all_gather(unsharded_N).wait()
        for slot, view in zip(bucket.plan.slots, bucket.plan.views(unsharded_N), strict=True):
            yield slot.name, view


@torch.no_grad()
def load_parameters(buckets: Sequence[Bucket], whole: Callable[[str], Tensor]) -> None:
    """Set parameters and masters, one parameter after the other, to what `whole` gives by name: the same on all ranks.

    Parameters must be current, or freed: these follow the masters.
    """
    for bucket in buckets:
        owned = {piece.name: (piece, place) for piece, place in _own_places(bucket)}
        for slot, parameter in zip(bucket.plan.slots, bucket.parameters, strict=True):
            values = whole(slot.name)
            if not bucket.reshards:
                parameter.copy_(values)
            if slot.name in owned and not bucket.shares_storage:
                piece, place = owned[slot.name]
                piece.parameter.copy_(values.flatten()[place].view(piece.parameter.shape))


def own_pieces(bucket: Bucket, whole: Callable[[str], Tensor]) -> Iterator[tuple[Piece, Tensor]]:
    """Yield every piece of this rank with its elements of the whole, which `whole` returns by name."""
    for piece, place in _own_places(bucket):
        yield piece, whole(piece.name).flatten()[place]


@torch.no_grad()
def load_full_state_dict(module: nn.Module, buckets: Sequence[Bucket], state: Mapping[str, Any]) -> None:
    """Load a full state; names must match. Parameters and masters are both set, so nothing is left to gather."""
    with reading_no_parameters(module):
        own = module.state_dict(keep_vars=True)
    trained = {id(parameter) for bucket in buckets if bucket.reshards for parameter in bucket.parameters}
    if trained and own.keys() == state.keys() and all(isinstance(value, Tensor) for value in own.values()):
        for name, value in own.items():
            if id(value) not in trained:
                value.detach().copy_(state[name])
    else:
        # Fills the buffers, and the parameters rounded to the dtype of the computation. It says what does not match.
        module.load_state_dict(state)
    values = {id(value): state[name] for name, value in own.items()}
    for bucket in buckets:
        if bucket.shares_storage:
            continue
        named = {
            slot.name: values[id(parameter)]
            for slot, parameter in zip(bucket.plan.slots, bucket.parameters, strict=True)
        }
        for piece, elements in own_pieces(bucket, named.__getitem__):
            piece.parameter.copy_(elements.view(piece.parameter.shape))


def attach_state_hooks(
    module: nn.Module, buckets: Sequence[Bucket], make_current: Callable[[], None], note_changed: Callable[[], None]
) -> None:
    """Make the module's own `state_dict` and `load_state_dict` safe: they see and set current values.

    Both are then collective calls where shards have changed, and work in the dtype of the computation.

    Args:
        make_current: gathers every parameter and waits for it.
        note_changed: told when parameters and masters have both been set.
    """

    def before(*_: object) -> None:
        if module_reference() not in _unread:
            make_current()

    module_reference = weakref.ref(module)

    @torch.no_grad()
    def after(*_: object) -> None:
        for bucket in buckets:
            bucket.take_loaded()
        note_changed()

    module.register_state_dict_pre_hook(CompanionHook(before))  # type: ignore[no-untyped-call]
    module.register_load_state_dict_pre_hook(CompanionHook(before))  # type: ignore[no-untyped-call]
    module.register_load_state_dict_post_hook(CompanionHook(after))  # type: ignore[no-untyped-call]


_SHARD = "netlayer_shard"
_SHARD_VERSION = 1


def attach_shard_check(
    optimizer: torch.optim.Optimizer, buckets: Sequence[Bucket], comm: Communicator
) -> dict[str, dict[str, Any]]:
    """Let the optimiser's state say which shard it is of, and refuse one of another; return what it says.

    Its `load_state_dict` is then called on every rank, and raises ValueError on all of them where rank, world size or
    layout differ on one, or a state says none.
    """
    layout = hashlib.sha256(
        json.dumps(
            [
                [
                    b.plan.shard_numel,
                    [(slot.name, *slot.shape) for slot in b.plan.slots],
                    *([] if b.plan.whole_shard is None else [[slot.offset for slot in b.plan.slots]]),
                ]
                for b in buckets
            ]
        ).encode()
    ).hexdigest()[:16]
    own = {"version": _SHARD_VERSION, "rank": comm.rank, "world_size": comm.world_size, "layout": layout}

    def note(_optimizer: object, state: dict[str, Any]) -> dict[str, Any]:
        state[_SHARD] = dict(own)
        return state

    def check(_optimizer: object, state: dict[str, Any]) -> None:
        """Raise ValueError on all ranks if the state is of another shard than this one on any rank."""
        shard = state.get(_SHARD)
        differing = [field for field, value in own.items() if shard is None or shard.get(field) != value]
        # All ranks hear of it: one that went on alone would wait for the others.
        wrong = [
            rank
            for rank, [is_wrong] in zip(comm.ranks, comm.all_gather_ints([bool(differing)], "state"), strict=True)
            if is_wrong
        ]
        remedy = (
            "load each rank's own file, on as many ranks, wrapped with the same arguments; or save what torch's "
            "get_optimizer_state_dict(model, optimizer) gives, which loads in any layout"
        )
        if differing and shard is not None:
            field = differing[0]
            raise ValueError(
                f"the optimiser state is of a shard with {field} = {shard.get(field)}, and this one has "
                f"{field} = {own[field]}: {remedy}"
            )
        if differing:
            raise ValueError(f"the optimiser state does not say of which shard it is: {remedy}")
        if wrong:
            raise ValueError(f"the optimiser state is of another shard on {describe_ranks(wrong)}: {remedy}")

    optimizer.register_state_dict_post_hook(note)
    optimizer.register_load_state_dict_pre_hook(check)
    return {_SHARD: own}


def _gather_masters(bucket: Bucket, comm: Communicator) -> Tensor:
    if bucket.shares_storage:
        return bucket.unsharded_N
    unsharded_N = torch.empty(bucket.plan.padded_numel, dtype=bucket.master_S.dtype, device=bucket.master_S.device)
    bucket.plan.own(unsharded_N, bucket.rank).copy_(bucket.master_S)
    comm.all_gather(unsharded_N).wait()
    return unsharded_N


def _own_places(bucket: Bucket) -> Iterator[tuple[Piece, slice]]:
    """Yield every piece of this rank, and the range of the parameter's elements that it has."""
    for piece in bucket.pieces:
        yield piece, own_range(bucket, piece)


def own_range(bucket: Bucket, piece: Piece) -> slice:
    """Return the range of a parameter's elements that this rank's piece has."""
    slot = bucket.plan.slots[piece.position]
    first = max(0, bucket.rank * bucket.plan.shard_numel - slot.offset)
    return slice(first, first + piece.parameter.numel())


def _room_for(
    bucket: Bucket, buckets: Sequence[Bucket], room: dict[torch.dtype, Tensor], dtype: torch.dtype | None
) -> Tensor:
    """Return memory for a whole bucket, [N], of `dtype` or its masters': part of one allocation for the largest."""
    kind = dtype or bucket.master_S.dtype
    if kind not in room:
        largest = max(each.plan.padded_numel for each in buckets if dtype or each.master_S.dtype == kind)
        room[kind] = torch.empty(largest, dtype=kind, device=bucket.master_S.device)
    return room[kind][: bucket.plan.padded_numel]
