"""Plan of a run: all that is decided between a job file and the loop, in one object that `train` and the ranks get.

`draft` decides what needs no text and no folder: the backend, whether the job fits ranks and memory, where it resumes
and what is traced. `resolve` adds the rest: the text in tokens, NCCL's variables, and where the ranks meet. Sections of
the job (layout, model, schedule, optimiser, watch, ...) stay in `Plan.job`, resolved. Needs no torch, so that a process
which only starts ranks starts fast. Not covered: what a job is (`netlayer.config.tree`), running it (`trainer.train`).
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from netlayer import environ
from netlayer.cache import cache_folder
from netlayer.config.tree import Config, JobConfig
from netlayer.errors import ConfigError
from netlayer.launch.rank import RankEnv
from netlayer.nccl.environment import Choice, for_ranks
from netlayer.store.meeting import init_method_under
from netlayer.workload.fit import check_room, in_room, settle, with_overlap
from netlayer.workload.memory import estimate, gib, saving_ranks, snapshot_bytes
from netlayer.workload.model_size import stage_elements
from trainer.checkpoint.meta import check_model, check_same_text, find, resume_notes, seed_of
from trainer.checkpoint.names import TOKENIZER
from trainer.checkpoint.resume import check_steps_left, start_of
from trainer.data.mixture import Mixture, check_samples, prepare_mixture
from trainer.data.prepare import Corpus, OnStage, check_enough, prepare_corpus
from trainer.trace import parse_steps

if TYPE_CHECKING:
    from netlayer.rendezvous import FirstRank

logger = logging.getLogger(__name__)

Backend = Literal["gloo", "nccl"]


@dataclass(frozen=True)
class Plan:
    """All that is decided before the loop; `resolve` makes it, and every rank gets it.

    Args:
        job: resolved configuration: layout, model, schedule, batch, optimiser, checkpoints, metrics, watch.
        corpus: tokens of the text or the datasets, as `prepare_data` gives them.
        init_method: where ranks meet, as `netlayer.rendezvous.open_world` takes it.
        backend: gloo computes on the CPU, nccl on one GPU a rank.
        out: a folder that exists, for rows, checkpoints and the trace.
        seed: of the initial parameters and of the samples.
        resume: a checkpoint to resume from; its seed goes before `seed`.
        trace: steps for `trace.json`.
        is_shared: whether all ranks see `out`; without that there are no checkpoints.
        stops_gently: the first SIGTERM or SIGUSR1 ends the run after a step, with a checkpoint, as a good one; a second
            one, two seconds later or more, ends it at once. False: the first one does.
        continues: the rows in `out` up to the checkpoint stay, later ones are replaced (`trainer.history`); without a
            checkpoint all of them are.
        nccl: the choice for each of NCCL's variables; none on gloo.
    """

    job: JobConfig
    corpus: Corpus | Mixture
    init_method: str
    backend: Backend
    out: Path
    seed: int
    resume: Path | None = None
    trace: range = range(0)
    is_shared: bool = True
    stops_gently: bool = False
    continues: bool = False
    nccl: Sequence[Choice] = ()

    @property
    def ranks(self) -> int:
        return self.job.parallel.layout.world_size


def resolve(
    job: JobConfig,
    corpus: Corpus | Mixture | None = None,
    *,
    ranks: int,
    init_method: str,
    backend: Backend,
    out: Path,
    seed: int,
    resume: Path | None = None,
    trace: range = range(0),
    is_shared: bool = True,
    stops_gently: bool = False,
    continues: bool = False,
    on_stage: OnStage | None = None,
) -> Plan:
    """Return the plan of a run; arguments that it only holds are those of `Plan`.

    Args:
        corpus: what `prepare_data` gave for the same job; None: it is prepared now.
        ranks: number of processes that will train; must equal tp x pp x dp of job.parallel.
        on_stage: called with the progress of the text.

    Raises:
        ConfigError: the job does not fit the ranks, a variable that NCCL would misread is set, or as `prepare`.
    """
    check_supported(job, ranks)
    # Here and not in the ranks, and before the text: a variable that NCCL would misread costs no minute and no rank.
    nccl = tuple(for_ranks(backend, job.nccl))
    # Last, for it may take minutes: all that can be refused was refused before.
    corpus = corpus or prepare_data(job, ranks, seed, out, on_stage, resume)
    return Plan(job, corpus, init_method, backend, out, seed, resume, trace, is_shared, stops_gently, continues, nccl)


@dataclass(frozen=True)
class Draft:
    """A plan but for its text and its folder, known to be possible on this machine.

    Args:
        job, backend, seed, resume, trace, is_shared, continues: as in `Plan`.
        ranks: number of processes that will train.
        memory: a line on what a rank will hold, and what there is.
        steps_done: by the checkpoint that it resumes from.
        is_done: that checkpoint has taken all steps of the job: there is nothing to do.
        is_newest: that checkpoint was looked for and not named: one before it would do.
        notes: lines for the user on where it resumes and what is traced.
        first: by what the ranks of a launcher have agreed on that checkpoint; rank 0 may serve the store of it.
    """

    job: JobConfig
    backend: Backend
    ranks: int
    memory: str
    seed: int
    resume: Path | None
    steps_done: int
    trace: range
    is_shared: bool
    continues: bool
    is_done: bool
    notes: Sequence[str]
    is_newest: bool = False
    first: FirstRank | None = None

    def resolve(self, out: Path, init_method: str, on_stage: OnStage | None = None) -> Plan:
        """Return the plan, as `resolve`, for a run that a signal stops gently."""
        return resolve(
            self.job,
            ranks=self.ranks,
            init_method=init_method,
            backend=self.backend,
            out=out,
            seed=self.seed,
            resume=self.resume,
            trace=self.trace,
            is_shared=self.is_shared,
            stops_gently=True,
            continues=self.continues,
            on_stage=on_stage,
        )


def draft(
    config: Config,
    env: RankEnv | None = None,
    *,
    seed: int,
    is_default_seed: bool = False,
    out: Path | None = None,
    resume: Path | None = None,
    trace: str | None = None,
) -> Draft:
    """Decide what needs no text and no folder, before any rank starts.

    Args:
        env: which rank of a launcher this process is; None: it will start the ranks on this machine.
        is_default_seed: `seed` is the option's default, before which the seed of a checkpoint goes.
        out: the option `--out`; None: not given.
        resume: the option `--resume`: a checkpoint, a run, or `auto`.
        trace: the option `--trace`: steps of the run.

    Raises:
        ConfigError: the job does not fit the ranks or the memory; there is no such checkpoint, or it is of another
            model or seed, or has taken all steps; the steps to trace are none of this run; `out` is missing.
        HardwareMissing: the backend needs more GPUs than there are.
    """
    job, cluster = config.job, config.cluster
    # Ranks on this machine: under a launcher, those of other machines check their own.
    here, ranks = (cluster.num_gpus,) * 2 if env is None else (env.local_world_size, env.world_size)
    if env is None and cluster.servers > 1:
        rule = "only ranks of one machine are started from here"
        remedy = "start with torchrun, srun or mpirun, or preview with --dry-run"
        raise ConfigError("cluster.servers", cluster.servers, rule, remedy)
    backend = environ.choose_backend(job.launch.backend, here, env)
    check_supported(job, ranks)
    job, memory = fit_memory(job, here, backend)
    first = None if resume is None else _first_rank(env, job)
    share = {} if first is None else {"share": first.share}
    start = start_of(resume, out, os.environ, job.checkpoint.folder, **share)
    notes, path, steps_done = list(start.notes), None, 0
    if start.meta:
        path, steps_done = start.meta.path, start.meta.step
        # Before the seed is taken from it: of another model its seed says nothing.
        check_model(start.meta, job)
        if job.checkpoint.model_only and not start.continues:
            steps_done = 0
            notes.append(f"takes the parameters of {path}, after step {start.meta.step:,}, and begins with step 1")
        else:
            # The default seed is no wish of the user's, and gives way to the checkpoint's without a word.
            seed = seed_of(start.meta, None if is_default_seed else seed, job)
            notes += resume_notes(start.meta, job)
    if job.checkpoint.copy_interval:
        notes.append(_copies_line(job, max(1, ranks // here)))
    is_done = bool(steps_done) and not check_steps_left(start, job)
    if is_done:
        notes = [f"{path} has taken all {steps_done:,} steps of the job: nothing to do"]
    steps = range(0)
    if trace and not is_done:
        # Of a run that resumes in its folder, an earlier start may have traced them.
        steps = parse_steps(trace, 1 if start.continues else steps_done + 1, job.optimizer.steps)
        if steps[0] <= steps_done:
            notes.append(f"note: --trace {trace} has no effect up to step {steps_done}, from which it resumes")
            # What an earlier start has traced stays as it is: the range shrinks to what is still to come.
            steps = range(steps_done + 1, max(steps.stop, steps_done + 1))
    if env is not None and job.checkpoint.peer_copies and out is None and not is_done:
        rule = f"is needed for peer copies: {env.launcher} started ranks that look there for one another's memory"
        raise ConfigError("--out", None, rule, "give a folder that all of them see")
    # Without it rank 0 names a folder of its own, which the other ranks do not know.
    has_folder = out is not None or job.checkpoint.folder
    if env is not None and job.checkpoint.every_steps and not has_folder and not is_done:
        rule = f"is needed for checkpoints: {env.launcher} started ranks that write to one folder"
        raise ConfigError("--out", None, rule, "give a folder that all of them see")
    return Draft(
        job=job,
        backend=backend,
        ranks=ranks,
        memory=memory,
        seed=seed,
        resume=path,
        steps_done=steps_done,
        trace=steps,
        # Under a launcher only a folder that the user has named is known to be one for all ranks.
        is_shared=env is None or out is not None,
        continues=start.continues,
        is_done=is_done,
        notes=notes,
        is_newest=start.automatic,
        first=first,
    )


def _first_rank(env: RankEnv | None, job: JobConfig) -> FirstRank | None:
    """Return by what the ranks of a launcher agree before they meet; None: there is one process."""
    if env is None or env.world_size == 1:
        return None
    from netlayer.rendezvous import FirstRank  # only here: it loads torch

    waits_s = max(job.store.timeout_s, job.parallel.distributed_timeout_s)
    return FirstRank(init_method_under(env), env.rank, env.world_size, timedelta(seconds=waits_s))


def _copies_line(job: JobConfig, machines: int) -> str:
    """Return a line on the memory of peer copies: 12 bytes an element (a parameter, two moments) on each machine."""
    config = job.checkpoint
    # Of the whole model: each machine holds its share of the state, and copies of its neighbours'.
    elements = sum(stage_elements(job, stage) for stage in range(job.parallel.pp)) * job.parallel.tp
    copies = min(config.peer_copies, machines - 1)
    size = 12 * elements // machines * (copies + 1) * (config.peer_keep + 1)
    where = f"its memory and that of {copies} more" if copies else "its own memory alone"
    every = f"peer copies: every {config.copy_interval} steps, the state of each machine in {where}"
    return f"{every}; up to about {gib(size)} a machine"


def check_supported(job: JobConfig, ranks: int) -> None:
    """Raise ConfigError where the job does not fit the ranks, before anything is started."""
    world_size = job.parallel.layout.world_size
    if world_size != ranks:
        degrees = "job.parallel.tp x pp x dp"
        raise ConfigError(degrees, world_size, f"must equal the number of ranks started, {ranks}", "change a degree")


def check_memory(job: JobConfig, ranks: int, backend: Backend) -> str:
    """Return the line of `fit_memory`; errors as there."""
    return fit_memory(job, ranks, backend)[1]


def fit_memory(job: JobConfig, ranks: int, backend: Backend) -> tuple[JobConfig, str]:
    """Return the job as it fits, its defaults stepped down for that, and one line that says what it will take.

    Raises:
        ConfigError: the ranks together need more than this machine has free, or one more than its GPU has; snapshots
            for checkpoints need more than this machine has.
    """
    there, where = memory_here(backend)
    sharing = 1 if backend == "nccl" else ranks
    counted, settings = settle_here(job, ranks, backend)
    # A CPU has no windows to take, and the job keeps its wish for them.
    fitted = with_overlap(counted, windows=job.overlap.windows) if backend == "gloo" else counted
    job = counted if backend == "gloo" else in_room(counted, there)
    needed = estimate(job)
    line = f"a rank will hold about {needed}"
    # A machine's ranks share one sum; a card's need is more than what torch's allocator holds.
    if sharing > 1:
        line += f"; {ranks} ranks {gib(needed.total * ranks)}"
    elif backend == "nccl":
        line += f"; with CUDA, NCCL, what peers copy and fragments {gib(needed.reserved)}"
    # Nobody could say what is free (no GPU to ask, no /proc): the line is printed, and nothing is refused.
    if there:
        line += f"; {where} {gib(there)}"
        if settings:
            line += f", for which it sets {settings}"
        check_room(job, line, there, sharing, is_card=backend == "nccl")
    return fitted, line + check_snapshots(job, ranks)


def settle_here(job: JobConfig, ranks: int, backend: Backend) -> tuple[JobConfig, str]:
    """Return the job with its defaults stepped down to this machine's memory, and what was set; on gloo, no windows."""
    there, _ = memory_here(backend)
    # On the CPU all ranks share the machine's memory; on GPUs each has a card of its own.
    if backend == "gloo":
        return settle(with_overlap(job, windows=False), there // ranks, is_card=False)
    return settle(job, there)


def check_snapshots(job: JobConfig, ranks: int) -> str:
    """Return text on the memory that snapshots of this machine's ranks take; empty if there are none.

    A host that has the memory, and not free, is none of this: its saves wait (`trainer.checkpoint.save.open_saver`).

    Raises:
        ConfigError: it has less in all.
    """
    # Of replicas one is saved: the ranks of the others hold no snapshot.
    saving = saving_ranks(job, ranks)
    needed, there = snapshot_bytes(job) * saving, environ.total_memory_bytes()
    if needed > there:
        rule = (
            f"needs {gib(needed)} of the host's memory for snapshots of {saving} ranks, and this one has {gib(there)}"
        )
        remedy = "set it to false, so that training waits for saves, or use more machines"
        raise ConfigError("job.checkpoint.asynchronous", True, rule, remedy)
    return f"; snapshots for checkpoints take {gib(needed)} of the host's memory" if needed else ""


def memory_here(backend: Backend) -> tuple[int, str]:
    """Return the bytes that ranks can take: of the smallest GPU, or of this machine; 0 if not known."""
    if backend == "gloo":
        return environ.available_memory_bytes(), "free here are"
    sizes = [gpu.memory_mib for gpu in environ.usable_gpus() if gpu.memory_mib]
    return min(sizes, default=0) * 2**20, "the GPU has"


def prepare_data(
    job: JobConfig, ranks: int, seed: int, out: Path, on_stage: OnStage | None = None, resume: Path | None = None
) -> Corpus | Mixture:
    """Open the datasets of `job`, or `prepare` its text; arguments and errors as there."""
    if not job.data.datasets:
        return prepare(job, ranks, seed, out, on_stage, resume)
    check_supported(job, ranks)
    # Where it resumes, the samples go on behind those that the checkpoint has used.
    before = find(resume, has_files=False) if resume else None
    mixture = prepare_mixture(job)
    check_samples(job, mixture, None if job.checkpoint.model_only else before)
    return mixture


def prepare(
    job: JobConfig, ranks: int, seed: int, out: Path, on_stage: OnStage | None = None, resume: Path | None = None
) -> Corpus:
    """Check what `train` cannot do, then tokenise the text of `job`, or find its tokens in the cache.

    Args:
        job: resolved configuration.
        ranks: number of processes that will train.
        seed: draws the files where there is more text than job.data.max_mib.
        out: a folder that exists; holds the tokens where the cache folder cannot be written.
        on_stage: called with progress.
        resume: a checkpoint to resume from; it must be of this text, or give its tokenizer for another.

    Raises:
        ConfigError: the job does not fit the ranks, the text cannot be used, or is another than the checkpoint's.
    """
    # Before the text is tokenised, which may take minutes.
    check_supported(job, ranks)
    text = (job.data, job.model.vocab_size, seed)
    # First, for damage there is found in a moment, and the text may take minutes.
    before = find(resume, has_files=False) if resume else None
    if job.data.datasets:
        rule = "are tokens, and this trains on text alone"
        raise ConfigError("job.data.datasets", ", ".join(job.data.datasets), rule, "omit them, or use netlayer train")
    brought = (
        before.tokenizer_file
        if before and (job.checkpoint.allow_dataset_change or TOKENIZER in before.digests)
        else None
    )
    # Else the text brings the same, and it is but read.
    tokenizer_file = brought if job.checkpoint.allow_dataset_change or (before and before.is_fresh) else None
    # A shared home may be read-only or full on this machine: the run itself can still go on.
    try:
        corpus = prepare_corpus(*text, cache_folder(), on_stage, tokenizer_file)
    except OSError as exc:
        template = "$XDG_CACHE_HOME, or ~/.cache, cannot be used as a cache (%s); this run's tokens go to %s"
        logger.warning(template, exc, out)
        try:
            corpus = prepare_corpus(*text, out, on_stage, tokenizer_file)
        except OSError as also:
            rule = f"cannot hold the tokens of the text ({also}), nor can the cache ({exc})"
            raise ConfigError("--out", out, rule, "give a folder of yours that has room") from also
    # Not earlier: only the prepared corpus knows the digests of text and tokens.
    if before:
        check_same_text(before, corpus.identity, job)
    # Only now: how many tokens there are depends on the tokenizer.
    check_enough(corpus.facts, job.data.folder, job.batch.global_batch_size, job.model.seq_len)
    check_samples(job, corpus, None if job.checkpoint.model_only else before)
    return corpus
