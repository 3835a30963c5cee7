"""One small collective as a measurement sees it: buffers whose result is known exactly, and whether it comes out.

Not covered: what to compare (`tuner`, benches), and how long it takes (`timing`).

Shapes: W ranks; sizes are of the whole buffer, as nccl-tests count them.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.small.path import Kind, Path
from collectives.timing import Replay, greatest, make_replay

_PART_BYTES = 16
_PERIOD = 11  # prime, so that every rank's row is another one
_VALUES = 5  # 0 to 4: sums over 8 ranks are below 2**5, and partial sums of 8 such sums below 2**8, exact in every type


WRONG_DATA = "gave wrong data"


class Trial:
    """One collective of one size on this rank.

    Args:
        kind: of the collective.
        source: what this rank gives.
        out: what it gets; `source` itself where an all-reduce is in place.
        launch: the call; it may put another tensor into `out`.
        rank, num_ranks: place in the group.
    """

    def __init__(
        self, kind: Kind, source: Tensor, out: Tensor, launch: Callable[[], None], rank: int, num_ranks: int
    ) -> None:
        self.kind, self.source, self.out, self.launch = kind, source, out, launch
        self.rank, self.num_ranks = rank, num_ranks

    def fill(self) -> None:
        """Poison what comes out, then write what goes in."""
        self.out.fill_(float("nan"))
        self.source.copy_(self._pattern(self.rank, 0, self.source.numel()))

    def count_wrong(self, launches: int = 1) -> int:
        """Elements of `out` that are not the result of so many launches since `fill`.

        Sums are exact; where several launches in place multiply by a W that is no power of two, they may round.
        """
        expected = self._expected()
        tolerance = 0.0
        if self.out is self.source and launches > 1:
            expected *= float(self.num_ranks) ** (launches - 1)
            if self.num_ranks & (self.num_ranks - 1):
                tolerance = launches * torch.finfo(self.out.dtype).eps
        differ = (self.out.view(-1).float() - expected).abs_() <= tolerance * expected
        return int(differ.logical_not_().sum())

    def _expected(self) -> Tensor:
        """The result of one launch, float32."""
        length = self.out.numel()
        if self.kind == "all_gather":
            return torch.cat([self._pattern(r, 0, self.source.numel()) for r in range(self.num_ranks)])
        start = self.rank * length if self.kind == "reduce_scatter" else 0
        total = self._pattern(0, start, length)
        for rank in range(1, self.num_ranks):
            total += self._pattern(rank, start, length)
        return total

    def _pattern(self, rank: int, start: int, length: int) -> Tensor:
        """Elements `start` and on of what a rank gives: whole numbers, another row of them for each rank."""
        index = torch.arange(start, start + length, device=self.source.device)
        return index.mul_(rank + 1).add_(rank).remainder_(_PERIOD).remainder_(_VALUES).float()


def buffer_sizes(kind: Kind, num_bytes: int, num_ranks: int) -> tuple[int, int]:
    """Bytes that a rank gives and gets, of a collective whose whole buffer has `num_bytes`.

    Parts are rounded down to 16 bytes, as nccl-tests do.
    """
    part = num_bytes // num_ranks // _PART_BYTES * _PART_BYTES
    whole = part * num_ranks
    return {"all_reduce": (num_bytes, num_bytes), "all_gather": (part, whole), "reduce_scatter": (whole, part)}[kind]


def trial_of(path: Path, kind: Kind, source: Tensor, out: Tensor, group: dist.ProcessGroup) -> Trial:
    """A trial of a kind that a path offers, on these tensors; an all-reduce is one of `source`, in place."""
    out = source if kind == "all_reduce" else out
    call = path.calls[kind]
    return Trial(kind, source, out, lambda: call(out, source), dist.get_rank(group), dist.get_world_size(group))


def checked_replay(trial: Trial, launches: int, group: dist.ProcessGroup) -> Replay | str:
    """A replay of `launches` whose data is right; or, on every rank alike, what is amiss with it."""
    device, reason = trial.source.device, ""
    try:
        replay = make_replay(trial.launch, launches, device)
    except RuntimeError as exc:  # of another library, whose operations change from version to version
        replay, reason = None, str(exc).partition("\n")[0]
    if greatest([replay is None], group, device)[0] or replay is None:
        return f"cannot be launched or captured: {reason or 'another rank says why'}"
    return replay if is_right(trial, replay, launches, group) else WRONG_DATA


def is_right(trial: Trial, replay: Replay, launches: int, group: dist.ProcessGroup) -> bool:
    """Whether a replay, and then a launch of its own, gives every rank the result that it should.

    In this order: where a launch puts another tensor into `out`, that is the replay's until the next launch.
    """
    wrong = 0
    for call, times in ((replay, launches), (trial.launch, 1)):
        trial.fill()
        call()
        wrong += trial.count_wrong(times)
    return int(greatest([wrong], group, trial.source.device)[0]) == 0
