"""The arithmetic of `bench.convergence`: curves of runs, and when each reached the baseline's final loss.

Tokens are the common measure: every run is evaluated on the same held-out windows at the same numbers of tokens. Time
is that of the training steps alone, without evaluations; a run's first step, which compiles and warms up, counts as the
median of the others, as does the first one after each checkpoint from which it was resumed; the first step's real time
is in the record. A run that did not reach its end is not compared. Not covered: the spread over seeds.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from netlayer.config.tree import JobConfig
from netlayer.errors import ConfigError
from netlayer.results import write_text
from netlayer.workload.flops import step_flops, utilisation
from netlayer.workload.peaks import peak_flops

Row = dict[str, Any]
RunKey = tuple[str, float]
"""Kind and peak learning rate: which run it is, also beside those of other calls."""
RUN, EVALUATION, TRAINING, BROKEN_OFF = "run", "evaluation", "training", "interrupted"
"""Tables of a record's rows."""
STANDARD = "standard"
FACTS_FILE = "run.json"
METRICS_FILE, VALIDATION_FILE = "metrics.jsonl", "validation.jsonl"
"""The trainer's rows; those of the calls before stand in files of the same names with `BEFORE` ahead."""
BEFORE = "before-"
_NO_END = "no end was written: killed, or still under way"
_TRAINING_POINTS = 200
_ALONG: tuple[Literal["tokens", "seconds"], ...] = ("tokens", "seconds")


@dataclass(frozen=True)
class Point:
    """One evaluation of a run.

    Args:
        step: after which it was; 0: before any.
        tokens: that were trained on until then.
        epochs: passes over the training text until then.
        seconds: of training steps until then.
        held_out_loss: nats a token.
    """

    step: int
    tokens: int
    epochs: float
    seconds: float
    held_out_loss: float


@dataclass(frozen=True)
class TrainingPoint:
    """Mean over a stretch of steps, placed at its middle.

    Args:
        tokens: until the middle of the stretch.
        seconds: of training steps, likewise.
        loss: nats a token, mean over the stretch.
    """

    tokens: float
    seconds: float
    loss: float


@dataclass(frozen=True)
class BaselineComparison:
    """A run beside the baseline; None where either is missing or did not reach its end, or a loss was not reached.

    Args:
        baseline: its name.
        baseline_loss: held-out loss that it ended with, nats a token.
        baseline_tokens, baseline_seconds: that it took in all.
        tokens_to_baseline_loss, seconds_to_baseline_loss: at which the run reached that loss.
        tokens_over_baseline, seconds_over_baseline: the same over the baseline's own.
        baseline_tokens_to_this_loss, baseline_seconds_to_this_loss: at which the baseline reached the run's last loss.
    """

    baseline: str | None = None
    baseline_loss: float | None = None
    baseline_tokens: int | None = None
    baseline_seconds: float | None = None
    tokens_to_baseline_loss: float | None = None
    seconds_to_baseline_loss: float | None = None
    tokens_over_baseline: float | None = None
    seconds_over_baseline: float | None = None
    baseline_tokens_to_this_loss: float | None = None
    baseline_seconds_to_this_loss: float | None = None


@dataclass(frozen=True)
class Curve:
    """The recorded rows of one run, complete or not.

    Args:
        facts: the run's options, as `bench.convergence.run` writes them before the run begins.
        job: resolved configuration.
        steps: the trainer's rows, one per step.
        evaluations: the trainer's rows of held-out losses, the first before any step.
        folder: where it was read from.
    """

    facts: Mapping[str, Any]
    job: JobConfig
    steps: Sequence[Mapping[str, Any]]
    evaluations: Sequence[Mapping[str, Any]]
    folder: Path | None = None

    @property
    def name(self) -> str:
        return str(self.facts["run"])

    @property
    def key(self) -> RunKey:
        return self.facts["kind"], self.job.optimizer.lr

    @property
    def tokens_per_step(self) -> int:
        return self.job.batch.global_batch_size * self.job.model.seq_len

    @property
    def is_whole(self) -> bool:
        """Return True if the run reached its last evaluation."""
        return bool(self.evaluations) and self.evaluations[-1]["step"] == self.job.optimizer.steps

    @property
    def is_done(self) -> bool:
        """Return True if there is nothing left to train: the run is whole, or diverged."""
        return self.is_whole or self.diverged

    @property
    def diverged(self) -> bool:
        """Return True if a loss or a gradient was NaN or infinite."""
        return bool(self.facts.get("stopped"))

    @property
    def why_not_whole(self) -> str:
        """Return why the run did not reach its end; empty if it did."""
        return "" if self.is_whole else self.facts.get("stopped") or self.facts.get("interrupted") or _NO_END

    @property
    def resumed_at(self) -> list[int]:
        """List the steps of the checkpoints from which later calls resumed the run."""
        return list(self.facts.get("resumed_at", ()))

    @property
    def last_loss(self) -> float | None:
        return self.evaluations[-1]["validation_loss"] if self.evaluations else None

    def seconds(self) -> list[float]:
        """Return the cumulative training time in seconds after each step, with 0 before the first.

        The first step of each call counts as the median of the other steps.
        """
        each = [row["step_ms"] / 1e3 for row in self.steps]
        firsts = {0, *self.resumed_at}
        others = [step_s for index, step_s in enumerate(each) if index not in firsts]
        for index in firsts:
            if others and index < len(each):
                each[index] = statistics.median(others)
        total = [0.0]
        for step in each:
            total.append(total[-1] + step)
        return total

    def points(self) -> list[Point]:
        """Return the evaluations in order."""
        seconds, epoch = self.seconds(), self.facts["corpus"]["train_tokens"]
        points = []
        for row in self.evaluations:
            tokens = row["step"] * self.tokens_per_step
            at = seconds[min(row["step"], len(seconds) - 1)]
            points.append(Point(row["step"], tokens, tokens / epoch, at, row["validation_loss"]))
        return points


@dataclass(frozen=True)
class Before:
    """Interrupted run of an earlier call, and its checkpoint after `step`, from which it resumes."""

    curve: Curve
    checkpoint: Path
    step: int

    def write_rows(self, folder: Path) -> None:
        """Write the rows up to the checkpoint into the folder of the resumed run, which evaluates at `step` itself."""
        steps = [row for row in self.curve.steps if row["step"] <= self.step]
        evaluations = [row for row in self.curve.evaluations if row["step"] < self.step]
        for name, rows in ((METRICS_FILE, steps), (VALIDATION_FILE, evaluations)):
            write_text(folder / f"{BEFORE}{name}", "".join(f"{json.dumps(row)}\n" for row in rows))


def read_curve(folder: Path) -> Curve:
    """Read a run's folder, including the rows of earlier calls; an incomplete last line is ignored.

    Raises:
        ConfigError: the folder holds no run of this bench.
    """
    try:
        facts = json.loads((folder / FACTS_FILE).read_text(encoding="utf-8"))
        job = JobConfig.model_validate(facts["job"])
        steps, evaluations = (
            _rows(folder / f"{BEFORE}{name}") + _rows(folder / name) for name in (METRICS_FILE, VALIDATION_FILE)
        )
        return Curve(facts, job, steps, evaluations, folder)
    except (OSError, ValueError, LookupError, TypeError) as exc:
        rule = f"holds no run of this bench ({exc})"
        raise ConfigError("--join", folder, rule, "give the output folder of an earlier call") from exc


def named_apart(curves: Sequence[Curve]) -> list[Curve]:
    """Add the learning rate to the names of runs whose kind occurs several times."""
    kinds = [curve.facts["kind"] for curve in curves]
    return [
        replace(curve, facts={**curve.facts, "run": run_name(*curve.key, of_several=True)})
        if kinds.count(curve.facts["kind"]) > 1
        else curve
        for curve in curves
    ]


def run_name(kind: str, lr: float, *, of_several: bool) -> str:
    return f"{kind} lr {lr}" if of_several else kind


def rows_of(curves: Sequence[Curve]) -> list[Row]:
    """Make the record's rows: a summary of each run, then the evaluations, then the smoothed training losses."""
    baseline = baseline_of(curves)
    rows = [summary(curve, baseline) for curve in curves]
    for curve in curves:
        rows += [{"table": EVALUATION, "run": curve.name, **asdict(point)} for point in curve.points()]
    for curve in curves:
        rows += [{"table": TRAINING, "run": curve.name, **asdict(point)} for point in smoothed(curve)]
    return rows


def baseline_of(curves: Sequence[Curve]) -> Curve | None:
    """Return the whole standard run with the lowest last loss; there may be several, one per learning rate."""
    whole = [curve for curve in curves if curve.facts["kind"] == STANDARD and curve.is_whole]
    return min(whole, key=lambda curve: curve.last_loss or 0.0, default=None)


def summary(curve: Curve, baseline: Curve | None) -> Row:
    """Summarise one run in one row; comparisons with the baseline are None unless both runs are whole."""
    model, batch, optimizer = curve.job.model, curve.job.batch, curve.job.optimizer
    steps, seconds, ranks = len(curve.steps), curve.seconds()[-1], curve.facts["ranks"]
    tokens, flops = steps * curve.tokens_per_step, step_flops(model, batch.global_batch_size)
    peak = peak_flops(curve.facts["device"], model.dtype)
    rates = {
        f"mfu_{name}": utilisation(getattr(flops, name) * steps, seconds, peak, ranks) if seconds else None
        for name in ("full", "causal", "done")
    }
    return {
        "table": RUN,
        "run": curve.name,
        "kind": curve.facts["kind"],
        "optimizer": optimizer.name,
        "lr": optimizer.lr,
        "parallel_block": model.parallel_block,
        "attention_window": model.attention_window,
        "window_pattern": model.window_pattern,
        "tokens": tokens,
        "tokens_asked": optimizer.steps * curve.tokens_per_step,
        "epochs": tokens / curve.facts["corpus"]["train_tokens"],
        "steps": steps,
        "batch_sequences": batch.global_batch_size,
        "batch_tokens": curve.tokens_per_step,
        "held_out_loss": curve.last_loss,
        "is_whole": curve.is_whole,
        "diverged": curve.diverged,
        "stopped": curve.why_not_whole,
        "resumed_at": curve.resumed_at,
        "minutes": seconds / 60,
        "first_step_s": curve.steps[0]["step_ms"] / 1e3 if curve.steps else None,
        "wall_minutes": curve.facts.get("wall_minutes"),
        "tokens_per_s": tokens / seconds if seconds else None,
        **rates,
        "memory_gib": max((row["memory_gib"] for row in curve.steps), default=None),
        **asdict(_compared(curve, baseline)),
    }


def first_reached(points: Sequence[Point], along: Literal["tokens", "seconds"], loss: float) -> float | None:
    """Return the tokens or seconds (`along`) at which the held-out loss first was `loss` or less.

    Interpolates linearly between two evaluations; None if no evaluation is that low.
    """
    before: Point | None = None
    for point in points:
        if point.held_out_loss <= loss:
            at = float(getattr(point, along))
            if before is None:
                return at
            share = (before.held_out_loss - loss) / (before.held_out_loss - point.held_out_loss)
            begin = float(getattr(before, along))
            return begin + share * (at - begin)
        before = point
    return None


def smoothed(curve: Curve, max_points: int = _TRAINING_POINTS) -> list[TrainingPoint]:
    """Average the training loss over at most `max_points` equal stretches of steps, each placed at its middle."""
    seconds, width = curve.seconds(), math.ceil(len(curve.steps) / max_points)
    means = []
    for first in range(0, len(curve.steps), max(1, width)):
        stretch = curve.steps[first : first + width]
        middle = first + len(stretch) / 2
        middle_s = (seconds[first] + seconds[first + len(stretch)]) / 2
        loss = sum(row["loss"] for row in stretch) / len(stretch)
        means.append(TrainingPoint(middle * curve.tokens_per_step, middle_s, loss))
    return means


def table(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Format the summary as lines: the cost and result of each run, then each compared with the baseline."""
    runs = [row for row in rows if row["table"] == RUN]
    width = max([len(row["run"]) for row in runs] + [len(RUN)])
    heads = f"{'tokens':>13} {'epochs':>7} {'steps':>7} {'batch':>6} {'held-out':>9} {'minutes':>8} {'tokens/s':>10}"
    yield f"{RUN:>{width}} {heads} {'MFU full':>9} {'causal':>7}"
    for row in runs:
        rate = "-" if row["tokens_per_s"] is None else f"{row['tokens_per_s']:,.0f}"
        loss = "-" if row["held_out_loss"] is None else f"{row['held_out_loss']:.4f}"
        full, causal = ("-" if row[name] is None else f"{row[name]:.3f}" for name in ("mfu_full", "mfu_causal"))
        yield (
            f"{row['run']:>{width}} {row['tokens']:13,} {row['epochs']:7.2f} {row['steps']:7,} "
            f"{row['batch_sequences']:6,} {loss:>9} {row['minutes']:8.2f} {rate:>10} {full:>9} {causal:>7}"
        )
    yield from (line for row in runs if (line := comparison(row)))
    missing = [name for row in rows if row["table"] == BROKEN_OFF for name in row["not_run"]]
    if missing:
        yield f"not run: {', '.join(missing)}"


def comparison(row: Mapping[str, Any]) -> str:
    """Describe how a run compares with the baseline; empty for the baseline itself, or if there is none."""
    target, name = row["baseline_loss"], row["baseline"]
    if not row["is_whole"]:
        how_far = f"{row['tokens']:,} of {row['tokens_asked']:,} tokens"
        return f"{row['run']}, interrupted after {how_far}, so compared with nothing: {row['stopped']}"
    if name is None or name == row["run"]:
        return ""
    text = f"{row['run']}, to the {target:.4f} that {name} ended with: "
    if row["tokens_to_baseline_loss"] is None:
        text += "not reached"
        if row["baseline_tokens_to_this_loss"] is not None:
            of_tokens = row["baseline_tokens_to_this_loss"] / row["baseline_tokens"]
            of_time = row["baseline_seconds_to_this_loss"] / row["baseline_seconds"]
            text += f"; {name} had its {row['held_out_loss']:.4f} after {of_tokens:.1%} of its tokens and {of_time:.1%}"
            text += " of its time"
        return text
    return text + (
        f"{row['tokens_to_baseline_loss']:,.0f} tokens ({row['tokens_over_baseline']:.1%} of {name}'s), "
        f"{row['seconds_to_baseline_loss'] / 60:.2f} minutes ({row['seconds_over_baseline']:.1%})"
    )


def _compared(curve: Curve, baseline: Curve | None) -> BaselineComparison:
    """Compare a run with the baseline: tokens and seconds until either reaches the other's last held-out loss."""
    if baseline is None or not curve.is_whole:
        return BaselineComparison()
    points, baseline_points = curve.points(), baseline.points()
    loss, last = points[-1].held_out_loss, baseline_points[-1]
    tokens, seconds = (first_reached(points, along, last.held_out_loss) for along in _ALONG)
    baseline_tokens, baseline_seconds = (first_reached(baseline_points, along, loss) for along in _ALONG)
    return BaselineComparison(
        baseline.name,
        last.held_out_loss,
        last.tokens,
        last.seconds,
        tokens_to_baseline_loss=tokens,
        seconds_to_baseline_loss=seconds,
        tokens_over_baseline=None if tokens is None else tokens / last.tokens,
        seconds_over_baseline=None if seconds is None else seconds / last.seconds,
        baseline_tokens_to_this_loss=baseline_tokens,
        baseline_seconds_to_this_loss=baseline_seconds,
    )


def _rows(file: Path) -> list[Row]:
    """Read one JSON object per line; [] if the file is not there yet."""
    if not file.exists():
        return []
    rows = []
    for line in file.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n"):
            rows.append(json.loads(line))
    return rows
