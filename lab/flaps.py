"""Cut the lab's cable for a while under one WRITE, for many timers and times, beside what the closed form says.

Runs inside the virtual machine: `lab/run.sh python3 -m lab.flaps /out/flaps.json`. A flap begins just before the
WRITE is posted on a fresh queue pair, so that the first send is lost. Writes a record of what was measured, the
prediction in each row.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from congestion.retransmit.timers import recovery_s, schedule
from congestion.verbs.measure import QpError, QpSettings, connected, pattern
from lab.cable import Cable
from netlayer.results import RunRecord, utc_now, write_text

NIC = "rxe"
PAIRS = ((12, 3), (14, 1), (14, 3), (14, 6), (16, 1), (16, 3), (16, 6), (18, 1), (18, 3), (14, 7))
FLAPS_S = (0.02, 0.1, 0.3, 1.0, 2.0, 5.0)
_BYTES = 4096
_SURE_S, _MOST_TRIES = 0.005, 10


def run_sure_flap(cable: Cable, timeout: int, retry_cnt: int, flap_s: float) -> dict[str, Any]:
    """`run_flap`, again where the machine stood still while it mended the cable: nobody knows when that was.

    Raises:
        RuntimeError: it always does.
    """
    for _ in range(_MOST_TRIES):
        row = run_flap(cable, timeout, retry_cnt, flap_s)
        if row["unsure_s"] <= _SURE_S:
            return row
    raise RuntimeError(f"the machine stands still for more than {_SURE_S} s each time; run less beside it")


def run_flap(cable: Cable, timeout: int, retry_cnt: int, flap_s: float, *, patience_s: float = 30.0) -> dict[str, Any]:
    """One WRITE into a cut cable that is mended after `flap_s`.

    Returns:
        the row: whether it passed, when, or when the queue pair went to error; times since the cut.
    """
    settings = QpSettings(timeout=timeout, retry_cnt=retry_cnt, mtu=4096)
    with connected("rxe0", "rxe1", _BYTES, settings) as (sender, receiver):
        sender.memory.fill(pattern(1, _BYTES), 0)
        cable.cut()
        cut = time.perf_counter()
        try:
            posted, (mend_began, mended), ended, status = _watch(cable, sender, receiver, cut, flap_s, patience_s)
        finally:
            if cable.is_down:
                cable.mend()
        right = receiver.memory.read(_BYTES, 0) == pattern(1, _BYTES)
    timers = schedule(NIC, timeout, retry_cnt)
    predicted = float(recovery_s(timers, mended, begin_s=posted))
    return {
        "timeout": timeout,
        "retry_cnt": retry_cnt,
        "flap_s": flap_s,
        "cut_for_s": mended,
        "unsure_s": mended - mend_began,
        "posted_s": posted,
        "survived": status == 0,
        "status": status,
        "data_right": right,
        "ended_s": ended,
        "predicted_survives": bool(np.isfinite(predicted)),
        "predicted_s": predicted if np.isfinite(predicted) else posted + timers.error_s,
    }


def _watch(
    cable: Cable, sender: Any, receiver: Any, cut: float, flap_s: float, patience_s: float
) -> tuple[float, tuple[float, float], float, int]:
    """When the WRITE was posted, the mending began and ended, the WRITE ended (all since the cut), and its status."""
    posted = time.perf_counter() - cut
    sender.write(receiver.address, _BYTES, 0, 0)
    mend_began = mended = ended = 0.0
    status = -1
    while not (mended and ended):
        now = time.perf_counter() - cut
        if not mended and now >= flap_s:
            mend_began = time.perf_counter() - cut
            cable.mend()
            mended = time.perf_counter() - cut
        if not ended:
            status = _poll(sender)
            ended = time.perf_counter() - cut if status >= 0 else 0.0
        if now > patience_s:
            raise RuntimeError(f"no completion within {patience_s:g} s")
        time.sleep(0.0005)
    return posted, (mend_began, mended), ended, status


def _poll(sender: Any) -> int:
    """-1: nothing yet; 0: the WRITE is done; else the status of its error."""
    try:
        return 0 if sender.poll() else -1
    except QpError as exc:
        return exc.status


def main(path: Path, repeats: int = 3) -> int:
    """All pairs and flaps; exit code 1 where a queue pair that survived delivered something wrong."""
    started, rows = utc_now(), []
    with Cable() as cable:
        for timeout, retry_cnt in PAIRS:
            for flap_s in FLAPS_S:
                for repeat in range(repeats):
                    row = {"repeat": repeat, **run_sure_flap(cable, timeout, retry_cnt, flap_s)}
                    rows.append(row)
                said = "passed" if row["survived"] else f"status {row['status']}"
                sys.stderr.write(
                    f"T {timeout} R {retry_cnt} flap {flap_s:g} s: {said} after {row['ended_s']:.3f} s, "
                    f"predicted {row['predicted_survives']} {row['predicted_s']:.3f} s\n"
                )
    record = RunRecord(
        name="lab.flaps",
        source="measured",
        rows=rows,
        started_utc=started,
        ended_utc=utc_now(),
        arguments={"pairs": [list(pair) for pair in PAIRS], "flaps_s": list(FLAPS_S), "repeats": repeats},
        environment={"platform": " ".join(_uname())},
        devices=["rxe0", "rxe1"],
    )
    write_text(path, record.to_json())
    return int(any(row["survived"] and not row["data_right"] for row in rows))


def _uname() -> tuple[str, str, str]:
    import os

    about = os.uname()
    return about.sysname, about.release, about.machine


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), *map(int, sys.argv[2:3])))
