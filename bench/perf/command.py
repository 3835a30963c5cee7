"""Body of a `*_perf` binary: run, print the table row by row, write the files, judge."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import click

from bench.backends import BACKENDS, choose_backend
from bench.junit import junit
from bench.perf.collectives.collective import Collective
from bench.perf.driver import list_cases
from bench.perf.measure import join, measure
from bench.perf.options import MIN_BW_VARIABLE, Request
from bench.perf.table import (
    MIN_BW_SHARE,
    LiveTable,
    fast_enough,
    format_foot,
    mean_bus_bw,
    nccl_tests_json,
    num_failed,
)
from netlayer.environ import available_memory_bytes
from netlayer.errors import ConfigError, NetlayerError
from netlayer.launch.launcher import detect
from netlayer.results import RunRecord, write_text

_MOST_RANKS_A_CORE = 4
_START_S = 2.5  # of one core, to import torch and meet
_RANK_BYTES = 160 << 20  # private memory of a rank that has done nothing but import torch (2.13, CPU build)


def run_command(collective: Collective, request: Request) -> bool:
    """Measure one collective as asked; True where all data was right and the mean bandwidth suffices."""
    env = detect(os.environ)
    if env is not None and request.ngpus != 1:
        rule = f"{env.launcher} has started {env.world_size} ranks, one process each"
        raise ConfigError("-g / --ngpus", request.ngpus, rule, "omit it")
    backend = choose_backend(request.backend)
    ranks = request.ngpus if env is None else env.world_size
    # Rank 0 prints and writes. The others judge the same rows, so that all processes of a job end with one exit code.
    if env is not None and env.rank != 0:
        return _good(join([collective.name], request.options, env, backend=backend)[0])
    for note in list(_notes(collective, request, backend, ranks)):  # all of them first: what is refused says no more
        click.echo(f"note: {note}", err=True)
    table = LiveTable()
    with _json_place(request.json_file) as json_file:
        try:
            if env is None:
                record = _start_ranks(collective, request, backend, table)
            else:
                names, options = [collective.name], request.options
                [record] = join(names, options, env, backend=backend, on_start=table.start, on_row=table.add)
        except BaseException as exc:
            # Ctrl-C too: `-N 0` ends no other way, and what was measured until then is written.
            _save_partial(table, request, json_file, "interrupted" if isinstance(exc, KeyboardInterrupt) else str(exc))
            raise
        click.echo(format_foot(record), nl=False)
        _save(record, request, json_file)
    for line in _failures(record):
        click.echo(f"error: {line}", err=True)
    return _good(record)


def _save(record: RunRecord, request: Request, json_file: Path | None, stopped: str = "") -> None:
    """Write the record as the JSON, CSV and JUnit files that were requested; `stopped`: why the run ended early."""
    if json_file is not None:
        tree = nccl_tests_json(record) | ({"errors": [stopped]} if stopped else {})
        write_text(json_file, json.dumps(tree, indent=1) + "\n")
    if request.csv_file is not None:
        # A cell holds no list; -J has the times of single calls.
        flat = [{key: value for key, value in row.items() if key != "iterations_us"} for row in record.rows]
        replace(record, rows=flat).save_csv(request.csv_file)
    if request.junit_file is not None:
        write_text(request.junit_file, junit(record, stopped))


def _save_partial(table: LiveTable, request: Request, json_file: Path | None, stopped: str) -> None:
    """Write what a run measured before it was interrupted; `-N 0` ends no other way."""
    record = table.so_far()
    files = [str(file) for file in (json_file, request.csv_file, request.junit_file) if file is not None]
    if record is None or not files:
        return
    _save(record, request, json_file, stopped)
    click.echo(f"\nnote: interrupted; {len(record.rows) // 2} lines are in {' and '.join(files)}", err=True)


def _failures(record: RunRecord) -> Iterator[str]:
    """Why the command ends with 1: the table says FAILED, this says by how much."""
    if wrong := num_failed(record):
        yield f"{wrong} of {len(record.rows)} measurements hold wrong data"
    if fast_enough(record) is False:
        least = record.arguments["min_bw_gbs"]
        yield (
            f"mean bus bandwidth = {mean_bus_bw(record):.4g} GB/s: is below {MIN_BW_SHARE:g} x {MIN_BW_VARIABLE} = "
            f"{MIN_BW_SHARE * least:.4g} GB/s; find what is slow, or lower {MIN_BW_VARIABLE} = {least:g}"
        )


def _start_ranks(collective: Collective, request: Request, backend: str, table: LiveTable) -> RunRecord:
    log_dir = Path(tempfile.mkdtemp(prefix=f"{collective.name}_perf-"))
    try:
        [record] = measure(
            [collective.name],
            request.options,
            ranks=request.ngpus,
            log_dir=log_dir,
            backend=backend,
            on_start=table.start,
            on_row=table.add,
        )
    except NetlayerError:
        raise  # the ranks' logs stay: the error names one
    except BaseException:
        # No rank failed, so the logs explain nothing: a Ctrl-C, or an error while a row was printed.
        shutil.rmtree(log_dir)
        raise
    shutil.rmtree(log_dir)
    return record


def _good(record: RunRecord) -> bool:
    return num_failed(record) == 0 and fast_enough(record) is not False  # None: no least bandwidth was set


def _notes(collective: Collective, request: Request, backend: str, ranks: int) -> Iterator[str]:
    """Yield notes that a reader of the table needs and cannot see in it."""
    options = request.options
    if request.ngpus > 1:
        yield _starting(request.ngpus, backend)
    if request.backend is None:
        yield f"backend {backend}" + (": no GPU here" if backend == "gloo" else "")
    if not collective.reduces and options.op != "sum":
        yield f"-o {options.op} has no effect: {collective.name} reduces nothing"
    if not collective.has_root and options.root != 0:
        yield f"-r {options.root} has no effect: {collective.name} has no root"
    if backend == "gloo" and "NCCL_TESTS_DEVICE" in os.environ:
        yield "NCCL_TESTS_DEVICE has no effect: gloo runs on CPUs"
    cases, skipped = list_cases(collective, options, backend, ranks)
    yield from (f"omitted: {what}" for what in skipped)
    # Types and roots change nothing in how a call is made up: one note for all cases of an operator.
    for op in dict.fromkeys(case.op for case in cases):
        out, into = (BACKENDS[backend].emulation(collective.name, op, in_place) for in_place in (False, True))
        what = f"{collective.name} of {op}" if collective.reduces else collective.name
        if out:
            yield f"{what}{' out of place' * (out != into)} is emulated: {out}"
        if into and into != out:
            yield f"{what} in place is emulated: {into}"


def _starting(ranks: int, backend: str) -> str:
    """Say that ranks start, and what to expect where they are more than cores or memory allow."""
    text = f"starting {ranks} ranks"
    cores, free = os.cpu_count() or 1, available_memory_bytes()
    if backend == "gloo" and ranks > _MOST_RANKS_A_CORE * cores:
        text += f" on {cores} cores: they take turns, so that the start takes about {ranks * _START_S / cores:.0f} s"
    if ranks * _RANK_BYTES > free:
        needed = f"{ranks * _RANK_BYTES / 2**30:.0f} GiB"
        text += f"; torch alone takes about {needed} in them, and {free / 2**30:.0f} GiB are free: lower -g"
    return text


@contextmanager
def _json_place(requested: Path | None) -> Iterator[Path | None]:
    """Create a new file at the requested path, or next to it if it exists; remove it if nothing was measured."""
    if requested is None:
        yield None
        return
    if requested.suffix.lower() != ".json":
        raise ConfigError(
            "-J / --output_file", requested, "must end in .json", f"give {requested.with_suffix('.json').name}"
        )
    path, number = requested, 0
    while not _create(path):
        path, number = requested.with_name(f"{requested.name}.{number}"), number + 1
    click.echo(f"# Writing JSON output to {path}")
    try:
        yield path
    finally:
        # It was made before the run, so that a path which cannot be written fails early; empty it is no result.
        if path.stat().st_size == 0:
            path.unlink()


def _create(path: Path) -> bool:
    try:
        # Mode x looks and creates in one step: of two benches that start with the same FILE only one gets it.
        path.open("x").close()
    except FileExistsError:
        return False
    except OSError as exc:
        rule = f"cannot be written ({exc.strerror})"
        raise ConfigError("-J / --output_file", path, rule, "give a folder of yours") from exc
    return True
