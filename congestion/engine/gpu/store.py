"""Room for more packets in queues, when a run stops for want of free chunks."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from congestion.engine.gpu.tables import CHUNK, GIVEN, TAKEN, Tables
from congestion.engine.tables import Ints, aligned


def with_room(s: Tables, reserve: int) -> Tables:
    """Return the tables with more chunks; `s` is on the host."""
    many = len(s.following)
    more = more_chunks(many, reserve)
    entry, following = aligned(more * CHUNK, s.entry.dtype), np.zeros(more, dtype=np.uint32)
    entry[: many * CHUNK], following[:many] = s.entry, s.following
    return s._replace(entry=entry, following=following, free=with_new(s.free, s.clock, more))


def more_chunks(many: int, reserve: int) -> int:
    """Number of chunks to have next, after `many` were too few."""
    return 2 * many + reserve


def with_new(free: NDArray[np.uint32], clock: Ints, more: int) -> NDArray[np.uint32]:
    """The ring of free chunks for `more` in all, the new ones in it; `clock` tells its two ends, before and after."""
    many = len(free)
    left = free[np.arange(clock[TAKEN], clock[GIVEN]) % many]
    made = np.zeros(more, dtype=np.uint32)
    made[: len(left)] = left
    made[len(left) : len(left) + more - many] = np.arange(many, more)
    clock[TAKEN], clock[GIVEN] = 0, len(left) + more - many
    return made
