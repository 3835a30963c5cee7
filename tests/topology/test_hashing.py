import numpy as np
import pytest

from topology.hashing import CRC16_CCITT, CRC32C, HASHES, Crc, Ecmp, HashName, Headers, Stage, mix64, udp_source_port

NUM_FLOWS = 4096


def _headers(seed: int = 0) -> Headers:
    rng = np.random.default_rng(seed)
    src, dst = (rng.integers(0, 2**32, NUM_FLOWS, dtype=np.uint32) for _ in range(2))
    return Headers(src, dst, rng.integers(0xC000, 0x10000, NUM_FLOWS, dtype=np.uint16))


@pytest.mark.parametrize(
    ("crc", "check"),
    [
        (CRC16_CCITT, 0x2189),  # CRC-16/KERMIT
        (Crc(width=16, polynomial=0x8408, init=0xFFFF, xor_out=0xFFFF), 0x906E),  # CRC-16/IBM-SDLC
        (Crc(width=16, polynomial=0xA001), 0xBB3D),  # CRC-16/ARC, RTAG7's BISYNC
        (CRC32C, 0xE306_9283),  # CRC-32/ISCSI
        (Crc(width=32, polynomial=0xEDB8_8320, init=0xFFFF_FFFF, xor_out=0xFFFF_FFFF), 0xCBF4_3926),  # CRC-32
    ],
)
def test_crcs_match_their_published_check_values(crc: Crc, check: int) -> None:
    message = np.frombuffer(b"123456789", dtype=np.uint8)
    assert crc.of(np.stack([message, message])).tolist() == [check, check]


def test_the_mixer_is_splitmix64() -> None:
    assert mix64(np.array([0], dtype=np.uint64)).tolist() == [0xE220_A839_7B1D_CDAF]


def test_a_header_is_laid_out_as_on_the_wire() -> None:
    one = Headers(np.array([0x0A000001], np.uint32), np.array([0x0A010002], np.uint32), np.array([0xC123], np.uint16))
    assert one.to_bytes().tobytes() == bytes.fromhex("0a000001 0a010002 11 c123 12b7")


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


@pytest.mark.parametrize(
    ("name", "rotate", "cells"), [("crc16", False, 32), ("crc16", True, 1024), ("random", False, 1024)]
)
def test_a_crc_polarises_unless_each_stage_has_its_offset(name: HashName, rotate: bool, cells: int) -> None:
    """Two stages of 32: of 1,024 pairs a linear hash with another seed alone uses 32."""
    flows = np.concatenate([_headers(seed).to_bytes() for seed in range(4)])
    headers = [
        np.concatenate([getattr(_headers(seed), field) for seed in range(4)]) for field in Headers.__annotations__
    ]
    ecmp = Ecmp(name, Headers(*headers), seed=3, rotate=rotate)
    first = ecmp.choose(Stage.TOR_UP, np.full(len(flows), 1), 32)
    second = ecmp.choose(Stage.SPINE_UP, 100 + first, 32)
    assert len(np.unique(first * 32 + second)) == cells


def test_an_unknown_hash_is_named() -> None:
    with pytest.raises(ValueError, match="crc64"):
        Ecmp("crc64", _headers(), seed=0)  # type: ignore[arg-type]


def test_source_ports_are_dynamic_ports_and_alike_both_ways() -> None:
    rng = np.random.default_rng(0)
    local, remote = (rng.integers(2, 2**24, NUM_FLOWS) for _ in range(2))
    ports = udp_source_port(local, remote)
    assert ports.min() >= 0xC000
    assert ports.max() <= 0xFFFF
    assert np.array_equal(ports, udp_source_port(remote, local))
    assert len(np.unique(ports)) > 3000


@pytest.mark.parametrize(
    ("local", "remote", "port"),
    [(1, 1, 0xC001), (0x4000, 1, 0xC001), (0x100000, 1, 0xC001), (0x100000, 0x100000, 0xC001), (3, 5, 0xC00F)],
)
def test_source_ports_by_hand(local: int, remote: int, port: int) -> None:
    assert udp_source_port(np.array([local]), np.array([remote])).tolist() == [port]
