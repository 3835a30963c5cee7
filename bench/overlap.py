"""`python -m bench.overlap`: how far each technique hides its communication behind computation.

dp compares our sharded data parallel (in three variants) with torch's FSDP2, on one GPT and one communicator, in turn,
after checking that all train alike; pp and tp measure the overlap of the pipeline and of the tensor-parallel linears.
On NCCL, `--channels` holds the bandwidth down to that of a NIC. Left out: several hosts.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from bench.overlap_rows import Row, dp_line
from bench.overlap_settings import (
    DTYPES,
    MODULES,
    PRESETS,
    SYSTEMS,
    TECHNIQUES,
    Backend,
    DpSettings,
    Technique,
    channel_environment,
    make_settings,
)
from netlayer import environ
from netlayer.command import RunOptions, open_out, run_options
from netlayer.errors import ConfigError
from netlayer.launch import detect, launch
from netlayer.meeting import meeting_place
from netlayer.rank import RankContext, RankEnv
from netlayer.results import RunRecord, utc_now, write_text

logger = logging.getLogger(__name__)


def _read_channels(_ctx: click.Context, _param: click.Parameter, text: str) -> tuple[int, ...]:
    """Numbers with commas between."""
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = (-1,)
    if min(numbers) < 0 or len(set(numbers)) < len(numbers):
        raise click.BadParameter(f"{text!r}: different numbers from 0 on, with commas between, such as 0,2,1")
    return numbers


@click.command(
    epilog="""\b
Examples:
  python -m bench.overlap --technique dp
  python -m bench.overlap --technique dp --model 7b --channels 0,2,1 --json overlap.json
  torchrun --nproc-per-node 4 -m bench.overlap --technique dp --model 7b --channels 2
"""
)
@run_options
@click.option("--technique", type=click.Choice([*TECHNIQUES, "all"]), default="dp", show_default=True)
@click.option("--ranks", type=click.IntRange(min=2), help="Processes on this machine [the GPUs, or 2].")
@click.option("--backend", type=click.Choice(["auto", "gloo", "nccl"]), default="auto", show_default=True)
@click.option(
    "--channels",
    default="0",
    show_default=True,
    metavar="N,N,...",
    callback=_read_channels,
    help="NCCL channels; 0: no limit.",
)
@click.option("--model", type=click.Choice(list(PRESETS)), default="tiny", show_default=True, help="Sizes by name.")
@click.option("--layers", type=click.IntRange(min=1), help="Blocks, in place of the named size's; so are these:")
@click.option("--hidden", type=click.IntRange(min=1), help="Width.")
@click.option("--heads", type=click.IntRange(min=1), help="Attention heads.")
@click.option("--seq", type=click.IntRange(min=1), help="Tokens of a sequence.")
@click.option("--micro", type=click.IntRange(min=1), help="Sequences a rank.")
@click.option("--vocab", type=click.IntRange(min=2), help="Tokens of the vocabulary.")
@click.option("--dtype", type=click.Choice(DTYPES), help="Of the computation, and of gradients on the wire.")
@click.option("--system", "systems", multiple=True, type=click.Choice(SYSTEMS), help="Compare these; repeatable [all].")
@click.option("--steps", type=click.IntRange(min=1), default=8, show_default=True, help="Timed steps, over all rounds.")
@click.option("--warmup", type=click.IntRange(min=0), default=1, show_default=True, help="Steps before, each round.")
@click.option("--rounds", type=click.IntRange(min=1), default=2, show_default=True, help="Turns of each system.")
@click.option("--compile/--no-compile", "compiled", default=True, show_default=True, help="torch.compile each unit.")
@click.option("--bucket-mib", type=click.FloatRange(min=0, min_open=True), help="Largest bucket [a unit is one].")
@click.option("--prefetch", type=click.IntRange(min=1), default=8, show_default=True, help="All-gathers ahead.")
@click.option("--gather-in-backward", type=click.FloatRange(0, 1), help="Share of the gathers [balanced].")
@click.option("--lr", type=float, help="Learning rate.")
@click.option("--tolerance", type=float, default=0.05, show_default=True, help="Of the losses compared, nats.")
def command(
    options: RunOptions, technique: str, ranks: int | None, backend: str, channels: tuple[int, ...], **given: Any
) -> None:
    """Measure exposed communication and contention; exit 1 where systems did not do the same work."""
    if options.config_path or options.overrides:
        raise ConfigError("--config / --set", None, "have no effect here", "give --model, --layers and so on")
    env = detect(os.environ)
    ranks, chosen = _choose(ranks, backend, env)
    techniques = [each for each in TECHNIQUES if technique in (each, "all")]
    settings = make_settings(seed=options.seed, **given)
    _check_built(techniques)
    if env is not None:
        _check_joined(techniques, channels, env)
    if chosen == "gloo" and channels != (0,):
        logger.warning("--channels has no effect: gloo has none")
        channels = (0,)
    if env is not None and env.rank:
        _join(techniques[0], settings, env, chosen, channels[0])
        return
    out, started = open_out(options.out, "overlap"), utc_now()
    rows: list[Row] = []
    if env is not None:
        rows = _join(techniques[0], settings, env, chosen, channels[0])
    else:
        for each in techniques:
            rows += _launch(each, settings, ranks, chosen, channels, out)
    record = RunRecord(
        name="bench.overlap",
        source="measured",
        rows=rows,
        started_utc=started,
        ended_utc=utc_now(),
        arguments={**options.arguments(), "techniques": techniques, "channels": list(channels), "backend": chosen}
        | settings.record(),
        environment=environ.snapshot(options.seed),
        devices=[gpu.name for gpu in environ.list_gpus()[:ranks]] if chosen == "nccl" else ["CPU"] * ranks,
    )
    click.echo(f"record: {record.save(out / 'records')}", err=True)
    if options.json_file:
        write_text(options.json_file, record.to_json())


def _launch(
    technique: Technique, settings: DpSettings, ranks: int, backend: Backend, channels: Sequence[int], out: Path
) -> list[Row]:
    """The ranks are started once for each number of channels, which NCCL reads once in a process."""
    rows: list[Row] = []
    for limit in channels:
        _progress(f"{technique}, {ranks} ranks, " + (f"NCCL held to {limit} channels" if limit else "no limit"))
        log_dir = out / "logs" / f"{technique}{limit}"
        with _environment(channel_environment(limit)):
            if technique == "pp":
                measure = importlib.import_module(MODULES["pp"]).measure
                measured = measure(
                    ranks=ranks, backend=backend, log_dir=log_dir, seed=settings.seed, on_progress=_progress
                )
            else:
                measured = _launch_here(technique, settings, ranks, backend, limit, log_dir)
        rows += _show([{"technique": technique, "channels": limit, **row} for row in measured])
    return rows


def _launch_here(
    technique: Technique, settings: DpSettings, ranks: int, backend: Backend, limit: int, log_dir: Path
) -> list[Row]:
    with meeting_place() as place:
        results = launch(
            run,
            ranks,
            args=(technique, settings, place.init_method(f"{technique}{limit}"), backend, limit),
            log_dir=log_dir,
            on_message=lambda _rank, words: _progress(str(words)),
        )
    return results[0]


@contextlib.contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """With these variables, for processes that are started meanwhile."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _join(technique: Technique, settings: DpSettings, env: RankEnv, backend: Backend, limit: int) -> list[Row]:
    """The same, as one of the ranks that a launcher has started."""
    os.environ.update(channel_environment(limit))
    context = RankContext(env, lambda words: _progress(str(words)))
    rows = run(context, technique, settings, "env://", backend, limit)
    rows = [{"technique": technique, "channels": limit, **row} for row in rows]
    return rows if env.rank else _show(rows)


def run(
    context: RankContext, technique: Technique, settings: DpSettings, url: str, backend: Backend, limit: int
) -> list[Row]:
    """One rank; torch is imported here, and not by who launches."""
    from bench.overlap_ranks import run_rank

    return run_rank(context, technique, settings, url, backend, limit)


def _choose(ranks: int | None, backend: str, env: RankEnv | None) -> tuple[int, Backend]:
    """How many ranks on which backend."""
    if env is not None:
        if ranks not in (None, env.world_size):
            rule = f"{env.launcher} has started {env.world_size} ranks"
            raise ConfigError("--ranks", ranks, rule, "leave it out")
        ranks = env.world_size
    if ranks is None:
        gpus = 0 if backend == "gloo" else len(environ.usable_gpus())
        ranks = max(gpus, 2)
    local = ranks if env is None else env.local_world_size
    return ranks, environ.choose_backend(backend, local)  # type: ignore[arg-type]


def _check_built(techniques: Sequence[Technique]) -> None:
    for technique in techniques:
        if technique in MODULES and importlib.util.find_spec(MODULES[technique]) is None:
            raise ConfigError("--technique", technique, "is not built in this version", "give another one")


def _check_joined(techniques: Sequence[Technique], channels: Sequence[int], env: RankEnv) -> None:
    """What processes that a launcher has started can measure."""
    if len(techniques) > 1 or "pp" in techniques:
        rule = f"{env.launcher} has started ranks, which measure dp or tp"
        raise ConfigError("--technique", ",".join(techniques), rule, "give one of these, or start without a launcher")
    if len(channels) > 1:
        rule = f"NCCL reads it once in a process, and {env.launcher} started these"
        raise ConfigError("--channels", ",".join(map(str, channels)), rule, "give one number")
    if "MASTER_ADDR" not in os.environ:
        raise ConfigError("MASTER_ADDR", None, "is not set", "start with torchrun, or without a launcher")


def _show(rows: list[Row]) -> list[Row]:
    for row in rows:
        click.echo(dp_line(row) if row["technique"] == "dp" else _line(row))
    return rows


def _line(row: Row) -> str:
    """A row of another technique: its words, and its figures by name."""
    words = [str(value) for value in row.values() if isinstance(value, str)]
    figures = [f"{key} {value:.4g}" for key, value in row.items() if isinstance(value, int | float)]
    return " ".join(words) + ": " + ", ".join(figures)


def _progress(words: str) -> None:
    click.echo(words, err=True)


if __name__ == "__main__":
    from netlayer.cli import run as run_command

    run_command(command, "python -m bench.overlap")
