import csv
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
from topology.ecmp.hashing import HASHES
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
        "job.batch.micro_batch_size": 1,
        "job.batch.global_batch_size": 2 * servers,
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


def test_what_build_writes_import_reads_with_all_its_capacity(tmp_path: Path) -> None:
    _run(build_command.command, *_small(), "--out", str(tmp_path))
    capacity = set()
    for name, cables in (("fabric.graphml", 32), ("topo.txt", 21), ("fabric.topo", 32), ("cables.csv", 32)):
        out = tmp_path / name.replace(".", "-")
        result = _run(import_command.command, str(tmp_path / name), "--out", str(out))
        assert f"22 devices, {cables} cables" in result.stdout
        assert {path.name for path in out.iterdir()} == {"fabric.graphml", "cables.csv", "topo.txt", "records"}
        (path,) = (out / "records").iterdir()
        levels = [row for row in load_record(path).rows if row["table"] == "level"]
        capacity.add(tuple((row["level"], row["count"], row["up_bps"]) for row in levels))
    assert len(capacity) == 1


def test_megascale_is_described_in_full(tmp_path: Path) -> None:
    prices = write(tmp_path / "prices.toml", "[prices]\nswitch = 30000\n")
    arguments = ["--config", str(EXAMPLES / "megascale-12288.toml"), "--prices", str(prices), "--out", str(tmp_path)]
    result = _run(build_command.command, *arguments)
    for text in ("at most 64 servers under one ToR set", "15,360,000", "bisection 1228.8 Tb/s", "83.4%"):
        assert text in result.stdout
    for text in ("no price for nic, nic_cable, fibre, optic", "all without nic", "12,288      -     -"):
        assert " ".join(text.split()) in " ".join(result.stdout.split())
    assert "USD" not in result.stdout


@pytest.mark.parametrize("asked", [["--rail-only"], ["--set", "cluster.rail_only=true"]])
def test_rail_only_says_that_rails_have_no_path(tmp_path: Path, asked: list[str]) -> None:
    result = _run(build_command.command, *_small(), *asked, "--out", str(tmp_path))
    assert "rail-only, 2 rails" in result.stdout
    assert "no path" in result.stdout
    assert "no fabric.topo: cluster.rail_only = true" in result.stderr
    assert not (tmp_path / "fabric.topo").exists()


def test_prices_may_stand_in_the_cluster_file(tmp_path: Path) -> None:
    prices = [f"cluster.prices.{item}=1" for item in ("switch", "nic", "nic_cable", "fibre", "optic")]
    asked = [word for price in (*prices, "cluster.prices.currency=EUR") for word in ("--set", price)]
    result = _run(build_command.command, *_small(), *asked, "--out", str(tmp_path))
    assert "cost, EUR" in result.stdout
    assert "no price" not in result.stdout


def test_what_htsim_cannot_say_is_said(tmp_path: Path) -> None:
    result = _run(build_command.command, *_small(7), "--out", str(tmp_path))
    assert "no fabric.topo: cluster.servers = 7" in result.stderr


def test_json_on_stdout_is_all_that_stands_there(tmp_path: Path) -> None:
    result = _run(build_command.command, *_small(), "--out", str(tmp_path), "--json", "-")
    assert json.loads(result.stdout)["name"] == "topology.build"
    result = _run(import_command.command, str(tmp_path / "topo.txt"), "--out", str(tmp_path), "--json", "-")
    assert json.loads(result.stdout)["name"] == "topology.import"


def test_counters_stand_beside_two_predictions_and_never_in_one_record(tmp_path: Path) -> None:
    topo = write(tmp_path / "topo.txt", "3 1 2\n2\n0 2 100Gbps 1us 0\n1 2 100Gbps 1us 0\n")
    flows = write(tmp_path / "f.csv", "src,dst,bytes\nhost0,host1,1000000\n")
    counters = write(tmp_path / "c.csv", "device,port,bytes\nhost0,switch2,1050000\nswitch2,host1,1050000\n")
    given = ["--counters", str(counters), "--flows", str(flows), "--out", str(tmp_path / "out")]
    result = _run(import_command.command, str(topo), *given)
    for text in (
        "host0 -> switch2",
        "even: scale 1.05 fitted over 2 links, rms residual 0.0%",
        "over the mean counter",
    ):
        assert text in result.stdout
    lines = [line.split() for line in result.stdout.splitlines() if line.startswith("host0 ->")]
    shown = ["1", "MiB", "976.6", "KiB", "1", "MiB", "+0.0%"]
    assert lines[0][4:11] == shown, "counted, predicted, scaled, residual"
    records = {record.source: record for record in map(load_record, (tmp_path / "out" / "records").iterdir())}
    assert {row["table"] for row in records["measured"].rows} == {"counters"}
    assert set(records["measured"].rows[0]) == {"table", "source", "link", "counter_bytes"}
    assert {row["table"] for row in records["predicted"].rows} == {"level", "prediction", "fit"}
    assert not any("counter_bytes" in row for row in records["predicted"].rows)
    with (tmp_path / "out" / "calibration.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(row["link"], row["prediction"]) for row in rows[:2]] == [
        ("host0 -> switch2", "even"),
        ("host0 -> switch2", "hashed"),
    ]
    assert float(rows[0]["predicted_bytes"]) == 1e6
    assert float(rows[0]["scaled_bytes"]) == float(rows[0]["counter_bytes"]) == 1_050_000
    assert float(rows[0]["residual"]) == 0
    result = _run(import_command.command, str(topo), *given, "--counters-are", "simulated")
    assert "Counters (simulated) next to" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "rule"),
    [
        (["--counters", "c.csv"], "--counters = c.csv: needs --flows"),
        (["--rate", "fast"], "--rate = fast: is no rate"),
        (["--counters", "c.csv", "--flows", "f.csv"], "c.csv: is no file"),
    ],
)
def test_options_that_do_not_fit_are_one_line(tmp_path: Path, arguments: list[str], rule: str) -> None:
    topo = write(tmp_path / "topo.txt", "3 1 2\n2\n0 2 100Gbps 1us 0\n1 2 100Gbps 1us 0\n")
    with pytest.raises(ConfigError) as caught:
        _run(import_command.command, str(topo), *arguments, "--out", str(tmp_path))
    assert rule in str(caught.value)


def test_choices_are_those_of_the_library() -> None:
    assert ("auto", *FORMATS) == import_command._FORMATS
    assert import_command._HASHES == HASHES


def test_import_takes_no_configuration_and_leaves_nothing_where_it_fails(tmp_path: Path) -> None:
    assert _run(import_command.command, "x", "--config", "y").exit_code == 2
    with pytest.raises(ConfigError, match="is no file"):
        _run(import_command.command, str(tmp_path / "none"), "--out", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_help_has_examples_and_needs_no_numpy() -> None:
    for command, name in ((build_command.command, "build"), (import_command.command, "import")):
        assert f"netlayer topology {name} " in _run(command, "--help").stdout
    check = (
        "import sys, topology.commands.build, topology.commands.import_fabric as c; sys.exit('numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", check], check=False).returncode == 0
