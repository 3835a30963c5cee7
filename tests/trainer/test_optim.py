"""What a job's optimiser is made of: which parameters are decayed and adapted."""

from __future__ import annotations

import pytest
import torch

from collectives.sharded.data_parallel import ShardedDataParallel
from netlayer.config.tree import ModelConfig, OptimizerConfig
from trainer.model.gpt import GPT, build_model
from trainer.optim import Lamb, build_optimizer, set_learning_rate

MODEL = ModelConfig(layers=1, hidden=8, heads=2, ffn_hidden=16, vocab_size=20, seq_len=4)
KINDS = {"adamw": torch.optim.AdamW, "lamb": Lamb}


def tiny_model() -> GPT:
    return build_model(MODEL, 0, torch.device("cpu"))


@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_matrices_alone_are_decayed_and_adapted(name: str) -> None:
    model = tiny_model()
    matrices = {name for name, parameter in model.named_parameters() if parameter.ndim > 1}
    sharded = ShardedDataParallel(model)
    optimizer = build_optimizer(OptimizerConfig.model_validate({"name": name, "weight_decay": 0.1}), sharded)
    assert type(optimizer) is KINDS[name]
    group_of = {piece: group for group in optimizer.param_groups for piece in group["params"]}
    for parameter, _, piece in sharded.named_shards():
        group, is_matrix = group_of[piece], parameter in matrices
        assert group["weight_decay"] == (0.1 if is_matrix else 0.0), parameter
        assert group.get("adapt", is_matrix) == is_matrix, parameter


def test_learning_rate_is_set_in_every_group() -> None:
    optimizer = build_optimizer(OptimizerConfig(), ShardedDataParallel(tiny_model()))
    set_learning_rate(optimizer, 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]
