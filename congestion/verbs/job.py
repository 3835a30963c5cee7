"""One measurement with verbs in a process of its own: an order as JSON in its argument, lines of JSON on stdout.

    python -m congestion.verbs.job '{"do": "look"}'

For `netlayer accept`, whose workers would die with a driver that does. pyverbs mostly comes with the system's Python
and not with the one that netlayer runs in, so the job goes on there where it must. Not covered: what figures mean.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from congestion.nic.hosts.inventory import RDMA, take_inventory
from congestion.nic.hosts.tree import Tree
from congestion.nic.vendors.tools import Tools
from congestion.verbs.device import Device, devices, find_device, load_pyverbs
from congestion.verbs.measure import Plan, measure_pair
from congestion.verbs.queue_pair import QpSettings
from congestion.verbs.remote import measure_remote, serve
from netlayer.errors import CheckFailed, ConfigError, HardwareMissing, NetlayerError

Answer = dict[str, Any]
_SYSTEM_PYTHON = "/usr/bin/python3"
_ABLE = "import sys, pyverbs.device; sys.exit(sys.version_info < (3, 11))"
_ROOT = Path(__file__).parent.parent.parent
_MODULE = "congestion.verbs.job"
_MOVED = "moved"


def look(root: Path = Path("/")) -> Answer:
    """The RDMA devices of this host with the NVIDIA GPUs nearest to each.

    Args:
        root: of a file system, for tests.

    Raises:
        HardwareMissing: no device, none that is active, or no pyverbs.
    """
    sysfs = root / RDMA
    find_device(sysfs=sysfs)
    load_pyverbs("device")
    all_devices = devices(sysfs)
    # The inventory reads more than a soft device has, a thousand addresses among it, each by its way from the root.
    cards = [device.name for device in all_devices if (sysfs / device.name / "device").exists()]
    known = take_inventory(Tree(root), Tools(host=False), cards)[0] if cards else []
    near = {one.name: [address for address, _ in one.gpus if _is_nvidia(root, address)] for one in known}
    return {"devices": [_device_row(device, near.get(device.name)) for device in all_devices]}


def _device_row(device: Device, gpus: list[str] | None) -> Answer:
    about = {"name": device.name, "rate": device.rate, "soft": gpus is None, "gpus": gpus or []}
    return {**about, "lacks": _lacks(device)}


def _lacks(device: Device) -> str:
    """Return why it cannot be measured, with the remedy; empty where it can."""
    if device.state != "ACTIVE":
        return f"its port is {device.state or 'unknown'}; connect its cable, or set its interface up"
    if device.link_layer != "Ethernet":
        return (
            f"its link is {device.link_layer or 'unknown'}, RoCE alone is measured; run ib_write_bw, then accept judge"
        )
    try:
        device.choose_gid()
    except ConfigError as exc:
        return f"{exc.rule}; {exc.remedy}"
    return ""


def _is_nvidia(root: Path, address: str) -> bool:
    try:
        return (root / "sys/bus/pci/devices" / address / "vendor").read_text().strip() == "0x10de"
    except OSError:
        return False


def pair(source: str, target: str, plan: Mapping[str, Any], gpu: str | None = None) -> Answer:
    """Rows between two devices of this host, or from one to itself."""
    return {"rows": measure_pair(source, target, _plan(plan), gpu=gpu)}


def lend(host: str, device: str) -> Answer:
    """Serve one client; a line before that says at which port."""
    return {"served": serve(host, 0, device, clients=1, ready=lambda port: _print_line({"port": port}))}


def remote(host: str, port: int, device: str, plan: Mapping[str, Any]) -> Answer:
    """Rows from a device of this host to a server's."""
    return {"rows": measure_remote(host, port, device, _plan(plan))}


JOBS: Mapping[str, Callable[..., Answer]] = {"look": look, "pair": pair, "lend": lend, "remote": remote}


def do(order: Mapping[str, Any]) -> Answer:
    """The answer to an order; what went wrong is an answer too.

    Returns:
        with `error` where it did not work, and `guilty`: whether a NIC or link is to blame for it.
    """
    arguments = dict(order)
    try:
        return JOBS[arguments.pop("do")](**arguments)
    except (NetlayerError, OSError) as exc:
        return {"error": str(exc), "guilty": isinstance(exc, CheckFailed)}


def _plan(order: Mapping[str, Any]) -> Plan:
    fields = dict(order)
    return Plan(settings=QpSettings(**fields.pop("settings", {})), **fields)


def _print_line(answer: Answer) -> None:
    sys.stdout.write(f"{json.dumps(answer)}\n")
    sys.stdout.flush()


def move(order: str) -> None:
    """Go on in the system's Python, where that has pyverbs and this one has not; else return."""
    try:
        load_pyverbs("device")
    except HardwareMissing:
        if not Path(_SYSTEM_PYTHON).exists():
            return
        able = subprocess.run([_SYSTEM_PYTHON, "-c", _ABLE], capture_output=True, check=False).returncode == 0
        if able:
            environ = {**os.environ, "PYTHONPATH": str(_ROOT)}
            os.execve(_SYSTEM_PYTHON, [_SYSTEM_PYTHON, "-m", _MODULE, order, _MOVED], environ)


def main() -> None:
    """Do what the first argument says."""
    if _MOVED not in sys.argv[2:] and devices():
        move(sys.argv[1])
    _print_line(do(json.loads(sys.argv[1])))


if __name__ == "__main__":
    main()
