"""Collectives of a rank in one optimiser step: of each group, how many, how large, in which dtype.

Sizes are those of whole buffers, as nccl-tests and `collectives.watch.recorder` count them: what a rank holds after an
all-gather or before a reduce-scatter. `Collective.sent_bytes` is what of it leaves a rank that sends along a ring.

- Data parallel, over the context-parallel ranks too (`netlayer.layout`): parameters in the computation's dtype,
  gradients in `dtypes.gradient_dtype`, padding of buckets included. ZeRO stage 1: one gather and one
  reduction of every bucket a step, however many micro-batches add up; from stage 2 on a reduction in every micro-batch;
  in stage 3 gathers of blocks in every forward and backward pass, but for the last block of a chunk where that stays
  between the two. With `model.fp8_param_gather` weights of linears in 8 bits travel so, and once a step a chunk's
  ranks share the largest magnitudes of these.
- Tensor parallel, with sequence parallelism (Korthikanti et al., arXiv 2205.05198, 4.2.2): an attention or an MLP
  gathers its input and scatters its output; backward gathers the output's gradient, scatters the input's, and gathers
  the input once more unless `overlap.save_gathered_input`. A parallel block is one such pair. Recomputation repeats
  what lies in it: a linear and its reduce-scatter are one operation. Beside blocks: the lookup, the head, and two
  numbers a row of its softmax. With `model.fp8_tp_gather` inputs of linears in 8 bits travel so, after an all-reduce of
  their largest magnitude. Once a step: gradients of what all ranks hold whole (norms, positions, biases after
  sums).
- Context parallel: keys and values of every attention are gathered in the forward pass, and again in the backward one
  where documents are not packed; their gradients are scattered as sums.
- Pipeline: an activation and a gradient for each micro-batch and boundary between chunks; a rank of a tensor-parallel
  group sends its rows of them.
- A tied token table that both ends of a pipeline hold: its gradient, once.
- Once a step: the norm of all gradients, the losses with a flag and three numbers of a save, LAMB's norms of w and of
  its update.
- Replicas (`dp_replicate`): the sum of every reduce-scatter is all-reduced, a rank's shard of it.

When weights' gradients are computed (zero bubble) changes no byte. Not covered: that sums of copy engines are of
float32 between replicas too; evaluation, checkpoints, what ranks agree upon at the start and compare now and then.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from netlayer.config.tree import JobConfig
from netlayer.workload.bucket_units import BucketUnit, bucket_units
from netlayer.workload.buckets import shard_elements
from netlayer.workload.dtypes import DTYPE_BYTES, Dtype, gradient_dtype, master_dtype
from netlayer.workload.memory import LOGITS_ROWS, frees_parameters
from netlayer.workload.model_size import Unit, chunk_units, num_branches, table_elements
from netlayer.workload.schedule import micro_batches, of_layout
from netlayer.workload.stages import BlockPart, count_parts, halves_in, parts_of, run_of

Group = Literal["tp", "cp", "dp", "dp_replicate", "pp", "tied", "world"]
"""`tied`: the first and the last stage; `world`: all ranks."""
Kind = Literal["all_gather", "reduce_scatter", "all_reduce", "send"]
Carries = Literal[
    "parameters",
    "weight scales",
    "gradients",
    "activations",
    "activation scales",
    "lookup",
    "head",
    "softmax",
    "keys and values",
    "shared gradients",
    "forward",
    "backward",
    "lamb norms",
    "gradient norm",
    "losses",
]
_NORM_BYTES = 8  # of LAMB's squared norms, in float64


@dataclass(frozen=True)
class Collective:
    """All collectives of one kind that a rank of a pipeline stage takes part in during a step.

    Args:
        carries: what; `head` and `lookup` are activations and their gradients at the ends of the model.
        ranks: of the group.
        times: how many, each as one, in however many parts it is carried.
        num_bytes: whole buffers of all of them together. Of gradients that ranks hold in shards (`shared gradients`,
            and all of group `tied`) it is the mean over the data-parallel ranks: shards hold different parts.
    """

    group: Group
    kind: Kind
    carries: Carries
    dtype: Dtype
    ranks: int
    times: int
    num_bytes: float

    @property
    def sent_bytes(self) -> float:
        """Bytes that a rank sends: along a ring all shards but one, an all-reduce twice that; of a send all."""
        around = (self.ranks - 1) / self.ranks
        return self.num_bytes * {"send": 1.0, "all_reduce": 2 * around}.get(self.kind, around)


def stage_collectives(job: JobConfig, stage: int) -> list[Collective]:
    """Return the collectives of a rank of one pipeline stage; groups of one rank carry nothing."""
    collectives = [
        *_data_parallel(job, stage),
        *_tensor_parallel(job, stage),
        *_context_parallel(job, stage),
        *_pipeline(job, stage),
        *_world(job),
    ]
    return [each for each in collectives if each.ranks > 1 and each.times]


def total_bytes(
    collectives: Iterable[Collective],
    group: Group,
    kind: Kind | None = None,
    carries: Carries | None = None,
    *,
    sent: bool = False,
) -> float:
    """Buffers of what matches, or with `sent` what a rank sends of it."""
    chosen = (
        each
        for each in collectives
        if each.group == group and kind in (None, each.kind) and carries in (None, each.carries)
    )
    return sum(each.sent_bytes if sent else each.num_bytes for each in chosen)


def busiest(of_stages: Iterable[Iterable[Collective]], group: Group) -> list[Collective]:
    """Collectives of a group, of the stage that sends most in it; empty where nothing is carried."""
    of_group = [[each for each in collectives if each.group == group] for collectives in of_stages]
    return max(of_group, key=lambda collectives: sum(each.sent_bytes for each in collectives))


def bucket_limit(job: JobConfig) -> int | None:
    """Bytes of the computation's dtype in a bucket, unless one parameter is larger; None: a bucket a unit."""
    return round(job.overlap.bucket_mib * 2**20) if job.overlap.bucket_mib else None


def stage_buckets(job: JobConfig, stage: int) -> list[tuple[int, int]]:
    """Return (elements with padding, number of such buckets) for all buckets of a rank.

    Not covered: the 16 bytes or more that shards are aligned to where they lie in windows, which the machine decides.
    """
    buckets = []
    for chunk in range(job.parallel.vpp):
        for unit in bucket_units(job, stage, chunk):
            buckets += [(numel, unit.count) for numel in _padded_buckets(job, unit)]
    return buckets


def _activation_bytes(job: JobConfig) -> float:
    """Return the bytes of one micro-batch's residual stream, all rows of a tensor-parallel group."""
    return _rows(job) * job.model.hidden * DTYPE_BYTES[job.model.dtype]


def _rows(job: JobConfig) -> int:
    """Return the positions of one micro-batch that a tensor-parallel group has: a context-parallel rank's part."""
    return job.batch.micro_batch_size * job.model.seq_len // job.parallel.cp


def _data_parallel(job: JobConfig, stage: int) -> Iterator[Collective]:
    dp, reduced = job.parallel.dp_cp, gradient_dtype(job)
    buckets = stage_buckets(job, stage)
    times, elements = sum(count for _, count in buckets), sum(numel * count for numel, count in buckets)
    units = [(unit, number) for chunk in range(job.parallel.vpp) for unit, number in _gathers(job, stage, chunk)]
    dtypes: tuple[Dtype, ...] = job.model.dtype, "float8"
    for dtype in dtypes:
        gathered = [(_padded_buckets(job, unit), number) for unit, number in units if unit.dtype == dtype]
        num_gathers = sum(len(sizes) * number for sizes, number in gathered)
        num_bytes = sum(sum(sizes) * number for sizes, number in gathered) * DTYPE_BYTES[dtype]
        yield Collective("dp", "all_gather", "parameters", dtype, dp, num_gathers, num_bytes)
    yield _weight_scales(job, stage)
    rounds = micro_batches(job) if job.parallel.stage > 1 else 1
    num_bytes = rounds * elements * DTYPE_BYTES[reduced]
    yield Collective("dp", "reduce_scatter", "gradients", reduced, dp, rounds * times, num_bytes)
    # A rank's shards of all sums, in the dtype of the sum.
    yield Collective(
        "dp_replicate", "all_reduce", "gradients", reduced, job.parallel.dp_replicate, rounds * times, num_bytes / dp
    )
    yield from _lamb_norms(job, stage, "dp", dp)


def _weight_scales(job: JobConfig, stage: int) -> Collective:
    """Return the all-reduces of the largest magnitudes of weights in 8 bits, one a chunk that has any."""
    chunks = (bucket_units(job, stage, chunk) for chunk in range(job.parallel.vpp))
    numbers = [sum(unit.num_scales * unit.count for unit in units) for units in chunks]
    times, num_bytes = sum(number > 0 for number in numbers), sum(numbers) * DTYPE_BYTES["float32"]
    return Collective("dp", "all_reduce", "weight scales", "float32", job.parallel.dp_cp, times, num_bytes)


def _gathers(job: JobConfig, stage: int, chunk: int) -> Iterator[tuple[BucketUnit, int]]:
    """Yield the units of a chunk, and how often a step gathers all buckets of each."""
    for unit in bucket_units(job, stage, chunk):
        if unit.is_block and frees_parameters(job):
            yield unit, (unit.count - unit.has_last) * 2 * micro_batches(job)
            yield unit, unit.has_last * _gathers_of_last(job, stage, chunk)
        else:
            yield unit, unit.count


def _gathers_of_last(job: JobConfig, stage: int, chunk: int) -> int:
    """Return how often a chunk's last block is gathered: it stays from a forward pass to the next backward pass."""
    actions = of_layout(job.parallel.layout, micro_batches(job)).stages[stage]
    number, is_there = 0, False
    for action in (action for action in actions if action.chunk == chunk):
        number += not is_there
        is_there = action.kind == "forward"
    return number


def _padded_buckets(job: JobConfig, unit: BucketUnit) -> list[int]:
    """Elements of each bucket of one unit, with padding."""
    dp = job.parallel.dp_cp
    return [shard_elements(numel, dp) * dp for numel in unit.buckets(job)]


def _lamb_norms(job: JobConfig, stage: int, group: Group, ranks: int) -> Iterator[Collective]:
    """Two numbers a matrix, a chunk at a time."""
    if job.optimizer.name == "lamb":
        num_bytes = sum(2 * _NORM_BYTES * _num_matrices(unit) for unit in _units(job, stage))
        yield Collective(group, "all_reduce", "lamb norms", "float64", ranks, job.parallel.vpp, num_bytes)


def _tensor_parallel(job: JobConfig, stage: int) -> Iterator[Collective]:
    """Yield the collectives of tensor parallelism of one stage in a step: activations, softmax and shared gradients."""
    tp, count, dtype = job.parallel.tp, micro_batches(job), job.model.dtype
    activation = _activation_bytes(job)
    tokens_bytes = activation / DTYPE_BYTES[dtype] * DTYPE_BYTES["float8"]
    gathers, scatters, narrow, scales = 0, 0, 0, 0
    for part, number in _stage_parts(job, stage).items():
        each = _block_gathers_and_scatters(job, part)
        gathers, scatters = gathers + number * each[0], scatters + number * each[1]
    for part, number in _stage_parts(job, stage, in_8_bits=True).items() if job.model.fp8_tp_gather else ():
        pairs = num_branches(job.model, part)
        forwards = pairs * (1 + (job.model.recompute == "full"))
        narrow += number * (forwards + pairs * (not job.overlap.save_gathered_input))
        scales += number * forwards
    yield Collective("tp", "all_gather", "activations", "float8", tp, count * narrow, count * narrow * tokens_bytes)
    num_bytes = count * scales * DTYPE_BYTES["float32"]
    yield Collective("tp", "all_reduce", "activation scales", "float32", tp, count * scales, num_bytes)
    gathers -= narrow
    of_blocks: Mapping[Kind, int] = {"all_gather": count * gathers, "reduce_scatter": count * scatters}
    for kind, times in of_blocks.items():
        yield Collective("tp", kind, "activations", dtype, tp, times, times * activation)
        if stage == 0:
            yield Collective("tp", kind, "lookup", dtype, tp, count, count * activation)
        if stage == job.parallel.pp - 1:
            yield Collective("tp", kind, "head", dtype, tp, count, count * activation)
    wide = DTYPE_BYTES[master_dtype(job)]
    if stage == job.parallel.pp - 1:
        rows = _rows(job)
        times = count * -(-rows // LOGITS_ROWS)
        yield Collective("tp", "all_reduce", "softmax", master_dtype(job), tp, times, count * rows * 2 * tp * wide)
    shared = sum(
        unit.count * parameter.numel
        for unit in (_units(job, stage) if tp > 1 else ())
        for parameter in unit.parameters
        if not parameter.is_cut
    )
    if shared:
        mean = shared / job.parallel.dp_cp * wide
        yield Collective("tp", "all_reduce", "shared gradients", master_dtype(job), tp, 1, mean)
    yield from _lamb_norms(job, stage, "tp", tp)


def _context_parallel(job: JobConfig, stage: int) -> Iterator[Collective]:
    """Yield the collectives of context parallelism: each attention's keys and values, and their gradients."""
    model, dtype, cp = job.model, job.model.dtype, job.parallel.cp
    width = 2 * model.kv_width / job.parallel.tp * DTYPE_BYTES[dtype]
    runs = (parts_of(run_of(job, stage, chunk)) for chunk in range(job.parallel.vpp))
    layers = [layer for run in runs for layer, part in run.items() if halves_in(part)[0]]
    # Gathered in the forward pass and again in the backward one, unless a mask of documents has attention keep all keys
    # (on a GPU one of a window too, which is one gather less than is counted); what recomputes attention gathers again.
    again = model.recompute == "full" or model.recomputes("core_attn")
    has_documents = job.data.packing == "documents"
    num_bytes = job.batch.micro_batch_size * model.seq_len * width
    times = micro_batches(job) * len(layers)
    gathers = times * (2 - has_documents + again)
    yield Collective("cp", "all_gather", "keys and values", dtype, cp, gathers, gathers * num_bytes)
    yield Collective("cp", "reduce_scatter", "keys and values", dtype, cp, times, times * num_bytes)


def _block_gathers_and_scatters(job: JobConfig, part: BlockPart) -> tuple[int, int]:
    """Return the all-gathers and reduce-scatters of one block or a half of it, for one micro-batch."""
    model, pairs = job.model, num_branches(job.model, part)
    again = model.recompute == "full"
    # Attention that is recomputed takes the linear after it along, which is one operation with its reduce-scatter.
    ends_again = pairs if again else int(model.recomputes("core_attn") and part != "mlp")
    gathers = pairs * (2 + (not job.overlap.save_gathered_input) + again)
    return gathers, 2 * pairs + ends_again


def _pipeline(job: JobConfig, stage: int) -> Iterator[Collective]:
    parallel, count, dtype = job.parallel, micro_batches(job), job.model.dtype
    boundary = _activation_bytes(job) / parallel.tp  # a rank's rows
    ends: Mapping[Carries, int] = {"forward": parallel.pp - 1, "backward": 0}
    for carries, end in ends.items():
        times = count * (parallel.vpp - (stage == end))  # at the model's end nobody waits for it
        yield Collective("pp", "send", carries, dtype, parallel.pp, times, times * boundary)
    if job.model.tied_embeddings and stage in (0, parallel.pp - 1):
        wide = master_dtype(job)
        mean = table_elements(job) / parallel.dp_cp * DTYPE_BYTES[wide]
        yield Collective("tied", "all_reduce", "shared gradients", wide, min(2, parallel.pp), 1, mean)


def _world(job: JobConfig) -> Iterator[Collective]:
    wide, ranks = master_dtype(job), job.parallel.layout.world_size
    width = DTYPE_BYTES[wide]
    yield Collective("world", "all_reduce", "gradient norm", wide, ranks, 1, width)
    yield Collective("world", "all_reduce", "losses", wide, ranks, 1, (job.parallel.data_ranks + 4) * width)


def _units(job: JobConfig, stage: int) -> list[Unit]:
    return [unit for chunk in range(job.parallel.vpp) for unit in chunk_units(job, stage, chunk)]


def _stage_parts(job: JobConfig, stage: int, *, in_8_bits: bool = False) -> dict[BlockPart, int]:
    """Count the blocks and halves of them on a stage: all, or those whose linears are in 8 bits."""
    counts: dict[BlockPart, int] = {}
    for chunk in range(job.parallel.vpp):
        run = run_of(job, stage, chunk)
        parts = (
            Counter(part for layer, part in parts_of(run).items() if job.model.is_float8(layer)) if in_8_bits else {}
        )
        for part, number in (parts if in_8_bits else count_parts(run)).items():
            counts[part] = counts.get(part, 0) + number
    return counts


def _num_matrices(unit: Unit) -> int:
    """Return the number of matrices of all units of the row."""
    return unit.count * sum(len(parameter.shape) > 1 for parameter in unit.parameters)
