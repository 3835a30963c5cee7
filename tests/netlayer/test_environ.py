import os
import stat
import sys
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from netlayer import environ
from netlayer.errors import ConfigError, HardwareMissing, PackageClash
from netlayer.launch.rank import RankEnv


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A driver tool that shows two GPUs, first on the PATH."""
    tool = tmp_path / "nvidia-smi"
    rows = [f"{index}, NVIDIA H200, 143771, 580.1, {uuid}" for index, uuid in enumerate(("GPU-aaaa1", "GPU-bbbb2"))]
    tool.write_text("#!/bin/sh\n" + "".join(f"echo '{row}'\n" for row in rows))
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    return tool


def test_gpus_are_those_of_the_driver_that_are_left_visible(nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert [(gpu.index, gpu.name, gpu.memory_mib) for gpu in environ.list_gpus()] == [
        (0, "NVIDIA H200", 143771),
        (1, "NVIDIA H200", 143771),
    ]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert [gpu.index for gpu in environ.list_gpus()] == [1]
    assert "2 x" not in next(f.detail for f in environ.doctor() if f.topic == "GPUs")


@pytest.mark.parametrize(
    ("visible", "indices"),
    [("0, 1", [0, 1]), ("1,0", [1, 0]), ("GPU-bbbb", [1]), ("", []), ("1,7,0", [1]), ("MIG-x", [-1])],
)
def test_visible_devices_are_read_as_cuda_reads_them(
    visible: str, indices: list[int], nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert [gpu.index for gpu in environ.list_gpus()] == indices


def test_gpus_that_torch_cannot_use_leave_the_ranks_on_the_cpu(
    nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(environ, "_nccl_version", lambda: None)
    assert environ.choose_backend("auto", 2) == "gloo"
    assert "CPU" in next(finding.detail for finding in environ.doctor() if finding.topic == "NCCL")
    with pytest.raises(HardwareMissing, match="0 can be used"):
        environ.choose_backend("nccl", 2)
    monkeypatch.setattr(environ, "_nccl_version", lambda: "2.28.9")
    assert environ.choose_backend("auto", 2) == "nccl"
    assert environ.choose_backend("gloo", 9) == "gloo"
    with pytest.raises(HardwareMissing, match="3 ranks want a GPU each, 2 can be used"):
        environ.choose_backend("auto", 3)


def test_each_task_of_srun_may_see_one_gpu_of_its_own(nvidia_smi: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`srun --gpus-per-task=1`: the step has four, and every task sees one, which it calls 0."""
    monkeypatch.setattr(environ, "_nccl_version", lambda: "2.28.9")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    monkeypatch.setenv("SLURM_GPUS_ON_NODE", "4")
    task = RankEnv(rank=5, world_size=8, local_rank=1, local_world_size=4, launcher="slurm")
    assert environ.choose_backend("auto", 4, task) == "nccl"
    with pytest.raises(HardwareMissing, match="4 ranks want a GPU each, 1 can be used"):
        environ.choose_backend("auto", 4, replace(task, launcher="torchrun"))  # which gives no rank a GPU
    for too_few in ("1", "2"):
        monkeypatch.setenv("SLURM_GPUS_ON_NODE", too_few)
        with pytest.raises(HardwareMissing, match=r"1 can be used; .*, or give srun --gpu-bind=none"):
            environ.choose_backend("auto", 4, task)  # some share one


def test_a_driver_tool_that_fails_means_no_gpus(nvidia_smi: Path) -> None:
    nvidia_smi.write_text("#!/bin/sh\nexit 9\n")
    assert environ.list_gpus() == []


def test_every_missing_thing_comes_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environ, "find_redis_binary", lambda: None)
    monkeypatch.setattr(environ, "_version", lambda name: None)
    findings = environ.doctor()
    assert {finding.topic for finding in findings} >= {"machine", "python", "torch", "GPUs", "Redis", "RDMA", "pyverbs"}
    assert all(finding.remedy for finding in findings if finding.status != "ok")
    assert {f.topic for f in findings if f.status == "problem"} == {"torch"}


def test_a_snapshot_keeps_allow_listed_variables_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_IB_TIMEOUT", "22")
    monkeypatch.setenv("REDIS_PASSWORD", "secret")
    kept = environ.snapshot(seed=3)
    assert kept["seed"] == 3
    assert kept["variables"]["NCCL_IB_TIMEOUT"] == "22"
    assert "REDIS_PASSWORD" not in kept["variables"]
    assert kept["versions"]["torch"] == metadata.version("torch")


def test_outside_a_checkout_the_commit_is_what_the_user_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(environ, "_root", lambda: tmp_path)
    monkeypatch.delenv("NETLAYER_COMMIT", raising=False)
    assert environ.snapshot()["commit"] == ""
    monkeypatch.setenv("NETLAYER_COMMIT", "abc1234")
    assert environ.snapshot()["commit"] == "abc1234"


def test_another_distribution_with_a_package_of_our_name_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    owners = {"bench": ["netlayer", "other-bench"], "topology": ["netlayer"]}
    monkeypatch.setattr(metadata, "packages_distributions", lambda: owners)
    [clash] = environ.find_clashes()
    assert str(clash).startswith("package bench: is also in the distribution other-bench;")
    assert "problem" in {finding.status for finding in environ.doctor()}


def test_a_foreign_package_first_on_the_path_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ.check_package("bench")
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "bench", raising=False)
    with pytest.raises(PackageClash, match="not beside netlayer"):
        environ.check_package("bench")


def test_a_missing_package_is_named() -> None:
    with pytest.raises(PackageClash, match="package no_such_package: is missing"):
        environ.check_package("no_such_package")


def test_memory_is_bounded_by_the_cgroup(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own = Path("/proc/self/cgroup").read_text().splitlines()
    memory = next((line for line in own if line.split(":")[1] in ("memory", "")), None)
    if memory is None:
        pytest.skip("needs a memory cgroup")
    unlimited = environ.available_memory_bytes(tmp_path)
    names = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes") if ":memory:" in memory else ("memory.max", "memory.current")
    )
    folder = tmp_path / "memory" if ":memory:" in memory else tmp_path
    folder.mkdir(exist_ok=True)  # the root alone is mounted, as in a container
    for name, text in zip(
        (*names, "memory.stat"), ("3000000", "1000000", "anon 1\ntotal_inactive_file 500000"), strict=True
    ):
        (folder / name).write_text(text)
    assert unlimited > 2_500_000
    assert environ.available_memory_bytes(tmp_path) == 2_500_000
    (folder / names[0]).write_text("max")
    assert environ.available_memory_bytes(tmp_path) > 2_500_000


def test_what_a_laptop_need_not_have_is_optional(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environ, "list_gpus", list)
    status = {finding.topic: finding.status for finding in environ.doctor()}
    assert status["GPUs"] == "optional"
    assert status["RDMA"] != "missing"


def test_a_loopback_that_is_down_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: object) -> None:
        raise OSError(101, "Network is unreachable")

    environ.check_loopback()
    monkeypatch.setattr("socket.socket.connect", unreachable)
    with pytest.raises(ConfigError, match=r"loopback is down .* ip link set lo up"):
        environ.check_loopback()
