"""`netlayer train`: a job from its file to its metrics, on the GPUs of this machine, its CPUs, or under a launcher."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from netlayer.command import RunOptions, open_run, run_options

if TYPE_CHECKING:
    from netlayer.config.tree import Config, JobConfig
    from netlayer.launch.rank import RankEnv
    from netlayer.results import RunRecord
    from trainer.plan import Draft, Plan
    from trainer.train import Progress, Stop, TrainResult


@click.command()
@click.argument("file", type=click.Path(path_type=Path), required=False)
@run_options
@click.option(
    "--resume",
    type=click.Path(path_type=Path),
    help="Resume from a checkpoint, or a run's newest, with its seed; auto: the newest of --out, or none yet.",
)
@click.option("--trace", metavar="STEPS", help="Write DIR/trace.json of a step, a range such as 3-5, or of the last.")
@click.option("--dry-run", is_flag=True, help="Start nothing: print what the job is, for any number of ranks.")
def train(options: RunOptions, file: Path | None, resume: Path | None, trace: str | None, dry_run: bool) -> None:
    """Train the job of FILE: tensor, pipeline and data parallel as job.parallel says.

    Each step's loss, tokens/s, MFU and exposed communication go to DIR/metrics.jsonl, held-out losses to
    DIR/validation.jsonl, checkpoints (job.checkpoint.every_steps) to DIR/checkpoints, a record to DIR/records.
    On one machine it starts the ranks itself; under torchrun, srun or mpirun each process is one. SIGTERM, or SIGUSR1
    as Slurm sends it ahead of a limit, ends it after a step, with a checkpoint, as a good run; a second one, two
    seconds later or more, at once, and one while the text is made ready too, for there is nothing to save.

    --dry-run prints size, layout, schedule, memory a rank by stage and bytes a step, and exits 2 where it does not fit
    into cluster.gpu_memory_bytes, or, where that is not set, into this machine.

    \b
    Examples:
      netlayer train examples/laptop.toml
      netlayer train examples/laptop.toml --set parallel.tp=2 --set parallel.dp=1 --out runs/tp2
      netlayer train examples/laptop.toml --set checkpoint.every_steps=50 --out runs/a
      netlayer train examples/laptop.toml --resume runs/a/checkpoints/step-000250 --out runs/b
      netlayer train examples/laptop.toml --resume runs/a --out runs/a       # resumes in its folder
      torchrun --max-restarts 3 --nproc-per-node 2 -m netlayer train job.toml --resume auto --out runs/a
      netlayer train examples/laptop.toml --trace 10-12                  # for ui.perfetto.dev
      netlayer train examples/laptop.toml --set metrics.tensorboard=true --set metrics.prometheus_port=9400
      netlayer train examples/laptop.toml --set loop.gc_interval=0   # garbage whenever Python will
      netlayer train --dry-run examples/megascale-12288.toml
      torchrun --nproc-per-node 2 -m netlayer train examples/laptop.toml
    """
    # Imported here and below, and not at the top: `netlayer --help` has to start without all of it.
    from netlayer.launch.early_end import ending_at
    from netlayer.launch.launcher import PASSED_ON
    from netlayer.launch.rank import detect
    from netlayer.results import write_text
    from trainer.plan import draft

    options = _with_file(options, file)
    config, env = options.load_config(), detect(os.environ)
    if dry_run:
        _dry_run(config, options, env, {"--resume": resume, "--trace": trace})
        return
    is_default = click.get_current_context().get_parameter_source("seed") is ParameterSource.DEFAULT
    # Before any rank starts, so that a job that cannot run costs seconds and no rank's traceback.
    start = draft(
        config, env, seed=options.seed, is_default_seed=is_default, out=options.out, resume=resume, trace=trace
    )
    options = dataclasses.replace(options, seed=start.seed)
    # Under a launcher every rank comes by here: one of them speaks for all.
    if env is None or env.rank == 0:
        _preview(start, env, is_traced=bool(trace))
    if start.is_done:
        if start.first is not None:
            start.first.await_readers()
        return
    if env is not None and env.rank:
        with ending_at(*PASSED_ON):  # until training takes them over; the first rank says it for all
            _join(start, options.out or Path(), env)
        return
    with ending_at(*PASSED_ON), open_run(options.out, "train", continues=start.continues) as out:
        # The same command line either starts the ranks or is one of them.
        train_it = _start if env is None else functools.partial(_join, env=env)
        with _explain_end(out, start):
            arguments = options.arguments() | {"resume": str(start.resume or ""), "resumed_step": start.steps_done}
            arguments["trace"] = trace or ""
            result, record = _recorded(config, options.seed, arguments, out, functools.partial(train_it, start, out))
    # stdout is for data: where the record goes there, this line does not.
    click.echo(_last_line(result, out), err=str(options.json_file) == "-")
    if result.stop:
        click.echo(_how_to_go_on(result.stop, out) + _what_is_not_traced(result.stop, start.trace, out), err=True)
    if options.json_file:
        write_text(options.json_file, record.to_json())


def _with_file(options: RunOptions, file: Path | None) -> RunOptions:
    from netlayer.errors import ConfigError

    if file and options.config_path:
        raise ConfigError("--config", options.config_path, f"is given beside {file}", "give one of them")
    return dataclasses.replace(options, config_path=file or options.config_path)


def _dry_run(config: Config, options: RunOptions, env: RankEnv | None, others: Mapping[str, object]) -> None:
    """Print what the job is; of a launcher's ranks the first one does.

    Raises:
        ConfigError: it does not fit, or an option has no effect.
    """
    from netlayer.errors import ConfigError
    from netlayer.results import utc_now, write_text
    from trainer.commands.dry_run import check_fits, preview, record_of

    # Refused and not ignored: a user who gives these expects a run.
    for option, value in (*others.items(), ("--out", options.out)):
        if value:
            raise ConfigError(option, value, "has no effect with --dry-run, which starts nothing", "omit one")
    if env is not None and env.rank:
        return
    started, to_stdout = utc_now(), str(options.json_file) == "-"
    config.check_world()
    here = config.cluster.servers == 1
    rows = preview(config, echoes=not to_stdout, here=here)
    if options.json_file:
        record = record_of(config, rows, options.arguments() | {"dry_run": True}, started, options.seed)
        write_text(options.json_file, record.to_json())
    click.echo(check_fits(config, here=here), err=to_stdout)


def _preview(start: Draft, env: RankEnv | None, *, is_traced: bool) -> None:
    """Print what the job will be, and check on the first rank's machine what all ranks have alike.

    Raises:
        ConfigError: a sink of the metrics cannot be had here.
        ValueError: the schedule is wrong.
    """
    from netlayer.workload.schedule import micro_batches
    from netlayer.workload.schedule_check import MANY_ACTIONS, check_job, num_actions
    from trainer.commands.preview import lines
    from trainer.metrics import check_metrics

    job = start.job
    preview = lines(job, start.backend, start.memory, is_traced=is_traced)
    click.echo("\n".join([*preview, *_without_effect(job, env)]), err=True)
    # The sinks are rank 0's: another machine needs neither the port nor the package.
    check_metrics(job.metrics)
    # Once a job: its ranks have the same schedule, and thousands of micro-batches take a while.
    if num_actions(job) >= MANY_ACTIONS:
        click.echo(f"checking the schedule of {micro_batches(job):,} micro-batches ...", err=True)
    check_job(job)
    if start.notes:
        click.echo("\n".join(start.notes), err=True)


def _without_effect(job: JobConfig, env: RankEnv | None) -> list[str]:
    """Return a line for each key that has no effect on the ranks of a launcher."""
    if env is None or not job.store.url:
        return []
    return [f"note: job.store.url has no effect: ranks of {env.launcher} meet at the first one, by MASTER_ADDR"]


def _start(start: Draft, out: Path) -> TrainResult:
    """Start the ranks on this machine, and train on them."""
    from netlayer.progress import Stages
    from netlayer.store.meeting import meeting_place
    from trainer.train import train as train_plan

    with Stages() as stages, meeting_place(start.job.store.url) as place:
        with stages.open("data" if start.job.data.datasets else "text") as bar:
            url = place.init_method("training")
            plan = start.resolve(out, url, lambda stage, done, total: bar(done, total, stage))
        with _collecting(plan, place.url, out), stages.open("training") as bar:

            def show(progress: Progress) -> None:
                # Then there is no row for the bar: see `Progress`.
                if progress.warning:
                    stages.say(f"warning: {progress.warning}")
                else:
                    bar(progress.done, progress.total, words_of(progress))

            return train_plan(plan, show)


def _collecting(plan: Plan, server: str, out: Path) -> contextlib.AbstractContextManager[None]:
    """Collect the events of ranks that send them to a Redis; nothing where they write files."""
    if plan.job.observe.transport != "redis":
        return contextlib.nullcontext()
    from netlayer.observe.events.collector import collecting

    return collecting(plan.job.observe, plan.job.name, server, out)


def _join(start: Draft, out: Path, env: RankEnv) -> TrainResult:
    """Train as one of the ranks that a launcher has started; rank 0 alone writes files and shows progress."""
    from netlayer.progress import Stages
    from netlayer.store.meeting import init_method_under
    from trainer.train import join

    plan = start.resolve(out, init_method_under(env))
    with contextlib.ExitStack() as stack:
        bar = stack.enter_context(stack.enter_context(Stages()).open("training")) if env.rank == 0 else None

        def show(progress: Progress) -> None:
            if bar and not progress.warning:  # that is in the log, which is on this stderr
                bar(progress.done, progress.total, words_of(progress))

        return join(plan, env, show)


def _recorded(
    config: Config, seed: int, arguments: Mapping[str, Any], out: Path, run: Callable[[], TrainResult]
) -> tuple[TrainResult, RunRecord]:
    """Run, and return the result and its record, which is saved."""
    from netlayer import environ
    from netlayer.results import RunRecord, utc_now

    # Around the run: the record says when it ran and not when it was written.
    started = utc_now()
    result = run()
    environment: dict[str, Any] = {"corpus": dataclasses.asdict(result.corpus)}
    if result.nccl_settings:
        environment["nccl_settings"] = list(result.nccl_settings)
    record = RunRecord(
        name="train",
        source="measured",
        rows=[*result.steps, *result.evaluations],
        started_utc=started,
        ended_utc=utc_now(),
        arguments=arguments,
        config=config.model_dump(mode="json"),
        environment=environ.snapshot(seed) | environment,
        devices=result.devices,
    )
    record.save(out / "records")
    return result, record


def words_of(progress: Progress) -> str:
    """Return the text of the progress line."""
    row = progress.row
    if progress.warning:
        return f"warning: {progress.warning}"
    left = "" if progress.left_s is None else f", {short_time(progress.left_s)} left"
    step = f"step {progress.done:,}/{progress.total:,}"
    if "validation_loss" in row:
        return f"{step}, held-out loss {row['validation_loss']:.3f}{left}"
    if "loss" not in row:
        return progress.stage
    parts = [step, f"loss {row['loss']:.3f}", f"{row['tokens_per_s']:,.0f} tokens/s"]
    if row["mfu_full"] is not None:
        parts.append(f"MFU {row['mfu_full']:.3f} full, {row['mfu_causal']:.3f} causal")
    if row["exposed_comm"] is not None:
        parts.append(f"exposed {row['exposed_comm']:.1%}")
    return ", ".join([*parts, f"{row['memory_gib']:.1f} GiB"]) + left


def short_time(seconds: float) -> str:
    """Format a duration: `45 s`, `12 min`, `3 h 20 min`, `5 d 4 h`, two units at most."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    hours, minutes_left = divmod(minutes, 60)
    if hours < 1:
        return f"{minutes} min"
    days, hours_left = divmod(hours, 24)
    return f"{days} d {hours_left} h" if days else f"{hours} h {minutes_left} min"


@contextlib.contextmanager
def _explain_end(out: Path, start: Draft) -> Iterator[None]:
    """Print where an interrupted run can resume from, or that a signal came before there was anything to save."""
    from netlayer.launch.early_end import Ended, reason_of
    from trainer.checkpoint.meta import Damaged
    from trainer.checkpoint.names import checkpoints_in, pending_in
    from trainer.train import CHECKPOINTS

    try:
        yield
    # Signals and interrupts too: after these a user most wants to resume.
    except BaseException as exc:
        damaged = start.resume if isinstance(exc, Damaged) else None
        if damaged and start.is_newest:
            _set_aside(damaged, exc)
        if kept := [path for path in checkpoints_in(out / CHECKPOINTS) if path != damaged]:
            where = f"in this folder with --out {out}, or in a new one"
            click.echo(f"note: --resume {kept[-1]} resumes from the last good checkpoint, {where}", err=True)
        elif pending := pending_in(out / CHECKPOINTS):
            click.echo(f"note: {pending[-1]} is the one checkpoint, and it is not verified yet", err=True)
        elif isinstance(exc, Ended) and not _has_rows(out):
            click.echo(f"stopped by {reason_of(exc)} before the first step: nothing to save", err=True)
        raise


def _set_aside(checkpoint: Path, damage: BaseException) -> None:
    """Put a damaged checkpoint out of the way of the next `--resume auto`, where this process sees the damage too.

    What one rank cannot read may be whole: its machine may lack the folder, or have memory that fails.
    """
    from netlayer.errors import NetlayerError
    from trainer.checkpoint.meta import Damaged
    from trainer.checkpoint.names import PEERS
    from trainer.checkpoint.reader import open_checkpoint
    from trainer.checkpoint.storage import set_aside

    if str(checkpoint).startswith(f"{PEERS}:"):  # the stores of its machines compare it at the next start
        return
    file = PurePath(str(getattr(damage, "value", ""))).name
    with contextlib.suppress(NetlayerError, OSError):  # storage that fails now says nothing of the checkpoint
        try:
            open_checkpoint(checkpoint).verify_file(file)
        except Damaged:
            line = f"note: {checkpoint} is damaged, and is now {set_aside(checkpoint)}; no later start takes it"
            click.echo(line, err=True)


def _has_rows(out: Path) -> bool:
    metrics = out / "metrics.jsonl"
    return metrics.is_file() and metrics.stat().st_size > 0


def _last_line(result: TrainResult, out: Path) -> str:
    # The first is from before the first step, so that there is one where the run was stopped at once.
    held_out = [row["validation_loss"] for row in result.evaluations]
    losses = [row["loss"] for row in result.steps]
    trained = f"{len(losses)} step{'s' * (len(losses) != 1)}" + (
        f", loss {losses[0]:.3f} to {losses[-1]:.3f}" if losses else ""
    )
    known = f"{held_out[0]:.3f} to {held_out[-1]:.3f}" if len(held_out) > 1 else f"{held_out[0]:.3f} before them"
    return f"{trained}; held-out loss {known}; {out}"


def _how_to_go_on(stop: Stop, out: Path) -> str:
    line = f"stopped after step {stop.step}, as asked"
    # Each rank may be on another machine, with a folder that the others do not see.
    if stop.checkpoint is None:
        return f"{line}; no checkpoint, for ranks of a launcher need --out: a folder that all of them see"
    return f"{line}; go on with the same command and --resume {out} --out {out}, or a new --out"


def _what_is_not_traced(stop: Stop, traced: range, out: Path) -> str:
    from trainer.trace import TRACE

    # Nothing is missing from the trace: its last step was taken.
    if not traced or traced[-1] <= stop.step:
        return ""
    # Stopped among its steps the trace has those up to there; stopped before them there is none.
    there = f"ends with step {stop.step}" if stop.step in traced else "is not there"
    return f"\nnote: {out / TRACE} {there}: the steps of --trace are {traced[0]}-{traced[-1]}"
