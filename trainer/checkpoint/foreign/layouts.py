"""Names and layouts of parameters elsewhere: Hugging Face's GPT-2, Llama, Mistral and Qwen3, and torchtitan's Llama 3.

A `Layout` says of every parameter of ours (the whole model's names, no tensor parallelism) which tensors there are its
rows, in order. Both directions go one parameter at a time and only move elements: nothing is computed, no bit changes.

What differs: GPT-2's `Conv1D` keeps matrices transposed; q, k and v, and gate and up, are one tensor here; torchtitan
turns neighbouring values of a head (2i, 2i + 1) where Hugging Face and `trainer.ops.rotary` turn halves (i, i + K/2),
so rows of q and k are in another order there; a tied head is one tensor here, and absent or a copy there.

Not covered: config.json (`trainer.checkpoint.foreign.hugging_face`), files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from netlayer.config.tree import ModelConfig
from netlayer.errors import ConfigError
from trainer.model.gpt import build_model

TOKENS, HEAD = "embedding.tokens.weight", "head.tokens.weight"


class Piece(NamedTuple):
    """A tensor of another layout that is some rows of one of ours.

    Args:
        name: there.
        shape: there.
        is_transposed: its rows are our columns.
        interleaved_heads: heads whose rotary pairs are neighbours there, and halves here; 0: as here.
    """

    name: str
    shape: tuple[int, ...]
    is_transposed: bool = False
    interleaved_heads: int = 0

    @property
    def rows(self) -> int:
        """Rows that it is here."""
        return self.shape[-1] if self.is_transposed else self.shape[0]

    def to_ours(self, theirs: Tensor) -> Tensor:
        """Return the rows of ours, a view where possible."""
        if self.is_transposed:
            return theirs.t()
        if not self.interleaved_heads:
            return theirs
        pairs = theirs.reshape(self.interleaved_heads, -1, 2, *theirs.shape[1:])
        return pairs.transpose(1, 2).reshape(theirs.shape)

    def to_theirs(self, ours: Tensor) -> Tensor:
        """Return the tensor there of the rows here, a view where possible."""
        if self.is_transposed:
            return ours.t()
        if not self.interleaved_heads:
            return ours
        halves = ours.reshape(self.interleaved_heads, 2, -1, *ours.shape[1:])
        return halves.transpose(1, 2).reshape(ours.shape)


@dataclass(frozen=True)
class Layout:
    """All parameters of a model in another layout.

    Args:
        pieces: of each parameter of ours, by its name, in the order of the model.
        copies: name there of a second tensor with the values of another one: a tied head.
        needs_copies: they are written too; False: a reader does without them.
    """

    pieces: Mapping[str, tuple[Piece, ...]]
    copies: Mapping[str, str]
    needs_copies: bool = False

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Tensors that are written, in the order of `to_theirs`."""
        by_name = {piece.name: piece.shape for pieces in self.pieces.values() for piece in pieces}
        if not self.needs_copies:
            return by_name
        return by_name | {name: by_name[source] for name, source in self.copies.items()}

    def to_theirs(self, read: Callable[[str], Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield every tensor there; one parameter of ours is in memory at a time.

        Args:
            read: gives a parameter of ours, whole.
        """
        sources = {source: name for name, source in self.copies.items()} if self.needs_copies else {}
        late: list[tuple[str, str]] = []
        for name, pieces in self.pieces.items():
            whole = read(name)
            for piece, rows in zip(pieces, torch.split(whole, [piece.rows for piece in pieces]), strict=True):
                yield piece.name, piece.to_theirs(rows)
                if piece.name in sources:
                    late.append((sources[piece.name], name))
        for copy, name in late:
            yield copy, read(name)

    def to_ours(self, name: str, read: Callable[[str], Tensor]) -> Tensor:
        """Return a parameter of ours.

        Args:
            read: gives a tensor there, of the shape that its piece says.
        """
        parts = [piece.to_ours(read(piece.name)) for piece in self.pieces[name]]
        return torch.cat(parts) if len(parts) > 1 else parts[0].contiguous()


def own_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Parameters of the whole model here, in its order; a tied head is the embedding."""
    plain = model.model_copy(update={"operators": "auto", "recompute": "none"})
    built = build_model(plain, 0, torch.device("meta"))
    return {name: tuple(parameter.shape) for name, parameter in built.named_parameters()}


def own_layout(model: ModelConfig) -> Layout:
    """Return our names and shapes, as a layout."""
    shapes = own_shapes(model)
    copies = {HEAD: TOKENS} if model.tied_embeddings else {}
    return Layout({name: (Piece(name, shape),) for name, shape in shapes.items()}, copies)


def llama_layout(model: ModelConfig) -> Layout:
    """Return Hugging Face's names for Llama, and for Mistral and Qwen3, which share them."""
    names = {
        "norm": "input_layernorm",
        "q": "self_attn.q_proj",
        "k": "self_attn.k_proj",
        "v": "self_attn.v_proj",
        "out": "self_attn.o_proj",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        "mlp_norm": "post_attention_layernorm",
        "gate": "mlp.gate_proj",
        "up": "mlp.up_proj",
        "down": "mlp.down_proj",
    }
    ends = {TOKENS: "model.embed_tokens.weight", "head.norm.weight": "model.norm.weight", HEAD: "lm_head.weight"}
    return _llama(model, "model.layers.{}.", names, ends)


def torchtitan_layout(model: ModelConfig) -> Layout:
    """Return torchtitan's names for Llama 3 (`torchtitan/models/llama3/state_dict_adapter.py`, August 2026).

    Raises:
        ConfigError: the model is no Llama 3 as torchtitan builds it.
    """
    needed = {
        "positions": "rotary",
        "norm": "rmsnorm",
        "activation": "swiglu",
        "bias": False,
        "parallel_block": False,
        "qk_norm": False,
        "attention_window": 0,
    }
    for key, value in needed.items():
        if getattr(model, key) != value:
            rule = f"torchtitan's Llama 3 has {value} alone"
            raise ConfigError(f"job.model.{key}", getattr(model, key), rule, "export to another layout")
    if model.attention_width != model.hidden:
        rule = f"heads of torchtitan's Llama 3 are job.model.hidden / heads = {model.hidden / model.heads:g} wide"
        raise ConfigError("job.model.head_dim", model.head_width, rule, "export to another layout")
    names = {
        "norm": "attention_norm",
        "q": "attention.qkv_linear.wq",
        "k": "attention.qkv_linear.wk",
        "v": "attention.qkv_linear.wv",
        "out": "attention.wo",
        "mlp_norm": "ffn_norm",
        "gate": "feed_forward.w1",
        "up": "feed_forward.w3",
        "down": "feed_forward.w2",
    }
    ends = {TOKENS: "tok_embeddings.weight", "head.norm.weight": "norm.weight", HEAD: "lm_head.weight"}
    return _llama(model, "layers.{}.", names, ends, is_interleaved=True)


def gpt2_layout(model: ModelConfig, prefix: str = "transformer.") -> Layout:
    """Return Hugging Face's names for GPT-2.

    Args:
        prefix: of all names but the head's; files of the first years have none.
    """
    names = {
        "norm": "ln_1",
        "qkv": "attn.c_attn",
        "out": "attn.c_proj",
        "mlp_norm": "ln_2",
        "up": "mlp.c_fc",
        "down": "mlp.c_proj",
    }
    ends = {"embedding.position": f"{prefix}wpe.weight", TOKENS: f"{prefix}wte.weight", HEAD: "lm_head.weight"}
    ends |= {f"head.norm.{end}": f"{prefix}ln_f.{end}" for end in ("weight", "bias")}
    pieces: dict[str, tuple[Piece, ...]] = {}
    for name, shape in own_shapes(model).items():
        if name in ends:
            pieces[name] = (Piece(ends[name], shape),)
            continue
        layer, part, end = _place(name)
        there = f"{prefix}h.{layer}.{names[part]}.{end}"
        # Its linears are `Conv1D`: [in, out].
        pieces[name] = (Piece(there, shape[::-1], is_transposed=len(shape) == 2),)
    return Layout(pieces, _copies(model, ends))


def _llama(
    model: ModelConfig, block: str, names: Mapping[str, str], ends: Mapping[str, str], *, is_interleaved: bool = False
) -> Layout:
    """Return the layout of Llama-like blocks: separate q, k, v, gate and up.

    Args:
        block: opens the names of a block; has its number at `{}`.
        names: of its parts, without `weight` and `bias`.
        ends: whole names of what is in no block.
        is_interleaved: as in `Piece`.
    """
    joined = {
        "qkv": {"q": model.attention_width, "k": model.kv_width, "v": model.kv_width},
        "up": {"gate": model.ffn_hidden, "up": model.ffn_hidden},
    }
    turned = {"q": model.heads, "k": model.num_kv_heads} if is_interleaved else {}
    pieces: dict[str, tuple[Piece, ...]] = {}
    for name, shape in own_shapes(model).items():
        if name in ends:
            pieces[name] = (Piece(ends[name], shape),)
            continue
        layer, part, end = _place(name)
        pieces[name] = tuple(
            Piece(
                f"{block.format(layer)}{names[theirs]}.{end}",
                (rows, *shape[1:]),
                interleaved_heads=turned.get(theirs, 0),
            )
            for theirs, rows in joined.get(part, {part: shape[0]}).items()
        )
    # torchtitan's model has a tied table under both names, and its loader wants both.
    return Layout(pieces, _copies(model, ends), needs_copies=is_interleaved)


def _place(name: str) -> tuple[str, str, str]:
    """Return the block, the part of it, and `weight` or `bias`, of the name of a parameter in a block."""
    _, layer, part, *rest = name.split(".")
    return layer, part, "bias" if rest[-1] == "bias" else "weight"


def _copies(model: ModelConfig, ends: Mapping[str, str]) -> dict[str, str]:
    return {ends[HEAD]: ends[TOKENS]} if model.tied_embeddings else {}
