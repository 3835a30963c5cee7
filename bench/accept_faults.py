"""`python -m bench.accept_faults`: detection rate of random faults injected into real ranks.

Each run draws a fault (slow, hang, corrupt, slow link, stopped in pulses), its location and size, and runs the phases
with new workers. Healthy runs share the machine with a process that uses a core in bursts; with `--busy`, all runs
share it with processes that load a core each. Not covered: hardware faults, and two faults at once.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import click

from bench.accept.agents.faults import FaultKind, InjectedFault
from bench.accept.agents.links import Link, start_local
from bench.accept.phases.work import work_for
from bench.accept.run import Settings, members_of, run
from bench.accept.run_output import sentence
from netlayer import environ
from netlayer.command import RunOptions, run_options_without_config
from netlayer.environ import usable_gpus
from netlayer.errors import CheckFailed
from netlayer.results import RunRecord, utc_now, write_text

_PHASES = ("gemm", "neighbours", "all_reduce", "pairs", "train")
_LINK_MS, _SHARED_LINK_MS = (5.0, 50.0), (40.0, 100.0)
"""Delay range of a slow link. Ranks that take turns on a GPU need 5 to 10 ms a message; four times that is slow."""
_KINDS: tuple[FaultKind, ...] = ("slow", "hang", "corrupt", "slowlink", "pulse")
# Both end with their parent, whatever ended it.
_BURSTS = """
import os, random, time
parent = os.getppid()
while os.getppid() == parent:
    end = time.perf_counter() + random.uniform(0.02, 0.2)
    while time.perf_counter() < end: pass
    time.sleep(random.uniform(0.05, 0.5))
"""
_BUSY = "import os; parent = os.getppid()\nwhile os.getppid() == parent: pass"


@click.command()
@run_options_without_config
@click.option("--runs", type=click.IntRange(0, 10_000), default=100, show_default=True, help="Runs with a fault each.")
@click.option("--healthy", type=click.IntRange(0, 10_000), default=20, show_default=True, help="Runs without a fault.")
@click.option("--ranks", type=click.IntRange(4, 64), default=8, show_default=True)
@click.option(
    "--backend",
    type=click.Choice(["gloo", "nccl"]),
    default="gloo",
    show_default=True,
    help="nccl: on virtual nodes; ranks share GPUs where these are fewer.",
)
@click.option(
    "--busy", type=click.IntRange(0, 64), default=0, show_default=True, help="Other processes that load a core."
)
@click.option(
    "--limit", "limit_s", type=click.FloatRange(1, 600), default=6.0, show_default=True, help="--limit of accept."
)
def command(options: RunOptions, runs: int, healthy: int, ranks: int, backend: str, busy: int, limit_s: float) -> None:
    """Inject faults, and count how often exactly the culprit is named.

    Exit 0: every culprit was named, and no other rank failed; 1: otherwise.
    """
    started = utc_now()
    rows: list[dict[str, Any]] = []
    try:
        with contextlib.ExitStack() as beside:
            for _ in range(busy):
                beside.enter_context(_noise(_BUSY))
            for row in measure(options.seed, runs, healthy, ranks, backend, limit_s):
                rows.append(row)
                click.echo(_line(row), err=True)
    except KeyboardInterrupt:
        click.echo(f"interrupted after {len(rows)} runs", err=True)
    record = RunRecord(
        name="bench.accept_faults",
        source="measured",
        rows=rows,
        started_utc=started,
        ended_utc=utc_now(),
        arguments={
            **options.arguments(),
            "runs": runs,
            "healthy": healthy,
            "ranks": ranks,
            "backend": backend,
            "busy": busy,
            "limit_s": limit_s,
        },
        environment=environ.snapshot(options.seed),
    )
    if options.json_file:
        write_text(options.json_file, record.to_json())
    if str(options.json_file) != "-":
        click.echo(table(rows))
    wrong = [row["run"] for row in rows if not row["right"]]
    if wrong or len(rows) < runs + healthy:
        raise CheckFailed(f"{len(rows) - len(wrong)} of {runs + healthy} runs judged right; wrong: runs {wrong[:20]}")


def measure(seed: int, runs: int, healthy: int, ranks: int, backend: str, limit_s: float) -> Iterator[dict[str, Any]]:
    """Yield one row for each run; kinds of fault alternate, with healthy runs in between."""
    total = runs + healthy
    shared_gpus = len(usable_gpus()) if backend == "nccl" else 0
    shared_gpus = shared_gpus if shared_gpus < ranks else 0
    with tempfile.TemporaryFile() as log:
        link = start_local(range(ranks), log)
        try:
            for number in range(total):
                is_healthy = (number + 1) * healthy // total > number * healthy // total
                draw = random.Random(f"{seed} {number}")
                fault = None if is_healthy else draw_fault(_KINDS[number % len(_KINDS)], ranks, draw, bool(shared_gpus))
                yield {"run": number, **_run_one(fault, ranks, backend, limit_s, link, shared_gpus)}
        finally:
            link.close()


def draw_fault(kind: FaultKind, ranks: int, draw: random.Random, shares_gpus: bool = False) -> InjectedFault:
    """Draw a fault of this kind at a random place, large enough to be detectable."""
    if kind == "slowlink":
        first, second = sorted(draw.sample(range(ranks), 2))
        return InjectedFault(kind, (first, second), draw.uniform(*_SHARED_LINK_MS if shares_gpus else _LINK_MS))
    amounts = {"slow": draw.uniform(0.2, 1.0), "hang": float(draw.randint(1, 12)), "corrupt": 1.0, "pulse": 18.0}
    amount = amounts[kind]
    return InjectedFault(kind, (draw.randrange(ranks),), amount)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Format the counts by kind of fault as a Markdown table."""
    lines = [
        "| fault | runs | named, nobody else | named | others accused | median s | longest s |",
        "|---|" + "---|" * 6,
    ]
    for kind in dict.fromkeys(row["fault"] for row in rows):
        part = [row for row in rows if row["fault"] == kind]
        times = sorted(row["seconds"] for row in part)
        counts = [sum(row[key] for row in part) for key in ("right", "named", "others")]
        cells = [kind, len(part), *counts, f"{times[len(times) // 2]:.1f}", f"{times[-1]:.1f}"]
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def _run_one(
    fault: InjectedFault | None, ranks: int, backend: str, limit_s: float, link: Link, shared_gpus: int
) -> dict[str, Any]:
    """Run an acceptance with one injected fault, or none, and return the row that says whether it was named."""
    members = members_of([("localhost", ranks)], 1)
    work = work_for(backend, limit_s, virtual_nodes=True, shares_gpus=bool(shared_gpus))
    settings = Settings(
        members, backend, work, [fault] if fault else [], _PHASES, virtual_nodes=True, shared_gpus=shared_gpus
    )
    link.began = False
    began = time.monotonic()
    with _noise(_BURSTS) if fault is None else contextlib.nullcontext():
        result = run(settings, [link])
    if result.stopped:
        raise KeyboardInterrupt
    suspects = {tuple(sorted(one.ranks)) for one in result.trial.suspects}
    failed = {tuple(sorted(one.ranks)) for one in result.trial.suspects if one.verdict == "FAIL"}
    injected = fault.ranks if fault else ()
    named = not fault or injected in suspects
    others = bool(failed - {injected})
    return {
        "fault": fault.kind if fault else "none",
        "ranks": list(injected),
        "amount": fault.amount if fault else 0.0,
        "named": named,
        "others": others,
        "right": named and not others and (fault is not None or not suspects),
        "accused": sorted(map(list, suspects)),
        "summary": sentence(result),
        "seconds": time.monotonic() - began,
    }


@contextmanager
def _noise(program: str) -> Iterator[None]:
    """Run a Python program as another process on this machine."""
    with subprocess.Popen([sys.executable, "-c", program], start_new_session=True) as process:
        try:
            yield
        finally:
            process.kill()


def _line(row: dict[str, Any]) -> str:
    word = "right" if row["right"] else "WRONG"
    what = f"{row['fault']} {row['ranks']} {row['amount']:.2g}"
    return f"run {row['run']}: {what}: {word}, {row['seconds']:.1f} s; {row['summary']}"


if __name__ == "__main__":
    from netlayer.cli import run as run_command

    run_command(command, "python -m bench.accept_faults")
