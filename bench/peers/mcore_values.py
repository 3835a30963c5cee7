"""Our initial values in Megatron-core's names and order, so that both train the same model.

Not covered: what `check_plain` refuses. Shapes: H heads, G heads of keys and values, K values a head.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from netlayer.config.tree import ModelConfig
from trainer.model.gpt import GPT

_BLOCK = {
    "norm": ("input_layernorm", None),
    "qkv": ("self_attention.linear_qkv", 0),
    "out": ("self_attention.linear_proj", 1),
    "mlp_norm": ("pre_mlp_layernorm", None),
    "up": ("mlp.linear_fc1", 0),
    "down": ("mlp.linear_fc2", 1),
}
"""Modules of a block, and the dimension by which tensor-parallel ranks cut their weights."""
_ENDS = {
    "embedding.tokens.weight": ("embedding.word_embeddings.weight", 0),
    "embedding.position": ("embedding.position_embeddings.weight", None),
    "head.norm.weight": ("decoder.final_layernorm.weight", None),
    "head.norm.bias": ("decoder.final_layernorm.bias", None),
    "head.tokens.weight": ("output_layer.weight", 0),
}


def renamed(gpt: GPT, rank: int, world_size: int) -> Iterator[tuple[str, Tensor]]:
    """Yield each parameter of a run of layers by Megatron Core's name, and the part that a tensor-parallel rank holds.

    Layers count from 0 in a run. `gpt` itself is not split.
    """
    first = min((int(name) for name in gpt.blocks), default=0)
    for name, parameter in gpt.named_parameters():
        if name in _ENDS:
            theirs, dim = _ENDS[name]
        else:
            _, layer, module, *_, kind = name.replace("weights.0", "weight").split(".")
            theirs, dim = _BLOCK[module]
            theirs = f"decoder.layers.{int(layer) - first}.{theirs}.{kind}"
            dim = None if kind == "bias" and dim == 1 else dim  # added once, after the sum over ranks
        whole = parameter.detach()
        if ".qkv." in name:
            whole = by_head(whole, gpt.config)
        yield theirs, whole if dim is None else whole.chunk(world_size, dim)[rank]


def by_head(qkv: Tensor, config: ModelConfig) -> Tensor:
    """Rows [H K of queries, G K of keys, G K of values] to one run a head of keys: its queries, its key, its value."""
    shared = config.num_kv_heads * (config.hidden // config.heads)
    pieces = torch.split(qkv, [config.hidden, shared, shared])
    heads = [piece.view(config.num_kv_heads, -1, *piece.shape[1:]) for piece in pieces]
    return torch.cat(heads, dim=1).flatten(0, 1)


@torch.no_grad()
def copy_values(gpt: GPT, module: nn.Module, rank: int, world_size: int) -> None:
    """Give a GPTModel with the same layers the values of `gpt`, in its own dtype.

    Raises:
        ValueError: one of them has a parameter that the other lacks.
    """
    left = dict(module.named_parameters())
    for name, value in renamed(gpt, rank, world_size):
        if name not in left or left[name].shape != value.shape:
            raise ValueError(f"{name}, {tuple(value.shape)}: Megatron-core's model has no such parameter")
        left.pop(name).copy_(value)
    if left:
        raise ValueError(f"{', '.join(left)}: no initial values for these of Megatron-core's parameters")
