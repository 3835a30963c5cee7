"""Checkpoints that any layout can go on from: parameters and optimiser state by the whole model's names.

A checkpoint is a folder `step-000050` with a file for each (tensor-parallel, pipeline) place, written by its first
data-parallel rank, the tokenizer, and `meta.json`. State travels one bucket at a time, from the shards into the file
and back. Left out: writing beside the training (ranks wait), and ranks that do not see the same folder.

[Note: whole or not there] All of it is made durable (fsync: files, then their folder) under a name that begins with a
dot, then the folder is renamed, then the rename is made durable. An older one is renamed away before it is removed. So
a folder that has a checkpoint's name is whole, whenever the process or the power goes.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from collectives.bucket import Piece
from collectives.exchange import TensorExchange
from collectives.state import gather_whole, own_pieces
from netlayer.errors import CheckFailed, ConfigError
from netlayer.results import sync_folder
from trainer.checkpoint_file import TensorFile, TensorWriter
from trainer.checkpoint_meta import FORMAT, META, TOKENIZER, Meta, check_model, checkpoints_in, file_name
from trainer.data.prepare import Corpus
from trainer.linears import Part, parts
from trainer.parallel import Optimizers, SplitModel

PARAMETER = "parameter"
_MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW and of LAMB; beside them `step`
_EMBEDDING, _HEAD = "embedding.tokens.weight", "head.tokens.weight"
_PARTS = "parts"


def save(
    model: SplitModel, optimizers: Optimizers, step: int, seed: int, folder: Path, corpus: Corpus | None = None
) -> Path:
    """Write `folder/step-NNNNNN` after `step` steps; every rank calls it. The newest `checkpoint.keep` stay.

    Args:
        corpus: trained on; its tokenizer goes with the parameters.
    """
    path, place = folder / f"step-{step:06d}", model.place
    aside = folder / f".{path.name}.part"
    is_first = place == (0, 0, 0)
    if is_first:
        _clear(folder)
        aside.mkdir(parents=True)
    model.wait_for_all()
    _write(model, optimizers, aside / file_name(place.tp, place.pp))
    model.wait_for_all()
    if is_first:
        for tp, pp in itertools.product(range(model.layout.tp), range(model.layout.pp)):
            if not (aside / file_name(tp, pp)).is_file():
                raise CheckFailed(f"{aside / file_name(tp, pp)} is not there: ranks write to one folder that all see")
        meta: dict[str, Any] = {
            "format": FORMAT,
            "step": step,
            "seed": seed,
            "tp": model.layout.tp,
            "pp": model.layout.pp,
        }
        meta |= {"corpus": {} if corpus is None else corpus.identity, "job": model.job.model_dump(mode="json")}
        if corpus is not None:
            _write_durably(aside / TOKENIZER, corpus.tokenizer_file.read_bytes())
        _write_durably(aside / META, (json.dumps(meta, indent=1) + "\n").encode())
        sync_folder(aside)
        if path.exists():
            path.replace(folder / f".{path.name}.old")
        aside.replace(path)
        sync_folder(folder)
        for old in checkpoints_in(folder)[: -model.job.checkpoint.keep]:
            if old != path:
                old.replace(folder / f".{old.name}.old")
        _clear(folder)
    model.wait_for_all()
    return path


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
        """This rank's part of a parameter or of one of its moments, however it was spread when it was written.

        Raises:
            ConfigError: it is not there, or its file is damaged.
        """
        name, pp = self._where(kind, name)
        pieces = [self._file(tp, pp)[_key(kind, name)] for tp in range(self._meta.tp)]
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
        """By which name it was written, and on which pipeline stage: a tied table may stand under either of two."""
        other = {_EMBEDDING: _HEAD, _HEAD: _EMBEDDING}.get(name, name)
        for each, pp in itertools.product((name, other), range(self._meta.pp)):
            if _key(kind, each) in self._file(0, pp):
                return each, pp
        raise ConfigError(self._meta.field, self._meta.path, f"lacks {name}", "give an older checkpoint")

    def _file(self, tp: int, pp: int) -> TensorFile:
        if (tp, pp) not in self._open:
            path = self._meta.path / file_name(tp, pp)
            try:
                self._open[tp, pp] = file = TensorFile(path)
                spread = json.loads(file.metadata[_PARTS])
                self._parts[tp, pp] = {name: Part(dim, tuple(sizes)) for name, (dim, sizes) in spread.items()}
            except (OSError, ValueError, LookupError, TypeError, AttributeError) as exc:
                raise ConfigError(self._meta.field, path, f"is damaged ({exc!r})", "give an older checkpoint") from exc
        return self._open[tp, pp]


def _write(model: SplitModel, optimizers: Optimizers, path: Path) -> None:
    """The state of this place, by its first data-parallel rank; the others send theirs."""
    states = _states(model, optimizers)
    if model.place.dp:
        for _ in states:
            pass
        return
    kinds = (PARAMETER, *_MOMENTS)
    names = [(_key(kind, n), shape) for chunk in model.chunks for kind in kinds for n, shape in chunk.shapes().items()]
    cut = {name: part for chunk in model.chunks for name, part in parts(chunk.module).items()}
    spread = json.dumps({name: (part.dim, part.sizes) for name, part in cut.items()})
    dtype = model.chunks[0].buckets[0].master_S.dtype
    with TensorWriter(path, names, dtype, {_PARTS: spread}) as writer:
        for name, whole in states:
            writer.add(name, whole)
    sync_folder(path.parent)


def _states(model: SplitModel, optimizers: Optimizers) -> Iterator[tuple[str, Tensor]]:
    """Everything that is kept, whole by data-parallel ranks, a bucket at a time; collective over them."""
    for chunk, optimizer in zip(model.chunks, optimizers.each, strict=True):
        for kind in (PARAMETER, *_MOMENTS):
            for name, whole in gather_whole(chunk.buckets, chunk.gather_lane, _value_of(kind, optimizer)):
                yield _key(kind, name), whole


def _value_of(kind: str, optimizer: torch.optim.Optimizer) -> Callable[[Piece], Tensor]:
    def value(piece: Piece) -> Tensor:
        held: Tensor = piece.parameter if kind == PARAMETER else optimizer.state[piece.parameter][kind]
        return held.detach()

    return value


def _key(kind: str, name: str) -> str:
    return f"{kind}/{name}"


def _write_durably(path: Path, content: bytes) -> None:
    with path.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def _clear(folder: Path) -> None:
    """Remove what is no checkpoint: halves of runs that were killed, and what has been replaced."""
    for path in (*folder.glob(".step-*.part"), *folder.glob(".step-*.old")):
        shutil.rmtree(path, ignore_errors=True)
