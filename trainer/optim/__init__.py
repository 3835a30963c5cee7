"""How parameters move: AdamW and LAMB over shards, the learning rate and the batch size of every step."""

from trainer.optim.adamw import build_adamw
from trainer.optim.build import build_optimizer, set_learning_rate
from trainer.optim.lamb import Lamb, WholeNorms
from trainer.optim.schedule import batch_size, learning_rate, sequences_through, tokens_through

__all__ = [
    "Lamb",
    "WholeNorms",
    "batch_size",
    "build_adamw",
    "build_optimizer",
    "learning_rate",
    "sequences_through",
    "set_learning_rate",
    "tokens_through",
]
