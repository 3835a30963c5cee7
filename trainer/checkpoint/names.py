"""Names of checkpoints in their folder, and of what lies in one. Loads nothing: the writing process starts fast."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer.checkpoint.digest import digest

FORMAT = 4
"""Of what is written: `trainer.checkpoint.dcp`."""
OLD_FORMAT = 3
"""A file of the safetensors format for each (tensor-parallel, pipeline) place: read, and no longer written."""
META = "meta.json"
TOKENIZER = "tokenizer.json"
PENDING = ".new"
"""End of the name of a checkpoint that is not verified yet: no finite loss was computed with its parameters."""
OWN_DIGEST = "digest"
_NAME = re.compile(r"step-(\d{6,})")


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
    return sorted([*folder.glob(".step-*.part"), *folder.glob(".step-*.old")])


def step_of(path: Path) -> int:
    """Return the step after which a checkpoint was saved, from its name."""
    return int(path.name.removeprefix("step-").removesuffix(PENDING))


def _named(folder: Path, suffix: str) -> list[Path]:
    paths = (path for path in folder.glob(f"step-*{suffix}") if _NAME.fullmatch(path.name.removesuffix(suffix)))
    return sorted(paths, key=step_of)
