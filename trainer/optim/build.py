"""The optimiser that a job asks for, over this rank's shards."""

from __future__ import annotations

import torch
from torch import Tensor

from collectives.sharded.data_parallel import ShardedDataParallel
from netlayer.config.tree import OptimizerConfig
from trainer.model.gpt import GPT
from trainer.optim.adamw import build_adamw
from trainer.optim.lamb import Lamb, WholeNorms


def build_optimizer(
    config: OptimizerConfig, model: ShardedDataParallel, *, step_in_backward: bool = False
) -> torch.optim.Optimizer:
    """The optimiser over the shards of `model`: of the model, or of a chunk of it.

    Its `step` finishes the gradients before, and launches the next all-gathers after. Collective: every rank of the
    data-parallel and of the tensor-parallel group steps, in the same order of chunks.

    Args:
        step_in_backward: see `ShardedDataParallel.optimizer`; LAMB ignores it, and a job with both is refused.
    """
    if config.name == "lamb":
        return build_lamb(config, model)
    operators = model.module.config.operators if isinstance(model.module, GPT) else "auto"
    return build_adamw(config, model, step_in_backward=step_in_backward, operators=operators)


def build_lamb(config: OptimizerConfig, model: ShardedDataParallel) -> Lamb:
    """LAMB over the shards of `model`; vectors (norms, biases) are neither decayed nor adapted."""

    def options(_name: str, shape: torch.Size) -> dict[str, float | bool]:
        is_matrix = len(shape) > 1
        return {"weight_decay": config.weight_decay if is_matrix else 0.0, "adapt": is_matrix}

    return model.optimizer(
        Lamb,
        options=options,
        norms=whole_norms(model),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
    )


def whole_norms(model: ShardedDataParallel) -> WholeNorms:
    """Norms of the matrices of `model`: one sum over the shards, and one over tensor-parallel ranks.

    A matrix that all tensor-parallel ranks hold whole comes out that many times as large, in |w| and |u| alike: their
    ratio is right, and the same to the bit on all of them, for both come out of one all-reduce. A tied one is one
    parameter of a chunk; where it is held by both ends of a pipeline, each arrives at its norm by itself.
    """
    exchange = model.module.exchange if isinstance(model.module, GPT) else None
    pieces = {name: piece for name, _, piece in model.named_shards()}
    matrices = [name for name, shape in model.shapes().items() if len(shape) > 1]

    def add_up(squared_P2: Tensor) -> None:
        model.reduce_comm.all_reduce(squared_P2)
        if exchange is not None:
            exchange.start_all_reduce(squared_P2).wait()

    return WholeNorms([pieces.get(name) for name in matrices], model.reduce_comm.device, add_up)


def set_learning_rate(optimizer: torch.optim.Optimizer, lr: float) -> None:
    for group in optimizer.param_groups:
        group["lr"] = lr
