"""Rank <-> (tp, cp, dp, dp_replicate, pp) coordinates of a job, and its process groups in closed form.

The order is tensor, context, data, replicas, pipeline, innermost first: tensor- and context-parallel groups stay inside
a server where they can, and data-parallel groups are placed before pipeline groups, so that data-parallel traffic
crosses fewer pods (MegaScale, NSDI'24, 3.2). A data-parallel group (`dp`) shares the shards; with `dp_replicate` there
are several of them, replicas, each with all shards, whose gradients are all-reduced (hybrid sharding, PyTorch's HSDP).
Together they are the `data_ranks`, each of which has its own part of a batch. Every group is an arithmetic progression
of ranks, so it is a `range`: nothing here grows with the world size.

[Note: data-parallel groups] Context-parallel ranks hold the same parameters and other positions of the same sequences,
so gradients are added up over them too, and all of them share masters and optimiser state: a group of dimension `dp`
takes in the context-parallel ranks (Megatron's dp-cp group), while the coordinate `dp` counts sequences alone.

Not covered: expert parallelism.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:  # importing numpy would take a quarter of the time of `netlayer config show`
    import numpy as np
    from numpy.typing import NDArray

Dimension = Literal["tp", "cp", "dp", "dp_replicate", "pp"]
DIMENSIONS: tuple[Dimension, ...] = ("tp", "dp", "pp")
"""Of every job; one with context parallelism has `cp` too, one with replicas `dp_replicate`."""
_MOST_LISTED = 16  # ranks that a line lists one by one


class Coordinates(NamedTuple):
    """Coordinates of a rank: tensor-parallel index, pipeline stage, index in the data, part of sequences, replica."""

    tp: int
    pp: int
    dp: int
    cp: int = 0
    dp_replicate: int = 0


@dataclass(frozen=True)
class ParallelLayout:
    """The degrees of tensor, context, pipeline and data parallelism, and who shares a group with whom.

    Args:
        tp: tensor-parallel degree; neighbours in rank.
        pp: pipeline stages; the outermost dimension.
        dp: data-parallel degree, between context and replicas: of sequences, [Note: data-parallel groups].
        vpp: model chunks a pipeline rank holds (interleaved 1F1B); it makes no groups.
        cp: context-parallel degree: parts of a sequence; between tensor and data.
        dp_replicate: replicas of the sharded data-parallel groups; between data and pipeline.

    Raises:
        ValueError: a degree below 1, or above it where more is not built.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    vpp: int = 1
    cp: int = 1
    dp_replicate: int = 1

    def __post_init__(self) -> None:
        for name in ("tp", "pp", "dp", "vpp", "cp", "dp_replicate"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} = {getattr(self, name)}: a parallel degree is at least 1")

    @property
    def dp_cp(self) -> int:
        """Ranks of a data-parallel group, the context-parallel ones among them: these share the shards."""
        return self.dp * self.cp

    @property
    def world_size(self) -> int:
        return self.tp * self.cp * self.dp * self.dp_replicate * self.pp

    @property
    def dimensions(self) -> tuple[Dimension, ...]:
        """Return the dimensions that ranks make groups of, in one order."""
        context: tuple[Dimension, ...] = ("cp",) if self.cp > 1 else ()
        replicas: tuple[Dimension, ...] = ("dp_replicate",) if self.dp_replicate > 1 else ()
        return ("tp", *context, "dp", *replicas, "pp")

    @property
    def degrees(self) -> str:
        """Return `tp 2 x pp 1 x dp 4`, with `cp` and `dp_replicate` where they are above 1."""
        further = "".join(f" x {name} {degree}" for name, degree in self.further_degrees.items())
        return f"tp {self.tp} x pp {self.pp} x dp {self.dp}{further}"

    @property
    def further_degrees(self) -> dict[Literal["cp", "dp_replicate"], int]:
        """Return the degrees that few jobs have, where they are above 1."""
        degrees: dict[Literal["cp", "dp_replicate"], int] = {"cp": self.cp, "dp_replicate": self.dp_replicate}
        return {name: degree for name, degree in degrees.items() if degree > 1}

    @property
    def data_ranks(self) -> int:
        """Parts of a batch: data-parallel ranks of all replicas, of which each `cp` hold the same sequences."""
        return self.dp * self.dp_replicate

    @property
    def gradient_ranks(self) -> int:
        """Ranks whose gradients are added up: `dp_cp` of every replica."""
        return self.dp_cp * self.dp_replicate

    def data_rank(self, at: Coordinates) -> int:
        """Return which part of a batch a rank has, 0 <= part < data_ranks; context-parallel ranks have the same."""
        return at.dp + self.dp * at.dp_replicate

    def coordinates(self, rank: int) -> Coordinates:
        """Coordinates of `rank` (0 <= rank < world_size)."""
        self._check(rank)
        rest, tp = divmod(rank, self.tp)
        rest, cp = divmod(rest, self.cp)
        rest, dp = divmod(rest, self.dp)
        pp, dp_replicate = divmod(rest, self.dp_replicate)
        return Coordinates(tp=tp, pp=pp, dp=dp, cp=cp, dp_replicate=dp_replicate)

    def rank(self, *, tp: int = 0, pp: int = 0, dp: int = 0, cp: int = 0, dp_replicate: int = 0) -> int:
        """The rank at these coordinates: tp + TP * (cp + CP * (dp + DP * (dp_replicate + R * pp))), of R replicas."""
        for name, index in (("tp", tp), ("pp", pp), ("dp", dp), ("cp", cp), ("dp_replicate", dp_replicate)):
            if not 0 <= index < getattr(self, name):
                raise ValueError(f"{name} = {index}: outside 0..{getattr(self, name) - 1}")
        return tp + self.tp * (cp + self.cp * (dp + self.dp * (dp_replicate + self.dp_replicate * pp)))

    def num_groups(self, dimension: Dimension) -> int:
        """Return the number of groups of this dimension: each rank is in exactly one of them."""
        return self.world_size // self._shape(dimension)[1]

    def group(self, dimension: Dimension, index: int) -> range:
        """Ranks of the `index`-th group of a dimension, in rank order; groups count up by their first rank."""
        if not 0 <= index < self.num_groups(dimension):
            raise ValueError(f"group {index}: {dimension} has groups 0..{self.num_groups(dimension) - 1}")
        stride, degree = self._shape(dimension)
        block, inside = divmod(index, stride)
        first = block * stride * degree + inside
        return range(first, first + stride * degree, stride)

    def groups(self, dimension: Dimension) -> Iterator[range]:
        """All groups of a dimension, one after the other, never held together."""
        return (self.group(dimension, index) for index in range(self.num_groups(dimension)))

    def group_index(self, dimension: Dimension, rank: int) -> int:
        """Return the index of the dimension's group that `rank` belongs to."""
        self._check(rank)
        stride, degree = self._shape(dimension)
        return rank // (stride * degree) * stride + rank % stride

    def group_of(self, dimension: Dimension, rank: int) -> range:
        """The group of the dimension that `rank` belongs to."""
        return self.group(dimension, self.group_index(dimension, rank))

    def describe(self, ranks: Sequence[int]) -> str:
        """Coordinates of a group in words: those that its ranks share, `*` where they vary: `tp=1, pp=0, dp=*`."""
        columns = dict(zip(Coordinates._fields, zip(*map(self.coordinates, ranks), strict=True), strict=True))
        shown = [name for name in columns if name not in ("cp", "dp_replicate") or name in self.further_degrees]
        return ", ".join(f"{name}={columns[name][0] if len(set(columns[name])) == 1 else '*'}" for name in shown)

    def group_table(self, dimension: Dimension) -> NDArray[np.int64]:
        """Every group as one array, shape (num_groups, degree): for code that works on all ranks at once."""
        import numpy as np

        stride, degree = self._shape(dimension)
        blocks = np.arange(self.world_size, dtype=np.int64).reshape(-1, degree, stride)
        return np.ascontiguousarray(blocks.transpose(0, 2, 1)).reshape(-1, degree)

    def _shape(self, dimension: Dimension) -> tuple[int, int]:
        """(stride, degree): a group is `degree` ranks, `stride` apart."""
        shapes = {
            "tp": (1, self.tp),
            "cp": (self.tp, self.cp),
            "dp": (self.tp, self.dp_cp),  # [Note: data-parallel groups]
            "dp_replicate": (self.tp * self.dp_cp, self.dp_replicate),
            "pp": (self.tp * self.gradient_ranks, self.pp),
        }
        if dimension not in shapes:
            raise ValueError(f"dimension {dimension!r}: one of {', '.join(shapes)}")
        return shapes[dimension]

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.world_size:
            raise ValueError(f"rank {rank}: outside 0..{self.world_size - 1}")


def context_chunks(num_positions: int, rank: int, cp: int) -> tuple[range, range]:
    """Positions of a sequence that a context-parallel rank has: of 2 cp chunks, those numbered `rank`, 2 cp - 1 - rank.

    An early chunk's queries see few keys and a late chunk's many, so all ranks' attention has as much to compute.

    Raises:
        ValueError: 2 cp does not divide the positions.
    """
    if num_positions % (2 * cp):
        raise ValueError(f"{num_positions} positions: 2 x cp = {2 * cp} must divide them")
    size = num_positions // (2 * cp)
    first, last = rank, 2 * cp - 1 - rank
    return range(first * size, (first + 1) * size), range(last * size, (last + 1) * size)


def describe_ranks(ranks: Sequence[int]) -> str:
    """`rank 3`, `ranks 0-7`, `ranks 1,9,17,25`; of many, the first ones, the last one and the number."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    if list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))) and len(ranks) > 2:
        return f"ranks {ranks[0]}-{ranks[-1]}"
    if len(ranks) <= _MOST_LISTED:
        return f"ranks {','.join(map(str, ranks))}"
    return f"ranks {','.join(map(str, ranks[:3]))},...,{ranks[-1]} ({len(ranks)} ranks)"
