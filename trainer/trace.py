"""`trace.json` of some steps: what every rank computed, sent and received, for ui.perfetto.dev.

Not covered: the format (`collectives.watch.trace`), and kernels one by one (torch.profiler has those).
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

from netlayer.errors import ConfigError

if TYPE_CHECKING:
    from collectives.watch.recorder import StepComm
    from netlayer.layout import ParallelLayout

TRACE = "trace.json"
_STEPS = re.compile(r"(\d+)(?:-(\d+))?")


def parse_steps(text: str, first: int, last: int) -> range:
    """Parse `3-5`, `7` or `last` as steps of a run from `first` to `last`.

    Raises:
        ConfigError: it is none of them, or not all of them are steps of the run.
    """
    if text == "last":
        return range(last, last + 1)
    match = _STEPS.fullmatch(text)
    if match is None:
        raise ConfigError("--trace", text, "names no steps", "give one such as 7, a range such as 3-5, or last")
    begin, end = int(match[1]), int(match[2] or match[1])
    if begin > end:
        raise ConfigError("--trace", text, "ends before it begins", f"give {end}-{begin}")
    if not first <= begin <= end <= last:
        raise ConfigError("--trace", text, f"must lie in the steps of this run, {first}-{last}", "name some of those")
    return range(begin, end + 1)


class StepTracer:
    """Keeps some steps of a rank, and has the first rank write those of all.

    Args:
        steps: to trace; every rank has the same.
        file: written by rank 0.
        layout: of the job.
        rank: this one, in the world.
    """

    def __init__(self, steps: range, file: Path, layout: ParallelLayout, rank: int) -> None:
        self._steps, self._file, self._layout, self._rank = steps, file, layout, rank
        self._kept: list[StepComm] = []

    def add(self, comm: StepComm) -> bool:
        """Every rank gives every step, in order; the file is written after the first one after those asked for.

        Returns:
            Whether that was done now, which can take long.
        """
        if comm.step in self._steps:
            self._kept.append(comm)
            return False
        is_due = bool(self._kept)  # by now everything that those steps launched was waited for
        self.write()
        return is_due

    def write(self) -> None:
        """Write what is kept, if anything; every rank calls it, and waits for the others.

        Raises:
            ConfigError: the file cannot be written.
        """
        import torch.distributed as dist

        from collectives.watch.trace import ClockAlignment, RankTrace, align_clocks, record_trace, write_trace

        if not self._kept:
            return
        alone = self._layout.world_size == 1
        clock = ClockAlignment(0, "one rank: one clock") if alone else align_clocks()
        own = record_trace(self._rank, self._kept, self._layout.describe([self._rank]), clock.offset_ns)
        steps = f"{self._kept[0].step}-{self._kept[-1].step}"  # fewer than asked for where the run was stopped
        self._kept = []
        traces: list[RankTrace | None] = [own] if alone else [None] * self._layout.world_size
        if not alone:
            dist.gather_object(own, traces if self._rank == 0 else None)
        if self._rank == 0:
            about = {"steps": steps, "clocks": clock.method}
            write_trace(self._file, [trace for trace in traces if trace is not None], about)
