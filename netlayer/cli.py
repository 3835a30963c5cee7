"""The `netlayer` command and the entry of every `*_perf` binary.

This module alone names packages above its own, as strings that are loaded on use: the import graph stays a chain, and
`--help` starts without torch, pandas or pydantic.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import click

import netlayer
from netlayer.errors import EXIT_OK, EXIT_USAGE, NetlayerError


class _Lazy(NamedTuple):
    """A sub-command that lives elsewhere: `package.module:attribute`, and its line of help."""

    target: str
    help: str


_COMMANDS = {
    "quickstart": _Lazy("bench.quickstart:quickstart", "The main job: bench, fabric, training and one report."),
    "topology": _Lazy("topology.cli:topology", "The CLOS fabric: describe it, hash a job's flows over it."),
}
_PERF_SUFFIX = "_perf"


class _LazyGroup(click.Group):
    """A group that imports a sub-command when it is called, never to list it."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted([*super().list_commands(ctx), *_COMMANDS])

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        lazy = _COMMANDS.get(cmd_name)
        return _load(lazy.target) if lazy else super().get_command(ctx, cmd_name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, self._line(ctx, name)) for name in self.list_commands(ctx)]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def _line(self, ctx: click.Context, name: str) -> str:
        lazy = _COMMANDS.get(name)
        command = None if lazy else super().get_command(ctx, name)
        return lazy.help if lazy else command.get_short_help_str(80) if command else ""


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
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
    """Say what of this machine will be used, and what is missing with the remedy.

    Exit 0: nothing stands in the way; 2: a problem that must be mended first.
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


@cli.group()
def config() -> None:
    """Show or check a configuration: defaults < TOML file < --set."""


@config.command()
@click.option("--config", "path", type=click.Path(path_type=Path), help="TOML file.")
@click.option("--set", "overrides", multiple=True, metavar="A.B=VALUE", help="Override one value; repeatable.")
def show(path: Path | None, overrides: tuple[str, ...]) -> None:
    """Print the resolved tree as TOML, each key with its meaning.

    \b
    Example:
      netlayer config show --config examples/laptop.toml --set job.parallel.dp=4 --set cluster.gpus_per_server=4
    """
    from netlayer.config import load_config, to_toml

    click.echo(to_toml(load_config(path, overrides), describe=True), nl=False)


@config.command()
@click.option("--config", "path", type=click.Path(path_type=Path), required=True, help="TOML file.")
@click.option("--set", "overrides", multiple=True, metavar="A.B=VALUE", help="Override one value; repeatable.")
def check(path: Path, overrides: tuple[str, ...]) -> None:
    """Say whether a configuration is good: exit 0, or 2 and one line that says what to change."""
    from netlayer.config import load_config

    tree = load_config(path, overrides)
    click.echo(f"{path}: good; {tree.cluster.num_gpus} ranks on {tree.cluster.servers} servers")


def main() -> None:
    """Entry of `netlayer`."""
    run(cli, "netlayer")


def perf() -> None:
    """Entry of `all_gather_perf` and its sisters: the name it was called by chooses the module of `bench`."""
    name = Path(sys.argv[0]).name
    run(lambda: _load(f"bench.{name.removesuffix(_PERF_SUFFIX)}:command"), name)


def run(command: click.Command | Callable[[], click.Command], name: str) -> None:
    """Run a command to its exit code: one line on stderr for what the user can mend, a traceback for our own faults."""
    try:
        loaded = command if isinstance(command, click.Command) else command()
        code = loaded.main(prog_name=name, standalone_mode=False)
    except NetlayerError as exc:
        click.echo(f"error: {exc}", err=True)
        sys.exit(exc.exit_code)
    except click.ClickException as exc:
        exc.show()
        sys.exit(EXIT_USAGE)
    except (KeyboardInterrupt, click.Abort):
        click.echo("interrupted", err=True)
        sys.exit(130)
    sys.exit(code if isinstance(code, int) else EXIT_OK)


def _load(target: str) -> Any:
    """The object at `package.module:attribute`, once it is certain that the package is ours; a shared name is said."""
    from netlayer.environ import check_package, find_clashes

    module, _, attribute = target.partition(":")
    check_package(module.partition(".")[0])
    for clash in find_clashes():
        click.echo(f"warning: {clash}", err=True)
    return getattr(importlib.import_module(module), attribute)


def _print_findings(findings: list[Any]) -> None:
    from rich.console import Console
    from rich.table import Table

    marks = {"ok": "[green]ok[/]", "missing": "[yellow]missing[/]", "problem": "[red]problem[/]"}
    console = Console()
    if not console.is_terminal:
        console.width = 160  # a file or a pipe has no edge to wrap at
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("")
    table.add_column("")
    table.add_column("found", overflow="fold", ratio=3)
    table.add_column("remedy", overflow="fold", ratio=2)
    for finding in findings:
        table.add_row(finding.topic, marks[finding.status], finding.detail, finding.remedy)
    console.print(table)
