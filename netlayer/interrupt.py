"""Ctrl-C at a time when nothing may break off: noted, and delivered when that is over.

numpy and torch swallow a KeyboardInterrupt that lands in the middle of their import, or turn it into an ImportError
seconds later; files that are moved together would be moved in part. Left out: the interpreter's own start, before any
code of ours runs.
"""

from __future__ import annotations

import math
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_interrupt() -> Iterator[None]:
    """Put this around imports of large libraries. SIGINT ends the block with KeyboardInterrupt once it is done.

    A second Ctrl-C raises at once. Does nothing outside the main thread, and where SIGINT is ignored on purpose.
    """
    with _noted(patience=1):
        yield


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Put this around what must happen whole: no Ctrl-C, however often, ends it, and KeyboardInterrupt comes after it.

    Processes that begin inside never see one: they inherit the mask. The mask alone would not do: the kernel hands the
    signal to any thread that takes it, and a library's threads do.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with _noted():
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _noted(patience: float = math.inf) -> Iterator[None]:
    owner = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or owner is not signal.default_int_handler:
        yield
        return
    seen = 0

    def note(_signum: int, _frame: FrameType | None) -> None:
        nonlocal seen
        seen += 1
        if seen > patience:
            raise KeyboardInterrupt

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, owner)
        if seen:
            raise KeyboardInterrupt
