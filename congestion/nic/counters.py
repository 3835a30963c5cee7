"""Which counters RDMA NICs have: hw_counters and port counters of sysfs, statistics of ethtool.

A column is `<device>/<port>/<counter>`. `port_xmit_data` and `port_rcv_data`, which count four bytes at a time, become
`xmit_bytes` and `rcv_bytes`. Fast counters are read at every sample, the others five times a second at most: a NIC
answers many of them through its firmware. All paths are walked below the root (`congestion.nic.tree`), and a name that
is none is left out. Left out, too: counters of single queue pairs.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from congestion.nic.counters_ethtool import Ethtool
from congestion.nic.inventory import RDMA, is_name
from congestion.nic.tree import Tree
from netlayer.errors import HardwareMissing

logger = logging.getLogger(__name__)

MISSING = -1  # not read at this sample, or unreadable
_RENAMED = {"port_xmit_data": ("xmit_bytes", 4), "port_rcv_data": ("rcv_bytes", 4)}
FAST = frozenset({"xmit_bytes", "rcv_bytes", "port_rcv_packets", "np_ecn_marked_roce_packets"})
_WATCHED = FAST | {
    "np_cnp_sent",
    "rp_cnp_handled",
    "link_downed",
    "out_of_sequence",
    "packet_seq_err",
    "implied_nak_seq_err",
    "local_ack_timeout_err",
    "rnr_nak_retry_err",
    "out_of_buffer",
    "req_transport_retries_exceeded",
    "roce_adp_retrans",
    "roce_adp_retrans_to",
}


@dataclass(frozen=True)
class Counter:
    """One file of sysfs, without links on the way: its column, its place, what one count is worth."""

    column: str
    path: Path
    scale: int = 1

    @property
    def is_fast(self) -> bool:
        """Whether every sample reads it."""
        return self.column.rpartition("/")[2] in FAST


def find_counters(root: Path, devices: Iterable[str] = (), *, everything: bool = False) -> list[Counter]:
    """The counters of the RDMA ports below `root`, those that detection uses, or all.

    Raises:
        ConfigError: the root is no folder, or a link leads out of it.
        HardwareMissing: there is no RDMA device, or none of `devices`.
    """
    tree, folder = Tree(root), root / RDMA
    present = _devices(tree, ())
    if not present:
        raise HardwareMissing(f"{folder}: no RDMA device; load the NIC's kernel driver, or give another --root")
    unknown = sorted(set(devices) - set(present))
    if unknown:
        raise HardwareMissing(f"--device {unknown[0]}: there is none; {folder} has {', '.join(present)}")
    found: dict[str, Counter] = {}  # a name that stands in both folders is one counter
    for device in _devices(tree, devices):
        for port in _ports(tree, device):
            for kind in ("counters", "hw_counters"):
                below = f"{RDMA}/{device}/ports/{port}/{kind}"
                for counter in _of_folder(tree, below, f"{device}/{port}", everything):
                    found.setdefault(counter.column, counter)
    if not found:
        raise HardwareMissing(f"{folder}: no port of {', '.join(present)} has counters; it needs Linux 4.8 or later")
    return list(found.values())


def find_ethtool(root: Path, devices: Iterable[str] = ()) -> list[Ethtool]:
    """Statistics of the ports' network interfaces; none below another root than /: they come from the kernel itself."""
    tree = Tree(root)
    if not tree.is_host:
        return []
    opened = (Ethtool.open(netdev, port) for port, netdev in find_netdevs(tree, devices).items())
    return [statistics for statistics in opened if statistics is not None]


def find_netdevs(tree: Tree, devices: Iterable[str] = ()) -> dict[str, str]:
    """The network interface of each port, `<device>/<port>`: that which the port's GIDs name, else the only one.

    A PCI device may have several: of its other port, and those that stand for virtual functions.
    """
    found: dict[str, str] = {}
    for device in _devices(tree, devices):
        own = [name for name in tree.names(f"{RDMA}/{device}/device/net") if is_name(name)]
        named = {port: _of_gids(tree, f"{RDMA}/{device}/ports/{port}", own) for port in _ports(tree, device)}
        left = [name for name in own if name not in named.values()]
        for port, netdev in named.items():
            chosen = netdev or (left[0] if len(left) == 1 and len(named) == len(own) else None)
            if chosen:
                found[f"{device}/{port}"] = chosen
            elif own:
                logger.warning("%s/%s: which of %s is its interface cannot be told", device, port, ", ".join(own))
    return found


def _devices(tree: Tree, wanted: Iterable[str]) -> list[str]:
    """Those of `wanted`, all where it is empty."""
    names, only = tree.names(RDMA), set(wanted)
    for name in names:
        if not is_name(name):
            logger.warning("%r is no name of a device: left out", name)
    return [name for name in names if is_name(name) and (not only or name in only)]


def _ports(tree: Tree, device: str) -> list[str]:
    return [name for name in tree.names(f"{RDMA}/{device}/ports") if re.fullmatch(r"\d{1,3}", name, re.ASCII)]


def _of_gids(tree: Tree, port: str, own: Sequence[str]) -> str | None:
    """The first of a device's interfaces that a GID of the port names."""
    ndevs = f"{port}/gid_attrs/ndevs"
    indexes = sorted(int(name) for name in tree.names(ndevs) if re.fullmatch(r"\d{1,4}", name, re.ASCII))
    named = (tree.text(f"{ndevs}/{index}") for index in indexes)
    return next((name for name in named if name in own), None)


def _of_folder(tree: Tree, folder: str, port: str, everything: bool) -> Iterator[Counter]:
    for file in tree.names(folder):
        name, scale = _RENAMED.get(file, (file, 1))
        if not is_name(file) or file == "lifespan" or not (everything or name in _WATCHED):
            continue
        if tree.is_file(f"{folder}/{file}"):
            yield Counter(f"{port}/{name}", tree.root.joinpath(*tree.real(f"{folder}/{file}")), scale)
