"""`netlayer train`: a job from its file to its metrics, on the GPUs of this machine, its CPUs, or under a launcher."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from netlayer.command import RunOptions, open_run, run_options

if TYPE_CHECKING:
    from netlayer.config.tree import Config, JobConfig
    from netlayer.launch.rank import RankEnv
    from netlayer.results import RunRecord
    from trainer.train import Backend, Progress, Stop, TrainResult


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
    as Slurm sends it ahead of a limit, ends it behind a step, with a checkpoint, as a good run; a second one, two
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
      netlayer train examples/laptop.toml --set loop.collect_every_steps=0   # garbage whenever Python will
      netlayer train --dry-run examples/megascale-12288.toml
      torchrun --nproc-per-node 2 -m netlayer train examples/laptop.toml
    """
    # Imported here and below, and not at the top: `netlayer --help` has to start without all of it.
    from netlayer import environ
    from netlayer.errors import ConfigError
    from netlayer.launch.early_end import ending_at
    from netlayer.launch.launcher import PASSED_ON
    from netlayer.launch.rank import detect
    from netlayer.results import write_text
    from trainer.commands.memory import check_memory
    from trainer.commands.preview import lines
    from trainer.metrics import check_metrics
    from trainer.train import check_supported

    options = _with_file(options, file)
    config, env = options.load_config(), detect(os.environ)
    if dry_run:
        _dry_run(config, options, env, {"--resume": resume, "--trace": trace})
        return
    # Ranks on this machine: under a launcher, those of other machines check their own.
    here = config.cluster.num_gpus if env is None else env.local_world_size
    if env is None and config.cluster.servers > 1:
        rule = "only ranks of one machine are started from here"
        remedy = "start with torchrun, srun or mpirun, or preview with --dry-run"
        raise ConfigError("cluster.servers", config.cluster.servers, rule, remedy)
    # Before any rank starts, so that a job that cannot run costs seconds and no rank's traceback.
    backend = environ.choose_backend(config.job.launch.backend, here, env)
    check_supported(config.job, here if env is None else env.world_size)
    memory = check_memory(config.job, here, backend)
    # Under a launcher every rank comes by here: one of them speaks for all.
    speaks = env is None or env.rank == 0
    if speaks:
        preview = lines(config.job, backend, memory, is_traced=bool(trace))
        click.echo("\n".join([*preview, *_without_effect(config.job, env)]), err=True)
        # The sinks are rank 0's: another machine needs neither the port nor the package.
        check_metrics(config.job.metrics)
        _check_schedule(config.job)
    start, options = _start_options(resume, trace, options, config.job, speaks=speaks)
    if start.is_done:
        return
    # Without it rank 0 names a folder of its own, which the other ranks do not know.
    if env is not None and config.job.checkpoint.every_steps and options.out is None:
        rule = f"is needed for checkpoints: {env.launcher} started ranks that write to one folder"
        raise ConfigError("--out", None, rule, "give a folder that all of them see")
    if env is not None and env.rank:
        with ending_at(*PASSED_ON):  # until training takes them over; the first rank says it for all
            _join(config, options, backend, start, env, options.out or Path())
        return
    with ending_at(*PASSED_ON), open_run(options.out, "train", continues=start.continues) as out:
        # The same command line either starts the ranks or is one of them.
        train_it = _start if env is None else functools.partial(_join, env=env)
        with _explain_end(out):
            arguments = options.arguments() | {"resume": str(start.resume or ""), "resumed_step": start.steps_done}
            arguments["trace"] = trace or ""
            run = functools.partial(train_it, config, options, backend, start, out=out)
            result, record = _recorded(config, options.seed, arguments, out, run)
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
            raise ConfigError(option, value, "has no effect with --dry-run, which starts nothing", "leave one out")
    if env is not None and env.rank:
        return
    started, to_stdout = utc_now(), str(options.json_file) == "-"
    config.check_world()
    rows = preview(config, echoes=not to_stdout)
    if options.json_file:
        record = record_of(config, rows, options.arguments() | {"dry_run": True}, started, options.seed)
        write_text(options.json_file, record.to_json())
    click.echo(check_fits(config, here=config.cluster.servers == 1), err=to_stdout)


@dataclasses.dataclass(frozen=True)
class _StartOptions:
    """Options of a call that are not configuration: a checkpoint, steps to trace, whether to resume in a folder."""

    resume: Path | None
    steps_done: int
    trace: range
    continues: bool
    is_done: bool = False


def _without_effect(job: JobConfig, env: RankEnv | None) -> list[str]:
    """Return a line for each key that has no effect on the ranks of a launcher."""
    if env is None or not job.store.url:
        return []
    return [f"note: job.store.url has no effect: ranks of {env.launcher} meet at the first one, by MASTER_ADDR"]


def _check_schedule(job: JobConfig) -> None:
    """Check the schedule, once a job: its ranks have the same one, and thousands of micro-batches take a while."""
    from netlayer.workload.schedule import micro_batches
    from netlayer.workload.schedule_check import check_job, num_actions
    from trainer.commands.dry_run import MANY_ACTIONS

    if num_actions(job) >= MANY_ACTIONS:
        click.echo(f"checking the schedule of {micro_batches(job):,} micro-batches ...", err=True)
    check_job(job)


def _start_options(
    resume: Path | None, trace: str | None, options: RunOptions, job: JobConfig, *, speaks: bool
) -> tuple[_StartOptions, RunOptions]:
    """Resolve `--resume` and `--trace`, print notes on them, and return the options with the checkpoint's seed.

    Raises:
        ConfigError: there is no such checkpoint, it is of another model or seed, it has taken all steps, or the steps
            to trace are none of this run.
    """
    from trainer.checkpoint.meta import check_model, going_on, seed_of
    from trainer.checkpoint.resume import check_steps_left, start_of
    from trainer.trace import parse_steps

    start = start_of(resume, options.out, os.environ)
    notes, path, steps_done, is_done = list(start.notes), None, 0, False
    if start.meta:
        path, steps_done = start.meta.path, start.meta.step
        # The default seed is no wish of the user's, and gives way to the checkpoint's without a word.
        is_given = click.get_current_context().get_parameter_source("seed") is not ParameterSource.DEFAULT
        seed = seed_of(start.meta, options.seed if is_given else None, job)
        check_model(start.meta, job)
        options = dataclasses.replace(options, seed=seed)
        notes += going_on(start.meta, job)
        if is_done := not check_steps_left(start, job):
            notes = [f"{path} has taken all {steps_done:,} steps of the job: nothing to do"]
    traced = range(0)
    if trace and not is_done:
        # Of a run that resumes in its folder, an earlier start may have traced them.
        traced = parse_steps(trace, 1 if start.continues else steps_done + 1, job.optimizer.steps)
        if traced[0] <= steps_done:
            notes.append(f"note: --trace {trace} has no effect up to step {steps_done}, from which it resumes")
            # What an earlier start has traced stays as it is: the range shrinks to what is still to come.
            traced = range(steps_done + 1, max(traced.stop, steps_done + 1))
    if speaks and notes:
        click.echo("\n".join(notes), err=True)
    return _StartOptions(path, steps_done, traced, start.continues, is_done), options


def _start(config: Config, options: RunOptions, backend: Backend, start: _StartOptions, out: Path) -> TrainResult:
    """Start the ranks on this machine, and train on them."""
    from netlayer.launch.interrupt import held_interrupt
    from netlayer.progress import Stages
    from netlayer.store.meeting import meeting_place

    # torch loads for seconds: a Ctrl-C waits until it is whole.
    with held_interrupt():
        from trainer import train as training

    job, ranks = config.job, config.cluster.num_gpus
    with Stages() as stages, meeting_place(job.store.url) as place:
        with stages.open("text") as bar:
            corpus = training.prepare_data(
                job, ranks, options.seed, out, lambda stage, done, total: bar(done, total, stage), start.resume
            )
        with stages.open("training") as bar:

            def show(progress: Progress) -> None:
                # Then there is no row for the bar: see `Progress`.
                if progress.warning:
                    stages.say(f"warning: {progress.warning}")
                else:
                    bar(progress.done, progress.total, words_of(progress))

            return training.train(
                job,
                corpus,
                ranks=ranks,
                init_method=place.init_method("training"),
                backend=backend,
                out=out,
                seed=options.seed,
                on_progress=show,
                resume=start.resume,
                trace=start.trace,
                stops_gently=True,
                continues=start.continues,
            )


def _join(
    config: Config, options: RunOptions, backend: Backend, start: _StartOptions, env: RankEnv, out: Path
) -> TrainResult:
    """Train as one of the ranks that a launcher has started; rank 0 alone writes files and shows progress."""
    from congestion.nic.env import as_record, exported, for_ranks
    from netlayer.launch.interrupt import held_interrupt
    from netlayer.launch.rank import RankContext
    from netlayer.progress import Stages
    from netlayer.store.meeting import init_method_under

    job, nccl, init_method = config.job, for_ranks(backend, config.job.nccl), init_method_under(env)
    with held_interrupt():  # torch takes two seconds to load
        from trainer import train as training
        from trainer.worker import run_rank
    # NCCL reads its variables when the first communicator is made: they must be there by then.
    with exported(nccl), contextlib.ExitStack() as stack:
        corpus = training.prepare_data(job, env.world_size, options.seed, out, resume=start.resume)
        context = RankContext(env)
        if env.rank == 0:
            bar = stack.enter_context(stack.enter_context(Stages()).open("training"))

            def report(progress: Any) -> None:
                if not progress.warning:  # that is in the log, which is on this stderr
                    bar(progress.done, progress.total, words_of(progress))

            context = RankContext(env, report)
        # Only a folder that the user has named is known to be one for all ranks.
        is_shared = options.out is not None
        arguments = (start.resume, start.trace, is_shared, True, start.continues)
        work = training.Work(job, corpus, init_method, backend, out, options.seed, *arguments)
        outcome = run_rank(context, work)
    # This process knows its own device alone, and takes it for all.
    devices = (outcome.device,) * env.world_size
    settings = as_record(nccl)
    return training.TrainResult(
        outcome.steps, outcome.evaluations, corpus.facts, outcome.num_parameters, devices, settings, outcome.stop
    )


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
def _explain_end(out: Path) -> Iterator[None]:
    """Print where an interrupted run can resume from, or that a signal came before there was anything to save."""
    from netlayer.launch.early_end import Ended, reason_of
    from trainer.checkpoint.meta import checkpoints_in, unproven_in
    from trainer.train import CHECKPOINTS

    try:
        yield
    # Signals and interrupts too: after these a user most wants to resume.
    except BaseException as exc:
        if kept := checkpoints_in(out / CHECKPOINTS):
            where = f"in this folder with --out {out}, or in a new one"
            click.echo(f"note: --resume {kept[-1]} goes on from the last good checkpoint, {where}", err=True)
        elif unproven := unproven_in(out / CHECKPOINTS):
            click.echo(f"note: {unproven[-1]} is the one checkpoint, and nothing vouches for it", err=True)
        elif isinstance(exc, Ended) and not _has_rows(out):
            click.echo(f"stopped by {reason_of(exc)} before the first step: nothing to save", err=True)
        raise


def _has_rows(out: Path) -> bool:
    metrics = out / "metrics.jsonl"
    return metrics.is_file() and metrics.stat().st_size > 0


def _last_line(result: TrainResult, out: Path) -> str:
    held_out = [row["validation_loss"] for row in result.evaluations]
    losses = [row["loss"] for row in result.steps]
    trained = f"{len(losses)} step{'s' * (len(losses) != 1)}" + (
        f", loss {losses[0]:.3f} to {losses[-1]:.3f}" if losses else ""
    )
    known = f"{held_out[0]:.3f} to {held_out[-1]:.3f}" if len(held_out) > 1 else f"{held_out[0]:.3f} before them"
    return f"{trained}; held-out loss {known}; {out}"


def _how_to_go_on(stop: Stop, out: Path) -> str:
    line = f"stopped behind step {stop.step}, as asked"
    if stop.checkpoint is None:
        return f"{line}; no checkpoint, for ranks of a launcher need --out: a folder that all of them see"
    return f"{line}; go on with the same command and --resume {out} --out {out}, or a new --out"


def _what_is_not_traced(stop: Stop, traced: range, out: Path) -> str:
    from trainer.trace import TRACE

    # Nothing is missing from the trace: its last step was taken.
    if not traced or traced[-1] <= stop.step:
        return ""
    there = f"ends with step {stop.step}" if stop.step in traced else "is not there"
    return f"\nnote: {out / TRACE} {there}: the steps of --trace are {traced[0]}-{traced[-1]}"
