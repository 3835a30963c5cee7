"""Settings with which switches treat packets as the NICs mark them: one plan, whatever the switch speaks.

DSCP, priorities and marking come from the profile that the NICs are set by, ports and cables from the caller. What the
profile omits is left alone on the switch. Not covered: addresses, routing, and the sizes of buffer pools, which
belong to a chip.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from congestion.nic.profile.file import Profile
from congestion.nic.switches.buffers import Headroom
from netlayer.errors import ConfigError

Format = Literal["sonic", "nvue", "arista", "cisco"]
CHIP_NAMES = (
    *(f"spectrum-{number}" for number in range(1, 7)),
    *(f"tomahawk-{number}" for number in range(3, 7)),
    "trident-4",
)  # those of `switches.chips`
FORMATS: tuple[Format, ...] = ("sonic", "nvue", "arista", "cisco")
NAME = "NETLAYER"  # of maps and profiles on the switch
MTU_BYTES = 9216  # usual in a RoCE fabric
ETHERNET_BYTES = 22  # header, VLAN tag and checksum, which SONiC's and NVUE's MTU omit
WATCHDOG_MS = 200
MOST_SEED = 2**32 - 1
_PORTS = {
    "sonic": r"Ethernet\d{1,4}",
    "nvue": r"swp\d{1,3}(s\d)?(-\d{1,3})?",
    "arista": r"Ethernet\d{1,3}(/\d{1,3}){0,2}(-\d{1,3})?",
    "cisco": r"Ethernet\d{1,3}/\d{1,3}(/\d{1,3})?(-\d{1,3})?",
}
_EXAMPLES = {"sonic": "Ethernet0,Ethernet8", "nvue": "swp1-32", "arista": "Ethernet1-32", "cisco": "Ethernet1/1-32"}


@dataclass(frozen=True)
class Marking:
    """Thresholds of marking: where it begins, where it is certain, and its share just below that."""

    kmin_bytes: int
    kmax_bytes: int
    pmax_percent: int


@dataclass(frozen=True)
class SwitchPlan:
    """Settings of a switch.

    Args:
        priority: switch priority, traffic class and queue of RDMA packets; 802.1p where frames are tagged.
        lossless: priorities that are paused; none for a lossy fabric.
        marking: None where the profile says nothing of it.
        hash_seed, hash_offset: of ECMP; None leaves the switch's own.
        lossless_headroom: of each lossless priority on each port; None where there is none, or the chip is not known.
        chip: of the switch, as `switches.chips` names it; empty where it is not known.
        notes: what a person must know before using it.
    """

    profile: str
    dscp: int
    priority: int
    lossless: tuple[int, ...]
    cnp_dscp: int
    cnp_priority: int
    marking: Marking | None
    rate_bps: int
    cable_m: int
    mtu_bytes: int
    ports: tuple[str, ...]
    hash_seed: int | None = None
    hash_offset: int | None = None
    lossless_headroom: Headroom | None = None
    notes: tuple[str, ...] = field(default=())
    chip: str = ""

    @property
    def num_ports(self) -> int:
        """Ports, each one of a range: 32 of swp1-32."""
        return sum(_ports_of(port) for port in self.ports)

    @property
    def dscp_to_class(self) -> dict[int, int]:
        """The two DSCPs that matter; the switch's own default holds for the others, all of which go to class 0 here."""
        return {self.dscp: self.priority, self.cnp_dscp: self.cnp_priority}


def plan_switch(
    profile: Profile,
    ports: Sequence[str],
    *,
    rate_bps: int,
    cable_m: int = 40,
    mtu_bytes: int = MTU_BYTES,
    hash_seed: int | None = None,
    hash_offset: int | None = None,
    room: Headroom | None = None,
    chip: str = "",
) -> SwitchPlan:
    """The plan of one switch.

    Args:
        room: the headroom of its chip (`switch_buffers`); a system that computes it by itself needs none.
        chip: the chip's name.

    Raises:
        ConfigError: data and CNPs in one class, half of a marking, an MTU or a cable that cannot be.
    """
    traffic, cnp = profile.traffic, profile.cnp
    if cnp.priority == traffic.priority:
        rule = f"is the priority of the data too (traffic.priority = {traffic.priority}): CNPs would queue behind it"
        raise ConfigError("cnp.priority", cnp.priority, rule, "give CNPs one of their own, such as 6")
    if cnp.dscp == traffic.dscp:
        rule = f"is the DSCP of the data too: a switch could not tell the two priorities {cnp.priority} and "
        raise ConfigError("cnp.dscp", cnp.dscp, f"{rule}{traffic.priority} apart", "give CNPs one of their own: 48")
    check_cable_and_mtu(cable_m, mtu_bytes)
    lossless = tuple(sorted(profile.pfc.priorities))
    return SwitchPlan(
        profile.name,
        traffic.dscp,
        traffic.priority,
        lossless,
        cnp.dscp,
        cnp.priority,
        _marking(profile),
        rate_bps,
        cable_m,
        mtu_bytes,
        tuple(ports),
        hash_seed,
        hash_offset,
        room if lossless else None,
        tuple(_notes(profile, hash_seed, hash_offset)),
        chip,
    )


def check_cable_and_mtu(cable_m: int, mtu_bytes: int) -> None:
    """
    Raises:
        ConfigError: one of them cannot be.
    """
    if not 1 <= cable_m <= 100_000:
        raise ConfigError("--cable-m", cable_m, "must be 1..100000 metres", "give the longest cable of a port")
    if not 1280 <= mtu_bytes <= 9216:
        raise ConfigError("--mtu", mtu_bytes, "must be 1280..9216 bytes", "9216 is usual in a RoCE fabric")


def check_ports(ports: Sequence[str], form: Format) -> None:
    """Refuse names that are no ports of that system: they go into commands as they are.

    Raises:
        ConfigError: one of them is none, one comes twice, or there is none.
    """
    remedy = f"give them as {form} has them: {_EXAMPLES[form]}"
    if not ports:
        raise ConfigError("--ports", None, "is missing", remedy)
    for port in ports:
        if re.fullmatch(_PORTS[form], port, re.ASCII) is None:
            raise ConfigError("--ports", port, f"is no port of {form}", remedy)
        if _ports_of(port) < 1:
            raise ConfigError("--ports", port, "ends before it begins", remedy)
        if ports.count(port) > 1:
            raise ConfigError("--ports", port, "comes twice", "name each once")


def _ports_of(name: str) -> int:
    ends = re.search(r"(\d+)-(\d+)$", name)
    return int(ends[2]) - int(ends[1]) + 1 if ends else 1


def _marking(profile: Profile) -> Marking | None:
    section = profile.switch
    values = {name: getattr(section, name) for name in ("kmin_bytes", "kmax_bytes", "pmax_percent")}
    missing = [name for name, value in values.items() if value is None]
    if len(missing) == len(values):
        return None
    if missing:
        rule = "is missing, where the other parts of the marking are given"
        raise ConfigError(f"switch.{missing[0]}", None, rule, "give kmin_bytes, kmax_bytes and pmax_percent, or none")
    if not profile.traffic.ecn:
        raise ConfigError("switch.kmin_bytes", section.kmin_bytes, "has no effect: traffic.ecn = false", "omit one")
    return Marking(**values)


def _notes(profile: Profile, seed: int | None, offset: int | None) -> list[str]:
    notes = []
    if profile.switch.kmin_bytes is None:
        notes.append("the profile has no [switch] marking: ECN thresholds are left as they are")
    if not profile.pfc.priorities:
        notes.append("no lossless priority: PFC and headroom are left as they are")
    if seed is not None and offset is None:
        notes.append(
            "a seed alone does not end polarisation where the hash is a CRC; give each tier another offset too"
        )
    return notes
