"""`netlayer simulate`: a scenario by name, or flows of a file over a fabric of a file, under one law or several."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netlayer.errors import CheckFailed, ConfigError
from netlayer.results import check_target, write_text

if TYPE_CHECKING:
    import pandas as pd

    from congestion.scenario_catalogue import Case
    from congestion.settings import Settings
    from congestion.simulate import Outcome, Progress
    from netlayer.output import Output
    from netlayer.progress import Bar

_PATH = click.Path(path_type=Path)
_OURS = "congestion"
_STDOUT = Path("-")
_PS_PER_US = 1_000_000
_COLUMNS = {
    "cc": "law",
    "flows": "flows",
    "ended": "ended",
    "completion_s": "completion",
    "fct_median_s": "FCT median",
    "fct_p99_s": "p99",
    "fct_p999_s": "p99.9",
    "fct_max_s": "max",
    "slowdown_median": "slowdown median",
    "slowdown_p99": "p99",
    "goodput_bps": "goodput",
    "jain": "Jain",
    "pauses": "pauses",
    "pause_share": "paused",
    "ecn_marked": "marks",
    "drops": "drops",
    "retransmissions": "resent",
    "max_queue_bytes": "largest queue",
}


@click.command()
@click.argument("scenario", required=False)
@click.option("--topo", type=_PATH, help="The fabric: HPCC's topo.txt, or what `topology import` reads in one file.")
@click.option("--flows", "flow_file", type=_PATH, help="The flows on it: HPCC's flow.txt.")
@click.option("--cm", "cm_file", type=_PATH, help="htsim's connection matrix, on its fat tree: 100G, 1 us a link.")
@click.option("--fabric", help="star | dumbbell | clos | fat-tree [default: the one that suits the scenario].")
@click.option("--config", type=_PATH, help="TOML file of the cluster and job of job-phases; see examples/.")
@click.option("--cc", default="dcqcn", show_default=True, metavar="LAW[,LAW...]", help="Control laws, or one's file.")
@click.option(
    "--preset", default="ns3", show_default=True, help="Switch, NIC and law: ns3, ns3-paper, htsim-roce, htsim-swift."
)
@click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True, help="Seed of all randomness.")
@click.option("--set", "overrides", multiple=True, metavar="A.B=VALUE", help="Override one value; repeatable.")
@click.option(
    "--threads", type=click.IntRange(1, 1024), default=1, show_default=True, help="They change the time alone."
)
@click.option(
    "--backend",
    type=click.Choice(["cpu", "gpu"]),
    default="cpu",
    show_default=True,
    help="Where; results are the same.",
)
@click.option("--truncate-ns", is_flag=True, help="Cut serialisation times to whole ns, as ns-3 does.")
@click.option("--out", type=_PATH, help="Folder for flows and ports as CSV and parquet, and the record.")
@click.option("--until-us", type=click.FloatRange(0, min_open=True), help="Stop at this simulated time.")
@click.option(
    "--sample-us", type=click.FloatRange(0, min_open=True), help="With --out: rates and queues over time, samples.csv."
)
@click.option("--checkpoint", type=_PATH, help="Where a run that is stopped before its end is kept; of one law.")
@click.option("--resume", type=_PATH, help="Go on with a run that --checkpoint kept; all else as then.")
@click.option(
    "--json", "json_file", type=_PATH, help="Where all of it goes as JSON; - is stdout, where files are given."
)
@click.option("--list", "listed", is_flag=True, help="List scenarios and fabrics with what --set changes, and end.")
def simulate(
    scenario: str | None,
    topo: Path | None,
    flow_file: Path | None,
    cm_file: Path | None,
    fabric: str | None,
    config: Path | None,
    cc: str,
    preset: str,
    seed: int,
    overrides: tuple[str, ...],
    out: Path | None,
    json_file: Path | None,
    listed: bool,
    **how: Any,
) -> None:
    """Simulate flows packet by packet; exit 1 where one did not end (its fct_ns is null).

    LAW is none, dcqcn, swift, nscc, hybrid, or a file (see netlayer arena --help). Ctrl-C keeps what was measured.

    SCENARIO is one of incast, permutation, flap, all-to-all, ring-all-reduce, victim, poisson, job-phases. Without one,
    flows come from files, and the JSON goes to stdout unless --json or --out says otherwise.

    \b
    Examples:
      netlayer simulate incast --set scenario.senders=32 --cc none,dcqcn
      netlayer simulate all-to-all --set scenario.ranks=64 --set scenario.rounds=true --out runs/rounds
      netlayer simulate permutation --fabric fat-tree --set fabric.bps=100G --set congestion.ecn=false
      netlayer simulate job-phases --set scenario.phases=all-gather+pipeline --set scenario.bucket_bytes=16MiB
      netlayer simulate flap --set scenario.link=leaf0,spine1 --set congestion.timeout_us=200
      netlayer simulate victim --set congestion.classes.1.weight=2 --set scenario.victim_pg=1
      netlayer simulate --topo topo.txt --flows flow.txt --cc none,dcqcn --seed 3 --json result.json
      netlayer simulate incast --sample-us 10 --out runs/incast --cc dcqcn,hybrid
      netlayer simulate permutation --cc my_law.py --until-us 500 --checkpoint half.npz
      netlayer simulate --list
    """
    from congestion.settings import settings_of
    from netlayer.progress import Stages

    if listed:
        _print_list()
        return
    if json_file is None and scenario is None and out is None:
        json_file = _STDOUT
    check_target("--json", json_file)
    laws = [read_law(name) for name in cc.split(",")]
    _check_how(laws, out, how)
    mine = tuple(one for one in overrides if one.split(".")[0] == _OURS)
    settings = settings_of(preset, mine)
    others = tuple(one for one in overrides if one not in mine)
    case = _case(scenario, topo, flow_file, cm_file, fabric, config, others, seed)
    with contextlib.ExitStack() as stack:
        kept = _Kept(stack, out)
        runs: list[dict[str, Any]] = []
        with Stages() as stages:
            for law in laws:
                with stages.open(law) as bar:
                    outcome, samples = _simulate(case, settings, law, seed, bar, how)
                kept.add(law, case, outcome, samples)
                if json_file:
                    asked = {"cc": law, "preset": preset, "seed": seed, "source": "simulated"}
                    runs.append({**asked, **outcome.to_json(case.fabric, case.flows)})
                if outcome.interrupted:
                    break
        if json_file:
            write_text(json_file, json.dumps(runs[0] if len(runs) == 1 else {"runs": runs}, indent=1) + "\n")
        arguments = {"scenario": scenario or "", "preset": preset, "seed": seed, "set": list(overrides), "cc": cc}
        kept.publish(arguments, {**case.config, _OURS: settings.model_dump(mode="json")}, seed)
    with contextlib.redirect_stdout(sys.stderr if json_file == _STDOUT else sys.stdout):
        _print_rows(kept.rows)
    for row in kept.rows:
        if row["ended"] < row["flows"] and (row["completed"] or not how["until_us"]):
            left = f"{row['flows'] - row['ended']} of {row['flows']} flows did not end"
            raise CheckFailed(f"{row['cc']}: {left}: {_cause(row)}")


def _cause(row: Mapping[str, Any]) -> str:
    """Why flows of a run did not end."""
    if row["deadlock"]:
        return f"PFC deadlock, each link waits for the next: {row['deadlock']}"
    if not row["completed"]:
        return "interrupted"
    return "their last packets were lost (congestion.timeout_us is 0), or their retries ran out"


def _check_how(laws: Sequence[str], out: Path | None, how: Mapping[str, Any]) -> None:
    if how["sample_us"] and not out:
        raise ConfigError(
            "--sample-us", how["sample_us"], "has no effect without --out", "give a folder for samples.csv"
        )
    for option in ("checkpoint", "resume"):
        if how[option] and len(laws) != 1:
            raise ConfigError(f"--{option}", how[option], f"is of one law, --cc names {len(laws)}", "give one law")
    check_backend(how["backend"])
    if how["checkpoint"] and not how["checkpoint"].absolute().parent.is_dir():
        raise ConfigError("--checkpoint", how["checkpoint"], "is in no folder that exists", "make the folder first")


def check_backend(backend: str) -> None:
    """
    Raises:
        HardwareMissing: it is `gpu`, and there is none.
    """
    if backend == "gpu":
        from congestion.engine.gpu.runs import check_device

        check_device()


def _simulate(
    case: Case, settings: Settings, law: str, seed: int, bar: Bar, how: Mapping[str, Any]
) -> tuple[Outcome, pd.DataFrame | None]:
    from congestion.engine.tables import NEVER
    from congestion.jit import are_kept
    from congestion.samples import Samples
    from congestion.simulate import Simulation

    if how["backend"] == "gpu":
        click.echo("compiling the simulator's kernels for the GPU: about a minute", err=True)
    elif not are_kept():
        click.echo("compiling the simulator's kernels: about a minute, once for this version", err=True)
    backend = "gpu" if how["backend"] == "gpu" else "numba"
    shared = {"truncate_ns": how["truncate_ns"], "threads": how["threads"], "backend": backend}
    simulation = Simulation(case.fabric, case.flows, settings, law, seed=seed, flaps=case.flaps, **shared)
    if how["resume"]:
        simulation.restore(how["resume"])
    samples, every_us = Samples(), how["sample_us"]
    outcome = simulation.run(
        round(how["until_us"] * _PS_PER_US) if how["until_us"] else NEVER,
        partial(say_progress, bar),
        samples.take if every_us else None,
        round(every_us * _PS_PER_US) if every_us else NEVER,
    )
    if how["checkpoint"] and not outcome.completed:
        simulation.save(how["checkpoint"])
        click.echo(f"kept: {how['checkpoint']}; go on with --resume {how['checkpoint']}", err=True)
    return outcome, samples.frame() if every_us else None


def say_progress(bar: Bar, progress: Progress) -> None:
    """What a person who waits sees: simulated time, speed, remaining time at the speed so far."""
    share, wall_s = progress.done_packets / progress.num_packets, max(progress.wall_s, 1e-9)
    left = f", {wall_s * (1 / share - 1):.0f} s left" if share else ""
    speed = f"{progress.link_hops / wall_s / 1e6:.1f} M link-hops/s"
    bar(progress.done_packets, progress.num_packets, f"{progress.time_ps / 1e9:.3f} ms simulated, {speed}{left}")


class _Kept:
    """Rows of each law for the table, and their frames for `--out`."""

    def __init__(self, stack: contextlib.ExitStack, out: Path | None) -> None:
        from netlayer.output import open_output
        from netlayer.results import utc_now

        self.rows: list[dict[str, Any]] = []
        self._started = utc_now()
        self._out: Output | None = stack.enter_context(open_output(out, "simulate")) if out else None
        self._frames: dict[str, list[pd.DataFrame]] = {"flows": [], "ports": [], "samples": []}

    def add(self, law: str, case: Case, outcome: Outcome, samples: pd.DataFrame | None) -> None:
        from congestion import measures

        flows = measures.flow_frame(case.fabric, case.flows, outcome)
        ports = measures.port_frame(case.fabric, outcome)
        own = {"completed": outcome.completed, "wall_s": outcome.wall_s}
        self.rows.append({"cc": law, **measures.summary(flows, ports), **own})
        if self._out:
            for name, frame in (("flows", flows), ("ports", ports), ("samples", samples)):
                if frame is not None:
                    frame.insert(0, "cc", law)
                    self._frames[name].append(frame)

    def publish(self, arguments: Mapping[str, Any], config: Mapping[str, Any], seed: int) -> None:
        if not self._out:
            return
        import pandas as pd

        from netlayer.environ import snapshot
        from netlayer.results import RunRecord, utc_now

        for name, frames in self._frames.items():
            if not frames:
                continue
            whole = pd.concat(frames, ignore_index=True)
            whole.to_csv(self._out.part / f"{name}.csv", index=False)
            whole.to_parquet(self._out.part / f"{name}.parquet", index=False)
        record = RunRecord(
            name="congestion.simulate",
            source="simulated",
            rows=self.rows,
            started_utc=self._started,
            ended_utc=utc_now(),
            arguments=arguments,
            config=config,
            environment=snapshot(seed),
        )
        record.save(self._out.part / "records")
        for path in self._out.publish():
            click.echo(f"record: {path}", err=True)


def _case(
    scenario: str | None,
    topo: Path | None,
    flow_file: Path | None,
    cm_file: Path | None,
    fabric: str | None,
    config: Path | None,
    overrides: Sequence[str],
    seed: int,
) -> Case:
    """What runs: a scenario or a file's flows, on a named fabric or a file's."""
    from congestion.scenario_catalogue import build_scenario, case_of_cm, case_of_flows
    from topology.importers import read_fabric

    if [scenario, flow_file, cm_file].count(None) != 2:
        remedy = "name a scenario of --list, or give --topo and --flows, or --cm"
        raise ConfigError("SCENARIO", scenario, "or --flows or --cm: exactly one says what flows there are", remedy)
    if topo and fabric:
        raise ConfigError("--fabric", fabric, "has no effect where --topo gives the fabric", "leave one out")
    if config and not scenario:
        raise ConfigError("--config", config, "has no effect on flows of a file", "leave it out")
    given = read_fabric([topo]) if topo else fabric or ""
    if scenario:
        return build_scenario(scenario, overrides, seed, fabric=given, config=config)
    if cm_file:
        return case_of_cm(cm_file, overrides, fabric=given)
    if not given:
        raise ConfigError("--topo", None, "is missing", "give the fabric of --flows, or --fabric NAME")
    return case_of_flows(Path(str(flow_file)), overrides, fabric=given)


def _print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    from topology.commands.printing import print_rows

    times = [key for key in rows[0] if key.endswith("_us")]
    in_s = [{f"{key[:-3]}_s": None if row[key] is None else row[key] / 1e6 for key in times} for row in rows]
    print_rows("simulated", [{**row, **seconds} for row, seconds in zip(rows, in_s, strict=True)], _COLUMNS)


def _print_list() -> None:
    from congestion.scenario_catalogue import describe
    from topology.commands.printing import print_rows

    print_rows(
        "scenarios and fabrics", describe(), {"of": "of", "name": "--set", "default": "default", "meaning": "meaning"}
    )


def read_law(name: str) -> str:
    """A law by its name, or by its file.

    Raises:
        ConfigError: there is none.
    """
    if name.endswith(".py"):
        from congestion.control.entered import enter

        return enter(Path(name))
    from congestion.engine.build import LAWS

    if name not in LAWS:
        remedy = f"give one of {', '.join(LAWS)}, several with commas, or a law's file"
        raise ConfigError("--cc", name, "is unknown", remedy)
    return name
