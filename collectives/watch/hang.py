"""Root cause of a hung collective: time limits derived from the step time, and the ranks at the end of the wait chain.

A collective hangs because of a rank of its group, or because of a rank of another group that this one waits for in
turn. So every rank along the chain is queried, and only a rank that waits for nobody is named as the culprit: its
process has exited or is stopped, it does not answer, it runs something else, or it launched a different collective.
Not covered: transport of the reports (`roll_call`), when to query (`watch`), and the message where only one group is
known (`diagnosis`).

[Note: what counts as a hang] By strength of the evidence, strongest first:
1. The process has exited or is stopped, as seen by another rank on the same host. Limit: `stopped_s`.
2. It does not answer: Python may be blocked in a library, a page fault or a garbage collection. Limit: `silent_s`.
3. It answers, waits for nobody and launches nothing. Limit: `silent_s`; not applied in a long phase (evaluation,
   checkpoint, compilation), where only the timeout of the process groups counts.
Until the step time is known, only case 1 counts. Where all ranks answer and wait, no rank is named.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from collectives.watch.diagnosis import Answer, Report, Stuck, first_difference
from netlayer.errors import CollectiveFailed, CollectiveTimeout, PeerLost
from netlayer.layout import ParallelLayout, describe_ranks

_STEPS = 16
_LEAST_STEPS = 3
# In step times, of the wait itself: with the time before it and the answers after it, within three step times.
_STOPPED_STEPS, _SILENT_STEPS = 1.75, 2.25
_STOPPED_FLOOR_S = 2.0
_MOST_DETAILED = 4
_ENDED, _SILENT, _DIFFERING, _MISSING, _EXCUSED = "ended", "silent", "differing", "missing", "excused"


@dataclass(frozen=True)
class HangLimits:
    """Time limits after which a rank that holds up the others is reported as hung.

    Args:
        timeout_s: fixed limit in seconds; 0 derives it from the step time (about three steps).
        floor_s: lower bound of the derived limit for a rank whose process is alive.
        start_s: limit for an exited or stopped process while the step time is not known yet.
        beat_s: seconds between two heartbeats that a rank writes to the store.
    """

    timeout_s: float = 0.0
    floor_s: float = 10.0
    start_s: float = 30.0
    beat_s: float = 1.0

    def stopped_s(self, step_s: float | None) -> float:
        """Return the limit for an exited or stopped process; `step_s` is the step time, None if not known yet."""
        if self.timeout_s:
            return self.timeout_s
        return self.start_s if step_s is None else max(_STOPPED_STEPS * step_s, min(self.floor_s, _STOPPED_FLOOR_S))

    def silent_s(self, step_s: float | None) -> float:
        """Return the limit for a rank that does not answer or runs something else; infinite without a step time."""
        if step_s is None:
            return float("inf")
        return self.timeout_s or max(_SILENT_STEPS * step_s, self.floor_s)


class Pace:
    """Median duration of the last steps on this rank in seconds, without the long phases in them."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_STEPS)
        self._begun_s: float | None = None
        self._apart_s = 0.0

    def begin_step(self) -> None:
        now_s = time.monotonic()
        if self._begun_s is not None:
            self._seconds.append(max(now_s - self._begun_s - self._apart_s, 0.0))
        self._begun_s, self._apart_s = now_s, 0.0

    def skip(self, seconds: float) -> None:
        """Exclude this much time (a checkpoint, an evaluation) from the duration of the current step."""
        self._apart_s += seconds

    @property
    def step_s(self) -> float | None:
        """Median step time; None until three steps are complete. The first step (warm-up) does not count."""
        seconds = list(self._seconds)[1 if len(self._seconds) < _STEPS else 0 :]
        if len(seconds) < _LEAST_STEPS:
            return None
        return statistics.median(seconds)


def own_process() -> str:
    """Return "PID START_TIME PID_NAMESPACE" of this process; the start time tells a reused PID apart."""
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        namespace = ""
    return f"{os.getpid()} {_stat(os.getpid())[1]} {namespace}"


def state_of(process: str) -> str:
    """Return the state of a process of this host, named by `own_process`: "stopped", "gone", else "".

    "" means that it runs, or that it cannot be seen from here (another PID namespace, no /proc).
    """
    pid, start, namespace = (*process.split(" "), "", "")[:3]
    here = own_process().split(" ")
    if not start or not pid.isdigit() or namespace != here[2] or not here[1]:
        return ""
    state, begun = _stat(int(pid))
    if begun != start or state in "ZX":
        return "gone"
    return "stopped" if state == "T" else ""


def _stat(pid: int) -> tuple[str, str]:
    """Return state and start time of a process from /proc/PID/stat; empty strings if it cannot be read."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(") ")[2].split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        return "", ""


@dataclass(frozen=True)
class Evidence:
    """Reports of the other ranks of a wait chain.

    Args:
        ranks: all ranks of the chain that were queried.
        answers: last report of each rank that ever wrote one.
        silent_s: for each rank that does not answer, seconds since the first unanswered query.
        states: `state_of` for the silent ranks of this host.
    """

    ranks: Sequence[int]
    answers: Mapping[int, Answer]
    silent_s: Mapping[int, float]
    states: Mapping[int, str]


def find_root(
    stuck: Stuck,
    evidence: Evidence,
    limits: HangLimits,
    step_s: float | None,
    layout: ParallelLayout | None,
) -> CollectiveFailed | None:
    """Return the error that names the ranks that cause a stuck collective; None where none can be named yet.

    Args:
        stuck: the collective that this rank waits in, `age_s` seconds so far.
        evidence: reports of the ranks that it waits for, directly or through other groups.
        limits, step_s: time limits, and the step time that they follow.
        layout: parallel layout of the job, for coordinates in the message.

    Returns:
        PeerLost where a connection broke, else CollectiveTimeout. It is returned, not raised.
    """
    kinds: dict[str, dict[int, str]] = {_ENDED: {}, _SILENT: {}, _DIFFERING: {}, _MISSING: {}}
    is_excused = False
    for rank in evidence.ranks:
        kind, fault = _fault(rank, stuck, evidence, limits, step_s)
        if kind == _EXCUSED:
            is_excused = True
        elif kind:
            kinds[kind][rank] = fault
    worst = next((kind for kind, ranks in kinds.items() if ranks), "")
    # A rank that waits for another one in a long phase is not the cause; an exited or stopped one is nevertheless.
    if not worst or (is_excused and worst != _ENDED):
        return None
    return _error(stuck, worst, kinds[worst], evidence.answers, layout)


def _fault(rank: int, stuck: Stuck, evidence: Evidence, limits: HangLimits, step_s: float | None) -> tuple[str, str]:
    """Return kind and description of a rank's fault, see [Note: what counts as a hang]; empty if it waits itself."""
    answer, state = evidence.answers.get(rank), evidence.states.get(rank, "")
    unheard_s, silent_s = evidence.silent_s.get(rank, 0.0), limits.silent_s(step_s)
    is_lost = bool(stuck.lost)  # a connection broke: no need to wait for a limit
    if answer is None or unheard_s > 0:
        if state and (is_lost or stuck.age_s >= limits.stopped_s(step_s)):
            return _ENDED, "has ended" if state == "gone" else "is stopped (SIGSTOP)"
        may_be_busy = answer is not None and answer.report.phase and not is_lost
        if not may_be_busy and (is_lost or min(stuck.age_s, unheard_s) >= silent_s):
            return _SILENT, "does not answer: dead, stopped, or hung outside Python"
        return _EXCUSED, ""
    report = answer.report
    difference = _difference(stuck, report)
    if difference is not None:
        return _DIFFERING, difference
    if report.waits_for:
        return "", ""
    has_given_up = any(progress.gave_up for progress in report.groups.values())  # it failed because of another rank
    if not report.phase and not has_given_up and min(report.idle_s, stuck.age_s) >= silent_s:
        return _MISSING, f"has launched no collective since {report.idle_s:.3g} s"
    return _EXCUSED, ""


def describe_rank(rank: int, host: str, layout: ParallelLayout | None) -> str:
    """Return `rank 2 (tp=0, pp=1, dp=0; host h)`, without the parts that are not known."""
    details = "; ".join(
        filter(None, (layout.describe([rank]) if layout is not None else "", f"host {host}" * bool(host)))
    )
    return f"rank {rank} ({details})" if details else f"rank {rank}"


def _difference(stuck: Stuck, report: Report) -> str | None:
    progress = report.groups.get(stuck.key)
    difference = None if progress is None else first_difference(stuck, progress)
    return None if difference is None else f"launched {difference[1]}, others {difference[0]}"


def _error(
    stuck: Stuck, kind: str, ranks: Mapping[int, str], answers: Mapping[int, Answer], layout: ParallelLayout | None
) -> CollectiveFailed:
    parts = []
    for rank, fault in list(ranks.items())[:_MOST_DETAILED]:
        report = answers[rank].report if rank in answers else None
        who, last = describe_rank(rank, report.host if report else "", layout), ""
        if report is not None:
            step = "" if report.step is None else f" at step {report.step}"
            place = f" in {report.place}" if report.place else ""
            last = f", last seen{step}{place}" if step or place else ""
            last += f" while it {report.phase}" if report.phase else ""
        parts.append(f"{who} {fault}{last}")
    rest = list(ranks)[_MOST_DETAILED:]
    if rest:
        parts.append(f"the same of {describe_ranks(rest)}")
    at = "" if stuck.step is None else f" at step {stuck.step}"
    outcome = f"failed after {stuck.age_s:.3g} s ({stuck.lost})" if stuck.lost else f"waits since {stuck.age_s:.3g} s"
    line = f"{'; '.join(parts)}; because of it {stuck.what(layout)}{at} {outcome}"
    culprits = tuple(sorted(ranks))
    named = {_MISSING: (culprits, (), ()), _DIFFERING: ((), (), culprits)}.get(kind, ((), culprits, ()))
    return (PeerLost if stuck.lost else CollectiveTimeout)(line, *named)
