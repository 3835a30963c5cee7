"""Command of `bench.data_idle`: writes the datasets, starts the ranks, prints the table and keeps the record."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
from pathlib import Path
from typing import Literal

import click

from bench.data_idle.files import sparse, written
from bench.data_idle.ranks import run_rank
from bench.data_idle.rows import SYSTEMS, WEIGHTS, Backend, IdleRow, Order, ResumeRow, medians, missed_limits
from netlayer import environ
from netlayer.command import RunOptions, open_out, run_options
from netlayer.config.tree import JobConfig
from netlayer.errors import CheckFailed, ConfigError, HardwareMissing
from netlayer.launch.launcher import launch
from netlayer.nccl.environment import exports, for_ranks
from netlayer.printing import print_rows
from netlayer.progress import Stages
from netlayer.results import RunRecord, utc_now, write_text
from netlayer.store.meeting import meeting_place

_HEADINGS = {
    "system": "system",
    "run": "run",
    "step_ms": "step, ms",
    "idle_ms": "idle, ms",
    "idle_share": "idle, share",
    "wait_ms": "host waits, ms",
    "cores": "cores a rank",
    "copies": "copies read",
    "first_batch_s": "first batch, s",
}


@click.command()
@run_options
@click.option("--ranks", type=click.IntRange(1), default=2, show_default=True, help="Of this machine.")
@click.option("--model", default="1m", show_default=True, help="Shape: 1m, 125m, 7b and others of job.model.preset.")
@click.option(
    "--systems", default="all", show_default=True, metavar="A,B", help=f"Of {', '.join(SYSTEMS)}; all: that are there."
)
@click.option("--micro", type=click.IntRange(1), default=4, show_default=True, help="Sequences of a micro-batch.")
@click.option("--micro-batches", type=click.IntRange(1), default=1, show_default=True, help="Of a step and rank.")
@click.option("--runs", type=click.IntRange(1), default=3, show_default=True, help="Of each system, in turn.")
@click.option("--steps", type=click.IntRange(2), default=20, show_default=True, help="Timed in a run.")
@click.option("--warmup", type=click.IntRange(1), default=5, show_default=True, help="Steps before them.")
@click.option("--tokens", type=click.IntRange(10_000), default=20_000_000, show_default=True, help="Of each dataset.")
@click.option("--resume-step", type=click.IntRange(1), default=1_000_000, show_default=True, help="Of the late resume.")
@click.option(
    "--resume-tokens", type=click.IntRange(0), default=10**12, show_default=True, help="Of its index; 0: none of it."
)
@click.option("--backend", type=click.Choice(["auto", "gloo", "nccl"]), default="auto", show_default=True)
def command(
    options: RunOptions,
    ranks: int,
    model: str,
    systems: str,
    micro: int,
    micro_batches: int,
    runs: int,
    steps: int,
    warmup: int,
    tokens: int,
    resume_step: int,
    resume_tokens: int,
    backend: Literal["auto", "gloo", "nccl"],
) -> None:
    """Measure how long steps wait for their data; on GPUs exit 1 where ours misses a limit.

    Limits: idle under 0.2% of a step, 0.03 cores a GPU, one copy read, the first batch of a late resume within 2 s.

    \b
    Examples:
      python -m bench.data_idle                                        # two CPU ranks: does it run
      python -m bench.data_idle --ranks 8 --model 125m --runs 5
      python -m bench.data_idle --ranks 8 --model 7b --micro 1 --micro-batches 4
    """
    chosen = environ.choose_backend(backend, ranks)
    names = read_systems(systems)
    out, started = open_out(options.out, "data_idle"), utc_now()
    folder = out / "datasets"
    folder.mkdir(exist_ok=True)
    to_stderr = str(options.json_file) == "-"
    with contextlib.ExitStack() as files, Stages() as stages:
        load = functools.partial(job_of, options, ranks, model, micro, micro_batches, chosen)
        with stages.open("datasets"):
            job = load(runs * len(names) * (warmup + steps) + 1, folder)
            prefixes = {
                name: files.enter_context(written(folder / name, tokens, job.model.vocab_size, seed))
                for seed, name in enumerate(WEIGHTS)
            }
            resume_folder = folder / "resume"
            resume_folder.mkdir(exist_ok=True)
            resume_job = load(resume_step + 10, resume_folder)
            for share, name in zip((0.7, 0.3), WEIGHTS, strict=True):
                if resume_tokens:
                    files.enter_context(sparse(resume_folder / name, int(share * resume_tokens)))
        order = Order(
            job, resume_job, prefixes, names, runs, steps, warmup, resume_step * bool(resume_tokens), options.seed, out
        )
        rows: list[IdleRow] = []
        resumed: list[ResumeRow] = []
        total = runs * len(names)

        with stages.open("measure") as bar:

            def on_message(_rank: int, row: IdleRow | ResumeRow) -> None:
                rows.append(row) if isinstance(row, IdleRow) else resumed.append(row)
                bar(len(rows), total, row.system if isinstance(row, IdleRow) else "resume")

            nccl = for_ranks(chosen, job.nccl)
            with meeting_place(job.store.url) as place:
                url = place.init_method("data_idle")
                arguments = (order, url, chosen)
                launch(run_rank, ranks, args=arguments, log_dir=out / "logs", env=exports(nccl), on_message=on_message)
    device = next((gpu.name for gpu in environ.list_gpus()), "GPU") if chosen == "nccl" else "CPU"
    record = RunRecord(
        name="bench.data_idle",
        source="measured",
        rows=[
            *({"table": "idle", **dataclasses.asdict(row)} for row in rows),
            *({"table": "resume", **dataclasses.asdict(row)} for row in resumed),
        ],
        started_utc=started,
        ended_utc=utc_now(),
        arguments={
            **options.arguments(),
            "ranks": ranks,
            "model": model,
            "systems": list(names),
            "micro": micro,
            "micro_batches": micro_batches,
            "runs": runs,
            "steps": steps,
            "warmup": warmup,
            "tokens": tokens,
            "resume_step": resume_step,
            "resume_tokens": resume_tokens,
            "backend": chosen,
        },
        config={"job": job.model_dump(mode="json")},
        environment=environ.snapshot(options.seed),
        devices=[device] * ranks,
    )
    click.echo(f"record: {record.save(out / 'records')}", err=True)
    if options.json_file:
        write_text(options.json_file, record.to_json())
    if not to_stderr:
        idle = "between events of the compute stream" if chosen == "nccl" else "the host's wait"
        note = f"medians of {runs} runs; idle: {idle}; a rank's worst"
        print_rows(
            f"{model}, {ranks} ranks on {device}", [dataclasses.asdict(row) for row in medians(rows)], _HEADINGS, note
        )
        for resume in resumed:
            click.echo(
                f"first batch after a resume at step {resume.step:,} of {resume.tokens:,} tokens: "
                f"{resume.first_batch_s:.2f} s"
            )
    if chosen == "nccl" and (missed := missed_limits(medians(rows), resumed)):
        raise CheckFailed("; ".join(missed))


def read_systems(text: str) -> tuple[str, ...]:
    """Return the systems that an option names.

    Raises:
        ConfigError: one is none.
        HardwareMissing: Megatron-core is named, and not installed.
    """
    has_megatron = importlib.util.find_spec("megatron") is not None
    if text == "all":
        return tuple(name for name in SYSTEMS if name != "megatron" or has_megatron)
    names = tuple(name.strip() for name in text.split(","))
    unknown = next((name for name in names if name not in SYSTEMS), None)
    if unknown is not None:
        raise ConfigError("--systems", unknown, f"is none of {', '.join(SYSTEMS)}", "name some of them, or all")
    if "megatron" in names and not has_megatron:
        raise HardwareMissing("--systems megatron: there is no megatron.core; pip install megatron-core==0.16.1")
    return names


def job_of(
    options: RunOptions,
    ranks: int,
    model: str,
    micro: int,
    micro_batches: int,
    backend: Backend,
    steps: int,
    folder: Path,
) -> JobConfig:
    """Return the job that all systems train, on datasets that lie in a folder; the user's settings come last."""
    datasets = [
        f"job.data.datasets.{name}.{key}={value}"
        for name, weight in WEIGHTS.items()
        for key, value in (("path", folder / name), ("weight", weight))
    ]
    overrides = (
        f"job.model.preset={model}",
        f"job.model.dtype={'bfloat16' if backend == 'nccl' else 'float32'}",
        f"cluster.gpus_per_server={ranks}",
        f"job.parallel.dp={ranks}",
        f"job.batch.micro_batch_size={micro}",
        f"job.batch.global_batch_size={micro * micro_batches * ranks}",
        f"job.optimizer.steps={steps}",
        "job.optimizer.warmup_steps=0",
        "job.evaluation.global_batches=1",
        *datasets,
        f"job.data.evaluation.held_out={folder / 'code'}",
        "job.data.packing=documents",
        *options.overrides,
    )
    return dataclasses.replace(options, overrides=overrides).load_config().job
