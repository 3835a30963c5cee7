"""Asked to stop by a signal: the first is noted for the loop, which ends after a step; a second ends the process.

SIGTERM is what launchers, Slurm (scancel, preemption) and Kubernetes send; SIGUSR1 what Slurm sends ahead of a limit
(`--signal=USR1@60`). Left out: Ctrl-C, and how ranks agree on the step (`trainer.loop`).

[Note: who counts] Under torchrun or srun this process counts the signals. Ranks of `netlayer.launch` leave that to
their launcher, which passes the first one on: a Slurm step's signal reaches it and them alike, and would count twice.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from types import FrameType

from netlayer.launch import PASSED_ON


class StopRequest:
    """Whether somebody has asked for the end of the training."""

    def __init__(self) -> None:
        self._noted = threading.Event()

    @property
    def is_asked(self) -> bool:
        return self._noted.is_set()

    def ask(self) -> None:
        self._noted.set()


@contextlib.contextmanager
def listening(*, counts: bool) -> Iterator[StopRequest]:
    """Note SIGTERM and SIGUSR1 in the block, and let through those that were held back since the process began.

    Args:
        counts: the second one ends the process at once, with exit code 128 + its number: [Note: who counts].

    Outside the main thread, where no handler can be set, it notes nothing.
    """
    stop = StopRequest()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    ours, theirs = socket.socketpair()
    theirs.setblocking(False)
    before = {signum: signal.signal(signum, _leave_to_the_thread) for signum in PASSED_ON}
    woken = signal.set_wakeup_fd(theirs.fileno(), warn_on_full_buffer=False)
    thread = threading.Thread(target=_note, args=(ours, stop, counts), name="stop signals", daemon=True)
    thread.start()
    mask = signal.pthread_sigmask(signal.SIG_UNBLOCK, PASSED_ON)
    try:
        yield stop
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.set_wakeup_fd(woken)
        for signum, owner in before.items():
            signal.signal(signum, owner)
        theirs.close()
        thread.join()
        ours.close()


def _leave_to_the_thread(_signum: int, _frame: FrameType | None) -> None:
    """The interpreter writes the number of every signal to the wake-up socket, also where this cannot run yet."""


def _note(numbers: socket.socket, stop: StopRequest, counts: bool) -> None:
    """In a thread of its own: the main one may be inside a collective that never ends."""
    while received := numbers.recv(64):
        for signum in (number for number in received if number in PASSED_ON):
            if stop.is_asked and counts:
                faulthandler.dump_traceback(sys.__stderr__ or 2)
                os._exit(128 + signum)
            stop.ask()
