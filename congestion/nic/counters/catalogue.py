"""Counters that RDMA NICs have: hw_counters and port counters of sysfs, statistics of ethtool.

A column is `<device>/<port>/<counter>`. `port_xmit_data` and `port_rcv_data`, which count four bytes at a time, become
`xmit_bytes` and `rcv_bytes`, and what another driver counts under another name gets mlx5's. Fast counters are read at
every sample, the others five times a second at most: a NIC answers many of them through its firmware. All paths are
walked below the root (`congestion.nic.hosts.tree`), and a name that is none is omitted. Not covered either: counters
of single queue pairs.

Names: Linux, drivers/infiniband/hw/bnxt_re/hw_counters.c (of 6.x, and as renamed in 2025), irdma/verbs.c and the names
that irdma out of tree gives the same counters, ionic/ionic_hw_stats.c (which asks the firmware for them: those of
AMD's Pollara, as its tools list them), mana/counters.c, sw/rxe/rxe_hw_counters.c.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from congestion.nic.counters.ethtool import Ethtool
from congestion.nic.hosts.inventory import RDMA, is_name
from congestion.nic.hosts.tree import Tree
from netlayer.errors import HardwareMissing
from netlayer.observe.port_bytes import BYTE_COUNTERS

logger = logging.getLogger(__name__)

MISSING = -1  # not read at this sample, or unreadable
# By mlx5's name, what other drivers call the same.
_ALIASES = {
    "port_rcv_packets": ("rx_pkts", "rx_rdma_ucast_pkts", "RxUDP", "rcvd_pkts"),  # bnxt_re, ionic, irdma, rxe
    "np_ecn_marked_roce_packets": ("rx_ecn_marked_pkts", "rx_rdma_ecn_pkts", "RxECNMrkd"),
    "np_cnp_sent": ("tx_cnp_pkts", "np_cnp_pkts", "tx_rdma_cnp_pkts", "cnpSent"),
    "rp_cnp_handled": ("rx_cnp_pkts", "rx_rdma_cnp_pkts", "cnpHandled"),
    "local_ack_timeout_err": ("to_retransmits", "tx_rdma_ack_timeout", "RTO", "requester_timeout"),
    "packet_seq_err": (
        "seq_err_naks_rcvd",
        "req_rx_pkt_seq_err",
        "Nak Sequence Error",
        "requester_oos_nak",
        "rcvd_seq_err",
    ),
    "implied_nak_seq_err": (
        "missing_resp",
        "req_rx_impl_nak_seq_err",
        "Nak Sequence Error Implied",
        "requester_implicit_nak",
    ),
    "out_of_sequence": (
        "oos_drop_count",
        "resp_rx_outouf_seq",
        "Rcvd Out of order packets",
        "responder_oos",
        "out_of_seq_request",
    ),
    "req_transport_retries_exceeded": ("max_retry_exceeded", "req_tx_retry_excd_err", "retry_exceeded_err"),
    "rnr_nak_retry_err": ("rnr_naks_rcvd", "req_rx_rnr_retry_err", "RNR received", "requester_rnr_nak", "rcvd_rnr_err"),
    "out_of_buffer": ("rx_out_of_buffer", "resp_rx_outof_buf"),
}
_RENAMED = BYTE_COUNTERS | {alias: (name, 1) for name, aliases in _ALIASES.items() for alias in aliases}
_IRDMA_BYTES = {f"ip{version}{way}Octets" for version in (4, 6) for way in ("In", "Out")}  # it counts no others
_COUNTER = re.compile(r"[A-Za-z0-9][A-Za-z0-9_. -]{0,63}")  # irdma's have spaces
FAST = frozenset({"xmit_bytes", "rcv_bytes", "port_rcv_packets", "np_ecn_marked_roce_packets", *_IRDMA_BYTES})
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
    counters: dict[str, Counter] = {}  # what stands in both folders, or under two names, is one counter
    for device in _devices(tree, devices):
        for port in _ports(tree, device):
            for kind in ("counters", "hw_counters"):
                below = f"{RDMA}/{device}/ports/{port}/{kind}"
                for counter in _of_folder(tree, below, f"{device}/{port}", everything):
                    counters.setdefault(counter.column, counter)
    if not counters:
        raise HardwareMissing(f"{folder}: no port of {', '.join(present)} has counters; it needs Linux 4.8 or later")
    return list(counters.values())


@dataclass(frozen=True)
class Port:
    """An RDMA port, or a device that has none (`number` is empty).

    Args:
        driver: of the PCI device; empty for a soft one.
        link_layer: Ethernet or InfiniBand; empty where the kernel does not say.
    """

    device: str
    number: str
    driver: str
    link_layer: str

    @property
    def name(self) -> str:
        return f"{self.device}/{self.number}" if self.number else self.device


def find_ports(root: Path, devices: Iterable[str] = ()) -> list[Port]:
    """Every port of the RDMA devices below `root`, with counters or without."""
    tree = Tree(root)
    ports = []
    for device in _devices(tree, devices):
        driver = (tree.real(f"{RDMA}/{device}/device/driver") or ("",))[-1]
        for number in _ports(tree, device) or [""]:
            layer = tree.text(f"{RDMA}/{device}/ports/{number}/link_layer") if number else None
            ports.append(Port(device, number, driver, layer or ""))
    return ports


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
    netdevs: dict[str, str] = {}
    for device in _devices(tree, devices):
        own = [name for name in tree.names(f"{RDMA}/{device}/device/net") if is_name(name)]
        named = {port: _of_gids(tree, f"{RDMA}/{device}/ports/{port}", own) for port in _ports(tree, device)}
        left = [name for name in own if name not in named.values()]
        for port, netdev in named.items():
            chosen = netdev or (left[0] if len(left) == 1 and len(named) == len(own) else None)
            if chosen:
                netdevs[f"{device}/{port}"] = chosen
            elif own:
                logger.warning("%s/%s: which of %s is its interface cannot be told", device, port, ", ".join(own))
    return netdevs


def _devices(tree: Tree, requested: Iterable[str]) -> list[str]:
    """Return those of `requested`, all where it is empty."""
    names, only = tree.names(RDMA), set(requested)
    for name in names:
        if not is_name(name):
            logger.warning("%r is no name of a device: omitted", name)
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
        name, scale = _RENAMED.get(file, (file.replace(" ", "_"), 1))
        if _COUNTER.fullmatch(file) is None or file == "lifespan" or not (everything or name in _WATCHED):
            continue
        if tree.is_file(f"{folder}/{file}"):
            yield Counter(f"{port}/{name}", tree.root.joinpath(*tree.real(f"{folder}/{file}")), scale)
