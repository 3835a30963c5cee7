"""Lines of logs, as programs and kernels wrote them in public bug reports, and what they mean for a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from netlayer.errors import ConfigError
from trainer.resilience.rules import load_rules, match

RULES = load_rules()


@pytest.mark.parametrize(
    ("line", "means"),
    [
        ("NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus.", "hardware"),
        ("NVRM: Xid (PCI:0000:65:00): 64, pid='N/A', Row Remapper: Failed to remap row", "hardware"),
        ("NVRM: Xid (PCI:0000:65:00): 94, pid=12345, Contained: ECC error", "note"),
        ("NVRM: Xid (PCI:0000:03:00): 31, pid=7, name=python, Ch 00000010, MMU Fault", "note"),
        # https://github.com/NVIDIA/NVSentinel/issues/155: no Xid, in three lines
        ("               NVRM: fallen off the bus and is not responding to commands.", "hardware"),
        ("EDAC MC0: 1 UE memory read error on CPU_SrcID#0_MC#0_Chan#0_DIMM#0", "hardware"),
        ("EDAC MC0: 1 CE memory read error on CPU_SrcID#0_MC#0_Chan#0_DIMM#0", "note"),
        ("Out of memory: Killed process 4242 (python) total-vm:1kB", "memory"),
        # https://github.com/NVIDIA/open-gpu-kernel-modules/issues/1150: what follows a fault of another GPU is none
        ("NVRM: Xid (PCI:0000:ed:00): 45, pid=1, name=python3, Ch 0000000c caused by previous Xid 145", "note"),
        ("NVRM: Xid (PCI:0000:dc:00): 149, NETIR_LINK_EVT, Fatal, XC0 i0 Link 02 (0x00000000)", "hardware"),
        ("NVRM: Xid (PCI:0000:ba:00): 145, RLW_REMAP, Nonfatal, XC0 i0 Link 05 (0x00000004)", "note"),
        ("Memory cgroup out of memory: Killed process 1 (python3) total-vm:199580224kB", "memory"),
        # https://github.com/NVIDIA/nvidia-docker/issues/1553: beside the fault
        ("NVRM: GPU at PCI:0000:09:00: GPU-26fba6b2-9e52-006e-68db-4ce18382a5ea", None),
        ("pcieport 0000:00:01.1: AER: Corrected error received: 0000:00:00.0", "note"),
        # https://github.com/leptonai/gpud/pull/1209: around the fault, and none themselves
        ("mlx5_core 0000:ab:00.0 mlx5_5: Port: 1 Link ACTIVE", None),
        ("workqueue: ib_cache_event_task [ib_core] hogged CPU for >10000us 4 times", None),
        ("EXT4-fs (md127p3): re-mounted 0f3cd65a r/w. Quota mode: none.", None),
    ],
)
def test_lines_of_the_kernel(line: str, means: str | None) -> None:
    found = match(RULES, "kernel", line, None, 0)
    assert (found and found.means) == means


@pytest.mark.parametrize(
    ("line", "means", "names"),
    [
        # https://github.com/NVIDIA/nccl/issues/1814: names the ends of a path, and not which of them is bad
        (
            "h:984:1357 [4] ib_plugin.c:1615 NCCL WARN NET/IB : Got completion from peer 172.36.143.59<44206> with "
            "status=12 opcode=129 len=65536 vendor err 129 (Recv)",
            "symptom",
            (),
        ),
        # https://github.com/pytorch/elastic/issues/134
        ("gpu:141:158 [0] include/socket.h:416 NCCL WARN Net : Connection closed by remote peer", "symptom", ()),
        # https://github.com/facebookresearch/dinov2/issues/447
        (
            "[rank0]:[E ProcessGroupNCCL.cpp:1316] [PG 0 Rank 0] Heartbeat monitor timed out! Process will be",
            "symptom",
            (),
        ),
        ("RuntimeError: CUDA error: uncorrectable ECC error encountered", "hardware", ()),
        ("h:1:9 [2] NCCL WARN Cuda failure 'uncorrectable ECC error encountered'", "hardware", ()),
        ("h:1:9 [2] NCCL WARN Cuda failure 719 'unspecified launch failure'", "process", ()),
        # https://github.com/hiyouga/LlamaFactory/issues/8261, https://github.com/ai2cm/ace/issues/348: all who wait
        (
            "[rank2]:[E602 11:18:53 ProcessGroupNCCL.cpp:684] [Rank 2] Some NCCL operations have failed or timed out",
            "symptom",
            (),
        ),
        (
            "torch.distributed.DistBackendError: NCCL error in: ProcessGroupNCCL.cpp:1691, remote process exited or "
            "there was a network error, NCCL version 2.19.3",
            "symptom",
            (),
        ),
        # https://github.com/aws/aws-ofi-nccl/issues/161
        ("a:1:2 [0] NCCL WARN NET/OFI Request completed with error. RC: 21. Error: unknown error", "symptom", ()),
        (
            "h:1:9 [0] transport/net_ib.cc:94 NCCL WARN NET/IB : mlx5_0:1 Got async fatal event: port error",
            "process",
            (),
        ),
        ("RuntimeError: DataLoader worker (pid 1234) is killed by signal: Killed.", "process", ()),
        ("RuntimeError: DataLoader worker (pid(s) 12, 13) exited unexpectedly", "process", ()),
        ("OSError: [Errno 28] No space left on device", "disk", ()),
        # Of healthy runs.
        ("h:12:34 [3] NCCL INFO Connection closed by remote peer h2<4>", None, ()),
        ("h:1:9 [0] NCCL INFO comm 0x1 rank 0 nranks 8 cudaDev 0 busId 1000 - Abort COMPLETE", None, ()),
        ("algo-1:462:462 [0] NCCL INFO NET/OFI Selected Provider is efa", None, ()),
        ("libfabric:462:1673041636:efa:core:rxr_info_to_rxr():506<warn> FI_HMEM capability requires RDMA", None, ()),
        ("[rank0]:[W ProcessGroupNCCL.cpp:1168] Warning: process group has NOT been destroyed before it", None, ()),
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB.", "memory", ()),
        ("[c10d] The server socket has failed to listen on any local network address. (EADDRINUSE)", "symptom", ()),
        (
            "error: rank 2 (tp=0, pp=0, dp=2; host h) is stopped (SIGSTOP), last seen at step 9; because of it "
            "all_gather #40 of rank 1 failed after 3 s",
            "named",
            (2,),
        ),
        ("error: rank 3 (dp=3; host h) failed at step 9 in loop.py:88: RuntimeError: x", "named", (3,)),
        ("error: step 7: the loss is nan on rank 1 (tp=0, pp=0, dp=1); lower job.optimizer.lr", "nan", (1,)),
        (
            "error: step 7: the loss is nan on rank 0 (tp=0, pp=0, dp=0), -inf on rank 1 (tp=0, pp=0, dp=1); lower",
            "nan",
            (0, 1),
        ),
        (
            "error: step 7: the held-out loss of wiki is nan on rank 0 (dp=0), nan on rank 2 (dp=1), nan on rank 4 "
            "(dp=2), and on 5 more ranks; lower job.optimizer.lr",
            "nan",
            (0, 2, 4),
        ),
        ("step 7: waits for a message, of 3 on rank 1", None, ()),
        (
            "error: step 40: replicas that agreed after step 30 differ: rank 2 (tp=0, dp=2) has other parameters, "
            "rank 3 (tp=0, pp=0, dp=3) has other parameters",
            "corrupt",
            (2, 3),
        ),
        ("error: step 40: replicas that agreed after step 30 differ: ranks 0,1 differ in parameters", "corrupt", ()),
        ("error: step 7: the gradient norm is nan, in the shard of rank 0 (a shard is the mean)", "nan", ()),
        ("step 10: held-out loss 3.2", None, ()),
    ],
)
def test_lines_of_ranks(line: str, means: str | None, names: tuple[int, ...]) -> None:
    found = match(RULES, "rank", line, 0, 0)
    assert (found and found.means) == means
    assert (found.names if found else ()) == names


def test_a_line_of_a_rank_is_not_read_as_one_of_the_kernel() -> None:
    assert match(RULES, "rank", "NVRM: Xid (PCI:0000:44:00): 79, GPU has fallen off the bus.", 0, 0) is None


def test_a_users_rules_go_first(tmp_path: Path) -> None:
    file = tmp_path / "rules.toml"
    file.write_text(
        '[[rule]]\nname = "ours"\nwhere = "rank"\npattern = "CUDA out of memory"\nmeans = "job"\nsource = "us"\n'
    )
    found = match(load_rules(str(file)), "rank", "CUDA out of memory", 0, 0)
    assert found is not None
    assert found.means == "job"
    for text in ("[[rule]]\nname = 1\n", "[[rule", '[[rule]]\nname="x"\nwhere="y"\npattern=""\nmeans="z"\nsource=""\n'):
        file.write_text(text)
        with pytest.raises(ConfigError, match=r"job\.resilience\.rules"):
            load_rules(str(file))


def test_every_rule_has_a_source_and_a_name_of_its_own() -> None:
    names = [rule.name for rule in RULES]
    assert len(names) == len(set(names))
    assert all(rule.source for rule in RULES)
