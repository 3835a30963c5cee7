"""The state of an optimiser over shards by names and whole shapes: for any number of ranks, other buckets, other units.

The form is torch's: `{"state": {name: {key: value}}, "param_groups": [{..., "params": [names]}]}`. A value is whole on
every rank, or a ShardedTensor that says which boxes of the whole this rank holds, so that torch's distributed
checkpoints write each element once and read it into any other layout, that of plain torch or of FSDP2 among them. It
is what torch's `get_optimizer_state_dict`, `set_optimizer_state_dict`, `get_state_dict` and `set_state_dict` give and
take.

[Note: masters] Where the module computes in another dtype than the optimiser, its own state holds rounded parameters
only. So each parameter's state has one key more, `master_param`: without it a run does not go on to the bit.

[Note: what torch asks] torch's functions look an optimiser's parameters up in the model, where shards are not. So the
two functions behind them ask here first (`serve_checkpoints`). Other optimisers go the way that they always went.

Not covered: files; the state of one rank's shard (`collectives.sharded.state`).
"""

from __future__ import annotations

import base64
import copy
import functools
import json
import pickle
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from collectives.alike import spread
from collectives.sharded.bucket import Bucket, BucketPlan, Piece
from collectives.sharded.state import gather_whole, own_range
from collectives.transport.communicator import Communicator

MASTER = "master_param"

Settings = Mapping[str, Any]
Names = Callable[[str], str]
"""What the caller calls a parameter of this name."""


class Box(NamedTuple):
    """Part of a tensor: where it begins and its sizes, and which elements of the flat tensor it is, from..to."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    start: int
    end: int


def boxes_of(shape: Sequence[int], start: int, end: int) -> list[Box]:
    """The elements `start`..`end` of a tensor laid out by rows, cut into boxes: at most two a dimension, less one."""
    if start >= end:
        return []
    if not shape:
        return [Box((), (), 0, 1)]
    inner = functools.reduce(lambda product, size: product * size, shape[1:], 1)
    first, last = start // inner, (end - 1) // inner
    if first == last and end - start < inner:  # inside one row
        return [_in_row(box, first, inner) for box in boxes_of(shape[1:], start - first * inner, end - first * inner)]
    whole_from, whole_to = -(-start // inner), end // inner
    boxes = boxes_of(shape, start, whole_from * inner) if start < whole_from * inner else []
    if whole_from < whole_to:
        offsets = (whole_from, *(0 for _ in shape[1:]))
        boxes.append(Box(offsets, (whole_to - whole_from, *shape[1:]), whole_from * inner, whole_to * inner))
    return boxes + (boxes_of(shape, whole_to * inner, end) if whole_to * inner < end else [])


def _in_row(box: Box, row: int, inner: int) -> Box:
    return Box((row, *box.offsets), (1, *box.sizes), row * inner + box.start, row * inner + box.end)


class _Spec(NamedTuple):
    """Kind of a state's value under one key: elements of a dtype, a tensor of one number and its dtype, or a value."""

    kind: str
    dtype: str
    value: Any


class NamedState:
    """Gives and takes the state of one optimiser over shards by names. Every rank calls each method alike.

    Args:
        optimizer: held weakly.
        buckets, comm: of the wrapper.
        names: of the parameters of each group of the optimiser, whole and in their order.
        probe: the state of a small parameter of group i after one step; None: it cannot be tried out.
        header: what makes a state that of this rank's shard.
        make_current: has every parameter of the module current.
        note_changed: told when masters were set, and whether the parameters of any rank are others by now.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        buckets: Sequence[Bucket],
        comm: Communicator,
        names: Sequence[Sequence[str]],
        probe: Callable[[int], Mapping[str, Any] | None],
        header: Mapping[str, Any],
        make_current: Callable[[], None],
        note_changed: Callable[[bool], None],
    ) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._names = [list(group) for group in names]
        self._all = [name for group in names for name in group]
        chosen = set(self._all)
        self._buckets = [b for b in buckets if any(slot.name in chosen for slot in b.plan.slots)]
        self._comm, self._probe, self._header = comm, probe, header
        self._make_current, self._note_changed = make_current, note_changed
        self._pieces = {piece.name: (b, piece) for b in buckets for piece in b.pieces if piece.name in chosen}

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """The optimiser whose state this is."""
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    def whole_parameters(self) -> dict[str, nn.Parameter]:
        """Return the module's parameters by their names."""
        chosen = set(self._all)
        return {
            slot.name: parameter
            for bucket in self._buckets
            for slot, parameter in zip(bucket.plan.slots, bucket.parameters, strict=True)
            if slot.name in chosen
        }

    @torch.no_grad()
    def full(self, names: Names = str, device: torch.device | str | None = None, keeps: bool = True) -> dict[str, Any]:
        """Return the state as whole tensors.

        Args:
            names: the key of a parameter's state, from its name here.
            device: where they go; None: stay.
            keeps: on this rank; False: it takes part, and gets nothing.
        """
        specs = self._agreed_specs()
        state: dict[str, dict[str, Any]] = {names(name): {} for name in self._all if specs[name]}
        for key, dtype in dict.fromkeys(
            (key, spec.dtype) for each in specs.values() for key, spec in each.items() if spec.kind == "elements"
        ):
            holders = {n for n in self._all if (s := specs[n].get(key)) and (s.kind, s.dtype) == ("elements", dtype)}
            for name, whole in self._gather(key, _dtype(dtype), holders):
                if keeps:
                    state[names(name)][key] = whole.to(device, copy=True)
        for name, each in specs.items():
            for key, spec in each.items():
                if spec.kind != "elements":
                    state[names(name)][key] = _value_of(spec, device)
        return {"state": state, "param_groups": self._groups(names)} if keeps else {}

    @torch.no_grad()
    def sharded(self, names: Names = str, device: torch.device | str | None = None) -> dict[str, Any]:
        """Return each tensor as this rank's part of the whole; a single rank has the whole. Memory is the optimiser's.

        A tensor of which this rank holds nothing is not there.

        Args:
            names: as in `full`.
            device: where copies go; None: no copies.
        """
        specs = self._agreed_specs()
        state: dict[str, dict[str, Any]] = {names(name): {} for name in self._all if specs[name]}
        for bucket in self._buckets:
            for slot in bucket.plan.slots:
                shards = self._shards_of(bucket.plan, slot.name) if specs.get(slot.name) else []
                for key, spec in specs.get(slot.name, {}).items():
                    if spec.kind != "elements":
                        value = _value_of(spec, device)
                    elif self._comm.group is None:
                        value = self._elements(slot.name, key, spec).view(slot.shape)
                        value = value if device is None else value.to(device)
                    elif not slot.shape or not slot.numel:  # no shards of such: it is small, and the same on all ranks
                        value = self._whole(slot.name, key, spec).to(device, copy=True)
                    elif slot.name not in self._pieces:  # a tensor with no shard here torch takes for an old checkpoint
                        continue
                    else:
                        value = self._sharded_tensor(slot.name, slot.shape, key, spec, shards, device)
                    state[names(slot.name)][key] = value
        return {"state": state, "param_groups": self._groups(names)}

    @torch.no_grad()
    def load(self, state: Mapping[str, Any], names: Names = str, strict: bool = True) -> None:
        """Take over what `full` or `sharded` gave, here or elsewhere, or a plain torch optimiser by names.

        Raises:
            ValueError: a parameter is missing or has another shape, or a tensor is cut otherwise.
        """
        trouble = ""
        try:
            local, masters = self._local_state(state, names, strict)
        except ValueError as exc:
            trouble = str(exc)
        # All ranks hear of it: one that went on alone would wait for the others.
        troubles = self._comm.all_gather_text(trouble, "state")
        if any(troubles):
            raise ValueError(trouble or next(filter(None, troubles)))
        self.optimizer.load_state_dict(local)
        if any(bucket.rounds for bucket in self._buckets):
            self._load_masters(masters)

    def _load_masters(self, masters: Sequence[tuple[Bucket, Piece, Tensor]]) -> None:
        self._make_current()
        for bucket, piece, values in masters:
            piece.parameter.copy_(values)
            bucket.note_masters_loaded()
        differ = any(not bucket.holds_masters() for bucket in self._buckets)
        self._note_changed(any(there for [there] in self._comm.all_gather_ints([differ], "state")))

    def load_broadcast(self, state: Mapping[str, Any], names: Names = str, strict: bool = True) -> None:
        """Load a state that only rank 0 has: it broadcasts one tensor after the other. Arguments as in `load`."""
        if self._comm.ranks[0] != 0:
            raise ValueError(
                "broadcast_from_rank0: rank 0 has no replica in this group; load the state on every rank instead"
            )
        comm = self._comm
        source = {key: dict(value) for key, value in state["state"].items()} if comm.rank == 0 else {}
        skeleton = {
            "state": {
                name: {key: None if _is_large(value) else value for key, value in each.items()}
                for name, each in source.items()
            },
            "param_groups": state["param_groups"] if comm.rank == 0 else [],
            "large": [
                (name, key, tuple(value.shape), value.dtype)
                for name, each in source.items()
                for key, value in each.items()
                if _is_large(value)
            ],
        }
        text = base64.b64encode(pickle.dumps(skeleton)).decode() if comm.rank == 0 else ""
        received = pickle.loads(base64.b64decode(comm.all_gather_text(text, "state")[0]))
        places = {names(name): (name, piece) for name, (_, piece) in self._pieces.items()}
        for name, key, shape, dtype in received.pop("large"):
            whole = torch.empty(shape, dtype=dtype, device=comm.device)
            if comm.rank == 0:
                whole.copy_(source[name][key])
            comm.broadcast(whole)
            # Of the whole only what is this rank's own is kept.
            received["state"][name][key] = self._own_part(whole, places[name][0]) if name in places else None
        self.load(received, names, strict)

    def _own_part(self, whole: Tensor, name: str) -> Tensor | _Own:
        bucket, piece = self._pieces[name]
        return _Own(tuple(whole.shape), whole.flatten()[own_range(bucket, piece)].clone())

    def _groups(self, names: Names) -> list[dict[str, Any]]:
        """Return the optimiser's parameter groups with names in place of parameters.

        Raises:
            ValueError: a group was added after the optimiser was built.
        """
        groups = self.optimizer.param_groups
        if len(groups) != len(self._names):
            raise ValueError(
                f"the optimiser has {len(groups)} parameter groups, and was built with {len(self._names)}: groups that "
                "are added later have no names; give model.optimizer() all of them by `options`"
            )
        return [
            {**copy.deepcopy({k: v for k, v in group.items() if k != "params"}), "params": [names(n) for n in own]}
            for group, own in zip(groups, self._names, strict=True)
        ]

    @functools.cached_property
    def _probed(self) -> list[Mapping[str, Any]]:
        return [self._probe(index) or {} for index in range(len(self._names))]

    @functools.cached_property
    def _group_of(self) -> dict[str, int]:
        return {name: index for index, group in enumerate(self._names) for name in group}

    def _is_number(self, name: str, key: str, value: Tensor, shape: Sequence[int]) -> bool:
        """Whether this tensor is one number for the whole parameter, and not one an element."""
        probed = self._probed[self._group_of[name]].get(key)
        if probed is not None:
            return not isinstance(probed, Tensor) or probed.numel() == 1
        return not value.ndim or (value.numel() == 1 and tuple(value.shape) != tuple(shape))

    def _agreed_specs(self) -> dict[str, dict[str, _Spec]]:
        """Return the specs of every parameter's state, whichever rank holds it."""
        optimizer, index_of = self.optimizer, {name: index for index, name in enumerate(self._all)}
        has_none = not any(has for [has] in self._comm.all_gather_ints([bool(optimizer.state)], "state"))
        own: dict[str, list[int]] = {}
        for name, (bucket, piece) in self._pieces.items():
            if has_none:  # nothing was stepped: what the first step would make
                state = self._probed[self._group_of[name]]
                shape: Sequence[int] = next((v.shape for v in state.values() if isinstance(v, Tensor) and v.ndim), ())
            else:
                state, shape = optimizer.state.get(piece.parameter, {}), piece.parameter.shape
            specs = {str(key): self._spec(name, str(key), value, shape) for key, value in state.items()}
            if bucket.rounds:
                specs[MASTER] = _Spec("elements", str(piece.parameter.dtype), None)
            own.setdefault(json.dumps(specs, sort_keys=True), []).append(index_of[name])
        agreed: dict[str, dict[str, _Spec]] = {name: {} for name in self._all}
        first: dict[str, tuple[int, str]] = {}
        for rank, text in zip(self._comm.ranks, self._comm.all_gather_text(json.dumps(own), "state"), strict=True):
            for specs_text, indices in json.loads(text).items():
                for index in indices:
                    name = self._all[index]
                    known = first.setdefault(name, (rank, specs_text))
                    if known[1] != specs_text:
                        # A rank that steps what another one does not has trained something else.
                        both = spread(f"state of {name}", [known[1], specs_text], [known[0], rank])
                        raise ValueError(f"ranks hold different states of one parameter: {both}; load a checkpoint")
                    agreed[name] = {key: _Spec(*spec) for key, spec in json.loads(specs_text).items()}
        return agreed

    def _spec(self, name: str, key: str, value: Any, shape: Sequence[int]) -> _Spec:
        """Return what kind of state `value` is: a number of the parameter, one number an element, or a plain value.

        Raises:
            ValueError: it is neither, so it cannot be saved for other layouts.
        """
        if isinstance(value, Tensor):
            if self._is_number(name, key, value, shape):
                return _Spec(f"number {list(value.shape)}", str(value.dtype), value.item())
            if tuple(value.shape) == tuple(shape):
                return _Spec("elements", str(value.dtype), None)
        elif value is None or isinstance(value, bool | int | float | str):
            return _Spec("value", "", value)
        what = f"a tensor of shape {list(value.shape)}" if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise ValueError(
            f"state {key!r} of {name} is {what}, neither one number nor one an element: it cannot be saved for other "
            "layouts; save optimizer.state_dict() of every rank, and load it on as many ranks"
        )

    def _elements(self, name: str, key: str, spec: _Spec) -> Tensor:
        """Return this rank's elements, flat; zeros where the optimiser has none yet."""
        _, piece = self._pieces[name]
        if key == MASTER:
            return piece.parameter.detach().flatten()
        value = self.optimizer.state.get(piece.parameter, {}).get(key)
        if value is None:
            return torch.zeros(piece.parameter.numel(), dtype=_dtype(spec.dtype), device=piece.parameter.device)
        return value.detach().flatten()  # type: ignore[no-any-return]

    def _gather(self, key: str, dtype: torch.dtype, holders: set[str]) -> Iterator[tuple[str, Tensor]]:
        """Yield (name, whole tensor) of the state `key` of each parameter in `holders`; every rank calls it."""
        buckets = [b for b in self._buckets if any(slot.name in holders for slot in b.plan.slots)]
        spec = _Spec("elements", str(dtype), None)

        def value(piece: Piece) -> Tensor | None:
            return self._elements(piece.name, key, spec) if piece.name in holders else None

        for name, whole in gather_whole(buckets, self._comm, value, dtype):
            if name in holders:
                yield name, whole

    def _whole(self, name: str, key: str, spec: _Spec) -> Tensor:
        [(_, whole)] = self._gather(key, _dtype(spec.dtype), {name})
        return whole

    def _shards_of(self, plan: BucketPlan, name: str) -> list[tuple[int, int, Box]]:
        """Return (rank in the group, start of its piece in the whole, box) of every box of a parameter."""
        shards = []
        for rank in range(plan.world_size):
            for index, start, end in plan.pieces(rank):
                slot = plan.slots[index]
                if slot.name == name:
                    first = rank * plan.shard_numel + start - slot.offset
                    shards += [(rank, first, box) for box in boxes_of(slot.shape, first, first + end - start)]
        return shards

    def _sharded_tensor(
        self,
        name: str,
        shape: torch.Size,
        key: str,
        spec: _Spec,
        shards: Sequence[tuple[int, int, Box]],
        device: torch.device | str | None,
    ) -> Any:
        """Make torch's ShardedTensor of the state `key` of one parameter, from this rank's elements.

        Args:
            shards: (rank, first element of its piece, box of the parameter) of each part; a piece may be several boxes.
        """
        from torch.distributed._shard.metadata import ShardMetadata
        from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
        from torch.distributed._shard.sharded_tensor.shard import Shard

        comm = self._comm
        own = self._elements(name, key, spec)
        if device is not None:
            own = own.to(device)
        at = comm.device if device is None else torch.device(device)
        metadata, local = [], []
        for rank, first, box in shards:
            place = ShardMetadata(list(box.offsets), list(box.sizes), f"rank:{comm.ranks[rank]}/{at}")
            metadata.append(place)
            if rank == comm.rank:
                local.append(Shard(own[box.start - first : box.end - first].view(box.sizes), place))
        whole = ShardedTensorMetadata(metadata, shape, TensorProperties(dtype=_dtype(spec.dtype)))
        kind = _quiet_sharded_tensor()
        made = kind._init_from_local_shards_and_global_metadata(local, whole, comm.group)
        made.__class__ = kind
        return made

    def _local_state(
        self, state: Mapping[str, Any], names: Names, strict: bool
    ) -> tuple[dict[str, Any], list[tuple[Bucket, Piece, Tensor]]]:
        """The state of this rank's shard, and masters; in the form of `Optimizer.load_state_dict`."""
        state = unflattened(state, [names(name) for name in self._all]) if "state" not in state else state
        if all(isinstance(key, int) for key in state["state"]) and state["state"]:
            raise ValueError(
                "the optimiser state is by numbers of parameters: take it by names, from "
                "get_optimizer_state_dict(model, optimizer) of the run that saved it"
            )
        group_of = {name: group for group in state["param_groups"] for name in group["params"]}
        groups: list[dict[str, Any]] = []
        local: dict[int, dict[str, Any]] = {}
        masters: list[tuple[Bucket, Piece, Tensor]] = []
        piece_names = {piece.parameter: name for name, (_, piece) in self._pieces.items()}
        for own, whole_names in zip(self.optimizer.param_groups, self._names, strict=True):
            settings = _loaded_settings([names(name) for name in whole_names], group_of, strict)
            base = sum(len(group["params"]) for group in groups)
            numbers = [base + number for number in range(len(own["params"]))]
            groups.append({**_settings_of(own), **settings, "params": numbers})
            for number, parameter in zip(numbers, own["params"], strict=True):
                name = piece_names[parameter]
                bucket, piece = self._pieces[name]
                entry = {
                    key: self._own_value(value, bucket, piece, str(key), names(name))
                    for key, value in state["state"].get(names(name), {}).items()
                }
                master = entry.pop(MASTER, None)
                if master is not None and bucket.rounds:
                    masters.append((bucket, piece, master))
                if entry:
                    local[number] = entry
        return {"state": local, "param_groups": groups, **self._header}, masters

    def _own_value(self, value: Any, bucket: Bucket, piece: Piece, key: str, name: str) -> Any:
        """Return this rank's part of a whole value, however that is sharded."""
        shape, span = tuple(piece.shape), own_range(bucket, piece)
        if isinstance(value, _Own):
            if value.shape != shape:
                raise ValueError(_other_shape(name, key, value.shape, shape))
            return value.elements.view(piece.parameter.shape)
        if not isinstance(value, Tensor):
            return copy.deepcopy(value)
        if isinstance(value, _quiet_sharded_tensor().__mro__[1]):
            return self._from_shards(value, shape, span, key, name).view(piece.parameter.shape)
        if hasattr(value, "full_tensor"):  # a DTensor, of FSDP2 say
            value = value.full_tensor()
        if self._is_number(piece.name, key, value, shape) and key != MASTER:
            return value.detach().clone()
        if tuple(value.shape) != shape:
            raise ValueError(_other_shape(name, key, tuple(value.shape), shape))
        own = value.detach().flatten()[span].to(piece.parameter.device, copy=True)
        return own.view(piece.parameter.shape)

    def _from_shards(self, value: Any, shape: Sequence[int], span: slice, key: str, name: str) -> Tensor:
        """Return this rank's elements of a ShardedTensor, 1-D.

        Raises:
            ValueError: it has another shape, or is cut otherwise than this layout cuts it.
        """
        whole_shape = tuple(value.metadata().size)
        if whole_shape != tuple(shape):
            raise ValueError(_other_shape(name, key, whole_shape, shape))
        shards = {tuple(shard.metadata.shard_offsets): shard.tensor for shard in value.local_shards()}
        parts = []
        for box in boxes_of(shape, span.start, span.stop):
            part = shards.get(box.offsets)
            if part is None or tuple(part.shape) != box.sizes:
                raise ValueError(
                    f"state {key!r} of {name} is cut otherwise than here: let torch.distributed.checkpoint.load() read "
                    "into what get_optimizer_state_dict() gives here"
                )
            parts.append(part.detach().flatten().to(self._comm.device))
        return torch.cat(parts)


@functools.cache
def _quiet_sharded_tensor() -> Any:
    """torch's ShardedTensor, which torch's checkpoints know, without a warning at each look at it."""
    from torch.distributed._shard.sharded_tensor.api import ShardedTensor

    dispatch: Any = ShardedTensor.__torch_function__
    quiet = getattr(dispatch.__func__, "__wrapped__", dispatch.__func__)

    def answer(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.data_ptr:
            raise RuntimeError(
                "async_save: torch cannot stage shards of an optimiser's state; use save(), or take the state with "
                "StateDictOptions(full_state_dict=True, cpu_offload=True)"
            )
        return quiet(cls, func, types, args, kwargs)

    return type("ShardedTensor", (ShardedTensor,), {"__torch_function__": classmethod(answer)})


class _Own(NamedTuple):
    """One rank's elements of a whole tensor of this shape."""

    shape: tuple[int, ...]
    elements: Tensor


def flattened(state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state with one level of keys: `state.NAME.KEY` and `param_groups.NAME.SETTING`."""
    flat = {f"state.{name}.{key}": value for name, each in state["state"].items() for key, value in each.items()}
    for group in state["param_groups"]:
        flat |= {
            f"param_groups.{n}.{key}": value for n in group["params"] for key, value in _settings_of(group).items()
        }
    return flat


def unflattened(flat: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Return the state that `flattened` flattened, of these parameters; each comes in a group of its own."""
    known = set(names)
    state: dict[str, dict[str, Any]] = {}
    groups: dict[str, dict[str, Any]] = {}
    for whole_key, value in flat.items():
        part, _, rest = whole_key.partition(".")
        name, _, key = rest.rpartition(".")
        if name in known and part == "state":
            state.setdefault(name, {})[key] = value
        elif name in known and part == "param_groups":
            groups.setdefault(name, {"params": [name]})[key] = value
    return {"state": state, "param_groups": list(groups.values())}


# An attribute of the optimiser, which is not part of its state dict. In a dictionary with weak keys a state would keep
# its optimiser alive for ever, through the wrapper that it calls: all parameters, masters and moments with it.
_ATTRIBUTE = "_netlayer_named_state"


def name_state(optimizer: torch.optim.Optimizer, state: NamedState) -> None:
    """Register an optimiser's state, so that torch's functions for optimiser states use it."""
    setattr(optimizer, _ATTRIBUTE, state)
    serve_checkpoints()


def find_named_state(optimizer: torch.optim.Optimizer) -> NamedState | None:
    """Return the state of an optimiser over shards; None for another optimiser."""
    state: NamedState | None = getattr(optimizer, _ATTRIBUTE, None)
    return state


def named_state(optimizer: torch.optim.Optimizer) -> NamedState:
    """Return the state of an optimiser over shards.

    Raises:
        ValueError: it is none.
    """
    state = find_named_state(optimizer)
    if state is None:
        raise ValueError("this optimiser was not built by model.optimizer(kind, ...)")
    return state


@functools.cache
def serve_checkpoints() -> bool:
    """Patch torch.distributed.checkpoint to save and load optimisers over shards; return False if this torch lacks it.

    Its functions for optimiser states then treat such optimisers as `NamedState` does, and all others as before.
    """
    try:
        from torch.distributed.checkpoint import state_dict as torchs
    except ImportError:
        return False
    names = ("_get_optim_state_dict", "_load_optim_state_dict", "_get_fqns")
    if not all(callable(getattr(torchs, name, None)) for name in names):
        return False
    there: Any = torchs
    there._get_optim_state_dict = _serving_get(there._get_optim_state_dict, there._get_fqns)
    there._load_optim_state_dict = _serving_load(there._load_optim_state_dict, there._get_fqns)
    return True


def _serving_get(original: Callable[..., Any], fqns_of: Callable[..., Iterable[str]]) -> Callable[..., Any]:
    """Wrap torch's `_get_optim_state_dict` so that optimisers over shards give their state by parameter names."""

    @functools.wraps(original)
    def get(model: nn.Module, optimizers: tuple[torch.optim.Optimizer, ...], info: Any) -> dict[str, Any]:
        over_shards = [optimizer for optimizer in optimizers if find_named_state(optimizer)]
        if not over_shards or not info.handle_optim:
            return original(model, optimizers, info)  # type: ignore[no-any-return]
        others = tuple(optimizer for optimizer in optimizers if find_named_state(optimizer) is None)
        device = "cpu" if info.cpu_offload else None
        keeps = not (info.full_state_dict and info.cpu_offload) or not dist.is_initialized() or dist.get_rank() == 0
        result: dict[str, Any] = original(model, others, info) if others else {}
        for optimizer in over_shards:
            state = named_state(optimizer)
            names = _names_in(model, state, fqns_of)
            own = state.full(names, device, keeps) if info.full_state_dict else state.sharded(names, device)
            if info.flatten_optimizer_state_dict:
                result |= flattened(own) if own else {}
            elif own:
                merged = result or {"state": {}, "param_groups": []}
                result = {
                    "state": {**merged["state"], **own["state"]},
                    "param_groups": [*merged["param_groups"], *own["param_groups"]],
                }
        return result

    return get


def _serving_load(original: Callable[..., None], fqns_of: Callable[..., Iterable[str]]) -> Callable[..., None]:
    """Wrap torch's `_load_optim_state_dict` so that optimisers over shards load their state by parameter names."""

    # Loads optimizers of this module by name, and passes all others on to torch's function.
    @functools.wraps(original)
    def load(
        model: nn.Module, optimizers: tuple[torch.optim.Optimizer, ...], state_dict: dict[str, Any], info: Any
    ) -> None:
        others = tuple(optimizer for optimizer in optimizers if find_named_state(optimizer) is None)
        if others or not info.handle_optim:
            original(model, others, state_dict, info)
        for optimizer in optimizers if info.handle_optim else ():
            state = find_named_state(optimizer)
            if state is None:
                continue
            names, strict = _names_in(model, state, fqns_of), getattr(info, "strict", True)
            if info.broadcast_from_rank0:
                if state_dict and "state" not in state_dict:
                    state_dict = unflattened(state_dict, [names(name) for name in state.whole_parameters()])
                state.load_broadcast(state_dict, names, strict)
            else:
                state.load(state_dict, names, strict)

    return load


def _names_in(model: nn.Module, state: NamedState, fqns_of: Callable[..., Iterable[str]]) -> Names:
    """Return the names that `model`, or a module around it, gives the parameters of an optimiser."""
    by_id = {id(parameter): next(iter(fqns_of(model, key))) for key, parameter in model.named_parameters()}
    names = {name: by_id.get(id(parameter)) for name, parameter in state.whole_parameters().items()}
    missing = [name for name, fqn in names.items() if fqn is None]
    if missing:
        raise ValueError(f"the model does not hold {missing[0]}, which the optimiser steps: give the wrapper")
    return {name: fqn for name, fqn in names.items() if fqn is not None}.__getitem__


def _loaded_settings(names: Sequence[str], group_of: Mapping[str, Mapping[str, Any]], strict: bool) -> dict[str, Any]:
    """Return the settings that these parameters, one group here, were trained with; empty if none is known."""
    missing = [name for name in names if name not in group_of]
    if missing and strict:
        raise ValueError(f"the optimiser state has nothing of {missing[0]}: give that of this model")
    loaded = [(name, _settings_of(group_of[name])) for name in names if name in group_of]
    if not loaded:
        return {}
    first_name, first = loaded[0]
    for name, other in loaded:
        differing = [key for key in {**other, **first} if other.get(key) != first.get(key)]
        if differing:
            key = differing[0]
            raise ValueError(
                f"{name} was trained with {key} = {other.get(key)}, and {first_name}, in one group with it here, with "
                f"{first.get(key)}: build the optimiser with the groups of then"
            )
    return first


def _settings_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in ("params", "param_names")}


def _is_large(value: object) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0


def _dtype(name: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, name.removeprefix("torch."))
    return dtype


def _value_of(spec: _Spec, device: torch.device | str | None) -> Any:
    if spec.kind == "value":
        return spec.value
    shape = json.loads(spec.kind.removeprefix("number "))
    return torch.full(shape, spec.value, dtype=_dtype(spec.dtype), device=device or "cpu")


def _other_shape(name: str, key: str, shape: Sequence[int], own: Sequence[int]) -> str:
    return f"state {key!r} of {name} has shape {list(shape)}, and the parameter {list(own)}: give that of this model"
