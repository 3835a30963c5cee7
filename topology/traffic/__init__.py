"""Flows of a training job, or of a user's file."""

from __future__ import annotations

from typing import TYPE_CHECKING

from netlayer import lazy_names

if TYPE_CHECKING:
    from topology.traffic.job import Flows as Flows
    from topology.traffic.job import Kind as Kind
    from topology.traffic.job import headers as headers
    from topology.traffic.job import job_flows as job_flows
    from topology.traffic.step import run_step as run_step
    from topology.traffic.step import slot_flows as slot_flows

__all__ = [
    "Flows",
    "Kind",
    "headers",
    "job_flows",
    "run_step",
    "slot_flows",
]

__getattr__ = lazy_names(
    __name__,
    {
        "Flows": ".job",
        "Kind": ".job",
        "headers": ".job",
        "job_flows": ".job",
        "run_step": ".step",
        "slot_flows": ".step",
    },
)
