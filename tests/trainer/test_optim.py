"""The learning rate, and which parameters are decayed."""

from __future__ import annotations

import pytest
import torch

from collectives.sharded import ShardedDataParallel
from netlayer.config import ModelConfig, OptimizerConfig
from trainer.model import build_model
from trainer.optim import build_optimizer, learning_rate, set_learning_rate


def test_learning_rate_rises_then_falls_along_a_cosine() -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=10, steps=110, min_lr_share=0.2)
    assert [learning_rate(config, step) for step in (1, 5, 10)] == pytest.approx([0.1, 0.5, 1.0])
    assert learning_rate(config, 60) == pytest.approx(0.6)
    assert learning_rate(config, 110) == pytest.approx(0.2)


@pytest.mark.parametrize(("warmup_steps", "expected"), [(0, 0.1), (1, 1.0), (20, 0.05)])
def test_a_job_of_one_step_has_a_learning_rate(warmup_steps: int, expected: float) -> None:
    config = OptimizerConfig(lr=1.0, warmup_steps=warmup_steps, steps=1, min_lr_share=0.1)
    assert learning_rate(config, 1) == pytest.approx(expected)


def test_matrices_alone_are_decayed() -> None:
    config = ModelConfig(layers=1, hidden=8, heads=2, ffn_hidden=16, vocab_size=20, seq_len=4)
    model = build_model(config, 0, torch.device("cpu"))
    vectors = {name for name, parameter in model.named_parameters() if parameter.ndim == 1}
    sharded = ShardedDataParallel(model)
    optimizer = build_optimizer(OptimizerConfig(weight_decay=0.1), sharded)
    decay = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    undecayed = {name for name, _, piece in sharded.named_shards() if decay[id(piece)] == 0}
    assert undecayed == vectors
    set_learning_rate(optimizer, 0.5)
    assert {group["lr"] for group in optimizer.param_groups} == {0.5}


def test_an_optimiser_that_is_not_built_is_refused() -> None:
    model = ShardedDataParallel(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match="only adamw"):
        build_optimizer(OptimizerConfig(name="lamb"), model)
