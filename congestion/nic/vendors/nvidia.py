"""NVIDIA (mlx5): DCQCN by debugfs or OFED's sysfs, ZTR-RTTCC by firmware, retransmission by the register ROCE_ACCL.

Files: `drivers/infiniband/hw/mlx5/cong.c` of Linux; OFED's sysfs has the same values by mlxconfig's names. RTTCC:
NVIDIA's post "Scaling Zero Touch RoCE Technology with Round Trip Time Congestion Control" (register 0x506e is PPCC;
disabling its slot 15 forces RTTCC). ROCE_ACCL: mstflint's register table. Not covered: parameters of programmable
control (nvidia_programmable).
"""

from __future__ import annotations

from congestion.nic.hosts.inventory import MLX5_DEBUG
from congestion.nic.profile.draft import Draft
from congestion.nic.profile.file import Law
from congestion.nic.profile.parameters import PARAMETERS
from congestion.nic.vendors.tool_settings import Algorithm, Firmware, Register

_DEBUG, _OFED = "mlx5-debugfs", "ofed-ecn"
LOST = "lost at a reset of the NIC"
_RESET = "takes effect, and is undone, only by a firmware reset: mlxfwreset -d {pci} -y reset, which drops the link"
# Two lists, for a model in neither is refused in other words: it may be newer than both.
_NO_RTTCC = ("ConnectX-4", "ConnectX-4 Lx", "ConnectX-5", "ConnectX-5 Ex", "ConnectX-6", "BlueField")
_RTTCC = ("ConnectX-6 Dx", "ConnectX-6 Lx", "ConnectX-7", "ConnectX-8", "BlueField-2", "BlueField-3")
_UNSEEN = "cannot see whether RTTCC is forced, under which DCQCN's parameters have no effect"
_FORCING_SLOT = "15"
_LEGACY = "ROCE_CC_LEGACY_DCQCN"
_ACCELERATIONS = {
    "adaptive": ("roce_adp_retrans_en", "retransmit timers that adapt"),
    "slow_restart": ("roce_slow_restart_en", "slow restart after a loss"),
    "slow_restart_idle": ("roce_slow_restart_idle_en", "slow restart after idling"),
    "tx_window": ("roce_tx_window_en", "a window for each queue pair"),
    "ack_floor": ("min_ack_timeout_limit_disabled", "the floor of the ACK timer"),
    "selective_repeat": ("selective_repeat_forced_en", "selective repeat rather than go-back-N, for new queue pairs"),
}
_NO_TOOL = "install mstflint (mstreg, mstconfig) or NVIDIA's MFT"
_NO_PCI = "plan on the host itself; a copy needs the links of sys/class/infiniband as they are"


def refuse_tool(draft: Draft, *names: str) -> tuple[str, str] | None:
    """Return why none of these programs can reach the device, and what helps; None where one can."""
    if not draft.find_tool(*names):
        return f"neither {' nor '.join(names)} is installed", _NO_TOOL
    if not draft.device.pci:
        return f"sysfs gives no PCI address, by which {names[0]} finds the NIC", _NO_PCI
    return None


def refuse_law(draft: Draft, law: Law) -> tuple[str, str] | None:
    """Return why the device cannot run a law and what is nearest; None where it can."""
    model = draft.device.model
    if law in ("hybrid", "swift"):
        own = "on BlueField-3 as an algorithm of one's own for DOCA PCC; " if model == "BlueField-3" else ""
        why = "no firmware has it; it needs programmable congestion control"
        return why, f"{own}tuned DCQCN (law = dcqcn), or ZTR-RTTCC (law = rttcc)"
    if law in ("timely", "dctcp"):
        return "no firmware of NVIDIA has it", "law = dcqcn, or law = rttcc, which goes by RTT too"
    if law == "rttcc" and model not in _RTTCC:
        which = model if model in _NO_RTTCC else f"its model ({model or 'not one of those known here'})"
        verb = "has no" if model in _NO_RTTCC else "is not known to have"
        return f"{which} {verb} RTTCC, ConnectX-6 Dx and later do", "law = dcqcn"
    # It begins with a key of the firmware's configuration (`_rttcc`): no file of the driver turns it on.
    return refuse_tool(draft, "mlxconfig", "mstconfig") if law == "rttcc" else None


def draw_law(draft: Draft, law: Law) -> None:
    """Add the steps of a law that `refuse_law` let pass."""
    if law == "rttcc":
        _rttcc(draft)
    else:
        _enable(draft, law == "dcqcn")
    if law == "dcqcn":
        _end_rttcc(draft)
        _parameters(draft)


def draw_retransmission(draft: Draft) -> None:
    """Add the switches of ROCE_ACCL."""
    section = draft.profile.retransmission
    switches = [name for name in _ACCELERATIONS if getattr(section, name) is not None]
    if not switches:
        return
    if refusal := refuse_tool(draft, "mlxreg", "mstreg"):
        draft.cannot(", ".join(switches), *refusal)
        return
    tool = draft.find_tool("mlxreg", "mstreg")
    for name in switches:
        register, reason = _ACCELERATIONS[name]
        # The generations that lack RTTCC lack selective repeat too.
        if name == "selective_repeat" and draft.device.model in _NO_RTTCC:
            why = f"{draft.device.model} does not have it, ConnectX-6 Dx and later do"
            draft.cannot(register, why, "omit it from the profile")
            continue
        value = bool(getattr(section, name)) ^ (name == "ack_floor")  # the register disables the floor
        draft.tool(Register(tool, draft.device.pci, register), str(int(value)), reason, name=register, warning=LOST)


def _enable(draft: Draft, on: bool) -> None:
    """Congestion control of the profile's priority: OFED has a switch for each, the firmware a mask."""
    device, priority = draft.device, draft.profile.traffic.priority
    reason = "congestion control of the profile's priority"
    if device.has(_OFED):
        # The notification point answers marks with CNPs, the reaction point slows down at them: one alone does nothing.
        for point in ("roce_np", "roce_rp"):
            path = f"sys/class/net/{device.netdev}/ecn/{point}/enable/{priority}"
            draft.file(_OFED, path, int(on), reason, warning=LOST)
        return
    tool = draft.find_tool("mlxconfig", "mstconfig")
    if draft.profile.firmware.persist and tool and device.pci:
        _mask(draft, tool, on, reason)
    elif on:
        draft.note("this driver switches no single priority; the firmware's default is congestion control on all")
    else:
        remedy = "MLNX_OFED's driver, or firmware.persist = true with mlxconfig"
        draft.cannot("law = none", "this driver switches no single priority", remedy)


def _mask(draft: Draft, tool: str, on: bool, reason: str) -> None:
    """The profile's priority in the firmware's mask; those of others stay."""
    key, bit = f"ROCE_CC_PRIO_MASK{draft.device.port_suffix}", 1 << draft.profile.traffic.priority
    present = draft.present(Firmware(tool, draft.device.pci, key))
    if present is not None:
        # One bit for each of the eight priorities, so all of them are 255.
        configure(draft, tool, key, int(present) | bit if on else int(present) & ~bit, reason, allowed=(0, 255))
    elif draft.tools.runs:
        why = f"{tool} does not print what it is now, and other priorities' bits must stay"
        draft.cannot(key, why, "plan on the host itself, with mstflint's or MFT's mlxconfig")
    else:
        draft.note(f"{key}: not read under --root; on the host itself the profile's priority is set in it")


def _end_rttcc(draft: Draft) -> None:
    """DCQCN as the firmware's only law, and the slot that forces RTTCC enabled, as both are by default."""
    device = draft.device
    if device.model in _NO_RTTCC:
        return
    # Either may be left from a profile with law = rttcc; DCQCN's parameters would then be set and have no effect.
    tool, register = draft.find_tool("mlxconfig", "mstconfig"), draft.find_tool("mlxreg", "mstreg")
    key = Firmware(tool, device.pci, _LEGACY) if tool and device.pci else None
    if key is not None and draft.present(key) is not None:
        configure(draft, tool, _LEGACY, 1, "the firmware runs DCQCN alone", allowed=(0, 1))
    else:
        draft.note(f"{_UNSEEN}: {_LEGACY} cannot be read (mlxconfig)")
    slot = Algorithm(register, device.pci, _FORCING_SLOT) if register and device.pci else None
    if slot is not None and draft.present(slot) is not None:
        reason = "with this slot disabled every queue pair would run RTTCC"
        draft.tool(slot, "1", reason, name=f"PPCC slot {_FORCING_SLOT}", warning=LOST)
    else:
        draft.note(f"{_UNSEEN}: PPCC slot {_FORCING_SLOT} cannot be read (mlxreg)")


def _parameters(draft: Draft) -> None:
    """DCQCN's parameters and the marking of CNPs, by the way that the driver has."""
    device, profile = draft.device, draft.profile
    for name, value in profile.dcqcn.items():
        if _too_fast(name, value, _line_mbps(draft)):
            draft.cannot(name, f"{value} Mb/s is above the port's rate", f"{device.rate_mbps} Mb/s or less")
    rates = [name for name in profile.dcqcn if PARAMETERS[name].unit == "Mb/s"]
    if rates and not _line_mbps(draft):
        draft.note(f"its link is {device.state or 'unknown'}: not compared with the port's rate: {', '.join(rates)}")
    tool = draft.find_tool("mlxconfig", "mstconfig")
    # Also where only root may look: the plan then lists the files with values that are not known.
    if device.has(_DEBUG) or _DEBUG in device.closed:
        _by_debugfs(draft)
    elif device.has(_OFED):
        _by_sysfs(draft)
    elif not (profile.firmware.persist and tool and device.pci):
        why, remedy = "sysfs gives no PCI address, which names its folder in debugfs", _NO_PCI
        if device.pci:
            why = f"/{MLX5_DEBUG}/{device.pci}/cc_params is not there"
            remedy = "mount debugfs as root, or set firmware.persist = true with mlxconfig installed"
        draft.cannot("dcqcn, cnp", why, remedy)
    if profile.firmware.persist:
        if refusal := refuse_tool(draft, "mlxconfig", "mstconfig"):
            draft.cannot("firmware.persist", *refusal)
        else:
            _by_firmware(draft, tool)


def _by_debugfs(draft: Draft) -> None:
    folder = f"{MLX5_DEBUG}/{draft.device.pci}/cc_params"
    for name, value in _in_order(draft):
        known = PARAMETERS[name]
        draft.file(
            _DEBUG, f"{folder}/{name}", value, known.meaning, allowed=(known.low, known.high), unit=known.unit,
            warning=LOST,
        )  # fmt: skip
    cnp = draft.profile.cnp
    draft.file(_DEBUG, f"{folder}/np_cnp_dscp", cnp.dscp, "DSCP of CNPs", allowed=(0, 63), warning=LOST)
    draft.file(
        _DEBUG, f"{folder}/np_cnp_prio", cnp.priority, "priority of CNPs", allowed=(0, 7), warning=LOST,
        # cong.c sets the mode to 0 along with the priority: an undo needs the mode's old value too.
        touches=("np_cnp_prio_mode",),
    )  # fmt: skip
    draft.file(_DEBUG, f"{folder}/np_cnp_prio_mode", 0, "CNPs take that priority, not the request's", warning=LOST)


def _by_sysfs(draft: Draft) -> None:
    folder, cnp = f"sys/class/net/{draft.device.netdev}/ecn", draft.profile.cnp
    for name, value in _in_order(draft):
        known = PARAMETERS[name]
        # mlx5's names begin with rp_ or np_, OFED's two folders end so; its files have mlxconfig's names in lower case.
        path = f"{folder}/roce_{name[:2]}/{known.key.lower()}"
        draft.file(_OFED, path, value, known.meaning, allowed=(known.low, known.high), unit=known.unit, warning=LOST)
    draft.file(_OFED, f"{folder}/roce_np/cnp_dscp", cnp.dscp, "DSCP of CNPs", allowed=(0, 63), warning=LOST)
    draft.file(_OFED, f"{folder}/roce_np/cnp_802p_prio", cnp.priority, "priority of CNPs", allowed=(0, 7), warning=LOST)


def _by_firmware(draft: Draft, tool: str) -> None:
    """Add DCQCN's parameters and the CNP's marks to the plan, as settings of the firmware."""
    suffix, cnp = draft.device.port_suffix, draft.profile.cnp
    for name, value in _in_order(draft):
        known = PARAMETERS[name]
        allowed = (known.low, known.high)
        configure(draft, tool, f"{known.key}{suffix}", value, known.meaning, known.unit, allowed=allowed)
    configure(draft, tool, f"CNP_DSCP{suffix}", cnp.dscp, "DSCP of CNPs", allowed=(0, 63))
    configure(draft, tool, f"CNP_802P_PRIO{suffix}", cnp.priority, "priority of CNPs", allowed=(0, 7))


def _rttcc(draft: Draft) -> None:
    """Add the settings that make every queue pair run ZTR-RTTCC: firmware, slot, and DSCP of RTT answers."""
    device = draft.device
    draft.note("ZTR-RTTCC needs NICs that have it at both ends of a queue pair")
    tool = draft.find_tool("mlxconfig", "mstconfig")
    configure(draft, tool, _LEGACY, 0, "the firmware may run other laws than DCQCN", allowed=(0, 1))
    # The row that `configure` has just added: of programs' settings only a register may be missing instead.
    if draft.rows[-1].differs:
        slot = f"PPCC slot {_FORCING_SLOT}"
        draft.note(f"RTTCC needs two turns: {_LEGACY} holds after a firmware reset, which loses {slot}: "
                   "reset the firmware, then apply again")  # fmt: skip
    if refusal := refuse_tool(draft, "mlxreg", "mstreg"):
        draft.cannot("PPCC", *refusal)
    else:
        setting = Algorithm(draft.find_tool("mlxreg", "mstreg"), device.pci, _FORCING_SLOT)
        reason = "with this slot disabled every queue pair runs RTTCC"
        draft.tool(setting, "0", reason, name=f"PPCC slot {_FORCING_SLOT}", warning=LOST)
    if draft.profile.rtt_response_dscp is not None:
        folder = f"{MLX5_DEBUG}/{device.pci}/cc_params"
        reason = "DSCP of answers to RTT probes"
        draft.file(
            _DEBUG, f"{folder}/rtt_resp_dscp", draft.profile.rtt_response_dscp, reason, allowed=(0, 63), warning=LOST,
            # cong.c sets it along with the DSCP: its old value must be known before.
            touches=("rtt_resp_dscp_valid",),
        )  # fmt: skip
        draft.file(_DEBUG, f"{folder}/rtt_resp_dscp_valid", 1, "that DSCP is used", warning=LOST)


def configure(
    draft: Draft, tool: str, key: str, value: int, reason: str, unit: str = "", *, allowed: tuple[int, int]
) -> None:
    """Add a key of the firmware's configuration."""
    warning, setting = _RESET.format(pci=draft.device.pci), Firmware(tool, draft.device.pci, key)
    draft.tool(setting, str(value), reason, name=key, unit=unit, warning=warning, allowed=allowed)


def _in_order(draft: Draft) -> list[tuple[str, int]]:
    """The profile's parameters without those that are above this port's rate, which is documented as their limit."""
    values, line = draft.profile.dcqcn, _line_mbps(draft)
    # By the table, not as the file has them: plans of equal profiles are equal, line by line.
    return [(name, values[name]) for name in PARAMETERS if name in values and not _too_fast(name, values[name], line)]


def _line_mbps(draft: Draft) -> int:
    """The port's rate; 0 while its link is down, for then the kernel shows another."""
    return draft.device.rate_mbps if draft.device.state == "ACTIVE" else 0


def _too_fast(name: str, value: int, line_mbps: int) -> bool:
    return PARAMETERS[name].unit == "Mb/s" and 0 < line_mbps < value
