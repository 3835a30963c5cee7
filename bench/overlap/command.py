"""`python -m bench.overlap`: how far each technique hides its communication behind computation.

dp compares our sharded data parallel (in four variants) with torch's FSDP2, on one GPT and one communicator, in turn,
after checking that all train alike; pp and tp measure the overlap of the pipeline and of the tensor-parallel linears;
small the latency of small messages. On NCCL, `--channels` holds the bandwidth down to that of a NIC. Not covered:
several hosts.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Sequence
from typing import Any

import click
from click.core import ParameterSource

from bench.overlap.legs import Run, make_record, measure_techniques, run_rank, say, show
from bench.overlap.rows import Row
from bench.overlap.settings import (
    DTYPES,
    PRESETS,
    SYSTEMS,
    TECHNIQUES,
    Backend,
    DpSettings,
    Technique,
    channel_environment,
    make_settings,
    on_gloo,
)
from netlayer import environ
from netlayer.command import RunOptions, open_out, renamed_option, run_options
from netlayer.errors import ConfigError, NetlayerError
from netlayer.launch.launcher import detect
from netlayer.launch.rank import RankContext, RankEnv
from netlayer.nccl.environment import as_record, exported, for_ranks
from netlayer.results import utc_now, write_text
from netlayer.store.meeting import init_method_under

logger = logging.getLogger(__name__)

ALL_WITHIN = 8.0


def _read_channels(_ctx: click.Context, _param: click.Parameter, text: str | None) -> tuple[int, ...] | None:
    """Read different numbers from 0 on, separated by commas."""
    if text is None:
        return None
    try:
        numbers = tuple(int(part) for part in text.split(","))
    except ValueError:
        numbers = (-1,)
    if min(numbers) < 0 or len(set(numbers)) < len(numbers):
        raise click.BadParameter(f"{text!r}: different numbers from 0 on, with commas between, such as 0,2,1")
    return numbers


def _number(_context: click.Context, _option: click.Parameter, value: float | None) -> float | None:
    """Reject NaN, which passes click's ranges."""
    if value is not None and math.isnan(value):
        raise click.BadParameter(f"{value} is not a number")
    return value


@click.command(
    epilog="""\b
Examples:
  python -m bench.overlap --technique all --out overlap
  python -m bench.overlap --technique dp --model 7b --channels 0,2,1 --json overlap.json
  python -m bench.overlap --technique tp --ranks 4
  torchrun --nproc-per-node 4 -m bench.overlap --technique dp --model 7b --channels 2

\b
all is the one command for a host of GPUs: on all of them, tensor-parallel linears, small messages,
the pipeline, and the 7B of dp without a limit and on 2 and 1 channels, each into a record of its own
under DIR/records, within 8 minutes. What does not fit is omitted and said, and the exit code is 1.
"""
)
@run_options
@click.option(
    "--technique",
    type=click.Choice([*TECHNIQUES, "all"]),
    default="dp",
    show_default=True,
    help="tp: tensor-parallel linears; small: small messages; pp: pipeline; dp: sharded data parallel.",
)
@click.option("--ranks", type=click.IntRange(min=2), help="Processes on this machine [the GPUs, or 2].")
@click.option("--backend", type=click.Choice(["auto", "gloo", "nccl"]), default="auto", show_default=True)
@click.option(
    "--channels",
    metavar="N,N,...",
    callback=_read_channels,
    help="NCCL channels, one leg each; 0: no limit [0; for all on NCCL 0,2,1, of dp].",
)
@click.option("--model", type=click.Choice(list(PRESETS)), help="dp's sizes by name [tiny; for all on NCCL 7b].")
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
@click.option("--prefetch", type=click.IntRange(min=1), help="All-gathers ahead [tuned in the first steps].")
@click.option("--gather-in-backward", type=click.FloatRange(0, 1), help="Share of the gathers [balanced].")
@click.option(
    "--limit-min",
    "within",
    type=click.FloatRange(min=0),
    help="Minutes; legs that would end later are omitted [8 for all].",
)
@renamed_option("--within", "--limit-min", "within")
@click.option("--lr", type=click.FloatRange(0, 1e6, min_open=True), callback=_number, help="Learning rate.")
@click.option(
    "--tolerance",
    type=click.FloatRange(0, 1e6),
    callback=_number,
    default=0.05,
    show_default=True,
    help="Of the losses compared, nats.",
)
def command(
    options: RunOptions,
    technique: str,
    ranks: int | None,
    backend: str,
    channels: tuple[int, ...] | None,
    model: str | None,
    within: float | None,
    **dp_options: Any,
) -> None:
    """Measure exposed communication and contention; exit 1 where systems did not do the same work."""
    if options.config_path or options.overrides:
        raise ConfigError("--config / --set", None, "have no effect here", "give --model, --layers and so on")
    env = detect(os.environ)
    ranks, chosen = _choose(ranks, backend, env)
    techniques = [each for each in TECHNIQUES if technique in (each, "all")]
    if "dp" not in techniques:
        _warn_of_settings_of_dp((*dp_options, "model"), technique)
    full = technique == "all" and chosen == "nccl"
    settings = make_settings(seed=options.seed, model=model or ("7b" if full else "tiny"), **dp_options)
    if chosen == "gloo":
        settings = on_gloo(settings, dp_options["systems"])
    if chosen == "gloo" and channels not in (None, (0,)):
        logger.warning("--channels has no effect: gloo has none")
        channels = (0,)
    channels = channels or ((0, 2, 1) if full else (0,))
    nccl = for_ranks(chosen)
    click.get_current_context().with_resource(exported(nccl))
    if env is not None:
        _check_joined(techniques, channels, env)
        if env.rank:
            _join(techniques[0], settings, env, chosen, channels[0])
            return
    within = ALL_WITHIN if within is None and technique == "all" else within
    out, started = open_out(options.out, "overlap"), utc_now()
    run = Run(
        settings,
        ranks,
        chosen,
        out,
        options.arguments(),
        within_s=None if within is None else 60 * within,
        stdout_is_json=str(options.json_file) == "-",
        nccl_settings=as_record(nccl),
    )
    rows: list[Row]
    wrong: list[NetlayerError] = []
    if env is not None:
        rows = _join(techniques[0], settings, env, chosen, channels[0])
        show(run, rows)
        record = make_record(run, f"bench.overlap.{techniques[0]}", rows, started, techniques, channels)
        say(f"record: {record.save(out / 'records')}")
    else:
        rows, wrong = measure_techniques(run, techniques, channels)
    if options.json_file:
        name = "bench.overlap" if technique == "all" else f"bench.overlap.{technique}"
        write_text(options.json_file, make_record(run, name, rows, started, techniques, channels).to_json())
    if wrong:
        raise wrong[0]


def _join(technique: Technique, settings: DpSettings, env: RankEnv, backend: Backend, limit: int) -> list[Row]:
    """Measure as one of the ranks that a launcher has started."""
    os.environ.update(channel_environment(limit))
    rows = run_rank(
        RankContext(env, lambda message: say(str(message))), technique, settings, init_method_under(env), backend, limit
    )
    return [{"technique": technique, "channels": limit, **row} for row in rows]


def _warn_of_settings_of_dp(names: Sequence[str], technique: str) -> None:
    context = click.get_current_context()
    for option in context.command.params:
        if option.name in names and context.get_parameter_source(option.name) is ParameterSource.COMMANDLINE:
            logger.warning("%s has no effect on %s: it is dp's", option.opts[0], technique)


def _choose(ranks: int | None, backend: str, env: RankEnv | None) -> tuple[int, Backend]:
    """Return the number of ranks and the backend."""
    if env is not None:
        if ranks not in (None, env.world_size):
            rule = f"{env.launcher} has started {env.world_size} ranks"
            raise ConfigError("--ranks", ranks, rule, "omit it")
        ranks = env.world_size
    if ranks is None:
        gpus = 0 if backend == "gloo" else len(environ.usable_gpus())
        ranks = max(gpus, 2)
    local = ranks if env is None else env.local_world_size
    return ranks, environ.choose_backend(backend, local)  # type: ignore[arg-type]


def _check_joined(techniques: Sequence[Technique], channels: Sequence[int], env: RankEnv) -> None:
    """Check that processes which a launcher has started can measure this."""
    if not set(techniques) <= {"dp"} and not set(techniques) <= {"tp"}:
        rule = f"{env.launcher} has started ranks, which measure dp or tp"
        raise ConfigError("--technique", ",".join(techniques), rule, "give one of these, or start without a launcher")
    if len(channels) > 1:
        rule = f"NCCL reads it once in a process, and {env.launcher} started these"
        raise ConfigError("--channels", ",".join(map(str, channels)), rule, "give one number")
    if "MASTER_ADDR" not in os.environ:
        raise ConfigError("MASTER_ADDR", None, "is not set", "start with torchrun, or without a launcher")
