"""The run on a GPU: one kernel that stays for all windows, a warp a switch, a thread a host, a barrier a window.

Needs numba-cuda (the extra `gpu`), which is loaded here and nowhere else. The grid is as large as can be resident at
once, so that its blocks can wait for each other; who comes last to the barrier decides on the next window for all.
Floats are compiled without fused multiply-add, so that laws round as on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
from numba import cuda as _untyped
from numba.cuda import dispatcher as _dispatcher
from numba.cuda.cudadrv import nvvm

from congestion.engine.gpu import atomics, host, in_order, switch
from congestion.engine.gpu.graft import graft
from congestion.engine.gpu.tables import (
    ARRIVED,
    BEGIN,
    BROKEN,
    DONE,
    ERROR,
    GENERATION,
    GIVEN,
    GO,
    NEXT,
    SHORT,
    TAKEN,
    WINDOWS,
)
from congestion.engine.gpu.window import first_tx, is_due
from congestion.engine.tables import NEVER

cuda: Any = _untyped
cast(
    Any, _dispatcher
).config.CUDA_LOW_OCCUPANCY_WARNINGS = 0  # a small fabric has few blocks: no mistake that a user could fix
_LANES = 32
_ALL = 0xFFFFFFFF  # lanes


@contextmanager
def rounding_as_on_the_cpu() -> Iterator[None]:
    """Kernels that are compiled meanwhile round after every multiplication; numba-cuda has no option for that."""
    fused: Callable[..., bytes] = nvvm.compile_ir
    nvvm.compile_ir = lambda code, **options: fused(code, **{**options, "fma": False})
    try:
        yield
    finally:
        nvvm.compile_ir = fused


@cuda.jit(device=True)
def _add(array, index, value):  # type: ignore[no-untyped-def]
    return cuda.atomic.add(array, index, value)


@cuda.jit(device=True)
def _least(array, index, value):  # type: ignore[no-untyped-def]
    return cuda.atomic.min(array, index, value)


_done: dict[Any, Any] = {}


def _on_gpu(function: Any) -> Any:
    return graft(function, {atomics.add: _add, atomics.least: _least}, _done)


_clear, _take, _look = _on_gpu(switch.clear), _on_gpu(switch.take), _on_gpu(switch.look)
_deal, _run_ports, _settle = _on_gpu(switch.deal), _on_gpu(switch.run_ports), _on_gpu(switch.settle)
_rank, _run_in_order, _tell = _on_gpu(in_order.rank), _on_gpu(in_order.run_in_order), _on_gpu(in_order.tell)
_run_host = _on_gpu(host.run_host)


@cuda.jit(device=True)
def _sum_of_all(value):  # type: ignore[no-untyped-def]
    for apart in (16, 8, 4, 2, 1):
        value += cuda.shfl_xor_sync(_ALL, value, apart)
    return value


@cuda.jit(device=True)
def _least_of_all(value):  # type: ignore[no-untyped-def]
    for apart in (16, 8, 4, 2, 1):
        value = min(value, cuda.shfl_xor_sync(_ALL, value, apart))
    return value


@cuda.jit(device=True)
def _run_switch(s, warp, room, base, n, lane, end, parity):  # type: ignore[no-untyped-def]
    """Run a switch's window by a warp; return the soonest event that this lane knows of."""
    _clear(s, room, base, n, lane, _LANES)
    cuda.syncwarp()
    num_bytes, frames, following = _take(s, room, base, n, lane, _LANES, end)
    num_bytes, frames = _sum_of_all(num_bytes), _sum_of_all(frames)
    cuda.syncwarp()
    near = _look(s, room, base, n, lane, _LANES, num_bytes, frames)
    near = cuda.any_sync(_ALL, near)
    cuda.syncwarp()
    if near:
        _rank(s, room, base, n, lane, _LANES)
        cuda.syncwarp()
        if lane == 0:
            _run_in_order(s, warp, room, base, n, end)
        cuda.syncwarp()
        soonest, sent = _tell(s, n, lane, _LANES, parity)
    else:
        _deal(s, room, base, n, lane, _LANES)
        cuda.syncwarp()
        soonest, sent = _run_ports(s, room, base, n, lane, _LANES, end, parity)
        cuda.syncwarp()
        shared = _sum_of_all(_settle(s, room, base, n, lane, _LANES))
        if lane == 0:
            s.node[n].shared = shared
    soonest = _least_of_all(min(soonest, following))
    if lane == 0:
        s.next_time[n] = soonest
    cuda.syncwarp()
    return min(soonest, sent)


@cuda.jit(device=True)
def _decide(s, until, reserve):  # type: ignore[no-untyped-def]
    """Decide by one thread, while all others wait: the next window's begin, or why there is none."""
    clock = s.clock
    begin = cuda.atomic.exch(clock, NEXT, NEVER)
    clock[BEGIN] = begin
    go = begin
    if cuda.atomic.add(clock, ERROR, 0):
        go = BROKEN
    elif begin == NEVER or begin >= until:
        go = DONE
    elif cuda.atomic.add(clock, GIVEN, 0) - cuda.atomic.add(clock, TAKEN, 0) < reserve:
        go = SHORT
    else:
        s.run[0].time = begin + s.run[0].window
        clock[WINDOWS] += 1
    cuda.atomic.exch(clock, GO, go)


@cuda.jit(device=True)
def _meet(s, meeting, soonest, until, reserve):  # type: ignore[no-untyped-def]
    """Wait for all threads; the next window's begin, which is the soonest that any of them knows of."""
    soonest = _least_of_all(soonest)
    if cuda.threadIdx.x % _LANES == 0:
        cuda.atomic.min(meeting, 0, soonest)
    cuda.syncthreads()
    if cuda.threadIdx.x == 0:
        clock = s.clock
        generation = cuda.atomic.add(clock, GENERATION, 0)
        cuda.atomic.min(clock, NEXT, meeting[0])
        meeting[0] = NEVER
        cuda.threadfence()
        if cuda.atomic.add(clock, ARRIVED, 1) == cuda.gridDim.x - 1:
            cuda.threadfence()
            _decide(s, until, reserve)
            cuda.atomic.exch(clock, ARRIVED, 0)
            cuda.threadfence()
            cuda.atomic.add(clock, GENERATION, 1)
        else:
            while cuda.atomic.add(clock, GENERATION, 0) == generation:
                pass
        cuda.threadfence()
        meeting[1] = cuda.atomic.add(clock, GO, 0)
    cuda.syncthreads()
    return meeting[1]


@cuda.jit(device=True)
def _run_switches(s, me, num_warps, room, base, lane, end, parity):  # type: ignore[no-untyped-def]
    """Warp `me`'s switches in a window; the soonest that this lane knows of."""
    soonest = NEVER
    for i in range(me, len(s.switches), num_warps):
        n = s.switches[i]
        next_tx = False
        if lane == 0:
            next_tx = is_due(s, n, parity, end)
            if not next_tx:
                soonest = min(soonest, s.next_time[n])
        if cuda.shfl_sync(_ALL, np.int32(next_tx), 0):
            soonest = min(soonest, _run_switch(s, me, room, base, n, lane, end, parity))
    return soonest


@cuda.jit(device=True)
def _run_hosts(s, first, num_threads, end, parity):  # type: ignore[no-untyped-def]
    soonest = NEVER
    for i in range(first, len(s.hosts), num_threads):
        n = s.hosts[i]
        if is_due(s, n, parity, end):
            soonest = min(soonest, _run_host(s, n, end, parity))
        else:
            soonest = min(soonest, s.next_time[n])
    return soonest


def _run_windows(s, until, reserve, room_size):  # type: ignore[no-untyped-def]
    """Window after window, until one would begin at `until` or later, or lacks free chunks; clock[GO] says which."""
    room, meeting = cuda.shared.array(0, np.int32), cuda.shared.array(2, np.int64)
    lane, warp = cuda.threadIdx.x % _LANES, cuda.threadIdx.x // _LANES
    me = warp * cuda.gridDim.x + cuda.blockIdx.x  # neighbours work on different multiprocessors
    num_warps = cuda.blockDim.x // _LANES * cuda.gridDim.x
    # Warps without a switch run the hosts, beside the switches; thinly, one lane of each first: lanes of a warp that do
    # different things take turns. All of them do where most have a switch.
    for_hosts = num_warps - len(s.switches)
    if for_hosts < num_warps // 4:
        for_hosts = num_warps
    from_behind = num_warps - 1 - me
    hosts_from = lane * for_hosts + from_behind if from_behind < for_hosts else len(s.hosts)
    window, parity, soonest = s.run[0].window, 0, NEVER
    if cuda.threadIdx.x == 0:
        meeting[0] = NEVER
    cuda.syncthreads()
    for n in range(cuda.grid(1), len(s.node), cuda.gridsize(1)):
        soonest = min(soonest, first_tx(s, n))
    while True:
        begin = _meet(s, meeting, soonest, until, reserve)
        if begin < 0:
            break
        end = begin + window
        soonest = _run_switches(s, me, num_warps, room, warp * room_size, lane, end, parity)
        soonest = min(soonest, _run_hosts(s, hosts_from, _LANES * for_hosts, end, parity))
        parity = 1 - parity


# 128 registers, so that 16 warps a multiprocessor fit. Without LTO, whose linker would fuse multiply-add. Not as a
# decorator with options: numba-cuda 0.30 loses `lto` on that way.
run_windows = cuda.jit(_run_windows, max_registers=128, lto=False)
