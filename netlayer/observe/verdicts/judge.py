"""Verdicts on a run: stragglers, drift of MFU, traffic off its period, links at their limit, effective training time.

Each verdict says found, none or cannot tell, in one line with the figures that it rests on. A false accusation is
worse than none: what the events cannot show is said to be so.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from netlayer.observe.verdicts.links import link_limit, slow_link, traffic
from netlayer.observe.verdicts.run import COMPUTE, Run, Start, Times
from netlayer.observe.verdicts.straggler import Detection, Suspect, detect
from netlayer.observe.verdicts.verdict import CauseRow, StartRow, StragglerRow, Verdict

_MIN_DRIFT = 0.01
_WARM_UP_STEPS = 5
_QUARTER_STEPS = 5
_POWER_CAP = "power cap"
_NOT_EXPLAINED = "not explained"
_QUEUED = "waiting for a processor"
SLOW_COMPUTATION = "slow computation"
"""Cause of a straggler whose passes, optimizer and the like take longer than those of its peers."""
_WHOLE_STEPS, _LASTING_STEPS = 30, 100
"""Slow steps that confirm a suspect where nobody counted waits for a processor: of a whole record, and of a part."""
_BUSY_HOST = 0.1
"""Share of their own time that ranks wait for a processor, from which on a verdict says so."""
_BLIND = 1.0
"""Slowdown that a record must be able to show, else it cannot tell: ranks of a healthy job do not differ that much."""
_MANY_TIMES = 4.0
"""Times as long as its peers, from which on a line says so of a rank; as long as other steps: a pause."""
_UNRECORDED = 0.25
"""Share of a step by which a rank has less record than its peers, and less own time, to be looked at; also the least
share that must be in no record for nobody to be judged."""


def judge(
    run: Run, link_gbps: float | None = None, hung_ns: tuple[int, int] | None = None
) -> tuple[list[Verdict], Detection]:
    """Answer every question about a run; also what the stragglers were judged by, for the heat map.

    Args:
        link_gbps: rate of a rank's link in Gb/s, each direction; None: not known.
        hung_ns: begin and end of the time for which the run hangs at its end; None: it does not.
    """
    detection = find_stragglers(run)
    verdicts = [
        straggler(run, detection),
        slow_link(run),
        drift(run, detection),
        traffic(run),
        link_limit(run, link_gbps),
        effective_time(run, hung_ns),
    ]
    return verdicts, detection


def find_stragglers(run: Run) -> Detection:
    """Judge ranks by their own times without what they waited for a processor; who is slow by that alone is added.

    A processor that other work takes is a matter of the host. Where peers run on other hosts the rank is accused, and
    the cause says so. Where all share one host it is its neighbours' doing, and the rank next to it may be next.

    Records of other programs do not say what ranks waited for. Slowness that wanders from rank to rank (a neighbour's
    load, which moves on) looks there like a straggler until it hits another rank, so it must have lasted.
    """
    if not len(run.ranks):
        return Detection((), "no rank has a step", run.own_s)
    detection = detect(run.own_s - run.queued_s, run.stages, step_s=run.step_s)
    if run.shares_processors:
        doubt = "ranks share a host's processors, and what they waited for one is not recorded"
        return replace(detection, suspects=tuple(replace(one, doubt=one.doubt or doubt) for one in detection.suspects))
    if run.is_reported:
        suspects = (replace(one, doubt=one.doubt or _wandering_doubt(run, one)) for one in detection.suspects)
        return replace(detection, suspects=tuple(suspects))
    if not run.queued_s.any():
        return detection
    known = {suspect.column for suspect in detection.suspects}
    queued = [
        suspect if _on_busy_host_alone(run, suspect) else replace(suspect, doubt=suspect.doubt or _queue_doubt(run))
        for suspect in detect(run.own_s, run.stages, step_s=run.step_s).suspects
        if suspect.column not in known
    ]
    return replace(detection, suspects=(*detection.suspects, *queued))


def _wandering_doubt(run: Run, suspect: Suspect) -> str:
    num_slow = len(run.steps) - suspect.since
    needed = _LASTING_STEPS if suspect.since else _WHOLE_STEPS
    if num_slow >= needed:
        return ""
    return (
        f"cannot tell it from noise that moves on to another rank: {num_slow} slow steps, {needed} are needed where "
        "nothing says what ranks waited for a processor"
    )


def _on_busy_host_alone(run: Run, suspect: Suspect) -> bool:
    """Whether peers on other hosts wait for no processor while this host's ranks do."""
    others = [column for column, host in enumerate(run.hosts) if host != run.hosts[suspect.column]]
    return bool(others) and float(np.median(_queued_shares(run)[others])) < _BUSY_HOST / 2


def _queued_shares(run: Run) -> Times:
    """Share of its own time that each rank waited for a processor."""
    return np.asarray(np.nansum(run.queued_s, axis=0) / np.maximum(np.nansum(run.own_s, axis=0), 1e-12))


def _queue_doubt(run: Run) -> str:
    share = float(np.median(_queued_shares(run)))
    return (
        f"it waits for a processor, and so do all ranks: for {share:.0%} of their own time; the host is oversubscribed"
    )


def straggler(run: Run, detection: Detection) -> Verdict:
    """Name the ranks that are slow, since when, and in what; those that are not confirmed apart."""
    if detection.no_verdict:
        return Verdict("straggler", "cannot tell", detection.no_verdict)
    rows = straggler_rows(run, detection)
    if not detection.suspects:
        if reason := _unrecorded(run, detection):
            return Verdict("straggler", "cannot tell", reason)
        if detection.smallest >= _BLIND:
            line = f"times differ so much that only a rank slower by {detection.smallest:.0%} or more would be seen"
            return Verdict("straggler", "cannot tell", f"{len(run.ranks)} ranks, {len(run.steps)} steps: {line}")
        line = f"{len(run.ranks)} ranks, {len(run.steps)} steps; one slower by {detection.smallest:.1%} would be seen"
        busy = float(np.median(_queued_shares(run)))
        if busy >= _BUSY_HOST:
            line += f" (ranks wait for a processor {busy:.0%} of their own time, which is taken out)"
        return Verdict("straggler", "none", line)
    accused = detection.stragglers
    if not accused:
        line = _lines([f"{_line(run, one)}; not confirmed: {one.doubt}" for one in detection.suspects])
        return Verdict("straggler", "suspected", line, rows)
    first = min(suspect.since for suspect in accused)
    # By how much the slowest own time of each step shrinks without them, of the whole step.
    slowest_s, step_s = (float(np.nanmean(_largest(times[first:]))) for times in (run.own_s, run.step_s))
    cost = min(1.0, detection.returned * slowest_s / step_s)
    num_waiting = len(run.ranks) - len(accused)
    line = _lines([_line(run, one) for one in accused])
    line += f"; {num_waiting} ranks wait for {'it' if len(accused) == 1 else 'them'}: {cost:.1%} of each step's time"
    line += f"; confidence {min(one.confidence for one in accused):.3f}"
    return Verdict("straggler", "found", line, rows)


def _unrecorded(run: Run, detection: Detection) -> str:
    """Say why nobody can be called slow or not by what is in no record; empty: nothing speaks against it.

    A rank may do something that is in no record while its peers, it seems, work: where waits are inside a pass, as
    those of DDP are in a backward pass of Kineto, peers that wait look slow, and the rank that they wait for looks
    fast. And of most ranks more of a step may be in no record than what they are compared by.
    """
    known_s = run.own_s + sum((run.segments[name] for name in ("collective", "wait") if name in run.segments), 0.0)
    with np.errstate(invalid="ignore", divide="ignore"):
        missing = np.clip(1 - known_s / run.step_s, 0.0, 1.0)
    for stage in dict.fromkeys(run.stages):
        peers = [column for column, own in enumerate(run.stages) if own == stage]
        shares = [float(np.median(each)) if len(each) else 0.0
                  for each in (missing[np.isfinite(missing[:, column]), column] for column in peers)]  # fmt: skip
        usual = float(np.median(shares))
        hidden = [(share, column) for share, column in zip(shares, peers, strict=True) if share > usual + _UNRECORDED
                  and np.nanmedian(detection.relative[:, column]) < -_UNRECORDED]  # fmt: skip
        if 0 < len(hidden) <= len(peers) // 4:
            share, column = max(hidden)
            name = run.name(column)
            return (
                f"{share:.0%} of the step of {name} is in no record, of its peers' {usual:.0%}: "
                "they may wait for it inside what they recorded as their own work"
            )
    with np.errstate(invalid="ignore", divide="ignore"):
        compared = np.ravel(run.own_s / run.step_s)
    lacking = np.ravel(missing)[np.isfinite(compared)]
    compared = compared[np.isfinite(compared)]
    if len(lacking) and np.median(lacking) > max(_UNRECORDED, np.median(compared)):
        return (
            f"{np.median(lacking):.0%} of a step is in no record, more than the {np.median(compared):.0%} by which "
            "ranks could be compared: one may be slow there"
        )
    return ""


def _lines(lines: Sequence[str]) -> str:
    return "; ".join(lines[:3]) + (f"; and {len(lines) - 3} more" if len(lines) > 3 else "")


def _line(run: Run, suspect: Suspect) -> str:
    cause, share = _cause(run, suspect)
    since = f"since step {run.steps[suspect.since]}" if suspect.since else f"in all {len(run.steps)} steps"
    is_slow = f"is {suspect.slowdown:.1%} slower than its peers without waits"
    if suspect.slowdown >= _MANY_TIMES:
        is_slow = f"takes {1 + suspect.slowdown:.0f} times as long as its peers"
    name = run.name(suspect.column, run.steps[suspect.since])
    return f"{name} {is_slow} {since}: {cause} ({share:.0%} of the difference{_passes(run, suspect)})"


def _passes(run: Run, suspect: Suspect) -> str:
    """Say how much longer each kind of computation of a suspect takes than its peers', as `: forward +5 ms`."""
    if _cause(run, suspect)[0] != SLOW_COMPUTATION:
        return ""
    longer = {name: _excess(run, suspect, run.segments[name]) for name in COMPUTE if name in run.segments}
    most = max(longer.values(), default=0.0)
    parts = [f"{name} {1e3 * seconds:+.3g} ms" for name, seconds in longer.items() if seconds > 0.05 * most]
    return f": {', '.join(parts)} a step" if parts else ""


def straggler_rows(run: Run, detection: Detection) -> tuple[StragglerRow, ...]:
    """Return a row for each suspect, confirmed or not, with what makes it slow."""
    return tuple(_suspect_row(run, suspect) for suspect in detection.suspects)


def _suspect_row(run: Run, suspect: Suspect) -> StragglerRow:
    cause, share = _cause(run, suspect)
    return StragglerRow(
        rank=run.ranks[suspect.column],
        host=run.host_of(suspect.column, run.steps[suspect.since]),
        since_step=run.steps[suspect.since],
        slowdown=suspect.slowdown,
        cause=cause,
        cause_share=share,
        score=suspect.score,
        confidence=suspect.confidence,
        judged_against=suspect.against,
        confirmed=not suspect.doubt,
        doubt=suspect.doubt,
    )


def _cause(run: Run, suspect: Suspect) -> tuple[str, float]:
    """Part of the own time that makes up most of what a suspect takes longer, and its share of that."""
    whole = _excess(run, suspect, run.own_s)
    queued = _excess(run, suspect, run.queued_s)
    if whole > 0 and queued > whole / 2:
        return _QUEUED, min(1.0, queued / whole)
    whole -= queued
    parts = {
        name: _excess(run, suspect, times) for name, times in run.segments.items() if name not in ("wait", "collective")
    }
    causes = {SLOW_COMPUTATION: sum(parts.pop(name, 0.0) for name in COMPUTE)}
    names = {"data": "waiting for data", "gc": "garbage collection"}
    causes |= {names.get(name, name): seconds for name, seconds in parts.items()}
    causes["time outside all segments (host)"] = whole - sum(causes.values())
    cause = max(causes, key=lambda name: causes[name])
    return cause, min(1.0, causes[cause] / whole) if whole > 0 else 0.0


def _excess(run: Run, suspect: Suspect, times: Times) -> float:
    """Seconds a step by which times [step, rank] of a suspect are above the median of the ranks with equal work."""
    peers = [column for column in range(len(run.ranks)) if run.stages[column] == run.stages[suspect.column]]
    rows = slice(suspect.since, None)
    behind = times[rows, suspect.column] - _median_of_ranks(times[rows][:, peers])
    behind = np.sort(behind[np.isfinite(behind)])
    # A single long pause is no cause of what lasts; one in every few steps is.
    cut = len(behind) // 8
    return float(behind[cut : len(behind) - cut].mean()) if len(behind) else 0.0


def drift(run: Run, detection: Detection) -> Verdict:
    """Say by how much steps became longer over the run, and what explains it."""
    step_s = _median_of_ranks(run.step_s)
    first = min(_WARM_UP_STEPS, len(step_s) // 10)
    quarter = max(_QUARTER_STEPS, (len(step_s) - first) // 4)
    if len(step_s) - first < 2 * quarter:
        return Verdict("drift", "cannot tell", f"{len(step_s)} steps: at least {2 * _QUARTER_STEPS} are needed")
    early, late = slice(first, first + quarter), slice(len(step_s) - quarter, None)
    # One step in which a process was stopped is a pause, not steps that became longer.
    pauses = step_s > _MANY_TIMES * np.nanmedian(step_s)
    pauses &= pauses.sum() <= max(1, len(step_s) // 50)

    def change(by_step: Times) -> float:
        # The mean: garbage collection in every tenth step moves no median.
        by_step = np.where(pauses, np.nan, by_step)
        return float(np.nanmean(by_step[late]) - np.nanmean(by_step[early]))

    grown = change(step_s)
    before = float(np.nanmean(np.where(pauses, np.nan, step_s)[early]))
    noise = 1.4826 * float(np.nanmedian(np.abs(step_s - np.nanmedian(step_s)))) / math.sqrt(quarter)
    noise *= math.sqrt(max(_correlation_factor(step_s[part]) for part in (early, late)))
    if grown < _MIN_DRIFT * before or grown < 3 * noise:
        return Verdict("drift", "none", f"steps of {before:.3g} s changed by {grown / before:+.1%} from begin to end")
    causes = {name: change(by_step) for name, by_step in _lost_by_cause(run, detection).items()}
    causes[_NOT_EXPLAINED] = grown - sum(causes.values())
    shares = {name: seconds / grown for name, seconds in causes.items() if abs(seconds) > 0.02 * grown}
    shares = dict(sorted(shares.items(), key=lambda pair: -pair[1]))
    rows = tuple(CauseRow(name, share, share * grown) for name, share in shares.items())
    parts = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    line = (
        f"steps of {before:.3g} s became {grown / before:.1%} longer (MFU {before / (before + grown) - 1:.1%}): {parts}"
    )
    explained = [cause for cause in shares if cause != _NOT_EXPLAINED]
    if explained and explained[0] == _QUEUED:
        # Other work on the hosts comes and goes, and none of it is the job's; transfers by the hosts wait for it too.
        return Verdict("drift", "suspected", f"{line}; its hosts are oversubscribed", rows)
    return Verdict("drift", "found", line, rows)


def _correlation_factor(times: Times) -> float:
    """Return by how much correlation between neighbouring steps widens the variance of their mean; at least 1."""
    rest = times[np.isfinite(times)]
    rest = rest - rest.mean() if len(rest) else rest
    total = float((rest**2).sum())
    rho = min(0.9, max(0.0, float((rest[1:] * rest[:-1]).sum()) / total)) if total > 0 else 0.0
    return (1 + rho) / (1 - rho)


def _lost_by_cause(run: Run, detection: Detection) -> dict[str, Times]:
    """Seconds that each cause adds to a step, [step]; a step is as long as its slowest rank.

    Garbage collection: the longest of any rank. Throttling: by what suspects with slow computation are behind.
    Launch skew: how much later than the median rank the slowest one gets to its collectives for any other reason.
    """
    lost = {}
    compute: Times = np.zeros(run.own_s.shape)
    for name in COMPUTE:
        compute = compute + run.segments.get(name, 0.0)
    collected = run.segments.get("gc", np.zeros(run.own_s.shape))
    lost["garbage collection"] = np.nanmax(np.nan_to_num(collected), axis=1)
    throttled = _throttled(run)
    slow = [
        suspect.column
        for suspect in detection.stragglers
        if run.ranks[suspect.column] in throttled or _cause(run, suspect)[0] == SLOW_COMPUTATION
    ]
    behind = compute - _median_of_ranks(compute)[:, None]
    word = "throttling" if throttled else "slow computation of stragglers"
    lost[word] = np.maximum(np.nanmax(behind[:, slow], axis=1), 0.0) if slow else np.zeros(len(run.steps))
    many = len(throttled) > len(run.ranks) / 2
    word = "throttling of most ranks" if many else "computation of all ranks"
    lost[word] = _median_of_ranks(compute) - np.median(run.queued_s, axis=1)
    waits = run.segments.get("data")
    if waits is not None:
        lost["waiting for data"] = np.nanmax(np.nan_to_num(waits), axis=1)
    # A collection that waits for a processor is a collection: only what is beyond them is the wait's own.
    queued = np.maximum(run.queued_s - np.nan_to_num(collected), 0.0)
    if queued.any():
        lost[_QUEUED] = np.max(queued, axis=1)
    own = run.own_s - np.nan_to_num(collected) - queued
    own[:, slow] = np.nan
    rest = _median_of_ranks(own)
    skew = np.nanmax(np.where(np.isfinite(own), own, -np.inf), axis=1) - rest
    lost["launch skew"] = np.where(np.isfinite(skew), skew, 0.0)
    return lost


def _throttled(run: Run) -> set[int | None]:
    """Ranks whose processor lowered its clock; a power cap that most of them meet is how they always run."""
    by_reason: dict[str, set[int | None]] = defaultdict(set)
    for mark in run.marks:
        if mark.name == "throttle":
            by_reason[str((mark.attributes or {}).get("reason", ""))].add(mark.origin.rank)
    if len(by_reason.get(_POWER_CAP, ())) > len(run.ranks) / 2:
        del by_reason[_POWER_CAP]
    return set().union(*by_reason.values())


def _largest(times: Times) -> Times:
    """Largest value of each step; NaN where there is none."""
    largest = np.max(np.where(np.isfinite(times), times, -np.inf), axis=1)
    return np.asarray(np.where(np.isfinite(largest), largest, np.nan))


def _median_of_ranks(times: Times) -> Times:
    empty = np.asarray(~np.isfinite(times).any(axis=1))
    return np.asarray(np.nanmedian(np.where(empty[:, None], 0.0, times), axis=1) + np.where(empty, np.nan, 0.0))


def effective_time(run: Run, hung_ns: tuple[int, int] | None = None) -> Verdict:
    """Say which share of the whole time went into steps that count, and into what the rest went; they add up to 100%.

    Args:
        hung_ns: begin and end of the time for which the run hangs at its end; None: it does not.
    """
    starts = [start for start in run.starts if start.last_ns > start.at_ns]
    if not starts or not len(run.steps):
        return Verdict("effective time", "cannot tell", "no step is recorded")
    if not all(start.is_marked for start in starts):
        return Verdict("effective time", "cannot tell", "nothing says when the run began (the mark run_start)")
    begin_ns, end_ns = hung_ns or (0, 0)
    total_s = (max(end_ns, *(start.last_ns for start in starts)) - min(start.at_ns for start in starts)) / 1e9
    step_s = _median_of_ranks(run.step_s)
    trained_s = float(np.nansum(step_s))
    if trained_s > 1.05 * total_s:
        return Verdict(
            "effective time", "cannot tell", "the times of steps do not follow each other: a trace of samples"
        )
    of_start = np.array(run.attempts)
    rows = tuple(
        StartRow(
            start=number,
            first_step=start.first_step,
            last_step=start.last_step,
            seconds=(start.last_ns - start.at_ns) / 1e9,
            down_before_s=(start.at_ns - starts[number - 1].last_ns) / 1e9 if number else 0.0,
            until_first_step_s=None if start.first_ns is None else max(0, start.first_ns - start.at_ns) / 1e9,
            steps_lost=_lost_steps(starts, number),
            lost_s=start.lost_s,
            trained_s=float(np.nansum(step_s[of_start == start.attempt])),
            ended=start.ended,
        )
        for number, start in enumerate(starts)
    )
    line = f"{trained_s / total_s:.1%}: {len(run.steps)} steps in {total_s:.4g} s"
    if len(rows) > 1:
        lost = sum(row.steps_lost for row in rows)
        restarts = "1 restart" if len(rows) == 2 else f"{len(rows) - 1} restarts"
        # A killed rank takes what it had not written yet with it.
        bound = "" if all(row.ended for row in rows[:-1]) else "at least "
        line += f"; {restarts}, {bound}{lost} steps repeated"
    other_s = {
        "between starts": sum(row.down_before_s for row in rows),
        "in steps that were repeated later": sum(row.lost_s for row in rows),
        "before first steps": sum(row.until_first_step_s or 0.0 for row in rows),
        "checkpoints": sum(start.planned_s.get("checkpoint", 0.0) for start in starts),
        "evaluations": sum(start.planned_s.get("evaluation", 0.0) for start in starts),
        "hung at the end": (end_ns - begin_ns) / 1e9,
    }
    rest_s = total_s - trained_s - sum(other_s.values())
    if rest_s > 0.0005 * total_s:
        other_s["between steps and after each start's last one"] = rest_s
    line += "".join(f"; {name} {seconds / total_s:.1%}" for name, seconds in other_s.items() if seconds > 0)
    return Verdict("effective time", "found", line, rows)


def _lost_steps(starts: Sequence[Start], number: int) -> int:
    """Steps that a start took and a later one took again."""
    later = [start.first_step for start in starts[number + 1 :] if start.first_step is not None]
    last = starts[number].last_step
    return max(0, last - min(later) + 1) if later and last is not None else 0
