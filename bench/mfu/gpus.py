"""Clock, power and temperature of the GPUs while systems take their turns: who was throttled shows here.

nvidia-smi says a line a GPU and second. Not covered: why a clock is low.
"""

from __future__ import annotations

import statistics
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import click

from netlayer import environ

_EVERY_MS = 1000
_QUERY = "timestamp,index,clocks.sm,power.draw,temperature.gpu"


@dataclass(frozen=True)
class GpuFigures:
    """The GPUs over a span of time: medians of clock and power, the least clock, the highest temperature.

    None is what the driver does not tell.
    """

    clock_mhz: float | None
    least_clock_mhz: float | None
    power_w: float | None
    temperature_c: float | None


class GpuLog:
    """Log of nvidia-smi: its `lines` as received, and figures of a span of time."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._read_s: list[float] = []

    def add(self, line: str, read_s: float) -> None:
        """A line of `_QUERY`, and when it was read, in seconds of `time.monotonic`."""
        self.lines.append(line.strip())
        self._read_s.append(read_s)

    def between(self, begin_s: float, end_s: float) -> GpuFigures | None:
        """Return the figures of a span of `time.monotonic`; None where nothing was read in it."""
        lines = [line for line, read_s in zip(self.lines, self._read_s, strict=False) if begin_s <= read_s <= end_s]
        columns = list(zip(*(_figures(line) for line in lines), strict=True))
        if not columns:
            return None
        clocks, watts, celsius = ([value for value in column if value is not None] for column in columns)
        return GpuFigures(
            clock_mhz=statistics.median(clocks) if clocks else None,
            least_clock_mhz=min(clocks, default=None),
            power_w=statistics.median(watts) if watts else None,
            temperature_c=max(celsius, default=None),
        )


@contextmanager
def watched_gpus(num_gpus: int) -> Iterator[GpuLog]:
    """Listen to the first `num_gpus` that are visible; none: an empty log."""
    log = GpuLog()
    indexes = ",".join(str(gpu.index) for gpu in environ.list_gpus()[:num_gpus])
    if not indexes:
        if num_gpus:
            click.echo("note: no nvidia-smi answers: rows come without clocks and power", err=True)
        yield log
        return
    process = subprocess.Popen(
        [
            "nvidia-smi",
            f"--id={indexes}",
            f"--query-gpu={_QUERY}",
            "--format=csv,noheader,nounits",
            f"-lms={_EVERY_MS}",
        ],
        stdout=subprocess.PIPE,
        text=True,
    )

    def read() -> None:
        for line in process.stdout or ():
            log.add(line, time.monotonic())

    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    try:
        yield log
    finally:
        process.terminate()
        process.wait()
        reader.join()


def _figures(line: str) -> tuple[float | None, ...]:
    """Clock, power, temperature; None where the driver does not say."""
    cells = [cell.strip() for cell in line.split(",")][2:5]
    cells += [""] * (3 - len(cells))
    return tuple(float(cell) if cell.replace(".", "", 1).isdigit() else None for cell in cells)
