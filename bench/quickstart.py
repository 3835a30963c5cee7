"""`netlayer quickstart`: everything once, on this machine, ending in one report.

Ranks meet through Redis, the acceptance bench runs over them, the paper's fabric is built and its ECMP collisions are
counted with and without the ToR split, a small GPT is trained data-parallel on real text, and one page shows it all.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from bench.backends import choose_backend
from bench.driver import load_collective
from bench.measure import measure
from bench.options import PerfOptions
from bench.quickstart_outcome import Outcome, fabric_summary, summary
from bench.table import format_table, num_failed
from netlayer import environ
from netlayer.command import RunOptions, open_out, run_options
from netlayer.config import Config, example, load_config
from netlayer.errors import CheckFailed, ConfigError
from netlayer.meeting import MeetingPlace, meeting_place
from netlayer.progress import Stages
from netlayer.results import RunRecord, utc_now, write_text
from topology.compare import compare_split, split_by_load
from trainer.train import Backend, Progress, prepare, train

logger = logging.getLogger(__name__)

COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "sendrecv")
FABRIC = "megascale-12288"
_SIZES = {
    "gloo": PerfOptions(min_bytes=1 << 10, max_bytes=16 << 20, step_factor=4, iters=10, warmup_iters=2),
    "nccl": PerfOptions(min_bytes=1 << 10, max_bytes=1 << 30, step_factor=4, iters=20, warmup_iters=5),
}
_BENCH_TIMEOUT_S = 120
_SEEDS = 10
_GLOBAL_BATCH = 16


@click.command()
@run_options
@click.option("--steps", type=click.IntRange(min=1), help="Training steps [default: the configuration's].")
def quickstart(options: RunOptions, steps: int | None) -> None:
    """Run everything once on this machine and write one report.

    On CPU with gloo where there is no GPU, on NCCL with all GPUs where there are. Takes a few minutes. The fabric is
    always that of examples/megascale-12288.toml; `netlayer topology` looks at others.

    \b
    Examples:
      netlayer quickstart
      netlayer quickstart --steps 50 --out /tmp/first-look
      netlayer quickstart --set data.folder=$HOME/src --set 'data.pattern=*.c'
    """
    config = _resolve(options, steps)
    backend = environ.choose_backend(config.job.launch.backend, config.cluster.num_gpus)
    out = open_out(options.out, "quickstart")
    started = utc_now()
    with Stages() as stages, meeting_place(config.job.store.url) as place:
        outcome = _run(config, backend, options.seed, out, place, stages)
    records = _records(outcome, options, started)
    for record in records:
        record.save(out / "records")
    from bench.quickstart_page import build_page  # the plots' libraries take a second to load

    page = build_page(outcome, options.seed, out).write(out)
    click.echo(f"report: {page}")
    if options.json_file:
        write_text(options.json_file, records[0].to_json())
    if outcome.wrong_elements:
        raise CheckFailed(f"{outcome.wrong_elements} elements arrived wrong; see the bench table in {page}")


def _resolve(options: RunOptions, steps: int | None) -> Config:
    """The user's configuration, or the default one over all GPUs, else two ranks."""
    overrides = [*options.overrides, *([f"job.optimizer.steps={steps}"] if steps else [])]
    if options.config_path:
        config = load_config(options.config_path, overrides)
    else:
        ranks = len(environ.usable_gpus()) or 2
        micro = max(1, _GLOBAL_BATCH // ranks)
        base = ("cluster.gpus_per_server", ranks), ("job.parallel.dp", ranks)
        batch = ("job.batch.micro_size", micro), ("job.batch.global_size", micro * ranks)
        config = load_config(None, [*(f"{key}={value}" for key, value in (*base, *batch)), *overrides])
    if config.cluster.servers > 1:
        rule = "quickstart starts every rank on this machine"
        raise ConfigError("cluster.servers", config.cluster.servers, rule, "give a configuration with servers = 1")
    return config


def _run(config: Config, backend: Backend, seed: int, out: Path, place: MeetingPlace, stages: Stages) -> Outcome:
    """Every stage in turn; what can be refused is refused by the first of them."""
    findings = environ.doctor()
    for finding in findings:
        stages.say(f"{finding.topic}: {finding.detail}")
    stages.say(f"ranks meet through {place.description}")
    ranks, job = config.cluster.num_gpus, config.job
    with stages.open("text") as bar:
        corpus = prepare(job, ranks, seed, out, lambda _stage, done, total: bar(done, total))
    records = _bench(backend, ranks, out, place, stages)
    fabric = load_config(example(FABRIC))
    with stages.open("fabric") as bar:
        collisions = compare_split(fabric, seeds=range(seed, seed + _SEEDS))
        by_load = split_by_load(fabric.cluster)
        bar(1, 1)
    with stages.open("training") as bar:
        training = train(
            job,
            corpus,
            ranks=ranks,
            init_method=place.init_method("training"),
            backend=backend,
            out=out,
            seed=seed,
            on_progress=lambda progress: bar(progress.done, progress.total, _training_words(progress)),
        )
    return Outcome(config, backend, findings, place.description, records, fabric, collisions, by_load, training)


def _bench(backend: Backend, ranks: int, out: Path, place: MeetingPlace, stages: Stages) -> list[RunRecord]:
    """The four collectives over real ranks; the table goes to stdout as nccl-tests prints it."""
    options, done = replace(_SIZES[backend], timeout_s=_BENCH_TIMEOUT_S), 0
    names = [name for name in COLLECTIVES if load_collective(name).min_ranks <= ranks]
    for name in set(COLLECTIVES) - set(names):
        stages.say(f"bench: {name} is left out, it needs at least {load_collective(name).min_ranks} ranks")
    total = len(names) * 2 * len(options.sizes())
    with stages.open("bench") as bar:

        def count(record: RunRecord, _row: Mapping[str, Any]) -> None:
            nonlocal done
            done += 1
            bar(done, total, record.name.removeprefix("bench."))

        records = measure(
            names,
            options,
            ranks=ranks,
            log_dir=out / "logs" / "bench",
            backend=choose_backend("torch" if backend == "nccl" else "gloo"),
            init_method=place.init_method("bench"),
            on_row=count,
        )
    for record in records:
        record.save(out / "records")  # at once: what was measured outlives a Ctrl-C in training
        stages.print(format_table(record))
        if num_failed(record):
            logger.error("%s: %d rows hold wrong data", record.name, num_failed(record))
    return records


def _records(outcome: Outcome, options: RunOptions, started: str) -> list[RunRecord]:
    """All but the bench's, the run's own summary first; measured and simulated figures never share a record."""
    record = functools.partial(
        RunRecord,
        started_utc=started,
        ended_utc=utc_now(),
        arguments=options.arguments(),
        environment=environ.snapshot(options.seed),
    )
    ours = functools.partial(
        record, source="measured", config=outcome.config.model_dump(mode="json"), devices=outcome.training.devices
    )
    fabric = functools.partial(record, config=outcome.fabric.model_dump(mode="json"))
    simulated, predicted = (
        [row for row in outcome.collisions if row["source"] == source] for source in ("simulated", "predicted")
    )
    return [
        ours(name="quickstart.summary", rows=[summary(outcome)]),
        ours(name="quickstart.training", rows=outcome.training.steps),
        ours(name="quickstart.validation", rows=outcome.training.evaluations),
        fabric(name="quickstart.fabric", source="simulated", rows=[fabric_summary(outcome)]),
        fabric(name="topology.ecmp", source="simulated", rows=simulated),
        fabric(name="topology.ecmp", source="predicted", rows=[*predicted, *outcome.by_load]),
    ]


def _training_words(progress: Progress) -> str:
    row = progress.row
    if "loss" in row:
        return f"loss {row['loss']:.3f}, {row['tokens_per_s']:,.0f} tokens/s"
    return f"validation loss {row['validation_loss']:.3f}" if "validation_loss" in row else progress.stage
