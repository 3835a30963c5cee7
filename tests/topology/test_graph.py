import dataclasses

import numpy as np
import pytest

from netlayer.errors import ConfigError
from tests.topology.graphs import diamond, graph
from topology.fabric.graph import Graph, checked, describe, parallel_pairs


def _ported(one: Graph, a_port: tuple[str, ...], b_port: tuple[str, ...]) -> Graph:
    return dataclasses.replace(one, a_port=a_port, b_port=b_port)


def test_a_cable_is_two_links() -> None:
    one = diamond()
    assert one.num_links == 2 * one.num_cables == 16
    assert np.array_equal(one.link_src[:8], one.link_dst[8:])
    start, links = one.out_links
    assert one.link_dst[links[start[3] : start[4]]].tolist() == [0, 1, 4, 5, 5]


def test_levels_count_up_from_the_nearest_host() -> None:
    assert diamond().level.tolist() == [0, 0, 0, 1, 2, 2, 1]
    assert graph(1, 3, [(0, 1), (2, 3)]).level.tolist() == [0, 1, -1, -1]


def test_describe_has_a_row_a_level() -> None:
    rows = {row["level"]: row for row in describe(diamond())}
    assert [(row["count"], row["up_links"], row["ports_max"]) for row in rows.values()] == [
        (3, 3, 1),
        (2, 5, 5),
        (2, 0, 3),
    ]
    assert rows["host"]["up_bps"] == 300e9


def test_parallel_pairs_are_counted() -> None:
    assert parallel_pairs(diamond()) == (1, 2)


def test_a_link_is_named_by_its_ports() -> None:
    one = _ported(graph(1, 1, [(0, 1)]), ("eth0",), ("",))
    assert one.link_name(0) == "h0:eth0 -> s1"
    assert one.link_name(1) == "s1 -> h0:eth0"


def test_find_says_what_names_look_like() -> None:
    assert diamond().find("s5", "--flows") == 5
    with pytest.raises(
        ConfigError, match=r"--flows = h9: is no device of this fabric of 7 devices; names look like h0"
    ):
        diamond().find("h9", "--flows")


@pytest.mark.parametrize(
    ("broken", "rule"),
    [
        (graph(1, 1, []), "has no link"),
        (graph(1, 1, [(0, 1), (1, 1)]), "begins and ends at one device"),
        (graph(2, 1, [(0, 2)]), "1 devices have no link, the first is h1"),
        (graph(1, 1, [(0, 1)], bps=0.0), "has no rate"),
        (graph(1, 1, [(0, 1)], bps=float("nan")), "has no rate"),
        (dataclasses.replace(graph(2, 1, [(0, 2), (1, 2)]), names=("x", "x", "s")), "two devices of the name x"),
        (_ported(graph(2, 1, [(0, 2), (1, 2)]), ("a", "a"), ("p1", "p1")), "share the port p1 of s2"),
    ],
)
def test_what_cannot_be_wired_is_one_line(broken: Graph, rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        checked(broken, "file")
    assert rule in str(caught.value)
    assert "\n" not in str(caught.value)
