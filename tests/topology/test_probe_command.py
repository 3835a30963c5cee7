import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from netlayer.errors import CheckFailed, ConfigError
from netlayer.results import load_record
from tests.topology.probe_network import DST, SRC, exchange, sweep
from topology.probe.capture import read_pcap, write_pcap
from topology.probe.command import command
from topology.probe.packets import PAYLOAD_BYTES, ROCE_TOS, UNUSED_QPN, build


def _run(*arguments: str) -> Result:
    result = CliRunner().invoke(command, list(arguments))
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def _write_answers(path: Path) -> None:
    packets = exchange(
        sweep(range(50000, 50040), range(1, 5)), lambda port, ttl, _: DST if ttl > 2 else f"10.9.{ttl}.{port % ttl}"
    )
    write_pcap(path, packets, range(10**9, 10**9 + 1000 * len(packets), 1000), "raw")


def test_pcap_alone_writes_probes_and_sends_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socket", _refuse)
    file = tmp_path / "probes.pcap"
    asked = ["--dst", DST, "--src", SRC, "--ports", "49152-49154,50000", "--ttl", "1-2,7", "--pcap", str(file)]
    result = _run(*asked, "--out", str(tmp_path), "--json", str(tmp_path / "a.json"))
    assert "12 RoCEv2 probes (4 ports x 3 TTLs x 1) of 60 bytes" in result.stdout
    assert "nothing sent" in result.stdout
    assert len(read_pcap(file).lengths) == 12
    record = load_record(tmp_path / "a.json")
    assert (record.name, record.source, record.rows[0]["probes"]) == ("topology.probe", "predicted", 12)


def test_ten_thousand_probes_reach_a_file_whole(tmp_path: Path) -> None:
    file = tmp_path / "probes.pcap"
    macs = ["--src-mac", "02:00:00:00:00:01", "--dst-mac", "02:00:00:00:00:02"]
    asked = ["--dst", DST, "--src", SRC, "--ports", "50000-50999", "--ttl", "1-10", "--pcap", str(file)]
    assert "(ethernet)" in _run(*asked, *macs, "--out", str(tmp_path)).stdout
    packets = read_pcap(file).packets
    expected = build(sweep(range(50000, 51000), range(1, 11)))
    assert (packets[:, : expected.shape[1]] == expected).all()


def test_read_prints_the_spread_and_keeps_a_measured_record(tmp_path: Path) -> None:
    _write_answers(tmp_path / "seen.pcap")
    result = _run("--read", str(tmp_path / "seen.pcap"), "--members", "2=2", "--out", str(tmp_path))
    for text in ("40 flows over 2 paths of 3 hops", "target reached", "0.0% of 120", "chi-square", "10.9.2.1", "even"):
        assert text in result.stdout
    assert "(uneven or polarised where p < 0.001)" in result.stdout
    records = {record.source: record for record in map(load_record, (tmp_path / "records").iterdir())}
    assert records["measured"].arguments["read_file"] == str(tmp_path / "seen.pcap")
    assert list(dict.fromkeys(row["table"] for row in records["measured"].rows)) == ["summary", "hop", "choice", "path"]
    assert not any("expected_share" in row for row in records["measured"].rows)
    assert {row["uneven_below_p"] for row in records["measured"].rows if row["table"] == "choice"} == {0.001}
    assert {row["table"] for row in records["predicted"].rows} == {"expected"}
    assert (tmp_path / "flows.csv").read_text().splitlines()[1] == f"{SRC},{DST},50000,10.9.1.0,10.9.2.0,{DST}"


def test_two_targets_in_one_capture_are_two_tables(tmp_path: Path) -> None:
    near, far = (
        exchange(sweep(range(50000, 50004), ttls), lambda p, t, _: f"10.9.{t}.1") for ttls in ((1, 2), (1, 2, 3))
    )
    near = [packet.replace(bytes((10, 1, 0, 9)), bytes((10, 1, 0, 8))) for packet in near]
    write_pcap(tmp_path / "two.pcap", near + far, range(1, len(near + far) + 1), "raw")
    result = _run("--read", str(tmp_path / "two.pcap"), "--out", str(tmp_path))
    assert "to 10.1.0.8 (measured): 4 flows over 1 paths of 2 hops" in result.stdout
    assert "to 10.1.0.9 (measured): 4 flows over 1 paths of 3 hops" in result.stdout
    first, *flows = (tmp_path / "flows.csv").read_text().splitlines()
    assert first == "src,dst,sport,hop_1,hop_2,hop_3"
    assert flows[0] == f"{SRC},10.1.0.8,50000,10.9.1.1,10.9.2.1,"


def test_json_on_stdout_stands_alone(tmp_path: Path) -> None:
    _write_answers(tmp_path / "seen.pcap")
    result = _run("--read", str(tmp_path / "seen.pcap"), "--out", str(tmp_path), "--json", "-")
    assert json.loads(result.stdout)["rows"][0]["flows"] == 40


def test_probes_without_answers_are_a_failure_that_says_what_to_do(tmp_path: Path) -> None:
    write_pcap(tmp_path / "a.pcap", [row.tobytes() for row in build(sweep())], [0] * 30, "raw")
    with pytest.raises(CheckFailed, match="no router answered: 30 probes"):
        _run("--read", str(tmp_path / "a.pcap"), "--out", str(tmp_path))
    _write_answers(tmp_path / "seen.pcap")
    with pytest.raises(CheckFailed, match="no router answered"):
        _run("--read", str(tmp_path / "seen.pcap"), "--dst", "10.1.0.10", "--out", str(tmp_path))


def test_a_target_that_a_router_calls_unreachable_is_a_failure_that_names_it(tmp_path: Path) -> None:
    packets = exchange(sweep(range(50000, 50010), range(1, 4)), lambda *_: "10.9.0.1 unreachable")
    write_pcap(tmp_path / "a.pcap", packets, range(1, len(packets) + 1), "raw")
    with pytest.raises(CheckFailed, match=r"10\.1\.0\.9 is unreachable for 10 of 10 flows, says 10\.9\.0\.1; "):
        _run("--read", str(tmp_path / "a.pcap"), "--out", str(tmp_path / "out"))
    assert (tmp_path / "out" / "flows.csv").read_text().splitlines()[1] == f"{SRC},{DST},50000,10.9.0.1,10.9.0.1"
    assert len(list((tmp_path / "out" / "records").iterdir())) == 2


def test_the_kernels_hash_is_held_against_every_flow(tmp_path: Path) -> None:
    _write_answers(tmp_path / "seen.pcap")
    asked = ["--linux", "10.9.1.0=7:10.9.2.0,10.9.2.1", "--out", str(tmp_path)]
    result = _run("--read", str(tmp_path / "seen.pcap"), *asked)
    assert "of 40 flows from 10.9.1.0 to hop 2 as measured" in result.stdout
    header, first, *_ = (tmp_path / "forecast.csv").read_text().splitlines()
    assert header == "src,dst,sport,hop,from,predicted,measured"
    assert first.startswith(f"{SRC},{DST},50000,2,10.9.1.0,10.9.2.")


def test_a_call_that_fails_leaves_nothing_and_no_configuration_is_taken(tmp_path: Path) -> None:
    with pytest.raises(ConfigError):
        _run("--read", str(tmp_path / "none.pcap"), "--out", str(tmp_path / "out"))
    with pytest.raises(ConfigError):
        _run("--dst", DST, "--src", SRC, "--pcap", str(tmp_path / "no" / "a.pcap"), "--out", str(tmp_path / "out"))
    assert not (tmp_path / "out").exists()
    assert _run("--set", "a.b=1").exit_code == 2


_GOOD = {"--dst": DST, "--src": SRC, "--pcap": "a.pcap"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"--dst": None}, "--dst: is missing"),
        ({"--src": None}, "--src: is missing"),
        ({"--pcap": None}, f"--dst = {DST}: says nothing of where to"),
        ({"--dst": "10.1.0"}, "--dst = 10.1.0: is no IPv4 address"),
        ({"--ports": "50000-49000"}, "--ports = 50000-49000: .* is not within 1..65535"),
        ({"--ports": "5x"}, "--ports = 5x: '5x' is neither a number nor a range"),
        ({"--ports": "0-99999999999"}, "--ports = 0-99999999999: .* is not within 1..65535"),
        ({"--ports": "\u00b2"}, "is neither a number nor a range"),
        ({"--ttl": "0-3"}, "--ttl = 0-3: .* is not within 1..255"),
        ({"--payload": "6"}, "--payload = 6: is out of range; choose a multiple of 4"),
        ({"--qpn": "1"}, r"--qpn = 1: is out of range; choose 2\.\.16777215"),
        ({"--src-mac": "02:00", "--dst-mac": "02:00:00:00:00:01"}, "--src-mac, --dst-mac: MAC address '02:00'"),
        ({"--iface": "nosuch0"}, "--iface = nosuch0: no such interface here; one of .*lo"),
        ({"--read": "b.pcap"}, "--pcap = a.pcap: goes not with --read"),
    ],
)
def test_bad_options_end_in_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    asked = [text for pair in (_GOOD | change).items() if pair[1] for text in pair]
    with pytest.raises(ConfigError, match=message):
        _run(*asked)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--members", "2", "--members = 2: is not HOP=N"),
        ("--members", "2=1", "--members = 2=1: hop 2: 2 routers answered"),
        ("--weight", "10.9.2.1", "--weight = 10.9.2.1: is not ADDR=W"),
        ("--weight", "10.9.2.1=0", "--weight = 10.9.2.1=0: must be above 0"),
    ],
)
def test_bad_expectations_end_in_one_line(tmp_path: Path, option: str, value: str, message: str) -> None:
    _write_answers(tmp_path / "seen.pcap")
    with pytest.raises(ConfigError, match=message):
        _run("--read", str(tmp_path / "seen.pcap"), option, value, "--out", str(tmp_path))


def test_sending_needs_the_right_to_raw_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "socket", _refuse)
    with pytest.raises(ConfigError, match=r"--iface = lo: raw sockets need root .*; run as root, or write --pcap"):
        _run("--dst", DST, "--src", SRC, "--iface", "lo", "--out", str(tmp_path))


def test_without_scapy_the_remedy_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "scapy.utils", None)
    with pytest.raises(ConfigError, match=r"scapy: is not installed; pip install 'netlayer\[rdma\]'"):
        _run("--read", str(tmp_path / "a.pcap"), "--out", str(tmp_path))


def test_defaults_are_those_of_the_library() -> None:
    default = {option.name: option.default for option in command.params}
    assert (default["qpn"], default["tos"], default["payload"]) == (UNUSED_QPN, ROCE_TOS, PAYLOAD_BYTES)


def test_help_has_examples_and_needs_no_numpy() -> None:
    assert "netlayer topology probe --dst 10.1.0.9" in _run("--help").stdout
    check = "import sys, topology.probe.command; sys.exit('numpy' in sys.modules or 'pydantic' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check], check=False, env=dict(os.environ)).returncode == 0


def _refuse(*_: object, **__: object) -> None:
    raise PermissionError("not here")
