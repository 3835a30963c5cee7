"""Ctrl-C: that it ends a command wherever it lands, and when nothing may break off, that it waits until that is over.

numpy and torch swallow a KeyboardInterrupt that lands in the middle of their import, or turn it into an ImportError
seconds later; files that are moved together would be moved in part. Left out: the interpreter's own start and the
import of the command line, before any code of ours runs.
"""

from __future__ import annotations

import math
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import NoReturn

_AGAIN_S = 0.01


class Interrupted(KeyboardInterrupt):
    """What a Ctrl-C raises in a command.

    A KeyboardInterrupt itself that leaves text given to `exec` or `eval`, as where a dataclass or a namedtuple is made,
    is noted by CPython as one that nobody catches (bpo-41602): `python -m` then ends by SIGINT, whatever exit code was
    chosen since. It looks for that very type.
    """


class Interrupts:
    """The handler of SIGINT while a command runs; `seen` counts."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, _signum: int, _frame: FrameType | None) -> NoReturn:
        self.seen += 1
        raise Interrupted


@contextmanager
def counted_interrupts() -> Iterator[Interrupts]:
    """Put this around a whole command: SIGINT raises Interrupted in it, again where that was dropped.

    What leaves a finaliser or the callback of a weak reference, and every import has such callbacks, is printed as
    "Exception ignored" and forgotten. Does nothing outside the main thread, and where SIGINT is ignored on purpose or
    another's.
    """
    interrupts, owner, report = Interrupts(), signal.getsignal(signal.SIGINT), sys.unraisablehook
    if threading.current_thread() is not threading.main_thread() or owner is not signal.default_int_handler:
        yield interrupts
        return
    main, over = threading.get_ident(), threading.Event()

    def raise_again() -> None:
        if not over.is_set():
            signal.pthread_kill(main, signal.SIGINT)

    def hear(dropped: sys.UnraisableHookArgs) -> None:
        if not issubclass(dropped.exc_type, KeyboardInterrupt):
            report(dropped)
            return
        again = threading.Timer(_AGAIN_S, raise_again)  # later, for raised here it would be dropped too
        again.daemon = True
        again.start()

    sys.unraisablehook = hear
    signal.signal(signal.SIGINT, interrupts)
    try:
        yield interrupts
    finally:
        over.set()
        sys.unraisablehook = report
        signal.signal(signal.SIGINT, owner)


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
    raises = owner is signal.default_int_handler or isinstance(owner, Interrupts)
    if threading.current_thread() is not threading.main_thread() or not (raises and callable(owner)):
        yield
        return
    seen = 0

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal seen
        seen += 1
        if seen > patience:
            owner(signum, frame)

    signal.signal(signal.SIGINT, note)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, owner)
        if seen:
            owner(signal.SIGINT, None)
