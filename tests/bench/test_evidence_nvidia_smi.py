"""nvidia-smi's table, XML, topology and NVLink output; what it prints in place of an answer."""

from __future__ import annotations

import pytest

from netlayer.errors import ConfigError
from tests.bench.evidence_helpers import bad, read, verdicts

H100 = "NVIDIA H100 80GB HBM3"
HEAD = """Fri Nov  8 02:11:26 2024
+-----------------------------------------------------------------------------------------+
| NVIDIA-SMI 560.35.03              Driver Version: 560.35.03      CUDA Version: 12.6     |
|-----------------------------------------+------------------------+----------------------+
| GPU  Name                 Persistence-M | Bus-Id          Disp.A | Volatile Uncorr. ECC |
|=========================================+========================+======================|
"""


def gpu(
    number: int, ecc: str = "0", sensors: str = "N/A   38C    P0             70W /  700W", mig: str = "Disabled"
) -> str:
    return (
        f"|   {number}  NVIDIA H100 80GB HBM3          Off |   00000000:{number + 16:X}:00.0 Off | {ecc:>20} |\n"
        f"| {sensors:<39} |       1MiB /  81559MiB |      0%      Default |\n"
        f"|                                         |                        | {mig:>20} |\n"
        "+-----------------------------------------+------------------------+----------------------+\n"
    )


PROCESSES = "| Processes:                                                                              |\n"


def test_a_table_whose_gpus_answer_passes_and_names_them_by_number_and_bus() -> None:
    log = read(HEAD + gpu(0) + gpu(1) + PROCESSES)
    assert [finding.verdict for finding in log.findings] == ["PASS", "PASS"]
    assert log.findings[1].subject == "GPU 1 (00000000:11:00.0)"
    assert log.traits["Driver Version", "log"] == "560.35.03"
    assert log.traits["MIG Mode", "GPU 0 (00000000:10:00.0)"] == "Disabled"


@pytest.mark.parametrize(
    ("row", "check", "verdict"),
    [
        (gpu(3, ecc="2"), "ECC errors since the reset", "FAIL"),
        (gpu(3, ecc="ERR!"), "query", "FAIL"),
        (gpu(3, ecc="GPU requires reset"), "reset", "FAIL"),
        (gpu(3, sensors="ERR!  ERR! ERR!           ERR! / ERR!"), "query", "FAIL"),
        (gpu(3, sensors="ERR!  38C    P5             49W /  450W"), "sensor", "WARN"),
    ],
)
def test_a_bad_cell_of_the_table_is_a_finding_of_its_gpu(row: str, check: str, verdict: str) -> None:
    assert bad(HEAD + gpu(0) + row + PROCESSES) == {("GPU 3 (00000000:13:00.0)", check): verdict}


def test_mig_devices_and_processes_are_no_gpus() -> None:
    mig = (
        "| MIG devices:                                                                            |\n"
        "|  0    1   0   0  |      19MiB / 40192MiB    | 42      0 |  3   0    2    0    0 |\n"
    )
    log = read(HEAD + gpu(0, ecc="On", mig="Enabled") + mig + PROCESSES)
    assert len(log.findings) == 1


def test_a_table_that_breaks_off_is_refused() -> None:
    with pytest.raises(ConfigError, match="breaks off below GPU 1"):
        read(HEAD + gpu(0) + gpu(1).partition("\n")[0] + "\n")
    with pytest.raises(ConfigError, match="no GPU below it"):
        read(HEAD)


@pytest.mark.parametrize(
    ("line", "subject", "verdict"),
    [
        ("Unable to determine the device handle for GPU0000:CB:00.0: Unknown Error", "GPU 0000:cb:00", "FAIL"),
        ("Unable to determine the device handle for GPU1: 0000:34:00.0: Unknown Error", "GPU 0000:34:00", "FAIL"),
        ("Unable to determine the device handle for gpu 0000:03:00.0: GPU is lost.  Reboot", "GPU 0000:03:00", "FAIL"),
        ("No devices were found", "log", "FAIL"),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.", "log", "FAIL"),
        ("Failed to initialize NVML: Driver/library version mismatch", "log", "FAIL"),
        ("Failed to initialize NVML: Unknown Error", "log", "WARN"),
        ("WARNING: infoROM is corrupted at gpu 0000:1B:00.0", "GPU 0000:1b:00", "WARN"),
    ],
)
def test_what_stands_in_place_of_an_answer_is_a_finding(line: str, subject: str, verdict: str) -> None:
    assert bad(line + "\n") == {(subject, "query"): verdict}
    assert bad(f"{line}\n{HEAD}{gpu(0)}{PROCESSES}")[subject, "query"] == verdict


def xml(*fields: str, head: str = "", gpus: int = 1) -> str:
    body = "".join(
        f'<gpu id="00000000:{at + 16:02X}:00.0"><product_name>{H100}</product_name>{"".join(fields)}</gpu>'
        for at in range(gpus)
    )
    return (
        '<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v12.dtd">\n<nvidia_smi_log>\n'
        f"<driver_version>550.54.15</driver_version><attached_gpus>{gpus}</attached_gpus>{head}\n{body}\n</nvidia_smi_log>\n"
    )


LINK = (
    "<pci><pci_gpu_link_info><pcie_gen><max_link_gen>5</max_link_gen><current_link_gen>{}</current_link_gen></pcie_gen>"
    "<link_widths><max_link_width>16x</max_link_width><current_link_width>16x</current_link_width></link_widths>"
    "</pci_gpu_link_info></pci><performance_state>{}</performance_state>"
)


@pytest.mark.parametrize(
    ("field", "check", "verdict"),
    [
        ("<ecc_errors><volatile><dram_uncorrectable>1</dram_uncorrectable></volatile></ecc_errors>",
         "ECC errors since the reset", "FAIL"),
        ("<ecc_errors><volatile><sram_uncorrectable_parity>2</sram_uncorrectable_parity></volatile></ecc_errors>",
         "ECC errors since the reset", "FAIL"),
        ("<ecc_errors><volatile><double_bit><device_memory>1</device_memory></double_bit></volatile></ecc_errors>",
         "ECC errors since the reset", "FAIL"),
        ("<ecc_errors><aggregate><dram_uncorrectable>1</dram_uncorrectable></aggregate></ecc_errors>",
         "ECC errors in its life", "WARN"),
        ("<ecc_errors><aggregate><sram_threshold_exceeded>Yes</sram_threshold_exceeded></aggregate></ecc_errors>",
         "ECC state", "FAIL"),
        ("<remapped_rows><remapped_row_failure>Yes</remapped_row_failure></remapped_rows>", "row remapping", "FAIL"),
        ("<remapped_rows><remapped_row_pending>Yes</remapped_row_pending></remapped_rows>", "row remapping", "FAIL"),
        ("<retired_pages><pending_retirement>Yes</pending_retirement></retired_pages>", "retired pages", "FAIL"),
        ("<gpu_reset_status><reset_required>Yes</reset_required></gpu_reset_status>", "reset", "FAIL"),
        ("<gpu_recovery_action>Reset</gpu_recovery_action>", "recovery action", "FAIL"),
        ("<clocks_event_reasons><clocks_event_reason_hw_thermal_slowdown>Active</clocks_event_reason_hw_thermal_slowdown>"
         "</clocks_event_reasons>", "throttling", "FAIL"),
        ("<clocks_throttle_reasons><clocks_throttle_reason_hw_power_brake_slowdown>Active"
         "</clocks_throttle_reason_hw_power_brake_slowdown></clocks_throttle_reasons>", "throttling", "FAIL"),
        ("<clocks_event_reasons><clocks_event_reason_sw_power_cap>Active</clocks_event_reason_sw_power_cap>"
         "</clocks_event_reasons>", "power cap", "WARN"),
        ("<fabric><state>In Progress</state></fabric>", "NVLink fabric", "FAIL"),
        ("<ecc_mode><current_ecc>Disabled</current_ecc></ecc_mode>", "ECC mode", "WARN"),
        (LINK.format(1, "P0"), "PCIe speed", "FAIL"),
    ],
)  # fmt: skip
def test_the_xml_is_judged_as_the_text_is(field: str, check: str, verdict: str) -> None:
    assert bad(xml(field)) == {("GPU 0 (00000000:10:00.0)", check): verdict}


def test_a_healthy_xml_passes_and_an_idle_link_is_not_accused() -> None:
    assert bad(xml(LINK.format(5, "P0"))) == {}
    content = xml(LINK.format(1, "P8"))
    assert bad(content) == {}
    assert "not judged" in read(content).findings[0].figure
    reason = "<clocks_event_reason_gpu_idle>Active</clocks_event_reason_gpu_idle>"
    idle = f"<clocks_event_reasons>{reason}</clocks_event_reasons>"
    assert bad(xml(LINK.format(1, "P0"), idle)) == {}
    assert bad(xml(LINK.format(1, "P0"), "<utilization><gpu_util>0 %</gpu_util></utilization>")) == {}
    assert len(bad(xml(LINK.format(1, "P0"), "<utilization><gpu_util>97 %</gpu_util></utilization>"))) == 1


def test_a_field_that_the_driver_cannot_tell_is_no_dead_gpu() -> None:
    assert bad(xml("<addressing_mode>Unknown Error</addressing_mode>")) == {}
    dead = "".join(f"<field_{at}>Unknown Error</field_{at}>" for at in "abcdefgh")
    assert bad(xml(dead)) == {("GPU 0 (00000000:10:00.0)", "query"): "FAIL"}


def test_sixty_retired_pages_are_the_end_of_a_gpu() -> None:
    pages = (
        "<retired_pages><multiple_single_bit_retirement><retired_count>{}</retired_count>"
        "</multiple_single_bit_retirement></retired_pages>"
    )
    text = (
        "==============NVSMI LOG==============\n\nAttached GPUs : 1\nGPU 00000000:10:00.0\n    Retired Pages\n"
        "        Single Bit ECC : {}\n        Double Bit ECC : 5\n        Pending Page Blacklist : No\n"
    )
    assert bad(text.format(54)) == {}
    assert bad(text.format(55)) == {("GPU 0 (00000000:10:00.0)", "retired pages"): "FAIL"}
    assert bad(xml(pages.format(60))) == {("GPU 0 (00000000:10:00.0)", "retired pages"): "FAIL"}


def test_fewer_gpus_than_attached_warn() -> None:
    assert bad(xml(gpus=2).replace("<attached_gpus>2", "<attached_gpus>8")) == {("log", "GPUs in the log"): "WARN"}


BOMB = (
    '<?xml version="1.0"?><!DOCTYPE nvidia_smi_log [<!ENTITY a "aaaaaaaaaa">'
    + "".join(f'<!ENTITY {new} "{("&" + old + ";") * 10}">' for old, new in zip("abcdefgh", "bcdefghi", strict=True))
    + "]><nvidia_smi_log><driver_version>&i;</driver_version></nvidia_smi_log>"
)


@pytest.mark.parametrize(
    ("content", "rule"),
    [
        (BOMB, "declares an entity"),
        (
            '<!DOCTYPE x [<!ENTITY f SYSTEM "file:///etc/passwd">]><nvidia_smi_log>&f;</nvidia_smi_log>',
            "declares an entity",
        ),
        ("<nvidia_smi_log>" + "<a>\n" * 100_000, "nested deeper"),
        (xml()[:-30], "is no whole XML"),
        ("<nvidia_smi_log>&undefined;</nvidia_smi_log>", "is no whole XML"),
        ("<nvidia_smi_log></nvidia_smi_log>", "element 'gpu'"),
    ],
)
def test_xml_that_is_hostile_or_cut_ends_in_one_line(content: str, rule: str) -> None:
    with pytest.raises(ConfigError, match=rule) as error:
        read(content)
    assert "\n" not in str(error.value)


def topo(
    cells: dict[tuple[int, int], str], nics: dict[int, str] | None = None, size: int = 8, usual: str = "NV18"
) -> str:
    """A matrix in which every pair but those given is alike."""
    names = [f"GPU{at}" for at in range(size)]
    lines = ["\t" + "\t".join([*names, *(["NIC0"] if nics is not None else []), "CPU Affinity", "NUMA Affinity"])]
    for one in range(size):
        row = ["X" if one == other else cells.get((min(one, other), max(one, other)), usual) for other in range(size)]
        row += [nics.get(one, "PXB")] if nics is not None else []
        lines.append("\t".join([names[one], *row, "0-47", "0"]))
    return "\n".join(lines) + "\n\nLegend:\n\n  X    = Self\n"


def test_a_matrix_in_which_all_are_alike_passes() -> None:
    assert verdicts(topo({})) == {("log", "topology"): "PASS"}
    assert bad(topo({}, usual="NODE")) == {}
    underlined = topo({}).replace("\tGPU0", "\t\x1b[4mGPU0", 1).replace("NUMA Affinity", "NUMA Affinity\x1b[0m", 1)
    assert verdicts(underlined) == {("log", "topology"): "PASS"}


def test_a_gpu_without_nvlinks_among_switched_ones_fails() -> None:
    cells = {(min(1, other), max(1, other)): "NODE" for other in range(8) if other != 1}
    assert bad(topo(cells)) == {("GPU 1", "NVLink topology"): "FAIL"}
    fewer = {(min(1, other), max(1, other)): "NV12" for other in range(8) if other != 1}
    assert bad(topo(fewer)) == {("GPU 1", "NVLink topology"): "WARN"}


def test_machines_that_are_wired_in_part_are_not_accused() -> None:
    # Eight V100 in a cube: each has six links, to four others.
    cube = {(0, 1): "NV1", (0, 2): "NV1", (0, 3): "NV2", (0, 4): "NV2", (1, 2): "NV2", (1, 3): "NV1", (1, 5): "NV2",
            (2, 3): "NV2", (2, 6): "NV1", (3, 7): "NV1", (4, 5): "NV1", (4, 6): "NV1", (4, 7): "NV2", (5, 6): "NV2",
            (5, 7): "NV1", (6, 7): "NV2"}  # fmt: skip
    assert bad(topo(cube, usual="SYS")) == {}
    # Cards in pairs by a bridge, one pair without: nothing says that it should have one.
    pairs = {(0, 1): "NV12", (2, 3): "NV12", (4, 5): "NV12"}
    assert set(bad(topo(pairs, usual="SYS")).values()) <= {"WARN"}
    assert bad(topo({(0, 1): "NV4"}, size=3, usual="NODE")) == {}


def test_a_gpu_whose_nic_is_farther_than_that_of_its_peers_warns() -> None:
    assert bad(topo({}, nics={5: "SYS"})) == {("GPU 5", "nearest NIC"): "WARN"}
    assert bad(topo({}, nics={4: "SYS", 5: "SYS", 6: "SYS", 7: "SYS"})) == {}


def test_a_matrix_that_breaks_off_is_refused() -> None:
    whole = topo({})
    with pytest.raises(ConfigError, match="ends before the row of GPU7"):
        read("\n".join(whole.split("\n")[:8]) + "\n")


def links(name: str, down: dict[int, tuple[int, ...] | str], gpus: int = 4, num_links: int = 18) -> str:
    """NVLink status: links that are inactive by GPU, or `all` for NVML's one line."""
    lines = []
    for at in range(gpus):
        lines.append(f"GPU {at}: {name} (UUID: GPU-{at})")
        if down.get(at) == "all":
            lines.append("NVML: Unable to retrieve NVLink information as all links are inActive")
            continue
        for link in range(num_links):
            lines.append(f"\t Link {link}: " + ("<inactive>" if link in down.get(at, ()) else "26.562 GB/s"))
    return "\n".join(lines) + "\n"


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (links(H100, {}), {}),
        (links(H100, {2: (0, 7)}), {"GPU 2": "FAIL"}),
        (links(H100, {2: "all"}), {"GPU 2": "FAIL"}),
        (links(H100, dict.fromkeys(range(4), "all")), {f"GPU {at}": "FAIL" for at in range(4)}),
        # The fabric of such a module may be missing by design, and nobody is a peer of a single one.
        (links("NVIDIA A100-SXM4-40GB", dict.fromkeys(range(4), "all")), {f"GPU {at}": "WARN" for at in range(4)}),
        (links("NVIDIA GH200 480GB", {0: "all"}, gpus=1), {"GPU 0": None}),
        # A query of one GPU (-i 6) whose number says that there are more.
        (links(H100, {0: "all"}, gpus=1).replace("GPU 0", "GPU 6"), {"GPU 6": "FAIL"}),
        # Cards in slots.
        (links("NVIDIA A100-PCIE-40GB", dict.fromkeys(range(2), "all"), gpus=2), {"GPU 0": None, "GPU 1": None}),
        (links("NVIDIA RTX A6000", {2: "all"}, gpus=3, num_links=4), {"GPU 2": "WARN"}),
        (links("NVIDIA H100 NVL", {1: (4, 5)}, gpus=2), {"GPU 1": "WARN"}),
        # A virtual machine with four of eight: links to the others lead nowhere.
        (links("Tesla V100-SXM2-16GB", {0: (4, 5), 1: (4, 5), 2: (4, 5), 3: (4, 5)}, num_links=6),
         {f"GPU {at}": "WARN" for at in range(4)}),
    ],
)  # fmt: skip
def test_links_that_are_down_are_judged_by_what_the_product_needs(
    content: str, expected: dict[str, str | None]
) -> None:
    assert {who: verdict for (who, _), verdict in bad(content).items()} == expected


def counters(**values: int) -> str:
    lines = []
    for at in range(2):
        lines.append(f"GPU {at}: {H100} (UUID: GPU-{at})")
        for link in range(3):
            for name, value in values.items():
                number = value if (at, link) == (1, 2) else 0
                lines.append(f"\t Link {link}: {name.replace('_', ' ')}: {number}")
    return "\n".join(lines) + "\n"


def test_error_counters_of_links_are_summed_by_gpu() -> None:
    assert bad(counters(Replay_Errors=0, Recovery_Errors=0, CRC_Errors=0)) == {}
    content = counters(Replay_Errors=7, Recovery_Errors=3, CRC_Errors=0)
    assert bad(content) == {("GPU 1", "NVLink Replay Errors"): "WARN", ("GPU 1", "NVLink Recovery Errors"): "WARN"}
    assert "7 on link 2" in read(content).findings[1].figure
    assert bad(counters(Link_recovery_failed_events=1)) == {("GPU 1", "NVLink Link recovery failed events"): "FAIL"}
    # They count on a good link too.
    assert bad(counters(Tx_packets=10**12, Symbol_Errors=4, Effective_Errors=2)) == {}
    lanes = f"GPU 0: {H100} (UUID: x)\n\t Link 0: CRC Errors Lane 0: 2\n\t Link 0: CRC Errors Lane 1: 3\n"
    assert "5 on link 0" in read(lanes).findings[0].figure


def test_a_query_of_one_gpu_of_many_names_it_by_its_bus_id_alone() -> None:
    """`-i 52:00.0` lists one GPU as the first, whatever its number: it must not pass for GPU 0."""
    content = (
        "==============NVSMI LOG==============\n\n"
        "Driver Version                            : 550.90.07\n"
        "Attached GPUs                             : 8\n"
        "GPU 00000000:52:00.0\n"
        "    Remapped Rows\n"
        "        Pending                           : Yes\n"
        "        Remapping Failure Occurred        : No\n"
    )
    subjects = {finding.subject for finding in read(content).findings if finding.verdict == "FAIL"}
    assert subjects == {"GPU 0000:52:00"}
