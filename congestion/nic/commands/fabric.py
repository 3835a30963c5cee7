"""`netlayer nic fabric`: a profile on every host and switch of a cluster file, without touching one."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from congestion.nic.commands.host_options import count
from congestion.nic.switches.plan import CHIP_NAMES, FORMATS
from netlayer import log

if TYPE_CHECKING:  # `--help` needs no pydantic
    from congestion.nic.hosts.inventory import Device
    from congestion.nic.profile.file import Profile
    from congestion.nic.profile.plan_fabric import HostGroup
    from congestion.nic.profile.plan_switches import SwitchGroup
    from congestion.nic.switches.plan import Format
    from netlayer.config.tree import ClusterConfig

_CABLE_M = 40
_WRITES = "writes.csv"
_FEW = 3  # names that are all given
_PATH = click.Path(path_type=Path)


@click.command()
@click.option("--cluster", "cluster_file", type=_PATH, required=True, help="The cluster file, as in examples/.")
@click.option("--set", "overrides", multiple=True, metavar="A.B=VALUE", help="Override one value; repeatable.")
@click.option("--profile", type=_PATH, required=True, help="TOML file, as in examples/profiles/; - is stdin.")
@click.option("--nic", metavar="MODEL", help="What hosts have: ConnectX-7 and its kin, broadcom, intel.")
@click.option("--surface", metavar="WAY", help="How it is set, such as ofed-ecn [default: by debugfs or configfs].")
@click.option("--tool", "tools", multiple=True, metavar="PROGRAM", help="Program that hosts have; repeatable.")
@click.option(
    "--device",
    "names",
    multiple=True,
    metavar="NAME",
    help="Names of the NICs, repeatable; {} is their number [default: mlx5_{} and its kin].",
)
@click.option(
    "--inventory",
    "inventory_file",
    type=_PATH,
    help="What hosts have, in place of the four above: `netlayer nic inventory --hosts HOSTS --json FILE`.",
)
@click.option("--switches", "form", type=click.Choice(FORMATS), help="Also the switches' side, as these take it.")
@click.option("--cable-m", type=int, help="Longest cable at a switch, metres [default: 40].")
@click.option("--chip", type=click.Choice(CHIP_NAMES), help="Of the switches; sonic needs it for PFC headroom.")
@click.option("--out", type=_PATH, help="Folder: scripts, lists of hosts, switch files, writes.csv (how many a NIC).")
@click.option("--json", "json_file", type=_PATH, help="Also write the whole plan here; - is stdout.")
@click.option("-v", "--verbose", count=True, help="More log on stderr; -vv for all.")
def fabric(
    cluster_file: Path,
    overrides: tuple[str, ...],
    profile: Path,
    inventory_file: Path | None,
    form: Format | None,
    cable_m: int | None,
    chip: str | None,
    out: Path | None,
    json_file: Path | None,
    verbose: int,
    **options: Any,
) -> None:
    """Plan a profile for every host and switch of a cluster file. No host is asked, nothing is changed.

    Hosts that are alike share one script, switches one file. What hosts have is said by --nic, or read from an
    inventory, which is compared with the cluster file first (exit 1 where a host differs). A script finds each NIC's
    PCI address and network device itself, and refuses a NIC that is another than planned for.

    \b
    Examples:
      netlayer nic fabric --cluster cluster.toml --profile p.toml --nic ConnectX-7 --switches nvue --out plan
      netlayer nic fabric --cluster cluster.toml --profile p.toml --nic ConnectX-7 --switches sonic --chip tomahawk-5
      netlayer nic fabric --cluster cluster.toml --profile p.toml --inventory inventory.json --out plan
      ssh node1 sudo bash -s < plan/nics-1.sh > node1.before
    """
    from congestion.nic.profile.file import load_profile
    from congestion.nic.profile.plan_fabric import plan_hosts
    from congestion.nic.profile.plan_switches import group_switches
    from netlayer.config.file import load_config
    from netlayer.errors import CheckFailed, ConfigError
    from netlayer.results import check_target, write_text

    log.configure(verbose)
    check_target("--json", json_file)
    for option, value in (("--cable-m", cable_m), ("--chip", chip)):
        if value is not None and form is None:
            raise ConfigError(option, value, "has no effect without --switches", "give both, or omit it")
    if out and (out / _WRITES).exists():
        rule = "holds an earlier plan, whose scripts could be taken for this one's"
        raise ConfigError("--out", out, rule, "give a new folder, or remove that one")
    cluster = load_config(cluster_file, overrides, option="--cluster").cluster
    nic_profile = load_profile(profile)
    hosts, wrong = _hosts(cluster, inventory_file, options)
    groups = plan_hosts(nic_profile, hosts)
    switches = group_switches(cluster) if form else []
    files = {f"nics-{number}.sh": _script(group, number, nic_profile) for number, group in enumerate(groups, 1)}
    files |= {f"nics-{number}.hosts": "\n".join(one.hosts) + "\n" for number, one in enumerate(groups, 1)}
    files[_WRITES] = _csv(groups)
    configured = (
        _switch_files(switches, nic_profile, cluster, form, _CABLE_M if cable_m is None else cable_m, chip or "")
        if form
        else {}
    )
    files |= {name: text for name, (_, text) in configured.items()}
    if out:
        _write(out, files)
    tree = _tree(nic_profile, cluster, groups, {name: one for name, (one, _) in configured.items()}, wrong)
    if json_file:
        write_text(json_file, json.dumps(tree, indent=1) + "\n")
    if str(json_file) != "-":
        _print(groups, {name: one for name, (one, _) in configured.items()}, wrong)
    _print_notes(groups, switches, nic_profile, out)
    if wrong:
        first = next(iter(wrong))
        rule = f"{count(len(wrong), 'host')} not as the cluster file says; first: {first}: {'; '.join(wrong[first])}"
        raise CheckFailed(rule)


def _hosts(
    cluster: ClusterConfig, inventory_file: Path | None, options: dict[str, Any]
) -> tuple[dict[str, list[Device]], dict[str, list[str]]]:
    """The NICs of each host that are to be set, and what is wrong with hosts by the cluster file."""
    from congestion.nic.hosts.check import differences, of_fabric
    from congestion.nic.hosts.inventory import TOOLS
    from congestion.nic.hosts.inventory_file import read_inventory
    from congestion.nic.profile.plan_fabric import NICS, assume_nics
    from netlayer.errors import ConfigError
    from topology.fabric.cable_plan import nic_name

    if inventory_file is None:
        if options["nic"] not in NICS:
            raise ConfigError("--nic", options["nic"], "says what hosts have", f"give one of {', '.join(NICS)}")
        unknown = next((one for one in options["tools"] if one not in TOOLS), None)
        if unknown is not None:
            raise ConfigError("--tool", unknown, "is no program that sets NICs", f"give of {', '.join(TOOLS)}")
        alike = assume_nics(cluster, options["nic"], options["surface"], options["tools"], options["names"])
        return {nic_name(server, 1).partition("/")[0]: alike for server in range(cluster.servers)}, {}
    ignored = next((name for name in ("nic", "surface", "tools", "names") if options[name]), None)
    if ignored is not None:
        option = {"tools": "tool", "names": "device"}.get(ignored, ignored)
        raise ConfigError(f"--{option}", None, "has no effect with --inventory, which says it", "omit it")
    inventory = read_inventory(inventory_file)
    answers = {host: devices for host, devices in inventory.items() if not isinstance(devices, str)}
    wrong = {host: [f"no inventory: {reason}"] for host, reason in inventory.items() if isinstance(reason, str)}
    wrong |= {host: reason for host, devices in answers.items() if (reason := differences(devices, cluster))}
    if len(inventory) != cluster.servers:
        click.echo(
            f"note: the inventory has {count(len(inventory), 'host')}, cluster.servers = {cluster.servers}", err=True
        )
    return {host: own for host, devices in answers.items() if (own := of_fabric(devices, cluster))}, wrong


def _script(group: HostGroup, number: int, profile: Profile) -> str:
    from congestion.nic.profile.plan_script import host_script

    return host_script(group, f"profile {profile.name}, for {_span(group.hosts)} (nics-{number}.hosts)")


def _csv(groups: Sequence[HostGroup]) -> str:
    """Return writes.csv: a row a NIC, with how many values its script writes and how many it cannot."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["host", "device", "writes", "cannot", "script"])
    for number, group in enumerate(groups, 1):
        lacks = {name: len(one.plan.cannots) for one in group.nics for name in one.names}
        for host in group.hosts:
            writer.writerows([host, name, writes, lacks[name], f"nics-{number}.sh"]
                             for name, writes in group.writes.items())  # fmt: skip
    return text.getvalue()


def _switch_files(
    groups: Sequence[SwitchGroup], profile: Profile, cluster: ClusterConfig, form: Format, cable_m: int, chip: str
) -> dict[str, tuple[SwitchGroup, str]]:
    """Return the switches and the text of each file, by file name."""
    from congestion.nic.profile.plan_switches import switch_file

    files: dict[str, tuple[SwitchGroup, str]] = {}
    for group in groups:
        same = sum(one.level == group.level for one, _ in files.values())
        name = f"{form}-{group.level}{f'-{same + 1}' if same else ''}.{'json' if form == 'sonic' else 'txt'}"
        files[name] = group, switch_file(group, profile, cluster, form, cable_m, chip)[0]
    return files


def _write(out: Path, files: dict[str, str]) -> None:
    from netlayer.output import open_output

    with open_output(out, "nic-fabric") as output:
        for name, text in files.items():
            (output.part / name).write_text(text, encoding="utf-8")
        output.publish()
    click.echo(f"wrote {count(len(files), 'file')} to {out}", err=True)


def _tree(
    profile: Profile,
    cluster: ClusterConfig,
    groups: Sequence[HostGroup],
    switches: dict[str, SwitchGroup],
    wrong: dict[str, list[str]],
) -> dict[str, Any]:
    """JSON values."""
    from congestion.nic.profile.plan_script import as_tree

    return {
        "profile": profile.name,
        "cluster": cluster.name,
        "hosts": [
            {"script": f"nics-{number}.sh", "hosts": list(group.hosts), "nics": [as_tree(one) for one in group.nics]}
            for number, group in enumerate(groups, 1)
        ],
        "switches": [{"file": name, "switches": list(one.names), "level": one.level} for name, one in switches.items()],
        "differs": wrong,
    }


def _print(groups: Sequence[HostGroup], switches: dict[str, SwitchGroup], wrong: dict[str, list[str]]) -> None:
    from netlayer.printing import print_table

    rows = [
        [_span(group.hosts), f"{len(group.hosts):,}", _span(one.names), one.device.model or one.device.vendor,
         str(len(one.plan.changes)), f"{len(group.hosts) * len(one.names) * len(one.plan.changes):,}",
         str(len(one.plan.cannots)), f"nics-{number}.sh"]
        for number, group in enumerate(groups, 1)
        for one in group.nics
    ]  # fmt: skip
    headings = ["hosts", "count", "devices", "NIC", "writes a device", "writes in all", "cannot be had", "script"]
    print_table("Hosts", headings, rows)
    lacks = {(_span(one.names), lack) for group in groups for one in group.nics for lack in one.plan.cannots}
    if lacks:
        lines = [[names, lack.what, lack.why, lack.nearest] for names, lack in sorted(lacks, key=str)]
        print_table("Cannot be had", ["devices", "what", "why", "nearest"], lines)
    if switches:
        lines = [[_span(one.names), f"{len(one.names):,}", f"{len(one.ports)}", name] for name, one in switches.items()]
        print_table("Switches", ["switches", "count", "ports", "file"], lines)
    if wrong:
        lines = [[host, "; ".join(reasons)] for host, reasons in wrong.items()]
        print_table("Not as the cluster file says", ["host", "what"], lines)


def _print_notes(
    groups: Sequence[HostGroup], switches: Sequence[SwitchGroup], profile: Profile, out: Path | None
) -> None:
    """Print the notes, each once."""
    from congestion.nic.profile.plan_fabric import DEVICE
    from congestion.nic.profile.plan_script import comment
    from netlayer.units import format_rate

    notes = [note for group in groups for one in group.nics for note in one.plan.notes]
    notes = [comment(note.removeprefix(f"{DEVICE}: ")) for note in notes]
    if switches:
        notes.append(
            "ports of switches have the numbers of `netlayer topology build`: compare with your switches' names"
        )
        notes.append(
            "ECMP's hash is left alone: netlayer topology optimize, and netlayer nic switch --hash-seed --hash-offset"
        )
    rates = sorted({bps for one in switches for _, bps in one.ports})
    if len(rates) > 1 and profile.switch.kmin_bytes is not None:
        notes.append(f"ports of {', '.join(map(format_rate, rates))} mark at the same thresholds, the profile's")
    if out is None:
        notes.append("nothing was written: give --out for the scripts")
    for note in dict.fromkeys(notes):
        click.echo(f"note: {note}", err=True)


def _span(names: Sequence[str]) -> str:
    return ", ".join(names) or "-" if len(names) <= _FEW else f"{names[0]} ... {names[-1]} ({len(names):,})"
