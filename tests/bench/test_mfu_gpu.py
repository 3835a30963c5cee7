"""The peers of `bench.mfu` in layouts of several ranks on NCCL: the losses of ours, on however few GPUs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bench.mfu.jobs import Jobs, read_entries, read_layout
from bench.mfu.ranks import Order
from bench.mfu.rows import MfuRun
from bench.mfu.systems import OURS, PEERS
from bench.peers import mcore
from netlayer.command import RunOptions
from netlayer.launch.launcher import launch
from netlayer.store.meeting import meeting_place
from tests.bench.mfu_sharing import run_sharing_rank

SMALL = ("hidden=256", "ffn_hidden=512", "heads=4", "layers=4", "seq_len=128", "vocab_size=512")
LAYOUTS = ("dp2", "tp2", "pp2", "pp2vp2", "tp2pp2vp2", "tp2pp2dp2")
CASES = [
    ("fsdp2", "dp2"),
    *((system, layout) for system in ("native3d", "mcore") for layout in LAYOUTS),
    *(("mcore_no_overlap", layout) for layout in LAYOUTS if "vp" in layout),
]
WARMUP = 3
"""Steps whose losses are compared; the learning rate is such that a wrong gradient shows in the third."""


def losses(system: str, layout: str, folder: Path) -> dict[str, list[float]]:
    """Of ours and of a peer."""
    overrides = (*(f"model.{each}" for each in SMALL), "optimizer.lr=0.003", "optimizer.max_grad_norm=0.5")
    build = Jobs(RunOptions(None, overrides, 0, None, None), "1m", read_layout(layout), 2, None, dtype="bfloat16")
    entries = read_entries(build, system, (), (), compiles=True)
    PEERS[system].check(entries[1].job, "nccl")
    runs: list[MfuRun] = []

    def receive(rank: int, message: object) -> None:
        if rank == 0 and isinstance(message, MfuRun):
            runs.append(message)

    order = Order(tuple((1, entry) for entry in entries), 1, WARMUP, 0, 1, 240.0, float("inf"))
    with meeting_place() as place:
        launch(
            run_sharing_rank,
            build().parallel.layout.world_size,
            args=(order, place.init_method("mfu")),
            log_dir=folder,
            env=PEERS[system].env,
            on_message=receive,
        )
    return {run.system: list(run.losses) for run in runs}


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 1, reason="needs a GPU with CUDA")
@pytest.mark.parametrize(("system", "layout"), CASES)
def test_a_peer_has_our_losses_on_nccl(system: str, layout: str, tmp_path: Path) -> None:
    if system.startswith("mcore") and not mcore.is_installed():
        pytest.skip("needs megatron-core")
    found = losses(system, layout, tmp_path)
    assert found[system] == pytest.approx(found[OURS], abs=5e-2)
    assert found[OURS][-1] < found[OURS][0] - 0.2
