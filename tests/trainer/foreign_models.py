"""Small models of every architecture that other programs have too, with values that no two tensors share."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from netlayer.config.tree import ModelConfig
from trainer.checkpoint.foreign.hugging_face import config_of
from trainer.checkpoint.foreign.layouts import Layout
from trainer.model.gpt import GPT, build_model

KINDS = {"positions": "rotary", "norm": "rmsnorm", "activation": "swiglu", "bias": False}
SHAPE = {"layers": 2, "hidden": 24, "heads": 6, "ffn_hidden": 40, "vocab_size": 61, "seq_len": 32}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16}
MODELS: Mapping[str, Mapping[str, Any]] = {
    "Llama": {**KINDS, "kv_heads": 2, "rotary_base": 500.0},
    "Llama, tied, scaled as 3.1": {
        **KINDS,
        "kv_heads": 2,
        "tied_embeddings": True,
        "rotary_base": 500.0,
        "rope_scaling": LLAMA3,
    },
    "Llama with biases and wide heads": {
        **KINDS,
        "bias": True,
        "head_dim": 6,
        "rope_scaling": {"rope_type": "linear", "factor": 4.0},
    },
    "Qwen3, wide heads": {**KINDS, "kv_heads": 3, "head_dim": 10, "qk_norm": True, "norm_eps": 1e-6},
    "Mistral": {**KINDS, "kv_heads": 2, "attention_window": 5},
    "GPT-2": {"tied_embeddings": True},
    "GPT-2, untied": {"norm_eps": 1e-3},
}


def config_named(name: str, **more: object) -> ModelConfig:
    return ModelConfig.model_validate({**SHAPE, **MODELS[name], **more})


def random_model(config: ModelConfig, seed: int = 1) -> GPT:
    """A model whose biases and norms are no zeros and ones."""
    model = build_model(config, 0, torch.device("cpu"))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.2)
    return model


def values_of(model: GPT) -> dict[str, Tensor]:
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@torch.no_grad()
def logits_of(model: GPT, tokens_BT: Tensor) -> Tensor:
    """[B, T, V] of every position."""
    assert model.embedding is not None
    assert model.head is not None
    x: Tensor = model.embedding(tokens_BT)
    for block in model.blocks.values():
        x = block(x)
    return model.head.logits(x).transpose(0, 1)


def save_as_theirs(
    folder: Path, config: ModelConfig, layout: Layout, values: Mapping[str, Tensor], dtype: torch.dtype = torch.float32
) -> Path:
    """Write what another program would: by the safetensors library's own writer, all tensors in one file."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {name: tensor.to(dtype).contiguous() for name, tensor in layout.to_theirs(values.__getitem__)}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    facts = config_of(config, str(dtype).removeprefix("torch."), None)
    (folder / "config.json").write_text(json.dumps(facts))
    return folder
