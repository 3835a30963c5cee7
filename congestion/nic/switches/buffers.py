"""PFC headroom: how much a switch must still take after it has sent a pause, computed term by term or looked up.

The formula is SONiC's, from cfgmgr/buffer_headroom_mellanox.lua of sonic-net/sonic-swss; the peer's response time is
the pause quanta of IEEE 802.3, 31B.3.7. It holds for Spectrum; for other chips vendors publish tables alone
(`switches.chips`). Not covered: gearboxes, and the 2 KiB that SONiC adds where less than all packets are small.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from congestion.nic.switches.chips import CHIPS, Asic, Chip
from netlayer.errors import ConfigError
from netlayer.units import format_rate

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
_MANY_LANES = 8
OWN_REMEDY = "give its headroom with --headroom-bytes and its cell size with --cell-bytes"


@dataclass(frozen=True)
class Headroom:
    """Bytes that one lossless priority on one port needs.

    Args:
        xoff_bytes: what arrives after the pause.
        xon_bytes: the level at which it is lifted.
        reserve_bytes: what the group keeps for itself besides.
        terms: what xoff is made of, each with its formula; empty where it was looked up or given.
        source: where the numbers are from.
        others: what other public tables for the chip say: (bytes, source).
        xon_offset_bytes: how far below the pause it is lifted; None where only xon says it.
        from_pool: the chip takes headroom out of a pool of its own, whatever the base says.
    """

    xoff_bytes: int
    xon_bytes: int
    reserve_bytes: int
    terms: tuple[tuple[str, float, str], ...] = ()
    source: str = ""
    others: tuple[tuple[int, str], ...] = ()
    xon_offset_bytes: int | None = None
    from_pool: bool = False

    @property
    def size_bytes(self) -> int:
        """Bytes of a priority group in all, wherever the headroom is taken from."""
        return self.xoff_bytes + self.reserve_bytes

    def profile_bytes(self, *, shared_pool: bool) -> int:
        """`size` of a buffer profile: with a shared headroom pool xoff comes out of that, and xon alone is reserved."""
        if self.from_pool:
            return self.reserve_bytes
        return self.xon_bytes if shared_pool else self.size_bytes


def find_headroom(chip: Chip, rate_bps: int, cable_m: float, mtu_bytes: int, *, lanes: int | None = None) -> Headroom:
    """Headroom on a known chip: computed for a Spectrum, else the largest of the public tables with the nearest cable.

    Args:
        mtu_bytes: the largest frame, of the lossless priority and of the port.
        lanes: of the port; by the chip's lane rate where None.

    Raises:
        ConfigError: no table has that speed or so long a cable.
    """
    named = [(table.look_up(rate_bps, cable_m), table) for table in chip.tables]
    rows = [(*row, table) for row, table in named if row is not None]
    # The shortest cable that is long enough, and of that the largest: next to none is lost where it is too much.
    rows.sort(key=lambda row: (row[0], -row[1]))
    public = [(xoff, f"{table.source} ({length} m)") for length, xoff, table in rows]
    if chip.asic is not None:
        if rate_bps > chip.asic.most_bps:
            rule = f"has no port of {format_rate(rate_bps)}"
            raise ConfigError("--chip", chip.name, rule, f"give --rate {format_rate(chip.asic.most_bps)} or less")
        many = (lanes or math.ceil(rate_bps / chip.asic.lane_bps)) >= _MANY_LANES
        room = headroom(rate_bps, cable_m, mtu_bytes, mtu_bytes, chip.asic, many_lanes=many)
        return Headroom(
            room.xoff_bytes, room.xon_bytes, room.reserve_bytes, room.terms, "SONiC's formula", tuple(public)
        )  # fmt: skip
    if not rows:
        lengths = [length for table in chip.tables for length in table.xoff_bytes.get(rate_bps // 10**9, {})]
        where = f"at {format_rate(rate_bps)} and {cable_m:g} m no public table for {chip.name} has a headroom"
        known = f"; the longest cable at that speed is {max(lengths)} m" if lengths else "; none has that speed"
        raise ConfigError("--chip", chip.name, where + known, OWN_REMEDY)
    table = rows[0][2]
    return Headroom(
        rows[0][1], table.xon_bytes, table.size_bytes, (), f"public table {public[0][1]}", tuple(public[1:]),
        table.xon_offset_bytes, from_pool=True,
    )  # fmt: skip


def own_headroom(xoff_bytes: int, cell_bytes: int, mtu_bytes: int) -> Headroom:
    """Headroom that somebody else knows, in whole cells; reserve and thresholds are one frame."""
    frame = -(-mtu_bytes // cell_bytes) * cell_bytes
    xoff = -(-xoff_bytes // cell_bytes) * cell_bytes
    return Headroom(xoff, frame, frame, (), "--headroom-bytes", (), frame)


def unknown_chip(field: str, value: object, why: str) -> ConfigError:
    """The refusal of a chip whose headroom nobody has said."""
    return ConfigError(field, value, why, f"give --chip ({', '.join(CHIPS)}); for any other chip {OWN_REMEDY}")


def headroom(
    rate_bps: int,
    cable_m: float,
    mtu_bytes: int,
    lossless_mtu_bytes: int,
    asic: Asic | None = None,
    *,
    many_lanes: bool = False,
) -> Headroom:
    """Headroom of one lossless priority on one port, by SONiC's formula.

    Args:
        mtu_bytes: the largest frame of the port, whatever its priority: one may just have begun on either side.
        lossless_mtu_bytes: the largest frame of the lossless priority.
        many_lanes: the port has eight.

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
    tiles = chip.tile_ns * rate_bps / 8 / 1e9
    occupancy = cell_occupancy(chip)
    sent_on = mtu_bytes + cable + chip.mac_phy_bytes + response + tiles
    xoff = _whole(lossless_mtu_bytes + sent_on * occupancy) + chip.extra_bytes
    xon = _whole(chip.pipeline_bytes * (2 if many_lanes else 1))
    terms = (
        ("frame that the switch itself has begun, before the pause", float(mtu_bytes), "port MTU with its header"),
        ("on the cable, there and back", cable, "2 * length / 198,000 km/s * rate / 8"),
        ("MAC and PHY", float(chip.mac_phy_bytes), "of the chip"),
        ("peer's response", response, f"{quanta} pause quanta * 512 / 8"),
        ("on the chip's tiles", tiles, f"{chip.tile_ns} ns * rate / 8"),
        (
            "share of cells that packets waste",
            occupancy,
            "1 - small + small * cell / 64, or 2 cell / (1 + cell), whole",
        ),
        ("frame that the peer has begun", float(lossless_mtu_bytes), "lossless MTU with its header"),
        ("of the chip's accounting", float(chip.extra_bytes), "of the chip"),
    )
    return Headroom(xoff, xon, _whole(xon + (mtu_bytes if many_lanes else 0)), terms)


def cell_occupancy(asic: Asic) -> float:
    """Bytes of buffer a byte of packets, at worst."""
    cell = asic.cell_bytes
    worst = cell / _SMALLEST_PACKET if cell > 2 * _SMALLEST_PACKET else 2 * cell / (1 + cell)
    return 1 - asic.small_share + asic.small_share * math.ceil(worst)


def _whole(num_bytes: float) -> int:
    return math.ceil(num_bytes / _ROUND) * _ROUND
