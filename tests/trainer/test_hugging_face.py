"""config.json and the layouts of tensors elsewhere: the same model there and back, or one line that names the key."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from netlayer.config.tree import ModelConfig
from netlayer.errors import ConfigError
from tests.trainer.foreign_models import KINDS, MODELS, SHAPE, config_named, random_model, values_of
from tests.trainer.published_models import CausalLM, of_job
from trainer.checkpoint.foreign.hugging_face import architecture_of, config_of, layout_of, read_model
from trainer.checkpoint.foreign.layouts import own_shapes, torchtitan_layout

FILE = Path("somewhere/config.json")
# As the two sides publish them; keys that decide nothing here are left in.
LLAMA_4X: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_dropout": 0.0,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 8192,
    "max_position_embeddings": 131_072,
    "num_attention_heads": 32,
    "num_hidden_layers": 16,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 32.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500_000.0,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "vocab_size": 128_256,
}
GPT2: dict[str, Any] = {"architectures": ["GPT2LMHeadModel"], "n_ctx": 1024, "model_type": "gpt2", "vocab_size": 50_257}


def as_of_version_5(config: dict[str, Any]) -> dict[str, Any]:
    """Base and scaling in `rope_parameters`, as transformers 5 writes them."""
    moved = {key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling")}
    return moved | {"rope_parameters": {**config["rope_scaling"], "rope_theta": config["rope_theta"]}}


@pytest.mark.parametrize("config", [LLAMA_4X, as_of_version_5(LLAMA_4X)], ids=["transformers 4", "transformers 5"])
def test_a_published_llama_is_its_preset(config: dict[str, Any]) -> None:
    name, model = read_model(config, FILE, seq_len=8192)
    preset = ModelConfig.model_validate({"preset": "llama3-1b"})
    assert name == "LlamaForCausalLM"
    assert model == preset.model_copy(update={"preset": ""})


def test_keys_that_are_left_out_have_the_defaults_of_their_class() -> None:
    _, model = read_model({"architectures": ["LlamaForCausalLM"]}, FILE)
    assert (model.rotary_base, model.norm_eps, model.tied_embeddings) == (10_000.0, 1e-6, False)
    assert (model.hidden, model.layers, model.num_kv_heads, model.seq_len) == (4096, 32, 32, 2048)
    _, model = read_model(GPT2, FILE)
    assert (model.hidden, model.ffn_hidden, model.norm_eps, model.tied_embeddings) == (768, 3072, 1e-5, True)
    _, model = read_model({"model_type": "mistral", "sliding_window": None}, FILE)
    assert model.attention_window == 0
    _, model = read_model({"model_type": "mistral"}, FILE)
    assert model.attention_window == 4096


@pytest.mark.parametrize("name", MODELS)
def test_a_config_comes_back_as_it_was(name: str) -> None:
    config = config_named(name)
    written = config_of(config, "float32", None)
    assert read_model(written, FILE) == (architecture_of(config), config)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures = LlamaForSequenceClassification: must"),
        ({"architectures": None, "model_type": "mamba"}, "model_type = mamba: names none of GPT2LMHeadModel, "),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope_scaling.rope_type = yarn: must be default, linear"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "rope_scaling.rope_type = dynamic: "),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_scaling.low_freq_factor = None: is needed"),
        ({"rope_parameters": {"rope_theta": 1e6}}, "rope_theta = 500000.0: rope_parameters.rope_theta = 1000000.0: "),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1.0}}}, "rope_parameters = full_attention: one rotary"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor = 0.5: only 1.0 is computed here"),
        ({"hidden_act": "gelu"}, "hidden_act = gelu: only silu is computed here"),
        ({"attention_bias": True}, "attention_bias = True: linears of a block have biases alike here, and mlp_bias"),
        ({"quantization_config": {"bits": 4}}, "quantization_config = {'bits': 4}: only None is computed here"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, r"layer_types\[1\] = sliding_attention: all layers"),
        ({"num_key_value_heads": 5}, "gives a model that cannot be: job.model.kv_heads = 5 must divide"),
        ({"hidden_size": "2048"}, "hidden_size = 2048: must be a whole number above 0|gives a model that cannot be"),
        ({"vocab_size": None}, "vocab_size = None: needs a value"),
    ],
)
def test_what_is_not_computed_here_is_one_line_with_its_key(change: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line) as failure:
        read_model(LLAMA_4X | change, FILE)
    assert "\n" not in str(failure.value)
    assert "somewhere/config.json" in str(failure.value)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"activation_function": "gelu"}, "activation_function = gelu: GeLU is computed in its tanh form"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx = True: only False"),
        ({"scale_attn_weights": False}, "scale_attn_weights = False: only True"),
        ({"add_cross_attention": True}, "add_cross_attention = True: only False"),
    ],
)
def test_a_gpt2_that_is_not_computed_here_is_one_line(change: dict[str, Any], line: str) -> None:
    with pytest.raises(ConfigError, match=line):
        read_model(GPT2 | change, FILE)


def test_learned_positions_have_one_length() -> None:
    with pytest.raises(ConfigError, match=r"--seq-len = 512: is not the n_positions = 1024 of .*config\.json"):
        read_model(GPT2, FILE, seq_len=512)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"parallel_block": True}, "parallel_block"),
        ({"bias": False}, "bias"),
        ({"norm": "rmsnorm"}, "norm"),
        ({"activation": "swiglu"}, "activation"),
        ({"kv_heads": 2}, "kv_heads"),
        ({"head_dim": 6}, "head_dim"),
        ({"attention_window": 4}, "attention_window"),
        ({**KINDS, "norm": "layernorm"}, "norm"),
        ({**KINDS, "activation": "gelu"}, "activation"),
        ({**KINDS, "qk_norm": True, "bias": True}, "bias"),
        ({**KINDS, "attention_window": 4, "window_pattern": "wf"}, "window_pattern"),
        ({**KINDS, "attention_window": 4, "qk_norm": True}, "qk_norm"),
        ({**KINDS, "hidden": 20, "head_dim": 4}, "heads"),
    ],
)
def test_a_model_that_no_class_has_is_one_line_with_its_key(change: dict[str, Any], key: str) -> None:
    config = ModelConfig.model_validate({**SHAPE, **change})
    with pytest.raises(ConfigError, match=rf"^job\.model\.{key} = .*transformers' \w+") as failure:
        config_of(config, "float32", None)
    assert "\n" not in str(failure.value)


@pytest.mark.parametrize("name", MODELS)
def test_every_element_has_one_place_there(name: str) -> None:
    """Bitwise back, nothing twice and nothing lost: elements are numbered."""
    config = config_named(name)
    numbered, count = {}, 0
    for parameter, shape in own_shapes(config).items():
        numbered[parameter] = torch.arange(count, count + math.prod(shape)).view(shape)
        count += math.prod(shape)
    layout = layout_of(architecture_of(config), config)
    theirs = dict(layout.to_theirs(numbered.__getitem__))
    assert {key: tuple(tensor.shape) for key, tensor in theirs.items()} == layout.shapes
    elements = torch.cat([tensor.flatten() for tensor in theirs.values()])
    assert torch.equal(elements.sort().values, torch.arange(count))
    for parameter, tensor in numbered.items():
        assert torch.equal(layout.to_ours(parameter, theirs.__getitem__), tensor)


@pytest.mark.parametrize("name", ["Llama", "Llama, tied, scaled as 3.1", "Qwen3, wide heads"])
def test_names_and_rows_are_those_of_the_published_definition(name: str) -> None:
    """Against modules written apart from ours, with one projection each and names as in the published files."""
    config = config_named(name)
    ours, theirs = random_model(config), CausalLM(of_job(config))
    named = theirs.take_values(ours)
    values = dict(theirs.named_parameters())
    tensors = dict(layout_of(architecture_of(config), config).to_theirs(values_of(ours).__getitem__))
    short = {key.removeprefix("model.").replace(".mlp.", "."): tensor for key, tensor in tensors.items()}
    assert short.keys() == named.keys()
    for key, tensor in short.items():
        assert torch.equal(tensor, values[key]), key


@pytest.mark.parametrize("kv_heads", [0, 2], ids=["as many heads of keys", "shared heads of keys"])
def test_attention_of_neighbouring_pairs_is_that_of_halves(kv_heads: int) -> None:
    """torchtitan turns values 2i and 2i + 1 as one complex number; its q and k give the scores that ours give.

    A reader that forgets the order of rows, or takes the number of query heads for keys, gives others (transformers
    pull request 31788, llama.cpp issue 2376).
    """
    config = config_named("Llama", kv_heads=kv_heads)
    theirs = dict(torchtitan_layout(config).to_theirs(values_of(random_model(config)).__getitem__))
    published = dict(layout_of("LlamaForCausalLM", config).to_theirs(values_of(random_model(config)).__getitem__))
    x_TD = torch.randn(9, config.hidden, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    width = config.head_width
    frequencies_P = config.rotary_base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    angles_TP = torch.outer(torch.arange(9, dtype=torch.float64), frequencies_P)
    turns_TP = torch.polar(torch.ones_like(angles_TP), angles_TP)

    def neighbours(weight: Tensor) -> Tensor:
        pairs = torch.view_as_complex((x_TD @ weight.double().t()).unflatten(1, (-1, width // 2, 2)))
        return torch.view_as_real(pairs * turns_TP[:, None]).flatten(2)

    def halves(weight: Tensor) -> Tensor:
        left, right = (x_TD @ weight.double().t()).unflatten(1, (-1, width)).chunk(2, -1)
        turned = torch.complex(left, right) * turns_TP[:, None]
        return torch.cat((turned.real, turned.imag), -1)

    def scores(q_THK: Tensor, k_TGK: Tensor) -> Tensor:
        k_THK = k_TGK.repeat_interleave(config.heads // config.num_kv_heads, 1)
        return torch.einsum("thk,shk->hts", q_THK, k_THK)

    titan = [neighbours(theirs[f"layers.1.attention.qkv_linear.w{each}.weight"]) for each in "qk"]
    ours = [halves(published[f"model.layers.1.self_attn.{each}_proj.weight"]) for each in "qk"]
    torch.testing.assert_close(scores(*titan), scores(*ours), rtol=1e-12, atol=1e-12)
    unturned = [neighbours(published[f"model.layers.1.self_attn.{each}_proj.weight"]) for each in "qk"]
    assert not torch.allclose(scores(*unturned), scores(*ours), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"bias": True}, "bias"),
        ({"head_dim": 6}, "head_dim"),
        ({"qk_norm": True}, "qk_norm"),
        ({"attention_window": 4}, "attention_window"),
    ],
)
def test_torchtitan_has_llama_3_alone(change: dict[str, Any], key: str) -> None:
    with pytest.raises(ConfigError, match=rf"^job\.model\.{key} = .*torchtitan's Llama 3"):
        torchtitan_layout(config_named("Llama", **change))
    with pytest.raises(ConfigError, match=r"^job\.model\.positions = learned: torchtitan's Llama 3"):
        torchtitan_layout(config_named("GPT-2"))
