"""Collectives of a few KiB between the GPUs of one host, each by the path that a tuned table names for its size.

    small = SmallCollectives(group, device)      # on every rank, at the same point of the program
    small.all_reduce(tensor)                     # in place
    small.all_gather(out, part)
    small.reduce_scatter(out, whole)

They do what torch.distributed does, on the current stream, and can be captured in a CUDA graph. What no path of ours
takes goes to torch.distributed: large messages, other operators and types, sizes that are not whole units of 8 bytes,
groups on gloo. Not covered: a timeout inside our kernels. They wait for their peers as long as it takes; with a
`watch`, the collective that does not complete is named (outside graphs).

One stream at a time: collectives of one object share a window, so any two of them must be ordered, by a stream or by
events, as with an NCCL communicator; the same holds for replays of graphs. Another stream at the same time needs an
object of its own. Every rank launches the same kinds, sizes and types in the same order, and keeps the object until all
ranks are done with it: peers write into its window.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from collectives.arguments import as_device
from collectives.small.path import KINDS, Kind, Path, PathName, Plain
from collectives.small.paths import open_paths
from collectives.small.table import DEFAULT_MAX_BYTES, DEFAULT_TABLE, TuningTable
from collectives.watch.recorder import Recorder
from collectives.watch.watchdog import Watch

logger = logging.getLogger(__name__)


class SmallCollectives:
    """All-reduce, all-gather and reduce-scatter of one group.

    Args:
        group: None: all ranks.
        device: of this rank; every tensor lies there.
        max_bytes: larger messages, counted whole as nccl-tests do, go to torch.distributed. Over W ranks the window
            takes 8 W times as much memory.
        table: which path is taken; None: `tuning.DEFAULT_TABLE`.
        name: what records and errors call the group.
        recorder: notes each collective, with its path.
        watch: says who is late where one does not complete.

    Raises:
        ValueError: `max_bytes` is negative.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        device: torch.device | str,
        max_bytes: int = DEFAULT_MAX_BYTES,
        table: TuningTable | None = None,
        *,
        name: str = "small",
        recorder: Recorder | None = None,
        watch: Watch | None = None,
    ) -> None:
        if max_bytes < 0:
            raise ValueError(f"max_bytes must not be negative, got {max_bytes}")
        chosen = dist.group.WORLD if group is None else group
        assert chosen is not None
        device = as_device(device)
        self.group, self.device, self.max_bytes, self.name = chosen, device, max_bytes, name
        self.num_ranks = dist.get_world_size(chosen)
        self.table = DEFAULT_TABLE if table is None else table
        names = {choice.path for kind in KINDS for choice in self.table.choices(kind, self.num_ranks)}
        opened, skipped = open_paths(sorted(names) if max_bytes else (), chosen, device, max_bytes)
        self._paths: dict[PathName, Path] = opened
        self.skipped: dict[PathName, str] = skipped
        """Paths that the table names and this group cannot have, and why."""
        self._plain, self._recorder = Plain(chosen), recorder
        self._track = None if watch is None else watch.track(name, chosen)
        self._chosen: dict[tuple[Kind, int, torch.dtype], PathName] = {}
        self._say_what_is_amiss()

    @property
    def why_plain(self) -> str | None:
        """Why everything goes to torch.distributed; None where it does not."""
        if set(self._paths) != {"nccl"}:
            return None
        if self.device.type != "cuda":
            return f"the device is {self.device.type}, not cuda"
        return next(iter(self.skipped.values()), "the table names no other path, or max_bytes is 0")

    def path_of(self, kind: Kind, num_bytes: int, dtype: torch.dtype) -> PathName:
        """The path that a sum, or a gather, of so many bytes in the whole buffer takes; the same on every rank."""
        key = (kind, num_bytes, dtype)
        if key not in self._chosen:
            self._chosen[key] = self._choose(*key)
        return self._chosen[key]

    def _choose(self, kind: Kind, num_bytes: int, dtype: torch.dtype) -> PathName:
        if num_bytes > self.max_bytes:
            return "nccl"
        # What two shots cannot split, one takes.
        for name in (self.table.choose(kind, self.num_ranks, num_bytes), "one_shot"):
            if name in self._paths and self._paths[name].takes(kind, dtype, num_bytes):
                return name
        return "nccl"

    def all_reduce(self, tensor: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Reduction over all ranks, in place.

        Raises:
            ValueError: the tensor is not contiguous.
        """
        _check_contiguous(tensor)
        name = self._path_name_for("all_reduce", tensor, op)
        if name == "nccl":
            self._launch("all_reduce", tensor, name, lambda: self._plain.all_reduce(tensor, op))
            return
        path = self._paths[name]

        def launch() -> None:
            inside = _aligned(tensor, path)
            path.calls["all_reduce"](inside, inside)
            _copy_back(tensor, inside)

        self._launch("all_reduce", tensor, name, launch)

    def all_gather(self, out: Tensor, part: Tensor) -> None:
        """Gather `part` of rank r into slice r of `out`; in place where `part` is this rank's own slice.

        The table chooses the path (implementation, one of `path.PATHS`) by the bytes of `out`.

        Raises:
            ValueError: the shapes or types do not match, or a tensor is not contiguous.
        """
        self._check_parts(out, part)
        path_name = self._path_name_for("all_gather", out, dist.ReduceOp.SUM)
        path = self._paths[path_name]

        def launch() -> None:
            inside = _aligned(out, path, read=False)
            path.calls["all_gather"](inside, _aligned(part, path))
            _copy_back(out, inside)

        self._launch("all_gather", out, path_name, launch)

    def reduce_scatter(self, out: Tensor, whole: Tensor, op: dist.ReduceOp.RedOpType = dist.ReduceOp.SUM) -> None:
        """Reduction of slice r of all ranks' `whole` into rank r's `out`; in place where `out` is its own slice.

        Raises:
            ValueError: the shapes or types do not match, or a tensor is not contiguous.
        """
        self._check_parts(whole, out)
        name = self._path_name_for("reduce_scatter", whole, op)
        if name == "nccl":
            self._launch("reduce_scatter", whole, name, lambda: self._plain.reduce_scatter(out, whole, op))
            return
        path = self._paths[name]

        def launch() -> None:
            inside = _aligned(out, path, read=False)
            path.calls["reduce_scatter"](inside, _aligned(whole, path))
            _copy_back(out, inside)

        self._launch("reduce_scatter", whole, name, launch)

    def _path_name_for(self, kind: Kind, whole: Tensor, op: dist.ReduceOp.RedOpType) -> PathName:
        return self.path_of(kind, whole.nbytes, whole.dtype) if op == dist.ReduceOp.SUM else "nccl"

    def _launch(self, kind: Kind, whole: Tensor, path: PathName, launch: Callable[[], None]) -> None:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            launch()  # neither times nor completions can be had of a capture
            return
        if self._recorder is not None:
            with self._recorder.launching(self.name, kind, whole.nbytes, labels={"path": path}):
                self._watched(kind, whole, launch)
        else:
            self._watched(kind, whole, launch)

    def _watched(self, kind: Kind, whole: Tensor, launch: Callable[[], None]) -> None:
        if self._track is None:
            launch()
            return
        with self._track.around(kind, whole.nbytes):
            launch()

    def _check_parts(self, whole: Tensor, part: Tensor) -> None:
        _check_contiguous(whole)
        _check_contiguous(part)
        if whole.numel() != self.num_ranks * part.numel() or whole.dtype != part.dtype:
            raise ValueError(
                f"the whole buffer must be {self.num_ranks} parts of one type, got {whole.numel()} elements of "
                f"{whole.dtype} and parts of {part.numel()} of {part.dtype}"
            )

    def _say_what_is_amiss(self) -> None:
        if self.why_plain is not None:
            logger.info("%s: all collectives go to torch.distributed (%s)", self.name, self.why_plain)
            return
        for path, why in self.skipped.items():
            logger.warning(
                "%s: path %s is omitted (%s); messages that it should take go elsewhere", self.name, path, why
            )
        if not self.table.is_measured(self.num_ranks):
            logger.warning(
                "%s: the table is not measured for %d ranks; run: python -m bench.small_messages --tune FILE",
                self.name,
                self.num_ranks,
            )


def _check_contiguous(tensor: Tensor) -> None:
    if not tensor.is_contiguous():
        raise ValueError(f"the tensor must be contiguous, got strides {tensor.stride()}; give tensor.contiguous()")


def _aligned(tensor: Tensor, path: Path, read: bool = True) -> Tensor:
    """The tensor, or one in its place that begins where the path can work on it; a copy if it is to be read.

    The path itself must not hang on an address: another rank's may lie well where this one's does not.
    """
    if tensor.data_ptr() % path.alignment_bytes == 0:
        return tensor
    return tensor.clone() if read else torch.empty_like(tensor)


def _copy_back(tensor: Tensor, inside: Tensor) -> None:
    if inside is not tensor:
        tensor.copy_(inside)
