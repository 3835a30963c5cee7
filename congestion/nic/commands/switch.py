"""`netlayer nic switch`: the switch side of a NIC profile, as SONiC tables or as commands of three other systems."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from congestion.nic.switches.plan import CHIP_NAMES, FORMATS, MOST_SEED

if TYPE_CHECKING:
    from congestion.nic.switches.buffers import Headroom
    from congestion.nic.switches.plan import Format, SwitchPlan
    from netlayer.output import Output

_PATH = click.Path(path_type=Path)


@click.command()
@click.option("--profile", type=_PATH, required=True, help="The NIC profile; examples/profiles/ has some.")
@click.option("--format", "form", type=click.Choice(FORMATS), required=True, help="What the switch speaks.")
@click.option("--ports", help="With commas: Ethernet0,Ethernet8 (sonic), swp1-32 (nvue), Ethernet1-32, Ethernet1/1-32.")
@click.option(
    "--base", type=_PATH, help="sonic: the switch's config_db.json; all is merged into it, its ports are used."
)
@click.option("--rate", default="400G", show_default=True, help="Of a port.")
@click.option("--cable-m", type=int, default=40, show_default=True, help="Longest cable of these ports, metres.")
@click.option("--mtu", type=int, default=9216, show_default=True, help="Of a port, bytes.")
@click.option("--hash-seed", type=click.IntRange(0, MOST_SEED), help="Of ECMP, one a switch [default: left alone].")
@click.option("--hash-offset", type=click.IntRange(0, 255), help="Of ECMP, one a tier [default: left alone].")
@click.option(
    "--chip",
    type=click.Choice(CHIP_NAMES),
    help="Of the switch, for PFC headroom [default: by the platform that --base names].",
)
@click.option("--headroom-bytes", type=click.IntRange(1), help="Headroom (xoff) of a chip that is none of these.")
@click.option("--cell-bytes", type=click.IntRange(64, 1024), help="Its buffer cell; needed with --headroom-bytes.")
@click.option("--out", type=_PATH, help="Folder for the files [default: to stdout].")
@click.option("--json", "json_file", type=_PATH, help="Also write plan and arithmetic here; - is stdout.")
def switch(
    profile: Path,
    form: Format,
    ports: str | None,
    base: Path | None,
    rate: str,
    out: Path | None,
    json_file: Path | None,
    **options: Any,
) -> None:
    """Write what a switch must be set to, so that it treats packets as the NICs of a profile mark them.

    DSCP map, PFC, ECN, queues, hash; the headroom that PFC needs is shown with its source: computed for a Spectrum,
    looked up in public tables for a Tomahawk or Trident, else given by you. Nothing is sent to a switch. SONiC's tables
    are checked against a schema written from SONiC's models; the commands were tried on no switch. EOS's are for
    Broadcom XGS (Trident, Tomahawk) alone. NVUE, EOS and NX-OS set headroom by themselves: there --chip only shows it.

    \b
    Examples:
      netlayer nic switch --profile examples/profiles/lossless-dcqcn.toml --format sonic --base config_db.json --out sw
      netlayer nic switch --profile p.toml --format sonic --ports Ethernet0,Ethernet8 --chip tomahawk-5 --cable-m 5
      netlayer nic switch --profile p.toml --format sonic --base config_db.json --headroom-bytes 400000 --cell-bytes 256
      netlayer nic switch --profile examples/profiles/lossless-dcqcn.toml --format nvue --ports swp1-32 --hash-seed 7
      netlayer nic switch --profile p.toml --format arista --ports Ethernet1-32 --rate 200G --cable-m 100
      netlayer nic switch --profile p.toml --format cisco --ports Ethernet1/1-32 --hash-seed 7 --hash-offset 4
    """
    from congestion.nic.profile.file import load_profile
    from congestion.nic.switches.plan import check_ports, plan_switch
    from netlayer.errors import ConfigError
    from netlayer.results import check_target, write_text
    from netlayer.units import parse_rate

    check_target("--json", json_file)
    if base and form != "sonic":
        raise ConfigError("--base", base, f"has no effect with --format {form}", "omit it")
    if out is None and str(json_file) == "-":
        raise ConfigError("--json", "-", "stdout has the configuration already", "give --out too")
    try:
        rate_bps = parse_rate(rate)
    except ValueError as exc:
        raise ConfigError("--rate", rate, str(exc), "give one such as 400G") from exc
    tree = _base(base)
    names = [name.strip() for name in ports.split(",")] if ports else sorted(tree["PORT"], key=_natural) if tree else []
    check_ports(names, form)
    nic_profile = load_profile(profile)
    chip, room = _headroom(options, form, tree, names, rate_bps) if nic_profile.pfc.priorities else ("", None)
    plan = plan_switch(
        nic_profile,
        names,
        rate_bps=rate_bps,
        cable_m=options["cable_m"],
        mtu_bytes=options["mtu"],
        hash_seed=options["hash_seed"],
        hash_offset=options["hash_offset"],
        room=room,
        chip=chip,
    )
    plan = _with_notes(plan, form, tree)
    files = _files(plan, form, tree)
    if json_file:
        write_text(json_file, _json(plan, files))
    if out is None:
        for name, text in files.items():
            click.echo(f"note: {name}", err=True)
            click.echo(text, nl=False)
    else:
        from netlayer.output import open_output

        with open_output(out, "nic-switch") as output:
            _write(output, files)
    if form == "arista":  # the text begins with it
        click.echo("note: EOS: for switches on Broadcom XGS (Trident, Tomahawk) alone", err=True)
    _explain(plan, err=out is None or str(json_file) == "-")


def _base(path: Path | None) -> dict[str, Any]:
    if path is None:
        return {}
    from congestion.nic.switches.sonic import read_base

    return read_base(path)


def _headroom(
    options: dict[str, Any], form: Format, tree: dict[str, Any], names: list[str], rate_bps: int
) -> tuple[str, Headroom | None]:
    """The chip's name and what it needs; none where nobody named the chip and the system needs no number."""
    from congestion.nic.switches.buffers import find_headroom, own_headroom, unknown_chip
    from congestion.nic.switches.chips import CHIPS, find_chip
    from congestion.nic.switches.plan import ETHERNET_BYTES, check_cable_and_mtu
    from congestion.nic.switches.sonic import lanes_of, platform_of
    from netlayer.errors import ConfigError

    own, cell, name = options["headroom_bytes"], options["cell_bytes"], options["chip"]
    frame = options["mtu"] + ETHERNET_BYTES
    check_cable_and_mtu(options["cable_m"], options["mtu"])
    if (own is None) != (cell is None):
        option, lacks = ("--cell-bytes", "--headroom-bytes") if own is None else ("--headroom-bytes", "--cell-bytes")
        raise ConfigError(option, own or cell, f"says nothing without {lacks}", "give both, or --chip")
    if own is not None:
        return name or "", own_headroom(own, cell, frame)
    platform = platform_of(tree)
    platform_chip = find_chip(platform) if platform else None
    if name and platform_chip and platform_chip.name != name:
        rule = f"is not the chip of {platform} in --base, which is {platform_chip.name}"
        raise ConfigError("--chip", name, rule, "leave --chip out, or give the base of that switch")
    chip = CHIPS[name] if name else platform_chip
    if chip is None:
        if form == "sonic" and platform:
            raise unknown_chip("--base", platform, "is a platform whose switch chip is not known here")
        if form == "sonic":
            raise unknown_chip("--chip", None, "is missing: PFC headroom differs from chip to chip")
        return "", None
    return chip.name, find_headroom(chip, rate_bps, options["cable_m"], frame, lanes=lanes_of(tree, names))


def _with_notes(plan: SwitchPlan, form: Format, tree: dict[str, Any]) -> SwitchPlan:
    """Add the notes on this form, and on the base."""
    from dataclasses import replace

    from congestion.nic.switches.sonic import is_traditional, notes_on

    notes = list(plan.notes)
    if plan.lossless and form == "nvue":
        notes.append("half of the buffer becomes a lossless pool; it was all lossy: traffic stops while it is changed")
    if plan.lossless and form != "sonic":
        notes.append("PFC headroom is not written: the switch's system sets it, see its own `show` of PFC buffers")
    if form == "sonic" and tree:
        notes += notes_on(tree, plan)
    elif form == "sonic" and plan.lossless:
        model = "traditional" if is_traditional({}, plan) else "dynamic"
        notes.append(f"without --base: written for SONiC's {model} buffer model; in the other one give --base")
    return replace(plan, notes=tuple(notes))


def _natural(name: str) -> tuple[int, str]:
    digits = "".join(char for char in name if char.isdecimal())
    return int(digits or 0), name


def _files(plan: SwitchPlan, form: Format, tree: dict[str, Any]) -> dict[str, str]:
    """Return the text of each file, by file name."""
    from congestion.nic.switches import sonic as switch_sonic
    from congestion.nic.switches import text as switch_text

    if form != "sonic":
        return {f"{form}.txt": getattr(switch_text, form)(plan)}
    whole = switch_sonic.merge(tree, plan) if tree else switch_sonic.tables_of(plan)
    files = {"config_db.json": json.dumps(whole, indent=4) + "\n"}
    app = switch_sonic.switch_json(plan)
    return {**files, "switch.json": json.dumps(app, indent=4) + "\n"} if app else files


def _write(output: Output, files: dict[str, str]) -> None:
    for name, text in files.items():
        (output.part / name).write_text(text, encoding="utf-8")
    output.publish()
    for name in files:
        click.echo(f"wrote {output.folder / name}", err=True)


def _json(plan: SwitchPlan, files: dict[str, str]) -> str:
    from dataclasses import asdict

    from netlayer.environ import snapshot

    return json.dumps({"plan": asdict(plan), "files": files, "environment": snapshot()}, indent=1) + "\n"


def _explain(plan: SwitchPlan, *, err: bool) -> None:
    """The arithmetic, and what must be known."""
    for note in plan.notes:
        click.echo(f"note: {note}", err=True)
    if plan.lossless_headroom:
        for line in _arithmetic(plan, plan.lossless_headroom):
            click.echo(line, err=err)


def _arithmetic(plan: SwitchPlan, room: Headroom) -> list[str]:
    from netlayer.units import format_rate

    rows = [
        (what, f"x {value:.3f}" if what.startswith("share") else f"{value:,.0f} B", how)
        for what, value, how in room.terms
    ]
    formula = [f"  {'xoff: lossless MTU + share * (the other ones), whole KiB':<58} {room.xoff_bytes:>10,} B"]
    looked_up = [f"  {'xoff':<58} {room.xoff_bytes:>10,} B   {room.source}"]
    whole = room.size_bytes * len(plan.lossless) * plan.num_ports
    return [
        f"PFC headroom of a lossless priority on one port, {format_rate(plan.rate_bps)}, {plan.cable_m} m, "
        f"{plan.chip or 'your figures'} (predicted):",
        *(f"  {what:<58} {value:>12}   {how}" for what, value, how in rows),
        *(formula if rows else looked_up),
        f"  {'xon':<58} {room.xon_bytes:>10,} B",
        f"  {'in all: xoff and what the group reserves':<58} {room.size_bytes:>10,} B",
        *(
            f"  {'another public table for the chip: xoff':<58} {xoff:>10,} B   {source}"
            for xoff, source in room.others
        ),
        f"  {f'priorities: {len(plan.lossless)}, ports: {plan.num_ports}; in all':<58} {whole:>10,} B",
    ]
