"""AdamW over shards: on a GPU a kernel of ours that steps a bucket at once, elsewhere torch's own, fused.

It is elementwise, so a rank that steps its own pieces does what one process would do to the whole.
"""

from __future__ import annotations

import torch

from collectives.sharded.data_parallel import ShardedDataParallel
from collectives.triton_support import HAS_TRITON
from netlayer.config.tree import OptimizerConfig
from trainer.ops.backend import Operators, uses_triton

if HAS_TRITON:
    from trainer.optim.shard_adamw import ShardAdamW


def build_adamw(
    config: OptimizerConfig,
    model: ShardedDataParallel,
    *,
    step_in_backward: bool = False,
    operators: Operators = "auto",
) -> torch.optim.AdamW:
    """AdamW over the shards of `model`; vectors (norms, biases) are not decayed.

    Args:
        operators: as of the model's operators: torch skips the kernel.
    """

    def options(_name: str, shape: torch.Size) -> dict[str, float]:
        return {"weight_decay": config.weight_decay if len(shape) > 1 else 0.0}

    masters = [bucket.master_S for bucket in model.buckets]  # of all: a rank may have no piece, and chooses as others
    has_kernel = bool(masters) and all(each.dtype == torch.float32 and uses_triton(operators, each) for each in masters)
    goes_by_buckets = has_kernel and not step_in_backward
    coming = model.as_gradients_come if goes_by_buckets else None
    ours, torchs = {"buckets": model.buckets, "coming": coming}, {"fused": True}
    kind, more = (ShardAdamW, ours) if has_kernel else (torch.optim.AdamW, torchs)
    return model.optimizer(
        kind,
        options=options,
        step_in_backward=step_in_backward,
        waits=not goes_by_buckets,
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        **more,
    )
