"""`netlayer simulate`: a scenario by name, or flows of a file over a fabric of a file, under one law or several."""

from __future__ import annotations

import contextlib
import json
import math
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from congestion.simulation.page.report import SAMPLED, links_note, write_page
from congestion.simulation.settings import MOST_US
from netlayer.errors import CheckFailed, ConfigError
from netlayer.results import check_target, write_text

if TYPE_CHECKING:
    import pandas as pd

    from congestion.scenarios.catalogue import Case
    from congestion.simulation.samples import Samples
    from congestion.simulation.settings import Settings
    from congestion.simulation.simulate import Outcome, Progress, Simulation
    from netlayer.output import Output
    from netlayer.progress import Bar, Stages

_PATH = click.Path(path_type=Path)
_OURS = "congestion"
_TOLD = ("flow_bytes", "until_us", "until_flows", "warmup_us", "sample_us", "truncate_ns")  # in the record
_STDOUT = Path("-")
_PS_PER_US = 1_000_000
_MOST_US = 1e12
_ONE_PACKET_MORE = "htsim-swift"  # as htsim's Swift sends a flow: a packet more than it is told to
_COLUMNS = {
    "cc": "law",
    "flows": "flows",
    "ended": "ended",
    "measured": "measured",
    "completion_s": "completion",
    "fct_min_s": "FCT min",
    "fct_median_s": "FCT median",
    "fct_p99_s": "p99",
    "fct_p999_s": "p99.9",
    "fct_max_s": "max",
    "slowdown_min": "slowdown min",
    "slowdown_median": "median",
    "slowdown_p99": "p99",
    "goodput_bps": "goodput",
    "jain": "Jain",
    "pauses": "pauses",
    "pause_share": "paused",
    "ecn_marked": "marks",
    "cnps": "CNPs",
    "drops": "drops",
    "retransmissions": "resent",
    "max_queue_bytes": "largest queue",
    "rtt_mean_s": "RTT mean",
    "rtt_max_s": "max",
}


class Microseconds(click.FloatRange):
    """Simulated time as a person gives it: of a picosecond at least, and before the clock ends."""

    name = "microseconds"

    def __init__(self) -> None:
        super().__init__(1e-6, MOST_US)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):  # a range lets nan pass
            self.fail(f"{value} is no number of microseconds.", param, ctx)
        return number


@click.command()
@click.argument("scenario", required=False)
@click.option("--topo", type=_PATH, help="The fabric: HPCC's topo.txt, or what `topology import` reads in one file.")
@click.option("--flows", "flow_file", type=_PATH, help="The flows on it: HPCC's flow.txt.")
@click.option("--cm", "cm_file", type=_PATH, help="htsim's connection matrix, on its fat tree: 100G, 1 us a link.")
@click.option("--flow-bytes", metavar="SIZE", help="Size of each flow of --flows or --cm in place of the file's.")
@click.option("--fabric", help="star | dumbbell | clos | fat-tree [default: the one that suits the scenario].")
@click.option("--config", type=_PATH, help="TOML file of the cluster and job of job-phases; see examples/.")
@click.option("--cc", default="dcqcn", show_default=True, metavar="LAW[,LAW...]", help="Control laws, or one's file.")
@click.option(
    "--preset",
    default="ns3",
    show_default=True,
    help="Switch, NIC and law: ns3, ns3-paper, htsim-roce, htsim-swift, which sends a packet more of a file's flows.",
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
@click.option("--out", type=_PATH, help="Folder for report.html, flows and ports as CSV and parquet, the record.")
@click.option("--html", type=_PATH, help="A page with the laws side by side; its pictures into plots/ beside it.")
@click.option("--until-us", type=Microseconds(), help="Stop so long after the first flow's start.")
@click.option("--until-flows", metavar="N|SHARE%", help="Stop when so many flows have ended, such as 100 or 95%.")
@click.option(
    "--warmup-us",
    type=Microseconds(),
    help="From the first start: counters begin then, largest queues apart; flows from before are not in FCTs.",
)
@click.option(
    "--sample-us",
    type=Microseconds(),
    help="Interval, from the first start, of samples.csv, links.csv, tiers.csv and the page [default: no files].",
)
@click.option("--checkpoint", type=_PATH, help="Where a run that is stopped before its end is kept; of one law.")
@click.option("--resume", type=_PATH, help="Go on with a run that --checkpoint kept; all else as then.")
@click.option(
    "--switch-config", type=_PATH, help="SONiC's config_db.json, as `nic switch` writes it: thresholds of PFC and ECN."
)
@click.option("--strict", is_flag=True, help="Exit 1 on a warning too: a lossless fabric that drops, a law's target.")
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
    """Simulate flows packet by packet; exit 1 where one did not end (its fct_ns is null, and `open` says why).

    LAW is none, dcqcn, swift, nscc, hybrid, or a file, which runs with your rights (see netlayer arena
    --help). Ctrl-C keeps what was measured.

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
      netlayer simulate --cm tor1.cm --flow-bytes 10MB --preset htsim-swift --cc swift
      netlayer simulate poisson --warmup-us 500 --until-flows 95% --cc none
      netlayer simulate incast --sample-us 10 --out runs/incast --cc dcqcn,hybrid
      netlayer simulate all-to-all --cc none,dcqcn,hybrid --html rounds.html
      netlayer simulate permutation --cc my_law.py --until-us 500 --checkpoint half.npz
      netlayer simulate --list
    """
    from congestion.kernels.jit import compile_progress
    from congestion.nic.switches.settings import settings_of_switch
    from congestion.simulation.bound import completion_bound_us
    from congestion.simulation.page.inputs import read_case, with_losses
    from congestion.simulation.run_checks import law_note, lossless_note
    from congestion.simulation.settings import settings_of
    from netlayer.progress import Stages

    if listed:
        _print_list()
        return
    # Files of flows come from scripts, which read JSON; who names a scenario looks at the table.
    if json_file is None and scenario is None and out is None:
        json_file = _STDOUT
    # Before the run, which may take an hour: a file that cannot be written is refused now.
    check_target("--json", json_file)
    _check_page(how["html"], json_file)
    # A law's file is read and checked here, before anything is compiled around it.
    laws = [read_law(name) for name in cc.split(",")]
    _check_how(laws, out, how)
    # Samples cost time, so none are taken where nothing will be drawn.
    drawn = out is not None or how["html"] is not None
    own_overrides = tuple(one for one in overrides if one.split(".")[0] == _OURS)
    told_by_switch, notes_on_switch = settings_of_switch(how["switch_config"]) if how["switch_config"] else ((), [])
    # The user's --set comes last: it overrides what the switch is configured to.
    settings = settings_of(preset, (*told_by_switch, *own_overrides))
    others = tuple(one for one in overrides if one not in own_overrides)
    # htsim's Swift sends one packet more than a flow has, and its presets follow it.
    sizes = how["flow_bytes"], settings.mtu_bytes * (preset == _ONE_PACKET_MORE)
    with Stages() as stages, compile_progress(stages, "scenario"):
        case = read_case(scenario, topo, flow_file, cm_file, fabric, config, others, seed, *sizes)
    settings, notes = with_losses(settings, topo, case)
    notes = [*notes_on_switch, *notes]
    with contextlib.ExitStack() as stack:
        # Of a run that fails nothing is left; an interrupt is no failure, and publishes the laws that have run.
        kept = _Kept(stack, out, how)
        bound_us = completion_bound_us(case.fabric, case.flows, settings) if drawn else None
        runs: list[dict[str, Any]] = []
        with Stages() as stages:
            for law in laws:
                simulation = _built(case, settings, law, seed, stages, how)
                _say_once(stages, notes)  # now, for where the input is bad, that alone is said
                kept.warn(stages, law, law_note(law, settings, simulation.state))
                with stages.open(law) as bar:
                    outcome, samples = _simulate(case, simulation, bar, how, bound_us)
                kept.add(law, case, outcome, samples)
                kept.warn(stages, law, lossless_note(case.fabric, outcome, settings))
                if json_file:
                    # Each run says what made it, so that it can be taken out of the file and still be understood.
                    options = {"cc": law, "preset": preset, "seed": seed, "source": "simulated"}
                    options |= {"warnings": kept.warnings[law]} if law in kept.warnings else {}
                    runs.append({**options, **outcome.to_json(case.fabric, case.flows)})
                # The laws behind it have no rows; those before it do.
                if outcome.interrupted:
                    break
        if json_file:
            # One law is one object, as before there could be several.
            write_text(json_file, json.dumps(runs[0] if len(laws) == 1 else {"runs": runs}, indent=1) + "\n")
        arguments = {"scenario": scenario or "", "preset": preset, "seed": seed, "set": list(overrides), "cc": cc}
        arguments |= {name: how[name] for name in _TOLD if how[name] is not None}
        configuration = {"preset": preset, **case.config, "set": ", ".join(overrides) or "nothing"}
        name = scenario or f"flows of {(flow_file or Path(str(cm_file))).name}"
        kept.draw({"name": name, "bound_us": bound_us, "seed": seed, "config": configuration})
        kept.publish(arguments, {**case.config, _OURS: settings.model_dump(mode="json")}, seed)
    # stdout is for data: where the JSON or the page goes there, the table does not.
    with contextlib.redirect_stdout(sys.stderr if _STDOUT in (json_file, how["html"]) else sys.stdout):
        _print_rows(kept.rows)
    _judge(kept, how["strict"])


def _judge(kept: _Kept, strict: bool) -> None:
    """
    Raises:
        CheckFailed: flows did not end though nothing stopped the run; or there are warnings, and `strict`.
    """
    for row in kept.rows:
        if row["ended"] == row["flows"]:
            continue
        left = f"{row['cc']}: {row['flows'] - row['ended']} of {row['flows']} flows did not end: {_cause(row)}"
        # Stopped by --until-us or --until-flows on purpose, flows that are open are no failure.
        if row["completed"] or row["interrupted"]:
            raise CheckFailed(left)
        click.echo(f"note: {left}", err=True)
    if strict and kept.warnings:
        first, *others = [f"{law}: {one}" for law, texts in kept.warnings.items() for one in texts]
        raise CheckFailed(f"--strict: {first}{f' (and {len(others)} more)' if others else ''}")


def _say_once(stages: Stages, notes: list[str]) -> None:
    while notes:
        stages.say(f"note: {notes.pop(0)}")


def _cause(row: Mapping[str, Any]) -> str:
    """Describe why flows of a run did not end."""
    if row["deadlock"]:
        return f"PFC deadlock, each link waits for the next: {row['deadlock']}"
    return f"{'interrupted; ' if row['interrupted'] else ''}{row['open']}"


def _check_page(html: Path | None, json_file: Path | None) -> None:
    check_target("--html", html)
    if html == json_file == _STDOUT:
        raise ConfigError("--html", "-", "is where the JSON goes, too", "give --json a file, or --html one")


def _check_how(laws: Sequence[str], out: Path | None, how: Mapping[str, Any]) -> None:
    for option in ("until_us", "warmup_us", "sample_us"):
        # So written for NaN, which is not above it either.
        if how[option] and not how[option] <= _MOST_US:
            rule = f"is no time of up to {_MOST_US:g} us"
            raise ConfigError(f"--{option.replace('_', '-')}", how[option], rule, "give a number of microseconds")
    if how["sample_us"] and not out and not how["html"]:
        remedy = "give a folder for samples.csv, or --html a file"
        raise ConfigError("--sample-us", how["sample_us"], "has no effect without --out or --html", remedy)
    if how["warmup_us"] and how["until_us"] and how["until_us"] <= how["warmup_us"]:
        raise ConfigError("--warmup-us", how["warmup_us"], f"is not below --until-us = {how['until_us']:g}", "lower it")
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

        # By the driver, before anything is compiled: without a GPU that would be minutes for nothing.
        check_device()


def _built(case: Case, settings: Settings, law: str, seed: int, stages: Stages, how: Mapping[str, Any]) -> Simulation:
    """Build the simulation, before its first event or as it was kept; its kernels are compiled."""
    from congestion.kernels.compile import WORDS, waiting
    from congestion.simulation.page.inputs import ended_of
    from congestion.simulation.simulate import Simulation

    gpu, threads = how["backend"] == "gpu", how["threads"]
    simulation = Simulation(
        case.fabric,
        case.flows,
        settings,
        law,
        seed=seed,
        flaps=case.flaps,
        truncate_ns=how["truncate_ns"],
        threads=threads,
        backend="gpu" if gpu else "numba",
        warmup_ps=round((how["warmup_us"] or 0) * _PS_PER_US),
        until_flows=ended_of(how["until_flows"], len(case.flows)),
        compiling=waiting(stages, "compiling kernels for the GPU" if gpu else WORDS),
    )
    # Restored into a simulation of the same input: what is of another one is refused there.
    if how["resume"]:
        simulation.restore(how["resume"])
    return simulation


def _simulate(
    case: Case, simulation: Simulation, bar: Bar, how: Mapping[str, Any], bound_us: float | None
) -> tuple[Outcome, Samples | None]:
    """Run a simulation, with samples if `bound_us` is given, and keep a checkpoint if it was asked for.

    Args:
        how: options of the command.
        bound_us: about how long the run is, for the interval of samples; None: nothing is drawn, so nothing sampled.

    Raises:
        ConfigError: the run ended before its warm-up.
    """
    from congestion.engine.tables import NEVER

    until_ps = simulation.first_ps + round(how["until_us"] * _PS_PER_US) if how["until_us"] else NEVER
    say = partial(say_progress, bar, Pace(until_ps if how["until_us"] else None))
    if bound_us is None:
        outcome, samples = simulation.run(until_ps, say), None
    else:
        outcome, samples = _sampled(case, simulation, until_ps, say, how["sample_us"], bound_us)
    # A run that is done has nothing to resume.
    if how["checkpoint"] and not outcome.completed:
        simulation.save(how["checkpoint"])
        click.echo(f"kept: {how['checkpoint']}; go on with --resume {how['checkpoint']}", err=True)
    # Else every figure would be of flows that the user wanted left aside.
    if how["warmup_us"] and not outcome.warmup_ps and not outcome.interrupted:
        took_us = (outcome.time_ps - outcome.first_ps) / _PS_PER_US
        raise ConfigError("--warmup-us", how["warmup_us"], f"is not below what was run, {took_us:g} us", "lower it")
    return outcome, samples


def _sampled(
    case: Case,
    simulation: Simulation,
    until_ps: int,
    say: Callable[[Progress], None],
    every_us: float | None,
    bound_us: float,
) -> tuple[Outcome, Samples]:
    """Run with samples each `every_us`, or at an interval that suits a run no shorter than the bound."""
    from congestion.simulation.link_samples import LinkSamples
    from congestion.simulation.samples import Samples, interval_ps, run_sampled

    samples = Samples(LinkSamples(case.fabric, simulation.link))
    first_ps = simulation.first_ps
    # The bound is what no run is shorter than: so there are at least as many samples as a chart has points.
    least_us = min(bound_us, (until_ps - first_ps) / _PS_PER_US)
    every_ps = round(every_us * _PS_PER_US) if every_us else interval_ps(least_us, simulation.state)
    return run_sampled(
        simulation, samples, every_ps, first_ps=first_ps, until_ps=until_ps, say=say, grows=not every_us
    ), samples


class Pace:
    """Remaining time by the clock, looks at the run and all: of the packets, or of the time until a run is stopped.

    It counts from the first progress that it hears of: kernels may be compiled before, or the run resume from a file.

    Args:
        until_ps: where the run is stopped; None: where all packets have arrived.
    """

    def __init__(self, until_ps: int | None = None) -> None:
        self._until_ps = until_ps
        self._first: tuple[float, int, int] | None = None

    def left_s(self, progress: Progress) -> float | None:
        """Estimate the seconds left; None where nothing can be said yet."""
        now_s, packets, time_ps = time.monotonic(), progress.done_packets, progress.time_ps
        # From here on: what was compiled or restored before is no measure of the run's speed.
        if self._first is None:
            self._first = now_s, packets, time_ps
            return None
        first_s, first_packets, first_ps = self._first
        # The sooner of two ends: all packets have arrived, or the time that the user gave has come.
        parts = [(packets - first_packets, progress.num_packets - packets)]
        if self._until_ps is not None:
            parts.append((time_ps - first_ps, self._until_ps - time_ps))
        return min(((now_s - first_s) * left / done for done, left in parts if done > 0), default=None)


def say_progress(bar: Bar, pace: Pace, progress: Progress) -> None:
    """Show a person who waits the simulated time, the speed, and the time left at the speed so far."""
    left_s = pace.left_s(progress)
    left = "" if left_s is None else f", {left_s:.0f} s left"
    speed = f"{progress.link_hops / max(progress.wall_s, 1e-9) / 1e6:.1f} M link-hops/s"
    bar(progress.done_packets, progress.num_packets, f"{progress.time_ps / 1e9:.3f} ms simulated, {speed}{left}")


class _Kept:
    """Rows of each law for the table, and their frames for `--out` and the page."""

    def __init__(self, stack: contextlib.ExitStack, out: Path | None, how: Mapping[str, Any]) -> None:
        from netlayer.output import open_output
        from netlayer.results import utc_now

        self.rows: list[dict[str, Any]] = []
        self._started = utc_now()
        self._out: Output | None = stack.enter_context(open_output(out, "simulate")) if out else None
        self._html: Path | None = how["html"]
        self._sampled = bool(how["sample_us"])  # else what was sampled is for the page alone
        self._frames: dict[str, list[pd.DataFrame]] = {}
        self._notes: list[str] = []
        self.warnings: dict[str, list[str]] = {}  # by law

    def warn(self, stages: Stages, law: str, warning: str) -> None:
        if warning:
            self.warnings.setdefault(law, []).append(warning)
            stages.say(f"warning: {law}: {warning}")

    def add(self, law: str, case: Case, outcome: Outcome, samples: Samples | None) -> None:
        from congestion.simulation import measures
        from congestion.simulation.run_checks import lossless_drops, open_words

        flows = measures.flow_frame(case.fabric, case.flows, outcome)
        ports = measures.port_frame(case.fabric, outcome)
        own = {"completed": outcome.completed, "interrupted": outcome.interrupted, "wall_s": outcome.wall_s}
        since_us = outcome.since_ps / _PS_PER_US if outcome.warmup_ps else None
        notes = {"lossless_drops": lossless_drops(outcome), "open": open_words(outcome.open_flows)}
        self.rows.append({"cc": law, **measures.summary(flows, ports, since_us), **own, **notes})
        if samples:
            for name, frame in {"flows": flows, "ports": ports, **samples.frames()}.items():
                frame.insert(0, "cc", law)
                self._frames.setdefault(name, []).append(frame)
            self._notes.append(links_note(law, samples))

    def draw(self, about: Mapping[str, Any]) -> None:
        """The page into the folder that `publish` fills, and to `--html`; `about`: of `page.findings.Findings`."""
        if not self._frames:
            return
        import pandas as pd

        frames = {name: pd.concat(frames, ignore_index=True) for name, frames in self._frames.items()}
        command, note = shlex.join(["netlayer", *sys.argv[1:]]), " ".join(filter(None, self._notes))
        part = self._out.part if self._out else None
        write_page(self.rows, frames, {**about, "command": command, "note": note}, part=part, html=self._html)

    def publish(self, arguments: Mapping[str, Any], config: Mapping[str, Any], seed: int) -> None:
        """Write tables and the record of all laws to `--out`, and say where; nothing without that option."""
        if not self._out:
            return
        import pandas as pd

        from netlayer.environ import snapshot
        from netlayer.results import RunRecord, utc_now

        for name, frames in self._frames.items():
            # Samples that the page alone needed are not what the user asked for as a table.
            if name in SAMPLED and not self._sampled:
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
        if (self._out.folder / "report.html").is_file():
            click.echo(f"report: {self._out.folder / 'report.html'}", err=True)


def _print_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    from netlayer.printing import print_rows

    # The printer shows seconds in the unit that fits them; records keep microseconds.
    times = [key for key in rows[0] if key.endswith("_us")]
    in_s = [{f"{key[:-3]}_s": None if row[key] is None else row[key] / 1e6 for key in times} for row in rows]
    print_rows("simulated", [{**row, **seconds} for row, seconds in zip(rows, in_s, strict=True)], _COLUMNS)


def _print_list() -> None:
    from congestion.scenarios.catalogue import describe
    from netlayer.printing import print_rows

    print_rows(
        "scenarios and fabrics", describe(), {"of": "of", "name": "--set", "default": "default", "meaning": "meaning"}
    )


def read_law(name: str) -> str:
    """A law by its name, or by its file.

    Raises:
        ConfigError: there is none.
    """
    # Entered before the flows are made: the file's errors cost nobody a wait.
    if name.endswith(".py"):
        from congestion.control.plugin import enter

        return enter(Path(name))
    from congestion.engine.build import LAWS

    if name not in LAWS:
        remedy = f"give one of {', '.join(LAWS)}, several with commas, or a law's file"
        raise ConfigError("--cc", name, "is unknown", remedy)
    return name
