"""The systems of `bench.mfu`: what all of them start from."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from bench.mfu.systems import OURS, Entry
from bench.peers import native3d
from netlayer.config.tree import build_config
from netlayer.launch.launcher import launch
from netlayer.store.meeting import MeetingPlace
from tests.bench import mfu_ranks
from trainer.parallel import MicroBatch

CPU = torch.device("cpu")
GROUPS = {"tp": None, "dp": None, "pp": None}


def test_masters_start_from_values_that_the_dtype_holds_and_losses_agree(tmp_path: Path) -> None:
    """Steps as large as a digit of bfloat16: from values before they are rounded they go elsewhere."""
    job = build_config({"cluster": {"gpus_per_server": 1}, "job": {"parallel": {"dp": 1}}}).job
    job = job.model_copy(update={"model": job.model.model_copy(update={"dtype": "bfloat16"})})
    tokens = torch.randint(job.model.vocab_size, (2, 33), generator=torch.Generator().manual_seed(0))
    batches: list[MicroBatch] = [(tokens[:, :-1], tokens[:, 1:])]
    losses = {}
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        for name in (OURS, "fsdp2", "native3d"):
            system = Entry(name, job).build(0, 0, CPU, GROUPS)
            masters = [master.detach().clone() for master in system.masters()]
            assert sum(master.numel() for master in masters) > 1e6, name
            assert all(torch.equal(each, each.bfloat16().float()) for each in masters), name
            losses[name] = [float(system.step(batches)) for _ in range(3)]
            assert any(not torch.equal(each, each.bfloat16().float()) for each in system.masters()), name
            system.close()
    finally:
        dist.destroy_process_group()
        native3d._mesh.cache_clear()
    assert losses["fsdp2"] == pytest.approx(losses[OURS], abs=2e-2)
    assert losses["native3d"] == pytest.approx(losses[OURS], abs=2e-2)


def test_ours_leaves_no_process_group_behind(tmp_path: Path) -> None:
    """Communicators of NCCL hold memory, which the systems after it would lack."""
    job = build_config({"cluster": {"gpus_per_server": 2}, "job": {"parallel": {"dp": 2}}}).job
    before, within, *rest = launch(
        mfu_ranks.count_groups, 2, args=(job, MeetingPlace("", "TCPStore").init_method("test")), log_dir=tmp_path
    )[0]
    assert within > before
    assert rest == [before, within, before]
