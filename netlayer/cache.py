"""Folder of the user for what can be made again: prepared text, measured algorithms."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/netlayer`, or `~/.cache/netlayer`; it need not be there.

    Raises:
        OSError: this user has no home folder.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if Path(base).is_absolute() else Path("~/.cache").expanduser()) / "netlayer"
    except RuntimeError as exc:
        raise OSError("there is no home folder") from exc
