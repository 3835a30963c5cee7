"""Hosts made of files: sysfs, debugfs and configfs of each vendor's NICs, and a kernel whose files have effects."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from congestion.nic.hosts.tree import Tree
from congestion.nic.profile.parameters import PARAMETERS

VENDORS = ("mlx5", "ofed", "bnxt", "bnxt-debugfs", "irdma", "ionic", "ionic-sysfs", "rxe")
_IDS = {
    "mlx5": ("0x15b3", "0x1021", "mlx5_core"),
    "ofed": ("0x15b3", "0x101d", "mlx5_core"),
    "bnxt": ("0x14e4", "0x1750", "bnxt_en"),
    "bnxt-debugfs": ("0x14e4", "0x1750", "bnxt_en"),
    "irdma": ("0x8086", "0x1592", "ice"),
    "ionic": ("0x1dd8", "0x1002", "ionic"),
    "ionic-sysfs": ("0x1dd8", "0x1002", "ionic"),
}
_BNXT = {
    "ecn_enable": "0x0", "ecn_marking": "0x0", "cc_mode": "0x0", "cnp_prio": "7", "cnp_dscp": "0x30", "roce_prio": "0",
    "roce_dscp": "0x0",
}  # fmt: skip
_BNXT_DEBUG = {
    "enable_cc": "0", "tos_ecn": "0", "cc_mode": "0", "tos_dscp": "0", "alt_vlan_pcp": "7", "alt_vlan_dscp": "48"
}  # fmt: skip
_MLX5 = {
    "np_cnp_dscp": "48", "np_cnp_prio": "6", "np_cnp_prio_mode": "1", "rtt_resp_dscp": "0", "rtt_resp_dscp_valid": "0"
}  # fmt: skip
_IRDMA = {"roce_dcqcn_enable": "0", "roce_dctcp_enable": "0", "roce_timely_enable": "1"}
GPU = "0000:41:00.0"


def put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def build_host(root: Path, *vendors: str, groups: bool = True) -> Path:
    """A host with one NIC of each vendor named.

    Args:
        groups: folders of configfs are made already.
    """
    for number, vendor in enumerate(vendors):
        _build(root, vendor, number, groups)
    if "rxe" not in vendors or len(vendors) > 1:
        _build_gpu(root)
    return root


def names_of(vendors: Sequence[str]) -> list[str]:
    prefix = {"ofed": "mlx5", "bnxt": "bnxt_re", "bnxt-debugfs": "bnxt_re", "ionic-sysfs": "ionic"}
    return [
        f"{prefix.get(vendor, vendor)}{'' if vendor.startswith('bnxt') or vendor == 'rxe' else '_'}{number}"
        for number, vendor in enumerate(vendors)
    ]


def pci_of(number: int) -> str:
    return f"0000:{0x42 + number:02x}:00.{number % 2}"


def _build(root: Path, vendor: str, number: int, groups: bool) -> None:
    prefix = {"ofed": "mlx5", "bnxt": "bnxt_re", "bnxt-debugfs": "bnxt_re", "ionic-sysfs": "ionic"}.get(vendor, vendor)
    name = f"{prefix}{'' if vendor.startswith('bnxt') or vendor == 'rxe' else '_'}{number}"
    netdev, sys = f"eth{number}", root / "sys"
    device = sys / "devices/virtual/rdma" / name
    if vendor != "rxe":
        pci = pci_of(number)
        place = sys / f"devices/pci0000:40/0000:40:01.0/0000:40:02.{number}/{pci}"
        maker, model, driver = _IDS[vendor]
        put(place / "vendor", maker)
        put(place / "device", model)
        put(place / "numa_node", "0")
        (place / "net" / netdev).mkdir(parents=True)
        (sys / "bus/pci/drivers" / driver).mkdir(parents=True, exist_ok=True)
        (place / "driver").symlink_to(f"../../../../../bus/pci/drivers/{driver}")
        (sys / "bus/pci/devices").mkdir(parents=True, exist_ok=True)
        (sys / "bus/pci/devices" / pci).symlink_to(
            f"../../../devices/pci0000:40/0000:40:01.0/0000:40:02.{number}/{pci}"
        )
        device = place / "infiniband" / name
        device.mkdir(parents=True)
        (device / "device").symlink_to("../..")
        _surfaces(root, vendor, name, netdev, pci, device, groups)
    else:
        put(device / "parent", netdev)
    port = device / "ports/1"
    put(device / "fw_ver", "28.43.1014")
    put(port / "link_layer", "Ethernet")
    put(port / "state", "4: ACTIVE")
    put(port / "rate", "400 Gb/sec (4X NDR)")
    for index, kind in enumerate(("RoCE v1", "RoCE v2")):
        put(port / f"gids/{index}", "0000:0000:0000:0000:0000:ffff:0a00:0001")
        put(port / f"gid_attrs/types/{index}", kind)
        put(port / f"gid_attrs/ndevs/{index}", netdev)
    put(port / "gids/2", "0000:0000:0000:0000:0000:0000:0000:0000")
    (sys / "class/infiniband").mkdir(parents=True, exist_ok=True)
    (sys / "class/infiniband" / name).symlink_to(Path("../..") / device.relative_to(sys))
    (sys / "class/net" / netdev).mkdir(parents=True, exist_ok=True)
    (sys / "kernel/config/rdma_cm").mkdir(parents=True, exist_ok=True)
    if groups:
        fill_group(sys / "kernel/config/rdma_cm" / name)


def _surfaces(root: Path, vendor: str, name: str, netdev: str, pci: str, device: Path, groups: bool) -> None:
    debug, config = root / "sys/kernel/debug", root / "sys/kernel/config"
    if vendor == "mlx5":
        _fill(debug / f"mlx5/{pci}/cc_params", {one.name: str(one.default) for one in PARAMETERS.values()} | _MLX5)
    elif vendor == "ofed":
        _ofed(root / f"sys/class/net/{netdev}/ecn")
    elif vendor == "bnxt-debugfs":
        _fill(debug / f"bnxt_re/{pci}/cc_config", _BNXT_DEBUG)
    elif vendor in ("bnxt", "irdma"):
        folder = config / {"bnxt": "bnxt_re"}.get(vendor, vendor)
        folder.mkdir(parents=True, exist_ok=True)
        if groups:
            fill_group(folder / name)
    else:
        _ionic((device if vendor == "ionic-sysfs" else debug / f"ionic/{pci}/lif0/rdma") / "dcqcn")


def fill_group(folder: Path) -> None:
    """What a driver puts into a folder of configfs that was made."""
    if folder.parent.name == "rdma_cm":
        put(folder / "ports/1/default_roce_tos", "0")
    elif folder.parent.name == "bnxt_re":
        _fill(folder / "ports/1/cc", _BNXT)
        (folder / "ports/1/cc/apply").write_text("")
    elif folder.parent.name == "irdma":
        _fill(folder, _IRDMA)


def _ofed(ecn: Path) -> None:
    for parameter in PARAMETERS.values():
        put(ecn / f"roce_{parameter.name[:2]}" / parameter.key.lower(), str(parameter.default))
    _fill(ecn / "roce_np", {"cnp_dscp": "0", "cnp_802p_prio": "0"})
    for point in ("roce_np", "roce_rp"):
        _fill(ecn / point / "enable", dict.fromkeys("01234567", "0"))


def _ionic(folder: Path) -> None:
    for parameter in PARAMETERS.values():
        if parameter.ionic:
            value = min(max(parameter.default, parameter.ionic_low), parameter.ionic_high)
            put(folder / "profiles/1" / parameter.ionic, str(value))
    _fill(folder / "profiles/1/roce_np", {"cnp_dscp": "46", "icnp_802p_prio": "6"})
    put(folder / "match_default", "0")


def _fill(folder: Path, values: dict[str, str]) -> None:
    for name, value in values.items():
        put(folder / name, value)


def _build_gpu(root: Path) -> None:
    place = root / f"sys/devices/pci0000:40/0000:40:01.0/0000:40:03.0/{GPU}"
    put(place / "class", "0x030200")
    put(place / "numa_node", "0")
    (root / f"sys/bus/pci/devices/{GPU}").symlink_to(f"../../../devices/pci0000:40/0000:40:01.0/0000:40:03.0/{GPU}")


def snapshot(*folders: Path) -> dict[str, bytes | str | None]:
    """Every file's bytes, every link's target, every folder."""
    found: dict[str, bytes | str | None] = {}
    for folder in folders:
        for path in sorted(folder.rglob("*")):
            if path.is_symlink():
                found[str(path)] = str(path.readlink())
            else:
                found[str(path)] = path.read_bytes() if path.is_file() else None
    return found


class Kernel(Tree):
    """A tree whose writes have the effects that drivers give them, and that refuses what is out of its range."""

    def __init__(self, root: Path) -> None:
        super().__init__(root, live=True)
        self.written: list[tuple[str, str]] = []
        self.applied: list[str] = []

    def write(self, path: str, data: bytes) -> None:
        folder, _, name = path.rpartition("/")
        if name == "apply" and "bnxt_re" in path:
            self.applied.append(path)
            return
        self.written.append((path, data.decode()))
        super().write(path, data)
        if name == "np_cnp_prio":
            super().write(f"{folder}/np_cnp_prio_mode", b"0\n")
        if name == "rtt_resp_dscp":
            super().write(f"{folder}/rtt_resp_dscp_valid", b"1\n")

    def make_folder(self, path: str) -> None:
        super().make_folder(path)
        fill_group(self.root / path)

    def remove_folder(self, path: str) -> None:
        if not self.is_folder(path):
            raise FileNotFoundError(path)
        # At once, with what it holds, as configfs does it.
        os.rename(self.root / path, Path(tempfile.mkdtemp(dir=self.root.parent)) / "removed")  # noqa: PTH104
