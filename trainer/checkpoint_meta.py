"""Which checkpoints a folder holds, and what stands beside their tensors. Needs no torch: who launches reads it too."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from netlayer.errors import ConfigError

FORMAT = 1
META = "meta.json"
_NAME = re.compile(r"step-(\d{6,})")


@dataclass(frozen=True)
class Meta:
    """What stands beside the tensors: `step` steps were taken, with samples drawn by `seed`, by this model."""

    path: Path
    step: int
    seed: int
    tp: int
    pp: int
    model: Mapping[str, Any]


def find(path: Path) -> Meta:
    """The checkpoint at `path`, or the newest one below it (`checkpoints/` of a run too).

    Raises:
        ConfigError: there is none, or it is damaged.
    """
    folders = [path, *reversed(checkpoints_in(path)), *reversed(checkpoints_in(path / "checkpoints"))]
    folder = next((each for each in folders if (each / META).is_file()), None)
    if folder is None:
        remedy = "give a folder such as runs/train-.../checkpoints/step-000050"
        raise ConfigError("--resume", path, "holds no checkpoint", remedy)
    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
        if meta["format"] != FORMAT:
            rule = f"has format {meta['format']}, and this version reads {FORMAT}"
            raise ConfigError("--resume", folder, rule, "go on with the version that wrote it")
        step, seed, tp, pp = (int(meta[name]) for name in ("step", "seed", "tp", "pp"))
        found = Meta(folder, step, seed, tp, pp, meta["job"]["model"])
    except (OSError, ValueError, KeyError, TypeError) as exc:
        raise ConfigError("--resume", folder, f"is damaged ({exc!r} in {META})", "give an older checkpoint") from exc
    for tp, pp in itertools.product(range(found.tp), range(found.pp)):
        if not (folder / file_name(tp, pp)).is_file():
            raise ConfigError("--resume", folder, f"lacks {file_name(tp, pp)}", "give an older checkpoint")
    return found


def checkpoints_in(folder: Path) -> list[Path]:
    """Whole ones, oldest first."""
    found = [(match, path) for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found, key=lambda pair: int(pair[0][1]))]


def file_name(tp: int, pp: int) -> str:
    """What the first data-parallel rank of a place writes."""
    return f"tp{tp}-pp{pp}.pt"
