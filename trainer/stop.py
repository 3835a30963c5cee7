"""Asked to stop by a signal: the first is noted for the loop, which ends after a step; a second ends the process.

SIGTERM is what launchers, Slurm (scancel, preemption) and Kubernetes send; SIGUSR1 what Slurm sends ahead of a limit
(`--signal=USR1@60`). Not covered: Ctrl-C, and how ranks agree on the step (`trainer.loop`).

[Note: who counts] Under torchrun or srun this process counts the signals. Ranks of `netlayer.launch.launcher` leave
that to their launcher, which passes the first one on: a Slurm step's signal reaches it and them alike, and would count
twice. Other launchers pass it on as well, so where ranks count what comes within moments of the first is the same
request.

[Note: torchrun] It waits 30 s for its ranks, then it kills them: a checkpoint and a held-out batch that verifies it
take less, or newer ones are given more (`--shutdown-timeout`); a kill between the two leaves a whole one, pending. It
dies of SIGUSR1 unless TORCHELASTIC_SIGNALS_TO_HANDLE names it. Where torchrun itself is gone, nobody else would tell
its ranks, which have sessions of their own: the kernel sends them SIGTERM, and they stop in order too, those inside a
collective when it ends or times out.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator
from types import FrameType

from netlayer.launch.launcher import ECHO_S, PASSED_ON

logger = logging.getLogger(__name__)

_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_STARTED_BY = os.getppid()


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
def listening(*, counts: bool, follows: bool = False) -> Iterator[StopRequest]:
    """Note SIGTERM and SIGUSR1 in the block, and let through those that were held back since the process began.

    Args:
        counts: a second one, `ECHO_S` after the first or later, ends the process at once, with exit code 128 + its
            number: [Note: who counts].
        follows: from now on the end of the process that started this one is a SIGTERM too, where the kernel is Linux.

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
    if follows and sys.platform == "linux":
        _follow_parent(stop)
    try:
        yield stop
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        signal.set_wakeup_fd(woken)
        for signum, owner in before.items():
            signal.signal(signum, owner)
        theirs.shutdown(socket.SHUT_RDWR)  # closing alone would leave the copy that a forked process has
        theirs.close()
        thread.join()
        ours.close()


def _follow_parent(stop: StopRequest) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM):
        logger.warning("the end of the launcher will not be noticed: %s", os.strerror(ctypes.get_errno()))
    if os.getppid() != _STARTED_BY:  # it had gone before
        stop.ask()


def _leave_to_the_thread(_signum: int, _frame: FrameType | None) -> None:
    """The interpreter writes the number of every signal to the wake-up socket, also where this cannot run yet."""


def _note(numbers: socket.socket, stop: StopRequest, counts: bool) -> None:
    """Note signals, in a thread of its own: the main one may be inside a collective that never ends."""
    first_s = math.inf
    while received := numbers.recv(64):
        for signum in (number for number in received if number in PASSED_ON):
            if counts and time.monotonic() - first_s >= ECHO_S:
                faulthandler.dump_traceback(sys.__stderr__ or 2)
                os._exit(128 + signum)
            first_s = min(first_s, time.monotonic())
            stop.ask()
