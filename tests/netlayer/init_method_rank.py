"""A rank of plain torch.distributed that meets the others by `init_method`, twice: METHOD ARGUMENTS (JSON)."""

from __future__ import annotations

import datetime
import json
import sys
import warnings

import torch
import torch.distributed as dist

import netlayer.init_method  # noqa: F401  registers the scheme


def main(method: str, arguments: dict[str, int]) -> None:
    """Print what rank and size it has, and what it got of the others."""
    warnings.simplefilter("error")
    for _ in range(2):  # a process may open and close its groups again under the same run
        dist.init_process_group("gloo", init_method=method, timeout=datetime.timedelta(seconds=120), **arguments)
        rank, size = dist.get_rank(), dist.get_world_size()
        tensor = torch.full((3,), float(rank + 1))
        dist.all_reduce(tensor)
        group = dist.new_group([0, 1])
        dist.barrier(group)
        objects: list[object] = [None] * size
        dist.all_gather_object(objects, f"from {rank}", group)
        dist.destroy_process_group()
    sys.stdout.write(f"rank {rank} of {size}: {tensor.tolist()} {objects}\n")  # at once: the ranks share the pipe


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
