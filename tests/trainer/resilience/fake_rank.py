"""A training process without torch: it takes steps with its peers by files, saves, resumes, and ends at SIGTERM.

All ranks of an incarnation step together: each writes its step, and goes on when all others have written theirs. After
step `HOLD` they wait for the file `go`, or for the end.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from trainer.resilience.progress import ProgressFile

HOLD = 45


def main(out: Path, steps: int) -> int:
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    progress = ProgressFile.of(os.environ)
    assert progress is not None
    asked: list[int] = []
    signal.signal(signal.SIGTERM, lambda signum, _frame: asked.append(signum))
    meeting = out / f"steps-{os.environ['MASTER_PORT']}"
    meeting.mkdir(exist_ok=True)
    saved = out / "saved"
    first = int(saved.read_text()) if saved.exists() else 0
    print(f"rank {rank} of {world} starts after step {first} \x1b[31m<b>red</b>", flush=True)
    progress.begin()
    for step in range(first + 1, steps + 1):
        while step == HOLD + 1 and not (asked or (out / "go").exists() or (meeting / "stop").exists()):
            time.sleep(0.02)
        (meeting / f"{step}-{rank}").touch()
        while len(list(meeting.glob(f"{step}-*"))) < world:
            time.sleep(0.01)
        time.sleep(0.02)
        progress.add_step({"step": step, "loss": 1 / step, "step_ms": 30.0, "exposed_comm": 0.5})
        # Who has asked writes that down, so that all end after the same step.
        if asked and not (meeting / "stop").exists():
            (meeting / "stop").write_text(str(step + 2))
        ends = (meeting / "stop").exists() and step >= int((meeting / "stop").read_text() or 10**9)
        if rank == 0 and (step % 10 == 0 or ends):
            part = out / "saved.part"
            part.write_text(str(step))
            part.replace(saved)
        if ends:
            return 0
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), int(sys.argv[2])))
