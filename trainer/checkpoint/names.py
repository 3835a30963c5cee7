"""Names of checkpoints in their folder, and of what lies in one. Loads nothing: the writing process starts fast."""

from __future__ import annotations

import contextlib
import json
import re
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.checkpoint.digest import digest

FORMAT = 4
"""Of what is written: `trainer.checkpoint.dcp`."""
OLD_FORMAT = 3
"""A file of the safetensors format for each (tensor-parallel, pipeline) place: read, and no longer written."""
META = "meta.json"
METADATA = ".metadata"
"""Of torch.distributed.checkpoint: where each tensor lies."""
TOKENIZER = "tokenizer.json"
PENDING = ".new"
"""End of the name of a checkpoint that is not verified yet: no finite loss was computed with its parameters."""
DAMAGED = ".damaged"
"""End of the name of a checkpoint that could not be loaded and was set aside."""
OWN_DIGEST = "digest"
PEERS = "peers"
"""Protocol of checkpoints in the memory of a run's machines: `trainer.peer_copy.filesystem`."""
_URL = re.compile(r"([a-z][a-z0-9+.-]+):/{1,2}([^/].*)")
_NAME = re.compile(r"step-(\d{6,})")


def as_location(path: Path | str) -> Path:
    """Return a path, or what acts as one for a URL of an object store (`s3://...`).

    Args:
        path: a URL may have gone through a Path, which takes one of two slashes away.

    Raises:
        ImportError: a URL needs a package that is not installed.
    """
    url = _URL.match(str(path))
    if url is None:
        return Path(path)
    from upath import UPath  # only here: most runs have no URL

    know_protocol(url[1])
    # Without a listing that is kept: checkpoints come while somebody looks.
    made: Any = UPath(f"{url[1]}://{url[2]}", use_listings_cache=False)
    return made  # type: ignore[no-any-return]  # it has a Path's methods


def is_there(path: Path) -> bool:
    """Whether a file is there; of a folder or a URL as `as_location` gives them.

    Raises:
        OSError: nobody can say; or what else a store's client raises.
    """
    if not isinstance(path, Path):
        return has_object(path.fs, path.path)  # type: ignore[unreachable]
    try:  # `is_file` says no for any error, from Python 3.14 on
        return stat.S_ISREG(path.stat().st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False


def has_object(fs: Any, path: str) -> bool:
    """Whether a file system of fsspec has a path; errors as in `is_there`.

    Its own `isfile`, and `exists` of some, say no for any error: a good checkpoint would be taken for a half.
    """
    try:
        fs.info(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    return True


def know_protocol(location: str) -> None:
    """Have fsspec know a protocol of ours, before it is asked for a URL, or for a protocol."""
    if location.partition(":")[0] == PEERS:
        import trainer.peer_copy.filesystem  # noqa: F401  only here: most runs have no such URL


def is_name_of_run(path: Path) -> bool:
    """Whether a folder is named as the checkpoints of a run are, verified or not."""
    return _NAME.fullmatch(path.name.removesuffix(PENDING)) is not None


def sealed(facts: Mapping[str, Any]) -> str:
    """The text of `meta.json`, with its own digest."""
    return json.dumps({**facts, OWN_DIGEST: digest(json.dumps(facts).encode())}, indent=1) + "\n"


def checkpoints_in(folder: Path) -> list[Path]:
    """Good ones, oldest first."""
    return _named(folder, "")


def pending_in(folder: Path) -> list[Path]:
    """Return the checkpoints that are not verified yet, oldest first."""
    return _named(folder, PENDING)


def halves_in(folder: Path) -> list[Path]:
    """Return folders that are no checkpoints: halves of saves in progress or killed, and replaced checkpoints."""
    return sorted([*folder.glob(".step-*.part"), *folder.glob(".step-*.old")]) if isinstance(folder, Path) else []


def step_of(path: Path) -> int:
    """Return the step after which a checkpoint was saved, from its name."""
    return int(path.name.removeprefix("step-").removesuffix(PENDING))


def _named(folder: Path, suffix: str) -> list[Path]:
    there: list[Path] = []
    with contextlib.suppress(FileNotFoundError, NotADirectoryError):
        there = list(folder.iterdir())
    ends = (path for path in there if path.name.endswith(suffix))
    paths = (path for path in ends if _NAME.fullmatch(path.name.removesuffix(suffix)))
    return sorted(paths, key=step_of)
