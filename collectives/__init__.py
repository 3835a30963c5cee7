"""Collectives that overlap computation: sharded data parallel, pipeline channels, tensor-parallel linears.

Beside them: small messages by peer memory, health functions, the watch that names who is late, and the recorder of what
it all costs. Names load on first use, so that importing the package does not import torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collectives.exchange import TensorExchange as TensorExchange
    from collectives.exchange import open_exchange as open_exchange
    from collectives.health import HealthRow as HealthRow
    from collectives.nodes import virtual_node_environ as virtual_node_environ
    from collectives.pipeline import PipelineChannel as PipelineChannel
    from collectives.pipeline_links import PipelineLinks as PipelineLinks
    from collectives.pipeline_links import open_link_groups as open_link_groups
    from collectives.prepare import execution_order as execution_order
    from collectives.recorder import Collective as Collective
    from collectives.recorder import Recorder as Recorder
    from collectives.recorder import Span as Span
    from collectives.recorder import StepComm as StepComm
    from collectives.sharded import ShardedDataParallel as ShardedDataParallel
    from collectives.small import SmallCollectives as SmallCollectives
    from collectives.small_tune import tune as tune
    from collectives.tensor import ColumnParallelLinear as ColumnParallelLinear
    from collectives.tensor import RowParallelLinear as RowParallelLinear
    from collectives.trace import align_clocks as align_clocks
    from collectives.trace import chrome_trace as chrome_trace
    from collectives.trace import record_trace as record_trace
    from collectives.trace import write_trace as write_trace
    from collectives.tuning import TuningTable as TuningTable
    from collectives.watch import Watch as Watch
    from netlayer.workload.messages import Message as Message
    from netlayer.workload.messages import Traffic as Traffic

_HOME = {
    "Collective": "recorder",
    "ColumnParallelLinear": "tensor",
    "HealthRow": "health",
    "Message": "netlayer.workload.messages",
    "PipelineChannel": "pipeline",
    "PipelineLinks": "pipeline_links",
    "Recorder": "recorder",
    "RowParallelLinear": "tensor",
    "ShardedDataParallel": "sharded",
    "SmallCollectives": "small",
    "Span": "recorder",
    "StepComm": "recorder",
    "TensorExchange": "exchange",
    "Traffic": "netlayer.workload.messages",
    "TuningTable": "tuning",
    "Watch": "watch",
    "align_clocks": "trace",
    "chrome_trace": "trace",
    "execution_order": "prepare",
    "open_exchange": "exchange",
    "open_link_groups": "pipeline_links",
    "record_trace": "trace",
    "tune": "small_tune",
    "virtual_node_environ": "nodes",
    "write_trace": "trace",
}

__all__ = [
    "Collective",
    "ColumnParallelLinear",
    "HealthRow",
    "Message",
    "PipelineChannel",
    "PipelineLinks",
    "Recorder",
    "RowParallelLinear",
    "ShardedDataParallel",
    "SmallCollectives",
    "Span",
    "StepComm",
    "TensorExchange",
    "Traffic",
    "TuningTable",
    "Watch",
    "align_clocks",
    "chrome_trace",
    "execution_order",
    "open_exchange",
    "open_link_groups",
    "record_trace",
    "tune",
    "virtual_node_environ",
    "write_trace",
]


def __getattr__(name: str) -> Any:
    if name in ("health", "recorder"):  # whole modules, which are used by their names
        return importlib.import_module(f"collectives.{name}")
    if name in _HOME:
        home = _HOME[name] if "." in _HOME[name] else f"collectives.{_HOME[name]}"
        return getattr(importlib.import_module(home), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
