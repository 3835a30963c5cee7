"""A training process without torch that can be kept: it notes who it is, and trains until it leaves.

Args: a folder; what is in it says how it goes: `fail` raises, `hang` waits in C, where no exception reaches, `blame` is
a verdict of a thread that the main one waits for, `window` opens one to the peers, `leave-again` leaves in the cleanup.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
from pathlib import Path

from collectives.transport.leftovers import Leftover, count_rendezvous
from netlayer.errors import NetlayerError
from trainer.inprocess import Leave, failing, on_failure
from trainer.resilience.progress import ProgressFile


class _Cycle:
    """Owner of a leftover that only the garbage collector frees."""

    def __init__(self) -> None:
        self.itself = self
        self.leftover: Leftover | None = None


def _leave() -> None:
    raise Leave


def _blame() -> None:
    """Be told by a thread, for which this one waits on its way out, that a peer is gone."""
    fail = failing(lambda error: os._exit(99))
    watch = threading.Thread(target=lambda: fail(NetlayerError("a peer is gone")))
    watch.start()
    try:
        while True:
            time.sleep(0.02)
    finally:
        watch.join()


def main(folder: Path) -> None:
    rank, start = os.environ["RANK"], os.environ["MASTER_PORT"]
    progress = ProgressFile.of(os.environ)
    assert progress is not None
    progress.begin()
    progress.add_step({"step": 5, "loss": 0.5, "step_ms": 30.0, "exposed_comm": 0.5})
    on_failure((folder / f"given-back-{start}-{rank}").touch)
    cycle = _Cycle()
    cycle.leftover = Leftover(cycle, (folder / f"released-{start}-{rank}").touch)
    del cycle
    if (folder / f"window-{rank}").exists():
        count_rendezvous()
    if (folder / f"leave-again-{rank}").exists():
        on_failure(_leave)
    print(f"start {start} of rank {rank}", flush=True)
    (folder / f"pid-{start}-{rank}").write_text(str(os.getpid()))
    while True:
        if (folder / f"fail-{rank}").exists():
            raise RuntimeError("as asked")
        if (folder / f"blame-{rank}").exists():
            _blame()
        if (folder / f"hang-{rank}").exists():
            ctypes.CDLL(None).sleep(100)
        if (folder / "done").exists():
            return
        time.sleep(0.02)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
