"""What ranks of tests of `bench.mfu` run: fresh interpreters can import this module."""

from __future__ import annotations

import torch.distributed as dist

from bench.mfu.systems import Ours
from netlayer.config.tree import JobConfig
from netlayer.launch.launcher import RankContext
from trainer.worker import init_process_groups


def count_groups(context: RankContext, job: JobConfig, init_method: str) -> list[int]:
    """Build our system and close it, twice; return how many process groups there are: before, within, after, ..."""
    place, groups = init_process_groups(context, job, init_method, "gloo")
    counts = []
    for _ in range(2):
        counts.append(len(dist.distributed_c10d._world.pg_map))
        system = Ours(job, 0, place.rank, place.device, groups)
        counts.append(len(dist.distributed_c10d._world.pg_map))
        system.close()
    counts.append(len(dist.distributed_c10d._world.pg_map))
    dist.destroy_process_group()
    return counts
