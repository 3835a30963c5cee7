"""`bench.peers.fsdp2`: where its parameters lie."""

from __future__ import annotations

from pathlib import Path
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from bench.peers.fsdp2 import Fsdp2
from netlayer.config.tree import build_config

CPU = torch.device("cpu")


def test_it_stays_on_the_cpu_of_a_machine_with_a_gpu(tmp_path: Path) -> None:
    job = build_config({"cluster": {"gpus_per_server": 1}, "job": {"parallel": {"dp": 1}}}).job
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        with mock.patch("torch._C._get_accelerator", return_value=torch.device("cuda")):
            parameters = list(Fsdp2(job, 0, CPU).model.parameters())
    finally:
        dist.destroy_process_group()
    assert parameters
    for parameter in parameters:
        assert isinstance(parameter, DTensor)
        assert parameter.device_mesh.device_type == "cpu"
