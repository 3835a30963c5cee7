"""AdamW that steps a bucket's shard as one, on a GPU: moments are flat, and what is gathered is written with the step.

To torch it is its own AdamW: the same groups, hooks and state, a dictionary a piece, whose moments are views of the
flat ones. Left out: AMSGrad, `maximize`, and gradients that are not where the bucket reduces them to.

Shapes: S elements of a shard, R runs of them with one weight decay each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from collectives.bucket import Bucket
from trainer.optim.adamw_kernel import adamw_step

Group = dict[str, Any]


class ShardAdamW(torch.optim.AdamW):
    """AdamW over the pieces of buckets.

    Args:
        params: groups of pieces, of `ShardedDataParallel`; they may differ in `weight_decay` alone.
        buckets: whose pieces these are, with masters in float32.
        lr, betas, eps: as torch's.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Group],
        *,
        buckets: Sequence[Bucket],
        lr: float,
        betas: tuple[float, float],
        eps: float,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, fused=True)
        groups = {piece: group for group in self.param_groups for piece in group["params"]}
        self._shards = [_Shard(bucket, groups) for bucket in buckets if bucket.pieces]
        self._lr = self._shards[0].step.clone() if self._shards else torch.zeros(())

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move the pieces of every bucket that has gradients; a bucket has them for all of its pieces or for none.

        Raises:
            RuntimeError: a piece has no gradient beside pieces that have, or another tensor than the bucket's.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        due = [shard for shard in self._shards if shard.has_gradients()]
        if not due:
            return loss
        for shard in due:
            shard.adopt(self.state)
        first = self.param_groups[0]
        lr = first["lr"]
        if not isinstance(lr, Tensor):
            lr = self._lr.fill_(lr)
        torch._foreach_add_([shard.step for shard in due], 1)
        for shard in due:
            shard.move(lr, first["betas"], first["eps"])
        return loss


class _Shard:
    """A bucket's moments, flat, and which weight decay its runs have."""

    def __init__(self, bucket: Bucket, groups: dict[Tensor, Group]) -> None:
        self.bucket = bucket
        self.exp_avg_S, self.exp_avg_sq_S = torch.empty(0), torch.empty(0)
        self.step = torch.zeros((), dtype=torch.float32, device=bucket.master_S.device)
        self._groups = [groups[piece.parameter] for piece in bucket.pieces]
        self._views: list[tuple[Tensor, Tensor]] = []
        self._decays: list[float] = []
        self._ends_R = self._decay_R = torch.empty(0)

    def has_gradients(self) -> bool:
        grads = [piece.parameter.grad is piece.grad for piece in self.bucket.pieces]
        if not all(grads) and any(piece.parameter.grad is not None for piece in self.bucket.pieces):
            odd = self.bucket.pieces[grads.index(False)].name
            raise RuntimeError(
                f"the gradient of {odd} is not the bucket's: step what finish_gradients() gave, as it is"
            )
        return all(grads)

    def adopt(self, state: dict[Tensor, Any]) -> None:
        """Have the pieces' state in the flat moments: at first, and where another one was loaded."""
        pieces = [piece.parameter for piece in self.bucket.pieces]
        if self._views and all(
            state[piece].get("exp_avg") is first and state[piece].get("exp_avg_sq") is second
            for piece, (first, second) in zip(pieces, self._views, strict=True)
        ):
            return
        master_S = self.bucket.master_S
        self.exp_avg_S, self.exp_avg_sq_S = torch.zeros_like(master_S), torch.zeros_like(master_S)
        begin, self._views = master_S.storage_offset(), []
        for piece in pieces:
            start = piece.storage_offset() - begin
            views = tuple(each[start : start + len(piece)] for each in (self.exp_avg_S, self.exp_avg_sq_S))
            before = state[piece]
            if before:
                self.step.copy_(before["step"])
                for view, name in zip(views, ("exp_avg", "exp_avg_sq"), strict=True):
                    view.copy_(before[name])
            state[piece] = {"step": self.step, "exp_avg": views[0], "exp_avg_sq": views[1]}
            self._views.append((views[0], views[1]))

    def move(self, lr: Tensor, betas: tuple[float, float], eps: float) -> None:
        """One step, whose number `step` is."""
        bucket = self.bucket
        self._find_runs()
        moments = self.exp_avg_S, self.exp_avg_sq_S
        runs = self._ends_R, self._decay_R
        adamw_step(bucket.master_S, bucket.grad_S, *moments, bucket.own_S, *runs, lr, self.step, betas, eps)
        torch.autograd.graph.increment_version([bucket.master_S])  # no operator of torch has written there
        bucket.note_published()

    def _find_runs(self) -> None:
        decays = [float(group["weight_decay"]) for group in self._groups]
        if decays == self._decays:
            return
        self._decays = decays
        ends = [end for _, _, end in self.bucket.plan.pieces(self.bucket.rank)]
        runs = [
            (end, decay)
            for index, (end, decay) in enumerate(zip(ends, decays, strict=True))
            if index == len(decays) - 1 or decays[index + 1] != decay
        ]
        device = self.bucket.master_S.device
        self._ends_R = torch.tensor([end for end, _ in runs], device=device)
        self._decay_R = torch.tensor([decay for _, decay in runs], dtype=torch.float32, device=device)
