import numpy as np
import pytest

from topology.ecmp.source_port import flow_label_source_port, rxe_source_port, udp_source_port


def test_source_ports_are_dynamic_ports_and_alike_both_ways() -> None:
    rng = np.random.default_rng(0)
    local, remote = (rng.integers(2, 2**24, 4096) for _ in range(2))
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


@pytest.mark.parametrize(("label", "port"), [(0, 0xC000), (0x3FFF, 0xFFFF), (0x4000, 0xC001), (0xFFFFF, 0xFFC0)])
def test_a_flow_label_folds_its_high_bits_in(label: int, port: int) -> None:
    assert flow_label_source_port(np.array([label])).tolist() == [port]


def test_sequential_queue_pairs_hardly_move_the_low_bits() -> None:
    """64 queue pairs in a row against one: 64 ports, but a hash that takes 5 bits of the port sees few of them."""
    ports = udp_source_port(np.arange(0x100, 0x140), np.full(64, 0x10))
    assert len(np.unique(ports)) == 64
    assert len(np.unique(ports & 31)) == 2


def test_soft_roce_takes_its_own_number_alone() -> None:
    assert rxe_source_port(np.array([0, 1])).tolist() == [0xC000, 0xC000 + (0x61C88647 >> 18)]
