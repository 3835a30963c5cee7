"""`netlayer nic inventory | plan | verify`: what looks and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from congestion.nic.commands.host_options import (
    HostOptions,
    alone,
    count,
    draw_plan,
    elsewhere,
    give,
    of_host,
    open_devices,
    profile_option,
    summed,
)

if TYPE_CHECKING:  # `--help` needs no pydantic
    from netlayer.config.tree import ClusterConfig


@click.command()
@click.option(
    "--cluster", type=click.Path(path_type=Path), help="Cluster file to compare with: number of NICs and their rate."
)
@of_host
def inventory(options: HostOptions, cluster: Path | None) -> None:
    """Say which RDMA devices a host has, where they sit, and how each of them can be set.

    Exit 3: there are none. Exit 1: with --cluster, a host has not the NICs that the file says.

    \b
    Examples:
      netlayer nic inventory
      netlayer nic inventory --json -
      netlayer nic inventory --hosts node1,node2
      netlayer nic inventory --hosts hosts.txt --cluster examples/megascale-12288.toml --json inventory.json
      netlayer nic inventory --root /tmp/copy-of-a-host
    """
    from congestion.nic.commands.shown import print_devices
    from netlayer.errors import CheckFailed

    expected = None
    if cluster is not None:
        from netlayer.config.file import load_config

        expected = load_config(cluster, option="--cluster").cluster
    if elsewhere(options, "inventory", _judge(expected) if expected else None):
        return
    _tree, _tools, devices = open_devices(options)
    result = {"devices": [device.as_row() for device in devices], "summary": count(len(devices), "device")}
    wrong = []
    if expected:
        from congestion.nic.hosts.check import differences

        wrong = differences(devices, expected)
        result["differs"] = wrong
    give(options, result)
    if not alone(options):
        print_devices(devices)
    if wrong:
        raise CheckFailed(f"not as the cluster file says: {'; '.join(wrong)}")


def _judge(expected: ClusterConfig) -> Callable[[Any], list[str]]:
    """Return a function that compares a host's inventory, as it came over ssh, with the cluster file."""
    from congestion.nic.hosts.check import differences
    from congestion.nic.hosts.inventory_file import RELEASE, devices_of

    def judge(result: Any) -> list[str]:
        try:
            return differences(devices_of(result), expected)
        except ValueError as exc:
            return [f"its inventory {exc}: {RELEASE}"]

    return judge


@click.command()
@profile_option
@click.option("--script", is_flag=True, help="Print a script for bash to read and run instead.")
@of_host
def plan(options: HostOptions, script: bool) -> None:
    """Say what a profile would change on each device: old and new value, by which way, and why. Changes nothing.

    What a NIC cannot do is said with what comes nearest. For a whole cluster file, without a host: netlayer nic fabric.

    \b
    Examples:
      netlayer nic plan --profile examples/profiles/lossless-dcqcn.toml
      netlayer nic plan --profile examples/profiles/tuned-dcqcn.toml --device mlx5_0 --json plan.json
      netlayer nic plan --profile examples/profiles/lossy-ztr.toml --script > set-up.sh
    """
    from congestion.nic.commands.shown import print_plan, to_script

    if script and (options.hosts or alone(options)):
        raise click.UsageError("--script prints one host's script to stdout: not with --hosts or --json -")
    if elsewhere(options, "plan"):
        return
    host_plan, _tree, _tools = draw_plan(options)
    give(options, summed(host_plan))
    if script:
        click.echo(to_script(host_plan, f"profile {host_plan.profile.name}, plan of {options.root}"), nl=False)
    elif not alone(options):
        print_plan(host_plan)


@click.command()
@profile_option
@click.option("--partial", is_flag=True, help="Good although NICs cannot have all of it.")
@of_host
def verify(options: HostOptions) -> None:
    """Compare every value of a profile's plan with what is there now.

    Exit 1: something differs, could not be read, or cannot be had by a NIC (without --partial).

    \b
    Examples:
      netlayer nic verify --profile examples/profiles/lossless-dcqcn.toml
      netlayer nic verify --profile examples/profiles/lossless-dcqcn.toml --hosts hosts.txt --json verified.json
    """
    from congestion.nic.commands.shown import print_differences, print_left
    from netlayer.errors import CheckFailed

    if elsewhere(options, "verify"):
        return
    host_plan, _tree, _tools = draw_plan(options)
    unread = [row for row in host_plan.unknown if row.runs]
    wrong = [*host_plan.differences, *unread]
    skipped = [row for row in host_plan.unknown if not row.runs]
    checked = len(host_plan.rows) - len(skipped) - len(unread)
    text = f"{len(host_plan.differences)} of {count(checked, 'value')} differ"
    text += f", {len(unread)} could not be read" if unread else ""
    give(options, summed(host_plan) | {"summary": text})
    if not alone(options):
        print_differences(wrong)
    print_left("not checked", host_plan.cannots, skipped)
    if wrong:
        first = wrong[0]
        raise CheckFailed(
            f"{text}; first: {first.step.device} {first.step.name}: {first.old or first.unknown}, not {first.step.new}"
        )
    if host_plan.cannots and not options.partial:
        one = host_plan.cannots[0]
        more = count(len(host_plan.cannots), "thing")
        rule = f"{text}, but {more} of the profile cannot be had; first: {one.device} {one.what}: {one.why}"
        raise CheckFailed(f"{rule}; nearest: {one.nearest}; or give --partial")
    click.echo(text, err=alone(options))
