"""NCCL's environment for a job: its variables by release, what a job sets of them, and what an ACK timeout outlives."""

from __future__ import annotations

from typing import TYPE_CHECKING

from netlayer import lazy_names

if TYPE_CHECKING:
    from netlayer.nccl.ack_timeout import MARGIN as MARGIN
    from netlayer.nccl.ack_timeout import MOST_RETRY_CNT as MOST_RETRY_CNT
    from netlayer.nccl.ack_timeout import MOST_TIMEOUT as MOST_TIMEOUT
    from netlayer.nccl.ack_timeout import least_timeout as least_timeout
    from netlayer.nccl.ack_timeout import nominal_s as nominal_s
    from netlayer.nccl.environment import NEWEST as NEWEST
    from netlayer.nccl.environment import PREFIX as PREFIX
    from netlayer.nccl.environment import Action as Action
    from netlayer.nccl.environment import Choice as Choice
    from netlayer.nccl.environment import apply_to as apply_to
    from netlayer.nccl.environment import as_record as as_record
    from netlayer.nccl.environment import choose as choose
    from netlayer.nccl.environment import describe as describe
    from netlayer.nccl.environment import exported as exported
    from netlayer.nccl.environment import exports as exports
    from netlayer.nccl.environment import for_ranks as for_ranks
    from netlayer.nccl.environment import installed_nccl as installed_nccl
    from netlayer.nccl.environment import nccl_conf_files as nccl_conf_files
    from netlayer.nccl.environment import parse_release as parse_release
    from netlayer.nccl.variables import KNOWN as KNOWN
    from netlayer.nccl.variables import VARIABLES as VARIABLES
    from netlayer.nccl.variables import Release as Release
    from netlayer.nccl.variables import Variable as Variable
    from netlayer.nccl.variables import preset_of as preset_of
    from netlayer.nccl.variables import read_release as read_release

__all__ = [
    "KNOWN",
    "MARGIN",
    "MOST_RETRY_CNT",
    "MOST_TIMEOUT",
    "NEWEST",
    "PREFIX",
    "VARIABLES",
    "Action",
    "Choice",
    "Release",
    "Variable",
    "apply_to",
    "as_record",
    "choose",
    "describe",
    "exported",
    "exports",
    "for_ranks",
    "installed_nccl",
    "least_timeout",
    "nccl_conf_files",
    "nominal_s",
    "parse_release",
    "preset_of",
    "read_release",
]

__getattr__ = lazy_names(
    __name__,
    {
        "KNOWN": ".variables",
        "MARGIN": ".ack_timeout",
        "MOST_RETRY_CNT": ".ack_timeout",
        "MOST_TIMEOUT": ".ack_timeout",
        "NEWEST": ".environment",
        "PREFIX": ".environment",
        "VARIABLES": ".variables",
        "Action": ".environment",
        "Choice": ".environment",
        "Release": ".variables",
        "Variable": ".variables",
        "apply_to": ".environment",
        "as_record": ".environment",
        "choose": ".environment",
        "describe": ".environment",
        "exported": ".environment",
        "exports": ".environment",
        "for_ranks": ".environment",
        "installed_nccl": ".environment",
        "least_timeout": ".ack_timeout",
        "nccl_conf_files": ".environment",
        "nominal_s": ".ack_timeout",
        "parse_release": ".environment",
        "preset_of": ".variables",
        "read_release": ".variables",
    },
)
