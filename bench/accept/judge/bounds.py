"""Physical bounds of bandwidth: the link rates of NVLink, PCIe and NICs, from `bounds.toml`.

Bounds apply without any expectation. A figure above its bound was not measured as stated, so it is no evidence at all.
A run inside an NVSwitch host that is no faster than PCIe did not use NVLink. For a run over several hosts the log does
not name the NICs, so their bound applies only if the user gives them.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from bench.accept.evidence.log import Figure
from netlayer.units import format_size
from netlayer.verdict import Finding, Verdict

FILE = Path(__file__).with_name("bounds.toml")
CHECK = "physical bound"
NOT_BELIEVABLE = "the figure is not believable"
# Host timers and rounded sizes may put a figure this far above the nominal rate.
_SLACK = 1.02
# From 64 MiB on latency is negligible: every published healthy run is above PCIe's rate there. Up to 256 MiB too few
# warm-up calls can still be the reason, so that such a figure is a WARN only.
_LARGE_BYTES, _SURE_BYTES = 64 << 20, 256 << 20
# From 512 MiB on, at least half the rate of the links: every published healthy run of these collectives on all GPUs of
# a board reaches 0.7. With fewer GPUs it may be a board without NVSwitch, where two GPUs share only some of the links.
_HUGE_BYTES, _LEAST_SHARE, _WHOLE_BOARD = 512 << 20, 0.5, 8
_RINGS = ("all_reduce", "all_gather", "reduce_scatter", "alltoall", "broadcast", "reduce")
# Minimum share of the total NIC rate of a host, for runs over several hosts: published runs reach 0.65 to 1.7.
_LEAST_NIC_SHARE = 0.25
_NIC = re.compile(r"(\d{1,3})x(\d{1,4})")
_UNITS_STEP = (
    "nothing follows from this run: see whether the unit is Gb/s, the columns are shifted, or the ranks share GPUs"
)
_NVLINK_STEP = (
    "see NCCL_P2P_DISABLE, NCCL_P2P_LEVEL and NCCL_ALGO in the environment, then nvidia-smi topo -m (NV18?), "
    "nvidia-smi nvlink -s, and systemctl status nvidia-fabricmanager; containers need the GPUs of one another"
)
_P2P_STEP = "take NCCL_P2P_DISABLE and NCCL_P2P_LEVEL out of the environment, then run it again"
_SLOW_STEP = "run it with NCCL_DEBUG=INFO: which algorithm, how many channels, P2P over what; then nvidia-smi nvlink -s"
_NET_STEP = (
    "run it with NCCL_DEBUG=INFO: NET/IB or NET/Socket, and how many NICs it uses; then ib_write_bw on every NIC"
)


@dataclass(frozen=True)
class Device:
    """Link rates of a GPU type in GB/s one way, with the source."""

    names: re.Pattern[str]
    link: str
    link_gbs: float
    pcie_gbs: float
    switched: bool
    source: str


class Bounds(NamedTuple):
    """Content of `bounds.toml`: GPU types in order, and the rates of NIC ports in Gb/s."""

    devices: tuple[Device, ...]
    fastest_nic_gbps: float
    slowest_nic_gbps: float

    def device(self, name: object) -> Device | None:
        return next((one for one in self.devices if isinstance(name, str) and one.names.fullmatch(name)), None)


@cache
def load_bounds(path: Path = FILE) -> Bounds:
    """Load the table of devices and NICs; every entry has its source."""
    tree = tomllib.loads(path.read_text(encoding="utf-8"))
    sources = {
        name: f"{one['text']} ({', '.join(str(one[key]) for key in ('address', 'date') if key in one)})"
        for name, one in tree["source"].items()
    }
    devices = tuple(
        Device(re.compile(one["names"]), one["link"], float(one["link_gbs"]), float(one["pcie_gbs"]), one["switched"],
               sources[one["source"]])
        for one in tree["device"]
    )  # fmt: skip
    return Bounds(devices, float(tree["nic"]["fastest_gbps"]), float(tree["nic"]["slowest_gbps"]))


def ceiling(facts: Mapping[str, Any]) -> tuple[float, str] | None:
    """Return the upper bound of bus bandwidth in GB/s, and its reason; None if the device is not known.

    `busbw` of an all-reduce counts 2 (n-1)/n times the message for each rank. With NVLS or a tree every rank sends the
    message only once, so that busbw can reach 2 (n-1)/n of the link's rate; other collectives are bounded by the link's
    rate.
    """
    device = load_bounds().device(facts.get("device"))
    if device is None:
        return None
    factor = 1.0
    if facts.get("collective") in (None, "all_reduce"):
        ranks = int(facts.get("ranks") or 0)
        factor = 2 * (ranks - 1) / ranks if ranks > 1 else 2.0
    limit_gbs = device.link_gbs * max(1.0, factor)
    return limit_gbs, f"{device.link} carries {device.link_gbs:g} GB/s one way: at most {limit_gbs:.4g} GB/s bus"


def nics_gbs(facts: Mapping[str, Any]) -> float:
    """Return the total rate of a host's NICs in GB/s one way, from `nics = 8x400`; 0 if not given."""
    match = _NIC.fullmatch(str(facts.get("nics", "")))
    return int(match[1]) * int(match[2]) / 8 if match else 0.0


def judge_bounds(file: str, figures: Sequence[Figure], user_facts: Mapping[str, Any]) -> Iterator[Finding]:
    """Yield at most one finding for each series and subject: too fast to be true, else too slow for its links."""
    groups: dict[tuple[str, str], list[Figure]] = {}
    for figure in figures:
        groups.setdefault((figure.series, figure.subject), []).append(figure)
    for (series, subject), group in groups.items():
        result = _too_fast(group, user_facts) or _too_slow(group, user_facts)
        if result:
            verdict, figure, expected, step = result
            yield Finding(verdict, subject, f"{series}: {CHECK}", figure.text, expected, step, file, figure.line)


_Result = tuple[Verdict, Figure, str, str]


def _too_fast(group: Sequence[Figure], user_facts: Mapping[str, Any]) -> _Result | None:
    """Find a figure above the link rate: not a fault of the machine, but no evidence either."""
    limit_value: float | None = None
    top = max(group, key=lambda figure: figure.value)
    if top.facts.get("quantity") == "bus_bw_gbs":
        known = ceiling({**user_facts, **top.facts})
        if known is None:
            return None
        limit_value, why = known
    elif top.unit == "Gb/s":  # perftest: one port
        limit_value = load_bounds().fastest_nic_gbps * (2 if "Bidirectional" in top.series else 1)
        why = f"the fastest port on sale carries {limit_value:g} Gb/s"
    if limit_value is None or top.value <= _SLACK * limit_value:
        return None
    return "WARN", top, f"{why}: {NOT_BELIEVABLE}", _UNITS_STEP


def _too_slow(group: Sequence[Figure], user_facts: Mapping[str, Any]) -> _Result | None:
    facts = {**user_facts, **group[0].facts}
    device = load_bounds().device(facts.get("device"))
    collective, ranks = facts.get("collective"), int(facts.get("ranks") or 0)
    if facts.get("quantity") != "bus_bw_gbs" or device is None or not device.switched or ranks < 2:
        return None
    if collective not in (*_RINGS, "sendrecv"):
        return None
    min_bytes = _SURE_BYTES if collective == "sendrecv" else _LARGE_BYTES
    large = [figure for figure in group if int(figure.facts.get("bytes", 0)) >= min_bytes]
    if not large:
        return None
    best = max(large, key=lambda figure: (figure.value, int(figure.facts["bytes"])))
    if facts.get("hosts") == 1:
        return _inside_host(best, device, collective in _RINGS and ranks >= _WHOLE_BOARD)
    return _over_hosts(best, facts) if int(facts.get("hosts") or 0) > 1 else None


def _inside_host(best: Figure, device: Device, whole_board: bool) -> _Result | None:
    """Find a run over NVSwitch that is as slow as PCIe: P2P is off, NVLink is down, or the fabric is not set up."""
    size = int(best.facts.get("bytes", 0))
    if best.value <= device.pcie_gbs:
        why = f"{device.link} carries {device.link_gbs:g} GB/s one way, PCIe {device.pcie_gbs:g}: NVLink was not used"
        if best.facts.get("p2p_off"):
            return "WARN", best, f"{why}, as NCCL_P2P_DISABLE or NCCL_P2P_LEVEL of this run asks", _P2P_STEP
        return "FAIL" if size >= _SURE_BYTES else "WARN", best, why, _NVLINK_STEP
    if size >= _HUGE_BYTES and whole_board and best.value < _LEAST_SHARE * device.link_gbs:
        half = f"at least half of it from {format_size(_HUGE_BYTES)} on"
        why = f"{device.link} carries {device.link_gbs:g} GB/s one way: {half}"
        return "WARN", best, why, _SLOW_STEP
    return None


def _over_hosts(best: Figure, facts: Mapping[str, Any]) -> _Result | None:
    """Find a multi-host run slower than one port of the slowest class, or far below the NICs that the user gave."""
    all_nics_gbs = nics_gbs(facts)
    if all_nics_gbs and best.value < _LEAST_NIC_SHARE * all_nics_gbs:
        why = f"{facts['nics']} Gb/s are {all_nics_gbs:g} GB/s a host: at least a quarter of it"
        return "WARN", best, why, _NET_STEP
    one_port = load_bounds().slowest_nic_gbps / 8
    if best.value < one_port:
        return "WARN", best, f"less than one port of {8 * one_port:g} Gb/s carries ({one_port:g} GB/s)", _NET_STEP
    return None
