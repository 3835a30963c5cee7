"""`python -m bench.page`: what it costs a browser to open the page of a run of 12,288 ranks and 100 steps, and to pan.

`netlayer observe serve` reads the run in a process of its own; a headless Chromium opens the page and is driven by
keys. Counted are the bytes that came over the wire, by the browser's own count, the time in which its main thread
ran scripts, and the tasks of more than 50 ms while the map of steps and a timeline are panned. Wall times stand
beside the load of the machine, and judge nothing.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import psutil

from bench.page.browser import Browser, Task
from bench.page.synthetic import Faults, write_run
from netlayer import environ
from netlayer.command import RunOptions, run_options_without_config
from netlayer.errors import CheckFailed
from netlayer.layout import ParallelLayout
from netlayer.observe.events import read_events
from netlayer.observe.readers.evidence_files import EVENTS, open_evidence, recognise
from netlayer.results import RunRecord, utc_now, write_text

MOST_BYTES = 5_000_000
MOST_SCRIPT_S = 1.5
LONG_MS = 50.0
_MOVES = 40
_READ_S = 900.0


@dataclass(frozen=True)
class Row:
    """One opening of the page.

    Args:
        ranks, steps, rows: of the run; rows of events.
        read_s, read_cpu_s: wall and processor time of the server until it serves.
        server_bytes: its memory then.
        opened_bytes, opened_script_s, opened_task_s, opened_s: bytes, scripts and all tasks of the main thread in
            processor time, and wall time until the heat map stands.
        all_bytes, all_script_s: until all six views were drawn once.
        longest_opening_ms: longest task until the heat map stands, in processor time.
        moves: panned, zoomed and scrolled in each view of `longest_ms`.
        longest_ms: longest task of the main thread by view while it is moved: wall time, processor time.
        long_tasks: those of more than 50 ms wall time, and those of as much processor time, in all views together.
        named: ranks that the findings at the top of the page name.
        load: of the machine, as it was measured.
    """

    ranks: int
    steps: int
    rows: int
    read_s: float
    read_cpu_s: float
    server_bytes: int
    opened_bytes: int
    opened_script_s: float
    opened_task_s: float
    opened_s: float
    longest_opening_ms: float
    all_bytes: int
    all_script_s: float
    moves: int
    longest_ms: dict[str, tuple[float, float]]
    long_tasks: tuple[int, int]
    named: list[str]
    load: float
    cores: int


@click.command()
@run_options_without_config
@click.option("--run", type=click.Path(path_type=Path), help="Folder of a run [default: a synthetic one is written].")
@click.option("--tp", type=click.IntRange(1), default=8, show_default=True, help="Of the synthetic run.")
@click.option("--pp", type=click.IntRange(1), default=8, show_default=True)
@click.option("--dp", type=click.IntRange(1), default=192, show_default=True)
@click.option("--steps", type=click.IntRange(10), default=100, show_default=True)
def command(options: RunOptions, run: Path | None, tp: int, pp: int, dp: int, steps: int) -> None:
    """Open the page of a run in a browser, draw its six views, pan, zoom and scroll in them, and count.

    Times of scripts and tasks are processor times of the page's main thread, by the browser's own clocks; wall times
    stand beside them. Exit 0: at most 5 MB until all views stand, 1.5 s of scripts, no task of more than 50 ms while a
    view is moved; 1: else; 3: there is no Chromium.

    \b
    Examples:
      python -m bench.page --json page.json
      python -m bench.page --dp 8 --steps 20
      python -m bench.page --run runs/a
    """
    started = utc_now()
    with tempfile.TemporaryDirectory(prefix="netlayer-page-") as folder:
        if run is None:
            run = Path(folder)
            layout = ParallelLayout(tp=tp, pp=pp, dp=dp)
            world = layout.world_size
            faults = Faults(straggler=world // 4 + 1, silent=world // 2 + 3, silent_step=steps)
            click.echo(f"writing {world:,} ranks, {steps} steps", err=True)
            write_run(run, layout, steps, faults, seed=options.seed)
        row = measure(run)
    record = RunRecord(
        name="bench.page",
        source="measured",
        rows=[asdict(row)],
        started_utc=started,
        ended_utc=utc_now(),
        arguments={**options.arguments(), "run": str(run), "tp": tp, "pp": pp, "dp": dp, "steps": steps},
        environment=environ.snapshot(options.seed),
    )
    if options.json_file:
        write_text(options.json_file, record.to_json())
    if str(options.json_file) != "-":
        click.echo("\n".join(describe(row)))
    missed = []
    if row.all_bytes > MOST_BYTES:
        missed.append(f"{row.all_bytes:,} bytes until all views stand, more than {MOST_BYTES:,}")
    if row.all_script_s > MOST_SCRIPT_S:
        missed.append(f"{row.all_script_s:.2f} s of scripts, more than {MOST_SCRIPT_S}")
    if row.long_tasks[1]:
        longest = max(cpu_ms for _, cpu_ms in row.longest_ms.values())
        missed.append(f"{row.long_tasks[1]} tasks of more than {LONG_MS:.0f} ms while moving, to {longest:.0f} ms")
    if missed:
        raise CheckFailed("; ".join(missed))


def describe(row: Row) -> Iterator[str]:
    """Yield a row in words."""
    yield (
        f"{row.ranks:,} ranks, {row.steps} steps, {row.rows:,} rows: read in {row.read_cpu_s:.1f} core-seconds "
        f"({row.read_s:.0f} s), {row.server_bytes / 2**30:.1f} GiB"
    )
    yield (
        f"opened: {row.opened_bytes / 1e6:.2f} MB, {row.opened_script_s:.2f} s of scripts of {row.opened_task_s:.2f} s "
        f"of the main thread (processor), {row.opened_s:.1f} s wall; longest task {row.longest_opening_ms:.0f} ms; "
        f"all views: {row.all_bytes / 1e6:.2f} MB, {row.all_script_s:.2f} s of scripts"
    )
    by_view = ", ".join(f"{view} {cpu:.0f} ({wall:.0f})" for view, (wall, cpu) in row.longest_ms.items())
    yield (
        f"{row.moves} moves in each: longest task by processor (wall) in ms: {by_view}; over {LONG_MS:.0f} ms: "
        f"{row.long_tasks[1]} by processor, {row.long_tasks[0]} by wall; load {row.load:.1f} on {row.cores} cores"
    )
    yield from (f"named: {line}" for line in row.named)


def count_rows(run: Path) -> int:
    """Return the number of events in a run's files."""
    num = 0
    for path in open_evidence(run).files:
        if recognise(path)[0] == EVENTS:
            num += sum(batch.num_rows for batch in read_events(path).batches())
        else:
            num += sum(1 for _ in open_evidence(path))
    return num


def measure(run: Path) -> Row:
    """Serve a run, open its page and use it."""
    with serving(run) as (url, process, read_s), Browser() as browser:
        usage = process.cpu_times()
        read_cpu_s, memory = usage.user + usage.system, process.memory_info().rss
        with browser.tasks() as opening:
            begin_s = time.monotonic()
            browser.open(url)
            opened_s = time.monotonic() - begin_s
        opened_bytes, metrics = browser.transferred(), browser.metrics()
        named = browser.evaluate(
            "[...document.querySelectorAll('.findings > .card')].map((card) => card.innerText.replace(/\\s+/g, ' '))"
        )
        for key in "23456":
            browser.press(key)
            browser.settle()
        all_bytes, all_script_s = browser.transferred(), browser.metrics()["ScriptDuration"]
        moved = {name: _move(browser, key) for key, name in _MOVED.items()}
        problems = browser.problems()
        facts = browser.evaluate("document.querySelector('.subtitle').textContent")
    if problems:
        raise CheckFailed(f"the page says: {problems[0]}")
    numbers = [int(part.split()[0].replace(",", "")) for part in facts.split(" · ") if part[0].isdigit()]
    return Row(
        ranks=numbers[0],
        steps=numbers[-1],
        rows=count_rows(run),
        read_s=read_s,
        read_cpu_s=read_cpu_s,
        server_bytes=memory,
        opened_bytes=opened_bytes,
        opened_script_s=metrics["ScriptDuration"],
        opened_task_s=metrics["TaskDuration"],
        opened_s=opened_s,
        longest_opening_ms=max((task.cpu_ms for task in opening), default=0.0),
        all_bytes=all_bytes,
        all_script_s=all_script_s,
        moves=_MOVES,
        longest_ms={
            name: (max(task.wall_ms for task in tasks), max(task.cpu_ms for task in tasks))
            for name, tasks in moved.items()
        },
        long_tasks=(
            sum(task.wall_ms > LONG_MS for tasks in moved.values() for task in tasks),
            sum(task.cpu_ms > LONG_MS for tasks in moved.values() for task in tasks),
        ),
        named=named,
        load=os.getloadavg()[0],
        cores=os.cpu_count() or 1,
    )


_MOVED = {"1": "heat map", "2": "steps", "3": "timeline", "4": "parallelism", "5": "counters"}
"""Views that are moved in: by arrow keys, and where they can be by zooming and panning; all are scrolled."""


def _move(browser: Browser, view: str) -> list[Task]:
    """Show a view, zoom in, pan, scroll; return the tasks of the main thread."""
    browser.press(view)
    browser.settle()
    frame = "new Promise((done) => requestAnimationFrame(() => done(true)))"
    with browser.tasks() as tasks:
        for _ in range(2):
            browser.press("+")
        for number in range(_MOVES):
            keys = ("ArrowRight", "ArrowDown", "ArrowLeft", "ArrowUp")
            browser.press(keys[number // 5 % 4], shift=view in "23")
            if number % 8 == 0:
                browser.evaluate(f"scrollBy(0, {200 if number % 16 else -200})")
            browser.evaluate(frame)
        for _ in range(2):
            browser.press("-")
        browser.settle()
    return tasks


@contextmanager
def serving(run: Path) -> Iterator[tuple[str, psutil.Process, float]]:
    """Have `netlayer observe serve` serve a run: its address, its process, and how long it read."""
    begin_s = time.monotonic()
    command = [sys.executable, "-m", "netlayer", "observe", "serve", str(run), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stderr is not None
    try:
        url = process.stdout.readline().strip()
        if not url.startswith("http://"):
            process.wait(30)
            raise CheckFailed(f"observe serve: {process.stderr.read().strip().splitlines()[-1:]}")
        yield url, psutil.Process(process.pid), time.monotonic() - begin_s
    finally:
        process.terminate()
        process.wait(30)
        process.stdout.close()
        process.stderr.close()


if __name__ == "__main__":
    from netlayer.cli import run

    run(command, "python -m bench.page")
