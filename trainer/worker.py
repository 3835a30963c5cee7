"""One rank's process: it meets the others, trains, and hands on its rows.

On the CPU the same seed gives the same losses to the bit, in the same layout, with as many threads and on the same kind
of processor, which choose a GEMM's kernel; on a GPU that would cost the fastest kernels, so there they agree to
rounding. Not covered: what a step does (`trainer.loop`), and starting processes (`netlayer.launch.launcher`).
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import json
import logging
import math
import os
import threading
import time
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from collectives.watch.hang import HangLimits
from collectives.watch.monitor import Monitor
from collectives.watch.watchdog import Watch
from netlayer.config.tree import JobConfig
from netlayer.environ import has_own_gpu, more_in_sight
from netlayer.errors import CollectiveFailed, ConfigError, HardwareMissing, NetlayerError, RanksMissing
from netlayer.launch.rank import RankContext
from netlayer.rendezvous import Groups, open_world
from trainer.checkpoint.meta import Meta, find
from trainer.checkpoint.resume import own_folder
from trainer.history import CHECKPOINTS, METRICS, VALIDATION, RowFile, resume_history
from trainer.inprocess import active, failing, on_failure
from trainer.loop import RankInfo, Row, Trainer, run
from trainer.metrics import Sink, open_sinks
from trainer.observe import monitored
from trainer.parallel import further_groups
from trainer.plan import Plan
from trainer.resilience.progress import ProgressFile
from trainer.stop import StopRequest, listening
from trainer.trace import TRACE, StepTracer
from trainer.train import Outcome, Progress

logger = logging.getLogger(__name__)

# Of a job, what may rightly differ from host to host.
_OF_A_HOST: Any = {
    # Paths; what lies there must be the same, and `text` says whether it is.
    "data": {"folder", "datasets", "evaluation", "ring_folder"},
    "store": True,
    "launch": True,
    "metrics": True,
    "resilience": True,
    "observe": {"folder", "url"},
    "nccl": {"hca", "gid_index"},
    "checkpoint": {"peer_address"},
}

_ALLOCATOR_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_LONGEST_VALUE = 60  # characters of a setting that ranks compare: each rank that waits writes down all of its own
_LAST_EVENTS_S = 0.5  # before a rank ends because of another
_NOTE_EVERY_S = 600.0  # well within the hour for which a cache of corpora takes it


def run_rank(context: RankContext, plan: Plan) -> Outcome:
    """Train as one rank: from meeting the others to the last evaluation, or to where it was asked to stop."""
    if not plan.stops_gently:
        return _train(context, plan, StopRequest())
    launcher = context.env.launcher
    with listening(counts=launcher != "netlayer", follows=launcher == "torchrun") as stop:
        outcome = _train(context, plan, stop)
        # With the last references gloo's threads end. One that lets go of finished work while the interpreter is torn
        # down, as it is under other launchers than ours, would abort a process that has ended well.
        gc.collect()
    return outcome


def _train(context: RankContext, plan: Plan, stop: StopRequest) -> Outcome:
    place, groups = meet(context, plan)
    # Before the model is built, which draws its initial values.
    _be_deterministic(place, plan.seed)
    meta = None if plan.resume is None else find(plan.resume, has_files=False)
    # A start that goes on in its folder goes on with all of it: what it had taken the parameters from is past.
    model_only = plan.job.checkpoint.model_only and not plan.continues
    steps_done = 0 if meta is None or model_only else meta.step
    with monitored(context, plan, place, steps_done) as monitor, _watched(context, plan.job, monitor) as watch:
        return _train_watched(context, plan, stop, place, groups, watch, monitor, meta, model_only=model_only)


@contextlib.contextmanager
def _watched(context: RankContext, job: JobConfig, monitor: Monitor | None) -> Iterator[Watch | None]:
    """Watch for ranks that hold up the others until the block ends; None where the job has no watch."""
    if not job.watch.enabled or context.env.world_size == 1:
        yield None
        return

    failed = threading.Event()

    def fail(error: NetlayerError) -> None:
        if failed.is_set():  # a process that outlives this goes on watching until its main thread has left
            return
        failed.set()
        if monitor is not None:  # the process ends at once: what it has recorded would be lost
            monitor.mark("failure", str(error))
            monitor.flush(_LAST_EVENTS_S)
        failing(context.fail)(error)

    watch = Watch(
        timeout=timedelta(seconds=job.parallel.distributed_timeout_s),
        layout=job.parallel.layout,
        on_failure=fail,
        hang=HangLimits(job.watch.timeout_s, job.watch.floor_s),
    )
    try:
        yield watch
    except Exception as exc:
        if isinstance(exc, CollectiveFailed) and exc.culprits:
            raise
        is_of_peer = watch.is_of_peer(exc)
        cause = watch.cause_of(exc) if is_of_peer else None  # outside the watched collectives
        if cause is not None:
            raise cause from exc
        if not (is_of_peer and isinstance(exc, CollectiveFailed | RuntimeError)):  # else it may be a victim's
            watch.announce(exc)
        raise
    finally:
        watch.close()


def _train_watched(
    context: RankContext,
    plan: Plan,
    stop: StopRequest,
    place: RankInfo,
    groups: Groups,
    watch: Watch | None,
    monitor: Monitor | None,
    meta: Meta | None,
    *,
    model_only: bool,
) -> Outcome:
    """Train as one rank under its watch: load the checkpoint, run the loop, report rows, and return the outcome."""
    progress = ProgressFile.of(os.environ)
    trainer = Trainer(plan.job, plan.corpus, plan.seed, place, groups, stop, watch, monitor, progress)
    if active:
        on_failure(trainer.abandon)
    if meta is not None:
        with trainer.phase("loads a checkpoint"):
            trainer.resume(meta, model_only=model_only)
    if place.rank == 0:
        windows = ", parameters and gradients in NCCL's windows" if trainer.model.has_windows else ""
        if trainer.model.has_peer_reduce:
            windows = ", parameters in NCCL's windows" if trainer.model.has_windows else ""
            windows += ", gradients to the peers by copy engines"
        facts = trainer.num_parameters, place.world_size, place.device_name, windows
        logger.info("%d parameters, %d ranks on %s%s", *facts)
    tracer = StepTracer(plan.trace, plan.out / TRACE, plan.job.parallel.layout, place.rank)
    own = plan.out / CHECKPOINTS if plan.is_shared else None
    checkpoints = plan.job.checkpoint.folder or own
    with _Rows(context, plan, trainer.steps_done, progress) as rows:
        if progress is not None:
            progress.begin()
        calls = rows.add_step, rows.add_evaluation, checkpoints, tracer.add, rows.warn
        ended = run(trainer, plan.job.evaluation, *calls, plan.out if plan.is_shared else None)
        with trainer.phase("writes the trace"):
            tracer.write()
    if watch is not None:
        watch.close()  # before ranks part: who is first has not gone astray
    # Only here: after a failure they could wait for peers that are gone, and hold back the report of the cause.
    trainer.close()
    dist.destroy_process_group()
    return Outcome(tuple(rows.steps), tuple(rows.evaluations), trainer.num_parameters, place.device_name, ended)


def meet(context: RankContext, plan: Plan) -> tuple[RankInfo, Groups]:
    """Call `init_process_groups` for the job; ranks must have equal arguments, for those of a launcher read them
    themselves.

    Raises:
        As `init_process_groups`; ConfigError: ranks have other jobs, seeds, checkpoints or text; names what, and which
        ranks.
    """
    return init_process_groups(context, plan.job, plan.init_method, plan.backend, _same(plan))


def init_process_groups(
    context: RankContext, job: JobConfig, init_method: str, backend: str, same: Mapping[str, object] | None = None
) -> tuple[RankInfo, Groups]:
    """Choose this rank's device and make the process groups of the layout.

    Args:
        same: as in `open_world`.

    Raises:
        HardwareMissing: nccl, and this machine has fewer GPUs than ranks.
        RanksMissing: not all ranks came in time.
    """
    env, device = context.env, torch.device("cpu")
    if backend == "nccl":
        number = torch.cuda.device_count()
        index = 0 if has_own_gpu(env, number) else env.local_rank
        if index >= number:
            rule = f"{env.local_world_size} ranks want a GPU each, {number} found"
            remedy = f"lower a degree of job.parallel, or use gloo{more_in_sight(env)}"
            raise HardwareMissing(f"backend nccl: {rule}; {remedy}")
        device = torch.device("cuda", index)
        _use_expandable_segments()
        torch.cuda.set_device(device)
    waits_s = job.store.timeout_s
    if env.launcher != "netlayer":  # each host prepares the text for itself, and one may have nothing of it yet
        waits_s = max(waits_s, job.parallel.distributed_timeout_s)
    try:
        groups = open_world(
            job.parallel.layout,
            backend=backend,
            init_method=init_method,
            rank=env.rank,
            device=device if device.type == "cuda" else None,
            bound=device.type == "cuda",
            more=further_groups(job),
            same=same,
            timeout=timedelta(seconds=waits_s),
            collective_timeout=timedelta(seconds=job.parallel.distributed_timeout_s),
        )
    except RanksMissing as exc:
        remedy = f"see their logs, or raise job.store.timeout_s above {waits_s:g}"
        raise RanksMissing(f"{exc}; {remedy}", exc.missing) from exc
    return RankInfo(env.rank, env.world_size, device), groups


def _use_expandable_segments() -> None:
    """Have torch's allocator grow segments instead of adding others, unless the environment says how it shall.

    Activations, gathered parameters and gradients on their way differ in size: of a 7B over four H100, 5 GiB lay free
    in segments that fitted nothing, and the job did not fit; with expandable segments 1 GiB (reports/zero_202611.md).
    """
    values = [value for name in _ALLOCATOR_VARIABLES if (value := os.environ.get(name))]
    # CUDA's own asynchronous allocator has no segments.
    if not any(key in value for value in values for key in ("expandable_segments", "cudaMallocAsync")):
        # With what is set already, of which torch reads the first: each call puts the others back to their defaults.
        torch._C._accelerator_setAllocatorSettings(",".join([*values[:1], "expandable_segments:True"]))


def _same(plan: Plan) -> dict[str, str]:
    """Return the settings that all ranks must have alike; an early one may be why a later one differs."""
    resumed = None if plan.resume is None else find(plan.resume, has_files=False)
    job = plan.job.model_dump(mode="json", exclude=_OF_A_HOST, exclude_defaults=True)
    text = plan.corpus.identity
    return {
        "checkpoint": "none" if resumed is None else f"step {resumed.step} ({_digest_of(resumed)})",
        "--seed": str(plan.seed),
        "defaults of the job": _digest(JobConfig().model_dump(mode="json", exclude=_OF_A_HOST)),
        # Key by key, so that the one that differs is named; a rank that has the default does not give it.
        **_leaves("job", job),
        "--trace": f"{plan.trace.start}-{plan.trace.stop - 1}" if plan.trace else "none",
        "--out": "given" if plan.is_shared else "not given",
        "text": f"{text['text'][:8]} in tokens {text['tokenizer'][:8]}",
    }


def _leaves(path: str, value: object) -> dict[str, str]:
    """Return the keys of a tree of settings by their dotted paths, each with its value as a short text."""
    if isinstance(value, Mapping):
        return {key: text for name, part in value.items() for key, text in _leaves(f"{path}.{name}", part).items()}
    text = json.dumps(value, sort_keys=True) if isinstance(value, list) else str(value)
    return {path: text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}... ({_digest(value)})"}


def _digest_of(meta: Meta) -> str:
    """Return a digest of a checkpoint that does not depend on its path."""
    return _digest([meta.seed, meta.job, meta.corpus, meta.digests])


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()[:8]


def _be_deterministic(place: RankInfo, seed: int) -> None:
    torch.manual_seed(seed)
    if place.device.type == "cpu":
        torch.use_deterministic_algorithms(True)
        # A check that costs time: nothing here reads memory before it is written.
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


class _Rows:
    """Rank 0's rows: kept, written line by line, shown where the job says, and reported; other ranks keep none.

    Args:
        first: steps that were taken before this start of the run.
        progress: of this rank, for an executor; None: there is none.
    """

    def __init__(self, context: RankContext, plan: Plan, first: int = 0, progress: ProgressFile | None = None) -> None:
        self._progress = progress
        self.steps: list[Row] = []
        self.evaluations: list[Row] = []
        self._context, self._plan, self._steps_before = context, plan, first
        self._is_first = context.env.rank == 0
        self._files = contextlib.ExitStack()
        self._sinks: list[Sink] = []
        self._first_s: float | None = None
        self._noted_s = -math.inf  # when the corpus was last said to be in use

    def __enter__(self) -> _Rows:
        if self._is_first:
            job, out = self._plan.job, self._plan.out
            # Only here: every rank has read the checkpoint, and it is whole.
            folder = own_folder(out, job.checkpoint.folder)
            arguments = out, self._steps_before, self._plan.resume, folder
            restart = resume_history(*arguments) if self._plan.continues else None
            with contextlib.ExitStack() as files:
                earlier = (restart.count, self._steps_before) if restart else (0, 0)
                evaluated = restart is not None and restart.is_evaluated
                self._sinks = files.enter_context(open_sinks(job.metrics, job.name, out, *earlier, evaluated=evaluated))
                self._metrics, self._validation = (
                    RowFile(out / name, appends=restart is not None, on_full=self.warn)
                    for name in (METRICS, VALIDATION)
                )
                self._files = files.pop_all()
            if restart and restart.missing:
                first, last = restart.missing
                self.warn(f"{out / METRICS} has no rows of steps {first}-{last}, which were taken before this start")
        return self

    def __exit__(self, *exc: Any) -> bool | None:
        try:
            if self._is_first:
                # Where the run has failed, its own error is what counts.
                with contextlib.suppress(ConfigError) if exc[0] else contextlib.nullcontext():
                    self._metrics.close()
                    self._validation.close()
        finally:
            self._files.__exit__(*exc)
        return None

    def add_step(self, row: Row) -> None:
        if self._progress is not None:
            self._progress.add_step(row)
        if self._is_first:
            self._first_s = self._first_s or time.monotonic()
            self.steps.append(row)
            # A run that resumes from a checkpoint finds the rows before it, after a power cut too.
            self._metrics.add(row, durably=row["checkpoint_s"] > 0 or row.get("checkpoint_stall_s", 0) > 0)
            self._tell("training", row)

    def add_evaluation(self, row: Row) -> None:
        if self._is_first:
            self.evaluations.append(row)
            self._validation.add(row)
            self._tell("validating", row)
            logger.info("step %d: held-out loss %.4f", row["step"], row["validation_loss"])

    def warn(self, line: str) -> None:
        """Have the user see it: where the launcher is not ours, the log is on its stderr."""
        if self._is_first:
            logger.warning("%s", line)
            steps = self._plan.job.optimizer.steps
            self._context.report(Progress("warning", self._steps_done, steps, {}, warning=line))

    @property
    def _steps_done(self) -> int:
        return self.steps[-1]["step"] if self.steps else self._steps_before

    def _tell(self, stage: str, row: Row) -> None:
        if time.monotonic() > self._noted_s + _NOTE_EVERY_S:
            self._noted_s = time.monotonic()
            self._plan.corpus.note_in_use()
        for sink in self._sinks:
            sink.add(row)
        total = self._plan.job.optimizer.steps
        self._context.report(Progress(stage, row["step"], total, row, self._left_s(total - row["step"])))

    def _left_s(self, num_steps: int) -> float | None:
        if self._first_s is None or len(self.steps) < 2:
            return None
        return (time.monotonic() - self._first_s) / (len(self.steps) - 1) * num_steps
