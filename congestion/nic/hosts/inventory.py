"""Every RDMA device of a host, read from sysfs, debugfs and configfs: what it is, where it sits, how it can be set.

Names that come out of files (network devices, PCI addresses) go into paths and arguments later, so one that is no such
name is not believed. Distances to GPUs are those of the PCI tree, in the words of `nvidia-smi topo -m`. Not covered:
links and counters (`netlayer nic watch`), queue pairs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from congestion.nic.hosts.tree import Tree
from congestion.nic.vendors.tools import Tools
from netlayer.printing import printable

RDMA = "sys/class/infiniband"
MLX5_DEBUG = "sys/kernel/debug/mlx5"
BNXT_DEBUG = "sys/kernel/debug/bnxt_re"
BNXT_CONFIG = "sys/kernel/config/bnxt_re"
IRDMA_CONFIG = "sys/kernel/config/irdma"
IONIC_DEBUG = "sys/kernel/debug/ionic"
CM_CONFIG = "sys/kernel/config/rdma_cm"
_TOOLS = ("dcb", "ethtool")
# mlxreg and mlxconfig are of NVIDIA's MFT; the open mstflint has the same two as mstreg and mstconfig.
_NVIDIAS_TOOLS = ("mlnx_qos", "mlxreg", "mstreg", "mlxconfig", "mstconfig")
TOOLS = (*_TOOLS, *_NVIDIAS_TOOLS)
_FILES = ("rdma-cm", "mlx5-debugfs", "ofed-ecn", "bnxt-configfs", "bnxt-debugfs", "irdma-configfs", "ionic-dcqcn")
SURFACES = frozenset((*_FILES, *TOOLS))
"""All words that `Device.surfaces` may hold."""

# A name never begins with `-`, which a program would take for an option, nor with `.`.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
# In lower case, as sysfs writes it; domains above ffff exist (Intel VMD), so four digits are not all.
_PCI = re.compile(r"[0-9a-f]{4,8}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
# The vendors' numbers in pci.ids; 0x1dd8 is Pensando, whose NICs are AMD's now.
VENDORS = {"0x15b3": "nvidia", "0x14e4": "broadcom", "0x8086": "intel", "0x1dd8": "amd"}
_DRIVERS = {"mlx5": "nvidia", "bnxt": "broadcom", "irdma": "intel", "ionic": "amd", "rxe": "soft", "siw": "soft"}
MODELS = {  # of pci.ids
    "0x1013": "ConnectX-4",
    "0x1015": "ConnectX-4 Lx",
    "0x1017": "ConnectX-5",
    "0x1019": "ConnectX-5 Ex",
    "0x101b": "ConnectX-6",
    "0x101d": "ConnectX-6 Dx",
    "0x101f": "ConnectX-6 Lx",
    "0x1021": "ConnectX-7",
    "0x1023": "ConnectX-8",
    "0xa2d2": "BlueField",
    "0xa2d6": "BlueField-2",
    "0xa2dc": "BlueField-3",
}
# PCI's classes: VGA controller, 3D controller, processing accelerator. GPUs for computing are often no VGA.
_GPU_CLASSES = ("0x0300", "0x0302", "0x1200")
# Nearest first: `_nearest` compares places in this order.
_LEVELS = ("PIX", "PXB", "PHB", "NODE", "SYS")
# So reads a place of the GID table that is not in use.
_NO_GID = "0000:0000:0000:0000:0000:0000:0000:0000"
_MOST_GIDS = 256


@dataclass(frozen=True)
class Gid:
    """A RoCE GID in use."""

    index: int
    gid: str
    kind: str
    netdev: str


@dataclass(frozen=True)
class Device:
    """An RDMA device.

    Args:
        vendor: nvidia, broadcom, intel, amd, soft (rxe, siw), or unknown.
        model: by its PCI number; empty where it is not in our list.
        rate_mbps: of its first port; 0 where the kernel does not say.
        pci: its address; empty for a soft one.
        numa_node: -1 where the host has none.
        gpus: the nearest, with how near: (address, PIX to SYS).
        surfaces: what of it can be set, and how.
        closed: surfaces that only root may look at: what they hold is not known.
    """

    name: str
    vendor: str
    model: str
    driver: str
    firmware: str
    link_layer: str
    state: str
    rate_mbps: int
    netdev: str
    pci: str
    numa_node: int
    gpus: tuple[tuple[str, str], ...]
    gids: tuple[Gid, ...]
    surfaces: tuple[str, ...]
    closed: tuple[str, ...] = ()

    @property
    def roce(self) -> bool:
        return self.link_layer == "Ethernet"

    @property
    def port_suffix(self) -> str:
        """Suffix of mlxconfig's keys: a function is a port."""
        # The last digit of an address is the PCI function: .0 is port 1, .1 is port 2.
        return f"_P{int(self.pci[-1]) % 2 + 1}" if self.pci else "_P1"

    def has(self, surface: str) -> bool:
        return surface in self.surfaces

    def as_row(self) -> dict[str, Any]:
        """JSON values."""
        return asdict(self)


def take_inventory(tree: Tree, tools: Tools, only: Sequence[str] = ()) -> tuple[list[Device], list[str]]:
    """The devices, by name, and what is wrong with those that are omitted.

    Args:
        only: names of devices; all where empty.

    Raises:
        ConfigError: a link leads out of the tree.
    """
    devices, faults = [], []
    # Once for all devices: they are the same for each, and finding them reads every PCI device of the host.
    gpus = _find_gpus(tree)
    for name in tree.names(RDMA):
        if not is_name(name):
            faults.append(f"{name!r} is no name of a device: omitted")
        elif not only or name in only:
            devices.append(_look_at(tree, tools, name, gpus))
    faults += [f"{name}: there is no such device" for name in only if name not in {one.name for one in devices}]
    return devices, faults


def is_name(text: str) -> bool:
    """Whether a text may stand in a path or among arguments as a device's name."""
    return bool(_NAME.fullmatch(text)) and ".." not in text


def is_pci(text: str) -> bool:
    """Whether it is a PCI address with its domain."""
    return bool(_PCI.fullmatch(text))


def _look_at(tree: Tree, tools: Tools, name: str, gpus: dict[str, tuple[str, ...]]) -> Device:
    """Return what sysfs and the tools that are installed tell of one RDMA device."""
    base = f"{RDMA}/{name}"
    port = f"{base}/ports/1"
    way = tree.real(f"{base}/device")
    pci = way[-1] if way and is_pci(way[-1]) else ""
    # The link's target is the driver's folder, so its last name is the driver's.
    driver = (tree.real(f"{base}/device/driver") or ("",))[-1]
    gids = _gids(tree, port)
    netdev = _netdev(tree, base, gids)
    numa = tree.text(f"{base}/device/numa_node") or ""
    # Below --root the file may hold anything: what is no number must not raise.
    node = int(numa) if re.fullmatch(r"-?\d{1,4}", numa) else -1
    # A soft device has no PCI driver, but by custom is named for its kind (rxe0, siw0).
    vendor = _vendor(tree.text(f"{base}/device/vendor") or "", driver or name)
    surfaces, closed = _surfaces(tree, tools, name, vendor, pci, netdev)
    return Device(
        name=name,
        vendor=vendor,
        # Device numbers are the vendor's own: the same one of another vendor is another NIC.
        model=MODELS.get(tree.text(f"{base}/device/device") or "", "") if vendor == "nvidia" else "",
        driver=driver,
        firmware=_plain(tree.text(f"{base}/fw_ver")),
        link_layer=_plain(tree.text(f"{port}/link_layer")),
        # The kernel writes `4: ACTIVE`.
        state=_plain(tree.text(f"{port}/state")).partition(": ")[2],
        rate_mbps=_rate(tree.text(f"{port}/rate") or ""),
        netdev=netdev,
        pci=pci,
        numa_node=node,
        gpus=_nearest(tree, way, node, gpus) if pci else (),
        gids=gids,
        surfaces=surfaces,
        closed=closed,
    )


def _plain(text: str | None) -> str:
    """Return a file's text without characters that would steer a terminal, cut to 80 characters."""
    return printable(text or "", "")[:80]


def _vendor(number: str, driver: str) -> str:
    by_driver = next((vendor for prefix, vendor in _DRIVERS.items() if driver.startswith(prefix)), "unknown")
    return VENDORS.get(number, by_driver)


def _rate(text: str) -> int:
    """Mb/s of `400 Gb/sec (4X NDR)`."""
    match = re.match(r"([\d.]{1,8}) Gb/sec", text)
    try:
        # The pattern also lets `1.2.3` pass, which `float` refuses below.
        return round(float(match[1]) * 1000) if match else 0
    except ValueError:
        return 0


def _gids(tree: Tree, port: str) -> tuple[Gid, ...]:
    gids: list[Gid] = []
    # As numbers: as text, 10 would come before 2, and the first GID decides on the network device.
    for index in sorted(int(name) for name in tree.names(f"{port}/gids") if re.fullmatch(r"\d{1,4}", name)):
        gid = tree.text(f"{port}/gids/{index}") or ""
        if not gid or gid == _NO_GID or len(gids) == _MOST_GIDS:
            continue
        netdev = tree.text(f"{port}/gid_attrs/ndevs/{index}") or ""
        kind = tree.text(f"{port}/gid_attrs/types/{index}")
        gids.append(Gid(index, _plain(gid), _plain(kind), netdev if is_name(netdev) else ""))
    return tuple(gids)


def _netdev(tree: Tree, base: str, gids: Sequence[Gid]) -> str:
    """Return the network device of the first GID; else the device's own, else that below a soft one."""
    named = [gid.netdev for gid in gids if gid.netdev]
    own = [name for name in tree.names(f"{base}/device/net") if is_name(name)]
    parent = tree.text(f"{base}/parent") or ""
    return next(iter([*named, *own, *([parent] if is_name(parent) else [])]), "")


def _surfaces(
    tree: Tree, tools: Tools, name: str, vendor: str, pci: str, netdev: str
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the ways to set it that are there, and those of which only root can say."""
    ways = {
        "rdma-cm": ("", CM_CONFIG),
        "mlx5-debugfs": ("nvidia", pci and f"{MLX5_DEBUG}/{pci}/cc_params"),
        "ofed-ecn": ("nvidia", netdev and f"sys/class/net/{netdev}/ecn/roce_rp/enable"),
        "bnxt-configfs": ("broadcom", BNXT_CONFIG),
        "bnxt-debugfs": ("broadcom", pci and f"{BNXT_DEBUG}/{pci}/cc_config"),
        "irdma-configfs": ("intel", IRDMA_CONFIG),
    }
    present, closed = [], []
    for surface, (owner, path) in ways.items():
        try:
            if path and owner in ("", vendor) and tree.is_folder(path):
                present.append(surface)
        except PermissionError:
            # debugfs is root's alone: whether the folder is there cannot be told, which is not the same as absent.
            closed.append(surface)
    try:
        if vendor == "amd" and ionic_folder(tree, name, pci):
            present.append("ionic-dcqcn")
    except PermissionError:
        closed.append("ionic-dcqcn")
    # A soft device has neither priorities nor pause of its own: they are those of the device below it.
    names = [*(_TOOLS if vendor != "soft" else ()), *(_NVIDIAS_TOOLS if vendor == "nvidia" else ())]
    return (*present, *(tool for tool in names if tools.find(tool))), tuple(closed)


def ionic_folder(tree: Tree, name: str, pci: str) -> str:
    """Return AMD's folder of DCQCN profiles: in debugfs, or with the device in older drivers; empty: none."""
    below = f"{IONIC_DEBUG}/{pci}"
    folders = [f"{RDMA}/{name}"]
    for inner in tree.names(below) if pci else []:
        folders += [f"{below}/{inner}", *(f"{below}/{inner}/{last}" for last in tree.names(f"{below}/{inner}"))]
    return next((f"{folder}/dcqcn" for folder in folders if tree.is_folder(f"{folder}/dcqcn/profiles")), "")


def _find_gpus(tree: Tree) -> dict[str, tuple[str, ...]]:
    """Return the bridges above each GPU, by PCI address."""
    paths = {}
    for address in tree.names("sys/bus/pci/devices"):
        kind = tree.text(f"sys/bus/pci/devices/{address}/class") or "" if is_pci(address) else ""
        if kind.startswith(_GPU_CLASSES):
            paths[address] = tree.real(f"sys/bus/pci/devices/{address}")
    return paths


def _nearest(
    tree: Tree, way: tuple[str, ...], node: int, gpus: dict[str, tuple[str, ...]]
) -> tuple[tuple[str, str], ...]:
    """Return the GPUs that are nearest to a NIC over PCIe, each with its level; `way`: bridges above the NIC."""
    levels = {}
    for address, other in gpus.items():
        numa = tree.text(f"sys/bus/pci/devices/{address}/numa_node")
        levels[address] = _level(way, other, str(node) == numa)
    least = min(map(_LEVELS.index, levels.values()), default=0)
    return tuple((address, level) for address, level in levels.items() if _LEVELS.index(level) == least)


def _level(way: tuple[str, ...], other: tuple[str, ...], same_node: bool) -> str:
    """Return the distance of two PCI devices as `nvidia-smi topo -m` names it, by what their ways share."""
    shared = 0
    for name_a, name_b in zip(way[:-1], other[:-1], strict=False):
        if name_a != name_b:
            break
        shared += 1
    common = way[:shared]
    bridges = [name for name in common if is_pci(name)]
    if bridges:
        apart = max(len(way), len(other)) - shared
        return "PIX" if apart <= 2 else "PXB"  # one bridge down from what they share, or several
    if any(name.startswith("pci") for name in common):
        return "PHB"  # under one host bridge (pci0000:00), with no PCI bridge in common
    return "NODE" if same_node else "SYS"
