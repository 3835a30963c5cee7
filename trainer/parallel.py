"""One rank's part of a model that is spread over tensor, pipeline and data parallel ranks, and a step through it.

The blocks are cut into p * v runs (p stages, v chunks a stage: `netlayer.workload.stages`); a chunk's linears are
spread over the tensor-parallel group, its masters and optimiser state over the data-parallel one
(`collectives.sharded.data_parallel`, a wrapper a chunk, so that a chunk's gradients are scattered while the next one
computes). Whatever the layout, losses and gradients are those of one process, but for the order of sums.

[Note: gradients that are not whole] Between the linears a tensor-parallel rank has some positions only, so gradients of
norms and positions are sums over its own; they are added up over the group once a step, on the shards. A tied token
table has a gradient on the first and on the last stage; these are added up likewise.

Not covered: expert parallelism, layers that do not divide by p * v.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, get_args, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from collectives.context import ContextExchange
from collectives.pipeline.channel import PipelineChannel
from collectives.pipeline.links import Path, PipelineLinks, open_link_groups
from collectives.sharded.data_parallel import DataCommunicators, ShardedDataParallel
from collectives.sharded.float8 import Float8Weights
from collectives.sharded.gradient import each_norm, total_norm
from collectives.sharded.policies import MixedPrecision, Overlap, Reshard
from collectives.sharded.prepare import open_communicators, open_groups, open_replicas
from collectives.tensor.exchange import DEFAULT_CHUNKS, TensorExchange, open_exchange
from collectives.tensor.linear import ColumnParallelLinear, RowParallelLinear
from collectives.transport.communicator import Communicator, Work
from collectives.transport.symmetric import why_unusable
from collectives.transport.windows import are_worth_it
from collectives.watch.recorder import Recorder
from collectives.watch.watchdog import Watch
from netlayer.config.tree import JobConfig
from netlayer.layout import Dimension, ParallelLayout
from netlayer.rendezvous import Groups
from netlayer.workload.comm_bytes import bucket_limit
from netlayer.workload.dtypes import gradient_dtype
from netlayer.workload.fit import has_room_for_copies, has_room_for_windows
from netlayer.workload.memory import frees_parameters, in_flight_reductions, may_copy_gradients
from netlayer.workload.schedule import Schedule, forward_only
from netlayer.workload.stages import run_of
from netlayer.workload.zero_bubble import of_job
from trainer.model.context import Context
from trainer.model.gpt import GPT, build_model, initialiser
from trainer.model.linears import float8_weights, parts
from trainer.model.packed import Packed
from trainer.ops.backend import check_operators
from trainer.ops.fp8 import check_fp8
from trainer.ops.fp8_gather import PieceQuantiser
from trainer.pipeline import StageModel, run_schedule

logger = logging.getLogger(__name__)

MicroBatch = tuple[Tensor, Tensor]
"""Token ids and the token that follows each, [B, T] each."""
PackedBatch = tuple[Tensor, Tensor, Packed]
"""The same of packed documents, or where some targets do not count."""
Batches = Sequence[MicroBatch | PackedBatch]

TIED = "tied"
_EVALUATED_AT_ONCE = 4  # micro-batches a stage of the pipeline
_MOST_GRAPHS = 15
"""Of blocks: whole, or attention, with a window or without; or an MLP; in training, and twice without gradients."""


def tied_partition(layout: ParallelLayout) -> list[list[int]]:
    """Ranks that hold the same token table: of the first and the last stage, one pair for each rank of a stage."""
    return [[group[0], group[-1]] for group in layout.groups("pp")]


def further_groups(job: JobConfig) -> Mapping[str, list[list[int]]]:
    """Return the groups that the job needs besides those of its layout's dimensions: for `open_world`."""
    layout = job.parallel.layout
    return {TIED: tied_partition(layout)} if job.model.tied_embeddings and layout.pp > 1 else {}


@dataclass(frozen=True)
class Slot:
    """A piece of a parameter on this rank's shard, and how its gradient counts.

    Args:
        name: of the parameter in the whole model.
        piece: 1-D master.
        is_part: each tensor-parallel rank has another part of the parameter.
        is_partial: its gradient is still to be added up over the tensor-parallel group.
        counts: whether this rank counts it in a norm over all ranks: one of those that hold the same.
    """

    name: str
    piece: nn.Parameter
    is_part: bool
    is_partial: bool
    counts: bool


class ParallelModel:
    """One rank's chunks of the model. Every rank calls the same methods in the same order.

    Args:
        job: resolved configuration.
        seed: of the initial values.
        rank: of this process in the world.
        device: that it computes on.
        groups: of `open_world`; None: this rank is alone.
        recorder: notes every collective and message.
        watch: says who is late.
    """

    def __init__(
        self,
        job: JobConfig,
        seed: int,
        rank: int,
        device: torch.device,
        groups: Groups | None = None,
        recorder: Recorder | None = None,
        watch: Watch | None = None,
    ) -> None:
        self.job, self.device, self.recorder = job, device, recorder
        self.layout = layout = job.parallel.layout
        self.place = layout.coordinates(rank)
        self.data_rank = layout.data_rank(self.place)
        """Which part of a batch this rank has; context-parallel ranks have the same."""
        self.groups = {**dict.fromkeys(get_args(Dimension)), **(groups or {})}
        # For what all ranks agree on: norms, and whether somebody asks for the end.
        self.world = Communicator("world", dist.group.WORLD if layout.world_size > 1 else None, device, recorder, watch)
        self.tied = Communicator(TIED, self.groups.get(TIED), device, recorder, watch)
        self.exchange = self._open_exchange(recorder, watch)
        self.context = self._open_context(recorder, watch)
        self.is_first, self.is_last = self.place.pp == 0, self.place.pp == layout.pp - 1
        self._frees, self._seed = frees_parameters(job), seed
        check_operators(job.model.operators, device)
        if job.model.fp8 != "off":
            check_fp8(job.model.fp8, device)
        # Without memory: it gets its values bucket by bucket, as it is wrapped. Whole in float32 it might not fit, and
        # the memory that it leaves would be in pieces.
        spread = self.exchange, self.context
        modules = [
            build_model(job.model, seed, torch.device("meta"), run_of(job, self.place.pp, chunk), *spread)
            for chunk in range(layout.vpp)
        ]
        self._compile(modules)
        self.has_windows = self._takes_windows()
        """Whether parameters lie in NCCL's windows, and gradients that are not copied to the peers."""
        self.has_peer_reduce = self._takes_peer_reduce()
        """Whether copy engines carry the gradients to the peers."""
        # Before the chunks, which share them: streams and communicators are few.
        self._data_comms = self._open_data_comms(recorder, watch)
        self.chunks = [self._wrap(module) for module in modules]
        if device.type == "cuda":
            torch.cuda.empty_cache()  # what buckets were made of
        self.slots = [slot for chunk in self.chunks for slot in self._slots(chunk)]
        self._stepped_square: Tensor | None = None
        """Of the gradients that this step's backward pass has stepped, where they are measured."""
        self.pipeline = _Pipeline(self, watch) if layout.pp > 1 else None

    def start_step(self, step: int) -> None:
        """Launch the first all-gathers: before the data is loaded."""
        for chunk in self.chunks:
            chunk.start_step(step)

    def release_gradients(self) -> None:
        """Give the memory of the last step's gradients back until this step's come."""
        if not self.job.overlap.step_in_backward:  # whose steps may still read them, on a stream of their own
            for chunk in self.chunks:
                chunk.release_gradients()

    def accumulate(self, batches: Batches) -> Tensor:
        """Forward and backward of all micro-batches of this data-parallel rank.

        Returns:
            Their mean loss, on the device; zero on all but the last pipeline stage.
        """
        if self.pipeline is not None:
            return self.pipeline.train(batches)
        [chunk], total = self.chunks, self.zero()
        for index, batch in enumerate(batches):
            # Only the last pass is reduced: the others add up on this rank.
            with contextlib.nullcontext() if index == len(batches) - 1 else chunk.no_sync():
                with self._computing("forward", index):
                    loss = _loss(chunk, *batch) / len(batches)
                with self._computing("backward", index):
                    (loss / self.layout.gradient_ranks).backward()  # type: ignore[no-untyped-call]  # gradients are sums over ranks
            # Added on the device: a number for the host would make it wait in every micro-batch.
            total += loss.detach()
        return total

    def _computing(self, name: str, micro_batch: int) -> contextlib.AbstractContextManager[None]:
        if self.recorder is None:
            return contextlib.nullcontext()
        return self.recorder.computing(name, micro_batch=micro_batch, chunk=0)

    @torch.no_grad()
    def evaluate(self, batches: Batches) -> Tensor:
        """Mean loss without gradients; zero on all but the last pipeline stage."""
        if self.pipeline is not None:
            return self.pipeline.evaluate(batches)
        [chunk] = self.chunks
        losses = [_loss(chunk, *batch) for batch in batches]
        return torch.stack(losses).mean()

    def finish_gradients(self, *, waits: bool = True) -> None:
        """Have the gradient of the whole batch on every shard.

        Args:
            waits: until it is there. False: `grad_norm` and the optimisers wait for what they read, and compute while
                the last gradients are reduced; where they are added up over other ranks too, they are waited for here.
        """
        adds_up = self.exchange is not None or self.tied.group is not None
        for chunk in self.chunks:
            chunk.finish_gradients(waits=waits or adds_up or chunk.step_in_backward)
        # [Note: gradients that are not whole]: so far these are of this rank's positions alone.
        if self.exchange is not None:
            _add_up([slot for slot in self.slots if slot.is_partial], self.exchange.start_all_reduce)
        # The first and the last stage have a part of the table's gradient each.
        if self.tied.group is not None:
            tables = [slot for slot in self.slots if slot.name.endswith("tokens.weight")]
            _add_up(tables, self.tied.start_all_reduce)

    def grad_norm(self) -> Tensor:
        """Return the norm of all finished gradients, over all ranks.

        Where the backward pass has stepped them, it is that of what `measure_in_backward` saw.
        """
        squared = self.zero()
        if self._stepped_square is not None:
            squared, self._stepped_square = self._stepped_square, self.zero()
        # A rank may hold nothing that counts, and still takes part in the sum below.
        elif norms := self._own_norms():
            squared += torch.stack(norms).square().sum()
        self.own_square = squared.clone()  # where the norm is not finite, this says on which rank
        self.world.all_reduce(squared)
        return squared.sqrt()

    def _own_norms(self) -> list[Tensor]:
        """Return the norms of the gradients that this rank counts, each taken once it is there; in a fixed order."""
        counted = [slot.piece for slot in self.slots if slot.counts]
        # Filled in whatever order gradients come, and read in this one: the sum is the same to the bit.
        norms: dict[nn.Parameter, Tensor] = dict.fromkeys(counted, self.zero())
        for buckets in itertools.chain.from_iterable(chunk.as_gradients_come() for chunk in self.chunks):
            pieces = [piece.parameter for bucket in buckets for piece in bucket.pieces if piece.parameter in norms]
            grads = {piece: piece.grad for piece in pieces if piece.grad is not None}
            if grads:
                norms |= zip(grads, each_norm(list(grads.values())), strict=True)
        return list(norms.values())

    def optimizer(self, build: Callable[[ShardedDataParallel], torch.optim.Optimizer]) -> Optimizers:
        """Build the optimisers of all chunks, as one."""
        return Optimizers([build(chunk) for chunk in self.chunks])

    def measure_in_backward(self, optimizer: Optimizers) -> None:
        """Have gradients measured, bucket by bucket, that the backward pass steps and drops: see `grad_norm`."""
        self._stepped_square = self.zero()
        if self.place.dp_replicate > 0:  # of replicas, which hold the same gradients, the first one counts
            return

        def measure(each: torch.optim.Optimizer, *_: object) -> None:
            grads = [piece.grad for group in each.param_groups for piece in group["params"] if piece.grad is not None]
            if grads and self._stepped_square is not None:
                self._stepped_square += total_norm(grads).square()

        for each in optimizer.each:
            # The last moment at which the gradients are there: the step inside the pass drops them.
            each.register_step_pre_hook(measure)

    def wait_parameters(self) -> None:
        for chunk in self.chunks:
            chunk.wait_for_gathers()

    def wait_for_all(self) -> None:
        """Wait until every rank has called this."""
        # An all-reduce does: it completes on no rank before all have launched it.
        self.world.all_reduce(self.zero())
        self.world.wait_on_host()

    def close(self) -> None:
        """End the training: parameters are current; windows, peer memory and threads are given back. Twice is once.

        Every rank calls it. Process groups stay until `destroy_process_group`.
        """
        for chunk in self.chunks:
            chunk.close()
        if self.pipeline is not None:
            self.pipeline.close()
        if self.exchange is not None:
            self.exchange.close()

    def zero(self) -> Tensor:
        """Return a zero on the device, a scalar of the dtype of losses and norms."""
        return torch.zeros((), dtype=torch.float64 if self._is_wide else torch.float32, device=self.device)

    @property
    def _is_wide(self) -> bool:
        return self.job.model.dtype == "float64"

    @property
    def _memory_bytes(self) -> int:
        """Return the GPU's memory in bytes."""
        return int(torch.cuda.get_device_properties(self.device).total_memory)

    def _takes_windows(self) -> bool:
        setting = self.job.overlap.windows
        if self.device.type != "cuda" or setting != "auto" or self._frees:
            return bool(setting) and self.device.type == "cuda" and not self._frees
        has_room = has_room_for_windows(self.job, self._memory_bytes)
        return are_worth_it(self.groups["dp"], self.world, has_room=has_room)

    def _takes_peer_reduce(self) -> bool:
        group = self.groups["dp"]
        # A job may copy beside windows, and this machine may have none.
        takes_memory = self.has_windows or (self._frees and self.device.type == "cuda")
        if group is None or not (takes_memory and may_copy_gradients(self.job)):
            return False
        # Asked on every rank of the group, whatever this rank's memory: it is collective.
        reason = why_unusable(group, self.device)
        if reason is None and not has_room_for_copies(self.job, self._memory_bytes):
            reason = "the GPU has no memory for copies beside"
        if reason is not None and self.world.rank == 0:
            logger.info("NCCL reduces the gradients, not job.overlap.peer_reduce: %s", reason)
        return reason is None

    def _open_exchange(self, recorder: Recorder | None, watch: Watch | None) -> TensorExchange | None:
        if self.layout.tp == 1:
            return None
        overlap = self.job.overlap
        # The memory of the peers carries no float64.
        path = "auto" if overlap.tp and overlap.peer_memory and not self._is_wide else "communicator"
        return open_exchange(
            self.groups["tp"],
            self.device,
            path=path,
            chunks=DEFAULT_CHUNKS if overlap.tp else 1,
            keeps_gathered=overlap.save_gathered_input,
            recorder=recorder,
            watch=watch,
        )

    def _open_context(self, recorder: Recorder | None, watch: Watch | None) -> Context | None:
        group = self.groups["cp"]
        if group is None:
            return None
        return Context(ContextExchange(group, self.device, recorder, watch), self.job.overlap.cp)

    def _open_data_comms(self, recorder: Recorder | None, watch: Watch | None) -> DataCommunicators:
        """Open them once for all chunks: every rank of the group runs them in the order of its stage's schedule."""
        group = self.groups["dp"]
        names, windows = ("gather", "reduce"), self.has_windows
        gather, reduce = [None, None] if group is None else open_groups(group, self.device, names, windows=windows)
        pair = open_communicators(None, (gather, reduce), self.device, None, recorder, watch)
        replicas = open_replicas(self.groups["dp_replicate"], self.device, None, recorder, watch)
        return pair if replicas is None else (*pair, replicas)

    def _compile(self, modules: Sequence[GPT]) -> None:
        if not self.job.model.compile:
            return
        dynamo = torch._dynamo.config  # past its recompile limit, Dynamo runs a block uncompiled
        dynamo.recompile_limit = max(dynamo.recompile_limit, _MOST_GRAPHS)
        for block in (block for module in modules for block in module.blocks.values()):
            for linear in block.modules():
                if isinstance(linear, ColumnParallelLinear | RowParallelLinear):
                    # The compiler cannot follow streams and collectives: blocks are compiled before and after linears.
                    linear.forward = torch.compiler.disable(linear.forward)  # type: ignore[method-assign, no-untyped-call]
            block.compile(dynamic=False)

    def _wrap(self, module: GPT) -> ShardedDataParallel:
        """Shard a chunk of the model over the data-parallel ranks, as the job says."""
        overlap = self.job.overlap
        if self._is_wide:
            module.double()
        # To read a bias past its block would have the block gathered once more.
        module.adds_in_blocks = self._frees and self.job.model.bias
        blocks = set(module.blocks.values())
        dtype = getattr(torch, self.job.model.dtype)
        return ShardedDataParallel(
            module,
            comms=self._data_comms,
            # The last one stays between its passes, in stage 3: a block, for tables stay as they are handed out.
            units=sorted(module.units, key=blocks.__contains__),
            precision=MixedPrecision(dtype, getattr(torch, gradient_dtype(self.job)), self._float8(module)),
            overlap=Overlap(
                enabled=overlap.dp,
                prefetch=overlap.prefetch,
                in_flight=in_flight_reductions(self.job),
                windows=self.has_windows,
                peer_reduce=self.has_peer_reduce,
            ),
            reshard=Reshard.of_stage(self.job.parallel.stage),
            device=self.device,
            init=initialiser(module, self._seed),
            bucket_bytes=bucket_limit(self.job),
            unused="zero",  # every parameter is used, and ranks need not ask each other
            data_writes="ignore",  # nobody writes there but a checkpoint, which says so
            broadcast_buffers=False,  # constants
            mean=False,
        )

    def _float8(self, module: GPT) -> Float8Weights | None:
        """Say which weights products read in 8 bits, and whether they travel so."""
        model, names = self.job.model, float8_weights(module)
        if model.fp8 == "off" or not names:
            return None
        quantiser = PieceQuantiser(model.fp8, model.operators) if model.fp8_param_gather else None
        return Float8Weights(lambda name, _shape: name in names, quantiser)

    def _slots(self, chunk: ShardedDataParallel) -> Iterator[Slot]:
        cut, spread = parts(chunk.module), self.layout.tp > 1
        doubled = self.tied.group is not None and self.is_last
        for name, _, piece in chunk.named_shards():
            is_part = name in cut
            # Of ranks that hold the same values one counts, or the norm would be too large.
            is_first = self.place.dp_replicate == 0 and (is_part or self.place.tp == 0)
            counts = is_first and not (doubled and name.endswith("tokens.weight"))
            yield Slot(name, piece, is_part, spread and not is_part, counts)


@torch.no_grad()
def _add_up(slots: Sequence[Slot], start_all_reduce: Callable[[Tensor], Work]) -> None:
    """Sum the gradients of these pieces over the ranks that hold the same ones, in one message."""
    grads = [slot.piece.grad for slot in slots if slot.piece.grad is not None]
    if not grads:
        return
    # One message for many small tensors, such as the vectors of norms.
    flat = torch.cat(grads)
    start_all_reduce(flat).wait()
    torch._foreach_copy_(grads, list(torch.split(flat, [len(grad) for grad in grads])))


@runtime_checkable
class _Clips(Protocol):
    """An optimiser that scales gradients while it steps."""

    def clip(self, norm: Tensor, max_norm: float) -> None:
        """Clip the gradients, as `Optimizers.clip` does."""


class Optimizers:
    """One optimiser a chunk, used as one."""

    def __init__(self, each: Sequence[torch.optim.Optimizer]) -> None:
        self.each = each

    def step(self) -> None:
        for optimizer in self.each:
            optimizer.step()

    def clip(self, norm: Tensor, max_norm: float) -> None:
        """Have the next step take gradients whose norm is at most `max_norm`.

        Args:
            norm: of all of them, over all ranks and chunks.
            max_norm: infinity: they stay as they are.
        """
        if math.isinf(max_norm):
            return
        for optimizer in self.each:
            if isinstance(optimizer, _Clips):
                optimizer.clip(norm, max_norm)
            else:
                pieces = [piece for group in optimizer.param_groups for piece in group["params"]]
                torch.nn.utils.clip_grads_with_norm_(pieces, max_norm, norm)

    def zero_grad(self) -> None:
        for optimizer in self.each:
            optimizer.zero_grad()

    def set_learning_rate(self, lr: float) -> None:
        for group in (group for optimizer in self.each for group in optimizer.param_groups):
            group["lr"] = lr

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the state of this rank's shards."""
        return [optimizer.state_dict() for optimizer in self.each]


def _loss(chunk: nn.Module, x: Tensor, targets_BT: Tensor, packed: Packed | None = None) -> Tensor:
    """Loss of a micro-batch: the mean over all targets, or its part of that over the batch's targets that count."""
    if packed is None:
        return chunk(x, targets_BT)  # type: ignore[no-any-return]
    return chunk(x, targets_BT, packed) * packed.scale  # type: ignore[no-any-return]


def _beside(_tokens_BT: Tensor, _targets_BT: Tensor, packed: Packed | None = None) -> dict[str, Any]:
    """Return what a chunk without targets needs of a micro-batch, as keywords."""
    return {} if packed is None else {"packed": packed}


class _Pipeline:
    """The stage of this rank: its schedules and its channels."""

    def __init__(self, model: ParallelModel, watch: Watch | None) -> None:
        self.model, self.watch = model, watch
        layout, wraps = model.layout, model.layout.vpp > 1
        # All ranks make the groups of all pipelines: where NCCL's world is bound to a device, some alone cannot.
        several = layout.pp < layout.world_size
        groups = open_link_groups(list(layout.groups("pp")), model.device, wraps) if several else None
        path: Path = "auto" if model.job.overlap.peer_memory else "group"
        self.links = PipelineLinks(model.groups["pp"], model.device, wraps, groups=groups, path=path)
        self._ready: dict[tuple[str, int], tuple[Schedule, PipelineChannel]] = {}

    def train(self, batches: Batches) -> Tensor:
        with contextlib.ExitStack() as unsynced:
            for chunk in self.model.chunks:
                unsynced.enter_context(chunk.no_sync())  # but for its last backward pass of the step
            return self._run("train", batches)

    def evaluate(self, batches: Batches) -> Tensor:
        """Evaluate a few micro-batches at a time: without a backward pass stage 0 would pile up outputs."""
        size = _EVALUATED_AT_ONCE * self.model.layout.pp
        parts = [batches[first : first + size] for first in range(0, len(batches), size)]
        losses = (self._run("evaluate", part) * (len(part) / len(batches)) for part in parts)
        return sum(losses, self.model.zero())

    def close(self) -> None:
        self._ready.clear()
        self.links.close()

    def _run(self, kind: str, batches: Batches) -> Tensor:
        schedule, channel = self._channel(kind, len(batches))
        stage = StageModel(
            self.model.chunks,
            schedule,
            self.model.place.pp,
            inputs=lambda index: batches[index][0],
            loss=lambda index, chunk, x: _loss(chunk, x, *batches[index][1:]),
            last_backward=ShardedDataParallel.last_backward,
            num_replicas=self.model.layout.gradient_ranks,
            deferring=ShardedDataParallel.defer_weight_grads,
            beside=lambda index: _beside(*batches[index]),
        )
        run_schedule(schedule, channel, stage, self.model.recorder)
        return sum((loss / len(batches) for loss in stage.losses.values()), self.model.zero())

    def _channel(self, kind: str, num_micro_batches: int) -> tuple[Schedule, PipelineChannel]:
        """Return the schedule and the channel for so many micro-batches, made once."""
        # Kept for the next steps: a channel compares its arguments with its neighbours when it is made.
        key = kind, num_micro_batches
        if key not in self._ready:
            model, layout = self.model, self.model.layout
            if kind == "evaluate":
                schedule = forward_only(layout.pp, num_micro_batches, layout.vpp)
            else:
                schedule = of_job(model.job, num_micro_batches)
            # Between the linears a tensor-parallel rank has its share of the context-parallel rank's positions alone.
            shape = (
                model.job.model.seq_len // layout.cp // layout.tp,
                model.job.batch.micro_batch_size,
                model.job.model.hidden,
            )
            channel = PipelineChannel(
                shape,
                getattr(torch, model.job.model.dtype),
                schedule.traffic(model.place.pp),
                device=model.device,
                overlap=model.job.overlap.pp,
                recorder=model.recorder,
                watch=self.watch,
                links=self.links,
            )
            self._ready[key] = schedule, channel
        return self._ready[key]
