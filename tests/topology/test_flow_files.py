import csv
import dataclasses
import logging
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from netlayer.errors import ConfigError
from tests.topology.fabrics import cluster
from tests.topology.graphs import diamond
from tests.topology.jobs import small
from topology.ecmp.hashing import Ecmp
from topology.ecmp.load import load
from topology.ecmp.port_table import port_table
from topology.ecmp.search import plan_ports
from topology.fabric.addressing import addresses_csv, cables_csv
from topology.fabric.cable_plan import CablePlan
from topology.fabric.clos import Clos
from topology.fabric.export import htsim_text
from topology.fabric.graph import Graph
from topology.importers import read_fabric
from topology.placement.strategies import Placement
from topology.traffic.flow_files import read_flows
from topology.traffic.job import Flows, headers, permutation

FABRIC = Clos.build(cluster())


def _read(folder: Path, name: str, text: str, fabric: Clos | Graph = FABRIC) -> Flows:
    path = folder / name
    path.write_text(text)
    return read_flows(path, fabric)


def _table(flows: Flows) -> list[tuple[int, int, float, float]]:
    starts = np.zeros(len(flows)) if flows.start_s is None else flows.start_s
    columns = (flows.src_nic, flows.dst_nic, flows.num_bytes, starts)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_csv_takes_numbers_addresses_and_names(tmp_path: Path) -> None:
    text = "dst,src,bytes,start\n7,0,1000,2.5\nsrv0099/nic0, 10.0.0.11 ,1e6,3\nsrv3,10.0.0.1,1,2.5\n"
    flows = _read(tmp_path, "flows.csv", text)
    assert _table(flows) == [(0, 7, 1000, 0), (5, 99, 1e6, 0.5), (0, 3, 1, 0)]
    whole = _read(tmp_path, "flows.csv", "src,dst,bytes\n1,2,3\n4,5,6\n")
    assert whole.start_s is None
    assert len(whole.where(np.array([True, False]))) == 1


def test_every_name_that_build_writes_is_a_host(tmp_path: Path) -> None:
    cable_plan = CablePlan.build(cluster(nics_per_server=2, rails=2))
    hosts = [row["a_device"] for row in csv.DictReader(cables_csv(cable_plan.graph(), cable_plan).splitlines())]
    nics = [host for host in hosts if host.startswith("srv")]
    addresses = [row["address"].partition("/")[0] for row in csv.DictReader(addresses_csv(cable_plan).splitlines())]
    lines = [f"{nic},{address},1" for nic, address in zip(nics, addresses[1:], strict=False)]
    flows = _read(tmp_path, "f.csv", "src,dst,bytes\n" + "\n".join(lines) + "\n", cable_plan.fabric)
    assert flows.src_nic.tolist() == list(range(255))
    assert flows.dst_nic.tolist() == list(range(1, 256))


def test_an_imported_fabrics_hosts_have_their_names(tmp_path: Path) -> None:
    names = ("srv0/eth0", "srv1/eth0", "srv1/eth1", "s3", "s4", "s5", "s6")
    fabric = dataclasses.replace(diamond(), names=names)
    text = "src,dst,bytes\nsrv0/eth0,srv1/eth1,1\nsrv0,srv1/eth0,2\n2,0,3\n"
    assert _table(_read(tmp_path, "f.csv", text, fabric)) == [(0, 2, 1, 0), (0, 1, 2, 0), (2, 0, 3, 0)]
    for host, rule in (
        ("srv1", "unknown host srv1; it has 2 NICs: name one, such as srv1/eth0"),
        ("s3", "unknown host s3; s3 is a switch: name a host"),
        ("3", "unknown host 3; s3 is a switch"),
        ("srv9", "the fabric's 3 hosts have names such as srv0/eth0"),
        ("", r"unknown host \(none\)"),
    ):
        with pytest.raises(ConfigError, match=rule):
            _read(tmp_path, "f.csv", f"src,dst,bytes\nsrv0,{host},1\n", fabric)


def test_source_ports_may_be_given(tmp_path: Path) -> None:
    text = "src,dst,bytes,sport\n0,7,1,49152\n1,7,1,65535\n"
    flows = _read(tmp_path, "f.csv", text)
    assert flows.udp_sport is not None
    assert flows.udp_sport.tolist() == [49152, 65535]
    path = tmp_path / "f.parquet"
    pd.DataFrame({"src": [0], "dst": [7], "bytes": [1.5], "sport": [50_000.0]}).to_parquet(path)
    parquet = read_flows(path, FABRIC).udp_sport
    assert parquet is not None
    assert parquet.tolist() == [50_000]
    for wrong in ("0", "65536", "x", "", "\u00b2", "9" * 5000):
        with pytest.raises(ConfigError, match=r"line 2: sport is .*, no UDP port; write 1 to 65535"):
            _read(tmp_path, "g.csv", f"src,dst,bytes,sport\n0,7,1,{wrong}\n")


def test_a_plan_of_ports_is_read_back_and_collides_as_planned(tmp_path: Path) -> None:
    tree = small().cluster
    fabric = Clos.build(tree)
    plan = plan_ports(fabric, permutation(fabric, 3), "crc16", 3, candidates=4, rounds=1)
    table = port_table(plan, fabric, tree, Placement("given", np.arange(tree.servers)))
    table.to_csv(tmp_path / "ports.csv", index=False)
    table.to_parquet(tmp_path / "ports.parquet", index=False)
    assert plan.num_changed
    for name in ("ports.csv", "ports.parquet"):
        flows = read_flows(tmp_path / name, fabric)
        found = load(fabric, flows, Ecmp("crc16", headers(fabric, flows, 3), 3)).collisions()
        assert found == plan.after.collisions()


def test_a_connection_matrix_counts_hosts_as_htsim_does(tmp_path: Path) -> None:
    rates = {"nic_bps": "200G", "switch_port_bps": "400G"}
    cable_plan = CablePlan.build(cluster(nics_per_server=2, rails=2, **rates))
    text = "Nodes 256\n0->33 id 1 start 0 size 5\n"
    (flow,) = _table(_read(tmp_path, "a.cm", text, cable_plan.fabric))
    assert flow[:2] == (0, 2 * 1 + 1)  # the ToR of rail 1 comes after the 32 hosts of rail 0
    (tmp_path / "fabric.topo").write_text(htsim_text(cable_plan.fabric))
    graph = read_fabric([tmp_path / "fabric.topo"])
    assert _table(_read(tmp_path, "a.cm", text, graph))[0][:2] == (0, 33)


def test_parquet_is_read_as_csv_is(tmp_path: Path) -> None:
    path = tmp_path / "flows.parquet"
    pd.DataFrame({"src": [0, 5], "dst": [7, 99], "bytes": [1000, 2000], "start": [0.0, 0.5]}).to_parquet(path)
    assert _table(read_flows(path, FABRIC)) == [(0, 7, 1000, 0), (5, 99, 2000, 0.5)]
    path.write_text("no parquet")
    with pytest.raises(ConfigError, match="is no parquet file"):
        read_flows(path, FABRIC)


def test_hpcc_flows(tmp_path: Path) -> None:
    text = "2\n0 8 3 4791 4000000 2.000000000\n1 9 3 4791 1000 2.25\n"
    assert _table(_read(tmp_path, "flow.txt", text)) == [(0, 8, 4e6, 0), (1, 9, 1000, 0.25)]


def test_htsim_connections(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    text = "Nodes 128\nConnections 2\n9->44 id 1 start 0 size 2000000\n\n92->99 id 2 size 5 start 7000000\n"
    (first, second) = _table(_read(tmp_path, "perm.cm", text))
    assert (first, second) == ((9, 44, 2e6, 0), (92, 99, 5, pytest.approx(7e-6)))
    with caplog.at_level(logging.WARNING):
        _read(tmp_path, "perm.cm", "Nodes 128\n0->1 id 1 trigger 1 size 5\n")
    assert "1 flows wait for a trigger" in caplog.text


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("flows.csv", "src,dst,bytes\n0,1,5\n0,128,5\n", r"line 3: unknown host 128; .* hosts 0 to 127"),
        ("flows.csv", "src,dst,bytes\nmars,1,5\n", r"line 2: unknown host mars"),
        ("flows.csv", "src,dst,bytes\n10.9.0.1,1,5\n", r"line 2: unknown host 10\.9\.0\.1"),
        ("flows.csv", "src,dst,bytes\n11.0.0.1,1,5\n", r"unknown host 11\.0\.0\.1"),
        ("flows.csv", "src,dst,bytes\n10.0.0.999,1,5\n", r"unknown host 10\.0\.0\.999"),
        ("flows.csv", "src,dst,bytes\n10.0.0.2,1,5\n", r"unknown host 10\.0\.0\.2"),
        (
            "flows.csv",
            "src,dst,bytes\nsrv0000/nic1,1,5\n",
            r"unknown host srv0000/nic1; .* the last is also srv0127/nic0",
        ),
        ("flows.csv", "src,dst,bytes\nsrv0128,1,5\n", r"unknown host srv0128"),
        ("flows.csv", f"src,dst,bytes\n{'9' * 5000},1,5\n", r"line 2: unknown host 9999"),
        ("flows.csv", "src,dst,bytes\n\u00b2,1,5\n", r"line 2: unknown host"),
        ("flows.csv", 'src,dst,bytes\n"0,1,5\n' + "0" * 200_000, r"after line 1: is no CSV \(field larger than"),
        ("flows.csv", 'src,dst,bytes\n"0,1,5\n', r"after line 1: is no CSV \(unexpected end of data\)"),
        ("flow.txt", "9" * 5000 + "\n", r"line 1 is no number of flows"),
        ("a.cm", "Nodes 64\n0->1 id 1 start 0 size 5\n", r"a.cm line 1: is for 64 nodes, the fabric has 128 hosts"),
        ("flows.csv", "src,dst,bytes\n,1,5\n", r"line 2: unknown host \(none\)"),
        ("flows.csv", "src,dst,bytes\n1,1,5\n", r"line 2: host 1 sends to itself"),
        ("flows.csv", "src,dst,bytes\n1,2,much\n", r"line 2: bytes is much, no positive number"),
        ("flows.csv", "src,dst,bytes\n1,2,0\n", r"bytes is 0"),
        ("flows.csv", "src,dst,bytes\n1,2\n", r"bytes is missing"),
        ("flows.csv", "src,dst,bytes,start\n1,2,3,nan\n", r"start is nan"),
        ("flows.csv", "src,dst\n1,2\n", r"has no column bytes"),
        ("flows.csv", "src,dst,bytes\n", r"holds no flows"),
        ("flow.txt", "1\n0 128 3 4791 5 2\n", r"flow.txt line 2: unknown host 128"),
        ("flow.txt", "1\n0 8 3 4791\n", r"line 2: has 4 words"),
        ("flow.txt", "2\n0 8 3 4791 5 2\n", r"says 2 flows, 1 follow"),
        ("flow.txt", "", r"line 1 is no number of flows"),
        ("a.cm", "Nodes 128\n0->500 id 1 start 0 size 5\n", r"a.cm line 2: unknown host 500"),
        ("a.cm", "Nodes 128\n0-1 id 1\n", r"line 2: does not read src->dst"),
        ("a.cm", "Nodes 128\n0->1 id 1 start 0\n", r"line 2: bytes is missing"),
        ("flows.xlsx", "", r"is of an unknown kind; give one of \.csv, \.parquet, \.txt, \.cm"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        _read(tmp_path, name, text)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"none\.csv: cannot be read"):
        read_flows(tmp_path / "none.csv", FABRIC)
