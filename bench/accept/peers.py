"""Figures held against their peers: nodes, NICs, GPUs and pairs that did the same work, by median and MAD.

A subject's score in a series is the median, over the points of the series, of its value over that of its peers: one bad
point accuses nobody. Points below 1 MiB count only where there are no larger ones, for they scatter.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from bench.accept.evidence.log import Figure, Log
from netlayer.verdict import MIN_PEERS, Finding, Peers, Verdict, peers_of

_LARGE_BYTES = 1 << 20
_ALIKE = "where it stays behind alone too, the node is bad; where not, its link or switch port"
_STEPS = {
    "nccl-tests": "run netlayer accept --hosts with {} alone, then with one neighbour: " + _ALIKE,
    "perftest": "swap cable and transceiver of {} with a good one, then its switch port: the fault moves with the part",
    "nvbandwidth": "read nvidia-smi nvlink -s and nvidia-smi -q (PCIe width, clocks) of {}",
}
_STEP = "look at {} alone"


class Measured(NamedTuple):
    """A figure and whose log it stands in."""

    file: str
    kind: str
    figure: Figure


class _Score(NamedTuple):
    """How a subject stands in a series: 1 is the median of its peers, less is worse."""

    value: float
    sample: Measured
    sample_median: float


def judge_peers(measured: Sequence[Measured]) -> Iterator[Finding]:
    """A finding for each subject that has enough peers."""
    for (kind, series, _), group in _series(measured).items():
        scores = _scores(group)
        if len(scores) < MIN_PEERS:
            continue
        peers = peers_of(score.value for score in scores.values())
        verdicts = {who: peers.judge(score.value) for who, score in scores.items()}
        findings = {who: _finding(kind, series, scores[who], peers, word) for who, word in verdicts.items()}
        yield from _blamed(findings, scores)


def judge_traits(logs: Mapping[str, Log]) -> Iterator[Finding]:
    """Versions, limits and so on that differ from what most have."""
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


def _series(measured: Sequence[Measured]) -> dict[tuple[str, str, str], list[Measured]]:
    """By tool, series and device: other GPUs are no peers."""
    groups: dict[tuple[str, str, str], list[Measured]] = defaultdict(list)
    for one in measured:
        groups[one.kind, one.figure.series, str(one.figure.facts.get("device", ""))].append(one)
    large = {
        key: [one for one in group if int(one.figure.facts.get("bytes", _LARGE_BYTES)) >= _LARGE_BYTES]
        for key, group in groups.items()
    }
    return {key: large[key] or group for key, group in groups.items()}


def _scores(group: Sequence[Measured]) -> dict[tuple[str, str], _Score]:
    """By file and subject; where a point was measured twice, its median counts."""
    points: dict[str, dict[tuple[str, str], list[Measured]]] = defaultdict(lambda: defaultdict(list))
    for one in group:
        points[one.figure.at][one.file, one.figure.subject].append(one)
    found: dict[tuple[str, str], list[_Score]] = defaultdict(list)
    for subjects in points.values():
        values = {who: statistics.median(one.figure.value for one in ones) for who, ones in subjects.items()}
        middle = statistics.median(values.values())
        for who, value in values.items():
            sample = subjects[who][0]
            ratio = value / middle if sample.figure.higher_is_better else middle / value
            found[who].append(_Score(ratio, sample, middle))
    # The largest point is what is shown: sizes rise in every tool.
    return {
        who: _Score(statistics.median(score.value for score in scores), scores[-1].sample, scores[-1].sample_median)
        for who, scores in found.items()
    }


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


def _blamed(findings: Mapping[tuple[str, str], Finding], scores: Mapping[tuple[str, str], _Score]) -> Iterator[Finding]:
    """The findings, but one for a part that is in most of the bad pairs and whose pairs are mostly bad.

    Those that passed come as one finding for each file.
    """
    left = {who: finding for who, finding in findings.items() if finding.verdict != "PASS"}
    own = Counter((who[0], part) for who, score in scores.items() for part in _ends(score))
    while part := _common_part(left, scores, own):
        file, name = part
        pairs = [who for who in left if who[0] == file and name in scores[who].sample.figure.parts]
        worst = min(pairs, key=lambda who: scores[who].value)
        words = f"{left[worst].figure}, {worst[1]}; {len(pairs)} pairs of it are slow"
        step = _STEPS.get(scores[worst].sample.kind, _STEP).format(name)
        yield replace(left[worst], subject=name, figure=words, next_step=step)
        left = {who: finding for who, finding in left.items() if who not in pairs}
    yield from left.values()
    passed: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for who, finding in findings.items():
        if finding.verdict == "PASS":
            passed[who[0]].append(who)
    for members in passed.values():
        least = findings[min(members, key=lambda who: scores[who].value)]
        yield (
            least
            if len(members) == 1
            else replace(least, subject=f"{len(members)} like {members[0][1]}", figure=f"worst {least.figure}")
        )


def _common_part(
    bad: Mapping[tuple[str, str], Finding],
    scores: Mapping[tuple[str, str], _Score],
    own: Mapping[tuple[str, str], int],
) -> tuple[str, str] | None:
    """The part in most of the bad pairs, where more than half of its own pairs, and at least two, are bad."""
    counts = Counter((who[0], part) for who in bad for part in _ends(scores[who]))
    part, count = max(counts.items(), key=lambda item: item[1], default=(("", ""), 0))
    return part if count >= 2 and 2 * count > own[part] else None


def _ends(score: _Score) -> tuple[str, ...]:
    """The two ends of a pair; what has one end only is its own subject."""
    parts = score.sample.figure.parts
    return parts if len(parts) > 1 else ()
