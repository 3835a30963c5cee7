"""What is refused for its size: never a job that would fit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from netlayer import environ
from netlayer.config import JobConfig, ModelConfig, load_config
from netlayer.environ import Gpu
from netlayer.errors import HardwareMissing
from trainer.memory import check_memory, num_parameters, rank_bytes
from trainer.model import GPT


@pytest.mark.parametrize("parallel_block", [False, True])
def test_parameters_are_those_of_the_model(parallel_block: bool) -> None:
    config = ModelConfig(
        layers=3, hidden=24, heads=2, ffn_hidden=56, vocab_size=70, seq_len=9, parallel_block=parallel_block
    )
    with torch.device("meta"):
        model = GPT(config)
    assert num_parameters(config) == sum(parameter.numel() for parameter in model.parameters())


def test_a_rank_holds_whole_parameters_and_its_share_of_the_optimiser() -> None:
    job = load_config(Path("examples/h200x8.toml")).job
    parameters = num_parameters(job.model)
    assert rank_bytes(job) == pytest.approx(parameters * (2 + 16 / 8), rel=1e-6)
    twice = job.model_copy(update={"batch": job.batch.model_copy(update={"global_size": 64})})
    assert rank_bytes(twice) == pytest.approx(parameters * (2 + 4 + 16 / 8), rel=1e-6)


def job_of(name: str) -> JobConfig:
    return load_config(Path(f"examples/{name}.toml")).job


def test_a_7b_model_on_the_cpus_of_a_small_machine_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environ, "available_memory_bytes", lambda: 24 << 30)
    check_memory(job_of("laptop"), 2, "gloo")
    with pytest.raises(HardwareMissing) as caught:
        check_memory(job_of("h200x8"), 8, "gloo")
    assert "8 ranks 204.6 GiB; free here are 24.0 GiB; lower job.model.layers" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 3


def test_a_gpu_holds_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for memory_mib, fits in ((143_771, True), (24_000, False)):
        monkeypatch.setattr(environ, "usable_gpus", lambda mib=memory_mib: [Gpu(0, "a card", mib, "1")] * 8)
        if fits:
            check_memory(job_of("h200x8"), 8, "nccl")
        else:
            with pytest.raises(HardwareMissing, match=r"the GPU has 23\.4 GiB"):
                check_memory(job_of("h200x8"), 8, "nccl")
