"""Token datasets on disk: a folder of shards with an index and a manifest, and Megatron's files, both ways."""

from __future__ import annotations

from pathlib import Path

from netlayer.errors import ConfigError
from trainer.data.dataset.folder import Check, TokenFolder
from trainer.data.dataset.megatron import MegatronTokens, is_megatron

__all__ = ["Check", "MegatronTokens", "TokenFolder", "open_dataset"]

REMEDY = "give a folder of `netlayer data prepare`, or the prefix of Megatron's .bin and .idx"


def open_dataset(
    path: Path, name: str | None = None, field: str = "dataset", remedy: str = REMEDY
) -> TokenFolder | MegatronTokens:
    """Open a dataset folder, or Megatron's files by their prefix; both are a `TokenDataset`.

    Args:
        path: the folder or prefix.
        name: in logs and records; that of the path where None.
        field: how the user named it, for errors.
        remedy: what may be given in place of a path that is no dataset.

    Raises:
        ConfigError: it is missing or damaged.
    """
    if not path.is_dir():
        if is_megatron(path):
            return MegatronTokens(path, name=name, field=field)
        rule = "is a file, and no dataset" if path.exists() else "there is no such dataset"
        raise ConfigError(field, path, rule, remedy)
    return TokenFolder(path, name, field)
