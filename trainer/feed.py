"""Batches of one rank: drawn from its text as it needs them, or copied from what the machine's loader has read ahead.

A rank copies the rows of its data-parallel place, tokens on the first pipeline stage and targets on the last; a stage
between reads none, unless documents are packed, whose borders its attention needs. A thread does it one step ahead: the
rows of step n + 1 leave the ring while step n computes and its gradients travel; on a GPU they pass through pinned
memory, on a stream of their own. That thread also cuts them into micro-batches, masks targets and counts those that
count, so that the training's own thread takes what is ready: a step that the host bounds would wait for every operator
launched here. Held-out batches come from the loader too: an evaluation always has the same ones.

[Note: lifetimes on a GPU] Rows are copied by the host into pinned memory, so that their slot is free at once; by the
copy engine to the device, in order on the stream of copies; and the stream that computes waits for the event after
them. Pinned memory goes back to torch's cache, which gives it out again once the copy is done. Device memory is of the
copies' stream: `record_stream` keeps it from the next copy until the step has read it. Where a step is a CUDA graph,
its inputs are copied, in order, to where the graph reads them; while one is captured the thread's own calls do not
count, for the capture is of its thread alone (`capture_on_cuda`).

[Note: targets that do not count] A loss is the mean over the targets that count in the whole batch, on all ranks: a
mean of means would weigh a target by who else is in its micro-batch, and losses would depend on the layout. So each
rank's sum is divided by its rows, and multiplied by rows / targets of the batch, which one small all-reduce says. It
runs under the forward pass of the first micro-batch: no step begins with a wait for the other ranks.

Shapes: N samples, B sequences of a micro-batch, T positions.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
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
        """Return the micro-batches of a step, the one behind the last that was asked for."""

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
            counts=_counting(model) if job.data.masks else None,
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

    def open(self, seed: int, steps_done: int, resumed: Meta | None) -> None:
        if self._sampler is not None:
            return
        spec = sampler_spec(self._job, self._corpus, seed)
        self._sampler = spec.open()  # its facts are for the checkpoints of every rank
        self._plan = batch_plan(self._job, resumed)
        self._next = steps_done + 1
        if self._job.data.loader and self._next <= self._job.optimizer.steps:
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
        if self._reader is not None:
            batches = self._batches(self._reader.take(step))
            self._reader.go_on()
            return batches
        samples = self._plan.samples(step, self._dp)
        if not self._needs:
            return self._batches(None, len(samples))
        return self._batches(self._prepare(self._sampler.read(samples)))

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
        self._reader = _Reader(ring, number, plan, self._dp, self._prepare, self._device, self._loader)
        self._evaluation = _EvaluationReader(held_out, number, plan, self._dp, self._prepare, self._loader)

    def _create_rings(self, shapes: Sequence[RingShape]) -> None:
        folder = self._job.data.ring_folder
        for shape in shapes:
            # One after the other: the second one's room is what the first has left.
            self._rings.append(Ring.create(shape, Path(folder).expanduser() if folder else None))

    def _batches(self, batch: _Batch | None, num_samples: int = 0) -> Batches:
        """Return a rank's micro-batches; where targets are masked, the ranks begin to add up those that count."""
        counts_2 = None if batch is None else batch.counts_2
        scale = loss_scale(self._model, counts_2) if self._job.data.masks else None
        if batch is None:  # of a stage that reads none: so many, and nothing in them
            nothing = torch.empty(0, dtype=torch.int64, device=self._device)
            return [(nothing, nothing)] * (num_samples // self._job.batch.micro_batch_size)
        if scale is None:
            return [(tokens_BT, targets_BT) for tokens_BT, targets_BT, _ in batch.micro_batches]
        return [
            (tokens_BT, targets_BT, Packed(segments_BT, scale, self._own_t))
            for tokens_BT, targets_BT, segments_BT in batch.micro_batches
        ]


def loss_scale(model: ParallelModel, counts_2: Tensor | None) -> Callable[[], Tensor]:
    """Return a call that gives rows / targets of the whole batch: [Note: targets that do not count].

    The ranks begin to add up now, and the call waits for it. Every rank calls this.

    Args:
        counts_2: this rank's targets, and how many of them count, on its device, where it is the one of those with the
            same targets to add them, else zeros; the sum overwrites them. None: it has none to add.
    """
    counts = model.zero().new_zeros(2) if counts_2 is None else counts_2
    work = model.world.start_all_reduce(counts)
    if not model.is_last:
        # It has no loss to scale: what it computes waits for nothing.
        stream = model.world.stream
        with torch.cuda.stream(stream):
            work.wait()
        if stream is not None:
            counts.record_stream(stream)  # nobody holds them any more, and the sum may still be under way

    @functools.cache
    def scale() -> Tensor:
        work.wait()
        return counts[0] / counts[1].clamp(min=1)

    return scale


def _counting(model: ParallelModel) -> Callable[[int, int], Tensor]:
    """Return what gives `counts_2` of `loss_scale`, in memory of the host: zeros but on the rank that has the loss."""
    # Of tensor-parallel ranks, which hold the same targets, the first counts them; each context-parallel one its own.
    counts, dtype, is_cuda = model.is_last and model.place.tp == 0, model.zero().dtype, model.device.type == "cuda"

    def count(number: int, num_targets: int) -> Tensor:
        return torch.tensor([number, num_targets] if counts else [0, 0], dtype=dtype, pin_memory=is_cuda)

    return count


@dataclass(frozen=True)
class _Batch:
    """Rows of a rank on its device, cut into micro-batches.

    Args:
        micro_batches: tokens and targets [B, T], and the number of the document of each position, if they are packed.
        counts_2: as of `loss_scale`; None where all targets count.
        memory: tensors that all of it lies in.
    """

    micro_batches: Sequence[tuple[Tensor, Tensor, Tensor | None]]
    counts_2: Tensor | None
    memory: Sequence[Tensor]


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
        counts: gives what `loss_scale` adds up, of how many targets there are and how many of them count.
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
    memory, segments, counts_2 = [windows, *([] if is_whole else [tokens, targets])], None, None
    if rows.segments is not None:
        segments = tensor(rows.segments, torch.int32)
        memory.append(segments)
    if counts is not None:
        number = targets.numel()
        mask = rows.mask
        if mask is not None:
            mask = mask if is_whole else np.concatenate([mask[:, each.start : each.stop] for each in chunks], axis=1)
            targets = targets.masked_fill(~tensor(mask, torch.bool), NO_TARGET)
            memory.append(targets)
        num_targets = number if mask is None else int(np.count_nonzero(mask))
        counts_2 = counts(number, num_targets).to(device, non_blocking=True)
        memory.append(counts_2)
    cuts = [slice(first, first + micro_batch_size) for first in range(0, len(windows), micro_batch_size)]
    micro_batches = [(tokens[cut], targets[cut], None if segments is None else segments[cut]) for cut in cuts]
    return _Batch(micro_batches, counts_2, memory)


class _Closed(Exception):
    """The training has ended."""


class _Reader:
    """Takes a rank's rows out of the ring, a step ahead of the training.

    Args:
        prepare: makes micro-batches on the device of rows.
        loader: to look after, on the one rank of the machine that holds it.
    """

    def __init__(
        self,
        ring: Ring,
        reader: int,
        plan: LoaderPlan,
        dp: int,
        prepare: Callable[[Rows], _Batch],
        device: torch.device,
        loader: Loader | None,
    ) -> None:
        self._ring, self._number, self._plan, self._dp = ring, reader, plan, dp
        self._prepare, self._device, self._loader = prepare, device, loader
        is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if is_cuda else None  # type: ignore[no-untyped-call]
        self._batches: queue.Queue[tuple[int, _Batch, torch.cuda.Event | None] | BaseException] = queue.Queue()
        self._allowed = threading.Semaphore(_AHEAD)
        self._is_closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="batches", daemon=True)
        self._thread.start()

    def take(self, step: int) -> _Batch:
        """Wait for a step's rows; what the device does from here on waits for their copy."""
        item = self._batches.get()
        if isinstance(item, BaseException):
            self._batches.put(item)  # for whoever asks again
            raise item
        number, batch, copied = item
        assert number == step
        if copied is not None:
            current = torch.cuda.current_stream(self._device)
            current.wait_event(copied)
            for tensor in batch.memory:
                tensor.record_stream(current)
        return batch

    def go_on(self) -> None:
        """Read one step more. Not as one is taken: the two threads would take turns in Python while a step waits."""
        self._allowed.release()

    def close(self) -> None:
        self._is_closed.set()
        self._allowed.release()
        self._ring.reader_wakeup.wake()
        self._thread.join()

    def _run(self) -> None:
        try:
            for step in range(self._plan.batches.first_step, self._plan.last_step + 1):
                self._allowed.acquire()
                self._look_after()
                self._ring.wait(step, self._look_after)
                self._batches.put(self._copy(step))
        except _Closed:
            return
        except Exception as exc:  # noqa: BLE001 - raised where the step is asked for
            self._batches.put(exc)
        # To Linux the parent of a loader is the thread that has started it, maybe this one, and it dies with that.
        self._is_closed.wait()

    def _look_after(self) -> None:
        if self._is_closed.is_set():
            raise _Closed
        _look_after(self._ring, self._loader)

    def _copy(self, step: int) -> tuple[int, _Batch, torch.cuda.Event | None]:
        place, copies = self._plan.rows(step, self._dp), list[_Batch]()

        def copy(rows: Rows) -> None:
            copies.append(self._prepare(rows.part(place)))

        if self._stream is None:
            self._ring.take(step, self._number, copy)
            return step, copies[0], None
        # The device copies from pinned memory of this process, so the slot is free as soon as the host has copied.
        with torch.cuda.stream(self._stream):
            self._ring.take(step, self._number, copy)
            copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
            copied.record(self._stream)
        return step, copies[0], copied


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
        [tensor for batch in batches for tensor in batch.memory],
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
