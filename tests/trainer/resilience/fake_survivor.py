"""A training process without torch that can be kept: it notes who it is, and trains until it leaves.

Args: a folder; what is in it says how it goes: `fail` raises, `hang` waits in C, where no exception reaches.
"""

from __future__ import annotations

import ctypes
import os
import sys
import time
from pathlib import Path

from trainer.inprocess import on_failure
from trainer.resilience.progress import ProgressFile


def main(folder: Path) -> None:
    rank, start = os.environ["RANK"], os.environ["MASTER_PORT"]
    progress = ProgressFile.of(os.environ)
    assert progress is not None
    progress.begin()
    progress.add_step({"step": 5, "loss": 0.5, "step_ms": 30.0, "exposed_comm": 0.5})
    on_failure((folder / f"given-back-{start}-{rank}").touch)
    print(f"start {start} of rank {rank}", flush=True)
    (folder / f"pid-{start}-{rank}").write_text(str(os.getpid()))
    while True:
        if (folder / f"fail-{rank}").exists():
            raise RuntimeError("as asked")
        if (folder / f"hang-{rank}").exists():
            ctypes.CDLL(None).sleep(100)
        if (folder / "done").exists():
            return
        time.sleep(0.02)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
