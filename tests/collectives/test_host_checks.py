"""Checks of a host: each can fail, and says why it was not made."""

from __future__ import annotations

import hashlib
import sys
from pathlib import Path
from typing import Any

import pytest

from collectives.health import host


def test_a_healthy_host_fails_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_DISK_BYTES", 1 << 20)
    monkeypatch.setattr(host, "_MEMORY_BYTES", 1 << 20)
    checks = {check.name: check for check in host.host_checks(tmp_path)}
    assert set(checks) == {"disk", "memory", "clock", "gpu_memory_errors"}
    assert checks["disk"].passed
    assert checks["memory"].passed
    assert all(check.detail for check in checks.values())
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_gives_back_something_else_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(_file: Any, name: str) -> Any:
        return hashlib.new(name, b"other")

    monkeypatch.setattr(hashlib, "file_digest", other)
    assert host.disk(tmp_path, 1 << 20).passed is False


def test_a_disk_that_cannot_be_written_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = host.disk(tmp_path / "none")
    assert check.passed is False
    assert "ENOENT" in check.detail
    monkeypatch.setattr(host, "_LEAST_FREE_BYTES", 1 << 62)
    assert "MiB free" in host.disk(tmp_path).detail


@pytest.mark.parametrize(
    ("script", "passed", "detail"),
    [
        ("echo 'GPU-a, 0, No, No'; echo 'GPU-b, 0, No, No'", True, "2 GPUs"),
        ("echo 'GPU-a, [N/A], [N/A], [N/A]'", True, "1 GPUs"),
        ("echo 'GPU-a, 0, No, No'; echo 'GPU-b, 3, No, No'", False, "GPU 1: 3, No, No"),
        ("echo 'GPU-a, 0, Yes, No'", False, "GPU 0: 0, Yes, No"),
        ("echo 'Unable to determine the device handle for GPU0: Unknown Error' >&2; exit 1", False, "device handle"),
        # A tool that fails or is slow says nothing of the GPUs.
        ("echo 'Failed to initialize NVML: Driver/library version mismatch'; exit 18", None, "version mismatch"),
        ("exec sleep 10", None, "no answer within"),
    ],
)
@pytest.mark.skipif(sys.platform != "linux", reason="a shell script stands for nvidia-smi")
def test_what_nvidia_smi_says_of_memory_errors(
    script: str, passed: bool | None, detail: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{script}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    if "sleep" in script:
        monkeypatch.setattr(host, "_SMI_S", 0.2)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    check = host.gpu_memory_errors()
    assert check.passed is passed
    assert check.is_unclear is (passed is None)
    assert detail in check.detail


@pytest.mark.parametrize(
    ("visible", "passed"), [("GPU-a", True), ("0", True), ("1", False), ("GPU-b,GPU-a", False), ("MIG-x", None)]
)
@pytest.mark.skipif(sys.platform != "linux", reason="a shell script stands for nvidia-smi")
def test_another_nodes_gpu_of_the_same_machine_fails_nothing(
    visible: str, passed: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(
        "#!/bin/sh\ncase \"$1\" in *bus_id*) echo 'GPU-a, 00000000:0F:00.0'; echo 'GPU-b, 00000000:44:00.0';;"
        " *) echo 'GPU-a, 0, No, No'; echo 'GPU-b, 3, No, No';; esac\n"
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert host.gpu_memory_errors().passed is passed
    addresses = {"GPU-a": {"0000:0f:00"}, "0": {"0000:0f:00"}, "1": {"0000:44:00"}, "MIG-x": None}
    assert host.own_gpu_addresses() == addresses.get(visible, {"0000:0f:00", "0000:44:00"})
    assert host.pci_addresses("NVRM: Xid (PCI:0000:44:00): 79, pid=1234") == ["0000:44:00"]


def test_without_nvidia_smi_the_check_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    check = host.gpu_memory_errors()
    assert check.passed is None
    assert check.detail == "no nvidia-smi"
