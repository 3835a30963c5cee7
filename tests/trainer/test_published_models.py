"""Llama 3 and Qwen3: what is computed, counted and estimated, against modules written apart from ours."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from netlayer.config.tree import ModelConfig, build_config
from netlayer.workload.flops import step_flops
from netlayer.workload.model_size import num_parameters
from trainer.model.gpt import build_model
from trainer.ops.rotary import frequencies, scaling_of

from .published_models import CausalLM, of_job, scaled

CPU = torch.device("cpu")
KINDS = {"positions": "rotary", "norm": "rmsnorm", "activation": "swiglu", "bias": False}
SHAPE = {"layers": 2, "hidden": 12, "heads": 6, "kv_heads": 2, "ffn_hidden": 20, "vocab_size": 31, "seq_len": 7}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16}
MODELS: dict[str, dict[str, Any]] = {
    "Llama 3, tied": {"tied_embeddings": True, "rotary_base": 500.0, "rope_scaling": LLAMA3},
    "Qwen3, wide heads": {"head_dim": 10, "qk_norm": True, "norm_eps": 1e-2, "rotary_base": 1e4},
    "narrow heads that do not divide the width": {"hidden": 14, "head_dim": 4, "norm_eps": 0.3},
    "linear scaling": {"qk_norm": True, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
}


def config_of(name: str, **more: object) -> ModelConfig:
    return ModelConfig.model_validate({**SHAPE, **KINDS, **MODELS[name], **more})


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_the_published_definition(name: str) -> None:
    config = config_of(name)
    ours, theirs = build_model(config, 0, CPU).double(), CausalLM(of_job(config)).double()
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():  # large enough that no term is lost in another
        for parameter in ours.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype), alpha=0.3)
    named = theirs.take_values(ours)
    tokens_BT, targets_BT = torch.randint(31, (2, 3, 7), generator=generator)
    losses = ours(tokens_BT, targets_BT), theirs(tokens_BT, targets_BT)
    for loss in losses:
        loss.backward()
    torch.testing.assert_close(*losses, rtol=1e-10, atol=1e-12)
    gradients = dict(theirs.named_parameters())
    for name, parameter in ours.named_parameters():
        pieces = [gradients[other].grad for other, own in named.items() if own == name]
        joined = torch.cat([piece for piece in pieces if piece is not None])
        torch.testing.assert_close(parameter.grad, joined, rtol=1e-8, atol=1e-12, msg=name)


@pytest.mark.parametrize("name", MODELS)
def test_parameters_and_flops_are_those_of_the_published_definition(name: str) -> None:
    config = config_of(name)
    model = CausalLM(of_job(config)).double()
    assert num_parameters(config) == sum(parameter.numel() for parameter in model.parameters())
    tokens_BT = torch.zeros(3, config.seq_len, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model(tokens_BT, tokens_BT)
    assert step_flops(config, 3).full == 3 * counter.get_total_flops()  # backward is twice forward


def test_scaled_frequencies_of_a_published_model_are_those_of_its_rule() -> None:
    config = build_config({"job": {"model": {"preset": "llama3-1b"}}}).job.model
    published = of_job(config)
    plain = frequencies(config.head_width, config.rotary_base, None).tolist()
    expected = [scaled(frequency, published) for frequency in plain]
    got = frequencies(config.head_width, config.rotary_base, scaling_of(config.rope_scaling)).tolist()
    assert got == pytest.approx(expected, rel=1e-12)
    ratios = [before / after for before, after in zip(plain, got, strict=True)]
    assert ratios[0] == 1
    assert ratios[-1] == pytest.approx(32)
    assert any(1.01 < ratio < 31 for ratio in ratios)
