"""Programmable congestion control: parameters within the range that the NIC gives, and the firmware's switches."""

from __future__ import annotations

from typing import Any

import pytest

from congestion.nic.profile.file import build_profile
from congestion.nic.profile.plan import Plan
from congestion.nic.vendors.tools import Tools
from netlayer.errors import ConfigError
from tests.congestion.nic.changes import Host, profile_of

RTTCC: dict[str, Any] = {"law": "rttcc", "link_pause": False}


def plan_of(folder: Any, *vendors: str, **more: Any) -> Plan:
    return Host(folder, vendors or ("mlx5",)).plan(build_profile(RTTCC | more))


def one(parameter: int, value: int, slot: int = 0) -> list[dict[str, int]]:
    return [{"slot": slot, "parameter": parameter, "value": value}]


def test_a_parameter_within_the_nics_range_is_planned_set_and_undone(tmp_path):
    host = Host(tmp_path, ("mlx5",))
    profile = build_profile(RTTCC | {"ppcc": one(2, 400)})
    row = next(row for row in host.plan(profile).rows if row.step.name == "PPCC slot 0 parameter 2")
    assert (row.old, row.step.new, row.step.reason) == ("10", "400", "a parameter of the slot's algorithm, 10..1000")
    host.apply(profile)
    host.check_ranges()
    told = ["--indexes", "local_port=1,pnat=0,lp_msb=0,algo_slot=0,algo_param_index=2", "--set", "cmd_type=8,value=400"]
    assert [words for words in host.programs.told if words[5:9] == told]
    assert host.now()["PPCC 2"] == "400"
    host.roll_back()
    assert host.now() == host.before


@pytest.mark.parametrize(
    ("parameter", "value", "why"),
    [
        (0, 9, "9 is out of the NIC's range 10..1000"),
        (0, 1001, "1001 is out of the NIC's range 10..1000"),
        (0, 2**32 - 1, "4294967295 is out of the NIC's range 10..1000"),
        (3, 10, "the NIC says that it is read-only"),
        (4, 10, "its range, which the NIC gives (PPCC, command 5), cannot be read"),
    ],
)
def test_without_a_range_or_out_of_it_nothing_is_written(tmp_path, parameter, value, why):
    host = Host(tmp_path, ("mlx5",))
    profile = build_profile(RTTCC | {"ppcc": one(parameter, value)})
    plan = host.plan(profile)
    assert [cannot.why for cannot in plan.cannots if cannot.what.startswith("PPCC slot 0")] == [why]
    host.change(plan)
    assert not [words for words in host.programs.told if any("cmd_type=8" in word for word in words)]


def test_a_nic_without_programmable_control_says_so(tmp_path):
    plan = Host(tmp_path, ("bnxt",)).plan(build_profile(RTTCC | {"ppcc": one(0, 50), "firmware": {"pcc_int": True}}))
    assert "pcc_int, ppcc" in [cannot.what for cannot in plan.cannots]
    old = Host(tmp_path / "old", ("mlx5",))
    model = tmp_path / "old/root/sys/class/infiniband/mlx5_0/device/device"
    model.write_text("0x1017\n")
    fallback = build_profile(RTTCC | {"fallback": "dcqcn", "ppcc": one(0, 50)})
    assert "without RTTCC no algorithm of a slot runs" in [cannot.why for cannot in old.plan(fallback).cannots]


def test_a_nic_without_a_pci_address_is_not_said_to_lack_a_program(tmp_path):
    host = Host(tmp_path, ("mlx5",))
    # As `cp -rL` leaves it: a folder in place of the link, whose target's name is the address.
    link = tmp_path / "root/sys/class/infiniband/mlx5_0/device"
    ids = {name: (link / name).read_text() for name in ("vendor", "device")}
    link.unlink()
    link.mkdir()
    for name, text in ids.items():
        (link / name).write_text(text)
    sections = {"retransmission": {"adaptive": True}, "firmware": {"pcc_int": True, "persist": True}}
    plan = host.plan(profile_of(**sections))
    no_address = "sysfs gives no PCI address, by which {} finds the NIC"
    assert {cannot.what: cannot.why for cannot in plan.cannots} == {
        "adaptive": no_address.format("mlxreg"),
        "pcc_int": no_address.format("mlxconfig"),
        "firmware.persist": no_address.format("mlxconfig"),
        "dcqcn, cnp": "sysfs gives no PCI address, which names its folder in debugfs",
    }
    [refused] = host.plan(build_profile(RTTCC)).cannots
    assert refused.why == no_address.format("mlxconfig")


def test_under_another_root_the_range_is_not_known(tmp_path):
    host = Host(tmp_path, ("mlx5",))
    host.programs = Tools(host=False)  # type: ignore[assignment]
    plan = host.plan(build_profile(RTTCC | {"ppcc": one(0, 50)}))
    assert any("not planned under --root: the NIC itself gives its range" in note for note in plan.notes)


def test_switches_of_the_firmware_become_its_keys(tmp_path):
    firmware = {
        "user_programmable_cc": True, "pcc_int": False, "shaper": "5-tuple", "cnp_dscp_mode": "copied",
        "adaptive_routing": True, "selective_repeat": False,
    }  # fmt: skip
    plan = plan_of(tmp_path, firmware=firmware)
    found = {row.step.name: row.step.new for row in plan.rows if row.step.surface == "mlxconfig"}
    assert found == {
        "ROCE_CC_LEGACY_DCQCN": "0", "USER_PROGRAMMABLE_CC": "1", "PCC_INT_EN": "0", "ROCE_CC_SHAPER_COALESCE_P1": "3",
        "CNP_DSCP_MODE_P1": "2", "ROCE_ADAPTIVE_ROUTING_EN": "1", "RDMA_SELECTIVE_REPEAT_EN": "0",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"law": "dcqcn", "ppcc": one(0, 1)}, "ppcc: has no effect under law = dcqcn"),
        ({"ppcc": [*one(0, 1), *one(0, 2)]}, "ppcc: gives parameter 0 of slot 0 twice"),
        ({"ppcc": one(0, -1)}, "ppcc.0.value = -1: must be greater than or equal to 0"),
        ({"ppcc": one(0, 2**32)}, "ppcc.0.value"),
        ({"ppcc": one(0, 1, slot=16)}, "ppcc.0.slot"),
        ({"ppcc": one(2**16, 1)}, "ppcc.0.parameter"),
        ({"ppcc": [{"slot": 0, "parameter": 1}]}, "ppcc.0.value"),
        ({"ppcc": [{"slot": 0, "parameter": 1, "value": 1, "valu": 1}]}, "ppcc.0.valu: unknown key; did you mean"),
        ({"ppcc": {"0": 1}}, "ppcc"),
        ({"fallback": "dcqcn", "firmware": {"user_programmable_cc": True}}, "firmware.user_programmable_cc"),
        ({"firmware": {"shaper": "qp"}}, "firmware.shaper"),
    ],
)  # fmt: skip
def test_a_profile_that_cannot_be_is_one_clear_line(more, said):
    with pytest.raises(ConfigError) as error:
        build_profile(RTTCC | more)
    assert str(error.value).startswith(said)


def test_the_example_of_ztr_leaves_parameters_alone():
    assert profile_of("lossy-ztr").ppcc == []
