"""A small job on the small cluster of `fabrics`: 128 servers of one GPU, 4 stages of 32."""

from typing import Any

from netlayer.config.tree import BatchConfig, Config, JobConfig, ModelConfig, ParallelConfig
from tests.topology.fabrics import cluster


def small(**changes: Any) -> Config:
    """Four pipeline stages; `changes` are those of the cluster."""
    fabric = cluster(**changes)
    job = JobConfig(
        model=ModelConfig(layers=8, hidden=512, heads=4, ffn_hidden=2048),
        parallel=ParallelConfig(pp=4, dp=fabric.num_gpus // 4, vpp=2),
        batch=BatchConfig(global_batch_size=4 * fabric.num_gpus, micro_batch_size=1),
    )
    return Config(cluster=fabric, job=job)
