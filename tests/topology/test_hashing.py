import re

import numpy as np
import pytest

from topology.ecmp.hashes import CRC16_BISYNC, CRC16_CCITT, CRC32C, Crc, mix64, murmur3, xor16
from topology.ecmp.hashing import FIVE_TUPLE, HASHES, Ecmp, HashName, Headers, Stage

NUM_FLOWS = 4096
# The spine that each flow i -> (i + 8) % 32 of ns-3 HPCC's run took: 4 leaves (nodes 32..35) x 8 hosts, 8 spines.
_SPINES = [7, 0, 3, 4, 5, 4, 1, 1, 4, 5, 7, 6, 2, 6, 5, 4, 7, 5, 5, 7, 0, 2, 0, 2, 0, 0, 4, 6, 1, 7, 6, 3]
_CHECK = np.stack([np.frombuffer(b"123456789", dtype=np.uint8)] * 2)


def _headers(seed: int = 0, num_flows: int = NUM_FLOWS) -> Headers:
    rng = np.random.default_rng(seed)
    src, dst, qpn = (rng.integers(0, 2**32, num_flows, dtype=np.uint32) for _ in range(3))
    return Headers(src, dst, rng.integers(0xC000, 0x10000, num_flows, dtype=np.uint16), qpn & np.uint32(0xFF_FFFF))


@pytest.mark.parametrize(
    ("crc", "check"),
    [
        (CRC16_CCITT, 0x2189),  # CRC-16/KERMIT
        (Crc(width=16, polynomial=0x8408, init=0xFFFF, xor_out=0xFFFF), 0x906E),  # CRC-16/IBM-SDLC
        (CRC16_BISYNC, 0xBB3D),  # CRC-16/ARC
        (CRC32C, 0xE306_9283),  # CRC-32/ISCSI
        (Crc(width=32, polynomial=0xEDB8_8320, init=0xFFFF_FFFF, xor_out=0xFFFF_FFFF), 0xCBF4_3926),  # CRC-32
    ],
)
def test_crcs_match_their_published_check_values(crc: Crc, check: int) -> None:
    assert crc.of(_CHECK).tolist() == [check, check]


def test_the_mixer_is_splitmix64() -> None:
    assert mix64(np.array([0], dtype=np.uint64)).tolist() == [0xE220_A839_7B1D_CDAF]


@pytest.mark.parametrize(
    ("words", "seed", "hashed"),
    [([], 0, 0), ([], 1, 0x514E_28B7), ([0], 0, 0x2362_F9DE), ([0x8765_4321], 0x5082_EDEE, 0x2362_F9DE)],
)
def test_murmur3_matches_its_published_vectors(words: list[int], seed: int, hashed: int) -> None:
    message = [np.array([word], dtype=np.uint32) for word in words]
    assert hex(murmur3(message, np.array([seed], dtype=np.uint32))[0]) == hex(hashed)


def test_xor16_by_hand() -> None:
    assert xor16(np.array([[0x01, 0x02, 0x10, 0x20]], dtype=np.uint8)).tolist() == [0x2211]


def test_murmur3_takes_the_simulators_paths() -> None:
    host = np.arange(32)
    address = np.uint32(0x0B00_0001) + (np.arange(32, dtype=np.uint32) << np.uint32(8))
    headers = Headers(address, address[(host + 8) % 32], np.full(32, 10_000, dtype=np.uint16))
    assert Ecmp("murmur3", headers, seed=0).choose(Stage.TOR_UP, 32 + host // 8, 8).tolist() == _SPINES


def test_a_header_fills_its_bins_in_little_endian() -> None:
    one = Headers(
        np.array([0x0A000001], np.uint32),
        np.array([0x0A010002], np.uint32),
        np.array([0xC123], np.uint16),
        np.array([0x123456], np.uint32),
    )
    tail = "23c1 b712 0000 0000"
    assert one.to_bins().tobytes() == bytes.fromhex(f"0100000a 0200010a 00000000 11000000 {tail}")
    assert one.to_bins(["dst_qpn"]).tobytes() == bytes.fromhex("00000000 00000000 56341200" + "00" * 12)


@pytest.mark.parametrize("name", HASHES)
@pytest.mark.parametrize("group_size", [1, 30, 32, 64])
def test_every_hash_fills_its_group_evenly(name: HashName, group_size: int) -> None:
    ecmp = Ecmp(name, _headers(), seed=1)
    for stage in Stage:
        chosen = ecmp.choose(stage, np.full(NUM_FLOWS, 7), group_size)
        counts = np.bincount(chosen, minlength=group_size)
        assert len(counts) == group_size
        expected = NUM_FLOWS / group_size
        # Chi-squared: mean is the degrees of freedom, deviation sqrt(2 of them); seeded, so it always comes out alike.
        freedom = group_size - 1
        assert ((counts - expected) ** 2 / expected).sum() <= freedom + 5 * np.sqrt(2 * freedom)


@pytest.mark.parametrize("name", HASHES)
def test_the_seed_and_the_switch_change_the_choice(name: HashName) -> None:
    switches = np.full(NUM_FLOWS, 7)
    first = Ecmp(name, _headers(), seed=1).choose(Stage.TOR_UP, switches, 32)
    assert np.array_equal(first, Ecmp(name, _headers(), seed=1).choose(Stage.TOR_UP, switches, 32))
    assert not np.array_equal(first, Ecmp(name, _headers(), seed=2).choose(Stage.TOR_UP, switches, 32))
    assert not np.array_equal(first, Ecmp(name, _headers(), seed=1).choose(Stage.TOR_UP, switches + 1, 32))
    alike = Ecmp(name, _headers(), seed=1, seed_per_switch=False)
    assert np.array_equal(*(alike.choose(Stage.TOR_UP, at, 32) for at in (switches, switches + 1)))


@pytest.mark.parametrize(
    ("first", "second", "cells"),
    [
        (("crc16", 1, 0), ("crc16", 1, 0), (32, 480)),
        (("crc16", 1, 0), ("crc16", 2, 0), (32, 480)),
        (("crc16", 1, 0), ("crc16", 2, 4), (512, 960)),
        (("crc16", 1, 0), ("crc16", 2, 8), (1024, 960)),
        (("crc16_bisync", 1, 0), ("crc16", 1, 0), (1024, 960)),
    ],
)
def test_polarisation_of_two_stages(
    first: tuple[HashName, int, int], second: tuple[HashName, int, int], cells: tuple[int, int]
) -> None:
    """Pairs (uplink of stage 1, of stage 2) that are used at all, 32 x 32 and 30 x 32.

    The reference had 8,000 flows; of random headers that leaves one of 960 pairs empty by chance, hence twice as many.
    """
    headers = _headers(num_flows=16_000)
    switch = np.full(len(headers), 1)
    for group_size, used in zip((32, 30), cells, strict=True):
        chosen = [
            Ecmp(name, headers, seed, offsets=(offset,) * 4, seed_per_switch=False).choose(Stage.TOR_UP, switch, size)
            for (name, seed, offset), size in zip((first, second), (group_size, 32), strict=True)
        ]
        assert len(np.unique(chosen[0] * 32 + chosen[1])) == used


@pytest.mark.parametrize(
    ("name", "offsets", "rule"),
    [
        ("crc16", (0, 20, 0, 0), "crc16 takes 4 numbers from 0 to 15, one for each of TOR_UP, "),
        ("crc16", (0, 0), "crc16 takes 4 numbers from 0 to 15"),
        ("crc16", (), "crc16 takes 4 numbers"),
        ("xor16", (0, 0, 0, -1), "xor16 takes 4 numbers from 0 to 15"),
        ("crc32c", (0, 0, 0, 32), "crc32c takes 4 numbers from 0 to 31"),
        ("murmur3", (0, 1, 2, 3), "murmur3 takes none"),
        ("random", (0, 0, 0, 0), "random takes none"),
    ],
)
def test_offsets_that_no_switch_can_take_are_refused(name: HashName, offsets: tuple[int, ...], rule: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"offsets {offsets}: {rule}")):
        Ecmp(name, _headers(num_flows=4), 0, offsets=offsets)


@pytest.mark.parametrize("name", [name for name in HASHES if name not in ("random", "murmur3")])
@pytest.mark.parametrize(("rotate", "cells"), [(False, 32), (True, 1024)])
def test_a_linear_hash_polarises_unless_each_stage_has_its_offset(name: HashName, rotate: bool, cells: int) -> None:
    headers = _headers(num_flows=16_384)
    ecmp = Ecmp(name, headers, seed=3, rotate=rotate)
    first = ecmp.choose(Stage.TOR_UP, np.full(len(headers), 1), 32)
    second = ecmp.choose(Stage.SPINE_UP, 100 + first, 32)
    assert len(np.unique(first * 32 + second)) == cells


def test_preprocessing_stirs_the_bins() -> None:
    choices = [
        Ecmp("xor16", _headers(), seed=0, preprocess=stir).choose(Stage.TOR_UP, np.full(NUM_FLOWS, 1), 32)
        for stir in (False, True)
    ]
    assert not np.array_equal(*choices)


@pytest.mark.parametrize("name", HASHES)
def test_only_the_fields_chosen_decide(name: HashName) -> None:
    """Flows of one pair of hosts and one port, told apart by their destination QP alone: E-ECMP spreads them."""
    qpn = np.arange(2, 2 + NUM_FLOWS, dtype=np.uint32)
    same = np.zeros(NUM_FLOWS, dtype=np.uint32)
    headers = Headers(same, same, same.astype(np.uint16), qpn)
    switch = np.full(NUM_FLOWS, 5)
    assert len(np.unique(Ecmp(name, headers, 1).choose(Stage.TOR_UP, switch, 32))) == 1
    spread = Ecmp(name, headers, 1, fields=[*FIVE_TUPLE, "dst_qpn"]).choose(Stage.TOR_UP, switch, 32)
    assert len(np.unique(spread)) == 32
    unread = Ecmp(name, _headers(), 1, fields=["protocol"]).choose(Stage.TOR_UP, switch, 32)
    assert len(np.unique(unread)) == 1


def test_what_is_unknown_is_named() -> None:
    with pytest.raises(ValueError, match="crc64"):
        Ecmp("crc64", _headers(), seed=0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="vlan"):
        Ecmp("random", _headers(), seed=0, fields=["vlan"])  # type: ignore[list-item]
    none = Headers(*(np.zeros(1, dtype=kind) for kind in (np.uint32, np.uint32, np.uint16)))
    with pytest.raises(ValueError, match="'dst_qpn': the headers do not have it"):
        Ecmp("crc16", none, seed=0, fields=["dst_qpn"])
