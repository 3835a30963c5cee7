"""What the test's own ranks run: fresh interpreters can import this module."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from bench.backends import DTYPES, OPS, Backend, Call, GlooBackend, meet
from bench.perf.driver import Buffers, Plan, load_collective, run_first_rank
from netlayer.launch.launcher import RankContext

COUNT = 21  # elements of a part: no power of two


def corrupt(context: RankContext, plan: Plan) -> None:
    """Measure with an all-reduce that spoils the third element on rank 1, and an all-gather that does nothing."""
    all_reduce = GlooBackend.all_reduce

    def damaged(self: GlooBackend, recv: Tensor, send: Tensor, op: str) -> None:
        all_reduce(self, recv, send, op)
        if self.rank == 1 and recv.numel() > 2:
            recv[2] += 1

    GlooBackend.all_reduce = damaged  # type: ignore[method-assign]
    GlooBackend.all_gather = lambda _self, _recv, _send: None  # type: ignore[method-assign]
    run_first_rank(context, plan)


def corrupt_parts(context: RankContext, plan: Plan) -> None:
    """Measure with an alltoallv that spoils its last element on rank 0, and exchanges that rank 1 does not take in."""
    alltoallv, exchange = GlooBackend.alltoallv, GlooBackend.exchange

    def damaged(self: GlooBackend, recv: Tensor, *given: Any) -> None:
        alltoallv(self, recv, *given)
        if self.rank == 0:
            recv[-1] += 1

    def deaf(self: GlooBackend, recv: Tensor, *given: Any) -> None:
        exchange(self, torch.empty_like(recv) if self.rank == 1 else recv, *given)

    GlooBackend.alltoallv = damaged  # type: ignore[method-assign]
    GlooBackend.exchange = deaf  # type: ignore[method-assign]
    run_first_rank(context, plan)


def hang(context: RankContext, plan: Plan) -> None:
    """Measure with a rank 1 that never enters the collective."""
    if context.env.rank == 1:
        GlooBackend.all_reduce = lambda *_: time.sleep(600)  # type: ignore[method-assign]
    run_first_rank(context, plan)


def compare_with_reference(context: RankContext, url: str) -> tuple[list[str], set[str]]:
    """Every collective, type, operator and kind of buffer against its definition: what differs, and what is loaded."""
    wrong: list[str] = []
    with meet(context.env, url, None):
        backend = GlooBackend(context.env, None)
        buffers = Buffers(backend, 4096, unalign=1)
        for name, reference in _REFERENCES.items():
            collective = load_collective(name)
            if name == "hypercube" and backend.ranks & (backend.ranks - 1):
                continue
            for dtype in GlooBackend.dtypes:
                for op in OPS if collective.reduces else ["none"]:
                    if collective.reduces and backend.refusal(dtype, op):
                        continue
                    for in_place in (False, True) if collective.checks_in_place else (False,):
                        root = backend.ranks - 1
                        call = buffers.calls(collective, COUNT, (dtype, op, root), in_place, 2)[-1]
                        inputs = [_input(rank, call.send.numel(), DTYPES[dtype]) for rank in range(backend.ranks)]
                        call.send.copy_(inputs[backend.rank])
                        collective.launch(backend, call)
                        wanted = reference(backend, call, inputs)
                        if wanted is not None and not torch.equal(call.recv, wanted.to(DTYPES[dtype])):
                            wrong.append(f"{name} {dtype} {op} in_place={in_place}")
    return wrong, set(sys.modules)


def _input(rank: int, length: int, dtype: torch.dtype) -> Tensor:
    return ((torch.arange(length) * (rank + 3) + rank) % 5 + 1).to(dtype)


def _reduce(op: str, inputs: list[Tensor]) -> Tensor:
    stacked = torch.stack(inputs).double()
    return {
        "sum": stacked.sum(0),
        "prod": stacked.prod(0),
        "max": stacked.amax(0),
        "min": stacked.amin(0),
        "avg": stacked.mean(0),
    }[op]


def _by_distance(backend: Backend, call: Call, inputs: list[Tensor]) -> Tensor:
    """What alltoallv brings: from each rank the stretch behind those for the ranks before this one."""
    counts = [_distance_counts(rank, backend.ranks, call) for rank in range(backend.ranks)]
    return torch.cat(
        [sent[sum(row[: backend.rank]) :][: row[backend.rank]] for sent, row in zip(inputs, counts, strict=True)]
    )


def _distance_counts(rank: int, ranks: int, call: Call) -> list[int]:
    total, whole = COUNT * ranks * call.send.itemsize, sum(range(ranks))
    return [int((to - rank) % ranks * total / whole) // 16 * 16 // call.send.itemsize for to in range(ranks)]


def _own(backend: Backend, whole: Tensor) -> Tensor:
    return whole[backend.rank * COUNT :][:COUNT]


_REFERENCES: dict[str, Callable[[Backend, Call, list[Tensor]], Any]] = {
    "all_reduce": lambda _, call, inputs: _reduce(call.op, inputs),
    "all_gather": lambda _, call, inputs: torch.cat(inputs),
    "reduce_scatter": lambda backend, call, inputs: _own(backend, _reduce(call.op, inputs)),
    "sendrecv": lambda backend, call, inputs: inputs[backend.rank - 1],
    "alltoall": lambda backend, call, inputs: torch.cat([_own(backend, sent) for sent in inputs]),
    "alltoallv": _by_distance,
    "hypercube": lambda _, call, inputs: torch.cat(inputs),
    "broadcast": lambda _, call, inputs: inputs[call.root],
    "reduce": lambda backend, call, inputs: _reduce(call.op, inputs) if backend.rank == call.root else None,
    "gather": lambda backend, call, inputs: torch.cat(inputs) if backend.rank == call.root else None,
    "scatter": lambda backend, call, inputs: _own(backend, inputs[call.root]),
}
