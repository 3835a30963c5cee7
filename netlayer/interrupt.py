"""Ctrl-C while modules load: noted, and delivered when they are loaded.

numpy and torch swallow a KeyboardInterrupt that lands in the middle of their import, or turn it into an ImportError
seconds later. Left out: the interpreter's own start, before any code of ours runs.
"""

from __future__ import annotations

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
    owner = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or owner is not signal.default_int_handler:
        yield
        return
    seen = False

    def note(_signum: int, _frame: FrameType | None) -> None:
        nonlocal seen
        if seen:
            raise KeyboardInterrupt
        seen = True

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, owner)
        if seen:
            raise KeyboardInterrupt
