"""Group testing of hosts by runs over several hosts: slow runs with a common host, minus hosts of fast runs.

A run is as slow as its slowest host or link. So every host of a fast run is healthy, and one of the other hosts of a
slow run, or the path between them, is bad. Two slow runs with a common host point at that host. A single slow run
cannot tell which of its remaining hosts is bad, so none is drained for it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from bench.accept.evidence.log import Figure
from netlayer.verdict import MIN_PEERS, Finding, Verdict

# Slow and fast runs must form two levels: a gap between neighbours in the order of speed (`_GAP`), and fast runs close
# to each other (`_LEVEL`). Runs that scatter without a gap are not judged.
_GAP = 0.87
_LEVEL = 0.85
# Ratio of best to worst among healthy nodes.
_SPREAD = 1.25
_MAX_NAMED = 4


class HostRun(NamedTuple):
    """One run over several hosts.

    Args:
        hosts: hosts of the run.
        score: its speed divided by the median of all runs; median over the points of the series.
        file, figure: its file, and the figure to print, at the largest message.
        median: median of all runs at that point.
    """

    hosts: tuple[str, ...]
    score: float
    file: str
    figure: Figure
    median: float


class HostFindings(NamedTuple):
    """Findings, a note on the comparison for `--explain`, and True if the runs were judged."""

    findings: tuple[Finding, ...]
    note: str
    judged: bool


def judge_host_runs(series: str, runs: Sequence[HostRun]) -> HostFindings:
    """Judge hosts by their runs over several hosts."""
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
    findings = list(_suspects(series, slow, fast))
    findings.append(_passed(series, fast))
    return HostFindings(tuple(findings), f"{len(fast)} fast and {len(slow)} slow runs, {ratio:.2f} times apart", True)


def _two_levels(ordered: Sequence[HostRun]) -> tuple[list[HostRun], list[HostRun]] | None:
    """Split runs in slow and fast ones at the widest gap; None if there is no gap, or the fast ones scatter."""
    gaps = [(ordered[at].score / ordered[at + 1].score, at + 1) for at in range(len(ordered) - 1)]
    ratio, cut = min(gaps)
    slow, fast = list(ordered[:cut]), list(ordered[cut:])
    if ratio > _GAP or fast[0].score / fast[-1].score < _LEVEL:
        return None
    return slow, fast


def _suspects(series: str, slow: Sequence[HostRun], fast: Sequence[HostRun]) -> list[Finding]:
    """Return one finding for each host that slow runs have in common, then one for each unexplained slow run."""
    cleared = {host for run in fast for host in run.hosts}
    level = fast[len(fast) // 2]
    remaining = [(run, [host for host in run.hosts if host not in cleared]) for run in slow]
    findings = []
    while True:
        counts = Counter(host for _, open_hosts in remaining for host in open_hosts)
        commonest = counts.most_common(2)
        # Hosts that always ran together cannot be told apart: a tie names none.
        if not commonest or commonest[0][1] < 2 or (len(commonest) > 1 and commonest[1][1] == commonest[0][1]):
            break
        host = commonest[0][0]
        own = [run for run, open_hosts in remaining if host in open_hosts]
        findings.append(_host_finding(series, host, own, level, len(fast)))
        remaining = [(run, open_hosts) for run, open_hosts in remaining if host not in open_hosts]
    # If most runs are fast, their level is that of healthy hosts.
    is_certain = len(fast) >= MIN_PEERS - 1 and len(fast) > len(slow)
    return findings + [_unresolved(series, run, open_hosts, level, is_certain) for run, open_hosts in remaining]


def _host_finding(series: str, host: str, runs: Sequence[HostRun], level: HostRun, num_fast: int) -> Finding:
    """Return the finding for a host that is in at least two slow runs and in no fast one."""
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


def _unresolved(series: str, run: HostRun, open_hosts: Sequence[str], level: HostRun, is_certain: bool) -> Finding:
    """Return the finding for a single slow run: a host of it without a fast run is bad, or the path between them."""
    names = list(open_hosts) or list(run.hosts)
    subject = f"either of {_names(names)}" if len(names) > 1 else names[0]
    expected = f"{level.figure.text}, as the fast runs of others"
    fast_host = "a host of a fast run"
    if not open_hosts:
        subject = f"the path between {_names(run.hosts)}"
        step = "each of its hosts is fast with others: look at the links and switches between them, then run it again"
    elif len(open_hosts) == 1:
        others = [name for name in run.hosts if name not in open_hosts]
        subject = f"{names[0]}, or its path to {_names(others)}"
        step = (
            f"run {names[0]} with {fast_host}: where it stays slow, the host is bad; drain nothing for this run alone"
        )
    else:
        step = f"run each of {_names(names)} with {fast_host}: "
        step += "the one that stays slow is bad; drain neither for this alone"
    verdict: Verdict = "FAIL" if is_certain and open_hosts else "WARN"
    return Finding(verdict, subject, series, run.figure.text, expected, step, run.file, run.figure.line)


def _passed(series: str, runs: Sequence[HostRun]) -> Finding:
    """Return PASS for the group of fastest runs; NO VERDICT for one or two, whose speed may not be the normal one."""
    worst = min(runs, key=lambda run: run.score)
    hosts = dict.fromkeys(host for run in runs for host in run.hosts)
    verdict: Verdict = "PASS" if len(runs) >= MIN_PEERS - 1 else "NO VERDICT"
    expected = f"alike: {len(runs)} runs within {_SPREAD:g} times"
    if verdict == "NO VERDICT":
        expected = "no expectation: the fastest of these runs, too few to say that all is well with them"
    subject = f"{len(hosts)} hosts in {len(runs)} runs"
    return Finding(verdict, subject, series, f"worst {worst.figure.text}", expected, "", worst.file, worst.figure.line)


def _unclear(series: str, ordered: Sequence[HostRun], ratio: float) -> Finding:
    worst, best = ordered[0], ordered[-1]
    figure = (
        f"{worst.figure.text} ({_names(worst.hosts)}) to {best.figure.text} ({_names(best.hosts)}): {ratio:.2f} times"
    )
    step = "run the slow ones again, each of their hosts with a host of a fast run"
    subject, expected = f"{len(ordered)} runs over several hosts", f"alike: within {_SPREAD:g} times"
    return Finding("WARN", subject, series, figure, expected, step, worst.file, worst.figure.line)


def _names(hosts: Sequence[str]) -> str:
    if len(hosts) > _MAX_NAMED:
        return f"{', '.join(hosts[:_MAX_NAMED])} and {len(hosts) - _MAX_NAMED} more"
    return " and ".join([", ".join(hosts[:-1]), hosts[-1]] if len(hosts) > 1 else hosts)
