"""Parameters that may share a bucket, of a chunk of the model: its units, and within them what travels in 8 bits apart.

Weights of linears in 8 bits have buckets of their own; what lies beside them in their blocks (norms, biases) comes
first, of all blocks of the chunk together. That is so whether weights travel in 8 bits or not
(`collectives.sharded.prepare.plan_module`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from netlayer.config.parallel import FP8_BLOCK
from netlayer.config.tree import JobConfig
from netlayer.workload.buckets import aligned_scales, cut
from netlayer.workload.dtypes import DTYPE_BYTES, Dtype
from netlayer.workload.model_size import Parameter, Unit, block_parameters, chunk_units
from netlayer.workload.stages import BLOCK_PARTS, parts_of, run_of


@dataclass(frozen=True)
class BucketUnit:
    """Parameters in order, which one bucket or several hold.

    Args:
        sizes: elements of each parameter.
        count: of such units.
        is_block: of a block: it comes and goes in ZeRO stage 3.
        dtype: in which they travel, and lie on every rank.
        num_scales: of each unit, where they travel in 8 bits, with those that align them.
        has_last: the last block of the chunk is among them.
    """

    sizes: tuple[int, ...]
    dtype: Dtype
    count: int = 1
    is_block: bool = False
    num_scales: int = 0
    has_last: bool = False

    @property
    def numel(self) -> int:
        """Elements of one of them."""
        return sum(self.sizes)

    @property
    def num_bytes(self) -> int:
        """Bytes of one of them on every rank."""
        return self.numel * DTYPE_BYTES[self.dtype]

    def buckets(self, job: JobConfig) -> list[int]:
        """Return the elements of each bucket of one of them, without padding."""
        width, limit = DTYPE_BYTES[job.model.dtype], round(job.overlap.bucket_mib * 2**20) or None
        runs = cut([size * width for size in self.sizes], [None] * len(self.sizes), limit)
        return [sum(self.sizes[run.start : run.stop]) for run in runs]


def gathers_float8(job: JobConfig) -> bool:
    """Whether weights travel in 8 bits between data-parallel ranks."""
    return job.model.fp8_param_gather and job.parallel.dp_cp > 1


def bucket_units(job: JobConfig, stage: int, chunk: int) -> list[BucketUnit]:
    """Return the units of a chunk of a rank, in the order of their buckets."""
    units = [each for unit in chunk_units(job, stage, chunk) for each in _split(job, unit, stage, chunk)]
    beside = tuple(_beside(job, stage, chunk))
    return [BucketUnit(beside, job.model.dtype), *units] if beside else units


def _split(job: JobConfig, unit: Unit, stage: int, chunk: int) -> Iterator[BucketUnit]:
    sizes, dtype = tuple(parameter.numel for parameter in unit.parameters), job.model.dtype
    if unit.name not in BLOCK_PARTS:
        yield BucketUnit(sizes, dtype, unit.count)
        return
    parts = parts_of(run_of(job, stage, chunk))
    for narrow in (True, False):
        layers = [layer for layer, part in parts.items() if part == unit.name and job.model.is_float8(layer) == narrow]
        if not layers:
            continue
        has_last = max(parts) in layers
        if not narrow:
            yield BucketUnit(sizes, dtype, len(layers), True, has_last=has_last)
            continue
        weights = [parameter for parameter in unit.parameters if _is_weight(parameter)]
        travels = gathers_float8(job)
        of_weights = (p.numel // FP8_BLOCK**2 if job.model.fp8 == "blockwise" else 1 for p in weights)
        num_scales = sum(map(aligned_scales, of_weights)) * travels
        own = tuple(weight.numel for weight in weights)
        yield BucketUnit(own, "float8" if travels else dtype, len(layers), True, num_scales, has_last)


def _beside(job: JobConfig, stage: int, chunk: int) -> Iterator[int]:
    """Yield the sizes of what lies beside weights in 8 bits, of all blocks in order."""
    for layer, part in parts_of(run_of(job, stage, chunk)).items():
        if job.model.is_float8(layer):
            parameters = block_parameters(job.model, job.parallel.tp, part)
            yield from (parameter.numel for parameter in parameters if not _is_weight(parameter))


def _is_weight(parameter: Parameter) -> bool:
    """Whether it is a linear's: a block has no other matrices."""
    return len(parameter.shape) > 1
