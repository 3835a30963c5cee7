import logging
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from netlayer.errors import ConfigError
from tests.topology.fabrics import cluster
from topology.clos import Clos
from topology.flow_files import read_flows
from topology.traffic import Flows

FABRIC = Clos.build(cluster())


def _read(folder: Path, name: str, text: str, **hosts: int) -> Flows:
    path = folder / name
    path.write_text(text)
    return read_flows(path, FABRIC, hosts)


def _table(flows: Flows) -> list[tuple[int, int, float, float]]:
    starts = np.zeros(len(flows)) if flows.start_s is None else flows.start_s
    columns = (flows.src_nic, flows.dst_nic, flows.num_bytes, starts)
    return list(zip(*(column.tolist() for column in columns), strict=True))


def test_csv_takes_numbers_addresses_and_names(tmp_path: Path) -> None:
    text = "dst,src,bytes,start\n7,0,1000,2.5\nstorage, 10.0.0.5 ,1e6,3\n"
    flows = _read(tmp_path, "flows.csv", text, storage=99)
    assert _table(flows) == [(0, 7, 1000, 0), (5, 99, 1e6, 0.5)]
    whole = _read(tmp_path, "flows.csv", "src,dst,bytes\n1,2,3\n4,5,6\n")
    assert whole.start_s is None
    assert len(whole.where(np.array([True, False]))) == 1


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
        _read(tmp_path, "perm.cm", "Nodes 4\n0->1 id 1 trigger 1 size 5\n")
    assert "1 flows wait for a trigger" in caplog.text


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("flows.csv", "src,dst,bytes\n0,1,5\n0,128,5\n", r"line 3: unknown host 128; .* hosts 0 to 127"),
        ("flows.csv", "src,dst,bytes\nmars,1,5\n", r"line 2: unknown host mars"),
        ("flows.csv", "src,dst,bytes\n10.9.0.1,1,5\n", r"line 2: unknown host 10\.9\.0\.1"),
        ("flows.csv", "src,dst,bytes\n11.0.0.1,1,5\n", r"unknown host 11\.0\.0\.1"),
        ("flows.csv", "src,dst,bytes\n10.0.0.999,1,5\n", r"unknown host 10\.0\.0\.999"),
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
        ("a.cm", "Nodes 2\n0->500 id 1 start 0 size 5\n", r"a.cm line 2: unknown host 500"),
        ("a.cm", "Nodes 2\n0-1 id 1\n", r"line 2: does not read src->dst"),
        ("a.cm", "Nodes 2\n0->1 id 1 start 0\n", r"line 2: bytes is missing"),
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
