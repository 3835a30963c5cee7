import json

import pytest
from click.testing import CliRunner

from congestion.cli import simulate
from netlayer.errors import CheckFailed, ConfigError
from tests.congestion.test_golden import GOLDEN

FILES = ["--topo", str(GOLDEN / "g1_single" / "topo.txt"), "--flows", str(GOLDEN / "g1_single" / "flow.txt")]


def _refused(*arguments: str) -> str:
    result = CliRunner().invoke(simulate, [*FILES, *arguments])
    assert isinstance(result.exception, ConfigError)
    assert "\n" not in str(result.exception)
    return str(result.exception)


def test_one_law_gives_flows_counters_and_engine(tmp_path):
    out = tmp_path / "result.json"
    result = CliRunner().invoke(simulate, [*FILES, "--cc", "none", "--truncate-ns", "--json", str(out)])
    assert result.exit_code == 0, result.output
    tree = json.loads(out.read_text())
    assert tree["flows"] == [{"src": 0, "dst": 1, "bytes": 10_000_000, "start_ns": 2e9, "fct_ns": 407_002}]
    assert tree["counters"]["max_queue_bytes"] == 4_144
    assert [(row["switch"], row["port"], row["tx_bytes"]) for row in tree["counters"]["by_port"]] == [
        (2, 1, 146_520),
        (2, 2, 10_117_216),
    ]
    assert tree["engine"]["link_hops"] == 4 * 2_442
    assert set(tree["engine"]) == {"link_hops", "wall_s", "cpu_s", "compile_s", "threads", "backend"}


def test_several_laws_give_runs(tmp_path):
    out = tmp_path / "result.json"
    result = CliRunner().invoke(simulate, [*FILES, "--cc", "none,dcqcn", "--json", str(out)])
    assert result.exit_code == 0, result.output
    assert [run["cc"] for run in json.loads(out.read_text())["runs"]] == ["none", "dcqcn"]


def test_flows_that_do_not_end_are_said_once_the_result_is_written(tmp_path):
    out = tmp_path / "result.json"
    lost = ["--set", "congestion.loss_rate=0.9", "--cc", "none", "--json", str(out)]
    result = CliRunner().invoke(simulate, [*FILES, *lost])
    assert isinstance(result.exception, CheckFailed)
    assert "none: 1 of 1 flows did not end" in str(result.exception)
    assert json.loads(out.read_text())["flows"][0]["fct_ns"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--cc", "swiftly"), "--cc = swiftly: is unknown"),
        (("--preset", "ns4"), "--preset = ns4: is unknown"),
        (("--set", "congestion.mtu=9000"), "sets nothing that is known"),
        (("--set", "congestion.mtu_bytes=big"), "congestion.mtu_bytes = big"),
        (("--set", "congestion.kmin_bytes=9000000"), "is above congestion.kmax_bytes"),
        (("--set", "congestion.buffer_bytes=1000"), "headroom and reserves take"),
    ],
)
def test_bad_input_is_one_line(arguments, message):
    assert message in _refused(*arguments)
