"""Ranks as processes that may die or stop: started quickly, and all gone afterwards."""

from __future__ import annotations

import multiprocessing
import os
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist

from netlayer.meeting import register_schemes

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(["tests.collectives.scenes"])  # torch is imported once


class Trouble(str):
    """What a rank says in place of a result: the traceback of what it raised."""


def run_ranks(
    target: Callable[..., Any],
    world_size: int,
    args: Sequence[object],
    *,
    mute: Collection[int] = (),
    limit_s: float = 60.0,
) -> list[Any]:
    """What `target(rank, world_size, *args)` returned on each rank; None for ranks that are `mute`.

    A rank that has returned is still there, with its threads and connections, until all have.

    Args:
        target: importable by name, as are the arguments.
        world_size: number of processes.
        args: further arguments.
        mute: ranks that need not return.
        limit_s: longest wait for results.
    """
    processes, pipes = [], {}
    for rank in range(world_size):
        here, there = _CONTEXT.Pipe(duplex=False)
        processes.append(_CONTEXT.Process(target=_be, args=(target, rank, world_size, args, limit_s, there)))
        processes[-1].start()
        there.close()
        pipes[here] = rank
    try:
        results = _listen({pipe: rank for pipe, rank in pipes.items() if rank not in mute}, limit_s)
    finally:
        for process in processes:
            process.kill()  # one of them may be stopped
            process.join()
    troubles = [f"rank {rank}: {result}" for rank, result in results.items() if isinstance(result, Trouble)]
    assert not troubles, "\n".join(troubles)
    return [results.get(rank) for rank in range(world_size)]


def on_gloo(rank: int, world_size: int, init_method: str, play: Callable[..., Any], *args: object) -> Any:
    """A target: `play(rank, *args)` inside a world of gloo ranks."""
    register_schemes(init_method)
    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    return play(rank, *args)


def _listen(open_pipes: dict[Connection, int], limit_s: float) -> dict[int, Any]:
    results: dict[int, Any] = {}
    deadline = time.monotonic() + limit_s
    while open_pipes and time.monotonic() < deadline:
        for pipe in wait(list(open_pipes), timeout=1.0):
            rank = open_pipes.pop(pipe)  # type: ignore[arg-type]
            try:
                results[rank] = pipe.recv()  # type: ignore[union-attr]
            except EOFError:
                results[rank] = Trouble("it ended without a result")
    return results | {rank: Trouble("it has not returned") for rank in open_pipes.values()}


def _be(
    target: Callable[..., Any], rank: int, world_size: int, args: Sequence[object], limit_s: float, pipe: Connection
) -> None:
    torch.set_num_threads(1)
    try:
        result = target(rank, world_size, *args)
    except Exception:  # noqa: BLE001 - the parent shows it
        result = Trouble(traceback.format_exc())
    pipe.send(result)
    time.sleep(limit_s)  # others may still need its connections; the parent ends it
    os._exit(0)
