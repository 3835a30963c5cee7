"""Restores the state of a rank from a checkpoint of any layout.

Parameters are the same on all ranks of a data-parallel group, so each is read by one of them, in turns, and broadcast
over the group: storage gives each byte once a group, however many replicas there are. Moments of the optimiser are one
rank's alone, and it reads them itself. Not covered: ranks that do not see the same folder.

[Note: damage] A rank that meets it goes on to take part in the broadcasts, and all ranks raise at the end, alike.
"""

from __future__ import annotations

import itertools
import json
import logging
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from torch import Tensor

from collectives.sharded.data_parallel import ShardedDataParallel
from collectives.sharded.state import own_range
from netlayer.errors import ConfigError
from netlayer.units import format_size
from trainer.checkpoint.dcp import state_name
from trainer.checkpoint.meta import Damaged, Meta, Unreadable, check_model
from trainer.checkpoint.reader import EMBEDDING, HEAD, Checkpoint, open_found
from trainer.checkpoint.snapshot import MOMENTS, whole_boxes
from trainer.model.linears import Part, parts
from trainer.parallel import Optimizers, ParallelModel

logger = logging.getLogger(__name__)

_READ_AHEAD = 2  # parameters that a rank has read before it is their turn


@dataclass(frozen=True)
class Restored:
    """Bytes that came from storage, of all ranks together.

    Args:
        parameters: once for each group of replicas.
        moments: of the optimiser, by their owners.
        seconds: of this rank.
    """

    parameters: int
    moments: int
    seconds: float


@torch.no_grad()
def load(meta: Meta, model: ParallelModel, optimizers: Optimizers, *, model_only: bool = False) -> Restored:
    """Set parameters, masters and optimiser state of this rank's chunks; every rank calls it.

    Args:
        model_only: leave the optimiser as it is.

    Raises:
        ConfigError: it is of another model; on all ranks alike, as all of these.
        Damaged: it is not as it was written.
        Unreadable: storage failed.
    """
    check_model(meta, model.job)
    begun_s, errors = time.monotonic(), list[ConfigError]()
    with open_found(meta) as checkpoint:
        reader = _Reader(checkpoint, model, errors)
        for chunk in model.chunks:
            reader.load_parameters(chunk)
        parameters = checkpoint.bytes_read
        if not model_only:
            for chunk, optimizer in zip(model.chunks, optimizers.each, strict=True):
                reader.load_moments(chunk, optimizer, meta.step)
        moments = checkpoint.bytes_read - parameters
    raise_on_all(model, errors)
    totals = model.world.all_gather_ints([parameters, moments], "checkpoint")
    restored = Restored(sum(p for p, _ in totals), sum(m for _, m in totals), time.monotonic() - begun_s)
    if model.world.rank == 0:
        line = "restored step %d: %s of parameters, %s of the optimiser from storage in %.1f s"
        sizes = format_size(restored.parameters), format_size(restored.moments)
        logger.info(line, meta.step, *sizes, restored.seconds)
    return restored


def raise_on_all(model: ParallelModel, errors: Sequence[ConfigError]) -> None:
    """Raise the first error of the lowest rank that has one, on every rank; every rank calls it."""
    own = (
        json.dumps([type(e).__name__, *(str(part) for part in (e.field, e.value, e.rule, e.remedy))])
        if (e := next(iter(errors), None))
        else ""
    )
    texts = model.world.all_gather_text(own, "checkpoint")
    if text := next(filter(None, texts), None):
        kind, *parts = json.loads(text)
        # The class says whether another start may help (`Unreadable`), and whether the files are at fault (`Damaged`).
        raise {each.__name__: each for each in (Damaged, Unreadable)}.get(kind, ConfigError)(*parts)


class _Reader:
    """Reads what a rank needs; an error is noted, and zeros come."""

    def __init__(self, checkpoint: Checkpoint, model: ParallelModel, errors: list[ConfigError]) -> None:
        self._checkpoint, self._model, self._errors = checkpoint, model, errors
        self._vocab_size = model.job.model.vocab_size

    def load_parameters(self, chunk: ShardedDataParallel) -> None:
        """Read those whose turn it is on this rank, and broadcast each to the group."""
        comm, cut = chunk.gather_comm, parts(chunk.module)
        shapes = chunk.shapes()
        turns = {name: index % comm.world_size for index, name in enumerate(shapes)}
        dtype = chunk.buckets[0].master_S.dtype
        with ThreadPoolExecutor(1, "reads a checkpoint") as thread:
            own = (name for name, turn in turns.items() if turn == comm.rank)
            ahead: dict[str, Future[Tensor]] = {}

            def read_ahead() -> None:
                for name in itertools.islice(own, _READ_AHEAD - len(ahead)):
                    shape = shapes[name]
                    ahead[name] = thread.submit(self.part, name, name, shape, cut.get(name), 0, shape.numel())

            def whole(name: str) -> Tensor:
                read_ahead()
                values = torch.empty(shapes[name], dtype=dtype, device=self._model.device)
                if turns[name] == comm.rank:
                    values.copy_(ahead.pop(name).result().view(shapes[name]))
                    read_ahead()
                if comm.world_size > 1:
                    comm.broadcast(values, turns[name])
                return values

            chunk.load_parameters(whole)

    def load_moments(self, chunk: ShardedDataParallel, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Read the moments of this rank's pieces."""
        cut = parts(chunk.module)
        for key, bucket in itertools.product(MOMENTS, chunk.buckets):
            for piece in bucket.pieces:
                span, parameter, state = own_range(bucket, piece), piece.parameter, optimizer.state[piece.parameter]
                name = piece.name
                own = self.part(name, state_name("{}", key), piece.shape, cut.get(name), span.start, span.stop)
                state[key] = torch.empty_like(parameter.detach()).copy_(own.view(parameter.shape))
                state["step"] = torch.tensor(float(step), device=parameter.device)

    def part(self, name: str, stored: str, shape: Sequence[int], part: Part | None, start: int, end: int) -> Tensor:
        """Return the elements `start`..`end` of this rank's part of a parameter, or of one of its moments, 1-D.

        Args:
            stored: name of what is read, with `{}` for the parameter's.
        """
        tp = self._model.place.tp, self._model.layout.tp
        try:
            key = self._stored_name(name, stored)
            values = torch.zeros(end - start, dtype=self._checkpoint.dtype(key))
            for offsets, sizes, first, last in whole_boxes(shape, part, *tp, start, end):
                region = [slice(at, at + size) for at, size in zip(offsets, sizes, strict=True)]
                read = self._checkpoint.read(key, region).flatten()
                # Shorter where rows pad a vocabulary: they depend on the layout, and are zero.
                values[first - start : first - start + read.numel()] = read
                assert first + read.numel() <= last
        except ConfigError as exc:
            self._errors.append(exc)
            return torch.zeros(end - start)
        return values

    def _stored_name(self, name: str, stored: str) -> str:
        """Return the name of a stored tensor: a tied table may have either of two."""
        for each in (name, {EMBEDDING: HEAD, HEAD: EMBEDDING}.get(name, name)):
            if (key := stored.format(each) if "{}" in stored else each) in self._checkpoint:
                return key
        raise ConfigError(self._checkpoint.field, self._checkpoint.path, f"lacks {name}", "give an older checkpoint")
