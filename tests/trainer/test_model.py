"""The GPT against a plain float64 computation, and its initialisation."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from netlayer.config import ModelConfig
from trainer.model import GPT, build_model, window_mask

CPU = torch.device("cpu")
SHAPE = {"layers": 2, "hidden": 12, "heads": 3, "ffn_hidden": 20, "vocab_size": 31, "seq_len": 7}


def naive_norm(x_TD: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    centred = x_TD - x_TD.mean(1, keepdim=True)
    scale = ((centred**2).mean(1, keepdim=True) + 1e-5) ** -0.5
    return centred * scale * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def naive_linear(x_TD: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    return x_TD @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def naive_attention(x_TD: Tensor, weights: dict[str, Tensor], name: str, config: ModelConfig) -> Tensor:
    """One query and one head at a time, over the very keys that it may see."""
    qkv = naive_linear(x_TD, weights, f"{name}.qkv")
    q, k, v = qkv.split(config.hidden, dim=1)
    width = config.hidden // config.heads
    rows = []
    for t in range(len(x_TD)):
        first = max(0, t - config.attention_window + 1) if config.attention_window else 0
        heads = []
        for head in range(config.heads):
            part = slice(head * width, (head + 1) * width)
            scores = k[first : t + 1, part] @ q[t, part] / math.sqrt(width)
            heads.append(torch.softmax(scores, 0) @ v[first : t + 1, part])
        rows.append(torch.cat(heads))
    return naive_linear(torch.stack(rows), weights, f"{name}.out")


def naive_mlp(x_TD: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    h = naive_linear(x_TD, weights, f"{name}.up")
    gelu = 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
    return naive_linear(gelu, weights, f"{name}.down")


def naive_block(x_TD: Tensor, weights: dict[str, Tensor], name: str, config: ModelConfig) -> Tensor:
    y = naive_norm(x_TD, weights, f"{name}.attention_norm")
    attended = naive_attention(y, weights, f"{name}.attention", config)
    if config.parallel_block:
        return x_TD + naive_mlp(y, weights, f"{name}.mlp") + attended
    x_TD = x_TD + attended
    return x_TD + naive_mlp(naive_norm(x_TD, weights, f"{name}.mlp_norm"), weights, f"{name}.mlp")


def naive_loss(weights: dict[str, Tensor], tokens_BT: Tensor, targets_BT: Tensor, config: ModelConfig) -> Tensor:
    losses = []
    for tokens_T, targets_T in zip(tokens_BT, targets_BT, strict=True):
        x_TD = weights["embedding.token.weight"][tokens_T] + weights["embedding.position"][: len(tokens_T)]
        for layer in range(config.layers):
            x_TD = naive_block(x_TD, weights, f"blocks.{layer}", config)
        logits_TV = naive_norm(x_TD, weights, "head.norm") @ weights["head.projection.weight"].T
        losses.append(logits_TV.logsumexp(1) - logits_TV[torch.arange(len(targets_T)), targets_T])
    return torch.cat(losses).mean()


@pytest.mark.parametrize("parallel_block", [False, True])
@pytest.mark.parametrize("attention_window", [0, 1, 3, 7])
def test_loss_and_gradients_are_those_of_a_plain_computation(parallel_block: bool, attention_window: int) -> None:
    config = ModelConfig(**SHAPE, parallel_block=parallel_block, attention_window=attention_window)
    model = build_model(config, 0, CPU).double()
    spread(model)
    tokens_BT, targets_BT = torch.randint(31, (2, 3, 7), generator=torch.Generator().manual_seed(1))
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}

    loss = model(tokens_BT, targets_BT)
    loss.backward()
    expected = naive_loss(weights, tokens_BT, targets_BT, config)
    expected.backward()

    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, weights[name].grad, rtol=1e-8, atol=1e-12, msg=name)


def spread(model: GPT) -> None:
    """Values large enough, biases and norms too, that no term of the computation is lost."""
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype), alpha=0.3)


def test_window_as_wide_as_the_sequence_is_full_attention() -> None:
    assert window_mask(7, 7, CPU) is None
    assert window_mask(7, 0, CPU) is None


def test_window_lets_a_query_see_itself_and_those_just_before() -> None:
    mask = window_mask(4, 2, CPU)
    assert mask is not None
    assert mask.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]


def test_first_loss_is_that_of_a_guess() -> None:
    config = ModelConfig()
    tokens_BT, targets_BT = torch.randint(config.vocab_size, (2, 4, 64), generator=torch.Generator().manual_seed(1))
    assert build_model(config, 0, CPU)(tokens_BT, targets_BT).item() == pytest.approx(
        math.log(config.vocab_size), abs=0.1
    )


def test_same_seed_same_parameters_whatever_ran_before() -> None:
    config = ModelConfig(**SHAPE)
    first = build_model(config, 3, CPU).state_dict()
    torch.rand(5)
    second, other = build_model(config, 3, CPU).state_dict(), build_model(config, 4, CPU).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert not torch.equal(first["blocks.0.mlp.up.weight"], other["blocks.0.mlp.up.weight"])


def test_parameters_do_not_depend_on_which_others_are_built() -> None:
    shallow = build_model(ModelConfig(**SHAPE), 0, CPU).state_dict()
    deep = build_model(ModelConfig(**{**SHAPE, "layers": 4}), 0, CPU).state_dict()
    assert torch.equal(shallow["blocks.1.mlp.up.weight"], deep["blocks.1.mlp.up.weight"])
    assert not torch.equal(deep["blocks.0.mlp.up.weight"], deep["blocks.1.mlp.up.weight"])


def test_no_token_sees_a_later_one() -> None:
    model = build_model(ModelConfig(**SHAPE), 0, CPU)
    embedded = model.embedding(torch.arange(7)[None]).detach().requires_grad_()
    model.blocks[1](model.blocks[0](embedded, None), None)[0, 3].sum().backward()
    assert embedded.grad is not None
    touched = embedded.grad[0].abs().sum(1) > 0
    assert touched.tolist() == [True] * 4 + [False] * 3


def test_bfloat16_model_gives_its_loss_in_float32() -> None:
    model = build_model(ModelConfig(**SHAPE), 0, CPU).to(torch.bfloat16)
    assert model(torch.zeros(1, 7, dtype=torch.int64), torch.ones(1, 7, dtype=torch.int64)).dtype == torch.float32
