"""The keeper of a launch: a process that outlives a launcher which was killed, and ends the ranks that it left.

Not covered: how ranks are started, and what ends them while their launcher lives (`netlayer.launch.launcher`).
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Collection
from pathlib import Path


def keep() -> None:
    """Entry of the keeper's process: stdin lists the ranks' process groups, and ends when the launcher has died."""
    groups = [int(line) for line in sys.stdin.buffer]
    for group in groups:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
    kill_strays(sys.argv[1])


def kill_strays(launch_id: str, spared: Collection[int] = ()) -> None:
    """SIGKILL for every process that carries our mark: daemons, and others that left their rank's process group.

    Args:
        launch_id: the mark.
        spared: process ids that carry it and stay, with all processes of the sessions that they lead.
    """
    for _ in range(100):  # again, for a process may have forked while we looked
        strays = [pid for pid in _find_strays(launch_id.encode()) if pid not in spared and _session(pid) not in spared]
        for pid in strays:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if not strays:
            return
        time.sleep(0.02)


def _session(pid: int) -> int:
    """Return the session of a process; 0: it has ended."""
    try:
        return os.getsid(pid)
    except OSError:
        return 0


def _find_strays(mark: bytes) -> list[int]:
    """Return the ids of processes whose environment holds the mark; none where the system has no /proc."""
    pids = []
    for file in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):  # ended meanwhile, or another user's
            if mark in file.read_bytes():
                pids.append(int(file.parent.name))
    return pids
