"""A rank of a gloo job of two that hangs at one collective, and writes its Flight Recorder dumps: RANK FOLDER."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _dump_fr_trace, _dump_fr_trace_json


def main(rank: int, folder: Path) -> None:
    """Rank 0 launches a collective of group `dp` that rank 1 never comes to."""
    store = dist.FileStore(f"{folder}/store", 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    tensor, group = torch.ones(4), dist.new_group([0, 1], group_desc="dp")
    dist.all_reduce(tensor)
    if rank == 0:
        dist.send(tensor, 1)
    else:
        dist.recv(tensor, 0)
    dist.all_reduce(tensor)
    dist.broadcast(tensor, 0, group=group)
    if rank == 0:
        dist.all_reduce(tensor, group=group, async_op=True)
        time.sleep(1)  # until it is in the record
    (folder / f"trace_{rank}").write_bytes(_dump_fr_trace())
    (folder / f"json_{rank}").write_bytes(_dump_fr_trace_json())
    store.set(f"written {rank}", "")
    store.wait(["written 0", "written 1"])
    time.sleep(0.2)
    os._exit(0)  # without its collective


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
