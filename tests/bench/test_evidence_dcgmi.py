"""dcgmi's tables of versions 2 to 4, its health report, and what both forms say where nothing was tested."""

from __future__ import annotations

import json

import pytest

from netlayer.errors import ConfigError
from tests.bench.evidence_helpers import bad, read, verdicts

HEAD = """Successfully ran diagnostic for group.
+---------------------------+------------------------------------------------+
| Diagnostic                | Result                                         |
+===========================+================================================+
"""
FOOT = "+---------------------------+------------------------------------------------+\n"


def row(name: str, info: str) -> str:
    return f"| {name:<25} | {info:<45}  |\n"


def text(name: str, message: str) -> str:
    """A long text as dcgmi cuts it: 45 letters a line, wherever a word ends."""
    parts = [message[at : at + 45] for at in range(0, len(message), 45)]
    return "".join(row(name if not at else "", part) for at, part in enumerate(parts))


def section(name: str) -> str:
    return f"|-----  {name}  ".ljust(28, "-") + "+" + "-" * 48 + "|\n"


def deployment(persistence: str = "Pass", below: str = "") -> str:
    return (
        section("Deployment")
        + row("Denylist", "Pass")
        + row("NVML Library", "Pass")
        + row("Persistence Mode", persistence)
        + below
        + row("Inforom", "Pass")
    )


def table(*parts: str, version: str = "3.3.8") -> str:
    return HEAD + section("Metadata") + row("DCGM Version", version) + "".join(parts) + FOOT


def test_a_table_in_which_all_passed_passes() -> None:
    content = table(deployment(), section("Hardware"), row("GPU Memory", "Pass - All"), row("Diagnostic", "Pass - All"))
    log = read(content)
    assert bad(content) == {}
    assert log.kind == "dcgmi diag"
    assert "6 results passed" in log.findings[0].figure
    assert log.traits["DCGM Version", "log"] == "3.3.8"


def test_the_parts_behind_a_result_are_named_with_their_texts() -> None:
    """DCGM 2 and 3: one line a result, the parts behind it, the texts below."""
    content = table(
        deployment(),
        section("Hardware"),
        row("GPU Memory", "Pass - GPUs: 1, 2, 3, 4, 5, 6"),
        row("", "Fail - GPUs: 0, 7"),
        text("Warning", "GPU 0 Thermal violations totaling 13.3 seconds started at 9.7 seconds into the test"),
        text("Warning", "GPU 7 had uncorrectable memory errors"),
        text("Info", "GPU 1 Allocated 84 GB (98.3%)"),
    )
    faults = {finding.subject: finding for finding in read(content).findings if finding.verdict == "FAIL"}
    assert set(faults) == {"GPU 0", "GPU 7"}
    assert "Thermal violations totaling 13.3 seconds started at 9.7 seconds" in faults["GPU 0"].figure
    assert faults["GPU 7"].figure == "GPU 7 had uncorrectable memory errors"
    assert all(finding.check == "dcgmi GPU Memory" and "drain" in finding.next_step for finding in faults.values())


def test_a_failure_of_all_is_split_by_the_texts_below_it() -> None:
    content = table(
        deployment(),
        section("Hardware"),
        row("GPU Memory", "Fail - All"),
        *(text("Warning", f"GPU {gpu} Error using CUDA API cuInit: 'system not yet initialized'") for gpu in range(4)),
        section("Stress"),
        row("Memory Bandwidth", "Skip - All"),
    )
    faults = [finding for finding in read(content).findings if finding.verdict == "FAIL"]
    assert [finding.subject for finding in faults] == [f"GPU {gpu}" for gpu in range(4)]
    assert all("nvidia-fabricmanager" in finding.next_step for finding in faults)


def test_a_failure_of_all_without_texts_is_one_of_the_node() -> None:
    content = table(deployment(), section("Hardware"), row("Diagnostic", "Fail - All"))
    assert bad(content) == {("log", "dcgmi Diagnostic"): "FAIL"}


def test_a_line_a_part_is_read_as_dcgm_4_prints_it() -> None:
    content = table(
        section("Deployment") + row("software", "Pass") + row("", "GPU0: Pass") + row("", "GPU1: Pass"),
        section("Hardware") + row("memory", "Fail") + row("", "GPU0: Pass") + row("", "GPU1: Fail"),
        text("Warning: GPU1", "row remapping failed")[:0],
        text("Warning", "GPU 1 had uncorrectable memory errors and row remapping failed."),
        row("diagnostic", "Warn")
        + row("", "GPU0: Warn")
        + text("Warning", "the clock was low")
        + row("", "GPU1: Skip"),
        version="4.4.2",
    )
    faults = {finding.subject: finding for finding in read(content).findings}
    assert bad(content) == {("GPU 1", "dcgmi memory"): "FAIL", ("GPU 0", "dcgmi diagnostic"): "WARN"}
    assert "row remapping failed" in faults["GPU 1"].figure
    assert faults["GPU 0"].figure == "the clock was low"


def test_hardware_tests_that_were_all_skipped_warn() -> None:
    skipped = section("Hardware") + row("GPU Memory", "Skip - All") + section("Stress") + row("EUD Test", "Skip - All")
    content = table(deployment(), skipped)
    assert bad(content) == {("log", "dcgmi diag"): "WARN"}
    assert "no hardware was tested" in read(content).findings[0].next_step
    assert bad(table(deployment(), skipped, row("Memtest", "Pass - All"))) == {}
    # Level 1 has no tests of the hardware.
    assert bad(table(deployment())) == {}


def test_the_same_holds_for_json() -> None:
    def tree(hardware: str) -> str:
        def test(name: str, status: str) -> dict[str, object]:
            return {"name": name, "results": [{"entity_group": "GPU", "entity_id": 0, "status": status}]}

        categories = [
            {"category": "Deployment", "tests": [test("software", "Pass")]},
            {"category": "Hardware", "tests": [test("memory", hardware)]},
        ]
        return json.dumps({"DCGM Diagnostic": {"test_categories": categories}})

    assert bad(tree("Skip")) == {("log", "dcgmi diag"): "WARN"}
    assert bad(tree("Pass")) == {}
    assert bad(tree("Fail")) == {("GPU 0", "dcgmi memory"): "FAIL"}


def test_a_setting_asks_for_no_drain() -> None:
    message = (
        'Persistence mode for GPU 0 is currently disabled. Enable it by running "nvidia-smi -i <gpuId> -pm 1" as root.'
    )
    content = table(deployment("Fail", text("Error", message)))
    [finding] = [finding for finding in read(content).findings if finding.verdict != "PASS"]
    assert (finding.verdict, finding.check) == ("WARN", "dcgmi Persistence Mode")
    assert "drain" not in finding.next_step


def test_info_texts_are_no_findings() -> None:
    content = table(deployment("Pass", text("Info", "Persistence mode for GPU 0 is disabled. Enable it.")))
    assert bad(content) == {}


def test_a_test_that_passes_with_a_warning_warns() -> None:
    content = table(
        section("Hardware"), row("memory", "Pass"), row("", "GPU0: Pass"), text("Warning", "could not allocate memory")
    )
    assert bad(content) == {("GPU 0", "dcgmi memory"): "WARN"}


def test_two_tables_and_a_part_of_one_are_read() -> None:
    one = table(deployment(), section("Hardware"), row("GPU Memory", "Fail - GPU: 3"))
    assert [finding.subject for finding in read(one + one).findings if finding.verdict == "FAIL"] == ["GPU 3"] * 2
    part = row("GPU Memory", "Pass - GPUs: 1, 2") + row("", "Fail - GPU: 0") + text("Warning", "GPU 0 is hot")
    assert bad(part) == {("GPU 0", "dcgmi GPU Memory"): "FAIL"}


def test_a_table_that_breaks_off_is_no_pass() -> None:
    with pytest.raises(ConfigError, match="ends inside the table"):
        read(table(deployment(), section("Hardware"), row("GPU Memory", "Pass - All")).removesuffix(FOOT))


def test_what_did_not_run_is_no_word_on_the_node() -> None:
    content = "Error: unable to establish a connection to the specified host: localhost\nError: no host engine runs\n"
    assert bad(content) == {("log", "dcgmi diag"): "WARN"}
    tree = json.dumps({"DCGM Diagnostic": {"runtime_error": "Another instance is running"}})
    assert bad(tree) == {("log", "dcgmi diag"): "WARN"}


def health(*rows: str) -> str:
    return f"{FOOT}| Health Monitor Report      |\n{FOOT}" + "".join(rows) + FOOT


def test_the_health_report_names_parts_and_texts() -> None:
    content = health(
        row("Overall Health", "Failure"),
        row("GPU", ""),
        row("-> 0", "Warning"),
        row("   -> Errors", ""),
        row("      -> PCIe system", "Warning"),
        "| Detected 8 PCIe replays   |                    |\n",
        row("-> 1", "Failure"),
        row("      -> Memory system", "Failure"),
    )
    faults = {finding.subject: finding for finding in read(content).findings}
    assert {who: finding.verdict for who, finding in faults.items()} == {"GPU 0": "WARN", "GPU 1": "FAIL"}
    assert "8 PCIe replays" in faults["GPU 0"].figure
    assert verdicts(health(row("Overall Health", "Healthy"))) == {("log", "health"): "PASS"}
