"""Checkpoints that any layout can go on from: parameters and optimiser state by the whole model's names.

A checkpoint is a folder `step-000050` with a file for each (tensor-parallel, pipeline) place, written by its first
data-parallel rank, the tokenizer, and `meta.json`. State travels one bucket at a time, from the shards into the file
and back. Not covered: writing beside the training (ranks wait), and ranks that do not see the same folder.

[Note: whole or not there] All of it is made durable (fsync: files, then their folder) under a name that begins with a
dot, then the folder is renamed, then the rename is made durable. An older one is renamed away before it is removed. So
a folder that has a checkpoint's name is whole, whenever the process or the power goes. Until it is verified, that
name ends in `.new`: its update may have broken the parameters, which only what is computed with them shows. What is
damaged later is noticed when it is read (`trainer.checkpoint.digest`).

[Note: no room] A disk that is full on one rank is no rank's end: who cannot write goes on to take part in the gathers,
all ranks agree on it, the part is removed, and `save` raises `NoRoom` on all of them alike. What fails for any other
reason ends the run.
"""

from __future__ import annotations

import contextlib
import errno
import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from collectives.sharded.bucket import Piece
from collectives.sharded.state import gather_whole, own_pieces
from collectives.tensor.exchange import TensorExchange
from netlayer.errors import FULL_DISK, CheckFailed, ConfigError
from netlayer.results import sync_folder, writing
from netlayer.units import format_size
from netlayer.workload.model_size import stage_elements
from trainer.checkpoint.digest import digest
from trainer.checkpoint.file import TensorFile, TensorWriter, header_digest
from trainer.checkpoint.meta import (
    META,
    OLD_FORMAT,
    PENDING,
    TOKENIZER,
    Meta,
    check_model,
    checkpoints_in,
    file_name,
    halves_in,
    sealed,
)
from trainer.data.prepare import Corpus
from trainer.model.linears import Part, parts
from trainer.notes import every_ranks
from trainer.parallel import Optimizers, SplitModel

PARAMETER = "parameter"
_MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW and of LAMB, which also have `step`
_EMBEDDING, _HEAD = "embedding.tokens.weight", "head.tokens.weight"
_PARTS = "parts"


@dataclass(frozen=True)
class Text:
    """Parts of a corpus that are saved with the parameters: the tokenizer's file, and `Corpus.identity`."""

    tokenizer: bytes
    identity: Mapping[str, str]

    @classmethod
    def of(cls, corpus: Corpus) -> Text:
        """Read at once: a cache of corpora may drop this one while its run still trains on what it has open."""
        return cls(corpus.tokenizer_file.read_bytes(), corpus.identity)


class NoRoom(ConfigError):
    """A checkpoint did not fit where it goes; nothing of it is left. The same on all ranks."""


def save(
    model: SplitModel,
    optimizers: Optimizers,
    step: int,
    seed: int,
    folder: Path,
    text: Text | None = None,
    data: Mapping[str, Any] | None = None,
) -> Path:
    """Write `folder/step-NNNNNN.new` after `step` steps; every rank calls it. `commit` makes it a good one.

    Args:
        text: trained on.
        data: as in `Meta`.

    Raises:
        NoRoom: the disk is full, or will be; on all ranks alike.
        ConfigError: it cannot be written for another reason; the next one removes what is left of it.
    """
    path, place = folder / f"step-{step:06d}{PENDING}", model.place
    aside = folder / f".step-{step:06d}.part"
    is_first = place == (0, 0, 0)
    room = _Room(model, path)
    try:
        with writing(good_name(path), "--out"):
            if is_first:
                with room.watched():
                    _clear(folder)
                    aside.mkdir(parents=True)
                    room.check(folder)
            room.agree()
            _write(model, optimizers, aside / file_name(place.tp, place.pp), room)
            room.agree()
            if is_first:
                with room.watched():
                    _write_meta(model, aside, step, seed, text, data)
                    _rename(aside, path)
            room.agree()
    except BaseException:
        if is_first:
            shutil.rmtree(aside, ignore_errors=True)
        else:  # the rest of the folder may be under way to its name
            (aside / file_name(place.tp, place.pp)).unlink(missing_ok=True)
        raise
    return path


class _Room:
    """Whether every rank has found room for its part of a checkpoint: [Note: no room].

    Args:
        path: of the checkpoint.
    """

    def __init__(self, model: SplitModel, path: Path) -> None:
        self._model, self._path = model, path
        self._refused = 0  # errno of this rank
        self._free_bytes = -1  # where the first rank does not know

    @contextlib.contextmanager
    def watched(self) -> Iterator[None]:
        """Write in the block: a full disk is noted, and ends the block there."""
        try:
            yield
        except OSError as exc:
            if exc.errno not in FULL_DISK:
                raise
            self._refused = exc.errno or errno.ENOSPC

    def check(self, folder: Path) -> None:
        """Refuse what cannot fit before any of it is written: a disk filled to the brim hurts others too.

        Raises:
            OSError: the disk says that it has less room than is needed.
        """
        usage = shutil.disk_usage(folder)
        if not usage.total:  # some network file systems do not say
            return
        self._free_bytes = usage.free
        if usage.free < self.needed_bytes:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    @property
    def needed_bytes(self) -> int:
        """Return the bytes of all files of tensors together: a parameter and two moments an element."""
        job, width = self._model.job, self._model.chunks[0].buckets[0].master_S.itemsize
        elements = sum(stage_elements(job, stage) for stage in range(job.parallel.pp)) * job.parallel.tp
        return elements * width * (1 + len(_MOMENTS))

    def agree(self) -> None:
        """Wait for all ranks.

        Raises:
            NoRoom: one of them has found none.
        """
        refused = round(max(every_ranks(self._model, float(self._refused))))
        if not refused:
            return
        free_bytes = round(every_ranks(self._model, float(self._free_bytes))[0])
        free = f", {format_size(free_bytes)} were free" if free_bytes >= 0 else ""
        rule = f"cannot be written ({os.strerror(refused)}): it needs {format_size(self.needed_bytes)}{free}"
        raise NoRoom("--out", good_name(self._path), rule, "make room there, or give another place")


def good_name(path: Path) -> Path:
    """Return the path that a checkpoint of `save` has once it is verified."""
    return path.with_name(path.name.removesuffix(PENDING))


def commit(path: Path, keep: int) -> None:
    """Rename a pending checkpoint of `save` to a good one, and keep the newest `keep` alone. One rank calls it.

    Raises:
        ConfigError: the system refuses it.
    """
    folder, good = path.parent, good_name(path)
    with writing(good, "--out"):
        _rename(path, good)
        for old in checkpoints_in(folder)[:-keep]:
            if old != good:
                old.replace(_old(old))
        _clear(folder)


@torch.no_grad()
def load(meta: Meta, model: SplitModel, optimizers: Optimizers) -> None:
    """Set parameters, masters and optimiser state of this rank's chunks; every rank calls it.

    Raises:
        ConfigError: it is of another model, or damaged.
    """
    check_model(meta, model.job)
    files = Files(meta, model.exchange)
    for chunk, optimizer in zip(model.chunks, optimizers.each, strict=True):
        cut = parts(chunk.module)
        chunk.load_parameters(files.by_name(PARAMETER, cut))
        for key, bucket in itertools.product(_MOMENTS, chunk.buckets):
            for piece, own in own_pieces(bucket, files.by_name(key, cut)):
                state = optimizer.state[piece.parameter]
                state[key] = torch.empty_like(piece.parameter.detach()).copy_(own)
                state["step"] = torch.tensor(float(meta.step), device=piece.parameter.device)


class Files:
    """The files of a checkpoint, opened when they are needed; of a file only what is read comes into memory.

    Args:
        meta: of the checkpoint.
        exchange: of the tensor-parallel group that reads it; None: whole tensors are wanted.
    """

    def __init__(self, meta: Meta, exchange: TensorExchange | None) -> None:
        self._meta, self._exchange = meta, exchange
        self._open: dict[tuple[int, int], TensorFile] = {}
        self._parts: dict[tuple[int, int], dict[str, Part]] = {}

    def by_name(self, kind: str, cut: Mapping[str, Part]) -> Callable[[str], Tensor]:
        """`local` of one kind, for parameters that are spread as `cut` says."""
        return lambda name: self.local(kind, name, cut.get(name))

    def local(self, kind: str, name: str, part: Part | None) -> Tensor:
        """Return this rank's part of a parameter or of one of its moments, whatever the layout was at its save.

        Raises:
            ConfigError: it is not there, or its file is damaged.
        """
        name, pp = self._where(kind, name)
        pieces = [self._read(tp, pp, _key(kind, name)) for tp in range(self._meta.tp)]
        cut = self._parts[0, pp].get(name)
        if part is None or cut is None:
            return pieces[0]
        whole = cut.join(pieces) if len(pieces) > 1 else pieces[0]
        if name in (_EMBEDDING, _HEAD):  # the rows that pad it depend on the layout
            vocab_size = int(self._meta.model["vocab_size"])
            whole = F.pad(whole[:vocab_size], (0, 0, 0, part.sizes[0] - vocab_size))
        exchange = self._exchange
        return whole if exchange is None else part.local(whole, exchange.rank, exchange.world_size)

    def _where(self, kind: str, name: str) -> tuple[str, int]:
        """Return the saved name and pipeline stage of a parameter: a tied table may have either of two names."""
        other = {_EMBEDDING: _HEAD, _HEAD: _EMBEDDING}.get(name, name)
        for each, pp in itertools.product((name, other), range(self._meta.pp)):
            if _key(kind, each) in self._file(0, pp):
                return each, pp
        raise ConfigError(self._meta.field, self._meta.path, f"lacks {name}", "give an older checkpoint")

    def _read(self, tp: int, pp: int, key: str) -> Tensor:
        with self._meta.undamaged(file_name(tp, pp)):
            return self._file(tp, pp)[key]

    def _file(self, tp: int, pp: int) -> TensorFile:
        if (tp, pp) not in self._open:
            name = file_name(tp, pp)
            with self._meta.undamaged(name):
                self._open[tp, pp] = file = TensorFile(self._meta.path / name, self._meta.digests[name])
                spread = json.loads(file.metadata[_PARTS])
                self._parts[tp, pp] = {name: Part(dim, tuple(sizes)) for name, (dim, sizes) in spread.items()}
        return self._open[tp, pp]


def _write(model: SplitModel, optimizers: Optimizers, path: Path, room: _Room) -> None:
    """The state of this place, by its first data-parallel rank; the others send theirs."""
    states = _states(model, optimizers)
    if model.place.dp == 0:
        kinds = (PARAMETER, *_MOMENTS)
        shapes = [(kind, chunk.shapes().items()) for chunk in model.chunks for kind in kinds]
        names = [(_key(kind, name), shape) for kind, of_chunk in shapes for name, shape in of_chunk]
        cut = {name: part for chunk in model.chunks for name, part in parts(chunk.module).items()}
        spread = json.dumps({name: (part.dim, part.sizes) for name, part in cut.items()})
        dtype = model.chunks[0].buckets[0].master_S.dtype
        with room.watched():
            with TensorWriter(path, names, dtype, {_PARTS: spread}) as writer:
                for name, whole in states:
                    writer.add(name, whole)
            sync_folder(path.parent)
    for _ in states:  # of a rank that does not write, or cannot: the others gather with it
        pass


def _write_meta(
    model: SplitModel, aside: Path, step: int, seed: int, text: Text | None, data: Mapping[str, Any] | None
) -> None:
    """The tokenizer, and what `Meta` says; the files of tensors are there."""
    digests = {}
    for tp, pp in itertools.product(range(model.layout.tp), range(model.layout.pp)):
        name = file_name(tp, pp)
        if not (aside / name).is_file():
            raise CheckFailed(f"{aside / name} is not there: ranks write to one folder that all see")
        digests[name] = header_digest(aside / name)
    if text is not None:
        digests[TOKENIZER] = digest(text.tokenizer)
        _write_durably(aside / TOKENIZER, text.tokenizer)
    numbers = {"format": OLD_FORMAT, "step": step, "seed": seed, "tp": model.layout.tp, "pp": model.layout.pp}
    identity = {} if text is None else text.identity
    facts = {**numbers, "corpus": identity, "job": model.job.model_dump(mode="json"), "digests": digests}
    if data is not None:
        facts["data"] = data
    _write_durably(aside / META, sealed(facts).encode())
    sync_folder(aside)


def _rename(path: Path, target: Path) -> None:
    if target.exists():
        target.replace(_old(target))
    path.replace(target)
    sync_folder(target.parent)


def _old(path: Path) -> Path:
    """Return the path of a replaced checkpoint, which `_clear` removes."""
    return path.with_name(f".{path.name}.old")


def _states(model: SplitModel, optimizers: Optimizers) -> Iterator[tuple[str, Tensor]]:
    """Everything that is kept, whole by data-parallel ranks, a bucket at a time; collective over them."""
    for chunk, optimizer in zip(model.chunks, optimizers.each, strict=True):
        for kind in (PARAMETER, *_MOMENTS):
            for name, whole in gather_whole(chunk.buckets, chunk.gather_lane, _value_of(kind, optimizer)):
                yield _key(kind, name), whole


def _value_of(kind: str, optimizer: torch.optim.Optimizer) -> Callable[[Piece], Tensor]:
    def value(piece: Piece) -> Tensor:
        tensor: Tensor = piece.parameter if kind == PARAMETER else optimizer.state[piece.parameter][kind]
        return tensor.detach()

    return value


def _key(kind: str, name: str) -> str:
    return f"{kind}/{name}"


def _write_durably(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _clear(folder: Path) -> None:
    """Remove what is no checkpoint, and of this run alone: no other has entered its folder."""
    for path in halves_in(folder):
        shutil.rmtree(path, ignore_errors=True)
