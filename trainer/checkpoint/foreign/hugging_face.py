"""A model's `config.json` on Hugging Face, both ways: GPT-2, Llama, Mistral and Qwen3.

Defaults are those of transformers' classes: a config.json may omit what its class says anyway. transformers 4
writes `rope_theta` and `rope_scaling`, transformers 5 both inside `rope_parameters`; either is read, and the former two
are written, which both versions read. What a model here cannot compute is refused with the key that asks for it.

Not covered: tensors (`trainer.checkpoint.foreign.layouts`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from netlayer.config.tree import ModelConfig, RopeScalingConfig, build_section
from netlayer.errors import ConfigError
from trainer.checkpoint.foreign.layouts import Layout, gpt2_layout, llama_layout

CONFIG = "config.json"
FIELD = "PATH"
"""How a user names what is read, in errors."""


@dataclass(frozen=True)
class Architecture:
    """A class of transformers, and what it says where a config.json says nothing.

    Args:
        model_type: its name in a config.json.
        layout: names of its tensors.
        defaults: keys that decide what is computed.
        only: keys of which one value alone is computed here; a key of `defaults` or one that is usually not there.
        buffers: ends of names in old files that are no parameters.
    """

    model_type: str
    layout: Callable[[ModelConfig], Layout]
    defaults: Mapping[str, Any]
    only: Mapping[str, Any]
    buffers: tuple[str, ...]


_LLAMA: Mapping[str, Any] = {
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 11_008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": None,
    "head_dim": None,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "rope_scaling": None,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
_ALIKE: Mapping[str, Any] = {"hidden_act": "silu", "partial_rotary_factor": 1.0, "quantization_config": None}
_LLAMA_BUFFERS = (".rotary_emb.inv_freq",)
ARCHITECTURES: Mapping[str, Architecture] = {
    "GPT2LMHeadModel": Architecture(
        "gpt2",
        gpt2_layout,
        {
            "vocab_size": 50_257,
            "n_positions": 1024,
            "n_embd": 768,
            "n_layer": 12,
            "n_head": 12,
            "n_inner": None,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "activation_function": "gelu_new",
        },
        {
            "scale_attn_weights": True,
            "scale_attn_by_inverse_layer_idx": False,
            "add_cross_attention": False,
            "quantization_config": None,
        },
        (".attn.bias", ".attn.masked_bias"),
    ),
    "LlamaForCausalLM": Architecture("llama", llama_layout, _LLAMA, _ALIKE, _LLAMA_BUFFERS),
    "MistralForCausalLM": Architecture(
        "mistral",
        llama_layout,
        {
            **_LLAMA,
            "intermediate_size": 14_336,
            "num_key_value_heads": 8,
            "max_position_embeddings": 131_072,
            "sliding_window": 4096,
        },
        _ALIKE,
        _LLAMA_BUFFERS,
    ),
    "Qwen3ForCausalLM": Architecture(
        "qwen3",
        llama_layout,
        {
            **_LLAMA,
            "vocab_size": 151_936,
            "intermediate_size": 22_016,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "max_position_embeddings": 32_768,
        },
        {**_ALIKE, "use_sliding_window": False, "attention_bias": False},
        _LLAMA_BUFFERS,
    ),
}
_ACTIVATIONS = ("gelu_new", "gelu_pytorch_tanh", "gelu_fast")  # names of the tanh form
_OPTIONAL = ("num_key_value_heads", "head_dim", "sliding_window")  # null has a meaning, whatever the default is
_SCALING = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def architecture_of(model: ModelConfig) -> str:
    """Return the class of transformers that computes what `model` does.

    Raises:
        ConfigError: there is none; names the key of the model that none has.
    """
    is_gpt2 = model.positions == "learned"
    needed: dict[str, Any] = {"parallel_block": False}
    if is_gpt2:
        name = "GPT2LMHeadModel"
        needed |= {"norm": "layernorm", "activation": "gelu", "bias": True, "qk_norm": False, "attention_window": 0}
        needed |= {"num_kv_heads": model.heads, "attention_width": model.hidden}
    else:
        name = "LlamaForCausalLM"
        needed |= {"norm": "rmsnorm", "activation": "swiglu"}
        if model.attention_window:
            name = "MistralForCausalLM"
            needed |= {"qk_norm": False, "bias": False}
            needed["window_pattern"] = "w" * len(model.window_pattern)
        elif model.qk_norm:
            name, needed["bias"] = "Qwen3ForCausalLM", False
    keys = {"num_kv_heads": "kv_heads", "attention_width": "head_dim"}
    for key, value in needed.items():
        if getattr(model, key) != value:
            rule = f"transformers' {name} has no such model: it has {'hidden / heads' if key in keys else value} alone"
            if key == "num_kv_heads":
                rule = f"transformers' {name} has as many heads of keys as of queries"
            value_here = getattr(model, keys.get(key, key))
            raise ConfigError(
                f"job.model.{keys.get(key, key)}", value_here, rule, "export with --to safetensors or dcp"
            )
    if name == "LlamaForCausalLM" and model.hidden % model.heads:
        rule = f"transformers' {name} wants hidden = {model.hidden} to be a multiple of it"
        raise ConfigError("job.model.heads", model.heads, rule, "export with --to safetensors or dcp")
    return name


def config_of(model: ModelConfig, dtype: str, end_token: int | None) -> dict[str, Any]:
    """Return the config.json of a model.

    Args:
        dtype: of the tensors next to it, as torch names it.
        end_token: id of the token that ends a document, if one is known.

    Raises:
        ConfigError: no class of transformers computes this model.
    """
    name = architecture_of(model)
    head: dict[str, Any] = {
        "architectures": [name],
        "model_type": ARCHITECTURES[name].model_type,
        "torch_dtype": dtype,
        "vocab_size": model.vocab_size,
        "tie_word_embeddings": model.tied_embeddings,
        "bos_token_id": end_token,
        "eos_token_id": end_token,
    }
    if name == "GPT2LMHeadModel":
        return head | {
            "n_positions": model.seq_len,
            "n_embd": model.hidden,
            "n_layer": model.layers,
            "n_head": model.heads,
            "n_inner": model.ffn_hidden,
            "layer_norm_epsilon": model.norm_eps,
            "activation_function": "gelu_new",
            # Nothing here drops anything.
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
            "attn_pdrop": 0.0,
        }
    scaling = model.rope_scaling
    kept = _SCALING if scaling.rope_type == "llama3" else _SCALING[:1]
    values = {"rope_type": scaling.rope_type} | {key: getattr(scaling, key) for key in kept}
    llama = {
        "hidden_size": model.hidden,
        "intermediate_size": model.ffn_hidden,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_width,
        "hidden_act": "silu",
        "max_position_embeddings": model.seq_len,
        "rms_norm_eps": model.norm_eps,
        "rope_theta": model.rotary_base,
        "rope_scaling": None if scaling.rope_type == "default" else values,
        "attention_bias": model.bias,
    }
    if name == "LlamaForCausalLM":
        llama["mlp_bias"] = model.bias
    if name == "MistralForCausalLM":
        llama["sliding_window"] = model.attention_window
    return head | llama


def read_model(config: Mapping[str, Any], file: Path, seq_len: int | None = None) -> tuple[str, ModelConfig]:
    """Return the class of a config.json, and its model here, of dtype float32.

    Args:
        file: that it is from, for errors.
        seq_len: tokens of a training sequence; None: the most that the model reads.

    Raises:
        ConfigError: it is of a model that is not computed here; names the key.
    """
    name = _architecture(config, file)
    architecture = ARCHITECTURES[name]
    values = {**architecture.defaults, **config}
    for key, only in architecture.only.items():
        if (value := values.get(key)) is not None and value != only:
            raise _refusal(file, key, value, f"only {only} is computed here")
    for key in architecture.defaults:
        if values[key] is None and architecture.defaults[key] is not None and key not in _OPTIONAL:
            raise _refusal(file, key, None, "needs a value")
    if name == "GPT2LMHeadModel":
        return name, _gpt2(values, file, seq_len)
    base, scaling = _rotary(config, values, file)
    keys = {"rotary_base": base, "rope_scaling": scaling, "qk_norm": name == "Qwen3ForCausalLM"}
    return name, _llama(values, file, seq_len, keys)


def layout_of(name: str, model: ModelConfig) -> Layout:
    """Return the names of the tensors of a class of transformers."""
    return ARCHITECTURES[name].layout(model)


def _architecture(config: Mapping[str, Any], file: Path) -> str:
    known = ", ".join(ARCHITECTURES)
    listed = config.get("architectures")
    if listed:
        name = listed[0] if isinstance(listed, list) else listed
        if name not in ARCHITECTURES:
            raise _refusal(file, "architectures", name, f"must be one of {known}")
        return str(name)
    for name, each in ARCHITECTURES.items():
        if each.model_type == config.get("model_type"):
            return name
    raise _refusal(file, "model_type", config.get("model_type"), f"names none of {known}")


def _gpt2(values: Mapping[str, Any], file: Path, seq_len: int | None) -> ModelConfig:
    """Return our configuration of a GPT-2 from its config.json; ConfigError names what cannot be represented."""
    if values["activation_function"] not in _ACTIVATIONS:
        rule = "GeLU is computed in its tanh form, gelu_new"
        raise _refusal(file, "activation_function", values["activation_function"], rule)
    positions = values["n_positions"]
    if seq_len not in (None, positions):
        rule = f"is not the n_positions = {positions} of {file}: each learned position is a parameter"
        raise ConfigError("--seq-len", seq_len, rule, "omit it")
    keys = {
        "layers": values["n_layer"],
        "hidden": values["n_embd"],
        "heads": values["n_head"],
        "ffn_hidden": values["n_inner"] or 4 * _number(values, "n_embd", file),
        "vocab_size": values["vocab_size"],
        "seq_len": positions,
        "norm_eps": values["layer_norm_epsilon"],
        "tied_embeddings": values["tie_word_embeddings"],
    }
    return _built(keys, file)


def _llama(values: Mapping[str, Any], file: Path, seq_len: int | None, more: Mapping[str, Any]) -> ModelConfig:
    """Return the model of a Llama-like config.json; `more` are keys of it that were read already."""
    if values["attention_bias"] != values["mlp_bias"]:
        rule = f"linears of a block have biases alike here, and mlp_bias = {values['mlp_bias']}"
        raise _refusal(file, "attention_bias", values["attention_bias"], rule)
    positions = seq_len or _number(values, "max_position_embeddings", file)
    heads, window = _number(values, "num_attention_heads", file), values.get("sliding_window") or 0
    width = values["head_dim"] or _number(values, "hidden_size", file) // heads
    for layer, kind in enumerate(values.get("layer_types") or ()):
        if kind != ("sliding_attention" if window else "full_attention"):
            raise _refusal(file, f"layer_types[{layer}]", kind, "all layers must have the same attention")
    is_plain = width * heads == values["hidden_size"]
    keys = {
        **more,
        "layers": values["num_hidden_layers"],
        "hidden": values["hidden_size"],
        "heads": heads,
        "kv_heads": 0 if values["num_key_value_heads"] in (None, heads) else values["num_key_value_heads"],
        "head_dim": 0 if is_plain else width,
        "ffn_hidden": values["intermediate_size"],
        "vocab_size": values["vocab_size"],
        "seq_len": positions,
        # A window that reaches over a whole sequence is none.
        "attention_window": window if window < positions else 0,
        "positions": "rotary",
        "norm": "rmsnorm",
        "norm_eps": values["rms_norm_eps"],
        "activation": "swiglu",
        "bias": values["attention_bias"],
        "tied_embeddings": values["tie_word_embeddings"],
    }
    return _built(keys, file)


def _rotary(config: Mapping[str, Any], values: Mapping[str, Any], file: Path) -> tuple[float, RopeScalingConfig]:
    """Return base and scaling, from either place where a version of transformers writes them.

    Args:
        values: the config with its class's defaults.
    """
    place = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    scaling = values.get(place) or {}
    if any(isinstance(value, Mapping) for value in scaling.values()):
        raise _refusal(file, place, ", ".join(scaling), "one rotary embedding for all layers is computed")
    base, outside = scaling.get("rope_theta", values["rope_theta"]), config.get("rope_theta")
    if outside not in (None, base):
        rule = f"{place}.rope_theta = {base}: versions of transformers differ in which they take"
        raise _refusal(file, "rope_theta", outside, rule)
    if (share := scaling.get("partial_rotary_factor", 1.0)) != 1.0:
        raise _refusal(file, f"{place}.partial_rotary_factor", share, "only 1.0 is computed here")
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind == "default":
        return base, RopeScalingConfig()
    if kind not in ("linear", "llama3"):
        raise _refusal(file, f"{place}.rope_type", kind, "must be default, linear or llama3")
    needed = _SCALING[:3] if kind == "llama3" else _SCALING[:1]
    if missing := [key for key in needed if key not in scaling]:
        raise _refusal(file, f"{place}.{missing[0]}", None, f"is needed with rope_type = {kind}")
    kept = {key: scaling[key] for key in needed}
    if kind == "llama3":
        kept[_SCALING[3]] = scaling.get(_SCALING[3], values["max_position_embeddings"])
    return base, build_section(RopeScalingConfig, {"rope_type": kind, **kept}, "job.model.rope_scaling.")


def _number(values: Mapping[str, Any], key: str, file: Path) -> int:
    if type(values[key]) is not int or values[key] < 1:
        raise _refusal(file, key, values[key], "must be a whole number above 0")
    return int(values[key])


def _built(keys: Mapping[str, Any], file: Path) -> ModelConfig:
    try:
        return build_section(ModelConfig, dict(keys), "job.model.")
    except ConfigError as exc:
        rule = f"gives a model that cannot be: {exc.field} = {exc.value} {exc.rule}"
        raise ConfigError(FIELD, file, rule, "give the folder of a model as transformers saves it") from exc


def _refusal(file: Path, key: str, value: object, rule: str) -> ConfigError:
    return ConfigError(FIELD, file, f"{key} = {value}: {rule}", "give a model that is computed here")
