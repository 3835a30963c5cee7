"""AdamW that steps a bucket's shard as one, on a GPU: moments are flat, and what is gathered is written with the step.

To torch it is its own AdamW: its groups, hooks and state, a dictionary a piece, whose tensors are views of the flat
ones. Not covered: AMSGrad, `maximize`, groups that differ in more than weight decay, and gradients that are not where
the bucket reduces them to.

Shapes: S elements of a shard, P pieces in it, R runs of elements with one weight decay each.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from collectives.sharded.bucket import Bucket
from trainer.optim.adamw_kernel import adamw_step

Group = dict[str, Any]
_ALIKE = ("lr", "betas", "eps")
_MOMENTS = ("exp_avg", "exp_avg_sq")
_NORM_EPS = 1e-6
"""torch's, of a norm that is divided by."""


class ShardAdamW(torch.optim.AdamW):
    """AdamW over the pieces of buckets.

    Args:
        params: groups of pieces, of `ShardedDataParallel`; they may differ in `weight_decay` alone.
        buckets: whose pieces these are, all of them, with masters in float32.
        lr, betas, eps: as torch's.
        coming: all buckets, each when its gradients are there; None: all are when a step is called.

    Raises:
        ValueError: a parameter is in no bucket.
    """

    steps_shards = True

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[Group],
        *,
        buckets: Sequence[Bucket],
        lr: float,
        betas: tuple[float, float],
        eps: float,
        coming: Callable[[], Iterable[Sequence[Bucket]]] | None = None,
    ) -> None:
        super().__init__(params, lr=lr, betas=betas, eps=eps, fused=True)
        numbers = {piece: number for number, group in enumerate(self.param_groups) for piece in group["params"]}
        self._shards = [_Shard(bucket, numbers) for bucket in buckets if bucket.pieces]
        if len(numbers) != sum(len(shard.bucket.pieces) for shard in self._shards):
            raise ValueError("params: hold what is no piece of the buckets; give the pieces alone, all of them")
        device = buckets[0].master_S.device if buckets else None
        self._coming = coming or (lambda: [buckets])
        self._lr = torch.zeros((), dtype=torch.float32, device=device)
        self._factor: Tensor | None = None

    def add_param_group(self, param_group: Group) -> None:
        if hasattr(self, "_shards"):
            raise ValueError("a group comes too late: the buckets' pieces are all here")
        super().add_param_group(param_group)

    @torch.no_grad()
    def clip(self, norm: Tensor, max_norm: float) -> None:
        """Have the next step read the gradients scaled, as `clip_grads_with_norm_` would; a pass over them is saved.

        Only a step, or another clipping, ends it.
        """
        self._factor = (max_norm / (norm + _NORM_EPS)).clamp(max=1.0).float()

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Move the pieces of every bucket that has gradients; a bucket has them for all of its pieces or for none.

        Raises:
            RuntimeError: a piece has no gradient while others have, or another tensor than the bucket's.
            ValueError: groups differ in more than their weight decay, or ask for what is omitted.
        """
        factor, self._factor = self._factor, None
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        due = [shard for shard in self._shards if shard.has_gradients()]
        if not due:
            return loss
        _check_alike(self.param_groups)
        first, decays = self.param_groups[0], [float(group["weight_decay"]) for group in self.param_groups]
        lr = self._on_device(first["lr"])
        for shard in due:
            shard.adopt(self.state)
        torch._foreach_add_([shard.step_P for shard in due], 1)
        of_bucket = {id(shard.bucket): shard for shard in due}
        for bucket in itertools.chain.from_iterable(self._coming()):
            if id(bucket) in of_bucket:
                of_bucket[id(bucket)].move(lr, first["betas"], first["eps"], decays, factor)
        return loss

    def _on_device(self, lr: float | Tensor) -> Tensor:
        """Itself, where it is a tensor there: a graph reads what it will hold."""
        if not isinstance(lr, Tensor):
            return self._lr.fill_(lr)
        is_there = lr.device == self._lr.device and lr.dtype == self._lr.dtype
        return lr if is_there else self._lr.copy_(lr)


class _Shard:
    """A bucket's moments, flat, and which weight decay its runs have.

    Args:
        numbers: of the groups that pieces are in.
    """

    def __init__(self, bucket: Bucket, numbers: Mapping[Tensor, int]) -> None:
        self.bucket = bucket
        self.step_P = torch.zeros(len(bucket.pieces), dtype=torch.float32, device=bucket.master_S.device)
        self._moments = torch.empty(0), torch.empty(0)
        self._numbers = [numbers[piece.parameter] for piece in bucket.pieces]
        self._views: list[dict[str, Tensor]] = []
        self._decays: list[float] = []
        self._runs: tuple[Tensor, Tensor] | None = None

    def has_gradients(self) -> bool:
        grads = [piece.parameter.grad is piece.grad for piece in self.bucket.pieces]
        if not all(grads) and any(piece.parameter.grad is not None for piece in self.bucket.pieces):
            odd = self.bucket.pieces[grads.index(False)].name
            raise RuntimeError(
                f"the gradient of {odd} is not the bucket's: step what finish_gradients() gave, as it is"
            )
        return all(grads)

    def adopt(self, state: dict[Tensor, Any]) -> None:
        """Have the pieces' state in the flat tensors: at first, and where another one was loaded."""
        pieces = [piece.parameter for piece in self.bucket.pieces]
        if self._views and all(
            state[piece].get(name) is view
            for piece, views in zip(pieces, self._views, strict=True)
            for name, view in views.items()
        ):
            return
        self._moments = torch.zeros_like(self.bucket.master_S), torch.zeros_like(self.bucket.master_S)
        self.step_P, self._views = torch.zeros_like(self.step_P), []
        places = self.bucket.plan.pieces(self.bucket.rank)
        for piece, step, (_, start, end) in zip(pieces, self.step_P.unbind(), places, strict=True):
            views = {"step": step} | {
                name: moment_S[start:end] for name, moment_S in zip(_MOMENTS, self._moments, strict=True)
            }
            for name, before in state[piece].items():
                if name in views:
                    views[name].copy_(before)
                    if before.is_cuda:  # allocated under another stream than this one, perhaps, and let go of here
                        before.record_stream(torch.cuda.current_stream(before.device))
            state[piece] = dict(views)
            self._views.append(views)

    def move(
        self, lr: Tensor, betas: tuple[float, float], eps: float, decays: Sequence[float], factor: Tensor | None
    ) -> None:
        """Take one step, whose number is in `step_P`.

        Args:
            decays: by group.
            factor: of the gradients.
        """
        bucket, runs = self.bucket, self._find_runs([decays[number] for number in self._numbers])
        shard_S = bucket.steppable_shard
        adamw_step(
            bucket.master_S,
            bucket.grad_S,
            *self._moments,
            shard_S,
            *runs,
            lr,
            self.step_P,
            betas,
            eps,
            factor,
        )
        torch.autograd.graph.increment_version([bucket.master_S])  # no operator of torch has written there
        bucket.note_copied_in()

    def _find_runs(self, decays: list[float]) -> tuple[Tensor, Tensor]:
        """Return the end of each run of one weight decay, [R], and the decay, [R]."""
        if self._runs is not None and decays == self._decays:
            return self._runs
        self._decays = decays
        ends = [end for _, _, end in self.bucket.plan.pieces(self.bucket.rank)]
        last = len(decays) - 1
        runs = [
            (end, decay)
            for index, (end, decay) in enumerate(zip(ends, decays, strict=True))
            if index == last or decays[index + 1] != decay
        ]
        device = self.bucket.master_S.device
        ends_R = torch.tensor([end for end, _ in runs], device=device)
        self._runs = ends_R, torch.tensor([decay for _, decay in runs], dtype=torch.float32, device=device)
        return self._runs


def _check_alike(groups: Sequence[Group]) -> None:
    first = groups[0]
    for group in groups:
        odd = next((name for name in _ALIKE if group[name] is not first[name] and group[name] != first[name]), None)
        if odd is not None:
            raise ValueError(f"{odd} = {group[odd]} beside {first[odd]}: groups may differ in weight_decay alone")
        if group["amsgrad"] or group["maximize"]:
            raise ValueError("amsgrad and maximize are not here: take torch.optim.AdamW")
