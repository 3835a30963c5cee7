"""The GPT against a plain float64 computation, and its initialisation."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from netlayer.config.tree import ModelConfig, build_config
from netlayer.workload.model_size import num_parameters
from netlayer.workload.presets import MODELS
from trainer.model.gpt import GPT, build_model
from trainer.ops.attention import window_mask
from trainer.ops.loss import linear_cross_entropy

CPU = torch.device("cpu")
SHAPE = {"layers": 2, "hidden": 12, "heads": 3, "ffn_hidden": 20, "vocab_size": 31, "seq_len": 7}


def naive_norm(x_TD: Tensor, weights: dict[str, Tensor], name: str) -> Tensor:
    if f"{name}.bias" not in weights:  # RMSNorm
        return x_TD * ((x_TD**2).mean(1, keepdim=True) + 1e-5) ** -0.5 * weights[f"{name}.weight"]
    centred = x_TD - x_TD.mean(1, keepdim=True)
    scale = ((centred**2).mean(1, keepdim=True) + 1e-5) ** -0.5
    return centred * scale * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def naive_linear(x_TD: Tensor, weights: dict[str, Tensor], name: str, part: str = "weight") -> Tensor:
    y_TD = x_TD @ weights[f"{name}.{part}"].T
    return y_TD + weights[f"{name}.bias"] if f"{name}.bias" in weights else y_TD


def naive_rotation(x_K: Tensor, position: int, base: float) -> Tensor:
    turned, half = x_K.clone(), len(x_K) // 2
    for i in range(half):
        angle = position * base ** (-i / half)
        turned[i] = x_K[i] * math.cos(angle) - x_K[i + half] * math.sin(angle)
        turned[i + half] = x_K[i + half] * math.cos(angle) + x_K[i] * math.sin(angle)
    return turned


def naive_attention(q: Tensor, k: Tensor, v: Tensor, layer: int, config: ModelConfig) -> Tensor:
    """One query and one head at a time, over the very keys that it may see."""
    width, window = config.hidden // config.heads, config.window(layer)
    shared = config.heads // config.num_kv_heads
    turn = config.positions == "rotary"
    rows = []
    for t in range(len(q)):
        first = max(0, t - window + 1) if window else 0
        heads = []
        for head in range(config.heads):
            part = slice(head * width, (head + 1) * width)
            kept = slice(head // shared * width, (head // shared + 1) * width)
            query = naive_rotation(q[t, part], t, config.rotary_base) if turn else q[t, part]
            keys = [k[s, kept] for s in range(first, t + 1)]
            if turn:
                keys = [naive_rotation(key, first + s, config.rotary_base) for s, key in enumerate(keys)]
            scores = torch.stack(keys) @ query / math.sqrt(width)
            heads.append(torch.softmax(scores, 0) @ v[first : t + 1, kept])
        rows.append(torch.cat(heads))
    return torch.stack(rows)


def naive_activation(h: Tensor, config: ModelConfig) -> Tensor:
    if config.activation == "swiglu":
        gate, value = h.split(config.ffn_hidden, dim=1)
        return gate * torch.sigmoid(gate) * value
    return 0.5 * h * (1 + torch.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))


def naive_block(x_TD: Tensor, weights: dict[str, Tensor], layer: int, config: ModelConfig) -> Tensor:
    name, shared = f"blocks.{layer}", config.hidden * config.num_kv_heads // config.heads
    widths = [config.hidden, shared, shared]
    y = naive_norm(x_TD, weights, f"{name}.norm")
    if config.parallel_block:
        inner = naive_linear(y, weights, f"{name}.inner")
        q, k, v, up = inner.split([*widths, inner.shape[1] - sum(widths)], dim=1)
        attended = naive_linear(naive_attention(q, k, v, layer, config), weights, f"{name}.outer", "weights.0")
        return x_TD + attended + naive_activation(up, config) @ weights[f"{name}.outer.weights.1"].T
    q, k, v = naive_linear(y, weights, f"{name}.qkv").split(widths, dim=1)
    x_TD = x_TD + naive_linear(naive_attention(q, k, v, layer, config), weights, f"{name}.out", "weights.0")
    up = naive_linear(naive_norm(x_TD, weights, f"{name}.mlp_norm"), weights, f"{name}.up")
    return x_TD + naive_linear(naive_activation(up, config), weights, f"{name}.down", "weights.0")


def naive_loss(weights: dict[str, Tensor], tokens_BT: Tensor, targets_BT: Tensor, config: ModelConfig) -> Tensor:
    losses = []
    for tokens_T, targets_T in zip(tokens_BT, targets_BT, strict=True):
        x_TD = weights["embedding.tokens.weight"][tokens_T]
        if config.positions == "learned":
            x_TD = x_TD + weights["embedding.position"][: len(tokens_T)]
        for layer in range(config.layers):
            x_TD = naive_block(x_TD, weights, layer, config)
        table = weights["embedding.tokens.weight" if config.tied_embeddings else "head.tokens.weight"]
        logits_TV = naive_norm(x_TD, weights, "head.norm") @ table.T
        losses.append(logits_TV.logsumexp(1) - logits_TV[torch.arange(len(targets_T)), targets_T])
    return torch.cat(losses).mean()


@pytest.mark.parametrize("parallel_block", [False, True])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"attention_window": 1},
        {"attention_window": 3, "window_pattern": "wf"},
        {"attention_window": 7, "tied_embeddings": True},
        {"positions": "rotary", "norm": "rmsnorm", "bias": False},
        {"activation": "swiglu", "kv_heads": 1, "positions": "rotary", "attention_window": 2},
    ],
)
def test_loss_and_gradients_are_those_of_a_plain_computation(parallel_block: bool, options: dict[str, Any]) -> None:
    config = ModelConfig(**SHAPE, parallel_block=parallel_block, **options)
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


@pytest.mark.parametrize("chunk_rows", [1, 4, 21, 100])
def test_loss_does_not_depend_on_how_many_rows_are_held_at_once(chunk_rows: int) -> None:
    generator = torch.Generator().manual_seed(2)
    x_MD, weight_VD = (torch.randn(n, 6, generator=generator, dtype=torch.float64).requires_grad_() for n in (21, 40))
    targets_M = torch.randint(37, (21,), generator=generator)
    loss = linear_cross_entropy(x_MD, weight_VD, targets_M, vocab_size=37, chunk_rows=chunk_rows)
    (3 * loss).backward()
    got = [loss, x_MD.grad, weight_VD.grad]
    x_MD.grad = weight_VD.grad = None
    plain = torch.nn.functional.cross_entropy(x_MD @ weight_VD[:37].T, targets_M)
    (3 * plain).backward()
    for ours, expected in zip(got, (plain, x_MD.grad, weight_VD.grad), strict=True):
        torch.testing.assert_close(ours, expected, rtol=1e-12, atol=1e-14)


def test_loss_without_gradients_makes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(*_: object) -> None:
        raise AssertionError("a gradient")

    monkeypatch.setattr("trainer.ops.loss.add_matmul", refused)
    x_MD, weight_VD = torch.randn(5, 6), torch.randn(9, 6, requires_grad=True)
    with torch.no_grad():
        linear_cross_entropy(x_MD, weight_VD, torch.zeros(5, dtype=torch.int64), vocab_size=9)


def test_selective_recomputation_keeps_less_for_the_backward_pass() -> None:
    kept = {}
    for recompute in ("none", "selective", "full"):
        modules = "mlp_act layernorm core_attn"
        model = build_model(ModelConfig(**SHAPE, recompute=recompute, recompute_modules=modules), 0, CPU)
        tokens_BT = torch.zeros(2, 7, dtype=torch.int64)
        sizes: list[int] = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, to=sizes: to.append(t.nbytes) or t, lambda t: t):
            model(tokens_BT, tokens_BT)
        kept[recompute] = sum(sizes)
    assert kept["full"] < kept["selective"] < 0.95 * kept["none"]


def test_window_lets_a_query_see_itself_and_those_just_before() -> None:
    mask = window_mask(4, 2, CPU)
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
    assert not torch.equal(first["blocks.0.up.weight"], other["blocks.0.up.weight"])


def test_parameters_do_not_depend_on_which_others_are_built() -> None:
    shallow = build_model(ModelConfig(**SHAPE), 0, CPU).state_dict()
    deep = build_model(ModelConfig(**{**SHAPE, "layers": 4}), 0, CPU).state_dict()
    assert torch.equal(shallow["blocks.1.up.weight"], deep["blocks.1.up.weight"])
    assert not torch.equal(deep["blocks.0.up.weight"], deep["blocks.1.up.weight"])


def test_no_token_sees_a_later_one() -> None:
    model = build_model(ModelConfig(**SHAPE), 0, CPU)
    assert model.embedding is not None
    embedded = model.embedding(torch.arange(7)[None]).detach().requires_grad_()
    model.blocks["1"](model.blocks["0"](embedded))[3].sum().backward()
    assert embedded.grad is not None
    touched = embedded.grad[:, 0].abs().sum(1) > 0
    assert touched.tolist() == [True] * 4 + [False] * 3


def test_bfloat16_model_gives_its_loss_in_float32() -> None:
    model = build_model(ModelConfig(**SHAPE), 0, CPU).to(torch.bfloat16)
    assert model(torch.zeros(1, 7, dtype=torch.int64), torch.ones(1, 7, dtype=torch.int64)).dtype == torch.float32


def test_gradient_of_a_token_that_comes_often_is_added_up_in_float32() -> None:
    """In bfloat16 a sum of ones stops at 256."""
    embedding = build_model(ModelConfig(**SHAPE | {"seq_len": 4096}), 0, CPU).to(torch.bfloat16).embedding
    assert embedding is not None
    embedding(torch.full((1, 4096), 3)).sum().backward()
    gradient = embedding.tokens.weight.grad
    assert gradient is not None
    assert gradient.dtype == torch.bfloat16
    assert gradient[3].tolist() == [4096.0] * 12
    assert not gradient[[2, 4]].any()


# As others count them, but for 1m and 125m: the smaller, the more their second token table weighs.
SIZES = {"1m": 0.001334, "125m": 0.1639, "1.3b": 1.419, "7b": 6.865, "13b": 13.11, "175b": 175.6, "530b": 531.2}
# As published, to the parameter.
PUBLISHED = {"llama3-1b": 1.235814400, "llama3-8b": 8.030261248, "llama3-70b": 70.553706496}
PUBLISHED |= {"qwen3-0.6b": 0.596049920, "qwen3-8b": 8.190735360}
PUBLISHED |= {"llama3-405b": 405.853388800}
SIZES |= {"nemotron4-15b": 15.63, "nemotron4-340b": 341.0} | PUBLISHED


@pytest.mark.parametrize(("name", "billions"), SIZES.items())
def test_presets_have_their_size_and_are_counted_without_memory(name: str, billions: float) -> None:
    config = build_config({"job": {"model": {"preset": name}}, "cluster": {"gpus_per_server": 2}}).job.model
    model = build_model(config, 0, torch.device("meta"))
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert counted == num_parameters(config)
    assert counted / 1e9 == pytest.approx(billions, rel=1e-3)
    assert MODELS.keys() == SIZES.keys()
    if name in PUBLISHED:
        assert counted == round(billions * 1e9)
