"""Runs over several hosts, intersected: which host do the slow ones have in common, and who is cleared by a fast one.

A run is as slow as its slowest host or link. So every host of a fast run is well, and a slow run is the doing of one of
the others in it. Two slow runs that have one host in common point at that host; a single one leaves all its hosts that
no fast run clears, and the path between them: nobody is drained for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from bench.accept.evidence.log import Figure
from netlayer.verdict import MIN_PEERS, Finding, Verdict

# Slow and fast are two levels: a gap between neighbours in the order of speed, and both sides of it must be close to
# one another. What scatters without a gap is told from nobody.
_GAP = 0.87
_LEVEL = 0.85
# As wide as nodes that are well may differ.
_SPREAD = 1.25
_MAX_NAMED = 4


class HostRun(NamedTuple):
    """One run over several hosts.

    Args:
        hosts: of the run.
        score: its speed over the median of all runs, over the points of the series.
        file, figure: where it stands; the figure that is shown, at the largest message.
        median: of all runs at that point.
    """

    hosts: tuple[str, ...]
    score: float
    file: str
    figure: Figure
    median: float


class HostFindings(NamedTuple):
    """Findings, in words what the runs were held against, and whether that is a judgement."""

    findings: tuple[Finding, ...]
    note: str
    judged: bool


def judge_host_runs(series: str, runs: Sequence[HostRun]) -> HostFindings:
    """What runs over several hosts say of the hosts."""
    ordered = sorted(runs, key=lambda run: run.score)
    ratio = ordered[-1].score / ordered[0].score if ordered else 1.0
    if len(runs) < 2:
        return HostFindings((), f"no other run over as many hosts; {MIN_PEERS} are needed to tell the odd one", False)
    levels = _two_levels(ordered)
    if levels is None:
        if ratio <= _SPREAD:
            if len(runs) < MIN_PEERS:
                return HostFindings((), f"{len(runs) - 1} other runs alike; {MIN_PEERS} are needed", False)
            return HostFindings((_passed(series, ordered),), f"{len(runs)} runs alike, within {ratio:.2f} times", True)
        return HostFindings(
            (_unclear(series, ordered, ratio),), f"{len(runs)} runs that scatter {ratio:.2f} times", True
        )
    slow, fast = levels
    found = list(_suspects(series, slow, fast))
    found.append(_passed(series, fast))
    return HostFindings(tuple(found), f"{len(fast)} fast and {len(slow)} slow runs, {ratio:.2f} times apart", True)


def _two_levels(ordered: Sequence[HostRun]) -> tuple[list[HostRun], list[HostRun]] | None:
    """Slow and fast runs, parted at the widest gap; None where there is none, or the fast ones scatter."""
    gaps = [(ordered[at].score / ordered[at + 1].score, at + 1) for at in range(len(ordered) - 1)]
    ratio, cut = min(gaps)
    slow, fast = list(ordered[:cut]), list(ordered[cut:])
    if ratio > _GAP or fast[0].score / fast[-1].score < _LEVEL:
        return None
    return slow, fast


def _suspects(series: str, slow: Sequence[HostRun], fast: Sequence[HostRun]) -> list[Finding]:
    """One finding for each host that slow runs have in common, then one for each slow run that is left."""
    cleared = {host for run in fast for host in run.hosts}
    level = fast[len(fast) // 2]
    left = [(run, [host for host in run.hosts if host not in cleared]) for run in slow]
    found = []
    while True:
        counts = Counter(host for _, open_hosts in left for host in open_hosts)
        most = counts.most_common(2)
        # A tie in which the same runs are meant (they always ran together) names nobody.
        if not most or most[0][1] < 2 or (len(most) > 1 and most[1][1] == most[0][1]):
            break
        host = most[0][0]
        own = [run for run, open_hosts in left if host in open_hosts]
        found.append(_host(series, host, own, level, len(fast)))
        left = [(run, open_hosts) for run, open_hosts in left if host not in open_hosts]
    # Where most runs are fast, their level is what the hosts do when they are well.
    sure = len(fast) >= MIN_PEERS - 1 and len(fast) > len(slow)
    return found + [_either(series, run, open_hosts, level, sure) for run, open_hosts in left]


def _host(series: str, host: str, runs: Sequence[HostRun], level: HostRun, num_fast: int) -> Finding:
    """A host that two slow runs or more have in common, and no fast one."""
    worst = min(runs, key=lambda run: run.score)
    partners = list(dict.fromkeys(name for run in runs for name in run.hosts if name != host))
    figure = f"{worst.figure.text} with {_names([name for name in worst.hosts if name != host])}; "
    figure += f"all its {len(runs)} runs are slow"
    expected = f"{level.figure.text}, as {num_fast} run{'s' * (num_fast != 1)} of others; no fast run has it"
    step = (
        f"drain {host}, run its GPUs and NICs alone (netlayer accept --hosts with {host} alone); "
        f"then run {_names(partners)} without it"
    )
    verdict: Verdict = "FAIL" if num_fast > 1 else "WARN"
    if verdict == "WARN":
        step = (
            f"run {host} with a host of the fast run, and {_names(partners)} with one another: one fast run is little"
        )
    return Finding(verdict, host, series, figure, expected, step, worst.file, worst.figure.line)


def _either(series: str, run: HostRun, open_hosts: Sequence[str], level: HostRun, sure: bool) -> Finding:
    """A slow run alone: any of its hosts that no fast run clears, or the path between them."""
    names = list(open_hosts) or list(run.hosts)
    who = f"either of {_names(names)}" if len(names) > 1 else names[0]
    expected = f"{level.figure.text}, as the fast runs of others"
    partner = "a host of a fast run"
    if not open_hosts:
        who = f"the path between {_names(run.hosts)}"
        step = "each of its hosts is fast with others: look at the links and switches between them, then run it again"
    elif len(open_hosts) == 1:
        others = [name for name in run.hosts if name not in open_hosts]
        who = f"{names[0]}, or its path to {_names(others)}"
        step = f"run {names[0]} with {partner}: where it stays slow, the host is bad; drain nothing for this run alone"
    else:
        step = (
            f"run each of {_names(names)} with {partner}: the one that stays slow is bad; drain neither for this alone"
        )
    verdict: Verdict = "FAIL" if sure and open_hosts else "WARN"
    return Finding(verdict, who, series, run.figure.text, expected, step, run.file, run.figure.line)


def _passed(series: str, runs: Sequence[HostRun]) -> Finding:
    """Runs that are alike and the fastest there are; of one or two nobody knows that they are as fast as can be."""
    worst = min(runs, key=lambda run: run.score)
    hosts = dict.fromkeys(host for run in runs for host in run.hosts)
    verdict: Verdict = "PASS" if len(runs) >= MIN_PEERS - 1 else "NO VERDICT"
    expected = f"alike: {len(runs)} runs within {_SPREAD:g} times"
    if verdict == "NO VERDICT":
        expected = "no expectation: the fastest of these runs, too few to say that all is well with them"
    who = f"{len(hosts)} hosts in {len(runs)} runs"
    return Finding(verdict, who, series, f"worst {worst.figure.text}", expected, "", worst.file, worst.figure.line)


def _unclear(series: str, ordered: Sequence[HostRun], ratio: float) -> Finding:
    worst, best = ordered[0], ordered[-1]
    figure = (
        f"{worst.figure.text} ({_names(worst.hosts)}) to {best.figure.text} ({_names(best.hosts)}): {ratio:.2f} times"
    )
    step = "run the slow ones again, each of their hosts with a host of a fast run"
    who, expected = f"{len(ordered)} runs over several hosts", f"alike: within {_SPREAD:g} times"
    return Finding("WARN", who, series, figure, expected, step, worst.file, worst.figure.line)


def _names(hosts: Sequence[str]) -> str:
    if len(hosts) > _MAX_NAMED:
        return f"{', '.join(hosts[:_MAX_NAMED])} and {len(hosts) - _MAX_NAMED} more"
    return " and ".join([", ".join(hosts[:-1]), hosts[-1]] if len(hosts) > 1 else hosts)
