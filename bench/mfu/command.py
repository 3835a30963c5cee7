"""`python -m bench.mfu`: model FLOPs utilisation (MFU) of our trainer and of other systems ("peers") on the same work.

Model, initial values, tokens, optimiser, clipping and reduction dtype are the same; a run is timed over N steps with
one synchronisation at each end, systems take turns, and losses must agree. First the identical model in all systems;
then, by `--also`, ours with changes, each a row of its own. MFU is given with full and with causal attention, and for a
window also with the keys that queries see (`netlayer.workload.flops`).

A peer has its best settings, listed in its module, and on GPUs `job.model.compile`; ours has those of the options. A
peer's best micro-batch is given by `--micro-of`. Results are kept whatever ends the command: rows go into `rows.jsonl`
as they come, the record is written on SIGINT and SIGTERM too, and a system that fails is named while the others go on.
Every call has a row of our unchanged system, so that results of several calls can be put into one table.
"""

from __future__ import annotations

import dataclasses
import math
import signal
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import click

from bench.mfu.gpus import watched_gpus
from bench.mfu.jobs import Jobs, check_overrides, fit_room, read_entries, read_layout
from bench.mfu.profile import floors
from bench.mfu.profile import table as profile_table
from bench.mfu.rows import FORMULA, check_losses, heading, summarise, table, with_figures
from bench.mfu.run import ROWS, Plan, Reports, estimate, measure, take_away
from bench.mfu.systems import PEERS, Entry
from bench.overlap.settings import channel_environment
from netlayer import environ
from netlayer.command import RunOptions, open_out, run_options
from netlayer.errors import CheckFailed, ConfigError, HardwareMissing
from netlayer.launch.early_end import ending_at
from netlayer.launch.interrupt import uninterrupted
from netlayer.nccl.environment import as_record, exports, for_ranks
from netlayer.results import RunRecord, utc_now, write_text
from netlayer.workload.peaks import peak_flops
from trainer.commands.preview import notes
from trainer.step import WARM_UP

_TOLERANCE = {"float32": 1e-3, "float64": 1e-6, "bfloat16": 5e-2}


@click.command()
@run_options
@click.option("--model", help="Preset of job.model: 1m, 125m, 1.3b, 7b, llama3-8b [default: the file's, else 1m].")
@click.option("--layout", default="dp2", show_default=True, help="Degrees: dp8, tp2pp2vp2, cp2dp2, tp4.")
@click.option(
    "--peers", help=f"Of {', '.join(PEERS)}; none: ours alone [default: fsdp2 where the layout is dp alone, else none]."
)
@click.option(
    "--also",
    multiple=True,
    metavar="A.B=VALUE,...",
    help="One more row of ours, with these changes: model.parallel_block=true; micro_batches=N too; repeatable.",
)
@click.option("--cumulative", is_flag=True, help="Each --also on top of those before it: an ablation.")
@click.option("--micro", type=click.IntRange(1), default=4, show_default=True, help="Sequences of a micro-batch.")
@click.option(
    "--micro-of", multiple=True, metavar="SYSTEM=N", help="Another one for a system, its best; same batch; repeatable."
)
@click.option("--micro-batches", type=click.IntRange(1), help="Of a step and rank [default: 1; 4 a stage with pp].")
@click.option("--runs", type=click.IntRange(1), default=5, show_default=True, help="Of each system, in turn.")
@click.option("--steps", type=click.IntRange(1), default=10, show_default=True, help="Timed in a run.")
@click.option(
    "--warmup", type=click.IntRange(1), default=3, show_default=True, help="Steps before, whose losses count."
)
@click.option(
    "--attention",
    type=click.Choice(["best", "flash"]),
    default="best",
    show_default=True,
    help="Kernel of full attention in all systems: the fastest, or the one that torch takes by itself.",
)
@click.option(
    "--limit", type=click.FloatRange(1), default=240.0, show_default=True, help="Longest turn, s: then it hangs."
)
@click.option("--time-limit", type=click.FloatRange(1), help="Of the whole, s: no turn begins that would not fit.")
@click.option(
    "--channels",
    type=click.IntRange(0),
    default=0,
    help="NCCL's, of all systems: 1 is a 200G NIC; then NCCL carries all of ours, as --set overlap.peer_memory=false "
    "does; 0: NCCL's choice.",
)
@click.option(
    "--profile", is_flag=True, help="Also where time goes, by kind of kernel, and launching; traces go to --out."
)
@click.option("--backend", type=click.Choice(["auto", "gloo", "nccl"]), default="auto", show_default=True)
def command(
    options: RunOptions,
    model: str | None,
    layout: str,
    peers: str | None,
    also: tuple[str, ...],
    cumulative: bool,
    micro: int,
    micro_of: tuple[str, ...],
    micro_batches: int | None,
    runs: int,
    steps: int,
    warmup: int,
    attention: str,
    limit: float,
    time_limit: float | None,
    channels: int,
    profile: bool,
    backend: str,
) -> None:
    """Measure MFU; exit 1 where systems did not do the same work, or nothing was measured.

    \b
    Examples:
      python -m bench.mfu                                              # two CPU ranks: does it run
      python -m bench.mfu --model 7b --layout dp8 --peers fsdp2,mcore,native3d
          --also model.parallel_block=true --also model.attention_window=1024
      python -m bench.mfu --model 7b --layout tp2pp2vp2 --peers mcore_no_overlap,native3d --micro-of native3d=2
          --micro-batches 16
      python -m bench.mfu --model 7b --layout tp2pp2vp2 --peers none --cumulative
          --set overlap.tp=false --set overlap.pp=false --also model.parallel_block=true --also overlap.tp=true
          --also overlap.pp=true
    """
    _check_seconds({"--limit": limit, "--time-limit": time_limit})
    end_s = time.monotonic() + time_limit if time_limit else math.inf
    check_overrides(options.overrides)
    build = Jobs(options, model, read_layout(layout), micro, micro_batches, holds_channels=channels > 0)
    ranks = build().parallel.layout.world_size
    chosen = environ.choose_backend(backend, ranks)  # type: ignore[arg-type]
    build = dataclasses.replace(build, dtype="bfloat16" if chosen == "nccl" else "float32")
    entries = read_entries(build, peers, also, micro_of, cumulative=cumulative, compiles=chosen == "nccl")
    if warmup <= WARM_UP and any(entry.job.loop.cuda_graph for entry in entries):
        rule = f"leaves step {WARM_UP + 1}, in which a CUDA graph is captured, among the timed ones"
        raise ConfigError("--warmup", warmup, rule, f"give {WARM_UP + 1} or more")
    for entry in entries:
        if entry.system not in PEERS:
            continue
        if channels and PEERS[entry.system].copies:
            rule = f"does not hold {entry.name}, which copies without NCCL"
            raise ConfigError("--channels", channels, rule, "omit it from --peers")
        PEERS[entry.system].check(entry.job, chosen)
    if profile and chosen != "nccl":
        raise HardwareMissing("--profile: tells kernels of a GPU, and this runs on the CPU; omit it")
    entries = fit_room(entries, chosen)
    _tell_notes(entries, chosen)
    (out, made), started = _open(options.out), utc_now()
    device = next((gpu.name for gpu in environ.list_gpus()), "CPU") if chosen == "nccl" else "CPU"
    nccl = for_ranks(chosen, entries[0].job.nccl)
    env = {**exports(nccl), **channel_environment(channels)}
    flash = attention == "flash"
    plan = Plan(runs, steps, warmup, options.seed, chosen, out, limit, end_s, profile, prefers_flash=flash, env=env)
    click.echo(estimate(entries, plan, device), err=True)
    with ending_at(signal.SIGTERM), watched_gpus(ranks if chosen == "nccl" else 0) as gpus:
        collector = Reports(runs * len(entries), out / ROWS, gpus)
        arguments = {
            **options.arguments(),
            "model": model or "",
            "layout": layout,
            "peers": [entry.name for entry in entries if entry.system in PEERS],
            "also": list(also),
            "cumulative": cumulative,
            "micro": micro,
            "micro_of": list(micro_of),
            "micro_batches": micro_batches,
            "runs": runs,
            "steps": steps,
            "warmup": warmup,
            "attention": attention,
            "channels": channels,
            "profile": profile,
            "backend": backend,
            "time_limit": time_limit,
            "systems": [entry.name for entry in entries],
        }
        environment = environ.snapshot(options.seed) | ({"nccl_settings": as_record(nccl)} if nccl else {})
        ended_by = "a signal or an error"
        try:
            first = measure(entries, plan, collector)
            ended_by = ""
        finally:
            if collector.runs:
                with uninterrupted():
                    record = _record(collector, entries, started, arguments, gpus.lines, device, environment, ended_by)
                    path = _tell(record, collector, entries, device, options.json_file, out)
            elif not collector.failures:
                take_away(out, made)
    if not collector.runs:
        reason = f"nothing was measured: --time-limit {time_limit or 0:g} was over before a turn began"
        raise first or CheckFailed(reason)
    _draw(record, path, out)
    if collector.failures:
        failed = "; ".join(f"{name}: {reason}" for name, reason in collector.failures.items())
        raise CheckFailed(f"the record has only the other systems' rows; failed: {failed}")
    check_losses(collector.runs, _TOLERANCE[entries[0].job.model.dtype])


def _tell_notes(entries: Sequence[Entry], backend: Literal["gloo", "nccl"]) -> None:
    """Print the notes that all our jobs share: settings that have no effect, or act differently than they read."""
    each = [notes(entry.job, backend) for entry in entries if entry.system not in PEERS]
    for note in each[0]:
        if all(note in others for others in each):
            click.echo(f"note: {note}", err=True)


def _check_seconds(options: Mapping[str, float | None]) -> None:
    """Reject NaN and infinity, which click's FloatRange lets through."""
    for option, seconds in options.items():
        if seconds is not None and not math.isfinite(seconds):
            raise ConfigError(option, seconds, "is no number of seconds", "give one, or omit it")


def _open(requested: Path | None) -> tuple[Path, list[Path]]:
    """Open the output folder; return it, and the folders created for it, inner ones first."""
    base = requested or Path("runs")
    created = [path for path in (base, *base.parents) if not path.exists()]
    out = open_out(requested, "mfu")
    return out, created if requested else [out, *created]


def _record(
    collector: Reports,
    entries: Sequence[Entry],
    started: str,
    arguments: Mapping[str, Any],
    gpus: Sequence[str],
    device: str,
    environment: Mapping[str, Any],
    ended_by: str,
) -> RunRecord:
    """Build the record: rows of runs, medians, profiles and failures, with their configuration."""
    job, jobs = entries[0].job, {entry.name: entry.job for entry in entries}
    rows = [with_figures(run, jobs[run.system], device) for run in collector.runs]
    rows += summarise(collector.runs, jobs, device)
    rows += [{**one.to_row(), "least_ms": floors(jobs[one.system], device)} for one in collector.profiles]
    rows += [{"system": name, "run": "failed", "reason": reason} for name, reason in collector.failures.items()]
    return RunRecord(
        name="bench.mfu",
        source="measured",
        rows=rows,
        started_utc=started,
        ended_utc=utc_now(),
        arguments=arguments,
        config={
            "job": job.model_dump(mode="json"),
            "jobs": {name: each.model_dump(mode="json") for name, each in jobs.items()},
            "peak_flops": peak_flops(device, job.model.dtype),
            "mfu_formula": FORMULA,
            "gpus": list(gpus),
            "ended_early_by": ended_by,
        },
        environment=environment,
        devices=[device] * job.parallel.layout.world_size,
    )


def _tell(
    record: RunRecord, collector: Reports, entries: Sequence[Entry], device: str, json_file: Path | None, out: Path
) -> Path:
    """Save the record, print the tables, and return the record's path under `out`."""
    jobs = {entry.name: entry.job for entry in entries}
    lines = [*heading(entries[0].job, device), "", *table([dict(row) for row in record.rows])]
    for one in collector.profiles:
        launch_line = f"{one.system}: the host of rank 0 launches a step in {one.launch_ms:.1f} ms, waits included"
        lines += ["", launch_line, *profile_table(one.kinds, floors(jobs[one.system], device))]
    path = record.save(out / "records")
    click.echo("".join(f"{line}\n" for line in lines), nl=False, err=str(json_file) == "-")
    click.echo(f"record: {path}", err=True)
    if json_file:
        write_text(json_file, record.to_json())
    return path


def _draw(record: RunRecord, path: Path, out: Path) -> None:
    """Write the page; if matplotlib is not installed, as on some GPU machines, print how to draw it elsewhere."""
    try:
        from bench.mfu.page import build_page  # the plots' libraries take a second to load

        page = build_page([record]).write(out)
    except (HardwareMissing, ModuleNotFoundError) as exc:
        click.echo(f"no page: {exc}; python -m bench.mfu.page {path} --out DIR draws it elsewhere", err=True)
    else:
        click.echo(f"report: {page}", err=True)
