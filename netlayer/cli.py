"""The `netlayer` command and the entry of every `*_perf` binary.

This module alone names packages above its own, as strings that are loaded on use: the import graph stays a chain, and
`--help` starts without torch, pandas or pydantic.
"""

from __future__ import annotations

import atexit
import json
import logging
import os
import re
import signal
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import click

import netlayer
from netlayer.commands import lazy_group
from netlayer.commands.lazy_group import Lazy, LazyGroup
from netlayer.errors import EXIT_OK, EXIT_USAGE, FULL_DISK, NetlayerError
from netlayer.launch.early_end import Ended
from netlayer.launch.interrupt import Interrupts, counted_interrupts
from netlayer.launch.rank import end_rank

logger = logging.getLogger(__name__)

_COMMANDS = {
    "accept": Lazy("bench.accept.cli:accept", "Acceptance: which node, GPU or link is bad: measured, or from logs."),
    "arena": Lazy("congestion.commands.arena:arena", "Congestion: all control laws on a frozen suite, one table."),
    "bench": Lazy("bench.commands.group:bench", "Records of benches: compare two of them."),
    "checkpoint": Lazy(
        "trainer.commands.checkpoint:checkpoint",
        "Checkpoints: list, verify, rewrite; Hugging Face's and others' both ways.",
    ),
    "estimate": Lazy(
        "bench.estimate.command:estimate", "Predict a job's step on GPUs that are not there; find layouts."
    ),
    "data": Lazy("trainer.commands.data:data", "Token datasets on disk: prepare, inspect, Megatron's files both ways."),
    "nic": Lazy("congestion.nic.cli:nic", "RDMA NICs: inventory, configuration, timers, packets, counters."),
    "observe": Lazy("netlayer.observe.command:observe", "A slow or hung job: which rank is to blame; all events."),
    "quickstart": Lazy("bench.quickstart.command:quickstart", "The main job: bench, fabric, training and one report."),
    "retransmit": Lazy(
        "congestion.commands.retransmit:retransmit", "Which retransmit timers outlive which link flaps."
    ),
    "run": Lazy("trainer.commands.run:run", "Train on nodes that may fail: found, evicted, replaced, resumed."),
    "sample": Lazy("trainer.commands.sample:sample", "Text from a checkpoint of any layout."),
    "simulate": Lazy("congestion.commands.simulate:simulate", "Congestion: flows over a fabric, packet by packet."),
    "step": Lazy("congestion.commands.step:step", "Congestion: a whole training step, what repeats itself skipped."),
    "sweep": Lazy("congestion.commands.sweep:sweep", "Congestion: parameters x laws x seeds, or the best of them."),
    "topology": Lazy("topology.cli:topology", "The CLOS fabric: describe it, hash a job's flows over it."),
    "tune": Lazy("bench.tune.command:tune", "Settings of NCCL, NICs, switches, trainer in one profile, with reasons."),
    "train": Lazy("trainer.commands.train:train", "Train a job: tensor, pipeline and data parallel over the layer."),
}
# Sub-commands of a group that are of a package above it.
_ADDED = {
    "trainer.commands.run:run": {
        "whatif": Lazy("bench.life.command:whatif", "Simulate a run's life on --config's cluster under policies."),
    },
}
_PERF_SUFFIX = "_perf"
# Extra of the distribution that brings a library.
_EXTRAS = {
    "altair": "report",
    "jinja2": "report",
    "networkx": "simulator",
    "numba": "simulator",
    "optuna": "tune",
    "pandas": "simulator,report",
    "prometheus_client": "train",
    "pyarrow": "simulator",
    "safetensors": "train",
    "scapy": "rdma",
    "tokenizers": "train",
    "vl_convert": "report",
}
_EXIT_INTERRUPTED = 128 + signal.SIGINT


def _load(target: str) -> Any:
    """The object at `package.module:attribute`, once it is certain that the package is ours; a shared name is said."""
    from netlayer.environ import check_package, find_clashes

    check_package(target.partition(".")[0])
    for clash in find_clashes():
        click.echo(f"warning: {clash}", err=True)
    loaded = lazy_group.load(target)
    if target in _ADDED:
        loaded.add_lazy(_ADDED[target], _load)
    return loaded


@click.group(cls=LazyGroup, lazy=_COMMANDS, loader=_load, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(netlayer.__version__, prog_name="netlayer")
def cli() -> None:
    """The network and collective-communication layer under LLM training.

    \b
    Start here:
      netlayer quickstart                 everything once, and a report
      netlayer doctor                     what of this machine will be used
      netlayer config show --config examples/megascale-12288.toml
    """


@cli.command()
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Also write the findings here; - is stdout.")
def doctor(json_file: Path | None) -> None:
    """List what this machine offers, and what is missing, each with a remedy.

    Exit 0: ready to run; 2: a problem must be fixed first.
    """
    from netlayer import environ
    from netlayer.results import check_target, write_text

    check_target("--json", json_file)
    findings = environ.doctor()
    if json_file:
        write_text(json_file, json.dumps([asdict(finding) for finding in findings], indent=1) + "\n")
    if str(json_file) != "-":
        _print_findings(findings)
    if any(finding.status == "problem" for finding in findings):
        sys.exit(EXIT_USAGE)


@cli.command()
@click.option(
    "--copy", "target", type=click.Path(path_type=Path), metavar="DIR", help="Copy all of them into a folder."
)
def examples(target: Path | None) -> None:
    """List small files of every kind that the commands of the documentation read.

    \b
    Example:
      netlayer examples --copy try && cd try
    """
    from netlayer.commands.example_files import EXAMPLES, copy_examples, examples_folder

    if target:
        copied = copy_examples(target)
        click.echo(f"{len(copied)} examples in {target}", err=True)
        return
    click.echo(f"{examples_folder()}:")
    width = max(map(len, EXAMPLES))
    for name, line in EXAMPLES.items():
        click.echo(f"  {name:<{width}}  {line}")


@cli.group()
def config() -> None:
    """Show or check a configuration: defaults < TOML file < --set."""


@config.command()
@click.option("--config", "path", type=click.Path(path_type=Path), help="TOML file.")
@click.option("--set", "overrides", multiple=True, metavar="A.B=VALUE", help="Override one value; repeatable.")
def show(path: Path | None, overrides: tuple[str, ...]) -> None:
    """Print the resolved configuration as TOML, each key with its description.

    Comments at the top summarise the job: parameters, FLOPs, bytes a step by group, and memory a rank
    (`netlayer train --dry-run` has more).

    \b
    Example:
      netlayer config show --config examples/laptop.toml --set job.parallel.dp=4 --set cluster.gpus_per_server=4
    """
    from netlayer.config.file import load_config, to_toml

    resolved = load_config(path, overrides)
    if path is None or "job" in resolved.model_fields_set:  # else the job is the default one, not the file's
        from netlayer.workload.summary import job_lines

        for line in job_lines(resolved.job, resolved.cluster):
            click.echo(f"# {line}")
    click.echo(to_toml(resolved, describe=True), nl=False)


@config.command()
@click.option("--config", "path", type=click.Path(path_type=Path), help="TOML file [default: the defaults].")
@click.option("--set", "overrides", multiple=True, metavar="A.B=VALUE", help="Override one value; repeatable.")
def check(path: Path | None, overrides: tuple[str, ...]) -> None:
    """Check a configuration: exit 0 if it is good, else 2 with one line that says what to change."""
    from netlayer.config.file import load_config

    tree = load_config(path, overrides)
    ranks, servers = tree.cluster.num_gpus, tree.cluster.servers
    click.echo(f"{path or 'defaults'}: good; {ranks} ranks on {servers} server{'s' * (servers > 1)}")


def main() -> None:
    """Entry of `netlayer`."""
    run(cli, "netlayer")


def perf() -> None:
    """Entry of `all_gather_perf` and its sisters: the name it was called by chooses the module of `bench`."""
    name = Path(sys.argv[0]).name
    run(lambda: _load(f"bench.perf.collectives.{name.removesuffix(_PERF_SUFFIX)}:command"), name)


def run(command: click.Command | Callable[[], click.Command], name: str) -> None:
    """Run a command to its exit code: one line on stderr for what the user can fix, a traceback for our own faults."""
    try:
        with counted_interrupts() as interrupts:
            _run(command, name, interrupts)
    except Ended:
        # `timeout` sends its signal to the process and to its group: the second one may come as the interpreter ends,
        # and the exit code is said already.
        for signum in (signal.SIGTERM, signal.SIGUSR1):
            signal.signal(signum, signal.SIG_IGN)
        raise
    finally:
        # All is done and said: while the interpreter ends, a Ctrl-C would only break its clearing away, with a
        # traceback. What is registered last is called first.
        atexit.register(signal.signal, signal.SIGINT, signal.SIG_IGN)


def _run(command: click.Command | Callable[[], click.Command], name: str, interrupts: Interrupts) -> NoReturn:
    """Run a command and exit: an error of ours in one line with its exit code, an interruption with 130."""
    stdout = sys.stdout
    try:
        loaded = command if isinstance(command, click.Command) else command()
        code = loaded.main(prog_name=name, standalone_mode=False)
    except NetlayerError as exc:
        end_rank(f"error: {exc}", exc.exit_code)
    except click.exceptions.NoArgsIsHelpError as exc:
        exc.show()
        sys.exit(EXIT_USAGE)
    except click.ClickException as exc:
        end_rank(f"error: {_one_line(exc)}", EXIT_USAGE)
    except (KeyboardInterrupt, click.Abort):
        _end_as_interrupted()
    except (OSError, ModuleNotFoundError) as exc:
        _end_if_full(exc) if isinstance(exc, OSError) else _end_if_extra(exc)
        raise
    except SystemExit:
        if sys.stdout is not stdout:  # click's mark for a broken pipe; its own answer to it is exit 1
            _end_as_broken_pipe()
        raise
    except Exception:
        if not interrupts.seen:
            raise
        # Libraries make errors of their own of an interruption: pydantic does of one that lands in a serializer.
        logger.info("what the interruption was interrupted", exc_info=True)
        _end_as_interrupted()
    sys.exit(code if isinstance(code, int) else EXIT_OK)


def _end_as_interrupted() -> NoReturn:
    click.echo("interrupted", err=True)
    sys.exit(_EXIT_INTERRUPTED)


def _end_as_broken_pipe() -> NoReturn:
    """The reader has gone, as in `| head`: end as any program does that SIGPIPE ends, without a word."""
    _leave_stdout()
    sys.exit(128 + signal.SIGPIPE)


def _end_if_full(exc: OSError) -> None:
    """Exit with one line if the disk is full, for commands that did not report that themselves."""
    if exc.errno in FULL_DISK:
        _leave_stdout()
        where = exc.filename or "what this command writes"
        end_rank(f"error: {where}: cannot be written ({exc.strerror}); make room where it goes", EXIT_USAGE)


def _end_if_extra(exc: ModuleNotFoundError) -> None:
    """Exit with one line if a library of an extra of ours is not installed."""
    library = (exc.name or "").partition(".")[0]
    if library in _EXTRAS:
        rule = f"{library} is not installed; run: pip install 'netlayer[{_EXTRAS[library]}]'"
        end_rank(f"error: {rule} (or netlayer[all])", EXIT_USAGE)


def _leave_stdout() -> None:
    """Redirect stdout to /dev/null, else Python would fail again when it flushes the buffer at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def _one_line(exc: click.ClickException) -> str:
    """Return a usage error in one line, with a pointer to --help: `--seeds: 0 is not in the range x>=1; see ...`."""
    message = " ".join(exc.format_message().split()).removesuffix(".")
    message = re.sub(r"^Invalid value for '([^']+)'", r"\1", message)
    context = exc.ctx if isinstance(exc, click.UsageError) else None
    return f"{message}; see {context.command_path} --help" if context else message


def _print_findings(findings: list[Any]) -> None:
    """Print one line for each finding, its remedy below; lines are not wrapped, so that paths can be copied."""
    colours = {"ok": "green", "optional": "cyan", "missing": "yellow", "problem": "red"}
    width = max(len(finding.topic) for finding in findings)
    for finding in findings:
        status = click.style(f"{finding.status:<8}", fg=colours[finding.status])
        click.echo(f"{finding.topic:<{width}}  {status}  {finding.detail}")
        if finding.remedy:
            click.echo(f"{'':<{width + 12}}remedy: {finding.remedy}")
