"""`python -m bench.fault_matrix.healthy`: a healthy run with jitter, and whether anybody raises an alarm.

Ranks sleep now and then within their steps (each for itself, up to 0.3 s, in one step of twenty), and every some
seconds a rank or an executor is stopped for up to 1.2 s: a busy machine does as much. A restart, an eviction or a
suspension is a false alarm; what is only noted is counted.
"""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections import Counter
from pathlib import Path

import click
import psutil

from bench.fault_matrix.__main__ import text_folder
from bench.fault_matrix.job import FaultyJob, config_of
from netlayer import environ
from netlayer.command import RunOptions, run_options_without_config
from netlayer.errors import CheckFailed
from netlayer.launch.early_end import ending_at
from netlayer.results import RunRecord, utc_now
from trainer.resilience.journal import entries

_STEPS = 1_000_000  # it is stopped before
_START_S = 600.0


@click.command()
@run_options_without_config
@click.option("--minutes", type=click.FloatRange(0, min_open=True), default=30.0, show_default=True)
@click.option("--nodes", type=click.IntRange(2, 16), default=4, show_default=True, help="Nodes of one rank each.")
def main(options: RunOptions, minutes: float, nodes: int) -> None:
    """Train without faults and with jitter, and say what was found.

    \b
    Example:
      python -m bench.fault_matrix.healthy --out runs/healthy --minutes 30
    """
    started = utc_now()
    out = (options.out or Path("runs") / "healthy").absolute()
    out.mkdir(parents=True, exist_ok=True)
    config = config_of(nodes, _STEPS, text_folder(out), heartbeat_s=0.0)  # 0: the default, as the rest
    draw, stops = random.Random(options.seed), Counter[str]()
    job = FaultyJob(out / "run", config)
    with ending_at(signal.SIGTERM):
        job.start()
        try:
            job.wait(lambda facts: facts.get("state") == "run", _START_S, "the start")
            for node in job.facts["members"]:
                job.fault_inside(node, "jitter", sleep_s=0.3)
            end_s = time.monotonic() + 60 * minutes
            while time.monotonic() < end_s and job.facts["state"] == "run":
                time.sleep(draw.uniform(2.0, 15.0))
                stops[_stop_a_while(job, draw)] += 1
            steps = job.step
            job.folder.ask("stop")
            code = job.end(_START_S)
        finally:
            job.kill_all()
    facts = job.facts
    notes = Counter(entry["event"] for entry in entries(job.folder.journal) if entry["event"] in ("noted", "fault"))
    row = {
        "minutes": minutes, "steps": steps, "stops": dict(stops), "restarts": facts["restarts"], "exit_code": code,
        "evicted": facts["evicted"], "noted": notes["noted"], "suspended": notes["fault"],
    }  # fmt: skip
    RunRecord(
        name="bench.fault_matrix.healthy", source="measured", rows=[row], started_utc=started, ended_utc=utc_now(),
        arguments=options.arguments() | {"minutes": minutes, "nodes": nodes}, config=config.model_dump(mode="json"),
        environment=environ.snapshot(options.seed), devices=["CPU"],
    ).save(out / "records")  # fmt: skip
    click.echo(", ".join(f"{key} {value}" for key, value in row.items()))
    if code or row["restarts"] or row["evicted"] or row["suspended"]:
        raise CheckFailed(f"a run without faults was not left alone: {facts['reason'] or facts['evicted'] or code}")


def _stop_a_while(job: FaultyJob, draw: random.Random) -> str:
    """Stop a random rank or executor for up to 1.2 s; return which of the two it was."""
    node, what = draw.choice(job.facts["members"]), draw.choice(("rank", "executor"))
    with contextlib.suppress(psutil.Error, OSError, ValueError):
        for process in job.ranks(node) if what == "rank" else [job.executor(node)]:
            process.suspend()
            time.sleep(draw.uniform(0.2, 1.2))
            process.resume()
    return what


if __name__ == "__main__":
    from netlayer.cli import run

    run(main, "python -m bench.fault_matrix.healthy")
