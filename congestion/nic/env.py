"""Old name of `netlayer.nccl.environment`, which 0.2 and 0.3 keep; it goes with 0.4."""

from __future__ import annotations

import warnings

from congestion.nic.profile.file import fill_nccl as filled_from
from netlayer.nccl.environment import (
    NEWEST,
    PREFIX,
    Action,
    Choice,
    apply_to,
    as_record,
    choose,
    describe,
    exported,
    exports,
    for_ranks,
    installed_nccl,
    nccl_conf_files,
    parse_release,
)

__all__ = [
    "NEWEST",
    "PREFIX",
    "Action",
    "Choice",
    "apply_to",
    "as_record",
    "choose",
    "describe",
    "exported",
    "exports",
    "filled_from",
    "for_ranks",
    "installed_nccl",
    "nccl_conf_files",
    "parse_release",
]

warnings.warn(
    "congestion.nic.env is now netlayer.nccl.environment (filled_from: congestion.nic.profile.file.fill_nccl)",
    DeprecationWarning,
    stacklevel=2,
)
