"""Holds one server process for exactly as long as its owner lives, however the owner ends.

Run as a script, on the standard library alone: `python -I -S redis_guard.py LOG REMOVE COMMAND...`. Standard input is
a pipe whose other end only the owner has; at its end of file the server is stopped and the folder REMOVE ('' = none)
goes. When the server ends by itself, the guard says so on standard output. Killing the guard kills the server (Linux).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import sys
from collections.abc import Callable

GRACE_S = 5.0
_PR_SET_PDEATHSIG = 1


def main(log: str, remove: str, command: list[str]) -> None:
    """Run `command` until standard input ends, then stop it and remove the folder."""
    os.umask(0o077)
    server, alive = _start(command, log)
    ready, _, _ = select.select([0, alive], [], [])
    if alive in ready:
        with contextlib.suppress(OSError):  # the owner may have gone in the same instant
            os.write(1, b"ended\n")
        select.select([0], [], [])  # the owner still lives: what it sees in the folder stays until it goes
    _stop(server, alive)
    if remove:
        shutil.rmtree(remove, ignore_errors=True)


def _start(command: list[str], log: str) -> tuple[int, int]:
    """Start the server; return its process id, and a file descriptor that ends with it."""
    alive, write_end = os.pipe()
    os.set_inheritable(write_end, True)
    die_with_parent = _death_signal()
    guard = os.getpid()
    server = os.fork()
    if server == 0:
        try:
            die_with_parent()
            if os.getppid() == guard:
                _redirect(log)
                os.execv(command[0], command)
        except BaseException as exc:  # noqa: BLE001 - a forked child must never return into the guard's code
            os.write(2, f"{command[0]}: {exc}\n".encode())
        os._exit(127)
    os.close(write_end)
    return server, alive


def _stop(server: int, alive: int) -> None:
    try:
        os.kill(server, signal.SIGTERM)
        if not select.select([alive], [], [], GRACE_S)[0]:
            os.kill(server, signal.SIGKILL)
    except ProcessLookupError:
        pass
    os.waitpid(server, 0)


def _redirect(log: str) -> None:
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    os.dup2(out, 1)
    os.dup2(out, 2)


def _death_signal() -> Callable[[], object]:
    """A call for the forked child, looked up before the fork: die when the guard dies."""
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is None:
        return lambda: None  # not Linux: there the guard's death leaves the server running
    return lambda: prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], sys.argv[3:])
