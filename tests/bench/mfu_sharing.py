"""Ranks of `bench.mfu` that share one GPU, which NCCL takes for ranks of several hosts."""

from __future__ import annotations

import os
from unittest import mock

from bench.mfu.ranks import Order, run_rank
from collectives.transport.nodes import virtual_node_environ
from netlayer.launch.rank import RankContext


def run_sharing_rank(context: RankContext, order: Order, init_method: str) -> None:
    """As `run_rank`, on the first GPU whatever the rank."""
    os.environ.update(virtual_node_environ(context.env.rank))
    with mock.patch("trainer.worker.has_own_gpu", return_value=True):
        run_rank(context, order, init_method, "nccl")
