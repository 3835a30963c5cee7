"""The devices of a host, from its files alone."""

from __future__ import annotations

import pytest

from congestion.nic.hosts.inventory import Device, take_inventory
from congestion.nic.hosts.tree import Tree
from congestion.nic.vendors.tools import Tools
from netlayer.errors import ConfigError
from tests.congestion.nic.simulated import GPU, VENDORS, build_host, names_of, put


def look(root, *only) -> tuple[list[Device], list[str]]:
    return take_inventory(Tree(root), Tools(host=False), only)


@pytest.fixture
def root(tmp_path):
    return build_host(tmp_path, *VENDORS)


def test_every_device_is_found_with_its_maker(root):
    devices, faults = look(root)
    assert not faults
    found = {device.name: device.vendor for device in devices}
    makers = ("nvidia", "nvidia", "broadcom", "broadcom", "intel", "amd", "amd", "soft")
    assert found == dict(zip(names_of(VENDORS), makers, strict=True))


def test_a_device_says_what_its_files_say(root):
    device = next(one for one in look(root)[0] if one.name == "mlx5_0")
    assert device.model == "ConnectX-7"
    assert (device.firmware, device.state, device.rate_mbps) == ("28.43.1014", "ACTIVE", 400_000)
    assert (device.netdev, device.pci, device.numa_node, device.driver) == ("eth0", "0000:42:00.0", 0, "mlx5_core")
    assert [(gid.index, gid.kind) for gid in device.gids] == [(0, "RoCE v1"), (1, "RoCE v2")]
    assert device.roce
    assert device.gpus == ((GPU, "PIX"),)


def test_surfaces_are_those_that_are_there(root):
    found = {device.name: set(device.surfaces) - {"rdma-cm"} for device in look(root)[0]}
    assert found == {
        "mlx5_0": {"mlx5-debugfs"},
        "mlx5_1": {"ofed-ecn"},
        "bnxt_re2": {"bnxt-configfs"},
        "bnxt_re3": {"bnxt-configfs", "bnxt-debugfs"},  # the folder of configfs is the whole host's
        "irdma_4": {"irdma-configfs"},
        "ionic_5": {"ionic-dcqcn"},
        "ionic_6": {"ionic-dcqcn"},
        "rxe7": set(),
    }


@pytest.mark.parametrize(
    ("way", "level"),
    [
        ("pci0000:40/0000:40:01.0/0000:40:03.0/0000:77:00.0", "PIX"),
        ("pci0000:40/0000:40:01.0/0000:40:04.0/0000:45:00.0/0000:77:00.0", "PXB"),
        ("pci0000:40/0000:40:09.0/0000:77:00.0", "PHB"),
        ("pci0000:80/0000:80:01.0/0000:77:00.0", "NODE"),
    ],
)
def test_how_near_a_gpu_is(way, level, tmp_path):
    root = build_host(tmp_path, "mlx5")
    (root / f"sys/bus/pci/devices/{GPU}").unlink()
    put(root / f"sys/devices/{way}/class", "0x030200")
    put(root / f"sys/devices/{way}/numa_node", "0")
    (root / "sys/bus/pci/devices/0000:77:00.0").symlink_to(f"../../../devices/{way}")
    assert look(root)[0][0].gpus == (("0000:77:00.0", level),)


def test_a_hostile_name_of_a_device_is_left_out_and_said(tmp_path):
    root = build_host(tmp_path, "mlx5")
    for name in ("-oProxyCommand=x", "a b", "..x..", "mlx5\n0", "x" * 65):
        (root / "sys/class/infiniband" / name).mkdir()
    devices, faults = look(root)
    assert [device.name for device in devices] == ["mlx5_0"]
    assert len(faults) == 5


def test_a_hostile_network_device_is_not_believed(tmp_path):
    root = build_host(tmp_path, "mlx5")
    port = root / "sys/class/infiniband/mlx5_0/ports/1"
    for index in (0, 1):
        put(port / f"gid_attrs/ndevs/{index}", "../../../../etc")
    (root / "sys/class/infiniband/mlx5_0/device/net/eth0").rename(tmp_path / "moved")
    (root / "sys/class/infiniband/mlx5_0/device/net/--all").mkdir()
    assert look(root)[0][0].netdev == ""


def test_control_characters_do_not_reach_the_terminal(tmp_path):
    root = build_host(tmp_path, "mlx5")
    put(root / "sys/class/infiniband/mlx5_0/fw_ver", "28\x1b[31m.1")
    assert look(root)[0][0].firmware == "28[31m.1"


def test_a_device_that_leads_out_of_the_root_is_refused(tmp_path):
    root = build_host(tmp_path / "root", "mlx5")
    (tmp_path / "outside").mkdir()
    (root / "sys/class/infiniband/mlx5_9").symlink_to("../../../../outside")
    with pytest.raises(ConfigError, match="leads out of the root"):
        look(root)


def test_garbage_in_files_is_no_crash(tmp_path):
    root = build_host(tmp_path, "mlx5")
    device = root / "sys/class/infiniband/mlx5_0"
    for path in ("ports/1/rate", "ports/1/state", "ports/1/link_layer", "fw_ver", "device/numa_node", "device/vendor"):
        (device / path).write_bytes(b"\xff\x00 ....... Gb/sec")
    found = look(root)[0][0]
    assert (found.rate_mbps, found.numa_node) == (0, -1)
    assert not found.roce


def test_a_host_without_devices_is_empty(tmp_path):
    assert look(tmp_path) == ([], [])
    assert look(tmp_path, "mlx5_0") == ([], ["mlx5_0: there is no such device"])
