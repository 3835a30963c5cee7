import dataclasses
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netlayer.errors import ConfigError
from tests.topology.graphs import diamond, write
from topology.ecmp.calibrate import Counters, compare, fit_scale, predict, read_counters, summarise
from topology.traffic.flow_files import read_flows
from topology.traffic.job import Flows, Kind

FLOWS = "src,dst,bytes\nh0,h2,600\nh1,h2,300\n"
COUNTERS = "device,port,bytes\nh0,s3,660\ns3,s4,330\ns6,h2,990\n"


def _flows(src: list[int], dst: list[int]) -> Flows:
    ends = (np.array(nodes, dtype=np.int64) for nodes in (src, dst))
    return Flows(*ends, np.ones(len(src)), np.full(len(src), Kind.FILE, dtype=np.int8))


def test_an_even_prediction_needs_no_hash_and_the_scale_takes_up_headers(tmp_path: Path) -> None:
    graph = diamond()
    flows = read_flows(write(tmp_path / "f.csv", FLOWS), graph)
    counters = read_counters(graph, write(tmp_path / "c.csv", COUNTERS))
    even, hashed = predict(graph, flows, "random", seed=0)
    assert even[counters.link].tolist() == [600, 300, 900]
    assert even.sum() == hashed.sum() == 4 * 900
    rows = compare(graph, counters, {"even": even, "hashed": hashed})
    assert [row["prediction"] for row in rows] == ["even", "hashed"] * 3
    evens = rows[::2]
    assert [row["link"] for row in evens] == ["h0 -> s3", "s3 -> s4", "s6 -> h2"]
    assert [row["predicted_bytes"] for row in evens] == [600, 300, 900], "as predicted, without the scale"
    assert [row["scaled_bytes"] for row in evens] == pytest.approx([660, 330, 990])
    assert [row["residual"] for row in evens] == pytest.approx([0, 0, 0])
    summary = summarise(rows, counters, {"even": even, "hashed": hashed})
    assert [row["prediction"] for row in summary] == ["even", "hashed"]
    assert summary[0]["scale"] == pytest.approx(1.1)
    assert summary[0]["rms_residual"] == pytest.approx(0)


def test_source_ports_that_are_known_decide_the_hash(tmp_path: Path) -> None:
    graph = diamond()
    text = "src,dst,bytes,sport\n" + "".join(f"h0,h2,1,{port}\n" for port in range(50_000, 50_040))
    flows = read_flows(write(tmp_path / "f.csv", text), graph)
    known = [predict(graph, flows, "crc16", seed=4)[1] for _ in range(2)]
    assert np.array_equal(*known)
    drawn = predict(graph, dataclasses.replace(flows, udp_sport=None), "crc16", seed=4)[1]
    assert not np.array_equal(known[0], drawn)


def test_a_hosts_port_is_found_by_the_hosts_name(tmp_path: Path) -> None:
    names = ("srv0/eth0", "srv1/eth0", "srv1/eth1", "s3", "s4", "s5", "s6")
    graph = dataclasses.replace(diamond(), names=names, a_port=("eth0", "eth0", "eth1", "", "", "", "", ""))
    text = "device,port,bytes\nsrv0,eth0,1\nsrv1,eth1,2\nsrv1/eth0,eth0,3\n"
    assert read_counters(graph, write(tmp_path / "c.csv", text)).link.tolist() == [0, 2, 1]
    numbered = dataclasses.replace(graph, a_port=("1", "1", "2", "", "", "", "", ""))
    text = "device,port,bytes\nsrv0,eth0,1\nsrv1,2,2\nsrv1/eth0,1,3\n"
    assert read_counters(numbered, write(tmp_path / "c.csv", text)).link.tolist() == [0, 2, 1]


def test_a_residual_is_over_the_mean_of_its_level() -> None:
    graph = diamond()
    both = Counters(np.array([3, 4]), np.array([300.0, 100.0]))  # s3 -> s4, s3 -> s5
    even = np.zeros(graph.num_links)
    even[[3, 4]] = 200.0
    rows = compare(graph, both, {"even": even})
    assert [(row["residual"], row["residual_over_bytes"]) for row in rows] == [(0.5, 200.0), (-0.5, 200.0)]


def test_a_link_that_nothing_was_predicted_for_has_a_finite_residual() -> None:
    graph = diamond()
    both = Counters(np.array([3, 4]), np.array([300.0, 100.0]))
    even = np.zeros(graph.num_links)
    even[3] = 300.0
    rows = compare(graph, both, {"even": even})
    assert [row["scaled_bytes"] for row in rows] == [300.0, 0.0]
    assert rows[1]["residual"] == 0.5, "100 bytes too many, over the mean of 200"
    silent = compare(
        graph, Counters(np.array([3, 0]), np.array([0.0, 600.0])), {"even": np.full(graph.num_links, 600.0)}
    )
    assert [row["residual"] for row in silent] == [-1.0, 0.5], "all of what was predicted is missing"


def test_a_hash_sends_each_flow_whole() -> None:
    graph = diamond()
    flows = _flows([0] * 90, [2] * 90)
    even, hashed = predict(graph, flows, "random", seed=1)
    assert even[3] == 30
    assert hashed[3] != 30
    assert hashed[3] + hashed[4] + hashed[5] == 90
    assert float(hashed[3]).is_integer()


@given(st.lists(st.floats(1, 1e9), min_size=1, max_size=9), st.floats(0.1, 10))
def test_the_scale_of_a_scaled_prediction_is_that_scale(values: list[float], scale: float) -> None:
    predicted = np.array(values)
    assert fit_scale(scale * predicted, predicted) == pytest.approx(scale)
    assert fit_scale(predicted, np.zeros(len(values))) == 1.0


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("device,bytes\nh0,1\n", "has no column port"),
        ("device,port,bytes\n", "has no line behind its header"),
        ("device,port,bytes\nh9,s3,1\n", "is no device of this fabric"),
        ("device,port,bytes\nh0,s4,1\n", "h0 has no links at s4"),
        ("device,port,bytes\ns3,s5,1\n", "s3 has 2 links at s5"),
        ("device,port,bytes\nh0,s3,1\nh0,s3,1\n", "gives h0 -> s3 twice"),
        ("device,port,bytes\nh0,s3,-1\n", "-1 is no number of bytes"),
        ("device,port,bytes\nh0,s3,nan\n", "nan is no number of bytes"),
        ("device,port,bytes\nh0,s3\n", "line 2: is too short"),
        ('device,port,bytes\nh0,"s3\n', "is no CSV"),
        ("", "has no column device, port, bytes"),
    ],
)
def test_damaged_counters_are_one_line(tmp_path: Path, text: str, rule: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_counters(diamond(), write(tmp_path / "c.csv", text))
    assert rule in str(caught.value)
    assert str(caught.value).isprintable()


def test_a_flow_without_a_path_is_said(caplog: pytest.LogCaptureFixture) -> None:
    from tests.topology.graphs import graph

    split = graph(2, 2, [(0, 2), (1, 3)])
    even, hashed = predict(split, _flows([0], [1]), "random", 0)
    assert even.sum() == hashed.sum() == 0
    assert "1 of 1 flows have no path" in caplog.text
