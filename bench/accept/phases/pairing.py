"""Pairs phase: every pair of ranks in rounds of disjoint pairs; finds wrong data, slow nodes and slow links.

If ranks share cores, outliers are measured again, in turns with good pairs (`confirm`), before they are flagged. GPUs
use series instead (`gpu_pairs`). What the pairs of a round share (switches, uplinks) is not separated.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from bench.accept.phases.confirm import MOST_CONTROLS, Evidence, confirm, inconclusive, open_of, state_of
from bench.accept.phases.gpu_pairs import PHASE, Pair, measure_gpu_pairs, places
from bench.accept.phases.matrix import MatrixScores, Score, find_ends, judge_matrix
from bench.accept.phases.trial import CORRUPT, Say, Trial
from netlayer.verdict import MIN_PEERS, Finding

_SERIES = ("latency", "one way", "both ways")
_BATCHES = 3
_MOST_AGAIN = 24
_LEAST_GOOD = 3
_NODE = "run the pairs of {} over another port or NIC: where they stay slow, drain it; GEMM and copy tell of its GPU"
_INSIDE = "read nvidia-smi nvlink -s and -e, and nvidia-smi -q (PCIe width) of {}; its GEMM and copy tell of itself"
Times = dict[str, dict[Pair, list[float]]]
"""Times in microseconds, by series and (source, destination)."""
Proof = Mapping[tuple[Pair, str], Evidence]
"""Evidence on pairs that were measured again, by pair (lower rank first) and direction."""


def measure_pairs(trial: Trial, say: Say) -> Mapping[tuple[int, int], float]:
    """Measure all pairs of ranks alive; return the bandwidth from each to each in GB/s, for the heat map."""
    work = trial.work
    if not work.shared:
        return measure_gpu_pairs(trial, say, partial(_flag_corrupt, trial))
    times: Times = {series: defaultdict(list) for series in _SERIES}
    for batch in range(_BATCHES):
        say(batch, 4, "")
        rows = trial.together(PHASE, "pairs", work.pairs, [trial.alive], turns=False)
        _add_times(rows, times, work.time_us)
        if _flag_corrupt(trial, rows):
            break
    say(3, 4, "again: what stands out")
    scores = _scores(trial, times)
    suspects = _suspects(trial, scores)
    proof: Proof = {}
    if suspects:
        proof = _confirm(trial, scores, suspects)
        scores = {series: _apply_proof(series, matrix, proof) for series, matrix in scores.items()}
    _conclude(trial, scores, proof)
    return {pair: work.pairs["bytes"] / work.combined(each) / 1e3 for pair, each in times["one way"].items()}


def _confirm(trial: Trial, scores: Mapping[str, MatrixScores], suspects: Sequence[Pair]) -> Proof:
    """Measure the suspects again, in turns with the best pairs as controls (at least `_LEAST_GOOD` of them)."""
    best = _best(scores)
    good = [pair for pair in best if pair not in suspects][:MOST_CONTROLS]
    good = good if len(good) >= _LEAST_GOOD else best[:_LEAST_GOOD]
    suspects = [pair for pair in suspects if pair not in good]

    def measure(order: Sequence[Pair]) -> dict[Pair, dict[str, float]]:
        args = {**trial.work.pairs, "budget_s": 0.4 * len(order), "only": order}
        times: dict[Pair, dict[str, float]] = defaultdict(dict)
        for row in trial.together(PHASE, "pairs", args, [trial.alive], turns=False):
            times[row["rank"], row["peer"]][row["direction"]] = trial.work.time_us(row)
        return times

    return confirm(suspects, good, measure, trial.work.least_ratio, trial.work.turn_s)


def _best(scores: Mapping[str, MatrixScores]) -> list[tuple[int, int]]:
    """Return all pairs, sorted by their worst score, best first."""
    worst: dict[tuple[int, int], float] = {}
    for matrix in scores.values():
        for (src, dst), score in matrix.links.items():
            pair = (min(src, dst), max(src, dst))
            share = min(score.share, matrix.nodes[src].share, matrix.nodes[dst].share)
            worst[pair] = min(worst.get(pair, share), share)
    return sorted(worst, key=lambda pair: -worst[pair])


def _apply_proof(series: str, matrix: MatrixScores, proof: Proof) -> MatrixScores:
    """Keep only confirmed faults: links that were slow again, and slow nodes most of whose links were.

    A link's share is taken from the repeated turns, since pairs are faster alone than among others on the same cores.
    """
    shares = {
        ends: 1 / evidence.ratio
        for (pair, direction), evidence in proof.items()
        if evidence.state == "slow"
        for name, ends in places(direction, *pair)
        if name == series
    }
    slow = {pair for pair, _ in proof if state_of(proof, pair) == "slow"}
    links = {
        ends: score._replace(verdict="FAIL" if ends in shares else "PASS", share=shares.get(ends, score.share))
        for ends, score in matrix.links.items()
    }
    nodes = {}
    for node, score in matrix.nodes.items():
        again = score.verdict != "PASS" and 2 * sum(node in pair for pair in slow) > len(matrix.nodes) - 1
        nodes[node] = score._replace(verdict="FAIL" if again else "PASS")
    return MatrixScores(nodes, links)


def _add_times(rows: Sequence[Mapping[str, Any]], times: Times, time_us: Callable[[Mapping[str, Any]], float]) -> None:
    for row in rows:
        for series, pair in places(row["direction"], row["rank"], row["peer"]):
            times[series][pair].append(time_us(row))


def _flag_corrupt(trial: Trial, rows: Sequence[Mapping[str, Any]]) -> bool:
    """Flag ranks that send wrong data, or links that corrupt it; return True if there are any."""
    wrong: dict[tuple[int, int], int] = {}
    for row in rows:
        if row["wrong"] and row["direction"] in ("low_to_high", "high_to_low"):
            low, high = row["rank"], row["peer"]
            wrong[(low, high) if row["direction"] == "low_to_high" else (high, low)] = row["wrong"]
    for ranks, pairs in find_ends(wrong):
        figure = f"{sum(wrong[pair] for pair in pairs)} wrong bytes in {len(pairs)} directions"
        label = trial.label(ranks)
        step = trial.link_step(ranks) if len(ranks) == 2 else CORRUPT.format(label)
        finding = Finding("FAIL", label, "pairs data", figure, "0 wrong", step, PHASE)
        # One end of a link is excluded, so that the rest can continue.
        trial.flag(PHASE, "link" if len(ranks) == 2 else "node", ranks, finding, exclude=ranks[:1])
    return bool(wrong)


def _scores(trial: Trial, times: Times) -> dict[str, MatrixScores]:
    scores = {}
    for series, by_pair in times.items():
        speeds = {
            pair: 1 / max(trial.work.combined(each), 1e-3)
            for pair, each in by_pair.items()
            if set(pair) <= set(trial.alive)
        }
        matrix = judge_matrix(speeds, trial.work.least_ratio)
        if matrix is not None:
            scores[series] = matrix
    return scores


def _suspects(trial: Trial, scores: Mapping[str, MatrixScores]) -> list[tuple[int, int]]:
    """Return outlier pairs and all pairs of outlier nodes; those that are so in most series first."""
    counts: Counter[tuple[int, int]] = Counter()
    for matrix in scores.values():
        for (src, dst), score in matrix.links.items():
            if score.verdict != "PASS":
                counts[min(src, dst), max(src, dst)] += 1
        for node, score in matrix.nodes.items():
            if score.verdict != "PASS":
                others = [rank for rank in trial.alive if rank != node]
                counts.update((min(node, other), max(node, other)) for other in others)
    return [pair for pair, _ in counts.most_common(_MOST_AGAIN)]


def _conclude(trial: Trial, scores: Mapping[str, MatrixScores], proof: Proof) -> None:
    if not scores:
        if not any(row["phase"] == PHASE for row in trial.rows):  # a finding has the reason already
            return
        expected = f"{MIN_PEERS} nodes are needed to tell the odd one"
        trial.findings.append(Finding(None, trial.label(trial.alive), "pairs", "measured", expected, "", PHASE))
        return
    # A rank whose own process is slow or paused slows whatever pair it is in: no verdict on its links.
    slow_ranks = {
        (rank,) for one in trial.suspects if (one.verdict, one.kind) == ("FAIL", "node") for rank in one.ranks
    }
    flagged: set[tuple[int, ...]] = set()
    for series, matrix in scores.items():
        for node, score in sorted(matrix.nodes.items(), key=lambda item: item[1].share):
            if score.verdict != "PASS" and (node,) not in flagged:
                flagged.add((node,))
                _flag(trial, series, "node", (node,), score, proof)
    for series, matrix in scores.items():
        for (src, dst), score in sorted(matrix.links.items(), key=lambda item: item[1].share):
            ends = (min(src, dst), max(src, dst))
            if score.verdict != "PASS" and ends not in flagged and not {(src,), (dst,)} & (flagged | slow_ranks):
                flagged.add(ends)
                _flag(trial, series, "link", ends, score, proof)
    trial.findings += _remaining_findings(trial, scores, proof, flagged, slow_ranks)


def _remaining_findings(
    trial: Trial,
    scores: Mapping[str, MatrixScores],
    proof: Proof,
    flagged: set[tuple[int, ...]],
    slow_ranks: set[tuple[int]],
) -> list[Finding]:
    """Return a finding on undecided pairs of ranks that are not slow themselves, or a PASS if there is no outlier."""
    undecided = [pair for pair in open_of(proof) if not {pair, pair[:1], pair[1:]} & (flagged | slow_ranks)]
    if undecided:
        return [inconclusive(trial.alive, PHASE, "pairs", [*map(trial.label, undecided)], proof.values())]
    if flagged:
        return []
    series, matrix = next(iter(scores.items()))
    judged = {ends: score for ends, score in matrix.links.items() if not {ends[:1], ends[1:]} & slow_ranks}
    if not judged:
        return []
    pair, worst = min(judged.items(), key=lambda item: item[1].share)
    figure = f"worst {worst.share:.2f} of the median ({trial.label(pair)}, {series})"
    expected = f"like the others: MAD {worst.peers.mad:.3f}"
    if slow_ranks:
        expected += f"; without {', '.join(trial.label(ranks) for ranks in sorted(slow_ranks))}, slow itself"
    subjects = f"{len(judged) // 2} pairs of {len(matrix.nodes) - len(slow_ranks & {(node,) for node in matrix.nodes})}"
    return [Finding("PASS", subjects, "pairs", figure, expected, "", PHASE)]


def _flag(
    trial: Trial, series: str, kind: str, ranks: tuple[int, ...], score: Score, proof: Proof
) -> None:  # fmt: skip
    label = trial.label(ranks)
    inside = len({member.node for member in trial.members}) == 1
    step = trial.link_step(ranks) if kind == "link" else (_INSIDE if inside else _NODE).format(label)
    figure = f"{score.share:.3f} of the speed of its peers ({1 / max(score.share, 1e-9):.1f} times their time)"
    again = [one for (pair, _), one in proof.items() if one.state == "slow" and set(ranks) <= set(pair)]
    expected = f"peers: {score.peers.num_peers}, MAD {score.peers.mad:.3f}"
    expected += f"; tried again: {max(again, key=lambda one: one.ratio).description}" if again else ""
    finding = Finding(score.verdict, label, f"pairs {series}", figure, expected, step, PHASE)
    trial.flag(PHASE, kind, ranks, finding)
