"""`python -m bench.stragglers.planted`: slow ranks planted in a real training run, and whether they are named.

Ranks train like those of `netlayer train`, with the monitor on. The run is a sequence of episodes: 15 steps without a
fault, then 20 in which one random rank takes longer by a share of the step time: it sleeps before the forward pass
(`host`) or inside it (`forward`), or computes products there that nobody needs, on its device (`compute`); healthy
episodes have no fault. Each is judged by itself as its events came in, step by step:
it is *right* if the first rank that is named is the slow one, within 20 steps, and no other is named at any moment of
it; in a healthy episode nobody may be named. Delays count from the fault to the end of the step with which the rank is
named; the monitor hands its events over once a second, which comes on top, as does the judging (a column).

On GPUs plant `compute`: a sleep of the host is hidden there unless the queue runs dry.
"""

from __future__ import annotations

import itertools
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click
import numpy as np

from netlayer import environ
from netlayer.command import RunOptions, run_options_without_config
from netlayer.config.tree import JobConfig, build_config
from netlayer.errors import CheckFailed, ConfigError
from netlayer.launch.launcher import launch
from netlayer.launch.rank import RankContext
from netlayer.nccl.environment import exports, for_ranks
from netlayer.observe.readers import open_evidence
from netlayer.observe.verdicts.judge import find_stragglers, straggler_rows
from netlayer.observe.verdicts.run import Run, collect
from netlayer.observe.verdicts.straggler import MIN_STEPS
from netlayer.results import RunRecord, utc_now, write_text
from netlayer.store.meeting import meeting_place
from trainer.plan import Plan, prepare

if TYPE_CHECKING:
    import torch

KINDS = ("host", "forward", "compute")
WITHIN_STEPS = 20
_QUIET_STEPS = 15
_EPISODE = _QUIET_STEPS + WITHIN_STEPS
_WARM_UP_STEPS = 10
_CALIBRATION = 200  # products
_CALIBRATED_STEP = 5  # of the warm-up: clocks of GPUs are those of work
_SMALL_MODEL = {"layers": 2, "hidden": 64, "heads": 4, "ffn_hidden": 128, "vocab_size": 512, "seq_len": 64}


@dataclass(frozen=True)
class Fault:
    """Delay of `rank`: a `share` of the median step before, in 20 steps from `step` on; of kind `none`: no delay."""

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
@click.option("--backend", type=click.Choice(["gloo", "nccl"]), default="gloo", show_default=True)
@click.option("--model", default="", metavar="PRESET", help="Shape, such as 7b (job.model.preset) [default: tiny].")
@click.option("--layers", type=click.IntRange(1), help="Fewer layers than the preset has.")
@click.option("--micro", type=click.IntRange(1), default=1, show_default=True, help="Sequences of a step and rank.")
@click.option("--faults", type=click.IntRange(0), default=20, show_default=True, help="Episodes with a slow rank.")
@click.option("--healthy", type=click.IntRange(0), default=5, show_default=True, help="Episodes without one.")
@click.option(
    "--kinds", default="host,forward", show_default=True, metavar="A,B", help=f"Of {', '.join(KINDS)}, in turn."
)
@click.option(
    "--share",
    "shares",
    type=click.FloatRange(0, 10),
    multiple=True,
    default=(0.5,),
    show_default=True,
    help="Delay, of a step time; several: that many episodes of each.",
)
@run_options_without_config
def command(
    options: RunOptions,
    ranks: int,
    backend: Literal["gloo", "nccl"],
    model: str,
    layers: int | None,
    micro: int,
    faults: int,
    healthy: int,
    kinds: str,
    shares: tuple[float, ...],
) -> None:
    """Plant slow ranks in a run, and count how often exactly the slow one is named within 20 steps.

    Exit 0: in every episode, and nobody in healthy ones; 1: otherwise.

    \b
    Examples:
      python -m bench.stragglers.planted --json stragglers.json
      python -m bench.stragglers.planted --faults 2 --healthy 1
      python -m bench.stragglers.planted --ranks 4 --backend nccl --model 7b --layers 4 --kinds compute \\
          --share 0.1 --share 0.05
    """
    started, names = utc_now(), kinds.split(",")
    if unknown := sorted(set(names) - set(KINDS)):
        raise ConfigError("--kinds", ",".join(unknown), f"must be of {', '.join(KINDS)}", "correct it")
    shape = shape_of(model, layers)
    job = job_of(ranks, 1, model=shape, micro=micro)  # so that a wrong shape ends here
    environ.choose_backend(backend, ranks)
    planted = episodes(random.Random(options.seed), ranks, faults, healthy, shares, names)
    with tempfile.TemporaryDirectory() as folder:
        rows = measure(planted, ranks, Path(folder), backend=backend, model=shape, micro=micro)
    if options.json_file:
        record = RunRecord(
            name="bench.stragglers.planted",
            source="measured",
            rows=[asdict(row) for row in rows],
            started_utc=started,
            ended_utc=utc_now(),
            arguments={
                **options.arguments(),
                "ranks": ranks,
                "backend": backend,
                "micro": micro,
                "faults": faults,
                "healthy": healthy,
                "kinds": names,
                "share": list(shares),
            },
            config=job.model_dump(mode="json"),
            environment=environ.snapshot(options.seed),
            devices=[gpu.name for gpu in environ.list_gpus()] if backend == "nccl" else (),
        )
        write_text(options.json_file, record.to_json())
    if str(options.json_file) != "-":
        for line in summary(rows):
            click.echo(line)
    wrong = [row for row in rows if not row.right]
    if wrong:
        raise CheckFailed(f"{len(wrong)} of {len(rows)} episodes judged wrong: {asdict(wrong[0])}")


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """One line a kind of fault and share."""
    for kind, share in sorted({(row.fault, row.share) for row in rows}):
        of_kind = [row for row in rows if (row.fault, row.share) == (kind, share)]
        line = f"{kind} {share:.0%}: right in {sum(row.right for row in of_kind)} of {len(of_kind)}"
        steps = [row.steps_to_name for row in of_kind if row.steps_to_name is not None]
        if steps:
            seconds = [row.seconds_to_name for row in of_kind if row.seconds_to_name is not None]
            line += (
                f"; named after {statistics.median(steps):.0f} steps (most {max(steps)}), {max(seconds):.1f} s at most"
            )
        yield line


def episodes(
    rng: random.Random, ranks: int, faults: int, healthy: int, shares: Sequence[float], kinds: Sequence[str]
) -> list[Fault]:
    """The faults of a run in random order, `faults` of each share, each with the step in which it begins."""
    planted = [(kinds[number % len(kinds)], share) for share in shares for number in range(faults)]
    planted += [("none", 0.0)] * healthy
    rng.shuffle(planted)
    begins = range(_WARM_UP_STEPS + _QUIET_STEPS + 1, 1 << 30, _EPISODE)
    pairs = zip(planted, begins, strict=False)
    return [Fault(kind, rng.randrange(ranks), step, share) for (kind, share), step in pairs]


def shape_of(preset: str, layers: int | None) -> dict[str, Any] | None:
    """Return the keys of job.model; None: the small model. The text is small, and so is the vocabulary."""
    if not preset:
        if layers is not None:
            raise ConfigError("--layers", layers, "is of a preset", "give --model")
        return None
    return {
        "preset": preset,
        "vocab_size": _SMALL_MODEL["vocab_size"],
        **({} if layers is None else {"layers": layers}),
    }


def job_of(
    ranks: int,
    num_steps: int,
    gc_interval: int | None = None,
    *,
    model: Mapping[str, Any] | None = None,
    micro: int = 1,
) -> JobConfig:
    """Return a data-parallel job of one micro-batch a step.

    Args:
        gc_interval: of its loop; None: the default.
        model: keys of job.model; None: a small one.
        micro: sequences of a micro-batch.
    """
    tree: dict[str, Any] = {
        "model": model or _SMALL_MODEL,
        "loop": {} if gc_interval is None else {"gc_interval": gc_interval},
        "parallel": {"dp": ranks},
        "batch": {"global_batch_size": ranks * micro, "micro_batch_size": micro},
        "optimizer": {"steps": num_steps},
        "evaluation": {"every_steps": 100_000, "global_batches": 1},
        "data": {"max_mib": 0.5},
    }
    return build_config({"cluster": {"gpus_per_server": ranks}, "job": tree}).job


def measure(
    faults: Sequence[Fault],
    ranks: int,
    folder: Path,
    *,
    backend: Literal["gloo", "nccl"] = "gloo",
    model: Mapping[str, Any] | None = None,
    micro: int = 1,
) -> list[Row]:
    """Train once with all faults one after the other, and judge each by itself."""
    job = job_of(ranks, _WARM_UP_STEPS + len(faults) * _EPISODE + 1, model=model, micro=micro)
    out, nccl = folder / "run", for_ranks(backend, job.nccl)
    corpus = prepare(job, ranks, 0, folder)
    out.mkdir()
    with meeting_place() as place:
        plan = Plan(job, corpus, place.init_method("stragglers"), backend, out, 0, stops_gently=True)
        env = {"OMP_NUM_THREADS": "1", **exports(nccl)}
        launch(run_slow, ranks, args=(plan, list(faults)), log_dir=out / "logs", env=env)
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
    """Run a rank like `netlayer train`; it is slow in the steps of its faults."""
    import torch

    from trainer.loop import Launched, Trainer
    from trainer.worker import run_rank

    own = {fault.step: fault for fault in faults if fault.kind != "none" and fault.rank == context.env.rank}
    begins, sleep_s, kind, until = list[float](), 0.0, "none", 0
    spare: _SpareProducts | None = None
    do_launch, embed = Trainer.launch, torch.nn.functional.embedding

    def launch_step(trainer: Trainer, step: int) -> Launched:
        nonlocal sleep_s, kind, until, spare
        if step == _CALIBRATED_STEP and any(fault.kind == "compute" for fault in own.values()):
            spare = _SpareProducts(trainer.model.device)
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
        if kind == "compute" and spare is not None:
            spare.compute(sleep_s)
        return embed(*args, **options)

    Trainer.launch = launch_step  # type: ignore[assignment, method-assign]
    torch.nn.functional.embedding = slow_embedding
    run_rank(context, plan)


class _SpareProducts:
    """Products that nobody needs, on a device that is kept busy by them for a given time.

    Args:
        device: of the rank; their time is measured there, with what is queued on it before.
    """

    def __init__(self, device: torch.device) -> None:
        import torch

        size = 2048 if device.type == "cuda" else 128
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self._factor, self._product = (torch.ones(size, size, dtype=dtype, device=device) for _ in range(2))
        self._wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        self._each_s = 1.0
        self._multiply(_CALIBRATION)
        self._wait()
        begin_s = time.perf_counter()
        self._multiply(_CALIBRATION)
        self._wait()
        self._each_s = (time.perf_counter() - begin_s) / _CALIBRATION

    def compute(self, seconds: float) -> None:
        """Queue products that take so long."""
        self._multiply(max(1, round(seconds / self._each_s)))

    def _multiply(self, count: int) -> None:
        import torch

        with torch.no_grad():
            for _ in range(count):
                torch.mm(self._factor, self._factor, out=self._product)


if __name__ == "__main__":
    from netlayer.cli import run as run_command

    run_command(command, "python -m bench.stragglers.planted")
