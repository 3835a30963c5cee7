"""Every pair of ranks, in rounds of disjoint pairs: data that came out wrong, nodes and links that are slow.

What stands out is measured again before anybody is accused; where ranks share cores, pair by pair. Left out: what
pairs of a round share (switches, uplinks).
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any

from bench.accept.matrix import MatrixScores, Score, find_ends, judge_matrix
from bench.accept.trial import CORRUPT, Say, Trial
from netlayer.verdict import MIN_PEERS, Finding

PHASE = "pairs"
_SERIES = ("latency", "one way", "both ways")
_MOST_AGAIN = 24
_ROUNDS_AGAIN = 4
_NUM_REFERENCES = 5
_NODE = "run the pairs of {} over another port or NIC: where they stay slow, drain it; GEMM and copy tell of its GPU"
_INSIDE = "read nvidia-smi nvlink -s and -e, and nvidia-smi -q (PCIe width) of {}; its GEMM and copy tell of itself"
Times = dict[str, dict[tuple[int, int], list[float]]]
"""By series, and by who sends to whom: microseconds."""


def measure_pairs(trial: Trial, say: Say) -> Mapping[tuple[int, int], float]:
    """All pairs of those alive. Returns the bandwidth from each to each, GB/s, for the heat map."""
    work = trial.work
    times: Times = {series: defaultdict(list) for series in _SERIES}
    for batch in range(3 if work.shared else 1):
        say(batch, 4, "")
        rows = trial.together(PHASE, "pairs", work.pairs, [trial.alive], turns=False)
        _take(rows, times, work.time_us)
        if _name_wrong(trial, rows):
            break
    say(3, 4, "again: what stands out")
    scores = _scores(trial, times)
    suspects = _suspects(trial, scores)
    if suspects and work.shared:
        scores = _confirmed(trial, scores, suspects)
    elif suspects:  # groups of their own would cost more than all pairs once more
        _take(trial.together(PHASE, "pairs", work.pairs, [trial.alive], turns=False), times, work.time_us)
        scores = _scores(trial, times)
    _conclude(trial, scores)
    return {pair: work.pairs["bytes"] / work.combined(each) / 1e3 for pair, each in times["one way"].items()}


def _confirmed(
    trial: Trial, scores: Mapping[str, MatrixScores], suspects: Sequence[tuple[int, int]]
) -> dict[str, MatrixScores]:
    """The scores, but good for what is not slow beside a few good pairs when each runs alone.

    Only pairs measured alike are compared: alone they are faster than among others that use the same cores.
    """
    work = trial.work
    good = [pair for pair in _best(scores) if pair not in suspects][:_NUM_REFERENCES]
    left, slow = list(suspects), set[tuple[str, tuple[int, int]]]()
    times: Times = {series: defaultdict(list) for series in _SERIES}
    for _ in range(_ROUNDS_AGAIN):
        rows = trial.together(PHASE, "pairs", {**work.pairs, "budget_s": 0.4}, [*left, *good], turns=True)
        _take(rows, times, work.time_us)
        slow = {
            (series, pair)
            for series, by_pair in times.items()
            for pair, each in by_pair.items()
            if work.combined(each) > work.least_ratio * _usual(trial, by_pair, good)
        }
        left = [pair for pair in left if {(series, ends) for series in _SERIES for ends in (pair, pair[::-1])} & slow]
        if not left:
            break
    return {
        series: _cleared(matrix, {pair for name, pair in slow if name == series}) for series, matrix in scores.items()
    }


def _usual(trial: Trial, by_pair: Mapping[tuple[int, int], Sequence[float]], good: Sequence[tuple[int, int]]) -> float:
    """The median of the good pairs; of all, where none of them is good."""
    known = [trial.work.combined(by_pair[pair]) for pair in good if pair in by_pair]
    return statistics.median(known or [trial.work.combined(each) for each in by_pair.values()])


def _best(scores: Mapping[str, MatrixScores]) -> list[tuple[int, int]]:
    """All pairs, those first that stand best in their worst series."""
    worst: dict[tuple[int, int], float] = {}
    for matrix in scores.values():
        for (src, dst), score in matrix.links.items():
            pair = (min(src, dst), max(src, dst))
            share = min(score.share, matrix.nodes[src].share, matrix.nodes[dst].share)
            worst[pair] = min(worst.get(pair, share), share)
    return sorted(worst, key=lambda pair: -worst[pair])


def _cleared(matrix: MatrixScores, slow: AbstractSet[tuple[int, int]]) -> MatrixScores:
    """What stood out is faulty where it was slow again, a node where most of its links were; else it was chance."""

    def judged(score: Score, again: bool) -> Score:
        return score._replace(verdict="FAIL" if again and score.verdict != "PASS" else "PASS")

    links = {pair: judged(score, pair in slow) for pair, score in matrix.links.items()}
    nodes = {}
    for node, score in matrix.nodes.items():
        others = {end for pair in slow if node in pair for end in pair} - {node}
        nodes[node] = judged(score, 2 * len(others) > len(matrix.nodes) - 1)
    return MatrixScores(nodes, links)


def _take(rows: Sequence[Mapping[str, Any]], times: Times, time_us: Callable[[Mapping[str, Any]], float]) -> None:
    for row in rows:
        low, high = row["rank"], row["peer"]
        match row["direction"]:
            case "low_to_high":
                places = [("one way", (low, high))]
            case "high_to_low":
                places = [("one way", (high, low))]
            case "latency":
                places = [("latency", (low, high)), ("latency", (high, low))]
            case _:
                places = [("both ways", (low, high)), ("both ways", (high, low))]
        for series, pair in places:
            times[series][pair].append(time_us(row))


def _name_wrong(trial: Trial, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Accuse who sends wrong data, or the link on which it happens; whether anybody was."""
    wrong: dict[tuple[int, int], int] = {}
    for row in rows:
        if row["wrong"] and row["direction"] in ("low_to_high", "high_to_low"):
            low, high = row["rank"], row["peer"]
            wrong[(low, high) if row["direction"] == "low_to_high" else (high, low)] = row["wrong"]
    for ranks, pairs in find_ends(wrong):
        words = f"{sum(wrong[pair] for pair in pairs)} wrong bytes in {len(pairs)} directions"
        who = trial.label(ranks)
        step = trial.link_step(ranks) if len(ranks) == 2 else CORRUPT.format(who)
        finding = Finding("FAIL", who, "pairs data", words, "0 wrong", step, PHASE)
        # Of a link one end goes, so that the rest can go on.
        trial.accuse(PHASE, "link" if len(ranks) == 2 else "node", ranks, finding, set_aside=ranks[:1])
    return bool(wrong)


def _scores(trial: Trial, times: Times) -> dict[str, MatrixScores]:
    found = {}
    for series, by_pair in times.items():
        speeds = {
            pair: 1 / max(trial.work.combined(each), 1e-3)
            for pair, each in by_pair.items()
            if set(pair) <= set(trial.alive)
        }
        scores = judge_matrix(speeds, trial.work.least_ratio)
        if scores is not None:
            found[series] = scores
    return found


def _suspects(trial: Trial, scores: Mapping[str, MatrixScores]) -> list[tuple[int, int]]:
    """Pairs that stand out, three of every node that does, and a few good ones beside them."""
    found: Counter[tuple[int, int]] = Counter()
    for matrix in scores.values():
        for (src, dst), score in matrix.links.items():
            if score.verdict != "PASS":
                found[min(src, dst), max(src, dst)] += 1
        for node, score in matrix.nodes.items():
            if score.verdict != "PASS":
                others = [rank for rank in trial.alive if rank != node]
                found.update((min(node, other), max(node, other)) for other in others)
    return [pair for pair, _ in found.most_common(_MOST_AGAIN)]


def _conclude(trial: Trial, scores: Mapping[str, MatrixScores]) -> None:
    if not scores:
        if not any(row["phase"] == PHASE for row in trial.rows):  # why there are none is a finding already
            return
        words = f"{MIN_PEERS} nodes are needed to tell the odd one"
        trial.findings.append(Finding(None, trial.label(trial.alive), "pairs", "measured", words, "", PHASE))
        return
    named: set[tuple[int, ...]] = set()
    for series, matrix in scores.items():
        for node, score in sorted(matrix.nodes.items(), key=lambda item: item[1].share):
            if score.verdict != "PASS" and (node,) not in named:
                named.add((node,))
                _accuse(trial, series, "node", (node,), score)
    for series, matrix in scores.items():
        for (src, dst), score in sorted(matrix.links.items(), key=lambda item: item[1].share):
            ends = (min(src, dst), max(src, dst))
            if score.verdict != "PASS" and ends not in named and not {(src,), (dst,)} & named:
                named.add(ends)
                _accuse(trial, series, "link", ends, score)
    if not named:
        series, matrix = next(iter(scores.items()))
        pair, least = min(matrix.links.items(), key=lambda item: item[1].share)
        words = f"worst {least.share:.2f} of the median ({trial.label(pair)}, {series})"
        expected = f"like the others: MAD {least.peers.mad:.3f}"
        who = f"{len(matrix.links) // 2} pairs of {len(matrix.nodes)}"
        trial.findings.append(Finding("PASS", who, "pairs", words, expected, "", PHASE))


def _accuse(trial: Trial, series: str, kind: str, ranks: tuple[int, ...], score: Score) -> None:
    who = trial.label(ranks)
    inside = len({member.node for member in trial.members}) == 1
    step = trial.link_step(ranks) if kind == "link" else (_INSIDE if inside else _NODE).format(who)
    words = f"{score.share:.3f} of the speed of its peers ({1 / max(score.share, 1e-9):.1f} times their time)"
    expected = f"peers: {score.peers.num_peers}, MAD {score.peers.mad:.3f}"
    finding = Finding(score.verdict, who, f"pairs {series}", words, expected, step, PHASE)
    trial.accuse(PHASE, kind, ranks, finding)
