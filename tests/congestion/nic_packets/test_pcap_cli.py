"""`netlayer nic pcap` as its user meets it: tables, records, exit codes."""

from __future__ import annotations

import json
import struct
from pathlib import Path

import pytest
from click.testing import CliRunner
from scapy.layers.inet import IP, UDP
from scapy.layers.l2 import ARP, Ether
from scapy.packet import Raw

from congestion.nic.commands.pcap import pcap
from netlayer.errors import CheckFailed, ConfigError
from netlayer.results import load_record
from tests.congestion.nic_packets.talk import Talk, save


@pytest.fixture
def talk() -> Talk:
    made = Talk()
    made.write(1, 0)
    made.write(1, 70_000)
    made.answer(1, 70_009)
    return made


def test_tables_name_the_queue_pairs_and_the_timeout(talk, tmp_path):
    result = CliRunner().invoke(pcap, [str(talk.save(tmp_path / "x.pcap"))])
    assert result.exit_code == 0, result.output
    assert "10.0.0.1" in result.stdout
    assert "timeout" in result.stdout
    assert "70 ms" in result.stdout


def test_the_record_holds_all_three_tables_as_measured(talk, tmp_path):
    file, out = talk.save(tmp_path / "x.pcap"), tmp_path / "x.json"
    result = CliRunner().invoke(pcap, [str(file), "--json", str(out), "--no-icrc"])
    assert result.exit_code == 0, result.output
    record = load_record(out)
    assert record.source == "measured"
    assert [row["table"] for row in record.rows] == ["capture", "stream", "stream", "retransmission"]
    assert record.rows[0]["icrc_unknown"] == 3


def test_json_on_stdout_is_nothing_but_json(talk, tmp_path):
    result = CliRunner().invoke(pcap, [str(talk.save(tmp_path / "x.pcap")), "--json", "-"])
    assert json.loads(result.stdout)["rows"][1]["timeouts"] == 1


def test_a_wrong_crc_is_a_failed_check_after_the_tables(talk, tmp_path):
    damaged = bytearray(talk.frames[0])
    damaged[-5] ^= 1
    talk.frames[0] = bytes(damaged)
    result = CliRunner().invoke(pcap, [str(talk.save(tmp_path / "x.pcap"))])
    assert isinstance(result.exception, CheckFailed)
    assert "1 of 3 packets have a wrong ICRC" in str(result.exception)
    assert "10.0.0.1" in result.stdout


def test_a_crc_of_zeros_is_one_that_nobody_has_written_yet(talk, tmp_path):
    talk.frames[0] = talk.frames[0][:-4] + bytes(4)
    result = CliRunner().invoke(pcap, [str(talk.save(tmp_path / "x.pcap")), "--json", "-"])
    assert result.exit_code == 0, result.output
    row = json.loads(result.stdout)["rows"][0]
    assert (row["icrc_right"], row["icrc_wrong"], row["icrc_unknown"]) == (2, 0, 1)


def test_a_packet_without_room_for_its_crc_is_named(talk, tmp_path):
    """Some tools send BTH and AETH and nothing behind them."""
    ack = IP(src="10.0.0.1", dst="10.0.0.2") / UDP(sport=50_001, dport=4791) / Raw(bytes([0x11]) + bytes(15))
    result = CliRunner().invoke(pcap, [str(save(tmp_path / "x.pcap", [bytes(Ether() / ack)], [0]))])
    assert isinstance(result.exception, CheckFailed)
    assert "among 1 frames; 1 to that port too short for a packet, its headers and its ICRC" in str(result.exception)


def test_a_capture_without_roce_says_so(tmp_path):
    result = CliRunner().invoke(pcap, [str(save(tmp_path / "x.pcap", [bytes(Ether() / ARP())], [0]))])
    assert isinstance(result.exception, CheckFailed)
    assert str(result.exception).endswith("among 1 frames")


def test_what_was_not_read_is_said(talk, tmp_path):
    hidden = bytes(Ether() / IP() / UDP(dport=4789) / Raw(bytes(90)))
    result = CliRunner().invoke(pcap, [str(save(tmp_path / "x.pcap", [hidden] * 3, range(3)))])
    assert str(result.exception).endswith("among 3 frames; not read: 3 in VXLAN")
    path = talk.save(tmp_path / "y.pcap")
    with path.open("ab") as file:
        file.write(struct.pack("<IIII", 0, 0, len(hidden), len(hidden)) + hidden)
    result = CliRunner().invoke(pcap, [str(path), "--json", "-"])
    assert result.exit_code == 0, result.output
    assert "not read, so are in no table: 1 in VXLAN" in result.stderr
    assert json.loads(result.stdout)["rows"][0]["unread_frames"] == {"VXLAN": 1}


def test_a_file_that_breaks_off_is_read_so_far_with_a_warning(talk, tmp_path):
    path = talk.save(tmp_path / "x.pcap")
    path.write_bytes(path.read_bytes()[:-10])
    result = CliRunner().invoke(pcap, [str(path)])
    assert result.exit_code == 0, result.output
    assert "ends inside frame 3" in result.stderr
    assert len(result.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("content", [b"", b"text"])
def test_no_capture_is_a_usage_error(tmp_path, content):
    path = tmp_path / "x.pcap"
    path.write_bytes(content)
    result = CliRunner().invoke(pcap, [str(path)])
    assert isinstance(result.exception, ConfigError)
    assert str(path) in str(result.exception)


def test_an_unwritable_target_is_refused_before_the_file_is_read(tmp_path):
    result = CliRunner().invoke(pcap, [str(Path("/none")), "--json", str(tmp_path / "no" / "x.json")])
    assert isinstance(result.exception, ConfigError)
    assert "--json" in str(result.exception)
