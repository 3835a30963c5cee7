"""Who holds up a training step: limits that follow the pace of the run, and the root of a chain of waiting ranks.

A collective that waits is the fault of a rank of its group, or of somebody whom that rank waits for itself in another
group. So the ranks of the chain are asked, and only one that waits for nobody is to blame: a process that has ended or
was stopped, one that does not answer, one that runs something else meanwhile, or one that launched another collective.
Left out: how reports travel (`roll_call`), when to ask (`watch`), and the message where only one group is known
(`diagnosis`).

[Note: what counts as a hang] By the evidence, from the strongest on:
1. The process has ended, or is stopped: its neighbours on the host see that. `stopped_s`.
2. It does not answer: Python may stand still in a library, a page fault or a collection of garbage. `silent_s`.
3. It answers, waits for nobody, and launches nothing. `silent_s`; in a phase that takes its time (an evaluation, a
   checkpoint, a compilation) never: there the timeout of the process groups holds.
Before the pace of the run is known only 1 counts. Where all wait and answer, nobody is named.
"""

from __future__ import annotations

import os
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from collectives.diagnosis import Answer, Report, Stuck, first_difference
from netlayer.errors import CollectiveFailed, CollectiveTimeout, PeerLost
from netlayer.layout import ParallelLayout, describe_ranks

_STEPS = 16
_LEAST_STEPS = 3
_STOPPED_STEPS, _SILENT_STEPS = 1.75, 2.25  # of a wait: with what comes before and after it, within three step times
_STOPPED_FLOOR_S = 2.0
_MOST_DETAILED = 4
_ENDED, _SILENT, _DIFFERING, _MISSING, _EXCUSED = "ended", "silent", "differing", "missing", "excused"


@dataclass(frozen=True)
class HangLimits:
    """How long a rank may hold up the others before that is called a hang.

    Args:
        timeout_s: in seconds, whatever the pace; 0: three step times.
        floor_s: the least of it, where the evidence is not a process that was stopped or has ended.
        start_s: for such a process, until the pace is known.
        beat_s: between two signs of life that a rank writes to the store.
    """

    timeout_s: float = 0.0
    floor_s: float = 10.0
    start_s: float = 30.0
    beat_s: float = 1.0

    def stopped_s(self, step_s: float | None) -> float:
        """For a process that has ended or was stopped; `step_s`: the pace, None where it is not known."""
        if self.timeout_s:
            return self.timeout_s
        return self.start_s if step_s is None else max(_STOPPED_STEPS * step_s, min(self.floor_s, _STOPPED_FLOOR_S))

    def silent_s(self, step_s: float | None) -> float:
        """For a rank that does not answer, or does something else; infinite where the pace is not known."""
        if step_s is None:
            return float("inf")
        return self.timeout_s or max(_SILENT_STEPS * step_s, self.floor_s)


class Pace:
    """Seconds that a step takes here, without the phases in it that take their time: the median of the last few."""

    def __init__(self) -> None:
        self._seconds: deque[float] = deque(maxlen=_STEPS)
        self._begun_s: float | None = None
        self._apart_s = 0.0

    def begin_step(self) -> None:
        now_s = time.monotonic()
        if self._begun_s is not None:
            self._seconds.append(max(now_s - self._begun_s - self._apart_s, 0.0))
        self._begun_s, self._apart_s = now_s, 0.0

    def leave_out(self, seconds: float) -> None:
        """So much of the step under way is none."""
        self._apart_s += seconds

    @property
    def step_s(self) -> float | None:
        """None before a few steps were taken; the first is not counted, for it warms up."""
        seconds = list(self._seconds)[1 if len(self._seconds) < _STEPS else 0 :]
        if len(seconds) < _LEAST_STEPS:
            return None
        return statistics.median(seconds)


def own_process() -> str:
    """This process, so that others on its host find it and no later one of its number: id, start, namespace."""
    try:
        namespace = str(Path("/proc/self/ns/pid").readlink())
    except OSError:
        namespace = ""
    return f"{os.getpid()} {_stat(os.getpid())[1]} {namespace}"


def state_of(process: str) -> str:
    """What `own_process` named, as this host has it: `stopped`, `gone`, or empty where it runs or cannot be seen."""
    pid, start, namespace = (*process.split(" "), "", "")[:3]
    here = own_process().split(" ")
    if not start or not pid.isdigit() or namespace != here[2] or not here[1]:
        return ""
    state, begun = _stat(int(pid))
    if begun != start or state in "ZX":
        return "gone"
    return "stopped" if state == "T" else ""


def _stat(pid: int) -> tuple[str, str]:
    """State and start of a process; empty where there is none, or no /proc."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(") ")[2].split()
        return fields[0], fields[19]
    except (OSError, IndexError):
        return "", ""


@dataclass(frozen=True)
class Evidence:
    """What is known of the ranks of a chain, beside this one.

    Args:
        answers: the last report of each that has ever written one.
        asked: every rank of the chain.
        silent_s: seconds since the first question that a rank has not answered.
        states: of processes of this host, as `state_of` gives them.
    """

    asked: Sequence[int]
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
    """The error that names the ranks because of whom a collective is stuck; None where nobody is to blame yet.

    Args:
        stuck: the collective in which this rank waits; `age_s` since when.
        evidence: of the ranks that it waits for, one after the other.
        limits, step_s: how long a rank may do so.
        layout: of the job, for coordinates.

    Returns:
        PeerLost where a connection broke, else CollectiveTimeout; nothing is raised here.
    """
    kinds: dict[str, dict[int, str]] = {_ENDED: {}, _SILENT: {}, _DIFFERING: {}, _MISSING: {}}
    is_excused = False
    for rank in evidence.asked:
        kind, fault = _fault(rank, stuck, evidence, limits, step_s)
        if kind == _EXCUSED:
            is_excused = True
        elif kind:
            kinds[kind][rank] = fault
    worst = next((kind for kind, ranks in kinds.items() if ranks), "")
    # Whoever waits for one that takes its time is no cause; who has ended or was stopped is one all the same.
    if not worst or (is_excused and worst != _ENDED):
        return None
    return _error(stuck, worst, kinds[worst], evidence.answers, layout)


def _fault(rank: int, stuck: Stuck, evidence: Evidence, limits: HangLimits, step_s: float | None) -> tuple[str, str]:
    """The kind of a rank's fault, and what it is: [Note: what counts as a hang]. Empty where it waits itself."""
    answer, state = evidence.answers.get(rank), evidence.states.get(rank, "")
    unheard_s, silent_s = evidence.silent_s.get(rank, 0.0), limits.silent_s(step_s)
    is_lost = bool(stuck.lost)  # a connection has broken: no time need pass
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
    has_given_up = any(progress.gave_up for progress in report.groups.values())  # because of somebody else
    if not report.phase and not has_given_up and min(report.idle_s, stuck.age_s) >= silent_s:
        return _MISSING, f"has launched no collective since {report.idle_s:.3g} s"
    return _EXCUSED, ""


def describe_rank(rank: int, host: str, layout: ParallelLayout | None) -> str:
    """`rank 2 (tp=0, pp=1, dp=0; host h)`."""
    shown = "; ".join(
        filter(None, (layout.describe([rank]) if layout is not None else "", f"host {host}" * bool(host)))
    )
    return f"rank {rank} ({shown})" if shown else f"rank {rank}"


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
