"""A host, a profile, a plan and its journal, for tests that change, break and undo."""

from __future__ import annotations

import os
import re
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from congestion.nic.hosts.inventory import take_inventory
from congestion.nic.profile.apply import Applied, apply_plan, roll_back
from congestion.nic.profile.file import Profile, build_profile, load_profile
from congestion.nic.profile.journal import State
from congestion.nic.profile.parameters import PARAMETERS
from congestion.nic.profile.plan import Plan, make_plan
from congestion.nic.vendors.tool_settings import Algorithm, Firmware, PpccParameter
from netlayer.config.file import example
from tests.congestion.nic.programs import PPCC_RANGE, Programs
from tests.congestion.nic.simulated import Kernel, build_host, snapshot

EXAMPLES = ("lossless-dcqcn", "tuned-dcqcn", "lossy-ztr")

# As the makers document them; written down here once more, so that the product's table is held to them.
_RANGES: dict[str, tuple[int, int]] = {
    **dict.fromkeys(("rp_clamp_tgt_rate", "rp_clamp_tgt_rate_ati", "clamp_tgt_rate", "clamp_tgt_rate_ati"), (0, 1)),
    "clamp_tgt_rate_after_time_inc": (0, 1),
    **dict.fromkeys(("rp_time_reset", "rpg_time_reset", "time_reset"), (1, 131_071)),
    **dict.fromkeys(("rp_byte_reset", "rpg_byte_reset", "byte_reset"), (0, 32_767)),
    **dict.fromkeys(("rp_threshold", "rpg_threshold", "threshold"), (1, 31)),
    **dict.fromkeys(("rp_ai_rate", "rpg_ai_rate", "ai_rate", "rp_hai_rate", "rpg_hai_rate", "hai_rate"), (1, 131_071)),
    **dict.fromkeys(("rp_max_rate", "rpg_max_rate"), (0, 800_000)),
    **dict.fromkeys(("rp_min_dec_fac", "rpg_min_dec_fac", "min_dec_fac"), (1, 100)),
    **dict.fromkeys(("rp_min_rate", "rpg_min_rate", "min_rate"), (1, 131_071)),
    **dict.fromkeys(("rp_rate_to_set_on_first_cnp", "rate_to_set_on_first_cnp"), (0, 131_071)),
    **dict.fromkeys(("rp_dce_tcp_g", "dce_tcp_g", "rp_initial_alpha_value", "initial_alpha_value"), (1, 1_023)),
    **dict.fromkeys(("rp_dce_tcp_rtt", "dce_tcp_rtt"), (1, 131_071)),
    **dict.fromkeys(("rp_rate_reduce_monitor_period", "rate_reduce_monitor_period"), (1, 131_071)),
    "rp_gd": (0, 15),
    "rpg_gd": (0, 15),
    "gd": (1, 11),
    **dict.fromkeys(("np_min_time_between_cnps", "min_time_between_cnps"), (0, 131_071)),
    **dict.fromkeys(("np_cnp_dscp", "cnp_dscp", "roce_dscp", "tos_dscp", "alt_vlan_dscp", "rtt_resp_dscp"), (0, 63)),
    **dict.fromkeys(
        ("np_cnp_prio", "cnp_802p_prio", "cnp_prio", "roce_prio", "alt_vlan_pcp", "icnp_802p_prio"), (0, 7)
    ),
    **dict.fromkeys(("np_cnp_prio_mode", "rtt_resp_dscp_valid", "ecn_enable", "ecn_marking", "cc_mode"), (0, 1)),
    **dict.fromkeys(("enable_cc", "tos_ecn", "match_default"), (0, 1)),
    **dict.fromkeys(("roce_dcqcn_enable", "roce_dctcp_enable", "roce_timely_enable"), (0, 1)),
    **dict.fromkeys("01234567", (0, 1)),  # OFED's switch of a priority
    "default_roce_tos": (0, 255),
    "roce_cc_prio_mask": (0, 255),
    "roce_cc_legacy_dcqcn": (0, 1),
    **dict.fromkeys(("user_programmable_cc", "pcc_int_en", "roce_adaptive_routing_en"), (0, 1)),
    "rdma_selective_repeat_en": (0, 1),
    "roce_cc_shaper_coalesce": (0, 3),
    "cnp_dscp_mode": (0, 2),
}
_DSCP = r"(?:[0-9]|[1-5][0-9]|6[0-3])"
_PCI = r"-d 0000:[0-9a-f]{2}:00\.[01]"
_TOLD = (
    ("mlxconfig", rf"{_PCI} -y set (\w+)=(\d+)"),
    ("mlxreg", rf"{_PCI} --reg_name ROCE_ACCL --set (\w+)_field_select=1,\1(?:_en)?=[01] --yes"),
    ("mlxreg", rf"{_PCI} --reg_name PPCC --indexes [\w=,]*algo_slot=15[\w=,]* --set cmd_type=[12] --yes"),
    ("mlxreg", rf"{_PCI} --reg_name PPCC --indexes [\w=,]*algo_param_index=[0-2] --set cmd_type=8,value=(\d+) --yes"),
    ("mlnx_qos", rf"-i eth\d --(?:trust=(?:pcp|dscp)|pfc=[01](?:,[01]){{7}}|dscp2prio=(?:set|del),{_DSCP},[0-7])"),
    ("dcb", r"pfc set dev eth\d prio-pfc" + "".join(rf" {priority}:(?:on|off)" for priority in range(8))),
    ("dcb", rf"app (?:replace|del) dev eth\d dscp-prio(?: {_DSCP}:[0-7])+"),
    ("ethtool", r"-A eth\d rx (?:on|off) tx (?:on|off)"),
)
"""All that programs may be told to change."""
_KEYS = [f"{known.key}_P1" for known in PARAMETERS.values()]
_KEYS += ["USER_PROGRAMMABLE_CC", "PCC_INT_EN", "ROCE_ADAPTIVE_ROUTING_EN", "RDMA_SELECTIVE_REPEAT_EN"]
_KEYS += ["ROCE_CC_SHAPER_COALESCE_P1", "CNP_DSCP_MODE_P1"]
_KEYS += ["CNP_DSCP_P1", "CNP_802P_PRIO_P1", "ROCE_CC_PRIO_MASK_P1", "ROCE_CC_LEGACY_DCQCN"]


def quick_folder() -> tempfile.TemporaryDirectory[str]:
    """A folder in memory, where there is such a place: syncing costs nothing there."""
    memory = Path("/dev/shm")
    return tempfile.TemporaryDirectory(dir=memory if os.access(memory, os.W_OK) else None)


@dataclass
class Host:
    """A simulated host below `folder`."""

    folder: Path
    vendors: tuple[str, ...]
    groups: bool = True
    before: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        build_host(self.folder / "root", *self.vendors, groups=self.groups)
        (self.folder / "programs").mkdir()
        self.kernel = Kernel(self.folder / "root")
        self.programs = Programs(self.folder / "programs")
        self.state = State(self.folder / "state")
        # What a program was told back stays in its file, so its values are compared and not its bytes.
        self.before = self.now()

    def now(self) -> dict[str, Any]:
        shown = [
            ["dcb", "pfc", "show", "dev", "eth0"],
            ["dcb", "app", "show", "dev", "eth0"],
            ["mlnx_qos", "-i", "eth0"],
        ]
        shown += [["ethtool", "-a", "eth0"], ["mlxreg", "-d", "0000:42:00.0", "--reg_name", "ROCE_ACCL", "--get"]]
        said = {" ".join(words): self.programs.run(words) for words in shown}
        slot = Algorithm("mlxreg", "0000:42:00.0", "15").read(self.programs)
        keys = {key: Firmware("mlxconfig", "0000:42:00.0", key).read(self.programs) for key in _KEYS}
        own = {f"PPCC {one}": PpccParameter("mlxreg", "0000:42:00.0", "0", str(one)) for one in range(3)}
        parameters = {name: setting.read(self.programs) for name, setting in own.items()}
        return snapshot(self.folder / "root") | said | keys | parameters | {"PPCC slot 15": slot}

    def plan(self, profile: Profile) -> Plan:
        devices, faults = take_inventory(self.kernel, self.programs)
        assert not faults
        return make_plan(profile, devices, self.kernel, self.programs)

    def apply(self, profile: Profile) -> Applied:
        return self.change(self.plan(profile))

    def change(self, plan: Plan) -> Applied:
        return apply_plan(lambda: plan, self.kernel, self.programs, self.state, partial=True)

    def roll_back(self) -> None:
        undone = roll_back(self.kernel, self.programs, self.state)
        assert undone is None or not undone[1]

    def check_ranges(self) -> None:
        """No write was out of its documented range; what is written back is what was there."""
        for path, text in self.kernel.written:
            low, high = _RANGES[path.rpartition("/")[2]]
            assert low <= int(text, 0) <= high, (path, text)
        for words in self.programs.told:
            said = " ".join(words[1:])
            found = [match for name, shape in _TOLD if words[0] == name and (match := re.fullmatch(shape, said))]
            assert found, words
            if "cmd_type=8" in said:
                assert PPCC_RANGE[0] <= int(found[0][1]) <= PPCC_RANGE[1], words
            if words[0] == "mlxconfig":
                low, high = _RANGES[re.sub(r"_P[12]$", "", found[0][1]).lower()]
                assert low <= int(found[0][2]) <= high, words


def profile_of(name: str = "lossless-dcqcn", **changes: Any) -> Profile:
    """One of examples/profiles/, or its values with others on top."""
    loaded = load_profile(example(f"profiles/{name}"))
    return build_profile(loaded.model_dump(exclude_none=True) | changes) if changes else loaded
