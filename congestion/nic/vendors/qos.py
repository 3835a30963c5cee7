"""Settings that all NICs have alike: lossless priorities, the map of DSCPs, pause of the link, the TOS of RDMA-CM.

By `dcb` of iproute2 (dcb-pfc(8), dcb-app(8)), on NVIDIA by `mlnx_qos` where it is installed: both drive the same tables
of the kernel. TOS: Documentation/ABI/testing/configfs-rdma_cm of Linux. Not covered: shares of bandwidth between
classes.
"""

from __future__ import annotations

from congestion.nic.hosts.inventory import CM_CONFIG
from congestion.nic.profile.draft import Draft
from congestion.nic.vendors.tool_settings import DcbApp, DcbPfc, MlnxDscp, MlnxPfc, MlnxTrust, Pause

_MARKED = "RDMA packets of this DSCP ride in the profile's priority"
_CNPS = "CNPs ride in a priority of their own"
_LOSSLESS = "lossless priorities of the profile"


def draw_qos(draft: Draft) -> None:
    """Add the steps of priorities and pause."""
    device = draft.device
    if device.vendor == "soft" or not device.netdev:
        why = "it is a software device" if device.vendor == "soft" else "it has no network device"
        draft.note(f"no priorities and no pause to set: {why}")
        return
    _priorities(draft)
    if draft.profile.link_pause is not None:
        _pause(draft, draft.profile.link_pause)


def draw_tos(draft: Draft) -> None:
    """Add the TOS of connections that RDMA-CM makes."""
    device, tos = draft.device, draft.profile.traffic.tos
    if device.has("rdma-cm") or "rdma-cm" in device.closed:
        group = f"{CM_CONFIG}/{device.name}"
        reason = "DSCP and ECN bits of connections that RDMA-CM makes"
        draft.file("rdma-cm", f"{group}/ports/1/default_roce_tos", tos, reason, allowed=(0, 255), group=group)
    else:
        remedy = f"load rdma_cm and mount configfs; NCCL sets its own by NCCL_IB_TC={tos}"
        draft.cannot("default_roce_tos", f"/{CM_CONFIG} is not there", remedy)


def _priorities(draft: Draft) -> None:
    netdev, profile = draft.device.netdev, draft.profile
    names = ("mlnx_qos", "dcb") if draft.device.vendor == "nvidia" and draft.tools.runs else ("dcb",)
    tool = draft.find_tool(*names)
    if not tool:
        draft.cannot("priorities", f"neither of {', '.join(names)} is installed", "install iproute2, which has dcb")
        return
    lossless = "".join("1" if priority in profile.pfc.priorities else "0" for priority in range(8))
    maps = [(profile.traffic.dscp, profile.traffic.priority, _MARKED)]
    if profile.cnp.dscp != profile.traffic.dscp:
        maps.append((profile.cnp.dscp, profile.cnp.priority, _CNPS))
    if tool == "mlnx_qos":
        reason = "packets are sorted by DSCP"
        draft.tool(MlnxTrust(tool, netdev), "dscp", reason, name="trust")
        draft.tool(MlnxPfc(tool, netdev), lossless, _LOSSLESS, name="pfc", unit="priorities 0..7")
        for dscp, priority, why in maps:
            draft.tool(MlnxDscp(tool, netdev, str(dscp)), str(priority), why, name=f"dscp {dscp}", unit="priority")
    else:
        draft.tool(DcbPfc(tool, netdev), lossless, _LOSSLESS, name="pfc", unit="priorities 0..7")
        for dscp, priority, why in maps:
            draft.tool(DcbApp(tool, netdev, str(dscp)), str(priority), why, name=f"dscp {dscp}", unit="priority")


def _pause(draft: Draft, on: bool) -> None:
    tool = draft.find_tool("ethtool")
    if not tool:
        draft.cannot("link_pause", "ethtool is not installed", "install ethtool")
        return
    word = "on" if on else "off"
    reason = "the profile pauses the whole link" if on else "pause of the whole link would stop every priority"
    draft.tool(Pause(tool, draft.device.netdev), f"rx {word} tx {word}", reason, name="pause")
