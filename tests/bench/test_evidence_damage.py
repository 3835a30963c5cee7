"""Damaged, foreign and mixed texts: a log or one line of error, never a traceback."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from netlayer.errors import ConfigError
from tests.bench import test_evidence_dcgmi as dcgmi
from tests.bench import test_evidence_inspector as inspector
from tests.bench import test_evidence_kernel as kernel
from tests.bench import test_evidence_nics as nics
from tests.bench import test_evidence_nvidia_smi as smi
from tests.bench.evidence_helpers import bad, read

SAMPLES = {
    "kernel": "\n".join(f"[  900.000000] {line}" for line in kernel.EVENTS),
    "kernel of several": "".join(f"Jan 21 04:41:44 n{at} kernel: {kernel.XID}\n" for at in range(3)),
    "links": kernel.flap("mlx5_core 0000:5c:00.0 ens1np0:", 4),
    "dcgmi": dcgmi.table(
        dcgmi.deployment(),
        dcgmi.section("Hardware"),
        dcgmi.row("GPU Memory", "Fail - All"),
        dcgmi.text("Warning", "GPU 1 x"),
    ),
    "health": dcgmi.health(dcgmi.row("Overall Health", "Failure"), dcgmi.row("-> 0", "Warning")),
    "table": smi.HEAD + smi.gpu(0) + smi.gpu(1, ecc="3") + smi.PROCESSES,
    "xml": smi.xml(smi.LINK.format(1, "P0"), gpus=3),
    "topo": smi.topo({(0, 1): "SYS"}, nics={5: "SYS"}),
    "nvlink": smi.links(smi.H100, {2: (0, 7), 3: "all"}),
    "counters": smi.counters(Replay_Errors=7, Recovery_Errors=3),
    "ibstat": nics.ibstat(*[nics.UP] * 4, nics.POLLING),
    "ibstatus": nics.ibstatus("4: ACTIVE", "1: DOWN"),
    "devinfo": nics.devinfo("PORT_ACTIVE (4)", "PORT_DOWN (1)"),
    "perftest": nics.perftest(),
    "fabric": nics.FABRIC.format(2, "ERROR", nics.SWITCH.format("fatal", 20034)),
    "inspector": inspector.job(inspector.short_rank_2, num_serials=12),
}


@settings(max_examples=300, deadline=None)
@given(
    name=st.sampled_from(sorted(SAMPLES)),
    cut=st.floats(0, 1),
    flips=st.lists(st.tuples(st.floats(0, 0.999999), st.characters(codec="utf-8")), max_size=12),
)
def test_no_damage_ends_in_a_traceback(name: str, cut: float, flips: list[tuple[float, str]]) -> None:
    content = list(SAMPLES[name][: int(cut * len(SAMPLES[name])) + 1])
    for where, character in flips:
        content[int(where * len(content))] = character
    lines: list[str] = []
    try:
        log = read("".join(content))
        lines = [f"{finding.subject} {finding.figure} {finding.next_step}" for finding in log.findings]
    except ConfigError as error:
        lines = [str(error)]
    assert not any("\n" in line or "{}" in line for line in lines)


@pytest.mark.parametrize("name", SAMPLES)
def test_every_sample_is_of_a_known_form(name: str) -> None:
    assert read(SAMPLES[name]).findings


def test_several_outputs_of_nvidia_smi_in_one_file_are_all_read() -> None:
    content = SAMPLES["table"] + SAMPLES["nvlink"] + smi.topo({})
    assert set(bad(content)) == {
        ("GPU 1 (00000000:11:00.0)", "ECC errors since the reset"), ("GPU 2", "NVLink"), ("GPU 3", "NVLink"),
    }  # fmt: skip


@pytest.mark.parametrize(
    ("content", "tool"),
    [
        ("======= ROCm System Management Interface =======\nGPU  Temp   AvgPwr\n0    35.0c  42.0W\n", "rocm-smi"),
        ("+------------+\n| AMD-SMI 24.6.2 |\n", "amd-smi"),
        ("[RESULT] [ 1234.5] Action name :gst-1\n", "rvs"),
        ("index, name, ecc.errors.uncorrected.volatile.total\n0, NVIDIA H100, 0\n", "--query-gpu"),
        ("# gpu    pwr  gtemp  mtemp\n# Idx      W      C      C\n    0     30     25      -\n", "dmon"),
        ("3b:00.0 3D controller: NVIDIA Corporation GH100 (rev a1)\n\tSubsystem: x\n", "lspci"),
    ],
)
def test_tools_that_are_not_read_are_refused_by_name(content: str, tool: str) -> None:
    with pytest.raises(ConfigError, match=f"{tool}, which is not read"):
        read(content)
