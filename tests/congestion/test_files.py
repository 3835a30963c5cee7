from functools import partial

import numpy as np
import pytest

from congestion.simulation.files import FlowSet, cm_nodes, read_cm, read_flows, with_starts_of_ns3
from netlayer.errors import ConfigError
from tests.congestion.test_golden import GOLDEN
from topology.importers import read_fabric

FABRIC = read_fabric([GOLDEN / "g2_incast16_none" / "topo.txt"])


def test_starts_are_kept_as_written_and_ports_count_a_pair_up(tmp_path):
    path = tmp_path / "flow.txt"
    path.write_text("3\n0 1 3 100 5000 2.002\n0 1 3 100 7 0.0000000000015\n1 0 3 4791 9 1e-6\n")
    flows = read_flows(path, FABRIC)
    assert flows.start_ps.tolist() == [2_002_000_000_000, 1, 1_000_000]
    assert flows.sport.tolist() == [10_000, 10_001, 10_000]
    assert flows.num_bytes.tolist() == [5000, 7, 9]


def test_ns3_reads_starts_into_doubles_and_cuts_them(tmp_path):
    path = tmp_path / "flow.txt"
    starts = ("2", "2.000001582", "2.000000263", "2.000004959", "0.000000001", "2.0000000019999")
    path.write_text(f"{len(starts)}\n" + "".join(f"0 1 3 100 5000 {one}\n" for one in starts))
    cut = with_starts_of_ns3(read_flows(path, FABRIC)).start_ps // 1000
    assert cut.tolist() == [2_000_000_000, 2_000_001_581, 2_000_000_263, 2_000_004_958, 1, 2_000_000_001]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is no number of flows"),
        ("x\n", "is no number of flows"),
        ("0\n", "holds no flows"),
        ("2\n0 1 3 100 5 2\n", "flows are promised, 1 follow"),
        ("1\n0 1 3 100 5\n", "has 5 words"),
        ("1\n0 17 3 100 5 2\n", "is no host"),
        ("1\n0 99 3 100 5 2\n", "is no host"),
        ("1\n0 0 3 100 5 2\n", "sends to itself"),
        ("1\n0 1 3 70000 5 2\n", "dport must be"),
        ("1\n0 1 3 100 -5 2\n", "bytes must be"),
        ("1\n0 1 3 100 5 nan\n", "start must be"),
        ("1\n0 1 3 100 5 -1\n", "start must be"),
    ],
)
def test_a_bad_line_is_named(tmp_path, text, message):
    path = tmp_path / "flow.txt"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        read_flows(path, FABRIC)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_said(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_flows(tmp_path / "none.txt", FABRIC)


def _flows(**more):
    src, dst = np.array([0, 1, 0]), np.array([1, 2, 2])
    return FlowSet(src, dst, np.full(3, 9), np.zeros(3, dtype=np.int64), np.full(3, 4791), **more)


def test_ports_can_be_given():
    assert _flows().sport.tolist() == [10_000, 10_000, 10_000]
    assert _flows(sport=np.array([7, 8, 9])).sport.tolist() == [7, 8, 9]


def test_ports_stay_ports_however_many_flows_a_pair_has():
    many = 60_000
    ends = np.zeros(many, dtype=np.int64)
    ports = FlowSet(ends, ends + 1, ends + 1, ends, ends).sport
    assert (ports[0], ports[55_535], ports[55_536]) == (10_000, 65_535, 10_000)


@pytest.mark.parametrize(
    ("first", "earlier", "message"),
    [
        ([0, 0, 0, 1], [2], "flow 2 waits for flow 2, which is not before it"),
        ([0, 1, 1, 1], [1], "flow 0 waits for flow 1, which is not before it"),
        ([0, 0, 0, 1], [1], "flow 2 waits for flow 1, which its source does not see"),
        ([0, 0, 1], [0], "must split 1 waits among 3 flows"),
        ([0, 0, 0, 1], [0, 1], "must split 2 waits among 3 flows"),
    ],
)
def test_waits_are_local_and_for_flows_before(first, earlier, message):
    with pytest.raises(ValueError, match=message):
        _flows(waits_for=(np.array(first), np.array(earlier)))


def test_a_flow_waits_for_what_its_source_received_or_sent():
    flows = _flows(waits_for=(np.array([0, 0, 1, 2]), np.array([0, 0])))
    assert flows.waits_for is not None


CM = "# made by hand\nNodes 17\nConnections 2\n0->16 id 1 start 0 size 2000000\n4->1 start 15 size 9\n"


def test_a_cm_counts_hosts_and_keeps_picoseconds(tmp_path):
    path = tmp_path / "some.cm"
    path.write_text(CM)
    flows = read_cm(path, FABRIC)
    assert cm_nodes(path) == 17
    assert list(zip(flows.src.tolist(), flows.dst.tolist(), strict=True)) == [(0, 16), (4, 1)]
    assert flows.start_ps.tolist() == [0, 15]
    assert flows.num_bytes.tolist() == [2_000_000, 9]


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("Connections 2", "Connections 3", "promises 3 connections, has 2"),
        ("Nodes 17", "Nodes", "nodes must be"),
        ("0->16", "0->17", "line 4 = 17: is no host"),
        ("0->16", "0-16", "is not understood"),
        ("4->1", "4->4", "sends to itself"),
        ("start 15 size 9", "start 15", "is not understood"),
        ("start 15", "trigger 3", "is not understood"),
        ("start 15", "start -1", "start must be"),
        ("size 9", "size 0", "size must be"),
        ("0->16 id 1 start 0 size 2000000\n4->1 start 15 size 9\n", "", "holds no flows"),
    ],
)
def test_a_bad_line_of_a_cm_is_named(tmp_path, before, after, message):
    path = tmp_path / "bad.cm"
    path.write_text(CM.replace(before, after))
    reader = cm_nodes if message.startswith("nodes") else partial(read_cm, fabric=FABRIC)
    with pytest.raises(ConfigError, match=message) as caught:
        reader(path)
    assert "\n" not in str(caught.value)


def test_a_cm_without_nodes_or_without_a_file_is_said(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        cm_nodes(tmp_path / "none.cm")
    path = tmp_path / "bare.cm"
    path.write_text("0->1 size 9\n")
    with pytest.raises(ConfigError, match="has no line `Nodes n`"):
        cm_nodes(path)
