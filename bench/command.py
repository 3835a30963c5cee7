"""What a `*_perf` binary does with its options: run, print the table as it comes, write the files, judge."""

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
from bench.collective import Collective
from bench.driver import list_cases
from bench.measure import join, measure
from bench.options import Request
from bench.table import fast_enough, format_foot, format_head, format_row, nccl_tests_json, num_failed
from netlayer.errors import ConfigError, NetlayerError
from netlayer.launch import detect
from netlayer.results import Row, RunRecord, write_text


def run_command(collective: Collective, request: Request) -> bool:
    """Measure one collective as asked; True where all data was right and the mean bandwidth suffices."""
    env = detect(os.environ)
    if env is not None and request.ngpus != 1:
        rule = f"{env.launcher} has started {env.world_size} ranks, one process each"
        raise ConfigError("-g / --ngpus", request.ngpus, rule, "leave it out")
    backend = choose_backend(request.backend)
    ranks = request.ngpus if env is None else env.world_size
    if env is not None and env.rank != 0:
        return _good(join([collective.name], request.options, env, backend=backend)[0])
    for note in _notes(collective, request, backend, ranks):
        click.echo(f"note: {note}", err=True)
    with _json_place(request.json_file) as json_file:
        if env is not None:
            [record] = join([collective.name], request.options, env, backend=backend, on_start=_head, on_row=_row)
        else:
            record = _start_ranks(collective, request, backend)
        click.echo(format_foot(record), nl=False)
        if json_file is not None:
            write_text(json_file, json.dumps(nccl_tests_json(record), indent=1) + "\n")
    if request.csv_file is not None:
        flat = [{key: value for key, value in row.items() if key != "iterations_us"} for row in record.rows]
        replace(record, rows=flat).save_csv(request.csv_file)
    return _good(record)


def _start_ranks(collective: Collective, request: Request, backend: str) -> RunRecord:
    log_dir = Path(tempfile.mkdtemp(prefix=f"{collective.name}_perf-"))
    try:
        [record] = measure(
            [collective.name],
            request.options,
            ranks=request.ngpus,
            log_dir=log_dir,
            backend=backend,
            on_start=_head,
            on_row=_row,
        )
    except NetlayerError:
        raise  # the ranks' logs stay: the error names one
    except BaseException:
        shutil.rmtree(log_dir)
        raise
    shutil.rmtree(log_dir)
    return record


def _head(record: RunRecord) -> None:
    click.echo(format_head(record), nl=False)


def _row(record: RunRecord, row: Row) -> None:
    click.echo(format_row(row, record), nl=False)  # click flushes, so a person sees each figure when it is there


def _good(record: RunRecord) -> bool:
    return num_failed(record) == 0 and fast_enough(record) is not False


def _notes(collective: Collective, request: Request, backend: str, ranks: int) -> Iterator[str]:
    """What a reader of the table must know and cannot see there."""
    options = request.options
    if request.backend is None:
        yield f"backend {backend}" + (": no GPU here" if backend == "gloo" else "")
    if not collective.reduces and options.op != "sum":
        yield f"-o {options.op} has no effect: {collective.name} reduces nothing"
    if not collective.has_root and options.root != 0:
        yield f"-r {options.root} has no effect: {collective.name} has no root"
    if backend == "gloo" and "NCCL_TESTS_DEVICE" in os.environ:
        yield "NCCL_TESTS_DEVICE has no effect: gloo runs on CPUs"
    cases, skipped = list_cases(collective, options, backend, ranks)
    yield from (f"left out: {what}" for what in skipped)
    for op in dict.fromkeys(case.op for case in cases):
        out, into = (BACKENDS[backend].emulation(collective.name, op, in_place) for in_place in (False, True))
        what = f"{collective.name} of {op}" if collective.reduces else collective.name
        if out:
            yield f"{what}{' out of place' * (out != into)} is emulated: {out}"
        if into and into != out:
            yield f"{what} in place is emulated: {into}"


@contextmanager
def _json_place(asked: Path | None) -> Iterator[Path | None]:
    """A new file at the path asked for, or beside it where there is one; removed again where nothing was measured."""
    if asked is None:
        yield None
        return
    if asked.suffix.lower() != ".json":
        raise ConfigError("-J / --output_file", asked, "must end in .json", f"give {asked.with_suffix('.json').name}")
    path, number = asked, 0
    while not _create(path):
        path, number = asked.with_name(f"{asked.name}.{number}"), number + 1
    click.echo(f"# Writing JSON output to {path}")
    try:
        yield path
    finally:
        if path.stat().st_size == 0:
            path.unlink()


def _create(path: Path) -> bool:
    try:
        path.open("x").close()
    except FileExistsError:
        return False
    except OSError as exc:
        rule = f"cannot be written ({exc.strerror})"
        raise ConfigError("-J / --output_file", path, rule, "give a folder of yours") from exc
    return True
