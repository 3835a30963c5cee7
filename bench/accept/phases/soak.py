"""Soak test (`--soak HOURS`): repeats the same work and finds ranks that become slower over time.

The last third of the times of each rank and group is compared with its first third; for a rank, relative to the common
drift of its peers, so that load on the whole machine blames none of them. Faults that stop a group are handled by
`trial`.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Mapping

from bench.accept.phases.trial import Say, Trial
from netlayer.verdict import MIN_PEERS, Finding, Verdict

PHASE = "soak"
_LEAST_CYCLES = 6
_LIMITS: tuple[tuple[Verdict, float], ...] = (("FAIL", 1.15), ("WARN", 1.08))
_SHARED_LIMITS: tuple[tuple[Verdict, float], ...] = (("FAIL", 1.5), ("WARN", 1.3))
_STEP = "read temperature, clocks and throttle reasons of {} over time (nvidia-smi dmon), and its NIC's error counters"
_ALONE = "run it again while nothing else runs on this machine (top)"


def soak(trial: Trial, seconds: float, say: Say) -> None:
    """Repeat GEMM on every rank and all-reduce on all, for `seconds` seconds."""
    times: dict[tuple[str, tuple[int, ...]], list[float]] = defaultdict(list)
    began = time.monotonic()
    cycle = 0
    try:
        while time.monotonic() - began < seconds:
            say(int(time.monotonic() - began), max(1, int(seconds)), f"cycle {cycle}")
            _cycle(trial, cycle, times)
            cycle += 1
    finally:  # an interrupted soak is judged too
        _conclude(trial, times, cycle)


def _cycle(trial: Trial, cycle: int, times: dict[tuple[str, tuple[int, ...]], list[float]]) -> None:
    work, before = trial.work, len(trial.rows)
    for _ in range(3 if work.shared else 1):
        trial.alone(PHASE, "gemm", work.gemm, trial.alive, turns=work.shared)
    trial.together(PHASE, "all_reduce", work.all_reduce, [trial.alive], turns=False)
    cycle_times: dict[tuple[str, tuple[int, ...]], list[float]] = defaultdict(list)
    for row in trial.rows[before:]:
        row["cycle"] = cycle
        for name in ("iterations_us", "blocks_us"):  # they would fill the disk over hours
            row.pop(name, None)
        cycle_times[row["check"], tuple(row["group"])].append(work.time_us(row))
    for key, each in cycle_times.items():
        times[key].append(work.combined(each))


def _conclude(trial: Trial, times: dict[tuple[str, tuple[int, ...]], list[float]], cycles: int) -> None:
    before = len(trial.findings)
    by_check: dict[str, dict[tuple[int, ...], float]] = defaultdict(dict)
    for (check, group), each in times.items():
        if len(each) >= _LEAST_CYCLES:
            third = len(each) // 3
            by_check[check][group] = statistics.median(each[-third:]) / statistics.median(each[:third])
    for check, ratios in by_check.items():
        _judge(trial, check, ratios, cycles)
    if len(trial.findings) == before:
        word: Verdict | None = "PASS" if cycles >= _LEAST_CYCLES else None
        expected = "no drift" if word else f"{_LEAST_CYCLES} cycles are needed to tell a drift"
        subject = f"{len(trial.alive)} ranks"
        trial.findings.append(Finding(word, subject, "drift", f"none in {cycles} cycles", expected, "", PHASE))


def _judge(trial: Trial, check: str, ratios: Mapping[tuple[int, ...], float], cycles: int) -> None:
    """Judge drifts of a check: the common drift is the room's or machine's, the rest belongs to the rank."""
    shared = trial.work.shared
    common = statistics.median(ratios.values()) if len(ratios) >= MIN_PEERS or len(next(iter(ratios))) > 1 else 1.0
    for group, ratio in ratios.items():
        verdict = _verdict(ratio / common, shared)
        if verdict is not None:
            subject = trial.label(group) if len(group) == 1 else f"{len(group)} ranks"
            figure = f"{ratio:.2f} times its time at the start (all: {common:.2f}), after {cycles} cycles"
            finding = Finding(
                verdict, subject, f"{check} drift", figure, "as at the start", _STEP.format(subject), PHASE
            )
            trial.flag(PHASE, "node" if len(group) == 1 else "group", group, finding)
    verdict = _verdict(common, shared)
    if verdict is not None:
        subject = f"{len(trial.alive)} ranks"
        figure = f"all of them {common:.2f} times their time at the start, after {cycles} cycles"
        if shared:  # other work on the machine is the likelier cause
            verdict, step = "WARN", _ALONE
        else:
            step = _STEP.format("all of them")
        trial.findings.append(Finding(verdict, subject, f"{check} drift", figure, "as at the start", step, PHASE))


def _verdict(ratio: float, shared: bool) -> Verdict | None:
    return next((word for word, limit in (_SHARED_LIMITS if shared else _LIMITS) if ratio > limit), None)
