"""Collectives that overlap computation: sharded data parallel, pipeline channels, tensor-parallel linears.

Beside them: small messages by peer memory, health functions, the watch that names who is late, and the recorder of what
it all costs. Names load on first use, so that importing the package does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from netlayer import lazy_names

if TYPE_CHECKING:
    from collectives.health.checks import HealthRow as HealthRow
    from collectives.pipeline.channel import PipelineChannel as PipelineChannel
    from collectives.pipeline.links import PipelineLinks as PipelineLinks
    from collectives.pipeline.links import open_link_groups as open_link_groups
    from collectives.sharded.data_parallel import ShardedDataParallel as ShardedDataParallel
    from collectives.sharded.policies import MixedPrecision as MixedPrecision
    from collectives.sharded.policies import Overlap as Overlap
    from collectives.sharded.policies import Reshard as Reshard
    from collectives.sharded.prepare import execution_order as execution_order
    from collectives.small.messages import SmallCollectives as SmallCollectives
    from collectives.small.table import TuningTable as TuningTable
    from collectives.small.tuner import tune as tune
    from collectives.tensor.exchange import TensorExchange as TensorExchange
    from collectives.tensor.exchange import open_exchange as open_exchange
    from collectives.tensor.linear import ColumnParallelLinear as ColumnParallelLinear
    from collectives.tensor.linear import RowParallelLinear as RowParallelLinear
    from collectives.transport.nodes import virtual_node_environ as virtual_node_environ
    from collectives.watch.recorder import Collective as Collective
    from collectives.watch.recorder import Recorder as Recorder
    from collectives.watch.recorder import Span as Span
    from collectives.watch.recorder import StepComm as StepComm
    from collectives.watch.trace import align_clocks as align_clocks
    from collectives.watch.trace import chrome_trace as chrome_trace
    from collectives.watch.trace import record_trace as record_trace
    from collectives.watch.trace import write_trace as write_trace
    from collectives.watch.watchdog import Watch as Watch
    from netlayer.workload.messages import Message as Message
    from netlayer.workload.messages import Traffic as Traffic

__all__ = [
    "Collective",
    "ColumnParallelLinear",
    "HealthRow",
    "Message",
    "MixedPrecision",
    "Overlap",
    "PipelineChannel",
    "PipelineLinks",
    "Recorder",
    "Reshard",
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

__getattr__ = lazy_names(
    __name__,
    {
        "Collective": ".watch.recorder",
        "ColumnParallelLinear": ".tensor.linear",
        "HealthRow": ".health.checks",
        "Message": "netlayer.workload.messages",
        "MixedPrecision": ".sharded.policies",
        "Overlap": ".sharded.policies",
        "PipelineChannel": ".pipeline.channel",
        "PipelineLinks": ".pipeline.links",
        "Recorder": ".watch.recorder",
        "Reshard": ".sharded.policies",
        "RowParallelLinear": ".tensor.linear",
        "ShardedDataParallel": ".sharded.data_parallel",
        "SmallCollectives": ".small.messages",
        "Span": ".watch.recorder",
        "StepComm": ".watch.recorder",
        "TensorExchange": ".tensor.exchange",
        "Traffic": "netlayer.workload.messages",
        "TuningTable": ".small.table",
        "Watch": ".watch.watchdog",
        "align_clocks": ".watch.trace",
        "chrome_trace": ".watch.trace",
        "execution_order": ".sharded.prepare",
        "open_exchange": ".tensor.exchange",
        "open_link_groups": ".pipeline.links",
        "record_trace": ".watch.trace",
        "tune": ".small.tuner",
        "virtual_node_environ": ".transport.nodes",
        "write_trace": ".watch.trace",
        # Whole modules, which are used by these names.
        "health": ".health:",
        "recorder": ".watch.recorder:",
    },
)
