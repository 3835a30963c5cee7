"""NVIDIA's catalogue: what each XID and SXid asks for, and what their messages decide."""

from __future__ import annotations

import pytest

from bench.accept.evidence.gpu import identity
from collectives.health import xid

# Numbers whose action is well known, each with the verdict that it must have.
DRAINS = (46, 48, 62, 64, 79, 95, 109, 110, 119, 120, 136, 140, 143, 155, 156, 158)
DOES_NOT_DRAIN = (8, 13, 31, 32, 37, 43, 44, 45, 63, 66, 69, 78, 92, 93, 94, 106, 121, 137, 141, 157, 160, 161)


@pytest.mark.parametrize("code", DRAINS)
def test_an_xid_that_asks_for_a_reset_or_reboot_fails(code: int) -> None:
    resolution = xid.resolve(code)
    assert resolution.verdict == "FAIL"
    assert "drain" in resolution.step


@pytest.mark.parametrize("code", DOES_NOT_DRAIN)
def test_an_xid_that_the_catalogue_does_not_drain_for_warns(code: int) -> None:
    resolution = xid.resolve(code)
    assert resolution.verdict == "WARN"
    assert not resolution.step.startswith("drain")
    assert resolution.bucket


def test_every_number_of_the_catalogue_stands_in_one_bucket() -> None:
    assert xid.num_known() == 172
    assert all(xid.resolve(code).bucket for code in range(1, 173))
    # Restart the application and ignore: the numbers that must never cost a node.
    quiet = [code for code in range(1, 173) if xid.resolve(code).bucket in ("RESTART_APP", "IGNORE")]
    assert len(quiet) == 69
    assert {xid.resolve(code).verdict for code in quiet} == {"WARN"}


@pytest.mark.parametrize("code", [0, 173, 999, 22013])
def test_a_number_that_is_not_in_the_catalogue_warns_and_says_so(code: int) -> None:
    resolution = xid.resolve(code)
    assert (resolution.verdict, resolution.bucket) == ("WARN", "")
    assert "it is not in this project's copy" in resolution.step


@pytest.mark.parametrize(
    ("registers", "verdict"),
    [
        ("0x0, 0x0, 0x10000, 0x0, 0x0, 0x0, 0x0", "FAIL"),  # bit 16 of the third: run the field diagnostic
        ("0x100, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0", "FAIL"),  # bit 8 of the first: may be the hardware
        ("0x30, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0", "FAIL"),
        ("0x1, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0", "WARN"),  # bit 0: harmless
        ("0x40800001, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0", "WARN"),  # bits 0, 23, 30
        ("0x100002, 0x0, 0x0, 0x30000, 0x0, 0x0, 0x0", "WARN"),  # marks of another error
        ("0x0, 0x0, 0x0, 0x0, 0x100000, 0x0, 0x0", "WARN"),  # a count of corrected errors
        ("0x1, 0x0, 0x0, 0x0, 0x200000, 0x0, 0x0", "FAIL"),  # one harmless bit does not excuse another
    ],
)
def test_the_registers_of_xid_74_decide(registers: str, verdict: str) -> None:
    assert xid.resolve(74, f"pid=1, name=x, NVLink: fatal error detected on link 2({registers})").verdict == verdict


def test_xid_74_without_registers_asks_for_a_reset() -> None:
    assert xid.resolve(74, "NVLink: fatal error detected on link 6").verdict == "FAIL"


@pytest.mark.parametrize(
    ("message", "verdict"),
    [
        ("RLW_SRC_TRACK Nonfatal XC1 i0 Link 12 (0x040988e2 0x00000008 0x0 0x0 0x0 0x0)", "WARN"),
        ("pid=7, name=a, NETIR_BER_EVENT Nonfatal XC0 i0 Link 03 (0x00086226 0x00000001 0x0 0x0 0x0 0x0)", "WARN"),
        ("NETIR Fatal XC0 i0 Link -1 (0x000fe406 0x00000000 0x0 0x0 0x0 0x0)", "FAIL"),
        ("NETIR_LINK_EVT  Fatal   XC0 i0 Link 01 (0x021425c6 0x00000000 0x0 0x0 0x0 0x0)", "FAIL"),
        # Reason 38 (bits 20 to 25): software or a user took the link down.
        ("NETIR_LINK_EVT  Fatal   XC0 i0 Link 00 (0x026001c6 0x00000000 0x0 0x0 0x0 0x0)", "WARN"),
    ],
)
def test_the_severity_in_a_blackwell_link_message_decides(message: str, verdict: str) -> None:
    for code in range(144, 151):
        assert xid.resolve(code, message).verdict == verdict


@pytest.mark.parametrize(
    ("action", "verdict"),
    [
        ("None", "WARN"),
        ("GPU Reset Required", "FAIL"),
        ("Node Reboot Required", "FAIL"),
        ("OS Reboot", "FAIL"),
        ("PF FLR", "FAIL"),
        ("Drain P2P", "FAIL"),
        ("Drain and Reset", "FAIL"),
        ("Something New", "WARN"),
    ],
)
def test_xid_154_is_what_its_action_says(action: str, verdict: str) -> None:
    message = f"GPU recovery action changed from 0x4 (Drain and Reset) to 0x1 ({action})"
    assert xid.resolve(154, message).verdict == verdict


@pytest.mark.parametrize(
    ("code", "severity", "verdict", "step"),
    [
        (20034, "Fatal", "FAIL", "reset the GPUs"),
        (12028, "Non-fatal", "WARN", "watch"),
        (23001, "Fatal", "FAIL", "reboot"),  # the whole fabric
        (19084, "Non-fatal", "FAIL", "reset"),  # NVIDIA asks for a reset of all although it is not fatal
        (28006, "Non-fatal", "WARN", "watch"),  # not in the tables: its own word counts
        (31001, "Fatal", "FAIL", "reset"),
        (12028, "Fatal", "FAIL", "reset"),  # the driver calls it fatal, whatever the table says
        (31001, "", "WARN", "is not in this"),
        (20034, "", "FAIL", "reset"),
    ],
)
def test_an_sxid_goes_by_its_word_and_by_the_tables(code: int, severity: str, verdict: str, step: str) -> None:
    resolution = xid.resolve_switch(code, severity)
    assert resolution.verdict == verdict
    assert step in resolution.step


@pytest.mark.parametrize(
    ("subject", "number", "bus"),
    [
        ("GPU 3", 3, ""),
        ("GPU 3 (00000000:5D:00.0)", 3, "0000:5d:00"),
        ("GPU 0000:5d:00", -1, "0000:5d:00"),
        ("GPU 18:00.0", -1, "0000:18:00"),
        ("GPU 0009:01:00", -1, "0009:01:00"),
    ],
)
def test_a_gpu_has_one_identity_in_all_tools(subject: str, number: int, bus: str) -> None:
    assert identity.gpu_name(subject) == identity.GpuName(number, bus)


def test_what_is_no_gpu_has_no_gpu_identity() -> None:
    assert [identity.gpu_name(who) for who in ("mlx5_2", "node7", "NVSwitch 3", "GPU", "GPUs")] == [None] * 5


def test_bus_ids_find_their_gpu_number() -> None:
    subjects = ["GPU 0 (00000000:1B:00.0)", "GPU 1 (00000000:5D:00.0)", "GPU 7", "mlx5_0"]
    assert identity.gpu_indices(subjects) == {"0000:1b:00": 0, "0000:5d:00": 1}
