"""Reads a checkpoint of any layout by the whole model's names, a region at a time; and writes a whole one.

`open_checkpoint` reads format 4, format 3, and a folder that plain `torch.distributed.checkpoint` has written; whoever
reads asks for regions of whole tensors and need not know how ranks had cut them. What is read is checked against its
digest, so damage becomes an error that names the file. Not covered: who needs which region.
"""

from __future__ import annotations

import abc
import functools
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from netlayer.config.tree import JobConfig
from netlayer.errors import ConfigError
from netlayer.results import sync_folder, writing
from trainer.checkpoint.dcp import (
    Box,
    Stored,
    elements_of,
    frame,
    is_of_optimizer,
    load_item,
    metadata_bytes,
    optimizer_settings,
    parse_metadata,
    saved,
    setting_name,
    small_boxes,
    split_state_name,
    state_name,
    stored_items,
)
from trainer.checkpoint.digest import digest
from trainer.checkpoint.distcp import SUFFIX, Extent, ItemWriter, Read, file_of, file_reader, has_trailer, read_trailer
from trainer.checkpoint.file import TensorFile
from trainer.checkpoint.meta import ALTERED, Meta, file_name, find, undamaged
from trainer.checkpoint.names import (
    FORMAT,
    META,
    METADATA,
    OLD_FORMAT,
    TOKENIZER,
    as_location,
    is_name_of_run,
    is_there,
    sealed,
)
from trainer.model.linears import Part
from trainer.ramps import learning_rate

PARAMETER = "parameter"  # of format 3
EMBEDDING, HEAD = "embedding.tokens.weight", "head.tokens.weight"
PARTS = "parts"
Region = Sequence[slice]
"""A range of each dimension, from the first; dimensions that are not named are whole."""
_FILE_BYTES = 4 << 30  # of a file of a checkpoint that one process writes


def open_checkpoint(path: Path, field: str = "--resume") -> Checkpoint:
    """Open a checkpoint, or the newest good one of a run.

    Args:
        path: a checkpoint of netlayer, a run or its `checkpoints/`, or a folder that `dcp.save` has written.
        field: how the user named it, for errors.

    Raises:
        ConfigError: there is none, what describes it is damaged, or it is one of a run and has lost `meta.json`.
    """
    path = as_location(path)
    with undamaged(field, path):
        is_plain = is_there(path / METADATA) and not is_there(path / META)
    if is_plain:
        # Named as those of a run are: `netlayer checkpoint export` writes such files too, into a folder of any name.
        if is_name_of_run(path) and any(has_trailer(file) for file in path.glob(f"*{SUFFIX}")):
            # Without the digests nobody knows whether it was ever finished, or is as it was written.
            remedy = "take another checkpoint of its run; torch's own dcp.load reads it unchecked"
            raise ConfigError(field, path, f"lacks {META}, which its run has written last", remedy)
        return PlainCheckpoint(path, None, field)
    return open_found(find(path, field))


def open_found(meta: Meta) -> Checkpoint:
    """Open the checkpoint that `find` has found.

    Raises:
        ConfigError: what describes its tensors is damaged.
    """
    if meta.format == OLD_FORMAT:
        return OldCheckpoint(meta)
    return PlainCheckpoint(meta.path, meta, meta.field)


@dataclass(frozen=True)
class Chunk:
    """A stored part of a tensor, in elements of the whole, and what reads it."""

    offsets: Sequence[int]
    sizes: Sequence[int]
    load: Callable[[], Tensor]


class Checkpoint(abc.ABC):
    """Tensors of a checkpoint by name, read in parts. Close it, or use it as a context.

    Parameters have their names in the whole model, moments of the optimiser are `optimizer.state.NAME.exp_avg` and the
    like.

    Attributes:
        path: its folder.
        meta: facts of the run; None: it was written by plain torch.
        bytes_read: from storage so far, of tensors.
    """

    def __init__(self, path: Path, meta: Meta | None, field: str) -> None:
        self.path, self.meta, self.field = path, meta, field
        self.bytes_read = 0

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    @abc.abstractmethod
    def close(self) -> None:
        """Let go of what was read; it can still be read from."""

    @abc.abstractmethod
    def names(self) -> list[str]:
        """Return the names of all tensors, each once, in the order of the file; a tied table has one of its names."""

    @abc.abstractmethod
    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of the whole tensor.

        Raises:
            KeyError: there is none of this name.
        """

    @abc.abstractmethod
    def dtype(self, name: str) -> torch.dtype:
        """Return the dtype that it is stored in; KeyError as `shape`."""

    def verify(self) -> Iterator[tuple[str, str]]:
        """Read every file of the checkpoint, and yield its name and what is damaged in it; "": nothing."""
        for name, check in self._checks():
            yield name, _damage(check)

    def verify_file(self, file: str) -> None:
        """Read one file of the checkpoint.

        Raises:
            Damaged: it is not as it was written.
            Unreadable: storage failed.
        """
        for name, check in self._checks():
            if name == file:
                check()

    @abc.abstractmethod
    def _checks(self) -> Iterator[tuple[str, Callable[[], object]]]:
        """Yield each file's name, and what raises a ConfigError where it is not as it was written."""

    @abc.abstractmethod
    def _chunks(self, name: str) -> Iterable[Chunk]:
        """Return the stored parts of a tensor; KeyError as `shape`."""

    def __contains__(self, name: str) -> bool:
        try:
            self.shape(name)
        except KeyError:
            return False
        return True

    def parameters(self) -> list[str]:
        """Return the names of the model's tensors."""
        return [name for name in self.names() if not is_of_optimizer(name)]

    def read(self, name: str, region: Region | None = None) -> Tensor:
        """Return a tensor, or a part of it; memory is that of the result and of one stored box.

        Args:
            region: of the whole tensor; None: all of it.

        Raises:
            KeyError: there is none of this name.
            ConfigError: a file that holds a part of it is damaged.
        """
        shape = self.shape(name)
        bounds = [each.indices(size)[:2] for each, size in zip(region or (), shape, strict=False)]
        bounds += [(0, size) for size in shape[len(bounds) :]]
        whole = torch.empty([max(0, stop - start) for start, stop in bounds], dtype=self.dtype(name))
        filled = 0
        for chunk in self._chunks(name):
            spans = [
                (max(start, offset), min(stop, offset + size))
                for (start, stop), offset, size in zip(bounds, chunk.offsets, chunk.sizes, strict=True)
            ]
            if any(start >= stop for start, stop in spans):
                continue
            ours = tuple(slice(start - low, stop - low) for (start, stop), (low, _) in zip(spans, bounds, strict=True))
            theirs = tuple(slice(start - at, stop - at) for (start, stop), at in zip(spans, chunk.offsets, strict=True))
            part = chunk.load()[theirs]
            whole[ours].copy_(part)
            filled += part.numel()
        if filled != whole.numel():
            rule = f"holds {filled} of {whole.numel()} elements of {name}"
            raise ConfigError(self.field, self.path, rule, "give an older checkpoint")
        return whole


class PlainCheckpoint(Checkpoint):
    """One that `torch.distributed.checkpoint` can read: of format 4, or (without digests) of plain torch.

    Raises:
        ConfigError: `.metadata` is damaged.
    """

    def __init__(self, path: Path, meta: Meta | None, field: str) -> None:
        super().__init__(path, meta, field)
        self._opened: dict[str, tuple[Read, Mapping[int, Extent]]] = {}
        self._last: tuple[Stored, Tensor] | None = None
        with undamaged(field, path / METADATA):
            content = (path / METADATA).read_bytes()
            if meta is not None and digest(content) != meta.digests[METADATA]:
                raise ValueError(ALTERED)
            metadata = parse_metadata(content)
            self._items = list(stored_items(metadata))
        self._boxes: dict[str, list[Stored]] = {}
        for item in self._items:
            if item.box is not None:
                self._boxes.setdefault(item.name, []).append(item)

    def names(self) -> list[str]:
        # A tied table is named twice for plain torch, whose `state_dict` has both names.
        is_tied = self.meta is not None and self.meta.model["tied_embeddings"]
        return [name for name in self._boxes if not (is_tied and name == HEAD)]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._box(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return self._box(name).dtype

    def close(self) -> None:
        self._last = None
        self._opened.clear()

    def _checks(self) -> Iterator[tuple[str, Callable[[], object]]]:
        if self.meta is not None:
            yield META, lambda: None  # or it would not be open
        yield METADATA, lambda: None
        if self.meta is not None and TOKENIZER in self.meta.digests:
            yield TOKENIZER, lambda: self.meta and self.meta.tokenizer_file
        by_file: dict[str, dict[int, Stored]] = {}
        for item in self._items:
            by_file.setdefault(item.file, {})[item.offset] = item
        listed = [] if self.meta is None else [name for name in self.meta.files if name != METADATA]
        for file in dict.fromkeys([*listed, *by_file]):
            items = [items for _, items in sorted(by_file.get(file, {}).items())]
            yield file, functools.partial(self._verify_file, file, items)

    def _verify_file(self, file: str, items: Sequence[Stored]) -> None:
        with undamaged(self.field, self.path / file):
            self._open(file)
        for item in items:
            with undamaged(self.field, self.path / file):
                content = self._content(item)
                if self.meta is None and item.box is not None:  # there are no digests
                    load_item(content)

    def _chunks(self, name: str) -> Iterator[Chunk]:
        for item in self._boxes[name]:
            assert item.box is not None
            yield Chunk(item.box.offsets, item.box.sizes, lambda item=item: self._load(item))  # type: ignore[misc]

    def _box(self, name: str) -> Box:
        box = self._boxes[name][0].box
        assert box is not None
        return box

    def _load(self, item: Stored) -> Tensor:
        # Regions that are read one after the other often lie in the same box.
        if self._last is not None and self._last[0] == item:
            return self._last[1]
        self._last = None
        with undamaged(self.field, self.path / item.file):
            tensor = load_item(self._content(item))
            if item.box is not None and tuple(tensor.shape) != item.box.sizes:
                raise ValueError(f"a box of {item.name} has shape {list(tensor.shape)}")
        self._last = item, tensor
        return tensor

    def _content(self, item: Stored) -> bytes:
        read, places = self._open(item.file)
        content = read(item.offset, item.length)
        self.bytes_read += len(content)
        if self.meta is not None:
            place = places.get(item.offset)
            if place is None or place.length != item.length or int(digest(content), 16) != place.crc:
                raise ValueError(f"{item.name} is not as it was written")
        return content

    def _open(self, file: str) -> tuple[Read, Mapping[int, Extent]]:
        if file not in self._opened:
            if Path(file).name != file:
                raise ValueError(f"{file} is not in its folder")
            size, read = file_reader(self.path / file)
            places: list[Extent] = []
            if self.meta is not None:
                trailer_digest, places = read_trailer(size, read)
                if trailer_digest != self.meta.digests[file]:
                    raise ValueError("its digests are not as they were written")
            self._opened[file] = read, {place.offset: place for place in places}
        return self._opened[file]


class OldCheckpoint(Checkpoint):
    """One of format 3: a file for each (tensor-parallel, pipeline) place, with the parts of its ranks."""

    def __init__(self, meta: Meta) -> None:
        super().__init__(meta.path, meta, meta.field)
        self._checked = meta
        self._files: dict[tuple[int, int], TensorFile] = {}
        self._parts: dict[int, dict[str, Part]] = {}
        self._places: dict[str, tuple[str, int]] = {}  # key in its file, stage
        tables = {}
        for pp in range(meta.pp):
            for key in self._file(0, pp).names():
                kind, _, parameter = key.partition("/")
                tables[kind, parameter] = pp
                name = parameter if kind == PARAMETER else state_name(parameter, kind)
                self._places[name] = key, pp
        # A tied table that both ends of a pipeline hold is one.
        if meta.model["tied_embeddings"]:
            for kind, parameter in tables:
                if parameter == HEAD and (kind, EMBEDDING) in tables:
                    del self._places[HEAD if kind == PARAMETER else state_name(HEAD, kind)]

    def names(self) -> list[str]:
        return list(self._places)

    def shape(self, name: str) -> tuple[int, ...]:
        key, pp = self._places[name]
        shape = list(self._file(0, pp).shape(key))
        parameter = key.partition("/")[2]
        part = self._parts[pp].get(parameter)
        if part is not None:
            shape[part.dim] = sum(part.sizes)
        if parameter in (EMBEDDING, HEAD):  # the rows that pad it depend on the layout
            shape[0] = int(self._checked.model["vocab_size"])
        return tuple(shape)

    def dtype(self, name: str) -> torch.dtype:
        key, pp = self._places[name]
        return self._file(0, pp).dtype(key)

    def close(self) -> None:
        for file in self._files.values():
            file.release()

    def _checks(self) -> Iterator[tuple[str, Callable[[], object]]]:
        yield META, lambda: None
        if TOKENIZER in self._checked.digests:
            yield TOKENIZER, lambda: self._checked.tokenizer_file
        for tp in range(self._checked.tp):
            for pp in range(self._checked.pp):
                yield file_name(tp, pp), functools.partial(self._verify_file, tp, pp)

    def _verify_file(self, tp: int, pp: int) -> None:
        with self._checked.undamaged(file_name(tp, pp)):
            file = self._file(tp, pp)
            for key in file.names():
                self.bytes_read += file[key].nbytes
                file.release()

    def _chunks(self, name: str) -> Iterator[Chunk]:
        key, pp = self._places[name]
        whole, part = self.shape(name), self._parts[pp].get(key.partition("/")[2])
        if part is None:  # all tensor-parallel ranks hold the same
            yield Chunk((0,) * len(whole), whole, lambda: self._read(0, pp, key))
            return
        for tp in range(self._checked.tp):
            for start, own, length in part.spans(tp, self._checked.tp):
                offsets, sizes = [0] * len(whole), list(whole)
                offsets[part.dim] = start
                sizes[part.dim] = max(0, min(length, whole[part.dim] - start))  # without the rows that pad a table

                def load(tp: int = tp, own: int = own, length: int = length) -> Tensor:
                    return self._read(tp, pp, key).narrow(part.dim, own, length)

                yield Chunk(offsets, sizes, load)

    def _read(self, tp: int, pp: int, key: str) -> Tensor:
        with self._checked.undamaged(file_name(tp, pp)):
            file = self._file(tp, pp)
            file.release()  # what was read before
            tensor = file[key]
        self.bytes_read += tensor.nbytes
        return tensor

    def _file(self, tp: int, pp: int) -> TensorFile:
        if (tp, pp) not in self._files:
            name = file_name(tp, pp)
            with self._checked.undamaged(name):
                file = TensorFile(self._checked.path / name, self._checked.digests[name])
                spread = json.loads(file.metadata[PARTS])
                if tp == 0:
                    self._parts[pp] = {name: Part(dim, tuple(sizes)) for name, (dim, sizes) in spread.items()}
                self._files[tp, pp] = file
        return self._files[tp, pp]


def _damage(read: Callable[[], object]) -> str:
    try:
        read()
    except ConfigError as exc:
        return exc.rule
    return ""


def write_checkpoint(
    path: Path,
    tensors: Iterable[tuple[str, Tensor]],
    job: JobConfig,
    *,
    step: int = 0,
    seed: int = 0,
    corpus: Mapping[str, str] | None = None,
    tokenizer: bytes | None = None,
    data: Mapping[str, Any] | None = None,
    field: str = "--out",
    file_bytes: int = _FILE_BYTES,
    extras: Mapping[str, bytes] | None = None,
) -> Path:
    """Write a whole checkpoint from one process, a tensor at a time; it appears under its name when it is whole.

    Args:
        path: of the new checkpoint, such as `.../step-000050`.
        tensors: (name, whole tensor), by the names of `Checkpoint`; the model's, and moments of the optimiser or none.
        job: of which model it is, and whose optimiser; others read it from there.
        step: steps that were taken.
        seed: that drew the samples.
        corpus: `Corpus.identity` of the text; None: it says none, and any text may follow.
        tokenizer: content of its file; None: it has none.
        data: as in `Meta`.
        field: how the user named `path`, for errors.
        file_bytes: most bytes of a file of tensors, but for one tensor.
        extras: further files by name, without digests.

    Raises:
        ConfigError: it is there already, or cannot be written.
    """
    if path.exists():
        raise ConfigError(field, path, "is there already", "give a new folder, or remove it")
    aside = path.with_name(f".{path.name}.part")
    with writing(path, field):
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        try:
            digests = _write_state(aside, tensors, job, step, file_bytes)
            if tokenizer is not None:
                digests[TOKENIZER] = digest(tokenizer)
                write_durably(aside / TOKENIZER, tokenizer)
            for name, content in (extras or {}).items():
                write_durably(aside / name, content)
            write_meta(aside, job, step, seed, corpus or {}, digests, data)
            sync_folder(aside)
            aside.replace(path)
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
        sync_folder(path.parent)
    return path


def write_meta(
    folder: Path,
    job: JobConfig,
    step: int,
    seed: int,
    corpus: Mapping[str, str],
    digests: Mapping[str, str],
    data: Mapping[str, Any] | None,
) -> None:
    """Write `meta.json`, once all other files are there."""
    write_durably(folder / META, meta_text(job, step, seed, corpus, digests, data).encode())


def meta_text(
    job: JobConfig,
    step: int,
    seed: int,
    corpus: Mapping[str, str],
    digests: Mapping[str, str],
    data: Mapping[str, Any] | None,
) -> str:
    """Return the text of `meta.json`; arguments are those of `Meta`."""
    numbers = {"format": FORMAT, "step": step, "seed": seed, "tp": job.parallel.tp, "pp": job.parallel.pp}
    facts = {**numbers, "corpus": dict(corpus), "job": job.model_dump(mode="json"), "digests": dict(digests)}
    if data is not None:
        facts["data"] = data
    return sealed(facts)


def write_durably(path: Path, content: bytes) -> None:
    """Write a file, and have it on the disk."""
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _write_state(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], job: JobConfig, step: int, file_bytes: int
) -> dict[str, str]:
    """Write tensors, and the settings of the optimiser for parameters that it has stepped; return digests of files."""
    stepped: dict[str, tuple[int, ...]] = {}  # their shapes
    names: set[str] = set()

    def seen() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            names.add(name)
            if (of_state := split_state_name(name)) and tensor.ndim:
                stepped[of_state[0]] = tuple(tensor.shape)
            yield name, tensor

    def settings(writer: ItemWriter, file: str) -> Iterator[Stored]:
        return write_settings(writer, file, stepped, job, step, names)

    return write_items(folder, seen(), tied_names(job), file_bytes, settings)


def write_items(
    folder: Path,
    tensors: Iterable[tuple[str, Tensor]],
    aliases: Mapping[str, str],
    file_bytes: int = _FILE_BYTES,
    more: Callable[[ItemWriter, str], Iterable[Stored]] = lambda _writer, _file: (),
) -> dict[str, str]:
    """Write files of tensors and `.metadata`, a tensor at a time; return the digests of these files.

    Args:
        aliases: further names of a tensor, and under which it is stored.
        file_bytes: most bytes of a file, but for one tensor.
        more: writes what comes last into the last file.
    """
    stored: list[Stored] = []
    digests: dict[str, str] = {}
    source = iter(tensors)
    pair = next(source, None)
    for number in itertools.count():
        name = file_of(0, number)
        with (folder / name).open("wb") as stream:
            writer = ItemWriter(stream)
            try:
                while pair is not None and (not writer.num_bytes or writer.num_bytes + pair[1].nbytes <= file_bytes):
                    stored += _write_tensor(writer, name, *pair)
                    pair = next(source, None)
                if pair is None:
                    stored += more(writer, name)
                digests[name] = writer.finish()
            finally:
                writer.close()
            stream.flush()
            os.fsync(stream.fileno())
        if pair is None:
            break
    metadata = metadata_bytes(stored, aliases)
    write_durably(folder / METADATA, metadata)
    return {METADATA: digest(metadata), **digests}


def tied_names(job: JobConfig) -> dict[str, str]:
    """Return the second name of a tied token table, and the one under which it is stored: `state_dict` has both."""
    return {HEAD: EMBEDDING} if job.model.tied_embeddings else {}


def _write_tensor(writer: ItemWriter, file: str, name: str, tensor: Tensor) -> Iterator[Stored]:
    shape = tuple(tensor.shape)
    for box in small_boxes(Box(name, shape, tensor.dtype, (0,) * len(shape), shape)):
        part = tensor[box.offsets[0] : box.offsets[0] + box.sizes[0]] if shape else tensor
        before, after = frame(box.dtype, box.sizes)
        place = writer.add([before, elements_of(part), after])
        yield Stored(name, box, file, place.offset, place.length)


def write_settings(
    writer: ItemWriter,
    file: str,
    shapes: Mapping[str, tuple[int, ...]],
    job: JobConfig,
    step: int,
    present: Iterable[str] = (),
) -> Iterator[Stored]:
    """Write the number of steps and the settings of the optimiser for each parameter; equal values lie there once.

    Args:
        shapes: of the parameters that have moments.
        present: names that are stored already.
    """
    places: dict[bytes, Extent] = {}
    skipped, lr = set(present), learning_rate(job.optimizer, max(step, 1))
    settings = {is_matrix: optimizer_settings(job.optimizer, is_matrix, lr) for is_matrix in (False, True)}
    count = torch.tensor(float(step))
    for parameter, shape in shapes.items():
        values: dict[str, Any] = {state_name(parameter, "step"): count}
        values |= {setting_name(parameter, key): value for key, value in settings[len(shape) > 1].items()}
        for name, value in values.items():
            if name in skipped:
                continue
            content = saved(value)
            if content not in places:
                places[content] = writer.add([content])
            place = places[content]
            box = Box(name, (), count.dtype, (), ()) if isinstance(value, Tensor) else None
            yield Stored(name, box, file, place.offset, place.length)
