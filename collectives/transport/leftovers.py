"""Leftovers of windows that are gone: memory of the peers, registrations with NCCL. Freed at a quiet point.

[Note: freeing] To free such memory is to wait for the device, and where a stream waits for a peer by then, for that
peer: Python's garbage collector would do it in the midst of a step. So what a collected object leaves is kept until a
quiet point: the next window that is opened, any `close`, a state that the host waits for (`state_dict`), or a call of
`release_left` between steps. Whoever knows that it is done calls `close`, which gives back at once.

[Note: rendezvous] Each rendezvous of torch's symmetric memory goes by keys in the store, which torch numbers by a
counter of the process, whatever the group. Ranks whose counters differ wait for each other's keys until the timeout: a
process that has had such windows cannot open any with one that has just been started. So they are counted here.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable

_left: list[Callable[[], object]] = []
_num_rendezvous = 0


def count_rendezvous() -> None:
    """Count a rendezvous of torch's symmetric memory that comes next: [Note: rendezvous]."""
    global _num_rendezvous
    _num_rendezvous += 1


def num_rendezvous() -> int:
    """Number of rendezvous of torch's symmetric memory that this process has begun, those that failed too."""
    return _num_rendezvous


class Leftover:
    """Resources that an object leaves: freed by `release`, or later where the garbage collector comes first.

    Args:
        owner: that is gone one day.
        give_back: must not hold the owner.
    """

    def __init__(self, owner: object, give_back: Callable[[], object]) -> None:
        self._finalizer = weakref.finalize(owner, _left.append, give_back)
        self._finalizer.atexit = False
        self._give_back: Callable[[], object] | None = give_back

    def release(self) -> None:
        """Give it back now, and what others have left. Twice does no harm."""
        if self._finalizer.detach() is not None and self._give_back is not None:
            self._give_back()
        self._give_back = None
        release_left()


def release_left() -> None:
    """Give back what collected windows have left. Waits for the device: call it between steps, on every rank."""
    while _left:
        _left.pop()()
