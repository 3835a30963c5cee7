"""`python -m bench.loss_equivalence`: the losses of N data-parallel ranks and of one rank, step by step.

The same job, seed and global batch; only the number of ranks differs. What differs in the losses is the rounding of
sums in another order.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from netlayer import environ
from netlayer.command import RunOptions, open_out, run_options
from netlayer.config.tree import JobConfig
from netlayer.errors import CheckFailed
from netlayer.results import RunRecord, utc_now, write_text
from netlayer.store.meeting import MeetingPlace, meeting_place
from trainer.plan import Backend, resolve
from trainer.train import TrainResult, train

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StepLosses:
    """Losses of one step on one rank and on several, and their absolute difference."""

    step: int
    loss_one_rank: float
    loss_ranks: float
    difference: float


@click.command()
@run_options
@click.option("--ranks", type=click.IntRange(min=2), default=2, show_default=True, help="Ranks to compare with one.")
@click.option("--steps", type=click.IntRange(min=1), default=20, show_default=True, help="Steps to compare.")
@click.option("--tolerance", type=float, default=1e-4, show_default=True, help="Largest difference that passes.")
def command(options: RunOptions, ranks: int, steps: int, tolerance: float) -> None:
    """Compare the losses of several ranks with those of one; exit 1 if they differ by more than the tolerance."""
    out, started = open_out(options.out, "loss_equivalence"), utc_now()
    sizes = [f"cluster.gpus_per_server={ranks}", f"job.parallel.dp={ranks}", f"job.optimizer.steps={steps}"]
    config = RunOptions(options.config_path, (*sizes, *options.overrides), options.seed, None, None).load_config()
    backend = environ.choose_backend(config.job.launch.backend, ranks)
    with meeting_place(config.job.store.url) as place:
        several, alone = (_train(config.job, count, backend, options.seed, out, place) for count in (ranks, 1))
    rows = compare(alone.steps, several.steps)
    record = RunRecord(
        name="bench.loss_equivalence",
        source="measured",
        rows=[asdict(row) for row in rows],
        started_utc=started,
        ended_utc=utc_now(),
        arguments={**options.arguments(), "ranks": ranks, "steps": steps, "tolerance": tolerance, "backend": backend},
        config=config.model_dump(mode="json"),
        environment=environ.snapshot(options.seed),
        devices=several.devices,
    )
    saved = record.save(out / "records")
    if options.json_file:
        write_text(options.json_file, record.to_json())
    largest = max(row.difference for row in rows)
    click.echo(f"{ranks} ranks against one on {backend}: losses differ by at most {largest:.3g} in {steps} steps")
    click.echo(f"record: {saved}")
    if largest > tolerance:
        raise CheckFailed(f"the losses differ by {largest:.3g}, above the tolerance of {tolerance:g}")


def compare(alone: Sequence[Mapping[str, Any]], several: Sequence[Mapping[str, Any]]) -> list[StepLosses]:
    """Return the losses of both runs, step by step.

    Raises:
        ValueError: the runs have different steps.
    """
    return [
        StepLosses(one["step"], one["loss"], many["loss"], abs(one["loss"] - many["loss"]))
        for one, many in zip(alone, several, strict=True)
    ]


def _train(job: JobConfig, ranks: int, backend: Backend, seed: int, out: Path, place: MeetingPlace) -> TrainResult:
    logger.info("training with %d ranks", ranks)
    job = job.model_copy(update={"parallel": job.parallel.model_copy(update={"dp": ranks})})
    folder = out / f"ranks{ranks}"
    folder.mkdir(parents=True, exist_ok=True)
    url = place.init_method(f"ranks{ranks}")
    return train(resolve(job, ranks=ranks, init_method=url, backend=backend, out=folder, seed=seed))


if __name__ == "__main__":
    from netlayer.cli import run

    run(command, "python -m bench.loss_equivalence")
