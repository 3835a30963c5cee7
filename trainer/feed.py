"""Batches of one rank: drawn from its text as it needs them, or copied from what the machine's loader has read ahead.

A rank copies the rows of its data-parallel place, tokens on the first pipeline stage and targets on the last; a stage
between reads none, unless documents are packed, whose borders its attention needs. A thread does it one step ahead: the
rows of step n + 1 leave the ring while step n computes and its gradients travel; on a GPU they pass through pinned
memory, on a stream of their own. That thread also cuts them into micro-batches, masks targets and counts those that
count, so that the training's own thread takes what is ready, and launches one operator, the wait for the copy: a step
that the host bounds would wait for every other. Held-out batches come from the loader too: an evaluation always has the
same ones.

[Note: lifetimes on a GPU] Rows are copied by the host into pinned memory, so that their slot is free at once; by the
copy engine to the device, in order on the stream of copies; and the stream that computes waits for the event after
them. Pinned memory goes back to torch's cache, which gives it out again once the copy is done. Device memory is of the
copies' stream, which must not get it back before the step has read it. So the thread that reads ahead holds a batch
until the next one is handed out, by when all that reads it was launched; then the copies' stream waits for what the
computation has by now, and the batch is dropped. (`record_stream` would be an operator a tensor on the training's
thread.) A batch is good until the next one is asked for. Where a step is a CUDA graph, its inputs are copied, in order,
to where the graph reads them; while one is captured the thread's own calls do not count, for the capture is of its
thread alone (`capture_on_cuda`).

Shapes: N samples, B sequences of a micro-batch, T positions.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor

from collectives.transport.current_stream import current_stream
from netlayer.config.tree import JobConfig
from netlayer.environ import boot_id, pid_namespace
from netlayer.errors import NetlayerError
from trainer.checkpoint.meta import Meta
from trainer.data.batches import (
    Slice,
    cut_windows,
    even_starts,
    micro_batches,
    own_chunks,
    rank_slice,
    sample_starts,
    split_windows,
)
from trainer.data.loader import EvaluationPlan, Loader, LoaderPlan
from trainer.data.mixture import TEXT, Mixture, batch_plan, evaluation_specs, sampler_spec
from trainer.data.prepare import Corpus
from trainer.data.ring import Ring, RingShape, raise_failure
from trainer.data.sampler import Rows, Sampler
from trainer.loss_scale import LossScale, counting
from trainer.model.packed import NO_TARGET, Packed
from trainer.parallel import Batches, MicroBatch, ParallelModel
from trainer.ramps import batch_size

_DTYPES = {"int32": torch.int32, "uint8": torch.uint8}  # of `Rows`
_AHEAD = 2
"""Steps that are ready, at most, when one is asked for: that one, and the next."""


class Feed(Protocol):
    """Batches of one rank."""

    def open(self, seed: int, steps_done: int, resumed: Meta | None) -> None:
        """Begin to read for the step behind `steps_done`; every rank calls it. Twice is once."""

    def training(self, step: int) -> Batches:
        """Return the micro-batches of the next step; they are good until those of the one after are asked for."""

    def next_counts(self, step: int) -> Tensor | None:
        """Return what the ranks add up before the step behind `step`, which was launched; waits for its batch.

        None: nothing, on all ranks alike. See `trainer.loss_scale`.
        """

    def note_counts(self, counts_2: Tensor | None) -> None:
        """Take the sum of what `next_counts` gave, before that step's batch is asked for; None: it gave nothing."""

    @property
    def waits(self) -> bool:
        """Whether `next_counts` would wait now."""

    def evaluation(self, global_batches: int) -> Iterator[tuple[str, Batches]]:
        """Return the micro-batches of each evaluation set, by name: always the same ones."""

    def state(self, steps_done: int) -> Mapping[str, Any] | None:
        """Return what a checkpoint keeps beside seed and step."""

    def close(self) -> None:
        """End what reads ahead."""


def open_feed(job: JobConfig, corpus: Corpus | Mixture, model: ParallelModel) -> Feed:
    """Return the batches that a job asks for."""
    if job.data.counts_samples:
        return SampleFeed(job, corpus, model)
    assert isinstance(corpus, Corpus)
    return TextFeed(job, corpus, model)


class TextFeed:
    """Windows of a text, drawn with replacement: each rank makes its own, when it needs it."""

    def __init__(self, job: JobConfig, corpus: Corpus, model: ParallelModel) -> None:
        self._job, self._dp, self._device = job, model.data_rank, model.device
        self._part = model.place.cp, model.layout.cp
        self._train, self._validation = corpus.train_tokens(), corpus.validation_tokens()
        self._seed = 0

    def open(self, seed: int, steps_done: int, resumed: Meta | None) -> None:  # noqa: ARG002
        self._seed = seed

    def training(self, step: int) -> list[MicroBatch]:
        own = self._slice(batch_size(self._job.batch, step))
        samples = range(own.first, own.first + own.count)
        starts = sample_starts(len(self._train), self._job.model.seq_len, self._seed, step, samples)
        return self._micro_batches(self._train, starts)

    def next_counts(self, step: int) -> None:
        """Return nothing: all targets of a text count."""

    def note_counts(self, counts_2: Tensor | None) -> None:
        """Do nothing: there are none."""

    waits = False

    def evaluation(self, global_batches: int) -> Iterator[tuple[str, Batches]]:
        share = self._slice(self._job.batch.global_batch_size).count * global_batches
        starts = even_starts(len(self._validation), self._job.model.seq_len, share * self._job.parallel.data_ranks)
        own = starts[self._dp * share : (self._dp + 1) * share]
        yield TEXT, self._micro_batches(self._validation, own)

    def state(self, steps_done: int) -> None:
        """Return nothing: seed and step say all."""

    def close(self) -> None:
        """Nothing reads ahead."""

    def _slice(self, sequences: int) -> Slice:
        return rank_slice(sequences, self._job.batch.micro_batch_size, self._dp, self._job.parallel.data_ranks)

    def _micro_batches(self, tokens: NDArray[np.integer], starts_N: NDArray[np.int64]) -> list[MicroBatch]:
        sizes = self._job.model.seq_len, self._job.batch.micro_batch_size
        return list(micro_batches(tokens, starts_N, *sizes, self._device, self._part))


class SampleFeed:
    """Samples that count up through epochs, from the machine's loader, or read by the rank itself."""

    def __init__(self, job: JobConfig, corpus: Corpus | Mixture, model: ParallelModel) -> None:
        self._job, self._corpus, self._model = job, corpus, model
        self._dp, self._device = model.data_rank, model.device
        self._num_own = job.model.seq_len // job.parallel.cp
        self._needs = model.is_first or model.is_last or job.data.packing == "documents"
        self._prepare = functools.partial(
            _batch,
            micro_batch_size=job.batch.micro_batch_size,
            counts=counting(model) if job.data.masks else None,
            device=model.device,
            chunks=own_chunks(job.model.seq_len, model.place.cp, model.layout.cp),
        )
        self._own_t = None if model.context is None else model.context.positions(self._num_own, model.device)
        """Positions of every sequence that this rank has; None: all."""
        self._sampler: Sampler | None = None
        self._held_out: dict[str, Sampler] = {}
        self._rings: list[Ring] = []  # of steps, and of held-out batches
        self._loader: Loader | None = None
        self._reader: _Reader | None = None
        self._evaluation: _EvaluationReader | None = None
        self._last_shared = 0
        """Step up to which ranks add up their counts beside the notes of the one before."""
        self._next_sum: Tensor | None = None

    def open(self, seed: int, steps_done: int, resumed: Meta | None) -> None:
        if self._sampler is not None:
            return
        spec = sampler_spec(self._job, self._corpus, seed)
        self._sampler = spec.open()  # its facts are for the checkpoints of every rank
        self._plan = batch_plan(self._job, resumed)
        self._next = steps_done + 1
        if self._job.data.loader and self._next <= self._job.optimizer.steps:
            self._last_shared = self._job.optimizer.steps if self._job.data.masks else 0
            try:
                evaluation = EvaluationPlan(
                    evaluation_specs(self._job, self._corpus),
                    self._job.evaluation.global_batches,
                    self._plan.most_samples,
                    self._job.parallel.data_ranks,
                )
                self._open_loader(LoaderPlan(spec, self._plan, self._dps(), self._job.optimizer.steps, evaluation))
            except BaseException:
                self.close()  # a ring that has a name loses it
                raise

    def training(self, step: int) -> Batches:
        assert self._sampler is not None
        if step != self._next:
            raise ValueError(f"step {step}: batches come in the order of steps, and the next is {self._next}")
        self._next += 1
        counts, self._next_sum = self._next_sum, None
        if self._reader is not None:
            ready = self._reader.take(step)
            self._scale(ready.scale, ready.batch, counts)
            self._reader.go_on()
            return ready.micro_batches
        samples = self._plan.samples(step, self._dp)
        if not self._needs:
            return self._batches(None, len(samples), counts)
        return self._batches(self._prepare(self._sampler.read(samples)))

    def next_counts(self, step: int) -> Tensor | None:
        if not step < self._last_shared or step + 1 != self._next:
            return None
        counts_2 = None if self._reader is None else self._reader.counts(step + 1)
        if counts_2 is None:  # of a stage that reads none, or where the loader has failed, as `training` will say
            counts_2 = self._model.zero().new_zeros(2)
        return counts_2

    def note_counts(self, counts_2: Tensor | None) -> None:
        self._next_sum = counts_2

    @property
    def waits(self) -> bool:
        return self._reader is not None and self._next <= self._last_shared and not self._reader.is_ready

    def evaluation(self, global_batches: int) -> Iterator[tuple[str, Batches]]:
        if self._evaluation is not None and global_batches == self._job.evaluation.global_batches:
            for name, batch in self._evaluation.sets():
                yield name, self._batches(batch)
            return
        # A short one at a stop, or no loader: each rank reads its own.
        if not self._held_out:
            specs = evaluation_specs(self._job, self._corpus)
            self._held_out = {name: spec.open() for name, spec in specs.items()}
        share = self._job.batch.global_batch_size // self._job.parallel.data_ranks * global_batches
        own = range(self._dp * share, (self._dp + 1) * share)
        for name, sampler in self._held_out.items():
            rows = sampler.read_evenly(own, share * self._job.parallel.data_ranks) if self._needs else None
            yield name, self._batches(None if rows is None else self._prepare(rows), share)

    def state(self, steps_done: int) -> Mapping[str, Any] | None:
        assert self._sampler is not None
        return {**self._sampler.state(), "num_samples": self._plan.start(steps_done + 1)}

    @property
    def bytes_read(self) -> int:
        """Bytes of the datasets' files read so far by this machine's loader, or by this rank if it reads itself."""
        if self._rings:
            return sum(ring.bytes_read for ring in self._rings)
        samplers = [*([] if self._sampler is None else [self._sampler]), *self._held_out.values()]
        return sum(sampler.bytes_read for sampler in samplers)

    def close(self) -> None:
        if self._reader is not None:
            self._reader.close()
        if self._loader is not None:
            self._loader.close()
        for ring in self._rings:
            ring.close()
        self._reader = self._loader = self._evaluation = None
        self._rings = []

    def _dps(self) -> list[int]:
        """Agree on who reads on this machine; every rank calls it. Its data-parallel ranks, rising."""
        self._machine = _gather((machine_key(self._job.data.ring_folder), self._needs, self._dp))
        own = self._machine[self._model.world.rank][0]
        self._readers = [rank for rank, (key, needs, _) in enumerate(self._machine) if key == own and needs]
        return sorted({self._machine[rank][2] for rank in self._readers})

    def _open_loader(self, plan: LoaderPlan) -> None:
        """Make the ring of this machine and start its loader; every rank calls it.

        Raises:
            ConfigError: there is no room on one of the machines; on all ranks alike.
        """
        rank, is_reader = self._model.world.rank, self._needs
        is_owner = is_reader and rank == self._readers[0]
        assert self._sampler is not None
        num_slots, num_readers = self._job.data.read_ahead, len(self._readers)
        has_segments, has_mask = self._sampler.has_segments, self._sampler.has_mask
        shapes = [
            plan.shape(num_slots, num_readers, has_segments=has_segments, has_mask=has_mask),
            plan.evaluation_shape(num_slots, num_readers),
        ]
        with _agreed() as problems:
            if is_owner:
                with problems:
                    self._create_rings(shapes)
        offers = _gather([(ring.address, ring.token) for ring in self._rings])
        with _agreed() as problems:
            if is_reader and not is_owner:
                with problems:
                    for shape, (address, token) in zip(shapes, offers[self._readers[0]], strict=True):
                        self._rings.append(Ring.attach(address, shape, token))
        if not self._rings:
            return
        # All have them open: nothing that is killed from here leaves a name.
        for ring in self._rings:
            ring.unlink()
        ring, held_out = self._rings
        held_out.share_wakeup(ring)
        if is_owner:
            self._loader = Loader(plan, ring, held_out)
        number = self._readers.index(rank)
        self._reader = _Reader(ring, number, plan, self._dp, self._ready, self._device, self._loader)
        self._evaluation = _EvaluationReader(held_out, number, plan, self._dp, self._prepare, self._loader)

    def _create_rings(self, shapes: Sequence[RingShape]) -> None:
        folder = self._job.data.ring_folder
        for shape in shapes:
            # One after the other: the second one's room is what the first has left.
            self._rings.append(Ring.create(shape, Path(folder).expanduser() if folder else None))

    def _ready(self, rows: Rows) -> _Ready:
        """Make what the training takes of a step's rows, all but the ranks' sum."""
        batch, scale = self._prepare(rows), LossScale()
        return _Ready(batch, self._cut(batch, scale), scale)

    def _cut(self, batch: _Batch, scale: LossScale) -> Batches:
        """Return a rank's micro-batches; where targets are masked, with the call that scales their loss."""
        if not self._job.data.masks:
            return [(tokens_BT, targets_BT) for tokens_BT, targets_BT, _ in batch.micro_batches]
        return [
            (tokens_BT, targets_BT, Packed(segments_BT, scale, self._own_t))
            for tokens_BT, targets_BT, segments_BT in batch.micro_batches
        ]

    def _scale(self, scale: LossScale, batch: _Batch | None, counts_2: Tensor | None = None) -> None:
        """Have a scale known where targets are masked: by a sum, or else the ranks begin to add up now."""
        if self._job.data.masks:
            if counts_2 is None:
                scale.add_up(self._model, None if batch is None else batch.counts_2)
            else:
                scale.take(counts_2)

    def _batches(self, batch: _Batch | None, num_samples: int = 0, counts_2: Tensor | None = None) -> Batches:
        """Return a rank's micro-batches of a batch that nobody has read ahead; arguments as of `_scale`."""
        scale = LossScale()
        self._scale(scale, batch, counts_2)
        if batch is not None:
            return self._cut(batch, scale)
        # Of a stage that reads none: so many, and nothing in them.
        nothing = torch.empty(0, dtype=torch.int64, device=self._device)
        return [(nothing, nothing)] * (num_samples // self._job.batch.micro_batch_size)


@dataclass(frozen=True)
class _Batch:
    """Rows of a rank on its device, cut into micro-batches.

    Args:
        micro_batches: tokens and targets [B, T], and the number of the document of each position, if they are packed.
        counts_2: as of `LossScale`; None where all targets count.
    """

    micro_batches: Sequence[tuple[Tensor, Tensor, Tensor | None]]
    counts_2: Tensor | None


@dataclass
class _Ready:
    """A batch that the training takes as it is.

    Args:
        micro_batches: of the model.
        scale: that they have, to be set.
        copied: event after which it is on the device; None: it is there.
    """

    batch: _Batch
    micro_batches: Batches
    scale: LossScale
    step: int = 0
    copied: torch.cuda.Event | None = None


def _batch(
    rows: Rows,
    *,
    micro_batch_size: int,
    counts: Callable[[int, int], Tensor] | None,
    device: torch.device,
    chunks: tuple[range, ...],
) -> _Batch:
    """Copy rows to the device and cut them; on a GPU on the current stream, and the host does not wait.

    [Note: lifetimes on a GPU] says what may be used again, and when.

    Args:
        counts: gives what `LossScale` adds up, of how many targets there are and how many of them count.
        chunks: positions that this rank has of each sequence; documents are told of all positions, for attention reads
            the keys of all.
    """

    def tensor(array: NDArray[Any], dtype: torch.dtype) -> Tensor:
        own = torch.empty(array.shape, dtype=_DTYPES[array.dtype.name], pin_memory=device.type == "cuda")
        own.numpy()[:] = array  # a copy: the rows are another step's soon
        return own.to(device, non_blocking=True).to(dtype)

    is_whole = len(chunks) == 1
    windows = tensor(rows.tokens if is_whole else cut_windows(rows.tokens, chunks), torch.int64)
    tokens, targets = split_windows(windows, chunks)
    segments = None if rows.segments is None else tensor(rows.segments, torch.int32)
    counts_2 = None
    if counts is not None:
        number = targets.numel()
        mask = rows.mask
        if mask is not None:
            mask = mask if is_whole else np.concatenate([mask[:, each.start : each.stop] for each in chunks], axis=1)
            targets = targets.masked_fill(~tensor(mask, torch.bool), NO_TARGET)
        num_targets = number if mask is None else int(np.count_nonzero(mask))
        counts_2 = counts(number, num_targets).to(device, non_blocking=True)
    cuts = [slice(first, first + micro_batch_size) for first in range(0, len(windows), micro_batch_size)]
    micro_batches = [(tokens[cut], targets[cut], None if segments is None else segments[cut]) for cut in cuts]
    return _Batch(micro_batches, counts_2)


class _Closed(Exception):
    """The training has ended."""


class _Reader:
    """Takes a rank's rows out of the ring, a step ahead of the training.

    Args:
        prepare: makes what the training takes of rows, on the device.
        loader: to look after, on the one rank of the machine that holds it.
    """

    def __init__(
        self,
        ring: Ring,
        reader: int,
        plan: LoaderPlan,
        dp: int,
        prepare: Callable[[Rows], _Ready],
        device: torch.device,
        loader: Loader | None,
    ) -> None:
        self._ring, self._number, self._plan, self._dp = ring, reader, plan, dp
        self._prepare, self._device, self._loader = prepare, device, loader
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
        self._computing: torch.cuda.Stream | None = None
        """Stream that reads what is taken."""
        # Queues in C: a put or a get is one call, and wakes nobody who does not wait.
        self._batches: queue.SimpleQueue[_Ready | BaseException] = queue.SimpleQueue()
        self._allowed: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(_AHEAD):
            self._allowed.put(None)
        self._head: _Ready | None = None
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)
        self._thread.start()

    @property
    def is_ready(self) -> bool:
        """Whether the next step's batch is there."""
        return self._head is not None or not self._batches.empty()

    def counts(self, step: int) -> Tensor | None:
        """Wait for a step's rows, and return `counts_2` of them; None: there are none, or the loader has failed."""
        try:
            return self._next(step).batch.counts_2
        except Exception:  # noqa: BLE001 - `take` raises it again
            return None

    def take(self, step: int) -> _Ready:
        """Wait for a step's rows; what the device does from here on waits for their copy."""
        ready = self._next(step)
        self._head = None
        return ready

    def _next(self, step: int) -> _Ready:
        if self._head is not None:
            return self._head
        item = self._batches.get()
        if isinstance(item, BaseException):
            self._batches.put(item)  # for whoever asks again
            raise item
        assert item.step == step
        if item.copied is not None:
            self._computing = current_stream(self._device)
            self._computing.wait_event(item.copied)
        self._head = item
        return item

    def go_on(self) -> None:
        """Read one step more. Not as one is taken: the two threads would take turns in Python while a step waits."""
        self._allowed.put(None)

    def close(self) -> None:
        self._is_closed.set()
        self._allowed.put(None)
        self._ring.reader_wakeup.wake()
        self._thread.join()

    def _run(self) -> None:
        unread: deque[_Ready] = deque()  # [Note: lifetimes on a GPU]
        try:
            for step in range(self._plan.batches.first_step, self._plan.last_step + 1):
                self._allowed.get()
                self._look_after()
                if len(unread) > _AHEAD:  # a step was handed out, and the one before it is launched
                    self._drop(unread)
                self._ring.wait(step, self._look_after)
                unread.append(self._copy(step))
                self._batches.put(unread[-1])
        except _Closed:
            return
        except Exception as exc:  # noqa: BLE001 - raised where the step is asked for
            self._batches.put(exc)
        # To Linux the parent of a loader is the thread that has started it, maybe this one, and it dies with that.
        self._is_closed.wait()

    def _drop(self, unread: deque[_Ready]) -> None:
        """Let the copies' stream have the memory of the oldest batch once the device has read it."""
        if self._stream is not None and self._computing is not None:
            self._stream.wait_stream(self._computing)
        unread.popleft()

    def _look_after(self) -> None:
        if self._is_closed.is_set():
            raise _Closed
        _look_after(self._ring, self._loader)

    def _copy(self, step: int) -> _Ready:
        place, copies = self._plan.rows(step, self._dp), list[_Ready]()

        def copy(rows: Rows) -> None:
            copies.append(self._prepare(rows.part(place)))

        if self._stream is None:
            self._ring.take(step, self._number, copy)
        else:
            # The device copies from pinned memory of this process: the slot is free as soon as the host has copied.
            with torch.cuda.stream(self._stream):
                self._ring.take(step, self._number, copy)
                copies[0].copied = self._stream.record_event()
        copies[0].step = step
        return copies[0]


class _EvaluationReader:
    """Takes a rank's rows of evaluations out of their ring; arguments as of `_Reader`."""

    def __init__(
        self,
        ring: Ring,
        reader: int,
        plan: LoaderPlan,
        dp: int,
        prepare: Callable[[Rows], _Batch],
        loader: Loader | None,
    ) -> None:
        assert plan.evaluation is not None
        self._ring, self._number, self._plan = ring, reader, plan.evaluation
        self._rows, self._prepare, self._loader = plan.evaluation_rows(dp), prepare, loader
        self._next = 1

    def sets(self) -> Iterator[tuple[str, _Batch]]:
        """Yield each evaluation set's name and this rank's rows of it, in the order of its samples."""
        first, count = self._next, self._plan.num_items
        # Where the last evaluation was interrupted, the ring holds its rest.
        first += -(first - 1) % count
        self._ring.skip(first - 1, self._number)
        for name in self._plan.sets:
            batches = [self._take(first + number) for number in range(self._plan.global_batches)]
            first += self._plan.global_batches
            yield name, _joined(batches)

    def _take(self, item: int) -> _Batch:
        self._next = item + 1
        self._ring.wait(item, partial(_look_after, self._ring, self._loader))
        batches: list[_Batch] = []
        self._ring.take(item, self._number, lambda rows: batches.append(self._prepare(rows.part(self._rows))))
        return batches[0]


def _look_after(ring: Ring, loader: Loader | None) -> None:
    """Raise what the loader has said, or start it again where it has died."""
    raise_failure(ring.error)
    if loader is not None:
        loader.check()


def _joined(batches: Sequence[_Batch]) -> _Batch:
    counts = [batch.counts_2 for batch in batches if batch.counts_2 is not None]
    return _Batch(
        [each for batch in batches for each in batch.micro_batches],
        torch.stack(counts).sum(0) if counts else None,
    )


def machine_key(ring_folder: str) -> str:
    """Return a key that is equal on ranks that can share memory: one machine and, without a folder, one container."""
    parts = [boot_id()]
    if not ring_folder:
        # A process of another container is not seen in /proc.
        parts.append(pid_namespace())
    return "/".join(parts)


def _gather(value: Any) -> list[Any]:
    """Return every rank's object, in order."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


class _Problems(contextlib.AbstractContextManager[None]):
    """Keeps the error of a block for all ranks."""

    def __init__(self) -> None:
        self.error: NetlayerError | None = None

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> bool:
        if isinstance(error, NetlayerError):
            self.error = error
            return True
        return False


@contextlib.contextmanager
def _agreed() -> Iterator[_Problems]:
    """Raise the first error of any rank on all of them, at the end of the block: one alone would leave the others."""
    problems = _Problems()
    yield problems
    for error in _gather(problems.error):
        if error is not None:
            raise error
