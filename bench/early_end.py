"""How a long bench ends early: SIGTERM as an exception wherever it comes, and the end in a word.

A time limit ends a call with SIGTERM and, some seconds later, SIGKILL. Between the two the record and the page of what
was measured are written. Left out: SIGKILL itself, after which the rows that were written stay.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

ASKED_TO_STOP = 128 + signal.SIGTERM
"""Exit code after SIGTERM."""


@contextlib.contextmanager
def ending_at_sigterm() -> Iterator[None]:
    """The first SIGTERM raises SystemExit(143) in the block; left to itself, it would end the process without a word.

    `timeout` sends it twice, to the process and to its group: later ones are dropped, while the results are written.
    Does nothing outside the main thread, and where somebody else has a handler or ignores it.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if not is_main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, _end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def reason_of(exc: BaseException) -> str:
    """What ended a call: `Ctrl-C`, `SIGTERM`, or what the error says."""
    if isinstance(exc, KeyboardInterrupt):
        return "Ctrl-C"
    if isinstance(exc, SystemExit) and isinstance(exc.code, int):
        known = {128 + number: number.name for number in signal.Signals}
        return known.get(exc.code, f"exit code {exc.code}")
    return str(exc) or type(exc).__name__


def _end(signum: int, _frame: FrameType | None) -> NoReturn:
    signal.signal(signum, signal.SIG_IGN)
    raise SystemExit(128 + signum)
