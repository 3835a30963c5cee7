import pytest

from congestion.files import read_flows
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
