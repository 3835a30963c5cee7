"""`python -m bench.fault_matrix`: faults of many kinds, several in a row in each run, and what became of them.

Each run has real processes: a driver, an executor a node, and gloo ranks that train a tiny model. A fault is *handled*
if the run goes on past the step of the fault without a hand laid on it, and *right* if the incident blames the node
that had it, and no other (for a fault of no node: if none is blamed). When a run is over its losses are compared, step
by step and to the bit, with those of a run without faults. Rows are kept as they come: the same command goes on.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import math
import random
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
import psutil

from bench.fault_matrix.job import HARDWARE_LINES, FaultyJob, Lost, Row, config_of
from bench.fault_matrix.network import Network, enter
from bench.fault_matrix.rows import FaultRow
from netlayer import environ
from netlayer.command import RunOptions, run_options_without_config
from netlayer.errors import CheckFailed
from netlayer.launch.early_end import Ended, ending_at
from netlayer.results import RunRecord, utc_now, write_text

_LIMIT_S = 240.0
_KNOWN_STEPS = 150  # before a rank can be slow: who has never restarted has nothing else to compare with
KINDS: dict[str, str] = {
    "kill": "SIGKILL of a rank",
    "stop": "SIGSTOP of a rank",
    "exception": "exception in a rank",
    "nan": "loss that is no number, on one rank",
    "slow": "rank that sleeps in each step",
    "kill_executor": "SIGKILL of a node's executor",
    "freeze_node": "SIGSTOP of a node's executor and ranks",
    "hardware": "line of a hardware fault in a node's kernel log",
    "checkpoint": "damaged checkpoint, then SIGKILL of a rank",
    "store": "SIGKILL of the run's Redis",
    "driver": "SIGKILL of the driver",
    **{
        f"driver_{state}": f"SIGKILL of a rank, and of the driver as soon as it is in the state {state}"
        for state in ("suspend", "diagnose", "gather", "verify", "start")
    },
    "two": "SIGKILL of ranks of two nodes at once",
    "in_recovery": "SIGKILL of a rank, and of another one while the first is repaired",
    "abort": "SIGABRT of a rank, raised by itself",
    "flip": "a stuck bit in a rank's copy of the parameters",
    "disk": "the run's disk full, for 15 s",
    "cut": "a host's network cut",
    "flap": "a host's link down for 0.6 s, four times in 10 s",
}
_NO_INCIDENT = ("store", "driver")
_MAYBE_INCIDENT = ("disk", "flap")
"""Kinds that a run may get over with or without a restart; no other node may be blamed."""
_NETWORK = ("cut", "flap")
_DEFAULT = tuple(kind for kind in KINDS if kind not in (*_NETWORK, "disk"))


@click.command()
@run_options_without_config
@click.option("--kinds", default=",".join(_DEFAULT), show_default=True, help="Faults, comma-separated.")
@click.option("--cases", type=click.IntRange(1), default=26, show_default=True, help="Faults in all.")
@click.option("--chain", type=click.IntRange(1), default=5, show_default=True, help="Faults in a row in one run.")
@click.option("--nodes", type=click.IntRange(2, 16), default=4, show_default=True, help="Nodes of one rank each.")
@click.option("--steps", type=click.IntRange(100), default=900, show_default=True, help="Steps of each run.")
@click.option(
    "--spares", type=click.IntRange(0, 16), default=1, show_default=True, help="Standby nodes; not --network."
)
@click.option("--network", "is_network", is_flag=True, help="Nodes are network namespaces, over ssh; needs root.")
@click.option("--backend", type=click.Choice(("gloo", "nccl")), default="gloo", show_default=True)
@click.option(
    "--slow-share", type=click.FloatRange(0), default=4.0, show_default=True, help="Sleep of a slow rank, in steps."
)
@click.option(
    "--slow-factor",
    type=click.FloatRange(1, min_open=True),
    default=2.0,
    show_default=True,
    help="job.resilience.slow_factor.",
)
@click.option(
    "--heartbeat", type=click.FloatRange(0.1, 60), default=1.0, show_default=True, help="job.resilience.heartbeat_s."
)
@click.option(
    "--survivors",
    type=click.Choice(("restart", "keep")),
    default="restart",
    show_default=True,
    help="job.resilience.survivors.",
)
@click.option(
    "--end-early", is_flag=True, help="Stop each run after its last fault; losses are compared as far as they go."
)
@click.option(
    "--limit",
    "limit_s",
    type=click.FloatRange(0),
    default=0.0,
    help="End all of it after so many seconds, with a record of the faults that are through by then; 0: no limit.",
)
@click.option(
    "--minutes",
    type=click.FloatRange(0),
    default=0.0,
    help="Begin no further run after so long, nor, with --end-early, inject a further fault; 0: no end.",
)
def main(
    options: RunOptions,
    kinds: str,
    cases: int,
    chain: int,
    nodes: int,
    steps: int,
    spares: int,
    is_network: bool,
    backend: str,
    slow_share: float,
    slow_factor: float,
    heartbeat: float,
    survivors: str,
    end_early: bool,
    limit_s: float,
    minutes: float,
) -> None:
    """Inject faults into runs of `netlayer run`, and say what became of them.

    \b
    Examples:
      python -m bench.fault_matrix --out runs/faults
      python -m bench.fault_matrix --out runs/faults --cases 200        # goes on where it was ended
      python -m bench.fault_matrix --kinds kill,stop --cases 4
      python -m bench.fault_matrix --cases 100 --chain 100 --steps 9000 --end-early   # one job, 100 faults in a row
      python -m bench.fault_matrix --kinds kill --cases 9 --chain 9 --steps 9000 --end-early --limit 100
      python -m bench.fault_matrix --kinds disk --cases 2               # as root: a file system of its own
      python -m bench.fault_matrix --backend nccl --kinds slow --cases 1 --slow-share 0.1 --slow-factor 1.05
      python -m bench.fault_matrix --network --kinds cut,flap --chain 2 --cases 4
    """
    importlib.import_module("tokenizers")  # which every rank needs: said now, and not after the first start
    started, begin_s = utc_now(), time.time()
    chosen = _chosen(kinds, is_network=is_network)
    if is_network:
        enter()
    out = (options.out or Path("runs") / "fault_matrix").absolute()
    out.mkdir(parents=True, exist_ok=True)
    plan = _plan(chosen, cases, options.seed)
    text = text_folder(out, 50 if backend == "gloo" else 2000)
    bounds: dict[str, Any] = {
        "slow_factor": slow_factor,
        "slow_steps": 10,
        "slow_floor_s": 15.0,
        "silence_floor_s": 20.0,
    }
    bounds |= {"heartbeat_s": heartbeat, "survivors": survivors}
    config = config_of(nodes, steps, text, backend, spares=spares, **bounds)
    rows = _rows(out)
    ends_s = (begin_s + 60 * minutes if minutes else math.inf) if end_early else None
    # A cut takes a host away for good: each fault has one to spare.
    hosts = closing(Network(out / "network", nodes + chain)) if is_network else nullcontext()
    with _bounded(limit_s), hosts as network:  # at its end a run is ended, too
        if network is not None:
            over_ssh = config.job.resilience.model_copy(update={"backend": "ssh", "spares": chain})
            store = config.job.store.model_copy(update={"url": network.url})
            job = config.job.model_copy(update={"resilience": over_ssh, "store": store})
            config = config.model_copy(update={"job": job})
        if not end_early:  # first, for what is amiss without faults needs no faults
            _healthy(out, config, network, steps)
        while len(rows) < len(plan) and not (minutes and time.time() - begin_s > 60 * minutes):
            number, own = _next_run(rows, chain, end_early)
            part = plan[len(rows) : len(rows) + chain - len(own)]
            draw = random.Random(f"{options.seed} {number}" + (f" {len(own)}" if own else ""))
            before = rows[: len(rows) - len(own)]

            def keep(new: Sequence[FaultRow], before: Sequence[FaultRow] = before) -> None:
                _write_rows(out, [*before, *(replace(row, losses_equal=0, losses=1) for row in new)])

            folder = out / f"run-{number}"
            new, losses = _run(folder, config, part, number, draw, network, slow_share, ends_s, keep, own)
            last_step = max(losses, default=0) if end_early else steps
            # The run without faults may fail, or be ended: until then no loss counts as equal.
            _write_rows(out, [*before, *(replace(row, losses_equal=0, losses=len(losses)) for row in new)])
            healthy = _healthy(out, config, network, last_step)
            equal = [losses.get(step) == loss for step, loss in healthy.items() if step <= last_step]
            rows = [*before, *(replace(row, losses_equal=sum(equal), losses=len(equal)) for row in new)]
            _write_rows(out, rows)
    rows = _rows(out)  # of a run that was ended, too
    if not rows:
        raise CheckFailed(f"no fault was through within --limit {limit_s:g} s")
    table = summary(rows)
    record = RunRecord(
        name="bench.fault_matrix",
        source="measured",
        rows=[row.to_row() for row in rows],
        started_utc=started,
        ended_utc=utc_now(),
        arguments=options.arguments()
        | {
            "kinds": kinds,
            "cases": cases,
            "chain": chain,
            "nodes": nodes,
            "steps": steps,
            "spares": spares,
            "network": is_network,
        }
        | {"backend": backend, "slow_share": slow_share, "slow_factor": slow_factor, "heartbeat": heartbeat}
        | {"end_early": end_early, "survivors": survivors, "limit": limit_s},
        config=config.model_dump(mode="json"),
        environment=environ.snapshot(options.seed) | {"seconds": time.time() - begin_s},
        devices=["CPU"] if backend == "gloo" else [gpu.name for gpu in environ.list_gpus()],
    )
    record.save(out / "records")
    if options.json_file:
        write_text(options.json_file, record.to_json())
    click.echo("\n".join(table), err=str(options.json_file) == "-")
    bad = [row for row in rows if not row.handled]
    if bad:
        raise CheckFailed(f"{len(bad)} of {len(rows)} faults were not handled alone")


def _chosen(kinds: str, *, is_network: bool) -> list[str]:
    chosen = kinds.split(",")
    unknown = [kind for kind in chosen if kind not in KINDS]
    if unknown:
        raise click.BadParameter(f"{', '.join(unknown)}: one of {', '.join(KINDS)}", param_hint="--kinds")
    if not is_network and set(chosen) & set(_NETWORK):
        raise click.BadParameter(f"{', '.join(_NETWORK)} need --network", param_hint="--kinds")
    return chosen


@contextlib.contextmanager
def _bounded(limit_s: float) -> Iterator[None]:
    """End the block at SIGTERM, and without an error after so many seconds (0: never); what it has kept stays."""
    try:
        with ending_at(signal.SIGTERM, signal.SIGALRM):
            # Counted from the process's start: imports may take long on a busy machine.
            since_s = time.time() - psutil.Process().create_time()
            signal.setitimer(signal.ITIMER_REAL, max(limit_s - since_s, 0.1) if limit_s else 0.0)
            yield
    except Ended as exc:
        if exc.code != 128 + signal.SIGALRM:
            raise
        line = f"ended at --limit {limit_s:g} s: losses of the run that was under way are compared with none"
        click.echo(line, err=True)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def _write_rows(out: Path, rows: Sequence[FaultRow]) -> None:
    write_text(out / "rows.jsonl", "".join(json.dumps(row.to_row()) + "\n" for row in rows))


def _next_run(rows: Sequence[FaultRow], chain: int, end_early: bool) -> tuple[int, list[FaultRow]]:
    """Return the number of the next run and the rows that it has already: of one that was stopped, and goes on."""
    number = max((row.run for row in rows), default=-1)
    own = [row for row in rows if row.run == number]
    if any(row.kind == "disk" for row in own):  # its file system went with it
        return number + 1, []
    if end_early and own and own[-1].handled and own[-1].exit_code == 0 and len(own) < chain:
        return number, own
    return number + 1, []


def _plan(kinds: Sequence[str], cases: int, seed: int) -> list[str]:
    """Kinds in random order, each as often as the others."""
    plan: list[str] = []
    shuffled = random.Random(seed)
    while len(plan) < cases:
        order = list(kinds)
        shuffled.shuffle(order)
        plan += order
    return plan[:cases]


def text_folder(out: Path, num_lines: int = 50) -> Path:
    """Write sentences that a tiny model can learn."""
    folder, draw = out / "text", random.Random(0)
    folder.mkdir(exist_ok=True)
    for number in range(40):
        lines = [
            f"the {draw.choice(('rank', 'link', 'switch'))} {draw.choice(('sends', 'drops', 'holds'))} "
            f"{draw.randrange(100)} bytes\n"
            for _ in range(num_lines)
        ]
        (folder / f"file{number:02}.txt").write_text("".join(lines), encoding="utf-8")
    return folder


def _healthy(out: Path, config: Any, network: Network | None, until: int) -> dict[int, float]:
    """Losses of a run without faults, up to this step at least; also that nothing was found in it."""
    file = out / "healthy.json"
    if file.exists():
        known = {int(step): loss for step, loss in json.loads(file.read_text(encoding="utf-8")).items()}
        if max(known, default=0) >= until:
            return known
    folder = out / "healthy"
    while folder.exists():
        folder = folder.with_name(folder.name + "-again")
    if network is not None:
        network.restore_all()  # of faults before
    job = FaultyJob(folder, config, network=network)
    try:
        job.start()
        limit_s = until * 2.0 + _LIMIT_S
        if until < config.job.optimizer.steps:
            job.wait(lambda _facts: job.step >= until, limit_s, "the run without faults", poll_s=0.5)
            job.folder.ask("stop")
        code = job.end(limit_s)
    finally:
        job.kill_all()
    facts = job.facts
    if code or facts["restarts"] or facts["evicted"]:
        raise CheckFailed(f"a run without faults: exit code {code}, {facts['restarts']} restarts, {facts['evicted']}")
    losses = job.losses()
    file.write_text(json.dumps(losses), encoding="utf-8")
    return losses


def _run(
    folder: Path,
    config: Any,
    kinds: Sequence[str],
    number: int,
    draw: random.Random,
    network: Network | None,
    slow_share: float,
    ends_s: float | None,
    keep: Callable[[Sequence[FaultRow]], None],
    before: Sequence[FaultRow],
) -> tuple[list[FaultRow], dict[int, float]]:
    """Inject faults into one run, one after the other, and return a row for each, and the run's losses by step.

    Args:
        ends_s: seconds since 1970 from when on no further fault is injected; the run is stopped after its last one.
            None: it goes on to its last step.
        keep: gets the rows of the run after each fault.
        before: rows of the run, where it was stopped and goes on.
    """
    while folder.exists() and not before:
        folder = folder.with_name(folder.name + "-again")
    if network is not None:
        network.restore_all()
    job = FaultyJob(folder, config, network=network, own_disk="disk" in kinds)
    rows = list(before)
    job.start()
    try:
        for kind in kinds:
            rows.append(replace(_case(job, kind, draw, slow_share), run=number))
            click.echo(f"{len(rows):>3} of {len(before) + len(kinds)}  {_line(rows[-1])}", err=True)
            keep(rows)
            if not rows[-1].handled or (ends_s is not None and time.time() > ends_s):
                break
        if ends_s is not None:
            job.folder.ask("stop")
        code = job.end(config.job.optimizer.steps * 2.0 + _LIMIT_S) if rows[-1].handled else -1
        job.kill_all()
        losses, facts, incidents, seconds = job.losses(), job.facts, job.incidents(), job.seconds()
    finally:
        job.kill_all()
        job.close(folder.with_name(f"{folder.name}-logs"))
    # What a run has decided beyond what the faults account for: a false alarm, or what a busy machine does.
    accounted = {number for row in rows for number in row.incidents or ()}
    unasked = [
        {"kind": each["decision"]["kind"], "action": each["decision"]["action"], "evicted": each["decision"]["evict"]}
        for number, each in incidents.items()
        if number not in accounted
    ]
    share = facts["furthest_step"] * facts["step_ms"] / 1e3 / seconds
    rows = [replace(row, exit_code=code, unasked=unasked, effective_share=round(share, 4)) for row in rows]
    return rows, losses


def _case(job: FaultyJob, kind: str, draw: random.Random, slow_share: float) -> FaultRow:
    """Inject one fault, and wait until the run is past it."""
    row = FaultRow(kind)
    try:
        base = _KNOWN_STEPS if kind == "slow" and not job.facts.get("step_ms") else job.step
        job.wait(
            lambda facts: facts.get("state") == "run" and _is_steady(job, base, draw), _LIMIT_S, "before the fault"
        )
        facts = job.facts
        last, step = _last_number(facts), job.step
        first, second = draw.sample(_candidates(kind, facts), 2)
        row = replace(row, step=step, nodes=_expected(kind, first, second))
        at_s = time.time()
        _inject(job, kind, first, second, draw, slow_share * job.typical_s)
        if kind in (*_NO_INCIDENT, *_MAYBE_INCIDENT):
            job.wait(lambda facts: facts["state"] == "run" and job.step > step + 40, _LIMIT_S, "after the fault")
        else:
            last_of_fault = last + (2 if kind in ("checkpoint", "in_recovery") else 1)

            def is_past(facts: Row) -> bool:
                return _last_number(facts) >= last_of_fault and "caught_up_s" in facts["incidents"][-1]

            job.wait(is_past, _LIMIT_S, "after the fault")
        new = [each for each in job.facts["incidents"] if each["number"] > last]
        blamed = sorted({node for each in new for node in each["decision"]["nodes"]})
        row = replace(
            row,
            handled=True,
            blamed=blamed,
            right=_is_right(kind, blamed, sorted(row.nodes)),
            actions=[each["decision"]["action"] for each in new],
            incidents=[each["number"] for each in new],
            found_as=[each["decision"]["kind"] for each in new],
        )
        if new:
            row = replace(
                row,
                detect_s=round(new[0]["detected_s"] - at_s, 3),
                diagnose_s=round(new[0]["diagnosed_s"] - new[0]["detected_s"], 3),
                resume_s=round(new[-1]["resumed_s"] - new[0]["diagnosed_s"], 3),
                catch_up_s=round(new[-1]["caught_up_s"] - at_s, 3),
            )
    except Lost as exc:
        row = replace(row, error=str(exc))
    return row


def _last_number(facts: Row) -> int:
    """Number of the last incident that was decided; of so many, the facts hold the newest hundred only."""
    return int(facts["incidents"][-1]["number"]) if facts["incidents"] else 0


def _candidates(kind: str, facts: Row) -> list[str]:
    """Nodes that may get a fault: a rank that is slow on two nodes in a row counts as the job's, not the nodes'."""
    slow = {rank for each in facts["incidents"] for rank in each["decision"].get("ranks", ())}
    rest = [node for rank, node in enumerate(facts["members"]) if rank not in slow]
    return rest if kind == "slow" and len(rest) > 1 else facts["members"]


def _is_steady(job: FaultyJob, base: int, draw: random.Random) -> bool:
    """Past a checkpoint of its own, and a random number of steps: a fault may come anywhere."""
    return job.step >= max(base, 45) + draw.randrange(10, 40)


def _is_right(kind: str, blamed: list[str], expected: list[str]) -> bool:
    return blamed == expected or (kind in _MAYBE_INCIDENT and set(blamed) <= set(expected))


def _expected(kind: str, first: str, second: str) -> list[str]:
    if kind in _NO_INCIDENT or kind == "disk":
        return []
    return [first, second] if kind in ("two", "in_recovery") else [first]


def _inject(job: FaultyJob, kind: str, first: str, second: str, draw: random.Random, sleep_s: float) -> None:
    """Bring about one fault, on the first node, and where the kind has two, on the second."""
    simple: dict[str, Callable[[], None]] = {
        "kill": lambda: job.kill_ranks(first),
        "two": lambda: job.kill_ranks(first, second),
        "stop": lambda: job.stop_rank(first),
        "exception": lambda: job.fault_inside(first, "exception"),
        "nan": lambda: job.fault_inside(first, "nan"),
        "slow": lambda: job.fault_inside(first, "slow", sleep_s=sleep_s),
        "kill_executor": lambda: job.kill_executor(first),
        "freeze_node": lambda: job.freeze_node(first),
        "hardware": lambda: job.hardware_line(first, draw.choice(HARDWARE_LINES)),
        "abort": lambda: job.fault_inside(first, "abort"),
        "flip": lambda: job.fault_inside(first, "flip"),
        "disk": lambda: job.fill_disk(15.0),
        "cut": lambda: job.cut_network(first),
        "flap": lambda: job.flap_link(first),
        "store": job.kill_store,
        "driver": job.kill_driver,
    }
    if kind in simple:
        simple[kind]()
        return
    last = _last_number(job.facts)
    job.kill_ranks(first)
    if kind == "checkpoint":
        # Once no rank is left that could save another one, and before the next ones look for the newest.
        job.wait(lambda facts: facts["state"] in ("diagnose", "gather", "verify"), _LIMIT_S, "the suspension")
        job.damage_checkpoint()
    if kind.startswith("driver_"):
        state = kind.removeprefix("driver_")

        def is_there(facts: Row) -> bool:  # or past it: a state may last a tenth of a second
            return facts["state"] == state or (_last_number(facts) > last and facts["state"] == "run")

        job.wait(is_there, _LIMIT_S, f"the state {state}", poll_s=0.002)
        job.kill_driver()
    if kind == "in_recovery":

        def is_starting(facts: Row) -> bool:
            return _last_number(facts) > last and facts["state"] == "start" and bool(job.ranks(second))

        job.wait(is_starting, _LIMIT_S, "the first repair")
        job.kill_ranks(second)


def _rows(out: Path) -> list[FaultRow]:
    file = out / "rows.jsonl"
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return [FaultRow.from_row(json.loads(line)) for line in lines]


def _line(row: FaultRow) -> str:
    outcome = "handled" if row.handled else f"LOST ({row.error})"
    blame = f"{', '.join(row.nodes) or 'no node'}; blamed {', '.join(row.blamed) or 'none'}"
    stages = {"detect": row.detect_s, "diagnose": row.diagnose_s, "resume": row.resume_s}
    times = ", ".join(f"{stage} {seconds:.1f} s" for stage, seconds in stages.items() if seconds is not None)
    return f"{row.kind:<14} {outcome}; {blame}: {'right' if row.right else 'WRONG'}; {times}"


def summary(rows: Sequence[FaultRow]) -> list[str]:
    """Return a table with a line a kind: how many were handled and blamed right, and times, median and longest."""
    lines = [f"{'fault':<14} {'handled':>8} {'right':>7}   detect s       diagnose s     resume s"]
    for kind in dict.fromkeys(row.kind for row in rows):
        own = [row for row in rows if row.kind == kind]
        handled, right, num = sum(row.handled for row in own), sum(row.right for row in own), len(own)
        cells = [f"{kind:<14} {handled:>4}/{num:<3} {right:>3}/{num:<3}"]
        for each in ([row.detect_s for row in own], [row.diagnose_s for row in own], [row.resume_s for row in own]):
            times = [seconds for seconds in each if seconds is not None]
            cells.append(f"{statistics.median(times):6.1f} {max(times):6.1f}" if times else f"{'-':>6} {'-':>6}")
        lines.append("  ".join(cells))
    runs = {row.run: row for row in rows}.values()
    equal = sum(row.has_equal_losses for row in runs)
    lines.append(f"{sum(row.handled for row in rows)} of {len(rows)} handled, {sum(row.right for row in rows)} right")
    lines.append(f"{equal} of {len(runs)} runs have the losses of a run without faults, to the bit")
    return lines


if __name__ == "__main__":
    from netlayer.cli import run

    run(main, "python -m bench.fault_matrix")
