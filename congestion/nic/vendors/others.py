"""Broadcom (bnxt_re), Intel (irdma) and AMD (ionic): what of a profile each of them takes, and by which files.

Broadcom: configfs of its own driver, which keeps what is written until `apply`, or debugfs of Linux
(`drivers/infiniband/hw/bnxt_re/debugfs.c`). Intel: configfs of its own driver; Linux's has none. AMD: the DCQCN
profiles of the ionic RDMA driver. Their other parameters are theirs alone: what has no equal is said, not guessed.
"""

from __future__ import annotations

from congestion.nic.hosts.inventory import BNXT_CONFIG, BNXT_DEBUG, IRDMA_CONFIG, ionic_folder
from congestion.nic.profile.draft import Draft
from congestion.nic.profile.file import Law
from congestion.nic.profile.parameters import PARAMETERS

_INTEL_LAWS = ("dcqcn", "dctcp", "timely")
_LOST = "lost when the driver is loaded again"


def refuse_broadcom(draft: Draft, law: Law) -> tuple[str, str] | None:
    """Return why the device cannot run a law and what is nearest; None where it can."""
    if law not in ("dcqcn", "none"):
        return "no firmware of Broadcom has it", "law = dcqcn"
    device = draft.device
    if {"bnxt-configfs", "bnxt-debugfs"}.isdisjoint((*device.surfaces, *device.closed)):
        return f"neither /{BNXT_CONFIG} nor /{BNXT_DEBUG} is there", "mount configfs and debugfs as root"
    return None


def draw_broadcom(draft: Draft, law: Law) -> None:
    """Add the steps of a law that was let pass, and of marking."""
    _no_parameters(draft, "its DCQCN has parameters of its own, by other names", "its defaults")
    device, profile, on = draft.device, draft.profile, int(law == "dcqcn")
    mark, lane = (0, 63), (0, 7)
    if device.has("bnxt-configfs"):
        group = f"{BNXT_CONFIG}/{device.name}"
        steps = [
            ("ecn_marking", int(profile.traffic.ecn), (0, 1), "packets say that they understand marks"),
            ("ecn_enable", on, (0, 1), "congestion control"),
            *([("cc_mode", 1, (0, 1), "DCQCN as Broadcom's setup sets it")] if on else []),
            ("cnp_prio", profile.cnp.priority, lane, "priority of CNPs"),
            ("roce_prio", profile.traffic.priority, lane, "priority of RDMA packets"),
            ("roce_dscp", profile.traffic.dscp, mark, "DSCP of RDMA packets"),
            ("cnp_dscp", profile.cnp.dscp, mark, "DSCP of CNPs"),
        ]
        for name, value, allowed, reason in steps:
            path = f"{group}/ports/1/cc/{name}"
            draft.file("bnxt-configfs", path, value, reason, allowed=allowed, group=group, warning=_LOST)
        draft.trigger("bnxt-configfs", f"{group}/ports/1/cc/apply", "the driver takes what stands there", group)
        return
    folder = f"{BNXT_DEBUG}/{device.pci}/cc_config"
    steps = [
        ("enable_cc", on, (0, 1), "congestion control"),
        ("tos_ecn", int(profile.traffic.ecn), (0, 3), "packets say that they understand marks"),
        *([("cc_mode", 1, (0, 1), "DCQCN as Broadcom's setup sets it")] if on else []),
        ("tos_dscp", profile.traffic.dscp, mark, "DSCP of RDMA packets"),
        ("alt_vlan_pcp", profile.cnp.priority, lane, "priority of CNPs"),
        ("alt_vlan_dscp", profile.cnp.dscp, mark, "DSCP of CNPs"),
    ]
    for name, value, allowed, reason in steps:
        draft.file("bnxt-debugfs", f"{folder}/{name}", value, reason, allowed=allowed, warning=_LOST)


def refuse_intel(draft: Draft, law: Law) -> tuple[str, str] | None:
    """Return why Intel's driver cannot run the law, as `refuse_broadcom` does."""
    if law in ("hybrid", "swift", "rttcc"):
        return "no driver of Intel has it", "TIMELY, which goes by RTT too (law = timely), or law = dcqcn"
    if not draft.device.has("irdma-configfs") and "irdma-configfs" not in draft.device.closed:
        return f"/{IRDMA_CONFIG} is not there: Linux's own driver has no such switch", "Intel's driver irdma, configfs"
    return None


def draw_intel(draft: Draft, law: Law) -> None:
    """Add Intel's switches of the law, as `draw_broadcom` does."""
    _no_parameters(
        draft,
        "the driver takes them when it is loaded",
        "options of the module irdma: dcqcn_cc_cfg_valid=1, dcqcn_min_rate_MBps, dcqcn_rai_factor, dcqcn_hai_factor",
    )
    group = f"{IRDMA_CONFIG}/{draft.device.name}"
    for name in sorted(_INTEL_LAWS, key=lambda one: one == law):  # off before on: never two of them
        reason = "the profile's law" if name == law else "another law"
        path = f"{group}/roce_{name}_enable"
        warning = f"{_LOST}; queue pairs that are there keep their law"
        draft.file("irdma-configfs", path, int(name == law), reason, group=group, warning=warning)
    draft.note("CNPs are marked by the driver; it has no file for their DSCP and priority")


def refuse_amd(draft: Draft, law: Law) -> tuple[str, str] | None:
    """Return why AMD's driver cannot run the law, as `refuse_broadcom` does."""
    if law not in ("dcqcn", "none"):
        return "no firmware of AMD has it", "law = dcqcn"
    if not draft.device.has("ionic-dcqcn"):
        why = "only root may look" if "ionic-dcqcn" in draft.device.closed else "this driver has no DCQCN profiles"
        return why, "a driver with ionic_dcqcn, debugfs mounted, as root"
    return None


def draw_amd(draft: Draft, law: Law) -> None:
    """Add AMD's settings of the law: the driver's profile 1 is written, and chosen for every queue pair to come."""
    device, profile = draft.device, draft.profile
    folder = ionic_folder(draft.tree, device.name, device.pci)
    if law == "dcqcn":
        values = profile.dcqcn
        for name in (name for name in PARAMETERS if name in values):
            _amd_parameter(draft, f"{folder}/profiles/1", name, values[name])
        below = f"{folder}/profiles/1/roce_np"
        warning = _LOST
        draft.file(
            "ionic-dcqcn", f"{below}/cnp_dscp", profile.cnp.dscp, "DSCP of CNPs", allowed=(0, 63), warning=warning
        )
        draft.file(
            "ionic-dcqcn", f"{below}/icnp_802p_prio", profile.cnp.priority, "priority of CNPs", allowed=(0, 7),
            warning=warning,
        )  # fmt: skip
        draft.note("the firmware must be in the mode in which drivers set DCQCN, else it takes these without effect")
    reason = "queue pairs to come run the driver's profile 1" if law == "dcqcn" else "queue pairs to come run none"
    draft.file("ionic-dcqcn", f"{folder}/match_default", int(law == "dcqcn"), reason, allowed=(0, 8), warning=_LOST)


def _amd_parameter(draft: Draft, folder: str, name: str, value: int) -> None:
    """Add one DCQCN parameter of AMD's ionic driver to the plan, or say why it cannot be had there."""
    known, unit = PARAMETERS[name], PARAMETERS[name].unit
    if not known.ionic:
        draft.cannot(name, "the driver has no such parameter", "omit it from the profile")
        return
    if name == "rp_time_reset":  # there it counts periods of alpha
        period = draft.profile.dcqcn.get("rp_dce_tcp_rtt")
        if period is None:
            draft.cannot(name, "it counts periods of rp_dce_tcp_rtt there", "give rp_dce_tcp_rtt in the profile too")
            return
        value, unit = max(round(value / period), 1), f"x {period} us"
    if not known.ionic_low <= value <= known.ionic_high:
        if draft.tree.text(f"{folder}/{known.ionic}") != str(value):  # the driver may start with what it does not take
            rule = f"{value} is out of its range there, {known.ionic_low}..{known.ionic_high}"
            draft.cannot(name, rule, f"{known.ionic_low if value < known.ionic_low else known.ionic_high}")
        return
    draft.file(
        "ionic-dcqcn", f"{folder}/{known.ionic}", value, known.meaning, unit=unit, warning=_LOST,
        allowed=(known.ionic_low, known.ionic_high),
    )  # fmt: skip


def _no_parameters(draft: Draft, why: str, nearest: str) -> None:
    if draft.profile.dcqcn:
        draft.cannot(f"dcqcn ({len(draft.profile.dcqcn)} parameters)", why, nearest)
