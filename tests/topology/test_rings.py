import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from topology.traffic.rings import Edges, Segments, all_pairs, ring, tree, tree_parent


def _segments(table: np.ndarray, *, per_server: int, nics: int) -> Segments:
    """Ranks in order on servers of `per_server` GPUs that share `nics` NICs."""
    return Segments.of(table, table // per_server, table % per_server * nics // per_server)


def _pairs(edges: Edges) -> list[tuple[int, int]]:
    return list(zip(edges.src_rank.tolist(), edges.dst_rank.tolist(), strict=True))


def test_one_rank_a_server_passes_to_the_next() -> None:
    edges = ring(_segments(np.array([[0, 4, 8], [1, 5, 9]]), per_server=4, nics=4), 1)
    assert _pairs(edges) == [(0, 4), (4, 8), (8, 0), (1, 5), (5, 9), (9, 1)]
    assert edges.row.tolist() == [0, 0, 0, 1, 1, 1]


def test_each_channel_keeps_to_its_nic() -> None:
    """Two servers of four GPUs and two NICs: channel 0 on the first GPU's NIC, channel 1 on the third's."""
    segments = _segments(np.arange(8).reshape(1, 8), per_server=4, nics=2)
    edges = ring(segments)
    assert _pairs(edges) == [(0, 4), (2, 6), (4, 0), (6, 2)]
    assert edges.share.tolist() == [0.5] * 4
    assert len(_pairs(ring(segments, 4))) == 8


def test_a_group_in_one_server_makes_no_edge() -> None:
    segments = _segments(np.arange(8).reshape(2, 4), per_server=4, nics=4)
    assert len(ring(segments, 4).src_rank) == 0
    assert [len(edges.src_rank) for edges in tree(segments, 4)] == [0, 0]
    assert len(all_pairs(segments).src_rank) == 0


def test_the_tree_of_eight_is_nccls() -> None:
    """Root 0 over 4; 4 over 2 and 6; odd places are leaves."""
    place = np.arange(8)
    assert tree_parent(place, np.full(8, 8)).tolist() == [0, 2, 4, 2, 0, 6, 4, 6]
    assert tree_parent(np.arange(6), np.full(6, 6)).tolist() == [0, 2, 4, 2, 0, 4]


@given(st.integers(2, 70))
def test_two_trees_span_all_servers_and_no_server_is_inside_both(num_servers: int) -> None:
    up, down = tree(_segments(np.arange(num_servers).reshape(1, -1), per_server=1, nics=1), 2)
    assert sorted(_pairs(up)) == sorted((child, parent) for parent, child in _pairs(down))
    assert len(up.src_rank) == 2 * (num_servers - 1)
    halves = [(up.src_rank[half], up.dst_rank[half]) for half in _halves(up)]
    inner = []
    for child, parent in halves:
        parents = dict(zip(child.tolist(), parent.tolist(), strict=True))
        (root,) = set(range(num_servers)) - set(parents)
        for server in range(num_servers):
            steps = 0
            while server != root:
                server, steps = parents[server], steps + 1
                assert steps <= num_servers.bit_length() + 1
        children = np.bincount(parent, minlength=num_servers)
        assert children.max() <= 2
        inner.append(set(np.flatnonzero(children == 2).tolist()))
    assert not inner[0] & inner[1]


def _halves(edges: Edges) -> list[np.ndarray]:
    """Channels alternate; the roots' edges are omitted, so find the trees by following the construction again."""
    num_servers = len(edges.src_rank) // 2 + 1
    first = tree_parent(np.arange(num_servers), np.full(num_servers, num_servers))
    wanted = {(child, int(first[child])) for child in range(1, num_servers)}
    taken = np.zeros(len(edges.src_rank), dtype=bool)
    for index, pair in enumerate(_pairs(edges)):
        if pair in wanted:
            wanted.discard(pair)
            taken[index] = True
    return [np.flatnonzero(taken), np.flatnonzero(~taken)]


def test_pairs_leave_by_the_nic_of_the_targets_rail() -> None:
    edges = all_pairs(_segments(np.arange(4).reshape(1, 4), per_server=2, nics=2))
    assert sorted(_pairs(edges)) == sorted([(0, 2), (0, 2), (1, 3), (1, 3), (2, 0), (2, 0), (3, 1), (3, 1)])
    assert edges.share.tolist() == [0.25] * 8


@pytest.mark.parametrize("num_channels", [1, 2, 3, 8])
def test_channels_share_the_bytes(num_channels: int) -> None:
    segments = _segments(np.arange(12).reshape(1, 12), per_server=4, nics=4)
    assert ring(segments, num_channels).share.sum() == pytest.approx(3)  # three hops, each with all the data
    for edges in tree(segments, num_channels):
        assert edges.share.sum() == pytest.approx(2)  # two edges a tree
