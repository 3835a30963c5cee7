"""Format 4 of checkpoints: a folder that `torch.distributed.checkpoint` reads, and that it could have written.

    step-000050/
        .metadata          pickled: names, shapes and dtypes, and which box of each tensor lies where
        __0_0.distcp ...   a file a rank: boxes of tensors, each as `torch.save` writes it, and their digests at the end
        meta.json          facts of the run, digests of all other files (`trainer.checkpoint.meta`)
        tokenizer.json

So `dcp.load(state, checkpoint_id=folder)` of plain torch fills ordinary tensors, and any layout reads what any other
has written: a box is a part of the whole tensor, whoever held it. Not covered: quantised and sparse tensors.

[Note: names] A parameter has its name in the whole model, bare, and its state in the optimiser is
`optimizer.state.NAME.KEY` beside `optimizer.param_groups.NAME.SETTING`. That is what torchtitan writes: it saves
`{**model.state_dict(), "optimizer": optimizers}` (components/checkpoint.py: the model at the top level), where
`optimizers.state_dict()` is torch's `get_optimizer_state_dict` with `flatten_optimizer_state_dict=True`: no key has a
number of a parameter or of a group, so that pipeline stages do not collide; and `dcp` joins nested keys by dots.
Parameters are in the masters' dtype: what the optimiser steps, as torchtitan's are in float32.

[Note: boxes] ZeRO cuts a parameter at any element, and a box has whole ranges of each dimension: a range of elements is
a few of them. None is larger than `BOX_BYTES`, so a reader needs little memory, and damage is narrowed to a box.

[Note: frames] Of an item only the elements change from save to save. What `torch.save` puts around them is computed
once for a shape and dtype, by `torch.save` itself, which can skip the elements; so where each item of a rank's file
lies is known before any of them is there.
"""

from __future__ import annotations

import functools
import io
import math
import pickle
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from collectives.sharded.optimizer_state import boxes_of

OPTIMIZER = "optimizer"
BOX_BYTES = 16 << 20
_STATE, _GROUPS = f"{OPTIMIZER}.state.", f"{OPTIMIZER}.param_groups."
_FRAME_LOCK = threading.Lock()


def state_name(parameter: str, key: str) -> str:
    """Return the name of one value of the optimiser's state of a parameter: [Note: names]."""
    return f"{_STATE}{parameter}.{key}"


def setting_name(parameter: str, key: str) -> str:
    """Return the name of a setting of the optimiser, such as `lr`, as it is stored for each parameter."""
    return f"{_GROUPS}{parameter}.{key}"


def split_state_name(name: str) -> tuple[str, str] | None:
    """Return (parameter, key) of a value of the optimiser's state; None: it is no such name."""
    if not name.startswith(_STATE):
        return None
    parameter, _, key = name.removeprefix(_STATE).rpartition(".")
    return parameter, key


def is_of_optimizer(name: str) -> bool:
    """Whether a name is not one of the model's."""
    return name.startswith(f"{OPTIMIZER}.")


@dataclass(frozen=True)
class Box:
    """A stored part of a tensor: `sizes` elements from `offsets`, of a whole of `shape`."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)


@dataclass(frozen=True)
class Stored:
    """An item of a checkpoint: a box, or an object that is no tensor (`box` is None), and where it lies."""

    name: str
    box: Box | None
    file: str
    offset: int
    length: int


def small_boxes(box: Box, max_bytes: int | None = None) -> list[Box]:
    """Cut a box along its first dimension, in order of its elements, so that none is larger than `max_bytes`.

    A row that is larger stays whole.
    """
    max_bytes = max_bytes or BOX_BYTES
    if not box.sizes or box.numel * box.dtype.itemsize <= max_bytes:
        return [box]
    row_bytes = box.numel // box.sizes[0] * box.dtype.itemsize
    rows = max(1, max_bytes // row_bytes)
    return [
        Box(
            box.name,
            box.shape,
            box.dtype,
            (box.offsets[0] + first, *box.offsets[1:]),
            (min(rows, box.sizes[0] - first), *box.sizes[1:]),
        )
        for first in range(0, box.sizes[0], rows)
    ]


def boxes_of_range(name: str, shape: Sequence[int], dtype: torch.dtype, start: int, end: int) -> list[Box]:
    """Return the boxes of the elements `start`..`end` of a tensor laid out by rows, in the order of the elements."""
    boxes = [Box(name, tuple(shape), dtype, box.offsets, box.sizes) for box in boxes_of(shape, start, end)]
    return [small for box in boxes for small in small_boxes(box)]


@functools.lru_cache(maxsize=4096)
def frame(dtype: torch.dtype, sizes: tuple[int, ...]) -> tuple[bytes, bytes]:
    """Return what `torch.save` writes before and after the elements of such a tensor: [Note: frames]."""
    recorded = _Frame()
    with _FRAME_LOCK, torch.serialization.skip_data():  # a setting of the process
        torch.save(torch.empty(sizes, dtype=dtype), recorded)  # type: ignore[arg-type]  # a part of IO[bytes] is enough
    before, *after = recorded.parts
    return before, b"".join(after)


class _Frame:
    """A stream that keeps what is written, cut where bytes are skipped."""

    def __init__(self) -> None:
        self.parts = [b""]

    def write(self, content: Any) -> int:
        self.parts[-1] += bytes(content)
        return len(content)

    def seek(self, _num_bytes: int, _whence: int) -> int:
        self.parts.append(b"")
        return 0

    def flush(self) -> None:
        pass


def saved(value: object) -> bytes:
    """Return a small tensor or object as `torch.save` writes it."""
    stream = io.BytesIO()
    torch.save(value, stream)
    return stream.getvalue()


def elements_of(tensor: Tensor) -> memoryview:
    """Return the bytes of a tensor's elements, by rows; a copy where it is not on the host, or not laid out so."""
    flat = tensor.detach().cpu().contiguous().flatten()
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


def optimizer_settings(config: Any, is_matrix: bool, lr: float) -> dict[str, Any]:
    """Return the settings that torch's AdamW would have in its group for a parameter of a job.

    All that this torch's AdamW has, so that `dcp.load` finds every key that a plain optimiser asks for.

    Args:
        config: job.optimizer.
        is_matrix: whether it has two dimensions: vectors are not decayed.
        lr: of the step.
    """
    decay = config.weight_decay if is_matrix else 0.0
    plain = torch.optim.AdamW(
        [torch.zeros(1)], lr=lr, betas=(config.beta1, config.beta2), eps=config.eps, weight_decay=decay
    )
    return {key: value for key, value in plain.param_groups[0].items() if key != "params"}


def metadata_bytes(items: Iterable[Stored], aliases: Mapping[str, str]) -> bytes:
    """Return the content of `.metadata`.

    Args:
        items: all of the checkpoint.
        aliases: further names of a tensor, and under which it is stored: both point at the same bytes.
    """
    states: dict[str, Any] = {}
    storage: dict[MetadataIndex, _StorageInfo] = {}
    further: dict[str, list[str]] = {}
    for alias, name in aliases.items():
        further.setdefault(name, []).append(alias)
    for item in items:
        for name in (item.name, *further.get(item.name, ())):
            info = _StorageInfo(item.file, item.offset, item.length)
            if item.box is None:
                states[name] = BytesStorageMetadata()
                storage[MetadataIndex(name)] = info
                continue
            box = item.box
            if name not in states:
                properties = TensorProperties(dtype=box.dtype)
                states[name] = TensorStorageMetadata(properties, torch.Size(box.shape), [])
            chunks = states[name].chunks
            storage[MetadataIndex(name, box.offsets, len(chunks))] = info
            chunks.append(ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)))
    # How a flat name was nested: `dcp` makes the same of it where somebody loads all without a state of his own.
    nested: dict[str, tuple[str, ...]] = {name: (name,) for name in states}
    prefix = f"{OPTIMIZER}."
    nested |= {name: (OPTIMIZER, name.removeprefix(prefix)) for name in states if name.startswith(prefix)}
    metadata = Metadata(states, nested, storage, StorageMeta())
    metadata.version = getattr(filesystem, "CURRENT_DCP_VERSION", None)  # later releases of torch note it
    return pickle.dumps(metadata, protocol=4)


def parse_metadata(content: bytes) -> Metadata:
    """Return what `.metadata` holds; nothing in it is run but the classes that torch's own writer uses.

    Raises:
        ValueError: it is none, or names something else.
    """
    try:
        metadata = _Unpickler(io.BytesIO(content)).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, IndexError, KeyError, TypeError, MemoryError) as exc:
        raise ValueError(f"no metadata of torch.distributed.checkpoint: {exc}") from exc
    if not isinstance(metadata, Metadata) or not isinstance(metadata.storage_data, dict):
        raise ValueError("no metadata of torch.distributed.checkpoint")
    return metadata


class _Unpickler(pickle.Unpickler):
    """Makes plain values, and what describes a checkpoint: a pickle of anything else could run a program."""

    _CLASSES = frozenset(
        {
            "torch.distributed.checkpoint.metadata.Metadata",
            "torch.distributed.checkpoint.metadata.MetadataIndex",
            "torch.distributed.checkpoint.metadata.TensorStorageMetadata",
            "torch.distributed.checkpoint.metadata.BytesStorageMetadata",
            "torch.distributed.checkpoint.metadata.ChunkStorageMetadata",
            "torch.distributed.checkpoint.metadata.TensorProperties",
            "torch.distributed.checkpoint.metadata.StorageMeta",
            "torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING",
            "torch.distributed.checkpoint.filesystem._StorageInfo",
            "torch.serialization._get_layout",
            "torch.Size",
            "collections.OrderedDict",
            "pathlib.PosixPath",  # where it was saved
            "pathlib._local.PosixPath",
            "pathlib.WindowsPath",
            "pathlib._local.WindowsPath",
        }
    )

    def find_class(self, module: str, name: str) -> Any:
        is_value = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout)
        if not is_value and f"{module}.{name}" not in self._CLASSES:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return super().find_class(module, name)


def stored_items(metadata: Metadata) -> Iterator[Stored]:
    """Yield every item that the metadata of a checkpoint names.

    Raises:
        ValueError: a box has no place.
    """
    places = metadata.storage_data
    for name, state in metadata.state_dict_metadata.items():
        if isinstance(state, TensorStorageMetadata):
            for chunk in state.chunks:
                box = Box(name, tuple(state.size), state.properties.dtype, tuple(chunk.offsets), tuple(chunk.sizes))
                yield _stored(name, box, places.get(MetadataIndex(name, chunk.offsets)))
        else:
            yield _stored(name, None, places.get(MetadataIndex(name)))


def _stored(name: str, box: Box | None, info: Any) -> Stored:
    if info is None:
        raise ValueError(f"{name} lies nowhere")
    if getattr(info, "transform_descriptors", None):
        raise ValueError(f"{name} is stored in a form that is not read here: {info.transform_descriptors}")
    return Stored(name, box, str(info.relative_path), int(info.offset), int(info.length))


def load_item(content: bytes) -> Tensor:
    """Return the tensor of an item.

    Raises:
        ValueError: it holds none.
    """
    try:
        tensor = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError) as exc:
        raise ValueError(f"an item cannot be read: {exc}") from exc
    if not isinstance(tensor, Tensor):
        raise ValueError("an item is no tensor")
    return tensor
