"""Opening of the paths that a group has for small collectives, with the reason for each that it does not have.

- `one_shot`, `two_shot`: our kernels (`small_kernels`).
- `nccl`: torch.distributed as it is, on a group of gloo as on one of NCCL.
- `nccl_windows`, `torch_symmetric`: other libraries' on registered memory (`small_libraries`).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from collectives.small.kernels import OneShot, SmallWindow, TwoShot
from collectives.small.libraries import NcclWindows, TorchSymmetric
from collectives.small.path import Path, PathName, Plain
from collectives.transport.symmetric import why_unusable

_BY_PEERS: tuple[PathName, ...] = ("one_shot", "two_shot", "torch_symmetric")


def open_paths(
    names: Sequence[PathName], group: dist.ProcessGroup, device: torch.device, max_bytes: int
) -> tuple[dict[PathName, Path], dict[PathName, str]]:
    """Return the paths of `names` that could be opened, and the reasons of the others. All ranks call it alike.

    Args:
        max_bytes: the largest message.
    """
    paths: dict[PathName, Path] = {"nccl": Plain(group)}
    skipped: dict[PathName, str] = {}
    by_peers = [name for name in _BY_PEERS if name in names]
    no_peers = why_unusable(group, device) if by_peers else None
    if no_peers is not None:
        skipped |= dict.fromkeys(by_peers, no_peers)
    elif by_peers:
        if "torch_symmetric" in by_peers:
            paths["torch_symmetric"] = TorchSymmetric(group, device, max_bytes)
        if by_peers != ["torch_symmetric"]:
            window = SmallWindow(group, device, max_bytes)
            paths |= {"one_shot": OneShot(window), "two_shot": TwoShot(window)}
    if "nccl_windows" in names:
        windows = _open_windows(group, device, max_bytes)
        if isinstance(windows, str):
            skipped["nccl_windows"] = windows
        else:
            paths["nccl_windows"] = windows
    return paths, skipped


def _open_windows(group: dist.ProcessGroup, device: torch.device, max_bytes: int) -> NcclWindows | str:
    """The windows; or, on every rank alike, why one of them has none."""
    windows, reason = None, None
    try:
        if device.type != "cuda":
            raise RuntimeError(f"the device is {device.type}, not cuda")
        windows = NcclWindows(group, device, max_bytes)
    except (ValueError, RuntimeError, TypeError, AttributeError) as exc:  # an old NCCL, an old torch, another backend
        reason = f"{type(exc).__name__}: {str(exc).partition(chr(10))[0]}"
    reasons: list[str | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(reasons, reason, group=group)
    why_none = next((f"rank {rank}: {why}" for rank, why in enumerate(reasons) if why is not None), None)
    if why_none is not None or windows is None:
        return why_none or "it could not be opened"
    return windows
