"""`python -m bench.accept_gpu`: acceptance on real GPUs of one host, healthy ones and ones with a fault of known size.

Healthy launches of `netlayer accept` as a user starts it; repeats of pairs and speeds in one launch, each with new
communicators; a pair that is slowed by a share, or has few thread blocks; a GPU on which another process computes for a
share of the time. Each row says who was accused, and how far the nearest score was from FAIL, in spreads. Left out:
faults in hardware.
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

from bench.accept.fleet import Fleet
from bench.accept.gpu_speeds import measure_gpu_speeds
from bench.accept.links import Link, start_local
from bench.accept.pairing import measure_pairs
from bench.accept.plant import Plant, PlantKind
from bench.accept.run import Settings, members_of, worker_config
from bench.accept.trial import Trial
from bench.accept.work import work_for
from netlayer import environ
from netlayer.environ import usable_gpus
from netlayer.errors import HardwareMissing
from netlayer.results import RunRecord, utc_now, write_text

_MIB = 1 << 20
_SPIKE_SIZES = (16 * _MIB, 64 * _MIB, 256 * _MIB, 1024 * _MIB)
_LAUNCH_S = 180.0
# Computes for a share of every period on one GPU, until its input ends.
_BESIDE = """
import sys, time, threading, torch
share, period_s = float(sys.argv[1]), 0.02
a = torch.randn(4096, 4096, device="cuda", dtype=torch.bfloat16)
threading.Thread(target=lambda: (sys.stdin.read(), __import__("os")._exit(0)), daemon=True).start()
torch.mm(a, a); torch.cuda.synchronize()
print("ready", flush=True)
while True:
    begin = time.perf_counter()
    while time.perf_counter() - begin < share * period_s:
        for _ in range(4):
            torch.mm(a, a)
        torch.cuda.synchronize()
    time.sleep(max(0.0, period_s - (time.perf_counter() - begin)))
"""
Rows = list[dict[str, Any]]


@click.command()
@click.option("--gpus", type=click.IntRange(2, 64), help="[default: all that are visible]")
@click.option("--spike", is_flag=True, help="Bandwidth and latency of the pair of GPUs 0 and 1 by size of messages.")
@click.option("--ctas", multiple=True, type=click.IntRange(1, 64), help="The same with so many thread blocks.")
@click.option("--launches", type=click.IntRange(0, 1000), default=0, show_default=True, help="Of healthy GPUs.")
@click.option("--only", multiple=True, metavar="PHASE", help="Of the launches. [default: all]")
@click.option("--repeats", type=click.IntRange(0, 1000), default=0, show_default=True, help="Within one launch.")
@click.option(
    "--slow-pair", multiple=True, type=float, metavar="SHARE", help="Speed that a pair is slowed to; repeatable."
)
@click.option(
    "--few-ctas", multiple=True, type=int, metavar="NUM", help="Thread blocks that a pair is left; repeatable."
)
@click.option(
    "--slow-gpu", multiple=True, type=float, metavar="SHARE", help="Time that another process computes on one."
)
@click.option("--each", type=click.IntRange(1, 100), default=10, show_default=True, help="Runs of each fault.")
@click.option("--gib-ms", type=float, default=2.87, show_default=True, help="Of a GiB between healthy GPUs, one way.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the record here.")
def command(
    gpus: int | None, launches: int, only: Sequence[str], repeats: int, each: int, json_file: Path | None, **asked: Any
) -> None:
    """Healthy and faulty GPUs, each run a row. Exit 0 whatever they say: it is the report that judges."""
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
        if asked["spike"] or repeats or any(asked[name] for name in ("slow_pair", "few_ctas", "slow_gpu")):
            with _agent(num) as link:
                trial = _begin(link, num)
                for row in itertools.chain(
                    _spike(trial, asked["ctas"]) if asked["spike"] else (),
                    _repeat(trial, repeats),
                    _faults(trial, each, asked),
                ):
                    keep(row)
    record = RunRecord(
        name="bench.accept_gpu",
        source="measured",
        rows=rows,
        started_utc=started,
        ended_utc=utc_now(),
        arguments={"gpus": num, "launches": launches, "only": list(only), "repeats": repeats, "each": each, **asked},
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


def _begin(link: Link, num: int) -> Trial:
    """Fresh workers, and a trial of them."""
    settings = Settings(members_of([("localhost", num)]), "nccl", work_for("nccl", None))
    fleet = Fleet([link], settings.work.form_s)
    trial = Trial(fleet, settings.members, settings.work, [member.rank for member in settings.members], drill=True)
    workers = {member.rank: worker_config(settings, member) for member in settings.members}
    if fleet.begin(workers, {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}, False):
        raise RuntimeError("the agent did not start")
    return trial


def _spike(trial: Trial, ctas: Sequence[int]) -> Iterator[dict[str, Any]]:
    """The pair 0-1: each size alone, then the size that is found by itself; a message a launch; few thread blocks."""
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
                "pair": _in_short(rows),
            }
    for few in ctas:
        args = {**trial.work.pairs, "bytes": 1024 * _MIB, "budget_s": 1.0, "only": [(0, 1)]}
        args["plants"] = [Plant("ctas", (0, 1), few).to_json()]
        rows = trial.together("spike", "pairs", args, [(0, 1)], turns=False)
        yield {"run": "spike", "ctas": few, "pair": _in_short(rows)}
    trial.together("spike", "pairs", {**trial.work.pairs, "bytes": _MIB, "plants": []}, [(0, 1)], turns=False)


def _line(row: Mapping[str, Any]) -> str:
    """What is worth a look while it runs."""
    long = ("scores", "evidence", "phases_s", "pair")
    text = json.dumps(
        {key: round(value, 3) if isinstance(value, float) else value for key, value in row.items() if key not in long}
    )
    if "pair" in row:
        text += "".join(
            f" {one['direction']} {one.get('bw_gbs', 0):.1f} GB/s {one['p50_us']:.2f} us" for one in row["pair"]
        )
    return text


def _in_short(rows: Sequence[Mapping[str, Any]]) -> Rows:
    keys = ("direction", "size_bytes", "messages", "bw_gbs", "p50_us", "p99_us", "min_us", "host_us", "wrong")
    return [{key: row[key] for key in keys if key in row} for row in rows]


def _launch(num: int, only: Sequence[str]) -> dict[str, Any]:
    """As a user starts it, on the first GPUs that are visible."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "run.json"
        words = [
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
            words += ["--only", name]
        began = time.monotonic()
        done = subprocess.run(words, capture_output=True, timeout=_LAUNCH_S, check=False, text=True)
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
        "scores": _scores_in_short(scores),
        "evidence": [row for row in rows if row["table"] == "evidence"],
    }  # fmt: skip


def _stage_seconds(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip()][-40:]


def _nearest(scores: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The score that is nearest to FAIL, and how far off it is."""
    if not scores:
        return {}
    least = min(scores, key=lambda one: one["spreads_from_fail"])
    return {
        "from_fail": least["spreads_from_fail"],
        "nearest": f"{least['phase']} {least['series']} {least['subject']}",
    }


def _scores_in_short(scores: Sequence[Mapping[str, Any]]) -> list[list[Any]]:
    keys = ("phase", "subject", "series", "number", "value", "share", "spread", "spreads_from_fail", "verdict")
    return [[round(one[key], 4) if isinstance(one[key], float) else one[key] for key in keys] for one in scores]


def _repeat(trial: Trial, repeats: int) -> Iterator[dict[str, Any]]:
    """Pairs again and again with the same workers; every series of theirs makes its own communicators."""
    for number in range(repeats):
        fresh = _fresh(trial)
        began = time.monotonic()
        measure_pairs(fresh, _silent)
        yield {"run": "repeat", "number": number, "seconds": time.monotonic() - began, **_told(fresh)}


def _fresh(trial: Trial, **args: Any) -> Trial:
    """A trial of the same ranks, with nothing found yet; `args` replace some of the work's."""
    changed: dict[str, Any] = {name: {**getattr(trial.work, name), **more} for name, more in args.items()}
    work = replace(trial.work, **changed)
    return replace(trial, work=work, rows=[], findings=[], accused=[], scores=[], evidence=[])


def _told(trial: Trial) -> dict[str, Any]:
    return {
        "accused": [[one.verdict, one.kind, list(one.ranks), one.phase] for one in trial.accused],
        "unjudged": [[one.check, one.figure] for one in trial.findings if one.verdict == "NO VERDICT"],
        **_nearest(trial.scores),
        "scores": _scores_in_short(trial.scores),
    }


def _faults(trial: Trial, each: int, asked: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The ranks live on from fault to fault; the pair, or GPU, is another one each time, or for each grade."""
    num = len(trial.members)
    pairs = [(low, high) for low in range(num) for high in range(low + 1, num)]
    grades: list[tuple[str, PlantKind, float, float]]
    grades = [("slow pair", "slowlink", share, asked["gib_ms"] * (1 / share - 1)) for share in asked["slow_pair"]]
    grades += [("few ctas", "ctas", few, few) for few in asked["few_ctas"]]
    for name, kind, grade, amount in grades:
        for number in range(each):
            pair = pairs[number % len(pairs)]
            fault = {"plants": [Plant(kind, pair, amount).to_json()]}
            fresh = _fresh(trial, pairs={**fault, "bytes": 1024 * _MIB, "budget_s": 1.2})  # short, for there are many
            began = time.monotonic()
            measure_pairs(fresh, _silent)
            yield {"run": name, "grade": grade, "number": number, **_judged(fresh, pair, began)}
    if grades:
        trial.together("pairs", "pairs", {**trial.work.pairs, "bytes": _MIB, "plants": []}, [trial.alive], turns=False)
    for at, share in enumerate(asked["slow_gpu"]):
        rank = at % num
        with _beside(rank, share):
            for number in range(each):
                fresh, began = _fresh(trial), time.monotonic()
                measure_gpu_speeds(fresh, "gemm", _silent)
                yield {"run": "slow gpu", "grade": share, "number": number, **_judged(fresh, (rank,), began)}


def _judged(trial: Trial, planted: tuple[int, ...], began: float) -> dict[str, Any]:
    accused = {one.ranks: one.verdict for one in trial.accused}
    share = [one["share"] for one in trial.scores if one["subject"] == trial.label(planted)]
    return {
        "planted": list(planted), "verdict": accused.get(planted, "none"),
        "others": [list(ranks) for ranks in accused if ranks != planted],
        "share": min(share, default=None), "seconds": time.monotonic() - began, **_told(trial),
    }  # fmt: skip


@contextlib.contextmanager
def _beside(gpu: int, share: float) -> Iterator[None]:
    """Another process that computes on a GPU for a share of the time."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    names = visible.split(",") if visible else [str(number) for number in range(gpu + 1)]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": names[gpu]}
    command = [sys.executable, "-c", _BESIDE, str(share)]
    with subprocess.Popen(command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            yield
        finally:
            process.kill()


def _silent(_done: int, _total: int, _words: str) -> None:
    """Progress that nobody watches."""


if __name__ == "__main__":
    from netlayer.cli import run as run_command

    run_command(command, "python -m bench.accept_gpu")
