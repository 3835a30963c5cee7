"""Optimisers: AdamW and LAMB over shards."""

from trainer.optim.adamw import build_adamw
from trainer.optim.build import build_optimizer, set_learning_rate
from trainer.optim.lamb import Lamb, WholeNorms

__all__ = [
    "Lamb",
    "WholeNorms",
    "build_adamw",
    "build_optimizer",
    "set_learning_rate",
]
