"""The one driver behind every `*_perf`: what each rank does, size by size, and the rows that come out.

Each size is timed out of place and in place, and its row is reported once its data was checked (nccl-tests,
src/common.cu): `_Bench` runs one collective with `Buffers`, `Timer` and `Data`. Not covered: who starts the ranks
(`measure`), what a number should be, and inputs that are hard for rounding: nccl-tests' own generator is the place for
those.
"""

from __future__ import annotations

import importlib
import os
import socket
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import count, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from bench.backends import BACKENDS, DTYPES, Backend, Call, Control, Launch, meet
from bench.backends.base import LARGEST_FACTOR, premultiplier
from bench.perf.collectives.collective import Collective, Part, Place, wire_share
from bench.perf.options import OP_NAMES, PerfOptions, flag_name
from bench.perf.table import PerfRow, Started, Timing
from netlayer.errors import ConfigError, HardwareMissing, NetlayerError
from netlayer.launch.rank import RankContext
from netlayer.percentile import percentile

NO_OP, NO_ROOT = "none", -1  # as the table shows them
_TIMED_SEED = 99  # nccl-tests' own for timed calls
_MEMORY_SHARE = 0.9  # of what is free: NCCL allocates buffers of its own at its first calls
# Values of -z.
_MEET, _MEET_UNTIMED = 1, 3
_GREATEST = 3  # of -a
_WIDEST_BYTES = 8  # of one element, for --unalign
PERIOD = 16381  # prime: no part of a power-of-two size begins where another did
_BLOCK = 1024 * PERIOD  # elements compared at once: bounds the memory for masks
_AVG_TOLERANCE_ULP = 2  # NCCL scales each input by 1/n before it adds

# Whole numbers up to here are exact in the type, and so is every sum that stays below.
_EXACT = {
    torch.int8: 127,
    torch.uint8: 127,
    torch.bfloat16: 256,
    torch.float16: 2048,
    torch.float8_e4m3fn: 16,
    torch.float8_e5m2: 8,
}
# torch computes little with these; as the other type the bits, or the values, of all our numbers are the same.
_SAME_BITS = {torch.uint32: torch.int32, torch.uint64: torch.int64}
_WIDER = {torch.float8_e4m3fn: torch.float16, torch.float8_e5m2: torch.float16}
_EXACT_OTHERS = 1 << 20
_POISON_INT = 0xAA  # no input, sum or product here is 0xAA repeated
_POISON_FP8 = 0x7F  # NaN in both
_MAX_DOUBLINGS = 6  # a product is at most 2**6: exact everywhere, and fits int8


@dataclass(frozen=True)
class Plan:
    """Plan for all ranks: the collectives in order, the options, and where to meet (an init_method)."""

    names: tuple[str, ...]
    options: PerfOptions
    backend: str
    url: str


class Case(NamedTuple):
    """Key of a block of rows, one for each size."""

    dtype: str
    op: str
    root: int


def load_collective(name: str) -> Collective:
    """Return the collective of `bench.perf.collectives.<name>`."""
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
        raise ConfigError(flag_name("agg_iters"), options.agg_iters, rule, "omit it")
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
    """Measure the plan as one rank, and report `Started` and rows; all ranks report the same."""
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
    """Run `run_rank` under a launcher, and report from rank 0 alone."""
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
    """Return the largest size for which every rank has memory: two buffers, and masks while checking."""
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

    def rows(self, sizes: Sequence[int]) -> Iterator[PerfRow]:
        """Measure two rows a size: out of place, then in place."""
        cases, _ = list_cases(self._collective, self._options, self._backend.name, self._backend.ranks)
        for case in cases:
            self._control.barrier()
            self._warm_up(case, sizes)
            for cycle in range(self._options.cycles) if self._options.cycles else count():  # -N 0: until Ctrl-C
                for size in sizes:
                    yield self._row(size, case, False, cycle)
                    yield self._row(size, case, True, cycle)

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
        """Return `most` calls; if the buffers are short, calls use the same parts of them in turn."""
        elements = self._collective.count(size, DTYPES[case.dtype].itemsize, self._backend.ranks)
        calls = self._buffers.calls(self._collective, elements, case, in_place, max(most, 1))
        return [calls[number % len(calls)] for number in range(most)]

    def _bind(self, calls: Sequence[Call]) -> list[Launch]:
        """Return a function for each call; calls on the same part of the buffers share one."""
        bound: dict[int, Launch] = {}
        for call in calls:
            if id(call) not in bound:
                bound[id(call)] = self._backend.bind(self._collective, call)
        return [bound[id(call)] for call in calls]

    def _row(self, size: int, case: Case, in_place: bool, cycle: int) -> PerfRow:
        """Measure one size, out of place or in place: time it, check the data, and return the row; all ranks alike."""
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
        alg_bw, bus_bw = collective.bandwidth_gbs(size_bytes, timing.time_us / 1e6, backend.ranks)
        share = wire_share(collective.name, choice.algorithm, choice.protocol, backend.ranks, one_host=backend.one_host)
        return PerfRow(
            size_bytes=size_bytes,
            count=call.part_count,
            dtype=case.dtype,
            op=case.op,
            root=case.root,
            in_place=in_place,
            timing=timing,
            alg_bw_gbs=alg_bw,
            bus_bw_gbs=bus_bw,
            wrong=self._count_wrong(call, case, in_place),
            emulated=backend.emulation(collective.name, case.op, in_place),
            algorithm=choice.algorithm,
            protocol=choice.protocol,
            wire_bw_gbs=None if share is None else alg_bw * share,
            at_s=time.time(),
            cycle=cycle,
        )

    def _prepare(self, call: Call, case: Case, seed: int) -> Data:
        """Poison the output, then write the input: in this order, since they overlap in place."""
        op = case.op if self._collective.reduces else ""
        data = Data(self._backend.ranks, DTYPES[case.dtype], op, seed)
        poison(call.recv)
        data.fill(call.send, self._backend.rank)
        self._backend.synchronise()
        return data

    def _count_wrong(self, call: Call, case: Case, in_place: bool) -> int | None:
        """Return the number of wrong elements of all ranks; None if nothing is checked."""
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


class Buffers:
    """A send and a receive buffer for sizes up to `max_bytes`, laid out as in nccl-tests from element `unalign` on."""

    def __init__(self, backend: Backend, max_bytes: int, unalign: int) -> None:
        self._rank, self._ranks = backend.rank, backend.ranks
        self._max_bytes, self._unalign = max_bytes, unalign
        # One allocation serves all types, so the shift is as wide as the widest element wants.
        num_bytes = max_bytes + _WIDEST_BYTES * unalign
        self._send = backend.allocate(num_bytes)
        self._recv = backend.allocate(num_bytes)

    def calls(
        self, collective: Collective, count: int, case: tuple[str, str, int], in_place: bool, most: int
    ) -> list[Call]:
        """Return up to `most` calls, each on its own part of the buffers as far as they reach: caches do not help then.

        Args:
            count: elements of one part.
            case: type, operator and root by name.
        """
        dtype, op, root = DTYPES[case[0]], case[1], case[2]
        extents = collective.elements(count, dtype.itemsize, self._ranks)
        stride_bytes = max(extents) * dtype.itemsize
        # A share that was rounded down to nothing still makes one call, of no bytes.
        fitting = self._max_bytes // stride_bytes if stride_bytes else 1
        calls = []
        for number in range(min(fitting, most)):
            start = number * stride_bytes + self._unalign * dtype.itemsize
            if in_place:
                send, recv = self._share(_view(self._recv, start, max(extents), dtype), extents)
            else:
                send = _view(self._send, start, extents[0], dtype)
                recv = _view(self._recv, start, extents[1], dtype)
            calls.append(Call(recv, send, op, root, count))
        return calls

    def _share(self, whole: Tensor, extents: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Return send and receive buffer in place: the smaller one is this rank's part of the larger one."""
        least = min(extents)
        if least * self._ranks != max(extents) or self._ranks == 1:  # of one length, or as near to it as a vector is
            return whole[: extents[0]], whole[: extents[1]]
        own = whole[self._rank * least :][:least]
        return (own, whole) if extents[0] < extents[1] else (whole, own)


def _view(buffer: Tensor, start_bytes: int, count: int, dtype: torch.dtype) -> Tensor:
    return buffer[start_bytes : start_bytes + count * dtype.itemsize].view(dtype)


class Timer:
    """Times calls of one backend: the host's clock over n calls in a row and the wait for the last one, divided by n.

    Then it is averaged over ranks as `-a` says. As nccl-tests (src/common.cu), with its groups of calls (`-m`), waits
    (`-z`) and CUDA graphs (`-G`).
    """

    def __init__(self, backend: Backend, control: Control, options: PerfOptions) -> None:
        self._backend, self._control, self._options = backend, control, options
        # An event between two small calls adds to their time, so nccl has them with -I alone.
        self._marks = backend.always_marks or bool(options.per_iter)

    def time(self, launches: Sequence[Launch]) -> Timing:
        """Return times in µs: the mean of a call, and where known those of single calls, of the slowest rank.

        `launches` is `iters` times `agg_iters` calls.
        """
        groups = self._group(launches)
        each_s: list[float] = []
        # What takes time to prepare comes before the ranks meet: they take unequally long.
        if self._options.cudagraph:
            graph = self._backend.capture(groups)
            self._meet(launches[0])
            totals_s = self._run_graph(graph)
        elif self._options.blocking:
            self._meet(launches[0])
            totals_s, each_s = self._run_blocking(groups)
        elif self._marks:
            self._meet(launches[0])
            totals_s, each_s = self._run_marked(groups)
        else:
            launch_all = self._backend.chain(groups)
            self._meet(launches[0])
            totals_s = self._run(launch_all)
        totals_s = self._control.average(totals_s, self._options.average)
        # Of single calls, though -m launches several at once.
        time_us, cpu_time_us = (1e6 * total / len(launches) for total in totals_s)
        if not each_s:
            return Timing(time_us, cpu_time_us)
        # The slowest rank's time, whatever -a says: so nccl-tests fills its i_* columns.
        longest_s = self._control.average(each_s, _GREATEST)
        each_us = [1e6 * seconds / self._options.agg_iters for seconds in longest_s]
        kept = sorted(each_us[self._options.per_iter_skip :])
        mean, stdev = statistics.fmean(kept), statistics.pstdev(kept)
        return Timing(
            time_us,
            cpu_time_us,
            min_us=kept[0],
            max_us=kept[-1],
            avg_us=mean,
            p50_us=percentile(kept, 50),
            p95_us=percentile(kept, 95),
            p99_us=percentile(kept, 99),
            stdev_us=stdev,
            cv_pct=100 * stdev / mean if mean > 0 else 0.0,
            iterations_us=each_us,
        )

    def _meet(self, launch: Launch) -> None:
        """Make one call of all ranks, which wakes the devices, then have all begin at the same moment."""
        self._control.barrier()
        if self._backend.launches_ahead:
            launch()
            self._backend.synchronise()
            self._control.start_together()

    def _group(self, launches: Sequence[Launch]) -> Sequence[Launch]:
        size = self._options.agg_iters
        if size == 1:
            return launches
        return [self._backend.batch(launches[first : first + size]) for first in range(0, len(launches), size)]

    def _run(self, launch_all: Launch) -> list[float]:
        """Return the seconds until all calls were done, and until all were launched."""
        begin_s = time.perf_counter()
        launch_all()
        launched_s = time.perf_counter() - begin_s
        self._backend.synchronise()
        return [time.perf_counter() - begin_s, launched_s]

    def _run_marked(self, groups: Sequence[Launch]) -> tuple[list[float], list[float]]:
        """Return the seconds as `_run`, and those of each group."""
        backend = self._backend
        begin_s = time.perf_counter()
        marks = [backend.mark()]
        for launch in groups:
            launch()
            marks.append(backend.mark())
        launched_s = time.perf_counter() - begin_s
        backend.synchronise()
        done_s = time.perf_counter() - begin_s
        return [done_s, launched_s], [backend.seconds(begin, end) for begin, end in pairwise(marks)]

    def _run_blocking(self, groups: Sequence[Launch]) -> tuple[list[float], list[float]]:
        """Run the groups as `_run` does, with a wait after each one.

        nccl-tests waits within a group (-m) too, where nothing has been launched yet; here the wait follows it.
        """
        backend, kind = self._backend, self._options.blocking
        pairs: list[tuple[Any, Any]] = []
        waited_s, begin_s = 0.0, time.perf_counter()
        for launch in groups:
            group_s = time.perf_counter()
            first = backend.mark() if self._marks else None
            launch()
            if self._marks:
                pairs.append((first, backend.mark()))
            backend.synchronise()
            waited_s += time.perf_counter() - group_s
            # After `waited_s` was taken: what it takes to meet counts with -z 1 and not with -z 3.
            if kind in (_MEET, _MEET_UNTIMED):
                self._control.barrier()
        total_s = waited_s if kind == _MEET_UNTIMED else time.perf_counter() - begin_s
        # No launch is ahead of its end here, so the time to launch is the time to be done.
        return [total_s, total_s], [backend.seconds(first, last) for first, last in pairs]

    def _run_graph(self, graph: Launch) -> list[float]:
        """Launch a graph of all groups, and return the seconds until it was done and until it was launched.

        nccl-tests shows the second (-C) for all launches together; here it is of one, as the first.
        """
        times = self._options.cudagraph
        begin_s = time.perf_counter()
        for _ in range(times):
            graph()
        launched_s = time.perf_counter() - begin_s
        self._backend.synchronise()
        done_s = time.perf_counter() - begin_s
        return [done_s / times, launched_s / times]


class Data:
    """Inputs of one seed over so many ranks whose result is known exactly; `op` is '' where nothing is reduced.

    A rank's input repeats one pattern of small whole numbers with a prime period, seeded by the run and the rank, so
    that every reduction is exact in every type and a part at a wrong place differs.
    """

    def __init__(self, ranks: int, dtype: torch.dtype, op: str, seed: int) -> None:
        self.ranks, self.dtype, self.op, self.seed = ranks, _SAME_BITS.get(dtype, dtype), op, seed

    def fill(self, buffer: Tensor, rank: int) -> None:
        """Write the input of `rank` into `buffer`."""
        period = self._pattern(rank).to(self.dtype).to(buffer.device)
        if self.dtype in _WIDER:  # one byte each, which torch copies under any name
            period, buffer = period.view(torch.uint8), buffer.view(torch.uint8)
        _tile(buffer.view(period.dtype), period)

    def count_wrong(self, result: Tensor, parts: Sequence[Part]) -> int:
        """Return the number of elements of `result` that differ from what `parts` expect, in order.

        Parts that do not say how long they are share the result evenly; what is beyond the last one is not looked at.
        """
        if not parts:
            return 0
        wrong, begin = 0, 0
        for part in parts:
            length = result.numel() // len(parts) if part.length is None else part.length
            low, high = self._bounds(part)
            piece = result[begin : begin + length].view(self.dtype)
            wrong += _count_outside(piece, low.to(result.device), high.to(result.device))
            begin += length
        return wrong

    def _pattern(self, rank: int) -> Tensor:
        """Return one period of a rank's input as int64."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + rank)
        if self.op == "prod":
            return 1 + torch.randint(0, 2, (PERIOD,), generator=generator) * self._turn(rank, _MAX_DOUBLINGS)
        exact = _EXACT.get(self.dtype, _EXACT_OTHERS)
        adds = self.op in ("sum", "avg", "mulsum")
        if self.op == "mulsum":
            exact //= LARGEST_FACTOR
        largest = max(1, exact // self.ranks) if adds else exact
        values = torch.randint(0, largest + 1, (PERIOD,), generator=generator)
        return values * self._turn(rank, exact) if adds else values

    def _turn(self, rank: int, most: int) -> Tensor:
        """Return 1 at elements of this rank's turn, else 0; at most `most` ranks have their turn at one element."""
        stride = -(-self.ranks // most)
        return ((torch.arange(PERIOD) + rank) % stride == 0).long()

    def _bounds(self, part: Part) -> tuple[Tensor, Tensor]:
        """Return one period of the least and greatest allowed values, from the part's first element on."""
        if part.source is not None:
            low = high = self._pattern(part.source)
        elif self.op != "avg":
            low = high = self._reduced()
        elif self.dtype.is_floating_point:
            low, high = _around(self._reduced().double() / self.ranks, self.dtype, self._tolerance_ulp())
        else:
            low = high = self._reduced() // self.ranks
        shift, dtype = -(part.start % PERIOD), _WIDER.get(self.dtype, self.dtype)
        return low.roll(shift).to(dtype), high.roll(shift).to(dtype)

    def _tolerance_ulp(self) -> int:
        """Return the tolerance of an average, in units in the last place.

        With 3 bits or fewer behind the point, 1/n itself is half a unit off where n is no power of two, and so is each
        input times 1/n.
        """
        narrow = self.dtype in _WIDER and self.ranks & (self.ranks - 1)
        return _AVG_TOLERANCE_ULP + self.ranks if narrow else _AVG_TOLERANCE_ULP

    def _reduced(self) -> Tensor:
        """Return one period of the exact reduction over all ranks; the sum if the operator is the average."""
        total = self._scaled(0)
        for rank in range(1, self.ranks):
            total = _combine(self.op, total, self._scaled(rank))
        return total

    def _scaled(self, rank: int) -> Tensor:
        pattern = self._pattern(rank)
        return pattern * premultiplier(rank) if self.op == "mulsum" else pattern


def poison(buffer: Tensor) -> None:
    """Overwrite with values that no check accepts: NaN, or a bit pattern that no result has."""
    if buffer.dtype in _WIDER:
        buffer.view(torch.uint8).fill_(_POISON_FP8)
    elif buffer.dtype.is_floating_point:
        buffer.fill_(float("nan"))
    else:
        buffer.view(torch.uint8).fill_(_POISON_INT)


def _combine(op: str, left: Tensor, right: Tensor) -> Tensor:
    if op == "prod":
        return left * right
    if op == "max":
        return torch.maximum(left, right)
    return torch.minimum(left, right) if op == "min" else left + right


def _around(mean: Tensor, dtype: torch.dtype, tolerance_ulp: int) -> tuple[Tensor, Tensor]:
    """Return the bounds of a rounded mean: some units in the last place below and above it."""
    rounded = mean.to(dtype).double()
    _, exponent = torch.frexp(rounded)
    ulp = torch.ldexp(torch.full_like(rounded, torch.finfo(dtype).eps), exponent - 1)
    margin = torch.where(rounded == 0, 0.0, tolerance_ulp * ulp)
    return rounded - margin, rounded + margin


def _tile(buffer: Tensor, period: Tensor) -> None:
    whole = buffer.numel() // PERIOD * PERIOD
    buffer[:whole].view(-1, PERIOD).copy_(period)
    buffer[whole:].copy_(period[: buffer.numel() - whole])


def _count_outside(result: Tensor, low: Tensor, high: Tensor) -> int:
    """Count the elements outside the bounds; NaN is outside, so a result that was never written is wrong."""
    wrong = 0
    for stretch in torch.split(result, _BLOCK):
        block = stretch.to(low.dtype)
        whole = block.numel() // PERIOD * PERIOD
        body, tail = block[:whole].view(-1, PERIOD), block[whole:]
        rest = tail.numel()
        inside = ((body >= low) & (body <= high)).sum() + ((tail >= low[:rest]) & (tail <= high[:rest])).sum()
        wrong += block.numel() - int(inside)
    return wrong
