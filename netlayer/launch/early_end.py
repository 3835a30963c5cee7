"""Early end of a long command: a signal as an exception wherever it comes, and the reason in a word.

A time limit ends a call with SIGTERM and, some seconds later, SIGKILL. Between the two the record and the page of what
was measured are written, or what holds nothing is taken away. Not covered: SIGKILL itself, after which the rows that
were written stay.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

from netlayer.launch.interrupt import Raises, raised_again

ASKED_TO_STOP = 128 + signal.SIGTERM
"""Exit code after SIGTERM."""


class Ended(SystemExit):
    """Exception that the first of the signals raises; its code is 128 + the signal."""


class _Ending(Raises):
    """The handler: `timeout` sends SIGTERM twice, to the process and to its group, and later ones are dropped."""

    def __init__(self) -> None:
        self.first = 0

    def __call__(self, signum: int, _frame: FrameType | None) -> None:
        if not self.first:
            self.first = signum
            raise Ended(128 + signum)

    def forget(self) -> int:
        """The one that was raised in vain; the next one raises again."""
        signum, self.first = self.first, 0
        return signum


@contextlib.contextmanager
def ending_at(*signals: signal.Signals) -> Iterator[None]:
    """The first of them raises Ended in the block; left to itself, it would end the process without a word.

    Later ones are dropped, while results are written or folders taken away. Whoever sets handlers of their own in the
    block takes the signals over, and none is lost between. Does nothing outside the main thread, nor with a signal that
    somebody else has a handler for or ignores.
    """
    is_main = threading.current_thread() is threading.main_thread()
    handled = [signum for signum in signals if is_main and signal.getsignal(signum) is signal.SIG_DFL]
    if not handled:
        yield
        return
    ending = _Ending()
    with raised_again(Ended, ending.forget):
        for signum in handled:
            signal.signal(signum, ending)
        try:
            yield
        except Exception as exc:
            if ending.first:  # libraries make errors of their own of it
                raise Ended(128 + ending.first) from exc
            raise
        finally:
            for signum in handled:
                signal.signal(signum, signal.SIG_DFL)
    if ending.first:  # or forget it
        raise Ended(128 + ending.first)


def reason_of(exc: BaseException) -> str:
    """Return what ended a call: `Ctrl-C`, `SIGTERM`, or the error's text."""
    if isinstance(exc, KeyboardInterrupt):
        return "Ctrl-C"
    if isinstance(exc, SystemExit) and isinstance(exc.code, int):
        known = {128 + number: number.name for number in signal.Signals}
        return known.get(exc.code, f"exit code {exc.code}")
    return str(exc) or type(exc).__name__
