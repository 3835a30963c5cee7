"""What a job is, in a few lines and in a row a pipeline stage: parameters, FLOPs, memory, bytes on the wire."""

from __future__ import annotations

from typing import Any

from netlayer.config import ClusterConfig, JobConfig
from netlayer.units import format_size
from netlayer.workload.comm_bytes import Collective, Group, busiest, stage_collectives, total_bytes
from netlayer.workload.fit import in_room, on_cluster
from netlayer.workload.flops import half_block_flops, head_flops, step_flops
from netlayer.workload.memory import estimate_stage, gib
from netlayer.workload.model_size import num_parameters, stage_elements
from netlayer.workload.schedule import Schedule, bubble_fraction, micro_batches
from netlayer.workload.schedule_simulation import Costs, simulate
from netlayer.workload.stages import num_layers, run_of

GROUPS: tuple[Group, ...] = ("tp", "cp", "dp", "dp_replicate", "pp", "tied", "world")
_LEAST_SHOWN = 1e6  # bytes: scalars of all ranks, and norms, are not worth a word


def stage_rows(job: JobConfig, cluster: ClusterConfig) -> list[dict[str, Any]]:
    """A row a pipeline stage, of a rank: bytes that it holds, by part, and that it sends, by group.

    Memory is that of the job as the cluster lets it run (`fit.on_cluster`, and `fit.in_room` where the cluster says
    how much memory a GPU has; `fits` then says whether it has enough).
    """
    held_job = in_room(on_cluster(job, cluster), cluster.gpu_memory_bytes)
    rows = []
    for stage in range(job.parallel.pp):
        found, collectives = estimate_stage(held_job, stage), stage_collectives(job, stage)
        rows.append(
            {
                "stage": stage,
                "layers": num_layers(job, stage),
                "parameters": stage_elements(job, stage),
                "memory_bytes": found.total,
                **({"fits": found.total <= cluster.gpu_memory_bytes} if cluster.gpu_memory_bytes else {}),
                **{f"{part}_bytes": num_bytes for part, num_bytes in found.parts().items()},
                **{f"{group}_sent_bytes": total_bytes(collectives, group, sent=True) for group in GROUPS},
            }
        )
    return rows


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


def schedule_row(job: JobConfig, schedule: Schedule) -> dict[str, Any]:
    """The pipeline's schedule, and its bubble: by the formula, and run on paper with times by FLOPs.

    The second has what the first leaves out: stages that differ, the head, gradients of weights that fill gaps.
    Messages are free in both.
    """
    parallel, count = job.parallel, schedule.num_micro_batches
    return {
        "schedule": schedule.name,
        "micro_batches": count,
        "actions": sum(len(actions) for actions in schedule.stages),
        "most_in_flight": max(map(schedule.peak_in_flight, range(parallel.pp))),
        "bubble_formula": bubble_fraction(parallel.pp, count, parallel.vpp),
        "bubble": simulate(schedule, flops_costs(job)).bubble,
    }


def flops_costs(job: JobConfig) -> Costs:
    """Times of a schedule's actions in proportion to their FLOPs: backward twice forward, and whole blocks again."""
    parallel, model = job.parallel, job.model
    forward = [[0.0] * parallel.vpp for _ in range(parallel.pp)]
    for stage in range(parallel.pp):
        for chunk in range(parallel.vpp):
            halves = run_of(job, stage, chunk)
            forward[stage][chunk] = sum(half_block_flops(model, half // 2)[half % 2] for half in halves)
    again = 1.0 if model.recompute == "full" else 0.0
    backward = [[(2 + again) * each for each in times] for times in forward]
    forward[-1][-1] += 3 * head_flops(model)  # the loss computes the head's gradients in its forward pass
    return Costs(forward, backward, [0.0] * parallel.pp, weights_share=1 / (2 + again))


def job_lines(job: JobConfig, cluster: ClusterConfig) -> list[str]:
    """Size, FLOPs, bytes a step by group, memory a rank: a line each."""
    parallel, batch = job.parallel, job.batch
    tokens = batch.global_size * job.model.seq_len
    chunks = f", vpp {parallel.vpp}" * (parallel.vpp > 1)
    degrees = f"tp {parallel.tp}, pp {parallel.pp}{chunks}, dp {parallel.dp}"
    flops, count = step_flops(job.model, batch.global_size), micro_batches(job)
    ranks = parallel.layout.world_size
    windowed = f", {flops.done:.4g} with its windows" * (job.model.attention_window > 0)
    held = [round(row["memory_bytes"]) for row in stage_rows(job, cluster)]
    least, most = gib(min(held)), gib(max(held))
    return [
        f"{job.name}: {num_parameters(job.model):,} parameters on {ranks:,} rank{'s' * (ranks > 1)} ({degrees})",
        f"a step: {batch.global_size:,} sequences, {tokens:,} tokens, {count:,} micro-batch{'es' * (count > 1)} a "
        f"pipeline; {flops.full:.4g} FLOPs with full attention, {flops.causal:.4g} with causal{windowed}",
        *_sent_lines(job),
        f"a rank holds about {most if least == most else f'{least} to {most}'} (estimate)",
    ]


def _sent_lines(job: JobConfig) -> list[str]:
    """What the rank that has most to send of each group sends, and what that is."""
    lines = []
    for group in GROUPS:
        parts: dict[tuple[str, str], float] = {}
        for each in busiest(job, group):
            parts[each.carries, each.dtype] = parts.get((each.carries, each.dtype), 0.0) + each.sent_bytes
        total = sum(parts.values())
        if not parts or (group == "world" and total < _LEAST_SHOWN):
            continue
        shown = [
            f"{carries} {format_size(round(sent))} in {dtype}"
            for (carries, dtype), sent in parts.items()
            if sent >= min(_LEAST_SHOWN, total / 100)
        ]
        lines.append(f"a rank sends in group {group} up to {format_size(round(total))} a step: {', '.join(shown)}")
    return lines or ["a rank sends nothing to others"]
