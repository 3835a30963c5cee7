"""Host of a run's own Redis: a process that outlives the driver, so that executors hear from the next one.

Run as `python -m trainer.resilience.store_host OUT`. It ends when the run has ended, or when no driver has given a sign
of life (the file `beat`) for longer than executors wait for one. A server that ends by itself is started anew; nothing
is lost with it, for every message is sent again.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from netlayer.errors import NetlayerError
from netlayer.store.redis_server import EmbeddedRedis
from trainer.resilience.folder import RunFolder

_POLL_S = 0.3


def directory_of(folder: RunFolder) -> Path:
    """Return the folder of the server's socket: short, as its path must be, and private (`EmbeddedRedis` checks)."""
    key = hashlib.sha256(str(folder.out.resolve()).encode()).hexdigest()[:16]
    return Path(tempfile.gettempdir()) / f"netlayer-{os.geteuid()}-{key}"


def start(folder: RunFolder) -> subprocess.Popen[bytes]:
    """Start a run's host, in a session of its own."""
    with (folder.run / "store.log").open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "trainer.resilience.store_host", str(folder.out)],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def main(out: str) -> None:
    """Keep the server until the run ends, or its drivers have been gone for long."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    folder = RunFolder(Path(out))
    spec, directory = folder.spec(), directory_of(folder)
    liveness = _Liveness(folder, spec.resilience.orphan_s + 10)
    if directory.is_symlink():  # made by somebody else, in a folder where all may write
        sys.exit(f"error: {directory} is a symbolic link: remove it, or set TMPDIR to a folder of yours")
    try:
        while liveness.is_wanted():
            try:
                with EmbeddedRedis(directory=directory) as server:
                    folder.set_store_url(server.url)
                    while liveness.is_wanted() and server.is_running:
                        time.sleep(_POLL_S)
            except NetlayerError as exc:
                sys.stderr.write(f"error: {exc}\n")
                sys.stderr.flush()
                time.sleep(_POLL_S)
    finally:
        if folder.ended.exists():
            shutil.rmtree(directory, ignore_errors=True)


class _Liveness:
    """Whether the store is still wanted: by drivers' signs of life, which are timed by the steady clock alone."""

    def __init__(self, folder: RunFolder, limit_s: float) -> None:
        self._folder, self._limit_s = folder, limit_s
        self._beat_ns, self._seen_s = -1, time.monotonic()

    def is_wanted(self) -> bool:
        if self._folder.ended.exists():
            return False
        try:
            beat_ns = self._folder.beat.stat().st_mtime_ns
        except OSError:
            return False  # the folder itself is gone
        if beat_ns != self._beat_ns:
            self._beat_ns, self._seen_s = beat_ns, time.monotonic()
        return time.monotonic() - self._seen_s < self._limit_s


if __name__ == "__main__":
    main(sys.argv[1])
