"""Shared parts of the commands on a host's NICs: options, opening the host, other hosts over ssh, JSON."""

from __future__ import annotations

import functools
import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from netlayer import log
from netlayer.results import check_target, write_text

if TYPE_CHECKING:  # `--help` needs no pydantic
    from congestion.nic.hosts.inventory import Device
    from congestion.nic.hosts.tree import Tree
    from congestion.nic.profile.journal import State
    from congestion.nic.profile.plan import Plan
    from congestion.nic.vendors.tools import Tools

_PATH = click.Path(path_type=Path)
_STATE = Path("/var/lib/netlayer/nic")


@dataclass(frozen=True)
class HostOptions:
    """Options of each of these commands."""

    root: Path
    tools: Path | None
    devices: tuple[str, ...]
    json_file: Path | None
    hosts: str | None
    ssh_command: str
    ssh_limit: float
    remote: str
    profile: Path | None = None
    state: Path | None = None
    apply: bool = False
    partial: bool = False
    force: bool = False


def of_host(command: Callable[..., None]) -> Callable[..., None]:
    """The options of HostOptions that all have; the command takes one `options`."""
    shared = (
        click.option("--root", type=_PATH, default=Path("/"), show_default=True, help="Host's files: / or a copy."),
        click.option("--tools", type=_PATH, help="Folder of programs to use first; with another root, alone."),
        click.option("--device", "devices", multiple=True, metavar="NAME", help="Only this one; repeatable."),
        click.option("--json", "json_file", type=_PATH, help="Also write the result here; - is stdout."),
        click.option("--hosts", metavar="HOSTS", help="On these hosts instead: a,b,c or a file with one a line."),
        click.option("--ssh", "old_hosts", hidden=True),
        click.option("--ssh-command", default="ssh", show_default=True, help="What reaches a host, with its options."),
        click.option("--ssh-limit", type=click.FloatRange(1, 86_400), default=120, show_default=True, metavar="S",
                     help="Longest wait for a host."),
        click.option("--remote", default="netlayer", show_default=True, metavar="COMMAND",
                     help="What runs netlayer there: a name, or words such as 'python3 -m netlayer'."),
        click.option("-v", "--verbose", count=True, help="More log on stderr; -vv for all."),
    )  # fmt: skip

    @functools.wraps(command)
    def with_options(verbose: int, old_hosts: str | None, **values: Any) -> None:
        log.configure(verbose)
        if old_hosts is not None:
            click.echo("warning: --ssh HOSTS is now --hosts HOSTS", err=True)
            values["hosts"] = values["hosts"] or old_hosts
        check_target("--json", values["json_file"])
        extra = {name: values.pop(name) for name in tuple(values) if name not in HostOptions.__dataclass_fields__}
        command(options=HostOptions(**values), **extra)

    for option in reversed(shared):
        option(with_options)
    return with_options


profile_option = click.option(
    "--profile", type=_PATH, required=True, help="TOML file, as in examples/profiles/; - is stdin."
)
state_option = click.option(
    "--state", type=_PATH, help=f"Folder of the journal [default: {_STATE}; none below a root]."
)


def open_host(options: HostOptions) -> tuple[Tree, Tools]:
    from congestion.nic.hosts.tree import Tree
    from congestion.nic.vendors.tools import Tools

    tree = Tree(options.root)
    return tree, Tools(host=tree.is_host, folder=options.tools)


def open_devices(options: HostOptions) -> tuple[Tree, Tools, list[Device]]:
    from congestion.nic.hosts.inventory import RDMA, take_inventory
    from netlayer.errors import ConfigError, HardwareMissing

    tree, tools = open_host(options)
    devices, faults = take_inventory(tree, tools, options.devices)
    for fault in faults:
        click.echo(f"warning: {fault}", err=True)
    missing = set(options.devices) - {device.name for device in devices}
    if missing:
        known = ", ".join(tree.names(RDMA)) or "none"
        raise ConfigError("--device", ", ".join(sorted(missing)), "is not there", f"there are: {known}")
    if not devices:
        raise HardwareMissing(f"no RDMA device below {options.root / RDMA}; load the NIC's driver, or give --root")
    return tree, tools, devices


def draw_plan(options: HostOptions) -> tuple[Plan, Tree, Tools]:
    draw, tree, tools = draw_with(options)
    return draw(), tree, tools


def draw_with(options: HostOptions) -> tuple[Callable[[], Plan], Tree, Tools]:
    """Return a function that makes the plan from what is there at that moment, with the tree and the tools."""
    from congestion.nic.profile.file import load_profile
    from congestion.nic.profile.plan import make_plan

    assert options.profile is not None
    nic_profile = load_profile(options.profile)
    tree, tools, devices = open_devices(options)
    return functools.partial(make_plan, nic_profile, devices, tree, tools), tree, tools


def open_state(options: HostOptions) -> State:
    from congestion.nic.profile.journal import State
    from netlayer.errors import ConfigError

    if options.state is None and options.root.resolve() != Path("/"):
        rule = "is needed with another --root: a journal below that root is not trusted"
        raise ConfigError("--state", None, rule, "give a folder of yours")
    return State(options.state or _STATE)


def summed(plan: Plan) -> dict[str, Any]:
    changes = count(len(plan.changes), "change")
    summary = f"{changes}, {count(len(plan.cannots), 'thing')} cannot be had"
    return plan.as_tree() | {"summary": summary}


def elsewhere(options: HostOptions, command: str, judge: Callable[[Any], list[str]] | None = None) -> bool:
    """Run the command on the hosts of `--hosts` and print one table; False where it is for this host.

    Args:
        judge: says what is wrong with a host's result; a host with which something is has failed.
    """
    if options.hosts is None:
        return False
    from netlayer.printing import print_table
    from netlayer.remote.fan_out import run_on, worst
    from netlayer.remote.hosts import read_hosts

    hosts = [host.name for host in read_hosts(options.hosts)]
    arguments, stdin = [*_split(options.remote), "nic", command, "--json", "-"], ""
    if options.profile is not None:
        from congestion.nic.profile.file import parse_profile, read_profile

        stdin = read_profile(options.profile)
        parse_profile(stdin, options.profile)
        arguments += ["--profile", "-"]
    arguments += [] if options.root == Path("/") else ["--root", str(options.root)]
    arguments += [part for name in options.devices for part in ("--device", name)]
    arguments += ["--tools", str(options.tools)] if options.tools else []
    arguments += ["--state", str(options.state)] if options.state else []
    arguments += ["--apply"] * options.apply + ["--partial"] * options.partial
    arguments += ["--force"] * options.force
    outcomes = run_on(hosts, arguments, stdin, options.ssh_limit, options.ssh_command)
    wrong = {one.host: judge(one.result) for one in outcomes if judge and not one.exit_code}
    results = {
        one.host: {"exit_code": one.exit_code, "said": one.message, "result": one.result}
        | ({"differs": wrong.get(one.host, [])} if judge else {})
        for one in outcomes
    }
    give(options, {"hosts": results})
    if not alone(options):
        rows = [
            [one.host, "differs" if wrong.get(one.host) else one.word, _summary(one.result) or "-",
             "; ".join(wrong.get(one.host, [])) or (one.message if one.exit_code else "-")]
            for one in outcomes
        ]  # fmt: skip
        print_table(f"netlayer nic {command}", ["host", "outcome", "result", "said"], rows)
    code = worst(outcomes) or int(any(wrong.values()))
    if code:
        bad = [one.host for one in outcomes if one.exit_code or wrong.get(one.host)]
        click.echo(f"error: {len(bad)} of {count(len(outcomes), 'host')} failed: {', '.join(bad[:8])}", err=True)
        sys.exit(code)
    return True


def _split(remote: str) -> list[str]:
    from netlayer.errors import ConfigError

    try:
        parts = shlex.split(remote)
    except ValueError as exc:
        raise ConfigError("--remote", remote, f"is no command ({exc})", "close its quotes") from exc
    if not parts:
        raise ConfigError("--remote", remote, "is no command", "give its name or path, such as netlayer")
    return parts


def _summary(result: Any) -> str:
    from netlayer.printing import printable_line

    return printable_line(str(result.get("summary", "")))[:200] if isinstance(result, dict) else ""


def give(options: HostOptions, tree: dict[str, Any]) -> None:
    if options.json_file:
        write_text(options.json_file, json.dumps(tree, indent=1) + "\n")


def alone(options: HostOptions) -> bool:
    """JSON is the only thing on stdout."""
    return str(options.json_file) == "-"


def count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
