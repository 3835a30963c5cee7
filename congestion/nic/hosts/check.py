"""Whether a host has the NICs that the cluster file says: how many, and how fast.

A host may have more RDMA devices than those of the fabric (storage, management): what counts is how many run at the
fabric's rate. Not covered: GPUs, and to which ToR a NIC is wired (`netlayer topology probe`).
"""

from __future__ import annotations

from collections.abc import Sequence

from congestion.nic.hosts.inventory import Device
from netlayer.config.tree import ClusterConfig
from netlayer.units import format_rate


def of_fabric(devices: Sequence[Device], cluster: ClusterConfig) -> list[Device]:
    """The devices that are NICs of the cluster's fabric: RoCE, up, at its rate."""
    return [one for one in devices if _wrong(one, cluster) == ""]


def differences(devices: Sequence[Device], cluster: ClusterConfig) -> list[str]:
    """Return a line for each difference between a host's NICs and the cluster file; empty if there is none."""
    good, expected = len(of_fabric(devices, cluster)), cluster.nics_per_server
    if good == expected:
        return []
    counted = f"{good} of {expected}" if good < expected else f"{good}, not {expected}"
    messages = [f"NICs at {format_rate(cluster.nic_bps)}: {counted}"]
    if good < expected:
        messages += [f"{one.name}: {wrong}" for one in devices if (wrong := _wrong(one, cluster))]
    return messages


def _wrong(device: Device, cluster: ClusterConfig) -> str:
    """Return why it is none of the fabric's; empty where it is one."""
    if device.vendor == "soft":
        return "a software device"
    if not device.roce:
        return device.link_layer or "no link layer"
    if device.state != "ACTIVE":
        return device.state or "no state"
    if device.rate_mbps * 10**6 != cluster.nic_bps:
        return format_rate(device.rate_mbps * 1e6) if device.rate_mbps else "no rate"
    return ""
