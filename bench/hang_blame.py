"""`python -m bench.hang_blame`: detection of a stopped, killed or failing rank of a training run, and its delay.

Real gloo ranks train like those of `netlayer train`. In a random step, at a random moment, one rank gets SIGSTOP,
SIGKILL or an exception. A run is *right* if the error that ends it names exactly that rank, and no process remains. The
delay is from the fault to the launcher's message, also in units of the previous step time. Healthy runs have a long
evaluation, a long checkpoint and a paused rank, and no rank may be named. Not covered: NCCL, several hosts.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
import json
import logging
import os
import random
import signal
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import click

from netlayer import environ
from netlayer.command import RunOptions, run_options_without_config
from netlayer.config.tree import JobConfig, build_config
from netlayer.errors import CheckFailed, CollectiveFailed, NetlayerError, RankFailed
from netlayer.launch.launcher import launch
from netlayer.launch.rank import RankContext
from netlayer.results import RunRecord, utc_now, write_text
from netlayer.store.meeting import meeting_place
from trainer.data.prepare import Corpus
from trainer.plan import Plan, prepare

LAYOUTS: dict[str, dict[str, int]] = {
    "dp2": {"dp": 2},
    "dp4": {"dp": 4},
    "tp2": {"tp": 2, "dp": 1},
    "pp2": {"pp": 2, "dp": 1},
    "tp2 dp2": {"tp": 2, "dp": 2},
    "pp2 dp2": {"pp": 2, "dp": 2},
    "tp2 pp2 vpp2": {"tp": 2, "pp": 2, "vpp": 2, "dp": 1},
    "tp2 pp2 dp2": {"tp": 2, "pp": 2, "dp": 2},
}
FAULTS = ("stop", "kill", "exception")
_STEPS_BEFORE = range(6, 9)  # step of the fault: late enough that the step time is known
_FAULT_FILE = "fault.json"
_SLEEP_S = 6.0  # duration of the long phases of healthy runs, several times the watch's floor
_MODEL = {
    "layers": 4,
    "hidden": 128,
    "heads": 4,
    "ffn_hidden": 256,
    "vocab_size": 512,
    "seq_len": 128,
}


@dataclasses.dataclass(frozen=True)
class Fault:
    """Fault of a rank, injected in `step`, a share `at` of a step time after its start. A `pause` lasts one step."""

    kind: str
    rank: int
    step: int
    at: float


@dataclasses.dataclass(frozen=True)
class HangRow:
    """A run of training, in the order of a record's columns, without those that are None.

    Args:
        fault: one of `FAULTS`, or none.
        rank: with the fault; in a run without one, that which pauses for a step.
        step: of the fault.
        named: ranks that the error names.
        right: exactly the rank with the fault was named and ended; without a fault: all steps were done.
        step_s: median seconds of a step before.
        after_s, after_steps: from the fault to the launcher's message, in seconds and in steps.
    """

    layout: str
    fault: str
    rank: int
    step: int | None = dataclasses.field(default=None, kw_only=True)
    named: list[int]
    right: bool
    step_s: float
    after_s: float | None = dataclasses.field(default=None, kw_only=True)
    after_steps: float | None = dataclasses.field(default=None, kw_only=True)
    message: str = ""

    def to_row(self) -> dict[str, Any]:
        """Return the columns of a record."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value is not None}


@dataclasses.dataclass(frozen=True)
class OverheadRow:
    """Ratios of a step with the watch to one without it: of time and of CPU time, medians and each pair's."""

    layout: str
    ratio: float
    ratios: list[float]
    processor_ratio: float
    processor_ratios: list[float]

    def to_row(self) -> dict[str, Any]:
        """Return the columns of a record."""
        columns = dataclasses.asdict(self)
        return {"layout": columns.pop("layout"), "fault": "overhead", **columns}


@click.command()
@run_options_without_config
@click.option("--layouts", default=",".join(LAYOUTS), show_default=True, help="Layouts, comma-separated.")
@click.option("--faults", default=",".join(FAULTS), show_default=True, help="Faults, comma-separated.")
@click.option("--tries", type=click.IntRange(0), default=3, show_default=True, help="Runs a fault and a layout.")
@click.option("--healthy", type=click.IntRange(0), default=20, show_default=True, help="Runs without a fault.")
@click.option("--overhead", is_flag=True, help="Compare step times with a watch and without one, on 4 ranks.")
def command(options: RunOptions, layouts: str, faults: str, tries: int, healthy: int, overhead: bool) -> None:
    """Inject faults into training runs on gloo, and count how often exactly the culprit is named.

    Exit 0: exactly the right rank was named in every run, and none in healthy runs; 1: otherwise.

    \b
    Examples:
      python -m bench.hang_blame
      python -m bench.hang_blame --layouts "tp2,pp2 dp2" --faults stop --tries 1 --healthy 0
      python -m bench.hang_blame --tries 0 --healthy 0 --overhead
    """
    started, rows = utc_now(), list[HangRow | OverheadRow]()
    with tempfile.TemporaryDirectory() as folder:
        for row in _run_all(
            Path(folder), options.seed, layouts.split(","), faults.split(","), tries, healthy, overhead
        ):
            click.echo(json.dumps(row.to_row()), err=True)
            rows.append(row)
    if options.json_file:
        record = RunRecord(
            name="bench.hang_blame",
            source="measured",
            rows=[row.to_row() for row in rows],
            started_utc=started,
            ended_utc=utc_now(),
            arguments={**options.arguments(), "layouts": layouts, "faults": faults, "tries": tries, "healthy": healthy},
            environment=environ.snapshot(options.seed),
        )
        write_text(options.json_file, record.to_json())
    if str(options.json_file) != "-":
        click.echo(table(rows))
    wrong = [row for row in rows if isinstance(row, HangRow) and not row.right]
    if wrong:
        raise CheckFailed(f"{len(wrong)} of {len(rows)} runs judged wrong: {wrong[0].to_row()}")


def _run_all(
    folder: Path, seed: int, layouts: Sequence[str], faults: Sequence[str], tries: int, healthy: int, overhead: bool
) -> Iterator[HangRow | OverheadRow]:
    for layout in layouts:
        corpus = prepare(job_of(layout), _ranks(layout), 0, folder) if tries else None
        for kind in faults:
            for attempt in range(tries):
                assert corpus is not None
                yield measure(layout, kind, random.Random(f"{seed} {layout} {kind} {attempt}"), corpus, folder)
    for number in range(healthy):
        yield measure_healthy(layouts[number % len(layouts)], random.Random(f"{seed} {number}"), folder)
    if overhead:
        yield measure_overhead(folder)


def job_of(layout: str, **sections: dict[str, object]) -> JobConfig:
    """Return a small job with steps of about a second on 2 cores, so that three steps exceed the watch's floor."""
    tree: dict[str, Any] = {
        "model": _MODEL,
        "parallel": {**LAYOUTS[layout], "distributed_timeout_s": 60.0},
        "batch": {"global_batch_size": 8 if "tp" in LAYOUTS[layout] else 32, "micro_batch_size": 2},
        "optimizer": {"steps": 4000},
        "evaluation": {"every_steps": 4000, "global_batches": 1},
        "data": {"max_mib": 0.5},
        "launch": {"grace_s": 0.3},
        **sections,
    }
    return build_config({"cluster": {"gpus_per_server": _ranks(layout)}, "job": tree}).job


def measure(layout: str, kind: str, rng: random.Random, corpus: Corpus, folder: Path) -> HangRow:
    """Run one job with one fault and return its row."""
    fault = Fault(kind, rng.randrange(_ranks(layout)), rng.choice(_STEPS_BEFORE), rng.random())
    out = Path(tempfile.mkdtemp(dir=folder))
    with _launcher_times() as ends:
        named, message = _train(job_of(layout), layout, corpus, out, fault)
    facts = json.loads((out / _FAULT_FILE).read_text())
    after_s = (ends[0] if ends else time.time()) - facts["at_s"]
    return HangRow(
        layout,
        kind,
        fault.rank,
        step=fault.step,
        named=named,
        right=named == [fault.rank] and not _is_alive(facts["pid"]),
        step_s=round(facts["step_s"], 3),
        after_s=round(after_s, 3),
        after_steps=round(after_s / facts["step_s"], 2),
        message=message.replace(str(folder), "..."),
    )


def measure_healthy(layout: str, rng: random.Random, folder: Path) -> HangRow:
    """Run a healthy job with an evaluation and a checkpoint longer than the floor, and a rank paused for a step."""
    steps = 14
    fault = Fault("pause", rng.randrange(_ranks(layout)), rng.randrange(8, 11), rng.random())
    more: dict[str, dict[str, object]] = {
        "optimizer": {"steps": steps},
        "evaluation": {"every_steps": 6, "global_batches": 1},
        "checkpoint": {"every_steps": 12},
        "watch": {"floor_s": _SLEEP_S / 3},
    }
    job, out = job_of(layout, **more), Path(tempfile.mkdtemp(dir=folder))
    corpus = prepare(job, _ranks(layout), 0, folder)
    named, message = _train(job, layout, corpus, out, fault)
    rows = (out / "metrics.jsonl").read_text().splitlines()
    facts = json.loads((out / _FAULT_FILE).read_text())
    return HangRow(
        layout,
        "none",
        fault.rank,
        named=named,
        right=not message and len(rows) == steps,
        step_s=round(facts["step_s"], 3),
        message=message.replace(str(folder), "..."),
    )


def measure_overhead(folder: Path) -> OverheadRow:
    """Compare step times of two trainers on the same 4 ranks, with and without a watch, in alternating segments."""
    job = job_of("tp2 dp2")
    corpus, out = prepare(job, 4, 0, folder), Path(tempfile.mkdtemp(dir=folder))
    with meeting_place() as place:
        plan = Plan(job, corpus, place.init_method("overhead"), "gloo", out, 0)
        wall_ratios, processor_ratios = launch(run_in_turn, 4, args=(plan, 16, 8), log_dir=out / "logs")[0]
    return OverheadRow(
        "tp2 dp2",
        round(statistics.median(wall_ratios), 4),
        [round(ratio, 4) for ratio in wall_ratios],
        round(statistics.median(processor_ratios), 4),
        [round(ratio, 4) for ratio in processor_ratios],
    )


def table(rows: Sequence[HangRow | OverheadRow]) -> str:
    """Format counts and delays by layout and fault as a Markdown table."""
    lines = [
        "| layout | fault | runs | right rank named | step, s | fault to message, s (worst) | in steps (worst) |",
        "|---|---|---|---|---|---|---|",
    ]
    runs = [row for row in rows if isinstance(row, HangRow)]
    for layout, fault in dict.fromkeys((row.layout, row.fault) for row in runs if row.fault in FAULTS):
        part = [row for row in runs if (row.layout, row.fault) == (layout, fault)]
        right, step_s = sum(row.right for row in part), statistics.median(row.step_s for row in part)
        after_s = [row.after_s for row in part if row.after_s is not None]
        after_steps = [row.after_steps for row in part if row.after_steps is not None]
        after = [
            f"{statistics.median(values):.{digits}f} ({max(values):.{digits}f})"
            for values, digits in ((after_s, 2), (after_steps, 1))
        ]
        lines.append(f"| {layout} | {fault} | {len(part)} | {right} | {step_s:.2f} | {' | '.join(after)} |")
    healthy = [row for row in runs if row.fault == "none"]
    if healthy:
        lines.append(f"| all in turn | none | {len(healthy)} | {sum(row.right for row in healthy)} (nobody) | | | |")
    for row in rows:
        if isinstance(row, OverheadRow):
            ratios = f"{row.ratio:.3f} of the time, {row.processor_ratio:.3f} of the processor time"
            lines.append(f"\nA step with the watch takes {ratios} of one without (medians of {len(row.ratios)} pairs).")
    return "\n".join(lines)


def _train(job: JobConfig, layout: str, corpus: Corpus, out: Path, fault: Fault) -> tuple[list[int], str]:
    """Train and return the ranks that the error names, and its message; empty if the run succeeded."""
    with meeting_place() as place:
        plan = Plan(job, corpus, place.init_method("hang"), "gloo", out, 0, stops_gently=True)
        try:
            launch(
                run_faulty,
                _ranks(layout),
                args=(plan, fault),
                log_dir=out / "logs",
                env={"OMP_NUM_THREADS": "1"},
                grace_s=job.launch.grace_s,
                asks_first=True,
            )
        except CollectiveFailed as exc:
            return list(exc.culprits), str(exc)
        except RankFailed as exc:
            return [exc.rank], str(exc)
        except NetlayerError as exc:
            return [], str(exc)
    return [], ""


@contextlib.contextmanager
def _launcher_times() -> Iterator[list[float]]:
    """Collect the times at which the launcher logs that it ends all ranks."""
    times, logger = list[float](), logging.getLogger("netlayer.launch.launcher")
    handler = logging.Handler(logging.WARNING)
    handler.emit = (  # type: ignore[method-assign]
        lambda record: times.append(record.created) if "all ranks are ended" in record.getMessage() else None
    )
    logger.addHandler(handler)
    try:
        yield times
    finally:
        logger.removeHandler(handler)


def _ranks(layout: str) -> int:
    degrees = LAYOUTS[layout]
    return degrees.get("tp", 1) * degrees.get("pp", 1) * degrees["dp"]


def _is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


# In the ranks.


def run_faulty(context: RankContext, plan: Plan, fault: Fault) -> None:
    """Run a rank like `netlayer train`, with the fault injected; for a `pause`, also with long phases."""
    from trainer.checkpoint.save import Saver
    from trainer.loop import Launched, Trainer
    from trainer.worker import run_rank

    begins, do_launch = list[float](), Trainer.launch

    def launch_step(trainer: Trainer, step: int) -> Launched:
        begins.append(time.monotonic())
        if (step, context.env.rank) == (fault.step, fault.rank):
            steps = [later - earlier for earlier, later in itertools.pairwise(begins)][1:]
            _inject(fault, statistics.median(steps), plan.out)
        return do_launch(trainer, step)

    Trainer.launch = launch_step  # type: ignore[assignment, method-assign]
    if fault.kind == "pause":
        late = context.env.rank == (fault.rank + 1) % context.env.world_size
        Trainer._evaluate = _delayed(Trainer._evaluate, late)  # type: ignore[method-assign]
        # Whether it writes beside the training or not, all ranks wait for a slow begin.
        Saver.begin = _delayed(Saver.begin, context.env.rank == 0)  # type: ignore[method-assign]
    run_rank(context, plan)


def _delayed(function: Callable[..., Any], late: bool) -> Callable[..., Any]:
    """Return a function that does what `function` does, after a pause of `_SLEEP_S` if `late`."""

    def slow(*args: Any, **options: Any) -> Any:
        if late:
            time.sleep(_SLEEP_S)
        return function(*args, **options)

    return slow


def _inject(fault: Fault, step_s: float, out: Path) -> None:
    """Inject the fault within the step that begins now."""
    pid, main = os.getpid(), threading.get_ident()
    (out / _FAULT_FILE).write_text("{}")  # creates the file now, so that the delay excludes disk time

    def strike() -> None:
        time.sleep(fault.at * step_s)
        facts = {"at_s": time.time(), "step_s": step_s, "pid": pid}
        (out / _FAULT_FILE).write_text(json.dumps(facts))
        if fault.kind == "exception":
            ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(main), ctypes.py_object(ArithmeticError))
        elif fault.kind == "pause":
            subprocess.run(["sh", "-c", f"(kill -STOP {pid}; sleep {step_s:.3f}; kill -CONT {pid})"], check=True)
        else:
            os.kill(pid, signal.SIGSTOP if fault.kind == "stop" else signal.SIGKILL)

    threading.Thread(target=strike, daemon=True).start()


def run_in_turn(context: RankContext, plan: Plan, segments: int, steps: int) -> tuple[list[float], list[float]]:
    """Return ratios (with a watch / without) of step times and of CPU times, one for each pair of segments."""
    from collectives.watch.hang import HangLimits
    from collectives.watch.watchdog import Watch
    from trainer.loop import Trainer
    from trainer.worker import meet

    place, groups = meet(context, plan)
    job = plan.job
    watch = Watch(
        timeout=timedelta(seconds=job.parallel.distributed_timeout_s), layout=job.parallel.layout, hang=HangLimits()
    )
    trainers = [Trainer(job, plan.corpus, 0, place, groups, watch=each) for each in (None, watch)]
    wall_s, processor_s = ([list[float](), list[float]()] for _ in range(2))
    for segment in range(2 * segments):
        which = (segment + segment // 2) % 2  # 0 1 1 0: a drift of the machine affects both equally
        step_times, begin_s = list[float](), time.process_time()
        for _ in range(steps):
            step_s = time.perf_counter()
            trainers[which].step(trainers[which].steps_done + 1)
            step_times.append(time.perf_counter() - step_s)
        wall_s[which].append(statistics.median(step_times))
        processor_s[which].append(time.process_time() - begin_s)
    watch.close()
    wall_ratios, processor_ratios = (
        [watched / plain for plain, watched in zip(*times, strict=True)][1:]  # the first pair warms up
        for times in (wall_s, processor_s)
    )
    return wall_ratios, processor_ratios


if __name__ == "__main__":
    from netlayer.cli import run

    run(command, "python -m bench.hang_blame")
