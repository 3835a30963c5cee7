"""The first stage of a save: what of the state this rank writes, and its copy in the memory of the host.

A rank writes what it owns: its shard of the masters and of their moments, as boxes of whole tensors. Of ranks that hold
the same (tensor-parallel ones a norm, both ends of a pipeline a tied table) the first writes it, and the rows that pad
a vocabulary are no part of the whole. Nothing travels between ranks.

[Note: copies and updates] The copy of step k runs on a stream of its own, after all that the training's stream had been
given up to then, so it reads what step k's update has written. What writes there next is the update of step k+1: by
then forward and backward have passed, mostly a longer time than the copy takes. It must not overtake the copy: before
an update the training's stream waits for the event behind the copies of what it overwrites, and the host for nothing.
With a step inside the backward pass that is one bucket at a time, so buckets are copied in the order in which a
backward pass comes to them; else it is a chunk's whole optimiser. A replayed graph has no hook, so the whole copy is
waited for before it. Gathers read the masters, or write a rank's slice with what it holds. On the CPU there is no
stream: the copy is one in memory, done before the next step begins.

[Note: paced copies] With job.checkpoint.copy_gbps a thread gives the stream pieces of the copy at that rate, in the
same order. An update that comes to a bucket whose copy has not begun has all up to it launched at once, and waits for
them as ever: a rate that is too low for a step's time costs a wait and no sample of the state.

Not covered: state of an optimiser other than two moments an element.
"""

from __future__ import annotations

import functools
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from collectives.sharded.bucket import Bucket, Piece
from collectives.sharded.optimizer_state import boxes_of
from collectives.sharded.state import own_range
from netlayer import environ
from netlayer.units import format_size
from trainer.checkpoint.dcp import Box, Stored, elements_of, frame, small_boxes, state_name
from trainer.checkpoint.pace import PacedCopies
from trainer.checkpoint.reader import EMBEDDING, HEAD
from trainer.checkpoint.writer import Framed, Pieces
from trainer.model.linears import Part, parts
from trainer.parallel import Optimizers, ParallelModel

PARAMETER = "parameter"
MOMENTS = ("exp_avg", "exp_avg_sq")  # of AdamW and of LAMB, which also have `step`
_PACED_BYTES = 32 << 20
"""Copied at a time where a rate limits copies: 3 ms at 10 GB/s."""


@dataclass(frozen=True)
class Source:
    """One piece of this rank's shard, under one kind: a parameter or a moment of it.

    Args:
        name: that it is stored under.
        parameter: the piece; an update of it overwrites what is copied.
        value: gives its elements, 1-D, as they are now.
        boxes: of whole tensors, each with the range of the piece's elements that fill it.
        start: byte of the buffer at which it lies.
        group: pieces that are copied together: of one bucket.
    """

    name: str
    parameter: nn.Parameter
    value: Callable[[], Tensor]
    boxes: Sequence[tuple[Box, int, int]]
    start: int
    group: int

    @property
    def num_bytes(self) -> int:
        return self.parameter.numel() * self.parameter.element_size()


class ShardPlan:
    """All that this rank writes, in the order of its file: the same at every save.

    Args:
        model: this rank's part.
        optimizers: over its shards; their state may come with the first step.
        file: name of the file.
    """

    def __init__(self, model: ParallelModel, optimizers: Optimizers, file: str) -> None:
        self.file = file
        self.sources: list[Source] = []
        self.buffer_bytes = 0
        tp, vocab_size = (model.place.tp, model.layout.tp), model.job.model.vocab_size
        is_second_table = model.job.model.tied_embeddings and model.layout.pp > 1 and model.is_last
        group = 0
        for chunk, optimizer in zip(model.chunks, optimizers.each, strict=True):
            cut = parts(chunk.module)
            for bucket in chunk.buckets:
                for kind in (PARAMETER, *MOMENTS):
                    for piece in bucket.pieces:
                        part = cut.get(piece.name)
                        # Of ranks that hold the same one writes.
                        is_second = (part is None and tp[0]) or (is_second_table and piece.name == HEAD)
                        if is_second or model.place.dp_replicate:
                            continue
                        self._add(kind, bucket, piece, part, tp, vocab_size, optimizer, group)
                group += 1
        self.num_groups = group
        self.items: list[Stored] = []
        self.framed: list[Framed] = []
        self.num_bytes = 0
        for source in self.sources:
            width = source.parameter.element_size()
            for box, start, end in source.boxes:
                before, after = frame(box.dtype, box.sizes)
                length = len(before) + (end - start) * width + len(after)
                self.items.append(Stored(box.name, box, file, self.num_bytes, length))
                self.framed.append(Framed(before, source.start + start * width, (end - start) * width, after))
                self.num_bytes += length

    def _add(
        self,
        kind: str,
        bucket: Bucket,
        piece: Piece,
        part: Part | None,
        tp: tuple[int, int],
        vocab_size: int,
        optimizer: torch.optim.Optimizer,
        group: int,
    ) -> None:
        """Add one kind of one piece: its boxes of the whole tensor, and its place in the buffer."""
        name = piece.name if kind == PARAMETER else state_name(piece.name, kind)
        span, parameter = own_range(bucket, piece), piece.parameter
        boxes = []
        for offsets, sizes, start, end in whole_boxes(piece.shape, part, *tp, span.start, span.stop):
            shape = list(piece.shape)
            if part is not None:
                shape[part.dim] = sum(part.sizes)
            if piece.name in (EMBEDDING, HEAD):  # the rows that pad it depend on the layout
                shape[0] = vocab_size
                rows = max(0, min(sizes[0], vocab_size - offsets[0]))
                end = start + (end - start) // sizes[0] * rows
                sizes = (rows, *sizes[1:])
            first = start - span.start
            if start == end:
                continue
            for box in small_boxes(Box(name, tuple(shape), parameter.dtype, offsets, sizes)):
                boxes.append((box, first, first + box.numel))
                first += box.numel

        def value() -> Tensor:
            tensor: Tensor = parameter if kind == PARAMETER else optimizer.state[parameter][kind]
            return tensor.detach().flatten()

        self.sources.append(Source(name, parameter, value, boxes, self.buffer_bytes, group))
        self.buffer_bytes += -(-self.sources[-1].num_bytes // 64) * 64

    def pieces(self) -> Iterator[Pieces]:
        """Yield the items of the file straight from the device, one box in memory at a time: for a save that waits."""
        framed = iter(self.framed)
        for source in self.sources:
            value = source.value()
            for _, start, end in source.boxes:
                item = next(framed)
                yield item.before, elements_of(value[start:end]), item.after


def whole_boxes(
    shape: Sequence[int], part: Part | None, rank: int, world_size: int, start: int, end: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int, int]]:
    """Yield (offsets in the whole tensor, sizes, first and last element) of a range of a tensor-parallel rank's part.

    Args:
        shape: of the rank's part.
        part: how the whole is cut; None: it is not.
        start, end: elements of the part, by rows; each box is a range of them.
    """
    spans = None if part is None else part.spans(rank, world_size)
    for box in boxes_of(shape, start, end):
        yield from _in_whole(box.offsets, box.sizes, box.start, part, spans)


def _in_whole(
    offsets: tuple[int, ...],
    sizes: tuple[int, ...],
    start: int,
    part: Part | None,
    spans: Sequence[tuple[int, int, int]] | None,
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int, int]]:
    """Yield the boxes of the whole tensor that a box of a rank's part covers, as `whole_boxes` yields them.

    Rows that are adjacent in the part may have rows of other ranks between them in the whole: there the box is cut.

    Args:
        offsets, sizes: of the box, in the rank's part.
        start: number of its first element among those of the part.
        spans: (start in the whole, start in the part, length) along the dimension that is cut.
    """
    numel = 1
    for size in sizes:
        numel *= size
    if part is None or spans is None:
        yield offsets, sizes, start, start + numel
        return
    dim, first, last = part.dim, offsets[part.dim], offsets[part.dim] + sizes[part.dim]
    crossed = [span for span in spans if span[1] < last and first < span[1] + span[2]]
    rows = next((axis for axis in range(dim) if sizes[axis] > 1), None)
    if len(crossed) > 1 and rows is not None:
        # A cut along an inner dimension: only of a single row it is a range of elements.
        step = numel // sizes[rows]
        for row in range(sizes[rows]):
            at = (*offsets[:rows], offsets[rows] + row, *offsets[rows + 1 :])
            yield from _in_whole(at, (*sizes[:rows], 1, *sizes[rows + 1 :]), start + row * step, part, spans)
        return
    for whole, own, length in crossed:
        low, high = max(first, own), min(last, own + length)
        count = numel // sizes[dim] * (high - low)
        at = (*offsets[:dim], low - own + whole, *offsets[dim + 1 :])
        yield at, (*sizes[:dim], high - low, *sizes[dim + 1 :]), start, start + count
        start += count


class Staging:
    """Memory of the host that holds one snapshot: allocated once, page-locked for a GPU, shared with the writer.

    Args:
        plan: of this rank.
        model, optimizers: whose state it takes.

    Raises:
        OSError, MemoryError: there is no room for it.
    """

    def __init__(self, plan: ShardPlan, model: ParallelModel, optimizers: Optimizers) -> None:
        self._plan, self._model = plan, model
        self._is_cuda = model.device.type == "cuda"
        self.num_bytes = plan.buffer_bytes
        free_bytes = environ.available_memory_bytes()
        if 0 < free_bytes < self.num_bytes:  # asked before: pages that are not there would end a process, and not fail
            raise MemoryError(f"{format_size(free_bytes)} are free")
        # No name: nothing to remove, and the limit of /dev/shm in containers does not count here.
        self.file = _unnamed_file()
        os.ftruncate(self.file, self.num_bytes)
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)  # now: a first save would wait for the pages
        self._memory = mmap.mmap(self.file, self.num_bytes, flags=flags) if self.num_bytes else None
        self.buffer = torch.frombuffer(self._memory, dtype=torch.uint8) if self._memory else torch.empty(0).byte()
        self.copy_bps = model.job.checkpoint.copy_gbps * 1e9
        """Limit of the next snapshot's copy, bytes a second; 0: none."""
        self._paced: PacedCopies | None = None
        self._num_copies = 0
        self._copied: dict[int, torch.cuda.Event] = {}
        """Events behind copies that are launched, by how many that are."""
        self._waits: dict[nn.Parameter, int] = {}
        """How many copies must be done before a parameter is overwritten; the first ones of their order."""
        self._waited: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        if self._is_cuda:
            self._stream = torch.cuda.Stream(model.device)  # type: ignore[no-untyped-call]
            _page_lock(self.buffer)
            for chunk, optimizer in zip(model.chunks, optimizers.each, strict=True):
                self._hook(optimizer, lambda chunk=chunk: chunk.step_in_backward)  # type: ignore[misc]

    def close(self) -> None:
        """Give the memory back, once nothing is copied there any more."""
        if self.file < 0:
            return
        if self._paced is not None:
            self._paced.cancel()
        if self._is_cuda:
            self._stream.synchronize()
            if self.num_bytes:
                torch.cuda.cudart().cudaHostUnregister(self.buffer.data_ptr())  # type: ignore[no-untyped-call]
        self.buffer = torch.empty(0).byte()
        os.close(self.file)
        self.file = -1

    @torch.no_grad()
    def take(self) -> Tensor:
        """Start to copy the state as it is once the work launched so far is done.

        Returns:
            1 where an element of it is not finite, else 0: a scalar on the device, which the current stream may read.
        """
        if not self._is_cuda:
            lost = not_finite(self._plan, self._model.zero())
            for source in self._plan.sources:
                self._place(source).copy_(source.value())
            return lost
        if self._paced is not None:  # of a save that was given up
            self._paced.cancel()
        current = torch.cuda.current_stream(self._model.device)
        self._copied, self._waits, self._waited = {}, {}, []
        self._stream.wait_stream(current)
        with torch.cuda.stream(self._stream):
            lost = not_finite(self._plan, self._model.zero())
            checked = self._stream.record_event()
            copies = self._copies()
            self._num_copies = len(copies)
            self._paced = None
            if not self.copy_bps:
                for _, copy in copies:
                    copy()
        if self.copy_bps:
            self._paced = PacedCopies(copies, self.copy_bps, lambda: torch.cuda.set_device(self._model.device))
        # A scalar of the other stream's memory: read here, some milliseconds of this stream's work later.
        current.wait_event(checked)
        lost.record_stream(current)
        return lost

    def _copies(self) -> list[tuple[int, Callable[[], None]]]:
        """Return bytes and launch of each copy of a snapshot, and note what must wait for which."""
        by_group: dict[int, list[Source]] = {}
        for source in self._plan.sources:
            by_group.setdefault(source.group, []).append(source)
        most_bytes = _PACED_BYTES if self.copy_bps else self.num_bytes
        copies: list[tuple[int, Callable[[], None]]] = []
        # As a backward pass comes to them: [Note: copies and updates].
        for group in sorted(by_group, reverse=True):
            pieces = []
            for source in by_group[group]:
                place, value = self._place(source), source.value()
                count = max(1, most_bytes // value.element_size())
                pieces += list(zip(torch.split(place, count), torch.split(value, count), strict=True))
            end = len(copies) + len(pieces)
            for launched, (place, value) in enumerate(pieces, len(copies) + 1):
                copies.append((value.nbytes, functools.partial(self._copy, place, value, launched, launched == end)))
            self._waits |= {source.parameter: end for source in by_group[group]}
        return copies

    def _copy(self, place: Tensor, value: Tensor, num_launched: int, is_last: bool) -> None:
        """Launch one copy on the stream of copies.

        Args:
            num_launched: copies of the snapshot with this one.
            is_last: no other copy of this bucket follows; an event is recorded under `num_launched`.
        """
        with torch.no_grad(), torch.cuda.stream(self._stream):
            place.copy_(value, non_blocking=True)
            if is_last:
                self._copied[num_launched] = self._stream.record_event()

    @property
    def is_copied(self) -> bool:
        """Whether the last snapshot is whole; the host does not wait."""
        if self._paced is not None and self._paced.num_launched < self._num_copies:
            return False
        return all(event.query() for event in self._copied.values())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Have the host wait until the last snapshot is whole."""
        if self._paced is not None:
            self._paced.launch(self._num_copies)
        for event in self._copied.values():
            event.synchronize()

    def order_updates(self) -> None:
        """Let what the current stream is given from now on come after the whole copy: for updates without a hook."""
        self._order(set(self._waits.values()))
        self._waits = {}

    def waited_s(self) -> float:
        """Return for how long updates on the device have waited for the last copy, which must be whole."""
        pairs, self._waited = self._waited, []
        return sum(start.elapsed_time(end) for start, end in pairs if end.query()) / 1e3  # type: ignore[no-untyped-call]

    def _place(self, source: Source) -> Tensor:
        return self.buffer[source.start : source.start + source.num_bytes].view(source.parameter.dtype)

    def _hook(self, optimizer: torch.optim.Optimizer, steps_in_backward: Callable[[], bool]) -> None:
        def order(each: torch.optim.Optimizer, *_: object) -> None:
            if not self._waits:
                return
            pieces = [piece for group in each.param_groups for piece in group["params"]]
            if steps_in_backward():  # a bucket: those whose gradients are there
                pieces = [piece for piece in pieces if piece.grad is not None]
            numbers = (self._waits.pop(piece, None) for piece in pieces)
            self._order({number for number in numbers if number is not None})

        optimizer.register_step_pre_hook(order)

    def _order(self, numbers: set[int]) -> None:
        """Have the current stream wait for the copies up to each of these numbers."""
        if self._paced is not None and numbers:
            self._paced.launch(max(numbers))
        current = torch.cuda.current_stream(self._model.device)
        for number in sorted(numbers):
            event = self._copied[number]
            if event.query():  # type: ignore[no-untyped-call]
                continue
            # Timed: what an update waits here is a part of the stall, which the host does not see.
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            start.record(current)
            current.wait_event(event)
            end.record(current)
            self._waited.append((start, end))


def not_finite(plan: ShardPlan, zero: Tensor) -> Tensor:
    """Return 1 where an element of this rank's state is not finite, else 0, on the device.

    Every element: a held-out loss sees no moments, and of the token table few rows.
    """
    values = [source.value() for source in plan.sources]
    if not values:
        return zero
    # The largest magnitude: one pass, and not finite where any element is.
    norms = torch._foreach_norm(values, float("inf"))
    return (~torch.stack([norm.to(zero.dtype) for norm in norms]).isfinite()).any().to(zero.dtype)


def _unnamed_file() -> int:
    if hasattr(os, "memfd_create"):
        return os.memfd_create("netlayer-checkpoint")
    with tempfile.TemporaryFile() as file:
        return os.dup(file.fileno())


def _page_lock(buffer: Tensor) -> None:
    if buffer.numel():
        error = torch.cuda.cudart().cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0)  # type: ignore[no-untyped-call]
        if int(error):
            raise MemoryError(f"cudaHostRegister of {buffer.numel()} bytes: error {int(error)}")
