"""Measures a tuned table: all paths that a group has, for each kind and size, in turn and on the same data.

Data are bfloat16, on GPUs that do nothing else. Not covered: the table itself (`table`).
"""

from __future__ import annotations

import itertools
import logging
import statistics
from collections.abc import Callable, Sequence
from datetime import UTC, datetime

import torch
import torch.distributed as dist

from collectives.small.path import KINDS, PATHS, Kind, Path, PathName
from collectives.small.paths import open_paths
from collectives.small.table import DEFAULT_MAX_BYTES, Choice, Entry, Measured, TuningTable
from collectives.small.trial import buffer_sizes, checked_replay, trial_of
from collectives.timing import Replay, time_in_turn

logger = logging.getLogger(__name__)

MIN_BYTES = 1024


def tune(
    group: dist.ProcessGroup,
    device: torch.device,
    *,
    max_bytes: int = DEFAULT_MAX_BYTES,
    launches: int = 20,
    replays: int = 7,
    rounds: int = 3,
    on_figure: Callable[[Measured], None] = lambda _figure: None,
) -> TuningTable:
    """Measure all paths that this group has, and choose the fastest for each kind and size. Every rank gets the same.

    Sizes double from 1 KiB to `max_bytes`; a size between two is taken for the larger. A path counts with what it needs
    with it, such as copies into its windows. One whose data comes out wrong is omitted everywhere.

    Args:
        launches: in a captured graph.
        replays: timed a round.
        rounds: the paths take turns.
        on_figure: hears each figure as it comes.
    """
    num_ranks = dist.get_world_size(group)
    paths, skipped = open_paths(PATHS, group, device, max_bytes)
    sizes = [MIN_BYTES << power for power in range(max_bytes.bit_length()) if MIN_BYTES << power <= max_bytes]
    figures: list[Measured] = []
    for kind, num_bytes in itertools.product(KINDS, sizes):
        able = {name: path for name, path in paths.items() if name not in skipped}
        calls, refused = _checked_replays(kind, num_bytes, able, launches, group, device)
        skipped |= refused
        for name, times in time_in_turn(calls, group, device, launches, replays, rounds).items():
            us = statistics.median(times.each_us)
            figure = Measured(kind=kind, num_ranks=num_ranks, num_bytes=num_bytes, path=name, median_us=us)
            figures.append(figure)
            on_figure(figure)
    figures = [figure for figure in figures if figure.path not in skipped]
    return TuningTable(
        source=describe(device, num_ranks, launches),
        measured_on=datetime.now(UTC).date().isoformat(),
        entries=tuple(fastest(figures, kind, num_ranks) for kind in KINDS),
        skipped=skipped,
        figures=tuple(figures),
    )


def fastest(figures: Sequence[Measured], kind: Kind, num_ranks: int) -> Entry:
    """The fastest path of each size that was measured, as choices."""
    selected = [figure for figure in figures if (figure.kind, figure.num_ranks) == (kind, num_ranks)]
    chosen = []
    for num_bytes in sorted({figure.num_bytes for figure in selected}):
        best = min((one for one in selected if one.num_bytes == num_bytes), key=lambda one: one.median_us)
        chosen.append(Choice(up_to_bytes=num_bytes, path=best.path))
    return Entry(kind=kind, num_ranks=num_ranks, choices=_merge(chosen))


def describe(device: torch.device, num_ranks: int, launches: int) -> str:
    """Return a line on the devices and versions that a table was measured with."""
    if device.type != "cuda":
        return f"{num_ranks} ranks on {device.type}, torch {torch.__version__}, loops of {launches} launches"
    nccl = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    name = torch.cuda.get_device_name(device)
    return f"{num_ranks} x {name}, torch {torch.__version__}, NCCL {nccl}, bfloat16, graphs of {launches} launches"


def _checked_replays(
    kind: Kind,
    num_bytes: int,
    paths: dict[PathName, Path],
    launches: int,
    group: dist.ProcessGroup,
    device: torch.device,
) -> tuple[dict[PathName, Replay], dict[PathName, str]]:
    """Replays of the paths that take this and whose data is right, and what is amiss with the others."""
    dtype = torch.bfloat16
    sizes = buffer_sizes(kind, num_bytes, dist.get_world_size(group))
    source, out = (torch.empty(size // dtype.itemsize, dtype=dtype, device=device) for size in sizes)
    calls: dict[PathName, Replay] = {}
    refused: dict[PathName, str] = {}
    for name, path in paths.items():
        if not path.takes(kind, dtype, max(sizes)):
            continue
        replay = checked_replay(trial_of(path, kind, source, out, group), launches, group)
        if isinstance(replay, str):
            refused[name] = f"{kind} of {max(sizes)} bytes {replay}"
            logger.error("path %s is omitted: %s", name, refused[name])
        else:
            calls[name] = replay
    return calls, refused


def _merge(choices: Sequence[Choice]) -> tuple[Choice, ...]:
    """The same, without a size whose successor takes the same path."""
    following = itertools.zip_longest(choices, choices[1:])
    return tuple(choice for choice, after in following if after is None or choice.path != after.path)
