"""The plan of hosts that were not asked as a script for each of them, which finds out there what the plan left open.

It looks at every NIC (vendor, model, rate) and for every program before the first write, says what each file and
program said before, reads files back, and stops at the first fault. Not covered: the way back, which `netlayer nic
apply` has.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from typing import Any

from congestion.nic.hosts.inventory import MODELS, VENDORS
from congestion.nic.profile.plan_fabric import DEVICE, NETDEV, PCI, Alike, HostGroup
from congestion.nic.profile.script_functions import FUNCTIONS
from congestion.nic.profile.steps import FileStep, ToolStep, TriggerStep
from congestion.nic.vendors.tool_settings import ToolSetting
from netlayer.printing import printable_line

_HEAD = """\
#!/bin/bash
# {title}
# Run it as root on each of these hosts, and keep what it prints: the values that were there before. It looks at every
# NIC before the first write and stops at the first value that does not hold. It does not undo: `netlayer nic apply`
# keeps a journal and does.
"""
_LOOK = """\
look() {  # device, vendor, model or -, rate, parity of the PCI function or -: sets dev, pci and netdev
  local base=/sys/class/infiniband/$1 file
  dev=$1 pci='' netdev=''
  [ -d "$base" ] || fail "$dev is not there"
  [ "$(cat "$base/device/vendor")" = "$2" ] || fail "$dev is of vendor $(cat "$base/device/vendor"), not $2"
  [ "$3" = - ] || [ "$(cat "$base/device/device")" = "$3" ] || fail "$dev is not of model $3"
  [ "$(cat "$base/ports/1/link_layer")" = Ethernet ] || fail "$dev is $(cat "$base/ports/1/link_layer"), no RoCE"
  [[ $(cat "$base/ports/1/state") == *ACTIVE* ]] || fail "$dev is not up"
  [[ $(cat "$base/ports/1/rate") == "$4 Gb/sec"* ]] || fail "$dev has $(cat "$base/ports/1/rate"), not $4 Gb/sec"
  pci=$(readlink -f "$base/device"); pci=${pci##*/}
  [[ $pci =~ ^[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\\.[0-7]$ ]] || fail "$dev has no PCI address"
  [ "$5" = - ] || [ "$((${pci##*.} % 2))" -eq "$5" ] || fail "$dev is $pci, another port of its NIC than planned for"
  for file in "$base"/ports/1/gid_attrs/ndevs/*; do
    [ -n "$netdev" ] || netdev=$(cat "$file" 2> /dev/null) || true
  done
  for file in "$base"/device/net/*; do [ -n "$netdev" ] || netdev=${file##*/}; done
  [[ $netdev =~ ^[A-Za-z0-9][A-Za-z0-9_.-]*$ ]] || fail "$dev has no network device"
}
before() { echo "before: $*"; "$@" < /dev/null || echo 'not to be read'; }
"""


def host_script(group: HostGroup, title: str) -> str:
    """The script of a group of hosts: nothing of it runs before all of it has arrived."""
    programs = sorted({setting.tool for nics in group.nics for setting in _settings(nics)})
    lines = [f"command -v {shlex.quote(one)} > /dev/null || fail '{one} is not installed'" for one in programs]
    loops = [(nics, list(_writes(nics))) for nics in group.nics]
    for nics, _ in loops:
        lines.append(f"for name in {shlex.join(nics.names)}; do {_look(nics)}; done")
    for nics, writes in loops:
        lines += [f"for name in {shlex.join(nics.names)}; do", f"  {_look(nics)}", *(f"  {one}" for one in writes)]
        lines.append("done")
    body = "\n".join(f"  {line}" for line in lines)
    return f"{_HEAD.format(title=printable_line(title))}{FUNCTIONS}{_LOOK}main() {{\n{body}\n}}\nmain\n"


def _settings(nics: Alike) -> list[ToolSetting]:
    steps = [row.step for row in nics.plan.changes]
    return [step.setting for step in steps if isinstance(step, ToolStep) and step.setting is not None]


def _look(nics: Alike) -> str:
    device = nics.device
    vendor = next(number for number, name in VENDORS.items() if name == device.vendor)
    model = next((number for number, name in MODELS.items() if name == device.model), "-")
    of_port = any(row.step.name.endswith(device.port_suffix) for row in nics.plan.changes)  # keys of the firmware
    parity = int(device.pci[-1]) % 2 if of_port else "-"
    return f'look "$name" {vendor} {model} {device.rate_mbps / 1000:g} {parity}'


def _writes(nics: Alike) -> Iterator[str]:
    """Yield the lines of the script that change settings: tools' calls, files that are written, triggers."""
    queries, made = set[str](), set[str]()
    for row in nics.plan.changes:
        step = row.step
        yield f"# {comment(f'{step.name} = {step.value}: {step.reason}')}"
        if step.warning:
            yield f"#   {comment(step.warning)}"
        if isinstance(step, ToolStep):
            assert step.setting is not None
            query = shell_words(step.setting.query())
            if query not in queries:
                yield f"before {query}"
            queries.add(query)
            yield f"run {shell_words(step.setting.change('0', step.new))}"
        elif isinstance(step, FileStep):
            if row.to_come and step.group not in made:
                yield f"mkdir -p {shell_path(step.group)}"
            made.add(step.group)
            yield f"put {shell_path(step.path)} {step.new}"
        elif isinstance(step, TriggerStep):
            yield f"printf '1\\n' > {shell_path(step.path)}"


def shell_path(path: str) -> str:
    """A path of a plan as the script says it: its variables for what only the host knows."""
    return "".join(f"/{_word(part)}" for part in path.split("/"))


def shell_words(arguments: list[str]) -> str:
    """A program's arguments, likewise."""
    return " ".join(_word(one) for one in arguments)


def comment(text: str) -> str:
    """Words for a person, likewise."""
    for function in (0, 1):
        text = text.replace(f"{PCI}.{function}", "$pci")
    return printable_line(text)


def _word(text: str) -> str:
    known = {DEVICE: '"$dev"', NETDEV: '"$netdev"', f"{PCI}.0": '"$pci"', f"{PCI}.1": '"$pci"'}
    return known.get(text) or shlex.quote(text)


def as_tree(nics: Alike) -> dict[str, Any]:
    """The plan as JSON values, in the script's words."""
    plan = nics.plan
    steps = []
    for row in plan.changes:
        step = row.step
        fields: dict[str, Any] = {"surface": step.surface, "name": step.name, "new": step.new, "unit": step.unit}
        fields |= {"reason": step.reason, "warning": comment(step.warning)}
        if isinstance(step, ToolStep):
            assert step.setting is not None
            fields["run"] = shell_words(step.setting.change("0", step.new))
        else:
            assert isinstance(step, FileStep | TriggerStep)
            fields["path"] = shell_path(step.path)
        steps.append(fields)
    cannot = [{"what": one.what, "why": comment(one.why), "nearest": comment(one.nearest)} for one in plan.cannots]
    return {"devices": list(nics.names), "steps": steps, "cannot": cannot}
