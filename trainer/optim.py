"""The optimiser over this rank's shards, and its learning rate.

AdamW is elementwise, so a rank that steps its own pieces does what one process would do to the whole. Left out: LAMB,
whose trust ratio needs norms over whole parameters.
"""

from __future__ import annotations

import math

import torch

from collectives.sharded import ShardedDataParallel
from netlayer.config import OptimizerConfig


def build_optimizer(config: OptimizerConfig, model: ShardedDataParallel) -> torch.optim.AdamW:
    """AdamW over the shards of `model`; vectors (norms, biases) are not decayed.

    Its `step` finishes the gradients before, and launches the next all-gathers after.
    """
    if config.name != "adamw":
        raise ValueError(f"name = {config.name!r}: only adamw is built")

    def options(_name: str, shape: torch.Size) -> dict[str, float]:
        return {"weight_decay": config.weight_decay if len(shape) > 1 else 0.0}

    return model.optimizer(
        torch.optim.AdamW,
        options=options,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr


def learning_rate(config: OptimizerConfig, step: int) -> float:
    """Learning rate of step 1..steps: a linear rise over the warm-up, then half a cosine down to `min_lr_share`."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    progress = (step - config.warmup_steps) / max(1, config.steps - config.warmup_steps)
    share = config.min_lr_share + (1 - config.min_lr_share) * (1 + math.cos(math.pi * progress)) / 2
    return config.lr * share
