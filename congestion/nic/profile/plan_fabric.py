"""A profile on all hosts of a fabric without asking any: NICs, and hosts, that are alike are planned once.

What only the host knows (PCI addresses, network devices) stands in a plan by the names `PCI` to `NETDEV` below, which
the script for the host fills in; what a file or a program would say stays unknown. Not covered: AMD, whose driver keeps
its profiles in a folder that only the host knows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from congestion.nic.hosts.inventory import MODELS, Device, is_name
from congestion.nic.hosts.tree import Tree
from congestion.nic.profile.file import Profile
from congestion.nic.profile.plan import Plan, make_plan
from congestion.nic.vendors.tools import ToolFailed, Tools
from netlayer.config.tree import ClusterConfig
from netlayer.errors import ConfigError

DEVICE, NETDEV, PCI = "NIC", "NETDEV", "ffffffff:ff:1f"
NICS = (*MODELS.values(), "broadcom", "intel")
"""What hosts may be said to have."""
_WAYS: dict[str, tuple[str, ...]] = {  # the first is what a kernel of today has
    "nvidia": ("mlx5-debugfs", "ofed-ecn"),
    "broadcom": ("bnxt-configfs", "bnxt-debugfs"),
    "intel": ("irdma-configfs",),
}
WAYS = tuple(way for ways in _WAYS.values() for way in ways)
_NAMES = {"nvidia": "mlx5_{}", "broadcom": "bnxt_re{}", "intel": "irdma{}"}
_PROGRAMS = {"nvidia": ("dcb", "ethtool", "mlxconfig", "mlxreg")}
_PROGRAMS_OF_ALL = ("dcb", "ethtool")


@dataclass(frozen=True)
class Alike:
    """NICs of a host that are set alike.

    Args:
        plan: of one of them, its name `DEVICE`.
    """

    names: tuple[str, ...]
    plan: Plan

    @property
    def device(self) -> Device:
        return self.plan.devices[0]


@dataclass(frozen=True)
class HostGroup:
    """Hosts that have the same NICs by the same names."""

    hosts: tuple[str, ...]
    nics: tuple[Alike, ...]

    @property
    def writes(self) -> dict[str, int]:
        """Number of values to write, by device."""
        return {name: len(one.plan.changes) for one in self.nics for name in one.names}


class UnseenTree(Tree):
    """A host's files that nobody looks at: each is thought to be there, what it holds is not known."""

    def __init__(self) -> None:
        self.root, self.is_host, self.live = Path("/"), False, True

    def names(self, path: str) -> list[str]:  # noqa: ARG002
        return []

    def is_folder(self, path: str) -> bool:  # noqa: ARG002
        return False  # of configfs: made where it is not there

    def is_file(self, path: str) -> bool:  # noqa: ARG002
        return True

    def read(self, path: str) -> bytes:  # noqa: ARG002
        raise OSError(0, "the host is not asked")

    def real(self, path: str) -> tuple[str, ...]:  # noqa: ARG002
        return ()


class UnseenTools(Tools):
    """A host's programs that nobody asks.

    Args:
        programs: that the host has.
    """

    def __init__(self, programs: Sequence[str]) -> None:
        super().__init__(host=False)
        self.runs, self.programs = True, frozenset(programs)

    def find(self, *names: str) -> str:
        return next((name for name in names if name in self.programs), "")

    def run(self, arguments: Sequence[str]) -> str:  # noqa: ARG002
        raise ToolFailed("the host is not asked")


def assume_nics(
    cluster: ClusterConfig, nic: str, way: str | None = None, programs: Sequence[str] = (), names: Sequence[str] = ()
) -> list[Device]:
    """The NICs of a host of the cluster, as they are said to be.

    Args:
        nic: one of `NICS`.
        way: of `WAYS`, by which congestion control is set; the vendor's first where None.
        programs: that hosts have; what the vendor's driver comes with where empty.
        names: of the devices; `{}` in one stands for 0 to the number of NICs.

    Raises:
        ConfigError: a way of another vendor, or the names are not as many as the NICs.
    """
    vendor = nic if nic in _WAYS else "nvidia"
    if way is not None and way not in _WAYS[vendor]:
        raise ConfigError("--surface", way, f"is none of {nic}", f"give {' or '.join(_WAYS[vendor])}")
    way, numbers = way or _WAYS[vendor][0], range(cluster.nics_per_server)
    patterns = names or (_NAMES[vendor],)
    all_names = [
        name
        for text in patterns
        for name in ([text.replace("{}", str(one)) for one in numbers] if "{}" in text else [text])
    ]
    wrong = next((name for name in all_names if not is_name(name)), None)
    if wrong is not None:
        raise ConfigError("--device", wrong, "is no name of a device", "give one such as mlx5_0, or a pattern mlx5_{}")
    if len(set(all_names)) != cluster.nics_per_server:
        rule = f"are {len(set(all_names))} names, cluster.nics_per_server = {cluster.nics_per_server}"
        raise ConfigError("--device", ", ".join(patterns), rule, "name each NIC, or all by a pattern such as mlx5_{}")
    own = tuple(programs) or _PROGRAMS.get(vendor, _PROGRAMS_OF_ALL)
    own += ("mlnx_qos",) if way == "ofed-ecn" and not programs else ()
    return [
        Device(
            name=name, vendor=vendor, model=nic if vendor == "nvidia" else "", driver="", firmware="",
            link_layer="Ethernet", state="ACTIVE", rate_mbps=cluster.nic_bps // 10**6, netdev=NETDEV, pci=f"{PCI}.0",
            numa_node=-1, gpus=(), gids=(), surfaces=("rdma-cm", way, *own),
        )
        for name in all_names
    ]  # fmt: skip


def plan_hosts(profile: Profile, hosts: Mapping[str, Sequence[Device]]) -> list[HostGroup]:
    """The plan of each kind of host, the largest group first.

    Args:
        hosts: the devices of each that are to be set.

    Raises:
        ConfigError: see `make_plan`; or a NIC whose driver must be asked.
    """
    groups: dict[tuple[tuple[tuple[str, ...], Device], ...], list[str]] = {}
    for host, devices in hosts.items():
        kinds: dict[Device, list[str]] = {}
        for device in devices:
            kinds.setdefault(_kind(device), []).append(device.name)
        groups.setdefault(tuple((tuple(names), kind) for kind, names in kinds.items()), []).append(host)
    plans = {kind: _plan(profile, kind) for key in groups for _, kind in key}
    host_groups = [
        HostGroup(tuple(group), tuple(Alike(names, plans[kind]) for names, kind in key))
        for key, group in groups.items()
    ]
    return sorted(host_groups, key=lambda one: -len(one.hosts))


def _kind(device: Device) -> Device:
    """A device without what tells it from others that are set alike."""
    if device.vendor not in _WAYS or not device.pci:
        rule = (
            f"is of vendor {device.vendor}, {'at no PCI address' if not device.pci else 'which cannot be planned so'}"
        )
        raise ConfigError(device.name, None, rule, "plan on the host itself: netlayer nic plan --hosts HOSTS")
    pci = f"{PCI}.{int(device.pci[-1]) % 2}"
    return replace(
        device, name=DEVICE, driver="", firmware="", netdev=NETDEV, pci=pci, numa_node=-1, gpus=(), gids=()
    )  # fmt: skip


def _plan(profile: Profile, kind: Device) -> Plan:
    programs = [word for word in kind.surfaces if word not in WAYS]
    return make_plan(profile, [kind], UnseenTree(), UnseenTools(programs))
