"""Timing: the host's clock over n calls in a row and the wait for the last one, divided by n.

Then it is averaged over ranks as `-a` says. As nccl-tests (src/common.cu), with its groups of calls (`-m`), waits
(`-z`) and CUDA graphs (`-G`). Not covered: what is called, and whether its data is right (`driver`).
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from bench.backends import Backend, Launch
from bench.perf.control import Control
from bench.perf.options import PerfOptions
from netlayer.percentile import percentile

# Values of -z.
_MEET, _MEET_UNTIMED = 1, 3
_GREATEST = 3  # of -a


class Timer:
    """Times calls of one backend, all ranks together."""

    def __init__(self, backend: Backend, control: Control, options: PerfOptions) -> None:
        self._backend, self._control, self._options = backend, control, options
        # An event between two small calls adds to their time, so nccl has them with -I alone.
        self._marks = backend.always_marks or bool(options.per_iter)

    def time(self, launches: Sequence[Launch]) -> dict[str, Any]:
        """Times in µs of one call; of single calls, where they are known, the longest of the ranks.

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
        timing: dict[str, Any] = {"time_us": time_us, "cpu_time_us": cpu_time_us}
        if each_s:
            # The slowest rank's time, whatever -a says: so nccl-tests fills its i_* columns.
            longest_s = self._control.average(each_s, _GREATEST)
            each_us = [1e6 * seconds / self._options.agg_iters for seconds in longest_s]
            timing |= _statistics(each_us, self._options.per_iter_skip)
        return timing

    def _meet(self, launch: Launch) -> None:
        """Begin together: a call that needs all ranks, so that devices are awake, then the same moment for all."""
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
        """Seconds until all was done and until all was launched."""
        begin_s = time.perf_counter()
        launch_all()
        launched_s = time.perf_counter() - begin_s
        self._backend.synchronise()
        return [time.perf_counter() - begin_s, launched_s]

    def _run_marked(self, groups: Sequence[Launch]) -> tuple[list[float], list[float]]:
        """Seconds as `_run`, and the seconds of single groups."""
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
        """Seconds of one launch of a graph of all groups, until it was done and until it was launched.

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


def _statistics(each_us: list[float], skip: int) -> dict[str, Any]:
    """nccl-tests' statistics of single calls without the first `skip`; percentiles by nearest rank."""
    kept = sorted(each_us[skip:])
    mean, stdev = statistics.fmean(kept), statistics.pstdev(kept)
    return {
        "min_us": kept[0],
        "max_us": kept[-1],
        "avg_us": mean,
        "p50_us": percentile(kept, 50),
        "p95_us": percentile(kept, 95),
        "p99_us": percentile(kept, 99),
        "stdev_us": stdev,
        "cv_pct": 100 * stdev / mean if mean > 0 else 0.0,
        "iterations_us": each_us,
    }
