"""From a profile to the writes of each NIC, and what a NIC cannot do said with what is nearest."""

from __future__ import annotations

import json

import pytest

from congestion.nic.commands.shown import to_script
from congestion.nic.hosts.inventory import take_inventory
from congestion.nic.hosts.tree import Tree
from congestion.nic.profile.plan import Plan, make_plan
from congestion.nic.profile.steps import FileStep, ToolStep
from congestion.nic.vendors.tools import Tools
from tests.congestion.nic.changes import EXAMPLES, Host, profile_of
from tests.congestion.nic.simulated import VENDORS, build_host, pci_of, put, snapshot


def values(plan: Plan, surface: str = "") -> dict[str, str]:
    return {row.step.name: row.step.new for row in plan.rows if surface in ("", row.step.surface)}


@pytest.mark.parametrize("vendor", VENDORS)
def test_a_plan_changes_nothing(vendor, tmp_path):
    host = Host(tmp_path, (vendor,), groups=False)
    for name in EXAMPLES:
        assert host.plan(profile_of(name)).rows
    assert host.now() == host.before
    assert not host.kernel.written


def test_mlx5_takes_dcqcn_by_debugfs_with_old_values_units_and_reasons(tmp_path):
    host = Host(tmp_path, ("mlx5",))
    plan = host.plan(profile_of("tuned-dcqcn"))
    row = next(row for row in plan.rows if row.step.name == "rp_ai_rate")
    assert isinstance(row.step, FileStep)
    assert row.step.path == f"sys/kernel/debug/mlx5/{pci_of(0)}/cc_params/rp_ai_rate"
    assert (row.old, row.step.new, row.step.unit, row.action) == ("5", "1000", "Mb/s", "change")
    assert row.step.reason
    assert values(plan)["default_roce_tos"] == "106"
    assert not plan.cannots
    assert any("fallback: hybrid cannot be had" in note for note in plan.notes)


def test_ofed_without_debugfs_takes_the_same_by_sysfs(tmp_path):
    plan = Host(tmp_path, ("ofed",)).plan(profile_of("tuned-dcqcn"))
    found = values(plan, "ofed-ecn")
    assert (found["rpg_ai_rate"], found["rpg_time_reset"], found["dce_tcp_rtt"]) == ("1000", "20", "10")
    paths = {row.step.path for row in plan.rows if isinstance(row.step, FileStep) and row.step.name == "3"}
    assert paths == {f"sys/class/net/eth0/ecn/roce_{point}/enable/3" for point in ("np", "rp")}


def test_firmware_is_written_too_where_the_profile_wants_it_kept(tmp_path):
    plan = Host(tmp_path, ("rxe", "mlx5")).plan(profile_of("tuned-dcqcn", firmware={"persist": True}))
    found = values(plan, "mlxconfig")
    assert found["RPG_AI_RATE_P2"] == "1000"  # function 1 is port 2
    assert found["CNP_DSCP_P2"] == "48"
    warning = next(row.step.warning for row in plan.rows if row.step.surface == "mlxconfig")
    assert f"mlxfwreset -d {pci_of(1)} -y reset" in warning


def test_rttcc_is_firmware_and_a_register(tmp_path):
    plan = Host(tmp_path, ("mlx5",)).plan(profile_of("lossy-ztr"))
    found = values(plan)
    assert found["ROCE_CC_LEGACY_DCQCN"] == "0"
    assert found["PPCC slot 15"] == "0"
    assert (found["rtt_resp_dscp"], found["rtt_resp_dscp_valid"]) == ("48", "1")
    assert found["pfc"] == "00000000"
    assert not [name for name in found if name.startswith("rp_")]


def test_the_floor_of_the_ack_timer_is_disabled_by_a_one(tmp_path):
    host = Host(tmp_path, ("mlx5",))
    for floor, register in ((True, "0"), (False, "1")):
        profile = profile_of(retransmission={"timeout": 14, "retry_cnt": 7, "ack_floor": floor})
        assert values(host.plan(profile))["min_ack_timeout_limit_disabled"] == register


@pytest.mark.parametrize("law", ["hybrid", "swift", "timely"])
def test_a_law_that_no_firmware_has_is_never_faked(law, tmp_path):
    plan = Host(tmp_path, ("mlx5",)).plan(profile_of(law=law, dcqcn={}))
    assert [cannot.what for cannot in plan.cannots] == [f"law = {law}"]
    assert "dcqcn" in plan.cannots[0].nearest.lower()
    assert "rttcc" in plan.cannots[0].nearest
    assert not [name for name in values(plan) if name.startswith(("rp_", "np_"))]


def test_bluefield_3_could_be_programmed_and_an_old_connectx_has_no_rttcc(tmp_path):
    host = Host(tmp_path, ("mlx5",))
    number = tmp_path / f"root/sys/bus/pci/devices/{pci_of(0)}/device"
    put(number, "0xa2dc")
    assert "DOCA PCC" in host.plan(profile_of(law="hybrid", dcqcn={})).cannots[0].nearest
    put(number, "0x1017")
    assert host.plan(profile_of("lossy-ztr")).cannots[0].why == "ConnectX-5 has no RTTCC, ConnectX-6 Dx and later do"


@pytest.mark.parametrize(
    ("vendor", "law", "nearest"),
    [
        ("irdma", "hybrid", "law = timely"),
        ("irdma", "rttcc", "law = timely"),
        ("bnxt", "hybrid", "law = dcqcn"),
        ("ionic", "timely", "law = dcqcn"),
        ("rxe", "dcqcn", "law = none"),
        ("bnxt-debugfs", "rttcc", "law = dcqcn"),
    ],
)
def test_the_nearest_is_named(vendor, law, nearest, tmp_path):
    plan = Host(tmp_path, (vendor,)).plan(profile_of(law=law, dcqcn={}))
    said = next(cannot for cannot in plan.cannots if cannot.what == f"law = {law}")
    assert nearest in said.nearest


def test_intel_runs_timely_alone(tmp_path):
    found = values(Host(tmp_path, ("irdma",)).plan(profile_of(law="timely", dcqcn={})), "irdma-configfs")
    assert found == {"roce_dcqcn_enable": "0", "roce_dctcp_enable": "0", "roce_timely_enable": "1"}


def test_broadcom_by_configfs_or_debugfs(tmp_path):
    by_config = values(Host(tmp_path / "one", ("bnxt",)).plan(profile_of()), "bnxt-configfs")
    assert (by_config["ecn_enable"], by_config["roce_dscp"], by_config["cnp_prio"]) == ("1", "26", "6")
    by_debug = values(Host(tmp_path / "two", ("bnxt-debugfs",)).plan(profile_of()), "bnxt-debugfs")
    assert (by_debug["enable_cc"], by_debug["tos_dscp"], by_debug["alt_vlan_pcp"]) == ("1", "26", "6")


def test_amd_counts_the_increase_timer_in_periods_of_alpha(tmp_path):
    plan = Host(tmp_path, ("ionic",)).plan(profile_of("tuned-dcqcn"))
    row = next(row for row in plan.rows if row.step.name == "time_reset")
    assert (row.step.new, row.step.unit) == ("2", "x 10 us")
    assert values(plan)["match_default"] == "1"


def test_amd_refuses_what_is_out_of_its_own_range(tmp_path):
    plan = Host(tmp_path, ("ionic",)).plan(profile_of(dcqcn={"rp_gd": 15, "rp_byte_reset": 0, "rp_max_rate": 5}))
    assert {cannot.what for cannot in plan.cannots} >= {"rp_gd", "rp_byte_reset", "rp_max_rate"}
    assert "gd" not in values(plan)


def test_amd_may_start_with_what_its_driver_does_not_take(tmp_path):
    host = Host(tmp_path, ("ionic",))
    profile = profile_of(dcqcn={"rp_rate_to_set_on_first_cnp": 0})
    assert "rp_rate_to_set_on_first_cnp" in {cannot.what for cannot in host.plan(profile).cannots}
    folder = tmp_path / f"root/sys/kernel/debug/ionic/{pci_of(0)}/lif0/rdma/dcqcn/profiles/1/roce_rp"
    put(folder / "rate_to_set_on_first_cnp", "0")
    assert "rp_rate_to_set_on_first_cnp" not in {cannot.what for cannot in host.plan(profile).cannots}


def test_a_script_undoes_what_the_kernel_changes_besides_after_what_changes_it(tmp_path):
    plan = Host(tmp_path, ("mlx5",)).plan(profile_of(cnp={"dscp": 40, "priority": 5}))
    undo = to_script(plan, "test").partition("# To undo:")[2]
    assert 0 < undo.index("np_cnp_prio\n") < undo.rindex("np_cnp_prio_mode\n")


def test_a_script_undoes_the_last_change_first_and_hands_over_after_that(tmp_path):
    undo = to_script(Host(tmp_path, ("bnxt",)).plan(profile_of()), "test").partition("# To undo:")[2]
    order = ["roce_dscp\n", "ecn_enable\n", "pfc set", "cc/apply\n"]
    assert sorted(order, key=undo.index) == order


def test_a_script_removes_folders_that_it_made_and_writes_nothing_unknown(tmp_path):
    text = to_script(Host(tmp_path, ("irdma",), groups=False).plan(profile_of()), "test")
    work, _, undo = text.partition("# To undo:")
    for group in ("irdma/irdma_0", "rdma_cm/irdma_0"):
        assert f"mkdir -p /sys/kernel/config/{group}\n" in work
        assert f"rmdir /sys/kernel/config/{group}\n" in undo
    assert "UNKNOWN" not in undo


def test_a_script_of_what_is_there_already_tells_drivers_nothing(tmp_path):
    host = Host(tmp_path, ("bnxt",))
    host.apply(profile_of())
    assert "apply" not in to_script(host.plan(profile_of()), "test").partition("}\n")[2]


def test_a_title_cannot_end_its_comment(tmp_path):
    text = to_script(Host(tmp_path, ("rxe",)).plan(profile_of()), "plan of /x\nrm -rf /")
    assert "\nrm" not in text


def test_dcqcn_ends_a_forced_rttcc(tmp_path):
    host = Host(tmp_path, ("mlx5",))
    host.apply(profile_of("lossy-ztr"))
    changes = {row.step.name: (row.old, row.step.new) for row in host.plan(profile_of("tuned-dcqcn")).changes}
    assert changes["ROCE_CC_LEGACY_DCQCN"] == ("0", "1")
    assert changes["PPCC slot 15"] == ("0", "1")


def test_where_nobody_can_see_whether_rttcc_is_forced_that_is_said(tmp_path):
    root = build_host(tmp_path / "root", "mlx5")
    (tmp_path / "none").mkdir()
    for tools in (Tools(host=False), Tools(host=False, folder=tmp_path / "none")):
        tree = Tree(root)
        plan = make_plan(profile_of(), take_inventory(tree, tools)[0], tree, tools)
        said = [note for note in plan.notes if "cannot see whether RTTCC is forced" in note]
        assert ["mlxconfig" in note or "mlxreg" in note for note in said] == [True, True]
    put(root / f"sys/bus/pci/devices/{pci_of(0)}/device", "0x1017")  # a ConnectX-5 has none
    plan = make_plan(profile_of(), take_inventory(tree, tools)[0], tree, tools)
    assert not [note for note in plan.notes if "RTTCC" in note]


def test_rttcc_in_two_turns_says_so_until_the_firmware_has_it(tmp_path):
    host = Host(tmp_path, ("mlx5",))
    words = "reset the firmware, then apply again"
    assert any(words in note for note in host.plan(profile_of("lossy-ztr")).notes)
    host.apply(profile_of("lossy-ztr"))
    assert not any(words in note for note in host.plan(profile_of("lossy-ztr")).notes)


def test_a_model_that_is_not_known_gets_no_rttcc(tmp_path):
    host = Host(tmp_path, ("mlx5",))
    put(tmp_path / f"root/sys/bus/pci/devices/{pci_of(0)}/device", "0x1999")
    plan = host.plan(profile_of("lossy-ztr"))
    assert "is not known to have RTTCC" in plan.cannots[0].why
    assert "PPCC slot 15" not in values(plan)


@pytest.mark.parametrize(("law", "mask"), [("dcqcn", "74"), ("none", "66")])
def test_the_firmwares_mask_keeps_the_other_priorities_bits(law, mask, tmp_path):
    host = Host(tmp_path, ("mlx5",))
    key = "ROCE_CC_PRIO_MASK_P1"
    present = "66" if law == "dcqcn" else "74"
    host.programs.run(["mlxconfig", "-d", pci_of(0), "-y", "set", f"{key}={present}"])
    assert values(host.plan(profile_of(law=law, dcqcn={}, firmware={"persist": True})))[key] == mask


def test_the_rate_of_a_link_that_is_down_is_not_believed(tmp_path):
    host = Host(tmp_path, ("mlx5",))
    port = tmp_path / "root/sys/class/infiniband/mlx5_0/ports/1"
    put(port / "rate", "10 Gb/sec (4X SDR)")
    put(port / "state", "1: DOWN")
    plan = host.plan(profile_of(dcqcn={"rp_ai_rate": 25_001}))
    assert values(plan)["rp_ai_rate"] == "25001"
    assert any("its link is DOWN: not compared with the port's rate: rp_ai_rate" in note for note in plan.notes)


def test_no_rate_is_above_the_ports(tmp_path):
    host = Host(tmp_path, ("mlx5",))
    put(tmp_path / "root/sys/class/infiniband/mlx5_0/ports/1/rate", "25 Gb/sec (1X EDR)")
    plan = host.plan(profile_of(dcqcn={"rp_ai_rate": 25_001, "rp_hai_rate": 25_000}))
    assert [(cannot.what, cannot.nearest) for cannot in plan.cannots] == [("rp_ai_rate", "25000 Mb/s or less")]
    assert values(plan)["rp_hai_rate"] == "25000"
    assert "rp_ai_rate" not in values(plan)


def test_what_devices_have_in_common_is_said_once(tmp_path):
    notes = Host(tmp_path, ("mlx5", "ofed")).plan(profile_of()).notes
    assert next(note for note in notes if "NCCL_IB_TC" in note).startswith("mlx5_0, mlx5_1: ")


def test_soft_devices_have_a_tos_alone(tmp_path):
    assert set(values(Host(tmp_path, ("rxe",)).plan(profile_of(law="none", dcqcn={})))) == {"default_roce_tos"}


def test_infiniband_is_said_and_left(tmp_path):
    host = Host(tmp_path, ("mlx5",))
    put(tmp_path / "root/sys/class/infiniband/mlx5_0/ports/1/link_layer", "InfiniBand")
    plan = host.plan(profile_of())
    assert not plan.rows
    assert plan.cannots[0].why == "link layer InfiniBand, no RoCE"


def test_a_kernel_without_a_file_is_said(tmp_path):
    host = Host(tmp_path, ("mlx5",))
    (tmp_path / f"root/sys/kernel/debug/mlx5/{pci_of(0)}/cc_params/rtt_resp_dscp").unlink()
    said = {cannot.what: cannot.why for cannot in host.plan(profile_of("lossy-ztr")).cannots}
    assert said["rtt_resp_dscp"].startswith("this driver has no file /sys/kernel/debug/mlx5/")


def test_below_another_root_programs_are_planned_and_not_run(tmp_path):
    root = build_host(tmp_path, "mlx5", "bnxt")
    before = snapshot(tmp_path)
    tree, tools = Tree(root), Tools(host=False)
    plan = make_plan(profile_of(), take_inventory(tree, tools)[0], tree, tools)
    idle = [row for row in plan.rows if isinstance(row.step, ToolStep)]
    assert idle
    assert {row.action for row in idle} == {"not run under --root"}
    assert not [row for row in plan.changes if row in idle]
    assert [row.action for row in plan.rows if row.step.name == "apply"] == ["not run under --root"]
    assert snapshot(tmp_path) == before


def test_a_host_without_programs_is_told_what_to_install(tmp_path):
    root = build_host(tmp_path / "root", "mlx5")
    (tmp_path / "none").mkdir()
    tree, tools = Tree(root), Tools(host=False, folder=tmp_path / "none")
    plan = make_plan(profile_of(), take_inventory(tree, tools)[0], tree, tools)
    nearest = {cannot.what: cannot.nearest for cannot in plan.cannots}
    assert "iproute2" in nearest["priorities"]
    assert "mstflint" in nearest["adaptive, slow_restart"]
    assert nearest["link_pause"] == "install ethtool"


def test_queue_pairs_own_values_are_said_as_nccl_names_them(tmp_path):
    notes = Host(tmp_path, ("mlx5",)).plan(profile_of()).notes
    assert any("NCCL_IB_TIMEOUT=18 NCCL_IB_RETRY_CNT=7 NCCL_IB_TC=106" in note for note in notes)


@pytest.mark.parametrize("vendor", VENDORS)
def test_a_plan_is_json_with_commands_as_argument_lists(vendor, tmp_path):
    tree = json.loads(json.dumps(Host(tmp_path, (vendor,)).plan(profile_of()).as_tree()))
    for step in tree["steps"]:
        assert ("path" in step) != ("arguments" in step)
        assert all(isinstance(word, str) and "\n" not in word for word in step.get("arguments", []))
