import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, get_args

import click
import pandas as pd
import pytest
from click.testing import CliRunner, Result

from netlayer.errors import ConfigError
from netlayer.results import load_frame, load_record
from tests.topology.fabrics import EXAMPLES
from topology import cli
from topology.commands import ecmp as ecmp_command
from topology.ecmp.balance import BALANCES
from topology.ecmp.compare import TRAFFICS
from topology.ecmp.hashing import Field
from topology.fabric.clos import Tier
from topology.placement.strategies import StrategyName

MEGASCALE = str(EXAMPLES / "megascale-12288.toml")

_EIGHT_SERVERS = [
    word
    for key, value in {
        "servers": 8,
        "servers_per_tor_set": 4,
        "core_switches_per_plane": 1,
        "gpus_per_server": 1,
    }.items()
    for word in ("--set", f"cluster.{key}={value}")
] + ["--set", "job.parallel.dp=8", "--set", "job.batch.micro_batch_size=1", "--set", "job.batch.global_batch_size=8"]


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
    assert record.name == "topology.ecmp"
    assert record.arguments["hashes"] == ["crc16"]
    stages = [row["stage"] for row in record.rows if row["table"] == "timing" and row["traffic"] == "ring"]
    assert {"build", "hash", "load", "rate"} <= set(stages)
    times = {row["traffic"]: row for row in record.rows if row["table"] == "time"}["permutation"]
    assert times["bound_s"] <= times["completion_s"] * (1 + 1e-9)
    tables = {"collisions", "link_use", "tor_collisions", "timing", "time", "members", "bottleneck", "traffic"}
    assert {row["table"] for row in record.rows} == tables
    found = [row for row in record.rows if row["table"] == "collisions"]
    assert {row["tier"] for row in found} == {*(tier.label for tier in Tier), "fabric"}
    for row in found:
        assert {"links", "collision_share", "excess", "utilisation", "slowdown"} <= row.keys()
    assert {row["split"] for row in found} == {True, False}
    assert all(row["slowdown"] >= 1 for row in found if row["source"] == "simulated" and row["traffic"] != "ring")


def test_measured_simulated_and_predicted_rows_never_share_a_record(tmp_path: Path) -> None:
    file = tmp_path / "ecmp.json"
    arguments = ["--seeds", "1", "--hash", "crc16", "--traffic", "ring", "--out", str(tmp_path), "--json", str(file)]
    _run("ecmp", "--config", MEGASCALE, *arguments)
    records = [load_record(path) for path in (tmp_path / "records").iterdir()]
    assert {record.source for record in records} == {"measured", "simulated", "predicted"}
    for record in records:
        assert {row["source"] for row in record.rows} == {record.source}
    assert {row["table"] for row in load_frame(tmp_path / "records", "measured").to_dict("records")} == {"timing"}
    whole = load_record(file)
    assert len(whole.rows) == sum(len(record.rows) for record in records)
    assert len(load_frame(file, "predicted")) == sum(row["source"] == "predicted" for row in whole.rows)


def test_paths_of_flows_and_load_of_links_are_written_by_name(tmp_path: Path) -> None:
    result = _run(
        "ecmp", "--config", MEGASCALE, "--seeds", "1", "--hash", "crc16", "--traffic", "ring", "--placement", "random",
        "--out", str(tmp_path),
    )  # fmt: skip
    links, flows = (pd.read_parquet(tmp_path / f"{name}.parquet") for name in ("links", "flows"))
    assert len(pd.read_csv(tmp_path / "links.csv")) == len(links) == 49_152
    assert set(links["tier"]) == {tier.label for tier in Tier}
    assert (links["collision"] == (links["utilisation"] > 1 + 1e-9)).all()
    first = flows.iloc[0]
    assert first["path"].split(" > ")[0] == first["src"]
    assert first["path"].split(" > ")[-1] == first["dst"]
    leave = flows["path"].str.contains("spine").mean()
    assert leave > 0.9  # as given almost none does
    assert links.loc[links["tier"] == "tor-spine", "flows"].sum() == round(leave * len(flows))
    assert "Bottlenecks: ring, crc16" in result.stdout
    assert "inside servers" in result.stdout


def test_an_imported_fabric_is_hashed(tmp_path: Path) -> None:
    _run("build", "--config", str(EXAMPLES / "laptop.toml"), *_EIGHT_SERVERS, "--out", str(tmp_path))
    file, out = tmp_path / "ecmp.json", tmp_path / "ecmp"
    arguments = ["--fabric", str(tmp_path / "fabric.graphml"), "--seeds", "2", "--hash", "crc16", "--json", str(file)]
    result = _run("ecmp", *arguments, "--out", str(out))
    assert "switch1-switch2" in result.stdout
    rows = [row for row in load_record(file).rows if row["table"] == "collisions"]
    assert {row["traffic"] for row in rows} == {"permutation"}
    cables = pd.read_csv(tmp_path / "cables.csv")
    assert set(pd.read_csv(out / "links.csv")["src"]) == {*cables["a_device"], *cables["b_device"]}
    whole = pd.read_csv(out / "flows.csv")
    _run("ecmp", *arguments, "--qps", "4", "--out", str(out))
    split = pd.read_csv(out / "flows.csv")
    assert len(split) == 4 * len(whole)
    assert split.groupby("src")["bytes"].sum().to_dict() == whole.groupby("src")["bytes"].sum().to_dict()
    flows = tmp_path / "flows.csv"
    flows.write_text("src,dst,bytes\nsrv0000/nic0,srv0007/nic0,1e6\n")
    _run("ecmp", *arguments, "--flows", str(flows), "--out", str(out))
    assert pd.read_csv(out / "flows.csv")["src"].tolist() == ["srv0000/nic0"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ecmp", "--flows", "F", "--traffic", "tree"], "--traffic: has no effect beside --flows"),
        (["ecmp", "--flows", "F", "--qps", "9"], "--qps: has no effect on the flows of a file"),
        (["ecmp", "--flows", "F", "--channels", "7"], "--channels: has no effect on the flows of a file"),
        (["ecmp", "--traffic", "pipeline", "--channels", "4"], "--channels: has no effect on pipeline traffic"),
        (["ecmp", "--traffic", "permutation", "--placement", "random"], "--placement: has no effect on permutation"),
        (["ecmp", "--hash", "spray", "--field", "dst_qpn"], "--field: has no effect on spray, which hash no header"),
        (["ecmp", "--fabric", "F", "--flows", "F", "--qps", "2"], "--qps: has no effect on the flows of a file"),
        (["ecmp", "--fabric", "F", "--config", "C"], "--config: has no effect beside --fabric"),
        (["ecmp", "--fabric", "F", "--hash", "spray"], "--hash = spray: is not known for an imported fabric"),
        (["place", "--from", "F", "--strategy", "packed"], "--from: has no effect without --strategy given"),
        (["place", "--no-optimise", "--seconds", "3"], "--seconds: has no effect with --no-optimise"),
        (["whatif", "--part", "spine:1", "--fail", "tor"], "--fail: has no effect beside --part"),
        (["whatif", "--part", "spine:1", "--sample", "3"], "--sample: has no effect beside --part"),
        (["whatif", "--part", "spine:1", "--together", "2"], "--together: has no effect beside --part"),
        (["whatif", "--sample", "0", "--together", "2"], "--sample = 0: has no end"),
        (["whatif", "--processes", "2", "--dask", "tcp://h:1"], "--processes: has no effect beside --dask"),
        (["report", "--processes", "2", "--dask", "tcp://h:1"], "--processes: has no effect beside --dask"),
        (
            ["optimize", "ports", "--traffic", "permutation", "--placement", "random"],
            "--placement: has no effect on perm",
        ),
    ],
)
def test_an_option_without_effect_is_refused(arguments: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(message)) as caught:
        _run(*arguments)
    assert "\n" not in str(caught.value)


def test_queue_pairs_split_a_permutation_too(tmp_path: Path) -> None:
    """Rows of one table are of the same number of queue pairs."""
    file = tmp_path / "ecmp.json"
    fabric = ["--config", str(EXAMPLES / "laptop.toml"), *_EIGHT_SERVERS]
    found = {}
    for qps in ("1", "4"):
        options = ["--traffic", "ring", "--traffic", "permutation", "--qps", qps, "--seeds", "2", "--hash", "crc16"]
        _run("ecmp", *fabric, *options, "--json", str(file), "--out", str(tmp_path / qps))
        rows = [row for row in load_record(file).rows if row["table"] == "collisions" and row["tier"] == "fabric"]
        found[qps] = {row["traffic"]: row for row in rows if row["source"] == "simulated" and row["split"]}
    for traffic in ("ring", "permutation"):
        assert found["4"][traffic]["flows"] == 4 * found["1"][traffic]["flows"]
    assert found["4"]["permutation"]["max_utilisation"] != found["1"]["permutation"]["max_utilisation"]


def test_which_fabric_it_is_is_said(tmp_path: Path) -> None:
    assert "fabric: laptop, 1 server (no --config: built-in defaults)" in _run("build", "--out", str(tmp_path)).stderr
    told = _run("describe", "--config", MEGASCALE, "--out", str(tmp_path)).stderr
    assert "fabric: megascale-12288, 1,536 servers x 8 GPUs" in told


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
    assert get_args(StrategyName) == ecmp_command._STRATEGIES


def test_every_command_is_listed_without_its_module() -> None:
    names = cli.topology.list_commands(click.Context(cli.topology))
    assert names == ["build", "describe", "ecmp", "import", "optimize", "place", "probe", "report", "whatif"]
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


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["ecmp", "--hash", "md5"], "error: --hash: 'md5' is not one of 'random', 'crc16'"),
        (["ecmp", "--placement", "best"], "error: --placement: 'best' is not one of 'given', 'random'"),
        (["whatif", "--seeds", "0"], "error: --seeds: 0 is not in the range x>=1; see netlayer topology whatif --help"),
        (["whatif", "--sede", "1"], "error: No such option '--sede'"),
    ],
)
def test_a_wrong_option_is_one_line(arguments: list[str], line: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "netlayer", "topology", *arguments], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(line)
    assert done.stderr.count("\n") == 1
