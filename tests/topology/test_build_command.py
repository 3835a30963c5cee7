import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from netlayer.errors import ConfigError
from netlayer.results import load_record
from tests.topology.fabrics import EXAMPLES
from tests.topology.graphs import write
from topology.commands import build as build_command
from topology.commands import import_fabric as import_command
from topology.importers import FORMATS


def _small(servers: int = 8) -> list[str]:
    """A cluster of two rails in two ToR sets; the last set may be partly filled."""
    values = {
        "cluster.servers": servers,
        "cluster.servers_per_tor_set": 4,
        "cluster.nics_per_server": 2,
        "cluster.rails": 2,
        "cluster.core_switches_per_plane": 1,
        "job.parallel.dp": 2 * servers,
        "job.batch.micro_size": 1,
        "job.batch.global_size": 2 * servers,
    }
    return [word for key, value in values.items() for word in ("--set", f"{key}={value}")]


def _run(command: Any, *arguments: str) -> Result:
    result = CliRunner().invoke(command, list(arguments))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_build_writes_every_form_and_a_predicted_record(tmp_path: Path) -> None:
    result = _run(build_command.command, *_small(), "--out", str(tmp_path))
    assert result.exit_code == 0
    files = {path.name for path in tmp_path.iterdir()} - {"records"}
    assert files == {"fabric.graphml", "cables.csv", "addresses.csv", "switches.csv", "topo.txt", "fabric.topo"}
    (path,) = (tmp_path / "records").iterdir()
    record = load_record(path)
    assert (record.name, record.source) == ("topology.build", "predicted")
    assert {row["table"] for row in record.rows} == {"ports", "parts", "hops", "limits"}
    for text in ("3-tier CLOS, rail-optimised", "nic cable", "servers under one ToR set"):
        assert text in result.stdout


def test_what_build_writes_import_reads(tmp_path: Path) -> None:
    _run(build_command.command, *_small(), "--out", str(tmp_path))
    for name in ("fabric.graphml", "topo.txt", "fabric.topo"):
        out = tmp_path / name.replace(".", "-")
        result = _run(import_command.command, str(tmp_path / name), "--parallel", "--out", str(out))
        assert "22 devices, 32 cables" in result.stdout
        assert {path.name for path in out.iterdir()} == {"fabric.graphml", "cables.csv", "topo.txt", "records"}


def test_megascale_is_described_in_full(tmp_path: Path) -> None:
    prices = write(tmp_path / "prices.toml", "[prices]\nswitch = 30000\n")
    arguments = ["--config", str(EXAMPLES / "megascale-12288.toml"), "--prices", str(prices), "--out", str(tmp_path)]
    result = _run(build_command.command, *arguments)
    for text in ("at most 64 servers under one ToR set", "15,360,000", "bisection 1228.8 Tb/s", "83.4%"):
        assert text in result.stdout


def test_rail_only_says_that_rails_have_no_path(tmp_path: Path) -> None:
    result = _run(build_command.command, *_small(), "--rail-only", "--out", str(tmp_path))
    assert "rail-only, 2 rails" in result.stdout
    assert "no path" in result.stdout
    assert not (tmp_path / "fabric.topo").exists()


def test_what_htsim_cannot_say_is_said(tmp_path: Path) -> None:
    result = _run(build_command.command, *_small(7), "--out", str(tmp_path))
    assert "no fabric.topo: cluster.servers = 7" in result.stderr


def test_json_on_stdout_is_all_that_stands_there(tmp_path: Path) -> None:
    result = _run(build_command.command, *_small(), "--out", str(tmp_path), "--json", "-")
    assert json.loads(result.stdout)["name"] == "topology.build"
    result = _run(
        import_command.command, str(tmp_path / "topo.txt"), "--parallel", "--out", str(tmp_path), "--json", "-"
    )
    assert json.loads(result.stdout)["name"] == "topology.import"


def test_counters_stand_beside_two_predictions_and_in_a_measured_record(tmp_path: Path) -> None:
    topo = write(tmp_path / "topo.txt", "3 1 2\n2\n0 2 100Gbps 1us 0\n1 2 100Gbps 1us 0\n")
    flows = write(tmp_path / "f.csv", "src,dst,bytes\nhost0,host1,1000000\n")
    counters = write(tmp_path / "c.csv", "device,port,bytes\nhost0,switch2,1050000\nswitch2,host1,1050000\n")
    given = ["--counters", str(counters), "--flows", str(flows), "--out", str(tmp_path)]
    result = _run(import_command.command, str(topo), *given)
    assert "host0 -> switch2" in result.stdout
    assert "even: rms residual 0.0%, largest 0.0%, scale 1.05" in result.stdout
    records = {record.name: record for record in map(load_record, (tmp_path / "records").iterdir())}
    assert records["topology.import.counters"].source == "measured"
    assert set(records["topology.import.counters"].rows[0]) == {"link", "counter_bytes"}
    assert records["topology.import"].source == "predicted"
    result = _run(import_command.command, str(topo), *given, "--counters-are", "simulated")
    assert "Counters (simulated) beside" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (["--counters", "c.csv"], "--counters = c.csv: needs --flows"),
        (["--rate", "fast"], "--rate = fast: is no rate"),
        (["--counters", "c.csv", "--flows", "f.csv", "--hash", "md5"], "--hash = md5: is no hash of ours"),
        (["--counters", "c.csv", "--flows", "f.csv"], "c.csv: is no file"),
    ],
)
def test_options_that_do_not_fit_are_one_line(tmp_path: Path, arguments: list[str], rule: str) -> None:
    topo = write(tmp_path / "topo.txt", "3 1 2\n2\n0 2 100Gbps 1us 0\n1 2 100Gbps 1us 0\n")
    with pytest.raises(ConfigError) as caught:
        _run(import_command.command, str(topo), *arguments, "--out", str(tmp_path))
    assert rule in str(caught.value)


def test_the_formats_are_those_of_the_library() -> None:
    assert ("auto", *FORMATS) == import_command._FORMATS


def test_help_has_examples_and_needs_no_numpy() -> None:
    for command, name in ((build_command.command, "build"), (import_command.command, "import")):
        assert f"netlayer topology {name} " in _run(command, "--help").stdout
    check = (
        "import sys, topology.commands.build, topology.commands.import_fabric as c; sys.exit('numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
