"""Summary of a job, in a few lines and in a row a pipeline stage: parameters, FLOPs, memory, bytes on the wire."""

from __future__ import annotations

from typing import Any

from netlayer.config.tree import ClusterConfig, JobConfig
from netlayer.units import format_size
from netlayer.workload.comm_bytes import Collective, Group, busiest, stage_collectives, total_bytes
from netlayer.workload.fit import in_room, on_cluster
from netlayer.workload.flops import step_flops
from netlayer.workload.memory import estimate_stage, gib
from netlayer.workload.model_size import num_parameters, stage_elements
from netlayer.workload.schedule import micro_batches
from netlayer.workload.stages import num_layers

GROUPS: tuple[Group, ...] = ("tp", "cp", "dp", "dp_replicate", "pp", "tied", "world")
_LEAST_SHOWN = 1e6  # bytes: scalars of all ranks, and norms, are not worth a word


def stage_rows(job: JobConfig, cluster: ClusterConfig) -> list[dict[str, Any]]:
    """Return a row a pipeline stage, of a rank: bytes that it holds, by part, and that it sends, by group.

    Memory is that of the job as the cluster lets it run (`fit.on_cluster`, and `fit.in_room` where the cluster says
    how much memory a GPU has; `fits` then says whether it has enough for this, CUDA and NCCL).
    """
    held_job = _as_held(job, cluster)
    rows = []
    for stage in range(job.parallel.pp):
        memory, collectives = estimate_stage(held_job, stage), stage_collectives(job, stage)
        rows.append(
            {
                "stage": stage,
                "layers": num_layers(job, stage),
                "parameters": stage_elements(job, stage),
                "memory_bytes": memory.total,
                **({"fits": memory.reserved <= cluster.gpu_memory_bytes} if cluster.gpu_memory_bytes else {}),
                **{f"{part}_bytes": num_bytes for part, num_bytes in memory.parts().items()},
                **{f"{group}_sent_bytes": total_bytes(collectives, group, sent=True) for group in GROUPS},
            }
        )
    return rows


def _as_held(job: JobConfig, cluster: ClusterConfig) -> JobConfig:
    """Return the job as the cluster lets it run: windows and copies are not everywhere."""
    return in_room(on_cluster(job, cluster), cluster.gpu_memory_bytes)


def collective_rows(job: JobConfig) -> list[dict[str, Any]]:
    """A row for each kind of collective of each stage, of a rank and a step."""
    return [
        {
            "stage": stage,
            **{name: getattr(each, name) for name in Collective.__dataclass_fields__},
            "sent_bytes": each.sent_bytes,
        }
        for stage in range(job.parallel.pp)
        for each in stage_collectives(job, stage)
    ]


def job_lines(job: JobConfig, cluster: ClusterConfig) -> list[str]:
    """Return size, FLOPs, bytes a step by group, memory a rank: a line each."""
    parallel, batch = job.parallel, job.batch
    tokens = batch.global_batch_size * job.model.seq_len
    chunks = f", vpp {parallel.vpp}" * (parallel.vpp > 1)
    further = "".join(f", {name} {degree}" for name, degree in parallel.layout.further_degrees.items())
    degrees = f"tp {parallel.tp}, pp {parallel.pp}{chunks}, dp {parallel.dp}{further}"
    flops, count = step_flops(job.model, batch.global_batch_size), micro_batches(job)
    ranks = parallel.layout.world_size
    windowed = f", {flops.done:.4g} with its windows" * (job.model.attention_window > 0)
    held_job = _as_held(job, cluster)
    totals = [estimate_stage(held_job, stage).total for stage in range(parallel.pp)]
    least, most = gib(min(totals)), gib(max(totals))
    return [
        f"{job.name}: {num_parameters(job.model):,} parameters on {ranks:,} rank{'s' * (ranks > 1)} ({degrees})",
        f"a step: {batch.global_batch_size:,} sequences, {tokens:,} tokens, {count:,} micro-batch{'es' * (count > 1)}"
        f" a pipeline; {flops.full:.4g} FLOPs with full attention, {flops.causal:.4g} with causal{windowed}",
        *_sent_lines(job),
        f"a rank holds about {most if least == most else f'{least} to {most}'} (estimate)",
    ]


def _sent_lines(job: JobConfig) -> list[str]:
    """Describe, a line a group, the bytes of the rank that sends most there, and their contents."""
    of_stages = [stage_collectives(job, stage) for stage in range(job.parallel.pp)]
    lines = []
    for group in GROUPS:
        parts: dict[tuple[str, str], float] = {}
        for each in busiest(of_stages, group):
            parts[each.carries, each.dtype] = parts.get((each.carries, each.dtype), 0.0) + each.sent_bytes
        total = sum(parts.values())
        if not parts or (group == "world" and total < _LEAST_SHOWN):
            continue
        contents = [
            f"{carries} {format_size(round(sent))} in {dtype}"
            for (carries, dtype), sent in parts.items()
            if sent >= min(_LEAST_SHOWN, total / 100)
        ]
        lines.append(f"a rank sends in group {group} up to {format_size(round(total))} a step: {', '.join(contents)}")
    return lines or ["a rank sends nothing to others"]
