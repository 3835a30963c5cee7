"""Paths of a small collective: one interface, and its implementation by torch.distributed.

A path says by data which kinds it offers (`calls`), and which messages of these it takes. Not covered: which path is
best where (`table`), and reductions but the sum (torch.distributed's own aside).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from typing import Literal, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.torch_names import all_gather_single, reduce_scatter_single

Kind = Literal["all_reduce", "all_gather", "reduce_scatter"]
KINDS: tuple[Kind, ...] = get_args(Kind)
PathName = Literal["one_shot", "two_shot", "nccl", "nccl_windows", "torch_symmetric"]
PATHS: tuple[PathName, ...] = get_args(PathName)

Calls = Mapping[Kind, Callable[[Tensor, Tensor], None]]
"""Each kind that is offered, as a call (out, source); an all-reduce is in place and gets its tensor twice."""


class Path(ABC):
    """One path. Tensors are contiguous and start at multiples of `alignment_bytes`; work goes to the current stream."""

    alignment_bytes = 1
    calls: Calls

    def takes(self, kind: Kind, dtype: torch.dtype, num_bytes: int) -> bool:
        """Whether it can do this, the same on every rank; `num_bytes` of the whole buffer."""
        return kind in self.calls and self._fits(kind, dtype, num_bytes)

    @abstractmethod
    def _fits(self, kind: Kind, dtype: torch.dtype, num_bytes: int) -> bool:
        """The same of a kind that it offers."""


class Plain(Path):
    """torch.distributed, which has the last word on what it takes."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.calls: Calls = {
            "all_reduce": lambda out, _source: self.all_reduce(out),
            "all_gather": self.all_gather,
            "reduce_scatter": self.reduce_scatter,
        }

    def _fits(self, kind: Kind, dtype: torch.dtype, num_bytes: int) -> bool:
        del kind, dtype, num_bytes
        return True

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Reduce in place."""
        dist.all_reduce(tensor, op=op, group=self.group)

    def all_gather(self, out: Tensor, part: Tensor) -> None:
        """Gather `part` of rank r into slice r of every rank's `out`."""
        all_gather_single(out.view(-1), part.view(-1), group=self.group)

    def reduce_scatter(self, out: Tensor, whole: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Reduction of slice r of all ranks' `whole` into rank r's `out`."""
        reduce_scatter_single(out.view(-1), whole.view(-1), op=op, group=self.group)
