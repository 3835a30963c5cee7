"""All-gathers and reduce-scatters of a tensor-parallel group, handed to the computation part by part (MegaScale 3.2).

A matrix that is spread over the ranks by rows is multiplied as its parts arrive (`gather`); the parts of a product
leave as they are computed (`scatter`). Two ways to carry the parts:

- `PeerTensorExchange`: all GPUs of the group reach each other's memory; copy engines carry the rows of one rank each,
  and no multiprocessor is taken from the matmuls;
- `CommunicatorTensorExchange`: anything torch.distributed runs on; a communicator carries some rows of all ranks each.

Not covered: sums of partial products in a ring (one rounding more a hop, and each hop waits for the one before).

Shapes: W ranks, m rows of a rank, M = W * m, C columns. Row r * m + i of the whole is row i of rank r. A part is a
`Rows` into the view [W, m, C] of a whole matrix.
"""

from __future__ import annotations

import os
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.alike import spread
from collectives.arguments import as_device
from collectives.sharded.slot import Promise
from collectives.transport.communicator import Communicator, Work
from collectives.transport.current_stream import current_stream
from collectives.transport.symmetric import PeerRounds, adds_in_sum, why_unusable
from collectives.watch.recorder import Collective, Recorder
from collectives.watch.track import Operation
from collectives.watch.watchdog import Watch
from netlayer.errors import HardwareMissing
from netlayer.workload.buckets import USUAL_BLOCKS, slot_bytes

Rows = tuple[slice, slice]
"""Ranks and rows of each: an index into [W, m, C]."""

DEFAULT_CHUNKS = 4


class Gathering(ABC):
    """An all-gather under way. Iterate over `parts` first, then ask for `whole`, then `close`."""

    @abstractmethod
    def parts(self) -> Iterator[tuple[Rows, Tensor]]:
        """Yield every part once, in the order of arrival: its rows, and their values [ranks, rows, C]."""

    @abstractmethod
    def whole(self) -> Tensor:
        """[M, C], to be read before `close`."""

    def kept(self) -> Tensor:
        """The same, to be read after `close` too."""
        return self.whole()

    @abstractmethod
    def close(self) -> None:
        """Release the gathered rows: they have been read once the current stream gets here."""


class Scattering(ABC):
    """A reduce-scatter under way. Fill each of `parts` in the body of the loop over it, then ask for the `result`."""

    @abstractmethod
    def parts(self) -> Iterator[tuple[Rows, Tensor]]:
        """Yield every part once: its rows, and a buffer [ranks, rows, C] to fill with this rank's summand."""

    @abstractmethod
    def result(self, bias_C: Tensor | None = None) -> Tensor:
        """The sum over ranks of this rank's rows, [m, C]; with a bias, which is whole on every rank, added."""


class TensorExchange(ABC):
    """One rank's side of a tensor-parallel group; every rank calls the same methods in the same order.

    One gathering and one scattering may be under way at a time, more where it defers, and sums by `start_all_reduce`.

    Args:
        comm: of the group; whatever torch.distributed runs on the group runs there, in order.
    """

    defers = False
    """Whether backward passes gather and compute what nobody waits for while parts are under way: where these may take
    longer than the products that wait for them."""
    spared = 0
    """Multiprocessors that products should leave to the kernels that carry the parts meanwhile."""

    def __init__(self, comm: Communicator) -> None:
        self.comm, self.rank, self.world_size = comm, comm.rank, comm.world_size
        self.keeps_gathered = False
        """Whether linears keep what they have gathered until the backward pass, and do not gather it again there."""
        self.last_column: weakref.ref[Any] | None = None
        """Autograd's context of the column-parallel linear that was called last; here, for the linears of a group call
        in one order, and the next one's backward pass comes before its (`collectives.tensor.linear`)."""
        self.deferred: list[weakref.ref[Promise]] = []
        """Weights' gradients that wait for parts to be under way."""

    def compute_deferred(self) -> None:
        """Compute deferred gradients, when parts are in flight; those of other backward passes are left to them."""
        deferred, self.deferred = self.deferred, []
        for promise in (reference() for reference in deferred):
            if promise is not None and promise.is_due:
                promise()

    @abstractmethod
    def gather(self, own_mC: Tensor, *, in_parts: bool = True) -> Gathering:
        """Start to gather every rank's rows.

        Args:
            in_parts: False: they are not read before all are there.
        """

    @abstractmethod
    def scatter(self, num_rows: int, num_columns: int, like: Tensor) -> Scattering:
        """Begin a sum over ranks of matrices [W * num_rows, num_columns] of the dtype of `like`."""

    def agree_on_shapes(self, num_rows: int, features_in: int, features_out: int, *, is_first: bool) -> None:
        """Compare what each rank is about to multiply; every rank calls it before it gathers or scatters.

        On the CPU always, for gloo ends the process where sizes differ. On CUDA that would make the host wait: there it
        is compared at a layer's first call alone, and nothing inside a capture.

        Args:
            num_rows: of this rank's input.
            features_in, features_out: of this rank's part of the layer.
            is_first: whether it is the layer's first call.

        Raises:
            ValueError: ranks differ; on all of them.
        """
        if self.comm.world_size == 1 or self.comm.is_capturing or not (is_first or self.comm.stream is None):
            return
        shapes = self.comm.all_gather_ints([num_rows, features_in, features_out], "shapes")
        remedies = {
            "rows": "each rank gives as many rows; pad the shorter ones",
            "features in": "make the layer with one width on every rank",
            "features out": "make the layer with one width on every rank",
        }
        for index, (name, remedy) in enumerate(remedies.items()):
            values = [shape[index] for shape in shapes]
            if len(set(values)) > 1:
                raise ValueError(f"{spread(name, values, self.comm.ranks)}: {remedy}")

    def close(self) -> None:  # noqa: B027 - most have nothing to give back
        """Give windows back, between exchanges; every rank calls it, and exchanges nothing more."""

    def start_all_reduce(self, tensor: Tensor) -> Work:
        """The sum over ranks, in place, once it was waited for."""
        return self.comm.start_all_reduce(tensor)


def open_exchange(
    group: dist.ProcessGroup | None,
    device: torch.device | str,
    *,
    path: str = "auto",
    chunks: int = DEFAULT_CHUNKS,
    keeps_gathered: bool = False,
    recorder: Recorder | None = None,
    watch: Watch | None = None,
) -> TensorExchange:
    """The best exchange for a tensor-parallel group; every rank of it calls this.

    Args:
        group: used by nothing else from now on; None: one rank alone.
        path: `peer` (memory of the peers), `comm` (torch.distributed), or `auto`: peer where it can be.
        chunks: parts of a gather or scatter by communicator; more hide more, and make smaller matmuls.
        keeps_gathered: linears keep the rows of all ranks until the backward pass, a fifth less to carry.
        recorder: notes every collective.
        watch: says who is late where a collective does not complete.

    Raises:
        HardwareMissing: `peer` was asked for and cannot be.
    """
    if path not in ("auto", "peer", "communicator"):
        raise ValueError(f"path must be auto, peer or communicator, got {path!r}")
    device = as_device(device)
    alone = group is None or dist.get_world_size(group) == 1
    exchange: TensorExchange | None = None
    if path != "communicator" and not alone:
        reason = why_unusable(group, device)
        if reason is None:
            assert group is not None
            exchange = PeerTensorExchange(group, device, recorder, watch)
        elif path == "peer":
            raise HardwareMissing(f"no peer memory in this group: {reason}; take path='communicator'")
    if exchange is None:
        exchange = CommunicatorTensorExchange(
            Communicator("tensor", None if alone else group, device, recorder, watch), chunks
        )
    exchange.keeps_gathered = keeps_gathered
    return exchange


class PeerTensorExchange(TensorExchange):
    """Parts are the rows of one rank. Windows grow as matrices do: call `reserve` before a CUDA graph is captured.

    A record is of this rank's own sends, on the stream that carries them; a wait is for those of the peers.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        recorder: Recorder | None = None,
        watch: Watch | None = None,
    ) -> None:
        super().__init__(Communicator("tensor", group, device, recorder, watch))
        self.group, self.device = group, device
        self._rounds: dict[str, PeerRounds] = {}

    def reserve(self, num_bytes: int) -> None:
        """Make room for rows of `num_bytes` a rank; every rank calls it."""
        for kind in ("gather", "scatter"):
            self._rounds_of(kind, num_bytes)

    def close(self) -> None:
        """Give windows back, once the device has come here."""
        while self._rounds:
            self._rounds.popitem()[1].close()

    def gather(self, own_mC: Tensor, *, in_parts: bool = True) -> Gathering:  # noqa: ARG002 - a part is a rank's
        own_mC = own_mC.contiguous()
        _check_sendable(own_mC)
        return _PeerGathering(self, self._rounds_of("gather", own_mC.nbytes), own_mC)

    def scatter(self, num_rows: int, num_columns: int, like: Tensor) -> Scattering:
        partial_WmC = like.new_empty(self.world_size, num_rows, num_columns)
        _check_sendable(partial_WmC[0])
        return _PeerScattering(self, self._rounds_of("scatter", partial_WmC[0].nbytes), partial_WmC)

    def sending(self, rounds: PeerRounds, kind: str, num_bytes: int) -> AbstractContextManager[Collective | None]:
        """Wrap the sends of one collective: they start, and are recorded, from this point of the current stream on."""
        rounds.wait_for_current_stream()
        return self.comm.recording("tensor", kind, num_bytes, lane=f"tensor {kind}", stream=rounds.copy_stream)

    def _rounds_of(self, kind: str, num_bytes: int) -> PeerRounds:
        rounds = self._rounds.get(kind)
        if rounds is None or rounds.slot_bytes < num_bytes:
            if self.comm.is_capturing:
                raise RuntimeError(f"no window for {num_bytes} bytes yet: call reserve({num_bytes}) before capturing")
            if rounds is not None and rounds.is_open:
                raise RuntimeError(
                    f"no window for {num_bytes} bytes while a {kind} is under way: call reserve({num_bytes})"
                )
            # A new window's start waits for all ranks and their devices: nobody uses the old one any longer, and
            # nothing else runs on the group.
            old, streams = rounds, None if rounds is None else rounds.streams
            rounds = PeerRounds(self.group, slot_bytes(num_bytes), self.device, streams)
            self._rounds[kind] = rounds
            if old is not None:
                old.close()
        return rounds


class _PeerGathering(Gathering):
    def __init__(self, exchange: PeerTensorExchange, rounds: PeerRounds, own_mC: Tensor) -> None:
        self._exchange, self._rounds, self._own_mC = exchange, rounds, own_mC
        self._is_whole = False
        num_bytes = exchange.world_size * own_mC.nbytes
        self._counted = exchange.comm.counted("all_gather", num_bytes)
        rounds.begin()
        self._staged_WmC = rounds.staged(own_mC.nbytes).view(own_mC.dtype).view(exchange.world_size, *own_mC.shape)
        with exchange.sending(rounds, "all_gather", num_bytes) as self._collective:
            for ahead in range(1, exchange.world_size):
                rounds.send(own_mC, ahead)

    def parts(self) -> Iterator[tuple[Rows, Tensor]]:
        rank, world_size = self._exchange.rank, self._exchange.world_size
        yield _rows_of(rank), self._own_mC.unsqueeze(0)
        for post_reduce_stream in range(1, world_size):
            source = (rank - post_reduce_stream) % world_size
            with self._exchange.comm.waiting(self._collective):
                self._rounds.wait(post_reduce_stream)
            yield _rows_of(source), self._staged_WmC[source].unsqueeze(0)

    def whole(self) -> Tensor:
        if not self._is_whole:
            self._rounds.send(self._own_mC, 0)
            with self._exchange.comm.waiting(self._collective):
                self._rounds.wait(1, self._exchange.world_size - 1)
                self._rounds.join()
            self._is_whole = True
        return self._staged_WmC.flatten(0, 1)

    def kept(self) -> Tensor:
        return self.whole().clone()

    def close(self) -> None:
        self._rounds.finish()
        _settle(self._counted)


class _PeerScattering(Scattering):
    def __init__(self, exchange: PeerTensorExchange, rounds: PeerRounds, partial_WmC: Tensor) -> None:
        self._exchange, self._rounds, self._partial_WmC = exchange, rounds, partial_WmC
        self._collective: Collective | None = None
        self._counted = exchange.comm.counted("reduce_scatter", partial_WmC.nbytes)
        rounds.begin()

    def parts(self) -> Iterator[tuple[Rows, Tensor]]:
        rank, world_size = self._exchange.rank, self._exchange.world_size
        part_bytes = self._partial_WmC.nbytes // (world_size - 1)
        for ahead in range(1, world_size):  # this rank's own rows last: they need not travel
            peer = (rank + ahead) % world_size
            part_mC = self._partial_WmC[peer]
            yield _rows_of(peer), part_mC.unsqueeze(0)
            with self._exchange.sending(self._rounds, "reduce_scatter", part_bytes) as self._collective:
                self._rounds.send(part_mC, ahead)
        yield _rows_of(rank), self._partial_WmC[rank].unsqueeze(0)

    def result(self, bias_C: Tensor | None = None) -> Tensor:
        """Wait for the peers' parts of this rank's rows, and return their sum, plus a bias, [m, C]."""
        own_mC = self._partial_WmC[self._exchange.rank]
        out_mC = torch.empty_like(own_mC)
        with self._exchange.comm.waiting(self._collective):
            self._rounds.wait(1, self._exchange.world_size - 1)
        in_sum = bias_C is not None and adds_in_sum(bias_C, out_mC)
        self._rounds.reduce(own_mC, out_mC, bias_C if in_sum else None)
        self._rounds.finish()
        _settle(self._counted)
        return out_mC if bias_C is None or in_sum else out_mC.add_(bias_C)


class CommunicatorTensorExchange(TensorExchange):
    """Parts are some rows of every rank, each one collective of torch.distributed.

    [Note: who is first] NCCL's kernel needs whole multiprocessors, and a product takes all of them until it ends: a
    part whose kernel comes a microsecond behind the product waits for it, and nothing is hidden. So products leave it
    some.

    Args:
        comm: of the tensor-parallel group.
        chunks: parts, where the number of rows divides by it; else the next smaller number that divides.
    """

    def __init__(self, comm: Communicator, chunks: int = DEFAULT_CHUNKS) -> None:
        if chunks < 1:
            raise ValueError(f"chunks must be at least 1, got {chunks}")
        super().__init__(comm)
        self.chunks = chunks if comm.world_size > 1 else 1
        self.defers = self.chunks > 1
        # The blocks of a product come in pairs on neighbours: one that is taken may cost it two.
        self.spared = 2 * nccl_blocks(os.environ) if self.defers and comm.stream is not None else 0

    def gather(self, own_mC: Tensor, *, in_parts: bool = True) -> Gathering:
        return _CommunicatorGather(self, own_mC, self.slices(len(own_mC)) if in_parts else [slice(0, len(own_mC))])

    def scatter(self, num_rows: int, num_columns: int, like: Tensor) -> Scattering:
        return _CommunicatorScatter(self, like.new_empty(num_rows, num_columns))

    def slices(self, num_rows: int) -> list[slice]:
        """The rows of each part."""
        chunks = next(count for count in range(min(self.chunks, num_rows), 0, -1) if num_rows % count == 0)
        step = num_rows // chunks
        return [slice(start, start + step) for start in range(0, num_rows, step)]


class _CommunicatorGather(Gathering):
    def __init__(self, exchange: CommunicatorTensorExchange, own_mC: Tensor, slices: Sequence[slice]) -> None:
        self._exchange, self._own_mC = exchange, own_mC
        self._stream = None if exchange.comm.stream is None else current_stream(own_mC.device)
        self._works: list[tuple[slice, Tensor, Work]] = []
        for rows in slices:
            part_WiC = own_mC.new_empty(exchange.world_size, rows.stop - rows.start, own_mC.shape[1])
            part_WiC[exchange.rank] = own_mC[rows]
            self._works.append((rows, part_WiC, exchange.comm.all_gather(part_WiC.view(-1))))

    def __del__(self) -> None:
        """Close it for a backward pass that raised or did not use it: the device may still write to its memory."""
        if self._stream is not None and not all(work.was_waited_for for _, _, work in self._works):
            with torch.cuda.stream(self._stream):
                self.close()

    def parts(self) -> Iterator[tuple[Rows, Tensor]]:
        for rows, part_WiC, work in self._works:
            work.wait()
            yield (slice(None), rows), part_WiC

    def whole(self) -> Tensor:
        if len(self._works) == 1:
            [(_, whole_WmC, work)] = self._works
            work.wait()
            return whole_WmC.flatten(0, 1)
        whole_WmC = self._own_mC.new_empty(self._exchange.world_size, *self._own_mC.shape)
        for rows, part_WiC, work in self._works:
            work.wait()
            whole_WmC[:, rows] = part_WiC
        return whole_WmC.flatten(0, 1)

    def close(self) -> None:
        for _, _, work in self._works:
            work.wait()


class _CommunicatorScatter(Scattering):
    def __init__(self, exchange: CommunicatorTensorExchange, out_mC: Tensor) -> None:
        self._exchange, self._out_mC = exchange, out_mC
        self._works: list[Work] = []

    def parts(self) -> Iterator[tuple[Rows, Tensor]]:
        for rows in self._exchange.slices(self._out_mC.shape[0]):
            shape = (self._exchange.world_size, rows.stop - rows.start, self._out_mC.shape[1])
            part_WiC = self._out_mC.new_empty(shape)
            yield (slice(None), rows), part_WiC
            out = self._out_mC[rows].view(-1)
            self._works.append(self._exchange.comm.reduce_scatter(out, part_WiC.view(-1)))

    def result(self, bias_C: Tensor | None = None) -> Tensor:
        for work in self._works:
            work.wait()
        return self._out_mC if bias_C is None else self._out_mC.add_(bias_C)


def nccl_blocks(variables: Mapping[str, str]) -> int:
    """Multiprocessors that a collective of NCCL takes: as commonly without NVLink, or the fewer that it is held to.

    Args:
        variables: of the environment.
    """
    limits = (variables.get(name, "") for name in ("NCCL_MAX_CTAS", "NCCL_MAX_NCHANNELS"))
    return min([USUAL_BLOCKS, *(int(limit) for limit in limits if limit.isdecimal() and int(limit))])


def _check_sendable(rows_mC: Tensor) -> None:
    """Raise for rows that cannot be sent, before anything is: a later error would leave the peers waiting."""
    if rows_mC.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(
            f"peer memory carries bfloat16, float16 and float32, got {rows_mC.dtype}; take path='communicator'"
        )
    num_bytes = rows_mC.numel() * rows_mC.element_size()
    if num_bytes % 16:
        shape = " x ".join(map(str, rows_mC.shape))
        raise ValueError(
            f"peer memory carries multiples of 16 bytes, got {shape} = {num_bytes}; take path='communicator'"
        )


def _rows_of(rank: int) -> Rows:
    return slice(rank, rank + 1), slice(None)


def _settle(counted: Operation | None) -> None:
    """The round is over, once the current stream comes here."""
    if counted is not None:
        counted.settle()
