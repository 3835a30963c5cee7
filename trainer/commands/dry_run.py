"""`netlayer train --dry-run`: what a job will be, for any number of ranks, with none started.

Size, layout, schedule with its proof and bubble, memory a rank by stage, bytes a step, and what does not fit. Not
covered: times.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from netlayer import environ
from netlayer.config.tree import Config, JobConfig
from netlayer.results import RunRecord, utc_now
from netlayer.workload import fit
from netlayer.workload.memory import estimate, gib, saving_ranks, snapshot_bytes
from netlayer.workload.schedule import Schedule, bubble_fraction, micro_batches
from netlayer.workload.schedule_check import MANY_ACTIONS, check_job, num_actions
from netlayer.workload.schedule_simulation import flops_costs, simulate
from netlayer.workload.summary import collective_rows, job_lines, stage_rows
from trainer.commands.preview import notes, size
from trainer.plan import Backend, check_memory, memory_here, settle_here

_COLUMNS = {
    "stage": "stage",
    "layers": "layers",
    "parameters": "parameters",
    "memory_bytes": "memory",
    "fits": "fits",
    "parameters_bytes": "parameters",
    "masters_bytes": "masters",
    "gradients_bytes": "gradients",
    "optimizer_bytes": "moments",
    "activations_bytes": "activations",
    "buckets_bytes": "buckets",
    "tp_sent_bytes": "sends tp",
    "dp_sent_bytes": "sends dp",
    "pp_sent_bytes": "sends pp",
    "tied_sent_bytes": "sends tied",
}


def preview(config: Config, *, echoes: bool, here: bool) -> list[dict[str, Any]]:
    """Print what the job is, and give it as rows with the key `table`: job, schedule, stages, collectives.

    It is the job as it would run: with its defaults stepped down where it does not fit the memory with them.

    Args:
        echoes: False: print nothing but progress.
        here: as in `check_fits`.

    Raises:
        ValueError: the schedule is wrong.
    """
    from netlayer.printing import print_rows

    backend, cluster = _backend(config), config.cluster
    job = fit.with_overlap(config.job, windows=False) if backend == "gloo" else config.job  # it has none
    if here and not cluster.gpu_memory_bytes:
        settled, settings = settle_here(job, cluster.num_gpus, backend)
        card_bytes = memory_here(backend)[0] if backend == "nccl" else 0
        cluster = cluster.model_copy(update={"gpu_memory_bytes": card_bytes})
    else:
        settled, settings = fit.settle(fit.on_cluster(job, cluster), cluster.gpu_memory_bytes)
    job = settled if settings else job  # as it runs there
    lines = [size(job, backend), *job_lines(job, cluster)[1:]]
    if num_actions(job) >= MANY_ACTIONS:
        click.echo(f"checking the schedule of {micro_batches(job):,} micro-batches ...", err=True)
    schedule = _schedule_row(job, check_job(job))
    stages = stage_rows(job, cluster)
    if echoes:
        click.echo("\n".join([f"{job.name}: {lines[0]}", *lines[1:], _schedule_line(job, schedule)]))
        # Of what no stage has any there is no column.
        has_any = {key for row in stages for key, value in row.items() if value or value is False}
        columns = {key: heading for key, heading in _COLUMNS.items() if key in has_any}
        title = "A rank of each pipeline stage: what it holds (estimate), and what it sends in a step (predicted)"
        print_rows(title, stages, {"stage": "stage", **columns})
        for note in notes(config.job, backend):
            click.echo(f"note: {note}")
    named = {"job": [{"lines": lines}], "schedule": [schedule], "stage": stages, "collective": collective_rows(job)}
    return [{"table": table, **row} for table, rows in named.items() for row in rows]


def check_fits(config: Config, here: bool) -> str:
    """Refuse a job that does not fit; one line that says what it takes.

    Args:
        here: whether its ranks would start on this machine, whose memory counts where the cluster names none.

    Raises:
        ConfigError: a rank needs more than a GPU has, or the ranks together more than this machine.
    """
    cluster = config.cluster
    if not cluster.gpu_memory_bytes:
        if here:
            return check_memory(config.job, cluster.num_gpus, _backend(config))
        return "whether it fits is not said: set cluster.gpu_memory_bytes to the memory of one GPU, such as 80GiB"
    job, settings = fit.settle(fit.on_cluster(config.job, cluster), cluster.gpu_memory_bytes)
    job = fit.in_room(job, cluster.gpu_memory_bytes)
    needed = estimate(job)
    line = f"a rank will hold about {needed}; with CUDA, NCCL, what peers copy and fragments {gib(needed.reserved)}"
    line += f"; a GPU has {gib(cluster.gpu_memory_bytes)}" + f", for which it sets {settings}" * bool(settings)
    fit.check_room(job, line, cluster.gpu_memory_bytes)
    snapshots = snapshot_bytes(job) * saving_ranks(job, min(cluster.gpus_per_server, cluster.num_gpus))
    if snapshots:
        line += f"; snapshots for checkpoints take {gib(snapshots)} of a host's memory"
    return f"it fits: {line}"


def record_of(
    config: Config, rows: list[dict[str, Any]], arguments: Mapping[str, Any], started_utc: str, seed: int
) -> RunRecord:
    """Predicted, as it is."""
    return RunRecord(
        name="train-dry-run",
        source="predicted",
        rows=rows,
        started_utc=started_utc,
        ended_utc=utc_now(),
        arguments=arguments,
        config=config.model_dump(mode="json"),
        environment=environ.snapshot(seed),
    )


def _backend(config: Config) -> Backend:
    """Return the backend that ranks will most likely have: a preview for GPUs elsewhere needs none here."""
    backend = config.job.launch.backend
    if backend != "auto":
        return backend
    elsewhere = config.cluster.gpu_memory_bytes or config.cluster.servers > 1
    return "nccl" if elsewhere or environ.usable_gpus() else "gloo"


def _schedule_row(job: JobConfig, schedule: Schedule) -> dict[str, Any]:
    """The pipeline's schedule, and its bubble: by the formula, and run on paper with times by FLOPs.

    The second has what the first omits: stages that differ, the head, gradients of weights that fill gaps.
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


def _schedule_line(job: JobConfig, row: Mapping[str, Any]) -> str:
    if job.parallel.pp == 1:
        return "schedule: none, for job.parallel.pp is 1"
    return (
        f"schedule: {row['schedule']}, {row['actions']:,} actions; proved complete, in order, free of deadlock, and "
        f"within the memory below (at most {row['most_in_flight']} activations of a chunk at once); "
        f"bubble {row['bubble']:.2%} by FLOPs, {row['bubble_formula']:.2%} by (p - 1) / (m v)"
    )
