"""Token datasets on disk: a folder of shards with an index and a manifest, and Megatron's files, both ways."""

from __future__ import annotations

from pathlib import Path

from trainer.data.dataset.folder import Check, TokenFolder
from trainer.data.dataset.megatron import MegatronTokens, is_megatron

__all__ = ["Check", "MegatronTokens", "TokenFolder", "open_dataset"]


def open_dataset(path: Path, name: str | None = None, field: str = "dataset") -> TokenFolder | MegatronTokens:
    """Open a dataset folder, or Megatron's files by their prefix; both are a `TokenDataset`.

    Args:
        path: the folder or prefix.
        name: in logs and records; that of the path where None.
        field: how the user named it, for errors.

    Raises:
        ConfigError: it is missing or damaged.
    """
    if not path.is_dir() and is_megatron(path):
        return MegatronTokens(path, name=name, field=field)
    return TokenFolder(path, name, field)
