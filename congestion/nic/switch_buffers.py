"""How much a switch must still take after it has sent a pause: PFC headroom, term by term.

The formula is SONiC's, from cfgmgr/buffer_headroom_mellanox.lua of sonic-net/sonic-swss, but that its cable holds 2%
less (it divides by 1,024,000 where a million is meant). The peer's response time is the pause quanta of IEEE 802.3,
31B.3.7. Left out: gearboxes, and the second MTU that SONiC adds on ports of eight lanes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from netlayer.errors import ConfigError

# Of 512 bits each, by the port's rate in Mb/s: the longest that a peer may send on after it has got a pause.
_PAUSE_QUANTA = {
    800_000: 905,
    400_000: 905,
    200_000: 453,
    100_000: 394,
    50_000: 147,
    40_000: 118,
    25_000: 80,
    10_000: 67,
}
_LIGHT_M_PER_S = 198e6  # in fibre
_SMALLEST_PACKET = 64
_ROUND = 1024


@dataclass(frozen=True)
class Asic:
    """What the arithmetic needs to know of a switch chip; the defaults are Spectrum-4's in SONiC's asic_table.j2.

    Args:
        cell_bytes: the buffer is handed out in cells of this.
        mac_phy_bytes: sent while a pause passes MAC and PHY.
        pipeline_bytes: taken in before the pause is over for the peer: the level at which it is lifted.
        small_share: of the packets, those so small that they waste most of a cell; SONiC's own default is a half.
    """

    cell_bytes: int = 192
    mac_phy_bytes: int = 819
    pipeline_bytes: int = 19 * 1024
    small_share: float = 0.5


@dataclass(frozen=True)
class Headroom:
    """The result, bytes; `terms` says what it is made of, each with its formula."""

    xoff_bytes: int
    xon_bytes: int
    terms: tuple[tuple[str, float, str], ...]

    @property
    def size_bytes(self) -> int:
        """What a priority group reserves: what arrives after the pause, and what stays until it is lifted."""
        return self.xoff_bytes + self.xon_bytes


def headroom(
    rate_bps: int, cable_m: float, mtu_bytes: int, lossless_mtu_bytes: int, asic: Asic | None = None
) -> Headroom:
    """Headroom of one lossless priority on one port.

    Args:
        mtu_bytes: the largest frame of the port, whatever its priority: one may just have begun on either side.
        lossless_mtu_bytes: the largest frame of the lossless priority.

    Raises:
        ConfigError: there is no pause time for that rate.
    """
    chip = asic or Asic()
    quanta = _PAUSE_QUANTA.get(rate_bps // 1_000_000)
    if quanta is None or rate_bps % 1_000_000:
        rates = ", ".join(f"{rate // 1000}G" for rate in _PAUSE_QUANTA)
        rule = "IEEE 802.3, 31B.3.7, has no response time for that rate"
        raise ConfigError("--rate", rate_bps, rule, f"give one of {rates}")
    cable = 2 * cable_m / _LIGHT_M_PER_S * rate_bps / 8
    response = quanta * 512 / 8
    occupancy = cell_occupancy(chip)
    sent_on = mtu_bytes + cable + chip.mac_phy_bytes + response
    xoff = _whole(lossless_mtu_bytes + sent_on * occupancy)
    terms = (
        ("frame that the switch itself has begun, before the pause", float(mtu_bytes), "port MTU with its header"),
        ("on the cable, there and back", cable, "2 * length / 198,000 km/s * rate / 8"),
        ("MAC and PHY", float(chip.mac_phy_bytes), "of the chip"),
        ("peer's response", response, f"{quanta} pause quanta * 512 / 8"),
        ("share of cells that packets waste", occupancy, "1 - small + small * cell / 64, or 2 cell / (1 + cell)"),
        ("frame that the peer has begun", float(lossless_mtu_bytes), "lossless MTU with its header"),
    )
    return Headroom(xoff, _whole(chip.pipeline_bytes), terms)


def cell_occupancy(asic: Asic) -> float:
    """Bytes of buffer a byte of packets, at worst."""
    cell = asic.cell_bytes
    worst = cell / _SMALLEST_PACKET if cell > 2 * _SMALLEST_PACKET else 2 * cell / (1 + cell)
    return 1 - asic.small_share + asic.small_share * worst


def _whole(num_bytes: float) -> int:
    return math.ceil(num_bytes / _ROUND) * _ROUND
