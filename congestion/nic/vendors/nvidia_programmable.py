"""NVIDIA's programmable congestion control: parameters of its algorithms (register PPCC), and firmware switches for it.

What a parameter means and may be belongs to the algorithm in its slot: the NIC itself gives the range (PPCC's command 5
in mstflint's register table), and outside of it, or without it, nothing is written. Keys and values of the firmware:
mstflint's `mlxconfig_host.db`. Not covered: loading an algorithm of one's own, which DOCA PCC's host program does.
"""

from __future__ import annotations

from congestion.nic.profile.draft import Draft
from congestion.nic.profile.file import Law, PpccSection
from congestion.nic.vendors.nvidia import LOST, configure, refuse_tool
from congestion.nic.vendors.tool_settings import PpccParameter, PpccRange

SHAPERS = {"device": 0, "destination": 1, "queue-pair": 2, "5-tuple": 3}
CNP_DSCP_MODES = {"device": 0, "fixed": 1, "copied": 2}
_KEYS = {  # of the profile's section `firmware`: the key, whether each port has its own, its meaning
    "user_programmable_cc": ("USER_PROGRAMMABLE_CC", False, "an algorithm of one's own may be loaded"),
    "pcc_int": ("PCC_INT_EN", False, "programmable control by RTT packets with telemetry"),
    "shaper": ("ROCE_CC_SHAPER_COALESCE", True, "which flows share a rate limiter"),
    "cnp_dscp_mode": ("CNP_DSCP_MODE", True, "where the DSCP of CNPs comes from"),
    "adaptive_routing": ("ROCE_ADAPTIVE_ROUTING_EN", False, "queue pairs may be routed adaptively"),
    "selective_repeat": ("RDMA_SELECTIVE_REPEAT_EN", False, "queue pairs may resend only what is missing"),
}
_WORDS = {"shaper": SHAPERS, "cnp_dscp_mode": CNP_DSCP_MODES}


def draw_programmable(draft: Draft, law: Law | None) -> None:
    """Add the steps of firmware switches and of the algorithms' parameters.

    Args:
        law: that the device will run.
    """
    _firmware(draft)
    for one in draft.profile.ppcc:
        _parameter(draft, one, law)


def asked_switches(draft: Draft) -> list[str]:
    """Keys of the profile's section `firmware` that only NVIDIA's NICs have."""
    return [name for name in _KEYS if getattr(draft.profile.firmware, name) is not None]


def _firmware(draft: Draft) -> None:
    """Add the steps by which mlxconfig sets what the profile's section `firmware` asks of NVIDIA's NICs alone."""
    switches, tool = asked_switches(draft), draft.find_tool("mlxconfig", "mstconfig")
    if switches and (refusal := refuse_tool(draft, "mlxconfig", "mstconfig")):
        draft.cannot(", ".join(switches), *refusal)
        return
    for name in switches:
        key, of_port, reason = _KEYS[name]
        codes, value = _WORDS.get(name), getattr(draft.profile.firmware, name)
        number = codes[value] if codes else int(value)
        key += draft.device.port_suffix if of_port else ""
        configure(draft, tool, key, number, reason, allowed=(0, max(codes.values()) if codes else 1))


def _parameter(draft: Draft, one: PpccSection, law: Law | None) -> None:
    """Add one parameter of a programmable algorithm (PPCC) to the plan, or say why it cannot be had."""
    name, device = f"PPCC slot {one.slot} parameter {one.parameter}", draft.device
    tool = draft.find_tool("mlxreg", "mstreg")
    if law != "rttcc":
        draft.cannot(name, "without RTTCC no algorithm of a slot runs", "law = rttcc, on ConnectX-6 Dx and later")
    elif refusal := refuse_tool(draft, "mlxreg", "mstreg"):
        draft.cannot(name, *refusal)
    elif not draft.tools.runs:
        draft.note(f"{name}: not planned under --root: the NIC itself gives its range")
    else:
        reply = draft.present(PpccRange(tool, device.pci, str(one.slot), str(one.parameter)))
        if reply is None:
            nearest = "plan on a host whose NIC has an algorithm in that slot"
            draft.cannot(name, "its range, which the NIC gives (PPCC, command 5), cannot be read", nearest)
            return
        low, high, default, access = map(int, reply.split())
        if access != PpccRange.WRITABLE:
            draft.cannot(name, "the NIC says that it is read-only", "omit it from the profile")
        elif not low <= one.value <= high:
            draft.cannot(name, f"{one.value} is out of the NIC's range {low}..{high}", f"its default is {default}")
        else:
            setting = PpccParameter(tool, device.pci, str(one.slot), str(one.parameter))
            reason = f"a parameter of the slot's algorithm, {low}..{high}"
            draft.tool(setting, str(one.value), reason, name=name, warning=LOST, allowed=(low, high))
