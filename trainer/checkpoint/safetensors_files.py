"""Folders of safetensors files as Hugging Face has them: one file, or several with `model.safetensors.index.json`.

Read by the `safetensors` library, which maps a file and checks its header; written by `TensorWriter`, because the
library writes a file from all of its tensors at once. Either side has one tensor in memory, and maps a bounded part of
its files. Not covered: pickled files (`pytorch_model.bin`), which are code.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from netlayer.errors import ConfigError
from trainer.checkpoint.file import TensorWriter
from trainer.checkpoint.foreign.hugging_face import FIELD

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
_REMEDY = "download or write it again"
_MAPPED_BYTES = 1 << 30
"""Read from a mapped file, it is mapped anew after so many bytes: what is mapped counts as resident."""
_FLOATS = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


class SafetensorsFiles:
    """Tensors of a file or of a folder by name.

    Args:
        path: of a file, or of a folder with an index, with `model.safetensors`, or with one other safetensors file.

    Raises:
        ConfigError: there are none, or one is damaged, cut short or missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._open: tuple[Path, Any] | None = None
        self._bytes_read = 0
        self._files: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
        listed = _listed(path)
        for file in dict.fromkeys(listed.values()) if listed else [_single(path)]:
            handle = self._handle(file)
            for name in handle.keys():  # noqa: SIM118 - it is no mapping
                part = handle.get_slice(name)
                self._shapes[name], self._dtypes[name] = tuple(part.get_shape()), part.get_dtype()
                self._files[name] = file
        for name, file in listed.items():
            if self._files.get(name) != file:
                rule = f"says that {name} is in {file.name}, and it is not"
                raise ConfigError(FIELD, path / INDEX, rule, _REMEDY)

    def __contains__(self, name: str) -> bool:
        return name in self._files

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return self._shapes

    @property
    def dtypes(self) -> Mapping[str, str]:
        """Dtypes by name, as the format writes them: F32, BF16."""
        return self._dtypes

    @property
    def metadata(self) -> Mapping[str, str]:
        """Return what the first file says besides its tensors."""
        first = next(iter(self._files.values()))
        return dict(self._handle(first).metadata() or {})

    @property
    def files(self) -> list[Path]:
        """Files that have tensors, in order."""
        return list(dict.fromkeys(self._files.values()))

    def names_in(self, file: Path) -> list[str]:
        return [name for name, where in self._files.items() if where == file]

    def wide_dtype(self, names: Iterable[str]) -> torch.dtype:
        """Return the dtype that holds all of these tensors without loss: float32, or float64 where one has that.

        Raises:
            ConfigError: one is of no floating-point dtype that training knows.
        """
        is_wide = False
        for name in names:
            if self._dtypes[name] not in _FLOATS:
                rule = f"{name} is {self._dtypes[name]}: must be one of {', '.join(_FLOATS)}"
                raise ConfigError(FIELD, self._files[name], rule, "give the model before it was quantised")
            is_wide = is_wide or self._dtypes[name] == "F64"
        return torch.float64 if is_wide else torch.float32

    def __getitem__(self, name: str) -> Tensor:
        """A view of the mapped file.

        Raises:
            ConfigError: it cannot be read.
        """
        file = self._files[name]
        if self._bytes_read > _MAPPED_BYTES:
            self._open = None
        try:
            tensor: Tensor = self._handle(file).get_tensor(name)
        except (SafetensorError, OSError) as exc:
            raise ConfigError(FIELD, file, f"{name} cannot be read ({exc})", _REMEDY) from exc
        self._bytes_read += tensor.nbytes
        return tensor

    def _handle(self, file: Path) -> Any:
        if self._open is None or self._open[0] != file:
            self._open = None  # before the next one: two would be mapped at once
            try:
                self._open, self._bytes_read = (file, safe_open(file, framework="pt")), 0
            except FileNotFoundError as exc:
                raise ConfigError(FIELD, file, "is not there, and the index names it", _REMEDY) from exc
            except (SafetensorError, OSError) as exc:
                raise ConfigError(FIELD, file, f"is no whole safetensors file ({exc})", _REMEDY) from exc
        return self._open[1]


def _listed(path: Path) -> dict[str, Path]:
    """Return the file of each tensor as the index of a folder has it; nothing where there is none."""
    index = path / INDEX
    if not index.is_file():
        return {}
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        # A name alone: what is elsewhere is no part of the folder.
        return {str(name): path / Path(file).name for name, file in weight_map.items()}
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as exc:
        raise ConfigError(FIELD, index, f"is no index of safetensors files ({exc})", _REMEDY) from exc


def _single(path: Path) -> Path:
    if path.is_file():
        return path
    if (path / SINGLE).is_file():
        return path / SINGLE
    there = sorted(path.glob("*.safetensors"))
    if len(there) == 1:
        return there[0]
    if there:
        rule = f"has {len(there)} safetensors files and no {INDEX}"
        raise ConfigError(FIELD, path, rule, "give one of the files, or the index with them")
    if pickled := sorted([*path.glob("pytorch_model*.bin"), *path.glob("*.pt"), *path.glob("*.pth")]):
        rule = f"has no safetensors file, and {pickled[0].name} may hold code"
        raise ConfigError(FIELD, path, rule, "load and save it with transformers, which writes safetensors")
    raise ConfigError(FIELD, path, "holds no safetensors file", "give a file, or a folder as transformers saves it")


class ShardedWriter:
    """Writes tensors that are known by name and shape before into one file, or into several with an index.

    Used as a context: files are closed at its end, and the index is written if it does not raise.

    Args:
        folder: that exists.
        shapes: by name, in the order in which they will be added.
        dtype: of all of them; what is added is cast.
        shard_bytes: most bytes of a file, but for a larger tensor.
        metadata: text to keep in each file.
    """

    def __init__(
        self,
        folder: Path,
        shapes: Mapping[str, Sequence[int]],
        dtype: torch.dtype,
        shard_bytes: int,
        metadata: Mapping[str, str],
    ) -> None:
        self._folder, self._shapes, self._dtype, self._metadata = folder, shapes, dtype, metadata
        self._shards = _cut(shapes, dtype.itemsize, shard_bytes)
        self._number, self._left = -1, list[str]()
        self._writer: TensorWriter | None = None

    def __enter__(self) -> ShardedWriter:
        return self

    def add(self, name: str, tensor: Tensor) -> None:
        """The next tensor.

        Raises:
            ValueError: it is not the next, or of another shape.
        """
        if tuple(tensor.shape) != tuple(self._shapes[name]):
            raise ValueError(f"{name} has shape {tuple(tensor.shape)}, and not {tuple(self._shapes[name])}")
        if not self._left:
            self._close()
            self._number += 1
            self._left = list(self._shards[self._number])
            tensors = [(each, self._shapes[each]) for each in self._left]
            path = self._folder / self._name(self._number)
            self._writer = TensorWriter(path, tensors, self._dtype, {"format": "pt", **self._metadata})
            self._writer.__enter__()
        assert self._writer is not None
        self._writer.add(name, tensor.to(self._dtype))
        self._left.remove(name)

    def __exit__(self, kind: type[BaseException] | None, exc: BaseException | None, traceback: Any) -> None:
        self._close(kind, exc, traceback)
        if kind is not None or len(self._shards) == 1:
            return
        if self._number + 1 < len(self._shards):
            raise ValueError(f"{self._shards[self._number + 1][0]} was not added")
        size = sum(math.prod(shape) for shape in self._shapes.values()) * self._dtype.itemsize
        files = {name: self._name(number) for number, names in enumerate(self._shards) for name in names}
        index = {"metadata": {"total_size": size}, "weight_map": files}
        (self._folder / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")

    def _close(self, kind: Any = None, exc: Any = None, traceback: Any = None) -> None:
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.__exit__(kind, exc, traceback)

    def _name(self, number: int) -> str:
        if len(self._shards) == 1:
            return SINGLE
        return f"model-{number + 1:05}-of-{len(self._shards):05}.safetensors"


def _cut(shapes: Mapping[str, Sequence[int]], itemsize: int, shard_bytes: int) -> list[list[str]]:
    """Return the names of the tensors of each file, in order."""
    shards: list[list[str]] = [[]]
    size = 0
    for name, shape in shapes.items():
        num_bytes = math.prod(shape) * itemsize
        if shards[-1] and size + num_bytes > shard_bytes:
            shards.append([])
            size = 0
        shards[-1].append(name)
        size += num_bytes
    return shards
