import json
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import click
import pytest
from click.testing import CliRunner, Result

from netlayer.errors import ConfigError
from netlayer.results import load_record
from tests.topology.fabrics import EXAMPLES
from topology import cli
from topology.balance import BALANCES
from topology.commands import ecmp as ecmp_command
from topology.compare import TRAFFICS
from topology.hashing import Field

MEGASCALE = str(EXAMPLES / "megascale-12288.toml")


def _run(*arguments: str, **options: Any) -> Result:
    result = CliRunner().invoke(cli.topology, list(arguments), **options)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_describe_prints_levels_and_keeps_a_predicted_record(tmp_path: Path) -> None:
    result = _run("describe", "--config", MEGASCALE, "--out", str(tmp_path))
    assert result.exit_code == 0
    assert "49,152 directed links" in result.stdout
    (path,) = (tmp_path / "records").iterdir()
    assert str(path) in result.stderr
    record = load_record(path)
    assert (record.name, record.source) == ("topology.describe", "predicted")
    assert [row["table"] for row in record.rows] == ["level"] * 4 + ["fabric"]


def test_ecmp_prints_tables_and_keeps_rows_and_timings(tmp_path: Path) -> None:
    file = tmp_path / "ecmp.json"
    result = _run(
        "ecmp", "--config", MEGASCALE, "--seeds", "2", "--hash", "crc16", "--out", str(tmp_path), "--json", str(file)
    )
    assert result.exit_code == 0
    for text in ("with the ToR split", "without -> with", "permutation", "crc16", "closed form", "build"):
        assert text in result.stdout
    record = load_record(file)
    assert (record.name, record.source) == ("topology.ecmp", "simulated")
    assert record.arguments["hash"] == ["crc16"]
    stages = [row["stage"] for row in record.rows if row["table"] == "timing" and row["traffic"] == "ring"]
    assert stages == ["compile", "build", "flows", "hash", "load", "rate"]
    times = {row["traffic"]: row for row in record.rows if row["table"] == "time"}["permutation"]
    assert times["bound_s"] <= times["completion_s"] * (1 + 1e-9)
    assert {row["table"] for row in record.rows} == {"collisions", "timing", "time", "members", "bottleneck"}
    found = [row for row in record.rows if row["table"] == "collisions"]
    assert {row["tier"] for row in found} == {"tor-spine", "spine-core", "core-spine", "spine-tor", "fabric"}
    assert {row["split"] for row in found} == {True, False}
    assert all(row["slowdown"] >= 1 for row in found if row["source"] == "simulated" and row["traffic"] != "ring")


def test_json_on_stdout_is_all_that_stands_there(tmp_path: Path) -> None:
    result = _run("describe", "--out", str(tmp_path), "--json", "-")
    assert json.loads(result.stdout)["name"] == "topology.describe"


def test_one_server_ends_in_one_line_that_says_why(tmp_path: Path) -> None:
    assert "one server: nothing crosses it" in _run("describe", "--out", str(tmp_path)).stdout
    with pytest.raises(ConfigError, match=r"cluster\.servers = 1: all traffic stays in one server"):
        _run("ecmp", "--out", str(tmp_path))


def test_the_choices_are_those_of_the_library() -> None:
    assert ecmp_command._BALANCES == BALANCES
    assert ecmp_command._TRAFFICS == TRAFFICS
    assert get_args(Field) == ecmp_command._FIELDS


def test_every_command_is_listed_without_its_module() -> None:
    names = cli.topology.list_commands(click.Context(cli.topology))
    assert names == ["build", "describe", "ecmp", "import", "place", "probe", "report", "whatif"]
    text = _run("--help").stdout
    assert all(name in text for name in names)


def test_flows_of_a_file_are_hashed(tmp_path: Path) -> None:
    flows = tmp_path / "flows.csv"
    flows.write_text("src,dst,bytes,start\n0,8000,1000000,0\n10.1.0.9,12287,5e6,0.001\n")
    file = tmp_path / "ecmp.json"
    result = _run(
        "ecmp",
        "--config",
        MEGASCALE,
        "--flows",
        str(flows),
        "--seeds",
        "1",
        "--out",
        str(tmp_path),
        "--json",
        str(file),
    )
    assert result.exit_code == 0
    (times,) = [row for row in load_record(file).rows if row["table"] == "time"]
    assert (times["traffic"], times["flows"]) == ("file", 2)
    flows.write_text("src,dst,bytes\n0,12288,1\n")
    with pytest.raises(ConfigError, match=r"flows.csv line 2: unknown host 12288; the fabric has hosts 0 to 12287"):
        _run("ecmp", "--config", MEGASCALE, "--flows", str(flows), "--out", str(tmp_path))


@pytest.mark.parametrize("command", ["describe", "ecmp"])
def test_help_has_examples(command: str) -> None:
    assert f"netlayer topology {command} --config examples/megascale-12288.toml" in _run(command, "--help").stdout


def test_help_needs_no_numpy() -> None:
    check = "import sys, topology.cli; sys.exit('numpy' in sys.modules or 'pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
