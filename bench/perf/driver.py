"""The one driver behind every `*_perf`: what each rank does, size by size, and the rows that come out.

Each size is timed out of place and in place, and its row is reported once its data was checked (nccl-tests,
src/common.cu). Not covered: how a time is taken (`timing`), who starts the ranks (`measure`), what a number should be.
"""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import Any, NamedTuple

import torch

from bench.backends import BACKENDS, DTYPES, Backend, Call, Launch
from bench.perf.buffers import Buffers
from bench.perf.checks import Data, poison
from bench.perf.collectives.collective import Collective, Place
from bench.perf.control import Control, meet
from bench.perf.options import OP_NAMES, PerfOptions, flag_name
from bench.perf.timing import Timer
from bench.perf.wire import wire_share
from netlayer.errors import ConfigError, HardwareMissing, NetlayerError
from netlayer.launch.rank import RankContext
from netlayer.results import Row, utc_now

NO_OP, NO_ROOT = "none", -1  # as the table shows them
_TIMED_SEED = 99  # nccl-tests' own for timed calls
_MEMORY_SHARE = 0.9  # of what is free: NCCL allocates buffers of its own at its first calls


@dataclass(frozen=True)
class Plan:
    """Plan for all ranks: the collectives in order, the options, and where to meet (an init_method)."""

    names: tuple[str, ...]
    options: PerfOptions
    backend: str
    url: str


class Started(NamedTuple):
    """A collective begins; `config` is what was resolved: devices, versions, sizes."""

    name: str
    config: dict[str, Any]


class Case(NamedTuple):
    """Key of a block of rows, one for each size."""

    dtype: str
    op: str
    root: int


def load_collective(name: str) -> Collective:
    """The collective of `bench.perf.collectives.<name>`."""
    collective: Collective = importlib.import_module(f"bench.perf.collectives.{name}").COLLECTIVE
    return collective


def list_cases(collective: Collective, options: PerfOptions, backend: str, ranks: int) -> tuple[list[Case], list[str]]:
    """List the cases of a collective in nccl-tests' order, and the cases of an `all` that are skipped, with reasons.

    Raises:
        ConfigError: an operator, a root or a number of ranks that the collective or the backend cannot do.
    """
    BACKENDS[backend].check(options)
    if collective.check is not None:
        collective.check(options, ranks)
    if options.agg_iters > 1 and not collective.one_launch:
        rule = f"{collective.name} is several calls, each in need of the one before"
        raise ConfigError(flag_name("agg_iters"), options.agg_iters, rule, "leave it out")
    if ranks < collective.min_ranks:
        rule = f"{collective.name} needs at least {collective.min_ranks} ranks"
        raise ConfigError("-g / --ngpus", ranks, rule, f"give -g {collective.min_ranks}")
    if collective.has_root and options.root >= ranks:
        raise ConfigError("-r / --root", options.root, f"must be below the number of ranks, {ranks}", "give -r 0")
    roots = [options.root] if collective.has_root else [NO_ROOT]
    if collective.has_root and options.root == -1:
        roots = list(range(ranks))
    shows_op = collective.reduces or collective.shows_op
    kept: list[Case] = []
    skipped: list[str] = []
    for dtype in DTYPES if options.dtype == "all" else [options.dtype]:
        for op in [NO_OP] if not shows_op else OP_NAMES if options.op == "all" else [options.op]:
            # An operator that the table merely shows (sendrecv) never reaches the library: it is not refused either.
            refusal = BACKENDS[backend].refusal(dtype, op if collective.reduces else NO_OP)
            if refusal:
                skipped.append(f"{op} of {dtype}: {refusal}" if collective.reduces else refusal)
            else:
                kept += [Case(dtype, op, root) for root in roots]
    if not kept:
        name = "op" if collective.reduces and options.op != "all" else "dtype"
        raise ConfigError(flag_name(name), getattr(options, name), "; ".join(skipped), "give another operator or type")
    return kept, skipped


def run_rank(context: RankContext, plan: Plan) -> None:
    """Measure all that is planned as one rank, and report `Started` and rows; those of all ranks are alike."""
    options = plan.options
    timeout = timedelta(seconds=options.timeout_s) if options.timeout_s else None
    with meet(context.env, plan.url, timeout) as control:
        try:
            backend = BACKENDS[plan.backend].open(context.env, timeout, options)
            _run_all(context, plan, backend, control)
            backend.close()
        except RuntimeError as exc:  # gloo's, and NCCL's where a backend waits for it
            # No exception class tells a timeout from other errors; both libraries' messages contain these words.
            if timeout is None or "timed out" not in str(exc).lower():
                raise
            message = f"rank {control.rank} had no answer from a peer within -T {options.timeout_s} s"
            raise NetlayerError(f"{message}: {exc}") from exc


def run_first_rank(context: RankContext, plan: Plan) -> None:
    """`run_rank` for a launcher, which needs to hear of one rank only."""
    run_rank(context if context.env.rank == 0 else RankContext(context.env), plan)


def _run_all(context: RankContext, plan: Plan, backend: Backend, control: Control) -> None:
    options = plan.options
    max_bytes = _affordable_bytes(backend, control, options)
    facts = backend.facts()
    config = {
        "backend": plan.backend,
        "library": facts.line,
        "nvls": facts.nvls,
        "clock": "CPU clock" if backend.device.type == "cpu" else "CUDA event",
        "torch_version": torch.__version__,
        "nccl_version": backend.library_version,
        "ranks": control.ranks,
        # nccl-tests counts the GPUs of one process; ranks that we started stand for these.
        "ngpus": control.ranks if context.env.launcher == "netlayer" else 1,
        "max_bytes": max_bytes,
        "devices": control.gather(_device(backend)),
    }
    if max_bytes < options.min_bytes:
        reason = f"the ranks have memory for sizes up to {max_bytes} bytes, and -b asks for {options.min_bytes}"
        raise HardwareMissing(f"{reason}: lower -b, or start fewer ranks on a host")
    # Once for all collectives: with -R every new buffer would be registered with NCCL.
    buffers = Buffers(backend, max_bytes, options.unalign)
    for name in plan.names:
        bench = _Bench(load_collective(name), options, backend, control, buffers)
        context.report(Started(name, config))
        for row in bench.rows([size for size in options.sizes() if size <= max_bytes]):
            context.report(row)


def _affordable_bytes(backend: Backend, control: Control, options: PerfOptions) -> int:
    """The largest size for which every rank has memory: two buffers, and masks while checking."""
    free = backend.free_bytes()
    most = options.max_bytes if free is None else int(free * _MEMORY_SHARE) // (3 if options.check else 2)
    # All ranks take the least of them: in a size that one rank skipped, the others would wait for it.
    return control.least(min(options.max_bytes, most))


def _device(backend: Backend) -> dict[str, Any]:
    """One entry of `devices`, with nccl-tests' keys."""
    device = backend.describe()
    return {
        "rank": backend.rank,
        "group": 0,  # NCCL_TESTS_SPLIT is refused, so there is one
        "pid": os.getpid(),
        "hostname": socket.gethostname().partition(".")[0],  # cut at the first dot, as nccl-tests
        "device": device.index,
        "device_hex": device.bus,
        "device_info": device.name,
    }


class _Bench:
    """One collective on one rank."""

    def __init__(
        self, collective: Collective, options: PerfOptions, backend: Backend, control: Control, buffers: Buffers
    ) -> None:
        self._collective, self._options, self._backend = collective, options, backend
        self._control, self._buffers = control, buffers
        self._timer = Timer(backend, control, options)
        self._seed = 0

    def rows(self, sizes: Sequence[int]) -> Iterator[Row]:
        """Two rows a size: out of place, then in place."""
        cases, _ = list_cases(self._collective, self._options, self._backend.name, self._backend.ranks)
        for case in cases:
            self._control.barrier()
            self._warm_up(case, sizes)
            for cycle in range(self._options.cycles) if self._options.cycles else count():  # -N 0: until Ctrl-C
                for size in sizes:
                    yield self._row(size, case, False) | {"cycle": cycle}
                    yield self._row(size, case, True) | {"cycle": cycle}

    def _warm_up(self, case: Case, sizes: Sequence[int]) -> None:
        # Sizes double here, whatever step is measured, as in nccl-tests: NCCL chooses an algorithm by size, and may
        # connect it only when it is first used, which must not fall into a timed call.
        size = sizes[0]
        while size <= sizes[-1]:
            for launch in self._bind(self._calls(size, case, False, self._options.warmup_iters)):
                launch()
            self._backend.synchronise()
            size *= 2

    def _calls(self, size: int, case: Case, in_place: bool, most: int) -> list[Call]:
        """`most` calls; where the buffers are short they use the same stretches in turn."""
        elements = self._collective.count(size, DTYPES[case.dtype].itemsize, self._backend.ranks)
        calls = self._buffers.calls(self._collective, elements, case, in_place, max(most, 1))
        return [calls[number % len(calls)] for number in range(most)]

    def _bind(self, calls: Sequence[Call]) -> list[Launch]:
        """A function for each call; calls on the same stretch share one."""
        bound: dict[int, Launch] = {}
        for call in calls:
            if id(call) not in bound:
                bound[id(call)] = self._backend.bind(self._collective, call)
        return [bound[id(call)] for call in calls]

    def _row(self, size: int, case: Case, in_place: bool) -> dict[str, Any]:
        collective, backend = self._collective, self._backend
        calls = self._calls(size, case, in_place, self._options.iters * self._options.agg_iters)
        launches, call = self._bind(calls), calls[0]
        if self._options.check:
            self._prepare(call, case, _TIMED_SEED)
        # One call that is not timed: NCCL names its algorithm in its debug log alone, and writing that takes time.
        with backend.listen() as choice:
            launches[0]()
        timing = self._timer.time(launches)
        # The bytes of the larger buffer, as nccl-tests: less than what was asked for where shares are rounded down.
        size_bytes = max(call.send.nbytes, call.recv.nbytes)
        alg_bw, bus_bw = collective.bandwidth_gbs(size_bytes, timing["time_us"] / 1e6, backend.ranks)
        share = wire_share(collective.name, choice.algorithm, choice.protocol, backend.ranks, one_host=backend.one_host)
        return {
            "size_bytes": size_bytes,
            "count": call.part_count,
            **case._asdict(),
            "in_place": in_place,
            **timing,
            "alg_bw_gbs": alg_bw,
            "bus_bw_gbs": bus_bw,
            "wrong": self._count_wrong(call, case, in_place),
            "emulated": backend.emulation(collective.name, case.op, in_place),
            "algorithm": choice.algorithm,
            "protocol": choice.protocol,
            "wire_bw_gbs": None if share is None else alg_bw * share,
            "at": utc_now(),
        }

    def _prepare(self, call: Call, case: Case, seed: int) -> Data:
        """Poison what comes out, then write what goes in: in that order, for in place they overlap."""
        op = case.op if self._collective.reduces else ""
        data = Data(self._backend.ranks, DTYPES[case.dtype], op, seed)
        poison(call.recv)
        data.fill(call.send, self._backend.rank)
        self._backend.synchronise()
        return data

    def _count_wrong(self, call: Call, case: Case, in_place: bool) -> int | None:
        """Elements that came out wrong, on all ranks together; None where there was no check."""
        if self._options.check == 0 or (in_place and not self._collective.checks_in_place):
            return None
        backend, ranks = self._backend, self._backend.ranks
        place = Place(backend.rank, ranks, case.root, call.part_count, call.send.itemsize)
        parts = self._collective.expect(place)
        launch = backend.bind(self._collective, call)
        # Checked as it is timed: a graph may go wrong where the call alone does not.
        if self._options.cudagraph:
            launch = backend.capture([launch])
        for _ in range(self._options.check):
            self._seed += 1  # other data each time, so that an old result is a wrong one
            data = self._prepare(call, case, self._seed)
            self._control.barrier()
            launch()
            backend.synchronise()
            # Summed over ranks before it is looked at, so that all of them leave the loop at the same repeat.
            wrong = self._control.sum(data.count_wrong(call.recv, parts))
            if wrong:
                return wrong
        return 0
