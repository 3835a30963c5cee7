"""Kernel logs in many formats: XIDs, and faults of node, PCIe, memory and NICs that have no number."""

from __future__ import annotations

import json

import pytest

from bench.accept.evidence import kernel
from tests.bench.evidence_helpers import bad, read, verdicts

XID = "NVRM: Xid (PCI:0000:3b:00): 79, pid=4711, name=python3, GPU has fallen off the bus."
# What stands before the words, and whether it names the host.
STAMPS = {
    "dmesg": ("[12345.678901] ", ""),
    "dmesg -x": ("kern  :warn  : [12345.678901] ", ""),
    "dmesg -T": ("[Tue Jan 21 04:41:44 2025] ", ""),
    "dmesg iso": ("kern  :warn  : 2025-01-21T04:41:44,283302+00:00 ", ""),
    "kmsg": ("4,3973,227996636,-;", ""),
    "pstore": ("<4>[  201.673948] ", ""),
    "journal short": ("Jan 21 04:41:44 node7 kernel: ", "node7"),
    "journal precise": ("Jan 21 04:41:44.123456 node7 kernel: ", "node7"),
    "journal iso": ("2025-01-21T04:41:44+0000 node7 kernel: ", "node7"),
    "journal full": ("Tue 2025-01-21 04:41:44 UTC node7 kernel: ", "node7"),
    "journal monotonic": ("[12345.678901] node7 kernel: ", "node7"),
    "syslog with uptime": ("Jan 21 04:41:44 node7 kernel: [12345.678901] ", "node7"),
    "rsyslog": ("2025-01-21T04:41:44.123456+01:00 node7.example kernel: [12345.678901] ", "node7.example"),
    "syslog with year": ("2025 Jan 21 04:41:44 node7 kernel: ", "node7"),
    "bare": ("", ""),
}


@pytest.mark.parametrize("form", STAMPS)
def test_an_xid_is_read_behind_any_stamp(form: str) -> None:
    stamp, host = STAMPS[form]
    log = read(f"{stamp}NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.15\n{stamp}{XID}\n")
    [finding] = log.findings
    assert (log.kind, log.host) == ("kernel log", host)
    assert (finding.verdict, finding.subject, finding.check) == ("FAIL", "GPU 0000:3b:00", "XID 79")
    assert "RESTART_BM" in finding.figure
    assert "power-cycle" in finding.next_step


def test_the_journal_as_json_is_read_line_by_line() -> None:
    records = [
        {"MESSAGE": XID, "_HOSTNAME": "node7", "SYSLOG_IDENTIFIER": "kernel", "_TRANSPORT": "kernel"},
        {"MESSAGE": list(b"NVRM: Xid (PCI:0000:5d:00): 94, Contained"), "_HOSTNAME": "node7", "_TRANSPORT": "kernel"},
        {"MESSAGE": f"saw {XID}", "_HOSTNAME": "node7", "SYSLOG_IDENTIFIER": "gpu-monitor", "_TRANSPORT": "stdout"},
    ]
    content = "\n".join(map(json.dumps, records)) + '\n{"MESSAGE": "cut of'
    assert read(content).host == "node7"
    assert bad(content) == {("GPU 0000:3b:00", "XID 79"): "FAIL", ("GPU 0000:5d:00", "XID 94"): "WARN"}


def test_dmesg_as_json_is_read() -> None:
    content = json.dumps({"dmesg": [{"pri": 4, "time": 12.5, "msg": XID}]}, indent=3)
    assert bad(content) == {("GPU 0000:3b:00", "XID 79"): "FAIL"}


def test_a_log_of_several_nodes_names_the_node_of_each_gpu() -> None:
    content = f"Jan 21 04:41:44 n1 kernel: {XID}\nJan 21 04:41:45 n2 kernel: {XID}\n"
    assert read(content).host == ""
    assert set(bad(content)) == {("n1: GPU 0000:3b:00", "XID 79"), ("n2: GPU 0000:3b:00", "XID 79")}


def test_other_programs_that_quote_the_kernel_are_passed_over() -> None:
    content = (
        "Jan 21 04:41:44 node7 kernel: NVRM: loading\n"
        f"Jan 21 04:41:45 node7 monitor[812]: alert: {XID}\n"
        "Jan 21 04:41:46 node7 kernel: usb 1-1: new device\n"
    )
    assert bad(content) == {}


@pytest.mark.parametrize("code", [13, 31, 43, 94])
def test_what_an_application_did_does_not_drain_the_node(code: int) -> None:
    content = f"[1.000000] NVRM: Xid (PCI:0000:3b:00): {code}, pid=1, name=python3, something\n"
    assert bad(content) == {("GPU 0000:3b:00", f"XID {code}"): "WARN"}


def test_messages_of_one_gpu_and_number_are_one_finding_that_counts_them() -> None:
    [finding] = read(f"[1.000000] {XID}\n[2.000000] {XID}\n[3.000000] {XID}\n").findings
    assert "(3 times)" in finding.figure
    assert finding.line == 1


def test_the_last_recovery_action_of_a_gpu_holds() -> None:
    step = "NVRM: Xid (PCI:0000:3b:00): 154, GPU recovery action changed from 0x{} ({}) to 0x{} ({})\n"
    reset_required = "[1.000000] NVRM: Xid (PCI:0000:3b:00): 95, Uncontained\n[2.000000] " + step.format(
        0, "None", 1, "GPU Reset Required"
    )
    assert bad(reset_required) == {("GPU 0000:3b:00", "XID 95"): "FAIL", ("GPU 0000:3b:00", "XID 154"): "FAIL"}
    reset = reset_required + "[9.000000] " + step.format(1, "GPU Reset Required", 0, "None")
    assert bad(reset) == {("GPU 0000:3b:00", "XID 95"): "WARN", ("GPU 0000:3b:00", "XID 154"): "WARN"}
    again = reset + "[99.000000] NVRM: Xid (PCI:0000:3b:00): 95, Uncontained\n"
    assert bad(again)["GPU 0000:3b:00", "XID 95"] == "FAIL"


def test_an_sxid_and_its_registers_are_one_finding() -> None:
    content = (
        "[1.000000] nvidia-nvswitch0: SXid (PCI:0000:a9:00.0): 20034, Fatal, Link 30 LTSSM Fault Up\n"
        "[1.000001] nvidia-nvswitch0: SXid (PCI:0000:a9:00.0): 20034, Data {0x50610002, 0x10100030}\n"
    )
    assert bad(content) == {("NVSwitch 0", "SXid 20034"): "FAIL"}


# line -> (subject, check, verdict); the subject is the file where the line is about the node.
EVENTS = {
    "NVRM: GPU 0000:29:00.0: GPU has fallen off the bus.": ("GPU 0000:29:00", "fell off the bus", "FAIL"),
    "NVRM: GPU 0000:1b:00.0: RmInitAdapter failed! (0x26:0x56:1474)": ("GPU 0000:1b:00", "driver", "FAIL"),
    "NVRM: nvAssertOkFailedNoLog: Assertion failed: Reset required [NV_ERR_RESET_REQUIRED] (0x00000062)": (
        "log", "reset required", "FAIL"),
    "NVRM: knvlinkDiscoverPostRxDetLinks_GH100: Getting peer0's postRxDetLinkMask failed!": ("log", "NVLink", "WARN"),
    "NVRM: API mismatch: the client has the version 550.54.15, but": ("log", "driver", "WARN"),
    "nvidia-peermem nv_get_p2p_free_callback:127 ERROR detected invalid context": ("log", "nvidia_peermem", "WARN"),
    "nvidia_peermem: Unknown symbol ib_register_peer_memory_client (err -22)": ("log", "nvidia_peermem", "WARN"),
    "Kernel panic - not syncing: Fatal machine check": ("log", "kernel panic", "FAIL"),
    "BUG: unable to handle page fault for address: ffffb5f3": ("log", "kernel oops", "FAIL"),
    "general protection fault, probably for address 0xdead: 0000 [#1] SMP": ("log", "kernel oops", "FAIL"),
    "NMI watchdog: Watchdog detected hard LOCKUP on cpu 3": ("log", "hard lockup", "FAIL"),
    "watchdog: BUG: soft lockup - CPU#12 stuck for 22s! [python3:4711]": ("log", "soft lockup", "WARN"),
    "rcu: INFO: rcu_preempt self-detected stall on CPU": ("log", "CPU stall", "WARN"),
    "INFO: task python3:4711 blocked for more than 120 seconds.": ("log", "hung task", "WARN"),
    "mce: [Hardware Error]: CPU 15: Machine Check Exception: 5 Bank 6: bb80000000000e0b": (
        "log", "machine check", "FAIL"),
    # Bit 61 of the status: 0xb has it, 0x9 and 0xc have not.
    "mce: [Hardware Error]: CPU 2: Machine Check: 0 Bank 1: bc800800060c0859": ("log", "machine check", "FAIL"),
    "mce: [Hardware Error]: CPU 2: Machine Check: 0 Bank 3: cc40010000100151": (
        "log", "machine check (corrected)", "WARN"),
    "mce: [Hardware Error]: CPU 0: Machine Check: 0 Bank 5: 9c00000000020e0f": (
        "log", "machine check (corrected)", "WARN"),
    "[Hardware Error]: Corrected error, no action required.": ("log", "machine check (corrected)", "WARN"),
    "{1}[Hardware Error]: event severity: fatal": ("log", "hardware error", "FAIL"),
    "{1}[Hardware Error]: event severity: corrected": ("log", "hardware error (corrected)", "WARN"),
    "Memory failure: 0x7740c0: recovery action for dirty page: Recovered": ("log", "memory (uncorrected)", "FAIL"),
    "EDAC MC3: 1 UE memory read error on CPU_SrcID#0_MC#3_Chan#0_DIMM#0": (
        "memory MC3", "memory (uncorrected)", "FAIL"),
    "EDAC MC0: 2 CE memory read error on CPU_SrcID#0_MC#0_Chan#1_DIMM#0": ("memory MC0", "memory (corrected)", "WARN"),
    "pcieport 0000:00:1c.4: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer": (
        "pcieport 0000:00:1c.4", "PCIe (fatal)", "FAIL"),
    "nvidia 0000:1b:00.0: PCIe Bus Error: severity=Uncorrectable (Fatal), type=Data Link Layer": (
        "GPU 0000:1b:00", "PCIe (fatal)", "FAIL"),
    "mlx5_core 0000:5c:00.0: PCIe Bus Error: severity=Uncorrected (Non-Fatal), type=Transaction Layer": (
        "NIC 0000:5c:00.0", "PCIe (uncorrected, not fatal)", "WARN"),
    "nvme 0000:a9:00.0: PCIe Bus Error: severity=Correctable, type=Physical Layer, (Receiver ID)": (
        "nvme 0000:a9:00.0", "PCIe (corrected)", "WARN"),
    "0000:50:00.0: PCIe Bus Error: severity=Uncorrected (Fatal), type=Transaction Layer": (
        "PCIe 0000:50:00.0", "PCIe (fatal)", "FAIL"),
    "pcieport 0000:00:01.1: AER: Uncorrectable (Non-Fatal) error message received from 0000:01:00.0": (
        "PCIe 0000:01:00.0", "PCIe (message)", "WARN"),
    "pcieport 0000:a9:10.0: DPC: containment event, status:0x2009 source:0x0000": (
        "pcieport 0000:a9:10.0", "PCIe (link shut)", "FAIL"),
    "mlx5_core 0000:5c:00.0: poll_health:840:(pid 0): device's health compromised - reached miss count": (
        "NIC 0000:5c:00.0", "NIC firmware", "FAIL"),
    "mlx5_core 0000:5c:00.0: mlx5_pcie_event:299:(pid 9): Detected insufficient power on the PCIe slot (27W).": (
        "NIC 0000:5c:00.0", "NIC power", "WARN"),
    "mlx5_core 0000:5c:00.0: Port module event[error]: module 0, Cable error, Power budget exceeded": (
        "NIC 0000:5c:00.0", "NIC cable", "WARN"),
    "NETDEV WATCHDOG: ens1np0 (mlx5_core): transmit queue 3 timed out": ("ens1np0", "NIC transmit", "WARN"),
    "Out of memory: Killed process 4711 (python3) total-vm:1234kB": ("log", "out of memory", "WARN"),
    "python3[4711]: segfault at 7f79 ip 00007f7c sp 00007f7d error 4 in libnccl.so.2[7f7c+d3d]": (
        "log", "segfault", "WARN"),
    "VFS: file-max limit 1000000 reached": ("log", "open files", "WARN"),
    "I/O error, dev nvme0n1, sector 2048 op 0x0:(READ)": ("disk nvme0n1", "disk", "WARN"),
}  # fmt: skip


@pytest.mark.parametrize("line", EVENTS)
def test_a_kernel_line_without_an_xid_is_known(line: str) -> None:
    subject, check, verdict = EVENTS[line]
    content = f"[  900.000000] Bluetooth: hello\n[  901.000000] {line}\n"
    assert bad(content) == {(subject, check): verdict}
    [finding] = read(content).findings
    assert finding.line == 2
    assert finding.next_step
    assert "{}" not in finding.next_step


HARMLESS = (
    "mce: CPU supports 32 MCE banks",
    "MCE: In-kernel MCE decoding enabled.",
    "EDAC MC: Ver: 3.0.0",
    "EDAC MC0: Giving out device to module i10nm_edac controller Intel_10nm Socket#0 IMC#0: DEV 0000:fe:0c.0",
    "mce: CPU0: Thermal monitoring enabled (TM1)",
    "pcieport 0000:00:1c.4: AER: enabled with IRQ 26",
    "pcieport 0000:00:1c.4: pciehp: Slot #4 AttnBtn- PwrCtrl- MRL- AttnInd+",
    "mlx5_core 0000:5c:00.0: 252.048 Gb/s available PCIe bandwidth (16.0 GT/s PCIe x16 link)",
    "mlx5_core 0000:d2:00.0: mlx5_cmd_out_err:838:(pid 9): ACCESS_REG(0x805) op_mod(0x1) failed",
    "mlx5_core 0000:5c:00.0: Port module event: module 1, Cable unplugged",
    "IPv6: ADDRCONF(NETDEV_CHANGE): eth0: link becomes ready",
    "ata3: SATA link down (SStatus 0 SControl 300)",
    "e1000e 0000:00:19.0: Interrupt Throttling Rate (ints/sec) set to dynamic conservative mode",
    "NVRM: loading NVIDIA UNIX x86_64 Kernel Module  550.54.15",
    "NVRM: GPU at PCI:0000:9b:00: GPU-509665ad-b600-ac93-3616-d754b23d636d",
    "nvidia-nvswitch2: open (major=510)",
)


@pytest.mark.parametrize("line", HARMLESS)
def test_a_line_of_a_healthy_start_is_no_event(line: str) -> None:
    assert bad(f"[  900.000000] {line}\n[  901.000000] {line}\n") == {}


def test_a_gpu_that_fell_off_the_bus_in_three_lines_is_named() -> None:
    content = (
        "[9.000000] NVRM: The NVIDIA GPU 0000:18:00.0\n"
        "[9.000001] NVRM: (PCI ID: 10de:2901) installed in this system has\n"
        "[9.000002] NVRM: fallen off the bus and is not responding to commands.\n"
    )
    assert bad(content) == {("GPU 0000:18:00", "fell off the bus"): "FAIL"}


def test_a_crash_that_somebody_asked_for_is_no_fault_of_the_node() -> None:
    crash = "[9.000000] sysrq: SysRq : Trigger a crash\n"
    oops = "[9.100000] BUG: unable to handle kernel NULL pointer dereference at (null)\n"
    assert set(bad(crash + oops).values()) == {"WARN"}
    assert set(bad(oops).values()) == {"FAIL"}


def test_the_line_of_a_device_counts_and_not_that_of_its_port() -> None:
    content = (
        "[9.000000] pcieport 0000:b7:02.0: AER: Corrected error received: 0000:b8:00.0\n"
        "[9.000001] mlx5_core 0000:b8:00.0: PCIe Bus Error: severity=Corrected, type=Physical Layer, (Receiver ID)\n"
    )
    assert bad(content) == {("NIC 0000:b8:00.0", "PCIe (corrected)"): "WARN"}


def flap(name: str, times: int, first: float = 5000.0) -> str:
    lines = ("{} Link down", "{} Link up")
    return "".join(f"[{first + 2 * at + up:12.6f}] {lines[up].format(name)}\n" for at in range(times) for up in (0, 1))


@pytest.mark.parametrize(
    ("name", "times", "verdict"),
    [
        ("mlx5_core 0000:5c:00.0 ens1np0:", 1, "WARN"),
        ("mlx5_core 0000:5c:00.0 ens1np0:", 2, "WARN"),
        ("mlx5_core 0000:5c:00.0 ens1np0:", 5, "FAIL"),
        ("i40e 0000:3d:00.0 eno1: NIC", 5, "WARN"),  # no fabric: nothing to drain a node for
    ],
)
def test_lost_carriers_are_counted(name: str, times: int, verdict: str) -> None:
    [finding] = read(flap(name, times)).findings
    assert (finding.verdict, finding.check) == (verdict, "carrier")
    assert f"{times} times" in finding.figure
    assert finding.subject in ("ens1np0", "eno1")


def test_systemd_networkd_tells_of_lost_infiniband_carriers() -> None:
    lines = ("Lost", "Gained") * 3
    content = "".join(
        f"Jan 21 04:4{at}:44 n1 systemd-networkd[812]: ib0: {word} carrier\n" for at, word in enumerate(lines)
    )
    content = "Jan 21 04:40:00 n1 kernel: NVRM: loading\n" + content
    assert bad(content) == {("ib0", "carrier"): "FAIL"}


def test_the_first_link_down_of_a_start_lost_nothing() -> None:
    name = "r8169 0000:02:00.0: eth0:"
    assert bad(flap(name, 1, first=6.0)) == {}
    assert bad("[0.000000] Linux version 6.8.0\n" + flap(name, 1)) == {}
    # A start between: the links went down with the node.
    content = flap("mlx5_core 0000:5c:00.0 ens1np0:", 1)[:60].partition("\n")[0] + "\n"
    content += "[    0.000000] Linux version 6.8.0\n[    9.000000] mlx5_core 0000:5c:00.0 ens1np0: Link up\n"
    assert bad(content) == {}


def test_a_link_that_stays_down_warns() -> None:
    content = "[ 5000.000000] mlx5_core 0000:5c:00.0 ens1np0: Link down\n[ 5001.000000] other: line\n"
    assert bad(content) == {("ens1np0", "carrier"): "WARN"}


def test_a_healthy_log_says_what_was_looked_at() -> None:
    [key] = verdicts("[1.000000] NVRM: loading\n[2.000000] usb 1-1: new\n")
    assert key == ("log", "XID")


def test_a_system_log_is_told_by_the_programs_that_wrote_its_lines() -> None:
    """Recognise a system log: without time, host and program its lines look like an application's."""
    heads = [f"Aug 17 06:1{minute}:01 node7 " for minute in range(4)]
    system = "\n".join(
        f"{head}systemd-networkd[5398]: ib6: {word} carrier"
        for head, word in zip(heads, ("Lost", "Gained", "Lost", "Gained"), strict=True)
    )
    job = "\n".join(f"{head}train.py[77]: step {at}" for at, head in enumerate(heads))
    assert kernel.is_system_log(system)
    assert not kernel.is_system_log(job)
    assert not kernel.is_system_log("")
