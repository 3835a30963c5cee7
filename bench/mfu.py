"""`python -m bench.mfu`: model FLOPs utilisation of our trainer beside its peers, on the same work, in turn.

Same model, initial values, tokens, optimiser, clipping and dtype of reduction; a run is timed over N steps with one
synchronisation at each end, systems take turns, and losses must agree. First the identical model in all systems; then,
by `--also`, ours with changes, each a row of its own. MFU is given with full and with causal attention, and where there
is a window with the keys that queries see (`trainer.flops`). Left out: the best settings of a peer beside its
micro-batch (`--micro-of`), which its module says.
"""

from __future__ import annotations

import itertools
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from bench.mfu_jobs import Jobs, read_entries, read_layout
from bench.mfu_profile import floors
from bench.mfu_profile import table as profile_table
from bench.mfu_rows import FORMULA, check_losses, summarise, table, with_figures
from bench.mfu_systems import PEERS, Entry
from congestion.nic.env import as_record, exports, for_ranks
from netlayer import environ
from netlayer.command import RunOptions, open_out, run_options
from netlayer.errors import ConfigError, HardwareMissing
from netlayer.launch import launch
from netlayer.meeting import meeting_place
from netlayer.results import RunRecord, utc_now, write_text
from trainer.flops import peak_flops
from trainer.step import WARM_UP

Row = dict[str, Any]
_TOLERANCE = {"float32": 1e-3, "float64": 1e-6, "bfloat16": 5e-2}
_POWER_EVERY_S = 1.0


@click.command()
@run_options
@click.option("--model", help="Preset of job.model: 1m, 125m, 1.3b, 7b, 13b [default: the file's, else 1m].")
@click.option("--layout", default="dp2", show_default=True, help="Degrees: dp8, tp2pp2vp2, tp4.")
@click.option(
    "--peers", help=f"Of {', '.join(PEERS)}; none: ours alone [default: fsdp2 where the layout is dp alone, else none]."
)
@click.option(
    "--also",
    multiple=True,
    metavar="A.B=VALUE,...",
    help="One more row of ours, with these changes: model.parallel_block=true; repeatable.",
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
@click.option("--profile", is_flag=True, help="Also where the time goes, by kind of kernel; traces into --out.")
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
    profile: bool,
    backend: str,
) -> None:
    """Measure MFU; exit 1 where systems did not do the same work.

    \b
    Examples:
      python -m bench.mfu                                              # two CPU ranks: does it run
      python -m bench.mfu --model 7b --layout dp8 --peers fsdp2,mcore,native3d --set model.dtype=bfloat16
          --set model.compile=true --also model.parallel_block=true --also model.attention_window=1024
      python -m bench.mfu --model 7b --layout tp2pp2vp2 --peers native3d,native3d_async --micro-of native3d=2
          --set model.dtype=bfloat16 --set model.compile=true
      python -m bench.mfu --model 7b --layout tp2pp2vp2 --peers none --cumulative --set model.dtype=bfloat16
          --set overlap.tp=false --set overlap.pp=false --also model.parallel_block=true --also overlap.tp=true
          --also overlap.pp=true
    """
    build = Jobs(options, model, read_layout(layout), micro, micro_batches)
    entries = read_entries(build, peers, also, micro_of, cumulative=cumulative)
    if warmup <= WARM_UP and any(entry.job.loop.cuda_graph for entry in entries):
        rule = f"leaves step {WARM_UP + 1}, in which a CUDA graph is captured, among the timed ones"
        raise ConfigError("--warmup", warmup, rule, f"give {WARM_UP + 1} or more")
    job = entries[0].job
    ranks = job.parallel.layout.world_size
    chosen = environ.choose_backend(backend, ranks)  # type: ignore[arg-type]
    for entry in entries:
        if entry.system in PEERS:
            PEERS[entry.system].check(entry.job, chosen)
    if profile and chosen != "nccl":
        raise HardwareMissing("--profile: tells kernels of a GPU, and this runs on the CPU; leave it out")
    out, started = open_out(options.out, "mfu"), utc_now()
    nccl = for_ranks(chosen, job.nccl)
    heard = _Heard()
    work = [(run, entry) for run in range(1, runs + 1) for entry in entries]
    with _watched_gpus(chosen) as gpus:
        for shared in _by_processes(work):
            _launch(shared, options.seed, steps, warmup, runs, out, profile, chosen, exports(nccl), heard)
    device = next((gpu.name for gpu in environ.list_gpus()), "CPU") if chosen == "nccl" else "CPU"
    jobs = {entry.name: entry.job for entry in entries}
    rows = [*(with_figures(row, jobs[row["system"]], device) for row in heard.runs)]
    rows += summarise(heard.runs, jobs, device)
    rows += [{**row, "least_ms": floors(jobs[row["system"]])} for row in heard.profiles]
    record = RunRecord(
        name="bench.mfu",
        source="measured",
        rows=rows,
        started_utc=started,
        ended_utc=utc_now(),
        arguments={
            **options.arguments(),
            "model": model or "",
            "layout": layout,
            "micro": micro,
            "micro_of": list(micro_of),
            "systems": list(jobs),
        },
        config={
            "job": job.model_dump(mode="json"),
            "peak_flops": peak_flops(device, job.model.dtype),
            "mfu_formula": FORMULA,
            "gpus": gpus,
        },
        environment=environ.snapshot(options.seed) | ({"nccl_settings": as_record(nccl)} if nccl else {}),
        devices=[device] * ranks,
    )
    shown = list(table(rows))
    for row in heard.profiles:
        shown += ["", f"{row['system']}:", *profile_table(row["kinds"], floors(jobs[row["system"]]))]
    click.echo("".join(f"{line}\n" for line in shown), nl=False, err=str(options.json_file) == "-")
    click.echo(f"record: {record.save(out / 'records')}", err=True)
    if options.json_file:
        write_text(options.json_file, record.to_json())
    check_losses(heard.runs, _TOLERANCE[job.model.dtype])


def _by_processes(work: Sequence[tuple[int, Entry]]) -> Iterator[tuple[tuple[int, Entry], ...]]:
    """Work in order, cut where the next system cannot run in the processes of the one before."""
    return (tuple(shared) for _, shared in itertools.groupby(work, key=lambda pair: pair[1].processes))


class _Heard:
    """What rank 0 reports: rows of runs, and of profiles."""

    def __init__(self) -> None:
        self.runs: list[Row] = []
        self.profiles: list[Row] = []

    def __call__(self, rank: int, message: object) -> None:
        if rank == 0 and isinstance(message, dict) and message["run"] == "profile":
            self.profiles.append(message)
        elif rank == 0 and isinstance(message, dict):
            self.runs.append(message)
            click.echo(f"  {message['system']}: {message['step_ms']:.1f} ms", err=True)
        elif rank == 0:
            click.echo(str(message), err=True)


def _launch(
    work: tuple[tuple[int, Entry], ...],
    seed: int,
    steps: int,
    warmup: int,
    runs: int,
    out: Path,
    profile: bool,
    backend: str,
    env: Mapping[str, str],
    heard: _Heard,
) -> None:
    """One set of processes for systems that can share them."""
    from bench.mfu_ranks import Order, run_rank

    first = work[0][1]
    order = Order(work, steps, warmup, seed, runs, out if profile else None)
    with meeting_place(first.job.store.url) as place:
        arguments = order, place.init_method("mfu"), backend
        ranks = first.job.parallel.layout.world_size
        launch(run_rank, ranks, args=arguments, log_dir=out / "logs", env={**env, **first.env}, on_message=heard)


@contextmanager
def _watched_gpus(backend: str) -> Iterator[list[str]]:
    """Clock, power and temperature of every GPU, a line each second: who was throttled shows here."""
    lines: list[str] = []
    if backend != "nccl":
        yield lines
        return
    query = "--query-gpu=timestamp,index,clocks.sm,power.draw,temperature.gpu"
    process = subprocess.Popen(
        ["nvidia-smi", query, "--format=csv,noheader,nounits", "-lms", str(int(1000 * _POWER_EVERY_S))],
        stdout=subprocess.PIPE,
        text=True,
    )
    reader = threading.Thread(target=lambda: lines.extend(line.strip() for line in process.stdout or ()), daemon=True)
    reader.start()
    try:
        yield lines
    finally:
        process.terminate()
        process.wait()
        reader.join()


if __name__ == "__main__":
    from netlayer.cli import run

    run(command, "python -m bench.mfu")
