import math
from ipaddress import IPv4Address
from typing import Any

import numpy as np
import pytest

from netlayer.errors import ConfigError
from tests.topology.probe_network import DST, SRC, Network, exchange, sweep
from topology.ecmp.hashing import Headers
from topology.probe.capture import Capture, answers, probes
from topology.probe.choice import chi_square_tail
from topology.probe.forecast import forecast, predicted_shares
from topology.probe.kernel_hash import choose, multipath_hash
from topology.probe.options import routers_of
from topology.probe.packets import Sweep
from topology.probe.paths import PathSpread
from topology.probe.spread import spread

_PORTS = range(50000, 50080)


def _measure(network: Network, asked: Sweep | None = None) -> PathSpread:
    packets = exchange(asked or sweep(_PORTS, range(1, 5)), network)
    capture = Capture.of(packets, range(1000, 1000 * (len(packets) + 1), 1000))
    (found,) = spread(probes(capture), answers(capture))
    return found


def _even(port: int, ttl: int, round_: int) -> str | None:
    """One ToR, two spines, two leaves below each, then the target."""
    return {1: "10.9.1.1", 2: f"10.9.2.{port % 2}", 3: f"10.9.3.{port % 4}"}.get(ttl, DST)


def _polarised(port: int, ttl: int, round_: int) -> str | None:
    """Two spines, of which each uses one of two leaves that both have links to."""
    return {1: "10.9.1.1", 2: f"10.9.2.{port % 2}", 3: f"10.9.3.{port % 2}"}.get(ttl, DST)


def test_an_even_network_is_found_even() -> None:
    found = _measure(_even)
    choices = found.choices(members={2: 2, 3: 2})
    assert [choice.verdict for choice in choices] == ["one next hop", "even", "even", "even", *["one next hop"] * 4]
    summary = found.summary(choices)
    expected: dict[str, Any] = {
        "src": SRC,
        "dst": DST,
        "flows": 80,
        "hops": 4,
        "rounds": 1,
        "reached": True,
        "paths": 4,
    }
    expected |= {"probes": 320, "answered": 320, "unanswered_share": 0, "unreachable_flows": 0, "flows_that_moved": 0}
    assert summary == expected | {"choices": 3, "uneven_choices": 0}
    rows = [(row["hop"], row["router"], row["flows"], row["share"]) for row in found.hops()]
    assert rows[1:3] == [(2, "10.9.2.0", 40, 0.5), (2, "10.9.2.1", 40, 0.5)]
    assert rows[-1] == (4, DST, 80, 1)
    due = [(row["hop"], row["router"], row["share"]) for row in found.expected(choices)]
    assert due == [(1, "10.9.1.1", 1), *((hop, router, share) for hop, router, _, share in rows[1:])]
    assert {row["rtt_us"] for row in found.hops()} == {1.0}
    assert found.paths()[0] == {"path": f"10.9.1.1 > 10.9.2.0 > 10.9.3.0 > {DST}", "flows": 20, "share": 0.25}
    assert found.flows()[1]["hop_3"] == "10.9.3.1"


def test_polarisation_shows_a_router_at_a_time_though_the_hop_is_even() -> None:
    found = _measure(_polarised)
    assert [row["share"] for row in found.hops() if row["hop"] == 3] == [0.5, 0.5]
    assert {choice.verdict for choice in found.choices()} == {"even", "one next hop"}
    at_leaves = [choice for choice in found.choices(members={3: 2}) if choice.ttl == 3]
    assert [(choice.verdict, choice.chi_square) for choice in at_leaves] == [("polarised", 40.0)] * 2


def test_weights_change_what_is_expected() -> None:
    found = _measure(lambda port, ttl, _: f"10.9.{ttl}.{int(port % 4 > 0) if ttl == 2 else 1}")
    uneven = found.choices()[1]
    assert uneven.verdict == "uneven"
    assert uneven.chi_square == pytest.approx(20)
    heavy = (10 << 24) + (9 << 16) + (2 << 8) + 1
    assert found.choices(weights={heavy: 3})[1].chi_square == pytest.approx(0)
    expected = [row["share"] for row in found.expected(found.choices(weights={heavy: 3})) if row["hop"] == 2]
    assert expected == pytest.approx([0.25, 0.75])


def test_silent_routers_and_moving_flows_are_counted() -> None:
    def network(port: int, ttl: int, round_: int) -> str | None:
        if ttl == 2:
            return None
        return f"10.9.{ttl}.{round_ if port == 50003 else 0}"

    found = _measure(network, sweep(range(50000, 50010), range(1, 4), rounds=2))
    assert not found.reached
    assert found.sent.tolist() == [20, 20, 20]
    assert found.answered.tolist() == [20, 0, 20]
    assert found.changed.any(axis=1).tolist() == [port == 50003 for port in range(50000, 50010)]
    assert found.paths() == [{"path": "10.9.1.0 > * > 10.9.3.0", "flows": 10, "share": 1.0}], "the first answer counts"
    assert [choice.ttl for choice in found.choices()] == [1]
    assert [(row["hop"], row["share"]) for row in found.expected(found.choices())] == [(1, 1.0)]


def _unreachable(at: int, port_share: int = 1) -> Network:
    """A chain whose `at`-th router has no route, for every port or every `port_share`-th."""

    def network(port: int, ttl: int, round_: int) -> str | None:
        if port % port_share == 0 and ttl >= at:
            return f"10.9.{at}.1 unreachable"
        return f"10.9.{ttl}.1" if ttl < 4 else DST

    return network


def test_a_router_without_a_route_ends_the_path_where_it_stands() -> None:
    for at, path in ((1, "10.9.1.1 > unreachable"), (3, "10.9.1.1 > 10.9.2.1 > 10.9.3.1 > unreachable")):
        found = _measure(_unreachable(at))
        assert [row["path"] for row in found.paths()] == [path]
        summary = found.summary(found.choices())
        assert (summary["unreachable_flows"], summary["hops"], summary["reached"]) == (80, at, False)
        assert {row["unreachable"] for row in found.flows()} == {f"10.9.{at}.1"}


def test_a_next_hop_that_does_not_answer_ends_the_path_at_the_router_before_it() -> None:
    def network(port: int, ttl: int, round_: int) -> str | None:
        return f"10.9.{ttl}.1" if ttl < 3 else "10.9.2.1 unreachable"

    assert [row["path"] for row in _measure(network).paths()] == ["10.9.1.1 > 10.9.2.1 > unreachable"]


def test_flows_that_are_called_unreachable_stand_beside_those_that_arrive() -> None:
    found = _measure(_unreachable(2, port_share=4))
    paths = {row["path"]: row["flows"] for row in found.paths()}
    assert paths == {f"10.9.1.1 > 10.9.2.1 > 10.9.3.1 > {DST}": 60, "10.9.1.1 > 10.9.2.1 > unreachable": 20}
    assert found.reached
    assert int((found.refused > 0).sum()) == 20


def test_linux_routers_are_held_against_their_hash() -> None:
    seen = np.array(_PORTS, dtype=np.uint16)
    src, dst = (np.full(len(seen), int(IPv4Address(ip)), dtype=np.uint32) for ip in (SRC, DST))
    third = choose(multipath_hash(Headers(src, dst, seen), seed=7), (1, 3))

    def network(port: int, ttl: int, round_: int) -> str | None:
        return {1: "10.9.1.1", 2: "10.9.2.1", 3: f"10.9.3.{third[port - _PORTS[0]]}"}.get(ttl, DST)

    found = _measure(network)
    (router,) = routers_of(["10.9.2.1=7:10.9.3.0,10.9.3.1*3"])
    rows = forecast(found, [router], 1)
    assert len(rows) == 80
    assert all(row["predicted"] == row["measured"] for row in rows)
    assert [(row["router"], row["flows"]) for row in predicted_shares(rows)] == [
        ("10.9.3.0", int((third == 0).sum())),
        ("10.9.3.1", int((third == 1).sum())),
    ]
    other = forecast(found, [router._replace(seed=8)], 1)
    assert 0 < sum(row["predicted"] == row["measured"] for row in other) < 80
    assert len({row["predicted"] for row in forecast(found, [router], 0)}) == 1


@pytest.mark.parametrize(
    "text",
    [
        "10.0.0.1",
        "10.0.0.1=7",
        "10.0.0.1=0:10.0.0.2",
        "10.0.0.1=x:10.0.0.2",
        "10.0.0.1=4294967296:10.0.0.2",
        "10.0.0.1=7:10.0.0.2*0",
        "10.0.0=7:10.0.0.2",
        "10.0.0.1=7:",
        "10.0.0.1=\u00b2:10.0.0.2",
    ],
)
def test_a_router_that_is_none_is_one_line(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--linux = "):
        routers_of([text])
    with pytest.raises(ConfigError, match="gives that router a second time"):
        routers_of(["10.0.0.1=7:10.0.0.2"] * 2)


def test_repeated_probes_count_once_and_have_no_round_trip() -> None:
    packets = exchange(sweep(range(50000, 50001), range(1, 2)), _even)
    capture = Capture.of(packets * 2, range(1, 5))
    (found,) = spread(probes(capture), answers(capture))
    assert (found.sent.tolist(), found.answered.tolist()) == ([1], [1])
    assert np.isnan(found.rtt_us).all()


def test_answers_without_their_probes_still_give_paths() -> None:
    packets = [packet for packet in exchange(sweep(), _even) if packet[9] == 1]
    capture = Capture.of(packets, [0] * len(packets))
    (found,) = spread(probes(capture), answers(capture))
    assert found.summary(found.choices())["unanswered_share"] is None
    assert found.summary(found.choices())["paths"] == 4


def test_more_routers_than_members_is_an_error() -> None:
    with pytest.raises(ValueError, match="hop 2: 2 routers answered, expected are 1"):
        _measure(_even).choices(members={2: 1})


@pytest.mark.parametrize(
    ("statistic", "freedom", "tail"),
    [(3.841459, 1, 0.05), (5.991465, 2, 0.05), (7.814728, 3, 0.05), (18.30704, 10, 0.05), (44.98534, 31, 0.05)],
)
def test_chi_square_tail_is_that_of_the_tables(statistic: float, freedom: int, tail: float) -> None:
    assert chi_square_tail(statistic, freedom) == pytest.approx(tail, rel=1e-4)


def test_chi_square_tail_has_sound_ends() -> None:
    assert chi_square_tail(0, 5) == chi_square_tail(3, 0) == 1
    assert chi_square_tail(1e5, 7) == 0
    assert chi_square_tail(600, 600) == pytest.approx(0.492, abs=1e-3)
    assert math.isclose(chi_square_tail(2, 2), math.exp(-1))
