"""Collectives that overlap computation: sharded data parallel and the recorder of what it costs.

Names load on first use, so that importing the package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collectives.prepare import execution_order as execution_order
    from collectives.recorder import Collective as Collective
    from collectives.recorder import Recorder as Recorder
    from collectives.recorder import StepComm as StepComm
    from collectives.sharded import ShardedDataParallel as ShardedDataParallel

_HOME = {
    "Collective": "recorder",
    "Recorder": "recorder",
    "ShardedDataParallel": "sharded",
    "StepComm": "recorder",
    "execution_order": "prepare",
}

__all__ = ["Collective", "Recorder", "ShardedDataParallel", "StepComm", "execution_order"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"collectives.{_HOME[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
