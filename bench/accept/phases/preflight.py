"""Facts about a host before anything runs: drivers, firmware, PCIe, NICs, GPUDirect, kernel log.

Read from system files and tools; facts that cannot be read are reported with the reason. Imports no torch. Judgement is
in `preflight_rules`.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

_TOOL_S = 15.0
_PACKAGES = ("netlayer", "torch", "nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-cudnn-cu13")
_MOST_CHARS = 4 << 20


def look(root: Path = Path("/")) -> dict[str, Any]:
    """Collect facts and tool outputs.

    Args:
        root: root of the file system, for tests.

    Returns:
        `traits` to compare with other hosts, `texts` for the parsers of `judge`, `nics` with their links, and
        `unread`: what is missing, and why.
    """
    traits, texts, unread = dict(_versions()), {}, {}
    for name, command in (
        ("nvidia-smi -q", ["nvidia-smi", "-q"]),
        ("nvidia-smi nvlink -s", ["nvidia-smi", "nvlink", "-s"]),
        ("dmesg", ["dmesg"]),
    ):
        text, reason = _output(command)
        if text:
            texts[name] = text
        else:
            unread[name] = reason
    nics = list(_nics(root))
    if not nics:
        unread["RDMA NICs"] = "none under /sys/class/infiniband"
    driver = _read(root / "proc/driver/nvidia/version")
    if driver:
        traits["kernel driver"] = driver.splitlines()[0]
    else:
        unread["kernel driver"] = "no /proc/driver/nvidia/version"
    if driver and nics:
        traits["GPUDirect RDMA"] = _gpu_direct(root)
    else:
        unread["GPUDirect RDMA"] = "needs an NVIDIA driver and an RDMA NIC"
    nets = {nic["net"] for nic in nics if nic["net"]}
    for net in sorted(nets):
        traits |= _net_traits(root, net, unread)
    return {"traits": traits, "texts": texts, "nics": nics, "unread": unread}


def _versions() -> Iterator[tuple[str, str]]:
    yield "kernel", platform.release()
    yield "python", platform.python_version()
    yield "cores", str(os.cpu_count())
    for name in _PACKAGES:
        try:
            yield name, metadata.version(name)
        except metadata.PackageNotFoundError:
            continue


def _output(command: list[str]) -> tuple[str, str]:
    """Run a tool; return its output, or "" and the reason."""
    if shutil.which(command[0]) is None:
        return "", f"no {command[0]} on the PATH"
    try:
        done = subprocess.run(command, capture_output=True, timeout=_TOOL_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as exc:
        return "", f"{command[0]} failed ({exc})"[:200]
    text = done.stdout.decode(errors="replace")[-_MOST_CHARS:]
    if done.returncode or not text.strip():
        message = " ".join(done.stderr.decode(errors="replace").split())[:150]
        return "", f"{command[0]} ended with {done.returncode} ({message or 'no output'})"
    return text, ""


def _nics(root: Path) -> Iterator[dict[str, Any]]:
    """Yield every port of every RDMA device, with the PCIe link of its card."""
    for device in sorted(_entries(root / "sys/class/infiniband")):
        card = device / "device"
        nets = [path.name for path in _entries(card / "net")]
        facts = {
            "firmware": _read(device / "fw_ver"),
            "board": _read(device / "board_id"),
            "width": _read(card / "current_link_width"),
            "max_width": _read(card / "max_link_width"),
            "speed": _read(card / "current_link_speed"),
            "max_speed": _read(card / "max_link_speed"),
            "net": nets[0] if nets else "",
        }
        for port in sorted(_entries(device / "ports")):
            counters = {
                name: _read(port / "counters" / name)
                for name in ("symbol_error", "link_downed", "link_error_recovery", "port_rcv_errors")
            }
            yield {
                "name": device.name,
                "port": port.name,
                "state": _read(port / "state"),
                "rate": _read(port / "rate"),
                "layer": _read(port / "link_layer"),
                "counters": {name: value for name, value in counters.items() if value},
                **facts,
            }


def _gpu_direct(root: Path) -> str:
    modules = _read(root / "proc/modules")
    return "nvidia_peermem loaded" if "nvidia_peermem" in modules else "nvidia_peermem not loaded (dma-buf may serve)"


def _net_traits(root: Path, net: str, unread: dict[str, str]) -> dict[str, str]:
    """Return the settings of a NIC's network device."""
    folder = root / "sys/class/net" / net
    traits = {f"{net} {name}": value for name in ("mtu", "speed") if (value := _read(folder / name))}
    for option, what in (("-a", "pause"), ("-g", "ring"), ("-i", "driver")):
        text, reason = _output(["ethtool", option, net])
        if text:
            lines = [" ".join(line.split()) for line in text.splitlines()[1:] if line.strip()]
            traits[f"{net} {what}"] = "; ".join(lines)[:300]
        else:
            unread[f"{net} {what}"] = reason
    return traits


def _entries(folder: Path) -> list[Path]:
    try:
        return list(folder.iterdir())
    except OSError:
        return []


def _read(path: Path) -> str:
    try:
        return path.read_text(errors="replace").strip()
    except OSError:
        return ""
