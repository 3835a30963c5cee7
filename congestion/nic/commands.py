"""`netlayer nic inventory | plan | verify`: what looks and changes nothing."""

from __future__ import annotations

import click

from congestion.nic.host_options import (
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


@click.command()
@of_host
def inventory(options: HostOptions) -> None:
    """Say which RDMA devices a host has, where they sit, and how each of them can be set.

    Exit 3: there are none.

    \b
    Examples:
      netlayer nic inventory
      netlayer nic inventory --json -
      netlayer nic inventory --ssh node1,node2
      netlayer nic inventory --root /tmp/copy-of-a-host
    """
    from congestion.nic.shown import print_devices

    if elsewhere(options, "inventory"):
        return
    _tree, _tools, devices = open_devices(options)
    give(options, {"devices": [device.as_row() for device in devices], "summary": count(len(devices), "device")})
    if not alone(options):
        print_devices(devices)


@click.command()
@profile_option
@click.option("--script", is_flag=True, help="Print a script for bash to read and run instead.")
@of_host
def plan(options: HostOptions, script: bool) -> None:
    """Say what a profile would change on each device: old and new value, by which way, and why. Changes nothing.

    What a NIC cannot do is said with what comes nearest.

    \b
    Examples:
      netlayer nic plan --profile examples/profiles/lossless-dcqcn.toml
      netlayer nic plan --profile examples/profiles/tuned-dcqcn.toml --device mlx5_0 --json plan.json
      netlayer nic plan --profile examples/profiles/lossy-ztr.toml --script > set-up.sh
    """
    from congestion.nic.shown import print_plan, to_script

    if script and (options.ssh or alone(options)):
        raise click.UsageError("--script prints one host's script to stdout: not with --ssh or --json -")
    if elsewhere(options, "plan"):
        return
    found, _tree, _tools = draw_plan(options)
    give(options, summed(found))
    if script:
        click.echo(to_script(found, f"profile {found.profile.name}, plan of {options.root}"), nl=False)
    elif not alone(options):
        print_plan(found)


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
      netlayer nic verify --profile examples/profiles/lossless-dcqcn.toml --ssh hosts.txt --json verified.json
    """
    from congestion.nic.shown import print_differences, print_note
    from netlayer.errors import CheckFailed

    if elsewhere(options, "verify"):
        return
    found, _tree, _tools = draw_plan(options)
    unread = [row for row in found.unknown if row.runs]
    wrong = [*found.differences, *unread]
    skipped = [row for row in found.unknown if not row.runs]
    checked = len(found.rows) - len(skipped) - len(unread)
    words = f"{len(found.differences)} of {count(checked, 'value')} differ"
    words += f", {len(unread)} could not be read" if unread else ""
    give(options, summed(found) | {"summary": words})
    if not alone(options):
        print_differences(wrong)
    for row in skipped:
        print_note(f"not checked: {row.step.device} {row.step.name}: {row.unknown or row.action}")
    for one in found.cannots:
        print_note(f"not checked: {one.device} {one.what}: {one.why}")
    if wrong:
        first = wrong[0]
        raise CheckFailed(
            f"{words}; first: {first.step.device} {first.step.name}: {first.old or first.unknown}, not {first.step.new}"
        )
    if found.cannots and not options.partial:
        one = found.cannots[0]
        more = count(len(found.cannots), "thing")
        rule = f"{words}, but {more} of the profile cannot be had; first: {one.device} {one.what}: {one.why}"
        raise CheckFailed(f"{rule}; nearest: {one.nearest}; or give --partial")
    click.echo(words, err=alone(options))
