"""The GPT, and its linears."""

from __future__ import annotations

from typing import TYPE_CHECKING

from netlayer import lazy_names

if TYPE_CHECKING:
    from trainer.model.gpt import GPT as GPT
    from trainer.model.gpt import Block as Block
    from trainer.model.gpt import Head as Head
    from trainer.model.gpt import build_model as build_model
    from trainer.model.linears import JoinedLinear as JoinedLinear
    from trainer.model.linears import Part as Part
    from trainer.model.linears import SummedLinear as SummedLinear
    from trainer.model.packed import NO_TARGET as NO_TARGET
    from trainer.model.packed import Packed as Packed

__all__ = [
    "GPT",
    "NO_TARGET",
    "Block",
    "Head",
    "JoinedLinear",
    "Packed",
    "Part",
    "SummedLinear",
    "build_model",
]

__getattr__ = lazy_names(
    __name__,
    {
        "GPT": ".gpt",
        "NO_TARGET": ".packed",
        "Block": ".gpt",
        "Head": ".gpt",
        "JoinedLinear": ".linears",
        "Packed": ".packed",
        "Part": ".linears",
        "SummedLinear": ".linears",
        "build_model": ".gpt",
    },
)
