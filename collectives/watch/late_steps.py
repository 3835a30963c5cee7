"""Steps that are open for long: which of a program's steps are late, and what of them was handed over already.

[Note: late steps] A step reaches the monitor's ring when it ends, and in a run that hangs it never does. So of a step
that is open for longer than 5 s and twice the one before, the monitor's thread hands over what has ended, and marks
that the step is `late`: as soon as the rank waits for something else; within five seconds of anything else of it that
ends, so that the newest mark is soon no older than the record; and else ever more seldom, at least once a minute. A
process that is stopped or dead gives no such mark: that tells it from those that wait for it. The mark says in which
collective a rank waits, for whatever is on the way says nothing: a receive is posted early, and a forward pass contains
the waits for its parameters.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from collectives.clock import has_happened
from netlayer.observe.events import Mark, Origin

if TYPE_CHECKING:
    from collectives.watch.recorder import Collective, StepComm

LATE_S = 5.0
"""Age from which a step is late, and least pause between two marks that say the same, seconds."""
_MOST_PAUSE_S = 60.0
_LATE_STEPS = 2.0
_NUM_KEPT = 8  # late steps that have ended, and whose rows are on their way


@dataclass
class OpenStep:
    """A step that is open, as the monitor's thread sees it.

    Args:
        opened: the step of a recorder, or the number of a monitor's own; None: no step is open.
        usual_s: what the step before took.
        handed: `id` of the parts that were handed over before the step's end.
        marked_s, marked: when it was marked as late last, and what was so then: what had ended, and the wait.
    """

    opened: StepComm | int | None
    usual_s: float
    since_s: float = field(default_factory=time.monotonic)
    handed: set[int] = field(default_factory=set)
    marked_s: float = 0.0
    marked: tuple[int, Collective | None] = (0, None)

    @property
    def age_s(self) -> float:
        """Seconds since it was seen first."""
        return time.monotonic() - self.since_s

    @property
    def comm(self) -> StepComm | None:
        """Communication that a recorder knows of it; None: it is a monitor's own, whose parts come as they end."""
        return None if isinstance(self.opened, int) else self.opened

    @property
    def step(self) -> int | None:
        """Its number."""
        return self.opened if isinstance(self.opened, int) or self.opened is None else self.opened.step

    def open_wait(self) -> Collective | None:
        """Collective that the rank waits for now; None: none that is known."""
        try:
            return self.comm.open_wait() if self.comm is not None else None
        except RuntimeError:  # of an event that a graph has captured
            return None

    def take_mark(
        self, origin: Origin, now_ns: Callable[[], int], num_ended: int, ranks_of: Callable[[str], str | None]
    ) -> Mark | None:
        """Return the mark that is due now, which then counts as made; None: nothing new is to be said.

        Args:
            now_ns: clock of the marks.
            num_ended: segments that the record has beside the parts that were handed over; grows with each.
            ranks_of: text of a group's ranks.
        """
        wait = self.open_wait()
        now_s, num = time.monotonic(), len(self.handed) + num_ended
        pause_s = min(_MOST_PAUSE_S, max(LATE_S, self.marked_s - self.since_s))
        # Two collectives that are alike are two: the newer mark says that the older one has ended. Where the wait is
        # the same, what else has ended is said now and then: of a step that is slow, not stuck, something always has.
        if self.marked_s and wait is self.marked[1]:
            pause_s = pause_s if num == self.marked[0] else LATE_S
            if now_s - self.marked_s < pause_s:
                return None
        self.marked_s, self.marked = now_s, (num, wait)
        return Mark(origin, "late", now_ns(), self.step, None, self.age_s, attributes=describe_wait(wait, ranks_of))


def describe_wait(wait: Collective | None, ranks_of: Callable[[str], str | None]) -> dict[str, Any] | None:
    """Return what a late step waits for, as attributes of its mark: `waits_for`, `group`, `group_ranks`, `peer`, ...

    Args:
        ranks_of: text of a group's ranks.
    """
    if wait is None:
        return None
    facts = {name: wait.labels[name] for name in ("peer", "micro_batch") if name in wait.labels}
    return {"waits_for": wait.kind, "group": wait.group, "group_ranks": ranks_of(wait.group), **facts}


def is_over(part: Any) -> bool:
    """Whether a part of a step (computation, wait, collective) is known to have ended; only queries."""
    end = part.ended if hasattr(part, "ended") else part.end
    # What a wait ends with may have happened before the device has come to the wait.
    return end is not None and has_happened(end) and (part.start is None or has_happened(part.start))


class LateSteps:
    """Open steps of a monitor and of the recorders that it follows."""

    def __init__(self) -> None:
        self._open: dict[Hashable, OpenStep] = {}
        self._late: deque[OpenStep] = deque(maxlen=_NUM_KEPT)

    def look(self, opened: Iterable[tuple[Hashable, StepComm | int | None]]) -> Iterator[OpenStep]:
        """Yield the late ones of the steps that are open now.

        Args:
            opened: of each program part the step that it is in; None: it is in none.
        """
        for owner, step in opened:
            known = self._open.get(owner)
            if known is None or known.opened is not step:
                usual_s = 0.0 if known is None else known.usual_s if known.opened is None else known.age_s
                self._open[owner] = OpenStep(step, usual_s)
                continue
            if step is None or known.age_s < max(LATE_S, _LATE_STEPS * known.usual_s):
                continue
            if not known.marked_s:
                self._late.append(known)
            yield known

    def handed(self, comm: StepComm) -> set[int]:
        """Return the parts of a step that has ended which were handed over before its end."""
        return next((late.handed for late in self._late if late.comm is comm), set())
