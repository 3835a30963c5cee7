"""Host of a run's own Redis: a process that outlives the driver, so that executors hear from the next one.

Run as `python -m trainer.resilience.store_host OUT`. It ends when the run has ended, or when no driver has given a sign
of life (the file `beat`) for longer than executors wait for one. A server that ends by itself is started anew; nothing
is lost with it, for every message is sent again.
"""

from __future__ import annotations

import contextlib
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
    if directory.is_symlink():  # made by somebody else, in a folder where all may write
        sys.exit(f"error: {directory} is a symbolic link: remove it, or set TMPDIR to a folder of yours")
    try:
        while _is_wanted(folder, spec.resilience.orphan_s):
            try:
                with EmbeddedRedis(directory=directory) as server:
                    folder.set_store_url(server.url)
                    while _is_wanted(folder, spec.resilience.orphan_s) and server.is_running:
                        time.sleep(_POLL_S)
            except NetlayerError as exc:
                sys.stderr.write(f"error: {exc}\n")
                sys.stderr.flush()
                time.sleep(_POLL_S)
    finally:
        if folder.ended.exists():
            shutil.rmtree(directory, ignore_errors=True)


def _is_wanted(folder: RunFolder, orphan_s: float) -> bool:
    if folder.ended.exists():
        return False
    with contextlib.suppress(OSError):
        return time.time() - folder.beat.stat().st_mtime < orphan_s + 10
    return False  # the folder itself is gone


if __name__ == "__main__":
    main(sys.argv[1])
