"""`python -m bench.stragglers.drift`: steps of a real run made longer on purpose, and what is said of why.

Ranks train like those of `netlayer train`. The first half of a run is left alone. In the second half of each run
one of these is planted:

- `gc`: every rank holds a large heap and collects garbage at moments of its own, as Python does when its counters say
  so; `cured` is the same run with `loop.gc_interval`, by which all ranks collect at once and seldom.
- `skew`: a slow host operation on another random rank in every step, before the rank launches its work.

A run is *right* if `observe report` finds drift and names the planted cause as the largest. The gain of the cure is
what the mean step of the second half loses with it, beyond what the first half differs between the runs.

Not covered: throttling, which a host cannot have planted.
"""

from __future__ import annotations

import gc
import random
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import click
import numpy as np

from bench.stragglers.planted import job_of, shape_of
from netlayer import environ
from netlayer.command import RunOptions, run_options_without_config
from netlayer.errors import CheckFailed
from netlayer.launch.launcher import launch
from netlayer.launch.rank import RankContext
from netlayer.nccl.environment import exports, for_ranks
from netlayer.observe.readers import open_evidence
from netlayer.observe.verdicts.judge import drift, find_stragglers
from netlayer.observe.verdicts.run import collect
from netlayer.observe.verdicts.verdict import CauseRow
from netlayer.results import RunRecord, utc_now, write_text
from netlayer.store.meeting import meeting_place
from trainer.plan import Plan, prepare

CAUSES = {"gc": "garbage collection", "skew": "launch skew"}
_WARM_UP_STEPS = 10
_HEAP = 200_000  # objects; a collection looks at all of them
_COLLECTS = 0.25  # chance that a rank collects in a step
_SLEEP_S = 0.15
_CURED_INTERVAL = 40


@dataclass(frozen=True)
class Fault:
    """A fault from `step` on; `kind` is a key of CAUSES."""

    kind: str
    step: int
    seed: int


@dataclass(frozen=True)
class Row:
    """One run.

    Args:
        before_s, after_s: mean step of its halves.
        state: of the drift verdict; `shares`: what each cause explains of the growth.
        right: the planted cause is named as the largest; None: nothing is expected.
        named: stragglers, of which there are none.
    """

    run: str
    before_s: float
    after_s: float
    state: str
    line: str
    shares: dict[str, float]
    right: bool | None
    named: list[int]


@click.command()
@click.option("--ranks", type=click.IntRange(4), default=4, show_default=True)
@click.option("--steps", type=click.IntRange(20), default=60, show_default=True, help="Steps of each half.")
@click.option("--backend", type=click.Choice(["gloo", "nccl"]), default="gloo", show_default=True)
@click.option("--model", default="", metavar="PRESET", help="Shape, such as 7b (job.model.preset) [default: tiny].")
@click.option("--layers", type=click.IntRange(1), help="Fewer layers than the preset has.")
@run_options_without_config
def command(
    options: RunOptions, ranks: int, steps: int, backend: Literal["gloo", "nccl"], model: str, layers: int | None
) -> None:
    """Plant irregular garbage collection and skewed launches in runs, and see what explains the longer steps.

    Exit 0: each is found and named as the largest cause, and no rank is flagged; 1: otherwise.

    \b
    Examples:
      python -m bench.stragglers.drift --json drift.json
      python -m bench.stragglers.drift --ranks 4 --steps 40
      python -m bench.stragglers.drift --ranks 4 --backend nccl --model 7b --layers 4
    """
    started, shape = utc_now(), shape_of(model, layers)
    environ.choose_backend(backend, ranks)
    rows = []
    for name, kind, gc_interval in (("gc", "gc", 0), ("gc, cured", "gc", _CURED_INTERVAL), ("skew", "skew", None)):
        with tempfile.TemporaryDirectory() as folder:
            fault = Fault(kind, _WARM_UP_STEPS + steps + 1, options.seed)
            rows.append(measure(name, fault, ranks, steps, gc_interval, Path(folder), backend=backend, model=shape))
        if str(options.json_file) != "-":
            click.echo(f"{name}: {rows[-1].before_s:.3g} s, then {rows[-1].after_s:.3g} s: {rows[-1].line}")
    if str(options.json_file) != "-":
        click.echo(f"gain of the cure: {gain(rows[0], rows[1]):.1%} of the step")
    if options.json_file:
        record = RunRecord(
            name="bench.stragglers.drift",
            source="measured",
            rows=[asdict(row) for row in rows],
            started_utc=started,
            ended_utc=utc_now(),
            arguments={
                **options.arguments(),
                "ranks": ranks,
                "steps": steps,
                "backend": backend,
                "model": model,
                "layers": layers,
            },
            environment=environ.snapshot(options.seed),
            devices=[gpu.name for gpu in environ.list_gpus()] if backend == "nccl" else (),
        )
        write_text(options.json_file, record.to_json())
    wrong = [row for row in rows if row.right is False or row.named]
    if wrong:
        raise CheckFailed(f"{len(wrong)} of {len(rows)} runs judged wrong: {wrong[0].run}: {wrong[0].line}")


def gain(fault: Row, cured: Row) -> float:
    """Share of the faulty run's step that the cure saves; a machine that is slower as a whole is taken out."""
    return 1 - (cured.after_s / cured.before_s) / (fault.after_s / fault.before_s)


def measure(
    name: str,
    fault: Fault,
    ranks: int,
    steps: int,
    gc_interval: int | None,
    folder: Path,
    *,
    backend: Literal["gloo", "nccl"] = "gloo",
    model: Mapping[str, Any] | None = None,
) -> Row:
    """Train once, and judge the steps behind the warm-up."""
    job, out = job_of(ranks, fault.step + steps - 1, gc_interval, model=model), folder / "run"
    corpus = prepare(job, ranks, 0, folder)
    out.mkdir()
    with meeting_place() as place:
        plan = Plan(job, corpus, place.init_method("drift"), backend, out, 0, stops_gently=True)
        env = {"OMP_NUM_THREADS": "1", **exports(for_ranks(backend, job.nccl))}
        launch(run_drifting, ranks, args=(plan, fault), log_dir=out / "logs", env=env)
    run = collect(open_evidence(out), last_steps=2 * steps)
    detection = find_stragglers(run)
    verdict = drift(run, detection)
    step_s = np.nanmedian(run.step_s, axis=1)
    shares = {row.cause: row.share for row in verdict.rows if isinstance(row, CauseRow)}
    is_right = verdict.state == "found" and max(shares, key=lambda cause: shares[cause]) == CAUSES[fault.kind]
    return Row(
        name,
        float(step_s[:steps].mean()),
        float(step_s[steps:].mean()),
        verdict.state,
        verdict.line,
        shares,
        None if "cured" in name else is_right,
        [run.ranks[suspect.column] for suspect in detection.stragglers],
    )


# In the ranks.


def run_drifting(context: RankContext, plan: Plan, fault: Fault) -> None:
    """Run a rank like `netlayer train`, with the fault from its step on."""
    from trainer.loop import Launched, Trainer
    from trainer.worker import run_rank

    rank, size = context.env.rank, context.env.world_size
    alone, common = random.Random(f"{fault.seed} {rank}"), random.Random(fault.seed)
    heap: Sequence[Any] = ()
    do_launch = Trainer.launch

    def launch_step(trainer: Trainer, step: int) -> Launched:
        nonlocal heap
        slow_rank = common.randrange(size)  # drawn in every step, so that all ranks draw alike
        if step == fault.step and fault.kind == "gc":
            heap = [[] for _ in range(_HEAP)]
        if step >= fault.step and fault.kind == "skew" and rank == slow_rank:
            time.sleep(_SLEEP_S)
        # Where the loop has switched collections off, Python's counters start none either.
        if step >= fault.step and fault.kind == "gc" and alone.random() < _COLLECTS and gc.isenabled():
            gc.collect()
        return do_launch(trainer, step)

    Trainer.launch = launch_step  # type: ignore[assignment, method-assign]
    run_rank(context, plan)


if __name__ == "__main__":
    from netlayer.cli import run as run_command

    run_command(command, "python -m bench.stragglers.drift")
