"""Configuration keys that were renamed: the old names are read until version 0.5, with a warning.

Files, `--set` and records of earlier versions go through here, so that whatever reads a job sees today's names alone.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from netlayer.errors import ConfigError

logger = logging.getLogger(__name__)

RENAMED: Mapping[tuple[str, str], str] = {
    ("batch", "global_size"): "global_batch_size",
    ("batch", "micro_size"): "micro_batch_size",
    ("optimizer", "clip_norm"): "max_grad_norm",
    ("optimizer", "min_lr_share"): "min_lr_ratio",
    ("checkpoint", "other_text"): "allow_dataset_change",
    ("loop", "collect_every_steps"): "gc_interval",
    ("overlap", "keep_gathered"): "save_gathered_input",
}
"""New key by (section, old key). The sections' names are unique in the tree."""


def with_new_keys(tree: Mapping[str, Any], section: str = "", *, warn: bool = False) -> dict[str, Any]:
    """Return nested dictionaries with today's keys in place of old ones, at any depth.

    Args:
        section: the name under which `tree` itself stands; empty: it is a root.
        warn: log each old key that is met.

    Raises:
        ConfigError: an old key and its new name are both there.
    """
    renamed: dict[str, Any] = {}
    for key, value in tree.items():
        new = RENAMED.get((section, key), key)
        if new != key and new in tree:
            rule = f"is the old name of {section}.{new}, which is given too"
            raise ConfigError(f"{section}.{key}", value, rule, "give the new name alone")
        if new != key and warn:
            logger.warning("%s.%s is now called %s; the old name is read until version 0.5", section, key, new)
        renamed[new] = with_new_keys(value, key, warn=warn) if isinstance(value, Mapping) else value
    return renamed
