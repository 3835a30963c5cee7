"""Checkpoints that any layout can go on from: parameters and optimiser state by the whole model's names.

A checkpoint is a folder `step-000050` with a file for each (tensor-parallel, pipeline) place, written by its first
data-parallel rank, and `meta.json`. The folder gets its name when all of it is on the disk, so one that has the name is
whole. Left out: writing beside the training (ranks wait), and ranks that do not see the same folder.
"""

from __future__ import annotations

import itertools
import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from collectives.sharded import ShardedDataParallel
from collectives.state import gather_whole, own_pieces
from netlayer.errors import CheckFailed, ConfigError
from netlayer.results import write_text
from trainer.checkpoint_meta import FORMAT, META, Meta, checkpoints_in, file_name
from trainer.linears import Part, parts
from trainer.parallel import Optimizers, SplitModel

_MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW and of LAMB; beside them `step`
_EMBEDDING, _HEAD = "embedding.tokens.weight", "head.tokens.weight"


def save(model: SplitModel, optimizers: Optimizers, step: int, seed: int, folder: Path) -> Path:
    """Write `folder/step-NNNNNN` after `step` steps; every rank calls it. The newest `checkpoint.keep` stay."""
    path, place = folder / f"step-{step:06d}", model.place
    aside = folder / f".{path.name}.part"
    content = _content(model, optimizers, step)  # collective, whoever writes
    if place.dp == 0:
        aside.mkdir(parents=True, exist_ok=True)
        with (aside / file_name(place.tp, place.pp)).open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
    model.wait_for_all()
    if place == (0, 0, 0):
        for tp, pp in itertools.product(range(model.layout.tp), range(model.layout.pp)):
            if not (aside / file_name(tp, pp)).is_file():
                raise CheckFailed(f"{aside / file_name(tp, pp)} is not there: ranks write to one folder that all see")
        meta = {"format": FORMAT, "step": step, "seed": seed, "tp": model.layout.tp, "pp": model.layout.pp}
        write_text(aside / META, json.dumps({**meta, "job": model.job.model_dump(mode="json")}, indent=1) + "\n")
        shutil.rmtree(path, ignore_errors=True)
        aside.replace(path)
        for old in checkpoints_in(folder)[: -model.job.checkpoint.keep]:
            if old != path:
                shutil.rmtree(old, ignore_errors=True)
    model.wait_for_all()
    return path


def load(meta: Meta, model: SplitModel, optimizers: Optimizers) -> None:
    """Set parameters, masters and optimiser state of this rank's chunks; every rank calls it.

    Raises:
        ConfigError: it is of another model, or damaged.
    """
    _check_model(meta, model)
    files = _Files(meta, model)
    for chunk, optimizer in zip(model.chunks, optimizers.each, strict=True):
        cut = parts(chunk.module)
        names = chunk.module.state_dict(keep_vars=True)
        chunk.load_full_state_dict({name: files.local("parameter", name, cut.get(name)) for name in names})
        for key in _MOMENTS:
            whole = {name: files.local(key, name, cut.get(name)) for name in chunk.shapes()}
            for piece, own in (pair for bucket in chunk.buckets for pair in own_pieces(bucket, whole.__getitem__)):
                state = optimizer.state[piece.parameter]
                state[key] = own.to(piece.parameter).clone()
                state["step"] = torch.tensor(float(meta.step), device=piece.parameter.device)


class _Files:
    """The files of a checkpoint, opened when they are needed; of a file only what is read comes into memory."""

    def __init__(self, meta: Meta, model: SplitModel) -> None:
        self._meta, self._model = meta, model
        self._open: dict[tuple[int, int], Mapping[str, Any]] = {}

    def local(self, kind: str, name: str, part: Part | None) -> Tensor:
        """This rank's part of a parameter or of one of its moments, however it was spread when it was written."""
        name, pp = self._where(kind, name)
        pieces: list[Tensor] = [self._file(tp, pp)["tensors"][kind][name] for tp in range(self._meta.tp)]
        cut = self._file(0, pp)["parts"].get(name)
        if part is None or cut is None:
            return pieces[0]
        whole = Part(cut[0], tuple(cut[1])).join(pieces)
        if name in (_EMBEDDING, _HEAD):  # the rows that pad it depend on the layout
            vocab_size = self._model.job.model.vocab_size
            whole = F.pad(whole[:vocab_size], (0, 0, 0, part.sizes[0] - vocab_size))
        exchange = self._model.exchange
        return whole if exchange is None else part.local(whole, exchange.rank, exchange.world_size)

    def _where(self, kind: str, name: str) -> tuple[str, int]:
        """By which name it was written, and on which pipeline stage: a tied table may stand under either of two."""
        other = {_EMBEDDING: _HEAD, _HEAD: _EMBEDDING}.get(name, name)
        for each, pp in itertools.product((name, other), range(self._meta.pp)):
            if each in self._file(0, pp)["tensors"][kind]:
                return each, pp
        raise ConfigError("--resume", self._meta.path, f"lacks {name}", "give an older checkpoint")

    def _file(self, tp: int, pp: int) -> Mapping[str, Any]:
        if (tp, pp) not in self._open:
            path = self._meta.path / file_name(tp, pp)
            try:
                self._open[tp, pp] = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
            except Exception as exc:  # torch raises what its parser of the day does
                raise ConfigError("--resume", path, f"is damaged ({exc!r})", "give an older checkpoint") from exc
        return self._open[tp, pp]


def _content(model: SplitModel, optimizers: Optimizers, step: int) -> dict[str, Any]:
    tensors: dict[str, dict[str, Tensor]] = {"parameter": {}, **{key: {} for key in _MOMENTS}}
    spread: dict[str, tuple[int, tuple[int, ...]]] = {}
    for chunk, optimizer in zip(model.chunks, optimizers.each, strict=True):
        for kind, found in tensors.items():
            found |= _whole(kind, chunk, optimizer, keeps=model.place.dp == 0)
        spread |= {name: (part.dim, part.sizes) for name, part in parts(chunk.module).items()}
    return {"step": step, "tensors": tensors, "parts": spread}


def _whole(
    kind: str, chunk: ShardedDataParallel, optimizer: torch.optim.Optimizer, *, keeps: bool
) -> dict[str, Tensor]:
    """Of one chunk, on the CPU of the rank that writes; collective over the data-parallel group."""

    def value(piece: Any) -> Tensor:
        if kind == "parameter":
            return piece.parameter.detach()  # type: ignore[no-any-return]
        moment: Tensor = optimizer.state[piece.parameter][kind]
        return moment

    found = gather_whole(chunk.buckets, chunk.gather_lane, value)
    return {name: tensor.to("cpu", copy=True) for name, tensor in found.items()} if keeps else {}


def _check_model(meta: Meta, model: SplitModel) -> None:
    """Another model would load in part, or not at all, with torch's words."""
    free = {"preset", "dtype", "compile", "recompute"}  # what does not change shapes and meaning
    for name, value in model.job.model.model_dump(mode="json").items():
        if name not in free and meta.model.get(name) != value:
            rule = f"is of a model with {name} = {meta.model.get(name)}, and the job has {value}"
            raise ConfigError("--resume", meta.path, rule, f"set job.model.{name} to that")
