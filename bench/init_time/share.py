"""The store's share of an initialisation, a row for each size and way: replayed, or from the closed form.

A cell is predicted only where a replay would run out of time, and only from a speed that was measured: its own until
then, or that of the next smaller cell of the same way. Any other failure ends the run. Not covered: what is replayed,
and how (`bench.init_time.traffic`, `bench.init_time.replay`).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench.init_time.bytes import num_bytes
from bench.init_time.replay import Replayed, TimeUp, replay
from bench.init_time.rows import ShareRow
from bench.init_time.traffic import Way, backend_operations, operations
from netlayer.errors import CheckFailed
from netlayer.layout import ParallelLayout
from netlayer.progress import Stages

MOST_S = 300.0
"""What would take longer comes from the closed form."""


@dataclass(frozen=True)
class Share:
    """Settings by which a cell is measured.

    Args:
        repeats: replays of it.
        think_s: what each rank waits between joining and its groups.
    """

    repeats: int
    think_s: float = 0.0


def rows(share: Share, layouts: Sequence[ParallelLayout], ways: Sequence[Way], stages: Stages) -> Iterator[ShareRow]:
    """Yield a row for each layout, smallest first, and each way.

    Raises:
        CheckFailed: the server failed, or there is no speed to predict from. The rows until then have been yielded,
            and so has that of the cell in which it failed, if one of its repeats was done.
    """
    speeds: dict[Way, float] = {}
    for layout in layouts:
        for way in ways:
            yield from _cell(share, way, layout, speeds, stages)


def _cell(
    share: Share, way: Way, layout: ParallelLayout, speeds: dict[Way, float], stages: Stages
) -> Iterator[ShareRow]:
    """Yield the row of one way of starting at one number of ranks: measured if it is quick enough, else predicted.

    Args:
        speeds: operations/s of each way at the last size, which the prediction uses; updated here.
    """
    backend = backend_operations(way, layout)
    total = operations(way, layout) + backend
    names = layout.world_size, way.method, way.store
    if way not in speeds or share.think_s + total / speeds[way] <= MOST_S:
        runs, end = _replays(share, way, layout, total, stages)
        if runs:
            best = min(runs, key=lambda one: one.seconds)
            speeds[way] = best.operations / (best.seconds - share.think_s)
            yield ShareRow(
                *names,
                think_s=share.think_s,
                operations=best.operations,
                backend_operations=backend,
                source="measured",
                seconds=best.seconds,
                bytes=best.num_bytes,
                seconds_median=statistics.median(one.seconds for one in runs),
                seconds_all=[one.seconds for one in runs],
                server_cpu_s=best.server_cpu_s,
                generator_cpu_s=best.generator_cpu_s,
            )
        if end is not None and not isinstance(end, TimeUp):
            raise end
        if isinstance(end, TimeUp):
            stages.say(f"{way.method} on {way.store}, {layout.world_size:,} simulated ranks: {end}")
            if not runs:
                speeds[way] = _speed_until(end)
        if runs:
            return
    yield ShareRow(
        *names,
        think_s=share.think_s,
        operations=total,
        backend_operations=backend,
        source="predicted",
        seconds=share.think_s + total / speeds[way],
        bytes=num_bytes(way, layout),
        operations_per_s=speeds[way],
    )


def _replays(
    share: Share, way: Way, layout: ParallelLayout, total: int, stages: Stages
) -> tuple[list[Replayed], BaseException | None]:
    """Return the replays done, and the exception that ended them early: even a Ctrl-C keeps the earlier repeats."""
    runs: list[Replayed] = []
    with stages.open(f"{way.method} on {way.store}, {layout.world_size:,} simulated ranks") as bar:

        def say(done: int) -> None:
            text = f"{len(runs) + 1} of {share.repeats}, {done:,} of {total:,} operations"
            bar(min(len(runs) * total + done, share.repeats * total), share.repeats * total, text)

        try:
            for _ in range(share.repeats):
                runs.append(replay(way, layout, MOST_S, say, think_s=share.think_s))
        except BaseException as exc:  # noqa: BLE001 # the caller raises it
            return runs, exc
    return runs, None


def _speed_until(end: TimeUp) -> float:
    if end.operations <= 0 or end.seconds <= 0:
        raise CheckFailed(f"{end}, and no speed was measured to predict from") from end
    return end.operations / end.seconds
