"""`python -m bench.accept_gpu`: acceptance on real GPUs of one host, healthy or with an injected fault of known size.

Runs healthy launches of `netlayer accept` like a user; repeats of the pairs phase in one launch, each with new
communicators; a pair that is slowed to a share of its speed, or has few thread blocks; and a GPU on which another
process computes for a share of the time. Each row has the suspects, and the distance of the nearest score from FAIL in
spreads. Not covered: real hardware faults.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from bench.accept.agents.faults import FaultKind, InjectedFault
from bench.accept.agents.fleet import Fleet
from bench.accept.agents.links import Link, start_local
from bench.accept.phases.gpu_speeds import measure_gpu_speeds
from bench.accept.phases.pairing import measure_pairs
from bench.accept.phases.trial import Trial
from bench.accept.phases.work import work_for
from bench.accept.run import Settings, members_of, worker_config
from netlayer import environ
from netlayer.environ import usable_gpus
from netlayer.errors import HardwareMissing
from netlayer.results import RunRecord, utc_now, write_text

_MIB = 1 << 20
_SPIKE_SIZES = (16 * _MIB, 64 * _MIB, 256 * _MIB, 1024 * _MIB)
_LAUNCH_S = 180.0
# Program that computes for a share of every period on one GPU, until its stdin is closed.
_LOAD = """
import sys, time, threading, torch
share, period_s = float(sys.argv[1]), 0.02
a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
threading.Thread(target=lambda: (sys.stdin.read(), __import__("os")._exit(0)), daemon=True).start()
torch.mm(a, a); torch.cuda.synchronize()
print("ready", flush=True)
last = None
while True:
    begin = time.perf_counter()
    while time.perf_counter() - begin < share * period_s:
        for _ in range(4):
            torch.mm(a, a)
        done = torch.cuda.Event()
        done.record()
        if last is not None:
            last.synchronize()  # of the four before: the GPU always has the next four to go on with
        last = done
    if share < 1:
        torch.cuda.synchronize()
    time.sleep(max(0.0, period_s - (time.perf_counter() - begin)))
"""
Rows = list[dict[str, Any]]


@click.command()
@click.option("--gpus", type=click.IntRange(2, 64), help="[default: all that are visible]")
@click.option("--spike", is_flag=True, help="Bandwidth and latency of the pair of GPUs 0 and 1 by message size.")
@click.option(
    "--ctas",
    multiple=True,
    type=click.IntRange(1, 64),
    help="With --spike: also with this many thread blocks; repeatable.",
)
@click.option(
    "--launches", type=click.IntRange(0, 1000), default=0, show_default=True, help="Launches on healthy GPUs."
)
@click.option("--only", multiple=True, metavar="PHASE", help="Phases of the launches. [default: all]")
@click.option(
    "--repeats", type=click.IntRange(0, 1000), default=0, show_default=True, help="Repeats within one launch."
)
@click.option(
    "--slow-pair", multiple=True, type=float, metavar="SHARE", help="Speed that a pair is slowed to; repeatable."
)
@click.option("--few-ctas", multiple=True, type=int, metavar="NUM", help="Thread blocks of a pair; repeatable.")
@click.option(
    "--slow-gpu",
    multiple=True,
    type=float,
    metavar="SHARE",
    help="Share of time that another process computes on a GPU; repeatable.",
)
@click.option("--each", type=click.IntRange(1, 100), default=10, show_default=True, help="Runs of each fault.")
@click.option(
    "--gib-ms",
    type=float,
    default=2.87,
    show_default=True,
    help="Milliseconds for 1 GiB between healthy GPUs, one way.",
)
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the record here.")
def command(
    gpus: int | None,
    launches: int,
    only: Sequence[str],
    repeats: int,
    each: int,
    json_file: Path | None,
    **fault_options: Any,
) -> None:
    """Run acceptance on healthy and faulty GPUs, one row a run. Exits 0 in any case: the report judges the rows."""
    num = gpus or len(usable_gpus())
    if num < 2 or len(usable_gpus()) < num:
        raise HardwareMissing(
            f"{num} GPUs: needs two at least, and as many as are asked for ({len(usable_gpus())} here)"
        )
    started, rows = utc_now(), list[dict[str, Any]]()

    def keep(row: dict[str, Any]) -> None:
        rows.append({**row, "gpus": num})
        click.echo(_line(row), err=True)

    with contextlib.suppress(KeyboardInterrupt):
        for number in range(launches):
            keep({"run": "launch", "number": number, **_launch(num, only)})
        if (
            fault_options["spike"]
            or repeats
            or any(fault_options[name] for name in ("slow_pair", "few_ctas", "slow_gpu"))
        ):
            with _agent(num) as link:
                trial = _start_trial(link, num)
                for row in itertools.chain(
                    _spike(trial, fault_options["ctas"]) if fault_options["spike"] else (),
                    _repeat(trial, repeats),
                    _faults(trial, each, fault_options),
                ):
                    keep(row)
    record = RunRecord(
        name="bench.accept_gpu",
        source="measured",
        rows=rows,
        started_utc=started,
        ended_utc=utc_now(),
        arguments={
            "gpus": num,
            "launches": launches,
            "only": list(only),
            "repeats": repeats,
            "each": each,
            **fault_options,
        },
        environment=environ.snapshot(),
    )
    if json_file:
        write_text(json_file, record.to_json())


@contextlib.contextmanager
def _agent(num: int) -> Iterator[Link]:
    with tempfile.TemporaryFile() as log:
        link = start_local(range(num), log)
        try:
            yield link
        finally:
            link.close()
            log.seek(0)
            if text := log.read()[-4000:].decode(errors="replace").strip():
                click.echo(f"the ranks' log ends:\n{text}", err=True)


def _start_trial(link: Link, num: int) -> Trial:
    """Start new workers and return a trial with them."""
    settings = Settings(members_of([("localhost", num)]), "nccl", work_for("nccl", None))
    fleet = Fleet([link], settings.work.form_s)
    trial = Trial(fleet, settings.members, settings.work, [member.rank for member in settings.members], dry_run=True)
    workers = {member.rank: worker_config(settings, member) for member in settings.members}
    if fleet.begin(workers, {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}, False):
        raise RuntimeError("the agent did not start")
    return trial


def _spike(trial: Trial, ctas: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Measure pair 0-1 at each size and at the automatic one, with one message a launch, and with few thread blocks."""
    for messages in (None, 1):
        for size in (*_SPIKE_SIZES, *([None] if messages is None else [])):
            args = {**trial.work.pairs, "bytes": size, "budget_s": 1.5, "repeats": 6, "only": [(0, 1)]}
            args |= {"messages": messages} if messages else {}
            began = time.monotonic()
            rows = trial.together("spike", "pairs", args, [(0, 1)], turns=False)
            seconds = time.monotonic() - began
            yield {
                "run": "spike",
                "asked_bytes": size,
                "messages": messages,
                "seconds": seconds,
                "pair": _short_rows(rows),
            }
    for few in ctas:
        args = {**trial.work.pairs, "bytes": 1024 * _MIB, "budget_s": 1.0, "only": [(0, 1)]}
        args["faults"] = [InjectedFault("ctas", (0, 1), few).to_json()]
        rows = trial.together("spike", "pairs", args, [(0, 1)], turns=False)
        yield {"run": "spike", "ctas": few, "pair": _short_rows(rows)}
    trial.together("spike", "pairs", {**trial.work.pairs, "bytes": _MIB, "faults": []}, [(0, 1)], turns=False)


def _line(row: Mapping[str, Any]) -> str:
    """Format a row for progress on stderr."""
    long = ("scores", "evidence", "phases_s", "pair")
    text = json.dumps(
        {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items() if key not in long}
    )
    if "pair" in row:
        text += "".join(
            f" {one['direction']} {one.get('bw_gbs', 0):.1f} GB/s {one['p50_us']:.2f} us" for one in row["pair"]
        )
    return text


def _short_rows(rows: Sequence[Mapping[str, Any]]) -> Rows:
    keys = ("direction", "size_bytes", "messages", "bw_gbs", "p50_us", "p99_us", "min_us", "host_us", "wrong")
    return [{key: row[key] for key in keys if key in row} for row in rows]


def _launch(num: int, only: Sequence[str]) -> dict[str, Any]:
    """Run `netlayer accept` as a subprocess, like a user, on the first visible GPUs."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.json"
        command = [
            sys.executable,
            "-m",
            "netlayer",
            "accept",
            "--backend",
            "nccl",
            "--ranks",
            str(num),
            "--json",
            str(file),
        ]
        for name in only:
            command += ["--only", name]
        began = time.monotonic()
        done = subprocess.run(command, capture_output=True, timeout=_LAUNCH_S, check=False, text=True)
        seconds = time.monotonic() - began
        if not file.exists():
            return {"exit": done.returncode, "seconds": seconds, "verdict": "none", "said": done.stderr[-1500:]}
        rows = json.loads(file.read_text())["rows"]
    scores = [row for row in rows if row["table"] == "score"]
    findings = [row for row in rows if row["table"] == "finding"]
    return {
        "exit": done.returncode, "seconds": seconds, "verdict": rows[0]["verdict"], "summary": rows[0]["summary"],
        "accused": [row for row in rows if row["table"] == "accused"],
        "unjudged": [[row["check"], row["figure"]] for row in findings if row["verdict"] == "NO VERDICT"],
        **_nearest(scores),
        "phases_s": _stage_seconds(done.stderr),
        "scores": _short_scores(scores),
        "evidence": [row for row in rows if row["table"] == "evidence"],
    }  # fmt: skip


def _stage_seconds(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()][-40:]


def _nearest(scores: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the score that is nearest to FAIL, and its distance."""
    if not scores:
        return {}
    nearest = min(scores, key=lambda one: one["spreads_from_fail"])
    return {
        "from_fail": nearest["spreads_from_fail"],
        "nearest": f"{nearest['phase']} {nearest['series']} {nearest['subject']}",
    }


def _short_scores(scores: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    keys = ("phase", "subject", "series", "number", "value", "share", "spread", "spreads_from_fail", "verdict")
    return [[round(one[key], 4) if isinstance(one[key], float) else one[key] for key in keys] for one in scores]


def _repeat(trial: Trial, repeats: int) -> Iterator[dict[str, Any]]:
    """Measure pairs repeatedly with the same workers; every series creates new communicators."""
    for number in range(repeats):
        fresh = _fresh(trial)
        began = time.monotonic()
        measure_pairs(fresh, _no_progress)
        yield {"run": "repeat", "number": number, "seconds": time.monotonic() - began, **_suspects_row(fresh)}


def _fresh(trial: Trial, **args: Any) -> Trial:
    """Return a trial of the same ranks without findings; `args` override arguments of the probes by name."""
    changed: dict[str, Any] = {name: {**getattr(trial.work, name), **more} for name, more in args.items()}
    work = replace(trial.work, **changed)
    return replace(trial, work=work, rows=[], findings=[], suspects=[], scores=[], evidence=[])


def _suspects_row(trial: Trial) -> dict[str, Any]:
    return {
        "accused": [[one.verdict, one.kind, list(one.ranks), one.phase] for one in trial.suspects],
        "unjudged": [[one.check, one.figure] for one in trial.findings if one.verdict == "NO VERDICT"],
        **_nearest(trial.scores),
        "scores": _short_scores(trial.scores),
    }


def _faults(trial: Trial, each: int, fault_options: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """Inject each fault several times into the same workers, on another pair each time or another GPU each grade."""
    num = len(trial.members)
    pairs = [(low, high) for low in range(num) for high in range(low + 1, num)]
    grades: list[tuple[str, FaultKind, float, float]]
    grades = [
        ("slow pair", "slowlink", share, fault_options["gib_ms"] * (1 / share - 1))
        for share in fault_options["slow_pair"]
    ]
    grades += [("few ctas", "ctas", few, few) for few in fault_options["few_ctas"]]
    for name, kind, grade, amount in grades:
        for number in range(each):
            pair = pairs[number % len(pairs)]
            fault = {"faults": [InjectedFault(kind, pair, amount).to_json()]}
            fresh = _fresh(trial, pairs={**fault, "bytes": 1024 * _MIB, "budget_s": 1.2})  # short, since there are many
            began = time.monotonic()
            measure_pairs(fresh, _no_progress)
            yield {"run": name, "grade": grade, "number": number, **_fault_row(fresh, pair, began)}
    if grades:
        trial.together("pairs", "pairs", {**trial.work.pairs, "bytes": _MIB, "faults": []}, [trial.alive], turns=False)
    for index, share in enumerate(fault_options["slow_gpu"]):
        rank = index % num
        with _load_on(rank, share):
            for number in range(each):
                fresh, began = _fresh(trial), time.monotonic()
                measure_gpu_speeds(fresh, "gemm", _no_progress)
                yield {"run": "slow gpu", "grade": share, "number": number, **_fault_row(fresh, (rank,), began)}


def _fault_row(trial: Trial, injected: tuple[int, ...], began: float) -> dict[str, Any]:
    verdicts = {one.ranks: one.verdict for one in trial.suspects}
    share = [one["share"] for one in trial.scores if one["subject"] == trial.label(injected)]
    return {
        "planted": list(injected), "verdict": verdicts.get(injected, "none"),
        "others": [list(ranks) for ranks in verdicts if ranks != injected],
        "share": min(share, default=None), "seconds": time.monotonic() - began, **_suspects_row(trial),
    }  # fmt: skip


@contextlib.contextmanager
def _load_on(gpu: int, share: float) -> Iterator[None]:
    """Run another process that computes on a GPU for a share of the time."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else [str(number) for number in range(gpu + 1)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": names[gpu]}
    command = [sys.executable, "-c", _LOAD, str(share)]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.kill()


def _no_progress(_done: int, _total: int, _text: str) -> None:
    """Discard progress."""


if __name__ == "__main__":
    from netlayer.cli import run as run_command

    run_command(command, "python -m bench.accept_gpu")
