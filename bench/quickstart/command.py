"""`netlayer quickstart`: everything once, on this machine, ending in one report.

Ranks meet through Redis, the acceptance bench runs over them, the paper's fabric is built and its ECMP collisions are
counted with and without the ToR split, a small GPT is trained data-parallel on real text, and one page shows it all.
What can be refused is refused before torch and numba are loaded, and before a folder is made.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from bench.perf.options import PerfOptions
from bench.quickstart.outcome import Outcome, fabric_summary, summary
from netlayer import environ
from netlayer.command import RunOptions, open_run, run_options
from netlayer.config.file import example, load_config
from netlayer.config.tree import Config
from netlayer.errors import CheckFailed, ConfigError, NetlayerError
from netlayer.launch.interrupt import held_interrupt
from netlayer.progress import Stages
from netlayer.results import Row, RunRecord, utc_now, write_text
from netlayer.store.meeting import MeetingPlace, meeting_place
from topology.ecmp.rows import TierCollisions
from trainer.commands.train import words_of
from trainer.data.corpus import find_files
from trainer.plan import Backend, check_memory, check_supported, prepare, resolve
from trainer.train import train

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

    On CPU with gloo where there is no GPU, on NCCL with all GPUs where there are. Takes one to three minutes. The
    fabric is always that of examples/megascale-12288.toml; `netlayer topology` looks at others. Tokenised text is kept
    in ~/.cache/netlayer (or $XDG_CACHE_HOME/netlayer), that of the last few runs.

    \b
    Examples:
      netlayer quickstart
      netlayer quickstart --steps 50 --out /tmp/first-look
      netlayer quickstart --set data.folder=$HOME/src --set 'data.pattern=*.c'
    """
    config = _resolve(options, steps)
    ranks = config.cluster.num_gpus
    backend = environ.choose_backend(config.job.launch.backend, ranks)
    check_supported(config.job, ranks)
    find_files(config.job.data)
    check_memory(config.job, ranks, backend)
    started, arguments = utc_now(), {**options.arguments(), "steps": steps}
    with open_run(options.out, "quickstart") as out, Stages() as stages:
        outcome = Outcome(config, backend, environ.doctor(), load_config(example(FABRIC)))
        try:
            with meeting_place(config.job.store.url) as place:
                _run(outcome, options, out, place, stages)
        except NetlayerError as exc:
            if outcome.bench:  # else there is nothing to show
                _finish(outcome, options, arguments, started, out, stopped=f"{exc}")
            raise
        page, records = _finish(outcome, options, arguments, started, out)
    click.echo(f"report: {page}", err=_takes_stdout(options))
    if options.json_file:
        write_text(options.json_file, records[0].to_json())
    if outcome.wrong_elements:
        raise CheckFailed(f"{outcome.wrong_elements} elements arrived wrong; see the bench table in {page}")


def _finish(
    outcome: Outcome, options: RunOptions, arguments: Mapping[str, Any], started: str, out: Path, stopped: str = ""
) -> tuple[Path, Sequence[RunRecord]]:
    """Save the records of what is there, and write the page."""
    records = _records(outcome, options.seed, arguments, started)
    for record in records:
        record.save(out / "records")
    with held_interrupt():
        from bench.quickstart.page import build_page  # the plots' libraries take a second to load
    return build_page(outcome, options.seed, out, stopped).write(out), records


def _takes_stdout(options: RunOptions) -> bool:
    """Whether stdout is the record alone (`--json -`), and tables go to stderr."""
    return str(options.json_file) == "-"


def _resolve(options: RunOptions, steps: int | None) -> Config:
    """The user's configuration, or the default one over all GPUs, else two ranks."""
    overrides = [*options.overrides, *([f"job.optimizer.steps={steps}"] if steps else [])]
    if options.config_path:
        config = load_config(options.config_path, overrides)
    else:
        ranks = len(environ.usable_gpus()) or 2
        micro = max(1, _GLOBAL_BATCH // ranks)
        base = ("cluster.gpus_per_server", ranks), ("job.parallel.dp", ranks)
        batch = ("job.batch.micro_batch_size", micro), ("job.batch.global_batch_size", micro * ranks)
        config = load_config(None, [*(f"{key}={value}" for key, value in (*base, *batch)), *overrides])
    if config.cluster.servers > 1:
        rule = "quickstart starts every rank on this machine"
        raise ConfigError("cluster.servers", config.cluster.servers, rule, "give a configuration with servers = 1")
    return config


def _run(outcome: Outcome, options: RunOptions, out: Path, place: MeetingPlace, stages: Stages) -> None:
    """Every stage in turn, each into `outcome` as it is done."""
    config, seed = outcome.config, options.seed
    for finding in outcome.findings:
        stages.say(f"{finding.topic}: {finding.detail}")
    outcome.store = place.description
    stages.say(f"ranks meet through {place.description}")
    ranks, job = config.cluster.num_gpus, config.job
    with stages.open("text") as bar:
        corpus = prepare(job, ranks, seed, out, lambda _stage, done, total: bar(done, total))
    outcome.bench = _bench(outcome.backend, ranks, out, place, stages, tables_to_stderr=_takes_stdout(options))
    with stages.open("fabric") as bar:
        with held_interrupt():  # numba takes a second to load
            from topology.ecmp.compare import compare_split, split_by_load

        outcome.collisions = compare_split(outcome.fabric, seeds=range(seed, seed + _SEEDS))
        outcome.by_load = split_by_load(outcome.fabric.cluster)
        bar(1, 1)
    with stages.open("training") as bar:
        url = place.init_method("training")
        plan = resolve(job, corpus, ranks=ranks, init_method=url, backend=outcome.backend, out=out, seed=seed)
        outcome.training = train(plan, lambda progress: bar(progress.done, progress.total, words_of(progress)))


def _bench(
    backend: Backend, ranks: int, out: Path, place: MeetingPlace, stages: Stages, *, tables_to_stderr: bool
) -> list[RunRecord]:
    """The four collectives over real ranks; the table goes to stdout as nccl-tests prints it."""
    with held_interrupt():  # torch takes two seconds to load
        from bench.backends import choose_backend
        from bench.perf.driver import load_collective
        from bench.perf.measure import measure
        from bench.perf.table import format_table, num_failed

    options, done = replace(_SIZES[backend], timeout_s=_BENCH_TIMEOUT_S), 0
    names = [name for name in COLLECTIVES if load_collective(name).min_ranks <= ranks]
    for name in set(COLLECTIVES) - set(names):
        stages.say(f"bench: {name} is omitted, it needs at least {load_collective(name).min_ranks} ranks")
    total = len(names) * 2 * len(options.sizes())
    with stages.open("bench") as bar:

        def count(record: RunRecord, _row: object) -> None:
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
        stages.print(format_table(record), err=tables_to_stderr)
        if num_failed(record):
            logger.error("%s: %d rows hold wrong data", record.name, num_failed(record))
    return records


def _records(outcome: Outcome, seed: int, arguments: Mapping[str, Any], started: str) -> Sequence[RunRecord]:
    """All but the bench's, the run's own summary first; measured and simulated figures never share a record."""
    record = functools.partial(
        RunRecord, started_utc=started, ended_utc=utc_now(), arguments=arguments, environment=environ.snapshot(seed)
    )
    fabric = functools.partial(record, config=outcome.fabric.model_dump(mode="json"))
    records = []
    if outcome.training is not None:
        ours = functools.partial(
            record, source="measured", config=outcome.config.model_dump(mode="json"), devices=outcome.training.devices
        )
        if outcome.training.nccl_settings:
            settings = {"nccl_settings": outcome.training.nccl_settings}
            ours = functools.partial(ours, environment=environ.snapshot(seed) | settings)
        records += [
            ours(name="quickstart.summary", rows=[summary(outcome)]),
            ours(name="quickstart.training", rows=outcome.training.steps),
            ours(name="quickstart.validation", rows=outcome.training.evaluations),
        ]
    if outcome.collisions:
        simulated, predicted = (_of_source(outcome.collisions, source) for source in ("simulated", "predicted"))
        records += [
            fabric(name="quickstart.fabric", source="simulated", rows=[fabric_summary(outcome)]),
            fabric(name="topology.ecmp", source="simulated", rows=simulated),
            fabric(
                name="topology.ecmp", source="predicted", rows=[*predicted, *(row.to_row() for row in outcome.by_load)]
            ),
        ]
    return records


def _of_source(rows: Sequence[TierCollisions], source: str) -> list[Row]:
    return [row.to_row() for row in rows if row.source == source]
