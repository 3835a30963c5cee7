"""Estimate of a rank's memory, part by part, before any of it is allocated.

Parameters, masters, gradients and optimiser state are counted exactly (but for less than `dp` elements of padding a
bucket). Activations are what the blocks of `trainer.model.gpt` save for their backward, operator by operator, as
Korthikanti et al. count them (arXiv 2205.05198, section 4: their 34 s b h bytes a layer, here 32 s b h for a GPT in
bfloat16, for there are no dropout masks, and attention keeps no scores; all of it over t), times the micro-batches that
the schedule has in flight (Narayanan et al., SC'21, section 2.2). Work space is what the largest operators hold for a
moment: an upper estimate. Not covered: torch, CUDA and NCCL themselves (some hundred MiB a rank), fragmentation,
evaluation, masks of sliding windows and the keys of other context-parallel ranks that these keep, gradients of vectors
until their bucket takes them.

[Note: where gradients are] Products write weights' gradients into their bucket (`collectives.sharded.slot`). Without
other data-parallel ranks that is what the optimiser reads, in any number of micro-batches: there is nothing else.
Among ranks it is what travels, or, where micro-batches add up or gradients wait (`zero_bubble`), whole wide sums, which
travel themselves or as narrow copies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from netlayer.config.model import RecomputeModule
from netlayer.config.tree import JobConfig, ModelConfig
from netlayer.workload.bucket_units import BucketUnit, bucket_units
from netlayer.workload.buckets import (
    COPIES_AT_ONCE,
    MOST_COPYING_RANKS,
    buffer_sizes,
    reductions_in_flight,
    slot_bytes,
)
from netlayer.workload.dtypes import DTYPE_BYTES, gradient_dtype, master_dtype
from netlayer.workload.messages import DIRECTIONS, NUM_SLOTS
from netlayer.workload.model_size import (
    block_elements,
    chunk_units,
    num_branches,
    qkv_width,
    stage_elements,
    table_elements,
    up_width,
)
from netlayer.workload.schedule import micro_batches
from netlayer.workload.stages import BlockPart, count_parts, halves_in, run_of
from netlayer.workload.zero_bubble import has_zero_bubble

RESERVED_BYTES = 6 * 2**29
"""Of a card's memory, for the driver, CUDA and NCCL's communicators, which torch's allocator does not hold.

Measured beside a 7B over four H100 (reports/zero_202611.md): 2.53 GiB by CUDA and NCCL; of 81,559 MiB that `nvidia-smi`
has, CUDA gives out 81,080.
"""
GROUP_BYTES = 2**29
"""Bytes outside torch's allocator for each further kind of group.

Measured: 2.99 GiB beside cp 2, dp 2 over four H100, 2.52 beside dp 4.
"""
FRAGMENTED_SHARE = 0.03
"""Of what comes and goes in a step: free in torch's pools, and of no use there."""
_TOKEN_BYTES = 8
LOGITS_ROWS = 2048
"""Rows whose logits the loss holds at once where torch's operators compute it, three times over in float32."""
KERNEL_LOGITS_ROWS = 4096
"""The same where kernels do, which hold them once: half the passes over the weight's gradient for less memory."""


@dataclass(frozen=True)
class Estimate:
    """Bytes that one rank holds.

    Args:
        parameters: whole, in the dtype of the computation, or in 8 bits where they travel so; in ZeRO stage 3 those
            that stay, outside the blocks.
        masters: this rank's share in float32; none where the computation has that dtype already.
        gradients: this rank's share of the reduced ones, and among ranks whole ones where several micro-batches add up.
        optimizer: moments of this rank's share.
        activations: of all micro-batches in flight.
        logits: of the rows that the loss works on at once, and the table's gradient.
        buckets: gradients on their way to other ranks, and sums on theirs to the share, above what the first block that
            has gone backward freed by then.
        windows: memory of both where it is registered, and stays.
        copies: of what peers copy there, which torch's allocator does not hold.
        exchanges: windows in the memory of the peers, for tensor-parallel exchanges and messages between stages;
            torch's allocator does not hold them either.
        work: what one block's backward pass holds besides that.
        step: what the optimiser holds while it steps, when activations are gone.
        construction: of the largest bucket, as it is made: in float32, whole, drawn and broadcast.
        gathered: in ZeRO stage 3 the blocks that are gathered at a time.
        lookup: the embedding's gradient, before it is added to others: the last of a backward pass.
        waiting: gradients of the previous micro-batch that are still reduced while the next one computes its loss.
        groups: what NCCL takes for groups of further kinds than one, beside `RESERVED_BYTES`.
        released: of the gradients, what is not there before the first bucket is reduced: they come as activations go.
    """

    parameters: int
    masters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    buckets: int
    work: int
    step: int
    construction: int
    gathered: int = 0
    windows: int = 0
    copies: int = 0
    exchanges: int = 0
    released: int = 0
    lookup: int = 0
    waiting: int = 0
    groups: int = 0

    @property
    def total(self) -> int:
        """Bytes that torch's allocator holds at the peak.

        In the loss, a block's backward pass, the optimiser's step, or as the last bucket is made.
        """
        always = self.parameters + self.masters + self.gradients + self.optimizer + self.windows
        # Gradients come block by block, as activations go: the most is at one end of the backward pass. What travels,
        # and is gathered, has ended when the optimiser steps.
        last_block = self.gathered + max(self.work + self.buckets, self.lookup)
        return max(
            always - self.released + self._passes,
            always + max(last_block, self.step),
            always - self.optimizer + self.construction,
        )

    @property
    def _passes(self) -> int:
        """Bytes that come and go in a pass, at its peak: in the loss none of its own gradients travels yet."""
        return self.activations + self.gathered + max(self.logits + self.waiting, self.work + self.buckets)

    @property
    def allocated(self) -> int:
        """Bytes of a card that the job allocates, torch's allocator or not."""
        return self.total + self.copies + self.exchanges

    @property
    def reserved(self) -> int:
        """Bytes of a card that are gone at the peak, an upper estimate: with CUDA and NCCL, and with fragments."""
        return self.allocated + RESERVED_BYTES + self.groups + round(FRAGMENTED_SHARE * self._passes)

    def on(self, *, is_card: bool) -> int:
        """Bytes to compare with a memory: of a card `reserved`, of a machine `total`."""
        return self.reserved if is_card else self.total

    def parts(self) -> dict[str, int]:
        """Bytes of each part of `total` during a step."""
        parts = dataclasses.asdict(self)
        for name in ("construction", "copies", "exchanges", "released", "lookup", "waiting", "groups"):
            del parts[name]
        return parts

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {gib(num_bytes)}" for name, num_bytes in self.parts().items() if num_bytes)
        return f"{gib(self.total)} ({parts})"


def estimate(job: JobConfig) -> Estimate:
    """Estimate the rank that holds most: the pipeline stage with the largest total."""
    return max((estimate_stage(job, stage) for stage in range(job.parallel.pp)), key=lambda each: each.total)


def estimate_stage(job: JobConfig, stage: int) -> Estimate:
    """Estimate a rank of one pipeline stage."""
    model, parallel = job.model, job.parallel
    width = DTYPE_BYTES[model.dtype]
    wide = DTYPE_BYTES[master_dtype(job)]
    elements = stage_elements(job, stage)
    share = -(-elements // parallel.dp_cp)
    frees = frees_parameters(job)
    travels = parallel.gradient_ranks > 1
    adds_up = travels and parallel.stage == 1 and (micro_batches(job) > 1 or has_zero_bubble(job))
    units = [unit for chunk in range(parallel.vpp) for unit in bucket_units(job, stage, chunk)]
    blocks = [unit.num_bytes for unit in units for _ in range(unit.count) if unit.is_block]
    tokens = _tokens(job)
    rows, table = min(LOGITS_ROWS, tokens), table_elements(job)
    has_head = stage == parallel.pp - 1
    travelling, windows, copies = _travelling_bytes(job, stage, elements, wide, adds_up)
    last_parts = count_parts(run_of(job, stage, parallel.vpp - 1))
    freed = round(tokens * min((_saved_bytes(job, part) for part in last_parts), default=0))
    return Estimate(
        parameters=sum(unit.num_bytes * unit.count for unit in units if not (frees and unit.is_block)),
        masters=-(-_mastered_elements(job, stage, elements) // parallel.dp_cp) * wide,
        gradients=share * wide + (elements * wide if adds_up else 0),
        optimizer=2 * share * wide,
        activations=_activation_bytes(job, stage),
        logits=(rows * table // model.hidden * (2 * wide + width) + table * wide) if has_head else 0,
        buckets=max(travelling - freed, 0),
        work=_block_work_bytes(job),
        step=share * wide if job.optimizer.name == "lamb" else 0,
        construction=3 * wide * max(table_elements(job), block_elements(model, parallel.tp)),
        gathered=_gathered_bytes(job, blocks, units) if frees else 0,
        windows=windows,
        copies=copies,
        exchanges=_exchange_bytes(job),
        released=share * wide if _releases_gradients(job, windows) else 0,
        lookup=table * wide if stage == 0 else 0,
        waiting=0 if windows else _waiting_bytes(job, stage),
        groups=GROUP_BYTES * max(0, _kinds_of_groups(job) - 1),
    )


def _releases_gradients(job: JobConfig, windows: int) -> bool:
    """Whether reduced gradients have no memory in the forward passes of a step: no addresses that must stay, and none
    that was reduced in an earlier micro-batch."""
    if job.loop.cuda_graph or job.overlap.step_in_backward or windows:
        return False
    adds_up_apart = job.parallel.gradient_ranks > 1 and job.parallel.stage == 1
    return micro_batches(job) == 1 or adds_up_apart


def snapshot_bytes(job: JobConfig) -> int:
    """Return the host's memory that a rank's snapshot for checkpoints beside the training takes, page-locked; or 0.

    Of the pipeline stage with the most: its share of the masters, and two moments an element.
    """
    config = job.checkpoint
    if not config.asynchronous or not (config.every_steps or config.copy_interval):
        return 0
    elements = max(stage_elements(job, stage) for stage in range(job.parallel.pp))
    return 3 * -(-elements // job.parallel.dp_cp) * DTYPE_BYTES[master_dtype(job)]


def saving_ranks(job: JobConfig, ranks: int) -> int:
    """Return how many of a host's ranks hold a snapshot, on the host with the most: of replicas the first one saves.

    Args:
        ranks: of each host.
    """
    layout = job.parallel.layout
    if layout.dp_replicate == 1:
        return ranks
    saves = [layout.coordinates(rank).dp_replicate == 0 for rank in range(layout.world_size)]
    return max(sum(saves[first : first + ranks]) for first in range(0, len(saves), ranks))


def _mastered_elements(job: JobConfig, stage: int, elements: int) -> int:
    """Return the elements whose masters lie apart: all of another dtype, and what is freed; else none."""
    if DTYPE_BYTES[job.model.dtype] < DTYPE_BYTES[master_dtype(job)]:
        return elements
    chunks, frees = range(job.parallel.vpp), frees_parameters(job)
    of_buckets = (unit for chunk in chunks for unit in bucket_units(job, stage, chunk) if unit.is_block)
    apart = sum(unit.numel * unit.count for unit in of_buckets if frees or unit.dtype == "float8")
    tables = (unit for chunk in chunks for unit in chunk_units(job, stage, chunk) if unit.name == "tokens")
    return apart + sum(unit.numel * unit.count for unit in tables if frees)


def frees_parameters(job: JobConfig) -> bool:
    """Whether blocks' parameters are freed between their uses: ZeRO stage 3, among ranks or on one alone."""
    return job.parallel.stage == 3


def _gathered_bytes(job: JobConfig, blocks: Sequence[int], units: Sequence[BucketUnit]) -> int:
    """Return the bytes of blocks that are there at a time: one in use, those gathered ahead, the last of a chunk.

    Args:
        blocks: bytes of each block on the stage, or of each half of one.
        units: of the stage.
    """
    width = max((DTYPE_BYTES[unit.dtype] for unit in units if unit.is_block), default=0)
    ahead = job.overlap.prefetch * _block_bucket_elements(job) * width if job.overlap.dp else 0
    return min((1 + job.parallel.vpp) * max(blocks, default=0) + ahead, sum(blocks))


def takes_windows(job: JobConfig) -> bool:
    """Whether a job may have windows: not where parameters come and go."""
    return bool(job.overlap.windows) and not frees_parameters(job)


def may_copy_gradients(job: JobConfig) -> bool:
    """Whether copy engines may carry gradients to the peers, as far as a job can tell; the rest is the machine's."""
    return job.overlap.copies_gradients and not why_no_copies(job)


def why_no_copies(job: JobConfig) -> str:
    """Return why gradients are not copied to the peers, whatever `overlap.peer_reduce` says; or nothing."""
    ranks = job.parallel.dp_cp
    if ranks == 1:
        return "job.parallel.dp is 1: none are " + ("reduced" if job.parallel.gradient_ranks == 1 else "scattered")
    if ranks > MOST_COPYING_RANKS:
        return f"they are scattered over {ranks} ranks, and copied among {MOST_COPYING_RANKS} at most"
    if job.model.dtype == "float64":
        return "job.model.dtype is float64"
    # Beside windows, or where parameters come and go.
    return "" if takes_windows(job) or frees_parameters(job) else "job.overlap.windows is false"


def in_flight(job: JobConfig, stage: int) -> int:
    """(micro-batch, chunk) pairs that wait for their backward at once: `Schedule.peak_in_flight`."""
    pp, vpp, count = job.parallel.pp, job.parallel.vpp, micro_batches(job)
    later_stages = pp - 1 - stage
    warm_up = later_stages if vpp == 1 else 2 * later_stages + (vpp - 1) * pp
    deferred = stage if has_zero_bubble(job) else 0
    return min(warm_up + 1 + deferred, count * vpp)


def saved_tensors(model: ModelConfig, tp: int = 1, part: BlockPart = "whole") -> dict[str, float]:
    """Return the bytes a token and a rank that a block keeps for its backward pass, tensor by tensor, its input first.

    By what `model.recompute` keeps; with full recomputation the input alone. A norm keeps the sum that it normalises
    (the stream), and one or two numbers in float32; linears what they read: norms' outputs, attention's, the
    activation's; attention queries, keys and values, which lie in one product, its output and one logarithm a head. In
    8 bits, a linear that is not tensor-parallel keeps its input as it multiplies it, and attention its output besides.
    torch.compile's partitioner keeps as much as `recompute = none` does: what a product reads in the backward pass it
    never recomputes (`tests/trainer/test_saved_tensors.py` counts both).
    """
    has_attention, has_mlp = halves_in(part)
    hidden, width = model.hidden, DTYPE_BYTES[model.dtype]
    stream = {"input": float(hidden * width)} if has_attention else {}
    if model.recompute == "full":
        return {name: num_bytes / tp for name, num_bytes in {"input": hidden * width}.items()}
    is_scaled = model.fp8 != "off" and tp == 1
    is_read_in_8_bits = is_scaled and not model.fp8_first + model.fp8_last  # else some are kept whole

    def read(module: RecomputeModule) -> int:
        """Bytes of one value that a linear keeps of what `module` gives."""
        if model.recomputes(module):
            return int(is_scaled)
        return 1 if is_read_in_8_bits else width

    norm = hidden * read("layernorm") + _norm_saved_bytes(model)
    queries_and_keys = model.attention_width + model.kv_width
    attention = {"queries, keys, values": float(qkv_width(model) * width)}
    # Turned ones lie where the plain ones were, and so do normalised ones that are turned.
    if not model.recomputes("core_attn"):
        apart = queries_and_keys * (model.qk_norm or (model.positions == "rotary" and model.compile))
        # The norm's backward reads a contiguous copy of the plain ones, and one float32 a head.
        copies = (queries_and_keys * width + (model.heads + model.num_kv_heads) * 4) * model.qk_norm
        attention["normalised queries and keys"] = apart * width + copies
        attention["attention"] = model.attention_width * (width + is_scaled) + model.heads * 4
    activation = model.ffn_hidden * read("mlp_act")
    if model.parallel_block and model.recomputes("core_attn"):
        # Both are computed again ahead of the linear that sums them, or the activation is kept whole as its input.
        activation = 0 if model.recomputes("mlp_act") else model.ffn_hidden * width
    mlp = {"up": float(up_width(model) * width), "activation": float(activation)}
    if model.parallel_block:
        saved = stream | {"norm": norm} | attention | mlp
    else:
        saved = (stream | {"norm": norm} | attention if has_attention else {}) | (
            {"stream": float(hidden * width), "mlp norm": norm} | mlp if has_mlp else {}
        )
    return {name: num_bytes / tp for name, num_bytes in saved.items() if num_bytes}


def block_bytes(model: ModelConfig, tp: int) -> tuple[float, float]:
    """Return the bytes a token that a block saves on one rank: its input, and all else, without recomputation."""
    saved = saved_tensors(_keeping_all(model), tp)
    return saved.pop("input"), sum(saved.values())


def _keeping_all(model: ModelConfig) -> ModelConfig:
    return model.model_copy(update={"recompute": "none"})


def _tokens(job: JobConfig) -> int:
    """Return the tokens of a micro-batch that a context-parallel rank has: of each sequence its part."""
    return job.batch.micro_batch_size * job.model.seq_len // job.parallel.cp


def _activation_bytes(job: JobConfig, stage: int) -> int:
    model, parallel = job.model, job.parallel
    tokens, width = _tokens(job), DTYPE_BYTES[model.dtype]
    stream = model.hidden * width / parallel.tp
    num_in_flight = in_flight(job, stage)
    each = num_in_flight * (stream if parallel.pp > 1 else 0.0)  # what was sent is held until its gradient comes
    chunks = []
    for chunk in range(parallel.vpp):
        parts = count_parts(run_of(job, stage, chunk))
        chunks.append(sum(number * _saved_bytes(job, part) for part, number in parts.items()))
    if stage == parallel.pp - 1:  # its last chunk is the shortest, and at the peak few may be of that
        each += num_in_flight * max(chunks)
    else:  # as many micro-batches as there are stages through each in turn
        rounds, rest = divmod(num_in_flight, parallel.pp * parallel.vpp)
        for chunk, num_bytes in enumerate(chunks):
            num = rounds * parallel.pp + min(max(0, rest - chunk * parallel.pp), parallel.pp)
            each += num * num_bytes
    if stage == 0:
        each += _TOKEN_BYTES * num_in_flight
    if stage == parallel.pp - 1:  # the last norm's input, and the loss' gradient; one micro-batch at a time
        each += 2 * stream + _norm_saved_bytes(model) / parallel.tp
    return round(each * tokens)


def _saved_bytes(job: JobConfig, part: BlockPart) -> float:
    """Return the bytes a token that a block or a part holds from its forward pass until its gradients are done."""
    model, tp = job.model, job.parallel.tp
    stream = model.hidden * DTYPE_BYTES[model.dtype]
    saved = sum(saved_tensors(model, tp, part).values())
    if job.overlap.save_gathered_input and model.recompute != "full":
        own = 0 if model.recomputes("layernorm") else 1 / tp  # which is in there
        is_narrow = model.fp8_tp_gather and not model.fp8_first + model.fp8_last  # else some are kept whole
        gathered = model.hidden if is_narrow else stream
        saved += num_branches(model, part) * (gathered - stream * own)
    return max(saved, _deferred_bytes(job, part)) if has_zero_bubble(job) else saved


def _deferred_bytes(job: JobConfig, part: BlockPart = "whole") -> float:
    """Return the bytes a token that linears keep for deferred weight gradients: inputs, and gradients of outputs.

    Of the residual stream's width they are whole on every rank.
    """
    model = job.model
    has_attention, has_mlp = halves_in(part)
    branches = num_branches(model, part)
    attention = (model.attention_width + qkv_width(model)) * has_attention
    inside = attention + (model.ffn_hidden + up_width(model)) * has_mlp
    return (2 * branches * model.hidden + inside / job.parallel.tp) * DTYPE_BYTES[model.dtype]


def _block_work_bytes(job: JobConfig) -> int:
    """Return the bytes of one block's backward pass: gradients of its widest activations, and what is recomputed.

    A compiled block hands its weights' gradients over at its end.
    """
    model, tp = job.model, job.parallel.tp
    tokens, width = _tokens(job), DTYPE_BYTES[model.dtype]
    again = sum(block_bytes(model, tp)) - sum(saved_tensors(model, tp).values())
    widest = (2 * max(up_width(model), qkv_width(model)) + 2 * model.hidden) * width / tp
    gathered = 2.0 * model.hidden * width if tp > 1 else 0.0  # rows of all ranks, in and out of a linear
    by_nccl = not job.overlap.peer_memory or model.dtype == "float64"  # or between hosts, which the job does not say
    if tp > 1 and job.overlap.tp and by_nccl:  # of the linear before too, whose weights' gradients wait
        gathered += (2 * model.hidden + up_width(model) / tp) * width
    if job.parallel.cp > 1:  # keys and values of all context-parallel ranks, and their gradients
        gathered += 2 * 2 * job.parallel.cp * model.kv_width * width / tp
    handed = block_elements(model, tp) * width if model.compile else 0
    if model.fp8 != "off":  # factors of a linear's products and their transposed copies
        widths = max(up_width(model), qkv_width(model), model.ffn_hidden) / tp, model.hidden
        gathered += 2 * sum(widths)
        handed += round(2 * widths[0] * widths[1])
    return round(tokens * (again + widest + gathered)) + handed


def _norm_saved_bytes(model: ModelConfig) -> int:
    """Return the bytes a token: mean and reciprocal deviation in float32, or the latter alone."""
    return 8 if model.norm == "layernorm" else 4


def _travelling_bytes(job: JobConfig, stage: int, elements: int, wide: int, adds_up: bool) -> tuple[int, int, int]:
    """Return the bytes of gradients being reduced, and of their sums if separate.

    Those that come and go, those that stay in windows, and those that stay where peers copy to. Whether they copy, only
    the machine can say: where they may, the last is what either way takes.
    """
    parallel = job.parallel
    if parallel.gradient_ranks == 1:
        return 0, 0, 0
    reduced = DTYPE_BYTES[gradient_dtype(job)]
    stays = reduced == wide and parallel.stage == 1
    may_copy = may_copy_gradients(job)
    windows, copies = 0, 0
    if takes_windows(job) and parallel.dp_cp > 1:  # replicas alone have none
        largest, windows = _window_elements(job, stage, sums_stay=stays)
        windows *= reduced
        if not may_copy:
            return 0, windows, 0
        windows, copies = 0, max(COPIES_AT_ONCE * largest * reduced, windows)
    elif may_copy:
        copies = COPIES_AT_ONCE * _window_elements(job, stage, sums_stay=stays)[0] * reduced
    usual = _block_bucket_elements(job)
    # Besides those that are under way, one is being filled.
    largest_and_others = max(usual, table_elements(job)) + in_flight_reductions(job) * usual
    travelling = min(largest_and_others, elements) * reduced
    if not stays:
        return travelling + -(-travelling // parallel.dp_cp), windows, copies
    return (0 if adds_up else travelling), windows, copies  # what has added up travels itself


def _kinds_of_groups(job: JobConfig) -> int:
    """Return how many kinds of groups a rank is in: tensor, pipeline, context, data, replicas, tied ends."""
    parallel = job.parallel
    tied = 1 + (job.model.tied_embeddings and parallel.pp > 1)
    degrees = parallel.tp, parallel.pp, parallel.cp, parallel.dp_cp, parallel.dp_replicate, tied
    return sum(ranks > 1 for ranks in degrees)


def _waiting_bytes(job: JobConfig, stage: int) -> int:
    """Return the bytes of the gradients that are launched last in a micro-batch, and of their sums.

    Where every micro-batch reduces, nobody waits for these before the next one's backward pass makes room. Not for
    gradients that stay in windows.
    """
    parallel = job.parallel
    if parallel.gradient_ranks == 1 or parallel.stage == 1 or micro_batches(job) == 1:
        return 0
    last = _sizes_of_buckets(job, stage, 0)[: in_flight_reductions(job)]  # a backward pass ends with the first
    travelling = sum(last) * DTYPE_BYTES[gradient_dtype(job)]
    return travelling + -(-travelling // parallel.dp_cp)


def _exchange_bytes(job: JobConfig) -> int:
    """Return the bytes of windows that peers write a rank's exchanges and messages to, without their flags.

    Tensor-parallel exchanges have one for gathers and one for scatters, each with a slot for every rank's rows
    (`collectives.tensor.exchange`); stages have slots for the messages of both directions
    (`collectives.pipeline.peer_link`), where the whole job is small enough for one host.
    """
    model, parallel = job.model, job.parallel
    if not job.overlap.peer_memory:
        return 0
    rows = _tokens(job) * model.hidden * DTYPE_BYTES[model.dtype] // parallel.tp
    num_bytes = 0
    # Peer memory carries no float64.
    if 2 <= parallel.tp <= MOST_COPYING_RANKS and job.overlap.tp and model.dtype != "float64":
        num_bytes += 2 * parallel.tp * slot_bytes(rows)
    if parallel.pp > 1 and parallel.layout.world_size <= MOST_COPYING_RANKS:
        num_bytes += len(DIRECTIONS) * NUM_SLOTS * rows
    return num_bytes


def _window_elements(job: JobConfig, stage: int, sums_stay: bool) -> tuple[int, int]:
    """Return the largest buckets of all chunks, and what their windows hold.

    Every chunk has windows of its own: as many as go at once, one of them of its largest bucket; cast, shares too.
    """
    parallel = job.parallel
    sizes = [_sizes_of_buckets(job, stage, chunk) for chunk in range(parallel.vpp)]
    buffers = [sum(buffer_sizes(each, in_flight_reductions(job) + 1)) for each in sizes]
    shares = [0 if sums_stay else -(-buffer // parallel.dp_cp) for buffer in buffers]
    return sum(max(each) for each in sizes), sum(buffers) + sum(shares)


def in_flight_reductions(job: JobConfig) -> int:
    """Return how many reduce-scatters of a job's gradients may be under way."""
    return reductions_in_flight(_block_bucket_elements(job) * DTYPE_BYTES[gradient_dtype(job)])


def _sizes_of_buckets(job: JobConfig, stage: int, chunk: int) -> list[int]:
    """Return the elements of every bucket of a chunk, without padding."""
    units = bucket_units(job, stage, chunk)
    return [numel for unit in units for _ in range(unit.count) for numel in unit.buckets(job)]


def _block_bucket_elements(job: JobConfig, part: BlockPart = "whole") -> int:
    """Return the elements of the largest bucket of a block or of a part of it."""
    model, tp, bucket_mib = job.model, job.parallel.tp, job.overlap.bucket_mib
    has_attention, has_mlp = halves_in(part)
    qkv, up = qkv_width(model) * has_attention, up_width(model) * has_mlp
    width = qkv + up if model.parallel_block else max(qkv, up)
    block = block_elements(model, tp, part)
    limit = round(bucket_mib * 2**20) // DTYPE_BYTES[model.dtype] if bucket_mib else block
    return min(max(limit, model.hidden * width // tp), block)  # a bucket ends with its block


def gib(num_bytes: int) -> str:
    return f"{num_bytes / 2**30:,.1f} GiB" if num_bytes >= 2**29 else f"{num_bytes / 2**20:,.1f} MiB"
