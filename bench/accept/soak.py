"""`--soak HOURS`: the same work over and over, and who becomes slower as time passes.

Each rank's and group's last third is held against its own first third. Left out: faults that stop a group, which the
trial itself names.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict

from bench.accept.trial import Say, Trial
from netlayer.verdict import Finding, Verdict

PHASE = "soak"
_LEAST_CYCLES = 6
_LIMITS: tuple[tuple[Verdict, float], ...] = (("FAIL", 1.15), ("WARN", 1.08))
_SHARED_LIMITS: tuple[tuple[Verdict, float], ...] = (("FAIL", 1.5), ("WARN", 1.3))
_STEP = "read temperature, clocks and throttle reasons of {} over time (nvidia-smi dmon), and its NIC's error counters"


def soak(trial: Trial, seconds: float, say: Say) -> None:
    """GEMM on every rank, then all-reduce among all, until the time is out."""
    times: dict[tuple[str, tuple[int, ...]], list[float]] = defaultdict(list)
    began = time.monotonic()
    cycle = 0
    try:
        while time.monotonic() - began < seconds:
            say(int(time.monotonic() - began), max(1, int(seconds)), f"cycle {cycle}")
            _cycle(trial, cycle, times)
            cycle += 1
    finally:  # a soak that is broken off is judged too
        _conclude(trial, times, cycle)


def _cycle(trial: Trial, cycle: int, times: dict[tuple[str, tuple[int, ...]], list[float]]) -> None:
    work, before = trial.work, len(trial.rows)
    for _ in range(3 if work.shared else 1):
        trial.alone(PHASE, "gemm", work.gemm, trial.alive, turns=work.shared)
    trial.together(PHASE, "all_reduce", work.all_reduce, [trial.alive], turns=False)
    found: dict[tuple[str, tuple[int, ...]], list[float]] = defaultdict(list)
    for row in trial.rows[before:]:
        row["cycle"] = cycle
        row.pop("iterations_us", None)  # hours of them would fill the disk
        found[row["check"], tuple(row["group"])].append(work.time_us(row))
    for key, each in found.items():
        times[key].append(work.combined(each))


def _conclude(trial: Trial, times: dict[tuple[str, tuple[int, ...]], list[float]], cycles: int) -> None:
    limits = _SHARED_LIMITS if trial.work.shared else _LIMITS
    drifted = False
    for (check, group), each in times.items():
        if len(each) < _LEAST_CYCLES:
            continue
        third = len(each) // 3
        ratio = statistics.median(each[-third:]) / statistics.median(each[:third])
        verdict = next((word for word, limit in limits if ratio > limit), None)
        if verdict is None:
            continue
        drifted = True
        who = trial.label(group) if len(group) == 1 else f"{len(group)} ranks"
        words = f"{ratio:.2f} times its time at the start, after {len(each)} cycles"
        finding = Finding(verdict, who, f"{check} drift", words, "as at the start", _STEP.format(who), PHASE)
        trial.accuse(PHASE, "node" if len(group) == 1 else "group", group, finding)
    if not drifted:
        word: Verdict | None = "PASS" if cycles >= _LEAST_CYCLES else None
        expected = "no drift" if word else f"{_LEAST_CYCLES} cycles are needed to tell a drift"
        who = f"{len(trial.alive)} ranks"
        trial.findings.append(Finding(word, who, "drift", f"none in {cycles} cycles", expected, "", PHASE))
