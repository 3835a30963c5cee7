"""NCCL's own log of what it does: whether the switch can reduce (NVLS), and the algorithm of a call.

NCCL reports both only in its debug log, which costs time. So the log is turned on for a call that is not timed, into a
file of our own, and off again. Where the user has set NCCL_DEBUG it is left alone, and the algorithm stays unknown.
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from bench.backends.base import AlgorithmChoice
from bench.perf.collectives.collective import UNKNOWN

# nvls.cc, enqueue.cc and scheduler/symmetric_sched.cc of 2.28; the latter two from rank 0 alone.
_NVLS = re.compile(r"NVLS multicast support is (not )?available")
_TUNED = re.compile(r": \d+ Bytes -> (?:Algo (?P<algorithm>\w+) proto (?P<protocol>\w+)|Kernel (?P<kernel>\w+))")
_SETTINGS = ("NCCL_DEBUG", "NCCL_DEBUG_SUBSYS", "NCCL_DEBUG_FILE")


class NcclLog:
    """The debug log of this process's NCCL, which `reset` makes it open anew."""

    def __init__(self, reset: Callable[[], bool], may_use: bool | None = None) -> None:
        self._reset = reset
        self._may_use = not any(name in os.environ for name in _SETTINGS) if may_use is None else may_use

    @contextmanager
    def record(self, subsystems: str) -> Iterator[list[str]]:
        """The lines that NCCL writes within, once the block has ended; none where it may not be asked."""
        lines: list[str] = []
        if not self._may_use:
            yield lines
            return
        with tempfile.TemporaryDirectory(prefix="nccl-log-") as folder:
            file = Path(folder) / "log"
            os.environ.update(NCCL_DEBUG="INFO", NCCL_DEBUG_SUBSYS=subsystems, NCCL_DEBUG_FILE=str(file))
            self._may_use = self._reset()
            try:
                yield lines
            finally:
                for name in _SETTINGS:
                    os.environ.pop(name, None)
                self._reset()
            if file.exists():
                lines += file.read_text(encoding="utf-8", errors="replace").splitlines()


def read_nvls(lines: list[str]) -> str:
    """Whether a communicator can use NVLS, from what was logged while it was made."""
    for line in lines:
        if match := _NVLS.search(line):
            return "not available" if match[1] else "available"
    # NCCL looks for it, and logs it, only where it may use it and a host has two GPUs of the communicator.
    return "not looked for" if lines else UNKNOWN


def read_algorithm(lines: list[str]) -> AlgorithmChoice:
    """The algorithm and protocol of the one call that was logged; a symmetric kernel's name stands for both."""
    choices = {
        (match["algorithm"] or match["kernel"], match["protocol"]) for match in map(_TUNED.search, lines) if match
    }
    if len(choices) != 1:
        return AlgorithmChoice()
    algorithm, protocol = choices.pop()
    if protocol is None:
        protocol = "LL" if "LL" in algorithm else "SIMPLE"
    return AlgorithmChoice(algorithm, protocol)
