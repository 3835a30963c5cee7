"""Programs' settings: read, changed, undone, and never told anything that is no name."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from congestion.nic.vendors.tool_settings import (
    KINDS,
    Algorithm,
    DcbApp,
    DcbPfc,
    Firmware,
    MlnxDscp,
    MlnxPfc,
    MlnxTrust,
    Pause,
    PpccParameter,
    PpccRange,
    Register,
    ToolSetting,
    restore,
)
from congestion.nic.vendors.tools import ToolFailed, Tools
from netlayer.errors import ConfigError
from tests.congestion.nic.programs import Programs

SETTINGS: list[tuple[ToolSetting, list[str]]] = [
    (DcbPfc("dcb", "eth0"), ["00010000", "00000000", "11111111"]),
    (DcbApp("dcb", "eth0", "26"), ["3", "none", "0"]),
    (MlnxTrust("mlnx_qos", "eth0"), ["dscp", "pcp"]),
    (MlnxPfc("mlnx_qos", "eth0"), ["00010000", "10000001"]),
    (MlnxDscp("mlnx_qos", "eth0", "26"), ["5", "3"]),
    (Pause("ethtool", "eth0"), ["rx off tx off", "rx on tx off"]),
    (Register("mlxreg", "0000:42:00.0", "roce_adp_retrans_en"), ["1", "0"]),
    (Algorithm("mlxreg", "0000:42:00.0", "15"), ["0", "1"]),
    (PpccParameter("mlxreg", "0000:42:00.0", "0", "1"), ["1000", "10", "77"]),
    (Firmware("mlxconfig", "0000:42:00.0", "RPG_AI_RATE_P1"), ["1000", "0"]),
]
ACCL = """Sending access register...

Field Name                                     | Data
============================================================
roce_adp_retrans_field_select                  | 0x00000001
roce_tx_window_field_select                    | 0x00000000
roce_adp_retrans_en                            | 0x00000001
roce_tx_window_en                              | 0x00000000
============================================================
"""
MLNX_QOS = """DCBX mode: OS controlled
Priority trust state: dscp
dscp2prio mapping:
\tprio:0 dscp:07,06,05,04,03,02,01,00,
\tprio:3 dscp:31,29,28,27,26,25,24,
\tprio:6 dscp:30,55,54,53,52,51,50,49,
\tprio:6 dscp:48,
default priority:
Receive buffer size (bytes): 130944,130944,0,0,0,0,0,0,
PFC configuration:
\tpriority    0   1   2   3   4   5   6   7
\tenabled     0   0   0   1   0   0   0   0   
\tbuffer      0   0   0   1   0   0   0   0   
tc: 0 ratelimit: unlimited, tsa: vendor
"""  # noqa: W291 - as the program prints it


@pytest.mark.parametrize(("setting", "wanted"), SETTINGS, ids=lambda one: getattr(one, "kind", ""))
def test_what_is_set_is_read_back_and_undone(setting, wanted, tmp_path):
    programs = Programs(tmp_path)
    if setting.hidden:
        MlnxTrust("mlnx_qos", "eth0").write(programs, "pcp", "dscp")
    first = setting.read(programs)
    for value in wanted:
        before = setting.read(programs)
        setting.write(programs, before, value)
        assert setting.read(programs) == value
        setting.write(programs, value, before)
        assert setting.read(programs) == before
    assert setting.read(programs) == first


@pytest.mark.parametrize(("setting", "_wanted"), SETTINGS, ids=lambda one: getattr(one, "kind", ""))
def test_a_journal_brings_a_setting_back(setting, _wanted):
    assert restore(setting.kind, list(vars(setting).values())) == setting


def test_every_kind_is_known_to_journals():
    assert {setting.kind for setting, _ in SETTINGS} == set(KINDS)


@pytest.mark.parametrize(
    "device", ["", "-A", "--help", "eth0;reboot", "../eth0", "a b", "eth0\n", "$(id)", "a/b", "x" * 65, "..", "e..h"]
)
def test_what_is_no_name_never_becomes_an_argument(device):
    for kind in (DcbPfc, MlnxPfc, Pause):
        with pytest.raises(ValueError, match="are no names"):
            kind("dcb", device)
    with pytest.raises(ValueError, match="are no names"):
        Register("mlxreg", "0000:42:00.0", device)
    with pytest.raises(ValueError, match="are no names"):
        Pause(device, "eth0")


@given(st.text(max_size=12))
def test_no_value_but_a_proper_one_becomes_an_argument(text):
    good = {"dcb-pfc": 8, "mlnx-pfc": 8}
    for setting, wanted in SETTINGS:
        try:
            words = setting.change(wanted[0], text)
        except ValueError:
            continue
        assert text == "none" or all(char in "01" for char in text) or text.replace(",", "").isdigit() or text in wanted
        assert setting.kind not in good or len(text) == good[setting.kind]
        assert all("\n" not in word and "\0" not in word for word in words)


def test_a_register_without_a_switch_is_none():
    assert Register("mlxreg", "0000:42:00.0", "roce_adp_retrans_en").parse(ACCL) == "1"
    assert Register("mlxreg", "0000:42:00.0", "roce_tx_window_en").parse(ACCL) == "none"
    assert Register("mlxreg", "0000:42:00.0", "selective_repeat_forced_en").parse(ACCL) == "none"


@pytest.mark.parametrize(
    ("field", "select"),
    [
        ("roce_adp_retrans_en", "roce_adp_retrans_field_select"),
        ("roce_slow_restart_idle_en", "roce_slow_restart_idle_field_select"),
        ("min_ack_timeout_limit_disabled", "min_ack_timeout_limit_disabled_field_select"),
        ("selective_repeat_forced_en", "selective_repeat_forced_en_field_select"),
    ],
)
def test_a_switch_is_written_with_the_bit_that_says_that_it_is_meant(field, select):
    words = Register("mlxreg", "0000:42:00.0", field).change("0", "1")
    assert words[words.index("--set") + 1] == f"{select}=1,{field}=1"


def test_mlnx_qos_is_read_as_it_prints():
    assert MlnxTrust("mlnx_qos", "eth0").parse(MLNX_QOS) == "dscp"
    assert MlnxPfc("mlnx_qos", "eth0").parse(MLNX_QOS) == "00010000"
    for dscp, priority in (("26", "3"), ("30", "6"), ("48", "6"), ("0", "0"), ("63", "none")):
        assert MlnxDscp("mlnx_qos", "eth0", dscp).parse(MLNX_QOS) == priority


def test_dcb_is_read_as_its_manual_shows():
    printed = "pfc-cap 8 macsec-bypass off delay 4096 \nprio-pfc 0:off 1:off 2:off 3:off 4:off 5:off 6:on 7:on \n"
    assert DcbPfc("dcb", "eth0").parse(printed) == "00000011"
    assert DcbApp("dcb", "eth0", "24").parse("dscp-prio 0:0 24:2 24:3 48:6 \n") == "2,3"
    assert DcbApp("dcb", "eth0", "26").parse("") == "none"


@pytest.mark.parametrize(
    ("row", "value"),
    [
        ("         RPG_AI_RATE_P1                     5", "5"),
        ("*        RPG_AI_RATE_P1                     True(1)", "1"),
        ("         RPG_AI_RATE_P1   5   5   1000", "1000"),
        ("         RPG_AI_RATE_P1                     ECN(0)", "0"),
    ],
)
def test_mlxconfig_is_read_as_it_prints(row, value):
    printed = f"Device #1:\n----------\nConfigurations:        Next Boot\n{row}   \n"
    assert Firmware("mlxconfig", "0000:42:00.0", "RPG_AI_RATE_P1").parse(printed) == value


@pytest.mark.parametrize("setting", [setting for setting, _ in SETTINGS if setting.kind != "dcb-app"])
@pytest.mark.parametrize("printed", ["", "error", "\x00" * 10, "prio-pfc", "RX:", "value |"])
def test_garbage_is_no_value(setting, printed):
    try:
        value = setting.parse(printed)
    except ToolFailed as exc:
        value = "" if "\n" not in str(exc) else "several lines"
    assert value in ("", "none")


def test_programs_that_fail_hang_or_are_missing_are_said(tmp_path, monkeypatch):
    (tmp_path / "bad").write_text("#!/bin/sh\necho 'no such device' >&2; exit 4\n")
    (tmp_path / "slow").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "odd").write_text("\x7fELF")
    for path in tmp_path.iterdir():
        path.chmod(0o755)
    tools = Tools(host=True, folder=tmp_path)
    with pytest.raises(ToolFailed, match="bad: exit code 4: no such device"):
        tools.run(["bad"])
    monkeypatch.setattr("congestion.nic.vendors.tools._LIMIT_S", 0.2)
    with pytest.raises(ToolFailed, match="slow: no answer within"):
        tools.run(["slow"])
    with pytest.raises(ToolFailed, match="odd: cannot be run"):
        tools.run(["odd"])
    with pytest.raises(ToolFailed, match="none-of-that: not found"):
        tools.run(["none-of-that"])


def test_another_roots_host_runs_none_of_ours(tmp_path):
    assert not Tools(host=False).runs
    assert Tools(host=False).find("sh") == ""
    assert Tools(host=False, folder=tmp_path).find("sh") == ""
    with pytest.raises(ConfigError, match=r"--tools .* is no folder"):
        Tools(host=True, folder=tmp_path / "none")


def test_the_range_of_a_parameter_is_the_nics_and_cannot_be_set(tmp_path):
    setting = PpccRange("mlxreg", "0000:42:00.0", "0", "3")
    assert setting.read(Programs(tmp_path)) == "10 1000 10 0"
    with pytest.raises(ValueError, match="it is read only"):
        setting.change("0", "1")
    assert setting.kind not in KINDS
