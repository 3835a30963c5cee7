"""The compute capability of GPUs, from a driver's tool that the test has written, and never from CUDA."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from bench.backends import nccl_versions
from bench.backends.capability import lowest_capability
from netlayer.errors import HardwareMissing

TOOL = """#!/bin/sh
case "$1" in
*compute_cap*) {answer} ;;
*) echo '0, NVIDIA H200, 143771, 580.1, GPU-aaaa1'; echo '1, NVIDIA A100, 81920, 580.1, GPU-bbbb2' ;;
esac
"""
BOTH = "echo 'GPU-aaaa1, 9.0'; echo 'GPU-bbbb2, 8.0'"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """First on the PATH. Whoever asks CUDA fails: it would make a context."""

    def refuse(*_: object) -> None:
        raise AssertionError("asks CUDA")

    for name in ("init", "_lazy_init", "is_available", "get_device_capability", "get_device_properties"):
        monkeypatch.setattr(f"torch.cuda.{name}", refuse)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    lowest_capability.cache_clear()
    yield tmp_path
    lowest_capability.cache_clear()


def answer(folder: Path, words: str) -> None:
    (folder / "nvidia-smi").write_text(TOOL.format(answer=words))
    (folder / "nvidia-smi").chmod(0o755)


@pytest.mark.parametrize(
    ("visible", "lowest"), [(None, (8, 0)), ("0", (9, 0)), ("GPU-bbbb2", (8, 0)), ("MIG-GPU-aaaa1/1/0", (8, 0))]
)
def test_it_is_the_lowest_of_the_gpus_that_are_left_visible(
    folder: Path, monkeypatch: pytest.MonkeyPatch, visible: str | None, lowest: tuple[int, int]
) -> None:
    answer(folder, BOTH)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert lowest_capability() == lowest


def test_a_type_is_refused_by_what_the_tool_says(folder: Path) -> None:
    answer(folder, BOTH)
    assert nccl_versions.refusal("f8e4m3", "sum", 22809).endswith("and one of 8.0 is here")
    assert nccl_versions.refusal("float", "sum", 22809) == ""


def test_without_a_driver_nothing_is_known(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(folder))
    assert lowest_capability() is None


def test_a_tool_that_fails_is_no_answer(folder: Path) -> None:
    answer(folder, "echo 'Unable to determine the device handle' >&2; exit 15")
    with pytest.raises(HardwareMissing, match="compute capability: nvidia-smi does not tell it"):
        lowest_capability()
