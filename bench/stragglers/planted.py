"""`python -m bench.stragglers.planted`: slow ranks planted in a real training run, and whether they are named.

Gloo ranks train like those of `netlayer train`, with the monitor on. The run is a sequence of episodes: 15 steps
without a fault, then 20 in which one random rank sleeps for a share of the step time, before the forward pass (`host`)
or inside it (`forward`); healthy episodes have no fault. Each is judged by itself as its events came in, step by step:
it is *right* if the first rank that is named is the slow one, within 20 steps, and no other is named at any moment of
it; in a healthy episode nobody may be named. Delays count from the fault to the end of the step with which the rank is
named; the monitor hands its events over once a second, which comes on top, as does the judging (a column).

Not covered: NCCL and GPUs, where a sleep of the host is hidden unless the queue runs dry.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import click
import numpy as np

from netlayer import environ
from netlayer.command import RunOptions, run_options_without_config
from netlayer.config.tree import JobConfig, build_config
from netlayer.errors import CheckFailed
from netlayer.launch.launcher import launch
from netlayer.launch.rank import RankContext
from netlayer.observe.readers import open_evidence
from netlayer.observe.verdicts.judge import find_stragglers, straggler_rows
from netlayer.observe.verdicts.run import Run, collect
from netlayer.observe.verdicts.straggler import MIN_STEPS
from netlayer.results import RunRecord, utc_now, write_text
from netlayer.store.meeting import meeting_place
from trainer.plan import Plan, prepare

KINDS = ("host", "forward")
WITHIN_STEPS = 20
_QUIET_STEPS = 15
_EPISODE = _QUIET_STEPS + WITHIN_STEPS
_WARM_UP_STEPS = 10
_MODEL = {"layers": 2, "hidden": 64, "heads": 4, "ffn_hidden": 128, "vocab_size": 512, "seq_len": 64}


@dataclass(frozen=True)
class Fault:
    """Sleep of `rank`: a `share` of the median step before, in 20 steps from `step` on; of kind `none`: no sleep."""

    kind: str
    rank: int
    step: int
    share: float


@dataclass(frozen=True)
class Row:
    """One episode; steps are counted from the fault.

    Args:
        wrongly_named: flagged at any moment without being at fault.
        suspected_too: others that were suspects at some moment, and not confirmed.
        queued_share: of its own time that the median rank waited for a processor: how busy the machine was.
    """

    fault: str
    rank: int | None
    step: int
    share: float
    step_s: float
    right: bool
    wrongly_named: list[int]
    steps_to_name: int | None
    seconds_to_name: float | None
    judge_s: float
    cause: str
    still_named: bool
    suspected_too: list[int]
    queued_share: float


@click.command()
@click.option("--ranks", type=click.IntRange(4), default=8, show_default=True)
@click.option("--faults", type=click.IntRange(0), default=20, show_default=True, help="Episodes with a slow rank.")
@click.option("--healthy", type=click.IntRange(0), default=5, show_default=True, help="Episodes without one.")
@click.option("--share", type=click.FloatRange(0, 10), default=0.5, show_default=True, help="Sleep, of a step time.")
@run_options_without_config
def command(options: RunOptions, ranks: int, faults: int, healthy: int, share: float) -> None:
    """Plant slow ranks in a run on gloo, and count how often exactly the slow one is named within 20 steps.

    Exit 0: in every episode, and nobody in healthy ones; 1: otherwise.

    \b
    Examples:
      python -m bench.stragglers.planted --json stragglers.json
      python -m bench.stragglers.planted --faults 2 --healthy 1
    """
    started = utc_now()
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(episodes(random.Random(options.seed), ranks, faults, healthy, share), ranks, Path(folder))
    if options.json_file:
        record = RunRecord(
            name="bench.stragglers.planted",
            source="measured",
            rows=[asdict(row) for row in rows],
            started_utc=started,
            ended_utc=utc_now(),
            arguments={**options.arguments(), "ranks": ranks, "faults": faults, "healthy": healthy, "share": share},
            environment=environ.snapshot(options.seed),
        )
        write_text(options.json_file, record.to_json())
    if str(options.json_file) != "-":
        for line in summary(rows):
            click.echo(line)
    wrong = [row for row in rows if not row.right]
    if wrong:
        raise CheckFailed(f"{len(wrong)} of {len(rows)} episodes judged wrong: {asdict(wrong[0])}")


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """One line a kind of fault."""
    for kind in dict.fromkeys(row.fault for row in rows):
        of_kind = [row for row in rows if row.fault == kind]
        line = f"{kind}: right in {sum(row.right for row in of_kind)} of {len(of_kind)}"
        steps = [row.steps_to_name for row in of_kind if row.steps_to_name is not None]
        if steps:
            seconds = [row.seconds_to_name for row in of_kind if row.seconds_to_name is not None]
            line += (
                f"; named after {statistics.median(steps):.0f} steps (most {max(steps)}), {max(seconds):.1f} s at most"
            )
        yield line


def episodes(rng: random.Random, ranks: int, faults: int, healthy: int, share: float) -> list[Fault]:
    """The faults of a run in random order, each with the step in which it begins."""
    kinds = [KINDS[number % len(KINDS)] for number in range(faults)] + ["none"] * healthy
    rng.shuffle(kinds)
    begins = range(_WARM_UP_STEPS + _QUIET_STEPS + 1, 1 << 30, _EPISODE)
    return [Fault(kind, rng.randrange(ranks), step, share) for kind, step in zip(kinds, begins, strict=False)]


def job_of(ranks: int, num_steps: int, gc_interval: int | None = None) -> JobConfig:
    """A small data-parallel job; `gc_interval` of its loop, None: the default."""
    tree: dict[str, Any] = {
        "model": _MODEL,
        "loop": {} if gc_interval is None else {"gc_interval": gc_interval},
        "parallel": {"dp": ranks},
        "batch": {"global_batch_size": ranks, "micro_batch_size": 1},
        "optimizer": {"steps": num_steps},
        "evaluation": {"every_steps": 100_000, "global_batches": 1},
        "data": {"max_mib": 0.5},
    }
    return build_config({"cluster": {"gpus_per_server": ranks}, "job": tree}).job


def measure(faults: Sequence[Fault], ranks: int, folder: Path) -> list[Row]:
    """Train once with all faults one after the other, and judge each by itself."""
    job, out = job_of(ranks, _WARM_UP_STEPS + len(faults) * _EPISODE + 1), folder / "run"
    corpus = prepare(job, ranks, 0, folder)
    out.mkdir()
    with meeting_place() as place:
        plan = Plan(job, corpus, place.init_method("stragglers"), "gloo", out, 0, stops_gently=True)
        launch(run_slow, ranks, args=(plan, list(faults)), log_dir=out / "logs", env={"OMP_NUM_THREADS": "1"})
    run = collect(open_evidence(out))
    return [_judge(_rows(run, fault.step - _QUIET_STEPS, fault.step + WITHIN_STEPS), fault, out) for fault in faults]


def _rows(run: Run, first: int, stop: int) -> Run:
    """The run as far as some of its steps go."""
    rows = slice(run.steps.index(first), run.steps.index(first) + stop - first)
    return replace(
        run,
        steps=run.steps[rows],
        step_s=run.step_s[rows],
        own_s=run.own_s[rows],
        queued_s=run.queued_s[rows],
        segments={name: times[rows] for name, times in run.segments.items()},
        step_end_ns=run.step_end_ns[rows],
        attempts=run.attempts[rows],
        collectives=None,
    )


def _judge(run: Run, fault: Fault, out: Path) -> Row:
    """Judge an episode after each of its steps, as a reader of growing streams would."""
    wrong, suspected, first, judge_s, cause, still = set[int](), set[int](), None, 0.0, "", False
    for row in range(MIN_STEPS, len(run.steps)):
        begin = time.perf_counter()
        seen = _rows(run, run.steps[0], run.steps[row] + 1)
        detection = find_stragglers(seen)
        judge_s = max(judge_s, time.perf_counter() - begin)
        named = {run.ranks[suspect.column] for suspect in detection.stragglers}
        suspected |= {run.ranks[suspect.column] for suspect in detection.suspects} - named
        at_fault = {fault.rank} if fault.kind != "none" and run.steps[row] >= fault.step else set()
        wrong |= named - at_fault
        still = bool(named & at_fault)
        if still and first is None:
            first = row
            cause = next(one.cause for one in straggler_rows(seen, detection) if one.rank == fault.rank)
    steps = seconds = None
    if first is not None:
        steps = run.steps[first] - fault.step + 1
        seconds = run.step_end_ns[first] / 1e9 - json.loads((out / f"fault-{fault.step}.json").read_text())["at_s"]
    is_faulty = fault.kind != "none"
    right = not wrong and (steps is not None) == is_faulty
    step_s = float(np.median(run.step_s[:_QUIET_STEPS]))
    return Row(
        fault.kind, fault.rank if is_faulty else None, fault.step, fault.share if is_faulty else 0.0, step_s, right,
        sorted(wrong), steps, seconds, judge_s, cause, still,
        sorted(suspected - ({fault.rank} if is_faulty else set())), _queued_share(run),
    )  # fmt: skip


def _queued_share(run: Run) -> float:
    """Share of its own time in which the median rank waited for a processor."""
    return float(np.median(np.nansum(run.queued_s, axis=0) / np.nansum(run.own_s, axis=0)))


# In the ranks.


def run_slow(context: RankContext, plan: Plan, faults: Sequence[Fault]) -> None:
    """Run a rank like `netlayer train`; it sleeps in the steps of its faults."""
    import torch

    from trainer.loop import Launched, Trainer
    from trainer.worker import run_rank

    own = {fault.step: fault for fault in faults if fault.kind != "none" and fault.rank == context.env.rank}
    begins, sleep_s, kind, until = list[float](), 0.0, "none", 0
    do_launch, embed = Trainer.launch, torch.nn.functional.embedding

    def launch_step(trainer: Trainer, step: int) -> Launched:
        nonlocal sleep_s, kind, until
        begins.append(time.monotonic())
        if step in own:
            fault = own[step]
            lengths = [later - earlier for earlier, later in itertools.pairwise(begins[-_QUIET_STEPS:])]
            sleep_s, kind, until = fault.share * statistics.median(lengths), fault.kind, step + WITHIN_STEPS
            (plan.out / f"fault-{step}.json").write_text(json.dumps({"at_s": time.time(), "sleep_s": sleep_s}))
        if step >= until:
            kind = "none"
        if kind == "host":
            time.sleep(sleep_s)
        return do_launch(trainer, step)

    def slow_embedding(*args: Any, **options: Any) -> Any:
        if kind == "forward":
            time.sleep(sleep_s)
        return embed(*args, **options)

    Trainer.launch = launch_step  # type: ignore[assignment, method-assign]
    torch.nn.functional.embedding = slow_embedding
    run_rank(context, plan)


if __name__ == "__main__":
    from netlayer.cli import run as run_command

    run_command(command, "python -m bench.stragglers.planted")
