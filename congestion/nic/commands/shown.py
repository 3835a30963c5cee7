"""Inventory and plans as a person reads them: tables on stdout, a script to run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

import click

from congestion.nic.hosts.inventory import Device
from congestion.nic.profile.draft import Cannot
from congestion.nic.profile.plan import Plan
from congestion.nic.profile.script_functions import FUNCTIONS
from congestion.nic.profile.steps import FileStep, Row, ToolStep, TriggerStep
from netlayer.printing import print_table, printable_line
from netlayer.units import format_rate

_SCRIPT_HEAD = """\
#!/bin/bash
# {title}
# Run it as root on the host itself. It stops at the first value that does not hold; it does not undo by itself:
# the lines to undo it stand at its end.
"""


def print_devices(devices: Sequence[Device]) -> None:
    """One line a device; what can be set below."""
    rows = [
        [
            device.name,
            device.model or device.vendor,
            device.firmware or "-",
            format_rate(device.rate_mbps * 1e6) if device.rate_mbps else "-",
            device.link_layer or "-",
            device.state or "-",
            device.netdev or "-",
            device.pci or "-",
            str(device.numa_node) if device.numa_node >= 0 else "-",
            ", ".join(f"{address} {level}" for address, level in device.gpus) or "-",
            ", ".join(str(gid.index) for gid in device.gids if gid.kind == "RoCE v2") or "-",
        ]
        for device in devices
    ]
    headings = ["device", "NIC", "firmware", "rate", "link", "state", "netdev", "PCI", "NUMA", "nearest GPUs"]
    print_table("RDMA devices", [*headings, "RoCE v2 GIDs"], rows)
    # Some ways are seen by root alone: those are named apart, for `none` would be wrong.
    ways = [[device.name, ", ".join(device.surfaces) or "-", ", ".join(device.closed) or "-"] for device in devices]
    print_table("How they can be set", ["device", "ways", "only root can say"], ways)


def print_plan(plan: Plan) -> None:
    """A table a device, then what cannot be had and what to know."""
    for device in plan.devices:
        rows = [row for row in plan.rows if row.step.device == device.name]
        lines = [
            [row.step.name, row.old if row.old is not None else "?", "->", row.step.new, row.step.unit, row.action,
             row.step.surface, row.step.reason]
            for row in rows
        ]  # fmt: skip
        title = f"{device.name} ({device.model or device.vendor}), profile {plan.profile.name}"
        print_table(title, ["setting", "now", "", "wanted", "unit", "action", "by", "because"], lines)
    if plan.cannots:
        lines = [[one.device, one.what, one.why, one.nearest] for one in plan.cannots]
        print_table("Cannot be had", ["device", "what", "why", "nearest"], lines)
    # A fleet of one model says the same of each device: once is enough.
    for text in dict.fromkeys([*plan.notes, *_warnings(plan), *_unknown(plan.rows)]):
        print_note(text)


def print_differences(rows: Sequence[Row]) -> None:
    """Print what is not as the profile wants it."""
    lines = [
        [row.step.device, row.step.name, row.old or "?", row.step.new, row.step.unit, row.step.surface] for row in rows
    ]
    print_table("Differences", ["device", "setting", "now", "wanted", "unit", "by"], lines)


def print_note(text: str) -> None:
    click.echo(f"note: {text}", err=True)


def print_left(verb: str, cannots: Sequence[Cannot], rows: Sequence[Row]) -> None:
    """Print what was not done or looked at, and why: one line for what several devices have alike."""
    # Twice grouped: what one device has for one reason, then the devices that have all of that alike.
    why: dict[tuple[str, str], list[str]] = {}
    for cannot in cannots:
        why.setdefault((cannot.device, cannot.why), []).append(cannot.what)
    for row in rows:
        why.setdefault((row.step.device, row.unknown or row.action), []).append(row.step.name)
    devices: dict[tuple[str, str], list[str]] = {}
    for (device, reason), names in why.items():
        devices.setdefault((", ".join(names), reason), []).append(device)
    for (what, reason), alike in devices.items():
        print_note(f"{verb}: {', '.join(alike)}: {what}: {reason}")


def to_script(plan: Plan, title: str) -> str:
    """The plan's changes as a script for bash, with the lines that undo it as comments at the end.

    Undone is as `rollback` does it: the last change first, then what drivers must be told, then folders that were made.
    """
    lines = [_SCRIPT_HEAD.format(title=printable_line(title)) + FUNCTIONS]
    # A list a change, in the order of the changes: what belongs together is undone together, the last one first.
    undo: list[list[str]] = []
    triggers: list[str] = []
    made: list[str] = []
    for row in plan.changes_there:
        step = row.step
        summary = f"{step.device} {step.name}: {row.old or '?'} -> {step.value}: {step.reason}"
        lines.append(f"# {printable_line(summary)}")
        if step.warning:
            lines.append(f"#   {printable_line(step.warning)}")
        if isinstance(step, FileStep):
            # configfs: the folder of a port makes its files, so it is made before the first of them is written.
            if row.to_come and step.group not in made:
                made.append(step.group)
                lines.append(f"mkdir -p {shlex.quote('/' + step.group)}")
            lines.append(f"put {shlex.quote('/' + step.path)} {step.new}")
            # A file of a folder that is made here has no old value: removing the folder undoes it.
            undo.append([] if row.to_come else _put_back(plan, row.old, step))
        elif isinstance(step, TriggerStep):
            lines.append(f"printf '1\\n' > {shlex.quote('/' + step.path)}")
            # A driver that reads its settings when it is told to must be told again after they are put back.
            triggers += [] if step.group in made else [f"printf '1\\n' > {shlex.quote('/' + step.path)}"]
        elif isinstance(step, ToolStep) and step.setting is not None:
            lines.append(f"run {shlex.join(step.setting.change(row.old or '0', step.new))}")
            undo.append([shlex.join(step.setting.change(step.new, row.old)) if row.old else f"UNKNOWN {step.name}"])
    back = [line for together in reversed(undo) for line in together]
    back += [*triggers, *(f"rmdir {shlex.quote('/' + group)}" for group in reversed(made))]
    lines += ["", "# To undo:", *(f"#   {line}" for line in back)]
    return "\n".join(lines) + "\n"


def _put_back(plan: Plan, old: str | None, step: FileStep) -> list[str]:
    """A file's old value, and after it those of the files that the kernel changes with it."""
    # The kernel writes these by itself when the first is written; without them undoing would leave its values.
    known = {row.step.path: row.old for row in plan.rows if isinstance(row.step, FileStep)}
    values = [(step.path, old), *((path, known[path]) for path in step.touches if path in known)]
    return [f"printf '%s\\n' {value or 'UNKNOWN'} > {shlex.quote('/' + path)}" for path, value in values]


def _warnings(plan: Plan) -> list[str]:
    """Return each warning once, with what it is about."""
    about: dict[str, list[str]] = {}
    for row in plan.rows:
        if row.step.warning and row.differs:
            about.setdefault(f"{row.step.device}: {row.step.warning}", []).append(row.step.name)
    return [f"{text}: {', '.join(names)}" for text, names in about.items()]


def _unknown(rows: Sequence[Row]) -> list[str]:
    about: dict[str, list[str]] = {}
    for row in rows:
        if row.old is None and row.unknown:
            about.setdefault(f"{row.step.device}: {row.unknown}", []).append(row.step.name)
    return [f"{text}: {', '.join(names)}" for text, names in about.items()]
