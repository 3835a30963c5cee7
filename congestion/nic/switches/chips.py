"""Headroom that switch chips need, by speed and cable: what their vendors publish, each table with its source.

Sources: sonic-net/sonic-buildimage, device/<source>/pg_profile_lookup.ini (August 2026), with columns speed, cable,
size, xon, xoff, threshold and xon_offset; platform/mellanox/asic_table.j2 for Spectrum's cells and pipelines, and for
which switch has which chip; for the others that is the chip in the names of a switch's own .bcm or .yml files. Vendors
differ by a factor of three for one chip: they assume other frames, peers and shares of small packets. A table's values
are for frames of 9,100 to 9,216 bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Asic:
    """Figures of a chip for SONiC's arithmetic; the defaults are Spectrum-4's.

    Args:
        cell_bytes: the buffer is handed out in cells of this.
        mac_phy_bytes: sent while a pause passes MAC and PHY.
        pipeline_bytes: taken in before the pause is over for the peer: the level at which it is lifted.
        tile_ns: how long packets stand on the tiles of a chip that is made of several.
        extra_bytes: that the chip's accounting needs besides.
        most_bps: of a port.
        lane_bps: of a lane: a port of eight holds twice the pipeline, and one more frame.
        small_share: of the bytes, those in packets so small that they waste most of a cell; 1 is the worst case, that
            of NVIDIA's own table for the SN5600.
    """

    cell_bytes: int = 192
    mac_phy_bytes: int = 819
    pipeline_bytes: int = 19 * 1024
    tile_ns: int = 120
    extra_bytes: int = 0
    most_bps: int = 800 * 10**9
    lane_bps: int = 100 * 10**9
    small_share: float = 1.0


@dataclass(frozen=True)
class Table:
    """One pg_profile_lookup.ini.

    Args:
        source: the folder that holds it.
        size_bytes, xon_bytes, xon_offset_bytes: of all its rows; 0 of a Spectrum, which computes them.
        xoff_bytes: by speed in Gb/s and cable in metres.
    """

    source: str
    size_bytes: int
    xon_bytes: int
    xon_offset_bytes: int
    xoff_bytes: Mapping[int, Mapping[int, int]]

    def look_up(self, rate_bps: int, cable_m: float) -> tuple[int, int] | None:
        """The next longer cable that it has, and its xoff; None where it has no such speed or cable."""
        row = self.xoff_bytes.get(rate_bps // 10**9, {}) if rate_bps % 10**9 == 0 else {}
        return next((one for one in sorted(row.items()) if one[0] >= cable_m), None)


@dataclass(frozen=True)
class Chip:
    """A switch chip.

    Args:
        platforms: how the names of SONiC's platforms begin that have it.
        asic: what SONiC computes headroom from; None: it looks it up in a table.
    """

    name: str
    platforms: tuple[str, ...]
    tables: tuple[Table, ...]
    asic: Asic | None = None


def find_chip(platform: str) -> Chip | None:
    """The chip of a SONiC platform such as x86_64-nvidia_sn5600-r0; None where it is not known."""
    return next((chip for chip in CHIPS.values() if platform.startswith(chip.platforms)), None)


def _table(source: str, size: int, xon: int, xon_offset: int, rows: str) -> Table:
    xoff_bytes: dict[int, dict[int, int]] = {}
    for line in rows.strip().splitlines():
        speed, _, pairs = line.partition(":")
        cables = (pair.partition("/") for pair in pairs.split())
        xoff_bytes[int(speed)] = {int(length): int(xoff) for length, _, xoff in cables}
    return Table(source, size, xon, xon_offset, xoff_bytes)


_ALL = (
    Chip(
        "spectrum-1",
        ("x86_64-mlnx_msn2", "x86_64-mlnx_lssn2700", "x86_64-nvidia_sn2201"),
        (),
        Asic(cell_bytes=96, tile_ns=0, most_bps=100 * 10**9, lane_bps=25 * 10**9),
    ),
    Chip(
        "spectrum-2",
        ("x86_64-mlnx_msn34", "x86_64-mlnx_msn37", "x86_64-mlnx_msn38"),
        (
            _table(
                "mellanox/x86_64-mlnx_msn3700-r0/ACS-MSN3700",
                0,
                0,
                0,
                """
                10: 5/32768 40/33792 300/40960
                25: 5/32768 40/35840 300/54272
                40: 5/33792 40/37888 300/66560
                50: 5/33792 40/38912 300/75776
                100: 5/33792 40/44032 300/117760
                200: 5/35840 40/55296 300/203776
                """,
            ),
        ),
        Asic(cell_bytes=144, tile_ns=0, most_bps=200 * 10**9, lane_bps=50 * 10**9),
    ),
    Chip(
        "spectrum-3",
        ("x86_64-mlnx_msn44", "x86_64-mlnx_msn46", "x86_64-mlnx_msn47", "x86_64-nvidia_sn42", "x86_64-nvidia_sn48"),
        (
            _table(
                "mellanox/x86_64-mlnx_msn4700-r0/ACS-MSN4700",
                0,
                0,
                0,
                """
                10: 5/32768 40/33792 300/40960
                25: 5/32768 40/35840 300/54272
                40: 5/33792 40/37888 300/66560
                50: 5/33792 40/38912 300/75776
                100: 5/33792 40/44032 300/117760
                200: 5/35840 40/55296 300/203776
                400: 5/38912 40/77824 300/373760
                """,
            ),
            _table(
                "mellanox/x86_64-mlnx_msn4700-r0/Mellanox-SN4700-C128",
                0,
                0,
                0,
                """
                10: 5/24576 40/25600 300/30720 1500/55296 2000/32768
                25: 5/26624 40/28672 300/41984 1500/103424 2000/64512
                40: 5/30720 40/33792 300/54272 1500/153600 2000/97280
                50: 5/33792 40/36864 300/63488 1500/187392 2000/119808
                100: 5/59392 40/66560 300/120832 1500/366592 2000/234496
                200: 5/66560 40/80896 300/188416
                400: 5/115712 40/144384 300/358400 2000/876544
                """,
            ),
        ),
        Asic(cell_bytes=144, tile_ns=0, most_bps=400 * 10**9, lane_bps=50 * 10**9),
    ),
    Chip(
        "spectrum-4",
        ("x86_64-nvidia_sn5400", "x86_64-nvidia_sn5600", "x86_64-nvidia_sn5610n"),
        (
            _table(
                "mellanox/x86_64-nvidia_sn5600-r0/ACS-SN5600",
                0,
                0,
                0,
                """
                10: 5/45056 40/46080 300/56320
                25: 5/48128 40/52224 300/76800
                40: 5/57344 40/62464 300/101376
                50: 5/63488 40/69632 300/118784
                100: 5/113664 40/126976 300/225280
                200: 5/131072 40/157696 300/355328
                400: 5/231424 40/283648 300/677888
                800: 5/257024 40/362496 300/1150976
                """,
            ),
            _table(
                "mellanox/x86_64-nvidia_sn5600-r0/Mellanox-SN5600-C256S1",
                0,
                0,
                0,
                """
                10: 5/20480 40/20480 250/23552 300/23552 1000/24576
                25: 5/21504 40/22528 250/29696 300/30720 1000/46080
                40: 5/24576 40/25600 250/36864 300/39936 1000/68608
                50: 5/26624 40/28672 250/43008 300/46080 1000/83968
                100: 5/44032 40/49152 250/76800 300/83968 1000/168960
                200: 5/50176 40/60416 250/116736 300/130048 1000/308224
                400: 5/86016 40/104448 250/217088 300/243712 1000/610304
                800: 5/95232 40/132096 250/357376 300/411648 1000/1153024
                """,
            ),
            _table(
                "mellanox/x86_64-nvidia_sn5600-r0/Mellanox-SN5600-V256",
                0,
                0,
                0,
                """
                10: 5/33792 40/34816 300/40960
                25: 5/35840 40/37888 300/54272
                40: 5/41984 40/45056 300/71680
                50: 5/46080 40/50176 300/82944
                100: 5/79872 40/88064 300/153600
                200: 5/91136 40/108544 300/240640
                400: 5/157696 40/192512 300/455680
                800: 5/175104 40/245760 300/771072
                """,
            ),
        ),
        Asic(),
    ),
    Chip(
        "spectrum-5",
        ("x86_64-nvidia_sn5640",),
        (),
        Asic(),
    ),
    Chip(
        "spectrum-6",
        ("x86_64-nvidia_sn66", "x86_64-nvidia_sn68"),
        (),
        Asic(cell_bytes=256, pipeline_bytes=42 * 1024, tile_ns=0, extra_bytes=18 * 1024, lane_bps=200 * 10**9),
    ),
    Chip(
        "tomahawk-3",
        (
            "x86_64-dellemc_z9332f",
            "x86_64-arista_7060dx4",
            "x86_64-arista_7060px4",
            "x86_64-cel_silverstone",
            "x86_64-accton_as9716_32d",
            "x86_64-quanta_ix9",
            "x86_64-alphanetworks_snj60d0",
        ),
        (
            _table(
                "dell/x86_64-dellemc_z9332f_d1508-r0/DellEMC-Z9332f-O32",
                2540,
                2540,
                2540,
                """
                100: 5/68580 40/74422 300/117348 1000/233172 2000/398526
                400: 5/178562 40/201930 300/373888 1000/836676 2000/1498092
                """,
            ),
            _table(
                "quanta/x86_64-quanta_ix9_bwde-r0/Quanta-IX9-32X",
                1270,
                0,
                2540,
                """
                10: 5/190500 40/190500 300/190500
                25: 5/190500 40/190500 300/190500
                40: 5/190500 40/190500 300/190500
                50: 5/190500 40/190500 300/190500
                100: 5/190500 40/190500 300/190500
                200: 5/190500 40/190500 300/190500
                400: 5/190500 40/190500 300/190500
                """,
            ),
        ),
    ),
    Chip(
        "tomahawk-4",
        ("x86_64-dell_z9664f", "x86_64-nokia_ixr7220_h4", "x86_64-arista_7060dx5_32"),
        (
            _table(
                "dell/x86_64-dell_z9664f-r0/DellEMC-Z9664f-O64",
                9144,
                9144,
                9144,
                """
                10: 5/75438 40/78740 300/103378
                25: 5/75438 40/78740 300/103378
                40: 5/91694 40/98298 300/147574
                50: 5/91694 40/98298 300/147574
                100: 5/129032 40/142240 300/240538
                200: 5/214122 40/240792 300/437134
                400: 5/371348 40/424434 300/817372
                """,
            ),
            _table(
                "nokia/x86_64-nokia_ixr7220_h4-r0/Nokia-IXR7220-H4-64D",
                1248,
                2288,
                2288,
                """
                10: 5/35776 40/37024 300/46176
                25: 5/53248 40/53248 300/79040
                40: 5/66560 40/71552 300/108160
                50: 5/90272 40/96096 300/141856
                100: 5/165568 40/177632 300/268736
                400: 5/307848 40/330200 300/499618
                """,
            ),
        ),
    ),
    Chip(
        "tomahawk-5",
        (
            "x86_64-arista_7060x6",
            "x86_64-dell_z9864f",
            "x86_64-nokia_ixr7220_h5",
            "x86_64-micas_m2-w6940",
            "x86_64-nexthop_4010",
        ),
        (
            _table(
                "dell/x86_64-dell_z9864f-r0/Dell-Z9864f-O64",
                18796,
                0,
                3556,
                """
                10: 5/91440 40/94742 300/258572
                25: 5/91440 40/94742 300/258572
                40: 5/106934 40/113538 300/258572
                50: 5/106934 40/113538 300/258572
                100: 5/147066 40/160274 300/258572
                200: 5/229362 40/255778 300/452374
                400: 5/393192 40/446024 300/839216
                800: 5/729488 40/835406 300/1621536
                """,
            ),
            _table(
                "arista/x86_64-arista_7060x6_64pe/Arista-7060X6-64PE-O128S2",
                18796,
                0,
                3556,
                """
                400: 5/612140 40/612140 150/612140
                """,
            ),
            _table(
                "arista/x86_64-arista_7060x6_64pe/Arista-7060X6-64PE-256x200G/BALANCED",
                18796,
                0,
                3556,
                """
                100: 5/300990 40/300990
                200: 5/300990 40/300990
                """,
            ),
            _table(
                "arista/x86_64-arista_7060x6_64pe_b/Arista-7060X6-64PE-B-O128",
                18796,
                0,
                3556,
                """
                100: 5/445770 30/445770 40/445770 60/475136 150/611328 500/1136396
                400: 5/445770 30/445770 40/445770 60/475136 150/611328 500/1136396
                """,
            ),
            _table(
                "arista/x86_64-arista_7060x6_64pe_b/Arista-7060X6-64PE-B-P32O64",
                8636,
                0,
                3556,
                """
                100: 500/1136396
                400: 5/425958 30/425958 300/839216 500/1136396
                800: 5/724662 40/833536 300/1621536
                """,
            ),
            _table(
                "nokia/x86_64-nokia_ixr7220_h5_64o-r0/Nokia-IXR7220-H5-64O",
                1248,
                2288,
                2288,
                """
                10: 5/35776 40/37024 300/46176
                25: 5/53248 40/53248 300/79040
                40: 5/66560 40/71552 300/108160
                50: 5/90272 40/96096 300/141856
                100: 5/165568 40/177632 300/268736
                400: 5/307848 40/330200 300/499618
                800: 5/572516 40/614172 300/929132
                """,
            ),
        ),
    ),
    Chip(
        "tomahawk-6",
        ("x86_64-nexthop_4210", "x86_64-nokia_ixr7220_h6"),
        (
            _table(
                "nexthop/x86_64-nexthop_4210-r0021/NH-4210-F-O256",
                4620,
                0,
                3360,
                """
                25: 5/162540 40/173460 300/254940
                50: 5/162540 30/170520 40/173460 300/254940 500/317100
                100: 5/229740 30/245280 40/251580 300/414120 500/538860
                200: 5/369180 30/400260 40/412860 300/737940 500/987840
                400: 5/650160 30/712740 40/737940 300/1387680 500/1887900
                800: 5/1249080 30/1374240 40/1424220 300/2724120 500/3724140
                """,
            ),
            _table(
                "nokia/x86_64-nokia_ixr7220_h6_128-r0/Nokia-IXR7220-H6-O256",
                8400,
                0,
                4200,
                """
                10: 5/54180 30/55860 40/56280 300/69300 500/79380
                25: 5/80220 30/80220 40/80220 300/119280 500/149520
                40: 5/100380 30/105840 40/107940 300/162540 500/204540
                50: 5/135660 30/141960 40/144480 300/212940 500/265860
                100: 5/125580 30/130200 40/131880 300/180180 500/217560
                200: 5/261660 30/270900 40/274260 300/371700 500/446880
                400: 5/464520 30/483420 40/490980 300/686280 500/836640
                800: 5/797580 30/835380 40/850080 300/1239840 500/1539720
                """,
            ),
        ),
    ),
    Chip(
        "trident-4",
        ("x86_64-dellemc_s5448f", "x86_64-dellemc_z9432f", "x86_64-nokia_ixr7220_d4", "x86_64-arista_7050dx4"),
        (
            _table(
                "dell/x86_64-dellemc_s5448f-r0/DellEMC-S5448f-C48O8",
                9540,
                9540,
                9540,
                """
                10: 5/96036 40/100170 300/131016
                25: 5/96036 40/100170 300/131016
                40: 5/117660 40/125929 300/187620
                50: 5/117660 40/125929 300/187620
                100: 5/165360 40/181896 300/300962
                200: 5/273162 40/306234 300/552366
                400: 5/470004 40/536148 300/1028412
                """,
            ),
            _table(
                "nokia/x86_64-nokia_ixr7220_d4-r0/Nokia-IXR7220-D4-36D",
                1272,
                2544,
                2544,
                """
                10: 5/30210 40/30846 100/31800 300/34662
                25: 5/31482 40/32754 100/34980 300/41976
                40: 5/46428 40/48336 100/51834 300/63282
                100: 5/75366 40/81726 100/89040 300/117978
                400: 5/154548 40/180624 100/209562 300/325632
                """,
            ),
        ),
    ),
)
CHIPS = {chip.name: chip for chip in _ALL}
