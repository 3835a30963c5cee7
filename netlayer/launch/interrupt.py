"""Ctrl-C: that it ends a command wherever it lands, and when nothing may break off, that it waits until that is over.

numpy and torch swallow a KeyboardInterrupt that lands in the middle of their import, or turn it into an ImportError
seconds later; files that are moved together would be moved in part. The same holds of other signals where their handler
raises (`netlayer.launch.early_end`). Not covered: the interpreter's own start, before any code of ours runs.
"""

from __future__ import annotations

import math
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any, NoReturn

_AGAIN_S = 0.01
_RAISING = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # what handlers of ours raise at


def end_quietly_until_a_command_runs() -> None:
    """Let Ctrl-C end the imports of a `python -m` run of the package that calls this without a traceback.

    They take seconds. For a package's `__init__`, which is imported first; elsewhere it does nothing.
    """
    is_run = sys.argv[:1] == ["-m"]  # until the module is found
    if is_run and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)


class Interrupted(KeyboardInterrupt):
    """KeyboardInterrupt that a Ctrl-C raises in a command.

    A KeyboardInterrupt itself that leaves text given to `exec` or `eval`, as where a dataclass or a namedtuple is made,
    is noted by CPython as one that nobody catches (bpo-41602): `python -m` then ends by SIGINT, whatever exit code was
    chosen since. It looks for that very type.
    """


class Raises:
    """A signal's handler that raises; what may not be interrupted delays it."""


class Interrupts(Raises):
    """The handler of SIGINT while a command runs; `seen` counts."""

    def __init__(self) -> None:
        self.seen = 0

    def __call__(self, _signum: int, _frame: FrameType | None) -> NoReturn:
        self.seen += 1
        raise Interrupted


@contextmanager
def counted_interrupts() -> Iterator[Interrupts]:
    """Put this around a whole command: SIGINT raises Interrupted in it, again where that was dropped.

    Does nothing outside the main thread, and where SIGINT is ignored on purpose or another's.
    """
    interrupts, owner = Interrupts(), signal.getsignal(signal.SIGINT)
    is_free = owner in (signal.default_int_handler, signal.SIG_DFL)
    if threading.current_thread() is not threading.main_thread() or not is_free:
        yield interrupts
        return
    with raised_again(KeyboardInterrupt, lambda: signal.SIGINT):
        signal.signal(signal.SIGINT, interrupts)
        try:
            yield interrupts
        finally:
            signal.signal(signal.SIGINT, owner)


@contextmanager
def raised_again(what: type[BaseException], signal_of: Callable[[], int]) -> Iterator[None]:
    """Send this main thread the signal that `signal_of` gives once more, if `what` was dropped in the block.

    What leaves a finaliser or the callback of a weak reference, and every import has such callbacks, is printed as
    "Exception ignored" and forgotten.
    """
    report, main, over = sys.unraisablehook, threading.get_ident(), threading.Event()

    def raise_again(signum: int) -> None:
        if not over.is_set():
            signal.pthread_kill(main, signum)

    def hear(dropped: sys.UnraisableHookArgs) -> None:
        if not issubclass(dropped.exc_type, what):
            report(dropped)
            return
        again = threading.Timer(_AGAIN_S, raise_again, [signal_of()])  # later, for raised here it would be dropped too
        again.daemon = True
        again.start()

    sys.unraisablehook = hear
    try:
        yield
    finally:
        over.set()
        sys.unraisablehook = report


@contextmanager
def held_interrupt() -> Iterator[None]:
    """Put this around imports of large libraries. SIGINT ends the block with KeyboardInterrupt once it is done.

    A second Ctrl-C raises at once. Other signals whose handler raises wait too. SIGINT that is ignored on purpose stays
    so. Does nothing outside the main thread.
    """
    with _delayed_signals(most_interrupts=1):
        yield


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Put this around what must happen whole: no Ctrl-C, however often, ends it, and KeyboardInterrupt comes after it.

    Other signals whose handler raises wait too; they are not masked, for processes that begin here must end by them.
    Processes that begin inside never see one: they inherit the mask. The mask alone would not do: the kernel hands the
    signal to any thread that takes it, and a library's threads do.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        with _delayed_signals():
            yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _delayed_signals(most_interrupts: float = math.inf) -> Iterator[None]:
    """Delay signals whose handler raises to the block's end, where the first is raised.

    SIGINT is raised at once where it came more than `most_interrupts` times.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {signum: signal.getsignal(signum) for signum in _RAISING}
    owners: dict[int, Any] = {signum: owner for signum, owner in handlers.items() if _raises(owner)}
    seen: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        seen.append(signum)
        if signum == signal.SIGINT and seen.count(signum) > most_interrupts:
            owners[signum](signum, frame)

    for signum in owners:
        signal.signal(signum, note)
    try:
        yield
    finally:
        for signum, owner in owners.items():
            signal.signal(signum, owner)
        if seen:
            owners[seen[0]](seen[0], None)


def _raises(owner: object) -> bool:
    return owner is signal.default_int_handler or isinstance(owner, Raises)
