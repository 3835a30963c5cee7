"""`python -m bench.nccl_tests`: nccl-tests' own binaries and our `--backend nccl`, side by side on the same GPUs.

In turn, for each way of registering (`-R`): nccl-tests collective by collective, with one thread a GPU (`-t`), which is
as near to our process a GPU as it comes without MPI; then ours, its ranks started once; as often as `--runs` says. Both
are read from the JSON that they write. A ratio is that of two runs next to each other, and a line's the median of its
runs. From 64 MiB on bus bandwidth is held against the peer's, below it the time. With `--again` nccl-tests runs once
more after ours, and the limit of time is wider by what its second time is off its first. Not covered: several hosts.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import click

from bench.perf.options import PerfOptions
from netlayer import environ
from netlayer.command import RunOptions, open_out, run_options_without_config
from netlayer.errors import CheckFailed, ConfigError, HardwareMissing
from netlayer.results import RunRecord, utc_now
from netlayer.units import format_size, parse_size

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter")
LARGE_BYTES = 64 << 20
LIMIT = 0.02
_RUN_LIMIT_S = 600
Row = dict[str, Any]


class Measured(NamedTuple):
    """One side of a line of a table."""

    time_us: float
    bus_bw_gbs: float
    wrong: float


Table = Mapping[tuple[int, bool], Measured]  # by size and whether in place


@dataclass(frozen=True)
class Comparison:
    """Setting of both programs: folder of nccl-tests' binaries, number of GPUs, collectives, sizes and calls."""

    binaries: Path
    ngpus: int
    collectives: tuple[str, ...]
    registers: tuple[int, ...]
    options: PerfOptions
    one_thread: bool = False
    again: bool = False

    def peer_command(self, collective: str, json_file: Path) -> list[str]:
        """Return nccl-tests' command line for one collective."""
        perf, threads = self.options, (1, self.ngpus) if self.one_thread else (self.ngpus, 1)
        flags = {
            "-t": threads[0], "-g": threads[1], "-b": perf.min_bytes, "-e": perf.max_bytes, "-f": perf.step_factor,
            "-n": perf.iters, "-w": perf.warmup_iters, "-c": perf.check, "-R": perf.local_register,
            "-J": json_file,
        }  # fmt: skip
        return [str(self.binaries / f"{collective}_perf"), *(str(word) for pair in flags.items() for word in pair)]


@click.command()
@click.option("--binaries", type=click.Path(path_type=Path, file_okay=False), required=True, help="nccl-tests' build.")
@click.option("-g", "--ngpus", type=click.IntRange(1), help="GPUs [default: all].")
@click.option("--collective", "collectives", multiple=True, type=click.Choice(COLLECTIVES), help="[default: all three]")
@click.option("-R", "registers", multiple=True, type=click.IntRange(0, 2), help="As nccl-tests [default: 0 and 2].")
@click.option("-b", "--minbytes", "min_size", default="1K", show_default=True, help="First size.")
@click.option("-e", "--maxbytes", "max_size", default="4G", show_default=True, help="Last size.")
@click.option("-f", "--stepfactor", "step_factor", type=click.IntRange(2), default=4, show_default=True)
@click.option("-n", "--iters", type=click.IntRange(1), default=20, show_default=True, help="Timed calls of a size.")
@click.option("--runs", type=click.IntRange(1), default=3, show_default=True, help="Of both, in turn.")
@click.option(
    "--one-thread", is_flag=True, help="nccl-tests launches all GPUs from one thread (-g), not one each (-t)."
)
@click.option("--again", is_flag=True, help="nccl-tests once more after ours: its spread widens the limit of time.")
@run_options_without_config
def command(
    options: RunOptions,
    binaries: Path,
    ngpus: int | None,
    collectives: tuple[str, ...],
    registers: tuple[int, ...],
    min_size: str,
    max_size: str,
    step_factor: int,
    iters: int,
    runs: int,
    one_thread: bool,
    again: bool,
) -> None:
    """nccl-tests and ours in turn: ratio of bus bandwidth and of time, size by size.

    \b
    Exit 0: bandwidth within 2% from 64 MiB on and the time below it no more than 2% longer (median of the sizes),
    plus nccl-tests' own spread with --again.
    Exit 1: not so, or wrong data; 2: usage; 3: no such hardware.
    """
    sizes = [_size(flag, text) for flag, text in (("-b", min_size), ("-e", max_size))]
    perf = PerfOptions(min_bytes=sizes[0], max_bytes=sizes[1], step_factor=step_factor, iters=iters)
    comparison = Comparison(
        binaries, ngpus or _count_gpus(), collectives or COLLECTIVES, registers or (0, 2), perf, one_thread, again
    )
    _check(comparison)
    out, started, rows = open_out(options.out, "nccl-tests"), utc_now(), []
    for line in ("collective        R         size  place   nccl-tests         ours", _HEAD):
        click.echo(line)
    for register in comparison.registers:
        tables: dict[str, list[tuple[Table, Table, Table]]] = {name: [] for name in comparison.collectives}
        for run in range(runs):
            click.echo(f"  -R {register}: run {run + 1} of {runs}", err=True)
            for collective, *measured in compare(comparison, register, out / f"run{run + 1}"):
                tables[collective].append((measured[0], measured[1], measured[2]))
        for collective, runs_of_it in tables.items():
            for row in join_tables(collective, register, runs_of_it):
                rows.append(row)
                click.echo(format_row(row))
    arguments = {**options.arguments(), "binaries": str(binaries), "one_thread": one_thread, "ngpus": comparison.ngpus}
    arguments |= {"runs": runs, "again": again}
    record = RunRecord(
        "bench.nccl_tests", "measured", rows, started, utc_now(), arguments, environment=environ.snapshot(options.seed)
    )
    click.echo(f"record: {record.save(out / 'records')}", err=True)
    judge(rows)


def compare(comparison: Comparison, register: int, out: Path) -> Iterator[tuple[str, Table, Table, Table]]:
    """Measure with one way of registering; the JSON lies in `out`.

    Yields each collective with nccl-tests' table, ours, and nccl-tests' second one, which is empty without `again`.

    Raises:
        CheckFailed: nccl-tests ended with an error.
    """
    from bench.perf.measure import measure
    from bench.perf.table import nccl_tests_json

    here = replace(comparison, options=replace(comparison.options, local_register=register))
    out.mkdir(exist_ok=True)

    def run_peer(name: str) -> dict[str, Table]:
        tables: dict[str, Table] = {}
        for collective in here.collectives:
            file = out / f"{name}_{collective}_R{register}.json"
            file.unlink(missing_ok=True)
            _run_peer(here.peer_command(collective, file), file.with_suffix(".txt"))
            tables[collective] = read_json(file)
        return tables

    theirs = run_peer("nccl-tests")
    logs = out / "logs" / f"R{register}"
    records = measure(here.collectives, here.options, ranks=here.ngpus, log_dir=logs, backend="nccl")
    again = run_peer("nccl-tests-again") if here.again else {}
    for collective, record in zip(here.collectives, records, strict=True):
        file = out / f"netlayer_{collective}_R{register}.json"
        file.write_text(json.dumps(nccl_tests_json(record, [f"{collective}_perf"]), indent=1), encoding="utf-8")
        yield collective, theirs[collective], read_json(file), again.get(collective, {})


def read_json(file: Path) -> Table:
    """The JSON of `-J`, nccl-tests' or ours."""
    table = {}
    for result in json.loads(file.read_text(encoding="utf-8"))["results"]:
        for place in ("out_of_place", "in_place"):
            side = result[place]
            key = (int(result["size"]), place == "in_place")
            table[key] = Measured(float(side["time"]), float(side["bus_bw"]), float(side["nwrong"] or 0))
    return table


def join_tables(collective: str, register: int, runs: Sequence[tuple[Table, Table, Table]]) -> Iterator[Row]:
    """Yield a row a size and buffer (out of place, in place): medians of theirs and ours, and of ours over theirs.

    Each run is nccl-tests' table, ours, and nccl-tests' second one, which may be empty.
    """
    for key in sorted(set.intersection(*(theirs.keys() & ours.keys() for theirs, ours, _ in runs))):
        pairs = [(theirs[key], ours[key]) for theirs, ours, _ in runs]
        times = [own.time_us / peer.time_us for peer, own in pairs if peer.time_us]
        bandwidths = [own.bus_bw_gbs / peer.bus_bw_gbs for peer, own in pairs if peer.bus_bw_gbs]
        yield {
            "collective": collective,
            "register": register,
            "size_bytes": key[0],
            "in_place": key[1],
            "peer_us": median(peer.time_us for peer, _ in pairs),
            "our_us": median(own.time_us for _, own in pairs),
            "peer_bus_bw_gbs": median(peer.bus_bw_gbs for peer, _ in pairs),
            "our_bus_bw_gbs": median(own.bus_bw_gbs for _, own in pairs),
            "time_ratio": median(times) if times else None,
            "bus_bw_ratio": median(bandwidths) if bandwidths else None,
            "time_ratios": times,
            "bus_bw_ratios": bandwidths,
            "peer_again_ratios": [
                again[key].time_us / theirs[key].time_us
                for theirs, _, again in runs
                if key in again and theirs[key].time_us
            ],
            "wrong": sum(peer.wrong + own.wrong for peer, own in pairs),
        }


_HEAD = (
    "                                        us     GB/s      us     GB/s   time   busbw   (ours / theirs; time's runs)"
)


def format_row(row: Row) -> str:
    """One line of the table."""
    place = "in" if row["in_place"] else "out"
    figures = f"{row['peer_us']:10.2f} {row['peer_bus_bw_gbs']:7.2f} {row['our_us']:9.2f} {row['our_bus_bw_gbs']:7.2f}"
    ratios = " ".join("      -" if row[key] is None else f"{row[key]:7.3f}" for key in ("time_ratio", "bus_bw_ratio"))
    front = f"{row['collective']:<16} {row['register']:>2} {format_size(row['size_bytes']):>12}  {place:<3}"
    spread = f"   {min(row['time_ratios']):.3f}-{max(row['time_ratios']):.3f}" if len(row["time_ratios"]) > 1 else ""
    return f"{front} {figures} {ratios}{spread}"


def judge(rows: Sequence[Row]) -> None:
    """Hold ours against nccl-tests.

    Raises:
        CheckFailed: data was wrong, bandwidth is lower than the limit allows, or small calls take longer.
    """
    wrong = [row for row in rows if row["wrong"]]
    large = [row["bus_bw_ratio"] for row in rows if row["size_bytes"] >= LARGE_BYTES and row["bus_bw_ratio"]]
    small = [row["time_ratio"] for row in rows if row["size_bytes"] < LARGE_BYTES and row["time_ratio"]]
    least, middle = min(large, default=1.0), median(small) if small else 1.0
    again = [ratio for row in rows if row["size_bytes"] < LARGE_BYTES for ratio in row["peer_again_ratios"]]
    spread = median(abs(ratio - 1) for ratio in again) if again else 0.0
    click.echo(
        f"from 64 MiB: bus bandwidth at least {least:.3f} x nccl-tests'; below: time {middle:.3f} x, in the median"
        + (f" (nccl-tests again: {median(again):.3f} x, {spread:.1%} off in the median)" if again else "")
    )
    if wrong:
        raise CheckFailed(f"{len(wrong)} of {len(rows)} lines hold wrong data")
    if least < 1 - LIMIT or middle > 1 + LIMIT + spread:
        raise CheckFailed(f"not within {LIMIT:.0%} of nccl-tests: bandwidth {least:.3f} x, time {middle:.3f} x")


def _run_peer(line: Sequence[str], log: Path) -> None:
    with log.open("w", encoding="utf-8") as file:
        ended = subprocess.run(line, stdout=file, stderr=subprocess.STDOUT, timeout=_RUN_LIMIT_S, check=False)
    if ended.returncode:
        lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
        last_line = next((text for text in reversed(lines) if text.strip()), "it said nothing")
        raise CheckFailed(
            f"{Path(line[0]).name} of nccl-tests ended with {ended.returncode}: {last_line.strip()}; see {log}"
        )


def _check(comparison: Comparison) -> None:
    for collective in comparison.collectives:
        binary = comparison.binaries / f"{collective}_perf"
        if not os.access(binary, os.X_OK):
            rule = f"has no program {binary.name}"
            raise ConfigError("--binaries", comparison.binaries, rule, "give the build folder of NVIDIA/nccl-tests")
    gpus = _count_gpus()
    if comparison.ngpus > gpus or not gpus:
        raise HardwareMissing(f"-g {comparison.ngpus} GPUs were asked for, and this machine has {gpus}")


def _count_gpus() -> int:
    return len(environ.usable_gpus())


def _size(flag: str, text: str) -> int:
    try:
        return parse_size(text)
    except ValueError as exc:
        raise ConfigError(flag, text, "is not a size such as 8, 64K or 16M", "give one") from exc


if __name__ == "__main__":
    from netlayer.cli import run

    run(command, "python -m bench.nccl_tests")
