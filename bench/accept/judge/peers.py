"""Peer comparison: figures of nodes, NICs, GPUs and pairs that did the same work, by median and MAD.

Peers have the same tool, series, device, NCCL version, NVLS state and number of hosts. Several runs of one node are
repeats and count once. A subject's score in a series is the median, over the points of the series, of its value divided
by its peers' median, so that a single bad point does not make an outlier. Points below 1 MiB scatter and count only if
there are no larger ones. `host_pairs` handles runs over several hosts.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from bench.accept.evidence.log import Figure, Log
from bench.accept.judge.host_pairs import HostRun, judge_host_runs
from netlayer.verdict import MIN_PEERS, Finding, Peers, Verdict, peers_of

_LARGE_BYTES = 1 << 20
_ALIKE = "where it stays behind alone too, the node is bad; where not, its link or switch port"
_STEPS = {
    "nccl-tests": "run netlayer accept --hosts with {} alone, then with one neighbour: " + _ALIKE,
    "perftest": "swap cable and transceiver of {} with a good one, then its switch port: the fault moves with the part",
    "nvbandwidth": "read nvidia-smi nvlink -s and nvidia-smi -q (PCIe width, clocks) of {}",
}
_STEP = "look at {} alone"
# Ratio of best to worst that healthy nodes with the same work do not exceed. With two or three nodes the bad one cannot
# be told; with more, it cannot either if they scatter so much that none is an outlier.
SPREAD = 1.25
_FEW_STEP = "run the same on {} nodes or more, or give --expect FILE: among {} nobody can tell which one is ill"
_SCATTER_STEP = "run each again on its own: what differs from run to run is no fault of one node"
_REPEAT_STEP = "run it again with nothing else on the node; clocks, throttling and neighbours differ from run to run"
# Facts that must be equal besides tool and series. Logs that do not tell a fact are peers of each other only.
_ALIKE_FACTS = ("device", "nccl", "nvls", "p2p_off", "graph", "hosts", "ranks")


class Measured(NamedTuple):
    """A figure with its origin.

    Args:
        file, kind: path and tool of the log.
        figure: the figure.
        node: node of the log, if known: files of one node are repeats.
        run: number of the run in the file.
    """

    file: str
    kind: str
    figure: Figure
    node: str = ""
    run: int = 0


class Series(NamedTuple):
    """Identity of a series of one run."""

    file: str
    run: int
    series: str


@dataclass(frozen=True)
class Comparison:
    """Result of the peer comparison.

    Args:
        findings: findings in no particular order.
        judged: series that were compared with peers.
        notes: for `--explain`: for each series, its peers, or why it has none.
    """

    findings: tuple[Finding, ...]
    judged: frozenset[Series]
    notes: Mapping[Series, str]


class _Score(NamedTuple):
    """Score of a subject in a series: 1 is the median of its peers, less is worse."""

    value: float
    sample: Measured
    sample_median: float


SubjectKey = tuple[str, str]
"""Node (or file, if the node is not known) and subject."""


def judge_peers(measured: Sequence[Measured]) -> Iterator[Finding]:
    """Yield a finding for each subject with enough peers, and for groups that scatter too much to judge."""
    yield from compare_peers(measured).findings


def compare_peers(measured: Sequence[Measured]) -> Comparison:
    """Compare every figure with those of subjects that did the same work."""
    findings: list[Finding] = []
    judged: set[Series] = set()
    notes: dict[Series, str] = {}
    for (kind, series, *_), group in _groups(measured).items():
        members = {Series(one.file, one.run, series) for one in group}
        if missing_facts := _missing_facts(group[0]):
            notes |= dict.fromkeys(members, f"no peers: the log does not say its {' and '.join(missing_facts)}")
            continue
        group_findings, note, is_judged = _judge_group(kind, series, group)
        findings += group_findings
        notes |= dict.fromkeys(members, note)
        judged |= members if is_judged else set()
    return Comparison(tuple(findings), frozenset(judged), notes)


def _judge_group(kind: str, series: str, group: Sequence[Measured]) -> tuple[list[Finding], str, bool]:
    """Judge one group of comparable measurements; return findings, a note on the peers, and True if it was judged."""
    scores = _scores(group)
    repeats = list(_unsteady_repeats(series, group))
    if kind == "nccl-tests" and len(group[0].figure.parts) > 1:
        runs = [HostRun(score.sample.figure.parts, score.value, score.sample.file, score.sample.figure,
                        score.sample_median) for score in scores.values()]  # fmt: skip
        comparison = judge_host_runs(series, runs)
        return [*comparison.findings, *repeats], comparison.note, comparison.judged
    if len(scores) < MIN_PEERS:
        spread = _spread(series, scores)
        others = (
            f"{len(scores) - 1} other{'s' * (len(scores) != 2)} did the same work" if len(scores) > 1 else "no peers"
        )
        note = f"{others}; {MIN_PEERS} alike are needed to tell the odd one"
        return [*spread, *repeats], note, bool(spread or repeats)
    peers = peers_of(score.value for score in scores.values())
    verdicts = {who: peers.judge(score.value) for who, score in scores.items()}
    findings = {who: _finding(kind, series, scores[who], peers, word) for who, word in verdicts.items()}
    note = f"{len(scores)} peers: median score {peers.median:.3f}, MAD {peers.mad:.3f}"
    healthy = {who: score for who, score in scores.items() if verdicts[who] == "PASS"}
    if _ratio(healthy) > SPREAD and kind != "nvbandwidth":  # its matrices mix different kinds of paths
        outliers = [findings[who] for who in findings if verdicts[who] != "PASS"]
        return [*outliers, _scattered(series, healthy), *repeats], note, True
    return [*_merge_findings(findings, scores), *repeats], note, True


def judge_traits(logs: Mapping[str, Log]) -> Iterator[Finding]:
    """Yield a warning for each version, limit and so on that differs from the majority's."""
    by_name: dict[str, dict[tuple[str, str], str]] = defaultdict(dict)
    for file, log in logs.items():
        for (name, who), value in log.traits.items():
            by_name[name][file, who] = value
    for name, values in by_name.items():
        usual, count = Counter(values.values()).most_common(1)[0]
        if len(values) < MIN_PEERS or 2 * count <= len(values):
            continue
        for (file, who), value in values.items():
            if value != usual:
                expected = f"{usual}, as {count} of {len(values)} have"
                step = f"bring {who} to what the others have, or say why it differs"
                yield Finding("WARN", who, name.rpartition("/")[2], value, expected, step, file)


def _groups(measured: Iterable[Measured]) -> dict[tuple[Any, ...], list[Measured]]:
    """Group measurements by tool, series and `_ALIKE_FACTS`; keep only large messages if there are any."""
    groups: dict[tuple[Any, ...], list[Measured]] = defaultdict(list)
    for one in measured:
        facts = one.figure.facts
        alike = tuple(facts.get(key) for key in _ALIKE_FACTS)
        groups[(one.kind, one.figure.series, len(one.figure.parts), *alike)].append(one)
    large_only = {
        key: [one for one in group if int(one.figure.facts.get("bytes", _LARGE_BYTES)) >= _LARGE_BYTES]
        for key, group in groups.items()
    }
    return {key: large_only[key] or group for key, group in groups.items()}


def _missing_facts(one: Measured) -> list[str]:
    """Return the facts that a bus bandwidth needs to be comparable and that its log does not tell."""
    facts = one.figure.facts
    needed = ("collective", "device", "ranks") if facts.get("quantity") == "bus_bw_gbs" else ()
    return [key for key in needed if key not in facts]


def _subject_of(one: Measured) -> SubjectKey:
    if one.kind == "nccl-tests" and len(one.figure.parts) > 1:  # the same hosts in any order are a repeat
        return " ".join(sorted(one.figure.parts)), ""
    return one.node or one.file, one.figure.subject


def _scores(group: Sequence[Measured]) -> dict[SubjectKey, _Score]:
    """Compute scores by node and subject; a point measured several times (repeats) counts with its median."""
    points: dict[str, dict[SubjectKey, list[Measured]]] = defaultdict(lambda: defaultdict(list))
    for one in group:
        points[one.figure.at][_subject_of(one)].append(one)
    ratios: dict[SubjectKey, list[_Score]] = defaultdict(list)
    for subjects in points.values():
        values = {who: statistics.median(one.figure.value for one in ones) for who, ones in subjects.items()}
        middle = statistics.median(values.values())
        for who, value in values.items():
            # The repeat nearest to the median represents them.
            sample = min(subjects[who], key=lambda one: abs(one.figure.value - value))
            ratio = value / middle if sample.figure.higher_is_better else middle / value
            ratios[who].append(_Score(ratio, sample, middle))
    # The last point has the largest size, since sizes rise in every tool; it is the one to print.
    return {
        who: _Score(statistics.median(score.value for score in scores), scores[-1].sample, scores[-1].sample_median)
        for who, scores in ratios.items()
    }


def _ratio(scores: Mapping[SubjectKey, _Score]) -> float:
    values = [score.value for score in scores.values()]
    return max(values) / min(values) if values else 1.0


def _ends(scores: Mapping[SubjectKey, _Score]) -> tuple[_Score, _Score]:
    ordered = sorted(scores.values(), key=lambda score: score.value)
    return ordered[0], ordered[-1]


def _spread(series: str, scores: Mapping[SubjectKey, _Score]) -> list[Finding]:
    """Warn of two or three subjects that differ too much: one is bad, but it cannot be told which."""
    ratio = _ratio(scores)
    if len(scores) < 2 or ratio <= SPREAD:
        return []
    worst, best = _ends(scores)
    names = " and ".join(dict.fromkeys((worst.sample.figure.subject, best.sample.figure.subject)))
    figure = f"{worst.sample.figure.text}, the best {best.sample.figure.text}: {ratio:.2f} times"
    expected = f"alike: within {SPREAD:g} times; too few to tell which one is ill"
    step = _FEW_STEP.format(MIN_PEERS, len(scores))
    sample = worst.sample
    return [Finding("WARN", names, series, figure, expected, step, sample.file, sample.figure.line)]


def _scattered(series: str, scores: Mapping[SubjectKey, _Score]) -> Finding:
    """Return one warning for a group that scatters without an outlier, instead of a PASS for each member."""
    worst, best = _ends(scores)
    figure = f"{worst.sample.figure.text} ({worst.sample.figure.subject}) to {best.sample.figure.text} "
    figure += f"({best.sample.figure.subject}): {_ratio(scores):.2f} times"
    expected = f"alike: within {SPREAD:g} times; they scatter, without an outlier"
    sample = worst.sample
    who = f"{len(scores)} like {sample.figure.subject}"
    return Finding("WARN", who, series, figure, expected, _SCATTER_STEP, sample.file, sample.figure.line)


def _unsteady_repeats(series: str, group: Sequence[Measured]) -> Iterator[Finding]:
    """Yield a warning for each node whose own repeats differ too much."""
    runs: dict[SubjectKey, dict[tuple[str, int], dict[str, Measured]]] = defaultdict(lambda: defaultdict(dict))
    for one in group:
        runs[_subject_of(one)][one.file, one.run].setdefault(one.figure.at, one)
    for by_run in runs.values():
        if len(by_run) < 2:
            continue
        common = set.intersection(*(set(points) for points in by_run.values()))
        ratios = {
            at: max(points[at].figure.value for points in by_run.values())
            / min(points[at].figure.value for points in by_run.values())
            for at in common
        }
        if not ratios or statistics.median(ratios.values()) <= SPREAD:
            continue
        at = max(ratios, key=lambda name: ratios[name])
        lowest = min((points[at] for points in by_run.values()), key=lambda one: one.figure.value)
        figure = f"{lowest.figure.text}, another run {ratios[at]:.2f} times that"
        subject, expected = lowest.figure.subject, f"{len(by_run)} runs within {SPREAD:g} times"
        check = f"{series}: repeats"
        yield Finding("WARN", subject, check, figure, expected, _REPEAT_STEP, lowest.file, lowest.figure.line)


def _finding(kind: str, series: str, score: _Score, peers: Peers, word: Verdict) -> Finding:
    file, figure = score.sample.file, score.sample.figure
    expected = (
        f"peers: median {score.sample_median:.4g} of {peers.num_peers}; "
        f"score {score.value:.3f}, theirs {peers.median:.3f}, MAD {peers.mad:.3f}"
    )
    step = "" if word == "PASS" else _STEPS.get(kind, _STEP).format(" and ".join(figure.parts) or figure.subject)
    return Finding(
        word,
        figure.subject,
        series,
        figure.text,
        expected,
        step,
        file,
        figure.line,
    )


def _merge_findings(findings: Mapping[SubjectKey, Finding], scores: Mapping[SubjectKey, _Score]) -> Iterator[Finding]:
    """Merge findings: bad pairs with a common part become one finding on that part (see `_common_part`).

    Those that passed become one finding for each node.
    """
    remaining = {who: finding for who, finding in findings.items() if finding.verdict != "PASS"}
    own = Counter((who[0], part) for who, score in scores.items() for part in _parts(score))
    while part := _common_part(remaining, scores, own):
        node, name = part
        pairs = [who for who in remaining if who[0] == node and name in scores[who].sample.figure.parts]
        worst = min(pairs, key=lambda who: scores[who].value)
        text = f"{remaining[worst].figure}, {worst[1]}; {len(pairs)} pairs of it are slow"
        step = _STEPS.get(scores[worst].sample.kind, _STEP).format(name)
        yield replace(remaining[worst], subject=name, figure=text, next_step=step)
        remaining = {who: finding for who, finding in remaining.items() if who not in pairs}
    yield from remaining.values()
    passed: dict[str, list[SubjectKey]] = defaultdict(list)
    for who, finding in findings.items():
        if finding.verdict == "PASS":
            passed[who[0]].append(who)
    for members in passed.values():
        lowest = findings[min(members, key=lambda who: scores[who].value)]
        yield (
            lowest
            if len(members) == 1
            else replace(lowest, subject=f"{len(members)} like {members[0][1]}", figure=f"worst {lowest.figure}")
        )


def _common_part(
    bad: Mapping[SubjectKey, Finding],
    scores: Mapping[SubjectKey, _Score],
    own: Mapping[tuple[str, str], int],
) -> tuple[str, str] | None:
    """Return the part in most of the bad pairs, if more than half of its own pairs and at least two are bad."""
    counts = Counter((who[0], part) for who in bad for part in _parts(scores[who]))
    part, count = max(counts.items(), key=lambda item: item[1], default=(("", ""), 0))
    return part if count >= 2 and 2 * count > own[part] else None


def _parts(score: _Score) -> tuple[str, ...]:
    """Return the two ends of a pair; empty for a subject that is not a pair."""
    parts = score.sample.figure.parts
    return parts if len(parts) > 1 else ()
