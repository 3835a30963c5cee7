"""torch's GradScaler with an optimiser over shards: gradients are finished first, and ranks skip a step together.

A scaler looks for infinities in the gradients that an optimiser holds, and skips the step where it finds one. Of an
optimiser over shards it would find none before they are finished, and on one rank what the others do not see. So the
one method by which every scaler of torch reads gradients finishes those of our optimisers, and tells all ranks what one
of them has found. Other optimisers are scaled as ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from collectives.sharded.reduce import GradientReduce


class ScalerCheck:
    """Stands for `_step_supports_amp_scaling`, which a scaler asks an optimiser for at the beginning of its `step`.

    False: the scaler does all by itself.

    Args:
        reduce: the gradients.
        finish: them; told whether to wait for all.

    Raises:
        RuntimeError: the optimiser steps in the backward pass, or torch's scalers are others than those known here.
    """

    def __init__(self, reduce: GradientReduce, finish: Callable[[bool], None]) -> None:
        self._reduce, self._finish = reduce, finish

    def __bool__(self) -> bool:
        self._refuse_stepped()
        if not self._reduce.finished and not make_scalers_finish():
            raise RuntimeError(
                "GradScaler: this torch scales in another way than is known here; call finish_gradients() of the "
                "wrapper before unscale_() and step(), and take ShardedGradScaler; bfloat16 needs no scaler"
            )
        return False

    def finish(self) -> None:
        """Wait until the gradients can be read."""
        self._refuse_stepped()
        self._finish(True)

    def share(self, found_inf: torch.Tensor) -> None:
        """Whether any rank has found an infinity, in place."""
        comm = self._reduce.comm
        shared = found_inf.to(comm.device, copy=True)
        comm.all_reduce(shared, torch.distributed.ReduceOp.MAX)
        found_inf.copy_(shared)

    def _refuse_stepped(self) -> None:
        if self._reduce.post_reduce_hook is not None:
            raise RuntimeError(
                "GradScaler: step_in_backward has taken the step unscaled; build the optimiser without it"
            )


@functools.cache
def make_scalers_finish() -> bool:
    """Patch torch's scalers to heed `ScalerCheck`; return False if this torch has others."""
    try:
        from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
    except ImportError:
        scalers: list[Any] = [torch.amp.GradScaler]
    else:
        scalers = [torch.amp.GradScaler, ShardedGradScaler]
    if not all(callable(getattr(scaler, "_unscale_grads_", None)) for scaler in scalers):
        return False
    for scaler in scalers:
        if "_unscale_grads_" in vars(scaler):
            scaler._unscale_grads_ = _finishing(scaler._unscale_grads_)
    return True


def _finishing(unscale: Callable[..., dict[torch.device, torch.Tensor]]) -> Callable[..., Any]:
    """Wrap GradScaler's unscaling: it waits for the reductions, and all ranks share whether there was an infinity."""

    @functools.wraps(unscale)
    def finish_and_unscale(
        self: Any, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, *args: Any
    ) -> dict[torch.device, torch.Tensor]:
        check = getattr(optimizer, "_step_supports_amp_scaling", None)
        if not isinstance(check, ScalerCheck):
            return unscale(self, optimizer, inv_scale, found_inf, *args)
        check.finish()
        by_device = unscale(self, optimizer, inv_scale, found_inf, *args)
        own = next(iter(by_device.values()), found_inf)  # a rank may hold nothing of any parameter
        check.share(own)
        return by_device or {own.device: own}

    return finish_and_unscale
