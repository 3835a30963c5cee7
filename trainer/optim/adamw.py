"""AdamW over shards: torch's own, fused.

It is elementwise, so a rank that steps its own pieces does what one process would do to the whole.
"""

from __future__ import annotations

import torch

from collectives.sharded import ShardedDataParallel
from netlayer.config import OptimizerConfig


def build_adamw(
    config: OptimizerConfig, model: ShardedDataParallel, *, step_in_backward: bool = False
) -> torch.optim.AdamW:
    """AdamW over the shards of `model`; vectors (norms, biases) are not decayed."""

    def options(_name: str, shape: torch.Size) -> dict[str, float]:
        return {"weight_decay": config.weight_decay if len(shape) > 1 else 0.0}

    return model.optimizer(
        torch.optim.AdamW,
        options=options,
        step_in_backward=step_in_backward,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=True,
    )
