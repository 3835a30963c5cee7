"""RDMA devices, their ports and addresses as the kernel shows them, and the library that drives them.

Reading needs no library: all of it stands below /sys/class/infiniband. pyverbs is optional (Debian and Ubuntu package
it as python3-pyverbs; what PyPI has does not build everywhere), so it is loaded where a queue pair is wanted. Not
covered: InfiniBand's subnet addresses, and ports beyond the first.
"""

from __future__ import annotations

import importlib
import ipaddress
import os
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from netlayer.errors import ConfigError, HardwareMissing

SYSFS = Path("/sys/class/infiniband")
_ROCE_V2 = "RoCE v2"
_EMPTY = ipaddress.IPv6Address(0)
_UNUSED = _EMPTY.exploded  # a table has up to 1,024 entries, nearly all of them this one
_REMEDY_DEVICE = "use a machine with an RDMA NIC and its driver, or the virtual machine of: make rdma-lab"
_REMEDY_PYVERBS = "on Debian and Ubuntu run: apt-get install python3-pyverbs, and use the system's Python"


@dataclass(frozen=True)
class Gid:
    """An entry of a port's address table.

    Args:
        index: its place in the table.
        address: an IPv6 address, or an IPv4 one as ::ffff:a.b.c.d.
        kind: "RoCE v2", "IB/RoCE v1".
        netdev: the network interface that it belongs to.
    """

    index: int
    address: ipaddress.IPv6Address
    kind: str
    netdev: str

    @property
    def ip(self) -> str:
        return str(self.address.ipv4_mapped or self.address)


@dataclass(frozen=True)
class Device:
    """One RDMA device and its first port.

    Args:
        name: mlx5_0, rxe0.
        state: ACTIVE, DOWN.
        rate: as the kernel writes it: `400 Gb/sec (4X NDR)`.
        link_layer: Ethernet or InfiniBand.
        gids: the entries that are in use.
    """

    name: str
    state: str
    rate: str
    link_layer: str
    gids: tuple[Gid, ...]

    @property
    def netdev(self) -> str:
        return next((gid.netdev for gid in self.gids if gid.netdev), "")

    def choose_gid(self, index: int | None = None) -> Gid:
        """The entry of that index, or the first RoCEv2 one of an IPv4 address, then of a global IPv6 one.

        Raises:
            ConfigError: there is none.
        """
        if index is not None:
            entry = next((gid for gid in self.gids if gid.index == index), None)
            if entry is None:
                used = ", ".join(str(gid.index) for gid in self.gids) or "none"
                raise ConfigError("gid_index", index, f"is empty on {self.name}", f"in use are {used}")
            return entry
        able = [gid for gid in self.gids if gid.kind == _ROCE_V2 and not gid.address.is_link_local]
        able.sort(key=lambda gid: (gid.address.ipv4_mapped is None, gid.index))
        if not able:
            remedy = "give its network interface an IP address, and set the interface up"
            raise ConfigError("device", self.name, "has no RoCEv2 address", remedy)
        return able[0]


def devices(sysfs: Path = SYSFS) -> list[Device]:
    """Every RDMA device of this host, by name; empty where there is none."""
    return [_read(path) for path in sorted(sysfs.iterdir())] if sysfs.is_dir() else []


def find_device(name: str | None = None, sysfs: Path = SYSFS) -> Device:
    """The device of that name, or the first whose port is active.

    Raises:
        HardwareMissing: the host has none, or none that is active.
        ConfigError: there is none of that name.
    """
    names = sorted(path.name for path in sysfs.iterdir()) if sysfs.is_dir() else []
    if not names:
        raise HardwareMissing(f"no RDMA device below {sysfs}; {_REMEDY_DEVICE}")
    if name in names:
        return _read(sysfs / name)
    if name is not None:
        raise ConfigError("device", name, "is not there", f"give one of {', '.join(names)}")
    all_devices = devices(sysfs)
    active = [device for device in all_devices if device.state == "ACTIVE"]
    if not active:
        states = ", ".join(f"{one.name} is {one.state}" for one in all_devices)
        raise HardwareMissing(f"no RDMA device has an active port: {states}; connect a cable, or set the interface up")
    return active[0]


def load_pyverbs(module: str = "") -> ModuleType:
    """`pyverbs`, or a module of it.

    Raises:
        HardwareMissing: it is not installed, or does not load.
    """
    try:
        return importlib.import_module(f"pyverbs.{module}" if module else "pyverbs")
    except ImportError as exc:
        raise HardwareMissing(f"pyverbs cannot be imported ({exc}); {_REMEDY_PYVERBS}") from exc


def _read(path: Path) -> Device:
    port = path / "ports" / "1"
    gids = []
    for entry in sorted((port / "gids").glob("*"), key=lambda entry: int(entry.name)):
        text = _text(entry)
        address = ipaddress.IPv6Address(text) if text and text != _UNUSED else _EMPTY
        if address != _EMPTY:
            kind, netdev = (_text(port / "gid_attrs" / about / entry.name) for about in ("types", "ndevs"))
            gids.append(Gid(int(entry.name), address, kind, netdev))
    state = _text(port / "state").partition(": ")[2]
    return Device(path.name, state, _text(port / "rate"), _text(port / "link_layer"), tuple(gids))


def _text(path: Path) -> str:
    # Three system calls; Path.read_text() makes seven, and a table has a thousand files.
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        return ""
    try:
        return os.read(file, 256).decode().strip()
    except OSError:
        return ""
    finally:
        os.close(file)
