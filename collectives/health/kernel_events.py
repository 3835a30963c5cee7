"""Kernel log messages other than XIDs: panics, hardware errors, PCIe, memory, NICs, applications.

Messages are from Linux (arch/x86/kernel/cpu/mce, drivers/edac, drivers/pci/pcie/aer.c, mm/oom_kill.c,
drivers/firmware/efi/cper.c, kernel/watchdog.c), mlx5_core and NVIDIA's driver. FAIL means that the node or part cannot
be used as it is; corrected errors and application errors are WARN.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from netlayer.verdict import Verdict

_BUS = r"(?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2}(?:\.[0-9a-fA-F])?"
_PCIE_ERROR = rf"(?:(?P<driver>[a-z][\w-]{{1,30}}) )?(?P<bus>{_BUS}): .{{0,12}}PCIe Bus Error: severity="
_REBOOT = "drain the node, keep its log and reboot it; if it recurs, replace what the lines before it name"
_MEMORY = "drain the node and replace the memory module that is named (ras-mc-ctl --error-count, BMC's event log)"
_WATCH_MEMORY = "watch the count (ras-mc-ctl --error-count): corrected; replace the module if it grows daily"
_PCIE = "drain the node, reseat the card and its riser, then read lspci -vv (LnkSta, UESta) of every bridge above it"
_WATCH_PCIE = "watch the count: the link repeated the transfer; reseat the card if it grows hourly"
_APPLICATION = "look at the application: this is no fault of the node"
_LOCKUP = "see what that CPU did (the call trace below): a driver or storage may hang; reboot if it does not end"
_LOAD_PEERMEM = "see that nvidia_peermem fits the driver and the NIC's driver, or that NCCL uses DMA-BUF instead of it"


# Message of a root port about an error message that it received; the device's own line follows.
ROOT_PORT = "PCIe (message)"


class Event(NamedTuple):
    """A kind of message.

    Args:
        pattern: its pattern.
        verdict: its verdict; None for a harmless message that a later pattern would match.
        check: name of the check.
        step: next step.
        subject: template of the subject, with the pattern's named groups; empty for the node.
        needs: text that every match contains, tested first because a failing match is slow.
    """

    pattern: re.Pattern[str]
    verdict: Verdict | None
    check: str
    step: str
    subject: str = ""
    needs: str = ""

    def search(self, message: str) -> re.Match[str] | None:
        """Match a message; None if it is not of this kind."""
        return self.pattern.search(message) if self.needs in message else None


# Candidates for `Event.needs`; the first one in a pattern is used.
_NEEDS = (
    "PCIe Bus Error", "AER: ", "segfault at", "config space inaccessible", "error, dev ", "Remounting filesystem",
    "mlx5_core ", "NVRM: ", "rcu", "Memory failure", "EDAC ", "Bank ", "blocked for more than", "NETDEV WATCHDOG",
)  # fmt: skip


def _event(pattern: str, verdict: Verdict | None, check: str, step: str = "", subject: str = "") -> Event:
    needs = next((part for part in _NEEDS if part in pattern and "|" not in pattern.partition(part)[0]), "")
    return Event(re.compile(pattern), verdict, check, step, subject, needs)


# The first match counts.
EVENTS = (
    # NVIDIA's driver.
    _event(rf"NVRM: GPU (?:at )?(?:PCI:)?(?P<bus>{_BUS}):? .{{0,40}}fallen off the bus", "FAIL", "fell off the bus",
           "drain the node and power-cycle it; where {} does not come back, reseat or return it", "GPU {bus}"),
    _event(rf"NVRM: GPU (?P<bus>{_BUS}): (?:RmInitAdapter|rm_init_adapter) failed", "FAIL", "driver",
           "drain the node and reboot it; where {} does not start, see that the driver knows it, then return it",
           "GPU {bus}"),
    _event(r"NVRM: .{0,200}NV_ERR_RESET_REQUIRED", "FAIL", "reset required",
           "drain the node and reset the GPU whose XID stands before it (nvidia-smi -q names it)"),
    _event(r"NVRM: API mismatch", "WARN", "driver",
           "unload and load the driver, or reboot: the kernel's module and the libraries are of two versions"),
    _event(rf"nvidia: probe of (?P<bus>{_BUS}) failed with error", "FAIL", "driver",
           "read the lines of NVRM before it: the driver did not take {}", "GPU {bus}"),
    _event(r"NVRM: (?:GPU\d+ )?knvlink\w{0,80}: .{0,120}(?:failed|Failed|Error)", "WARN", "NVLink",
           "read nvidia-smi nvlink -s and the fabric manager's log: the driver could not bring a link up"),
    _event(r"nvidia[-_]peermem.{0,80}(?:Unknown symbol|disagrees about version)", "WARN", "nvidia_peermem",
           "GPUDirect RDMA through nvidia_peermem is off: " + _LOAD_PEERMEM),
    _event(r"nvidia[-_]peermem.{0,80}(?:ERROR|error|invalid)", "WARN", "nvidia_peermem",
           "a transfer lost its GPU memory: restart the application; if it recurs, " + _LOAD_PEERMEM),
    # Panics and lockups.
    _event(r"[Ss]ys[Rr]q ?: .{0,12}[Tt]rigger a crash", "WARN", "crash by hand",
           "ask who wrote to /proc/sysrq-trigger: the panic after it was intended"),
    _event(r"Kernel panic - not syncing: sysrq triggered", "WARN", "crash by hand",
           "ask who wrote to /proc/sysrq-trigger: the panic was intended"),
    _event(r"Kernel panic - not syncing: .{0,120}", "FAIL", "kernel panic", _REBOOT),
    _event(r"Watchdog detected hard LOCKUP on cpu|hard LOCKUP", "FAIL", "hard lockup", _REBOOT),
    _event(r"BUG: (?:unable to handle|kernel NULL pointer|Bad page)|kernel BUG at|Oops: |Unable to handle kernel",
           "FAIL", "kernel oops", _REBOOT),
    _event(r"general protection fault(?:, .{0,80})?: [0-9a-f]{4} \[#\d", "FAIL", "kernel oops", _REBOOT),
    _event(r"soft lockup - CPU#?\d+ stuck", "WARN", "soft lockup", _LOCKUP),
    _event(r"rcu: INFO: rcu_\w+ .{0,40}(?:self-detected stall|detected stalls)|self-detected stall on CPU", "WARN",
           "CPU stall", _LOCKUP),
    _event(r"INFO: task .{1,80} blocked for more than \d+ seconds", "WARN", "hung task",
           "see what the task waits for (the call trace below): storage, network or a driver"),
    # Machine checks.
    _event(r"mce: CPU supports|Machine check polling|MCE: In-kernel MCE decoding|Thermal monitoring enabled", None, ""),
    _event(r"Package temperature above threshold|Core temperature above threshold|cpu clock throttled", "WARN",
           "CPU temperature", "look at fans and airflow of this node"),
    _event(r"Machine [Cc]heck Exception|Fatal [Mm]achine check|Processor context corrupt|Uncorrected hardware memory",
           "FAIL", "machine check", _REBOOT),
    # Bit 61 of a bank's status says that the error was not corrected (Intel SDM, vol. 3, machine-check architecture).
    _event(r"Machine [Cc]heck: \w{1,4} Bank \d+: [2367abef][0-9a-f]{15}\b", "FAIL", "machine check", _REBOOT),
    _event(r"Machine [Cc]heck: \w{1,4} Bank \d+: [0-9a-f]{16}\b", "WARN", "machine check (corrected)", _WATCH_MEMORY),
    _event(r"\[Hardware Error\]: .{0,40}(?:Corrected error|It has been corrected|Deferred error)", "WARN",
           "machine check (corrected)", _WATCH_MEMORY),
    _event(r"\[Hardware Error\]: .{0,40}[Uu]ncorrected", "FAIL", "machine check", _REBOOT),
    _event(r"event severity: (?:fatal|panic)", "FAIL", "hardware error", _REBOOT),
    _event(r"event severity: (?:corrected|recoverable)", "WARN", "hardware error (corrected)", _WATCH_MEMORY),
    _event(r"[Mm]achine check events logged", "WARN", "machine check (logged)",
           "read rasdaemon or mcelog for what it was: most are corrected ones"),
    _event(r"Memory failure: 0x[0-9a-f]+: (?!unhandlable|.{0,40}soft)|MCE: Killing .{1,60} due to hardware memory",
           "FAIL", "memory (uncorrected)", _MEMORY),
    # EDAC and its daemon; only lines that count an error.
    _event(r"EDAC (?P<mc>MC\d+): (?P<count>\d+) UE ", "FAIL", "memory (uncorrected)", _MEMORY, "memory {mc}"),
    _event(r"EDAC (?P<mc>MC\d+): (?P<count>\d+) CE ", "WARN", "memory (corrected)", _WATCH_MEMORY, "memory {mc}"),
    _event(r"EDAC (?P<mc>MC\d+): UE ", "FAIL", "memory (uncorrected)", _MEMORY, "memory {mc}"),
    _event(r"EDAC (?P<mc>MC\d+): CE ", "WARN", "memory (corrected)", _WATCH_MEMORY, "memory {mc}"),
    # PCIe. The line of the port that received the message is followed by one of the device: that one counts.
    _event(_PCIE_ERROR + "Correct", "WARN", "PCIe (corrected)", _WATCH_PCIE, "{driver} {bus}"),
    _event(_PCIE_ERROR + r"Uncorrect\w+ \(Fatal\)", "FAIL", "PCIe (fatal)", _PCIE, "{driver} {bus}"),
    _event(_PCIE_ERROR + "Uncorrect", "WARN", "PCIe (uncorrected, not fatal)", _WATCH_PCIE, "{driver} {bus}"),
    _event(rf"(?P<driver>[\w-]{{1,30}}) (?P<bus>{_BUS}): AER: [Dd]evice recovery failed", "FAIL", "PCIe (fatal)",
           _PCIE, "{driver} {bus}"),
    # Dropped by `kernel` if the log has the devices' own lines too.
    _event(rf"AER: (?:Multiple )?Uncorrect\w+ \(Fatal\) error (?:message )?received(?: from|:) (?P<bus>{_BUS})", "FAIL",
           ROOT_PORT, _PCIE, "PCIe {bus}"),
    _event(rf"AER: (?:Multiple )?(?:Un)?[Cc]orrect\w+ .{{0,14}}error (?:message )?received(?: from|:) (?P<bus>{_BUS})",
           "WARN", ROOT_PORT, _WATCH_PCIE, "PCIe {bus}"),
    _event(rf"(?P<bus>{_BUS}): .{{0,60}}config space inaccessible", "WARN", "PCIe (no answer)",
           "see whether this device is meant to be on: it does not answer", "PCIe {bus}"),
    _event(rf"pcieport (?P<bus>{_BUS}): DPC: containment event", "FAIL", "PCIe (link shut)", _PCIE,
           "pcieport {bus}"),
    _event(rf"pcieport (?P<bus>{_BUS}): pciehp: Slot\(.{{1,20}}\): Link Down", "WARN", "PCIe slot",
           "see whether somebody took the card out; where not, reseat it", "pcieport {bus}"),
    # NICs.
    _event(rf"mlx5_core (?P<bus>{_BUS}).{{0,60}}(?:device's health compromised|Fatal error \d+ detected|"
           r"firmware internal error|assert_var|mlx5_error_sw_reset)", "FAIL", "NIC firmware",
           "drain the node, update the firmware of {} or power-cycle it; return it if it recurs", "NIC {bus}"),
    _event(rf"mlx5_core (?P<bus>{_BUS}).{{0,60}}[Dd]etected insufficient power on the PCIe slot", "WARN", "NIC power",
           "see that the slot gives {} its power and that its auxiliary cable is in", "NIC {bus}"),
    _event(rf"mlx5_core (?P<bus>{_BUS}).{{0,60}}Port module event.{{0,20}}: module \d+, Cable (?:error|unsupported)",
           "WARN", "NIC cable", "swap cable or transceiver of {}: the NIC does not accept it", "NIC {bus}"),
    _event(rf"mlx5_core (?P<bus>{_BUS}).{{0,80}}High [Tt]emperature", "WARN", "NIC temperature",
           "look at the airflow over {} and its transceiver", "NIC {bus}"),
    _event(rf"mlx5_core (?P<bus>{_BUS}).{{0,120}}(?:[Tt]imeout\. Will cause a leak|TX timeout detected)", "WARN",
           "NIC command", "update the firmware of {}; power-cycle the node if it recurs", "NIC {bus}"),
    _event(rf"mlx5_core (?P<bus>{_BUS}).{{0,80}}available PCIe bandwidth, limited by", "WARN", "NIC PCIe",
           "see whether the slot of {} is as wide and fast as the card, or reseat it (lspci -vv, LnkSta)",
           "NIC {bus}"),
    _event(rf"mlx5_core (?P<bus>{_BUS}).{{0,60}}ACCESS_REG\(0x805\).{{0,30}}failed", None, ""),
    _event(r"NETDEV WATCHDOG: (?P<net>\S{1,20}) .{0,60}timed out", "WARN", "NIC transmit",
           "see whether the link of {} hangs (ethtool -S); update its driver or firmware if it recurs",
           "{net}"),
    # Applications and the node's own software.
    _event(r"(?:Out of memory|Memory cgroup out of memory): Kill(?:ed)? process", "WARN", "out of memory",
           "give the job more host memory, or let it use less: no fault of the node"),
    _event(r"(?P<program>\S{1,40})\[\d+\]: segfault at .{0,120} in (?P<library>libnccl\.so|libcuda|lib\w+)", "WARN",
           "segfault", _APPLICATION),
    _event(r"VFS: file-max limit \d+ reached", "WARN", "open files", "raise fs.file-max of this node"),
    _event(r"(?P<disk>\w{2,10}-fs \([\w-]{1,30}\)): .{0,20}Remounting filesystem read-only", "WARN", "disk",
           "read smartctl and the lines before it: files on it cannot be written any more", "{disk}"),
    _event(r"(?:blk_update_request: )?(?:critical medium|I/O) error, dev (?P<disk>\w{1,20})", "WARN", "disk",
           "read smartctl of {}: files on it may be lost", "disk {disk}"),
)  # fmt: skip

# A line without any of these matches no event, so that not every pattern is tried on every line.
MARKS = (
    "NVRM: ", "SXid", "nvidia", "anic", "LOCKUP", "lockup", "BUG", "Oops", "Unable to handle", "ysRq", "ysrq",
    "general protection", "stall", "blocked for more", "mce", "MCE", "achine check", "achine Check", "Hardware Error",
    "severity", "Memory failure", "EDAC", "PCIe", "AER", "DPC", "pciehp", "mlx5", "NETDEV WATCHDOG", "ut of memory",
    "segfault", "file-max", "error, dev", "Remounting", "inaccessible", "temperature", "throttled", "carrier",
)  # fmt: skip
# Messages that identify a kernel log whose lines have no time stamps.
KNOWN = re.compile(
    r"NVRM: |SXid \(|Kernel panic - not syncing|mce: \[Hardware Error\]|"
    r"EDAC MC\d+: \d+ [CU]E |"
    r"PCIe Bus Error: severity=|soft lockup - CPU#|nvidia-peermem nv_|Out of memory: Kill|RmInitAdapter failed|"
    r"blocked for more than \d+ seconds"
)
