"""`python -m bench.mfu`: model FLOPs utilisation of our trainer beside others, on the same work, in turn.

Same model, initial values, tokens, optimiser, clipping and dtype of reduction; a run is timed over N steps with one
synchronisation at each end, systems take turns, and each row says how its losses differ from ours. MFU is given with
full and with causal attention (`trainer.flops`). Left out so far: Megatron-core and torch's native 3D as peers.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import click

from bench.mfu_profile import floors
from bench.mfu_profile import table as profile_table
from congestion.nic.env import as_record, exports, for_ranks
from netlayer import environ
from netlayer.command import RunOptions, open_out, run_options
from netlayer.config import JobConfig, build_config
from netlayer.errors import CheckFailed, ConfigError, HardwareMissing
from netlayer.launch import launch
from netlayer.meeting import meeting_place
from netlayer.results import RunRecord, utc_now, write_text
from trainer.flops import peak_flops, step_flops, utilisation

Row = dict[str, Any]
SYSTEMS = ("ours", "fsdp2")
_LAYOUT = re.compile(r"(tp|pp|dp|vp)(\d+)")
_TOLERANCE = {"float32": 1e-3, "float64": 1e-6, "bfloat16": 5e-2}
_POWER_EVERY_S = 1.0


@click.command()
@run_options
@click.option("--model", default="1m", show_default=True, help="Preset of job.model: 1m, 125m, 1.3b, 7b, 13b.")
@click.option("--layout", default="dp2", show_default=True, help="Degrees: dp8, tp2pp2vp2, tp4.")
@click.option("--systems", default="ours,fsdp2", show_default=True, help="In turn; fsdp2 is data parallel alone.")
@click.option("--micro", type=click.IntRange(1), default=4, show_default=True, help="Sequences of a micro-batch.")
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
    model: str,
    layout: str,
    systems: str,
    micro: int,
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
      python -m bench.mfu --model 7b --layout dp4 --set model.dtype=bfloat16 --set model.compile=true
      python -m bench.mfu --model 7b --layout tp2pp2vp2 --systems ours --set model.dtype=bfloat16
    """
    from bench.mfu_ranks import Order, run_rank

    degrees = read_layout(layout)
    job = _job(options, model, degrees, micro, micro_batches)
    asked = _systems(systems, job)
    ranks = job.parallel.layout.world_size
    chosen = environ.choose_backend(backend, ranks)  # type: ignore[arg-type]
    if profile and chosen != "nccl":
        raise HardwareMissing("--profile: tells kernels of a GPU, and this runs on the CPU; leave it out")
    out, started = open_out(options.out, "mfu"), utc_now()
    order = Order(job, asked, runs, steps, warmup, options.seed, out if profile else None)
    nccl = for_ranks(chosen, job.nccl)
    found: list[Row] = []
    profiles: list[Row] = []

    def hear(rank: int, message: object) -> None:
        if rank == 0 and isinstance(message, dict) and message["run"] == "profile":
            profiles.append(message)
        elif rank == 0 and isinstance(message, dict):
            found.append(message)
            click.echo(f"  {message['system']}: {message['step_ms']:.1f} ms", err=True)
        elif rank == 0:
            click.echo(str(message), err=True)

    with meeting_place(job.store.url) as place, _watched_gpus(chosen) as gpus:
        url = place.init_method("mfu")
        launch(run_rank, ranks, args=(order, url, chosen), log_dir=out / "logs", env=exports(nccl), on_message=hear)
    device = next((gpu.name for gpu in environ.list_gpus()), "CPU") if chosen == "nccl" else "CPU"
    least = floors(job)
    rows = [*(_with_figures(row, job, device) for row in found), *summarise(found, job, device)]
    rows += [{**row, "least_ms": least} for row in profiles]
    record = RunRecord(
        name="bench.mfu",
        source="measured",
        rows=rows,
        started_utc=started,
        ended_utc=utc_now(),
        arguments={**options.arguments(), "model": model, "layout": layout, "micro": micro, "systems": systems},
        config={"job": job.model_dump(mode="json"), "peak_flops": peak_flops(device, job.model.dtype), "gpus": gpus},
        environment=environ.snapshot(options.seed) | ({"nccl_settings": as_record(nccl)} if nccl else {}),
        devices=[device] * ranks,
    )
    shown = list(table(rows))
    for row in profiles:
        shown += ["", f"{row['system']}:", *profile_table(row["kinds"], least)]
    click.echo("".join(f"{line}\n" for line in shown), nl=False, err=str(options.json_file) == "-")
    click.echo(f"record: {record.save(out / 'records')}", err=True)
    if options.json_file:
        write_text(options.json_file, record.to_json())
    check_losses(found, _TOLERANCE[job.model.dtype])


def read_layout(text: str) -> dict[str, int]:
    """Degrees of `tp2pp2vp2dp1`.

    Raises:
        ConfigError: it says something else.
    """
    found = _LAYOUT.findall(text)
    if not found or "".join(name + number for name, number in found) != text or len(dict(found)) < len(found):
        raise ConfigError("--layout", text, "must be degrees such as tp2pp2vp2", "name each of tp, pp, vp, dp once")
    named = {name: int(number) for name, number in found}
    return {"tp": named.get("tp", 1), "pp": named.get("pp", 1), "dp": named.get("dp", 1), "vpp": named.get("vp", 1)}


def summarise(rows: Sequence[Row], job: JobConfig, device: str) -> list[Row]:
    """One row a system: the median run, the spread (largest - least over median), and the ratio to ours."""
    medians: dict[str, float] = {}
    found = []
    for system in dict.fromkeys(row["system"] for row in rows):
        times = [row["step_ms"] for row in rows if row["system"] == system]
        medians[system] = statistics.median(times)
        each = sorted(value for row in rows if row["system"] == system for value in row["each_ms"])
        found.append(
            {
                "system": system,
                "run": "median",
                "spread": (max(times) - min(times)) / medians[system],
                "p99_over_median": each[min(len(each) - 1, int(0.99 * len(each)))] / statistics.median(each),
                "memory_gib": max(row["memory_gib"] for row in rows if row["system"] == system),
                **_figures(medians[system], job, device),
            }
        )
    for row in found:
        row["over_ours"] = medians[row["system"]] / medians["ours"] if "ours" in medians else None
    return found


def check_losses(rows: Sequence[Row], tolerance: float) -> None:
    """Refuse a comparison of systems that did not do the same work.

    Raises:
        CheckFailed: a loss differs from the first row's by more.
    """
    first = rows[0]
    for row in rows[1:]:
        differences = [abs(a - b) for a, b in zip(first["losses"], row["losses"], strict=True)]
        apart = next((each for each in differences if not each <= tolerance), None)  # a NaN too
        if apart is not None:
            raise CheckFailed(
                f"losses of {row['system']}, run {row['run']}, differ by {apart:.3g} from {first['system']}'s, above "
                f"{tolerance:g}: they did not do the same work"
            )


def table(rows: Sequence[Row]) -> Iterator[str]:
    """The summary for a person."""
    heads = (
        ("system", 8),
        ("step ms", 9),
        ("spread", 7),
        ("tokens/s/GPU", 13),
        ("MFU full", 9),
        ("causal", 7),
        ("GiB", 6),
    )
    yield " ".join(f"{head:>{width}}" for head, width in (*heads, ("over ours", 10)))
    for row in (row for row in rows if row["run"] == "median"):
        full, causal = (f"{row[name]:.3f}" if row[name] is not None else "-" for name in ("mfu_full", "mfu_causal"))
        ratio = "-" if row["over_ours"] is None else f"{row['over_ours']:.3f}"
        yield (
            f"{row['system']:>8} {row['step_ms']:9.1f} {row['spread']:7.1%} {row['tokens_per_s_gpu']:13,.0f} {full:>9} "
            f"{causal:>7} {row['memory_gib']:6.1f} {ratio:>10}"
        )


def _job(
    options: RunOptions, model: str, degrees: Mapping[str, int], micro: int, micro_batches: int | None
) -> JobConfig:
    """The job that every system does: no clipping, no warm-up of the learning rate, one bucket a block."""
    count = micro_batches or (4 * degrees["pp"] if degrees["pp"] > 1 else 1)
    ranks = degrees["tp"] * degrees["pp"] * degrees["dp"]
    given = options.load_config().job if options.config_path or options.overrides else None
    tree: dict[str, Any] = {
        "model": {"preset": model},
        "parallel": dict(degrees),
        "batch": {"micro_size": micro, "global_size": micro * count * degrees["dp"]},
        "optimizer": {"lr": 1e-4, "clip_norm": 0.0, "warmup_steps": 0},
        "overlap": {"bucket_mib": 0.0},
    }
    if given is not None:
        for name in ("model", "optimizer", "overlap", "nccl", "store"):
            section = getattr(given, name)
            tree[name] = {**tree.get(name, {}), **section.model_dump(include=section.model_fields_set)}
    return build_config({"cluster": {"gpus_per_server": ranks}, "job": tree}).job


def _systems(text: str, job: JobConfig) -> tuple[str, ...]:
    names = tuple(text.split(","))
    for name in names:
        if name not in SYSTEMS:
            raise ConfigError("--systems", name, f"must be among {', '.join(SYSTEMS)}", "correct it")
    if "fsdp2" in names and job.parallel.tp * job.parallel.pp > 1:
        raise ConfigError("--systems", "fsdp2", "is data parallel alone", "give a layout such as dp4, or ours alone")
    return names


def _with_figures(row: Row, job: JobConfig, device: str) -> Row:
    return {**row, **_figures(row["step_ms"], job, device)}


def _figures(step_ms: float, job: JobConfig, device: str) -> Row:
    ranks, seconds = job.parallel.layout.world_size, step_ms / 1e3
    flops, peak = step_flops(job.model, job.batch.global_size), peak_flops(device, job.model.dtype)
    return {
        "step_ms": step_ms,
        "tokens_per_s_gpu": job.batch.global_size * job.model.seq_len / seconds / ranks,
        "mfu_full": utilisation(flops.full, seconds, peak, ranks),
        "mfu_causal": utilisation(flops.causal, seconds, peak, ranks),
        "mfu_done": utilisation(flops.done, seconds, peak, ranks),
    }


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
