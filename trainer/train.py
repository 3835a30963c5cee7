"""Training of a plan: `train` starts ranks on this machine and takes their rows, `join` runs one of a launcher's ranks.

torch is imported in the ranks alone, so that this process starts fast. Not covered: what is decided before
(`trainer.plan`), and starting ranks on other machines.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from netlayer.config.tree import JobConfig
from netlayer.errors import RankFailed
from netlayer.launch.interrupt import held_interrupt
from netlayer.launch.launcher import launch
from netlayer.launch.rank import RankContext, RankEnv
from netlayer.nccl.environment import as_record, exported, exports
from trainer.data.prepare import CorpusFacts
from trainer.history import CHECKPOINTS as CHECKPOINTS
from trainer.metrics import check_metrics
from trainer.plan import Backend as Backend
from trainer.plan import Plan
from trainer.plan import check_supported as check_supported
from trainer.plan import prepare as prepare
from trainer.plan import prepare_data as prepare_data
from trainer.plan import resolve as resolve

# By the format of Python's tracebacks, which come from a rank as text.
_FRAME = re.compile(r'^  File "([^"]+)", line (\d+), in (\S+)$', re.MULTILINE)

Row = Mapping[str, Any]
Work = Plan  # its name until 0.2


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
    """End of a run that was asked to stop, after `step`.

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
class Outcome:
    """Result of one rank; `steps` and `evaluations` hold rows on rank 0 alone."""

    steps: tuple[Row, ...]
    evaluations: tuple[Row, ...]
    num_parameters: int
    device: str
    stop: Stop | None = None


def train(plan: Plan, on_progress: OnProgress = lambda _progress: None) -> TrainResult:
    """Train on as many processes of this machine as the plan has ranks.

    Writes `metrics.jsonl` and `validation.jsonl` into `plan.out`, each row as it comes, so that an interrupted run
    keeps what it had; the ranks' logs go to `logs` there.

    Args:
        plan: what `resolve` gave.
        on_progress: called in this thread for every row.

    Raises:
        ConfigError: the rows' sinks cannot be had.
        CheckFailed: a loss or a gradient was not finite; names step and rank.
        HardwareMissing: nccl, and fewer GPUs than ranks.
        RankFailed: a rank died.
    """
    # On this machine, where rank 0 will run.
    check_metrics(plan.job.metrics)
    steps_done = 0

    def on_message(_rank: int, progress: Progress) -> None:
        nonlocal steps_done
        steps_done = max(steps_done, progress.done)
        on_progress(progress)

    try:
        outcomes = launch(
            _run_rank,
            plan.ranks,
            args=(plan,),
            log_dir=plan.out / "logs",
            # NCCL reads them in the rank's own process, where they must be set from the start.
            env=exports(plan.nccl),
            on_message=on_message,
            grace_s=plan.job.launch.grace_s,
            asks_first=plan.stops_gently,
        )
    # Only here both the layout and the last step that was heard of are known.
    except RankFailed as exc:
        raise _with_place(exc, plan.job, steps_done) from exc
    return _result(plan, outcomes)


def join(plan: Plan, env: RankEnv, on_progress: OnProgress = lambda _progress: None) -> TrainResult:
    """Train as one of the ranks that a launcher has started; rank 0 alone writes files and reports progress.

    Raises:
        As `train`, but for RankFailed: a launcher sees its ranks die by itself.
    """
    with held_interrupt():  # torch takes two seconds to load
        from trainer.worker import run_rank

    def report(progress: Any) -> None:
        if env.rank == 0:
            on_progress(progress)

    # NCCL reads its variables when the first communicator is made: they must be there by then.
    with exported(plan.nccl):
        outcome = run_rank(RankContext(env, report), plan)
    # This process knows its own device alone, and takes it for all.
    return _result(plan, [outcome] * env.world_size)


def _result(plan: Plan, outcomes: Sequence[Outcome]) -> TrainResult:
    # Rank 0 holds the rows; all others only add their device.
    first, devices = outcomes[0], tuple(outcome.device for outcome in outcomes)
    rows, settings = (first.steps, first.evaluations), as_record(plan.nccl)
    return TrainResult(*rows, plan.corpus.facts, first.num_parameters, devices, settings, first.stop)


def _with_place(failed: RankFailed, job: JobConfig, steps_done: int) -> RankFailed:
    """Return the error with the rank's place in the job, its host, its last known step, and its line of code."""
    # The innermost frame comes last in a traceback.
    steps = _FRAME.findall(failed.traceback)
    where = f"; in {Path(steps[-1][0]).name}:{steps[-1][1]} in {steps[-1][2]}" if steps else ""
    place = (
        f"{job.parallel.layout.describe([failed.rank])}; host {socket.gethostname()}; after step {steps_done}{where}"
    )
    return RankFailed(failed.rank, failed.reason, failed.log_file, failed.traceback, place)


def _run_rank(context: RankContext, plan: Plan) -> Outcome:
    from trainer.worker import run_rank  # here, for it imports torch, and this process only launches

    return run_rank(context, plan)
