from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from netlayer.errors import ConfigError
from tests.topology.graphs import diamond, write
from topology.calibrate import (
    Counters,
    HostFlows,
    compare,
    fit_scale,
    host_headers,
    predict,
    read_counters,
    read_host_flows,
    summarise,
)

FLOWS = "src,dst,bytes\nh0,h2,600\nh1,h2,300\n"
COUNTERS = "device,port,bytes\nh0,s3,660\ns3,s4,330\ns6,h2,990\n"


def test_an_even_prediction_needs_no_hash_and_the_scale_takes_up_headers(tmp_path: Path) -> None:
    graph = diamond()
    flows = read_host_flows(graph, write(tmp_path / "f.csv", FLOWS))
    counters = read_counters(graph, write(tmp_path / "c.csv", COUNTERS))
    even, hashed = predict(graph, flows, "random", seed=0)
    assert even[counters.link].tolist() == [600, 300, 900]
    assert even.sum() == hashed.sum() == 4 * 900
    rows = compare(graph, counters, {"even": even, "hashed": hashed})
    assert [row["link"] for row in rows] == ["h0 -> s3", "s3 -> s4", "s6 -> h2"]
    assert [row["even_residual"] for row in rows] == pytest.approx([0, 0, 0])
    summary = summarise(rows, counters, {"even": even, "hashed": hashed})
    assert summary["even_scale"] == pytest.approx(1.1)
    assert summary["even_rms_residual"] == pytest.approx(0)
    assert summary["counter_bytes"] == 1980


def test_source_ports_that_are_known_decide_the_hash(tmp_path: Path) -> None:
    graph = diamond()
    text = "src,dst,bytes,sport\n" + "".join(f"h0,h2,1,{port}\n" for port in range(50_000, 50_040))
    flows = read_host_flows(graph, write(tmp_path / "f.csv", text))
    assert host_headers(graph, flows, seed=0).udp_sport.tolist() == list(range(50_000, 50_040))
    for wrong in ("0", "65536", "x", "", "9" * 5000):
        path = write(tmp_path / "g.csv", f"src,dst,bytes,sport\nh0,h2,1,{wrong}\n")
        with pytest.raises(ConfigError, match="is no UDP port"):
            read_host_flows(graph, path)


def test_a_residual_is_over_the_mean_of_its_level() -> None:
    graph = diamond()
    both = Counters(np.array([3, 4]), np.array([300.0, 100.0]))  # s3 -> s4, s3 -> s5
    even = np.zeros(graph.num_links)
    even[[3, 4]] = 200.0
    rows = compare(graph, both, {"even": even})
    assert [row["even_residual"] for row in rows] == [0.5, -0.5]


def test_a_hash_sends_each_flow_whole() -> None:
    graph = diamond()
    flows = HostFlows(np.zeros(90, dtype=np.int64), np.full(90, 2), np.ones(90))
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


@pytest.mark.parametrize("line", ["h0,h0,1", "h0,s3,1", "s3,h0,1"])
def test_a_flow_runs_between_two_hosts(tmp_path: Path, line: str) -> None:
    with pytest.raises(ConfigError, match="is no flow between two hosts"):
        read_host_flows(diamond(), write(tmp_path / "f.csv", f"src,dst,bytes\n{line}\n"))


def test_a_flow_without_a_path_is_said(caplog: pytest.LogCaptureFixture) -> None:
    from tests.topology.graphs import graph

    split = graph(2, 2, [(0, 2), (1, 3)])
    even, hashed = predict(split, HostFlows(np.array([0]), np.array([1]), np.ones(1)), "random", 0)
    assert even.sum() == hashed.sum() == 0
    assert "1 of 1 flows have no path" in caplog.text
