"""What torch's GradScaler meets here: gradients that are not finished yet, and so nothing to unscale.

It would end in an assertion of its own that says neither why nor what to do. Left out: skipping a step on all ranks
where one has found an infinity; torch's ShardedGradScaler does that.
"""

from __future__ import annotations

from collectives.reduce import GradientReduce


class ScalerCheck:
    """Stands for `_step_supports_amp_scaling`, which a scaler asks an optimiser for at the beginning of its `step`.

    False (the scaler does all by itself) where gradients are finished.

    Raises:
        RuntimeError: they are not, or the optimiser steps in the backward pass.
    """

    def __init__(self, reduce: GradientReduce) -> None:
        self._reduce = reduce

    def __bool__(self) -> bool:
        if self._reduce.follower is not None:
            raise RuntimeError(
                "GradScaler: step_in_backward has taken the step unscaled; build the optimiser without it"
            )
        if not self._reduce.finished:
            raise RuntimeError(
                "GradScaler: the gradients of this step are not finished, so there was nothing to unscale; call "
                "finish_gradients() of the wrapper before unscale_() and step(), and take ShardedGradScaler, or a rank "
                "may skip a step alone; bfloat16 needs no scaler"
            )
        return False
