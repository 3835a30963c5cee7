"""Verdicts on a run: stragglers, drift of MFU, traffic off its period, links at their limit, effective training time.

Each verdict says found, none or cannot tell, in one line with the figures that it rests on. A false accusation is
worse than none: what the events cannot show is said to be so.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from netlayer.layout import describe_ranks
from netlayer.observe.verdicts.run import COMPUTE, Run, Times, Traffic
from netlayer.observe.verdicts.straggler import MIN_PEERS, Detection, Suspect, detect

State = Literal["found", "none", "cannot tell"]

_MIN_DRIFT = 0.01
_WARM_UP_STEPS = 5
_QUARTER_STEPS = 5
_SLOW_LINK = 0.15
_MIN_TRANSFERS = 5
# Smaller ones never reach a link's rate: their latency dominates.
_MIN_TRANSFER_BYTES = 1 << 20
_AT_LIMIT = 0.9
_OFF_PERIOD = 0.5
_MIN_PERIODS = 8
_FACTORS: dict[str, Callable[[int], float]] = {
    "all_reduce": lambda ranks: 2 * (ranks - 1) / ranks,
    "all_gather": lambda ranks: (ranks - 1) / ranks,
    "reduce_scatter": lambda ranks: (ranks - 1) / ranks,
    "all_to_all": lambda ranks: (ranks - 1) / ranks,
}


@dataclass(frozen=True)
class Verdict:
    """One question about a run, answered.

    Args:
        subject: `straggler`, `slow link`, `drift`, `traffic`, `link limit`, `effective time`.
        state: found, none, or cannot tell.
        line: the answer for a person, with its figures.
        rows: the same by rank, link or cause, for tables.
    """

    subject: str
    state: State
    line: str
    rows: tuple[dict[str, Any], ...] = field(default=())


def judge(run: Run, link_gbps: float | None = None) -> tuple[list[Verdict], Detection]:
    """Answer every question about a run; also what the stragglers were judged by, for the heat map.

    Args:
        link_gbps: rate of a rank's link in Gb/s, each direction; None: not known.
    """
    detection = detect(run.own_s, run.stages) if len(run.ranks) else Detection((), "no rank has a step", run.own_s)
    verdicts = [
        straggler(run, detection),
        slow_link(run),
        drift(run, detection),
        traffic(run),
        link_limit(run, link_gbps),
        effective_time(run),
    ]
    return verdicts, detection


def straggler(run: Run, detection: Detection) -> Verdict:
    """Name the ranks that are slow, since when, and in what."""
    if detection.no_verdict:
        return Verdict("straggler", "cannot tell", detection.no_verdict)
    if not detection.suspects:
        seen = f"{len(run.ranks)} ranks, {len(run.steps)} steps"
        return Verdict("straggler", "none", f"{seen}; one slower by {detection.smallest:.1%} would be seen")
    rows, lines = [], []
    for suspect in detection.suspects:
        cause, share = _cause(run, suspect)
        rows.append(_suspect_row(run, suspect, cause, share))
        where = run.name(suspect.column)
        since = f"since step {run.steps[suspect.since]}" if suspect.since else f"in all {len(run.steps)} steps"
        lines.append(f"{where} is {suspect.slowdown:.1%} slower {since}: {cause} ({share:.0%} of it)")
    num_waiting = len(run.ranks) - len(rows)
    more = f"; and {len(lines) - 3} more" if len(lines) > 3 else ""
    cost = f"{num_waiting} ranks wait for {'it' if len(rows) == 1 else 'them'}: {detection.returned:.1%} of the step"
    sure = f"confidence {min(suspect.confidence for suspect in detection.suspects):.3f}"
    return Verdict("straggler", "found", f"{'; '.join(lines[:3])}{more}; {cost}; {sure}", tuple(rows))


def _suspect_row(run: Run, suspect: Suspect, cause: str, share: float) -> dict[str, Any]:
    return {
        "rank": run.ranks[suspect.column],
        "host": run.hosts[suspect.column],
        "since_step": run.steps[suspect.since],
        "slowdown": suspect.slowdown,
        "cause": cause,
        "cause_share": share,
        "score": suspect.score,
        "confidence": suspect.confidence,
        "judged_against": suspect.against,
    }


def _cause(run: Run, suspect: Suspect) -> tuple[str, float]:
    """Part of the own time that makes up most of what a suspect takes longer, and its share of that."""
    peers = [column for column in range(len(run.ranks)) if run.stages[column] == run.stages[suspect.column]]
    rows = slice(suspect.since, None)

    def excess(times: Times) -> float:
        return float(np.nanmean(times[rows, suspect.column]) - np.nanmean(np.nanmedian(times[rows][:, peers], axis=1)))

    whole = excess(run.own_s)
    parts = {name: excess(times) for name, times in run.segments.items() if name not in ("wait", "collective")}
    causes = {"slow computation": sum(parts.pop(name, 0.0) for name in COMPUTE)}
    names = {"data": "waiting for data", "gc": "garbage collection"}
    causes |= {names.get(name, name): seconds for name, seconds in parts.items()}
    causes["time outside all segments (host)"] = whole - sum(causes.values())
    cause = max(causes, key=lambda name: causes[name])
    return cause, min(1.0, causes[cause] / whole) if whole > 0 else 0.0


def slow_link(run: Run) -> Verdict:
    """Name the rank or pair that moves bytes more slowly than others do in the same collective."""
    rates = _rates(run)
    if rates is None:
        return Verdict("slow link", "cannot tell", "no collective has a size, a group and the times of all its ranks")
    suspects: dict[str, list[tuple[tuple[int, ...], float]]] = defaultdict(list)
    num_compared, at_full_speed = 0, set[int]()
    for kind, by_group in rates.items():
        medians = {ranks: float(np.median(each)) for ranks, each in by_group.items() if len(each) >= _MIN_TRANSFERS}
        if len(medians) < MIN_PEERS:
            continue
        num_compared += len(medians)
        centre = float(np.median(list(medians.values())))
        spread = 1.4826 * float(np.median(np.abs(np.array(list(medians.values())) - centre)))
        for ranks, rate in medians.items():
            if rate < (1 - _SLOW_LINK) * centre and rate < centre - 6 * spread:
                suspects[kind].append((ranks, 1 - rate / centre))
            elif rate > centre - 3 * spread:
                at_full_speed |= set(ranks)
    if not num_compared:
        reason = f"fewer than {MIN_PEERS} groups do the same collective with at least {_MIN_TRANSFERS} transfers each"
        return Verdict("slow link", "cannot tell", f"{reason}: a slow link slows its whole group alike")
    if not suspects:
        return Verdict("slow link", "none", f"{num_compared} groups and pairs move bytes at equal rates")
    slow = [ranks for groups in suspects.values() for ranks, _ in groups]
    # The slow link is in every slow group, and in no group that is at full speed.
    common = set(slow[0]).intersection(*map(set, slow[1:])) - (at_full_speed if len(slow) == 1 else set())
    rows: tuple[dict[str, Any], ...] = tuple(
        {"collective": kind, "ranks": describe_ranks(ranks), "slower": less}
        for kind, groups in suspects.items()
        for ranks, less in groups
    )
    worst = max(row["slower"] for row in rows)
    if len(common) == 1:
        [rank] = common
        where = run.name(run.ranks.index(rank)) if rank in run.ranks else f"rank {rank}"
        line = f"{where} is in all {len(slow)} slow groups: transfers up to {worst:.0%} slower than in like groups"
        return Verdict("slow link", "found", line, rows)
    groups_text = "; ".join(describe_ranks(ranks) for ranks in slow[:3])
    line = f"transfers of {groups_text} are up to {worst:.0%} slower than in like groups; which rank cannot be told"
    return Verdict("slow link", "found", line, rows)


def _rates(run: Run) -> dict[str, dict[tuple[int, ...], list[float]]] | None:
    """Bus rates in bytes/s of whole transfers, by collective (with group role and size) and its ranks."""
    from netlayer.observe.events import parse_ranks

    table = run.collectives
    if table is None:
        return None
    names = ("rank", "name", "group", "group_ranks", "bytes", "transfer_ns", "peer", "num_seen", "last_rank")
    rates: dict[str, dict[tuple[int, ...], list[float]]] = defaultdict(lambda: defaultdict(list))
    for rank, name, group, text, size, transfer_ns, peer, num_seen, last in zip(
        *(table[column].to_pylist() for column in names), strict=True
    ):
        if not size or size < _MIN_TRANSFER_BYTES or not transfer_ns or transfer_ns <= 0:
            continue
        if peer is not None:
            ranks = tuple(sorted((rank, peer)))
            factor = 1.0
            name = "send"
        else:
            try:
                ranks = tuple(parse_ranks(text))
            except ValueError:
                continue
            # Only where all ranks are seen is the wait for the last one taken out; its own record has none anyway.
            if len(ranks) < 2 or num_seen < len(ranks) or rank != last:
                continue
            factor = _FACTORS[name](len(ranks)) if name in _FACTORS else 1.0
        rates[f"{name} {group or ''} {size}"][ranks].append(size * factor / transfer_ns * 1e9)
    return rates or None


def drift(run: Run, detection: Detection) -> Verdict:
    """Say by how much steps became longer over the run, and what explains it."""
    step_s = _median_of_ranks(run.step_s)
    first = min(_WARM_UP_STEPS, len(step_s) // 10)
    quarter = max(_QUARTER_STEPS, (len(step_s) - first) // 4)
    if len(step_s) - first < 2 * quarter:
        return Verdict("drift", "cannot tell", f"{len(step_s)} steps: at least {2 * _QUARTER_STEPS} are needed")
    early, late = slice(first, first + quarter), slice(len(step_s) - quarter, None)

    def change(by_step: Times) -> float:
        # The mean: garbage collection in every tenth step moves no median.
        return float(np.nanmean(by_step[late]) - np.nanmean(by_step[early]))

    grown = change(step_s)
    before = float(np.nanmean(step_s[early]))
    noise = 1.4826 * float(np.nanmedian(np.abs(step_s - np.nanmedian(step_s)))) / math.sqrt(quarter)
    if grown < _MIN_DRIFT * before or grown < 3 * noise:
        return Verdict(
            "drift", "none", f"steps of {before:.3g} s became {grown / before:+.1%} longer from begin to end"
        )
    causes = {name: change(by_step) for name, by_step in _lost_by_cause(run, detection).items()}
    causes["not explained"] = grown - sum(causes.values())
    shares = {name: seconds / grown for name, seconds in causes.items() if abs(seconds) > 0.02 * grown}
    shares = dict(sorted(shares.items(), key=lambda pair: -pair[1]))
    rows = tuple({"cause": name, "share": share, "seconds_a_step": share * grown} for name, share in shares.items())
    parts = ", ".join(f"{name} {share:.0%}" for name, share in shares.items())
    line = (
        f"steps of {before:.3g} s became {grown / before:.1%} longer (MFU {before / (before + grown) - 1:.1%}): {parts}"
    )
    return Verdict("drift", "found", line, rows)


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
    throttled = {mark.origin.rank for mark in run.marks if mark.name == "throttle"}
    slow = [
        suspect.column
        for suspect in detection.suspects
        if run.ranks[suspect.column] in throttled or _cause(run, suspect)[0] == "slow computation"
    ]
    behind = compute - _median_of_ranks(compute)[:, None]
    word = "throttling" if throttled else "slow computation of stragglers"
    lost[word] = np.maximum(np.nanmax(behind[:, slow], axis=1), 0.0) if slow else np.zeros(len(run.steps))
    lost["computation of all ranks"] = _median_of_ranks(compute)
    waits = run.segments.get("data")
    if waits is not None:
        lost["waiting for data"] = np.nanmax(np.nan_to_num(waits), axis=1)
    own = run.own_s - np.nan_to_num(collected)
    own[:, slow] = np.nan
    rest = _median_of_ranks(own)
    skew = np.nanmax(np.where(np.isfinite(own), own, -np.inf), axis=1) - rest
    lost["launch skew"] = np.where(np.isfinite(skew), skew, 0.0)
    return lost


def _median_of_ranks(times: Times) -> Times:
    empty = np.asarray(~np.isfinite(times).any(axis=1))
    return np.asarray(np.nanmedian(np.where(empty[:, None], 0.0, times), axis=1) + np.where(empty, np.nan, 0.0))


def traffic(run: Run) -> Verdict:
    """Name the ports that moved less in a step than they used to, while the others did not."""
    if not run.traffic:
        return Verdict("traffic", "cannot tell", "no counters of bytes: sample them with netlayer nic watch")
    ends = np.array(run.step_end_ns)
    if len(ends) > _MIN_PERIODS:
        edges, period_s = ends, float(np.median(np.diff(ends))) / 1e9
    else:
        period_s = _period_s(run.traffic)
        if not period_s:
            return Verdict("traffic", "cannot tell", "the ports' traffic shows no period, and there are no steps")
        begin = min(int(port.start_ns[0]) for port in run.traffic)
        end = max(int(port.end_ns[-1]) for port in run.traffic)
        edges = np.arange(begin, end, round(period_s * 1e9))
    moved = np.stack([_bytes_between(port, edges) for port in run.traffic], axis=1)
    busy = np.median(moved, axis=0) > 0
    if len(moved) < _MIN_PERIODS or not busy.any():
        return Verdict(
            "traffic", "cannot tell", f"{len(moved)} periods: at least {_MIN_PERIODS} with traffic are needed"
        )
    relative = moved[:, busy] / np.median(moved[:, busy], axis=0)
    common = np.median(relative, axis=1) if busy.sum() > 2 else np.ones(len(relative))
    # Steps that are short of traffic for all ports are evaluation or a stop, not a port's fault.
    low = (relative < _OFF_PERIOD) & (common > 1 - _OFF_PERIOD / 2)[:, None]
    names = [port.port for port, is_busy in zip(run.traffic, busy, strict=True) if is_busy]
    rows: tuple[dict[str, Any], ...] = tuple(
        {"port": names[column], "periods_low": int(low[:, column].sum()), "first_low": int(np.argmax(low[:, column]))}
        for column in np.flatnonzero(low.sum(axis=0) >= 2)
    )
    period = f"period {period_s:.3g} s, {len(moved)} of them, {busy.sum()} ports"
    if not rows:
        return Verdict("traffic", "none", f"all ports keep their rhythm ({period})")
    worst = max(rows, key=lambda row: row["periods_low"])
    line = f"{worst['port']} moved less than half of its usual bytes in {worst['periods_low']} periods ({period})"
    return Verdict("traffic", "found", line + (f"; and {len(rows) - 1} more ports" if len(rows) > 1 else ""), rows)


def _period_s(ports: Sequence[Traffic]) -> float:
    """Period of the ports' summed traffic by its autocorrelation; 0 where none stands out."""
    port = max(ports, key=lambda one: float(one.bytes_moved.sum()))
    tick = float(np.median(port.end_ns - port.start_ns))
    if len(port.bytes_moved) < 4 * _MIN_PERIODS or tick <= 0:
        return 0.0
    series = port.bytes_moved - port.bytes_moved.mean()
    spectrum = np.fft.rfft(series, 2 * len(series))
    correlation = np.fft.irfft(spectrum * spectrum.conj())[: len(series) // 2]
    if correlation[0] <= 0:
        return 0.0
    correlation = correlation / correlation[0]
    below = np.flatnonzero(correlation < 0)
    if not len(below):
        return 0.0
    peak = below[0] + int(np.argmax(correlation[below[0] :]))
    return float(peak * tick / 1e9) if correlation[peak] > 0.3 else 0.0


def _bytes_between(port: Traffic, edges: Any) -> Times:
    """Bytes that a port moved between neighbouring edges, readings split in proportion."""
    times = np.concatenate([port.start_ns[:1], port.end_ns])
    total = np.concatenate([[0.0], np.cumsum(port.bytes_moved)])
    return np.asarray(np.diff(np.interp(edges, times, total)))


def link_limit(run: Run, link_gbps: float | None) -> Verdict:
    """Say whether data- and pipeline-parallel transfers reach the link's physical rate, link by link."""
    rates: dict[str, list[float]] = defaultdict(list)
    for kind, by_group in (_rates(run) or {}).items():
        name, group, _ = kind.rsplit(" ", 2)[0].partition(" ")[0], kind.split(" ", 1)[1].rsplit(" ", 1)[0], ""
        for ranks, each in by_group.items():
            rates[f"{name} {group} {describe_ranks(ranks)}".replace("  ", " ")] += each
    for port in run.traffic:
        seconds = (port.end_ns - port.start_ns) / 1e9
        rates[f"port {port.port}"] = (port.bytes_moved / seconds).tolist()
    if not rates:
        return Verdict(
            "link limit", "cannot tell", "no transfer of at least 1 MiB has a size and the times of its ranks"
        )
    best = {name: 8e-9 * float(np.quantile(each, 0.95)) for name, each in rates.items()}
    if link_gbps is None:
        top = max(best, key=lambda name: best[name])
        line = f"the rate of a link is not known (--link-gbps); highest: {best[top]:.4g} Gb/s, {top}"
        rows: tuple[dict[str, Any], ...] = tuple({"link": name, "gbps": rate} for name, rate in best.items())
        return Verdict("link limit", "cannot tell", line, rows)
    links: tuple[dict[str, Any], ...] = tuple(
        {"link": name, "gbps": rate, "of_limit": rate / link_gbps, "reached": rate >= _AT_LIMIT * link_gbps}
        for name, rate in sorted(best.items())
    )
    num = sum(bool(row["reached"]) for row in links)
    line = (
        f"{num} of {len(links)} links reach {_AT_LIMIT:.0%} of {link_gbps:g} Gb/s (95th percentile of their transfers)"
    )
    return Verdict("link limit", "found" if num else "none", line, links)


def effective_time(run: Run) -> Verdict:
    """Steps times step time over the whole time, and what each start of the run cost."""
    starts = [start for start in run.starts if start.last_ns > start.at_ns]
    if not starts or not len(run.steps):
        return Verdict("effective time", "cannot tell", "no step is recorded")
    total_s = (max(start.last_ns for start in starts) - min(start.at_ns for start in starts)) / 1e9
    trained_s = float(np.nansum(_median_of_ranks(run.step_s)))
    if trained_s > 1.05 * total_s:
        return Verdict(
            "effective time", "cannot tell", "the times of steps do not follow each other: a trace of samples"
        )
    rows: list[dict[str, Any]] = []
    for number, start in enumerate(starts):
        rows.append({
            "start": number,
            "first_step": start.first_step,
            "last_step": start.last_step,
            "seconds": (start.last_ns - start.at_ns) / 1e9,
            "down_before_s": (start.at_ns - starts[number - 1].last_ns) / 1e9 if number else 0.0,
            "steps_lost": _lost_steps(starts, number),
            "ended": start.ended,
        })  # fmt: skip
    lost = sum(row["steps_lost"] for row in rows)
    line = f"{trained_s / total_s:.1%}: {len(run.steps)} steps in {total_s:.4g} s"
    if len(starts) > 1:
        down_s = sum(row["down_before_s"] for row in rows)
        line += (
            f"; {len(starts) - 1} restarts cost {down_s:.4g} s between starts and {lost} steps that were taken again"
        )
    return Verdict("effective time", "found", line, tuple(rows))


def _lost_steps(starts: Sequence[Any], number: int) -> int:
    """Steps that a start took and a later one took again."""
    later = [start.first_step for start in starts[number + 1 :] if start.first_step is not None]
    last = starts[number].last_step
    return max(0, last - min(later) + 1) if later and last is not None else 0
