"""Ring of what a training thread hands to a monitor's: bounded, and neither thread waits for the other."""

from __future__ import annotations

import threading
from collections import deque
from typing import Generic, TypeVar

Entry = TypeVar("Entry")


class Ring(Generic[Entry]):
    """Entries that wait to be converted; where they weigh more than the capacity, the oldest go and are counted.

    Who adds takes a lock that only others who add take: the monitor's thread could lose the interpreter's lock while
    it had it, and the training thread would wait for both. Who takes needs none: a deque gives each entry once.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._entries: deque[tuple[Entry, int]] = deque()
        self._num_added = self._num_taken = self._num_lost = self._num_reported = 0
        # A lock that the same thread may take twice: garbage collection, which is timed, may begin inside.
        self._lock = threading.RLock()

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, entry: Entry, weight: int = 1) -> None:
        """Append an entry, which stands for `weight` events."""
        with self._lock:
            self._entries.append((entry, weight))
            self._num_added += weight
            while self._num_added - self._num_taken - self._num_lost > self._capacity:
                try:
                    _, gone = self._entries.popleft()
                except IndexError:  # taken meanwhile, and counted in a moment
                    break
                self._num_lost += gone

    def take(self) -> Entry | None:
        """Remove the oldest entry and return it; None: there is none. One thread at a time."""
        try:
            entry, weight = self._entries.popleft()
        except IndexError:
            return None
        self._num_taken += weight
        return entry

    def take_lost(self) -> int:
        """Number of events that were lost since the last call."""
        now = self._num_lost  # read once: who adds may raise it meanwhile
        lost, self._num_reported = now - self._num_reported, now
        return lost
