"""Ranks as processes that may die, stop or hang: started quickly, and all gone afterwards.

Where one does, the failure shows what each of them wrote, and where the ones that were left stood.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Collection, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from netlayer.store.meeting import register_schemes

_CONTEXT = multiprocessing.get_context("forkserver")
# Imported once: torch, what its optimisers import when the first one is made, and what ranks meet with.
_CONTEXT.set_forkserver_preload(
    ["tests.collectives.scenes", "torch._dynamo", "netlayer.init_method", "netlayer.store.redis_store"]
)

_GRACE_S = 5.0  # for the other ranks, once one has failed: they may wait for it for ever
_DUMP_S = 1.0
_SHOWN_BYTES = 12_000  # of each rank's log


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

    A rank that has returned is still there, with its threads and connections, until all have. Where one fails, the
    others have a few seconds to say what they know, and an AssertionError shows the end of what each rank wrote.

    Args:
        target: importable by name, as are the arguments.
        world_size: number of processes.
        args: further arguments.
        mute: ranks that need not return.
        limit_s: longest wait for results.
    """
    processes: list[BaseProcess] = []
    pipes: dict[Connection, int] = {}
    with tempfile.TemporaryDirectory() as folder:
        logs = [Path(folder, f"rank{rank}.log") for rank in range(world_size)]
        try:
            for rank in range(world_size):
                here, there = _CONTEXT.Pipe(duplex=False)
                given = (target, rank, world_size, args, limit_s, there, str(logs[rank]))
                process = _CONTEXT.Process(target=_be, args=given)
                process.start()
                processes.append(process)
                there.close()
                pipes[here] = rank
            results = _listen({pipe: rank for pipe, rank in pipes.items() if rank not in mute}, limit_s)
            if any(isinstance(result, Trouble) for result in results.values()):
                _dump_stacks(processes)
        finally:
            for process in processes:
                process.kill()  # one of them may be stopped
                process.join()
        troubles = [f"rank {rank}: {result}" for rank, result in results.items() if isinstance(result, Trouble)]
        written = [f"---- the end of what rank {rank} wrote\n{_tail(log)}" for rank, log in enumerate(logs)]
        assert not troubles, "\n".join(troubles + written)
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
            if isinstance(results[rank], Trouble):
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    return results | {rank: Trouble("it has not returned") for rank in open_pipes.values()}


def _dump_stacks(processes: Sequence[BaseProcess]) -> None:
    """Every rank that still runs writes where its threads are; faulthandler does that inside a collective too."""
    for process in processes:
        if process.is_alive() and process.pid is not None:
            os.kill(process.pid, signal.SIGUSR1)
    time.sleep(_DUMP_S)


def _tail(log: Path) -> str:
    return log.read_bytes()[-_SHOWN_BYTES:].decode(errors="replace") if log.exists() else ""


def _be(
    target: Callable[..., Any],
    rank: int,
    world_size: int,
    args: Sequence[object],
    limit_s: float,
    pipe: Connection,
    log: str,
) -> None:
    _write_to(log)
    torch.set_num_threads(1)
    try:
        result = target(rank, world_size, *args)
    except Exception:  # noqa: BLE001 - the parent shows it
        result = Trouble(traceback.format_exc())
    pipe.send(result)
    time.sleep(limit_s)  # others may still need its connections; the parent ends it
    os._exit(0)


def _write_to(log: str) -> None:
    """What Python and C write from now on, and where the threads are when it is asked for or when this process dies."""
    file = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for output in (1, 2):
        os.dup2(file, output)
    os.close(file)
    sys.stdout.reconfigure(line_buffering=True)  # type: ignore[union-attr]
    faulthandler.enable(file=2)
    faulthandler.register(signal.SIGUSR1, file=2)
