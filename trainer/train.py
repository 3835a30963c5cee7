"""Train the job of a configuration: `prepare` its text in this process, then `train`: launch ranks, take their rows.

torch is imported in the ranks alone, so that this process starts fast. Not covered: ranks on other machines.
"""

from __future__ import annotations

import logging
import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from congestion.nic.env import as_record, exports, for_ranks
from netlayer.cache import cache_folder
from netlayer.config.tree import JobConfig
from netlayer.errors import ConfigError, RankFailed
from netlayer.launch.launcher import launch
from netlayer.launch.rank import RankContext
from trainer.checkpoint.meta import TOKENIZER, check_same_text, find
from trainer.data.mixture import Mixture, check_samples, prepare_mixture
from trainer.data.prepare import Corpus, CorpusFacts, OnStage, check_enough, prepare_corpus
from trainer.history import CHECKPOINTS as CHECKPOINTS
from trainer.metrics import check_metrics

logger = logging.getLogger(__name__)

# By the format of Python's tracebacks, which come from a rank as text.
_FRAME = re.compile(r'^  File "([^"]+)", line (\d+), in (\S+)$', re.MULTILINE)

Backend = Literal["gloo", "nccl"]
Row = Mapping[str, Any]


@dataclass(frozen=True)
class Progress:
    """Progress of training.

    Args:
        stage: in a word.
        done: steps, of `total`.
        row: that was just added.
        left_s: seconds to the end at the pace of this run so far, evaluations and checkpoints too; None: not known yet.
        warning: a line that the user is to see; then there is nothing else.
    """

    stage: str
    done: int
    total: int
    row: Row
    left_s: float | None = None
    warning: str = ""


OnProgress = Callable[[Progress], None]


@dataclass(frozen=True)
class Stop:
    """A run that was asked to stop, and did so behind `step`.

    Args:
        checkpoint: written then; None where the ranks have no folder that all of them see.
    """

    step: int
    checkpoint: Path | None


@dataclass(frozen=True)
class TrainResult:
    """Result of training.

    Args:
        steps: one row a step, as `Trainer.step` says.
        evaluations: `step` and `validation_loss`; the first is step 0, before any training.
        corpus: what was trained on.
        num_parameters: of the whole model.
        devices: one name a rank.
        nccl_settings: NCCL's variables as the ranks had them: value, what became of it and why; none on gloo.
        stop: where it ended ahead of its last step, because it was asked to.
    """

    steps: tuple[Row, ...]
    evaluations: tuple[Row, ...]
    corpus: CorpusFacts
    num_parameters: int
    devices: tuple[str, ...]
    nccl_settings: Sequence[Row] = ()
    stop: Stop | None = None

    @property
    def validation_fall(self) -> float:
        """Return the share by which the held-out loss has fallen from its start, 0..1."""
        first, last = (self.evaluations[index]["validation_loss"] for index in (0, -1))
        return float(1 - last / first)


@dataclass(frozen=True)
class Work:
    """Arguments of every rank.

    Args:
        trace: steps for `trace.json`.
        is_shared: whether all ranks see `out`; without that there are no checkpoints.
        stops_gently, continues: as in `train`.
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


@dataclass(frozen=True)
class Outcome:
    """Result of one rank; `steps` and `evaluations` hold rows on rank 0 alone."""

    steps: tuple[Row, ...]
    evaluations: tuple[Row, ...]
    num_parameters: int
    device: str
    stop: Stop | None = None


def prepare_data(
    job: JobConfig, ranks: int, seed: int, out: Path, on_stage: OnStage | None = None, resume: Path | None = None
) -> Corpus | Mixture:
    """Open the datasets of `job`, or `prepare` its text; arguments and errors as there."""
    if not job.data.datasets:
        return prepare(job, ranks, seed, out, on_stage, resume)
    check_supported(job, ranks)
    before = find(resume) if resume else None
    mixture = prepare_mixture(job)
    check_samples(job, mixture, before)
    return mixture


def prepare(
    job: JobConfig, ranks: int, seed: int, out: Path, on_stage: OnStage | None = None, resume: Path | None = None
) -> Corpus:
    """Refuse early what `train` cannot do, then tokenise the text of `job`, or find it in the cache.

    Args:
        job: resolved configuration.
        ranks: number of processes that will train.
        seed: draws the files where there is more text than job.data.max_mib.
        out: a folder that exists; holds the tokens where the cache folder cannot be written.
        on_stage: called with progress.
        resume: a checkpoint to go on from; it must be of this text, or give its tokenizer for another.

    Raises:
        ConfigError: the job does not fit the ranks, the text cannot be used, or is another than the checkpoint's.
    """
    # Before the text is tokenised, which may take minutes.
    check_supported(job, ranks)
    text = (job.data, job.model.vocab_size, seed)
    # First, for damage there is found in a moment, and the text may take minutes.
    before = find(resume) if resume else None
    if job.data.datasets:
        rule = "are tokens, and this trains on text alone"
        raise ConfigError(
            "job.data.datasets", ", ".join(job.data.datasets), rule, "leave them out, or use netlayer train"
        )
    brought = before.tokenizer_file if before and (job.checkpoint.other_text or TOKENIZER in before.digests) else None
    tokenizer_file = brought if job.checkpoint.other_text else None  # else the text brings the same, and it is but read
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
    check_enough(corpus.facts, job.data.folder, job.batch.global_size, job.model.seq_len)
    check_samples(job, corpus, before)
    return corpus


def train(
    job: JobConfig,
    corpus: Corpus | Mixture,
    *,
    ranks: int,
    init_method: str,
    backend: Backend,
    out: Path,
    seed: int,
    on_progress: OnProgress = lambda _progress: None,
    resume: Path | None = None,
    trace: range = range(0),
    stops_gently: bool = False,
    continues: bool = False,
) -> TrainResult:
    """Train `job` on `ranks` processes of this machine.

    Writes `metrics.jsonl` and `validation.jsonl` into `out`, each row as it comes, so that an interrupted run keeps
    what it had; the ranks' logs go to `out/logs`.

    Args:
        job: resolved configuration.
        corpus: what `prepare` gave for the same job.
        ranks: number of processes; equals tp x pp x dp of job.parallel.
        init_method: where ranks meet, as `netlayer.rendezvous.open_world` takes it.
        backend: gloo computes on the CPU, nccl on one GPU a rank.
        out: a folder that exists.
        seed: of the initial parameters and of the samples.
        on_progress: called in this thread for every row.
        resume: a checkpoint to go on from; its seed goes before `seed`.
        trace: steps for `out/trace.json`.
        stops_gently: the first SIGTERM or SIGUSR1 ends the run behind a step, with a checkpoint, as a good one; a
            second one, two seconds later or more, ends it at once. False: the first one does.
        continues: the rows in `out` up to the checkpoint stay, later ones are replaced (`trainer.history`); without a
            checkpoint all of them are.

    Raises:
        ConfigError: the job does not fit the ranks, or a variable that NCCL would misread is set.
        CheckFailed: a loss or a gradient was not finite; names step and rank.
        HardwareMissing: nccl, and fewer GPUs than ranks.
        RankFailed: a rank died.
    """
    # Once more, for a caller may have prepared the corpus for other ranks.
    check_supported(job, ranks)
    # On this machine, where rank 0 will run.
    check_metrics(job.metrics)
    # Here and not in the ranks: a variable that NCCL would misread is said before any of them starts.
    nccl = for_ranks(backend, job.nccl)
    steps_done = 0

    def on_message(_rank: int, progress: Progress) -> None:
        nonlocal steps_done
        steps_done = max(steps_done, progress.done)
        on_progress(progress)

    options = {"stops_gently": stops_gently, "continues": continues}
    work = Work(job, corpus, init_method, backend, out, seed, resume, trace, **options)
    try:
        outcomes = launch(
            _run_rank,
            ranks,
            args=(work,),
            log_dir=out / "logs",
            # NCCL reads them in the rank's own process, where they must be set from the start.
            env=exports(nccl),
            on_message=on_message,
            grace_s=job.launch.grace_s,
            asks_first=stops_gently,
        )
    # Only here both the layout and the last step that was heard of are known.
    except RankFailed as exc:
        raise _with_place(exc, job, steps_done) from exc
    # Rank 0 holds the rows; all others only add their device.
    first = outcomes[0]
    devices = tuple(outcome.device for outcome in outcomes)
    settings = as_record(nccl)
    return TrainResult(
        first.steps, first.evaluations, corpus.facts, first.num_parameters, devices, settings, first.stop
    )


def _with_place(failed: RankFailed, job: JobConfig, steps_done: int) -> RankFailed:
    """The same with the rank's place in the job, its host, about which step it was at, and where in the code."""
    # The innermost frame comes last in a traceback.
    steps = _FRAME.findall(failed.traceback)
    where = f"; in {Path(steps[-1][0]).name}:{steps[-1][1]} in {steps[-1][2]}" if steps else ""
    place = (
        f"{job.parallel.layout.describe([failed.rank])}; host {socket.gethostname()}; after step {steps_done}{where}"
    )
    return RankFailed(failed.rank, failed.reason, failed.log_file, failed.traceback, place)


def check_supported(job: JobConfig, ranks: int) -> None:
    """Raise ConfigError where the job does not fit the ranks, before anything is started."""
    world_size = job.parallel.layout.world_size
    if world_size != ranks:
        degrees = "job.parallel.tp x pp x dp"
        raise ConfigError(degrees, world_size, f"must equal the number of ranks started, {ranks}", "change a degree")


def _run_rank(context: RankContext, work: Work) -> Outcome:
    from trainer.worker import run_rank  # here, for it imports torch, and this process only launches

    return run_rank(context, work)
