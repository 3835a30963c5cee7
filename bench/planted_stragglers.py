"""`python -m bench.planted_stragglers`: slow ranks planted in real training runs, and whether they are named.

Gloo ranks train like those of `netlayer train`, with the monitor on. From a random step on one random rank sleeps in
every step for a share of a step time: before the forward pass (`host`) or inside it (`forward`). Afterwards the events
are read as they grew, step by step: a run is *right* if exactly that rank is named within 20 steps of the fault, and
still is at the end. Healthy runs have no fault, and nobody may be named. Delays count from the fault to the end of the
step with which the rank is named first; the monitor's interval and the judging come on top and are rows of their own.

Not covered: NCCL and GPUs, where `sleep` on the host is hidden unless the queue runs dry.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from netlayer import environ
from netlayer.command import RunOptions, run_options_without_config
from netlayer.config.tree import JobConfig, build_config
from netlayer.errors import CheckFailed
from netlayer.launch.launcher import launch
from netlayer.launch.rank import RankContext
from netlayer.observe.readers import open_evidence
from netlayer.observe.verdicts.judge import judge
from netlayer.observe.verdicts.run import Run, collect
from netlayer.observe.verdicts.straggler import detect
from netlayer.results import RunRecord, utc_now, write_text
from netlayer.store.meeting import meeting_place
from trainer.data.prepare import Corpus
from trainer.plan import Plan, prepare

KINDS = ("host", "forward")
WITHIN_STEPS = 20
_FAULT_FILE = "fault.json"
_QUIET_STEPS = range(20, 31)  # the fault begins after one of these
_MODEL = {"layers": 2, "hidden": 64, "heads": 4, "ffn_hidden": 128, "vocab_size": 512, "seq_len": 64}


@dataclass(frozen=True)
class Fault:
    """From `step` on, `rank` sleeps for `share` of the median step time that it saw before."""

    kind: str
    rank: int
    step: int
    share: float


@dataclass(frozen=True)
class Row:
    """One run; times in seconds, steps counted from the fault."""

    fault: str
    rank: int | None
    step: int | None
    share: float
    step_s: float
    right: bool
    named: list[int]
    steps_to_name: int | None
    seconds_to_name: float | None
    judge_s: float
    cause: str
    slowdown: float | None


@click.command()
@click.option("--ranks", type=click.IntRange(4), default=8, show_default=True)
@click.option("--tries", type=click.IntRange(0), default=10, show_default=True, help="Runs a kind of fault.")
@click.option("--healthy", type=click.IntRange(0), default=5, show_default=True, help="Runs without a fault.")
@click.option("--share", type=click.FloatRange(0, 10), default=0.5, show_default=True, help="Sleep, of a step time.")
@run_options_without_config
def command(options: RunOptions, ranks: int, tries: int, healthy: int, share: float) -> None:
    """Plant slow ranks in runs on gloo, and count how often exactly the slow one is named within 20 steps.

    Exit 0: in every run, and nobody in healthy runs; 1: otherwise.

    \b
    Examples:
      python -m bench.planted_stragglers --json stragglers.json
      python -m bench.planted_stragglers --tries 1 --healthy 1
    """
    started, rows = utc_now(), list[Row]()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        for row in _run_all(Path(folder), rng, ranks, tries, healthy, share):
            click.echo(json.dumps(asdict(row)), err=True)
            rows.append(row)
    if options.json_file:
        record = RunRecord(
            name="bench.planted_stragglers",
            source="measured",
            rows=[asdict(row) for row in rows],
            started_utc=started,
            ended_utc=utc_now(),
            arguments={**options.arguments(), "ranks": ranks, "tries": tries, "healthy": healthy, "share": share},
            environment=environ.snapshot(options.seed),
        )
        write_text(options.json_file, record.to_json())
    if str(options.json_file) != "-":
        for line in summary(rows):
            click.echo(line)
    wrong = [row for row in rows if not row.right]
    if wrong:
        raise CheckFailed(f"{len(wrong)} of {len(rows)} runs judged wrong: {asdict(wrong[0])}")


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


def _run_all(folder: Path, rng: random.Random, ranks: int, tries: int, healthy: int, share: float) -> Iterator[Row]:
    corpus = prepare(job_of(ranks), ranks, 0, folder)
    faults = [
        Fault(kind, rng.randrange(ranks), rng.choice(_QUIET_STEPS), share) for _ in range(tries) for kind in KINDS
    ]
    for fault in [*faults, *[Fault("none", 0, 0, 0.0)] * healthy]:
        yield measure(fault, ranks, corpus, Path(tempfile.mkdtemp(dir=folder)))


def job_of(ranks: int) -> JobConfig:
    """A small data-parallel job, whose steps take some tens of milliseconds."""
    tree: dict[str, Any] = {
        "model": _MODEL,
        "parallel": {"dp": ranks},
        "batch": {"global_size": ranks, "micro_size": 1},
        "optimizer": {"steps": _QUIET_STEPS.stop + WITHIN_STEPS + 5},
        "evaluation": {"every_steps": 4000, "global_batches": 1},
        "data": {"max_mib": 0.5},
    }
    return build_config({"cluster": {"gpus_per_server": ranks}, "job": tree}).job


def measure(fault: Fault, ranks: int, corpus: Corpus, out: Path) -> Row:
    """Train with one fault, and judge the events step by step."""
    with meeting_place() as place:
        plan = Plan(job_of(ranks), corpus, place.init_method("stragglers"), "gloo", out, 0, stops_gently=True)
        launch(run_slow, ranks, args=(plan, fault), log_dir=out / "logs", env={"OMP_NUM_THREADS": "1"})
    run = collect(open_evidence(out))
    begin = time.perf_counter()
    verdicts, detection = judge(run)
    judge_s = time.perf_counter() - begin
    named = [run.ranks[suspect.column] for suspect in detection.suspects]
    step_s = float(statistics.median(run.step_s[:, 0].tolist()))
    if fault.kind == "none":
        return Row("none", None, None, 0.0, step_s, not named, named, None, None, judge_s, "", None)
    steps_to_name = _first_named(run, fault)
    facts = json.loads((out / _FAULT_FILE).read_text())
    seconds = None
    if steps_to_name is not None:
        row = run.steps.index(fault.step + steps_to_name - 1)
        seconds = run.step_end_ns[row] / 1e9 - facts["at_s"]
    straggler = next(verdict for verdict in verdicts if verdict.subject == "straggler")
    shown = next((row for row in straggler.rows if row["rank"] == fault.rank), None)
    right = named == [fault.rank] and steps_to_name is not None
    return Row(
        fault.kind, fault.rank, fault.step, fault.share, step_s, right, named, steps_to_name, seconds, judge_s,
        shown["cause"] if shown else "", shown["slowdown"] if shown else None,
    )  # fmt: skip


def _first_named(run: Run, fault: Fault) -> int | None:
    """Steps from the fault on after which exactly the slow rank is named; None: not within 20."""
    for steps in range(1, WITHIN_STEPS + 1):
        row = run.steps.index(fault.step + steps - 1)
        detection = detect(run.own_s[: row + 1], run.stages)
        if [run.ranks[suspect.column] for suspect in detection.suspects] == [fault.rank]:
            return steps
    return None


# In the ranks.


def run_slow(context: RankContext, plan: Plan, fault: Fault) -> None:
    """Run a rank like `netlayer train`; the faulty one sleeps in each step."""
    import torch

    from trainer.loop import Launched, Trainer
    from trainer.worker import run_rank

    if fault.kind != "none" and context.env.rank == fault.rank:
        begins, do_launch, sleep_s = list[float](), Trainer.launch, 0.0
        embed = torch.nn.functional.embedding

        def launch_step(trainer: Trainer, step: int) -> Launched:
            nonlocal sleep_s
            begins.append(time.monotonic())
            if step == fault.step:
                lengths = [later - earlier for earlier, later in itertools.pairwise(begins)][5:]
                sleep_s = fault.share * statistics.median(lengths)
                (plan.out / _FAULT_FILE).write_text(json.dumps({"at_s": time.time(), "sleep_s": sleep_s}))
            if fault.kind == "host":
                time.sleep(sleep_s)
            return do_launch(trainer, step)

        def slow_embedding(*args: Any, **options: Any) -> Any:
            time.sleep(sleep_s)
            return embed(*args, **options)

        Trainer.launch = launch_step  # type: ignore[assignment, method-assign]
        if fault.kind == "forward":
            torch.nn.functional.embedding = slow_embedding
    run_rank(context, plan)


if __name__ == "__main__":
    from netlayer.cli import run as run_command

    run_command(command, "python -m bench.planted_stragglers")
